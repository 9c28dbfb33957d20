"""Load a contract file with its workloads and prices, and report all errors in them at once."""

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
from loadgen.contracts.drafts import LevelDraft, PlacedTerm
from loadgen.contracts.level_plan import CheckedContract
from loadgen.contracts.lint import LintInputs
from loadgen.contracts.schema import (
    Contract,
    ContractLevel,
    Requirement,
    find_contract_file,
    read_contract_document,
    read_contract_text,
)
from loadgen.contracts.term_fields import WrittenTerm
from loadgen.contracts.terms import ContractTerm
from loadgen.core.errors import CombinedError
from loadgen.core.workload.diagnostics import sort_errors, validate_document
from loadgen.core.workload.file_models import FileContext
from loadgen.core.workload.yaml_marks import Map
from loadgen.pricing import price_file

REQUIREMENTS: tuple[Requirement, ...] = ("must", "should")


def load_contract(
    path: Path,
    *,
    gpus: int | None = None,
    repeats: int | None = None,
    against: bool = False,
    longest_ns: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> CheckedContract:
    """Load and check a contract.

    Args:
        path: The path of a file, or the bare name of a packaged contract.
        gpus: The number of GPUs that the user gave, if any.
        repeats: The number of runs of every level, instead of what the file says.
        against: Whether the user gave another endpoint to compare answers with.
        longest_ns: The maximum length of the load of a level. Terms that cannot pass in a
            shortened load are no errors; the plan of the level names them.
        env: The environment variables that the file may name.

    Raises:
        UserError: The file cannot be read.
        CombinedError: The contract has errors: wrong shapes or units, unknown terms or workloads,
            contradictions, or samples too small for their terms. It holds all of them.
    """
    file = find_contract_file(path)
    label = str(path) if file == path else str(file)
    text = read_contract_text(file, str(path))
    document, yaml_errors = read_contract_document(text, label, env)
    written_levels = _written_levels(document)
    if repeats is not None:
        for level in written_levels.values():
            level["repeats"] = repeats
    context = FileContext(file=label, directory=file.parent, errors=yaml_errors)
    contract = validate_document(Contract, document, context)
    # The drafts are validated again by themselves. Errors in them are already in `context`.
    draft_context = FileContext(file=label, directory=file.parent)
    findings = lint.check_contract(
        LintInputs(
            contract=_validate_without_levels(document, draft_context),
            drafts=[
                _validate_draft(index, level, draft_context)
                for index, level in written_levels.items()
            ],
            document=document,
            file=label,
            directory=file.parent,
            gpus=gpus,
            max_duration_ns=longest_ns,
            has_other_endpoint=against,
            env=env,
            load_prices=price_file.load_prices,
            read_questions=read_questions,
        )
    )
    errors = sort_errors([*context.errors, *findings.contract_errors]) + findings.other_errors
    if errors or contract is None:
        raise CombinedError(errors)
    plans = tuple(
        replace(plan, level=level)
        for plan, level in zip(findings.plans, contract.levels, strict=True)
    )
    names_variables = "${" in text
    return CheckedContract(
        contract=contract,
        levels=plans,
        text=text,
        resolved_text=json.dumps(document, indent=2) + "\n" if names_variables else "",
        file=label,
        directory=file.parent,
    )


def _written_levels(document: Map) -> dict[int, Map]:
    """Return the levels of a document that are mappings, by their index in the list."""
    levels = document.get("levels")
    if not isinstance(levels, list):
        return {}
    return {index: level for index, level in enumerate(levels) if isinstance(level, Map)}


def _validate_without_levels(document: Map, context: FileContext) -> Contract:
    """Return what can be parsed of a contract without its levels. A wrong value is left out.

    Other checks can then still report their errors.
    """
    known_keys = Contract.yaml_keys()
    values = {key: value for key, value in document.items() if key in known_keys}
    values |= {"name": "contract", "levels": ()}
    try:
        return Contract.model_validate(values, context=context)
    except ValidationError as invalid:
        wrong_keys = {error["loc"][0] for error in invalid.errors()}
        values = {key: value for key, value in values.items() if key not in wrong_keys}
        return Contract.model_validate(values, context=context)


def _validate_draft(index: int, written: Map, context: FileContext) -> LevelDraft:
    """Return what can be parsed of a level, so that one mistake does not hide others.

    The terms are validated one by one, apart from the other values of the level.
    """
    keys = set(ContractLevel.yaml_keys()) - set(REQUIREMENTS)
    values = {key: value for key, value in written.items() if key in keys}
    level: ContractLevel | None
    try:
        level = ContractLevel.model_validate(values, context=context)
    except ValidationError:
        level = None
    return LevelDraft(
        index=index,
        name=_scalar_text(written.get("name")) or "",
        workload=_scalar_text(written.get("workload")),
        level=level,
        terms=tuple(_valid_terms(written, context)),
    )


def _scalar_text(value: object) -> str | None:
    """Return a text or number of the file as text, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)


def _valid_terms(written: Map, context: FileContext) -> Iterator[PlacedTerm]:
    """Yield the terms of a level that are valid, with their places in the file.

    Invalid terms are skipped: their errors come from the validation of the whole contract.
    """
    adapter: TypeAdapter[ContractTerm] = TypeAdapter(WrittenTerm)
    for requirement in REQUIREMENTS:
        terms = written.get(requirement)
        if not isinstance(terms, list):
            continue
        for index, value in enumerate(terms):
            with suppress(ValidationError):
                term = adapter.validate_python(value, context=context)
                yield PlacedTerm(requirement, index, term)
