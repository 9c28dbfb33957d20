"""Evaluate the terms of a contract: compute the metric of each from the records of a level's runs.

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
from loadgen.contracts.latency_estimates import (
    divide_latencies,
    estimate_latency,
    estimate_selected_quantile,
    run_quantiles,
    widen_ratio_by_runs,
)
from loadgen.contracts.load_checks import (
    EstimateError,
    LoadCheck,
    check_horizon,
    combine_load_checks,
)
from loadgen.contracts.quantile_interval import RunSeries
from loadgen.contracts.rates import (
    CountInSpan,
    batch_rates,
    count_all_tokens,
    count_good_requests,
    count_ok_requests,
    count_output_tokens,
    estimate_rate,
    first_and_last_windows,
    has_two_windows,
    meets_slo,
)
from loadgen.contracts.recorded_run import LoadedRun, MeasuredLevel, RecordedRun
from loadgen.contracts.steady_samples import (
    QUEUE_METRIC,
    QuantileQuery,
    SteadySample,
    counted_requests,
    metric_values,
    timed_values,
)
from loadgen.contracts.steady_state import TimedValues
from loadgen.contracts.tenant_fairness import combine_shares, estimate_jain_index
from loadgen.contracts.term_estimate import TermEstimate
from loadgen.contracts.terms import ContractTerm
from loadgen.core import format
from loadgen.core.analysis import fairness
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.metrics import windows
from loadgen.core.metrics.columns import OK
from loadgen.core.metrics.sections import Recovery
from loadgen.core.metrics.summary import Summary
from loadgen.core.slo import missing_metrics
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


class NodeLatency(NamedTuple):
    """The quantile of a latency at one of several nodes, with the quantile of each run there."""

    name: str
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
            horizon_s: The horizon of the contract: latencies are judged for events that recur
                within this time.
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
            EstimateError: The records do not have the metric.
        """
        runs = _select_runs(self.runs, term)
        if runs is self.runs:
            return self._evaluate_all(term)
        # The columns of the records are kept per evaluator, so the selected runs need another one.
        evaluator = TermEvaluator(
            MeasuredLevel(runs=runs),
            all_levels=self.all_levels,
            confidence=self.confidence,
            horizon_s=self.horizon_s,
            cost_function=self.cost_function,
        )
        return evaluator._evaluate_all(term)

    def _evaluate_all(self, term: ContractTerm) -> TermEstimate:
        """Return the metric of a term from all requests of the runs, in the unit of its limit.

        The estimate also gets the length of the load and its independent samples of the server. An
        estimator of a latency has set them already, for the part of the load that it used.
        """
        self._require_sound_metrics(term)
        estimate_metric = ESTIMATORS.get(term.kind, TermEvaluator.latency)
        estimate = estimate_metric(self, term)
        interval = estimate.interval.map(term.definition.limit.to_unit)
        estimate = estimate._replace(interval=interval)
        if estimate.load_s:
            return estimate
        timed_samples = [timed_values(loaded_run.columns, "e2e") for loaded_run in self.loaded_runs]
        return estimate._replace(
            load_s=steady_samples.load_length_s(timed_samples),
            effective_size=steady_samples.server_sample_size(self.runs, timed_samples),
        )

    def _require_sound_metrics(self, term: ContractTerm) -> None:
        """Raise EstimateError if the term is computed from a metric that a run withholds.

        A summary withholds a metric that it knows to be wrong, for example because token counts
        contradict each other.
        """
        other_level = self.all_levels.get(term.level, MeasuredLevel())
        for run in (*self.runs, *other_level.runs):
            for metric in _metrics_behind(term, run):
                reason = _withheld_reason(run.summary, metric, term.quantile)
                if reason:
                    raise EstimateError(f"withheld in {run.folder}: {reason}")

    def _query(self, metric: str, p: float, text: str) -> QuantileQuery:
        """Return the query for a quantile at the confidence and horizon of the contract."""
        return QuantileQuery(metric, p, self.confidence, self.horizon_s, text)

    def _ok_requests(self) -> int:
        """Return the number of ok requests of all runs."""
        return sum(run.summary.requests.ok for run in self.runs)

    # -- latencies --------------------------------------------------------------------------------

    def latency(self, term: ContractTerm) -> TermEstimate:
        """Return a quantile of a time per request or per task."""
        query = self._query(term.metric, term.quantile, f"{term.kind} {term.percentile_label}")
        latency = estimate_latency(self.loaded_runs, query, term.kind, limit_ns=term.limit)
        return _estimate_of_sample(latency.interval, latency.sample.request_count, latency.sample)

    def pooled_gaps(self, term: ContractTerm) -> TermEstimate:
        """Return a quantile of the gaps between events of all answers together.

        Gaps are correlated within a run, so each run is one value of the sample.
        """
        for run in self.runs:
            if term.kind == "itl" and run.summary.itl_ms is None:
                raise EstimateError(f"there is no ITL: {run.summary.itl_absent}")
            if not run.gaps.count:
                raise EstimateError("no answer had two events, so there are no gaps")
        run_gaps = [run.gaps.quantile(term.quantile) for run in self.runs]
        interval = intervals.replications(run_gaps, self.confidence)
        timed_samples = [timed_values(loaded_run.columns, "e2e") for loaded_run in self.loaded_runs]
        load_s = steady_samples.load_length_s(timed_samples)
        text = f"{term.kind} {term.percentile_label}"
        load_check = check_horizon(load_s, self.confidence, self.horizon_s, text)
        if load_check.is_short:
            interval = replace(interval, high=math.inf)
        return _estimate_with_check(interval, self._ok_requests(), load_check)

    def drift(self, term: ContractTerm) -> TermEstimate:
        """Return the relative change of a latency from the first window of the load to the last.

        A server with a leak becomes slower over hours, for example. The quantile is estimated in
        both windows, and their ratio becomes a change, such as 0.1 for 10 % slower.

        Raises:
            EstimateError: A run is shorter than two windows, or a window has too few requests.
        """
        spans = first_and_last_windows(self.loaded_runs, term.window_ns)
        first = self._windows_values(term.of, spans.first)
        last = self._windows_values(term.of, spans.last)
        load_s = len(self.runs) * term.window_ns / 1e9
        query = self._query(term.of, term.quantile, term.percentile_label)
        first_quantile = estimate_selected_quantile(self.runs, first, query, load_s)
        last_quantile = estimate_selected_quantile(self.runs, last, query, load_s)
        ratio = divide_latencies(
            last_quantile.interval, first_quantile.interval, "the first window"
        )
        ratio = widen_ratio_by_runs(
            ratio, run_quantiles(last, term.quantile), run_quantiles(first, term.quantile)
        )
        caveats = [
            f"in a window {quantile.load_check.sentence()} in each"
            for quantile in (first_quantile, last_quantile)
            if quantile.load_check.is_short
        ]
        sample_count = min(map(steady_samples.count_values, (first, last)))
        caveat = caveats[0] if caveats else ""
        return TermEstimate(ratio.map(_relative_change), sample_count, caveat)

    def _windows_values(self, metric: str, spans: Sequence[windows.Span]) -> RunSeries:
        """Return the values of a metric for the requests that are due in one span of each run."""
        return [
            metric_values(
                loaded_run.columns,
                metric,
                windows.is_within(loaded_run.columns["due_ns"], span),
            )
            for loaded_run, span in zip(self.loaded_runs, spans, strict=True)
        ]

    def between_nodes(self, term: ContractTerm) -> TermEstimate:
        """Return the largest relative difference of a latency between two nodes.

        All pairs of nodes are compared, so the confidence of each pair is higher than that of the
        contract: all pairs together then keep it (Bonferroni).

        Raises:
            EstimateError: There is one node, or so many requests failed at one that it has no such
                quantile.
        """
        node_count = len(self.runs[0].manifest.targets)
        if node_count < 2:
            raise EstimateError("there was one target: nothing to compare between nodes")
        pair_count = node_count * (node_count - 1) / 2
        confidence = 1 - (1 - self.confidence) / pair_count
        nodes = [self._node_latency(term, node, confidence) for node in range(node_count)]
        failed_nodes = [node.name for node in nodes if math.isinf(node.interval.value)]
        if failed_nodes:
            raise EstimateError(
                f"too many requests failed at {', '.join(failed_nodes)}: "
                f"no {term.percentile} to compare"
            )
        difference = self._largest_ratio(nodes).map(_relative_change)
        load_check = combine_load_checks([node.load_check for node in nodes])
        sample_count = min(node.sample_count for node in nodes)
        return _estimate_with_check(difference, sample_count, load_check)

    def _largest_ratio(self, nodes: Sequence[NodeLatency]) -> Interval:
        """Return the largest ratio of the latencies of two nodes, at the contract's confidence.

        The largest of several unknown values is at least the largest of their lower ends and at
        most the largest of their upper ends.
        """
        ratios = [
            widen_ratio_by_runs(
                intervals.ratio_of_intervals(first.interval, second.interval),
                first.run_quantiles,
                second.run_quantiles,
            )
            for first, second in permutations(nodes, 2)
        ]
        return Interval(
            max(ratio.value for ratio in ratios),
            max(ratio.low for ratio in ratios),
            max(ratio.high for ratio in ratios),
            self.confidence,
        )

    def _node_latency(self, term: ContractTerm, node: int, confidence: float) -> NodeLatency:
        """Return the quantile of a latency at one node, which is given by its index.

        The quantile of each run is kept too, because the interval of a comparison has to be at
        least as wide as the runs differ.
        """
        values = [
            metric_values(loaded_run.columns, term.of, loaded_run.columns["target"] == node)
            for loaded_run in self.loaded_runs
        ]
        load_s = sum(run.summary.window.steady.duration_s or 0.0 for run in self.runs)
        query = self._query(term.of, term.quantile, term.percentile_label)
        query = query._replace(confidence=confidence)
        quantile = estimate_selected_quantile(self.runs, values, query, load_s)
        name = f"node {node + 1}"
        return NodeLatency(
            name=name,
            interval=quantile.interval,
            load_check=quantile.load_check.with_prefix(name),
            run_quantiles=run_quantiles(values, term.quantile),
            sample_count=steady_samples.count_values(values),
        )

    def against_other_level(self, term: ContractTerm) -> TermEstimate:
        """Return a latency as a multiple of the same latency at another level.

        If the term is about a class of requests, it is the latency of this class at both levels.
        The other level may not have the class, for example if it is the quiet load that a mixed
        load is compared with. Then all of its requests are used.

        Raises:
            EstimateError: The other level was not run or is not valid.
        """
        other_level = self.all_levels.get(term.level, MeasuredLevel())
        if not other_level.runs or other_level.failure_reason:
            reason = other_level.failure_reason or "it was not run"
            raise EstimateError(f"there is no run of {term.level}: {reason}")
        other_runs = [
            run.only_class(term.class_name) if run.has_class(term.class_name) else run
            for run in other_level.runs
        ]
        query = self._query(term.of, term.quantile, f"{term.of} {term.percentile_label}")
        latency = estimate_latency(self.loaded_runs, query, term.of)
        other_loaded_runs = [LoadedRun(run, run.columns()) for run in other_runs]
        other_latency = estimate_latency(other_loaded_runs, query, term.of)
        load_check = combine_load_checks(
            [latency.sample.load_check, other_latency.sample.load_check.with_prefix(term.level)]
        )
        ratio = divide_latencies(latency.interval, other_latency.interval, term.level)
        sample_count = min(latency.sample.request_count, other_latency.sample.request_count)
        return _estimate_with_check(ratio, sample_count, load_check)

    # -- shares -----------------------------------------------------------------------------------

    def errors(self, _term: ContractTerm) -> TermEstimate:
        """Return the share of requests that are not ok.

        A mark is 1.0 for a request that is not ok and 0.0 for another one.
        """
        marks_of_runs = []
        for loaded_run in self.loaded_runs:
            is_error = loaded_run.columns["status"] != OK
            is_counted = counted_requests(loaded_run.columns)
            marks_of_runs.append(is_error[is_counted].astype(float))
        return self._share(marks_of_runs)

    def goodput(self, term: ContractTerm) -> TermEstimate:
        """Return the share of requests that meet the SLO, in the steady part of the load.

        If the load is too short, more requests could miss the SLO than were seen to, so the share
        has no lower end.
        """
        misses = [_slo_misses(loaded_run) for loaded_run in self.loaded_runs]
        query = self._query(QUEUE_METRIC, term.limit, f"a share of {format.percent(term.limit)}")
        sample = steady_samples.select_steady_sample(self.runs, misses, query)
        share = self._share([1 - run_misses for run_misses in sample.values])
        interval = share.interval
        if sample.load_check.is_short:
            interval = replace(interval, low=0.0)
        return _estimate_of_sample(interval, share.sample_count, sample)

    def _share(self, marks: RunSeries) -> TermEstimate:
        """Return the share of requests that are marked with 1.

        Args:
            marks: An array per run, with 0.0 or 1.0 for each request in order of time.
        """
        count = steady_samples.count_values(marks)
        if count == 0:
            raise EstimateError("no request was counted")
        run_shares = [float(run_marks.mean()) for run_marks in marks if len(run_marks)]
        interval = quantile_interval.estimate_share(marks, self.confidence)
        interval = intervals.widen_by_runs(interval, run_shares)
        interval = replace(interval, low=max(interval.low, 0.0), high=min(interval.high, 1.0))
        return TermEstimate(interval, count)

    def fairness(self, term: ContractTerm) -> TermEstimate:
        """Return Jain's index of the tenants' shares of good requests.

        The index is 1 if all tenants have the same share, and 1/n if one of n has all good
        requests. A tenant may have several classes of requests.

        Each share may be anywhere in its own interval. That all are at their ends at once is rarer
        than that one is, so the interval of the index has at least the confidence of theirs.
        """
        request_classes = self.runs[0].manifest.classes
        class_names_by_tenant = fairness.tenants_of(
            {request_class.name: request_class.tenant for request_class in request_classes}
        )
        if not class_names_by_tenant:
            raise EstimateError("all requests are of one tenant")
        goodput_by_class = {
            request_class.name: self.evaluate(
                term._replace(kind="goodput", class_name=request_class.name)
            )
            for request_class in request_classes
        }
        tenant_shares = [
            combine_shares([goodput_by_class[name] for name in class_names])
            for class_names in class_names_by_tenant.values()
        ]
        index = estimate_jain_index(tenant_shares)
        if index is None:
            raise EstimateError("no request of any tenant was good")
        estimates = list(goodput_by_class.values())
        unique_caveats = dict.fromkeys(estimate.caveat for estimate in estimates if estimate.caveat)
        return TermEstimate(
            index,
            sample_count=sum(estimate.sample_count for estimate in estimates),
            caveat="; ".join(unique_caveats),
            sufficient_load_s=max(estimate.sufficient_load_s for estimate in estimates),
        )

    # -- rates ------------------------------------------------------------------------------------

    def steady_rate(self, term: ContractTerm) -> TermEstimate:
        """Return a rate per second in steady state, per GPU if the term says so.

        What is counted, such as ok requests or output tokens, depends on the metric of the term.
        """
        rate = estimate_rate(self.loaded_runs, RATE_COUNTERS[term.metric], self.confidence)
        interval = rate.interval
        if term.requires("gpus"):
            gpus = self.runs[0].summary.target.gpus
            if not gpus:
                raise EstimateError("nobody says how many GPUs there are: --gpus")
            per_gpu = 1 / gpus
            interval = interval.map(lambda rate_per_s: rate_per_s * per_gpu)
        return TermEstimate(interval, self._ok_requests(), rate.caveat)

    def sustained(self, term: ContractTerm) -> TermEstimate:
        """Return the rate of ok requests in the last window as a share of that in the first.

        The interval comes from the rates in short batches of each window, and is at least as wide
        as the ratios of the single runs differ.
        """
        spans = first_and_last_windows(self.loaded_runs, term.window_ns)
        first_rates = batch_rates(self.loaded_runs, spans.first, count_ok_requests)
        last_rates = batch_rates(self.loaded_runs, spans.last, count_ok_requests)
        ratio = intervals.ratio(last_rates, first_rates, level=self.confidence)
        ratio = widen_ratio_by_runs(
            ratio, self._mean_of_each_run(last_rates), self._mean_of_each_run(first_rates)
        )
        return TermEstimate(ratio, self._ok_requests())

    def _mean_of_each_run(self, rates: Sequence[float]) -> list[float]:
        """Return the mean rate of each run from the rates of all runs, run after run.

        Each run has the same number of rates.
        """
        run_means: list[float] = np.array(rates).reshape(len(self.runs), -1).mean(axis=1).tolist()
        return run_means

    def energy(self, term: ContractTerm) -> TermEstimate:
        """Return the energy per output token or ok request.

        Its interval is that of the power, by its reading error, divided by that of the rate.
        """
        metric = ENERGY_METRICS[term.of]
        energies = []
        run_energies = []
        for run in self.runs:
            energy = run.summary.energy
            value = None if energy is None else getattr(energy, metric.field)
            if energy is None or value is None:
                reason = energy.why if energy is not None else ""
                raise EstimateError(reason or "nothing says what the accelerators used")
            energies.append(energy)
            run_energies.append(value)
        rate = estimate_rate(self.loaded_runs, metric.counter, self.confidence)
        mean_watts = math.fsum(energy.watts or 0.0 for energy in energies) / len(energies)
        error = max((energy.error_j or 0.0) / energy.joules for energy in energies if energy.joules)
        power = Interval(
            mean_watts,
            mean_watts * max(1 - error, 0.0),
            mean_watts * (1 + error),
            self.confidence,
        )
        mean_energy = math.fsum(run_energies) / len(run_energies)
        interval = replace(intervals.ratio_of_intervals(power, rate.interval), value=mean_energy)
        interval = intervals.widen_by_runs(interval, run_energies)
        return TermEstimate(interval, self._ok_requests(), rate.caveat)

    def cost(self, term: ContractTerm) -> TermEstimate:
        """Return the cost of a thousand good requests or tasks.

        A machine costs money per hour, so the cost is that of the time in which it completes a
        thousand good requests.

        Raises:
            EstimateError: No price fits, no request was good, or the rate of good ones is not
                known.
        """
        if self.cost_function is None:
            raise EstimateError("there are no prices")
        good_rate = estimate_rate(self.loaded_runs, count_good_requests, self.confidence)
        if good_rate.caveat:
            raise EstimateError(good_rate.caveat)
        if good_rate.interval.value <= 0:
            noun = "task" if term.is_about_tasks else "request"
            raise EstimateError(f"no {noun} was good: there is no cost per good one")
        try:
            cost = self.cost_function(self.runs[0], good_rate.interval)
        except (LoadgenError, CombinedError) as error:
            errors = error.faults if isinstance(error, CombinedError) else [error]
            reasons = "; ".join(single_error.what for single_error in errors)
            raise EstimateError(f"no cost: {reasons}") from None
        if cost.currency != term.currency:
            raise EstimateError(
                f"the promise is in {term.currency}, the prices are in {cost.currency}"
            )
        return TermEstimate(cost.interval, self._ok_requests())

    # -- events -----------------------------------------------------------------------------------

    def recovery(self, _term: ContractTerm) -> TermEstimate:
        """Return the longest time until the SLO was met again after an event, in ns.

        An event is a spike of the load, the loss of a replica, or a scale-up. The metric is
        infinite if the SLO was not met again before the load ended.

        Raises:
            EstimateError: There was no event, or nothing shows when it was over.
        """
        events = [event for run in self.runs for event in run.summary.recovery]
        for event in events:
            if event.why:
                raise EstimateError(event.why)
        if not events:
            raise EstimateError(
                "there was no spike, no loss and no scale-up, or no SLO of the whole load"
            )
        recovery_times_s = [_recovery_time_s(event) for event in events]
        longest_s = Interval(
            max(time.value for time in recovery_times_s),
            max(time.low for time in recovery_times_s),
            max(time.high for time in recovery_times_s),
        )
        longest_ns = longest_s.map(lambda seconds: seconds * 1e9)
        unrecovered = [event for event in events if event.recovered_after_s is None]
        caveat = ""
        if unrecovered:
            observed = format.duration(unrecovered[0].observed_s)
            caveat = (
                f"what is seen after it ends after {observed}: a longer load behind it shows more"
            )
        return TermEstimate(longest_ns, len(events), caveat)


ESTIMATORS: dict[str, Callable[[TermEvaluator, ContractTerm], TermEstimate]] = {
    **dict.fromkeys(pooled_metrics(), TermEvaluator.pooled_gaps),
    **dict.fromkeys(("task_time", "task_wait", "task_longest_wait"), TermEvaluator.latency),
    "drift": TermEvaluator.drift,
    "between_nodes": TermEvaluator.between_nodes,
    **dict.fromkeys(("against", "slowdown"), TermEvaluator.against_other_level),
    "errors": TermEvaluator.errors,
    **dict.fromkeys(("goodput", "task_goodput"), TermEvaluator.goodput),
    "fairness": TermEvaluator.fairness,
    **dict.fromkeys((*RATE_COUNTERS, "tasks", "good_tasks"), TermEvaluator.steady_rate),
    "sustained": TermEvaluator.sustained,
    "energy": TermEvaluator.energy,
    **dict.fromkeys(("cost", "task_cost"), TermEvaluator.cost),
    "recovery": TermEvaluator.recovery,
}
"""Keyword -> how its metric is estimated. Keywords that are not here are latencies."""


def _select_runs(runs: tuple[RecordedRun, ...], term: ContractTerm) -> tuple[RecordedRun, ...]:
    """Return the runs, reduced to the requests or tasks that a term is about.

    For a term about all requests it is the same object.
    """
    if term.class_name:
        runs = tuple(run.only_class(term.class_name) for run in runs)
    if term.is_about_tasks:
        runs = tuple(run.as_tasks() for run in runs)
    runs_with_windows = tuple(run for run in runs if has_two_windows(run, term.window_ns))
    if not runs_with_windows or len(runs_with_windows) == len(runs):
        return runs
    # The first run of a validation that was extended may have been shorter than two windows.
    return runs_with_windows


def _metrics_behind(term: ContractTerm, run: RecordedRun) -> list[str]:
    """Return the metrics of requests that a term is computed from in a run.

    Raises:
        EstimateError: The package of a metric in the SLO is not installed.
    """
    if not term.requires("slo") and not term.requires("task_slo"):
        metric = term.of or term.metric
        return ["tokens" if metric in TOKEN_METRICS else metric]
    slo = run.manifest.slo
    if slo is None:
        return []
    missing_reasons = missing_metrics([slo])
    if missing_reasons:
        raise EstimateError("; ".join(missing_reasons.values()))
    # Pooled gaps are not judged per request.
    return [slo_term.metric for slo_term in slo.terms if slo_term.metric not in pooled_metrics()]


def _withheld_reason(summary: Summary, metric: str, p: float) -> str:
    """Return why a quantile of a metric is withheld, or "" if it is not.

    A quantile that a summary does not have is withheld with the next higher one that it has.
    """
    statistic = "mean"
    if p > 0:  # 0 stands for a term without a quantile
        higher_quantiles = [name for name, share in QUANTILES if share >= p]
        statistic = higher_quantiles[0] if higher_quantiles else "mean"
    return summary.withheld_reason(metric, statistic)


def _estimate_of_sample(
    interval: Interval, request_count: int, sample: SteadySample
) -> TermEstimate:
    """Return the estimate from a steady sample, with the caveat of its shortage.

    The caveat says why the load is too short for an interval that is bounded on both sides, if it
    is.
    """
    estimate = _estimate_with_check(interval, request_count, sample.load_check)
    return estimate._replace(
        load_part=sample.load_part, load_s=sample.load_s, effective_size=sample.effective_size
    )


def _estimate_with_check(
    interval: Interval, sample_count: int, load_check: LoadCheck
) -> TermEstimate:
    """Return an estimate whose caveat says why the load is too short, if it is."""
    return TermEstimate(
        interval, sample_count, load_check.sentence(), load_check.known_sufficient_load_s
    )


def _slo_misses(loaded_run: LoadedRun) -> TimedValues:
    """Return 1.0 for each request that misses the SLO of its run and 0.0 for each that meets it."""
    run, columns = loaded_run
    mask = counted_requests(columns, run.manifest.slo)
    return steady_samples.order_by_due_time(
        columns, mask, (~meets_slo(run, columns)).astype(np.float64)
    )


def _recovery_time_s(event: Recovery) -> Interval:
    """Return the time until the SLO was met again, as uncertain as the time between requests.

    The SLO is only observed when a request ends. If it was not met again, the time is longer than
    what was observed.
    """
    if event.recovered_after_s is None:
        return Interval(math.inf, event.observed_s, math.inf)
    if event.recovered_after_s == 0:
        return Interval(0.0, 0.0, 0.0)
    low = max(event.recovered_after_s - event.resolution_s, 0.0)
    return Interval(event.recovered_after_s, low, event.recovered_after_s + event.resolution_s)


def _relative_change(ratio: float) -> float:
    """Return a ratio as a relative change: 1.2 becomes 0.2."""
    return ratio - 1
