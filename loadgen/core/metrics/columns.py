"""The records of a run by column: single stages, selections of records, and several stages joined.

Pure. It works on whole columns and never loops over records, since a run may have millions of them.
`request_metrics` computes the metrics of requests from these columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from loadgen.core import seeds
from loadgen.core.results.record import ROW, STATUSES
from loadgen.core.stats.histogram import merge_histograms
from loadgen.core.stats.quantiles import BLOCK_ROWS, block_slices
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
"""Fields and metrics that are used often, and are kept in memory once they were read or computed.
"""


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

    Classes are not recorded. They are drawn again from the seed of the run.

    Args:
        manifest: The manifest of the run.
        task_ids: The id of each task: the id of any of its requests, divided by
            `manifest.turns_per_session`. A single request is a task of one request.
    """
    shares = [request_class.share for request_class in manifest.classes]
    return seeds.draw_classes(manifest.seed or 0, shares, task_ids)


def is_of_class(manifest: RunManifest, name: str, rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which records are requests of the class with this name."""
    class_names = [request_class.name for request_class in manifest.classes]
    task_ids = rows["request"] // manifest.turns_per_session
    mask: NDArray[np.bool_] = class_indices(manifest, task_ids) == class_names.index(name)
    return mask


def step_indices(
    manifest: RunManifest, request_ids: NDArray[np.int64], turns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the step of each request as an index of `manifest.steps`, or NO_STEP.

    A task of an agent is a series of requests. A step is a named group of these requests, such as
    "plan" or "write code". The class of a request and its position in the task determine the step.

    Args:
        manifest: The manifest of the run.
        request_ids: The id of each request. The first task of a run has the ids from 0 to
            `manifest.turns_per_session` - 1.
        turns: The position of each request in its task, from 0.
    """
    if not manifest.classes:
        step_of_turn = _steps_of_class(manifest, class_name="")
        return step_of_turn[turns]

    task_ids = request_ids // manifest.turns_per_session
    class_of_request = class_indices(manifest, task_ids)

    step_of_request = np.full(len(request_ids), NO_STEP)
    for class_index, request_class in enumerate(manifest.classes):
        rows_of_class = np.flatnonzero(class_of_request == class_index)
        step_of_turn = _steps_of_class(manifest, request_class.name)
        step_of_request[rows_of_class] = step_of_turn[turns[rows_of_class]]

    return step_of_request


def _steps_of_class(manifest: RunManifest, class_name: str) -> NDArray[np.int64]:
    """Return the step index of each turn of the tasks of a class, or NO_STEP.

    The result [0, 0, 1] says that the first two requests of a task are its first step, and the
    third request is its second step.

    Args:
        manifest: The manifest of the run.
        class_name: The name of the class, "" for a run without classes.
    """
    step_of_turn = np.full(manifest.turns_per_session, NO_STEP)
    for step_index, step in enumerate(manifest.steps):
        if step.of_class == class_name:
            step_of_turn[list(step.turns)] = step_index
    return step_of_turn


# -- columns ---------------------------------------------------------------------------------------


class _RowSelection(NamedTuple):
    """Some of the records of a run, or all of them.

    Attributes:
        rows: The records or columns that contain the selected rows.
        selected: The selected ones of `rows`, as a mask or as indices. None if all are selected.
        length: The number of selected rows.
    """

    rows: RowSource
    selected: NDArray[Any] | None
    length: int


def _select_rows(rows: RowSource, selected: NDArray[np.bool_] | None) -> _RowSelection:
    """Return a selection of rows in the form that is cheapest to read columns with.

    Args:
        rows: The records or columns.
        selected: Which rows are selected. None selects all.
    """
    if selected is None:
        return _RowSelection(rows, selected=None, length=len(rows))

    count = int(np.count_nonzero(selected))
    if count == len(rows):
        return _RowSelection(rows, selected=None, length=count)

    # A slice of adjacent records copies nothing. A view by column cannot be sliced.
    adjacent_rows = _find_adjacent_rows(selected, count)
    can_be_sliced = not isinstance(rows, Columns)
    if adjacent_rows is not None and can_be_sliced:
        return _RowSelection(_slice_rows(rows, adjacent_rows), selected=None, length=count)

    # To copy most of the rows, a mask is faster. To copy few rows, indices are faster.
    are_most_selected = 2 * count > len(selected)
    mask_or_indices = selected if are_most_selected else np.flatnonzero(selected)
    return _RowSelection(rows, mask_or_indices, count)


def _find_adjacent_rows(selected: NDArray[np.bool_], count: int) -> slice | None:
    """Return the range of the selected rows, or None if they are not adjacent.

    Args:
        selected: Which rows are selected.
        count: The number of selected rows.
    """
    first = int(selected.argmax())  # the index of the first True
    end = first + count
    are_adjacent = bool(selected[first:end].all())
    return slice(first, end) if are_adjacent else None


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
            selected: Which rows to select; None selects all.
            keep_all: Whether to cache each column that is read. Otherwise only CACHED_COLUMNS are
                cached.
        """
        # Which rows this view has. The selection is a mask or indices, None for all rows.
        selection = _select_rows(rows, selected)
        self._rows = selection.rows
        self._selection = selection.selected
        self._length = selection.length

        # The columns that were read, by name, and whether every column is cached.
        self._cache: dict[str, NDArray[np.int64]] = {}
        self._keeps_all_columns = keep_all

        # The method of a file that reads a range of a column, None for records in memory.
        self._read_file_range = _range_reader(self._rows)
        is_file = self._read_file_range is not None
        self._is_large_file = is_file and self._length > BLOCK_ROWS

    def __len__(self) -> int:
        return self._length

    def _is_cached_once_read(self, name: str) -> bool:
        """Return True if a column is put in the cache when it is read."""
        if self._keeps_all_columns:
            return True
        return name in CACHED_COLUMNS and not self._is_large_file

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """Return the value of a field, such as "sent_ns", for each selected record."""
        if field in self._cache:
            return self._cache[field]
        if not len(self):
            return _empty_column(field)

        all_values = self._rows[field]
        if _is_constant(all_values):
            # All rows have the same value, so any rows have the values of the selected rows.
            return all_values[: len(self)]

        are_all_selected = self._selection is None
        selected_values = all_values if are_all_selected else all_values[self._selection]
        selected_values = np.ascontiguousarray(selected_values)
        if self._is_cached_once_read(field):
            self._cache[field] = selected_values

        return selected_values

    def take(self, field: str, positions: NDArray[Any] | slice) -> NDArray[np.int64]:
        """Return the values of a field at some positions of the selected rows.

        Args:
            field: The name of the field.
            positions: A slice, a mask (an array of booleans), or an array of indices.
        """
        if isinstance(positions, slice) or _is_mask(positions) or self._is_in_memory(field):
            values: NDArray[np.int64] = self[field][positions]
            return values

        # Indices are usually few. Only the part of the file with these rows is read.
        row_indices = self._row_indices(positions)
        return self._read_rows(field, row_indices)

    def _is_in_memory(self, field: str) -> bool:
        """Return True if a column is in memory, or will be when it is read."""
        return self._are_columns_in_memory or field in self._cache

    @property
    def _are_columns_in_memory(self) -> bool:
        """Whether every column stays in memory when it is read, here or in viewed `Columns`."""
        return self._keeps_all_columns or isinstance(self._rows, Columns)

    def _read_rows(self, field: str, row_indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of a field at some rows, reading as little of a file as possible.

        Args:
            field: The name of the field.
            row_indices: The indices of the rows among all records, selected or not.
        """
        if not len(row_indices):
            return _empty_column(field)

        if self._read_file_range is None:  # the records are in memory
            column: NDArray[Any] = self._rows[field]
            return column[row_indices]

        # Read the shortest range of the file that has all of these rows.
        first_row = int(row_indices.min())
        end_row = int(row_indices.max()) + 1
        values_in_range = self._read_file_range(field, first_row, end_row)

        if _is_constant(values_in_range):
            # All rows have the same value, so it is repeated without a copy.
            one_value = values_in_range[:1]
            return np.broadcast_to(one_value, len(row_indices))

        indices_in_range = row_indices - first_row
        return values_in_range[indices_in_range]

    def _row_indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices among all records of positions among the selected ones."""
        if self._selection is None:
            return positions
        is_mask = _is_mask(self._selection)
        selected_rows = self._selection.nonzero()[0] if is_mask else self._selection
        return selected_rows[positions]

    def blocks(self) -> Iterator[Columns]:
        """Yield the selected rows in order, in blocks that fit in memory.

        All rows are one block if their columns are in memory anyway.
        """
        if self._are_columns_in_memory or len(self._rows) <= BLOCK_ROWS:
            yield self
            return

        mask = self._selection_mask()
        for row_range in block_slices(len(self._rows)):
            block_rows = _slice_rows(self._rows, row_range)
            block_mask = None if mask is None else mask[row_range]
            yield Columns(block_rows, block_mask)

    def _selection_mask(self) -> NDArray[np.bool_] | None:
        """Return the selected rows as a mask, or None if all are selected."""
        if self._selection is None or _is_mask(self._selection):
            return self._selection
        mask = np.zeros(len(self._rows), bool)
        mask[self._selection] = True
        return mask

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
        """Compute a metric of a large file from one block at a time, to save memory."""
        _release_file_memory(self._rows)
        values = np.empty(len(self), np.int64)

        first = 0
        for block in self.blocks():
            end = first + len(block)
            values[first:end] = block.measure(metric)
            first = end

        return values

    def forget(self) -> None:
        """Free the memory of the cached columns, which are read again when they are needed."""
        self._cache.clear()

    def has_status(self, status: int) -> NDArray[np.bool_]:
        """Return which rows have this status, such as OK."""
        statuses = self["status"]
        if _is_constant(statuses):
            statuses = statuses[:1]  # one comparison is enough

        mask: NDArray[np.bool_] = statuses == status
        return np.broadcast_to(mask, len(self))

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
    def request_no_output(self) -> NDArray[np.bool_]:
        """Which rows request no output, in tasks of which others do: embeddings, or a ranking."""
        mask: NDArray[np.bool_] = self["asked_output"] == 0
        return mask

    @property
    def reached_due_time(self) -> NDArray[np.bool_]:
        """Which rows reached their due time: they were sent then, or dropped."""
        return self.is_known("sent_ns") | self.has_status(DROPPED)


def _empty_column(field: str) -> NDArray[np.int64]:
    """Return a column without rows, in the integer type that `record.FIELDS` has for the field."""
    return np.zeros(0, dtype=ROW[field])


def _is_mask(positions: NDArray[Any]) -> bool:
    """Return True if positions are a mask, which has a boolean for each row."""
    return bool(positions.dtype == bool)


def _is_constant(column: NDArray[Any]) -> bool:
    """Return True for an array of one value that is broadcast to a length."""
    return column.strides == (0,)


def _slice_rows(rows: Any, row_range: slice) -> Any:
    """Return adjacent records, without making records of the columns of a simulation."""
    return rows.slice_records(row_range) if hasattr(rows, "slice_records") else rows[row_range]


def _range_reader(rows: RowSource) -> Callable[[str, int, int], NDArray[Any]] | None:
    """Return the method of a file that reads a range of a column, None for records in memory.

    Its parameters are the name of the column, the first row, and the row after the last one.
    """
    return getattr(rows, "read_range", None)


def _release_file_memory(rows: Any) -> None:
    """Return memory that reading a file left unused to the system.

    Args:
        rows: The records of a file (`parquet.Frame`), or a part of them, whose attribute `frame` is
            the file.
    """
    file = getattr(rows, "frame", rows)
    file.release_memory()


class JoinedColumns:
    """The columns of several stages as one: one stage after the other, or in another order.

    For that order, the selected requests of all stages are numbered. If stage A has 3 of them and
    stage B has 2, those of A have the numbers 0 to 2, and those of B the numbers 3 and 4. The order
    [4, 0, 2] takes the second request of B, then the first and the third one of A.
    """

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
            only_ok: Whether to select only the ok requests; else all are selected.
            order: The numbers of the requests to take, in their order. The selected requests of all
                stages are numbered from 0, one stage after the other. None takes all of them.
            keeps_columns: Whether to cache each joined column that is read.
        """
        self._stages = stages
        self._keeps_columns = keeps_columns
        self._cache: dict[str, NDArray[np.int64]] = {}  # joined columns by name

        # For each stage, the rows of its columns that are taken.
        all_rows = slice(None)
        self._taken_rows: list[NDArray[Any] | slice] = [
            as_selection(columns.is_ok) if only_ok else all_rows for columns in stages
        ]

        # For each stage, the indices of its rows in the joined column. None if the joined column
        # has the rows of the first stage, then those of the second stage, and so on.
        self._joined_indices: list[NDArray[np.int64]] | None = None
        if order is not None:
            self._put_in_order(order)

    def _put_in_order(self, order: NDArray[np.int64]) -> None:
        """Take only the requests that `order` lists, and put them in that order.

        If stage A has the requests 0 to 2 and stage B the requests 3 and 4, the order [4, 0, 2]
        takes the rows [0, 2] of stage A to the indices [1, 2] of the joined column, and the row [1]
        of stage B to the index [0].

        Args:
            order: The numbers of the requests to take, in their order.
        """
        rows_of_stages = [
            np.arange(len(columns))[taken_rows]
            for columns, taken_rows in zip(self._stages, self._taken_rows, strict=True)
        ]
        self._taken_rows = []
        self._joined_indices = []

        # The requests of a stage have the numbers from `first_number` up to `end_number`.
        first_number = 0
        for rows in rows_of_stages:
            end_number = first_number + len(rows)
            is_of_stage = (order >= first_number) & (order < end_number)
            joined_indices = np.flatnonzero(is_of_stage)

            request_numbers = order[joined_indices]
            numbers_in_stage = request_numbers - first_number
            ordered_rows = rows[numbers_in_stage]

            self._taken_rows.append(ordered_rows)
            self._joined_indices.append(joined_indices)
            first_number = end_number

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """Return the column of a field of `record.FIELDS`."""
        if field in self._cache:
            return self._cache[field]

        stages = zip(self._stages, self._taken_rows, strict=True)
        values_of_stages = [columns.take(field, rows) for columns, rows in stages]
        return self._join(field, values_of_stages)

    def is_known(self, field: str) -> NDArray[np.bool_]:
        """Return in which rows a time or a number is known, so that it is not UNKNOWN (-1)."""
        mask: NDArray[np.bool_] = self[field] >= 0
        return mask

    def measure(self, metric: str) -> NDArray[np.int64]:
        """Return a metric of `loadgen.figures`, UNDEFINED for a row without a value."""
        if metric in self._cache:
            return self._cache[metric]

        stages = zip(self._stages, self._taken_rows, strict=True)
        values_of_stages = [columns.measure(metric)[rows] for columns, rows in stages]
        return self._join(metric, values_of_stages)

    def _join(self, name: str, values_of_stages: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the values of all stages as one column, and cache it if columns are cached.

        Args:
            name: The name of the field or metric.
            values_of_stages: The selected values of each stage.
        """
        if self._joined_indices is None:  # the values of each stage follow those of the previous
            column = join_arrays(values_of_stages).astype(np.int64, copy=False)
        else:
            column = _place_values(values_of_stages, self._joined_indices)

        if self._keeps_columns:
            self._cache[name] = column

        return column


def _place_values(
    value_arrays: Sequence[NDArray[np.int64]], index_arrays: Sequence[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return one array of the values in several arrays, each at an index of its own.

    For the values [[5, 6], [7]] with the indices [[0, 2], [1]], the result is [5, 7, 6].

    Args:
        value_arrays: The values.
        index_arrays: The index of each value in the result. Each index occurs once.
    """
    length = sum(map(len, value_arrays))
    placed_values = np.empty(length, np.int64)
    for values, indices in zip(value_arrays, index_arrays, strict=True):
        placed_values[indices] = values

    return placed_values
