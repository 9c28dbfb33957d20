"""The scores of checked answers as text, tables and charts of reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.results.answer_files import WRONG_ANSWERS
from loadgen.core.workload.known_answers import CHECK_NAMES
from loadgen.render.section import Paragraph, Section, Table, section

if TYPE_CHECKING:
    from loadgen.core.metrics.answer_scores import (
        AnswerScores,
        LoadDependence,
        ReferenceComparison,
        ScorePart,
    )
    from loadgen.core.metrics.summary import Summary

HEADING = "Checked answers"
METHOD_TEXT = (
    "Intervals: 95 %, Wilson. Differences are reported with at most 1 % probability of a false "
    f"alarm. {WRONG_ANSWERS} in the folder of the run has the text of each wrong response."
)


def format_score(part: ScorePart) -> str:
    """Return the share of right responses with its interval: `99.3 % (98.7 to 99.7 %)`."""
    if part.low is None or part.high is None:
        return format.NONE
    low = format.percent(part.low).removesuffix(" %")
    return f"{format.percent(part.score)} ({low} to {format.percent(part.high)})"


def format_score_cell(part: ScorePart) -> str:
    """Return the share of right responses in %, as a short cell: `99.3 (98.7 to 99.7)`."""
    return format_score(part).replace(" %", "")


def format_p_value(p_value: float) -> str:
    """Return a p-value as `p = 0.012`, or as a bound if it is very small."""
    text = format.quantity(p_value)
    return f"p {text[0]} {text[1:]}" if text.startswith("<") else f"p = {text}"


def describe_answers(answers: AnswerScores) -> str:
    """Return the score of the checked answers in one line, and what is wrong with them.

    For example: `99.3 % right (98.7 to 99.7 %), 1,169 checked; worse above 256 in flight`.
    """
    overall = answers.overall
    if overall.score is None or overall.low is None:
        return "no response to a question with a known answer"

    low = format.percent(overall.low).removesuffix(" %")
    interval = f"({low} to {format.percent(overall.high)})"
    text = f"{format.percent(overall.score)} right {interval}, {overall.checked:,} checked"
    if answers.load_dependence is not None and answers.load_dependence.is_worse:
        text += f"; worse above {answers.load_dependence.in_flight:,} in flight"
    if answers.reference is not None and answers.reference.is_different:
        text += "; differ from the reference"
    return text


def build_answer_sections(summary: Summary) -> Iterator[Section]:
    """Yield the scores of checked answers, if the workload has questions with known answers."""
    answers = summary.answers
    if answers is None:
        return

    sentences = []
    if answers.load_dependence is not None:
        sentences.append(describe_load_dependence(answers.load_dependence))
    if answers.reference is not None:
        sentences.append(describe_reference(answers.reference))

    yield section(
        HEADING,
        _score_table(answers),
        *sentences,
        Paragraph(METHOD_TEXT, "soft"),
        id="answers",
    )


def _score_table(answers: AnswerScores) -> Table:
    """Return the score of all responses and of each kind of check, and by requests in flight."""
    rows = [_score_row("all", answers.overall)]
    if len(answers.checks) > 1:
        rows += [_score_row(_check_name(part.name), part) for part in answers.checks]

    dependence = answers.load_dependence
    if dependence is not None:
        rows.append(_score_row(f"up to {dependence.in_flight:,} in flight", dependence.below))
        rows.append(_score_row(f"above {dependence.in_flight:,} in flight", dependence.above))

    only_check = f" ({_check_name(answers.checks[0].name)})" if len(answers.checks) == 1 else ""
    return Table((f"responses{only_check}", "checked", "wrong", "right (95 % interval)"), rows)


def _check_name(check: str) -> str:
    """Return the name of a kind of check. An unknown one, of a newer version, is its own name."""
    return {str(kind): name for kind, name in CHECK_NAMES.items()}.get(check, check)


def _score_row(label: str, part: ScorePart) -> tuple[str, ...]:
    wrong = part.checked - part.correct
    return (label, format.count(part.checked), format.count(wrong), format_score(part))


def describe_load_dependence(dependence: LoadDependence) -> str:
    """Return whether responses are worse with more requests in flight, as a sentence."""
    p_value = format_p_value(dependence.p_value)
    if dependence.is_worse:
        return (
            f"Responses are worse above {dependence.in_flight:,} requests in flight than below "
            f"({p_value})."
        )
    return f"No dependence of the responses on the requests in flight was found ({p_value})."


def describe_reference(reference: ReferenceComparison) -> str:
    """Return whether the responses differ from those of the reference endpoint, as a sentence."""
    agreement = format.percent(reference.agreement)
    reference_agreement = format.percent(reference.reference_agreement)
    questions = format.counted(reference.questions, "question")
    facts = (
        f"they agree with its first response for {agreement} of their length, and its second "
        f"response does for {reference_agreement} ({questions}, "
        f"{format_p_value(reference.p_value)})"
    )
    if reference.is_different:
        return f"Responses differ from those of the reference endpoint: {facts}."
    return f"No difference from the reference endpoint was found: {facts}."
