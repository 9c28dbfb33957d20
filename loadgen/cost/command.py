"""`loadgen cost DIR...`: what a request costs in stored results, under the prices of a file.

Parses options and prints. `evidence_reader` reads results, `pricing` prices and `comparison`
compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.options import AcceptSamplePricesOption, AllowInvalidOption, FullOption
from loadgen.cli.output import print_report, warn_if_changed, write_file
from loadgen.core.errors import OK, CombinedError, LoadgenError, UserError, collecting
from loadgen.core.run_folder import refuse_shard

if TYPE_CHECKING:
    from loadgen.pricing.evidence import Evidence
    from loadgen.pricing.priced_result import PricedResult
    from loadgen.pricing.prices import Prices

HOURS_PER_DAY = 24


def cost(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, repeats or searches.",
            autocompletion=completion.complete_result,
        ),
    ],
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="Price file, as docs/prices.example.yaml."),
    ] = None,
    accept_sample_prices: AcceptSamplePricesOption = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="DIR=NAME",
            help="Price to use for a result. With a single result, NAME is enough.",
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpus",
            metavar="DIR=N",
            help="GPUs of a result that recorded none. With a single result, N is enough.",
        ),
    ] = None,
    utilization: Annotated[
        str,
        typer.Option(
            "--utilization",
            metavar="SHARE",
            help=(
                "Fraction of the paid GPU-hours in use: 0.4, 40%, or by the hours of a day: "
                "14h@10%,10h@70%."
            ),
        ),
    ] = "1",
    as_of: Annotated[
        str | None,
        typer.Option("--as-of", metavar="DAY", help="Use the prices of this day: 2026-06-30."),
    ] = None,
    currency: Annotated[
        str | None,
        typer.Option(
            "--currency",
            metavar="CODE",
            help="Currency of all amounts. The price file needs the exchange rates.",
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
    full: FullOption = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write an HTML report."),
    ] = None,
) -> int:
    """Compute what a request costs, from measured results and a price file.

    Exit: 0 done, 2 wrong prices or results, 3 a result is INVALID.

    Example: loadgen cost results/azure results/aws --prices prices.yaml
    """
    from loadgen.cost import cost_data
    from loadgen.cost.comparison import compare_costs
    from loadgen.cost.cost_report import create_report
    from loadgen.cost.evidence_reader import read_evidence
    from loadgen.cost.recorded_runs import with_record_reader
    from loadgen.pricing.price_file import load_prices
    from loadgen.render import html as html_renderer

    if as_json + as_markdown + as_csv > 1:
        raise UserError(
            "conflict", "more than one output format", "--json, --markdown, --csv", "choose one"
        )

    price_names = _parse_pairs(price or [], "--price", folders)
    gpu_counts = _parse_gpu_counts(_parse_pairs(gpus or [], "--gpus", folders))
    used_fraction = parse_utilization(utilization)

    for folder in folders:
        refuse_shard(folder)
        warn_if_changed(folder)

    price_list = load_prices(
        prices,
        accept_sample=accept_sample_prices,
        currency=currency,
        as_of=None if as_of is None else _parse_day(as_of),
    )
    evidence = [
        with_record_reader(result) for result in read_evidence(folders, allow_invalid=allow_invalid)
    ]
    names = [result.name for result in evidence]
    _refuse_unknown_results(price_names, names, "--price")
    _refuse_unknown_results(gpu_counts, names, "--gpus")
    priced: list[PricedResult] = []

    errors: list[LoadgenError] = []
    for result in evidence:
        with collecting(errors):
            priced += _price_result_folder(
                result,
                price_list,
                price_name=price_names.get(result.name, ""),
                gpus=gpu_counts.get(result.name),
                utilization=used_fraction,
            )

    if errors:
        raise CombinedError(errors)

    comparison = compare_costs(priced, price_list)
    if html is not None:
        write_file(html, html_renderer.render(create_report(comparison)), "--html")

    if as_json:
        print(cost_data.render_json(comparison), end="")
    elif as_csv:
        print(cost_data.render_csv(comparison), end="")
    else:
        print_report(create_report(comparison), as_markdown=as_markdown, full=full)

    return OK


def _price_result_folder(
    evidence: Evidence, prices: Prices, *, price_name: str, gpus: int | None, utilization: Decimal
) -> list[PricedResult]:
    """Return the costs of one result folder under each price that applies to its target.

    Several prices apply if they differ only in commitment, such as "on demand" and "1 year". Each
    gives a result of its own, with the commitment in its name.

    Args:
        evidence: The measurements in the folder.
        prices: The prices to choose from.
        price_name: The name of the price that the user chose, or "" to choose by the target.
        gpus: The number of GPUs that the user specified, or None.
        utilization: The fraction of the paid time in which the machines serve the load.

    Raises:
        UserError: No price applies, or something is not known that the price needs.
    """
    from loadgen.cost.evidence_reader import resolve_gpu_count
    from loadgen.pricing.priced_result import price_result
    from loadgen.pricing.prices import find_prices
    from loadgen.pricing.step_cost import with_step_costs

    gpu_count = resolve_gpu_count(evidence, gpus)
    matching = find_prices(prices, evidence.summary.target, price_name, evidence.name)

    results = []
    for price in matching:
        name = evidence.name
        if len(matching) > 1:
            name = f"{evidence.name} ({price.commitment or price.name})"

        result = price_result(
            evidence,
            price,
            name,
            prices.locations[price.name],
            gpus=gpu_count,
            utilization=utilization,
        )
        results.append(with_step_costs(result, prices))

    return results


def _parse_pairs(options: Sequence[str], flag: str, folders: Sequence[Path]) -> dict[str, str]:
    """Parse the values of a repeatable option DIR=VALUE, by the name of the result folder.

    If the command has a single folder, VALUE alone is enough.

    Args:
        options: The values of the option, such as "results/azure=8".
        flag: The option, such as "--gpus", for error messages.
        folders: The result folders of the command line.

    Raises:
        UserError: A value has another form, or a folder has two values.
    """
    values_by_name: dict[str, str] = {}
    for option in options:
        folder, equals, value = option.partition("=")
        if not equals and len(folders) == 1:
            folder = str(folders[0])
            value = option

        if not (folder and value):
            raise UserError(
                "invalid_value",
                f'"{option}" does not name a result',
                flag,
                f"{flag} {folders[0]}=...",
            )

        # The user may name a folder by its path or by its last part, which is its name in reports.
        name = Path(folder).name if "/" in folder else folder
        if name in values_by_name:
            raise UserError(
                "duplicate",
                f"{name} has two values: {values_by_name[name]} and {value}",
                f"{flag} {option}",
                "keep one of them",
            )

        values_by_name[name] = value

    return values_by_name


def _refuse_unknown_results(
    values_by_name: dict[str, str] | dict[str, int], names: Sequence[str], flag: str
) -> None:
    """Raise UserError if an option has a value for a result that is not on the command line."""
    for name in values_by_name:
        if name not in names:
            raise UserError(
                "unknown_name",
                f'unknown result "{name}"',
                flag,
                f"use one of: {', '.join(names)}",
            )


def _parse_gpu_counts(texts_by_name: dict[str, str]) -> dict[str, int]:
    """Return the numbers of GPUs by result. Raises UserError for a text that is no such number."""
    for name, text in texts_by_name.items():
        if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
            raise UserError(
                "invalid_value",
                f'"{text}" must be an integer >= 1',
                f"--gpus {name}",
                "like 8",
            )
    return {name: int(text) for name, text in texts_by_name.items()}


def _parse_day(text: str) -> date:
    """Return the day of `--as-of`. Raises UserError for a wrong date or one in the future."""
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise UserError(
            "invalid_value", f'"{text}" must be a date', "--as-of", "like 2026-06-30"
        ) from None

    if day > date.today():
        raise UserError("out_of_range", f"{day} is in the future", "--as-of", "a day up to today")

    return day


def parse_utilization(text: str) -> Decimal:
    """Return the fraction of the paid time in which machines are used.

    Args:
        text: A fraction ("0.4", "40%"), or fractions of the hours of a day ("14h@10%,10h@70%").

    Raises:
        UserError: The text is neither.
    """
    if "@" not in text:
        return _parse_fraction(text)

    total_hours = Decimal(0)
    used_hours = Decimal(0)
    for period in text.split(","):  # such as "14h@10%"
        match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,2})?)h@(.+)", period.strip())
        if match is None:
            raise UserError(
                "invalid_value",
                f'"{period}" must be HOURSh@FRACTION',
                "--utilization",
                "like 14h@10%,10h@70%",
            )

        hours_text, fraction_text = match.groups()
        period_hours = Decimal(hours_text)

        # Machines may be idle for a part of the day but not for all of it, so `_parse_fraction`
        # refuses 0, and only a period accepts it.
        is_idle = fraction_text.strip() in ("0", "0%")
        used_fraction = Decimal(0) if is_idle else _parse_fraction(fraction_text)
        total_hours += period_hours
        used_hours += period_hours * used_fraction

    if total_hours != HOURS_PER_DAY or not used_hours:
        raise UserError(
            "invalid_value",
            f'the hours of "{text}" must add up to 24, with some of them in use',
            "--utilization",
            f"now {total_hours:f} hours; like 14h@10%,10h@70%",
        )

    return used_hours / HOURS_PER_DAY


def _parse_fraction(text: str) -> Decimal:
    """Return the fraction that a text such as "0.4", ".4" or "40 %" means.

    Raises UserError for another text, and for a fraction that is not above 0 and at most 1.
    """
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?|\.[0-9]{1,6}) ?(%?)", text.strip())
    fraction = Decimal(0)  # refused below, like a text of another form
    if match is not None:
        number, percent_sign = match.groups()
        fraction = Decimal(number) / (100 if percent_sign else 1)

    if not 0 < fraction <= 1:
        raise UserError(
            "invalid_value",
            f'"{text}" must be above 0 and at most 100%',
            "--utilization",
            "like 0.4 or 40%",
        )

    return fraction
