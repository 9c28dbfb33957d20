"""The outcome of runs for build servers: JUnit test cases, and Markdown for the summary page of a step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.metrics.part_summaries import ClassSummary
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.render.junit import OUTCOME_OF_MET, Case, Outcome
from loadgen.render.markdown import render_sections
from loadgen.runs import headline as run_headline
from loadgen.runs import sections, text
from loadgen.runs.headline import is_judged, judged_parts, judged_word, promises_of, term_cells
from loadgen.runs.rates import headline

Named = Sequence[tuple[str, "Summary"]]
"""Runs, each with its name."""


def cases(named: Named, *, strict: bool = False) -> list[Case]:
    """Return for each run whether it is valid, and each objective of its SLO, classes and tasks too.

    A run without an SLO has a failed case if its error rate is above the limit. If a run is not
    valid, its objectives are skipped.

    Args:
        named: The runs with their names.
        strict: Whether an objective that the run cannot decide is an error.
    """
    found = []
    for name, summary in named:
        group, verdict = f"loadgen.{name}", summary.verdict
        valid: Outcome = "passed" if verdict.valid else "error"
        mark = "SIMULATED, no real server was measured: " if summary.target.simulated else ""
        found.append(
            Case(
                name=f"{mark}the measurement is valid",
                group=group,
                outcome=valid,
                text=_of_verdict(summary),
            )
        )
        if summary.sustainable.sustained is False:
            found.append(_unsustained_case(summary, group))
        if fails_by_errors(summary):
            found.append(_error_rate_case(summary, group))
        for part_name, part in judged_parts(summary):
            found += [
                _objective_case(summary, objective, group, strict=strict)
                for objective in _objectives(part_name, part)
            ]
    return found


class _Objective(NamedTuple):
    """An objective of an SLO, whether it was met, and the measured value with its counts."""

    name: str
    met: bool | None
    measured: str
    is_supported: bool = True  # whether the samples are enough for the percentile


def _objective_case(summary: Summary, objective: _Objective, group: str, *, strict: bool) -> Case:
    """Return the case of an objective, with `strict` an error if the run cannot decide it."""
    outcome = OUTCOME_OF_MET[objective.met]
    text = objective.measured
    if not is_judged(summary, objective.met):
        outcome = "skipped"
        text = "the run is not valid"
    elif strict and (objective.met is None or (objective.met and not objective.is_supported)):
        outcome = "error"
    return Case(name=objective.name, group=group, outcome=outcome, text=text)


def _unsustained_case(summary: Summary, group: str) -> Case:
    """Return the skipped case of a run whose load the server did not sustain.

    It does not fail the build, because the run itself has no such objective.
    """
    text = f"NOT SUSTAINED: {summary.sustainable.why}"
    return Case(name="the load is sustained", group=group, outcome="skipped", text=text)


def _error_rate_case(summary: Summary, group: str) -> Case:
    """Return the failed case of a run without an SLO whose error rate is above the limit."""
    limit = format.percent(summary.verdict.limits.failure_share)
    return Case(
        name=f"at most {limit} of the requests fail",
        group=group,
        outcome="failed",
        text=run_headline.sentence(summary),
    )


def _objectives(name: str, part: Summary | ClassSummary) -> Iterator[_Objective]:
    """Yield each objective of a run, or of a class of it, after the `name` of that."""
    goodput, tasks = part.goodput, part.sessions.goodput if part.sessions is not None else None
    measured = []
    for term in goodput.slo:
        _, value, over = term_cells(term, "over")
        too_few = "" if term.supported else f"; {term.needed:,} samples are needed to show it"
        measured.append((term.undecided or f"{value}, {over}{too_few}", term.supported))
    if goodput.share_limit is not None:
        measured.append((format.percent(goodput.share), True))
    if tasks is not None and part.sessions is not None:
        share = format.percent(tasks.share)
        measured.append((f"{tasks.good:,} of {part.sessions.count:,} ({share})", True))
    for (words, met), (value, is_supported) in zip(promises_of(part), measured, strict=True):
        yield _Objective(f"{name}{words}", met, value, is_supported)


def _of_verdict(summary: Summary) -> str:
    """Why a run is not valid, or the headline rates of a valid one; then its reservations."""
    return "\n".join((*(summary.verdict.reasons or (rates(summary),)), *summary.verdict.caveats))


def rates(summary: Summary) -> str:
    """The rates that stand alone, with their window (`rates.py`)."""
    shown = headline(summary)
    goodput = () if shown.goodput is None else (f"goodput {format.rate(shown.goodput)}",)
    parts = (
        f"{format.rate(shown.requests)} completed",
        f"{format.rate(shown.output)} output tokens",
        *goodput,
    )
    return f"{', '.join(parts)} in the {shown.window}"


def broken_off(command: str) -> Case:
    """The case of a command that did not come to its end: neither passed nor failed, whatever its runs showed."""
    why = "it was stopped, or could not begin: what it would have shown is not known"
    return Case(name="the command came to its end", group=command, outcome="error", text=why)


def markdown(named: Named, more: Sequence[Case] = ()) -> str:
    """What a reader of a build wants first: verdict and SLO of each run; the whole report below, folded.

    `more`: cases beside those of the runs.
    """
    parts = []
    for name, summary in named:
        verdict = "VALID" if summary.verdict.valid else "INVALID"
        if summary.target.simulated:
            verdict = f"SIMULATED, {verdict}"
        slo = (
            f", SLO {judged_word(summary, summary.goodput.met)}" if summary.goodput.has_slo else ""
        )
        parts.append(f"### loadgen: {name}: {verdict}{slo}\n")
        parts += [f"- {reason}" for reason in summary.verdict.reasons or summary.verdict.caveats]
        parts += ["", *render_sections([sections.slo(summary)])]
        parts.append(
            f"\n<details><summary>Report</summary>\n\n```text\n{text.render(summary)}```\n\n</details>\n"
        )
    parts += [f"- {case.name}: {case.outcome}: {case.text}\n" for case in more]
    return "\n".join(parts)
