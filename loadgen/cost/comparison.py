"""Compares offers: which may be compared, which is cheaper, which inputs matter most, where renting breaks even.

Pure; the costs come from `unit_cost.py`. Where a comparison is not possible, the result says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import combinations, product
from typing import Any

from loadgen_sdk.price_file import PerToken
from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.limits import CACHED_SHARE, SHORTENED
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.validity import answered_share
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.workload.file_models import Part
from loadgen.cost.commitments import Commitment, commitments
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned, Price, Prices, Rented
from loadgen.pricing.reasons import note, texts
from loadgen.pricing.unit_cost import compute_unit_cost
from loadgen.pricing.units import GOOD, REQUEST, SECONDS_PER_HOUR, TASK
from loadgen.runs.headline import promises

SWING = Decimal("0.1")  # relative change of inputs whose uncertainty is not known
DAY_H = 24


class Pair(Struct, frozen=True, kw_only=True):
    """Two offers compared: `ratio` is the cost of `a` / the cost of `b`.

    `difference_codes` says why they may not be compared; `ratio` is then None. `low` and `high` are None where a rate
    has no interval. `word` is the judgement in words.
    """

    a: str
    b: str
    difference_codes: tuple[ReasonCode, ...]
    note_codes: tuple[ReasonCode, ...]
    ratio: Decimal | None
    low: Decimal | None
    high: Decimal | None
    word: str

    @property
    def differences(self) -> tuple[str, ...]:
        return texts(self.difference_codes)

    @property
    def notes(self) -> tuple[str, ...]:
        return texts(self.note_codes)


class Swing(Struct, frozen=True, kw_only=True):
    """The cost when one input alone goes down and up. `change` says by how much."""

    offer: str
    input: str
    change: str
    down: Decimal
    up: Decimal

    @property
    def width(self) -> Decimal:
        return abs(self.up - self.down)


class BreakEven(Struct, frozen=True, kw_only=True):
    """From `per_day` units a day, renting (or owning) costs less than paying by the token; None: never.

    `carries` is how many units the same machines handle in a day at the rate of their basis. `word` says all of it.
    """

    rent: str
    by_token: str
    per_day: Decimal | None
    carries: Decimal
    word: str


class OfferComparison(Struct, frozen=True, kw_only=True):
    """Everything that `loadgen cost` reports. Offers are compared by the cost of one `unit`.

    `against_first` holds, for each offer, the differences from the first one.
    """

    prices: Prices
    unit: str
    offers: tuple[PricedResult, ...]
    against_first: tuple[tuple[ReasonCode, ...], ...]
    pairs: tuple[Pair, ...]
    swings: tuple[Swing, ...]
    break_evens: tuple[BreakEven, ...]
    commitments: tuple[Commitment, ...] = ()


def compare_offers(offers: Sequence[PricedResult], prices: Prices) -> OfferComparison:
    """Compare offers under one price file, in the given order; the first is the reference of `against_first`."""
    unit = _common_unit(offers)
    pairs = tuple(_pair(a, b, unit) for a, b in combinations(offers, 2))
    return OfferComparison(
        prices=prices,
        unit=unit,
        offers=tuple(offers),
        against_first=tuple(
            () if offer is offers[0] else differences(offers[0], offer)[0] for offer in offers
        ),
        pairs=pairs,
        swings=tuple(swing for offer in offers for swing in _swings(offer, unit)),
        break_evens=tuple(_break_evens(offers, unit)),
        commitments=tuple(commitments(offers)),
    )


def _common_unit(offers: Sequence[PricedResult]) -> str:
    """The first unit that every offer has, of: successful task, good request, request."""
    for unit in (TASK, GOOD):
        if all(offer.costs[unit] is not None for offer in offers):
            return unit
    return REQUEST


def differences(
    a: PricedResult, b: PricedResult
) -> tuple[tuple[ReasonCode, ...], tuple[ReasonCode, ...]]:
    """The differences that forbid a comparison of two offers, and those that are only noted."""
    if a.evidence is b.evidence:
        return (), ()
    summary_a, summary_b = a.evidence.summary, b.evidence.summary
    reasons: list[ReasonCode] = []
    recipes = _recipes(a, b)
    if recipes[0] != recipes[1] or not recipes[0]:
        recipe_a, recipe_b = (recipe[:8] or "unknown" for recipe in recipes)
        reasons.append(note("recipe_differs", a=recipe_a, b=recipe_b))
    if _slo_key(summary_a) != _slo_key(summary_b):
        reasons.append(note("slo_differs", a=slo_words(summary_a), b=slo_words(summary_b)))
    answered = [answered_share(summary.verdict) for summary in (summary_a, summary_b)]
    if abs(answered[0] - answered[1]) > SHORTENED:
        reasons.append(note("answers_differ", a=answered[0], b=answered[1]))
    for kind, key in (("input", 0), ("output", 1)):
        source_a, source_b = _token_sources(summary_a)[key], _token_sources(summary_b)[key]
        if source_a != source_b:
            reasons.append(note("count_differs", tokens=kind, a=source_a, b=source_b))
    if not _same_cache(summary_a, summary_b):
        reasons.append(
            note("cache_differs", a=summary_a.tokens.cached_share, b=summary_b.tokens.cached_share)
        )
    if a.evidence.simulated != b.evidence.simulated:
        reasons.append(note("one_simulated"))
    if a.basis.is_capacity != b.basis.is_capacity and not (_by_token(a) or _by_token(b)):
        reasons.append(note("one_at_capacity"))
    if a.evidence.at_once != b.evidence.at_once and not (_by_token(a) or _by_token(b)):
        reasons.append(note("one_at_once"))
    floors = [offer.name for offer in (a, b) if has_lower_bound(offer)]
    if floors:
        reasons.append(note("one_lower_bound", offers=floors))
    if a.basis.confidence != b.basis.confidence and None not in (
        a.basis.confidence,
        b.basis.confidence,
    ):
        reasons.append(note("confidence_differs", a=a.basis.confidence, b=b.basis.confidence))
    return tuple(reasons), tuple(_remarks(a, b))


def _remarks(a: PricedResult, b: PricedResult) -> Iterator[ReasonCode]:
    summary_a, summary_b = a.evidence.summary, b.evidence.summary
    for offer in (a, b):
        if not offer.evidence.valid:
            yield note("offer_invalid", offer=offer.name)
    if summary_a.run.seed != summary_b.run.seed:
        yield note("seed_differs")
    for code, field in (("model_differs", "model"), ("region_differs", "region")):
        value_a, value_b = (getattr(summary.target, field) for summary in (summary_a, summary_b))
        if value_a != value_b:
            yield note(code, a=value_a, b=value_b)
    if (
        summary_a.rtt_ms is not None
        and summary_b.rtt_ms is not None
        and abs(summary_a.rtt_ms - summary_b.rtt_ms) > 5
    ):
        yield note("connect_differs", a_ms=summary_a.rtt_ms, b_ms=summary_b.rtt_ms)


def has_lower_bound(offer: PricedResult) -> bool:
    """Whether the cost uses a capacity of which only a lower bound is known."""
    capacity = offer.evidence.capacity
    return capacity is not None and capacity.lower_bound and not _by_token(offer)


def _recipes(a: PricedResult, b: PricedResult) -> tuple[str, str]:
    """The recipes of both capacity searches where both have one, else the recipes of both runs."""
    capacity_recipes = [
        offer.evidence.capacity.recipe if offer.evidence.capacity else "" for offer in (a, b)
    ]
    if all(capacity_recipes):
        return capacity_recipes[0], capacity_recipes[1]
    return a.evidence.summary.fingerprints.recipe, b.evidence.summary.fingerprints.recipe


def _slo_key(summary: Summary) -> tuple[object, ...]:
    return tuple(sorted(promises(summary)))


def slo_words(summary: Summary) -> str:
    """The SLO in words: "TTFT p99 at most 2,000 ms, TPOT p99 at most 200 ms"; "none" without an SLO."""
    return ", ".join(promises(summary)) or "none"


def _token_sources(summary: Summary) -> tuple[str, str]:
    sources = summary.tokens.sources
    return "+".join(sorted(sources.input)), "+".join(sorted(sources.output))


def _same_cache(one: Summary, other: Summary) -> bool:
    """Whether cached shares agree: both unknown, both cold, or both warm and at most CACHED_SHARE apart."""
    share_a, share_b = one.tokens.cached_share, other.tokens.cached_share
    if share_a is None or share_b is None:
        return share_a is share_b
    least, most = sorted((share_a, share_b))
    return most <= CACHED_SHARE or (least > CACHED_SHARE and most - least <= CACHED_SHARE)


def _by_token(offer: PricedResult) -> bool:
    return isinstance(offer.price, PerToken)


def _pair(a: PricedResult, b: PricedResult, unit: str) -> Pair:
    reasons, notes = differences(a, b)
    cost_a, cost_b = a.costs[unit], b.costs[unit]
    if cost_a is None or cost_b is None:
        reasons = (*reasons, note("no_cost"))
    pair = Pair(
        a=a.name,
        b=b.name,
        difference_codes=reasons,
        note_codes=notes,
        ratio=None,
        low=None,
        high=None,
        word="not comparable",
    )
    if reasons or cost_a is None or cost_b is None:
        return pair
    ratio = cost_a.total / cost_b.total
    low, high = _ratio_ends(a, b, unit)
    if low is None or high is None:
        word = "not judged: a single run has no interval"
    elif low <= 1 <= high:
        word = "the same" if low == high else "cannot be told apart"
    else:
        word = f"{a.name if ratio < 1 else b.name} is cheaper"
        word += " (for the tokens that were counted)" if _by_token(a) and _by_token(b) else ""
    return replace(pair, ratio=ratio, low=low, high=high, word=word)


def _ratio_ends(
    a: PricedResult, b: PricedResult, unit: str
) -> tuple[Decimal | None, Decimal | None]:
    """The interval of a ratio of costs, from the interval of each cost.

    For independent estimates, on the log scale: distances add in squares (MOVER: Zou and Donner, Statistics in Medicine
    27, 2008). Two prices of one measurement share its rate, so both costs move together with its ends.
    """
    cost_a, cost_b = a.costs[unit], b.costs[unit]
    assert cost_a is not None and cost_b is not None
    if cost_a.low is None or cost_a.high is None or cost_b.low is None or cost_b.high is None:
        if (
            a.evidence is b.evidence
            and list(cost_a.parts) == list(cost_b.parts)
            and len(cost_a.parts) == 1
        ):
            return (ratio := cost_a.total / cost_b.total), ratio
        return None, None
    if a.evidence is b.evidence:
        ends = sorted(
            (cost_a.low / cost_b.low, cost_a.total / cost_b.total, cost_a.high / cost_b.high)
        )
        return ends[0], ends[-1]
    logs = [
        amount.ln()
        for amount in (cost_a.low, cost_a.total, cost_a.high, cost_b.low, cost_b.total, cost_b.high)
    ]
    log_ratio = logs[1] - logs[4]
    below = ((logs[1] - logs[0]) ** 2 + (logs[5] - logs[4]) ** 2).sqrt()
    above = ((logs[2] - logs[1]) ** 2 + (logs[4] - logs[3]) ** 2).sqrt()
    return (log_ratio - below).exp(), (log_ratio + above).exp()


_PRICE_FIELDS: dict[type[Price], dict[str, str]] = {
    Rented: {"per_hour": "price per hour", "per_gpu_hour": "price per GPU-hour"},
    Owned: {"capital": "capital", "years": "years of writing off", "staff_share": "staff share"},
    PerToken: {
        "per_million_input": "price of input",
        "per_million_output": "price of output",
        "per_million_cached": "price of cached input",
    },
}
_POWER_FIELDS = {
    "watts": "watts under load",
    "idle_watts": "idle watts",
    "pue": "PUE",
    "per_kwh": "price per kWh",
}
_COUNT_FIELDS = {"input_tokens": "fresh input tokens", "output_tokens": "output tokens"}
_COUNT_FIELDS |= {"cached_tokens": "cached tokens"}


def _swings(offer: PricedResult, unit: str) -> list[Swing]:
    """Every input that changes the cost, moved alone; the largest effect first."""
    current = offer.costs[unit]
    if current is None:
        return []
    swings = []
    if not _by_token(offer) and current.low is not None and current.high is not None:
        label = "capacity" if offer.basis.is_capacity else "measured rate"
        swings.append(
            Swing(
                offer=offer.name,
                input=label,
                change="its interval",
                down=current.high,
                up=current.low,
            )
        )
    for label, path in _movable_inputs(offer):
        moved = (_moved(offer, path, 1 - SWING), _moved(offer, path, 1 + SWING))
        down, up = (compute_unit_cost(o.basis, o.price, o.gpus, unit, o.utilization) for o in moved)
        if down is not None and up is not None:
            swings.append(
                Swing(
                    offer=offer.name,
                    input=label,
                    change=f"±{SWING:.0%}",
                    down=down.total,
                    up=up.total,
                )
            )
    return sorted((swing for swing in swings if swing.width), key=lambda swing: -swing.width)


def _movable_inputs(offer: PricedResult) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each input of an offer: its name, and the fields that lead to it."""
    price = offer.price
    if _by_token(offer):
        yield from ((label, ("basis", field)) for field, label in _COUNT_FIELDS.items())
    elif offer.basis.low is None:
        yield "measured rate", ("basis", "rates")
    if offer.utilization != 1:
        yield "utilization", ("utilization",)
    for field, label in (_PRICE_FIELDS[type(price)] | {"egress_per_gb": "price of egress"}).items():
        if getattr(price, field) is not None:
            yield label, ("price", field)
    if (
        not isinstance(price, PerToken)
        and price.energy is not None
        and price.energy.counted != "included"
    ):
        for field, label in _POWER_FIELDS.items():
            if getattr(price.energy, field) is not None:
                yield label, ("price", "energy", field)


def _moved(value: Any, path: tuple[str, ...], factor: Decimal) -> Any:
    """A copy with one input multiplied. PUE stays at least 1, utilization at most 1, idle watts at most `watts`."""
    if isinstance(value, dict):
        return {unit: rate and rate * factor for unit, rate in value.items()}
    if not path:
        return value * factor
    field = path[0]
    moved = _moved(getattr(value, field), path[1:], factor)
    match field:
        case "pue":
            moved = max(moved, Decimal(1))
        case "utilization":
            moved = min(moved, Decimal(1))
        case "idle_watts":
            moved = min(moved, value.watts)
        case "watts":
            moved = max(moved, value.idle_watts or Decimal(0))
    changed = {field: moved}
    return (
        value.model_copy(update=changed) if isinstance(value, Part) else replace(value, **changed)
    )


def _break_evens(offers: Sequence[PricedResult], unit: str) -> Iterator[BreakEven]:
    for rent, by_token in product(offers, offers):
        comparable = (
            not _by_token(rent) and _by_token(by_token) and not differences(rent, by_token)[0]
        )
        if comparable and (break_even := _break_even(rent, by_token, unit)) is not None:
            yield break_even


_PLURAL = {REQUEST: "requests", GOOD: "good requests", TASK: "successful tasks"}


def _break_even(rent: PricedResult, by_token: PricedResult, unit: str) -> BreakEven | None:
    """The break-even of machines against paying by the token; None where a cost is missing.

    Machines have a fixed cost of `hourly` x 24 h a day, and each unit on them a marginal cost (all parts but machines).
    The costs are equal at fixed / (cost by token - marginal) units a day.
    """
    rent_cost, token_cost, rate = rent.costs[unit], by_token.costs[unit], rent.basis.rates[unit]
    if rent_cost is None or token_cost is None or not rate:
        return None
    fixed = sum(rent.hourly.values(), Decimal(0)) * DAY_H
    marginal = sum(
        (amount for part, amount in rent_cost.parts.items() if part != "machines"), Decimal(0)
    )
    carries = rate * SECONDS_PER_HOUR * DAY_H
    noun = _PLURAL[unit]
    per_day = fixed / (token_cost.total - marginal) if token_cost.total > marginal else None
    at = (
        "at their capacity"
        if rent.basis.is_capacity
        else "at the measured load (not their capacity)"
    )
    at_least = "at least " if has_lower_bound(rent) else ""
    capacity_words = f"they carry {at_least}{carries:,.0f} a day {at}"
    if per_day is None:
        word = f"never: what each of the {noun} adds on the machines alone costs more than paying by the token"
    elif per_day > carries:
        word = f"not with these machines: it would take {per_day:,.0f} {noun} a day, and {capacity_words}"
    else:
        share = f"{per_day / carries:.1%} of what they carry"
        word = (
            f"from {per_day:,.0f} {noun} a day the machines cost less ({share}); {capacity_words}"
        )
    return BreakEven(
        rent=rent.name, by_token=by_token.name, per_day=per_day, carries=carries, word=word
    )
