"""The records of a run by column: single stages, selections of records, and several stages joined.

Pure. It works on whole columns and never loops over records, since a run may have millions of them.
`request_metrics` computes the metrics of requests from these columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from loadgen.core import seeds
from loadgen.core.results.record import ROW, STATUSES
from loadgen.core.stats.histogram import merge_histograms
from loadgen.core.stats.quantiles import BLOCK_ROWS, block_slices
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.stats.histogram import Histogram

OK, FAILED, DROPPED, CANCELLED, LOST, UNFINISHED = range(len(STATUSES))
"""The values of the column `status`."""

UNDEFINED = np.iinfo(np.int64).min
"""The value of a metric for a request that has none."""

UNKNOWN = -1
"""The value of a field of a record that is not known, such as the time of an event that never came,
or a number of tokens that nobody counted."""

NO_STEP = -1
"""The step index of a request that belongs to no step, for example because its class has none."""

NO_ROW = -1
"""The entry of a table of rows for a slot that no request has."""

RowSource: TypeAlias = "NDArray[np.void] | Columns"
"""Where columns come from: records in memory or in a file, or the columns of more records."""

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
"""Fields and metrics that are used often. They stay in memory once they were read or computed."""


# -- arrays ----------------------------------------------------------------------------------------


def join_arrays(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return several arrays as one, without a copy if only one of them has values."""
    filled_arrays = [array for array in arrays if len(array)]
    if not filled_arrays:
        return np.zeros(0, np.int64)
    if len(filled_arrays) == 1:
        return filled_arrays[0]
    return np.concatenate(filled_arrays)


def join_selected(
    columns_of_stages: Iterable[NDArray[Any]],
    selections: Sequence[NDArray[np.bool_] | slice],
) -> NDArray[Any]:
    """Return the selected values of a column of all stages as one array.

    Args:
        columns_of_stages: The column of each stage. A generator reads one stage at a time, which
            takes less memory than a list.
        selections: For each stage, which of its rows are selected.
    """
    stages = zip(columns_of_stages, selections, strict=True)
    return join_arrays([column[selection] for column, selection in stages])


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
    """Return the indices of requests in order of time, and of slot at equal times.

    A slot is the position of a request in the schedule of the run. The result is the same as that
    of `np.lexsort((slots, times_ns))`, which needs much longer for millions of requests.
    """
    rows_by_slot = _rows_by_slot(slots)
    if rows_by_slot is None:
        return np.lexsort((slots, times_ns))

    # Sort by slot first, and then by time. The times are nearly in order after the first sort, so
    # the second sort is fast. A stable sort keeps the order of slots at equal times.
    times_by_slot_ns = times_ns[rows_by_slot]
    positions_by_time = np.argsort(times_by_slot_ns, kind="stable")
    order: NDArray[np.int32] = rows_by_slot[positions_by_time]
    return order


def _rows_by_slot(slots: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """Return the indices of requests in order of their slots, by a table instead of a sort.

    For three requests with the slots 7, 5 and 8, the table of the slots 5 to 8 is
    [1, NO_ROW, 0, 2], and the result is [1, 0, 2].

    Return None if no table works: if two requests have the same slot, if most slots are empty, or
    if there are no requests.
    """
    request_count = len(slots)
    if not request_count:
        return None

    table_indices = slots - slots.min()
    table_size = int(table_indices.max()) + 1
    has_many_empty_slots = table_size > 2 * request_count + 1
    if has_many_empty_slots:
        return None

    table = np.full(table_size, NO_ROW, np.int32)
    table[table_indices] = np.arange(request_count, dtype=np.int32)
    rows = table[table != NO_ROW]

    # Of two requests with the same slot, one has overwritten the other one.
    have_same_slot = len(rows) < request_count
    return None if have_same_slot else rows


# -- measured stages, classes and steps ------------------------------------------------------------


def is_measured(manifest: RunManifest, rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which records belong to a measured stage, rather than to a warm-up.

    Raises:
        IndexError: If a record belongs to a stage that the manifest does not have.
    """
    # A run without stages is measured as a whole.
    measured_flags = [stage.measured for stage in manifest.stages] or [True]
    is_stage_measured = np.array(measured_flags)
    mask: NDArray[np.bool_] = is_stage_measured[rows["stage"]]
    return mask


def pool_measured_gaps(manifest: RunManifest, gaps: Sequence[Histogram]) -> Histogram:
    """Return the gaps between events of all measured stages, from a histogram of each stage."""
    return merge_histograms(
        histogram
        for stage, histogram in enumerate(gaps)
        if not manifest.stages or manifest.stages[stage].measured
    )


def class_indices(manifest: RunManifest, task_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class of each task as an index of `manifest.classes`.

    Records do not contain the class, because the seed of the run and the id of a task determine it.

    Args:
        manifest: The manifest of the run.
        task_ids: The id of each task. With 3 requests per task, the task 0 has the requests 0 to 2,
            and the task 1 has the requests 3 to 5. A single request is a task of one request.
    """
    shares = [request_class.share for request_class in manifest.classes]
    seed = manifest.seed or 0
    return seeds.draw_classes(seed, shares, task_ids)


def request_class_indices(
    manifest: RunManifest, request_ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the class of each request as an index of `manifest.classes`.

    All requests of a task, such as a conversation, have the same class.
    """
    task_ids = request_ids // manifest.turns_per_session
    return class_indices(manifest, task_ids)


def is_of_class(manifest: RunManifest, name: str, rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which records are requests of the class with this name."""
    class_names = [request_class.name for request_class in manifest.classes]
    class_of_record = request_class_indices(manifest, rows["request"])
    mask: NDArray[np.bool_] = class_of_record == class_names.index(name)
    return mask


def step_indices(
    manifest: RunManifest, request_ids: NDArray[np.int64], turns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the step of each request as an index of `manifest.steps`, or NO_STEP.

    A task of an agent is a series of requests. A step is a named group of these requests, such as
    "plan" or "write code".

    Args:
        manifest: The manifest of the run.
        request_ids: The id of each request, which determines its class.
        turns: The position of each request in its task, from 0.
    """
    step_table = _tabulate_steps(manifest)
    if manifest.classes:
        class_of_request = request_class_indices(manifest, request_ids)
    else:
        class_of_request = np.zeros(len(request_ids), np.int64)  # the only row of the table

    step_of_request: NDArray[np.int64] = step_table[class_of_request, turns]
    return step_of_request


def _tabulate_steps(manifest: RunManifest) -> NDArray[np.int64]:
    """Return the step index of each turn, or NO_STEP: a row per class, a column per turn.

    A run without classes has one row. The row [0, 0, 1] says that the first two requests of a task
    are the step 0, and the third request is the step 1.
    """
    class_names = [request_class.name for request_class in manifest.classes]
    row_names = class_names or [""]  # the steps of a run without classes have the class ""

    step_table = np.full((len(row_names), manifest.turns_per_session), NO_STEP)
    for step_index, step in enumerate(manifest.steps):
        row = row_names.index(step.of_class)
        step_table[row, list(step.turns)] = step_index

    return step_table


# -- columns ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SelectedRows:
    """Some or all of the rows of a table, where a row is the record of one request.

    Attributes:
        table: The records, in memory or in a file, or another view of records by column.
        indices: The indices of the selected rows in the table, ascending. None selects all rows.
    """

    table: RowSource
    indices: NDArray[np.int64] | None

    @classmethod
    def from_mask(cls, table: RowSource, mask: NDArray[np.bool_] | None) -> _SelectedRows:
        """Select the rows of a table for which a mask is True, or all rows if the mask is None."""
        if mask is None or mask.all():
            return cls(table, indices=None)

        indices = np.flatnonzero(mask)
        can_be_sliced = not isinstance(table, Columns)
        if can_be_sliced and _are_consecutive(indices):
            # Adjacent records, such as those of a stage, are read without a copy.
            first_row = int(mask.argmax())
            row_range = slice(first_row, first_row + len(indices))
            return cls(_slice_rows(table, row_range), indices=None)

        return cls(table, indices)

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return len(self.table) if self.indices is None else len(self.indices)

    def read_column(self, field: str) -> NDArray[Any]:
        """Return the value of a field, such as "sent_ns", for each selected row."""
        if len(self) == 0:
            return np.zeros(0, dtype=ROW[field])

        column: NDArray[Any] = self.table[field]
        if _is_constant(column):
            # One value in memory stands for all rows, so a part of them needs no copy.
            return column[: len(self)]

        values = column if self.indices is None else column[self.indices]
        return np.ascontiguousarray(values)

    def read_values(self, field: str, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of a field at some positions among the selected rows.

        Of records in memory, no other values are read.
        """
        if len(positions) == 0:
            return np.zeros(0, dtype=ROW[field])

        rows = positions if self.indices is None else self.indices[positions]
        column: NDArray[Any] = self.table[field]
        return column[rows]

    def mask_of_range(self, row_range: slice) -> NDArray[np.bool_] | None:
        """Return which rows in a range of the table are selected, or None if all rows are.

        If the rows 3, 5 and 9 are selected, the mask of the rows 4 to 7 is
        [False, True, False, False].
        """
        if self.indices is None:
            return None

        first_row, end_row = row_range.start, row_range.stop
        is_in_range = (self.indices >= first_row) & (self.indices < end_row)
        indices_in_range = self.indices[is_in_range] - first_row

        mask = np.zeros(end_row - first_row, bool)
        mask[indices_in_range] = True
        return mask


class Columns:
    """A view by column of the records of a run, of a selection of them, or of other columns.

    CACHED_COLUMNS are kept in memory, contiguous, once they were read or computed. Of a file with
    many records nothing is kept here, because its `Frame` keeps the columns that were read last.
    With `keep_all` every column is kept, which takes half a gigabyte for a run of two million.
    """

    def __init__(
        self,
        rows: RowSource,
        selected: NDArray[np.bool_] | None = None,
        *,
        keep_all: bool = False,
    ) -> None:
        """Create a view of some records, without reading a column yet.

        Args:
            rows: The records, in memory or in a file, or another view of records by column.
            selected: Which rows to select. None selects all.
            keep_all: Whether to cache each column that is read. Otherwise only CACHED_COLUMNS are
                cached.
        """
        self._rows = _SelectedRows.from_mask(rows, selected)
        self._keeps_all_columns = keep_all
        self._is_large_file = _is_file(self._rows.table) and len(self._rows) > BLOCK_ROWS

        # Columns and metrics in memory, by name.
        self._cache: dict[str, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return len(self._rows)

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """Return the value of a field, such as "sent_ns", for each selected row."""
        if field in self._cache:
            return self._cache[field]

        values = self._rows.read_column(field)
        is_often_used = field in CACHED_COLUMNS and not self._is_large_file
        if is_often_used or self._keeps_all_columns:
            self._cache[field] = values

        return values

    def take(self, field: str, positions: NDArray[Any] | slice) -> NDArray[np.int64]:
        """Return the values of a field at some positions among the selected rows.

        Args:
            field: The name of the field.
            positions: Indices, which may be few, or a mask or a slice.
        """
        if isinstance(positions, slice) or positions.dtype == bool or field in self._cache:
            values: NDArray[np.int64] = self[field][positions]
            return values

        return self._rows.read_values(field, positions)

    def blocks(self) -> Iterator[Columns]:
        """Yield the selected rows in order, in blocks that fit in memory.

        All rows are one block if their columns are in memory anyway.
        """
        table = self._rows.table
        are_columns_in_memory = self._keeps_all_columns or isinstance(table, Columns)
        if are_columns_in_memory or len(table) <= BLOCK_ROWS:
            yield self
            return

        for row_range in block_slices(len(table)):
            block_of_table = _slice_rows(table, row_range)
            yield Columns(block_of_table, self._rows.mask_of_range(row_range))

    def measure(self, metric: str) -> NDArray[np.int64]:
        """Return a metric of each selected row, such as "ttft", in ns.

        A row without a value has UNDEFINED.
        """
        if metric in self._cache:
            return self._cache[metric]
        if self._is_large_file and not self._keeps_all_columns:
            return self._measure_by_blocks(metric)

        compute_metric = METRICS.values(metric)
        values = compute_metric(self)
        if metric in CACHED_COLUMNS:
            self._cache[metric] = values

        return values

    def _measure_by_blocks(self, metric: str) -> NDArray[np.int64]:
        """Compute a metric of a large file from one block of rows at a time, to save memory."""
        _release_file_memory(self._rows.table)
        values = np.empty(len(self), np.int64)

        first = 0
        for block in self.blocks():
            end = first + len(block)
            values[first:end] = block.measure(metric)
            first = end

        return values

    def clear_cache(self) -> None:
        """Free the memory of the cached columns, which are read again when they are needed."""
        self._cache.clear()

    def has_status(self, status: int) -> NDArray[np.bool_]:
        """Return which rows have this status, such as OK."""
        mask: NDArray[np.bool_] = self["status"] == status
        return mask

    def is_known(self, field: str) -> NDArray[np.bool_]:
        """Return in which rows a time or a number is known, so that it is not UNKNOWN (-1)."""
        mask: NDArray[np.bool_] = self[field] >= 0
        return mask

    def known_or_zero(self, field: str) -> NDArray[np.int64]:
        """Return a time or a number of each row, 0 where it is UNKNOWN (-1)."""
        values: NDArray[np.int64] = np.maximum(self[field], 0)
        return values

    @property
    def is_ok(self) -> NDArray[np.bool_]:
        """Which requests have a complete response."""
        return self.has_status(OK)

    @property
    def expects_output(self) -> NDArray[np.bool_]:
        """Which requests expect output tokens, unlike those for embeddings or a ranking."""
        mask: NDArray[np.bool_] = self["asked_output"] != 0
        return mask

    @property
    def reached_due_time(self) -> NDArray[np.bool_]:
        """Which rows reached their due time: they were sent then, or dropped."""
        return self.is_known("sent_ns") | self.has_status(DROPPED)


def _are_consecutive(indices: NDArray[np.int64]) -> bool:
    """Return True if ascending indices have no gaps, such as 3, 4 and 5."""
    if len(indices) == 0:
        return True
    return bool(indices[-1] - indices[0] == len(indices) - 1)


def _is_constant(column: NDArray[Any]) -> bool:
    """Return True for an array of one value that is broadcast to a length."""
    return column.strides == (0,)


def _slice_rows(rows: Any, row_range: slice) -> Any:
    """Return adjacent records, without making records of the columns of a simulation."""
    return rows.slice_records(row_range) if hasattr(rows, "slice_records") else rows[row_range]


def _is_file(rows: RowSource) -> bool:
    """Return True for the records in a file, which are read from it when they are needed."""
    return hasattr(rows, "read_range")


def _release_file_memory(rows: Any) -> None:
    """Return memory that reading a file left unused to the system.

    Args:
        rows: The records of a file (`parquet.Frame`), or a part of them, whose attribute `frame` is
            the file.
    """
    file = getattr(rows, "frame", rows)
    file.release_memory()


class _JoinedRows(NamedTuple):
    """The rows of one stage in joined columns.

    Attributes:
        columns: The columns of the stage.
        rows: The rows to take from these columns: indices, a mask or a slice.
        positions: Where the values of these rows are in a joined column: indices or a slice.
    """

    columns: Columns
    rows: NDArray[Any] | slice
    positions: NDArray[np.int64] | slice


class JoinedColumns:
    """The columns of several stages as one: one stage after the other, or in another order."""

    def __init__(
        self,
        stages: Sequence[Columns],
        *,
        only_ok: bool,
        order: NDArray[np.int64] | None = None,
        keeps_columns: bool = True,
    ) -> None:
        """Join the columns of several stages.

        Args:
            stages: The columns of each stage.
            only_ok: Whether to join the ok requests of each stage only.
            order: The requests to take, in their order, as indices among the joined requests. If
                the first of two stages has 3 requests, [4, 0] takes the second request of the
                second stage and the first one of the first stage. None takes all.
            keeps_columns: Whether to cache each joined column that is read.
        """
        masks = [columns.is_ok if only_ok else np.full(len(columns), True) for columns in stages]
        if order is None:
            self._length = int(sum(np.count_nonzero(mask) for mask in masks))
            self._stages = _join_rows(stages, masks)
        else:
            self._length = len(order)
            self._stages = _join_rows_in_order(stages, masks, order)

        self._keeps_columns = keeps_columns
        self._cache: dict[str, NDArray[np.int64]] = {}  # joined columns and metrics by name

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """Return the value of a field, such as "sent_ns", for each request."""
        if field in self._cache:
            return self._cache[field]

        values_of_stages = (stage.columns.take(field, stage.rows) for stage in self._stages)
        return self._join(field, values_of_stages)

    def is_known(self, field: str) -> NDArray[np.bool_]:
        """Return for which requests a time or a number is known, so that it is not UNKNOWN (-1)."""
        mask: NDArray[np.bool_] = self[field] >= 0
        return mask

    def measure(self, metric: str) -> NDArray[np.int64]:
        """Return a metric, such as "ttft", of each request; UNDEFINED for one without a value."""
        if metric in self._cache:
            return self._cache[metric]

        values_of_stages = (stage.columns.measure(metric)[stage.rows] for stage in self._stages)
        return self._join(metric, values_of_stages)

    def _join(self, name: str, values_of_stages: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the values of all stages as one column, and cache it if columns are cached.

        Args:
            name: The name of the field or metric.
            values_of_stages: The values of the rows of each stage.
        """
        column = np.empty(self._length, np.int64)
        for stage, values in zip(self._stages, values_of_stages, strict=True):
            column[stage.positions] = values

        if self._keeps_columns:
            self._cache[name] = column

        return column


def _join_rows(stages: Sequence[Columns], masks: Sequence[NDArray[np.bool_]]) -> list[_JoinedRows]:
    """Return the rows to join of each stage, which follow those of the previous stage.

    Args:
        stages: The columns of each stage.
        masks: For each stage, which of its rows are joined.
    """
    joined_rows = []
    first_position = 0
    for columns, mask in zip(stages, masks, strict=True):
        end_position = first_position + int(np.count_nonzero(mask))
        positions = slice(first_position, end_position)
        joined_rows.append(_JoinedRows(columns, as_selection(mask), positions))
        first_position = end_position

    return joined_rows


def _join_rows_in_order(
    stages: Sequence[Columns], masks: Sequence[NDArray[np.bool_]], order: NDArray[np.int64]
) -> list[_JoinedRows]:
    """Return the rows of each stage that an order takes, and their positions in that order.

    If the first of two stages has 3 rows, the order [4, 0, 2] takes its rows [0, 2] to the
    positions [1, 2], and the row [1] of the second stage to the position [0].

    Args:
        stages: The columns of each stage.
        masks: For each stage, which of its rows are counted in `order`.
        order: The indices of the rows to take, counted over all stages.
    """
    joined_rows = []
    first_index = 0
    for columns, mask in zip(stages, masks, strict=True):
        rows = np.flatnonzero(mask)
        end_index = first_index + len(rows)
        is_of_stage = (order >= first_index) & (order < end_index)

        indices_in_stage = order[is_of_stage] - first_index
        positions = np.flatnonzero(is_of_stage)
        joined_rows.append(_JoinedRows(columns, rows[indices_in_stage], positions))
        first_index = end_index

    return joined_rows
