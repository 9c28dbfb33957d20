"""Run our own client as a contender of the benchmarks, in this process.

It makes the same calls in the same order as `loadgen.core.execution.run.execute`: schedule, bodies,
client, driver, record log and recorder. They are separate here only to read the CPU time at the
right moments: the window opens at the start time of the run and closes with the last record.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
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
from loadgen.core.workload import load, read_flags

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _read_process_cpu_s(pid: int) -> float:
    """Return the CPU-seconds of another process so far, with a resolution of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def run_load(
    url: str, *, folder: str = "", requests: dict[str, Any], **flags: Any
) -> dict[str, Any]:
    """Run one load against `url` and return what it cost.

    `flags` are options of the command line, `requests` is that block of the workload.
    """
    scratch = folder or tempfile.mkdtemp(prefix="loadgen-bench-")
    try:
        return _run_load_in(url, Path(scratch), requests, flags)
    finally:
        if not folder:
            shutil.rmtree(scratch)


def _run_load_in(
    url: str, folder: Path, requests: dict[str, Any], flags: dict[str, Any]
) -> dict[str, Any]:
    """Run a load in `folder`; see `run_load`."""
    workload_path = folder / "bench.yaml"
    workload_path.write_text(f"name: bench\nrequests: {requests}\n".replace("'", ""))
    workload = load(str(workload_path), read_flags(**flags))
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
        child_pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        recorder_start_cpu_s = [0.0]
        start_times_ns: list[int] = []

        async def gate() -> int:
            """Wait until the recorder has imported its modules; return the start time in ns."""
            loop = asyncio.get_running_loop()
            start_ns = monotonic_ns() + START_DELAY_NS
            while (
                sum(_read_process_cpu_s(int(pid)) for pid in child_pids) - recorder_start_cpu_s[0]
                > 0.005
            ):  # its imports are a cost of the start
                recorder_start_cpu_s[0] = sum(_read_process_cpu_s(int(pid)) for pid in child_pids)
                await asyncio.sleep(0.3)
                start_ns = monotonic_ns() + START_DELAY_NS
            start_times_ns.append(start_ns)
            loop.call_at(loop.time() + START_DELAY_NS / 1e9 * 0.9, window.begin)
            return start_ns

        worker_result = runner.run(run_worker(plan, 0, 1, gate, drivers.append))
        window.end()
        recorder_cpu_s = (
            sum(_read_process_cpu_s(int(pid)) for pid in child_pids) - recorder_start_cpu_s[0]
        )
    summary = run.finish_run(plan, manifest, worker_result, recorder)
    rows = store.read_run(folder).rows
    events = int(rows["output_events"].sum())
    reads = drivers[0]._reactor.reads
    return {
        "run_id": plan.job.run_id,
        "start_ns": start_times_ns[0],
        "events": events,
        "requests": len(rows),
        "ok": int((rows["status"] == 0).sum()),
        "recorder_cpu_s": recorder_cpu_s,
        "reads_per_event": reads / max(events, 1),
        "stamp_error_p50_ms": float(np.median(rows["stamp_error_ns"])) / 1e6,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "valid": summary.verdict.valid,
        "reasons": list(summary.verdict.reasons),
        **window.result,
    }


def run_streams(url: str, streams: int, tokens: int) -> dict[str, Any]:
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
