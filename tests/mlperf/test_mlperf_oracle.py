"""Our rules against the official LoadGen, run for real on a system that answers from memory.

Needs the optional package `mlcommons-loadgen`; without it only the published constants of
tests/mlperf/test_mlperf.py hold.
"""

from __future__ import annotations

import json
import queue
import re
import threading
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec import structs

from loadgen.mlperf import loadgen_log, log_files, official_loadgen, result, rules
from loadgen.mlperf.loadgen_log import LoadGenLog

lg = pytest.importorskip("mlperf_loadgen", reason="needs the optional package mlcommons-loadgen")

SAMPLES = 300
BASE = structs.replace(
    rules.create_test("llama2-70b", "server"),
    samples=SAMPLES,
    min_duration_ns=400_000_000,
    min_queries=100,
)
TOO_LONG_NS = 3_600 * 10**9


class Official(NamedTuple):
    """What LoadGen has made of a run, and the run itself."""

    log: LoadGenLog
    text: str
    trace: result.QueryTrace


def official(
    folder: Any,
    mlperf_test: rules.Test,
    qps: float,
    *,
    one_token: bool = False,
    read: Any = None,
    wanted: Any = None,
    **settings: Any,
) -> Official:
    """Run LoadGen's Server scenario, or the settings `wanted`.

    Query i of the run gets 2 + i % 9 tokens, every 50th one a single one with `one_token`.
    """
    if wanted is None:
        wanted = lg.TestSettings()
        wanted.scenario, wanted.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
        wanted.server_target_qps, wanted.server_target_latency_percentile = (
            qps,
            mlperf_test.percentile,
        )
        wanted.min_duration_ms, wanted.min_query_count = (
            mlperf_test.min_duration_ns // 1_000_000,
            mlperf_test.min_queries,
        )
        wanted.sample_concatenate_permutation = wanted.use_token_latencies = True
        wanted.ttft_latency, wanted.tpot_latency = mlperf_test.ttft_ns, mlperf_test.tpot_ns
        wanted.qsl_rng_seed, wanted.sample_index_rng_seed = (
            mlperf_test.seeds.qsl,
            mlperf_test.seeds.sample_index,
        )
        wanted.schedule_rng_seed = mlperf_test.seeds.schedule
    for name, value in settings.items():
        setattr(wanted, name, value)
    issued: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    tokens: list[int] = []

    def answer() -> None:
        while (query := issued.get()) is not None:
            number = len(tokens)
            tokens.append(1 if one_token and number % 50 == 7 else 2 + number % 9)
            lg.FirstTokenComplete([lg.QuerySampleResponse(query, 0, 0)])
            sum(range(200 * (number % 13)))  # some work, so that no two TPOTs are alike
            lg.QuerySamplesComplete([lg.QuerySampleResponse(query, 0, 0, tokens[number])])

    worker = threading.Thread(target=answer)
    worker.start()
    sut = lg.ConstructSUT(lambda queries: [issued.put(q.id) for q in queries], lambda: None)
    qsl = lg.ConstructQSL(mlperf_test.samples, mlperf_test.samples, lambda _: None, lambda _: None)
    logs, output = lg.LogSettings(), lg.LogOutputSettings()
    output.outdir, logs.enable_trace = str(folder), True
    logs.log_output = output
    lg.StartTestWithLogSettings(sut, qsl, wanted, logs)
    issued.put(None)
    worker.join()
    lg.DestroyQSL(qsl)
    lg.DestroySUT(sut)
    log = loadgen_log.read_log(folder)
    return Official(log, (folder / log_files.SUMMARY).read_text(), (read or _trace)(folder, tokens))


def _trace(folder: Any, tokens: list[int]) -> result.QueryTrace:
    """Read LoadGen's trace.

    Each latency is the delay of issue plus the time from there, both integers in ns.
    """
    events: dict[str, list[tuple[float, int]]] = {"Latency": [], "Token_Latency": []}
    for line in (
        (folder / "mlperf_log_trace.json").read_text().splitlines()
    ):  # as a whole it is not valid JSON
        name = line[len('{"name":"') :].partition('"')[0]
        if name in events:
            event = json.loads(line.rstrip(","))
            spent = event["args"]["issue_delay"] + event["args"]["issue_to_done"]
            events[name].append((event["ts"], spent))
    ends, firsts = (sorted(events[name]) for name in ("Latency", "Token_Latency"))
    assert [at for at, _ in ends] == [at for at, _ in firsts]
    start = ends[0][0]
    return result.QueryTrace(
        due_ns=np.array([round((at - start) * 1000) for at, _ in ends], np.int64),
        ttft_ns=np.array([spent for _, spent in firsts], np.int64),
        latency_ns=np.array([spent for _, spent in ends], np.int64),
        tokens=np.array(tokens, np.int64),
    )


def test_an_offline_run_agrees_with_mlperf_loadgen(tmp_path: Any) -> None:
    """One query of whole passes: samples and tokens per second until the last one is done."""
    mlperf_test = structs.replace(
        rules.create_test("llama2-70b", "offline"),
        samples=SAMPLES,
        min_duration_ns=10_000_000,
        min_queries=SAMPLES,
    )
    qps = 50_000.0
    settings = {"scenario": lg.TestScenario.Offline, "offline_expected_qps": qps}
    official_run = official(
        tmp_path,
        structs.replace(mlperf_test, ttft_ns=1, tpot_ns=1),
        qps,
        read=_offline_trace,
        **settings,
    )
    our_mlperf_result = result.judge_trace(official_run.trace, mlperf_test)

    assert (
        our_mlperf_result.queries
        == official_run.log.queries
        == rules.offline_samples(mlperf_test, qps)
        == 600
    )
    assert official_run.log.latency == our_mlperf_result.latency
    assert our_mlperf_result.completed_tokens_per_s is not None
    assert official_run.log.tokens_per_s == float(f"{our_mlperf_result.completed_tokens_per_s:.6g}")
    assert official_run.log.samples_per_s == float(
        f"{our_mlperf_result.completed_samples_per_s:.6g}"
    )
    assert official_run.log.valid == our_mlperf_result.valid


@pytest.mark.parametrize("scenario", ["server", "offline"])
def test_the_detail_log_has_the_keys_of_mlperf_loadgen_in_order(
    tmp_path: Any, scenario: Any
) -> None:
    """All keys and settings equal those of the official LoadGen run with our settings."""
    mlperf_test = structs.replace(
        rules.create_test("llama2-70b", scenario), samples=SAMPLES, min_queries=100
    )
    mlperf_test = structs.replace(mlperf_test, min_duration_ns=20_000_000)
    if scenario == "server":
        mlperf_test = structs.replace(mlperf_test, ttft_ns=TOO_LONG_NS, tpot_ns=TOO_LONG_NS)
    qps = 20_000.0
    wanted = official_loadgen.create_test_settings(mlperf_test, qps)
    official_run = official(
        tmp_path,
        mlperf_test,
        qps,
        read=_trace if scenario == "server" else _offline_trace,
        wanted=wanted,
    )
    our_mlperf_result = result.judge_trace(
        official_run.trace, mlperf_test, result.MlperfRunFacts(dataset="none", target_qps=qps)
    )
    text = log_files.format_detail(
        our_mlperf_result, mlperf_test, log_files.LogContext("PySUT", "0", datetime.now(UTC))
    )
    pairs = [
        _keys_and_values(text),
        _keys_and_values((tmp_path / "mlperf_log_detail.txt").read_text()),
    ]
    keys = [
        [key for key, _ in pair if not key.startswith(("generic_", "error_", "warning_"))]
        for pair in pairs
    ]

    assert keys[0] == keys[1]

    our_values, their_values = map(dict, pairs)
    same = [
        key
        for key in keys[0]
        if key.startswith(("requested_", "effective_", "generated_", "loaded_"))
    ]

    assert {key: our_values[key] for key in same} == {key: their_values[key] for key in same}
    for key in (
        "result_query_count",
        "result_overlatency_query_count",
        "result_validity",
        "num_errors",
    ):
        assert our_values.get(key) == their_values.get(key)
    for key in (
        "result_token_throughput",
        "result_tokens_per_second",
        "result_completed_tokens_per_second",
    ):
        assert our_values.get(key, 0) == pytest.approx(their_values.get(key, 0), rel=1e-4)

    sides = (
        log_files.format_summary(our_mlperf_result, mlperf_test, sut="PySUT"),
        official_run.text,
    )
    settings = [
        side.partition("Test Parameters Used")[2].partition("samples_per_query value")[0]
        for side in sides
    ]
    if scenario == "offline":  # LoadGen prints limits that Offline does not have
        settings = [re.sub("(ttft|tpot)_latency.*", "", side) for side in settings]

    assert settings[0] == settings[1]


def _keys_and_values(detail: str) -> list[tuple[str, Any]]:
    entries = (json.loads(line.removeprefix(log_files.MARK)) for line in detail.splitlines())
    return [(entry["key"], entry["value"]) for entry in entries]


def _offline_trace(folder: Any, tokens: list[int]) -> result.QueryTrace:
    """In Offline the trace says when each sample was complete, in ns."""
    done: dict[int, int] = {}
    for line in (folder / "mlperf_log_trace.json").read_text().splitlines():
        if line.startswith('{"name":"Sample"') and "complete_ns" in line:
            event = json.loads(line.rstrip(","))
            done[event["args"]["sample_seq"]] = event["args"]["complete_ns"]
    latency = np.array([done[number] for number in sorted(done)], np.int64)
    none = np.zeros(len(latency), np.int64)
    return result.QueryTrace(none, none, latency, np.array(tokens, np.int64))


def _agree(
    official_run: Official, mlperf_test: rules.Test, *, with_one_token_defect: bool = False
) -> result.MlperfResult:
    """Everything that LoadGen prints, equal to the nanosecond."""
    our_mlperf_result = result.judge_trace(
        official_run.trace, mlperf_test, with_one_token_defect=with_one_token_defect
    )
    log = official_run.log
    assert (log.latency, log.ttft, log.tpot) == (
        our_mlperf_result.latency,
        our_mlperf_result.ttft,
        our_mlperf_result.tpot,
    )
    assert log.queries == our_mlperf_result.queries
    for theirs, rate in (
        (log.samples_per_s, our_mlperf_result.completed_samples_per_s),
        (log.tokens_per_s, our_mlperf_result.completed_tokens_per_s),
        (log.scheduled_samples_per_s, our_mlperf_result.scheduled_samples_per_s),
    ):
        assert rate is not None
        assert theirs == float(f"{rate:.2f}")
    assert log.detail["result_completed_tokens_per_second"] == float(
        f"{our_mlperf_result.completed_tokens_per_s:.6g}"
    )
    assert log.valid == our_mlperf_result.valid
    assert log.detail["result_validity"] == ("VALID" if our_mlperf_result.valid else "INVALID")
    assert log.detail["result_perf_constraints_met"] == all(
        check.is_within_limit for check in our_mlperf_result.checks
    )
    assert log.detail["result_min_duration_met"] == our_mlperf_result.min_duration_met
    assert log.detail["result_min_queries_met"] == our_mlperf_result.min_queries_met
    assert log.detail["early_stopping_met"] == log_files.is_early_stopping_met(our_mlperf_result)
    for check in our_mlperf_result.checks:
        theirs_text = log.detail[f"early_stopping_{check.metric}_result"]
        if check.metric == "ttft" and not our_mlperf_result.checks[1].early_stopping_met:
            assert theirs_text == ""  # LoadGen's && never comes to TTFT
        else:
            assert theirs_text == log_files.early_stopping_text(check).replace("\n", " ")
    return our_mlperf_result


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Official:
    mlperf_test = structs.replace(BASE, ttft_ns=TOO_LONG_NS, tpot_ns=TOO_LONG_NS)
    return official(tmp_path_factory.mktemp("passing"), mlperf_test, 2000.0)


def test_the_schedule_equals_that_of_mlperf_loadgen(passing: Official) -> None:
    planned_arrivals = rules.create_schedule(BASE, 2000.0)
    assert passing.log.detail["generated_query_count"] == len(planned_arrivals.offsets_ns)
    assert passing.log.detail["generated_query_duration"] == planned_arrivals.end_ns
    # the trace has thousandths of a microsecond, counted from another origin
    assert np.abs(passing.trace.due_ns - planned_arrivals.offsets_ns).max() <= 1


def _exact(official_run: Official) -> Official:
    """Replace the scheduled times of the trace, which are rounded, by those of the schedule."""
    planned_offsets_ns = rules.create_schedule(BASE, 2000.0).offsets_ns[
        : len(official_run.trace.due_ns)
    ]
    return official_run._replace(trace=official_run.trace._replace(due_ns=planned_offsets_ns))


def test_a_passing_run_agrees_with_mlperf_loadgen(passing: Official) -> None:
    assert _agree(
        _exact(passing), structs.replace(BASE, ttft_ns=TOO_LONG_NS, tpot_ns=TOO_LONG_NS)
    ).valid


def _limit(values: np.ndarray[Any, np.dtype[np.int64]], over: int) -> int:
    """Return a limit that about `over` of the values exceed."""
    return int(np.sort(values)[len(values) - 1 - over])


@pytest.mark.parametrize(
    ("metric", "over"), [("ttft", 2), ("ttft", 40), ("tpot", 5), ("tpot", 300)]
)
def test_a_run_that_fails_a_limit_agrees_with_mlperf_loadgen(
    passing: Official, tmp_path: Any, metric: str, over: int
) -> None:
    """Limits from an earlier run are exceeded about as often in this one."""
    tpots = (passing.trace.latency_ns - passing.trace.ttft_ns) // (passing.trace.tokens - 1)
    limits = {"ttft_ns": TOO_LONG_NS, "tpot_ns": TOO_LONG_NS}
    limits[f"{metric}_ns"] = _limit(passing.trace.ttft_ns if metric == "ttft" else tpots, over)
    mlperf_test = structs.replace(BASE, **limits)
    our_mlperf_result = _agree(_exact(official(tmp_path, mlperf_test, 2000.0)), mlperf_test)
    (other,) = (check for check in our_mlperf_result.checks if check.metric != metric)
    assert other.violations == 0


def test_a_run_that_fails_both_limits_has_the_blank_ttft_text_of_mlperf_loadgen(
    tmp_path: Any,
) -> None:
    mlperf_test = structs.replace(BASE, ttft_ns=1, tpot_ns=1)
    our_mlperf_result = _agree(_exact(official(tmp_path, mlperf_test, 2000.0)), mlperf_test)
    assert not our_mlperf_result.valid
    assert {reason.kind for reason in our_mlperf_result.reasons} == {"limit"}
    assert our_mlperf_result.checks[0].missing_queries > 0


def test_a_run_with_too_few_queries_agrees_with_mlperf_loadgen(tmp_path: Any) -> None:
    mlperf_test = structs.replace(BASE, ttft_ns=TOO_LONG_NS, tpot_ns=TOO_LONG_NS, min_queries=700)
    our_mlperf_result = _agree(
        _exact(official(tmp_path, mlperf_test, 2000.0, max_query_count=600)), mlperf_test
    )
    assert (our_mlperf_result.min_queries_met, our_mlperf_result.exit_code) == (False, 3)


def test_a_run_that_is_too_short_agrees_with_mlperf_loadgen(tmp_path: Any) -> None:
    mlperf_test = structs.replace(BASE, ttft_ns=TOO_LONG_NS, tpot_ns=TOO_LONG_NS)
    our_mlperf_result = _agree(
        _exact(official(tmp_path, mlperf_test, 2000.0, max_duration_ms=250)), mlperf_test
    )
    assert (our_mlperf_result.min_duration_met, our_mlperf_result.exit_code) == (False, 3)


@pytest.mark.parametrize(
    ("total_ns", "count", "mean_ns"),
    [
        (7_614_900, 900, 8_461),
        # LoadGen 6.0.17 printed this mean on a slow host: it divides as unsigned integers.
        (-7_614_900, 900, 20_496_382_304_113_263),
        (-5, 1, -5),
    ],
)
def test_a_mean_of_negative_times_is_the_one_that_loadgen_prints(
    total_ns: int, count: int, mean_ns: int
) -> None:
    values_ns = np.zeros(count, np.int64)
    values_ns[0] = total_ns
    assert result._compute_spread(values_ns).mean == mean_ns


def test_one_token_responses_agree_with_mlperf_loadgen(tmp_path: Any) -> None:
    """LoadGen gives such queries no tokens and a negative TPOT; our metrics leave them out."""
    mlperf_test = structs.replace(BASE, ttft_ns=TOO_LONG_NS, tpot_ns=TOO_LONG_NS)
    official_run = _exact(official(tmp_path, mlperf_test, 2000.0, one_token=True))
    lenient = _agree(official_run, mlperf_test, with_one_token_defect=True)

    assert lenient.tpot is not None
    assert lenient.tpot.min is not None
    assert lenient.tpot.min < 0
    our_mlperf_result = result.judge_trace(official_run.trace, mlperf_test)
    assert our_mlperf_result.tpot is not None
    assert (
        our_mlperf_result.one_token_replies
        == our_mlperf_result.queries - our_mlperf_result.tpot.count
        > 0
    )
    assert our_mlperf_result.tpot.min is not None
    assert our_mlperf_result.tpot.min >= 0
