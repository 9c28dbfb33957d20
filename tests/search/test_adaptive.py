"""A load that finds its own limit: its steps, what is sustained in the end, and what is said where nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from command_line import exits
from runs import NO_PAGES

from loadgen.core.execution import run, steering
from loadgen.core.execution.events import LoadStarted, RunEvent, StepBegun
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics.summary import load_summary
from loadgen.core.results import store
from loadgen.core.results.manifest import AdaptivePlan
from loadgen.core.results.record import ROW, STATUS
from loadgen.core.schedule import arrivals
from loadgen.core.schedule.dispatcher import Dispatcher, Start
from loadgen.core.schedule.steered import End, LoadStep
from loadgen.core.slo import Slo, Term
from loadgen.core.workload import (
    Closed,
    FixedTokens,
    Poisson,
    Stage,
    Synthetic,
    Workload,
    read_flags,
)
from loadgen.core.workload.loading import given as load
from loadgen.evidence.remake import remade
from loadgen.repeated.capacity import load_capacity
from loadgen.result_kinds import opened
from loadgen.search import adaptive_run, adaptive_text
from loadgen.search.adaptive import Adaptive, StoredAdaptive, exit_code
from loadgen.search.watch import Goal

pytestmark = pytest.mark.commands

S = 1_000_000_000
SIM = (
    "search",
    "qa",
    "--continuous",
    "--url",
    "sim:gb300-vm",
    "--slo",
    "ttft:200ms:p90",
    "--slo",
    "tpot:200ms:p90",
    "--isl",
    "3000",
    "--osl",
    "8",
    "--window",
    "20",
    "--progress",
    "off",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """An adaptive run in virtual time, and its exit code."""
    folder = tmp_path_factory.mktemp("adaptive") / "run"
    return folder, exits(*SIM, "--start", "4", "--seed", "2", "-d", "120", "-o", str(folder))


def stored(folder: Path) -> StoredAdaptive:
    return msgspec.json.decode((folder / adaptive_run.FILE).read_bytes(), type=StoredAdaptive)


def test_a_load_grows_backs_off_and_is_sustained(found: tuple[Path, int]) -> None:
    folder, code = found
    result = stored(folder)
    answer, steps = result.answer, result.steps
    assert code == 0
    assert (answer.reason, answer.sustained) == ("found", True)
    assert [step.trial.ask.load for step in steps[:4]] == [4, 8, 16, 32]
    assert steps[3].trial.outcome == "over" and steps[3].trial.early
    assert steps[4].trial.ask.load < 32
    assert answer.interval is not None and answer.steady is not None
    assert 16 < answer.interval.low <= answer.interval.value <= answer.interval.high < 32
    assert answer.steady == steps[-1].trial.ask.load <= answer.interval.value
    assert result.sustained_s == 120


def test_its_steps_are_the_stages_of_the_run_and_only_what_was_sustained_is_measured(
    found: tuple[Path, int],
) -> None:
    folder, _ = found
    header, rows, *_ = store.read_run(folder)
    result = stored(folder)
    last = header.stages[-1]
    assert [stage.measured for stage in header.stages] == [False] * (len(header.stages) - 1) + [
        True
    ]
    assert (last.name, last.rate) == ("sustain", result.answer.steady)
    assert last.end_ns is not None and last.end_ns - last.start_ns == 120 * S
    counts = np.bincount(rows["stage"], minlength=len(header.stages))
    assert counts.tolist() == [stage.slots for stage in header.stages]
    assert (rows["status"] == STATUS["ok"]).all()
    for i, stage in enumerate(header.stages):
        due = rows["due_ns"][rows["stage"] == i]
        assert stage.start_ns <= due.min() and due.max() < (stage.end_ns or 0)
    assert sorted(rows["slot"].tolist()) == list(range(len(rows)))  # no prompt twice, none left out


def test_a_report_makes_the_steps_again_from_the_records(
    found: tuple[Path, int], tmp_path: Path, capsysbinary: Any
) -> None:
    folder, _ = found
    kept = (folder / adaptive_run.FILE).read_bytes()
    capsysbinary.readouterr()
    assert exits("report", str(folder), "--json") == 0
    assert capsysbinary.readouterr().out == kept
    page = tmp_path / "page.html"
    assert exits("report", str(folder), "--html", str(page)) == 0
    printed = capsysbinary.readouterr().out.decode()
    steady = f"{stored(folder).answer.steady:.4g}/s was sustained for 2 min 00 s"
    assert steady in printed and steady in page.read_text()
    assert "Steps over time" in page.read_text()


@pytest.mark.parametrize("killed", [False, True])
def test_a_search_in_one_run_that_was_stopped_gives_no_capacity_anywhere(
    killed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results" / "one"
    assert exits(*SIM, "--start", "4", "--seed", "2", "--max-time", "60s", "-o", str(folder)) == 3
    held = load_capacity((folder / "capacity.json").read_bytes())
    assert (held.state, held.rate_per_s) == ("stopped", 0)
    assert held.go_on.startswith("loadgen search qa --continuous") and str(folder) not in held.go_on
    assert held.go_on.endswith("--max-time TIME")
    if killed:
        for name in ("capacity.json", "adaptive.json", "summary.json", "SHA256SUMS"):
            (folder / name).unlink()
    capsys.readouterr()
    assert exits("report", str(folder)) == 3
    printed = capsys.readouterr().out
    assert "No load was shown to be sustained" in printed
    assert killed or "Begin again with" in printed
    size = ("size", "qa", str(folder), "--users", "5000", "--gpus", "4", "--accept-sample-prices")
    for command in (
        ("compare", str(folder), str(folder)),
        ("cost", str(folder), "--accept-sample-prices"),
        size,
    ):
        assert exits(*command) == 3
        error = capsys.readouterr().err
        assert "stopped before it had sustained a load" in error
        assert "begin again with: loadgen search qa --continuous" in error
    assert exits("report", str(folder.parent)) == 0
    listed = capsys.readouterr().out
    assert "stopped, no load was sustained" in listed and "VALID" not in listed


def test_a_search_in_one_run_is_listed_and_compared_by_its_capacity(
    found: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = found
    assert exits("compare", str(folder), str(folder)) == 0
    rate = f"{stored(folder).answer.steady:.4g} requests/s"
    told = " ".join(capsys.readouterr().out.split())
    assert f"the run of the search at its capacity, {rate} (" in told and "), sustained" in told
    assert exits("report", str(folder.parent)) == 0
    assert f"{rate}, sustained" in capsys.readouterr().out
    assert opened(folder).headline == adaptive_text.sentence(stored(folder))


class Remembers:
    """A steering that keeps what decided."""

    def __init__(self, steering: adaptive_run.AdaptiveSteering) -> None:
        self.plan, self._steering = steering.plan, steering
        self.made: list[Adaptive] = []

    def __call__(self) -> Adaptive:
        self.made.append(self._steering())
        return self.made[-1]

    def finish(self, folder: Path) -> None:
        self._steering.finish(folder)


def test_the_records_give_the_decisions_that_were_made(tmp_path: Path) -> None:
    asked = {
        "slo": ("ttft:200ms:p90",),
        "request_rate": 8,
        "seed": 3,
        "input_tokens": 3000,
        "output_tokens": 8,
    }
    workload, steers = adaptive_run.prepared(
        load("qa", None, read_flags(**asked), None), plan(start=8.0, window_s=10.0, sustain_s=20.0)
    )
    kept = Remembers(steers)
    _, folder = run.execute(
        workload, Settings(url="sim:gb300-vm", out=tmp_path / "run"), steering=kept
    )
    again = adaptive_run.read(folder)
    assert again is not None and any(step.trial.early for step in again.steps)

    def decisions(steps: Any) -> list[Any]:
        return [
            (
                step.stage,
                step.start_s,
                step.judged_from_s,
                step.trial.ask,
                step.trial.outcome,
                step.trial.why,
            )
            for step in steps
        ]

    assert decisions(again.steps) == decisions(kept.made[-1].steps)


def test_lanes_of_a_closed_loop(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = exits(
        "search",
        "qa",
        "--continuous",
        "--url",
        "sim:h100x8",
        "--seed",
        "1",
        "--over",
        "concurrency",
        "--start",
        "2",
        "--isl",
        "2000",
        "--osl",
        "10",
        "--slo",
        "ttft:300ms:p90",
        "--slo",
        "tpot:200ms:p90",
        "--window",
        "10",
        "-d",
        "30",
        "--progress",
        "off",
        "-o",
        str(folder),
    )
    result = stored(folder)
    assert code == 0
    assert result.answer.steady is not None and 38 <= result.answer.steady <= 43
    header, rows, *_ = store.read_run(folder)
    for i, stage in enumerate(
        header.stages
    ):  # lanes are taken over: no more than those of a stage are in flight
        own = rows[rows["stage"] == i]
        starts = np.sort(own["sent_ns"])
        flying = np.searchsorted(starts, starts, "right") - np.searchsorted(
            np.sort(own["done_ns"]), starts, "right"
        )
        assert flying.max() <= (stage.concurrency or 0)


# -- what decides, on made-up servers ----------------------------------------------------------------------------------


def plan(**changed: Any) -> AdaptivePlan:
    values = {
        "over": "rate",
        "start": 1.0,
        "high": 1e6,
        "window_s": 60.0,
        "sustain_s": 600.0,
        "precision": 0.02,
    }
    return AdaptivePlan(**{**values, "run_spread": 0.0, **changed})


def served(
    *, limit: float, knee: float, growth: float = 0.004, most: int = 200_000, **changed: Any
) -> Adaptive:
    """A controller after a run on a server that misses the SLO (1 s) above `limit`, and above `knee` fills slowly:
    there TTFT grows by `growth` s per second, from 0.1 s, for as long as the load stays so high.
    """
    controller = Adaptive(
        Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=S, quantile=0.95),))),
        plan(**changed),
        60 * S,
    )
    step, stage, start = controller.first, 0, 0
    waiting: list[tuple[int, np.void]] = []
    fresh: list[np.void] = []
    is_sent, now, rests, full_s = 0, 0, False, 0.0
    rng = np.random.default_rng(1)
    for _ in range(most):
        now += S
        while not rests and start + is_sent * S / step.load < min(now, start + step.length_ns):
            due = round(start + is_sent * S / step.load)
            above = max(full_s + (due - now) / S, 0.0) * growth if step.load > knee else 0.0
            ttft = 2.0 if step.load > limit else 0.1 * float(rng.uniform(0.9, 1.1)) + above
            row = np.zeros(1, ROW)
            row["stage"], row["due_ns"], row["sent_ns"], row["first_token_ns"] = (
                stage,
                due,
                due,
                due + round(ttft * S),
            )
            row["last_token_ns"] = row["end_ns"] = row["done_ns"] = due + round((ttft + 1) * S)
            row["output_tokens"], row["output_events"] = 10, 10
            waiting.append((int(row["done_ns"][0]), row[0]))
            is_sent += 1
        full_s = full_s + 1 if step.load > knee and not rests else 0.0
        fresh = [row for done, row in waiting if done <= now]
        waiting = [entry for entry in waiting if entry[0] > now]
        flying = [Start(0, int(row["stage"]), -1, 0, -1, int(row["due_ns"])) for _, row in waiting]
        move = controller.look(now, np.array(fresh, ROW), flying)
        if isinstance(move, End):
            return controller
        rests = rests if move is None else not isinstance(move, LoadStep)
        if isinstance(move, LoadStep):
            step, stage, start, is_sent = move, stage + 1, now, 0
    raise AssertionError("it never ended")


def test_a_load_that_grows_slowly_is_not_published() -> None:
    """It holds in every window, and in the whole of what is to be sustained; only its growth tells."""
    controller = served(limit=10.0, knee=6.0, growth=0.0001)
    answer = controller.search.answer
    assert answer.held is not None and answer.held > 7.5  # by the windows alone
    refused = [
        step
        for step in controller.steps
        if step.trial.ask.kind == "sustain" and not step.trial.sustained
    ]
    assert refused and all("grows" in step.trial.sustained_why for step in refused)
    assert answer.sustained is True and answer.steady is not None and answer.steady <= 6


def test_no_load_holds() -> None:
    controller = served(limit=0.01, knee=1e9)
    answer = controller.search.answer
    assert (answer.reason, answer.load, answer.steady) == ("none", None, None)
    assert min(step.trial.ask.load for step in controller.steps) == 1 / 16


def test_the_highest_load_allowed_is_sustained_where_it_holds() -> None:
    answer = served(limit=1e9, knee=1e9, high=5.0).search.answer
    assert (answer.reason, answer.steady, answer.interval) == ("highest", 5.0, None)


def test_no_step_begins_after_the_time_allowed() -> None:
    controller = served(limit=10.0, knee=1e9, longest_s=200.0)
    assert controller.search.answer.reason == "time"
    assert controller.steps[-1].start_s < 200 <= controller.steps[-1].end_s


# -- the timetable while the run goes ----------------------------------------------------------------------------------


def dispatcher(arrival: Any) -> tuple[Dispatcher, Stage]:
    stage = Stage(name="x", arrival=arrival, duration_ns=100 * S, measured=False)
    one: Any = FixedTokens(value=1)
    workload = Workload(
        name="x", requests=Synthetic(input_tokens=one, output_tokens=one), stages=(stage,)
    )
    return Dispatcher(arrivals.build(workload, 1)), stage


def test_a_stage_that_ends_early_leaves_nothing_to_send() -> None:
    agenda, stage = dispatcher(Poisson(rate=10))
    begun = agenda.ready(5 * S, 1000)
    agenda.end_stage(5 * S)
    assert agenda.next_ns() is None and not agenda.done
    agenda.begin_stage(arrivals.at_load(stage, 20), 1, 7 * S)
    later = agenda.ready(9 * S, 1000)
    assert [start.number for start in begun + later] == list(range(len(begun) + len(later)))
    assert {start.stage for start in later} == {1} and min(start.due_ns for start in later) >= 7 * S
    agenda.end_stage(9 * S)
    agenda.stop()
    assert not list(agenda.unsent())
    assert agenda.schedule.slots == len(begun) + len(later)


@pytest.mark.parametrize("lanes", [2, 8])
def test_lanes_are_taken_over_by_the_next_stage(lanes: int) -> None:
    agenda, stage = dispatcher(Closed(concurrency=4, ramp_ns=0))
    first = agenda.ready(0)
    agenda.end_stage(S)
    agenda.begin_stage(arrivals.at_load(stage, lanes), 1, S)
    most = agenda.in_flight + len(agenda.ready(S))
    for start in first:
        agenda.finished(start.number, 2 * S, ok=True)
        agenda.ready(2 * S)
        most = max(most, agenda.in_flight)
    assert most == max(lanes, 4)
    assert agenda.in_flight == lanes


# -- over HTTP, and what is refused ------------------------------------------------------------------------------------


@pytest.mark.processes
def test_an_interrupted_run_says_what_it_knew(tmp_path: Path) -> None:
    stage = Stage(name="x", arrival=Poisson(rate=20), duration_ns=60 * S)
    four: Any = FixedTokens(value=4)
    slo = Slo(terms=(Term(metric="ttft", limit_ns=5 * S, quantile=0.9),))
    asked = Workload(
        name="x",
        requests=Synthetic(input_tokens=four, output_tokens=four),
        stages=(stage,),
        slo=slo,
        seed=1,
    )
    workload, steers = adaptive_run.prepared(
        asked, plan(start=20.0, window_s=1.0, sustain_s=60.0, high=21.0)
    )

    seen: list[list[str]] = []
    stops: list[Callable[[], None]] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, LoadStarted):
            stops.append(event.load.stop)
        if isinstance(event, StepBegun):  # the folder of a run that is killed now has its steps
            seen.append([stage.name for stage in store.read_run(tmp_path / "run").header.stages])
            asyncio.get_running_loop().call_soon(
                stops[0]
            )  # so in the second step, however long the first one took

    summary, folder = run.execute(
        workload, Settings(out=tmp_path / "run", **NO_PAGES), (hear,), steering=steers
    )
    result = stored(folder)
    assert summary.run.state == "interrupted" and result.answer.reason == "interrupted"
    assert result.steps and result.steps[0].trial.outcome == "under"
    assert seen[0] == ["bracket", "bracket"]
    assert summary.requests.lost == 0 and summary.warmup.lost == 0


def test_a_rule_that_is_broken_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    stop = ("--stop-when", "ttft:p50:150ms")
    assert exits(*SIM, *stop, "--start", "16", "--seed", "2", "-d", "120", "-o", str(folder)) != 0
    assert store.read_run(folder).header.state == "stopped"
    assert stored(folder).answer.reason == "stopped"
    assert "--stop-when" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "where"),
    [
        (("--workers", "2"), "--workers 2"),
        (("--low", "3"), "--low"),
        (("--resume", "here"), "--resume"),
        (("--no-sustain",), "--sustain"),
        (("--run-spread", "3%"), "--run-spread"),
        (("--over", "time"), "--over"),
        (("--window", "soon"), "--window soon"),
        (("-d", "5s"), "--duration 5s"),
        (("--high", "1"), "--high 1"),
    ],
)
def test_what_an_adaptive_run_cannot_have_is_said(
    typed: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*SIM, *typed) == 2
    error = capsys.readouterr().err
    assert f"--> {where}" in error and "hint:" in error


def test_conversations_and_loads_without_an_slo_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        exits("search", "agentic", "--continuous", "--url", "sim:gb300-vm", "--slo", "ttft:2s") == 2
    )
    assert "conversations" in capsys.readouterr().err
    assert exits("search", "noisy-neighbour", "--continuous", "--url", "sim:gb300-vm") == 2
    error = capsys.readouterr().err
    assert "classes with SLOs of their own" in error and "no SLO" not in error
    for flag in (
        ("--window", "10s"),
        ("--strict",),
        ("--dry-run",),
        ("--junit", "x.xml"),
        ("--github",),
    ):
        assert exits("search", "qa", *flag) == 2
        error = capsys.readouterr().err
        assert f"--> {flag[0]}" in error and "--continuous" in error


def test_a_continuous_search_serves_builds_as_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    short = (*SIM, "--start", "4", "--seed", "2", "-d", "20", "--max-time", "60s", "-o", str(out))
    assert exits(*short, "--dry-run") == 0 and not out.exists()
    assert "from 4/s up" in capsys.readouterr().out
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert exits(*short, "--github") == 2 and not out.exists()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page.md"))
    code = exits(*short, "--strict", "--junit", str(tmp_path / "j.xml"), "--github")
    assert (code, exits("report", str(out), "--strict", "--no-html")) == (code, code)
    cases = ElementTree.parse(tmp_path / "j.xml").getroot().iter("testcase")
    said = {
        case.attrib["name"]: {child.tag for child in case} & {"error", "failure", "skipped"}
        for case in cases
    }
    assert "the measurement is valid" in said
    assert said["a load is sustained"] == {0: set(), 1: {"failure"}}.get(code, {"error"})
    assert "TTFT p90 at most 200 ms" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("reason", "code", "outcome"),
    [
        ("time", 3, "error"),
        ("interrupted", 3, "error"),
        ("stopped", 3, "error"),
        ("", 3, "error"),
        ("invalid", 3, "error"),
        ("none", 1, "failed"),
        ("unconfirmed", 1, "failed"),
        ("found", 1, "failed"),
    ],
)
def test_a_search_that_was_stopped_is_neither_passed_nor_failed(
    found: tuple[Path, int], reason: str, code: int, outcome: str
) -> None:
    whole = stored(found[0])
    passed = adaptive_text.case(whole, "g", strict=True)
    assert (passed.outcome, exit_code(whole, strict=True)) == (
        "passed",
        0,
    ) and "was sustained for" in passed.text
    answer = msgspec.structs.replace(whole.answer, reason=reason, steady=None, sustained=None)
    cut = msgspec.structs.replace(whole, answer=answer)
    case = adaptive_text.case(cut, "g", strict=False)
    assert (exit_code(cut, strict=False), case.outcome) == (code, outcome)
    assert case.text.startswith("No load was shown to be sustained")
    inconclusive = msgspec.structs.replace(
        whole, answer=msgspec.structs.replace(whole.answer, sustained=None)
    )
    assert [
        adaptive_text.case(inconclusive, "g", strict=strict).outcome for strict in (False, True)
    ] == [
        "skipped",
        "error",
    ]


def test_the_first_lines_say_how_the_load_will_grow() -> None:
    said = steering.words(plan(over="concurrency", start=4.0, sustain_s=1200.0, longest_s=3600.0))
    assert "from 4 in flight up" in said and "sustained for 20 min" in said and "after 1 h" in said


def test_machines_and_cost_are_by_the_load_that_was_sustained(
    found: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run at one load is a lower bound; this one has seen higher loads fail."""
    folder, _ = found
    result, shown = stored(folder), load_capacity((folder / "capacity.json").read_bytes())
    assert result.answer.interval is not None
    assert (shown.rate_per_s, shown.evidence, shown.confirmed) == (result.answer.steady, ".", True)
    assert (shown.lower_bound, shown.sustained) == (False, result.answer.sustained)
    assert shown.low_per_s is not None
    assert shown.low_per_s <= shown.rate_per_s
    summary = load_summary((folder / "summary.json").read_bytes())
    assert shown.output_tokens_per_s == summary.tokens.steady_output_per_s
    where = ("--gpus", "4", "--users", "5000", "-o", str(folder.parent / "sized"))
    assert exits("size", summary.run.workload, str(folder), *where) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "capacity by search" in text
    assert "LOWER BOUND" not in text
    assert exits("report", str(folder.parent)) == 0
    assert exits("report", str(folder)) == 0


def test_the_plan_is_in_the_header(found: tuple[Path, int]) -> None:
    header = store.read_run(found[0]).header
    assert header.adaptive == plan(start=4.0, window_s=20.0, sustain_s=120.0)


def test_a_bundle_makes_the_steps_and_the_capacity_again(found: tuple[Path, int]) -> None:
    folder, _ = found
    made = {one.name: one.data for one in remade(folder)}
    assert made[adaptive_run.FILE] == (folder / adaptive_run.FILE).read_bytes()
    again, kept = (
        load_capacity(data)
        for data in (made["capacity.json"], (folder / "capacity.json").read_bytes())
    )
    assert again == msgspec.structs.replace(kept, recipe=""), (
        "what was asked is not among the records"
    )
