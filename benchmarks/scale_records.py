"""Write runs of many random request records and read them back, for `scale.py`.

The runs look like what 16 workers leave after a load at a constant rate, with the first tenth of
the requests as the warm-up.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core import run_folder
from loadgen.core.metrics import columns as metric_columns
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts, encode_manifest
from loadgen.core.results.parquet import Frame, to_table
from loadgen.core.results.record import BIN_NS, ROW, SOURCES
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import distribution_of

WORKERS = 16
REQUEST_INTERVAL_NS = 300_000  # between the scheduled times of two requests: 3,333 requests/s
ARRIVAL = "constant 3,333/s"
WARM_UP_DIVISOR = 10  # the first tenth of the requests is the warm-up
RECORDS_PER_BLOCK = 1_000_000  # records that are in memory at once while they are written
EVENTS_PER_BIN = 7_000  # output events in each interval of the event timeline
GAP_SAMPLES = 100_000  # gaps between events that the stored histogram contains
OPTIONAL_COLUMNS = ("session", "virtual_user", "cached_tokens", "reasoning_tokens", "text")
NO_VALUE = -1  # of an optional column
QUANTILE_METRICS = ("ttft", "tpot", "e2e", "send_lag")


def write_records(run_dir: Path, count: int, targets: int = 1) -> None:
    """Write a finished run of `count` requests with random latencies to a new folder."""
    requests_dir = run_dir / "requests"
    timeline_dir = run_dir / "flows"
    requests_dir.mkdir(parents=True)
    timeline_dir.mkdir()

    manifest = create_manifest(count, targets)
    (run_dir / "run.json").write_bytes(encode_manifest(manifest))
    rng = np.random.default_rng(1)
    for stage in range(len(manifest.stages)):
        write_event_files(timeline_dir, stage, count, rng)

    write_blocks(requests_dir / store.MERGED, draw_blocks(count, targets, rng))


def create_manifest(count: int, targets: int) -> RunManifest:
    """Return the manifest of a run of `count` requests: a warm-up stage and a measured stage."""
    warm_up_count = count // WARM_UP_DIVISOR
    warm_up_stage = StagePlan(name="warm-up", arrival=ARRIVAL, slots=warm_up_count, measured=False)
    load_stage = StagePlan(
        name="load",
        arrival=ARRIVAL,
        slots=count - warm_up_count,
        start_ns=warm_up_count * REQUEST_INTERVAL_NS,
    )
    ttft_objective = Term(metric="ttft", limit_ns=450_000_000, quantile=0.99)

    return RunManifest(
        run="merge",
        state="finished",
        workers=WORKERS,
        slo=Slo(terms=(ttft_objective,)),
        stages=(warm_up_stage, load_stage),
        targets=tuple(
            TargetFacts(url=f"http://vm-{index:02}", name=f"vm-{index:02}", gpus=4)
            for index in range(targets)
        ),
    )


def write_event_files(timeline_dir: Path, stage: int, count: int, rng: np.random.Generator) -> None:
    """Write the two files of output events that a worker leaves for a stage.

    One is a histogram of the gaps between events, here around 20 ms. The other is the number of
    events in each interval of the run.
    """
    gaps = Histogram()
    gaps.add(rng.lognormal(np.log(20e6), 0.3, GAP_SAMPLES).astype(np.int64))
    (timeline_dir / f"w0.gaps.{stage}").write_bytes(gaps.to_bytes())

    bin_count = count * REQUEST_INTERVAL_NS // BIN_NS
    events_per_bin = np.full(bin_count, EVENTS_PER_BIN, "<i8")
    (timeline_dir / f"w0.timeline.{stage}").write_bytes(events_per_bin.tobytes())


def draw_blocks(count: int, targets: int, rng: np.random.Generator) -> Iterator[NDArray[np.void]]:
    """Yield `count` random records in blocks, so that they are never in memory all at once."""
    warm_up_count = count // WARM_UP_DIVISOR
    for first_slot in range(0, count, RECORDS_PER_BLOCK):
        block_count = min(RECORDS_PER_BLOCK, count - first_slot)
        slots = np.arange(first_slot, first_slot + block_count, dtype=np.int64)
        yield draw_records(slots, warm_up_count, targets, rng)


def draw_records(
    slots: NDArray[np.int64], warm_up_count: int, targets: int, rng: np.random.Generator
) -> NDArray[np.void]:
    """Return the records of the requests in these slots of the schedule, with random values.

    The run has `targets` targets, and its first `warm_up_count` slots are the warm-up.
    """
    records = np.zeros(len(slots), ROW)
    for name in OPTIONAL_COLUMNS:
        records[name] = NO_VALUE

    records["slot"] = slots
    records["request"] = slots
    records["worker"] = slots % WORKERS
    records["target"] = slots % targets
    records["stage"] = slots >= warm_up_count  # stage 0 is the warm-up, stage 1 the load
    draw_token_counts(records, rng)
    draw_times(records, rng)
    return records


def draw_token_counts(records: NDArray[np.void], rng: np.random.Generator) -> None:
    """Fill the token counts of records with random lengths, as counted by the server."""
    output_tokens = rng.integers(50, 400, len(records))
    for name in ("output_tokens", "output_events", "asked_output"):
        records[name] = output_tokens

    input_tokens = rng.integers(50, 4000, len(records))
    for name in ("input_tokens", "built_tokens"):
        records[name] = input_tokens

    for name in ("input_source", "output_source"):
        records[name] = SOURCES.index("server")


def draw_times(records: NDArray[np.void], rng: np.random.Generator) -> None:
    """Fill the times of records: sent 20 to 200 µs late, with a random TTFT and decode time.

    The token counts must be there already, because each output token takes about 20 ms.
    """
    count = len(records)
    due_ns = records["slot"] * REQUEST_INTERVAL_NS
    sent_ns = due_ns + rng.integers(20_000, 200_000, count)
    ttft_ns = rng.lognormal(np.log(180e6), 0.4, count).astype(np.int64)
    tpot_ns = rng.normal(20e6, 2e6, count).astype(np.int64)
    first_token_ns = due_ns + ttft_ns
    last_token_ns = first_token_ns + records["output_tokens"] * tpot_ns

    records["due_ns"] = due_ns
    records["sent_ns"] = sent_ns
    records["ready_ns"] = sent_ns
    for name in ("first_byte_ns", "first_event_ns", "first_token_ns", "first_answer_ns"):
        records[name] = first_token_ns

    records["last_token_ns"] = last_token_ns
    for name in ("end_ns", "done_ns"):
        records[name] = last_token_ns + 100_000


def write_blocks(path: Path, blocks: Iterator[NDArray[np.void]]) -> None:
    """Write blocks of request records to one Parquet file, each as a row group."""
    import pyarrow.parquet as pq

    first_table = to_table(next(blocks), [])
    with pq.ParquetWriter(path, first_table.schema, compression="zstd") as writer:
        writer.write_table(first_table)
        for block in blocks:
            writer.write_table(to_table(block, []))


class ReadCost(NamedTuple):
    """What it costs to read the records of a run in a process of its own."""

    cpu_s: float
    wall_s: float
    peak_gb: float


def measure_in_new_process(read_run: Callable[[Path], object], run_dir: Path) -> ReadCost:
    """Return what `read_run(run_dir)` costs in a new process.

    A new process has no memory of earlier work, so its peak is that of this work.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(measure_read_cost, read_run, run_dir).result()


def measure_read_cost(read_run: Callable[[Path], object], run_dir: Path) -> ReadCost:
    """Run `read_run(run_dir)` in this process and return its times and the peak memory."""
    cpu_start_s = time.process_time()
    wall_start_s = time.perf_counter()
    read_run(run_dir)

    return ReadCost(
        cpu_s=time.process_time() - cpu_start_s,
        wall_s=time.perf_counter() - wall_start_s,
        peak_gb=read_peak_memory_bytes() / 1e9,
    )


def read_peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far.

    It comes from /proc, because `getrusage` counts at least the memory of the parent process.
    """
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None, "/proc/self/status has no VmHWM"
    return int(match[1]) * 1024


def compute_quantiles(run_dir: Path) -> None:
    """Compute the exact quantiles of TTFT, TPOT, E2E latency and send delay of a run."""
    # A Frame is read like an array of records, but it reads only the columns that are used.
    records: Any = Frame([run_dir / "requests" / store.MERGED])
    columns = metric_columns.Columns(records)
    for metric in QUANTILE_METRICS:
        values = metric_columns.drop_undefined(columns.measure(metric))
        distribution_of(values)


def compute_summary(run_dir: Path) -> None:
    """Compute the full summary of a run, as `loadgen report` does."""
    run_folder.summary(run_dir)
