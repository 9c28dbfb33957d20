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
from loadgen.compare.parts import PART_KINDS
from loadgen.compare.significance import load_needed
from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, closest, collecting
from loadgen.repeated.comparable_metrics import SHARE_PATHS, Metric, find_metric, metric_paths

_CONDITION = re.compile(
    r"\s*(?P<metric>[\w.-]+)\s*(?P<test>>=|<=|>|<)\s*"
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
_REASONS_TO_LEAVE_UNDECIDED = {
    NOT_SAME_WORK: f"{NOT_SAME_WORK}; use --anyway to judge the change anyway",
    SAME_RUN: SAME_RUN,
}
"""Reasons of a difference for which a limit of its change is not checked, and their texts."""

CHANGE_DIGITS = 9
"""Digits to which a change is rounded, because 105 against 100 is 5 % and not a little more."""

SMALLEST_SCALED_CHANGE = -0.999
"""A limit below this is taken as this, because a ratio of zero has no logarithm."""

LARGEST_PRINTED_CHANGE = 99
"""The largest upper end of an interval that is printed. A larger one counts as unbounded."""

SINGLE_RUN = (
    "not decided: one run per side, run-to-run variation unknown. Measure each side with "
    "`loadgen run --repeat 3`"
)


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
            conditions.append(_parse_condition(text))

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
    difference_by_key = {
        (difference.metric, difference.side): difference for difference in comparison.differences
    }
    for condition in conditions:
        for side_name in comparison.sides[1:]:
            difference = difference_by_key.get((condition.metric, side_name))
            if difference is None or difference.after is None:
                yield _describe_missing_metric(condition, side_name, comparison)
                continue
            yield check_threshold(
                condition, difference, run_count=run_count, beyond_noise=beyond_noise
            )


def _describe_missing_metric(
    condition: Condition, side_name: str, comparison: Comparison
) -> ThresholdOutcome:
    """Return the undecided outcome of a condition on a metric that not both sides have.

    The text names the paths of request classes and steps that have the metric, if there are any.
    """
    paths_of_parts = [
        difference.metric
        for difference in comparison.differences
        if difference.side == side_name and difference.metric.endswith(f".{condition.metric}")
    ]
    text = f"{condition.metric} is not known for both sides"
    if paths_of_parts:
        text += f"; known: {', '.join(paths_of_parts)}"

    return ThresholdOutcome(
        condition=condition.text,
        side=side_name,
        failed=None,
        text=text,
    )


def check_threshold(
    condition: Condition, difference: Difference, *, run_count: int, beyond_noise: bool = False
) -> ThresholdOutcome:
    """Return the outcome of one condition for one difference. See `check_thresholds`."""
    check = _ThresholdCheck(condition, difference, run_count)
    return check.check(beyond_noise=beyond_noise)


def _parse_condition(text: str) -> Condition:
    """Return the condition in a text such as "ttft_ms.p99 > +5%".

    Raises UserError for a text of another form, an unknown metric, or a unit that does not fit the
    metric.
    """
    match = _CONDITION.fullmatch(text)
    location = f"--fail-on '{text}'"
    if match is None:
        raise UserError(
            "invalid_value",
            "must compare a metric with a limit",
            location,
            "write METRIC > +5% for a change, or METRIC > 500ms for a value",
        )

    path = _split_path(match["metric"])
    metric = _find_metric(path.metric_name, location)
    _check_unit(match, metric, location)

    limit = float(match["digits"]) * _UNIT_FACTORS[match["unit"]]
    if match["sign"] == "-":
        limit = -limit

    return Condition(
        text=text,
        metric=f"{path.part_prefix}{metric.path}",
        test=match["test"],
        limit=limit,
        kind=_classify_limit(match, metric),
    )


class _ConditionPath(NamedTuple):
    """The path of a condition, such as "classes.chat.ttft_ms.p99", in two parts.

    Attributes:
        part_prefix: The request class or step with a dot, such as "classes.chat.". "" for the run.
        metric_name: The metric, such as "ttft_ms.p99".
    """

    part_prefix: str
    metric_name: str


def _split_path(name: str) -> _ConditionPath:
    """Return the path that a condition names, split before its metric.

    The name of a class or step may contain dots, so the metric is the longest end that is known.
    """
    keys = name.split(".")
    if keys[0] in PART_KINDS:
        for index in range(2, len(keys)):
            metric_name = ".".join(keys[index:])
            if _find_known_metric(metric_name) is not None:
                return _ConditionPath(".".join(keys[:index]) + ".", metric_name)
    return _ConditionPath("", name)


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


def _classify_limit(
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
    """Return the metric that a condition names, as `_find_known_metric` does.

    Args:
        name: The metric as it was written.
        location: The option with its value, for the error message.

    Raises:
        UserError: The metric is unknown. The hint has a similar name.
    """
    metric = _find_known_metric(name)
    if metric is not None:
        return metric

    object_name = name.partition(".")[0]
    paths_of_object = [path for path in metric_paths() if path.startswith(f"{object_name}.")]
    similar = closest(name, paths_of_object or metric_paths(), cutoff=0.5)
    hint = "use a name of summary.json, like ttft_ms.p99 or goodput.share"
    if similar:
        hint = f"did you mean {similar}?"

    raise UserError("unknown_name", f'unknown metric "{name}"', location, hint)


def _find_known_metric(name: str) -> Metric | None:
    """Return the metric that a condition names, or None if it is unknown.

    The path of a latency, such as ttft_ms.p99, may be written without its unit (ttft.p99), with an
    underscore in place of the dot (ttft_ms_p99), or both (ttft_p99).
    """
    path_with_unit = name.replace(".", "_ms.", 1)
    path_with_unit_and_dot = re.sub(r"(?:_ms)?_(p\d[\d_]*|mean|max|min)$", r"_ms.\1", name)
    for path in (name, path_with_unit, path_with_unit_and_dot):
        metric = find_metric(path)
        if metric is not None:
            return metric
    return None


class _MeasuredChange(NamedTuple):
    """A measured change and its confidence interval, in the unit of a condition's limit.

    Attributes:
        text: The metric with both values, such as "TTFT p99: 105 to 110 ms (+4.8 %)".
        amount: The change.
        low: The lower end of its interval. None if there is no interval.
        high: The upper end.
    """

    text: str
    amount: float
    low: float | None
    high: float | None


class _ThresholdCheck:
    """Checks one condition for one difference."""

    def __init__(self, condition: Condition, difference: Difference, run_count: int) -> None:
        """Create a check. `run_count` is the number of runs on a side."""
        self._condition = condition
        self._difference = difference
        self._run_count = run_count

    def check(self, *, beyond_noise: bool) -> ThresholdOutcome:
        """Return the outcome of the condition. A condition that holds fails the comparison.

        A limit for a value is compared with the value of the other side. A limit for a change is
        undecided if a value is missing, if the sides did different work, or if there are no
        repeats. Otherwise the measured change decides or, with `beyond_noise`, its whole interval.
        """
        difference = self._difference
        is_limit_for_value = self._condition.kind == "value"

        # The value of the first side is only needed to compute a change.
        lacks_first_value = difference.before is None and not is_limit_for_value
        if difference.after is None or lacks_first_value:
            return self._leave_undecided(f"{difference.name} is not known for both sides")
        if is_limit_for_value:
            return self._check_value(difference.after)

        if difference.reason in _REASONS_TO_LEAVE_UNDECIDED:
            reason = _REASONS_TO_LEAVE_UNDECIDED[difference.reason]
            return self._leave_undecided(f"{difference.name}: {reason}")

        change = self._measure_change()
        if change is None:
            return self._leave_undecided(f"{self._describe_values()}: no relative change from 0")
        if not difference.is_repeated:
            return self._leave_undecided(f"{change.text}; {SINGLE_RUN}")

        return self._check_interval(change) if beyond_noise else self._check_change(change)

    def _check_value(self, value: float) -> ThresholdOutcome:
        """Compare the value of the other side with the limit."""
        difference = self._difference
        text = f"{format.quantity(value)} {difference.unit}".rstrip()
        return self._create_outcome(
            self._condition.is_met_by(value), f"{difference.name} is {text}"
        )

    def _check_change(self, change: _MeasuredChange) -> ThresholdOutcome:
        """Compare the measured change with the limit, whatever its interval is.

        The text of a condition that holds says so if the change may be due to chance.
        """
        difference = self._difference
        is_met = self._condition.is_met_by(change.amount)
        text = change.text
        has_interval = difference.low is not None

        is_significant = difference.outcome == "different"
        if is_met and has_interval and not is_significant:
            text += f", may be noise: CI {format_interval(difference, percent=True)}"

        return self._create_outcome(is_met, text)

    def _create_outcome(self, failed: bool | None, text: str) -> ThresholdOutcome:
        """Return an outcome of the condition for the side, with its text.

        `failed` is True if the condition holds, because a condition that holds fails the command.
        It is None if the condition is undecided.
        """
        return ThresholdOutcome(
            condition=self._condition.text, side=self._difference.side, failed=failed, text=text
        )

    def _leave_undecided(self, reason: str) -> ThresholdOutcome:
        """Return the outcome of a condition that neither holds nor fails, for a reason."""
        return self._create_outcome(None, reason)

    def _describe_values(self) -> str:
        """Return the metric with both values, such as "TTFT p99: 105 to 110 ms"."""
        difference = self._difference
        before = format.quantity(difference.before)
        after = format.quantity(difference.after)
        return f"{difference.name}: {before} to {after} {difference.unit}".rstrip()

    def _measure_change(self) -> _MeasuredChange | None:
        """Return the change with its interval, in the unit of the limit.

        A limit in percent is for the relative change. Any other limit is for the difference of the
        two values. Returns None for a relative change from zero, which does not exist.
        """
        difference = self._difference
        values = self._describe_values()
        if self._condition.kind == "change":
            if difference.change is None:
                return None
            return _MeasuredChange(
                text=f"{values} ({difference.change * 100:+z.1f} %)",
                amount=round(difference.change, CHANGE_DIGITS),
                low=difference.low,
                high=difference.high,
            )

        assert difference.before is not None and difference.after is not None

        # The interval of a fraction is a difference already. Any other interval is relative.
        interval_scale = 1.0 if difference.is_fraction else difference.before
        return _MeasuredChange(
            text=values,
            amount=difference.after - difference.before,
            low=None if difference.low is None else difference.low * interval_scale,
            high=None if difference.high is None else difference.high * interval_scale,
        )

    def _check_interval(self, change: _MeasuredChange) -> ThresholdOutcome:
        """Check that the whole interval of a change is beyond the limit, or none of it.

        The condition is undecided if the limit lies inside the interval. The text then says how
        many runs would decide it.
        """
        if change.low is None or change.high is None:
            text = f"{change.text}; no interval: {self._difference.reason}"
            return self._leave_undecided(text)

        interval = format_interval(self._difference, percent=True)
        text = f"{change.text}, CI {interval}"
        is_low_end_beyond = self._condition.is_met_by(change.low)
        is_high_end_beyond = self._condition.is_met_by(change.high)
        if is_low_end_beyond == is_high_end_beyond:
            return self._create_outcome(is_low_end_beyond, text)

        text += " contains the limit"
        needed_load = self._describe_load_to_decide(change.low, change.high)
        if needed_load:
            text += f"; {needed_load}"

        return self._leave_undecided(text)

    def _describe_load_to_decide(self, low: float, high: float) -> str:
        """Return how many runs would decide a condition, or "" if it is not known.

        The limit lies in the interval from `low` to `high`. It would lie outside if the middle of
        the interval stayed where it is, and the half width became as small as the distance from the
        middle to the limit. This is computed on the scale on which the interval is symmetric.
        """
        scaled_limit = self._to_symmetric_scale(self._condition.limit)
        scaled_low = self._to_symmetric_scale(low)
        scaled_high = self._to_symmetric_scale(high)
        middle = (scaled_low + scaled_high) / 2
        half_width = (scaled_high - scaled_low) / 2
        distance_to_limit = abs(scaled_limit - middle)
        load_factor = load_needed(distance_to_limit, half_width)

        return describe_needed_load(self._difference, load_factor, self._run_count)

    def _to_symmetric_scale(self, change: float) -> float:
        """Return a change on the scale on which intervals are symmetric: the log of a ratio.

        A limit may be a change of -100 % or less, whose logarithm does not exist.
        """
        if self._condition.kind == "change":
            return math.log1p(max(change, SMALLEST_SCALED_CHANGE))
        return change


def format_interval(difference: Difference, *, percent: bool = False) -> str:
    """Return the interval of a change, such as "+8.1 to +14.2 %", or a dash if there is none.

    The interval of a metric that has at least doubled is written as factors, such as "2.1x to
    3.9x", and an interval without a useful upper end as ">= 2.1x" or ">= +8.1 %".

    Args:
        difference: The difference.
        percent: True to write percentages instead of factors, for a limit in percent.
    """
    low = difference.low
    high = difference.high
    if low is None or high is None:
        return format.NONE

    has_doubled = difference.change is not None and difference.change >= 1
    is_written_as_factors = has_doubled and not percent and not difference.is_fraction
    if is_written_as_factors:
        low_text = f"{format.quantity(1 + low)}x"
        high_text = f"{format.quantity(1 + high)}x"
        unit = ""
    else:
        low_text = f"{low * 100:+z.1f}"
        high_text = f"{high * 100:+z.1f}"
        unit = " points" if difference.is_fraction else " %"

    if high >= LARGEST_PRINTED_CHANGE:
        return f">= {low_text}{unit}"

    return f"{low_text} to {high_text}{unit}"
