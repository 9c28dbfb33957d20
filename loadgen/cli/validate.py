"""`loadgen validate`: run the validation of a contract, or judge a stored validation again; print the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli.options import OF_THE_LOAD, DryRun, Given, takes

if TYPE_CHECKING:
    from loadgen.contracts.schema import Checked
    from loadgen.execution.plan import Settings
    from loadgen.metrics.summary import Summary
    from loadgen.workload import Workload


@takes(
    without=(*(OF_THE_LOAD - {"seed", "salt"}), "keep", "client"),
    out="A new folder for all of it.",
)
def validate(
    given: Given,
    contract: Annotated[
        Path,
        typer.Argument(help="A contract file, the name of a shipped one, or a folder of a validation to judge anew."),
    ],
    dry_run: DryRun = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdict.json.")] = False,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Also write all of it into one file for `loadgen verify`: poc.zip.")
    ] = None,
) -> int:
    """Measure what a contract promises and say PASS, FAIL or INCONCLUSIVE, with reasons, in one folder with hashes.

    Exit: 0 PASS, 1 FAIL, 2 wrong usage or contract, 3 INCONCLUSIVE, 70 bug, 130 interrupted.

    Example: loadgen validate contract.yaml --url http://HOST:8000 --repeat 3
    """
    from loadgen.cli.bundle import write as write_bundle
    from loadgen.contracts import run, verdict
    from loadgen.contracts.load import load_contract
    from loadgen.errors import OK, Fault, Faults, UserError, collecting
    from loadgen.metrics.repeats import Repetition

    if contract.is_dir():
        result = run.again(contract)
        _print(result, as_json)
        if bundle is not None:
            write_bundle(contract, bundle)
        return verdict.exit_code(result)
    faults: list[Fault] = []
    how = None
    with collecting(faults):
        settings = given.settings()
    overrides = given.overrides()
    faults += overrides.faults
    with collecting(faults):
        how = given.repetition()
    if bundle is not None and bundle.exists():
        faults.append(UserError("this file exists", f"--bundle {bundle}", "give another name"))
    with collecting(faults):
        checked_contract = load_contract(contract, gpus=given["gpus"], repeats=how.at_least if how else None)
    if faults:
        raise Faults(faults)
    if dry_run:
        _print_plan(checked_contract)
        return OK
    from loadgen.cli.show import say

    show = given.show()
    given.make_room(settings.out)
    execute = given.execute(show)
    runs = (how or Repetition(count=level.level.repeats) for level in checked_contract.levels)
    show.begin(sum(level.at_most for level in runs), at_most=how is not None and how.count is None)

    def perform(workload: Workload, settings: Settings) -> tuple[Summary, Path]:
        show.step(str(settings.out))
        summary, out = execute(workload, settings)
        show.finished(summary)
        return summary, out

    result, folder = run.run(
        checked_contract,
        settings,
        settings.out,
        perform=perform,
        say=say,
        seed=overrides.seed,
        salt=overrides.salt,
        repetition=how,
    )
    _print(result, as_json)
    say(f"all of it in {folder}, the page for people: {folder / run.PAGE}")
    if bundle is not None:
        write_bundle(folder, bundle)
    return verdict.exit_code(result)


def _print(result: Any, as_json: bool) -> None:
    from loadgen.cli.show import print_json
    from loadgen.report import validation

    if as_json:
        print_json(result)
    else:
        print(validation.text(result), end="")


def _print_plan(checked: Checked) -> None:
    from loadgen.contracts.lint import planned_words

    print(f"contract: {checked.contract.name}, {checked.contract.confidence * 100:g} % confidence")
    for level in checked.levels:
        print("\n".join(planned_words(level)))
