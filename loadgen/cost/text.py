"""What requests cost in words and tables, of which `sections.py` makes the report. CSV and JSON are in `cost_data.py`.

Pure: takes an `OfferComparison`. Amounts are exact `Decimal` values; they are rounded only for
printing, such that the printed parts add up to the printed total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

from loadgen_sdk.price_file import PerToken

from loadgen.core import format
from loadgen.core.format import NONE
from loadgen.cost.by_year import YEARS
from loadgen.cost.by_year import by_year as years_of
from loadgen.cost.comparison import OfferComparison, has_lower_bound, slo_words
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned, describe_price
from loadgen.pricing.unit_cost import UnitCost
from loadgen.pricing.units import GOOD, OUTPUT, PARTS, REQUEST, TASK, TOTAL, UNITS
from loadgen.render.section import Table, Warned
from loadgen.runs.headline import missed_by
from loadgen.runs.rates import MEASUREMENT_WINDOW, STEADY_STATE_WINDOW

DIGITS = 4  # significant digits of a printed amount

# How many units a printed amount is for, and the name of that quantity. Token units are already millions.
PER: Mapping[str, tuple[int, str]] = {
    REQUEST: (1000, "1,000 requests"),
    GOOD: (1000, "1,000 good requests"),
    TASK: (1000, "1,000 successful tasks"),
    OUTPUT: (1, "million output tokens"),
    TOTAL: (1, "million input + output tokens"),
}
EXPLAINED = {
    REQUEST: "completed requests; failed ones are paid for and not counted",
    GOOD: "completed within every SLO limit, in a valid run",
    TASK: "conversations of which every turn was completed",
    OUTPUT: "all costs over output tokens, as MLPerf counts",
    TOTAL: "all costs over input + output tokens, as many public dashboards count",
}
PART_NAMES = {
    "machines": "GPU-hours",
    "energy": "energy",
    "input": "input tokens",
    "cached_input": "cached input tokens",
}
PART_NAMES |= {
    "output": "output tokens",
    "egress": "egress",
    "cache_write": "input tokens, written to a cache",
}


def money(amount: Decimal | None, digits: int = DIGITS) -> str:
    """An amount with `digits` significant digits and thousands separators, without exponent or binary floats."""
    if amount is None:
        return NONE
    return f"{amount.quantize(_step(amount, digits), rounding=ROUND_HALF_EVEN):,f}"


def _step(amount: Decimal, digits: int) -> Decimal:
    """The value of the last printed digit of an amount; never above 1."""
    place = min(amount.adjusted() - digits + 1, 0) if amount else -digits + 1
    return Decimal(1).scaleb(place)


def apportioned(cost: UnitCost, by: int) -> tuple[Decimal, dict[str, Decimal]]:
    """The total cost of `by` units and its parts, rounded to the last printed digit of the total.

    The rounded parts add up to the rounded total: parts are rounded down, and the remaining steps go to the parts that
    lost most (largest remainder).
    """
    total = cost.total * by
    step = _step(total, DIGITS)
    total = total.quantize(step, rounding=ROUND_HALF_EVEN)
    exact = {part: amount * by for part, amount in cost.parts.items()}
    parts = {part: amount.quantize(step, rounding=ROUND_FLOOR) for part, amount in exact.items()}
    steps_left = int((total - sum(parts.values(), Decimal(0))) / step)
    for part in sorted(parts, key=lambda part: parts[part] - exact[part])[:steps_left]:
        parts[part] += step
    return total, parts


def units(comparison: OfferComparison) -> list[str]:
    """The units in which at least one offer has a cost."""
    return [
        unit for unit in UNITS if any(offer.costs[unit] is not None for offer in comparison.offers)
    ]


def warned(comparison: OfferComparison) -> Iterator[Warned]:
    """What stands before any amount: simulated servers, bounds for capacities, prices that nobody offers."""
    if simulated := [offer.name for offer in comparison.offers if offer.evidence.simulated]:
        yield Warned("SIMULATED", f"no real server was measured: {', '.join(simulated)}")
    for offer in comparison.offers:
        yield from _warnings_of_run(offer)
    if bounds := [offer.name for offer in comparison.offers if has_lower_bound(offer)]:
        yield Warned(
            "A LOWER BOUND",
            f"all that is known of the capacity of {', '.join(bounds)}; costs at most",
        )
    if comparison.prices.sample:
        yield Warned(
            "SAMPLE PRICES", f"nobody's offer ({comparison.prices.file}). {comparison.prices.notes}"
        )


def _warnings_of_run(offer: PricedResult) -> Iterator[Warned]:
    """Yield what spoils the price of an offer: a missed SLO, or a load that does not last."""
    if is_slo_missed(offer):
        missed = "; ".join(
            dict.fromkeys(
                reason for summary in offer.evidence.summaries for reason in missed_by(summary)
            )
        )
        yield Warned("SLO MISSED", f"{offer.name}: {missed}", "bad")
    if isinstance(offer.price, PerToken):  # paid for tokens, however fast they come
        return
    for word, code in (("NOT SUSTAINED", "overloaded"), ("NOT KNOWN TO LAST", "not_sustained")):
        for note in offer.note_codes:
            if note.code == code:
                yield Warned(word, f"{offer.name}: {note.values['why']}")


def is_slo_missed(offer: PricedResult) -> bool:
    """Return whether a run behind an offer missed its SLO."""
    return any(summary.goodput.met is False for summary in offer.evidence.summaries)


def own_beside_rent(owned: Sequence[str], rented: Sequence[str]) -> str:
    """The caveat of hardware that was bought beside what is rented or paid by the token; "" for one of them alone."""
    if not owned or not rented:
        return ""
    return (
        f"Own hardware beside rent: an hour of {', '.join(owned)} is its purchase over the years of the price file, "
        f"with the power, people and space that the file names. {', '.join(rented)} can be given back and includes "
        "what the provider adds. The two compare only where the owned machines are in use for all those years."
    )


def answer(comparison: OfferComparison) -> Iterator[str]:
    """Yield a sentence for each offer: its cost in the compared unit, and an hour of its machines.

    An offer whose run missed its SLO has no price under it, so it gets none here; the tables have
    its costs.
    """
    currency, (by, name) = comparison.prices.currency, PER[comparison.unit]
    for shown, offer in zip(marked_names(comparison), comparison.offers, strict=True):
        cost = offer.costs[comparison.unit]
        if is_slo_missed(offer):
            yield (
                f"{shown}: no price under the SLO, because the run missed it ({standing(offer)}). "
                "What the requests of this run cost is below. To find a load that meets the SLO, "
                "run loadgen search."
            )
            continue
        if cost is None:
            yield f"{shown}: no cost per {name} is known."
            continue
        bounds = f" {ends(cost, by)}" if _has_width(cost) else ""
        hourly = sum(offer.hourly.values(), Decimal(0))
        gpus = ""
        if offer.gpus_paid is not None:
            used = (
                "always"
                if offer.utilization == 1
                else f"{format.percent(float(offer.utilization))} of the time"
            )
            gpus = f", {float(offer.gpus_paid):,g} GPUs at {money(hourly)} an hour, {used} in use"
        yield f"{shown}: {currency} {money(cost.total * by)}{bounds} per {name} ({standing(offer)}){gpus}."


def about_prices(comparison: OfferComparison) -> str:
    """Currency, price file, exchange rates."""
    prices = comparison.prices
    exchanged = f" Exchanged at {'; '.join(prices.exchanged)}." if prices.exchanged else ""
    return f"All amounts in {prices.currency}, prices from {prices.file}.{exchanged}"


def priced(offer: PricedResult) -> str:
    """The price of an offer in words: provider, rate, what the rate covers, date."""
    price = offer.price
    if isinstance(price, PerToken):
        cached = (
            f", {price.per_million_cached:f} cached" if price.per_million_cached is not None else ""
        )
        cached += (
            f", {price.per_million_cache_write:f} written"
            if price.per_million_cache_write is not None
            else ""
        )
        words = f"{price.model}: {price.per_million_input:f} input{cached}, {price.per_million_output:f} output per million"
    else:
        gpus = offer.gpus_paid
        hourly = sum(offer.hourly.values(), Decimal(0))
        breakdown = (
            " ("
            + " + ".join(f"{part} {money(amount)}" for part, amount in offer.hourly.items())
            + ")"
        )
        words = f"{price.shape or price.gpu}, {gpus:f} x {price.gpu}: {money(hourly)} per hour"
        words += breakdown if len(offer.hourly) > 1 or isinstance(price, Owned) else ""
        if offer.utilization != 1:
            words += f", paid at {offer.utilization:%} utilization".replace(".000000", "")
    where = f" in {price.region}" if price.region else ""
    return f"{price.provider}{where} {words}; {describe_price(price)}"


BY_YEAR = (
    "What is paid in each year at the measured rate, all hours times the utilization: machines that were bought in the "
    "first year and when their years are over. Worth now: with the discount of a price."
)


def by_year(comparison: OfferComparison) -> Table:
    """A row for each offer: what it costs in each year, in all, and what that is worth at the start."""
    rows = []
    for name, offer in zip(marked_names(comparison), comparison.offers, strict=True):
        if (years := years_of(offer)) is not None:
            amounts = (*years.paid, years.total, years.present)
            rows.append(
                (name, *(NONE if amount is None else f"{round(amount):,}" for amount in amounts))
            )
    head = (
        comparison.prices.currency,
        *(f"year {year}" for year in range(1, YEARS + 1)),
        "in all",
        "worth now",
    )
    return Table(head, rows)


def measured(offer: PricedResult) -> str:
    """The measurement behind an offer in words: rate or token counts, interval, SLO, folder."""
    basis, summary, capacity = offer.basis, offer.evidence.summary, offer.evidence.capacity
    workload = summary.run.workload or summary.run.name
    limits = slo_words(summary)
    place = (
        f"{summary.target.region}, {offer.evidence.folder}"
        if summary.target.region
        else offer.evidence.folder
    )
    if capacity is not None:
        lower_bound = "at least " if capacity.lower_bound else ""
        rate = f"{lower_bound}{format.quantity(capacity.rate_per_s)} {capacity.unit}/s"
        if capacity.low_per_s is not None and capacity.high_per_s is not None:
            ends = (
                f"{format.quantity(capacity.low_per_s)} to {format.quantity(capacity.high_per_s)}"
            )
            rate += f" ({capacity.confidence * 100:g} % interval {ends})"
        else:
            rate += " (no interval)"
        state = (
            f", {word}"
            if (word := capacity.state or ("confirmed" if capacity.confirmed else ""))
            else ""
        )
        shown = ""
        if capacity.output_tokens_per_s is not None:
            shown = f", {format.quantity(capacity.output_tokens_per_s, 4)} output tokens/s while its run offered load"
        words = f"{rate} of {workload}{state}{shown}"
        return f"capacity by {capacity.method}: {words}; under {limits}; from {place}"
    if isinstance(offer.price, PerToken):
        counted = (
            f"{format.counted(summary.requests.ok, 'request')} of {workload}, tokens as counted"
        )
        return f"{basis.label}: {counted}; SLO: {limits}; from {place}"
    request_rate = basis.rates[REQUEST]
    rate = f"{format.quantity(float(request_rate))}/s" if request_rate else NONE
    if basis.low is not None and basis.high is not None and request_rate:
        ends = f"{format.quantity(float(request_rate * basis.low))} to {format.quantity(float(request_rate * basis.high))}"
        rate += f" (95 % interval {ends})"
    window = MEASUREMENT_WINDOW if offer.evidence.at_once else STEADY_STATE_WINDOW
    return (
        f"{basis.label}: {rate} of {workload} completed in the {window}; SLO: {limits}; "
        f"from {place}"
    )


def standing(offer: PricedResult) -> str:
    """A short label for every figure of an offer: the basis of its rate, then what stands against it."""
    marks = ["simulated"] if offer.evidence.simulated else []
    marks += [] if offer.evidence.valid else ["INVALID"]
    marks += ["SLO missed"] if is_slo_missed(offer) else []
    marks += ["not sustained"] if _has_note(offer, "overloaded") else []
    marks += (
        ["ANOTHER MACHINE"]
        if _has_note(offer, "other_gpu") or _has_note(offer, "other_shape")
        else []
    )
    return ", ".join([offer.basis.label, *marks])


def _has_note(offer: PricedResult, code: str) -> bool:
    return any(note.code == code for note in offer.note_codes)


def marked_names(comparison: OfferComparison) -> list[str]:
    """The names of the offers, those that are not comparable with the first with a star."""
    pairs = zip(comparison.offers, comparison.against_first, strict=True)
    return [offer.name + " *" * bool(differences) for offer, differences in pairs]


def costs(comparison: OfferComparison) -> Table:
    """The costs by unit, one column per offer: the basis of each, then each cost with its interval below."""
    rows = [("", *(standing(offer) for offer in comparison.offers))]
    for unit in units(comparison):
        by, name = PER[unit]
        amounts = [offer.costs[unit] for offer in comparison.offers]
        rows.append((name, *(NONE if cost is None else money(cost.total * by) for cost in amounts)))
        if any(cost is not None and _has_width(cost) for cost in amounts):
            rows.append(("", *(ends(cost, by) for cost in amounts)))
    return Table((f"{comparison.prices.currency} per", *marked_names(comparison)), rows, split=True)


def classes(comparison: OfferComparison) -> Table:
    """What the units of each class cost, where a result has several."""
    shown = [unit for unit in units(comparison) if unit in (REQUEST, TASK, OUTPUT)]
    rows = [
        (
            f"{offer.name}: {name}",
            format.percent(float(part.tokens_share)),
            *(_cell(part.costs[u], PER[u][0]) for u in shown),
        )
        for offer in comparison.offers
        for name, part in offer.classes.items()
    ]
    head = (
        f"{comparison.prices.currency} of a class",
        "tokens",
        *(f"per {PER[unit][1]}" for unit in shown),
    )
    return Table(head, rows)


def steps(comparison: OfferComparison) -> Table:
    """What each step of a task costs, under the price of its endpoint, and all of them together."""
    rows: list[tuple[str, ...]] = []
    for offer in comparison.offers:
        for name, step in offer.steps.items():
            known = f"{money(step.per_task)}" if step.per_task is not None else NONE
            rows.append(
                (
                    f"{offer.name}: {name}",
                    known,
                    step.price.name if step.price is not None else step.why,
                )
            )
        known_ones = [step.per_task for step in offer.steps.values() if step.per_task is not None]
        if offer.steps:
            lacking = len(offer.steps) - len(known_ones)
            words = (
                "all steps"
                if not lacking
                else f"without {lacking} of its steps, whose price is not known"
            )
            rows.append((f"{offer.name}: a task", money(sum(known_ones, Decimal(0))), words))
    return Table((f"{comparison.prices.currency} of a step", "per task", "price"), rows, "remarks")


def explained(comparison: OfferComparison) -> Iterator[str]:
    """What each unit means, and the star behind a name."""
    for unit in units(comparison):
        yield f"{PER[unit][1]}: {EXPLAINED[unit]}"
    if any(comparison.against_first):
        yield "* not comparable with the first: see above"


def _has_width(cost: UnitCost) -> bool:
    return cost.low is not None and cost.high is not None and cost.low != cost.high


def ends(cost: UnitCost | None, by: int) -> str:
    """The interval of the cost of `by` units; a remark where it has none; the empty string without a cost."""
    if cost is None or cost.low is None or cost.high is None:
        return "" if cost is None else "(no interval)"
    if cost.low == cost.high:
        return "(as counted)"
    return f"[{money(cost.low * by)}, {money(cost.high * by)}]"


def parts(comparison: OfferComparison) -> Table:
    """The parts of the cost of the compared unit, one column per offer. The last row is the total of each column."""
    by, name = PER[comparison.unit]
    amounts = (offer.costs[comparison.unit] for offer in comparison.offers)
    rounded = [None if cost is None else apportioned(cost, by) for cost in amounts]
    head = (f"{comparison.prices.currency} per {name}", *marked_names(comparison))
    rows = [
        (
            PART_NAMES[part],
            *(
                NONE if amounts is None or part not in amounts[1] else f"{amounts[1][part]:,f}"
                for amounts in rounded
            ),
        )
        for part in PARTS
        if any(amounts is not None and part in amounts[1] for amounts in rounded)
    ]
    total = ("total", *(NONE if amounts is None else f"{amounts[0]:,f}" for amounts in rounded))
    return Table(head, [*rows, total], split=True)


def power(comparison: OfferComparison) -> Table:
    """Energy at the measured rate: one row per offer whose power is known, possibly none."""
    by, per = PER[comparison.unit]
    head = (
        "Energy at the measured rate",
        "W with PUE",
        "J/output token",
        "output tok/s per MW",
        f"kWh per {per}",
    )
    rows = []
    for offer in comparison.offers:
        if offer.power is not None:
            kwh = offer.power.kwh[comparison.unit]
            figures = (
                offer.power.watts,
                offer.power.joules_per_output_token,
                offer.power.output_tokens_per_s_per_mw,
            )
            shown = [format.quantity(float(figure)) for figure in figures]
            rows.append(
                (offer.name, *shown, NONE if kwh is None else format.quantity(float(kwh * by)))
            )
    return Table(head, rows)


def measured_energy(comparison: OfferComparison) -> Table:
    """What the accelerators used in the runs: one row per offer whose runs say it, possibly none."""
    currency = comparison.prices.currency
    head = (
        "Energy as measured, accelerators alone",
        "W",
        "J/output token",
        "+-",
        "J/request",
        f"{currency} of energy/1M output tokens",
    )
    rows = []
    for offer in comparison.offers:
        if (used := offer.measured) is not None:
            each = None if used.joules_per_request is None else float(used.joules_per_request)
            figures = (float(used.watts), float(used.joules_per_output_token))
            error, of_energy = format.percent(float(used.error)), used.money[OUTPUT]
            rows.append(
                (
                    offer.name,
                    *map(format.quantity, figures),
                    error,
                    format.quantity(each),
                    NONE if of_energy is None else money(of_energy),
                )
            )
    return Table(head, rows)


def ratios(comparison: OfferComparison) -> tuple[str, list[str]]:
    """The title and the sentences about each pair of offers."""
    sentences = []
    for pair in comparison.pairs:
        if pair.ratio is None:
            words = f"{pair.word}: {'; '.join(pair.differences)}"
        else:
            ends = f" [{money(pair.low)}, {money(pair.high)}]" if pair.low is not None else ""
            words = f"{money(pair.ratio)}{ends}: {pair.word}"
        words += f" ({'; '.join(pair.notes)})" if pair.notes else ""
        sentences.append(f"{pair.a} / {pair.b}: {words}")
    return (
        f"Ratio of cost per {PER[comparison.unit][1].removeprefix('1,000 ').removesuffix('s')}",
        sentences,
    )


def break_evens(comparison: OfferComparison) -> tuple[str, list[str]]:
    """The title and a sentence about each pair of machines and payment by the token."""
    return "Break-even between machines and paying by the token", [
        f"{break_even.rent} against {break_even.by_token}: {break_even.word}"
        for break_even in comparison.break_evens
    ]


def swings(comparison: OfferComparison) -> Table:
    """The cost of each offer where one of its inputs alone is moved down and up, the most sensitive first."""
    by, name = PER[comparison.unit]
    rows = [
        (swing.offer, swing.input, swing.change, money(swing.down * by), money(swing.up * by))
        for swing in comparison.swings
    ]
    return Table(
        (f"{comparison.prices.currency} per {name}", "input", "moved by", "down", "up"),
        rows,
        left=3,
    )


def _cell(cost: UnitCost | None, by: int) -> str:
    if cost is None:
        return NONE
    return money(cost.total * by) + (f" {ends(cost, by)}" if _has_width(cost) else "")
