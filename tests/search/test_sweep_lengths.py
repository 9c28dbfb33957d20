"""Sweeps over lengths and targets: load points, curves and results of a stopped sweep."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from command_line import exits
from load_point_results import make_load_point_result

from loadgen.core.errors import UserError
from loadgen.render import text as as_text
from loadgen.repeated import capacity
from loadgen.runs import sweep_curve, sweep_report
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.load_points import LoadPoint, PointGroup
from loadgen.runs.sweep_curve import GroupCurve, SweepCurve
from loadgen.search import capacity_files, experiment, stored_sweep, sweep, sweep_kind

LOAD = (
    *("sweep", "qa", "--url", "sim:gb300-vm", "-c", "1,4"),
    *("-n", "40", "--gpus", "4", "--warmup", "0"),
)
LENGTHS = ("--isl", "100,300", "--osl", "20")


# -- load points -----------------------------------------------------------------------------------


def test_load_points_combine_every_load_with_every_pair_of_lengths_and_every_target() -> None:
    groups = sweep.combine_point_groups("1000, 500", "100,200", ["a", "http://b:8000/v1"])
    points = sweep.combine_load_points(groups, (1, 8), "concurrency")

    assert len(points) == 16
    assert [point.name for point in points[:3]] == [
        "isl500-osl100-a-c1",
        "isl500-osl100-a-c8",
        "isl500-osl200-a-c1",
    ]
    assert points[-1] == LoadPoint(
        name="isl1000-osl200-http-b-8000-v1-c8",
        load=8,
        isl=1000,
        osl=200,
        target="http://b:8000/v1",
    )
    assert points[-1].label == "ISL 1,000, OSL 200, http://b:8000/v1"


def test_load_points_of_a_plain_sweep_are_named_after_their_load_alone() -> None:
    points = sweep.combine_load_points(
        sweep.combine_point_groups(None, None, ()), (2.5,), "request_rate"
    )
    assert points == [LoadPoint(name="r2.5", load=2.5)]


@pytest.mark.parametrize("text", ["", "0", "1,", "1,1", "a", "1,-2", "1e3", "٣"])
def test_an_invalid_list_of_lengths_is_refused(text: str) -> None:
    with pytest.raises(UserError) as error:
        sweep.combine_point_groups(text, None, ())
    assert error.value.code in ("invalid_value", "duplicate")


def test_too_many_load_points_are_refused() -> None:
    groups = [PointGroup(isl=length) for length in range(1, 102)]
    with pytest.raises(UserError) as error:
        sweep.combine_load_points(groups, range(1, 11), "concurrency")
    assert error.value.code == "too_large"


# -- curves ----------------------------------------------------------------------------------------


def load_point(
    isl: int, load: int, output: float, per_user: float, **changes: object
) -> LoadPointResult:
    """Return a valid load point with these tokens/s in all and per user."""
    name = f"isl{isl}-{changes.get('target', '')}-c{load}"
    fields = {
        "name": name,
        "isl": isl,
        "load_label": f"{load} in flight",
        "load_value": float(load),
        "ok": 99,
        "output_per_s": output,
        "per_user": per_user,
    }
    return make_load_point_result(**(fields | changes))


def curve_of(*load_points: LoadPointResult, slo: str = "") -> SweepCurve:
    """Return a sweep over several lengths or targets with these load points."""
    groups = dict.fromkeys(curve_point.group for curve_point in load_points)
    curves = [
        sweep_curve._group_curve(
            group, [curve_point for curve_point in load_points if curve_point.group == group]
        )
        for group in groups
    ]
    return SweepCurve(
        workload="w",
        model="m",
        target="t",
        gpus=None,
        version="1",
        started="2026-01-01T00:00",
        slo=slo,
        load_points=load_points,
        knee="",
        best="",
        groups=tuple(curves),
    )


def test_a_pareto_front_includes_all_targets_at_the_same_lengths() -> None:
    load_points = sweep_curve.mark_pareto_front(
        [
            load_point(500, 1, 10, 50, target="a"),
            load_point(500, 2, 40, 20, target="a"),
            load_point(500, 1, 20, 60, target="b"),
            load_point(900, 1, 1, 1, target="a"),
        ],
        "tpot50",
    )

    assert [curve_point.on_pareto_front for curve_point in load_points] == [False, True, True, True]


def test_each_pair_of_lengths_has_a_separate_knee_and_best_load_point() -> None:
    curve = curve_of(
        load_point(500, 1, 10, 50, slo_met=True),
        load_point(500, 2, 40, 20, slo_met=False),
        load_point(900, 1, 5, 9, slo_met=True),
        slo="s",
    )

    assert [group.best for group in curve.groups] == ["isl500--c1", "isl900--c1"]
    first_sweep_curve, second_sweep_curve = curve.split()
    assert [curve_point.name for curve_point in first_sweep_curve.load_points] == [
        "isl500--c1",
        "isl500--c2",
    ]
    assert first_sweep_curve.best == "isl500--c1" and second_sweep_curve.best == "isl900--c1"


def test_different_lengths_have_separate_charts() -> None:
    curve = curve_of(
        load_point(500, 1, 10, 50), load_point(500, 2, 40, 20), load_point(900, 1, 5, 9)
    )
    sections = list(sweep_report._chart_sections(curve))

    assert len(sections) == 2

    labels = [
        {
            label
            for chart in part.parts[0].charts
            for series in chart.series
            for label in series.labels
        }
        for part in sections
    ]

    assert labels == [{"isl500--c1", "isl500--c2"}, {"isl900--c1"}]


def test_several_targets_at_the_same_lengths_share_a_chart() -> None:
    curve = curve_of(load_point(500, 1, 10, 50, target="a"), load_point(500, 1, 20, 60, target="b"))
    (part,) = sweep_report._chart_sections(curve)
    assert [[series.name for series in chart.series] for chart in part.parts[0].charts] == [
        ["a", "b"],
        ["a", "b"],
    ]


def test_the_headline_names_the_lengths_with_the_highest_throughput_within_the_slo() -> None:
    curve = curve_of(
        load_point(500, 1, 10, 50, slo_met=True),
        load_point(500, 2, 40, 20, slo_met=False),
        load_point(900, 1, 5, 9, slo_met=True),
        load_point(2000, 1, 7, 9, slo_met=False),
        load_point(3000, 1, 7, 9, slo_met=None),
        load_point(4000, 1, 7, 9, valid=False),
        slo="s",
    )
    sentences = list(sweep_report.result_sentences(curve))

    assert "ISL 500, 1 in flight, 10.0" in sentences[0] and "ISL 900" in sentences[1]
    assert (
        "ISL 2,000" in sentences[2] and "ISL 3,000" in sentences[3] and "ISL 4,000" in sentences[4]
    )


@pytest.mark.parametrize(
    ("valid", "met", "strict", "code"),
    [
        ((True, False), (False, None), False, 0),
        ((False, False), (True, True), False, 3),
        ((True, True), (True, None), True, 4),
    ],
)
def test_a_missed_slo_and_a_curve_without_a_valid_load_point_have_different_exit_codes(
    valid: tuple[bool, ...], met: tuple[bool | None, ...], strict: bool, code: int
) -> None:
    points = [
        load_point(100, i + 1, 1.0, 9.0, valid=sound, slo_met=is_met, slo_undecided=is_met is None)
        for i, (sound, is_met) in enumerate(zip(valid, met, strict=True))
    ]
    other = load_point(200, 1, 1.0, 9.0)
    assert sweep_curve.exit_code(curve_of(*points, other), strict=strict) == code


def test_splitting_a_curve_of_one_group_returns_the_curve() -> None:
    plain = msgspec.structs.replace(curve_of(load_point(1, 1, 1, 1)), groups=())
    assert plain.split() == [plain]
    assert GroupCurve(isl=1, knee="", best="").group == PointGroup(isl=1)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.commands
def test_text_page_and_files_of_a_sweep_over_lengths_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"

    assert exits(*LOAD, *LENGTHS, "--json", "-o", folder) == 0

    printed = capsys.readouterr()
    document = json.loads(printed.out)
    names = ["isl100-osl20-c1", "isl100-osl20-c4", "isl300-osl20-c1", "isl300-osl20-c4"]

    assert [level["name"] for level in document["levels"]] == names
    assert [(level["isl"], level["osl"]) for level in document["levels"]] == [(100, 20)] * 2 + [
        (300, 20)
    ] * 2
    assert [(group["isl"], group["osl"]) for group in document["groups"]] == [(100, 20), (300, 20)]
    assert document["not_run"] == [] and document["resume"] == ""
    assert document["levels"][1]["total_per_gpu"] == pytest.approx(
        document["levels"][1]["per_gpu"] * 120 / 20, rel=0.01
    )
    for number, name in enumerate(names, 1):
        assert f"{name}: {number} of 4" in printed.err
    headers = [json.loads((folder / name / "run.json").read_bytes()) for name in names]
    assert len({run["seed"] for run in headers}) == 1, "one seed for all, which is printed"
    assert len({run["salt"] for run in headers}) == 4, "prompts of its own for each"
    rows = list(csv.DictReader((folder / "curve.csv").read_text().splitlines()))
    assert [(row["isl"], row["osl"], row["load"]) for row in rows] == [
        ("100", "20", "1"),
        ("100", "20", "4"),
        ("300", "20", "1"),
        ("300", "20", "4"),
    ]
    fronts = {level["name"]: int(level["front"]) for level in document["levels"]}
    assert [int(row["pareto"]) for row in rows] == list(fronts.values())
    assert exits("report", folder, "--markdown") == 0
    assert capsys.readouterr().out == (folder / "sweep.md").read_text()
    assert exits("report", folder, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    assert exits("report", tmp_path, "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["kind"], listed["word"]) == ("sweep", "4 of 4 load points")
    assert not (folder / capacity.CAPACITY_FILE).exists(), "no single load is the capacity"


@pytest.mark.commands
def test_lengths_can_be_added_to_a_sweep_under_the_same_slo_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"

    assert exits(*LOAD, *LENGTHS, "-o", folder) == 0

    modified_ns = (folder / "isl300-osl20-c4" / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert exits(*LOAD, "--isl", "300,700", "--osl", "20", "--json", "-o", folder) == 0
    document = json.loads(capsys.readouterr().out)
    assert {level["isl"] for level in document["levels"]} == {100, 300, 700}
    assert (folder / "isl300-osl20-c4" / "summary.json").stat().st_mtime_ns == modified_ns
    assert exits(*LOAD, "--isl", "300,700", "--osl", "20", "--slo", "ttft:1s", "-o", folder) == 2


@pytest.mark.commands
def test_a_report_names_the_load_points_that_have_not_run_and_the_command_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"

    assert exits(*LOAD, *LENGTHS, "-o", folder) == 0

    shutil.rmtree(folder / "isl300-osl20-c4")
    shutil.rmtree(folder / "isl100-osl20-c4")
    resume_command = shlex.join(["loadgen", *LOAD, *LENGTHS, "-o", str(folder)])
    curve = sweep_kind.load(folder).curve

    assert (
        curve.not_run == ("isl100-osl20-c4", "isl300-osl20-c4") and curve.resume == resume_command
    )
    text = as_text.render(sweep_report.sweep_report(curve))
    assert "2 of 4 load points" in text and resume_command in text
    capsys.readouterr()
    assert exits(*shlex.split(resume_command)[1:], "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["not_run"] == []
    assert "isl100-osl20-c4: 1 of 2" in err and "isl300-osl20-c4: 2 of 2" in err


@pytest.mark.commands
def test_several_targets_are_load_points_of_one_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = tuple(word for word in LOAD if word not in ("--url", "sim:gb300-vm"))
    targets = ("--target", "sim:gb300-vm,sim:h100x8", "--isl", "100")

    assert exits(*load, *targets, "--json", "-o", tmp_path / "s") == 0
    document = json.loads(capsys.readouterr().out)
    assert [group["target"] for group in document["groups"]] == ["sim:gb300-vm", "sim:h100x8"]
    assert (tmp_path / "s" / "isl100-sim-h100x8-c4").is_dir()
    assert "gb300-vm" in document["target"] and "h100x8" in document["target"]
    assert sweep_kind.list_row(tmp_path / "s").simulated
    assert exits("compare", tmp_path / "s", tmp_path / "s") == 2


@pytest.mark.commands
def test_a_sweep_over_lengths_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(*LOAD, *LENGTHS, "--repeat", "2", "--json", "-o", tmp_path / "s") == 0
    by_point = json.loads(capsys.readouterr().out)["levels"]
    assert by_point["isl300-osl20-c4"]["runs"] == ["r1/isl300-osl20-c4", "r2/isl300-osl20-c4"]
    assert exits("report", tmp_path / "s") == 0


@pytest.mark.commands
def test_a_bundle_of_a_sweep_over_lengths_is_verified(tmp_path: Path) -> None:
    assert exits(*LOAD, *LENGTHS, "-o", tmp_path / "s") == 0
    assert exits("bundle", tmp_path / "s", "-o", tmp_path / "s.zip") == 0
    assert exits("verify", tmp_path / "s.zip") == 0


@pytest.mark.commands
def test_a_dry_run_of_a_sweep_states_the_time_and_the_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    price = (
        "{provider: P, model: m, per_million_input: 1, per_million_output: 2, "
        "source: x, as_of: 2026-01-01}"
    )
    prices.write_text("currency: USD\nper_token:\n  - " + price)
    load = ("sweep", "qa", "--url", "http://127.0.0.1:9", "-m", "m", "--request-rate", "1,2")
    lengths = ("-d", "30s", "--isl", "100,200", "--osl", "10", "--prices", prices)

    assert exits(*load, *lengths, "--dry-run") == 0
    assert "all 4 runs: about" in capsys.readouterr().out
    assert exits(*load, *lengths, "--max-cost", "0.00001") == 2


@pytest.mark.commands
@pytest.mark.parametrize(
    "flags",
    [
        ("--isl", "5,x", "--url", "sim:h100x8"),
        ("--target", "a,a"),
        ("--target", "sim:h100x8", "--url", "sim:h100x8"),
    ],
)
def test_invalid_lengths_and_targets_of_a_sweep_are_refused(flags: tuple[str, ...]) -> None:
    assert exits("sweep", "qa", "-c", "1,2", *flags) == 2


# -- sweeps that were stopped ----------------------------------------------------------------------

PRICES = """currency: USD
rented:
  - {provider: x, shape: eight, gpu: H100, gpus: 8, per_gpu_hour: 2, as_of: 2026-01, source: y}
"""
WITH_SLO = (
    *("sweep", "qa", "--url", "sim:h100x8", "--slo", "ttft:60s", "--gpus", "8"),
    *("--shape", "eight", "--warmup", "0", "-n", "60", "--request-rate", "1,2,4"),
)


def remove_runs(folder: Path, *names: str) -> None:
    """Leave a sweep as one that was killed before these load points ended."""
    for name in names:
        shutil.rmtree(folder / name)
    trials = experiment.read_results(folder)
    (folder / experiment.TRIALS_FILE).unlink()
    for trial in trials:
        experiment.append_result(folder, trial)
    (folder / "SHA256SUMS").unlink()


@pytest.mark.commands
def test_cost_and_size_refuse_a_stopped_sweep_with_the_command_that_resumes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They called its load points "no repeats of each other"."""
    folder, prices = tmp_path / "s", tmp_path / "prices.yaml"
    prices.write_text(PRICES)

    assert exits(*WITH_SLO, "-o", folder) == 0

    remove_runs(folder, "r4")
    (folder / capacity.CAPACITY_FILE).unlink()
    findings = stored_sweep.analyze_runs(folder, [folder / "r1", folder / "r2"])
    files = capacity_files.render_outputs(stored_sweep.as_outcome(folder, findings))
    stored = capacity.load_capacity(files[capacity.CAPACITY_FILE])

    assert (stored.state, stored.rate_per_s, stored.lower_bound) == ("stopped", 2.0, True)

    (folder / capacity.CAPACITY_FILE).write_bytes(capacity.dump_capacity(stored))
    resume_command = shlex.join(["loadgen", *WITH_SLO, "-o", str(folder)])
    capsys.readouterr()

    for command in (
        ("cost", folder, "--prices", prices),
        ("size", "qa", folder, "--users", "100", "-o", tmp_path / "sized"),
    ):
        assert exits(*command) == 3
        assert resume_command in capsys.readouterr().err
    assert exits("cost", folder, "--prices", prices, "--allow-invalid") == 0
    assert exits(*shlex.split(resume_command)[1:]) == 0
    assert capacity.load_capacity((folder / capacity.CAPACITY_FILE).read_bytes()).state == "held"


@pytest.mark.processes
def test_a_killed_sweep_states_a_bound_and_the_command_that_resumes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prices, over = tmp_path / "s", tmp_path / "prices.yaml", threading.Event()
    prices.write_text(PRICES)
    load = (*WITH_SLO[:-1], "1,2,4,8,16,32,64", "-o", str(folder))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "loadgen", *load],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (folder / capacity.CAPACITY_FILE).is_file():
        assert process.poll() is None, "the sweep ended before it was killed"
        over.wait(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    stored = capacity.load_capacity((folder / capacity.CAPACITY_FILE).read_bytes())

    assert stored.state == "stopped" and stored.lower_bound and stored.rate_per_s >= 1
    assert stored.resume_command == shlex.join(["loadgen", *load])
    assert exits("cost", folder, "--prices", prices) == 3
    assert stored.resume_command in capsys.readouterr().err


@pytest.mark.commands
def test_a_sweep_stopped_in_its_first_load_point_has_the_state_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prices = tmp_path / "s", tmp_path / "prices.yaml"
    prices.write_text(PRICES)
    assert exits(*WITH_SLO, "-o", folder) == 0
    remove_runs(folder, "r1", "r2", "r4")
    (folder / capacity.CAPACITY_FILE).unlink()
    capsys.readouterr()
    assert exits("cost", folder, "--prices", prices) == 3
    assert shlex.join(["loadgen", *WITH_SLO, "-o", str(folder)]) in capsys.readouterr().err


@pytest.mark.commands
def test_cost_states_why_a_sweep_has_no_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES)
    assert exits(*LOAD, *LENGTHS, "-o", tmp_path / "lengths") == 0
    capsys.readouterr()
    assert exits("cost", tmp_path / "lengths", "--prices", prices) == 2
    assert "several lengths" in capsys.readouterr().err
