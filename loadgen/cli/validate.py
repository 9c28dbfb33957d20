"""`loadgen validate`: run the validation of a contract, or judge a stored validation again; print the verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import target
from loadgen.cli.repeats import Repeat, RepeatMost, RepeatPause, RepeatWithin

if TYPE_CHECKING:
    from loadgen.contracts.schema import Checked


def validate(
    contract: Annotated[
        Path,
        typer.Argument(help="A contract file, the name of a shipped one, or a folder of a validation to judge anew."),
    ],
    url: target.Urls = None,
    targets: target.TargetsFile = None,
    route: target.RouteTo = "auto",
    on_target_failure: target.OnTargetFailure = "continue",
    seed: target.Seed = None,
    salt: target.Salt = None,
    model: target.Model = None,
    server: target.Server = "auto",
    api: target.Api = "chat",
    workers: target.Workers = "1",
    tokenizer: target.Tokenizer = None,
    extra_body: target.ExtraBody = None,
    header: target.Header = None,
    api_key_file: target.ApiKeyFile = None,
    cacert: target.CaCert = None,
    cert: target.Cert = None,
    cert_key: target.CertKey = None,
    insecure: target.Insecure = False,
    no_stream: target.NoStream = False,
    gpus: target.Gpus = None,
    shape: target.Shape = "",
    region: target.Region = "",
    metadata: target.Metadata = None,
    repeat: Repeat = None,
    repeat_most: RepeatMost = None,
    repeat_within: RepeatWithin = None,
    repeat_pause: RepeatPause = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new folder for all of it; without it one in results/.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the contract, show its plan, send nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdict.json.")] = False,
) -> int:
    """Measure what a contract promises and say PASS, FAIL or INCONCLUSIVE, with reasons, in one folder with hashes.

    Exit: 0 PASS, 1 FAIL, 2 wrong usage or contract, 3 INCONCLUSIVE, 70 bug, 130 interrupted.
    """
    from loadgen.cli.repeats import repetition
    from loadgen.contracts import run, verdict
    from loadgen.contracts.load import load_contract
    from loadgen.errors import OK, Faults
    from loadgen.workload.flags import seed_and_salt

    if contract.is_dir():
        result = run.again(contract)
        _print(result, as_json)
        return verdict.exit_code(result)
    faults: list[Any] = []
    settings = checked_contract = None
    try:
        settings = target.settings(
            urls=url, targets_file=targets, route=route, on_target_failure=on_target_failure, model=model,
            server=server, api=api, headers=header or [], extra_body=extra_body, api_key_file=api_key_file,
            cacert=cacert, cert=cert, cert_key=cert_key, insecure=insecure, stream=not no_stream, client="wire",
            tokenizer=tokenizer, workers=workers, gpus=gpus, shape=shape, region=region, metadata=metadata,
        )  # fmt: skip
    except Faults as several:
        faults += several.faults
    number = word = None
    try:
        number, word = seed_and_salt(seed, salt)
    except Faults as several:
        faults += several.faults
    how = None
    try:
        how = repetition(repeat, repeat_most, repeat_within, repeat_pause)
    except Faults as several:
        faults += several.faults
    least = None if repeat is None or how is None else how.at_least
    try:
        checked_contract = load_contract(contract, gpus=gpus, repeats=least)
    except Faults as several:
        faults += several.faults
    if faults or settings is None or checked_contract is None:
        raise Faults(faults)
    if dry_run:
        _print_plan(checked_contract)
        return OK
    from loadgen.cli.show import Show, say

    show = Show(as_json=as_json)
    result, folder = run.run(
        checked_contract, settings, out, perform=show.perform, say=say, seed=number, salt=word,
        repetition=how if repeat is not None else None,
    )  # fmt: skip
    _print(result, as_json)
    say(f"all of it in {folder}, the page for people: {folder / run.PAGE}")
    return verdict.exit_code(result)


def _print(result: Any, as_json: bool) -> None:
    from loadgen.report import validation

    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    else:
        print(validation.text(result), end="")


def _print_plan(checked: Checked) -> None:
    from loadgen.contracts.lint import planned_words

    print(f"contract: {checked.contract.name}, {checked.contract.confidence * 100:g} % confidence")
    for level in checked.levels:
        print("\n".join(planned_words(level)))
