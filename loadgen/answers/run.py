"""Asks one endpoint, or two, scores what they answered, and leaves the files of it. IO."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from loadgen.answers import ask, folder
from loadgen.answers.comparison import AnswersResult, judge, score
from loadgen.answers.questions import Question
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.execution.plan import Settings
from loadgen.core.stats.intervals import LEVEL


def run(
    dataset: Path,
    questions: Sequence[Question],
    first: Settings,
    second: Settings | None,
    *,
    lanes: int,
    max_tokens: int | None,
    tell: Callable[[str, int], None],
    out: Path | None = None,
    keep_texts: bool = False,
    loss: float | None = None,
    level: float = LEVEL,
    simulated: bool = False,
) -> tuple[AnswersResult, list[str]]:
    """Ask and score all questions; write the files into `out`. Returns the result, and why answers did not come.

    `simulated`: the backend of the first endpoint simulates it. Raises TargetError for an endpoint that cannot be used,
    UserError for a package that is not installed or a folder that cannot be written.
    """
    of_first, of_second = ask.ask_all(
        first, second, questions, lanes=lanes, max_tokens=max_tokens, tell=tell
    )
    others = None if of_second is None else of_second.answers
    prompts = score(questions, of_first.answers, others)
    unequal = "" if of_second is None else ask.unequal_tokens(of_first, of_second)
    result = AnswersResult(
        dataset=dataset.name,
        dataset_sha256=hashlib.sha256(dataset.read_bytes()).hexdigest(),
        version=loadgen_version(),
        url=ask.shown(first),
        model=of_first.model,
        against="" if second is None else ask.shown(second),
        against_model="" if of_second is None else of_second.model,
        prompts=len(prompts),
        failed=of_first.answers.count(None),
        failed_against=0 if others is None else others.count(None),
        loss=loss,
        level=level,
        simulated=simulated or of_first.simulated or bool(of_second and of_second.simulated),
        notes=(unequal,) if unequal else (),
        parts=judge(prompts, loss, level),
    )
    if out is not None:
        texts = folder.kept_texts(questions, of_first.answers, others) if keep_texts else None
        folder.write(out, result, prompts, texts)
    return result, of_first.reasons + ([] if of_second is None else of_second.reasons)
