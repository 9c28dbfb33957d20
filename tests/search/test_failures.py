"""What a search makes of failed requests: a spent quota, a rate limit, a server at its limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import exits
from msgspec.structs import replace
from run_fixtures import NO_PAGES
from servers import start

from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics.request_counts import ErrorKind, RequestCounts
from loadgen.core.slo import Slo, Term
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.search.failures import describe_failures, describe_refusals
from loadgen.search.goal import Goal
from loadgen.search.search_results import PlannedTrial
from loadgen.search.trial_runner import TrialRunner
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.commands

S = 1_000_000_000
QUOTA = "HTTP 429: You exceeded your current quota, please check your plan (insufficient_quota)"


def request_counts(**errors: tuple[int, str]) -> RequestCounts:
    failed = sum(count for count, _ in errors.values())
    by_error = {
        name: ErrorKind(count=count, first_text=text) for name, (count, text) in errors.items()
    }
    return RequestCounts(
        scheduled=1000,
        ok=1000 - failed,
        failed=failed,
        dropped=0,
        cancelled=0,
        lost=0,
        resent=0,
        by_error=by_error,
    )


@pytest.mark.parametrize(
    ("kind", "text", "is_refusal"),
    [
        ("http_429", QUOTA, True),
        ("http_429", "HTTP 429: Rate limit reached for requests", True),
        ("http_429", "HTTP 429", True),
        ("http_429", "HTTP 429: Model is overloaded", False),
        ("http_429", "HTTP 429: the request queue is full", False),
        ("http_4xx", "HTTP 402: no credit left", True),
        ("http_4xx", "HTTP 404: no such model", False),
        ("http_5xx", "HTTP 503: Service Unavailable", False),
    ],
)
def test_a_spent_quota_and_a_rate_limit_are_refusals_unlike_an_overload(
    kind: str, text: str, is_refusal: bool
) -> None:
    many_request_counts, few_request_counts = (
        request_counts(**{kind: (50, text)}),
        request_counts(**{kind: (10, text)}),
    )
    assert (text in describe_refusals(many_request_counts)) is is_refusal
    assert not describe_refusals(few_request_counts), "1 % of the requests may fail"


def test_failures_are_described_by_kind_with_the_most_frequent_first() -> None:
    described = describe_failures(
        request_counts(http_5xx=(20, "HTTP 503: busy"), timeout_stall=(70, "nothing for 30 s"))
    )
    assert described.index("timeout_stall") < described.index("http_5xx")
    assert "90 of 1,000" in described and "HTTP 503: busy" in described
    assert not describe_failures(request_counts(http_5xx=(10, "HTTP 503")))


@pytest.mark.processes
def test_a_rate_limit_stops_a_search_at_its_first_trial_and_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A spent quota became 26 trials that missed TTFT, and an estimate of 8.4/s."""
    with start(Options(ttft="5ms", itl="1ms", faults="http_429@3600s:0.5", seed=1)) as server:
        options = ["--url", server.url, "--slo", "ttft:2s:p90", "-d", "3s", "--start", "20"]
        assert exits("search", "qa", *options, "-o", str(tmp_path / "s")) == 3
    stored = json.loads((tmp_path / "s" / "search.json").read_text())

    assert stored["answer"]["reason"] == "refused"
    assert stored["answer"]["load"] is None
    assert [trial["code"] for trial in stored["told"]] == ["refused"]
    assert "simulated 429" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "s" / "capacity.json").read_text())["state"] == "stopped"


def test_a_trial_with_more_than_one_percent_of_failures_fails_whatever_the_slo_allows(
    tmp_path: Path,
) -> None:
    """A p50 leaves half of the requests free to fail: a load at which they do has failed."""

    def failing(workload: Workload, settings: Settings, listeners: Any) -> Any:
        summary, folder = run.execute(workload, settings, listeners)
        errors = {"http_5xx": ErrorKind(count=50, first_text="HTTP 503: try again")}
        requests = replace(summary.requests, by_error=errors)
        return replace(summary, requests=requests), folder

    stage = Stage(name="load", arrival=Poisson(rate=20), duration_ns=30 * S)
    tokens = FixedTokens(value=5)
    workload = Workload(
        name="x", requests=Synthetic(input_tokens=tokens, output_tokens=tokens), stages=(stage,)
    )
    trials = TrialRunner(
        output_dir=tmp_path,
        goal=Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=2 * S, quantile=0.5),))),
        make_workload=lambda _: workload,
        settings=Settings(url="sim:gb300-vm", **NO_PAGES),
        seed=1,
        execute=failing,
    )
    result = trials.run(PlannedTrial(number=0, load=20.0, kind="probe", may_pass_early=False))
    assert (result.outcome, result.reason_code) == ("over", "failures")
    assert "HTTP 503: try again" in result.reason
