"""The exit code of a command: done, a user error, interrupted, or a bug of loadgen.

`run_to_exit_code` is the only place that turns an exception into an exit code.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from asyncio import events, runners
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from loadgen.cli import signals
from loadgen.core.errors import BUG, INTERRUPTED, USAGE, CombinedError, LoadgenError, UserError

_PASSWORD_IN_URL = r"(:/{1,2})[^/\s@]+@"
_RESEND_DELAY_S = 0.001
"""Time until a signal that arrived while an event loop was started or closed is sent again."""
_NO_MEMORY_MESSAGES = (  # of the loader of libraries and of libraries that start threads
    "failed to map segment",
    "cannot allocate memory",
    "can't start new thread",
    "Failed to launch worker thread",
)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOST_ERRORS = (
    *_TOO_MANY_FILES,
    *_NO_SPACE,
    errno.EACCES,
    errno.EEXIST,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENODEV,
    errno.ENOENT,
    errno.ENOMEM,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
)
"""Errors of a file system or a limit of the host, which are no bug of loadgen."""


def run_to_exit_code(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. Errors are printed on stderr.

    An error for the user has an exit code of its own, a signal gives INTERRUPTED, and a file,
    memory or another resource that the host refuses gives USAGE. Any other exception is a bug, for
    which the traceback is stored in a file.
    """
    _interrupt_on_signals()
    try:
        return command()
    except (LoadgenError, CombinedError) as error:
        print(_hide_passwords(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _report_interruption()
    except Exception as error:
        # Python 3.11 raises a RuntimeError if a signal arrives while a class is created.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _report_interruption()
        host_error = _to_host_error(error)
        if host_error is None:
            return _report_bug(error)
        print(host_error, file=sys.stderr)
        return USAGE


def _hide_passwords(text: str) -> str:
    """Hide the passwords of URLs, because the output of a CI job is read by many."""
    return re.sub(_PASSWORD_IN_URL, r"\1***@", text)


def _report_interruption() -> int:
    """Tell the user that the command was interrupted, and return the exit code."""
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _report_bug(error: Exception) -> int:
    """Write the traceback to a file, ask the user to report it, and return the exit code."""
    with tempfile.NamedTemporaryFile(
        "w",
        encoding="utf-8",
        errors="backslashreplace",
        prefix="loadgen-bug-",
        suffix=".txt",
        delete=False,
    ) as file:
        traceback.print_exception(error, file=file)

    summary = f"error: internal error in loadgen: {type(error).__name__}: {error}"
    print(f"{summary}\n  --> {file.name}", file=sys.stderr)
    print("hint: this is a bug; please report it with that file", file=sys.stderr)

    return BUG


class _SignalHandler:
    """Raises KeyboardInterrupt on the first termination signal of a command.

    While an event loop runs, the exception is raised in a callback of its own: raised in the middle
    of another callback, uvloop would print a traceback, or could not be closed. While a loop is
    being started or closed, the signal is sent again a moment later. The second signal is ignored,
    since it would interrupt the cleanup after the first one. The third one ends the process.
    """

    def __init__(self) -> None:
        """Create a handler that has received no signal."""
        self._signal_count = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle a termination signal. Python calls this with the frame that was interrupted.

        The first signal raises KeyboardInterrupt: in a callback of the running event loop if there
        is one, or here. The second one is ignored, and the third one ends the process.
        """
        self._signal_count += 1
        if self._signal_count > 2:
            signals.exit_immediately()

        if self._signal_count == 2:
            return

        running_loop = events._get_running_loop()
        if running_loop is not None:
            running_loop.call_soon_threadsafe(_raise_keyboard_interrupt)
        elif _starts_or_closes_loop(frame):
            self._signal_count = 0  # the signal that is sent again counts as the first one
            _send_signal_later(signum)
        else:
            raise KeyboardInterrupt


def _interrupt_on_signals() -> None:
    """Handle the termination signals, unless the parent process ignores them (as under `nohup`)."""
    if threading.current_thread() is not threading.main_thread():
        return

    handler = _SignalHandler()

    # Any other handler is SIG_IGN, or that of a program which calls loadgen.
    replaceable_handlers = (signal.SIG_DFL, signal.default_int_handler, signals.exit_before_command)
    for signum in signals.TERMINATION_SIGNALS:
        if signal.getsignal(signum) in replaceable_handlers:
            signal.signal(signum, handler)


def _send_signal_later(signum: int) -> None:
    """Send a signal to this process again after a moment, from a thread that no exit waits for."""
    timer = threading.Timer(_RESEND_DELAY_S, os.kill, (os.getpid(), signum))
    timer.daemon = True
    timer.start()


def _raise_keyboard_interrupt() -> NoReturn:
    """Raise KeyboardInterrupt, as a callback of an event loop."""
    raise KeyboardInterrupt


def _starts_or_closes_loop(frame: FrameType | None) -> bool:
    """Return True if `asyncio.Runner` is starting or closing an event loop in a frame.

    Called while no event loop runs. If a function of the module `asyncio.runners` is then on the
    call stack of the frame, it prepares the loop or cleans it up.
    """
    caller = frame
    while caller is not None and caller.f_code.co_filename != runners.__file__:
        caller = caller.f_back
    return caller is not None


def _to_host_error(error: BaseException) -> UserError | None:
    """Return the error to show if the host refused a file, memory or another resource.

    These are failed system calls and exhausted limits, which the user can do something about.
    Returns None for any other exception, which is a bug of loadgen.
    """
    if isinstance(error, OSError) and error.errno in _HOST_ERRORS:
        return _to_file_error(error)

    if _is_out_of_memory(error):
        return UserError(
            "resource_limit",
            "the host refused: out of memory",
            hint=(
                "give the command more memory (ulimit -v, the control group), or "
                "use a shorter load or smaller files"
            ),
        )

    # An event loop that lacks a file descriptor raises another error while it is closed.
    for cause in _walk_causes(error):
        if isinstance(cause, OSError) and cause.errno in _TOO_MANY_FILES:
            return _to_file_error(cause)

    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory was exhausted, which libraries report as errors of other classes."""
    return isinstance(error, MemoryError) or any(
        message in str(error) for message in _NO_MEMORY_MESSAGES
    )


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the chain of exceptions from which, or during whose handling, an error was raised."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _to_file_error(error: OSError) -> UserError:
    """Return the error to show for a system call that failed on a file or folder.

    The hint depends on the reason: too many open files, no space left, an unknown path, a folder
    that does not exist (any more), or else a path that cannot be read or written.
    """
    path = str(error.filename or error.filename2 or "")
    message = f"the host refused: {(error.strerror or str(error)).lower()}"
    if error.errno in _TOO_MANY_FILES:
        hint = f"raise the limit of open files (ulimit -n); {_hint_about_recorded_data(path)}"
        return UserError("resource_limit", message, path, hint)

    if error.errno in _NO_SPACE:
        recorded_data_hint = _hint_about_recorded_data(path)
        hint = f"free some space, or use another folder with --out; {recorded_data_hint}"
        return UserError("resource_limit", message, path, hint)

    if not path:
        return UserError("host_refused", message, path, _hint_about_recorded_data(path))

    is_folder_missing = error.errno == errno.ENOENT and not Path(path).parent.exists()
    if is_folder_missing:
        missing_folders = [
            folder for folder in Path(path).absolute().parents if not folder.exists()
        ]
        topmost_missing = missing_folders[-1]  # `parents` begins with the innermost folder
        return UserError(
            "host_refused",
            "a folder was moved or deleted while the command used it, or it never existed",
            str(topmost_missing),
            "look for the recorded data where the folder is now",
        )

    return UserError("host_refused", message, path, "use a path that can be read and written")


def _hint_about_recorded_data(path: str) -> str:
    """Return a hint that says whether a run recorded data before an error, and how to show it.

    The file that caused the error belongs to the run in the nearest folder above it that has a
    `run.json`. If there is no such folder, no run had begun, so nothing was recorded.

    Args:
        path: The file that could not be opened, read or written; "" if it is not known.
    """
    if not path:
        return "data recorded before this error is kept; show it with loadgen report FOLDER"
    for folder in Path(path).absolute().parents:
        is_run_folder = (folder / "run.json").is_file()
        if is_run_folder:
            return f"data recorded before this error is kept; show it with loadgen report {folder}"
    return "nothing was recorded"
