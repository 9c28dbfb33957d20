"""Run directories for tests, written by the store from the records of `queueing.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from queueing import TOKENS, rows

from loadgen.core.execution.events import EventHandler, LoadStarted, RunEvent, RunningLoad
from loadgen.core.results.manifest import (
    Fingerprints,
    Host,
    ReasonCode,
    RunManifest,
    StagePlan,
    TargetFacts,
    WorkerSample,
    encode_manifest,
)
from loadgen.core.results.record import BIN_NS
from loadgen.core.results.record_log import RecordLog
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import Histogram

S = 1_000_000_000
NO_PAGES: dict[str, Any] = {"server_metrics": ("off",), "energy": ("off",)}
"""Settings of a run whose servers' own pages are not looked at: no scraper starts."""


def when_started(do: Callable[[RunningLoad], object]) -> tuple[EventHandler, ...]:
    """For `run.execute`: one that calls `do` when the load begins."""

    def hear(event: RunEvent) -> None:
        if isinstance(event, LoadStarted):
            do(event.load)

    return (hear,)


def says(codes: Iterable[ReasonCode], code: str, **values: object) -> bool:
    """Whether one of the codes of a verdict is this one, with these of its values."""
    return any(
        reason_code.code == code
        and all(reason_code.values[name] == value for name, value in values.items())
        for reason_code in codes
    )


@contextlib.contextmanager
def frozen_at_birth(module: str, count: int) -> Iterator[list[int]]:
    """Stop the first `count` child processes that run `module` as soon as they are seen.

    The context yields the list of their process ids.
    """
    frozen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while len(frozen) < count and not over.wait(0.001):
            for pid in map(
                int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            ):
                if pid not in frozen and module in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGSTOP)
                    frozen.append(pid)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield frozen
    finally:
        over.set()
        watching.join()


def manifest(name: str, n: int, **changes: object) -> RunManifest:
    """Of one measured stage with an SLO that queueing's rows meet."""
    fields: dict[str, object] = {
        "run": name,
        "started": "2026-11-21T10:15:00+00:00",
        "ended": "2026-11-21T10:19:00+00:00",
        "state": "finished",
        "version": "0.1.0",
        "command": ("loadgen", "run", "chat", "--url", "http://gpu.example/v1"),
        "workload": "chat",
        "source_text": "name: chat\n",
        "seed": 7,
        "targets": (
            TargetFacts(url="http://gpu.example/v1", server="trtllm", model="llama", gpus=4),
        ),
        "slo": Slo(
            terms=(Term(metric="ttft", limit_ns=20 * S), Term(metric="tpot", limit_ns=S // 5))
        ),
        "stages": (StagePlan(name="load", arrival="poisson 10/s", slots=n, rate=10.0),),
        "fingerprints": Fingerprints(recipe="b1946ac92492d234"),
        "tokenizer": "cl100k",
        "tokenizer_tag": "estimate",
        "host": Host(name="load-1", python="3.12.4", cpus=16),
        **changes,
    }
    return RunManifest(**fields)  # type: ignore[arg-type]


def gaps_of(records: NDArray[np.void]) -> tuple[Histogram, NDArray[np.int64]]:
    """Histogram of gaps and timeline of events of rows with even gaps."""
    gaps = Histogram()
    ok = (records["output_events"] > 1) & (records["last_token_ns"] >= 0)
    gaps.add(np.repeat(records["max_gap_ns"][ok], TOKENS - 1))
    horizon = int(records["last_token_ns"].max()) // BIN_NS + 1
    counts = np.zeros(horizon, np.int64)
    for row in records[ok]:
        events = row["first_token_ns"] + row["max_gap_ns"] * np.arange(row["output_events"])
        counts += np.bincount(events // BIN_NS, minlength=horizon)[:horizon]
    return gaps, counts


def write(
    folder: Path,
    records: NDArray[np.void] | None = None,
    *,
    texts: tuple[str, ...] = (),
    **changes: object,
) -> Path:
    """Write a run directory for `store.read`, as a worker leaves it."""
    records = rows(1, 300) if records is None else records
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_bytes(
        encode_manifest(manifest(folder.name, len(records), **changes))
    )
    record_log = RecordLog(folder, 0)
    for text in texts:
        record_log.store_text(text)
    record_log.add_record(records.tobytes())
    gaps, timeline = gaps_of(records)
    half = len(timeline) // 2
    record_log.write_event_counts(0, Histogram(), timeline[:half])
    record_log.write_event_counts(0, gaps, timeline)
    for t in range(int(records["done_ns"].max() // S)):
        record_log.add_sample(
            WorkerSample(t_s=t + 1.0, cpu_share=0.2, cpu_s=0.2 * (t + 1), peak_rss_bytes=80_000_000)
        )
    record_log.close()
    return folder
