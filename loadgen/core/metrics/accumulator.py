"""Adds up the records of one stage, target, class or step.

Pure numpy. `run_accumulator` splits the records of a run and merges what was added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics import outcomes, request_metrics
from loadgen.core.metrics.columns import UNDEFINED, UNFINISHED, as_selection, drop_undefined
from loadgen.core.metrics.metric_sample import RequestMetricSample
from loadgen.core.metrics.token_sums import add_token_sums
from loadgen.core.metrics.totals import Totals
from loadgen.core.results.record import FINISH, FINISH_REASONS, KINDS, STATUSES
from loadgen.core.stats.amounts import Amounts, TimedAmounts
from loadgen.core.stats.quantiles import Values
from loadgen.figures import METRICS, per_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.sample_bounds import Range, StatisticRanges
    from loadgen.core.slo import Slo, Term
    from loadgen.core.stats.quantiles import Distribution

RequestAmount: TypeAlias = Literal["ok", "good", "input", "output"]
"""Amounts of requests that come over time: ok requests, requests that met the SLO, and tokens."""

FINISH_PREFIX = "finish_"
"""Before a finish reason in the name of the sum of its ok requests."""

REMARK_PREFIX = "remark_"
"""Before a remark about responses in the name of the sum of its ok requests."""

DEAD_WORKER_PREFIX = "dead_"
"""Before the number of a worker that died in the name of a sum."""


KINDS_WITHOUT_FAILURE = ("", "unfinished")
"""Kinds of requests that did not fail. Unfinished ones were cut by the end of the run."""


TermCount: TypeAlias = Literal["values", "over", "unfinished_over"]
"""What is counted for an SLO term: requests with a value, those over the limit, and unfinished ones
that are over it already."""


def term_sum_name(term_number: int, count: TermCount) -> str:
    """Return the name of the sum of a count for a term of the SLO."""
    return f"term{term_number}_{count}"


def sampled_metrics() -> list[str]:
    """Return the names of the metrics that have a value per request."""
    return [definition.name for definition in METRICS.available() if definition.values]


class FailureCount(NamedTuple):
    """How many requests failed in one way, with the text of one of the failures as an example.

    Attributes:
        requests: The number of failed requests.
        due_ns: The due time of the example.
        text: The error text of the example, or its HTTP status, or "" if nothing is known.
        has_error_text: Whether `text` is an error text.
    """

    requests: int
    due_ns: int
    text: str
    has_error_text: bool

    def is_better_example_than(self, other: FailureCount) -> bool:
        """Return True if this failure is the better example: an error text first, then the time."""
        if self.has_error_text != other.has_error_text:
            return self.has_error_text
        return self.due_ns < other.due_ns

    def combine(self, other: FailureCount) -> FailureCount:
        """Return both counts as one, with the better of the two examples."""
        example = self if self.is_better_example_than(other) else other
        return example._replace(requests=self.requests + other.requests)


class LastSent(NamedTuple):
    """The times of the request that was sent last, the "last issued query" of MLPerf LoadGen.

    Attributes:
        sent_ns: When it was sent.
        end_ns: When its last event came, UNKNOWN (-1) if none did.
        done_ns: When its response body ended, which is later, or when the request failed.
    """

    sent_ns: int
    end_ns: int
    done_ns: int


@dataclass
class TaskTimes:
    """The times of tasks, which are series of requests, such as conversations.

    Attributes:
        durations_ns: The duration of each ok task.
        waits_ns: The time that each ok task waited for first tokens, all its requests together.
        longest_waits_ns: The longest time that each ok task waited for one first token.
        ok_ends: An amount of 1 at the end of each ok task.
        good_ends: An amount of 1 at the end of each task that meets the SLO on whole tasks.
    """

    durations_ns: Values = field(default_factory=Values)
    waits_ns: Values = field(default_factory=Values)
    longest_waits_ns: Values = field(default_factory=Values)
    ok_ends: Amounts = field(default_factory=Amounts)
    good_ends: Amounts = field(default_factory=Amounts)

    def merge(self, other: TaskTimes) -> None:
        """Add the times of other tasks."""
        self.durations_ns.merge(other.durations_ns)
        self.waits_ns.merge(other.waits_ns)
        self.longest_waits_ns.merge(other.longest_waits_ns)
        self.ok_ends.merge(other.ok_ends)
        self.good_ends.merge(other.good_ends)


class MetricAccumulator(Totals):
    """Adds up the records of one stage, target, class or step.

    Sums and extremes are updated when records are added. Statistics of metrics are computed from
    the records on demand, so read them only after all records have been added.

    Attributes:
        slo: The SLO that these requests are judged by, or None.
        columns: The records of each stage.
        last_sent: The request that was sent last, None if none was sent.
        failures: The number of failures of each kind, with one of them as an example.
        task_times: The times of the conversations and agentic tasks.
        user_ends_ns: When each virtual user ended. Only a closed loop has virtual users.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        """Create an accumulator without records.

        Args:
            slo: The latency limits that decide which requests are good, or None.
        """
        super().__init__()
        self.slo = slo
        self.columns: list[Columns] = []
        self.last_sent: LastSent | None = None
        self.failures: dict[str, FailureCount] = {}  # by the kind of failure
        self.task_times = TaskTimes()
        self.user_ends_ns = Values()
        self._samples: dict[str, RequestMetricSample] = {}  # by metric

    # -- metrics -----------------------------------------------------------------------------------

    def _sample(self, metric: str) -> RequestMetricSample:
        """Return the sample of a metric that has one value per request, such as "ttft"."""
        if metric not in self._samples:
            self._samples[metric] = RequestMetricSample(self.columns, metric)
        return self._samples[metric]

    def values(self, metric: str) -> Values:
        """Return the values of a metric that has one value per request."""
        return self._sample(metric).values()

    def distribution(self, metric: str) -> Distribution:
        """Return the distribution of a metric that has one value per request."""
        return self._sample(metric).distribution

    def nth_value(self, metric: str, index_in_order: int) -> float:
        """Return the value of a metric at an index of its ordered sample."""
        return self._sample(metric).nth_value(index_in_order)

    def statistic_ranges(self, metric: str) -> StatisticRanges | None:
        """Return the range in which each statistic of a metric lies, None if all are certain."""
        return self._sample(metric).statistic_ranges

    def nth_range(self, metric: str, index_in_order: int) -> Range | None:
        """Return the range of the value at an index of the ordered sample, None if it is certain.

        A value has a range because timestamps have errors.
        """
        return self._sample(metric).nth_range(index_in_order)

    def amounts(self, name: RequestAmount) -> Amounts:
        """Return what the requests contribute over time, such as their output tokens."""
        amounts = Amounts()
        for columns in self.columns:
            amounts.add(*_timed_amounts(columns, name, self.slo))
        return amounts

    # -- adding ------------------------------------------------------------------------------------

    def add_failures(self, kind: str, failures: FailureCount) -> None:
        """Count more failures of a kind, and choose the better of both examples."""
        previous = self.failures.get(kind)
        self.failures[kind] = failures if previous is None else previous.combine(failures)

    def merge(self, other: MetricAccumulator) -> None:
        """Add all requests of another accumulator, which is not changed."""
        self.merge_totals(other)
        self._update_last_sent(other.last_sent)
        for kind, failures in other.failures.items():
            self.add_failures(kind, failures)

        self.task_times.merge(other.task_times)
        self.user_ends_ns.merge(other.user_ends_ns)
        self.columns += other.columns

    def _update_last_sent(self, request: LastSent | None) -> None:
        """Replace the last sent request by another one if that was sent later."""
        if request is None:
            return
        if self.last_sent is None or request.sent_ns > self.last_sent.sent_ns:
            self.last_sent = request

    def add(self, columns: Columns, texts: Sequence[str], *, is_open_loop: bool) -> None:
        """Add records of one stage, block by block to save memory.

        Args:
            columns: The records.
            texts: Error texts, finish reasons and remarks, which `columns["text"]` indexes.
            is_open_loop: Whether requests are sent at planned times, and not after responses.
        """
        self.columns.append(columns)
        for block in columns.blocks():
            if len(block):
                self._add_block(block, texts, is_open_loop)

    def _add_block(self, block: Columns, texts: Sequence[str], is_open_loop: bool) -> None:
        """Add some adjacent records to the sums, the extremes and the failures.

        Args:
            block: The records.
            texts: Error texts, finish reasons and remarks, which `block["text"]` indexes.
            is_open_loop: Whether requests are sent at planned times, and not after responses.
        """
        self._count_by_status(block)
        self._add_bytes(block)

        self._add_due_times(block, is_open_loop)
        self._add_sent_times(block)
        self._add_end_times(block)

        self._count_first_tokens(block)
        add_token_sums(self, block)

        self._add_failures_by_kind(block, texts)
        self._count_finish_reasons(block, texts)
        self._count_remarks(block, texts)

        self._count_without_tpot(block)
        self._count_stalled(block)
        if self.slo is not None:
            self._count_slo_outcomes(block, self.slo)

    def _count_by_status(self, columns: Columns) -> None:
        """Count all records, the records of each status, and the starts.

        A start is a single request, or the first request of a conversation or task.
        """
        is_start = columns["turn"] == 0
        self.add_to_sum("recorded", len(columns))
        self.add_to_sum("starts", is_start.sum())

        for code, status in enumerate(STATUSES):
            has_status = columns.has_status(code)
            self.add_to_sum(status, has_status.sum())

    def _add_bytes(self, columns: Columns) -> None:
        """Add the bytes on the wire, and how many requests were sent again."""
        for name in ("resent", "bytes_sent", "bytes_received"):
            self.add_to_sum(name, columns[name].sum(dtype=np.int64))

    def _add_due_times(self, columns: Columns, is_open_loop: bool) -> None:
        """Note when the first and the last request was due, and count the requests that were due.

        - "due": all requests.
        - "due_in_open_loop": the requests of an open loop, for the offered rate.
        - "start": the starts, of which only the last one is noted. A start is a single request, or
          the first request of a conversation or task.

        Args:
            columns: The records.
            is_open_loop: Whether requests were sent at planned times, not after responses.
        """
        was_due = columns.reached_due_time
        due_ns = columns["due_ns"][was_due]
        self.add_range("due", due_ns)
        if is_open_loop:
            self.add_range("due_in_open_loop", due_ns)

        # The turn is 0, or UNKNOWN (-1) in a record that has none.
        is_start = columns["turn"] <= 0
        start_due_ns = columns["due_ns"][was_due & is_start]
        self.add_maximum("start", start_due_ns)

    def _add_sent_times(self, columns: Columns) -> None:
        """Note when the first and the last request was sent, and count the sent requests.

        Of the request that was sent last, its end is noted as well.
        """
        sent_rows = np.flatnonzero(columns.is_known("sent_ns"))
        sent_ns = columns["sent_ns"][sent_rows]
        self.add_range("sent", sent_ns)
        if len(sent_rows) == 0:
            return

        last_row = sent_rows[np.argmax(sent_ns)]
        last_request = LastSent(
            sent_ns=int(columns["sent_ns"][last_row]),
            end_ns=int(columns["end_ns"][last_row]),
            done_ns=int(columns["done_ns"][last_row]),
        )
        self._update_last_sent(last_request)

    def _add_end_times(self, columns: Columns) -> None:
        """Note the latest end of a request and the latest time of a token."""
        for name in ("done_ns", "last_token_ns"):
            self.add_maximum(name, columns[name])

    def _count_first_tokens(self, columns: Columns) -> None:
        """Count the requests with a first token, and those whose timestamp the kernel took."""
        has_first_token = columns.is_known("first_token_ns")
        self.add_to_sum("with_first_token", has_first_token.sum())
        self.add_to_sum("kernel_timestamps", columns["kernel_stamp"][has_first_token].sum())

    def _count_without_tpot(self, columns: Columns) -> None:
        """Count the ok requests without a time per output token (TPOT), by reason.

        Requests that expect no output, such as those for embeddings, are not counted.

        - "tpot_undefined": for any reason.
        - "tpot_no_span": because all tokens came at one instant.
        - "tpot_no_output": because no token came in an event, so that none could be timed.
        """
        is_examined = columns.is_ok & columns.expects_output
        is_undefined = columns.measure("tpot") == UNDEFINED
        came_at_one_instant = request_metrics.has_no_span(columns)
        came_without_event = request_metrics.lacks_output(columns)

        self.add_to_sum("tpot_undefined", (is_examined & is_undefined).sum())
        self.add_to_sum("tpot_no_span", (is_examined & came_at_one_instant).sum())
        self.add_to_sum("tpot_no_output", (is_examined & came_without_event).sum())

    def _count_stalled(self, columns: Columns) -> None:
        """Count the ok responses with a gap between output events of more than STALL_NS."""
        longest_gaps_ns = columns.measure("max_gap")[columns.is_ok]
        is_stalled = longest_gaps_ns > STALL_NS
        self.add_to_sum("stalled", is_stalled.sum())

    # -- the SLO -----------------------------------------------------------------------------------

    def _count_slo_outcomes(self, columns: Columns, slo: Slo) -> None:
        """Count the requests by how they meet an SLO, as a whole and for each of its terms.

        A term is a limit, such as "TTFT at most 1 s".

        - "good": the requests that meet all terms.
        - "unfinished_misses": the unfinished requests, which the end of the run cut off, that were
          already over the limit of a term.
        """
        is_good = outcomes.meets_slo(columns, slo)
        is_unfinished = columns.has_status(UNFINISHED)
        is_unfinished_miss = is_unfinished & outcomes.is_counted(columns, slo)

        self.add_to_sum("good", is_good.sum())
        self.add_to_sum("unfinished_misses", is_unfinished_miss.sum())

        for term_number, term in enumerate(slo.terms):
            # A term that limits the gaps between output events is not about single requests.
            is_about_requests = per_request(term.metric)
            if is_about_requests:
                self._count_term_outcomes(columns, term_number, term)

    def _count_term_outcomes(self, columns: Columns, term_number: int, term: Term) -> None:
        """Count the requests that are within and over the limit of one term of an SLO.

        The sums have the number of the term in their names, such as "term0_values":

        - "values": the ok requests with a value of the term's metric.
        - "over": those of them whose value is over the limit.
        - "unfinished_over": the unfinished requests that were over the limit when they were cut.

        Args:
            columns: The records.
            term_number: The index of the term in the SLO.
            term: The term.
        """
        values_of_ok = columns.measure(term.metric)[columns.is_ok]
        defined_values = drop_undefined(values_of_ok)
        is_over_limit = defined_values > term.limit_ns
        is_over_limit_when_cut = outcomes.is_over_when_cut(columns, term)

        self.add_to_sum(term_sum_name(term_number, "values"), len(defined_values))
        self.add_to_sum(term_sum_name(term_number, "over"), is_over_limit.sum())
        self.add_to_sum(term_sum_name(term_number, "unfinished_over"), is_over_limit_when_cut.sum())

    # -- texts of responses and failures -----------------------------------------------------------

    def _count_finish_reasons(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the ok requests by the finish reason of the response, such as "stop" or "length".

        The sums have names such as "finish_stop". A record has the code of a common reason. Of a
        rare reason it has the text, and the code "other".

        Args:
            columns: The records. The column "finish_reason" has indices of FINISH_REASONS, and the
                column "text" has indices of `texts`.
            texts: The texts of all records.
        """
        is_other_reason = columns["finish_reason"] == FINISH["other"]
        has_common_reason = columns.is_ok & ~is_other_reason
        has_rare_reason = columns.is_ok & is_other_reason

        reason_codes, request_counts = np.unique(
            columns["finish_reason"][has_common_reason], return_counts=True
        )
        for code, requests in zip(reason_codes.tolist(), request_counts.tolist(), strict=True):
            common_reason = FINISH_REASONS[code] or "none"
            self.add_to_sum(FINISH_PREFIX + common_reason, requests)

        text_indexes = columns["text"][has_rare_reason]
        for text, requests in _count_texts(text_indexes, texts):
            rare_reason = text or "other"
            self.add_to_sum(FINISH_PREFIX + rare_reason, requests)

    def _count_remarks(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the ok requests by remark, a text about something unusual in the response."""
        # The text of a request with the finish reason "other" is that reason.
        has_other_reason = columns["finish_reason"] == FINISH["other"]
        has_remark = columns.is_ok & ~has_other_reason & columns.is_known("text")
        text_indexes = columns["text"][has_remark]
        for remark, requests in _count_texts(text_indexes, texts):
            if remark:
                self.add_to_sum(REMARK_PREFIX + remark, requests)

    def _add_failures_by_kind(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the failed requests of each kind of failure, such as "reset" or "http_5xx".

        Args:
            columns: The records. Their column "kind" has the index of a kind in KINDS, and their
                column "text" has the index of an error text in `texts`.
            texts: The error texts.
        """
        requests_of_kinds = np.bincount(columns["kind"])
        occurring_kinds = np.flatnonzero(requests_of_kinds).tolist()
        for kind_index in occurring_kinds:
            kind = KINDS[kind_index]
            if kind in KINDS_WITHOUT_FAILURE:
                continue

            failed_rows = np.flatnonzero(columns["kind"] == kind_index)
            self.add_failures(kind, _summarize_failures(columns, failed_rows, texts))
            if kind == "worker_died":
                self._add_dead_workers(columns["worker"][failed_rows])

    def _add_dead_workers(self, worker_numbers: NDArray[np.int64]) -> None:
        """Record which workers died: each has a sum such as "dead_3", which is above 0.

        Args:
            worker_numbers: The worker of each request that failed because its worker died.
        """
        for worker in np.unique(worker_numbers).tolist():
            self.add_to_sum(f"{DEAD_WORKER_PREFIX}{worker}", 1)


def _summarize_failures(
    columns: Columns, rows: NDArray[np.int64], texts: Sequence[str]
) -> FailureCount:
    """Return the number of failures of one kind, with the text of one failure as an example.

    The example is the earliest failure with an error text. If no failure has a text, the example is
    the earliest failure, with its HTTP status as the text, such as "HTTP 503".

    Args:
        columns: The records.
        rows: The indices of the failed requests, at least one.
        texts: The error texts, which `columns["text"]` indexes. An index below 0 means no text.
    """
    text_indexes = columns["text"][rows]
    rows_with_text = rows[text_indexes >= 0]
    rows_to_choose_from = rows_with_text if len(rows_with_text) else rows

    due_ns = columns["due_ns"][rows_to_choose_from]
    example_row = rows_to_choose_from[np.argmin(due_ns)]

    error_text = _text_at(int(columns["text"][example_row]), texts)
    http_status = int(columns["http_status"][example_row])
    status_text = f"HTTP {http_status}" if http_status else ""

    return FailureCount(
        requests=len(rows),
        due_ns=int(columns["due_ns"][example_row]),
        text=error_text or status_text,
        has_error_text=bool(error_text),
    )


def _text_at(index: int, texts: Sequence[str]) -> str:
    """Return the text at an index, or "" if there is no such text, as in a damaged file."""
    return texts[index] if 0 <= index < len(texts) else ""


def _count_texts(
    text_indexes: NDArray[np.int64], texts: Sequence[str]
) -> Iterator[tuple[str, int]]:
    """Yield each text with the number of times that its index occurs."""
    indexes, counts = np.unique(text_indexes, return_counts=True)
    for index, count in zip(indexes.tolist(), counts.tolist(), strict=True):
        yield _text_at(index, texts), count


def _timed_amounts(columns: Columns, name: RequestAmount, slo: Slo | None) -> TimedAmounts:
    """Return what each request contributes to a rate, and when it does so.

    - "output": its output tokens, spread from the first to the last one.
    - "input": its prompt tokens, at the first output token.
    - "ok": 1 for each ok request, at its end.
    - "good": 1 for each request that meets the SLO, at its end. Without an SLO, all ok requests are
      good.
    """
    if name == "output":
        return request_metrics.time_output_tokens(columns)

    if name == "input":
        return _time_prompt_tokens(columns)

    if name == "good" and slo is not None:
        return _time_request_ends(columns, outcomes.meets_slo(columns, slo))

    return _time_request_ends(columns, columns.is_ok)


def _time_prompt_tokens(columns: Columns) -> TimedAmounts:
    """Return the prompt tokens of each ok request at the time of its first output token."""
    has_prompt_tokens = columns.is_ok & columns.is_known("input_tokens")
    selected = as_selection(has_prompt_tokens)
    first_token_ns = request_metrics.time_or_end(columns, "first_token_ns", selected)
    prompt_tokens = columns["input_tokens"][selected]
    return TimedAmounts(first_token_ns, first_token_ns, prompt_tokens)


def _time_request_ends(columns: Columns, is_counted: NDArray[np.bool_]) -> TimedAmounts:
    """Return an amount of 1 at the end of each counted request."""
    end_ns = columns["end_ns"][as_selection(is_counted)]
    # The same 1 for every request takes no memory.
    ones = np.broadcast_to(np.int64(1), len(end_ns))
    return TimedAmounts(end_ns, end_ns, ones)
