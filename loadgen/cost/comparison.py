"""Compares the costs of priced results: which is cheaper, and what each cost depends on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from itertools import combinations
from typing import NamedTuple

from msgspec import Struct

from loadgen.core.results.manifest import ReasonCode
from loadgen.cost.break_even import BreakEven, find_break_evens
from loadgen.cost.commitments import CommitmentComparison, compare_commitments
from loadgen.cost.comparability import find_differences, find_remarks, is_per_token
from loadgen.cost.sensitivity import Sensitivity, compute_sensitivities
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Prices
from loadgen.pricing.reasons import make_note, render_notes
from loadgen.pricing.unit_cost import UnitCost
from loadgen.pricing.units import GOOD, REQUEST, TASK


class CostRatio(Struct, frozen=True, kw_only=True):
    """The cost of result `a` divided by that of result `b`.

    Attributes:
        a: Name of the first result.
        b: Name of the second result.
        difference_codes: The differences that forbid a comparison.
        note_codes: The differences to note beside the comparison.
        ratio: The ratio, or None if the results may not be compared.
        low: Lower end of its interval, or None if a cost has no interval.
        high: Upper end of its interval, or None if a cost has no interval.
        judgment: The comparison in a few words.
    """

    a: str
    b: str
    difference_codes: tuple[ReasonCode, ...]
    note_codes: tuple[ReasonCode, ...]
    ratio: Decimal | None
    low: Decimal | None
    high: Decimal | None
    judgment: str

    @property
    def differences(self) -> tuple[str, ...]:
        """The differences as sentences."""
        return render_notes(self.difference_codes)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes as sentences."""
        return render_notes(self.note_codes)


class CostComparison(Struct, frozen=True, kw_only=True):
    """Everything that `loadgen cost` reports.

    Attributes:
        prices: The prices.
        unit: The unit whose cost is compared.
        results: The priced results. The first one is the reference.
        differences_from_first: For each result, the differences that forbid comparing it with the
            first one.
        ratios: The ratio of costs of each pair of results.
        sensitivities: How each cost depends on its inputs.
        break_evens: The break-even of machines and prices per token.
        commitments: Prices with a commitment against prices without one.
    """

    prices: Prices
    unit: str
    results: tuple[PricedResult, ...]
    differences_from_first: tuple[tuple[ReasonCode, ...], ...]
    ratios: tuple[CostRatio, ...]
    sensitivities: tuple[Sensitivity, ...]
    break_evens: tuple[BreakEven, ...]
    commitments: tuple[CommitmentComparison, ...] = ()


def compare_costs(results: Sequence[PricedResult], prices: Prices) -> CostComparison:
    """Return the comparison of results that were priced by one price file.

    The first result is the reference: the others are marked if they are not comparable with it.
    """
    unit = _choose_compared_unit(results)
    first = results[0]

    sensitivities: list[Sensitivity] = []
    for result in results:
        sensitivities += compute_sensitivities(result, unit)

    return CostComparison(
        prices=prices,
        unit=unit,
        results=tuple(results),
        differences_from_first=tuple(
            () if result is first else find_differences(first, result) for result in results
        ),
        ratios=tuple(_compare_pair(a, b, unit) for a, b in combinations(results, 2)),
        sensitivities=tuple(sensitivities),
        break_evens=tuple(find_break_evens(results, unit)),
        commitments=tuple(compare_commitments(results)),
    )


def _choose_compared_unit(results: Sequence[PricedResult]) -> str:
    """Return the first of task, good request and request that has a cost in every result.

    It is a request if there is none, because reports then say for each result that it has no cost.
    """
    for unit in (TASK, GOOD):
        if all(result.costs[unit] is not None for result in results):
            return unit
    return REQUEST


def _compare_pair(a: PricedResult, b: PricedResult, unit: str) -> CostRatio:
    """Return the ratio of the costs of a unit in two results, or why they are not comparable.

    If there is a difference that forbids a comparison, there is no ratio at all, because readers
    would rely on any number that is shown.
    """
    differences = find_differences(a, b)
    cost_a = a.costs[unit]

    cost_b = b.costs[unit]
    if cost_a is None or cost_b is None:
        differences = (*differences, make_note("no_cost"))

    remarks = find_remarks(a, b)
    if differences or cost_a is None or cost_b is None:
        return CostRatio(
            a=a.name,
            b=b.name,
            difference_codes=differences,
            note_codes=remarks,
            ratio=None,
            low=None,
            high=None,
            judgment="not comparable",
        )

    ratio = _estimate_ratio(cost_a, cost_b, is_same_measurement=a.evidence is b.evidence)
    return CostRatio(
        a=a.name,
        b=b.name,
        difference_codes=(),
        note_codes=remarks,
        ratio=ratio.mid,
        low=ratio.low,
        high=ratio.high,
        judgment=_judge_ratio(ratio, a, b),
    )


def _judge_ratio(ratio: Estimate[Decimal], a: PricedResult, b: PricedResult) -> str:
    """Return in a few words which of two results is cheaper, by the ratio of cost a to cost b.

    Without an interval, there is no judgment. An interval that contains 1 shows no significant
    difference, and an interval that is just the number 1 shows equal costs.
    """
    if ratio.low is None or ratio.high is None:
        return "not judged, because a single run has no interval"
    if ratio.low <= 1 <= ratio.high:
        return "equal" if ratio.low == ratio.high else "no significant difference"

    cheaper = a if ratio.mid < 1 else b
    scope = ""
    if is_per_token(a) and is_per_token(b):
        scope = " (for the measured numbers of tokens)"

    return f"{cheaper.name} is cheaper{scope}"


def _estimate_ratio(a: UnitCost, b: UnitCost, *, is_same_measurement: bool) -> Estimate[Decimal]:
    """Return the ratio of two costs with its confidence interval, if one is known.

    Args:
        a: The cost of a unit in one result.
        b: The cost of the same unit in the other result.
        is_same_measurement: True if both results price the same runs under different prices.

    The interval depends on how the errors of the two costs are related:

    - Two prices of one measurement depend on the same measured rate. Both costs are at the ends of
      their intervals at the same time, so the ratio is computed at each end.
    - If such costs consist of a single part, like the machines, both are inversely proportional to
      the rate. It cancels out, and the ratio is exact even if the rate has no interval.
    - Costs of different measurements are independent.
    """
    ratio = a.total / b.total
    if a.low is None or a.high is None or b.low is None or b.high is None:
        has_same_single_part = len(a.parts) == 1 and list(a.parts) == list(b.parts)
        if is_same_measurement and has_same_single_part:
            return Estimate(mid=ratio, low=ratio, high=ratio)
        return Estimate(mid=ratio)

    if is_same_measurement:
        ratio_at_low_end = a.low / b.low
        ratio_at_high_end = a.high / b.high
        ratios = (ratio_at_low_end, ratio, ratio_at_high_end)
        return Estimate(mid=ratio, low=min(ratios), high=max(ratios))

    log_ratio = _compute_mover_interval(_take_logarithms(a), _take_logarithms(b))
    return Estimate(mid=ratio, low=log_ratio.low.exp(), high=log_ratio.high.exp())


class _LogInterval(NamedTuple):
    """The natural logarithms of a value and of the ends of its confidence interval."""

    value: Decimal
    low: Decimal
    high: Decimal


def _take_logarithms(cost: UnitCost) -> _LogInterval:
    """Return the logarithms of a cost that has a confidence interval."""
    assert cost.low is not None and cost.high is not None
    return _LogInterval(cost.total.ln(), cost.low.ln(), cost.high.ln())


def _compute_mover_interval(a: _LogInterval, b: _LogInterval) -> _LogInterval:
    """Return the difference of two independent estimates with its confidence interval.

    This is MOVER, the method of variance estimates recovery (Zou and Donner, Statistics in Medicine
    27, 2008): the distances from the estimates to the ends of their intervals add in squares. The
    lower end of the difference depends on the lower end of `a` and the upper end of `b`. On
    logarithms, the difference is that of a ratio.
    """
    difference = a.value - b.value
    distance_below = ((a.value - a.low) ** 2 + (b.high - b.value) ** 2).sqrt()
    distance_above = ((a.high - a.value) ** 2 + (b.value - b.low) ** 2).sqrt()
    return _LogInterval(difference, difference - distance_below, difference + distance_above)
