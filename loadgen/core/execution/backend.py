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


SendersContext = Callable[[Settings], AbstractContextManager[Senders]]
"""Opens the processes that send a load over HTTP, and closes them at the end of a context."""


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
    senders: SendersContext | None = None


def known(settings: Settings) -> KnownTarget | None:
    """Return what is known of the target without sending a request, or None."""
    backend_row = settings.backend
    function = load_backend(backend_row).known
    if function is None:
        return None
    return BACKENDS.guard(backend_row, function, check_type(KnownTarget))(settings)


def filling_rate(workload: Workload, settings: Settings) -> float | None:
    """Return the rate that about fills the target, or None if its backend does not know one."""
    backend_row = settings.backend
    function = load_backend(backend_row).filling_rate
    if function is None:
        return None
    return BACKENDS.guard(backend_row, function)(workload, settings)


def run_function(settings: Settings) -> RunFunction | None:
    """Return the function that carries out a whole run, or None if the load goes over HTTP."""
    backend_row = settings.backend
    function = load_backend(backend_row).run
    if function is None:
        return None
    return BACKENDS.guard(backend_row, function, check_type(Summary))


@contextlib.contextmanager
def running_server(settings: Settings) -> Iterator[Settings]:
    """Run the server that a backend starts itself, and yield the settings with its URL.

    The simulated server is started that way, for example. If the user gives the URL of a server
    that runs already, its backend starts nothing, and the settings are yielded unchanged.
    """
    backend_row = settings.backend  # an entry of the table of backends, some of them plug-ins
    start_server = load_backend(backend_row).serve
    if start_server is None:
        yield settings
        return
    # `guard` reports an error, or a result of another type, with the name of the plug-in.
    guarded_start = BACKENDS.guard(backend_row, start_server, check_type(AbstractContextManager))
    with guarded_start(settings) as settings_with_url:
        yield settings_with_url


@contextlib.contextmanager
def open_senders(settings: Settings) -> Iterator[Senders]:
    """Open the processes that send the load over HTTP, and yield them.

    The settings decide which: for example those of a Ray cluster with `--ray`, or by default those
    of this machine.
    """
    with _select_senders(settings)(settings) as senders:
        yield senders


def _select_senders(settings: Settings) -> SendersContext:
    """Return the function that opens the senders, the processes that send the load.

    A backend is a place where a load can be sent, for example a Ray cluster. It is selected by an
    option, such as `--ray`. Without any such option, the load is sent from this machine, by the
    last backend of the list, which needs no option.
    """
    for backend_row in BACKENDS.builtin_rows:
        is_requested = not backend_row.flag or getattr(settings, backend_row.flag) is not None
        if not is_requested:
            continue
        senders_context = load_backend(backend_row).senders
        if senders_context is not None:
            return senders_context
    raise AssertionError("no backend sends from this machine")
