"""Variance components worked out by hand, and outlier replicas where there are any."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_page
from make_examples import blank, stream
from msgspec.structs import astuple
from numpy.typing import NDArray

from loadgen.cli.app import run_command_line
from loadgen.cli.targets import load_targets
from loadgen.compare.comparison import compare
from loadgen.core.errors import CombinedError
from loadgen.core.metrics.summary import Summary, dump_summary, load_summary
from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import SOURCES
from loadgen.core.run_summary import summarize
from loadgen.core.stats.variance_components import estimate_components, find_outliers
from loadgen.runs import text
from loadgen.runs.comparison_side import ComparedRun, Side

MS, S = 1_000_000, 1_000_000_000


def test_variance_components_equal_those_computed_by_hand() -> None:
    """Two parts, two blocks: means 10 12 / 14 20, four values in each cell, a variance of 2 inside.

    Mean squares of the parts: 2 * ((11 - 14)^2 + (17 - 14)^2) / 1 = 36, and of the blocks:
    2 * ((12 - 14)^2 + (16 - 14)^2) / 1 = 16. The four residuals are 1, -1, -1, 1, so theirs is
    4 / 1 = 4. Hence the components are (36 - 4) / 2 = 16 between replicas, (16 - 4) / 2 = 6 over
    time, and 4 - 2 / 4 = 3.5 for the interaction.
    """
    estimate = estimate_components(np.array([[10.0, 12.0], [14.0, 20.0]]), np.full((2, 2), 4), 2.0)
    assert astuple(estimate) == (14.0, 16.0, 6.0, 3.5, 2.0) and estimate.total == 27.5
    alike = estimate_components(np.full((3, 4), 7.0), np.full((3, 4), 5), 1.0)
    assert astuple(alike) == (7.0, 0.0, 0.0, 0.0, 1.0)


ROSNER = (
    "-0.25 0.68 0.94 1.15 1.20 1.26 1.26 1.34 1.38 1.43 1.49 1.49 1.55 1.56 1.58 1.65 1.69 1.70 "
    "1.76 1.77 1.81 1.91 1.94 1.96 1.99 2.06 2.09 2.10 2.14 2.15 2.23 2.24 2.26 2.35 2.37 2.40 "
    "2.47 2.54 2.62 2.64 2.90 2.92 2.92 2.93 3.21 3.26 3.30 3.59 3.68 4.30 4.64 5.34 5.42 6.01"
)


def test_outliers_equal_those_of_the_published_rosner_example() -> None:
    """NIST/SEMATECH e-Handbook 1.3.5.17.3 (Rosner) finds 6.01, 5.42 and 5.34 of at most ten."""
    values = [float(word) for word in ROSNER.split()]
    assert [values[place] for place in find_outliers(values, 10)] == [6.01, 5.42, 5.34]
    assert find_outliers([1.0, 1.0, 1.0, 9.0], 1) == [3] and find_outliers(
        [1.0, 1.0], 1
    ) == [] == find_outliers([2.0] * 9, 1)


def test_false_outliers_are_as_frequent_as_the_significance_level() -> None:
    draw = np.random.default_rng(5)
    for parts in (4, 18, 72):
        named = sum(
            bool(find_outliers(draw.normal(10, 1, parts), max(1, parts // 10))) for _ in range(300)
        )
        assert named <= 30, (parts, named)  # 5 % of 300 are 15; 30 is 4 standard deviations above


def _rows(
    targets: int, factor: dict[int, float], *, seed: int = 1, per: int = 400, wave: float = 0.0
) -> NDArray[Any]:
    """Return `per` requests to each target over 200 s.

    TPOT is 10 ms times the factor of the target, with noise of each replica and a common wave.
    """
    draw = np.random.default_rng(seed)
    n = targets * per
    records = blank(n)
    records["target"] = np.arange(n) % targets
    records["due_ns"] = (np.arange(n) / n * 200 * S).astype(np.int64)
    records["output_tokens"] = records["output_events"] = 50
    records["first_event_tokens"] = 1
    records["input_tokens"] = records["built_tokens"] = 100
    records["input_source"] = records["output_source"] = SOURCES.index("server")
    target_factors = draw.normal(1, 0.01, targets)
    scale = np.array([target_factors[i] * factor.get(i, 1.0) for i in range(targets)])[
        records["target"]
    ]
    common = 1 + wave * np.sin(records["due_ns"] / (50 * S) * 2 * np.pi)
    gap = (10 * MS * scale * common * draw.lognormal(0, 0.1, n)).astype(np.int64)
    stream(
        records, (100 * MS * draw.lognormal(0, 0.2, n)).astype(np.int64), gap, np.full(n, MS // 20)
    )
    return records


def _summary(rows: NDArray[Any], **facts: tuple[str, ...]) -> Summary:
    count = int(rows["target"].max()) + 1
    targets = tuple(
        TargetFacts(
            url=f"http://vm-{i:02}",
            name=f"vm-{i:02}",
            **{name: values[i] for name, values in facts.items()},
        )
        for i in range(count)
    )
    stage = StagePlan(name="load", arrival="poisson 10/s", slots=len(rows), rate=10.0)
    return summarize(
        RunManifest(run="r", state="finished", stages=(stage,), targets=targets, rtt_ms=0.2), rows
    )


def test_a_slow_node_of_eighteen_is_named_as_an_outlier() -> None:
    summary = _summary(_rows(18, {7: 1.08}, wave=0.05))
    node_differences = summary.node_differences

    assert (
        node_differences.node_kind,
        node_differences.nodes,
        node_differences.blocks,
        node_differences.reason,
    ) == ("target", 18, 20, "")
    assert {(outlier.name, outlier.metric) for outlier in node_differences.outliers} == {
        ("vm-07", "tpot"),
        ("vm-07", "e2e"),
    }
    tpot = next(outlier for outlier in node_differences.outliers if outlier.metric == "tpot")
    assert tpot.change == pytest.approx(0.08, abs=0.025)

    table = {
        variance_table.metric: variance_table for variance_table in node_differences.variances
    }["tpot"]
    shares = (table.between_share, table.time_share, table.own_time_share, table.within_share)

    assert sum(shares) == pytest.approx(1)
    assert table.within_ms == pytest.approx(1.0, rel=0.1), "lognormal noise of 10 % of 10 ms"
    assert table.time_ms == pytest.approx(0.05 * 10 / 2**0.5, rel=0.15), "a sine of 5 % of 10 ms"
    assert table.between_ms == pytest.approx(0.21, rel=0.4)
    rendered_text = text.render(summary)
    assert "vm-07 is an outlier" in rendered_text and re.search(
        r"between (.*\n.* )?targets ", rendered_text
    )
    assert "vm-07 is an outlier" in run_page.render(summary)
    assert load_summary(dump_summary(summary)).node_differences == node_differences


@pytest.mark.parametrize(("error_ms", "named"), [(0.01, True), (0.45, False)])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("factor", [1.045, 0.975])
def test_an_outlier_differs_by_more_than_the_timestamp_uncertainty_of_the_client(
    error_ms: float, named: bool, everywhere: bool, factor: float
) -> None:
    """A difference of 3.5 % in TPOT must exceed the uncertainty of the client's timestamps.

    The uncertainty lies with the slower replica, or with all if it is unknown where it arose.
    """
    rows = _rows(18, {7: factor})
    slower = (rows["target"] == 7) == (factor > 1)
    rows["last_token_error_ns"][slower | everywhere] = int(49 * error_ms * MS)
    summary = _summary(rows)
    assert "tpot" not in summary.withheld_metrics
    assert ("tpot" in {outlier.metric for outlier in summary.node_differences.outliers}) is named


def test_compare_names_the_outlier_node_of_each_side() -> None:
    sides = [
        Side(
            name=name,
            runs=(
                ComparedRun(
                    name=name, summary=_summary(_rows(18, factor)), manifest=None, rows=None
                ),
            ),
        )
        for name, factor in (("before", {}), ("after", {7: 1.08}))
    ]
    notes = [note for note in compare(sides).notes if "is an outlier" in note]

    assert len(notes) == 2 and all(note.startswith("after: vm-07 is ") for note in notes)


@pytest.mark.parametrize("targets", [3, 18])
def test_equal_nodes_have_no_outlier(targets: int) -> None:
    for seed in range(4):
        node_differences = _summary(_rows(targets, {}, seed=seed)).node_differences
        assert node_differences.outliers == () and node_differences.nodes == targets, seed
    assert f"No outlier target ({targets} targets" in text.render(_summary(_rows(targets, {})))


def test_of_two_replicas_neither_is_an_outlier() -> None:
    summary = _summary(_rows(2, {0: 1.5}))
    assert (
        summary.node_differences.outliers == ()
        and summary.node_differences.variances[1].between_share > 0.5
    )
    assert "Two targets are too few" in text.render(summary)


def test_too_few_responses_are_reported_and_not_judged() -> None:
    rows = _rows(4, {})
    rows = rows[(rows["target"] != 2) | (np.arange(len(rows)) < 8)]
    node_differences = _summary(rows).node_differences
    assert node_differences.left_out == ("vm-02",) and node_differences.nodes == 3
    few_between_nodes = _summary(_rows(4, {}, per=3)).node_differences
    assert (
        few_between_nodes.variances == ()
        and few_between_nodes.left_out == ()
        and "have 10 ok requests" in few_between_nodes.reason
    )


def test_targets_of_one_node_are_pooled(tmp_path: Path) -> None:
    """Two targets on each of nine nodes; both of one node are slow."""
    nodes = tuple(f"node-{i // 2}" for i in range(18))
    summary = _summary(_rows(18, {6: 1.1, 7: 1.1}), node=nodes)

    assert [part.target.node for part in summary.nodes] == [f"node-{i}" for i in range(9)]
    assert sum(part.requests.ok for part in summary.nodes) == summary.requests.ok
    assert summary.node_differences.node_kind == "node" and {
        outlier.name for outlier in summary.node_differences.outliers
    } == {"node-3"}
    assert "\nnode " in text.render(summary)

    file = tmp_path / "t.yaml"
    file.write_text("- {url: 'http://a:1', node: rack1-07}\n- {url: 'http://b:1', node: [x]}\n")
    with pytest.raises(CombinedError, match=r"t\.yaml:2:29 \(targets\[1\]\.node\)"):
        load_targets(file, env={})
    file.write_text("- {url: 'http://a:1', node: rack1-07}\n")
    assert load_targets(file, env={})[0].node == "rack1-07"


def test_a_simulated_rack_is_compared_by_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The preset's VMs differ by some 3 %, as the published logs do: none stands out of that."""
    out = tmp_path / "r"
    call = [
        "run",
        "qa",
        "--url",
        "sim:gb300-rack",
        "--request-rate",
        "150/s",
        "--duration",
        "30s",
        "--seed",
        "3",
    ]
    run_command_line([*call, "--full", "-o", str(out)])
    summary = load_summary((out / "summary.json").read_bytes()).node_differences

    assert summary.node_kind == "replica" and summary.nodes == 72 and summary.outliers == ()

    tpot = next(
        variance_table for variance_table in summary.variances if variance_table.metric == "tpot"
    )

    assert tpot.between_share > 0.9 and tpot.between_ms == pytest.approx(
        0.031 * tpot.mean_ms, rel=0.2
    )
    assert re.search(r"between (.*\n.* )?replicas? ", capsys.readouterr().out)
