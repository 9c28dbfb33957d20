"""`loadgen schema`: the JSON Schemas of the files that people write, for editors that complete them.

Each is defined where such a file is read.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from loadgen.plugins import resolve
from loadgen.shell.output import print_json


class FileKind(StrEnum):
    """The files that people write."""

    workload = "workload"
    contract = "contract"
    prices = "prices"
    targets = "targets"


def schema(
    kind: Annotated[FileKind, typer.Argument(help="The kind of file.", show_default=True)] = FileKind.workload,
) -> None:
    """Print the JSON Schema of a workload, contract, price or targets file (draft 2020-12).

    Example: loadgen schema > workload.schema.json
    """
    print_json(_schema(kind))


_TYPES = {
    FileKind.contract: ("loadgen.contracts.schema:Contract", "A contract of loadgen"),
    FileKind.prices: ("loadgen.pricing.prices:WrittenPrices", "Prices for loadgen"),
    FileKind.targets: ("loadgen.shell.targets:WrittenTargets", "The targets of a run of loadgen"),
}
"""The type of each file, as text, and its title; of a workload file several types make the schema."""


def _schema(kind: FileKind) -> dict[str, Any]:
    from loadgen.core.workload import json_schema, schema_of

    if kind not in _TYPES:
        return json_schema()
    reference, title = _TYPES[kind]
    return schema_of(resolve(reference), title)
