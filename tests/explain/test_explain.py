"""The difference between a run and the result of another tool is split into parts that add up."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_fixtures
from command_line import exits
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from queueing import fail, rows

from loadgen.core.errors import UserError
from loadgen.core.results import store
from loadgen.core.results.manifest import StagePlan
from loadgen.core.run_summary import summarize
from loadgen.explain.explanation import ExplainedDifference, explain_difference
from loadgen.explain.explanation_text import build_report, list_part_shares
from loadgen.explain.latency_parts import list_redefinitions
from loadgen.explain.parts import (
    PART_LABELS,
    ExplainedMetric,
    MetricName,
    MetricStep,
    split_difference,
)
from loadgen.explain.token_ratio import TokenRatio
from loadgen.interop import export, export_mlcommons, reader
from loadgen.interop.tool_definitions import OWN_LATENCIES, TOOL_DEFINITIONS
from loadgen.render import text
from loadgen.runs.export import json_parts
from loadgen.sim.server.send_log import LoggedRequest, SendLog

RIVALS = Path(__file__).parent.parent / "data/rivals"
RESULT_FILES = sorted(path for path in RIVALS.iterdir() if path.suffix.startswith(".json"))
WRITERS = {
    "vllm": export.export_vllm,
    "aiperf": export.export_aiperf,
    "guidellm": export.export_guidellm,
    "inference-perf": export.export_inference_perf,
    "mlcommons": export_mlcommons.export_mlcommons,
}
MS = 1_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with an early role event, sent late, of which some requests failed."""
    return run_fixtures.write(tmp_path_factory.mktemp("runs") / "ours", create_rows(700))


def create_rows(count: int) -> NDArray[np.void]:
    """Return records whose timestamps all differ, so that every definition has another value."""
    records = rows(3, count)
    records["sent_ns"] = records["due_ns"] + 2 * MS + np.arange(count) % 5 * MS
    records["first_event_ns"] = records["first_token_ns"] - 20 * MS
    records["end_ns"] = records["last_token_ns"] + 9 * MS
    records["done_ns"] = records["end_ns"] + MS
    fail(records, 0.1)
    return records


def write_export(run: Path, form: str, path: Path, **changes: object) -> Path:
    """Write a run as the result file of another tool, with some keys changed, and return the file.

    A key may be dotted: "successes.count".
    """
    stored = store.read_run(run)
    document = json.loads(b"".join(json_parts(WRITERS[form](summarize(*stored), stored))))
    for dotted_key, value in changes.items():
        *parents, key = dotted_key.split(".")
        target = document
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        target[key] = value
    path.write_text(json.dumps(document), "utf-8")
    return path


def by_path(explanation: ExplainedDifference) -> dict[str, ExplainedMetric]:
    return {metric.metric: metric for metric in explanation.metrics}


def changes_of(metric: ExplainedMetric) -> dict[str, float]:
    return {part.name: part.change for part in metric.parts}


# -- the parts add up ------------------------------------------------------------------------------


@pytest.mark.parametrize("file", RESULT_FILES, ids=lambda path: path.name)
def test_the_parts_and_the_rest_add_up_to_the_difference(run: Path, file: Path) -> None:
    explanation = explain_difference(run, file, allow_differences=True)
    assert len(explanation.metrics) >= 5
    for metric in explanation.metrics:
        total = sum(changes_of(metric).values()) + metric.unexplained
        scale = max(abs(metric.ours), abs(metric.theirs))
        assert total == pytest.approx(metric.difference, abs=1e-4 * scale + 1e-9), metric


@pytest.mark.parametrize("form", WRITERS)
def test_definitions_explain_all_differences_of_one_run_in_the_format_of_another_tool(
    run: Path, tmp_path: Path, form: str
) -> None:
    """The file has the metrics of the same records by the definitions of the tool."""
    theirs = write_export(run, form, tmp_path / "r.json")
    explanation = explain_difference(run, theirs)
    assert explanation.differences == ()
    differing = [metric for metric in explanation.metrics if metric.outcome != "equal"]
    assert len(differing) >= 4
    for metric in explanation.metrics:
        assert abs(metric.unexplained) <= 0.002 * metric.theirs, metric
        assert metric.outcome in ("equal", "explained"), metric
    ttft = by_path(explanation)["ttft_ms.mean"]
    assert changes_of(ttft)["origin"] == pytest.approx(-4, abs=0.05)


def test_explained_values_of_loadgen_equal_those_of_the_summary(run: Path, tmp_path: Path) -> None:
    theirs = write_export(run, "inference-perf", tmp_path / "r.json")
    summary = summarize(*store.read_run(run))
    metrics = by_path(explain_difference(run, theirs))
    for name in ("ttft_ms", "tpot_ms", "inter_chunk_ms", "e2e_ms"):
        for statistic in ("mean", "p50", "p99"):
            expected = getattr(getattr(summary, name), statistic)
            assert metrics[f"{name}.{statistic}"].ours == pytest.approx(expected, rel=1e-6)
    assert metrics["load.completed_rps"].ours == summary.load.steady_completed_rps
    assert metrics["tokens.output_per_s"].ours == summary.tokens.steady_output_per_s


def test_each_changed_definition_is_a_separate_part_of_the_difference(
    run: Path, tmp_path: Path
) -> None:
    metrics = by_path(explain_difference(run, write_export(run, "vllm", tmp_path / "r.json")))
    ttft = changes_of(metrics["ttft_ms.mean"])
    assert ttft["first_event"] == pytest.approx(-20)
    tpot = changes_of(metrics["tpot_ms.mean"])
    assert tpot["first_event"] > 0 and tpot["end"] > 0
    assert set(changes_of(metrics["load.completed_rps"])) >= {"tail"}

    guidellm = by_path(explain_difference(run, write_export(run, "guidellm", tmp_path / "g.json")))
    with_ttft = changes_of(guidellm["tpot_with_first_ms.mean"])
    assert with_ttft["origin"] > 0 > with_ttft["divided_tokens"]

    aiperf = by_path(explain_difference(run, write_export(run, "aiperf", tmp_path / "a.json")))
    assert "aggregation" in changes_of(aiperf["tpot_ms.p99"])


@pytest.mark.parametrize("tool", TOOL_DEFINITIONS, ids=lambda row: row.tool)
def test_the_last_redefinition_of_a_latency_equals_the_definition_of_the_tool(tool: Any) -> None:
    for latency in tool.latencies:
        redefinitions = list_redefinitions(
            OWN_LATENCIES[latency.name],
            latency.definition,
            counts_warm_up=True,
            tokens=TokenRatio(counting=1.5),
            percentiles=tool.percentiles,
        )
        assert redefinitions[0].part == "warm_up"
        assert redefinitions[-1].latency.definition == latency.definition


def test_a_step_of_the_same_name_is_added_to_its_part() -> None:
    steps = [MetricStep("failures", 9.0), MetricStep("tail", 8.0), MetricStep("failures", 6.0)]
    metric = split_difference(MetricName("m", "m"), 10.0, steps, 5.0)
    assert changes_of(metric) == {"failures": -3.0, "tail": -1.0}
    assert metric.unexplained == -1.0 and metric.explained_share == pytest.approx(0.8)
    assert metric.outcome == "unexplained"
    assert (
        split_difference(MetricName("m", "m"), 10, steps, 5, expected_variation=1.0).outcome
        == "within_variation"
    )


# -- how the two runs differ -----------------------------------------------------------------------


def test_a_rate_follows_from_requests_in_flight_and_latency(run: Path, tmp_path: Path) -> None:
    summary = summarize(*store.read_run(run))
    theirs = write_export(
        run, "vllm", tmp_path / "r.json", request_throughput=3.0, output_throughput=333.0
    )
    metric = by_path(explain_difference(run, theirs))["load.completed_rps"]
    assert metric.outcome == "explained" and abs(metric.unexplained) < 1e-9
    changes = changes_of(metric)
    rate = metric.ours_redefined
    assert changes["in_flight"] == pytest.approx(3.0 - rate)
    assert summary.requests.failed > 0


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("guidellm_benchmarks.json", "benchmarks.-1.metrics.request_concurrency.successful.mean"),
        ("sglang_bench_serving.jsonl", "concurrency"),
    ],
)
def test_rate_times_latency_equals_the_concurrency_that_tools_report(file: str, path: str) -> None:
    """The part "in_flight" rests on this law, which real files confirm."""
    from loadgen.interop.result_values import find_number

    metrics = reader.read_result(RIVALS / file).metrics
    reported = find_number(json.loads((RIVALS / file).read_text("utf-8")), path)
    in_flight = metrics["load.completed_rps"] * metrics["e2e_ms.mean"] / 1e3
    assert in_flight == pytest.approx(reported, rel=1e-3)


def test_other_token_counts_are_distinguished_from_longer_responses_by_their_time(
    run: Path, tmp_path: Path
) -> None:
    original = json.loads(write_export(run, "vllm", tmp_path / "o.json").read_text("utf-8"))
    tokens = original["total_output_tokens"] * 1.5
    counted = write_export(run, "vllm", tmp_path / "c.json", total_output_tokens=tokens)
    longer = write_export(
        run,
        "vllm",
        tmp_path / "l.json",
        total_output_tokens=tokens,
        mean_e2el_ms=original["mean_ttft_ms"]
        + 1.5 * (original["mean_e2el_ms"] - original["mean_ttft_ms"]),
    )
    by_counting = by_path(explain_difference(run, counted))
    assert "token_counts" in changes_of(by_counting["tokens.output"])
    assert changes_of(by_counting["tpot_ms.mean"])["token_counts"] < 0

    by_length = by_path(explain_difference(run, longer))
    assert "response_lengths" in changes_of(by_length["tokens.output"])
    e2e = by_length["e2e_ms.mean"]
    assert changes_of(e2e)["response_lengths"] > 0 and e2e.outcome == "explained"


def test_a_tool_that_splits_chunks_into_tokens_has_times_of_zero(run: Path, tmp_path: Path) -> None:
    """With 1.25 tokens per chunk, a fifth of the times is 0, and the p50 is our p37.5."""
    stored = json.loads(write_export(run, "inference-perf", tmp_path / "o.json").read_text("utf-8"))
    latency = stored["successes"]["latency"]
    itl = latency["inter_token_latency"] | {"mean": latency["time_per_output_token"]["mean"] / 1.25}
    theirs = write_export(
        run,
        "inference-perf",
        tmp_path / "r.json",
        **{"successes.latency.inter_token_latency": itl},
    )
    metrics = by_path(explain_difference(run, theirs))
    mean = metrics["inter_chunk_ms.mean"]
    assert changes_of(mean)["token_counts"] == pytest.approx(mean.ours / 1.25 - mean.ours, rel=1e-6)
    assert mean.outcome == "explained"
    gaps = store.read_run(run).gaps[0]
    p50 = metrics["inter_chunk_ms.p50"]
    assert p50.ours_redefined == pytest.approx(gaps.quantile(0.375) / MS, rel=1e-6)


def test_a_warm_up_counts_if_the_tool_sent_none(tmp_path: Path) -> None:
    records = create_rows(700)
    records["stage"] = records["slot"] >= 100
    records["first_token_ns"][:100] += 8 * MS
    stages = (
        StagePlan(name="warm-up", arrival="poisson 10/s", slots=100, rate=10.0, measured=False),
        StagePlan(name="load", arrival="poisson 10/s", slots=600, rate=10.0, first_slot=100),
    )
    folder = run_fixtures.write(tmp_path / "r", records, stages=stages)
    with_warm_up = write_export(folder, "mlcommons", tmp_path / "w.json")
    unwarmed = write_export(
        folder, "mlcommons", tmp_path / "u.json", **{"run_config.warmup.enabled": False}
    )
    assert "warm_up" not in changes_of(
        by_path(explain_difference(folder, with_warm_up))["ttft_ms.mean"]
    )
    changes = changes_of(by_path(explain_difference(folder, unwarmed))["ttft_ms.mean"])
    assert changes["warm_up"] != 0


def test_differences_of_counts_are_explained_by_requests_and_failures(
    run: Path, tmp_path: Path
) -> None:
    theirs = write_export(run, "aiperf", tmp_path / "r.json")
    document = json.loads(theirs.read_text("utf-8"))
    document["request_count"]["avg"] *= 2
    document["error_request_count"]["avg"] *= 2
    theirs.write_text(json.dumps(document), "utf-8")
    metrics = by_path(explain_difference(run, theirs, allow_differences=True))
    for path in ("requests.ok", "requests.failed"):
        assert metrics[path].outcome == "explained"
        assert set(changes_of(metrics[path])) <= {"requests", "failures"}


def test_a_different_share_of_failures_is_a_part_of_every_count(run: Path, tmp_path: Path) -> None:
    document = json.loads(write_export(run, "vllm", tmp_path / "o.json").read_text("utf-8"))
    more_failures = {"failed": document["failed"] + 30, "completed": document["completed"] - 30}
    theirs = write_export(run, "vllm", tmp_path / "r.json", **more_failures)
    metrics = by_path(explain_difference(run, theirs))
    assert changes_of(metrics["requests.failed"]) == {"failures": 30}
    assert changes_of(metrics["requests.ok"]) == {"failures": -30}
    assert metrics["requests.failed"].outcome == "explained"


def write_server_log(
    path: Path, *, request_id: str = "", gap_ms: int = 50, output_tokens: int = 200
) -> Path:
    """Write a log with 30 responses of 190 ms and 10 events, and return the file."""
    log = SendLog("all")
    for number in range(30):
        arrival_ns = number * gap_ms * MS
        log.requests.append(
            LoggedRequest(
                number, request_id, arrival_ns, "/v1/chat/completions", 200, 150, output_tokens
            )
        )
        for token in range(10):
            sent_ns = arrival_ns + (100 + 10 * token) * MS
            log.rows.extend((number, token, sent_ns, sent_ns))
    path.write_bytes(log.drain())
    return path


LOGGED_RESULT = {
    "completed": 20,
    "total_input_tokens": 20 * 150,
    "total_output_tokens": 20 * 200,
    "request_throughput": 15.0,
    "mean_e2el_ms": 197.0,
    "p50_ttft_ms": 107.0,
    "p50_e2el_ms": 197.0,
}
"""The result of a tool that measured the last 20 responses of this log, and 7 ms more for each."""


def test_the_server_log_separates_the_delay_of_the_client_from_the_server(
    run: Path, tmp_path: Path
) -> None:
    log = write_server_log(tmp_path / "log")
    theirs = write_export(run, "vllm", tmp_path / "r.json", **LOGGED_RESULT)
    explanation = explain_difference(run, theirs, server_log=log, allow_differences=True)
    assert not any("server log" in item for item in explanation.differences)
    metrics = by_path(explanation)
    ttft = metrics["ttft_ms.p50"]
    assert changes_of(ttft)["client"] == pytest.approx(7)
    assert changes_of(metrics["e2e_ms.p50"])["client"] == pytest.approx(7)
    assert ttft.outcome == "explained" and ttft.unexplained == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "log_options"),
    [
        ({"completed": 99}, {}),
        ({}, {"output_tokens": 10}),
        ({"mean_e2el_ms": 150.0}, {}),
        ({"request_throughput": 30.0}, {}),
        ({"request_throughput": 2.0}, {}),
        ({}, {"gap_ms": 500}),
        ({}, {"request_id": "ours-7"}),
    ],
    ids=["count", "tokens", "faster", "shorter", "longer", "slow load", "our requests"],
)
def test_the_log_of_another_run_is_refused(
    run: Path, tmp_path: Path, changes: dict[str, float], log_options: dict[str, Any]
) -> None:
    assert store.read_run(run).manifest.run == "ours"
    log = write_server_log(tmp_path / "log", **log_options)
    theirs = write_export(run, "vllm", tmp_path / "r.json", **(LOGGED_RESULT | changes))
    with refused(UserError, "mismatch", where=str(log)):
        explain_difference(run, theirs, server_log=log)
    if "completed" not in changes:
        explanation = explain_difference(run, theirs, server_log=log, allow_differences=True)
        assert sum(item.startswith("server log") for item in explanation.differences) >= 1


# -- damaged files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mean_ttft_ms", -5.0),
        ("mean_ttft_ms", math.nan),
        ("p99_e2el_ms", 1e40),
        ("request_throughput", math.inf),
        ("completed", -3),
        ("failed", -1),
        ("total_output_tokens", -200),
        ("p99_itl_ms", 10**400),
        ("p99_itl_ms", -(10**400)),
    ],
)
def test_a_damaged_value_of_a_foreign_result_is_refused_with_its_field(
    run: Path, tmp_path: Path, field: str, value: float
) -> None:
    theirs = write_export(run, "vllm", tmp_path / "r.json", **{field: value})
    with refused(UserError, "damaged_file", where=str(theirs)) as error:
        explain_difference(run, theirs, allow_differences=True)
    assert error.value.key == field
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    assert error.value.values == {"value": f"{number:g}"}


@pytest.mark.parametrize("value", [0, None, "x", [], {}, True, 1e-300, 1e14])
def test_a_value_of_any_type_is_explained_or_refused(
    run: Path, tmp_path: Path, value: object
) -> None:
    theirs = write_export(run, "vllm", tmp_path / "r.json")
    document = json.loads(theirs.read_text("utf-8"))
    numbers = [key for key, number in document.items() if isinstance(number, int | float)]
    changes = dict.fromkeys(numbers[::2], value)
    theirs.write_text(json.dumps(document | changes), "utf-8")
    try:
        explanation = explain_difference(run, theirs, allow_differences=True)
    except UserError as error:
        assert error.hint
        return
    for full in (False, True):
        assert text.render(build_report(explanation), full=full)


def test_a_damaged_value_inside_an_object_is_refused_with_its_path(
    run: Path, tmp_path: Path
) -> None:
    path = "successes.latency.time_to_first_token.mean"
    theirs = write_export(run, "inference-perf", tmp_path / "r.json", **{path: -0.25})
    with refused(UserError, "damaged_file", key=path):
        explain_difference(run, theirs)


@pytest.mark.parametrize("value", [math.nan, -1.0, 1e40])
def test_a_damaged_record_of_aiperf_is_refused_with_its_line(
    run: Path, tmp_path: Path, value: float
) -> None:
    lines = (RIVALS / "aiperf_profile_export.jsonl").read_text("utf-8").splitlines()
    record = json.loads(lines[1])
    record["metrics"]["request_latency"]["value"] = value
    lines[1] = json.dumps(record)
    theirs = tmp_path / "profile_export.jsonl"
    theirs.write_text("\n".join(lines), "utf-8")
    with refused(UserError, "damaged_file", where=f"{theirs}:2"):
        explain_difference(run, theirs, allow_differences=True)


def test_an_infinite_rate_in_a_foreign_result_is_accepted(run: Path) -> None:
    """SGLang writes an infinite request rate for a closed loop."""
    theirs = RIVALS / "sglang_bench_serving.jsonl"
    assert "Infinity" in theirs.read_text("utf-8")
    assert explain_difference(run, theirs, allow_differences=True).metrics


def test_missing_and_truncated_files_have_a_hint(run: Path, tmp_path: Path) -> None:
    theirs = write_export(run, "vllm", tmp_path / "r.json")
    truncated = tmp_path / "truncated.json"
    truncated.write_text(theirs.read_text("utf-8")[:300], "utf-8")
    empty = tmp_path / "empty.json"
    empty.write_text("", "utf-8")
    for other, code in (
        (tmp_path / "missing.json", "missing_file"),
        (truncated, "damaged_file"),
        (empty, "empty_file"),
    ):
        with refused(UserError, code, where=str(other)) as error:
            explain_difference(run, other)
        assert error.value.hint
    with refused(UserError, "missing_file", where=str(tmp_path / "missing")) as error:
        explain_difference(tmp_path / "missing", theirs)
    assert error.value.hint
    with refused(UserError, "missing_file", where=str(tmp_path / "no.log")) as error:
        explain_difference(run, theirs, server_log=tmp_path / "no.log")
    assert error.value.hint


# -- the text --------------------------------------------------------------------------------------


def create_metric(*changes: float, unexplained: float = 0.0) -> ExplainedMetric:
    """Return a metric whose difference has these parts, in the order of all parts."""
    values = list(itertools.accumulate(changes, initial=100.0))
    steps = [MetricStep(name, value) for name, value in zip(PART_LABELS, values[1:], strict=False)]
    theirs = values[-1] + unexplained
    return split_difference(MetricName("load.completed_rps", "requests/s"), 100.0, steps, theirs)


@given(
    changes=st.lists(st.floats(-30, 30), min_size=1, max_size=9),
    unexplained=st.floats(-20, 20) | st.just(0.0),
)
def test_printed_shares_of_the_parts_add_up_to_100_percent(
    changes: list[float], unexplained: float
) -> None:
    metric = create_metric(*changes, unexplained=unexplained)
    if metric.outcome == "equal":
        return
    shares = list_part_shares(metric)
    assert sum(share.percent for share in shares) == 100
    assert sum(share.change for share in shares) == pytest.approx(
        metric.difference, abs=0.02 * abs(metric.difference)
    )
    for share in shares:
        assert abs(share.percent - 100 * share.change / metric.difference) <= 1 + 1e-6


def test_small_parts_of_a_difference_are_combined_in_one_row() -> None:
    metric = create_metric(10.0, 0.15, 0.15, 0.15, 0.15)
    shares = list_part_shares(metric)
    assert [share.percent for share in shares] == [94, 6]
    assert shares[-1].label == "smaller parts"


def test_a_metric_that_is_not_explained_is_printed_by_default(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = write_export(run, "vllm", tmp_path / "r.json", mean_ttft_ms=900.0)
    explanation = explain_difference(run, theirs)
    assert by_path(explanation)["ttft_ms.mean"].outcome == "unexplained"
    assert exits("explain", run, theirs) in (0, 3)
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith("TTFT mean, ms") for row in rows)


# -- the command -----------------------------------------------------------------------------------


def test_the_explain_command_prints_text_json_and_a_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = write_export(run, "vllm", tmp_path / "r.json")
    page = tmp_path / "page.html"
    code = exits("explain", run, theirs, "--html", page)
    printed = capsys.readouterr().out
    assert code in (0, 3) and "vllm bench serve" in printed and "tail" in printed
    assert "from sending" in page.read_text("utf-8")
    assert exits("explain", run, theirs, "--json") == code
    document: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    assert {metric["metric"] for metric in document["metrics"]} >= {"ttft_ms.p50", "requests.ok"}


def test_results_of_different_loads_are_refused_with_their_differences(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = write_export(
        run, "vllm", tmp_path / "r.json", model_id="other", request_rate="20", max_concurrency=8
    )
    with pytest.raises(UserError) as error:
        explain_difference(run, theirs)
    assert error.value.code == "mismatch"
    assert "llama vs. other" in error.value.message and "10/s vs. 8" in error.value.message
    assert exits("explain", run, theirs) == 2
    assert exits("explain", run, theirs, "--anyway") in (0, 3)
    assert "llama vs. other" in capsys.readouterr().out


@pytest.mark.parametrize("field", ["total_input_tokens", "total_output_tokens"])
def test_token_counts_that_no_tokenizer_explains_are_refused_as_a_different_load(
    run: Path, tmp_path: Path, field: str
) -> None:
    document = json.loads(write_export(run, "vllm", tmp_path / "ours.json").read_text("utf-8"))
    with_chat_template = write_export(
        run, "vllm", tmp_path / "near.json", **{field: document[field] * 1.2}
    )
    of_short_requests = write_export(
        run, "vllm", tmp_path / "far.json", **{field: document[field] * 0.1}
    )

    assert explain_difference(run, with_chat_template).differences == ()
    with pytest.raises(UserError) as error:
        explain_difference(run, of_short_requests)
    assert error.value.code == "mismatch"


def test_results_that_cannot_be_explained_are_refused(run: Path, tmp_path: Path) -> None:
    theirs = write_export(run, "vllm", tmp_path / "r.json")
    unknown = tmp_path / "unknown.json"
    unknown.write_text("{}", "utf-8")
    empty_run = run_fixtures.write(tmp_path / "failed", fail_all(rows(1, 30)))
    for ours, other in (
        (theirs, run),
        (run, run),
        (run, unknown),
        (run, tmp_path / "missing.json"),
        (tmp_path / "missing", theirs),
        (empty_run, theirs),
    ):
        assert exits("explain", ours, other) == 2, (ours, other)


def fail_all(records: NDArray[np.void]) -> NDArray[np.void]:
    fail(records, 1.0)
    return records
