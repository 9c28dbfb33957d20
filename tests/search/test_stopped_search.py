"""What a search leaves that was stopped, killed, or found nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import repository_paths
from command_line import exits
from msgspec.structs import replace
from synthetic_searches import (
    GOAL,
    make_runner,
    planned_trial,
    render_confirmation,
    workload_at,
)

from loadgen.cli.app import main
from loadgen.repeated import capacity
from loadgen.runs.run_display import RunDisplay
from loadgen.search import (
    capacity_files,
    experiment,
    search_report,
    search_text,
)
from loadgen.search.capacity_files import ExperimentOutcome
from loadgen.search.goal import Outcome
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import (
    PlannedTrial,
    TrialKind,
    TrialResult,
    capacity_and_state,
    exit_code,
    find_capacity_trial,
)
from loadgen.search.search_run import SearchRun
from loadgen.search.search_settings import (
    SearchSettings,
)

pytestmark = pytest.mark.commands

PLAIN = (repository_paths.DATA / "oracle" / "open.yaml").read_text()
PASSES_UP_TO = 100.0  # at the ordinary length of a trial
LASTS_UP_TO = 97.0  # at twice that length


def passed_trial_at_20(folder: Path) -> TrialResult:
    runs = make_runner(folder)
    runs.make_workload = lambda trial: workload_at(trial.load).model_copy(
        update={"slo": runs.goal.slo}
    )
    return msgspec.structs.replace(runs.run(planned_trial(20.0)), ended_early=False, sustained=True)


def trial_result_at(trial: PlannedTrial) -> TrialResult:
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
        search.add_result(trial_result_at(trial))
    return search


def test_the_report_of_a_killed_search_has_the_command_that_resumes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "search"
    arguments = [
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
        main([*arguments, "-o", str(folder)])

    capsys.readouterr()
    (folder / experiment.RESULT_FILE).unlink()  # it is written last
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--no-html"])
    assert f"search --resume {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "limit",
    [
        ["--max-time", "25s"],
        ["--max-probes", "2"],
        ["--low", "8", "--high", "64", "--max-probes", "1"],
    ],
)
def test_cost_and_size_refuse_a_stopped_search_with_the_command_that_resumes_it(
    limit: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cost, size and capacity call the rate a bound, name the resume command, and exit with 3."""
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

    captured = capsys.readouterr()
    stored = json.loads(Path("c/capacity.json").read_bytes())
    assert (stored["state"], stored["lower_bound"], stored["low_per_s"]) == ("stopped", True, None)
    assert "--resume c" in stored["go_on"]
    printed = " ".join((captured.out + captured.err).split())
    assert printed.count(stored["go_on"]) == 1
    assert re.search(r"TPOT p90\D+20\.6 ms", printed)

    for call in (
        ["size", "rag", "c", "--users", "5000"],
        ["cost", "c", "--accept-sample-prices", "--price", "c=bedrock-llama-2-70b"],
    ):
        assert exits(*call) == 3, call
        captured = capsys.readouterr()
        assert captured.out == "" and "--resume c" in captured.err, call
    for call in (["report", "c"], ["compare", "c", "c"]):  # what they say can be typed as it stands
        assert exits(*call) == 3, call
        captured = capsys.readouterr()
        assert stored["go_on"] in " ".join((captured.out + captured.err).split()), call


def test_every_command_reports_a_search_killed_in_its_first_trial_as_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL leaves a plan and a capacity without a load: exit 3 and the resume command."""
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
    runner = make_runner(Path("c"), execute=killed)
    with pytest.raises(SystemExit):
        search = LoadSearch(SearchSettings(low=1, high=10_000, start=20))
        SearchRun(
            search=search,
            runner=runner,
            plan=plan,
            display=RunDisplay("off", quiet=True),
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


def test_a_killed_search_stores_a_capacity_with_its_state(tmp_path: Path) -> None:
    """After each trial the file says what is known, so a search that never ends says it too."""
    runs = make_runner(tmp_path, resume_command="loadgen search w --resume here")
    runs.make_workload = lambda trial: workload_at(trial.load).model_copy(
        update={"slo": runs.goal.slo}
    )
    search = LoadSearch(SearchSettings(low=1, high=10_000, start=20))
    search.add_result(runs.run(planned_trial(20.0)))
    runs.save_progress(search)
    stored_capacity = capacity.load_capacity((tmp_path / capacity.CAPACITY_FILE).read_bytes())

    assert (stored_capacity.state, stored_capacity.rate_per_s, stored_capacity.lower_bound) == (
        "stopped",
        20.0,
        True,
    )
    assert stored_capacity.resume_command == "loadgen search w --resume here"


def test_the_state_of_a_capacity_follows_from_the_end_of_its_search() -> None:
    stored_capacity = capacity.Capacity(
        rate_per_s=8.0, method="search", confirmed=True, sustained=None
    )

    def state(reason: str, tested_capacity: capacity.Capacity | None) -> capacity.State | None:
        answer = msgspec.structs.replace(
            LoadSearch(SearchSettings(low=1, high=2)).result, stop_reason=reason
        )
        return capacity_files.with_search_state(tested_capacity, answer, "go on").state

    assert state("found", stored_capacity) == "confirmed"
    assert state("found", msgspec.structs.replace(stored_capacity, sustained=True)) == "sustained"
    assert state("time", stored_capacity) == "confirmed"  # stopped after its confirmation
    unconfirmed = msgspec.structs.replace(stored_capacity, confirmed=False)
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


def test_text_and_file_agree_if_the_queue_grew_at_every_confirmation(tmp_path: Path) -> None:
    """Text and file name the longest sustained load, never a confirmed one that grew."""
    steady = passed_trial_at_20(tmp_path)
    trial = PlannedTrial(number=1, load=24.0, kind="confirm", may_pass_early=False)
    search = LoadSearch(SearchSettings(low=1, high=10_000, start=20, sustain_length_factor=2.0))
    for trial_result in (steady, msgspec.structs.replace(steady, trial=trial, sustained=False)):
        search.add_result(trial_result)
    answer = msgspec.structs.replace(search.result, stop_reason="found")
    stored_capacity = capacity.load_capacity(
        capacity_files.render_outputs(ExperimentOutcome(tmp_path, search.results, answer))[
            capacity.CAPACITY_FILE
        ]
    )

    assert (stored_capacity.rate_per_s, stored_capacity.state) == (20.0, "held")
    confirmation_text = render_confirmation(answer, search.results)
    assert re.search(r"\nCapacity +20/s, passed but", confirmation_text)
    assert "20/s, passed" in search_text.describe_result(
        answer, search.results, GOAL.request_terms, "/s"
    )


def test_the_limit_of_a_search_is_the_lowest_load_that_failed_or_grew() -> None:
    """It named 39.03, where 38.23 had missed over twice the length."""
    trial_results: list[TrialResult] = []

    def limit(load: float, kind: TrialKind, outcome: Outcome, *, grows: str = "") -> str:
        trial = PlannedTrial(
            number=len(trial_results),
            load=load,
            kind=kind,
            may_pass_early=False,
            length_factor=1 + (kind == "sustain"),
        )
        lasts, reason = (False, grows) if grows else (None, "")
        trial_result = TrialResult(
            trial=trial,
            outcome=outcome,
            ended_early=False,
            duration_s=1,
            offered_load=load,
            sampling_noise=0.01,
            reason=f"m{len(trial_results)}",
        )
        trial_results.append(
            msgspec.structs.replace(trial_result, sustained=lasts, sustained_reason=reason)
        )
        return " ".join(search_report._describe_limits(trial_results, {}, " req/s"))

    assert limit(38.0, "probe", "under") == ""
    assert limit(39.0, "probe", "over") == "at 39 req/s, m1."
    longer = limit(38.2, "sustain", "over")
    assert longer.startswith("at 38.2 req/s over 2 times ") and longer.endswith(", m2.")
    grew = limit(37.5, "confirm", "under", grows="TTFT grows")
    assert grew.startswith("at 37.5 req/s, ")
    assert grew.endswith("not sustained: TTFT grows.")


def test_text_and_file_agree_on_the_bound_of_a_stopped_search(tmp_path: Path) -> None:
    """A trial that ended early bounds nothing; text and file name one of full length."""
    passed_trial = passed_trial_at_20(tmp_path)
    search = LoadSearch(SearchSettings(low=1, high=10_000, start=20))
    for trial_result in (
        passed_trial,
        msgspec.structs.replace(passed_trial, trial=planned_trial(28.0, 1), ended_early=True),
    ):
        search.add_result(trial_result)
    search.stop("time")
    stored_capacity = capacity.load_capacity(
        capacity_files.render_outputs(ExperimentOutcome(tmp_path, search.results, search.result))[
            capacity.CAPACITY_FILE
        ]
    )

    assert (stored_capacity.rate_per_s, stored_capacity.state) == (20.0, "stopped")
    confirmation_text = render_confirmation(search.result, search.results)
    assert re.search(r"\nCapacity .* at least 20/s\n", confirmation_text)


def test_a_search_in_which_no_load_passes_is_not_reported_as_stopped() -> None:
    """With a TPOT limit of 1 ms the load once halved until each trial had one request."""
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
    assert "even the lowest load" in render_confirmation(search.result, search.results)


@pytest.mark.parametrize(
    ("code", "goes_on"), [("too_few", False), ("unfinished", False), ("sent_late", True)]
)
def test_a_search_whose_load_makes_trials_invalid_is_not_resumed(code: str, goes_on: bool) -> None:
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
    confirmation_text = render_confirmation(search.result, search.results)
    assert "two INVALID trials" in confirmation_text


def test_the_resume_command_raises_the_limit_that_stopped_the_search() -> None:
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


def test_a_search_out_of_time_before_its_longer_trials_is_stopped() -> None:
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
        search.add_result(trial_result_at(trial))
    load, state = capacity_and_state(search.result, search.results)

    assert (search.result.stop_reason, state) == ("found", "sustained")
    assert load is not None and load <= LASTS_UP_TO


def test_a_search_killed_before_its_longer_trials_is_stopped() -> None:
    """`report` said that it had no answer yet, where `cost` and `size` said confirmed."""
    search = search_until("sustain")
    answer = search.result
    assert answer.confirmed_load is not None and answer.stop_reason == ""
    assert capacity_and_state(answer, search.results)[1] == "stopped"
    search.stop("interrupted")
    assert capacity_and_state(search.result, search.results)[1] == "stopped"
    assert exit_code(search.result) == 130


def test_the_bound_of_a_stopped_search_is_below_a_load_that_failed_longer() -> None:
    search = search_until("sustain")
    trial = search.next_trial()
    assert trial is not None and trial.load > LASTS_UP_TO
    search.add_result(trial_result_at(trial))
    search.stop("interrupted")
    load, state = capacity_and_state(search.result, search.results)
    assert state == "stopped" and (load is None or load < trial.load)


def test_a_sustained_load_stays_sustained_if_the_search_is_stopped_later() -> None:
    search = search_until("sustain")
    while search.result.sustained_load is None:
        trial = search.next_trial()
        assert trial is not None
        search.add_result(trial_result_at(trial))
    search.stop("interrupted")
    load, state = capacity_and_state(search.result, search.results)
    assert state == "sustained" and load is not None and load <= LASTS_UP_TO


def test_the_report_of_a_killed_search_states_the_bound_of_cost_and_size(
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


def test_a_trial_too_short_to_detect_growth_is_no_bound() -> None:
    """A minute at 189.5/s passed, and "at least 189.5/s" was said where 141.8/s is sustained."""
    search = LoadSearch(
        SearchSettings(
            low=1, high=1000, start=80, sustain_length_factor=2.0, requires_sustained=True
        )
    )
    first_planned_trial = search.next_trial()

    assert first_planned_trial is not None

    trial_result = msgspec.structs.replace(trial_result_at(first_planned_trial), sustained=True)
    search.add_result(trial_result)
    second_planned_trial = search.next_trial()

    assert second_planned_trial is not None and second_planned_trial.load > first_planned_trial.load

    too_short = msgspec.structs.replace(
        trial_result_at(second_planned_trial), outcome="under", sustained=None, needed_load_s=600.0
    )
    search.add_result(too_short)
    search.stop("interrupted")

    assert capacity_and_state(search.result, search.results) == (
        first_planned_trial.load,
        "stopped",
    )
    assert find_capacity_trial(search.result, [too_short]) is None
