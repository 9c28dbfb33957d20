"""Evaluate the terms of a contract: compute the metric of each term from the records of runs.

`TermEvaluator` has one method per kind of term, and `ESTIMATORS` says which kind uses which method.
A metric that cannot be computed raises `EstimateError` with the reason. `judge.py` compares the
metrics with their limits. This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from loadgen.contracts import quantile_interval, steady_samples
from loadgen.contracts.answer_terms import estimate_right_answers
from loadgen.contracts.fluidity_terms import (
    FLUIDITY,
    collect_missed_fractions,
    convert_to_index,
)
from loadgen.contracts.latency_estimates import (
    compute_run_quantiles,
    divide_latencies,
    estimate_latency,
    estimate_quantile_of_samples,
    estimate_quantile_of_selection,
    widen_ratio_by_runs,
)
from loadgen.contracts.load_checks import (
    EstimateError,
    LoadCheck,
    UnmeasurableError,
    check_horizon,
    combine_load_checks,
)
from loadgen.contracts.quantile_interval import RunSeries
from loadgen.contracts.rates import (
    CountInSpan,
    compute_batch_rates,
    compute_mean_of_runs,
    count_all_tokens,
    count_good_requests,
    count_ok_requests,
    count_output_tokens,
    estimate_rate,
    find_first_and_last_windows,
    find_good_requests,
    has_two_windows,
)
from loadgen.contracts.recorded_run import LoadedRun, MeasuredLevel, RecordedRun
from loadgen.contracts.steady_samples import (
    QUEUE_METRIC,
    QuantileQuery,
    SteadySample,
    collect_timed_values,
    collect_values,
    find_counted_requests,
)
from loadgen.contracts.steady_state import TimedValues
from loadgen.contracts.tenant_fairness import combine_fractions, estimate_jain_index
from loadgen.contracts.term_estimate import TermEstimate
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.core import format
from loadgen.core.analysis import fairness
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.metrics import windows
from loadgen.core.metrics.columns import OK
from loadgen.core.metrics.sections import Recovery
from loadgen.core.metrics.summary import Summary
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.slo import ANSWERS, Slo, missing_metrics
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import QUANTILES
from loadgen.figures import pooled_metrics


class CostEstimate(NamedTuple):
    """The cost of a thousand good requests, with its currency."""

    interval: Interval
    currency: str


CostFunction = Callable[[RecordedRun, Interval], CostEstimate]
"""Returns the cost of a thousand good requests from a run and the rate of its good requests.

Raises LoadgenError or CombinedError if no price fits.
"""

RATE_COUNTERS: dict[str, CountInSpan] = {
    "requests": count_ok_requests,
    "good_requests": count_good_requests,
    "output_per_gpu": count_output_tokens,
    "tokens_per_gpu": count_all_tokens,
}
"""Metric of a rate -> what is counted for it."""

TOKEN_METRICS = ("output_per_gpu", "tokens_per_gpu", "token")
"""Metrics of terms that are computed from token counts."""


class EnergyMetric(NamedTuple):
    """How the energy for a unit of work is computed.

    Attributes:
        field: The field of the summary's energy that has it.
        counter: Counts the units of work in a span of a run, for the interval of their rate.
    """

    field: str
    counter: CountInSpan


ENERGY_METRICS = {
    "token": EnergyMetric("joules_per_output_token", count_output_tokens),
    "request": EnergyMetric("joules_per_request", count_ok_requests),
}
"""Unit of work that an energy is for -> how the energy is computed."""


class PartialLatency(NamedTuple):
    """The quantile of a latency for some requests: those in one window of time or at one node.

    Attributes:
        interval: The quantile with its interval, from all runs together.
        load_check: Whether the load is long enough for the quantile.
        run_quantiles: The quantile of each run.
        sample_count: The number of these requests.
    """

    interval: Interval
    load_check: LoadCheck
    run_quantiles: list[float]
    sample_count: int


class TermEvaluator:
    """Evaluates terms on the recorded runs of one level."""

    def __init__(
        self,
        level: MeasuredLevel,
        *,
        all_levels: Mapping[str, MeasuredLevel],
        confidence: float,
        horizon_s: float,
        cost_function: CostFunction | None = None,
    ) -> None:
        """Create an evaluator.

        Args:
            level: The level.
            all_levels: All levels by name, for terms that compare two of them.
            confidence: The confidence of all intervals.
            horizon_s: The recurrence horizon of the contract: latencies are judged for slowdowns
                that recur at least once within this time.
            cost_function: Computes costs. None if there are no prices.
        """
        self.all_levels = all_levels
        self.confidence = confidence
        self.horizon_s = horizon_s
        self.cost_function = cost_function
        self.runs = level.runs
        self.loaded_runs = [LoadedRun(run, run.columns()) for run in level.runs]

    def evaluate(self, term: ContractTerm) -> TermEstimate:
        """Return the metric of a term, from the requests or tasks that the term is about.

        Raises:
            EstimateError: The metric cannot be computed from the records. The message says why.
        """
        is_about_some_records = bool(term.class_name or term.is_about_tasks or term.window_ns)
        if not is_about_some_records:
            return self._evaluate_with_all_runs(term)
        selected_runs = _select_records_for_term(self.runs, term)
        return self._with_runs(selected_runs)._evaluate_with_all_runs(term)

    def _with_runs(self, runs: tuple[RecordedRun, ...]) -> TermEvaluator:
        """Return an evaluator with the same settings for other runs, or for a part of these."""
        return TermEvaluator(
            MeasuredLevel(runs=runs),
            all_levels=self.all_levels,
            confidence=self.confidence,
            horizon_s=self.horizon_s,
            cost_function=self.cost_function,
        )

    def _evaluate_with_all_runs(self, term: ContractTerm) -> TermEstimate:
        """Return the metric of a term from all records of this evaluator's runs.

        The metric is in the unit in which the limit of the term is shown, such as ms. Reports show
        for every term how long the load was and its effective sample size. An estimate that has no
        load of its own gets those of all requests.
        """
        self._require_reported_metrics(term)
        estimate = self._estimate_metric(term)
        interval_in_unit = estimate.interval.map(term.definition.limit.to_unit)
        estimate = estimate._replace(interval=interval_in_unit)
        if estimate.load_s > 0:
            return estimate

        timed_samples = self._collect_e2e_latencies()
        return estimate._replace(
            load_s=steady_samples.compute_load_length_s(timed_samples),
            effective_size=steady_samples.sum_server_sample_sizes(self.runs, timed_samples),
        )

    def _estimate_metric(self, term: ContractTerm) -> TermEstimate:
        """Return the metric of a term by the method for its keyword: see `ESTIMATORS`."""
        if term.kind in ESTIMATORS:
            return ESTIMATORS[term.kind](self, term)
        return self.estimate_quantile(term)  # the keyword is a latency such as `ttft`

    def _require_reported_metrics(self, term: ContractTerm) -> None:
        """Raise EstimateError if a term is computed from a metric that a run does not report.

        A summary omits a metric that it knows to be wrong, for example because token counts
        contradict each other. A contract must not judge such a metric either.
        """
        other_level = self.all_levels.get(term.level, MeasuredLevel())
        for run in (*self.runs, *other_level.runs):
            for metric in _find_source_metrics(term, run):
                omission_reason = _find_omission_reason(run.summary, metric, term.quantile)
                if omission_reason:
                    raise EstimateError(f"not reported by {run.folder}: {omission_reason}")

    def _create_query(self, metric: str, p: float, label: str) -> QuantileQuery:
        """Return the query for a quantile at the confidence and horizon of the contract.

        Args:
            metric: The metric of requests.
            p: The quantile, such as 0.99.
            label: The metric as messages name it, such as "ttft p99".
        """
        return QuantileQuery(metric, p, self.confidence, self.horizon_s, label)

    def _count_ok_requests(self) -> int:
        """Return the number of ok requests of all runs."""
        return sum(run.summary.requests.ok for run in self.runs)

    def _collect_e2e_latencies(self) -> list[TimedValues]:
        """Return the E2E latencies of each run, from which the length of its load is known."""
        return [collect_timed_values(loaded_run.columns, "e2e") for loaded_run in self.loaded_runs]

    # -- latencies --------------------------------------------------------------------------------

    def estimate_quantile(self, term: ContractTerm) -> TermEstimate:
        """Return a quantile of a latency per request or per task, such as TTFT p99."""
        label = f"{term.kind} {term.percentile_label}"
        query = self._create_query(term.metric, term.quantile, label)
        latency = estimate_latency(self.loaded_runs, query, term.kind, limit_ns=term.limit)
        request_count = latency.sample.request_count
        return _create_estimate_from_sample(latency.interval, request_count, latency.sample)

    def estimate_pooled_gaps(self, term: ContractTerm) -> TermEstimate:
        """Return a quantile of the times between tokens, or between events, of all responses.

        These times are stored as one histogram per run, so it is not known how strongly they are
        correlated. The interval therefore comes from the differences between the quantiles of the
        runs, which are independent of each other. Its high end is infinite if the load is too short
        to contain the slowdowns of the server that the contract covers.

        Raises:
            EstimateError: A run has no such times.
        """
        for run in self.runs:
            _require_gaps(run, term.kind)

        run_quantiles_ns = [run.gaps.quantile(term.quantile) for run in self.runs]
        interval = intervals.mean_of_runs(run_quantiles_ns, self.confidence)

        # The length of the load is computed from E2E latency, which all counted requests have.
        load_s = steady_samples.compute_load_length_s(self._collect_e2e_latencies())
        metric_label = f"{term.kind} {term.percentile_label}"

        load_check = check_horizon(load_s, self.confidence, self.horizon_s, metric_label)
        if load_check.is_short:
            interval = replace(interval, high=math.inf)

        return _create_estimate(interval, self._count_ok_requests(), load_check)

    def estimate_drift(self, term: ContractTerm) -> TermEstimate:
        """Return the relative change of a latency from the first window of the load to the last.

        A server with a memory leak, for example, becomes slower over hours. The quantile is
        estimated in both windows, and their ratio becomes a change, such as 0.1 for 10 % slower.

        Raises:
            EstimateError: A run is shorter than two windows, or a window has too few requests.
        """
        spans = find_first_and_last_windows(self.loaded_runs, term.window_ns)
        first = self._estimate_latency_in_windows(term, spans.first)
        last = self._estimate_latency_in_windows(term, spans.last)
        ratio = divide_latencies(last.interval, first.interval, "the first window")
        ratio = widen_ratio_by_runs(ratio, last.run_quantiles, first.run_quantiles)

        return TermEstimate(
            ratio.map(_to_relative_change),
            sample_count=min(first.sample_count, last.sample_count),
            caveat=_describe_short_windows([first.load_check, last.load_check]),
        )

    def _estimate_latency_in_windows(
        self, term: ContractTerm, spans: Sequence[windows.Span]
    ) -> PartialLatency:
        """Return the latency that a term compares, for the requests in one window of each run.

        Args:
            term: The term, with the metric and the quantile.
            spans: The window of each run.
        """
        values = [
            collect_values(
                loaded_run.columns,
                term.of,
                windows.is_within(loaded_run.columns["due_ns"], span),
            )
            for loaded_run, span in zip(self.loaded_runs, spans, strict=True)
        ]
        load_s = len(self.runs) * term.window_ns / NS_PER_S
        return self._estimate_latency_of_part(term, values, load_s, self.confidence)

    def _estimate_latency_of_part(
        self, term: ContractTerm, values: RunSeries, load_s: float, confidence: float
    ) -> PartialLatency:
        """Return a latency quantile of the requests in one window of time or at one node.

        Terms such as `drift: {of: ttft, at: p50, ...}` compare two parts of the load, and call this
        for each. The latency metric is `term.of`.

        Args:
            term: The term, which names the metric and the quantile.
            values: The values of the metric for these requests, one array per run.
            load_s: The length of the load in which they were scheduled, of all runs together.
            confidence: The confidence of the interval.
        """
        query = self._create_query(term.of, term.quantile, term.percentile_label)
        query = query._replace(confidence=confidence)
        quantile = estimate_quantile_of_selection(self.runs, values, query, load_s)

        return PartialLatency(
            interval=quantile.interval,
            load_check=quantile.load_check,
            run_quantiles=compute_run_quantiles(values, term.quantile),
            sample_count=steady_samples.count_values(values),
        )

    def estimate_difference_between_nodes(self, term: ContractTerm) -> TermEstimate:
        """Return the largest relative difference of a latency between two nodes.

        A node is one of several endpoints that share the load. All pairs of nodes are compared, so
        the confidence of each pair is higher than that of the contract. All pairs together then
        have the confidence of the contract (Bonferroni correction).

        Raises:
            EstimateError: There is one node, or so many requests failed at one that it has no such
                quantile.
        """
        node_count = len(self.runs[0].manifest.targets)
        if node_count < 2:
            raise UnmeasurableError("there is only one node, so there is nothing to compare")

        pair_count = node_count * (node_count - 1) / 2
        pair_confidence = 1 - (1 - self.confidence) / pair_count
        latency_by_node = {
            f"node {node_index + 1}": self._estimate_node_latency(term, node_index, pair_confidence)
            for node_index in range(node_count)
        }
        _require_finite_latencies(latency_by_node, term.percentile)
        latencies = list(latency_by_node.values())
        largest_ratio = self._find_largest_ratio(latencies)
        load_checks = [
            latency.load_check.with_prefix(node) for node, latency in latency_by_node.items()
        ]

        return _create_estimate(
            largest_ratio.map(_to_relative_change),
            sample_count=min(latency.sample_count for latency in latencies),
            load_check=combine_load_checks(load_checks),
        )

    def _find_largest_ratio(self, latencies: Sequence[PartialLatency]) -> Interval:
        """Return the largest ratio between the latencies of any two nodes, with its interval.

        The largest of several unknown ratios is at least the largest of their lower ends and at
        most the largest of their upper ends.

        Args:
            latencies: The latency at each node.
        """
        ratios = [
            widen_ratio_by_runs(
                intervals.divide_intervals(first.interval, second.interval),
                first.run_quantiles,
                second.run_quantiles,
            )
            for first, second in permutations(latencies, 2)
        ]
        return Interval(
            value=max(ratio.value for ratio in ratios),
            low=max(ratio.low for ratio in ratios),
            high=max(ratio.high for ratio in ratios),
            level=self.confidence,
        )

    def _estimate_node_latency(
        self, term: ContractTerm, node_index: int, confidence: float
    ) -> PartialLatency:
        """Return a latency quantile of the requests to one node of the target.

        A node is one of several servers that share the load, such as a replica.

        Args:
            term: The term that compares the nodes. It names the metric (`of`) and the quantile.
            node_index: The index of the node in the targets of the run.
            confidence: The confidence of the interval.
        """
        metric = term.of
        values = []
        for loaded_run in self.loaded_runs:
            is_of_node = loaded_run.columns["target"] == node_index
            values.append(collect_values(loaded_run.columns, metric, is_of_node))
        load_s = sum(run.summary.window.steady.duration_s or 0.0 for run in self.runs)
        return self._estimate_latency_of_part(term, values, load_s, confidence)

    def estimate_ratio_to_other_level(self, term: ContractTerm) -> TermEstimate:
        """Return a latency as a multiple of the same latency at another level of the contract.

        For example, TTFT p99 at a mixed load may be 1.5 times that at a quiet load. If the term is
        about a class of requests, it is the latency of this class at both levels. If the other
        level does not have the class, all of its requests are used.

        Raises:
            EstimateError: The other level was not run or is not valid, or a latency cannot be
                estimated.
        """
        query = self._create_query(term.of, term.quantile, f"{term.of} {term.percentile_label}")
        latency = estimate_latency(self.loaded_runs, query, term.of)
        other_latency = estimate_latency(self._load_other_level(term), query, term.of)
        other_name = f"level {term.level}"
        ratio = divide_latencies(latency.interval, other_latency.interval, other_name)
        load_check = combine_load_checks(
            [
                latency.sample.load_check,
                other_latency.sample.load_check.with_prefix(other_name),
            ]
        )
        sample_count = min(latency.sample.request_count, other_latency.sample.request_count)

        return _create_estimate(ratio, sample_count, load_check)

    def _load_other_level(self, term: ContractTerm) -> list[LoadedRun]:
        """Return the runs of the level that a term compares this one with.

        The runs are reduced to the requests of the term's class if they have that class.

        Raises:
            EstimateError: The other level was not run or is not valid.
        """
        other_level = self.all_levels.get(term.level, MeasuredLevel())
        if not other_level.runs or other_level.failure_reason:
            reason = other_level.failure_reason or "it was not run"
            raise EstimateError(f"level {term.level} has no run to compare with: {reason}")

        loaded_runs = []
        for full_run in other_level.runs:
            run = full_run
            if full_run.has_class(term.class_name):
                run = full_run.select_class(term.class_name)
            loaded_runs.append(LoadedRun(run, run.columns()))

        return loaded_runs

    # -- fractions --------------------------------------------------------------------------------

    def estimate_error_fraction(self, _term: ContractTerm) -> TermEstimate:
        """Return the fraction of requests that are not ok."""
        error_marks = []
        for loaded_run in self.loaded_runs:
            is_error = loaded_run.columns["status"] != OK
            is_counted = find_counted_requests(loaded_run.columns)
            error_marks.append(is_error[is_counted].astype(float))
        return _estimate_fraction(error_marks, self.confidence)

    def estimate_goodput_fraction(self, term: ContractTerm) -> TermEstimate:
        """Return the fraction of requests that meet the SLO, in the steady state of the load.

        Requests violate an SLO mostly because they wait in a queue. So the load must be long enough
        for the same quantile of TTFT: for a goodput of 99 %, for TTFT p99. If it is too short, it
        may have missed a time with more violations, so the interval of the fraction begins at 0.
        """
        required_fraction = term.limit
        ttft_query = self._create_query(
            QUEUE_METRIC,
            required_fraction,
            label=f"an attainment of {format.percent(required_fraction)}",
        )

        # A violation is marked with 1 and a good request with 0.
        violations = [_find_slo_violations(loaded_run) for loaded_run in self.loaded_runs]
        steady_violations = steady_samples.select_steady_sample(self.runs, violations, ttft_query)
        good_marks = [1 - violation_marks for violation_marks in steady_violations.values]
        fraction = _estimate_fraction(good_marks, self.confidence)

        interval = fraction.interval
        if steady_violations.load_check.is_short:
            interval = replace(interval, low=0.0)

        return _create_estimate_from_sample(interval, fraction.sample_count, steady_violations)

    def estimate_fluidity(self, term: ContractTerm) -> TermEstimate:
        """Return the fluidity index that a fraction of the requests reached, such as 95 %.

        Late first tokens come from waits in a queue, so the load must be long enough for the same
        quantile of TTFT.

        Raises:
            EstimateError: The token times of a run are not known.
        """
        query = self._create_query(
            QUEUE_METRIC, term.quantile, f"{term.kind} {term.percentile_label}"
        )
        missed_fractions = collect_missed_fractions(self.loaded_runs)
        missed = estimate_quantile_of_samples(self.runs, missed_fractions, query, term.kind)
        return _create_estimate_from_sample(
            convert_to_index(missed.interval), missed.sample.request_count, missed.sample
        )

    def estimate_answers(self, _term: ContractTerm) -> TermEstimate:
        """Return the share of right answers among the checked answers of all runs.

        Raises:
            EstimateError: A run has no questions with known answers, or no answer was checked.
        """
        return estimate_right_answers(self.runs, self.confidence)

    def estimate_accepted_length(self, _term: ContractTerm) -> TermEstimate:
        """Return how far the accepted length of speculative decoding is from the stated one.

        The length of a run is a count of all its steps, so its interval comes from the runs.

        Raises:
            EstimateError: No length was stated, or that of a run is not known.
        """
        differences = [_get_length_difference(run) for run in self.runs]
        interval = intervals.mean_of_runs(differences, self.confidence)
        if len(differences) == 1:
            interval = replace(interval, low=differences[0], high=differences[0])
        return TermEstimate(
            replace(interval, low=max(interval.low, 0.0)), self._count_ok_requests()
        )

    def estimate_fairness(self, term: ContractTerm) -> TermEstimate:
        """Return Jain's fairness index of the tenants that share the server.

        A tenant is a user with one or more classes of requests. The index compares the fractions of
        good requests (requests that meet the SLO) of all tenants. It is 1 if all tenants have the
        same fraction, and 1/n if one of n tenants has all good requests.

        The interval of the index holds for every combination of fractions within their intervals,
        so its confidence is at least that of the contract.

        Raises:
            EstimateError: There is only one tenant, or no request was good.
        """
        request_classes = self.runs[0].manifest.classes
        class_names_by_tenant = fairness.group_by_tenant(
            {request_class.name: request_class.tenant for request_class in request_classes}
        )
        if not class_names_by_tenant:
            raise EstimateError("all requests belong to one tenant")

        goodput_by_class = {
            request_class.name: self._estimate_goodput_of_class(term, request_class.name)
            for request_class in request_classes
        }
        tenant_fractions = [
            combine_fractions([goodput_by_class[name] for name in class_names])
            for class_names in class_names_by_tenant.values()
        ]
        index = estimate_jain_index(tenant_fractions)
        if index is None:
            raise EstimateError("no request of any tenant met the SLO")

        return _combine_class_estimates(index, list(goodput_by_class.values()))

    def _estimate_goodput_of_class(
        self, fairness_term: ContractTerm, class_name: str
    ) -> TermEstimate:
        """Return the fraction of the requests of a class that meet the SLO of the class.

        This is the metric of a goodput term about the class with the limit of the fairness term.
        """
        goodput_term = fairness_term._replace(kind="goodput", class_name=class_name)
        return self.evaluate(goodput_term)

    # -- rates ------------------------------------------------------------------------------------

    def estimate_steady_rate(self, term: ContractTerm) -> TermEstimate:
        """Return a rate per second in steady state, such as the rate of ok requests.

        `RATE_COUNTERS` says what is counted for which term. A rate of tokens is divided by the
        number of GPUs of the target.

        Raises:
            EstimateError: The rate cannot be estimated, or the number of GPUs is not known.
        """
        rate = estimate_rate(self.loaded_runs, RATE_COUNTERS[term.metric], self.confidence)
        interval = rate.interval
        if term.requires("gpus"):
            gpu_count = self.runs[0].summary.target.gpus
            if not gpu_count:
                raise EstimateError("the number of GPUs is not known; give --gpus")
            interval = _divide_by_count(interval, gpu_count)

        return TermEstimate(interval, self._count_ok_requests(), rate.caveat)

    def estimate_sustained_fraction(self, term: ContractTerm) -> TermEstimate:
        """Return the rate of ok requests in the last window as a fraction of that in the first.

        Each window is cut into short batches of time, and the interval comes from the variation of
        their rates. It is widened if the ratios of the single runs differ by more.

        Raises:
            EstimateError: A run is shorter than two windows.
        """
        spans = find_first_and_last_windows(self.loaded_runs, term.window_ns)
        first_rates = compute_batch_rates(self.loaded_runs, spans.first, count_ok_requests)
        last_rates = compute_batch_rates(self.loaded_runs, spans.last, count_ok_requests)
        ratio = intervals.ratio_of_means(last_rates, first_rates, level=self.confidence)
        run_count = len(self.runs)
        ratio = widen_ratio_by_runs(
            ratio,
            numerators=compute_mean_of_runs(last_rates, run_count),
            denominators=compute_mean_of_runs(first_rates, run_count),
        )

        return TermEstimate(ratio, self._count_ok_requests())

    def estimate_energy_per_unit(self, term: ContractTerm) -> TermEstimate:
        """Return the energy per unit of work (output token or ok request), in joules.

        Each run reports its energy divided by its units of work. The value is the mean of the runs.
        A single number per run does not show how uncertain it is, so the interval is that of the
        same quantity computed in another way: power divided by the rate of units. The power has
        the error of its readings, and the rate varies over time.

        Raises:
            EstimateError: The energy of a run was not measured.
        """
        metric = ENERGY_METRICS[term.of]
        energy_by_run = [_get_measured_energy(run) for run in self.runs]
        joules_per_unit_by_run = [_get_energy_per_unit(energy, metric) for energy in energy_by_run]
        mean_joules_per_unit = math.fsum(joules_per_unit_by_run) / len(joules_per_unit_by_run)
        rate = estimate_rate(self.loaded_runs, metric.counter, self.confidence)
        mean_power = _compute_mean_power(energy_by_run, self.confidence)
        power_per_rate = intervals.divide_intervals(mean_power, rate.interval)

        # The rate excludes the start-up, so the value of this ratio differs slightly from the mean.
        interval = replace(power_per_rate, value=mean_joules_per_unit)
        widened_interval = intervals.widen_by_runs(interval, joules_per_unit_by_run)
        return TermEstimate(widened_interval, self._count_ok_requests(), rate.caveat)

    def estimate_cost_per_thousand(self, term: ContractTerm) -> TermEstimate:
        """Return the cost of a thousand good requests or tasks, in the currency of the term.

        A machine costs money per hour, so the cost is that of the time in which it completes a
        thousand requests that meet the SLO.

        Raises:
            EstimateError: No price fits, the currencies differ, no request was good, or the rate of
                good requests is not known.
        """
        if self.cost_function is None:
            raise EstimateError("no prices are given")

        good_rate = estimate_rate(self.loaded_runs, count_good_requests, self.confidence)
        if good_rate.caveat:
            raise EstimateError(good_rate.caveat)

        if good_rate.interval.value <= 0:
            noun = "task" if term.is_about_tasks else "request"
            raise EstimateError(f"no {noun} met the SLO, so there is no cost per good {noun}")

        any_run = self.runs[0]  # all runs have the same target, on which the price depends
        cost = _compute_cost(self.cost_function, any_run, good_rate.interval)
        if cost.currency != term.currency:
            raise EstimateError(f"the limit is in {term.currency}, the prices in {cost.currency}")

        return TermEstimate(cost.interval, self._count_ok_requests())

    # -- events -----------------------------------------------------------------------------------

    def estimate_recovery_time(self, _term: ContractTerm) -> TermEstimate:
        """Return the longest time until the SLO was met again after an event, in ns.

        An event is a spike of the load, the loss of a replica, or a scale-up. The time is infinite
        if the SLO was not met again before the load ended.

        Raises:
            EstimateError: There was no event, or the time of recovery from one is not known.
        """
        events = [event for run in self.runs for event in run.summary.recovery]
        _require_known_recovery(events)
        recovery_times_ns = [
            _estimate_recovery_time_s(event).map(_seconds_to_ns) for event in events
        ]

        return TermEstimate(
            _combine_to_largest(recovery_times_ns),
            sample_count=len(events),
            caveat=_describe_missing_recovery(events),
        )


ESTIMATORS: dict[str, Callable[[TermEvaluator, ContractTerm], TermEstimate]] = {
    **dict.fromkeys(pooled_metrics(), TermEvaluator.estimate_pooled_gaps),
    **dict.fromkeys(
        ("task_time", "task_wait", "task_longest_wait"), TermEvaluator.estimate_quantile
    ),
    "drift": TermEvaluator.estimate_drift,
    "between_nodes": TermEvaluator.estimate_difference_between_nodes,
    **dict.fromkeys(("against", "slowdown"), TermEvaluator.estimate_ratio_to_other_level),
    "errors": TermEvaluator.estimate_error_fraction,
    **dict.fromkeys(("goodput", "task_goodput"), TermEvaluator.estimate_goodput_fraction),
    "fairness": TermEvaluator.estimate_fairness,
    FLUIDITY: TermEvaluator.estimate_fluidity,
    ANSWERS: TermEvaluator.estimate_answers,
    "accepted_length": TermEvaluator.estimate_accepted_length,
    **dict.fromkeys((*RATE_COUNTERS, "tasks", "good_tasks"), TermEvaluator.estimate_steady_rate),
    "sustained": TermEvaluator.estimate_sustained_fraction,
    "energy": TermEvaluator.estimate_energy_per_unit,
    **dict.fromkeys(("cost", "task_cost"), TermEvaluator.estimate_cost_per_thousand),
    "recovery": TermEvaluator.estimate_recovery_time,
}
"""Keyword -> how its metric is estimated. Keywords that are not here are latencies."""


def _select_records_for_term(
    runs: tuple[RecordedRun, ...], term: ContractTerm
) -> tuple[RecordedRun, ...]:
    """Return the runs, reduced to the requests or tasks that a term is about.

    A term about a class of requests gets the requests of this class, and a term about tasks gets
    one record per task. A term that compares two windows of time gets only the runs that are long
    enough for them, if there are any.

    Raises:
        EstimateError: The runs have no such class, or no tasks.
    """
    if term.class_name:
        runs = tuple(run.select_class(term.class_name) for run in runs)
    if term.is_about_tasks:
        runs = tuple(run.convert_to_tasks() for run in runs)
    return _select_runs_with_two_windows(runs, term.window_ns)


def _select_runs_with_two_windows(
    runs: tuple[RecordedRun, ...], window_ns: int
) -> tuple[RecordedRun, ...]:
    """Return the runs that are long enough for two windows, or all runs if none is.

    Terms such as `drift` compare the first window of each run with its last one. Runs that were
    added to a validation may be long enough although the first ones were not.

    Args:
        runs: The runs of a level.
        window_ns: The length of a window. 0 for a term without windows, which gets all runs.
    """
    long_runs = tuple(run for run in runs if has_two_windows(run, window_ns))
    return long_runs or runs


def _find_source_metrics(term: ContractTerm, run: RecordedRun) -> list[str]:
    """Return the metrics of requests from which the metric of a term is computed.

    - A term about good requests, such as goodput, is computed from all metrics that the SLO of the
      run limits.
    - A term about tokens, such as `output_per_gpu`, is computed from token counts, which a summary
      reports under the name "tokens".
    - A term that compares a metric, such as `drift` of TTFT, is computed from that metric.
    - Any other term is computed from the metric of its own name.

    Raises:
        EstimateError: The package of a metric in the SLO is not installed.
    """
    is_about_good_requests = term.requires("slo") or term.requires("task_slo")
    if is_about_good_requests:
        return _list_slo_metrics(run.manifest.slo)
    metric = term.of or term.metric
    return ["tokens"] if metric in TOKEN_METRICS else [metric]


def _list_slo_metrics(slo: Slo | None) -> list[str]:
    """Return the metrics of single requests that an SLO limits.

    Pooled metrics, such as the times between the tokens of all responses, have no value per
    request, so no request can violate a limit on them.

    Raises:
        EstimateError: The package of a metric is not installed.
    """
    if slo is None:
        return []
    missing_reasons = missing_metrics([slo])
    if missing_reasons:
        raise EstimateError("; ".join(missing_reasons.values()))
    return [slo_term.metric for slo_term in slo.terms if slo_term.metric not in pooled_metrics()]


def _find_omission_reason(summary: Summary, metric: str, p: float) -> str:
    """Return why a summary does not report a quantile of a metric, or "" if it does.

    A summary reports the mean and a few quantiles, such as p50, p90 and p99. A term about another
    quantile has the reason of the next higher one of them, for example that of p99 for p95. A term
    without a quantile has the reason of the mean.

    Args:
        summary: The summary of a run.
        metric: The name of the metric.
        p: The quantile, such as 0.99. 0 for a term without a quantile.
    """
    statistic = "mean"
    if p > 0:
        higher_quantiles = [name for name, quantile in QUANTILES if quantile >= p]
        if higher_quantiles:
            statistic = higher_quantiles[0]
    return summary.withheld_reason(metric, statistic)


def _require_finite_latencies(
    latency_by_node: Mapping[str, PartialLatency], percentile: str
) -> None:
    """Raise EstimateError for nodes whose latency quantile is infinite.

    A failed request counts as an infinite latency, so this means that many of its requests failed.

    Args:
        latency_by_node: Name of a node -> the latency of its requests.
        percentile: The percentile as messages name it, such as "p99".
    """
    failed_nodes = [
        node for node, latency in latency_by_node.items() if math.isinf(latency.interval.value)
    ]
    if failed_nodes:
        raise EstimateError(
            f"too many requests failed at {', '.join(failed_nodes)}: no {percentile} to compare"
        )


def _require_gaps(run: RecordedRun, metric: str) -> None:
    """Raise EstimateError if a run has no times between tokens (ITL) or between events."""
    if metric == "itl" and run.summary.itl_ms is None:
        raise EstimateError(f"ITL is not defined: {run.summary.itl_undefined_reason}")
    if not run.gaps.count:
        raise EstimateError("no response has two events, so there is no time between events")


def _describe_short_windows(load_checks: Sequence[LoadCheck]) -> str:
    """Return why a window of a term is too short, or "" if all are long enough.

    All windows have the same length, so the reason of the first short one stands for all.
    """
    for load_check in load_checks:
        if load_check.is_short:
            return f"in each window: {load_check.sentence()}"
    return ""


def _estimate_fraction(marks: RunSeries, confidence: float) -> TermEstimate:
    """Return the fraction of requests that are marked with 1.

    Args:
        marks: An array per run, with 0.0 or 1.0 for each request in order of time.
        confidence: The confidence of the interval.

    Raises:
        EstimateError: There is no request.
    """
    count = steady_samples.count_values(marks)
    if count == 0:
        raise EstimateError("no request was counted")

    fractions_of_runs = [float(run_marks.mean()) for run_marks in marks if len(run_marks) > 0]
    interval = quantile_interval.estimate_fraction(marks, confidence)
    interval = intervals.widen_by_runs(interval, fractions_of_runs)

    # The interval of the runs is symmetric and may reach beyond 0 or 1.
    interval = replace(interval, low=max(interval.low, 0.0), high=min(interval.high, 1.0))
    return TermEstimate(interval, count)


def _combine_class_estimates(index: Interval, estimates: Sequence[TermEstimate]) -> TermEstimate:
    """Return the estimate of a fairness index that was computed from estimates of request classes.

    The result counts the requests of all classes. It repeats each of their caveats once and has the
    load that is sufficient for all of them.

    Args:
        index: The fairness index with its interval.
        estimates: The goodput of each class.
    """
    unique_caveats = dict.fromkeys(estimate.caveat for estimate in estimates if estimate.caveat)
    return TermEstimate(
        index,
        sample_count=sum(estimate.sample_count for estimate in estimates),
        caveat="; ".join(unique_caveats),
        sufficient_load_s=max(estimate.sufficient_load_s for estimate in estimates),
    )


def _get_length_difference(run: RecordedRun) -> float:
    """Return by which fraction the accepted length of a run differs from the stated one.

    Raises:
        UnmeasurableError: No length was stated, or no server reports it.
        EstimateError: The run is too short to know it.
    """
    check = run.summary.accepted_length
    if check is None:
        raise UnmeasurableError(
            "no accepted length is stated; give accepted_length in the workload, or "
            "--accepted-length"
        )
    if check.difference is None:
        raise UnmeasurableError(check.reason)
    if check.comparable is None:
        raise EstimateError(check.reason)
    return abs(check.difference)


def _get_measured_energy(run: RecordedRun) -> EnergyUse:
    """Return the energy that the accelerators used in a run. Raise UnmeasurableError without it."""
    if run.summary.energy is None:
        raise UnmeasurableError("the energy of the accelerators was not measured; give --energy")
    return run.summary.energy


def _get_energy_per_unit(energy: EnergyUse, metric: EnergyMetric) -> float:
    """Return the joules per unit of work. Raise EstimateError with the reason if not known."""
    joules: float | None = getattr(energy, metric.field)
    if joules is None:
        raise EstimateError(
            energy.missing_reason or "the energy of the accelerators was not measured"
        )
    return joules


def _compute_mean_power(energies: Sequence[EnergyUse], confidence: float) -> Interval:
    """Return the mean power over the runs in watts, as uncertain as the least certain run."""
    mean_watts = math.fsum(energy.watts or 0.0 for energy in energies) / len(energies)
    relative_errors = [
        (energy.error_j or 0.0) / energy.joules for energy in energies if energy.joules
    ]
    error = max(relative_errors)
    lowest_watts = mean_watts * max(1 - error, 0.0)
    return Interval(mean_watts, lowest_watts, mean_watts * (1 + error), confidence)


def _combine_to_largest(times: Sequence[Interval]) -> Interval:
    """Return the interval of the largest of several times: the largest of each of their ends."""
    return Interval(
        max(time.value for time in times),
        max(time.low for time in times),
        max(time.high for time in times),
    )


def _create_estimate_from_sample(
    interval: Interval, request_count: int, sample: SteadySample
) -> TermEstimate:
    """Return the estimate of a metric that was computed from the steady state of a load.

    The estimate repeats which part of the load this is and how long it was. If the load was too
    short, it also has the reason (its caveat) and the length that would be sufficient.

    Args:
        interval: The metric with its interval.
        request_count: The number of requests behind the metric.
        sample: The steady-state values that the metric was computed from.
    """
    estimate = _create_estimate(interval, request_count, sample.load_check)
    return estimate._replace(
        load_description=sample.load_description,
        load_s=sample.load_s,
        effective_size=sample.effective_size,
    )


def _create_estimate(interval: Interval, sample_count: int, load_check: LoadCheck) -> TermEstimate:
    """Return an estimate whose caveat says why the load is too short, if it is."""
    return TermEstimate(
        interval,
        sample_count,
        caveat=load_check.sentence(),
        sufficient_load_s=load_check.known_sufficient_load_s,
    )


def _find_slo_violations(loaded_run: LoadedRun) -> TimedValues:
    """Return 1.0 for each request that violates the SLO of its run, 0.0 for each that meets it."""
    run, columns = loaded_run
    is_counted = find_counted_requests(columns, run.manifest.slo)
    is_violated = ~find_good_requests(run, columns)
    return steady_samples.order_by_due_time(columns, is_counted, is_violated.astype(np.float64))


def _estimate_recovery_time_s(event: Recovery) -> Interval:
    """Return the time from an event until the SLO was met again, in seconds, with its interval.

    Whether the SLO is met is decided for groups of consecutive requests, so the time of recovery is
    only known to the length of a group: it may be earlier or later by `resolution_s`.

    - If the SLO was never missed, the time is 0.
    - If it was not met again before the load ended, the time is infinite, and at least the time
      that was observed.
    """
    recovery_s = event.recovered_after_s
    if recovery_s is None:
        return Interval(math.inf, event.observed_s, math.inf)
    if recovery_s == 0:
        return Interval(0.0, 0.0, 0.0)
    low = max(recovery_s - event.resolution_s, 0.0)
    return Interval(recovery_s, low, high=recovery_s + event.resolution_s)


def _require_known_recovery(events: Sequence[Recovery]) -> None:
    """Raise EstimateError if there is no event, or if the recovery from one cannot be known."""
    for event in events:
        unknown_reason = event.reason
        if unknown_reason:
            raise EstimateError(unknown_reason)
    if not events:
        raise EstimateError(
            "the load has no spike, replica loss or scale-up to recover from, or no SLO"
        )


def _describe_missing_recovery(events: Sequence[Recovery]) -> str:
    """Return that a load ended before the SLO was met again, or "" if it was after all events.

    If there are several such events, the text is about the first one.
    """
    for event in events:
        if event.recovered_after_s is None:
            observed = format.duration(event.observed_s)
            return f"the load ended {observed} after the event; a longer load is needed"
    return ""


def _compute_cost(
    cost_function: CostFunction, run: RecordedRun, good_rate: Interval
) -> CostEstimate:
    """Return the cost of a thousand good requests, or raise EstimateError if no price fits."""
    try:
        return cost_function(run, good_rate)
    except LoadgenError as error:
        raise _create_unknown_cost_error([error]) from error
    except CombinedError as combined:
        raise _create_unknown_cost_error(combined.errors) from combined


def _create_unknown_cost_error(errors: Sequence[LoadgenError]) -> EstimateError:
    """Return the error for a cost that could not be computed, with the messages of the reasons."""
    reasons = "; ".join(error.message for error in errors)
    return EstimateError(f"the cost is not known: {reasons}")


def _divide_by_count(rate: Interval, count: int) -> Interval:
    """Return a rate per unit, such as per GPU, from the rate of so many units together."""
    return rate.map(lambda rate_per_s: rate_per_s * (1 / count))


def _seconds_to_ns(seconds: float) -> float:
    """Convert seconds to nanoseconds."""
    return seconds * NS_PER_S


def _to_relative_change(ratio: float) -> float:
    """Return a ratio as a relative change: 1.2 becomes 0.2."""
    return ratio - 1
