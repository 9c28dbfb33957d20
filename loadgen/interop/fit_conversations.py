"""The conversations of a trace as laws: how they begin, how many requests follow, what each adds, the pauses. Pure."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core.workload.tasks import MAX_TASK_REQUESTS
from loadgen.core.workload.trace import Trace
from loadgen.interop import laws as shapes
from loadgen.interop.laws import Fit

LEAST = 20  # conversations: below, laws of them say nothing
GROWING = 0.9  # least share of later requests that hold what was said before, and more

Ints = NDArray[np.int64]


class TalkFit(Struct, frozen=True, kw_only=True):
    """Conversations as laws. Lists of fits: the chosen one first, then the others."""

    first: tuple[Fit, ...]  # tokens of the first prompt
    later: tuple[Fit, ...]  # requests after the first
    added: tuple[
        Fit, ...
    ]  # tokens that a later prompt has beside the prompt and the answer before it
    think_ms: tuple[Fit, ...]  # from the end of an answer to the next request


class Talks(Struct, frozen=True, kw_only=True):
    """The rows of a trace by what they are. `row`, `before`: each later request and the one before it.

    talks: of each row, whether it is of a conversation that is kept. starts: rows that begin one, or stand alone.
    lost: why conversations are not kept; "": they are, or there are none. beside: of them those that are of sub-agents,
    which are kept as conversations of their own.
    """

    talks: NDArray[np.bool_]
    starts: Ints
    row: Ints
    before: Ints
    lost: str = ""
    beside: int = 0


def talks(trace: Trace) -> Talks:
    """Which requests of a trace are of conversations that laws can keep: those of several requests, that grow."""
    count = len(trace)
    nothing = Talks(
        talks=np.zeros(count, bool),
        starts=np.arange(count),
        row=np.zeros(0, int),
        before=np.zeros(0, int),
    )
    named = np.flatnonzero(trace.session >= 0)
    order = named[np.argsort(trace.session[named], kind="stable")]  # by session, in order of time
    goes_on = np.flatnonzero(np.diff(trace.session[order]) == 0) if len(order) else order
    before, row = order[goes_on], order[goes_on + 1]
    sessions, sizes = np.unique(trace.session[row], return_counts=True)
    if not len(sessions):
        return nothing
    lost = _why_not(trace, row, before, len(sessions), int(sizes.max()) + 1)
    if lost:
        return Talks(
            talks=nothing.talks, starts=nothing.starts, row=row[:0], before=row[:0], lost=lost
        )
    is_later = np.zeros(count, bool)
    is_later[row] = True
    groups = len(np.unique(trace.group[np.isin(trace.session, sessions)]))
    return Talks(
        talks=np.isin(trace.session, sessions),
        starts=np.flatnonzero(~is_later),
        row=row,
        before=before,
        beside=len(sessions) - groups,
    )


def _why_not(trace: Trace, row: Ints, before: Ints, sessions: int, largest: int) -> str:
    if sessions < LEAST:
        return f"{sessions} conversations are too few to fit distributions"
    if largest > MAX_TASK_REQUESTS:
        return f"one has {largest:,} requests, and a task can have at most {MAX_TASK_REQUESTS:,}"
    if (_think_ns(trace, row, before) < 0).any():
        return "the trace has neither the end of responses nor the pauses between requests"
    if float((_added(trace, row, before) > 0).mean()) < GROWING:
        return "the prompts do not contain the earlier messages"
    return ""


def _added(trace: Trace, row: Ints, before: Ints) -> Ints:
    read, write = trace.input_tokens.astype(np.int64), trace.output_tokens.astype(np.int64)
    found: Ints = read[row] - read[before] - write[before]
    return found


def _think_ns(trace: Trace, row: Ints, before: Ints) -> Ints:
    """The pause before each later request; -1 where it is not told."""
    since = np.maximum(0, trace.due_ns[row] - trace.due_ns[before] - trace.took_ns[before])
    unknown = np.where(trace.took_ns[before] >= 0, since, -1)
    return np.where(trace.pause_ns[row] >= 0, trace.pause_ns[row], unknown)


def fit(trace: Trace, found: Talks, rows: NDArray[np.bool_]) -> TalkFit:
    """The laws of the conversations that begin in `rows`."""
    inside = rows[found.row]
    row, before = found.row[inside], found.before[inside]
    _, sizes = np.unique(trace.session[row], return_counts=True)
    firsts = found.starts[(rows & found.talks)[found.starts]]
    think_ms = np.maximum(1, np.rint(_think_ns(trace, row, before) / 1e6)).astype(np.int64)
    laws = (trace.input_tokens[firsts], sizes, np.maximum(1, _added(trace, row, before)), think_ms)
    first, later, added, think = (chosen_first(shapes.lengths(values)) for values in laws)
    return TalkFit(first=first, later=later, added=added, think_ms=think)


def chosen_first(fits: list[Fit]) -> tuple[Fit, ...]:
    """The nearest law, if it fits; else the values of the trace themselves."""
    if fits[0].fits or len(fits) == 1:
        return tuple(fits)
    return (fits[-1], *fits[:-1])
