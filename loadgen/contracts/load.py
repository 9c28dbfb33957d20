"""A contract from its file, with its workloads and prices; everything that is wrong with them is told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from loadgen.contracts import lint
from loadgen.contracts.schema import Checked, Contract, ContractLevel, Draft, Term, find, plain, read_text, text_of
from loadgen.cost import price_file
from loadgen.errors import Faults
from loadgen.workload.fields import Source
from loadgen.workload.messages import fault, in_order
from loadgen.workload.yaml_marks import Map


def load_contract(path: Path, *, gpus: int | None = None, env: Mapping[str, str] = os.environ) -> Checked:
    """The checked contract of a file, or of a shipped one's bare name. Raises Faults with everything that is wrong:
    shape, units, unknown terms and workloads, contradictions, samples that cannot support what they are to show."""
    file = find(path)
    label = str(path) if file == path else str(file)
    text = text_of(file, str(path))
    top, found = read_text(text, label, env)
    source = Source(file=label, folder=file.parent, faults=found)
    contract = None
    try:
        contract = Contract.model_validate(top, context=source)
    except ValidationError as error:
        source.faults.extend(fault(item, top, label) for item in error.errors(include_url=False))
    drafts = _drafts(top, Source(file=label, folder=file.parent))
    planned, here, elsewhere = lint.check(
        drafts, top, label, file.parent, gpus=gpus, env=env, load_prices=price_file.load_prices
    )
    faults = in_order([*source.faults, *here]) + elsewhere
    if faults or contract is None:
        raise Faults(faults)
    levels = tuple(replace(plan, level=level) for plan, level in zip(planned, contract.levels, strict=True))
    return Checked(contract=contract, levels=levels, text=text, file=label, folder=file.parent)


def _drafts(top: Map, source: Source) -> list[Draft]:
    """Each level as far as it can be understood, so that one slip of the pen does not hide what else is wrong."""
    levels = top.get("levels")
    return [_draft(i, raw, source) for i, raw in enumerate(levels or ()) if isinstance(raw, Map)]


def _draft(index: int, raw: Map, source: Source) -> Draft:
    frame = Map(raw.at)
    frame.path, frame.keys_at, frame.values_at = raw.path, raw.keys_at, raw.values_at
    known = set(ContractLevel.keys()) - {"must", "should"}
    frame.update((key, value) for key, value in raw.items() if key in known)
    level = None
    try:
        level = ContractLevel.model_validate(frame, context=source)
    except ValidationError:
        pass
    terms = []
    for which in ("must", "should"):
        listed = raw.get(which)
        for place, written in enumerate(listed if isinstance(listed, list) else ()):
            try:
                terms.append((which, place, _ANY_TERM.validate_python(written, context=source)))
            except ValidationError:
                continue
    name, workload = (plain(raw.get(key)) for key in ("name", "workload"))
    return Draft(index=index, name=name or "", workload=workload, level=level, terms=tuple(terms))


_ANY_TERM: TypeAdapter[Any] = TypeAdapter(Term)
