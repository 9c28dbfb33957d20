"""Compares the accepted lengths of speculative decoding of the sides of a comparison. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from loadgen.core.metrics.accepted_length import find_realised_length, is_within_tolerance
from loadgen.runs.comparison_side import Side


def list_accepted_length_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield warnings if accepted lengths of speculative decoding make speeds not comparable.

    The accepted length is the mean number of tokens per step of the model. A longer one gives more
    tokens for the same work. A warning is needed if the sides differ by more than 1 %, or if a side
    has not the length that it states.
    """
    yield from _list_differences(sides)

    for side in sides:
        checks = [run.summary.accepted_length for run in side.runs]
        differs_from_target = any(
            check is not None and check.comparable is False for check in checks
        )
        if differs_from_target:
            yield f"{side.name} does not have the accepted length that it states"


def _list_differences(sides: Sequence[Side]) -> Iterator[str]:
    """Yield a warning if the sides have different accepted lengths, or if only some have one."""
    known_lengths = measure_accepted_lengths(sides)
    if not known_lengths:
        return

    length_texts = [f"{name} {length:.3f}" for name, length in known_lengths.items()]
    lengths = ", ".join(length_texts)
    shortest = min(known_lengths.values())
    longest = max(known_lengths.values())
    is_comparable = is_within_tolerance(longest / shortest - 1)
    if not is_comparable:
        yield (
            f"Accepted lengths of speculative decoding differ: {lengths} tokens per "
            "step. Speeds are not comparable (1 % allowed)"
        )
        return

    unknown_sides = [side.name for side in sides if side.name not in known_lengths]
    if unknown_sides:
        yield (
            f"The accepted length of speculative decoding is known of {lengths} "
            f"tokens per step, but not of {', '.join(unknown_sides)}"
        )


def measure_accepted_lengths(sides: Sequence[Side]) -> dict[str, float]:
    """Return the accepted length of each side that has one, by the name of the side."""
    lengths = {side.name: _find_accepted_length(side) for side in sides}
    return {name: length for name, length in lengths.items() if length is not None}


def _find_accepted_length(side: Side) -> float | None:
    """Return the mean accepted length of the runs of one side of a comparison.

    The accepted length is the mean number of tokens per step of the model. Return None if no run
    has one.
    """
    known_lengths = []
    for run in side.runs:
        check = run.summary.accepted_length
        measured_length = None if check is None else check.realised
        length = measured_length or find_realised_length(run.summary.speculation)
        if length is not None:
            known_lengths.append(length)

    return statistics.fmean(known_lengths) if known_lengths else None
