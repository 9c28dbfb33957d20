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
DECIMALS = 6  # of a load
TOLERANCE = 1e-6  # relative, between loads that are equal
ROUNDING = 1e-9  # relative error of a calculated load


def parse_loads(text: str, flag: str, kind: LoadKind) -> tuple[float, ...]:
    """Return the loads written as `1,2,4,8`, or as a series `1,2,4,...,512`, in ascending order.

    A series multiplies if its first numbers do, else it adds. Raises UserError for anything else.
    """
    place = f"{flag} {text}"
    parts = [part.strip() for part in text.split(",")]
    ellipses = [index for index, part in enumerate(parts) if part in ELLIPSES]
    loads = [_parse_load(part, place, kind) for part in parts if part not in ELLIPSES]
    if ellipses:
        if ellipses != [len(parts) - 2] or len(loads) < MIN_LOADS_OF_SERIES:
            hint = "write the first ones, then ..., then the last: 1,2,4,...,512"
            raise UserError("invalid_value", "not a series that can be continued", place, hint)
        loads = _continue_series(loads[:-1], loads[-1], place)
    if len(loads) > MAX_LOADS:
        what = f"{len(loads)} levels are too many"
        raise UserError("too_large", what, place, f"at most {MAX_LOADS}")
    if any(after <= before for before, after in pairwise(loads)):
        hint = "1,2,4,8: a low load first keeps a server from a cold start"
        raise UserError("unordered", "levels must ascend, each once", place, hint)
    return tuple(loads)


def parse_lengths(text: object, flag: str) -> tuple[int | None, ...]:
    """Return the lengths of `--isl 500,1000` in ascending order, or (None,) if none is given.

    Raises UserError.
    """
    if text is None:
        return (None,)
    place = f"{flag} {text}"
    parts = [part.strip() for part in str(text).split(",")]
    for part in parts:
        if not LENGTH_PATTERN.fullmatch(part) or int(part) < 1:
            what = f'"{part}" is no number of tokens'
            raise UserError("invalid_value", what, place, "like 500,1000,4000")
    lengths = sorted(map(int, parts))
    if len(set(lengths)) < len(lengths):
        raise UserError("duplicate", "each length once", place, "like 500,1000,4000")
    return tuple(lengths)


def combine_point_groups(isl: object, osl: object, targets: Sequence[str]) -> list[PointGroup]:
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
        what = f"{counted_points(len(points))} are too many"
        raise UserError("too_large", what, "loadgen sweep", f"at most {MAX_POINTS:,}")
    return points


def _parse_load(text: str, place: str, kind: LoadKind) -> float:
    """Return one load. Raises UserError if it is not a load of this kind."""
    match = LOAD_PATTERN.fullmatch(text)
    if kind == "concurrency":
        is_load = match is not None and not match["unit"] and "." not in match["number"]
        hint = "whole numbers from 1: 1,2,4,8 or 1,2,4,...,64"
    else:
        is_load = match is not None
        hint = "requests per second, above 0"
    if match is None or not is_load or float(match["number"]) <= 0:
        raise UserError("invalid_value", f'"{text}" is no level', place, hint)
    return float(match["number"])


def _continue_series(first_loads: Sequence[float], last: float, place: str) -> list[float]:
    """Return a series of loads up to `last`. Raises UserError if the series does not reach it."""
    ratio = first_loads[-1] / first_loads[-2]
    step = first_loads[-1] - first_loads[-2]
    is_geometric = _is_geometric(first_loads)
    loads = list(first_loads)
    while len(loads) <= MAX_LOADS:
        next_load = loads[-1] * ratio if is_geometric else loads[-1] + step
        if next_load <= loads[-1] or next_load > last * (1 + ROUNDING):
            break
        loads.append(round(next_load, DECIMALS))
    if abs(loads[-1] - last) > TOLERANCE * last:
        rule = f"times {ratio:g}" if is_geometric else f"plus {step:g}"
        raise UserError(
            "invalid_value",
            f"the series ({rule}) does not reach {last:g}",
            place,
            f"it comes to {loads[-1]:g}",
        )
    return loads


def _is_geometric(loads: Sequence[float]) -> bool:
    """Return whether a series multiplies. One of two loads does if it doubles."""
    if len(loads) == 2:
        return loads[0] * 2 == loads[1]
    ratio = loads[-1] / loads[-2]
    return abs(loads[-2] / loads[-3] - ratio) < TOLERANCE * ratio


def load_name(kind: LoadKind, load: float) -> str:
    """Return a load as it stands in the name of a run: c8 or r2.5."""
    prefix = "c" if kind == "concurrency" else "r"
    return f"{prefix}{load:g}"
