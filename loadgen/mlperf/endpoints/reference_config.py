"""Writes the configuration with which the reference client sends the load of a point. Pure.

A submission has the `config.yaml` of each run of the reference client next to its results (section
8.1). loadgen sends the queries of a rehearsal itself, so its file is a draft for that run.
"""

from __future__ import annotations

import yaml

from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.curve_result import StoredCurve
from loadgen.mlperf.endpoints.points import CurvePoint
from loadgen.mlperf.endpoints.rules import EndpointsBenchmark, ReferenceClientLoad, SeedSet

JsonObject = dict[str, object]

SERVER_PLACEHOLDER = "http://HOST:8000"
"""The URL in the draft, which the submitter replaces."""

NOTE = """\
# A draft: loadgen sent the queries of this rehearsal, and the reference client sends the same load
# with this file, in the format of mlcommons/endpoints at commit ea332753 (2026-08-21). Replace the
# URL, and compare the file with the client of your cohort: it may name its seeds differently, and
# have a salt (section 2.9.5.1). Then run:
#     inference-endpoint benchmark from-config --config config.yaml --mode {mode}
"""


def create_reference_config(curve: StoredCurve, point: CurvePoint) -> str | None:
    """Return the text of `config.yaml`, with which the reference client sends the same load.

    Return None if MLCommons published no example for the benchmark. For measurement points that
    need an accuracy run, the file also lists the accuracy data sets.
    """
    benchmark = rules.find_benchmark(curve.benchmark)
    client = benchmark.reference_client
    if client is None:
        return None

    config: JsonObject = {
        "name": f"{benchmark.submission_name}-{point.name}",
        "version": rules.RULES_VERSION,
        "type": "offline" if point.is_offline_run else "online",
        "model_params": _model_params(benchmark, client),
        "datasets": _datasets(client, point),
        "settings": _settings(curve, point),
        "endpoint_config": {"endpoints": [SERVER_PLACEHOLDER], "api_type": client.api_type},
        "report_dir": f"reports/{point.name}",
    }
    note = NOTE.format(mode="both" if point.needs_accuracy else "perf")
    text: str = yaml.safe_dump(config, sort_keys=False)
    return note + text


def _model_params(benchmark: EndpointsBenchmark, client: ReferenceClientLoad) -> JsonObject:
    """Return the model with its sampling parameters. Responses are streamed (section 6.5)."""
    return {"name": benchmark.model, **client.model_params, "streaming": "on"}


def _datasets(client: ReferenceClientLoad, point: CurvePoint) -> list[JsonObject]:
    """Return the performance data set, and the accuracy data sets where a point needs them."""
    datasets: list[JsonObject] = [{**client.performance, "type": "performance"}]
    if point.needs_accuracy:
        datasets += [{**accuracy, "type": "accuracy"} for accuracy in client.accuracy]
    return datasets


def _settings(curve: StoredCurve, point: CurvePoint) -> JsonObject:
    """Return the section `settings` of `config.yaml`: the number of queries, seeds and load."""
    seed_set = rules.find_seed_set(curve.seed_set)
    runtime = {
        "min_duration_ms": point.min_window_s * 1000,
        "n_samples_to_issue": curve.requests[point.name],
        **_seeds(seed_set),
    }
    return {
        "runtime": runtime,
        "load_pattern": _load_pattern(point),
        "client": {"stream_all_chunks": True},
    }


def _seeds(seed_set: SeedSet) -> JsonObject:
    """Return the seeds of the seed set in the words of the reference client."""
    return {
        "scheduler_random_seed": seed_set.scheduler_rng_seed,
        "dataloader_random_seed": seed_set.sample_index_rng_seed,
    }


def _load_pattern(point: CurvePoint) -> JsonObject:
    """Return a fixed concurrency, or all queries at once for an Offline run (section 6.1)."""
    if point.is_offline_run:
        return {"type": "max_throughput"}
    return {"type": "concurrency", "target_concurrency": point.concurrency}
