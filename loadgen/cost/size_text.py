"""`loadgen size` as text and JSON: the answer first, then the sources side by side, then what each rests on.

Pure: takes values, returns a string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from loadgen.core import format
from loadgen.core.results.manifest import ReasonCode
from loadgen.cost.capacity_planning import needed, one_load
from loadgen.cost.comparison import slo_words
from loadgen.cost.sizing import Money, Need, Size
from loadgen.present import table
from loadgen.pricing.evidence import Evidence, notes
from loadgen.pricing.prices import Price, dated
from loadgen.pricing.reasons import note, texts
from loadgen.search.text import MODEL_ERROR, model_error

Sized = Sequence[tuple[Size, Evidence | None]]


def render_text(sized: Sized, need: Need, *, currency: str, remarks: Sequence[str] = ()) -> str:
    """The whole report, ending in a newline. remarks: on the price file as a whole."""
    lines = [line for size, evidence in sized for line in table.wrapped(_answer(size, evidence, need, currency))]
    lines += ["", *_columns([size for size, _ in sized], currency), ""]
    if len({slo_words(evidence.summary) for _, evidence in sized if evidence is not None}) > 1:
        lines += table.wrapped("! measured under different SLOs, as said below: not like with like")
    for size, evidence in sized:
        for number, words in enumerate(_rests_on(size, evidence, need)):
            lines += table.wrapped(words, "" if number == 0 else "  ", "  " if number == 0 else "    ")
    lines += [line for remark in remarks for line in table.wrapped(remark)]
    return "\n".join(lines) + "\n"


def _answer(size: Size, evidence: Evidence | None, need: Need, currency: str) -> str:
    marks = ("SIMULATED, " if evidence is not None and evidence.simulated else "") + (
        "" if evidence is not None else "AN ESTIMATE from published figures, "
    )
    load = f"{format.quantity(size.demand_per_s)}/s" if need.users is None else format.counted(need.users, "user")
    words = f"{marks}{size.source.name}: {load} of {size.source.workload} need "
    if size.machines is None:
        words += "no machines of yours"
    else:
        most = "at most " if size.source.lower_bound else ""
        spare = f", {need.spare} of them to spare" if need.spare else ", none to spare"
        words += f"{most}{_machines(size.machines, size.gpus_per_machine)}{spare}"
        words += (
            f" ({size.low} to {size.high} by the interval)" if size.low is not None and size.low != size.high else ""
        )
    if size.per_month is not None and size.per_thousand is not None:
        words += (
            f": {currency} {_amount(size.per_month)} a month, {_small(size.per_thousand)} per 1,000 {size.source.kind}"
        )
    return words


def _machines(count: int, gpus: int) -> str:
    return f"{format.counted(count, 'machine')} of {format.counted(gpus, 'GPU')}"


def _columns(sizes: Sequence[Size], currency: str) -> list[str]:
    noun = sizes[0].source.kind
    rows: list[tuple[str, Callable[[Size], str]]] = [
        ("machines, spare ones too", lambda size: format.spanned(size.machines, size.low, size.high, format.count)),
        ("carrying the load", lambda size: format.count(size.carrying)),
        ("GPUs", lambda size: format.count(None if size.machines is None else size.machines * size.gpus_per_machine)),
        ("used of what all carry", lambda size: format.percent(size.used)),
        (f"load, {noun} per second", lambda size: format.quantity(size.demand_per_s)),
        (f"one machine carries, {noun} per second", _rate),
        (
            f"{sizes[0].source.answer} takes",
            lambda size: format.duration(size.response_s) if size.response_s else "-",
        ),
        (f"{currency} per month", lambda size: _amount(size.per_month)),
        (f"{currency} per 1,000 {noun}", lambda size: _small(size.per_thousand)),
    ]
    priced = any(size.price is not None for size in sizes)
    shown = rows if priced else rows[:-2]
    return table.text(["", *(size.source.name for size in sizes)], [[name, *map(cell, sizes)] for name, cell in shown])


def _rate(size: Size) -> str:
    least = "at least " if size.source.lower_bound else ""
    return least + format.spanned(size.per_machine.mid, size.per_machine.low, size.per_machine.high)


def _amount(money: Money | None) -> str:
    return "-" if money is None else format.spanned(money.mid, money.low, money.high, lambda value: f"{value:,.0f}")


def _small(money: Money | None) -> str:
    if money is None:
        return format.NONE
    return format.spanned(money.mid, money.low, money.high, lambda value: format.quantity(float(value)))


def _rests_on(size: Size, evidence: Evidence | None, need: Need) -> Iterator[str]:
    source = size.source
    gpus = format.counted(source.gpus, "GPU")
    at = f"{format.quantity(source.rate.mid)} {source.noun}/s on {gpus}"
    slo = "" if evidence is None else f"; SLO: {slo_words(evidence.summary)}"
    folder = "" if source.folder == source.name else f"; {source.folder}"
    yield f"{source.name}: {source.basis}, {at}{slo}{folder}"
    if need.users is not None and size.response_s:
        yield (
            f"each user waits {format.duration(size.response_s)} for {source.answer} and thinks {need.think_s:g} s: "
            f"{need.users:,} / {size.response_s + need.think_s:.3g} s = {format.quantity(size.demand_per_s)} per second"
        )
    if size.machines is not None and size.gpus_per_machine != source.gpus:
        yield (
            f"rates are scaled from {gpus} to {size.gpus_per_machine}: machines are taken as independent, and a router "
            "in front of them as free"
        )
    if need.spare and size.machines is not None and size.used is not None:
        up = f"with all up they are used to {format.percent(size.used)}"
        yield f"with {need.spare} lost the others carry all of it; {up}"
    if evidence is None:
        yield (
            "published tokens per second over the output tokens of this workload: another mix of lengths and other "
            "limits. Measure before you buy: loadgen search"
        )
    else:
        yield from (f"! {note}" for note in texts(_notes(size, evidence, need)))
    if size.price is not None:
        yield f"price: {size.price.name}, {dated(size.price)}{_paid(size.price, need)}"


def _notes(size: Size, evidence: Evidence, need: Need) -> Iterator[ReasonCode]:
    yield from (*notes(evidence), *one_load(evidence, size.source))
    if evidence.simulated and size.machines is not None:
        least = needed(size.demand_per_s, size.per_machine.mid * (1 - MODEL_ERROR[1])) + need.spare
        yield note("model_error", error=model_error(), slower_percent=MODEL_ERROR[1] * 100, machines=least)


def _paid(price: Price, need: Need) -> str:
    day = "" if need.hours_per_day == 24 else f" The load is there {need.hours_per_day:g} hours a day."
    return (
        f". A month has 730 hours, and machines are paid in all of them.{day}" if hasattr(price, "gpu") else f".{day}"
    )


def render_json(sized: Sized, need: Need, *, currency: str) -> str:
    """The same content as a JSON document, ending in a newline. Amounts are strings of decimal digits."""

    def one(size: Size, evidence: Evidence | None) -> dict[str, Any]:
        codes = [] if evidence is None else list(_notes(size, evidence, need))
        return asdict(size) | {
            "price": None if size.price is None else {"name": size.price.name, "as_of": size.price.as_of},
            "per_thousand": size.per_thousand,
            "simulated": evidence is not None and evidence.simulated,
            "estimate": evidence is None,
            "notes": texts(codes),
            "note_codes": codes,
        }

    document = {"schema": 1, "currency": currency, "need": need, "sizes": [one(*pair) for pair in sized]}
    return format.document(document).decode()
