"""Load a contract file with its workloads and prices, and report all errors in them at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError

from loadgen.answers.questions import read_questions
from loadgen.contracts import lint
from loadgen.contracts.drafts import LevelDraft, PlacedTerm
from loadgen.contracts.level_plan import CheckedContract, LevelPlan
from loadgen.contracts.lint import LintInputs
from loadgen.contracts.schema import (
    Contract,
    ContractLevel,
    Requirement,
    find_contract_file,
    read_contract_document,
    read_contract_text,
)
from loadgen.contracts.term_fields import TermInFile
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
    has_other_endpoint: bool = False,
    max_duration_ns: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> CheckedContract:
    """Load and check a contract.

    Args:
        path: The path of a file, or the bare name of a packaged contract.
        gpus: The number of GPUs that the user gave, if any.
        repeats: The number of runs of every level, instead of the number in the file.
        has_other_endpoint: Whether the user gave another endpoint to compare responses with.
        max_duration_ns: The maximum length of the load of a level. A term that cannot pass in a
            shortened load is no error; the plan of the level names it.
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
    if repeats is not None:
        _set_repeats(document, repeats)

    context = FileContext(file=label, directory=file.parent, errors=yaml_errors)
    contract = validate_document(Contract, document, context)

    # The validation of the whole document ends a part at its first error. To find the other errors,
    # each part is parsed again by itself and checked as far as possible.
    source = ContractSource(document, label, file.parent)
    findings = lint.check_contract(
        LintInputs(
            contract=source.parse_contract_without_levels(),
            drafts=source.parse_level_drafts(),
            document=document,
            file=label,
            directory=file.parent,
            gpus=gpus,
            max_duration_ns=max_duration_ns,
            has_other_endpoint=has_other_endpoint,
            env=env,
            load_prices=price_file.load_prices,
            read_questions=read_questions,
        )
    )
    errors = sort_errors([*context.errors, *findings.contract_errors]) + findings.other_errors
    if errors or contract is None:
        raise CombinedError(errors)

    return CheckedContract(
        contract=contract,
        levels=_attach_checked_levels(findings.plans, contract),
        text=text,
        resolved_text=_format_resolved_contract(text, document),
        file=label,
        directory=file.parent,
    )


def _set_repeats(document: Map, repeats: int) -> None:
    """Set the number of runs of every level in the document of a contract."""
    for level in _find_level_mappings(document).values():
        level["repeats"] = repeats


def _attach_checked_levels(plans: Sequence[LevelPlan], contract: Contract) -> tuple[LevelPlan, ...]:
    """Return the plans with the levels of the contract in place of the levels of the drafts.

    The level of a draft has no terms, because its terms are parsed one by one.
    """
    return tuple(
        replace(plan, level=level) for plan, level in zip(plans, contract.levels, strict=True)
    )


def _format_resolved_contract(text: str, document: Map) -> str:
    """Return a contract with the values of its environment variables, or "" if it names none."""
    return json.dumps(document, indent=2) + "\n" if "${" in text else ""


def _find_level_mappings(document: Map) -> dict[int, Map]:
    """Return the levels of a document that are mappings, by their index in the list."""
    levels = document.get("levels")
    if not isinstance(levels, list):
        return {}
    return {index: level for index, level in enumerate(levels) if isinstance(level, Map)}


class ContractSource:
    """The document of a contract, whose parts are parsed one by one.

    An error in one part does not prevent that other parts are parsed and checked. Errors are not
    reported here: the validation of the whole document has reported them.
    """

    def __init__(self, document: Map, label: str, directory: Path) -> None:
        """Parse a document that was read from a file of this name, in this directory."""
        self._document = document
        self._context = FileContext(file=label, directory=directory)

    def parse_contract_without_levels(self) -> Contract:
        """Return the contract without its levels, which are parsed as drafts.

        If the value of a key is wrong, the key is left out and the contract has the default
        instead, so that the rest can be checked.
        """
        known_keys = Contract.yaml_keys()
        values = {key: value for key, value in self._document.items() if key in known_keys}
        values |= {"name": "contract", "levels": ()}  # both are required

        try:
            return Contract.model_validate(values, context=self._context)
        except ValidationError as invalid:
            # The location of an error begins with the key of the file, such as ("slo", "ttft").
            wrong_keys = {error["loc"][0] for error in invalid.errors()}

        valid_values = {key: value for key, value in values.items() if key not in wrong_keys}
        return Contract.model_validate(valid_values, context=self._context)

    def parse_level_drafts(self) -> list[LevelDraft]:
        """Return what can be parsed of each level that is a mapping."""
        return [
            self._parse_level_draft(index, level)
            for index, level in _find_level_mappings(self._document).items()
        ]

    def _parse_level_draft(self, index: int, level_mapping: Map) -> LevelDraft:
        """Return a level as far as it is valid: its load, and each term that is valid by itself.

        Further checks can then report their errors too. An invalid load becomes None. Its errors
        are not raised here, because the validation of the whole document reports them.

        Args:
            index: The index of the level in the contract.
            level_mapping: The level in the YAML document.
        """
        # The keys of a level are those of its load, and `must` and `should` with its terms.
        load_keys = set(ContractLevel.yaml_keys()) - set(REQUIREMENTS)
        load_values = {key: value for key, value in level_mapping.items() if key in load_keys}

        level: ContractLevel | None
        try:
            level = ContractLevel.model_validate(load_values, context=self._context)
        except ValidationError:
            level = None

        return LevelDraft(
            index=index,
            name=_format_scalar(level_mapping.get("name")) or "",
            workload=_format_scalar(level_mapping.get("workload")),
            level=level,
            terms=tuple(self._parse_valid_terms(level_mapping)),
        )

    def _parse_valid_terms(self, level_mapping: Map) -> Iterator[PlacedTerm]:
        """Yield the terms of a level that are valid, with their places in the file.

        The error of any other term was reported by the validation of the whole document.
        """
        adapter: TypeAdapter[ContractTerm] = TypeAdapter(TermInFile)
        for requirement in REQUIREMENTS:
            term_values = level_mapping.get(requirement)
            if not isinstance(term_values, list):
                continue
            for index, term_value in enumerate(term_values):
                with suppress(ValidationError):
                    term = adapter.validate_python(term_value, context=self._context)
                    yield PlacedTerm(requirement, index, term)


def _format_scalar(value: object) -> str | None:
    """Return a text or number of the file as text, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)
