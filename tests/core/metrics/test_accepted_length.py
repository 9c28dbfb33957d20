"""The accepted length of speculative decoding is measured, and compared with the stated one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from command_line import exits
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st

import loadgen
from loadgen.contracts.evaluate import TermEvaluator
from loadgen.contracts.load_checks import EstimateError
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.stored_validation import read_run
from loadgen.contracts.terms import ContractTerm
from loadgen.core.accepted_lengths import AcceptedLengthTarget, parse_target, published_lengths
from loadgen.core.errors import UNSOUND, CombinedError, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.accepted_length import MIN_STEPS, NOT_REPORTED, judge_accepted_length
from loadgen.core.metrics.sections import Speculation
from loadgen.core.metrics.summary import dump_summary
from loadgen.core.metrics.windows import Window
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.stats.intervals import Interval
from loadgen.core.units import InvalidValueError
from loadgen.core.workload import load, read_flags, recipe_fingerprint
from loadgen.runs.accepted_length import describe_verdict
from loadgen.sim.engine.latency_model import LatencyModel, LatencyOptions, parse_distribution
from loadgen.sim.server.metrics_pages import ServerMetrics
from loadgen.sim.server.options import Options
from loadgen.sim.server.speculation_counters import create_speculation_counters

VLLM = "vllm:spec_decode_num_"
WINDOW = Window(start_s=10.0, end_s=20.0)
TARGET = AcceptedLengthTarget(length=2.5)


def read_page(t_s: float, drafts: float, accepted: float) -> list[MetricSample]:
    """Return one read of a page of vLLM with these counters."""
    values = {f"{VLLM}drafts_total": drafts, f"{VLLM}accepted_tokens_total": accepted, "up": 1.0}
    return [
        MetricSample(t_s=t_s, target=0, page="p", name=name, labels="", value=value)
        for name, value in values.items()
    ]


def test_the_accepted_length_comes_from_the_counters_of_the_measurement_window() -> None:
    # The warm-up has a length of 4, and the window one of 2.5.
    samples = [
        *read_page(0.0, 5000, 9000),
        *read_page(9.5, 15_000, 39_000),
        *read_page(15.0, 25_000, 54_000),
        *read_page(20.5, 35_000, 69_000),
        *read_page(30.0, 90_000, 400_000),
    ]
    check = judge_accepted_length(TARGET, None, samples, WINDOW)
    assert (check.realised, check.steps, check.source) == (2.5, 20_000, "counters")
    assert check.comparable is True and check.difference == 0


@pytest.mark.parametrize(
    ("accepted", "comparable"), [(15_249, True), (15_250, True), (15_251, False), (14_749, False)]
)
def test_accepted_lengths_are_comparable_within_one_percent_of_the_target(
    accepted: int, comparable: bool
) -> None:
    samples = [*read_page(0.0, 0, 0), *read_page(30.0, 10_000, accepted)]
    check = judge_accepted_length(TARGET, None, samples, WINDOW)
    assert check.comparable is comparable


def test_a_negative_difference_that_rounds_to_zero_is_printed_without_a_sign() -> None:
    samples = [*read_page(0.0, 0, 0), *read_page(30.0, 100_000, 149_990)]
    check = judge_accepted_length(TARGET, None, samples, WINDOW)
    assert check.difference is not None and check.difference < 0
    assert "-" not in describe_verdict(check)


def test_too_few_steps_leave_the_accepted_length_undecided() -> None:
    samples = [*read_page(0.0, 0, 0), *read_page(30.0, MIN_STEPS - 1, 1.5 * (MIN_STEPS - 1))]
    check = judge_accepted_length(TARGET, None, samples, WINDOW)
    assert check.comparable is None and check.reason and check.realised == 2.5


def test_without_counters_the_accepted_length_comes_from_responses_or_gauges() -> None:
    by_responses = Speculation(requests=9, drafted=60_000, accepted=30_000, length=2.5)
    check = judge_accepted_length(TARGET, by_responses, [], WINDOW)
    assert (check.source, check.steps, check.comparable) == ("responses", 20_000, True)

    check = judge_accepted_length(TARGET, Speculation(server_length=2.6), [], WINDOW)
    assert (check.source, check.steps, check.comparable) == ("gauges", None, False)

    check = judge_accepted_length(TARGET, None, [], WINDOW)
    assert (check.realised, check.comparable) == (None, None) and check.reason


@given(
    st.integers(1, 8).flatmap(
        lambda drafts: st.tuples(st.just(drafts), st.floats(1.0, drafts + 1.0))
    ),
    st.lists(st.integers(1, 4000), min_size=30, max_size=60),
)
def test_the_measured_accepted_length_equals_that_of_the_simulated_server(
    planted: tuple[int, float], output_tokens: Sequence[int]
) -> None:
    draft_tokens, length = planted
    options = Options(accepted_length=length, draft_tokens=draft_tokens)
    counters = create_speculation_counters(options)
    assert counters is not None
    for tokens in output_tokens:
        counters.add_response(tokens)

    latencies = LatencyOptions(
        ttft=parse_distribution("5ms", ""), itl=parse_distribution("1ms", "")
    )
    page = ServerMetrics(counters).prometheus_text(LatencyModel(latencies), "sim")
    samples = [
        MetricSample(t_s=t_s, target=0, page="p", name=key.name, labels=key.labels, value=value)
        for t_s, is_end in ((0.0, False), (30.0, True))
        for key, value in {**series.parse_page(page), series.SeriesKey("up", ""): 1.0}.items()
        if is_end or key.name == "up"
    ]
    check = judge_accepted_length(AcceptedLengthTarget(length=length), None, samples, WINDOW)
    drafts = sum(tokens - 1 for tokens in output_tokens) / length
    if drafts >= 1:
        assert check.realised == pytest.approx(length, rel=2 / drafts)


def test_an_accepted_length_above_the_drafts_of_a_simulated_server_is_refused() -> None:
    with refused(UserError, "out_of_range"):
        create_speculation_counters(Options(accepted_length=5.0, draft_tokens=3))
    assert create_speculation_counters(Options()) is None


def test_a_target_length_is_a_number_or_the_name_of_a_published_one() -> None:
    assert parse_target("2.49") == parse_target(2.49) == AcceptedLengthTarget(length=2.49)
    by_name = parse_target("deepseek-v4-pro-mtp:3")
    assert by_name == AcceptedLengthTarget(length=2.49, name="deepseek-v4-pro-mtp:3")
    for wrong in (
        "0.9",
        "mtp",
        "deepseek-v4-pro-mtp:9",
        "deepseek-v4-pro-mtp:0",
        "x:3",
        True,
        "-2",
    ):
        with pytest.raises(InvalidValueError):
            parse_target(wrong)


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("1000", "out_of_range", "1 to 999"),
        ("-1", "out_of_range", "1 to 999"),
        ("nan", "out_of_range", "1 to 999"),
        ("1e3", "out_of_range", "1 to 999"),
        ("abc", "invalid_value", "1 to 999"),
        ("deepseek-v4-pro-mtp", "invalid_value", "deepseek-v4-pro-mtp:N"),
    ],
)
def test_an_invalid_target_length_is_refused_with_its_range_or_missing_part(
    tmp_path: Path, text: str, code: str, hint: str
) -> None:
    with pytest.raises(InvalidValueError) as refused_target:
        parse_target(text)
    assert refused_target.value.code == code and hint in refused_target.value.hint

    # The message of a file has the value as its subject once.
    file = tmp_path / "w.yaml"
    file.write_text(WORKLOAD.replace("2.49", text))
    with pytest.raises(CombinedError) as refused_file:
        load(str(file), read_flags())
    assert str(refused_file.value).split("-->")[0].count(text) == 1


def test_published_accepted_lengths_are_possible_and_documented() -> None:
    rows = published_lengths()
    assert len({row.name for row in rows}) == len(rows) == 14
    page = (Path(__file__).parents[3] / "docs/reference/accepted-lengths.md").read_text("utf-8")
    for row in rows:
        assert len(row.lengths) == 8
        assert all(1 < length <= 1 + drafts for drafts, length in enumerate(row.lengths, 1))
        lengths = " | ".join(f"{length:.2f}" for length in row.lengths)
        assert f"| `{row.name}` | {lengths} |" in page


WORKLOAD = "name: w\naccepted_length: 2.49\nrequests: {input_tokens: 60, output_tokens: 40}\n"


def run_with_counters(
    tmp_path: Path, name: str, accepted_per_draft: float, **settings: str
) -> Path:
    """Return the folder of a simulated run, to which the counters of a server were added."""
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    flags = read_flags(request_rate="20", num_requests="200", seed="7", warmup="0")
    workload = load(str(tmp_path / "w.yaml"), flags)
    target = settings.get("accepted_length")
    options = Settings(
        url="sim:gb300-vm",
        out=tmp_path / name,
        accepted_length=None if target is None else parse_target(target),
    )
    folder = execute(workload, options)[1]
    samples = [*read_page(-1.0, 0, 0), *read_page(60.0, 20_000, 20_000 * accepted_per_draft)]
    lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
    (folder / series.FILE).write_bytes(lines)
    return folder


def test_a_run_states_its_target_length_and_a_comparison_reports_other_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = run_with_counters(tmp_path, "a", 1.49)
    check = loadgen.load(same).summary.accepted_length
    assert check is not None and (check.comparable, check.target) == (True, 2.49)

    other = run_with_counters(tmp_path, "b", 1.79, accepted_length="deepseek-v4-pro-mtp:2")
    other_check = loadgen.load(other).summary.accepted_length
    assert other_check is not None and other_check.target == 2.27
    assert other_check.comparable is False

    capsys.readouterr()
    assert exits("compare", same, other, "--json") == 0
    comparison = json.loads(capsys.readouterr().out)["comparison"]
    assert list(comparison["accepted_lengths"].values()) == pytest.approx([2.49, 2.79])
    assert len(comparison["accepted_length_notes"]) == 2
    assert exits("compare", same, same, "--json") == 0
    assert json.loads(capsys.readouterr().out)["comparison"]["accepted_length_notes"] == []


def test_a_target_length_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "v.yaml").write_text(WORKLOAD.replace("accepted_length: 2.49\n", ""))
    flags = read_flags(request_rate="20", num_requests="200")
    fingerprints = {
        recipe_fingerprint(load(str(tmp_path / name), flags), "server")
        for name in ("w.yaml", "v.yaml")
    }
    assert len(fingerprints) == 1


def test_a_contract_term_limits_the_difference_from_the_target_length(tmp_path: Path) -> None:
    folder = run_with_counters(tmp_path, "a", 1.5)
    (folder / "summary.json").write_bytes(dump_summary(loadgen.load(folder).summary))
    recorded = read_run(folder, tmp_path)
    term = ContractTerm(kind="accepted_length", limit=0.01)
    estimate = evaluate(recorded, term)
    assert estimate.value == pytest.approx((2.5 / 2.49 - 1) * 100)
    assert estimate.low == estimate.high == estimate.value

    unknown = msgspec.structs.replace(
        recorded, summary=msgspec.structs.replace(recorded.summary, accepted_length=None)
    )
    with pytest.raises(EstimateError):
        evaluate(unknown, term)


CONTRACT = """name: c
horizon: 2s
levels:
  - {name: steady, workload: w.yaml, rate: 20/s, requests: 400, must: [{accepted_length: 1%}]}
"""


def test_more_load_is_not_advised_if_no_server_reports_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    contract = tmp_path / "contract.yaml"
    contract.write_text(CONTRACT)
    out = tmp_path / "validation"
    assert exits("validate", contract, "--url", "sim:gb300-vm", "--seed", "1", "-o", out) == UNSOUND

    printed = capsys.readouterr()
    term = json.loads((out / "verdict.json").read_text())["levels"][0]["terms"][0]
    assert (term["verdict"], term["code"]) == ("INCONCLUSIVE", "unmeasurable")
    assert term["reason"] == NOT_REPORTED
    assert "no server reports drafted" in " ".join(printed.out.split())
    assert "--extend" not in printed.out + printed.err


def evaluate(run: RecordedRun, term: ContractTerm) -> Interval:
    """Return the metric of a term from one run."""
    level = MeasuredLevel(runs=(run,))
    evaluator = TermEvaluator(level, all_levels={}, confidence=0.95, horizon_s=60.0)
    return evaluator.evaluate(term).interval
