"""The texts of LoadGen's log files for our runs: `mlperf_log_summary.txt` and `mlperf_log_detail.txt`.

The detail log has every key of LoadGen 6.0.17, in its order, and no null. Pure. The files say "unofficial" in their
first line and in `loadgen_version`. `interop/loadgen_log.py` reads such files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from loadgen.mlperf import dataset, rules
from loadgen.mlperf.loadgen_spread import PERCENTILES, LoadGenSpread
from loadgen.mlperf.result import DISCLOSURE, UNRESOLVED, Check, MlperfResult
from loadgen.mlperf.rules import Test

SUMMARY, DETAIL = "mlperf_log_summary.txt", "mlperf_log_detail.txt"
MARK = ":::MLLOG "
RULE = "=" * 48
_ENTRIES = Path(__file__).parent.parent / "data" / "mlperf_log_detail.yaml"
_UNUSED_SETTINGS = (
    "accuracy_log_rng_seed",
    "accuracy_log_probability",
    "accuracy_log_sampling_target",
    "print_timestamps",
    "performance_issue_unique",
    "performance_issue_same",
    "performance_issue_same_index",
)
CONCATENATED = (
    "WARNING: sample_concatenate_permutation was set to true. \n"
    "Generated samples per query might be different as the one in the setting.\n"
    "Check the generated_samples_per_query line in the detailed log for the real\n"
    "samples_per_query value"
)


# -- writing -----------------------------------------------------------------------------------------------------------


def texts(
    result: MlperfResult, test: Test, *, sut: str, version: str, started: datetime
) -> dict[str, str]:
    """Both files, name -> text.

    `sut` is the system under test; simulations are marked. `started`: when the run began, with a time zone.
    """
    name = f"SIMULATED {sut}" if result.simulated else sut
    detail = detail_text(result, test, sut=name, version=version, started=started)
    return {SUMMARY: summary_text(result, test, sut=name), DETAIL: detail}


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
    yield from _spread_lines(result.latency, "latency (ns)", "latency (ns)")
    yield ""
    if not offline:
        assert result.ttft is not None and result.tpot is not None
        yield f"Completed tokens per second                 : {_two_decimals(result.completed_tokens_per_s)}"
        yield from _spread_lines(
            result.ttft, "First Token latency (ns)", "first token latency (ns)"
        )
        yield ""
        yield from _spread_lines(
            result.tpot, "Time per Output Token (ns)", "time to output token (ns)"
        )
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
    yield f"qsl_rng_seed : {test.seeds.qsl}"
    yield f"sample_index_rng_seed : {test.seeds.sample_index}"
    yield f"schedule_rng_seed : {test.seeds.schedule}"
    yield from (f"{name} : 0" for name in _UNUSED_SETTINGS)
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
    limits = ", ".join(
        f"{check.metric.upper()} p99 < {check.limit_ns / 1e6:g} ms" for check in result.checks
    )
    passed = (
        (check.metric.upper(), "passes" if check.checker_met else "fails")
        for check in result.checks
    )
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
    return (
        result.queries
        if result.target_qps is None
        else rules.offline_expected(test, result.target_qps)
    )


def _spread_lines(spread: LoadGenSpread, name: str, percentile_name: str) -> Iterator[str]:
    for word, value in (("Min", spread.min), ("Max", spread.max), ("Mean", spread.mean)):
        yield f"{word} {name}".ljust(len(name) + 20) + f": {_integer_text(value)}"
    for p, value in zip(PERCENTILES, spread.percentiles, strict=True):
        yield f"{p * 100:.2f} percentile {percentile_name}   : {_integer_text(value)}"


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


Entry = tuple[str, Any]


def detail_text(
    result: MlperfResult, test: Test, *, sut: str, version: str, started: datetime
) -> str:
    """The text of `mlperf_log_detail.txt`: one `:::MLLOG {json}` per line, with LoadGen's keys in its order."""
    lines = []
    for number, (key, value) in enumerate(_detail_entries(result, test, sut, version, started), 1):
        is_error, is_warning = key.startswith("error_"), key.startswith("warning_")
        metadata = {
            "is_error": is_error,
            "is_warning": is_warning,
            "file": "log_files.py",
            "line_no": number,
        }
        entry = {"key": key, "value": value, "time_ms": 0.0, "namespace": "mlperf::logging"}
        entry |= {"event_type": "POINT_IN_TIME", "metadata": metadata | {"pid": 0, "tid": 0}}
        lines.append(MARK + json.dumps(entry))
    return "\n".join(lines) + "\n"


def _detail_entries(
    result: MlperfResult, test: Test, sut: str, version: str, started: datetime
) -> Iterator[Entry]:
    table, values = _entries(), _values(result, test, sut, version, started.astimezone(UTC))
    scenario = "offline" if test.scenario == "offline" else "server"

    def listed(part: str) -> Iterator[Entry]:
        for key, written, *only in table[part]:
            value = (
                values[written[1:]]
                if isinstance(written, str) and written.startswith("$")
                else written
            )
            if value is not None and scenario in (only or [scenario]):
                yield key, value

    yield from listed("begin")
    yield from (("warning_generic_message", warning) for warning in result.warnings)
    yield from (("error_runtime", error) for error in result.errors)
    yield from listed("results")
    yield from _distributions(result)
    yield "num_errors", len(result.errors)


@functools.cache
def _entries() -> dict[str, list[list[Any]]]:
    return msgspec.yaml.decode(_ENTRIES.read_bytes(), type=dict[str, list[list[Any]]])


def _values(
    result: MlperfResult, test: Test, sut: str, version: str, started: datetime
) -> dict[str, Any]:
    """The values that the table of entries names."""
    offline = test.scenario == "offline"
    length_ns = round(result.scheduled_s * 1e9)
    if result.target_qps:
        length_ns = (
            int(1e9 / result.target_qps)
            if offline
            else rules.schedule(test, result.target_qps).end_ns
        )
    ended = started + timedelta(seconds=_whole_run_s(result))
    begun, over = (
        f"{at:%m-%d-%Y %H:%M:%S}.{at.microsecond // 1000:03d}" for at in (started, ended)
    )
    stops = {check.metric: early_stopping_text(check).replace("\n", " ") for check in result.checks}
    unresolved = f"a latency of {UNRESOLVED} ns stands for a query that never completed"
    return {
        "version": f"unofficial: {version}",
        "no_build": "unofficial: not a build of LoadGen",
        "disclosure": DISCLOSURE,
        "dataset": f"Dataset: {result.dataset}",
        "checker": checker_text(result),
        "started": f"{started:%Y-%m-%dT%H:%M:%SZ}",
        "sut": sut,
        "qsl_name": result.dataset.partition(",")[0],
        "samples": test.samples,
        "scenario": "Offline" if offline else "Server",
        "target_qps": result.target_qps or 0,
        "percentile": test.percentile,
        "min_duration_ms": test.min_duration_ns // 1_000_000,
        "min_queries": test.min_queries,
        "qsl_seed": test.seeds.qsl,
        "sample_index_seed": test.seeds.sample_index,
        "schedule_seed": test.seeds.schedule,
        "ttft_limit": test.ttft_ns,
        "tpot_limit": test.tpot_ns,
        "samples_per_query": _samples_per_query(result, test),
        "loaded_set": dataset.loaded_set(test),
        "queries": result.queries,
        "query_duration": length_ns,
        "unresolved": unresolved if result.resolved < result.queries else None,
        "power_begin": begun,
        "power_end": over,
        "validity": "VALID" if result.valid else "INVALID",
        "limits_met": all(check.met for check in result.checks),
        "min_duration_met": result.min_duration_met,
        "min_queries_met": result.min_queries_met,
        "early_stopping_met": early_stopping_met(result),
        "invalid_reason": " ".join(reason.text + "." for reason in result.reasons) or None,
        "ttft_early_stopping": stops.get("ttft", ""),
        "tpot_early_stopping": stops.get("tpot", ""),
        "completed_samples_per_s": _known(result.completed_samples_per_s),
        "scheduled_samples_per_s": _known(result.scheduled_samples_per_s),
    }


def _distributions(result: MlperfResult) -> Iterator[Entry]:
    yield from _spread_entries(
        result.latency, "result_{}_latency_ns", "result_{:.2f}_percentile_latency_ns"
    )
    if result.ttft is None or result.tpot is None:
        yield "result_tokens_per_second", _known(result.completed_tokens_per_s)
        return
    ttft_keys = (
        "result_first_token_{}_latency_ns",
        "result_first_token_{:.2f}_percentile_latency_ns",
    )
    yield from _spread_entries(result.ttft, *ttft_keys)
    # LoadGen divides by nanoseconds here: the second figure is a billionth of what its name says, in its logs as well
    latencies_ns = _of_all(result.latency.mean) * result.latency.count
    with_overhead = result.tokens / result.scheduled_s if result.scheduled_s else 0
    yield "result_token_throughput_with_loadgen_overhead", with_overhead
    yield "result_token_throughput", result.tokens / latencies_ns if latencies_ns else 0
    percentiles = _spread_entries(
        result.tpot, "", "result_time_per_output_token_{:.2f}_percentile_ns"
    )
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
