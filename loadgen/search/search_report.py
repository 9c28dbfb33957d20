"""The report of a search: its result and interval, what limits the load, and every trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import msgspec

from loadgen.core import format
from loadgen.core.metrics.slo_terms import TermResult
from loadgen.core.metrics.summary import NamedSummary, Summary
from loadgen.render.additions import ExtraSections
from loadgen.render.page import Axis, Chart, Mark, Series, ShadedBand, Tile
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
from loadgen.repeated.capacity import STATE_LABELS
from loadgen.runs import sweep_charts, sweep_report
from loadgen.runs.slo_text import judge_objectives
from loadgen.runs.sweep_curve import SweepCurve, build_curve
from loadgen.search import search_text
from loadgen.search.agent_capacity import AgentCapacity, build_agents_section, list_brief_rows
from loadgen.search.experiment import StoredSearch
from loadgen.search.goal import FAILED, INVALID, PASSED
from loadgen.search.search_results import (
    CONFIRMED_STOPS,
    SearchResult,
    TrialResult,
    capacity_and_state,
)

OUTCOME_COLORS = {PASSED: "good", FAILED: "bad", INVALID: "warn"}
KIND_LABELS = {"confirm": "confirmation", "sustain": "longer trial"}
LOG_SCALE_LOADS = 3  # a load axis is logarithmic if the highest load is so many times the lowest
LOG_SCALE_LATENCIES = 20  # the same for an axis of latencies


@dataclass(frozen=True)
class SearchReportInput:
    """What the report of a search is made of.

    Attributes:
        search: The stored search.
        runs: The summaries of its trials by the names of their runs.
        unit: The unit of the loads, as it is written after a number.
        capacity_run_name: The name of the run that shows the capacity, or "".
        additions: The sections that other results in the same directory add.
        agents: The sessions per accelerator and per megawatt, for a search over sessions.
    """

    search: StoredSearch
    runs: Sequence[NamedSummary]
    unit: str
    capacity_run_name: str = ""
    additions: Sequence[ExtraSections] = ()
    agents: AgentCapacity | None = None

    @cached_property
    def summaries(self) -> Mapping[str, Summary]:
        """The summaries of the trials, by the names of their runs."""
        return dict(self.runs)

    @property
    def result(self) -> SearchResult:
        """What the search found."""
        return self.search.result

    @property
    def trials(self) -> list[TrialResult]:
        """The trials in the order in which they ran."""
        return sorted(self.search.trials, key=lambda trial: trial.number)

    @property
    def limit(self) -> str:
        """What limits the load, in one sentence or two."""
        sentences = " ".join(_describe_limits(self.trials, self.summaries, self.unit))
        return sentences or "no trial missed the SLO."


def render_search_report(source: SearchReportInput) -> Report:
    """Return the report of a search with a result, for a terminal, Markdown and a page.

    Without the runs of the trials, which may have been deleted, it has no throughput curve, and its
    title does not state the workload and the target.
    """
    trial_curve = _build_trial_curve(source)
    title = _title(trial_curve)
    headline = [_headline_paragraph(source)]

    notices = [simulated_notice()] if source.search.simulated else []
    for addition in source.additions:
        notices += addition.notices
        headline += addition.headline()

    return Report(
        title=title,
        page_title="search" if trial_curve is None else f"{trial_curve.workload}: search",
        generated_by=_describe_version(trial_curve),
        notices=notices,
        headline=headline,
        sections=_sections(source, trial_curve),
        # A terminal shows these two sections unless all of them are requested.
        brief=[section("", title), _brief_section(source)],
    )


def _build_trial_curve(source: SearchReportInput) -> SweepCurve | None:
    """Return the trials as the load points of a sweep, or None without their runs."""
    if not source.runs:
        return None
    curve = build_curve(source.runs)
    return msgspec.structs.replace(curve, best=source.capacity_run_name)


def _headline_paragraph(source: SearchReportInput) -> Paragraph:
    """Return the result of the search in large letters, colored by how good it is."""
    text = search_text.describe_result(
        source.result, source.trials, source.search.term_names, source.unit
    )
    return Paragraph(text, _headline_kind(source.result), large=True)


def _title(trial_curve: SweepCurve | None) -> str:
    """Return what was searched, for example "Capacity of sim for rag (llama-2-70b, 4 GPUs)"."""
    if trial_curve is None:
        return "Capacity search"
    gpus = "" if trial_curve.gpus is None else format.counted(trial_curve.gpus, "GPU")
    details = ", ".join(filter(None, (trial_curve.model, gpus)))
    suffix = f" ({details})" if details else ""
    return f"Capacity search: {trial_curve.workload} on {trial_curve.target}{suffix}"


def _describe_version(trial_curve: SweepCurve | None) -> str:
    """Return what created the report, for example "loadgen 1.2.0 report of a search"."""
    version = "" if trial_curve is None else f" {trial_curve.version}"
    return f"loadgen{version} report of a search"


def _headline_kind(result: SearchResult) -> Kind:
    """Return the color of the headline, by whether the search confirmed a load."""
    if result.stop_reason in CONFIRMED_STOPS:
        return "good"
    return "bad" if result.stop_reason == "none" else "warn"


def _brief_section(source: SearchReportInput) -> Section:
    """Return the result in a few lines, for a terminal."""
    facts = search_text.list_brief_facts(
        source.result,
        source.trials,
        source.unit,
        limit=source.limit,
        simulated=source.search.simulated,
        further_rows=() if source.agents is None else list_brief_rows(source.agents),
    )
    return section("", facts, indented=True)


def _sections(source: SearchReportInput, trial_curve: SweepCurve | None) -> list[Section]:
    """Return the sections of the report, from top to bottom.

    `trial_curve` has the trials as load points of a curve of throughput and latency. It is None if
    their runs are not there.
    """
    sections = [
        section("", Tiles(list(_tiles(source))), f"Limited by: {source.limit}"),
        section("Latency against load", Charts(list(_charts_of_terms(source)))),
    ]
    if source.agents is not None:
        sections.insert(1, build_agents_section(source.agents))
    if trial_curve is not None:
        sections.append(section("", sweep_report.measured_facts(trial_curve)))

    for addition in source.additions:
        sections += addition.sections

    sections.append(_trials_section(source))
    sections.append(
        search_text.confirmation_section(
            source.result, source.trials, source.unit, simulated=source.search.simulated
        )
    )

    if trial_curve is not None:
        charts = Charts(list(sweep_charts.sweep_charts(trial_curve)))
        sections.append(section("Throughput and latency of the trials", charts, folded=True))

    return sections


def _trials_section(source: SearchReportInput) -> Section:
    """Return the section with the trials in the order of time: a chart and a table."""
    trials = source.trials
    charts = [_chart_over_time(source)] if trials else []
    units = search_text.describe_units(source.unit) if trials else ""

    return section(
        "Trials",
        Charts(charts),
        search_text.trial_table(trials),
        Paragraph(units, "soft"),
        id="trials",
    )


# Headline numbers


def _tiles(source: SearchReportInput) -> Iterator[Tile]:
    """Yield the numbers at the top of the report, each with its unit and a note.

    They are the capacity, the confirmed load, the load that half of the runs pass with its
    interval, the throughput at the capacity, and the effort.
    """
    result = source.result
    trials = source.trials
    unit = source.unit.strip()
    yield _capacity_tile(source)

    if result.confirmed_load is not None:
        yield _confirmed_load_tile(source, result.confirmed_load)

    if result.load is not None and result.interval is not None:
        bounds = f"95 % CI {result.interval.low:.4g} to {result.interval.high:.4g}"
        yield Tile("50 % pass", f"{result.load:.4g}", unit, bounds)

    throughput = search_text.capacity_output_tokens_per_s(result, trials)
    yield Tile("Throughput", format.quantity(throughput), "output tok/s", "at the capacity")
    trial_count = format.counted(len(trials), "trial")
    yield Tile("Effort", format.duration(result.duration_s), "", trial_count)


def _confirmed_load_tile(source: SearchReportInput, confirmed_load: float) -> Tile:
    """Return the load of the confirmation as a headline number, with how its trial started."""
    label = search_text.confirmed_load_label(source.result, source.trials)
    start = search_text.describe_start(source.result)
    caveat = "" if label == "Confirmed" else "; not shown to be sustained"
    note = f"full-length trial {start}{caveat}"
    return Tile(label, f"{confirmed_load:.4g}", source.unit.strip(), note)


def _capacity_tile(source: SearchReportInput) -> Tile:
    """Return the capacity as a headline number, with its state."""
    load, state = capacity_and_state(source.result, source.trials)
    unit = source.unit.strip()

    if load is None or state == "stopped":
        text = search_text.describe_capacity(source.result, source.trials, source.unit)
        return Tile("Capacity", text, "", "within the SLO")

    if source.result.is_lower_bound:
        return Tile("Capacity", f"at least {load:.4g}", unit, "the highest allowed load passed")

    return Tile("Capacity", f"{load:.4g}", unit, STATE_LABELS[state])


# What limits the load


def _describe_limits(
    trials: Sequence[TrialResult], summaries: Mapping[str, Summary], unit: str
) -> Iterator[str]:
    """Yield sentences about what limits the load.

    The first one states why the lowest load failed or was not sustained. If the failed trials
    missed several terms of the SLO, a second one states how many of them missed each.

    Args:
        trials: The results of the trials.
        summaries: The summaries of their runs, by the name of the run.
        unit: The unit of the loads, as it is written after a number.
    """
    failed = [trial for trial in trials if trial.has_failed]
    growing = [trial for trial in trials if trial.has_passed and _is_shown_unsustained(trial)]
    lowest = min((*failed, *growing), key=lambda trial: trial.load, default=None)
    if lowest is None:
        return

    yield _describe_lowest_limit(lowest, unit)

    misses_by_term = _misses_by_term(failed, summaries)
    missed_terms = [term for term, trial_misses in misses_by_term.items() if any(trial_misses)]
    if len(missed_terms) > 1:
        counts = [
            f"{term} in {sum(trial_misses)} of {len(trial_misses)}"
            for term, trial_misses in misses_by_term.items()
        ]
        yield f"Failed trials missed {', '.join(counts)}."


def _describe_lowest_limit(trial: TrialResult, unit: str) -> str:
    """Return why the trial at the lowest load failed, or why its load was not sustained."""
    factor = trial.length_factor
    length = f" over {factor:g} times the trial length" if factor > 1 else ""
    load = f"{trial.load:.4g}{unit}{length}"
    if trial.has_failed:
        return f"at {load}, {trial.reason}."
    return f"at {load}, the SLO was met but not sustained: {trial.sustained_reason}."


def _misses_by_term(
    failed: Sequence[TrialResult], summaries: Mapping[str, Summary]
) -> dict[str, list[bool]]:
    """Return for each term of the SLO a list that states for each failed trial if it missed it.

    A trial that cannot judge a term, for example because it had too few requests, is not in the
    list of this term. A trial without a summary is in no list.
    """
    misses_by_term: dict[str, list[bool]] = {}
    for trial in failed:
        if trial.run_name not in summaries:
            continue
        for term, is_met in judge_objectives(summaries[trial.run_name]):
            trial_misses = misses_by_term.setdefault(term, [])
            if is_met is not None:
                trial_misses.append(not is_met)

    return misses_by_term


def _is_shown_unsustained(trial: TrialResult) -> bool:
    """Return whether a confirmation or sustained-load check showed growth at its load."""
    return trial.is_confirming and trial.has_growth


# Charts


def _chart_over_time(source: SearchReportInput) -> Chart:
    """Return the chart that shows how the search approached the capacity.

    Each trial is a dot at the time at which it ended and at its load, colored by its outcome. A
    shaded band is the interval of the result, and a line the capacity.
    """
    trials = source.trials
    end_times_s = list(accumulate(trial.duration_s for trial in trials))
    loads = [trial.load for trial in trials]
    path = Series(x=end_times_s, y=loads, color="c6", width=1)
    note = "each trial at its end, by outcome"

    bands = _interval_bands(source.result)
    if bands:
        note = f"{note}; shaded: the 95 % confidence interval of the 50 % pass load"

    return Chart(
        title="Trials over time",
        note=note,
        x=Axis(label="time of load so far", format="time", min=0),
        y=Axis(
            label=f"load, {source.unit.strip()}, log",
            log=max(loads) > LOG_SCALE_LOADS * min(loads),
        ),
        series=(path, *_dots_by_outcome(trials, end_times_s, loads)),
        bands=bands,
        marks=_capacity_lines(source),
        wide=True,
    )


def _interval_bands(result: SearchResult) -> tuple[ShadedBand, ...]:
    """Return a horizontal band over the interval of the capacity, or no band without one."""
    interval = result.interval
    if interval is None:
        return ()
    return (ShadedBand(start=interval.low, end=interval.high, color="good", across=True),)


def _capacity_lines(source: SearchReportInput) -> tuple[Mark, ...]:
    """Return a horizontal line at the capacity, or no line if it is not known."""
    load, _ = capacity_and_state(source.result, source.trials)
    if load is None:
        return ()
    return (Mark(y=load, label=f"{load:.4g}{source.unit}", color="good"),)


def _charts_of_terms(source: SearchReportInput) -> Iterator[Chart]:
    """Yield for each latency term of the SLO a chart of its latency over the load.

    A term is a limit of one latency, such as "TTFT p99 at most 500 ms". A term of which no trial
    has a value is left out.
    """
    terms = next((summary.goodput.slo for summary in source.summaries.values()), ())
    for index, term in enumerate(terms):
        latencies_ms = [
            _term_value_ms(source.summaries.get(trial.run_name), index) for trial in source.trials
        ]
        if any(latency_ms is not None for latency_ms in latencies_ms):
            yield _chart_of_term(source, term, latencies_ms)


def _chart_of_term(
    source: SearchReportInput, term: TermResult, latencies_ms: Sequence[float | None]
) -> Chart:
    """Return a chart of the latency of one term of the SLO over the load, with its limit.

    `latencies_ms` are the latencies of the trials, in their order. At least one is known.
    """
    loads = [trial.load for trial in source.trials]
    limit_mark = Mark(y=term.limit_ms, label="limit", color="bad", extends_axis=True)
    return Chart(
        title=term.objective,
        note="a point for each trial; one that stopped early shows the latency until then",
        x=Axis(label=f"load, {source.unit.strip()}", pad=True),
        y=_latency_axis(latencies_ms, term.limit_ms),
        series=tuple(_dots_by_outcome(source.trials, loads, latencies_ms)),
        marks=(limit_mark, *_capacity_marks(source)),
    )


def _latency_axis(latencies_ms: Sequence[float | None], limit_ms: float) -> Axis:
    """Return the axis of latencies and their limit, logarithmic if it has to span a wide range."""
    known_ms = [latency_ms for latency_ms in latencies_ms if latency_ms is not None]
    highest_ms = max(*known_ms, limit_ms)
    if highest_ms > LOG_SCALE_LATENCIES * min(known_ms):
        return Axis(label="ms, log", unit="ms", log=True)
    return Axis(label="ms", unit="ms", min=0)


def _capacity_marks(source: SearchReportInput) -> list[Mark]:
    """Return a vertical line at the capacity, or no line if it is not known."""
    load, _ = capacity_and_state(source.result, source.trials)
    if load is None:
        return []
    return [Mark(x=load, label=f"capacity {load:.4g}", color="good")]


def _term_value_ms(summary: Summary | None, index: int) -> float | None:
    """Return the latency of a term in a run, or None if the run does not have this term."""
    if summary is None or len(summary.goodput.slo) <= index:
        return None
    return summary.goodput.slo[index].value_ms


def _dots_by_outcome(
    trials: Sequence[TrialResult], x_values: Sequence[float], y_values: Sequence[float | None]
) -> Iterator[Series]:
    """Yield the trials as the dots of a chart, one series per outcome, each in its own color.

    The dot of a confirmation or of a longer trial has a label, and each links to the page of its
    run.

    Args:
        trials: The trials.
        x_values: The horizontal position of each trial, in the same order.
        y_values: The vertical position of each trial. A trial without one has no dot.
    """
    for outcome, color in OUTCOME_COLORS.items():
        indices = [
            index
            for index, trial in enumerate(trials)
            if trial.outcome == outcome and y_values[index] is not None
        ]
        if not indices:
            continue

        labels = [KIND_LABELS.get(trials[index].kind, "") for index in indices]
        links = [sweep_charts.run_link(trials[index].run_name) for index in indices]
        yield Series(
            name=search_text.OUTCOME_LABELS[outcome],
            x=[x_values[index] for index in indices],
            y=[y_values[index] for index in indices],
            color=color,
            width=0,
            dots=True,
            labels=tuple(labels),
            links=tuple(links),
        )
