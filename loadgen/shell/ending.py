"""How every command ends: done, a fault that is told in its own words, interrupted, or a bug of ours.

The one handler around `main`. It prints on stderr; nothing else in the package turns an exception into an exit code.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from loadgen.core.errors import BUG, INTERRUPTED, USAGE, Code, Fault, Faults, UserError
from loadgen.shell import at_once

_PASSWORD = r"(:/{1,2})[^/\s@]+@"
"""Of a URL that was typed in a wrong place: the screen of a build is read by many."""


def ending(call: Callable[[], int]) -> int:
    """Run `call` and turn each of the three endings (expected, interrupted, bug) into an exit code."""
    _interrupt_by_signals()
    try:
        return call()
    except (Fault, Faults) as fault:
        print(re.sub(_PASSWORD, r"\1***@", str(fault)), file=sys.stderr)
        return fault.exit_code
    except KeyboardInterrupt:
        return interrupted()
    except Exception as error:
        if isinstance(
            error.__cause__, KeyboardInterrupt
        ):  # raised while a class was made: Python 3.11 wraps it
            return interrupted()
        if (refused := _refusal(error)) is None:
            return _bug(error)
        print(refused, file=sys.stderr)
        return USAGE


def interrupted() -> int:
    """Say that the user broke it off; the exit code."""
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _interrupt_by_signals() -> None:
    """Each of these signals is a Ctrl-C. One that the shell has set to be ignored (`nohup`) stays ignored.

    Within an event loop it ends the loop once nothing else of it runs: raised in the middle of a callback, uvloop
    prints where that was, or cannot be closed. The same where a loop begins or ends to run: there it comes again a
    moment later. A second one would be raised anywhere on the way out of the first, and is dropped; a third ends the
    process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    times = 0

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal times
        times += 1
        events = sys.modules.get(
            "asyncio.events"
        )  # without it there is no loop, and a start does not wait for it
        if times > 2:
            at_once.end()
        elif times == 1 and events is not None and (loop := events._get_running_loop()) is not None:
            loop.call_soon_threadsafe(_interrupt)
        elif times == 1 and _in_a_runner(frame):
            times = 0
            later = threading.Timer(0.001, os.kill, (os.getpid(), number))
            later.daemon = True
            later.start()
        elif times == 1:
            raise KeyboardInterrupt

    for number in at_once.NUMBERS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, at_once.end):
            signal.signal(number, heard)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _in_a_runner(frame: FrameType | None) -> bool:
    """Whether `asyncio.Runner` is at work there: with no loop that runs, one that begins to, or ends."""
    file = getattr(sys.modules.get("asyncio.runners"), "__file__", None)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


_OF_THE_HOST = {
    getattr(errno, name)
    for name in (
        "EACCES",
        "EDQUOT",
        "EEXIST",
        "EFBIG",
        "EIO",
        "EISDIR",
        "ELOOP",
        "EMFILE",
        "ENAMETOOLONG",
        "ENFILE",
        "ENODEV",
        "ENOENT",
        "ENOMEM",
        "ENOSPC",
        "ENOTDIR",
        "EPERM",
        "EROFS",
        "ESTALE",
    )
}
"""What a file system or a limit of the host refuses: no bug, and nothing that loadgen could mend."""


def _refusal(error: BaseException) -> UserError | None:
    """What the host refused, where it is the host that an error comes from."""
    if isinstance(error, OSError) and error.errno in _OF_THE_HOST:
        return _of_the_host(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        hint = (
            "give it more memory (ulimit -v, the control group), or a shorter load or smaller files"
        )
        return UserError("resource_limit", "the host refused: no memory is left", "", hint)
    earlier = error.__cause__ or error.__context__
    while (
        earlier is not None
    ):  # an event loop that lacks a descriptor fails once more while it is closed
        if isinstance(earlier, OSError) and earlier.errno in (errno.EMFILE, errno.ENFILE):
            return _of_the_host(earlier)
        earlier = earlier.__cause__ or earlier.__context__
    return None


_NO_MEMORY = (
    "failed to map segment",
    "cannot allocate memory",
    "can't start new thread",
    "Failed to launch worker thread",
)
"""What the loader of libraries and the makers of threads say of it, as ImportError, RuntimeError and ArrowException."""


def _of_the_host(error: OSError) -> UserError:
    from pathlib import Path

    where = str(error.filename or error.filename2 or "")
    hint = _kept(where)
    code: Code = "host_refused"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        code, hint = "resource_limit", f"raise the limit of open files (ulimit -n); {hint}"
    elif error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", -1), errno.EFBIG):
        code, hint = "resource_limit", f"make room, or give another folder with --out; {hint}"
    elif error.errno == errno.ENOENT and where and not Path(where).parent.exists():
        gone = [folder for folder in Path(where).absolute().parents if not folder.exists()][-1]
        what = "a folder is gone: it was moved or deleted while this command worked in it, or was never there"
        return UserError(
            "host_refused", what, str(gone), "what was recorded is where the folder is now"
        )
    elif where:
        hint = "give a path that can be written or read"
    return UserError(
        code, f"the host refused: {(error.strerror or str(error)).lower()}", where, hint
    )


def _kept(where: str) -> str:
    """What is left of a run that the host has ended by refusing this path ("": it did not say which)."""
    from pathlib import Path

    if not where:
        return "what was recorded before, if anything, is kept: loadgen report FOLDER shows it"
    run = next(
        (folder for folder in Path(where).absolute().parents if (folder / "run.json").is_file()),
        None,
    )
    return (
        "nothing was recorded"
        if run is None
        else f"what was recorded before is kept: loadgen report {run}"
    )


def _bug(error: Exception) -> int:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w",
        encoding="utf-8",
        errors="backslashreplace",
        prefix="loadgen-bug-",
        suffix=".txt",
        delete=False,
    ) as file:
        traceback.print_exception(error, file=file)
    print(
        f"error: a bug in loadgen: {type(error).__name__}: {error}\n  --> {file.name}",
        file=sys.stderr,
    )
    print("hint: please report it with that file", file=sys.stderr)
    return BUG
