"""What requests cost, as text and Markdown. CSV and JSON are in `cost_data.py`, the page with plots in `cost_page.py`.

Pure: a `Comparison` in, a string out. Amounts stay `Decimal` to the last digit and are rounded for printing so that
printed parts add up to the printed total.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

from loadgen import format
from loadgen.cost.comparison import OfferComparison, slo_words
from loadgen.cost.prices import Owned, PerToken, dated
from loadgen.cost.unit_cost import GOOD, OUTPUT, PARTS, REQUEST, TASK, TOTAL, UNITS, Cost, Offer
from loadgen.format import NONE

WIDTH = 100
DIGITS = 4  # of an amount

# How many units an amount is printed for, and how that is called. Tokens are by the million already.
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
PART_NAMES |= {"output": "output tokens", "egress": "egress"}


def money(amount: Decimal | None, digits: int = DIGITS) -> str:
    """`digits` significant digits, thousands separated, no exponent, never through a binary float."""
    if amount is None:
        return NONE
    return f"{amount.quantize(_step(amount, digits), rounding=ROUND_HALF_EVEN):,f}"


def _step(amount: Decimal, digits: int) -> Decimal:
    """The last place that is printed of an amount; whole units at most."""
    place = min(amount.adjusted() - digits + 1, 0) if amount else -digits + 1
    return Decimal(1).scaleb(place)


def apportioned(cost: Cost, by: int, digits: int = DIGITS) -> tuple[Decimal, dict[str, Decimal]]:
    """The total, and its parts, of `by` units, rounded to the total's last printed place so that they still add up:
    what is left over goes to the parts that lost most by rounding down."""
    total = cost.total * by
    step = _step(total, digits)
    total = total.quantize(step, rounding=ROUND_HALF_EVEN)
    exact = {part: amount * by for part, amount in cost.parts.items()}
    parts = {part: amount.quantize(step, rounding=ROUND_FLOOR) for part, amount in exact.items()}
    left = int((total - sum(parts.values(), Decimal(0))) / step)
    for part in sorted(parts, key=lambda part: parts[part] - exact[part])[:left]:
        parts[part] += step
    return total, parts


def units(comparison: OfferComparison) -> list[str]:
    """The units that any offer has a cost in."""
    return [unit for unit in UNITS if any(offer.costs[unit] is not None for offer in comparison.offers)]


def headline(comparison: OfferComparison) -> str:
    """What these prices are, said before any of them."""
    prices = comparison.prices
    start = f"All amounts in {prices.currency}, prices from {prices.file}."
    if prices.sample:
        start = f"SAMPLE PRICES, nobody's offer ({prices.file}), in {prices.currency}. " + prices.notes
    simulated = [offer.name for offer in comparison.offers if offer.evidence.simulated]
    if simulated:
        start = f"SIMULATED, no real server was measured: {', '.join(simulated)}. " + start
    if prices.exchanged:
        start += " Exchanged at " + "; ".join(prices.exchanged) + "."
    return start


def priced(offer: Offer) -> str:
    """The price of an offer in words."""
    price = offer.price
    if isinstance(price, PerToken):
        cached = f", {price.per_million_cached:f} cached" if price.per_million_cached is not None else ""
        what = (
            f"{price.model}: {price.per_million_input:f} input{cached}, {price.per_million_output:f} output per million"
        )
    else:
        gpus = offer.gpus_paid
        hourly = sum(offer.hourly.values(), Decimal(0))
        made = " (" + " + ".join(f"{part} {money(amount)}" for part, amount in offer.hourly.items()) + ")"
        what = f"{price.shape or price.gpu}, {gpus:f} x {price.gpu}: {money(hourly)} per hour"
        what += made if len(offer.hourly) > 1 or isinstance(price, Owned) else ""
        if offer.utilization != 1:
            what += f", paid at {offer.utilization:%} utilization".replace(".000000", "")
    return f"{price.provider} {what}; {dated(price)}"


def measured(offer: Offer) -> str:
    """What the offer rests on, in words."""
    basis, summary, capacity = offer.basis, offer.evidence.summary, offer.evidence.capacity
    work = summary.run.workload or summary.run.name
    limits = slo_words(summary)
    if capacity is not None:
        least = "at least " if capacity.lower_bound else ""
        rate = f"{least}{format.quantity(capacity.rate_per_s)} {capacity.unit}/s"
        if capacity.low_per_s is not None and capacity.high_per_s is not None:
            ends = f"{format.quantity(capacity.low_per_s)} to {format.quantity(capacity.high_per_s)}"
            rate += f" ({capacity.confidence * 100:g} % interval {ends})"
        else:
            rate += " (no interval)"
        return f"capacity by {capacity.method}: {rate} of {work} under {limits}; from {offer.evidence.folder}"
    if isinstance(offer.price, PerToken):
        counted = f"{summary.requests.ok:,} requests of {work}, tokens as counted"
        return f"{basis.label}: {counted}; SLO: {limits}; from {offer.evidence.folder}"
    found = basis.rates[REQUEST]
    rate = f"{format.quantity(float(found))}/s" if found else NONE
    if basis.low is not None and basis.high is not None and found:
        ends = f"{format.quantity(float(found * basis.low))} to {format.quantity(float(found * basis.high))}"
        rate += f" (95 % interval {ends})"
    return (
        f"{basis.label}: {rate} of {work} completed while load was offered; SLO: {limits}; from {offer.evidence.folder}"
    )


def standing(offer: Offer) -> str:
    """In a few words, for beside every figure: what it was priced at, and whether to believe it."""
    marks = ["simulated"] if offer.evidence.simulated else []
    marks += [] if offer.evidence.valid else ["INVALID"]
    return ", ".join([offer.basis.label, *marks])


def render_text(comparison: OfferComparison, width: int = WIDTH) -> str:
    """The whole answer for a terminal, ending in a newline."""
    blocks = (
        textwrap.wrap(headline(comparison), width),
        [
            line
            for offer in zip(comparison.offers, comparison.against_first, strict=True)
            for line in _told(*offer, width)
        ],
        _costs(comparison, width),
        in_columns(*parts(comparison), width),
        _power(comparison),
        _pairs(comparison, width),
        _swings(comparison),
        _break_evens(comparison, width),
    )
    return "\n\n".join("\n".join(lines) for block in blocks if (lines := list(block))) + "\n"


def _told(offer: Offer, differs: Sequence[str], width: int) -> Iterator[str]:
    yield offer.name
    marks = [f"! NOT COMPARABLE with the first: {'; '.join(differs)}"] if differs else []
    for words in (priced(offer), measured(offer), *(f"! {note}" for note in offer.notes), *marks):
        yield from textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _mark(comparison: OfferComparison, i: int) -> str:
    return comparison.offers[i].name + (" *" if comparison.against_first[i] else "")


def _costs(comparison: OfferComparison, width: int) -> Iterator[str]:
    shown = units(comparison)
    head = (f"{comparison.prices.currency} per", *(_mark(comparison, i) for i in range(len(comparison.offers))))
    rows: list[Sequence[str]] = [("", *(standing(offer) for offer in comparison.offers))]
    for unit in shown:
        by, name = PER[unit]
        costs = [offer.costs[unit] for offer in comparison.offers]
        rows.append((name, *(NONE if cost is None else money(cost.total * by) for cost in costs)))
        if any(cost is not None and _has_width(cost) for cost in costs):
            rows.append(("", *(ends(cost, by) for cost in costs)))
    yield from in_columns(head, rows, width)
    for unit in shown:
        yield f"  {PER[unit][1]}: {EXPLAINED[unit]}"
    if any(comparison.against_first):
        yield "  * not comparable with the first: see above"


def _has_width(cost: Cost) -> bool:
    return cost.low is not None and cost.high is not None and cost.low != cost.high


def ends(cost: Cost | None, by: int) -> str:
    """The interval of a cost of `by` units, or why it has none."""
    if cost is None or cost.low is None or cost.high is None:
        return "" if cost is None else "(no interval)"
    if cost.low == cost.high:
        return "(as counted)"
    return f"[{money(cost.low * by)}, {money(cost.high * by)}]"


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]  # head, lines


def parts(comparison: OfferComparison) -> Rows:
    """What the compared unit is made of, a column per offer; each column adds up to its last line."""
    by, name = PER[comparison.unit]
    costs = [offer.costs[comparison.unit] for offer in comparison.offers]
    found = [None if cost is None else apportioned(cost, by) for cost in costs]
    head = (f"Parts of {name}", *(_mark(comparison, i) for i in range(len(found))))
    rows = [
        (PART_NAMES[part], *(NONE if one is None or part not in one[1] else f"{one[1][part]:,f}" for one in found))
        for part in PARTS
        if any(one is not None and part in one[1] for one in found)
    ]
    return head, [*rows, ("total", *(NONE if one is None else f"{one[0]:,f}" for one in found))]


def power(comparison: OfferComparison) -> Rows:
    """Energy at the measured rate, a line per offer whose machines have their power said; no lines without."""
    by, per = PER[comparison.unit]
    head = ("Energy at the measured rate", "W with PUE", "J/output token", "output tok/s per MW", f"kWh per {per}")
    rows = []
    for offer in comparison.offers:
        if offer.power is not None:
            kwh = offer.power.kwh[comparison.unit]
            figures = (offer.power.watts, offer.power.joules_per_output_token, offer.power.output_tokens_per_s_per_mw)
            shown = [format.quantity(float(figure)) for figure in figures]
            rows.append((offer.name, *shown, NONE if kwh is None else format.quantity(float(kwh * by))))
    return head, rows


def _power(comparison: OfferComparison) -> list[str]:
    head, rows = power(comparison)
    return show_table(head, rows) if rows else []


def _pairs(comparison: OfferComparison, width: int) -> Iterator[str]:
    if not comparison.pairs:
        return
    yield f"Ratio of cost per {PER[comparison.unit][1].removeprefix('1,000 ').removesuffix('s')}"
    for pair in comparison.pairs:
        start = f"{pair.a} / {pair.b}: "
        if pair.ratio is None:
            words = f"{pair.word}: {'; '.join(pair.differences)}"
        else:
            ends = f" [{money(pair.low)}, {money(pair.high)}]" if pair.low is not None else ""
            words = f"{money(pair.ratio)}{ends}: {pair.word}"
        words += f" ({'; '.join(pair.notes)})" if pair.notes else ""
        yield from textwrap.wrap(
            start + words, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )


SHOWN_SWINGS = 4  # of an offer, in text


def _swings(comparison: OfferComparison) -> Iterator[str]:
    by, name = PER[comparison.unit]
    rows: list[Sequence[str]] = []
    for offer in comparison.offers:
        own = [swing for swing in comparison.swings if swing.offer == offer.name][:SHOWN_SWINGS]
        rows += [
            (offer.name if i == 0 else "", swing.input, swing.change, money(swing.down * by), money(swing.up * by))
            for i, swing in enumerate(own)
        ]
    if rows:
        yield from show_table(("What moves it most", "input", "moved by", "down", "up"), rows, left=3)
        yield f"  {comparison.prices.currency} per {name}; each input alone; 10 % where nobody said how sure it is"


def _break_evens(comparison: OfferComparison, width: int) -> Iterator[str]:
    if comparison.break_evens:
        yield "Break-even between machines and paying by the token"
    for one in comparison.break_evens:
        words = f"{one.rent} against {one.by_token}: {one.word}"
        yield from textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def in_columns(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """A table whose columns are offers: as many beside each other as fit, the others below under the same labels."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    first = 1
    while first < len(head):
        last, used = first, widths[0] + 2 + widths[first]
        while last + 1 < len(head) and used + 2 + widths[last + 1] <= width:
            last += 1
            used += 2 + widths[last]
        shown = [0, *range(first, last + 1)]
        yield from show_table([head[i] for i in shown], [[row[i] for i in shown] for row in rows])
        first = last + 1
        if first < len(head):
            yield ""


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The first `left` columns to the left, the others to the right, each as wide as it needs."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def render_markdown(comparison: OfferComparison) -> str:
    """For pasting: the offers, their costs, the ratios; ends in a newline."""
    shown = units(comparison)
    head = ["Offer", *(f"{comparison.prices.currency} per {PER[unit][1]}" for unit in shown), "Measured"]
    lines = [headline(comparison), "", _pipes(head), _pipes(["---", *("---:" for _ in shown), "---"])]
    for i, offer in enumerate(comparison.offers):
        cells = [_cell(offer.costs[unit], PER[unit][0]) for unit in shown]
        lines.append(_pipes([_mark(comparison, i), *cells, standing(offer)]))
    lines.append("")
    for i, offer in enumerate(comparison.offers):
        lines.append(f"- **{offer.name}**: {priced(offer)}. {measured(offer)}.")
        lines += [f"  - {note}" for note in offer.notes]
        if comparison.against_first[i]:
            lines.append(f"  - \\* not comparable with the first: {'; '.join(comparison.against_first[i])}")
    for block in (_pairs(comparison, 10_000), _break_evens(comparison, 10_000)):
        told = list(block)
        if told:
            lines += ["", told[0], "", *(f"- {line.strip()}" for line in told[1:])]
    return "\n".join(lines) + "\n"


def _cell(cost: Cost | None, by: int) -> str:
    if cost is None:
        return NONE
    return money(cost.total * by) + (f" {ends(cost, by)}" if _has_width(cost) else "")


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
