"""Compares the accepted lengths of speculative decoding of the sides of a comparison. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from loadgen.core.metrics.accepted_length import find_realised_length, is_within_tolerance
from loadgen.core.metrics.summary import Summary
from loadgen.runs.comparison_side import Side


def list_accepted_length_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield warnings if accepted lengths of speculative decoding make speeds not comparable.

    The accepted length is the mean number of tokens per step of the model. A longer one gives more
    tokens for the same work. A warning is needed if the sides differ by more than 1 %, or if a side
    has not the length that it states.
    """
    yield from _warn_of_differences(sides)

    for side in sides:
        checks = [run.summary.accepted_length for run in side.runs]
        differs_from_target = any(
            check is not None and check.comparable is False for check in checks
        )
        if differs_from_target:
            yield f"{side.name} does not have the accepted length that it states"


def _warn_of_differences(sides: Sequence[Side]) -> Iterator[str]:
    """Yield a warning if the sides have different accepted lengths, or if only some have one.

    The accepted length is the mean number of tokens per step of a model with speculative decoding.
    """
    length_by_side = measure_accepted_lengths(sides)
    if not length_by_side:
        return

    lengths_text = ", ".join(f"{name} {length:.3f}" for name, length in length_by_side.items())
    shortest = min(length_by_side.values())
    longest = max(length_by_side.values())
    is_comparable = is_within_tolerance(longest / shortest - 1)
    if not is_comparable:
        yield (
            f"Accepted lengths of speculative decoding differ: {lengths_text} tokens per "
            "step. Speeds are not comparable (1 % allowed)"
        )
        return

    sides_without_length = [side.name for side in sides if side.name not in length_by_side]
    if sides_without_length:
        yield (
            f"The accepted length of speculative decoding is known of {lengths_text} "
            f"tokens per step, but not of {', '.join(sides_without_length)}"
        )


def measure_accepted_lengths(sides: Sequence[Side]) -> dict[str, float]:
    """Return the accepted length of each side that has one, by the name of the side."""
    lengths = {side.name: _find_accepted_length(side) for side in sides}
    return {name: length for name, length in lengths.items() if length is not None}


def _find_accepted_length(side: Side) -> float | None:
    """Return the mean accepted length of the runs of one side, or None if no run has one.

    The accepted length is the mean number of tokens per step of a model with speculative decoding.
    """
    lengths_of_runs = [_find_length_of_run(run.summary) for run in side.runs]
    known_lengths = [length for length in lengths_of_runs if length is not None]
    return statistics.fmean(known_lengths) if known_lengths else None


def _find_length_of_run(summary: Summary) -> float | None:
    """Return the accepted length of a run, or None if the server reported none.

    A run that checked its accepted length against a target has it in the result of the check. That
    of any other run is computed from the counters of the server.
    """
    check = summary.accepted_length
    if check is not None and check.realised:
        return check.realised
    return find_realised_length(summary.speculation)
