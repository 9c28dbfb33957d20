"""The result of `loadgen size` as it is stored: the content of `size.json`, made of what was sized. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

import msgspec
from msgspec.structs import fields

from loadgen.core import format
from loadgen.core.limits import MODEL_ERROR
from loadgen.core.results.manifest import ReasonCode, decoded
from loadgen.cost.capacity_planning import MeasuredRate, needed, one_load
from loadgen.cost.comparison import slo_words
from loadgen.cost.sizing import Need, Size
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.evidence import Evidence, evidence_notes
from loadgen.pricing.prices import Owned, describe_price
from loadgen.pricing.reasons import note, texts

SCHEMA = 1
FILE = "size.json"


class PriceUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a source. `dated`: its commitment, date and source in words; `rented`: it is paid by the hour.

    `owned`: that hour is a purchase spread over years, with what the price file adds to it.
    """

    name: str
    as_of: str
    dated: str = ""
    rented: bool = False
    owned: bool = False


class SizedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A `Size` as it is stored, with what it rests on. `slo`: that of its run in words, "" where there is no run."""

    source: MeasuredRate
    price: PriceUsed | None
    gpus_per_machine: int
    per_machine: Estimate[float]
    demand_per_s: float
    response_s: float | None
    carrying: int | None
    machines: int | None
    low: int | None
    high: int | None
    used: float | None
    per_month: Estimate[Decimal] | None
    interactions_per_month: Decimal
    per_thousand: Estimate[Decimal] | None
    simulated: bool
    estimate: bool  # of published figures: nothing was measured
    notes: tuple[str, ...] = ()
    note_codes: tuple[ReasonCode, ...] = ()
    slo: str = ""


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `size.json`: machines for a need from each source; amounts are strings of decimal digits.

    `remarks`: on the price file as a whole.
    """

    schema: int = SCHEMA
    currency: str
    need: Need
    sizes: tuple[SizedSource, ...]
    workload: str = ""
    remarks: tuple[str, ...] = ()
    version: str = ""  # of loadgen
    made: str  # when, ISO 8601 in UTC


def sizing(
    sized: Sequence[tuple[Size, Evidence | None]],
    need: Need,
    *,
    currency: str,
    workload: str,
    remarks: Sequence[str] = (),
    version: str = "",
    made: str = "",
) -> Sizing:
    """The result of what was sized. Without evidence a source is a published figure."""
    return Sizing(
        currency=currency,
        need=need,
        sizes=tuple(_source(size, evidence, need) for size, evidence in sized),
        workload=workload,
        remarks=tuple(remarks),
        version=version,
        made=made,
    )


def _source(size: Size, evidence: Evidence | None, need: Need) -> SizedSource:
    codes = () if evidence is None else tuple(_notes(size, evidence, need))
    price = None
    if size.price is not None:
        paid = hasattr(size.price, "gpu")
        price = PriceUsed(
            name=size.price.name,
            as_of=size.price.as_of,
            dated=describe_price(size.price),
            rented=paid,
            owned=isinstance(size.price, Owned),
        )
    same = {
        field.name: getattr(size, field.name) for field in fields(size) if field.name != "price"
    }
    return SizedSource(
        **same,
        price=price,
        per_thousand=size.per_thousand,
        simulated=evidence is not None and evidence.simulated,
        estimate=evidence is None,
        notes=tuple(texts(codes)),
        note_codes=codes,
        slo="" if evidence is None else slo_words(evidence.summary),
    )


def _notes(size: Size, evidence: Evidence, need: Need) -> Iterator[ReasonCode]:
    yield from (*evidence_notes(evidence), *one_load(evidence, size.source))
    if evidence.simulated and size.machines is not None:
        least = needed(size.demand_per_s, size.per_machine.mid * (1 - MODEL_ERROR[1])) + need.spare
        yield note(
            "model_error",
            error=format.shares(MODEL_ERROR),
            slower_percent=MODEL_ERROR[1] * 100,
            machines=least,
        )


def load(data: bytes, where: str = FILE) -> Sizing:
    """The stored result. Raises UserError for a damaged one, and for one of a newer version."""
    return decoded(data, Sizing, where, "a result of `loadgen size`", "size again", schema=SCHEMA)
