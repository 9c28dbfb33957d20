"""Our own side of the benchmarks: the real path (schedule, bodies, client, driver, spool, recorder), in this process.

The same calls in the same order as `loadgen.run.execute`, taken apart only to read the CPU at the right instants: the
window opens at the start instant of the run and closes when the last record is written.
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

TICKS = os.sysconf("SC_CLK_TCK")


def _cpu_of(pid: int) -> float:
    """CPU-seconds of another process so far, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def drive(url: str, *, folder: str = "", requests: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """One run against `url`. `flags` are those of the command line, `requests` the workload's."""
    scratch = folder or tempfile.mkdtemp(prefix="loadgen-bench-")
    try:
        return _drive(url, Path(scratch), requests, flags)
    finally:
        if not folder:
            shutil.rmtree(scratch)


def _drive(
    url: str, folder: Path, requests: dict[str, Any], flags: dict[str, Any]
) -> dict[str, Any]:
    file = folder / "bench.yaml"
    file.write_text(f"name: bench\nrequests: {requests}\n".replace("'", ""))
    workload = load(str(file), read_flags(**flags))
    settings = Settings(url=url)
    window = rig.Window()
    seen: list[Driver] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(probe_url(settings, workload.timeout_ns / 1e9))
        context = PreparationContext(folder=folder)
        plan, starts = prepare_plan(workload, settings, (found,), context)
        manifest = run_manifest.create_manifest(plan, workload, starts)
        store.replace(folder / "run.json", encode_manifest(manifest))
        recorder = Compactor(folder)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        recorded = [0.0]
        started: list[int] = []

        async def gate() -> int:
            loop = asyncio.get_running_loop()
            start = monotonic_ns() + START_DELAY_NS
            while (
                sum(_cpu_of(int(pid)) for pid in children) - recorded[0] > 0.005
            ):  # its imports are a cost of the start
                recorded[0] = sum(_cpu_of(int(pid)) for pid in children)
                await asyncio.sleep(0.3)
                start = monotonic_ns() + START_DELAY_NS
            started.append(start)
            loop.call_at(loop.time() + START_DELAY_NS / 1e9 * 0.9, window.begin)
            return start

        share = runner.run(run_worker(plan, 0, 1, gate, seen.append))
        window.end()
        recorder_cpu = sum(_cpu_of(int(pid)) for pid in children) - recorded[0]
    summary = run.finish_run(plan, manifest, share, recorder)
    rows = store.read_run(folder).rows
    events = int(rows["output_events"].sum())
    reads = seen[0]._reactor.reads
    return {
        "run_id": plan.job.run_id,
        "start_ns": started[0],
        "events": events,
        "requests": len(rows),
        "ok": int((rows["status"] == 0).sum()),
        "recorder_cpu_s": recorder_cpu,
        "reads_per_event": reads / max(events, 1),
        "stamp_error_p50_ms": float(np.median(rows["stamp_error_ns"])) / 1e6,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "valid": summary.verdict.valid,
        "reasons": list(summary.verdict.reasons),
        **window.result,
    }


def streams(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """As the contenders: so many streams at once, one request each."""
    at_once: dict[str, Any] = {
        "concurrency": streams,
        "stagger": "0",
        "num_requests": streams,
    }
    found = drive(url, requests={"input_tokens": 4, "output_tokens": tokens}, **at_once)
    return found | {"expected": streams * tokens}


if __name__ == "__main__":
    rig.serve({"ours": streams, "drive": drive})
