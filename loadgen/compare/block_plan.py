"""How many blocks a live comparison has and how long they are, from its options."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.compare.alternating_blocks import BLOCKS_PER_GROUP, FIRST_STAGE_GROUPS, MIN_GROUPS
from loadgen.core import format, units
from loadgen.core.errors import UserError

if TYPE_CHECKING:
    from loadgen.repeated.repeats import Repetition

DEFAULT_GROUPS = 20
"""Groups without --repeat and --duration. docs/guides/compare.md has the power that they give."""

DEFAULT_BLOCK_S = 15.0
"""The length of a block without --repeat. Shorter blocks follow the drift of the host more closely,
but more of their time is spent on starting and on waiting for the last response."""

FEWEST_DEFAULT_GROUPS = 10
MOST_DEFAULT_GROUPS = 100
"""The limits of the number of groups that follows from DEFAULT_BLOCK_S. A time in which even blocks
of SHORT_BLOCK_S do not make so many groups has fewer."""

DEFAULT_MAX_GROUPS = 40
"""The largest number of groups of `--repeat auto`."""

DEFAULT_PRECISION = 0.01
"""The half width of the intervals at which `--repeat auto` ends."""

MIN_BLOCK_S = 1.0
"""A shorter block measures little more than the start and the end of its load."""

SHORT_BLOCK_S = 5.0
"""A shorter block may end before its first responses do: 250 tokens at 20 ms take 5 s."""


class BlockPlan(NamedTuple):
    """How many groups of blocks there are, and how long a block is.

    Attributes:
        max_groups: The number of groups, or the largest number.
        half_width: The half width at which the comparison ends. None for a fixed number of groups.
        block_s: The duration of a block. None if the workload decides it.
        pause_ns: The pause between two blocks.
    """

    max_groups: int = DEFAULT_GROUPS
    half_width: float | None = None
    block_s: float | None = None
    pause_ns: int = 0


def plan_blocks(invocation: Invocation) -> BlockPlan:
    """Return the number and the length of the blocks that --repeat and --duration specify.

    --repeat is the number of groups of four blocks, or "auto" to repeat until a precision is
    reached. Without it, the number follows from --duration, the time of all blocks together.

    Raises:
        UserError: A value is out of range, or two options contradict each other.
        CombinedError: Several values are wrong.
    """
    _check_one_block_length(invocation)
    repetition = invocation.repetition(
        default_most=DEFAULT_MAX_GROUPS, default_precision=DEFAULT_PRECISION
    )
    total_s = _parse_total_s(invocation["duration"])

    if repetition is None:  # without --repeat
        max_groups = DEFAULT_GROUPS if total_s is None else _choose_group_count(total_s)
        return BlockPlan(max_groups, block_s=_compute_block_s(total_s, max_groups))

    _check_group_count(repetition)
    return BlockPlan(
        max_groups=repetition.max_runs,
        half_width=repetition.precision if repetition.count is None else None,
        block_s=_compute_block_s(total_s, repetition.max_runs),
        pause_ns=repetition.pause_ns,
    )


def describe_short_blocks(max_groups: int, block_s: float | None) -> str:
    """Return a warning if blocks may be shorter than a response, or "" if they are long enough.

    Args:
        max_groups: The number of groups.
        block_s: The duration of a block in seconds. None if the workload decides it.
    """
    if block_s is None or block_s >= SHORT_BLOCK_S:
        return ""
    return (
        f"warning: blocks of {format.duration(block_s)} may be shorter than a response. Use "
        f"{format_needed_duration(SHORT_BLOCK_S, max_groups)} or more, or fewer groups (--repeat)."
    )


def format_needed_duration(block_s: float, max_groups: int) -> str:
    """Return the option --duration that makes blocks at least this long, such as "-d 200s"."""
    block_count = max_groups * BLOCKS_PER_GROUP
    return f"-d {math.ceil(block_s) * block_count}s"


def _check_one_block_length(invocation: Invocation) -> None:
    """Check that only one of --num-requests and --duration specifies how long a block is.

    Raises:
        UserError: Both options are used.
    """
    request_count = invocation["num_requests"]
    duration = invocation["duration"]
    if request_count is not None and duration is not None:
        problem = (
            "a block ends after a number of requests or after a part of the duration, not after "
            "both"
        )
        options = f"--num-requests {request_count} --duration {duration}"
        raise UserError("conflict", problem, options, "give one of them")


def _choose_group_count(total_s: float) -> int:
    """Return into how many groups of blocks a time is divided, if the user does not specify it.

    There are 10 to 100 groups whose blocks last about 15 s. If the time is too short for 10 such
    groups, it has 10 groups of shorter blocks. If these blocks would be shorter than 5 s, there are
    fewer groups of blocks of 5 s, but never fewer than MIN_GROUPS.
    """
    groups_of_default_blocks = round(total_s / (BLOCKS_PER_GROUP * DEFAULT_BLOCK_S))
    if groups_of_default_blocks >= FEWEST_DEFAULT_GROUPS:
        return min(groups_of_default_blocks, MOST_DEFAULT_GROUPS)

    groups_of_short_blocks = int(total_s / (BLOCKS_PER_GROUP * SHORT_BLOCK_S))
    return min(max(groups_of_short_blocks, MIN_GROUPS), FEWEST_DEFAULT_GROUPS)


def _parse_total_s(duration: str | None) -> float | None:
    """Return the value of --duration, the time of all blocks, in seconds.

    A number without a unit is in seconds. Return None without the option.

    Raises:
        UserError: The value is not a time.
    """
    if duration is None:
        return None

    parse_duration_ns = partial(units.duration_ns, default_unit="s")
    total_ns = parse_option("--duration", duration, parse_duration_ns)
    return (total_ns or 0) / units.NS_PER_S


def _check_group_count(repetition: Repetition) -> None:
    """Check that --repeat allows as many groups as a comparison needs.

    Raises:
        UserError: The number of groups is too small.
    """
    if repetition.count is None:
        _check_group_count_of_auto(repetition)
    elif repetition.max_runs < MIN_GROUPS:
        # Fewer groups have no confidence interval.
        raise UserError(
            "out_of_range",
            f"a live comparison needs {MIN_GROUPS} groups to judge a difference",
            f"--repeat {repetition.count}",
            f"use --repeat {MIN_GROUPS} or more; {DEFAULT_GROUPS} find small changes",
        )


def _check_group_count_of_auto(repetition: Repetition) -> None:
    """Check the largest number of groups that `--repeat auto` may run.

    The number of groups is computed from the variation of the first FIRST_STAGE_GROUPS groups, so
    there must be as many.

    Raises:
        UserError: The number is smaller.
    """
    if repetition.max_runs < FIRST_STAGE_GROUPS:
        raise UserError(
            "out_of_range",
            f"a live comparison needs {FIRST_STAGE_GROUPS} groups to know its precision",
            f"--repeat auto,most={repetition.most}",
            f"use most={FIRST_STAGE_GROUPS} or more",
        )


def _compute_block_s(total_s: float | None, max_groups: int) -> float | None:
    """Return the duration of a block in seconds, or None if the workload decides it.

    Args:
        total_s: The time of all blocks in seconds, or None.
        max_groups: The number of groups.

    Raises:
        UserError: The blocks are too short to measure anything.
    """
    if total_s is None:
        return None

    block_count = max_groups * BLOCKS_PER_GROUP
    block_s = total_s / block_count
    if block_s < MIN_BLOCK_S:
        raise UserError(
            "out_of_range",
            f"{block_count} blocks of {block_s:g} s are too short to measure anything",
            f"--duration {total_s:g}s",
            f"use {format_needed_duration(SHORT_BLOCK_S, max_groups)} or more, or fewer groups "
            "(--repeat)",
        )
    return block_s
