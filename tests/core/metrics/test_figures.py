"""The table of metrics, the documents made from it, and the metric of a plugin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import make_figures
import numpy as np
import pytest
import repository_paths
import run_page
from command_line import exits
from make_examples import EXAMPLES
from msgspec.structs import replace
from plugin_packages import forgetting, install

import loadgen
from loadgen.bundle.bundle_writer import write_bundle
from loadgen.core.metrics import outcomes, request_metrics
from loadgen.core.metrics.columns import UNDEFINED, Columns
from loadgen.core.metrics.summary import Summary, dump_summary, load_summary
from loadgen.core.results.record import ROW
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.core.workload.slo_fields import parse_stop_rule
from loadgen.figures import METRICS, PLACES
from loadgen.plugins import without_plugins
from loadgen.repeated import comparable_metrics
from loadgen.runs import text
from loadgen.runs.outcome import build_cases


def test_every_metric_has_a_function_and_a_field_of_the_summary() -> None:
    for row in METRICS.builtin_rows:
        assert (row.values is not None) == (row.sample in ("ok", "sent"))
        assert row.block or row.field in Summary.__struct_fields__
        assert set(row.places) <= set(PLACES)
        similar_metric = row.hidden_if_same_as
        assert not similar_metric or METRICS.find(similar_metric, include_plugins=False)


def test_the_documentation_of_metrics_is_generated_from_their_definitions() -> None:
    assert make_figures.PAGE.read_text("utf-8") == make_figures.page(), (
        "python tests/make_figures.py"
    )


def test_a_metric_of_a_plugin_is_in_every_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin adds a metric with one module, which also works on the records of older runs."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manifest, rows, *rest = EXAMPLES["summary_example_qa_api.json"]()
    before = summarize(manifest, rows, *rest)

    assert "thinking_ms" not in before.other_metrics

    with forgetting(METRICS, "thinking"):
        install(
            tmp_path,
            "thinking",
            {"thinking": MODULE},
            {"loadgen.figures": {"thinking": "thinking:ROW"}},
        )
        summary = summarize(manifest, rows, *rest)
        distribution = summary.other_metrics["thinking_ms"]
        assert distribution.count == summary.requests.ok
        assert (
            distribution.p50 is not None
            and comparable_metrics.metric_value(summary, "figures.thinking_ms.p50")
            == distribution.p50
        )
        assert load_summary(dump_summary(summary)) == summary
        assert "Time to think" in text.render(summary) and "Time to think" in run_page.render(
            summary
        )
        assert "figures.thinking_ms.p50" in comparable_metrics.default_metric_paths()
        known_metric = comparable_metrics.find_metric("figures.thinking_ms.p50")
        assert known_metric is not None and (
            known_metric.name,
            known_metric.unit,
            known_metric.better,
        ) == (
            "Time to think p50",
            "ms",
            -1,
        )
        assert parse_stop_rule("thinking:p50:2s").metric == "thinking"
        promised_summary = summarize(
            replace(manifest, slo=Slo(terms=(Term(metric="thinking", limit_ns=1),))), rows, *rest
        )
        (term,) = promised_summary.goodput.slo
        assert term.over == term.count and term.objective.startswith("Time to think p99")
        assert [case.name for case in build_cases([("r", promised_summary)])][
            1
        ] == "Time to think p99 at most 1e-06 ms"
        assert [row.name for row in METRICS.shown_in("prometheus")][-1] == "thinking"

    assert {path.rpartition(".")[0] for path in set(summary.within) - set(before.within)} == {
        "figures.thinking_ms"
    }
    assert replace(summary, other_metrics=before.other_metrics, within=before.within) == before

    with without_plugins():
        assert "thinking_ms" in text.render(summary), (
            "a result is readable where the package is not"
        )


@pytest.fixture
def thinking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with forgetting(METRICS, "thinking"):
        install(
            tmp_path,
            "thinking",
            {"thinking": MODULE},
            {"loadgen.figures": {"thinking": "thinking:ROW"}},
        )
        yield


@pytest.mark.usefixtures("thinking")
def test_a_bundle_names_the_missing_package_of_a_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loadgen.run(
        "qa", url="sim:gb300-vm", request_rate=20, num_requests=50, seed=1, out=tmp_path / "r"
    )
    write_bundle(tmp_path / "r", tmp_path / "b.zip")
    capsys.readouterr()

    assert exits("verify", tmp_path / "b.zip", "--plugins", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verified"], document["not_made"]) == ("all", {})

    exits("verify", tmp_path / "b.zip", "--json")
    without = json.loads(capsys.readouterr().out)
    assert (without["verified"], without["differences"]) == ("part", [])
    assert list(without["not_made"]) == ["summary.json: figures.thinking_ms"]
    assert "thinking 1.0" in without["not_made"]["summary.json: figures.thinking_ms"]


@pytest.mark.usefixtures("thinking")
def test_a_stored_term_can_be_read_without_the_package_of_its_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stored result keeps its outcome. A recomputed one is undecided and gives the reason."""
    folder = tmp_path / "r"
    slo = ("--slo", "ttft:2s:p50", "--slo", "thinking:2s:p50")

    assert (
        exits(
            "run", "qa", "--url", "sim:gb300-vm", "-n", 50, "--request-rate", 20, "-o", folder, *slo
        )
        == 0
    )

    capsys.readouterr()
    with without_plugins():
        stored = load_summary((folder / "summary.json").read_bytes())
        (judged_term_result,) = (term for term in stored.goodput.slo if term.metric == "thinking")
        assert judged_term_result.met is True
        assert judged_term_result.objective.startswith(
            "metric thinking "
        ) and judged_term_result.objective.endswith("p50 at most 2,000 ms")
        assert exits("report", folder) == 0
        assert "metric thinking of a package" in " ".join(capsys.readouterr().out.split())
        goodput = loadgen.load(folder).summary.goodput
    (made_again,) = (term for term in goodput.slo if term.metric == "thinking")

    assert made_again.met is goodput.met is goodput.good is None
    assert made_again.undecided.startswith("metric thinking is defined")
    with pytest.raises(ValueError, match="no SLO"):
        Term(metric="../thinking", limit_ns=1)


CONTRACT = """
name: thoughtful
horizon: 30s
slo: {thinking: 1s}
levels:
  - name: steady
    workload: qa
    rate: 8/s
    requests: 1500
    must: [thinking: {limit: LIMIT, at: p50}]
    should: [goodput: 90%, drift: {of: thinking, at: p50, limit: 20%, window: 60s}]
"""


@pytest.mark.usefixtures("thinking")
@pytest.mark.commands
@pytest.mark.parametrize(("limit", "code"), [("50ms", 0), ("500us", 1)])
def test_a_contract_can_limit_a_metric_of_a_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, code: int
) -> None:
    (tmp_path / "c.yaml").write_text(CONTRACT.replace("LIMIT", limit))
    out = tmp_path / "v"

    assert (
        exits("validate", tmp_path / "c.yaml", "--url", "sim:gb300-vm", "--seed", 1, "-o", out)
        == code
    )
    stdout = capsys.readouterr().out
    assert "thinking at p50 within" in stdout and "at p50 in the last" in stdout
    assert "first answer - first token" in (out / "verdict.html").read_text("utf-8")
    assert "thinking at p50 within" in (out / "junit.xml").read_text("utf-8")

    with without_plugins():
        assert exits("report", out, "--full") == 4
        stdout = capsys.readouterr().out
        assert "thinking at p50 within" in stdout
        assert "metric thinking is defined" in stdout
        assert exits("validate", tmp_path / "c.yaml", "--url", "sim:gb300-vm", "--dry-run") == 2
        assert 'unknown term "thinking"' in capsys.readouterr().err


MODULE = """
from loadgen.figures import MetricDefinition
def thinking(columns):
    return columns["first_answer_ns"] - columns["first_token_ns"] + 1_000_000
ROW = MetricDefinition(
    name="thinking",
    label="Time to think",
    meaning="first answer - first token",
    values=thinking,
    compared=("p50",),
    places=("slo", "contract", "latency", "requests", "prometheus"),
)
"""


def test_a_metric_is_named_only_in_its_definition_and_its_function() -> None:
    """A figure is its row and its function; the stamp that it rests on has a column of its own."""
    key = re.compile(r"""["'.]first_answer(?:_ms)?\b(?!_ns)""")
    naming = {
        str(file.relative_to(repository_paths.ROOT / "loadgen"))
        for file in (repository_paths.ROOT / "loadgen").rglob("*.py")
        if key.search(file.read_text("utf-8"))
    }
    allowed = {
        "core/metrics/metric_definitions.py",
        "core/metrics/bounds.py",  # the uncertainty of its value
        "core/results/record.py",  # the stamp, as the client gives it
        "contracts/lint.py",  # which of two terms implies the other
        "contracts/recorded_run.py",  # which latencies include queueing
    }

    assert naming <= allowed


def test_e2e_per_token_is_undefined_without_output_tokens() -> None:
    rows = np.zeros(3, ROW)
    rows["due_ns"], rows["end_ns"], rows["done_ns"] = 5, 2_000_005, 2_000_005
    rows["output_tokens"] = [4, 0, -1]
    assert request_metrics.e2e_per_token(Columns(rows)).tolist() == [500_000, UNDEFINED, UNDEFINED]
    rows["asked_output"] = [8, 0, -1]
    assert outcomes.least_e2e_per_token(Columns(rows)).tolist() == [250_000, 0, 0]
