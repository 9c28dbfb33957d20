"""The page of a search: its answer with the interval, what limits it, every trial, and how the answer was confirmed.

Pure: takes what the search left and the summaries of its trials, returns a string. The sentences are those of
`search.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec

from loadgen.core import format
from loadgen.core.metrics.summary import NamedSummary, Summary
from loadgen.render.additions import ExtraSections
from loadgen.render.page import Axis, Band, Chart, Mark, Number, Series
from loadgen.render.section import Charts, Kind, Paragraph, Report, Tiles, section, simulated
from loadgen.runs import levels_text
from loadgen.runs.headline import judged
from loadgen.runs.levels import curve
from loadgen.search import text as words
from loadgen.search.experiment import StoredSearch
from loadgen.search.load_search import CONFIRMING, FOUND, SearchAnswer, TrialResult, capacity_of
from loadgen.search.load_search import evidence as evidence_of


def report(
    search: StoredSearch,
    named: Sequence[NamedSummary],
    *,
    unit: str,
    evidence: str = "",
    additions: Sequence[ExtraSections] = (),
) -> Report:
    """The whole answer. `named`: the runs of the trials by their folders; `evidence`: the one of the capacity.

    `additions`: what other results in the folder of the search add.
    """
    answer, told, summaries = search.answer, search.told, dict(named)
    trials = sorted(told, key=lambda trial: trial.ask.number)
    by_load = sorted(told, key=lambda trial: (trial.ask.load, trial.ask.number))
    levels = msgspec.structs.replace(curve(named), best=evidence) if named else None
    kind: Kind = "good" if answer.reason in FOUND else "bad" if answer.reason == "none" else "warn"
    limit = " ".join(_limit(trials, summaries)) or "no load of this search missed the SLO."
    what = () if levels is None else (levels.workload, levels.model)
    sections = [
        section("", Tiles(list(_numbers(answer, trials, unit))), f"What limits it: {limit}"),
        section("", *(() if levels is None else (levels_text.measured(levels),))),
        *(one for addition in additions for one in addition.sections),
        section(
            "Trials",
            Charts(
                [_over_time(answer, trials, unit), *_terms(trials, summaries, unit)]
                if trials
                else []
            ),
            words.trial_table(by_load),
            Paragraph(words.units(unit) if trials else "", "soft"),
            id="trials",
        ),
        words.found(answer, trials, unit, simulated=search.simulated),
    ]
    if levels is not None:
        charts = Charts(list(levels_text.charts(levels)))
        sections.append(section("Throughput and latency of the trials", charts, folded=True))
    said = [Paragraph(words.headline(answer, trials, search.goal, unit), kind, large=True)]
    return Report(
        title=" · ".join(filter(None, (*what, "highest load within the SLO"))),
        tab=": ".join((*what[:1], "search")),
        made_by="loadgen report of a search"
        if levels is None
        else f"loadgen {levels.version} report of a search",
        warned=[
            *([simulated()] if search.simulated else []),
            *(one for each in additions for one in each.warned),
        ],
        answer=[*said, *(one for addition in additions for one in addition.answer())],
        sections=sections,
    )


def _numbers(answer: SearchAnswer, trials: Sequence[TrialResult], unit: str) -> Iterator[Number]:
    """The headline numbers: the answer, on the way to it the confirmed and the middle load, tokens, what it took."""
    load, state = capacity_of(answer, trials)
    said, unit = words.capacity(answer, trials, unit), unit.strip()
    if load is None or state == "stopped":
        yield Number("Capacity", said, "", "within the SLO")
    elif answer.only_allowed:
        yield Number("Capacity", f"at least {load:.4g}", unit, "the highest load that was allowed")
    else:
        yield Number("Capacity", f"{load:.4g}", unit, state)
    confirmed = format.NONE if answer.confirmed is None else f"{answer.confirmed:.4g}"
    name = words.confirmed_name(answer, trials)
    lasting = "" if name == "Confirmed" else "; not seen to last"
    yield Number(name, confirmed, unit, f"a run at full length, from empty{lasting}")
    if answer.load is not None and answer.interval is not None:
        interval = f"95 % interval {answer.interval.low:.4g} to {answer.interval.high:.4g}"
        yield Number("Half of runs pass", f"{answer.load:.4g}", unit, f"on the way: {interval}")
    best = evidence_of(trials) if load is not None else None
    tokens = None if best is None else best.figures.get("output_tokens_per_s")
    yield Number("Output tokens", format.quantity(tokens), "/s", "in the run at this load")
    yield Number("Spent", format.duration(answer.spent_s), "", f"{len(trials)} trials")


def _limit(trials: Sequence[TrialResult], summaries: Mapping[str, Summary]) -> Iterator[str]:
    """What the lowest load missed that cannot be asked for, and which terms were missed by all that missed the SLO."""
    over = [trial for trial in trials if trial.outcome == "over"]
    grew = [trial for trial in trials if trial.outcome == "under" and not _lasts(trial)]
    lowest = min((*over, *grew), key=lambda trial: trial.ask.load, default=None)
    if lowest is None:
        return
    times = (
        f" (over {lowest.ask.lengths:g} times the length of a trial)"
        if lowest.ask.lengths > 1
        else ""
    )
    missed, why = (
        ("missed", lowest.why)
        if lowest.outcome == "over"
        else ("held and grew", lowest.sustained_why)
    )
    yield f"at {lowest.ask.load:.4g}, the lowest load that {missed}{times}: {why}."
    terms: dict[str, list[bool]] = {}  # of a trial that ended after few requests it is not known
    for trial in over:
        if trial.folder in summaries:
            for promise, met in judged(summaries[trial.folder]):
                terms.setdefault(promise, []).extend([] if met is None else [not met])
    if len(terms) > 1 and any(terms.values()):
        counts = (f"{name} by {sum(missed)} of {len(missed)}" for name, missed in terms.items())
        yield f"Missed by the loads above: {', '.join(counts)}."


def _lasts(trial: TrialResult) -> bool:
    return trial.ask.kind not in CONFIRMING or trial.sustained is not False


def _dots(
    trials: Sequence[TrialResult], x: Sequence[float], y: Sequence[float | None]
) -> Iterator[Series]:
    """The trials as dots, one colour for each outcome; those at full length have a label."""
    for outcome, (name, color) in words.OUTCOMES.items():
        chosen = [
            i for i, trial in enumerate(trials) if trial.outcome == outcome and y[i] is not None
        ]
        if chosen:
            labels = tuple(
                {"confirm": "confirmation", "sustain": "longer"}.get(trials[i].ask.kind, "")
                for i in chosen
            )
            yield Series(
                name=name,
                x=[x[i] for i in chosen],
                y=[y[i] for i in chosen],
                color=color,
                width=0,
                dots=True,
                labels=labels,
                links=tuple(levels_text.address(trials[i].folder) for i in chosen),
            )


def _over_time(answer: SearchAnswer, trials: Sequence[TrialResult], unit: str) -> Chart:
    """The load of each trial at the time at which it ended, with its outcome, over the interval of the answer."""
    ended = list(accumulate(trial.spent_s for trial in trials))
    loads = [trial.ask.load for trial in trials]
    interval, (load, _) = answer.interval, capacity_of(answer, trials)
    across = (
        (Band(start=interval.low, end=interval.high, color="good", across=True),)
        if interval is not None
        else ()
    )
    return Chart(
        title="Trials over time",
        note="each at its end, by outcome; shaded: the 95 % interval of the answer"
        if across
        else "each at its end",
        x=Axis(label="spent so far", format="time", min=0),
        y=Axis(label=f"load, {unit.strip()}, log", log=max(loads) > 3 * min(loads)),
        series=(Series(x=ended, y=loads, color="c6", width=1), *_dots(trials, ended, loads)),
        bands=across,
        marks=() if load is None else (Mark(y=load, label=f"{load:.4g}{unit}", color="good"),),
        wide=True,
    )


def _terms(
    trials: Sequence[TrialResult], summaries: Mapping[str, Summary], unit: str
) -> Iterator[Chart]:
    """For each term of the SLO its figure over the load: which of them is met last limits the load."""
    terms = next((summary.goodput.slo for summary in summaries.values()), ())
    loads = [trial.ask.load for trial in trials]
    for i, term in enumerate(terms):
        runs = [summaries.get(trial.folder) for trial in trials]
        values = [
            None if run is None or len(run.goodput.slo) <= i else run.goodput.slo[i].value_ms
            for run in runs
        ]
        known = [value for value in values if value is not None]
        if known:
            is_log = max(*known, term.limit_ms) > 20 * min(known)
            yield Chart(
                title=term.promise,
                note="of each trial; one that ended early shows the part it saw",
                x=Axis(label=f"load, {unit.strip()}", pad=True),
                y=Axis(label="ms, log", unit="ms", log=True)
                if is_log
                else Axis(label="ms", unit="ms", min=0),
                series=tuple(_dots(trials, loads, values)),
                marks=(Mark(y=term.limit_ms, label="limit", color="bad", fit=True),),
            )
