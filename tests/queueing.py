"""The records of a small simulated queue, for statistical tests over many seeds.

Arrivals are a Poisson process, the number of slots is fixed, and the time per token grows with the
batch. Neither sockets nor a clock are involved.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np
from make_examples import MS, S, blank, stream
from numpy.typing import NDArray

from loadgen.contracts.level_plan import LIMITS_JUDGED_BY_CONTRACT
from loadgen.contracts.recorded_run import RecordedRun
from loadgen.core.limits import ValidityLimits
from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import KINDS, SOURCES, STATUSES
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo
from loadgen.core.stats.histogram import Histogram

TOKENS = 200
SLOTS = 32


def rows(seed: int, n: int, rate: float = 10.0, slower: float = 1.0) -> NDArray[np.void]:
    """Simulate N requests of an M/G/SLOTS queue.

    At 8/s its utilisation is about 65 %, at 10/s 85 %. `slower` multiplies its service times.
    """
    return _draw_records(seed, n, rate, slower).copy()


@lru_cache(64)
def _draw_records(seed: int, n: int, rate: float, slower: float) -> NDArray[np.void]:
    draw = np.random.default_rng(seed)
    due = np.cumsum(draw.exponential(1 / rate, n))
    noise = draw.lognormal(0, 0.15, n)
    prefill = draw.lognormal(np.log(0.12), 0.25, n) * slower
    free = [0.0] * SLOTS
    busy: list[float] = []
    first, gap = np.empty(n), np.empty(n)
    for i in range(n):
        start = max(due[i], heapq.heappop(free))
        while busy and busy[0] <= start:
            heapq.heappop(busy)
        gap[i] = 0.009 * (1 + len(busy) / SLOTS * 0.5) * noise[i] * slower
        first[i] = start + prefill[i]
        end = first[i] + gap[i] * (TOKENS - 1)
        heapq.heappush(busy, end)
        heapq.heappush(free, end)
    records = blank(n)
    records["due_ns"] = (due * S).astype(np.int64)
    records["output_tokens"] = records["output_events"] = TOKENS
    records["first_event_tokens"] = 1
    records["input_tokens"] = records["built_tokens"] = 150
    records["input_source"] = records["output_source"] = SOURCES.index("server")
    stream(
        records,
        ((first - due) * S).astype(np.int64),
        (gap * S).astype(np.int64),
        np.full(n, MS // 20),
    )
    return records


def send_late(records: NDArray[np.void]) -> None:
    """Make the client send every request 100 ms late, so that the run is not valid."""
    records["sent_ns"] = records["due_ns"] + 100 * MS


def fail(records: NDArray[np.void], share: float, seed: int = 0) -> None:
    """So many requests, drawn, get a 503."""
    chosen = np.random.default_rng(seed).random(len(records)) < share
    records["status"][chosen] = STATUSES.index("failed")
    records["kind"][chosen] = KINDS.index("http_5xx")
    records["http_status"][chosen] = 503
    records["output_tokens"][chosen] = -1
    for field in ("first_token_ns", "first_answer_ns", "last_token_ns", "end_ns"):
        records[field][chosen] = -1
    records["done_ns"][chosen] = records["sent_ns"][chosen] + MS


def run(
    records: NDArray[np.void],
    *,
    slo: Slo | None = None,
    nodes: int = 1,
    gpus: int | None = 4,
    folder: str = "load/r1",
) -> RecordedRun:
    """Return the rows as a run of one measured stage, with the limits of `loadgen validate`."""
    manifest = RunManifest(
        run=folder,
        state="finished",
        stages=(StagePlan(name="load", arrival="poisson 10/s", slots=len(records), rate=10.0),),
        targets=tuple(TargetFacts(url=f"http://node-{i}", gpus=gpus) for i in range(nodes)),
        slo=slo,
        limits=ValidityLimits(**dict.fromkeys(LIMITS_JUDGED_BY_CONTRACT, 1.0)),
        rtt_ms=0.2,
    )
    gaps = Histogram()
    ok = records["status"] == 0
    gaps.add(np.repeat(records["max_gap_ns"][ok], TOKENS - 1))
    return RecordedRun(
        folder=folder,
        manifest=manifest,
        summary=summarize(manifest, records, [gaps]),
        rows=records,
        gaps=gaps,
    )
