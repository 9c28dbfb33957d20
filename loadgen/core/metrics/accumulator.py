"""Adds up the records of a run for each stage, target, class and step.

Pure numpy. `core.run_summary.summarize` turns an accumulator into a Summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadgen.core.limits import LONG_ANSWER, STALL_NS
from loadgen.core.metrics import columns as by_column
from loadgen.core.metrics import outcomes, tasks
from loadgen.core.metrics.columns import (
    FAILED,
    OK,
    UNDEFINED,
    UNFINISHED,
    Columns,
    class_of,
    defined,
    step_of,
)
from loadgen.core.metrics.tasks import TaskColumns
from loadgen.core.metrics.windows import first_round, last_round
from loadgen.core.results.manifest import StagePlan
from loadgen.core.results.record import FINISH, FINISH_REASONS, KINDS, SOURCES, STATUSES
from loadgen.core.stats.amounts import Amounts
from loadgen.core.stats.quantiles import Distribution, Values
from loadgen.core.units import LONGEST_NS
from loadgen.figures import FIGURES, per_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Slo

REQUEST_AMOUNTS = ("ok", "good", "input", "output")
"""Amounts of requests that come over time: ok requests, requests that met the SLO, and tokens."""

_EXACT_SOURCES = [SOURCES.index("server"), SOURCES.index("tokenizer")]
"""Sources of token counts that know how many tokens an event carries."""


NEVER_NS = 1 << 62  # later than any time of a run
_TOKENS = (
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


def _counted_texts(
    text_numbers: NDArray[np.int64], texts: Sequence[str]
) -> Iterator[tuple[str, int]]:
    """Yield each text with how often its number occurs; "" for a number that has no text."""
    numbers, counts = np.unique(text_numbers, return_counts=True)
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        yield texts[number] if 0 <= number < len(texts) else "", count


def _sample_of(name: str) -> str:
    """Return which requests have values of a figure, ok or sent; "" if none has."""
    row = FIGURES.called(name)
    return "" if row is None or row.values is None else row.sample


def sampled() -> list[str]:
    """Return the names of the metrics that have a value per request."""
    return [row.name for row in FIGURES.here() if row.values]


class MetricAccumulator:
    """Sums, extremes, samples and amounts of the records of one stage, target, class or step.

    It keeps its records as `columns`, and computes the samples and amounts of requests from them on
    each call, because all of them together would need several times the memory of the records.

    Attributes:
        slo: The SLO that these requests are judged by, or None.
        sums: Sums by name.
        least: The smallest value of some fields.
        most: The largest value of some fields. `issued_end` and `issued_done` belong to the request
            that was sent last.
        errors: For each kind of failure the number of failures, and the due time and the text of
            the failure that is shown: the earliest one with a text.
        samples: Values that were added under a name, beside those of the per-request metrics.
        amounts: Amounts that were added under a name, beside REQUEST_AMOUNTS.
        columns: The records of each stage.
    """

    __slots__ = (
        "_distributions",
        "amounts",
        "columns",
        "errors",
        "least",
        "most",
        "samples",
        "slo",
        "sums",
    )

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo
        self.sums: dict[str, int] = {}
        self.least: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.errors: dict[str, tuple[int, int, str]] = {}
        self.samples: dict[str, Values] = {}
        self.amounts: dict[str, Amounts] = {}
        self.columns: list[Columns] = []
        self._distributions: dict[str, Distribution] = {}

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
        """Return the largest value of a field, or -1 without any."""
        return self.most.get(name, -1)

    def sample(self, name: str) -> Values:
        """Return the values of a per-request metric, or those that were added under this name."""
        if not _sample_of(name):
            return self.samples.setdefault(name, Values())
        blocks = (block for columns in self.columns for block in columns.blocks())
        return Values.of((_values(block, name) for block in blocks), sum(map(len, self.columns)))

    def distribution(self, name: str) -> Distribution:
        """Return the distribution of a sample. Call it only after all records have been added."""
        if name not in self._distributions:
            self._distributions[name] = self.sample(name).distribution()
        return self._distributions[name]

    def amount(self, name: str) -> Amounts:
        """Return one of REQUEST_AMOUNTS, or the amounts that were added under this name."""
        if name not in REQUEST_AMOUNTS:
            return self.amounts.setdefault(name, Amounts())
        amounts = Amounts()
        for columns in self.columns:
            amounts.add(*_amounts(columns, name, self.slo))
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
        self.most[name] = max(self.latest(name), int(values.max(initial=-1)))

    def add_known(self, name: str, values: NDArray[np.int64]) -> None:
        """Add the values that are known, which are those other than -1, and their number."""
        known = values[by_column.or_all(values >= 0)]
        self.add_to_sum(name, known.sum(dtype=np.int64))
        self.add_to_sum(name + "_known", len(known))

    def add_failures(self, kind: str, count: int, due_ns: int, words: str) -> None:
        """Count failures of a kind, and keep the text of the one that was due first."""
        earlier_count, earliest_ns, text = self.errors.get(kind, (0, NEVER_NS, ""))
        if due_ns < earliest_ns:
            earliest_ns, text = due_ns, words
        self.errors[kind] = (earlier_count + count, earliest_ns, text)

    def merge(self, other: MetricAccumulator) -> None:
        """Add what another one holds. The other one does not change."""
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
        for kind, error in other.errors.items():
            self.add_failures(kind, *error)
        for name, sample in other.samples.items():
            self.sample(name).merge(sample)
        for name, amounts in other.amounts.items():
            self.amount(name).merge(amounts)
        self.columns += other.columns

    def add(self, columns: Columns, texts: Sequence[str], open_loop: bool) -> None:
        """Add records of one stage."""
        self.columns.append(columns)
        for block in filter(len, columns.blocks()):
            self._add_sums(block, texts, open_loop)

    def _add_sums(self, columns: Columns, texts: Sequence[str], open_loop: bool) -> None:
        ok = columns.where(OK)
        self.add_to_sum("rows", len(columns))
        self.add_to_sum("starts", (columns["turn"] == 0).sum())
        for code, status in enumerate(STATUSES):
            self.add_to_sum(status, columns.where(code).sum())
        for name in ("resent", "bytes_sent", "bytes_received"):
            self.add_to_sum(name, columns[name].sum(dtype=np.int64))
        self._add_times(columns, open_loop)
        self._add_tokens(columns, ok)
        self._add_errors(columns, texts)
        self._add_finishes(columns, texts)
        with_output = ok & ~columns.for_values
        self.add_to_sum("output_source_unasked", (ok & columns.for_values).sum())
        self.add_to_sum("tpot_undefined", (columns.measure("tpot")[with_output] == UNDEFINED).sum())
        self.add_to_sum("tpot_no_span", by_column.has_no_span(columns)[with_output].sum())
        self.add_to_sum("tpot_no_output", by_column.lacks_output(columns)[with_output].sum())
        self.add_to_sum("stalled", (columns.measure("max_gap")[ok] > STALL_NS).sum())
        if self.slo is not None:
            self._add_outcomes(columns, ok, self.slo)

    def _add_outcomes(self, columns: Columns, ok: NDArray[np.bool_], slo: Slo) -> None:
        self.add_to_sum(
            "unfinished_over", (columns.where(UNFINISHED) & outcomes.is_counted(columns, slo)).sum()
        )
        self.add_to_sum("good", outcomes.meets(columns, slo).sum())
        for i, term in enumerate(slo.terms):
            if per_request(term.metric):
                values = defined(columns.measure(term.metric)[ok])
                self.add_to_sum(f"term{i}", len(values))
                self.add_to_sum(f"term{i}_over", (values > term.limit_ns).sum())
                self.add_to_sum(
                    f"term{i}_unfinished_over", outcomes.is_over_when_cut(columns, term).sum()
                )

    def _add_times(self, columns: Columns, open_loop: bool) -> None:
        due = columns["due_ns"][columns.attempted]
        self.add_range("due", due)
        self.add_maximum("start", columns["due_ns"][columns.attempted & (columns["turn"] <= 0)])
        if open_loop:
            self.add_range("open_due", due)
        latest_before = self.latest("sent")
        self.add_range("sent", columns["sent_ns"][columns["sent_ns"] >= 0])
        if self.latest("sent") > latest_before:  # these records hold the request sent last so far
            last = int(np.argmax(columns["sent_ns"]))
            self.most["issued_end"] = int(columns["end_ns"][last])
            self.most["issued_done"] = int(columns["done_ns"][last])
        for name in ("done_ns", "last_token_ns"):
            self.add_maximum(name, columns[name])
        answered = columns["first_token_ns"] >= 0
        self.add_to_sum("answered", answered.sum())
        self.add_to_sum("kernel_stamps", columns["kernel_stamp"][answered].sum())

    def _add_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        for name in _TOKENS:
            self.add_known(name, columns[name][by_column.or_all(ok)])
        prompt = columns["input_tokens"]
        self.add_known("cached_base", prompt[ok & (columns["cached_tokens"] >= 0)])
        failed = columns.where(FAILED)
        self.add_known("failed_input", prompt[failed])
        self.add_known("failed_output", columns["output_tokens"][failed])
        self._add_tokens_of_events(columns, ok)
        self._add_tokens_beside_requested(columns, ok)
        self._add_tokens_beside_built(columns, ok)
        self._add_token_sources(columns, ok)

    def _add_tokens_of_events(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the output events and their tokens, and how far token counts contradict events."""
        output, events = columns["output_tokens"], columns["output_events"]
        streamed = by_column.streamed_tokens(columns)
        has_both = by_column.or_all(ok & (output >= 0) & (events > 0))
        self.add_to_sum("events", events[has_both].sum(dtype=np.int64))
        self.add_to_sum("streamed", streamed[has_both].sum(dtype=np.int64))
        self.add_to_sum("billed", output[has_both].sum(dtype=np.int64))
        is_exact = np.isin(columns["output_source"], _EXACT_SOURCES)
        known = ok & ~columns.for_values & (output >= 0) & is_exact
        understated = known & by_column.understates(columns)
        overstated = known & by_column.overstates(columns)
        self.add_to_sum("counted", known.sum())
        self.add_to_sum("contradicting", (understated | overstated).sum())
        self.add_to_sum("understated", understated.sum())
        counted = by_column.or_all(ok & (events > 0) & is_exact)
        counted_events = events[counted].astype(np.int64)
        counted_tokens = streamed[counted].astype(np.int64)
        self.add_to_sum("counted_events", counted_events.sum())
        self.add_to_sum("counted_tokens", counted_tokens.sum())
        # A response may have one token without text: the one that ends it, or any one of many.
        may_lack_text = (columns["finish_reason"][counted] != FINISH["length"]) | (
            counted_tokens >= LONG_ANSWER
        )
        surplus = np.maximum(counted_tokens - counted_events - may_lack_text, 0)
        self.add_to_sum("surplus_tokens", surplus.sum())

    def _add_tokens_beside_requested(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the requested output tokens, and the output tokens of the same requests."""
        output, requested = columns["output_tokens"], columns["asked_output"]
        comparable = ok & (requested > 0) & (output >= 0)
        self.add_to_sum("comparable", comparable.sum())
        self.add_to_sum("asked", requested[comparable].sum(dtype=np.int64))
        self.add_to_sum("asked_got", output[comparable].sum(dtype=np.int64))
        self.add_to_sum("unequal", (requested != output)[comparable].sum())

    def _add_tokens_beside_built(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Add the prompt tokens as built here, and as the server counted them."""
        prompt, built = columns["input_tokens"], columns["built_tokens"]
        is_of_server = columns["input_source"] == SOURCES.index("server")
        has_both = ok & ~columns.for_values & is_of_server & (built > 0) & (prompt >= 0)
        self.add_to_sum("prompts_compared", has_both.sum())
        self.add_to_sum("prompt_tokens_built", built[has_both].sum(dtype=np.int64))
        self.add_to_sum("prompt_tokens_of_server", prompt[has_both].sum(dtype=np.int64))

    def _add_token_sources(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        """Count the ok requests by the source of their token counts."""
        with_output = ok & ~columns.for_values
        for side, chosen in (("input", ok), ("output", with_output)):
            requests = np.bincount(columns[f"{side}_source"][chosen], minlength=len(SOURCES))
            for source, count in zip(SOURCES, requests.tolist(), strict=True):
                self.add_to_sum(f"{side}_source_{source or 'none'}", count)

    def _add_finishes(self, columns: Columns, texts: Sequence[str]) -> None:
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
        for text, count in _counted_texts(text_numbers[other], texts):
            self.add_to_sum(FINISH_PREFIX + (text or "other"), count)
        for text, count in _counted_texts(text_numbers[~other & (text_numbers >= 0)], texts):
            if text:
                self.add_to_sum(REMARK_PREFIX + text, count)

    def _add_errors(self, columns: Columns, texts: Sequence[str]) -> None:
        for kind in np.flatnonzero(np.bincount(columns["kind"])).tolist():
            if not kind or KINDS[kind] == "unfinished":
                continue
            places = np.flatnonzero(columns["kind"] == kind)
            with_text = places[columns["text"][places] >= 0]
            candidates = with_text if len(with_text) else places
            first = candidates[np.argmin(columns["due_ns"][candidates])]
            text, status, due_ns = (
                int(columns[name][first]) for name in ("text", "http_status", "due_ns")
            )
            words = texts[text] if 0 <= text < len(texts) else ""
            if KINDS[kind] == "worker_died":
                for worker in np.unique(columns["worker"][places]).tolist():
                    self.add_to_sum(f"dead_{worker}", 1)
            due_ns += 0 if words else LONGEST_NS
            self.add_failures(
                KINDS[kind], len(places), due_ns, words or (f"HTTP {status}" if status else "")
            )


def _count_conversations(
    cell: MetricAccumulator, ended: TaskColumns, end: NDArray[np.int64]
) -> None:
    """Add conversations that are over, which ended at the times `end`."""
    ok, cancelled, unfinished = ended.ok > 0, ended.cancelled > 0, ended.unfinished > 0
    cell.add_to_sum("sessions", len(ok))
    cell.add_to_sum("sessions_cancelled", cancelled.sum())
    cell.add_to_sum("sessions_abandoned", ended.abandoned.sum())
    cell.add_to_sum("sessions_cut", (unfinished & ~cancelled).sum())
    cell.add_to_sum("sessions_ok", ok.sum())
    took = end - ended.due
    cell.sample("session").add(took[ok])
    cell.sample("session_wait").add(ended.wait[ok])
    cell.sample("session_longest_wait").add(ended.longest_wait[ok])
    for name in ("requests", "input", "cached", "output"):
        cell.add_to_sum(f"session_{name}", getattr(ended, name)[ok].sum())
    cell.amount("session").add(end[ok], end[ok], np.ones(int(ok.sum()), np.int64))
    if cell.slo is not None and cell.slo.task is not None:
        is_good = tasks.kept(ended, end, cell.slo.task)
        good_ends = end[is_good]
        cell.add_to_sum("sessions_good", len(good_ends))
        cell.amount("good_session").add(good_ends, good_ends, np.ones(len(good_ends), np.int64))


def _values(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a per-request metric, of the requests that belong to its sample."""
    chosen = columns["sent_ns"] >= 0 if _sample_of(metric) == "sent" else columns.where(OK)
    values = columns.measure(metric)
    return defined(values if chosen.all() else values[chosen])


def _amounts(
    columns: Columns, name: str, slo: Slo | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Return the start, the end and the amount of each request, for one of REQUEST_AMOUNTS."""
    ok = columns.where(OK)
    if name == "output":
        return by_column.token_spans(columns)
    if name == "input":  # a prompt has been processed when the first token comes
        known = by_column.or_all(ok & (columns["input_tokens"] >= 0))
        first = by_column.first_tokens(columns, known)
        return first, first, columns["input_tokens"][known]
    ended = columns["end_ns"][
        by_column.or_all(outcomes.meets(columns, slo) if name == "good" and slo else ok)
    ]
    return ended, ended, np.broadcast_to(np.int64(1), len(ended))


class MeasuredAndWarmup(NamedTuple):
    """What is known of one target, class or step: in the measured stages, and in all others."""

    measured: MetricAccumulator
    others: MetricAccumulator

    def of_stage(self, plan: StagePlan) -> MetricAccumulator:
        """Return the one to which the records of a stage belong."""
        return self.measured if plan.measured else self.others


class CutConversations(NamedTuple):
    """Measured conversations whose last turn was never scheduled.

    A conversation with a turn that was cancelled counts as `cancelled` only.
    """

    by_end_of_load: int
    cancelled: int


class Accumulator:
    """The records of a run added up, for each stage, target, class and step.

    A conversation lies within one stage. One whose last turn was never scheduled is counted by
    `count_cut_conversations` alone.
    """

    def __init__(self, header: RunManifest, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        """Add up all records of a run. `rows["text"]` indexes `texts`."""
        self._header = header
        self._plans = header.stages or (StagePlan(),)
        several_targets = len(header.targets) if len(header.targets) > 1 else 0
        self.stages = [MetricAccumulator(header.slo) for _ in self._plans]
        self.targets = _new_pairs([header.slo] * several_targets)
        self.classes = _new_pairs([plan.slo for plan in header.classes])
        self.steps = _new_pairs([None] * len(header.steps))
        self._cut_conversations: list[NDArray[np.int64]] = []
        self._cut_is_cancelled: list[NDArray[np.bool_]] = []
        for stage in range(len(self._plans)):
            self._add_stage(stage, rows, texts)

    def _add_stage(self, stage: int, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        plan, cell = self._plans[stage], self.stages[stage]
        has_parts = bool(self.targets or self.classes or self.steps)
        columns = Columns(rows, rows["stage"] == stage, keep_all=has_parts)
        cell.add(columns, texts, not plan.closed)
        if not len(columns):
            return
        self._add_conversations(stage, columns)
        turns = self._header.turns
        cell.sample("lane_end").add(columns["done_ns"][last_round(columns, plan, turns)])
        cell.add_maximum("lane_due", columns["due_ns"][first_round(columns, plan, turns)])
        for pairs, part_of_row in self._parts_of_rows(columns):
            for number, pair in enumerate(pairs):
                of_part = Columns(columns, part_of_row == number)
                pair.of_stage(plan).add(of_part, texts, not plan.closed)
                of_part.forget()

    def _parts_of_rows(
        self, columns: Columns
    ) -> Iterator[tuple[list[MeasuredAndWarmup], NDArray[np.int64]]]:
        """Yield the targets, the classes and the steps, and which one each record belongs to."""
        yield self.targets, columns["target"]
        if self.classes:
            yield self.classes, class_of(self._header, columns["request"] // self._header.turns)
        if self.steps:
            yield self.steps, step_of(self._header, columns["request"], columns["turn"])

    def _add_conversations(self, stage: int, columns: Columns) -> None:
        """Add the conversations and tasks of a stage, and set those aside that the load cut off."""
        found = tasks.of_requests(columns, self._header.turns)
        if not len(found.numbers):
            return
        plan, over = self._plans[stage], found.over
        if plan.measured:
            self._cut_conversations.append(found.numbers[~over])
            self._cut_is_cancelled.append(found.columns.cancelled[~over] > 0)
        ended = TaskColumns(*(column[over] for column in found.columns))
        end = found.end[over]
        _count_conversations(self.stages[stage], ended, end)
        if self.classes:
            class_index = class_of(self._header, found.numbers[over])
            for index, pair in enumerate(self.classes):
                of_class = class_index == index
                class_tasks = TaskColumns(*(column[of_class] for column in ended))
                _count_conversations(pair.of_stage(plan), class_tasks, end[of_class])

    def count_cut_conversations(self, class_index: int | None = None) -> CutConversations:
        """Count the measured conversations of a class, or of all, that the load cut off."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self._cut_conversations])
        is_cancelled = np.concatenate([np.zeros(0, bool), *self._cut_is_cancelled])
        if class_index is not None and len(numbers):
            is_cancelled = is_cancelled[class_of(self._header, numbers) == class_index]
        cancelled = int(is_cancelled.sum())
        return CutConversations(len(is_cancelled) - cancelled, cancelled)

    def measured(self, measured: bool = True) -> MetricAccumulator:
        """Return what all measured stages add up to, or all others."""
        cells = [
            cell
            for cell, plan in zip(self.stages, self._plans, strict=True)
            if plan.measured == measured
        ]
        return self._merge(cells)

    def _merge(self, cells: Sequence[MetricAccumulator]) -> MetricAccumulator:
        if len(cells) == 1:
            return cells[0]
        total = MetricAccumulator(self._header.slo)
        for cell in cells:
            total.merge(cell)
        return total

    def of_targets(self, numbers: Sequence[int]) -> MeasuredAndWarmup:
        """Return what several targets add up to."""
        pairs = [self.targets[number] for number in numbers]
        return MeasuredAndWarmup(
            self._merge([pair.measured for pair in pairs]),
            self._merge([pair.others for pair in pairs]),
        )

    def of_classes(self, numbers: Sequence[int]) -> MeasuredAndWarmup:
        """Return what several classes add up to, without their SLOs."""
        total = MeasuredAndWarmup(MetricAccumulator(), MetricAccumulator())
        for number in numbers:
            total.measured.merge(self.classes[number].measured)
            total.others.merge(self.classes[number].others)
        return total


def _new_pairs(slos: Sequence[Slo | None]) -> list[MeasuredAndWarmup]:
    return [MeasuredAndWarmup(MetricAccumulator(slo), MetricAccumulator(slo)) for slo in slos]
