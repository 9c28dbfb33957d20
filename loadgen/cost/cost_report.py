"""Assembles the report of `loadgen cost`: sections and drawings.

Pure. Binary floats are used only for positions in a drawing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.core.results.manifest import ReasonCode
from loadgen.cost import cost_text
from loadgen.cost.break_even import HOURS_PER_DAY, BreakEven
from loadgen.cost.comparison import CostComparison
from loadgen.cost.cost_text import PART_NAMES, PRINTED_UNITS, format_money
from loadgen.pricing.priced_result import PricedResult
from loadgen.pricing.prices import Owned
from loadgen.pricing.reasons import render_notes
from loadgen.pricing.unit_cost import UnitCost
from loadgen.pricing.units import MACHINES, PARTS
from loadgen.render import page
from loadgen.render.page import Axis, Bar, Chart, Mark, Series
from loadgen.render.section import Bars, Bullets, Charts, Paragraph, Report, Section, section

COLORS = dict(zip(PARTS, (*page.COLORS, "warn"), strict=True))
OTHER_TYPE_EXPLANATION = (
    "OTHER INSTANCE TYPE: the price is that of another machine than the measured one (see --full)."
)
CHOSEN_LOAD_EXPLANATION = (
    '"At this load" is the load of the run, not the capacity: at a higher load a request may cost '
    "less."
)
BREAK_EVEN_HEADING = "Break-even of machines and a price per token"
SHORTEST_CHART = 2
"""A break-even chart reaches at least to this multiple of the break-even, which is then visible."""
LONGEST_CHART = 6
"""It shows the capacity up to this multiple, beyond which the crossing would be hard to see."""


def create_report(comparison: CostComparison) -> Report:
    """Return the report of `loadgen cost`, which is printed as text, Markdown or an HTML page.

    It starts with warnings and with a sentence for each result that says what a unit costs.
    """
    return Report(
        title="Cost of a request",
        page_title=f"Cost of a request ({comparison.prices.currency})",
        generated_by="loadgen cost",
        notices=list(cost_text.list_warnings(comparison)),
        headline=[
            Paragraph(sentence, large=True) for sentence in cost_text.create_headlines(comparison)
        ],
        sections=list(_build_sections(comparison)),
        brief=list(_build_brief_sections(comparison)),
    )


def _build_brief_sections(comparison: CostComparison) -> Iterator[Section]:
    """Yield what a terminal prints by default, in at most 10 lines: the answer and the costs.

    The answer for one result is its cost. The answer for several is which of them is cheaper.
    """
    # Pairs without the first result are left out, because there may be dozens of them.
    first = comparison.results[0].name
    ratios = [ratio for ratio in comparison.ratios if ratio.a == first]
    sentences = [f"{cost_text.describe_ratio(comparison, ratio)}." for ratio in ratios]
    sentences += cost_text.create_headlines(comparison, only_without_price=bool(ratios))
    yield section("", *map(Paragraph, sentences))
    prices = comparison.prices
    has_intervals = any(map(cost_text.has_intervals, comparison.results))
    has_exchange_rates = bool(cost_text.list_used_exchange_rates(comparison))
    is_line_needed = not prices.sample or has_intervals or has_exchange_rates
    # The notice about sample prices names the file and the currency is in the table.
    price_line = cost_text.describe_prices(comparison) if is_line_needed else ""
    has_other_type = any(map(cost_text.is_priced_as_other_type, comparison.results))
    other_type_caveat = OTHER_TYPE_EXPLANATION if has_other_type else ""
    has_chosen_load = any(map(cost_text.is_at_chosen_load, comparison.results))
    load_caveat = CHOSEN_LOAD_EXPLANATION if has_chosen_load else ""
    yield section(
        "",
        cost_text.build_brief_table(comparison),
        Paragraph(other_type_caveat, "soft"),
        Paragraph(load_caveat, "soft"),
        Paragraph(price_line, "soft"),
    )


def _build_sections(comparison: CostComparison) -> Iterator[Section]:
    """Yield the sections of the report, the most important first.

    A section without content, such as the steps of a run without tasks, is not rendered.
    """
    yield _build_parts_section(comparison)
    yield section(
        "Cost by unit",
        cost_text.build_unit_cost_table(comparison),
        Bullets(list(cost_text.list_unit_explanations(comparison))),
    )
    notes = comparison.prices.notes if comparison.prices.sample else ""
    yield section("Assumptions", cost_text.describe_prices(comparison), Paragraph(notes, "soft"))

    for result, differences in zip(
        comparison.results, comparison.differences_from_first, strict=True
    ):
        yield _build_result_section(result, differences)

    yield _build_class_section(comparison)
    yield section("Steps of a task", cost_text.build_step_table(comparison))
    yield section(
        "Energy",
        cost_text.build_declared_power_table(comparison),
        cost_text.build_measured_energy_table(comparison),
    )

    yield section(
        "By year",
        cost_text.build_yearly_table(comparison),
        Paragraph(cost_text.YEARLY_COST_EXPLANATION, "soft"),
    )
    yield _build_ratio_section(comparison)
    yield _build_sensitivity_section(comparison)
    yield _build_commitment_section(comparison)
    yield _build_break_even_section(comparison)


def _build_parts_section(comparison: CostComparison) -> Section:
    """Return the section with the parts of each cost: machines, energy, tokens and egress."""
    results = comparison.results
    owned_names = [result.name for result in results if isinstance(result.price, Owned)]
    rented_names = [result.name for result in results if not isinstance(result.price, Owned)]

    return section(
        "Parts of the cost",
        _build_cost_bars(comparison),
        cost_text.build_part_table(comparison),
        Paragraph(cost_text.compare_owned_and_rented(owned_names, rented_names), "warn"),
    )


def _build_ratio_section(comparison: CostComparison) -> Section:
    """Return the section that says for each pair of results which is cheaper, and by how much."""
    sentences = [cost_text.describe_ratio(comparison, ratio) for ratio in comparison.ratios]
    return section(cost_text.ratio_heading(comparison), Bullets(sentences))


def _build_commitment_section(comparison: CostComparison) -> Section:
    """Return the section on prices with a commitment, such as one year, against those without."""
    sentences = [
        f"{commitment.committed} vs. {commitment.on_demand}: {commitment.judgment}"
        for commitment in comparison.commitments
    ]
    return section("Commitment vs. on demand", Bullets(sentences))


def _build_result_section(result: PricedResult, differences: Sequence[ReasonCode]) -> Section:
    """Return the section of one result: its price, its measurement, and what qualifies both.

    `differences` are the differences that forbid comparing it with the first result.
    """
    caveats = list(result.notes)
    if differences:
        caveats.append(f"NOT COMPARABLE with the first: {'; '.join(render_notes(differences))}")

    return section(
        result.name,
        cost_text.describe_result_price(result),
        Paragraph(cost_text.describe_measurement(result), "soft"),
        Bullets(caveats, "warn"),
        is_subsection=True,
    )


def _build_class_section(comparison: CostComparison) -> Section:
    """Return the section with the costs of each request class, empty without classes."""
    table = cost_text.build_class_table(comparison)
    explanation = ""
    if table.rows:
        explanation = (
            "A class pays for its own tokens, or for machines in proportion to its tokens."
        )
    return section("Classes", table, Paragraph(explanation, "soft"))


def _build_sensitivity_section(comparison: CostComparison) -> Section:
    """Return the section that shows how each cost changes if one of its inputs changes.

    It tells the reader which input is worth knowing better: the price, the rate or the tokens.
    """
    table = cost_text.build_sensitivity_table(comparison)
    explanation = ""
    if table.rows:
        explanation = (
            "One input is changed at a time: a measured rate over its confidence interval, any "
            "other input by 10 %."
        )

    return section(
        "Sensitivity",
        *(_build_sensitivity_bars(result, comparison) for result in comparison.results),
        table,
        Paragraph(explanation, "soft"),
    )


def _build_break_even_section(comparison: CostComparison) -> Section:
    """Return the section that says from which load on machines cost less than a price per token.

    It has a sentence for each pair of the two. If machines always cost more, there is no break-even
    and so no chart.
    """
    sentences = [
        f"{break_even.machines} vs. {break_even.per_token}: {break_even.judgment}"
        for break_even in comparison.break_evens
    ]
    charts = [
        _build_break_even_chart(break_even, comparison)
        for break_even in comparison.break_evens
        if break_even.units_per_day is not None
    ]
    return section(BREAK_EVEN_HEADING, Bullets(sentences), Charts(charts))


def _build_cost_bars(comparison: CostComparison) -> Bars:
    """Return a bar for each result, and a legend of the parts that occur in any of them.

    A result without a cost in the compared unit has an empty bar that says so.
    """
    count = PRINTED_UNITS[comparison.unit].quantity
    bars: list[Bar] = []

    used_parts: set[str] = set()
    for name, result in zip(cost_text.mark_names(comparison), comparison.results, strict=True):
        cost = result.costs[comparison.unit]
        if cost is None:
            bars.append(Bar(name, "no cost in this unit"))
        else:
            used_parts.update(cost.parts)
            bars.append(_build_cost_bar(name, cost, count))

    legend = {PART_NAMES[part]: COLORS[part] for part in PARTS if part in used_parts}
    return Bars(rows=bars, included_value=0.0, legend=legend)


def _build_cost_bar(name: str, cost: UnitCost, count: int) -> Bar:
    """Return the bar of the cost of `count` units.

    It has a segment for each part of the cost, end to end, and the interval as a whisker. Labels
    have rounded amounts that add up to the printed total.
    """
    rounded = cost_text.round_parts(cost, count)
    segments = []

    segment_start = 0.0
    for part, amount in cost.parts.items():
        segment_end = segment_start + float(amount * count)
        label = f"{PART_NAMES[part]}: {rounded.parts[part]:,f}"
        segments.append((segment_start, segment_end, COLORS[part], label))
        segment_start = segment_end

    whisker = None
    if cost.low is not None and cost.high is not None and cost.low != cost.high:
        whisker = (float(cost.low * count), float(cost.high * count))

    interval = cost_text.format_interval_of(cost, count)
    total_label = f"{format_money(cost.total * count)} {interval}"
    return Bar(name, total_label, segments, whisker)


def _build_sensitivity_bars(result: PricedResult, comparison: CostComparison) -> Bars:
    """Return a tornado chart: a bar for each input, from the lowest to the highest cost it causes.

    A line across all bars marks the cost with unchanged inputs. A result without a cost in the
    compared unit has no bars.
    """
    cost = result.costs[comparison.unit]
    count = PRINTED_UNITS[comparison.unit].quantity
    if cost is None:
        return Bars(rows=())

    bars = []
    for sensitivity in comparison.sensitivities:
        if sensitivity.result_name != result.name:
            continue

        with_lower_input = sensitivity.cost_with_lower_input * count
        with_higher_input = sensitivity.cost_with_higher_input * count
        low, high = sorted((with_lower_input, with_higher_input))
        tooltip = (
            f"{sensitivity.input_name}: down {format_money(with_lower_input)}, "
            f"up {format_money(with_higher_input)}"
        )
        bars.append(
            Bar(
                f"{sensitivity.input_name}, {sensitivity.change}",
                f"{format_money(low)} to {format_money(high)}",
                [(float(low), float(high), "c1", tooltip)],
            )
        )

    total = cost.total * count
    return Bars(rows=bars, title=f"{result.name}: {format_money(total)}", marked_value=float(total))


def _build_break_even_chart(break_even: BreakEven, comparison: CostComparison) -> Chart:
    """Return the chart of cost per day over units per day, for machines and for a price per token.

    A price per token is a line through the origin. Machines cost the same with no units at all, and
    each unit adds a little, for example for energy. Their line ends at their capacity. The lines
    cross at the break-even, which is in the middle of the chart or further to the left.

    Args:
        break_even: The break-even, which machines do reach.
        comparison: The results that the break-even refers to by their names.
    """
    unit = comparison.unit
    results_by_name = {result.name: result for result in comparison.results}
    machines = results_by_name[break_even.machines]
    machine_cost = machines.costs[unit]
    token_cost = results_by_name[break_even.per_token].costs[unit]
    units_per_day = break_even.units_per_day
    assert units_per_day is not None and machine_cost is not None and token_cost is not None
    capacity = break_even.capacity_per_day

    # Show at least twice the break-even, and the whole capacity if it is not too far away. These
    # ends of the horizontal axis and of the lines are in units per day.
    shortest_end = units_per_day * SHORTEST_CHART
    longest_end = units_per_day * LONGEST_CHART
    chart_end = max(shortest_end, min(capacity, longest_end))
    machines_end = min(chart_end, capacity)
    fixed_cost_per_day = sum(machines.hourly_cost_parts.values()) * HOURS_PER_DAY
    marginal_cost = sum(amount for part, amount in machine_cost.parts.items() if part != MACHINES)
    machines_cost_at_end = fixed_cost_per_day + marginal_cost * machines_end
    noun = PRINTED_UNITS[unit].name.removeprefix("1,000 ")

    return Chart(
        title=f"{break_even.machines} vs. {break_even.per_token}",
        x=Axis(label=f"{noun} a day", min=0, max=float(chart_end)),
        y=Axis(label=f"{comparison.prices.currency} a day", min=0),
        series=(
            Series(
                name=break_even.machines,
                x=(0.0, float(machines_end)),
                y=(float(fixed_cost_per_day), float(machines_cost_at_end)),
                color="c1",
            ),
            Series(
                name=break_even.per_token,
                x=(0.0, float(chart_end)),
                y=(0.0, float(token_cost.total * chart_end)),
                color="c4",
            ),
        ),
        marks=(Mark(x=float(units_per_day), label=f"{units_per_day:,.0f} a day", color="soft"),),
    )
