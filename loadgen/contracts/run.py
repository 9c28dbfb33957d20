"""Run a contract: preflight checks, the load of each level, and the verdict.

All results are in one directory:

- `contract.yaml`, and `contract.resolved.yaml` if it names environment variables
- `prices.yaml` if the contract names a price file
- `doctor.json`: the findings of the preflight checks
- `target.json`: facts about the validation that the runs do not record
- a directory per level with its runs, and `repeats.json` if a level has several runs
- `verdict.json`, `verdict.html` and `junit.xml`
- `SHA256SUMS`: the checksums of all files, in the format of `sha256sum -c`

`outputs.py` writes the files about the verdict, `stored_validation.py` reads the directory, and
`extension.py` adds runs to it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from loadgen.contracts import answer_scoring, level_plan
from loadgen.contracts.answer_scoring import AnswerEndpoints
from loadgen.contracts.fluidity_terms import needs_token_times
from loadgen.contracts.level_plan import CheckedContract, LevelPlan
from loadgen.contracts.outputs import DOCTOR_FILE, write_outputs
from loadgen.contracts.schema import ANSWERS_LEVEL, AnswerCheck, ContractLevel
from loadgen.contracts.stored_validation import (
    CONTRACT_FILE,
    PRICES_FILE,
    RESOLVED_FILE,
    ValidationFacts,
)
from loadgen.contracts.verdict import Validation
from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, TargetError, UserError, codes
from loadgen.core.execution.folder_names import locked_folder, run_id
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import Execute
from loadgen.core.metrics.summary import Summary
from loadgen.core.workload import with_unique_prompts
from loadgen.doctor.findings import FAULT, WARNING, Finding
from loadgen.render import text as as_text
from loadgen.repeated.repeat_loop import pause_before, with_repeat_seed
from loadgen.repeated.repeats import Repetition

if TYPE_CHECKING:
    from loadgen.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """How the runs of a validation are made.

    Attributes:
        execute: Runs a workload and returns its summary and its directory.
        show_status: Shows a line of progress.
        seed: The seed of all runs, instead of those in the workload files.
        salt: The salt of all prompts, instead of those in the workload files.
        repetition: How often each level is run and with what pause, instead of the values in the
            contract. The `apart` of a level remains the shortest pause.
        sleep: Waits for a number of seconds.
    """

    execute: Execute
    show_status: Callable[[str], None]
    seed: int | None = None
    salt: str | None = None
    repetition: Repetition | None = None
    sleep: Callable[[float], None] = time.sleep

    def repetition_of(self, level: ContractLevel) -> Repetition:
        """Return how often a level is run, with at least the pause that the contract requires."""
        repetition = self.repetition or Repetition(count=level.repeats)
        return replace(repetition, pause_ns=max(repetition.pause_ns, level.apart_ns or 0))


class Failure(NamedTuple):
    """Why a level could not be run.

    Attributes:
        reason: The reason for people.
        codes: The codes of the errors behind it.
    """

    reason: str
    codes: tuple[str, ...] = ()

    @classmethod
    def from_error(cls, context: str, error: LoadgenError | CombinedError) -> Failure:
        """Return the failure for an error that was raised, with what failed as its context."""
        errors = error.errors if isinstance(error, CombinedError) else (error,)
        messages = "; ".join(single_error.message for single_error in errors)
        return cls(f"{context}: {messages}", codes(error))

    @classmethod
    def from_findings(cls, findings: Sequence[Finding]) -> Failure:
        """Return the failure for preflight checks of the target that failed."""
        reasons = "; ".join(f"{finding.check}: {finding.observed}" for finding in findings)
        return cls(
            f"the target failed the preflight checks: {reasons}",
            tuple(finding.code or "failed_check" for finding in findings),
        )


INTERRUPTION = Failure("interrupted by the user")


class LevelRuns(NamedTuple):
    """The result of running a level.

    Attributes:
        summaries: The summary of each run, an interrupted one included.
        is_interrupted: Whether the user interrupted the level.
        failure: Why a run could not be made, or None.
    """

    summaries: list[Summary]
    is_interrupted: bool = False
    failure: Failure | None = None

    @property
    def finished_count(self) -> int:
        """The number of runs that were not interrupted."""
        return sum(summary.run.state != "interrupted" for summary in self.summaries)


# -- a new validation -----------------------------------------------------------------------------


def run_validation(
    checked_contract: CheckedContract,
    settings: Settings,
    output_dir: Path | None,
    options: ValidationOptions,
    other_endpoint: Settings | None = None,
) -> tuple[Validation, Path]:
    """Run a contract, judge it, and return the verdict and the directory of the results.

    A level that could not be run makes its terms INCONCLUSIVE, with the reason. The prompts of
    `answers` are sent after all loads.

    Args:
        checked_contract: The contract.
        settings: The target and the settings of the runs.
        output_dir: The directory to write to. None for a new one in `results`.
        options: How the runs are made.
        other_endpoint: The endpoint that answers are compared with.

    Raises:
        UserError: The directory is in use.
    """
    directory = _choose_directory(output_dir, checked_contract.contract.name)
    with locked_folder(directory):
        # Another process may have written to the directory before it was locked.
        _choose_directory(directory, checked_contract.contract.name)
        settings = with_contract_gpus(settings, checked_contract.contract.gpus)
        new_validation = NewValidation(checked_contract, settings, directory, options)
        return new_validation.run(other_endpoint), directory


class NewValidation:
    """A validation from the preflight checks to the verdict.

    Attributes:
        checked_contract: The contract.
        settings: The target and the settings of the runs.
        directory: The directory of the results. It exists and is locked.
        options: How the runs are made.
        failures: Level -> why it could not be run, for the levels that failed so far.
        is_interrupted: Whether the user interrupted the validation.
    """

    def __init__(
        self,
        checked_contract: CheckedContract,
        settings: Settings,
        directory: Path,
        options: ValidationOptions,
    ) -> None:
        """Prepare the validation of a contract."""
        self.checked_contract = checked_contract
        self.settings = settings
        self.directory = directory
        self.options = options
        self.failures: dict[str, Failure] = {}
        self.is_interrupted = False

    def run(self, other_endpoint: Settings | None) -> Validation:
        """Run all levels, score the responses, write the results, and return the verdict.

        If the preflight checks find that the target cannot be used, no level is run. Results are
        written in this case too, and after an interruption.

        Args:
            other_endpoint: The endpoint that responses are compared with, if any.
        """
        started = format_now()
        self._copy_inputs()
        self.options.show_status(f"Results go to {self.directory}")
        findings = check_target(self.settings, self.directory, self.options.show_status)
        failed_checks = [finding for finding in findings if finding.state == FAULT]

        target_failure = Failure.from_findings(failed_checks) if failed_checks else None
        for plan in self.checked_contract.levels:
            self._run_level(plan, target_failure)

        contract = self.checked_contract.contract
        if contract.answers is not None:
            self._score_responses(contract.answers, other_endpoint, target_failure)

        facts = self._collect_facts(started, findings)
        return write_outputs(self.directory, contract, facts)

    def _collect_facts(self, started: str, findings: Sequence[Finding]) -> ValidationFacts:
        """Return the facts about the validation that the records of its runs do not have.

        They are stored in `target.json`, from which the verdict can be computed again later.

        Args:
            started: When the validation began.
            findings: The findings of the preflight checks.
        """
        failures = self.failures.items()
        shortenings = {
            plan.level.name: level_plan.format_shortening(plan)
            for plan in self.checked_contract.levels
        }
        return ValidationFacts(
            target=self.settings.display_name,
            started=started,
            ended=format_now(),
            interrupted=self.is_interrupted,
            failure_reasons={name: failure.reason for name, failure in failures},
            fault_codes={name: failure.codes for name, failure in failures if failure.codes},
            preflight=_describe_problems(findings),
            metadata=dict(self.settings.metadata),
            findings=tuple(findings),
            shortened={name: text for name, text in shortenings.items() if text},
        )

    def _copy_inputs(self) -> None:
        """Copy the contract and its price file to the results.

        A contract that names environment variables is also stored with their values, so that it can
        be judged again where they are not set.
        """
        contract = self.checked_contract
        (self.directory / CONTRACT_FILE).write_text(contract.text, encoding="utf-8")

        if contract.resolved_text:
            resolved_file = self.directory / RESOLVED_FILE
            resolved_file.write_text(contract.resolved_text, encoding="utf-8")

        if contract.prices_path is not None:
            prices = contract.prices_path.read_bytes()
            (self.directory / PRICES_FILE).write_bytes(prices)

    def _run_level(self, plan: LevelPlan, target_failure: Failure | None) -> None:
        """Run a level, unless the target cannot be used or the user interrupted the validation.

        A level without all its runs gets a failure, which makes its terms INCONCLUSIVE. An
        interruption after a sufficient number of runs is no failure.

        Args:
            plan: The level and its load.
            target_failure: Why the target cannot be used, or None.
        """
        name = plan.level.name
        if target_failure is not None:
            self.failures[name] = target_failure
            return

        if self.is_interrupted:
            self.failures[name] = INTERRUPTION
            return

        runs = run_level(self.directory, plan, self.settings, self.options)
        self.is_interrupted = runs.is_interrupted

        repetition = self.options.repetition_of(plan.level)
        if runs.failure is not None:
            self.failures[name] = runs.failure
        elif runs.is_interrupted and not repetition.is_complete(runs.summaries):
            progress = f"{len(runs.summaries)} of {repetition.description} runs"
            self.failures[name] = Failure(f"interrupted by the user after {progress}")

    def _score_responses(
        self, check: AnswerCheck, other_endpoint: Settings | None, target_failure: Failure | None
    ) -> None:
        """Send the prompts of the contract and score the responses.

        No error is raised: it is recorded as the reason why the terms about responses fail. The
        levels, whose runs are already done, can still be judged.

        Args:
            check: The data set of the contract and the terms about responses.
            other_endpoint: The endpoint that responses are compared with, if any.
            target_failure: Why the target cannot be used, or None.
        """
        if target_failure is not None:
            self.failures[ANSWERS_LEVEL] = target_failure
            return

        if self.is_interrupted:
            self.failures[ANSWERS_LEVEL] = INTERRUPTION
            return

        self.options.show_status(f"Scoring responses to {check.dataset}")
        try:
            answer_scoring.score_answers(
                check,
                self.checked_contract.directory / check.dataset,
                AnswerEndpoints(self.settings, other_endpoint),
                self.directory / answer_scoring.DIRECTORY,
                self.checked_contract.contract.confidence,
            )
        except KeyboardInterrupt:
            self.is_interrupted = True
            self.failures[ANSWERS_LEVEL] = INTERRUPTION
        except (LoadgenError, CombinedError) as error:
            context = "the prompts could not be sent"
            self.failures[ANSWERS_LEVEL] = Failure.from_error(context, error)


def run_level(
    directory: Path,
    plan: LevelPlan,
    settings: Settings,
    options: ValidationOptions,
    earlier_runs: int = 0,
) -> LevelRuns:
    """Run a level as often as it is to be repeated, with the required pause between runs.

    It ends early if the user interrupts it or if a run fails.

    Args:
        directory: The directory of the validation.
        plan: The level and its load.
        settings: The settings of the runs.
        options: How the runs are made.
        earlier_runs: The number of runs that the level already has.
    """
    level = plan.level
    repetition = options.repetition_of(level)

    total_text = repetition.description
    if earlier_runs:
        total_text = f"{earlier_runs} + {total_text}"

    summaries: list[Summary] = []
    while not repetition.is_complete(summaries):
        number = earlier_runs + len(summaries) + 1
        if number > 1 and not _pause_before_run(level, number, settings, options):
            return LevelRuns(summaries, is_interrupted=True)

        options.show_status(f"Level {level.name}: run {number} of {total_text}")
        workload = prepare_workload_of_run(
            plan.workload, level.name, number, options.seed, options.salt
        )

        run_dir = directory / level.name / f"r{number}"
        run_settings = replace(settings, out=run_dir)
        if needs_token_times(level):
            run_settings = replace(run_settings, keep="gaps")
        try:
            summary, _ = options.execute(workload, run_settings)
        except (TargetError, CombinedError) as error:
            failure = Failure.from_error(f"run {number} failed", error)
            return LevelRuns(summaries, failure=failure)

        summaries.append(summary)
        if summary.run.state == "interrupted":
            return LevelRuns(summaries, is_interrupted=True)

    return LevelRuns(summaries)


def _pause_before_run(
    level: ContractLevel, number: int, settings: Settings, options: ValidationOptions
) -> bool:
    """Wait for the required pause before a run. Return False if the user interrupted it."""
    return pause_before(
        f"{level.name}, run {number}",
        options.repetition_of(level),
        virtual=settings.virtual,
        print_line=options.show_status,
        wait=options.sleep,
    )


def prepare_workload_of_run(
    workload: Workload, level: str, number: int, seed: int | None, salt: str | None
) -> Workload:
    """Return the workload of one run of a level, with a seed and with prompts of its own.

    If a seed is set, each run gets another one that is derived from it. The prompts of a run are
    unique, so that no run finds them in the server's prefix cache.

    Args:
        workload: The workload of the level.
        level: The name of the level.
        number: The number of the run in the level, from 1.
        seed: The seed of the command line, or None for that of the workload file.
        salt: The salt of the command line, or None for that of the workload file.
    """
    changes: dict[str, int | str] = {}
    if seed is not None:
        changes["seed"] = seed
    if salt is not None:
        changes["salt"] = salt
    seeded_workload = with_repeat_seed(workload.model_copy(update=changes), number, level)
    return with_unique_prompts(seeded_workload, f"{level}.r{number}")


# -- the target -----------------------------------------------------------------------------------


def with_contract_gpus(settings: Settings, gpus: int | None) -> Settings:
    """Return the settings with the contract's number of GPUs where the user gave none.

    A simulated target keeps the number of its preset.
    """
    if settings.virtual:
        return settings
    targets = tuple(replace(target, gpus=target.gpus or gpus) for target in settings.targets)
    return replace(settings, gpus=settings.gpus or gpus, targets=targets)


def check_target(
    settings: Settings, directory: Path, show_status: Callable[[str], None]
) -> list[Finding]:
    """Make the preflight checks of every endpoint and return their findings.

    The reports of all endpoints are written to `doctor.json`. A simulation in virtual time is not
    checked, because it has no endpoint.

    Args:
        settings: The target of the validation, which may have several endpoints.
        directory: The directory of the validation.
        show_status: Shows the warnings and the failed checks.
    """
    if settings.virtual:
        return []

    from loadgen.doctor import doctor

    has_several_endpoints = len(settings.endpoints) > 1
    all_findings: list[Finding] = []

    reports = []
    for endpoint_index, endpoint in enumerate(settings.endpoints):
        endpoint_settings = settings.for_endpoint(endpoint) if endpoint.url else settings
        title, findings = doctor.examine_target(endpoint_settings)
        reports.append({"title": title, "findings": findings})

        labelled_findings = findings
        if has_several_endpoints:
            # The host of the client is the same for all endpoints, so it is reported once.
            is_first_endpoint = endpoint_index == 0
            labelled_findings = _label_findings(
                findings, endpoint.display_name, keep_host=is_first_endpoint
            )

        all_findings += labelled_findings
        _show_problems(title, labelled_findings, show_status)

    (directory / DOCTOR_FILE).write_bytes(format.document(reports))
    return all_findings


def _show_problems(
    title: str, findings: Sequence[Finding], show_status: Callable[[str], None]
) -> None:
    """Show the warnings and the failed checks among the findings about an endpoint, if any.

    Args:
        title: The heading above them.
        findings: All findings about the endpoint.
        show_status: Shows a text.
    """
    from loadgen.doctor.findings import build_report

    problems = [finding for finding in findings if finding.state in (FAULT, WARNING)]
    if problems:
        show_status(as_text.render(build_report(title, problems)).rstrip())


def _label_findings(
    findings: Sequence[Finding], endpoint: str, *, keep_host: bool
) -> list[Finding]:
    """Return the findings about one of several endpoints, labelled with the name of the endpoint.

    Findings about the client's host are not labelled, because they are the same for all endpoints.

    Args:
        findings: The findings about the endpoint and about the client's host.
        endpoint: The name of the endpoint.
        keep_host: Whether to return the findings about the host too, after the others.
    """
    from loadgen.doctor import host_checks

    endpoint_findings = [
        replace(finding, check=f"{finding.check} of {endpoint}")
        for finding in findings
        if finding.check not in host_checks.HOST
    ]
    if not keep_host:
        return endpoint_findings

    host_findings = [finding for finding in findings if finding.check in host_checks.HOST]
    return endpoint_findings + host_findings


def _describe_problems(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the findings that are warnings or worse, as text."""
    return tuple(
        f"{finding.check}: {finding.observed}"
        for finding in findings
        if finding.state in (FAULT, WARNING)
    )


# -- the directory --------------------------------------------------------------------------------


def format_now() -> str:
    """Return the local time in ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds")


def _choose_directory(output_dir: Path | None, contract_name: str) -> Path:
    """Return the directory of a new validation: that of `--out`, or a new one in `results`.

    Raises:
        UserError: The path is in use: there is a directory that is not empty, or a file.
    """
    if output_dir is None:
        now = datetime.datetime.now().astimezone()
        output_dir = Path("results") / run_id(f"validate-{contract_name}", now)

    is_empty_directory = output_dir.is_dir() and not any(output_dir.iterdir())
    if output_dir.exists() and not is_empty_directory:
        hint = "give a new folder, or --force to rename the existing one"
        raise UserError("folder_in_use", "the folder is not empty", f"--out {output_dir}", hint)

    return output_dir
