"""Formats LoadGen's log files for our runs: `mlperf_log_summary.txt` and `mlperf_log_detail.txt`.

Pure. The detail log has every key of LoadGen 6.0.17, in its order, and no null. Both files say
"unofficial" in their first line. `loadgen_log.py` reads such files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen.mlperf import dataset, rules
from loadgen.mlperf.loadgen_spread import PERCENTILES, LoadGenSpread
from loadgen.mlperf.result import DISCLOSURE, UNRESOLVED, Check, MlperfResult
from loadgen.mlperf.rules import Test

SUMMARY = "mlperf_log_summary.txt"
DETAIL = "mlperf_log_detail.txt"

MARK = ":::MLLOG "
"""The beginning of each line of the detail log, before its JSON."""

RULE = "=" * 48

STATISTIC_COLUMNS = 20
"""The width of "Min ", "Max " or "Mean " and the spaces before the colon in LoadGen's layout."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

_ENTRIES_PATH = Path(__file__).parent.parent / "data" / "mlperf_log_detail.yaml"
_UNUSED_SETTINGS = (
    "accuracy_log_rng_seed",
    "accuracy_log_probability",
    "accuracy_log_sampling_target",
    "print_timestamps",
    "performance_issue_unique",
    "performance_issue_same",
    "performance_issue_same_index",
)
CONCATENATION_WARNING = (
    "WARNING: sample_concatenate_permutation was set to true. \n"
    "Generated samples per query might be different as the one in the setting.\n"
    "Check the generated_samples_per_query line in the detailed log for the real\n"
    "samples_per_query value"
)
"""LoadGen's own text, which it writes with this setting."""


class LogContext(NamedTuple):
    """What the logs say about a run, apart from its result.

    Attributes:
        sut: The system under test.
        version: The version of the load generator.
        started: When the run started, with a time zone.
    """

    sut: str
    version: str
    started: datetime


def create_logs(result: MlperfResult, test: Test, context: LogContext) -> dict[str, str]:
    """Return the text of both log files, by file name. Simulated systems are marked as such."""
    if result.simulated:
        context = context._replace(sut=f"SIMULATED {context.sut}")
    return {
        SUMMARY: format_summary(result, test, sut=context.sut),
        DETAIL: format_detail(result, test, context),
    }


# -- the summary log -------------------------------------------------------------------------------


def format_summary(result: MlperfResult, test: Test, *, sut: str) -> str:
    """Return the text of `mlperf_log_summary.txt` in the layout of LoadGen 6.0.17.

    It begins with the disclosure. LoadGen leaves the early-stopping text of TTFT blank when TPOT
    has failed; here the text is written.
    """
    lines = [
        *_disclosure_lines(result),
        *_heading("MLPerf Results Summary"),
        *_verdict_lines(result, sut),
        "",
        *_heading("Additional Stats"),
        *_statistics_lines(result),
        "",
        *_heading("Test Parameters Used"),
        *_parameter_lines(result, test),
        "",
        *_closing_lines(result),
    ]
    return "\n".join(lines) + "\n"


def _heading(title: str) -> list[str]:
    return [RULE, title, RULE]


def _disclosure_lines(result: MlperfResult) -> Iterator[str]:
    """Yield what LoadGen does not write: what the result is, its data set and its notes."""
    yield DISCLOSURE
    if result.simulated:
        yield "SIMULATED: no real system was measured."
    yield f"Test: {result.benchmark} {result.scenario}, limits and seeds of round {result.round}"
    yield f"Dataset: {result.dataset}"
    yield from (f"Note: {note}" for note in result.notes)


def _verdict_lines(result: MlperfResult, sut: str) -> Iterator[str]:
    """Yield the lines of the section "MLPerf Results Summary" as LoadGen writes them.

    Scripts read these lines, so their spaces before colons are LoadGen's as well.

    Args:
        result: The result.
        sut: The name of the system under test.
    """
    is_offline = result.scenario == "offline"
    yield f"SUT name : {sut}"
    yield f"Scenario : {_scenario_name(result.scenario)}"
    yield "Mode     : PerformanceOnly"
    yield from _offline_rate_lines(result) if is_offline else _server_rate_lines(result)
    yield f"Result is : {'VALID' if result.valid else 'INVALID'}"

    if not is_offline:
        yield f"  Performance constraints satisfied : {_yes_or_no(are_limits_met(result))}"

    yield f"  Min duration satisfied : {_yes_or_no(result.min_duration_met)}"
    yield f"  Min queries satisfied : {_yes_or_no(result.min_queries_met)}"
    yield f"  Early stopping satisfied: {_yes_or_no(is_early_stopping_met(result))}"

    if not result.valid:
        yield "Recommendations:"
        yield from (f" * {text}" for text in _recommendations(result))

    for check in result.checks:
        yield f"{check.metric.upper()} Early Stopping Result:"
        yield early_stopping_text(check)


def _offline_rate_lines(result: MlperfResult) -> Iterator[str]:
    """Yield LoadGen's lines of the rates of an Offline test."""
    yield f"Samples per second: {_six_digits(result.completed_samples_per_s)}"
    yield f"Tokens per second: {_six_digits(result.completed_tokens_per_s)}"


def _server_rate_lines(result: MlperfResult) -> Iterator[str]:
    """Yield LoadGen's lines of the rates of a Server or Interactive test."""
    yield f"Completed samples per second    : {_two_decimals(result.completed_samples_per_s)}"
    yield f"Completed tokens per second: {_two_decimals(result.completed_tokens_per_s)}"


def _statistics_lines(result: MlperfResult) -> Iterator[str]:
    """Yield the lines of the section "Additional Stats": the distributions of latency.

    LoadGen limits TTFT and TPOT in Server and Interactive only, so Offline has just the latency of
    whole responses. Scripts read these lines, so they repeat the irregular labels and spaces of
    LoadGen, which calls TPOT "Time per Output Token" and "time to output token".
    """
    if result.ttft is None or result.tpot is None:
        yield from _distribution_lines(result.latency, "latency (ns)")
        yield ""
        return

    yield f"Scheduled samples per second : {_two_decimals(result.scheduled_samples_per_s)}"
    yield from _distribution_lines(result.latency, "latency (ns)")
    yield ""
    completed_rate = _two_decimals(result.completed_tokens_per_s)
    yield f"Completed tokens per second                 : {completed_rate}"
    yield from _distribution_lines(
        result.ttft, "First Token latency (ns)", percentile_label="first token latency (ns)"
    )
    yield ""
    yield from _distribution_lines(
        result.tpot, "Time per Output Token (ns)", percentile_label="time to output token (ns)"
    )


def _parameter_lines(result: MlperfResult, test: Test) -> Iterator[str]:
    """Yield the lines of the section "Test Parameters Used", in LoadGen's order.

    A maximum of 0 stands for no maximum. An Offline test has one query, which has all samples.
    """
    is_offline = test.scenario == "offline"
    yield f"samples_per_query : {_samples_per_query(result, test)}"
    yield f"target_qps : {_six_digits(result.target_qps)}"
    yield f"ttft_latency (ns): {test.ttft_ns or 0}"
    yield f"tpot_latency (ns): {test.tpot_ns or 0}"
    yield f"max_async_queries : {1 if is_offline else 0}"
    yield f"min_duration (ms): {test.min_duration_ns // NS_PER_MS}"
    yield "max_duration (ms): 0"
    yield f"min_query_count : {1 if is_offline else test.min_queries}"
    yield "max_query_count : 0"
    yield f"qsl_rng_seed : {test.seeds.qsl}"
    yield f"sample_index_rng_seed : {test.seeds.sample_index}"
    yield f"schedule_rng_seed : {test.seeds.schedule}"
    yield from (f"{name} : 0" for name in _UNUSED_SETTINGS)
    yield f"performance_sample_count : {test.samples}"
    yield f"accuracy_sample_count : {test.samples}"
    yield CONCATENATION_WARNING


def _closing_lines(result: MlperfResult) -> Iterator[str]:
    """Yield the last lines of the summary: three that LoadGen does not write, warnings, errors.

    The three lines are about responses of one token, the rate of the full run, and the limits of
    MLPerf's submission checker.
    """
    full_rate = _six_digits(result.full_run_tokens_per_s)
    yield f"Replies of one token (counted, left out of TPOT): {result.one_token_replies}"
    yield f"Full run: {full_rate} tokens per second until the last completion"
    yield checker_text(result)
    yield ""
    yield _count_line(len(result.warnings), "warning", "warnings")
    yield from (f" * {text}" for text in result.warnings)
    yield ""
    yield _count_line(len(result.errors), "ERROR", "ERRORS")
    yield from (f" * {text}" for text in result.errors)


def checker_text(result: MlperfResult) -> str:
    """Return whether the latency limits of MLPerf's submission checker are met, as a sentence.

    The submission checker is MLCommons' program that accepts or refuses official results. It
    requires that TTFT and TPOT are below their limits. Nothing else that it requires is checked
    here, and the sentence says so.
    """
    if not result.checks:
        return (
            "Submission checker: it has no latency limit in Offline; "
            "none of its other checks was made"
        )

    outcomes = []
    for check in result.checks:
        outcome = "passes" if check.is_below_limit else "fails"
        limit = f"p99 < {check.limit_ns / NS_PER_MS:g} ms"
        outcomes.append(f"{check.metric.upper()} {outcome} ({limit})")

    return f"Submission checker: {', '.join(outcomes)}; none of its other checks was made"


def _count_line(count: int, singular: str, plural: str) -> str:
    """Return LoadGen's line about a number of warnings or errors.

    For example "2 warnings encountered. See detailed log." or "No errors encountered during test."
    """
    if not count:
        return f"No {plural.lower()} encountered during test."
    return f"{count} {singular if count == 1 else plural} encountered. See detailed log."


def _samples_per_query(result: MlperfResult, test: Test) -> int:
    """Return LoadGen's setting, before an Offline query is filled up to whole passes."""
    if test.scenario != "offline":
        return 1
    if result.target_qps is None:
        return result.queries
    return rules.offline_expected(test, result.target_qps)


def _distribution_lines(
    spread: LoadGenSpread, label: str, *, percentile_label: str | None = None
) -> Iterator[str]:
    """Yield the lines of a distribution in LoadGen's layout: minimum, maximum, mean, percentiles.

    For example "Mean latency (ns)               : 812345" and
    "99.00 percentile latency (ns)   : 934567".

    Args:
        spread: The distribution, in ns.
        label: Its label in the lines of the minimum, maximum and mean.
        percentile_label: Its label in the lines of the percentiles, if it is another one.
    """
    # The colons of minimum, maximum and mean are below each other, behind a column of this width.
    label_width = len(label) + STATISTIC_COLUMNS
    statistics = (("Min", spread.min), ("Max", spread.max), ("Mean", spread.mean))
    for statistic, value_ns in statistics:
        padded_label = f"{statistic} {label}".ljust(label_width)
        yield f"{padded_label}: {_integer_text(value_ns)}"

    # Each percentile has three spaces before its colon instead.
    for quantile, value_ns in zip(PERCENTILES, spread.percentiles, strict=True):
        percent = f"{quantile * 100:.2f}"
        yield f"{percent} percentile {percentile_label or label}   : {_integer_text(value_ns)}"


def early_stopping_text(check: Check) -> str:
    """Return LoadGen's early-stopping text for one limit."""
    if check.early_stopping_met:
        return " * Run successful."
    return (
        f" * Run unsuccessful.\n * Processed {check.query_count} queries.\n"
        f" * Would need to run at least {check.missing_queries} more queries,\n"
        " with the run being successful if every additional\n query were under latency."
    )


def are_limits_met(result: MlperfResult) -> bool:
    """Return True if every percentile is within its limit."""
    return all(check.is_within_limit for check in result.checks)


def is_early_stopping_met(result: MlperfResult) -> bool:
    """Return True if early stopping passes for every limit."""
    return all(check.early_stopping_met for check in result.checks)


def _recommendations(result: MlperfResult) -> Iterator[str]:
    """Yield LoadGen's texts about what to change in a test that is INVALID.

    They are LoadGen's own, with their spelling, because scripts compare them.
    """
    for check in result.checks:
        if not check.is_within_limit:
            yield f"{check.metric.upper()} constrain not met: Reduce target QPS to improve latency."

    if not result.min_duration_met:
        if result.scenario == "offline":
            yield "Increase expected QPS so the loadgen pre-generates a larger (coalesced) query."
        else:
            yield "Increase the target QPS so the loadgen pre-generates more queries."

    if not result.min_queries_met or result.resolved < result.queries:
        yield (
            "The test exited early, before enough queries were issued.\n"
            "   See the detailed log for why this may have occurred."
        )


# -- the detail log --------------------------------------------------------------------------------

Entry = tuple[str, Any]
"""An entry of the detail log: its key and its value."""

EntryRow = list[Any]
"""A row of the packaged table of entries: [key, value], or [key, value, scenario].

A row with a scenario applies to that scenario only. A value that begins with `$` is the name of one
of the values that `_entry_values` returns; any other value is written as it is.
"""


def format_detail(result: MlperfResult, test: Test, context: LogContext) -> str:
    """Return the text of `mlperf_log_detail.txt`: one `:::MLLOG {json}` per line."""
    entries = _detail_entries(result, test, context)
    lines = [_entry_line(number, key, value) for number, (key, value) in enumerate(entries, 1)]
    return "\n".join(lines) + "\n"


def _entry_line(line_number: int, key: str, value: object) -> str:
    """Return a line of the detail log: a mark, and JSON in LoadGen's format.

    LoadGen writes which line of its source code has logged the entry. Here this is the number of
    the line in the log itself.
    """
    metadata = {
        "is_error": key.startswith("error_"),
        "is_warning": key.startswith("warning_"),
        "file": "log_files.py",
        "line_no": line_number,
        "pid": 0,
        "tid": 0,
    }

    entry = {
        "key": key,
        "value": value,
        "time_ms": 0.0,
        "namespace": "mlperf::logging",
        "event_type": "POINT_IN_TIME",
        "metadata": metadata,
    }
    return MARK + json.dumps(entry)


def _detail_entries(result: MlperfResult, test: Test, context: LogContext) -> Iterator[Entry]:
    """Yield the entries of the detail log in LoadGen's order.

    Most of them are rows of the packaged table. Warnings, errors and the statistics of latencies
    are added, because their number or their names depend on the result.
    """
    table = _load_entry_table()
    values = _entry_values(result, test, context)
    scenario = "offline" if test.scenario == "offline" else "server"
    yield from _table_entries(table["begin"], values, scenario)
    yield from (("warning_generic_message", warning) for warning in result.warnings)
    yield from (("error_runtime", error) for error in result.errors)
    yield from _table_entries(table["results"], values, scenario)
    yield from _distribution_entries(result)
    yield "num_errors", len(result.errors)


def _table_entries(
    rows: list[EntryRow], values: Mapping[str, object], scenario: str
) -> Iterator[Entry]:
    """Yield the log entries that a table describes, with their values for this result.

    A row is [key, value] or [key, value, scenario]. For example, ["effective_min_query_count",
    "$min_queries", "server"] is an entry of Server tests only, whose value is
    `values["min_queries"]`. Entries whose value is None are left out.

    Args:
        rows: The rows of the table.
        values: The values to which rows refer by a name after `$`.
        scenario: "server" or "offline".
    """
    for key, value, *scenarios in rows:
        applies_to_scenario = not scenarios or scenario in scenarios
        if not applies_to_scenario:
            continue
        is_reference = isinstance(value, str) and value.startswith("$")
        entry_value = values[value.removeprefix("$")] if is_reference else value
        if entry_value is not None:
            yield key, entry_value


@functools.cache
def _load_entry_table() -> dict[str, list[EntryRow]]:
    """Return the packaged table of entries: the rows of each part of the log, by its name."""
    return msgspec.yaml.decode(_ENTRIES_PATH.read_bytes(), type=dict[str, list[EntryRow]])


def _entry_values(result: MlperfResult, test: Test, context: LogContext) -> dict[str, object]:
    """Return the values that the table of entries refers to, by name."""
    return {
        **_run_values(result, test, context),
        **_setting_values(result, test),
        **_verdict_values(result),
    }


def _run_values(result: MlperfResult, test: Test, context: LogContext) -> dict[str, object]:
    """Return the values of the detail log about the run: versions, data set, times and queries.

    The table `mlperf_log_detail.yaml` has the entries of the log in LoadGen's order, and refers to
    these values by their names.
    """
    start = context.started.astimezone(UTC)
    end = start + timedelta(seconds=_full_run_s(result))

    # The name of a data set can have details: "open_orca.parquet, 24,576 of 24,576 rows".
    dataset_name = result.dataset.partition(",")[0]
    has_unresolved = result.resolved < result.queries  # queries that never completed
    unresolved_note = f"a latency of {UNRESOLVED} ns stands for a query that never completed"

    return {
        "version": f"unofficial: {context.version}",
        "build_note": "unofficial: not a build of LoadGen",
        "disclosure": DISCLOSURE,
        "dataset": f"Dataset: {result.dataset}",
        "submission_checker_text": checker_text(result),
        "started": f"{start:%Y-%m-%dT%H:%M:%SZ}",
        "sut": context.sut,
        "qsl_name": dataset_name,  # QSL is LoadGen's "query sample library"
        "loaded_set": dataset.loaded_set(test),  # the samples in the order of loading
        "query_count": result.queries,
        "schedule_duration_ns": _generated_duration_ns(result, test),
        "unresolved_note": unresolved_note if has_unresolved else None,
        "power_begin": _power_time(start),
        "power_end": _power_time(end),
    }


def _power_time(time: datetime) -> str:
    """Return a time in the format of LoadGen's entries for power meters, in milliseconds."""
    return f"{time:%m-%d-%Y %H:%M:%S}.{time.microsecond // 1000:03d}"


def _generated_duration_ns(result: MlperfResult, test: Test) -> int:
    """Return the length of the schedule that LoadGen would generate."""
    if not result.target_qps:
        return round(result.scheduled_s * NS_PER_S)
    if test.scenario == "offline":
        return int(NS_PER_S / result.target_qps)
    return rules.create_schedule(test, result.target_qps).end_ns


def _setting_values(result: MlperfResult, test: Test) -> dict[str, object]:
    """Return the values of LoadGen's settings, by the names to which the packaged table refers."""
    return {
        "samples": test.samples,
        "scenario": _scenario_name(test.scenario),
        "target_qps": result.target_qps or 0,
        "percentile": test.percentile,
        "min_duration_ms": test.min_duration_ns // NS_PER_MS,
        "min_queries": test.min_queries,
        "qsl_seed": test.seeds.qsl,
        "sample_index_seed": test.seeds.sample_index,
        "schedule_seed": test.seeds.schedule,
        "ttft_limit": test.ttft_ns,
        "tpot_limit": test.tpot_ns,
        "samples_per_query": _samples_per_query(result, test),
    }


def _verdict_values(result: MlperfResult) -> dict[str, object]:
    """Return the values of the detail log about the verdict and the rates.

    The table `mlperf_log_detail.yaml` has the entries of the log in LoadGen's order, and refers to
    these values by their names.
    """
    early_stopping = {
        check.metric: early_stopping_text(check).replace("\n", " ") for check in result.checks
    }
    return {
        "validity": "VALID" if result.valid else "INVALID",
        "limits_met": are_limits_met(result),
        "min_duration_met": result.min_duration_met,
        "min_queries_met": result.min_queries_met,
        "early_stopping_met": is_early_stopping_met(result),
        "invalid_reason": " ".join(f"{reason.text}." for reason in result.reasons) or None,
        "ttft_early_stopping": early_stopping.get("ttft", ""),
        "tpot_early_stopping": early_stopping.get("tpot", ""),
        "completed_samples_per_s": _rate_or_zero(result.completed_samples_per_s),
        "scheduled_samples_per_s": _rate_or_zero(result.scheduled_samples_per_s),
    }


def _distribution_entries(result: MlperfResult) -> Iterator[Entry]:
    """Yield the entries of the distributions of latency, TTFT and TPOT, and of the token rates.

    Offline has no TTFT and no TPOT. The keys and their order are LoadGen's.
    """
    completed_tokens_per_s = _rate_or_zero(result.completed_tokens_per_s)
    yield from _statistic_entries(result.latency, "result_{statistic}_latency_ns")
    yield from _percentile_entries(result.latency, "result_{percent}_percentile_latency_ns")

    if result.ttft is None or result.tpot is None:  # in Offline
        yield "result_tokens_per_second", completed_tokens_per_s
        return

    yield from _ttft_entries(result.ttft)
    yield from _token_throughput_entries(result)
    yield from _tpot_entries(result.tpot)
    yield "result_completed_tokens_per_second", completed_tokens_per_s


def _ttft_entries(ttft: LoadGenSpread) -> Iterator[Entry]:
    """Yield the entries of the time to the first token."""
    yield from _statistic_entries(ttft, "result_first_token_{statistic}_latency_ns")
    yield from _percentile_entries(ttft, "result_first_token_{percent}_percentile_latency_ns")


def _tpot_entries(tpot: LoadGenSpread) -> Iterator[Entry]:
    """Yield the entries of the time per output token.

    LoadGen puts the percentiles first here, and says "per" in their keys and "to" in the others.
    """
    yield from _percentile_entries(tpot, "result_time_per_output_token_{percent}_percentile_ns")
    yield from _statistic_entries(tpot, "result_time_to_output_token_{statistic}")


def _token_throughput_entries(result: MlperfResult) -> Iterator[Entry]:
    """Yield LoadGen's two token throughputs.

    LoadGen divides the second one by nanoseconds: it is a billionth of what its name says, in its
    own logs as well.
    """
    tokens_per_scheduled_s = result.tokens / result.scheduled_s if result.scheduled_s else 0
    yield "result_token_throughput_with_loadgen_overhead", tokens_per_scheduled_s
    total_latency_ns = _latency_or_unresolved(result.latency.mean) * result.latency.count
    tokens_per_latency_ns = result.tokens / total_latency_ns if total_latency_ns else 0
    yield "result_token_throughput", tokens_per_latency_ns


def _full_run_s(result: MlperfResult) -> float:
    """Return how long the run took until the last completion, in seconds.

    The result does not store this, so it is computed from the number of completions and their rate.
    Without a completion, it is the length of the schedule.
    """
    rate = result.full_run_samples_per_s
    return result.resolved / rate if rate else result.scheduled_s


def _rate_or_zero(rate: float | None) -> float:
    """Return a rate, or 0 if nothing completed in its window: LoadGen's logs have no null."""
    return 0.0 if rate is None else rate


def _latency_or_unresolved(value_ns: int | None) -> int:
    """Return a latency, or that of a query that never completed: LoadGen's logs have no null."""
    return UNRESOLVED if value_ns is None else value_ns


def _statistic_entries(spread: LoadGenSpread, key_format: str) -> Iterator[Entry]:
    """Yield the minimum, maximum and mean of a distribution.

    `key_format` is the key of an entry, with "{statistic}" for "min", "max" or "mean".
    """
    yield key_format.format(statistic="min"), _latency_or_unresolved(spread.min)
    yield key_format.format(statistic="max"), _latency_or_unresolved(spread.max)
    yield key_format.format(statistic="mean"), _latency_or_unresolved(spread.mean)


def _percentile_entries(spread: LoadGenSpread, key_format: str) -> Iterator[Entry]:
    """Yield the percentiles of a distribution.

    `key_format` is the key of an entry, with "{percent}" for the percentile, for example "99.00".
    """
    for quantile, value_ns in zip(PERCENTILES, spread.percentiles, strict=True):
        percent = f"{quantile * 100:.2f}"
        yield key_format.format(percent=percent), _latency_or_unresolved(value_ns)


# -- numbers as text -------------------------------------------------------------------------------


def _scenario_name(scenario: str) -> str:
    """Return LoadGen's name of a scenario. Interactive is Server with other limits."""
    return "Offline" if scenario == "offline" else "Server"


def _yes_or_no(is_met: bool) -> str:
    return "Yes" if is_met else "NO"


def _two_decimals(value: float | None) -> str:
    return "nan" if value is None else f"{value:.2f}"


def _six_digits(value: float | None) -> str:
    """Return a number as a C++ ostream prints a double: six significant digits."""
    return "nan" if value is None else f"{value:.6g}"


def _integer_text(value: int | None) -> str:
    return "unresolved" if value is None else str(value)
