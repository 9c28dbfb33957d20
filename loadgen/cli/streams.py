"""The standard streams of a command, made safe before it starts: none of them missing, and a reader that leaves early
(`| head`), or a terminal without UTF-8, does not change how the command ends."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


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
    return io.TextIOWrapper(
        io.BufferedWriter(_LeavableFile(descriptor, "wb", closefd=False)),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",  # where a character has no place in the encoding
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


class _LeavableFile(io.FileIO):
    """A file whose reader may leave: what is written after that goes nowhere, without an error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)
