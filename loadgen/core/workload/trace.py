"""The requests of a trace as columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.units import NS_PER_S

NO_VALUE = -1
"""The number of a session, group, label or set of fields in a row that has none."""

Integers = NDArray[np.int64]

_COLUMNS = (
    "input_tokens",
    "output_tokens",
    "session",
    "group",
    "took_ns",
    "pause_ns",
    "label",
    "fields_index",
)


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
        starts: The index of the first hash of each request, and the number of hashes at the end.
        tokens_of: The tokens that each hash covers.
        group: The number of the session with all its sub-agents, NO_VALUE if there is none.
        took_ns: The time from each request to the end of its response, UNKNOWN_NS if not known.
        pause_ns: The time from the end of the response before it in its session, UNKNOWN_NS if not
            known.
        label: The number of its kind of request in `labels`, NO_VALUE if the trace names none.
        fields_index: The index of its further body fields in `fields`, NO_VALUE if it has none.
        labels: The names of the kinds of requests.
        fields: Further body fields that requests have.
        untimed: The number of rows that only say what they wait for.
        skipped: The number of rows without output tokens, which are left out.
        time_unit: The unit that was assumed for times and why, if the format leaves it open.
        bad_rows: The number of rows with a mistake, which are left out.
        first_bad: The first such mistake and its place.
    """

    path: Path
    format: str
    due_ns: Integers
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    session: Integers
    hashes: Integers
    starts: Integers
    tokens_of: dict[int, int]
    group: Integers
    took_ns: Integers
    pause_ns: Integers
    label: Integers
    fields_index: Integers
    labels: tuple[str, ...] = ()
    fields: tuple[dict[str, Any], ...] = ()
    untimed: int = 0
    skipped: int = 0
    time_unit: str = ""
    bad_rows: int = 0
    first_bad: str = ""

    def __len__(self) -> int:
        return len(self.due_ns)

    def blocks(self, index: int) -> Sequence[int]:
        """Return the hashes of the prompt of a request, in the order of the text."""
        hashes: list[int] = self.hashes[self.starts[index] : self.starts[index + 1]].tolist()
        return hashes

    def reused_share(self, request_count: int | None = None) -> float | None:
        """Return which share of the prompt tokens is in earlier prompts, according to the hashes.

        This is the share that an unlimited prefix cache would know. It covers the first requests,
        or all if `request_count` is None. Return None for a trace without hashes.
        """
        last = len(self) if request_count is None else min(request_count, len(self))
        hashes = self.hashes[self.starts[0] : self.starts[last]]
        known_hashes, occurrences = np.unique(hashes, return_counts=True)
        if not len(known_hashes):
            return None
        tokens = np.array([self.tokens_of[known_hash] for known_hash in known_hashes.tolist()])
        reused_tokens = float((tokens * (occurrences - 1)).sum())
        all_tokens = float(self.input_tokens[:last].sum(dtype=np.int64))
        return min(1.0, reused_tokens / all_tokens)

    @property
    def end_ns(self) -> int:
        """The end of the trace: one mean gap after the last request, 0 for an empty trace."""
        return end_of_starts_ns(self.due_ns)

    @property
    def rate(self) -> float:
        """The mean requests per second, infinite if all requests were sent at once."""
        return len(self) * NS_PER_S / self.end_ns if self.end_ns else math.inf

    def select(self, rows: Integers) -> Trace:
        """Return the requests in some rows, at their times."""
        hashes, starts = reorder_hashes(self.hashes, self.starts, rows)
        columns = {name: getattr(self, name)[rows] for name in ("due_ns", *_COLUMNS)}
        return replace(self, hashes=hashes, starts=starts, **columns)

    def within(self, begin_ns: int, end_ns: int | None) -> Trace:
        """Return the requests that were sent in a part of the trace, with times from its first.

        Raises UserError if there are none. `end_ns` None means the end of the trace.
        """
        first = int(np.searchsorted(self.due_ns, begin_ns))
        last = len(self) if end_ns is None else int(np.searchsorted(self.due_ns, end_ns))
        if first >= last:
            seconds = self.due_ns[-1] / NS_PER_S
            problem = f"no requests in this part of the trace, which is {seconds:,.1f} s long"
            hint = "trace_slice 10m..20m is counted from its first request"
            raise UserError("empty_file", problem, str(self.path), hint)
        columns = {name: getattr(self, name)[first:last] for name in _COLUMNS}
        return replace(
            self,
            due_ns=self.due_ns[first:last] - self.due_ns[first],
            starts=self.starts[first : last + 1],
            **columns,
        )


def end_of_starts_ns(due_ns: Integers) -> int:
    """Return the end of a series of starts: one mean gap after the last one."""
    if not len(due_ns):
        return 0
    last_ns = int(due_ns[-1])
    gaps = len(due_ns) - 1
    return last_ns + last_ns // gaps if gaps else last_ns


def reorder_hashes(hashes: Integers, starts: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """Return the hashes of some rows in another order, and where those of each row start."""
    counts = np.diff(starts)[rows]
    ends = np.cumsum(counts)
    offset_in_row = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    indices = np.repeat(starts[:-1][rows], counts) + offset_in_row
    return hashes[indices], np.concatenate([np.zeros(1, np.int64), ends])
