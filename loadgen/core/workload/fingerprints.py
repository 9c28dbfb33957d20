"""What makes two workloads equal: hashes of their checked values, and of the files of prompts and traces they name."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from loadgen.core import units
from loadgen.core.limits import ValidityLimits
from loadgen.core.workload import data_files, hub
from loadgen.core.workload.schema import Closed, FromTrace, Replay, Workload, Written


def recipe_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """16 hex digits, equal exactly when two workloads have the same load, SLO and way of counting tokens (metrics.md).

    The fingerprint covers the checked values, so `30s` and `0.5m` are equal. It ignores seeds, salt, names, the
    description and the source text. `count_source` is the tag of the token counts that the results use (server,
    tokenizer, estimate, events). `tokenizer_sha256`: of the tokenizer file; "" for the packaged vocabulary. For prompt
    and trace files the fingerprint covers the bytes of the file, which is read here, not its name.
    """
    return _recipe_hash(_recipe(workload, count_source, tokenizer_sha256))


def work_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """Like `recipe_fingerprint`, but without SLOs and limits of validity: a promise is no part of the work."""
    recipe = _recipe(workload, count_source, tokenizer_sha256)
    for one in (recipe, *recipe["requests"].get("classes", {}).values()):
        for name in ("slo", "limits"):
            one.pop(name, None)
    return _recipe_hash(recipe)


def request_fingerprint(workload: Workload, count_source: str, tokenizer_sha256: str = "") -> str:
    """Like `recipe_fingerprint`, but without the amount of load: equal for two capacity searches of the same kind.

    Of each measured stage only the arrival law counts (poisson, closed, ...), not its rate, lanes, duration or count.
    """
    recipe = _recipe(workload, count_source, tokenizer_sha256)
    recipe["stages"] = sorted({stage["law"] for stage in recipe["stages"] if stage["measured"]})
    return _recipe_hash(recipe)


def _recipe(workload: Workload, count_source: str, tokenizer_sha256: str) -> dict[str, Any]:
    excluded = {"name", "description", "seed", "schedule_seed", "salt", "source_text", "stop_when"}
    recipe = workload.model_dump(mode="json", include=set(Written.model_fields) - excluded)
    if recipe["grace_ns"] is None:  # so that fingerprints from when 30 s was the default stay equal
        recipe["grace_ns"] = 30 * units.NS_PER_S
    if (
        recipe["max_in_prefill"] is None
    ):  # so that fingerprints from before there was such a cap stay equal
        del recipe["max_in_prefill"]
    for one in recipe["requests"].get("classes", {}).values():
        for name in (
            "tenant",
            "headers",
        ):  # so that fingerprints from before there were any stay equal
            if not one[name]:
                del one[name]
    for stage in recipe["stages"]:
        del stage["name"]
        if (
            stage["at_least"] is None
        ):  # so that fingerprints from before `at_least` existed stay equal
            del stage["at_least"]
    # so that fingerprints from before these limits existed stay equal
    for name in ("event_error_share", "tpot_error_share", "not_offered_share"):
        if recipe["limits"][name] == getattr(ValidityLimits(), name):
            del recipe["limits"][name]
    classes = recipe["requests"].get("classes", {}).values()
    if isinstance(workload.requests, FromTrace):
        _without_defaults(recipe["requests"], workload.requests)
    for requests in (recipe["requests"], *(one["requests"] for one in classes)):
        if requests.get("prompts") == "random":  # as before there was a natural text
            del requests["prompts"]
        if requests.get("replay") == "instants":  # as of a class before sessions could be replayed
            del requests["replay"]
        for name in requests.keys() & {
            "path",
            "trace",
        }:  # the hash of the file in place of its name
            requests[name] = _content(Path(requests[name]))
        for name in (
            "cache",
            "chunks",
            "images",
        ):  # so that fingerprints from before these existed stay equal
            if requests.get(name, 0) is None:
                del requests[name]
        for step in requests.get("steps", {}).values():
            del step["target"], step["model"]  # where it is sent, as a run's own target
            for name in (
                "documents",
                "best",
            ):  # so that fingerprints from before these and other kinds stay equal
                if step[name] is None:
                    del step[name]
            if step["kind"] == "chat":
                del step["kind"]
    for slo in (recipe["slo"], *(one["slo"] for one in classes)):
        if (
            slo is not None and slo["task"] is None
        ):  # so that fingerprints from before `task` existed stay equal
            del slo["task"]
    for stage_recipe, stage in zip(recipe["stages"], workload.stages, strict=True):
        stage_recipe["law"] = stage.arrival.tag
        if isinstance(stage.arrival, Replay):
            replay = stage_recipe["arrival"]["trace"]
            replay["file"] = _file_sha256(stage.arrival.file)
            _without_defaults(replay, stage.arrival)
        # All lanes at once: as before ramps existed, and so is the fingerprint.
        if isinstance(stage.arrival, Closed) and stage.arrival.ramp_ns == 0:
            del stage_recipe["arrival"]["closed"]["ramp_ns"]
    recipe["count_source"] = count_source
    if (
        tokenizer_sha256
    ):  # the packaged vocabulary is left out, as it was before tokenizer files counted
        recipe["tokenizer"] = tokenizer_sha256
    return recipe


def _without_defaults(recipe: dict[str, Any], of: FromTrace | Replay) -> None:
    """Remove what was not asked of a trace, so that fingerprints from before this could be asked stay equal."""
    for name in ("slice_ns", "loop", "on_bad_row", "replay"):
        if name in recipe and getattr(of, name) == type(of).model_fields[name].default:
            del recipe[name]


def _recipe_hash(recipe: dict[str, Any]) -> str:
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(path: Path) -> str:
    """The hash of a file; of a data set of Hugging Face the commit of its snapshot, and those of its files."""
    if not str(path).startswith(data_files.HUB):
        return _file_sha256(path)
    files, _ = data_files.files_of(path)
    return "+".join(filter(None, (hub.commit_of(files[0]), *map(_file_sha256, files))))


def _file_sha256(path: Path) -> str:
    state = path.stat()
    return _sha256(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=16)  # of a trace: its requests and its arrivals are the same file
def _sha256(path: Path, size: int, changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
