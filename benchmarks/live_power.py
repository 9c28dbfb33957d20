"""How often is `compare --live` wrong, and how much time does it save against two series of runs?

    python benchmarks/live_power.py [--seeds 200] [--groups 60] [--block 10] [--change 3]

Each seed is a SIMULATED host of the family in benchmarks/drawn.py, whose speed changes with time. A
and B are two servers on it, so that both are slower while the host is slow. The load is the same
for all methods: 20 requests per second, with 3 s before and after each run in which nothing is
measured. Three methods compare A with B at 99 % confidence of six latencies together (p50 and p99
of TTFT, TPOT and E2E latency):

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

RATE_PER_S = 20.0
OVERHEAD_S = 3.0
"""Time of a run that is not measured: until the load is steady, and until the last response."""

RISK = 0.01
OUTPUT_TOKENS = 100
BASE_TTFT_S = 0.020
BASE_TPOT_S = 0.010
TTFT_NOISE = 0.15
TPOT_NOISE = 0.08
"""The server and the noise of single requests, as in benchmarks/trust.py."""

QUANTILES = {"p50": 0.5, "p99": 0.99}
DETECTED_METRIC = "tpot p50"
TIME_FACTORS = (1, 2, 4)
RUNS_PER_SIDE = (3, 10)

Values = NDArray[np.float64]
MetricValues = dict[str, Values]
"""The logarithm of each metric in each run, by the name of the metric."""


class Method(NamedTuple):
    """A way to compare two servers: its name, and the time that it takes in seconds."""

    name: str
    time_s: float


class Counts(NamedTuple):
    """Whether one comparison raised a false alarm, and whether it detected the change."""

    has_false_alarm: bool
    has_detected: bool


def measure_runs(member: str, seed: int, starts_s: Values, length_s: float) -> MetricValues:
    """Return the metrics of runs that begin at these times on one host.

    Args:
        member: The member of the family.
        seed: Draws the host and the requests.
        starts_s: When the measured part of each run begins, in ascending order.
        length_s: How long it lasts.
    """
    rng = np.random.default_rng([seed, 31])
    shape = (len(starts_s), int(RATE_PER_S * length_s))
    due_s = np.sort(rng.uniform(0, length_s, shape), axis=1) + starts_s[:, None]
    host = drawn.draw_server(member, seed)
    slowness = drawn.draw_slowness(host, due_s.ravel(), rng, long_run=False).reshape(shape)

    ttft_s = BASE_TTFT_S * rng.lognormal(0, TTFT_NOISE, shape) * slowness
    tpot_s = BASE_TPOT_S * rng.lognormal(0, TPOT_NOISE, shape) * slowness
    e2e_s = ttft_s + (OUTPUT_TOKENS - 1) * tpot_s

    latencies_s = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}
    return {
        f"{metric} {name}": np.log(np.quantile(values_s, quantile, axis=1))
        for metric, values_s in latencies_s.items()
        for name, quantile in QUANTILES.items()
    }


def compare_live(
    values: MetricValues, seed: int, groups: int, log_change: float
) -> dict[str, ScaledEstimate]:
    """Return the estimates of a live comparison, of blocks in the order of time."""
    is_other_side = np.array(
        [block.side == OTHER_SIDE for group in list_groups(seed, groups) for block in group.blocks]
    ).reshape(groups, BLOCKS_PER_GROUP)

    estimates = {}
    for metric, values_of_blocks in values.items():
        by_group = values_of_blocks.reshape(groups, BLOCKS_PER_GROUP)
        changed = by_group + log_change * is_other_side
        # Half of the blocks of a group are B, so the mean of B minus that of A is twice this mean.
        differences = 2 * np.where(is_other_side, changed, -changed).mean(axis=1)
        estimates[metric] = estimate_difference(differences)

    return estimates


def compare_series(values: MetricValues, log_change: float) -> dict[str, ScaledEstimate]:
    """Return the estimates of two series of runs: the first half is A, and the second half B."""
    estimates = {}
    for metric, values_of_runs in values.items():
        first, other = np.split(values_of_runs, 2)
        estimates[metric] = subtract(
            _estimate_mean(first), _estimate_mean(other + log_change), is_pooled=True
        )

    return estimates


def _estimate_mean(values: Values) -> ScaledEstimate:
    """Return the mean of repeats with its standard error."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return ScaledEstimate(float(values.mean()), error, len(values) - 1)


def list_significant(estimates: Mapping[str, ScaledEstimate]) -> set[str]:
    """Return the metrics that differ, by the method of Holm at the risk of all together."""
    p_values = [p_value(estimate) for estimate in estimates.values()]
    levels = holm_levels(p_values, RISK)
    return {
        metric for metric, p, level in zip(estimates, p_values, levels, strict=True) if p <= level
    }


def count_live(member: str, seed: int, groups: int, block_s: float, log_change: float) -> Counts:
    """Return the outcome of a live comparison on one host."""
    starts_s = np.arange(groups * BLOCKS_PER_GROUP, dtype=np.float64) * (block_s + OVERHEAD_S)
    values = measure_runs(member, seed, starts_s, block_s)
    equal = compare_live(values, seed, groups, 0.0)
    changed = compare_live(values, seed, groups, log_change)
    return _count(equal, changed)


def count_series(
    member: str, seed: int, runs_per_side: int, time_s: float, log_change: float
) -> Counts:
    """Return the outcome of two series of runs on one host, which take `time_s` together."""
    time_of_run_s = time_s / (2 * runs_per_side)
    starts_s = np.arange(2 * runs_per_side, dtype=np.float64) * time_of_run_s
    values = measure_runs(member, seed, starts_s, time_of_run_s - OVERHEAD_S)
    return _count(compare_series(values, 0.0), compare_series(values, log_change))


def _count(equal: Mapping[str, ScaledEstimate], changed: Mapping[str, ScaledEstimate]) -> Counts:
    """Return whether equal sides differ, and whether a slower side is found to be slower."""
    has_right_sign = changed[DETECTED_METRIC].value > 0
    return Counts(
        has_false_alarm=bool(list_significant(equal)),
        has_detected=has_right_sign and DETECTED_METRIC in list_significant(changed),
    )


def format_row(method: Method, counts: Sequence[Counts], live_time_s: float) -> list[str]:
    """Return the row of a method: its time, its false alarms and the changes that it detected."""
    detected = sum(count.has_detected for count in counts)
    return [
        method.name,
        f"{method.time_s / 60:.0f} min",
        f"{method.time_s / live_time_s:g}",
        f"{sum(count.has_false_alarm for count in counts) / len(counts):.1%}",
        f"{detected / len(counts):.0%}",
    ]


def _format_detected(counts: Sequence[Counts], members: Sequence[str], member: str) -> str:
    """Return the share of the hosts of one member on which the change was detected."""
    detected = [
        count.has_detected
        for count, member_of_host in zip(counts, members, strict=True)
        if member_of_host == member
    ]
    return f"{np.mean(detected):.0%}"


def main() -> None:
    """Print the false alarms and the detected changes of all methods, for all hosts together."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--block", type=float, default=10.0, help="length of a block in seconds")
    parser.add_argument("--change", type=float, default=3.0, help="change of B in percent")
    args = rig.parse_arguments(parser, seeds=6, groups=5)
    log_change = math.log1p(args.change / 100)
    live_time_s = args.groups * BLOCKS_PER_GROUP * (args.block + OVERHEAD_S)

    counts: dict[Method, list[Counts]] = {}
    members = [drawn.FAMILY_MEMBERS[seed % len(drawn.FAMILY_MEMBERS)] for seed in range(args.seeds)]
    for seed, member in enumerate(members):
        live = Method("live", live_time_s)
        outcome = count_live(member, seed, args.groups, args.block, log_change)
        counts.setdefault(live, []).append(outcome)
        for runs_per_side in RUNS_PER_SIDE:
            for factor in TIME_FACTORS:
                time_s = live_time_s * factor
                series = Method(f"{runs_per_side} + {runs_per_side} runs", time_s)
                outcome = count_series(member, seed, runs_per_side, time_s, log_change)
                counts.setdefault(series, []).append(outcome)

    columns = ["method", "time", "times live", "false alarms", f"{args.change:g} % detected"]
    rows = [format_row(method, outcomes, live_time_s) for method, outcomes in counts.items()]
    print(rig.format_table(columns, rows))

    print("\nDetected by member of the family:\n")
    columns = ["method", "times live", *drawn.FAMILY_MEMBERS]
    rows = []
    for method, outcomes in counts.items():
        cells = [_format_detected(outcomes, members, name) for name in drawn.FAMILY_MEMBERS]
        rows.append([method.name, f"{method.time_s / live_time_s:g}", *cells])
    print(rig.format_table(columns, rows))


if __name__ == "__main__":
    main()
