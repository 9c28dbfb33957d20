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
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    named_facts,
    section,
    simulated_notice,
)

VERDICT_KINDS: dict[bool | None, Kind] = {True: "good", False: "bad", None: "warn"}
"""The kind of a paragraph or bar, which decides its color, by whether A is within the loss."""
VERDICTS = {True: "PASS", False: "FAIL", None: "UNDECIDED"}
WITHIN_TEXTS = {True: "yes", False: "no", None: "undecided"}
NEUTRAL_COLOR = "c1"


def report(result: AnswersResult, failures: Sequence[str] = ()) -> Report:
    """Return the report of a result: the endpoints, the scores, and whether A is good enough.

    Args:
        result: The scores of endpoint A and, if there are two endpoints, of endpoint B.
        failures: The first reasons why requests failed.
    """
    title = f"{result.dataset}: {format.counted(result.prompts, 'prompt')}, temperature 0"
    verdict = _verdict_paragraphs(result)
    overview = _overview_section(result, failures)
    class_sections = [_group_section(group, result) for group in result.groups]

    # The brief report is printed without the title, so a report without a verdict begins with it.
    first_brief_section = section("", *verdict) if verdict else section("", title)

    return Report(
        title=title,
        generated_by="loadgen answers",
        notices=_simulation_notices(result),
        headline=verdict,
        headline_last=True,
        sections=[overview, *class_sections, _method_section(result)],
        brief=[first_brief_section, overview, *_brief_scores(result)],
    )


def _simulation_notices(result: AnswersResult) -> list[Notice]:
    """Return a notice that a server was simulated, or an empty list for real servers."""
    if not result.simulated:
        return []
    return [simulated_notice("texts are random words, not those of a real server")]


def _method_section(result: AnswersResult) -> Section:
    """Return how the intervals were computed, in small print ("soft")."""
    return section("", Paragraph(_describe_intervals(result), "soft"))


def _verdict_paragraphs(result: AnswersResult) -> list[Paragraph]:
    """Return the verdict as one large paragraph, or an empty list without an allowed loss."""
    if result.allowed_loss is None:
        return []
    kind = VERDICT_KINDS[result.is_within_loss]
    return [Paragraph(_describe_verdict(result), kind, large=True)]


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
    """Yield the scores of all prompts, and a hint at the scores that only the full report has."""
    all_prompts = result.groups[0]
    yield _group_section(all_prompts, result, heading="Scores")

    class_count = len(result.groups) - 1
    if class_count:
        classes = format.counted(class_count, "class", "classes")
        yield section("", f"--full prints the scores of {classes} and the method of the intervals.")


def headline(result: AnswersResult) -> str:
    """Return the outcome and the prompts and endpoints that it applies to, in one sentence."""
    mark = "SIMULATED: " if result.simulated else ""
    prompts = format.counted(result.prompts, "prompt")
    sent = f"{prompts} of {result.dataset} sent to {result.model} at {result.url}"
    if result.other_url:
        sent += f", against {result.other_model} at {result.other_url}"
    return f"{mark}{outcome(result)}: {sent}."


def outcome(result: AnswersResult) -> str:
    """Return the result in a few words, such as "PASS" or "exact match 83.0 % [80.1 %, 85.6 %]".

    With an allowed loss, the outcome says whether the scores are within this loss. Without an
    allowed loss, the outcome is the first score of all prompts.
    """
    if result.allowed_loss is not None:
        return VERDICTS[result.is_within_loss]

    all_prompts = result.groups[0]
    scores = all_prompts.scores or all_prompts.similarity
    if not scores:
        return "no scores"

    first_score = scores[0]
    name = NAMES[first_score.metric]
    return f"{name} {_format_score(first_score)}"


def _describe_verdict(result: AnswersResult) -> str:
    """Return whether the scores of A are within the allowed loss, as a sentence.

    For example, with an allowed loss of 1 %, scores of A may be 1 % lower than those of B.
    """
    assert result.allowed_loss is not None
    allowed = f"{result.allowed_loss * 100:g} %"

    all_prompts = result.groups[0]
    if not all_prompts.ratios:
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


def _group_section(group: ScoredGroup, result: AnswersResult, heading: str = "") -> Section:
    """Return the scores of a group of prompts as bars (for the HTML page) and tables.

    Args:
        group: All prompts, or those of one class of the workload.
        result: The result with all groups.
        heading: The heading of the section. By default, it names the group.
    """
    has_second_endpoint = bool(result.other_url)
    bars = _ratio_bars(group, result) if has_second_endpoint else _score_bars(group)

    similarity_rows = [
        [NAMES[score.metric], format.count(score.count), _format_score(score)]
        for score in group.similarity
    ]

    no_scores_text = ""
    if not group.scores and not similarity_rows:
        no_scores_text = "No scores: no row has a reference, and there is no second endpoint."

    return section(
        heading or _group_heading(group, result),
        bars,
        _score_table(group, result),
        Table(("A compared with B", "prompts", "mean"), similarity_rows),
        no_scores_text,
    )


def _group_heading(group: ScoredGroup, result: AnswersResult) -> str:
    """Return the name of a group of prompts, or "Scores" if the result has no other group."""
    if len(result.groups) == 1:
        return "Scores"
    class_name = group.group
    return f"class {class_name}" if class_name else "all prompts"


def _score_table(group: ScoredGroup, result: AnswersResult) -> Table:
    """Return a table with one row for each score of a group of prompts.

    The column with the number of prompts is left out if each score covers all prompts. Columns that
    compare endpoint A with endpoint B are left out if there is no endpoint B.
    """
    scores = group.scores
    cells_by_heading = {"score": [NAMES[score.metric] for score in scores]}

    covers_fewer_prompts = any(score.count != result.prompts for score in scores)
    if covers_fewer_prompts:
        cells_by_heading["prompts"] = [format.count(score.count) for score in scores]

    cells_by_heading["A"] = [_format_score(score) for score in scores]

    has_endpoint_b = bool(result.other_url)
    if has_endpoint_b:
        cells_by_heading |= _comparison_columns(group, result)

    headings = list(cells_by_heading)
    rows = [list(row) for row in zip(*cells_by_heading.values(), strict=True)]
    return Table(headings, rows)


def _comparison_columns(group: ScoredGroup, result: AnswersResult) -> dict[str, list[str]]:
    """Return the columns of a score table that compare endpoint A with endpoint B, by heading.

    Each column has one cell for each score of A. A score that B does not have gives an empty cell.
    """
    metrics = [score.metric for score in group.scores]
    score_of_b_by_metric = {score.metric: score for score in group.other_scores}
    ratio_by_metric = {ratio.metric: ratio for ratio in group.ratios}

    scores_of_b = [score_of_b_by_metric.get(metric) for metric in metrics]
    ratios = [ratio_by_metric.get(metric) for metric in metrics]

    cells_by_heading = {
        "B": [_format_score(score) for score in scores_of_b],
        "A / B": [_format_ratio(ratio) for ratio in ratios],
    }
    if result.allowed_loss is not None:
        heading = f"within {result.allowed_loss * 100:g} %"
        cells_by_heading[heading] = [_format_within(ratio) for ratio in ratios]

    return cells_by_heading


def _score_bars(group: ScoredGroup) -> Bars:
    """Return a bar for each score of the endpoint that is a fraction, with its interval."""
    bars = []
    for score in group.scores:
        is_fraction = score.metric not in TOKEN_COUNTS
        if is_fraction:
            name = NAMES[score.metric]
            value = _BarValue(score.mean, score.low, score.high)
            bar = _percent_bar(name, _format_score(score), value, NEUTRAL_COLOR)
            bars.append(bar)

    return Bars(rows=bars, included_value=0.0, unit=" %")


def _ratio_bars(group: ScoredGroup, result: AnswersResult) -> Bars:
    """Return a bar for each score of endpoint A in percent of the score of endpoint B.

    The color shows whether the score is within the allowed loss. A line marks the limit: with an
    allowed loss of 1 %, the line is at 99 %.
    """
    bars = []
    for comparison in group.ratios:
        if comparison.ratio is not None:
            name = NAMES[comparison.metric]
            value = _BarValue(comparison.ratio, comparison.low, comparison.high)
            color = VERDICT_KINDS[comparison.is_within_loss]
            bar = _percent_bar(name, _format_ratio(comparison), value, color)
            bars.append(bar)

    limit_percent = None
    if result.allowed_loss is not None:
        limit_percent = 100 * (1 - result.allowed_loss)

    return Bars(
        rows=bars,
        title=_ratio_bars_title(limit_percent) if bars else "",
        included_value=0.0,
        marked_value=limit_percent,
        unit=" %",
    )


def _ratio_bars_title(limit_percent: float | None) -> str:
    """Return the title above the bars, which explains the dotted line if there is a limit."""
    title = "Scores of A, in % of the scores of B"
    if limit_percent is None:
        return title
    return f"{title} (dotted line: the limit of {limit_percent:g} %)"


class _BarValue(NamedTuple):
    """A fraction with its confidence interval, whose ends are None if it has none."""

    fraction: float
    low: float | None
    high: float | None


def _percent_bar(name: str, text: str, value: _BarValue, color: str) -> Bar:
    """Return a bar from 0 % to a value in percent, with a thin line (whisker) for its interval.

    Args:
        name: The label before the bar.
        text: The label after the bar.
        value: The value and its interval as fractions: 0.5 is 50 %.
        color: The color of the bar.
    """
    percent = 100 * value.fraction
    segments = [(0.0, percent, color, f"{percent:.1f} %")]
    whisker = None
    if value.low is not None and value.high is not None:
        whisker = (100 * value.low, 100 * value.high)

    return Bar(name, text, segments, whisker)


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


def _format_within(ratio: ScoreRatio | None) -> str:
    return format.NONE if ratio is None else WITHIN_TEXTS[ratio.is_within_loss]


def _describe_intervals(result: AnswersResult) -> str:
    """Return how the intervals were computed."""
    return (
        f"{result.level * 100:g} % confidence intervals: Wilson for fractions, "
        "Student for means, Fieller for paired ratios. They are widened for rare "
        "responses that these prompts may not contain. ~: too few responses for an "
        "interval."
    )
