"""Computes what a unit of work costs, from prices and measured rates: amounts of money with parts and intervals.

Pure. Amounts are `decimal.Decimal`. Parts are rounded once (to 1e-12 of the currency) and their sum is the total. The
formulas and their limits are in docs/cost.md; `comparison.py` decides which results may be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_EVEN, Decimal

import msgspec
from loadgen_sdk.price_file import UNDATED, PerToken
from loadgen_sdk.prices import token_costs
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.core.metrics.blocks import Sessions
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.evidence import Evidence, notes, own_target, starts
from loadgen.pricing.prices import NO_SOURCE, Energy, Owned, Price, Rented
from loadgen.pricing.prompt_lengths import TokenAmounts, count_long_prompts
from loadgen.pricing.reasons import note, texts
from loadgen.pricing.spread import Spread, rate_of_repeats
from loadgen.repeated.capacity import Capacity

# The units that a cost is per: keys of `rates` and `counts` of a Basis, and of the costs of an Offer.
REQUEST, GOOD, TASK, OUTPUT, TOTAL = (
    "request",
    "good_request",
    "task",
    "million_output_tokens",
    "million_tokens",
)
UNITS = (REQUEST, GOOD, TASK, OUTPUT, TOTAL)

# The parts of a cost.
MACHINES, ENERGY, INPUT, CACHED, ANSWER, EGRESS = (
    "machines",
    "energy",
    "input",
    "cached_input",
    "output",
    "egress",
)
WRITTEN = "cache_write"
PARTS = (MACHINES, ENERGY, INPUT, CACHED, ANSWER, EGRESS, WRITTEN)
BY_TIME = (
    MACHINES,
    ENERGY,
)  # these depend on the rate, and so have its interval; the others on counts

HOURS_PER_YEAR = 8760
MONTHS_PER_YEAR = 12
SMALLEST = Decimal("1e-12")
MILLION, GIGA, KILO, HOUR_S = Decimal(10**6), Decimal(10**9), Decimal(1000), Decimal(3600)
AWAY = 0.1  # relative distance from the capacity at which requests may have another size and mix
RAMP = Decimal("0.01")  # share of the tokens/s that a run from empty may lack without a note
NEAR = 0.01  # share by which a run may be offered less than asked without a note
SHORT_WINDOW = (
    20  # a steady window of fewer answer durations than this still shows the ramp-up in its rates
)


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """The measured quantities behind a cost: `rates` per second by unit, `counts` and amounts over the measured runs.

    Token and byte amounts include failed requests where these are known, because they are paid too. `low` and `high`
    are the ends of the rate's interval relative to its middle (0.9, 1.1), with `confidence`. They are None without an
    interval; a capacity with a confidence, or repeats, has one.
    """

    label: str  # "capacity", "at this load", "at this load, 3 repeats"
    is_capacity: bool
    rates: Mapping[str, Decimal | None]
    counts: Mapping[str, Decimal | None]
    input_tokens: Decimal  # without those from a cache
    cached_tokens: Decimal
    cached_known: bool
    written_tokens: (
        Decimal | None
    )  # of the input tokens, those that were written to a cache; None: nobody says
    output_tokens: Decimal
    bytes_out: Decimal
    # those of requests with prompts above the length at which the price changes
    long_prompts: TokenAmounts | None = None
    low: Decimal | None = None
    high: Decimal | None = None
    confidence: float | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of money per unit. `total` is exactly the sum of `parts`.

    `low` and `high` come from the interval of the rate. Both are None where the rate has no interval, and equal to the
    total where the cost does not depend on a rate.
    """

    parts: Mapping[str, Decimal]
    total: Decimal
    low: Decimal | None
    high: Decimal | None


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """Power and energy at the measured rate, with PUE. Its money is part of the cost."""

    watts: Decimal  # of all machines that are paid for, with PUE
    joules_per_output_token: Decimal
    output_tokens_per_s_per_mw: Decimal
    kwh: Mapping[str, Decimal | None]  # per unit


class ClassCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the units of one class cost. It pays for its own tokens, or for its share of the machines' time."""

    tokens_share: Decimal  # of all prompt and output tokens: its share of the machines
    costs: Mapping[str, Cost | None]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """A step's part of the cost of a task that ended ok. `per_task` None: `why` says what is missing."""

    price: Price | None
    per_task: Decimal | None
    why: str = ""
    code: str = ""  # of the fault behind `why`


class MeasuredEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """What the accelerators of the runs used while the load was steady: beside `Power`, which is by the price file.

    It holds no other part of the machine, so no money of a cost is computed from it. `money` is the price of the energy
    of each unit alone, with PUE, where the price says what a kWh costs.
    """

    watts: Decimal
    joules_per_output_token: Decimal
    joules_per_request: Decimal | None
    error: Decimal  # relative
    money: Mapping[str, Decimal | None]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A result under a price, and what its units cost. `notes` are to be shown beside it."""

    name: str
    evidence: Evidence
    price: Price
    basis: Basis
    gpus: int | None  # used by the run; None: not known
    gpus_paid: Decimal | None  # None: priced by the token
    utilization: Decimal
    hourly: Mapping[
        str, Decimal
    ]  # parts of the hourly price of those GPUs; {} when priced by the token
    costs: Mapping[str, Cost | None]
    power: Power | None
    measured: MeasuredEnergy | None
    note_codes: tuple[ReasonCode, ...]
    classes: Mapping[str, ClassCost]  # {} where all requests are of one kind
    steps: Mapping[str, StepCost] = msgspec.field(
        default_factory=dict
    )  # of tasks: `step_cost.with_steps`

    @property
    def notes(self) -> tuple[str, ...]:
        return texts(self.note_codes)


def decimal(number: float) -> Decimal:
    """The decimal number of the float's shortest text: 0.1 becomes Decimal("0.1")."""
    return Decimal(repr(number))


def basis(evidence: Evidence) -> Basis:
    """Rates and counts of a capacity, of one run, or of repeats (means of their rates, sums of their counts).

    Of runs these are the steady rates of metrics.md, of Offline runs those of the measurement
    window. Of a capacity it is its rate, multiplied by the share of good requests and of tasks in
    its run; of tokens the steady rates that its run showed.
    """
    summaries = evidence.summaries
    totals = _totals(summaries)
    if evidence.capacity is not None:
        return _at_capacity(evidence, totals)
    runs = [_rates(summary, whole=evidence.at_once) for summary in summaries]
    means: dict[str, float | None] = dict.fromkeys(UNITS)
    interval = Spread(mid=1.0)
    for unit in UNITS:
        known = [rate for run in runs if (rate := run[unit]) is not None]
        if len(known) == len(runs):
            means[unit] = math.fsum(known) / len(known)
            if unit in (REQUEST, GOOD) and any(
                known
            ):  # the later one wins: that of good requests, if there are any
                interval = rate_of_repeats(known)
    repeated = len(runs) > 1 and interval.low is not None and interval.high is not None
    return replace(
        totals,
        label=("Offline" if evidence.at_once else "at this load")
        + (f", {len(runs)} repeats" if len(runs) > 1 else ""),
        rates={unit: None if mean is None else decimal(mean) for unit, mean in means.items()},
        low=decimal(interval.low / interval.mid) if repeated and interval.low else None,
        high=decimal(interval.high / interval.mid) if repeated and interval.high else None,
        confidence=0.95 if repeated else None,
    )


def _rates(summary: Summary, *, whole: bool) -> dict[str, float | None]:
    """The steady rates of a run; `whole`: those from the first due request to the last output, LoadGen's of Offline."""
    load, goodput, sessions, tokens = (
        summary.load,
        summary.goodput,
        tasks_of(summary),
        own_target(summary).tokens,
    )
    if whole:
        requests, good, output, total = (
            load.completed_rps,
            goodput.rps,
            tokens.output_per_s,
            tokens.total_per_s,
        )
        tasks = sessions.ok_per_s if sessions is not None else None
    else:
        requests, good = load.steady_completed_rps, goodput.steady_rps
        output, total = tokens.steady_output_per_s, tokens.steady_total_per_s
        tasks = sessions.steady_ok_per_s if sessions is not None else None
    return {
        REQUEST: requests,
        GOOD: good if summary.verdict.valid else None,
        TASK: tasks,
        OUTPUT: None if output is None else output / 1e6,
        TOTAL: None if total is None else total / 1e6,
    }


def tasks_of(summary: Summary) -> Sessions | None:
    """The tasks of a run; None beside classes of single requests, for which the tasks would pay too."""
    return None if any(part.sessions is None for part in summary.classes) else summary.sessions


def _totals(summaries: tuple[Summary, ...]) -> Basis:
    """Counts and amounts summed over all runs; without rates, and without steps that have prices of their own."""
    summaries = tuple(map(own_target, summaries))

    def added(values: list[int | None]) -> Decimal | None:
        return (
            None
            if any(value is None for value in values)
            else Decimal(sum(value or 0 for value in values))
        )

    tokens = [summary.tokens for summary in summaries]
    input_ok, output_ok = added([t.input for t in tokens]), added([t.output for t in tokens])
    cached = added([t.cached for t in tokens])
    failed_input, failed_output = (
        sum(t.failed_input for t in tokens),
        sum(t.failed_output for t in tokens),
    )
    assert (
        input_ok is not None and output_ok is not None
    )  # inputs.read_evidence refuses runs without token counts
    valid = all(summary.verdict.valid for summary in summaries)
    return Basis(
        label="",
        is_capacity=False,
        rates={},
        counts={
            REQUEST: Decimal(sum(summary.requests.ok for summary in summaries)),
            GOOD: added([summary.goodput.good for summary in summaries]) if valid else None,
            TASK: added([None if (tasks := tasks_of(s)) is None else tasks.ok for s in summaries]),
            OUTPUT: output_ok / MILLION,
            TOTAL: (input_ok + output_ok) / MILLION,
        },
        input_tokens=input_ok + failed_input - (cached or 0),
        cached_tokens=cached or Decimal(0),
        cached_known=cached is not None,
        written_tokens=added([t.cache_written for t in tokens]),
        output_tokens=output_ok + failed_output,
        bytes_out=Decimal(sum(summary.bytes.received for summary in summaries)),
    )


def _at_capacity(evidence: Evidence, totals: Basis) -> Basis:
    capacity, summary = evidence.capacity, evidence.summary
    assert capacity is not None
    offered = starts(summary) if capacity.unit != "requests" else summary.requests.decided
    rate = decimal(capacity.rate_per_s)
    rates = {
        unit: None if count is None else count * rate / offered
        for unit, count in totals.counts.items()
    }
    for unit, per_s in (
        (OUTPUT, capacity.output_tokens_per_s),
        (TOTAL, capacity.total_tokens_per_s),
    ):
        if per_s is not None:
            rates[unit] = decimal(per_s / 1e6)
    return replace(
        totals,
        label="capacity",
        is_capacity=True,
        rates=rates,
        low=None if capacity.low_per_s is None else decimal(capacity.low_per_s) / rate,
        high=None if capacity.high_per_s is None else decimal(capacity.high_per_s) / rate,
        confidence=None if capacity.low_per_s is None else capacity.confidence,
    )


def machines(price: Rented | Owned, gpus: int) -> Decimal:
    """Machines that a run on `gpus` GPUs pays for: whole ones when rented, a fraction of what was bought."""
    if price.gpus is None:
        return Decimal(gpus)  # sold by the GPU
    if isinstance(price, Owned):
        return Decimal(gpus) / price.gpus
    return Decimal(math.ceil(gpus / price.gpus))


def hourly(price: Rented | Owned) -> dict[str, Decimal]:
    """The parts of the hourly price of one machine (of one GPU, where it is sold by the GPU)."""
    parts: dict[str, Decimal] = {}
    if isinstance(price, Owned):
        parts["capital"] = _capital_per_year(price) / HOURS_PER_YEAR
        parts["staff"] = price.capital * price.staff_share / HOURS_PER_YEAR
    elif price.per_hour is not None:
        parts["rent"] = price.per_hour
    elif price.per_gpu_hour is not None:
        parts["rent"] = price.per_gpu_hour * (price.gpus or 1)
    if isinstance(price, Rented) and price.lost_share is not None:
        parts["interruptions"] = parts["rent"] * price.lost_share / (1 - price.lost_share)
    for part, per_month in (
        ("storage", price.storage_per_month),
        ("support", price.support_per_month),
    ):
        parts[part] = (per_month or Decimal(0)) * MONTHS_PER_YEAR / HOURS_PER_YEAR
    energy = price.energy
    if energy is not None and energy.per_kwh is not None:
        if energy.counted == "hourly":
            parts["power"] = energy.watts / KILO * energy.pue * energy.per_kwh
        elif energy.counted == "by_load" and energy.idle_watts is not None:
            parts["idle power"] = energy.idle_watts / KILO * energy.pue * energy.per_kwh
    return {part: amount for part, amount in parts.items() if amount}


def _capital_per_year(price: Owned) -> Decimal:
    """The capital written off evenly, or, with a discount r, as an annuity: capital x r / (1 - (1 + r) ^ -years)."""
    if price.discount is None:
        return price.capital / price.years
    return price.capital * price.discount / (1 - (1 + price.discount) ** -price.years)


def energy_per_hour(energy: Energy | None) -> Decimal:
    """Money per hour for the power that load adds on one machine; 0 unless energy is counted `by_load`."""
    if (
        energy is None
        or energy.counted != "by_load"
        or energy.per_kwh is None
        or energy.idle_watts is None
    ):
        return Decimal(0)
    return (energy.watts - energy.idle_watts) / KILO * energy.pue * energy.per_kwh


def cost(
    basis: Basis,
    price: Price,
    gpus: int | None,
    unit: str,
    utilization: Decimal = Decimal(1),
    share: Decimal = Decimal(1),
) -> Cost | None:
    """What one `unit` costs; None when none was measured. Only the machines' part is divided by utilization.

    `share`: of the machines, which is what a class of requests pays.
    """
    count, rate = basis.counts[unit], basis.rates[unit]
    if not count:
        return None
    amounts: dict[str, Decimal] = {}
    if isinstance(price, PerToken):
        paid_by_part = _costs_of_tokens(basis, price)
        amounts = {part: amount / count for part, amount in paid_by_part.items()}
    else:
        if not rate or gpus is None:
            return None
        count_paid, per_hour = machines(price, gpus) * share, HOUR_S * rate
        amounts[MACHINES] = (
            sum(hourly(price).values(), Decimal(0)) * count_paid / per_hour / utilization
        )
        if load_energy := energy_per_hour(price.energy):
            amounts[ENERGY] = load_energy * count_paid / per_hour
    if price.egress_per_gb is not None:
        amounts[EGRESS] = basis.bytes_out * price.egress_per_gb / GIGA / count
    parts = {part: _rounded(amounts[part]) for part in PARTS if part in amounts}
    by_time = sum((parts[part] for part in BY_TIME if part in parts), Decimal(0))
    by_count = sum(parts.values(), Decimal(0)) - by_time
    low = high = None if by_time else by_count
    if by_time and basis.low is not None and basis.high is not None:
        low, high = (
            _rounded(by_time / basis.high + by_count),
            _rounded(by_time / basis.low + by_count),
        )
    return Cost(parts=parts, total=by_time + by_count, low=low, high=high)


def _costs_of_tokens(basis: Basis, price: PerToken) -> dict[str, Decimal]:
    """Return what the tokens of a basis cost, by part, at the price for their prompt lengths."""
    tokens = TokenAmounts(
        fresh=basis.input_tokens,
        written=basis.written_tokens,
        cached=basis.cached_tokens,
        output=basis.output_tokens,
    )
    long_prompts = basis.long_prompts
    if price.above is None or long_prompts is None:
        return costs_by_token(price, tokens.fresh, tokens.written, tokens.cached, tokens.output)
    short = tokens.without(long_prompts)
    costs = costs_by_token(price, short.fresh, short.written, short.cached, short.output)
    costs_above = costs_by_token(
        price.above,
        long_prompts.fresh,
        long_prompts.written,
        long_prompts.cached,
        long_prompts.output,
    )
    return {
        part: costs.get(part, Decimal(0)) + costs_above.get(part, Decimal(0))
        for part in (*costs, *costs_above)
    }


def priced_basis(evidence: Evidence, price: Price) -> Basis:
    """Return the basis of a cost, with the long prompts if the price changes with their length.

    Raises UserError if the records that tell the lengths are missing.
    """
    found = basis(evidence)
    if not isinstance(price, PerToken) or price.above_prompt_tokens is None:
        return found
    return replace(found, long_prompts=count_long_prompts(evidence, price.above_prompt_tokens))


def costs_by_token(
    price: PerToken, fresh: Decimal, written: Decimal | None, cached: Decimal, output: Decimal
) -> dict[str, Decimal]:
    """What the tokens cost, by part. fresh: of the prompts, those that came from no cache; cached: those that did.

    written: how many of the fresh went into a cache; None: answers do not say, and where writing has a price, all did.
    """
    writing, told = price.per_million_cache_write is not None, written is not None
    into = (fresh if written is None else written) if writing else Decimal(0)
    costs = token_costs((fresh - into, into, cached, output), price.per_million)
    shown = (
        not writing or told,
        writing,
        bool(cached) and price.per_million_cached is not None,
        True,
    )
    parts = zip((INPUT, WRITTEN, CACHED, ANSWER), costs, shown, strict=True)
    return {part: amount for part, amount, is_shown in parts if is_shown}


def _rounded(amount: Decimal) -> Decimal:
    return amount.quantize(SMALLEST, rounding=ROUND_HALF_EVEN)


def offer(
    evidence: Evidence, price: Price, name: str, at: str, *, gpus: int | None, utilization: Decimal
) -> Offer:
    """A result under a price. `at`: the price's place in its file, for errors. `gpus`: those the run used, if known.

    Raises UserError for an unknown number of GPUs, for cached tokens without a price, and for a utilization without a
    capacity: the idle time of a run that was itself at 40 % would count twice.
    """
    rate_basis = priced_basis(evidence, price)
    is_per_token = isinstance(price, PerToken)
    if not is_per_token and gpus is None:
        hint = f"--gpus {evidence.name}=4, or `loadgen run --gpus` next time"
        raise UserError(
            "missing_option", "the run does not say how many GPUs it used", evidence.folder, hint
        )
    if not is_per_token and utilization != 1 and not rate_basis.is_capacity:
        what = (
            f"--utilization without a capacity: {evidence.name} was measured at a load of its own"
        )
        hint = "a run that was itself half idle would be counted idle twice; find its capacity, or leave it out"
        raise UserError("no_effect", what, evidence.folder, hint)
    if (
        isinstance(price, PerToken)
        and rate_basis.cached_tokens
        and price.per_million_cached is None
    ):
        what = f"{rate_basis.cached_tokens:,} prompt tokens came from a cache, and {price.name} has no price for them"
        raise UserError(
            "no_price",
            what,
            at,
            "supply per_million_cached (equal to per_million_input where there is no discount)",
        )
    if not is_per_token and not rate_basis.rates[REQUEST]:
        what = "the run has no steady-state window, and so no rate for a price per unit"
        raise UserError(
            "no_figure", what, evidence.folder, "a longer run: --duration, --num-requests"
        )
    paid = None if isinstance(price, PerToken) or gpus is None else machines(price, gpus)
    return Offer(
        name=name,
        evidence=evidence,
        price=price,
        basis=rate_basis,
        gpus=gpus,
        gpus_paid=None if isinstance(price, PerToken) or paid is None else paid * (price.gpus or 1),
        utilization=Decimal(1) if is_per_token else utilization,
        hourly={}
        if isinstance(price, PerToken) or paid is None
        else {k: v * paid for k, v in hourly(price).items()},
        costs={unit: cost(rate_basis, price, gpus, unit, utilization) for unit in UNITS},
        power=_power(rate_basis, price, gpus),
        measured=_measured(
            evidence.summaries, None if isinstance(price, PerToken) else price.energy
        ),
        note_codes=tuple(_notes(evidence, rate_basis, price, gpus)),
        classes=_classes(evidence, rate_basis, price, gpus, utilization),
    )


def _classes(
    evidence: Evidence, whole: Basis, price: Price, gpus: int | None, utilization: Decimal
) -> dict[str, ClassCost]:
    """Return what each class costs, with the rates of its units in proportion to the whole rate.

    Returns {} for a price that changes with the length of the prompt, which is not known by class.
    """
    if isinstance(price, PerToken) and price.above is not None:
        return {}
    requests = whole.counts[REQUEST]
    parts: dict[str, ClassCost] = {}
    for name in [part.name for part in evidence.summary.classes]:
        own = [_of_class(summary, name) for summary in evidence.summaries]
        if None in own or not requests:
            continue
        totals = _totals(tuple(summary for summary in own if summary is not None))
        rate = whole.rates[REQUEST]
        rates = {
            unit: None if rate is None or count is None else rate * count / requests
            for unit, count in totals.counts.items()
        }
        all_tokens, tokens = whole.counts[TOTAL], totals.counts[TOTAL]
        share = tokens / all_tokens if tokens is not None and all_tokens else Decimal(0)
        class_basis = replace(
            totals, rates=rates, low=whole.low, high=whole.high, confidence=whole.confidence
        )
        costs = {unit: cost(class_basis, price, gpus, unit, utilization, share) for unit in UNITS}
        parts[name] = ClassCost(tokens_share=share, costs=costs)
    return parts


def _of_class(summary: Summary, name: str) -> Summary | None:
    """A summary with the counts of one class; None where it has none of this name or their tokens are not known."""
    part = next((one for one in summary.classes if one.name == name), None)
    if part is None or part.tokens.input is None or part.tokens.output is None:
        return None
    return msgspec.structs.replace(
        summary,
        requests=part.requests,
        tokens=part.tokens,
        goodput=part.goodput,
        sessions=part.sessions,
        bytes=part.bytes,
        classes=(),
    )


def _power(basis: Basis, price: Price, gpus: int | None) -> Power | None:
    """Power at the measured rate, whoever pays for it: joules per token = W x PUE / (tokens/s)."""
    rate = basis.rates[OUTPUT]
    if isinstance(price, PerToken) or price.energy is None or gpus is None or not rate:
        return None
    watts = price.energy.watts * price.energy.pue * machines(price, gpus)
    tokens_per_s = rate * MILLION
    kwh = {
        unit: watts / KILO / HOUR_S / per_s if per_s else None
        for unit, per_s in basis.rates.items()
    }
    return Power(
        watts=watts,
        joules_per_output_token=watts / tokens_per_s,
        output_tokens_per_s_per_mw=tokens_per_s / (watts / MILLION),
        kwh=kwh,
    )


def _measured(summaries: tuple[Summary, ...], priced: Energy | None) -> MeasuredEnergy | None:
    """Means over the runs; None where one of them has no energy."""
    used = [summary.energy for summary in summaries]
    known = [
        one
        for one in used
        if one is not None and one.watts and one.joules and one.joules_per_output_token
    ]
    if not known or len(known) < len(used):
        return None

    def mean(values: list[float | None]) -> Decimal | None:
        return (
            decimal(math.fsum(value or 0 for value in values) / len(values))
            if all(values)
            else None
        )

    watts, per_token = (
        mean([one.watts for one in known]),
        mean([one.joules_per_output_token for one in known]),
    )
    per_request = mean([one.joules_per_request for one in known])
    assert watts is not None and per_token is not None
    kwh_price = (
        None
        if priced is None or priced.per_kwh is None
        else priced.per_kwh * priced.pue / KILO / HOUR_S
    )
    joules = {REQUEST: per_request, OUTPUT: per_token * MILLION}
    return MeasuredEnergy(
        watts=watts,
        joules_per_output_token=per_token,
        joules_per_request=per_request,
        error=decimal(max((one.error_j or 0.0) / (one.joules or 1.0) for one in known)),
        money={
            unit: None if j is None or kwh_price is None else _rounded(j * kwh_price)
            for unit, j in joules.items()
        },
    )


def _notes(
    evidence: Evidence, basis: Basis, price: Price, gpus: int | None
) -> Iterator[ReasonCode]:
    yield from notes(evidence)
    if apart := [step.name for step in evidence.summary.steps if step.targets]:
        yield note("steps_apart", steps=apart)
    if not isinstance(price, PerToken) and gpus is not None:
        yield from _machine_notes(evidence, basis, price, gpus)
        used, declared = _measured(evidence.summaries, price.energy), _power(basis, price, gpus)
        if used is not None and declared is not None and price.energy is not None:
            at_least = used.watts * (1 - used.error) * price.energy.pue
            if at_least > declared.watts:
                yield note("power_understated", measured=at_least, declared=declared.watts)
    if isinstance(price, PerToken):
        if price.per_million_cache_write is not None and basis.written_tokens is None:
            yield note("all_written")
        if (price.per_million_cached or 0) > price.per_million_input:
            yield note(
                "cached_above_input",
                cached=str(price.per_million_cached),
                input=str(price.per_million_input),
            )
        if not basis.cached_known and price.per_million_cached is not None:
            yield note("cached_unknown")
        failed = sum(
            summary.requests.failed + summary.requests.lost for summary in evidence.summaries
        )
        if failed:
            counted = sum(
                summary.tokens.failed_input + summary.tokens.failed_output
                for summary in evidence.summaries
            )
            yield note("failed_paid", failed=failed, tokens=counted)
    resent = sum(summary.requests.resent for summary in evidence.summaries)
    if resent:
        yield note("resent", requests=resent)
    if price.as_of == UNDATED:
        yield note("price_undated")
    if price.source == NO_SOURCE:
        yield note("price_unsourced")
    requests = basis.counts[REQUEST]
    request_kb = float(basis.bytes_out / requests / KILO) if basis.bytes_out and requests else None
    if price.egress_per_gb is None:
        yield note("egress_unpriced", request_kb=request_kb)
    elif request_kb is None:
        yield note("egress_uncounted")


def _began_empty(basis: Basis, capacity: Capacity) -> Iterator[ReasonCode]:
    """Said where requests/s times their length is more than the tokens/s that the run showed."""
    requests, count, tokens = basis.rates[REQUEST], basis.counts[REQUEST], basis.rates[OUTPUT]
    millions = basis.counts[OUTPUT]
    if not (requests and count and tokens and millions) or capacity.output_tokens_per_s is None:
        return
    implied = requests * millions / count
    if tokens < implied * (1 - RAMP):
        yield note(
            "began_empty",
            output_tokens_per_s=float(tokens * MILLION),
            missing=float(1 - tokens / implied),
            requests_per_s=float(requests),
            output_tokens=float(millions * MILLION / count),
        )


_GPU = re.compile(r"(?<![A-Z0-9])(?:GB|GH|B|H|A|L|MI|RTX)[0-9]{2,4}X?(?![0-9])")


def other_machine(summary: Summary, price: Rented | Owned) -> ReasonCode | None:
    """How the machine of a price differs from the one of the run; None where it does not, or is not known.

    By the GPU that the run's shape or name tells, else by the shape.
    """
    target = summary.target
    told = set(_GPU.findall(f"{target.shape} {target.name}".upper()))
    priced = set(_GPU.findall(price.gpu.upper()))
    if told and priced and not told & priced:
        return note(
            "other_gpu", measured=sorted(told), where=target.shape or target.name, priced=price.gpu
        )
    if target.shape and price.shape and target.shape.lower() != price.shape.lower():
        return note(
            "other_shape", measured=target.shape, provider=price.provider, priced=price.shape
        )
    return None


def _machine_notes(
    evidence: Evidence, basis: Basis, price: Rented | Owned, gpus: int
) -> Iterator[ReasonCode]:
    summary = evidence.summary
    if not basis.is_capacity and not evidence.at_once:
        yield note("own_load")
    if other := other_machine(summary, price):
        yield other
    if isinstance(price, Rented) and price.gpus is None:
        yield note("machine_unknown")
    machine_count = machines(price, gpus)
    if isinstance(price, Rented) and price.gpus is not None and machine_count * price.gpus != gpus:
        yield note("whole_machines", used=gpus, paid=int(machine_count * price.gpus))
    if isinstance(price, Owned) and gpus != price.gpus:
        yield note("part_of_machines", used=gpus, bought=price.gpus)
    steady_s, answer_p50_ms = summary.window.steady.duration_s, summary.e2e_ms.p50
    is_short = (
        steady_s is not None
        and answer_p50_ms is not None
        and answer_p50_ms / 1e3 * SHORT_WINDOW > steady_s
    )
    if not basis.is_capacity and not evidence.at_once and is_short and not summary.warmup.scheduled:
        yield note("short_run")
    capacity = evidence.capacity
    if capacity is None:
        return
    yield from _began_empty(basis, capacity)
    offered_rps = summary.load.offered_rps
    if capacity.unit != "requests" or offered_rps is None:
        return
    away = offered_rps / capacity.rate_per_s - 1
    if abs(away) > AWAY:
        yield note("off_capacity", offered_per_s=offered_rps)
    elif away < -NEAR:
        yield note("offered_less", asked_per_s=capacity.rate_per_s, offered_per_s=offered_rps)
