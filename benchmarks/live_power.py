"""How often is `compare --live` wrong, and how much time does it save against two series of runs?

    python benchmarks/live_power.py [--seeds 200] [--groups 60] [--block 10] [--change 3]

Each seed draws a SIMULATED host (benchmarks/drawn.py), whose speed changes with time. A and B are
two servers on it, so that both are slower while the host is slow. The load is the same for all
methods: 20 requests per second, with 3 s of each run in which nothing is measured. Three methods
compare A with B at 99 % confidence of six latencies together (p50 and p99 of TTFT, TPOT and E2E
latency):

    live          alternating blocks in groups ABBA and BAAB, as `loadgen compare --live`
    3 + 3 runs    three runs of A, and then three of B, as `loadgen run --repeat 3` on each side
    10 + 10 runs  the same with ten runs on each side

The two series get the time of the live comparison, and 2 and 4 times as much. They are judged as
`loadgen compare` judges repeats, by Student's t, without its two further checks (blocks of time
within the runs, and Fisher's test of slow periods). These only make differences less significant,
so the series are shown as more powerful than they are.

Counted are false alarms (any of the six latencies is better or worse although A equals B), and
detected changes (TPOT p50 is worse if B is slower by --change percent).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import drawn
import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.compare.alternating_blocks import (
    BLOCKS_PER_GROUP,
    OTHER_SIDE,
    estimate_difference,
    list_groups,
)
from loadgen.compare.significance import holm_levels, p_value, subtract
from loadgen.core.analysis.within_run_variance import ScaledEstimate

RNG_STREAM = 31  # keeps random numbers apart from those that drawn.py draws with the same seed

RATE_PER_S = 20.0
# The part of each run that is not measured: until the load is steady, and until the last response
OVERHEAD_S = 3.0

# The latencies of servers on a host at its usual speed, and the noise of single requests, which is
# the standard deviation of their logarithm. They are those of benchmarks/trust_servers.py.
OUTPUT_TOKENS = 100
BASE_TTFT_S = 0.020
BASE_TPOT_S = 0.010
TTFT_SIGMA = 0.15
TPOT_SIGMA = 0.08

QUANTILES = {"p50": 0.5, "p99": 0.99}
DETECTED_METRIC = "tpot p50"  # the metric in which the change must be found
ERROR_PROBABILITY = 0.01  # of a false alarm in any of the metrics
TIME_FACTORS = (1, 2, 4)  # the time of the series, as a multiple of that of the live comparison
RUNS_PER_SIDE = (3, 10)

FloatArray = NDArray[np.float64]
# The logarithm of each metric in each run, by the name of the metric. The difference of two
# logarithms is a relative change.
LogMetrics = dict[str, FloatArray]


class Host(NamedTuple):
    """A simulated host: the kind of changes of its speed, and the seed that draws them."""

    kind: str
    seed: int


class LivePlan(NamedTuple):
    """A live comparison: its number of groups of four blocks, and the length of a block."""

    groups: int
    block_s: float

    @property
    def time_s(self) -> float:
        """The time that the comparison takes, in seconds."""
        return self.groups * BLOCKS_PER_GROUP * (self.block_s + OVERHEAD_S)


class SeriesPlan(NamedTuple):
    """A comparison of two series of runs: the runs of each, and the time for all in seconds."""

    runs_per_side: int
    time_s: float


def measure_runs(host: Host, starts_s: FloatArray, length_s: float) -> LogMetrics:
    """Return the logarithm of each metric in each run of a server on a host.

    Args:
        host: The host.
        starts_s: When the measured part of each run begins, in ascending order.
        length_s: How long the measured part lasts.
    """
    rng = np.random.default_rng([host.seed, RNG_STREAM])
    requests_per_run = int(RATE_PER_S * length_s)
    shape = (len(starts_s), requests_per_run)  # all arrays have a row per run
    send_times_in_run_s = np.sort(rng.uniform(0, length_s, shape), axis=1)
    send_times_s = starts_s[:, None] + send_times_in_run_s

    server = drawn.draw_server(host.kind, host.seed)
    factors = server.draw_run_factors(send_times_s.ravel(), rng).reshape(shape)
    ttft_s = BASE_TTFT_S * rng.lognormal(0, TTFT_SIGMA, shape) * factors
    tpot_s = BASE_TPOT_S * rng.lognormal(0, TPOT_SIGMA, shape) * factors
    e2e_s = ttft_s + (OUTPUT_TOKENS - 1) * tpot_s

    log_metrics = {}
    for latency_name, latencies_s in {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}.items():
        for quantile_name, quantile in QUANTILES.items():
            values_of_runs = np.quantile(latencies_s, quantile, axis=1)
            log_metrics[f"{latency_name} {quantile_name}"] = np.log(values_of_runs)
    return log_metrics


def estimate_live_differences(
    log_metrics: LogMetrics, seed: int, groups: int, log_change: float
) -> dict[str, ScaledEstimate]:
    """Return the estimated difference between B and A for each metric of a live comparison.

    Args:
        log_metrics: The metrics of the blocks, in the order of time, measured on equal servers.
        seed: Decides whether the first group has the order ABBA or BAAB.
        groups: The number of groups.
        log_change: How much slower B is, as a logarithm.
    """
    is_side_b = np.array(
        [block.side == OTHER_SIDE for group in list_groups(seed, groups) for block in group.blocks]
    ).reshape(groups, BLOCKS_PER_GROUP)

    estimates = {}
    for name, values_of_blocks in log_metrics.items():
        values_by_group = values_of_blocks.reshape(groups, BLOCKS_PER_GROUP)
        values_by_group = values_by_group + log_change * is_side_b
        # Half of the blocks of a group are B, so the mean of B minus that of A is twice this mean.
        signed_values = np.where(is_side_b, values_by_group, -values_by_group)
        group_differences = 2 * signed_values.mean(axis=1)
        estimates[name] = estimate_difference(group_differences)

    return estimates


def estimate_series_differences(
    log_metrics: LogMetrics, log_change: float
) -> dict[str, ScaledEstimate]:
    """Return the estimated difference between B and A for each metric of two series of runs.

    `log_metrics` has the runs in the order of time, measured on equal servers: the first half are
    runs of A, and the second half runs of B. `log_change` is how much slower B is, as a logarithm.
    """
    estimates = {}
    for name, values_of_runs in log_metrics.items():
        values_a, values_b = np.split(values_of_runs, 2)
        mean_a = estimate_mean(values_a)
        mean_b = estimate_mean(values_b + log_change)
        estimates[name] = subtract(mean_a, mean_b, is_pooled=True)

    return estimates


def estimate_mean(values: FloatArray) -> ScaledEstimate:
    """Return the mean of repeated runs with its standard error and degrees of freedom."""
    standard_error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return ScaledEstimate(float(values.mean()), standard_error, len(values) - 1)


def find_significant_metrics(estimates: Mapping[str, ScaledEstimate]) -> set[str]:
    """Return the metrics that differ significantly, by Holm's method.

    ERROR_PROBABILITY is the probability that any metric is returned although none differs.
    """
    p_values = [p_value(estimate) for estimate in estimates.values()]
    levels = holm_levels(p_values, ERROR_PROBABILITY)
    return {
        name
        for name, metric_p_value, level in zip(estimates, p_values, levels, strict=True)
        if metric_p_value <= level
    }


class ComparisonOutcome(NamedTuple):
    """What a method said on one host.

    Attributes:
        has_false_alarm: Whether any metric of two equal servers differs.
        has_detected: Whether the slower server was found to be slower.
    """

    has_false_alarm: bool
    has_detected: bool


def judge_estimates(
    equal: Mapping[str, ScaledEstimate], changed: Mapping[str, ScaledEstimate]
) -> ComparisonOutcome:
    """Return the outcome of a method from its estimates for equal and for changed servers."""
    is_b_slower = changed[DETECTED_METRIC].value > 0
    is_significant = DETECTED_METRIC in find_significant_metrics(changed)
    return ComparisonOutcome(
        has_false_alarm=bool(find_significant_metrics(equal)),
        has_detected=is_b_slower and is_significant,
    )


def compare_live(host: Host, plan: LivePlan, log_change: float) -> ComparisonOutcome:
    """Return what a live comparison says on a host, with B equal to A and with B slower.

    `log_change` is how much slower B is, as a logarithm.
    """
    block_numbers = np.arange(plan.groups * BLOCKS_PER_GROUP, dtype=np.float64)
    starts_s = block_numbers * (plan.block_s + OVERHEAD_S)
    log_metrics = measure_runs(host, starts_s, plan.block_s)
    return judge_estimates(
        equal=estimate_live_differences(log_metrics, host.seed, plan.groups, 0.0),
        changed=estimate_live_differences(log_metrics, host.seed, plan.groups, log_change),
    )


def compare_series(host: Host, plan: SeriesPlan, log_change: float) -> ComparisonOutcome:
    """Return what two series of runs say on a host, with B equal to A and with B slower.

    The time of the comparison is divided equally among the runs, one after the other without
    pauses. `log_change` is how much slower B is, as a logarithm.
    """
    run_count = 2 * plan.runs_per_side
    time_of_run_s = plan.time_s / run_count
    starts_s = np.arange(run_count, dtype=np.float64) * time_of_run_s
    log_metrics = measure_runs(host, starts_s, time_of_run_s - OVERHEAD_S)
    return judge_estimates(
        equal=estimate_series_differences(log_metrics, 0.0),
        changed=estimate_series_differences(log_metrics, log_change),
    )


class MethodOutcomes:
    """The outcomes of one method of comparison on all hosts.

    `name` is the name of the method, and `time_s` the time that a comparison takes.
    """

    def __init__(self, name: str, time_s: float) -> None:
        self.name = name
        self.time_s = time_s
        self._hosts: list[Host] = []
        self._outcomes: list[ComparisonOutcome] = []

    def add(self, host: Host, outcome: ComparisonOutcome) -> None:
        """Add the outcome on a host."""
        self._hosts.append(host)
        self._outcomes.append(outcome)

    def format_row(self, live_time_s: float) -> list[str]:
        """Return the row of the method: its time, its false alarms and the detected changes.

        `live_time_s` is the time of the live comparison, with which the time is compared.
        """
        false_alarm_fraction = np.mean([outcome.has_false_alarm for outcome in self._outcomes])
        detected_fraction = np.mean([outcome.has_detected for outcome in self._outcomes])
        return [
            self.name,
            f"{self.time_s / 60:.0f} min",
            f"{self.time_s / live_time_s:g}",
            f"{false_alarm_fraction:.1%}",
            f"{detected_fraction:.0%}",
        ]

    def format_kinds_row(self, kinds: Sequence[str], live_time_s: float) -> list[str]:
        """Return the detected fraction of the changes on each kind of host, in a row."""
        cells = [self.name, f"{self.time_s / live_time_s:g}"]
        for kind in kinds:
            has_detected = [
                outcome.has_detected
                for host, outcome in zip(self._hosts, self._outcomes, strict=True)
                if host.kind == kind
            ]
            cells.append(f"{np.mean(has_detected):.0%}")
        return cells


def measure_live(hosts: Sequence[Host], plan: LivePlan, log_change: float) -> MethodOutcomes:
    """Return the outcomes of live comparisons, one on each host."""
    outcomes = MethodOutcomes("live", plan.time_s)
    for host in hosts:
        outcomes.add(host, compare_live(host, plan, log_change))
    return outcomes


def measure_series(hosts: Sequence[Host], plan: SeriesPlan, log_change: float) -> MethodOutcomes:
    """Return the outcomes of comparisons of two series of runs, one on each host."""
    name = f"{plan.runs_per_side} + {plan.runs_per_side} runs"
    outcomes = MethodOutcomes(name, plan.time_s)
    for host in hosts:
        outcomes.add(host, compare_series(host, plan, log_change))
    return outcomes


def print_tables(methods: Sequence[MethodOutcomes], live_time_s: float, change: float) -> None:
    """Print a table over all hosts, and one with the detected changes on each kind of host.

    `change` is how much slower B is, in percent.
    """
    columns = ["method", "time", "times live", "false alarms", f"{change:g} % detected"]
    print(rig.format_table(columns, [method.format_row(live_time_s) for method in methods]))

    kinds = drawn.FAMILY_MEMBERS
    print("\nDetected by kind of host:\n")
    rows = [method.format_kinds_row(kinds, live_time_s) for method in methods]
    print(rig.format_table(["method", "times live", *kinds], rows))


def main() -> None:
    """Compare servers on all hosts with each method, and print how often each one is right."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--block", type=float, default=10.0, help="length of a block in seconds")
    parser.add_argument("--change", type=float, default=3.0, help="change of B in percent")
    args = rig.parse_arguments(parser, seeds=6, groups=5)

    kinds = drawn.FAMILY_MEMBERS
    hosts = [Host(kinds[seed % len(kinds)], seed) for seed in range(args.seeds)]
    log_change = math.log1p(args.change / 100)
    live_plan = LivePlan(args.groups, args.block)

    methods = [measure_live(hosts, live_plan, log_change)]
    for runs_per_side in RUNS_PER_SIDE:
        for factor in TIME_FACTORS:
            series_plan = SeriesPlan(runs_per_side, factor * live_plan.time_s)
            methods.append(measure_series(hosts, series_plan, log_change))

    print_tables(methods, live_plan.time_s, args.change)


if __name__ == "__main__":
    main()
