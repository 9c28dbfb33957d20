"""`loadgen validate`: run the validation of a contract, or judge a stored validation again; print the verdict."""

from __future__ import annotations

import math
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
    from collections.abc import Callable, Mapping

    from loadgen.contracts.schema import Checked
    from loadgen.contracts.verdict import Validation
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Overrides, Workload
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.show import Show


MOST_EXTENSIONS = 3
"""How often a level with `duration: auto` is extended at most.

Each look at the growing records is judged at a higher confidence, so later ones need more load.
"""


@add_options(
    without=(*(LOAD_OPTIONS - {"seed", "salt"}), "keep"),
    help_texts={"out": "A new folder for all of it."},
)
def validate(
    invocation: Invocation,
    contract: Annotated[
        Path | None,
        typer.Argument(
            help="A contract file, the name of a shipped one, or a folder of a validation to judge anew.",
            autocompletion=completion.complete_contract,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and predict, by a simulated server, what load each term needs; send nothing.",
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
    """Measure what a contract promises and say PASS, FAIL or INCONCLUSIVE, with reasons, in one folder with hashes.

    Exit: 0 PASS, 1 FAIL, 2 wrong usage or contract, 3 a level could not be
    measured, 4 INCONCLUSIVE, 70 bug, 130 interrupted.

    Of a validation that is extended, each look at the growing records is judged at a higher confidence (97.5 %, 98.75
    %, ... of 95 %), so that looking again makes no wrong PASS likely; what was decided stays so.

    Example: loadgen validate contract.yaml --url http://HOST:8000 --repeat 3
    """
    from loadgen.contracts import run, stored_validation, verdict
    from loadgen.contracts.level_plan import planned_words
    from loadgen.core.execution.folder_names import alone
    from loadgen.core.workload.loading import packaged_files
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.show import shown

    if contract is None and extend is not None:
        return invocation.run_command_line(
            resume_arguments(
                stored_validation.command_of(extend), invocation.arguments, "--extend", extend
            )
        )
    if contract is None:
        hint = f"a file, a folder, or: {', '.join(packaged_files('contracts'))}"
        raise UserError("missing_option", "no contract", "loadgen validate", hint)
    if contract.is_dir():
        return _judge_anew(contract, bundle, as_json)
    faults: list[LoadgenError] = []
    add_ns = None
    with collecting(faults):
        add_ns = _time(add, "--add")
    if add is not None and extend is None:
        faults.append(
            UserError(
                "no_effect",
                "says how much to add, and to nothing",
                f"--add {add}",
                "--extend FOLDER",
            )
        )
    if bundle is not None and bundle.exists():
        faults.append(
            UserError("file_exists", "this file exists", f"--bundle {bundle}", "give another name")
        )
    asked = _asked(invocation, contract, duration, has_other=against is not None, faults=faults)
    checked_contract, settings, overrides, how = asked
    settings = run.with_gpus(settings, checked_contract.contract.gpus)
    other = _other(asked, against, against_model, against_key_file, dry_run=dry_run)
    show = shown(_with_contract_prices(invocation, checked_contract, settings), quiet=dry_run)
    repeats = {
        level.level.name: how.min_runs if how else level.level.repeats
        for level in checked_contract.levels
    }
    expected = [
        (one.workload, settings)
        for one in checked_contract.levels
        for _ in range(repeats[one.level.name])
    ]
    if dry_run:
        show.expect(expected, always=True)
        return _predict(checked_contract, settings, overrides.seed, as_json, show)

    has_auto_levels = any(one.is_auto for one in checked_contract.levels)
    if extend is None:
        for planned in checked_contract.levels:
            if planned.is_auto:
                say("\n".join(planned_words(planned)))
        show.expect(expected, always=has_auto_levels)
        invocation.move_existing_results(settings.out)
    execute = invocation.executor(show.hearers)
    runs = (how or Repetition(count=level.level.repeats) for level in checked_contract.levels)
    of_level = [
        (level.max_runs, (one.requests if settings.virtual else one.duration_ns) or 0)
        for level, one in zip(runs, checked_contract.levels, strict=True)
    ]
    show.begin(
        sum(most for most, _ in of_level),
        at_most=extend is not None or (how is not None and not how.count),
        weights=[weight for most, weight in of_level for _ in range(most)],
    )

    def perform(workload: Workload, settings: Settings) -> tuple[Summary, Path]:
        show.step(str(settings.out))
        summary, out = execute(workload, settings)
        show.finished(summary)
        return summary, out

    for planned in checked_contract.levels:
        if planned.shortened_from_ns is not None:
            say("\n".join(planned_words(planned)))
    carry_out: dict[str, Any] = {
        "perform": perform,
        "say": say,
        "seed": overrides.seed,
        "salt": overrides.salt,
        "repetition": how,
    }
    if extend is not None:
        folder = extend
        with alone(folder):
            result = run.extend(folder, checked_contract, settings, add_ns=add_ns, **carry_out)
    else:
        result, folder = run.run(checked_contract, settings, settings.out, other=other, **carry_out)

        def extend_by(length_ns: int) -> Validation:
            with alone(folder):
                return run.extend(folder, checked_contract, settings, add_ns=length_ns, **carry_out)

        result = _extend_auto_levels(result, checked_contract, repeats, show, extend_by)
    print_answer(result, run.report(folder, result), as_json=as_json)
    say(f"all of it in {folder}, the page for people: {folder / run.PAGE}")
    if result.verdict == verdict.INCONCLUSIVE and not result.interrupted:
        _say_what_is_left(result, repeats, folder)
    if bundle is not None:
        commands.call("bundle", folder, bundle)
    return verdict.exit_code(result)


def _extend_auto_levels(
    result: Validation,
    checked: Checked,
    repeats: Mapping[str, int],
    show: Show,
    extend_by: Callable[[int], Validation],
) -> Validation:
    """Add load to levels with `duration: auto` until they are decided, and return the last verdict.

    Nothing is added if an undecided level has a length of its own, or if it is not known how much
    load would decide it.

    Args:
        result: The verdict so far.
        checked: The contract.
        repeats: How many runs an extension adds to each level.
        show: Shows the progress of the runs.
        extend_by: Extends the validation by runs of this length in ns, and returns its verdict.
    """
    from loadgen.contracts import verdict

    can_grow = {
        one.level.name for one in checked.levels if one.is_auto and one.shortened_from_ns is None
    }
    for number in range(1, MOST_EXTENSIONS + 1):
        undecided = [one for one in result.levels if one.verdict == verdict.INCONCLUSIVE]
        add_s = verdict.to_add_s(result, repeats)
        is_open = result.verdict == verdict.INCONCLUSIVE and not result.interrupted
        if not is_open or not add_s or any(one.name not in can_grow for one in undecided):
            return result
        runs = sum(repeats[one.name] for one in undecided)
        say(
            f"undecided: {format.counted(runs, 'run')} of {format.duration(add_s)} more, "
            f"extension {number} of at most {MOST_EXTENSIONS}"
        )
        show.begin(runs)
        result = extend_by(math.ceil(add_s * 1e9))
    return result


def _with_contract_prices(
    invocation: Invocation, checked: Checked, settings: Settings
) -> Invocation:
    """Return the invocation with the prices of the contract, if it has none of its own.

    Prices that do not fit the target are left out here: they are for terms about cost.
    """
    from loadgen.core.schedule.forecast import Forecast
    from loadgen.runs.show import target_facts

    if invocation["prices"] is not None or checked.contract.prices is None:
        return invocation
    priced = invocation.with_options(prices=checked.folder / checked.contract.prices)
    budget = priced.budget()
    an_hour = Forecast(requests=1.0, seconds=3600.0, input_tokens=1.0, output_tokens=1.0)
    try:
        if budget is not None:
            budget.forecast_cost(an_hour, target_facts(settings))
    except LoadgenError:
        return invocation
    return priced


class _Asked(NamedTuple):
    """What is measured, and how. `how`: the repeats of each level, where a flag says so."""

    contract: Checked
    settings: Settings
    overrides: Overrides
    how: Repetition | None


def _asked(
    invocation: Invocation,
    contract: Path,
    duration: str | None,
    *,
    has_other: bool,
    faults: list[LoadgenError],
) -> _Asked:
    """The contract and the flags, checked together. Raises Faults, with those that there are already."""
    from loadgen.contracts.loading import load_contract

    how = longest_ns = None
    with collecting(faults):
        settings = invocation.settings()
    overrides = invocation.overrides()
    faults += overrides.errors
    with collecting(faults):
        how = invocation.repetition()
    with collecting(faults):
        longest_ns = _time(duration, "--duration")
    with collecting(faults):
        checked = load_contract(
            contract,
            gpus=invocation["gpus"],
            repeats=how.min_runs if how else None,
            longest_ns=longest_ns,
            against=has_other,
        )
    if faults:
        raise CombinedError(faults)
    if settings.values:
        _check_values(checked, settings)
    return _Asked(checked, settings, overrides, how)


def _other(
    asked: _Asked, against: str | None, model: str | None, key_file: Path | None, *, dry_run: bool
) -> Any:
    """The endpoint that answers are compared with; None where the contract asks nothing about answers."""
    answers = asked.contract.contract.answers
    if answers is None:
        if against is not None:
            hint = "answers: {dataset: FILE, must: [...]}"
            raise UserError(
                "no_effect", "this contract asks nothing about answers", "--against", hint
            )
        return None
    if asked.settings.virtual and not dry_run:
        raise UserError(
            "unsupported",
            "a simulation in virtual time generates no texts to compare",
            "--url",
            "start a simulated server with loadgen sim, and give its URL",
        )
    settings = asked.settings
    if against is None:  # the contract alone names B: what was given for A is not sent there
        settings = replace(settings, api_key=None, headers=())
    return other_endpoint(
        settings, against or answers.against, model or answers.against_model, key_file
    )


def _judge_anew(folder: Path, bundle: Path | None, as_json: bool) -> int:
    """Judge a stored validation again; the exit code."""
    from loadgen.contracts import run, stored_validation, verdict

    result = stored_validation.again(folder)
    print_answer(result, run.report(folder, result), as_json=as_json)
    if result.verdict == verdict.INCONCLUSIVE:
        repeats = {level.name: level.repeats for level in stored_validation.read(folder)[0].levels}
        _say_what_is_left(result, repeats, folder)
    if bundle is not None:
        commands.call("bundle", folder, bundle)
    return verdict.exit_code(result)


def _say_what_is_left(result: Validation, repeats: Mapping[str, int], folder: Path) -> None:
    """The command that adds load to an undecided validation, and the levels that no added load helps."""
    from loadgen.contracts import stored_validation, verdict

    unsure = [level for level in result.levels if level.verdict == verdict.INCONCLUSIVE]
    if not all(level.trouble for level in unsure):
        add_s = verdict.to_add_s(result, repeats)  # to each run; 0 where nobody can say
        length = (
            "TIME"
            if not add_s
            else f"{math.ceil(add_s)}s"
            if add_s < 600
            else f"{math.ceil(add_s / 60)}m"
        )
        flags = arguments_to_type_again(stored_validation.command_of(folder))
        command = shlex.join(["validate", "--extend", str(folder), "--add", length, *flags])
        say(f"to add load where it is undecided: loadgen {command}")
    if again := [level.name for level in unsure if level.trouble]:
        say(f"to measure {', '.join(again)} anew: the same command, with another --out")


def _check_values(checked: Checked, settings: Settings) -> None:
    """Raises Faults for promises about tokens, where answers have none."""
    from loadgen.contracts.schema import latencies, words

    faults: list[LoadgenError] = []
    for planned in checked.levels:
        for term in (*planned.level.must, *planned.level.should):
            if term.kind in latencies() and term.kind != "e2e":
                what = f"answers of {settings.api} have no tokens: {words(term)} could never be decided"
                faults.append(
                    UserError(
                        "unsupported",
                        what,
                        f"--api {settings.api}",
                        "promise e2e, or leave --api out",
                    )
                )
    if faults:
        raise CombinedError(faults)


def _time(text: str | None, flag: str) -> int | None:
    """A length of time in ns. Raises UserError."""
    length_ns = parse_option(flag, text, partial(units.duration_ns, bare="s"))
    if length_ns == 0:
        raise UserError("out_of_range", "no time at all", f"{flag} {text}", f"{flag} 10m")
    return length_ns


def _predict(
    checked: Checked, settings: Settings, seed: int | None, as_json: bool, show: Show
) -> int:
    """Print what each term of a contract needs, from a simulation; the exit code."""
    from loadgen.contracts import prediction, stored_validation
    from loadgen.contracts.level_plan import planned_words
    from loadgen.contracts.lint import answers_words
    from loadgen.contracts.sections import forecast_report
    from loadgen.core.execution.run import execute
    from loadgen.pricing.price_file import load_prices

    if not as_json:
        print(
            f"contract: {checked.contract.name}, {checked.contract.confidence * 100:g} % confidence"
        )
        for level in checked.levels:
            print("\n".join(planned_words(level)), flush=True)
        if checked.contract.answers is not None:
            print("\n".join(answers_words(checked.contract.answers)))
    simulated = prediction.on(settings)
    say(f"simulating {simulated.shown.removeprefix('simulated: ')} in virtual time")
    prices = (
        None
        if checked.contract.prices is None
        else load_prices(checked.folder / checked.contract.prices)
    )
    money = None if prices is None else stored_validation.money(prices)
    weights = prediction.steps(checked)
    show.begin(len(weights), weights=weights)
    forecast = prediction.predict(
        checked, simulated, perform=execute, money=money, seed=seed, step=show.step
    )
    said = forecast_report(
        forecast, simulated.shown, asked=None if settings.virtual else settings.url
    )
    print_answer({"simulated": simulated.shown, "levels": forecast}, said, as_json=as_json)
    return OK
