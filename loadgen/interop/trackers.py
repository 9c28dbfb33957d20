"""A finished run as a run of an experiment tracker: MLflow or Weights & Biases. IO, through the packages of these two.

They are asked where to write as their users know it: MLFLOW_TRACKING_URI, WANDB_MODE and so on, or a folder.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from loadgen.cli.output import find_foreign_pages
from loadgen.core.errors import not_installed
from loadgen.core.metrics.summary import Summary
from loadgen.repeated import comparable_metrics

PROJECT = "loadgen"  # experiment of MLflow, project of W&B
FILES = ("summary.json", "run.json", "report.html")
_ENERGY = ("joules_per_output_token", "joules_per_request", "watts", "output_tokens_per_s_per_watt")


def figures(summary: Summary) -> dict[str, float]:
    """Every figure of the summary that can be compared, by its path; those that are not known are left out."""
    paths = (*comparable_metrics.metric_paths(), *(f"energy.{name}" for name in _ENERGY))
    found = {
        path: value
        for path in paths
        if (value := comparable_metrics.metric_value(summary, path)) is not None
    }
    found["verdict.valid"] = float(summary.verdict.valid)
    if summary.goodput.met is not None:
        found["goodput.met"] = float(summary.goodput.met)
    return found


def parameters(summary: Summary) -> dict[str, str]:
    """What the run was: target, model, load, seed, and the user's own metadata."""
    run, target = summary.run, summary.target
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
    known = {name: str(value) for name, value in facts.items() if value not in (None, "")}
    return known | {f"metadata.{name}": value for name, value in run.metadata.items()}


def _files(folder: Path) -> list[Path]:
    """Those of `FILES` that are there; not a page that somebody else has made."""
    foreign = find_foreign_pages(folder)
    return [folder / name for name in FILES if (folder / name).is_file() and name not in foreign]


def _needs(package: str) -> None:
    if find_spec(package) is None:
        raise not_installed(f"{package} is not installed", package, f"--as {package}", package)


def mlflow(folder: Path, summary: Summary, out: Path | None) -> str:
    """Log a run to MLflow; returns where it is. `out`: a folder as its store, else as the environment says."""
    _needs("mlflow")
    from mlflow.tracking import MlflowClient

    if (
        out is not None
    ):  # newer versions take a folder only where that is said; the user has just said it
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=None if out is None else out.absolute().as_uri())
    experiment = client.get_experiment_by_name(PROJECT)
    number = (
        experiment.experiment_id if experiment is not None else client.create_experiment(PROJECT)
    )
    run = client.create_run(
        number, run_name=summary.run.id, tags={"loadgen.run": summary.run.id}
    ).info
    for name, value in parameters(summary).items():
        client.log_param(run.run_id, re.sub(r"[^\w ./-]", "_", name), value[:500])
    for path, figure in figures(summary).items():
        client.log_metric(run.run_id, path, figure)
    for file in _files(folder):
        client.log_artifact(run.run_id, str(file))
    client.set_terminated(run.run_id, "FINISHED" if summary.run.state == "finished" else "KILLED")
    return f"run {run.run_id} of experiment {PROJECT}"


def wandb(folder: Path, summary: Summary, out: Path | None) -> str:
    """Log a run to Weights & Biases; returns where it is. `out`: where its own files go."""
    _needs("wandb")
    import wandb as library

    settings = library.Settings(console="off", silent=True)
    run = library.init(
        project=PROJECT,
        name=summary.run.id,
        config=parameters(summary),
        dir=None if out is None else str(out),
        tags=[
            tag for tag in (summary.target.server, "simulated" * summary.target.simulated) if tag
        ],
        settings=settings,
    )
    run.summary.update(figures(summary))
    artifact = library.Artifact(re.sub(r"[^\w.-]", "_", summary.run.id), type="load-test")
    for file in _files(folder):
        artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.finish()
    return str(run.url or run.dir)
