"""Parses the loads and lengths of a sweep, and combines them to load points."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from loadgen.core.errors import UserError
from loadgen.runs.load_points import LoadPoint, PointGroup, counted_points

LoadKind = Literal["concurrency", "request_rate"]
MAX_LOADS = 200  # of one sweep
MAX_POINTS = 1_000  # of one sweep, over all lengths and targets
MIN_LOADS_OF_SERIES = 3  # the first two, and the last
ELLIPSES = ("...", "…")
LOAD_PATTERN = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,6})?)(?P<unit>/s)?")
LENGTH_PATTERN = re.compile(r"[0-9]{1,9}")
LOAD_DECIMALS = 6
"""The decimals to which a computed load is rounded."""
EQUALITY_TOLERANCE = 1e-6
"""Two loads or ratios that differ by less than this, relative to their size, are equal.

Rounding to LOAD_DECIMALS causes such differences.
"""
ROUNDING_ERROR = 1e-9
"""The largest relative error of a load before it is rounded."""


def parse_loads(text: str, flag: str, kind: LoadKind) -> tuple[float, ...]:
    """Return the loads of an option: `1,2,4,8`, or a series such as `1,2,4,...,512`.

    Raises UserError if a load is no number, if a series cannot be continued or does not reach its
    last load, or if the loads are too many or do not ascend.

    Args:
        text: The value of the option.
        flag: The option, for example "--concurrency", for error messages.
        kind: Whether the loads are rates or numbers of virtual users.
    """
    error_location = f"{flag} {text}"
    parts = [part.strip() for part in text.split(",")]
    loads = [_parse_load(part, error_location, kind) for part in parts if part not in ELLIPSES]

    has_ellipsis = len(loads) < len(parts)
    if has_ellipsis:
        _check_ellipsis(parts, error_location)
        loads = _continue_series(loads[:-1], loads[-1], error_location)

    _check_number_and_order(loads, error_location)
    return tuple(loads)


def _check_ellipsis(parts: Sequence[str], error_location: str) -> None:
    """Raise UserError unless a series has one ellipsis, between two or more loads and the last one.

    `parts` are its loads and ellipses as text, for example ["1", "2", "...", "8"].
    """
    ellipsis_indices = [index for index, part in enumerate(parts) if part in ELLIPSES]
    is_before_last_load = ellipsis_indices == [len(parts) - 2]
    load_count = len(parts) - len(ellipsis_indices)
    if is_before_last_load and load_count >= MIN_LOADS_OF_SERIES:
        return

    raise UserError(
        "invalid_value",
        "the series of loads cannot be continued",
        error_location,
        "write the first loads, then ..., then the last one, as in 1,2,4,...,512",
    )


def _check_number_and_order(loads: Sequence[float], error_location: str) -> None:
    """Raise UserError if there are too many loads, or if they do not ascend.

    They have to ascend so that the server is warm for the high ones.
    """
    if len(loads) > MAX_LOADS:
        problem = f"{len(loads)} loads are too many"
        raise UserError("too_large", problem, error_location, f"at most {MAX_LOADS}")
    if any(after <= before for before, after in pairwise(loads)):
        hint = (
            "write for example 1,2,4,8, with low loads first, so that the server "
            "is warm for the high ones"
        )
        raise UserError("unordered", "loads must ascend without repetition", error_location, hint)


def parse_lengths(text: object, flag: str) -> tuple[int | None, ...]:
    """Return the lengths of `--isl 500,1000` in ascending order, or (None,) if none is given.

    Raises UserError.
    """
    if text is None:
        return (None,)

    error_location = f"{flag} {text}"
    parts = [part.strip() for part in str(text).split(",")]
    for part in parts:
        if not LENGTH_PATTERN.fullmatch(part) or int(part) < 1:
            problem = f'"{part}" is not a number of tokens'
            raise UserError("invalid_value", problem, error_location, "for example 500,1000,4000")

    lengths = sorted(map(int, parts))
    if len(set(lengths)) < len(lengths):
        raise UserError(
            "duplicate", "a length is repeated", error_location, "for example 500,1000,4000"
        )

    return tuple(lengths)


def combine_point_groups(isl: object, osl: object, targets: Sequence[str]) -> list[PointGroup]:
    """Return a group of load points for every pair of lengths and every target.

    `isl` and `osl` are the input and output lengths as they were typed, or None. Raises UserError
    for a value that is no list of lengths, and for targets whose directories would have the same
    name.
    """
    combinations = itertools.product(
        targets or ("",), parse_lengths(isl, "--isl"), parse_lengths(osl, "--osl")
    )
    groups = [
        PointGroup(isl=input_length, osl=output_length, target=target)
        for target, input_length, output_length in combinations
    ]
    if len({group.directory_prefix for group in groups}) < len(groups):
        raise UserError(
            "duplicate",
            "a target is repeated",
            f"--target {','.join(targets)}",
            "use different names",
        )

    return groups


def combine_load_points(
    groups: Sequence[PointGroup], loads: Sequence[float], kind: LoadKind
) -> list[LoadPoint]:
    """Return a load point for each load of each group. Raises UserError if they are too many."""
    points = [
        LoadPoint(
            name=f"{group.directory_prefix}{load_name(kind, load)}",
            load=load,
            isl=group.isl,
            osl=group.osl,
            target=group.target,
        )
        for group in groups
        for load in loads
    ]
    if len(points) > MAX_POINTS:
        problem = f"{counted_points(len(points))} are too many"
        raise UserError("too_large", problem, "loadgen sweep", f"at most {MAX_POINTS:,}")

    return points


def _parse_load(text: str, error_location: str, kind: LoadKind) -> float:
    """Return one load, for example 2.5 for "2.5/s".

    Numbers of virtual users are integers without a unit. Raises UserError if `text` is not a load
    of this kind. The error names `error_location`, the option with its value.
    """
    is_concurrency = kind == "concurrency"
    match = LOAD_PATTERN.fullmatch(text)
    if match is not None:
        load = float(match["number"])
        is_plain_integer = not match["unit"] and "." not in match["number"]
        if load > 0 and (is_plain_integer or not is_concurrency):
            return load

    hint = "requests per second, above 0"
    if is_concurrency:
        hint = "whole numbers from 1: 1,2,4,8 or 1,2,4,...,64"

    raise UserError("invalid_value", f'"{text}" is not a load', error_location, hint)


def _continue_series(first_loads: Sequence[float], last: float, error_location: str) -> list[float]:
    """Return all loads of a series up to `last`, for example 1, 2, 4, 8 for "1,2,...,8".

    Raises UserError if the series does not reach the last load.

    Args:
        first_loads: The loads before the ellipsis, at least two.
        last: The load after the ellipsis.
        error_location: The option with its value, for an error message.
    """
    ratio = first_loads[-1] / first_loads[-2]
    step = first_loads[-1] - first_loads[-2]
    is_geometric = _is_geometric(first_loads)

    # A computed load may exceed the last one by a rounding error, as 1.1 * 1.1 exceeds 1.21.
    highest_load = last * (1 + ROUNDING_ERROR)
    loads = list(first_loads)
    while len(loads) <= MAX_LOADS:
        next_load = loads[-1] * ratio if is_geometric else loads[-1] + step
        if next_load <= loads[-1] or next_load > highest_load:
            break
        loads.append(round(next_load, LOAD_DECIMALS))

    if abs(loads[-1] - last) > EQUALITY_TOLERANCE * last:
        rule = f"times {ratio:g}" if is_geometric else f"plus {step:g}"
        raise UserError(
            "invalid_value",
            f"the series ({rule}) does not reach {last:g}",
            error_location,
            f"its last load is {loads[-1]:g}",
        )

    return loads


def _is_geometric(loads: Sequence[float]) -> bool:
    """Return whether each load of a series is the one before times a factor, as in 1, 2, 4.

    If not, a fixed step is added, as in 10, 20, 30. The last three loads decide. Two loads alone
    could be either: they count as geometric if the second is twice the first.
    """
    if len(loads) == 2:
        return loads[0] * 2 == loads[1]
    last_ratio = loads[-1] / loads[-2]
    ratio_before = loads[-2] / loads[-3]
    return abs(ratio_before - last_ratio) < EQUALITY_TOLERANCE * last_ratio


def load_name(kind: LoadKind, load: float) -> str:
    """Return a load as it stands in the name of a run: c8 or r2.5."""
    prefix = "c" if kind == "concurrency" else "r"
    return f"{prefix}{load:g}"
