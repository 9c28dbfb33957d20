"""What requests cost, as one HTML page: the tables and sentences of `cost.py`, with charts.

Pure: takes an `OfferComparison`, returns a string. Binary floats are used only for positions in a chart.
"""

from __future__ import annotations

from html import escape

from loadgen.cost import text as words
from loadgen.cost.comparison import BreakEven, OfferComparison
from loadgen.cost.text import PART_NAMES, PER, money
from loadgen.present import page
from loadgen.present.page import Axis, Bar, Chart, Mark, Series
from loadgen.pricing.reasons import texts
from loadgen.pricing.unit_cost import PARTS, Offer

COLORS = dict(zip(PARTS, page.COLORS, strict=True))


def render(comparison: OfferComparison) -> str:
    """The text of the whole HTML file."""
    prices = comparison.prices
    sheet = page.Page(f"What a request costs ({prices.currency})", "loadgen cost")
    is_marked = prices.sample or any(offer.evidence.simulated for offer in comparison.offers)
    sheet.heading("What a request costs")
    sheet.say(words.headline(comparison), "sentence warn" if is_marked else "sentence")
    sheet.section("Offers, and what they rest on")
    for offer, differences in zip(comparison.offers, comparison.against_first, strict=True):
        unlike = [f"not comparable with the first: {'; '.join(texts(differences))}"] if differences else []
        sheet.add(f"<h3>{escape(offer.name)}</h3>")
        sheet.say(words.priced(offer))
        sheet.say(words.measured(offer), "soft")
        sheet.listed([*offer.notes, *unlike], "warn")
    sheet.section("Cost by unit")
    sheet.table(*words.costs(comparison))
    sheet.listed(words.explained(comparison))
    sheet.section(f"{prices.currency} per {PER[comparison.unit][1]}, and what it is made of")
    _cost_bars(sheet, comparison)
    sheet.table(*words.parts(comparison))
    if any(offer.steps for offer in comparison.offers):
        sheet.table(*words.steps(comparison))
    sheet.table(*words.power(comparison))
    sheet.table(*words.measured_energy(comparison))
    ratio, sentences = words.ratios(comparison)
    if sentences:
        sheet.section(ratio)
        sheet.listed(sentences)
    sheet.section("What moves it most")
    sheet.say(
        "Each input alone: a capacity over its interval, what nobody has said the uncertainty of by 10 %. The line is "
        "the cost as measured.",
        "soft",
    )
    for offer in comparison.offers:
        _swing_bars(sheet, offer, comparison)
    title, sentences = words.break_evens(comparison)
    if sentences:
        sheet.section(title)
        sheet.listed(sentences)
        sheet.charts(_break_even_chart(one, comparison) for one in comparison.break_evens if one.per_day is not None)
    return sheet.render()


def _cost_bars(sheet: page.Page, comparison: OfferComparison) -> None:
    """One bar per offer: a segment per part of the cost, and its interval as a whisker; then what the colours mean."""
    by = PER[comparison.unit][0]
    bars, used = [], []
    for name, offer in zip(words.marked_names(comparison), comparison.offers, strict=True):
        cost = offer.costs[comparison.unit]
        if cost is None:
            bars.append(Bar(name, "no cost in this unit"))
            continue
        printed, end, segments = words.apportioned(cost, by)[1], 0.0, []
        for part, amount in cost.parts.items():
            start, end = end, end + float(amount * by)
            segments.append((start, end, COLORS[part], f"{PART_NAMES[part]}: {printed[part]:,f}"))
            used.append(part)
        whisker = None
        if cost.low is not None and cost.high is not None and cost.low != cost.high:
            whisker = float(cost.low * by), float(cost.high * by)
        bars.append(Bar(name, f"{money(cost.total * by)} {words.ends(cost, by)}", segments, whisker))
    sheet.bars(bars, low=0.0)
    sheet.legend({PART_NAMES[part]: COLORS[part] for part in PARTS if part in used})


def _swing_bars(sheet: page.Page, offer: Offer, comparison: OfferComparison) -> None:
    """One bar per input: the cost of the offer where that input is moved down and up."""
    cost, by = offer.costs[comparison.unit], PER[comparison.unit][0]
    swings = [swing for swing in comparison.swings if swing.offer == offer.name]
    if not swings or cost is None:
        return
    bars = []
    for swing in swings:
        low, high = sorted((swing.down * by, swing.up * by))
        meaning = f"{swing.input}: down {money(swing.down * by)}, up {money(swing.up * by)}"
        segments = [(float(low), float(high), "c1", meaning)]
        bars.append(Bar(f"{swing.input}, {swing.change}", f"{money(low)} to {money(high)}", segments))
    sheet.add(f"<h3>{escape(offer.name)}: {money(cost.total * by)}</h3>")
    sheet.bars(bars, line=float(cost.total * by))


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
