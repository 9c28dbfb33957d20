"""MLPerf's rules: published constants, runs computed by hand, log files of both generations.

No optional package is needed.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_errors import refused
from golden import check_golden
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import load_summary
from loadgen.core.stats.early_stopping import allowed_over, needed_queries
from loadgen.mlperf import log_files, rules, run, text
from loadgen.mlperf import result as mlperf
from loadgen.mlperf.loadgen_log import parse_log, read_log
from loadgen.mlperf.result import QueryTrace, Reply
from loadgen.render import text as as_text
from loadgen.runs.tiles import headline_tiles

MS = 1_000_000
S = 1000 * MS

MAX_DEFAULT_LINES = 20
SUMMARY_EXAMPLE = Path(__file__).parent.parent / "data" / "summary_example_rag_gpus.json"

# Runs of round v5.1: scenario, target rate, minimum duration, queries, and the offset of the query
# that would follow the last one.
OFFICIAL_RUNS = [
    ("server", 170.0, 600, 122880, 722660302831),
    ("server", 182.0, 600, 122880, 675012366669),
    ("interactive", 110.0, 1200, 147456, 1341851360542),
]


@pytest.mark.parametrize(("scenario", "qps", "min_s", "queries", "duration_ns"), OFFICIAL_RUNS)
def test_schedules_equal_those_of_official_runs(
    scenario: Any, qps: float, min_s: int, queries: int, duration_ns: int
) -> None:
    planned_arrivals = rules.create_schedule(
        rules.create_test("llama2-70b", scenario, "v5.1", min_duration_s=min_s), qps
    )
    assert (len(planned_arrivals.offsets_ns), planned_arrivals.end_ns) == (queries, duration_ns)


def test_the_last_query_of_the_first_official_run_has_its_time() -> None:
    planned_arrivals = rules.create_schedule(
        rules.create_test("llama2-70b", "server", "v5.1"), 170.0
    )
    assert int(planned_arrivals.offsets_ns[-1]) == 722654092626


@pytest.mark.parametrize(
    ("t", "n"),
    [(0, 459), (1, 662), (2, 838), (5, 1307), (10, 2010), (11, 2144), (100, 12571), (1000, 107569)],
)
def test_needed_queries_follow_from_the_number_over_the_limit(t: int, n: int) -> None:
    assert needed_queries(t) == n
    assert allowed_over(n) == t
    assert allowed_over(n - 1) == t - 1


@pytest.mark.parametrize(
    ("n", "t"),
    [
        (458, -1),
        (600, 0),
        (1000, 2),
        (5000, 33),
        (24576, 209),
        (49152, 440),
        (100000, 927),
        (245760, 2343),
    ],
)
def test_the_allowed_number_over_the_limit_follows_from_the_queries(n: int, t: int) -> None:
    assert allowed_over(n) == t


LIMITS = [  # benchmark, scenario, TTFT ms, TPOT ms
    ("llama2-70b", "server", 2000, 200),
    ("llama2-70b", "interactive", 450, 40),
    ("llama3.1-405b", "server", 6000, 175),
    ("llama3.1-405b", "interactive", 4500, 80),
    ("llama3.1-8b", "server", 2000, 100),
    ("llama3.1-8b", "interactive", 500, 30),
    ("mixtral-8x7b", "server", 2000, 200),
    ("deepseek-r1", "server", 2000, 80),
    ("deepseek-r1", "interactive", 1500, 15),
    ("gpt-oss-120b", "server", 3000, 80),
    ("gpt-oss-120b", "interactive", 2000, 15),
]


@pytest.mark.parametrize(("benchmark", "scenario", "ttft_ms", "tpot_ms"), LIMITS)
def test_limits_of_the_tests_equal_those_of_the_rules(
    benchmark: str, scenario: Any, ttft_ms: int, tpot_ms: int
) -> None:
    mlperf_test = rules.create_test(benchmark, scenario)
    assert (mlperf_test.ttft_ns, mlperf_test.tpot_ns) == (ttft_ms * MS, tpot_ms * MS)
    assert mlperf_test.since


def test_every_number_of_the_rules_has_a_source() -> None:
    table = rules.load_rules()
    for benchmark in table.benchmarks.values():
        assert set(benchmark.rounds) <= set(table.rounds)
        for limit in filter(None, (benchmark.server, benchmark.interactive)):
            assert limit.source in table.sources
    assert all(rules_round.source in table.sources for rules_round in table.rounds.values())
    assert table.rounds["v5.1"].schedule == 18209322760996052031
    assert table.rounds["v6.1"].schedule == 16159082839903944936


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("llama2-7b", "server", None), "unknown_name"),
        (("mixtral-8x7b", "interactive", None), "unsupported"),
        (("llama2-70b", "server", "v9.9"), "unknown_name"),
        (("gpt-oss-120b", "server", "v5.1"), "unsupported"),
        (("deepseek-r1", "interactive", "v5.1"), "unsupported"),
    ],
)
def test_unknown_benchmarks_and_scenarios_are_refused(
    arguments: tuple[Any, ...], code: str
) -> None:
    with refused(UserError, code) as exc_info:
        rules.create_test(*arguments)
    assert exc_info.value.hint


SMALL = structs.replace(
    rules.create_test("llama2-70b", "server"), samples=1, min_duration_ns=0, min_queries=1
)


def trace(
    n: int,
    *,
    ttft: Any = 100 * MS,
    latency: Any = 1100 * MS,
    tokens: Any = 11,
    gap_ns: int = 10 * MS,
) -> QueryTrace:
    def column(value: Any) -> Any:
        return np.broadcast_to(np.asarray(value, np.int64), n).copy()

    return QueryTrace(
        np.arange(n, dtype=np.int64) * gap_ns, column(ttft), column(latency), column(tokens)
    )


def test_rates_of_an_mlperf_result_equal_those_computed_by_hand() -> None:
    run = trace(1001)
    run.latency_ns[500] = 40 * S  # the last to complete is not the last issued
    result = mlperf.judge_trace(run, SMALL)

    assert result.valid
    assert result.scheduled_s == 10.0
    assert result.scheduled_samples_per_s == 100.0  # 1,000 gaps in 10 s
    assert result.completed_tokens_per_s == pytest.approx(
        11 * 1001 / 11.1
    )  # the last issued ends at 10 + 1.1 s
    assert result.completed_samples_per_s == pytest.approx(1000 / 11.1)
    assert result.full_run_tokens_per_s == pytest.approx(11 * 1001 / 45.0)
    assert result.tpot is not None
    assert result.tpot.percentiles[:5] == (100 * MS,) * 5


@pytest.mark.parametrize(
    ("ttft_ms", "is_met", "checker_met"),
    [(1999, True, True), (2000, True, False), (2001, False, False)],
)
def test_at_exactly_the_limit_loadgen_passes_and_the_checker_does_not(
    ttft_ms: int, is_met: bool, checker_met: bool
) -> None:
    result = mlperf.judge_trace(trace(1000, ttft=ttft_ms * MS, latency=3 * S), SMALL)
    check = result.checks[0]
    assert (check.is_within_limit, check.is_below_limit) == (is_met, checker_met)
    assert (result.valid, result.checker_valid) == (is_met, checker_met)
    assert check.violations == (0 if is_met else 1000)


def test_early_stopping_can_fail_although_the_percentile_passes() -> None:
    """9 of 1,000 over: p99 is under the limit, but so few queries do not prove it."""
    run = trace(1000)
    run.ttft_ns[:9] = 2001 * MS
    result = mlperf.judge_trace(run, SMALL)
    check = result.checks[0]

    assert (check.is_within_limit, check.early_stopping_met, check.violations) == (True, False, 9)
    assert check.missing_queries == needed_queries(9) - 1000
    assert (result.valid, result.exit_code) == (False, 1)
    assert (
        result.reasons[0].kind == "limit"
        and f"{check.missing_queries:,} " in result.reasons[0].text
    )


def test_a_run_that_is_too_short_or_small_exits_3_even_if_a_limit_is_missed() -> None:
    mlperf_test = structs.replace(SMALL, min_duration_ns=600 * S, min_queries=100_000)
    result = mlperf.judge_trace(trace(1000, ttft=3 * S, latency=4 * S), mlperf_test)
    assert [reason.kind for reason in result.reasons] == ["size", "size", "limit", "limit"]
    assert result.exit_code == 3


def test_responses_of_one_token_are_counted_and_excluded_from_tpot() -> None:
    run = trace(1000)
    run.tokens[::4] = 1
    result = mlperf.judge_trace(run, SMALL)

    assert result.tpot is not None
    assert (result.one_token_replies, result.tpot.count, result.checks[1].query_count) == (
        250,
        750,
        750,
    )
    assert result.tpot.min == 100 * MS
    assert result.tokens == 750 * 11 + 250
    lenient = mlperf.judge_trace(run, SMALL, with_one_token_defect=True)
    assert lenient.tpot is not None
    assert (lenient.tpot.count, lenient.tpot.min, lenient.tokens) == (1000, -1000 * MS, 750 * 11)


def test_uncompleted_queries_exceed_every_limit_and_make_the_run_invalid() -> None:
    run = trace(10_000)
    for column in (run.ttft_ns, run.latency_ns):
        column[:100] = mlperf.UNRESOLVED
    run.tokens[:100] = 0
    result = mlperf.judge_trace(run, SMALL)

    assert result.resolved == 9900
    assert result.checks[0].violations == result.checks[1].violations == 100
    assert result.latency.max is None
    assert result.latency.percentiles[3] == 1100 * MS
    assert result.reasons[0].kind == "size"
    assert result.exit_code == 3


def test_the_offline_scenario_measures_from_the_start_of_the_query() -> None:
    mlperf_test = structs.replace(
        rules.create_test("llama2-70b", "offline"), min_duration_ns=20 * S, min_queries=100
    )
    latency = np.linspace(1, 20, 100).astype(np.int64) * S
    result = mlperf.judge_trace(trace(100, latency=latency, gap_ns=0), mlperf_test)

    assert (result.valid, result.completed_samples_per_s, result.completed_tokens_per_s) == (
        True,
        5.0,
        55.0,
    )
    assert result.ttft is result.tpot is None
    assert (
        rules.offline_samples(rules.create_test("llama2-70b", "offline"), 230.0) == 172032
    )  # 7 passes over 151,800


def test_records_become_a_trace_in_the_order_of_issue() -> None:
    columns = {
        "slot": np.array([3, 1, 2, 4]),
        "due_ns": np.array([2000, 1000, 1000, -1]),
        "first_token_ns": np.array([2500, -1, 1300, -1]),
        "end_ns": np.array([3000, 5000, 1900, -1]),
        "output_tokens": np.array([5, 3, 7, -1]),
        "status": np.array([0, 1, 0, 3]),
    }
    query_trace = mlperf.build_trace(columns, origin_ns=1000)

    assert query_trace.due_ns.tolist() == [0, 0, 1000]
    assert query_trace.latency_ns.tolist() == [mlperf.UNRESOLVED, 900, 1000]
    assert query_trace.ttft_ns.tolist() == [mlperf.UNRESOLVED, 300, 500]
    assert query_trace.tokens.tolist() == [0, 7, 5]


@pytest.mark.parametrize(
    ("reply", "failed"),
    [
        (Reply([5], [5, 6, 2], 3), (0, 0, 0)),
        (Reply([9], [5, 6, 2], 3), (1, 0, 0)),
        (Reply([5], [5, 6, 2, 2], 4), (0, 1, 0)),
        (Reply([5], [5, 6, 2], 4), (0, 0, 1)),
        (
            Reply([2], [2, 2], 2),
            (0, 0, 0),
        ),  # the official check looks no further than the second token
    ],
)
def test_the_compliance_test06_counts_wrong_first_tokens_and_early_ends(
    reply: Reply, failed: tuple[int, int, int]
) -> None:
    test06 = mlperf.count_test06_failures([reply])
    assert (test06.wrong_first_tokens, test06.repeated_end_tokens, test06.wrong_lengths) == failed
    assert test06.passed == (failed == (0, 0, 0))
    assert (
        mlperf.count_test06_failures([reply], reports_first_tokens=False).wrong_first_tokens is None
    )


# -- log files -------------------------------------------------------------------------------------


STARTED = datetime(2026, 11, 22, 2, 22, 40, 791_000, tzinfo=UTC)


def _written(**changes: Any) -> tuple[mlperf.MlperfResult, str, str]:
    run = trace(1000, **changes)
    result = mlperf.judge_trace(
        run, SMALL, mlperf.MlperfRunFacts(dataset="synthetic", target_qps=100.0)
    )
    return (
        result,
        log_files.format_summary(result, SMALL, sut="x"),
        log_files.format_detail(result, SMALL, log_files.LogContext("x", "0", STARTED)),
    )


def _generation_1(text: str) -> str:
    """Return the same summary with the labels of LoadGen 5."""
    lines = text.replace("Time per Output Token", "Time to Output Token").splitlines()
    return "\n".join(
        line
        for line in lines
        if not line.startswith(("accuracy_sample_count", "Completed tokens per second: "))
    )


@pytest.mark.parametrize("generation", [1, 2])
def test_a_written_mlperf_log_is_read_back_unchanged(generation: int) -> None:
    result, summary, detail = _written(ttft=3 * S, latency=4 * S)
    assert summary.startswith("MLPerf-style, unofficial")
    log = parse_log(_generation_1(summary) if generation == 1 else summary, detail)
    assert (log.latency, log.ttft, log.tpot) == (result.latency, result.ttft, result.tpot)
    assert log.tokens_per_s == pytest.approx(result.completed_tokens_per_s, abs=0.01)
    assert (log.valid, log.unofficial, log.queries, log.target_qps) == (False, True, 1000, 100.0)
    assert "more queries" in log.detail["early_stopping_ttft_result"]


def test_the_log_of_a_simulated_run_is_marked_as_simulated(tmp_path: Path) -> None:
    result = mlperf.judge_trace(trace(1000), SMALL, mlperf.MlperfRunFacts(simulated=True))
    run.write_result(tmp_path, result, SMALL, log_files.LogContext("rack", "1", STARTED))
    assert "SIMULATED" in (tmp_path / log_files.SUMMARY).read_text().splitlines()[1]
    assert read_log(tmp_path).sut == "SIMULATED rack"
    assert "unofficial" in (tmp_path / log_files.DETAIL).read_text().splitlines()[0]


def _entries(detail: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(log_files.MARK)) for line in detail.splitlines()]


def test_a_detail_log_counts_its_errors_and_has_no_null() -> None:
    """A query that never completed is an error, and its latency exceeds every limit."""
    run = trace(1000)
    latency = run.latency_ns.copy()
    latency[[3, -1]] = (
        mlperf.UNRESOLVED
    )  # the last one: no rate until the last-issued query completes
    run = run._replace(
        latency_ns=latency, ttft_ns=np.where(latency == mlperf.UNRESOLVED, latency, run.ttft_ns)
    )
    facts = mlperf.MlperfRunFacts(
        dataset="synthetic",
        target_qps=100.0,
        errors=["the measurement is INVALID: late"],
        warnings=["a trial"],
    )
    result = mlperf.judge_trace(run, SMALL, facts)
    detail = log_files.format_detail(result, SMALL, log_files.LogContext("x", "0", STARTED))
    summary = log_files.format_summary(result, SMALL, sut="x")
    entries = _entries(detail)

    assert all(entry["value"] is not None for entry in entries)

    values = {entry["key"]: entry["value"] for entry in entries}
    errors = [entry["value"] for entry in entries if entry["metadata"]["is_error"]]
    assert errors[0].startswith("2 of 1,000 queries ")
    assert errors[1:] == list(facts.errors)
    assert values["num_errors"] == len(errors)
    warnings = [entry["value"] for entry in entries if entry["metadata"]["is_warning"]]
    assert warnings == facts.warnings
    assert "2 ERRORS encountered" in summary and "1 warning encountered" in summary
    assert values["result_max_latency_ns"] == mlperf.UNRESOLVED
    assert values["result_completed_tokens_per_second"] == 0
    assert (values["test_datetime"], values["power_begin"]) == (
        "2026-11-22T02:22:40Z",
        "11-22-2026 02:22:40.791",
    )


def test_the_log_of_a_valid_run_has_no_errors() -> None:
    result, summary, detail = _written()
    assert result.errors == ()
    assert "No errors encountered" in summary and "No warnings encountered" in summary
    assert {entry["key"]: entry["value"] for entry in _entries(detail)}["num_errors"] == 0


def test_the_line_about_the_submission_checker_names_the_two_checked_limits() -> None:
    result, summary, _ = _written(ttft=3 * S, latency=4 * S)
    checks = result.checks
    assert [check.is_below_limit for check in checks] == [False, True]
    line = next(line for line in summary.splitlines() if line.startswith("Submission checker"))
    assert "TTFT fails (p99 < 2000 ms)" in line
    assert "TPOT passes (p99 < 200 ms)" in line
    assert line in " ".join(as_text.render(text.create_report(result), full=True).split())


def test_the_default_output_names_a_missed_limit() -> None:
    run = trace(1000)
    run.ttft_ns[:30] = 2001 * MS
    facts = mlperf.MlperfRunFacts(dataset="synthetic", target_qps=100.0, warnings=["a warning"])
    result = mlperf.judge_trace(run, SMALL, facts)
    rendered = as_text.render(text.create_report(result, gpus=4, run_dir="results/run"))
    assert len(rendered.splitlines()) <= MAX_DEFAULT_LINES
    check_golden("mlperf_missed", rendered)


def test_the_default_output_names_a_valid_rate_that_is_not_sustained() -> None:
    facts = mlperf.MlperfRunFacts(dataset="synthetic", target_qps=100.0, simulated=True)
    result = mlperf.judge_trace(trace(1000), SMALL, facts)
    result = structs.replace(result, sustained=False, sustained_reason="TTFT grows")
    rendered = as_text.render(text.create_report(result, run_dir="results/run"))
    assert len(rendered.splitlines()) <= MAX_DEFAULT_LINES
    check_golden("mlperf_not_sustained", rendered)


def test_the_full_output_of_a_missed_limit_has_every_section() -> None:
    facts = mlperf.MlperfRunFacts(dataset="synthetic", target_qps=100.0, notes=["a note"])
    result = mlperf.judge_trace(trace(1000, ttft=3 * S, latency=4 * S), SMALL, facts)
    check_golden("mlperf_full", as_text.render(text.create_report(result), full=True))


def test_the_page_of_a_run_has_the_rates_of_the_official_window() -> None:
    """The cards of the page show the rates of the MLPerf-style result instead of the run's."""
    result = mlperf.judge_trace(trace(1000), SMALL)
    replace_tiles = text.create_extra_sections(result, gpus=4).replace_tiles
    assert replace_tiles is not None
    summary = load_summary(SUMMARY_EXAMPLE.read_bytes())
    tiles = {tile.name: tile.value for tile in replace_tiles(headline_tiles(summary))}
    tokens, samples = text.completed_rates(result, gpus=4)
    assert tiles["Output throughput"] == tokens.value
    assert tiles["Request throughput"] == samples.value


@given(st.text(max_size=300))
def test_any_text_that_is_no_mlperf_log_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_log(text)


@given(st.data())
def test_damaged_mlperf_logs_raise_only_reported_errors(data: st.DataObject) -> None:
    _, summary, detail = _written()
    cut, place = data.draw(st.integers(0, len(summary))), data.draw(st.integers(0, len(detail)))
    noise = data.draw(st.text(max_size=20))
    try:
        parse_log(summary[:cut] + noise + summary[cut:], detail[:place] + noise)
        parse_log(summary[:cut] + noise, detail[place:])
    except UserError:
        pass
