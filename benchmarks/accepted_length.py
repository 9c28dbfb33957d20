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

# The largest relative error of a recovered length: a tenth of the tolerance of the verdict
MAX_RELATIVE_ERROR = 0.001

PUBLISHED_LENGTH = "deepseek-v4-pro-mtp:3"  # the name of the published length, which is 2.49
DRAFT_TOKENS = 3
WORKLOAD = {"name": "accepted", "requests": {"input_tokens": 20, "output_tokens": 200}}

# For each planted length, whether it is comparable with the published one: within 1 % of 2.49
EXPECTED_VERDICTS = {
    2.49: True,
    2.47: True,
    2.51: True,
    2.46: False,
    2.52: False,
    1.0: False,
    4.0: False,
}

VERDICT_TEXTS = {True: "comparable", False: "not comparable", None: "unknown"}
COLUMNS = ("planted", "recovered", "error", "steps", "verdict")


class RecoveredLength(NamedTuple):
    """An accepted length that a run computed from the counters of a server.

    Attributes:
        planted: The length with which the server counted.
        length: The length that the run computed: output tokens per decoding step.
        steps: The number of decoding steps in the measurement window.
        is_comparable: The verdict of the run: whether the length is within 1 % of the published
            one. It is None if the run could not decide.
    """

    planted: float
    length: float
    steps: int
    is_comparable: bool | None

    @property
    def relative_error(self) -> float:
        """The error of the recovered length relative to the planted one."""
        return self.length / self.planted - 1

    def is_right(self) -> bool:
        """Return whether the length is exact enough and the verdict is the expected one."""
        is_exact = abs(self.relative_error) <= MAX_RELATIVE_ERROR
        return is_exact and self.is_comparable is EXPECTED_VERDICTS[self.planted]


def recover_length(planted: float, requests: int, run_dir: Path) -> RecoveredLength:
    """Run a load against a simulated server with a planted length, and return what the run found.

    Raises SystemExit if the run could not compute a length.
    """
    server_options = {
        "ttft": "5ms",
        "itl": "1ms",
        "accepted_length": planted,
        "draft_tokens": DRAFT_TOKENS,
    }
    run = loadgen.run(
        WORKLOAD,
        request_rate=40,
        num_requests=requests,
        warmup=0,
        accepted_length=PUBLISHED_LENGTH,
        embedded=server_options,
        out=run_dir,
    )

    check = run.summary.accepted_length
    if check is None or check.realised is None or check.steps is None:
        raise SystemExit(f"no length was recovered: {check}")
    return RecoveredLength(planted, check.realised, check.steps, check.comparable)


def format_row(recovered: RecoveredLength) -> list[str]:
    """Return the row of a planted length."""
    return [
        f"{recovered.planted:.2f}",
        f"{recovered.length:.4f}",
        f"{recovered.relative_error:+.4%}",
        f"{recovered.steps:,}",
        VERDICT_TEXTS[recovered.is_comparable],
    ]


def main() -> int:
    """Print the recovered lengths; return 1 if one of them or its verdict is wrong."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--requests", type=int, default=300, help="requests of 200 tokens each")
    smoke_defaults = {"requests": 20}
    args = rig.parse_arguments(parser, **smoke_defaults)

    recovered_lengths = []
    with tempfile.TemporaryDirectory() as scratch:
        for planted in EXPECTED_VERDICTS:
            run_dir = Path(scratch) / f"{planted}"
            recovered_lengths.append(recover_length(planted, args.requests, run_dir))

    rows = [format_row(recovered) for recovered in recovered_lengths]
    print(rig.format_table(COLUMNS, rows))

    # The smallest form has too few steps for an exact length.
    are_all_right = all(recovered.is_right() for recovered in recovered_lengths)
    return 0 if are_all_right or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
