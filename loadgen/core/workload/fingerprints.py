"""Fingerprints of workloads: two workloads with equal fingerprints do the same work.

A fingerprint is a hash of the checked values of a workload, so `30s` and `0.5m` are equal. Files of
prompts and traces count by their contents, not by their names.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loadgen.core.workload import data_files, hub
from loadgen.core.workload.schema import Workload, WorkloadFile
from loadgen.core.workload.stages import Replay, Stage

Recipe = dict[str, Any]
"""The values that a fingerprint covers, as JSON types."""

FIELDS_OF_RECIPE = set(WorkloadFile.model_fields) - {
    "name",
    "description",
    "seed",
    "schedule_seed",
    "salt",
    "stop_when",
    "accepted_length",
}


def recipe_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """Return 16 hex digits that are equal for two workloads with equal requests, load and SLO.

    The way of counting tokens must be equal, too. Seeds, salt, names and the description do not
    count, because they do not change what is tested.

    Args:
        workload: The checked workload. The files of prompts and traces that it names are read.
        count_source: Where the token counts of the results come from: server, tokenizer, estimate
            or events.
        tokenizer_sha256: The hash of the tokenizer file. It is empty for the packaged vocabulary.
    """
    return _hash(_recipe(workload, count_source, tokenizer_sha256))


def work_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """Return 16 hex digits that are equal for two workloads with equal requests and load.

    Unlike in `recipe_fingerprint`, which has the same parameters, SLOs and limits of validity do
    not count: two runs with equal fingerprints did the same work, whatever was expected of them.
    """
    recipe = _recipe(workload, count_source, tokenizer_sha256)
    del recipe["slo"]
    del recipe["limits"]
    request_classes = recipe["requests"].get("classes", {})
    for request_class in request_classes.values():
        del request_class["slo"]
    return _hash(recipe)


def request_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """Return a fingerprint like `recipe_fingerprint` that ignores the amount of load.

    It is equal for two capacity searches of the same kind. Of the measured stages only the arrival
    laws count (poisson, closed, ...), not their rate, concurrency, duration or number of requests.
    """
    recipe = _recipe(workload, count_source, tokenizer_sha256)
    recipe["stages"] = sorted({stage.arrival.tag for stage in workload.stages if stage.measured})
    return _hash(recipe)


def _recipe(workload: Workload, count_source: str, tokenizer_sha256: str) -> Recipe:
    """Return the recipe of a workload: everything that decides what is sent and how it is judged.

    The recipe can be written as JSON, so that it can be hashed. Names of files are replaced by
    hashes of their content, and names of stages are left out, so that equal work has an equal
    recipe.

    Args:
        workload: The checked workload.
        count_source: Where the token counts of the results come from: server, tokenizer, estimate
            or events.
        tokenizer_sha256: The hash of the tokenizer file, or "" for the packaged vocabulary.
    """
    recipe = workload.model_dump(mode="json", include=FIELDS_OF_RECIPE)
    recipe["grace_ns"] = workload.drain_ns
    recipe["count_source"] = count_source

    recipe["tokenizer"] = tokenizer_sha256
    for requests in _all_requests(recipe):
        _normalize_requests(requests)

    for stage_recipe, stage in zip(recipe["stages"], workload.stages, strict=True):
        _normalize_stage(stage_recipe, stage)

    return recipe


def _normalize_stage(stage_recipe: Recipe, stage: Stage) -> None:
    """Remove the name of a stage, and replace the name of a trace file by a hash of its content."""
    del stage_recipe["name"]
    if isinstance(stage.arrival, Replay):
        # An arrival process is written under its tag: {"trace": {"file": ..., "speed": ...}}.
        replay_recipe = stage_recipe["arrival"][Replay.tag]
        replay_recipe["file"] = _file_sha256(stage.arrival.file)
        _remove_undecided_unit(replay_recipe)


def _normalize_requests(requests: Recipe) -> None:
    """Replace names of files by hashes, and remove what is no part of the work of requests."""
    for key in requests.keys() & {"path", "trace", "trajectories"}:
        requests[key] = _hash_of_data(Path(requests[key]))
    _remove_undecided_unit(requests)
    _remove_unchecked_answers(requests)
    for step in requests.get("steps", {}).values():
        # Where a step is sent is no part of the work, and neither is the target of a run.
        del step["target"]
        del step["model"]


def _remove_undecided_unit(recipe: Recipe) -> None:
    """Remove the unit of the times of a trace if the user has not specified it.

    The unit is then inferred from the rows of the file, whose hash is in the recipe already.
    """
    if recipe.get("unit") is None:
        recipe.pop("unit", None)


def _remove_unchecked_answers(requests: Recipe) -> None:
    """Remove the key `check_answers` of requests whose responses are not checked.

    So they have the same fingerprint as before this key existed.
    """
    if not requests.get("check_answers"):
        requests.pop("check_answers", None)


def _all_requests(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the requests of the workload, or those of each class if there are classes."""
    requests = recipe["requests"]
    if "classes" not in requests:
        yield requests
        return
    for request_class in requests["classes"].values():
        yield request_class["requests"]


def _hash(recipe: Recipe) -> str:
    """Return 16 hex digits that are equal for equal recipes, whatever the order of their keys."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash_of_data(path: Path) -> str:
    """Return a text that identifies the content of a file, or of a data set of Hugging Face.

    A file is identified by its SHA-256. A data set (`hf:ORG/NAME`) is identified by its commit and
    the SHA-256 of each of its files, joined by "+". The commit is left out if it is not known, as
    for a data set that another program has stored on this host.
    """
    is_on_hugging_face = str(path).startswith(data_files.HUB)
    if not is_on_hugging_face:
        return _file_sha256(path)

    files, _ = data_files.resolve_data_set(path)
    hashes = [_file_sha256(file) for file in files]
    commit = hub.snapshot_commit(files[0])
    return "+".join([commit, *hashes] if commit else hashes)


def _file_sha256(path: Path) -> str:
    """Return the hash of a file, which is read again only if it has changed."""
    state = path.stat()
    return _sha256_of_version(_FileVersion(path, state.st_size, state.st_mtime_ns))


class _FileVersion(NamedTuple):
    """A file as it is at a time. Another size or time of modification is another version."""

    path: Path
    size_bytes: int
    changed_ns: int


@functools.lru_cache(maxsize=16)  # The requests and the arrivals of a trace are the same file.
def _sha256_of_version(version: _FileVersion) -> str:
    """Return the hash of a file, from the cache if this version of it was read before."""
    with version.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
