"""The loads and lengths of a sweep as they are typed, and the load points they make. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from loadgen.core.errors import UserError
from loadgen.runs.load_points import LoadPoint, PointGroup, counted_points

Kind = Literal["concurrency", "request_rate"]
MOST_LOADS = 200  # loads of one sweep
MOST_POINTS = 1_000  # load points of one sweep, over all lengths and targets


def parse_loads(text: str, flag: str, kind: Kind) -> tuple[float, ...]:
    """Return the loads written as `1,2,4,8`, or as a series `1,2,4,...,512`, in ascending order.

    A series multiplies if its first numbers do, else it adds. Raises UserError for anything else.
    """
    where = f"{flag} {text}"
    parts = [part.strip() for part in text.split(",")]
    dots = [i for i, part in enumerate(parts) if part in ("...", "…")]
    numbers = [_amount(part, where, kind) for i, part in enumerate(parts) if i not in dots]
    if dots:
        if dots != [len(parts) - 2] or len(numbers) < 3:
            hint = "write the first ones, then ..., then the last: 1,2,4,...,512"
            raise UserError("invalid_value", "not a series that can be continued", where, hint)
        numbers = _continued(numbers[:-1], numbers[-1], where)
    if len(numbers) > MOST_LOADS:
        raise UserError(
            "too_large", f"{len(numbers)} levels are too many", where, f"at most {MOST_LOADS}"
        )
    if any(after <= before for before, after in pairwise(numbers)):
        hint = "1,2,4,8: a low load first keeps a server from a cold start"
        raise UserError("unordered", "levels must ascend, each once", where, hint)
    return tuple(numbers)


def parse_lengths(text: object, flag: str) -> tuple[int | None, ...]:
    """Return the lengths of `--isl 500,1000` in ascending order, or (None,) if none is given.

    Raises UserError.
    """
    if text is None:
        return (None,)
    where = f"{flag} {text}"
    parts = [part.strip() for part in str(text).split(",")]
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,9}", part) or int(part) < 1:
            what = f'"{part}" is no number of tokens'
            raise UserError("invalid_value", what, where, "like 500,1000,4000")
    lengths = sorted(map(int, parts))
    if len(set(lengths)) < len(lengths):
        raise UserError("duplicate", "each length once", where, "like 500,1000,4000")
    return tuple(lengths)


def point_groups(isl: object, osl: object, targets: Sequence[str]) -> list[PointGroup]:
    """Return every pair of lengths for every target. `isl` and `osl` are as typed.

    Raises UserError.
    """
    lengths = itertools.product(
        targets or ("",), parse_lengths(isl, "--isl"), parse_lengths(osl, "--osl")
    )
    groups = [
        PointGroup(isl=prompt_length, osl=output_length, target=target)
        for target, prompt_length, output_length in lengths
    ]
    if len({group.directory_prefix for group in groups}) < len(groups):
        raise UserError(
            "duplicate", "each target once", f"--target {','.join(targets)}", "names that differ"
        )
    return groups


def points_of(groups: Sequence[PointGroup], loads: Sequence[float], kind: Kind) -> list[LoadPoint]:
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
    if len(points) > MOST_POINTS:
        what = f"{counted_points(len(points))} are too many"
        raise UserError("too_large", what, "loadgen sweep", f"at most {MOST_POINTS:,}")
    return points


def _amount(part: str, where: str, kind: Kind) -> float:
    number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(/s)?", part)
    whole = kind == "concurrency"
    if number is None or float(number[1]) <= 0 or (whole and (number[2] or "." in number[1])):
        known = (
            "whole numbers from 1: 1,2,4,8 or 1,2,4,...,64"
            if whole
            else "requests per second, above 0"
        )
        raise UserError("invalid_value", f'"{part}" is no level', where, known)
    return float(number[1])


def _continued(first: Sequence[float], last: float, where: str) -> list[float]:
    ratio, step = first[-1] / first[-2], first[-1] - first[-2]
    geometric = len(first) < 3 or abs(first[-2] / first[-3] - ratio) < 1e-6 * ratio
    if len(first) == 2 and first[0] * 2 != first[1]:
        geometric = False
    numbers = list(first)
    while len(numbers) <= MOST_LOADS:
        following = numbers[-1] * ratio if geometric else numbers[-1] + step
        if following <= numbers[-1] or following > last * (1 + 1e-9):
            break
        numbers.append(round(following, 6))
    if abs(numbers[-1] - last) > 1e-6 * last:
        rule = f"times {ratio:g}" if geometric else f"plus {step:g}"
        raise UserError(
            "invalid_value",
            f"the series ({rule}) does not reach {last:g}",
            where,
            f"it comes to {numbers[-1]:g}",
        )
    return numbers


def load_name(kind: Kind, load: float) -> str:
    """Return a load as it stands in the name of a run: c8 or r2.5."""
    return f"{'c' if kind == 'concurrency' else 'r'}{load:g}"
