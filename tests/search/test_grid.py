"""Grids of sweeps: their cells, the folder that is taken up again, heat maps, the front over targets, the command."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest
from command_line import exits

from loadgen.core.errors import UserError
from loadgen.present import html as as_page
from loadgen.present import text as as_text
from loadgen.runs.levels import SweepCurve, SweepLevel
from loadgen.search import grid, grid_kind, grid_text, sweep_run
from loadgen.search.grid import CellCurve, GridCell, GridResult

LOAD = (
    "sweep",
    "qa",
    "--url",
    "sim:gb300-vm",
    "-c",
    "1,4",
    "-n",
    "40",
    "--gpus",
    "4",
    "--warmup",
    "0",
)


def test_cells_are_every_pair_for_every_target() -> None:
    found = grid.cells("1000, 500", "100,200", ["a", "http://b:8000/v1"])
    lengths = ["isl500-osl100-a", "isl500-osl200-a", "isl1000-osl100-a", "isl1000-osl200-a"]
    assert [cell.name for cell in found[:4]] == lengths
    assert (
        found[-1].name == "isl1000-osl200-http-b-8000-v1"
        and found[-1].words == "ISL 1,000, OSL 200, http://b:8000/v1"
    )
    assert grid.cells(None, "7", ()) == [GridCell(osl=7)]
    assert grid.cells(None, None, ())[0].name == ""


@pytest.mark.parametrize("text", ["", "0", "1,", "1,1", "a", "1,-2", "1e3", "٣"])
def test_what_are_no_lengths(text: str) -> None:
    with pytest.raises(UserError, match=r"no number of tokens|each length once"):
        grid.cells(text, None, ())


def cell(
    isl: int, target: str, *points: tuple[float, float, bool | None], slo: str = ""
) -> CellCurve:
    """A cell with a level for each (output tokens/s, tokens/s per user, whether the SLO was met)."""
    made = tuple(
        SweepLevel(
            name=f"c{2**i}",
            load=f"{2**i} in flight",
            amount=2.0**i,
            ok=99,
            failed=0,
            requests_per_s=1.0,
            output_per_s=output,
            per_gpu=None,
            per_user=per_user,
            ttft_p50=1.0,
            ttft_p99=2.0,
            tpot_p50=1.0,
            tpot_p99=2.0,
            e2e_p50=9.0,
            unsupported=(),
            goodput=None,
            slo_met=met,
            valid=True,
            state="finished",
            simulated=False,
        )
        for i, (output, per_user, met) in enumerate(points)
    )
    best = [level.name for level in made if level.slo_met]
    curve = SweepCurve(
        workload="w",
        model="m",
        target=target,
        gpus=None,
        version="1",
        started="2026-01-01T00:00",
        slo=slo,
        levels=made,
        knee="",
        best=best[-1] if best else "",
    )
    named = GridCell(isl=isl, target=target)
    return CellCurve(cell=named, folder=named.name, curve=curve)


def test_a_level_of_one_target_may_be_beaten_by_another() -> None:
    a, b, c = (
        cell(500, "a", (10, 50, None), (40, 20, None)),
        cell(500, "b", (20, 60, None)),
        cell(900, "a", (1, 1, None)),
    )
    assert grid._front(a, [a, b, c]) == ("c2",), "c1 is slower and smaller than the one of b"
    assert grid._front(b, [a, b, c]) == ("c1",) and grid._front(c, [a, b, c]) == ("c1",)


def test_a_heat_map_is_of_the_highest_level_within_the_slo() -> None:
    slo = "TTFT p95 at most 1 s"
    cells = (
        cell(500, "", (10, 50, True), (40, 20, False), slo=slo),
        cell(900, "", (5, 9, True), slo=slo),
        cell(2000, "", (7, 9, False), slo=slo),
    )
    said = grid_text.report(GridResult(workload="w", cells=cells, missing=("isl4000",)))
    lines = as_text.render(said).splitlines()
    assert f"Most output tokens/s within the SLO ({slo}): ISL 500, 1 in flight: 10.0." in lines
    assert "No level kept the SLO at ISL 2,000." in lines
    assert "1 of 4 cells have no run yet." in lines
    at = lines.index("Output tokens/s")
    cells_shown = [line.split()[1:] for line in lines[at + 2 : at + 5]]
    assert cells_shown == [["500", "10.0"], ["900", "5.00"], ["2,000", "-"]]
    page = as_page.render(said)
    shades = re.findall(
        r"<td[^>]* style=\"background:color-mix\(in srgb,var\(--c3\) (\d+)%,[a-z]+\)\">([^<]+)</td>",
        page,
    )
    assert (
        ("60", "10.0") in shades
        and ("30", "5.00") in shades
        and all(text != "-" for _, text in shades)
    )


@pytest.mark.commands
def test_the_command_makes_a_grid_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "grid"
    assert exits(*LOAD, "--isl", "100,300", "--osl", "20", "--json", "-o", folder) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    steps = re.findall(r"level (c\d+: \d of \d)", printed.err)
    assert steps == ["c1: 1 of 4", "c4: 2 of 4", "c1: 3 of 4", "c4: 4 of 4"], (
        "of all cells: so is the time that is left"
    )
    names = [one["folder"] for one in made["cells"]]
    assert names == ["isl100-osl20", "isl300-osl20"]
    headers = [json.loads(path.read_bytes()) for path in folder.glob("*/*/run.json")]
    assert len({run["seed"] for run in headers}) == 1, "one seed for all, printed"
    assert len({run["salt"] for run in headers}) == 4, "texts of its own for each"
    level = made["cells"][0]["curve"]["levels"][1]
    assert level["total_per_gpu"] == pytest.approx(level["per_gpu"] * 120 / 20, rel=0.01)
    stamp = (folder / "isl300-osl20" / "c4" / "summary.json").stat().st_mtime_ns

    assert exits(*LOAD, "--isl", "300,700", "--osl", "20", "-o", folder) == 0
    out, err = capsys.readouterr()
    assert "going on with" in err and "2 of 2 levels are done" in err
    assert (folder / "isl300-osl20" / "c4" / "summary.json").stat().st_mtime_ns == stamp
    assert [cell.name for cell in grid.read(folder).cells] == [*names, "isl700-osl20"]
    assert "ISL 700" in out and "ISL 100" in out, "what an earlier command made stays in it"
    assert exits("report", folder, "--markdown") == 0
    assert capsys.readouterr().out == (folder / "grid.md").read_text()
    plan = (folder / "grid.json").read_text()
    (folder / "grid.json").write_text(plan.replace('"sim:gb300-vm"', '"http://h:1"', 1))
    assert grid_kind.list_row(folder).simulated, "as its runs say, whatever the URL"
    (folder / "grid.json").write_text(plan)

    assert exits(*LOAD, "--isl", "300,700", "--osl", "20", "--slo", "ttft:1s", "-o", folder) == 2
    assert "with other flags (slo: none there" in capsys.readouterr().err


@pytest.mark.commands
def test_a_grid_that_is_not_whole_says_what_is_left_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A level that was killed or never began was said nowhere, where its cell had another."""
    folder = tmp_path / "grid"
    assert exits(*LOAD, "--isl", "100,300", "--osl", "20", "-o", folder) == 0
    assert "not run yet" not in capsys.readouterr().out
    shutil.rmtree(folder / "isl300-osl20" / "c4")
    shutil.rmtree(folder / "isl100-osl20" / "c4")
    again = f"loadgen {shlex.join([*LOAD, '--isl', '100,300', '--osl', '20', '-o', str(folder)])}"
    exits("report", folder)
    said = capsys.readouterr().out
    assert "2 levels of the grid have not run yet." in said and again in said
    assert again in html.unescape((folder / "report.html").read_text("utf-8"))
    exits("report", folder, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["left"], found["go_on"], found["missing"]) == (2, again, [])
    assert exits(*shlex.split(again)[1:], "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["left"] == 0 and re.findall(r"level (c\d+: \d of \d)", err) == [
        "c4: 1 of 2",
        "c4: 2 of 2",
    ]


@pytest.mark.commands
def test_targets_are_an_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = tuple(word for word in LOAD if word not in ("--url", "sim:gb300-vm"))
    assert (
        exits(*load, "--target", "sim:gb300-vm,sim:h100x8", "--isl", "100", "-o", tmp_path / "g")
        == 0
    )
    out, _ = capsys.readouterr()
    assert "isl100-sim-h100x8" in {path.name for path in (tmp_path / "g").iterdir()}
    assert (
        "Output tokens/s per GPU of sim:h100x8" in out
        and "Output tokens/s per GPU of sim:gb300-vm" in out
    )
    assert grid_kind.list_row(tmp_path / "g").simulated  # it looked at the target that no axis has
    assert "simulated: gb300-vm, simulated: h100x8" in " ".join(out.split()), (
        "the head named the first alone"
    )
    assert exits("compare", tmp_path / "g", tmp_path / "g") == 2
    assert "name its runs, like" in capsys.readouterr().err


def test_a_cell_without_a_valid_level_is_not_one_that_missed_the_slo() -> None:
    one, other = cell(500, "", (10, 50, False), slo="s"), cell(900, "", (10, 50, None), slo="s")
    invalid = msgspec.structs.replace(other.curve.levels[0], valid=False)
    other = msgspec.structs.replace(
        other, curve=msgspec.structs.replace(other.curve, levels=(invalid,))
    )
    said = " ".join(grid_text.sentences(GridResult(workload="w", cells=(one, other))))
    assert said == "No level kept the SLO at ISL 500. No level is a valid measurement at ISL 900."
    undecided = cell(700, "", (10, 50, None), slo="s")
    said = " ".join(grid_text.sentences(GridResult(workload="w", cells=(one, undecided))))
    assert said == "No level kept the SLO at ISL 500. No level decides the SLO at ISL 700."


@pytest.mark.commands
def test_the_plan_is_told_before_with_time_and_money(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    price = "{provider: P, model: m, per_million_input: 1, per_million_output: 2, source: x, as_of: 2026-01-01}"
    prices.write_text("currency: USD\nper_token:\n  - " + price)
    asked = (
        "sweep",
        "qa",
        "--url",
        "http://127.0.0.1:9",
        "-m",
        "m",
        "--request-rate",
        "1,2",
        "-d",
        "30s",
    )
    assert exits(*asked, "--isl", "100,200", "--osl", "10", "--dry-run", "--prices", prices) == 0
    assert "cost of all 4 runs: about" in capsys.readouterr().out
    assert (
        exits(
            *asked, "--isl", "100,200", "--osl", "10", "--prices", prices, "--max-cost", "0.00001"
        )
        == 2
    )
    assert "these 4 runs" in capsys.readouterr().err


@pytest.mark.commands
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--isl", "5,x"), "no number of tokens"),
        (("--isl", "5,6", "--repeat", "2"), "a grid of sweeps is not repeated"),
        (("--target", "a,a"), "each target once"),
        (("--target", "sim:h100x8", "--url", "sim:h100x8"), "exclude each other"),
    ],
)
def test_wrong_usage(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = () if "--target" in flags else ("--url", "sim:gb300-vm")
    assert exits("sweep", "qa", "-c", "1,2", *target, *flags) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("valid", "met", "strict", "code"),
    [
        ((True, False), (False, None), False, 0),
        ((False, False), (True, True), False, 3),
        ((True, True), (True, None), True, 3),
    ],
)
def test_a_folder_that_is_read_exits_as_its_sweep_did(
    valid: tuple[bool, ...], met: tuple[bool | None, ...], strict: bool, code: int
) -> None:
    """A missed SLO is what a sweep looks for, and one level that is not valid spoils no other."""
    one = cell(100, "a", (1.0, 9.0, True), (2.0, 8.0, True))
    levels = tuple(
        msgspec.structs.replace(level, valid=sound, slo_met=kept, slo_undecided=kept is None)
        for level, sound, kept in zip(one.curve.levels, valid, met, strict=True)
    )
    curve = msgspec.structs.replace(one.curve, levels=levels)
    found = GridResult(workload="w", cells=(msgspec.structs.replace(one, curve=curve),))
    assert (
        sweep_run.code(curve, interrupted=False, strict=strict)
        == grid_kind.code(found, strict)
        == code
    )
