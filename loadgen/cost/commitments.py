"""Machines that are paid at all hours against the same machines that are given back when nobody needs them. Pure.

One result under several prices of a provider: what decides is in how many hours of all the machines are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import product

from msgspec import Struct

from loadgen.core import format
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Rented

GIVEN_BACK = ("on demand", "on-demand", "spot", "preemptible", "low priority", "pay as you go")
"""Beginnings of a `commitment` whose hours are paid only while a machine is held."""


class Commitment(Struct, frozen=True, kw_only=True):
    """`committed` costs less than `given_back` where the machines are needed in more than `hours_share` of all hours.

    None: never, or always: `word` says which.
    """

    committed: str
    given_back: str
    hours_share: Decimal | None
    word: str


def commitments(offers: Sequence[PricedResult]) -> Iterator[Commitment]:
    """Each committed price of a result against each that is given back, of the same provider and machine."""
    for one, other in product(offers, offers):
        if _alike(one, other) and not _is_given_back(one) and _is_given_back(other):
            yield _judged(one, other)


def _alike(one: PricedResult, other: PricedResult) -> bool:
    prices = one.price, other.price
    if (
        not all(isinstance(price, Rented) for price in prices)
        or one.evidence.folder != other.evidence.folder
    ):
        return False
    a, b = (
        (price.provider.lower(), getattr(price, "shape", ""), getattr(price, "gpu", ""))
        for price in prices
    )
    return a == b and bool(one.hourly) and bool(other.hourly)


def _is_given_back(offer: PricedResult) -> bool:
    return offer.price.commitment.lower().startswith(GIVEN_BACK)


def _judged(committed: PricedResult, given_back: PricedResult) -> Commitment:
    hours, held = (sum(offer.hourly.values(), Decimal(0)) for offer in (committed, given_back))
    share = hours / held if hours < held else None
    if share is not None:
        word = f"costs less where the machines are needed in more than {format.percent(float(share))} of all hours"
    else:
        word = "never costs less: an hour of it is no cheaper, and it is paid at all hours"
    return Commitment(
        committed=committed.name, given_back=given_back.name, hours_share=share, word=word
    )
