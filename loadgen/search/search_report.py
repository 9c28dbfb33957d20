"""The report of a search: its result and interval, what limits the load, and every trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from loadgen.core import format
from loadgen.core.metrics.summary import NamedSummary, Summary
from loadgen.render.additions import ExtraSections
from loadgen.render.page import Axis, Band, Chart, Mark, Series, Tile
from loadgen.render.section import (
    Charts,
    Kind,
    Paragraph,
    Report,
    Section,
    Tiles,
    section,
    simulated_notice,
)
from loadgen.runs import sweep_charts, sweep_report
from loadgen.runs.slo_text import judge_objectives
from loadgen.runs.sweep_curve import SweepCurve, build_curve
from loadgen.search import search_text
from loadgen.search.experiment import StoredSearch
from loadgen.search.goal import FAILED, INVALID, PASSED
from loadgen.search.search_results import (
    CONFIRMING_KINDS,
    FOUND,
    SearchResult,
    TrialResult,
    capacity_and_state,
    find_best_trial,
)

OUTCOME_COLORS = {PASSED: "good", FAILED: "bad", INVALID: "warn"}
KIND_LABELS = {"confirm": "confirmation", "sustain": "longer"}
LOG_SCALE_LOADS = 3  # a load axis is logarithmic if the highest load is so many times the lowest
LOG_SCALE_LATENCIES = 20  # the same for an axis of latencies


@dataclass(frozen=True)
class SearchReportInput:
    """What the report of a search is made of.

    Attributes:
        search: The stored search.
        runs: The summaries of its trials by the names of their runs.
        unit: The unit of the loads, as it is written after a number.
        evidence: The name of the run that shows the capacity, or "".
        additions: The sections that other results in the same directory add.
    """

    search: StoredSearch
    runs: Sequence[NamedSummary]
    unit: str
    evidence: str = ""
    additions: Sequence[ExtraSections] = ()
    summaries: Mapping[str, Summary] = field(init=False)

    def __post_init__(self) -> None:
        """Index the summaries by the names of their runs."""
        object.__setattr__(self, "summaries", dict(self.runs))

    @property
    def result(self) -> SearchResult:
        """What the search found."""
        return self.search.result

    @property
    def trials(self) -> list[TrialResult]:
        """The trials in the order in which they ran."""
        return sorted(self.search.trials, key=lambda trial: trial.number)

    @property
    def trials_by_load(self) -> list[TrialResult]:
        """The trials in the order of their loads."""
        return sorted(self.search.trials, key=lambda trial: (trial.load, trial.number))


def render_search_report(source: SearchReportInput) -> Report:
    """Return the report of a search."""
    sweep_curve = None
    if source.runs:
        sweep_curve = msgspec.structs.replace(build_curve(source.runs), best=source.evidence)
    warnings = [simulated_notice()] if source.search.simulated else []
    headline = search_text.headline(
        source.result, source.trials, source.search.term_names, source.unit
    )
    answer = [Paragraph(headline, _headline_kind(source.result), large=True)]
    for addition in source.additions:
        warnings += addition.notices
        answer += addition.headline()
    name = "highest load within the SLO"
    return Report(
        title=name if sweep_curve is None else " · ".join(_title_parts(sweep_curve, name)),
        page_title="search" if sweep_curve is None else f"{sweep_curve.workload}: search",
        generated_by=_describe_version(sweep_curve),
        notices=warnings,
        headline=answer,
        sections=_sections(source, sweep_curve),
    )


def _title_parts(sweep_curve: SweepCurve, name: str) -> list[str]:
    """Return the workload, the model and the name of the report, without those not known."""
    return [part for part in (sweep_curve.workload, sweep_curve.model, name) if part]


def _describe_version(sweep_curve: SweepCurve | None) -> str:
    version = "" if sweep_curve is None else f" {sweep_curve.version}"
    return f"loadgen{version} report of a search"


def _headline_kind(result: SearchResult) -> Kind:
    if result.stop_reason in FOUND:
        return "good"
    return "bad" if result.stop_reason == "none" else "warn"


def _sections(source: SearchReportInput, sweep_curve: SweepCurve | None) -> list[Section]:
    """Return the sections of the report, from top to bottom."""
    trials = source.trials
    limits = " ".join(_describe_limits(trials, source.summaries))
    limits = limits or "no load of this search missed the SLO."
    sections = [
        section("", Tiles(list(_numbers(source))), f"What limits it: {limits}"),
        section("", *(() if sweep_curve is None else (sweep_report.measured_facts(sweep_curve),))),
    ]
    for addition in source.additions:
        sections += addition.sections
    sections += [
        _trials_section(source),
        search_text.confirmation_section(
            source.result, trials, source.unit, simulated=source.search.simulated
        ),
    ]
    if sweep_curve is not None:
        charts = Charts(list(sweep_charts.sweep_charts(sweep_curve)))
        sections.append(section("Throughput and latency of the trials", charts, folded=True))
    return sections


def _trials_section(source: SearchReportInput) -> Section:
    """Return the section with the charts and the table of the trials."""
    trials = source.trials
    charts = []
    if trials:
        charts = [_chart_over_time(source), *_charts_of_terms(source)]
    units = search_text.describe_units(source.unit) if trials else ""
    return section(
        "Trials",
        Charts(charts),
        search_text.trial_table(source.trials_by_load),
        Paragraph(units, "soft"),
        id="trials",
    )


# Headline numbers


def _numbers(source: SearchReportInput) -> Iterator[Tile]:
    """Yield the headline numbers: capacity, confirmed load, interval, tokens and effort."""
    result = source.result
    trials = source.trials
    unit = source.unit.strip()
    yield _capacity_number(source)
    label = search_text.confirmed_load_label(result, trials)
    confirmed = result.confirmed_load
    start = "after a warm-up" if result.warmup_s else "from empty"
    doubt = "" if label == "Confirmed" else "; not seen to last"
    yield Tile(
        label,
        format.NONE if confirmed is None else f"{confirmed:.4g}",
        unit,
        f"a run at full length, {start}{doubt}",
    )
    if result.load is not None and result.interval is not None:
        bounds = f"95 % interval {result.interval.low:.4g} to {result.interval.high:.4g}"
        yield Tile("Half of runs pass", f"{result.load:.4g}", unit, f"on the way: {bounds}")
    tokens = format.quantity(_output_tokens_per_s(result, trials))
    yield Tile("Output tokens", tokens, "/s", "in the run at this load")
    yield Tile("Spent", format.duration(result.duration_s), "", f"{len(trials)} trials")


def _capacity_number(source: SearchReportInput) -> Tile:
    """Return the capacity as a headline number, with its state."""
    load, state = capacity_and_state(source.result, source.trials)
    unit = source.unit.strip()
    if load is None or state == "stopped":
        text = search_text.describe_capacity(source.result, source.trials, source.unit)
        return Tile("Capacity", text, "", "within the SLO")
    if source.result.is_lower_bound:
        return Tile("Capacity", f"at least {load:.4g}", unit, "the highest load that was allowed")
    return Tile("Capacity", f"{load:.4g}", unit, state)


def _output_tokens_per_s(result: SearchResult, trials: Sequence[TrialResult]) -> float | None:
    """Return the output tokens per second of the run that shows the capacity, if they are known."""
    load, _ = capacity_and_state(result, trials)
    best = find_best_trial(trials)
    if load is None or best is None:
        return None
    return best.metrics.get("output_tokens_per_s")


# What limits the load


def _describe_limits(
    trials: Sequence[TrialResult], summaries: Mapping[str, Summary]
) -> Iterator[str]:
    """Yield sentences about what limits the load.

    The first one states why the lowest load failed or grew. If several terms were missed, another
    one states how many of the failed trials missed each.
    """
    failed = [trial for trial in trials if trial.has_failed]
    growing = [trial for trial in trials if trial.has_passed and not _may_last(trial)]
    lowest = min((*failed, *growing), key=lambda trial: trial.load, default=None)
    if lowest is None:
        return
    factor = lowest.length_factor
    length = f" (over {factor:g} times the length of a trial)" if factor > 1 else ""
    what_happened = "missed" if lowest.has_failed else "held and grew"
    reason = lowest.reason if lowest.has_failed else lowest.sustained_reason
    yield f"at {lowest.load:.4g}, the lowest load that {what_happened}{length}: {reason}."
    misses = _misses_by_term(failed, summaries)
    if len(misses) > 1 and any(misses.values()):
        counts = [
            f"{term} by {sum(is_missed)} of {len(is_missed)}" for term, is_missed in misses.items()
        ]
        yield f"Missed by the loads above: {', '.join(counts)}."


def _misses_by_term(
    failed: Sequence[TrialResult], summaries: Mapping[str, Summary]
) -> dict[str, list[bool]]:
    """Return for each term of the SLO which of these trials missed it.

    A trial is left out of a term that it cannot judge, as after few requests.
    """
    misses: dict[str, list[bool]] = {}
    for trial in failed:
        if trial.run_name not in summaries:
            continue
        for term, is_met in judge_objectives(summaries[trial.run_name]):
            term_misses = misses.setdefault(term, [])
            if is_met is not None:
                term_misses.append(not is_met)
    return misses


def _may_last(trial: TrialResult) -> bool:
    """Return whether the load of a trial may last: no trial at full length showed growth."""
    return trial.kind not in CONFIRMING_KINDS or trial.sustained is not False


# Charts


def _chart_over_time(source: SearchReportInput) -> Chart:
    """Return the chart of the load of each trial at the time at which it ended.

    It shows the outcomes, over the interval of the result.
    """
    trials = source.trials
    unit = source.unit.strip()
    end_times_s = list(accumulate(trial.duration_s for trial in trials))
    loads = [trial.load for trial in trials]
    interval = source.result.interval
    bands: tuple[Band, ...] = ()
    note = "each at its end"
    if interval is not None:
        bands = (Band(start=interval.low, end=interval.high, color="good", across=True),)
        note = "each at its end, by outcome; shaded: the 95 % interval of the answer"
    capacity, _ = capacity_and_state(source.result, trials)
    marks: tuple[Mark, ...] = ()
    if capacity is not None:
        marks = (Mark(y=capacity, label=f"{capacity:.4g}{source.unit}", color="good"),)
    return Chart(
        title="Trials over time",
        note=note,
        x=Axis(label="spent so far", format="time", min=0),
        y=Axis(label=f"load, {unit}, log", log=max(loads) > LOG_SCALE_LOADS * min(loads)),
        series=(
            Series(x=end_times_s, y=loads, color="c6", width=1),
            *_dots_by_outcome(trials, end_times_s, loads),
        ),
        bands=bands,
        marks=marks,
        wide=True,
    )


def _charts_of_terms(source: SearchReportInput) -> Iterator[Chart]:
    """Yield a chart of each term of the SLO over the load.

    The term that is met last limits the load.
    """
    trials = source.trials
    terms = next((summary.goodput.slo for summary in source.summaries.values()), ())
    loads = [trial.load for trial in trials]
    for index, term in enumerate(terms):
        values = [_term_value_ms(source.summaries.get(trial.run_name), index) for trial in trials]
        known = [value for value in values if value is not None]
        if not known:
            continue
        is_log = max(*known, term.limit_ms) > LOG_SCALE_LATENCIES * min(known)
        y_axis = Axis(label="ms", unit="ms", min=0)
        if is_log:
            y_axis = Axis(label="ms, log", unit="ms", log=True)
        yield Chart(
            title=term.promise,
            note="of each trial; one that ended early shows the part it saw",
            x=Axis(label=f"load, {source.unit.strip()}", pad=True),
            y=y_axis,
            series=tuple(_dots_by_outcome(trials, loads, values)),
            marks=(Mark(y=term.limit_ms, label="limit", color="bad", extends_axis=True),),
        )


def _term_value_ms(summary: Summary | None, index: int) -> float | None:
    """Return the latency of a term in a run, or None if the run does not have this term."""
    if summary is None or len(summary.goodput.slo) <= index:
        return None
    return summary.goodput.slo[index].value_ms


def _dots_by_outcome(
    trials: Sequence[TrialResult], x: Sequence[float], y: Sequence[float | None]
) -> Iterator[Series]:
    """Yield the trials as dots in one series for each outcome. Full-length trials have a label."""
    for outcome, color in OUTCOME_COLORS.items():
        indices = [
            index
            for index, trial in enumerate(trials)
            if trial.outcome == outcome and y[index] is not None
        ]
        if not indices:
            continue
        labels = [KIND_LABELS.get(trials[index].kind, "") for index in indices]
        links = [sweep_charts.run_link(trials[index].run_name) for index in indices]
        yield Series(
            name=search_text.OUTCOME_LABELS[outcome],
            x=[x[index] for index in indices],
            y=[y[index] for index in indices],
            color=color,
            width=0,
            dots=True,
            labels=tuple(labels),
            links=tuple(links),
        )
