"""The JSON Schema of the files that a user writes, for editors and forms. Pure."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from loadgen.core.workload.schema import Written


class _WithoutDefaults(GenerateJsonSchema):
    """Defaults are in checked units (ns, shares), not as a user writes them. See docs/workloads.md."""

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def schema_of(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The JSON Schema of a file that this model describes; values with units are strings with a pattern."""
    schema = model.model_json_schema(by_alias=True, schema_generator=_WithoutDefaults)
    for generated_name, definition in list(schema["$defs"].items()):  # generic types are named by repr
        own_title = definition.get("title", generated_name)
        if own_title != generated_name:
            schema = json.loads(json.dumps(schema).replace(json.dumps(generated_name)[1:-1], own_title))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a workload file, for editors."""
    schema = schema_of(Written, "A workload of loadgen")
    del schema["properties"]["slo"]["title"]  # pydantic gives one to types that are not its own
    schema["properties"]["classes"] = {"$ref": "#/$defs/Mix/properties/classes"}
    schema["properties"]["trace"] = deepcopy(schema["$defs"]["Replay"]["properties"]["trace"])
    del schema["properties"]["trace"]["anyOf"][1]["required"]  # beside --trace FILE it has no file
    schema["required"].remove("requests")
    schema["oneOf"] = [{"required": [key]} for key in ("requests", "classes", "trace")]
    return schema
