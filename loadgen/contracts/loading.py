"""Loads a contract file with its workloads and prices, and reports all faults in them at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError

from loadgen.answers.questions import read_questions
from loadgen.contracts import lint
from loadgen.contracts.schema import (
    Checked,
    Contract,
    ContractLevel,
    Draft,
    Promise,
    WrittenPromise,
    find,
    plain,
    read_document,
    text_of,
)
from loadgen.core.errors import CombinedError
from loadgen.core.workload.diagnostics import sort_errors, validate_document
from loadgen.core.workload.file_models import FileContext
from loadgen.core.workload.yaml_marks import Map
from loadgen.pricing import price_file


def load_contract(
    path: Path,
    *,
    gpus: int | None = None,
    repeats: int | None = None,
    against: bool = False,
    longest_ns: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> Checked:
    """Load and check a contract: the path of a file, or the bare name of a packaged one.

    `repeats`: the number of runs of every level, instead of what the file says. `longest_ns`: no level's load is
    longer; terms that then cannot pass are no faults, but named in the plan. `against`: whether another endpoint was
    given for the answers.

    Raises UserError for a file that cannot be read, and Faults with everything that is wrong in it: shape, units,
    unknown terms and workloads, contradictions, and samples too small for their terms.
    """
    file = find(path)
    label = str(path) if file == path else str(file)
    text = text_of(file, str(path))
    document, yaml_faults = read_document(text, label, env)
    levels = document.get("levels")
    written = [
        (i, level)
        for i, level in enumerate(levels if isinstance(levels, list) else ())
        if isinstance(level, Map)
    ]
    if repeats is not None:
        for _, level in written:
            level["repeats"] = repeats
    source = FileContext(file=label, directory=file.parent, errors=yaml_faults)
    contract = validate_document(Contract, document, source)
    scratch = FileContext(file=label, directory=file.parent)
    drafts = [_validate_draft(i, level, scratch) for i, level in written]
    top = _validate_without_levels(document, scratch)
    planned, contract_faults, other_faults = lint.check(
        top,
        drafts,
        document,
        label,
        file.parent,
        gpus=gpus,
        longest_ns=longest_ns,
        env=env,
        load_prices=price_file.load_prices,
        read_questions=read_questions,
        against=against,
    )
    faults = sort_errors([*source.errors, *contract_faults]) + other_faults
    if faults or contract is None:
        raise CombinedError(faults)
    plans = tuple(
        replace(plan, level=level) for plan, level in zip(planned, contract.levels, strict=True)
    )
    resolved = json.dumps(document, indent=2) + "\n" if "${" in text else ""  # JSON is YAML
    return Checked(
        contract=contract,
        levels=plans,
        text=text,
        resolved=resolved,
        file=label,
        folder=file.parent,
    )


def _validate_without_levels(document: Map, context: FileContext) -> Contract:
    """Return what can be parsed of a contract without its levels. A wrong value is left out."""
    known_keys = Contract.yaml_keys()
    values = {key: value for key, value in document.items() if key in known_keys}
    values |= {"name": "contract", "levels": ()}
    try:
        return Contract.model_validate(values, context=context)
    except ValidationError as invalid:
        wrong_keys = {error["loc"][0] for error in invalid.errors()}
        values = {key: value for key, value in values.items() if key not in wrong_keys}
        return Contract.model_validate(values, context=context)


def _validate_draft(index: int, written: Map, context: FileContext) -> Draft:
    """Return what can be parsed of a level, so that one mistake does not hide others."""
    keys = set(ContractLevel.yaml_keys()) - {"must", "should"}
    values = {key: value for key, value in written.items() if key in keys}
    level: ContractLevel | None
    try:
        level = ContractLevel.model_validate(values, context=context)
    except ValidationError:
        level = None
    return Draft(
        index=index,
        name=plain(written.get("name")) or "",
        workload=plain(written.get("workload")),
        level=level,
        terms=tuple(_valid_terms(written, context)),
    )


def _valid_terms(written: Map, context: FileContext) -> Iterator[tuple[str, int, Promise]]:
    """Yield the terms of a level that are valid, each with the key of its list and its place in this list."""
    adapter: TypeAdapter[Promise] = TypeAdapter(WrittenPromise)
    for key in ("must", "should"):
        terms = written.get(key)
        if not isinstance(terms, list):
            continue
        for place, term in enumerate(terms):
            with suppress(ValidationError):
                yield key, place, adapter.validate_python(term, context=context)
