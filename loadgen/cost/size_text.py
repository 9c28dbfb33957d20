"""Renders the result of `loadgen size`: the answer, the sources side by side, the assumptions.

Pure: takes the stored result and returns the report that text, Markdown and page are made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.results.manifest import ReasonCode
from loadgen.cost.cost_text import compare_owned_and_rented
from loadgen.cost.size_result import SizedSource, Sizing
from loadgen.cost.sizing import HOURS_PER_DAY, HOURS_PER_MONTH, Demand
from loadgen.pricing.estimate import Estimate, describe_interval, format_interval
from loadgen.pricing.reasons import render_notes
from loadgen.render.page import Bar, Tile
from loadgen.render.section import (
    Bars,
    Bullets,
    Facts,
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
BRACKETS = "[95 % CI]"
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


def create_report(sizing: Sizing) -> Report:
    """Return the report of a result of `loadgen size`.

    It starts with one sentence for each source: how many machines it needs and what they cost. The
    sections below say how the sources compare and which assumptions the numbers depend on.
    """
    demand = describe_demand(sizing.demand)
    headline = [
        Paragraph(
            f"{describe_machines_and_cost(size, sizing.demand, sizing.currency)}.", large=True
        )
        for size in sizing.sizes
    ]

    return Report(
        title=f"{sizing.workload} · {demand}",
        page_title=f"{sizing.workload}: machines for {demand}",
        generated_by=f"loadgen {sizing.version} report of a size",
        notices=list(_list_warnings(sizing.sizes)),
        headline=headline,
        sections=[
            _build_tiles_section(sizing),
            _build_comparison_section(sizing),
            _build_assumptions_heading(sizing),
            *(_build_source_section(size, sizing.demand) for size in sizing.sizes),
            section("Remarks", Bullets(sizing.remarks)),
        ],
        brief=list(_build_brief_sections(sizing)),
    )


def _build_brief_sections(sizing: Sizing) -> Iterator[Section]:
    """Yield what a terminal prints by default, in at most 8 lines for a single source.

    A single source has its answer as a sentence. Several sources have a table, in which their
    machines and costs are easier to compare.
    """
    if len(sizing.sizes) == 1:
        (size,) = sizing.sizes
        answer = describe_machines_and_cost(size, sizing.demand, sizing.currency)
        yield section("", Paragraph(f"{answer}."))
        yield section("", Facts(list(_list_brief_facts(size, sizing.demand))), indented=True)
        return

    title = f"{describe_demand(sizing.demand)} of {sizing.sizes[0].source.workload} need:"
    yield section("", Paragraph(title))
    brief_rows = [row for row in _list_shown_rows(sizing) if row.is_brief]
    yield section("", _build_source_table(sizing, brief_rows), indented=True)
    warning = _warn_of_different_slos(sizing)
    cheapest = "" if warning else _describe_cheapest(sizing)
    yield section("", Paragraph(warning, "warn"), Paragraph(cheapest))


def _list_brief_facts(size: SizedSource, demand: Demand) -> Iterator[tuple[str, str]]:
    """Yield the utilization, the capacity, the demand, the SLO and the model error of a source.

    Each is a label and a text. The SLO is that of the measurement, and only the capacity of a
    simulated server has a model error.
    """
    if size.serving_machines is not None:
        utilization = _format_utilization(size)
        if demand.spare_machines:
            after_loss = _compute_utilization_after_loss(size, size.serving_machines)
            lost = format.counted(demand.spare_machines, "machine")
            utilization += (
                f", {_get_at_most_prefix(size)}{format.percent(after_loss)} after losing {lost}"
            )

        yield "Utilization", utilization

    yield "Per machine", _describe_machine_rate(size)
    yield "Demand", _describe_demand_rate(size, demand)
    if size.slo:
        yield "SLO", size.slo

    for note in size.note_codes:
        if note.code == "model_error":
            yield "Model error", _describe_model_error(note)


def _describe_machine_rate(size: SizedSource) -> str:
    """Return the capacity of a machine, such as "113 (95 % CI 112 to 117) requests/s"."""
    rate = size.machine_rate
    prefix = "at least " if size.source.is_lower_bound else ""
    text = describe_interval(rate.mid, rate.low, rate.high)
    return f"{prefix}{text} {size.source.interaction_noun}/s at capacity"


def _describe_demand_rate(size: SizedSource, demand: Demand) -> str:
    """Return the demand as a rate, and how it follows from the number of users.

    For example "102 requests/s: 5,000 users / (19.1 s latency + 30 s think time)".
    """
    rate = f"{format.quantity(size.demand_per_s)} {size.source.interaction_noun}/s"
    if demand.users is None or not size.response_s:
        return rate
    cycle = f"{format.duration(size.response_s)} latency + {demand.think_s:g} s think time"
    return f"{rate}: {format.counted(demand.users, 'user')} / ({cycle})"


def _describe_model_error(note: ReasonCode) -> str:
    """Return the error of the performance model, and the machines that it may require."""
    slower = f"{note.values['slower_percent']:g} %"
    machines = format.counted(note.values["machines"], "machine")
    return f"{note.values['error']}, not in the interval; {machines} if each is {slower} slower"


def _describe_cheapest(sizing: Sizing) -> str:
    """Return a sentence on the cheapest of at least two sources, or "" if it is not known.

    For example "Cheapest: owned, 20 % less per month than rented." Only the second cheapest source
    is named, because it is the best alternative.
    """
    monthly_costs = {
        size.source.name: float(size.cost_per_month.mid)
        for size in sizing.sizes
        if size.cost_per_month is not None
    }
    has_every_cost = len(monthly_costs) == len(sizing.sizes)
    if not has_every_cost:
        # A source without a cost might be the cheapest one.
        return ""

    names_by_cost = sorted(monthly_costs, key=lambda name: monthly_costs[name])
    cheapest, second_cheapest = names_by_cost[:2]
    if monthly_costs[second_cheapest] == 0:
        # Both cost nothing, so there is no saving.
        return ""

    saved_fraction = 1 - monthly_costs[cheapest] / monthly_costs[second_cheapest]
    return (
        f"Cheapest: {cheapest}, {format.percent(saved_fraction)} less per month than "
        f"{second_cheapest}."
    )


def create_headline(sizing: Sizing) -> str:
    """Return one sentence for the list of results: machines and cost of the first source.

    It starts with "SIMULATED" or "ESTIMATE" if no real server was measured, and ends with the
    number of other sources.
    """
    first = sizing.sizes[0]
    origin_prefix = ""
    if first.is_simulated:
        origin_prefix += "SIMULATED, "

    if first.is_published:
        origin_prefix += "ESTIMATE from published rates, "

    other_sources = ""
    if len(sizing.sizes) > 1:
        other_sources = f"; {format.counted(len(sizing.sizes) - 1, 'other source')}"

    result = describe_machines_and_cost(first, sizing.demand, sizing.currency)
    return f"{origin_prefix}{result}{other_sources}."


def describe_demand(demand: Demand) -> str:
    """Return the demand as text, such as "5,000 users" or "50/s"."""
    if demand.users is None:
        return f"{format.quantity(demand.rate_per_s)}/s"
    return format.counted(demand.users, "user")


def describe_outcome(sizing: Sizing) -> str:
    """Return the number of machines of each source, in a few words, for the list of results."""
    counts = []
    for size in sizing.sizes:
        if size.machines is None:
            counts.append("none (price per token)")
        else:
            counts.append(f"{_get_at_most_prefix(size)}{size.machines:,}")
    return f"machines: {', '.join(counts)}"


def describe_machines_and_cost(size: SizedSource, demand: Demand, currency: str) -> str:
    """Return how many machines a source needs and what they cost, as a sentence without full stop.

    For example: "sim:gb300-vm: 12 machines (11 + 1 spare, 48 GPUs) serve 5,000 users of rag: USD
    122,640 per month, 0.92 per 1,000 requests". A source with a price per token has no machines.
    """
    if size.machines is None:
        subject_and_verb = "a price per token can serve"
    else:
        verb = "serves" if size.machines == 1 else "serve"
        subject_and_verb = f"{_describe_machine_count(size, demand, size.machines)} {verb}"

    cost = ""
    if size.cost_per_month is not None and size.cost_per_thousand is not None:
        per_month = _describe_amount(size.cost_per_month, _format_whole)
        per_thousand = _describe_amount(size.cost_per_thousand, _format_small)
        noun = size.source.interaction_noun
        cost = f": {currency} {per_month} per month, {per_thousand} per 1,000 {noun}"

    source = size.source
    return f"{source.name}: {subject_and_verb} {describe_demand(demand)} of {source.workload}{cost}"


def _describe_machine_count(size: SizedSource, demand: Demand, machines: int) -> str:
    """Return the machines with the spare ones, their GPUs and the interval, as text.

    For example "12 machines (11 + 1 spare, 48 GPUs)".
    """
    details = []
    if demand.spare_machines and size.serving_machines is not None:
        details.append(f"{size.serving_machines:,} + {demand.spare_machines:,} spare")

    details.append(format.counted(machines * size.gpus_per_machine, "GPU"))
    interval = _format_machine_interval(size)
    if interval:
        details.append(interval)

    count = format.counted(machines, "machine")
    return f"{_get_at_most_prefix(size)}{count} ({', '.join(details)})"


def _format_machine_interval(size: SizedSource) -> str:
    """Return the numbers of machines at the ends of the interval of the rate, if they differ."""
    if size.machines_low is None or size.machines_low == size.machines_high:
        return ""
    return f"95 % CI {size.machines_low} to {size.machines_high}"


def _describe_machine_type(count: int, gpus: int) -> str:
    """Return machines and the GPUs of each as text, such as "12 machines of 4 GPUs"."""
    return f"{format.counted(count, 'machine')} of {format.counted(gpus, 'GPU')}"


def _get_at_most_prefix(size: SizedSource) -> str:
    """Return "at most " if the capacity, and so the number of machines, is only bounded."""
    return "at most " if size.source.is_lower_bound else ""


def _list_warnings(sizes: Sequence[SizedSource]) -> Iterator[Notice]:
    """Yield the warnings to show before the numbers of machines.

    They name the sources that were simulated or published instead of measured, and those whose load
    missed its SLO or cannot be sustained.
    """
    simulated_names = [size.source.name for size in sizes if size.is_simulated]
    if simulated_names:
        yield simulated_notice(
            "Results come from a performance model, not from real hardware: "
            f"{', '.join(simulated_names)}."
        )

    published_names = [size.source.name for size in sizes if size.is_published]
    if published_names:
        yield Notice(
            "ESTIMATE",
            "Computed from published rates of another workload and other limits, without a "
            f"confidence interval: {', '.join(published_names)}.",
        )

    for size in sizes:
        yield from _list_source_warnings(size)


def _list_source_warnings(size: SizedSource) -> Iterator[Notice]:
    """Yield a warning for each note that makes the number of machines of a source useless.

    Such notes are those of `HEADINGS_OF_SERIOUS_NOTES`, and they come in its order, the worst
    first.
    """
    for code, heading in HEADINGS_OF_SERIOUS_NOTES.items():
        for note in size.note_codes:
            if note.code == code:
                (sentence,) = render_notes([note])
                yield Notice(heading, f"{size.source.name}: {sentence}")


def _build_tiles_section(sizing: Sizing) -> Section:
    """Return the section below the headline, with the main numbers as tiles.

    Only a single source has tiles, because several are compared in a table. Sources that were
    measured under different SLOs are not comparable, so there is a warning.
    """
    tiles: list[Tile] = []
    if len(sizing.sizes) == 1:
        tiles = list(_build_tiles(sizing.sizes[0], sizing.currency))
    return section("", Tiles(tiles), Paragraph(_warn_of_different_slos(sizing), "warn"))


def _warn_of_different_slos(sizing: Sizing) -> str:
    """Return a warning if the sources were measured under different SLOs, otherwise ""."""
    slos = {size.slo for size in sizing.sizes if size.slo}
    return DIFFERENT_SLOS if len(slos) > 1 else ""


def _build_comparison_section(sizing: Sizing) -> Section:
    """Return the section that compares all sources, with bars on the page and a table.

    If some machines are owned and others are rented, a warning says that their costs are not
    directly comparable.
    """
    machine_bars = Bars(
        rows=_build_machine_bars(sizing),
        title="Machines",
        format_value=_format_whole,
        legend=LEGEND,
    )

    cost_bars = Bars(
        rows=list(_build_cost_bars(sizing)),
        title=f"{sizing.currency} per month",
        included_value=0.0,
        format_value=_format_whole,
        legend=LEGEND,
    )
    owned: list[str] = []

    rented: list[str] = []
    for size in sizing.sizes:
        if size.price is not None:
            names_of_kind = owned if size.price.is_owned else rented
            names_of_kind.append(size.source.name)

    return section(
        "Comparison of the sources" if len(sizing.sizes) > 1 else "Metrics",
        machine_bars if machine_bars.rows else "",
        cost_bars if cost_bars.rows else "",
        _build_source_table(sizing, _list_shown_rows(sizing)),
        Paragraph(compare_owned_and_rented(owned, rented), "warn"),
    )


def _build_assumptions_heading(sizing: Sizing) -> Section:
    """Return the heading of the assumptions, with the one that all machines share."""
    is_paid_by_hour = any(size.price is not None and size.price.is_hourly for size in sizing.sizes)
    return section("Assumptions", Paragraph(HOURS_PAID if is_paid_by_hour else "", "soft"))


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


def _list_shown_rows(sizing: Sizing) -> list[_Row]:
    """Return the rows of the table of sources, without those about money if there are no prices."""
    has_prices = any(size.price is not None for size in sizing.sizes)
    return [row for row in _list_rows(sizing) if has_prices or not row.is_about_money]


def _build_source_table(sizing: Sizing, rows: Sequence[_Row]) -> Table:
    """Return a table with a column for each source.

    Its heading explains the brackets of intervals, if there are any.
    """
    cells = [(row.name, *map(row.text_of, sizing.sizes)) for row in rows]
    has_intervals = any("[" in text for _name, *texts in cells for text in texts)
    return Table(
        (BRACKETS if has_intervals else "", *(size.source.name for size in sizing.sizes)),
        cells,
        wrap_columns=True,
    )


def _list_rows(sizing: Sizing) -> Iterator[_Row]:
    """Yield every row that the table of sources can have, in the order of the table.

    Each row has a function that returns its text for one source, which is the column.

    All sources are sized for one workload, so the first source says for all of them what an
    interaction is, such as "requests" or "conversations".
    """
    first_source = sizing.sizes[0].source
    noun = first_source.interaction_noun
    currency = sizing.currency
    yield _Row(
        "Machines incl. spare",
        lambda size: format_interval(
            size.machines, size.machines_low, size.machines_high, format.count
        ),
        is_brief=True,
    )
    yield _Row("Machines without spare", lambda size: format.count(size.serving_machines))

    machines_per_rack = sizing.demand.machines_per_rack
    if machines_per_rack is not None:
        yield _Row(
            f"Racks of {format.counted(machines_per_rack, 'machine')}",
            lambda size: format.count(_count_racks(size, machines_per_rack)),
        )

    yield _Row("GPUs", lambda size: format.count(_count_gpus(size)), is_brief=True)
    yield _Row("Utilization", _format_utilization, is_brief=True)
    yield _Row(f"Demand, {noun}/s", lambda size: format.quantity(size.demand_per_s))
    yield _Row(f"Capacity of a machine, {noun}/s", _format_machine_rate, is_brief=True)
    yield _Row(f"Mean latency of {first_source.response_noun}", _format_response_time)
    yield _Row(
        "GPU-hours per month",
        lambda size: format.count(_count_gpu_hours_per_month(size)),
        is_about_money=True,
    )

    yield _Row(
        f"{currency} per month",
        lambda size: _format_whole_amount(size.cost_per_month),
        is_about_money=True,
        is_brief=True,
    )

    yield _Row(
        f"{currency} per 1,000 {noun}",
        lambda size: _format_small_amount(size.cost_per_thousand),
        is_about_money=True,
        is_brief=True,
    )


def _count_racks(size: SizedSource, machines_per_rack: int) -> int | None:
    """Return the racks that all machines fill or begin, or None for a price per token."""
    if size.machines is None:
        return None
    return math.ceil(size.machines / machines_per_rack)


def _count_gpus(size: SizedSource) -> int | None:
    """Return the GPUs of all machines, or None for a price per token."""
    if size.machines is None:
        return None
    return size.machines * size.gpus_per_machine


def _count_gpu_hours_per_month(size: SizedSource) -> int | None:
    """Return the GPU-hours that are paid, or None if nothing is paid by the hour."""
    gpus = _count_gpus(size)
    if size.price is None or not size.price.is_hourly or gpus is None:
        return None
    return gpus * int(HOURS_PER_MONTH)


def _format_utilization(size: SizedSource) -> str:
    """Return the demand in percent of the capacity of all machines, spare ones included."""
    prefix = "" if size.utilization is None else _get_at_most_prefix(size)
    return prefix + format.percent(size.utilization)


def _format_machine_rate(size: SizedSource) -> str:
    """Return the interactions per second that one machine can serve, with their interval."""
    rate = size.machine_rate
    prefix = "at least " if size.source.is_lower_bound else ""
    return prefix + format_interval(rate.mid, rate.low, rate.high)


def _format_response_time(size: SizedSource) -> str:
    """Return the mean time of an interaction, or "-" if it is not known, for which 0 stands."""
    return format.duration(size.response_s) if size.response_s else format.NONE


def _format_whole_amount(amount: Estimate[Decimal] | None) -> str:
    """Return a large amount of money with its interval, in whole units of the currency."""
    if amount is None:
        return format.NONE
    return format_interval(amount.mid, amount.low, amount.high, _format_whole)


def _format_small_amount(amount: Estimate[Decimal] | None) -> str:
    """Return a small amount of money with its interval, in significant digits."""
    if amount is None:
        return format.NONE
    return format_interval(amount.mid, amount.low, amount.high, _format_small)


def _describe_amount(amount: Estimate[Decimal], format_number: Callable[[Decimal], str]) -> str:
    """Return an amount of money with its interval for a sentence."""
    return describe_interval(amount.mid, amount.low, amount.high, format_number)


def _format_small(value: Decimal) -> str:
    """Return a small number in significant digits."""
    return format.quantity(float(value))


def _format_whole(value: float | Decimal) -> str:
    """Return a number without decimals and with thousands separators."""
    return f"{value:,.0f}"


def _build_source_section(size: SizedSource, demand: Demand) -> Section:
    """Return the section on one source: measurement, price, assumptions and caveats.

    The notes on a published rate are left out, because a warning above says that it is an estimate.
    """
    source = size.source
    gpus = format.counted(source.gpus, "GPU")
    rate = f"{format.quantity(source.rate.mid)} {source.unit}/s on {gpus}"
    price = "" if size.price is None else f"{size.price.name}, {size.price.description}"
    facts = named_facts(
        Measured=f"{rate}, {source.basis}",
        SLO=size.slo,
        Evidence=source.folder,
        Price=price,
    )
    assumptions = Bullets(list(_list_assumptions(size, demand)))
    caveats = Bullets(() if size.is_published else size.notes, "warn")

    return section(source.name, facts, assumptions, caveats, is_subsection=True)


def _list_assumptions(size: SizedSource, demand: Demand) -> Iterator[str]:
    """Yield a sentence for each assumption behind the number of machines of a source.

    They let a reader recompute the number: the demand of the users, the scaling from the measured
    to the rented machines, and the load of each machine after the spare ones have failed.
    """
    source = size.source
    if demand.users is not None and size.response_s:
        # The time from one request of a user to the next.
        cycle_s = size.response_s + demand.think_s
        yield (
            f"each user waits {format.duration(size.response_s)} for {source.response_noun} and "
            f"then thinks for {demand.think_s:g} s: {demand.users:,} users / "
            f"{cycle_s:.3g} s = {format.quantity(size.demand_per_s)}/s"
        )

    is_rate_scaled = size.machines is not None and size.gpus_per_machine != source.gpus
    if is_rate_scaled:
        yield (
            f"the rate is scaled from {format.counted(source.gpus, 'GPU')} to "
            f"{size.gpus_per_machine}, assuming independent machines and a router without cost; "
            "the interval is scaled too, because all machines share the error of one measurement"
        )

    if size.serving_machines is not None:
        yield _describe_load_after_failure(size, demand, size.serving_machines)

    if size.is_published:
        yield (
            "the published rate in tokens/s is divided by the output tokens of this workload, "
            "although its lengths and limits differ; measure with loadgen search before you buy"
        )

    has_idle_hours = demand.hours_per_day != HOURS_PER_DAY
    if size.price is not None and has_idle_hours:
        yield f"the load lasts {demand.hours_per_day:g} hours per day"


def _describe_load_after_failure(size: SizedSource, demand: Demand, serving_machines: int) -> str:
    """Return a sentence on the load of each machine after the spare machines have failed.

    It also says how to verify on one machine that it serves this load: with a contract, which is a
    file that `loadgen validate` checks. A load close to the capacity has to last long until it is
    clear whether a machine sustains it.
    """
    rate_per_machine = size.demand_per_s / serving_machines
    rate_text = f"{format.quantity(rate_per_machine)} {size.source.interaction_noun}/s per machine"
    hint = "--contract FILE writes a contract for this rate, for loadgen validate"
    is_nearly_full = _compute_utilization_after_loss(size, serving_machines) > NEARLY_FULL
    if is_nearly_full and not size.source.is_lower_bound:
        hint += "; near the capacity it needs a long load, which --dry-run forecasts"
    return f"{describe_utilization(size, demand, serving_machines)} {rate_text}; {hint}"


def _compute_utilization_after_loss(size: SizedSource, serving_machines: int) -> float:
    """Return the fraction of their capacity that the machines use after the spare ones failed."""
    return size.demand_per_s / serving_machines / size.machine_rate.mid


def describe_utilization(size: SizedSource, demand: Demand, serving_machines: int) -> str:
    """Return the utilization of the machines, after a loss and normally, as a sentence.

    For example: "After losing 1 machine: 83.3 % utilization (55.6 % normally)."
    """
    fraction_after_loss = _compute_utilization_after_loss(size, serving_machines)
    after_loss = f"{_get_at_most_prefix(size)}{format.percent(fraction_after_loss)}"
    if not demand.spare_machines:
        return f"Utilization {after_loss}, without spare machines."
    lost = format.counted(demand.spare_machines, "machine")
    normal = _format_utilization(size)
    return f"After losing {lost}: {after_loss} utilization ({normal} normally)."


def _build_tiles(size: SizedSource, currency: str) -> Iterator[Tile]:
    """Yield the large numbers at the top of the page of a single source."""
    yield Tile("Machines", format.count(size.machines), "", _format_machine_interval(size))
    yield Tile("Without spare", format.count(size.serving_machines), "", "machines for the load")
    yield Tile("Utilization", _format_utilization(size), "", "of the capacity of all machines")
    yield Tile(
        "Capacity of a machine", _format_machine_rate(size), "/s", size.source.interaction_noun
    )

    if size.cost_per_month is not None:
        per_thousand = f"{_format_small_amount(size.cost_per_thousand)} per 1,000"
        yield Tile("Per month", _format_whole_amount(size.cost_per_month), currency, per_thousand)


def _build_machine_bars(sizing: Sizing) -> list[Bar]:
    """Return a bar with the machines of each source that has machines.

    The spare machines are a segment of another color. A single bar compares nothing, so the list is
    empty then.
    """
    bars = []
    for size in sizing.sizes:
        if size.machines is None:
            continue
        label = _describe_machine_type(size.machines, size.gpus_per_machine)
        segments = _build_bar_segments(float(size.machines), float(sizing.demand.spare_machines))
        whisker = _build_whisker(size.machines_low, size.machines_high)
        bars.append(Bar(size.source.name, label, segments, whisker))

    return bars if len(bars) > 1 else []


def _build_cost_bars(sizing: Sizing) -> Iterator[Bar]:
    """Yield a bar with the cost per month of each source that has a price.

    The bar has two segments, for the serving and the spare machines. The cost is divided between
    them in proportion to their numbers.
    """
    for size in sizing.sizes:
        cost = size.cost_per_month
        if cost is None:
            continue

        total = float(cost.mid)
        spare_cost = 0.0
        if size.machines is not None and size.price is not None:
            spare_cost = total * sizing.demand.spare_machines / size.machines

        label = f"{sizing.currency} {_format_whole(total)}"
        yield Bar(
            size.source.name,
            label,
            _build_bar_segments(total, spare_cost),
            _build_whisker(cost.low, cost.high),
        )


def _build_bar_segments(total: float, spare: float) -> list[tuple[float, float, str, str]]:
    """Return the serving and the spare part of a bar: start, end, color and label of each."""
    serving = total - spare
    return [(0.0, serving, SERVING_COLOR, SERVING), (serving, total, SPARE_COLOR, SPARE)]


def _build_whisker(
    low: int | Decimal | None, high: int | Decimal | None
) -> tuple[float, float] | None:
    """Return the ends of the interval line of a bar, or None without an interval."""
    if low is None or high is None:
        return None
    return float(low), float(high)
