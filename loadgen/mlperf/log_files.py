"""Writes LoadGen's log files for our runs: `mlperf_log_summary.txt` and `mlperf_log_detail.txt`.

Pure but for `write`. The files say "unofficial" in their first line and in `loadgen_version`. `interop/loadgen_log.py`
reads such files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.mlperf.result import DISCLOSURE, Check, MlperfResult
from loadgen.mlperf.rules import Test
from loadgen.stats.loadgen_spread import PERCENTILES, LoadGenSpread

if TYPE_CHECKING:
    from collections.abc import Iterator

SUMMARY, DETAIL = "mlperf_log_summary.txt", "mlperf_log_detail.txt"
MARK = ":::MLLOG "
RULE = "=" * 48
_UNUSED_SETTINGS = (
    "accuracy_log_rng_seed",
    "accuracy_log_probability",
    "accuracy_log_sampling_target",
    "print_timestamps",
    "performance_issue_unique",
    "performance_issue_same",
    "performance_issue_same_index",
)


# -- writing -----------------------------------------------------------------------------------------------------------


def write(folder: Path, result: MlperfResult, test: Test, *, sut: str, version: str) -> tuple[Path, Path]:
    """Write both files into `folder` and return their paths. `sut` is the system under test; simulations are marked."""
    name = f"SIMULATED {sut}" if result.simulated else sut
    summary, detail = folder / SUMMARY, folder / DETAIL
    summary.write_text(summary_text(result, test, sut=name), "utf-8")
    detail.write_text(detail_text(result, test, sut=name, version=version), "utf-8")
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
    yield f"samples_per_query : {result.queries if offline else 1}"
    yield f"target_qps : {_six_digits(result.target_qps)}"
    yield f"ttft_latency (ns): {test.ttft_ns or 0}"
    yield f"tpot_latency (ns): {test.tpot_ns or 0}"
    yield f"max_async_queries : {1 if offline else 0}"
    yield f"min_duration (ms): {test.min_duration_ns // 1_000_000}"
    yield "max_duration (ms): 0"
    yield f"min_query_count : {1 if offline else test.min_queries}"
    yield "max_query_count : 0"
    for key, seed in _seeds(test):
        yield f"{key} : {seed}"
    yield from (f"{name} : 0" for name in _UNUSED_SETTINGS)
    yield f"performance_sample_count : {test.samples}"
    yield f"accuracy_sample_count : {test.samples}"
    yield ""
    yield f"One-token replies (counted, left out of TPOT): {result.one_token_replies}"
    yield f"Whole run: {_six_digits(result.whole_tokens_per_s)} tokens per second until the last completion"
    yield f"Submission checker (strictly below the limits): {'VALID' if result.checker_valid else 'INVALID'}"
    yield ""
    yield "No warnings encountered during test."
    yield ""
    yield "No errors encountered during test."


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
        offline = result.scenario == "offline"
        yield (
            "Increase expected QPS so the loadgen pre-generates a larger (coalesced) query."
            if offline
            else "Increase the target QPS so the loadgen pre-generates more queries."
        )
    if not result.min_queries_met or result.resolved < result.queries:
        yield (
            "The test exited early, before enough queries were issued.\n   See the detailed log for why this may have "
            "occurred."
        )


def _seeds(test: Test) -> tuple[tuple[str, int], ...]:
    return (
        ("qsl_rng_seed", test.seeds.qsl),
        ("sample_index_rng_seed", test.seeds.sample_index),
        ("schedule_rng_seed", test.seeds.schedule),
    )


def detail_text(result: MlperfResult, test: Test, *, sut: str, version: str) -> str:
    """The text of `mlperf_log_detail.txt`: one `:::MLLOG {json}` per line, with LoadGen's keys."""
    lines = []
    for number, (key, value) in enumerate(_detail_entries(result, test, sut, version), 1):
        metadata = {"is_error": False, "is_warning": False, "file": "mlperf_log.py", "line_no": number}
        entry = {"key": key, "value": value, "time_ms": 0.0, "namespace": "mlperf::logging"}
        entry |= {"event_type": "POINT_IN_TIME", "metadata": metadata}
        lines.append(MARK + json.dumps(entry))
    return "\n".join(lines) + "\n"


def _detail_entries(result: MlperfResult, test: Test, sut: str, version: str) -> Iterator[tuple[str, Any]]:
    offline = test.scenario == "offline"
    yield "loadgen_version", f"unofficial: {version}"
    yield "generic_message", DISCLOSURE
    yield "generic_message", f"Dataset: {result.dataset}"
    yield "sut_name", sut
    yield "requested_scenario", "Offline" if offline else "Server"
    yield "requested_test_mode", "PerformanceOnly"
    yield ("requested_offline_expected_qps" if offline else "requested_server_target_qps"), result.target_qps
    yield "requested_use_token_latencies", True
    if not offline:
        yield "requested_server_ttft_latency", test.ttft_ns
        yield "requested_server_tpot_latency", test.tpot_ns
    yield "effective_scenario", "Offline" if offline else "Server"
    yield "effective_test_mode", "PerformanceOnly"
    yield "effective_samples_per_query", result.queries if offline else 1
    yield "effective_target_qps", result.target_qps
    yield "effective_target_latency_percentile", test.percentile
    yield "effective_min_duration_ms", test.min_duration_ns // 1_000_000
    yield "effective_min_query_count", 1 if offline else test.min_queries
    yield "effective_min_sample_count", result.queries if offline else test.min_queries
    for key, seed in _seeds(test):
        yield f"effective_{key}", seed
    yield "effective_performance_sample_count", test.samples
    yield "effective_sample_concatenate_permutation", True
    yield "generated_query_count", 1 if offline else result.queries
    yield "generated_samples_per_query", result.queries if offline else 1
    yield "result_validity", "VALID" if result.valid else "INVALID"
    if not offline:
        yield "result_perf_constraints_met", all(check.met for check in result.checks)
    yield "result_min_duration_met", result.min_duration_met
    yield "result_min_queries_met", result.min_queries_met
    yield "early_stopping_met", early_stopping_met(result)
    if not result.valid:
        yield "result_invalid_reason", " ".join(reason.text + "." for reason in result.reasons)
    for check in result.checks:
        yield f"early_stopping_{check.metric}_result", early_stopping_text(check).replace("\n", " ")
    yield "result_query_count", 1 if offline else result.queries
    if offline:
        yield "result_samples_per_second", result.completed_samples_per_s
    else:
        yield "result_scheduled_samples_per_sec", result.scheduled_samples_per_s
        yield "result_completed_samples_per_sec", result.completed_samples_per_s
    yield from _spread_entries(result.latency, "result_{}_latency_ns", "result_{:.2f}_percentile_latency_ns")
    if result.ttft is not None and result.tpot is not None:
        ttft_keys = "result_first_token_{}_latency_ns", "result_first_token_{:.2f}_percentile_latency_ns"
        yield from _spread_entries(result.ttft, *ttft_keys)
        tpot_keys = "result_time_to_output_token_{}", "result_time_per_output_token_{:.2f}_percentile_ns"
        yield from _spread_entries(result.tpot, *tpot_keys)
        yield "result_completed_tokens_per_second", result.completed_tokens_per_s
    else:
        yield "result_tokens_per_second", result.completed_tokens_per_s
    yield "num_errors", 0


def _spread_entries(spread: LoadGenSpread, plain: str, percentile: str) -> Iterator[tuple[str, int | None]]:
    for word in ("min", "max", "mean"):
        yield plain.format(word), getattr(spread, word)
    for p, value in zip(PERCENTILES, spread.percentiles, strict=True):
        yield percentile.format(p * 100), value


def _yes_or_no(met: bool) -> str:
    return "Yes" if met else "NO"


def _two_decimals(value: float | None) -> str:
    return "nan" if value is None else f"{value:.2f}"


def _six_digits(value: float | None) -> str:
    """A number as a C++ ostream prints a double: six significant digits."""
    return "nan" if value is None else f"{value:.6g}"


def _integer_text(value: int | None) -> str:
    return "unresolved" if value is None else str(value)
