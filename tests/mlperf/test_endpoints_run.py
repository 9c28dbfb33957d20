"""Running a curve of MLPerf Endpoints, its stored result, its checks and its package."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import pytest
import yaml
from msgspec.structs import replace

from loadgen.bundle.bundle_writer import write_bundle
from loadgen.bundle.verification import verify_bundle
from loadgen.cli.app import run_command_line
from loadgen.core.errors import OK, SLO_MISSED, UNSOUND, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.results import store
from loadgen.mlperf.endpoints import kind
from loadgen.mlperf.endpoints.curve_result import (
    CurveResult,
    PointResult,
    read_curve,
    read_result,
)
from loadgen.mlperf.endpoints.curve_run import CurveRun, measure_curve, run_curve, write_result
from loadgen.mlperf.endpoints.reference_config import create_reference_config
from loadgen.mlperf.endpoints.rule_checks import RuleCheck, check_curve
from loadgen.mlperf.endpoints.submission_package import write_package
from loadgen.mlperf.endpoints.workloads import CurveData
from loadgen.runs.run_display import RunDisplay
from loadgen.ui.results_list import results_in

SYSTEM_FILE = Path(__file__).parent.parent.parent / "docs" / "system.example.yaml"
STATED_FACTS = ("dataset_link=https://example.org/data", "power_source=https://example.org/power")
SAMPLES = 200
CONCURRENCIES = (2, 4, 6, 8, 12, 20, 40)
NAMES = [f"r{concurrency}" for concurrency in CONCURRENCIES]


def run_arguments(folder: Path, out: Path) -> list[str]:
    """Return the command line of a small curve on a simulated server."""
    command = "mlperf endpoints run -b llama3.1-8b --offline elected --url sim:gb300-vm"
    concurrencies = ",".join(map(str, CONCURRENCIES))
    dataset = folder / "articles.jsonl"
    options = ["--concurrency", concurrencies, "--dataset", str(dataset), "--out", str(out)]
    options += ["--system", str(SYSTEM_FILE), "--power-kw", "8", "--progress", "off"]
    for fact in STATED_FACTS:
        options += ["--metadata", fact]
    return [*command.split(), *options]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a data set of short articles and a curve that was run with it."""
    root = tmp_path_factory.mktemp("endpoints")
    rows = [{"prompt": f"Summarize article {number}: " + "word " * 80} for number in range(SAMPLES)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "articles.jsonl").write_text(text, "utf-8")
    assert run_command_line(run_arguments(root, root / "curve")) == OK
    return root


@pytest.fixture
def result(folder: Path) -> CurveResult:
    return read_result(folder / "curve")


def find_check(result: CurveResult, section: str, part: str) -> RuleCheck:
    """Return the only check of a section whose rule contains a text."""
    checks = [
        check
        for check in check_curve(result).checks
        if check.section == section and part in check.rule
    ]
    assert len(checks) == 1
    return checks[0]


def test_every_point_is_measured_in_a_steady_window(result: CurveResult) -> None:
    assert [point.point.name for point in result.points] == NAMES
    assert all(point.has_official_window for point in result.points)
    # With so few samples, a pass has a noisy p90, in which the detector may see a drift.
    assert {point.verdict for point in result.points} <= {"steady", "drifting down"}
    assert all(point.issued % SAMPLES == 0 for point in result.points)
    assert all(point.issued == point.completed for point in result.points)


def test_throughput_grows_and_speed_per_user_falls_with_concurrency(result: CurveResult) -> None:
    throughputs = [point.metrics.system_tps for point in result.points]
    speeds = [point.metrics.tps_per_user or 0 for point in result.points]
    assert throughputs == sorted(throughputs)
    assert speeds == sorted(speeds, reverse=True)
    assert result.tps_per_kw(result.points[-1]) == pytest.approx(throughputs[-1] / 8)


def test_metrics_of_a_complete_run_equal_those_computed_independently(
    folder: Path, result: CurveResult
) -> None:
    point = result.points[3]
    rows = store.read_run(folder / "curve" / point.point.name).rows
    ttft_ms = np.sort((rows["first_token_ns"] - rows["due_ns"]) / 1e6)
    assert point.total.ttft_p90_ms == pytest.approx(ttft_ms[int(0.9 * (len(ttft_ms) - 1))])
    assert point.total.output_tokens == rows["output_tokens"].sum()
    duration_s = (rows["end_ns"].max() - rows["due_ns"].min()) / 1e9
    assert point.total.duration_s == pytest.approx(duration_s)
    tpot_ms = np.sort((rows["end_ns"] - rows["first_token_ns"]) / (rows["output_tokens"] - 1) / 1e6)
    expected_tpot_ms = tpot_ms[int(0.9 * (len(tpot_ms) - 1))]
    assert point.total.tps_per_user == pytest.approx(1000 / expected_tpot_ms, rel=0.05)


def test_a_window_throughput_equals_that_of_the_complete_run(result: CurveResult) -> None:
    for point in result.points:
        assert point.window is not None
        assert point.window.system_tps == pytest.approx(point.total.system_tps, rel=0.05)


def test_a_repeated_command_runs_only_the_missing_points(folder: Path, tmp_path: Path) -> None:
    curve = tmp_path / "curve"
    shutil.copytree(folder / "curve", curve)
    expected = (curve / "endpoints.json").read_bytes()
    times = {name: (curve / name / "summary.json").stat().st_mtime_ns for name in NAMES}
    shutil.rmtree(curve / "r40")
    (curve / "endpoints.json").unlink()
    assert run_command_line(run_arguments(folder, curve)) == OK
    resumed = [
        name for name in NAMES if (curve / name / "summary.json").stat().st_mtime_ns != times[name]
    ]
    assert resumed == ["r40"]
    stored = json.loads((curve / "endpoints.json").read_bytes())
    earlier = json.loads(expected)
    assert stored["points"] == earlier["points"]


def mark_as_interrupted(run_dir: Path) -> None:
    """Change a finished run into one that the user has interrupted."""
    summary = json.loads((run_dir / "summary.json").read_bytes())
    summary["run"]["state"] = "interrupted"
    (run_dir / "summary.json").write_text(json.dumps(summary), "utf-8")


def keep_only_the_manifest(run_dir: Path) -> None:
    """Change a finished run into what SIGKILL leaves of one in virtual time."""
    manifest = (run_dir / "run.json").read_bytes()
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    (run_dir / "run.json").write_bytes(manifest)


@pytest.mark.parametrize("stop", [mark_as_interrupted, keep_only_the_manifest])
def test_a_stopped_or_killed_run_is_moved_to_unfinished_and_repeated(
    folder: Path, tmp_path: Path, stop: Callable[[Path], None]
) -> None:
    curve = tmp_path / "curve"
    shutil.copytree(folder / "curve", curve)
    (curve / "SHA256SUMS").unlink()
    stop(curve / "r2")
    write_result(curve, measure(curve))

    assert measure(curve).missing_points == ("r2",)
    assert run_command_line(["report", str(curve)]) == UNSOUND
    assert [result.name for result in results_in(tmp_path)] == ["curve"]

    assert run_command_line(run_arguments(folder, curve)) == OK
    (stopped,) = (curve / "unfinished").iterdir()
    assert stopped.name.startswith("r2-")
    assert (stopped / "run.json").is_file()
    repeated = read_result(curve)
    assert repeated.points == read_result(folder / "curve").points


def interrupt_run(*_: object, **__: object) -> NoReturn:
    """End a run as Ctrl-C does in virtual time."""
    raise KeyboardInterrupt


def test_an_interrupted_curve_stores_its_points_and_can_be_resumed(
    folder: Path, tmp_path: Path
) -> None:
    curve = tmp_path / "curve"
    shutil.copytree(folder / "curve", curve)
    (curve / "SHA256SUMS").unlink()
    shutil.rmtree(curve / "r20")
    shutil.rmtree(curve / "r40")
    data = CurveData(
        benchmark="llama3.1-8b", name="texts", size=SAMPLES, prompts=["text"] * SAMPLES
    )
    outcome = run_curve(
        CurveRun(
            curve=read_curve(curve),
            data=data,
            settings=Settings(url="sim:gb300-vm"),
            output_dir=curve,
            execute=interrupt_run,
            display=RunDisplay("off", quiet=True),
        )
    )
    assert outcome.is_interrupted
    assert outcome.result.missing_points == ("r20", "r40")
    assert read_result(curve) == outcome.result
    assert run_command_line(run_arguments(folder, curve)) == OK
    assert read_result(curve).points == read_result(folder / "curve").points


def test_commands_of_a_curve_refuse_an_empty_folder(tmp_path: Path) -> None:
    for command in ("report", "mlperf endpoints check", f"bundle -o {tmp_path / 'curve.zip'}"):
        with pytest.raises(UserError):
            run_command_line([*command.split(), str(tmp_path)])
    assert results_in(tmp_path) == []


def measure(curve: Path) -> CurveResult:
    return measure_curve(curve, read_curve(curve))


def test_a_curve_with_other_options_is_refused_in_the_same_folder(folder: Path) -> None:
    arguments = [*run_arguments(folder, folder / "curve"), "--power-kw", "9"]
    with pytest.raises(UserError) as error:
        run_command_line(arguments)
    assert error.value.code == "mismatch"


def test_the_power_is_that_of_the_system_file_unless_the_option_replaces_it(
    folder: Path, result: CurveResult, tmp_path: Path
) -> None:
    assert "provisioned_kw: 10.2" in SYSTEM_FILE.read_text()
    assert result.curve.provisioned_power_kw == 8

    # A curve that was begun with the power of the system file resumes without the option.
    curve = tmp_path / "curve"
    shutil.copytree(folder / "curve", curve)
    stored = json.loads((curve / "endpoints_curve.json").read_bytes())
    stored["provisioned_power_kw"] = 10.2
    (curve / "endpoints_curve.json").write_text(json.dumps(stored))
    arguments = run_arguments(folder, curve)
    option = arguments.index("--power-kw")
    del arguments[option : option + 2]

    assert run_command_line(arguments) == OK
    assert read_result(curve).curve.provisioned_power_kw == 10.2


def test_a_curve_without_a_result_has_only_missing_points(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "curve" / "endpoints_curve.json", tmp_path)
    loaded = kind.load(tmp_path)
    assert list(loaded.missing_points) == NAMES
    assert run_command_line(["report", str(tmp_path)]) == UNSOUND
    outcomes = {check.outcome for check in check_curve(loaded).checks}
    assert "missed" in outcomes
    assert find_check(loaded, "2.9.5.1", "salt").outcome == "not checkable"
    with pytest.raises(UserError) as error:
        write_package(tmp_path / "package", loaded)
    assert error.value.code == "no_figure"


@pytest.mark.parametrize(
    ("name", "command"),
    [("endpoints_curve.json", "mlperf endpoints check"), ("endpoints.json", "report")],
)
def test_a_damaged_file_of_a_curve_is_refused(
    folder: Path, tmp_path: Path, name: str, command: str
) -> None:
    curve = tmp_path / "curve"
    shutil.copytree(folder / "curve", curve)
    content = (curve / name).read_bytes()
    (curve / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError) as error:
        run_command_line([*command.split(), str(curve)])
    assert error.value.code == "damaged_file"


def test_report_and_list_include_the_curve(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = str(folder / "curve")
    assert run_command_line(["report", curve]) == OK
    assert "unofficial" in capsys.readouterr().out
    assert run_command_line(["report", curve, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["curve"]["benchmark"] == "llama3.1-8b"
    row = kind.list_row(folder / "curve")
    assert row.simulated
    assert [run.name for run in row.runs] == NAMES


def test_derived_files_of_a_curve_are_reproduced_from_the_records(folder: Path) -> None:
    for file in kind.regenerate(folder / "curve"):
        assert file.data == (folder / "curve" / file.name).read_bytes()


@pytest.mark.parametrize("with_texts", [False, True])
def test_a_bundle_of_a_curve_is_verified_and_has_prompts_only_on_request(
    folder: Path, tmp_path: Path, with_texts: bool
) -> None:
    bundle = tmp_path / "curve.zip"
    manifest = write_bundle(folder / "curve", bundle, with_texts=with_texts)
    requests = {f"endpoints_requests_{name}.jsonl" for name in NAMES}
    assert set(manifest.omitted_files) == (set() if with_texts else requests)
    with zipfile.ZipFile(bundle) as archive:
        has_prompts = [b"Summarize article" in archive.read(name) for name in archive.namelist()]
    assert any(has_prompts) is with_texts

    verification = verify_bundle(bundle)
    assert (verification.verified, verification.skipped) == ("all", {})
    expected = {"endpoints.json", "report.html", *(f"{name}/summary.json" for name in NAMES)}
    assert {file.file for file in verification.reproduced} == expected


def test_a_forged_throughput_of_a_curve_is_not_verified(folder: Path, tmp_path: Path) -> None:
    curve = tmp_path / "curve"
    shutil.copytree(folder / "curve", curve)
    document = json.loads((curve / "endpoints.json").read_bytes())
    document["points"][-1]["window"]["system_tps"] *= 2
    (curve / "endpoints.json").write_text(json.dumps(document), "utf-8")
    (curve / "SHA256SUMS").unlink()
    write_bundle(curve, tmp_path / "curve.zip")
    verification = verify_bundle(tmp_path / "curve.zip")
    assert verification.verified == "no"
    assert "points[6].window.system_tps" in {
        mismatch.location for mismatch in verification.differences
    }


def test_the_page_of_a_curve_is_marked_as_a_rehearsal_and_has_each_verdict(folder: Path) -> None:
    page = (folder / "curve" / "report.html").read_text("utf-8")
    assert "rehearsal, unofficial" in page
    assert "SIMULATED" in page
    assert page.count("steady window") >= len(NAMES)


def test_the_check_of_a_curve_reports_the_values_by_section(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["mlperf", "endpoints", "check", str(folder / "curve"), "--json"]) == (
        SLO_MISSED
    )
    check = json.loads(capsys.readouterr().out)
    outcomes = {(row["section"], row["rule"]): row["outcome"] for row in check["checks"]}
    assert outcomes["3.2", "the model is meta-llama/Llama-3.1-8B-Instruct"] == "flagged"
    assert [key for key, outcome in outcomes.items() if outcome == "missed"] == []
    assert sum(outcome == "rehearsal" for outcome in outcomes.values()) == 1
    assert "unofficial" in check["disclosure"]


def _with_point(result: CurveResult, change: Callable[[PointResult], PointResult]) -> CurveResult:
    """Return a result whose third point is changed."""
    points = list(result.points)
    points[2] = change(points[2])
    return replace(result, points=tuple(points))


CHANGES: list[tuple[str, str, str, Callable[[PointResult], PointResult]]] = [
    ("6.4", "complete passes", "flagged", lambda p: replace(p, issued=p.issued + 1)),
    ("6.4", "one pass", "flagged", lambda p: replace(p, completed=SAMPLES - 1)),
    ("9.1", "add up", "flagged", lambda p: replace(p, completed=p.completed - 1)),
    ("9.1", "no query failed", "flagged", lambda p: replace(p, failed=1)),
    ("9.1", "distort", "missed", lambda p: replace(p, measurement_errors=("late",))),
    ("6.1", "fixed", "missed", lambda p: replace(p, load=replace(p.load, concurrency=None))),
    ("6.5", "streamed", "flagged", lambda p: replace(p, load=replace(p.load, is_streaming=False))),
    ("2.1.1", "seed", "missed", lambda p: replace(p, load=replace(p.load, seed=42))),
    ("2.9.5.1", "salt", "missed", lambda p: replace(p, load=replace(p.load, salt=""))),
    ("6.3", "warm-up", "flagged", lambda p: replace(p, load=replace(p.load, has_warmup=True))),
    ("6.2", "window", "flagged", lambda p: replace(p, window=None)),
    ("4.4", "is the result", "flagged", lambda p: replace(p, window=None)),
    ("9.1", "same server", "flagged", lambda p: replace(p, load=replace(p.load, target="other"))),
]
"""Section and a part of a rule, the outcome after a change of a point, and the change."""


@pytest.mark.parametrize(("section", "rule", "outcome", "change"), CHANGES)
def test_a_point_that_misses_a_rule_changes_the_outcome_of_its_check(
    result: CurveResult,
    section: str,
    rule: str,
    outcome: str,
    change: Callable[[PointResult], PointResult],
) -> None:
    assert find_check(result, section, rule).outcome == "met"
    assert find_check(_with_point(result, change), section, rule).outcome == outcome


def test_the_checks_of_accuracy_name_the_points_and_the_scores(result: CurveResult) -> None:
    checks = [check for check in check_curve(result).checks if check.section == "4.3"]
    assert {check.outcome for check in checks} == {"not checkable"}
    values = [check.value for check in checks]
    mandatory = [point.point.name for point in result.points if point.point.is_mandatory]
    assert ", ".join(mandatory) in values[0]
    assert "r40: 40" in values[1]
    assert "rouge1 38.3914" in values[-1]


def test_missing_points_and_regions_are_reported_as_missed_rules(result: CurveResult) -> None:
    without_high = replace(result, points=result.points[:4])
    assert find_check(without_high, "5.3", "at least 7 points").outcome == "missed"
    assert find_check(without_high, "5.3", "High Concurrency").outcome == "missed"
    assert find_check(without_high, "5.7", "Offline").outcome == "missed"


def test_an_offline_run_must_reach_the_throughput_at_c_max(result: CurveResult) -> None:
    last = result.points[-1]
    point = replace(last.point, name="offline", offline="dedicated", concurrency=SAMPLES)
    slower = replace(last.total, system_tps=last.metrics.system_tps * 0.97)
    offline = replace(last, point=point, steady_state=None, window=None, total=slower)
    points = (*result.points[:-1], replace(last, point=replace(last.point, offline="none")))
    curve = replace(result.curve.curve, points=(*(p.point for p in points), point))
    changed = replace(result, curve=replace(result.curve, curve=curve), points=(*points, offline))
    assert find_check(changed, "5.7.2", "98%").outcome == "flagged"
    assert find_check(changed, "5.7.2", "concurrency").outcome == "met"
    assert find_check(changed, "5.3", "at least 8 points").outcome == "met"


def test_the_package_has_the_layout_of_the_reference_checker(
    folder: Path, result: CurveResult, tmp_path: Path
) -> None:
    command = ["mlperf", "endpoints", "check", str(folder / "curve"), "--package"]
    assert run_command_line([*command, str(tmp_path / "package")]) == SLO_MISSED
    (root,) = (tmp_path / "package").glob("*/*")
    (system,) = (root / "results").iterdir()
    for point in result.points:
        point_dir = system / "llama3_1-8b" / point.point.name
        content = yaml.safe_load((point_dir / "point.yaml").read_text("utf-8"))
        assert content["concurrency"] == point.point.concurrency
        assert (root / content["shared_src"] / "README.md").is_file()
        assert (root / content["shared_docs"]).is_dir()
        assert content["runtime_settings"]["runtime"]["sample_index_rng_seed"] == point.load.seed
        assert content["steady_state"]["status"] == "windowable"
        summary = json.loads((point_dir / "result_summary.json").read_bytes())
        tps = summary["output_sequence_lengths"]["total"] / (summary["duration_ns"] / 1e9)
        assert summary["system_tps"] == pytest.approx(tps)
        tpot_p90_ms = summary["tpot"]["percentiles"]["90.0"] / 1e6
        assert summary["tps_per_user"] == pytest.approx(1000 / tpot_p90_ms)
    for path in root.rglob("*"):
        if path.is_file():
            assert "REHEARSAL" in path.read_text("utf-8")

    with pytest.raises(UserError) as error:
        write_package(tmp_path / "package", result)
    assert error.value.code == "file_exists"


def write_files(result: CurveResult, package_dir: Path) -> Path:
    """Write the package of a curve, and return the directory of its system."""
    (system_dir,) = (write_package(package_dir, result) / "results").iterdir()
    return system_dir


def test_the_package_has_the_facts_of_a_system_file(result: CurveResult, tmp_path: Path) -> None:
    system_dir = write_files(result, tmp_path / "package")
    power = json.loads((system_dir / "system_power.json").read_bytes())
    assert power["cooling"] == "air"
    assert power["declared_provisioned_power"]["value_kw"] == 8
    assert power["node_sets"][0]["published_power"]["source"] == "https://example.org/power"
    assert power["scale_out"] == {"present": False}
    for point in result.points:
        point_dir = system_dir / "llama3_1-8b" / point.point.name
        disclosure = yaml.safe_load((point_dir / "point.yaml").read_text("utf-8"))
        assert disclosure["model_precision"] == "fp8"
        assert disclosure["dataset_link"] == "https://example.org/data"
        system = json.loads((point_dir / "system_desc.json").read_bytes())
        assert system["system_size"] == "8 accelerators"
        assert system["system_node_ensemble_total"] == 1
        (node,) = system["node_types"]
        assert (node["host_processors_per_node"], node["host_processor_core_count"]) == (2, 56)
        assert node["filesystem"] == "ext4"
        assert node["accelerator_info"][0]["accelerators_per_node"] == 8


def test_the_package_omits_facts_that_nobody_stated(result: CurveResult, tmp_path: Path) -> None:
    without_facts = replace(
        result,
        points=tuple(
            replace(point, load=replace(point.load, metadata={}, gpus=None))
            for point in result.points
        ),
    )
    system_dir = write_files(without_facts, tmp_path / "package")
    power = json.loads((system_dir / "system_power.json").read_bytes())
    assert power["provisioned_power_kw"] == 8
    assert not power.keys() & {"cooling", "declared_provisioned_power", "node_sets", "scale_out"}
    point_dir = system_dir / "llama3_1-8b" / "r2"
    assert yaml.safe_load((point_dir / "point.yaml").read_text("utf-8"))["dataset_link"] == ""
    system = json.loads((point_dir / "system_desc.json").read_bytes())
    assert not system.keys() & {"system_size", "node_types", "system_node_ensemble_total"}


def test_facts_can_be_stated_after_the_runs(folder: Path, tmp_path: Path) -> None:
    facts = tmp_path / "system.yaml"
    facts.write_text("nodes: 3\nhost: {filesystem: xfs}\n", "utf-8")
    package_dir = tmp_path / "package"
    command = ["mlperf", "endpoints", "check", str(folder / "curve"), "--package", str(package_dir)]
    command += ["--system", str(facts), "--metadata", "dataset_link=https://example.org/other"]
    assert run_command_line(command) == SLO_MISSED
    (point_dir,) = package_dir.glob("*/*/results/*/*/r2")
    disclosure = yaml.safe_load((point_dir / "point.yaml").read_text("utf-8"))
    assert disclosure["dataset_link"] == "https://example.org/other"
    system = json.loads((point_dir / "system_desc.json").read_bytes())
    assert system["system_node_ensemble_total"] == 3
    (node,) = system["node_types"]
    assert (node["filesystem"], node["host_processors_per_node"]) == ("xfs", 2)


def test_the_package_of_several_nodes_omits_the_power_of_their_network(
    result: CurveResult, tmp_path: Path
) -> None:
    first = result.points[0]
    metadata = {**first.load.metadata, "system.nodes": "2", "system.accelerator.cooling": "Water"}
    changed = replace(first, load=replace(first.load, metadata=metadata))
    system_dir = write_files(replace(result, points=(changed,)), tmp_path / "package")
    power = json.loads((system_dir / "system_power.json").read_bytes())
    assert power["cooling"] == "liquid"
    assert "scale_out" not in power
    assert power["node_sets"][0]["published_power"]["value_kw"] == 4


def test_the_package_has_a_configuration_of_the_reference_client_for_each_point(
    result: CurveResult, tmp_path: Path
) -> None:
    system_dir = write_files(result, tmp_path / "package")
    for point in result.points:
        path = system_dir / "llama3_1-8b" / point.point.name / "config.yaml"
        config = yaml.safe_load(path.read_text("utf-8"))
        pattern = {"type": "concurrency", "target_concurrency": point.point.concurrency}
        assert config["settings"]["load_pattern"] == pattern
        runtime = config["settings"]["runtime"]
        assert runtime["n_samples_to_issue"] == point.issued
        assert runtime["dataloader_random_seed"] == point.load.seed
        kinds = [dataset["type"] for dataset in config["datasets"]]
        assert kinds == ["performance", "accuracy"] if point.point.is_mandatory else ["performance"]


@pytest.mark.parametrize("name", ["llama3.1-8b", "gpt-oss-120b", "deepseek-r1"])
def test_a_configuration_of_the_reference_client_exists_where_an_example_is_published(
    result: CurveResult, name: str
) -> None:
    curve = replace(result.curve, benchmark=name, requests={"offline": 400})
    point = replace(result.points[0].point, name="offline", offline="dedicated")
    text = create_reference_config(curve, point)
    if name == "deepseek-r1":
        assert text is None
        return
    assert text is not None
    config = yaml.safe_load(text)
    assert config["type"] == "offline"
    assert config["settings"]["load_pattern"] == {"type": "max_throughput"}


def test_a_run_whose_pass_exceeds_the_limit_is_refused_before_it_starts(
    folder: Path, tmp_path: Path
) -> None:
    arguments = [*run_arguments(folder, tmp_path / "curve"), "--max-point-time", "10s"]
    with pytest.raises(UserError) as error:
        run_command_line(arguments)
    assert error.value.code == "out_of_range"
    assert not (tmp_path / "curve" / "r1").exists()


def test_every_prompt_of_the_request_file_has_a_different_salt(
    folder: Path, result: CurveResult
) -> None:
    lines = (folder / "curve" / "endpoints_requests_r2.jsonl").read_bytes().splitlines()
    prompts = [msgspec.json.decode(line)["prompt"] for line in lines]
    salts = [prompt[1:17] for prompt in prompts]
    assert len(prompts) == result.points[0].issued
    assert len(set(salts)) == len(salts)
    assert all(prompt.startswith("[") and prompt[17:19] == "] " for prompt in prompts)
