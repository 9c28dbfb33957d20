"""Extend a stored validation: add runs to its undecided levels and judge all runs together."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.contracts import level_plan, stored_validation
from loadgen.contracts.level_plan import CheckedContract, LevelPlan
from loadgen.contracts.outputs import write_outputs
from loadgen.contracts.run import (
    ValidationOptions,
    check_target,
    format_now,
    run_level,
    with_contract_gpus,
)
from loadgen.contracts.schema import ANSWERS_LEVEL, Contract
from loadgen.contracts.stored_validation import (
    CONTRACT_FILE,
    ValidationFacts,
)
from loadgen.contracts.verdict import FAIL, PASS, LevelVerdict, Validation
from loadgen.core import format
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
    """Add runs to the undecided levels of a stored validation, and judge all runs together.

    Args:
        directory: The directory of the validation.
        checked_contract: The contract.
        settings: The target and the settings of the runs.
        options: How the runs are made.
        added_run_ns: The length of each added run. None for the length in the contract.

    Raises:
        UserError, CombinedError: The directory, the contract or the target does not fit, or more
            load cannot decide any term.
    """
    validation = stored_validation.judge_again(directory)
    contract, facts = stored_validation.read_validation(directory)
    _check_extension(directory, checked_contract, settings, validation, facts)
    # The prompts of `answers` are sent only once, so they are never extended.
    load_levels = [level for level in validation.levels if level.name != ANSWERS_LEVEL]
    plans = _find_undecided_plans(checked_contract, contract, load_levels)
    if not plans:
        raise _create_nothing_to_extend_error(validation, directory)
    settings = with_contract_gpus(settings, contract.gpus)
    findings = check_target(settings, directory, options.show_status)
    _require_usable_target(findings, settings, directory)
    run_counts = {level.name: len(level.runs) for level in load_levels}
    plans = [_with_run_length(plan, added_run_ns) for plan in plans]
    added_runs = _add_runs(directory, plans, run_counts, settings, options)
    if added_runs.run_counts != run_counts:
        # The stored counts of runs say which runs each interim analysis has.
        earlier_counts = facts.run_counts or (run_counts,)
        facts = replace(
            facts,
            ended=format_now(),
            run_counts=(*earlier_counts, added_runs.run_counts),
            findings=tuple(findings),
        )
    new_validation = write_outputs(directory, contract, facts)
    if added_runs.is_interrupted:
        return replace(new_validation, interrupted=True)
    return new_validation


class AddedRuns(NamedTuple):
    """The result of adding runs to levels.

    Attributes:
        run_counts: Level -> the number of its runs, with those that were added.
        is_interrupted: Whether the user interrupted the runs.
    """

    run_counts: dict[str, int]
    is_interrupted: bool


def _add_runs(
    directory: Path,
    plans: Sequence[LevelPlan],
    run_counts: Mapping[str, int],
    settings: Settings,
    options: ValidationOptions,
) -> AddedRuns:
    """Run levels that already have runs, until all are done or one is interrupted or fails.

    A run that did not finish is deleted and does not count.

    Args:
        directory: The directory of the validation.
        plans: The levels to run, with the length of the added runs.
        run_counts: Level -> the number of runs that it already has.
        settings: The settings of the runs.
        options: How the runs are made.
    """
    new_counts = dict(run_counts)
    for plan in plans:
        name = plan.level.name
        runs = run_level(directory, plan, settings, options, earlier_runs=run_counts[name])
        new_counts[name] += runs.finished_count
        _delete_runs_after(directory / name, new_counts[name])
        if runs.is_interrupted or runs.failure is not None:
            reason = "interrupted" if runs.failure is None else runs.failure.reason
            finished_runs = format.counted(runs.finished_count, "added run")
            options.show_status(f"Level {name}: {reason} ({finished_runs} finished)")
            return AddedRuns(new_counts, runs.is_interrupted)
    return AddedRuns(new_counts, is_interrupted=False)


def _create_nothing_to_extend_error(validation: Validation, directory: Path) -> UserError:
    """Return the error for a validation in which no term would be decided by more load."""
    text = "no undecided term can be decided by more load"
    if validation.verdict == PASS:
        text = "all required terms have passed"
    hint = "to measure again, run loadgen validate with a new --out"
    return UserError("already_decided", text, str(directory), hint)


def _with_run_length(plan: LevelPlan, run_ns: int | None) -> LevelPlan:
    """Return the plan of a level with runs of this length. None leaves the length unchanged."""
    if run_ns is None:
        return plan
    return replace(plan, workload=level_plan.set_measured_duration(plan.workload, run_ns))


def _find_undecided_plans(
    checked_contract: CheckedContract, contract: Contract, verdicts: Sequence[LevelVerdict]
) -> list[LevelPlan]:
    """Return the plans of the undecided levels, and of the levels that they are compared with.

    If a term compares two levels, both are extended, because both make the comparison uncertain. A
    level that could not be measured is not extended: it has to be measured again.

    Args:
        checked_contract: The contract with the plans of its levels.
        contract: The contract of the stored validation.
        verdicts: The verdict on each level.
    """
    levels_by_name = {level.name: level for level in contract.levels}
    names_to_extend: set[str] = set()
    for level_verdict in verdicts:
        if level_verdict.failure_reason:
            continue
        terms = levels_by_name[level_verdict.name].terms_by_requirement()
        for term_verdict, (_, term) in zip(level_verdict.terms, terms, strict=True):
            if not term_verdict.is_decided:
                names_to_extend.add(level_verdict.name)
                if term.level:
                    names_to_extend.add(term.level)
    return [plan for plan in checked_contract.levels if plan.level.name in names_to_extend]


def _require_usable_target(
    findings: Sequence[Finding], settings: Settings, directory: Path
) -> None:
    """Raise CombinedError if the target of an extension cannot be used.

    The checks have written a new doctor.json to the directory, so its checksums are renewed first.
    The directory can then still be verified.
    """
    failed_checks = [finding for finding in findings if finding.state == FAULT]
    if not failed_checks:
        return
    checksums.write(directory)
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

    All runs of a validation need the same contract and target. A term that failed stays failed, so
    more load is useless after a FAIL.
    """
    errors: list[LoadgenError] = []
    contract_file = directory / CONTRACT_FILE
    if checked_contract.text != contract_file.read_text("utf-8"):
        text = f"the contract differs from the one in {directory}"
        hint = f"use {contract_file}"
        errors.append(UserError("mismatch", text, checked_contract.file, hint))
    if settings.display_name != facts.target:
        text = f"the validation is of another target: {facts.target}"
        hint = "use that target, or a new --out for this one"
        errors.append(UserError("mismatch", text, settings.display_name, hint))
    if validation.verdict == FAIL:
        text = "a required term has failed, which more load cannot change"
        hint = "after a change of the server, run loadgen validate with a new --out"
        errors.append(UserError("already_decided", text, str(directory), hint))
    if errors:
        raise CombinedError(errors)
