"""Tables and sentences about repeats: the mean of each metric, its interval, the spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.core import format
from loadgen.render.section import Table
from loadgen.repeated.comparable_metrics import SHARE_PATHS
from loadgen.repeated.repeats import PRECISION_METRICS, RepeatedMetric, RepeatSummary

MAX_RUN_COLUMNS = 5
"""Of more runs than these, a table shows only the lowest and the highest value."""
NO_VALID_RUN = "No run is a valid measurement. Discard these means."
LOAD_POINT_METRICS = {
    "tokens.steady_output_per_s": "tokens/s",
    "ttft_ms.p50": "TTFT p50",
    "ttft_ms.p99": "TTFT p99",
    "tpot_ms.p50": "TPOT p50",
    "tpot_ms.p99": "TPOT p99",
    "e2e_ms.p50": "E2E p50",
}
"""The metrics in the table of repeated load points, by their paths, with the column names."""
LOAD_POINT_PATHS = tuple(LOAD_POINT_METRICS)
BRIEF_LOAD_POINT_PATHS = ("tokens.steady_output_per_s", "ttft_ms.p50", "tpot_ms.p50", "e2e_ms.p50")
"""The metrics of load points that a terminal shows by default."""
LOAD_POINT_UNITS = "Latencies in ms. Mean of the runs ± half of its 95 % confidence interval."
BRIEF_METRICS = (
    "ttft_ms.p50",
    "ttft_ms.p99",
    "tpot_ms.p50",
    "tpot_ms.p99",
    "e2e_ms.p50",
    "tokens.steady_output_per_s",
    "goodput.share",
)
"""The metrics that a terminal shows by default, by their paths."""


# One load


def metric_table(repeats: RepeatSummary) -> Table:
    """Return a table with a row for each metric: its mean, interval, spread, and values.

    There is a column with the value of each run. For more than MAX_RUN_COLUMNS runs, there are two
    columns instead: the lowest and the highest value.
    """
    has_many_runs = len(repeats.counted_runs) > MAX_RUN_COLUMNS
    value_columns = ("lowest", "highest") if has_many_runs else repeats.counted_runs

    rows = []
    for metric in repeats.metrics:
        values = (min(metric.values), max(metric.values)) if has_many_runs else metric.values
        value_cells = [value_text(metric, value) for value in values]
        rows.append((*_mean_cells(metric), _spread_text(metric), *value_cells))

    # The first column, with the names of the metrics, needs no heading.
    header = ("", "mean", _interval_name(repeats), "spread", *value_columns)
    return Table(header, rows)


def brief_metric_table(repeats: RepeatSummary) -> Table:
    """Return a table of the key metrics with their means and intervals."""
    rows = [_mean_cells(metric) for metric in repeats.metrics if metric.metric in BRIEF_METRICS]
    return Table(("", "mean", _interval_name(repeats)), rows)


def _interval_name(repeats: RepeatSummary) -> str:
    return f"{repeats.confidence * 100:g} % CI"


def _mean_cells(metric: RepeatedMetric) -> tuple[str, str, str]:
    """Return the name of a metric with its unit, its mean and its interval."""
    name = f"{metric.name}, {metric.unit}" if metric.unit else metric.name
    return name, value_text(metric, metric.mean), interval_text(metric) or format.NONE


def value_text(metric: RepeatedMetric, value: float | None) -> str:
    """Return a value of a metric as text, without its unit. Fractions are in %."""
    return format.percent(value) if metric.metric in SHARE_PATHS else format.quantity(value)


def interval_text(metric: RepeatedMetric) -> str:
    """Return the interval of the mean as text, for example "71.1 to 71.9", or "" if it has none."""
    if metric.low is None:
        return ""
    return f"{value_text(metric, metric.low)} to {value_text(metric, metric.high)}"


def _spread_text(metric: RepeatedMetric) -> str:
    """Return the standard deviation between runs as text."""
    if metric.spread is None:
        return format.NONE
    unit = "points" if metric.metric in SHARE_PATHS else "%"
    return f"{metric.spread * 100:.1f} {unit}"


def describe_interval(repeats: RepeatSummary) -> str:
    """Return the legend of a table of repeats, which explains its confidence intervals.

    If the load was repeated until its means were precise enough, the legend also says whether they
    became so.
    """
    if len(repeats.counted_runs) < 2:
        return "One run shows no run-to-run variation, so there is no confidence interval."

    legend = (
        "CI: confidence interval of the mean, by Student's t. Spread: standard deviation between "
        "runs. The interval covers restarts and times like those of these runs."
    )
    precision = _describe_precision(repeats)
    return f"{legend} {precision}" if precision else legend


def _describe_precision(repeats: RepeatSummary) -> str:
    """Return whether the means are as precise as requested, or "" if no precision was requested."""
    if repeats.is_precise is None or repeats.requested_precision is None:
        return ""
    verb = "are" if repeats.is_precise else "are not"
    percent = repeats.requested_precision * 100
    return f"TTFT, TPOT and E2E p50 and output tokens/s {verb} known to ±{percent:g} %."


def key_metrics(repeats: RepeatSummary) -> list[RepeatedMetric]:
    """Return the metrics for which a load is repeated: median latencies and throughput."""
    return [metric for metric in repeats.metrics if metric.metric in PRECISION_METRICS]


def headline(repeats: RepeatSummary) -> str:
    """Return the key metrics in one sentence, marked if they are simulated or INVALID."""
    return f"{_headline_mark(repeats)}{describe_repeats(repeats)}"


def _headline_mark(repeats: RepeatSummary) -> str:
    if repeats.simulated:
        return "SIMULATED: "
    return "" if repeats.valid else "INVALID: "


def describe_repeats(repeats: RepeatSummary) -> str:
    """Return the means of the key metrics in one sentence, and which runs are left out of them."""
    metrics = ", ".join(map(_describe_metric, key_metrics(repeats)))
    runs = format.counted(len(repeats.counted_runs), "run")
    sentence = f"Mean of {runs}: {metrics or 'no metric that all runs have'}."
    excluded = describe_excluded_runs(repeats)
    return f"{sentence} {excluded}" if excluded else sentence


def _describe_metric(metric: RepeatedMetric) -> str:
    """Return a metric as text, for example "TTFT p50 71.5 ms (95 % CI 71.1 to 71.9)"."""
    mean = f"{metric.name} {value_text(metric, metric.mean)} {metric.unit}".rstrip()
    interval = interval_text(metric)
    return f"{mean} ({interval})" if interval else mean


def describe_excluded_runs(repeats: RepeatSummary) -> str:
    """Return the sentence that names the INVALID runs that count in no mean, or ""."""
    if not repeats.excluded_runs:
        return ""

    runs = format.counted(len(repeats.runs), "run")
    verb = "is" if len(repeats.excluded_runs) == 1 else "are"
    names = ", ".join(repeats.excluded_runs)

    return (
        f"{len(repeats.excluded_runs)} of {runs} {verb} INVALID and left out of the means: {names}."
    )


# Several load points


def load_points_headline(repeats_by_point: Mapping[str, RepeatSummary]) -> str:
    """Return what was repeated in one sentence, after a mark for a simulation."""
    is_simulated = any(repeats.simulated for repeats in repeats_by_point.values())
    mark = "SIMULATED: " if is_simulated else ""
    return f"{mark}{describe_repeated_points(repeats_by_point)}"


def describe_repeated_points(repeats_by_point: Mapping[str, RepeatSummary]) -> str:
    """Return how many load points were repeated, and how often."""
    run_counts = [len(repeats.runs) for repeats in repeats_by_point.values()]
    points = format.counted(len(repeats_by_point), "load point")
    runs = format.counted(max(run_counts, default=0), "run")
    return f"{points} with up to {runs} each: {', '.join(repeats_by_point)}."


def load_points_table(
    repeats_by_point: Mapping[str, RepeatSummary], paths: Sequence[str] = LOAD_POINT_PATHS
) -> Table:
    """Return a table with a row for each load point, and the means of its metrics.

    A mean is followed by half the width of its confidence interval: "71.5 ± 0.4".

    Args:
        repeats_by_point: The repeats of each load point, by its name.
        paths: The paths of the metrics in `summary.json`, such as "ttft_ms.p50". They must be keys
            of LOAD_POINT_METRICS.
    """
    rows = []
    for name, repeats in repeats_by_point.items():
        metric_by_path = {metric.metric: metric for metric in repeats.metrics}
        cells = [_mean_with_half_width(metric_by_path.get(path)) for path in paths]
        rows.append((name, _describe_run_count(repeats), *cells))
    columns = [LOAD_POINT_METRICS[path] for path in paths]
    return Table(("load point", "runs", *columns), rows)


def _describe_run_count(repeats: RepeatSummary) -> str:
    """Return how many runs the means of a load point are of, and how many are INVALID."""
    if not repeats.valid:
        return f"{len(repeats.runs)} (INVALID)"
    if repeats.excluded_runs:
        return f"{len(repeats.counted_runs)} ({len(repeats.excluded_runs)} INVALID)"
    return str(len(repeats.runs))


def _mean_with_half_width(metric: RepeatedMetric | None) -> str:
    """Return a mean with half of its interval, for example "71.5 ±0.6 %"."""
    if metric is None:
        return format.NONE
    mean = value_text(metric, metric.mean)
    if metric.half_width is None:
        return mean
    return f"{mean} ±{metric.half_width * 100:.1f} %"
