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
from loadgen.cost.capacity_planning import (
    MeasuredRate,
    count_needed_machines,
    list_single_load_notes,
)
from loadgen.cost.comparability import describe_slo
from loadgen.cost.sizing import Demand, Size
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.evidence import Evidence, list_evidence_notes
from loadgen.pricing.prices import Owned, Price, describe_price
from loadgen.pricing.reasons import make_note, render_notes

SCHEMA = 1
FILE = "size.json"


class PriceUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a source.

    Attributes:
        name: Name of the price.
        as_of: The day, month or year at which the price was valid.
        description: Commitment, date and source of the price as text.
        is_hourly: True if the price is by the hour, of rented or of owned machines.
        is_owned: True if that hour is part of a purchase that is paid over years.
    """

    name: str
    as_of: str
    description: str = msgspec.field(default="", name="dated")
    is_hourly: bool = msgspec.field(default=False, name="rented")
    is_owned: bool = msgspec.field(default=False, name="owned")


class SizedSource(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that a demand needs from one source, as stored in `size.json`.

    `Size` documents the fields that are not listed here. Where a key of the file differs from the
    name of the field, the field names its key.

    Attributes:
        is_simulated: True if a simulated server was measured.
        is_published: True if the rate is from a publication, and nothing was measured.
        notes: What qualifies the result, as sentences.
        note_codes: The same as codes with values.
        slo: The SLO of the run as text, or "" without a run.
    """

    source: MeasuredRate
    price: PriceUsed | None
    gpus_per_machine: int
    machine_rate: Estimate[float] = msgspec.field(name="per_machine")
    demand_per_s: float
    response_s: float | None
    serving_machines: int | None = msgspec.field(name="carrying")
    machines: int | None
    machines_low: int | None = msgspec.field(name="low")
    machines_high: int | None = msgspec.field(name="high")
    utilization: float | None = msgspec.field(name="used")
    cost_per_month: Estimate[Decimal] | None = msgspec.field(name="per_month")
    interactions_per_month: Decimal
    cost_per_thousand: Estimate[Decimal] | None = msgspec.field(name="per_thousand")
    is_simulated: bool = msgspec.field(name="simulated")
    is_published: bool = msgspec.field(name="estimate")
    notes: tuple[str, ...] = ()
    note_codes: tuple[ReasonCode, ...] = ()
    slo: str = ""


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `size.json`. Amounts of money are strings of decimal digits.

    Attributes:
        schema: Version of the format.
        currency: Currency of all amounts.
        demand: The load that the machines must serve.
        sizes: The machines that it needs, for each source.
        workload: Name of the workload.
        remarks: Remarks on the price file and on published figures.
        version: Version of loadgen.
        created: When the result was made, in ISO 8601 (UTC).
    """

    schema: int = SCHEMA
    currency: str
    demand: Demand = msgspec.field(name="need")
    sizes: tuple[SizedSource, ...]
    workload: str = ""
    remarks: tuple[str, ...] = ()
    version: str = ""
    created: str = msgspec.field(name="made")


def to_sized_source(size: Size, evidence: Evidence | None, demand: Demand) -> SizedSource:
    """Return the computed size of a source in the form in which `size.json` stores it.

    Notes that qualify the size are added from its evidence. A source without evidence is a
    published rate, which is marked as an estimate and has no notes.
    """
    note_codes: tuple[ReasonCode, ...] = ()
    slo = ""
    if evidence is not None:
        note_codes = tuple(_list_size_notes(size, evidence, demand))
        slo = describe_slo(evidence.summary)

    return SizedSource(
        source=size.source,
        price=None if size.price is None else _to_used_price(size.price),
        gpus_per_machine=size.gpus_per_machine,
        machine_rate=size.machine_rate,
        demand_per_s=size.demand_per_s,
        response_s=size.response_s,
        serving_machines=size.serving_machines,
        machines=size.machines,
        machines_low=size.machines_low,
        machines_high=size.machines_high,
        utilization=size.utilization,
        cost_per_month=size.cost_per_month,
        interactions_per_month=size.interactions_per_month,
        cost_per_thousand=size.cost_per_thousand,
        is_simulated=evidence is not None and evidence.is_simulated,
        is_published=evidence is None,
        notes=render_notes(note_codes),
        note_codes=note_codes,
        slo=slo,
    )


def load_sizing(data: bytes, file: str = FILE) -> Sizing:
    """Return a stored result.

    Raises:
        UserError: The file is damaged, or was written by a newer version.
    """
    return decode_json(
        data, Sizing, file, "a result of `loadgen size`", "size again", schema=SCHEMA
    )


def _to_used_price(price: Price) -> PriceUsed:
    """Return what a stored size keeps of a price. Its amounts are in the cost already."""
    return PriceUsed(
        name=price.name,
        as_of=price.as_of,
        description=describe_price(price),
        is_hourly=not isinstance(price, PerToken),
        is_owned=isinstance(price, Owned),
    )


def _list_size_notes(size: Size, evidence: Evidence, demand: Demand) -> Iterator[ReasonCode]:
    """Yield the notes on a size: those on its evidence, and one on the error of a simulation.

    The performance model behind a simulated server has an error. Its note says how many machines
    would be needed if each were slower by the largest error.
    """
    yield from list_evidence_notes(evidence)
    yield from list_single_load_notes(evidence, size.source)

    if evidence.is_simulated and size.machines is not None:
        largest_error = MODEL_ERROR[1]
        slower_rate_per_s = size.machine_rate.mid * (1 - largest_error)
        yield make_note(
            "model_error",
            error=format.shares(MODEL_ERROR),
            slower_percent=largest_error * 100,
            machines=count_needed_machines(size.demand_per_s, slower_rate_per_s)
            + demand.spare_machines,
        )
