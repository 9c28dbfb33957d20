"""Writes LoadGen's log files for our runs: `mlperf_log_summary.txt` and `mlperf_log_detail.txt`.

The detail log has every key of LoadGen 6.0.17, in its order, and no null. Pure but for `write`. The files say
"unofficial" in their first line and in `loadgen_version`. `interop/loadgen_log.py` reads such files.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.mlperf import dataset, rules
from loadgen.mlperf.result import DISCLOSURE, UNRESOLVED, Check, MlperfResult
from loadgen.mlperf.rules import Test
from loadgen.stats.loadgen_spread import PERCENTILES, LoadGenSpread

if TYPE_CHECKING:
    from collections.abc import Iterator

SUMMARY, DETAIL = "mlperf_log_summary.txt", "mlperf_log_detail.txt"
MARK = ":::MLLOG "
RULE = "=" * 48
_UNUSED_SETTINGS: dict[str, int | bool] = {
    "accuracy_log_rng_seed": 0,
    "accuracy_log_probability": 0,
    "accuracy_log_sampling_target": 0,
    "print_timestamps": False,
    "performance_issue_unique": False,
    "performance_issue_same": False,
    "performance_issue_same_index": 0,
}
_UNUSED_SERVER_SETTINGS: dict[str, int | bool] = {
    "coalesce_queries": False,
    "find_peak_qps_decimals_of_precision": 1,
    "find_peak_qps_boundary_step_size": 1,
    "max_async_queries": 0,
    "num_issue_query_threads": 0,
}
_LOGGER_COUNTERS = (
    "logger_swap_request_slots_retry_count",
    "logger_swap_request_slots_retry_retry_count",
    "logger_swap_request_slots_retry_reencounter_count",
    "logger_start_reading_entries_retry_count",
    "logger_tls_total_log_cas_fail_count",
    "logger_tls_total_swap_buffers_slot_retry_count",
)
NO_BUILD = "unofficial: not a build of LoadGen"
CONCATENATED = (
    "WARNING: sample_concatenate_permutation was set to true. \n"
    "Generated samples per query might be different as the one in the setting.\n"
    "Check the generated_samples_per_query line in the detailed log for the real\n"
    "samples_per_query value"
)


# -- writing -----------------------------------------------------------------------------------------------------------


def write(
    folder: Path, result: MlperfResult, test: Test, *, sut: str, version: str, started: datetime
) -> tuple[Path, Path]:
    """Write both files into `folder` and return their paths.

    `sut` is the system under test; simulations are marked. `started`: when the run began, with a time zone.
    """
    name = f"SIMULATED {sut}" if result.simulated else sut
    summary, detail = folder / SUMMARY, folder / DETAIL
    summary.write_text(summary_text(result, test, sut=name), "utf-8")
    detail.write_text(detail_text(result, test, sut=name, version=version, started=started), "utf-8")
    return summary, detail


def summary_text(result: MlperfResult, test: Test, *, sut: str) -> str:
    """The text of `mlperf_log_summary.txt` in the layout of LoadGen 6.0.17, after the disclosure.

    LoadGen leaves the TTFT early-stopping text blank when TPOT has failed; here the text is given.
    """
    return "\n".join(_summary_lines(result, test, sut)) + "\n"


def _summary_lines(result: MlperfResult, test: Test, sut: str) -> Iterator[str]:
    offline = test.scenario == "offline"
    yield DISCLOSURE
    if result.simulated:
        yield "SIMULATED: no real system was measured."
    yield f"Test: {result.benchmark} {result.scenario}, limits and seeds of round {result.round}"
    yield f"Dataset: {result.dataset}"
    yield from (f"Note: {note}" for note in result.notes)
    yield from (RULE, "MLPerf Results Summary", RULE)
    yield f"SUT name : {sut}"
    yield f"Scenario : {'Offline' if offline else 'Server'}"
    yield "Mode     : PerformanceOnly"
    if offline:
        yield f"Samples per second: {_six_digits(result.completed_samples_per_s)}"
        yield f"Tokens per second: {_six_digits(result.completed_tokens_per_s)}"
    else:
        yield f"Completed samples per second    : {_two_decimals(result.completed_samples_per_s)}"
        yield f"Completed tokens per second: {_two_decimals(result.completed_tokens_per_s)}"
    yield f"Result is : {'VALID' if result.valid else 'INVALID'}"
    limits_met = all(check.met for check in result.checks)
    if not offline:
        yield f"  Performance constraints satisfied : {_yes_or_no(limits_met)}"
    yield f"  Min duration satisfied : {_yes_or_no(result.min_duration_met)}"
    yield f"  Min queries satisfied : {_yes_or_no(result.min_queries_met)}"
    yield f"  Early stopping satisfied: {_yes_or_no(early_stopping_met(result))}"
    if not result.valid:
        yield "Recommendations:"
        yield from (f" * {text}" for text in _recommendations(result))
    for check in result.checks:
        yield f"{check.metric.upper()} Early Stopping Result:"
        yield early_stopping_text(check)
    yield from ("", RULE, "Additional Stats", RULE)
    if not offline:
        yield f"Scheduled samples per second : {_two_decimals(result.scheduled_samples_per_s)}"
    yield from _spread_lines(result.latency, "latency (ns)", "   : ", 16, "latency (ns)")
    yield ""
    if not offline:
        assert result.ttft is not None and result.tpot is not None
        yield f"Completed tokens per second                 : {_two_decimals(result.completed_tokens_per_s)}"
        yield from _spread_lines(result.ttft, "First Token latency (ns)", "   : ", 16, "first token latency (ns)")
        yield ""
        yield from _spread_lines(result.tpot, "Time per Output Token (ns)", "   : ", 16, "time to output token (ns)")
    yield from ("", RULE, "Test Parameters Used", RULE)
    yield f"samples_per_query : {_samples_per_query(result, test)}"
    yield f"target_qps : {_six_digits(result.target_qps)}"
    yield f"ttft_latency (ns): {test.ttft_ns or 0}"
    yield f"tpot_latency (ns): {test.tpot_ns or 0}"
    yield f"max_async_queries : {1 if offline else 0}"
    yield f"min_duration (ms): {test.min_duration_ns // 1_000_000}"
    yield "max_duration (ms): 0"
    yield f"min_query_count : {1 if offline else test.min_queries}"
    yield "max_query_count : 0"
    yield from (f"{name} : {value:d}" for name, value in _seeds_and_unused(test).items())
    yield f"performance_sample_count : {test.samples}"
    yield f"accuracy_sample_count : {test.samples}"
    yield CONCATENATED
    yield ""
    yield f"One-token replies (counted, left out of TPOT): {result.one_token_replies}"
    yield f"Whole run: {_six_digits(result.whole_tokens_per_s)} tokens per second until the last completion"
    yield checker_text(result)
    yield ""
    yield _encountered(len(result.warnings), "warning", "warnings")
    yield from (f" * {text}" for text in result.warnings)
    yield ""
    yield _encountered(len(result.errors), "ERROR", "ERRORS")
    yield from (f" * {text}" for text in result.errors)


def checker_text(result: MlperfResult) -> str:
    """What of the submission checker was looked at, and what came out: its two latency limits, and no other check."""
    if not result.checks:
        return "Submission checker: it has no latency limit in Offline; none of its other checks was made"
    limits = ", ".join(f"{check.metric.upper()} p99 < {check.limit_ns / 1e6:g} ms" for check in result.checks)
    passed = ((check.metric.upper(), "passes" if check.checker_met else "fails") for check in result.checks)
    outcomes = ", ".join(map(" ".join, passed))
    return f"Submission checker: {outcomes}; of its checks only these two limits were looked at ({limits})"


def _encountered(count: int, one: str, several: str) -> str:
    if not count:
        return f"No {several.lower()} encountered during test."
    return f"{count} {one if count == 1 else several} encountered. See detailed log."


def _samples_per_query(result: MlperfResult, test: Test) -> int:
    """LoadGen's setting, before an Offline query is filled up to whole passes."""
    if test.scenario != "offline":
        return 1
    return result.queries if result.target_qps is None else rules.offline_expected(test, result.target_qps)


def _spread_lines(
    spread: LoadGenSpread, name: str, separator: str, padding: int, percentile_name: str
) -> Iterator[str]:
    for word, value in (("Min", spread.min), ("Max", spread.max), ("Mean", spread.mean)):
        yield f"{word} {name}".ljust(len(name) + 5) + " " * (padding - 1) + f": {_integer_text(value)}"
    for p, value in zip(PERCENTILES, spread.percentiles, strict=True):
        yield f"{p * 100:.2f} percentile {percentile_name}{separator}{_integer_text(value)}"


def early_stopping_text(check: Check) -> str:
    """LoadGen's early-stopping text for one limit."""
    if check.early_stopping_met:
        return " * Run successful."
    return (
        f" * Run unsuccessful.\n * Processed {check.count} queries.\n * Would need to run at least {check.more} more "
        "queries,\n with the run being successful if every additional\n query were under latency."
    )


def early_stopping_met(result: MlperfResult) -> bool:
    return all(check.early_stopping_met for check in result.checks)


def _recommendations(result: MlperfResult) -> Iterator[str]:
    for check in result.checks:
        if not check.met:
            yield f"{check.metric.upper()} constrain not met: Reduce target QPS to improve latency."
    if not result.min_duration_met:
        if result.scenario == "offline":
            yield "Increase expected QPS so the loadgen pre-generates a larger (coalesced) query."
        else:
            yield "Increase the target QPS so the loadgen pre-generates more queries."
    if not result.min_queries_met or result.resolved < result.queries:
        early = "The test exited early, before enough queries were issued."
        yield f"{early}\n   See the detailed log for why this may have occurred."


def _seeds_and_unused(test: Test) -> dict[str, int | bool]:
    """The seeds, and the settings that are not used: they stand together in all lists of settings."""
    seeds = test.seeds
    used = {"qsl_rng_seed": seeds.qsl, "sample_index_rng_seed": seeds.sample_index}
    return {**used, "schedule_rng_seed": seeds.schedule, **_UNUSED_SETTINGS}


Entry = tuple[str, Any]


def detail_text(result: MlperfResult, test: Test, *, sut: str, version: str, started: datetime) -> str:
    """The text of `mlperf_log_detail.txt`: one `:::MLLOG {json}` per line, with LoadGen's keys in its order."""
    lines = []
    for number, (key, value) in enumerate(_detail_entries(result, test, sut, version, started), 1):
        is_error, is_warning = key.startswith("error_"), key.startswith("warning_")
        metadata = {"is_error": is_error, "is_warning": is_warning, "file": "log_files.py", "line_no": number}
        entry = {"key": key, "value": value, "time_ms": 0.0, "namespace": "mlperf::logging"}
        entry |= {"event_type": "POINT_IN_TIME", "metadata": metadata | {"pid": 0, "tid": 0}}
        lines.append(MARK + json.dumps(entry))
    return "\n".join(lines) + "\n"


def _detail_entries(result: MlperfResult, test: Test, sut: str, version: str, started: datetime) -> Iterator[Entry]:
    started = started.astimezone(UTC)
    yield "loadgen_version", f"unofficial: {version}"
    for key in ("build_date_local", "build_date_utc", "git_commit_date", "git_log_message"):
        yield f"loadgen_{key}", NO_BUILD
    yield "loadgen_git_status_message", ""
    yield "loadgen_file_sha1", {}
    yield "generic_message", DISCLOSURE
    yield "generic_message", f"Dataset: {result.dataset}"
    yield "generic_message", checker_text(result)
    yield "test_datetime", f"{started:%Y-%m-%dT%H:%M:%SZ}"
    yield "sut_name", sut
    yield "get_sut_name_duration_ns", 0
    yield "qsl_name", result.dataset.partition(",")[0]
    yield "qsl_reported_total_count", test.samples
    yield "qsl_reported_performance_count", test.samples
    yield from _requested(result, test)
    yield from _effective(result, test)
    yield from _issued(result, test)
    for warning in result.warnings:
        yield "warning_generic_message", warning
    for error in result.errors:
        yield "error_runtime", error
    if result.resolved < result.queries:
        yield "generic_message", f"a latency of {UNRESOLVED} ns stands for a query that never completed"
    ended = started + timedelta(seconds=_whole_run_s(result))
    for key, instant in (("power_begin", started), ("power_end", ended)):
        yield key, f"{instant:%m-%d-%Y %H:%M:%S}.{instant.microsecond // 1000:03d}"
    yield from _results(result, test)
    yield "num_errors", len(result.errors)


def _requested(result: MlperfResult, test: Test) -> Iterator[Entry]:
    offline = test.scenario == "offline"
    yield "requested_scenario", "Offline" if offline else "Server"
    yield "requested_test_mode", "PerformanceOnly"
    if offline:
        yield "requested_offline_expected_qps", result.target_qps or 0
    else:
        yield "requested_server_target_qps", result.target_qps or 0
        yield "requested_server_target_latency_ns", 0
        yield "requested_server_target_latency_percentile", test.percentile
        yield from ((f"requested_server_{key}", value) for key, value in _UNUSED_SERVER_SETTINGS.items())
    yield "requested_min_duration_ms", test.min_duration_ns // 1_000_000
    yield "requested_max_duration_ms", 0
    yield "requested_min_query_count", test.min_queries
    yield "requested_max_query_count", 0
    yield from ((f"requested_{key}", value) for key, value in _seeds_and_unused(test).items())
    yield "requested_performance_sample_count_override", test.samples
    yield "requested_accuracy_sample_count_override", 0
    yield "requested_sample_concatenate_permutation", True
    yield "requested_use_token_latencies", True
    if not offline:
        yield "requested_server_ttft_latency", test.ttft_ns
        yield "requested_server_tpot_latency", test.tpot_ns


def _effective(result: MlperfResult, test: Test) -> Iterator[Entry]:
    offline = test.scenario == "offline"
    samples_per_query = _samples_per_query(result, test)
    yield "effective_scenario", "Offline" if offline else "Server"
    yield "effective_test_mode", "PerformanceOnly"
    yield "effective_samples_per_query", samples_per_query
    yield "effective_target_qps", result.target_qps or 0
    yield "effective_target_latency_ns", 0  # TTFT and TPOT have limits instead, see mlperf.conf
    yield "effective_target_latency_percentile", test.percentile
    yield "effective_max_async_queries", 1 if offline else 0
    yield "effective_target_duration_ms", 0 if offline else test.min_duration_ns // 1_000_000
    yield "effective_min_duration_ms", test.min_duration_ns // 1_000_000
    yield "effective_max_duration_ms", 0
    yield "effective_min_query_count", 1 if offline else test.min_queries
    yield "effective_max_query_count", 0
    yield "effective_min_sample_count", samples_per_query if offline else test.min_queries
    yield from ((f"effective_{key}", value) for key, value in _seeds_and_unused(test).items())
    yield "effective_performance_sample_count", test.samples
    yield "effective_accuracy_sample_count", test.samples
    yield "effective_sample_concatenate_permutation", True


def _issued(result: MlperfResult, test: Test) -> Iterator[Entry]:
    offline = test.scenario == "offline"
    yield "generic_message", "Starting performance mode"
    yield "loaded_qsl_set", dataset.loaded_set(test)
    yield "generated_query_count", 1 if offline else result.queries
    yield "generated_samples_per_query", result.queries if offline else 1
    length_ns = round(result.scheduled_s * 1e9)
    if result.target_qps:
        length_ns = int(1e9 / result.target_qps) if offline else rules.schedule(test, result.target_qps).end_ns
    yield "generated_query_duration", length_ns
    yield from ((key, 0) for key in _LOGGER_COUNTERS)


def _results(result: MlperfResult, test: Test) -> Iterator[Entry]:
    offline = test.scenario == "offline"
    yield "result_validity", "VALID" if result.valid else "INVALID"
    if not offline:
        yield "result_perf_constraints_met", all(check.met for check in result.checks)
    yield "result_min_duration_met", result.min_duration_met
    yield "result_min_queries_met", result.min_queries_met
    yield "early_stopping_met", early_stopping_met(result)
    if not result.valid:
        yield "result_invalid_reason", " ".join(reason.text + "." for reason in result.reasons)
    texts = {check.metric: early_stopping_text(check).replace("\n", " ") for check in result.checks}
    for metric in ("ttft", "tpot"):
        yield f"early_stopping_{metric}_result", texts.get(metric, "")
    yield "result_query_count", 1 if offline else result.queries
    if offline:
        yield "result_samples_per_second", _known(result.completed_samples_per_s)
    else:
        yield "result_overlatency_query_count", result.queries  # LoadGen's: over a target latency of 0
        yield "result_scheduled_samples_per_sec", _known(result.scheduled_samples_per_s)
        yield "result_completed_samples_per_sec", _known(result.completed_samples_per_s)
    yield from _spread_entries(result.latency, "result_{}_latency_ns", "result_{:.2f}_percentile_latency_ns")
    if result.ttft is None or result.tpot is None:
        yield "result_tokens_per_second", _known(result.completed_tokens_per_s)
        return
    ttft_keys = "result_first_token_{}_latency_ns", "result_first_token_{:.2f}_percentile_latency_ns"
    yield from _spread_entries(result.ttft, *ttft_keys)
    # LoadGen divides by nanoseconds here: the second figure is a billionth of what its name says, in its logs as well
    latencies_ns = _of_all(result.latency.mean) * result.latency.count
    with_overhead = result.tokens / result.scheduled_s if result.scheduled_s else 0
    yield "result_token_throughput_with_loadgen_overhead", with_overhead
    yield "result_token_throughput", result.tokens / latencies_ns if latencies_ns else 0
    percentiles = _spread_entries(result.tpot, "", "result_time_per_output_token_{:.2f}_percentile_ns")
    yield from list(percentiles)[3:]
    yield from list(_spread_entries(result.tpot, "result_time_to_output_token_{}", ""))[:3]
    yield "result_completed_tokens_per_second", _known(result.completed_tokens_per_s)


def _whole_run_s(result: MlperfResult) -> float:
    """From the first query to the last completion, in seconds; the schedule's length when nothing completed."""
    rate = result.whole_samples_per_s
    return result.resolved / rate if rate else result.scheduled_s


def _known(rate: float | None) -> float:
    """A rate, 0 where nothing completed in its window: LoadGen's logs have no null."""
    return 0.0 if rate is None else rate


def _of_all(value_ns: int | None) -> int:
    """A latency, that of a query that never completed where there is no other: LoadGen's logs have no null."""
    return UNRESOLVED if value_ns is None else value_ns


def _spread_entries(spread: LoadGenSpread, plain: str, percentile: str) -> Iterator[Entry]:
    for word in ("min", "max", "mean"):
        yield plain.format(word), _of_all(getattr(spread, word))
    for p, value in zip(PERCENTILES, spread.percentiles, strict=True):
        yield percentile.format(p * 100), _of_all(value)


def _yes_or_no(met: bool) -> str:
    return "Yes" if met else "NO"


def _two_decimals(value: float | None) -> str:
    return "nan" if value is None else f"{value:.2f}"


def _six_digits(value: float | None) -> str:
    """A number as a C++ ostream prints a double: six significant digits."""
    return "nan" if value is None else f"{value:.6g}"


def _integer_text(value: int | None) -> str:
    return "unresolved" if value is None else str(value)
