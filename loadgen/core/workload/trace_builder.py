"""Collect the rows of a trace as columns while a file is read."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, has_too_many
from loadgen.core.units import LONGEST_NS, NS_PER_S, InvalidValueError
from loadgen.core.workload import trace_formats
from loadgen.core.workload.trace import NO_VALUE, Trace
from loadgen.core.workload.trace_formats import UNKNOWN_NS, TraceColumns, TraceRow

NS_PER_DAY = 86_400 * NS_PER_S

BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Possible tokens per hash, for formats that do not define them."""
ROWS_FOR_BLOCK_SIZE = 2_000
"""Rows that the tokens per hash are inferred from."""

# The types of columns, as in the module `array`.
INT64 = "q"
INT32 = "i"
FLOAT64 = "d"

Integers = NDArray[np.int64]
T = TypeVar("T")


class _OptionalColumn:
    """A column that few traces have. It takes no memory until a row has a value for it."""

    def __init__(self, default: float, typecode: str = INT64) -> None:
        """Start with no rows.

        Args:
            default: Stands in the column for every row that has no value.
            typecode: The type of the values, as in the module `array`.
        """
        self._default = default
        self._typecode = typecode

        # While all rows have the default, only their number is stored, and there are no values.
        self._values: array[Any] | None = None
        self._default_rows = 0

    def add(self, value: float) -> None:
        """Add the value of the next row.

        The first value that is not the default creates the column, with defaults for earlier rows.
        """
        if self._values is None:
            if value == self._default:
                self._default_rows += 1
                return
            self._values = array(self._typecode, [self._default]) * self._default_rows
        self._values.append(value)

    def add_defaults(self, rows: int) -> None:
        """Add rows without a value."""
        if self._values is None:
            self._default_rows += rows
        else:
            self._values.extend([self._default] * rows)

    def to_numpy(self) -> NDArray[Any]:
        """Return the values of all rows."""
        if self._values is None:
            # This array takes no memory.
            return np.broadcast_to(np.int64(self._default), self._default_rows)
        return _to_numpy(self._values)


class _TextColumn(_OptionalColumn):
    """An optional column of texts that repeat in many rows, such as the names of sessions.

    It stores a number for each row. Texts are numbered in the order in which they first occur, and
    a row without a text has NO_VALUE.
    """

    def __init__(self) -> None:
        super().__init__(NO_VALUE)
        self._numbers: dict[str, int] = {}

    def add_text(self, text: str) -> None:
        """Add the text of the next row, "" for none."""
        number = self._numbers.setdefault(text, len(self._numbers)) if text else NO_VALUE
        self.add(number)

    def texts(self) -> tuple[str, ...]:
        """Return all texts in order of their numbers."""
        return tuple(self._numbers)


class _HashColumn:
    """The hashes of the prompts of all rows, stored as in a sparse matrix (CSR).

    `_hashes` has the hashes of all rows, one row after the other. Row n has those from `_starts[n]`
    up to `_starts[n + 1]` (exclusive). With [a, b, c] and the starts [0, 1, 3], row 0 has a, and
    row 1 has b and c.

    Many traces have no hashes. Until the first hash, only the number of rows is stored, and
    `_starts` is empty.
    """

    def __init__(self) -> None:
        self._hashes = array("q")
        self._starts = array("q")
        self._rows_before_first_hash = 0

    def add(self, hashes: Sequence[int]) -> None:
        """Add the hashes of the next row, which may have none."""
        if not hashes:
            self.add_rows_without_hashes(1)
            return

        self._begin()
        self._hashes.extend(hashes)
        self._starts.append(len(self._hashes))

    def add_rows(self, hashes: Sequence[int], hash_counts: Sequence[int]) -> None:
        """Add the hashes of several rows. `hash_counts` says how many of them each row has."""
        self._begin()
        ends_in_hashes = np.cumsum(hash_counts)
        _extend(self._starts, len(self._hashes) + ends_in_hashes)
        self._hashes.extend(hashes)

    def _begin(self) -> None:
        """Create the starts at the first row with hashes. The rows before it have 0 hashes each."""
        if not self._starts:
            self._starts = array("q", [0]) * (self._rows_before_first_hash + 1)

    def add_rows_without_hashes(self, rows: int) -> None:
        """Add several rows, none of which has hashes."""
        if self._starts:
            self._starts.extend([len(self._hashes)] * rows)
        else:
            self._rows_before_first_hash += rows

    def hashes(self) -> Integers:
        """Return the hashes of all rows, one row after the other."""
        return _to_numpy(self._hashes)

    def starts(self) -> Integers:
        """Return the index of the first hash of each row, and the number of hashes."""
        if self._starts:
            return _to_numpy(self._starts)
        # These zeros take no memory.
        return np.broadcast_to(np.int64(0), self._rows_before_first_hash + 1)


class TraceBuilder:
    """The columns of a trace while its rows are read."""

    def __init__(self, path: Path, *, skip_bad: bool, must_be_ordered: bool) -> None:
        """Start with an empty trace.

        Args:
            path: The file that is read, for error messages.
            skip_bad: Whether rows with mistakes are left out and counted. Otherwise they are
                errors.
            must_be_ordered: Whether the rows must be in order of time. Otherwise `build` sorts
                them.
        """
        self.path = path
        self._skip_bad = skip_bad
        self._must_be_ordered = must_be_ordered

        # -- Required columns --
        # When each request was sent. These are the times of the file, which `build` makes relative
        # to the first row.
        self._due_ns = array(INT64)

        # The lengths of the prompt and of the response.
        self._input_tokens = array(INT32)
        self._output_tokens = array(INT32)

        # -- Optional columns --
        # The conversation or agent that sent the request, and the group of an agent and all its
        # sub-agents.
        self._session = _TextColumn()
        self._group = _TextColumn()

        # How long the response took, and the pause between the previous response and this request.
        self._duration_ns = _OptionalColumn(UNKNOWN_NS)
        self._pause_ns = _OptionalColumn(UNKNOWN_NS)

        # The kind of the request, and further fields of its body.
        self._label = _TextColumn()
        self._fields = _TextColumn()

        # The prompt as blocks of tokens, which several prompts may contain: a hash for each block,
        # and the size of the blocks of each prompt.
        self._hashes = _HashColumn()
        self._block_tokens = _OptionalColumn(0.0, FLOAT64)

        # -- State of reading --
        # The times of the first and of the previous row, which the time of the next row is checked
        # against. There is no first row yet.
        self._first_ns: int | None = None
        self._previous_ns = 0

        # Set when so many rows have mistakes that the file need not be read further.
        self.has_enough_errors = False

        # -- For the report of what was read --
        self._rows_without_output = 0
        self._bad_rows = 0
        self._untimed_rows = 0
        self._errors: list[LoadgenError] = []

    def __len__(self) -> int:
        return len(self._due_ns)

    # -- adding rows -----------------------------------------------------------------------------

    def add(self, row: TraceRow) -> None:
        """Add a row whose values are valid, or count it if its request has no output.

        Raises InvalidValueError if its time does not fit those of the rows before it.
        """
        self._accept_time(row.at_ns)
        if row.output_tokens < 1:
            # BurstGPT marks failures this way. There is no output to request.
            self._rows_without_output += 1
            return

        if not row.has_time:
            self._untimed_rows += 1

        self._due_ns.append(row.at_ns)
        self._input_tokens.append(row.input_tokens)
        self._output_tokens.append(row.output_tokens)
        self._session.add_text(row.session)

        # A session without sub-agents has no name for the group of all its agents.
        self._group.add_text(row.group or row.session)
        self._block_tokens.add(row.block_tokens)
        self._duration_ns.add(row.duration_ns)
        self._pause_ns.add(row.pause_ns)
        self._label.add_text(row.label)
        self._fields.add_text(row.fields)
        self._hashes.add(row.hashes)

    def _accept_time(self, at_ns: int) -> None:
        """Check the time of a row against those of earlier rows, and remember it for later rows.

        Raises InvalidValueError if the time is before that of the previous row (if rows must be in
        order), or more than a year from that of the first row.
        """
        if self._first_ns is None:
            self._first_ns = at_ns
            self._previous_ns = at_ns

        if at_ns < self._previous_ns and self._must_be_ordered:
            raise _order_error(step_back_ns=self._previous_ns - at_ns)

        distance_ns = abs(at_ns - self._first_ns)
        if distance_ns > LONGEST_NS:  # A year.
            raise _distance_error(distance_ns)

        self._previous_ns = at_ns

    def can_continue_with(self, at_ns: Integers) -> bool:
        """Return True if times follow those of the rows so far, so that columns can be added.

        Otherwise the rows are added one by one, so that the first wrong time is reported.
        """
        first_ns = int(at_ns[0]) if self._first_ns is None else self._first_ns
        previous_ns = self._previous_ns if len(self) else at_ns[0]
        is_ascending = bool((np.diff(at_ns, prepend=previous_ns) >= 0).all())
        return is_ascending and int(at_ns[-1]) - first_ns <= LONGEST_NS

    def add_columns(self, columns: TraceColumns) -> None:
        """Add many rows at once. Rows whose requests have no output are only counted.

        The values must be valid, and the times must follow those of the rows before
        (`can_continue_with`). Columns that the rows do not have are filled with defaults, so that
        all columns of the trace stay equally long.
        """
        if not len(columns.at_ns):
            return

        if self._first_ns is None:
            self._first_ns = int(columns.at_ns[0])

        self._previous_ns = int(columns.at_ns[-1])
        has_output = columns.output_tokens > 0
        self._rows_without_output += int((~has_output).sum())
        self._append_columns(_select_rows(columns, has_output))

    def _append_columns(self, columns: TraceColumns) -> None:
        """Append rows to every column of the trace."""
        row_count = len(columns.at_ns)
        _extend(self._due_ns, columns.at_ns)
        _extend(self._input_tokens, columns.input_tokens)
        _extend(self._output_tokens, columns.output_tokens)
        self._add_sessions(columns)
        self._add_durations(columns)

        if columns.hashes:
            self._hashes.add_rows(columns.hashes, columns.hash_counts)
        else:
            self._hashes.add_rows_without_hashes(row_count)

        # `TraceColumns` has no values for these columns.
        self._block_tokens.add_defaults(row_count)
        self._pause_ns.add_defaults(row_count)
        self._label.add_defaults(row_count)
        self._fields.add_defaults(row_count)

    def _add_sessions(self, columns: TraceColumns) -> None:
        """Add the names of the sessions of several rows.

        A trace has two names for each row: the conversation of one agent (`session`), and the group
        of all conversations of an agent and its sub-agents (`group`). Rows in columns have no
        sub-agents, so each conversation is a group by itself. Without a column of sessions, the
        rows have neither name.
        """
        if not columns.sessions:
            row_count = len(columns.at_ns)
            self._session.add_defaults(row_count)
            self._group.add_defaults(row_count)
            return

        for session_name in columns.sessions:
            self._session.add_text(session_name)
            self._group.add_text(session_name)

    def _add_durations(self, columns: TraceColumns) -> None:
        """Add how long the requests of several rows took, if the trace says it."""
        if not columns.duration_ns:
            self._duration_ns.add_defaults(len(columns.at_ns))
            return

        for duration_ns in columns.duration_ns:
            self._duration_ns.add(duration_ns)

    def add_bad_row(self, error: InvalidValueError, location: str) -> None:
        """Count a row with a mistake, and store the mistake for the report.

        If bad rows are left out, only the first mistake is stored, as an example. Otherwise the
        first MAX_ERRORS mistakes are, and reading can stop after so many.

        Args:
            error: The mistake.
            location: The file and line of the row.
        """
        self._bad_rows += 1
        located_error = UserError(error.code, str(error), location, error.hint, key=error.key)
        has_example = bool(self._errors)
        if not self._skip_bad:
            self._add_error(located_error)
        elif not has_example:
            self._errors.append(located_error)

    def _add_error(self, error: UserError) -> None:
        """Add a mistake to those that are reported, and set `has_enough_errors` at the limit."""
        self._errors.append(error)

        # At the limit, this also appends an error that says that the file is not checked further.
        if has_too_many(self._errors, file=str(self.path)):
            self.has_enough_errors = True

    def count_bad_rows(self, rows: int) -> None:
        """Count further rows with mistakes that are not described."""
        self._bad_rows += rows

    # -- the result ------------------------------------------------------------------------------

    def times_ns(self) -> Integers:
        """Return the times of the rows so far, in the order of the file."""
        return _to_numpy(self._due_ns)

    def build(self, format_name: str) -> Trace:
        """Return the trace of all rows, in order of arrival and with times from the first one.

        Raises CombinedError if rows have mistakes, and UserError if there are no rows.
        """
        self._check_can_build()
        trace = self._build_in_file_order(format_name)
        block_tokens = self._block_tokens.to_numpy()

        is_unordered = (np.diff(trace.due_ns) < 0).any()
        if is_unordered:
            order_of_arrival = np.argsort(trace.due_ns, kind="stable")
            trace = trace.select(order_of_arrival)
            block_tokens = block_tokens[order_of_arrival]

        return replace(
            trace,
            due_ns=trace.due_ns - trace.due_ns[0],
            tokens_by_hash=_count_tokens_by_hash(trace, block_tokens),
        )

    def _check_can_build(self) -> None:
        """Raise CombinedError if rows have mistakes, and UserError if there are no rows."""
        if self._errors and not self._skip_bad:
            raise CombinedError(self._errors)
        if not len(self):
            problem = f"the trace has no requests{self._reason_for_no_rows()}"
            hint = trace_formats.describe_known_formats()
            raise UserError("empty_file", problem, str(self.path), hint)

    def _build_in_file_order(self, format_name: str) -> Trace:
        """Return the rows in the order of the file, with absolute times in `due_ns`.

        `tokens_by_hash` is still empty, because it depends on the order of arrival.
        """
        return Trace(
            path=self.path,
            format=format_name,
            due_ns=_to_numpy(self._due_ns),
            input_tokens=_to_numpy(self._input_tokens),
            output_tokens=_to_numpy(self._output_tokens),
            session=self._session.to_numpy(),
            group=self._group.to_numpy(),
            duration_ns=self._duration_ns.to_numpy(),
            pause_ns=self._pause_ns.to_numpy(),
            label=self._label.to_numpy(),
            labels=self._label.texts(),
            fields_index=self._fields.to_numpy(),
            fields=tuple(json.loads(fields) for fields in self._fields.texts()),
            hashes=self._hashes.hashes(),
            hash_starts=self._hashes.starts(),
            tokens_by_hash={},
            untimed_rows=self._untimed_rows,
            rows_without_output=self._rows_without_output,
            bad_rows=self._bad_rows,
            first_error=self._describe_first_error(),
        )

    def _describe_first_error(self) -> str:
        """Return the place and the text of the first mistake in a row, or "" if there is none."""
        if not self._errors:
            return ""
        first_error = self._errors[0]
        return f"{first_error.where}: {first_error.message}"

    def _reason_for_no_rows(self) -> str:
        """Return why the rows of the file were left out, as the end of a sentence, or ""."""
        if self._rows_without_output:
            return f": {format.counted(self._rows_without_output, 'row')} without output"
        if self._bad_rows:
            return f": {format.counted(self._bad_rows, 'bad row')} and no valid row"
        return ""


def _order_error(step_back_ns: int) -> InvalidValueError:
    """Return the error of a row whose time is this long before that of the previous row."""
    problem = f"the time is {step_back_ns / NS_PER_S:,.6g} s before that of the previous row"
    hint = "sort the rows by time, or skip such rows with on_bad_row: skip"
    return InvalidValueError("unordered", problem, hint)


def _distance_error(distance_ns: int) -> InvalidValueError:
    """Return the error of a row whose time is too far from that of the first row."""
    days = distance_ns / NS_PER_DAY
    problem = f"the time is {days:,.0f} days after that of the first row"
    hint = "a trace may last at most a year. Set trace_unit if the unit is wrong: s, ms, us or ns"
    return InvalidValueError("out_of_range", problem, hint)


def _to_numpy(column: array[Any]) -> NDArray[Any]:
    """Return the values of an array without copying them."""
    return np.frombuffer(column, column.typecode) if column else np.zeros(0, np.int64)


def _extend(column: array[int], values: Integers) -> None:
    """Append values to an array, converted to its type."""
    column.frombytes(values.astype(np.dtype(column.typecode)).tobytes())


def _select_rows(columns: TraceColumns, is_selected: NDArray[np.bool_]) -> TraceColumns:
    """Return the rows of a batch for which `is_selected` is True, with their hashes.

    A column that the trace does not have is empty, also in the result.
    """
    if is_selected.all():
        return columns

    return TraceColumns(
        at_ns=columns.at_ns[is_selected],
        input_tokens=columns.input_tokens[is_selected],
        output_tokens=columns.output_tokens[is_selected],
        hashes=_select_hashes(columns, is_selected),
        hash_counts=_select_values(columns.hash_counts, is_selected),
        sessions=_select_values(columns.sessions, is_selected),
        duration_ns=_select_values(columns.duration_ns, is_selected),
    )


def _select_hashes(columns: TraceColumns, is_selected: NDArray[np.bool_]) -> list[int]:
    """Return the hashes of the selected rows, one row after the other.

    Each hash is selected if its row is. For example, the first of two rows is selected, and they
    have 1 and 2 hashes. The selection of hashes is then [True, False, False].
    """
    if not columns.hashes:
        return []

    is_hash_selected = np.repeat(is_selected, columns.hash_counts)
    selected_hashes: list[int] = np.array(columns.hashes, np.int64)[is_hash_selected].tolist()
    return selected_hashes


def _select_values(values: Sequence[T], is_selected: NDArray[np.bool_]) -> list[T]:
    """Return the values of the selected rows, or an empty list for an empty column."""
    if not values:
        return []
    return [values[row] for row in np.flatnonzero(is_selected).tolist()]


class _HashedBlocks(NamedTuple):
    """The blocks of tokens that some hashes stand for. Each column has one value per hash."""

    hashes: Integers
    requests: Integers
    """The index of the request whose prompt contains the block."""
    positions: Integers
    """The position of the block among the blocks of that prompt, from 0."""


def _find_first_blocks(hashes: Integers, hash_starts: Integers) -> _HashedBlocks:
    """Return each distinct hash of a trace, with the first block that has it.

    For example, the hashes [7, 8, 7, 9] with the starts [0, 2, 4] belong to two prompts, of 7 and 8
    and of 7 and 9. The hashes 7 and 8 occur first in prompt 0 at the positions 0 and 1, and 9
    occurs in prompt 1 at position 1. The comments below show the values in this example.

    Args:
        hashes: The hashes of all prompts, one request after the other.
        hash_starts: The index of the first hash of each request, and the number of all hashes.
    """
    hash_counts = np.diff(hash_starts)
    request_of_hash = np.repeat(np.arange(len(hash_counts)), hash_counts)  # [0, 0, 1, 1]

    # One value per distinct hash.
    distinct_hashes, first_indexes = np.unique(hashes, return_index=True)  # indexes [0, 1, 3]
    requests = request_of_hash[first_indexes]  # [0, 0, 1]
    positions = first_indexes - hash_starts[requests]  # [0, 1, 1]

    return _HashedBlocks(distinct_hashes, requests, positions)


def _count_tokens_by_hash(trace: Trace, block_tokens: NDArray[Any]) -> dict[int, int]:
    """Return how many tokens each distinct block of the prompts has, by the hash of the block.

    A prompt is a sequence of blocks of equal size, each with a hash. Its last block may be smaller.
    For example, a prompt of 20 tokens in blocks of 16 has the hashes 7 and 8, and one of 24 tokens
    has 7 and 9. The result is {7: 16, 8: 4, 9: 8}.

    `block_tokens` is the block size of each prompt, or 0 where the file does not define it.
    """
    if not len(trace.hashes):
        return {}

    inferred_size = _infer_block_tokens(np.diff(trace.hash_starts), trace.input_tokens)
    block_sizes = np.where(block_tokens > 0, block_tokens, inferred_size)

    blocks = _find_first_blocks(trace.hashes, trace.hash_starts)
    token_counts = _count_block_tokens(
        block_positions=blocks.positions,
        block_sizes=block_sizes[blocks.requests],
        prompt_tokens=trace.input_tokens[blocks.requests],
    )
    return dict(zip(blocks.hashes.tolist(), token_counts.tolist(), strict=True))


def _count_block_tokens(
    block_positions: Integers, block_sizes: NDArray[Any], prompt_tokens: NDArray[np.int32]
) -> Integers:
    """Return how many tokens each of several blocks has.

    A prompt is divided into blocks of equal size, and its last block is as long as the rest. With
    blocks of 16 tokens, the blocks at the positions 0, 1 and 2 of a prompt of 40 tokens have 16, 16
    and 8 tokens.

    Traces can be inconsistent: if this prompt also has a block at position 3, no token is left for
    it. Such a block counts as one token, because no block may be empty.

    Args:
        block_positions: The position of each block in its prompt, from 0.
        block_sizes: The size of the blocks of its prompt. It can be a mean size such as 2.5. Blocks
            then start at the nearest whole tokens: 0, 2, 5, 8.
        prompt_tokens: The tokens of its prompt.
    """
    block_starts = np.rint(block_positions * block_sizes)
    block_ends = np.rint((block_positions + 1) * block_sizes)
    starts_in_prompt = np.minimum(block_starts, prompt_tokens)
    ends_in_prompt = np.minimum(block_ends, prompt_tokens)
    tokens_in_prompt = ends_in_prompt - starts_in_prompt
    tokens_in_blocks: Integers = np.maximum(tokens_in_prompt, 1).astype(np.int64)
    return tokens_in_blocks


def _infer_block_tokens(hash_counts: Integers, input_tokens: NDArray[np.int32]) -> int:
    """Infer how many tokens of a prompt each hash of a trace stands for, its block size.

    Block sizes are usually powers of two. The result is the one in BLOCK_SIZES that fits at least
    half of the first prompts with hashes, or else the mean number of tokens per hash.

    Args:
        hash_counts: The number of hashes of each prompt.
        input_tokens: The tokens of each prompt.
    """
    prompts_with_hashes = np.flatnonzero(hash_counts[:ROWS_FOR_BLOCK_SIZE])
    if not len(prompts_with_hashes):
        return BLOCK_SIZES[0]

    hashes = hash_counts[prompts_with_hashes]
    tokens = input_tokens[prompts_with_hashes].astype(np.int64)
    best_size = max(BLOCK_SIZES, key=lambda size: _count_fitting_prompts(size, hashes, tokens))
    if _count_fitting_prompts(best_size, hashes, tokens) * 2 >= len(prompts_with_hashes):
        return best_size

    mean_tokens_per_hash = float(tokens.sum() / hashes.sum())
    return max(1, round(mean_tokens_per_hash))


def _count_fitting_prompts(block_size: int, hash_counts: Integers, tokens: Integers) -> int:
    """Return how many prompts have as many hashes as they would have blocks of this size.

    The last block may be incomplete: 40 tokens are 3 blocks of 16, so the size 16 fits a prompt of
    40 tokens with 3 hashes.
    """
    blocks_rounded_up = (tokens + block_size - 1) // block_size
    return int((hash_counts == blocks_rounded_up).sum())
