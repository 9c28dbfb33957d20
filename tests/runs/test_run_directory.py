"""A directory of runs is reported as load points or repeats only if its runs belong together."""

from __future__ import annotations

from pathlib import Path

import loadgen


def run_on(url: str, output_dir: Path) -> None:
    """Run a few requests on a simulated server."""
    loadgen.run("qa", url=url, request_rate=10, num_requests=20, seed=1, out=str(output_dir))


def test_runs_on_different_targets_are_listed_and_not_pooled(tmp_path: Path) -> None:
    run_on("sim:gb300-vm", tmp_path / "a")
    run_on("sim:h100x8", tmp_path / "b")

    assert loadgen.load(tmp_path).kind == "results"


def test_runs_on_one_target_are_repeats(tmp_path: Path) -> None:
    run_on("sim:gb300-vm", tmp_path / "a")
    run_on("sim:gb300-vm", tmp_path / "b")

    assert loadgen.load(tmp_path).kind == "runs"
