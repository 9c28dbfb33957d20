"""Makes the standard streams of a command safe before it starts.

A missing stream, a reader that stops early (`| head`), a terminal without UTF-8, or control
characters in a text from outside must not change how the command ends.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

_CONTROL_CHARACTERS = re.compile(
    "\x1b(?!\\[(?:0|1|31|32|33)m)"  # an escape that is none of our colors
    "|\r(?!\n)"
    "|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
    "|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # direction of the text
)
"""What could move the cursor, change the terminal or reorder a text."""


def protect_standard_streams() -> None:
    """Make stdin, stdout and stderr safe to use. `app.main` calls this once, at the start.

    Afterwards, all three streams exist, control characters in the output are escaped, characters
    that the terminal cannot encode are written as escapes, and a reader that stops early (`| head`)
    causes no error. Streams that were replaced already, for example by a test, are left alone.
    """
    _open_missing_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stdout is sys.__stdout__:
        sys.stdout = _create_safe_stream(sys.__stdout__, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _create_safe_stream(sys.__stderr__, 2)


def _open_missing_descriptors() -> None:
    """Open /dev/null for each standard stream that the parent process has closed.

    Otherwise the next file that is opened would take its number, and the event loop would abort.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _create_safe_stream(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    """Return a stream that writes to the same file descriptor as `stream`, but safely.

    `stream` is None if the parent process has closed the descriptor, which is /dev/null by now.
    """
    if stream is not None:
        stream.flush()
    return _SafeTextStream(
        io.BufferedWriter(_AbandonableFile(descriptor, "wb", closefd=False)),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",  # for characters that the encoding does not have
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


class _SafeTextStream(io.TextIOWrapper):
    """A text stream that escapes control characters, except for the colors of loadgen."""

    def write(self, text: str) -> int:
        """Write a text with its control characters escaped."""
        return super().write(_CONTROL_CHARACTERS.sub(_escape_match, text))

    def write_raw(self, text: str) -> int:
        """Write a text as it is. It must not contain a text from outside."""
        return super().write(text)


def _escape_match(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def raw_writer(stream: TextIO) -> Callable[[str], int]:
    """Return the function that writes to a stream unescaped, for views that move the cursor."""
    write: Callable[[str], int] = getattr(stream, "write_raw", stream.write)
    return write


class _AbandonableFile(io.FileIO):
    """A file that can lose its reader: later writes are discarded without an error.

    Other errors of a write are raised once. Python would try again when the process ends, and print
    a traceback.
    """

    def write(self, data: Any) -> int:
        """Write bytes. After a write that fails, discard these and all later bytes.

        A closed pipe (`| head`) is no error: the bytes count as written. Any other error, such as a
        full disk, is raised this once.
        """
        try:
            return super().write(data) or 0
        except OSError as error:
            self._redirect_to_null()
            if not isinstance(error, BrokenPipeError):
                raise
            return len(data)

    def _redirect_to_null(self) -> None:
        """Let the file descriptor refer to /dev/null, where every later write succeeds."""
        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_descriptor, self.fileno())
        os.close(null_descriptor)
