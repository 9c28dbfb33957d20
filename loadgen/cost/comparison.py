"""Offers side by side: which may be compared, which is cheaper, what moves the answer, where renting breaks even.

Pure; prices and rates come from `cost.py`. A figure that cannot be judged says why instead of being judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import combinations
from typing import Any

from loadgen.cost.prices import Energy, Owned, PerToken, Price, Prices, Rented
from loadgen.cost.unit_cost import GOOD, HOUR_S, REQUEST, TASK, Basis, Offer, cost
from loadgen.metrics.columns import CACHED_SHARE
from loadgen.metrics.summary import Summary

SWING = Decimal("0.1")  # of inputs whose uncertainty nobody has said
DAY_H = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two offers: cost of `a` over cost of `b`. `differences` is empty when they may be compared, else there is no
    ratio. `low` and `high` are None when a rate in it has no interval; `word` is the judgement."""

    a: str
    b: str
    differences: tuple[str, ...]
    notes: tuple[str, ...]
    ratio: Decimal | None
    low: Decimal | None
    high: Decimal | None
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """An input moved down and up, each alone, and the cost then. `change` says by how much."""

    offer: str
    input: str
    change: str
    down: Decimal
    up: Decimal

    @property
    def width(self) -> Decimal:
        return abs(self.up - self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From `per_day` units a day renting (or owning) costs less than paying by the token; None: never. `carries` is
    what the same machines carry in a day at the rate of their basis; `word` says all of it."""

    rent: str
    by_token: str
    per_day: Decimal | None
    carries: Decimal
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferComparison:
    """All that `loadgen cost` says. `unit` is what offers are compared by; `against_first` has for each offer in what
    it differs from the first."""

    prices: Prices
    unit: str
    offers: tuple[Offer, ...]
    against_first: tuple[tuple[str, ...], ...]
    pairs: tuple[Pair, ...]
    swings: tuple[Swing, ...]
    break_evens: tuple[BreakEven, ...]


def compare_offers(offers: Sequence[Offer], prices: Prices) -> OfferComparison:
    """Everything there is to say about offers of one price file, the first of them first."""
    unit = _unit(offers)
    pairs = tuple(_pair(a, b, unit) for a, b in combinations(offers, 2))
    return OfferComparison(
        prices=prices,
        unit=unit,
        offers=tuple(offers),
        against_first=tuple(() if one is offers[0] else differences(offers[0], one)[0] for one in offers),
        pairs=pairs,
        swings=tuple(swing for one in offers for swing in _swings(one, unit)),
        break_evens=tuple(_break_evens(offers, unit)),
    )


def _unit(offers: Sequence[Offer]) -> str:
    """The most telling unit that every offer has: a successful task, a good request, a request."""
    for unit in (TASK, GOOD):
        if all(one.costs[unit] is not None for one in offers):
            return unit
    return REQUEST


def differences(a: Offer, b: Offer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """In what two offers differ that forbids comparing them, and what is only to be known."""
    one, other = a.evidence.summary, b.evidence.summary
    apart: list[str] = []
    notes: list[str] = []
    if a.evidence is b.evidence:
        return (), ()
    recipes = _recipes(a, b)
    if recipes[0] != recipes[1] or not recipes[0]:
        apart.append("recipe ({}, {})".format(*(recipe[:8] or "unknown" for recipe in recipes)))
    if _slo(one) != _slo(other):
        apart.append(f"SLO ({slo_words(one)}; {slo_words(other)})")
    for what, key in (("input", 0), ("output", 1)):
        mine, theirs = _sources(one)[key], _sources(other)[key]
        if mine != theirs:
            apart.append(f"{what} tokens counted by ({mine}, {theirs})")
    if not _same_cache(one, other):
        apart.append(f"cache ({_cache(one)}, {_cache(other)})")
    if a.evidence.simulated != b.evidence.simulated:
        apart.append("one is simulated")
    if a.basis.is_capacity != b.basis.is_capacity and not (_by_token(a) or _by_token(b)):
        apart.append("one at its capacity, one at a load of its own")
    floors = [each.name for each in (a, b) if _is_floor(each)]
    if floors:
        apart.append(f"only a lower bound of the capacity is known ({', '.join(floors)})")
    if a.basis.confidence != b.basis.confidence and None not in (a.basis.confidence, b.basis.confidence):
        apart.append(f"confidence of the intervals ({a.basis.confidence:g}, {b.basis.confidence:g})")
    notes += [f"{each.name} is not a valid measurement" for each in (a, b) if not each.evidence.valid]
    if one.run.seed != other.run.seed:
        notes.append("different seeds")
    if one.target.model != other.target.model:
        notes.append(f"different models ({one.target.model}, {other.target.model})")
    if one.rtt_ms is not None and other.rtt_ms is not None and abs(one.rtt_ms - other.rtt_ms) > 5:
        notes.append(f"connect time {one.rtt_ms:.1f} and {other.rtt_ms:.1f} ms is inside TTFT")
    return tuple(apart), tuple(notes)


def _is_floor(one: Offer) -> bool:
    """Whether a rate is in its price that may be far higher."""
    found = one.evidence.capacity
    return found is not None and found.lower_bound and not _by_token(one)


def _recipes(a: Offer, b: Offer) -> tuple[str, str]:
    """What both searches were asked, where both say so; else what both runs did."""
    asked = [one.evidence.capacity.recipe if one.evidence.capacity else "" for one in (a, b)]
    if all(asked):
        return asked[0], asked[1]
    return a.evidence.summary.fingerprints.recipe, b.evidence.summary.fingerprints.recipe


def _slo(summary: Summary) -> tuple[object, ...]:
    terms = sorted((term.metric, term.quantile, term.limit_ms) for term in summary.goodput.slo)
    return (*terms, summary.goodput.share_limit)


def slo_words(summary: Summary) -> str:
    """ttft p99 2000 ms, tpot p99 200 ms, 99 % of requests; none without an SLO."""
    terms = [f"{term.metric} p{term.quantile * 100:g} {term.limit_ms:g} ms" for term in summary.goodput.slo]
    if summary.goodput.share_limit is not None:
        terms.append(f"{summary.goodput.share_limit * 100:g} % of requests within all")
    return ", ".join(terms) or "none"


def _sources(summary: Summary) -> tuple[str, str]:
    sources = summary.tokens.sources
    return "+".join(sorted(sources.input)), "+".join(sorted(sources.output))


def _same_cache(one: Summary, other: Summary) -> bool:
    """Both unknown, both cold, or warm within the limit that tells cold from warm."""
    a, b = one.tokens.cached_share, other.tokens.cached_share
    if a is None or b is None:
        return a is b
    return (a <= CACHED_SHARE and b <= CACHED_SHARE) or (min(a, b) > CACHED_SHARE and abs(a - b) <= CACHED_SHARE)


def _cache(summary: Summary) -> str:
    share = summary.tokens.cached_share
    if share is None:
        return "not said"
    return f"cold, {share * 100:.1f} %" if share <= CACHED_SHARE else f"warm, {share * 100:.1f} %"


def _by_token(one: Offer) -> bool:
    return isinstance(one.price, PerToken)


def _pair(a: Offer, b: Offer, unit: str) -> Pair:
    apart, notes = differences(a, b)
    mine, theirs = a.costs[unit], b.costs[unit]
    if mine is None or theirs is None:
        apart = (*apart, "no cost in this unit")
    if apart or mine is None or theirs is None:
        word = "not comparable"
        return Pair(a=a.name, b=b.name, differences=apart, notes=notes, ratio=None, low=None, high=None, word=word)
    ratio = mine.total / theirs.total
    low, high = _ratio_ends(a, b, unit)
    if low is None or high is None:
        word = "not judged: a single run has no interval"
    elif low <= 1 <= high:
        word = "the same" if low == high else "cannot be told apart"
    else:
        word = f"{a.name if ratio < 1 else b.name} is cheaper"
        word += " (for the tokens that were counted)" if _by_token(a) and _by_token(b) else ""
    return Pair(a=a.name, b=b.name, differences=(), notes=notes, ratio=ratio, low=low, high=high, word=word)


def _ratio_ends(a: Offer, b: Offer, unit: str) -> tuple[Decimal | None, Decimal | None]:
    """The interval of a ratio of two independent estimates from the interval of each, on the log scale: distances
    add in squares (MOVER: Zou and Donner, Statistics in Medicine 27, 2008). Two prices of one measurement share its
    rate: its ends move both at once."""
    mine, theirs = a.costs[unit], b.costs[unit]
    assert mine is not None and theirs is not None
    if mine.low is None or mine.high is None or theirs.low is None or theirs.high is None:
        if a.evidence is b.evidence and list(mine.parts) == list(theirs.parts) and len(mine.parts) == 1:
            return (ratio := mine.total / theirs.total), ratio
        return None, None
    if a.evidence is b.evidence:
        ends = sorted((mine.low / theirs.low, mine.total / theirs.total, mine.high / theirs.high))
        return ends[0], ends[-1]
    log = [amount.ln() for amount in (mine.low, mine.total, mine.high, theirs.low, theirs.total, theirs.high)]
    middle = log[1] - log[4]
    down = ((log[1] - log[0]) ** 2 + (log[5] - log[4]) ** 2).sqrt()
    up = ((log[2] - log[1]) ** 2 + (log[4] - log[3]) ** 2).sqrt()
    return (middle - down).exp(), (middle + up).exp()


_RENTED = {"per_hour": "price per hour", "per_gpu_hour": "price per GPU-hour"}
_OWNED = {"capital": "capital", "years": "years of writing off", "staff_share": "staff share"}
_TOKENS = {"per_million_input": "price of input", "per_million_output": "price of output"}
_TOKENS |= {"per_million_cached": "price of cached input"}
_POWER = {"watts": "watts under load", "idle_watts": "idle watts", "pue": "PUE", "per_kwh": "price per kWh"}
_COUNTED = {"input_tokens": "fresh input tokens", "output_tokens": "output tokens", "cached_tokens": "cached tokens"}


Moved = tuple[Price, Basis, Decimal]  # price, basis, utilization


def _swings(one: Offer, unit: str) -> list[Swing]:
    """Every input that has a say, moved alone; widest first."""
    now = one.costs[unit]
    if now is None:
        return []
    swings = []
    if not _by_token(one) and now.low is not None and now.high is not None:
        what = "capacity" if one.basis.is_capacity else "measured rate"
        swings.append(Swing(offer=one.name, input=what, change="its interval", down=now.high, up=now.low))
    for what, move in _inputs(one):
        down, up = (cost(found, price, one.gpus, unit, u) for price, found, u in (move(1 - SWING), move(1 + SWING)))
        if down is not None and up is not None:
            swings.append(Swing(offer=one.name, input=what, change=f"±{SWING:.0%}", down=down.total, up=up.total))
    return sorted((swing for swing in swings if swing.width), key=lambda swing: -swing.width)


def _inputs(one: Offer) -> Iterator[tuple[str, Callable[[Decimal], Moved]]]:
    """The inputs of an offer by name, and what they become when multiplied."""
    price = one.price
    if _by_token(one):
        yield from ((what, partial(_count_moved, one, field)) for field, what in _COUNTED.items())
    elif one.basis.low is None:
        yield "measured rate", partial(_rate_moved, one)
    if one.utilization != 1:
        yield "utilization", lambda by: (price, one.basis, min(one.utilization * by, Decimal(1)))
    own = _RENTED if isinstance(price, Rented) else _OWNED if isinstance(price, Owned) else _TOKENS
    for field, what in (own | {"egress_per_gb": "price of egress"}).items():
        if getattr(price, field) is not None:
            yield what, partial(_price_moved, one, field)
    if not isinstance(price, PerToken) and price.energy is not None and price.energy.counted != "included":
        for field, what in _POWER.items():
            if getattr(price.energy, field) is not None:
                yield what, partial(_power_moved, one, price, price.energy, field)


def _rate_moved(one: Offer, by: Decimal) -> Moved:
    rates = {unit: None if rate is None else rate * by for unit, rate in one.basis.rates.items()}
    return one.price, replace(one.basis, rates=rates), one.utilization


def _count_moved(one: Offer, field: str, by: Decimal) -> Moved:
    changed: Any = {field: getattr(one.basis, field) * by}
    return one.price, replace(one.basis, **changed), one.utilization


def _price_moved(one: Offer, field: str, by: Decimal) -> Moved:
    price = one.price.model_copy(update={field: getattr(one.price, field) * by})
    return price, one.basis, one.utilization


def _power_moved(one: Offer, price: Rented | Owned, energy: Energy, field: str, by: Decimal) -> Moved:
    """A PUE stays at least 1, idle watts at most what load draws."""
    moved = getattr(energy, field) * by
    if field == "pue":
        moved = max(moved, Decimal(1))
    if field == "idle_watts":
        moved = min(moved, energy.watts)
    if field == "watts":
        moved = max(moved, energy.idle_watts or Decimal(0))
    changed = price.model_copy(update={"energy": energy.model_copy(update={field: moved})})
    return changed, one.basis, one.utilization


def _break_evens(offers: Sequence[Offer], unit: str) -> Iterator[BreakEven]:
    for rent in offers:
        for by_token in offers:
            if not _by_token(rent) and _by_token(by_token) and not differences(rent, by_token)[0]:
                found = _break_even(rent, by_token, unit)
                if found is not None:
                    yield found


_PLURAL = {REQUEST: "requests", GOOD: "good requests", TASK: "successful tasks"}


def _break_even(rent: Offer, by_token: Offer, unit: str) -> BreakEven | None:
    """Machines cost `hourly` x 24 h a day whatever they do; each unit on them costs what is not hourly, each unit by
    the token its price. They meet at fixed / (by token - marginal)."""
    mine, theirs, rate = rent.costs[unit], by_token.costs[unit], rent.basis.rates[unit]
    if mine is None or theirs is None or not rate:
        return None
    fixed = sum(rent.hourly.values(), Decimal(0)) * DAY_H
    marginal = sum((amount for part, amount in mine.parts.items() if part != "machines"), Decimal(0))
    carries = rate * HOUR_S * DAY_H
    what = _PLURAL[unit]
    per_day = fixed / (theirs.total - marginal) if theirs.total > marginal else None
    at = "at their capacity" if rent.basis.is_capacity else "at the measured load (not their capacity)"
    least = "at least " if _is_floor(rent) else ""
    limit = f"they carry {least}{carries:,.0f} a day {at}"
    if per_day is None:
        word = f"never: what each of the {what} adds on the machines alone costs more than paying by the token"
    elif per_day > carries:
        word = f"not with these machines: it would take {per_day:,.0f} {what} a day, and {limit}"
    else:
        share = f"{per_day / carries:.1%} of what they carry"
        word = f"from {per_day:,.0f} {what} a day the machines cost less ({share}); {limit}"
    return BreakEven(rent=rent.name, by_token=by_token.name, per_day=per_day, carries=carries, word=word)
