"""The JSON Schemas of the files that people write: `loadgen export --schema KIND`."""

from __future__ import annotations

from loadgen.core.errors import UserError

KINDS = ("workload", "contract", "prices", "targets")


def build_file_schema(kind: str) -> dict[str, object]:
    """Return the JSON Schema (draft 2020-12) of a kind of file that people write.

    Editors use it to complete and check such files. `KINDS` lists the kinds.

    Raises UserError for an unknown kind.
    """
    from loadgen.core.workload import file_json_schema, workload_json_schema

    match kind:
        case "workload":
            return workload_json_schema()
        case "contract":
            from loadgen.contracts.schema import Contract

            return file_json_schema(Contract, "A contract of loadgen")
        case "prices":
            from loadgen.pricing.prices import PriceDocument

            return file_json_schema(PriceDocument, "Prices for loadgen")
        case "targets":
            from loadgen.cli.targets import WrittenTargets

            return file_json_schema(WrittenTargets, "The targets of a loadgen run")

    known = ", ".join(KINDS)
    raise UserError(
        "unknown_name",
        f'unknown kind of file: "{kind}"',
        f"--schema {kind}",
        f"known: {known}",
    )
