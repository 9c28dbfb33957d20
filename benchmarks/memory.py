"""How much memory does `loadgen run` use for ten times the requests, and for long streams?

    python benchmarks/memory.py [--requests 2000]

It runs the command as a user does, for some minutes, and prints the peak resident size (VmHWM) of
the command's process, including reading back and the summary, and of the process that writes the
Parquet files, with their limits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import rig
import start
import tree

GROWTH, LONG_MB = 1.2, 250.0
MB = 1e6


def measure_peaks(requests: int, tokens: int, concurrency: int, **options: str) -> dict[str, float]:
    """Return the peak memory in MB by process, and the seconds that the run took."""
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-memory-") as scratch,
        rig.serve_endpoint(**options) as server,
    ):
        folder = Path(scratch)
        (folder / "memory.yaml").write_text(
            f"name: memory\nrequests: {{input_tokens: 150, output_tokens: {tokens}}}\n"
        )
        flags = [
            "--concurrency",
            str(concurrency),
            "--num-requests",
            str(requests),
            "--out",
            "results",
            "--set",
        ]
        command = [
            *start.find_loadgen(),
            "run",
            "memory.yaml",
            "--url",
            server.url,
            *flags,
            "limit=cpu_share:100%",
        ]
        command_result = tree.watch_command(command, folder)
    if command_result.code not in (0, 3):
        raise SystemExit(f"exit code {command_result.code}:\n{command_result.output[-2000:]}")
    return {name: peak / MB for name, peak in command_result.peaks.items()} | {
        "s": (command_result.ended_ns - command_result.begun_ns) / 1e9
    }


def main() -> None:
    """Print the table of peak memory and the three comparisons with their limits."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=500, help="of the long streams")
    args = rig.parse_arguments(parser, requests=50, tokens=50)
    request_count = args.requests
    fast = {"ttft": "5ms", "itl": "1ms", "idle_close": "60s"}
    slow = {"ttft": "normal:50ms,10ms", "itl": "10ms", "idle_close": "60s"}
    cases = [
        (request_count, 10, 128, fast),
        (10 * request_count, 10, 128, fast),
        (request_count, args.tokens, 256, slow),
    ]
    print("Peak resident size, MB.\n")
    results = [
        measure_peaks(requests, tokens, concurrency, **options)
        for requests, tokens, concurrency, options in cases
    ]
    rows = [
        [
            f"{requests:,} requests of {tokens} tokens, {concurrency} in flight",
            f"{result['run']:.1f}",
            f"{result.get('recorder', 0):.1f}",
            f"{result['s']:.1f}",
        ]
        for (requests, tokens, concurrency, _), result in zip(cases, results, strict=True)
    ]
    print(rig.format_table(["load", "command", "recorder", "took, s"], rows))
    growth = results[1]["run"] / results[0]["run"]
    growth_with_recorder = (results[1]["run"] + results[1].get("recorder", 0)) / (
        results[0]["run"] + results[0].get("recorder", 0)
    )
    print()
    print(
        f"- ten times the requests: {growth:.2f}x the command's peak: "
        f"{rig.describe_limit(growth, GROWTH, most=True)}"
    )
    print(
        f"- ten times the requests: {growth_with_recorder:.2f}x with the recorder: "
        f"{rig.describe_limit(growth_with_recorder, GROWTH, most=True)}"
    )
    print(
        f"- {request_count:,} x {args.tokens} tokens: {results[2]['run']:.0f} MB: "
        f"{rig.describe_limit(results[2]['run'], LONG_MB, most=True)}"
    )


if __name__ == "__main__":
    main()
