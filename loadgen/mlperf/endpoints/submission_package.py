"""Writes the files of a rehearsed curve in the layout of the reference submission checker.

The layout is that of section 8.1 of the rules. Every file says that it is a rehearsal. What only a
submitter knows is left out: the accuracy results, and what no system file states.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.curve_result import CurveResult, PointMetrics, PointResult
from loadgen.mlperf.endpoints.reference_config import create_reference_config
from loadgen.mlperf.endpoints.rules import SeedSet
from loadgen.mlperf.endpoints.system_files import (
    REHEARSAL_STATUS,
    JsonObject,
    StatedFacts,
    describe_power,
    describe_system,
    system_directory_name,
)
from loadgen.plugins import version_of

ORGANIZATION_DIR = "rehearsal-unofficial"
SUBMISSION_DIR = "rehearsal"
IMPLEMENTATION_DIR = "loadgen"
"""The directory of the load generator in the sources of a submission."""
REHEARSAL_MARK = "REHEARSAL, unofficial: not run with the reference client of MLCommons"
"""The first line of every file, so that nobody takes the package for a submission."""

CHOICE_REGION = "submitters_choice"
"""The region of points that no region requires, and of an Offline run (reference docs)."""

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def write_package(package_dir: Path, result: CurveResult) -> Path:
    """Write the files of a submission, and return the directory for the reference checker.

    Args:
        package_dir: A directory that is empty or does not exist yet.
        result: The measured curve.

    Raises:
        UserError: The directory has files, or no point of the curve was measured.
    """
    has_files = package_dir.exists() and any(package_dir.iterdir())
    if has_files:
        raise UserError(
            "file_exists", "the folder has files", f"--package {package_dir}", "use a new folder"
        )
    if not result.points:
        raise UserError(
            "no_figure",
            "no point was measured yet",
            f"--package {package_dir}",
            "run loadgen mlperf endpoints run with the same --out again",
        )

    # The files of the whole curve.
    root = package_dir / ORGANIZATION_DIR / SUBMISSION_DIR
    for path, text in _shared_files(result).items():
        _write_text(root / path, text)

    system_dir = root / "results" / system_directory_name(result)
    _write_json(system_dir / "system_power.json", describe_power(result, mark=REHEARSAL_MARK))

    # The files of each measurement point.
    model_dir = system_dir / rules.find_benchmark(result.curve.benchmark).submission_name
    for point in result.points:
        _write_point(model_dir / f"r{point.point.concurrency}", result, point)
    return root


def _write_point(point_dir: Path, result: CurveResult, point: PointResult) -> None:
    """Write the description, configuration, metrics and system of one measurement point."""
    point_yaml = yaml.safe_dump(_point_yaml(result, point), sort_keys=False)
    _write_text(point_dir / "point.yaml", f"# {REHEARSAL_MARK}\n{point_yaml}")

    config = create_reference_config(result.curve, point.point)
    if config is not None:
        _write_text(point_dir / "config.yaml", f"# {REHEARSAL_MARK}\n{config}")

    _write_json(point_dir / "result_summary.json", _result_summary(point))
    _write_json(point_dir / "system_desc.json", _system_description(result, point))


def _shared_files(result: CurveResult) -> dict[str, str]:
    """Return the contents of the files that describe the whole submission, by path.

    They are Markdown files. Each has the mark of a rehearsal as its heading, so that nobody takes
    it for a file of an official submission.
    """
    heading = f"# {REHEARSAL_MARK}\n\n"
    version = version_of("loadgen")
    command = " ".join(result.curve.command)
    models = ", ".join(sorted({point.load.model for point in result.points}))

    rehearsal = f"{heading}{result.curve.disclosure}\n"
    implementation = (
        f"{heading}The queries were sent by loadgen {version} with this command:\n\n    {command}\n"
    )
    software = f"{heading}- Server: {result.curve.target}\n- Model: {models}\n"
    return {
        "REHEARSAL.md": rehearsal,
        f"src/{IMPLEMENTATION_DIR}/README.md": implementation,
        "docs/software_disclosure.md": software,
    }


# -- point.yaml ------------------------------------------------------------------------------------


def _point_yaml(result: CurveResult, point: PointResult) -> JsonObject:
    """Return the content of `point.yaml`, which describes one measurement point.

    The keys and their order are those of section 8.3 of the rules of MLPerf Endpoints.
    """
    curve = result.curve
    benchmark = rules.find_benchmark(curve.benchmark)
    facts = StatedFacts(point.load)

    # Only the point that a region requires counts for the region.
    region = point.point.region if point.point.is_mandatory else None
    content: JsonObject = {
        "rehearsal": REHEARSAL_MARK,
        "concurrency": point.point.concurrency,
        "region": region or CHOICE_REGION,
        "offline": point.point.offline,
        "division": REHEARSAL_STATUS,
        "max_supported_concurrency": curve.curve.c_max,
        "model_name": benchmark.submission_name,
        "model_precision": facts.model_precision,
        "link_to_model": f"https://huggingface.co/{curve.model}",
        "model_notes": REHEARSAL_MARK,
        "dataset": benchmark.dataset,
        "dataset_name": curve.data_name,
        "dataset_type": "Performance",
        "dataset_link": facts.dataset_link,
        "shared_src": f"src/{IMPLEMENTATION_DIR}",
        "shared_docs": "docs",
        "seed_set": curve.seed_set,
        "target_cohort": curve.target_cohort,
        "runtime_settings": _runtime_settings(result, point),
        "warmup": _warmup(point),
    }
    if point.steady_state_block is not None:
        content["steady_state"] = dict(point.steady_state_block)
    return content


def _runtime_settings(result: CurveResult, point: PointResult) -> JsonObject:
    """Return how the run of a measurement point sent its queries, with the random seeds."""
    seed_set = rules.find_seed_set(result.curve.seed_set)
    is_offline_run = point.point.is_offline_run
    return {
        "load_pattern": "max_throughput" if is_offline_run else "concurrency",
        "min_duration_ms": point.point.min_window_s * 1000,
        "min_sample_count": result.curve.dataset_size,
        "stream_all_chunks": point.load.is_streaming,
        "runtime": _seeds(seed_set),
    }


def _seeds(seed_set: SeedSet) -> JsonObject:
    """Return the random seeds of a run, by their names in the reference client."""
    return {
        "scheduler_rng_seed": seed_set.scheduler_rng_seed,
        "sample_index_rng_seed": seed_set.sample_index_rng_seed,
        "model_seed": seed_set.model_seed,
    }


def _warmup(point: PointResult) -> JsonObject:
    """Return the declaration that the run had no warm-up (section 6.3.3 of the rules)."""
    return {
        "duration_s": 0,
        "requests_issued": 0,
        "requests_completed": 0,
        "data_source": "none: the run has no warm-up",
        "concurrency": point.point.concurrency,
        "initialization_steps": [],
    }


# -- result_summary.json ---------------------------------------------------------------------------


def _result_summary(point: PointResult) -> JsonObject:
    """Return the content of `result_summary.json`, in the form of the reference client.

    The file has the metrics of the complete run, and of the steady window if there is one. Times
    are in nanoseconds.
    """
    total = point.total
    summary: JsonObject = {
        "rehearsal": REHEARSAL_MARK,
        "n_samples_issued": point.issued,
        "n_samples_completed": point.completed,
        "n_samples_failed": point.failed,
        "duration_ns": round(total.duration_s * NS_PER_S),
        **_distributions(total),
        "system_tps": total.system_tps,
    }
    if total.tps_per_user is not None:
        summary["tps_per_user"] = total.tps_per_user

    if point.window is not None:
        summary["steady_state"] = {
            "duration_ns": round(point.window.duration_s * NS_PER_S),
            "system_tps": point.window.system_tps,
            "tps_per_user": point.window.tps_per_user,
            **_distributions(point.window),
        }
    return summary


def _distributions(metrics: PointMetrics) -> JsonObject:
    """Return TTFT and TPOT by percentile in ns, and the output tokens."""
    return {
        "ttft": {"percentiles": _percentiles_ns(metrics.ttft_p50_ms, metrics.ttft_p90_ms)},
        "tpot": {"percentiles": _percentiles_ns(metrics.tpot_p50_ms, metrics.tpot_p90_ms)},
        "output_sequence_lengths": {"total": metrics.output_tokens},
    }


def _percentiles_ns(p50_ms: float | None, p90_ms: float | None) -> dict[str, float]:
    """Return the known ones of two percentiles in ns, by percentile: {"50.0": 1.2e9}."""
    values_ms = {"50.0": p50_ms, "90.0": p90_ms}
    return {name: ms * NS_PER_MS for name, ms in values_ms.items() if ms is not None}


# -- the system ------------------------------------------------------------------------------------


def _system_description(result: CurveResult, point: PointResult) -> JsonObject:
    """Return the description of the system, with the utilization at one measurement point.

    The utilization is the throughput of the point relative to the highest one of the curve. The
    fields are those of section 8.2 of the rules.
    """
    highest_tps = max(measured.total.system_tps for measured in result.points)
    utilization = point.total.system_tps / highest_tps if highest_tps else 0.0
    description = describe_system(result, point.load, mark=REHEARSAL_MARK)
    return {**description, "tps_utilization": utilization}


def _write_text(path: Path, text: str) -> None:
    """Write a text to a file, and create its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _write_json(path: Path, content: JsonObject) -> None:
    """Write a JSON object to a file, and create its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(format.document(content))
