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
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

READ = """
import re, sys, time
{imports}
def mb(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before, path, rows, begin = mb("VmRSS"), sys.argv[1], 0, time.process_time()
{work}
print(rows, time.process_time() - begin, max(0, mb("VmHWM") - before))
"""
TRACE = READ.format(
    imports="from loadgen.core.workload.traces import read_trace",
    work="rows = len(read_trace(path))",
)
BARE = READ.format(
    imports="import msgspec",
    work="for line in open(path, 'rb'):\n    rows += 1\n    msgspec.json.decode(line)",
)


def measure_read(script: str, path: Path) -> tuple[int, float, float]:
    """Return rows, CPU-seconds and growth of memory in MB of a script in its own process."""
    completed = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True
    )
    rows, cpu_s, mb = completed.stdout.split()
    return int(rows), float(cpu_s), float(mb)


JSONL_PART = 10  # the JSONL files have the first tenth of the rows


HASH_BLOCK_TOKENS = 512  # tokens of a prompt that one hash identifies, as in Mooncake's traces


class TraceRows(NamedTuple):
    """The rows of a trace: arrival times in seconds, and lengths in tokens."""

    arrival_s: NDArray[np.float64]
    input_lengths: NDArray[np.int32]
    output_lengths: NDArray[np.int32]


def draw_rows(count: int) -> TraceRows:
    """Draw Poisson arrivals, 100 per second, and lognormal lengths."""
    rng = np.random.default_rng(1)
    return TraceRows(
        arrival_s=np.cumsum(rng.exponential(0.01, count)),
        input_lengths=np.clip(rng.lognormal(6.5, 1, count), 1, 100_000).astype(np.int32),
        output_lengths=np.clip(rng.lognormal(5, 0.8, count), 1, 8_000).astype(np.int32),
    )


def write_traces(folder: Path, count: int) -> list[Path]:
    """Write a trace of `count` rows in four formats and return their paths.

    All rows are in the Parquet file. JSONL files are slower to read, so they have the first tenth:
    one file without and one with the hashes of the prompts, and the former packed with gzip.
    """
    rows = draw_rows(count)
    parquet_path = folder / "rows.parquet"
    jsonl_path = folder / "rows.jsonl"
    hashes_path = folder / "hashes.jsonl"
    packed_path = folder / "rows.jsonl.gz"
    write_parquet(parquet_path, rows)
    write_jsonl(jsonl_path, hashes_path, rows, count // JSONL_PART)

    with jsonl_path.open("rb") as plain, gzip.open(packed_path, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed)

    return [parquet_path, jsonl_path, hashes_path, packed_path]


def write_parquet(path: Path, rows: TraceRows) -> None:
    """Write all rows as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "timestamp": rows.arrival_s,
            "input_length": rows.input_lengths,
            "output_length": rows.output_lengths,
        }
    )
    pq.write_table(table, path)


def write_jsonl(plain_path: Path, hashes_path: Path, rows: TraceRows, count: int) -> None:
    """Write the first rows in the JSONL format of Mooncake, without and with `hash_ids`.

    A timestamp is in ms. Each block of a prompt has a hash; adjacent rows share some of them.
    """
    with plain_path.open("w") as plain, hashes_path.open("w") as hashed:
        for index in range(count):
            input_length = int(rows.input_lengths[index])
            row: dict[str, Any] = {
                "timestamp": int(rows.arrival_s[index] * 1000),
                "input_length": input_length,
                "output_length": int(rows.output_lengths[index]),
            }
            plain.write(json.dumps(row) + "\n")
            block_count = math.ceil(input_length / HASH_BLOCK_TOKENS)
            first_hash = index * 7
            row["hash_ids"] = list(range(first_hash, first_hash + block_count))
            hashed.write(json.dumps(row) + "\n")


REPLAYED_PER_S = 100


BURSTINESS_SHAPE = 0.5  # of gamma distributed gaps: 1 is Poisson, less is bursty


def replay_trace(folder: Path, seconds: int) -> None:
    """Replay a bursty trace in real time and print how late its requests were sent."""
    trace_path = folder / "replayed.csv"
    write_bursty_trace(trace_path, seconds)
    late_ms = measure_replay(trace_path, folder / "run")
    print(
        f"replayed {len(late_ms):,} requests of {seconds} s: after their instant "
        f"{np.percentile(late_ms, 50):.3f} ms at\n"
        f"the median, {np.percentile(late_ms, 99):.3f} ms at p99, {late_ms.max():.3f} ms at most"
    )


def write_bursty_trace(path: Path, seconds: int) -> None:
    """Write a trace whose gaps are gamma distributed, with on average 100 requests per second."""
    rng = np.random.default_rng(2)
    mean_gap_s = 1 / REPLAYED_PER_S
    scale_s = mean_gap_s / BURSTINESS_SHAPE  # the mean of a gamma distribution is shape * scale
    gaps_s = rng.gamma(BURSTINESS_SHAPE, scale_s, REPLAYED_PER_S * seconds)
    lines = [f"{arrival_s:.6f},200,10\n" for arrival_s in np.cumsum(gaps_s)]
    path.write_text("timestamp,input_length,output_length\n" + "".join(lines))


def measure_replay(trace_path: Path, run_dir: Path) -> NDArray[np.float64]:
    """Replay a trace against the embedded endpoint; return how late requests were sent, in ms."""
    import pyarrow.parquet as pq

    from loadgen.core.workload.traces import read_trace

    with rig.serve_endpoint() as server:
        command = [sys.executable, "-m", "loadgen", "run", "--trace", str(trace_path)]
        command += ["--url", server.url, "--seed", "1", "--progress", "off", "-o", str(run_dir)]
        subprocess.run(command, check=False, capture_output=True, preexec_fn=rig.raise_priority)

    [parquet_path] = (run_dir / "requests").glob("*.parquet")
    sent_ns = np.sort(pq.read_table(parquet_path, columns=["sent_ns"])["sent_ns"].to_numpy())
    due_ns = read_trace(trace_path).due_ns[: len(sent_ns)]
    late_ms: NDArray[np.float64] = (sent_ns - due_ns) / 1e6

    return late_ms


def main() -> None:
    """Print the cost of reading each file, then replay one."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--replay", type=int, default=60, metavar="SECONDS")

    args = rig.parse_arguments(parser, rows=10_000, replay=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = []
        for path in write_traces(folder, args.rows):
            rows, cpu_s, mb = measure_read(TRACE, path)
            bare_ratio = (
                f"{cpu_s / measure_read(BARE, path)[1]:.1f}x" if path.suffix == ".jsonl" else ""
            )
            bytes_per_row = mb * 2**20 / rows
            table.append(
                [
                    path.name,
                    f"{rows:,}",
                    f"{cpu_s:.2f}",
                    f"{cpu_s / rows * 1e6:.2f}",
                    f"{mb:.0f}",
                    f"{bytes_per_row:.0f}",
                    bare_ratio,
                ]
            )

        print(
            rig.format_table(["file", "rows", "CPU-s", "µs/row", "MB", "B/row", "bare pass"], table)
            + "\n"
        )
        if args.replay:
            replay_trace(folder, args.replay)


if __name__ == "__main__":
    main()
