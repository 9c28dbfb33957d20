"""The default output of a run: its result in at most 25 lines.

`loadgen run --full` and `loadgen report RUN --full` print every section instead. Pure.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format, seeds, slo
from loadgen.core.metrics.reasons import split_first_sentence
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.figures import metric_label
from loadgen.render.section import Facts, Paragraph, Section, Table, section
from loadgen.render.table import WIDTH
from loadgen.runs import cells
from loadgen.runs.accepted_length import describe_verdict
from loadgen.runs.answers_objective import (
    find_answers_objective,
    format_answers_limit,
    format_measured_answers,
)
from loadgen.runs.answers_text import describe_answers
from loadgen.runs.fluidity import (
    find_fluidity_objective,
    format_measured_index,
    list_fluidity_objectives,
)
from loadgen.runs.interactivity_text import describe_interactivity
from loadgen.runs.load_fidelity import check_label
from loadgen.runs.notices import notices
from loadgen.runs.rates import describe_late_ends, select_headline_rates
from loadgen.runs.run_facts import describe_excluded_requests
from loadgen.runs.run_title import format_duration, load_duration_s, run_title
from loadgen.runs.slo_text import (
    NOT_JUDGED,
    describe_task_limits,
    find_task_goodput,
    format_limit,
    format_term_value,
    is_attainment_met,
    is_judged,
    list_slo_scopes,
)
from loadgen.runs.task_text import describe_completed_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.metrics.sections import SplitGroup
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.core.results.manifest import ReasonCode
    from loadgen.core.stats.quantiles import Distribution

MAX_LINES = 25
"""The default output has about so many lines. Objectives of an SLO are left out above that."""

FIXED_LINES = 10
"""Lines that are always there: title, two heads of tables, two paths, empty lines."""

MIN_OBJECTIVES = 2
"""So many objectives of an SLO are always shown. Missed ones come first."""

TEXT_COLUMNS = 84
"""About so many columns remain for a text next to its label."""

MAX_ERROR_KINDS = 3
"""So many kinds of errors are shown, the most frequent ones."""

QUANTILES = ("p50", "p95", "p99")

LATENCY_TITLE = "Latency (ms)"
UNRELIABLE_LATENCY_TITLE = "Latency (ms), not reliable"

PER_USER = "Per user"
BREAKDOWN = "Breakdown"
OPTIONAL_LINES = (PER_USER, BREAKDOWN)
"""The labels of the lines that are left out, in this order, if there are too many lines."""

MAX_CAVEAT_LENGTH = 2 * TEXT_COLUMNS
MAX_WARNING_LENGTH = 2 * TEXT_COLUMNS
"""A longer warning is shortened to its first sentence."""
MAX_CAVEAT_METRICS = 3
"""A longer caveat names so many of the omitted metrics."""

MS_PER_S = 1000

LONG_MS = 10 * MS_PER_S
"""From here on, measured values of objectives are shown in s."""

_MARKS: dict[bool | None, str] = {True: "ok", False: "x", None: "?"}
"""The first column of the SLO: met, missed, undecided."""

_WARNINGS_STATED_IN_TITLE = frozenset(("virtual_time",))
"""Codes of warnings that are not counted, because the title of the output says the same."""

_NO_STEADY_STATE = "never_steady"
"""The code of the warning that the throughput includes ramp-up and drain."""


def brief_sections(summary: Summary, run_dir: Path | None = None) -> list[Section]:
    """Return the default output of a run: title, SLO, latencies, results, and how to see more.

    To fit into about MAX_LINES, the speed per user and then the breakdown of the latency are left
    out first. If that is not enough, only the most important objectives of the SLO are shown.

    Args:
        summary: The run.
        run_dir: The directory of its results, or None if it is not known.
    """
    result_lines = _fit_result_lines(summary)
    brief_slo = _BriefSlo(summary, _max_objectives(summary, result_lines))
    return [
        section("", Paragraph(run_title(summary))),
        section("", brief_slo.table(), *brief_slo.notes(), indented=True),
        section("", _latency_table(summary), *_latency_notes(summary), indented=True),
        section("", Facts(result_lines), indented=True),
        section("", Facts(list(_path_lines(summary, run_dir)))),
    ]


def _fit_result_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return the lines below the latencies, without the least important ones if room is short.

    The lines in OPTIONAL_LINES are left out first, one after the other. If that is not enough, a
    warning is counted instead of shown.
    """
    lines = _without_optional_lines(summary, list(_result_lines(summary)))
    if _has_room_for_objectives(summary, lines):
        return lines
    return _without_optional_lines(summary, list(_result_lines(summary, counts_warnings=True)))


def _without_optional_lines(
    summary: Summary, lines: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the lines without as many of the OPTIONAL_LINES as the objectives need room."""
    for least_important in OPTIONAL_LINES:
        if _has_room_for_objectives(summary, lines):
            break
        lines = [(label, text) for label, text in lines if label != least_important]
    return lines


def _has_room_for_objectives(summary: Summary, lines: Sequence[tuple[str, str]]) -> bool:
    """Return whether the SLO has room beside these lines below the latencies.

    It needs room for all missed objectives, but at least MIN_OBJECTIVES, and for the line that says
    how many others are hidden.
    """
    objectives = list(_objective_rows(summary))
    important_objectives = max(_count_missed(objectives), MIN_OBJECTIVES)
    needed_lines = min(len(objectives), important_objectives + 1)
    return _count_free_lines(summary, lines) >= needed_lines


def _max_objectives(summary: Summary, result_lines: Sequence[tuple[str, str]]) -> int:
    """Return for how many objectives there is room in MAX_LINES, at least MIN_OBJECTIVES."""
    return max(_count_free_lines(summary, result_lines), MIN_OBJECTIVES)


def _count_free_lines(summary: Summary, result_lines: Sequence[tuple[str, str]]) -> int:
    """Return how many of the MAX_LINES are left for objectives. It may be negative."""
    note_lines = sum(bool(note.text) for note in _latency_notes(summary))
    latency_lines = len(_latency_rows(summary)) + note_lines
    text_lines = sum(len(textwrap.wrap(text, TEXT_COLUMNS)) for _, text in result_lines)
    return MAX_LINES - FIXED_LINES - _count_notice_lines(summary) - latency_lines - text_lines


def _count_notice_lines(summary: Summary) -> int:
    """Return about how many lines the notices above the title have."""
    texts = [f"{notice.label}: {notice.text}" for notice in notices(summary)]
    return sum(len(textwrap.wrap(text, WIDTH)) for text in texts)


# -- SLO -------------------------------------------------------------------------------------------


class _ObjectiveRow(NamedTuple):
    """A row of the SLO: an objective with its outcome, the measured value and the limit."""

    is_met: bool | None
    name: str
    measured: str
    limit: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return (_MARKS[self.is_met], self.name, self.measured, self.limit)


class _BriefSlo:
    """The objectives of an SLO that are shown, and the notes below them."""

    def __init__(self, summary: Summary, max_objectives: int) -> None:
        """Choose the objectives to show, each of which is a line of the report.

        There is room for `max_objectives` lines. If there are more objectives, the last line says
        how many are hidden. The other lines show missed objectives first, then undecided ones, then
        met ones.
        """
        self._summary = summary
        rows = list(_objective_rows(summary))

        shown_count = max_objectives
        if len(rows) > max_objectives:
            rows.sort(key=_outcome_order)
            lines_for_objectives = max_objectives - 1
            shown_count = max(lines_for_objectives, MIN_OBJECTIVES)

        self._rows = rows[:shown_count]
        self._hidden_rows = rows[shown_count:]

    def table(self) -> Table:
        """Return the objectives with outcomes, measured values and limits."""
        head = ("", slo_heading(self._summary), "measured", "limit")
        return Table(head, [row.cells for row in self._rows], label_columns=2)

    def notes(self) -> Iterator[Paragraph]:
        """Yield the paragraphs below the objectives.

        They state that too many requests failed or that no SLO (service-level objective) is set,
        how many objectives only the full report shows, and why some are undecided.
        """
        summary = self._summary
        has_no_slo = not self._rows
        if fails_by_errors(summary):
            yield Paragraph(_describe_error_rate(summary), "bad")
        elif has_no_slo:
            succeeded = _fraction(summary.requests.ok, summary.requests.decided)
            hint = "Add --slo ttft:2s for a pass/fail result."
            yield Paragraph(f"No SLO set. {succeeded} requests succeeded. {hint}")

        if self._hidden_rows:
            yield self._hidden_note()

        for reason in _undecided_reasons(summary):
            yield Paragraph(f"Undecided: {reason}", "warn")

    def _hidden_note(self) -> Paragraph:
        """Return how many objectives are hidden and how many of them are missed, if any are."""
        hidden = format.counted(len(self._hidden_rows), "more objective")
        full_report_option = "--full"
        missed_count = _count_missed(self._hidden_rows)
        if not missed_count:
            return Paragraph(f"{hidden}: {full_report_option}", "soft")

        missed = f"{format.count(missed_count)} of them missed"
        return Paragraph(f"{hidden}, {missed}: {full_report_option}", "bad")


def _count_missed(rows: Sequence[_ObjectiveRow]) -> int:
    """Return how many of the objectives are missed."""
    return sum(row.is_met is False for row in rows)


def _outcome_order(row: _ObjectiveRow) -> int:
    """Return the sort key that puts missed objectives first, then undecided ones, then met ones."""
    return (False, None, True).index(row.is_met)


def slo_heading(summary: Summary) -> str:
    """Return the outcome of the SLO as a heading: `SLO MET`."""
    is_met = summary.goodput.met
    if not is_judged(summary, is_met):
        return "SLO NOT JUDGED"
    if is_met is None:
        return "SLO UNDECIDED"
    return "SLO MET" if is_met else "SLO MISSED"


def _objective_rows(summary: Summary) -> Iterator[_ObjectiveRow]:
    """Yield the objectives of the run and of its request classes.

    For each of them, the limits of percentiles come first. Then comes the required percentage of
    requests that meet all of these limits, then that of tasks, the fluidity index, and last the
    share of right answers.
    """
    for prefix, scope in list_slo_scopes(summary):
        goodput = scope.goodput
        for term in goodput.slo:
            yield _term_row(prefix, term)

        if goodput.share_limit is not None:
            yield _ObjectiveRow(
                is_met=is_attainment_met(goodput),
                name=f"{prefix}SLO attainment",
                measured=format.percent(goodput.share),
                limit=format_limit(goodput.share_limit),
            )

        tasks = find_task_goodput(scope)
        if tasks is not None:
            yield _ObjectiveRow(
                is_met=tasks.met,
                name=f"{prefix}tasks {describe_task_limits(tasks)}",
                measured=format.percent(tasks.share),
                limit=format_limit(tasks.share_limit),
            )

        fluidity = find_fluidity_objective(scope)
        if fluidity is not None:
            yield _ObjectiveRow(
                is_met=fluidity.met,
                name=f"{prefix}Fluidity p{fluidity.quantile * 100:g}",
                measured=format_measured_index(fluidity),
                limit=f"{fluidity.limit * 100:g} %",
            )

        answers = find_answers_objective(scope)
        if answers is not None:
            yield _ObjectiveRow(
                is_met=answers.met,
                name="Right answers",
                measured=format_measured_answers(answers),
                limit=format_answers_limit(answers),
            )


def _term_row(prefix: str, term: TermResult) -> _ObjectiveRow:
    """Return the row of a limit of a percentile, such as TTFT p95."""
    name = f"{prefix}{slo.name(term.metric, term.quantile)}"
    return _ObjectiveRow(term.met, name, _measured_time(term), _format_limit_ms(term.limit_ms))


def _measured_time(term: TermResult) -> str:
    """Return the measured value of an objective in s if it is long, else in ms."""
    text = format_term_value(term)
    is_reported = term.value_ms is not None and term.low_ms is None and not term.undecided
    if not is_reported or term.value_ms is None or term.value_ms < LONG_MS:
        return text
    mark = "" if term.supported else cells.UNSUPPORTED
    return f"{mark}{format.quantity(term.value_ms / MS_PER_S)} s"


def _format_limit_ms(limit_ms: float) -> str:
    """Return a limit as it was written, in s from one second on."""
    if limit_ms >= MS_PER_S:
        return f"{limit_ms / MS_PER_S:,.10g} s"
    return f"{limit_ms:,.10g} ms"


def _describe_error_rate(summary: Summary) -> str:
    """Return that a run without an SLO fails because of its errors, with their fraction."""
    requests = summary.requests
    share = format.percent(requests.failed_by_server / requests.decided)
    limit = format.percent(summary.verdict.limits.failure_share)
    failed = _fraction(requests.failed_by_server, requests.decided)
    return f"TOO MANY ERRORS  {failed} requests failed ({share}, limit {limit})"


def _undecided_reasons(summary: Summary) -> list[str]:
    """Return the different reasons why objectives of a valid run are undecided."""
    if not summary.verdict.valid:
        return []
    terms = [term for _, scope in list_slo_scopes(summary) for term in scope.goodput.slo]
    reasons = [term.undecided for term in terms if term.undecided]
    reasons += [
        objective.undecided
        for _, objective in list_fluidity_objectives(summary)
        if objective.undecided
    ]
    answers = find_answers_objective(summary)
    if answers is not None and answers.undecided:
        reasons.append(answers.undecided)
    return list(dict.fromkeys(reasons))


def _fraction(part: int, total: int) -> str:
    """Return counts as text: `231 of 240`."""
    return f"{format.count(part)} of {format.count(total)}"


# -- latencies -------------------------------------------------------------------------------------


class _LatencyRow(NamedTuple):
    """A metric of the latency table: its name in the summary, its label and its distribution."""

    metric: str
    label: str
    distribution: Distribution


def _latency_rows(summary: Summary) -> list[_LatencyRow]:
    """Return the latencies that have samples: TTFT, TPOT, ITL or ICL, and E2E latency.

    TTFT is left out if responses were not streamed, because it equals the E2E latency then.
    """
    rows = []
    if summary.run.stream:
        rows.append(_LatencyRow("ttft", "TTFT", summary.ttft_ms))
        rows.append(_LatencyRow("tpot", "TPOT", summary.tpot_ms))
        if summary.itl_ms is not None:
            rows.append(_LatencyRow("itl", "ITL", summary.itl_ms))
        else:
            rows.append(_LatencyRow("inter_chunk", "Inter-chunk", summary.inter_chunk_ms))

    rows.append(_LatencyRow("e2e", "E2E latency", summary.e2e_ms))
    return [row for row in rows if row.distribution.count]


def _latency_table(summary: Summary) -> Table:
    """Return the table of latencies in ms. Its heading says if the run is INVALID.

    A statistic, such as p99, may be so uncertain that its value is withheld from the results. Its
    cell has the range that contains the value instead.
    """
    statistics = ("mean", *QUANTILES, "max")
    rows = []
    for latency in _latency_rows(summary):
        withheld = summary.withheld_statistics.get(latency.metric)
        range_by_statistic = None if withheld is None else withheld.ranges
        values = [
            cells.statistic_ms(latency.distribution, statistic, range_by_statistic)
            for statistic in statistics
        ]
        rows.append((latency.label, *values))

    title = LATENCY_TITLE if summary.verdict.valid else UNRELIABLE_LATENCY_TITLE
    column_headings = (title, "mean", *map(cells.quantile_label, QUANTILES), "max")
    return Table(column_headings, rows)


def _latency_notes(summary: Summary) -> list[Paragraph]:
    """Return the notes below the latencies: what ~ and a range mean. Their texts may be empty."""
    return [_confidence_note(summary), _range_note(summary)]


def _range_note(summary: Summary) -> Paragraph:
    """Return what a range in the table of latencies means. Empty if the table has none."""
    shown_statistics = {"mean", *QUANTILES, "max"}
    has_range = False
    for latency in _latency_rows(summary):
        withheld = summary.withheld_statistics.get(latency.metric)
        if withheld is not None and not shown_statistics.isdisjoint(withheld.ranges):
            has_range = True
    return Paragraph(cells.RANGE_LEGEND if has_range else "", "soft")


def _confidence_note(summary: Summary) -> Paragraph:
    """Return how many samples the percentiles marked with ~ need. Empty if none is marked."""
    distributions = [row.distribution for row in _latency_rows(summary)]
    return Paragraph(cells.describe_unsupported(distributions, QUANTILES), "soft")


# -- throughput, requests, load --------------------------------------------------------------------


def _result_lines(summary: Summary, *, counts_warnings: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the lines below the latencies, as label and text.

    Args:
        summary: The run.
        counts_warnings: Whether a warning is counted even if it is the only one. A warning about
            the throughput is always shown.
    """
    yield "Throughput", _describe_throughput(summary)
    if summary.interactivity.tpot50 is not None:
        yield PER_USER, describe_interactivity(summary.interactivity)

    if summary.sessions is not None:
        yield "Tasks", describe_completed_tasks(summary.sessions)

    if summary.goodput.share is not None:
        yield "Goodput", _describe_goodput(summary)

    yield "Requests", _describe_requests(summary)
    if summary.requests.errors_of_unstopped_requests:
        yield "Errors", _describe_errors(summary)

    if summary.answers is not None:
        yield "Answers", describe_answers(summary.answers)

    yield "Load", _describe_delivered_load(summary)
    yield BREAKDOWN, _describe_breakdown(summary)
    if summary.accepted_length is not None:
        yield "Speculation", describe_verdict(summary.accepted_length)
    yield "Measurement", _describe_validity(summary, counts_warnings=counts_warnings)

    for caveat, code in zip(summary.verdict.caveats, summary.verdict.caveat_codes, strict=True):
        yield "Caveat", _short_caveat(caveat, code)

    cause = find_cause(summary)
    if cause:
        yield "Cause", cause


def _describe_throughput(summary: Summary) -> str:
    """Return the rates of requests and output tokens, or of prompt tokens if there is no output.

    A rate of requests that rests on very few of them, because most ended later, is explained:
    `- req/s (none of 20 ended in the 975 ms of load), 441 output tok/s`.
    """
    rates = select_headline_rates(summary)
    request_rate = f"{format.quantity(rates.requests)} req/s"
    late_ends = describe_late_ends(summary)
    if late_ends:
        request_rate += f" ({late_ends})"

    if not rates.output:
        return f"{request_rate}, {format.rate(rates.input, ' prompt tok/s')}"

    text = f"{request_rate}, {format.rate(rates.output, ' output tok/s')}"
    if rates.output_per_gpu is None:
        return text

    return f"{text} ({format.quantity(rates.output_per_gpu)} per GPU)"


def _describe_goodput(summary: Summary) -> str:
    """Return how many requests met the SLO, unless the run is INVALID and does not judge it."""
    if not is_judged(summary, summary.goodput.met):
        return NOT_JUDGED
    rate = f"{format.quantity(select_headline_rates(summary).goodput)} req/s"
    return f"{rate}; {format.percent(summary.goodput.share)} of requests met the SLO"


def _describe_requests(summary: Summary) -> str:
    """Return how many requests had which outcome.

    Successes and failures are always stated, and other outcomes if they occurred. The counts do not
    include requests before the measured load.
    """
    requests = summary.requests
    phrases = [f"{format.count(requests.ok)} succeeded", f"{format.count(requests.failed)} failed"]
    for status in ("dropped", "cancelled", "unfinished", "lost", "resent"):
        count = getattr(requests, status)
        if count:
            phrases.append(f"{format.count(count)} {status}")

    text = ", ".join(phrases)
    excluded = describe_excluded_requests(summary)
    return f"{text} ({excluded})" if excluded else text


def _describe_errors(summary: Summary) -> str:
    """Return the most frequent kinds of errors with their counts: `12 http_5xx, 3 timeout`."""
    errors = list(summary.requests.errors_of_unstopped_requests.items())
    phrases = [f"{format.count(error.count)} {kind}" for kind, error in errors[:MAX_ERROR_KINDS]]
    if len(errors) > MAX_ERROR_KINDS:
        phrases.append(f"{len(errors) - MAX_ERROR_KINDS} other kinds")
    return ", ".join(phrases)


def _describe_delivered_load(summary: Summary) -> str:
    """Return the load that arrived, its concurrency, and whether the server was stable under it.

    For example: `12 req/s arrived, 30 concurrent on average, stable`. Properties of the load that
    differ from the workload are named.
    """
    load = summary.load
    phrases = []

    # The offered rate is that at which requests were due, so that they arrived at the client. With
    # sessions, the schedule starts sessions and not requests, so it is left out.
    if load.offered_rps is not None and summary.sessions is None:
        phrases.append(f"{format.rate(load.offered_rps, ' req/s')} arrived")

    phrases.append(f"{format.quantity(load.in_flight_mean)} concurrent on average")
    is_sustained = summary.sustainable.sustained
    if is_sustained is not None:
        phrases.append("stable" if is_sustained else "not stable")

    # Each check compares a property of the load, such as its rate, with the workload.
    load_checks = summary.stimulus
    failed_checks = [check for check in load_checks if check.ok is False]
    if failed_checks:
        properties = ", ".join(check_label(check.code) for check in failed_checks)
        phrases.append(f"differs from the workload in {properties}")

    return ", ".join(phrases)


def _describe_breakdown(summary: Summary) -> str:
    """Return where the time of a typical request was spent, or "" if that is not known.

    The times are means over the requests near the median of TTFT and of E2E latency. For example:
    `TTFT p50: queue 12 ms, prefill 80 ms; E2E p50: decode 900 ms`.
    """
    if not summary.run.stream or not summary.verdict.valid:
        return ""

    for group in summary.splits.groups:
        # One group has all requests. Each other one has only those of a target, for example.
        has_all_requests = group.by == "all"
        if has_all_requests:
            return _describe_median_breakdown(group)

    return ""


def _describe_median_breakdown(group: SplitGroup) -> str:
    """Return where the time of requests near the median was spent, or "" if there are none.

    TTFT consists of the time in the queue of the server and of prefill, which are known only if the
    server reports them. Decode is the time after the first token.
    """
    median_ttft = next((split for split in group.ttft if split.at == "p50"), None)
    median_e2e = next((split for split in group.e2e if split.at == "p50"), None)
    if median_ttft is None or median_e2e is None:
        return ""

    decode_ms = median_e2e.e2e_ms - median_e2e.ttft_ms
    decode = f"E2E p50: decode {format.milliseconds(decode_ms)} ms"
    if median_ttft.prefill_ms is None:
        return f"{decode}; the server reports no queue and prefill time"

    ttft_parts = []
    if median_ttft.queue_ms is not None:
        ttft_parts.append(f"queue {format.milliseconds(median_ttft.queue_ms)} ms")

    ttft_parts.append(f"prefill {format.milliseconds(median_ttft.prefill_ms)} ms")
    return f"TTFT p50: {', '.join(ttft_parts)}; {decode}"


def _short_caveat(caveat: str, code: ReasonCode) -> str:
    """Return a caveat, or a shorter sentence if it is longer than MAX_CAVEAT_LENGTH.

    Only a caveat about omitted statistics is shortened, because it may list dozens of metrics. The
    shorter sentence names only the first ones.
    """
    # `code.values` has the data of the caveat: here, the omitted statistics of each metric.
    omitted_statistics = code.values.get("statistics")
    if len(caveat) <= MAX_CAVEAT_LENGTH or not omitted_statistics:
        return caveat

    labels = [metric_label(metric) for metric in omitted_statistics]
    listed_labels = labels[:MAX_CAVEAT_METRICS]
    unlisted_count = len(labels) - len(listed_labels)

    metrics = ", ".join(listed_labels)
    if unlisted_count:
        metrics += f" and {format.counted(unlisted_count, 'more metric')}"

    return (
        f"{metrics}: statistics that the client could not measure exactly are ranges or omitted "
        "(--full)"
    )


def _describe_validity(summary: Summary, *, counts_warnings: bool) -> str:
    """Return whether the measurement can be trusted, with the most important warning.

    Other warnings are counted: `valid: no client bottleneck, 2 warnings (--full)`.

    Args:
        summary: The run.
        counts_warnings: Whether a warning is counted even if it is the only one. A warning about
            the throughput is always shown.
    """
    phrases = [_describe_verdict(summary)]
    has_latencies = bool(_latency_rows(summary))
    if summary.verdict.valid and has_latencies and not _has_unsupported_percentile(summary):
        highest_percentile = cells.quantile_label(QUANTILES[-1])
        phrases.append(f"enough samples for {highest_percentile}")

    validity = ", ".join(phrases)
    warnings = _list_warnings(summary)
    shown_warning = _describe_warning(summary, counts_warnings=counts_warnings)
    if not shown_warning:
        return f"{validity}{_count_warnings(len(warnings), 'warning')}"

    hidden_count = len(warnings) - 1
    return f"{validity}{_count_warnings(hidden_count, 'more warning')}. {shown_warning}"


def _count_warnings(count: int, noun: str) -> str:
    """Return how many warnings only the full report has, "" for none: `, 2 warnings (--full)`."""
    return f", {format.counted(count, noun)} (--full)" if count else ""


class _Warning(NamedTuple):
    """A warning of a run: its code and its sentences."""

    code: str
    text: str


def _list_warnings(summary: Summary) -> list[_Warning]:
    """Return the warnings of a run without those that the title of the output states."""
    verdict = summary.verdict
    return [
        _Warning(code.code, text)
        for code, text in zip(verdict.warning_codes, verdict.warnings, strict=True)
        if code.code not in _WARNINGS_STATED_IN_TITLE
    ]


def _describe_warning(summary: Summary, *, counts_warnings: bool) -> str:
    """Return the warning that the short output shows, or "" if it only counts the warnings.

    It shows the warning about the throughput, or else the only warning unless `counts_warnings`.
    The warnings of an INVALID run are only counted, because its results are discarded anyway.
    """
    if not summary.verdict.valid:
        return ""

    warnings = _list_warnings(summary)
    if any(warning.code == _NO_STEADY_STATE for warning in warnings):
        return _describe_missing_steady_state(summary)
    if counts_warnings or len(warnings) != 1:
        return ""
    return _shorten_warning(warnings[0].text)


def _describe_missing_steady_state(summary: Summary) -> str:
    """Return that the throughput includes ramp-up and drain, why, and what to do.

    The reason is stated if it is that a request takes longer than the load lasted.
    """
    duration_s = load_duration_s(summary)
    e2e_p50_ms = summary.e2e_ms.p50
    reason = ""
    if duration_s is not None and e2e_p50_ms is not None and e2e_p50_ms > duration_s * MS_PER_S:
        latency = format_duration(e2e_p50_ms / MS_PER_S)
        reason = f": {format_duration(duration_s)} of load, {latency} per request"

    return f"Throughput includes ramp-up and drain{reason}. Use a longer --duration"


def _shorten_warning(text: str) -> str:
    """Return a warning, its first sentence if it is long, or "" if that is long as well."""
    if len(text) <= MAX_WARNING_LENGTH:
        return text
    first_sentence, _ = split_first_sentence(text)
    return first_sentence if len(first_sentence) <= MAX_WARNING_LENGTH else ""


def _has_unsupported_percentile(summary: Summary) -> bool:
    """Return whether a percentile of a latency has too few samples, so that a note explains it."""
    return bool(_confidence_note(summary).text)


def _describe_verdict(summary: Summary) -> str:
    """Return whether the run is a valid measurement, in a few words."""
    if not summary.verdict.valid:
        return "INVALID"
    # A run in virtual time has no client that could be a bottleneck.
    is_virtual = summary.run.client == "virtual"
    return "valid" if is_virtual else "valid: no client bottleneck"


# -- the cause of a bad result ---------------------------------------------------------------------


def find_cause(summary: Summary) -> str:
    """Return why the result is bad and what to do, or "" if it is good or no cause was found.

    A server that cannot keep up explains everything else, so it is named first.
    """
    if summary.sustainable.code == "falls_behind":
        return _describe_overload(summary)
    if summary.sustainable.sustained is False:
        return f"Not sustainable: {summary.sustainable.reason}. Try loadgen search."
    if summary.goodput.met is False:
        return summary.causes.text
    return ""


def _describe_overload(summary: Summary) -> str:
    """Return that the server completed fewer requests than arrived, and what to do."""
    load = summary.load
    completed_rps = select_headline_rates(summary).requests
    completed = "none" if completed_rps is None else format.quantity(completed_rps)
    return (
        f"Overloaded: {format.rate(load.offered_rps, ' req/s')} arrived, {completed} completed, "
        f"up to {format.count(load.in_flight_max)} in flight. Try loadgen search."
    )


# -- where to read on ------------------------------------------------------------------------------


def _path_lines(summary: Summary, run_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Yield how to see every section, and how to repeat the run."""
    if run_dir is not None:
        yield "Details", f"loadgen report {shlex.quote(str(run_dir))} --full"
    if summary.run.seed is not None:
        options = seeds.reproduction_options(summary.run.seed, summary.run.salt)
        yield "Reproduce", f"repeat the command with {options}"
