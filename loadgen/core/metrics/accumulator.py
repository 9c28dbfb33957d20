"""Adds up the records of one stage, target, class or step.

Pure numpy. `run_accumulator` splits the records of a run and merges what was added up.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics import outcomes, request_metrics, sample_bounds
from loadgen.core.metrics.columns import (
    FAILED,
    UNDEFINED,
    UNFINISHED,
    as_selection,
    drop_undefined,
)
from loadgen.core.results.record import FINISH, FINISH_REASONS, KINDS, SOURCES, STATUSES
from loadgen.core.stats.amounts import Amounts, TimedAmounts
from loadgen.core.stats.quantiles import QUANTILES, Values, quantile_index
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

EXACT_SOURCES = [SOURCES.index("server"), SOURCES.index("tokenizer")]
"""Sources of token counts that know how many tokens an event carries."""

NEVER_NS = 1 << 62
"""Later than any time of a run."""

NO_TIME = -1
"""The largest value of a time that no request has."""

TOKEN_FIELDS = (
    "output_tokens",
    "input_tokens",
    "cached_tokens",
    "cache_written_tokens",
    "reasoning_tokens",
    "asked_output",
)

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


class MetricAccumulator:
    """Adds up the records of one stage, target, class or step.

    Sums and extremes are updated when records are added. Distributions and amounts are computed
    from the records on demand, and distributions are then cached. So read them only after all
    records have been added.

    Attributes:
        slo: The SLO that these requests are judged by, or None.
        columns: The records of each stage.
        sums: Sums by name. Most are numbers of requests, such as "ok" or "with_first_token".
        minima: The smallest value of some fields, by name.
        maxima: The largest value of some fields, by name.
        last_sent: The request that was sent last, None if none was sent.
        failures: The number of failures of each kind, with one of them as an example.
        added_values: The durations and waits of tasks, which consist of several requests.
        added_amounts: The number of tasks that ended at each time.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        """Create an accumulator without records.

        Args:
            slo: The latency limits that decide which requests are good, or None.
        """
        self.slo = slo
        self.columns: list[Columns] = []

        # Numbers by name. For example, `sums["ok"]` is the number of ok requests, and the time of
        # the first send is `minima["sent"]`.
        self.sums: dict[str, int] = {}
        self.minima: dict[str, int] = {}
        self.maxima: dict[str, int] = {}

        # Single requests of interest.
        self.last_sent: LastSent | None = None
        self.failures: dict[str, FailureCount] = {}  # by the kind of failure

        # The durations of tasks, which consist of several requests, and the times of their ends.
        self.added_values: defaultdict[str, Values] = defaultdict(Values)
        self.added_amounts: defaultdict[str, Amounts] = defaultdict(Amounts)

        # Cached results by metric, such as "ttft".
        self._distributions: dict[str, Distribution] = {}
        self._statistic_ranges: dict[str, StatisticRanges | None] = {}

        # Cached results by metric and index of a value in the sorted sample.
        self._value_at_index: dict[tuple[str, int], float] = {}
        self._range_at_index: dict[tuple[str, int], Range] = {}

    def sum(self, name: str) -> int:
        """Return the sum of this name, 0 if nothing was added to it."""
        return self.sums.get(name, 0)

    def sums_with_prefix(self, prefix: str) -> dict[str, int]:
        """Return the sums whose names begin with a prefix, by the rest of the name.

        The largest sum comes first, and equal ones are in order of their names.
        """
        sums = [
            (name.removeprefix(prefix), total)
            for name, total in self.sums.items()
            if name.startswith(prefix)
        ]
        return dict(sorted(sums, key=lambda item: (-item[1], item[0])))

    def sum_known(self, field: str) -> int | None:
        """Return the sum of a field over the ok requests that have it, or None if none has it."""
        return self.sums[field] if self.sum(field + "_known") else None

    def maximum(self, name: str) -> int:
        """Return the largest value of a field, or NO_TIME without any."""
        return self.maxima.get(name, NO_TIME)

    def sample(self, metric: str) -> Values:
        """Return the values of a metric that has one value per request, such as "ttft"."""
        blocks = (block for columns in self.columns for block in columns.blocks())
        values = (_metric_values(block, metric) for block in blocks)
        return Values.of_arrays(values, max_count=sum(map(len, self.columns)))

    def distribution(self, metric: str) -> Distribution:
        """Return the distribution of a metric that has one value per request."""
        if metric not in self._distributions:
            sample = self.sample(metric)
            self._distributions[metric] = sample.distribution()
            self._cache_quantiles(metric, sample)
        return self._distributions[metric]

    def _cache_quantiles(self, metric: str, sample: Values) -> None:
        """Cache the quantiles of a sample in ns, because its distribution has them in ms only."""
        if not sample.count:
            return

        for _, probability in QUANTILES:
            index = quantile_index(sample.count, probability)
            self._value_at_index[metric, index] = sample.nth(index)

    def nth_value(self, metric: str, index_in_order: int) -> float:
        """Return the value of a per-request metric at an index of its ordered sample."""
        key = (metric, index_in_order)
        if key not in self._value_at_index:
            self._value_at_index[key] = self.sample(metric).nth(index_in_order)
        return self._value_at_index[key]

    def statistic_ranges(self, metric: str) -> StatisticRanges | None:
        """Return the range of each statistic of a metric, or None if all its values are certain.

        An event may have arrived earlier than its timestamp, so that a latency is only known to lie
        in a range.
        """
        if metric not in self._statistic_ranges:
            self._statistic_ranges[metric] = self._bound_statistics(metric)
        return self._statistic_ranges[metric]

    def _bound_statistics(self, metric: str) -> StatisticRanges | None:
        """Compute the range of each statistic of a metric, or None if all its values are certain.

        This also caches the ranges of the quantiles by their index, for `nth_range`.
        """
        value_bounds = sample_bounds.bound_metric(self.columns, metric)
        if value_bounds is None:
            return None

        self._cache_quantile_ranges(metric, value_bounds)
        return value_bounds.bound_statistics()

    def _cache_quantile_ranges(self, metric: str, value_bounds: sample_bounds.ValueBounds) -> None:
        """Cache the range of each quantile of a metric, by its index in the sorted sample."""
        for _, probability in QUANTILES:
            index_in_order = quantile_index(len(value_bounds), probability)
            key = (metric, index_in_order)
            self._range_at_index[key] = value_bounds.bound_nth(index_in_order)

    def nth_range(self, metric: str, index_in_order: int) -> Range | None:
        """Return the range of the value at an index of the sorted values of a metric.

        A value has a range because timestamps have errors. Return None if all values of the metric
        are certain.
        """
        ranges_of_statistics = self.statistic_ranges(metric)
        if ranges_of_statistics is None:
            return None

        key = (metric, index_in_order)
        if key in self._range_at_index:
            return self._range_at_index[key]

        # The bounds are computed again, because a cache of them would take too much memory.
        value_bounds = sample_bounds.bound_metric(self.columns, metric)
        if value_bounds is None:
            return None

        value_range = value_bounds.bound_nth(index_in_order)
        self._range_at_index[key] = value_range
        return value_range

    def amounts(self, name: RequestAmount) -> Amounts:
        """Return an amount of each request, such as its output tokens, with its time."""
        amounts = Amounts()
        for columns in self.columns:
            amounts.add(*_time_request_amounts(columns, name, self.slo))
        return amounts

    def add_to_sum(self, name: str, value: int | np.integer[Any]) -> None:
        """Add a value to the sum of this name."""
        self.sums[name] = self.sum(name) + int(value)

    def add_range(self, name: str, values: NDArray[np.int64]) -> None:
        """Record the count, the minimum and the maximum of these values."""
        self.add_to_sum(name, len(values))
        if len(values):
            self.minima[name] = min(self.minima.get(name, NEVER_NS), int(values.min()))
            self.add_maximum(name, values)

    def add_maximum(self, name: str, values: NDArray[np.int64]) -> None:
        """Record the maximum of these values."""
        self.maxima[name] = max(self.maximum(name), int(values.max(initial=NO_TIME)))

    def add_known(self, name: str, values: NDArray[np.int64]) -> None:
        """Add the values that are not UNKNOWN (-1) to a sum, and their number to another one."""
        known_values = values[as_selection(values >= 0)]
        self.add_to_sum(name, known_values.sum(dtype=np.int64))
        self.add_to_sum(name + "_known", len(known_values))

    def add_failures(self, kind: str, added: FailureCount) -> None:
        """Count more failures of a kind, and choose the better of both examples."""
        previous = self.failures.get(kind)
        if previous is None:
            self.failures[kind] = added
            return

        example = added if added.is_better_example_than(previous) else previous
        self.failures[kind] = example._replace(requests=previous.requests + added.requests)

    def merge(self, other: MetricAccumulator) -> None:
        """Add all requests of another accumulator, which is not changed."""
        # Numbers by name.
        for name, count in other.sums.items():
            self.add_to_sum(name, count)

        for name, value in other.minima.items():
            self.minima[name] = min(self.minima.get(name, NEVER_NS), value)

        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maximum(name), value)

        self._merge_last_sent(other.last_sent)

        for kind, failures in other.failures.items():
            self.add_failures(kind, failures)

        for name, values in other.added_values.items():
            self.added_values[name].merge(values)

        for name, amounts in other.added_amounts.items():
            self.added_amounts[name].merge(amounts)

        self.columns += other.columns

    def _merge_last_sent(self, other: LastSent | None) -> None:
        """Replace the last sent request by another one if that was sent later."""
        if other is None:
            return
        if self.last_sent is None or other.sent_ns > self.last_sent.sent_ns:
            self.last_sent = other

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
        self._add_tokens(block)

        self._add_failures_by_kind(block, texts)
        self._count_finish_reasons(block, texts)
        self._count_remarks(block, texts)

        self._count_without_tpot(block)
        self._count_stalled(block)
        if self.slo is not None:
            self._count_slo_outcomes(block, self.slo)

    def _add_bytes(self, columns: Columns) -> None:
        """Add the bytes on the wire, and how many requests were sent again."""
        for name in ("resent", "bytes_sent", "bytes_received"):
            self.add_to_sum(name, columns[name].sum(dtype=np.int64))

    def _count_stalled(self, columns: Columns) -> None:
        """Count the ok responses with a gap between output events of more than STALL_NS."""
        longest_gaps_ns = columns.measure("max_gap")[columns.is_ok]
        is_stalled = longest_gaps_ns > STALL_NS
        self.add_to_sum("stalled", is_stalled.sum())

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

    def _count_without_tpot(self, columns: Columns) -> None:
        """Count the ok requests without a time per output token (TPOT), by reason.

        - "tpot_undefined": for any reason.
        - "tpot_no_span": because all tokens came at one instant.
        - "tpot_no_output": because no token came in an event, so that none could be timed.
        """
        requests_output = ~columns.request_no_output
        is_examined = columns.is_ok & requests_output

        has_no_tpot = columns.measure("tpot") == UNDEFINED
        has_no_span = request_metrics.has_no_span(columns)
        lacks_output = request_metrics.lacks_output(columns)

        self.add_to_sum("tpot_undefined", (is_examined & has_no_tpot).sum())
        self.add_to_sum("tpot_no_span", (is_examined & has_no_span).sum())
        self.add_to_sum("tpot_no_output", (is_examined & lacks_output).sum())

    def _count_slo_outcomes(self, columns: Columns, slo: Slo) -> None:
        """Count the requests that meet all terms of an SLO, and the outcomes of each term.

        A term is a limit, such as "TTFT at most 1 s". A request that the end of the run cut off is
        a miss if it was already over the limit of a term. Otherwise it does not count.
        """
        is_good = outcomes.meets_slo(columns, slo)
        self.add_to_sum("good", is_good.sum())

        # An unfinished request counts only if it is a miss.
        is_unfinished = columns.has_status(UNFINISHED)
        is_unfinished_miss = is_unfinished & outcomes.is_counted(columns, slo)
        self.add_to_sum("unfinished_misses", is_unfinished_miss.sum())

        for term_number, term in enumerate(slo.terms):
            # A term that limits the gaps between output events is not about single requests.
            is_about_requests = per_request(term.metric)
            if is_about_requests:
                self._count_term_outcomes(columns, term_number, term)

    def _count_term_outcomes(self, columns: Columns, term_number: int, term: Term) -> None:
        """Count the requests that decide one term of an SLO, such as "TTFT at most 1 s".

        - "values": the ok requests with a value of the term's metric.
        - "over": the ok requests with a value over the limit.
        - "unfinished_over": the unfinished requests that were already over the limit.

        Args:
            columns: The records.
            term_number: The index of the term in the SLO.
            term: The term.
        """
        # Ok requests.
        values_of_ok = columns.measure(term.metric)[columns.is_ok]
        known_values = drop_undefined(values_of_ok)
        is_over_limit = known_values > term.limit_ns

        # Unfinished requests, which the end of the run cut off.
        is_over_limit_when_cut = outcomes.is_over_when_cut(columns, term)
        unfinished_over_limit = is_over_limit_when_cut.sum()

        self.add_to_sum(term_sum_name(term_number, "values"), len(known_values))
        self.add_to_sum(term_sum_name(term_number, "over"), is_over_limit.sum())
        self.add_to_sum(term_sum_name(term_number, "unfinished_over"), unfinished_over_limit)

    def _add_due_times(self, columns: Columns, is_open_loop: bool) -> None:
        """Add the first and the last time at which requests were due, and their number.

        - "due": the due times of all requests.
        - "due_in_open_loop": the due times of requests that were planned, for the offered rate.
        - "start": the last due time of a single request, or of the first request of a task.

        Args:
            columns: The records.
            is_open_loop: Whether requests were sent at planned times, not after responses.
        """
        was_due = columns.reached_due_time
        due_ns = columns["due_ns"][was_due]
        self.add_range("due", due_ns)
        if is_open_loop:
            self.add_range("due_in_open_loop", due_ns)

        begins_task = columns["turn"] <= 0  # turn 0 of a task, or UNKNOWN (-1) without a task
        start_ns = columns["due_ns"][was_due & begins_task]
        self.add_maximum("start", start_ns)

    def _add_end_times(self, columns: Columns) -> None:
        """Add the latest end of a request and the latest time of a token."""
        for name in ("done_ns", "last_token_ns"):
            self.add_maximum(name, columns[name])

    def _count_first_tokens(self, columns: Columns) -> None:
        """Count the requests with a first token, and those whose timestamp the kernel took."""
        has_first_token = columns.is_known("first_token_ns")
        self.add_to_sum("with_first_token", has_first_token.sum())
        self.add_to_sum("kernel_timestamps", columns["kernel_stamp"][has_first_token].sum())

    def _add_sent_times(self, columns: Columns) -> None:
        """Add the first and the last time at which requests were sent, and the last request."""
        sent_ns = columns["sent_ns"]
        was_sent = columns.is_known("sent_ns")
        self.add_range("sent", sent_ns[was_sent])
        if not was_sent.any():
            return

        last_row = int(np.argmax(sent_ns))
        last_sent = LastSent(
            sent_ns=int(sent_ns[last_row]),
            end_ns=int(columns["end_ns"][last_row]),
            done_ns=int(columns["done_ns"][last_row]),
        )
        self._merge_last_sent(last_sent)

    def _add_tokens(self, columns: Columns) -> None:
        """Add the token counts of requests, and the counts that check them against each other."""
        ok_rows = as_selection(columns.is_ok)
        for name in TOKEN_FIELDS:
            self.add_known(name, columns[name][ok_rows])

        self._add_tokens_of_cached(columns)
        self._add_tokens_of_failed(columns)
        self._add_tokens_of_events(columns)
        self._add_tokens_per_event(columns)
        self._count_contradicting_token_counts(columns)
        self._add_requested_tokens(columns)
        self._add_built_tokens(columns)
        self._count_token_sources(columns)

    def _add_tokens_of_cached(self, columns: Columns) -> None:
        """Add the prompt tokens of ok requests that report how many of them were cached."""
        is_cached_known = columns.is_ok & columns.is_known("cached_tokens")
        self.add_known("input_tokens_of_cached", columns["input_tokens"][is_cached_known])

    def _add_tokens_of_failed(self, columns: Columns) -> None:
        """Add the tokens of failed requests, which a provider may bill."""
        failed = columns.has_status(FAILED)
        self.add_known("failed_input", columns["input_tokens"][failed])
        self.add_known("failed_output", columns["output_tokens"][failed])

    def _add_tokens_of_events(self, columns: Columns) -> None:
        """Add the output events of ok requests, and their billed and their streamed tokens.

        The billed tokens are all that the server counts. Some servers count reasoning tokens that
        they never stream.
        """
        has_token_count = columns.is_known("output_tokens")
        has_events = columns["output_events"] > 0
        selected = as_selection(columns.is_ok & has_token_count & has_events)

        events = columns["output_events"][selected]
        streamed_tokens = request_metrics.streamed_tokens(columns)[selected]
        billed_tokens = columns["output_tokens"][selected]
        self.add_to_sum("output_events", events.sum(dtype=np.int64))
        self.add_to_sum("streamed_tokens", streamed_tokens.sum(dtype=np.int64))
        self.add_to_sum("billed_tokens", billed_tokens.sum(dtype=np.int64))

    def _add_tokens_per_event(self, columns: Columns) -> None:
        """Add the numbers of output events and tokens of ok responses with an exact token count.

        - "exact_events": the output events.
        - "exact_tokens": the streamed tokens.
        - "surplus_tokens": the tokens with text after the first one of each event. 13 tokens in 10
          events, where one token has no text, have a surplus of 2.
        """
        has_exact_count = np.isin(columns["output_source"], EXACT_SOURCES)
        has_events = columns["output_events"] > 0
        selected = as_selection(columns.is_ok & has_events & has_exact_count)

        event_counts = columns["output_events"][selected].astype(np.int64)
        token_counts = request_metrics.streamed_tokens(columns)[selected].astype(np.int64)

        # A token without text, such as the one that ends a response, comes in no event.
        finish_reasons = columns["finish_reason"][selected]
        textless_counts = request_metrics.count_textless_tokens(finish_reasons, token_counts)
        tokens_with_text = token_counts - textless_counts
        surplus_counts = np.maximum(tokens_with_text - event_counts, 0)

        self.add_to_sum("exact_events", event_counts.sum())
        self.add_to_sum("exact_tokens", token_counts.sum())
        self.add_to_sum("surplus_tokens", surplus_counts.sum())

    def _count_contradicting_token_counts(self, columns: Columns) -> None:
        """Count the responses whose number of output tokens cannot be right.

        - "exact_counts": all checked responses, whose tokens the server or a tokenizer counted.
        - "understated_counts": the number is too low: fewer tokens than output events.
        - "conflicting_counts": the number is too low, or more tokens than were requested.
        """
        is_counted_exactly = np.isin(columns["output_source"], EXACT_SOURCES)
        requests_output = ~columns.request_no_output
        has_count = columns.is_known("output_tokens")
        is_checked = columns.is_ok & requests_output & is_counted_exactly & has_count

        has_too_low_count = is_checked & request_metrics.has_too_low_count(columns)
        has_too_high_count = is_checked & request_metrics.has_too_high_count(columns)
        has_wrong_count = has_too_low_count | has_too_high_count

        self.add_to_sum("exact_counts", is_checked.sum())
        self.add_to_sum("understated_counts", has_too_low_count.sum())
        self.add_to_sum("conflicting_counts", has_wrong_count.sum())

    def _add_requested_tokens(self, columns: Columns) -> None:
        """Add the requested and the received output tokens of ok requests that have both numbers.

        "length_mismatches" counts the requests whose two numbers differ.
        """
        received_tokens = columns["output_tokens"]
        requested_tokens = columns["asked_output"]
        requests_length = requested_tokens > 0
        is_compared = columns.is_ok & requests_length & columns.is_known("output_tokens")
        is_mismatch = is_compared & (requested_tokens != received_tokens)

        self.add_to_sum("requests_with_length", is_compared.sum())
        self.add_to_sum("requested_tokens", requested_tokens[is_compared].sum(dtype=np.int64))
        self.add_to_sum("received_tokens", received_tokens[is_compared].sum(dtype=np.int64))
        self.add_to_sum("length_mismatches", is_mismatch.sum())

    def _add_built_tokens(self, columns: Columns) -> None:
        """Add the prompt tokens of ok requests that both the client and the server counted."""
        is_compared = columns.is_ok & _has_both_prompt_counts(columns)
        client_counts = columns["built_tokens"][is_compared]
        server_counts = columns["input_tokens"][is_compared]

        self.add_to_sum("prompts_compared", len(client_counts))
        self.add_to_sum("prompt_tokens_built", client_counts.sum(dtype=np.int64))
        self.add_to_sum("prompt_tokens_of_server", server_counts.sum(dtype=np.int64))

    def _count_token_sources(self, columns: Columns) -> None:
        """Count the ok requests by the source of their token counts, for input and for output.

        The source is who counted the tokens, such as the server. Some requests, such as those for
        embeddings, have no output tokens. They count in "output_source_unasked".
        """
        is_ok = columns.is_ok
        requests_no_output = columns.request_no_output
        is_ok_with_output = is_ok & ~requests_no_output
        is_ok_without_output = is_ok & requests_no_output

        input_sources = columns["input_source"][is_ok]
        self._count_by_source("input_source", input_sources)

        output_sources = columns["output_source"][is_ok_with_output]
        self._count_by_source("output_source", output_sources)
        self.add_to_sum("output_source_unasked", is_ok_without_output.sum())

    def _count_by_source(self, field: str, source_codes: NDArray[np.int64]) -> None:
        """Count requests by a source of token counts, in sums such as "input_source_server"."""
        requests_by_code = np.bincount(source_codes, minlength=len(SOURCES)).tolist()
        for source, requests in zip(SOURCES, requests_by_code, strict=True):
            self.add_to_sum(f"{field}_{source or 'none'}", requests)

    def _count_finish_reasons(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the ok requests by the finish reason of the response, such as "stop" or "length".

        Common reasons are stored as codes. A rare reason is stored as text, with the code of
        "other".

        Args:
            columns: The records. The column "finish_reason" has indices of FINISH_REASONS, and the
                column "text" has indices of `texts`.
            texts: The texts of all records.
        """
        has_other_reason = columns["finish_reason"] == FINISH["other"]

        has_common_reason = columns.is_ok & ~has_other_reason
        codes = columns["finish_reason"][has_common_reason]
        for code, requests in enumerate(np.bincount(codes).tolist()):
            if requests:
                self.add_to_sum(FINISH_PREFIX + (FINISH_REASONS[code] or "none"), requests)

        text_indexes = columns["text"][columns.is_ok & has_other_reason]
        for reason, requests in _count_texts(text_indexes, texts):
            self.add_to_sum(FINISH_PREFIX + (reason or "other"), requests)

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
        kind_indices = np.flatnonzero(requests_of_kinds).tolist()
        for kind_index in kind_indices:
            kind = KINDS[kind_index]
            if kind in KINDS_WITHOUT_FAILURE:
                continue

            rows = np.flatnonzero(columns["kind"] == kind_index)
            self.add_failures(kind, _summarize_failures(columns, rows, texts))
            if kind == "worker_died":
                self._add_dead_workers(columns["worker"][rows])

    def _add_dead_workers(self, worker_of_request: NDArray[np.int64]) -> None:
        """Add the number of each worker that died, as the name of a sum.

        Args:
            worker_of_request: The worker of each request that failed because its worker died.
        """
        for worker in np.unique(worker_of_request).tolist():
            self.add_to_sum(f"{DEAD_WORKER_PREFIX}{worker}", 1)


def _has_both_prompt_counts(columns: Columns) -> NDArray[np.bool_]:
    """Return which requests for output have a prompt that both client and server counted."""
    has_client_count = columns["built_tokens"] > 0
    is_from_server = columns["input_source"] == SOURCES.index("server")
    has_server_count = is_from_server & columns.is_known("input_tokens")
    has_both_counts: NDArray[np.bool_] = has_client_count & has_server_count
    requests_output = ~columns.request_no_output
    return has_both_counts & requests_output


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


def _metric_values(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a metric that has one value per request.

    A metric of the server, such as TTFT, has values for ok requests. A metric of the client, such
    as the send delay, has values for all sent requests.
    """
    definition = METRICS.get(metric)
    is_of_all_sent = definition is not None and definition.sample == "sent"
    is_in_sample = columns.is_known("sent_ns") if is_of_all_sent else columns.is_ok

    selected = as_selection(is_in_sample)
    return drop_undefined(columns.measure(metric)[selected])


def _time_request_amounts(columns: Columns, name: RequestAmount, slo: Slo | None) -> TimedAmounts:
    """Return an amount of each request, with the time at which the amount came.

    - "output": the output tokens, spread from the first to the last one.
    - "input": the prompt tokens, at the first output token.
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
