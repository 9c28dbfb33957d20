"""What requests cost, as one HTML page: the tables and sentences of `cost.py`, with charts.

Pure: takes an `OfferComparison`, returns a string. Binary floats are used only for positions in a chart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from loadgen.cost.comparison import BreakEven, OfferComparison
from loadgen.cost.unit_cost import PARTS, Offer
from loadgen.report import cost as words
from loadgen.report import page
from loadgen.report.cost import PART_NAMES, PER, money
from loadgen.report.page import Axis, Chart, Mark, Series

WIDTH, LABEL, MARGIN, ROW, BAR = 760, 220, 70, 34, 16  # of bars, in units of their drawing
COLORS = dict(zip(PARTS, page.COLORS, strict=True))


def render(comparison: OfferComparison) -> str:
    """The text of the whole HTML file."""
    prices = comparison.prices
    sheet = page.Page(f"What a request costs ({prices.currency})", "loadgen cost")
    is_marked = prices.sample or any(offer.evidence.simulated for offer in comparison.offers)
    sheet.add("<h1>What a request costs</h1>")
    sheet.add(f'<p class="{"sentence warn" if is_marked else "sentence"}">{escape(words.headline(comparison))}</p>')
    sheet.section("Offers, and what they rest on")
    for offer, differences in zip(comparison.offers, comparison.against_first, strict=True):
        unlike = [f"not comparable with the first: {'; '.join(differences)}"] if differences else []
        sheet.add(f"<h3>{escape(offer.name)}</h3><p>{escape(words.priced(offer))}</p>")
        sheet.add(f'<p class="soft">{escape(words.measured(offer))}</p>', page.listed([*offer.notes, *unlike], "warn"))
    sheet.section("Cost by unit")
    sheet.add(page.table(*words.costs(comparison)), page.listed(words.explained(comparison)))
    sheet.section(f"{prices.currency} per {PER[comparison.unit][1]}, and what it is made of")
    sheet.add(_cost_bars(comparison), page.table(*words.parts(comparison)), page.table(*words.power(comparison)))
    ratio, sentences = words.ratios(comparison)
    if sentences:
        sheet.section(ratio)
        sheet.add(page.listed(sentences))
    sheet.section("What moves it most")
    sheet.add(
        '<p class="soft">Each input alone: a capacity over its interval, what nobody has said the uncertainty of by '
        "10 %. The line is the cost as measured.</p>",
        *(_swing_bars(offer, comparison) for offer in comparison.offers),
    )
    title, sentences = words.break_evens(comparison)
    if sentences:
        sheet.section(title)
        sheet.add(page.listed(sentences))
        sheet.charts(_break_even_chart(one, comparison) for one in comparison.break_evens if one.per_day is not None)
    return sheet.render()


class Bar(NamedTuple):
    """One horizontal bar: its segments, each with its end, colour and meaning, and the amounts at either side."""

    name: str
    start: float
    segments: Sequence[tuple[float, str, str]]
    left: str
    right: str
    whisker: tuple[float, float] | None = None


def _cost_bars(comparison: OfferComparison) -> str:
    """One bar per offer: a segment per part of the cost, and its interval as a whisker; then what the colours mean."""
    by = PER[comparison.unit][0]
    bars = []
    for name, offer in zip(words.marked_names(comparison), comparison.offers, strict=True):
        cost = offer.costs[comparison.unit]
        if cost is None:
            bars.append(Bar(name, 0.0, (), "", "no cost in this unit"))
            continue
        printed, end, segments = words.apportioned(cost, by)[1], 0.0, []
        for part, amount in cost.parts.items():
            end += float(amount * by)
            segments.append((end, COLORS[part], f"{PART_NAMES[part]}: {printed[part]:,f}"))
        whisker = None
        if cost.low is not None and cost.high is not None and cost.low != cost.high:
            whisker = float(cost.low * by), float(cost.high * by)
        bars.append(Bar(name, 0.0, segments, "", money(cost.total * by), whisker))
    costs = [cost for offer in comparison.offers if (cost := offer.costs[comparison.unit]) is not None]
    used = [part for part in PARTS if any(part in cost.parts for cost in costs)]
    legend = " ".join(f'<span style="color:var(--{COLORS[part]})">■</span> {escape(PART_NAMES[part])}' for part in used)
    return _drawing(bars, "cost by offer and part") + f'<p class="soft">{legend}</p>'


def _swing_bars(offer: Offer, comparison: OfferComparison) -> str:
    """One bar per input: the cost of the offer where that input is moved down and up."""
    cost, by = offer.costs[comparison.unit], PER[comparison.unit][0]
    swings = [swing for swing in comparison.swings if swing.offer == offer.name]
    if not swings or cost is None:
        return ""
    bars = []
    for swing in swings:
        low, high = sorted((swing.down * by, swing.up * by))
        meaning = f"{swing.input}: down {money(swing.down * by)}, up {money(swing.up * by)}"
        segments = [(float(high), "c1", meaning)]
        bars.append(Bar(f"{swing.input}, {swing.change}", float(low), segments, money(low), money(high)))
    least = min(bar.start for bar in bars)
    heading = f"<h3>{escape(offer.name)}: {money(cost.total * by)}</h3>"
    return heading + _drawing(bars, f"sensitivity of {offer.name}", least, float(cost.total * by))


def _drawing(bars: Sequence[Bar], label: str, least: float = 0.0, line: float | None = None) -> str:
    """Horizontal bars on one scale from `least` to the largest value; `line`: a value that a dashed line marks."""
    ends = [end for bar in bars for end in (*(end for end, _, _ in bar.segments), *(bar.whisker or ()))]
    scale = (WIDTH - LABEL - 2 * MARGIN) / ((max(ends, default=0.0) - least) or 1.0)

    def x(value: float) -> float:
        return LABEL + MARGIN + (value - least) * scale

    height = len(bars) * ROW + 8
    marks = list(_marks(bars, x))
    if line is not None:
        marks.append(f'<path style="stroke:var(--soft)" stroke-dasharray="3 3" d="M{x(line):.1f} 0V{height}"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:100%;display:block;font-size:12px;fill:var(--ink)">{"".join(marks)}</svg>'
    )


def _marks(bars: Sequence[Bar], x: Callable[[float], float]) -> Iterator[str]:
    def text(at: float, words: str, anchor: str) -> str:
        return f'<text x="{at:.1f}" y="{y + 13}" text-anchor="{anchor}">{escape(words)}</text>'

    for i, bar in enumerate(bars):
        y = i * ROW + 8
        name = bar.name if len(bar.name) <= 34 else bar.name[:33] + "…"
        yield f"<g><title>{escape(bar.name)}</title>{text(LABEL - 8, name, 'end')}</g>"
        start = bar.start
        for end, color, meaning in bar.segments:
            width = max(x(end) - x(start), 1.0)
            yield (
                f'<rect x="{x(start):.1f}" y="{y}" width="{width:.1f}" height="{BAR}" style="fill:var(--{color})">'
                f"<title>{escape(meaning)}</title></rect>"
            )
            start = end
        low, high = bar.whisker or (bar.start, start)
        if bar.whisker:
            ends = "".join(f"M{x(end):.1f} {y + 3}v{BAR - 6}" for end in bar.whisker)
            line = f"M{x(low):.1f} {y + BAR // 2}H{x(high):.1f}"
            yield f'<path style="stroke:var(--ink);fill:none" d="{ends}{line}"/>'
        yield text(x(bar.start) - 4, bar.left, "end")
        yield text(x(max(start, high)) + 4, bar.right, "start")


def _break_even_chart(one: BreakEven, comparison: OfferComparison) -> Chart:
    """Cost per day over units per day: of machines (fixed, and per unit, up to their capacity) and by the token."""
    by_name = {offer.name: offer for offer in comparison.offers}
    rent, by_token = by_name[one.rent], by_name[one.by_token].costs[comparison.unit]
    rent_cost = rent.costs[comparison.unit]
    assert one.per_day is not None and rent_cost is not None and by_token is not None
    most = max(one.per_day * 2, min(one.carries, one.per_day * 6))
    rent_until = min(most, one.carries)
    fixed = sum(rent.hourly.values()) * 24
    marginal = sum(amount for part, amount in rent_cost.parts.items() if part != "machines")
    return Chart(
        kind="lines",
        title=f"{one.rent} against {one.by_token}",
        x=Axis(label=f"{PER[comparison.unit][1].removeprefix('1,000 ')} a day", min=0, max=float(most)),
        y=Axis(label=f"{comparison.prices.currency} a day", min=0),
        series=(
            Series(
                name=one.rent,
                x=(0.0, float(rent_until)),
                y=(float(fixed), float(fixed + marginal * rent_until)),
                color="c1",
            ),
            Series(name=one.by_token, x=(0.0, float(most)), y=(0.0, float(by_token.total * most)), color="c4"),
        ),
        marks=(Mark(x=float(one.per_day), label=f"{one.per_day:,.0f} a day", color="soft"),),
    )
