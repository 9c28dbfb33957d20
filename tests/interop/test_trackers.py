"""A finished run in MLflow and Weights & Biases, with the real packages if installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import repository_paths

from loadgen.cli.app import main
from loadgen.core.metrics.summary import load_summary
from loadgen.interop import trackers

EXAMPLE = repository_paths.DATA / "summary_example_rag_gpus.json"


def test_every_metric_and_setting_is_logged_to_a_tracker() -> None:
    summary = load_summary(EXAMPLE.read_bytes())
    metrics, facts = trackers.collect_metrics(summary), trackers.collect_parameters(summary)
    assert metrics["ttft_ms.p99"] == summary.ttft_ms.p99 and metrics["verdict.valid"] == 1.0
    assert len(metrics) > 100 and all(isinstance(value, float) for value in metrics.values())
    assert facts["model"] == summary.target.model and facts["arrival"] == "poisson 20/s"


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="it is installed")
def test_a_missing_tracker_package_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_bytes(EXAMPLE.read_bytes())
    with pytest.raises(SystemExit) as exc_info:
        main(["export", str(tmp_path), "--as", "mlflow"])
    assert exc_info.value.code == 2 and "pip install 'loadgen[mlflow]'" in capsys.readouterr().err


@pytest.mark.processes
def test_mlflow_stores_the_metrics_and_files_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_bytes(EXAMPLE.read_bytes())
    summary = load_summary(EXAMPLE.read_bytes())
    trackers.send_to_mlflow(tmp_path / "run", summary, tmp_path / "store")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name(trackers.PROJECT).experiment_id])
    assert run.data.metrics["ttft_ms.p99"] == summary.ttft_ms.p99
    assert run.data.params["model"] == summary.target.model
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["summary.json"]


@pytest.mark.processes
def test_wandb_stores_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "summary.json").write_bytes(EXAMPLE.read_bytes())
    script = (
        "import pathlib, sys\n"
        "from loadgen.core.metrics.summary import load_summary\n"
        "from loadgen.interop import trackers\n"
        "run_dir = pathlib.Path(sys.argv[1])\n"
        "summary = load_summary((run_dir / 'summary.json').read_bytes())\n"
        "trackers.send_to_wandb(run_dir, summary, run_dir)\n"
    )
    environment = {"WANDB_MODE": "offline", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, check=True, timeout=120
    )
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")

    assert (
        b"ttft_ms.p99" in stored.read_bytes()
        and json.loads(EXAMPLE.read_bytes())["run"]["id"].encode()
    )
