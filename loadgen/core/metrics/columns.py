"""The records of a run by column: single stages, selections of records, and several stages joined.

Pure. It works on whole columns and never loops over records, since a run may have millions of them.
`request_metrics` computes the metrics of requests from these columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.core import seeds
from loadgen.core.results.record import ROW, STATUSES
from loadgen.core.stats.histogram import merge_histograms
from loadgen.core.stats.quantiles import BLOCK_ROWS, block_slices
from loadgen.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.stats.histogram import Histogram

OK, FAILED, DROPPED, CANCELLED, LOST, UNFINISHED = range(len(STATUSES))

UNDEFINED = np.iinfo(np.int64).min
"""The value of a metric for a request that has none."""

NO_STEP = -1
"""The step of a request that belongs to none."""

CACHED_COLUMNS = frozenset(
    (
        "status",
        "kind",
        "stage",
        "turn",
        "due_ns",
        "sent_ns",
        "first_token_ns",
        "last_token_ns",
        "end_ns",
        "done_ns",
        "input_tokens",
        "output_tokens",
        "asked_output",
        "reasoning_tokens",
        "output_events",
        "first_event_tokens",
        "ttft",
        "tpot",
    )
)
"""Fields and metrics that are used often, and are kept in memory once they were read or computed.
"""


# -- arrays ----------------------------------------------------------------------------------------


def join_arrays(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return several arrays as one. If only one of them has values, it is not copied."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return np.zeros(0, np.int64)
    return filled[0] if len(filled) == 1 else np.concatenate(filled)


def drop_undefined(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values that are not UNDEFINED; the same array if all are."""
    if values.min(initial=0) != UNDEFINED:
        return values
    known: NDArray[np.int64] = values[values != UNDEFINED]
    return known


def as_selection(mask: NDArray[np.bool_]) -> NDArray[np.bool_] | slice:
    """Return an index that selects what a mask does, and does not copy if that is everything."""
    return slice(None) if mask.all() else mask


def order_by_time(times_ns: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[Any]:
    """Return the indices that put requests in order of time, and of their slots at equal times.

    Most slots are in order of time. So the requests are first put in order of their slots, by a
    table, and then sorted by time, which is fast for values that are nearly in order.
    """
    if not len(slots):
        return np.lexsort((slots, times_ns))
    lowest = int(slots.min())
    span = int(slots.max()) - lowest
    if span > 2 * len(slots):
        return np.lexsort((slots, times_ns))
    row_of_slot = np.full(span + 1, -1, np.int32)
    row_of_slot[slots - lowest] = np.arange(len(slots), dtype=np.int32)
    rows = row_of_slot[row_of_slot >= 0]
    has_repeated_slots = len(rows) < len(slots)
    if has_repeated_slots:
        return np.lexsort((slots, times_ns))
    order: NDArray[np.int32] = rows[np.argsort(times_ns[rows], kind="stable")]
    return order


# -- measured stages, classes and steps ------------------------------------------------------------


def is_measured(header: RunManifest, rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which records belong to a measured stage."""
    is_stage_measured = np.array([stage.measured for stage in header.stages] or [True])
    mask: NDArray[np.bool_] = is_stage_measured[rows["stage"]]
    return mask


def pool_measured_gaps(header: RunManifest, gaps: Sequence[Histogram]) -> Histogram:
    """Return the gaps between events of the measured stages. `gaps`: one histogram per stage."""
    return merge_histograms(
        histogram
        for i, histogram in enumerate(gaps)
        if not header.stages or header.stages[i].measured
    )


def class_indices(header: RunManifest, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class of each task or request as an index of `header.classes`.

    `starts` are the numbers of tasks, conversations and single requests: the number of a request
    divided by the turns of the run.
    """
    return seeds.classes(header.seed or 0, [plan.share for plan in header.classes], starts)


def is_of_class(header: RunManifest, name: str, rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which records are requests of a class."""
    class_index = [plan.name for plan in header.classes].index(name)
    mask: NDArray[np.bool_] = class_indices(header, rows["request"] // header.turns) == class_index
    return mask


def step_indices(
    header: RunManifest, requests: NDArray[np.int64], turns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the step of each request as an index of `header.steps`, NO_STEP without one.

    Args:
        header: The manifest of the run.
        requests: The number of each request.
        turns: The turn of each request.
    """
    class_names = [plan.name for plan in header.classes] or [""]
    step_of_turn = np.full((len(class_names), header.turns), NO_STEP)
    for index, step in enumerate(header.steps):
        step_of_turn[class_names.index(step.of_class), list(step.turns)] = index
    starts = requests // header.turns
    classes = class_indices(header, starts) if header.classes else np.zeros_like(starts)
    steps: NDArray[np.int64] = step_of_turn[classes, turns]
    return steps


# -- columns ---------------------------------------------------------------------------------------


class Columns:
    """A view by column of the records of a run, of a selection of them, or of other columns.

    CACHED_COLUMNS are kept in memory, contiguous, once they were read or computed. Of a file with
    many records nothing is kept here, because its `Frame` keeps the columns that were read last.
    With `keep_all` every column is kept, which takes half a gigabyte for a run of two million.
    """

    def __init__(
        self,
        rows: NDArray[np.void] | Columns,
        chosen: NDArray[np.bool_] | None = None,
        *,
        keep_all: bool = False,
    ) -> None:
        """Take records or columns, and which of them to select; None selects all."""
        self._length = len(rows) if chosen is None else int(np.count_nonzero(chosen))
        self._rows = rows
        self._selection: NDArray[Any] | None = None
        if chosen is not None and self._length < len(rows):
            self._select(chosen)
        self._read_range = getattr(self._rows, "within", None)  # records of a file have this method
        self._cache: dict[str, NDArray[np.int64]] = {}
        self._keeps_all = keep_all
        self._is_large_file = self._read_range is not None and self._length > BLOCK_ROWS

    def _select(self, chosen: NDArray[np.bool_]) -> None:
        """Select records in the cheapest way: a slice if they are adjacent, else a mask or indices.

        A mask copies faster if it selects most records, and indices if it selects few.
        """
        first = int(chosen.argmax())
        if not isinstance(self._rows, Columns) and chosen[first : first + self._length].all():
            self._rows = _slice_rows(self._rows, slice(first, first + self._length))
        elif 2 * self._length > len(chosen):
            self._selection = chosen
        else:
            self._selection = np.flatnonzero(chosen)

    def __len__(self) -> int:
        return self._length

    def _is_kept(self, name: str) -> bool:
        if self._keeps_all:
            return True
        return name in CACHED_COLUMNS and not self._is_large_file

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """Return the column of a field of `record.FIELDS`, in the integer type of that field."""
        if field in self._cache:
            return self._cache[field]
        if not len(self):
            return np.zeros(0, ROW[field])
        column = self._rows[field]
        if _is_constant(column):
            return column[: len(self)]
        column = np.ascontiguousarray(
            column if self._selection is None else column[self._selection]
        )
        if self._is_kept(field):
            self._cache[field] = column
        return column

    def take(self, field: str, chosen: NDArray[Any] | slice) -> NDArray[np.int64]:
        """Return the values of a field in some rows, given by index, mask or slice.

        Of a file only the range that holds these rows is read.
        """
        is_at_hand = self._keeps_all or field in self._cache or isinstance(self._rows, Columns)
        is_mask = isinstance(chosen, slice) or chosen.dtype == bool
        if isinstance(chosen, slice) or is_mask or is_at_hand or not len(chosen):
            values: NDArray[np.int64] = self[field][chosen]
        else:
            values = self._read_rows(field, self._row_indices(chosen))
        return values

    def _read_rows(self, field: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return a field of some of all records, of a file from the range that holds them."""
        if self._read_range is None:
            column: NDArray[Any] = self._rows[field]
            return column[rows]
        first = int(rows.min())
        column = self._read_range(field, first, int(rows.max()) + 1)
        if _is_constant(column):
            return np.broadcast_to(column[:1], len(rows))
        return column[rows - first]

    def _row_indices(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices among all records of some of the selected ones."""
        if self._selection is None:
            return chosen
        if self._selection.dtype == bool:
            return self._selection.nonzero()[0][chosen]
        return self._selection[chosen]

    def blocks(self) -> Iterator[Columns]:
        """Yield the same rows in order, in blocks of BLOCK_ROWS if there are many.

        What is computed from a block at a time takes little memory.
        """
        rows = self._rows
        if isinstance(rows, Columns) or self._keeps_all or len(rows) <= BLOCK_ROWS:
            yield self
            return
        mask = self._selection
        if mask is not None and mask.dtype != bool:
            mask = np.zeros(len(rows), bool)
            mask[self._selection] = True
        for block in block_slices(len(rows)):
            yield Columns(_slice_rows(rows, block), None if mask is None else mask[block])

    def measure(self, metric: str) -> NDArray[np.int64]:
        """Return a metric of `loadgen.figures` for every row, UNDEFINED without a value.

        Times are in ns.
        """
        if metric in self._cache:
            return self._cache[metric]
        if self._is_large_file and not self._keeps_all:
            return self._measure_by_blocks(metric)
        values = FIGURES.values(metric)(self)
        if metric in CACHED_COLUMNS:
            self._cache[metric] = values
        return values

    def _measure_by_blocks(self, metric: str) -> NDArray[np.int64]:
        """Compute a metric of a large file from one block at a time, which keeps memory small."""
        frame = getattr(self._rows, "frame", self._rows)
        frame.give_back()  # type: ignore[union-attr]
        values = np.empty(len(self), np.int64)
        first = 0
        for block in self.blocks():
            values[first : first + len(block)] = block.measure(metric)
            first += len(block)
        return values

    def forget(self) -> None:
        """Free the memory of the kept columns. They are read again when they are needed."""
        self._cache.clear()

    def where(self, status: int) -> NDArray[np.bool_]:
        """Return which rows have this status."""
        statuses = self["status"]
        if _is_constant(statuses):
            statuses = statuses[:1]
        mask: NDArray[np.bool_] = statuses == status
        return np.broadcast_to(mask, len(self))

    @property
    def request_no_output(self) -> NDArray[np.bool_]:
        """Which rows request no output, in tasks of which others do: embeddings, or a ranking."""
        mask: NDArray[np.bool_] = self["asked_output"] == 0
        return mask

    @property
    def reached_due_time(self) -> NDArray[np.bool_]:
        """Which rows reached their due time: they were sent then, or dropped."""
        return (self["sent_ns"] >= 0) | self.where(DROPPED)


def _is_constant(column: NDArray[Any]) -> bool:
    """Return True for an array of one value that is broadcast to a length."""
    return column.strides == (0,)


def _slice_rows(rows: Any, block: slice) -> Any:
    """Return adjacent records, without making records of the columns of a simulation."""
    return rows.part(block) if hasattr(rows, "part") else rows[block]


class JoinedColumns:
    """The columns of several stages as one.

    The columns are kept once they were read, unless `keep` is False, which suits those who need
    each of many columns once.
    """

    def __init__(
        self,
        parts: Sequence[Columns],
        *,
        ok: bool,
        order: NDArray[np.int64] | None = None,
        keep: bool = True,
    ) -> None:
        """Take the columns of each stage.

        Args:
            parts: The columns of each stage.
            ok: Whether to take their ok requests alone.
            order: The indices of the requests to take, in this order; None takes all.
            keep: Whether to keep the columns that were read.
        """
        self._parts = parts
        self._keep = keep
        self._cache: dict[str, NDArray[np.int64]] = {}
        masks = [part.where(OK) if ok else np.ones(1, bool) for part in parts]
        self._chosen: list[NDArray[Any] | slice] = [as_selection(mask) for mask in masks]
        self._position: NDArray[np.int64] | None = None
        if order is not None:
            self._take_in_order(order)

    def _take_in_order(self, order: NDArray[np.int64]) -> None:
        """Choose the rows of each part, and remember where each belongs in the whole."""
        rows_of_parts = [
            np.arange(len(part))[chosen]
            for part, chosen in zip(self._parts, self._chosen, strict=True)
        ]
        first_of_part = np.cumsum([0, *map(len, rows_of_parts)])
        part_of_request = np.searchsorted(first_of_part, order, "right") - 1
        self._chosen = [
            rows[order[part_of_request == i] - first_of_part[i]]
            for i, rows in enumerate(rows_of_parts)
        ]
        # The chosen rows are read part after part. The inverse of that permutation restores the
        # order.
        self._position = np.argsort(np.argsort(part_of_request, kind="stable"))

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """Return the column of a field of `record.FIELDS`."""
        return self._join(field, lambda part, chosen: part.take(field, chosen))

    def measure(self, metric: str) -> NDArray[np.int64]:
        """Return a metric of `loadgen.figures`, UNDEFINED for a row without a value."""
        return self._join(metric, lambda part, chosen: part.measure(metric)[chosen])

    def _join(
        self, name: str, column: Callable[[Columns, NDArray[Any] | slice], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Return a field or metric of all parts as one column, in the order of the requests."""
        if name in self._cache:
            return self._cache[name]
        columns = [
            column(part, chosen) for part, chosen in zip(self._parts, self._chosen, strict=True)
        ]
        joined: NDArray[np.int64] = join_arrays(columns).astype(np.int64, copy=False)
        if self._position is not None:
            joined = joined[self._position]
        if self._keep:
            self._cache[name] = joined
        return joined
