"""The command `loadgen validate`: run, extend or judge the validation of a contract."""

from __future__ import annotations

import math
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer
from msgspec.structs import replace

from loadgen import commands
from loadgen.answers.command import AgainstKey, AgainstModel, other_endpoint
from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.cli.options import FullOption, add_options
from loadgen.cli.output import print_result, print_status
from loadgen.cli.resume import arguments_to_type_again, resume_arguments
from loadgen.cli.run_options import LOAD_OPTIONS
from loadgen.core import format, units
from loadgen.core.errors import OK, UNSOUND, CombinedError, LoadgenError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loadgen.contracts.evaluate import CostFunction
    from loadgen.contracts.level_plan import CheckedContract, LevelPlan
    from loadgen.contracts.run import ValidationOptions
    from loadgen.contracts.verdict import LevelForecast, Validation
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Overrides, Workload
    from loadgen.pricing.budget import Budget
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.planned_runs import PlannedRun
    from loadgen.runs.run_display import RunDisplay

ValueT = TypeVar("ValueT")
MAX_EXTENSIONS = 3
"""How often a level with `duration: auto` is extended at most.

Each extension is judged at a higher confidence than the one before, so later ones need more load.
"""

MAX_SECONDS_SHOWN = 600
"""The length of an added run from which a suggested command gives it in minutes."""


class OtherEndpointOptions(NamedTuple):
    """The options about the endpoint that responses are compared with."""

    url: str | None
    model: str | None
    key_file: Path | None


class OutputOptions(NamedTuple):
    """How the result is printed, and the file that it is also packed into, if any."""

    as_json: bool
    full: bool
    bundle: Path | None


class ValidateRequest(NamedTuple):
    """The contract, the target, and how the levels are run, as requested on the command line.

    Attributes:
        checked_contract: The contract.
        settings: The target and the settings of the runs.
        overrides: What the options change in the load.
        repetition: How often each level is run. None for the number in the contract.
    """

    checked_contract: CheckedContract
    settings: Settings
    overrides: Overrides
    repetition: Repetition | None

    def runs_per_level(self) -> dict[str, int]:
        """Return the least number of runs of each level, by its name."""
        return {
            plan.level.name: self.repetition.min_runs if self.repetition else plan.level.repeats
            for plan in self.checked_contract.levels
        }

    def planned_runs(self) -> list[PlannedRun]:
        """Return the workload and the settings of each run that will certainly be made.

        The workloads have the seeds of the runs, which decide how many requests arrive in a
        duration. More runs may follow, if the runs of a level are repeated until they agree.
        """
        from loadgen.contracts.run import prepare_workload_of_run
        from loadgen.runs.planned_runs import PlannedRun

        run_counts = self.runs_per_level()
        planned_runs = []
        for plan in self.checked_contract.levels:
            level_name = plan.level.name
            for run_number in range(1, run_counts[level_name] + 1):
                workload = prepare_workload_of_run(
                    plan.workload,
                    level_name,
                    run_number,
                    self.overrides.seed,
                    self.overrides.salt,
                )
                planned_runs.append(PlannedRun(workload, self.settings))

        return planned_runs


@add_options(
    without=(*(LOAD_OPTIONS - {"seed", "salt"}), "keep"),
    help_texts={"out": "New folder for the results."},
)
def validate(
    invocation: Invocation,
    contract: Annotated[
        Path | None,
        typer.Argument(
            help=(
                "Contract file, name of a packaged contract, or folder of a stored "
                "validation to judge again."
            ),
            autocompletion=completion.complete_contract,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help=(
                "Check the contract and forecast by simulation how much load each "
                "term needs. Sends no requests."
            ),
        ),
    ] = False,
    duration: Annotated[
        str | None,
        typer.Option(
            "--duration",
            "-d",
            metavar="TIME",
            help=(
                "Shorten each level to this length, and list the terms that cannot pass with it."
            ),
        ),
    ] = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            "--extend",
            metavar="FOLDER",
            help=(
                "Add runs to the inconclusive levels of this validation, with its original options."
            ),
        ),
    ] = None,
    add: Annotated[
        str | None,
        typer.Option(
            "--add",
            metavar="TIME",
            help="With --extend: length of each added run. Default: as in the contract.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print verdict.json.")
    ] = False,
    full: FullOption = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="URL", help="Endpoint whose responses the contract compares with."
        ),
    ] = None,
    against_model: AgainstModel = None,
    against_key_file: AgainstKey = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE",
            help="Also pack all results into one file, like poc.zip, for loadgen verify.",
        ),
    ] = None,
) -> int:
    """Run the load of a contract and judge each term: PASS, FAIL or INCONCLUSIVE.

    The results are in one folder, with the records and the checksum of each file.

    Exit: 0 PASS, 1 FAIL, 2 wrong usage or contract, 3 INCONCLUSIVE and more load
    cannot decide a level or the level could not be measured, 4 INCONCLUSIVE and
    more load can decide every level (--extend), 70 bug, 130 interrupted.

    An inconclusive validation can be extended. Each extension is judged at a higher confidence
    (97.5 %, 98.75 %, ... for 95 %), so that all together have the error rate of the contract. A
    term that was decided stays decided.

    Example: loadgen validate contract.yaml --url http://HOST:8000 --repeat 3
    """
    output = OutputOptions(as_json, full, bundle)
    if contract is None and extend is not None:
        return _extend_with_original_command(invocation, extend)
    if contract is None:
        raise _create_missing_contract_error()
    if contract.is_dir():
        return _judge_stored_validation(contract, output)

    errors: list[LoadgenError] = []
    _check_added_length(add, extend, errors)
    added_run_ns = _read_or_collect_errors(partial(_parse_length, add, "--add"), errors)
    _check_bundle(bundle, errors)
    other = OtherEndpointOptions(against, against_model, against_key_file)
    request = _read_validate_request(
        invocation, contract, duration, has_other_endpoint=against is not None, errors=errors
    )
    other_settings = _create_other_endpoint_settings(request, other, dry_run=dry_run)
    priced_invocation = _add_contract_prices(invocation, request)
    if dry_run:
        return _print_forecast(priced_invocation, request, output)

    validator = Validator(priced_invocation, request)
    if extend is not None:
        directory = extend
        validation = validator.extend(directory, added_run_ns)
    else:
        validation, directory = validator.run_new(other_settings)

    _print_validation(validation, directory, request.runs_per_level(), output)
    return _finish_command(validation, directory, output.bundle)


# -- reading the command line ---------------------------------------------------------------------


def _extend_with_original_command(invocation: Invocation, directory: Path) -> int:
    """Extend a validation with the options of the command that began it.

    The user only gave the folder and options that differ. Return the exit code.
    """
    from loadgen.contracts import stored_validation

    original = stored_validation.read_original_command(directory)
    arguments = resume_arguments(original, invocation.arguments, "--extend", directory)
    return invocation.run_command_line(arguments)


def _create_missing_contract_error() -> UserError:
    """Return the error for a command line without a contract."""
    from loadgen.core.workload.workload_files import packaged_files

    packaged = ", ".join(packaged_files("contracts"))
    hint = f"give a contract file, a folder of a validation, or one of: {packaged}"
    return UserError("missing_option", "no contract is given", "loadgen validate", hint)


def _read_or_collect_errors(
    read: Callable[[], ValueT], errors: list[LoadgenError]
) -> ValueT | None:
    """Return what a function reads. If it raises an error, add it to `errors` and return None.

    All parts of a command line are read in this way, so that all errors are reported at once.
    """
    try:
        return read()
    except CombinedError as combined:
        errors += combined.errors
    except LoadgenError as error:
        errors.append(error)
    return None


def _check_added_length(add: str | None, extend: Path | None, errors: list[LoadgenError]) -> None:
    """Report the option `--add` without `--extend`, where it has no effect."""
    if add is not None and extend is None:
        text = "--add has no effect without --extend"
        errors.append(UserError("no_effect", text, f"--add {add}", "--extend FOLDER"))


def _check_bundle(bundle: Path | None, errors: list[LoadgenError]) -> None:
    """Report a bundle file that already exists, because it would be overwritten."""
    if bundle is not None and bundle.exists():
        where = f"--bundle {bundle}"
        errors.append(UserError("file_exists", "the file exists", where, "give another name"))


def _read_validate_request(
    invocation: Invocation,
    contract: Path,
    duration: str | None,
    *,
    has_other_endpoint: bool,
    errors: list[LoadgenError],
) -> ValidateRequest:
    """Read the contract and the options of a validation, and check them together.

    Errors are collected until everything is read and raised together, so that the user can correct
    them at once. Only the check whether the contract fits the API needs both to be valid, so it is
    made last and raises its own errors.

    Args:
        invocation: The command line.
        contract: The contract file.
        duration: The value of `--duration`.
        has_other_endpoint: Whether there is an endpoint to compare responses with.
        errors: The errors that were already found. New ones are added.

    Raises:
        CombinedError: All errors that were found.
    """
    from loadgen.contracts.loading import load_contract
    from loadgen.contracts.run import with_contract_gpus

    settings = _read_or_collect_errors(invocation.settings, errors)
    overrides = invocation.overrides()
    errors += overrides.errors
    repetition = _read_or_collect_errors(invocation.repetition, errors)
    max_duration_ns = _read_or_collect_errors(
        partial(_parse_length, duration, "--duration"), errors
    )
    checked_contract = _read_or_collect_errors(
        partial(
            load_contract,
            contract,
            gpus=invocation["gpus"],
            repeats=repetition.min_runs if repetition else None,
            max_duration_ns=max_duration_ns,
            has_other_endpoint=has_other_endpoint,
        ),
        errors,
    )
    if errors or settings is None or checked_contract is None:
        raise CombinedError(errors)

    _check_latency_terms(checked_contract, settings)
    _check_workloads(checked_contract, settings)
    settings = with_contract_gpus(settings, checked_contract.contract.gpus)
    return ValidateRequest(checked_contract, settings, overrides, repetition)


def _parse_length(text: str | None, option: str) -> int | None:
    """Return the value of an option as a time in ns. Raise UserError if it is wrong or 0."""
    length_ns = parse_option(option, text, partial(units.duration_ns, default_unit="s"))
    if length_ns == 0:
        raise UserError("out_of_range", "must be above 0", f"{option} {text}", f"{option} 10m")
    return length_ns


def _check_latency_terms(checked_contract: CheckedContract, settings: Settings) -> None:
    """Raise CombinedError for latency terms that are not defined for the API of the target.

    An API such as embeddings returns numbers, all at once. Of the latencies, only `e2e` is defined
    for such responses: they have no first token and no time per token.
    """
    from loadgen.contracts.terms import list_latency_metrics

    has_tokens = not settings.returns_numbers
    if has_tokens:
        return

    errors: list[LoadgenError] = []
    for plan in checked_contract.levels:
        for _, term in plan.level.terms_by_requirement():
            if term.kind in list_latency_metrics() and term.kind != "e2e":
                text = f"{term.text}: responses of {settings.api} have no tokens"
                hint = "limit e2e instead, or remove --api"
                errors.append(UserError("unsupported", text, f"--api {settings.api}", hint))

    if errors:
        raise CombinedError(errors)


def _check_workloads(checked_contract: CheckedContract, settings: Settings) -> None:
    """Raise CombinedError for everything that a workload needs and the options exclude.

    The runs of the levels would refuse the same, but only after the levels before them have run. A
    problem of several levels is reported once.
    """
    from loadgen.core.execution.plan_checks import workload_errors

    error_by_text: dict[str, LoadgenError] = {}
    for plan in checked_contract.levels:
        for error in workload_errors(plan.workload, settings):
            error_by_text.setdefault(str(error), error)

    if error_by_text:
        raise CombinedError(list(error_by_text.values()))


def _create_other_endpoint_settings(
    request: ValidateRequest, other: OtherEndpointOptions, *, dry_run: bool
) -> Settings | None:
    """Return the settings of a second endpoint, or None if there is none.

    The responses of the target may be compared with those of a second endpoint, for example the
    same model on another server. Its URL is given by the option `--against` or by the contract.

    Args:
        request: The contract and the settings of the target.
        other: The options about the second endpoint.
        dry_run: Whether no request is sent.

    Raises:
        UserError: The options do not fit the contract or the target.
    """
    check = request.checked_contract.contract.answers
    if check is None:
        _reject_useless_url(other)
        return None

    if not dry_run:
        _require_scorable_target(request.settings)

    url = other.url or check.against
    model = other.model or check.against_model
    is_named_by_user = other.url is not None

    # A contract may be written by somebody else, so its endpoint must not get the user's API key.
    settings = request.settings if is_named_by_user else _without_credentials(request.settings)
    return other_endpoint(settings, url, model, other.key_file)


def _reject_useless_url(other: OtherEndpointOptions) -> None:
    """Raise UserError for `--against` with a contract that has no terms about responses."""
    if other.url is not None:
        text = "--against has no effect: the contract has no terms about responses"
        hint = "add answers: {dataset: FILE, must: [...]}"
        raise UserError("no_effect", text, "--against", hint)


def _require_scorable_target(settings: Settings) -> None:
    """Raise UserError for a simulation in virtual time, whose responses have no text to score."""
    if settings.virtual:
        raise UserError(
            "unsupported",
            "a simulation in virtual time has no responses to score",
            "--url",
            "start a simulated server with loadgen sim and use its URL",
        )


def _without_credentials(settings: Settings) -> Settings:
    """Return settings for an endpoint that the contract names and not the user.

    It must not get the API key and the headers of the target.
    """
    return replace(settings, api_key=None, headers=())


def _add_contract_prices(invocation: Invocation, request: ValidateRequest) -> Invocation:
    """Return the invocation with the prices of the contract, if the user gave none.

    With prices, the expected cost of the load is shown. Prices of the contract that do not fit the
    target are left out, because they may be meant for terms about cost only.
    """
    prices = request.checked_contract.prices_path
    if invocation["prices"] is not None or prices is None:
        return invocation

    priced_invocation = invocation.with_options(prices=prices)
    budget = priced_invocation.budget()
    if budget is not None and not _has_fitting_price(budget, request.settings):
        return invocation

    return priced_invocation


def _has_fitting_price(budget: Budget, settings: Settings) -> bool:
    """Return whether a price file has a price for the target.

    The cost of a load can only be computed with a fitting price. Which load it is does not matter.
    """
    from loadgen.core.schedule.forecast import Forecast
    from loadgen.runs.planned_runs import target_facts

    any_load = Forecast(requests=1.0, seconds=3600.0, input_tokens=1.0, output_tokens=1.0)
    try:
        budget.forecast_cost(any_load, target_facts(settings))
    except LoadgenError:
        return False

    return True


# -- running --------------------------------------------------------------------------------------


class Validator:
    """Runs or extends a validation for the command line, and shows its progress."""

    def __init__(self, invocation: Invocation, request: ValidateRequest) -> None:
        """Prepare a validation."""
        from loadgen.runs.run_display import create_display

        self.invocation = invocation
        self.request = request
        self.display = create_display(invocation)
        self.execute = invocation.executor(self.display.event_handlers)

    def run_new(self, other_endpoint: Settings | None) -> tuple[Validation, Path]:
        """Run a new validation. Return the verdict and the directory of the results.

        A level with `duration: auto` is extended while it is undecided.

        Args:
            other_endpoint: The endpoint that responses are compared with, if any.
        """
        from loadgen.contracts.run import run_validation

        settings = self.request.settings
        self._announce_load()
        self.invocation.move_existing_results(settings.out)
        self._start_progress(is_extension=False)
        validation, directory = run_validation(
            self.request.checked_contract,
            settings,
            settings.out,
            self._create_options(),
            other_endpoint,
        )

        return self._extend_auto_levels(validation, directory), directory

    def _announce_load(self) -> None:
        """Print what the runs will send, and the plans of levels whose length is automatic.

        The user has not seen the length of such a level anywhere else, so the announcement is
        printed for it even where it would be left out, as for a single run.
        """
        from loadgen.contracts.level_plan import format_plan

        auto_plans = [plan for plan in self.request.checked_contract.levels if plan.is_auto]
        for plan in auto_plans:
            print_status(format_plan(plan))
        has_auto_plan = len(auto_plans) > 0
        self.display.announce_runs(self.request.planned_runs(), always_print=has_auto_plan)

    def extend(self, directory: Path, added_run_ns: int | None) -> Validation:
        """Add runs to a stored validation and return its verdict."""
        self._start_progress(is_extension=True)
        return self._add_runs(directory, added_run_ns)

    def _start_progress(self, *, is_extension: bool) -> None:
        """Start the progress bar of all runs, and show the plans of levels that are shortened.

        Args:
            is_extension: Whether runs are added to a stored validation.
        """
        from loadgen.contracts.level_plan import format_plan

        self._begin_progress_bar(is_extension=is_extension)
        for plan in self.request.checked_contract.levels:
            if plan.is_shortened:
                print_status(format_plan(plan))

    def _begin_progress_bar(self, *, is_extension: bool) -> None:
        """Start the progress bar with one step per planned run.

        Args:
            is_extension: Whether runs are added to a stored validation. Then only the undecided
                levels are run, so there may be fewer runs than planned.
        """
        run_weights = self._estimate_run_weights()
        # Without a count, runs are repeated until they agree, and there may be fewer than planned.
        repetition = self.request.repetition
        is_open_ended = repetition is not None and repetition.count is None
        self.display.begin_steps(
            len(run_weights), at_most=is_extension or is_open_ended, weights=run_weights
        )

    def _estimate_run_weights(self) -> list[float]:
        """Return how much of the progress bar each planned run takes, relative to the others."""
        from loadgen.repeated.repeats import Repetition

        run_weights: list[float] = []
        for plan in self.request.checked_contract.levels:
            repetition = self.request.repetition or Repetition(count=plan.level.repeats)
            weight = _estimate_run_weight(plan, is_virtual=self.request.settings.virtual)
            run_weights += [weight] * repetition.max_runs

        return run_weights

    def _create_options(self) -> ValidationOptions:
        """Return how runs are made: with progress, and with the user's seed, salt and repeats."""
        from loadgen.contracts.run import ValidationOptions

        return ValidationOptions(
            execute=self._execute_with_progress,
            show_status=print_status,
            seed=self.request.overrides.seed,
            salt=self.request.overrides.salt,
            repetition=self.request.repetition,
        )

    def _execute_with_progress(
        self, workload: Workload, settings: Settings
    ) -> tuple[Summary, Path]:
        """Run a workload and show its progress."""
        self.display.begin_step(str(settings.out))
        summary, run_dir = self.execute(workload, settings)
        self.display.print_finished(summary)
        return summary, run_dir

    def _add_runs(self, directory: Path, added_run_ns: int | None) -> Validation:
        """Extend the validation in a directory and return the new verdict.

        The directory is locked, so that no other process changes it meanwhile.
        """
        from loadgen.contracts.extension import extend_validation
        from loadgen.core.execution.folder_names import locked_folder

        with locked_folder(directory):
            return extend_validation(
                directory,
                self.request.checked_contract,
                self.request.settings,
                self._create_options(),
                added_run_ns,
            )

    def _extend_auto_levels(self, validation: Validation, directory: Path) -> Validation:
        """Add runs to levels with `duration: auto` until they are decided, and return the verdict.

        There are at most `MAX_EXTENSIONS`.
        """
        for extension_number in range(1, MAX_EXTENSIONS + 1):
            added_run_s = self._find_added_run_length_s(validation)
            if added_run_s == 0:
                break

            runs_per_level = self.request.runs_per_level()
            run_count = sum(runs_per_level[level.name] for level in validation.undecided_levels)
            print_status(
                f"Inconclusive: adding {format.counted(run_count, 'run')} of "
                f"{format.duration(added_run_s)} (extension {extension_number} of at most "
                f"{MAX_EXTENSIONS})"
            )
            self.display.begin_steps(run_count)
            validation = self._add_runs(directory, math.ceil(added_run_s * units.NS_PER_S))
        return validation

    def _find_added_run_length_s(self, validation: Validation) -> float:
        """Return how long each run of an automatic extension has to be, in seconds.

        Return 0 if no extension is made: if the validation is decided, if it is not known how much
        load would decide it, or if the user chose the length of an undecided level. A level may
        only be extended if its length was found automatically and not limited by the user.
        """
        from loadgen.contracts.verdict import compute_additional_load_per_run_s

        if not validation.can_be_extended:
            return 0.0

        extendable_levels = {
            plan.level.name
            for plan in self.request.checked_contract.levels
            if plan.is_auto and not plan.is_shortened
        }
        can_extend_all = all(
            level.name in extendable_levels for level in validation.undecided_levels
        )
        if not can_extend_all:
            return 0.0

        return compute_additional_load_per_run_s(validation, self.request.runs_per_level())


def _estimate_run_weight(plan: LevelPlan, *, is_virtual: bool) -> float:
    """Return how long a run takes relative to the other runs, or 0 if this is not known.

    The time of a run in virtual time is proportional to its requests. Another run takes as long as
    its load. A validation has runs of one kind only, so their weights are comparable.
    """
    weight = plan.requests if is_virtual else plan.duration_ns
    return 0.0 if weight is None else float(weight)


# -- output ---------------------------------------------------------------------------------------


def _judge_stored_validation(directory: Path, output: OutputOptions) -> int:
    """Judge a stored validation again from its records, print it, and return the exit code."""
    from loadgen.contracts import outputs, stored_validation

    validation = stored_validation.judge_again(directory)
    report = outputs.build_report(directory, validation)
    print_result(validation, report, as_json=output.as_json, full=output.full)

    if validation.verdict == "INCONCLUSIVE":
        contract, _ = stored_validation.read_validation(directory)
        runs_per_level = {level.name: level.repeats for level in contract.levels}
        _suggest_next_command(validation, runs_per_level, directory)

    return _finish_command(validation, directory, output.bundle)


def _print_validation(
    validation: Validation,
    directory: Path,
    runs_per_level: Mapping[str, int],
    output: OutputOptions,
) -> None:
    """Print the verdict of a new or extended validation, and what the user can do next.

    Args:
        validation: The validation.
        directory: The directory of its results.
        runs_per_level: How many runs an extension adds to each level, by the name of the level.
        output: How to print it.
    """
    from loadgen.contracts import outputs

    report = outputs.build_report(directory, validation)
    print_result(validation, report, as_json=output.as_json, full=output.full)
    print_status(f"Report: {directory / outputs.PAGE_FILE}")

    if not output.full:
        print_status(f"Details: loadgen report {shlex.quote(str(directory))} --full")

    if validation.can_be_extended:
        _suggest_next_command(validation, runs_per_level, directory)


def _finish_command(validation: Validation, directory: Path, bundle: Path | None) -> int:
    """Write the bundle, if the user requested one, and return the exit code of the command.

    Args:
        validation: The validation that was printed.
        directory: The directory of its results.
        bundle: The file into which the results are packed (`--bundle`), or None.
    """
    from loadgen.contracts.verdict import get_exit_code

    if bundle is not None:
        commands.call("bundle", directory, bundle)
    return get_exit_code(validation)


def _suggest_next_command(
    validation: Validation, runs_per_level: Mapping[str, int], directory: Path
) -> None:
    """Print the command that can decide an inconclusive validation.

    More load can decide a level that was measured, unless it lacks what its undecided terms need. A
    level that could not be measured has to be run again in a new validation.

    Args:
        validation: The validation, whose verdict is INCONCLUSIVE.
        runs_per_level: How many runs an extension adds to each level, by the name of the level.
        directory: The directory of the validation.
    """
    undecided_levels = validation.undecided_levels
    unmeasured_names = [level.name for level in undecided_levels if level.failure_reason]

    if any(level.can_be_decided_by_load for level in undecided_levels):
        arguments = build_extend_arguments(validation, runs_per_level, directory)
        print_status(f"Extend: loadgen {shlex.join(arguments)}")

    if unmeasured_names:
        print_status(
            f"To measure {', '.join(unmeasured_names)} again, repeat the command with a new --out"
        )


def build_extend_arguments(
    validation: Validation, runs_per_level: Mapping[str, int], directory: Path
) -> list[str]:
    """Return the arguments of the command that extends a validation.

    They include the options of the original command that are not stored, such as a key file. If it
    is not known how much load is needed, the added runs are as long as those of the contract.
    """
    from loadgen.contracts.stored_validation import read_original_command
    from loadgen.contracts.verdict import compute_additional_load_per_run_s

    added_length_s = compute_additional_load_per_run_s(validation, runs_per_level)
    is_length_known = added_length_s > 0
    length_option = ["--add", _format_run_length(added_length_s)] if is_length_known else []
    options = arguments_to_type_again(read_original_command(directory))
    return ["validate", "--extend", str(directory), *length_option, *options]


def _format_run_length(seconds: float) -> str:
    """Return the length of an added run as the value of `--add`, such as `90s` or `25m`.

    It is rounded up, because a shorter run would decide nothing.
    """
    if seconds < MAX_SECONDS_SHOWN:
        return f"{math.ceil(seconds)}s"
    return f"{math.ceil(seconds / 60)}m"


def _print_forecast(invocation: Invocation, request: ValidateRequest, output: OutputOptions) -> int:
    """Simulate a contract, print the load that each of its terms needs, and return the exit code.

    This is `loadgen validate --dry-run`. No request is sent.
    The exit code says that the forecast is not usable if a level could not be simulated.

    Args:
        invocation: The command line.
        request: The contract and the target.
        output: How the forecast is printed.
    """
    from loadgen.contracts.prediction import create_simulated_settings
    from loadgen.contracts.sections import build_forecast_report
    from loadgen.runs.run_display import create_display

    display = create_display(invocation, quiet=True)
    display.announce_runs(request.planned_runs(), always_print=True)

    if not output.as_json:
        _print_plan(request.checked_contract)

    simulated = create_simulated_settings(request.settings)
    preset = simulated.display_name.removeprefix("simulated: ")
    print_status(f"Simulating {preset} in virtual time")
    forecasts = _forecast_with_progress(request, simulated, display)
    real_target = None if request.settings.virtual else request.settings.url
    report = build_forecast_report(forecasts, simulated.display_name, real_target=real_target)
    document = {"simulated": simulated.display_name, "levels": forecasts}
    print_result(document, report, as_json=output.as_json, full=output.full)

    if any(forecast.failure_reason for forecast in forecasts):
        return UNSOUND
    return OK


def _forecast_with_progress(
    request: ValidateRequest, simulated: Settings, display: RunDisplay
) -> tuple[LevelForecast, ...]:
    """Return the load that each term of a contract needs, and show the progress.

    Args:
        request: The contract.
        simulated: The simulated target.
        display: Shows the progress.
    """
    from loadgen.contracts import prediction
    from loadgen.core.execution.run import execute

    checked_contract = request.checked_contract
    step_weights = prediction.estimate_step_weights(checked_contract)
    display.begin_steps(len(step_weights), weights=step_weights)
    options = prediction.ForecastOptions(
        execute=execute,
        cost_function=_create_cost_function(checked_contract),
        seed=request.overrides.seed,
        report_step=display.begin_step,
    )

    return prediction.forecast_levels(checked_contract, simulated, options)


def _create_cost_function(checked_contract: CheckedContract) -> CostFunction | None:
    """Return the function that computes costs at the prices of a contract, or None without them."""
    from loadgen.contracts.costs import compute_cost_per_thousand
    from loadgen.pricing.price_file import load_prices

    if checked_contract.prices_path is None:
        return None
    return partial(compute_cost_per_thousand, load_prices(checked_contract.prices_path))


def _print_plan(checked_contract: CheckedContract) -> None:
    """Print the load of each level of a contract, and its terms about responses."""
    from loadgen.contracts.level_plan import format_answer_check, format_plan

    contract = checked_contract.contract
    print(f"Contract {contract.name}, confidence {contract.confidence * 100:g} %")

    for plan in checked_contract.levels:
        print(format_plan(plan), flush=True)

    if contract.answers is not None:
        print(format_answer_check(contract.answers))
