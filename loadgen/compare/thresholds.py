"""The conditions of `--fail-on`, such as `ttft_ms.p99 > +5%` and `goodput.share < 99%`.

Pure. A limit with a sign is a change against the first side: relative (%) or in the unit of the
metric. A limit without a sign is a value of the other side itself.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from loadgen.compare.comparison import NOT_SAME_WORK, SAME_RUN, Comparison
from loadgen.compare.difference import Difference, describe_needed_load
from loadgen.compare.significance import load_needed
from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, closest, collecting
from loadgen.repeated.comparable_metrics import SHARE_PATHS, Metric, find_metric, metric_paths

_CONDITION = re.compile(
    r"\s*(?P<metric>[A-Za-z0-9_.]+)\s*(?P<test>>=|<=|>|<)\s*"
    r"(?P<sign>[+-]?)\s*(?P<digits>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>%|us|ms|s|)\s*"
)
_TIME_UNITS = ("us", "ms", "s")
_UNIT_FACTORS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "%": 1e-2, "": 1.0}
"""Factors that convert a limit to milliseconds, or from percent to a fraction."""

_TESTS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_NOT_JUDGED = {
    NOT_SAME_WORK: f"{NOT_SAME_WORK}; use --anyway to judge the change anyway",
    SAME_RUN: SAME_RUN,
}

CHANGE_DIGITS = 9
"""Digits to which a change is rounded, because 105 against 100 is 5 % and not a little more."""

SMALLEST_SCALED_CHANGE = -0.999
"""A limit below this is taken as this, because a ratio of zero has no logarithm."""

LARGEST_PRINTED_CHANGE = 99
"""The largest upper end of an interval that is printed. A larger one counts as unbounded."""

SINGLE_RUN = "not decided: one run per side, run-to-run variation unknown. Re-run with --repeat 3"


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that makes a comparison fail.

    Attributes:
        text: The condition as it was written.
        metric: The path of the metric.
        test: The operator, such as ">".
        limit: A relative change as a part of one, or else in the unit of the metric.
        kind: Whether the limit is for a relative change, a difference or a value.
    """

    text: str
    metric: str
    test: str
    limit: float
    kind: Literal["change", "difference", "value"]

    def is_met_by(self, value: float) -> bool:
        """Return True if a value meets the condition, so that the comparison fails."""
        return _TESTS[self.test](value, self.limit)


class ThresholdOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A condition checked for one side.

    Attributes:
        condition: The condition as it was written.
        side: The name of the side.
        failed: True if the condition holds. None if it is undecided: the metric is missing on a
            side, or a change is limited for single runs or for other work.
        text: The outcome as a sentence.
    """

    condition: str
    side: str
    failed: bool | None
    text: str = msgspec.field(name="said")


def parse_thresholds(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Return the conditions in texts.

    Raises:
        CombinedError: Everything that is wrong with them.
    """
    errors: list[LoadgenError] = []
    conditions = []
    for text in texts:
        with collecting(errors):
            conditions.append(_parse(text))
    if errors:
        raise CombinedError(errors)
    return tuple(conditions)


def check_thresholds(
    conditions: Sequence[Condition], comparison: Comparison, *, beyond_noise: bool = False
) -> Iterator[ThresholdOutcome]:
    """Yield the outcome of each condition for each side but the first.

    Args:
        conditions: The conditions.
        comparison: The comparison.
        beyond_noise: True if a change fails only if its whole interval is beyond the limit, passes
            only if none of it is, and is undecided otherwise.
    """
    run_count = min(comparison.runs, default=0)
    for condition in conditions:
        for difference in comparison.differences:
            if difference.metric == condition.metric:
                yield check_threshold(
                    condition, difference, run_count=run_count, beyond_noise=beyond_noise
                )


def check_threshold(
    condition: Condition, difference: Difference, *, run_count: int, beyond_noise: bool = False
) -> ThresholdOutcome:
    """Return the outcome of one condition for one difference. See `check_thresholds`."""
    check = _ThresholdCheck(condition, difference, run_count)
    return check.outcome(beyond_noise=beyond_noise)


def _parse(text: str) -> Condition:
    """Return the condition in a text such as "ttft_ms.p99 > +5%".

    Raises UserError for a text of another form, an unknown metric, or a unit that does not fit the
    metric.
    """
    match = _CONDITION.fullmatch(text)
    location = f"--fail-on '{text}'"
    if match is None:
        raise UserError(
            "invalid_value",
            "must be a condition",
            location,
            "METRIC > +5% for a change, or METRIC > 500ms for a value",
        )
    metric = _find_metric(match["metric"], location)
    _check_unit(match, metric, location)
    limit = float(match["digits"]) * _UNIT_FACTORS[match["unit"]]
    if match["sign"] == "-":
        limit = -limit
    return Condition(
        text=text,
        metric=metric.path,
        test=match["test"],
        limit=limit,
        kind=_kind_of_limit(match, metric),
    )


def _check_unit(match: re.Match[str], metric: Metric, location: str) -> None:
    """Raise UserError if the unit of a limit does not fit the metric.

    A limit in percent is a change, or a value of a metric that is itself a fraction.
    """
    unit = match["unit"]
    if unit in _TIME_UNITS and metric.unit != "ms":
        hint = f"give the limit in {metric.unit or 'the unit of the metric'}"
        raise UserError("invalid_value", f"{metric.path} is not a time", location, hint)
    is_value = not match["sign"]
    if unit == "%" and is_value and metric.path not in SHARE_PATHS:
        hint = f"for a change, use {match['metric']} {match['test']} +{match['digits']}%"
        raise UserError("invalid_value", f"{metric.path} is not a percentage", location, hint)


def _kind_of_limit(
    match: re.Match[str], metric: Metric
) -> Literal["change", "difference", "value"]:
    """Return what the limit of a condition is compared with.

    A limit without a sign is compared with the value of a side. A limit in percent is a relative
    change, except for a metric that is a fraction, whose changes are in percentage points.
    """
    if not match["sign"]:
        return "value"
    if match["unit"] == "%" and metric.path not in SHARE_PATHS:
        return "change"
    return "difference"


def _find_metric(name: str, location: str) -> Metric:
    """Return the metric of a name in one of its spellings, such as ttft.p99 or ttft_p99."""
    spellings = (
        name,
        name.replace(".", "_ms.", 1),
        re.sub(r"(?:_ms)?_(p\d[\d_]*|mean|max|min)$", r"_ms.\1", name),
    )
    for spelling in spellings:
        metric = find_metric(spelling)
        if metric is not None:
            return metric
    similar = closest(name, metric_paths(), cutoff=0.5)
    hint = "use a name of summary.json, like ttft_ms.p99 or goodput.share"
    if similar:
        hint = f"did you mean {similar}?"
    raise UserError("unknown_name", f'unknown metric "{name}"', location, hint)


class _Change(NamedTuple):
    """A change and the ends of its interval, in the unit of a condition's limit."""

    text: str
    change: float
    low: float | None
    high: float | None


class _ThresholdCheck:
    """Checks one condition for one difference."""

    def __init__(self, condition: Condition, difference: Difference, run_count: int) -> None:
        self._condition = condition
        self._difference = difference
        self._run_count = run_count

    def outcome(self, *, beyond_noise: bool) -> ThresholdOutcome:
        """Return the outcome. With `beyond_noise`, the whole interval decides."""
        difference = self._difference
        is_value = self._condition.kind == "value"
        if difference.after is None or (difference.before is None and not is_value):
            return self._result(None, f"{difference.name} is not known for both sides")
        if is_value:
            return self._check_value(difference.after)
        if difference.reason in _NOT_JUDGED:
            return self._result(None, f"{difference.name}: {_NOT_JUDGED[difference.reason]}")
        change = self._change()
        if change is None:
            return self._result(None, f"{self._values()}: no relative change from 0")
        if not difference.repeated:
            return self._result(None, f"{change.text}; {SINGLE_RUN}")
        return self._check_interval(change) if beyond_noise else self._check_change(change)

    def _check_value(self, value: float) -> ThresholdOutcome:
        difference = self._difference
        text = f"{format.quantity(value)} {difference.unit}".rstrip()
        return self._result(self._condition.is_met_by(value), f"{difference.name} is {text}")

    def _check_change(self, change: _Change) -> ThresholdOutcome:
        difference = self._difference
        is_met = self._condition.is_met_by(change.change)
        text = change.text
        if is_met and difference.outcome != "different" and difference.low is not None:
            text += f", may be noise: CI {format_interval(difference, percent=True)}"
        return self._result(is_met, text)

    def _result(self, failed: bool | None, text: str) -> ThresholdOutcome:
        return ThresholdOutcome(
            condition=self._condition.text, side=self._difference.side, failed=failed, text=text
        )

    def _values(self) -> str:
        difference = self._difference
        before = format.quantity(difference.before)
        after = format.quantity(difference.after)
        return f"{difference.name}: {before} to {after} {difference.unit}".rstrip()

    def _change(self) -> _Change | None:
        """Return the change in the unit of the limit, or None for a relative change from zero."""
        difference = self._difference
        low = difference.low
        high = difference.high
        if self._condition.kind == "change":
            if difference.change is None:
                return None
            text = f"{self._values()} ({difference.change * 100:+.1f} %)"
            return _Change(text, round(difference.change, CHANGE_DIGITS), low, high)
        assert difference.before is not None and difference.after is not None
        if not difference.absolute:
            # The interval is relative, but the limit is in the unit of the metric.
            low = None if low is None else low * difference.before
            high = None if high is None else high * difference.before
        return _Change(self._values(), difference.after - difference.before, low, high)

    def _check_interval(self, change: _Change) -> ThresholdOutcome:
        """Check that the whole interval of a change is beyond the limit, or none of it.

        The condition is undecided if the limit lies inside the interval. The text then says how
        many runs would decide it.
        """
        if change.low is None or change.high is None:
            text = f"{change.text}; no interval: {self._difference.reason}"
            return self._result(None, text)
        interval = format_interval(self._difference, percent=True)
        text = f"{change.text}, CI {interval}"
        is_low_end_beyond = self._condition.is_met_by(change.low)
        is_high_end_beyond = self._condition.is_met_by(change.high)
        if is_low_end_beyond == is_high_end_beyond:
            return self._result(is_low_end_beyond, text)
        needed_load = self._load_to_decide(change.low, change.high)
        suffix = f"; {needed_load}" if needed_load else ""
        return self._result(None, f"{text} contains the limit{suffix}")

    def _load_to_decide(self, low: float, high: float) -> str:
        """Return how many runs would move an interval off the limit, or "" if it is not known.

        They would if the middle of the interval stayed where it is, and its half width became as
        small as the distance from there to the limit.
        """
        scaled_limit = self._to_symmetric_scale(self._condition.limit)
        scaled_low = self._to_symmetric_scale(low)
        scaled_high = self._to_symmetric_scale(high)
        middle = (scaled_low + scaled_high) / 2
        half_width = (scaled_high - scaled_low) / 2
        needed = load_needed(abs(scaled_limit - middle), half_width)
        return describe_needed_load(self._difference, needed, self._run_count)

    def _to_symmetric_scale(self, change: float) -> float:
        """Return a change on the scale on which intervals are symmetric: the log of a ratio.

        A limit may be a change of -100 % or less, whose logarithm does not exist.
        """
        if self._condition.kind == "change":
            return math.log1p(max(change, SMALLEST_SCALED_CHANGE))
        return change


def format_interval(difference: Difference, *, percent: bool = False) -> str:
    """Return the interval of a change, such as "+8.1 to +14.2 %", or "2.1x to 3.9x" for factors.

    Args:
        difference: The difference.
        percent: True to write factors in percent, too.
    """
    low = difference.low
    high = difference.high
    if low is None or high is None:
        return format.NONE
    is_bounded = high < LARGEST_PRINTED_CHANGE
    is_factor = difference.change is not None and difference.change >= 1
    if is_factor and not percent and not difference.absolute:
        lowest_factor = f"{format.quantity(1 + low)}x"
        return (
            f"{lowest_factor} to {format.quantity(1 + high)}x"
            if is_bounded
            else f">= {lowest_factor}"
        )
    unit = "points" if difference.absolute else "%"
    if not is_bounded:
        return f">= {low * 100:+.1f} {unit}"
    return f"{low * 100:+.1f} to {high * 100:+.1f} {unit}"
