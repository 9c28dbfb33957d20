"""What requests cost: the report of which text, Markdown and page are made, and its drawings.

Pure: takes an `OfferComparison`. Binary floats are used only for positions in a drawing.
"""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.cost import text as words
from loadgen.cost.comparison import BreakEven, OfferComparison
from loadgen.cost.text import PART_NAMES, PER, money
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned
from loadgen.pricing.reasons import texts
from loadgen.pricing.units import PARTS
from loadgen.render import page
from loadgen.render.page import Axis, Bar, Chart, Mark, Series
from loadgen.render.section import Bars, Bullets, Charts, Paragraph, Report, Section, section

COLORS = dict(zip(PARTS, (*page.COLORS, "warn"), strict=True))


def report(comparison: OfferComparison) -> Report:
    """The whole answer: what each offer rests on, its cost by unit and in parts, what moves it, each pair."""
    currency = comparison.prices.currency
    return Report(
        title="What a request costs",
        tab=f"What a request costs ({currency})",
        made_by="loadgen cost",
        warned=list(words.warned(comparison)),
        answer=[Paragraph(sentence, large=True) for sentence in words.answer(comparison)],
        sections=list(_sections(comparison)),
    )


def _offers(comparison: OfferComparison) -> Iterator[Section]:
    for offer, differences in zip(comparison.offers, comparison.against_first, strict=True):
        unlike = (
            [f"NOT COMPARABLE with the first: {'; '.join(texts(differences))}"]
            if differences
            else []
        )
        against = Bullets([*offer.notes, *unlike], "warn")
        yield section(
            offer.name,
            words.priced(offer),
            Paragraph(words.measured(offer), "soft"),
            against,
            small=True,
        )


def _sections(comparison: OfferComparison) -> Iterator[Section]:
    (ratio, pairs), (break_even, sentences) = (
        words.ratios(comparison),
        words.break_evens(comparison),
    )
    owned = [offer.name for offer in comparison.offers if isinstance(offer.price, Owned)]
    others = [offer.name for offer in comparison.offers if not isinstance(offer.price, Owned)]
    caveat = Paragraph(words.own_beside_rent(owned, others), "warn")
    yield section("What it is made of", _cost_bars(comparison), words.parts(comparison), caveat)
    yield section(
        "Cost by unit", words.costs(comparison), Bullets(list(words.explained(comparison)))
    )
    yield section("What it rests on", words.about_prices(comparison))
    yield from _offers(comparison)
    of_classes = words.classes(comparison)
    shared = (
        "A class pays for its own tokens, or for the machines by its share of all tokens."
        if of_classes.rows
        else ""
    )
    yield section("Classes", of_classes, Paragraph(shared, "soft"))
    yield section("Steps of a task", words.steps(comparison))
    yield section("Energy", words.power(comparison), words.measured_energy(comparison))
    yield section("By year", words.by_year(comparison), Paragraph(words.BY_YEAR, "soft"))
    yield section(ratio, Bullets(pairs))
    swings = words.swings(comparison)
    how = (
        "Each input alone: a capacity over its interval, by 10 % where nobody said how sure it is."
    )
    yield section(
        "What moves it most",
        *(_swing_bars(offer, comparison) for offer in comparison.offers),
        swings,
        Paragraph(how if swings.rows else "", "soft"),
    )
    committed = [
        f"{one.committed} against {one.given_back}: {one.word}" for one in comparison.commitments
    ]
    yield section("Committed, or given back when not needed", Bullets(committed))
    charts = [
        _break_even_chart(one, comparison)
        for one in comparison.break_evens
        if one.per_day is not None
    ]
    yield section(break_even, Bullets(sentences), Charts(charts))


def _cost_bars(comparison: OfferComparison) -> Bars:
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
        bars.append(
            Bar(name, f"{money(cost.total * by)} {words.ends(cost, by)}", segments, whisker)
        )
    return Bars(
        rows=bars,
        low=0.0,
        legend={PART_NAMES[part]: COLORS[part] for part in PARTS if part in used},
    )


def _swing_bars(offer: PricedResult, comparison: OfferComparison) -> Bars:
    """One bar per input: the cost of the offer where that input is moved down and up; the line is the cost itself."""
    cost, by = offer.costs[comparison.unit], PER[comparison.unit][0]
    if cost is None:
        return Bars(rows=())
    bars = []
    for swing in (swing for swing in comparison.swings if swing.offer == offer.name):
        low, high = sorted((swing.down * by, swing.up * by))
        meaning = f"{swing.input}: down {money(swing.down * by)}, up {money(swing.up * by)}"
        segments = [(float(low), float(high), "c1", meaning)]
        bars.append(
            Bar(f"{swing.input}, {swing.change}", f"{money(low)} to {money(high)}", segments)
        )
    total = cost.total * by
    return Bars(rows=bars, title=f"{offer.name}: {money(total)}", line=float(total))


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
        x=Axis(
            label=f"{PER[comparison.unit][1].removeprefix('1,000 ')} a day", min=0, max=float(most)
        ),
        y=Axis(label=f"{comparison.prices.currency} a day", min=0),
        series=(
            Series(
                name=one.rent,
                x=(0.0, float(rent_until)),
                y=(float(fixed), float(fixed + marginal * rent_until)),
                color="c1",
            ),
            Series(
                name=one.by_token,
                x=(0.0, float(most)),
                y=(0.0, float(by_token.total * most)),
                color="c4",
            ),
        ),
        marks=(Mark(x=float(one.per_day), label=f"{one.per_day:,.0f} a day", color="soft"),),
    )
