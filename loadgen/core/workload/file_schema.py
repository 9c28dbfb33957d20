"""The JSON Schema of the files that a user writes, for editors and forms. Pure."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from loadgen.core.workload.fields import Part
from loadgen.core.workload.schema import Written
from loadgen.plain_reading import twins


def schema_of(part: type[Part], title: str) -> dict[str, Any]:
    """The JSON Schema of a file that this part describes; values with units are strings with a pattern."""
    schema = twins().json_schema(part)
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
