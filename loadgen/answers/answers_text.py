"""Render the result of `loadgen answers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadgen.answers.comparison import AnswersResult, Score, ScoredGroup, ScoreRatio
from loadgen.answers.scores import NAMES, TOKEN_COUNTS
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
    named_facts,
    section,
    simulated_notice,
)

VERDICT_KINDS: dict[bool | None, Kind] = {True: "good", False: "bad", None: "warn"}
VERDICTS = {True: "PASS", False: "FAIL", None: "UNDECIDED"}
WITHIN_TEXTS = {True: "yes", False: "no", None: "undecided"}
NEUTRAL_COLOR = "c1"


def report(result: AnswersResult, failures: Sequence[str] = ()) -> Report:
    """Return the report of a result: endpoints, scores of each class, and the verdict if any.

    Args:
        result: The result.
        failures: The first reasons why requests failed.
    """
    title = f"{result.dataset}: {format.counted(result.prompts, 'prompt')}, temperature 0"
    verdict: list[Paragraph] = []
    if result.allowed_loss is not None:
        verdict_kind = VERDICT_KINDS[result.is_within_loss]
        verdict = [Paragraph(_describe_verdict(result), verdict_kind, large=True)]
    brief_heading = section("", *verdict) if verdict else section("", title)
    overview = _overview_section(result, failures)
    notices = []
    if result.simulated:
        notices.append(simulated_notice("texts are random words, not those of a real server"))
    return Report(
        title=title,
        generated_by="loadgen answers",
        notices=notices,
        headline=verdict,
        headline_last=True,
        sections=[
            overview,
            *(_group_section(group, result) for group in result.groups),
            section("", Paragraph(_describe_intervals(result), "soft")),
        ],
        brief=[brief_heading, overview, *_brief_scores(result)],
    )


def _overview_section(result: AnswersResult, failures: Sequence[str]) -> Section:
    """Return the endpoints, how many requests failed and why, and what a reader should know."""
    prompts = format.counted(result.prompts, "prompt")
    endpoint_b = f"{result.other_model} at {result.other_url}" if result.other_url else ""
    return section(
        "",
        named_facts(A=f"{result.model} at {result.url}", B=endpoint_b),
        Bullets([*_missing_responses(result, prompts), *result.notes], "warn"),
        Bullets(failures),
    )


def _brief_scores(result: AnswersResult) -> Iterator[Section]:
    """Yield the scores of all prompts, and a line about what else the full report has."""
    all_prompts = result.groups[0]
    yield _group_section(all_prompts, result, is_only_group=True)
    class_count = len(result.groups) - 1
    if class_count:
        classes = format.counted(class_count, "class", "classes")
        yield section("", f"--full prints the scores of {classes} and the method of the intervals.")


def headline(result: AnswersResult) -> str:
    """Return the outcome in one sentence."""
    mark = "SIMULATED: " if result.simulated else ""
    prompts = format.counted(result.prompts, "prompt")
    other = ""
    if result.other_url:
        other = f", against {result.other_model} at {result.other_url}"
    load = f"{prompts} of {result.dataset} sent to {result.model} at {result.url}{other}"
    return f"{mark}{outcome(result)}: {load}."


def outcome(result: AnswersResult) -> str:
    """Return the verdict, or else the first score, in a few words."""
    if result.allowed_loss is not None:
        return VERDICTS[result.is_within_loss]
    scores = result.groups[0].scores or result.groups[0].similarity
    if not scores:
        return "no scores"
    return f"{NAMES[scores[0].metric]} {_format_score(scores[0])}"


def _describe_verdict(result: AnswersResult) -> str:
    """Return the verdict on the allowed loss as a sentence."""
    assert result.allowed_loss is not None
    allowed = f"{result.allowed_loss * 100:g} %"
    if not result.groups[0].ratios:
        return "UNDECIDED: no row has a reference to score responses against."
    if result.is_within_loss is None:
        reason = "too few prompts"
        if result.failed:
            reason += ", and requests failed"
        return f"UNDECIDED: {reason} to tell whether A loses at most {allowed}."
    if result.is_within_loss:
        return f"PASS: no score of A is more than {allowed} below that of B."
    return f"FAIL: a score of A is more than {allowed} below that of B."


def _missing_responses(result: AnswersResult, prompts: str) -> Iterator[str]:
    """Yield a warning for each endpoint that did not respond to all prompts."""
    if result.failed:
        yield f"A failed on {result.failed:,} of {prompts}, which score 0"
    if result.other_failed:
        yield f"B failed on {result.other_failed:,} of {prompts}, which are not compared"


def _group_section(
    group: ScoredGroup, result: AnswersResult, *, is_only_group: bool = False
) -> Section:
    """Return the scores of a group of prompts as a table, with bars that only a page shows.

    Args:
        group: All prompts, or those of one class of the workload.
        result: The result with all groups.
        is_only_group: True if no other group is shown, which then needs no heading of its own.
    """
    if is_only_group or len(result.groups) == 1:
        heading = "Scores"
    elif group.group:
        heading = f"class {group.group}"
    else:
        heading = "all prompts"
    similarity_rows = [
        [NAMES[score.metric], format.count(score.count), _format_score(score)]
        for score in group.similarity
    ]
    empty_text = ""
    if not group.scores and not similarity_rows:
        empty_text = "No scores: no row has a reference, and there is no second endpoint."
    return section(
        heading,
        _ratio_bars(group, result) if result.other_url else _score_bars(group),
        _score_table(group, result),
        Table(("A compared with B", "prompts", "mean"), similarity_rows),
        empty_text,
    )


def _score_table(group: ScoredGroup, result: AnswersResult) -> Table:
    """Return the table with one row for each score, and only the columns that say something.

    The number of prompts is left out if every score covers all prompts. Endpoint B and the ratio
    A / B need a second endpoint, and the last column also a limit on the loss.
    """
    scores = group.scores
    ratio_by_metric = {ratio.metric: ratio for ratio in group.ratios}
    ratios = [ratio_by_metric.get(score.metric) for score in scores]
    columns = {"score": [NAMES[score.metric] for score in scores]}
    if any(score.count != result.prompts for score in scores):
        columns["prompts"] = [format.count(score.count) for score in scores]
    columns["A"] = [_format_score(score) for score in scores]
    if result.other_url:
        other_scores = {score.metric: score for score in group.other_scores}
        columns["B"] = [_format_score(other_scores.get(score.metric)) for score in scores]
        columns["A / B"] = [_format_ratio(ratio) for ratio in ratios]
        if result.allowed_loss is not None:
            columns[f"within {result.allowed_loss * 100:g} %"] = [
                format.NONE if ratio is None else WITHIN_TEXTS[ratio.is_within_loss]
                for ratio in ratios
            ]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(list(columns), rows)


def _score_bars(group: ScoredGroup) -> Bars:
    """Return a bar for each score of the endpoint."""
    rows = []
    for score in group.scores:
        if score.metric not in TOKEN_COUNTS:
            bar = _percent_bar(score.mean, score.low, score.high, NEUTRAL_COLOR)
            rows.append(Bar(NAMES[score.metric], _format_score(score), *bar))
    return Bars(rows=rows, included_value=0.0, unit=" %")


def _ratio_bars(group: ScoredGroup, result: AnswersResult) -> Bars:
    """Return a bar for each score of A as a percentage of B's, and a line for the allowed loss."""
    rows = []
    for ratio in group.ratios:
        if ratio.ratio is not None:
            bar = _percent_bar(
                ratio.ratio, ratio.low, ratio.high, VERDICT_KINDS[ratio.is_within_loss]
            )
            rows.append(Bar(NAMES[ratio.metric], _format_ratio(ratio), *bar))
    line = None
    title = "Scores of A, in % of the scores of B"
    if result.allowed_loss is not None:
        line = 100 * (1 - result.allowed_loss)
        title += f" (dotted line: the limit of {line:g} %)"
    return Bars(
        rows=rows, title=title if rows else "", included_value=0.0, marked_value=line, unit=" %"
    )


class _PercentBar(NamedTuple):
    """The segments and the whisker of a bar."""

    segments: list[tuple[float, float, str, str]]
    whisker: tuple[float, float] | None


def _percent_bar(fraction: float, low: float | None, high: float | None, color: str) -> _PercentBar:
    """Return a bar from zero for a fraction, with its interval as a whisker."""
    percent = 100 * fraction
    whisker = None if low is None or high is None else (100 * low, 100 * high)
    return _PercentBar([(0.0, percent, color, f"{percent:.1f} %")], whisker)


def _format_score(score: Score | None) -> str:
    if score is None:
        return format.NONE
    mean = _format_value(score, score.mean)
    if score.low is None or score.high is None:
        return f"~{mean}"
    return f"{mean} [{_format_value(score, score.low)}, {_format_value(score, score.high)}]"


def _format_value(score: Score, value: float) -> str:
    if score.metric in TOKEN_COUNTS:
        return f"{value:.1f}"
    return f"{value * 100:.1f} %"


def _format_ratio(ratio: ScoreRatio | None) -> str:
    if ratio is None or ratio.ratio is None:
        return format.NONE
    if ratio.low is None or ratio.high is None:
        return f"~{ratio.ratio:.3f}"
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _describe_intervals(result: AnswersResult) -> str:
    """Return how the intervals were computed."""
    return (
        f"{result.level * 100:g} % confidence intervals: Wilson for fractions, "
        "Student for means, Fieller for paired ratios. They are widened for rare "
        "responses that these prompts may not contain. ~: too few responses for an "
        "interval."
    )
