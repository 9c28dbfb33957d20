"""`loadgen size`: how many machines a number of users needs, and what they cost a month.

Parses options, prints and stores the result. `size_sources` finds capacities, `sizing` computes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from loadgen import result_kinds
from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.cli.options import (
    PACKAGED_WORKLOADS,
    AcceptSamplePricesOption,
    AllowInvalidOption,
    FullOption,
    add_options,
    default_output_folder,
)
from loadgen.cli.output import print_result, print_status
from loadgen.core import format, units
from loadgen.core.errors import (
    OK,
    CombinedError,
    LoadgenError,
    UserError,
    collecting,
    did_you_mean,
)

if TYPE_CHECKING:
    from loadgen.core.results.manifest import TargetFacts
    from loadgen.cost.machine_searches import SearchCommand
    from loadgen.cost.size_result import Sizing
    from loadgen.cost.size_sources import SourceCapacity, SourceRequest
    from loadgen.cost.sizing import Need, Size
    from loadgen.pricing.evidence import Evidence
    from loadgen.pricing.prices import Price, Prices


@add_options(only=())
def size(
    invocation: Invocation,
    profile: Annotated[
        str,
        typer.Argument(
            metavar="workload",
            help=f"Workload file, or one of {PACKAGED_WORKLOADS}.",
            autocompletion=completion.complete_workload,
        ),
    ],
    sources: Annotated[
        list[str],
        typer.Argument(
            help=(
                "Where the capacity is from: folder of a search, sweep or run; sim:PRESET to "
                "search a simulated machine now; published:SYSTEM for a published rate."
            ),
            autocompletion=completion.complete_capacity_source,
        ),
    ],
    users: Annotated[
        str | None,
        typer.Option("--users", metavar="N", help="Number of concurrent users: 5000, 5k."),
    ] = None,
    think: Annotated[
        str,
        typer.Option(
            "--think", metavar="TIME", help="Time between a response and a user's next request."
        ),
    ] = "30s",
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            "--request-rate",
            metavar="RATE",
            help="Request rate, instead of --users: 50, 600/min.",
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
        int,
        typer.Option("--spare", metavar="N", min=0, help="Number of machines that may fail."),
    ] = 1,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="Price file, as docs/prices.example.yaml."),
    ] = None,
    accept_sample_prices: AcceptSamplePricesOption = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="SOURCE=NAME",
            help="Price to use for a source. With a single source: just NAME.",
        ),
    ] = None,
    currency: Annotated[
        str, typer.Option("--currency", metavar="CODE", help="Currency of all amounts.")
    ] = "USD",
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", metavar="N", min=1, help="Number of GPUs, for a source that recorded none."
        ),
    ] = None,
    gpus_per_machine: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-machine",
            metavar="N",
            min=1,
            help="GPUs of one machine. Default: as in the price, or else as measured.",
        ),
    ] = None,
    machines_per_rack: Annotated[
        int | None,
        typer.Option(
            "--machines-per-rack", metavar="N", min=1, help="Also count racks of N machines."
        ),
    ] = None,
    hours_per_day: Annotated[
        float,
        typer.Option(
            "--hours-per-day",
            metavar="NUMBER",
            min=0.1,
            max=24,
            help="How many hours per day the load lasts.",
        ),
    ] = 24.0,
    answer: Annotated[
        str | None,
        typer.Option(
            "--answer",
            metavar="TIME",
            help="Mean latency of a response, if the source does not have it.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FOLDER",
            help="Folder for size.json and the report.",
            show_default="a new folder in results/",
        ),
    ] = None,
    contract: Annotated[
        Path | None,
        typer.Option(
            "--contract",
            metavar="FILE",
            help="Write a contract for one machine, for loadgen validate. Needs a single source.",
        ),
    ] = None,
    allow_invalid: AllowInvalidOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
    full: FullOption = False,
) -> int:
    """Compute how many machines a number of users needs, and what they cost per month.

    Exit: 0 done, 2 wrong options, prices or results, 3 a result is INVALID.

    Example: loadgen size rag sim:gb300-vm --users 5000 --slo ttft:2s:p95 --prices prices.yaml
    """
    from loadgen.core.execution.host_facts import loadgen_version
    from loadgen.cost.size_result import Sizing, to_sized_source
    from loadgen.cost.size_sources import SourceRequest, describe_published_capacity
    from loadgen.cost.size_text import report

    need = _parse_need(users, think, rate, answer, spare, hours_per_day, machines_per_rack)
    _check_options(sources, slo=slo, contract=contract)
    if price and prices is None and not accept_sample_prices:
        raise UserError(
            "missing_option",
            "--price has no effect without prices",
            "--price",
            "--prices prices.yaml",
        )
    price_list = None
    if prices is not None or accept_sample_prices:
        from loadgen.pricing.price_file import load_prices

        price_list = load_prices(prices, accept_sample=accept_sample_prices, currency=currency)
    request = SourceRequest(profile, slo or [], gpus, allow_invalid, invocation.run_command_line)
    sizer = _Sizer(request, need, price_list, parse_price_names(price or [], sources))
    sized = sizer.size_all(sources, gpus_per_machine)
    workload = sized[0].size.source.workload
    remarks = [] if price_list is None else _price_remarks(price_list)
    result = Sizing(
        currency=currency,
        need=need,
        sizes=tuple(to_sized_source(each.size, each.evidence, need) for each in sized),
        workload=workload,
        remarks=(*remarks, *describe_published_capacity(workload)),
        version=loadgen_version(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    print_result(result, report(result), as_json=as_json, full=full)
    _store(result, out or default_output_folder(f"size-{workload}"))
    if contract is not None:
        _write_contract(contract, sized[0], profile)
    return OK


class _SizedMachines(NamedTuple):
    """The machines that one source needs, and the measurements behind them."""

    size: Size
    evidence: Evidence | None


class _Sizer:
    """Computes the machines that a demand needs from several sources."""

    def __init__(
        self,
        request: SourceRequest,
        need: Need,
        prices: Prices | None,
        price_names: dict[str, str],
    ) -> None:
        self._request = request
        self._need = need
        self._prices = prices
        self._price_names = price_names

    def size_all(
        self, sources: Sequence[str], gpus_per_machine: int | None
    ) -> list[_SizedMachines]:
        """Return the machines of each source, in order.

        Result folders are read before machines are searched, so that errors are reported before
        minutes of search.

        Raises:
            CombinedError: Everything that is wrong with the sources.
        """
        from loadgen.cost.machine_searches import run_searches
        from loadgen.cost.size_sources import is_simulated_machine

        simulated_machines = [source for source in sources if is_simulated_machine(source)]
        stored_sources = [source for source in sources if not is_simulated_machine(source)]
        errors: list[LoadgenError] = []
        searches = self._prepare_searches(simulated_machines, errors)
        sized = self._size_each(stored_sources, gpus_per_machine, errors)
        if searches and not errors:
            # The searches leave their results in folders, which `_size` then reads.
            run_searches(searches, self._request.run_command)
            sized |= self._size_each(list(searches), gpus_per_machine, errors)
        if errors:
            raise CombinedError(errors)
        return [sized[source] for source in sources]

    def _prepare_searches(
        self, simulated_machines: Sequence[str], errors: list[LoadgenError]
    ) -> dict[str, SearchCommand]:
        """Return the search of each simulated machine, by its source. Nothing is searched yet.

        Errors, such as an unknown machine or a missing price, are added to `errors`.
        """
        from loadgen.cost.machine_searches import search_command
        from loadgen.cost.size_sources import expected_target

        searches: dict[str, SearchCommand] = {}
        for source in simulated_machines:
            with collecting(errors):
                searches[source] = search_command(source, self._request.profile, self._request.slo)
                if self._prices is not None:
                    # The price is looked up only to report now that there is none.
                    self._find_price(source, expected_target(source))
        return searches

    def _size_each(
        self, sources: Sequence[str], gpus_per_machine: int | None, errors: list[LoadgenError]
    ) -> dict[str, _SizedMachines]:
        """Return the machines of each source. A source with an error adds it to `errors`."""
        sized: dict[str, _SizedMachines] = {}
        for source in sources:
            with collecting(errors):
                sized[source] = self._size(source, gpus_per_machine)
        return sized

    def _size(self, source: str, gpus_per_machine: int | None) -> _SizedMachines:
        """Return the machines of one source.

        A machine has the GPUs that the user names, else those of its price, else those of the
        source.
        """
        from loadgen.cost.size_sources import find_capacity
        from loadgen.cost.sizing import size_machines

        capacity = find_capacity(source, self._request)
        price = None
        if self._prices is not None:
            price = self._price_of(source, capacity)
        # A price per token has no GPUs.
        gpus_of_price = getattr(price, "gpus", None)
        size = size_machines(
            capacity.rate,
            self._need,
            gpus_per_machine=gpus_per_machine or gpus_of_price or capacity.rate.gpus,
            price=price,
            evidence=capacity.evidence,
        )
        return _SizedMachines(size, capacity.evidence)

    def _price_of(self, source: str, capacity: SourceCapacity) -> Price:
        """Return the price of a source: that of its recorded target, or the one the user names.

        Raises UserError for a published rate without a named price: it has no target to find one
        by.
        """
        from loadgen.core.results.manifest import TargetFacts

        assert self._prices is not None
        if capacity.evidence is not None:
            return self._find_price(source, capacity.evidence.summary.target)
        if source in self._price_names:
            return self._find_price(source, TargetFacts())
        raise UserError(
            "no_figure",
            "a published rate has no instance type to find its price by",
            source,
            f"--price '{source}=NAME', one of: {', '.join(self._prices.locations)}",
        )

    def _find_price(self, source: str, target: TargetFacts) -> Price:
        from loadgen.cost.size_sources import find_source_price

        assert self._prices is not None
        return find_source_price(self._prices, target, self._price_names.get(source, ""), source)


def _price_remarks(prices: Prices) -> list[str]:
    """Return the sentences on a price file that qualify every amount of the result."""
    remarks = []
    if prices.sample:
        remarks.append(f"SAMPLE PRICES: examples, not an offer. {prices.notes}")
    if prices.exchanged:
        remarks.append(f"Exchange rates: {'; '.join(prices.exchanged)}")
    return remarks


def _store(result: Sizing, folder: Path) -> None:
    """Write the result and its page to a folder.

    Raises UserError if the folder holds the result of another command or cannot be written.
    """
    from loadgen.core.results import checksums, files
    from loadgen.cost.size_result import FILE
    from loadgen.cost.size_text import report
    from loadgen.render import html

    stored_kind = result_kinds.kind_of(folder)
    if stored_kind is not None and stored_kind.name != "size":
        raise UserError(
            "file_exists",
            f"the folder has a result of the kind {stored_kind.name}",
            f"--out {folder}",
            "give another folder",
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
    print_status(f"Report: {page}")
    print_status(f"Details: loadgen report {shlex.quote(str(folder))} --full")


def _check_options(
    sources: Sequence[str],
    *,
    slo: Sequence[str] | None,
    contract: Path | None,
) -> None:
    """Check the options that depend on each other, before minutes of search.

    Raises UserError for an SLO without a source that it could apply to, and for a contract that
    could not be written.
    """
    from loadgen.cost.size_sources import is_published

    if slo and all(map(is_published, sources)):
        raise UserError(
            "no_effect",
            "--slo has no effect on published rates",
            "--slo",
            "use it with sim:PRESET, or with a result that was measured under this SLO",
        )
    if contract is not None:
        _check_contract_option(contract, sources)


def _check_contract_option(file: Path, sources: Sequence[str]) -> None:
    """Raise UserError if no contract could be written to a file.

    A contract holds one measured machine to its SLO, so it needs one source that is no publication.
    """
    from loadgen.cost.size_sources import is_published

    if len(sources) > 1 or is_published(sources[0]):
        raise UserError(
            "unsupported",
            "--contract needs a single measured source",
            "--contract",
            "give one folder, or sim:PRESET",
        )
    if file.exists():
        raise UserError("file_exists", "the file exists", f"--contract {file}", "give another name")
    if not file.parent.is_dir():
        raise UserError(
            "unwritable_file",
            "its folder does not exist",
            f"--contract {file}",
            f"mkdir {file.parent}",
        )


def _write_contract(file: Path, sized: _SizedMachines, profile: str) -> None:
    """Write the contract that one of the machines has to meet.

    Raises UserError if the source was measured without an SLO, or no machine was counted.
    """
    from loadgen.core.results import files
    from loadgen.cost.contract_file import render_contract
    from loadgen.cost.size_sources import is_simulated_machine
    from loadgen.runs.slo_text import list_objectives

    size, evidence = sized
    if not size.carrying:
        raise _no_contract("a price per token has no machines", file)
    if evidence is None or not list_objectives(evidence.summary):
        raise _no_contract("the source was measured without an SLO", file)
    workload = os.path.relpath(profile, file.parent) if Path(profile).is_file() else profile
    text = render_contract(size, evidence.summary, workload)
    try:
        files.replace(file, text.encode())
    except OSError as error:
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", f"--contract {file}"
        ) from None
    name = size.source.name
    url = name if is_simulated_machine(name) else "https://MACHINE"
    print_status(f"Contract: loadgen validate {shlex.quote(str(file))} --url {url}")


def _no_contract(reason: str, file: Path) -> UserError:
    """Return the error for a contract that cannot be written."""
    return UserError("no_figure", reason, f"--contract {file}", "search with --slo first")


def _parse_need(
    users: str | None,
    think: str,
    rate: str | None,
    answer: str | None,
    spare: int,
    hours_per_day: float,
    machines_per_rack: int | None,
) -> Need:
    """Return the demand that the options describe, as users or as a rate.

    Raises UserError if both or neither of them is given, or a value cannot be read.
    """
    from loadgen.cost.sizing import Need

    if (users is None) == (rate is None):
        raise UserError(
            "missing_option" if users is None else "conflict",
            "give either --users or --rate",
            "--users, --rate",
            "--users 5000, or --rate 50",
        )
    rate_per_s = parse_option("--rate", rate, partial(units.rate_per_s, bare=True))
    if rate_per_s is not None and not 0 < rate_per_s < float("inf"):
        raise UserError(
            "invalid_value", f'"{rate}" must be a rate above 0', "--rate", "like 50 or 600/min"
        )
    return Need(
        users=parse_option("--users", users, units.count),
        think_s=parse_option("--think", think, units.seconds) or 0.0,
        rate_per_s=rate_per_s,
        answer_s=parse_option("--answer", answer, units.seconds),
        spare=spare,
        hours_per_day=hours_per_day,
        machines_per_rack=machines_per_rack,
    )


def parse_price_names(options: Sequence[str], sources: Sequence[str]) -> dict[str, str]:
    """Return the names of `--price SOURCE=NAME` by source. A single source may be left out.

    Raises:
        UserError: An option has another form, or a source has two prices.
    """
    names: dict[str, str] = {}
    for option in options:
        source, equals, name = option.rpartition("=")
        if not equals and len(sources) == 1:
            source = sources[0]
        if source not in sources or not name:
            hint = did_you_mean(source, sources) or "use a source of this command line"
            raise UserError("invalid_value", f'"{option}" must be SOURCE=NAME', "--price", hint)
        if source in names:
            text = f"{source} has two prices: {names[source]} and {name}"
            raise UserError("duplicate", text, f"--price {option}", "keep one of them")
        names[source] = name
    return names
