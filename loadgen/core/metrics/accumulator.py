"""The rows of a run added up: sums, samples and amounts over time, for each stage, target and class.

Pure numpy. Everything is additive: the accumulators of several workers, or of any split of the rows, merge into that of
all rows. `exact` keeps every value; otherwise samples are histograms and amounts are curves, so that the memory does
not grow with the run. The latter is all that remains of a run whose rows are not kept (`--keep histogram`), or not all
of them (`--keep sample`). `run_summary.build` makes a Summary of either.
"""

from __future__ import annotations

import zlib
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
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
from loadgen.core.metrics.drift import BLOCKS, FIRST_NS, SHOWN, BlockSamples
from loadgen.core.metrics.tasks import TaskColumns
from loadgen.core.metrics.windows import first_round, last_round
from loadgen.core.results.manifest import StagePlan
from loadgen.core.results.record import FINISH, FINISH_REASONS, KINDS, SOURCES, STATUSES
from loadgen.core.stats.amounts import Amounts, TimeCurve
from loadgen.core.stats.quantiles import Distribution, Histogram, Values
from loadgen.core.units import LONGEST_NS
from loadgen.figures import FIGURES, per_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import Header
    from loadgen.core.slo import Slo

AMOUNTS = (
    "ok",
    "good",
    "input",
    "output",
    "flying",
)  # that come with time: requests, tokens, seconds in flight
_COUNTED = [
    SOURCES.index("server"),
    SOURCES.index("tokenizer"),
]  # sources that know how many tokens an event carries
_FORMAT = 1
_CHECKED = (
    b"LEDGER"  # then a CRC-32 of what follows; ledgers of older versions begin with their content
)


_TOKENS = (
    "output_tokens",
    "input_tokens",
    "cached_tokens",
    "cache_written_tokens",
    "reasoning_tokens",
    "asked_output",
)


def _sample_of(name: str) -> str:
    """Return which requests have values of a figure, ok or sent; "" if none has."""
    row = FIGURES.called(name)
    return "" if row is None or row.values is None else row.sample


def sampled() -> list[str]:
    """The figures that have a value per request."""
    return [row.name for row in FIGURES.here() if row.values]


class Cell:
    """Sums, minimums, maximums, samples and amounts of the rows of a stage or of a target.

    An exact cell keeps its rows, as `columns`, and makes the samples and amounts of requests when they are asked for.
    """

    __slots__ = (
        "_distributions",
        "amounts",
        "columns",
        "errors",
        "exact",
        "least",
        "most",
        "samples",
        "slo",
        "sums",
    )

    def __init__(self, slo: Slo | None = None, *, exact: bool = False) -> None:
        self.slo, self.exact = slo, exact
        self.sums: dict[str, int] = {}
        self.least: dict[str, int] = {}
        self.most: dict[str, int] = {}
        # kind -> count, then instant and text of the failure shown: the first due of those with a text
        self.errors: dict[str, tuple[int, int, str]] = {}
        self.samples: dict[str, Values | Histogram] = {}
        self.amounts: dict[str, Amounts | TimeCurve] = {}
        self.columns: list[Columns] = []
        self._distributions: dict[str, Distribution] = {}

    def sum(self, name: str) -> int:
        return self.sums.get(name, 0)

    def sum_known(self, field: str) -> int | None:
        """The sum of a field over the ok requests where it is known; None when it is known of none."""
        return self.sums[field] if self.sum(field + "_known") else None

    def latest(self, name: str) -> int:
        """The largest value of a field; -1 where there is none."""
        return self.most.get(name, -1)

    def sample(self, name: str) -> Values | Histogram:
        """The sample of a figure of requests, or one that was added under this name."""
        if not self.exact or not _sample_of(name):
            return self.samples.setdefault(name, Values() if self.exact else Histogram())
        blocks = (block for columns in self.columns for block in columns.blocks())
        return Values.of((_values(block, name) for block in blocks), sum(map(len, self.columns)))

    def distribution(self, name: str) -> Distribution:
        """The distribution of a sample, of a cell to which nothing is added any more."""
        if name not in self._distributions:
            self._distributions[name] = self.sample(name).distribution()
        return self._distributions[name]

    def amount(self, name: str) -> Amounts | TimeCurve:
        """The amounts of AMOUNTS, or those that were added under this name."""
        if not self.exact or name not in AMOUNTS:
            return self.amounts.setdefault(name, Amounts() if self.exact else TimeCurve())
        amounts = Amounts()
        for columns in self.columns:
            amounts.add(*_amounts(columns, name, self.slo))
        return amounts

    def count(self, name: str, value: Any) -> None:
        self.sums[name] = self.sum(name) + int(value)

    def span(self, name: str, values: NDArray[np.int64]) -> None:
        """Record the count, the minimum and the maximum of these values."""
        self.count(name, len(values))
        if len(values):
            self.least[name] = min(self.least.get(name, 1 << 62), int(values.min()))
            self.reach(name, values)

    def reach(self, name: str, values: NDArray[np.int64]) -> None:
        """Record the maximum of these values."""
        self.most[name] = max(self.latest(name), int(values.max(initial=-1)))

    def known(self, name: str, values: NDArray[np.int64]) -> None:
        """Add the sum of the known values (those not -1), and how many they are."""
        known = values[by_column.or_all(values >= 0)]
        self.count(name, known.sum(dtype=np.int64))
        self.count(name + "_known", len(known))

    def error(self, kind: str, count: int, due_ns: int, words: str) -> None:
        """Count failures of a kind; the text kept is that of the earliest, of several the first one added."""
        before = self.errors.get(kind, (0, 1 << 62, ""))
        self.errors[kind] = (
            before[0] + count,
            *min(before[1:], (due_ns, words), key=itemgetter(0)),
        )

    def merge(self, other: Cell) -> None:
        """Add another cell to this one; the other does not change."""
        issued_later = other.latest("sent") > self.latest("sent")
        for name, count in other.sums.items():
            self.count(name, count)
        for name, value in other.least.items():
            self.least[name] = min(self.least.get(name, 1 << 62), value)
        for name, value in other.most.items():
            if name not in ("issued_end", "issued_done"):
                self.most[name] = max(self.latest(name), value)
            elif issued_later:
                self.most[name] = value
        for kind, error in other.errors.items():
            self.error(kind, *error)
        own: Any
        for name, sample in other.samples.items():
            own = self.sample(name)
            own.merge(sample)
        for name, amounts in other.amounts.items():
            own = self.amount(name)
            own.merge(amounts)
        self.columns += other.columns

    def add(
        self, columns: Columns, texts: Sequence[str], metrics: Sequence[str], open_loop: bool
    ) -> None:
        """Add rows of one stage. `metrics`: those of which a cell that is not exact keeps a sample."""
        if self.exact:
            self.columns.append(columns)
        for block in filter(len, columns.blocks()):
            self._add(block, texts, metrics, open_loop)

    def _add(
        self, columns: Columns, texts: Sequence[str], metrics: Sequence[str], open_loop: bool
    ) -> None:
        if not self.exact:
            for metric in metrics:
                self.sample(metric).add(_values(columns, metric))
            for name in AMOUNTS:
                self.amount(name).add(*_amounts(columns, name, self.slo))
        ok, sent = columns.where(OK), columns["sent_ns"] >= 0
        self.count("rows", len(columns))
        self.count("starts", (columns["turn"] == 0).sum())
        for code, status in enumerate(STATUSES):
            self.count(status, columns.where(code).sum())
        for name in ("resent", "bytes_sent", "bytes_received"):
            self.count(name, columns[name].sum(dtype=np.int64))
        self._add_times(columns, sent, open_loop)
        self._add_tokens(columns, ok)
        self._add_errors(columns, texts)
        self._add_finishes(columns)
        with_output = ok & ~columns.for_values
        self.count("output_source_unasked", (ok & columns.for_values).sum())
        self.count("tpot_undefined", (columns.measure("tpot")[with_output] == UNDEFINED).sum())
        self.count("tpot_no_span", by_column.has_no_span(columns)[with_output].sum())
        self.count("tpot_no_output", by_column.lacks_output(columns)[with_output].sum())
        self.count("stalled", (columns.measure("max_gap")[ok] > STALL_NS).sum())
        if self.slo is not None:
            self._add_outcomes(columns, ok, self.slo)

    def _add_outcomes(self, columns: Columns, ok: NDArray[np.bool_], slo: Slo) -> None:
        self.count(
            "unfinished_over", (columns.where(UNFINISHED) & outcomes.is_counted(columns, slo)).sum()
        )
        self.count("good", outcomes.meets(columns, slo).sum())
        for i, term in enumerate(slo.terms):
            if per_request(term.metric):
                values = defined(columns.measure(term.metric)[ok])
                self.count(f"term{i}", len(values))
                self.count(f"term{i}_over", (values > term.limit_ns).sum())
                self.count(
                    f"term{i}_unfinished_over", outcomes.is_over_when_cut(columns, term).sum()
                )

    def _add_times(self, columns: Columns, sent: NDArray[np.bool_], open_loop: bool) -> None:
        due = columns["due_ns"][columns.attempted]
        self.span("due", due)
        self.reach("start", columns["due_ns"][columns.attempted & (columns["turn"] <= 0)])
        if open_loop:
            self.span("open_due", due)
        before = self.latest("sent")
        self.span("sent", columns["sent_ns"][sent])
        if self.latest("sent") > before:  # these rows hold the request issued last so far
            last = int(np.argmax(columns["sent_ns"]))
            self.most["issued_end"], self.most["issued_done"] = (
                int(columns[name][last]) for name in ("end_ns", "done_ns")
            )
        for name in ("done_ns", "last_token_ns"):
            self.reach(name, columns[name])
        answered = columns["first_token_ns"] >= 0
        self.count("answered", answered.sum())
        self.count("kernel_stamps", columns["kernel_stamp"][answered].sum())

    def _add_tokens(self, columns: Columns, ok: NDArray[np.bool_]) -> None:
        with_output = ok & ~columns.for_values
        output, prompt, asked = (
            columns["output_tokens"],
            columns["input_tokens"],
            columns["asked_output"],
        )
        for name in _TOKENS:
            self.known(name, columns[name][by_column.or_all(ok)])
        self.known("cached_base", prompt[ok & (columns["cached_tokens"] >= 0)])
        failed = columns.where(FAILED)
        self.known("failed_input", prompt[failed])
        self.known("failed_output", output[failed])
        events, streamed = columns["output_events"], by_column.streamed_tokens(columns)
        counted = by_column.or_all(ok & (output >= 0) & (events > 0))
        for name, values in (("events", events), ("streamed", streamed), ("billed", output)):
            self.count(name, values[counted].sum(dtype=np.int64))
        comparable = ok & (asked > 0) & (output >= 0)
        self.count("comparable", comparable.sum())
        self.count("asked", asked[comparable].sum(dtype=np.int64))
        self.count("asked_got", output[comparable].sum(dtype=np.int64))
        self.count("unequal", (asked != output)[comparable].sum())
        is_counted = np.isin(columns["output_source"], _COUNTED)
        known = with_output & (output >= 0) & is_counted
        under, over = known & by_column.understates(columns), known & by_column.overstates(columns)
        self.count("counted", known.sum())
        self.count("contradicting", (under | over).sum())
        self.count("understated", under.sum())
        told = by_column.or_all(ok & (events > 0) & is_counted)
        told_events, told_streamed = events[told].astype(np.int64), streamed[told].astype(np.int64)
        self.count("told_events", told_events.sum())
        self.count("told_streamed", told_streamed.sum())
        # an answer may have one token without text: the one that ends it, or any one of many
        textless = (columns["finish_reason"][told] != FINISH["length"]) | (
            told_streamed >= LONG_ANSWER
        )
        self.count("surplus", np.maximum(told_streamed - told_events - textless, 0).sum())
        self.count("unsaid", (with_output & (columns["first_event_tokens"] == 0)).sum())
        built = columns["built_tokens"]
        both_counted = (
            with_output
            & (columns["input_source"] == SOURCES.index("server"))
            & (built > 0)
            & (prompt >= 0)
        )
        self.count("both", both_counted.sum())
        self.count("both_built", built[both_counted].sum(dtype=np.int64))
        self.count("both_said", prompt[both_counted].sum(dtype=np.int64))
        for side in ("input", "output"):
            of_them = columns[f"{side}_source"][ok if side == "input" else with_output]
            for code, count in enumerate(np.bincount(of_them, minlength=len(SOURCES)).tolist()):
                self.count(f"{side}_source_{SOURCES[code] or 'none'}", count)

    def _add_finishes(self, columns: Columns) -> None:
        of_ok = columns["finish_reason"][columns.where(OK)]
        for code, count in enumerate(np.bincount(of_ok, minlength=len(FINISH_REASONS)).tolist()):
            if count:
                self.count(f"finish_{FINISH_REASONS[code] or 'none'}", count)

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
                    self.count(f"dead_{worker}", 1)
            due_ns += 0 if words else LONGEST_NS
            self.error(
                KINDS[kind], len(places), due_ns, words or (f"HTTP {status}" if status else "")
            )


_TOGETHER: tuple[Callable[[int, int], int], ...] = (
    min,
    min,
    max,
    max,
    max,
    max,
    add,
    max,
    add,
    add,
    add,
    add,
)
"""For each of these columns: what two parts of a conversation make together."""


def _count_conversations(cell: Cell, ended: TaskColumns, end: NDArray[np.int64]) -> None:
    """Add conversations that are over, and the instants at which they ended."""
    ok, cancelled, unfinished = ended.ok > 0, ended.cancelled > 0, ended.unfinished > 0
    cell.count("sessions", len(ok))
    cell.count("sessions_cancelled", cancelled.sum())
    cell.count("sessions_abandoned", ended.abandoned.sum())
    cell.count("sessions_cut", (unfinished & ~cancelled).sum())
    cell.count("sessions_ok", ok.sum())
    took = end - ended.due
    cell.sample("session").add(took[ok])
    cell.sample("session_wait").add(ended.wait[ok])
    cell.sample("session_longest_wait").add(ended.longest_wait[ok])
    for name in ("requests", "input", "cached", "output"):
        cell.count(f"session_{name}", getattr(ended, name)[ok].sum())
    cell.amount("session").add(end[ok], end[ok], np.ones(int(ok.sum()), np.int64))
    if cell.slo is not None and cell.slo.task is not None:
        is_good = tasks.kept(ended, end, cell.slo.task)
        good_ends = end[is_good]
        cell.count("sessions_good", len(good_ends))
        cell.amount("good_session").add(good_ends, good_ends, np.ones(len(good_ends), np.int64))


def _values(columns: Columns, metric: str) -> NDArray[np.int64]:
    """The values of a figure in its sample."""
    chosen = columns["sent_ns"] >= 0 if _sample_of(metric) == "sent" else columns.where(OK)
    values = columns.measure(metric)
    return defined(values if chosen.all() else values[chosen])


def _amounts(
    columns: Columns, name: str, slo: Slo | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Start, end and amount of what AMOUNTS names."""
    ok = columns.where(OK)
    if name == "output":
        return by_column.token_spans(columns)
    if name == "flying":  # seconds in flight
        sent = columns["sent_ns"] >= 0
        start, end = columns["sent_ns"][sent], columns["done_ns"][sent]
        end = np.where(end < 0, start, end)
        return start, end, (end - start) / 1e9
    if name == "input":  # a prompt has been processed when the first token comes
        known = by_column.or_all(ok & (columns["input_tokens"] >= 0))
        first = by_column.first_tokens(columns, known)
        return first, first, columns["input_tokens"][known]
    ended = columns["end_ns"][
        by_column.or_all(outcomes.meets(columns, slo) if name == "good" and slo else ok)
    ]
    return ended, ended, np.broadcast_to(np.int64(1), len(ended))


class CellPair(NamedTuple):
    """The cell of the measured stages, and that of the others."""

    measured: Cell
    others: Cell


class Accumulator:
    """All figures of a run: a cell per stage, per target and per class, and the measured latencies by blocks of time.

    `add` takes rows in any order, but those of a conversation in the order of its turns.
    """

    def __init__(self, header: Header, *, exact: bool = False) -> None:
        self.exact = exact
        self._plans = header.stages or (StagePlan(),)
        self._slo = header.slo
        self._turns = header.turns
        slo_metrics = [
            term.metric for slo in header.slos for term in slo.terms if per_request(term.metric)
        ]
        self._part_metrics = tuple(dict.fromkeys((*SHOWN, *slo_metrics)))
        several = len(header.targets) if len(header.targets) > 1 else 0
        self.stages = [Cell(self._slo, exact=exact) for _ in self._plans]
        self.targets = self._pairs([self._slo] * several)
        self.classes = self._pairs([plan.slo for plan in header.classes])
        self.steps = self._pairs([None] * len(header.steps))
        self._header = header
        self.blocks: list[BlockSamples] = []
        self.block_ns = FIRST_NS
        # number of a conversation -> what is known of its turns so far, in the order of TaskColumns
        self._open_conversations: dict[int, list[int]] = {}
        self.taken: dict[
            int, int
        ] = {}  # worker -> how many of its rows, from the first on, are in here; by the caller

    def _pairs(self, slos: Sequence[Slo | None]) -> list[CellPair]:
        return [CellPair(Cell(slo, exact=self.exact), Cell(slo, exact=self.exact)) for slo in slos]

    def add(self, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        """Add some rows. `texts`: error texts, indexed by `rows["text"]`."""
        metrics = sampled()
        for stage, (plan, cell) in enumerate(zip(self._plans, self.stages, strict=True)):
            columns = Columns(
                rows,
                rows["stage"] == stage,
                keep_all=bool(self.targets or self.classes or self.steps),
            )
            cell.add(columns, texts, metrics, not plan.closed)
            if not len(columns):
                continue
            own = 0 if plan.measured else 1  # of a pair
            self._add_conversations(stage, columns, [pair[own] for pair in self.classes])
            cell.sample("lane_end").add(columns["done_ns"][last_round(columns, plan, self._turns)])
            cell.reach("lane_due", columns["due_ns"][first_round(columns, plan, self._turns)])
            if plan.measured and not self.exact:
                self._add_by_time(columns)
            parts = [(self.targets, columns["target"])]
            if self.classes:
                parts.append(
                    (self.classes, class_of(self._header, columns["request"] // self._turns))
                )
            if self.steps:
                parts.append(
                    (self.steps, step_of(self._header, columns["request"], columns["turn"]))
                )
            for pairs, part in parts:
                for number, pair in enumerate(pairs):
                    of_part = Columns(columns, part == number)
                    pair[own].add(of_part, texts, self._part_metrics, not plan.closed)
                    of_part.forget()

    def by_time(self) -> tuple[list[BlockSamples], int]:
        """The measured latencies by blocks of time, and how long these are. Exact ones are made now, and not kept."""
        for columns in self.measured().columns if self.exact else ():
            self._add_by_time(columns)
        blocks, self.blocks = self.blocks, [] if self.exact else self.blocks
        return blocks, self.block_ns

    def _add_by_time(self, columns: Columns) -> None:
        ok = columns.where(OK)
        due = columns["due_ns"][by_column.or_all(ok)]
        if len(due) == 0:
            return
        while int(due.max()) >= self.block_ns * BLOCKS:
            self._join_blocks()
        places = np.floor_divide(
            due, self.block_ns, out=np.empty(len(due), np.int8), casting="unsafe"
        )
        del due
        self._reach_block(int(places.max()))
        sizes = np.bincount(places, minlength=len(self.blocks))
        order = np.argsort(places, kind="stable").astype(np.int32)  # half as large
        order = order if len(order) == len(columns) else np.flatnonzero(ok).astype(np.int32)[order]
        for block, size in zip(self.blocks, sizes.tolist(), strict=True):
            block.requests += size
        for metric in SHOWN:
            parts = np.split(columns.measure(metric)[order], np.cumsum(sizes)[:-1])
            for block, values in zip(self.blocks, parts, strict=True):
                block.of[metric].add(defined(values))

    def _reach_block(self, place: int) -> None:
        while len(self.blocks) <= place:
            self.blocks.append(BlockSamples(exact=self.exact))

    def _join_blocks(self) -> None:
        """Join neighbouring blocks, which then last twice as long."""
        self.block_ns *= 2
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=False):
            first.merge(second)
        self.blocks = self.blocks[::2]

    def _add_conversations(self, stage: int, columns: Columns, classes: Sequence[Cell]) -> None:
        """Add the requests of conversations and tasks; those whose last one is among them are over."""
        found = tasks.of_requests(columns, self._turns)
        if not len(found.numbers):
            return
        sessions, parts, over = found.numbers, found.columns, found.over
        still_open = self._open_conversations
        for i in np.flatnonzero(~over | np.isin(sessions, list(still_open))).tolist():
            session = int(sessions[i])
            if session in still_open:
                before = still_open.pop(session)
                before += [0] * (len(parts) - len(before))  # of an older file
                for how, column, value in zip(_TOGETHER, parts, before, strict=True):
                    column[i] = how(value, int(column[i]))
            if not over[i]:
                still_open[session] = [int(column[i]) for column in parts]
        ended = TaskColumns(*(column[over] for column in parts))
        end = found.end[over]
        _count_conversations(self.stages[stage], ended, end)
        if classes:
            drawn = class_of(self._header, sessions[over])
            for index, cell in enumerate(classes):
                own = drawn == index
                _count_conversations(
                    cell, TaskColumns(*(column[own] for column in ended)), end[own]
                )

    def cut(self, of_class: int | None = None) -> tuple[int, int]:
        """Measured conversations whose last turn was never scheduled: how many the end of the load cut, how many a
        cancelled turn; of one class, or of all.

        A conversation with a turn that was cancelled counts in the second number only.
        """
        sessions = [
            session
            for session, state in self._open_conversations.items()
            if all(self._plans[i].measured for i in state[4:5])
        ]
        if of_class is not None and sessions:
            drawn = class_of(self._header, np.array(sessions)).tolist()
            sessions = [
                session for session, own in zip(sessions, drawn, strict=True) if own == of_class
            ]
        cancelled = sum(self._open_conversations[session][2] for session in sessions)
        return len(sessions) - cancelled, cancelled

    def merge(self, other: Accumulator) -> None:
        """Add the accumulator of other rows of the same run."""
        for mine, theirs in zip(self._cells(), other._cells(), strict=True):
            mine.merge(theirs)
        for i, block in enumerate(other.blocks):
            while self.block_ns < other.block_ns or (i * other.block_ns) >= self.block_ns * BLOCKS:
                self._join_blocks()
            place = i * other.block_ns // self.block_ns
            self._reach_block(place)
            self.blocks[place].merge(block)
        self._open_conversations.update(other._open_conversations)

    def _cells(self) -> Iterator[Cell]:
        yield from self.stages
        for pairs in (self.targets, self.classes, self.steps):
            yield from (pair.measured for pair in pairs)
            yield from (pair.others for pair in pairs)

    def measured(self, measured: bool = True) -> Cell:
        """The cell of all measured stages, or of all others."""
        cells = [
            cell
            for cell, plan in zip(self.stages, self._plans, strict=True)
            if plan.measured == measured
        ]
        return self._merged(cells)

    def _merged(self, cells: Sequence[Cell]) -> Cell:
        if len(cells) == 1:
            return cells[0]
        total = Cell(self._slo, exact=self.exact)
        for cell in cells:
            total.merge(cell)
        return total

    def of_targets(self, numbers: Sequence[int]) -> CellPair:
        """The cells of several targets."""
        return CellPair(
            *(
                self._merged(cells)
                for cells in zip(*(self.targets[i] for i in numbers), strict=True)
            )
        )

    def of_classes(self, numbers: Sequence[int]) -> CellPair:
        """The cells of several classes, without their SLOs."""
        (totals,) = self._pairs([None])
        for number in numbers:
            for total, cell in zip(totals, self.classes[number], strict=True):
                total.merge(cell)
        return totals

    def to_bytes(self) -> bytes:
        """The accumulator as bytes that `from_bytes` decodes; 0.5 to 2 MB. Not of an exact one."""
        packed = _Packed(
            cells=[
                _PackedCell(
                    sums=cell.sums,
                    least=cell.least,
                    most=cell.most,
                    errors=cell.errors,
                    histograms=_packed(cell.samples),
                    curves={name: curve.to_bytes() for name, curve in cell.amounts.items()},  # type: ignore[union-attr]
                )
                for cell in self._cells()
            ],
            blocks=[(block.requests, _packed(block.of)) for block in self.blocks],
            block_ns=self.block_ns,
            open=self._open_conversations,
            taken=self.taken,
        )
        data = msgspec.msgpack.encode(packed)
        return _CHECKED + zlib.crc32(data).to_bytes(4, "little") + data

    @classmethod
    def from_bytes(cls, data: bytes, header: Header) -> Accumulator:
        """The inverse of `to_bytes`, for an accumulator of the same run. Raises ValueError for anything else."""
        if data.startswith(_CHECKED):
            head, data = data[: len(_CHECKED) + 4], data[len(_CHECKED) + 4 :]
            if zlib.crc32(data).to_bytes(4, "little") != head[len(_CHECKED) :]:
                raise ValueError("the ledger is damaged: its check sum is another one")
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no ledger: {error}") from None
        accumulator = cls(header)
        cells = list(accumulator._cells())
        if packed.format != _FORMAT or len(packed.cells) != len(cells):
            raise ValueError(f"no ledger of this run in format {_FORMAT}")
        for cell, stored in zip(cells, packed.cells, strict=True):
            cell.sums, cell.least, cell.most, cell.errors = (
                stored.sums,
                stored.least,
                stored.most,
                stored.errors,
            )
            cell.samples = _unpacked(stored.histograms)
            cell.amounts = {
                name: TimeCurve.from_bytes(*curve) for name, curve in stored.curves.items()
            }
        for requests, encoded in packed.blocks:
            block = BlockSamples(exact=False)
            block.requests, block.of = requests, _unpacked(encoded)
            accumulator.blocks.append(block)
        accumulator.block_ns, accumulator._open_conversations = packed.block_ns, packed.open
        accumulator.taken = packed.taken
        return accumulator


class _PackedCell(msgspec.Struct):
    sums: dict[str, int]
    least: dict[str, int]
    most: dict[str, int]
    errors: dict[str, tuple[int, int, str]]
    histograms: dict[str, bytes]
    curves: dict[str, tuple[float, bytes]]


class _Packed(msgspec.Struct):
    cells: list[_PackedCell]
    blocks: list[tuple[int, dict[str, bytes]]]
    block_ns: int
    open: dict[int, list[int]]
    taken: dict[int, int] = {}  # not in older files
    format: int = _FORMAT


def _packed(samples: dict[str, Values | Histogram]) -> dict[str, bytes]:
    return {
        name: sample.to_bytes() for name, sample in samples.items() if isinstance(sample, Histogram)
    }


def _unpacked(encoded: dict[str, bytes]) -> dict[str, Values | Histogram]:
    return {name: Histogram.from_bytes(data) for name, data in encoded.items()}
