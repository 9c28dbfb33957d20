"""`loadgen size`: how many machines some users need, one to spare, and what they cost, from one source or several.

Parses flags, reads the sources (or searches a simulated machine), prints; the arithmetic is in `cost.sizing`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from loadgen import result_kinds
from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.cli.options import (
    PACKAGED_WORKLOADS,
    AcceptSamplePricesOption,
    AllowInvalidOption,
    add_options,
    default_output_folder,
)
from loadgen.cli.output import print_answer, say, say_changed
from loadgen.core import format, units
from loadgen.core.errors import (
    OK,
    SLO_MISSED,
    CombinedError,
    LoadgenError,
    UserError,
    collecting,
    did_you_mean,
)
from loadgen.core.run_folder import refuse_shard
from loadgen.cost import searching

if TYPE_CHECKING:
    from loadgen.core.results.manifest import TargetFacts
    from loadgen.cost import sizing
    from loadgen.cost.capacity_planning import MeasuredRate
    from loadgen.cost.size_result import Sizing
    from loadgen.cost.sizing import Need
    from loadgen.pricing.evidence import Evidence
    from loadgen.pricing.prices import Price, Prices

PUBLISHED = "published:"


@add_options(only=())
def size(
    invocation: Invocation,
    profile: Annotated[
        str,
        typer.Argument(
            metavar="workload",
            help=f"One of {PACKAGED_WORKLOADS}; or a file of yours.",
            autocompletion=completion.complete_workload,
        ),
    ],
    sources: Annotated[
        list[str],
        typer.Argument(
            help="What carries it: a folder of a search, sweep or run; sim:PRESET, which is searched now; "
            "published:SYSTEM, a row of docs/published.md.",
            autocompletion=completion.complete_capacity_source,
        ),
    ],
    users: Annotated[
        str | None,
        typer.Option("--users", metavar="N", help="Users who work at the same time: 5000, 5k."),
    ] = None,
    think: Annotated[
        str,
        typer.Option("--think", metavar="TIME", help="From an answer to the user's next question."),
    ] = "30s",
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            "--request-rate",
            metavar="RATE",
            help="Instead of users: requests per second (50, 600/min).",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo",
            metavar="TERM",
            help=(
                "SLO term for sim:PRESET, like ttft:2s:p95; replaces the SLO of the workload. "
                "A results folder has its own. Repeatable."
            ),
        ),
    ] = None,
    spare: Annotated[
        int, typer.Option("--spare", metavar="N", min=0, help="Machines that may be lost.")
    ] = 1,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="Your prices: see docs/prices.example.yaml."),
    ] = None,
    accept_sample_prices: AcceptSamplePricesOption = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="SOURCE=NAME",
            help="Which price a source is under; of a single one just NAME.",
        ),
    ] = None,
    currency: Annotated[
        str, typer.Option("--currency", metavar="CODE", help="Of the figures.")
    ] = "USD",
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="GPUs of a source that recorded none."),
    ] = None,
    gpus_per_machine: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-machine",
            metavar="N",
            min=1,
            help="Of what is rented and lost as one. Default: the price's, else the source's.",
        ),
    ] = None,
    machines_per_rack: Annotated[
        int | None,
        typer.Option(
            "--machines-per-rack", metavar="N", min=1, help="Count racks of so many machines too."
        ),
    ] = None,
    hours_per_day: Annotated[
        float,
        typer.Option(
            "--hours-per-day",
            metavar="NUMBER",
            min=0.1,
            max=24,
            help="How long that load is there.",
        ),
    ] = 24.0,
    answer: Annotated[
        str | None,
        typer.Option(
            "--answer",
            metavar="TIME",
            help="How long an answer takes, where the source does not say.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FOLDER",
            help="For size.json and its page.",
            show_default="a new folder in results/",
        ),
    ] = None,
    contract: Annotated[
        Path | None,
        typer.Option(
            "--contract",
            metavar="FILE",
            help="Write what one machine has to keep, for loadgen validate: one source.",
        ),
    ] = None,
    allow_invalid: AllowInvalidOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
) -> int:
    """How many machines for 5,000 users, one to spare, and what they cost a month. The answer comes first.

    Exit: 0 done, 2 wrong flags, prices or results, 3 a result is not a valid measurement.

    Example: loadgen size rag sim:gb300-vm --users 5000 --slo ttft:2s:p95 --prices prices.yaml
    """
    from loadgen.core.execution.run_header import version
    from loadgen.core.results.manifest import TargetFacts
    from loadgen.cost import size_result, sizing
    from loadgen.cost.size_text import report
    from loadgen.pricing import price_file

    need = _need(users, think, rate, answer, spare)
    need = replace(need, hours_per_day=hours_per_day, machines_per_rack=machines_per_rack)
    if slo and all(source.startswith(PUBLISHED) for source in sources):
        hint = "it is for a folder measured under it, or for a machine to search now: sim:gb300-vm"
        raise UserError(
            "no_effect", "a published figure has no SLO that could be asked for", "--slo", hint
        )
    if contract is not None:
        _refuse_contract(contract, sources)
    wants_money = prices is not None or accept_sample_prices
    if price and not wants_money:
        raise UserError(
            "missing_option",
            "prices are named, and there is no price file",
            "--price",
            "--prices prices.yaml",
        )
    book = None
    if wants_money:
        book = price_file.load_prices(prices, accept_sample=accept_sample_prices, currency=currency)
    chosen = _chosen(price or [], sources)
    sized_of: dict[str, tuple[sizing.Size, Evidence | None]] = {}
    faults: list[LoadgenError] = []
    searches: dict[str, searching.SearchRequest] = {}
    for source in filter(
        _is_searched, sources
    ):  # what can be wrong is told before minutes of search
        with collecting(faults):
            searches[source] = searching.asked(source, profile, slo or [])
            if book is not None:
                _price(book, _of_machine(source), chosen.get(source, ""), source)
    for source in sorted(sources, key=_is_searched):
        if _is_searched(source):
            if faults:
                break
            searching.at_once(searches, invocation.run_command_line)
            searches = {}
        try:
            measured, evidence = _source(
                source,
                profile,
                slo or [],
                gpus,
                invocation.run_command_line,
                allow_invalid=allow_invalid,
            )
            at = None
            if book is not None:
                if evidence is None and source not in chosen:
                    hint = f"--price '{source}=NAME', one of: {', '.join(book.locations)}"
                    raise UserError(
                        "no_figure",
                        "a published figure has no shape to find its price by",
                        source,
                        hint,
                    )
                target = evidence.summary.target if evidence is not None else TargetFacts()
                at = _price(book, target, chosen.get(source, ""), source)
            per_machine = gpus_per_machine or getattr(at, "gpus", None) or measured.gpus
            found = sizing.size(
                measured, need, gpus_per_machine=per_machine, price=at, evidence=evidence
            )
            sized_of[source] = found, evidence
        except LoadgenError as fault:
            faults.append(fault)
    if faults:
        raise CombinedError(faults)
    sized = [sized_of[source] for source in sources]
    remarks = (
        [f"SAMPLE PRICES, nobody's offer. {book.notes}"] if book is not None and book.sample else []
    )
    if book is not None and book.exchanged:
        remarks.append(f"exchanged at {'; '.join(book.exchanged)}")
    workload = next(iter(sized))[0].source.workload
    remarks += published_arithmetic(workload)
    result = size_result.sizing(
        sized,
        need,
        currency=currency,
        workload=workload,
        remarks=remarks,
        version=version(),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    print_answer(result, report(result), as_json=as_json)
    _store(result, out or default_output_folder(f"size-{workload}"))
    if contract is not None:
        _write_contract(contract, *sized[0], profile=profile, gpus=result.sizes[0].gpus_per_machine)
    return OK


def _of_machine(source: str) -> TargetFacts:
    """What its runs will say of a simulated machine, as far as a price is found by it."""
    from loadgen.core.results.manifest import TargetFacts

    found = searching.machine(source)
    return TargetFacts(
        name=found.name, model=found.context.model if found.context else "", simulated=True
    )


def _price(book: Prices, target: TargetFacts, chosen: str, source: str) -> Price:
    """The one price of a source. Raises UserError where there is none, or no single one."""
    from loadgen.pricing.prices import find_prices

    matching = find_prices(book, target, chosen, source)
    if len(matching) > 1:
        names = " or ".join(f"--price '{source}={one.name}'" for one in matching)
        raise UserError(
            "ambiguous", f"{source} has prices of several commitments", "--price", names
        )
    return matching[0]


def _store(result: Sizing, folder: Path) -> None:
    """Leave the result and its page in a folder. Raises UserError where one of another command is in it."""
    from loadgen.core.results import checksums, files
    from loadgen.cost.size_result import FILE
    from loadgen.cost.size_text import report
    from loadgen.render import html

    there = result_kinds.kind_of(folder)
    if there is not None and there.name != "size":
        hint = "give another folder, or leave -o out"
        raise UserError(
            "file_exists", f"the folder holds another result: {there.name}", f"--out {folder}", hint
        )
    page = folder / result_kinds.PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.refuse_links(folder)
        files.replace(folder / FILE, format.document(result))
        files.replace(page, html.render(report(result)).encode())
        checksums.write(folder)
    except OSError as error:
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", f"--out {folder}"
        ) from None
    say(f"results in {folder}, page: {page}")


def _refuse_contract(file: Path, sources: Sequence[str]) -> None:
    """Raises UserError where no contract could be written: told before minutes of search."""
    if len(sources) > 1 or sources[0].startswith(PUBLISHED):
        what, hint = (
            "a contract is about one machine that was measured",
            "one source: a folder, or sim:PRESET",
        )
        raise UserError("unsupported", what, "--contract", hint)
    if file.exists():
        raise UserError(
            "file_exists", "this file exists", f"--contract {file}", "give another name"
        )
    if not file.parent.is_dir():
        raise UserError(
            "unwritable_file",
            "its folder does not exist",
            f"--contract {file}",
            f"mkdir {file.parent}",
        )


def _write_contract(
    file: Path, size: sizing.Size, evidence: Evidence | None, *, profile: str, gpus: int
) -> None:
    """Write what one of the machines has to keep. Raises UserError where no SLO was kept, or no machine is counted."""
    from loadgen.core.results import files
    from loadgen.cost import contract_file
    from loadgen.runs.headline import promises

    if evidence is None or not size.carrying or not promises(evidence.summary):
        what = (
            "nothing was promised: the source was measured without an SLO"
            if size.carrying
            else "no machine counted"
        )
        raise UserError("no_figure", what, f"--contract {file}", "a search under --slo")
    workload = os.path.relpath(profile, file.parent) if Path(profile).is_file() else profile
    try:
        files.replace(
            file, contract_file.text(size, evidence.summary, workload=workload, gpus=gpus).encode()
        )
    except OSError as error:
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", f"--contract {file}"
        ) from None
    at = size.source.name if _is_searched(size.source.name) else "https://MACHINE"
    say(f"contract in {file}: loadgen validate {shlex.quote(str(file))} --url {at}")


def _is_searched(source: str) -> bool:
    return source.startswith(searching.SIMULATED)


def _need(users: str | None, think: str, rate: str | None, answer: str | None, spare: int) -> Need:
    from loadgen.cost.sizing import Need

    if (users is None) == (rate is None):
        what = "users or a rate, one of the two"
        hint = "like --users 5000, or --rate 50"
        raise UserError(
            "missing_option" if users is None else "conflict", what, "--users, --rate", hint
        )
    per_s = parse_option("--rate", rate, partial(units.rate_per_s, bare=True))
    if per_s is not None and not 0 < per_s < float("inf"):
        raise UserError(
            "invalid_value", f'"{rate}" is not a load to carry', "--rate", "like 50 or 600/min"
        )
    return Need(
        users=parse_option("--users", users, units.count),
        think_s=parse_option("--think", think, units.seconds) or 0.0,
        rate_per_s=per_s,
        answer_s=parse_option("--answer", answer, units.seconds),
        spare=spare,
    )


def _chosen(texts: Sequence[str], sources: Sequence[str]) -> dict[str, str]:
    """Return the names of --price SOURCE=NAME by source; a single source may be left out.

    Raises UserError for a text of another form and for a source that has two prices.
    """
    chosen: dict[str, str] = {}
    for text in texts:
        source, equals, name = text.rpartition("=")
        if not equals and len(sources) == 1:
            source, name = sources[0], text
        if source not in sources or not name:
            hint = did_you_mean(source, sources) or "a source as it was given"
            raise UserError("invalid_value", f'"{text}" is not SOURCE=NAME', "--price", hint)
        if source in chosen:
            what = f"{source} has two prices: {chosen[source]} and {name}"
            raise UserError("duplicate", what, f"--price {text}", "keep one of them")
        chosen[source] = name
    return chosen


def _source(
    source: str,
    profile: str,
    slo: Sequence[str],
    gpus: int | None,
    call: Callable[[list[str]], int],
    *,
    allow_invalid: bool,
) -> tuple[MeasuredRate, Evidence | None]:
    """What a source was seen to carry, and the evidence; None of a published figure."""
    from loadgen.cost import inputs
    from loadgen.cost.recorded_runs import with_records

    if source.startswith(PUBLISHED):
        return _published(source.removeprefix(PUBLISHED), profile), None
    folder = _searched(source, profile, slo, call) if _is_searched(source) else Path(source)
    refuse_shard(folder)
    say_changed(folder)
    evidence = with_records(inputs.read_evidence([folder], allow_invalid=allow_invalid)[0])
    if not _is_searched(source):
        _refuse_other_slo(slo, evidence, source)
    return replace(measured_rate(evidence, _name_of(profile), gpus), name=source), evidence


def _name_of(profile: str) -> str:
    """The `name:` of a workload file; a word that is no file is a name itself. Raises `CombinedError`."""
    from loadgen.core.workload.loading import read_workload_text
    from loadgen.core.workload.yaml_marks import read_yaml

    top, faults = (
        read_yaml(read_workload_text(profile), profile, {}) if Path(profile).is_file() else ({}, [])
    )
    if faults:
        raise CombinedError(faults)
    return str(top.get("name", profile))


def measured_rate(evidence: Evidence, profile: str, gpus: int | None) -> MeasuredRate:
    """The rate that a result of this workload was seen to carry. Raises UserError for another workload."""
    from loadgen.cost.capacity_planning import measured
    from loadgen.cost.inputs import gpus_of

    summary = evidence.summary
    if summary.run.workload != profile:
        problem = f'the run is of the workload "{summary.run.workload}", not of {profile}'
        hint = f"ask for {summary.run.workload}, or give a run of {profile}"
        raise UserError("mismatch", problem, evidence.folder, hint)
    gpu_count = gpus_of(evidence, gpus)
    if gpu_count is None:
        raise UserError(
            "missing_option",
            "the run does not say how many GPUs it used",
            evidence.folder,
            "--gpus 4",
        )
    return measured(evidence, gpu_count)


def published_arithmetic(workload: str) -> list[str]:
    """What the published capacity table says of a packaged workload, and that it is no measurement; [] of others."""
    from loadgen.cost import published

    rack = published.rack(published.nodes().rows)
    found = [
        published.arithmetic(row, rack)
        for row in published.profiles().rows
        if row.profile == workload
    ]
    return [
        f"published for {workload}: ~{row.profile.published_per_s:,.0f} per second of a rack of 72 GPUs "
        f"({row.by_output:,.0f} by output tokens alone), from an Offline rate without a limit on latency: what that "
        "arithmetic ignores is in docs/published.md"
        for row in found
    ]


def _refuse_other_slo(slo: Sequence[str], evidence: Evidence, source: str) -> None:
    """Raise UserError where `--slo` is not the SLO that a stored result was measured under."""
    from loadgen.core.stats.quantiles import milliseconds
    from loadgen.core.workload.flags import read_flags
    from loadgen.cost.comparison import slo_words

    flags = read_flags(slo=tuple(slo))
    if flags.faults:
        raise CombinedError(flags.faults)
    if not slo:
        return
    goodput = evidence.summary.goodput
    measured = {(term.metric, term.quantile): term.limit_ms for term in goodput.slo}
    requested = flags.replacement_slo
    is_measured = (
        requested is not None
        and flags.added_slo is None
        and requested.goodput_share == goodput.share_limit
        and {(term.metric, term.quantile): milliseconds(term.limit_ns) for term in requested.terms}
        == measured
    )
    if not is_measured:
        what = f"a stored result keeps the SLO that it was measured under: {slo_words(evidence.summary)}"
        hint = "search again under this one: loadgen search --slo; or name a machine to search now: sim:gb300-vm"
        raise UserError("no_effect", what, f"--slo, {source}", hint)


def _searched(
    source: str, profile: str, slo: Sequence[str], call: Callable[[list[str]], int]
) -> Path:
    """The folder of a search on a simulated machine, run now, or before with the same workload and SLO."""
    from loadgen.repeated import capacity

    folder, words = searching.asked(source, profile, slo)
    say(f"loadgen {shlex.join(words)}")
    with contextlib.redirect_stdout(sys.stderr):
        code = call(words)
    if code == SLO_MISSED or (code != OK and not (folder / capacity.CAPACITY_FILE).is_file()):
        file = folder / capacity.CAPACITY_FILE
        why = (
            capacity.load_capacity(file.read_bytes()).lower_bound_reason
            if file.is_file()
            else "the search came to no end"
        )
        hint = "see the lines of the search above; longer trials, or a wider --slo"
        raise UserError("no_figure", f"no capacity of this machine: {why}", source, hint)
    return folder


def _published(name: str, profile: str) -> MeasuredRate:
    from loadgen.cost import published
    from loadgen.cost.sizing import published_rate

    rows = published.mlperf().rows
    of_profile = [row for row in published.profiles().rows if row.profile == profile]
    if not of_profile:
        known = [row.profile for row in published.profiles().rows]
        raise UserError(
            "unknown_name",
            f'no published lengths of "{profile}"',
            f"{PUBLISHED}{name}",
            did_you_mean(profile, known),
        )
    wanted = name.lower()
    found = [row for row in rows if wanted in row.label.lower()]
    with_rate = [row for row in found if row.server is not None] or found
    if len(with_rate) != 1:
        labels = "; ".join(row.label for row in (with_rate or rows) if row.server is not None)
        what = f'{"several systems are" if with_rate else "no published system is"} called "{name}"'
        raise UserError(
            "ambiguous" if with_rate else "unknown_name",
            what,
            f"{PUBLISHED}{name}",
            f"a part of one of: {labels}",
        )
    row = with_rate[0]
    return published_rate(
        row.label,
        row.server,
        gpus=row.gpus,
        output_tokens=of_profile[0].output,
        workload=profile,
        said_by=f"MLPerf Inference {row.round}, {row.quality}",
    )
