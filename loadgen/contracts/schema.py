"""The contract file: its levels and settings, parsed from YAML. All errors are reported at once.

A level of a contract is one load with the terms that must pass under it. `terms.py` defines the
terms. `lint.py` finds contradictions, and terms that no run of the level could decide.
docs/reference/contract-file.md documents the keys of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, Strict

from loadgen.contracts.term_fields import AnswerTermInFile, TermInFile
from loadgen.contracts.terms import ContractTerm
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.units import InvalidValueError
from loadgen.core.workload.diagnostics import sort_errors, validate_document
from loadgen.core.workload.fields import Count, Duration, FiniteRate, Share
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.slo_fields import SloField
from loadgen.core.workload.stages import Concurrency
from loadgen.core.workload.workload_files import packaged_files, read_yaml_text
from loadgen.core.workload.yaml_marks import Map, read_yaml
from loadgen.repeated.capacity import HORIZON_S

EXAMPLE_HINT = (
    "a contract needs name, and levels: "
    "[{name: load, workload: qa, rate: 10/s, requests: 700, must: [...]}]"
)

HORIZON_NS = round(HORIZON_S * 1e9)
"""The default of a contract's `horizon`: the recurrence horizon.

A PASS of a latency covers slowdowns of the server that recur at least once within this time. A load
that never met a slowdown has no record of it, so rarer ones may be missed. With loads that are long
enough for 12 minutes, at most 5 of 200 verdicts in benchmarks/trust.py are a wrong PASS, on servers
that change every 400 s.
"""

ANSWERS_LEVEL = "answers"
"""The name under which results list the verdict on responses, next to the levels."""

Requirement = Literal["must", "should"]
"""The list of the contract that a term is in.

Terms in the list `must` decide the verdict. Terms in the list `should` are judged and reported.
"""

LevelName = Annotated[
    str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
]


def _auto_to_none(value: object) -> object:
    """Return None for `auto`, and any other value unchanged."""
    return None if value == "auto" else value


def _refuse_no_levels(value: object) -> object:
    """Return the list of levels unchanged. Raise InvalidValueError if it is empty."""
    if value == []:
        raise InvalidValueError(
            "missing_value",
            "must have at least one level",
            "levels: [{name: load, workload: qa, must: [{ttft: 2s}]}]",
        )
    return value


AutoDuration = Annotated[
    Annotated[Duration, Field(gt=0)] | None,
    BeforeValidator(_auto_to_none, json_schema_input_type=Duration | Literal["auto"]),
]
"""The length of a level's load.

It is None if it is `auto` or left out: then the terms decide how long the load is.
"""


class ContractLevel(Part):
    """One load, and the terms that must pass under it.

    What is None here, such as the rate, is taken from the workload file.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "request_rate": "rate",
        "count": "requests",
        "num_requests": "requests",
        "runs": "repeats",
        "terms": "must",
    }
    name: LevelName
    description: str = ""
    # The name of a packaged workload, or a path relative to the contract.
    workload: Annotated[str, Field(min_length=1)]
    rate: FiniteRate | None = None
    concurrency: Concurrency | None = None
    duration_ns: AutoDuration = Field(None, validation_alias="duration")
    requests: Count | None = None
    warmup_ns: Duration | None = Field(None, validation_alias="warmup")
    grace_ns: Duration | None = Field(None, validation_alias="grace")
    repeats: Annotated[int, Strict(), Field(ge=1, le=100)] = 1
    apart_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="apart")
    cache: Literal["cold", "warm"] | None = None
    slo: SloField = None
    must: tuple[TermInFile, ...] = ()
    should: tuple[TermInFile, ...] = ()

    def terms_by_requirement(self) -> list[tuple[Requirement, ContractTerm]]:
        """Return all terms in the order of the results, each with the list that it is in."""
        return _terms_by_requirement(self)


class AnswerCheck(Part):
    """The prompts whose responses are scored, and the terms about the scores.

    The prompts are sent after the load of all levels.
    """

    synonyms: ClassVar[dict[str, str]] = {"output_tokens": "max_tokens", "terms": "must"}
    dataset: Annotated[str, Field(min_length=1)]  # a JSONL file, relative to the contract
    rows: Count | None = None  # use only this many rows from the start of the file
    max_tokens: Count | None = None
    # The URL of the other endpoint. The option --against overrides it.
    against: Annotated[str, Field(min_length=1)] | None = None
    against_model: str | None = None
    must: tuple[AnswerTermInFile, ...] = ()
    should: tuple[AnswerTermInFile, ...] = ()

    def terms_by_requirement(self) -> list[tuple[Requirement, ContractTerm]]:
        """Return all terms in the order of the results, each with the list that it is in."""
        return _terms_by_requirement(self)


def _terms_by_requirement(
    part: ContractLevel | AnswerCheck,
) -> list[tuple[Requirement, ContractTerm]]:
    """Return the terms of the list `must` and then those of `should`, each with its list's name."""
    must: list[tuple[Requirement, ContractTerm]] = [("must", term) for term in part.must]
    return [*must, *(("should", term) for term in part.should)]


class Contract(Part):
    """All that a contract file may say."""

    synonyms: ClassVar[dict[str, str]] = {"loads": "levels", "level": "levels"}
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    confidence: Annotated[Share, Field(ge=0.5, le=0.999)] = 0.95
    horizon_ns: Annotated[Duration, Field(gt=0)] = Field(HORIZON_NS, validation_alias="horizon")
    gpus: Count | None = None
    prices: str | None = None
    slo: SloField = None
    levels: Annotated[tuple[ContractLevel, ...], BeforeValidator(_refuse_no_levels)]
    answers: AnswerCheck | None = None


def parse_contract(
    text: str,
    label: str,
    env: Mapping[str, str] = os.environ,
    extra_metrics: tuple[str, ...] = (),
) -> Contract:
    """Parse the text of a contract that was already checked before its runs.

    Only shape and units are checked here.

    Args:
        text: The text of the file.
        label: The name of the file in error messages.
        env: The environment variables that the text may name.
        extra_metrics: Metrics of other packages that the runs of the contract used. These packages
            may be missing now.

    Raises:
        CombinedError: The text has errors. It holds all of them.
    """
    document, yaml_errors = read_contract_document(text, label, env)
    context = FileContext(
        file=label, directory=Path(), errors=yaml_errors, extra_metrics=extra_metrics
    )
    contract = validate_document(Contract, document, context)
    if contract is None or context.errors:
        raise CombinedError(sort_errors(context.errors))

    return contract


def read_contract_document(
    text: str, label: str, env: Mapping[str, str]
) -> tuple[Map, list[LoadgenError]]:
    """Return the YAML document of a contract, and the errors in it."""
    return read_yaml(text, label, env, kind="contract", example=EXAMPLE_HINT)


def find_contract_file(path: Path) -> Path:
    """Return the path of a contract file, or the file of the packaged contract with this name."""
    return path if path.is_file() else packaged_files("contracts").get(str(path), path)


def read_contract_text(file: Path, name: str) -> str:
    """Return the text of a contract file.

    Args:
        file: The path of the file.
        name: The name of the file as the user wrote it, for error messages.

    Raises:
        UserError: The file is missing, unreadable, too large or not UTF-8, or is a workload.
    """
    file_hint = f"give a YAML file, or one of {', '.join(packaged_files('contracts'))}"
    if name in packaged_files("workloads"):
        file_hint = f"{name} is a workload (loadgen run {name}); {file_hint}"

    text = read_yaml_text(
        file, name, "contract", hint_if_missing=lambda: file_hint, hint_if_too_large=file_hint
    )
    if _is_workload(text):
        workload_hint = f"loadgen run {name} runs it; a contract names it in its levels"
        raise UserError("wrong_format", "this is a workload, not a contract", name, workload_hint)

    return text


def _is_workload(text: str) -> bool:
    """Return whether a YAML text has the main keys of a workload and not those of a contract."""
    has_workload_keys = re.search(r"(?m)^(requests|stages):", text) is not None
    has_levels = re.search(r"(?m)^levels:", text) is not None
    return has_workload_keys and not has_levels
