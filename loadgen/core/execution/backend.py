"""The backend of a run: what the rows of `loadgen.backends` do for given settings. IO, by the functions of the rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from loadgen.backends import BACKENDS
from loadgen.core.execution.context import KnownTarget
from loadgen.core.execution.events import Tell
from loadgen.core.execution.plan import Plan, Settings
from loadgen.core.execution.share import Share
from loadgen.plugins import gives


class Senders(Protocol):
    """Those who send a load. `place`, then `run`, once each."""

    @property
    def cores(self) -> int | None:
        """How many workers they have room for; None: as this machine has."""

    async def place(self, plan: Plan, tell: Tell) -> list[str]:
        """Take their places, and check them; returns notes for the header. Raises Faults."""

    async def run(self, plan: Plan, tell: Tell) -> Share:
        """Carry out the plan. Raises TargetError if one could not start."""


def known(settings: Settings) -> KnownTarget | None:
    """What is known of the target without asking it; None where nothing is."""
    row, given = settings.backend, gives(KnownTarget)
    return BACKENDS.function(row, row.known, given)(settings) if row.known else None


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[Settings]:
    """The settings with the URL of the target: where its backend starts one, that serves while inside."""
    row, context = settings.backend, contextlib.AbstractContextManager
    serve = (
        BACKENDS.function(row, row.serve, gives(context)) if row.serve else contextlib.nullcontext
    )
    with serve(settings) as served:
        yield served


@contextlib.contextmanager
def senders(settings: Settings) -> Iterator[Senders]:
    """Who sends the load, while inside."""
    row = next(
        row
        for row in BACKENDS.own
        if row.senders and (not row.flag or getattr(settings, row.flag) is not None)
    )
    with BACKENDS.function(row, row.senders)(settings) as found:
        yield found
