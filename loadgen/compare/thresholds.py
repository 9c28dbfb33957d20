"""Conditions of `--fail-on`: `ttft_ms.p99 > +5%`, `goodput.share < 99%`. Parsing them, and checking a comparison.

Pure. A limit with a sign is a change against the first side: relative (%) or in the unit of the metric. A limit without
a sign is a value of the other side itself.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from loadgen.compare.comparison import (
    SAME,
    UNLIKE,
    Comparison,
    Difference,
    load_needed,
    needed_in_words,
)
from loadgen.core import format
from loadgen.core.errors import CombinedError, UserError, closest
from loadgen.repeated.comparable_metrics import SHARE_PATHS, find_metric, metric_paths

_FORM = re.compile(
    r"\s*([A-Za-z0-9_.]+)\s*(>=|<=|>|<)\s*([+-]?)\s*(\d+(?:\.\d+)?|\.\d+)\s*(%|us|ms|s|)\s*"
)
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_TESTS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


ONE_RUN = (
    "undecided: one run on a side does not say what another start of the server would show; give folders of repeats "
    "(loadgen run ... --repeat 3)"
)


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that makes a comparison fail.

    `limit`: a relative change as a part of one, or a difference or a value in the unit of the metric, by `kind`.
    """

    text: str
    metric: str
    test: str
    limit: float
    kind: str  # change, difference, value


class ThresholdOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A condition checked for one side.

    `failed` is null where it is undecided: the metric does not have figures on both sides, or a change is asked of one
    run a side, or of different work.
    """

    condition: str
    side: str
    failed: bool | None
    said: str


def parse_thresholds(texts: Sequence[str]) -> tuple[Condition, ...]:
    """The conditions in these texts. Raises Faults with every fault found."""
    faults: list[UserError] = []
    conditions = []
    for text in texts:
        try:
            conditions.append(_parse(text))
        except UserError as fault:
            faults.append(fault)
    if faults:
        raise CombinedError(faults)
    return tuple(conditions)


def _parse(text: str) -> Condition:
    where = f"--fail-on '{text}'"
    form = _FORM.fullmatch(text)
    if form is None:
        raise UserError(
            "invalid_value",
            "not a condition",
            where,
            "write METRIC > +5% (a change) or METRIC > 500ms (a value)",
        )
    name, test, sign, digits, unit = form.groups()
    spellings = (
        name,
        name.replace(".", "_ms.", 1),
        re.sub(r"(?:_ms)?_(p\d[\d_]*|mean|max|min)$", r"_ms.\1", name),
    )
    path = next((spelled for spelled in spellings if find_metric(spelled) is not None), None)
    if path is None:
        similar = closest(name, metric_paths(), cutoff=0.5)
        hint = (
            f"did you mean {similar}?"
            if similar
            else "as in summary.json: ttft_ms.p99, goodput.share"
        )
        raise UserError("unknown_name", f'no metric is called "{name}"', where, hint)
    known_metric = find_metric(path)
    assert known_metric is not None
    number = float(digits) * (-1 if sign == "-" else 1)
    if unit in _MS:
        if known_metric.unit != "ms":
            hint = f"write the limit in {known_metric.unit or 'its own unit'}"
            raise UserError("invalid_value", f"{path} is no time", where, hint)
        number *= _MS[unit]
    if unit == "%":
        if not sign and path not in SHARE_PATHS:
            raise UserError(
                "invalid_value",
                f"{path} is no share",
                where,
                f"for a change write {name} {test} +{digits}%",
            )
        number /= 100
    kind = (
        "value"
        if not sign
        else "change"
        if unit == "%" and path not in SHARE_PATHS
        else "difference"
    )
    return Condition(text=text, metric=path, test=test, limit=number, kind=kind)


def hold(
    conditions: Sequence[Condition], found: Comparison, *, beyond_noise: bool = False
) -> Iterator[ThresholdOutcome]:
    """Check each condition for each other side.

    `beyond_noise`: a change fails only if its whole interval is beyond the limit, passes only if
    none of it is, and is undecided otherwise.
    """
    runs = min(found.runs, default=0)
    for condition in conditions:
        for difference in found.differences:
            if difference.metric == condition.metric:
                yield _check(condition, difference, beyond_noise, runs)


class CheckedChange(NamedTuple):
    """A change and the ends of its interval, in the unit of a condition's limit."""

    text: str
    change: float
    low: float | None
    high: float | None


def _check(
    condition: Condition, difference: Difference, beyond_noise: bool, runs: int
) -> ThresholdOutcome:
    """Check a condition for one difference. `runs`: the fewest runs that a side has."""
    found = _checked_change(condition, difference)
    if isinstance(found, ThresholdOutcome):
        return found
    if not difference.repeated:
        return _outcome(condition, difference, None, f"{found.text}; {ONE_RUN}")
    if beyond_noise:
        return _check_beyond_noise(condition, difference, found, runs)
    text = found.text
    failed = _TESTS[condition.test](found.change, condition.limit)
    if failed and difference.outcome != "different" and difference.low is not None:
        text += f", which may be noise: interval {interval(difference, percent=True)}"
    return _outcome(condition, difference, failed, text)


def _outcome(
    condition: Condition, difference: Difference, failed: bool | None, text: str
) -> ThresholdOutcome:
    return ThresholdOutcome(
        condition=condition.text, side=difference.side, failed=failed, said=text
    )


def _checked_change(
    condition: Condition, difference: Difference
) -> CheckedChange | ThresholdOutcome:
    """Return the change that a condition limits, or the outcome if none is needed."""
    name = difference.name
    if difference.after is None or (difference.before is None and condition.kind != "value"):
        return _outcome(condition, difference, None, f"{name} has no figure on both sides")
    if condition.kind == "value":
        failed = _TESTS[condition.test](difference.after, condition.limit)
        value = f"{format.quantity(difference.after)} {difference.unit}".rstrip()
        return _outcome(condition, difference, failed, f"{name} is {value}")
    if difference.why in (UNLIKE, SAME):
        return _outcome(condition, difference, None, f"{name}: {_NOT_JUDGED[difference.why]}")
    assert difference.before is not None
    before, after = format.quantity(difference.before), format.quantity(difference.after)
    text = f"{name}: {before} to {after} {difference.unit}".rstrip()
    low, high = difference.low, difference.high
    if condition.kind == "change":
        if difference.change is None:
            text = f"{text}: no relative change from zero"
            return _outcome(condition, difference, None, text)
        change = round(difference.change, 9)  # because 105 against 100 is 5 % and not a little more
        return CheckedChange(f"{text} ({difference.change * 100:+.1f} %)", change, low, high)
    if not difference.absolute:  # its interval is relative, its limit is not
        low = None if low is None else low * difference.before
        high = None if high is None else high * difference.before
    return CheckedChange(text, difference.after - difference.before, low, high)


_NOT_JUDGED = {
    UNLIKE: f"{UNLIKE}, so a change says nothing; --anyway takes it all the same",
    SAME: f"{SAME}, so no change could be seen",
}


def _check_beyond_noise(
    condition: Condition, difference: Difference, found: CheckedChange, runs: int
) -> ThresholdOutcome:
    """Check a condition that holds only if the whole interval of a change is beyond its limit.

    The condition is undecided if the limit lies inside the interval; the text then says how many
    runs would decide it.
    """
    if found.low is None or found.high is None:
        text = f"{found.text}; without an interval: {difference.why}"
        return _outcome(condition, difference, None, text)
    text = f"{found.text}, interval {interval(difference, percent=True)}"
    test = _TESTS[condition.test]
    is_low_beyond = test(found.low, condition.limit)
    is_high_beyond = test(found.high, condition.limit)
    if is_low_beyond == is_high_beyond:
        return _outcome(condition, difference, is_low_beyond, text)
    limit = _scaled(condition.limit, condition)
    low = _scaled(found.low, condition)
    high = _scaled(found.high, condition)
    needed = load_needed(abs(limit - (low + high) / 2), (high - low) / 2)
    decides = needed_in_words(difference, needed, runs)
    text = f"{text}, which holds the limit{f'; {decides}' if decides else ''}"
    return _outcome(condition, difference, None, text)


def _scaled(change: float, condition: Condition) -> float:
    """Return a change on the scale on which intervals are symmetric: the logarithm of a ratio."""
    return math.log1p(max(change, -0.999)) if condition.kind == "change" else change


def interval(one: Difference, *, percent: bool = False) -> str:
    """The interval of a change as text: `+8.1 to +14.2 %`; of a factor `2.1x to 3.9x`, unless in `percent`, as the
    change beside it is; of a share, in points.
    """
    if one.low is None or one.high is None:
        return format.NONE
    if (
        not percent and not one.absolute and one.change is not None and one.change >= 1
    ):  # as `format.difference` writes it
        return f"{format.quantity(1 + one.low)}x to {f'{format.quantity(1 + one.high)}x' if one.high < 99 else 'any'}"
    unit = "points" if one.absolute else "%"
    high = f"{one.high * 100:+.1f}" if one.high < 99 else "any"
    return f"{one.low * 100:+.1f} to {high} {unit}"
