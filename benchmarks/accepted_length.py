"""How well a planted accepted length of speculative decoding is recovered from a metrics page.

    python benchmarks/accepted_length.py

For each length, the simulated server serves a short load and counts drafts and accepted tokens as
if each step had this length. The run reads the counters before and after its measurement window and
compares the length with the published one for the same number of draft tokens. Exit 1 if a length
is wrong by more than the limit, or if a verdict is.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import rig

import loadgen

LIMIT = 0.001
"""The largest relative error of a recovered length: a tenth of the tolerance of the verdict."""

TARGET = "deepseek-v4-pro-mtp:3"
DRAFT_TOKENS = 3
WORKLOAD = {"name": "accepted", "requests": {"input_tokens": 20, "output_tokens": 200}}
PLANTED = {2.49: True, 2.47: True, 2.51: True, 2.46: False, 2.52: False, 1.0: False, 4.0: False}
"""Planted lengths, and whether they are within 1 % of 2.49, which is the target."""


class Recovered(NamedTuple):
    """A recovered length: its value, its relative error, its steps and the verdict."""

    length: float
    error: float
    steps: int
    comparable: bool | None


def recover(planted: float, requests: int, folder: Path) -> Recovered:
    """Return what a run against a server with a planted length recovers."""
    run = loadgen.run(
        WORKLOAD,
        request_rate=40,
        num_requests=requests,
        warmup=0,
        accepted_length=TARGET,
        embedded={
            "ttft": "5ms",
            "itl": "1ms",
            "accepted_length": planted,
            "draft_tokens": DRAFT_TOKENS,
        },
        out=folder,
    )
    check = run.summary.accepted_length
    if check is None or check.realised is None or check.steps is None:
        raise SystemExit(f"no length was recovered: {check}")
    error = check.realised / planted - 1
    return Recovered(check.realised, error, check.steps, check.comparable)


def main() -> int:
    """Print the recovered lengths; return 1 if one of them or its verdict is wrong."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--requests", type=int, default=300, help="requests of 200 tokens each")
    args = rig.parse_arguments(parser, requests=20)

    rows = []
    is_right = True
    with tempfile.TemporaryDirectory() as scratch:
        for number, (planted, is_comparable) in enumerate(PLANTED.items()):
            recovered = recover(planted, args.requests, Path(scratch) / str(number))
            is_right &= abs(recovered.error) <= LIMIT and recovered.comparable is is_comparable
            rows.append(
                [
                    f"{planted:.2f}",
                    f"{recovered.length:.4f}",
                    f"{recovered.error:+.4%}",
                    f"{recovered.steps:,}",
                    {True: "comparable", False: "not comparable", None: "unknown"}[
                        recovered.comparable
                    ],
                ]
            )
    print(rig.format_table(["planted", "recovered", "error", "steps", "verdict"], rows))
    return 0 if is_right or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
