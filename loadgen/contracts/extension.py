"""Extend a stored validation: add runs to its undecided levels and judge all runs together."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from loadgen.contracts import level_plan, stored_validation
from loadgen.contracts.level_plan import CheckedContract, LevelPlan
from loadgen.contracts.outputs import write_outputs
from loadgen.contracts.run import (
    ValidationOptions,
    check_target,
    now_text,
    run_level,
    with_contract_gpus,
)
from loadgen.contracts.schema import ANSWERS_LEVEL, Contract
from loadgen.contracts.stored_validation import (
    CONTRACT_FILE,
    ValidationFacts,
)
from loadgen.contracts.verdict import FAIL, PASS, LevelVerdict, Validation
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.results import checksums
from loadgen.doctor.findings import FAULT, Finding


def extend_validation(
    directory: Path,
    checked_contract: CheckedContract,
    settings: Settings,
    options: ValidationOptions,
    added_run_ns: int | None,
) -> Validation:
    """Add runs to the undecided levels of a stored validation, and judge all runs.

    A run that is interrupted is deleted and does not count.

    Args:
        directory: The directory of the validation.
        checked_contract: The contract.
        settings: The target and the settings of the runs.
        options: How the runs are made.
        added_run_ns: The length of each added run. None for the length in the contract.

    Raises:
        UserError, CombinedError: The directory, the contract or the target does not fit, or more
            load would decide nothing.
    """
    validation = stored_validation.judge_again(directory)
    contract, facts = stored_validation.read_validation(directory)
    _check_extension(directory, checked_contract, settings, validation, facts)
    # The prompts of `answers` are sent only once.
    levels = [level for level in validation.levels if level.name != ANSWERS_LEVEL]
    plans = _undecided_plans(checked_contract, contract, levels)
    if not plans:
        is_pass = validation.verdict == PASS
        text = "every term is decided" if is_pass else "no term is undecided for want of load"
        hint = "nothing is gained by more load; loadgen validate with a new folder runs anew"
        raise UserError("already_decided", text, str(directory), hint)
    settings = with_contract_gpus(settings, contract.gpus)
    findings = check_target(settings, directory, options.say)
    _require_usable_target(findings, settings, directory)
    run_counts = {level.name: len(level.runs) for level in levels}
    new_counts = dict(run_counts)
    is_interrupted = False
    for plan in plans:
        name = plan.level.name
        added_load = _with_run_length(plan, added_run_ns)
        runs = run_level(directory, added_load, settings, options, earlier_runs=run_counts[name])
        new_counts[name] += runs.finished_count
        _delete_runs_after(directory / name, new_counts[name])
        if runs.is_interrupted or runs.failure is not None:
            is_interrupted = runs.is_interrupted
            reason = runs.failure.reason if runs.failure is not None else "broken off"
            options.say(f"level {name}: {reason}; {runs.finished_count} of its added runs count")
            break
    if new_counts != run_counts:
        earlier_counts = facts.run_counts or (run_counts,)
        facts = replace(
            facts,
            ended=now_text(),
            run_counts=(*earlier_counts, new_counts),
            findings=tuple(findings),
        )
    extended = write_outputs(directory, contract, facts)
    return replace(extended, interrupted=True) if is_interrupted else extended


def _with_run_length(plan: LevelPlan, run_ns: int | None) -> LevelPlan:
    """Return the plan of a level with runs of this length, or unchanged if there is none."""
    if run_ns is None:
        return plan
    return replace(plan, workload=level_plan.with_measured_duration(plan.workload, run_ns))


def _undecided_plans(
    checked_contract: CheckedContract, contract: Contract, verdicts: Sequence[LevelVerdict]
) -> list[LevelPlan]:
    """Return the plans of the undecided levels, and of those they are compared with.

    A level that a term compares with another one is extended together with it, so that the two
    ends of the comparison become more certain.
    """
    contract_levels = {level.name: level for level in contract.levels}
    names: set[str] = set()
    for verdict in verdicts:
        if verdict.failure_reason:
            continue  # more load does not help a level that could not be measured
        terms = contract_levels[verdict.name].terms_by_requirement()
        for judged, (_, term) in zip(verdict.terms, terms, strict=True):
            if not judged.is_decided:
                names.add(verdict.name)
                if term.level:
                    names.add(term.level)
    return [plan for plan in checked_contract.levels if plan.level.name in names]


def _require_usable_target(
    findings: Sequence[Finding], settings: Settings, directory: Path
) -> None:
    """Raise CombinedError if the target of an extension cannot be used.

    The checksums are written again first, because the checks have written a new file to the
    directory.
    """
    failed_checks = [finding for finding in findings if finding.state == FAULT]
    if not failed_checks:
        return
    checksums.write(directory)  # the checks have written a new doctor.json
    raise CombinedError(
        [
            UserError(
                "failed_check",
                f"{finding.check}: {finding.observed}",
                settings.display_name,
                finding.meaning,
                key=finding.check,
            )
            for finding in failed_checks
        ]
    )


def _delete_runs_after(level_dir: Path, last_number: int) -> None:
    """Delete the runs of a level that did not finish, which are those with the highest numbers."""
    for run_dir in level_dir.glob("r*"):
        if int(run_dir.name[1:]) > last_number:
            shutil.rmtree(run_dir)


def _check_extension(
    directory: Path,
    checked_contract: CheckedContract,
    settings: Settings,
    validation: Validation,
    facts: ValidationFacts,
) -> None:
    """Raise CombinedError if a validation cannot be extended with this contract and target.

    All runs of a validation have to be of the same contract and target. A FAIL cannot be taken
    back, so more load is useless after it.
    """
    errors: list[LoadgenError] = []
    contract_file = directory / CONTRACT_FILE
    if checked_contract.text != contract_file.read_text("utf-8"):
        text = f"is not the contract in {directory}"
        errors.append(
            UserError("mismatch", text, checked_contract.file, f"extend with {contract_file}")
        )
    if settings.display_name != facts.target:
        text = f"this validation is of {facts.target}"
        hint = "a new folder for this target"
        errors.append(UserError("mismatch", text, settings.display_name, hint))
    if validation.verdict == FAIL:
        text = "a promise is broken, and stays so: more load takes no verdict back"
        hint = "after a change of the server: loadgen validate with a new folder"
        errors.append(UserError("already_decided", text, str(directory), hint))
    if errors:
        raise CombinedError(errors)
