"""Read a system file: a description of the measured hardware and software.

Each key becomes metadata of the run, such as `system.accelerator.model`. Benchmarks such as MLPerf
publish results only with a description of the system. `missing_facts` says which of the keys that
they require are not known of a run, so that nobody takes its result for comparable with theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from loadgen.core.errors import CombinedError
from loadgen.core.format import SYSTEM as SYSTEM_PREFIX
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.workload.accepted_length_field import AcceptedLengthField
from loadgen.core.workload.diagnostics import sort_errors, validate_document
from loadgen.core.workload.fields import Count, Positive
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.workload_files import read_yaml_text
from loadgen.core.workload.yaml_marks import read_yaml

PROVISIONED_KW_KEY = f"{SYSTEM_PREFIX}provisioned_kw"
"""The metadata with the provisioned power of the system, from the system file."""

_SMALLEST_EXAMPLE = "name: node-7\naccelerator: {model: NVIDIA H200, per_node: 8}"
_FULL_EXAMPLE_HINT = "docs/system.example.yaml shows every key"

Text = Annotated[str, Field(min_length=1, max_length=300)]


class HostsOfServers(Part):
    """The hosts of the servers, and the network between them."""

    processor: Text | None = None  # "Intel Xeon Platinum 8480C"
    sockets: Count | None = None
    cores: Count | None = None  # of all sockets of a node
    memory: Text | None = None  # of a node: "2 TB"
    storage: Text | None = None
    filesystem: Text | None = None
    network: Text | None = None
    os: Text | None = None


class Accelerator(Part):
    """The accelerators of a node."""

    model: Text | None = None  # "NVIDIA H200-SXM-141GB"
    per_node: Count | None = None
    memory: Text | None = None  # of one accelerator
    interconnect: Text | None = None  # "18x 4th-gen NVLink, 900 GB/s"
    driver: Text | None = None
    power_limit_w: Count | None = None  # of one accelerator
    cooling: Text | None = None


class Engine(Part):
    """The software that runs the model."""

    name: Text | None = None
    version: Text | None = None
    image: Text | None = None  # of a container, with its tag or digest
    arguments: Text | None = None  # the command line of the server, or its configuration


class ServedModel(Part):
    """The model that is served."""

    weights: Text | None = None  # "nvidia/Llama-3.3-70B-Instruct-FP4", with a revision
    precision: Text | None = None
    kv_cache: Text | None = None  # the precision of the KV cache
    speculation: Text | None = None  # "none", "MTP, 3 tokens", "EAGLE"
    # What --accepted-length states: the tokens per step that speculation is to give.
    accepted_length: AcceptedLengthField = None


class Parallelism(Part):
    """How one copy of the model is distributed over accelerators."""

    tensor: Count | None = None
    pipeline: Count | None = None
    expert: Count | None = None
    data: Count | None = None  # number of copies
    data_attention: bool | None = None
    prefill_accelerators: Count | None = None  # if prefill and decode are on separate ones
    decode_accelerators: Count | None = None


class SystemUnderTest(Part):
    """The keys that a system file may have."""

    name: Text | None = None
    status: Literal["available", "preview", "research"] | None = None  # as MLPerf defines
    nodes: Count | None = None
    gpus: Count | None = None  # as --gpus: all GPUs behind the endpoint
    shape: Text | None = None  # type of machine, as price lists name it
    region: Text | None = None
    provisioned_kw: Positive | None = None  # for all nodes, as the site reserves it
    metadata: dict[str, Text] = Field(default_factory=dict)  # as --metadata
    host: HostsOfServers | None = None
    accelerator: Accelerator | None = None
    engine: Engine | None = None
    model: ServedModel | None = None
    parallelism: Parallelism | None = None
    notes: Text | None = None


def read_provisioned_kw(metadata: Mapping[str, str]) -> float | None:
    """Return the provisioned power of a system in kW, or None if its system file has none.

    Args:
        metadata: The metadata of a run, which has the keys of the system file.
    """
    text = metadata.get(PROVISIONED_KW_KEY)
    return None if text is None else float(text)


REQUIRED_KEYS_BY_USE = {
    "MLPerf": (
        "name",
        "status",
        "nodes",
        "host.processor",
        "host.sockets",
        "host.cores",
        "host.memory",
        "host.storage",
        "host.network",
        "host.os",
        "accelerator.model",
        "accelerator.per_node",
        "accelerator.memory",
        "accelerator.interconnect",
        "accelerator.cooling",
        "engine.name",
        "engine.version",
        "model.precision",
    ),
    "InferenceX": (
        "accelerator.model",
        "accelerator.per_node",
        "nodes",
        "engine.name",
        "engine.image",
        "engine.arguments",
        "model.weights",
        "model.precision",
        "model.speculation",
        "parallelism.tensor",
        "parallelism.expert",
        "parallelism.data_attention",
    ),
    "a second measurement": (
        "accelerator.driver",
        "accelerator.power_limit_w",
        "engine.version",
        "model.kv_cache",
    ),
}
"""The keys of a system file that each use of a result requires.

The keys of MLPerf are those of the JSON files in a submission's `systems/`, and the keys of
InferenceX those of the configuration of a benchmark. Whoever repeats a measurement needs those of
"a second measurement" besides.
"""


TARGET_KEYS = ("gpus", "shape", "region")
"""The keys that describe the target as the options --gpus, --shape and --region do."""


class SystemDescription(NamedTuple):
    """The content of a system file.

    Attributes:
        metadata: Every key as text, such as `system.accelerator.model`, and the file's metadata.
        target: The values of the keys in TARGET_KEYS.
    """

    metadata: dict[str, str]
    target: dict[str, Any]


def read_system_file(path: Path, env: Mapping[str, str] = os.environ) -> SystemDescription:
    """Read a YAML file that describes the system under test (`--system`).

    A few of its keys describe the target as options do. All others become metadata of the run, with
    a prefix that separates them from the user's own metadata.

    Args:
        path: The path of the file.
        env: Environment variables, which the file may refer to.

    Raises:
        UserError: The file cannot be read.
        CombinedError: The file has errors; all of them are in it.
    """
    text = read_yaml_text(
        path,
        label=f"--system {path}",
        kind="system file",
        hint_if_missing=lambda: _FULL_EXAMPLE_HINT,
        hint_if_too_large=_FULL_EXAMPLE_HINT,
    )
    document, syntax_errors = read_yaml(
        text, str(path), env, kind="system file", example=_SMALLEST_EXAMPLE
    )
    context = FileContext(file=str(path), directory=path.parent, errors=syntax_errors)
    system = validate_document(SystemUnderTest, document, context)
    all_errors = context.errors  # Validation has added its errors to those of the syntax.
    if system is None or all_errors:
        raise CombinedError(sort_errors(all_errors))

    return _to_description(system)


def _to_description(system: SystemUnderTest) -> SystemDescription:
    """Separate the keys of a system file that describe the target from those that are metadata."""
    values = system.model_dump(exclude_none=True)
    target_values = {key: values.pop(key) for key in TARGET_KEYS if key in values}
    if system.model is not None and system.model.accepted_length is not None:
        target_values["accepted_length"] = system.model.accepted_length
        values["model"]["accepted_length"] = system.model.accepted_length.text
    metadata = values.pop("metadata")
    for key, value_text in _flatten(values):
        metadata[SYSTEM_PREFIX + key] = value_text
    return SystemDescription(metadata, target_values)


def _flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings as text, with a key such as `accelerator.model`."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, prefix=f"{key}.")
        elif isinstance(value, bool):
            yield key, "yes" if value else "no"
        else:
            yield key, str(value)


def missing_facts(metadata: Mapping[str, str], target: TargetFacts) -> dict[str, list[str]]:
    """Return which facts about its system a run lacks, for each use of its result.

    A use is, for example, a submission to MLPerf, which requires facts about the host. A fact is
    known if the user gives it in a system file, whose keys are metadata of the run with a prefix,
    or if the server reports it.

    Args:
        metadata: The metadata of the run.
        target: What is known of its first target.

    Returns:
        The missing keys of a system file by the name of the use, for example
        {"MLPerf": ["host.memory"]}. A use that lacks nothing has no entry.
    """
    keys_from_user = {
        key.removeprefix(SYSTEM_PREFIX) for key in metadata if key.startswith(SYSTEM_PREFIX)
    }
    known_keys = keys_from_user | _reported_keys(target)

    missing_keys_by_use = {}
    for use, required_keys in REQUIRED_KEYS_BY_USE.items():
        missing_keys = [key for key in required_keys if key not in known_keys]
        if missing_keys:
            missing_keys_by_use[use] = missing_keys

    return missing_keys_by_use


def _reported_keys(target: TargetFacts) -> set[str]:
    """Return the keys of a system file, such as `engine.version`, that a server itself reports.

    The user need not give these in the file.
    """
    is_server_recognized = target.server not in ("", "generic")
    is_reported_by_key = {
        "engine.name": is_server_recognized,
        "engine.version": bool(target.version),
        "model.precision": bool(target.precision),
        "accelerator.per_node": bool(target.gpus),
    }
    return {key for key, is_reported in is_reported_by_key.items() if is_reported}
