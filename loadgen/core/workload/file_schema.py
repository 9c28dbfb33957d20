"""The JSON Schemas of the files that a user writes, for editors and forms."""

from __future__ import annotations

from copy import deepcopy
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

    pydantic generates the schema of the model, in which a workload has the key `requests`. Two
    other forms are added that `WorkloadFile` converts to it: `classes` and `trace`.
    """
    schema = file_json_schema(WorkloadFile, "A loadgen workload")
    properties = schema["properties"]
    properties["classes"] = {"$ref": "#/$defs/Mix/properties/classes"}
    # A `trace` is the name of a file or a mapping, as in the arrival process `trace`. In a workload
    # the mapping need not name the file, because `--trace FILE` may do so.
    trace_schema = deepcopy(schema["$defs"]["Replay"]["properties"]["trace"])
    _, mapping_schema = trace_schema["anyOf"]
    del mapping_schema["required"]
    properties["trace"] = trace_schema
    schema["required"].remove("requests")
    schema["oneOf"] = [{"required": [key]} for key in ("requests", "classes", "trace")]
    return schema
