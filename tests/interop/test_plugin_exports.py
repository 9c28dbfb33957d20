"""What `loadgen export` prints about a file that the format of a plug-in writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import exits
from plugin_packages import forgetting, install

from loadgen.formats import FORMATS

PACKAGE = """
from loadgen.formats import FormatRow

def write_table(summary, stored):
    yield b"slot\\n"
    for slot in stored.rows["slot"].tolist():
        yield b"%d\\n" % slot

MARKED = FormatRow(
    "marked-table",
    write=write_table,
    simulated_mark="column `is_simulated`",
    has_unmeasured_requests=True,
)
UNMARKED = FormatRow("unmarked-table", write=write_table)
"""


@pytest.fixture
def _table_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with two formats that write a table."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry_points = {
        "marked-table": "table_formats:MARKED",
        "unmarked-table": "table_formats:UNMARKED",
    }
    with forgetting(FORMATS, "table_formats"):
        install(
            tmp_path,
            "table-formats",
            {"table_formats": PACKAGE},
            {"loadgen.formats": entry_points},
        )
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a simulated run with a warm-up."""
    folder: Path = tmp_path_factory.mktemp("simulated") / "run"
    load = ("-c", "2", "-n", "20", "--warmup", "5req", "--seed", "3")
    assert exits("run", "qa", "--url", "sim:gb300-vm", *load, "-o", folder) == 0
    return folder


@pytest.mark.usefixtures("_table_formats")
def test_a_table_of_a_plugin_is_described_by_its_own_mark_and_its_warmup_rows(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("export", run_dir, "--as", "marked-table", "-o", tmp_path / "table") == 0

    printed = capsys.readouterr().err
    assert "see its column `is_simulated`" in printed
    assert "rows of stage warm-up are not part of the metrics" in printed


@pytest.mark.usefixtures("_table_formats")
def test_an_export_warns_of_a_format_that_does_not_mark_simulated_runs(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("export", run_dir, "--as", "unmarked-table", "-o", tmp_path / "table") == 0

    printed = capsys.readouterr().err
    assert "SIMULATED, no real server was measured: the file does not say so" in printed
    assert "field `loadgen`" not in printed
    assert "warm-up" not in printed
