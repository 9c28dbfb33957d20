"""The JSON Schemas of the files that people write: `loadgen export --schema KIND`."""

from __future__ import annotations

from typing import Any

from loadgen.core.errors import UserError
from loadgen.plugins import resolve

_TYPES = {
    "contract": ("loadgen.contracts.schema:Contract", "A contract of loadgen"),
    "prices": ("loadgen.pricing.prices:WrittenPrices", "Prices for loadgen"),
    "targets": ("loadgen.shell.targets:WrittenTargets", "The targets of a run of loadgen"),
}
"""The type that reads each kind of file, and the title of its schema.

The types are named by text because the command line must not import feature packages. The schema of
a workload file is built from several types.
"""
KINDS = ("workload", *_TYPES)


def schema(kind: str) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a kind of file, for editors that complete them.

    Raises UserError for an unknown kind.
    """
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
