"""Read the results directory of a validation: its contract, its runs, and the verdict on them.

This module writes nothing. `run.py` makes the directory and documents its files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import field
from msgspec.structs import replace

from loadgen.contracts import answer_scoring, judge, schema, verdict
from loadgen.contracts.evaluate import CostFunction
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import ANSWERS_LEVEL, AnswerCheck, Contract
from loadgen.contracts.terms import NS_PER_S
from loadgen.contracts.verdict import LevelVerdict, Validation
from loadgen.core import run_folder
from loadgen.core.errors import Code, CombinedError, UserError, missing_result
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.metrics.columns import pool_measured_gaps
from loadgen.core.metrics.token_deadlines import count_deadlines_of_run
from loadgen.core.results import answer_files, checksums, store
from loadgen.core.results.answer_files import ScoredAnswer
from loadgen.core.results.files import refuse_links
from loadgen.core.results.json_files import decode_json
from loadgen.core.results.manifest import TargetFacts, decode_manifest
from loadgen.core.results.stored_gaps import iterate_stored_gaps
from loadgen.doctor.findings import Finding
from loadgen.figures import METRICS

CONTRACT_FILE = "contract.yaml"
PRICES_FILE = "prices.yaml"
RESOLVED_FILE = "contract.resolved.yaml"
"""The contract with the values of its environment variables. Written if it names any."""

FACTS_FILE = "target.json"
RUN_MANIFESTS = "*/r*/run.json"
"""The manifests of all runs of all levels."""

_WRONG_FOLDER_HINT = "give a folder written by loadgen validate"
_CHANGED_FILE_HINT = "use the original files; SHA256SUMS has the checksum of each"


class ValidationFacts(msgspec.Struct, frozen=True):
    """The content of `target.json`: facts about a whole validation that its verdict repeats.

    Attributes:
        target: The target, as text.
        started: When the validation began (ISO 8601).
        ended: When the validation ended (ISO 8601).
        interrupted: Whether the user interrupted it.
        failure_reasons: Level -> why it could not be run.
        preflight: The warnings of the preflight checks, which run before the first request.
        fault_codes: Level -> the codes of the errors behind its failure.
        metadata: The metadata that the user gave.
        findings: All findings of the preflight checks.
        shortened: Level -> by how much its load is shorter than in the contract, as text.
        run_counts: For each interim analysis of an extended validation: level -> number of its
            runs.
    """

    target: str
    started: str
    ended: str
    interrupted: bool
    failure_reasons: dict[str, str] = field(name="trouble")
    preflight: tuple[str, ...]
    fault_codes: dict[str, tuple[str, ...]] = {}
    metadata: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()
    shortened: dict[str, str] = {}
    run_counts: tuple[dict[str, int], ...] = field(default=(), name="looks")


def read_original_command(directory: Path) -> list[str]:
    """Return the arguments of the command that began a validation, without its `--bundle`.

    An extension repeats this command. It is stored in the first run of a level: a run that was
    added later has the command that added it.

    Raises:
        UserError: The directory has no validation with a run.
    """
    if not directory.is_dir():
        raise missing_result(directory, _WRONG_FOLDER_HINT)

    refuse_links(directory)
    manifest_files = list(directory.glob(RUN_MANIFESTS))
    if not (directory / FACTS_FILE).is_file() or not manifest_files:
        text = "the folder has no validation with a run"
        raise UserError("no_result", text, str(directory), _WRONG_FOLDER_HINT)

    first_manifest_file = min(manifest_files, key=_order_of_run)
    manifest = decode_manifest(first_manifest_file.read_bytes(), str(first_manifest_file))
    return _without_option(manifest.command[1:], "--bundle")


def _order_of_run(manifest_file: Path) -> tuple[int, str, Path]:
    """Return a sort key for the manifests of runs, by the number of the run and then by level."""
    run_name = manifest_file.parent.name
    return len(run_name), run_name, manifest_file  # by length first: r2 comes before r10


def _without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Return the arguments of a command without an option and its value.

    The value may be the next argument (`--bundle FILE`) or part of the same one (`--bundle=FILE`).
    """
    remaining_arguments = []
    is_value_of_option = False
    for argument in arguments:
        if is_value_of_option:
            is_value_of_option = False
        elif argument == option:
            is_value_of_option = True
        elif not argument.startswith(f"{option}="):
            remaining_arguments.append(argument)

    return remaining_arguments


def judge_again(directory: Path) -> Validation:
    """Return the verdict on an earlier validation, recomputed from its records.

    Raises:
        UserError: The directory has no validation.
        CombinedError: Files differ from their checksums.
    """
    if not (directory / FACTS_FILE).is_file():
        if directory.is_dir():
            text = "the folder has no validation"
            raise UserError("no_result", text, str(directory), _WRONG_FOLDER_HINT)
        raise missing_result(directory, _WRONG_FOLDER_HINT)

    refuse_links(directory)
    errors = [
        _create_changed_file_error(directory / name, problem)
        for name, problem in verify_checksums(directory).items()
    ]
    if errors:
        raise CombinedError(errors)

    contract, facts = read_validation(directory)
    return judge_runs(directory, contract, facts)


def _create_changed_file_error(file: Path, problem: str) -> UserError:
    """Return the error for a file that differs from its checksum.

    `problem` is a value of `verify_checksums`, which is "gone" for a missing file.
    """
    code: Code = "missing_file" if problem == "gone" else "changed_file"
    return UserError(code, problem, str(file), _CHANGED_FILE_HINT)


def verify_checksums(directory: Path) -> dict[str, str]:
    """Return the files of a directory that differ from the stored checksums (`SHA256SUMS`).

    Returns:
        Name of a file -> what is wrong with it. Empty if all files are unchanged.
    """
    if checksums.read_checksums(directory) is None:
        return {checksums.FILE: "missing, so changes of the files cannot be detected"}
    unlisted = dict.fromkeys(checksums.unlisted(directory), "not listed in SHA256SUMS")
    return checksums.find_changes(directory) | unlisted


def read_validation(directory: Path) -> tuple[Contract, ValidationFacts]:
    """Return the contract of a validation and the facts about it.

    Raises:
        UserError, CombinedError: A file cannot be read or is invalid.
    """
    contract_file = _find_contract_file(directory)
    contract = schema.parse_contract(
        schema.read_contract_text(contract_file, str(contract_file)),
        str(contract_file),
        extra_metrics=_list_plugin_metrics(directory),
    )
    facts_file = directory / FACTS_FILE
    facts = decode_json(
        facts_file.read_bytes(),
        content_type=ValidationFacts,
        where=str(facts_file),
        description="a file of a validation",
        hint=_CHANGED_FILE_HINT,
    )

    return contract, facts


def _find_contract_file(directory: Path) -> Path:
    """Return the file of the contract in a directory of results.

    A contract that names environment variables is also stored with their values. That file is used
    if there is one, because the variables may have other values now.
    """
    resolved_file = directory / RESOLVED_FILE
    return resolved_file if resolved_file.is_file() else directory / CONTRACT_FILE


def _list_plugin_metrics(directory: Path) -> tuple[str, ...]:
    """Return the names of the metrics of other packages that the runs of a validation used.

    Each run has stored the plug-ins that were installed when it was made.
    """
    names: list[str] = []
    for file in sorted(directory.glob(RUN_MANIFESTS)):
        with suppress(UserError):  # an invalid manifest is reported when the run is read
            manifest = decode_manifest(file.read_bytes(), str(file))
            names += [plugin.name for plugin in manifest.plugins if plugin.table == METRICS.group]
    unique_names = dict.fromkeys(names)
    return tuple(unique_names)


def judge_runs(directory: Path, contract: Contract, facts: ValidationFacts) -> Validation:
    """Return the verdict on the runs in a directory.

    Only files in the directory are used, so that anyone who has it gets the same verdict.

    Args:
        directory: The directory of the validation.
        contract: The contract.
        facts: The content of `target.json`: what the records do not contain, such as why a level
            could not be run.
    """
    measured_levels = {
        level.name: _read_level(directory, level.name, facts.failure_reasons.get(level.name, ""))
        for level in contract.levels
    }
    levels = _judge_all_levels(directory, contract, facts, measured_levels)
    target = _find_target(measured_levels)
    contract_bytes = (directory / CONTRACT_FILE).read_bytes()
    contract_sha256 = hashlib.sha256(contract_bytes).hexdigest()

    return _create_validation(contract, contract_sha256, facts, target, levels)


def _create_validation(
    contract: Contract,
    contract_sha256: str,
    facts: ValidationFacts,
    target: TargetFacts,
    levels: tuple[LevelVerdict, ...],
) -> Validation:
    """Return the content of `verdict.json` from the verdicts on all levels.

    Args:
        contract: The contract.
        contract_sha256: The checksum of its file.
        facts: The content of `target.json`.
        target: The target of the runs.
        levels: The verdict on each level.
    """
    # A validation that was never extended has no counts of runs and was judged once.
    analysis_count = max(len(facts.run_counts), 1)
    return Validation(
        contract=contract.name,
        contract_sha256=contract_sha256,
        verdict=verdict.combine_verdicts([level.verdict for level in levels]),
        sentence=verdict.summarize_levels(levels),
        confidence=contract.confidence,
        horizon_s=contract.horizon_ns / NS_PER_S,
        analyses=analysis_count,
        target=facts.target,
        model=target.model,
        server=target.server,
        region=target.region,
        metadata=facts.metadata,
        simulated=target.simulated,
        started=facts.started,
        ended=facts.ended,
        version=loadgen_version(),
        levels=levels,
        interrupted=facts.interrupted,
        preflight=facts.preflight,
    )


def _judge_all_levels(
    directory: Path,
    contract: Contract,
    facts: ValidationFacts,
    measured_levels: Mapping[str, MeasuredLevel],
) -> tuple[LevelVerdict, ...]:
    """Return the verdict on each level of a contract, and on its responses if they were scored.

    Args:
        directory: The directory of the validation.
        contract: The contract.
        facts: The content of `target.json`. It says how often the validation was extended, and
            which levels were shortened or could not be run.
        measured_levels: The recorded runs of each level.
    """
    cost_function = _load_cost_function(directory) if contract.prices else None
    load_levels = judge.judge_interim_analyses(
        contract, measured_levels, facts.run_counts, cost_function
    )

    levels = [_with_shortening(level, facts) for level in load_levels]
    if contract.answers is not None:
        levels.append(_judge_answers(directory, contract, contract.answers, facts))

    return tuple(_with_error_codes(level, facts) for level in levels)


def _judge_answers(
    directory: Path, contract: Contract, check: AnswerCheck, facts: ValidationFacts
) -> LevelVerdict:
    """Return the verdict on the terms about responses, from the scores in a directory of results.

    Args:
        directory: The directory of the validation.
        contract: The contract.
        check: The part of the contract that is about responses.
        facts: The content of `target.json`, which says why there may be no scores.
    """
    failure_reason = facts.failure_reasons.get(ANSWERS_LEVEL, "")
    scored_answers = answer_scoring.read_scored_answers(
        directory / answer_scoring.DIRECTORY, failure_reason, contract.confidence
    )
    return judge.judge_answers(contract, check, scored_answers)


def _find_target(measured_levels: Mapping[str, MeasuredLevel]) -> TargetFacts:
    """Return the facts about the target of a validation, which all its runs share.

    The facts are empty if no level has a run.
    """
    for level in measured_levels.values():
        if level.runs:
            return level.runs[0].summary.target
    return TargetFacts()


def _load_cost_function(directory: Path) -> CostFunction:
    """Return the function that computes costs at the prices that are stored with a validation."""
    from loadgen.contracts.costs import compute_cost_per_thousand
    from loadgen.pricing.price_file import load_prices

    prices = load_prices(directory / PRICES_FILE, accept_sample=True)
    return partial(compute_cost_per_thousand, prices)


def _with_shortening(level: LevelVerdict, facts: ValidationFacts) -> LevelVerdict:
    """Return the verdict on a level with a note if its load was shortened."""
    if level.name not in facts.shortened:
        return level
    return replace(level, notes=(facts.shortened[level.name], *level.notes))


def _with_error_codes(level: LevelVerdict, facts: ValidationFacts) -> LevelVerdict:
    """Return the verdict on a level with the codes of the errors that made it fail, if any."""
    if not level.failure_reason:
        return level
    return replace(level, fault_codes=facts.fault_codes.get(level.name, ()))


def _read_level(directory: Path, level: str, failure_reason: str) -> MeasuredLevel:
    """Return the recorded runs of a level, in order of their numbers.

    The runs are in directories `r1`, `r2` and so on. A run without a summary did not end and is
    left out.

    Args:
        directory: The directory of the validation.
        level: The name of the level.
        failure_reason: Why a run of the level could not be made, or "".
    """
    run_dirs = [
        manifest_file.parent
        for manifest_file in (directory / level).glob("r*/run.json")
        if manifest_file.parent.name.removeprefix("r").isdecimal()
    ]
    run_dirs.sort(key=_get_run_number)
    finished_run_dirs = [run_dir for run_dir in run_dirs if (run_dir / "summary.json").is_file()]
    runs = tuple(read_run(run_dir, directory) for run_dir in finished_run_dirs)

    return MeasuredLevel(runs=runs, failure_reason=failure_reason)


def _get_run_number(run_dir: Path) -> int:
    """Return the number of a run from the name of its directory: 12 for `r12`."""
    return int(run_dir.name.removeprefix("r"))


def read_run(
    run_dir: Path, validation_dir: Path, max_rows_in_memory: float = store.LAZY_ROWS
) -> RecordedRun:
    """Return one run of a validation, read from its records.

    Args:
        run_dir: The directory of the run.
        validation_dir: The directory of the validation.
        max_rows_in_memory: A run with more records is not read into memory: its columns are read
            from the file when they are used. `math.inf` reads every run into memory.
    """
    stored = store.read_run(run_dir, max_rows=max_rows_in_memory, by_stage=False)
    event_gaps = pool_measured_gaps(stored.manifest, stored.gaps)
    return RecordedRun(
        folder=str(run_dir.relative_to(validation_dir)),
        manifest=stored.manifest,
        summary=run_folder.read_summary(run_dir),
        rows=stored.rows,
        gaps=event_gaps,
        deadline_counts=count_deadlines_of_run(
            stored.manifest, stored.rows, iterate_stored_gaps(run_dir)
        ),
        scored_answers=_read_scored_answers(run_dir),
    )


def _read_scored_answers(run_dir: Path) -> tuple[ScoredAnswer, ...] | None:
    """Return the outcomes of the checks of a run's answers, or None if it checked none."""
    if not answer_files.has_checked_answers(run_dir):
        return None
    return tuple(answer_files.read_scored_answers(run_dir))
