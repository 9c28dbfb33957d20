"""The search: its arithmetic by hand, its stops against full runs of a small queue, its interval over many seeds."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import msgspec
import numpy as np
import places
import pytest
from command_line import exits
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from runs import NO_PAGES
from servers import start

from loadgen.cli.app import main
from loadgen.cli.resume import merge_arguments
from loadgen.core import run_folder, seeds
from loadgen.core.errors import UserError
from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import manifest, store
from loadgen.core.results.record import KIND, ROW, STATUS
from loadgen.core.results.spool import Tail
from loadgen.core.slo import Slo, TaskTerm, Term
from loadgen.core.stats.early_stopping import allowed_over
from loadgen.core.stats.students_t import normal_cdf
from loadgen.core.workload import Closed, FixedTokens, Poisson, Stage, Synthetic, Workload, load
from loadgen.mlperf import added as mlperf_added
from loadgen.render import text as as_text
from loadgen.repeated import capacity
from loadgen.runs.show import Show
from loadgen.search import (
    capacity_files,
    experiment,
    search_plan,
    search_report,
    search_text,
    trials_csv,
)
from loadgen.search.capacity_files import ExperimentOutcome
from loadgen.search.forecast import describe_forecast, forecast_search
from loadgen.search.goal import Goal, Outcome
from loadgen.search.load_search import LoadSearch
from loadgen.search.posterior import CapacityPosterior, TrialOutcome
from loadgen.search.progress_estimate import LOWERING_TRIALS, estimate_trials_left
from loadgen.search.search_results import (
    PlannedTrial,
    SearchResult,
    TrialKind,
    TrialResult,
    capacity_and_state,
    exit_code,
    find_capacity_trial,
)
from loadgen.search.search_run import SearchRun
from loadgen.search.search_settings import (
    ENOUGH_TRIALS,
    ESTIMATE_STEP,
    FULL_LENGTH_LAPSE,
    MAX_CONFIRMATIONS,
    SearchSettings,
)
from loadgen.search.trial_monitor import PlannedLoad, TrialMonitor
from loadgen.search.trial_runner import TrialRunner
from loadgen.search.trial_workload import as_trial_workload, with_load
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.commands

S = 1_000_000_000
TTFT = Term(metric="ttft", limit_ns=2 * S)
GOAL = Goal(slo=Slo(terms=(TTFT,)))
CAPACITY = 100.0  # requests per second of the queue below


def queue(rate: float, seed: int, length_s: float = 120) -> np.ndarray:  # type: ignore[type-arg]
    """Rows of an M/M/1 queue from empty, first come first served: TTFT is the wait, a second more to the end."""
    rng = seeds.stream(seed, "queue")
    n = rng.poisson(rate * length_s)
    due = np.sort(rng.random(n)) * length_s
    free, starts = 0.0, np.empty(n)
    for i, (at, service) in enumerate(
        zip(due.tolist(), (rng.standard_exponential(n) / CAPACITY).tolist(), strict=True)
    ):
        free = max(free, at) + service
        starts[i] = free
    rows = np.zeros(n, ROW)
    rows["slot"] = np.arange(n)
    rows["due_ns"] = rows["sent_ns"] = (due * S).astype(np.int64)
    rows["first_token_ns"] = rows["first_answer_ns"] = (starts * S).astype(np.int64)
    rows["last_token_ns"] = rows["end_ns"] = rows["done_ns"] = rows["first_token_ns"] + S
    rows["output_tokens"] = 11
    return rows


def decided(rows: Any, *, early_under: bool = True) -> tuple[str | None, int]:
    """How a watch that looks every 5 s decides, and when (s)."""
    watch = TrialMonitor(GOAL, PlannedLoad(rows["due_ns"]), may_pass_early=early_under)
    rows = rows[np.argsort(rows["done_ns"], kind="stable")]
    for now in range(5, int(rows["done_ns"].max() / S) + 1, 5):
        begin, end = np.searchsorted(rows["done_ns"], ((now - 5) * S, now * S), "right")
        if decision := watch.add_rows(now * S, rows[begin:end]):
            return decision.outcome, now
    return None, 0


def passes(rows: Any) -> bool:
    return bool(GOAL.find_misses(rows).sum() <= GOAL.allowed_misses(len(rows))[0])


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("high", [1e6, 140.0])
def test_an_outcome_tells_of_every_load_though_the_far_ones_are_not_computed(
    high: float, passed: bool
) -> None:
    belief = CapacityPosterior(high / 1e4, high, sampling_sigma=0.01)
    z = (belief.log_loads[:, None] - math.log(100)) / belief.sigmas
    wanted = belief.weights * (
        FULL_LENGTH_LAPSE / 2 + (1 - FULL_LENGTH_LAPSE) * normal_cdf(z if passed else -z)
    )
    belief.update(TrialOutcome(100, passed, FULL_LENGTH_LAPSE))
    assert np.allclose(belief.weights, wanted / wanted.sum(), rtol=1e-12, atol=0)


def test_looks_count_the_misses_of_each_request_once() -> None:
    class Counting(Goal, frozen=True):
        def find_misses(self, rows: Any) -> Any:
            judged.append(len(rows))
            return super().find_misses(rows)

    judged: list[int] = []
    rows = queue(rate=80, seed=1)
    watch = TrialMonitor(Counting(slo=GOAL.slo), PlannedLoad(rows["due_ns"]))
    order = np.argsort(rows["done_ns"])
    for some in np.array_split(order, 100):
        watch.add_rows(int(rows["done_ns"][some[-1]]), rows[some])
    assert sum(judged) == len(rows)


# -- goals -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.sampled_from([0.5, 0.9, 0.99, 0.999]), st.data())
def test_allowed_misses_are_those_that_leave_the_quantile_within(
    n: int, p: float, data: st.DataObject
) -> None:
    """The same as sorted[floor(n * p)] <= limit."""
    over = data.draw(st.integers(0, n))
    values = np.sort(np.array([1] * (n - over) + [3] * over))
    goal = Goal(slo=Slo(terms=(replace_term(TTFT, p),)))
    assert (over <= goal.allowed_misses(n)[0]) == (values[min(int(n * p), n - 1)] <= 2)


def replace_term(term: Term, quantile: float) -> Term:
    return Term(metric=term.metric, limit_ns=term.limit_ns, quantile=quantile)


def test_early_stopping_and_goodput_allow_what_they_say() -> None:
    assert Goal(slo=Slo(terms=(TTFT,)), mlperf=True).allowed_misses(24576) == (allowed_over(24576),)
    assert Goal(slo=Slo(terms=(TTFT,)), mlperf=True).allowed_misses(400) == (-1,)
    assert Goal(slo=Slo(terms=(TTFT,), goodput_share=0.95)).allowed_misses(1000) == (9, 50)


def test_failed_and_dropped_requests_miss_everything() -> None:
    rows = queue(50, 1, 2)
    rows["status"][:3] = STATUS["failed"]
    rows["status"][3] = STATUS["dropped"]
    goal = Goal(slo=Slo(terms=(TTFT,), goodput_share=0.9))
    assert goal.find_misses(rows)[:, :4].all()
    assert goal.find_misses(rows).sum(axis=1).tolist() == [4, 4]


# -- watching ----------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.floats(70, 140))
def test_over_is_never_wrong(seed: int, rate: float) -> None:
    rows = queue(rate, seed)
    outcome, _ = decided(rows, early_under=False)
    assert outcome in (None, "over")
    if outcome == "over":
        assert not passes(rows)


def test_far_above_the_limit_a_probe_ends_early() -> None:
    for seed in range(5):
        outcome, at = decided(queue(150, seed))
        assert (outcome, at < 40) == ("over", True)


def test_far_below_it_ends_early_as_under_and_is_right() -> None:
    for seed in range(3):
        rows = queue(60, seed, 300)
        outcome, at = decided(rows)
        assert (outcome, passes(rows)) == ("under", True)
        assert at < 280


def test_a_queue_that_grows_is_not_taken_for_steady() -> None:
    """Some 4 % above capacity nothing misses for a minute or so; a coin-flip bound would call all of them under."""
    wrong = 0
    for seed in range(10):
        rows = queue(104, seed, 240)
        outcome, _ = decided(rows)
        wrong += outcome == "under" and not passes(rows)
    assert wrong == 0


def test_unresolved_requests_count_as_misses() -> None:
    rows = queue(60, 3, 300)
    stuck = rows["due_ns"] > 60 * S
    rows["done_ns"][stuck & (rows["slot"] % 50 == 0)] = (
        400 * S
    )  # one in fifty never comes back in time
    assert decided(rows)[0] != "under"


# -- searching ---------------------------------------------------------------------------------------------------------


def psychometric(asking: LoadSearch, theta: float, sigma: float, seed: int) -> LoadSearch:
    """Tell a search outcomes that pass with probability Phi((theta - x) / sigma), x the logarithm of the offered."""
    rng = seeds.stream(seed, "outcomes")
    while (trial := asking.next_trial()) is not None:
        luck = rng.normal(0, 0.003)
        x = math.log(trial.load) + luck
        passed = x + rng.normal(0, sigma) <= math.log(theta)
        asking.add_result(
            TrialResult(
                trial=trial,
                outcome="under" if passed else "over",
                ended_early=False,
                duration_s=600,
                offered_load=math.exp(x),
                sampling_noise=0.003,
            )
        )
    return asking


def test_the_interval_covers_the_truth_and_the_answer_is_near() -> None:
    covered = near = 0
    for seed in range(30):  # more of them: benchmarks/search_truth.py coverage
        theta = 100 * 2 ** float(seeds.stream(seed, "theta").uniform(-0.8, 0.8))
        answer = psychometric(
            LoadSearch(SearchSettings(low=50, high=200, precision=0.01)), theta, 0.004, seed
        ).result
        assert answer.interval is not None and answer.load is not None
        covered += answer.interval.low <= theta <= answer.interval.high
        near += abs(answer.load / theta - 1) <= 0.01
        assert answer.stop_reason in ("found", "unconfirmed")
        assert answer.trial_count < 25
    assert covered >= 27
    assert near >= 27


def _tell(asking: LoadSearch, outcome: str, **changed: Any) -> PlannedTrial:
    trial = asking.next_trial()
    assert trial is not None
    told = TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=False,
        duration_s=100,
        offered_load=trial.load,
        sampling_noise=0.003,
    )  # type: ignore[arg-type]
    asking.add_result(msgspec.structs.replace(told, **changed))
    return trial


def test_a_bracket_is_found_by_doubling_and_halving() -> None:
    up = LoadSearch(SearchSettings(low=0.1, high=1000, start=10))
    assert [_tell(up, outcome).load for outcome in ("under", "under", "over")] == [10, 20, 40]
    assert 20 < up.next_trial().load < 40  # type: ignore[union-attr]
    down = LoadSearch(SearchSettings(low=0.1, high=1000, start=10))
    assert [_tell(down, outcome).load for outcome in ("over", "over", "under")] == [10, 5, 2.5]


def test_no_load_holds() -> None:
    asking = LoadSearch(SearchSettings(low=2, high=1000, start=4))
    _tell(asking, "over")
    _tell(asking, "over")
    assert asking.next_trial() is None
    assert (asking.result.stop_reason, asking.result.load) == ("none", None)


def test_the_highest_load_holds() -> None:
    asking = LoadSearch(SearchSettings(low=1, high=16, start=10))
    _tell(asking, "under")
    _tell(asking, "under")
    assert (asking.next_trial(), asking.result.stop_reason, asking.result.highest_passed) == (
        None,
        "highest",
        16,
    )


@pytest.mark.parametrize(
    ("outcome", "reason", "load", "last"), [("under", "highest", 20, 20), ("over", "none", None, 5)]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_point_outside_a_given_bracket_is_not_placed_inside(
    outcome: str, reason: str, load: float | None, last: float, whole: bool
) -> None:
    asking = LoadSearch(SearchSettings(low=5, high=20, is_integer=whole))
    while (trial := asking.next_trial()) is not None:
        assert trial.kind != "confirm"
        _tell(asking, outcome)
    answer = asking.result
    assert (answer.stop_reason, answer.load, answer.interval) == (reason, load, None)
    assert asking.results[-1].load == last and len(asking.results) < 12


def test_an_invalid_probe_is_tried_again_and_a_second_one_ends_the_search_with_what_it_knows() -> (
    None
):
    asking = LoadSearch(SearchSettings(low=1, high=1000, start=10))
    _tell(asking, "under")
    disturbed, again = _tell(asking, "invalid"), _tell(asking, "under")
    assert (again.load, again.number) == (disturbed.load, 2)
    kept = [
        told for told in asking.results if told.outcome != "invalid"
    ]  # what a search that is resumed begins with
    assert (
        LoadSearch(SearchSettings(low=1, high=1000, start=10), kept).next_trial()
        == asking.next_trial()
    )
    assert (_tell(asking, "invalid").load, _tell(asking, "invalid").load) == (40, 40)
    assert (asking.next_trial(), asking.result.stop_reason, asking.result.highest_passed) == (
        None,
        "invalid",
        20,
    )


def found_text(answer: SearchResult, told: Sequence[TrialResult]) -> str:
    return as_text.of_sections(
        [search_text.confirmation_section(answer, told, "/s", simulated=False)]
    )


def test_what_is_not_known_is_not_called_none() -> None:
    said = {}
    for outcome in ("over", "invalid"):
        asking = LoadSearch(SearchSettings(low=5, high=10, start=5))
        while asking.next_trial() is not None:
            _tell(asking, outcome)
        lines = found_text(asking.result, asking.results).splitlines()
        said[outcome] = next(line for line in lines if line.startswith("Capacity "))
    assert said == {"over": "Capacity   none", "invalid": "Capacity   not known"}


def test_what_is_known_after_many_trials_is_confirmed() -> None:
    """A server whose limit varies by 4 % from trial to trial: 2 % are not reached."""
    random, search = Random(3), LoadSearch(SearchSettings(low=0.1, high=64.0, start=1.0))
    while (trial := search.next_trial()) is not None:
        outcome: Outcome = "under" if trial.load < random.gauss(10.0, 0.4) else "over"
        early = outcome == "under" and trial.may_pass_early
        search.add_result(
            TrialResult(
                trial=trial,
                outcome=outcome,
                ended_early=early,
                duration_s=60.0,
                offered_load=trial.load,
                sampling_noise=0.03,
            )
        )
    kinds = [result.kind for result in search.results]
    assert "confirm" not in kinds[:ENOUGH_TRIALS] and kinds[ENOUGH_TRIALS] == "confirm"
    assert (
        search.result.stop_reason == "coarse"
        and len(search.results) <= ENOUGH_TRIALS + MAX_CONFIRMATIONS
    )
    assert search.result.confirmed_load is not None and exit_code(search.result) == 0


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_trials": 2}, "probes"), ({"max_time_s": 150.0}, "time")]
)
def test_limits(limits: dict[str, Any], reason: str) -> None:
    asking = LoadSearch(SearchSettings(low=1, high=1000, start=10, **limits))
    _tell(asking, "under")
    _tell(asking, "over")
    assert (asking.next_trial(), asking.result.stop_reason) == (None, reason)
    assert asking.result.interval is not None


def test_near_what_is_over_only_a_full_length_tells() -> None:
    asking = LoadSearch(SearchSettings(low=80, high=120, precision=0.03))
    _tell(asking, "over")
    trial = asking.next_trial()
    assert trial is not None
    assert trial.may_pass_early == (trial.load * 1.03 <= 98)


def test_lanes_are_whole_numbers() -> None:
    asking = LoadSearch(SearchSettings(low=1, high=512, start=8, is_integer=True, precision=0.02))
    while (trial := asking.next_trial()) is not None:
        assert trial.load == int(trial.load)
        _tell(asking, "under" if trial.load <= 37 else "over")
    assert asking.result.confirmed_load in (36, 37)


def test_a_resumed_search_asks_what_it_would_have_asked() -> None:
    whole = psychometric(LoadSearch(SearchSettings(low=50, high=200)), 90, 0.004, 5)
    half = LoadSearch(SearchSettings(low=50, high=200), whole.results[:4])
    assert half.next_trial() == whole.results[4].trial


# -- a folder of probes ------------------------------------------------------------------------------------------------


def _workload(load: float) -> Workload:
    one: Any = FixedTokens(value=20)
    return Workload(
        name="x",
        requests=Synthetic(input_tokens=one, output_tokens=one),
        stages=(Stage(name="load", arrival=Poisson(rate=load), duration_ns=60 * S),),
        grace_ns=60 * S,
    )


def _probes(folder: Path, **changed: Any) -> TrialRunner:
    term = Term(metric="tpot", limit_ns=40_000_000)
    return TrialRunner(
        output_dir=folder,
        goal=Goal(slo=Slo(terms=(term,))),
        make_workload=lambda trial: _workload(trial.load),
        settings=Settings(url="sim:gb200-vm"),
        seed=7,
        **changed,
    )


def _ask(load: float, number: int = 0, early: bool = False) -> PlannedTrial:
    return PlannedTrial(number=number, load=load, kind="probe", may_pass_early=early)


def test_probes_in_virtual_time_are_stored_and_read_back(tmp_path: Path) -> None:
    written: list[Path] = []

    def execute(*given: Any, **named: Any) -> tuple[Summary, Path]:
        summary, folder = run.execute(*given, **named)
        written.append(folder)
        return summary, folder

    runs = _probes(tmp_path, execute=execute)
    told = [runs.run(_ask(20.0)), runs.run(_ask(2000.0, 1))]
    assert [one.outcome for one in told] == ["under", "over"]
    assert told[1].ended_early and told[1].duration_s < 60
    assert [folder.name for folder in written] == [
        one.run_name for one in told
    ]  # each once, also what ended early
    stored = store.read_run(written[1])
    assert stored.header.state == "decided"
    assert 0 < stored.rows["due_ns"][stored.rows["sent_ns"] >= 0].max() < 60 * S
    assert experiment.read_results(tmp_path) == told
    assert (tmp_path / told[0].run_name / "summary.json").is_file()
    with (tmp_path / experiment.TRIALS_FILE).open("ab") as file:
        file.write(b'{"ask": {"numb')  # cut off
    assert experiment.read_results(tmp_path) == told
    experiment.append_result(tmp_path, told[0])  # on a line of its own
    assert experiment.read_results(tmp_path) == told
    asking = LoadSearch(SearchSettings(low=1, high=10_000, start=20), told)
    answer = runs.save_result(asking)
    assert answer.highest_passed == 20
    lines = (tmp_path / trials_csv.CURVE_FILE).read_text().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("20,")


def test_the_load_of_conversations_is_how_many_begin(tmp_path: Path) -> None:
    from loadgen.core.workload import load

    made = as_trial_workload(load("agentic"), 60 * S)
    runs = _probes(tmp_path)
    runs.goal, runs.make_workload = (
        Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1),))),
        lambda trial: with_load(made, trial.load),
    )
    runs.may_end_early = False
    told = runs.run(_ask(4.0))
    assert told.outcome == "over" and not told.ended_early
    assert told.offered_load == pytest.approx(4.0, rel=0.4)
    assert told.metrics["offered_rps"] > 1.9 * 4.0  # type: ignore[operator]


CLASSES = ["class qa", "class rag", "class summarization", "class agentic"]


@pytest.mark.commands
@pytest.mark.parametrize(
    ("workload", "slo", "promised", "missed"),
    [
        ("rag-pipeline", ["--slo", "+ttft:30s:p95"], ["ttft p95", "tasks"], "planned tasks"),
        ("mixed", [], CLASSES, "qa: TPOT p95"),
    ],
)
def test_a_trial_is_judged_as_its_run_is(
    workload: str, slo: list[str], promised: list[str], missed: str, tmp_path: Path
) -> None:
    """What is promised of tasks and of classes bounds the load as well: run, search and sweep have one verdict."""
    from loadgen.runs.levels import curve

    folder = tmp_path / "search"
    asked = [
        "search",
        workload,
        "--url",
        "sim:gb300-vm",
        *slo,
        "-d",
        "20s",
        "--start",
        "16",
        "--seed",
        "3",
        "--json",
    ]
    exits(*asked, "--max-probes", "5", "-o", str(folder))
    trials_of_it = experiment.read_results(folder)
    summaries = {
        trial.run_name: run_folder.kept_summary(folder / trial.run_name) for trial in trials_of_it
    }
    full = [trial for trial in trials_of_it if not trial.ended_early]
    assert [trial.outcome == "under" for trial in full] == [
        summaries[trial.run_name].goodput.met for trial in full
    ]
    assert {trial.outcome for trial in trials_of_it} == {"under", "over"}
    assert any(missed in trial.reason for trial in trials_of_it)
    assert json.loads((folder / "search.json").read_bytes())["goal"] == promised
    words = curve([(trial.run_name, summaries[trial.run_name]) for trial in full]).slo
    assert "of tasks within" in words and ("qa: TTFT p95" in words) == (workload == "mixed")


@pytest.mark.parametrize(
    ("workload", "trial_s"),
    [("qa", 600), ("rag-pipeline", 600), ("mixed", 900), ("coding-agent", 1800)],
)
def test_a_trial_of_tasks_lasts_long_beside_one(workload: str, trial_s: int) -> None:
    """Trials of 600 s found 0.849 of coding-agent, whose tasks may take 180 s: four hours at 0.83 keep 88.5 of 90 %."""
    assert capacity.default_trial_ns(load(workload)) == trial_s * 10**9


@pytest.mark.commands
def test_a_length_that_is_none_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("search", "qa", "--url", "sim:gb300-vm", "-d", "abc") == 2
    assert capsys.readouterr().err.count("is not a duration") == 1


def test_few_requests_a_trial_take_more_trials() -> None:
    """One of 540 tasks varies by chance more than the precision: it takes all the trials that a search may make."""
    agents, chat = (
        LoadSearch(SearchSettings(low=1e-3, high=1e6, start=start, first_step=ESTIMATE_STEP))
        for start in (0.9, 100.0)
    )
    assert (
        estimate_trials_left(agents, trial_s=600).trials
        >= ENOUGH_TRIALS
        > 2 * estimate_trials_left(chat, trial_s=600).trials
    )
    assert estimate_trials_left(agents).trials == estimate_trials_left(chat).trials


def test_a_load_whose_tasks_are_lost_is_not_simulated_to_its_end(tmp_path: Path) -> None:
    """As many tasks as are known to be late stay late: the trial ends there, with the outcome of its whole length."""
    from loadgen.core.workload import load

    made = as_trial_workload(load("rag-pipeline"), 20 * S)
    runs, trial = _probes(tmp_path, check_interval_s=1.0), _ask(8.0)
    runs.make_workload = lambda trial: with_load(made, trial.load)
    for within_s, outcome in ((2, "over"), (600, "under")):
        runs.goal = Goal(
            slo=Slo(task=TaskTerm(within_ns=within_s * S, share=0.9)), full_run_terms=("tasks",)
        )
        made = made.model_copy(update={"slo": runs.goal.slo})
        runs.may_end_early = True
        watched = runs.run(trial)
        runs.may_end_early = False
        whole = runs.run(trial)
        assert watched.outcome == whole.outcome == outcome
        assert watched.ended_early == (outcome == "over") and not whole.ended_early
        if watched.ended_early:
            assert (
                watched.duration_s < 0.8 * whole.duration_s
                and "planned tasks miss" in watched.reason
            )


def test_a_load_of_conversations_that_is_lost_is_not_simulated_to_its_end(tmp_path: Path) -> None:
    """Of tasks and conversations the number of requests is known: too many misses stay too many. Where the last of them
    come when no conversation begins any more, the load that was offered is still that of all the time they began in.
    """
    from loadgen.core.workload import load

    made = as_trial_workload(load("agentic"), 60 * S)
    runs, trial = _probes(tmp_path, check_interval_s=1.0), _ask(4.0)
    runs.make_workload = lambda trial: with_load(made, trial.load)
    runs.goal = Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1, quantile=0.2),)))
    late = runs.run(trial)
    runs.may_end_early = False
    whole = runs.run(trial)
    assert (late.outcome, late.ended_early, whole.ended_early) == (
        "over",
        True,
        False,
    ) and 60 < late.duration_s < whole.duration_s
    assert late.offered_load == whole.offered_load
    runs.may_end_early, runs.goal = True, Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1),)))
    for kind in ("bracket", "sustain"):
        lost = runs.run(msgspec.structs.replace(trial, kind=kind))
        assert (lost.outcome, lost.ended_early, lost.reason_code) == (
            "over",
            True,
            "misses",
        ) and lost.duration_s < whole.duration_s / 2
    probe = runs.run(trial)
    assert (probe.outcome, probe.ended_early, probe.reason_code) == ("over", True, "misses")
    summary = run_folder.kept_summary(tmp_path / probe.run_name)
    assert summary.run.state == "decided"
    assert (
        summary.requests.scheduled
        == summary.requests.ok + summary.requests.cancelled + summary.requests.dropped
    )


@pytest.mark.parametrize(
    ("kind", "workload", "counted", "unit"),
    [
        ("request_rate", "rag", "requests", "/s"),
        ("request_rate", "agentic", "conversations", " conversations/s"),
        (
            "request_rate",
            "mixed",
            "starts",
            " starts/s",
        ),  # conversations, and single requests beside them
        ("concurrency", "agentic", "conversations", " in flight"),
    ],
)
def test_a_load_of_conversations_is_not_written_as_one_of_requests(
    kind: str, workload: str, counted: capacity.Unit, unit: str
) -> None:
    plan = experiment.ExperimentPlan(
        command_name="search",
        load_kind=kind,
        workload=workload,
        source_text="",
        target="",
        options={},
        seed=1,
    )
    assert (
        experiment.load_unit(plan, counted) == unit
        and experiment.counted_unit(load(workload)) == counted
    )
    under_the_table = search_text.describe_units(
        unit
    )  # good requests/s stand beside loads in conversations/s
    assert under_the_table.startswith(
        "Latencies" if unit == "/s" else f"Load: {unit.strip()}. Latencies"
    )


def test_the_plan_says_by_which_rules_a_search_ran(tmp_path: Path) -> None:
    plan = experiment.ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload="mlperf server",
        source_text="",
        target="",
        options={},
    )
    typed = ("loadgen", "search", "mlperf server.yaml")
    of_search, ours = (
        msgspec.structs.replace(plan, command=typed),
        msgspec.structs.replace(plan, rules="mlperf"),
    )
    before_plans_did = msgspec.structs.replace(plan, command=("loadgen", "mlperf", "peak"))
    assert [one.is_by_mlperf_rules for one in (plan, of_search, ours, before_plans_did)] == [
        False,
        False,
        True,
        True,
    ]
    assert experiment.load_unit(ours, "requests") == " queries/s"
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(of_search))
    assert mlperf_added.additions(tmp_path, None) is None  # type: ignore[arg-type]
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(ours))
    assert mlperf_added.additions(tmp_path, None) is not None  # type: ignore[arg-type]


def test_a_server_that_dies_is_invalid_not_over(tmp_path: Path) -> None:
    def dying(workload: Workload, given: Any, hearers: Any) -> Any:
        summary, folder = run.execute(
            workload, given
        )  # as over HTTP, nobody is told rows: they are in the folder
        rows = store.read_run(folder).rows
        rows["status"][-200:], rows["kind"][-200:] = STATUS["failed"], KIND["connect"]
        for file in (folder / "requests").iterdir():
            file.unlink()
        (folder / "spool").mkdir()
        (folder / "spool" / "w0.rows").write_bytes(rows.tobytes())
        (folder / "spool" / "w0.texts").write_bytes(b"")
        return summary, folder

    told = _probes(tmp_path, execute=dying).run(_ask(20.0))
    assert told.outcome == "invalid"
    assert told.reason_code == "server_gone"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_a_probe_over_sockets_ends_early_in_all_workers(tmp_path: Path, workers: int) -> None:
    with start(Options(ttft="50ms", itl="1ms")) as one:
        runs = _probes(tmp_path, check_interval_s=0.2)
        runs.goal = Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1_000_000),)))
        runs.settings = Settings(url=one.url, workers=workers, **NO_PAGES)
        told = runs.run(_ask(40.0))
    assert told.metrics["simulated"]
    assert (told.outcome, told.ended_early) == (
        "over",
        True,
    ) or told.outcome == "invalid"  # a busy host's sender is late
    if (
        told.outcome == "over"
    ):  # the search ended it, not the user: what it stored is no interrupted run
        assert told.duration_s < 20  # of 60
        assert (
            manifest.decode((runs.output_dir / told.run_name / "run.json").read_bytes()).state
            == "decided"
        )


def test_rows_are_seen_though_their_file_is_gone(tmp_path: Path) -> None:
    """The recorder takes away a full file, perhaps before its last rows were looked at."""
    (tmp_path / "spool").mkdir()
    rows = np.zeros(5, ROW)
    rows["slot"] = np.arange(5)
    data, first = rows.tobytes(), tmp_path / "spool" / "w0.rows"
    with first.open("wb", buffering=0) as file, contextlib.closing(Tail(tmp_path)) as tail:
        assert len(tail.rows()) == 0
        file.write(data[: 2 * ROW.itemsize + 7])
        assert tail.rows()["slot"].tolist() == [0, 1]
        file.write(data[2 * ROW.itemsize + 7 : 4 * ROW.itemsize])
        first.unlink()
        (tmp_path / "spool" / "w0.4.rows").write_bytes(data[4 * ROW.itemsize :])
        assert tail.rows()["slot"].tolist() == [2, 3, 4]


def test_an_endpoint_that_is_gone_between_probes_leaves_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from loadgen.core.errors import TargetError

    def once(workload: Workload, given: Any, *tell: Any) -> Any:
        if (tmp_path / experiment.TRIALS_FILE).exists():
            raise TargetError("connect", "nothing listens", "there")
        return run.execute(workload, given, *tell)

    asking = LoadSearch(SearchSettings(low=1, high=1e4, start=20))
    plan = experiment.ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload="x",
        source_text="",
        target="t",
        options={},
    )
    assert (
        SearchRun(
            search=asking,
            runner=_probes(tmp_path, execute=once),
            plan=plan,
            show=Show(quiet=True),
            unit="/s",
            trial_s=1,
        ).run()
        == 3
    )
    told = capsys.readouterr()
    assert (
        "could not be reached any more" in told.out
        and "at least 20" in told.out
        and "nothing listens" in told.err
    )


def test_loads_change_what_they_should() -> None:
    closed = _workload(1.0).model_copy(
        update={"stages": (Stage(name="l", arrival=Closed(concurrency=1), count=9),)}
    )
    assert with_load(closed, 7.0).stages[0].arrival == Closed(concurrency=7)
    warm = _workload(1.0)
    warm = warm.model_copy(
        update={"stages": (warm.stages[0].model_copy(update={"measured": False}), *warm.stages)}
    )
    changed = with_load(warm, 5.0)
    assert [stage.arrival.rate for stage in changed.stages] == [1.0, 5.0]  # type: ignore[union-attr]
    assert len(as_trial_workload(warm, 9 * S).stages) == 1


def test_the_watch_of_mlperf_terms() -> None:
    """tpot_mlperf is a metric like any other."""
    goal = replace(GOAL, slo=Slo(terms=(Term(metric="tpot_mlperf", limit_ns=99_000_000),)))
    rows = queue(50, 1, 5)
    assert goal.find_misses(rows).all()  # a second over ten tokens is 100 ms


# -- taken up again ----------------------------------------------------------------------------------------------------


def test_a_search_is_taken_up_without_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "s")
    command = [
        "search",
        "qa",
        "--url",
        "sim:gb300-vm",
        "-d",
        "60s",
        "--slo",
        "ttft:400ms:p95",
        "--seed",
        "3",
    ]
    command += ["--start", "100", "--precision", "20%"]

    assert exits(*command, "--max-probes", "2", "-o", folder) == 3
    told = capsys.readouterr().err
    resume = f"loadgen search --resume {shlex.quote(folder)} --max-probes 22"
    assert resume in told
    assert exits(*shlex.split(resume)[1:]) == 0
    told = capsys.readouterr().err
    assert "2 trials are done" in told and "go on with" not in told, "nothing is left"
    assert exits(*command, "--max-probes", "40", "-o", str(tmp_path / "whole")) == 0
    answers = [(tmp_path / name / "search.json").read_text() for name in ("s", "whole")]
    assert json.loads(answers[0])["answer"] == json.loads(answers[1])["answer"]
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "plan.json").write_text(json.dumps(plan | {"by": "sweep"}))
    assert exits("search", "--resume", tmp_path / "swept") == 2
    assert "a sweep, not a search" in capsys.readouterr().err
    assert exits("search", "--resume", str(tmp_path)) == 2
    assert "no search to go on with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (("--model", "other"), "model: none there, other here"),
        (("--no-stream",), "stream: none there, False here"),
        (("--api", "completions"), "api: none there, completions here"),
        (("--extra-body", '{"top_k": 1}'), "extra_body: none there, {'top_k': 1} here"),
        (("--salt", "fresh"), "salt: none there, fresh here"),
        (("--set", "max_in_prefill=3"), "max_in_prefill: none there, 3 here"),
        (("--stop-when", "errors:20%"), "stop_when: none there"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("search", "--slo", "e2e:30s", "--low", "1", "--high", "2", "--max-probes", "1"),
        ("sweep", "--request-rate", "1"),
    ],
)
def test_what_is_sent_otherwise_is_another_experiment(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    added: tuple[str, ...],
    said: str,
) -> None:
    """Runs of two kinds of requests in one folder would be read as one load, and none of them says so."""
    name, *options = command
    common = (name, "qa", "--url", "sim:h100x8", *options, "-d", "10s", "-o", str(tmp_path / "c"))
    exits(*common)
    capsys.readouterr()
    assert exits(*common, *added) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_search_on_a_simulated_target_begins_where_its_preset_is_full(tmp_path: Path) -> None:
    """The answer lies between the first two loads, and few trials are needed after them."""
    folder = tmp_path / "s"
    asked = [
        "search",
        "qa",
        "--url",
        "sim:gb300-vm",
        "-d",
        "60s",
        "--slo",
        "+ttft:2s:p95",
        "--seed",
        "3",
    ]
    assert exits(*asked, "--out", str(folder)) == 0
    first, second, *others = experiment.read_results(folder)
    assert {first.outcome, second.outcome} == {"under", "over"}
    assert len(others) <= 9
    loads = sorted((first.load, second.load))
    assert loads[1] / loads[0] == pytest.approx(ESTIMATE_STEP)
    assert exits(*asked, "--start", "100", "--max-probes", "1", "--out", str(tmp_path / "t")) == 3
    assert experiment.read_results(tmp_path / "t")[0].load == 100, "what is asked for stands"


def test_what_is_typed_again_stands_over_what_was_typed_before() -> None:
    before = [
        "search",
        "qa",
        "--url=http://a",
        "-u",
        "http://b",
        "--slo",
        "ttft:2s",
        "-k",
        "--max-probes",
        "3",
    ]
    assert merge_arguments(
        before, ["search", "--resume", "f", "--url", "http://c", "--insecure"]
    ) == [
        "search",
        "qa",
        "--slo",
        "ttft:2s",
        "--max-probes",
        "3",
        "--resume",
        "f",
        "--url",
        "http://c",
        "--insecure",
    ]
    hidden = [*before, "--header", "X-Key: ***"]
    with pytest.raises(UserError) as fault:
        merge_arguments(hidden, ["search", "--resume", "f"])
    assert fault.value.where == "--header"
    assert "--header" in merge_arguments(
        hidden, ["search", "--resume", "f", "--header", "X-Key: k"]
    )


def test_the_report_of_a_search_that_was_killed_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "search"
    asked = [
        "search",
        "qa",
        "--url",
        "sim:gb300-vm",
        "--slo",
        "ttft:2s:p95",
        "-d",
        "5s",
        "--max-probes",
        "2",
        "--seed",
        "1",
    ]
    with pytest.raises(SystemExit):
        main([*asked, "-o", str(folder)])
    capsys.readouterr()
    (folder / experiment.RESULT_FILE).unlink()  # it is written last
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--no-html"])
    assert f"search --resume {folder}" in capsys.readouterr().out


PLAIN = (places.DATA / "oracle" / "open.yaml").read_text()


@pytest.mark.parametrize(("limit", "outcomes"), [("20s", []), ("1ms", ["over"])])
def test_a_load_that_the_client_did_not_offer_is_no_evidence_unless_it_missed(
    limit: str,
    outcomes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("capped.yaml").write_text(PLAIN + "max_in_flight: 4\n")
    asked = [
        "search",
        "capped.yaml",
        "--url",
        "sim:gb300-vm",
        "--slo",
        f"e2e:{limit}:p90",
        "-d",
        "10s",
        "--seed",
        "1",
    ]
    assert exits(*asked, "--low", "10", "--high", "40", "--max-probes", "1", "--out", "c") == 3
    assert [
        trial.outcome for trial in experiment.read_results(Path("c"))
    ] == outcomes  # of valid ones
    assert ("dropped at a cap" in " ".join(capsys.readouterr().out.split())) is (not outcomes)


@pytest.mark.parametrize(
    "limit",
    [
        ["--max-time", "25s"],
        ["--max-probes", "2"],
        ["--low", "8", "--high", "64", "--max-probes", "1"],
    ],
)
def test_a_stopped_search_sizes_no_machines(
    limit: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rate is what held so far: cost, size and capacity say so, name the way on, and end with 3."""
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text(PLAIN)
    base = [
        "search",
        "plain.yaml",
        "--url",
        "sim:gb300-vm",
        "--slo",
        "tpot:20.6ms:p90",
        "-d",
        "10s",
        "--seed",
        "1",
    ]
    assert exits(*base, *limit, "--gpus", "4", "--out", "c") == 3
    said = capsys.readouterr()
    stored = json.loads(Path("c/capacity.json").read_bytes())
    assert (stored["state"], stored["lower_bound"], stored["low_per_s"]) == ("stopped", True, None)
    assert "--resume c" in stored["go_on"] and stored["go_on"] in said.err
    for call in (
        ["size", "rag", "c", "--users", "5000"],
        ["cost", "c", "--accept-sample-prices", "--price", "c=bedrock-llama-2-70b"],
    ):
        assert exits(*call) == 3, call
        said = capsys.readouterr()
        assert said.out == "" and "--resume c" in said.err, call
    for call in (["report", "c"], ["compare", "c", "c"]):  # what they say can be typed as it stands
        assert exits(*call) == 3, call
        said = capsys.readouterr()
        assert stored["go_on"] in " ".join((said.out + said.err).split()), call


def test_a_search_killed_in_its_first_trial_is_told_as_stopped_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SIGKILL leaves then is a plan and a capacity without a load: exit 3 and the line that goes on."""
    monkeypatch.chdir(tmp_path)

    def killed(*_: object, **__: object) -> NoReturn:
        raise SystemExit(137)  # no handler of the search sees it, as none sees SIGKILL

    plan = experiment.ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload="w",
        source_text="",
        target="t",
        options={},
        command=("loadgen", "search", "w"),
    )
    Path("c").mkdir()
    runner = _probes(Path("c"), execute=killed)
    with pytest.raises(SystemExit):
        search = LoadSearch(SearchSettings(low=1, high=10_000, start=20))
        SearchRun(
            search=search,
            runner=runner,
            plan=plan,
            show=Show("off", quiet=True),
            unit="/s",
            trial_s=10,
        ).run()
    assert capacity.load_capacity(Path("c", capacity.CAPACITY_FILE).read_bytes()).state == "stopped"
    assert not Path("c", "search.json").exists()
    for call in (
        ["cost", "c", "--accept-sample-prices"],
        ["size", "qa", "c", "--users", "10"],
        ["compare", "c", "c"],
    ):
        capsys.readouterr()
        assert exits(*call) == 3, call
        assert "--resume c" in capsys.readouterr().err, call


def test_a_search_that_is_killed_leaves_a_capacity_with_its_state(tmp_path: Path) -> None:
    """After each trial the file says what is known, so a search that never ends says it too."""
    runs = _probes(tmp_path, resume_command="loadgen search w --resume here")
    runs.make_workload = lambda trial: _workload(trial.load).model_copy(
        update={"slo": runs.goal.slo}
    )
    search = LoadSearch(SearchSettings(low=1, high=10_000, start=20))
    search.add_result(runs.run(_ask(20.0)))
    runs.save_progress(search)
    found = capacity.load_capacity((tmp_path / capacity.CAPACITY_FILE).read_bytes())
    assert (found.state, found.rate_per_s, found.lower_bound) == ("stopped", 20.0, True)
    assert found.resume_command == "loadgen search w --resume here"


def test_the_state_of_a_capacity_is_how_far_the_way_was_gone() -> None:
    shown = capacity.Capacity(rate_per_s=8.0, method="search", confirmed=True, sustained=None)

    def state(reason: str, found: capacity.Capacity | None) -> capacity.State | None:
        answer = msgspec.structs.replace(
            LoadSearch(SearchSettings(low=1, high=2)).result, stop_reason=reason
        )
        return capacity_files.with_search_state(found, answer, "go on").state

    assert state("found", shown) == "confirmed"
    assert state("found", msgspec.structs.replace(shown, sustained=True)) == "sustained"
    assert state("time", shown) == "confirmed"  # stopped after its confirmation
    unconfirmed = msgspec.structs.replace(shown, confirmed=False)
    assert (
        state("highest", unconfirmed) == "confirmed"
    )  # `high` held at full length, and nothing above was asked for
    assert [
        state(reason, unconfirmed)
        for reason in ("time", "probes", "interrupted", "gone", "invalid", "")
    ] == ["stopped"] * 6
    assert [state(reason, None) for reason in ("time", "none", "unconfirmed")] == [
        "stopped",
        "none",
        "none",
    ]


def _told_at_20(folder: Path) -> TrialResult:
    runs = _probes(folder)
    runs.make_workload = lambda trial: _workload(trial.load).model_copy(
        update={"slo": runs.goal.slo}
    )
    return msgspec.structs.replace(runs.run(_ask(20.0)), ended_early=False, sustained=True)


def test_text_and_file_name_one_load_where_every_confirmation_grew(tmp_path: Path) -> None:
    """The longest load that held without growing is the answer: a confirmed one that grew is none, in either place."""
    steady = _told_at_20(tmp_path)
    trial = PlannedTrial(number=1, load=24.0, kind="confirm", may_pass_early=False)
    search = LoadSearch(SearchSettings(low=1, high=10_000, start=20, sustain_length_factor=2.0))
    for one in (steady, msgspec.structs.replace(steady, trial=trial, sustained=False)):
        search.add_result(one)
    answer = msgspec.structs.replace(search.result, stop_reason="found")
    found = capacity.load_capacity(
        capacity_files.render_outputs(ExperimentOutcome(tmp_path, search.results, answer))[
            capacity.CAPACITY_FILE
        ]
    )
    assert (found.rate_per_s, found.state) == (20.0, "held")
    said = found_text(answer, search.results)
    assert "\nCapacity   20/s, held\n" in said
    assert "20/s, held" in search_text.headline(answer, search.results, GOAL.request_terms, "/s")


def test_what_limits_a_search_is_the_lowest_load_that_missed_or_grew_over_any_length() -> None:
    """It named 39.03, where 38.23 had missed over twice the length."""
    told: list[TrialResult] = []

    def limit(load: float, kind: TrialKind, outcome: Outcome, *, grows: str = "") -> str:
        trial = PlannedTrial(
            number=len(told),
            load=load,
            kind=kind,
            may_pass_early=False,
            length_factor=1 + (kind == "sustain"),
        )
        lasts, why = (False, grows) if grows else (None, "")
        one = TrialResult(
            trial=trial,
            outcome=outcome,
            ended_early=False,
            duration_s=1,
            offered_load=load,
            sampling_noise=0.01,
            reason=f"m{len(told)}",
        )
        told.append(msgspec.structs.replace(one, sustained=lasts, sustained_reason=why))
        return " ".join(search_report._describe_limits(told, {}))

    assert limit(38.0, "probe", "under") == ""
    assert limit(39.0, "probe", "over") == "at 39, the lowest load that missed: m1."
    assert (
        limit(38.2, "sustain", "over")
        == "at 38.2, the lowest load that missed (over 2 times the length of a trial): m2."
    )
    grew = limit(37.5, "confirm", "under", grows="TTFT grows")
    assert grew == "at 37.5, the lowest load that held and grew: TTFT grows."


def test_a_stopped_search_has_one_lower_bound(tmp_path: Path) -> None:
    """A probe that ended early shows no load that held to its end: text and file name the one that did."""
    whole = _told_at_20(tmp_path)
    search = LoadSearch(SearchSettings(low=1, high=10_000, start=20))
    for one in (whole, msgspec.structs.replace(whole, trial=_ask(28.0, 1), ended_early=True)):
        search.add_result(one)
    search.stop("time")
    found = capacity.load_capacity(
        capacity_files.render_outputs(ExperimentOutcome(tmp_path, search.results, search.result))[
            capacity.CAPACITY_FILE
        ]
    )
    assert (found.rate_per_s, found.state) == (20.0, "stopped")
    said = found_text(search.result, search.results)
    assert "\nCapacity   not known; at least 20/s held so far\n" in said


@pytest.mark.parametrize(
    ("typed", "means"), [("5%", 0.05), ("0.05", 0.05), ("50 %", 0.5), ("0.2%", 0.002)]
)
def test_a_precision_is_a_percentage_or_a_share(typed: str, means: float) -> None:
    assert search_plan.parse_precision(typed) == pytest.approx(means)


@pytest.mark.parametrize("typed", ["5", "60%", "0", "nan", "narrow", "%", "-5%"])
def test_a_precision_that_is_none_is_said(typed: str) -> None:
    with pytest.raises(UserError, match=r"precision|share|percentage"):
        search_plan.parse_precision(typed)


def expected_text(
    search: LoadSearch, trial_s: float, *, virtual: bool, runs_to_end: bool = False
) -> str:
    """Return the forecast of a search as text, or "" if nothing is left of it."""
    forecast = forecast_search(search, trial_s, runs_to_end=runs_to_end)
    return "" if forecast is None else describe_forecast(forecast, virtual=virtual)


def test_a_search_says_before_it_begins_what_it_will_take() -> None:
    search = LoadSearch(SearchSettings(low=1, high=1000, start=1, sustain_length_factor=2))
    assert expected_text(search, 600, virtual=True) == (
        "about 27 trials, 3 h 36 min of simulated load (the time of the last answers comes on top); at most 50 trials, "
        "10 h 00 min"
    )
    assert "4 h 48 min" in expected_text(search, 600, virtual=True, runs_to_end=True)
    real = expected_text(
        LoadSearch(SearchSettings(low=1, high=1000, start=1, run_spread=None)), 600, virtual=False
    )
    assert real.startswith("about 24 trials, 2 h 51 min of load (") and real.endswith(
        "at most 40 trials, 6 h 40 min"
    )
    short = LoadSearch(SearchSettings(low=1, high=1000, start=1, max_time_s=1800))
    assert expected_text(short, 600, virtual=False) == "at most 30 min 00 s"
    _tell(search, "under")
    assert expected_text(search, 600, virtual=True).startswith("about 12 trials")
    search.settings = replace(search.settings, max_trials=1)
    assert expected_text(search, 600, virtual=True) == ""


@pytest.mark.parametrize(
    ("spent_s", "lengths", "early", "says"),
    [
        (15.6, 1.0, False, "10.6 s after a load of 5.0 s"),
        (15.6, 2.0, False, ""),
        (9.0, 1.0, False, ""),
        (15.6, 1.0, True, ""),
    ],
)
def test_a_trial_shorter_than_its_answers_is_said(
    spent_s: float, lengths: float, early: bool, says: str
) -> None:
    """Trials of five seconds found 450/s of qa, whose answers take 28 s: the machine carries 135."""
    trial = PlannedTrial(
        number=0, load=126.0, kind="bracket", may_pass_early=True, length_factor=lengths
    )
    told = TrialResult(
        trial=trial,
        outcome="under",
        ended_early=early,
        duration_s=spent_s,
        offered_load=126.0,
        sampling_noise=0.1,
    )
    said = search_text.describe_late_responses(told, 5.0)
    assert says in said and bool(said) == bool(says) and ("--duration" in said) == bool(says)


def test_two_capacities_that_are_compared_stand_there_with_their_intervals() -> None:
    """Does it still hold after the upgrade? 30.4 stood against 30.51, and not that both reach to 31.4."""
    held = capacity.Capacity(
        rate_per_s=30.4, low_per_s=30.39, high_per_s=31.39, method="search", sustained=True
    )
    assert "30.4 requests/s (30.39 to 31.39), sustained" in held.comparison_note
    assert (
        "30.4 requests/s, sustained"
        in msgspec.structs.replace(held, low_per_s=None, high_per_s=None).comparison_note
    )


def test_where_no_load_holds_the_search_says_so_and_not_that_it_was_stopped() -> None:
    """TPOT of 1 ms: it halved the load to one request a trial and ended "not valid", with a hint at longer trials."""
    search = LoadSearch(SearchSettings(low=1e-3, high=1000, start=1))
    while (trial := search.next_trial()) is not None:
        few = trial.load < 0.01
        search.add_result(
            TrialResult(
                trial=trial,
                outcome="invalid" if few else "over",
                ended_early=not few,
                duration_s=5,
                offered_load=trial.load,
                sampling_noise=0.1,
                reason_code="too_few" if few else "misses",
            )
        )
    assert search.result.stop_reason == "none" and search.result.load is None
    assert exit_code(search.result) == 1
    assert "no load holds" in " ".join(found_text(search.result, search.results).split())


@pytest.mark.parametrize(
    ("code", "goes_on"), [("too_few", False), ("unfinished", False), ("sent_late", True)]
)
def test_a_search_whose_load_cannot_be_judged_is_not_gone_on_with(code: str, goes_on: bool) -> None:
    """Two trials of three requests ended it, and --resume made the same two again."""
    search = LoadSearch(SearchSettings(low=1, high=1000, start=1))
    for _ in range(2):
        trial = search.next_trial()
        assert trial is not None
        search.add_result(
            TrialResult(
                trial=trial,
                outcome="invalid",
                ended_early=False,
                duration_s=5,
                offered_load=1,
                sampling_noise=0.1,
                reason_code=code,
            )
        )
    command = capacity_files.usable_resume_command(
        search.result, search.results, "loadgen search --resume s"
    )
    assert command == ("loadgen search --resume s" if goes_on else "")
    shown = found_text(search.result, search.results)
    assert "stopped: two trials in a row" in " ".join(shown.split())


def test_a_load_that_is_lowered_until_it_is_sustained_is_one_of_those_left() -> None:
    """A confirmation in which the queue grew, of a search without longer trials: it divided by zero there."""
    search = LoadSearch(SearchSettings(low=1, high=1000, start=50))
    while (trial := search.next_trial()) is not None and trial.kind != "sustain":
        _tell(search, "under" if trial.load < 100 else "over", sustained=False)
    assert trial is not None and not search.settings.has_longer_trials
    assert (estimate_trials_left(search).trials, estimate_trials_left(search).lengths) == (
        LOWERING_TRIALS,
        LOWERING_TRIALS,
    )


@pytest.mark.parametrize(
    "asked",
    [
        {
            "start": 28.0,
            "first_step": ESTIMATE_STEP,
            "sustain_length_factor": 2.0,
        },  # a simulated target
        {"start": 1.0, "sustain_length_factor": 2.0},
        {"start": None, "low": 10.0, "high": 100.0},
        {"start": 1.0, "run_spread": None},  # a real server
        {"start": 1.0, "run_spread": 0.02},
    ],
)
def test_what_a_search_takes_is_known_within_a_factor_of_two(asked: dict[str, Any]) -> None:
    """At each point: before the first trial always, later of most."""
    within = []
    for seed, true_load in enumerate((22.0, 31.0)):
        chance = Random(seed)
        search = LoadSearch(SearchSettings(**{"low": 1e-3, "high": 1e6, **asked}))
        spread = 0.015 if search.settings.run_spread is None else search.settings.run_spread
        foretold = []
        while (trial := search.next_trial()) is not None:
            foretold.append(estimate_trials_left(search))
            passes = trial.load <= true_load * math.exp(chance.gauss(0, math.hypot(spread, 0.005)))
            early = not passes or trial.may_pass_early
            spent_s = 600 * trial.length_factor * (0.6 if early else 1.05)
            _tell(
                search,
                "under" if passes else "over",
                ended_early=early,
                duration_s=spent_s,
                sustained=True,
            )
        assert search.result.stop_reason in ("found", "coarse")
        for number, found in enumerate(foretold):
            lengths = sum(result.duration_s for result in search.results[number:]) / 600
            ratios = found.trials / (len(foretold) - number), found.lengths / lengths
            within.append(all(0.5 <= ratio <= 2 for ratio in ratios))
            assert number or within[-1], (ratios, asked)
    assert sum(within) >= 0.85 * len(within), (within, asked)


def test_longer_trials_that_are_left_are_told_from_those_that_failed() -> None:
    """`search agentic`: five longer trials, told as one and a half before each of them."""
    search, holds = (
        LoadSearch(
            SearchSettings(
                low=1e-3, high=1e6, start=12.64, first_step=ESTIMATE_STEP, sustain_length_factor=2.0
            )
        ),
        11.9,
    )
    foretold = []
    while (trial := search.next_trial()) is not None:
        if trial.kind in ("confirm", "sustain"):
            foretold.append((search.results[-1].number, estimate_trials_left(search).lengths))
        passes = trial.load <= (holds if trial.kind == "sustain" else 12.8)
        _tell(search, "under" if passes else "over", sustained=True)
    left = [
        sum(told.length_factor for told in search.results[number + 1 :]) for number, _ in foretold
    ]
    assert len(left) >= 5 and left[0] >= 9, "one confirmation, and longer ones at ever lower loads"
    ratios = [there / told for there, (_, told) in zip(left, foretold, strict=True)]
    assert all(0.5 <= ratio <= 2 for ratio in ratios[2:]), "from the first that failed on"


def test_a_first_load_that_is_far_off_takes_few_trials_to_a_bracket() -> None:
    """Steps grow while all loads held, or all missed: one three times too high took seven."""
    for true_load, most in ((33.0, 5), (300.0, 5), (95.0, 2)):
        search = LoadSearch(
            SearchSettings(low=1e-3, high=1e6, start=100.0, first_step=ESTIMATE_STEP)
        )
        while (trial := search.next_trial()) is not None and trial.kind == "bracket":
            _tell(search, "under" if trial.load < true_load else "over")
        assert len(search.results) <= most, (true_load, [one.load for one in search.results])


def test_the_command_that_resumes_a_search_raises_the_limit_it_stopped_at() -> None:
    answer = msgspec.structs.replace(
        LoadSearch(SearchSettings(low=1, high=10, start=1)).result, trial_count=7
    )
    out_of_probes = msgspec.structs.replace(answer, stop_reason="probes")
    assert (
        capacity_files.usable_resume_command(out_of_probes, [], "resume")
        == "resume --max-probes 27"
    )
    out_of_time = msgspec.structs.replace(answer, stop_reason="time", duration_s=60.2)
    assert (
        capacity_files.usable_resume_command(out_of_time, [], "resume") == "resume --max-time 121s"
    )
    assert capacity_files.usable_resume_command(out_of_time, [], "loadgen mlperf server") == ""


# -- searches that are stopped while they confirm --------------------------------------------------

PASSES_UP_TO = 100.0  # at the ordinary length of a trial
LASTS_UP_TO = 97.0  # at twice that length


def result_of(trial: PlannedTrial) -> TrialResult:
    """Return the result of a trial against a server that bears a long load less well."""
    limit = LASTS_UP_TO if trial.length_factor > 1 else PASSES_UP_TO
    outcome: Outcome = "under" if trial.load <= limit else "over"
    return TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=False,
        duration_s=60.0 * trial.length_factor,
        offered_load=trial.load,
        sampling_noise=0.01,
        sustained=True if outcome == "under" and trial.length_factor > 1 else None,
    )


def search_until(kind: str, **limits: float) -> LoadSearch:
    """Return a search that has to run a trial of this kind next."""
    search = LoadSearch(
        SearchSettings(low=1, high=1000, start=80, sustain_length_factor=2.0, **limits)
    )  # type: ignore[arg-type]
    while (trial := search.next_trial()) is not None and trial.kind != kind:
        search.add_result(result_of(trial))
    return search


def test_a_search_out_of_time_before_its_load_is_shown_to_last_has_not_found_it() -> None:
    """It ended as found, with exit code 0 and a load that the finished search rejects."""
    search = search_until("sustain")
    search.settings = replace(search.settings, max_time_s=1.0)
    assert search.next_trial() is None
    answer = search.result
    assert answer.stop_reason == "time" and exit_code(answer) == 3
    assert capacity_and_state(answer, search.results)[1] == "stopped"
    go_on = capacity_files.usable_resume_command(
        answer, search.results, "loadgen search --resume s"
    )
    assert "--max-time" in go_on
    search.settings = replace(search.settings, max_time_s=None)
    while (trial := search.next_trial()) is not None:
        search.add_result(result_of(trial))
    load, state = capacity_and_state(search.result, search.results)
    assert (search.result.stop_reason, state) == ("found", "sustained")
    assert load is not None and load <= LASTS_UP_TO


def test_a_search_killed_before_its_load_is_shown_to_last_leaves_the_state_stopped() -> None:
    """`report` said that it had no answer yet, where `cost` and `size` said confirmed."""
    search = search_until("sustain")
    answer = search.result
    assert answer.confirmed_load is not None and answer.stop_reason == ""
    assert capacity_and_state(answer, search.results)[1] == "stopped"
    search.stop("interrupted")
    assert capacity_and_state(search.result, search.results)[1] == "stopped"
    assert exit_code(search.result) == 130


def test_the_bound_of_a_stopped_search_lies_below_a_load_that_did_not_last() -> None:
    search = search_until("sustain")
    trial = search.next_trial()
    assert trial is not None and trial.load > LASTS_UP_TO
    search.add_result(result_of(trial))
    search.stop("interrupted")
    load, state = capacity_and_state(search.result, search.results)
    assert state == "stopped" and (load is None or load < trial.load)


def test_a_load_that_was_shown_to_last_stays_sustained_where_the_search_is_stopped_later() -> None:
    search = search_until("sustain")
    while search.result.sustained_load is None:
        trial = search.next_trial()
        assert trial is not None
        search.add_result(result_of(trial))
    search.stop("interrupted")
    load, state = capacity_and_state(search.result, search.results)
    assert state == "sustained" and load is not None and load <= LASTS_UP_TO


def test_the_report_of_a_killed_search_states_the_bound_that_cost_and_size_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    options = ("--url", "sim:gb300-vm", "--slo", "ttft:500ms", "-d", "20s", "--seed", "1")
    assert exits("search", "qa", *options, "--max-probes", "2", "-o", str(folder)) == 3
    (folder / "search.json").unlink()
    stored = capacity.load_capacity((folder / capacity.CAPACITY_FILE).read_bytes())
    assert stored.state == "stopped"
    capsys.readouterr()
    assert exits("report", str(folder)) == 3
    text_of_report = " ".join(capsys.readouterr().out.split())
    assert stored.description in text_of_report


def test_a_trial_too_short_to_show_growth_bounds_nothing_of_a_stopped_search() -> None:
    """A minute at 189.5/s passed, and "at least 189.5/s" was said where 141.8/s is sustained."""
    search = LoadSearch(
        SearchSettings(
            low=1, high=1000, start=80, sustain_length_factor=2.0, requires_sustained=True
        )
    )
    first = search.next_trial()
    assert first is not None
    shown = msgspec.structs.replace(result_of(first), sustained=True)
    search.add_result(shown)
    second = search.next_trial()
    assert second is not None and second.load > first.load
    too_short = msgspec.structs.replace(
        result_of(second), outcome="under", sustained=None, needed_load_s=600.0
    )
    search.add_result(too_short)
    search.stop("interrupted")
    assert capacity_and_state(search.result, search.results) == (first.load, "stopped")
    assert find_capacity_trial(search.result, [too_short]) is None
