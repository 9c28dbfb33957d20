"""What a trace costs before the load, and how near to its instants the load is sent.

    python benchmarks/traces.py [--rows 10000000] [--replay 60] [--alone]

Makes a trace of that many rows (lognormal lengths, Poisson arrivals) as Parquet, and a tenth of them as JSONL of
Mooncake, with hashes and packed with gzip; reads each in a process of its own, beside a pass over the same file that
only decodes its lines. Then it replays a minute of arrivals in real time against the embedded endpoint, and compares
what its rows say was sent when with the trace itself.
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


def measured(script: str, path: Path) -> tuple[int, float, float]:
    """Rows, CPU-seconds and growth of memory in MB, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True
    )
    rows, cpu_s, mb = done.stdout.split()
    return int(rows), float(cpu_s), float(mb)


def make(folder: Path, rows: int) -> list[Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    at = np.cumsum(rng.exponential(0.01, rows))
    read = np.clip(rng.lognormal(6.5, 1, rows), 1, 100_000).astype(np.int32)
    write = np.clip(rng.lognormal(5, 0.8, rows), 1, 8_000).astype(np.int32)
    names = [
        folder / name for name in ("rows.parquet", "rows.jsonl", "hashes.jsonl", "rows.jsonl.gz")
    ]
    pq.write_table(
        pa.table({"timestamp": at, "input_length": read, "output_length": write}), names[0]
    )
    with names[1].open("w") as plain, names[2].open("w") as hashed:
        for index in range(rows // 10):
            row: dict[str, Any] = {
                "timestamp": int(at[index] * 1000),
                "input_length": int(read[index]),
                "output_length": int(write[index]),
            }
            plain.write(json.dumps(row) + "\n")
            row["hash_ids"] = list(range(index * 7, index * 7 + -(-int(read[index]) // 512)))
            hashed.write(json.dumps(row) + "\n")
    with names[1].open("rb") as plain_bytes, gzip.open(names[3], "wb", 1) as packed:
        shutil.copyfileobj(plain_bytes, packed)
    return names


def replay(folder: Path, seconds: int) -> None:
    import pyarrow.parquet as pq

    from loadgen.core.workload.traces import read_trace

    rng = np.random.default_rng(2)
    at_ms = np.cumsum(rng.gamma(0.5, 2 / 100, 100 * seconds)) * 1000
    csv = folder / "replayed.csv"
    csv.write_text(
        "timestamp,input_length,output_length\n"
        + "".join(f"{ms / 1000:.6f},200,10\n" for ms in at_ms)
    )
    out = folder / "run"
    with rig.endpoint() as server:
        command = [sys.executable, "-m", "loadgen", "run", "--trace", str(csv)]
        command += ["--url", server.url, "--seed", "1", "--progress", "off", "-o", str(out)]
        subprocess.run(command, check=False, capture_output=True, preexec_fn=rig.prefer)
    [parquet] = (out / "requests").glob("*.parquet")
    sent = np.sort(pq.read_table(parquet, columns=["sent_ns"])["sent_ns"].to_numpy())
    asked = read_trace(csv).due_ns[: len(sent)]
    late_ms = (sent - asked) / 1e6
    print(
        f"replayed {len(sent):,} requests of {seconds} s: after their instant {np.percentile(late_ms, 50):.3f} ms at"
    )
    print(f"the median, {np.percentile(late_ms, 99):.3f} ms at p99, {late_ms.max():.3f} ms at most")


def main() -> None:
    options = rig.parser(__doc__, alone=True)
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--replay", type=int, default=60, metavar="SECONDS")
    given = rig.given(options, rows=10_000, replay=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = []
        for path in make(folder, given.rows):
            rows, cpu_s, mb = measured(TRACE, path)
            bare = f"{cpu_s / measured(BARE, path)[1]:.1f}x" if path.suffix == ".jsonl" else ""
            each = mb * 2**20 / rows
            table.append(
                [
                    path.name,
                    f"{rows:,}",
                    f"{cpu_s:.2f}",
                    f"{cpu_s / rows * 1e6:.2f}",
                    f"{mb:.0f}",
                    f"{each:.0f}",
                    bare,
                ]
            )
        print(
            rig.table(["file", "rows", "CPU-s", "µs/row", "MB", "B/row", "bare pass"], table) + "\n"
        )
        if given.replay:
            replay(folder, given.replay)


if __name__ == "__main__":
    main()
