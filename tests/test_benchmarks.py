"""Tests of the scripts in benchmarks/.

Each script starts and has a short form, and documents name the script and date of their figures. CI
runs the short forms (.ci/benchmarks).
"""

from __future__ import annotations

import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

from loadgen.contracts.loading import load_contract
from loadgen.sim.server.send_log import SendLog

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
# what scripts share
PARTS = {
    "beside_programs",
    "contenders",
    "drawn",
    "endpoints_block_checker",
    "endpoints_detector",
    "gpu/engines",
    "gpu/page",
    "openai_client",
    "ours",
    "rig",
    "scale_load",
    "scale_ray",
    "scale_records",
    "sdk_instructions",
    "sdk_throttles",
    "sdk_work",
    "thread_usage",
    "tree",
    "trust_comparison",
    "trust_growth",
    "trust_search",
    "trust_servers",
    "trust_tables",
    "trust_validation",
}
SCRIPTS = {str(file.relative_to(FOLDER).with_suffix("")) for file in FOLDER.rglob("*.py")} - PARTS
SEEN = re.compile(r"\b(?:[0-9a-f]{7,12}|\d+\.\d+\.\d+)\+?, 20\d\d-\d\d-\d\d\b")
# pages that only say what a script does
WITHOUT_FIGURES = {
    "summary.md": {"causes"},
}
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(set(FOLDER.glob("*.md")) - {FOLDER / "README.md"}),
    *sorted(ROOT.glob("results/*/*.md")),
]


@pytest.mark.parametrize("part", sorted(PARTS))
def test_only_executable_benchmarks_define_main(part: str) -> None:
    # .ci/benchmarks runs every file that defines main, with --smoke.
    source = (FOLDER / f"{part}.py").read_text(encoding="utf-8")
    assert "\ndef main(" not in source


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_every_benchmark_runs_with_its_smoke_option(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend((FOLDER / script).parent)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as exc_info:
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    assert exc_info.value.code == 0
    stdout = capsys.readouterr().out
    assert "--smoke" in stdout and f"benchmarks/{script}.py" in stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_published_numbers_state_their_commit_and_date(page: Path) -> None:
    """A paragraph or table row that names a script and has figures also gives their date."""
    for block in re.split(r"\n\n|\n(?=\|)", page.read_text("utf-8")):
        # Not the scripts of vLLM, which has a folder of this name.
        named = set(re.findall(r"(?<!vllm/)benchmarks/([\w/]+)\.py", block))
        assert named <= SCRIPTS, f"{page.name} names what is not in benchmarks/: {named - SCRIPTS}"
        bare = set(re.findall(r"`(?:python )?([\w/]+)\.py", block)) & SCRIPTS
        assert not bare, f"{page.name} names scripts without their folder: {bare}"
        if named - WITHOUT_FIGURES.get(page.name, set()) and not block.startswith("    "):
            assert SEEN.search(block), (
                f"{page.name}: no tree and day (`rig.py` prints both): {block}"
            )


def test_the_table_of_benchmarks_has_every_script() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([\w/]+)\.py`", text, re.MULTILINE)) == SCRIPTS
    assert {name for name in PARTS if f"`{name}.py`" in text} == PARTS


def test_growth_of_a_run_without_a_reading_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The short forms run on busy hosts, where a sampling thread may miss its turn."""
    monkeypatch.syspath_prepend(FOLDER)
    lag, rivals, scale_ray, soak = map(import_module, ("lag", "rivals", "scale_ray", "soak"))

    assert scale_ray.RayCpuMeter().format_core_fractions() == ["not sampled"] * 2
    assert lag.format_quantiles([], 1e6) == "-"
    assert rivals.read_truth(SendLog("all").drain())[4:] == (0, 0)

    nothing = {
        "requests": dict.fromkeys(("ok", "scheduled", "unfinished", "cancelled"), 0),
        "verdict": {},
    }

    assert soak.judge_soak([soak.Sample(0.0, {}, 0)], nothing, "")


@pytest.mark.processes  # git, for the tree that the page names
def test_the_rehearsal_page_counts_only_load_runs_as_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a search leaves has output tokens per second too, and no share of cached ones."""
    for folder in ("benchmarks", "benchmarks/gpu"):
        monkeypatch.syspath_prepend(ROOT / folder)
    search = {
        "output_tokens_per_s": 0.0,
        "state": "none",
        "confirmed": False,
        "bound_why": "it was stopped",
    }
    text = import_module("page").format_page({"machine": {}, "engine": {}, "search": search})

    assert "Search: none, confirmed: False" in text and "| search |" not in text


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7, 1.3, 40])
def test_the_rehearsal_contract_can_be_decided_at_any_engine_speed(
    rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("benchmarks", "benchmarks/gpu"):
        monkeypatch.syspath_prepend(ROOT / folder)
    (tmp_path / "qa.yaml").write_text((ROOT / "workloads/qa.yaml").read_text())
    (tmp_path / "contract.yaml").write_text(
        import_module("rehearse").format_contract(rate, 8, 8824.2, 513.3)
    )

    assert load_contract(
        tmp_path / "contract.yaml", env={}
    )  # raises where too few requests are planned
