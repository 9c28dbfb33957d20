"""Write the files of a validation that are made from its records."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from loadgen.contracts import sections, stored_validation
from loadgen.contracts.page_sections import FindingRow, PageInputs
from loadgen.contracts.schema import Contract
from loadgen.contracts.stored_validation import CONTRACT_FILE, FACTS_FILE, ValidationFacts
from loadgen.contracts.verdict import Validation
from loadgen.core import format, run_folder
from loadgen.core.metrics.summary import NamedSummary
from loadgen.core.results import checksums, store
from loadgen.render import html, junit
from loadgen.render.section import Report
from loadgen.repeated import repeats
from loadgen.repeated.repeats import RepeatSummary

DOCTOR_FILE = "doctor.json"
VERDICT_FILE = "verdict.json"
PAGE_FILE = "verdict.html"
JUNIT_FILE = "junit.xml"


def write_outputs(directory: Path, contract: Contract, facts: ValidationFacts) -> Validation:
    """Judge the runs in a directory, write all files about the verdict, and return the verdict.

    The page and the JUnit results are made to be passed on, so other users of the machine may read
    them (`shared`), unlike the verdict itself. The checksums come last, because they include all
    other files.

    Args:
        directory: The directory of the validation.
        contract: The contract.
        facts: What the records of the runs do not contain. It is stored in `target.json`.
    """
    (directory / FACTS_FILE).write_bytes(format.document(facts))
    validation = stored_validation.judge_runs(directory, contract, facts)
    for name, data in _render_outputs(directory, validation, contract, facts).items():
        store.replace(directory / name, data, shared=name in (PAGE_FILE, JUNIT_FILE))

    repeated_levels = _summarize_repeats(directory, validation)
    if repeated_levels:
        repeats_file = directory / repeats.FILE
        store.replace(repeats_file, msgspec.json.encode({"levels": repeated_levels}))

    checksums.write(directory)
    return validation


def regenerate_outputs(directory: Path, version: str) -> dict[str, bytes]:
    """Return the verdict, the page and the JUnit results, made again from the records.

    Args:
        directory: The directory of the validation.
        version: The version of loadgen that judged it, which the files repeat.
    """
    contract, facts = stored_validation.read_validation(directory)
    validation = stored_validation.judge_runs(directory, contract, facts)
    return _render_outputs(directory, replace(validation, version=version), contract, facts)


def build_report(directory: Path, validation: Validation) -> Report:
    """Return the report on a stored validation."""
    contract, facts = stored_validation.read_validation(directory)
    return sections.build_report(
        validation, _read_page_inputs(directory, validation, contract, facts)
    )


def _render_outputs(
    directory: Path, validation: Validation, contract: Contract, facts: ValidationFacts
) -> dict[str, bytes]:
    """Return the content of the files about a verdict, by their names.

    These are the verdict as JSON, the HTML page for two parties to sign, and the JUnit results for
    a pipeline.
    """
    report = sections.build_report(
        validation, _read_page_inputs(directory, validation, contract, facts)
    )
    return {
        VERDICT_FILE: format.document(validation),
        PAGE_FILE: html.render(report).encode(),
        JUNIT_FILE: junit.render(contract.name, sections.build_junit_cases(validation)).encode(),
    }


def _read_page_inputs(
    directory: Path, validation: Validation, contract: Contract, facts: ValidationFacts
) -> PageInputs:
    """Return the data behind a verdict that its HTML page shows.

    Everything is in the directory, so that the page can be generated again later (`loadgen verify`
    does so).

    Args:
        directory: The directory of the validation.
        validation: The verdict.
        contract: The contract.
        facts: The content of `target.json`, with the findings of the preflight checks.
    """
    run_names = [run for level in validation.levels for run in level.runs]
    findings = [
        FindingRow(finding.state, finding.check, finding.observed, finding.meaning)
        for finding in facts.findings
    ]
    return PageInputs(
        contract=contract,
        contract_text=(directory / CONTRACT_FILE).read_text("utf-8"),
        summaries={name: run_folder.read_summary(directory / name) for name in run_names},
        findings=findings,
        repeats=_summarize_repeats(directory, validation),
    )


def _summarize_repeats(directory: Path, validation: Validation) -> dict[str, RepeatSummary]:
    """Return how much the runs of a level differ, for each level with several runs."""
    repeated_levels = [level for level in validation.levels if len(level.runs) > 1]
    return {
        level.name: repeats.summarize_repeats(
            [NamedSummary(run, run_folder.read_summary(directory / run)) for run in level.runs]
        )
        for level in repeated_levels
    }
