"""Sends a finished run to an experiment tracker: MLflow or Weights & Biases.

Their packages decide where a run goes, by the environment variables that their users know, such as
MLFLOW_TRACKING_URI and WANDB_MODE. `--out` names a local directory instead.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.cli.output import find_foreign_pages
from loadgen.core.errors import not_installed
from loadgen.core.metrics.summary import Summary
from loadgen.repeated import comparable_metrics

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

PROJECT = "loadgen"
"""The name of the experiment of MLflow, and of the project of Weights & Biases."""
ATTACHED_FILES = ("summary.json", "run.json", "report.html")
ENERGY_METRICS = (
    "joules_per_output_token",
    "joules_per_request",
    "watts",
    "output_tokens_per_s_per_watt",
)
MAX_MLFLOW_VALUE = 500
"""MLflow refuses longer values of parameters."""
MLFLOW_INVALID_CHARACTER = r"[^\w ./-]"
"""A character that MLflow refuses in the name of a parameter."""
WANDB_INVALID_CHARACTER = r"[^\w.-]"
"""A character that Weights & Biases refuses in the name of an artifact."""


def collect_metrics(summary: Summary) -> dict[str, float]:
    """Return every known metric of a summary that can be compared, by its path."""
    energy_paths = [f"energy.{name}" for name in ENERGY_METRICS]
    metrics = {}
    for path in (*comparable_metrics.metric_paths(), *energy_paths):
        value = comparable_metrics.metric_value(summary, path)
        if value is not None:
            metrics[path] = value

    metrics["verdict.valid"] = float(summary.verdict.valid)
    if summary.goodput.met is not None:
        metrics["goodput.met"] = float(summary.goodput.met)

    return metrics


def collect_parameters(summary: Summary) -> dict[str, str]:
    """Return the known facts about a run: target, model, load, seed and the user's metadata."""
    run = summary.run
    target = summary.target
    facts = {
        "workload": run.workload or run.name,
        "target": target.url or target.name,
        "server": target.server,
        "model": target.model,
        "arrival": summary.load.arrival,
        "seed": run.seed,
        "gpus": target.gpus,
        "shape": target.shape,
        "api": run.api,
        "stream": run.stream,
        "simulated": target.simulated,
        "state": run.state,
        "started": run.started,
        "loadgen": run.version,
        "recipe": summary.fingerprints.recipe,
    }
    parameters = {name: str(value) for name, value in facts.items() if value not in (None, "")}
    parameters |= {f"metadata.{name}": value for name, value in run.metadata.items()}

    return parameters


def send_to_mlflow(run_dir: Path, summary: Summary, out: Path | None) -> str:
    """Log a finished run of loadgen to MLflow, as a new MLflow run of the experiment PROJECT.

    Args:
        run_dir: The results directory of the run, from which files are attached.
        summary: The content of its `summary.json`, from which metrics and parameters are logged.
        out: A directory to use as the tracking store, or None for the store that the environment
            configures.

    Returns:
        Where the run is in MLflow, for a message: "run ID of experiment PROJECT".

    Raises:
        UserError: MLflow is not installed.
    """
    _require_package("mlflow")
    client = _create_mlflow_client(out)
    experiment_id = _find_or_create_experiment(client)
    tags = {"loadgen.run": summary.run.id}
    mlflow_run = client.create_run(experiment_id, run_name=summary.run.id, tags=tags)
    run_id = mlflow_run.info.run_id
    _log_to_mlflow(client, run_id, summary)

    for file in _find_files(run_dir):
        client.log_artifact(run_id, str(file))

    # MLflow's state of a run that was stopped before its end is KILLED.
    final_state = "FINISHED" if summary.run.state == "finished" else "KILLED"
    client.set_terminated(run_id, final_state)
    return f"run {run_id} of experiment {PROJECT}"


def _log_to_mlflow(client: MlflowClient, run_id: str, summary: Summary) -> None:
    """Log the parameters and the metrics of a summary to a run of MLflow."""
    for name, value in collect_parameters(summary).items():
        valid_name = re.sub(MLFLOW_INVALID_CHARACTER, "_", name)
        client.log_param(run_id, valid_name, value[:MAX_MLFLOW_VALUE])
    for path, metric in collect_metrics(summary).items():
        client.log_metric(run_id, path, metric)


def _create_mlflow_client(out: Path | None) -> MlflowClient:
    """Return a client of the tracking store in a directory, or of the default store for None."""
    from mlflow.tracking import MlflowClient

    if out is None:
        return MlflowClient()
    # Newer versions of MLflow refuse a directory without this setting.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient(tracking_uri=out.absolute().as_uri())


def _find_or_create_experiment(client: MlflowClient) -> str:
    """Return the id of the experiment PROJECT."""
    experiment = client.get_experiment_by_name(PROJECT)
    if experiment is not None:
        return str(experiment.experiment_id)
    return str(client.create_experiment(PROJECT))


def send_to_wandb(run_dir: Path, summary: Summary, out: Path | None) -> str:
    """Log a finished run of loadgen to Weights & Biases, as a new run of the project PROJECT.

    Args:
        run_dir: The results directory of the run, from which files are attached.
        summary: The content of its `summary.json`, from which metrics and parameters are logged.
        out: Where the package writes its own files, or None for its default.

    Returns:
        The URL of the new run, or its directory if W&B is offline.

    Raises:
        UserError: The package is not installed.
    """
    _require_package("wandb")
    import wandb

    wandb_run = wandb.init(
        project=PROJECT,
        name=summary.run.id,
        config=collect_parameters(summary),
        dir=None if out is None else str(out),
        tags=_wandb_tags(summary),
        settings=wandb.Settings(console="off", silent=True),
    )
    wandb_run.summary.update(collect_metrics(summary))
    artifact_name = re.sub(WANDB_INVALID_CHARACTER, "_", summary.run.id)

    artifact = wandb.Artifact(artifact_name, type="load-test")
    for file in _find_files(run_dir):
        artifact.add_file(str(file))

    wandb_run.log_artifact(artifact)
    wandb_run.finish()
    return str(wandb_run.url or wandb_run.dir)


def _wandb_tags(summary: Summary) -> list[str]:
    """Return the tags by which runs can be filtered: the server, and whether it is simulated."""
    tags = []
    if summary.target.server:
        tags.append(summary.target.server)
    if summary.target.simulated:
        tags.append("simulated")
    return tags


def _find_files(run_dir: Path) -> list[Path]:
    """Return the files of a run to attach, without pages that loadgen did not generate."""
    foreign_pages = find_foreign_pages(run_dir)
    files = [run_dir / name for name in ATTACHED_FILES if name not in foreign_pages]
    return [file for file in files if file.is_file()]


def _require_package(package: str) -> None:
    """Raise UserError if a package is not installed."""
    if find_spec(package) is None:
        raise not_installed(f"{package} is not installed", package, f"--as {package}", package)
