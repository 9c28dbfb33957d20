"""Adds up the records of one stage, target, class or step.

Pure numpy. `run_accumulator` splits the records of a run and merges what was added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from loadgen.core.limits import LONG_ANSWER, STALL_NS
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
from loadgen.core.stats.amounts import Amounts
from loadgen.core.stats.quantiles import QUANTILES, Values, quantile_index
from loadgen.core.units import LONGEST_NS
from loadgen.figures import METRICS, per_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.uncertainty import Range, StatisticRanges
    from loadgen.core.slo import Slo
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


TermCount: TypeAlias = Literal["values", "over", "unfinished_over"]
"""What is counted for an SLO term: requests with a value, those over the limit, and unfinished ones
that are over it already."""


def term_sum(term_number: int, count: TermCount) -> str:
    """Return the name of the sum of a count for a term of the SLO."""
    return f"term{term_number}_{count}"


def sampled_metrics() -> list[str]:
    """Return the names of the metrics that have a value per request."""
    return [definition.name for definition in METRICS.available() if definition.values]


class FailureCount(NamedTuple):
    """How many requests failed in one way, and the failure that is shown for all of them.

    That is the one with a text that was due first. A failure without a text has a `due_ns` later
    than any with one.
    """

    requests: int
    due_ns: int
    text: str


class MetricAccumulator:
    """Sums, extremes, samples and amounts of the records of one stage, target, class or step.

    It keeps its records as `columns`, and computes the samples and amounts of requests from them on
    each call, because all of them together would need several times the memory of the records.
    What is small is kept once it is computed: distributions, the ranges of statistics, and single
    values. So ask for them only after all records have been added.

    Attributes:
        slo: The SLO that these requests are judged by, or None.
        sums: Sums by name.
        least: The smallest value of some fields.
        most: The largest value of some fields. `issued_end` and `issued_done` belong to the request
            that was sent last.
        failures: The number of failures of each kind, with one of them.
        samples: Values that were added under a name, beside those of the per-request metrics.
        amounts: Amounts that were added under a name, beside REQUEST_AMOUNTS.
        columns: The records of each stage.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        """Begin without requests. The caches fill when a summary first asks for a statistic."""
        self.slo = slo
        self.sums: dict[str, int] = {}
        self.least: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.failures: dict[str, FailureCount] = {}
        self.samples: dict[str, Values] = {}
        self.amounts: dict[str, Amounts] = {}
        self.columns: list[Columns] = []
        self._distributions: dict[str, Distribution] = {}
        self._statistic_ranges: dict[str, StatisticRanges | None] = {}
        self._ordered_values: dict[tuple[str, int], float] = {}

    def sum(self, name: str) -> int:
        """Return the sum of this name, 0 if nothing was added to it."""
        return self.sums.get(name, 0)

    def sums_with_prefix(self, prefix: str) -> dict[str, int]:
        """Return the sums whose names begin with a prefix, without it, the largest first."""
        sums = [
            (name.removeprefix(prefix), total)
            for name, total in self.sums.items()
            if name.startswith(prefix)
        ]
        return dict(sorted(sums, key=lambda item: (-item[1], item[0])))

    def sum_known(self, field: str) -> int | None:
        """Return the sum of a field over the ok requests that have it, or None if none has it."""
        return self.sums[field] if self.sum(field + "_known") else None

    def latest(self, name: str) -> int:
        """Return the largest value of a field, or NO_TIME without any."""
        return self.most.get(name, NO_TIME)

    def sample(self, name: str) -> Values:
        """Return the values of a per-request metric, or those that were added under this name."""
        if not _sampled_requests(name):
            return self.samples.setdefault(name, Values())
        blocks = (block for columns in self.columns for block in columns.blocks())
        values = (_metric_values(block, name) for block in blocks)
        return Values.of(values, max_count=sum(map(len, self.columns)))

    def distribution(self, name: str) -> Distribution:
        """Return the distribution of a sample."""
        if name not in self._distributions:
            sample = self.sample(name)
            self._distributions[name] = sample.distribution()
            self._keep_quantiles(name, sample)
        return self._distributions[name]

    def _keep_quantiles(self, metric: str, sample: Values) -> None:
        """Keep the quantiles of a sample, which SLO terms need with all digits."""
        for _, p in QUANTILES if sample.count else ():
            index = quantile_index(sample.count, p)
            self._ordered_values[metric, index] = sample.nth(index)

    def nth_value(self, metric: str, index_in_order: int) -> float:
        """Return the value of a per-request metric at an index of its ordered sample."""
        key = (metric, index_in_order)
        if key not in self._ordered_values:
            self._ordered_values[key] = self.sample(metric).nth(index_in_order)
        return self._ordered_values[key]

    def statistic_ranges(self, metric: str) -> StatisticRanges | None:
        """Return the ranges of the statistics of a metric, or None if they are certain."""
        if metric not in self._statistic_ranges:
            bounds = uncertainty.bound_metric(self.columns, metric)
            self._statistic_ranges[metric] = None if bounds is None else bounds.ranges()
        return self._statistic_ranges[metric]

    def nth_range(self, metric: str, index_in_order: int) -> Range | None:
        """Return the range of the value at an index of an ordered sample, or None if certain."""
        ranges = self.statistic_ranges(metric)
        if ranges is None:
            return None
        if index_in_order not in ranges.by_index:
            bounds = uncertainty.bound_metric(self.columns, metric)
            if bounds is None:
                return None
            ranges.by_index[index_in_order] = bounds.nth(index_in_order)
        return ranges.by_index[index_in_order]

    def amount(self, name: str) -> Amounts:
        """Return one of REQUEST_AMOUNTS, or the amounts that were added under this name."""
        if name not in REQUEST_AMOUNTS:
            return self.amounts.setdefault(name, Amounts())
        amounts = Amounts()
        for columns in self.columns:
            amounts.add(*_request_amounts(columns, name, self.slo))
        return amounts

    def add_to_sum(self, name: str, value: int | np.integer[Any]) -> None:
        """Add a value to the sum of this name."""
        self.sums[name] = self.sum(name) + int(value)

    def add_range(self, name: str, values: NDArray[np.int64]) -> None:
        """Record the count, the minimum and the maximum of these values."""
        self.add_to_sum(name, len(values))
        if len(values):
            self.least[name] = min(self.least.get(name, NEVER_NS), int(values.min()))
            self.add_maximum(name, values)

    def add_maximum(self, name: str, values: NDArray[np.int64]) -> None:
        """Record the maximum of these values."""
        self.most[name] = max(self.latest(name), int(values.max(initial=NO_TIME)))

    def add_known(self, name: str, values: NDArray[np.int64]) -> None:
        """Add the values that are known, which are those other than -1, and their number."""
        known = values[as_selection(values >= 0)]
        self.add_to_sum(name, known.sum(dtype=np.int64))
        self.add_to_sum(name + "_known", len(known))

    def add_failures(self, kind: str, added: FailureCount) -> None:
        """Count failures of a kind, and keep the one that was due first."""
        known = self.failures.get(kind, FailureCount(0, NEVER_NS, ""))
        first = added if added.due_ns < known.due_ns else known
        self.failures[kind] = first._replace(requests=known.requests + added.requests)

    def merge(self, other: MetricAccumulator) -> None:
        """Add what another one holds. The other one does not change.

        The ends named "issued_..." are those of the request that was sent last, so they are taken
        from the accumulator with the later one and are no maximum.
        """
        issued_later = other.latest("sent") > self.latest("sent")
        for name, count in other.sums.items():
            self.add_to_sum(name, count)
        for name, value in other.least.items():
            self.least[name] = min(self.least.get(name, NEVER_NS), value)
        for name, value in other.most.items():
            if name not in ("issued_end", "issued_done"):
                self.most[name] = max(self.latest(name), value)
            elif issued_later:
                self.most[name] = value
        for kind, failures in other.failures.items():
            self.add_failures(kind, failures)
        for name, sample in other.samples.items():
            self.sample(name).merge(sample)
        for name, amounts in other.amounts.items():
            self.amount(name).merge(amounts)
        self.columns += other.columns

    def add(self, columns: Columns, texts: Sequence[str], *, is_open_loop: bool) -> None:
        """Add records of one stage. `columns["text"]` indexes `texts`."""
        self.columns.append(columns)
        for block in columns.blocks():
            if len(block):
                self._add_block(block, texts, is_open_loop)

    def _add_block(self, columns: Columns, texts: Sequence[str], is_open_loop: bool) -> None:
        """Add a block of records to the sums, the extremes and the failures.

        Requests that have no output, such as embeddings, count for no metric of output.
        """
        ok = columns.where(OK)
        self.add_to_sum("recorded", len(columns))
        self.add_to_sum("starts", (columns["turn"] == 0).sum())
        for code, status in enumerate(STATUSES):
            self.add_to_sum(status, columns.where(code).sum())
        for name in ("resent", "bytes_sent", "bytes_received"):
            self.add_to_sum(name, columns[name].sum(dtype=np.int64))
        self._add_times(columns, is_open_loop)
        self._add_tokens(columns, ok)
        self._add_failures_by_kind(columns, texts)
        self._add_finish_reasons(columns, texts)
        with_output = ok & ~columns.request_no_output
        self.add_to_sum("output_source_unasked", (ok & columns.request_no_output).sum())
        self.add_to_sum("tpot_undefined", (columns.measure("tpot")[with_output] == UNDEFINED).sum())
        self.add_to_sum("tpot_no_span", request_metrics.has_no_span(columns)[with_output].sum())
        self.add_to_sum("tpot_no_output", request_metrics.lacks_output(columns)[with_output].sum())
        self.add_to_sum("stalled", (columns.measure("max_gap")[ok] > STALL_NS).sum())
        if self.slo is not None:
            self._add_slo_outcomes(columns, ok, self.slo)

    def _add_slo_outcomes(self, columns: Columns, ok: NDArray[np.bool_], slo: Slo) -> None:
        """Count the requests that meet the SLO, and those that have a value and miss each term.

        An unfinished request is a miss if it was over a limit already when the drain ended.
        """
        is_unfinished_miss = columns.where(UNFINISHED) & outcomes.is_counted(columns, slo)
        self.add_to_sum("unfinished_misses", is_unfinished_miss.sum())
        self.add_to_sum("good", outcomes.meets(columns, slo).sum())
        for term_number, term in enumerate(slo.terms):
            if per_request(term.metric):
                values = drop_undefined(columns.measure(term.metric)[ok])
                self.add_to_sum(term_sum(term_number, "values"), len(values))
                self.add_to_sum(term_sum(term_number, "over"), (values > term.limit_ns).sum())
                is_over = outcomes.is_over_when_cut(columns, term)
                self.add_to_sum(term_sum(term_number, "unfinished_over"), is_over.sum())

    def _add_times(self, columns: Columns, is_open_loop: bool) -> None:
        """Add the range of due and sent times, the latest ends, and the sources of timestamps."""
        due_ns = columns["due_ns"][columns.reached_due_time]
        self.add_range("due", due_ns)
        is_start = columns.reached_due_time & (columns["turn"] <= 0)
        self.add_maximum("start", columns["due_ns"][is_start])
        if is_open_loop:
            self.add_range("open_due", due_ns)
        self._add_sent_times(columns)
        for name in ("done_ns", "last_token_ns"):
            self.add_maximum(name, columns[name])
        has_first_token = columns["first_token_ns"] >= 0
        self.add_to_sum("with_first_token", has_first_token.sum())
        self.add_to_sum("kernel_timestamps", columns["kernel_stamp"][has_first_token].sum())

    def _add_sent_times(self, columns: Columns) -> None:
        """Add the range of sent times, and keep the ends of the request that was sent last."""
        latest_before = self.latest("sent")
        self.add_range("sent", columns["sent_ns"][columns["sent_ns"] >= 0])
        if self.latest("sent") > latest_before:
            last = int(np.argmax(columns["sent_ns"]))
            self.most["issued_end"] = int(columns["end_ns"][last])
            self.most["issued_done"] = int(columns["done_ns"][last])

    def _add_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the token counts of all sources, and how they compare with each other."""
        for name in TOKEN_FIELDS:
            self.add_known(name, columns[name][as_selection(ok)])
        prompt = columns["input_tokens"]
        self.add_known("input_tokens_of_cached", prompt[ok & (columns["cached_tokens"] >= 0)])
        failed = columns.where(FAILED)
        self.add_known("failed_input", prompt[failed])
        self.add_known("failed_output", columns["output_tokens"][failed])
        self._add_tokens_of_events(columns, ok)
        self._add_tokens_without_event(columns, ok)
        self._add_conflicting_counts(columns, ok)
        self._add_requested_tokens(columns, ok)
        self._add_built_tokens(columns, ok)
        self._add_token_sources(columns, ok)

    def _add_tokens_of_events(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the output events of ok requests, and the streamed and billed tokens they carried."""
        has_both = (columns["output_tokens"] >= 0) & (columns["output_events"] > 0)
        selected = as_selection(ok & has_both)
        streamed_tokens = request_metrics.streamed_tokens(columns)[selected]
        self.add_to_sum("output_events", columns["output_events"][selected].sum(dtype=np.int64))
        self.add_to_sum("streamed_tokens", streamed_tokens.sum(dtype=np.int64))
        self.add_to_sum("billed_tokens", columns["output_tokens"][selected].sum(dtype=np.int64))

    def _add_tokens_without_event(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the tokens of exactly counted responses that exceed one token per output event.

        A response may have one token without text: the one that ends it, or any one of many. Such a
        token needs no event.
        """
        is_exact = np.isin(columns["output_source"], EXACT_SOURCES)
        selected = as_selection(ok & (columns["output_events"] > 0) & is_exact)
        events = columns["output_events"][selected].astype(np.int64)
        tokens = request_metrics.streamed_tokens(columns)[selected].astype(np.int64)
        is_ended_by_token = columns["finish_reason"][selected] != FINISH["length"]
        textless_tokens = is_ended_by_token | (tokens >= LONG_ANSWER)
        self.add_to_sum("exact_events", events.sum())
        self.add_to_sum("exact_tokens", tokens.sum())
        self.add_to_sum("surplus_tokens", np.maximum(tokens - events - textless_tokens, 0).sum())

    def _add_conflicting_counts(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Count the responses whose token counts conflict with their events or with the request."""
        is_exact = np.isin(columns["output_source"], EXACT_SOURCES)
        counted = ok & ~columns.request_no_output & (columns["output_tokens"] >= 0) & is_exact
        understated = counted & request_metrics.understates(columns)
        overstated = counted & request_metrics.overstates(columns)
        self.add_to_sum("exact_counts", counted.sum())
        self.add_to_sum("conflicting_counts", (understated | overstated).sum())
        self.add_to_sum("understated_counts", understated.sum())

    def _add_requested_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the requested output tokens, and the output tokens of the same requests."""
        output = columns["output_tokens"]
        requested = columns["asked_output"]
        comparable = ok & (requested > 0) & (output >= 0)
        self.add_to_sum("requests_with_length", comparable.sum())
        self.add_to_sum("requested_tokens", requested[comparable].sum(dtype=np.int64))
        self.add_to_sum("received_tokens", output[comparable].sum(dtype=np.int64))
        self.add_to_sum("length_mismatches", (requested != output)[comparable].sum())

    def _add_built_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the prompt tokens as built here, and as the server counted them."""
        prompt = columns["input_tokens"]
        built = columns["built_tokens"]
        is_of_server = columns["input_source"] == SOURCES.index("server")
        has_both = ok & ~columns.request_no_output & is_of_server & (built > 0) & (prompt >= 0)
        self.add_to_sum("prompts_compared", has_both.sum())
        self.add_to_sum("prompt_tokens_built", built[has_both].sum(dtype=np.int64))
        self.add_to_sum("prompt_tokens_of_server", prompt[has_both].sum(dtype=np.int64))

    def _add_token_sources(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Count the ok requests by the source of their token counts."""
        with_output = ok & ~columns.request_no_output
        for side, selected in (("input", ok), ("output", with_output)):
            requests = np.bincount(columns[f"{side}_source"][selected], minlength=len(SOURCES))
            for source, count in zip(SOURCES, requests.tolist(), strict=True):
                self.add_to_sum(f"{side}_source_{source or 'none'}", count)

    def _add_finish_reasons(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the ok requests by finish reason and by what else is unusual about them.

        The text of an ok request is its finish reason if FINISH_REASONS lacks it, else a remark
        (`record.text_of`).
        """
        ok = columns.where(OK)
        reasons = columns["finish_reason"][ok]
        text_numbers = columns["text"][ok]
        other = reasons == FINISH["other"]
        for code, count in enumerate(np.bincount(reasons[~other]).tolist()):
            if count:
                self.add_to_sum(f"{FINISH_PREFIX}{FINISH_REASONS[code] or 'none'}", count)
        for text, count in _count_texts(text_numbers[other], texts):
            self.add_to_sum(FINISH_PREFIX + (text or "other"), count)
        for text, count in _count_texts(text_numbers[~other & (text_numbers >= 0)], texts):
            if text:
                self.add_to_sum(REMARK_PREFIX + text, count)

    def _add_failures_by_kind(self, columns: Columns, texts: Sequence[str]) -> None:
        """Count the failures of each kind, and the workers that died.

        A kind without a name is that of requests that did not fail. Unfinished requests did not
        fail either.
        """
        for code in np.flatnonzero(np.bincount(columns["kind"])).tolist():
            kind = KINDS[code]
            if not kind or kind == "unfinished":
                continue
            rows = np.flatnonzero(columns["kind"] == code)
            if kind == "worker_died":
                for worker in np.unique(columns["worker"][rows]).tolist():
                    self.add_to_sum(f"{DEAD_WORKER_PREFIX}{worker}", 1)
            self.add_failures(kind, _first_failure(columns, rows, texts))


def _first_failure(columns: Columns, rows: NDArray[np.int64], texts: Sequence[str]) -> FailureCount:
    """Return the number of these failed requests, with the one that was due first.

    Requests with a text come before all others. Without one, the text is the HTTP status.
    """
    rows_with_text = rows[columns["text"][rows] >= 0]
    candidates = rows_with_text if len(rows_with_text) else rows
    first = candidates[np.argmin(columns["due_ns"][candidates])]
    due_ns = int(columns["due_ns"][first])
    text = _text_of_number(int(columns["text"][first]), texts)
    if text:
        return FailureCount(len(rows), due_ns, text)
    status = int(columns["http_status"][first])
    return FailureCount(len(rows), due_ns + LONGEST_NS, f"HTTP {status}" if status else "")


def _text_of_number(number: int, texts: Sequence[str]) -> str:
    """Return the text with a number, or "" if there is no such text."""
    return texts[number] if 0 <= number < len(texts) else ""


def _count_texts(
    text_numbers: NDArray[np.int64], texts: Sequence[str]
) -> Iterator[tuple[str, int]]:
    """Yield each text with how often its number occurs; "" for a number that has no text."""
    numbers, counts = np.unique(text_numbers, return_counts=True)
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        yield _text_of_number(number, texts), count


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


def _request_amounts(
    columns: Columns, name: str, slo: Slo | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Return the start, the end and the amount of each request, for one of REQUEST_AMOUNTS."""
    if name == "output":
        return request_metrics.token_spans(columns)
    ok = columns.where(OK)
    if name == "input":  # a prompt has been processed when the first token comes
        known = as_selection(ok & (columns["input_tokens"] >= 0))
        first_token_ns = request_metrics.time_or_end(columns, "first_token_ns", known)
        return first_token_ns, first_token_ns, columns["input_tokens"][known]
    selected = outcomes.meets(columns, slo) if name == "good" and slo is not None else ok
    end_ns = columns["end_ns"][as_selection(selected)]
    return end_ns, end_ns, np.broadcast_to(np.int64(1), len(end_ns))
