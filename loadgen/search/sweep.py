"""The loads of a sweep, as they are typed: a grid of levels, and the names of their folders. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from loadgen.core.errors import UserError

Kind = Literal["concurrency", "request_rate"]
MOST = 200  # levels in one sweep


def grid(text: str, flag: str, kind: Kind) -> tuple[float, ...]:
    """The levels written as `1,2,4,8`, or as a series `1,2,4,...,512`, in ascending order.

    A series multiplies when its first numbers do; otherwise it adds. Raises UserError for anything else.
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
    if len(numbers) > MOST:
        raise UserError(
            "too_large", f"{len(numbers)} levels are too many", where, f"at most {MOST}"
        )
    if any(after <= before for before, after in pairwise(numbers)):
        hint = "1,2,4,8: a low load first keeps a server from a cold start"
        raise UserError("unordered", "levels must ascend, each once", where, hint)
    return tuple(numbers)


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
    while len(numbers) <= MOST:
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


def name(kind: Kind, amount: float) -> str:
    """The name of the folder of a level."""
    return f"{'c' if kind == 'concurrency' else 'r'}{amount:g}"
