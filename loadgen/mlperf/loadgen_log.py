"""Reads MLPerf LoadGen's logs: `mlperf_log_summary.txt`, and `mlperf_log_detail.txt` next to it.

Pure except for `read_log`. A log does not identify its load, so neither does the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen.core.errors import UserError, of_reading
from loadgen.core.stats.quantiles import QUANTILES
from loadgen.formats import ForeignResult, ToolFile
from loadgen.mlperf.loadgen_spread import PERCENTILES, LoadGenSpread

SUMMARY = "mlperf_log_summary.txt"
TITLE = "MLPerf Results Summary"

MARK = ":::MLLOG "
"""The beginning of each line of the detail log, before its JSON."""

UNOFFICIAL = "MLPerf-style, unofficial"
"""The beginning of the logs that this load generator writes."""

SUMMARY_HEAD_CHARACTERS = 4000
"""The title of a summary is expected within so many characters."""

MS_PER_NS = 1e-6


class LoadGenLog(msgspec.Struct, frozen=True, kw_only=True):
    """An official log, or one of ours. Values are as written, None if the log lacks them.

    Attributes:
        unofficial: Whether this load generator wrote the log.
        sut: The system under test.
        scenario: "Server", "Offline", "SingleStream" or "MultiStream".
        valid: Whether the result is VALID.
        reasons: Why it is INVALID.
        target_qps: The requested rate.
        queries: The number of queries; in Offline, of samples.
        samples_per_s: The rate of completed samples.
        scheduled_samples_per_s: The rate of scheduled samples.
        tokens_per_s: The rate of output tokens.
        latency: The distribution of latency.
        ttft: The distribution of the time to the first token.
        tpot: The distribution of the time per output token.
        detail: The entries of the detail log by key, empty without one.
    """

    unofficial: bool
    sut: str
    scenario: str
    valid: bool
    reasons: tuple[str, ...]
    target_qps: float | None
    queries: int | None
    samples_per_s: float | None
    scheduled_samples_per_s: float | None
    tokens_per_s: float | None
    latency: LoadGenSpread | None
    ttft: LoadGenSpread | None
    tpot: LoadGenSpread | None
    detail: dict[str, Any]


def read_log(path: Path) -> LoadGenLog:
    """Return the LoadGen log in a directory or summary file.

    The detail log is read as well if it is next to the summary, under the same name with "detail"
    in place of "summary".

    Raises UserError if the file cannot be read or is no summary of LoadGen.
    """
    summary_path = path / SUMMARY if path.is_dir() else path
    try:
        summary = summary_path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            of_reading(error),
            f"cannot read a LoadGen summary: {error.strerror}",
            str(summary_path),
            f"give a {SUMMARY} or its folder",
        ) from None

    detail = ""
    detail_path = summary_path.with_name(summary_path.name.replace("summary", "detail"))
    if detail_path != summary_path and detail_path.is_file():
        detail = detail_path.read_text("utf-8", errors="replace")

    return parse_log(summary, detail, summary_path=str(summary_path))


_LINE = re.compile(r"^\s*(.+?)\s*:\s*(\S.*?)\s*$")
_PERCENTILE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) percentile (.*?)(?: \(ns\))?$")

_DISTRIBUTIONS = {
    "latency": "latency",
    "first token latency": "ttft",
    "time to output token": "tpot",
    "time per output token": "tpot",
}
"""The names of the three distributions in the logs of LoadGen 5 and 6."""

Statistics = dict[str, int | None]
"""The statistics of a distribution: "min", "max", "mean", and percentiles such as "99.9"."""


def parse_log(summary: str, detail: str = "", summary_path: str = "") -> LoadGenLog:
    """Return the result in the texts of LoadGen's two log files.

    Args:
        summary: The text of the summary log.
        detail: The text of the detail log, or "" if there is none.
        summary_path: The path of the summary log, which errors name.

    Raises:
        UserError: The summary is not LoadGen's, or has no result.
    """
    if TITLE not in summary:
        raise UserError(
            "wrong_format",
            "not a LoadGen summary",
            summary_path,
            f"give the file that LoadGen calls {SUMMARY}",
        )

    results_text, _, parameters_text = summary.partition("Test Parameters Used")
    fields, statistics = _parse_results(results_text)
    if "Result is" not in fields:
        raise UserError(
            "damaged_file",
            "the LoadGen summary is incomplete: it has no result",
            summary_path,
            "run the test again",
        )

    return _create_log(
        _ParsedLog(
            fields=fields,
            statistics=statistics,
            parameters=_parse_parameters(parameters_text),
            details=_parse_detail(detail),
            is_unofficial=summary.startswith(UNOFFICIAL),
        )
    )


class _ParsedLog(NamedTuple):
    """The parts of LoadGen's two log files.

    Attributes:
        fields: The fields of the summary by label, for example {"Result is": "VALID"}.
        statistics: The statistics of each distribution in the summary, by its name.
        parameters: The test parameters in the summary, by name.
        details: The entries of the detail log, by key.
        is_unofficial: Whether this load generator wrote the log.
    """

    fields: dict[str, str]
    statistics: dict[str, Statistics]
    parameters: dict[str, str]
    details: dict[str, Any]
    is_unofficial: bool


def _create_log(parsed: _ParsedLog) -> LoadGenLog:
    """Return a log from its parts. Offline has other labels for its rates than Server."""
    fields = parsed.fields
    statistics = parsed.statistics
    scenario = fields.get("Scenario", "").replace(" ", "")
    queries = _query_count(scenario, parsed.parameters, parsed.details)

    # The first label is that of Offline, the second one that of Server.
    samples_per_s = fields.get("Samples per second") or fields.get("Completed samples per second")
    tokens_per_s = fields.get("Tokens per second") or fields.get("Completed tokens per second")
    return LoadGenLog(
        # the test and its verdict
        unofficial=parsed.is_unofficial,
        sut=fields.get("SUT name", ""),
        scenario=scenario,
        valid=fields["Result is"] == "VALID",
        reasons=tuple(_invalid_reasons(fields, parsed.details)),
        # counts and rates
        queries=queries,
        target_qps=_parse_number(parsed.parameters.get("target_qps")),
        samples_per_s=_parse_number(samples_per_s),
        scheduled_samples_per_s=_parse_number(fields.get("Scheduled samples per second")),
        tokens_per_s=_parse_number(tokens_per_s),
        # distributions
        latency=_create_distribution(statistics.get("latency"), queries),
        ttft=_create_distribution(statistics.get("ttft"), queries),
        tpot=_create_distribution(statistics.get("tpot"), queries),
        # every entry of the detail log
        detail=parsed.details,
    )


def _parse_results(text: str) -> tuple[dict[str, str], dict[str, Statistics]]:
    """Return the fields of the summary by label, and the statistics of each distribution.

    Lines have the form "LABEL : VALUE". A label such as "99.00 percentile latency (ns)" or "Mean
    First Token latency (ns)" is a statistic of a distribution. Of a field that occurs twice, the
    first value counts.
    """
    fields: dict[str, str] = {}
    statistics: dict[str, Statistics] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue

        label, value = match.groups()
        statistic = _parse_percentile_label(label) or _parse_min_max_mean_label(label)
        if statistic is None:
            fields.setdefault(label, value)
        else:
            distribution_statistics = statistics.setdefault(statistic.distribution, {})
            distribution_statistics[statistic.name] = _parse_integer(value)

    return fields, statistics


class _StatisticLabel(NamedTuple):
    """What a line of the summary is about: a distribution such as "ttft", and a statistic of it."""

    distribution: str
    name: str


def _parse_percentile_label(label: str) -> _StatisticLabel | None:
    """Return which percentile a label of the summary is about, or None if it is about none.

    For example "99.00 percentile latency (ns)" is percentile "99" of the distribution "latency".
    The distribution is "" if it is not one of `_DISTRIBUTIONS`.
    """
    match = _PERCENTILE.fullmatch(label)
    if match is None:
        return None
    percent, distribution_name = match.groups()
    distribution = _DISTRIBUTIONS.get(distribution_name.lower(), "")
    return _StatisticLabel(distribution, f"{float(percent):g}")


def _parse_min_max_mean_label(label: str) -> _StatisticLabel | None:
    """Return which minimum, maximum or mean a label of the summary is about, or None.

    For example "Mean First Token latency (ns)" is the "mean" of the distribution "ttft".
    """
    name, _, distribution_name = label.removesuffix(" (ns)").partition(" ")
    distribution = _DISTRIBUTIONS.get(distribution_name.lower())
    if name not in ("Min", "Max", "Mean") or distribution is None:
        return None
    return _StatisticLabel(distribution, name.lower())


def _parse_parameters(text: str) -> dict[str, str]:
    """Return the test parameters by name."""
    parameters = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            parameters[match[1]] = match[2]
    return parameters


def _query_count(
    scenario: str, parameters: dict[str, str], details: Mapping[str, object]
) -> int | None:
    """Return the number of queries. In Offline, it is the number of samples of its single query."""
    queries = details.get("result_query_count")
    if scenario == "Offline":
        queries = details.get("generated_samples_per_query")
        if not queries:
            queries = _parse_integer(parameters.get("samples_per_query", ""))
    return queries if isinstance(queries, int) else None


def _invalid_reasons(fields: dict[str, str], details: Mapping[str, object]) -> Iterator[str]:
    """Yield why the result is INVALID, or nothing if it is VALID.

    The summary says which requirement was not satisfied. The detail log may have
    LoadGen's own reason as well.

    Args:
        fields: The fields of the summary by label.
        details: The entries of the detail log by key.
    """
    for label in ("Performance constraints", "Min duration", "Min queries", "Early stopping"):
        if fields.get(f"{label} satisfied", "Yes") == "NO":
            yield f"{label.lower()} not satisfied"
    reason = details.get("result_invalid_reason")
    if isinstance(reason, str) and reason.strip():
        yield reason.strip()


def _parse_detail(text: str) -> dict[str, object]:
    """Return the values of a detail log by key. If a key occurs twice, its last value counts.

    An entry is a line such as `:::MLLOG {"key": "result_validity", "value": "VALID", ...}`. LoadGen
    does not escape quotes in its texts, so a line may be no valid JSON. It is then skipped.
    """
    values: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith(MARK):
            continue

        try:
            entry = json.loads(line.removeprefix(MARK))
        except (ValueError, RecursionError):
            continue

        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            values[entry["key"]] = entry.get("value")

    return values


def _parse_integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def _parse_number(text: str | None) -> float | None:
    """Return a finite number, or None for anything else."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _create_distribution(
    statistics: Statistics | None, query_count: int | None
) -> LoadGenSpread | None:
    """Return the distribution of a metric, or None if the log has no statistics of the metric.

    The keys of percentiles are texts such as "99" and "99.9". A missing statistic is None.

    Args:
        statistics: The statistics of one distribution, in ns.
        query_count: The number of queries. If it is not known, the distribution has a count of 0.
    """
    if not statistics:
        return None

    percentile_keys = [f"{quantile * 100:g}" for quantile in PERCENTILES]
    return LoadGenSpread(
        count=query_count or 0,
        min=statistics.get("min"),
        max=statistics.get("max"),
        mean=statistics.get("mean"),
        percentiles=tuple(statistics.get(key) for key in percentile_keys),
    )


# -- the log as a result of another tool -----------------------------------------------------------


def fits(file: ToolFile) -> bool:
    """Return True if a file is a summary of LoadGen."""
    return TITLE in file.text[:SUMMARY_HEAD_CHARACTERS]


def as_result(file: ToolFile) -> ForeignResult:
    """Return the log of LoadGen in a file as the result of another tool.

    `loadgen import` and `loadgen compare` call this to compare the log with a run of this program.
    So each metric has the path that it has in summary.json, for example "ttft_ms.p99".
    """
    log = read_log(Path(file.where))
    metrics = {
        **_latency_metrics("ttft_ms", log.ttft),
        **_latency_metrics("tpot_ms", log.tpot),
        **_latency_metrics("e2e_ms", log.latency),
        **_rate_metrics(log),
    }

    load = log.scenario
    if log.target_qps:
        load = f"{log.scenario} {log.target_qps:g}/s"

    # What LoadGen calls these metrics, for tables that compare several tools.
    metric_labels = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "latency"}
    reasons = (reason.rstrip(". ") for reason in log.reasons)
    return ForeignResult(
        file=file.where,
        metrics=metrics,
        called=metric_labels,
        target=log.sut,
        load=load,
        notes=(_describe_verdict(log), *reasons),
    )


def _latency_metrics(name: str, spread: LoadGenSpread | None) -> dict[str, float]:
    """Return the statistics of a distribution in ms, by path, for example "ttft_ms.p99".

    These are the statistics that summary.json of this program has as well: the percentiles of
    `QUANTILES`, mean, minimum and maximum. Those that LoadGen does not print are left out.
    """
    if spread is None:
        return {}

    percentiles_ns = dict(zip(PERCENTILES, spread.percentiles, strict=True))
    statistics_ns = {label: percentiles_ns.get(quantile) for label, quantile in QUANTILES}
    statistics_ns |= {"mean": spread.mean, "min": spread.min, "max": spread.max}

    return {
        f"{name}.{label}": value_ns * MS_PER_NS
        for label, value_ns in statistics_ns.items()
        if value_ns is not None
    }


def _rate_metrics(log: LoadGenLog) -> dict[str, float]:
    """Return the rates and the number of queries, by their paths in summary.json.

    LoadGen waits for every query, so all of them count as successful requests. If the log has no
    rate of completed samples, the rate of the schedule takes its place.
    """
    samples_per_s = log.samples_per_s
    if samples_per_s is None:
        samples_per_s = log.scheduled_samples_per_s

    values = {
        "tokens.output_per_s": log.tokens_per_s,
        "load.completed_rps": samples_per_s,
        "requests.ok": log.queries,
    }
    return {path: float(value) for path, value in values.items() if value is not None}


def _describe_verdict(log: LoadGenLog) -> str:
    verdict = f"MLPerf {log.scenario}, {'VALID' if log.valid else 'INVALID'}"
    return f"{verdict}, unofficial" if log.unofficial else verdict
