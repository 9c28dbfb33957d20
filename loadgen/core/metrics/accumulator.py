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
    """How many requests failed in one way, and one of these failures, which is shown for all.

    The failure with an error text that was due first is shown. Only if none has a text, it is the
    one that was due first, with its HTTP status as the text.

    Attributes:
        requests: The number of failed requests.
        due_ns: The due time of the failure that is shown.
        text: The text that is shown, "" if nothing is known.
        has_error_text: Whether the text is an error text, rather than a status or "".
    """

    requests: int
    due_ns: int
    text: str
    has_error_text: bool

    def is_shown_before(self, other: FailureCount) -> bool:
        """Return True if this failure is shown rather than the other one."""
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
    """Sums, extremes, samples and amounts of the records of one stage, target, class or step.

    It keeps its records as `columns`, and computes the values and amounts of requests from them on
    each call, because all of them together would need several times the memory of the records.
    What is small is kept once it is computed: distributions, the ranges of statistics, and single
    values. So ask for them only after all records have been added.

    Attributes:
        slo: The SLO that these requests are judged by, or None.
        sums: Sums by name. Most are numbers of requests, such as "ok" or "with_first_token".
        minima: The smallest value of some fields, by name.
        maxima: The largest value of some fields, by name.
        last_sent: The request that was sent last, None if none was sent.
        failures: The number of failures of each kind, with one of them.
        added_values: Values that are not those of single requests, such as the durations of tasks.
        added_amounts: Amounts that are not those of single requests, such as the ends of tasks.
        columns: The records of each stage.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        """Create an accumulator without requests.

        Args:
            slo: The SLO that the requests are judged by, or None.
        """
        self.slo = slo
        self.columns: list[Columns] = []

        # Results by name, for example the number of ok requests in `sums["ok"]`, and the time of
        # the first send in `minima["sent"]`.
        self.sums: dict[str, int] = {}
        self.minima: dict[str, int] = {}
        self.maxima: dict[str, int] = {}
        self.added_values: defaultdict[str, Values] = defaultdict(Values)
        self.added_amounts: defaultdict[str, Amounts] = defaultdict(Amounts)

        self.last_sent: LastSent | None = None
        self.failures: dict[str, FailureCount] = {}  # by the kind of failure

        # Caches by metric, and by metric and index of a value in the ordered sample.
        self._distributions: dict[str, Distribution] = {}
        self._statistic_ranges: dict[str, StatisticRanges | None] = {}
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
        """Return the values of a metric that has one value per request, in little memory."""
        blocks = (block for columns in self.columns for block in columns.blocks())
        values = (_metric_values(block, metric) for block in blocks)
        return Values.of_arrays(values, max_count=sum(map(len, self.columns)))

    def distribution(self, metric: str) -> Distribution:
        """Return the distribution of a metric that has one value per request."""
        if metric not in self._distributions:
            sample = self.sample(metric)
            self._distributions[metric] = sample.distribution()
            self._keep_quantiles(metric, sample)
        return self._distributions[metric]

    def _keep_quantiles(self, metric: str, sample: Values) -> None:
        """Keep the quantiles of a sample in ns, which SLO terms need; a distribution is in ms."""
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
        """Return the ranges of the statistics of a metric, or None if all its values are certain.

        An event may have arrived earlier than its timestamp, so a latency is only known to lie in a
        range, and so are its statistics.
        """
        if metric not in self._statistic_ranges:
            self._statistic_ranges[metric] = self._bound_statistics(metric)
        return self._statistic_ranges[metric]

    def _bound_statistics(self, metric: str) -> StatisticRanges | None:
        """Compute the ranges of the statistics of a metric, and keep those of its quantiles."""
        value_bounds = sample_bounds.bound_metric(self.columns, metric)
        if value_bounds is None:
            return None
        for _, probability in QUANTILES:
            index = quantile_index(len(value_bounds), probability)
            self._range_at_index[metric, index] = value_bounds.bound_nth(index)
        return value_bounds.bound_statistics()

    def nth_range(self, metric: str, index_in_order: int) -> Range | None:
        """Return the range in which the value of `nth_value` may lie, or None if it is certain.

        The range is cached, because several SLO terms may be about the same value.
        """
        are_all_certain = self.statistic_ranges(metric) is None
        if are_all_certain:
            return None

        key = (metric, index_in_order)
        if key not in self._range_at_index:
            # The bounds of all requests take too much memory to keep, so they are computed anew.
            value_bounds = sample_bounds.bound_metric(self.columns, metric)
            if value_bounds is None:
                return None
            self._range_at_index[key] = value_bounds.bound_nth(index_in_order)

        return self._range_at_index[key]

    def amounts(self, name: RequestAmount) -> Amounts:
        """Return an amount of each request, such as its output tokens, with the time of each."""
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
        """Count failures of a kind, and keep the one that is shown for all of them."""
        known = self.failures.get(kind)
        if known is None:
            self.failures[kind] = added
            return
        representative = added if added.is_shown_before(known) else known
        self.failures[kind] = representative._replace(requests=known.requests + added.requests)

    def merge(self, other: MetricAccumulator) -> None:
        """Add all requests of another accumulator, which does not change.

        The total of several stages is made in this way.
        """
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
        """Take the last request of other requests if it was sent after the last one of these."""
        if other is None:
            return
        if self.last_sent is None or other.sent_ns > self.last_sent.sent_ns:
            self.last_sent = other

    def add(self, columns: Columns, texts: Sequence[str], *, is_open_loop: bool) -> None:
        """Add records of one stage.

        Args:
            columns: The records.
            texts: Error texts, finish reasons and remarks, which `columns["text"]` indexes.
            is_open_loop: Whether the stage is an open loop, whose due times are its offered load.
        """
        self.columns.append(columns)
        for block in columns.blocks():
            if len(block):
                self._add_block(block, texts, is_open_loop)

    def _add_block(self, block: Columns, texts: Sequence[str], is_open_loop: bool) -> None:
        """Add one block of the records to the sums, the extremes and the failures.

        Records are added block by block, because the columns of all records at once would take much
        memory. Each call below adds one group of statistics.

        Args:
            block: Some adjacent records.
            texts: Error texts, finish reasons and remarks, which `block["text"]` indexes.
            is_open_loop: Whether the stage is an open loop, whose due times are its offered load.
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
        self.add_to_sum("stalled", (columns.measure("max_gap")[columns.is_ok] > STALL_NS).sum())

    def _count_by_status(self, columns: Columns) -> None:
        """Count all records, those of each status, and the starts.

        A start is a single request or the first one of a conversation or task.
        """
        self.add_to_sum("recorded", len(columns))
        self.add_to_sum("starts", (columns["turn"] == 0).sum())
        for code, status in enumerate(STATUSES):
            self.add_to_sum(status, columns.has_status(code).sum())

    def _count_without_tpot(self, columns: Columns) -> None:
        """Count the ok requests without a TPOT, the time per output token after the first event.

        - "tpot_undefined": all of them.
        - "tpot_no_span": those with enough tokens for a TPOT, all of which came at one instant.
        - "tpot_no_output": those with enough tokens for a TPOT, but no event that could be timed.

        Requests that ask for no output, such as embeddings, are left out.
        """
        is_examined = columns.is_ok & ~columns.request_no_output
        has_no_tpot = columns.measure("tpot") == UNDEFINED
        has_no_span = request_metrics.has_no_span(columns)
        lacks_output = request_metrics.lacks_output(columns)
        self.add_to_sum("tpot_undefined", (is_examined & has_no_tpot).sum())
        self.add_to_sum("tpot_no_span", (is_examined & has_no_span).sum())
        self.add_to_sum("tpot_no_output", (is_examined & lacks_output).sum())

    def _count_slo_outcomes(self, columns: Columns, slo: Slo) -> None:
        """Count the good requests, which meet all terms of the SLO, and those that miss a term.

        At the end of a run, the client waits a while for responses and then cuts off the remaining
        requests, which are unfinished. Such a request counts only if it had exceeded the limit of a
        term when it was cut off, and then as a miss.
        """
        is_unfinished = columns.has_status(UNFINISHED)
        counts_as_miss = is_unfinished & outcomes.is_counted(columns, slo)
        self.add_to_sum("unfinished_misses", counts_as_miss.sum())
        self.add_to_sum("good", outcomes.meets_slo(columns, slo).sum())
        for term_number, term in enumerate(slo.terms):
            # Other terms limit the gaps between the events of all responses, as one sample.
            if per_request(term.metric):
                self._count_term_outcomes(columns, term_number, term)

    def _count_term_outcomes(self, columns: Columns, term_number: int, term: Term) -> None:
        """Count the requests that a term of an SLO is judged by.

        - "values": the ok requests with a value of the term's metric.
        - "over": those of them whose value is over the limit.
        - "unfinished_over": the unfinished requests that were over the limit when they were cut.

        Args:
            columns: The records.
            term_number: The index of the term in the SLO.
            term: The term.
        """
        values = drop_undefined(columns.measure(term.metric)[columns.is_ok])
        is_over = values > term.limit_ns
        is_over_when_cut = outcomes.is_over_when_cut(columns, term)
        self.add_to_sum(term_sum_name(term_number, "values"), len(values))
        self.add_to_sum(term_sum_name(term_number, "over"), is_over.sum())
        self.add_to_sum(term_sum_name(term_number, "unfinished_over"), is_over_when_cut.sum())

    def _add_due_times(self, columns: Columns, is_open_loop: bool) -> None:
        """Add the first and the last time at which requests were due, and their number.

        The times of all requests ("due") bound the measurement window. Those of an open loop
        ("due_in_open_loop") also give the offered rate. "start" is the latest due time of a single
        request or of the first request of a task.
        """
        was_due = columns.reached_due_time
        due_ns = columns["due_ns"][was_due]
        self.add_range("due", due_ns)
        if is_open_loop:
            self.add_range("due_in_open_loop", due_ns)

        is_first_turn = columns["turn"] <= 0
        start_ns = columns["due_ns"][was_due & is_first_turn]
        self.add_maximum("start", start_ns)

    def _add_end_times(self, columns: Columns) -> None:
        """Add the latest end and the latest token, which bound the measurement window."""
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
        """Add the token counts of requests, and what is needed to check them against each other."""
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
        """Add the prompt tokens of the ok requests whose cached tokens are known.

        They are the denominator of the cached share.
        """
        is_cached_known = columns.is_ok & columns.is_known("cached_tokens")
        self.add_known("input_tokens_of_cached", columns["input_tokens"][is_cached_known])

    def _add_tokens_of_failed(self, columns: Columns) -> None:
        """Add the tokens of failed requests in sums of their own. A provider may bill them."""
        failed = columns.has_status(FAILED)
        self.add_known("failed_input", columns["input_tokens"][failed])
        self.add_known("failed_output", columns["output_tokens"][failed])

    def _add_tokens_of_events(self, columns: Columns) -> None:
        """Add the output events of ok requests, and their billed and their streamed tokens.

        The billed tokens are all that the server counts. Some servers count reasoning tokens that
        they never stream. Requests without a count or without events are left out, so that the sums
        can be divided by each other.
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
        """Add the output events of ok responses, their tokens, and the tokens in surplus of events.

        If there are many surplus tokens, events carry several tokens each, and the gaps between
        events are not gaps between tokens. A token without text, such as the one that ends a
        response, comes in no event and is no surplus. So for 13 tokens in 10 events, where one
        token may have no text, the surplus is 2.

        Only responses whose tokens were counted exactly are used.
        """
        has_exact_count = np.isin(columns["output_source"], EXACT_SOURCES)
        has_events = columns["output_events"] > 0
        selected = as_selection(columns.is_ok & has_events & has_exact_count)

        event_counts = columns["output_events"][selected].astype(np.int64)
        token_counts = request_metrics.streamed_tokens(columns)[selected].astype(np.int64)
        finish_reasons = columns["finish_reason"][selected]
        textless_counts = request_metrics.count_textless_tokens(finish_reasons, token_counts)
        surplus_counts = np.maximum(token_counts - textless_counts - event_counts, 0)

        self.add_to_sum("exact_events", event_counts.sum())
        self.add_to_sum("exact_tokens", token_counts.sum())
        self.add_to_sum("surplus_tokens", surplus_counts.sum())

    def _count_contradicting_token_counts(self, columns: Columns) -> None:
        """Count the responses whose number of output tokens cannot be right.

        Only responses whose tokens the server or a tokenizer counted are checked ("exact_counts").
        A count is too low if there are more output events ("understated_counts"), and too high if
        fewer tokens were requested. "conflicting_counts" has both.
        """
        is_exact = np.isin(columns["output_source"], EXACT_SOURCES)
        requests_output = ~columns.request_no_output
        has_count = columns.is_known("output_tokens")
        is_checked = columns.is_ok & requests_output & is_exact & has_count

        is_too_low = is_checked & request_metrics.has_too_low_count(columns)
        is_too_high = is_checked & request_metrics.has_too_high_count(columns)
        is_wrong = is_too_low | is_too_high
        self.add_to_sum("exact_counts", is_checked.sum())
        self.add_to_sum("understated_counts", is_too_low.sum())
        self.add_to_sum("conflicting_counts", is_wrong.sum())

    def _add_requested_tokens(self, columns: Columns) -> None:
        """Add the requested and the received output tokens, to compare them.

        Only ok requests with both numbers are compared: those that requested a number of tokens and
        whose response was counted. "length_mismatches" are those whose numbers differ.
        """
        received_tokens = columns["output_tokens"]
        requested_tokens = columns["asked_output"]
        is_compared = columns.is_ok & (requested_tokens > 0) & columns.is_known("output_tokens")
        is_mismatch = is_compared & (requested_tokens != received_tokens)
        self.add_to_sum("requests_with_length", is_compared.sum())
        self.add_to_sum("requested_tokens", requested_tokens[is_compared].sum(dtype=np.int64))
        self.add_to_sum("received_tokens", received_tokens[is_compared].sum(dtype=np.int64))
        self.add_to_sum("length_mismatches", is_mismatch.sum())

    def _add_built_tokens(self, columns: Columns) -> None:
        """Add the prompt tokens of ok requests, as the client and as the server counted them.

        Only requests with both counts are added, so that the sums can be compared. The client
        counts the tokens of a prompt that it builds itself.
        """
        is_compared = columns.is_ok & _has_both_prompt_counts(columns)
        client_counts = columns["built_tokens"][is_compared]
        server_counts = columns["input_tokens"][is_compared]
        self.add_to_sum("prompts_compared", len(client_counts))
        self.add_to_sum("prompt_tokens_built", client_counts.sum(dtype=np.int64))
        self.add_to_sum("prompt_tokens_of_server", server_counts.sum(dtype=np.int64))

    def _count_token_sources(self, columns: Columns) -> None:
        """Count the ok requests by the source of their token counts, for input and for output.

        A request that asks for no output has no output to count. It is in "output_source_unasked".
        """
        with_output = columns.is_ok & ~columns.request_no_output
        self._count_by_source("input_source", columns["input_source"][columns.is_ok])
        self._count_by_source("output_source", columns["output_source"][with_output])
        self.add_to_sum("output_source_unasked", (columns.is_ok & columns.request_no_output).sum())

    def _count_by_source(self, field: str, source_codes: NDArray[np.int64]) -> None:
        """Count requests by a source of token counts, in sums such as "input_source_server"."""
        requests_by_code = np.bincount(source_codes, minlength=len(SOURCES)).tolist()
        for source, requests in zip(SOURCES, requests_by_code, strict=True):
            self.add_to_sum(f"{field}_{source or 'none'}", requests)

    def _count_finish_reasons(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the ok requests by the finish reason of the response, such as "stop" or "length".

        Common reasons have a code in FINISH_REASONS. Any other one has the code "other", and the
        text of the request is the reason.
        """
        has_other_reason = columns["finish_reason"] == FINISH["other"]

        has_common_reason = columns.is_ok & ~has_other_reason
        requests_by_code = np.bincount(columns["finish_reason"][has_common_reason]).tolist()
        for code, requests in enumerate(requests_by_code):
            if requests:
                self.add_to_sum(FINISH_PREFIX + (FINISH_REASONS[code] or "none"), requests)

        text_indexes = columns["text"][columns.is_ok & has_other_reason]
        for reason, requests in _count_texts(text_indexes, texts):
            self.add_to_sum(FINISH_PREFIX + (reason or "other"), requests)

    def _count_remarks(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the ok requests by remark, a text about something unusual in the response.

        The text of a request with the finish reason "other" is that reason, and no remark.
        """
        has_other_reason = columns["finish_reason"] == FINISH["other"]
        has_remark = columns.is_ok & ~has_other_reason & columns.is_known("text")
        for remark, requests in _count_texts(columns["text"][has_remark], texts):
            if remark:
                self.add_to_sum(REMARK_PREFIX + remark, requests)

    def _add_failures_by_kind(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the failed requests of each kind of failure, such as "reset" or "http_5xx".

        Args:
            columns: The records. Their column `kind` has indices of KINDS.
            texts: The error texts, which `columns["text"]` indexes.
        """
        requests_by_code = np.bincount(columns["kind"])
        for code in np.flatnonzero(requests_by_code).tolist():
            kind = KINDS[code]
            if kind in KINDS_WITHOUT_FAILURE:
                continue
            rows = np.flatnonzero(columns["kind"] == code)
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
    """Return which requests with output have a prompt that both the client and the server counted.

    Requests that ask for no output, such as embeddings, are left out.
    """
    has_client_count = columns["built_tokens"] > 0
    is_from_server = columns["input_source"] == SOURCES.index("server")
    has_server_count = is_from_server & columns.is_known("input_tokens")
    has_both: NDArray[np.bool_] = has_client_count & has_server_count
    return has_both & ~columns.request_no_output


def _summarize_failures(
    columns: Columns, rows: NDArray[np.int64], texts: Sequence[str]
) -> FailureCount:
    """Return the number of failures of one kind, with one of them as an example.

    The example is the earliest failure with an error text. If none has a text, it is the earliest
    one of all, and its text is its HTTP status, such as "HTTP 503", or "" without one.

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
    """Yield each text with how often its index occurs; "" for an index that has no text."""
    indexes, counts = np.unique(text_indexes, return_counts=True)
    for index, count in zip(indexes.tolist(), counts.tolist(), strict=True):
        yield _text_at(index, texts), count


def _metric_values(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a metric that has one value per request.

    A metric of the client, such as the send delay, has a value for all sent requests. Others, such
    as TTFT, have one for the ok requests only.
    """
    definition = METRICS.get(metric)
    is_of_all_sent = definition is not None and definition.sample == "sent"
    selected = columns.is_known("sent_ns") if is_of_all_sent else columns.is_ok
    values = columns.measure(metric)
    return drop_undefined(values if selected.all() else values[selected])


def _time_request_amounts(columns: Columns, name: RequestAmount, slo: Slo | None) -> TimedAmounts:
    """Return when requests contributed to an amount, and how much.

    - "output": the output tokens, spread from the first to the last one.
    - "input": the prompt tokens, at the first output token, when the prompt has been processed.
    - "ok" and "good": 1 for each ok request, or for each that meets the SLO, at its end. Without an
      SLO every ok request is good.
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
    return TimedAmounts(first_token_ns, first_token_ns, columns["input_tokens"][selected])


def _time_request_ends(columns: Columns, is_counted: NDArray[np.bool_]) -> TimedAmounts:
    """Return an amount of 1 at the end of each counted request."""
    end_ns = columns["end_ns"][as_selection(is_counted)]
    # The same 1 for every request takes no memory.
    ones = np.broadcast_to(np.int64(1), len(end_ns))
    return TimedAmounts(end_ns, end_ns, ones)
