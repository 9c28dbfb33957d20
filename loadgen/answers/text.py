"""What `loadgen answers` says. Pure: a result in, the report of text, Markdown and page out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.answers.comparison import AnswersResult, Change, Score, ScoredGroup
from loadgen.answers.scores import NAMES
from loadgen.core import format
from loadgen.render.page import Bar
from loadgen.render.section import (
    Bars,
    Bullets,
    Kind,
    Paragraph,
    Report,
    Section,
    Table,
    facts,
    section,
    simulated,
)

KIND: dict[bool | None, Kind] = {True: "good", False: "bad", None: "warn"}
WORDS = {True: "yes", False: "no", None: "undecided"}


def report(result: AnswersResult, reasons: Sequence[str] = ()) -> Report:
    """The whole answer. reasons: why prompts had no answer, the first few."""
    asked = format.counted(result.prompts, "prompt")
    unanswered = (
        (result.failed, "A", "they score 0"),
        (result.failed_against, "B", "they are not compared"),
    )
    against = [
        f"{count:,} of {asked} had no answer of {name}: {worth}"
        for count, name, worth in unanswered
        if count
    ]
    return Report(
        title=f"{result.dataset}: {asked}, greedy",
        made_by="loadgen answers",
        warned=[simulated("texts are random words, not those of a real server")]
        if result.simulated
        else [],
        answer=[Paragraph(ending, KIND[result.verdict], large=True) for ending in _end(result)],
        answer_last=True,
        sections=[
            section(
                "",
                facts(
                    A=f"{result.model} at {result.url}",
                    B=f"{result.against_model} at {result.against}" if result.against else "",
                ),
                Bullets([*against, *result.notes], "warn"),
                Bullets(reasons),
            ),
            *(_part(part, result) for part in result.parts),
            section("", Paragraph(_intervals(result), "soft")),
        ],
    )


def headline(result: AnswersResult) -> str:
    """What came out, in one sentence."""
    mark = "SIMULATED: " if result.simulated else ""
    against = f", against {result.against_model} at {result.against}" if result.against else ""
    asked = f"{format.counted(result.prompts, 'prompt')} of {result.dataset} to {result.model} at {result.url}{against}"
    return f"{mark}{word(result)}: {asked}."


def word(result: AnswersResult) -> str:
    """The outcome in a few words: the verdict, or else the first score."""
    if result.loss is not None:
        return {True: "PASS", False: "FAIL", None: "UNDECIDED"}[result.verdict]
    scores = result.parts[0].scores or result.parts[0].alike
    return f"{NAMES[scores[0].metric]} {_score(scores[0])}" if scores else "nothing was scored"


def _part(part: ScoredGroup, result: AnswersResult) -> Section:
    other = {score.metric: score for score in part.other}
    changes = {change.metric: change for change in part.changes}
    rows = []
    for score in part.scores:
        row = [NAMES[score.metric], format.count(score.count), _score(score)]
        if result.against:
            change = changes.get(score.metric)
            row += [_score(other.get(score.metric)), _change(change)]
            if result.loss is not None:
                row.append(format.NONE if change is None else WORDS[change.within])
        rows.append(row)
    head = ["score", "prompts", "A"]
    head += ["B", "A over B"] if result.against else []
    head += (
        [f"within {result.loss * 100:g} %"] if result.against and result.loss is not None else []
    )
    alike = [
        [NAMES[score.metric], format.count(score.count), _score(score)] for score in part.alike
    ]
    nothing = (
        "nothing to score: no row has a reference, and there is no second endpoint (--against)"
    )
    name = f"class {part.group}" if part.group else "all prompts"
    return section(
        name if len(result.parts) > 1 else "Scores",
        _bars(part, result),
        Table(head, rows),
        Table(("A and B", "prompts", "mean"), alike),
        "" if rows or alike else nothing,
    )


def _bars(part: ScoredGroup, result: AnswersResult) -> Bars:
    """Of two endpoints what A has of each score of B, with the line that was asked for; of one its scores."""
    known = [change for change in part.changes if change.ratio is not None]
    if not result.against:
        scores = [score for score in part.scores if score.metric != "agreement"]
        rows = [
            Bar(NAMES[one.metric], _score(one), *_span(one.mean, one.low, one.high, "c1"))
            for one in scores
        ]
        return Bars(rows=rows, low=0.0, unit=" %")
    rows = [
        Bar(
            NAMES[one.metric],
            _change(one),
            *_span(one.ratio, one.low, one.high, _COLOR[one.within]),
        )
        for one in known
    ]
    line = None if result.loss is None else 100 * (1 - result.loss)
    title = "Scores of A, in % of those of B" + (
        "" if line is None else f": at least {line:g} %, the dotted line"
    )
    return Bars(rows=rows, title=title if rows else "", low=0.0, line=line, unit=" %")


_COLOR = {True: "good", False: "bad", None: "warn"}


def _span(
    mid: float | None, low: float | None, high: float | None, color: str
) -> tuple[list[tuple[float, float, str, str]], tuple[float, float] | None]:
    """A segment from 0 and its whisker, of shares as percent."""
    ends = None if low is None or high is None else (100 * low, 100 * high)
    return [(0.0, 100 * (mid or 0.0), color, f"{100 * (mid or 0.0):.1f} %")], ends


def _score(score: Score | None) -> str:
    if score is None:
        return format.NONE
    if score.low is None or score.high is None:
        return f"~{_number(score, score.mean)}"
    return (
        f"{_number(score, score.mean)} [{_number(score, score.low)}, {_number(score, score.high)}]"
    )


def _number(score: Score, value: float) -> str:
    return f"{value:.1f}" if score.metric == "agreement" else f"{value * 100:.1f} %"


def _change(change: Change | None) -> str:
    if change is None or change.ratio is None:
        return format.NONE
    if change.low is None or change.high is None:
        return f"~{change.ratio:.3f}"
    return f"{change.ratio:.3f} [{change.low:.3f}, {change.high:.3f}]"


def _intervals(result: AnswersResult) -> str:
    return (
        f"{result.level * 100:g} % intervals: of shares Wilson's, of means Student's, of A over B Fieller's of pairs; "
        "at least as wide as what so few prompts may not have met. ~: too few answers."
    )


def _end(result: AnswersResult) -> Iterator[str]:
    """The verdict, where one was asked for."""
    if result.loss is None:
        return
    if not result.parts[0].changes:
        yield "UNDECIDED: no row has a reference, so nothing says whose answer is right"
        return
    words = {
        True: f"PASS: every score of A is within {result.loss * 100:g} % of B's",
        False: f"FAIL: a score of A is more than {result.loss * 100:g} % below B's",
        None: "UNDECIDED: more prompts are needed"
        + (", and answers that did not come" if result.failed else ""),
    }
    yield words[result.verdict]
