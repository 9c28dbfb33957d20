"""The command `loadgen search`: its options, its plan and how it is resumed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import repository_paths
from command_line import exits
from synthetic_searches import make_runner

from loadgen.cli.resume import merge_arguments
from loadgen.core.errors import UserError
from loadgen.core.execution import run
from loadgen.core.workload import Workload, load
from loadgen.mlperf import extra_sections as mlperf_sections
from loadgen.repeated import capacity
from loadgen.runs.run_display import RunDisplay
from loadgen.search import (
    experiment,
    search_plan,
    search_text,
)
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import (
    PlannedTrial,
    TrialResult,
)
from loadgen.search.search_run import SearchRun
from loadgen.search.search_settings import (
    ESTIMATE_STEP,
    SearchSettings,
)

pytestmark = pytest.mark.commands

PLAIN = (repository_paths.DATA / "oracle" / "open.yaml").read_text()


@pytest.mark.parametrize(
    ("workload", "trial_s"),
    [("qa", 600), ("rag-pipeline", 600), ("mixed", 900), ("coding-agent", 1800)],
)
def test_a_trial_of_tasks_lasts_ten_times_as_long_as_a_task(workload: str, trial_s: int) -> None:
    """Trials of 600 s found 0.849/s of coding-agent, but 0.83/s met 88.5 of 90 % in four hours."""
    assert capacity.default_trial_ns(load(workload)) == trial_s * 10**9


@pytest.mark.commands
def test_an_invalid_duration_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("search", "qa", "--url", "sim:gb300-vm", "-d", "abc") == 2
    assert capsys.readouterr().err.count("must be a duration") == 1


@pytest.mark.parametrize(
    ("kind", "workload", "counted", "unit"),
    [
        ("request_rate", "rag", "requests", " req/s"),
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
def test_the_unit_of_a_load_states_what_it_counts(
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
        and experiment.find_counted_unit(load(workload)) == counted
    )

    under_the_table = search_text.describe_units(
        unit
    )  # good requests/s stand beside loads in conversations/s

    assert under_the_table.startswith(f"Load: {unit.strip()}. Latencies")


def test_the_plan_of_a_search_states_its_rules(tmp_path: Path) -> None:
    plan = experiment.ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload="mlperf server",
        source_text="",
        target="",
        options={},
    )
    arguments = ("loadgen", "search", "mlperf server.yaml")
    of_search, our_experiment_plan = (
        msgspec.structs.replace(plan, command=arguments),
        msgspec.structs.replace(plan, rules="mlperf"),
    )
    before_plans_did = msgspec.structs.replace(plan, command=("loadgen", "mlperf", "peak"))

    assert [
        experiment_plan.is_by_mlperf_rules
        for experiment_plan in (plan, of_search, our_experiment_plan, before_plans_did)
    ] == [
        False,
        False,
        True,
        True,
    ]
    assert experiment.load_unit(our_experiment_plan, "requests") == " queries/s"
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(of_search))
    assert mlperf_sections.create_extra_sections(tmp_path, None) is None  # type: ignore[arg-type]
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(our_experiment_plan))
    assert mlperf_sections.create_extra_sections(tmp_path, None) is not None  # type: ignore[arg-type]


def test_a_search_whose_server_stops_reports_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from loadgen.core.errors import TargetError

    def once(workload: Workload, arguments: Any, *tell: Any) -> Any:
        if (tmp_path / experiment.TRIALS_FILE).exists():
            raise TargetError("connect", "nothing listens", "there")
        return run.execute(workload, arguments, *tell)

    search = LoadSearch(SearchSettings(low=1, high=1e4, start=20))
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
            search=search,
            runner=make_runner(tmp_path, execute=once),
            plan=plan,
            display=RunDisplay(quiet=True),
            unit="/s",
            trial_s=1,
        ).run()
        == 3
    )
    captured = capsys.readouterr()
    assert (
        "could not be reached" in captured.out
        and "at least 20" in captured.out
        and "nothing listens" in captured.err
    )


def test_a_search_is_resumed_without_its_options(
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
    resume = f"loadgen search --resume {shlex.quote(folder)} --max-probes 22"
    assert resume in " ".join(capsys.readouterr().out.split())
    assert exits(*shlex.split(resume)[1:]) == 0
    stderr = capsys.readouterr().err
    assert "2 trials are done" in stderr and "Resume with" not in stderr, "nothing is left"
    assert exits(*command, "--max-probes", "40", "-o", str(tmp_path / "whole")) == 0
    answers = [(tmp_path / name / "search.json").read_text() for name in ("s", "whole")]
    assert json.loads(answers[0])["answer"] == json.loads(answers[1])["answer"]
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "plan.json").write_text(json.dumps(plan | {"by": "sweep"}))
    assert exits("search", "--resume", tmp_path / "swept") == 2
    assert "a sweep, not a search" in capsys.readouterr().err
    assert exits("search", "--resume", str(tmp_path)) == 2
    assert "no search to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("added", "expected_text"),
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
def test_options_that_change_requests_are_refused_in_the_same_folder(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    added: tuple[str, ...],
    expected_text: str,
) -> None:
    """Nothing in such runs says that their requests differ, so one folder would mix them."""
    name, *options = command
    common = (name, "qa", "--url", "sim:h100x8", *options, "-d", "10s", "-o", str(tmp_path / "c"))
    exits(*common)
    capsys.readouterr()
    assert exits(*common, *added) == 2
    assert expected_text in " ".join(capsys.readouterr().err.split())


def test_a_search_of_a_simulated_target_begins_near_the_capacity_of_its_preset(
    tmp_path: Path,
) -> None:
    """The answer lies between the first two loads, and few trials are needed after them."""
    folder = tmp_path / "s"
    arguments = [
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

    assert exits(*arguments, "--out", str(folder)) == 0
    first_trial_result, second_trial_result, *other_results = experiment.read_results(folder)
    assert {first_trial_result.outcome, second_trial_result.outcome} == {"under", "over"}
    assert len(other_results) <= 9
    loads = sorted((first_trial_result.load, second_trial_result.load))
    assert loads[1] / loads[0] == pytest.approx(ESTIMATE_STEP)
    assert (
        exits(*arguments, "--start", "100", "--max-probes", "1", "--out", str(tmp_path / "t")) == 3
    )
    assert experiment.read_results(tmp_path / "t")[0].load == 100, "what is asked for stands"


def test_options_of_a_resumed_search_replace_stored_ones() -> None:
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


@pytest.mark.parametrize(("limit", "outcomes"), [("20s", []), ("1ms", ["over"])])
def test_a_load_that_the_client_did_not_offer_only_counts_if_it_failed(
    limit: str,
    outcomes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("capped.yaml").write_text(PLAIN + "max_in_flight: 4\n")
    arguments = [
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

    assert exits(*arguments, "--low", "10", "--high", "40", "--max-probes", "1", "--out", "c") == 3
    assert [
        trial.outcome for trial in experiment.read_results(Path("c"))
    ] == outcomes  # of valid ones
    assert ("in-flight limit" in " ".join(capsys.readouterr().out.split())) is (not outcomes)


@pytest.mark.parametrize(
    ("command_line", "means"), [("5%", 0.05), ("0.05", 0.05), ("50 %", 0.5), ("0.2%", 0.002)]
)
def test_a_precision_is_a_percentage_or_a_share(command_line: str, means: float) -> None:
    assert search_plan.parse_precision(command_line) == pytest.approx(means)


@pytest.mark.parametrize("command_line", ["5", "60%", "0", "nan", "narrow", "%", "-5%"])
def test_an_invalid_precision_is_refused(command_line: str) -> None:
    with pytest.raises(UserError, match=r"precision|share|percentage"):
        search_plan.parse_precision(command_line)


@pytest.mark.parametrize(
    ("spent_s", "lengths", "early", "says"),
    [
        (15.6, 1.0, False, "10.6 s after a load of 5.0 s"),
        (15.6, 2.0, False, ""),
        (9.0, 1.0, False, ""),
        (15.6, 1.0, True, ""),
    ],
)
def test_a_trial_shorter_than_its_responses_causes_a_note(
    spent_s: float, lengths: float, early: bool, says: str
) -> None:
    """Responses of qa take 28 s: trials of five seconds found 450/s where 135/s is true."""
    trial = PlannedTrial(
        number=0, load=126.0, kind="bracket", may_pass_early=True, length_factor=lengths
    )
    trial_result = TrialResult(
        trial=trial,
        outcome="under",
        ended_early=early,
        duration_s=spent_s,
        offered_load=126.0,
        sampling_noise=0.1,
    )
    text = search_text.describe_late_responses(trial_result, 5.0)

    assert says in text and bool(text) == bool(says) and ("--duration" in text) == bool(says)


def test_a_comparison_of_capacities_states_their_intervals() -> None:
    """30.4 once stood against 30.51 without the intervals, which both reach to 31.4."""
    stored_capacity = capacity.Capacity(
        rate_per_s=30.4, low_per_s=30.39, high_per_s=31.39, method="search", sustained=True
    )
    assert "30.4 requests/s (30.39 to 31.39), sustained" in stored_capacity.comparison_note
    assert (
        "30.4 requests/s, sustained"
        in msgspec.structs.replace(stored_capacity, low_per_s=None, high_per_s=None).comparison_note
    )
