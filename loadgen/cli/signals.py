"""Handlers of the termination signals outside of a running command, and for commands that serve."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

TERMINATION_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_INTERRUPTED = 130  # `loadgen.core.errors.INTERRUPTED`, which takes time to import


def exit_immediately(signum: int = 0, frame: FrameType | None = None) -> NoReturn:  # noqa: ARG001
    """End the process with the exit code of an interrupted command, without any cleanup."""
    with suppress(OSError):  # nobody reads stderr
        os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


def exit_before_command(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    """End the process before its command has begun, so that it has done nothing yet."""
    with suppress(OSError):  # nobody reads stderr
        os.write(2, b"interrupted before the command began: nothing was sent or stored\n")
    os._exit(_INTERRUPTED)


def exit_on_signal() -> None:
    """Let a termination signal end the process at once, before its command has begun.

    Signals that the parent process ignores (for example SIGHUP under `nohup`) stay ignored.
    """
    _install_handler(exit_before_command)


def interrupt_on_first_signal() -> None:
    """Raise KeyboardInterrupt on the first termination signal and ignore the following ones.

    Commands that serve until they are stopped (`sim`, `ui`) use this to shut down once and cleanly.
    """
    _install_handler(_raise_keyboard_interrupt)


def ignore_signals() -> None:
    """Ignore termination signals, because the command has ended and its exit code is decided."""
    for signum in TERMINATION_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _raise_keyboard_interrupt(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    # A handler that does nothing instead of SIG_IGN: with SIG_IGN, Python would report a signal
    # that is pending.
    _install_handler(_do_nothing)
    raise KeyboardInterrupt


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Ignore a signal."""


def _install_handler(handler: Callable[[int, FrameType | None], object]) -> None:
    for signum in TERMINATION_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)
