"""Tests of `loadgen compare --live`: blocks, resuming, reports, lists and wrong usage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import servers
from command_line import exits
from expected_errors import refused
from loadgen_sdk.transport.target import Target

import loadgen
from loadgen.bundle.bundle_writer import write_bundle
from loadgen.bundle.verification import verify_bundle
from loadgen.compare import live_result
from loadgen.compare.alternating_blocks import BLOCKS_PER_GROUP, FIRST_STAGE_GROUPS
from loadgen.compare.compare_text import summarize_differences
from loadgen.compare.exit_code import comparison_exit_code
from loadgen.compare.live_result import COMPARISON_FILE, StoredComparison
from loadgen.compare.live_run import find_common_invalidity
from loadgen.compare.live_text import build_live_report, describe_block
from loadgen.compare.side_reader import read_sides
from loadgen.core import format
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.results import checksums
from loadgen.core.run_folder import read_summary
from loadgen.render import text
from loadgen.runs.kind import load_compared_run
from loadgen.sim.server.options import Options
from loadgen.ui.results_list import results_in

pytestmark = pytest.mark.commands

SLOWER = "extends: gb300-vm\nvm_speeds: [0.97]\n"
LOAD = ("--request-rate", "20", "-n", "40", "--warmup", "0", "--osl", "20", "--isl", "50")
GROUPS = 3


def run_live(output_dir: Path, target_b: str, *options: object) -> int:
    """Compare the GB300 VM with another target in GROUPS groups, and return the exit code."""
    return exits(
        "compare",
        "qa",
        "--live",
        "sim:gb300-vm",
        target_b,
        *LOAD,
        "--repeat",
        GROUPS,
        "--progress",
        "off",
        "-o",
        output_dir,
        *options,
    )


@pytest.fixture(scope="module")
def slower_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a target that is 3 % slower than the GB300 VM."""
    preset = tmp_path_factory.mktemp("presets") / "slower.yaml"
    preset.write_text(SLOWER)
    return f"sim:{preset}"


@pytest.fixture(scope="module")
def live_dir(tmp_path_factory: pytest.TempPathFactory, slower_target: str) -> Path:
    """Return the directory of a live comparison with a target that is 3 % slower."""
    output_dir = tmp_path_factory.mktemp("live") / "ab"
    assert run_live(output_dir, slower_target, "--seed", "1") == 0
    return output_dir


def read_stored(output_dir: Path) -> StoredComparison:
    """Return the stored comparison."""
    return msgspec.json.decode((output_dir / COMPARISON_FILE).read_bytes(), type=StoredComparison)


def outcome_by_metric(stored: StoredComparison) -> Mapping[str, str]:
    """Return the outcome of each metric by its path."""
    return {
        difference.metric: difference.detailed_outcome
        for difference in stored.comparison.differences
    }


def test_a_live_comparison_detects_a_target_that_is_slower_by_3_percent(live_dir: Path) -> None:
    stored = read_stored(live_dir)
    tpot = next(d for d in stored.comparison.differences if d.metric == "tpot_ms.p50")
    assert tpot.detailed_outcome == "worse" and tpot.side == "B"
    assert tpot.low is not None and tpot.high is not None and tpot.change is not None
    assert tpot.low <= 1 / 0.97 - 1 <= tpot.high or abs(tpot.change - (1 / 0.97 - 1)) < 0.002
    assert outcome_by_metric(stored)["tokens.steady_output_per_s"] != "worse"
    assert stored.comparison.confidence == 0.99
    assert stored.comparison.runs == (2 * GROUPS, 2 * GROUPS)
    assert stored.is_complete and stored.complete_groups == GROUPS and not stored.excluded_groups


def test_the_two_blocks_of_a_pair_send_the_same_load(live_dir: Path) -> None:
    plan = live_result.read_plan(live_dir)
    prompts_by_pair: dict[int, set[str]] = {}
    for group in plan.groups:
        for block in group.blocks:
            summary = json.loads((live_dir / block.name / "summary.json").read_bytes())
            prompts_by_pair.setdefault(block.pair, set()).add(summary["fingerprints"]["prompts"])
            is_slower = "slower" in summary["target"]["name"]
            assert is_slower is (block.side == "B")
    assert all(len(prompts) == 1 for prompts in prompts_by_pair.values())
    assert len(set.union(*prompts_by_pair.values())) == 2 * GROUPS


def test_a_live_comparison_of_equal_targets_is_equivalent(tmp_path: Path) -> None:
    assert run_live(tmp_path / "aa", "sim:gb300-vm", "--seed", "2") == 0
    outcomes = outcome_by_metric(read_stored(tmp_path / "aa"))
    assert outcomes["tpot_ms.p50"] == outcomes["e2e_ms.p50"] == "equivalent"
    assert not {"better", "worse"} & set(outcomes.values())


def test_a_condition_decides_the_exit_code_of_command_and_report(
    tmp_path: Path, slower_target: str
) -> None:
    output_dir = tmp_path / "ab"
    condition = ("--fail-on", "tpot_ms.p50 > +1%", "--beyond-noise", "--seed", "3")
    assert run_live(output_dir, slower_target, *condition) == 1
    assert exits("report", output_dir, "--no-html") == 1


def test_report_list_and_json_of_a_live_comparison_agree(
    live_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (live_dir / COMPARISON_FILE).read_bytes()
    assert exits("report", live_dir, "--json") == 0
    assert capsys.readouterr().out.encode() == before
    assert exits("report", live_dir, "--full", "--no-html") == 0
    text = capsys.readouterr().out
    assert "TPOT p50" in text and "worse" in text and "SIMULATED" in text
    (listed,) = results_in(live_dir.parent)
    assert listed.kind == "live" and listed.simulated and "TPOT p50" in listed.reported_outcome
    opened = loadgen.load(live_dir)
    assert opened.kind == "live" and opened.headline.startswith("SIMULATED: B vs. A: worse in")
    assert len(opened.runs) == 4 * GROUPS
    assert not checksums.find_changes(live_dir)


def test_a_bundle_of_a_live_comparison_is_verified_from_the_records(
    live_dir: Path, tmp_path: Path
) -> None:
    write_bundle(live_dir, tmp_path / "ab.zip")
    verified = verify_bundle(tmp_path / "ab.zip")
    assert verified.verified == "all" and not verified.differences


def test_a_killed_comparison_reports_its_complete_groups_and_resumes(
    live_dir: Path, tmp_path: Path, slower_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Path(shutil.copytree(live_dir, tmp_path / "killed"))
    plan = live_result.read_plan(killed)
    last_blocks = [block.name for block in plan.groups[-1].blocks]
    (killed / last_blocks[1] / "summary.json").unlink()
    for name in last_blocks[2:]:
        shutil.rmtree(killed / name)
    for name in (COMPARISON_FILE, "report.html", checksums.FILE):
        (killed / name).unlink()

    assert exits("report", killed, "--json") == 0
    stored = msgspec.json.decode(capsys.readouterr().out, type=StoredComparison)
    assert not stored.is_complete and stored.complete_groups == GROUPS - 1
    (listed,) = results_in(tmp_path)
    assert listed.reported_outcome.startswith("9 of 12")

    modified_ns = (killed / "block-001-a" / "run.json").stat().st_mtime_ns
    assert run_live(killed, slower_target) == 0
    assert (killed / "block-001-a" / "run.json").stat().st_mtime_ns == modified_ns
    assert len(list((killed / "unfinished").iterdir())) == 2
    resumed = read_stored(killed)
    original = read_stored(live_dir)
    assert resumed.is_complete and resumed.plan.seed == 1
    assert outcome_by_metric(resumed) == outcome_by_metric(original)


def test_a_live_comparison_without_a_complete_group_has_no_result(
    live_dir: Path, tmp_path: Path
) -> None:
    early = Path(shutil.copytree(live_dir, tmp_path / "early"))
    for block_dir in live_result.list_block_dirs(early)[3:]:
        shutil.rmtree(block_dir)
    assert exits("report", early) == 2
    with refused(UserError, "no_result"):
        live_result.read_comparison(early)


def test_a_plan_with_too_many_groups_is_refused(live_dir: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    plan = json.loads((live_dir / "live.json").read_bytes())
    (changed / "live.json").write_text(json.dumps(plan | {"max_groups": 10**15}))
    with refused(UserError, "damaged_file"):
        live_result.read_plan(changed)
    assert exits("report", changed) == 2


def test_a_live_comparison_of_fewer_than_three_groups_is_reported_and_not_judged(
    live_dir: Path, tmp_path: Path
) -> None:
    short = Path(shutil.copytree(live_dir, tmp_path / "short"))
    for block_dir in live_result.list_block_dirs(short)[8:]:
        shutil.rmtree(block_dir)
    stored = live_result.read_comparison(short)
    assert all(d.low is None and d.before is not None for d in stored.comparison.differences)


def test_groups_with_an_invalid_block_are_excluded(live_dir: Path) -> None:
    plan = live_result.read_plan(live_dir)
    reader = live_result.BlockReader(live_dir)
    run_by_name = {
        block.name: reader.read(block) for group in plan.groups for block in group.blocks
    }
    invalid_name = plan.groups[1].blocks[2].name
    run = run_by_name[invalid_name]
    verdict = msgspec.structs.replace(run.summary.verdict, valid=False)
    summary = msgspec.structs.replace(run.summary, verdict=verdict)
    run_by_name[invalid_name] = msgspec.structs.replace(run, summary=summary)

    stored = live_result.compare_groups(plan, plan.groups, run_by_name)
    assert stored.excluded_groups == 1 and stored.comparison.valid
    assert stored.comparison.runs == (2 * GROUPS - 2, 2 * GROUPS - 2)
    assert all(d.low is None for d in stored.comparison.differences), "two groups are too few"

    all_invalid = {
        name: msgspec.structs.replace(
            run,
            summary=msgspec.structs.replace(
                run.summary,
                verdict=msgspec.structs.replace(run.summary.verdict, valid=False),
            ),
        )
        for name, run in run_by_name.items()
    }
    stored = live_result.compare_groups(plan, plan.groups, all_invalid)
    assert not stored.comparison.valid and comparison_exit_code(stored.comparison, ()) == 3
    assert set(outcome_by_metric(stored).values()) == {"inconclusive"}


def test_a_different_live_comparison_is_refused_in_the_same_folder(
    live_dir: Path, tmp_path: Path, slower_target: str
) -> None:
    copied = Path(shutil.copytree(live_dir, tmp_path / "copied"))
    before = (copied / COMPARISON_FILE).read_bytes()
    assert run_live(copied, "sim:gb300-vm") == 2
    assert run_live(copied, slower_target, "--seed", "9") == 2
    assert run_live(copied, slower_target, "--fail-on", "tpot_ms.p50 > +1%") == 2
    assert (copied / COMPARISON_FILE).read_bytes() == before
    assert run_live(copied, slower_target) == 0, "nothing is left to do"
    assert (copied / COMPARISON_FILE).read_bytes() == before


def test_a_live_comparison_is_refused_as_a_side_of_another_comparison(live_dir: Path) -> None:
    with refused(CombinedError, "unsupported"):
        read_sides([live_dir, live_dir / "block-001-a"])


def test_the_precision_decides_the_number_of_groups(live_dir: Path) -> None:
    """Ten groups, each a copy of a measured one whose B is slower by another 0 to 0.9 %."""
    stored_plan = live_result.read_plan(live_dir)
    reader = live_result.BlockReader(live_dir)
    plan = msgspec.structs.replace(stored_plan, max_groups=60, half_width=0.05)
    groups = plan.groups[:FIRST_STAGE_GROUPS]
    run_by_name = {}
    for index, group in enumerate(groups):
        measured_group = stored_plan.groups[index % 2]
        for block, measured in zip(group.blocks, measured_group.blocks, strict=True):
            run = reader.read(measured)
            factor = 1 + 0.001 * index * (block.side == "B")
            tpot = msgspec.structs.replace(
                run.summary.tpot_ms, p50=run.summary.tpot_ms.p50 * factor
            )
            summary = msgspec.structs.replace(run.summary, tpot_ms=tpot)
            run_by_name[block.name] = msgspec.structs.replace(run, name=block.name, summary=summary)

    wide = msgspec.structs.replace(plan, half_width=0.5)
    enough = live_result.compare_groups(wide, groups, run_by_name)
    assert enough.is_complete and enough.needed_groups == FIRST_STAGE_GROUPS

    narrow = msgspec.structs.replace(plan, half_width=0.0005)
    too_few = live_result.compare_groups(narrow, groups, run_by_name)
    assert not too_few.is_complete and (too_few.needed_groups or 0) > 60

    first_stage = live_result.compare_groups(narrow, groups[:4], run_by_name)
    assert first_stage.needed_groups is None and not first_stage.is_complete


@pytest.mark.parametrize(
    "arguments",
    [
        ("results/a", "--request-rate", "10"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--save", "x"),
        ("qa", "rag", "--live", "sim:gb300-vm", "sim:gb300-vm"),
        ("qa", "--live", "sim:gb300-vm", "sim:nowhere"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "-d", "10s", "--repeat", "10"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--repeat", "auto,most=5"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--fail-on", "nonsense"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--repeat", "1"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--repeat", "2"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "-n", "40", "-d", "10m"),
        ("qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--json", "--markdown"),
        ("qa", "--live", "sim:gb300-vm"),
        ("qa", "--live", "sim:gb300-vm", "--repeat", "5"),
        ("--live", "sim:gb300-vm", "qa"),
    ],
)
def test_a_live_comparison_with_wrong_arguments_writes_no_file(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exits("compare", *arguments) == 2
    assert not list(tmp_path.iterdir())


def read_errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines with errors that a command printed."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("error: ")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("qa", "--live", "sim:gb300-vm", "--repeat", "5"),
        ("--live", "sim:gb300-vm", "qa"),
        ("qa", "--live", "sim:gb300-vm"),
    ],
    ids=["an option follows", "the workload follows", "nothing follows"],
)
def test_a_missing_second_url_is_named(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("compare", *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].strip().startswith("--> --live")
    assert len([line for line in lines if line.startswith("error: ")]) == 1


def test_an_invalid_duration_of_a_live_comparison_is_one_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = ("compare", "qa", "--live", "sim:gb300-vm", "sim:gb300-vm")
    assert exits(*live, "-d", "-1m") == 2
    assert len(read_errors(capsys)) == 1


@pytest.mark.parametrize("arguments", [("before", "after"), ("qa", "--live", "sim:a", "sim:b")])
def test_two_output_formats_of_a_comparison_are_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("compare", *arguments, "--json", "--markdown") == 2
    (error,) = read_errors(capsys)
    assert "format" in error


def test_a_dry_run_of_a_live_comparison_lists_both_sides_and_all_blocks(
    tmp_path: Path, slower_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_live(tmp_path / "dry", slower_target, "--seed", "7", "--dry-run") == 0
    assert not (tmp_path / "dry").exists()
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    first_sides = sorted(line[0] for line in lines if line.endswith(", the first block of 6:"))
    assert first_sides == ["A", "B"]
    assert [line for line in lines if "--seed" in line] == ["reproduce with --seed 7"] * 2
    assert "--seed 7" in captured.err
    # 12 blocks of 40 requests at 20/s.
    assert lines[-1].startswith("all 12 blocks: about 480 requests")
    assert lines[-1].endswith(" s")


def test_the_duration_of_a_live_comparison_is_divided_between_its_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("compare", "qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--request-rate", "9")
    for options, blocks in (
        (("-d", "72s", "--repeat", "3"), "12 blocks of 6.0 s in 3 groups"),
        (("-d", "20m"), "80 blocks of 15.0 s in 20 groups"),
        (("-d", "4m"), "40 blocks of 6.0 s in 10 groups"),
        (("-d", "2m"), "24 blocks of 5.0 s in 6 groups"),
        (("-d", "1m"), "12 blocks of 5.0 s in 3 groups"),
    ):
        assert exits(*command, *options, "--dry-run", "-o", tmp_path / "ab") == 0
        assert capsys.readouterr().err.startswith(blocks)


def test_short_blocks_cause_a_warning_with_the_needed_duration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("compare", "qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "--request-rate", "9")
    for options, needed_duration in (
        (("-d", "1m", "--repeat", "10"), "-d 200s"),
        (("-d", "30s"), "-d 60s"),
        (("-d", "200s", "--repeat", "10"), ""),
    ):
        assert exits(*command, *options, "--dry-run", "-o", tmp_path / "ab") == 0
        warnings = [line for line in capsys.readouterr().err.splitlines() if "-d " in line]
        assert len(warnings) == bool(needed_duration)
        assert all(needed_duration in warning for warning in warnings)


def test_blocks_shorter_than_two_responses_cause_a_warning_in_the_report(live_dir: Path) -> None:
    """A response of 20 tokens takes 0.4 s, so blocks of 1 s are long enough."""
    plan = live_result.read_plan(live_dir)
    reader = live_result.BlockReader(live_dir)
    run_by_name = {
        block.name: reader.read(block) for group in plan.groups for block in group.blocks
    }
    for block_s, is_warned in ((0.5, True), (1.0, False)):
        shorter = msgspec.structs.replace(plan, block_s=block_s)
        stored = live_result.compare_groups(shorter, plan.groups, run_by_name)
        assert bool(stored.short_blocks) is is_warned
        brief = text.render(build_live_report(stored), full=False, color=False, width=200)
        assert ("-d 12s" in brief) is is_warned


def test_blocks_without_a_response_are_one_notice_and_need_a_longer_duration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Responses of 500 tokens take 10 s, over which the virtual users start, and blocks 5 s."""
    code = exits(
        "compare", "qa", "--live", "sim:gb300-vm", "sim:gb300-vm", "-c", "4", "-d", "1m",
        "--warmup", "0", "--progress", "off", "-o", tmp_path / "ab",
    )  # fmt: skip
    assert code == 3
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("INVALID")]) == 1
    assert read_stored(tmp_path / "ab").short_blocks


def test_a_first_group_without_a_valid_block_ends_the_comparison_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_few_requests = ("-n", "6", "--seed", "1")
    assert run_live(tmp_path / "ab", "sim:gb300-vm", *too_few_requests) == 3

    assert len(live_result.list_block_dirs(tmp_path / "ab")) == BLOCKS_PER_GROUP
    (reason,) = read_summary(tmp_path / "ab" / "block-001-a").verdict.reasons
    assert f"INVALID: {reason}" in capsys.readouterr().err


def test_a_group_with_one_valid_block_does_not_end_the_comparison(live_dir: Path) -> None:
    valid = load_compared_run(live_dir / "block-001-a")
    verdict = msgspec.structs.replace(valid.summary.verdict, valid=False, reasons=("too few",))
    summary = msgspec.structs.replace(valid.summary, verdict=verdict)
    invalid = msgspec.structs.replace(valid, summary=summary)

    assert find_common_invalidity([invalid, valid, invalid]) == []
    assert find_common_invalidity([invalid, invalid]) == ["too few"]


def test_a_dead_target_is_reported_before_the_first_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead_url = "http://127.0.0.1:9"
    assert run_live(tmp_path / "ab", dead_url) == 3
    assert not (tmp_path / "ab").exists()
    captured = capsys.readouterr().err
    assert "Block on" not in captured and dead_url in captured


def test_a_dead_target_is_reported_before_a_resumed_block(live_dir: Path, tmp_path: Path) -> None:
    resumed = Path(shutil.copytree(live_dir, tmp_path / "resumed"))
    dead_url = "http://127.0.0.1:9"
    plan = json.loads((resumed / "live.json").read_bytes())
    plan["targets"][1] = f"{dead_url}/v1"
    (resumed / "live.json").write_text(json.dumps(plan))
    for block_dir in live_result.list_block_dirs(resumed)[8:]:
        shutil.rmtree(block_dir)

    assert run_live(resumed, dead_url, "--seed", "1") == 3
    assert len(live_result.list_block_dirs(resumed)) == 8, "no block of A was sent"


def test_metrics_with_too_few_samples_are_inconclusive_in_the_summary(live_dir: Path) -> None:
    stored = read_stored(live_dir)
    outcomes = list(outcome_by_metric(stored).values())
    assert "inconclusive" in outcomes and "equivalent" in outcomes
    sentence = summarize_differences(stored.comparison, "B")
    equivalent = format.counted(outcomes.count("equivalent"), "metric")
    inconclusive = format.counted(outcomes.count("inconclusive"), "metric")
    assert f"equivalent in {equivalent}" in sentence
    assert f"inconclusive in {inconclusive}" in sentence


def test_an_interrupted_block_is_described_as_interrupted_and_not_as_invalid(
    live_dir: Path,
) -> None:
    summary = read_summary(live_dir / "block-001-a")
    assert "TTFT" in describe_block(summary)
    verdict = msgspec.structs.replace(summary.verdict, valid=False, reasons=("too few",))
    invalid = msgspec.structs.replace(summary, verdict=verdict)
    assert describe_block(invalid).startswith("INVALID")
    run = msgspec.structs.replace(summary.run, state="interrupted")
    assert describe_block(msgspec.structs.replace(invalid, run=run)).startswith("interrupted")


def test_comparing_a_live_folder_names_the_command_that_reads_it(
    live_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for results in ((live_dir,), (live_dir, live_dir / "block-001-a")):
        assert exits("compare", *results) == 2
        assert f"loadgen report {live_dir}" in capsys.readouterr().err


@pytest.mark.processes
def test_a_live_comparison_measures_two_servers_over_http(tmp_path: Path) -> None:
    # A send delay is compared with the TTFT, which is long enough here for a busy host.
    options = Options(ttft="50ms", itl="0.2ms")
    urls = [servers.shared(options, number).url for number in (0, 1)]
    load = ("-c", "4", "-n", "40", "--warmup", "0", "--isl", "20", "--osl", "5")
    code = exits(
        "compare", "qa", "--live", *urls, *load, "--repeat", "3", "--progress", "off",
        "-o", tmp_path / "http",
    )  # fmt: skip
    assert code in (0, 3), "3: this host may be too busy to measure"
    stored = read_stored(tmp_path / "http")
    assert stored.comparison.valid is (code == 0)
    assert stored.complete_groups == 3 or not stored.comparison.valid
    assert [Target.parse(url).address for url in urls] == [
        Target.parse(target).address for target in stored.plan.targets
    ]
