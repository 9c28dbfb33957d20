"""The standard streams of a command, made safe before it starts: none of them missing, and a reader that leaves early
(`| head`), or a terminal without UTF-8, does not change how the command ends.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO


def prepare() -> None:
    """To be called once, at the start of a process. Streams that were replaced (by a test, say) are left alone."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed (`<&-`): the next file opened would take its number, and the event loop aborts on that
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _safe(stream, 1 if name == "stdout" else 2))


def _safe(stream: io.TextIOWrapper | None, descriptor: int) -> io.TextIOWrapper:
    if stream is not None:
        stream.flush()
    return _Terminal(
        io.BufferedWriter(_LeavableFile(descriptor, "wb", closefd=False)),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",  # where a character has no place in the encoding
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


class _Terminal(io.TextIOWrapper):
    """Text for a terminal, which obeys our own colours and nothing else that may be in a text."""

    def write(self, text: str) -> int:
        return super().write(
            _STEERING.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
        )

    def steer(self, text: str) -> int:
        """Write what moves the cursor too: a drawing of ours, whose texts are harmless."""
        return super().write(text)


def drawing(stream: TextIO) -> Callable[[str], int]:
    """The `write` of a stream for what draws over itself, with moves of the cursor."""
    write: Callable[[str], int] = getattr(stream, "steer", stream.write)
    return write


_STEERING = re.compile(
    "\x1b(?!\\[(?:0|1|31|32|33)m)|\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class _LeavableFile(io.FileIO):
    """A file whose reader may leave: what is written after that goes nowhere, without an error. Where the host refuses
    a write, that is raised once: Python would try again at its end, and print a traceback.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                raise
            return len(data)
