"""A long load over HTTP: whether memory, descriptors and files stay flat, and latencies do not drift.

    python benchmarks/soak.py [--streams 1000] [--duration 60m]

A closed loop of this many streams against the embedded endpoint. Every 10 s the resident memory and the
open descriptors of each process of the run are read from /proc, and the size of its folder. The first quarter warms up:
after it, memory may grow by 5 % and 4 MiB per process, descriptors by 8, and the run's own drift must hold zero in its
interval. Exit 1 where one of them does not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import rig

from loadgen.core import units


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        below = [int(child) for child in children.read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in below for one in family(child))]


def name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((word for word in words if word.startswith("loadgen")), words[0]).rpartition(".")[2]


def sample(pid: int) -> dict[str, tuple[int, int]]:
    """Process -> (resident bytes, descriptors)."""
    told = {}
    for one in family(pid):
        try:
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            told[f"{name(one)}-{one}"] = (
                pages * os.sysconf("SC_PAGE_SIZE"),
                len(os.listdir(f"/proc/{one}/fd")),
            )
        except OSError:
            continue
    return told


def on_disk(folder: Path) -> int:
    """Bytes of all files below it."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it went meanwhile
            total += path.stat().st_size
    return total


def main() -> int:
    parser = rig.parser(__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--duration", default="60m")
    parser.add_argument("--ttft", default="200ms")
    parser.add_argument("--itl", default="50ms")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds between two looks at /proc"
    )
    parser.add_argument("--out", type=Path)
    asked = rig.given(parser, streams=8, duration="3s", every=0.5, ttft="20ms", itl="2ms")
    with contextlib.ExitStack() as stack:
        out = asked.out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "soak"
        url = stack.enter_context(rig.endpoint(ttft=asked.ttft, itl=asked.itl)).url
        flags = [
            "--isl",
            "100",
            "--osl",
            "100",
            "--warmup",
            "0",
            "--progress",
            "plain",
            "--seed",
            "1",
        ]
        load = ["-c", str(asked.streams), "-d", asked.duration, "--url", url, "--out", str(out)]
        command = [sys.executable, "-P", "-m", "loadgen", "run", *flags, *load]
        run = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        stack.callback(run.terminate)
        samples = [(0.0, sample(run.pid), 0)]
        begun = monotonic()
        while run.poll() is None:
            sleep(asked.every)
            samples.append((monotonic() - begun, sample(run.pid), on_disk(out)))
        assert run.stdout is not None
        text = run.stdout.read().decode()
        summary = json.loads((out / "summary.json").read_bytes())
    ends_s = (
        units.duration_ns(asked.duration, bare="s") / 1e9
    )  # after it the summary is made, which takes memory
    during = [one for one in samples[1:] if one[0] <= ends_s] or samples[
        :1
    ]  # none: a short load on a busy host
    flat = judge(during, summary, text)
    return 0 if flat or asked.smoke else 1


def judge(
    samples: list[tuple[float, dict[str, tuple[int, int]], int]], summary: dict[str, Any], text: str
) -> bool:
    """Prints what grew; whether nothing did."""
    wrong = []
    later = samples[len(samples) // 4 :]
    for process in later[0][1]:
        series = [told[process] for _, told, _ in later if process in told]
        (rss, files), (rss_end, files_end) = series[0], series[-1]
        print(
            f"{process:32} {rss / 2**20:8.1f} to {rss_end / 2**20:8.1f} MiB, {files:5} to {files_end:5} descriptors"
        )
        if rss_end > 1.05 * rss + (4 << 20):
            wrong.append(f"{process} grows")
        if files_end > files + 8:
            wrong.append(f"{process} keeps descriptors")
    requests, size = summary["requests"], max(size for _, _, size in samples)
    print(
        f"{samples[-1][0]:.0f} s, {requests['ok']:,} of {requests['scheduled']:,} ok, at most {size / 2**20:.1f} MiB"
    )
    print(text)
    if requests["ok"] + requests["unfinished"] + requests["cancelled"] != requests["scheduled"]:
        wrong.append("requests failed")
    wrong += [
        code["code"]
        for code in summary["verdict"].get("warning_codes", ())
        if "drift" in code["code"]
    ]
    print("flat" if not wrong else f"NOT FLAT: {', '.join(wrong)}")
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
