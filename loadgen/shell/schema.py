"""`loadgen schema`: the JSON Schemas of the files that people write, for editors that complete them.

Each is defined where such a file is read.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

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


def _schema(kind: FileKind) -> dict[str, Any]:
    from loadgen.core.workload import json_schema, schema_of

    if kind is FileKind.contract:
        from loadgen.contracts.schema import Contract

        return schema_of(Contract, "A contract of loadgen")
    if kind is FileKind.prices:
        from loadgen.pricing.prices import WrittenPrices

        return schema_of(WrittenPrices, "Prices for loadgen")
    if kind is FileKind.targets:
        from loadgen.core.execution.targets import WrittenTargets

        return schema_of(WrittenTargets, "The targets of a run of loadgen")
    return json_schema()
