"""Adds up the records of one stage, target, class or step.

Pure numpy. `run_accumulator` splits the records of a run and merges what was added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics import outcomes, request_metrics, uncertainty
from loadgen.core.metrics.columns import (
    FAILED,
    OK,
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
    from loadgen.core.metrics.uncertainty import Range, StatisticRanges
    from loadgen.core.slo import Slo, Term
    from loadgen.core.stats.quantiles import Distribution

REQUEST_AMOUNTS = ("ok", "good", "input", "output")
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

ENDS_OF_LAST_SENT = ("issued_end", "issued_done")
"""Names of `maxima` that are not maxima: the ends of the request that was sent last, which MLPerf
LoadGen calls the last issued query."""


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


class MetricAccumulator:
    """Sums, extremes, samples and amounts of the records of one stage, target, class or step.

    It keeps its records as `columns`, and computes the samples and amounts of requests from them on
    each call, because all of them together would need several times the memory of the records.
    What is small is kept once it is computed: distributions, the ranges of statistics, and single
    values. So ask for them only after all records have been added.

    Attributes:
        slo: The SLO that these requests are judged by, or None.
        sums: Sums by name. Most are numbers of requests, such as "ok" or "with_first_token".
        minima: The smallest value of some fields, by name.
        maxima: The largest value of some fields, by name, and ENDS_OF_LAST_SENT.
        failures: The number of failures of each kind, with one of them.
        samples: Values that were added under a name, beside those of the per-request metrics.
        amounts: Amounts that were added under a name, beside REQUEST_AMOUNTS.
        columns: The records of each stage.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        """Create an accumulator without requests.

        The attributes are described at the class. For example, `sums["ok"]` is the number of ok
        requests, `minima["sent"]` the time of the first send, and `samples["session"]` has the
        duration of each conversation. The private attributes keep statistics that were computed.

        Args:
            slo: The SLO that the requests are judged by, or None.
        """
        self.slo = slo
        self.sums: dict[str, int] = {}
        self.minima: dict[str, int] = {}
        self.maxima: dict[str, int] = {}
        self.failures: dict[str, FailureCount] = {}
        self.samples: dict[str, Values] = {}
        self.amounts: dict[str, Amounts] = {}
        self.columns: list[Columns] = []

        # What was computed once, by the name of the metric.
        self._distributions: dict[str, Distribution] = {}
        self._statistic_ranges: dict[str, StatisticRanges | None] = {}

        # Single values, by the name of the metric and the index in its ordered sample.
        self._value_by_index: dict[tuple[str, int], float] = {}

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

    def sample(self, name: str) -> Values:
        """Return the values of a per-request metric, or those that were added under this name."""
        if not _sampled_requests(name):
            return self.samples.setdefault(name, Values())
        blocks = (block for columns in self.columns for block in columns.blocks())
        values = (_metric_values(block, name) for block in blocks)
        return Values.of_arrays(values, max_count=sum(map(len, self.columns)))

    def distribution(self, name: str) -> Distribution:
        """Return the distribution of a sample."""
        if name not in self._distributions:
            sample = self.sample(name)
            self._distributions[name] = sample.distribution()
            self._keep_quantiles(name, sample)
        return self._distributions[name]

    def _keep_quantiles(self, metric: str, sample: Values) -> None:
        """Keep the quantiles of a sample in ns, which SLO terms need; a distribution is in ms."""
        if not sample.count:
            return
        for _, probability in QUANTILES:
            index = quantile_index(sample.count, probability)
            self._value_by_index[metric, index] = sample.nth(index)

    def nth_value(self, metric: str, index_in_order: int) -> float:
        """Return the value of a per-request metric at an index of its ordered sample."""
        key = (metric, index_in_order)
        if key not in self._value_by_index:
            self._value_by_index[key] = self.sample(metric).nth(index_in_order)
        return self._value_by_index[key]

    def statistic_ranges(self, metric: str) -> StatisticRanges | None:
        """Return the ranges of the statistics of a metric, or None if they are certain."""
        if metric not in self._statistic_ranges:
            bounds = uncertainty.bound_metric(self.columns, metric)
            self._statistic_ranges[metric] = None if bounds is None else bounds.bound_statistics()
        return self._statistic_ranges[metric]

    def bound_nth_value(self, metric: str, index_in_order: int) -> Range | None:
        """Return the bounds of the value of a metric at an index of its ordered sample.

        An event may have arrived earlier than its timestamp, so a latency lies within bounds. They
        are kept once they were computed, because several SLO terms may need the same value. Returns
        None if all values of the metric are certain.
        """
        ranges = self.statistic_ranges(metric)
        if ranges is None:
            return None

        known_bounds = ranges.by_index.get(index_in_order)
        if known_bounds is not None:
            return known_bounds

        # The bounds of all values were not stored, because they take much memory. So they are
        # computed again for this value.
        sample_bounds = uncertainty.bound_metric(self.columns, metric)
        if sample_bounds is None:
            return None

        value_bounds = sample_bounds.bound_nth(index_in_order)
        ranges.by_index[index_in_order] = value_bounds
        return value_bounds

    def amount(self, name: str) -> Amounts:
        """Return one of REQUEST_AMOUNTS, or the amounts that were added under this name."""
        if name not in REQUEST_AMOUNTS:
            return self.amounts.setdefault(name, Amounts())
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
        """Add the values that are known, which are those other than -1, and their number."""
        known = values[as_selection(values >= 0)]
        self.add_to_sum(name, known.sum(dtype=np.int64))
        self.add_to_sum(name + "_known", len(known))

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
        self._merge_maxima(other)
        for name, count in other.sums.items():
            self.add_to_sum(name, count)

        for name, value in other.minima.items():
            self.minima[name] = min(self.minima.get(name, NEVER_NS), value)

        for kind, failures in other.failures.items():
            self.add_failures(kind, failures)

        for name, sample in other.samples.items():
            self.sample(name).merge(sample)

        for name, amounts in other.amounts.items():
            self.amount(name).merge(amounts)

        self.columns += other.columns

    def _merge_maxima(self, other: MetricAccumulator) -> None:
        """Merge the entries of `maxima` of another accumulator into those of this one.

        Of two values the larger one stays, with one exception. The two entries ENDS_OF_LAST_SENT
        are no maxima: they tell when the request that was sent last ended. They come from the
        accumulator that has the later send.
        """
        other_has_last_sent = other.maximum("sent") > self.maximum("sent")
        for name, value in other.maxima.items():
            is_end_of_last_sent = name in ENDS_OF_LAST_SENT
            if not is_end_of_last_sent:
                self.maxima[name] = max(self.maximum(name), value)
            elif other_has_last_sent:
                self.maxima[name] = value

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

    def _add_block(self, columns: Columns, texts: Sequence[str], is_open_loop: bool) -> None:
        """Add a block of records to the sums, the extremes and the failures.

        Args:
            columns: The records of the block, which are a part of those that `add` got.
            texts: Error texts, finish reasons and remarks, which `columns["text"]` indexes.
            is_open_loop: Whether the stage is an open loop, whose due times are its offered load.
        """
        ok = columns.where(OK)
        self._count_by_status(columns)

        for name in ("resent", "bytes_sent", "bytes_received"):
            self.add_to_sum(name, columns[name].sum(dtype=np.int64))

        self._add_due_times(columns, is_open_loop)
        self._add_sent_times(columns)
        self._add_end_times(columns)
        self._count_first_tokens(columns)
        self._add_tokens(columns, ok)
        self._add_failures_by_kind(columns, texts)
        self._count_finish_reasons(columns, texts)
        self._count_remarks(columns, texts)
        self._count_without_tpot(columns, ok)
        self.add_to_sum("stalled", (columns.measure("max_gap")[ok] > STALL_NS).sum())

        if self.slo is not None:
            self._count_slo_outcomes(columns, ok, self.slo)

    def _count_by_status(self, columns: Columns) -> None:
        """Count all records, those of each status, and the starts.

        A start is a single request or the first one of a conversation or task.
        """
        self.add_to_sum("recorded", len(columns))
        self.add_to_sum("starts", (columns["turn"] == 0).sum())
        for code, status in enumerate(STATUSES):
            self.add_to_sum(status, columns.where(code).sum())

    def _count_without_tpot(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Count the ok requests without a TPOT, the time per output token after the first event.

        - "tpot_undefined": all of them.
        - "tpot_no_span": those with enough tokens for a TPOT, all of which came at one instant.
        - "tpot_no_output": those with enough tokens for a TPOT, but no event that could be timed.

        Requests that ask for no output, such as embeddings, are left out.
        """
        is_examined = ok & ~columns.request_no_output
        has_no_tpot = columns.measure("tpot") == UNDEFINED
        has_no_span = request_metrics.has_no_span(columns)
        lacks_output = request_metrics.lacks_output(columns)
        self.add_to_sum("tpot_undefined", (is_examined & has_no_tpot).sum())
        self.add_to_sum("tpot_no_span", (is_examined & has_no_span).sum())
        self.add_to_sum("tpot_no_output", (is_examined & lacks_output).sum())

    def _count_slo_outcomes(self, columns: Columns, ok: NDArray[np.bool_], slo: Slo) -> None:
        """Count the good requests, which meet all terms of the SLO, and those that miss a term.

        At the end of a run, the client waits a while for responses and then cuts off the remaining
        requests, which are unfinished. Such a request counts as a miss if it had exceeded the limit
        of a term when it was cut off. Otherwise it does not count at all.
        """
        is_unfinished_miss = columns.where(UNFINISHED) & outcomes.is_counted(columns, slo)
        self.add_to_sum("unfinished_misses", is_unfinished_miss.sum())
        self.add_to_sum("good", outcomes.meets_slo(columns, slo).sum())
        for term_number, term in enumerate(slo.terms):
            # A term may also limit the gaps of all requests together. It judges no single request.
            if per_request(term.metric):
                self._count_term_outcomes(columns, ok, term_number, term)

    def _count_term_outcomes(
        self, columns: Columns, ok: NDArray[np.bool_], term_number: int, term: Term
    ) -> None:
        """Count the requests by which a term of the SLO is judged.

        They are the ok requests with a value of its metric, those of them whose value is over its
        limit, and the unfinished requests that had exceeded the limit when they were cut.

        Args:
            columns: The records.
            ok: Which of them are ok.
            term_number: The index of the term in the SLO.
            term: The term.
        """
        values = drop_undefined(columns.measure(term.metric)[ok])
        is_over_when_cut = outcomes.is_over_when_cut(columns, term)
        self.add_to_sum(term_sum_name(term_number, "values"), len(values))
        self.add_to_sum(term_sum_name(term_number, "over"), (values > term.limit_ns).sum())
        self.add_to_sum(term_sum_name(term_number, "unfinished_over"), is_over_when_cut.sum())

    def _add_due_times(self, columns: Columns, is_open_loop: bool) -> None:
        """Add when requests were due, which bounds the measurement window and gives offered rates.

        - "due": all requests that reached their due time.
        - "open_due": those of open loops, which alone have an offered rate.
        - "start": the latest start, which is a single request or the first one of a task.
        """
        reached_due_time = columns.reached_due_time
        due_ns = columns["due_ns"][reached_due_time]
        self.add_range("due", due_ns)
        if is_open_loop:
            self.add_range("open_due", due_ns)
        is_start = reached_due_time & (columns["turn"] <= 0)
        self.add_maximum("start", columns["due_ns"][is_start])

    def _add_end_times(self, columns: Columns) -> None:
        """Add the latest end and the latest token, which bound the measurement window."""
        for name in ("done_ns", "last_token_ns"):
            self.add_maximum(name, columns[name])

    def _count_first_tokens(self, columns: Columns) -> None:
        """Count the requests with a first token, and those whose timestamp the kernel took."""
        has_first_token = columns["first_token_ns"] >= 0
        self.add_to_sum("with_first_token", has_first_token.sum())
        self.add_to_sum("kernel_timestamps", columns["kernel_stamp"][has_first_token].sum())

    def _add_sent_times(self, columns: Columns) -> None:
        """Add the first and the last time of a send, and the ends of the request sent last."""
        latest_before = self.maximum("sent")
        self.add_range("sent", columns["sent_ns"][columns["sent_ns"] >= 0])
        has_later_request = self.maximum("sent") > latest_before
        if has_later_request:
            last = int(np.argmax(columns["sent_ns"]))
            self.maxima["issued_end"] = int(columns["end_ns"][last])
            self.maxima["issued_done"] = int(columns["done_ns"][last])

    def _add_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the token counts of requests, and what is needed to check them against each other."""
        for name in TOKEN_FIELDS:
            self.add_known(name, columns[name][as_selection(ok)])

        self._add_tokens_of_cached(columns, ok)
        self._add_tokens_of_failed(columns)
        self._add_tokens_of_events(columns, ok)
        self._add_tokens_beyond_events(columns, ok)
        self._count_impossible_counts(columns, ok)
        self._add_requested_tokens(columns, ok)
        self._add_built_tokens(columns, ok)
        self._count_token_sources(columns, ok)

    def _add_tokens_of_cached(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the prompt tokens of the ok requests whose cached tokens are known.

        They are the denominator of the cached share.
        """
        is_cached_known = ok & (columns["cached_tokens"] >= 0)
        self.add_known("input_tokens_of_cached", columns["input_tokens"][is_cached_known])

    def _add_tokens_of_failed(self, columns: Columns) -> None:
        """Add the tokens of failed requests in sums of their own. A provider may bill them."""
        failed = columns.where(FAILED)
        self.add_known("failed_input", columns["input_tokens"][failed])
        self.add_known("failed_output", columns["output_tokens"][failed])

    def _add_tokens_of_events(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the output events of ok requests and the tokens that they carried.

        Some servers count, and bill, reasoning tokens that they never stream. So there are fewer
        streamed tokens than billed ones.
        """
        has_both = (columns["output_tokens"] >= 0) & (columns["output_events"] > 0)
        selected = as_selection(ok & has_both)
        streamed_tokens = request_metrics.streamed_tokens(columns)[selected]
        self.add_to_sum("output_events", columns["output_events"][selected].sum(dtype=np.int64))
        self.add_to_sum("streamed_tokens", streamed_tokens.sum(dtype=np.int64))
        self.add_to_sum("billed_tokens", columns["output_tokens"][selected].sum(dtype=np.int64))

    def _add_tokens_beyond_events(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add by how much the tokens of ok responses outnumber their output events.

        If there are many such surplus tokens, events carry several tokens, and gaps between events
        are not gaps between tokens. A token without text, such as an end-of-sequence token, has no
        event and is no surplus: 13 tokens in 10 events, one of them without text, are a surplus of
        2. Only responses whose tokens were counted exactly are used.
        """
        has_exact_count = np.isin(columns["output_source"], EXACT_SOURCES)
        has_events = columns["output_events"] > 0
        selected = as_selection(ok & has_events & has_exact_count)

        events = columns["output_events"][selected].astype(np.int64)
        tokens = request_metrics.streamed_tokens(columns)[selected].astype(np.int64)
        finish_reasons = columns["finish_reason"][selected]
        textless_tokens = request_metrics.count_textless_tokens(finish_reasons, tokens)
        surplus_tokens = np.maximum(tokens - textless_tokens - events, 0)

        self.add_to_sum("exact_events", events.sum())
        self.add_to_sum("exact_tokens", tokens.sum())
        self.add_to_sum("surplus_tokens", surplus_tokens.sum())

    def _count_impossible_counts(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Count the responses whose number of output tokens cannot be true.

        A response cannot have fewer tokens than output events ("understated_counts"), nor more than
        were requested. "conflicting_counts" has the responses of both kinds, and "exact_counts" all
        that were examined, whose tokens the server or a tokenizer counted.
        """
        is_exact_source = np.isin(columns["output_source"], EXACT_SOURCES)
        has_output_count = ~columns.request_no_output & (columns["output_tokens"] >= 0)
        is_examined = ok & has_output_count & is_exact_source
        is_understated = is_examined & request_metrics.understates(columns)
        is_overstated = is_examined & request_metrics.overstates(columns)
        self.add_to_sum("exact_counts", is_examined.sum())
        self.add_to_sum("conflicting_counts", (is_understated | is_overstated).sum())
        self.add_to_sum("understated_counts", is_understated.sum())

    def _add_requested_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the requested and the received output tokens of the ok requests that have both.

        "length_mismatches" are the requests for which these numbers differ.
        """
        received = columns["output_tokens"]
        requested = columns["asked_output"]
        has_both = ok & (requested > 0) & (received >= 0)
        self.add_to_sum("requests_with_length", has_both.sum())
        self.add_to_sum("requested_tokens", requested[has_both].sum(dtype=np.int64))
        self.add_to_sum("received_tokens", received[has_both].sum(dtype=np.int64))
        self.add_to_sum("length_mismatches", (requested != received)[has_both].sum())

    def _add_built_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the prompt tokens of ok requests, as the client and as the server counted them.

        A later check compares both sums. Only requests that have both counts are added. The client
        has counted the tokens of a prompt if it built the prompt itself (`built_tokens`). Requests
        that ask for no output, such as embeddings, are left out.
        """
        client_counts = columns["built_tokens"]
        server_counts = columns["input_tokens"]
        is_from_server = columns["input_source"] == SOURCES.index("server")
        has_server_count = is_from_server & (server_counts >= 0)
        has_client_count = client_counts > 0
        is_compared = ok & ~columns.request_no_output & has_server_count & has_client_count
        self.add_to_sum("prompts_compared", is_compared.sum())
        self.add_to_sum("prompt_tokens_built", client_counts[is_compared].sum(dtype=np.int64))
        self.add_to_sum("prompt_tokens_of_server", server_counts[is_compared].sum(dtype=np.int64))

    def _count_token_sources(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Count the ok requests by the source of their token counts, for input and for output.

        A request that asks for no output has no output to count. It is in "output_source_unasked".
        """
        with_output = ok & ~columns.request_no_output
        self._count_by_source("input_source", columns["input_source"][ok])
        self._count_by_source("output_source", columns["output_source"][with_output])
        self.add_to_sum("output_source_unasked", (ok & columns.request_no_output).sum())

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
        ok = columns.where(OK)
        has_other_reason = columns["finish_reason"] == FINISH["other"]

        requests_by_code = np.bincount(columns["finish_reason"][ok & ~has_other_reason]).tolist()
        for code, requests in enumerate(requests_by_code):
            if requests:
                self.add_to_sum(FINISH_PREFIX + (FINISH_REASONS[code] or "none"), requests)

        text_indexes = columns["text"][ok & has_other_reason]
        for reason, requests in _count_texts(text_indexes, texts):
            self.add_to_sum(FINISH_PREFIX + (reason or "other"), requests)

    def _count_remarks(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the ok requests by remark, a text about something unusual in the response.

        The text of a request with the finish reason "other" is that reason, and no remark.
        """
        has_other_reason = columns["finish_reason"] == FINISH["other"]
        has_remark = columns.where(OK) & ~has_other_reason & (columns["text"] >= 0)
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


def _summarize_failures(
    columns: Columns, rows: NDArray[np.int64], texts: Sequence[str]
) -> FailureCount:
    """Return the number of failures of one kind, with the one that is shown for all of them.

    The earliest failure with an error text is shown. If none has a text, it is the earliest one of
    all, with its HTTP status as the text.

    Args:
        columns: The records.
        rows: The indices of the failed requests.
        texts: The error texts, which `columns["text"]` indexes.
    """
    rows_with_text = rows[columns["text"][rows] >= 0]
    candidates = rows_with_text if len(rows_with_text) else rows
    earliest = candidates[np.argmin(columns["due_ns"][candidates])]
    error_text = _text_at(int(columns["text"][earliest]), texts)
    status = int(columns["http_status"][earliest])
    status_text = f"HTTP {status}" if status else ""

    return FailureCount(
        requests=len(rows),
        due_ns=int(columns["due_ns"][earliest]),
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


def _sampled_requests(metric: str) -> str:
    """Return which requests have values of a metric, "ok" or "sent"; "" if none has."""
    definition = METRICS.get(metric)
    return "" if definition is None or definition.values is None else definition.sample


def _metric_values(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a per-request metric, of the requests that belong to its sample."""
    if _sampled_requests(metric) == "sent":
        selected = columns["sent_ns"] >= 0
    else:
        selected = columns.where(OK)
    values = columns.measure(metric)
    return drop_undefined(values if selected.all() else values[selected])


def _time_request_amounts(columns: Columns, name: str, slo: Slo | None) -> TimedAmounts:
    """Return when requests contributed to one of REQUEST_AMOUNTS, and how much.

    - "output": the output tokens, spread from the first to the last one.
    - "input": the prompt tokens, at the first output token, when the prompt has been processed.
    - "ok" and "good": 1 for each ok request, or for each that meets the SLO, at its end. Without an
      SLO every ok request is good.
    """
    match name:
        case "output":
            return request_metrics.time_output_tokens(columns)
        case "input":
            return _time_prompt_tokens(columns)
        case "good" if slo is not None:
            return _time_request_ends(columns, outcomes.meets_slo(columns, slo))
        case _:
            return _time_request_ends(columns, columns.where(OK))


def _time_prompt_tokens(columns: Columns) -> TimedAmounts:
    """Return the prompt tokens of each ok request at the time of its first output token."""
    has_prompt_tokens = columns.where(OK) & (columns["input_tokens"] >= 0)
    selected = as_selection(has_prompt_tokens)
    first_token_ns = request_metrics.time_or_end(columns, "first_token_ns", selected)
    return TimedAmounts(first_token_ns, first_token_ns, columns["input_tokens"][selected])


def _time_request_ends(columns: Columns, is_counted: NDArray[np.bool_]) -> TimedAmounts:
    """Return an amount of 1 at the end of each counted request."""
    end_ns = columns["end_ns"][as_selection(is_counted)]
    # The same 1 for every request takes no memory.
    ones = np.broadcast_to(np.int64(1), len(end_ns))
    return TimedAmounts(end_ns, end_ns, ones)
