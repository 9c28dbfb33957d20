"""The outcome of runs for CI systems: JUnit test cases, and Markdown for a GitHub step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.render.junit import OUTCOME_OF_MET, JUnitCase, Outcome
from loadgen.render.markdown import render_sections
from loadgen.runs import text
from loadgen.runs.answers_objective import (
    count_wrong_answers,
    find_answers_objective,
    format_measured_answers,
)
from loadgen.runs.fluidity import (
    count_requests_below,
    find_fluidity_objective,
    format_measured_index,
)
from loadgen.runs.rates import select_headline_rates
from loadgen.runs.slo_section import slo_section
from loadgen.runs.slo_text import (
    count_violations,
    describe_judged_outcome,
    describe_result,
    find_task_goodput,
    format_term_value,
    is_judged,
    list_scope_objectives,
    list_slo_scopes,
)

if TYPE_CHECKING:
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.runs.slo_text import SloScope

NamedRun = tuple[str, Summary]
"""The name of a run in the result it belongs to, and its summary."""


def build_cases(runs: Sequence[NamedRun], *, strict: bool = False) -> list[JUnitCase]:
    """Return the JUnit cases of runs: whether each run is valid, and each objective of its SLO.

    The objectives of request classes and of tasks are included. A run without an SLO has a failed
    case if its error rate is above the limit. If a run is not valid, its objectives are skipped.

    Args:
        runs: The runs with their names.
        strict: Whether an objective that the run cannot decide is an error.
    """
    cases: list[JUnitCase] = []
    for name, summary in runs:
        cases += _build_cases_of_run(name, summary, strict=strict)
    return cases


def _build_cases_of_run(name: str, summary: Summary, *, strict: bool) -> Iterator[JUnitCase]:
    """Yield the cases of one run. JUnit shows them as a group with the name of the run."""
    group = f"loadgen.{name}"
    yield _validity_case(summary, group)

    if summary.sustainable.sustained is False:
        yield _unsustained_case(summary, group)

    if fails_by_errors(summary):
        yield _error_rate_case(summary, group)

    for prefix, scope in list_slo_scopes(summary):
        for objective in _measured_objectives(prefix, scope):
            yield _objective_case(summary, objective, group, strict=strict)


def _validity_case(summary: Summary, group: str) -> JUnitCase:
    """Return the case of the measurement itself: passed with the headline rates, or an error."""
    verdict = summary.verdict
    outcome: Outcome = "passed" if verdict.valid else "error"
    prefix = "SIMULATED, no real server was measured: " if summary.target.simulated else ""
    lines = verdict.reasons or (describe_rates(summary),)

    return JUnitCase(
        name=f"{prefix}the measurement is valid",
        group=group,
        outcome=outcome,
        text="\n".join((*lines, *verdict.caveats)),
    )


def _unsustained_case(summary: Summary, group: str) -> JUnitCase:
    """Return the skipped case of a run whose load the server did not sustain.

    It does not fail the build, because the run itself has no such objective.
    """
    text = f"NOT SUSTAINED: {summary.sustainable.reason}"
    return JUnitCase(name="the load is sustained", group=group, outcome="skipped", text=text)


def _error_rate_case(summary: Summary, group: str) -> JUnitCase:
    """Return the failed case of a run without an SLO whose error rate is above the limit."""
    limit = format.percent(summary.verdict.limits.failure_share)
    return JUnitCase(
        name=f"at most {limit} of the requests fail",
        group=group,
        outcome="failed",
        text=describe_result(summary),
    )


# -- objectives ------------------------------------------------------------------------------------


class _MeasuredObjective(NamedTuple):
    """An objective of an SLO with its outcome and what was measured.

    Attributes:
        name: The objective, with its request class before it if it has one.
        is_met: Whether it was met, or None if the run cannot decide it.
        measured: The measured value with its counts.
        is_supported: Whether there are enough samples for its percentile.
    """

    name: str
    is_met: bool | None
    measured: str
    is_supported: bool


class _Measurement(NamedTuple):
    """What was measured for one objective, and whether there are enough samples for it."""

    text: str
    is_supported: bool = True


def _objective_case(
    summary: Summary, objective: _MeasuredObjective, group: str, *, strict: bool
) -> JUnitCase:
    """Return the JUnit case of an objective.

    It is skipped if the run is not valid. With `strict` it is an error if the run cannot decide the
    objective, or if it was met on too few samples for its percentile.
    """
    if not is_judged(summary, objective.is_met):
        text = "the run is not valid"
        return JUnitCase(name=objective.name, group=group, outcome="skipped", text=text)

    is_undecided = objective.is_met is None
    is_met_on_few_samples = objective.is_met is True and not objective.is_supported

    outcome = OUTCOME_OF_MET[objective.is_met]
    if strict and (is_undecided or is_met_on_few_samples):
        outcome = "error"

    return JUnitCase(name=objective.name, group=group, outcome=outcome, text=objective.measured)


def _measured_objectives(prefix: str, scope: SloScope) -> Iterator[_MeasuredObjective]:
    """Yield the objectives of a run or a request class, in the order of `list_scope_objectives`."""
    objectives = list_scope_objectives(scope)
    for objective, measured in zip(objectives, _measurements(scope), strict=True):
        name = f"{prefix}{objective.text}"
        yield _MeasuredObjective(name, objective.is_met, measured.text, measured.is_supported)


def _measurements(scope: SloScope) -> Iterator[_Measurement]:
    """Yield what was measured for each objective of a run or a request class.

    The order must be that of `list_scope_objectives`, because the caller pairs both: the limits of
    percentiles, then the required fraction of requests within all limits, then the required
    fraction of tasks, then the fluidity index, then the share of right answers.
    """
    goodput = scope.goodput
    for percentile_term in goodput.slo:
        text = _describe_term(percentile_term)
        yield _Measurement(text, is_supported=percentile_term.supported)

    requires_fraction_of_requests = goodput.share_limit is not None
    if requires_fraction_of_requests:
        yield _Measurement(format.percent(goodput.share))

    task_goodput = find_task_goodput(scope)
    if task_goodput is not None and scope.sessions is not None:
        share = format.percent(task_goodput.share)
        task_count = scope.sessions.count
        yield _Measurement(f"{task_goodput.good:,} of {task_count:,} ({share})")

    fluidity = find_fluidity_objective(scope)
    if fluidity is not None:
        text = fluidity.undecided or (
            f"{format_measured_index(fluidity)}, {count_requests_below(fluidity)} below the limit"
        )
        yield _Measurement(text, is_supported=fluidity.supported)

    answers = find_answers_objective(scope)
    if answers is not None:
        measured = f"{format_measured_answers(answers)}, {count_wrong_answers(answers)} wrong"
        yield _Measurement(answers.undecided or measured)


def _describe_term(term: TermResult) -> str:
    if term.undecided:
        return term.undecided
    text = f"{format_term_value(term)}, {count_violations(term)} over the limit"
    return text if term.supported else f"{text}; {term.needed:,} samples needed"


def describe_rates(summary: Summary) -> str:
    """Return the headline rates of a run, with the window that they cover."""
    rates = select_headline_rates(summary)
    parts = [
        f"{format.rate(rates.requests, ' req/s')} completed",
        format.rate(rates.output, " output tok/s"),
    ]
    if rates.goodput is not None:
        parts.append(f"goodput {format.rate(rates.goodput, ' req/s')}")

    return f"{', '.join(parts)} in the {rates.window}"


def unfinished_case(command: str) -> JUnitCase:
    """Return the error of a command that did not finish. What its runs would show is not known."""
    text = "the command was stopped or could not start"
    return JUnitCase(name="the command finished", group=command, outcome="error", text=text)


# -- Markdown --------------------------------------------------------------------------------------


def render_markdown(runs: Sequence[NamedRun], other_cases: Sequence[JUnitCase] = ()) -> str:
    """Return the outcome of runs as Markdown: verdict and SLO first, the full report folded.

    GitHub shows it as the summary of a step of a workflow.

    Args:
        runs: The runs with their names.
        other_cases: Cases that do not belong to a run.
    """
    blocks: list[str] = []
    for name, summary in runs:
        blocks += _markdown_of_run(name, summary)
    blocks += [f"- {case.name}: {case.outcome}: {case.text}\n" for case in other_cases]
    return "\n".join(blocks)


def _markdown_of_run(name: str, summary: Summary) -> list[str]:
    """Return the Markdown of one run as blocks, which the caller joins with line ends.

    The blocks are a heading such as `### loadgen: run: VALID, SLO met`, the reasons why the run is
    INVALID or else its caveats, the SLO, and the whole report, which is folded.
    """
    verdict = summary.verdict
    remarks = verdict.reasons or verdict.caveats
    return [
        f"### loadgen: {name}: {_describe_run_labels(summary)}\n",
        *[f"- {remark}" for remark in remarks],
        "",
        *render_sections([slo_section(summary)]),
        _fold_report(text.render(summary)),
    ]


def _describe_run_labels(summary: Summary) -> str:
    """Return whether a run was simulated, is valid and met its SLO, such as `VALID, SLO met`."""
    labels = []
    if summary.target.simulated:
        labels.append("SIMULATED")
    labels.append("VALID" if summary.verdict.valid else "INVALID")
    if summary.goodput.has_slo:
        labels.append(f"SLO {describe_judged_outcome(summary, summary.goodput.met)}")
    return ", ".join(labels)


def _fold_report(report_text: str) -> str:
    """Return a report as a code block that a page of GitHub shows folded."""
    return f"\n<details><summary>Report</summary>\n\n```text\n{report_text}```\n\n</details>\n"
