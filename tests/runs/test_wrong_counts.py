"""Servers whose counts, streams or lengths are wrong: every output of a run says so."""

import html
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from queueing import fail, rows
from run_fixtures import NO_PAGES, says, write
from servers import shared

import loadgen
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.summary import Summary, exit_code
from loadgen.core.server_metrics.series import ServerTotals
from loadgen.render import html as as_html
from loadgen.runs import kind, outcome
from loadgen.runs.server_text import describe_server
from loadgen.runs.text import render as text
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.processes
REQUESTED_TOKENS = 40
SLOW = Options(ttft="300ms", itl="1ms")
WIDE = tuple(f"{name}:100%" for name in ("send_lag_share", "stamp_error_share", "cpu_share"))
"""Validity limits so wide that a busy test machine stays below them."""


def run(out: Path, fault: str = "", requests: int = 60, **options: object) -> Summary:
    """Run against the simulated server with `fault` in every response and return the summary."""
    server = shared(SLOW)
    headers = {"X-Sim-Fault": fault} if fault else {}
    known = {
        "request_rate": 200,
        "num_requests": requests,
        "input_tokens": 20,
        "output_tokens": REQUESTED_TOKENS,
        "seed": 3,
        "limit": WIDE,
    }
    return loadgen.run(
        out=out, headers=headers, **{"url": server.url, **NO_PAGES, **known, **options}
    ).summary  # type: ignore[arg-type]


def assert_in_every_output(sentence: str, run_dir: Path, summary: Summary) -> None:
    """Assert that text, page, JSON and JUnit of a run contain a sentence."""
    for output, text_of_output in outputs(run_dir, summary).items():
        assert " ".join(sentence.split()) in html.unescape(text_of_output), output


def caveat_of(summary: Summary, code: str) -> str:
    """Return the first caveat with a code."""
    verdict = summary.verdict
    sentences = zip(verdict.caveat_codes, verdict.caveats, strict=True)
    return next(sentence for reason, sentence in sentences if reason.code == code)


def outputs(out: Path, summary: Summary) -> dict[str, str]:
    """Return text, page, JSON and JUnit of a run, on one line each."""
    junit = "\n".join(case.text for case in outcome.build_cases([("r", summary)]))
    places = {
        "text": text(summary),
        "page": as_html.render(kind.report(kind.load(out))),
        "JSON": (out / "summary.json").read_text(),
        "JUnit": junit,
    }
    return {place: re.sub(r"\s+", " ", rendered_text) for place, rendered_text in places.items()}


@pytest.mark.parametrize("reported_tokens", [20, 7, 0, 100_000_000])
def test_token_counts_that_contradict_the_stream_are_withheld(
    tmp_path: Path, reported_tokens: int
) -> None:
    summary = run(tmp_path / "r", f"wrong_count@{reported_tokens}", slo=("tpot:1s:p90",))

    assert (
        summary.tokens.output
        is summary.tokens.steady_output_per_s
        is summary.tokens.output_per_s
        is None
    )
    assert (
        summary.tpot_ms.p50
        is summary.tpot_mlperf_ms.p50
        is summary.itl_ms
        is summary.drift.output_per_s
        is None
    )
    assert summary.goodput.met is summary.goodput.share is None
    assert says(summary.verdict.caveat_codes, "withheld")
    stage = summary.stages[0]
    assert stage.tokens.steady_output_per_s is None and stage.tpot_ms.p50 is None
    assert_in_every_output(caveat_of(summary, "withheld"), tmp_path / "r", summary)


def test_unknown_token_counts_are_not_compared_with_those_of_the_server() -> None:
    served = ServerTotals(pages=(), output_tokens=4_800, client_output_tokens=None)

    count, *_ = describe_server(served)

    assert count.startswith("4,800 output tokens counted by the server")


def test_token_counts_that_differ_by_end_tokens_are_accepted(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", "wrong_count@42")  # of 40: two end tokens
    assert "tokens" not in summary.withheld_metrics and summary.tokens.output == 42 * 60


@pytest.mark.parametrize(
    ("fault", "note"),
    [("one_event", "arrived in one piece"), ("no_text", "had tokens but no text")],
)
def test_responses_without_a_time_span_have_no_tpot(tmp_path: Path, fault: str, note: str) -> None:
    summary = run(tmp_path / "r", fault, slo=("tpot:1s:p90",))

    assert summary.tpot_undefined == 60 and summary.tpot_ms.count == 0
    assert (summary.tpot_no_span, summary.tpot_no_output) == (
        (60, 0) if fault == "one_event" else (0, 60)
    )
    assert summary.goodput.met is None and summary.goodput.share is None
    assert note in " ".join(text(summary).split()) and "too few tokens" not in text(summary)

    (term,) = summary.goodput.slo
    assert_in_every_output(term.undecided, tmp_path / "r", summary)


def test_shortened_responses_are_a_caveat_with_the_missing_tokens(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", "clamp@13")
    assert says(summary.verdict.caveat_codes, "shortened", got=13 * 60, asked=40 * 60)
    assert_in_every_output(caveat_of(summary, "shortened"), tmp_path / "r", summary)


def test_dropped_starts_are_not_offered_load(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", url="sim:h100x8", max_in_flight=2, slo=("ttft:10s:p50",))

    assert summary.requests.dropped > 40
    assert not summary.verdict.valid and says(summary.verdict.codes, "dropped", requests=60)
    assert exit_code(summary) == 3

    assert_in_every_output(summary.verdict.reasons[0], tmp_path / "r", summary)
    rendered_text = " ".join(text(summary).split())
    assert "SLO not judged" in rendered_text and "MISSED" not in rendered_text, (
        "it is not known what the server would have done"
    )
    # The measurement, its objective, and whether the load was sustained.
    outcomes = [case.outcome for case in outcome.build_cases([("r", summary)])]
    assert outcomes == ["error", "skipped", "skipped"]
    assert "INVALID, SLO NOT JUDGED" in outcome.render_markdown([("r", summary)])


def test_failures_of_the_server_miss_the_slo_and_leave_the_run_valid(tmp_path: Path) -> None:
    records = rows(1, 300)
    fail(records, 0.3)
    summary = kind.load(write(tmp_path / "r", records)).summary
    assert summary.verdict.valid and summary.goodput.met is False and exit_code(summary) == 1
    validity, *terms = outcome.build_cases([("r", summary)])
    assert [validity.outcome, *(term.outcome for term in terms)] == ["passed", "failed", "failed"]
    assert "SLO MISSED" in " ".join(text(summary).split())


def test_a_high_error_rate_without_an_slo_fails_a_build(tmp_path: Path) -> None:
    records = rows(1, 300)
    fail(records, 0.3)
    summary = replace(kind.load(write(tmp_path / "r", records)).summary, goodput=Goodput())
    assert exit_code(summary) == 1
    validity, error_rate = outcome.build_cases([("r", summary)])
    assert (validity.outcome, error_rate.outcome) == ("passed", "failed")


def test_drops_caused_by_a_stalled_server_miss_the_slo(tmp_path: Path) -> None:
    """Of what was sent, all are over the limit: that is no fault of the load."""
    slow = run(tmp_path / "r", url="sim:h100x8", max_in_flight=20, slo=("ttft:1ms:p50",))
    assert slow.requests.dropped > 3
    assert slow.verdict.valid and slow.goodput.met is False and exit_code(slow) == 1
    assert says(slow.verdict.caveat_codes, "not_offered")
    assert_in_every_output(caveat_of(slow, "not_offered"), tmp_path / "r", slow)
    document = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert document["goodput"]["met"] is False
    assert "no response" in text(slow), "none failed: some were dropped"
