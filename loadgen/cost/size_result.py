"""The result of `loadgen size` as it is stored in `size.json`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import msgspec
from loadgen_sdk.price_file import PerToken

from loadgen.core import format
from loadgen.core.limits import MODEL_ERROR
from loadgen.core.results.json_files import decode_json
from loadgen.core.results.manifest import ReasonCode
from loadgen.cost.capacity_planning import MeasuredRate, machines_needed, single_load_notes
from loadgen.cost.comparability import slo_words
from loadgen.cost.sizing import Need, Size
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.evidence import Evidence, evidence_notes
from loadgen.pricing.prices import Owned, Price, describe_price
from loadgen.pricing.reasons import note, texts

SCHEMA = 1
FILE = "size.json"


class PriceUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a source.

    Attributes:
        name: Name of the price.
        as_of: The day, month or year at which the price was valid.
        dated: Commitment, date and source of the price as text.
        rented: True if the price is by the hour.
        owned: True if that hour is part of a purchase that is paid over years.
    """

    name: str
    as_of: str
    dated: str = ""
    rented: bool = False
    owned: bool = False


class SizedSource(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that a demand needs from one source, as stored. See `Size` for the other fields.

    Attributes:
        simulated: True if a simulated server was measured.
        estimate: True if the rate is from a publication, and nothing was measured.
        notes: What qualifies the result, as sentences.
        note_codes: The same as codes with values.
        slo: The SLO of the run as text, or "" without a run.
    """

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
    estimate: bool
    notes: tuple[str, ...] = ()
    note_codes: tuple[ReasonCode, ...] = ()
    slo: str = ""


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `size.json`. Amounts of money are strings of decimal digits.

    Attributes:
        schema: Version of the format.
        currency: Currency of all amounts.
        need: The demand.
        sizes: The machines that it needs, for each source.
        workload: Name of the workload.
        remarks: Remarks on the price file and on published figures.
        version: Version of loadgen.
        created: When the result was made, in ISO 8601 (UTC).
    """

    schema: int = SCHEMA
    currency: str
    need: Need
    sizes: tuple[SizedSource, ...]
    workload: str = ""
    remarks: tuple[str, ...] = ()
    version: str = ""
    created: str = msgspec.field(name="made")


def to_sized_source(size: Size, evidence: Evidence | None, need: Need) -> SizedSource:
    """Return a size with its notes, as it is stored.

    A source without evidence is a published rate, which is stored as an estimate without notes.
    """
    note_codes = () if evidence is None else tuple(_notes(size, evidence, need))
    return SizedSource(
        source=size.source,
        price=None if size.price is None else _price_used(size.price),
        gpus_per_machine=size.gpus_per_machine,
        per_machine=size.per_machine,
        demand_per_s=size.demand_per_s,
        response_s=size.response_s,
        carrying=size.carrying,
        machines=size.machines,
        low=size.low,
        high=size.high,
        used=size.used,
        per_month=size.per_month,
        interactions_per_month=size.interactions_per_month,
        per_thousand=size.per_thousand,
        simulated=evidence is not None and evidence.simulated,
        estimate=evidence is None,
        notes=texts(note_codes),
        note_codes=note_codes,
        slo="" if evidence is None else slo_words(evidence.summary),
    )


def load_sizing(data: bytes, file: str = FILE) -> Sizing:
    """Return a stored result.

    Raises:
        UserError: The file is damaged, or was written by a newer version.
    """
    return decode_json(
        data, Sizing, file, "a result of `loadgen size`", "size again", schema=SCHEMA
    )


def _price_used(price: Price) -> PriceUsed:
    """Return what a stored size keeps of a price. Its amounts are in the cost already."""
    return PriceUsed(
        name=price.name,
        as_of=price.as_of,
        dated=describe_price(price),
        rented=not isinstance(price, PerToken),
        owned=isinstance(price, Owned),
    )


def _notes(size: Size, evidence: Evidence, need: Need) -> Iterator[ReasonCode]:
    """Yield the notes on a size: those of its evidence, and what the number of machines adds.

    The model behind a simulated server has an error. The last note says how many machines would be
    needed if each were slower by the largest error.
    """
    yield from evidence_notes(evidence)
    yield from single_load_notes(evidence, size.source)
    if evidence.simulated and size.machines is not None:
        largest_error = MODEL_ERROR[1]
        slower_rate_per_s = size.per_machine.mid * (1 - largest_error)
        yield note(
            "model_error",
            error=format.shares(MODEL_ERROR),
            slower_percent=largest_error * 100,
            machines=machines_needed(size.demand_per_s, slower_rate_per_s) + need.spare,
        )
