"""What requests cost, as one HTML page that needs no network: tables, and charts drawn as SVG.

Pure: takes an `OfferComparison`, returns a string. The amounts in the tables come from `cost.py`. Binary floats are
used only for positions in a chart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from loadgen.cost.comparison import BreakEven, OfferComparison, Swing
from loadgen.cost.unit_cost import PARTS, Offer
from loadgen.format import NONE
from loadgen.report import cost as words
from loadgen.report.cost import PART_NAMES, PER, money

WIDTH, LABEL, ROW, BAR = 760, 210, 34, 16
COLOURS = {"machines": "#3b6fb6", "energy": "#c98a1b", "input": "#5a9e6f", "cached_input": "#9cc7a8"}
COLOURS |= {"output": "#8b5fb0", "egress": "#8a8f98"}
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --soft: #667; --line: #d5d9e0; --warn: #a33a00 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --paper: #14181f; --soft: #9aa4b2; --line: #333b47; --warn: #ff9a5c } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; vertical-align: top }
th:first-child, td:first-child, .word { text-align: left } td > small, .whole { white-space: nowrap }
td:first-child > small, .word > small { white-space: normal }
small, .soft { color: var(--soft) } .warn { color: var(--warn) }
.sample { border: 2px solid var(--warn); padding: .6rem 1rem } .wide { overflow-x: auto }
svg { max-width: 100%; height: auto; display: block } svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg .soft { fill: var(--soft) } svg .axis { stroke: var(--line); fill: none }
svg .ink { stroke: var(--ink); fill: none } svg .rent, svg .token { fill: none; stroke-width: 2 }
svg .rent { stroke: #3b6fb6 } svg .token { stroke: #8b5fb0 }
@media print { body { margin: 0; max-width: none } h2 { break-after: avoid } svg, table { break-inside: avoid } }
"""


def render(comparison: OfferComparison) -> str:
    """The text of the whole HTML file."""
    prices = comparison.prices
    marked = prices.sample or any(offer.evidence.simulated for offer in comparison.offers)
    kind = ' class="sample"' if marked else ""
    body = [
        "<h1>What a request costs</h1>",
        f"<p{kind}>{escape(words.headline(comparison))}</p>",
        *_offers(comparison),
        "<h2>Cost by unit</h2>",
        *_table(comparison),
        f"<h2>{escape(prices.currency)} per {escape(PER[comparison.unit][1])}, and what it is made of</h2>",
        _bars(comparison),
        *_plain_table(*words.parts(comparison)),
        *_plain_table(*words.power(comparison)),
        *_pairs(comparison),
        "<h2>What moves it most</h2>",
        "<p class=soft>Each input alone: a capacity over its interval, what nobody has said the uncertainty of by "
        "10 %. The line is the cost as measured.</p>",
        *(_tornado(offer, comparison) for offer in comparison.offers),
        *_break_evens(comparison),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    title = f"<title>What a request costs ({escape(prices.currency)})</title>"
    return (
        f"<!doctype html>\n<html lang=en><head>{head}{title}<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _offers(comparison: OfferComparison) -> Iterator[str]:
    yield "<h2>Offers, and what they rest on</h2>"
    for offer, differences in zip(comparison.offers, comparison.against_first, strict=True):
        notes = [f"<li class=warn>{escape(note)}</li>" for note in offer.notes]
        if differences:
            notes.append(f"<li class=warn>not comparable with the first: {escape('; '.join(differences))}</li>")
        description = f"{escape(words.priced(offer))}<br><small>{escape(words.measured(offer))}</small>"
        yield f"<p><b>{escape(offer.name)}</b><br>{description}</p>" + (f"<ul>{''.join(notes)}</ul>" if notes else "")


def _table(comparison: OfferComparison) -> Iterator[str]:
    names = [
        _name(offer, differences)
        for offer, differences in zip(comparison.offers, comparison.against_first, strict=True)
    ]
    yield "<div class=wide><table><tr><th>" + escape(comparison.prices.currency) + " per</th>"
    yield "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr>"
    labels = "".join(f"<td><small>{escape(words.standing(offer))}</small></td>" for offer in comparison.offers)
    yield f"<tr><td></td>{labels}</tr>"
    for unit in words.units(comparison):
        by, name = PER[unit]
        cells = []
        for offer in comparison.offers:
            cost = offer.costs[unit]
            total = NONE if cost is None else money(cost.total * by)
            cells.append(f"<td>{total}<br><small>{escape(words.ends(cost, by))}</small></td>")
        label = f"<td>{escape(name)}<br><small>{escape(words.EXPLAINED[unit])}</small></td>"
        yield f"<tr>{label}{''.join(cells)}</tr>"
    yield "</table></div>"


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield "<div class=wide><table>" + "".join(
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in (("th", head), *(("td", row) for row in rows))
        )
        yield "</table></div>"


def _name(offer: Offer, differences: Sequence[str]) -> str:
    return offer.name + (" *" if differences else "")


def _bars(comparison: OfferComparison) -> str:
    """One stacked bar per offer: a segment per part of the cost, and its interval as a whisker."""
    by = PER[comparison.unit][0]
    costs = [offer.costs[comparison.unit] for offer in comparison.offers]
    highest = max((float((cost.high or cost.total) * by) for cost in costs if cost is not None), default=0.0) or 1.0
    scale = (WIDTH - LABEL - 110) / highest
    marks: list[str] = []
    for i, (offer, cost) in enumerate(zip(comparison.offers, costs, strict=True)):
        y = i * ROW + 8
        marks.append(_text(LABEL - 8, y + 13, _short(_name(offer, comparison.against_first[i])), "end", offer.name))
        if cost is None:
            marks.append(_text(LABEL, y + 13, "no cost in this unit", "start"))
            continue
        _, parts = words.apportioned(cost, by)
        x = float(LABEL)
        for part in PARTS:
            if part in parts:
                part_width = float(cost.parts[part] * by) * scale
                title = f"{PART_NAMES[part]}: {parts[part]:,f}"
                marks.append(_rect(x, y, part_width, BAR, COLOURS[part], title))
                x += part_width
        interval_end = float((cost.high or cost.total) * by) * scale + LABEL
        marks.append(_text(max(x, interval_end) + 6, y + 13, money(cost.total * by), "start"))
        if cost.low is not None and cost.high is not None and cost.low != cost.high:
            low = LABEL + float(cost.low * by) * scale
            path = (
                f"M{low:.1f} {y + 3}v{BAR - 6}M{low:.1f} {y + BAR / 2}"
                f"H{interval_end:.1f}M{interval_end:.1f} {y + 3}v{BAR - 6}"
            )
            marks.append(f'<path class=ink d="{path}"/>')
    y, x = len(costs) * ROW + 12, 120.0
    for part in PARTS:
        if any(cost is not None and part in cost.parts for cost in costs):
            marks += [_rect(x, y, 10, 10, COLOURS[part], ""), _text(x + 14, y + 10, PART_NAMES[part], "start")]
            x += 28 + 6.4 * len(PART_NAMES[part])
    return _svg(y + 20, marks, "cost by offer and part")


def _tornado(offer: Offer, comparison: OfferComparison) -> str:
    swings = [swing for swing in comparison.swings if swing.offer == offer.name]
    cost = offer.costs[comparison.unit]
    if not swings or cost is None:
        return ""
    by = PER[comparison.unit][0]
    amounts = [float(amount * by) for swing in swings for amount in (swing.down, swing.up)]
    low, high = min(amounts), max(amounts)
    scale = (WIDTH - LABEL - 160) / ((high - low) or 1.0)
    left = LABEL + 70

    def x_of(amount: float) -> float:
        return left + (amount - low) * scale

    middle = x_of(float(cost.total * by))
    marks = [_text(4, 16, offer.name, "start")]
    for i, swing in enumerate(swings):
        marks += _swing(swing, 26 + i * 24, by, x_of(float(swing.down * by)), x_of(float(swing.up * by)))
    bottom = 26 + len(swings) * 24
    marks.append(f'<path class=ink stroke-dasharray="3 3" d="M{middle:.1f} 22V{bottom}"/>')
    marks.append(_text(middle, bottom + 14, money(cost.total * by), "middle"))
    return _svg(bottom + 22, marks, f"sensitivity of {offer.name}")


def _swing(swing: Swing, y: int, by: int, down: float, up: float) -> Iterator[str]:
    left, right = min(down, up), max(down, up)
    lower, higher = sorted((swing.down * by, swing.up * by))
    yield _text(LABEL - 8, y + 13, f"{swing.input}, {swing.change}", "end")
    yield _rect(
        left,
        y,
        max(right - left, 1.0),
        BAR,
        "#3b6fb6",
        f"{swing.input}: down {money(swing.down * by)}, up {money(swing.up * by)}",
    )
    yield _text(left - 4, y + 13, money(lower), "end", soft=True)
    yield _text(right + 4, y + 13, money(higher), "start", soft=True)


def _pairs(comparison: OfferComparison) -> Iterator[str]:
    if not comparison.pairs:
        return
    yield "<h2>Which is cheaper</h2><div class=wide><table>"
    yield "<tr><th>Offers</th><th>ratio</th><th class=word>judgement</th></tr>"
    for pair in comparison.pairs:
        interval = f" [{money(pair.low)}, {money(pair.high)}]" if pair.low is not None else ""
        ratio = NONE if pair.ratio is None else money(pair.ratio) + interval
        reasons = "; ".join((*pair.differences, *pair.notes))
        word = escape(pair.word) + (f"<br><small>{escape(reasons)}</small>" if reasons else "")
        names = f"{escape(pair.a)} / {escape(pair.b)}"
        yield f"<tr><td>{names}</td><td class=whole>{ratio}</td><td class=word>{word}</td></tr>"
    yield "</table></div>"


def _break_evens(comparison: OfferComparison) -> Iterator[str]:
    if comparison.break_evens:
        yield "<h2>Break-even between machines and paying by the token</h2>"
    by_name = {offer.name: offer for offer in comparison.offers}
    for break_even in comparison.break_evens:
        yield (
            f"<p><b>{escape(break_even.rent)}</b> against <b>{escape(break_even.by_token)}</b>: "
            f"{escape(break_even.word)}.</p>"
        )
        if break_even.per_day is not None:
            yield _lines(break_even, by_name[break_even.rent], by_name[break_even.by_token], comparison)


def _lines(break_even: BreakEven, rent: Offer, by_token: Offer, comparison: OfferComparison) -> str:
    """Cost per day over units per day: rented machines (fixed cost plus cost per unit), payment by token, break-even.

    The line of the machines ends where they reach their capacity.
    """
    rent_cost, token_cost = rent.costs[comparison.unit], by_token.costs[comparison.unit]
    assert break_even.per_day is not None and rent_cost is not None and token_cost is not None
    max_units = max(break_even.per_day * 2, min(break_even.carries, break_even.per_day * 6))
    fixed_per_day = sum(rent.hourly.values()) * 24
    marginal_cost = sum(amount for part, amount in rent_cost.parts.items() if part != "machines")
    rent_until = min(max_units, break_even.carries)  # the line of the machines ends at their capacity
    max_amount = max(token_cost.total * max_units, fixed_per_day + marginal_cost * rent_until)
    left, height = 90, 220

    def x(units: object) -> float:
        return left + float(str(units)) / float(max_units) * (WIDTH - left - 130)

    def y(amount: object) -> float:
        return 14 + height * (1 - float(str(amount)) / float(max_amount))

    rent_end_x, rent_end_amount = x(rent_until), fixed_per_day + marginal_cost * rent_until
    marks = [
        f'<path class=axis d="M{left} 14V{14 + height}H{WIDTH - 120}"/>',
        f'<path class=rent d="M{left} {y(fixed_per_day):.1f}L{rent_end_x:.1f} {y(rent_end_amount):.1f}"/>',
        f'<path class=token d="M{left} {y(0):.1f}L{x(max_units):.1f} {y(token_cost.total * max_units):.1f}"/>',
        f'<path class=axis stroke-dasharray="3 3" d="M{x(break_even.per_day):.1f} 14V{14 + height}"/>',
        _text(rent_end_x + 4, y(rent_end_amount) + 4, _short(break_even.rent), "start", break_even.rent),
        _text(
            x(max_units) + 4,
            y(token_cost.total * max_units) + 4,
            _short(break_even.by_token),
            "start",
            break_even.by_token,
        ),
        _text(left - 6, 22, money(max_amount, 3), "end", soft=True),
        _text(left - 6, 14 + height, "0", "end", soft=True),
        _text(left - 6, 40, f"{comparison.prices.currency} a day", "end", soft=True),
        _text(x(break_even.per_day), 14 + height + 16, f"{break_even.per_day:,.0f} a day", "middle"),
        _text(x(max_units), 14 + height + 16, f"{max_units:,.0f}", "end", soft=True),
    ]
    return _svg(height + 40, marks, f"{break_even.rent} against {break_even.by_token}")


def _short(name: str, most: int = 30) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _svg(height: float, marks: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role=img aria-label="{escape(label)}">{"".join(marks)}</svg>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}">{inner}</rect>'


def _text(x: float, y: float, text: str, anchor: str, title: str = "", *, soft: bool = False) -> str:
    inner = f"<title>{escape(title)}</title>" if title and title != text else ""
    kind = " class=soft" if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor={anchor}{kind}>{escape(text)}{inner}</text>'
