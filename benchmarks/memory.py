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
import tree

MAX_GROWTH, MAX_LONG_STREAMS_MB = 1.2, 250.0
MB = 1e6


class Case(NamedTuple):
    """A load whose peak memory is measured, and the options of its endpoint."""

    requests: int
    tokens: int
    concurrency: int
    server_options: dict[str, str]

    @property
    def description(self) -> str:
        """The case in a few words."""
        return f"{self.requests:,} requests of {self.tokens} tokens, {self.concurrency} in flight"


class PeakMemory(NamedTuple):
    """The peak resident size in MB of a run's processes, and the seconds that the run took."""

    command_mb: float
    recorder_mb: float  # of the process that writes the Parquet files; 0 for a short run
    wall_s: float

    @property
    def total_mb(self) -> float:
        """Return the sum of both processes."""
        return self.command_mb + self.recorder_mb


def measure_peaks(case: Case) -> PeakMemory:
    """Run `loadgen run` as a user does, and return its peak memory."""
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-memory-") as scratch,
        rig.serve_endpoint(**case.server_options) as server,
    ):
        folder = Path(scratch)
        (folder / "memory.yaml").write_text(
            f"name: memory\nrequests: {{input_tokens: 150, output_tokens: {case.tokens}}}\n"
        )
        load = ["--concurrency", str(case.concurrency), "--num-requests", str(case.requests)]

        # A busy host must not make the run INVALID.
        results = ["--out", "results", "--set", "limit=cpu_share:100%"]
        program = [*start.find_loadgen(), "run", "memory.yaml", "--url", server.url]
        watched = tree.watch_command([*program, *load, *results], folder)

    if watched.code not in (0, 3):
        raise SystemExit(f"exit code {watched.code}:\n{watched.output[-2000:]}")

    return PeakMemory(
        command_mb=watched.peaks["run"] / MB,
        recorder_mb=watched.peaks.get("recorder", 0) / MB,
        wall_s=(watched.ended_ns - watched.begun_ns) / 1e9,
    )


def main() -> None:
    """Print the table of peak memory and the three comparisons with their limits."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=500, help="of the long streams")
    args = rig.parse_arguments(parser, requests=50, tokens=50)
    fast = {"ttft": "5ms", "itl": "1ms", "idle_close": "60s"}
    slow = {"ttft": "normal:50ms,10ms", "itl": "10ms", "idle_close": "60s"}
    few_case = Case(args.requests, tokens=10, concurrency=128, server_options=fast)
    many_case = few_case._replace(requests=10 * args.requests)
    long_case = Case(args.requests, args.tokens, concurrency=256, server_options=slow)
    print("Peak resident size, MB.\n")
    few_requests = measure_peaks(few_case)
    many_requests = measure_peaks(many_case)
    long_streams = measure_peaks(long_case)
    rows = [
        format_row(few_case, few_requests),
        format_row(many_case, many_requests),
        format_row(long_case, long_streams),
    ]
    print(rig.format_table(["load", "command", "recorder", "took, s"], rows))
    print()
    command_growth = many_requests.command_mb / few_requests.command_mb
    total_growth = many_requests.total_mb / few_requests.total_mb
    print(
        f"- ten times the requests: {command_growth:.2f}x the command's peak: "
        f"{rig.format_limit_check(command_growth, MAX_GROWTH, is_upper_bound=True)}"
    )
    print(
        f"- ten times the requests: {total_growth:.2f}x with the recorder: "
        f"{rig.format_limit_check(total_growth, MAX_GROWTH, is_upper_bound=True)}"
    )
    verdict = rig.format_limit_check(
        long_streams.command_mb, MAX_LONG_STREAMS_MB, is_upper_bound=True
    )
    print(
        f"- {args.requests:,} x {args.tokens} tokens: {long_streams.command_mb:.0f} MB: {verdict}"
    )


def format_row(case: Case, peak: PeakMemory) -> list[str]:
    """Return the row of a case."""
    return [
        case.description,
        f"{peak.command_mb:.1f}",
        f"{peak.recorder_mb:.1f}",
        f"{peak.wall_s:.1f}",
    ]


if __name__ == "__main__":
    main()
