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
    LevelRuns,
    ValidationOptions,
    check_target,
    format_now,
    run_level,
    with_contract_gpus,
)
from loadgen.contracts.schema import ANSWERS_LEVEL, ContractLevel
from loadgen.contracts.stored_validation import (
    CONTRACT_FILE,
    ValidationFacts,
)
from loadgen.contracts.terms import ContractTerm
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
        UserError: No undecided term can be decided by more load.
        CombinedError: The contract or the target differs from that of the validation, or the target
            cannot be used.
    """
    validation = stored_validation.judge_again(directory)
    contract, facts = stored_validation.read_validation(directory)
    _check_extension(directory, checked_contract, settings, validation, facts)

    # The prompts of `answers` are sent only once, so they are never extended.
    load_levels = [level for level in validation.levels if level.name != ANSWERS_LEVEL]
    plans = _find_plans_to_extend(checked_contract, load_levels)
    if not plans:
        raise _create_nothing_to_extend_error(validation, directory)

    plans = [_with_run_length(plan, added_run_ns) for plan in plans]
    settings = with_contract_gpus(settings, contract.gpus)
    findings = _require_usable_target(settings, directory, options)
    run_counts = {level.name: len(level.runs) for level in load_levels}

    added_runs = _add_runs(directory, plans, run_counts, settings, options)
    if added_runs.run_counts != run_counts:
        facts = _record_analysis(facts, run_counts, added_runs.run_counts, findings)

    new_validation = write_outputs(directory, contract, facts)
    if added_runs.is_interrupted:
        return replace(new_validation, interrupted=True)

    return new_validation


def _record_analysis(
    facts: ValidationFacts,
    old_counts: dict[str, int],
    new_counts: dict[str, int],
    findings: Sequence[Finding],
) -> ValidationFacts:
    """Return the facts about a validation with one more interim analysis, after an extension.

    The facts list how many runs each level had at each analysis, because a term that was decided in
    an analysis stays decided.

    Args:
        facts: The facts so far. Those of a validation without an extension list no counts.
        old_counts: Level -> the number of its runs before the extension.
        new_counts: Level -> the number of its runs after it.
        findings: The findings of the preflight checks of the extension.
    """
    earlier_counts = facts.run_counts or (old_counts,)
    return replace(
        facts,
        ended=format_now(),
        run_counts=(*earlier_counts, new_counts),
        findings=tuple(findings),
    )


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

    A run that did not finish does not count, and its files are deleted.

    Args:
        directory: The directory of the validation.
        plans: The levels to run, with the length of the added runs.
        run_counts: Level -> the number of runs that it already has.
        settings: The settings of the runs.
        options: How the runs are made.
    """
    new_counts = dict(run_counts)
    for plan in plans:
        level = plan.level.name
        result = run_level(directory, plan, settings, options, earlier_runs=run_counts[level])
        new_counts[level] += result.finished_count
        _delete_runs_after(directory / level, new_counts[level])

        has_ended_early = result.is_interrupted or result.failure is not None
        if has_ended_early:
            options.show_status(_describe_early_end(level, result))
            return AddedRuns(new_counts, result.is_interrupted)

    return AddedRuns(new_counts, is_interrupted=False)


def _describe_early_end(level: str, result: LevelRuns) -> str:
    """Return why not all runs were added to a level, and how many of them finished."""
    reason = "interrupted" if result.failure is None else result.failure.reason
    finished_runs = format.counted(result.finished_count, "added run")
    return f"Level {level}: {reason} ({finished_runs} finished)"


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


def _find_plans_to_extend(
    checked_contract: CheckedContract, verdicts: Sequence[LevelVerdict]
) -> list[LevelPlan]:
    """Return the plans of the levels that more load can decide.

    These are the levels with undecided terms. If such a term compares its level with another one,
    the other level is extended too, because both make the comparison uncertain.

    Args:
        checked_contract: The contract with the plans of its levels.
        verdicts: The verdict on each level of the stored validation.
    """
    plans_by_name = {plan.level.name: plan for plan in checked_contract.levels}
    names_to_extend: set[str] = set()
    for level_verdict in verdicts:
        level = plans_by_name[level_verdict.name].level
        for term in _find_undecided_terms(level, level_verdict):
            names_to_extend.add(level.name)
            names_to_extend.add(term.level)  # "" if the term compares no levels

    return [plan for plan in checked_contract.levels if plan.level.name in names_to_extend]


def _find_undecided_terms(level: ContractLevel, verdict: LevelVerdict) -> list[ContractTerm]:
    """Return the terms of a level that more load can decide.

    There are none if the level could not be measured: then it has to be measured again. Terms are
    left out whose metric no load can measure, for example because no server reports it.
    """
    if verdict.failure_reason:
        return []
    return [
        term
        for (_, term), term_verdict in zip(level.terms_by_requirement(), verdict.terms, strict=True)
        if not term_verdict.is_decided and term_verdict.code != "unmeasurable"
    ]


def _require_usable_target(
    settings: Settings, directory: Path, options: ValidationOptions
) -> list[Finding]:
    """Make the preflight checks of the target of an extension and return their findings.

    The checks write `doctor.json` to the directory. If they fail, the checksums of the directory
    are updated too, so that it remains valid although it is not extended.

    Raises:
        CombinedError: The target cannot be used.
    """
    findings = check_target(settings, directory, options.show_status)
    failed_checks = [finding for finding in findings if finding.state == FAULT]
    if failed_checks:
        checksums.write(directory)
        raise _create_failed_checks_error(failed_checks, settings)
    return findings


def _create_failed_checks_error(
    failed_checks: Sequence[Finding], settings: Settings
) -> CombinedError:
    """Return the error for preflight checks of a target that failed, one message per check."""
    return CombinedError(
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
