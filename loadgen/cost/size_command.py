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
    from loadgen.cost.sizing import Demand, Size
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
                "Source of the capacity: folder of a search, sweep or run; "
                "sim:PRESET to search a simulated machine now; published:SYSTEM for "
                "a published rate."
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
                "SLO term for a simulated source (sim:PRESET), such as ttft:2s:p95; replaces the "
                "SLO of the workload. Results folders keep the SLO of their run. Repeatable."
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
            help="Price to use for a source. With a single source, NAME is enough.",
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
    from loadgen.cost.size_text import create_report

    demand = _parse_demand(
        users=users,
        think=think,
        rate=rate,
        response_time=answer,
        spare_machines=spare,
        hours_per_day=hours_per_day,
        machines_per_rack=machines_per_rack,
    )
    _check_options(sources, slo=slo, contract=contract)

    if price and prices is None and not accept_sample_prices:
        raise UserError(
            "missing_option",
            "--price has no effect without --prices",
            "--price",
            "--prices prices.yaml",
        )

    price_list = None
    if prices is not None or accept_sample_prices:
        from loadgen.pricing.price_file import load_prices

        price_list = load_prices(prices, accept_sample=accept_sample_prices, currency=currency)

    request = SourceRequest(profile, slo or [], gpus, allow_invalid, invocation.run_command_line)
    sizer = _Sizer(
        request,
        demand,
        prices=price_list,
        price_names=parse_price_names(price or [], sources),
        gpus_per_machine=gpus_per_machine,
    )
    sized = sizer.size_all(sources)
    workload = sized[0].size.source.workload
    used_prices = [source.size.price for source in sized if source.size.price is not None]
    remarks = [] if price_list is None else _list_price_remarks(price_list, used_prices)
    result = Sizing(
        currency=currency,
        demand=demand,
        sizes=tuple(to_sized_source(size, evidence, demand) for size, evidence in sized),
        workload=workload,
        remarks=(*remarks, *describe_published_capacity(workload)),
        version=loadgen_version(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    print_result(result, create_report(result), as_json=as_json, full=full)
    _write_result(result, out or default_output_folder(f"size-{workload}"))

    if contract is not None:
        _write_contract(contract, sized[0], profile)

    return OK


class _SizedMachines(NamedTuple):
    """The machines that one source needs, and the measurements behind them."""

    size: Size
    evidence: Evidence | None


class _Sizer:
    """Computes the machines that a demand needs from several sources.

    A source is a result folder, `sim:PRESET` (a simulated machine, whose search takes minutes), or
    `published:SYSTEM` (a published rate).

    Args:
        request: The conditions under which the capacity of a source is looked for.
        demand: The load that the machines must serve.
        prices: The prices, or None to compute no costs.
        price_names: The names of the prices that the user chose, by source.
        gpus_per_machine: GPUs of a machine, or None to take those of the price or of the source.
    """

    def __init__(
        self,
        request: SourceRequest,
        demand: Demand,
        *,
        prices: Prices | None,
        price_names: dict[str, str],
        gpus_per_machine: int | None,
    ) -> None:
        """Store what is the same for all sources. Nothing is read or searched yet."""
        self._request = request
        self._demand = demand
        self._prices = prices
        self._price_names = price_names
        self._gpus_per_machine = gpus_per_machine

    def size_all(self, sources: Sequence[str]) -> list[_SizedMachines]:
        """Return the machines of each source, in order.

        Stored and published sources are computed before simulated machines are searched, so that
        most errors are reported before minutes of search. All errors are reported at once.

        Raises:
            CombinedError: Everything that is wrong with the sources.
        """
        from loadgen.cost.machine_searches import run_searches
        from loadgen.cost.size_sources import is_simulated_machine

        simulated_machines = [source for source in sources if is_simulated_machine(source)]
        other_sources = [source for source in sources if not is_simulated_machine(source)]
        errors: list[LoadgenError] = []
        searches = self._prepare_searches(simulated_machines, errors)

        sized = self._size_each(other_sources, errors)
        if searches and not errors:
            # The searches leave their results in folders, which `_size_source` then reads.
            run_searches(searches, self._request.run_command)
            sized.update(self._size_each(list(searches), errors))

        if errors:
            raise CombinedError(errors)

        return [sized[source] for source in sources]

    def _prepare_searches(
        self, simulated_machines: Sequence[str], errors: list[LoadgenError]
    ) -> dict[str, SearchCommand]:
        """Return the search command of each simulated machine, by its source, without running it.

        Errors that can be known before a search, such as an unknown machine or a missing price, are
        added to `errors`.
        """
        from loadgen.cost.machine_searches import build_search_command
        from loadgen.cost.size_sources import predict_target_facts

        searches: dict[str, SearchCommand] = {}
        for source in simulated_machines:
            with collecting(errors):
                searches[source] = build_search_command(
                    source, self._request.profile, self._request.slo
                )
                if self._prices is not None:
                    # The price is looked up only to report now that there is none.
                    self._find_price_of_target(self._prices, source, predict_target_facts(source))

        return searches

    def _size_each(
        self, sources: Sequence[str], errors: list[LoadgenError]
    ) -> dict[str, _SizedMachines]:
        """Return the machines of each source. A source with an error adds it to `errors`."""
        sized: dict[str, _SizedMachines] = {}
        for source in sources:
            with collecting(errors):
                sized[source] = self._size_source(source)
        return sized

    def _size_source(self, source: str) -> _SizedMachines:
        """Find the capacity of one source and its price, and return the machines that it needs.

        The size of a machine is what the user specified, else the GPUs of the machine that the
        price is for, else the GPUs that were measured.
        """
        from loadgen.cost.size_sources import find_capacity
        from loadgen.cost.sizing import size_machines
        from loadgen.pricing.prices import Owned, Rented

        capacity = find_capacity(source, self._request)
        price = None
        if self._prices is not None:
            price = self._find_price_of_source(self._prices, source, capacity)

        gpus_per_machine = self._gpus_per_machine
        if gpus_per_machine is None and isinstance(price, Rented | Owned):
            gpus_per_machine = price.gpus

        if gpus_per_machine is None:
            gpus_per_machine = capacity.rate.gpus

        size = size_machines(
            capacity.rate,
            self._demand,
            gpus_per_machine=gpus_per_machine,
            price=price,
            evidence=capacity.evidence,
        )
        return _SizedMachines(size, capacity.evidence)

    def _find_price_of_source(self, prices: Prices, source: str, capacity: SourceCapacity) -> Price:
        """Return the price for the target that was measured, or the price that the user chose.

        Raises UserError for a published rate without a chosen price, because no target was measured
        whose instance type a price could be found by.
        """
        from loadgen.core.results.manifest import TargetFacts

        if capacity.evidence is not None:
            return self._find_price_of_target(prices, source, capacity.evidence.summary.target)

        if source in self._price_names:
            unknown_target = TargetFacts()
            return self._find_price_of_target(prices, source, unknown_target)

        raise UserError(
            "no_figure",
            "a published rate has no instance type to find its price by",
            source,
            f"--price '{source}=NAME', one of: {', '.join(prices.locations)}",
        )

    def _find_price_of_target(self, prices: Prices, source: str, target: TargetFacts) -> Price:
        """Return the price that the user chose for a source, else the one for its target."""
        from loadgen.cost.size_sources import find_source_price

        return find_source_price(prices, target, self._price_names.get(source, ""), source)


def _list_price_remarks(prices: Prices, used_prices: Sequence[Price]) -> list[str]:
    """Return the sentences on a price file that qualify every amount of the result.

    Only exchange rates that a used price was converted with are named.
    """
    remarks = []
    if prices.sample:
        remarks.append(f"SAMPLE PRICES: examples, not an offer. {prices.notes}")
    exchange_rates = prices.list_exchange_rates(used_prices)
    if exchange_rates:
        remarks.append(f"Exchange rates: {'; '.join(exchange_rates)}")
    return remarks


def _write_result(result: Sizing, folder: Path) -> None:
    """Write `size.json`, the HTML page and the checksums of both to a folder.

    The folder is created if it does not exist. Its paths are printed as a status.

    Raises UserError if the folder holds the result of another command or cannot be written.
    """
    from loadgen.core.results import checksums, files
    from loadgen.cost.size_result import FILE
    from loadgen.cost.size_text import create_report
    from loadgen.render import html

    stored_kind = result_kinds.kind_of(folder)
    if stored_kind is not None and stored_kind.name != "size":
        raise UserError(
            "file_exists",
            f"the folder already has a result of the kind {stored_kind.name}",
            f"--out {folder}",
            "give another folder",
        )

    page = folder / result_kinds.PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.refuse_links(folder)
        files.replace(folder / FILE, format.document(result))
        files.replace(page, html.render(create_report(result)).encode())
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


def _check_contract_option(contract_path: Path, sources: Sequence[str]) -> None:
    """Raise UserError if `--contract` cannot be honoured, before anything is searched.

    A contract holds one machine to the SLO under which it was measured, so it needs exactly one
    source, which is no published rate. An existing file is not overwritten.
    """
    from loadgen.cost.size_sources import is_published

    if len(sources) > 1 or is_published(sources[0]):
        raise UserError(
            "unsupported",
            "--contract needs a single measured source",
            "--contract",
            "give one folder, or sim:PRESET",
        )

    if contract_path.exists():
        raise UserError(
            "file_exists", "the file exists", f"--contract {contract_path}", "give another name"
        )

    if not contract_path.parent.is_dir():
        raise UserError(
            "unwritable_file",
            "its folder does not exist",
            f"--contract {contract_path}",
            f"mkdir {contract_path.parent}",
        )


def _write_contract(contract_path: Path, sized: _SizedMachines, profile: str) -> None:
    """Write the contract that one of the machines has to meet, and print how to validate it.

    Args:
        contract_path: The file to write.
        sized: The machines of the source, and the measurements whose SLO the contract requires.
        profile: A packaged workload or the path of a workload file.

    Raises:
        UserError: The source was measured without an SLO, or has a price per token, which gives no
            number of machines.
    """
    from loadgen.core.results import files
    from loadgen.cost.contract_file import render_contract
    from loadgen.cost.size_sources import is_simulated_machine
    from loadgen.runs.slo_text import list_objectives

    size, evidence = sized
    if not size.serving_machines:
        raise _create_no_contract_error("a price per token has no machines", contract_path)
    if evidence is None or not list_objectives(evidence.summary):
        raise _create_no_contract_error("the source was measured without an SLO", contract_path)

    # A contract names a workload file relative to its own folder.
    workload = profile
    if Path(profile).is_file():
        workload = os.path.relpath(profile, contract_path.parent)

    text = render_contract(size, evidence.summary, workload)
    try:
        files.replace(contract_path, text.encode())
    except OSError as error:
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", f"--contract {contract_path}"
        ) from None

    source = size.source.name
    url = source if is_simulated_machine(source) else "https://MACHINE"
    print_status(
        f"Check the result with: loadgen validate {shlex.quote(str(contract_path))} --url {url}"
    )


def _create_no_contract_error(reason: str, contract_path: Path) -> UserError:
    """Return the error for a result from which no contract follows."""
    return UserError("no_figure", reason, f"--contract {contract_path}", "search with --slo first")


def _parse_demand(
    *,
    users: str | None,
    think: str,
    rate: str | None,
    response_time: str | None,
    spare_machines: int,
    hours_per_day: float,
    machines_per_rack: int | None,
) -> Demand:
    """Return the demand that the options of the command describe: a number of users, or a rate.

    Args:
        users: Concurrent users, such as "5k", or None for a rate.
        think: Time between a response and the next request of a user, such as "30s".
        rate: Requests per second or minute, such as "600/min", or None for users.
        response_time: Mean response time, for a source that does not have it.
        spare_machines: How many machines may fail while the others still serve the demand.
        hours_per_day: How long the demand lasts.
        machines_per_rack: Machines in a rack, or None if racks are not counted.

    Raises:
        UserError: Both or neither of `users` and `rate` are given, or a value cannot be read.
    """
    from loadgen.cost.sizing import Demand

    if (users is None) == (rate is None):
        raise UserError(
            "missing_option" if users is None else "conflict",
            "give either --users or --rate",
            "--users, --rate",
            "--users 5000, or --rate 50",
        )

    rate_per_s = parse_option("--rate", rate, partial(units.rate_per_s, default_unit="s"))
    if rate_per_s is not None and not 0 < rate_per_s < float("inf"):
        raise UserError(
            "invalid_value", f'"{rate}" must be a rate above 0', "--rate", "like 50 or 600/min"
        )

    return Demand(
        users=parse_option("--users", users, units.count),
        think_s=parse_option("--think", think, units.seconds) or 0.0,
        rate_per_s=rate_per_s,
        response_s=parse_option("--answer", response_time, units.seconds),
        spare_machines=spare_machines,
        hours_per_day=hours_per_day,
        machines_per_rack=machines_per_rack,
    )


def parse_price_names(options: Sequence[str], sources: Sequence[str]) -> dict[str, str]:
    """Return the name of the price that `--price SOURCE=NAME` chooses for each source.

    The option may be repeated. With a single source, `--price NAME` is enough.

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
