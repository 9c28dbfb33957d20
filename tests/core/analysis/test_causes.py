"""Explanations of slow requests name the cause that a simulated server was given.

`benchmarks/causes.py` makes the runs and says how often this holds; here is one seed of each.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import repository_paths
from make_examples import MS, blank
from numpy.typing import NDArray

import loadgen
from loadgen.cli.app import main
from loadgen.core.analysis import cause_detectors
from loadgen.core.analysis.causes import explain
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.sections import Explanation
from loadgen.core.metrics.summary import load_summary
from loadgen.core.results.manifest import RunManifest
from loadgen.core.server_metrics.series import UP, MetricSample
from loadgen.core.slo import Slo, Term
from loadgen.runs.text import render

pytestmark = pytest.mark.commands


sys.path.append(str(repository_paths.ROOT / "benchmarks"))
BENCHMARK = importlib.import_module("causes")


@pytest.mark.parametrize("cause", BENCHMARK.CAUSES)
def test_an_injected_cause_is_named_with_its_evidence(cause: str) -> None:
    explanation = BENCHMARK.explain_run(cause, 3)
    assert explanation.causes[0].code == cause, explanation
    assert (
        explanation.text.startswith("Likely: ")
        and explanation.causes[0].evidence in explanation.text
    )
    assert 0.5 <= explanation.causes[0].share <= 1


@pytest.mark.parametrize("seed", [3, 4])
def test_a_run_without_a_cause_has_no_explanation(seed: int) -> None:
    explanation = BENCHMARK.explain_run("clean", seed)
    assert explanation.text == "" and explanation.causes == ()


def test_requests_of_one_instant_have_no_growing_queue() -> None:
    case = SimpleNamespace(
        excess_shares={"queue": 1.0}, ttft_ns=np.array([1e9, 2e9]), relative_time=np.zeros(2)
    )
    assert cause_detectors.detect_growing_queue(cast("cause_detectors.Case", case)) is None


def test_a_queue_without_server_timing_is_a_possible_cause_only() -> None:
    explanation = BENCHMARK.explain_run("queue", 3, has_server_timing=False)
    assert (explanation.causes[0].code, explanation.causes[0].sure) == ("queue", "possible")
    assert BENCHMARK.explain_run("client", 3, has_server_timing=False).causes[0].sure == "likely"
    slow_network = BENCHMARK.explain_run(
        "network", 4, has_server_timing=False
    )  # not to be told from a slow server
    assert "network" not in [cause.code for cause in slow_network.causes]


def test_a_queue_that_the_server_reports_as_prefill_is_a_possible_cause() -> None:
    """Dynamo reports time from the worker on: 2 ms of queue and 53 s of prefill for 300 tokens."""
    rows, samples = BENCHMARK.simulate_run("queue", 3)
    rows["server_prefill_ns"] += rows["server_queue_ns"] - 2_000_000
    rows["server_queue_ns"] = 2_000_000
    explanation = explain([Columns(rows)], RunManifest(), samples)
    assert (explanation.causes[0].code, explanation.causes[0].sure) == ("queue", "possible")
    assert "as prefill" in explanation.text


@pytest.mark.parametrize("capped", [True, False])
def test_a_power_cap_is_evidence_only_if_it_starts_with_the_slowdown(capped: bool) -> None:
    """The throttle reasons of nvidia-smi are evidence only if they change with the slowdown."""
    rows, samples = BENCHMARK.simulate_run("power", 3)
    without = explain([Columns(rows)], RunManifest(), samples)
    step_s = float(without.causes[0].evidence.removeprefix("from t=").partition(" s on")[0])
    first_s, last_s = rows["due_ns"].min() / 1e9, rows["due_ns"].max() / 1e9
    for t_s in np.arange(first_s - 1, last_s + 1, 1.0).tolist():
        mark = 4.0 if capped and t_s > first_s + step_s else 1.0
        sample_values = {
            "nvidia_smi_throttle_reasons": mark,
            "nvidia_smi_power_watts": 700.0,
            UP: 1.0,
        }
        samples += [
            MetricSample(t_s=t_s, target=None, page="nvidia-smi", name=name, labels="", value=value)
            for name, value in sample_values.items()
        ]
    explanation = explain(
        [Columns(rows)], RunManifest(), sorted(samples, key=lambda sample: sample.t_s)
    )

    assert explanation.causes[0].code == "power"
    assert ("report a power cap" in explanation.causes[0].evidence) is capped


def late(rows: NDArray[np.void], every_s: float, longest_ms: float) -> None:
    """Delay the requests of a client that is stopped every `every_s` for up to `longest_ms`."""
    since_ns = rows["due_ns"] % int(every_s * 1e9)
    lag_ns = np.maximum(int(longest_ms * 1e6) - since_ns, 0)
    for column in ("sent_ns", *LATER):
        rows[column] += np.where(rows[column] >= 0, lag_ns, 0)


LATER = (
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "first_answer_ns",
    "last_token_ns",
    "end_ns",
    "done_ns",
)


@pytest.mark.parametrize("account", [True, False])
def test_a_client_that_stops_repeatedly_is_the_cause(
    account: bool,
) -> None:
    """What it sent late comes in bursts at a fixed distance: nothing holds the server up."""
    rows, samples = BENCHMARK.simulate_run("clean", 3)
    late(rows, 15, 1500)
    if not account:
        rows["server_queue_ns"] = rows["server_prefill_ns"] = -1
    explanation = explain([Columns(rows)], RunManifest(), samples)
    assert [cause.code for cause in explanation.causes] == ["client"], explanation
    assert explanation.causes[0].sure == "likely"


@pytest.mark.parametrize("account", [True, False])
def test_an_overload_is_named_together_with_a_late_client(account: bool) -> None:
    rows, samples = BENCHMARK.simulate_run("queue", 3)
    if not account:
        rows["server_queue_ns"] = rows["server_prefill_ns"] = -1
    alone = explain([Columns(rows)], RunManifest(), samples)

    assert [cause.code for cause in alone.causes] == ["queue"]

    for longest_ms in (3_000, 12_000, 40_000):
        both = rows.copy()
        late(both, 50, longest_ms)
        explanation = explain([Columns(both)], RunManifest(), samples)
        assert {cause.code for cause in explanation.causes} >= {"queue"}, (longest_ms, explanation)
        assert "the median TTFT grew" in explanation.text

    assert {cause.code for cause in explanation.causes} >= {"queue", "client"}


def test_connect_times_of_a_stopped_client_do_not_blame_the_network() -> None:
    """A real client that was stopped for 1.2 s spent half of the lateness connecting."""
    rows, samples = BENCHMARK.simulate_run("clean", 3)
    late(rows, 15, 1500)
    rows = np.sort(rows, order="due_ns")
    new = (rows["due_ns"] % 15_000_000_000 > 300_000_000) & (
        np.arange(len(rows)) % 7 > 0
    )  # the first had open ones
    rows["reused"] = ~new
    rows["ready_ns"] = np.where(new, rows["sent_ns"], rows["due_ns"])

    assert [cause.code for cause in explain([Columns(rows)], RunManifest(), samples).causes] == [
        "client"
    ]


def test_growing_ttft_without_server_timing_is_explained_by_a_possible_queue() -> None:
    """Four slots at twice their load: TTFT grows from 1.6 to 6 s without server timing."""
    rows, samples = BENCHMARK.simulate_run("clean", 3)
    rows = np.sort(rows[rows["first_token_ns"] > 0], order="due_ns")
    waited = np.linspace(1_600, 6_000, len(rows)).astype("i8") * 1_000_000
    rows["server_queue_ns"] = rows["server_prefill_ns"] = -1
    for column in LATER[1:]:
        rows[column] += waited
    slo = Slo(terms=(Term(metric="ttft", limit_ns=1_000_000_000, quantile=0.95),))
    explanation = explain([Columns(rows)], RunManifest(slo=slo), samples)

    assert [(cause.code, cause.sure) for cause in explanation.causes] == [("queue", "possible")], (
        explanation
    )

    late(rows, 5, 4_000)
    explanation = explain([Columns(rows)], RunManifest(slo=slo), samples)
    assert [cause.code for cause in explanation.causes] == ["queue", "client"]


def test_responses_that_arrive_at_once_are_buffered() -> None:
    rows, samples = BENCHMARK.simulate_run("clean", 3)
    rows["first_token_ns"] = rows["first_answer_ns"] = rows["last_token_ns"]
    explanation = explain([Columns(rows)], RunManifest(), samples, ("tpot",))
    assert (explanation.causes[0].code, explanation.causes[0].share) == ("held_back", 1.0)


def test_a_metric_that_the_report_omits_is_no_evidence() -> None:
    rows, samples = BENCHMARK.simulate_run("power", 3)
    assert explain([Columns(rows)], RunManifest(), samples, ("tpot",)).causes == ()


@pytest.mark.parametrize(("last_ms", "named"), [(2_700, True), (1_400, False)])
def test_equal_waits_are_explained_by_a_queue_only_if_ttft_grows(last_ms: int, named: bool) -> None:
    """A queue from the start is found only because TTFT grows.

    240 requests in 1.2 s went to a vLLM with 8 sequences. TTFT grew from 1.1 s to 2.7 s, so no
    request took three times as long as the fast ones.
    """
    rows, samples = BENCHMARK.simulate_run("clean", 3)
    rows = np.sort(rows[rows["first_token_ns"] > 0], order="due_ns")
    waited = np.linspace(1_100, last_ms, len(rows)).astype("i8") * 1_000_000
    rows["server_queue_ns"] = waited
    for column in ("first_event_ns", "first_token_ns", "last_token_ns", "end_ns", "done_ns"):
        rows[column] += waited
    explanation = explain([Columns(rows)], RunManifest(), samples)

    assert [cause.code for cause in explanation.causes] == ["queue"] * named, explanation
    assert explanation.slow == 0
    if named:
        assert explanation.causes[0].sure == "likely"
        assert "the median TTFT grew" in explanation.text


def test_a_run_of_fewer_than_200_requests_is_not_explained() -> None:
    rows, samples = BENCHMARK.simulate_run("queue", 3)
    explanation = explain([Columns(rows[:199])], RunManifest(), samples)
    assert (explanation.text, explanation.causes) == ("", ())
    assert "199 requests are too few" in explanation.not_examined
    assert explain([], RunManifest()) == Explanation()


def few_requests(*, queue_ms: int = -1, grows: bool = False, count: int = 130) -> NDArray[np.void]:
    """Return requests due over 22 s, with a TTFT of 7.6 s and the server's own queue time."""
    rows = blank(count)
    rows["due_ns"] = rows["sent_ns"] = rows["ready_ns"] = np.arange(count) * 170 * MS
    ttft_ms = np.linspace(200, 15_000, count) if grows else np.full(count, 7_600)
    rows["first_token_ns"] = rows["due_ns"] + (ttft_ms * MS).astype(np.int64)
    rows["last_token_ns"] = rows["end_ns"] = rows["done_ns"] = rows["first_token_ns"] + 500 * MS
    rows["reused"] = 1
    rows["server_queue_ns"] = queue_ms * MS if queue_ms >= 0 else -1
    return rows


MISSED = RunManifest(slo=Slo(terms=(Term(metric="ttft", limit_ns=100 * MS, quantile=0.99),)))


def page(name: str, *values: tuple[float, float]) -> list[MetricSample]:
    return [
        MetricSample(
            t_s=t_s, target=0, page="http://gpu/metrics", name=name, labels="", value=value
        )
        for t_s, value in values
    ]


QUEUE_TIMES = [
    *page("vllm:request_queue_time_seconds_sum", (-1, 10.0), (30, 985.0)),
    *page("vllm:request_queue_time_seconds_count", (-1, 10.0), (30, 140.0)),
]
WAITING = [
    *page("vllm:num_requests_waiting", (0, 0.0), (2, 40.0), (15, 45.0), (25, 44.0)),
    *page(UP, *((t_s, 1.0) for t_s in range(30))),
]
SHORT_QUEUE = [
    *page("vllm:request_queue_time_seconds_sum", (-1, 10.0), (30, 11.0)),
    *page("vllm:request_queue_time_seconds_count", (-1, 10.0), (30, 140.0)),
]


@pytest.mark.parametrize(
    ("rows", "samples", "sure"),
    [
        (few_requests(queue_ms=7_500), [], "likely"),
        (few_requests(queue_ms=100), [], None),
        (few_requests(), QUEUE_TIMES, "likely"),
        (few_requests(), WAITING, "likely"),
        (few_requests(), SHORT_QUEUE, None),
        (few_requests(grows=True), [], "possible"),
        (few_requests(), [], None),
        (few_requests(queue_ms=7_500, count=20), [], "likely"),
        (few_requests(queue_ms=7_500, count=19), [], None),
    ],
    ids=[
        "by timing",
        "the server was slow",
        "by queue times of the page",
        "by waiting requests of the page",
        "a short queue on the page",
        "grows",
        "no evidence",
        "20 requests",
        "19 requests",
    ],
)
def test_a_queue_that_explains_a_missed_ttft_is_named_from_20_requests_on(
    rows: NDArray[np.void], samples: list[MetricSample], sure: str | None
) -> None:
    explanation = explain([Columns(rows)], MISSED, samples)
    assert [(cause.code, cause.sure) for cause in explanation.causes] == (
        [] if sure is None else [("queue", sure)]
    )
    assert explanation.not_examined, "causes other than a queue need more requests"


def test_no_queue_is_named_if_the_client_was_late() -> None:
    rows = few_requests(grows=True)
    rows["sent_ns"] = rows["first_token_ns"] - 50 * MS
    assert explain([Columns(rows)], MISSED).causes == ()


def test_a_queue_is_no_cause_if_the_ttft_objective_is_met() -> None:
    slo = Slo(terms=(Term(metric="ttft", limit_ns=60_000 * MS, quantile=0.99),))
    assert explain([Columns(few_requests(queue_ms=7_500))], RunManifest(slo=slo)).causes == ()


@pytest.mark.parametrize("count", [199, 200])
def test_an_overload_of_few_requests_names_its_queue(tmp_path: Path, count: int) -> None:
    load = ["--isl", "2000", "--osl", "200", "--request-rate", "900", "-n", str(count)]
    options = ["--url", "sim:gb300-vm", "--warmup", "0", "--slo", "ttft:100ms", "--seed", "1"]
    with pytest.raises(SystemExit):
        main(["run", *load, *options, "--out", str(tmp_path / "r")])
    summary = load_summary((tmp_path / "r" / "summary.json").read_bytes())
    assert [cause.code for cause in summary.causes.causes] == ["queue"]


def test_the_explanation_is_printed_before_the_verdict(tmp_path: Path) -> None:
    """More than four GPUs serve: the queue grows from the beginning."""
    run = loadgen.run(
        "rag",
        url="sim:gb300-vm",
        request_rate=100,
        duration="60s",
        warmup=0,
        seed=1,
        out=tmp_path / "r",
    )

    assert run.summary.causes.causes[0].code == "queue"
    above = " ".join(render(run.summary).rsplit("VALID", 1)[0].split())
    assert "Likely: " in above and "the median TTFT grew" in above


@pytest.mark.parametrize(
    ("rate", "length", "code", "expected_text"),
    [
        (
            "33",
            ("-d", "5m"),
            "batch",
            "Likely: TPOT was",
        ),  # begins empty: less is decoded at first
        (
            "28",
            ("-d", "5m", "--warmup", "3m"),
            "batch",
            r"Possible: TPOT was about \d\d(\.\d)? ms \(limit 45 ms\) .* if a lower load",
        ),
        (
            "80",
            ("-d", "5m", "--warmup", "3m"),
            "queue",
            "Likely: overloaded",
        ),
        ("10", ("-d", "5m"), "", ""),
    ],
)
def test_an_objective_that_all_requests_miss_has_a_cause(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rate: str,
    length: tuple[str, ...],
    code: str,
    expected_text: str,
) -> None:
    slo = ("--slo", "ttft:2s:p95", "--slo", "tpot:45ms:p95")

    with pytest.raises(SystemExit):
        main(
            [
                "run",
                "rag",
                "--url",
                "sim:gb300-vm",
                "--request-rate",
                rate,
                *length,
                *slo,
                "--seed",
                "3",
                "--full",
                "-o",
                str(tmp_path / "r"),
            ]
        )
    document = json.loads((tmp_path / "r" / "summary.json").read_bytes())["causes"]
    assert re.match(expected_text, document["text"])
    assert bool(document["text"]) == bool(expected_text)
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(expected_text or r"No bottleneck found\.", printed)
    assert [cause["code"] for cause in document["causes"]][:1] == [code] * bool(code)
