"""Describes the measured system in the files of the reference submission checker. Pure.

What the user states in a system file (`--system`) becomes the fields of section 8.2 of the rules.
A field that nobody stated is left out, so that the checker names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from loadgen.core.format import SYSTEM
from loadgen.mlperf.endpoints.curve_result import CurveResult, PointLoad

JsonObject = dict[str, object]

DATASET_LINK_KEY = "dataset_link"
POWER_SOURCE_KEY = "power_source"
"""The keys of `--metadata` for facts that a system file has no key for."""

MAX_SHORT_NAME = 20
"""The longest `shortened_system_name` (section 8.2)."""

NODE_TYPE_ID = 0
"""The number of the only type of nodes that a system file describes."""

REHEARSAL_STATUS = "RDI"
"""Division and availability of a rehearsal: Research, Development and Internal."""


class StatedFacts(NamedTuple):
    """What the user states about the system, and what the server reports about itself.

    Attributes:
        load: How the requests of a point were sent, with the metadata of its run.
    """

    load: PointLoad

    def find_text(self, key: str) -> str | None:
        """Return the value of a key of the system file, such as "host.os", or None."""
        return self.load.metadata.get(SYSTEM + key)

    def find_number(self, key: str) -> int | None:
        """Return the value of a key of the system file that is a count, or None."""
        text = self.find_text(key)
        return None if text is None else int(text)

    @property
    def model_precision(self) -> str:
        """The precision of the weights, as stated or as the server reports it. "" if unknown."""
        return self.find_text("model.precision") or self.load.precision

    @property
    def dataset_link(self) -> str:
        """The link to the data set. "" if it is not stated."""
        return self.load.metadata.get(DATASET_LINK_KEY, "")

    @property
    def accelerators(self) -> int | None:
        """All accelerators of the system. None if their number is not stated."""
        nodes = self.find_number("nodes")
        per_node = self.find_number("accelerator.per_node")
        if nodes is not None and per_node is not None:
            return nodes * per_node
        return self.load.gpus

    @property
    def serving_framework(self) -> str | None:
        """Name and version of the inference engine. None if it is not stated."""
        name = self.find_text("engine.name")
        version = self.find_text("engine.version")
        if name is None or version is None:
            return name
        return f"{name} {version}"


def add_stated_metadata(result: CurveResult, metadata: Mapping[str, str]) -> CurveResult:
    """Add facts that the user stated after the runs to each measurement point of a curve."""
    points = []
    for point in result.points:
        all_metadata = {**point.load.metadata, **metadata}
        load = replace(point.load, metadata=all_metadata)
        points.append(replace(point, load=load))

    return replace(result, points=tuple(points))


def system_directory_name(result: CurveResult) -> str:
    """Return the name of the system as a directory: only letters, digits, dots and dashes."""
    name = result.curve.target.removeprefix("simulated: ")
    safe_characters = []
    for character in name:
        is_safe = character.isalnum() or character in "._-"
        safe_characters.append(character if is_safe else "-")
    return f"REHEARSAL-{''.join(safe_characters)}"


def describe_system(result: CurveResult, load: PointLoad, *, mark: str) -> JsonObject:
    """Return the content of `system_desc.json`, which describes the measured system.

    Facts that the user did not state are left out. The fields are those of section 8.2 of the rules
    of MLPerf Endpoints.

    Args:
        result: The measured curve.
        load: How the requests of a measurement point were sent, with the facts about the system.
        mark: The text that marks the file as a rehearsal.
    """
    facts = StatedFacts(load)
    accelerators = facts.accelerators
    simulated = "simulated server" if result.curve.is_simulated else None

    # Fields that are None if nobody stated the fact.
    stated: JsonObject = {
        "system_size": None if accelerators is None else f"{accelerators} accelerators",
        "system_node_ensemble_count": 1 if facts.find_number("nodes") else None,
        "system_node_ensemble_total": facts.find_number("nodes"),
        "endpoint_url": simulated,
        "serving_framework": facts.serving_framework or simulated,
        "node_types": _describe_node_types(facts),
        "node_config": facts.find_text("engine.arguments"),
        "tensor_parallel": facts.find_number("parallelism.tensor"),
        "pipeline_parallel": facts.find_number("parallelism.pipeline"),
        "expert_parallel": facts.find_number("parallelism.expert"),
        "data_parallel": facts.find_number("parallelism.data"),
    }

    return {
        "division": REHEARSAL_STATUS,
        "system_name": f"{mark}: {facts.find_text('name') or result.curve.target}",
        "shortened_system_name": system_directory_name(result)[:MAX_SHORT_NAME],
        "system_availability_status": REHEARSAL_STATUS,
        "max_supported_concurrency": result.curve.curve.c_max,
        **_without_unknown(stated),
        "sw_notes": mark,
    }


def _describe_node_types(facts: StatedFacts) -> list[JsonObject] | None:
    """Return the description of a node (a server) of the system, in a list of one entry.

    The list is that of the types of nodes, and here all nodes have the same type. Return None if
    the user stated nothing about nodes. The host's memory and network each fill two fields, because
    the user states capacity and configuration in one text.
    """
    node = _without_unknown(_describe_host(facts))
    accelerator: JsonObject = _without_unknown(
        {
            "accelerator_model_name": facts.find_text("accelerator.model"),
            "accelerators_per_node": facts.find_number("accelerator.per_node"),
            "accelerator_memory_capacity": facts.find_text("accelerator.memory"),
            "accelerator_interconnect": facts.find_text("accelerator.interconnect"),
        }
    )
    if not node and not accelerator:
        return None

    accelerators = [accelerator] if accelerator else []
    return [{"system_node_ensemble_id": NODE_TYPE_ID, **node, "accelerator_info": accelerators}]


def _describe_host(facts: StatedFacts) -> JsonObject:
    """Return the fields about the host of a node, None for what the user did not state."""
    memory = facts.find_text("host.memory")
    network = facts.find_text("host.network")
    sockets = facts.find_number("host.sockets")
    cores = facts.find_number("host.cores")
    cores_per_processor = cores // sockets if cores and sockets else None

    return {
        "number_of_nodes": facts.find_number("nodes"),
        "host_processor_model_name": facts.find_text("host.processor"),
        "host_processors_per_node": sockets,
        "host_processor_core_count": cores_per_processor,
        "host_memory_capacity": memory,
        "host_memory_configuration": memory,
        "host_network_card_count": network,
        "host_networking": network,
        "host_storage_capacity": facts.find_text("host.storage"),
        "filesystem": facts.find_text("host.filesystem"),
        "operating_system": facts.find_text("host.os"),
        "cooling": facts.find_text("accelerator.cooling"),
        "driver": facts.find_text("accelerator.driver"),
        "inference_backend": facts.find_text("engine.name"),
        "container_link": facts.find_text("engine.image"),
    }


def describe_power(result: CurveResult, *, mark: str) -> JsonObject:
    """Return the content of `system_power.json`, the provisioned power of the system.

    The power is declared only if the user states a public source for it, as Appendix E of the rules
    requires. Facts that the user did not state are left out.
    """
    facts = StatedFacts(result.points[0].load)
    power_kw = result.curve.provisioned_power_kw
    source = facts.load.metadata.get(POWER_SOURCE_KEY)
    nodes = facts.find_number("nodes")

    declared_power: JsonObject = {}
    if power_kw is not None and source is not None:
        declared_power = _declare_power(power_kw, source, nodes)

    # The network between several nodes also needs power, which a system file does not state.
    has_single_node = nodes == 1
    return _without_unknown(
        {
            "rehearsal": mark,
            "system_desc_id": system_directory_name(result),
            "cooling": _cooling_class(facts.find_text("accelerator.cooling")),
            "provisioned_power_kw": power_kw,
            **declared_power,
            "scale_out": {"present": False} if has_single_node else None,
        }
    )


def _declare_power(power_kw: float, source: str, nodes: int | None) -> JsonObject:
    """Return the fields that declare the power of a system, and of each node if they are counted.

    Args:
        power_kw: The power of the whole system.
        source: The public document that states it.
        nodes: The number of nodes, which all have the same power. None if it is not stated.
    """
    fields: JsonObject = {"declared_provisioned_power": _sourced_power(power_kw, source)}
    if nodes is not None:
        power_of_node = _sourced_power(power_kw / nodes, source)
        fields["node_sets"] = [_node_set(nodes, power_of_node)]
    return fields


def _sourced_power(power_kw: float, source: str) -> JsonObject:
    """Return a power with the public document that states it (Appendix E.1)."""
    return {"value_kw": power_kw, "source_type": "publication", "source": source}


def _node_set(nodes: int, power_of_node: JsonObject) -> JsonObject:
    """Return the description of the nodes (servers) of the system, with the power of one node.

    Args:
        nodes: The number of nodes.
        power_of_node: The published power of one node (Appendix E.3 of the rules).
    """
    return {
        "node_set_id": NODE_TYPE_ID,
        "system_node_ensemble_id": NODE_TYPE_ID,
        "nodes_provisioned": nodes,
        "power_method": "published_system",
        "published_power": power_of_node,
    }


def _cooling_class(cooling: str | None) -> Literal["liquid", "air"] | None:
    """Return whether a cooling is by liquid or by air, or None if its description says neither.

    Args:
        cooling: The description, such as "liquid, by a CDU". None if there is none.
    """
    text = (cooling or "").lower()
    if "liquid" in text or "water" in text:
        return "liquid"
    if "air" in text:
        return "air"
    return None


def _without_unknown(fields: JsonObject) -> JsonObject:
    """Return the fields whose value is known."""
    return {name: value for name, value in fields.items() if value is not None}
