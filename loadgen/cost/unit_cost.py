"""What a unit of work costs: prices and measured rates in, amounts of money with their parts and intervals out.

Pure. Amounts are `decimal.Decimal`, parts are rounded once (to 1e-12 of the currency) and their sum is the total.
Formulas and their limits are in docs/cost.md; which runs may stand side by side is judged in `offers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_EVEN, Decimal

from loadgen.cost.evidence import Evidence, notes
from loadgen.cost.prices import Energy, Owned, PerToken, Price, Rented
from loadgen.errors import UserError
from loadgen.metrics.summary import Summary
from loadgen.results.capacity import RateInterval, replications

# What a price is per. `rates` and `counts` of a Basis, and the costs of an Offer, have these keys.
REQUEST, GOOD, TASK, OUTPUT, TOTAL = "request", "good_request", "task", "million_output_tokens", "million_tokens"
UNITS = (REQUEST, GOOD, TASK, OUTPUT, TOTAL)

# What a price is made of. Machines and energy run with time; tokens and egress with what was counted.
MACHINES, ENERGY, INPUT, CACHED, ANSWER, EGRESS = "machines", "energy", "input", "cached_input", "output", "egress"
PARTS = (MACHINES, ENERGY, INPUT, CACHED, ANSWER, EGRESS)

HOURS_PER_YEAR = 8760
SMALLEST = Decimal("1e-12")
MILLION, GIGA, KILO, HOUR_S = Decimal(10**6), Decimal(10**9), Decimal(1000), Decimal(3600)
AWAY = 0.1  # of a capacity: what requests are like may be another thing at a rate that far off
SHORT_WINDOW = 20  # answers that last longer than this part of the steady window leave their ramp in its rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the evidence says, in the units of prices: `rates` per second, `counts` and amounts over the measured runs.

    Amounts are of all requests, failed ones included where they are known: they cost what they cost. `low` and `high`
    are the ends of the rate as parts of its middle; None where nothing says how far it can be trusted. A capacity of
    known `confidence` or a number of `repeats` says that.
    """

    label: str  # "capacity", "at this load", "at this load, 3 repeats"
    is_capacity: bool
    rates: Mapping[str, Decimal | None]
    counts: Mapping[str, Decimal | None]
    input_tokens: Decimal  # fresh ones
    cached_tokens: Decimal
    cached_known: bool
    output_tokens: Decimal
    bytes_out: Decimal
    low: Decimal | None = None
    high: Decimal | None = None
    confidence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """An amount per unit: `total` is exactly the sum of `parts`. `low` and `high` come from the ends of the rate; both
    None where the rate has no interval, equal to the total where no rate is in it."""

    parts: Mapping[str, Decimal]
    total: Decimal
    low: Decimal | None
    high: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Energy at the measured rate, machine room included (PUE); money is in the cost."""

    watts: Decimal  # of all machines that are paid, with PUE
    joules_per_output_token: Decimal
    output_tokens_per_s_per_mw: Decimal
    kwh: Mapping[str, Decimal | None]  # per unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A result under a price, and what its units cost. `notes` are for beside it."""

    name: str
    evidence: Evidence
    price: Price
    basis: Basis
    gpus: int | None  # of the run, where it is known
    gpus_paid: Decimal | None  # None: paid by the token
    utilization: Decimal
    hourly: Mapping[str, Decimal]  # what an hour of those GPUs is made of; empty when paid by the token
    costs: Mapping[str, Cost | None]
    power: Power | None
    notes: tuple[str, ...]


def decimal(number: float) -> Decimal:
    """The number that a reader of its shortest text sees."""
    return Decimal(repr(number))


def basis(evidence: Evidence) -> Basis:
    """Rates and counts of a capacity, of one run, or of repeats (means of their rates, sums of their counts).

    One run and repeats: the steady rates of metrics.md. A capacity: its rate times what a request was in its run.
    """
    summaries = evidence.summaries
    total = _sum_of(summaries)
    if evidence.capacity is not None:
        return _at_capacity(evidence, total)
    each = [_steady(summary) for summary in summaries]
    rates: dict[str, Decimal | None] = {}
    spread = RateInterval(mid=1.0)
    for unit in UNITS:
        values = [rate[unit] for rate in each]
        known = [float(value) for value in values if value is not None]
        whole = len(known) == len(summaries) and bool(known)
        rates[unit] = (
            (decimal(known[0]) if len(known) == 1 else decimal(math.fsum(known) / len(known))) if whole else None
        )
        if (
            unit in (REQUEST, GOOD) and whole and math.fsum(known) > 0
        ):  # the interval of the good ones, if there are any
            spread = replications(known)
    n = len(summaries)
    has_interval = n > 1 and spread.low is not None and spread.high is not None
    return replace(
        total,
        label="at this load" if n == 1 else f"at this load, {n} repeats",
        rates=rates,
        low=decimal(spread.low / spread.mid) if has_interval and spread.low else None,
        high=decimal(spread.high / spread.mid) if has_interval and spread.high else None,
        confidence=0.95 if has_interval else None,
    )


def _steady(summary: Summary) -> dict[str, Decimal | None]:
    tokens, sessions = summary.tokens, summary.sessions
    floats = {
        REQUEST: summary.load.steady_completed_rps,
        GOOD: summary.goodput.steady_rps if summary.verdict.valid else None,
        TASK: sessions.steady_ok_per_s if sessions is not None else None,
        OUTPUT: None if tokens.steady_output_per_s is None else tokens.steady_output_per_s / 1e6,
        TOTAL: None if tokens.steady_total_per_s is None else tokens.steady_total_per_s / 1e6,
    }
    return {unit: None if rate is None else decimal(rate) for unit, rate in floats.items()}


def _sum_of(summaries: tuple[Summary, ...]) -> Basis:
    """Counts and amounts of all runs; no rates yet."""

    def added(values: list[int | None]) -> Decimal | None:
        return None if any(value is None for value in values) else Decimal(sum(value or 0 for value in values))

    tokens = [summary.tokens for summary in summaries]
    input_ok, output_ok = added([t.input for t in tokens]), added([t.output for t in tokens])
    cached = added([t.cached for t in tokens])
    failed_input, failed_output = sum(t.failed_input for t in tokens), sum(t.failed_output for t in tokens)
    assert input_ok is not None and output_ok is not None  # evidence.read refuses what was not counted
    valid = all(summary.verdict.valid for summary in summaries)
    return Basis(
        label="",
        is_capacity=False,
        rates={},
        counts={
            REQUEST: Decimal(sum(summary.requests.ok for summary in summaries)),
            GOOD: added([summary.goodput.good for summary in summaries]) if valid else None,
            TASK: added([None if s.sessions is None else s.sessions.ok for s in summaries]),
            OUTPUT: output_ok / MILLION,
            TOTAL: (input_ok + output_ok) / MILLION,
        },
        input_tokens=input_ok + failed_input - (cached or 0),
        cached_tokens=cached or Decimal(0),
        cached_known=cached is not None,
        output_tokens=output_ok + failed_output,
        bytes_out=Decimal(sum(summary.bytes.received for summary in summaries)),
    )


def _at_capacity(evidence: Evidence, total: Basis) -> Basis:
    found, summary = evidence.capacity, evidence.summary
    assert found is not None
    if found.unit == "conversations" and summary.sessions is not None:
        offered = summary.sessions.count
    else:
        offered = summary.requests.scheduled - summary.requests.cancelled
    rate = decimal(found.rate_per_s)
    rates = {unit: None if n is None else n * rate / offered for unit, n in total.counts.items()}
    return replace(
        total,
        label="capacity",
        is_capacity=True,
        rates=rates,
        low=None if found.low_per_s is None else decimal(found.low_per_s) / rate,
        high=None if found.high_per_s is None else decimal(found.high_per_s) / rate,
        confidence=None if found.low_per_s is None else found.confidence,
    )


def machines(price: Rented | Owned, gpus: int) -> Decimal:
    """How many machines a run on `gpus` GPUs pays for: whole ones when rented, its part of what was bought."""
    if price.gpus is None:
        return Decimal(gpus)  # sold by the GPU
    if isinstance(price, Owned):
        return Decimal(gpus) / price.gpus
    return Decimal(math.ceil(gpus / price.gpus))


def hourly(price: Rented | Owned) -> dict[str, Decimal]:
    """What an hour of one machine is made of (of one GPU, where it is sold by the GPU)."""
    parts: dict[str, Decimal] = {}
    if isinstance(price, Owned):
        parts["capital"] = price.capital / (price.years * HOURS_PER_YEAR)
        parts["staff"] = price.capital * price.staff_share / HOURS_PER_YEAR
    elif price.per_hour is not None:
        parts["rent"] = price.per_hour
    elif price.per_gpu_hour is not None:
        parts["rent"] = price.per_gpu_hour * (price.gpus or 1)
    energy = price.energy
    if energy is not None and energy.per_kwh is not None:
        if energy.counted == "hourly":
            parts["power"] = energy.watts / KILO * energy.pue * energy.per_kwh
        elif energy.counted == "by_load" and energy.idle_watts is not None:
            parts["idle power"] = energy.idle_watts / KILO * energy.pue * energy.per_kwh
    return {part: amount for part, amount in parts.items() if amount}


def energy_per_hour(energy: Energy | None) -> Decimal:
    """Money per hour of one machine for what load adds to its power; 0 unless it is counted so."""
    if energy is None or energy.counted != "by_load" or energy.per_kwh is None or energy.idle_watts is None:
        return Decimal(0)
    return (energy.watts - energy.idle_watts) / KILO * energy.pue * energy.per_kwh


def cost(basis: Basis, price: Price, gpus: int | None, unit: str, utilization: Decimal = Decimal(1)) -> Cost | None:
    """What one `unit` costs; None when none was measured. Utilization divides the machines' part and nothing else."""
    count, rate = basis.counts[unit], basis.rates[unit]
    if not count:
        return None
    by_time: dict[str, Decimal] = {}
    by_count: dict[str, Decimal] = {}
    if isinstance(price, PerToken):
        by_count[INPUT] = basis.input_tokens * price.per_million_input / MILLION / count
        by_count[ANSWER] = basis.output_tokens * price.per_million_output / MILLION / count
        if basis.cached_tokens and price.per_million_cached is not None:
            by_count[CACHED] = basis.cached_tokens * price.per_million_cached / MILLION / count
    else:
        if not rate or gpus is None:
            return None
        paid = machines(price, gpus)
        by_time[MACHINES] = sum(hourly(price).values(), Decimal(0)) * paid / (HOUR_S * rate) / utilization
        if dynamic := energy_per_hour(price.energy):
            by_time[ENERGY] = dynamic * paid / (HOUR_S * rate)
    if price.egress_per_gb is not None:
        by_count[EGRESS] = basis.bytes_out * price.egress_per_gb / GIGA / count
    by_time = {part: _rounded(amount) for part, amount in by_time.items()}
    by_count = {part: _rounded(amount) for part, amount in by_count.items()}
    both = by_time | by_count
    moving, standing = sum(by_time.values(), Decimal(0)), sum(by_count.values(), Decimal(0))
    low, high = _ends(basis, moving, standing)
    parts = {part: both[part] for part in PARTS if part in both}
    return Cost(parts=parts, total=moving + standing, low=low, high=high)


def _ends(basis: Basis, by_time: Decimal, by_count: Decimal) -> tuple[Decimal | None, Decimal | None]:
    """A rate of [low, high] costs [P / high, P / low]; what was counted does not move with it."""
    if not by_time:
        return by_count, by_count
    if basis.low is None or basis.high is None:
        return None, None
    return _rounded(by_time / basis.high + by_count), _rounded(by_time / basis.low + by_count)


def _rounded(amount: Decimal) -> Decimal:
    return amount.quantize(SMALLEST, rounding=ROUND_HALF_EVEN)


def offer(evidence: Evidence, price: Price, name: str, at: str, *, gpus: int | None, utilization: Decimal) -> Offer:
    """A result under a price. `at` is where the price stands, for errors; `gpus` what the run used, if known.

    Raises UserError for GPUs that nobody has said, for cached tokens without a price, and for a utilization without a
    capacity: a run that was itself at 40 % would be counted idle twice.
    """
    found = basis(evidence)
    by_token = isinstance(price, PerToken)
    if not by_token and gpus is None:
        hint = f"--gpus {evidence.name}=4, or `loadgen run --gpus` next time"
        raise UserError("the run does not say how many GPUs it used", evidence.folder, hint)
    if not by_token and utilization != 1 and not found.is_capacity:
        what = f"--utilization without a capacity: {evidence.name} was measured at a load of its own"
        hint = "a run that was itself half idle would be counted idle twice; find its capacity, or leave it out"
        raise UserError(what, evidence.folder, hint)
    if isinstance(price, PerToken) and found.cached_tokens and price.per_million_cached is None:
        what = f"{found.cached_tokens:,} prompt tokens came from a cache, and {price.name} has no price for them"
        raise UserError(what, at, "supply per_million_cached (equal to per_million_input where there is no discount)")
    if not by_token and not found.rates[REQUEST]:
        what = "the run has no steady rate: nothing ended while load was offered"
        raise UserError(what, evidence.folder, "a longer run: --duration, --num-requests")
    costs = {unit: cost(found, price, gpus, unit, utilization) for unit in UNITS}
    return Offer(
        name=name,
        evidence=evidence,
        price=price,
        basis=found,
        gpus=gpus,
        gpus_paid=None if isinstance(price, PerToken) or gpus is None else machines(price, gpus) * (price.gpus or 1),
        utilization=Decimal(1) if by_token else utilization,
        hourly=_paid_hourly(price, gpus),
        costs=costs,
        power=_power(found, price, gpus),
        notes=tuple(_notes(evidence, found, price, gpus)),
    )


def _paid_hourly(price: Price, gpus: int | None) -> dict[str, Decimal]:
    if isinstance(price, PerToken) or gpus is None:
        return {}
    paid = machines(price, gpus)
    return {part: amount * paid for part, amount in hourly(price).items()}


def _power(basis: Basis, price: Price, gpus: int | None) -> Power | None:
    """joules per token = W x PUE / (tokens/s): the figure at the measured rate, whoever pays it."""
    rate = basis.rates[OUTPUT]
    if isinstance(price, PerToken) or price.energy is None or gpus is None or not rate:
        return None
    watts = price.energy.watts * price.energy.pue * machines(price, gpus)
    per_s = rate * MILLION
    kwh = {unit: None if not r else watts / KILO / HOUR_S / r for unit, r in basis.rates.items()}
    return Power(
        watts=watts,
        joules_per_output_token=watts / per_s,
        output_tokens_per_s_per_mw=per_s / (watts / MILLION),
        kwh=kwh,
    )


def _notes(evidence: Evidence, basis: Basis, price: Price, gpus: int | None) -> Iterator[str]:
    yield from notes(evidence)
    if not isinstance(price, PerToken) and gpus is not None:
        yield from _machine_notes(evidence, basis, price, gpus)
    if isinstance(price, PerToken):
        if not basis.cached_known and price.per_million_cached is not None:
            yield "the server does not say what came from its cache: all prompt tokens are priced as fresh"
        failed = sum(one.requests.failed + one.requests.lost for one in evidence.summaries)
        if failed:
            counted = sum(one.tokens.failed_input + one.tokens.failed_output for one in evidence.summaries)
            yield f"{failed:,} failed requests: {counted:,} tokens of theirs are known and in the price"
    resent = sum(one.requests.resent for one in evidence.summaries)
    if resent:
        yield f"{resent:,} requests were sent again after a reset; what the first sending cost is not known"
    if price.as_of == "undated":
        yield "the price has no date"


def _machine_notes(evidence: Evidence, basis: Basis, price: Rented | Owned, gpus: int) -> Iterator[str]:
    summary = evidence.summary
    if not basis.is_capacity:
        yield "priced at the load it was given, not at its capacity: more load may cost less per request"
    paid = machines(price, gpus)
    if isinstance(price, Rented) and price.gpus is not None and paid * price.gpus != gpus:
        yield f"{gpus} GPUs were used, {paid * price.gpus} are paid: machines are rented whole"
    if isinstance(price, Owned) and gpus != price.gpus:
        yield f"pays {gpus} of the {price.gpus} GPUs that were bought"
    steady, answer = summary.window.steady.duration_s, summary.e2e_ms.p50
    is_short = steady is not None and answer is not None and answer / 1e3 * SHORT_WINDOW > steady
    if not basis.is_capacity and is_short and not summary.warmup.scheduled:
        yield "no warm-up, and a run short beside its answers: the steady rate holds its ramp and reads low"
    offered = summary.load.offered_rps
    found = evidence.capacity
    away = found is not None and offered is not None and abs(offered / found.rate_per_s - 1) > AWAY
    if found is not None and found.unit == "requests" and away:
        yield f"what a request is was measured at {offered:.3g}/s, away from the capacity"
