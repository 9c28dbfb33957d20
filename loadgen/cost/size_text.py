"""What `loadgen size` says: the answer first, then the sources side by side, then what each rests on.

Pure: takes the stored result, returns the report of which text, Markdown and page are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal

from loadgen.core import format
from loadgen.cost.size_result import SizedSource, Sizing
from loadgen.cost.sizing import HOURS_PER_MONTH, Need
from loadgen.cost.text import own_beside_rent
from loadgen.pricing.estimate import Estimate, format_interval
from loadgen.pricing.reasons import texts
from loadgen.render.page import Bar, Number
from loadgen.render.section import (
    Bars,
    Bullets,
    Paragraph,
    Report,
    Section,
    Table,
    Tiles,
    Warned,
    facts,
    section,
    simulated,
)

NEAR_FULL = 0.95  # of its capacity: what is promised there holds by little, and little takes a long load to show
UNLIKE = "measured under different SLOs, as said below: not like with like"


WARNED_FIRST = {
    "slo_missed": "SLO MISSED",
    "slo_missed_at_capacity": "SLO MISSED",
    "overloaded": "NOT SUSTAINED",
    "not_sustained": "NOT KNOWN TO LAST",
}
"""Notes that make a number of machines useless, and the word that they begin with."""


def _warnings_of_run(size: SizedSource) -> Iterator[Warned]:
    """Yield what spoils a number of machines: a missed SLO, or a load that does not last."""
    for code, word in WARNED_FIRST.items():
        for note in size.note_codes:
            if note.code == code:
                yield Warned(word, f"{size.source.name}: {texts([note])[0]}")


def report(found: Sizing) -> Report:
    """The whole answer: the machines that each source takes, the sources side by side, what each rests on."""
    load, sizes = load_words(found.need), found.sizes
    warned = []
    if of := [size.source.name for size in sizes if size.simulated]:
        warned.append(
            simulated(
                f"a model of a server was searched, nothing was measured on hardware: {', '.join(of)}"
            )
        )
    if of := [size.source.name for size in sizes if size.estimate]:
        how = "from published figures: another mix of lengths, other limits, no interval"
        warned.append(Warned("AN ESTIMATE", f"{how}: {', '.join(of)}"))
    for size in sizes:
        warned += _warnings_of_run(size)
    priced = any(size.price is not None and size.price.rented for size in sizes)
    unlike = len({size.slo for size in sizes if size.slo}) > 1
    tiles = Tiles(list(_tiles(sizes[0], found.currency)) if len(sizes) == 1 else ())
    legend = {"carry the load": "c1", "to spare": "c6"}
    bars = Bars(rows=list(_bars(found)), title="Machines", number=_whole, legend=legend)
    paid = Bars(
        rows=list(_paid_bars(found)),
        title=f"{found.currency} a month",
        low=0.0,
        number=_whole,
        legend=legend,
    )
    owned = [size.source.name for size in sizes if size.price is not None and size.price.owned]
    rented = [size.source.name for size in sizes if size.price is not None and not size.price.owned]
    return Report(
        title=f"{found.workload} · {load}",
        tab=f"{found.workload}: machines for {load}",
        made_by=f"loadgen {found.version} report of a size",
        warned=warned,
        answer=[
            Paragraph(f"{answer(size, found.need, found.currency)}.", large=True) for size in sizes
        ],
        sections=[
            section("", tiles, Paragraph(f"Beware: {UNLIKE}." if unlike else "", "warn")),
            section(
                "The sources side by side" if len(sizes) > 1 else "Figures",
                bars if bars.rows else "",
                paid if paid.rows else "",
                _columns(found),
                Paragraph(own_beside_rent(owned, rented), "warn"),
            ),
            section("What it rests on", Paragraph(_HOURS if priced else "", "soft")),
            *(_rests_on(size, found.need) for size in sizes),
            section("Remarks", Bullets(found.remarks)),
        ],
    )


def headline(found: Sizing) -> str:
    """The answer of the first source in one sentence, and how many others there are."""
    others = format.counted(len(found.sizes) - 1, "other source")
    more = f"; {others} beside it" if len(found.sizes) > 1 else ""
    first = found.sizes[0]
    marks = (
        "SIMULATED, " * first.simulated + "AN ESTIMATE from published figures, " * first.estimate
    )
    return f"{marks}{answer(first, found.need, found.currency)}{more}."


def load_words(need: Need) -> str:
    """What is to be carried: "5,000 users", "50/s"."""
    return (
        f"{format.quantity(need.rate_per_s)}/s"
        if need.users is None
        else format.counted(need.users, "user")
    )


def word(found: Sizing) -> str:
    """The outcome in a few words: the machines of each source."""
    return f"machines: {', '.join(map(_count, found.sizes))}"


def _count(size: SizedSource) -> str:
    if size.machines is None:
        return "none of yours"
    return f"{'at most ' if size.source.lower_bound else ''}{size.machines:,}"


def answer(size: SizedSource, need: Need, currency: str) -> str:
    """What a source takes, in one sentence without its full stop."""
    load = f"{format.quantity(size.demand_per_s)}/s" if need.users is None else load_words(need)
    words = f"{size.source.name}: {load} of {size.source.workload} need "
    if size.machines is None:
        words += "no machines of yours"
    else:
        most = "at most " if size.source.lower_bound else ""
        spare = f", {need.spare} of them to spare" if need.spare else ", none to spare"
        words += f"{most}{_machines(size.machines, size.gpus_per_machine)}{spare}"
        words += (
            f" ({size.low} to {size.high} by the interval)"
            if size.low is not None and size.low != size.high
            else ""
        )
    if size.per_month is not None and size.per_thousand is not None:
        words += f": {currency} {_amount(size.per_month)} a month, {_small(size.per_thousand)} per 1,000 {size.source.kind}"
    return words


def _machines(count: int, gpus: int) -> str:
    return f"{format.counted(count, 'machine')} of {format.counted(gpus, 'GPU')}"


def _columns(found: Sizing) -> Table:
    """A column for each source."""
    sizes, need, currency = found.sizes, found.need, found.currency
    noun = sizes[0].source.kind
    rows: list[tuple[str, Callable[[SizedSource], str]]] = [
        (
            "machines, spare ones too",
            lambda size: format_interval(size.machines, size.low, size.high, format.count),
        ),
        ("of them for the load itself", lambda size: format.count(size.carrying)),
        *_racks(need),
        (
            "GPUs",
            lambda size: format.count(
                None if size.machines is None else size.machines * size.gpus_per_machine
            ),
        ),
        ("share of their capacity in use", _used),
        (f"{noun}/s to serve", lambda size: format.quantity(size.demand_per_s)),
        (f"{noun}/s that one machine serves", _rate),
        (
            f"{sizes[0].source.answer} takes",
            lambda size: format.duration(size.response_s) if size.response_s else "-",
        ),
        ("GPU-hours paid a month", lambda size: format.count(_hours(size))),
        (f"{currency} per month", lambda size: _amount(size.per_month)),
        (f"{currency} per 1,000 {noun}", lambda size: _small(size.per_thousand)),
    ]
    priced = any(size.price is not None for size in sizes)
    shown = rows if priced else rows[:-3]
    head, cells = (
        ("", *(size.source.name for size in sizes)),
        [(name, *map(cell, sizes)) for name, cell in shown],
    )
    return Table(head, cells, split=True)


def _racks(need: Need) -> Iterator[tuple[str, Callable[[SizedSource], str]]]:
    if (each := need.machines_per_rack) is not None:
        yield (
            f"racks of {format.counted(each, 'machine')}",
            lambda size: format.count(
                None if size.machines is None else math.ceil(size.machines / each)
            ),
        )


def _used(size: SizedSource) -> str:
    return "at most " * (size.source.lower_bound and size.used is not None) + format.percent(
        size.used
    )


def _rate(size: SizedSource) -> str:
    least = "at least " if size.source.lower_bound else ""
    return least + format_interval(
        size.per_machine.mid, size.per_machine.low, size.per_machine.high
    )


def _amount(money: Estimate[Decimal] | None) -> str:
    return (
        "-"
        if money is None
        else format_interval(money.mid, money.low, money.high, lambda value: f"{value:,.0f}")
    )


def _small(money: Estimate[Decimal] | None) -> str:
    if money is None:
        return format.NONE
    return format_interval(
        money.mid, money.low, money.high, lambda value: format.quantity(float(value))
    )


def _rests_on(size: SizedSource, need: Need) -> Section:
    """What was measured, how users become a rate, the price, and what speaks against the figure."""
    source = size.source
    gpus = format.counted(source.gpus, "GPU")
    at = f"{format.quantity(source.rate.mid)} {source.noun}/s on {gpus}"
    known = facts(
        Measured=f"{at}, {source.basis}",
        SLO=size.slo,
        Evidence=source.folder,
        Price="" if size.price is None else f"{size.price.name}, {size.price.dated}",
    )
    against = Bullets((), "warn") if size.estimate else Bullets(size.notes, "warn")
    return section(
        source.name, known, Bullets(list(_assumed(size, need, gpus))), against, small=True
    )


def _assumed(size: SizedSource, need: Need, gpus: str) -> Iterator[str]:
    source = size.source
    if need.users is not None and size.response_s:
        yield (
            f"each user waits {format.duration(size.response_s)} for {source.answer} and thinks {need.think_s:g} s: "
            f"{need.users:,} / {size.response_s + need.think_s:.3g} s = {format.quantity(size.demand_per_s)} per second"
        )
    if size.machines is not None and size.gpus_per_machine != source.gpus:
        yield (
            f"rates are scaled from {gpus} to {size.gpus_per_machine}: machines are taken as independent, and a router "
            "in front of them as free; so is the interval, since what one measurement has wrong it has wrong of all"
        )
    if size.carrying and size.used is not None:
        each = size.demand_per_s / size.carrying
        full = each / size.per_machine.mid
        most = "at most " * source.lower_bound
        share = f"{format.quantity(each)} {source.kind}/s each, {most}{format.percent(full)} of their capacity"
        prove = f"{share}; that is the rate to ask for in a contract: --contract FILE writes one for loadgen validate"
        if full > NEAR_FULL and not source.lower_bound:
            prove += ", and --dry-run says what load decides it: so near to what they carry it takes long"
        lost = (
            f"with {need.spare} lost the others still serve all of it, "
            if need.spare
            else "they serve "
        )
        up = f"with none lost {_used(size)}"
        yield f"{lost}{prove}" + (f"; {up}" if need.spare else "")
    if size.estimate:
        yield (
            "published tokens per second over the output tokens of this workload: another mix of lengths and other "
            "limits. Measure before you buy: loadgen search"
        )
    if size.price is not None and need.hours_per_day != 24:
        yield f"the load is there {need.hours_per_day:g} hours a day"


_HOURS = f"A month has {HOURS_PER_MONTH} hours, and machines are paid in all of them."


def _hours(size: SizedSource) -> int | None:
    """The GPU-hours of a month that are paid, used or not; None where nothing is paid by the hour."""
    if size.price is None or not size.price.rented or size.machines is None:
        return None
    return size.machines * size.gpus_per_machine * int(HOURS_PER_MONTH)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _paid_bars(found: Sizing) -> Iterator[Bar]:
    """What each source costs a month, and what of it the spare machines cost."""
    for size in found.sizes:
        if size.per_month is None:
            continue
        whole, count = float(size.per_month.mid), size.machines
        spare = 0.0 if count is None or size.price is None else whole * found.need.spare / count
        parts = [
            (0.0, whole - spare, "c1", "carry the load"),
            (whole - spare, whole, "c6", "to spare"),
        ]
        low, high = size.per_month.low, size.per_month.high
        ends = None if low is None or high is None else (float(low), float(high))
        yield Bar(size.source.name, f"{found.currency} {_whole(whole)}", parts, ends)


def _tiles(size: SizedSource, currency: str) -> Iterator[Number]:
    interval = (
        ""
        if size.low is None or size.low == size.high
        else f"{size.low} to {size.high} by the interval"
    )
    yield Number("Machines", format.count(size.machines), "", interval)
    yield Number("For the load itself", format.count(size.carrying), "", "without the spare ones")
    yield Number("In use", _used(size), "", "of the capacity of all machines")
    yield Number("One machine serves", _rate(size), "/s", size.source.kind)
    if size.per_month is not None:
        yield Number(
            "A month", _amount(size.per_month), currency, f"{_small(size.per_thousand)} per 1,000"
        )


def _bars(found: Sizing) -> Iterator[Bar]:
    """The machines of each source, where several have some; the whisker is what the interval of the rate gives."""
    counted = [(size, size.machines) for size in found.sizes if size.machines is not None]
    for size, machines in counted if len(counted) > 1 else ():
        ends = (
            None if size.low is None or size.high is None else (float(size.low), float(size.high))
        )
        carrying = float(machines - found.need.spare)
        parts = [
            (0.0, carrying, "c1", "carry the load"),
            (carrying, float(machines), "c6", "to spare"),
        ]
        yield Bar(size.source.name, _machines(machines, size.gpus_per_machine), parts, ends)
