"""The JSON Schemas of the files that people write, for editors that complete them: `loadgen export --schema KIND`.

Each is defined where such a file is read.
"""

from __future__ import annotations

from typing import Any

from loadgen.core.errors import UserError
from loadgen.plugins import resolve

_TYPES = {
    "contract": ("loadgen.contracts.schema:Contract", "A contract of loadgen"),
    "prices": ("loadgen.pricing.prices:WrittenPrices", "Prices for loadgen"),
    "targets": ("loadgen.shell.targets:WrittenTargets", "The targets of a run of loadgen"),
}
"""The type of each file, as text, and its title; of a workload file several types make the schema."""
KINDS = ("workload", *_TYPES)


def schema(kind: str) -> dict[str, Any]:
    """The schema (draft 2020-12) of a kind of file. Raises UserError where there is no such kind."""
    from loadgen.core.workload import json_schema, schema_of

    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(
            "unknown_name", f'no kind of file: "{kind}"', f"--schema {kind}", f"known: {known}"
        )
    if kind == "workload":
        return json_schema()
    reference, title = _TYPES[kind]
    return schema_of(resolve(reference), title)
