"""Signals before a command begins and once it is over: they end the process at once, with a word and no traceback.

A leaf: it is the first module that the script `loadgen` reads.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

NUMBERS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def end(*_: object) -> NoReturn:
    """Leave as `ending.interrupted` does, with nothing of Python's own way out: what it reads or joins is of no use."""
    try:
        os.write(2, b"interrupted\n")
    except OSError:
        pass  # nobody reads it
    os._exit(130)


def hear() -> None:
    """Let each signal end the process at once. One that the shell has set to be ignored (`nohup`) stays ignored."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def serve_until_heard() -> None:
    """From now on the first signal is a KeyboardInterrupt: the end of a command that serves. No later one is heard."""

    def first(*_: object) -> None:
        for number in NUMBERS:
            signal.signal(
                number, lambda *_: None
            )  # not SIG_IGN, of which Python would tell where one is on its way
        raise KeyboardInterrupt

    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, first)


def ignore() -> None:
    """The exit code is decided, and stays."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def leave(code: int | None) -> None:
    """The last moment of a process that ends with this code; None: nothing is decided, and Python goes on.

    Python would now give back all memory, object by object, which takes as long as many a command.
    """
    ignore()
    if code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
