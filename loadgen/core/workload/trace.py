"""The requests of a trace as columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.units import NS_PER_S

NO_VALUE = -1
"""The number of a session, group, label or set of fields in a row that has none."""

Integers = NDArray[np.int64]


class Trace(Struct, frozen=True, kw_only=True, eq=False):
    """The requests of a trace in order of arrival. Each column has one value per request.

    A hash stands for a block of a prompt and all text before it. So two prompts with an equal hash
    share all text from the beginning to the end of that block.

    Attributes:
        path: The file.
        format: The name of its format.
        due_ns: When each request was sent, from the first one on.
        input_tokens: The tokens of each prompt.
        output_tokens: The tokens of each response.
        session: The number of the conversation or agent, NO_VALUE if the trace names none.
        hashes: The hashes of all prompts, one request after the other.
        hash_starts: The index of the first hash of each request, and the number of hashes at the
            end.
        tokens_by_hash: The tokens of the block that each hash stands for.
        group: The number of the session with all its sub-agents, NO_VALUE if there is none.
        duration_ns: The time from each request to the end of its response, UNKNOWN_NS if not known.
        pause_ns: The time from the end of the response before it in its session, UNKNOWN_NS if not
            known.
        label: The number of its kind of request in `labels`, NO_VALUE if the trace names none.
        fields_index: The index of its further body fields in `fields`, NO_VALUE if it has none.
        labels: The names of the kinds of requests.
        fields: Further body fields that requests have.
        untimed_rows: The number of rows that only say what they wait for.
        rows_without_output: The number of rows without output tokens, which are left out.
        time_unit: The unit that was assumed for times and why, if the format leaves it open.
        bad_rows: The number of rows with a mistake, which are left out.
        first_error: The first such mistake and its place.
    """

    path: Path
    format: str
    due_ns: Integers
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    session: Integers
    hashes: Integers
    hash_starts: Integers
    tokens_by_hash: dict[int, int]
    group: Integers
    duration_ns: Integers
    pause_ns: Integers
    label: Integers
    fields_index: Integers
    labels: tuple[str, ...] = ()
    fields: tuple[dict[str, Any], ...] = ()
    untimed_rows: int = 0
    rows_without_output: int = 0
    time_unit: str = ""
    bad_rows: int = 0
    first_error: str = ""

    def __len__(self) -> int:
        return len(self.due_ns)

    @property
    def has_session(self) -> NDArray[np.bool_]:
        """Return for each request whether the trace says which session it belongs to."""
        has_session: NDArray[np.bool_] = self.group != NO_VALUE
        return has_session

    @property
    def has_duration(self) -> NDArray[np.bool_]:
        """Return for each request whether the trace says how long its response took."""
        return self.duration_ns >= 0

    @property
    def has_pause(self) -> NDArray[np.bool_]:
        """Return for each request whether the trace records the pause before it."""
        return self.pause_ns >= 0

    def block_hashes(self, index: int) -> Sequence[int]:
        """Return the hashes of the prompt of a request, in the order of the text."""
        hashes: list[int] = self.hashes[
            self.hash_starts[index] : self.hash_starts[index + 1]
        ].tolist()
        return hashes

    def reused_share(self, request_count: int | None = None) -> float | None:
        """Return the share of prompt tokens that an unlimited prefix cache would know already.

        Args:
            request_count: The number of first requests to look at, or None for all.

        Returns:
            A share from 0 to 1, or None for a trace without hashes.
        """
        end = len(self) if request_count is None else min(request_count, len(self))

        # A slice of a trace shares the hashes of the complete trace, so its first is not always 0.
        hashes = self.hashes[self.hash_starts[0] : self.hash_starts[end]]
        if not len(hashes):
            return None

        reused_tokens = self._count_reused_tokens(hashes)
        prompt_tokens = float(self.input_tokens[:end].sum(dtype=np.int64))

        # The tokens of a block can be rounded up, so that the sum can exceed that of the prompts.
        return min(1.0, reused_tokens / prompt_tokens)

    def _count_reused_tokens(self, hashes: Integers) -> float:
        """Return how many tokens are in blocks whose hash has occurred before.

        A hash stands for a block of a prompt. The block is new where its hash occurs first, and all
        its tokens are reused at each later occurrence.
        """
        distinct_hashes, occurrences = np.unique(hashes, return_counts=True)
        tokens_of_blocks = np.array(
            [self.tokens_by_hash[block_hash] for block_hash in distinct_hashes.tolist()]
        )
        return float((tokens_of_blocks * (occurrences - 1)).sum())

    @property
    def end_ns(self) -> int:
        """The end of the trace: one mean gap after the last request, 0 for an empty trace."""
        return end_of_arrivals_ns(self.due_ns)

    @property
    def rate(self) -> float:
        """The mean requests per second, infinite if all requests were sent at once."""
        return len(self) * NS_PER_S / self.end_ns if self.end_ns else math.inf

    def select(self, rows: Integers) -> Trace:
        """Return a trace of the requests in some rows, in the order of `rows`.

        Their times are not changed, so the first request may not be at 0.
        """
        hashes, hash_starts = select_hashes(self.hashes, self.hash_starts, rows)
        selected = self._with_rows(rows)
        return replace(selected, due_ns=self.due_ns[rows], hashes=hashes, hash_starts=hash_starts)

    def _with_rows(self, rows: Integers | slice) -> Trace:
        """Return this trace with only some rows of most columns.

        The result is incomplete: `due_ns`, `hashes` and `hash_starts` still belong to all rows. The
        caller must replace them, because how they change depends on the selection.
        """
        return replace(
            self,
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            session=self.session[rows],
            group=self.group[rows],
            duration_ns=self.duration_ns[rows],
            pause_ns=self.pause_ns[rows],
            label=self.label[rows],
            fields_index=self.fields_index[rows],
        )

    def select_times(self, begin_ns: int, end_ns: int | None) -> Trace:
        """Return a trace of the requests that were sent from `begin_ns` until before `end_ns`.

        Times in the result are relative to its first request. The hashes of prompts are not copied:
        the result has the `hashes` of the whole trace, and its `hash_starts` point to those of its
        own requests.

        Args:
            begin_ns: The begin of the part, from the first request of the trace on.
            end_ns: The end of the part, or None for the end of the trace.

        Raises:
            UserError: No request was sent in this part of the trace.
        """
        # Requests are in order of time, so those of the part are the rows `first` to `end - 1`.
        first = int(np.count_nonzero(self.due_ns < begin_ns))
        end = len(self) if end_ns is None else int(np.count_nonzero(self.due_ns < end_ns))
        if first >= end:
            seconds = self.due_ns[-1] / NS_PER_S
            problem = f"this part of the trace, which lasts {seconds:,.1f} s, has no requests"
            hint = "trace_slice 10m..20m counts from the first request of the trace"
            raise UserError("empty_file", problem, str(self.path), hint)

        return replace(
            self._with_rows(slice(first, end)),
            due_ns=self.due_ns[first:end] - self.due_ns[first],
            # One start more than there are requests: the last one is the end of the last request.
            hash_starts=self.hash_starts[first : end + 1],
        )


def end_of_arrivals_ns(due_ns: Integers) -> int:
    """Return the end of a series of arrivals that begins at 0: one mean gap after the last one.

    With this end the series has the mean rate of its arrivals, and it can be repeated without a
    shorter gap between two passes. A single arrival has no gap, so its end is the arrival itself.
    """
    if not len(due_ns):
        return 0

    last_ns = int(due_ns[-1])
    gap_count = len(due_ns) - 1
    if gap_count == 0:
        return last_ns

    mean_gap_ns = last_ns // gap_count
    return last_ns + mean_gap_ns


class RowHashes(NamedTuple):
    """The hashes of several rows, one row after the other, and where those of each row start.

    For example, the hashes [a, b, c] with the starts [0, 1, 3] are a in row 0, and b and c in row
    1. The last start is the number of all hashes.
    """

    hashes: Integers
    hash_starts: Integers


def select_hashes(hashes: Integers, hash_starts: Integers, rows: Integers) -> RowHashes:
    """Return the hashes of some rows, in the order of `rows`, in the form of `RowHashes`.

    For example, rows 1 and 0 of the hashes [a, b, c] with the starts [0, 1, 3] have the hashes
    [b, c, a] with the starts [0, 2, 3]. The comments below show the values in this example.

    Args:
        hashes: The hashes of all rows, one row after the other.
        hash_starts: The index of the first hash of each row, and the number of hashes at the end.
        rows: The rows to return.
    """
    # One value per row of the result.
    start_of_row = hash_starts[rows]  # [1, 0]
    hash_count_of_row = np.diff(hash_starts)[rows]  # [2, 1]

    # One value per hash of the result.
    start_of_row_of_hash = np.repeat(start_of_row, hash_count_of_row)  # [1, 1, 0]
    index_in_row = _number_within_rows(hash_count_of_row)  # [0, 1, 0]
    index_in_hashes = start_of_row_of_hash + index_in_row  # [1, 2, 0]

    selected_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(hash_count_of_row)])
    return RowHashes(hashes[index_in_hashes], selected_starts)


def _number_within_rows(counts: Integers) -> Integers:
    """Return the position of each item in its row, from 0, one row after the other.

    `counts` is the number of items of each row. For example, [2, 1, 3] gives [0, 1, 0, 0, 1, 2].
    """
    item_indexes = np.arange(int(counts.sum()))  # [0, 1, 2, 3, 4, 5]
    first_item_of_row = np.cumsum(counts) - counts  # [0, 2, 3]
    return item_indexes - np.repeat(first_item_of_row, counts)
