"""Call the functions of the backend of a run, which is a row of `loadgen.backends`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from loadgen.backends import BACKENDS, load_backend
from loadgen.core.execution.context import KnownTarget
from loadgen.core.execution.events import Emit
from loadgen.core.execution.plan import Plan, Settings
from loadgen.core.execution.worker_resources import WorkerResult
from loadgen.core.metrics.summary import Summary
from loadgen.core.workload import Workload
from loadgen.plugins import check_type


class Senders(Protocol):
    """The processes that send a load. Call `place`, then `run`, once each."""

    @property
    def cores(self) -> int | None:
        """Return the free cores of the cluster, or None if the load is sent from this machine."""

    async def place(self, plan: Plan, emit: Emit) -> list[str]:
        """Prepare the workers, and return notes for the manifest.

        Raises CombinedError if they cannot send the load.
        """

    async def run(self, plan: Plan, emit: Emit) -> WorkerResult:
        """Carry out the plan and return the result of all workers.

        Raises TargetError if a worker could not start.
        """


class RunFunction(Protocol):
    """Carries out a whole run in its directory, for a target that is not reached over HTTP."""

    def __call__(
        self,
        workload: Workload,
        settings: Settings,
        folder: Path,
        emit: Emit,
        /,
    ) -> Summary:
        """Write the run into its directory and return its summary."""


class Backend(Struct, frozen=True, kw_only=True):
    """The functions of a backend. All are optional.

    Attributes:
        known: Returns what is known of the target without sending a request.
        filling_rate: Returns the rate that about fills the target, without sending a request. A
            search begins there.
        serve: A context in which a server runs. It yields the settings with the URL of the server.
        run: Carries out the run. Without it, the load is sent over HTTP.
        senders: A context with the processes that send the load over HTTP.
    """

    known: Callable[[Settings], KnownTarget] | None = None
    filling_rate: Callable[[Workload, Settings], float | None] | None = None
    serve: Callable[[Settings], AbstractContextManager[Settings]] | None = None
    run: RunFunction | None = None
    senders: Callable[[Settings], AbstractContextManager[Senders]] | None = None


def known(settings: Settings) -> KnownTarget | None:
    """Return what is known of the target without sending a request, or None."""
    row = settings.backend
    function = load_backend(row).known
    if function is None:
        return None
    return BACKENDS.guard(row, function, check_type(KnownTarget))(settings)


def filling_rate(workload: Workload, settings: Settings) -> float | None:
    """Return the rate that about fills the target, or None if its backend does not know one."""
    row = settings.backend
    function = load_backend(row).filling_rate
    return None if function is None else BACKENDS.guard(row, function)(workload, settings)


def run_function(settings: Settings) -> RunFunction | None:
    """Return the function that carries out a whole run, or None if the load goes over HTTP."""
    row = settings.backend
    function = load_backend(row).run
    return None if function is None else BACKENDS.guard(row, function, check_type(Summary))


@contextlib.contextmanager
def running_server(settings: Settings) -> Iterator[Settings]:
    """Run the server of the backend within the context, and yield the settings with its URL.

    Most backends have no server, because the target of the user exists already. The settings are
    then yielded unchanged.
    """
    row = settings.backend
    serve = load_backend(row).serve
    if serve is None:
        yield settings
        return
    # An error in a backend of a plug-in is reported with the name of the plug-in.
    guarded_serve = BACKENDS.guard(row, serve, check_type(AbstractContextManager))
    with guarded_serve(settings) as settings_of_server:
        yield settings_of_server


@contextlib.contextmanager
def open_senders(settings: Settings) -> Iterator[Senders]:
    """Yield the processes that send the load over HTTP: those of a cluster, or of this machine.

    They belong to the first built-in backend that can send and whose option, such as `--ray`, is
    set. The last one needs no option and sends from this machine.
    """
    for row in BACKENDS.builtin_rows:
        is_requested = not row.flag or getattr(settings, row.flag) is not None
        if not is_requested:
            continue
        enter_senders = load_backend(row).senders
        if enter_senders is not None:
            with enter_senders(settings) as senders:
                yield senders
            return
