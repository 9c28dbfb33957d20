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
from loadgen.pricing.evidence import Evidence, count_interactions, exclude_separate_endpoints
from loadgen.pricing.prompt_lengths import TokenAmounts
from loadgen.pricing.units import GOOD, MILLION, OUTPUT, REQUEST, TASK, TOTAL, UNITS, to_decimal
from loadgen.repeated.capacity import CONFIDENCE, Capacity


class CostBasis(msgspec.Struct, frozen=True, kw_only=True):
    """The measured quantities behind a cost.

    Token and byte amounts include failed requests where these are known, because they are paid too.

    Attributes:
        label: How the rates were obtained, such as "capacity" or "at this load, 3 repeats".
        is_capacity: True if the rates are those of a capacity, not of the load of a run.
        rates: Units per second, by unit. None if the rate was not measured.
        counts: Units in all measured runs, by unit. None if they were not counted.
        uncached_input_tokens: Prompt tokens that did not come from a cache.
        cached_tokens: Prompt tokens that came from a cache.
        is_cached_known: False if the server does not report cached tokens.
        cache_written_tokens: Those of the uncached prompt tokens that were written to a cache, or
            None if the server does not report them.
        output_tokens: Output tokens.
        bytes_out: Bytes received from the server.
        long_prompt_tokens: The tokens of requests with prompts above the length at which the price
            changes, or None if the price has no such length.
        relative_low: Lower end of the confidence interval of the rate, divided by the rate, such as
            0.9. One interval stands for the rates of all units.
        relative_high: Upper end of the interval, divided by the rate, such as 1.1.
        confidence: Confidence of the interval. None, like both ends, if the rate has no interval.
    """

    label: str
    is_capacity: bool
    rates: Mapping[str, Decimal | None]
    counts: Mapping[str, Decimal | None]
    uncached_input_tokens: Decimal
    cached_tokens: Decimal
    is_cached_known: bool
    cache_written_tokens: Decimal | None
    output_tokens: Decimal
    bytes_out: Decimal
    long_prompt_tokens: TokenAmounts | None = None
    relative_low: Decimal | None = None
    relative_high: Decimal | None = None
    confidence: float | None = None


def compute_cost_basis(evidence: Evidence) -> CostBasis:
    """Return the measured quantities from which the cost of each unit is computed.

    Counts are summed over all runs, and rates are averaged over them. The rates are those of the
    capacity if a search found one. Otherwise they are the steady-state rates of the runs, or for
    Offline runs the rates of the measurement window.
    """
    count_basis = sum_counts(evidence.summaries)
    if evidence.capacity is not None:
        return _compute_basis_at_capacity(evidence.capacity, evidence.summary, count_basis)
    return _compute_basis_at_measured_load(evidence, count_basis)


def find_task_sessions(summary: Summary) -> Sessions | None:
    """Return the statistics of a run's tasks if all its requests belong to tasks, otherwise None.

    A task is a session of several requests. If the run also has classes of single requests, a cost
    per task would include what those requests cost, so there is no such cost.
    """
    if any(request_class.sessions is None for request_class in summary.classes):
        return None
    return summary.sessions


def sum_counts(summaries: Sequence[Summary]) -> CostBasis:
    """Return a basis with the counts and paid amounts of all runs. Its rates and label stay empty.

    There are two kinds of sums. `counts` are the units that succeeded, by which a cost is divided.
    Tokens and bytes are what is paid, so they include failed requests. Both leave out the steps of
    tasks that separate endpoints serve, because those endpoints have other prices.
    """
    summaries = [exclude_separate_endpoints(summary) for summary in summaries]
    token_summaries = [summary.tokens for summary in summaries]
    input_tokens = _sum_known(tokens.input for tokens in token_summaries)
    output_tokens = _sum_known(tokens.output for tokens in token_summaries)

    # `evidence_reader.read_evidence` refuses runs without token counts.
    assert input_tokens is not None and output_tokens is not None
    cached_tokens = _sum_known(tokens.cached for tokens in token_summaries)
    failed_input_tokens = sum(tokens.failed_input for tokens in token_summaries)
    failed_output_tokens = sum(tokens.failed_output for tokens in token_summaries)

    # An INVALID run has no good requests.
    good_requests = None
    if all(summary.verdict.valid for summary in summaries):
        good_requests = _sum_known(summary.goodput.good for summary in summaries)

    tasks_of_runs = [find_task_sessions(summary) for summary in summaries]
    successful_tasks = _sum_known(None if tasks is None else tasks.ok for tasks in tasks_of_runs)
    return CostBasis(
        label="",
        is_capacity=False,
        rates={},
        counts={
            REQUEST: Decimal(sum(summary.requests.ok for summary in summaries)),
            GOOD: good_requests,
            TASK: successful_tasks,
            OUTPUT: output_tokens / MILLION,
            TOTAL: (input_tokens + output_tokens) / MILLION,
        },
        uncached_input_tokens=input_tokens + failed_input_tokens - (cached_tokens or 0),
        cached_tokens=cached_tokens or Decimal(0),
        is_cached_known=cached_tokens is not None,
        cache_written_tokens=_sum_known(tokens.cache_written for tokens in token_summaries),
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


def _compute_basis_at_measured_load(evidence: Evidence, count_basis: CostBasis) -> CostBasis:
    """Return the measured quantities with the mean rates of runs at a load that the user chose.

    Only repeats of a run give a confidence interval. It is stored relative to the rate, such as
    0.96 to 1.04, because one interval stands for the rates of all units.

    Args:
        evidence: The measurements of one run, or of repeats of a run.
        count_basis: The counts and the paid amounts of all runs, still without rates.
    """
    rates_of_runs = [_get_rates(summary, evidence.is_offline) for summary in evidence.summaries]
    rates_by_unit = {unit: _collect_rates(rates_of_runs, unit) for unit in UNITS}

    mean_rates: dict[str, Decimal | None] = {}
    for unit, rates in rates_by_unit.items():
        mean_rates[unit] = None if rates is None else to_decimal(math.fsum(rates) / len(rates))

    label = "Offline" if evidence.is_offline else "at this load"
    if len(rates_of_runs) > 1:
        label += f", {len(rates_of_runs)} repeats"

    basis = replace(count_basis, label=label, rates=mean_rates)

    interval = _estimate_common_interval(rates_by_unit)
    if interval is None or interval.low is None or interval.high is None:
        return basis  # A single run has no interval.

    return replace(
        basis,
        relative_low=to_decimal(interval.low / interval.mid) if interval.low else None,
        relative_high=to_decimal(interval.high / interval.mid) if interval.high else None,
        confidence=CONFIDENCE,
    )


def _collect_rates(
    rates_of_runs: Sequence[Mapping[str, float | None]], unit: str
) -> list[float] | None:
    """Return the rate of a unit in each run, or None if one of the runs has no such rate.

    A mean over some of the runs would not match the counts, which are sums over all of them.
    """
    collected_rates: list[float] = []
    for rates in rates_of_runs:
        rate = rates[unit]
        if rate is None:
            return None
        collected_rates.append(rate)
    return collected_rates


def _estimate_common_interval(
    rates_by_unit: Mapping[str, Sequence[float] | None],
) -> Estimate[float] | None:
    """Return the confidence interval that stands for the rates of all units.

    It is the interval of the rate of good requests over the runs, or of all requests if none was
    good. Returns None if neither rate is known.
    """
    for unit in (GOOD, REQUEST):
        rates = rates_by_unit[unit]
        if rates is not None and any(rates):
            return estimate_rate(rates)
    return None


def _get_rates(summary: Summary, is_offline: bool) -> dict[str, float | None]:
    """Return the rates of a run in units per second, by unit. None if a rate was not measured.

    They are the rates of the steady state. An Offline run has none, because all its requests are
    due at once, so its rates are those of the measurement window, as in MLPerf.
    """
    rates = _get_offline_rates(summary) if is_offline else _get_steady_rates(summary)
    # An INVALID run has no good requests.
    if not summary.verdict.valid:
        rates[GOOD] = None
    return rates


def _get_offline_rates(summary: Summary) -> dict[str, float | None]:
    """Return the rates of a run in its measurement window, by unit. Token rates are in millions.

    The window reaches from the first request to the last output, as in MLPerf's LoadGen.
    """
    tasks = find_task_sessions(summary)
    tokens = exclude_separate_endpoints(summary).tokens
    return {
        REQUEST: summary.load.completed_rps,
        GOOD: summary.goodput.rps,
        TASK: None if tasks is None else tasks.ok_per_s,
        OUTPUT: _to_millions(tokens.output_per_s),
        TOTAL: _to_millions(tokens.total_per_s),
    }


def _get_steady_rates(summary: Summary) -> dict[str, float | None]:
    """Return the rates of a run in its steady-state window, by unit. Token rates are in millions.

    The window leaves out the time in which the load begins and ends.
    """
    tasks = find_task_sessions(summary)
    tokens = exclude_separate_endpoints(summary).tokens
    return {
        REQUEST: summary.load.steady_completed_rps,
        GOOD: summary.goodput.steady_rps,
        TASK: None if tasks is None else tasks.steady_ok_per_s,
        OUTPUT: _to_millions(tokens.steady_output_per_s),
        TOTAL: _to_millions(tokens.steady_total_per_s),
    }


def _to_millions(tokens_per_s: float | None) -> float | None:
    """Return a token rate in millions of tokens per second, the unit in which tokens are priced."""
    return None if tokens_per_s is None else tokens_per_s / 1e6


def _compute_basis_at_capacity(
    capacity: Capacity, summary: Summary, count_basis: CostBasis
) -> CostBasis:
    """Return the measured quantities with the rates of the capacity that a search found.

    The capacity is the rate at which requests or interactions may arrive. The rates of all units
    follow from it and from the counts of the run that confirms it: if 95 of its 100 arrivals were
    good requests, the rate of good requests is 0.95 times the capacity.

    Args:
        capacity: The result of the search.
        summary: The run that confirms the capacity.
        count_basis: The counts and the paid amounts of that run, still without rates.
    """
    if capacity.unit == "requests":
        # Requests whose outcome is known: all but those that the end of the run cancelled.
        arrivals = summary.requests.decided
    else:
        arrivals = count_interactions(summary)

    arrivals_per_s = to_decimal(capacity.rate_per_s)
    rates: dict[str, Decimal | None] = {}
    for unit, count in count_basis.counts.items():
        units_per_s = None if count is None else count * arrivals_per_s / arrivals
        rates[unit] = units_per_s

    # Token rates that the search itself measured are preferred, because they leave out the time in
    # which the load begins. The units OUTPUT and TOTAL are a million tokens each.
    measured_output_rate = _to_millions(capacity.output_tokens_per_s)
    if measured_output_rate is not None:
        rates[OUTPUT] = to_decimal(measured_output_rate)

    measured_total_rate = _to_millions(capacity.total_tokens_per_s)
    if measured_total_rate is not None:
        rates[TOTAL] = to_decimal(measured_total_rate)

    basis = replace(count_basis, label="capacity", is_capacity=True, rates=rates)
    if capacity.low_per_s is None or capacity.high_per_s is None:
        return basis

    # The interval is stored relative to the rate, because it stands for the rates of all units.
    return replace(
        basis,
        relative_low=to_decimal(capacity.low_per_s) / arrivals_per_s,
        relative_high=to_decimal(capacity.high_per_s) / arrivals_per_s,
        confidence=capacity.confidence,
    )
