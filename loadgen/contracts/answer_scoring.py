"""Carries out what a contract asks about answers, and takes the figure of each term from what was scored.

IO, above the judgements: the asking and scoring are those of `answers/`, as for `loadgen answers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadgen.answers import folder
from loadgen.answers.comparison import ScoredGroup, judge
from loadgen.answers.questions import read_questions
from loadgen.answers.run import run
from loadgen.contracts.evaluate import Held
from loadgen.contracts.schema import AnswerCheck, Promise
from loadgen.contracts.steady_samples import Missing
from loadgen.contracts.verdict import ScoredAnswers
from loadgen.core import format
from loadgen.core.execution.backend import serving
from loadgen.core.execution.plan import Settings
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats.intervals import Interval

FOLDER = "answers"
LANES = 8


def carry_out(
    asked: AnswerCheck,
    dataset: Path,
    settings: Settings,
    other: Settings | None,
    out: Path,
    level: float,
) -> None:
    """Ask all prompts and leave the files of it in `out`. Raises TargetError, UserError, Faults."""
    questions = read_questions(dataset, asked.rows)
    with serving(settings) as served:
        run(
            dataset,
            questions,
            served,
            other,
            lanes=LANES,
            max_tokens=asked.max_tokens,
            tell=lambda _name, _done: None,
            out=out,
            level=level,
            simulated=settings.backend.simulated,
        )


def read(out: Path, trouble: str, level: float) -> ScoredAnswers:
    """What the files of `carry_out` say; or only why it could not be carried out. Raises UserError."""
    if trouble or not (out / folder.FILE).is_file():
        return ScoredAnswers(_no_figure, trouble=trouble or "the prompts were not asked")
    result = folder.read(out)
    groups = judge(folder.read_scores(out), level=level)
    notes = list(result.notes)
    if result.failed:
        notes.append(
            f"{result.failed:,} of {format.counted(result.prompts, 'prompt')} had no answer: they score 0"
        )
    if result.failed_against:
        notes.append(
            f"{result.failed_against:,} prompts had no answer of the other endpoint: they are not compared"
        )
    other = f", against {result.against_model} at {result.against}" if result.against else ""
    return ScoredAnswers(
        held=lambda term: held(term, groups),
        load=f"asked once, greedily{other}",
        prompts=result.prompts,
        answered=result.prompts - result.failed,
        notes=tuple(notes),
    )


def _no_figure(term: Promise) -> Held:
    raise Missing("the prompts were not asked")


def held(term: Promise, groups: Sequence[ScoredGroup]) -> Held:
    """The figure of a term, in percent or tokens. Raises Missing where the answers cannot give it."""
    group = next((one for one in groups if one.group == term.class_name), None)
    if group is None:
        raise Missing(f"there is no prompt of class {term.class_name}")
    if term.kind == "within":
        change = next((one for one in group.changes if one.metric == term.of), None)
        if change is None:
            raise Missing(f"no prompt has a {term.of} of both endpoints")
        if change.ratio is None or change.low is None or change.high is None:
            raise Missing(_too_few(change.count))
        return Held(_percent(1 - change.ratio, 1 - change.high, 1 - change.low), change.count)
    score = next((one for one in (*group.scores, *group.alike) if one.metric == term.kind), None)
    if score is None:
        raise Missing(f"no prompt has a score of this kind ({term.kind})")
    if score.low is None or score.high is None:
        raise Missing(_too_few(score.count))
    bounds = (score.mean, score.low, score.high)
    return Held(Interval(*bounds) if term.unit == "tokens" else _percent(*bounds), score.count)


def _percent(value: float, low: float, high: float) -> Interval:
    return Interval(value, low, high).each(lambda share: round(share * 100, 9))


def _too_few(count: int) -> str:
    return (
        f"{count:,} prompts say too little: {FEWEST_ANSWERS} or more, and scores that are not all 0"
    )
