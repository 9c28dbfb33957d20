"""Reads a system file: a description of the measured hardware and software.

Each key becomes metadata of the run, such as `system.accelerator.model`. ASKED lists the keys that
the descriptions of MLPerf (the JSON of a submission's `systems/`) and of InferenceX (the
configuration of a benchmark) have, too. A report names the keys that are missing, so that nobody
takes a result for comparable that is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from loadgen.core.errors import CombinedError
from loadgen.core.format import SYSTEM
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.workload.diagnostics import sort_errors, validate_document
from loadgen.core.workload.fields import Whole
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.workload_files import read_yaml_text
from loadgen.core.workload.yaml_marks import read_yaml

_SMALLEST = "name: node-7\naccelerator: {model: NVIDIA H200, per_node: 8}"
_EXAMPLE = "docs/system.example.yaml has every key"

Text = Annotated[str, Field(min_length=1, max_length=300)]


class HostsOfServers(Part):
    """The hosts of the servers, and what is between them."""

    processor: Text | None = None  # "Intel Xeon Platinum 8480C"
    sockets: Whole | None = None
    cores: Whole | None = None  # of all sockets of a node
    memory: Text | None = None  # of a node: "2 TB"
    storage: Text | None = None
    network: Text | None = None
    os: Text | None = None


class Accelerator(Part):
    """The accelerators of a node."""

    model: Text | None = None  # "NVIDIA H200-SXM-141GB"
    per_node: Whole | None = None
    memory: Text | None = None  # of one
    interconnect: Text | None = None  # "18x 4th-gen NVLink, 900 GB/s"
    driver: Text | None = None
    power_limit_w: Whole | None = None  # of one
    cooling: Text | None = None


class Engine(Part):
    """What runs the model."""

    name: Text | None = None
    version: Text | None = None
    image: Text | None = None  # of a container, with its tag or digest
    arguments: Text | None = None  # the command line of the server, or its configuration


class ServedModel(Part):
    """What is served."""

    weights: Text | None = None  # "nvidia/Llama-3.3-70B-Instruct-FP4", with a revision
    precision: Text | None = None
    kv_cache: Text | None = None  # its precision
    speculation: Text | None = None  # "none", "MTP, 3 tokens", "EAGLE"


class Parallelism(Part):
    """How the model is spread over accelerators, for one copy of it."""

    tensor: Whole | None = None
    pipeline: Whole | None = None
    expert: Whole | None = None
    data: Whole | None = None  # copies
    data_attention: bool | None = None
    prefill_accelerators: Whole | None = None  # with prefill and decode apart
    decode_accelerators: Whole | None = None


class SystemUnderTest(Part):
    """All that a system file may say."""

    name: Text | None = None
    status: Literal["available", "preview", "research"] | None = None  # MLPerf's words
    nodes: Whole | None = None
    gpus: Whole | None = None  # behind the endpoint, as --gpus
    shape: Text | None = None  # of its machines, as in a price list
    region: Text | None = None
    metadata: dict[str, Text] = Field(default_factory=dict)  # as --metadata
    host: HostsOfServers | None = None
    accelerator: Accelerator | None = None
    engine: Engine | None = None
    model: ServedModel | None = None
    parallelism: Parallelism | None = None
    notes: Text | None = None


ASKED = {
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
"""Who asks for which keys, of those above."""


OF_THE_TARGET = ("gpus", "shape", "region")


class SystemDescription(NamedTuple):
    """The content of a system file.

    Attributes:
        metadata: Every key as text, such as `system.accelerator.model`, and the file's metadata.
        target: The values of the keys in OF_THE_TARGET.
    """

    metadata: dict[str, str]
    target: dict[str, Any]


def read_system_file(path: Path, env: Mapping[str, str] = os.environ) -> SystemDescription:
    """Read a system file.

    Raises UserError if the file cannot be read, and Faults with all mistakes in it.
    """
    text = read_yaml_text(path, f"--system {path}", "system file", lambda: _EXAMPLE, _EXAMPLE)
    document, faults = read_yaml(text, str(path), env, kind="system file", smallest=_SMALLEST)
    context = FileContext(file=str(path), directory=path.parent, errors=faults)
    system = validate_document(SystemUnderTest, document, context)
    if system is None or context.errors:
        raise CombinedError(sort_errors(context.errors))
    values = system.model_dump(exclude_none=True)
    target = {name: values.pop(name) for name in OF_THE_TARGET if name in values}
    metadata = values.pop("metadata")
    for key, text_of_value in _flatten(values):
        metadata[SYSTEM + key] = text_of_value
    return SystemDescription(metadata, target)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each value, with keys like `accelerator.model`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield prefix + key, "yes" if value else "no"
        else:
            yield prefix + key, str(value)


def missing_facts(metadata: Mapping[str, str], target: TargetFacts) -> dict[str, list[str]]:
    """Return the keys that are required by others and not known, by who requires them.

    A key is known from the metadata of the run or from what the target reports.
    """
    known_keys = {key.removeprefix(SYSTEM) for key in metadata if key.startswith(SYSTEM)}
    values_of_target = {
        "engine.name": target.server not in ("", "generic"),
        "engine.version": target.version,
        "model.precision": target.precision,
        "accelerator.per_node": target.gpus,
    }
    known_keys |= {key for key, value in values_of_target.items() if value}
    missing_keys = {
        organization: [key for key in keys if key not in known_keys]
        for organization, keys in ASKED.items()
    }
    return {organization: keys for organization, keys in missing_keys.items() if keys}
