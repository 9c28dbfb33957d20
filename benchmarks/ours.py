"""Run loadgen's own client as a contender of the benchmarks, in this process.

It makes the same calls in the same order as `loadgen.core.execution.run.execute`: probe, plan,
manifest, recorder, worker and summary. They are separate here only to read the CPU time at the
right moments: the window opens at the start time of the load and closes with the last record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import rig
import uvloop

from loadgen.core.execution import run, run_manifest
from loadgen.core.execution.driver import START_DELAY_NS, Driver, run_worker
from loadgen.core.execution.plan import Plan, PreparationContext, Settings, prepare_plan
from loadgen.core.execution.probing import probe_url
from loadgen.core.execution.worker_resources import WorkerResult
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, encode_manifest
from loadgen.core.results.record import STATUS
from loadgen.core.sidecars.compactor_process import Compactor
from loadgen.core.workload import Workload, load, read_flags

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# The recorder counts as idle if it has used less CPU time than this between two readings
MAX_IDLE_CPU_S = 0.005
RECORDER_POLL_INTERVAL_S = 0.3

# The measurement window opens after this fraction of the delay before the load starts, so that the
# reading of the counters is over when the first request is due
WINDOW_BEGIN_FRACTION = 0.9


def run_load(
    url: str, *, folder: str = "", requests: dict[str, Any], **flags: Any
) -> dict[str, Any]:
    """Run one load against a server and return what it cost; a contender of the benchmarks.

    Args:
        url: The address of the server.
        folder: Where the files of the run stay. Without it, they are temporary.
        requests: The block `requests` of the workload file, such as the tokens per prompt.
        flags: Options of `loadgen run`, such as `concurrency`.
    """
    with contextlib.ExitStack() as stack:
        if not folder:
            scratch = tempfile.TemporaryDirectory(prefix="loadgen-bench-")
            folder = stack.enter_context(scratch)

        run_dir = Path(folder)
        workload = create_workload(run_dir, requests, flags)
        return measure_load(url, run_dir, workload)


def run_streams(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """Read `streams` concurrent responses of `tokens` tokens each; a contender of `events.py`.

    All requests are sent at the start. Return the result of `run_load`, and the number of events
    that it should have received.
    """
    requests = {"input_tokens": 4, "output_tokens": tokens}
    flags: dict[str, Any] = {"concurrency": streams, "num_requests": streams, "stagger": "0"}
    result = run_load(url, requests=requests, **flags)
    result["expected"] = streams * tokens
    return result


def create_workload(
    run_dir: Path, requests: Mapping[str, object], flags: Mapping[str, Any]
) -> Workload:
    """Write a workload file with a block of requests, and load it with options of `loadgen run`."""
    workload_path = run_dir / "bench.yaml"  # JSON is valid YAML
    workload_path.write_text(json.dumps({"name": "bench", "requests": requests}))
    return load(str(workload_path), read_flags(**flags))


class SentLoad(NamedTuple):
    """A load that was sent and whose results are not yet written.

    Attributes:
        plan: What was to be sent, and when.
        manifest: The manifest of the run as it was before the load.
        worker_result: What the worker reported at the end of the load.
        recorder: The process that converts the record log to Parquet.
        recorder_cpu_s: The CPU-seconds of that process during the load.
        start_ns: The start time of the schedule on the monotonic clock.
        socket_reads: How often the worker read from a socket.
    """

    plan: Plan
    manifest: RunManifest
    worker_result: WorkerResult
    recorder: Compactor
    recorder_cpu_s: float
    start_ns: int
    socket_reads: int


def measure_load(url: str, run_dir: Path, workload: Workload) -> dict[str, Any]:
    """Run a workload in this process and return what its load cost, as JSON values.

    The window covers the load only. The summary, which decides whether the run is valid, is
    computed after it. The run ID and the start time (monotonic, in ns) tell which requests in a
    server's log belong to the load.
    """
    window = rig.MeasurementWindow()
    sent = send_load(url, run_dir, workload, window)
    summary = run.finish_run(sent.plan, sent.manifest, sent.worker_result, sent.recorder)

    return {
        "run_id": sent.plan.job.run_id,
        "start_ns": sent.start_ns,
        "recorder_cpu_s": sent.recorder_cpu_s,
        "valid": summary.verdict.valid,
        "reasons": list(summary.verdict.reasons),
        **count_records(run_dir, sent.socket_reads),
        **window.result,
    }


def send_load(
    url: str, run_dir: Path, workload: Workload, window: rig.MeasurementWindow
) -> SentLoad:
    """Send the load of a workload with one worker in this process, inside a measurement window.

    The window opens shortly before the first request and closes after the last record.
    """
    drivers: list[Driver] = []  # the worker adds its driver, whose reactor counts the reads

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        plan, manifest = runner.run(plan_load(url, run_dir, workload))
        recorder = Compactor(run_dir)
        recorder_cpu = RecorderCpuMeter()  # finds the recorder, a child of this process
        gate = StartGate(recorder_cpu, window)
        worker = run_worker(
            plan, worker=0, workers=1, wait_for_start=gate.wait, on_started=drivers.append
        )
        worker_result = runner.run(worker)
        window.end()
        recorder_cpu_s = recorder_cpu.used_s()

    return SentLoad(
        plan,
        manifest,
        worker_result,
        recorder,
        recorder_cpu_s,
        start_ns=gate.start_ns,
        socket_reads=drivers[0]._reactor.reads,
    )


async def plan_load(url: str, run_dir: Path, workload: Workload) -> tuple[Plan, RunManifest]:
    """Probe the server, plan the load, and write the manifest of the run to its folder."""
    settings = Settings(url=url)
    probe_result = await probe_url(settings, workload.timeout_ns / 1e9)
    context = PreparationContext(folder=run_dir)
    plan, user_starts = prepare_plan(workload, settings, (probe_result,), context)
    manifest = run_manifest.create_manifest(plan, workload, user_starts)
    store.replace(run_dir / "run.json", encode_manifest(manifest))
    return plan, manifest


def count_records(run_dir: Path, socket_reads: int) -> dict[str, float]:
    """Return the numbers of requests, of successful ones and of output events of a stored run.

    `reads_per_event` is below 1 if the client received several events with one read.
    """
    records = store.read_run(run_dir).rows
    events = int(records["output_events"].sum())
    return {
        "requests": len(records),
        "ok": int((records["status"] == STATUS["ok"]).sum()),
        "events": events,
        "reads_per_event": socket_reads / max(events, 1),
    }


class StartGate:
    """Holds the load back until the recorder is idle, and opens the measurement window.

    `start_ns` is the start time of the load on the monotonic clock, or -1 before it is known.
    """

    def __init__(self, recorder_cpu: RecorderCpuMeter, window: rig.MeasurementWindow) -> None:
        self._recorder_cpu = recorder_cpu
        self._window = window
        self.start_ns = -1

    async def wait(self) -> int:
        """Wait until the recorder is idle, then return the start time of the load.

        As in every run, it is START_DELAY_NS from now on the monotonic clock. The measurement
        window opens after most of this delay, WINDOW_BEGIN_FRACTION of it.
        """
        await self._recorder_cpu.wait_until_idle()
        self.start_ns = monotonic_ns() + START_DELAY_NS

        loop = asyncio.get_running_loop()
        window_delay_s = START_DELAY_NS / 1e9 * WINDOW_BEGIN_FRACTION
        loop.call_later(window_delay_s, self._window.begin)
        return self.start_ns


class RecorderCpuMeter:
    """Measures the CPU time of the recorder, which is the only child of this process.

    What it uses before `wait_until_idle` ends is not counted: it imports its modules then, which is
    a cost of the start and not of the load.
    """

    def __init__(self) -> None:
        children_path = Path(f"/proc/self/task/{os.getpid()}/children")
        self._child_pids = [int(pid) for pid in children_path.read_text().split()]
        self._idle_cpu_s = 0.0  # what the recorder had used when it became idle

    async def wait_until_idle(self) -> None:
        """Wait until the recorder has imported its modules and uses hardly any CPU time."""
        while True:
            cpu_s = self._read_total_cpu_s()
            used_since_last_reading_s = cpu_s - self._idle_cpu_s
            if used_since_last_reading_s <= MAX_IDLE_CPU_S:
                return
            self._idle_cpu_s = cpu_s
            await asyncio.sleep(RECORDER_POLL_INTERVAL_S)

    def used_s(self) -> float:
        """Return the CPU-seconds that the recorder has used since it became idle."""
        return self._read_total_cpu_s() - self._idle_cpu_s

    def _read_total_cpu_s(self) -> float:
        """Return the CPU-seconds that the recorder has used since it was started."""
        return sum(read_process_cpu_s(pid) for pid in self._child_pids)


def read_process_cpu_s(pid: int) -> float:
    """Return the CPU-seconds that another process has used so far, in user mode and in the kernel.

    The kernel counts them in clock ticks, which are usually 10 ms.
    """
    stat = Path(f"/proc/{pid}/stat").read_text()

    # The second field is the name of the program in parentheses, which may contain spaces, so only
    # the text after it is split. In proc(5), utime is the 14th field and stime the 15th.
    fields_from_third = stat.rpartition(")")[2].split()
    user_ticks = int(fields_from_third[14 - 3])
    kernel_ticks = int(fields_from_third[15 - 3])
    return (user_ticks + kernel_ticks) / CLOCK_TICKS_PER_S


if __name__ == "__main__":
    rig.run_as_contender({"ours": run_streams, "load": run_load})
