"""Computes the measured quantities behind a cost: rates, counts, tokens and bytes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

import msgspec
from msgspec.structs import replace

from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.task_summary import Sessions
from loadgen.pricing.estimate import Estimate, estimate_rate
from loadgen.pricing.evidence import Evidence, count_interactions, without_separate_endpoints
from loadgen.pricing.prompt_lengths import TokenAmounts
from loadgen.pricing.units import GOOD, MILLION, OUTPUT, REQUEST, TASK, TOTAL, UNITS, to_decimal
from loadgen.repeated.capacity import CONFIDENCE


class CostBasis(msgspec.Struct, frozen=True, kw_only=True):
    """The measured quantities behind a cost.

    Token and byte amounts include failed requests where these are known, because they are paid too.

    Attributes:
        label: How the rates were obtained, such as "capacity" or "at this load, 3 repeats".
        is_capacity: True if the rates are those of a capacity, not of the load of a run.
        rates: Units per second, by unit. None if the rate was not measured.
        counts: Units in all measured runs, by unit. None if they were not counted.
        input_tokens: Prompt tokens that did not come from a cache.
        cached_tokens: Prompt tokens that came from a cache.
        cached_known: False if the server does not report cached tokens.
        written_tokens: Those of the input tokens that were written to a cache, or None if the
            server does not report them.
        output_tokens: Output tokens.
        bytes_out: Bytes received from the server.
        long_prompts: The tokens of requests with prompts above the length at which the price
            changes, or None if the price has no such length.
        low: Lower end of the interval of the rate, relative to the rate (for example 0.9).
        high: Upper end of the interval of the rate, relative to the rate (for example 1.1).
        confidence: Confidence of the interval. None, like both ends, if the rate has no interval.
    """

    label: str
    is_capacity: bool
    rates: Mapping[str, Decimal | None]
    counts: Mapping[str, Decimal | None]
    input_tokens: Decimal
    cached_tokens: Decimal
    cached_known: bool
    written_tokens: Decimal | None
    output_tokens: Decimal
    bytes_out: Decimal
    long_prompts: TokenAmounts | None = None
    low: Decimal | None = None
    high: Decimal | None = None
    confidence: float | None = None


def compute_cost_basis(evidence: Evidence) -> CostBasis:
    """Return the rates and counts of a capacity, of one run, or of repeats of one run.

    The rates of runs are their steady rates as defined in metrics.md, and for Offline runs those of
    the measurement window. Rates of repeats are means, counts are sums. The rates of a capacity are
    its request rate times the share of good requests and of tasks in its run, and the steady token
    rates that its run showed.
    """
    totals = sum_counts(evidence.summaries)
    if evidence.capacity is not None:
        return _basis_at_capacity(evidence, totals)
    return _basis_at_measured_load(evidence, totals)


def tasks_of(summary: Summary) -> Sessions | None:
    """Return the tasks of a run, or None if there are none or also classes of single requests.

    Beside classes of single requests, a cost per task would include what those requests cost.
    """
    if any(part.sessions is None for part in summary.classes):
        return None
    return summary.sessions


def sum_counts(summaries: Sequence[Summary]) -> CostBasis:
    """Return the counts and amounts summed over all runs, without rates.

    The tokens of failed requests are paid, so they are among the token amounts. They are not among
    the counts, because a cost is per unit that succeeded. Steps served by separate endpoints are
    left out, because those endpoints have other prices.
    """
    summaries = [without_separate_endpoints(summary) for summary in summaries]
    tokens = [summary.tokens for summary in summaries]
    input_tokens = _sum_known(count.input for count in tokens)
    output_tokens = _sum_known(count.output for count in tokens)
    # `evidence_reader.read_evidence` refuses runs without token counts.
    assert input_tokens is not None and output_tokens is not None
    cached_tokens = _sum_known(count.cached for count in tokens)
    failed_input_tokens = sum(count.failed_input for count in tokens)
    failed_output_tokens = sum(count.failed_output for count in tokens)
    is_valid = all(summary.verdict.valid for summary in summaries)
    tasks = [tasks_of(summary) for summary in summaries]
    return CostBasis(
        label="",
        is_capacity=False,
        rates={},
        counts={
            REQUEST: Decimal(sum(summary.requests.ok for summary in summaries)),
            GOOD: _sum_known(summary.goodput.good for summary in summaries) if is_valid else None,
            TASK: _sum_known(None if task is None else task.ok for task in tasks),
            OUTPUT: output_tokens / MILLION,
            TOTAL: (input_tokens + output_tokens) / MILLION,
        },
        input_tokens=input_tokens + failed_input_tokens - (cached_tokens or 0),
        cached_tokens=cached_tokens or Decimal(0),
        cached_known=cached_tokens is not None,
        written_tokens=_sum_known(count.cache_written for count in tokens),
        output_tokens=output_tokens + failed_output_tokens,
        bytes_out=Decimal(sum(summary.bytes.received for summary in summaries)),
    )


def _sum_known(counts: Iterable[int | None]) -> Decimal | None:
    """Return the sum of the counts, or None if one of them is not known."""
    total = Decimal(0)
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _basis_at_measured_load(evidence: Evidence, totals: CostBasis) -> CostBasis:
    """Return the totals with the rates of a run, or with the mean rates of repeats of a run.

    Only repeats give an interval. It is stored relative to the rate, such as 0.96 to 1.04, because
    one interval stands for the rates of all units.
    """
    rates_of_runs = [_measured_rates(summary, evidence.at_once) for summary in evidence.summaries]
    rates_by_unit = {unit: _known_rates(rates_of_runs, unit) for unit in UNITS}
    mean_rates = {
        unit: None if rates is None else to_decimal(math.fsum(rates) / len(rates))
        for unit, rates in rates_by_unit.items()
    }
    label = "Offline" if evidence.at_once else "at this load"
    if len(rates_of_runs) == 1:
        return replace(totals, label=label, rates=mean_rates)
    basis = replace(totals, label=f"{label}, {len(rates_of_runs)} repeats", rates=mean_rates)
    interval = _interval_of_repeats(rates_by_unit)
    if interval is None or interval.low is None or interval.high is None:
        return basis
    return replace(
        basis,
        low=to_decimal(interval.low / interval.mid) if interval.low else None,
        high=to_decimal(interval.high / interval.mid) if interval.high else None,
        confidence=CONFIDENCE,
    )


def _known_rates(
    rates_of_runs: Sequence[Mapping[str, float | None]], unit: str
) -> list[float] | None:
    """Return the rate of a unit in each run, or None if one run has none.

    A mean over some of the runs would not belong to the counts, which are sums over all of them.
    """
    known_rates: list[float] = []
    for rates in rates_of_runs:
        rate = rates[unit]
        if rate is None:
            return None
        known_rates.append(rate)
    return known_rates


def _interval_of_repeats(
    rates_by_unit: Mapping[str, Sequence[float] | None],
) -> Estimate[float] | None:
    """Return the interval that stands for the rates of all units, or None without a known rate.

    It is the interval of the rate of good requests, or of all requests if none was good.
    """
    for unit in (GOOD, REQUEST):
        rates = rates_by_unit[unit]
        if rates is not None and any(rates):
            return estimate_rate(rates)
    return None


def _measured_rates(summary: Summary, is_offline: bool) -> dict[str, float | None]:
    """Return the units per second of a run, by unit. None if a rate was not measured.

    The rates are those of the steady state. An Offline run has none, because all its requests are
    due at once. Its rates are those from the first request to the last output, as MLPerf's LoadGen
    computes them. An invalid run has no good requests.
    """
    rates = _offline_rates(summary) if is_offline else _steady_rates(summary)
    if not summary.verdict.valid:
        rates[GOOD] = None
    return rates


def _offline_rates(summary: Summary) -> dict[str, float | None]:
    """Return the rates of a run from its first request to its last output, by unit."""
    tasks = tasks_of(summary)
    tokens = without_separate_endpoints(summary).tokens
    return {
        REQUEST: summary.load.completed_rps,
        GOOD: summary.goodput.rps,
        TASK: None if tasks is None else tasks.ok_per_s,
        OUTPUT: _to_millions(tokens.output_per_s),
        TOTAL: _to_millions(tokens.total_per_s),
    }


def _steady_rates(summary: Summary) -> dict[str, float | None]:
    """Return the rates of a run in its steady-state window, by unit."""
    tasks = tasks_of(summary)
    tokens = without_separate_endpoints(summary).tokens
    return {
        REQUEST: summary.load.steady_completed_rps,
        GOOD: summary.goodput.steady_rps,
        TASK: None if tasks is None else tasks.steady_ok_per_s,
        OUTPUT: _to_millions(tokens.steady_output_per_s),
        TOTAL: _to_millions(tokens.steady_total_per_s),
    }


def _to_millions(tokens_per_s: float | None) -> float | None:
    return None if tokens_per_s is None else tokens_per_s / 1e6


def _basis_at_capacity(evidence: Evidence, totals: CostBasis) -> CostBasis:
    """Return the totals with the rates of a capacity.

    The capacity is a rate of requests or of interactions. The other rates are in proportion to the
    counts of its run: with 95 good requests among 100 decided ones, the rate of good requests is
    0.95 times the capacity. Token rates are those that the search itself has measured, if any.
    """
    capacity = evidence.capacity
    summary = evidence.summary
    assert capacity is not None
    if capacity.unit == "requests":
        arrivals = summary.requests.decided
    else:
        arrivals = count_interactions(summary)
    arrivals_per_s = to_decimal(capacity.rate_per_s)
    rates = {
        unit: None if count is None else count * arrivals_per_s / arrivals
        for unit, count in totals.counts.items()
    }
    if capacity.output_tokens_per_s is not None:
        rates[OUTPUT] = to_decimal(capacity.output_tokens_per_s / 1e6)
    if capacity.total_tokens_per_s is not None:
        rates[TOTAL] = to_decimal(capacity.total_tokens_per_s / 1e6)
    low_per_s = capacity.low_per_s
    high_per_s = capacity.high_per_s
    return replace(
        totals,
        label="capacity",
        is_capacity=True,
        rates=rates,
        low=None if low_per_s is None else to_decimal(low_per_s) / arrivals_per_s,
        high=None if high_per_s is None else to_decimal(high_per_s) / arrivals_per_s,
        confidence=None if low_per_s is None else capacity.confidence,
    )
