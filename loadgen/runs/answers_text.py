"""The scores of checked answers as text, tables and charts of reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Return a p-value as `p = 0.012`, or as a bound such as `p < 0.001` if it is very small."""
    text = format.quantity(p_value)
    is_bound = text.startswith("<")
    return f"p < {text.removeprefix('<')}" if is_bound else f"p = {text}"


def describe_answers(answers: AnswerScores) -> str:
    """Return the share of right answers in one line, and whether a test has found a defect.

    For example: `99.3 % right (98.7 to 99.7 %), 1,169 checked; worse above 256 in flight`.
    """
    overall = answers.overall
    if overall.score is None or overall.low is None:
        return "no response to a question with a known answer"

    score = format.percent(overall.score)
    low = format.percent(overall.low).removesuffix(" %")
    high = format.percent(overall.high)
    text = f"{score} right ({low} to {high}), {overall.checked:,} checked"

    dependence = answers.load_dependence
    if dependence is not None and dependence.is_worse:
        text += f"; worse above {dependence.in_flight:,} in flight"

    reference = answers.reference
    if reference is not None and reference.is_different:
        text += "; differ from the reference"

    return text


def build_answer_sections(summary: Summary) -> Iterator[Section]:
    """Yield the section of a report about responses that were checked against known answers.

    Nothing is yielded if no responses were checked.
    """
    answers = summary.answers
    if answers is None:
        return

    sentences = []
    if answers.load_dependence is not None:
        sentences.append(describe_load_dependence(answers.load_dependence))
    if answers.reference is not None:
        sentences.append(describe_reference(answers.reference))

    table = _score_table(answers)
    small_print = Paragraph(METHOD_TEXT, "soft")
    yield section(HEADING, table, *sentences, small_print, id="answers")


def _score_table(answers: AnswerScores) -> Table:
    """Return a table of the share of right responses.

    The rows are all responses, each kind of check, and responses with few and with many requests in
    flight.
    """
    rows = [
        _score_row("all", answers.overall),
        *_rows_by_check(answers.checks),
        *_rows_by_load(answers.load_dependence),
    ]
    headings = (_name_responses(answers.checks), "checked", "wrong", "right (95 % interval)")
    return Table(headings, rows)


def _name_responses(checks: Sequence[ScorePart]) -> str:
    """Return the heading of the first column, with the kind of check if there is only one kind."""
    if len(checks) == 1:
        return f"responses ({_check_name(checks[0].name)})"
    return "responses"


def _rows_by_check(checks: Sequence[ScorePart]) -> list[tuple[str, ...]]:
    """Return a row for each kind of check. A single kind has none: it is the row of all."""
    if len(checks) == 1:
        return []
    return [_score_row(_check_name(part.name), part) for part in checks]


def _rows_by_load(dependence: LoadDependence | None) -> list[tuple[str, ...]]:
    """Return a row for responses with few requests in flight, and one for those with many.

    The list is empty if the scores were not compared by load.
    """
    if dependence is None:
        return []

    in_flight = f"{dependence.in_flight:,} in flight"
    return [
        _score_row(f"up to {in_flight}", dependence.below),
        _score_row(f"above {in_flight}", dependence.above),
    ]


def _check_name(check: str) -> str:
    """Return the name of a kind of check for a table, such as that of "similarity".

    A kind that only a newer version of the program knows is returned unchanged.
    """
    name_by_kind = {str(kind): name for kind, name in CHECK_NAMES.items()}
    return name_by_kind.get(check, check)


def _score_row(label: str, part: ScorePart) -> tuple[str, ...]:
    """Return a row of the table: label, checked responses, wrong ones, and the share right."""
    wrong = part.checked - part.correct
    return (label, format.count(part.checked), format.count(wrong), format_score(part))


def describe_load_dependence(dependence: LoadDependence) -> str:
    """Return whether more responses are wrong with more requests in flight, as a sentence."""
    p_value = format_p_value(dependence.p_value)
    if dependence.is_worse:
        return (
            f"Responses are worse above {dependence.in_flight:,} requests in flight than below "
            f"({p_value})."
        )

    return f"No dependence of the responses on the requests in flight was found ({p_value})."


def describe_reference(reference: ReferenceComparison) -> str:
    """Return whether the responses differ from those of a reference endpoint, as a sentence.

    The reference endpoint has responded twice to each question. "A response agrees with its first
    response for 80 % of its length" means that the first difference comes after 80 % of the words.
    The agreement of its second response shows how much is normal without any defect.
    """
    agreement = format.percent(reference.agreement)
    normal_agreement = format.percent(reference.reference_agreement)
    questions = format.counted(reference.questions, "question")
    p_value = format_p_value(reference.p_value)

    if reference.is_different:
        result = "Responses differ from those of the reference endpoint"
    else:
        result = "No difference from the reference endpoint was found"

    return (
        f"{result}: they agree with its first response for {agreement} of their length, and its "
        f"second response does for {normal_agreement} ({questions}, {p_value})."
    )
