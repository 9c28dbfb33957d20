"""How much memory does `loadgen run` use for ten times the requests, and for long streams?

    python benchmarks/memory.py [--requests 2000]

It runs the command as a user does, for some minutes, and prints the peak resident size (VmHWM) of
the command's process, including reading back and the summary, and of the process that writes the
Parquet files, with their limits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import rig
import start

GROWTH_FACTOR = 10  # how many times as many requests the second load has
MAX_GROWTH_RATIO = 1.2
MAX_LONG_STREAMS_MB = 250.0
BYTES_PER_MB = 1e6

FAST_SERVER = {"ttft": "5ms", "itl": "1ms", "idle_close": "60s"}
SLOW_SERVER = {"ttft": "normal:50ms,10ms", "itl": "10ms", "idle_close": "60s"}

COLUMNS = ("load", "command", "recorder", "took, s")


class PeakMemory(NamedTuple):
    """The peak resident sizes of the processes of one run, in MB, and how long it took.

    The recorder is the process that writes the Parquet files. It has 0 MB in a run that is too
    short to need it.
    """

    command_mb: float
    recorder_mb: float
    duration_s: float

    @property
    def total_mb(self) -> float:
        """The sum of both processes."""
        return self.command_mb + self.recorder_mb


def measure_peaks(load: start.Load, server_options: dict[str, str]) -> PeakMemory:
    """Run `loadgen run` as a user does, and return the peak memory of its processes."""
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-memory-") as folder,
        rig.serve_endpoint(**server_options) as server,
    ):
        watched = start.watch_loadgen_run(server.url, load, Path(folder))

    return PeakMemory(
        command_mb=watched.peaks["run"] / BYTES_PER_MB,
        recorder_mb=watched.peaks.get("recorder", 0) / BYTES_PER_MB,
        duration_s=(watched.ended_ns - watched.begun_ns) / 1e9,
    )


def format_row(load: start.Load, peak: PeakMemory) -> list[str]:
    """Return the row of a load with its peak memory."""
    description = (
        f"{load.requests:,} requests of {load.output_tokens} tokens, {load.concurrency} in flight"
    )
    return [
        description,
        f"{peak.command_mb:.1f}",
        f"{peak.recorder_mb:.1f}",
        f"{peak.duration_s:.1f}",
    ]


def print_growth(few_requests: PeakMemory, many_requests: PeakMemory) -> None:
    """Print by which ratio the peak memory grows with the number of requests, and the limit."""
    ratios = {
        "the command's peak": many_requests.command_mb / few_requests.command_mb,
        "the peak with the recorder": many_requests.total_mb / few_requests.total_mb,
    }
    for description, ratio in ratios.items():
        verdict = rig.format_limit_check(ratio, MAX_GROWTH_RATIO, is_upper_bound=True)
        print(f"- {GROWTH_FACTOR} times the requests: {ratio:.2f}x {description}: {verdict}")


def print_long_streams(load: start.Load, peak: PeakMemory) -> None:
    """Print the peak memory of the command with long streams, and its limit."""
    verdict = rig.format_limit_check(peak.command_mb, MAX_LONG_STREAMS_MB, is_upper_bound=True)
    description = f"{load.requests:,} x {load.output_tokens} tokens"
    print(f"- {description}: {peak.command_mb:.0f} MB: {verdict}")


def main() -> None:
    """Print the table of peak memory and the three comparisons with their limits."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=500, help="of the long streams")
    smoke_defaults = {"requests": 50, "tokens": 50}
    args = rig.parse_arguments(parser, **smoke_defaults)

    few_load = start.Load(args.requests, input_tokens=150, output_tokens=10, concurrency=128)
    many_load = few_load._replace(requests=GROWTH_FACTOR * args.requests)
    long_load = few_load._replace(output_tokens=args.tokens, concurrency=256)

    print("Peak resident size, MB.\n")
    few_peak = measure_peaks(few_load, FAST_SERVER)
    many_peak = measure_peaks(many_load, FAST_SERVER)
    long_peak = measure_peaks(long_load, SLOW_SERVER)

    rows = [
        format_row(few_load, few_peak),
        format_row(many_load, many_peak),
        format_row(long_load, long_peak),
    ]
    print(rig.format_table(COLUMNS, rows))
    print()
    print_growth(few_peak, many_peak)
    print_long_streams(long_load, long_peak)


if __name__ == "__main__":
    main()
