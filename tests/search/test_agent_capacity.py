"""Sessions per accelerator and per megawatt at a tier of output speed and TTFT."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from command_line import exits
from expected_errors import refused

from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.render import html, markdown
from loadgen.search import search_kind
from loadgen.search.agent_capacity import compute_agent_capacity, tier_objectives
from loadgen.sim.presets.preset import load_preset

SEARCH = (
    *("search", "agentic", "--url", "sim:gb300-vm", "--over", "sessions", "--tier", "10:10s"),
    *("--low", "2", "--high", "8", "-d", "20s", "--no-sustain", "--seed", "1"),
)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "system.yaml").write_text("gpus: 4\nprovisioned_kw: 8\n")
    exits(*SEARCH, "--system", str(folder / "system.yaml"), "-o", str(folder / "out"))
    return folder / "out"


def test_a_tier_limits_ttft_and_tpot() -> None:
    assert tier_objectives("20:10s") == ("ttft:10s:p95", "tpot:50.000000ms:p75")
    assert tier_objectives("180:3s") == ("ttft:3s:p95", "tpot:5.555556ms:p75")


@pytest.mark.parametrize("tier", ["20", "0:10s", "fast:10s", "20:10", "20:1.2.3s", "-20:10s"])
def test_an_invalid_tier_is_refused(tier: str) -> None:
    with refused(UserError, "invalid_value"):
        tier_objectives(tier)


@pytest.mark.commands
def test_a_search_divides_its_sessions_by_accelerators_and_power(searched: Path) -> None:
    agents = json.loads((searched / "search.json").read_bytes())["agents"]
    assert agents["sessions"] == 8
    assert (agents["accelerators"], agents["sessions_per_accelerator"]) == (4, 2)
    assert (agents["provisioned_kw"], agents["sessions_per_provisioned_mw"]) == (8, 1000)
    assert agents["measured_kw"] is None, "a simulated server has no sensors"
    assert agents["sessions_per_measured_mw"] is None


@pytest.mark.commands
def test_the_report_of_a_search_states_sessions_per_megawatt(searched: Path) -> None:
    opened = search_kind.load(searched)
    assert opened.unit == " sessions"
    report = search_kind.report(opened)
    assert "1,000" in markdown.render(report)
    assert "1,000" in html.render(report)


@pytest.mark.commands
def test_the_stored_agent_capacity_can_be_recomputed(searched: Path) -> None:
    files = {file.name: file for file in search_kind.regenerate(searched)}
    regenerated = json.loads(files["search.json"].data or b"")
    stored = json.loads((searched / "search.json").read_bytes())
    assert regenerated["agents"] == stored["agents"]


@pytest.mark.parametrize(
    ("preset_name", "provisioned_kw"),
    [("gb300-vm", 4 * 2.1), ("gb300-rack", 72 * 2.1), ("h100x8", 8 * 1.73), ("b200x8", 8 * 2.17)],
)
def test_a_preset_has_the_published_power_of_all_its_gpus(
    preset_name: str, provisioned_kw: float
) -> None:
    assert load_preset(preset_name).provisioned_kw == pytest.approx(provisioned_kw)


def test_the_power_of_a_preset_does_not_change_its_identity() -> None:
    preset = load_preset("gb300-vm")
    hardware = preset.hardware.model_copy(update={"provisioned_kw": None})
    without_power = preset.model_copy(update={"hardware": hardware})
    assert without_power.provisioned_kw is None
    assert without_power.identity == preset.identity


@pytest.mark.commands
def test_without_a_system_file_the_power_of_the_preset_is_used(tmp_path: Path) -> None:
    load = ("--high", "4", "--max-probes", "2")
    exits(*SEARCH, *load, "-o", tmp_path / "preset")
    agents = json.loads((tmp_path / "preset" / "search.json").read_bytes())["agents"]
    assert agents["provisioned_kw"] == pytest.approx(4 * 2.1)
    assert agents["sessions_per_provisioned_mw"] == pytest.approx(4 / 8.4 * 1000)


@pytest.mark.commands
def test_sessions_are_divided_by_measured_power_if_it_is_known(searched: Path) -> None:
    summary: Summary = search_kind.load(searched).runs[0].summary
    energy = EnergyUse(source="dcgm", watts=4_000.0)
    agents = compute_agent_capacity(10.0, msgspec.structs.replace(summary, energy=energy))
    assert (agents.measured_kw, agents.sessions_per_measured_mw) == (4, 2_500)
    assert compute_agent_capacity(None, None).sessions_per_accelerator is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("search", "qa", "--over", "sessions", "--tier", "20:10s"), 2),
        (("search", "agentic", "--over", "sessions", "--tier", "20:10s", "--slo", "ttft:1s"), 2),
        (("search", "agentic", "--over", "agents"), 2),
        (("search", "agentic", "--over", "sessions", "--tier", "20:10s"), 0),
    ],
)
def test_conflicting_options_of_a_tier_are_refused(arguments: tuple[str, ...], code: int) -> None:
    assert exits(*arguments, "--url", "sim:gb300-vm", "--dry-run") == code
