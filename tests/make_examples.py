"""Write `tests/data/summary_example_*.json` from seeded synthetic records.

The two examples are produced by `summarize`, so that their numbers are consistent. Run
`python tests/make_examples.py` to write them; a test checks that they are current.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.summary import dump_summary
from loadgen.core.results.manifest import (
    Fingerprints,
    Host,
    RunManifest,
    StagePlan,
    TargetFacts,
    WorkerSample,
)
from loadgen.core.results.record import BIN_NS, FINISH_REASONS, KINDS, ROW, SOURCES, STATUSES
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import Histogram

DATA = Path(__file__).parent / "data"
MS, S = 1_000_000, 1_000_000_000
Inputs = tuple[
    RunManifest,
    NDArray[np.void],
    list[Histogram],
    list[NDArray[np.int64]],
    list[WorkerSample],
    list[str],
]
"""What `summarize` takes."""
HOST = Host(
    name="load-1", kernel="Linux 6.8.0", python="3.12.4", cpu="AMD EPYC 9V33X", cpus=16, clock="tsc"
)

DURATIONS = (
    "client_lag_ns",
    "stamp_error_ns",
    "last_token_error_ns",
    "max_gap_ns",
    "max_gap_error_ns",
)


def blank(n: int) -> NDArray[np.void]:
    """N rows of requests that are ok and that nothing is known of yet."""
    rows = np.zeros(n, ROW)
    for field in (
        "session",
        "virtual_user",
        "cached_tokens",
        "cache_written_tokens",
        "reasoning_tokens",
        "input_tokens",
        "output_tokens",
        "built_tokens",
    ):
        rows[field] = -1
    for field in ROW.names or ():
        if field.endswith("_ns") and field not in DURATIONS:
            rows[field] = -1
    rows["slot"] = rows["request"] = np.arange(n)
    rows["text"] = rows["asked_output"] = -1
    rows["finish_reason"] = FINISH_REASONS.index("length")
    return rows


def stream(
    rows: NDArray[np.void],
    ttft_ns: NDArray[np.int64],
    gap_ns: NDArray[np.int64],
    lag_ns: NDArray[np.int64],
) -> None:
    """Return records of responses with equal gaps between tokens.

    Each is sent `lag_ns` after it was due, has its first token `ttft_ns` later and has
    `output_events` events.
    """
    rows["ready_ns"] = rows["due_ns"] + lag_ns - 20_000
    rows["sent_ns"] = rows["due_ns"] + lag_ns
    rows["first_token_ns"] = rows["first_answer_ns"] = rows["due_ns"] + ttft_ns
    rows["first_byte_ns"] = rows["first_event_ns"] = rows["first_token_ns"] - 200_000
    rows["last_token_ns"] = rows["first_token_ns"] + gap_ns * (rows["output_events"] - 1)
    rows["end_ns"] = rows["last_token_ns"] + 50_000
    rows["done_ns"] = rows["end_ns"] + 100_000
    rows["max_gap_ns"] = gap_ns
    rows["http_status"] = 200
    rows["kernel_stamp"] = 1


def seen(rows: NDArray[np.void], stages: int) -> tuple[list[Histogram], list[NDArray[np.int64]]]:
    """Histograms of gaps and timelines of events of streams with even gaps."""
    gaps, timeline = [Histogram() for _ in range(stages)], []
    horizon = int(rows["last_token_ns"].max()) // BIN_NS + 1
    for stage in range(stages):
        counts = np.zeros(horizon, np.int64)
        for row in rows[(rows["stage"] == stage) & (rows["output_events"] > 0)]:
            events = row["first_token_ns"] + row["max_gap_ns"] * np.arange(row["output_events"])
            gaps[stage].add(np.diff(events))
            counts += np.bincount(events // BIN_NS, minlength=horizon)
        timeline.append(counts)
    return gaps, timeline


def samples(until_s: int, workers: int, share: float) -> list[WorkerSample]:
    return [
        WorkerSample(
            t_s=t + 1.0,
            worker=w,
            cpu_share=share,
            waited_share=0.001 * (t % 8),
            cpu_s=share * (t + 1),
            peak_rss_bytes=90_000_000 + 10_000 * t,
        )
        for t in range(until_s)
        for w in range(workers)
    ]


def rented_gpus() -> Inputs:
    """RAG on a rented machine of four GPUs, open loop, Poisson, after a warm-up; valid, SLO met."""
    draw = np.random.default_rng(20)
    warm, n, rate = 200, 1500, 20.0
    rows = blank(warm + n)
    rows["due_ns"] = np.cumsum(draw.exponential(1 / rate, warm + n) * 1e9).astype(np.int64)
    rows["stage"][warm:] = 1
    rows["worker"] = rows["slot"] % 2
    rows["output_events"] = rows["output_tokens"] = rows["asked_output"] = 1200
    rows["built_tokens"], rows["input_tokens"], rows["cached_tokens"] = 1302, 1320, 16
    rows["input_source"] = rows["output_source"] = SOURCES.index("server")
    rows["bytes_sent"], rows["bytes_received"] = 6_420, 284_300
    rows["reused"] = 1
    ttft = (draw.lognormal(np.log(180), 0.35, warm + n) * 1e6).astype(np.int64)
    gap = (draw.normal(9.0, 0.4, warm + n) * 1e6).astype(np.int64)
    stream(rows, ttft, gap, (draw.gamma(4, 20_000, warm + n)).astype(np.int64) + 20_000)
    rows["client_lag_ns"] = draw.gamma(3, 15_000, warm + n)
    rows["stamp_error_ns"] = np.where(
        draw.random(warm + n) < 0.9, 0, draw.gamma(3, 30_000, warm + n)
    )
    boundary = int(rows["due_ns"][warm])
    gaps, timeline = seen(rows, 2)
    manifest = RunManifest(
        run="20261121-101500-rag-7f3a",
        name="rag on one ND GB300 v6",
        started="2026-11-21T10:15:00.000000+00:00",
        ended="2026-11-21T10:16:41.000000+00:00",
        state="finished",
        version="0.1.0",
        command=(
            "loadgen",
            "run",
            "rag",
            "--url",
            "https://gb300.example.net",
            "--request-rate",
            "20",
            "--gpus",
            "4",
        ),
        workload="rag",
        seed=20,
        schedule_seed=20,
        targets=(
            TargetFacts(
                url="https://gb300.example.net",
                server="trtllm",
                model="meta-llama/Llama-2-70b-chat-hf",
                gpus=4,
                shape="ND128isr_GB300_v6",
                region="eastus",
            ),
        ),
        slo=Slo(
            terms=(
                Term(metric="ttft", limit_ns=2 * S, quantile=0.99),
                Term(metric="tpot", limit_ns=200 * MS, quantile=0.99),
            ),
            goodput_share=0.99,
        ),
        stages=(
            StagePlan(
                name="warm-up",
                arrival="poisson 20/s",
                measured=False,
                end_ns=boundary,
                slots=warm,
                rate=rate,
            ),
            StagePlan(name="load", arrival="poisson 20/s", start_ns=boundary, slots=n, rate=rate),
        ),
        fingerprints=Fingerprints(
            recipe="b1946ac92492d2347c6235b4d2611184",
            prompts="591785b794601e212b260e25925636fd",
            schedule="5f4dcc3b5aa765d6",
        ),
        rtt_ms=1.84,
        tokenizer="cl100k",
        tokenizer_tag="estimate",
        template_tokens=18,
        workers=2,
        host=HOST,
    )
    return manifest, rows, gaps, timeline, samples(100, 2, 0.31), []


def token_priced() -> Inputs:
    """Return the inputs of a Q&A run on an API that bills tokens: closed loop, bundled events.

    The run is INVALID, because the client ran out of file descriptors. Some requests failed at the
    server too.
    """
    draw = np.random.default_rng(21)
    concurrency, n = 16, 320
    rows = blank(n)
    rows["virtual_user"] = rows["slot"] % concurrency
    rows["output_tokens"] = np.where(draw.random(n) < 0.9, 500, draw.integers(300, 500, n))
    rows["finish_reason"] = np.where(
        rows["output_tokens"] == 500, FINISH_REASONS.index("length"), FINISH_REASONS.index("stop")
    )
    rows["asked_output"] = 500
    rows["output_events"] = -(-rows["output_tokens"] // 4)
    rows["built_tokens"], rows["input_tokens"] = 150, 158
    rows["cached_tokens"] = 0
    rows["input_source"] = rows["output_source"] = SOURCES.index("server")
    rows["bytes_sent"], rows["bytes_received"] = 1_130, 41_200
    ttft = (draw.lognormal(np.log(420), 0.5, n) * 1e6).astype(np.int64)
    gap = (draw.normal(44.0, 4.0, n) * 1e6).astype(np.int64)
    took = ttft + gap * (rows["output_events"] - 1) + MS
    for virtual_user in range(concurrency):
        mine = np.flatnonzero(rows["virtual_user"] == virtual_user)
        rows["due_ns"][mine] = np.concatenate(([0], np.cumsum(took[mine])[:-1]))
    stream(rows, ttft, gap, draw.gamma(4, 25_000, n).astype(np.int64) + 20_000)
    texts = [
        "HTTP 429: Rate limit reached for requests",
        "Too many open files",
        "body cut off",
    ]
    for kind, text, status, every in (
        ("http_429", 0, 429, 40),
        ("client_resource", 1, 0, 60),
        ("truncated", 2, 200, 150),
    ):
        hit = np.flatnonzero(rows["slot"] % every == every - 1)
        rows["status"][hit] = STATUSES.index("failed")
        rows["kind"][hit], rows["text"][hit], rows["http_status"][hit] = (
            KINDS.index(kind),
            text,
            status,
        )
        rows["finish_reason"][hit] = 0
        for field in ("cached_tokens", "input_tokens", "output_tokens"):
            rows[field][hit] = -1
        rows["input_source"][hit] = rows["output_source"][hit] = 0
        if kind != "truncated":
            for field in (
                "first_event_ns",
                "first_token_ns",
                "first_answer_ns",
                "last_token_ns",
                "end_ns",
            ):
                rows[field][hit] = -1
            rows["output_events"][hit] = rows["max_gap_ns"][hit] = 0
            rows["done_ns"][hit] = rows["sent_ns"][hit] + 30 * MS
            rows["bytes_received"][hit] = 420
    gaps, timeline = seen(rows, 1)
    manifest = RunManifest(
        run="20261121-113000-qa-02c1",
        name="qa on an API",
        started="2026-11-21T11:30:00.000000+00:00",
        ended="2026-11-21T11:32:04.000000+00:00",
        state="finished",
        version="0.1.0",
        command=(
            "loadgen",
            "run",
            "qa",
            "--url",
            "https://api.example.com/v1",
            "--concurrency",
            "16",
        ),
        workload="qa",
        seed=21,
        schedule_seed=21,
        targets=(
            TargetFacts(url="https://api.example.com/v1", server="openai", model="example-large"),
        ),
        slo=Slo(
            terms=(
                Term(metric="ttft", limit_ns=S, quantile=0.99),
                Term(metric="e2e", limit_ns=8 * S, quantile=0.95),
            )
        ),
        stages=(
            StagePlan(
                name="load", arrival="16 in flight", closed=True, slots=n, concurrency=concurrency
            ),
        ),
        fingerprints=Fingerprints(
            recipe="7d793037a0760186574b0282f2f435e7",
            prompts="d8578edf8458ce06fbc5bb76a58c5ca4",
            schedule="e99a18c428cb38d5",
        ),
        rtt_ms=21.7,
        tokenizer="cl100k",
        tokenizer_tag="estimate",
        template_tokens=8,
        workers=1,
        host=HOST,
    )
    return manifest, rows, gaps, timeline, samples(120, 1, 0.06), texts


EXAMPLES = {
    "summary_example_rag_gpus.json": rented_gpus,
    "summary_example_qa_api.json": token_priced,
}

if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for name, make in EXAMPLES.items():
        (DATA / name).write_bytes(dump_summary(summarize(*make())))
