"""The recipes follow one outline, and their commands run: simulated here, and on real servers.

`LOADGEN_SERVERS=DIR pytest -n 0 -m real_servers tests/test_recipes.py` runs the recipes against the
real servers in DIR, which `real_servers.py` installs. Others are skipped.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import servers
from command_line import exits
from make_guide_outputs import CONSOLE_BLOCK, NAMED_YAML_BLOCK, commands_of
from real_servers import free_port
from repository_paths import ROOT

sys.path.insert(0, str(ROOT / "examples/recipes"))

from record import FOLDER, PORT, RECIPES, START_SCRIPT, Recipe, record_text

OUTLINE = [
    "Start the server",
    "Flags that matter",
    "Check the server with doctor",
    "A first run",
    "Find the capacity",
    "Compute the cost",
    "What to do next",
]
SIMULATED_URL = "sim:gb300-vm"
SIMULATED_MODEL = "llama-2-70b"
SEARCH_STOPPED = 3
"""The exit code of a search that ends at its maximum number of trials."""
BACKEND_PORT = 8001
"""The port of a server behind a gateway."""

all_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.page)
real_recipes = pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if recipe.servers], ids=lambda recipe: recipe.page
)


def _commands(text: str) -> list[list[str]]:
    """Return the words after `loadgen` of all commands in console blocks."""
    commands = [command for block in CONSOLE_BLOCK.findall(text) for command in commands_of(block)]
    return [shlex.split(command.replace("\\\n", " "))[1:] for command in commands]


def test_every_recipe_page_is_registered_and_listed() -> None:
    pages = {path.name for path in FOLDER.glob("*.md")} - {"README.md"}
    assert {recipe.page for recipe in RECIPES} == pages
    overview = (FOLDER / "README.md").read_text("utf-8")
    navigation = (ROOT / ".ci/mkdocs.yml").read_text("utf-8")
    site_pages = (ROOT / ".ci/mkdocs_hooks.py").read_text("utf-8")
    for page in pages:
        assert f"]({page})" in overview
        assert f": recipes/{page}\n" in navigation
        assert f'"examples/recipes/{page}": "recipes/{page}"' in site_pages


@all_recipes
def test_a_recipe_page_follows_the_outline_and_states_which_commands_were_executed(
    recipe: Recipe,
) -> None:
    text = recipe.path.read_text("utf-8")
    assert re.findall(r"(?m)^## (.*)$", text) == OUTLINE
    assert START_SCRIPT.search(text)
    introduction = text[: text.index("\n## ")]
    assert "**What was executed.**" in introduction
    assert ("SIMULATED" in introduction) == (not recipe.servers)


@all_recipes
def test_a_recipe_page_has_all_four_commands(recipe: Recipe) -> None:
    names = {arguments[0] for arguments in _commands(recipe.path.read_text("utf-8"))}
    assert names == {"doctor", "run", "search", "cost"}


@pytest.mark.commands
@all_recipes
def test_the_commands_of_a_recipe_page_run_in_virtual_time(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = recipe.path.read_text("utf-8")
    text = re.sub(r"(?m)^ +url: .*\n", "", text)  # of a price, which then applies to every URL
    text = re.sub(r"http://localhost:\d+", SIMULATED_URL, text)
    text = re.sub(r"--(tokenizer|model) tiny(-model)?\b", "", text)
    text = text.replace("example-large", SIMULATED_MODEL)
    for name, content in NAMED_YAML_BLOCK.findall(text):
        (tmp_path / name).write_text(content, "utf-8")
    for arguments in _commands(text):
        if arguments[0] == "doctor":
            continue  # the next test runs it on a server that it can examine
        exit_codes = {0, SEARCH_STOPPED} if arguments[0] == "search" else {0}
        assert exits(*arguments) in exit_codes, f"{arguments}: {capsys.readouterr().err}"


@pytest.mark.processes
@all_recipes
def test_doctor_of_a_recipe_page_reports_no_problem_of_a_simulated_server(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    url = servers.shared().url
    text = re.sub(r"http://localhost:\d+", url, recipe.path.read_text("utf-8"))
    text = text.replace("--tokenizer tiny-model", "")
    doctor = next(arguments for arguments in _commands(text) if arguments[0] == "doctor")
    assert exits(*doctor, "--json") == 0, capsys.readouterr().out


@pytest.mark.optional
@pytest.mark.processes
@pytest.mark.real_servers
@real_recipes
def test_a_recipe_runs_on_its_real_server(recipe: Recipe, tmp_path: Path) -> None:
    missing = recipe.describe_missing_server()
    if missing:
        pytest.skip(f"{recipe.page}: {missing}")
    port = free_port()
    text = recipe.path.read_text("utf-8")
    text = text.replace(str(PORT), str(port)).replace(str(BACKEND_PORT), str(free_port()))

    record_text(recipe, text, tmp_path, port)

    counts = json.loads((tmp_path / "load/summary.json").read_bytes())["requests"]
    assert counts["ok"] == counts["scheduled"] > 0
    assert json.loads((tmp_path / "limit/capacity.json").read_bytes())["method"] == "search"
