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
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import rig

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


def write_traces(folder: Path, rows: int) -> list[Path]:
    """Write the trace in four formats and return their paths."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(0.01, rows))
    input_lengths = np.clip(rng.lognormal(6.5, 1, rows), 1, 100_000).astype(np.int32)
    output_lengths = np.clip(rng.lognormal(5, 0.8, rows), 1, 8_000).astype(np.int32)
    paths = [
        folder / name for name in ("rows.parquet", "rows.jsonl", "hashes.jsonl", "rows.jsonl.gz")
    ]
    pq.write_table(
        pa.table(
            {"timestamp": arrival_s, "input_length": input_lengths, "output_length": output_lengths}
        ),
        paths[0],
    )
    with paths[1].open("w") as plain, paths[2].open("w") as hashed:
        for index in range(rows // 10):
            row: dict[str, Any] = {
                "timestamp": int(arrival_s[index] * 1000),
                "input_length": int(input_lengths[index]),
                "output_length": int(output_lengths[index]),
            }
            plain.write(json.dumps(row) + "\n")
            row["hash_ids"] = list(
                range(index * 7, index * 7 + -(-int(input_lengths[index]) // 512))
            )
            hashed.write(json.dumps(row) + "\n")
    with paths[1].open("rb") as plain_bytes, gzip.open(paths[3], "wb", 1) as packed:
        shutil.copyfileobj(plain_bytes, packed)
    return paths


def replay_trace(folder: Path, seconds: int) -> None:
    """Replay a bursty trace in real time and print how late its requests were sent."""
    import pyarrow.parquet as pq

    from loadgen.core.workload.traces import read_trace

    rng = np.random.default_rng(2)
    arrival_ms = np.cumsum(rng.gamma(0.5, 2 / 100, 100 * seconds)) * 1000
    trace_path = folder / "replayed.csv"
    trace_path.write_text(
        "timestamp,input_length,output_length\n"
        + "".join(f"{ms / 1000:.6f},200,10\n" for ms in arrival_ms)
    )
    out = folder / "run"
    with rig.serve_endpoint() as server:
        command = [sys.executable, "-m", "loadgen", "run", "--trace", str(trace_path)]
        command += ["--url", server.url, "--seed", "1", "--progress", "off", "-o", str(out)]
        subprocess.run(command, check=False, capture_output=True, preexec_fn=rig.raise_priority)
    [parquet] = (out / "requests").glob("*.parquet")
    sent_ns = np.sort(pq.read_table(parquet, columns=["sent_ns"])["sent_ns"].to_numpy())
    due_ns = read_trace(trace_path).due_ns[: len(sent_ns)]
    late_ms = (sent_ns - due_ns) / 1e6
    print(
        f"replayed {len(sent_ns):,} requests of {seconds} s: after their instant "
        f"{np.percentile(late_ms, 50):.3f} ms at"
    )
    print(f"the median, {np.percentile(late_ms, 99):.3f} ms at p99, {late_ms.max():.3f} ms at most")


def main() -> None:
    """Print the cost of reading each file, then replay one."""
    parser = rig.create_parser(__doc__, alone=True)
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
