"""Renders the result of `loadgen size`: the answer, the sources side by side, the assumptions.

Pure: takes the stored result and returns the report that text, Markdown and page are made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

from loadgen.core import format
from loadgen.cost.cost_text import compare_owned_and_rented
from loadgen.cost.size_result import SizedSource, Sizing
from loadgen.cost.sizing import HOURS_PER_DAY, HOURS_PER_MONTH, Need
from loadgen.pricing.estimate import Estimate, format_interval
from loadgen.pricing.reasons import texts
from loadgen.render.page import Bar, Tile
from loadgen.render.section import (
    Bars,
    Bullets,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    Tiles,
    named_facts,
    section,
    simulated_notice,
)

NEARLY_FULL = 0.95
"""Fraction of the capacity above which it takes a long load to show that an SLO is met."""

DIFFERENT_SLOS = (
    "The sources were measured under different SLOs (see below), so they are not comparable."
)
HOURS_PAID = f"Machines are paid for all {HOURS_PER_MONTH} hours of a month."
SERVING_COLOR = "c1"
SPARE_COLOR = "c6"
SERVING = "serve the load"
SPARE = "spare"
LEGEND = {SERVING: SERVING_COLOR, SPARE: SPARE_COLOR}

HEADINGS_OF_SERIOUS_NOTES = {
    "slo_missed": "SLO MISSED",
    "slo_missed_at_capacity": "SLO MISSED",
    "overloaded": "NOT SUSTAINED",
    "not_sustained": "STABILITY UNKNOWN",
}
"""Notes that make a number of machines useless, with the heading of their warning."""


def report(sizing: Sizing) -> Report:
    """Return the whole report of a size: the answer for each source, then what it depends on."""
    need = describe_need(sizing.need)
    answers = [
        Paragraph(f"{answer(size, sizing.need, sizing.currency)}.", large=True)
        for size in sizing.sizes
    ]
    return Report(
        title=f"{sizing.workload} · {need}",
        page_title=f"{sizing.workload}: machines for {need}",
        generated_by=f"loadgen {sizing.version} report of a size",
        notices=list(_warnings(sizing.sizes)),
        headline=answers,
        sections=[
            _summary_section(sizing),
            _comparison_section(sizing),
            _assumptions_heading(sizing),
            *(_source_section(size, sizing.need) for size in sizing.sizes),
            section("Remarks", Bullets(sizing.remarks)),
        ],
        brief=[section("", *answers), *_brief_sections(sizing)],
    )


def _brief_sections(sizing: Sizing) -> Iterator[Section]:
    """Yield what a terminal prints below the answer: a short table, and what a loss means."""
    rows = [row for row in _rows_to_show(sizing) if row.is_brief]
    yield section("", _table_of_sources(sizing, rows))
    has_several_sources = len(sizing.sizes) > 1
    losses = []
    for size in sizing.sizes:
        if size.carrying and size.used is not None:
            prefix = f"{size.source.name}: " if has_several_sources else ""
            losses.append(f"{prefix}{describe_utilization(size, sizing.need, size.carrying)}")
    slos = {size.slo for size in sizing.sizes if size.slo}
    caveat = DIFFERENT_SLOS if len(slos) > 1 else ""
    yield section("", *losses, Paragraph(caveat, "warn"))


def headline(sizing: Sizing) -> str:
    """Return one sentence for the list of results: the answer of the first source.

    It starts with a mark if nothing was measured, and ends with the number of other sources.
    """
    first = sizing.sizes[0]
    mark = ""
    if first.simulated:
        mark += "SIMULATED, "
    if first.estimate:
        mark += "ESTIMATE from published rates, "
    more = ""
    if len(sizing.sizes) > 1:
        more = f"; {format.counted(len(sizing.sizes) - 1, 'other source')}"
    return f"{mark}{answer(first, sizing.need, sizing.currency)}{more}."


def describe_need(need: Need) -> str:
    """Return the demand as text, such as "5,000 users" or "50/s"."""
    if need.users is None:
        return f"{format.quantity(need.rate_per_s)}/s"
    return format.counted(need.users, "user")


def outcome(sizing: Sizing) -> str:
    """Return the number of machines of each source, in a few words."""
    counts = []
    for size in sizing.sizes:
        if size.machines is None:
            counts.append("none (price per token)")
        else:
            counts.append(f"{_at_most(size)}{size.machines:,}")
    return f"machines: {', '.join(counts)}"


def answer(size: SizedSource, need: Need, currency: str) -> str:
    """Return how many machines a source needs and what they cost, as a sentence without full stop.

    For example: "sim:gb300-vm: 12 machines (11 + 1 spare, 48 GPUs) serve 5,000 users of rag: USD
    122,640 per month, 0.92 per 1,000 requests".
    """
    demand = describe_need(need)
    if need.users is None:
        demand = f"{format.quantity(size.demand_per_s)}/s"
    machines = "a price per token can serve"
    if size.machines is not None:
        verb = "serves" if size.machines == 1 else "serve"
        machines = f"{_describe_size(size, need, size.machines)} {verb}"
    cost = ""
    if size.per_month is not None and size.per_thousand is not None:
        cost = (
            f": {currency} {_format_whole_amount(size.per_month)} per month, "
            f"{_format_small_amount(size.per_thousand)} per 1,000 {size.source.kind}"
        )
    return f"{size.source.name}: {machines} {demand} of {size.source.workload}{cost}"


def _describe_size(size: SizedSource, need: Need, machines: int) -> str:
    """Return the machines with the spare ones, their GPUs and the interval, as text.

    For example "12 machines (11 + 1 spare, 48 GPUs)".
    """
    details = [format.counted(machines * size.gpus_per_machine, "GPU")]
    if need.spare and size.carrying is not None:
        details.insert(0, f"{size.carrying:,} + {need.spare:,} spare")
    if _machine_interval(size):
        details.append(_machine_interval(size))
    count = format.counted(machines, "machine")
    return f"{_at_most(size)}{count} ({', '.join(details)})"


def _machine_interval(size: SizedSource) -> str:
    """Return the numbers of machines at the ends of the interval of the rate, if they differ."""
    if size.low is None or size.low == size.high:
        return ""
    return f"95 % CI {size.low} to {size.high}"


def _describe_machines(count: int, gpus: int) -> str:
    return f"{format.counted(count, 'machine')} of {format.counted(gpus, 'GPU')}"


def _at_most(size: SizedSource) -> str:
    """Return "at most " if the capacity, and so the number of machines, is only bounded."""
    return "at most " if size.source.lower_bound else ""


def _warnings(sizes: Sequence[SizedSource]) -> Iterator[Notice]:
    """Yield the warnings to show before the numbers of machines.

    They name the sources that were simulated or published instead of measured, and those whose load
    missed its SLO or cannot be sustained.
    """
    simulated_names = [size.source.name for size in sizes if size.simulated]
    if simulated_names:
        yield simulated_notice(
            "Results come from a performance model, not from real hardware: "
            f"{', '.join(simulated_names)}."
        )
    published_names = [size.source.name for size in sizes if size.estimate]
    if published_names:
        yield Notice(
            "ESTIMATE",
            "Computed from published rates of another workload and other limits, without a "
            f"confidence interval: {', '.join(published_names)}.",
        )
    for size in sizes:
        yield from _warnings_of_source(size)


def _warnings_of_source(size: SizedSource) -> Iterator[Notice]:
    """Yield a warning for each note that makes the number of machines useless.

    They are in the order of `HEADINGS_OF_SERIOUS_NOTES`, the worst first.
    """
    for code, heading in HEADINGS_OF_SERIOUS_NOTES.items():
        for note in size.note_codes:
            if note.code == code:
                (sentence,) = texts([note])
                yield Notice(heading, f"{size.source.name}: {sentence}")


def _summary_section(sizing: Sizing) -> Section:
    """Return the section below the answer: large numbers of a single source.

    Sources that were measured under different SLOs are not comparable, so there is a warning.
    """
    has_one_source = len(sizing.sizes) == 1
    tiles = Tiles(list(_tiles(sizing.sizes[0], sizing.currency)) if has_one_source else ())
    slos = {size.slo for size in sizing.sizes if size.slo}
    warning = DIFFERENT_SLOS if len(slos) > 1 else ""
    return section("", tiles, Paragraph(warning, "warn"))


def _comparison_section(sizing: Sizing) -> Section:
    """Return the section with bars and a table of all sources.

    A caveat says what is not comparable if some machines are owned and others are rented.
    """
    machine_bars = Bars(
        rows=list(_machine_bars(sizing)), title="Machines", number=_format_whole, legend=LEGEND
    )
    cost_bars = Bars(
        rows=list(_cost_bars(sizing)),
        title=f"{sizing.currency} per month",
        low=0.0,
        number=_format_whole,
        legend=LEGEND,
    )
    priced = [size for size in sizing.sizes if size.price is not None]
    owned = [size.source.name for size in priced if size.price and size.price.owned]
    rented = [size.source.name for size in priced if size.price and not size.price.owned]
    return section(
        "Comparison of the sources" if len(sizing.sizes) > 1 else "Metrics",
        machine_bars if machine_bars.rows else "",
        cost_bars if cost_bars.rows else "",
        _comparison_table(sizing),
        Paragraph(compare_owned_and_rented(owned, rented), "warn"),
    )


def _assumptions_heading(sizing: Sizing) -> Section:
    is_rented = any(size.price is not None and size.price.rented for size in sizing.sizes)
    return section("Assumptions", Paragraph(HOURS_PAID if is_rented else "", "soft"))


class _Row(NamedTuple):
    """A row of the table of sources.

    Attributes:
        name: The name of the row.
        text_of: Returns the text for one source.
        is_about_money: True if the row is only shown with prices.
        is_brief: True if a terminal shows the row by default.
    """

    name: str
    text_of: Callable[[SizedSource], str]
    is_about_money: bool = False
    is_brief: bool = False


def _comparison_table(sizing: Sizing) -> Table:
    """Return the table with all rows and a column for each source."""
    return _table_of_sources(sizing, _rows_to_show(sizing))


def _rows_to_show(sizing: Sizing) -> list[_Row]:
    """Return the rows of the table of sources, without those about money if there are no prices."""
    has_prices = any(size.price is not None for size in sizing.sizes)
    return [row for row in _rows(sizing) if has_prices or not row.is_about_money]


def _table_of_sources(sizing: Sizing, rows: Sequence[_Row]) -> Table:
    """Return a table with a column for each source."""
    return Table(
        ("", *(size.source.name for size in sizing.sizes)),
        [(row.name, *map(row.text_of, sizing.sizes)) for row in rows],
        wrap_columns=True,
    )


def _rows(sizing: Sizing) -> Iterator[_Row]:
    """Yield the rows of the table of sources.

    The first source gives the noun of an interaction, such as "requests" or "conversations", for
    all of them, because every source is sized for one workload.
    """
    source = sizing.sizes[0].source
    noun = source.kind
    currency = sizing.currency
    yield _Row(
        "Machines incl. spare",
        lambda size: format_interval(size.machines, size.low, size.high, format.count),
    )
    yield _Row("Machines without spare", lambda size: format.count(size.carrying))
    machines_per_rack = sizing.need.machines_per_rack
    if machines_per_rack is not None:
        yield _Row(
            f"Racks of {format.counted(machines_per_rack, 'machine')}",
            lambda size: format.count(_racks(size, machines_per_rack)),
        )
    yield _Row("GPUs", lambda size: format.count(_gpus(size)))
    yield _Row("Utilization", _format_utilization, is_brief=True)
    yield _Row(f"Demand, {noun}/s", lambda size: format.quantity(size.demand_per_s), is_brief=True)
    yield _Row(f"Capacity of a machine, {noun}/s", _format_machine_rate, is_brief=True)
    yield _Row(f"Mean latency of {source.answer}", _format_response_time)
    yield _Row(
        "GPU-hours per month",
        lambda size: format.count(_gpu_hours_per_month(size)),
        is_about_money=True,
    )
    yield _Row(
        f"{currency} per month",
        lambda size: _format_whole_amount(size.per_month),
        is_about_money=True,
    )
    yield _Row(
        f"{currency} per 1,000 {noun}",
        lambda size: _format_small_amount(size.per_thousand),
        is_about_money=True,
    )


def _racks(size: SizedSource, machines_per_rack: int) -> int | None:
    if size.machines is None:
        return None
    return math.ceil(size.machines / machines_per_rack)


def _gpus(size: SizedSource) -> int | None:
    if size.machines is None:
        return None
    return size.machines * size.gpus_per_machine


def _gpu_hours_per_month(size: SizedSource) -> int | None:
    """Return the GPU-hours that are paid, or None if nothing is paid by the hour."""
    gpus = _gpus(size)
    if size.price is None or not size.price.rented or gpus is None:
        return None
    return gpus * int(HOURS_PER_MONTH)


def _format_utilization(size: SizedSource) -> str:
    prefix = "" if size.used is None else _at_most(size)
    return prefix + format.percent(size.used)


def _format_machine_rate(size: SizedSource) -> str:
    rate = size.per_machine
    prefix = "at least " if size.source.lower_bound else ""
    return prefix + format_interval(rate.mid, rate.low, rate.high)


def _format_response_time(size: SizedSource) -> str:
    return format.duration(size.response_s) if size.response_s else format.NONE


def _format_whole_amount(money: Estimate[Decimal] | None) -> str:
    if money is None:
        return format.NONE
    return format_interval(money.mid, money.low, money.high, _format_whole)


def _format_small_amount(money: Estimate[Decimal] | None) -> str:
    if money is None:
        return format.NONE
    return format_interval(
        money.mid, money.low, money.high, lambda amount: format.quantity(float(amount))
    )


def _format_whole(value: float | Decimal) -> str:
    return f"{value:,.0f}"


def _source_section(size: SizedSource, need: Need) -> Section:
    """Return what was measured, the assumptions, the price and the caveats of one source."""
    source = size.source
    gpus = format.counted(source.gpus, "GPU")
    rate = f"{format.quantity(source.rate.mid)} {source.noun}/s on {gpus}"
    evidence = named_facts(
        Measured=f"{rate}, {source.basis}",
        SLO=size.slo,
        Evidence=source.folder,
        Price="" if size.price is None else f"{size.price.name}, {size.price.dated}",
    )
    assumptions = Bullets(list(_assumptions(size, need)))
    caveats = Bullets(() if size.estimate else size.notes, "warn")
    return section(source.name, evidence, assumptions, caveats, is_subsection=True)


def _assumptions(size: SizedSource, need: Need) -> Iterator[str]:
    """Yield a sentence for each assumption behind the number of machines of a source.

    They let a reader recompute the number: the demand of the users, the scaling from the measured
    to the rented machines, and the load that is left after the spare machines have failed.
    """
    source = size.source
    if need.users is not None and size.response_s:
        yield (
            f"each user waits {format.duration(size.response_s)} for {source.answer} and then "
            f"thinks for {need.think_s:g} s: {need.users:,} users / "
            f"{size.response_s + need.think_s:.3g} s = {format.quantity(size.demand_per_s)}/s"
        )
    if size.machines is not None and size.gpus_per_machine != source.gpus:
        yield (
            f"the rate is scaled from {format.counted(source.gpus, 'GPU')} to "
            f"{size.gpus_per_machine}, assuming independent machines and a router without cost; "
            "the interval is scaled too, because all machines share the error of one measurement"
        )
    if size.carrying and size.used is not None:
        yield _describe_failure(size, need, size.carrying)
    if size.estimate:
        yield (
            "the published rate in tokens/s is divided by the output tokens of this workload, "
            "although its lengths and limits differ; measure with loadgen search before you buy"
        )
    if size.price is not None and need.hours_per_day != HOURS_PER_DAY:
        yield f"the load lasts {need.hours_per_day:g} hours per day"


def _describe_failure(size: SizedSource, need: Need, serving: int) -> str:
    """Return what each machine has to serve after the spare ones have failed, and how to verify it.

    A contract for one machine requires that rate. Close to the capacity, it takes a long load to
    decide whether a machine meets it.
    """
    rate_per_machine = size.demand_per_s / serving
    rate = f"{format.quantity(rate_per_machine)} {size.source.kind}/s per machine"
    contract = "--contract FILE writes a contract for this rate, for loadgen validate"
    is_nearly_full = _utilization_after_loss(size, serving) > NEARLY_FULL
    if is_nearly_full and not size.source.lower_bound:
        contract += "; near the capacity it needs a long load, which --dry-run forecasts"
    return f"{describe_utilization(size, need, serving)} {rate}; {contract}"


def _utilization_after_loss(size: SizedSource, serving: int) -> float:
    """Return the fraction of their capacity that the machines use after the spare ones failed."""
    return size.demand_per_s / serving / size.per_machine.mid


def describe_utilization(size: SizedSource, need: Need, serving: int) -> str:
    """Return the utilization of the machines, after a loss and normally, as a sentence.

    For example: "After losing 1 machine: 83.3 % utilization (55.6 % normally)."
    """
    after_loss = f"{_at_most(size)}{format.percent(_utilization_after_loss(size, serving))}"
    if not need.spare:
        return f"Utilization {after_loss}, without spare machines."
    lost = format.counted(need.spare, "machine")
    normal = _format_utilization(size)
    return f"After losing {lost}: {after_loss} utilization ({normal} normally)."


def _tiles(size: SizedSource, currency: str) -> Iterator[Tile]:
    """Yield the large numbers at the top of the page of a single source."""
    yield Tile("Machines", format.count(size.machines), "", _machine_interval(size))
    yield Tile("Without spare", format.count(size.carrying), "", "machines for the load")
    yield Tile("Utilization", _format_utilization(size), "", "of the capacity of all machines")
    yield Tile("Capacity of a machine", _format_machine_rate(size), "/s", size.source.kind)
    if size.per_month is not None:
        per_thousand = f"{_format_small_amount(size.per_thousand)} per 1,000"
        yield Tile("Per month", _format_whole_amount(size.per_month), currency, per_thousand)


def _machine_bars(sizing: Sizing) -> Iterator[Bar]:
    """Yield a bar with the machines of each source, if several sources have machines."""
    sizes = [size for size in sizing.sizes if size.machines is not None]
    if len(sizes) < 2:
        return
    for size in sizes:
        assert size.machines is not None
        label = _describe_machines(size.machines, size.gpus_per_machine)
        machines = float(size.machines)
        segments = _bar_segments(machines, float(sizing.need.spare))
        yield Bar(size.source.name, label, segments, _whisker(size.low, size.high))


def _cost_bars(sizing: Sizing) -> Iterator[Bar]:
    """Yield a bar with the cost per month of each source that has a price.

    The cost is divided between the serving and the spare machines by their numbers.
    """
    for size in sizing.sizes:
        money = size.per_month
        if money is None:
            continue
        total = float(money.mid)
        spare_cost = 0.0
        if size.machines is not None and size.price is not None:
            spare_cost = total * sizing.need.spare / size.machines
        label = f"{sizing.currency} {_format_whole(total)}"
        yield Bar(
            size.source.name,
            label,
            _bar_segments(total, spare_cost),
            _whisker(money.low, money.high),
        )


def _bar_segments(total: float, spare: float) -> list[tuple[float, float, str, str]]:
    """Return the serving and the spare part of a bar: start, end, color and label of each."""
    serving = total - spare
    return [(0.0, serving, SERVING_COLOR, SERVING), (serving, total, SPARE_COLOR, SPARE)]


def _whisker(low: int | Decimal | None, high: int | Decimal | None) -> tuple[float, float] | None:
    if low is None or high is None:
        return None
    return float(low), float(high)
