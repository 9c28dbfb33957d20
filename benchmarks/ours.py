"""Run our own client as a contender of the benchmarks, in this process.

It makes the same calls in the same order as `loadgen.core.execution.run.execute`: schedule, bodies,
client, driver, record log and recorder. They are separate here only to read the CPU time at the
right moments: the window opens at the start time of the run and closes with the last record.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import rig
import uvloop

from loadgen.core.execution import run, run_manifest
from loadgen.core.execution.driver import START_DELAY_NS, Driver, run_worker
from loadgen.core.execution.plan import PreparationContext, Settings, prepare_plan
from loadgen.core.execution.probing import probe_url
from loadgen.core.results import store
from loadgen.core.results.manifest import encode_manifest
from loadgen.core.sidecars.compactor_process import Compactor
from loadgen.core.workload import Workload, load, read_flags

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _read_process_cpu_s(pid: int) -> float:
    """Return the CPU-seconds of another process so far, with a resolution of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def run_load(
    url: str, *, folder: str = "", requests: dict[str, Any], **flags: Any
) -> dict[str, Any]:
    """Run one load against `url` and return what it cost.

    `flags` are options of the command line, `requests` is that block of the workload. The files of
    the run stay in `folder`; without it they go to a temporary one.
    """
    with contextlib.ExitStack() as stack:
        run_dir = folder or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="loadgen-bench-")
        )
        workload = _write_workload(Path(run_dir), requests, flags)
        return _measure_run(url, Path(run_dir), workload)


def _write_workload(
    folder: Path, requests: Mapping[str, object], flags: Mapping[str, object]
) -> Workload:
    """Write a workload file with this block of requests and load it with the options."""
    workload_path = folder / "bench.yaml"
    workload_path.write_text(f"name: bench\nrequests: {requests}\n".replace("'", ""))
    return load(str(workload_path), read_flags(**flags))


IMPORTS_DONE_CPU_S = 0.005  # less CPU than this between two readings: nothing is imported any more


RECORDER_POLL_S = 0.3


WINDOW_OPENING = 0.9  # fraction of the delay until the load starts, after which the window opens


class RecorderCpu:
    """The CPU time of the child processes of this one, which are those of the recorder.

    What they use before `wait_until_idle` ends is the import of their modules, a cost of the start.
    """

    def __init__(self) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        self._pids = [int(pid) for pid in children.read_text().split()]
        self._start_cpu_s = 0.0

    def _read_cpu_s(self) -> float:
        """Return the CPU-seconds of all children since their start."""
        return sum(_read_process_cpu_s(pid) for pid in self._pids)

    async def wait_until_idle(self) -> None:
        """Wait until the children have imported their modules."""
        while (cpu_s := self._read_cpu_s()) - self._start_cpu_s > IMPORTS_DONE_CPU_S:
            self._start_cpu_s = cpu_s
            await asyncio.sleep(RECORDER_POLL_S)

    def used_s(self) -> float:
        """Return the CPU-seconds since the children were idle."""
        return self._read_cpu_s() - self._start_cpu_s


class StartGate:
    """Chooses the start time of a load and opens the measurement window shortly before it."""

    def __init__(self, recorder_cpu: RecorderCpu, window: rig.MeasurementWindow) -> None:
        self._recorder_cpu = recorder_cpu
        self._window = window
        self.start_ns = -1

    async def wait(self) -> int:
        """Wait for the recorder and return the start time on the monotonic clock, in ns."""
        await self._recorder_cpu.wait_until_idle()
        self.start_ns = monotonic_ns() + START_DELAY_NS
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + START_DELAY_NS / 1e9 * WINDOW_OPENING, self._window.begin)
        return self.start_ns


def _measure_run(url: str, folder: Path, workload: Workload) -> dict[str, object]:
    """Run a workload in this process and return what its load cost.

    The steps are those of `loadgen.core.execution.run.execute`, with one worker.
    """
    settings = Settings(url=url)
    window = rig.MeasurementWindow()

    drivers: list[Driver] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        probed_target = runner.run(probe_url(settings, workload.timeout_ns / 1e9))
        context = PreparationContext(folder=folder)
        plan, starts = prepare_plan(workload, settings, (probed_target,), context)
        manifest = run_manifest.create_manifest(plan, workload, starts)
        store.replace(folder / "run.json", encode_manifest(manifest))
        recorder = Compactor(folder)
        recorder_cpu = RecorderCpu()
        gate = StartGate(recorder_cpu, window)
        worker_result = runner.run(run_worker(plan, 0, 1, gate.wait, drivers.append))
        window.end()
        recorder_cpu_s = recorder_cpu.used_s()

    summary = run.finish_run(plan, manifest, worker_result, recorder)
    (driver,) = drivers
    return {
        "run_id": plan.job.run_id,
        "start_ns": gate.start_ns,
        "recorder_cpu_s": recorder_cpu_s,
        **_count_requests(folder, reads=driver._reactor.reads),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "valid": summary.verdict.valid,
        "reasons": list(summary.verdict.reasons),
        **window.result,
    }


def _count_requests(folder: Path, reads: int) -> dict[str, object]:
    """Return the counts of a stored run; `reads` is how often its sockets were read."""
    rows = store.read_run(folder).rows
    events = int(rows["output_events"].sum())
    return {
        "events": events,
        "requests": len(rows),
        "ok": int((rows["status"] == 0).sum()),
        "reads_per_event": reads / max(events, 1),
        "stamp_error_p50_ms": float(np.median(rows["stamp_error_ns"])) / 1e6,
    }


def run_streams(url: str, streams: int, tokens: int) -> dict[str, object]:
    """Run a closed loop of `streams` concurrent requests, one request each."""
    flags: dict[str, Any] = {
        "concurrency": streams,
        "stagger": "0",
        "num_requests": streams,
    }
    result = run_load(url, requests={"input_tokens": 4, "output_tokens": tokens}, **flags)
    return result | {"expected": streams * tokens}


if __name__ == "__main__":
    rig.run_as_contender({"ours": run_streams, "drive": run_load})
