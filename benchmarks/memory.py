"""Peak memory: ten times the requests, and 2,000 requests of 500 tokens.

    python benchmarks/memory.py [--requests 2000]

`loadgen run` as a user types it; peak resident size (VmHWM) of the command's process, reading back and the summary
included, and of the process that makes Parquet files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import rig
import start
import tree

GROWTH, LONG_MB = 1.2, 250.0
MB = 1e6


def once(requests: int, tokens: int, lanes: int, **options: str) -> dict[str, float]:
    """Peaks in MB, by process; and the seconds it took."""
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-memory-") as scratch,
        rig.endpoint(**options) as server,
    ):
        folder = Path(scratch)
        (folder / "memory.yaml").write_text(
            f"name: memory\nrequests: {{input_tokens: 150, output_tokens: {tokens}}}\n"
        )
        flags = [
            "--concurrency",
            str(lanes),
            "--num-requests",
            str(requests),
            "--out",
            "results",
            "--set",
        ]
        command = [
            *start.loadgen(),
            "run",
            "memory.yaml",
            "--url",
            server.url,
            *flags,
            "limit=cpu_share:100%",
        ]
        seen = tree.watch(command, folder)
    if seen.code not in (0, 3):
        raise SystemExit(f"exit code {seen.code}:\n{seen.output[-2000:]}")
    return {name: peak / MB for name, peak in seen.peaks.items()} | {
        "s": (seen.ended_ns - seen.begun_ns) / 1e9
    }


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=500, help="of the long streams")
    flags = rig.given(parser, requests=50, tokens=50)
    n = flags.requests
    fast = {"ttft": "5ms", "itl": "1ms", "idle_close": "60s"}
    slow = {"ttft": "normal:50ms,10ms", "itl": "10ms", "idle_close": "60s"}
    cases = [(n, 10, 128, fast), (10 * n, 10, 128, fast), (n, flags.tokens, 256, slow)]
    print("Peak resident size, MB.\n")
    found = [once(requests, tokens, lanes, **options) for requests, tokens, lanes, options in cases]
    rows = [
        [
            f"{requests:,} requests of {tokens} tokens, {lanes} in flight",
            f"{one['run']:.1f}",
            f"{one.get('recorder', 0):.1f}",
            f"{one['s']:.1f}",
        ]
        for (requests, tokens, lanes, _), one in zip(cases, found, strict=True)
    ]
    print(rig.table(["load", "command", "recorder", "took, s"], rows))
    growth = found[1]["run"] / found[0]["run"]
    both = (found[1]["run"] + found[1].get("recorder", 0)) / (
        found[0]["run"] + found[0].get("recorder", 0)
    )
    print()
    print(
        f"- ten times the requests: {growth:.2f}x the command's peak: {rig.verdict(growth, GROWTH, most=True)}"
    )
    print(
        f"- ten times the requests: {both:.2f}x with the recorder: {rig.verdict(both, GROWTH, most=True)}"
    )
    print(
        f"- {n:,} x {flags.tokens} tokens: {found[2]['run']:.0f} MB: {rig.verdict(found[2]['run'], LONG_MB, most=True)}"
    )


if __name__ == "__main__":
    main()
