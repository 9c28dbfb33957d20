"""Renders the sentences and tables of `loadgen cost`.

`cost_report.py` assembles the report from them.

Pure. Amounts are exact `Decimal` values. They are rounded only for printing, such that the printed
parts add up to the printed total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from typing import NamedTuple

from loadgen_sdk.price_file import PerToken

from loadgen.core import format
from loadgen.core.format import NONE
from loadgen.cost.comparability import describe_slo, has_lower_bound
from loadgen.cost.comparison import CostComparison, CostRatio
from loadgen.cost.yearly_cost import YEARS, compute_yearly_cost
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned, describe_price
from loadgen.pricing.unit_cost import UnitCost
from loadgen.pricing.units import (
    CACHE_WRITE,
    CACHED,
    EGRESS,
    ENERGY,
    GOOD,
    INPUT,
    MACHINES,
    OUTPUT,
    OUTPUT_TOKENS,
    PARTS,
    REQUEST,
    TASK,
    TOTAL,
    UNITS,
)
from loadgen.render.section import Notice, Table
from loadgen.repeated.capacity import Capacity
from loadgen.runs.rates import MEASUREMENT_WINDOW, STEADY_STATE_WINDOW
from loadgen.runs.slo_text import missed_objectives

SIGNIFICANT_DIGITS = 4


class PrintedUnit(NamedTuple):
    """How the cost of a unit is printed.

    Attributes:
        quantity: How many units the printed cost is for.
        name: The name of that quantity.
        explanation: What the unit means.
    """

    quantity: int
    name: str
    explanation: str


PRINTED_UNITS: Mapping[str, PrintedUnit] = {
    REQUEST: PrintedUnit(
        1000,
        "1,000 requests",
        "completed requests; failed ones are paid for but not counted",
    ),
    GOOD: PrintedUnit(
        1000, "1,000 good requests", "requests that met every objective of the SLO, in a VALID run"
    ),
    TASK: PrintedUnit(
        1000, "1,000 successful tasks", "conversations in which every turn was completed"
    ),
    OUTPUT: PrintedUnit(
        1, "million output tokens", "all costs divided by output tokens, as in MLPerf"
    ),
    TOTAL: PrintedUnit(
        1,
        "million input + output tokens",
        "all costs divided by input + output tokens, as in many public dashboards",
    ),
}
PART_NAMES: Mapping[str, str] = {
    MACHINES: "GPU-hours",
    ENERGY: "energy",
    INPUT: "input tokens",
    CACHED: "cached input tokens",
    OUTPUT_TOKENS: "output tokens",
    EGRESS: "egress",
    CACHE_WRITE: "input tokens, written to a cache",
}
HEADINGS_OF_SUSTAINED_NOTES = {
    "overloaded": "NOT SUSTAINED",
    "not_sustained": "STABILITY UNKNOWN",
}
"""Codes of notes on loads that cannot be sustained, with the headings of their warnings.

A result has at most one of them.
"""

YEARLY_COST_EXPLANATION = (
    "Payments at the measured rate in all hours, times the utilization. Machines are bought in the "
    "first year and again after their depreciation period. Present value: with the discount rate "
    "of the price."
)


def format_money(amount: Decimal | None, digits: int = SIGNIFICANT_DIGITS) -> str:
    """Return an amount with so many significant digits and with thousands separators."""
    if amount is None:
        return NONE
    last_digit = _find_last_printed_digit(amount, digits)
    rounded = amount.quantize(last_digit, rounding=ROUND_HALF_EVEN)
    return f"{rounded:,f}"


def _find_last_printed_digit(amount: Decimal, digits: int) -> Decimal:
    """Return the value of the last printed digit of an amount, such as 0.01 for 12.34.

    It is at most 1, so that whole units of a large amount are never rounded.

    Args:
        amount: The amount.
        digits: How many significant digits are printed.
    """
    # The power of ten of the first digit, such as 1 for 12.34. Zero is printed like 1.
    first_exponent = amount.adjusted() if amount else 0
    last_exponent = min(first_exponent - digits + 1, 0)
    return Decimal(1).scaleb(last_exponent)


class RoundedCost(NamedTuple):
    """A total, and parts that are rounded such that they add up to it."""

    total: Decimal
    parts: dict[str, Decimal]


def round_parts(cost: UnitCost, count: int) -> RoundedCost:
    """Round the cost of several units and its parts for printing, so that the parts add up.

    This is the largest remainder method: all parts are rounded down to the last printed digit of
    the total, and the steps that are then missing go to the parts that lost most by rounding.

    Args:
        cost: The cost of one unit.
        count: How many units the printed cost is for, such as 1000 requests.
    """
    step = _find_last_printed_digit(cost.total * count, SIGNIFICANT_DIGITS)
    total = (cost.total * count).quantize(step, rounding=ROUND_HALF_EVEN)
    exact_parts = {part: amount * count for part, amount in cost.parts.items()}
    rounded_parts = {
        part: amount.quantize(step, rounding=ROUND_FLOOR) for part, amount in exact_parts.items()
    }
    missing_amount = total - sum(rounded_parts.values(), Decimal(0))
    missing_steps = int(missing_amount / step)

    # The change is negative for a part that was rounded down, so the largest loss comes first.
    parts_by_loss = sorted(rounded_parts, key=lambda part: rounded_parts[part] - exact_parts[part])
    for part in parts_by_loss[:missing_steps]:
        rounded_parts[part] += step

    return RoundedCost(total, rounded_parts)


def format_interval_of(cost: UnitCost, count: int) -> str:
    """Return the interval of the cost of `count` units, or a remark if it has none."""
    if cost.low is None or cost.high is None:
        return "(no interval)"
    if cost.low == cost.high:
        return "(as counted)"
    return f"[{format_money(cost.low * count)}, {format_money(cost.high * count)}]"


def _has_interval(cost: UnitCost) -> bool:
    """Return True if a cost has an interval that is wider than a point."""
    return cost.low is not None and cost.high is not None and cost.low != cost.high


def _format_cost(cost: UnitCost | None, count: int) -> str:
    """Return the cost of `count` units with its interval, if it has one."""
    if cost is None:
        return NONE
    interval = f" {format_interval_of(cost, count)}" if _has_interval(cost) else ""
    return format_money(cost.total * count) + interval


def _list_known_units(comparison: CostComparison) -> list[str]:
    """Return the units in which at least one result has a cost."""
    return [
        unit
        for unit in UNITS
        if any(result.costs[unit] is not None for result in comparison.results)
    ]


def mark_names(comparison: CostComparison) -> list[str]:
    """Return the names of the results, with a star if they are not comparable with the first."""
    return [
        f"{result.name} *" if differences else result.name
        for result, differences in zip(
            comparison.results, comparison.differences_from_first, strict=True
        )
    ]


def list_warnings(comparison: CostComparison) -> Iterator[Notice]:
    """Yield the warnings to show before any amount.

    They are about what makes the amounts useless as they are: a simulated server, a missed SLO, a
    capacity of which only a lower bound is known, or prices that are only a sample.
    """
    results = comparison.results
    simulated_names = [result.name for result in results if result.evidence.is_simulated]
    if simulated_names:
        yield Notice(
            "SIMULATED",
            "Results come from a performance model, not from real hardware: "
            f"{', '.join(simulated_names)}.",
        )

    for result in results:
        yield from _list_result_warnings(result)

    lower_bound_names = [result.name for result in results if has_lower_bound(result)]
    if lower_bound_names:
        yield Notice(
            "LOWER BOUND",
            f"The capacity of {', '.join(lower_bound_names)} is only known to be at least the "
            "measured rate, so the cost is at most the printed one.",
        )

    prices = comparison.prices
    if prices.sample:
        text = f"The prices are examples, not an offer ({prices.file})."
        yield Notice("SAMPLE PRICES", text)


def _list_result_warnings(result: PricedResult) -> Iterator[Notice]:
    """Yield a warning for each reason why the cost of a result is meaningless.

    One reason is a missed SLO. The other is a load that cannot be sustained: its rate is too high,
    so a cost by the hour is too low. Tokens cost the same at any rate.
    """
    if is_slo_missed(result):
        summaries = result.evidence.summaries
        missed_terms = [term for summary in summaries for term in missed_objectives(summary)]
        # Repeats of a run often miss the same terms, so each is named once.
        unique_terms = dict.fromkeys(missed_terms)
        yield Notice("SLO MISSED", f"{result.name}: {'; '.join(unique_terms)}", "bad")

    if isinstance(result.price, PerToken):
        return

    for note in result.note_codes:
        if note.code in HEADINGS_OF_SUSTAINED_NOTES:
            heading = HEADINGS_OF_SUSTAINED_NOTES[note.code]
            yield Notice(heading, f"{result.name}: {note.values['why']}")


def is_slo_missed(result: PricedResult) -> bool:
    """Return True if a run behind the result missed its SLO."""
    return any(summary.goodput.met is False for summary in result.evidence.summaries)


def compare_owned_and_rented(owned: Sequence[str], rented: Sequence[str]) -> str:
    """Return a sentence on why owned and rented machines are hard to compare, for a warning.

    Args:
        owned: Names of the results with machines that were bought.
        rented: Names of the results with machines that are rented.

    Returns:
        The sentence, or "" if there is only one kind of machine.
    """
    if not owned or not rented:
        return ""
    return (
        f"The hourly cost of {', '.join(owned)} spreads the purchase over the depreciation period, "
        f"with the power, staff and space in the price file. {', '.join(rented)} can be returned "
        "at any time and includes the services of the provider. The two are only comparable if the "
        "owned machines are used for the whole period."
    )


def create_headlines(
    comparison: CostComparison, *, only_without_price: bool = False
) -> Iterator[str]:
    """Yield a sentence for each result: its cost in the compared unit, and an hour of its machines.

    A result whose run missed its SLO has no price under the SLO, so its sentence says that instead.
    The tables still have its costs.

    Args:
        comparison: The results.
        only_without_price: True to leave out the sentences of results that have a price.
    """
    for name, result in zip(mark_names(comparison), comparison.results, strict=True):
        has_price = result.costs[comparison.unit] is not None and not is_slo_missed(result)
        is_left_out = only_without_price and has_price
        if not is_left_out:
            yield _create_headline(name, result, comparison)


def _create_headline(name: str, result: PricedResult, comparison: CostComparison) -> str:
    """Return the sentence that answers what a unit costs in one result, or why that is not known.

    A run that missed its SLO has no price under the SLO, although the table below shows its cost.

    Args:
        name: The name of the result, with a star if it is not comparable with the first result.
        result: The result.
        comparison: All results, and the unit that is compared.
    """
    unit = PRINTED_UNITS[comparison.unit]
    cost = result.costs[comparison.unit]

    if is_slo_missed(result):
        return (
            f"{name}: no price under the SLO, because the run missed it "
            f"({describe_basis_and_caveats(result)}). The table has the cost of this run. "
            "loadgen search finds a load that meets the SLO."
        )

    if cost is None:
        return f"{name}: the cost per {unit.name} is not known."

    machine_hour = _describe_machine_hour(result)
    machines_suffix = f", {machine_hour}" if machine_hour else ""
    return (
        f"{name}: {comparison.prices.currency} {_format_cost(cost, unit.quantity)} per {unit.name} "
        f"({describe_basis_and_caveats(result)}){machines_suffix}."
    )


def _describe_machine_hour(result: PricedResult) -> str:
    """Return what an hour of all machines costs, or "" for a price per token.

    For example "8 GPUs at 24.00 per hour, 1 year, utilization 40 %". The commitment is that of the
    price file, if it has one.
    """
    if result.gpus_paid is None:
        return ""

    cost_per_hour = sum(result.hourly_cost_parts.values(), Decimal(0))
    gpus = f"{float(result.gpus_paid):,g} GPUs"
    text = f"{gpus} at {format_money(cost_per_hour)} per hour"
    if result.price.commitment:
        text += f", {result.price.commitment}"
    if result.utilization == 1:
        return text

    return f"{text}, utilization {format.percent(float(result.utilization))}"


def describe_prices(comparison: CostComparison) -> str:
    """Return the currency, the price file and the exchange rates of the prices that were used."""
    prices = comparison.prices
    rates = list_used_exchange_rates(comparison)
    exchange = f" Exchange rates: {'; '.join(rates)}." if rates else ""
    brackets = _explain_brackets(comparison)
    return f"Amounts in {prices.currency}{brackets}, prices from {prices.file}.{exchange}"


def list_used_exchange_rates(comparison: CostComparison) -> list[str]:
    """Return the exchange rates of the prices that results have, as text."""
    return comparison.prices.list_exchange_rates(result.price for result in comparison.results)


def _explain_brackets(comparison: CostComparison) -> str:
    """Return what the brackets behind amounts are, such as " (95 % CI in brackets)".

    Return "" if no cost has an interval.
    """
    confidences = {
        result.basis.confidence
        for result in comparison.results
        if result.basis.confidence is not None and has_intervals(result)
    }
    if not confidences:
        return ""
    percentages = " or ".join(f"{confidence * 100:g} %" for confidence in sorted(confidences))
    return f" ({percentages} CI in brackets)"


def has_intervals(result: PricedResult) -> bool:
    """Return True if a cost of a result has an interval that is wider than a point."""
    return any(cost is not None and _has_interval(cost) for cost in result.costs.values())


def describe_result_price(result: PricedResult) -> str:
    """Return the price of a result as text: provider, rate, what it includes, and its date."""
    price = result.price
    if isinstance(price, PerToken):
        rate = _describe_token_rate(price)
    else:
        machine_type = price.shape or price.gpu
        gpus = f"{result.gpus_paid:f} x {price.gpu}"
        rate = f"{machine_type}, {gpus}: {_describe_hourly_rate(result)}"

    region = f" in {price.region}" if price.region else ""
    return f"{price.provider}{region} {rate}; {describe_price(price)}"


def _describe_token_rate(price: PerToken) -> str:
    """Return a price per token as text, such as "llama: 0.5 input, 2 output per million"."""
    cached = ""
    if price.per_million_cached is not None:
        cached += f", {price.per_million_cached:f} cached"

    if price.per_million_cache_write is not None:
        cached += f", {price.per_million_cache_write:f} written"

    return (
        f"{price.model}: {price.per_million_input:f} input{cached}, "
        f"{price.per_million_output:f} output per million"
    )


def _describe_hourly_rate(result: PricedResult) -> str:
    """Return the hourly cost of all machines as text, with its parts if it has several.

    An hour of owned machines is always divided, because it is computed and not billed.
    """
    text = f"{format_money(sum(result.hourly_cost_parts.values(), Decimal(0)))} per hour"
    has_several_parts = len(result.hourly_cost_parts) > 1
    if has_several_parts or isinstance(result.price, Owned):
        parts = [
            f"{part} {format_money(amount)}" for part, amount in result.hourly_cost_parts.items()
        ]
        text += f" ({' + '.join(parts)})"

    if result.utilization != 1:
        # `:%` prints six decimals, as in "40.000000%". Whole percentages are shown without them.
        text += f", paid at {result.utilization:%} utilization".replace(".000000", "")

    return text


def describe_measurement(result: PricedResult) -> str:
    """Return what was measured for a result as text, with its SLO and folder.

    There are three forms: the capacity that a search found, the number of requests for a price per
    token, which needs no rate, or else the rate at which a run completed requests.
    """
    summary = result.evidence.summary
    capacity = result.evidence.capacity
    slo = describe_slo(summary)
    source = _describe_source(result)

    workload = summary.run.workload or summary.run.name
    if capacity is not None:
        rate = _describe_capacity(capacity, workload)
        return f"capacity by {capacity.method}: {rate}; SLO: {slo}; from {source}"

    if isinstance(result.price, PerToken):
        requests = format.counted(summary.requests.ok, "request")
        quantity = f"{requests} of {workload}, priced by their tokens"
    else:
        window = MEASUREMENT_WINDOW if result.evidence.is_offline else STEADY_STATE_WINDOW
        quantity = f"{_describe_request_rate(result)} of {workload} completed in the {window}"

    return f"{result.basis.label}: {quantity}; SLO: {slo}; from {source}"


def _describe_source(result: PricedResult) -> str:
    """Return the folder of a result, after the region of its target if that is known."""
    region = result.evidence.summary.target.region
    folder = result.evidence.folder
    return f"{region}, {folder}" if region else folder


def _describe_capacity(capacity: Capacity, workload: str) -> str:
    """Return a capacity as text, such as "4.57 requests/s (95 % interval 4.41 to 4.8) of rag".

    Its state, such as "confirmed", and the token rate of its run follow, if they are known.
    """
    at_least_prefix = "at least " if capacity.lower_bound else ""
    interval = "no interval"
    if capacity.low_per_s is not None and capacity.high_per_s is not None:
        low = format.quantity(capacity.low_per_s)
        high = format.quantity(capacity.high_per_s)
        interval = f"{capacity.confidence * 100:g} % CI {low} to {high}"

    # A capacity without a state has only a mark that says whether it was confirmed.
    state = capacity.state or ("confirmed" if capacity.confirmed else "")
    state_text = f", {state}" if state else ""

    tokens = ""
    if capacity.output_tokens_per_s is not None:
        tokens_per_s = format.quantity(capacity.output_tokens_per_s, 4)
        tokens = f", {tokens_per_s} output tok/s in steady state"

    rate = f"{at_least_prefix}{format.quantity(capacity.rate_per_s)} {capacity.unit}/s"
    return f"{rate} ({interval}) of {workload}{state_text}{tokens}"


def _describe_request_rate(result: PricedResult) -> str:
    """Return the request rate of a result with its interval, if it was repeated.

    The interval of a basis is relative to the rate, so its ends are multiplied by the rate.
    """
    basis = result.basis
    rate = basis.rates[REQUEST]
    if not rate:
        return NONE

    text = f"{format.quantity(float(rate))}/s"
    if basis.relative_low is None or basis.relative_high is None:
        return text

    low = format.quantity(float(rate * basis.relative_low))
    high = format.quantity(float(rate * basis.relative_high))
    return f"{text} (95 % CI {low} to {high})"


def describe_basis_and_caveats(result: PricedResult) -> str:
    """Return a short label that qualifies every cost of a result.

    It says how the rate was obtained and what makes it unreliable. For example "capacity,
    simulated", or "at this load, 20 req/s, SLO missed".
    """
    return ", ".join([_describe_basis(result), *_list_caveats(result)])


def _describe_basis(result: PricedResult) -> str:
    """Return how the rate of a result was obtained, for example "capacity, simulated".

    A load that the user chose is named with the rate of completed requests that the cost is
    computed with.
    """
    label = result.basis.label
    rate = result.basis.rates[REQUEST]
    if is_at_chosen_load(result) and rate:
        label += f", {format.quantity(float(rate))} req/s"
    return f"{label}, simulated" if result.evidence.is_simulated else label


def is_at_chosen_load(result: PricedResult) -> bool:
    """Return True if the machines ran at a load that the user chose, so they may serve more."""
    return any(note.code == "own_load" for note in result.note_codes)


def _list_caveats(result: PricedResult) -> list[str]:
    """Return what makes the cost of a result unreliable, for example "SLO missed"."""
    note_codes = {note.code for note in result.note_codes}
    caveats = []
    if not result.evidence.is_valid:
        caveats.append("INVALID")

    if is_slo_missed(result):
        caveats.append("SLO missed")

    if "overloaded" in note_codes:
        caveats.append("not sustained")

    if is_priced_as_other_type(result):
        caveats.append("OTHER INSTANCE TYPE")

    return caveats


def is_priced_as_other_type(result: PricedResult) -> bool:
    """Return True if the price is for another type of machine than the measured one."""
    return any(note.code in ("other_gpu", "other_shape") for note in result.note_codes)


def build_unit_cost_table(comparison: CostComparison, *, with_intervals: bool = True) -> Table:
    """Return the costs by unit, with one column per result.

    With intervals, the first row says how each rate was obtained, and a unit has a second row for
    the intervals if one of its costs has an interval.
    """
    results = comparison.results
    rows = [("", *map(describe_basis_and_caveats, results))] if with_intervals else []
    for unit in _list_known_units(comparison):
        printed = PRINTED_UNITS[unit]
        costs = [result.costs[unit] for result in results]
        totals = [None if cost is None else cost.total * printed.quantity for cost in costs]
        rows.append((printed.name, *map(format_money, totals)))

        if with_intervals and any(cost is not None and _has_interval(cost) for cost in costs):
            intervals = [
                "" if cost is None else format_interval_of(cost, printed.quantity) for cost in costs
            ]
            rows.append(("", *intervals))

    return Table(
        (f"{comparison.prices.currency} per", *mark_names(comparison)), rows, wrap_columns=True
    )


BRIEF_UNITS = (TASK, GOOD, REQUEST, OUTPUT)
"""The units that a terminal shows by default."""


def build_brief_table(comparison: CostComparison) -> Table:
    """Return the costs that a terminal shows by default, with one column per result.

    Several results have no sentences of their own, so the table also says what each cost is based
    on and which machines were priced. Completed requests have a row only without good ones.
    """
    results = comparison.results
    rows: list[tuple[str, ...]] = []
    if len(results) > 1:
        rows.append(("based on", *map(_describe_basis, results)))
        caveats = [", ".join(_list_caveats(result)) for result in results]
        if any(caveats):
            rows.append(("caveats", *(text or NONE for text in caveats)))

        machines = [_describe_machine_hour(result) for result in results]
        if any(machines):
            rows.append(("machines", *(text or NONE for text in machines)))

    known_units = _list_known_units(comparison)
    for unit in BRIEF_UNITS:
        is_redundant = unit == REQUEST and GOOD in known_units
        if unit in known_units and not is_redundant:
            printed = PRINTED_UNITS[unit]
            costs = (_format_cost(result.costs[unit], printed.quantity) for result in results)
            rows.append((printed.name, *costs))

    head = (f"{comparison.prices.currency} per", *mark_names(comparison))
    return Table(head, rows, wrap_columns=True)


def list_unit_explanations(comparison: CostComparison) -> Iterator[str]:
    """Yield what each unit means, and what the star behind a name means."""
    for unit in _list_known_units(comparison):
        printed = PRINTED_UNITS[unit]
        yield f"{printed.name}: {printed.explanation}"
    if any(comparison.differences_from_first):
        yield "* not comparable with the first result: see Assumptions"


def build_part_table(comparison: CostComparison) -> Table:
    """Return the parts of the cost of the compared unit, with one column per result.

    Amounts are rounded such that each column adds up to its total. Parts that no result has, such
    as egress without a price, are left out.
    """
    unit = PRINTED_UNITS[comparison.unit]
    costs = [result.costs[comparison.unit] for result in comparison.results]
    rounded_costs = [None if cost is None else round_parts(cost, unit.quantity) for cost in costs]

    rows = []
    for part in PARTS:
        amounts = [None if cost is None else cost.parts.get(part) for cost in rounded_costs]
        if any(amount is not None for amount in amounts):
            rows.append((PART_NAMES[part], *map(_format_exact, amounts)))

    totals = [None if cost is None else cost.total for cost in rounded_costs]
    rows.append(("total", *map(_format_exact, totals)))
    head = (f"{comparison.prices.currency} per {unit.name}", *mark_names(comparison))

    return Table(head, rows, wrap_columns=True)


def _format_exact(amount: Decimal | None) -> str:
    """Return an amount with all its digits."""
    return NONE if amount is None else f"{amount:,f}"


def build_class_table(comparison: CostComparison) -> Table:
    """Return what the units of each request class cost, if a result has several classes.

    The second column is the fraction of all tokens that are of the class.
    """
    units = [unit for unit in _list_known_units(comparison) if unit in (REQUEST, TASK, OUTPUT)]
    rows = []
    for result in comparison.results:
        for class_name, class_cost in result.class_costs.items():
            costs = [
                _format_cost(class_cost.costs[unit], PRINTED_UNITS[unit].quantity) for unit in units
            ]
            tokens_share = format.percent(float(class_cost.tokens_share))
            rows.append((f"{result.name}: {class_name}", tokens_share, *costs))

    head = (
        f"{comparison.prices.currency} of a class",
        "tokens",
        *(f"per {PRINTED_UNITS[unit].name}" for unit in units),
    )
    return Table(head, rows)


def build_step_table(comparison: CostComparison) -> Table:
    """Return the table of what each step of a task costs, with a row for the sum of the steps.

    A task is a session of several requests, such as "plan", "search" and "answer", which are its
    steps. Results without tasks have no rows.

    The last column has the name of the price that a step was priced at. If no price was found, it
    has the reason instead. The sum leaves out steps without an amount and says so there.
    """
    rows: list[tuple[str, str, str]] = []
    for result in comparison.results:
        if not result.step_costs:
            continue

        known_amounts: list[Decimal] = []
        for step_name, step in result.step_costs.items():
            price_or_reason = step.reason if step.price is None else step.price.name
            rows.append(
                (f"{result.name}: {step_name}", format_money(step.per_task), price_or_reason)
            )
            if step.per_task is not None:
                known_amounts.append(step.per_task)

        steps_without_amount = len(result.step_costs) - len(known_amounts)
        coverage = "all steps"
        if steps_without_amount:
            missing_steps = format.counted(steps_without_amount, "step")
            coverage = f"without {missing_steps} whose price is not known"

        task_amount = sum(known_amounts, Decimal(0))
        rows.append((f"{result.name}: a task", format_money(task_amount), coverage))

    return Table((f"{comparison.prices.currency} of a step", "per task", "price"), rows, "remarks")


def build_yearly_table(comparison: CostComparison) -> Table:
    """Return what each result costs in each year, in total, and its present value.

    Results whose yearly cost is not known are left out.
    """
    rows = []
    for name, result in zip(mark_names(comparison), comparison.results, strict=True):
        cost = compute_yearly_cost(result)
        if cost is not None:
            amounts = (*cost.paid, cost.total, cost.present)
            rows.append((name, *map(_format_rounded, amounts)))

    years = [f"year {year}" for year in range(1, YEARS + 1)]
    return Table((comparison.prices.currency, *years, "total", "present value"), rows)


def _format_rounded(amount: Decimal | None) -> str:
    """Return an amount rounded to whole units of the currency."""
    return NONE if amount is None else f"{round(amount):,}"


def build_declared_power_table(comparison: CostComparison) -> Table:
    """Return the energy at the measured rate by the price file, for results with known power.

    The power is what the price file declares for whole machines, so nothing here was measured but
    the rate.
    """
    unit = PRINTED_UNITS[comparison.unit]
    rows = []
    for result in comparison.results:
        power = result.declared_power
        if power is None:
            continue

        kwh = power.kwh[comparison.unit]
        rows.append(
            (
                result.name,
                _format_quantity(power.watts),
                _format_quantity(power.joules_per_output_token),
                _format_quantity(power.output_tokens_per_s_per_mw),
                _format_quantity(None if kwh is None else kwh * unit.quantity),
            )
        )

    head = (
        "Energy by the price file",
        "W with PUE",
        "J/output token",
        "output tok/s per MW",
        f"kWh per {unit.name}",
    )
    return Table(head, rows)


def build_measured_energy_table(comparison: CostComparison) -> Table:
    """Return the energy that the accelerators were measured to use, for results that have it.

    It leaves out the rest of the machine, such as the CPUs, so it should be lower than the energy
    by the price file.
    """
    rows = []
    for result in comparison.results:
        energy = result.measured_energy
        if energy is None:
            continue

        rows.append(
            (
                result.name,
                _format_quantity(energy.watts),
                _format_quantity(energy.joules_per_output_token),
                format.percent(float(energy.error)),
                _format_quantity(energy.joules_per_request),
                format_money(energy.money[OUTPUT]),
            )
        )

    head = (
        "Measured energy of the accelerators",
        "W",
        "J/output token",
        "+-",
        "J/request",
        f"{comparison.prices.currency} of energy/1M output tokens",
    )
    return Table(head, rows)


def _format_quantity(value: Decimal | None) -> str:
    """Return a physical quantity with three digits."""
    return format.quantity(None if value is None else float(value))


def ratio_heading(comparison: CostComparison) -> str:
    """Return the heading above the ratios of costs, such as "Ratio of cost per good request"."""
    return f"Ratio of cost per {_get_singular_noun(comparison)}"


def _get_singular_noun(comparison: CostComparison) -> str:
    """Return what the compared cost is per, such as "good request"."""
    name_of_thousand = PRINTED_UNITS[comparison.unit].name  # such as "1,000 good requests"
    return name_of_thousand.removeprefix("1,000 ").removesuffix("s")


def describe_ratio(comparison: CostComparison, ratio: CostRatio) -> str:
    """Return which result is cheaper and the ratio of the costs, or why they are not compared.

    For example: "a vs. b: a is cheaper. a costs 0.8571 times as much as b per good request".
    """
    pair = f"{ratio.a} vs. {ratio.b}"
    notes = f" ({'; '.join(ratio.notes)})" if ratio.notes else ""
    if ratio.ratio is None:
        return f"{pair}: {ratio.judgment} ({'; '.join(ratio.differences)}){notes}"

    noun = _get_singular_noun(comparison)
    factor = format_money(ratio.ratio)
    interval = _format_ratio_interval(comparison, ratio)
    return (
        f"{pair}: {ratio.judgment}. {ratio.a} costs {factor} times as much as {ratio.b} per {noun}"
        f"{interval}{notes}"
    )


def _format_ratio_interval(comparison: CostComparison, ratio: CostRatio) -> str:
    """Return the interval of a ratio, such as " (95 % CI 0.7986 to 0.9200)".

    Return "" if it is not known, or if the ratio is exact.
    """
    confidences = [
        result.basis.confidence
        for result in comparison.results
        if result.name in (ratio.a, ratio.b) and result.basis.confidence is not None
    ]
    low = format_money(ratio.low)
    high = format_money(ratio.high)
    if not confidences or ratio.low is None or low == high:
        return ""
    return f" ({confidences[0] * 100:g} % CI {low} to {high})"


def build_sensitivity_table(comparison: CostComparison) -> Table:
    """Return the costs with a lower and a higher input, the largest effect of a result first.

    "Down" is the cost with the lower input, which is the higher cost if the input is a rate.
    """
    unit = PRINTED_UNITS[comparison.unit]
    rows = [
        (
            sensitivity.result_name,
            sensitivity.input_name,
            sensitivity.change,
            format_money(sensitivity.cost_with_lower_input * unit.quantity),
            format_money(sensitivity.cost_with_higher_input * unit.quantity),
        )
        for sensitivity in comparison.sensitivities
    ]
    head = (f"{comparison.prices.currency} per {unit.name}", "input", "changed by", "down", "up")

    return Table(head, rows, label_columns=3)
