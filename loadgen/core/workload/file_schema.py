"""The JSON Schemas of the files that a user writes, for editors and forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from loadgen.core.workload.file_models import Part
from loadgen.core.workload.schema import WorkloadFile


class _WithoutDefaults(GenerateJsonSchema):
    """Leaves out the defaults.

    Defaults have other units (ns, shares) than the values that a user writes.
    """

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def file_json_schema(model: type[Part], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a file that a model describes.

    Values with units are strings with a pattern.
    """
    schema = model.model_json_schema(schema_generator=_WithoutDefaults)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def workload_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a workload file, for editors.

    pydantic generates the schema of the model, in which the key `requests` is required. In a file,
    one of the keys `classes` and `trace` can take its place. `WorkloadFile` converts them to
    `requests`, so they are no fields of the model and are added here.
    """
    schema = file_json_schema(WorkloadFile, "A loadgen workload")
    properties = schema["properties"]
    properties["classes"] = {"$ref": "#/$defs/Mix/properties/classes"}
    properties["trace"] = _trace_schema(schema["$defs"])
    schema["required"].remove("requests")
    schema["oneOf"] = [{"required": [key]} for key in ("requests", "classes", "trace")]
    return schema


def _trace_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of the key `trace` of a workload: a file name or a mapping.

    The key accepts what the arrival process `{trace: ...}` accepts. But a workload need not name
    the file, because `--trace FILE` may do so. So no key of the mapping is required.
    """
    arrival_schema: dict[str, Any] = definitions["Replay"]["properties"]["trace"]
    # The alternatives are the schemas of a file name and of a mapping.
    alternatives = [_without_required_keys(schema) for schema in arrival_schema["anyOf"]]
    return arrival_schema | {"anyOf": alternatives}


def _without_required_keys(schema: Mapping[str, object]) -> dict[str, Any]:
    """Return a schema whose keys are all optional. Only the schema of a mapping has such a list."""
    return {keyword: value for keyword, value in schema.items() if keyword != "required"}
