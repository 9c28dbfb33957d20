"""`loadgen cost DIR...`: what a request cost in stored results, under the prices of a file.

Parses flags and prints: `evidence_reader` reads runs, `cost.price_file` reads prices, `cost.comparison` compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.options import AcceptSamplePricesOption, AllowInvalidOption
from loadgen.cli.output import print_report, say_changed, write_file
from loadgen.core.errors import OK, CombinedError, LoadgenError, UserError
from loadgen.core.run_folder import refuse_shard


def cost(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, of repeats of a run, or of a search.",
            autocompletion=completion.complete_result,
        ),
    ],
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="Your prices: see docs/prices.example.yaml."),
    ] = None,
    accept_sample_prices: AcceptSamplePricesOption = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="DIR=NAME",
            help="Which price a result is under; of a single one just NAME.",
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpus",
            metavar="DIR=N",
            help="GPUs of a result that recorded none; of a single one just N.",
        ),
    ] = None,
    utilization: Annotated[
        str,
        typer.Option(
            "--utilization",
            metavar="SHARE",
            help="Share of the paid GPU-hours that is used: 0.4, 40%, or of a day's: 14h@10%,10h@70%.",
        ),
    ] = "1",
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="DAY", help="With the prices that were valid then: 2026-06-30."
        ),
    ] = None,
    currency: Annotated[
        str | None,
        typer.Option(
            "--currency",
            metavar="CODE",
            help="Of the figures; the price file has the exchange rates.",
        ),
    ] = None,
    allow_invalid: AllowInvalidOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", rich_help_panel="Output", help="Print Markdown.")
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", rich_help_panel="Output", help="Print CSV.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with plots to this file."),
    ] = None,
) -> int:
    """What a request cost: from measured runs and your prices.

    Exit: 0 done, 2 wrong prices or results, 3 a result is not a valid measurement.

    Example: loadgen cost results/azure results/aws --prices prices.yaml
    """
    from loadgen.cost import comparison, cost_data, evidence_reader
    from loadgen.cost.recorded_runs import with_records
    from loadgen.cost.sections import report
    from loadgen.pricing import price_file
    from loadgen.pricing.priced_result import price_result
    from loadgen.pricing.prices import find_prices
    from loadgen.pricing.step_cost import with_step_costs
    from loadgen.render import html as as_page

    if as_json + as_markdown + as_csv > 1:
        raise UserError(
            "conflict", "several formats at once", "--json, --markdown, --csv", "choose one"
        )
    chosen = _pairs(price or [], "--price", folders)
    gpu_counts = _gpu_counts(_pairs(gpus or [], "--gpus", folders))
    share = _share(utilization)
    for folder in folders:
        refuse_shard(folder)
        say_changed(folder)
    book = price_file.load_prices(
        prices,
        accept_sample=accept_sample_prices,
        currency=currency,
        as_of=None if as_of is None else _day(as_of),
    )
    evidence = evidence_reader.read_evidence(folders, allow_invalid=allow_invalid)
    evidence = tuple(map(with_records, evidence))
    _check_names(chosen, [result.name for result in evidence], "--price")
    _check_names(gpu_counts, [result.name for result in evidence], "--gpus")
    priced, faults = [], list[LoadgenError]()
    for result in evidence:
        try:
            gpu_count = evidence_reader.gpus_of(result, gpu_counts.get(result.name))
            matching = find_prices(
                book, result.summary.target, chosen.get(result.name, ""), result.name
            )
            for at in matching:
                name = (
                    result.name
                    if len(matching) == 1
                    else f"{result.name} ({at.commitment or at.name})"
                )
                place = book.locations[at.name]
                made = price_result(result, at, name, place, gpus=gpu_count, utilization=share)
                priced.append(with_step_costs(made, book))
        except LoadgenError as fault:
            faults.append(fault)
    if faults:
        raise CombinedError(faults)
    compared = comparison.compare_offers(priced, book)
    if html is not None:
        write_file(html, as_page.render(report(compared)), "--html")
    if as_json or as_csv:
        print((cost_data.render_json if as_json else cost_data.render_csv)(compared), end="")
    else:
        print_report(report(compared), as_markdown=as_markdown)
    return OK


def _pairs(texts: Sequence[str], flag: str, folders: Sequence[Path]) -> dict[str, str]:
    """Return the values of DIR=VALUE by directory; the name of a single folder may be left out.

    Raises UserError for a text of another form and for a directory that has two values.
    """
    values_by_name: dict[str, str] = {}
    for text in texts:
        folder, equals, value = text.partition("=")
        if not equals and len(folders) == 1:
            folder, value = str(folders[0]), text
        if not (folder and value):
            what = f'"{text}" does not say which result it is of'
            raise UserError("invalid_value", what, flag, f"like {flag} {folders[0]}=...")
        name = Path(folder).name if "/" in folder else folder
        if name in values_by_name:
            what = f"{name} has two values: {values_by_name[name]} and {value}"
            raise UserError("duplicate", what, f"{flag} {text}", "keep one of them")
        values_by_name[name] = value
    return values_by_name


def _check_names(by_name: dict[str, str] | dict[str, int], names: Sequence[str], flag: str) -> None:
    for name in by_name:
        if name not in names:
            raise UserError(
                "unknown_name",
                f'no result is called "{name}"',
                flag,
                f"results: {', '.join(names)}",
            )


def _gpu_counts(texts_by_name: dict[str, str]) -> dict[str, int]:
    for name, text in texts_by_name.items():
        if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
            raise UserError(
                "invalid_value",
                f'"{text}" is not a number of GPUs',
                f"--gpus {name}",
                "a whole number above zero",
            )
    return {name: int(text) for name, text in texts_by_name.items()}


def _day(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise UserError(
            "invalid_value", f'"{text}" is not a day', "--as-of", "like 2026-06-30"
        ) from None
    if day > date.today():
        raise UserError("out_of_range", f"{day} is in the future", "--as-of", "a day up to today")
    return day


def _share(text: str) -> Decimal:
    """A share, or the mean of the shares of a day's hours: 14h@10%,10h@70%."""
    if "@" not in text:
        return _share_of_hours(text)
    hours, used = Decimal(0), Decimal(0)
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,2})?)h@(.+)", part.strip())
        if match is None:
            raise UserError(
                "invalid_value",
                f'"{part}" is no part of a day',
                "--utilization",
                "like 14h@10%,10h@70%",
            )
        idle = match[2].strip() in ("0", "0%")
        hours, used = (
            hours + Decimal(match[1]),
            used + Decimal(match[1]) * (0 if idle else _share_of_hours(match[2])),
        )
    if hours != 24 or not used:
        hint = "hours that add up to 24, some of them in use: 14h@10%,10h@70%"
        raise UserError("invalid_value", f'"{text}" is of {hours:f} hours', "--utilization", hint)
    return used / 24


def _share_of_hours(text: str) -> Decimal:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?|\.[0-9]{1,6}) ?(%?)", text.strip())
    value = Decimal(match[1]) / (100 if match[2] else 1) if match else Decimal(0)
    if not 0 < value <= 1:
        raise UserError(
            "invalid_value",
            f'"{text}" is not a share',
            "--utilization",
            "above 0 and at most 1, like 0.4 or 40%",
        )
    return value
