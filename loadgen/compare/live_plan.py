"""What `loadgen compare --live` was asked to do, as `live.json` stores it. Pure."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from loadgen.compare.alternating_blocks import (
    BLOCKS_PER_GROUP,
    BlockGroup,
    list_groups,
)
from loadgen.core import format
from loadgen.core.errors import UserError

SCHEMA = 1
MAX_GROUPS = 100
"""The largest number of groups. It is that of `--repeat`, and bounds what a changed file costs."""
PLAN_FILE = "live.json"

IDENTITY_FIELDS = {
    "workload": "workload",
    "source_text": "workload",
    "targets": "targets",
    "options": "options",
    "max_groups": "number of groups",
    "half_width": "precision",
    "block_s": "duration",
    "confidence": "confidence",
    "conditions": "conditions",
    "is_beyond_noise": "conditions",
    "allows_different_work": "option --anyway",
}
"""The fields of a plan that make it the same comparison, with their names in an error message.

The number of groups is one of them. Someone who looked at the result and added groups until a
difference appears would raise too many false alarms.
"""


class LivePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was requested of a live comparison.

    Attributes:
        schema: The version of the format.
        workload: The name of the workload, as it was typed.
        source_text: The text of the workload file.
        targets: Both targets as they are shown, without secrets: A, then B.
        options: The options that change the load, as text by their names.
        seed: The seed of the order of the blocks, and of the loads of all pairs.
        max_groups: The number of groups of four blocks. With `half_width`, the largest number.
        half_width: The half width of the intervals at which the comparison ends, as a relative
            change. None for a fixed number of groups.
        block_s: The measured duration of a block in seconds. None if the workload decides it.
        pause_ns: The pause before each block but the first.
        confidence: The confidence of all metrics together.
        conditions: The conditions of --fail-on.
        is_beyond_noise: Whether a condition fails only if the whole interval is beyond its limit.
        allows_different_work: Whether the metrics are judged even if the sides did other work.
        metadata: The values of --metadata.
        command: The command line, without its secrets.
    """

    schema: int = SCHEMA
    workload: str
    source_text: str
    targets: tuple[str, str]
    options: dict[str, str]
    seed: int
    max_groups: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)]
    half_width: float | None = None
    block_s: float | None = None
    pause_ns: int = 0
    confidence: float
    conditions: tuple[str, ...] = ()
    is_beyond_noise: bool = False
    allows_different_work: bool = False
    metadata: dict[str, str] = {}
    command: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        """The groups of blocks in the order of time."""
        return list_groups(self.seed, self.max_groups)

    @property
    def max_blocks(self) -> int:
        """The number of blocks. With `half_width`, the largest number."""
        return self.max_groups * BLOCKS_PER_GROUP

    @property
    def is_two_stage(self) -> bool:
        """Whether the number of groups follows from the variation of the first ones."""
        return self.half_width is not None

    @property
    def scaled_half_width(self) -> float:
        """The half width as a difference of logarithms."""
        return math.log1p(self.half_width or 0.0)


def check_same_comparison(stored: LivePlan, requested: LivePlan, where: str) -> None:
    """Check that a directory has the live comparison that is requested.

    Args:
        stored: The plan of the comparison in the directory.
        requested: The plan of the requested comparison.
        where: The directory, for the error message.

    Raises:
        UserError: The plans differ.
    """
    changed_labels: list[str] = []
    for field_name, label in IDENTITY_FIELDS.items():
        is_changed = getattr(stored, field_name) != getattr(requested, field_name)
        if is_changed and label not in changed_labels:
            changed_labels.append(label)

    if not changed_labels:
        return

    raise UserError(
        "mismatch",
        "the directory contains another live comparison, which differs in: "
        f"{', '.join(changed_labels)}",
        where,
        "repeat the same command, or use another --out",
    )


def describe_plan(plan: LivePlan) -> str:
    """Return the blocks of a plan, for example "40 blocks of 30 s in 10 groups (ABBA, BAAB)"."""
    blocks = format.counted(plan.max_blocks, "block")
    length = "" if plan.block_s is None else f" of {format.duration(plan.block_s)}"
    groups = format.counted(plan.max_groups, "group")
    orders = ", ".join(group.order for group in plan.groups[:2])  # all others repeat these
    text = f"{blocks}{length} in {groups} ({orders})"
    if plan.half_width is None:
        return text

    precision_percent = plan.half_width * 100
    return f"at most {text}, until the metrics are known to ±{precision_percent:g} %"
