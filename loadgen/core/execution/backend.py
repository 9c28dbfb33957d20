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
    backend_entry = settings.backend
    function = load_backend(backend_entry).known
    if function is None:
        return None
    return BACKENDS.guard(backend_entry, function, check_type(KnownTarget))(settings)


def filling_rate(workload: Workload, settings: Settings) -> float | None:
    """Return the rate that about fills the target, or None if its backend does not know one."""
    backend_entry = settings.backend
    function = load_backend(backend_entry).filling_rate
    if function is None:
        return None
    return BACKENDS.guard(backend_entry, function)(workload, settings)


def run_function(settings: Settings) -> RunFunction | None:
    """Return the function that carries out a whole run, or None if the load goes over HTTP."""
    backend_entry = settings.backend
    function = load_backend(backend_entry).run
    if function is None:
        return None
    return BACKENDS.guard(backend_entry, function, check_type(Summary))


def is_started_by_user(settings: Settings) -> bool:
    """Return whether the target is a server that runs already, and can be probed before a run."""
    functions = load_backend(settings.backend)
    return functions.serve is None and functions.run is None


@contextlib.contextmanager
def running_server(settings: Settings) -> Iterator[Settings]:
    """Run the server that a backend starts itself, and yield the settings with its URL.

    A backend is the code for one kind of target. That of the simulated server, for example, has a
    function `serve`, which starts it within a context. The backend of a server that the user has
    started has no such function, and the settings are yielded unchanged.
    """
    backend_entry = settings.backend
    serve = load_backend(backend_entry).serve
    if serve is None:
        yield settings
        return

    # A backend can be a plug-in of another package. `guard` calls its function and reports errors
    # with the name of the plug-in, also if the function returns no context manager.
    check_result = check_type(AbstractContextManager)
    guarded_serve = BACKENDS.guard(backend_entry, serve, check_result)
    with guarded_serve(settings) as settings_with_url:
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

    Some backends have such a function, for example the one of a Ray cluster. Most of these are
    selected by an option, such as `--ray`, which is a field of the settings. The last one in the
    table needs no option, and sends from this machine.
    """
    for backend_entry in BACKENDS.builtin_rows:
        if not _is_backend_requested(backend_entry.flag, settings):
            continue
        open_senders_of_backend = load_backend(backend_entry).senders
        if open_senders_of_backend is not None:
            return open_senders_of_backend
    raise AssertionError("no backend sends from this machine")


def _is_backend_requested(option: str, settings: Settings) -> bool:
    """Return True if the option that selects a backend is set, or if it needs none ("")."""
    needs_no_option = option == ""
    return needs_no_option or getattr(settings, option) is not None
