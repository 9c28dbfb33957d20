"""The plug-in package in examples/, installed as pip would and used by every command."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import exits
from loadgen_sdk.probe.server_detection import match_profiles
from loadgen_sdk.wire_formats.server_profiles import SERVERS
from loadgen_sdk.wire_formats.server_timing import NO_SERVER_TIMING
from loadgen_sdk.wire_formats.server_timing_lookup import find_timing_parser, parse_server_timing
from plugin_packages import forgetting, install
from scripted_server import answering

import loadgen
from loadgen import plugins
from loadgen.cluster import node_facts
from loadgen.core.errors import OK, SLO_MISSED, USAGE, UserError
from loadgen.core.execution.plan import build_plan
from loadgen.core.metrics.summary import load_summary
from loadgen.core.results.store import read_run
from loadgen.core.server_metrics import series
from loadgen.core.workload.dataset import read_located_rows
from loadgen.core.workload.traces import read_trace
from loadgen.doctor import plugin_checks
from loadgen.interop import reader
from loadgen.pricing.price_file import load_prices
from loadgen.result_kinds import kind_of
from loadgen.ui.results_list import results_in
from loadgen.ui.server import ResultsServer

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/reference/plugins.md").read_text("utf-8")
PACKAGE = ROOT / "examples" / "acme-loadgen"
ROWS = (PACKAGE / "acme_loadgen.py").read_text("utf-8")
SMALL = (
    "--input-tokens",
    "8",
    "--output-tokens",
    "4",
    "-n",
    "3",
    "--warmup",
    "0",
    "--concurrency",
    "1",
)


def installed(folder: Path, text: str) -> None:
    points = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))["project"][
        "entry-points"
    ]
    install(folder, "acme-loadgen", {"acme_loadgen": text}, points)


@pytest.fixture
def site(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide the package as a directory; the tables forget it after the tests."""
    folder: Path = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    with ExitStack() as stack:
        for table in plugin_checks.TABLES:
            stack.enter_context(forgetting(table, "acme_loadgen"))
        find_timing_parser.cache_clear()
        yield folder
    find_timing_parser.cache_clear()


@pytest.fixture
def acme(site: Path) -> Path:
    installed(site, ROWS)
    return site


def test_the_page_quotes_lines_of_the_example_package() -> None:
    for kind, name in (("toml", "pyproject.toml"), ("python", "acme_loadgen.py")):
        (block,) = re.findall(rf"(?ms)^```{kind}\n(.*?)^```$", PAGE)
        assert block in (PACKAGE / name).read_text("utf-8")


@pytest.mark.usefixtures("acme")
def test_the_example_package_has_a_row_in_each_table_without_an_error() -> None:
    for table in plugin_checks.TABLES:
        (plugin,) = table.plugins
        assert plugin.error == "" and (plugin.package, plugin.version) == ("acme-loadgen", "1.0"), (
            table.group
        )
    assert {finding.state for finding in plugin_checks.check_plugins()} == {"ok"}


@pytest.mark.usefixtures("acme")
def test_the_file_format_of_the_package_is_read_written_and_replayed(
    tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "acme.json").write_text('{"acme_bench": 1, "ttft_s": 0.25, "requests": 7}')

    assert exits("report", tmp_path) == OK
    assert "Acme Bench" in capsys.readouterr().out
    foreign_result = reader.read_result(tmp_path / "acme.json")
    assert foreign_result.metrics == {
        "ttft_ms.p50": 250.0,
        "requests.ok": 7.0,
    } and foreign_result.counts.startswith("From sent.")

    (tmp_path / "t.jsonl").write_text(
        '{"acme_s": 1.0, "in": 5, "out": 2}\n{"acme_s": 1.5, "in": 6, "out": 3}\n'
    )
    trace = read_trace(tmp_path / "t.jsonl")

    assert (trace.format, trace.due_ns.tolist(), trace.input_tokens.tolist()) == (
        "Acme",
        [0, 500_000_000],
        [5, 6],
    )
    (tmp_path / "d.acme").write_text("hello\nworld\n")
    assert [row["prompt"] for _, row in read_located_rows(tmp_path / "d.acme")] == [
        "hello",
        "world",
    ]
    (tmp_path / "acme.json").write_text('{"acme_bench": 1}')
    assert exits("report", tmp_path) == USAGE
    assert "acme-loadgen 1.0 failed: KeyError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments", "expected_text"),
    [
        (
            'return columns["first_answer_ns"] - columns["first_token_ns"]',
            "return [0.5]",
            ("run", "qa", "--url", "sim:gb300-vm", "-n", "20"),
            "it returned list, not an int64 for each of 20 requests",
        ),
        (
            '    return """\ncurrency',
            '    return None\n    """\ncurrency',
            ("run", "qa", "--url", "sim:gb300-vm", "-n", "20", "--prices", "acme:eu"),
            "it returned NoneType, not str",
        ),
        (
            "    return ForeignResult(file=file.where, metrics=metrics",
            "    return dict(metrics=metrics",
            ("report", "acme.json"),
            "it returned dict, not ForeignResult",
        ),
        (
            "@contextmanager\ndef serve(settings):",
            "def serve(settings):",
            ("run", "qa", "--url", "acme:small", *SMALL),
            "it returned generator, not AbstractContextManager",
        ),
        (
            "Backend(known=known_target, serve=serve)",
            "Backend(known=known_target)",
            ("run", "qa", "--url", "acme:small", "--dry-run"),
            "does not define how to reach its targets",
        ),
        (
            'compared=("p50",)',
            'compared="p50"',
            ("doctor",),
            "the field compared is not a tuple, but str",
        ),
        (
            "values=thinking",
            'values="acme_loadgen:thinking"',
            ("doctor",),
            "the field values is not a function, but str",
        ),
    ],
)
def test_an_error_in_a_row_is_attributed_to_the_plugin(
    site: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    ours: str,
    theirs: str,
    arguments: tuple[str, ...],
    expected_text: str,
) -> None:
    assert ours in ROWS

    installed(site, ROWS.replace(ours, theirs))
    monkeypatch.chdir(tmp_path)
    Path("acme.json").write_text('{"acme_bench": 1, "ttft_s": 0.25, "requests": 7}')
    if arguments == ("doctor",):
        assert any(
            expected_text in finding.observed
            for finding in plugin_checks.check_plugins()
            if finding.state == plugin_checks.WARNING
        )
        return

    assert exits(*arguments) == USAGE
    assert expected_text in capsys.readouterr().err


@pytest.mark.usefixtures("acme")
def test_the_documented_commands_of_the_example_package_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = re.findall(r"(?m)^    loadgen (.*)$", PAGE)
    assert len(typed) == 2
    for line in typed:
        assert exits(*line.split(), "--dry-run") == OK


@pytest.mark.usefixtures("acme")
def test_command_result_kind_and_prices_of_the_package_work(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "results" / "s"
    folder.mkdir(parents=True)
    (folder / "soak.json").write_text('{"hours": 12}')

    assert exits("brief", folder) == OK and capsys.readouterr().out == "It held for 12 hours.\n"
    assert exits("report", folder) == SLO_MISSED
    assert [
        (stored_result.name, stored_result.kind, stored_result.reported_outcome)
        for stored_result in results_in(folder.parent)
    ] == [("s", "soak", "12 h")]
    assert exits("--help") == OK and "brief       A result" in capsys.readouterr().out
    (price,) = load_prices(Path("acme:eu")).entries
    assert price.provider == "Acme"
    with pytest.raises(UserError, match="sells nothing in 'us'"):
        load_prices(Path("acme:us"))
    with pytest.raises(UserError, match="no such price file"):
        load_prices(Path("nobody:eu"))


@pytest.mark.usefixtures("acme")
def test_the_server_of_the_package_is_detected_by_its_responses(capsys: Any) -> None:
    servers = SERVERS

    assert match_profiles(tuple(servers.plugin_rows()), {"models": '{"owned_by": "acme"}'}) == (
        "acme",
        "models",
        '"owned_by": "acme"',
    )
    server_timing = parse_server_timing({"acme.metrics": {"queued_s": 0.5, "prefill_s": 0.25}})
    assert (server_timing.queue_ns, server_timing.prefill_ns) == (500_000_000, 250_000_000)
    assert (
        parse_server_timing({"acme.metrics": {}})
        == parse_server_timing({"acme.metrics": {}})
        == NO_SERVER_TIMING
    )
    assert capsys.readouterr().err.count("acme-loadgen 1.0 failed: KeyError") == 1
    assert series.stored_names(servers.find("acme").metrics) == {
        "acme_active": "loadgen:running",
        "acme_queued": "loadgen:waiting",
    }
    assert "loadgen:running" in series.NAMES_BY_QUANTITY["running"]


@pytest.mark.processes
@pytest.mark.usefixtures("acme")
def test_a_run_uses_the_backend_and_the_server_of_the_package(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    loadgen.run(
        "qa",
        url="acme:small",
        server="acme",
        input_tokens=8,
        output_tokens=4,
        out=out,
        num_requests=3,
        warmup=0,
    )
    manifest = read_run(out).manifest

    assert (manifest.targets[0].server, manifest.targets[0].model) == ("acme", "small")

    used = {
        (plugin_used.table, plugin_used.name, plugin_used.package, plugin_used.version)
        for plugin_used in manifest.plugins
    }

    assert used == {
        ("loadgen.backends", "acme", "acme-loadgen", "1.0"),
        ("loadgen_sdk.servers", "acme", "acme-loadgen", "1.0"),
        ("loadgen.figures", "thinking", "acme-loadgen", "1.0"),
    }
    assert load_summary((out / "summary.json").read_bytes()).other_metrics["thinking_ms"].count == 3
    capsys.readouterr()
    assert exits("export", out, "--as", "acme-bench") == OK
    assert json.loads(capsys.readouterr().out)["requests"] == 3
    assert exits("doctor", "--help-all") == OK
    assert "Of packages: acme." in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("acme")
def test_a_failure_of_a_backend_at_its_start_is_attributed_to_the_plugin(
    tmp_path: Path, capsys: Any
) -> None:
    assert exits("run", "qa", "--url", "acme:", *SMALL, "-o", tmp_path / "run") == USAGE
    assert "acme-loadgen 1.0 failed: RuntimeError:" in capsys.readouterr().err


def test_a_failing_plugin_stops_nothing_and_doctor_names_it(site: Path, capsys: Any) -> None:
    installed(site, ROWS.replace("SERVER = ServerProfile(", "SERVER = dict("))

    assert exits("doctor", "--url", "sim:gb300-vm", "--json") == OK

    captured = capsys.readouterr()
    findings = [
        finding["found"]
        for finding in json.loads(captured.out)["findings"]
        if finding["check"] == "plug-in"
    ]

    assert len(findings) == 7 and [text for text in findings if "a ServerProfile" in text] == [
        "acme of acme-loadgen 1.0: acme_loadgen:SERVER is not a ServerProfile"
    ]
    assert captured.err.count("is not used") == 1


@pytest.mark.usefixtures("acme")
def test_no_plugin_is_loaded_if_plugins_are_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soak.json").write_text('{"hours": 30}')
    monkeypatch.setenv("LOADGEN_PLUGINS", "0")
    assert kind_of(tmp_path) is None
    monkeypatch.delenv("LOADGEN_PLUGINS")
    with plugins.without_plugins():
        assert kind_of(tmp_path) is None
    assert "acme_loadgen" not in sys.modules
    assert loadgen.load(tmp_path).headline == "It held for 30 hours."


@pytest.mark.usefixtures("acme")
def test_a_page_of_results_loads_plugins_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "soak.json").write_text('{"hours": 30}')
    for is_requested in (False, True):
        with (
            answering(ResultsServer(tmp_path, 0, None, with_plugins=is_requested)) as server,
            urllib.request.urlopen(server.address) as answer,
        ):
            assert (b"30 h" in answer.read()) is is_requested
        assert ("acme_loadgen" in sys.modules) is is_requested


def test_no_module_name_stored_in_a_folder_is_imported(site: Path, tmp_path: Path) -> None:
    (site / "acme_loadgen.py").write_text(
        "raise SystemExit('imported')"
    )  # a module, and no entry point
    manifest = {
        "plugins": [
            {
                "table": "loadgen.results",
                "name": "acme",
                "package": "acme_loadgen",
                "version": "1.0",
            }
        ]
    }
    (tmp_path / "run.json").write_text(json.dumps(manifest | {"state": "acme_loadgen:SOAK"}))

    with pytest.raises(UserError):
        print(loadgen.load(tmp_path).headline)
    assert "acme_loadgen" not in sys.modules


@pytest.mark.usefixtures("acme")
def test_a_worker_with_another_version_refuses_the_run() -> None:
    wanted = plugins.UsedPlugin("loadgen.backends", "acme", "acme-loadgen", "2.0")
    job: Any = SimpleNamespace(plugins=(wanted,))

    with pytest.raises(UserError, match=r"acme-loadgen 1.0 here, 2.0 there") as exc_info:
        build_plan(job)
    assert exc_info.value.code == "nodes_differ"

    here = node_facts.read_local_facts([], ["acme-loadgen"])
    there = here._replace(versions=here.versions | {"acme-loadgen": "2.0"})
    (fault,) = node_facts.find_differences(here, there, "node")

    assert fault.code == "nodes_differ"
    assert "acme-loadgen" in fault.message


TRIALS = {
    "server": (r'"transformers"', {"sdk/loadgen_sdk/wire_formats/server_profiles.py"}),
    "format": (
        r"(is|read)_genai_bench\b",
        {"loadgen/formats.py", "loadgen/interop/tool_results.py"},
    ),
    "command": (
        r"doctor\.command|def doctor\(",
        {"loadgen/commands.py", "loadgen/doctor/command.py"},
    ),
    "kind of result": (
        r"accuracy_kind|class AccuracyResult\b",
        {"loadgen/result_kinds.py", "loadgen/mlperf/accuracy.py"},
    ),
    "source of prices": (
        r"\bread_price_file\b",
        {"loadgen/prices.py", "loadgen/pricing/price_file.py"},
    ),
    "backend": (r"embedded_backend", {"loadgen/sim/backends.py"}),
    "metric": (
        r"=request_metrics.first_answer\b|^def (bound_|least_)?first_answer\(columns",
        {
            "loadgen/core/metrics/metric_definitions.py",
            "loadgen/core/metrics/request_metrics.py",
            "loadgen/core/metrics/bounds.py",
            "loadgen/core/metrics/outcomes.py",
        },
    ),
}
"""Of a row of each kind: what names it, and the files that do."""


MOST_MODULES = {"metric": 4}
"""How many modules a new row may change, if it is more than the table and its functions."""


@pytest.mark.parametrize("kind", TRIALS)
def test_a_new_row_of_a_table_changes_only_the_documented_files(kind: str) -> None:
    pattern, files = TRIALS[kind]
    sources = [*ROOT.glob("loadgen/**/*.py"), *ROOT.glob("sdk/loadgen_sdk/**/*.py")]
    file_paths = {
        str(file.relative_to(ROOT))
        for file in sources
        if re.search(pattern, file.read_text("utf-8"), re.M)
    }

    assert file_paths == files and len(files) <= MOST_MODULES.get(kind, 2)
    (row,) = re.findall(rf"(?m)^\| {kind} \| (.*) \|$", PAGE)
    assert all(
        f"`{file}`" in row or "its functions" in row or "its module" in row for file in files
    )
