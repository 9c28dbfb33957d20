"""The command `loadgen validate`: run, extend or judge the validation of a contract."""

from __future__ import annotations

import math
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from msgspec.structs import replace

from loadgen import commands
from loadgen.answers.command import AgainstKey, AgainstModel, other_endpoint
from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.cli.options import add_options
from loadgen.cli.output import print_answer, say
from loadgen.cli.resume import arguments_to_type_again, resume_arguments
from loadgen.cli.run_options import LOAD_OPTIONS
from loadgen.core import format, units
from loadgen.core.errors import OK, CombinedError, LoadgenError, UserError, collecting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.contracts.level_plan import CheckedContract, LevelPlan
    from loadgen.contracts.run import ValidationOptions
    from loadgen.contracts.verdict import Validation
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Overrides, Workload
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.run_display import RunDisplay


MAX_EXTENSIONS = 3
"""How often a level with `duration: auto` is extended at most.

Each interim analysis of the growing records is judged at a higher confidence, so later ones need
more load.
"""

MAX_SECONDS_SHOWN = 600
"""Length of an added run from which a suggested command gives it in minutes."""


class OtherEndpointOptions(NamedTuple):
    """The options about the endpoint that answers are compared with."""

    url: str | None
    model: str | None
    key_file: Path | None


class ValidateRequest(NamedTuple):
    """What the command line asks for: the contract, the target, and how the levels are run.

    Attributes:
        checked_contract: The contract.
        settings: The target and the settings of the runs.
        overrides: What the options change in the load.
        repetition: How often each level is run. None for what the contract says.
    """

    checked_contract: CheckedContract
    settings: Settings
    overrides: Overrides
    repetition: Repetition | None

    def runs_per_level(self) -> dict[str, int]:
        """Return how many runs each level has at least, by its name."""
        return {
            plan.level.name: self.repetition.min_runs if self.repetition else plan.level.repeats
            for plan in self.checked_contract.levels
        }

    def planned_runs(self) -> list[tuple[Workload, Settings]]:
        """Return the workload and the settings of all runs that are made at least."""
        runs = self.runs_per_level()
        return [
            (plan.workload, self.settings)
            for plan in self.checked_contract.levels
            for _ in range(runs[plan.level.name])
        ]


@add_options(
    without=(*(LOAD_OPTIONS - {"seed", "salt"}), "keep"),
    help_texts={"out": "A new folder for all of it."},
)
def validate(
    invocation: Invocation,
    contract: Annotated[
        Path | None,
        typer.Argument(
            help=(
                "A contract file, the name of a shipped one, "
                "or a folder of a validation to judge anew."
            ),
            autocompletion=completion.complete_contract,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help=(
                "Check everything and predict, by a simulated server, "
                "what load each term needs; send nothing."
            ),
        ),
    ] = False,
    duration: Annotated[
        str | None,
        typer.Option(
            "--duration",
            "-d",
            metavar="TIME",
            help="No level's load is longer; says what cannot be decided then.",
        ),
    ] = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            "--extend",
            metavar="FOLDER",
            help="Folder of a validation to add load to, where it is undecided; without its flags.",
        ),
    ] = None,
    add: Annotated[
        str | None,
        typer.Option(
            "--add",
            metavar="TIME",
            help="With --extend: length of each added run; else as in the contract.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print verdict.json.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="URL", help="Endpoint B, that the contract compares answers with."
        ),
    ] = None,
    against_model: AgainstModel = None,
    against_key_file: AgainstKey = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE",
            help="Also write all of it into one file for `loadgen verify`: poc.zip.",
        ),
    ] = None,
) -> int:
    """Measure what a contract promises and say PASS, FAIL or INCONCLUSIVE, with reasons, in one
    folder with hashes.

    Exit: 0 PASS, 1 FAIL, 2 wrong usage or contract, 3 a level could not be
    measured, 4 INCONCLUSIVE, 70 bug, 130 interrupted.

    Of a validation that is extended, each look at the growing records is judged at a higher
    confidence (97.5 %, 98.75 %, ... of 95 %), so that looking again makes no wrong PASS likely;
    what was decided stays so.

    Example: loadgen validate contract.yaml --url http://HOST:8000 --repeat 3
    """  # noqa: D205 - the text of `--help`
    from loadgen.contracts import outputs, stored_validation
    from loadgen.core.workload.workload_files import packaged_files
    from loadgen.runs.run_display import create_display

    if contract is None and extend is not None:
        original = stored_validation.read_original_command(extend)
        resumed = resume_arguments(original, invocation.arguments, "--extend", extend)
        return invocation.run_command_line(resumed)
    if contract is None:
        hint = f"a file, a folder, or: {', '.join(packaged_files('contracts'))}"
        raise UserError("missing_option", "no contract", "loadgen validate", hint)
    if contract.is_dir():
        return _judge_stored(contract, as_json=as_json, bundle=bundle)
    errors: list[LoadgenError] = []
    added_run_ns = None
    with collecting(errors):
        added_run_ns = _parse_length(add, "--add")
    if add is not None and extend is None:
        text = "says how much to add, and to nothing"
        errors.append(UserError("no_effect", text, f"--add {add}", "--extend FOLDER"))
    if bundle is not None and bundle.exists():
        where = f"--bundle {bundle}"
        errors.append(UserError("file_exists", "this file exists", where, "give another name"))
    other = OtherEndpointOptions(against, against_model, against_key_file)
    request = _read_request(
        invocation, contract, duration, has_other_endpoint=against is not None, errors=errors
    )
    other_settings = _other_endpoint_settings(request, other, dry_run=dry_run)
    priced_invocation = _with_contract_prices(invocation, request)
    show = create_display(priced_invocation, quiet=dry_run)
    if dry_run:
        show.announce_runs(request.planned_runs(), always=True)
        return _print_forecast(request, show, as_json=as_json)
    validator = Validator(invocation, request, show)
    if extend is not None:
        directory = extend
        validation = validator.extend(directory, added_run_ns)
    else:
        validation, directory = validator.run(other_settings)
    print_answer(validation, outputs.build_report(directory, validation), as_json=as_json)
    page = directory / outputs.PAGE_FILE
    say(f"all of it in {directory}, the page for people: {page}")
    if validation.can_be_extended:
        _suggest_next_command(validation, request.runs_per_level(), directory)
    return _bundle_results(validation, directory, bundle)


# -- reading the command line ---------------------------------------------------------------------


def _read_request(
    invocation: Invocation,
    contract: Path,
    duration: str | None,
    *,
    has_other_endpoint: bool,
    errors: list[LoadgenError],
) -> ValidateRequest:
    """Read the contract and the options, and check them together.

    Args:
        invocation: The command line.
        contract: The contract file.
        duration: The value of `--duration`.
        has_other_endpoint: Whether there is an endpoint to compare answers with.
        errors: The errors that were already found.

    Raises:
        CombinedError: There are errors. It holds all of them.
    """
    from loadgen.contracts.loading import load_contract
    from loadgen.contracts.run import with_contract_gpus

    repetition = None
    longest_ns = None
    with collecting(errors):
        settings = invocation.settings()
    overrides = invocation.overrides()
    errors += overrides.errors
    with collecting(errors):
        repetition = invocation.repetition()
    with collecting(errors):
        longest_ns = _parse_length(duration, "--duration")
    with collecting(errors):
        checked_contract = load_contract(
            contract,
            gpus=invocation["gpus"],
            repeats=repetition.min_runs if repetition else None,
            longest_ns=longest_ns,
            against=has_other_endpoint,
        )
    if errors:
        raise CombinedError(errors)
    if settings.values:
        _check_values(checked_contract, settings)
    settings = with_contract_gpus(settings, checked_contract.contract.gpus)
    return ValidateRequest(checked_contract, settings, overrides, repetition)


def _parse_length(text: str | None, option: str) -> int | None:
    """Return the value of an option as a time in ns. Raise UserError if it is wrong or 0."""
    length_ns = parse_option(option, text, partial(units.duration_ns, bare="s"))
    if length_ns == 0:
        raise UserError("out_of_range", "no time at all", f"{option} {text}", f"{option} 10m")
    return length_ns


def _check_values(checked_contract: CheckedContract, settings: Settings) -> None:
    """Raise CombinedError for terms about tokens if the API has answers without tokens.

    An API such as embeddings returns its answer at once. Of the latencies only `e2e` is defined
    for it.
    """
    from loadgen.contracts.terms import latency_metrics

    errors: list[LoadgenError] = []
    for plan in checked_contract.levels:
        for _, term in plan.level.terms_by_requirement():
            if term.kind in latency_metrics() and term.kind != "e2e":
                text = (
                    f"answers of {settings.api} have no tokens: {term.text} could never be decided"
                )
                hint = "promise e2e, or leave --api out"
                errors.append(UserError("unsupported", text, f"--api {settings.api}", hint))
    if errors:
        raise CombinedError(errors)


def _other_endpoint_settings(
    request: ValidateRequest, other: OtherEndpointOptions, *, dry_run: bool
) -> Settings | None:
    """Return the settings of the endpoint that answers are compared with, or None if there is none.

    Raises:
        UserError: The options do not fit the contract or the target.
    """
    check = request.checked_contract.contract.answers
    settings = request.settings
    if check is None:
        if other.url is not None:
            text = "this contract asks nothing about answers"
            hint = "answers: {dataset: FILE, must: [...]}"
            raise UserError("no_effect", text, "--against", hint)
        return None
    if settings.virtual and not dry_run:
        raise UserError(
            "unsupported",
            "a simulation in virtual time generates no texts to compare",
            "--url",
            "start a simulated server with loadgen sim, and give its URL",
        )
    if other.url is None:
        # Only the contract names the endpoint. The credentials for the target are not sent to it.
        settings = replace(settings, api_key=None, headers=())
    url = other.url or check.against
    model = other.model or check.against_model
    return other_endpoint(settings, url, model, other.key_file)


def _with_contract_prices(invocation: Invocation, request: ValidateRequest) -> Invocation:
    """Return the invocation with the prices of the contract, if it has none of its own.

    Prices that do not fit the target are left out here: they are for terms about cost.
    """
    from loadgen.core.schedule.forecast import Forecast
    from loadgen.runs.planned_runs import target_facts

    prices = request.checked_contract.prices_path
    if invocation["prices"] is not None or prices is None:
        return invocation
    priced = invocation.with_options(prices=prices)
    budget = priced.budget()
    try:
        if budget is not None:
            # Any load will do: the attempt shows whether the prices fit the target.
            an_hour = Forecast(requests=1.0, seconds=3600.0, input_tokens=1.0, output_tokens=1.0)
            budget.forecast_cost(an_hour, target_facts(request.settings))
    except LoadgenError:
        return invocation
    return priced


# -- running --------------------------------------------------------------------------------------


class Validator:
    """Runs or extends a validation for the command line, and shows its progress."""

    def __init__(self, invocation: Invocation, request: ValidateRequest, show: RunDisplay) -> None:
        """Prepare the validation that the command line asks for."""
        self.invocation = invocation
        self.request = request
        self.show = show
        self.execute = invocation.executor(show.event_handlers)

    def run(self, other_endpoint: Settings | None) -> tuple[Validation, Path]:
        """Run a new validation. Return the verdict and the directory of the results.

        A level with `duration: auto` is extended until it is decided. The length of its load, which
        the user did not give, is shown before the run.
        """
        from loadgen.contracts.level_plan import plan_text
        from loadgen.contracts.run import run_validation

        settings = self.request.settings
        plans = self.request.checked_contract.levels
        for plan in plans:
            if plan.is_auto:
                say(plan_text(plan))
        has_auto_level = any(plan.is_auto for plan in plans)
        self.show.announce_runs(self.request.planned_runs(), always=has_auto_level)
        self.invocation.move_existing_results(settings.out)
        self._begin_progress(is_extension=False)
        validation, directory = run_validation(
            self.request.checked_contract, settings, settings.out, self._options(), other_endpoint
        )
        return self._extend_auto_levels(validation, directory), directory

    def extend(self, directory: Path, added_run_ns: int | None) -> Validation:
        """Add runs to a stored validation and return its verdict."""
        self._begin_progress(is_extension=True)
        return self._add_runs(directory, added_run_ns)

    def _begin_progress(self, *, is_extension: bool) -> None:
        """Start to show the progress of all runs, and say which levels are shortened.

        The weight of a run is its share of the progress bar.
        """
        from loadgen.contracts.level_plan import plan_text
        from loadgen.repeated.repeats import Repetition

        repetition = self.request.repetition
        weights: list[float] = []
        for plan in self.request.checked_contract.levels:
            is_virtual = self.request.settings.virtual
            level_repetition = repetition or Repetition(count=plan.level.repeats)
            weights += [_run_weight(plan, is_virtual=is_virtual)] * level_repetition.max_runs
        # Without a count, runs are repeated until they agree, and there may be fewer than planned.
        is_open_ended = repetition is not None and not repetition.count
        self.show.begin_steps(len(weights), at_most=is_extension or is_open_ended, weights=weights)
        for plan in self.request.checked_contract.levels:
            if plan.is_shortened:
                say(plan_text(plan))

    def _options(self) -> ValidationOptions:
        """Return how runs are made: with progress, and with the seed, salt and repeats given."""
        from loadgen.contracts.run import ValidationOptions

        return ValidationOptions(
            perform=self._perform,
            say=say,
            seed=self.request.overrides.seed,
            salt=self.request.overrides.salt,
            repetition=self.request.repetition,
        )

    def _perform(self, workload: Workload, settings: Settings) -> tuple[Summary, Path]:
        """Run a workload and show its progress."""
        self.show.begin_step(str(settings.out))
        summary, run_dir = self.execute(workload, settings)
        self.show.add_finished(summary)
        return summary, run_dir

    def _add_runs(self, directory: Path, added_run_ns: int | None) -> Validation:
        """Extend the validation in a directory, which no other process may change meanwhile.

        The directory is locked until its new verdict is written.
        """
        from loadgen.contracts.extension import extend_validation
        from loadgen.core.execution.folder_names import locked_folder

        with locked_folder(directory):
            return extend_validation(
                directory,
                self.request.checked_contract,
                self.request.settings,
                self._options(),
                added_run_ns,
            )

    def _extend_auto_levels(self, validation: Validation, directory: Path) -> Validation:
        """Add load to levels with `duration: auto` until they are decided.

        Return the last verdict. Nothing is added if an undecided level has a length of its own, or
        if it is not known how much load would decide it.
        """
        from loadgen.contracts.verdict import additional_load_per_run_s

        runs_per_level = self.request.runs_per_level()
        extendable = {
            plan.level.name
            for plan in self.request.checked_contract.levels
            if plan.is_auto and not plan.is_shortened
        }
        for number in range(1, MAX_EXTENSIONS + 1):
            run_s = additional_load_per_run_s(validation, runs_per_level)
            undecided = [level.name for level in validation.undecided_levels]
            if not validation.can_be_extended or not run_s or not extendable.issuperset(undecided):
                break
            run_count = sum(runs_per_level[name] for name in undecided)
            say(
                f"undecided: {format.counted(run_count, 'run')} of {format.duration(run_s)} more, "
                f"extension {number} of at most {MAX_EXTENSIONS}"
            )
            self.show.begin_steps(run_count)
            validation = self._add_runs(directory, math.ceil(run_s * 1e9))
        return validation


def _run_weight(plan: LevelPlan, *, is_virtual: bool) -> float:
    """Return how long a run takes in comparison with the other runs, or 0 if this is not known.

    A run in virtual time takes as long as it takes to compute its requests. Other runs take as long
    as their load lasts. All runs of a validation are of the same kind, so the weights are
    comparable.
    """
    weight = plan.requests if is_virtual else plan.duration_ns
    return 0.0 if weight is None else float(weight)


# -- output ---------------------------------------------------------------------------------------


def _judge_stored(directory: Path, *, as_json: bool, bundle: Path | None) -> int:
    """Judge a stored validation again, print the report, and return the exit code.

    The verdict comes from the records. If it is INCONCLUSIVE, the user sees which command can
    decide it.
    """
    from loadgen.contracts import outputs, stored_validation

    validation = stored_validation.judge_again(directory)
    print_answer(validation, outputs.build_report(directory, validation), as_json=as_json)
    if validation.verdict == "INCONCLUSIVE":
        contract, _ = stored_validation.read_validation(directory)
        repeats = {level.name: level.repeats for level in contract.levels}
        _suggest_next_command(validation, repeats, directory)
    return _bundle_results(validation, directory, bundle)


def _bundle_results(validation: Validation, directory: Path, bundle: Path | None) -> int:
    """Pack the results into a file, if requested, and return the exit code of the validation."""
    from loadgen.contracts.verdict import exit_code

    if bundle is not None:
        commands.call("bundle", directory, bundle)
    return exit_code(validation)


def _suggest_next_command(
    validation: Validation, repeats: Mapping[str, int], directory: Path
) -> None:
    """Show the user which command can decide an undecided validation.

    More load can decide a level that was measured. A level that could not be measured has to be run
    again from the start.

    Args:
        validation: The validation, whose verdict is INCONCLUSIVE.
        repeats: How many runs an extension adds to each level.
        directory: The directory of the validation.
    """
    from loadgen.contracts.stored_validation import read_original_command
    from loadgen.contracts.verdict import additional_load_per_run_s

    undecided = validation.undecided_levels
    not_measured = [level.name for level in undecided if level.failure_reason]
    is_any_extendable = len(not_measured) < len(undecided)
    if is_any_extendable:
        length = _format_run_length(additional_load_per_run_s(validation, repeats))
        options = arguments_to_type_again(read_original_command(directory))
        arguments = ["validate", "--extend", str(directory), "--add", length, *options]
        say(f"to add load where it is undecided: loadgen {shlex.join(arguments)}")
    if not_measured:
        say(f"to measure {', '.join(not_measured)} anew: the same command, with another --out")


def _format_run_length(seconds: float) -> str:
    """Return the length of an added run as the value of `--add`, such as `90s` or `25m`.

    It is rounded up, because a shorter run would decide nothing. Return `TIME`, for the user to
    replace, if the length is 0, which means that it is not known.
    """
    if seconds == 0:
        return "TIME"
    if seconds < MAX_SECONDS_SHOWN:
        return f"{math.ceil(seconds)}s"
    return f"{math.ceil(seconds / 60)}m"


def _print_forecast(request: ValidateRequest, show: RunDisplay, *, as_json: bool) -> int:
    """Print the load that each term of a contract needs, according to a simulation.

    Return the exit code.
    """
    from loadgen.contracts import prediction
    from loadgen.contracts.costs import compute_cost_per_thousand
    from loadgen.contracts.prediction import ForecastOptions
    from loadgen.contracts.sections import build_forecast_report
    from loadgen.core.execution.run import execute
    from loadgen.pricing.price_file import load_prices

    checked_contract = request.checked_contract
    settings = request.settings
    if not as_json:
        _print_plan(checked_contract)
    simulated = prediction.simulated_settings(settings)
    say(f"simulating {simulated.display_name.removeprefix('simulated: ')} in virtual time")
    cost_function = None
    if checked_contract.prices_path is not None:
        prices = load_prices(checked_contract.prices_path)
        cost_function = partial(compute_cost_per_thousand, prices)
    weights = prediction.step_weights(checked_contract)
    show.begin_steps(len(weights), weights=weights)
    options = ForecastOptions(
        perform=execute,
        cost_function=cost_function,
        seed=request.overrides.seed,
        report_step=show.begin_step,
    )
    forecasts = prediction.forecast_levels(checked_contract, simulated, options)
    real_target = None if settings.virtual else settings.url
    report = build_forecast_report(forecasts, simulated.display_name, real_target=real_target)
    print_answer(
        {"simulated": simulated.display_name, "levels": forecasts}, report, as_json=as_json
    )
    return OK


def _print_plan(checked_contract: CheckedContract) -> None:
    """Print the load of each level of a contract, and what it says about answers."""
    from loadgen.contracts.level_plan import answer_check_text, plan_text

    contract = checked_contract.contract
    print(f"contract: {contract.name}, {contract.confidence * 100:g} % confidence")
    for plan in checked_contract.levels:
        print(plan_text(plan), flush=True)
    if contract.answers is not None:
        print(answer_check_text(contract.answers))
