"""Loads a contract file with its workloads and prices, and reports all faults in them at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from loadgen.contracts import lint
from loadgen.contracts.schema import (
    Checked,
    Contract,
    ContractLevel,
    Draft,
    WrittenTerm,
    find,
    plain,
    read_text,
    text_of,
)
from loadgen.cost import price_file
from loadgen.errors import Faults
from loadgen.workload.fields import Source
from loadgen.workload.messages import fault, in_order
from loadgen.workload.yaml_marks import Map


def load_contract(
    path: Path, *, gpus: int | None = None, repeats: int | None = None, env: Mapping[str, str] = os.environ
) -> Checked:
    """Load and check a contract: the path of a file, or the bare name of a packaged one.

    `repeats`: the number of runs of every level, instead of what the file says.

    Raises Faults with everything that is wrong: shape, units, unknown terms and workloads, contradictions, and samples
    too small for their terms.
    """
    file = find(path)
    label = str(path) if file == path else str(file)
    text = text_of(file, str(path))
    document, yaml_faults = read_text(text, label, env)
    levels = document.get("levels") if repeats is not None else None
    for level in levels if isinstance(levels, list) else ():
        if isinstance(level, Map):
            level["repeats"] = repeats
    source = Source(file=label, folder=file.parent, faults=yaml_faults)
    contract = None
    try:
        contract = Contract.model_validate(document, context=source)
    except ValidationError as error:
        source.faults.extend(fault(detail, document, label) for detail in error.errors(include_url=False))
    drafts = _drafts(document, Source(file=label, folder=file.parent))
    planned, contract_faults, other_faults = lint.check(
        drafts, document, label, file.parent, gpus=gpus, env=env, load_prices=price_file.load_prices
    )
    faults = in_order([*source.faults, *contract_faults]) + other_faults
    if faults or contract is None:
        raise Faults(faults)
    levels = tuple(replace(plan, level=level) for plan, level in zip(planned, contract.levels, strict=True))
    return Checked(contract=contract, levels=levels, text=text, file=label, folder=file.parent)


def _drafts(document: Map, source: Source) -> list[Draft]:
    """The parts of each level that can be parsed, so that one mistake does not hide other faults."""
    levels = document.get("levels")
    return [_draft(i, written, source) for i, written in enumerate(levels or ()) if isinstance(written, Map)]


def _draft(index: int, written_level: Map, source: Source) -> Draft:
    without_terms = Map(written_level.at)
    without_terms.path, without_terms.keys_at, without_terms.values_at = (
        written_level.path,
        written_level.keys_at,
        written_level.values_at,
    )
    known = set(ContractLevel.keys()) - {"must", "should"}
    without_terms.update((key, value) for key, value in written_level.items() if key in known)
    level = None
    try:
        level = ContractLevel.model_validate(without_terms, context=source)
    except ValidationError:
        pass
    terms = []
    for kind in ("must", "should"):
        written_terms = written_level.get(kind)
        for place, written in enumerate(written_terms if isinstance(written_terms, list) else ()):
            try:
                terms.append((kind, place, _ANY_TERM.validate_python(written, context=source)))
            except ValidationError:
                continue
    name, workload = (plain(written_level.get(key)) for key in ("name", "workload"))
    return Draft(index=index, name=name or "", workload=workload, level=level, terms=tuple(terms))


_ANY_TERM: TypeAdapter[Any] = TypeAdapter(WrittenTerm)
