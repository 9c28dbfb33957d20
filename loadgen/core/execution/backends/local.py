"""Send a load over HTTP from this machine, with one worker process per share of the load.

A worker prepares its share, reports that it is ready, receives the common start time, sends, and
reports a `WorkerResult`. Each worker has its own sockets and files, and workers do not communicate
during the load. The messages are defined in `worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic_ns

from loadgen.core import child_process
from loadgen.core.errors import TargetError
from loadgen.core.execution import driver, stop_signals
from loadgen.core.execution.backend import Backend
from loadgen.core.execution.backends import merge, worker
from loadgen.core.execution.events import Emit, LoadStarted, RunningLoad
from loadgen.core.execution.plan import Plan, Settings
from loadgen.core.execution.shard import (
    NS_PER_S,
    Shard,
    sleep_until_before_start,
    start_instant_ns,
)
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.execution.worker_resources import WorkerResult

_CHECK_INTERVAL_S = 1.0
_START_CHECK_INTERVAL_S = 0.2


class ThisMachine:
    """Sends a load from this process if one worker is enough, else from worker processes."""

    cores = None

    async def place(self, plan: Plan, emit: Emit) -> list[str]:  # noqa: ARG002 - of a Senders
        """Return no notes: the workers need no preparation here."""
        return []

    async def run(self, plan: Plan, emit: Emit) -> WorkerResult:
        """Carry out the plan and return the result of all workers."""
        if plan.job.settings.workers == 1:
            return await driver.run_in_this_process(plan, emit)
        return await LocalWorkers(plan).run(emit)


@contextlib.contextmanager
def use_this_machine(settings: Settings) -> Iterator[ThisMachine]:  # noqa: ARG001 - of a Backend
    """Yield the senders of a run that is sent from this machine alone."""
    yield ThisMachine()


HTTP = Backend(senders=use_this_machine)
"""A server that is loaded over HTTP from this machine."""


class LocalWorkers:
    """The worker processes of a run on this machine."""

    def __init__(self, plan: Plan) -> None:
        """Start the worker processes, so that they load their modules while the caller prepares.

        They then wait for their job, the description of the load, which `run` sends to them.
        """
        settings = plan.job.settings
        self._plan = plan
        self._worker_count = settings.workers

        # A worker that shows no progress for this long is stuck.
        self._stuck_after_s = settings.tuning.frozen_s
        spool_dir = plan.job.folder / "spool"
        spool_dir.mkdir(exist_ok=True)
        self._processes = [worker.start_process() for _ in range(self._worker_count)]

        # One thread for each process, so that the output of all is read at the same time.
        self._threads = ThreadPoolExecutor(self._worker_count)
        self._counters = SharedCounters(spool_dir / worker.COUNTERS_FILE, self._worker_count)

        # For each worker, the reason to report if it died.
        self._death_reasons = [f"worker {index} died" for index in range(self._worker_count)]

    async def run(self, emit: Emit) -> WorkerResult:
        """Carry out the plan, end the processes, and return the merged results.

        Every worker first reports that it is ready. Then all receive the same start time, which is
        a little in the future, so that they start together. Signals are passed on to them: after
        the first they stop and drain, after the second they end at once. Requests of a worker that
        dies are recorded as `lost`.

        Args:
            emit: Called with `LoadStarted` when the load starts.

        Raises:
            TargetError: A worker could not start.
            OSError: An error of this host ended a worker, for example a full disk.
            KeyboardInterrupt: A signal came before all workers had started.
        """
        try:
            await self._prepare_workers()
            with stop_signals.on_stop_signal(self._send_signal):
                # A signal during the preparation may arrive only now.
                await stop_signals.raise_pending_interrupt()
                start_ns = self._start_load(emit)
                results = await self._collect_results(start_ns)
            return merge.merge_results(self._plan, results, self._death_reasons)
        finally:
            self._close()

    async def _prepare_workers(self) -> None:
        """Wait until all workers are ready, and for the common start if the run is a shard.

        A stop signal meanwhile kills the workers.
        """
        with stop_signals.abort_start_on_signal(lambda: self._send_signal(signal.SIGKILL)):
            await self._start_all()
            shard = self._plan.job.settings.shard
            if shard is not None:
                await self._wait_for_common_start(shard)

    def _start_load(self, emit: Emit) -> int:
        """Send all workers the start time, and return it in ns on the monotonic clock.

        It is HEAD_START_NS from now, so that all workers have received it before, or the common
        start of all shards. The clock is the same in all processes of a machine.
        """
        shard = self._plan.job.settings.shard
        start_ns = start_instant_ns(shard, lead_ns=worker.HEAD_START_NS)
        load = RunningLoad(self._counters.sum, self._interrupt)
        emit(LoadStarted(start_ns, load))
        for process in self._processes:
            worker.send_line(process, f"{start_ns}\n".encode())
        return start_ns

    def _interrupt(self) -> None:
        """Let all workers stop the load, as they do after Ctrl-C."""
        self._send_signal(signal.SIGINT)

    def _send_signal(self, signum: int) -> None:
        """Send a signal to all workers that are still running."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signum)

    async def _start_all(self) -> None:
        """Send every worker the job, from which it takes its share, and wait until all are ready.

        Each worker is handled in a thread of its own.

        Raises:
            TargetError: A worker could not start, or did nothing for `Tuning.frozen_s`.
            OSError: An error of this host is the reason, for example a full disk.
        """
        pickled_job = pickle.dumps(self._plan.job)
        loop = asyncio.get_running_loop()

        start_futures = [
            loop.run_in_executor(self._threads, self._start_one, index, pickled_job)
            for index in range(self._worker_count)
        ]
        for start_future in start_futures:
            # Only the first error is raised below. asyncio would warn about the others.
            _suppress_unretrieved_warning(start_future)

        stuck_workers = await self._wait_for_starts(start_futures)
        if stuck_workers:
            raise self._stuck_worker_error(min(stuck_workers))

        # `result` raises the first error of a worker that could not start. Workers that are still
        # starting after such an error are left to `run`, which ends all processes.
        for start_future in start_futures:
            if start_future.done():
                start_future.result()

    def _stuck_worker_error(self, index: int) -> TargetError:
        """Return the error for a worker that was killed before the load because it was stuck."""
        return TargetError(
            "process_failed",
            message=(
                f"worker {index} did not respond for "
                f"{self._stuck_after_s:g} s before the load, so it was killed"
            ),
            where=f"--workers {self._worker_count}",
            hint="check whether this host is out of memory or its disk is stuck",
        )

    def _start_one(self, index: int, pickled_job: bytes) -> None:
        """Send a worker its share and wait until it is ready. Runs in a thread."""
        process = self._processes[index]
        assert process.stdout is not None
        worker.send_job(process, pickled_job, index, self._worker_count)
        worker.check_is_ready(process.stdout.readline())

    async def _wait_for_starts(self, start_futures: Sequence[asyncio.Future[None]]) -> set[int]:
        """Wait until all workers have started or one has failed.

        The CPU time of the workers is read every `Tuning.frozen_s`. A worker that has used none
        since the previous reading is stuck, because opening connections does not take that long. It
        is killed.

        Args:
            start_futures: For each worker by its number, a future that ends when it is ready.

        Returns:
            The numbers of the workers that were stuck.
        """
        stuck_workers: set[int] = set()
        previous_cpu_s: list[float | None] = [None] * len(start_futures)
        while not all(future.done() for future in start_futures):
            done, _ = await asyncio.wait(
                start_futures, timeout=self._stuck_after_s, return_when=asyncio.FIRST_EXCEPTION
            )
            has_failed = any(future.exception() is not None for future in done)
            if has_failed:
                break

            current_cpu_s: list[float | None] = [
                child_process.read_cpu_seconds(process.pid) for process in self._processes
            ]
            for worker_index, future in enumerate(start_futures):
                used_no_cpu = current_cpu_s[worker_index] == previous_cpu_s[worker_index]
                if used_no_cpu and not future.done():
                    stuck_workers.add(worker_index)
                    self._processes[worker_index].kill()

            previous_cpu_s = current_cpu_s

        return stuck_workers

    async def _wait_for_common_start(self, shard: Shard) -> None:
        """Wait until shortly before the time at which all shards of the run start.

        The wait ends early if a worker has ended.
        """
        lead_s = worker.HEAD_START_NS / NS_PER_S
        waiting = asyncio.create_task(sleep_until_before_start(shard, lead_s))
        while not waiting.done() and all(process.poll() is None for process in self._processes):
            await asyncio.wait([waiting], timeout=_START_CHECK_INTERVAL_S)
        waiting.cancel()

    async def _collect_results(self, start_ns: int) -> list[WorkerResult | None]:
        """Wait until all workers have ended, and return their results; None for one that died."""
        loop = asyncio.get_running_loop()
        results = asyncio.gather(
            *(
                loop.run_in_executor(self._threads, self._read_result, process)
                for process in self._processes
            )
        )
        while True:
            done, _ = await asyncio.wait([results], timeout=_CHECK_INTERVAL_S)
            if done:
                return results.result()
            self._kill_stuck_workers(start_ns)

    def _kill_stuck_workers(self, start_ns: int) -> None:
        """Kill the workers that have not published counters for `Tuning.frozen_s`."""
        for index, process in enumerate(self._processes):
            last_sign_ns = max(self._counters.updated_ns(index), start_ns)
            is_stuck = monotonic_ns() > last_sign_ns + self._stuck_after_s * NS_PER_S
            if process.poll() is None and is_stuck:
                self._death_reasons[index] = (
                    f"worker {index} did not respond for {self._stuck_after_s:g} s, "
                    "so it was killed"
                )
                process.kill()

    def _read_result(self, process: subprocess.Popen[bytes]) -> WorkerResult | None:
        """Return the result that a worker reports at its end, or None if it died.

        The result is in the last line of its output. Other lines are handled as they come. This
        runs in a thread.

        Raises:
            OSError: An error of this host ended the worker, for example a full disk.
        """
        assert process.stdout is not None
        result = None
        for line in process.stdout:
            result = worker.handle_result_line(line, stop_others=self._stop_all)
        process.wait()
        return result

    def _stop_all(self) -> None:
        """Tell all workers to stop because a target is down."""
        for process in self._processes:
            worker.send_line(process, worker.STOPPING)

    def _close(self) -> None:
        """End all processes and threads."""
        # All processes are asked to end before the first is waited for.
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

        for process in self._processes:
            child_process.end_process(process)

        self._threads.shutdown()

        # Listeners of this load may keep the counters for longer.
        self._counters.close()


def _suppress_unretrieved_warning(future: asyncio.Future[None]) -> None:
    """Retrieve the exception of a future when it ends, if it has one.

    asyncio otherwise logs a warning for each exception that nobody retrieves.
    """
    future.add_done_callback(lambda ended: ended.exception())
