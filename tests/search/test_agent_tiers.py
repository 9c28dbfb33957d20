"""Searches at several tiers in one command: one result, one table, one command that continues."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from command_line import exits
from expected_errors import refused

import loadgen
from loadgen.cli.resume import remove_options
from loadgen.core.errors import UserError
from loadgen.render import text
from loadgen.result_kinds import OpenedResult
from loadgen.search import agent_tiers, agent_tiers_kind
from loadgen.search.agent_tiers import DescribedTiers, StoredTiers, check_tiers, name_tier_folder
from loadgen.search.agent_tiers_text import build_tier_table, create_report
from loadgen.ui.results_list import results_in

pytestmark = pytest.mark.commands

EASY, HARD = "10:10s", "60:5s"
MAX_LINES = 10
LOAD = ("--low", "4", "--high", "8", "-d", "20s", "--no-sustain", "--precision", "50%")
SEARCH = (
    *("search", "agentic", "--url", "sim:gb300-vm", "--over", "sessions", "--seed", "1"),
    *("--tier", EASY, "--tier", HARD, *LOAD),
)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    (folder / "system.yaml").write_text("gpus: 4\nprovisioned_kw: 8\n")
    code = exits(*SEARCH, "--system", folder / "system.yaml", "-o", folder / "out")
    assert code == 1, "no load passes the second tier"
    return folder / "out"


@pytest.fixture
def copied(searched: Path, tmp_path: Path) -> Path:
    """Return a copy of the result that a test may change."""
    shutil.copytree(searched, tmp_path / "out")
    return tmp_path / "out"


def load(folder: Path) -> DescribedTiers:
    result = loadgen.load(folder)
    assert isinstance(result, OpenedResult)
    assert isinstance(result.value, DescribedTiers)
    return result.value


def test_the_table_has_the_result_of_the_search_at_each_tier(searched: Path) -> None:
    table = build_tier_table(load(searched))
    assert table.rows == [
        ("at least 10 tok/s", "at most 10 s", "at least 8", "2.00", "1,000", "-"),
        ("at least 60 tok/s", "at most 5 s", "none", "-", "-", "speed p25"),
    ]
    assert table.head[:2] == ("speed p25", "TTFT p95") and table.head[-1] == "limited by"

    stored = [
        json.loads((searched / name_tier_folder(tier) / "search.json").read_bytes())["agents"]
        for tier in (EASY, HARD)
    ]
    assert [agents["sessions"] for agents in stored] == [8, None]
    assert stored[0]["sessions_per_provisioned_mw"] == 1000


def test_the_report_of_tiers_has_few_lines_on_a_terminal(searched: Path) -> None:
    printed = text.render(create_report(load(searched)))
    assert len(printed.splitlines()) <= MAX_LINES
    assert "llama" in printed and "4 GPUs" in printed


def test_file_report_and_list_of_tiers_agree(
    searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("report", searched, "--json", "--no-html") == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((searched / "tiers.json").read_bytes())
    assert [result["tier"] for result in printed["tiers"]] == [EASY, HARD]
    assert printed["simulated"] and printed["resume_command"] == ""

    (listed,) = results_in(searched.parent)
    assert listed.kind == "tiers" and listed.simulated
    assert "at least 8 at 10 tok/s and TTFT 10 s" in listed.reported_outcome


def test_each_tier_is_stored_as_a_separate_search(searched: Path) -> None:
    search = loadgen.load(searched / name_tier_folder(EASY))
    assert isinstance(search, OpenedResult)
    assert search.kind == "search" and search.exit_code() == 0
    plan = json.loads((searched / name_tier_folder(HARD) / "plan.json").read_bytes())
    assert HARD in plan["command"] and EASY not in plan["command"]


def test_a_command_killed_at_the_second_tier_reports_the_first_and_is_resumed(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = load(copied)
    shutil.rmtree(copied / name_tier_folder(HARD))
    (copied / "tiers.json").write_bytes(msgspec.json.encode(_without_results(load_stored(copied))))

    stopped = load(copied)
    assert stopped.tiers[0] == complete.tiers[0]
    assert (stopped.tiers[1].agents, stopped.tiers[1].state) == (None, None)
    assert stopped.resume_command == f"loadgen search --resume {copied}"
    assert agent_tiers_kind.code(stopped, False) == 3

    assert exits("search", "--resume", copied, "--json") == 1
    printed = json.loads(capsys.readouterr().out)
    assert [result["stop_reason"] for result in printed["tiers"]] == ["highest", "none"]
    assert load(copied).tiers == complete.tiers


def load_stored(folder: Path) -> StoredTiers:
    return msgspec.json.decode((folder / "tiers.json").read_bytes(), type=StoredTiers)


def _without_results(stored: StoredTiers) -> StoredTiers:
    """Return the tiers as they are stored before the first search."""
    empty = tuple(
        agent_tiers.TierResult(tier=result.tier, folder=result.folder) for result in stored.tiers
    )
    return msgspec.structs.replace(stored, tiers=empty)


@pytest.mark.processes
def test_finished_tiers_are_reported_if_the_next_one_is_interrupted(
    searched: Path, tmp_path: Path
) -> None:
    system = searched.parent / "system.yaml"
    command = [*SEARCH, "--system", system, "-o", tmp_path / "out"]
    with subprocess.Popen(
        [sys.executable, "-m", "loadgen", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            if HARD in line:
                process.send_signal(signal.SIGINT)
        printed = process.stdout.read()

    assert process.returncode == 130
    assert "at least 8" in printed and "--resume" in printed
    easy, hard = load(tmp_path / "out").tiers
    assert easy.stop_reason == "highest" and hard.stop_reason in ("", "interrupted")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--over", "sessions", "--tier", EASY, "--tier", HARD), 0),
        (("--over", "sessions", "--tier", EASY, "--tier", EASY), 2),
        (("--over", "sessions", "--tier", EASY, "--tier", "fast"), 2),
        (("--over", "rate", "--tier", EASY, "--tier", HARD), 2),
        (("--over", "sessions", "--tier", EASY, "--tier", HARD, "--slo", "ttft:1s"), 2),
    ],
)
def test_options_of_several_tiers_are_checked_before_the_first_trial(
    options: tuple[str, ...], code: int
) -> None:
    assert exits("search", "agentic", "--url", "sim:gb300-vm", *options, "--dry-run") == code


def test_a_folder_with_other_results_is_refused_for_tiers(searched: Path) -> None:
    other_tiers = ("--tier", EASY, "--tier", "20:10s")
    load_options = ("--url", "sim:gb300-vm", "--over", "sessions", *other_tiers)
    assert exits("search", "agentic", *load_options, "-o", searched) == 2
    assert exits("search", "agentic", *load_options, "-o", searched / name_tier_folder(EASY)) == 2


@pytest.mark.parametrize("folder", ["../other", "tier-60-5s", "/etc"])
def test_a_tier_folder_outside_the_results_is_refused(copied: Path, folder: str) -> None:
    content = json.loads((copied / "tiers.json").read_bytes())
    content["tiers"][0]["folder"] = folder
    (copied / "tiers.json").write_text(json.dumps(content))
    with refused(UserError, "damaged_file"):
        agent_tiers.read_tiers(copied)


def test_several_tiers_are_refused_as_a_side_of_a_comparison(searched: Path) -> None:
    with refused(UserError, "unsupported"):
        agent_tiers_kind.compare_side(searched)


def test_a_tier_that_is_repeated_is_refused() -> None:
    check_tiers([EASY, HARD])
    with refused(UserError, "duplicate"):
        check_tiers([EASY, f" {EASY}"])


def test_options_are_removed_from_a_command_with_their_values() -> None:
    arguments = ["search", "x", "--tier", "1:1s", "--tier=2:1s", "-oout", "--force", "--low", "2"]
    remaining = remove_options(arguments, {"--tier", "--out", "-o"}, {"--force"})
    assert remaining == ["search", "x", "--low", "2"]
