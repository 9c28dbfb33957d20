"""The table of figures: its rows, the documents made of them, and a figure of another package in every place."""

from __future__ import annotations

import re
from pathlib import Path

import make_figures
import numpy as np
import places
import pytest
import run_page
from make_examples import EXAMPLES
from msgspec.structs import replace
from plugin_packages import forgetting, install

import loadgen
from loadgen.core.metrics import columns, outcomes, registry
from loadgen.core.metrics.columns import UNDEFINED, Columns
from loadgen.core.metrics.summary import Summary, dump_summary, load_summary, summarize
from loadgen.core.results.record import ROW
from loadgen.core.slo import Slo, Term
from loadgen.core.workload.slo_fields import stop_rule
from loadgen.evidence import verify
from loadgen.figures import FIGURES, PLACES
from loadgen.plugins import none, resolve
from loadgen.runs import text


def test_every_row_resolves_and_stands_in_the_summary() -> None:
    for row in FIGURES.own:
        for reference in filter(None, (row.values, row.least)):
            assert callable(resolve(reference)), row.name
        assert bool(row.values) == (row.sample in ("ok", "sent"))
        assert row.block or row.field in Summary.__struct_fields__
        assert set(row.shown) <= set(PLACES)
        assert not row.unlike or FIGURES.find(row.unlike, foreign=False)


def test_the_document_is_what_the_rows_say() -> None:
    assert make_figures.PAGE.read_text("utf-8") == make_figures.page(), "python tests/make_figures.py"


def test_a_figure_of_another_package_stands_in_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One module: a row and its function. It works on the stored rows of a run of another day too."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    header, rows, *rest = EXAMPLES["summary_example_qa_api.json"]()
    before = summarize(header, rows, *rest)
    assert "thinking_ms" not in before.figures
    with forgetting(FIGURES, "thinking"):
        install(tmp_path, "thinking", {"thinking": MODULE}, {"loadgen.figures": {"thinking": "thinking:ROW"}})
        summary = summarize(header, rows, *rest)
        found = summary.figures["thinking_ms"]
        assert found.count == summary.requests.ok
        assert found.p50 is not None and registry.figure(summary, "figures.thinking_ms.p50") == found.p50
        assert load_summary(dump_summary(summary)) == summary
        assert "Time to think" in text.render(summary) and "Time to think" in run_page.render(summary)
        assert "figures.thinking_ms.p50" in registry.shown()
        known = registry.metric("figures.thinking_ms.p50")
        assert known is not None and (known.name, known.unit, known.better) == ("Time to think p50", "ms", -1)
        assert stop_rule("thinking:p50:2s").metric == "thinking"
        promised = summarize(replace(header, slo=Slo(terms=(Term(metric="thinking", limit_ns=1),))), rows, *rest)
        (term,) = promised.goodput.slo
        assert term.met is False and term.promise.startswith("Time to think p99")
        assert [row.name for row in FIGURES.at("prometheus")][-1] == "thinking"
    assert replace(summary, figures=before.figures) == before
    with none():
        assert "thinking_ms" in text.render(summary), "a result is readable where the package is not"


def test_a_bundle_names_the_package_whose_figure_it_cannot_make_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with forgetting(FIGURES, "thinking"):
        install(tmp_path, "thinking", {"thinking": MODULE}, {"loadgen.figures": {"thinking": "thinking:ROW"}})
        loadgen.run("qa", url="sim:gb300-vm", request_rate=20, num_requests=50, seed=1, out=tmp_path / "r")
        verify.bundle(tmp_path / "r", tmp_path / "b.zip")
        whole = verify.verify(tmp_path / "b.zip", with_plugins=True)
        assert (whole.verified, whole.not_made) == ("all", {})
    without = verify.verify(tmp_path / "b.zip")
    assert (without.verified, without.differences) == ("part", ())
    assert list(without.not_made) == ["summary.json: figures.thinking_ms"]
    assert "thinking 1.0, which is not loaded here" in without.not_made["summary.json: figures.thinking_ms"]


MODULE = """
from loadgen.figures import FigureRow
ROW = FigureRow(
    "thinking", "Time to think", "first answer - first token", values="thinking:thinking", compared=("p50",),
    shown=("slo", "latency", "requests", "prometheus"),
)
def thinking(columns):
    return columns["first_answer_ns"] - columns["first_token_ns"] + 1_000_000
"""


def test_no_other_file_names_the_figure() -> None:
    """A figure is its row and its function; the stamp that it rests on has a column of its own."""
    key = re.compile(r"""["'.]first_answer(?:_ms)?\b(?!_ns)""")
    naming = {
        str(file.relative_to(places.ROOT / "loadgen"))
        for file in (places.ROOT / "loadgen").rglob("*.py")
        if key.search(file.read_text("utf-8"))
    }
    allowed = {
        "figures.py",
        "core/results/record.py",  # the stamp, as the client gives it
        "contracts/lint.py",  # which of two terms implies the other
        "contracts/steady_samples.py",  # which latencies include queueing
    }
    assert naming <= allowed


def test_normalised_tpot_is_e2e_over_output_tokens_and_none_without_any() -> None:
    rows = np.zeros(3, ROW)
    rows["due_ns"], rows["end_ns"], rows["done_ns"] = 5, 2_000_005, 2_000_005
    rows["output_tokens"] = [4, 0, -1]
    assert columns.e2e_per_token(Columns(rows)).tolist() == [500_000, UNDEFINED, UNDEFINED]
    rows["asked_output"] = [8, 0, -1]
    assert outcomes.least_e2e_per_token(Columns(rows)).tolist() == [250_000, 0, 0]
