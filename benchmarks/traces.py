"""What does it cost to read a trace, and how precisely are its requests sent?

    python benchmarks/traces.py [--rows 10000000] [--replay 60] [--alone]

It writes a trace of that many rows (lognormal lengths, Poisson arrivals) as Parquet, and a tenth of
them in the JSONL format of Mooncake, with hashes, and packed with gzip. Each file is read in its
own process, next to a pass that only decodes its lines. Then a minute of arrivals is replayed in
real time against the embedded endpoint, and the sent times are compared with the trace. It takes
some minutes.
"""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.workload.traces import read_trace


class ReadCost(NamedTuple):
    """What it costs to read a file: its rows, CPU time, and growth of the process's memory."""

    rows: int
    cpu_s: float
    memory_mib: float


def measure_in_new_process(count_rows: Callable[[Path], int], path: Path) -> ReadCost:
    """Return what `count_rows(path)` costs in a new process, which reuses no memory."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(measure_read_cost, count_rows, path).result()


def measure_read_cost(count_rows: Callable[[Path], int], path: Path) -> ReadCost:
    """Read a file in this process and return the cost."""
    resident_kib = read_memory_kib("VmRSS")
    start_s = time.process_time()
    rows = count_rows(path)
    cpu_s = time.process_time() - start_s

    # The peak (VmHWM) may be that of the imports, if reading needed less.
    grown_kib = max(0, read_memory_kib("VmHWM") - resident_kib)
    return ReadCost(rows, cpu_s, grown_kib / 1024)


def read_memory_kib(field: str) -> int:
    """Return a field of /proc/self/status: VmRSS is the resident memory, VmHWM its peak."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    assert match is not None, f"/proc/self/status has no {field}"
    return int(match[1])


def count_trace_rows(path: Path) -> int:
    """Read a trace as `loadgen run --trace` does, and return the number of its rows."""
    return len(read_trace(path))


def count_decoded_lines(path: Path) -> int:
    """Only decode each line of a JSONL file, and return the number of lines.

    This is the least that any reader of the file must do.
    """
    line_count = 0
    with path.open("rb") as lines:
        for line in lines:
            msgspec.json.decode(line)
            line_count += 1
    return line_count


JSONL_DIVISOR = 10  # JSONL is slower to read than Parquet, so its files have a tenth of the rows
ARRIVALS_PER_S = 100
MEDIAN_INPUT_TOKENS = 665
MEDIAN_OUTPUT_TOKENS = 148
MAX_INPUT_TOKENS = 100_000
MAX_OUTPUT_TOKENS = 8_000
HASH_BLOCK_TOKENS = 512  # tokens of a prompt that one hash identifies, as in Mooncake's traces
NEW_HASHES_PER_ROW = 7  # fewer than the blocks of most prompts, so that adjacent rows share some


class TraceRows(NamedTuple):
    """The columns of a trace: arrival times in seconds, and lengths in tokens."""

    arrival_s: NDArray[np.float64]
    input_lengths: NDArray[np.int32]
    output_lengths: NDArray[np.int32]


def draw_rows(count: int) -> TraceRows:
    """Return a trace with Poisson arrivals and lognormal lengths, the same in every run."""
    rng = np.random.default_rng(1)
    gaps_s = rng.exponential(1 / ARRIVALS_PER_S, count)
    input_lengths = rng.lognormal(np.log(MEDIAN_INPUT_TOKENS), 1, count)
    output_lengths = rng.lognormal(np.log(MEDIAN_OUTPUT_TOKENS), 0.8, count)

    return TraceRows(
        arrival_s=np.cumsum(gaps_s),
        input_lengths=np.clip(input_lengths, 1, MAX_INPUT_TOKENS).astype(np.int32),
        output_lengths=np.clip(output_lengths, 1, MAX_OUTPUT_TOKENS).astype(np.int32),
    )


def write_traces(output_dir: Path, count: int) -> list[Path]:
    """Write a trace of `count` rows in four formats and return the paths of the files.

    The Parquet file has all rows. The JSONL files have the first tenth of them: one file without
    and one with the hashes of the prompts, and the former packed with gzip.
    """
    parquet_path = output_dir / "rows.parquet"
    jsonl_path = output_dir / "rows.jsonl"
    hashes_path = output_dir / "hashes.jsonl"
    gzip_path = output_dir / "rows.jsonl.gz"

    trace = draw_rows(count)
    write_parquet(parquet_path, trace)
    write_jsonl(jsonl_path, trace, count // JSONL_DIVISOR, has_hashes=False)
    write_jsonl(hashes_path, trace, count // JSONL_DIVISOR, has_hashes=True)
    with jsonl_path.open("rb") as plain, gzip.open(gzip_path, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed)

    return [parquet_path, jsonl_path, hashes_path, gzip_path]


def write_parquet(path: Path, trace: TraceRows) -> None:
    """Write all rows of a trace as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "timestamp": trace.arrival_s,
            "input_length": trace.input_lengths,
            "output_length": trace.output_lengths,
        }
    )
    pq.write_table(table, path)


def write_jsonl(path: Path, trace: TraceRows, count: int, *, has_hashes: bool) -> None:
    """Write the first `count` rows of a trace in the JSONL format of Mooncake.

    With `has_hashes`, each row also has `hash_ids`, a number for each block of its prompt.
    """
    with path.open("w") as file:
        for index in range(count):
            input_length = int(trace.input_lengths[index])
            row: dict[str, Any] = {
                "timestamp": int(trace.arrival_s[index] * 1000),  # in ms
                "input_length": input_length,
                "output_length": int(trace.output_lengths[index]),
            }
            if has_hashes:
                row["hash_ids"] = list_block_hashes(index, input_length)
            file.write(json.dumps(row) + "\n")


def list_block_hashes(row_index: int, input_length: int) -> list[int]:
    """Return a hash for each block of a prompt; adjacent rows of a trace have some in common."""
    block_count = math.ceil(input_length / HASH_BLOCK_TOKENS)
    first_hash = row_index * NEW_HASHES_PER_ROW
    return list(range(first_hash, first_hash + block_count))


def print_read_costs(paths: Sequence[Path]) -> None:
    """Read each trace in a new process and print a table of the costs."""
    rows = [measure_trace(path) for path in paths]
    columns = list(rows[0])
    print(rig.format_table(columns, [list(row.values()) for row in rows]) + "\n")


def measure_trace(path: Path) -> dict[str, str]:
    """Read a trace in a new process and return its row of the table, by the column's title.

    A JSONL file is also decoded line by line. The last column is the CPU time of reading the trace,
    relative to that.
    """
    cost = measure_in_new_process(count_trace_rows, path)
    ratio_to_decoding = ""
    if path.suffix == ".jsonl":
        decoding_cost = measure_in_new_process(count_decoded_lines, path)
        ratio_to_decoding = f"{cost.cpu_s / decoding_cost.cpu_s:.1f}x"

    us_per_row = cost.cpu_s / cost.rows * 1e6
    bytes_per_row = cost.memory_mib * 2**20 / cost.rows
    return {
        "file": path.name,
        "rows": f"{cost.rows:,}",
        "CPU-s": f"{cost.cpu_s:.2f}",
        "CPU-µs/row": f"{us_per_row:.2f}",
        "MiB": f"{cost.memory_mib:.0f}",
        "bytes/row": f"{bytes_per_row:.0f}",
        "against only decoding": ratio_to_decoding,
    }


REPLAYED_PER_S = 100
BURSTINESS_SHAPE = 0.5  # of gamma distributed gaps: 1 is Poisson, less is bursty


def print_replay(scratch_dir: Path, seconds: int) -> None:
    """Replay a bursty trace in real time and print how late its requests were sent."""
    trace_path = scratch_dir / "replayed.csv"
    write_bursty_trace(trace_path, seconds)
    late_ms = measure_replay(trace_path, scratch_dir / "run")

    p50_ms, p99_ms = np.percentile(late_ms, [50, 99])
    print(f"Replayed {len(late_ms):,} requests of a trace of {seconds} s.")
    print(
        f"Sent late by {p50_ms:.3f} ms (p50), {p99_ms:.3f} ms (p99), {late_ms.max():.3f} ms (max)"
    )


def write_bursty_trace(path: Path, seconds: int) -> None:
    """Write a CSV trace with gamma distributed gaps, which has on average 100 requests/s."""
    rng = np.random.default_rng(2)
    mean_gap_s = 1 / REPLAYED_PER_S
    scale_s = mean_gap_s / BURSTINESS_SHAPE  # the mean of a gamma distribution is shape * scale
    gaps_s = rng.gamma(BURSTINESS_SHAPE, scale_s, REPLAYED_PER_S * seconds)
    rows = [f"{arrival_s:.6f},200,10\n" for arrival_s in np.cumsum(gaps_s)]
    path.write_text("timestamp,input_length,output_length\n" + "".join(rows))


def measure_replay(trace_path: Path, run_dir: Path) -> NDArray[np.float64]:
    """Replay a trace with `loadgen run` and return how late each request was sent, in ms.

    The endpoint is embedded, and the results are stored in `run_dir`.
    """
    import pyarrow.parquet as pq

    with rig.serve_endpoint() as server:
        command = [sys.executable, "-m", "loadgen", "run", "--trace", str(trace_path)]
        command += ["--url", server.url, "--seed", "1", "--progress", "off", "-o", str(run_dir)]
        # The exit code is not checked: it is 1 if a busy machine makes the run invalid.
        subprocess.run(command, check=False, capture_output=True, preexec_fn=rig.raise_priority)

    [parquet_path] = (run_dir / "requests").glob("*.parquet")
    records = pq.read_table(parquet_path, columns=["sent_ns"])
    sent_ns = np.sort(records["sent_ns"].to_numpy())  # in the order of arrival, as the trace is
    due_ns = read_trace(trace_path).due_ns[: len(sent_ns)]
    late_ms: NDArray[np.float64] = (sent_ns - due_ns) / 1e6
    return late_ms


def main() -> None:
    """Print the cost of reading each file of a trace, then replay a short trace."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--replay", type=int, default=60, metavar="SECONDS")
    args = rig.parse_arguments(parser, rows=10_000, replay=1)

    with tempfile.TemporaryDirectory() as scratch:
        scratch_dir = Path(scratch)
        print_read_costs(write_traces(scratch_dir, args.rows))
        if args.replay:
            print_replay(scratch_dir, args.replay)


if __name__ == "__main__":
    main()
