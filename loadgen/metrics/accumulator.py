"""Sums, histograms and time curves of rows, added up while the rows arrive: the memory does not grow with the run.

This is all that remains of a run whose rows are not kept (`--keep histogram`), or not all of them (`--keep sample`).
Pure numpy. Everything is additive: the accumulators of several workers, or of any split of the rows, merge into that of
all rows. `folded_summary.summarize` computes a Summary from one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from loadgen.metrics import columns as metrics
from loadgen.metrics.columns import CANCELLED, FAILED, OK, UNDEFINED, UNFINISHED, Columns
from loadgen.metrics.drift import BLOCKS, FIRST_NS, SHOWN
from loadgen.results.manifest import StagePlan
from loadgen.results.record import KINDS, SOURCES, STATUSES
from loadgen.stats.quantiles import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.results.manifest import Header

LATENCIES = ("ttft", "ttft_from_sent", "first_answer", "tpot", "tpot_mlperf", "e2e", "max_gap")  # of ok requests
OWN = ("connect", "send_lag", "client_lag", "stamp_error")  # of requests that were sent
ERRORS = ("tpot_error", "max_gap_error")  # how wrong a figure of an ok request can be
BINS = 4096  # most bins of a curve; when a curve needs more, neighbouring bins are joined
AT_ONCE_S = 0.001  # a curve treats a shorter interval as an instant
_FORMAT = 1


class TimeCurve:
    """The cumulative amount up to any instant, where each amount is spread evenly over an interval of time.

    Exact at the edges of the bins, linear between them. The bins are as long as needed for BINS of them to reach the
    latest instant: 0.1 s for a run of minutes, 9 s for one of ten hours.
    """

    __slots__ = ("bin_s", "level", "lumps", "slope")

    def __init__(self, bin_s: float = 0.1) -> None:
        self.bin_s = bin_s
        self.slope = np.zeros(BINS)  # sum of the changes of slope in each bin
        self.level = np.zeros(BINS)  # sum of each change of slope times its instant
        self.lumps = np.zeros(BINS)  # amounts that came at one instant

    def add(self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], amount: NDArray[Any]) -> None:
        """Add amounts, each spread evenly from its start to its end; an interval too short counts at its end."""
        if len(start_ns) == 0:
            return
        start = np.maximum(start_ns, 0) / 1e9
        end = np.maximum(end_ns / 1e9, start)
        while float(end.max()) >= self.bin_s * BINS:
            self._double()
        is_instant = end - start < AT_ONCE_S
        self.lumps += np.bincount(self._places(end[is_instant]), amount[is_instant], BINS)
        start, end = start[~is_instant], end[~is_instant]
        slopes = amount[~is_instant] / (end - start)
        for at_s, change in ((start, slopes), (end, -slopes)):
            self.slope += np.bincount(self._places(at_s), change, BINS)
            self.level += np.bincount(self._places(at_s), change * at_s, BINS)

    def _places(self, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
        return (at_s / self.bin_s).astype(np.int64)

    def _double(self) -> None:
        self.bin_s *= 2
        for values in self._arrays():
            values[: BINS // 2] = values.reshape(-1, 2).sum(axis=1)
            values[BINS // 2 :] = 0

    def _arrays(self) -> tuple[NDArray[np.float64], ...]:
        return self.slope, self.level, self.lumps

    def merge(self, other: TimeCurve) -> None:
        """Add another curve to this one."""
        while self.bin_s < other.bin_s:
            self._double()
        step = round(self.bin_s / other.bin_s)
        for mine, theirs in zip(self._arrays(), other._arrays(), strict=True):
            mine[: BINS // step] += theirs.reshape(-1, step).sum(axis=1)

    def between(self, start_s: float | None, end_s: float | None) -> float:
        """The amount that came in an interval, ends included; 0 when an end is None."""
        if start_s is None or end_s is None:
            return 0.0
        edges = np.arange(BINS + 1) * self.bin_s
        slope, level, lumps = (np.concatenate(([0.0], np.cumsum(values))) for values in self._arrays())
        cumulative = edges * slope - level + lumps
        low, high = np.interp([start_s, end_s], edges, cumulative)
        return float(high - low)


class Cell:
    """Sums and histograms of the rows of a stage or of a target. Every part is a sum, a minimum or a maximum."""

    __slots__ = ("curves", "errors", "histograms", "least", "most", "sums")

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self.least: dict[str, int] = {}
        self.most: dict[str, int] = {}
        # kind -> count, then due instant and text of the failure due first among those with a text
        self.errors: dict[str, tuple[int, int, str]] = {}
        self.histograms: dict[str, Histogram] = {}
        self.curves: dict[str, TimeCurve] = {}

    def count(self, name: str, value: Any) -> None:
        self.sums[name] = self.sums.get(name, 0) + int(value)

    def span(self, name: str, values: NDArray[np.int64]) -> None:
        """Record the count, the minimum and the maximum of these values."""
        self.count(name, len(values))
        if len(values):
            self.least[name] = min(self.least.get(name, 1 << 62), int(values.min()))
            self.most[name] = max(self.most.get(name, -1), int(values.max()))

    def known(self, name: str, values: NDArray[np.int64]) -> None:
        """Add the sum of the known values (those not -1), and how many they are."""
        known = values[values >= 0]
        self.count(name, known.sum(dtype=np.int64))
        self.count(name + "_known", len(known))

    def histogram(self, name: str) -> Histogram:
        return self.histograms.setdefault(name, Histogram())

    def curve(self, name: str) -> TimeCurve:
        return self.curves.setdefault(name, TimeCurve())

    def merge(self, other: Cell) -> None:
        """Add another cell to this one; the other does not change."""
        for name, value in other.sums.items():
            self.count(name, value)
        latest = other.most.get("sent", -1) > self.most.get("sent", -1)
        for name, value in other.least.items():
            self.least[name] = min(self.least.get(name, 1 << 62), value)
        for name, value in other.most.items():
            if name not in ("issued_end", "issued_done"):
                self.most[name] = max(self.most.get(name, -1), value)
            elif latest:
                self.most[name] = value
        for kind, error in other.errors.items():
            self.error(kind, *error)
        for name, histogram in other.histograms.items():
            self.histogram(name).merge(histogram)
        for name, curve in other.curves.items():
            self.curve(name).merge(curve)

    def error(self, kind: str, count: int, due_ns: int, words: str) -> None:
        """Count failures of a kind. The text kept is that of the failure due first among those with a text."""
        before = self.errors.get(kind, (0, 1 << 62, ""))
        first = min(before[1:], (due_ns, words), key=lambda instant_text: (not instant_text[1], instant_text[0]))
        self.errors[kind] = (before[0] + count, *first)


class FoldedBlock:
    """Measured ok requests due in one block of time: their number, and a histogram of each SHOWN metric."""

    __slots__ = ("of", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.of = {metric: Histogram() for metric in SHOWN}

    def merge(self, other: FoldedBlock) -> None:
        """Add another block to this one; the other does not change."""
        self.requests += other.requests
        for metric in SHOWN:
            self.of[metric].merge(other.of[metric])


class Accumulator:
    """All figures of a run: a cell per stage and per target, and the measured latencies by blocks of time.

    `add` takes rows in any order, but those of a conversation in the order of its turns.
    """

    def __init__(self, header: Header) -> None:
        self._measured = np.array([stage.measured for stage in header.stages] or [True])
        self._stages = header.stages or (StagePlan(),)
        self._closed = np.array([stage.closed for stage in header.stages] or [False])
        self._slo = header.slo
        self._turns = header.turns
        slo_metrics = [term.metric for term in header.slo.terms if term.metric in LATENCIES] if header.slo else []
        self._target_metrics = tuple(dict.fromkeys((*SHOWN, *slo_metrics)))
        self.stages = [Cell() for _ in self._measured]
        self.targets = [Cell() for _ in header.targets] if len(header.targets) > 1 else []
        self.other_targets = [Cell() for _ in self.targets]  # rows of stages that are not measured
        self.blocks: list[FoldedBlock] = []
        self.block_ns = FIRST_NS
        # number of a conversation -> due instant of its first turn; 0 or 1: all turns ok so far, cancelled, unfinished
        self._open_conversations: dict[int, list[int]] = {}

    def add(self, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        """Add some rows. `texts`: error texts, indexed by `rows["text"]`."""
        for stage, measured in enumerate(self._measured):
            in_stage = rows["stage"] == stage
            if not in_stage.any():
                continue
            columns = Columns(rows, in_stage)
            self._fold(self.stages[stage], columns, texts, (*LATENCIES, *ERRORS, *OWN), bool(self._closed[stage]))
            self._conversations(self.stages[stage], columns)
            plan = self._stages[stage]
            lane_ends = columns["done_ns"][metrics.last_round(columns, plan, self._turns)]
            if len(lane_ends):
                self.stages[stage].histogram("lane_end").add(lane_ends)
            first = columns["due_ns"][metrics.first_round(columns, plan, self._turns)]
            self.stages[stage].most["lane_due"] = max(
                self.stages[stage].most.get("lane_due", -1), int(first.max(initial=-1))
            )
            if measured:
                self._by_time(columns)
            for target in range(len(self.targets)):
                in_target = in_stage & (rows["target"] == target)
                cell = (self.targets if measured else self.other_targets)[target]
                self._fold(cell, Columns(rows, in_target), texts, self._target_metrics, bool(self._closed[stage]))

    def _fold(self, cell: Cell, columns: Columns, texts: Sequence[str], latencies: Sequence[str], closed: bool) -> None:
        if len(columns) == 0:
            return
        ok, sent = columns.where(OK), columns["sent_ns"] >= 0
        cell.count("rows", len(columns))
        for code, status in enumerate(STATUSES):
            cell.count(status, columns.where(code).sum())
        for name in ("resent", "bytes_sent", "bytes_received"):
            cell.count(name, columns[name].sum(dtype=np.int64))
        _times(cell, columns, sent, closed)
        _tokens(cell, columns, ok)
        _errors(cell, columns, texts)
        for metric in latencies:
            selected = sent if metric in OWN else ok
            cell.histogram(metric).add(metrics.defined(columns.measure(metric)[selected]))
        cell.count("tpot_undefined", (columns.measure("tpot")[ok] == UNDEFINED).sum())
        cell.count("stalled", (columns.measure("max_gap")[ok] > metrics.STALL_NS).sum())
        ends = columns["end_ns"]
        cell.curve("ok").add(ends[ok], ends[ok], np.ones(int(ok.sum())))
        if self._slo is not None:
            cut = columns.where(UNFINISHED)
            cell.count("unfinished_over", (cut & metrics.is_counted(columns, self._slo)).sum())
            good = metrics.meets(columns, self._slo)
            cell.count("good", good.sum())
            cell.curve("good").add(ends[good], ends[good], np.ones(int(good.sum())))
            for i, term in enumerate(self._slo.terms):
                if term.metric not in metrics.POOLED:
                    values = metrics.defined(columns.measure(term.metric)[ok])
                    cell.count(f"term{i}", len(values))
                    cell.count(f"term{i}_over", (values > term.limit_ns).sum())
                    cell.count(f"term{i}_unfinished_over", metrics.is_over_when_cut(columns, term).sum())

    def _by_time(self, columns: Columns) -> None:
        ok = columns.where(OK)
        due = columns["due_ns"][ok]
        if len(due) == 0:
            return
        while int(due.max()) >= self.block_ns * BLOCKS:
            self.block_ns *= 2
            self.blocks = [_joined(self.blocks[i : i + 2]) for i in range(0, len(self.blocks), 2)]
        places = due // self.block_ns
        while len(self.blocks) <= int(places.max()):
            self.blocks.append(FoldedBlock())
        for metric in SHOWN:
            values = columns.measure(metric)[ok]
            for place in np.unique(places).tolist():
                self.blocks[place].of[metric].add(metrics.defined(values[places == place]))
        for place, count in enumerate(np.bincount(places).tolist()):
            self.blocks[place].requests += count

    def _conversations(self, cell: Cell, columns: Columns) -> None:
        if self._turns < 2:
            return
        names = ("session", "turn", "status", "due_ns", "end_ns")
        for session, turn, status, due, end in zip(*(columns[name].tolist() for name in names), strict=True):
            if session < 0:
                continue
            state = self._open_conversations.setdefault(session, [due, 1, 0, 0])
            state[1] &= status == OK
            state[2] |= status == CANCELLED
            state[3] |= status == UNFINISHED
            if turn == self._turns - 1:
                del self._open_conversations[session]
                cell.count("sessions", 1)
                cell.count("sessions_cancelled", state[2])
                cell.count("sessions_cut", state[3] and not state[2])
                if state[1]:
                    cell.count("sessions_ok", 1)
                    cell.histogram("session").add(np.array([end - state[0]], np.int64))
                    end_ns = np.array([end], np.int64)
                    cell.curve("session").add(end_ns, end_ns, np.ones(1))

    def cut(self) -> tuple[int, int]:
        """Conversations whose last turn was never scheduled: how many the end of the load cut, how many a cancelled
        turn.

        A conversation with a turn that the user cancelled counts in the second number only.
        """
        cancelled = sum(state[2] for state in self._open_conversations.values())
        return len(self._open_conversations) - cancelled, cancelled

    def merge(self, other: Accumulator) -> None:
        """Add the accumulator of other rows of the same run."""
        for mine, theirs in zip(self._cells(), other._cells(), strict=True):
            mine.merge(theirs)
        for i, block in enumerate(other.blocks):
            while self.block_ns < other.block_ns or (i * other.block_ns) >= self.block_ns * BLOCKS:
                self.block_ns *= 2
                self.blocks = [_joined(self.blocks[j : j + 2]) for j in range(0, len(self.blocks), 2)]
            place = i * other.block_ns // self.block_ns
            while len(self.blocks) <= place:
                self.blocks.append(FoldedBlock())
            self.blocks[place].merge(block)
        self._open_conversations.update(other._open_conversations)

    def _cells(self) -> Iterator[Cell]:
        yield from self.stages
        yield from self.targets
        yield from self.other_targets

    def measured(self, measured: bool = True) -> Cell:
        """One cell with the sum of all measured stages, or of all others."""
        total = Cell()
        for cell, is_measured in zip(self.stages, self._measured, strict=True):
            if is_measured == measured:
                total.merge(cell)
        return total

    def to_bytes(self) -> bytes:
        """The accumulator as bytes that `from_bytes` decodes; 0.5 to 2 MB."""
        packed = _Packed(
            cells=[
                _PackedCell(
                    sums=cell.sums,
                    least=cell.least,
                    most=cell.most,
                    errors=cell.errors,
                    histograms={name: histogram.to_bytes() for name, histogram in cell.histograms.items()},
                    curves={
                        name: (curve.bin_s, np.concatenate(curve._arrays()).tobytes())
                        for name, curve in cell.curves.items()
                    },
                )
                for cell in self._cells()
            ],
            blocks=[
                (block.requests, {metric: histogram.to_bytes() for metric, histogram in block.of.items()})
                for block in self.blocks
            ],
            block_ns=self.block_ns,
            open=self._open_conversations,
        )
        return msgspec.msgpack.encode(packed)

    @classmethod
    def from_bytes(cls, data: bytes, header: Header) -> Accumulator:
        """The inverse of `to_bytes`, for an accumulator of the same run. Raises ValueError for anything else."""
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
        except msgspec.DecodeError as error:
            raise ValueError(f"no ledger: {error}") from None
        accumulator = cls(header)
        if packed.format != _FORMAT or len(packed.cells) != len(list(accumulator._cells())):
            raise ValueError(f"no ledger of this run in format {_FORMAT}")
        for cell, packed_cell in zip(accumulator._cells(), packed.cells, strict=True):
            cell.sums, cell.least, cell.most, cell.errors = (
                packed_cell.sums,
                packed_cell.least,
                packed_cell.most,
                packed_cell.errors,
            )
            cell.histograms = {name: Histogram.from_bytes(encoded) for name, encoded in packed_cell.histograms.items()}
            for name, (bin_s, values) in packed_cell.curves.items():
                curve = cell.curve(name)
                curve.bin_s = bin_s
                curve.slope, curve.level, curve.lumps = np.frombuffer(values).reshape(3, BINS).copy()
        for requests, encoded in packed.blocks:
            accumulator.blocks.append(FoldedBlock())
            accumulator.blocks[-1].requests = requests
            accumulator.blocks[-1].of = {
                metric: Histogram.from_bytes(histogram_bytes) for metric, histogram_bytes in encoded.items()
            }
        accumulator.block_ns, accumulator._open_conversations = packed.block_ns, packed.open
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
    format: int = _FORMAT


def _joined(blocks: Sequence[FoldedBlock]) -> FoldedBlock:
    for block in blocks[1:]:
        blocks[0].merge(block)
    return blocks[0]


def _times(cell: Cell, columns: Columns, sent: NDArray[np.bool_], closed: bool) -> None:
    cell.span("due", columns["due_ns"][columns.attempted])
    if not closed:
        cell.span("open_due", columns["due_ns"][columns.attempted])
    before = cell.most.get("sent", -1)
    cell.span("sent", columns["sent_ns"][sent])
    if cell.most.get("sent", -1) > before:  # these rows hold the request issued last so far
        latest = int(np.argmax(columns["sent_ns"]))
        cell.most["issued_end"], cell.most["issued_done"] = (
            int(columns[name][latest]) for name in ("end_ns", "done_ns")
        )
    for name in ("done_ns", "last_token_ns"):
        cell.most[name] = max(cell.most.get(name, -1), int(columns[name].max()))
    start, end = columns["sent_ns"][sent], columns["done_ns"][sent]
    end = np.where(end < 0, start, end)
    cell.curve("flying").add(start, end, (end - start) / 1e9)
    answered = columns["first_token_ns"] >= 0
    cell.count("answered", answered.sum())
    cell.count("kernel_stamps", columns["kernel_stamp"][answered].sum())


def _tokens(cell: Cell, columns: Columns, ok: NDArray[np.bool_]) -> None:
    for name in ("output_tokens", "input_tokens", "cached_tokens", "reasoning_tokens", "asked_output"):
        cell.known(name, columns[name][ok])
    cached = ok & (columns["cached_tokens"] >= 0)
    cell.known("cached_base", columns["input_tokens"][cached])
    failed = columns.where(FAILED)
    cell.known("failed_input", columns["input_tokens"][failed])
    cell.known("failed_output", columns["output_tokens"][failed])
    events = columns["output_events"].astype(np.int64)
    streamed = metrics.streamed_tokens(columns)
    counted = ok & (columns["output_tokens"] >= 0) & (events > 0)
    cell.count("events", events[counted].sum())
    cell.count("streamed", streamed[counted].sum())
    cell.count("billed", columns["output_tokens"][counted].sum(dtype=np.int64))
    comparable = ok & (columns["asked_output"] >= 0) & (columns["output_tokens"] >= 0)
    cell.count("comparable", comparable.sum())
    cell.count("asked", columns["asked_output"][comparable].sum(dtype=np.int64))
    cell.count("asked_got", columns["output_tokens"][comparable].sum(dtype=np.int64))
    cell.count("unequal", (columns["asked_output"] != columns["output_tokens"])[comparable].sum())
    by_count = np.isin(columns["output_source"], [SOURCES.index("server"), SOURCES.index("tokenizer")])
    # requests whose output tokens a server or a tokenizer counted
    token_counted = ok & (events > 0) & by_count
    cell.count("told_events", events[token_counted].sum())
    cell.count("told_streamed", streamed[token_counted].sum())
    cell.count("surplus", np.maximum(streamed[token_counted] - events[token_counted] - 1, 0).sum())
    cell.count("unsaid", (ok & (columns["first_event_tokens"] == 0)).sum())
    both_counted = ok & (columns["input_source"] == SOURCES.index("server")) & (columns["built_tokens"] > 0)
    both_counted &= columns["input_tokens"] >= 0
    cell.count("both", both_counted.sum())
    cell.count("both_built", columns["built_tokens"][both_counted].sum(dtype=np.int64))
    cell.count("both_said", columns["input_tokens"][both_counted].sum(dtype=np.int64))
    for side in ("input", "output"):
        for code, count in enumerate(np.bincount(columns[f"{side}_source"][ok], minlength=len(SOURCES)).tolist()):
            cell.count(f"{side}_source_{SOURCES[code] or 'none'}", count)
    cell.curve("output").add(*metrics.token_spans(columns))
    first = np.where(columns["first_token_ns"] < 0, columns["end_ns"], columns["first_token_ns"])
    prompted = ok & (columns["input_tokens"] >= 0)
    cell.curve("input").add(first[prompted], first[prompted], columns["input_tokens"][prompted])


def _errors(cell: Cell, columns: Columns, texts: Sequence[str]) -> None:
    for kind in np.flatnonzero(np.bincount(columns["kind"])).tolist():
        if not kind or KINDS[kind] == "unfinished":
            continue
        places = np.flatnonzero(columns["kind"] == kind)
        with_text = places[columns["text"][places] >= 0]
        candidates = with_text if len(with_text) else places
        first = candidates[np.argmin(columns["due_ns"][candidates])]
        text, status = int(columns["text"][first]), int(columns["http_status"][first])
        words = texts[text] if 0 <= text < len(texts) else ""
        if KINDS[kind] == "worker_died":
            for worker in np.unique(columns["worker"][places]).tolist():
                cell.count(f"dead_{worker}", 1)
        cell.error(
            KINDS[kind], len(places), int(columns["due_ns"][first]), words or (f"HTTP {status}" if status else "")
        )
