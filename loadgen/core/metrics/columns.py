"""The rows of a run by column, and the figures of each request over them.

Pure. It works on whole columns and never loops over rows, since the run of a rack has two million of them. The rows of
`loadgen.figures` name these functions; the definitions are those of `loadgen_sdk.measures`, here over columns, and a
test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.core import seeds
from loadgen.core.limits import CONTRADICTING, CONTRADICTING_TOKENS
from loadgen.core.results.record import ROW, STATUSES
from loadgen.core.stats.quantiles import BLOCK_ROWS, Histogram, pooled
from loadgen.core.stats.quantiles import in_parts as in_parts  # noqa: PLC0414 - those who work with columns know it here
from loadgen.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest


OK, FAILED, DROPPED, CANCELLED, LOST, UNFINISHED = range(len(STATUSES))

_KEPT = (
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


def neighbours(rows: Any, part: slice) -> Any:
    """Rows side by side; of columns, without making rows of them."""
    return rows.part(part) if hasattr(rows, "part") else rows[part]


def together(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Numbers of several parts as one array; where only one has any, they are not copied."""
    some = [part for part in parts if len(part)] or [np.zeros(0, np.int64)]
    return some[0] if len(some) == 1 else np.concatenate(some)


def is_measured(header: RunManifest, rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which rows are of a measured stage."""
    flags: NDArray[np.bool_] = np.array([stage.measured for stage in header.stages] or [True])[
        rows["stage"]
    ]
    return flags


def measured_gaps(header: RunManifest, gaps: Sequence[Histogram]) -> Histogram:
    """The gaps between events of the measured stages; `gaps`: one histogram per stage."""
    return pooled(
        histogram
        for i, histogram in enumerate(gaps)
        if not header.stages or header.stages[i].measured
    )


def class_of(header: RunManifest, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class of each task, conversation or single request, by its number: an index into `header.classes`."""
    return seeds.classes(header.seed or 0, [plan.share for plan in header.classes], starts)


def of_class(header: RunManifest, name: str, rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which rows are requests of a class of this run: a mask of the same length."""
    place = [plan.name for plan in header.classes].index(name)
    chosen: NDArray[np.bool_] = class_of(header, rows["request"] // header.turns) == place
    return chosen


def step_of(
    header: RunManifest, requests: NDArray[np.int64], turns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each row the index of its step in `header.steps`, -1 for none. `requests`: numbers of the requests."""
    names = [plan.name for plan in header.classes] or [""]
    table = np.full((len(names), header.turns), -1)
    for index, step in enumerate(header.steps):
        table[names.index(step.of_class), list(step.turns)] = index
    starts = requests // header.turns
    drawn = class_of(header, starts) if header.classes else np.zeros_like(starts)
    found: NDArray[np.int64] = table[drawn, turns]
    return found


class Columns:
    """A view by column of the rows of a run, of a selection of them, or of a selection of other columns.

    Columns that are used often are kept in memory, contiguous, once they were read or derived; those of a file are kept
    by its `Frame`. `keep_all` keeps every column: half a gigabyte for the run of a rack.
    """

    __slots__ = ("_keep", "_kept", "_length", "_rows", "_selected", "_within")

    def __init__(
        self,
        rows: NDArray[np.void] | Columns,
        chosen: NDArray[np.bool_] | None = None,
        *,
        keep_all: bool = False,
    ) -> None:
        self._rows = rows
        self._length = len(rows) if chosen is None else int(np.count_nonzero(chosen))
        # of most rows a mask, which is copied by faster, of fewer their places; those side by side are not copied
        self._selected: NDArray[Any] | None = None
        if chosen is not None and self._length < len(rows):
            first = int(chosen.argmax())
            if not isinstance(rows, Columns) and chosen[first : first + self._length].all():
                self._rows = neighbours(rows, slice(first, first + self._length))
            else:
                self._selected = chosen if 2 * self._length > len(rows) else np.flatnonzero(chosen)
        self._within = getattr(self._rows, "within", None)  # of a file
        self._kept: dict[str, NDArray[np.int64]] = {}
        is_small = len(self) <= BLOCK_ROWS or not self._within
        self._keep: Collection[str] | None = None if keep_all else _KEPT if is_small else ()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """The column of one field of `record.FIELDS`, in the integer type of that field."""
        if field in self._kept:
            return self._kept[field]
        if not len(self):
            return np.zeros(0, ROW[field])
        column = self._rows[field]
        if column.strides == (0,):
            return column[: len(self)]
        column = np.ascontiguousarray(column if self._selected is None else column[self._selected])
        if self._keep is None or field in self._keep:
            self._kept[field] = column
        return column

    def take(self, field: str, chosen: NDArray[Any] | slice) -> NDArray[np.int64]:
        """The values of a field in some rows, by place or by mask: others are not read for some places."""
        by_mask = isinstance(chosen, slice) or chosen.dtype == bool or not len(chosen)
        if by_mask or field in self._kept or self._keep is None or isinstance(self._rows, Columns):
            return self[field][chosen]
        places: Any = chosen
        if self._selected is not None:
            places = (
                self._selected.nonzero()[0] if self._selected.dtype == bool else self._selected
            )[places]
        first = int(places.min()) if self._within else 0
        column = (
            self._within(field, first, int(places.max()) + 1) if self._within else self._rows[field]
        )
        return (
            column[places - first]
            if column.strides != (0,)
            else np.broadcast_to(column[:1], len(places))
        )

    def blocks(self) -> Iterator[Columns]:
        """The same rows in their order, of millions a part after the other: what is worked out of one stays small."""
        rows, selected = self._rows, self._selected
        if isinstance(rows, Columns) or self._keep is None or len(rows) <= BLOCK_ROWS:
            yield self
            return
        if selected is not None and selected.dtype != bool:
            selected = np.zeros(len(rows), bool)
            selected[self._selected] = True
        for part in in_parts(len(rows)):
            yield Columns(neighbours(rows, part), None if selected is None else selected[part])

    def measure(self, metric: str) -> NDArray[np.int64]:
        """A figure for every row, of any status: int64 ns, UNDEFINED where a row has no value (`loadgen.figures`)."""
        if metric in self._kept:
            return self._kept[metric]
        if self._keep == ():  # worked out of a part of the rows at a time, it stays small
            getattr(self._rows, "frame", self._rows).give_back()  # type: ignore[union-attr]
            whole, first = np.empty(len(self), np.int64), 0
            for block in self.blocks():
                whole[first : (first := first + len(block))] = block.measure(metric)
            return whole
        values = FIGURES.values(metric)(self)
        if metric in _KEPT:
            self._kept[metric] = values
        return values

    def forget(self) -> None:
        """Give the memory of the kept columns back; they are read again when asked for."""
        self._kept.clear()

    def where(self, status: int) -> NDArray[np.bool_]:
        """Which rows have this status: a mask of the length of the columns."""
        statuses = self["status"]
        mask: NDArray[np.bool_] = (statuses[:1] if statuses.strides == (0,) else statuses) == status
        return np.broadcast_to(mask, len(self))

    @property
    def for_values(self) -> NDArray[np.bool_]:
        """Which rows asked for no output, in tasks of which others do: embeddings, or a ranking."""
        mask: NDArray[np.bool_] = self["asked_output"] == 0
        return mask

    @property
    def attempted(self) -> NDArray[np.bool_]:
        """Which rows reached their due instant: they were sent then, or dropped."""
        return (self["sent_ns"] >= 0) | self.where(DROPPED)


class JoinedColumns:
    """The columns of several stages as one; `ok`: of their ok requests alone; `order`: of these of them, so ordered.

    Kept once they were read; without `keep` made again each time, for those that need each of many columns once.
    """

    def __init__(
        self,
        parts: Sequence[Columns],
        *,
        ok: bool,
        order: NDArray[np.int64] | None = None,
        keep: bool = True,
    ) -> None:
        self._parts, self._keep = parts, keep
        oks = (part.where(OK) if ok else np.ones(1, bool) for part in parts)
        self._chosen: list[NDArray[Any] | slice] = [*map(or_all, oks)]
        self._order: NDArray[np.int64] | None = None
        if order is not None:
            places = [
                np.arange(len(part))[chosen]
                for part, chosen in zip(parts, self._chosen, strict=True)
            ]
            firsts = np.cumsum([0, *map(len, places)])
            part_of = np.searchsorted(firsts, order, "right") - 1
            self._chosen = [
                of_part[order[part_of == i] - firsts[i]] for i, of_part in enumerate(places)
            ]
            self._order = np.argsort(
                np.argsort(part_of, kind="stable")
            )  # back from part after part
        self._kept: dict[str, NDArray[np.int64]] = {}

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """The column of a field of `record.FIELDS`."""
        return self._joined(field, lambda part, chosen: part.take(field, chosen))

    def measure(self, metric: str) -> NDArray[np.int64]:
        """A figure of `loadgen.figures`, UNDEFINED where a row has no value."""
        return self._joined(metric, lambda part, chosen: part.measure(metric)[chosen])

    def _joined(
        self, name: str, column: Callable[[Columns, NDArray[Any] | slice], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        if name in self._kept:
            return self._kept[name]
        columns = [
            column(part, chosen) for part, chosen in zip(self._parts, self._chosen, strict=True)
        ]
        whole: NDArray[np.int64] = together(columns).astype(np.int64, copy=False)
        whole = whole if self._order is None else whole[self._order]
        if self._keep:
            self._kept[name] = whole
        return whole


UNDEFINED = np.iinfo(np.int64).min


def by_time(instants: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[Any]:
    """The places of requests in order of their instants, of those at one instant in order of their slots.

    Most slots are in order of these instants, so that little is left to sort of requests in order of their slots.
    """
    if not len(slots) or int(slots.max()) - (least := int(slots.min())) > 2 * len(slots):
        return np.lexsort((slots, instants))
    places = np.full(int(slots.max()) - least + 1, -1, np.int32)
    places[slots - least] = np.arange(len(slots), dtype=np.int32)
    places = places[places >= 0]
    if len(places) < len(slots):  # two of one slot
        return np.lexsort((slots, instants))
    return places[np.argsort(instants[places], kind="stable")]


def _between(start: str, end: str) -> Callable[[Columns], NDArray[np.int64]]:
    def measure(columns: Columns) -> NDArray[np.int64]:
        first, last = columns[start], columns[end]
        values = last - first
        if len(values) and (first.min() < 0 or last.min() < 0):
            values[(first < 0) | (last < 0)] = UNDEFINED
        return values

    return measure


def streamed_tokens(columns: Columns) -> NDArray[np.int64]:
    """`measures.streamed_tokens` of every row; -1 where the output tokens were not counted."""
    if not len(columns) or int(columns["reasoning_tokens"].max()) <= 0:
        return columns["output_tokens"]
    unstreamed = (columns["reasoning_tokens"] > 0) & (
        columns["first_token_ns"] == columns["first_answer_ns"]
    )
    token_counts: NDArray[np.int64] = columns["output_tokens"] - np.where(
        unstreamed, columns["reasoning_tokens"], 0
    )
    return token_counts


def _divide(span: NDArray[np.int64], divisor: NDArray[np.int64]) -> NDArray[np.int64]:
    by, small = (
        np.maximum(divisor, 1),
        span.max(initial=0) < 1 << 53,
    )  # a float of which, cut, is exact, and faster
    quotient: NDArray[np.int64] = np.floor(span / by).astype(np.int64) if small else span // by
    quotient[(divisor <= 0) | (span == UNDEFINED)] = UNDEFINED
    return quotient


def _later_tokens(columns: Columns) -> NDArray[np.int64]:
    """Tokens streamed after the first event: what the span of a TPOT is divided by."""
    return streamed_tokens(columns) - np.maximum(columns["first_event_tokens"], 1)


def has_no_span(columns: Columns) -> NDArray[np.bool_]:
    """Which answers have tokens enough for a TPOT, and all of them at one instant: in one event, or in one write."""
    first = columns["first_token_ns"]
    mask: NDArray[np.bool_] = (
        (first >= 0) & (columns["last_token_ns"] == first) & (_later_tokens(columns) > 0)
    )
    return mask


def lacks_output(columns: Columns) -> NDArray[np.bool_]:
    """Which answers have tokens enough for a TPOT, and not one event with output."""
    mask: NDArray[np.bool_] = (columns["first_token_ns"] < 0) & (columns["output_tokens"] > 1)
    return mask


def _over(value: NDArray[np.int64], base: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which values are above a base by more tokens, and by a larger share, than counts differ honestly."""
    surplus = value.astype(np.int64) - base
    mask: NDArray[np.bool_] = (surplus > CONTRADICTING_TOKENS) & (surplus > CONTRADICTING * base)
    return mask


def understates(columns: Columns) -> NDArray[np.bool_]:
    """Which answers came in more output events than they are said to have tokens. False where nobody counted."""
    events, counted = columns["output_events"], columns["output_tokens"]
    return (counted >= 0) & _over(events, counted)


def overstates(columns: Columns) -> NDArray[np.bool_]:
    """Which answers are said to have more tokens than were asked for."""
    asked = columns["asked_output"]
    return (asked > 0) & _over(columns["output_tokens"], asked)


ttft = _between("due_ns", "first_token_ns")
ttft_from_sent = _between("sent_ns", "first_token_ns")
first_answer = _between("due_ns", "first_answer_ns")
e2e = _between("due_ns", "end_ns")
send_lag = _between("due_ns", "sent_ns")


def tpot(columns: Columns) -> NDArray[np.int64]:
    span = _between("first_token_ns", "last_token_ns")(columns)
    return _divide(np.where(span == 0, UNDEFINED, span), _later_tokens(columns))


def tpot_mlperf(columns: Columns) -> NDArray[np.int64]:
    span = _between("first_token_ns", "end_ns")(columns)
    return _divide(
        np.where(columns["due_ns"] < 0, UNDEFINED, span),
        columns["output_tokens"].astype(np.int64) - 1,
    )


def e2e_per_token(columns: Columns) -> NDArray[np.int64]:
    return _divide(e2e(columns), columns["output_tokens"].astype(np.int64))


def acceptance(columns: Columns) -> NDArray[np.int64]:
    """Accepted by drafted tokens, in %, millionths; where something was drafted."""
    drafted, accepted = (
        columns[f"{name}_tokens"].astype(np.int64) for name in ("draft", "accepted")
    )
    told = (drafted > 0) & (accepted >= 0)
    return np.where(told, accepted * 100_000_000 // np.maximum(drafted, 1), UNDEFINED)


def accepted_length(columns: Columns) -> NDArray[np.int64]:
    """Output tokens of a step of the model, in millionths; where something was drafted."""
    if int(columns["draft_tokens"].max(initial=0)) <= 0:
        return np.broadcast_to(np.int64(UNDEFINED), len(columns))
    drafted, accepted = (
        columns[f"{name}_tokens"].astype(np.int64) for name in ("draft", "accepted")
    )
    output = columns["output_tokens"].astype(np.int64)
    told = (drafted > 0) & (accepted >= 0) & (output > accepted)
    return np.where(told, output * 1_000_000 // np.maximum(output - accepted, 1), UNDEFINED)


def connect(columns: Columns) -> NDArray[np.int64]:
    """From the due instant until a new connection was ready; 0 on one that was open before."""
    due, ready = columns["due_ns"], columns["ready_ns"]
    return np.where((due < 0) | (ready < 0), UNDEFINED, sendable(columns) - due)


def tcp(columns: Columns) -> NDArray[np.int64]:
    """Of the first request of a connection, how long TCP took."""
    return np.where(columns["tcp_ns"] < 0, UNDEFINED, columns["tcp_ns"])


def tls(columns: Columns) -> NDArray[np.int64]:
    """The same of the TLS handshake; a connection without TLS has none."""
    return np.where(columns["tls_ns"] <= 0, UNDEFINED, columns["tls_ns"])


def _where_first_token(field: str) -> Callable[[Columns], NDArray[np.int64]]:
    return lambda columns: np.where(columns["first_token_ns"] < 0, UNDEFINED, columns[field])


client_lag = _where_first_token("client_lag_ns")
stamp_error = _where_first_token("stamp_error_ns")


def tpot_error(columns: Columns) -> NDArray[np.int64]:
    """How wrong a TPOT can be: (first + last stamp error) / (n - n1). UNDEFINED where TPOT is, or an error unknown."""
    first, last = columns["stamp_error_ns"], columns["last_token_error_ns"]
    unknown = (
        (first < 0) | (last < 0) | (columns["first_token_ns"] < 0) | (columns["last_token_ns"] < 0)
    )
    return _divide(
        np.where(unknown | has_no_span(columns), UNDEFINED, first + last), _later_tokens(columns)
    )


def max_gap_error(columns: Columns) -> NDArray[np.int64]:
    unknown = (columns["output_events"] < 2) | (columns["max_gap_error_ns"] < 0)
    return np.where(unknown, UNDEFINED, columns["max_gap_error_ns"])


def max_gap(columns: Columns) -> NDArray[np.int64]:
    return np.where(columns["output_events"] < 2, UNDEFINED, columns["max_gap_ns"])


def sendable(
    columns: Columns | JoinedColumns | Mapping[str, NDArray[np.int64]],
) -> NDArray[np.int64]:
    """When each request could have been sent: when it was due, or its connection was there, if it needed a new one."""
    due, ready = columns["due_ns"], columns["ready_ns"]
    instants: NDArray[np.int64] = np.where(columns["reused"] > 0, due, np.maximum(due, ready))
    return instants


def defined(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values without those that are UNDEFINED; the same array where there are none."""
    return values if values.min(initial=0) != UNDEFINED else values[values != UNDEFINED]


def or_all(mask: NDArray[np.bool_]) -> NDArray[np.bool_] | slice:
    """To choose these rows by; where none is left out, what chooses all without a copy of them."""
    return slice(None) if mask.all() else mask


def token_spans(columns: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per ok request with known output tokens: instant of the first token, instant of the last token, output tokens.

    Both instants are the end of the request where it was not streamed.
    """
    known = columns.where(OK) & (columns["output_tokens"] >= 0) & (columns["end_ns"] >= 0)
    own = or_all(known)
    return (
        first_tokens(columns, own),
        first_tokens(columns, own, "last_token_ns"),
        columns["output_tokens"][own],
    )


def first_tokens(
    columns: Columns, own: NDArray[np.bool_] | slice, name: str = "first_token_ns"
) -> NDArray[np.int64]:
    """Of some rows the instants of the first token, or others; of those that were not streamed the end."""
    found = columns[name][own]
    return np.where(found < 0, columns["end_ns"][own], found) if found.min(initial=0) < 0 else found
