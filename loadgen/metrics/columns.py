"""Rates, time windows, load and goodput computed from rows; the limits of warnings and the results of SLO terms.

Pure. It works on whole columns and never loops over rows, since the run of a rack has two million of them. The
definitions per request are those of `loadgen_sdk.measures`, here over columns; a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.limits import UNFINISHED_SHARE
from loadgen.results.record import BIN_NS, ROW, STATUSES
from loadgen.slo import Slo, Term
from loadgen.stats.quantiles import SUPPORT, Histogram, index, milliseconds, name, support
from loadgen.units import LONGEST_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.results.manifest import StagePlan

OK, FAILED, DROPPED, CANCELLED, LOST, UNFINISHED = range(len(STATUSES))


# Limits of the warnings. A run beyond one of them stays valid, and its summary carries a warning.
COUNT_DISAGREEMENT = 0.02  # between two counts of the same tokens
LENGTH_MISMATCH = 0.02  # of requests whose output is not as long as asked
SHORTENED = 0.05  # of the output tokens asked for, missing in the answers: beyond it, it is another load
CACHED_SHARE = 0.05  # of prompt tokens, when the workload declares no sharing
LANES_ENDED = 0.05  # of the lanes of a closed loop: when these have no more to send, the load is not full any more
GAP_VARIATION = 0.10  # between the planned and the real coefficient of variation of send gaps
GAPS_NEEDED = 30  # fewer send gaps than this say nothing about their variation
ITL_TOKENS_PER_EVENT = 0.01  # share of events with a second token, above which inter-chunk gaps are not ITL
STALL_NS = 1_000_000_000  # a gap between output events that a reader of the answer notices as a stall


class TermResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one SLO term. `value_ms` is null when no request has a value, or when the quantile falls on a
    failed request. `met` is null when the run cannot decide the term; `undecided` says why.
    """

    metric: str
    quantile: float
    limit_ms: float
    value_ms: float | None
    margin_ms: float | None  # limit - value: negative is missed
    met: bool | None
    over: int  # samples over the limit, failed ones included
    count: int
    needed: int  # samples from which the quantile is supported
    supported: bool
    undecided: str = ""
    unfinished: int = 0  # unfinished requests that are not known to be over: not in `count`


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that meet every SLO term; all fields are null without an SLO.

    `counted`: all but cancelled requests, and but the `unfinished` ones that are not known to be over a term. `met` is
    null also where no term is missed but one is undecided. `good`, `share` and the rates are null where a term on a
    value of each request rests on withheld figures.
    """

    rps: float | None = None  # good requests over the measured window
    steady_rps: float | None = None  # good requests that ended in the steady window, per second of that window
    share: float | None = None
    good: int | None = None
    counted: int | None = None
    unfinished: int | None = None
    slo: tuple[TermResult, ...] = ()
    share_limit: float | None = None
    met: bool | None = None

    @property
    def has_slo(self) -> bool:
        """Whether there is an SLO: `met` is null without one, and also where it is undecided."""
        return self.counted is not None

    @property
    def undecided(self) -> bool:
        """Whether there is an SLO that this run can neither call met nor missed."""
        return self.has_slo and self.met is None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An interval of time in seconds from the start of the run; all fields are null when there is none."""

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals that rates are divided by.

    `start_s` to `end_s` is the measured window: first measured due instant to last measured `last_token`. `steady`:
    first to last measured due instant, less the time in which requests of an earlier stage are in flight and, in a
    closed loop, in which lanes have still to begin or (LANES_ENDED of them) nothing more to send. `last_issued`: first
    measured due instant to the end of the request that was issued last (MLPerf LoadGen's definition). `whole`: start of
    the run to the last end of a body, warm-up included.
    """

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None
    steady: Span = Span()
    last_issued: Span = Span()
    whole: Span = Span()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Offered, achieved and completed load. The rate of n instants is (n - 1) / (last - first)."""

    arrival: str = ""  # as written in the workload: "poisson 10/s"
    offered_rps: float | None = None  # rate of due instants; null in a closed loop, which has no offered load
    achieved_rps: float | None = None  # rate of sent instants
    completed_rps: float | None = None  # ok requests over the measured window
    steady_completed_rps: float | None = None  # ok requests that ended in the steady window, per second of it
    in_flight_mean: float | None = None  # mean over the measured window; requests of all stages count
    in_flight_max: int | None = None
    gap_variation: float | None = None  # standard deviation / mean of real send gaps; open-loop stages only
    gap_variation_planned: float | None = None  # of the due instants of the same requests


_KEPT_FIELDS = frozenset(
    [
        "status",
        "kind",
        "stage",
        "turn",
        "due_ns",
        "sent_ns",
        "first_token_ns",
        "last_token_ns",
        "end_ns",
    ]
)
_KEPT_FIELDS |= {"input_tokens", "output_tokens", "reasoning_tokens", "output_events", "first_event_tokens"}
_CHUNK_ROWS = 1_000_000  # rows processed in one step, to bound the size of intermediate arrays
_KEPT_METRICS = frozenset(("ttft", "tpot"))


class Columns:
    """A view by column of the rows of a run, of a selection of them, or of a selection of other columns.

    Columns that are used often are kept in memory, contiguous, once they were read or derived. `keep_all` keeps every
    column: half a gigabyte for the run of a rack.
    """

    __slots__ = ("_keep_all", "_kept", "_rows", "_selected_rows")

    def __init__(
        self, rows: NDArray[np.void] | Columns, chosen: NDArray[np.bool_] | None = None, *, keep_all: bool = False
    ) -> None:
        self._rows = rows
        self._selected_rows = None if chosen is None or bool(chosen.all()) else np.flatnonzero(chosen)
        self._kept: dict[str, NDArray[np.int64]] = {}
        self._keep_all = keep_all

    def __len__(self) -> int:
        return len(self._rows) if self._selected_rows is None else len(self._selected_rows)

    def __getitem__(self, field: str) -> NDArray[np.int64]:
        """The column of one field of `record.FIELDS`, in the integer type of that field."""
        if field in self._kept:
            return self._kept[field]
        if not len(self):
            return np.zeros(0, ROW[field])
        column: NDArray[np.int64] = self._rows[field]
        column = np.ascontiguousarray(column) if self._selected_rows is None else column[self._selected_rows]
        if self._keep_all or field in _KEPT_FIELDS:
            self._kept[field] = column
        return column

    def measure(self, metric: str) -> NDArray[np.int64]:
        """A metric of MEASURES for every row, of any status: int64 ns, UNDEFINED where a row has no value."""
        if metric in self._kept:
            return self._kept[metric]
        values = MEASURES[metric](self)
        if metric in _KEPT_METRICS:
            self._kept[metric] = values
        return values

    def where(self, status: int) -> NDArray[np.bool_]:
        """Which rows have this status: a mask of the length of the columns."""
        mask: NDArray[np.bool_] = self["status"] == status
        return mask

    @property
    def attempted(self) -> NDArray[np.bool_]:
        """Which rows reached their due instant: they were sent then, or dropped."""
        return (self["sent_ns"] >= 0) | self.where(DROPPED)


UNDEFINED = np.iinfo(np.int64).min


def _between(start: str, end: str) -> Callable[[Columns], NDArray[np.int64]]:
    def measure(columns: Columns) -> NDArray[np.int64]:
        first, last = columns[start], columns[end]
        values = last - first
        values[(first < 0) | (last < 0)] = UNDEFINED
        return values

    return measure


def streamed_tokens(columns: Columns) -> NDArray[np.int64]:
    """`measures.streamed_tokens` of every row; -1 where the output tokens were not counted."""
    if not len(columns) or int(columns["reasoning_tokens"].max()) <= 0:
        return columns["output_tokens"]
    unstreamed = (columns["reasoning_tokens"] > 0) & (columns["first_token_ns"] == columns["first_answer_ns"])
    token_counts: NDArray[np.int64] = columns["output_tokens"] - np.where(unstreamed, columns["reasoning_tokens"], 0)
    return token_counts


def _divide(span: NDArray[np.int64], divisor: NDArray[np.int64]) -> NDArray[np.int64]:
    quotient: NDArray[np.int64] = span // np.maximum(divisor, 1)
    quotient[(divisor <= 0) | (span == UNDEFINED)] = UNDEFINED
    return quotient


def _tpot(columns: Columns) -> NDArray[np.int64]:
    span = _between("first_token_ns", "last_token_ns")(columns)
    return _divide(span, streamed_tokens(columns) - np.maximum(columns["first_event_tokens"], 1))


def _tpot_mlperf(columns: Columns) -> NDArray[np.int64]:
    span = _between("first_token_ns", "end_ns")(columns)
    return _divide(np.where(columns["due_ns"] < 0, UNDEFINED, span), columns["output_tokens"].astype(np.int64) - 1)


def _connect(columns: Columns) -> NDArray[np.int64]:
    """From the due instant until the connection was ready; 0 when it was ready before."""
    wait_ns = _between("due_ns", "ready_ns")(columns)
    wait_ns[(wait_ns < 0) & (wait_ns != UNDEFINED)] = 0
    return wait_ns


def _where_first_token(field: str) -> Callable[[Columns], NDArray[np.int64]]:
    return lambda columns: np.where(columns["first_token_ns"] < 0, UNDEFINED, columns[field])


def _tpot_error(columns: Columns) -> NDArray[np.int64]:
    """How wrong a TPOT can be: (first + last stamp error) / (n - n1). UNDEFINED where TPOT is, or an error unknown."""
    first, last = columns["stamp_error_ns"], columns["last_token_error_ns"]
    unknown = (first < 0) | (last < 0) | (columns["first_token_ns"] < 0) | (columns["last_token_ns"] < 0)
    divisor = streamed_tokens(columns) - np.maximum(columns["first_event_tokens"], 1)
    return _divide(np.where(unknown, UNDEFINED, first + last), divisor)


def _max_gap_error(columns: Columns) -> NDArray[np.int64]:
    unknown = (columns["output_events"] < 2) | (columns["max_gap_error_ns"] < 0)
    return np.where(unknown, UNDEFINED, columns["max_gap_error_ns"])


def _max_gap(columns: Columns) -> NDArray[np.int64]:
    return np.where(columns["output_events"] < 2, UNDEFINED, columns["max_gap_ns"])


MEASURES: Mapping[str, Callable[[Columns], NDArray[np.int64]]] = {
    "ttft": _between("due_ns", "first_token_ns"),
    "ttft_from_sent": _between("sent_ns", "first_token_ns"),
    "first_answer": _between("due_ns", "first_answer_ns"),
    "tpot": _tpot,
    "tpot_mlperf": _tpot_mlperf,
    "e2e": _between("due_ns", "end_ns"),
    "max_gap": _max_gap,
    "connect": _connect,
    "send_lag": _between("due_ns", "sent_ns"),
    "client_lag": _where_first_token("client_lag_ns"),
    "stamp_error": _where_first_token("stamp_error_ns"),
    "tpot_error": _tpot_error,
    "max_gap_error": _max_gap_error,
}
"""Per-request metrics over columns; the definitions are those of `loadgen_sdk.measures`."""

POOLED = ("itl", "inter_chunk")  # over all gaps of all requests: they have quantiles, but no value per request
TERMS = ("ttft", "ttft_from_sent", "first_answer", "tpot", "tpot_mlperf", "e2e", "max_gap", *POOLED)
"""The metrics that an SLO term may limit."""

_TPOT = ("tpot", "tpot_mlperf")
_NEED_TWO_TOKENS = ("tpot", "tpot_mlperf", "max_gap")  # a request too short to have a value does not miss the limit
NEED_A_STREAM = (*_NEED_TWO_TOKENS, *POOLED)
"""The metrics that an answer without streaming does not have."""


def defined(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values without those that are UNDEFINED."""
    known: NDArray[np.int64] = values[values != UNDEFINED]
    return known


def span(start_ns: float, end_ns: float) -> Span:
    """An interval in ns as a Span in seconds; an empty Span when it is empty or reversed, since no rate can be
    computed.
    """
    if end_ns <= start_ns:
        return Span()
    return Span(start_s=start_ns / 1e9, end_s=end_ns / 1e9, duration_s=(end_ns - start_ns) / 1e9)


class FullLoad(NamedTuple):
    """The time in which the load of a stage runs alone and in full, in ns from the start of the run."""

    start_ns: int = -1
    end_ns: int = LONGEST_NS


def full_load(own: Columns, earlier: Columns, plan: StagePlan, turns: int) -> FullLoad:
    """From when no request of an earlier stage is in flight and, in a closed loop, every lane has sent its first
    request; until, in a closed loop with a count, some lanes have nothing more to send. `own`: the rows of the stage,
    `earlier`: those of the stages before it.
    """
    start_ns = int(earlier["done_ns"].max(initial=-1))
    start_ns = max(start_ns, int(own["due_ns"][first_round(own, plan, turns)].max(initial=-1)))
    lane_ends = own["done_ns"][last_round(own, plan, turns)]
    if not len(lane_ends):
        return FullLoad(start_ns)
    place = index(len(lane_ends), LANES_ENDED)
    return FullLoad(start_ns, int(np.partition(lane_ends, place)[place]))


def first_round(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Which rows of a stage are the first requests of its lanes; none in an open loop, or where the plan is too old.

    The chains of a stage are numbered lane after lane, so the first round has the lowest numbers.
    """
    if not plan.concurrency or plan.first_slot is None:
        return np.zeros(len(columns), bool)
    first: NDArray[np.bool_] = columns["slot"] < plan.first_slot + plan.concurrency * turns
    first &= columns["turn"] == 0
    return first


def last_round(columns: Columns, plan: StagePlan, turns: int) -> NDArray[np.bool_]:
    """Which rows of a stage end the last request of a lane, where its plan says how many requests there are."""
    if not plan.concurrency or plan.first_slot is None or plan.slots is None:
        return np.zeros(len(columns), bool)
    last: NDArray[np.bool_] = columns["slot"] >= plan.first_slot + plan.slots - plan.concurrency * turns
    last &= (columns["turn"] == turns - 1) & columns.where(OK)
    return last


def window(measured: Columns, everything: Sequence[Columns], full: FullLoad | None = None) -> Window:
    """The intervals that the rates of `measured` are divided by, as `Window` defines them. `everything`: rows of all
    stages. `full`: the time in which the measured load runs alone and in full.
    """
    full = full or FullLoad()
    last_body = max((int(part["done_ns"].max(initial=-1)) for part in everything), default=-1)
    whole = span(0, last_body)
    due = measured["due_ns"][measured.attempted]
    if len(due) == 0:
        return Window(whole=whole)
    first, last = int(due.min()), int(due.max())
    end = int(measured["last_token_ns"].max(initial=-1))
    latest = int(np.argmax(measured["sent_ns"]))
    issued_end = int(measured["end_ns"][latest])
    if issued_end < 0:
        issued_end = int(measured["done_ns"][latest])
    inside = span(first, end if end >= 0 else int(measured["done_ns"].max()))
    return Window(
        start_s=inside.start_s,
        end_s=inside.end_s,
        duration_s=inside.duration_s,
        steady=span(max(first, full.start_ns), min(last, full.end_ns)),
        last_issued=span(first, issued_end),
        whole=whole,
    )


def rate(instants_ns: NDArray[np.int64]) -> float | None:
    """Rate of instants per second, (n - 1) / (last - first): n instants enclose n - 1 gaps. None for fewer than two."""
    if len(instants_ns) < 2:
        return None
    length = int(instants_ns.max()) - int(instants_ns.min())
    return (len(instants_ns) - 1) / (length / 1e9) if length > 0 else None


def per_second(count: float | None, stretch: Span | Window) -> float | None:
    """`count` divided by the duration of the interval; None when either is not known."""
    return None if count is None or stretch.duration_s is None else count / stretch.duration_s


def within(instants_ns: NDArray[np.int64], stretch: Span | Window) -> NDArray[np.bool_]:
    """Which instants lie in an interval, both ends included: a mask of the same length."""
    if stretch.start_s is None or stretch.end_s is None:
        return np.zeros(len(instants_ns), bool)
    return (instants_ns >= round(stretch.start_s * 1e9)) & (instants_ns <= round(stretch.end_s * 1e9))


def ended_within(instants_ns: NDArray[np.int64], stretch: Span | Window) -> NDArray[np.bool_]:
    """Which instants lie in an interval, without its start: what ends in the instant in which it begins was before it.

    So lanes in step, which all begin and end together, are counted once a round.
    """
    if stretch.start_s is None:
        return np.zeros(len(instants_ns), bool)
    return within(instants_ns, stretch) & (instants_ns > round(stretch.start_s * 1e9))


def in_flight(everything: Sequence[Columns], stretch: Span | Window) -> tuple[float | None, int | None]:
    """Mean and maximum number of requests in flight (sent and not done) in an interval.

    Exact, by a sweep over starts and ends. A request without an end (its worker died) counts as in flight until the end
    of the interval. At the same instant, ends are counted before starts.
    """
    if stretch.start_s is None or stretch.end_s is None:
        return None, None
    low, high = round(stretch.start_s * 1e9), round(stretch.end_s * 1e9)
    pairs = []
    for part in everything:
        sent, done = part["sent_ns"], part["done_ns"]
        overlapping = (
            (sent >= 0) & (sent <= high) & ((done < 0) | (done >= low))
        )  # in flight at some time in the interval
        pairs.append((sent[overlapping], done[overlapping]))
        del sent, done
    starts, ends = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    del pairs
    endless = ends < 0
    ends[endless] = np.maximum(starts[endless], high)
    lengths = np.minimum(ends, high)
    lengths -= np.maximum(starts, low)
    total_ns = np.maximum(lengths, 0, out=lengths).sum()
    del lengths
    starts.sort()
    ends.sort()
    at_start = np.searchsorted(starts, low, "right") - np.searchsorted(ends, low, "right")
    maximum = int(at_start)
    first, last = np.searchsorted(starts, low, "left"), np.searchsorted(starts, high, "right")
    for begin in range(first, last, _CHUNK_ROWS):  # requests in flight right after each start
        chunk_starts = starts[begin : min(begin + _CHUNK_ROWS, last)]
        levels = np.arange(begin + 1, begin + 1 + len(chunk_starts)) - np.searchsorted(ends, chunk_starts, "right")
        maximum = max(maximum, int(levels.max()))
    return float(total_ns / (high - low)), maximum


def gap_variation(instants_ns: NDArray[np.int64], stages: NDArray[np.int64]) -> float | None:
    """Coefficient of variation (standard deviation / mean) of the gaps between instants: constant 0, Poisson 1.

    Gaps are computed within a stage and divided by the mean gap of that stage, so a change of rate between stages does
    not count as variation. None when there are no gaps.
    """
    pooled = []
    for stage in np.flatnonzero(np.bincount(stages)):
        gaps = np.diff(np.sort(instants_ns[stages == stage]))
        if len(gaps) and gaps.sum() > 0:
            pooled.append(gaps / gaps.mean())
    if not pooled:
        return None
    return float(np.concatenate(pooled).std())


def load(
    measured: Columns, everything: Sequence[Columns], inside: Window, closed: NDArray[np.bool_], arrival: str
) -> Load:
    """Offered, achieved and completed load of `measured`. `closed`: per stage, whether it is a closed loop."""
    sent = measured["sent_ns"] >= 0
    open_loop = ~closed[measured["stage"]]
    with_gap = (
        sent & open_loop & (measured["turn"] == 0)
    )  # later turns wait for the turn before: their gaps are not planned
    stages = measured["stage"][with_gap]
    mean, largest = in_flight(everything, inside)
    ended = int((ended_within(measured["end_ns"], inside.steady) & measured.where(OK)).sum())
    return Load(
        arrival=arrival,
        offered_rps=rate(measured["due_ns"][open_loop & measured.attempted]),
        achieved_rps=rate(measured["sent_ns"][sent]),
        completed_rps=per_second(int(measured.where(OK).sum()), inside),
        steady_completed_rps=per_second(ended, inside.steady),
        in_flight_mean=mean,
        in_flight_max=largest,
        gap_variation=gap_variation(measured["sent_ns"][with_gap], stages),
        gap_variation_planned=gap_variation(measured["due_ns"][with_gap], stages),
    )


def steady_events(timeline: Sequence[NDArray[np.int64]], stretch: Span) -> float | None:
    """Output events of some stages in an interval, from counts in bins of BIN_NS; None when there are no events.

    A bin that an end of the interval cuts counts in proportion.
    """
    sums = event_sums(timeline)
    if stretch.start_s is None or stretch.end_s is None or sums is None:
        return None
    return events_between(sums, stretch)


def event_sums(timeline: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Cumulative number of events of all stages at the start of each bin; None when there are no events."""
    if not any(counts.any() for counts in timeline):
        return None
    total = np.zeros(max(map(len, timeline)) + 1, np.int64)
    for counts in timeline:
        total[1 : len(counts) + 1] += counts
    return np.cumsum(total)


def events_between(sums: NDArray[np.int64], stretch: Span | Window) -> float:
    """Number of events in an interval, from the result of `event_sums`; 0 for an empty interval."""
    if stretch.start_s is None or stretch.end_s is None:
        return 0.0
    ends = [stretch.start_s * 1e9 / BIN_NS, stretch.end_s * 1e9 / BIN_NS]
    low, high = np.interp(ends, np.arange(len(sums)), sums)
    return float(high - low)


def spread_tokens(columns: Columns, stretch: Span) -> float:
    """Output tokens of ok requests in an interval, those of a request spread evenly from its first to its last token.

    This estimates token times where there is no timeline: for one of several targets, and for answers that were not
    streamed.
    """
    if stretch.start_s is None or stretch.end_s is None:
        return 0.0
    low, high = round(stretch.start_s * 1e9), round(stretch.end_s * 1e9)
    first, last, amount = token_spans(columns)
    length = last - first
    inside = np.minimum(last, high) - np.maximum(first, low)
    share = np.where(length > 0, np.clip(inside, 0, None) / np.maximum(length, 1), (last >= low) & (last <= high))
    return float((share * amount).sum())


def token_spans(columns: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per ok request with known output tokens: instant of the first token, instant of the last token, output tokens.

    Both instants are the end of the request where it was not streamed.
    """
    known = columns.where(OK) & (columns["output_tokens"] >= 0) & (columns["end_ns"] >= 0)
    last = np.where(columns["last_token_ns"] < 0, columns["end_ns"], columns["last_token_ns"])[known]
    first = np.where(columns["first_token_ns"] < 0, columns["end_ns"], columns["first_token_ns"])[known]
    return first, last, columns["output_tokens"][known]


def goodput(
    measured: Columns,
    slo: Slo | None,
    inside: Window,
    gaps: Histogram,
    unrecorded: int = 0,
    unsound: Mapping[str, str] | None = None,
) -> Goodput:
    """Each SLO term judged at its quantile, and the requests that meet all terms.

    `unsound`: metrics whose figures are withheld, with the reason; terms on them are undecided.

    Failed, dropped and lost requests are over every limit, and so are the `unrecorded` ones; cancelled requests are
    left out, and so are unfinished ones unless they are over already (`is_over_when_cut`). A request too short to have
    a TPOT is left out of that term and does not miss it. Terms on pooled gaps judge the gaps and not the requests.
    """
    if slo is None:
        return Goodput()
    left_out = int((measured.where(UNFINISHED) & ~is_counted(measured, slo)).sum())
    counted = int(is_counted(measured, slo).sum()) + unrecorded
    good = int(meets(measured, slo).sum())
    cut = is_undecided(int(measured.where(UNFINISHED).sum()), counted + left_out)
    results = tuple(_term_result(measured, term, gaps, unrecorded, cut, unsound or {}) for term in slo.terms)
    steady = int((meets(measured, slo) & ended_within(measured["end_ns"], inside.steady)).sum())
    return judged_goodput(
        slo,
        results,
        counted=counted,
        left_out=left_out,
        cut=cut,
        good=good,
        rps=per_second(good, inside),
        steady_rps=per_second(steady, inside.steady),
        unsound=unsound or {},
    )


def judged_goodput(
    slo: Slo,
    results: tuple[TermResult, ...],
    *,
    counted: int,
    left_out: int,
    cut: bool,
    good: int | None,
    rps: float | None,
    steady_rps: float | None,
    unsound: Mapping[str, str],
) -> Goodput:
    """The block `goodput` of judged terms: a missed term decides; else an undecided one leaves the SLO undecided."""
    if any(term.metric in unsound and term.metric not in POOLED for term in slo.terms):
        good = rps = steady_rps = None
    share = good / counted if counted and good is not None else None
    share_met: bool | None = True
    if slo.goodput_share is not None:
        share_met = None if good is None else judged_share(good, counted, left_out, slo.goodput_share, cut)
    return Goodput(
        rps=rps,
        steady_rps=steady_rps,
        share=share,
        good=good,
        counted=counted,
        unfinished=left_out,
        slo=results,
        share_limit=slo.goodput_share,
        met=together([share_met, *(result.met for result in results)]),
    )


def undecided_reason(metric: str, values: int, ok: int, count: int, unsound: Mapping[str, str]) -> str:
    """Why a term on a metric can be neither met nor missed; "" when it can.

    `values`: how many values there are (gaps, for a pooled metric). `count`: those and the requests without an answer,
    which count as over the limit. A term that no ok request can have is not missed.
    """
    if metric in unsound:
        return unsound[metric]
    if values or (count and not ok):
        return ""
    if metric in _NEED_TWO_TOKENS or metric in POOLED:
        return "no answer had two output events" if metric not in _TPOT else "no answer had the two tokens of a TPOT"
    return "no request has this figure"


# -- what the end of the drain cut -------------------------------------------------------------------------------------
#
# The one definition for runs, sweeps, searches, contracts, costs and reports: the cut is the tool's, not the server's.


def is_over_when_cut(columns: Columns, term: Term) -> NDArray[np.bool_]:
    """Which unfinished requests are over the limit of a term already, however they would have ended.

    By a lower bound of what the value would have become: the time up to the cut where the first token (for E2E: the
    end) had not come; for TPOT that time over all the tokens that were asked for; for the largest gap also the gap that
    was open at the cut. False where nothing is known, and for terms on pooled gaps.
    """
    cut = columns.where(UNFINISHED) & (columns["sent_ns"] >= 0)
    if term.metric in POOLED or not cut.any():
        return np.zeros(len(columns), bool)
    due, sent, now = columns["due_ns"], columns["sent_ns"], columns["done_ns"]
    first, answer, last = columns["first_token_ns"], columns["first_answer_ns"], columns["last_token_ns"]
    ended = columns["finish_reason"] > 0  # the answer was whole, only the end of its body was missing
    end = np.where(ended & (columns["end_ns"] >= 0), columns["end_ns"], now)
    tokens = columns["asked_output"].astype(np.int64)
    match term.metric:
        case "ttft":
            least = np.where(first >= 0, first, now) - due
        case "ttft_from_sent":
            least = np.where(first >= 0, first, now) - sent
        case "first_answer":
            least = np.where(answer >= 0, answer, now) - due
        case "e2e":
            least = end - due
        case "max_gap":
            least = np.maximum(columns["max_gap_ns"], np.where((last >= 0) & ~ended, now - last, 0))
        case _:  # tpot, tpot_mlperf
            divisor = tokens - (np.maximum(columns["first_event_tokens"], 1) if term.metric == "tpot" else 1)
            known = (first >= 0) & (divisor > 0)
            least = np.where(known, (end - first) // np.maximum(divisor, 1), 0)
    over: NDArray[np.bool_] = cut & (least > term.limit_ns)
    return over


def is_counted(columns: Columns, slo: Slo | None) -> NDArray[np.bool_]:
    """Which requests an SLO counts, as good or as a miss: all but cancelled ones, and of the unfinished ones those that
    are over a term already.
    """
    cut = columns.where(UNFINISHED)
    counted = ~(columns.where(CANCELLED) | cut)
    for term in slo.terms if slo is not None and cut.any() else ():
        counted |= is_over_when_cut(columns, term)
    return counted


def is_undecided(unfinished: int, counted: int) -> bool:
    """Whether more requests are unfinished than leave an SLO term decided. `counted`: all but cancelled requests."""
    return unfinished > UNFINISHED_SHARE * counted


def judged_with_cut(met: bool, quantile: float, over: int, count: int, left_out: int, undecided: bool) -> bool | None:
    """Whether a term is met, where `left_out` unfinished requests are not in `count`.

    False when it is missed even if all of them had been within the limit; None when it is `undecided` otherwise.
    """
    everyone = count + left_out
    if undecided and (not everyone or over < everyone - index(everyone, quantile)):
        return None
    return met


def judged_share(good: int, counted: int, left_out: int, limit: float | None, undecided: bool) -> bool | None:
    """Whether the promised share of good requests was kept; None where the unfinished requests decide it."""
    if limit is None:
        return True
    if undecided and good + left_out >= limit * (counted + left_out):
        return None
    return bool(counted) and good / counted >= limit


def together(results: Sequence[bool | None]) -> bool | None:
    """Whether all are met: False when one is missed, else None when one is undecided."""
    if any(met is False for met in results):
        return False
    return None if any(met is None for met in results) else True


def meets(columns: Columns, slo: Slo) -> NDArray[np.bool_]:
    """Which requests are ok and within every term that has a value per request: a mask of the length of the columns.

    A request too short to have a TPOT does not miss that term.
    """
    good = columns.where(OK)
    for term in slo.terms:
        if term.metric not in POOLED:
            values = columns.measure(term.metric)
            excused = (values == UNDEFINED) if term.metric in _NEED_TWO_TOKENS else False
            good &= excused | ((values != UNDEFINED) & (values <= term.limit_ns))
    return good


def _term_result(
    columns: Columns, term: Term, gaps: Histogram, unrecorded: int, cut: bool, unsound: Mapping[str, str]
) -> TermResult:
    """The result of one term. Failed, dropped, lost and `unrecorded` requests count as over the limit."""
    value: float | None
    left_out = 0
    if term.metric in POOLED:
        count = gaps.count
        over = gaps.over(term.limit_ns)
        value = gaps.quantile(term.quantile) if count else None
        undecided = undecided_reason(term.metric, count, 1, count, unsound)
    else:
        ok = columns.where(OK)
        values = defined(columns.measure(term.metric)[ok])
        unfinished, over_when_cut = int(columns.where(UNFINISHED).sum()), int(is_over_when_cut(columns, term).sum())
        left_out = unfinished - over_when_cut
        without_value = len(columns) - int(ok.sum()) - int(columns.where(CANCELLED).sum()) - left_out + unrecorded
        count = len(values) + without_value
        over = int((values > term.limit_ns).sum()) + without_value
        place = index(count, term.quantile) if count else 0
        value = int(np.partition(values, place)[place]) if place < len(values) else None
        undecided = undecided_reason(term.metric, len(values), int(ok.sum()), count, unsound)
    met = value is not None and value <= term.limit_ns
    return term_result(term, count, over, value, met=met, undecided=undecided, left_out=left_out, cut=cut)


def term_result(
    term: Term, count: int, over: int, value: float | None, *, met: bool, undecided: str, left_out: int, cut: bool
) -> TermResult:
    """The result of a term from its quantile `value` (ns), the number of samples, and how many are over the limit.

    `left_out`: unfinished requests not in `count`; `cut`: they are too many to decide by.
    """
    known_over = 0 if term.metric in POOLED else over
    decided = judged_with_cut(met, term.quantile, known_over, count, left_out, cut)
    if undecided:
        value, over, decided = None, 0, None
    elif decided is None:
        undecided = "too many requests were unfinished when the drain ended: give a longer --grace, or none"
    needed = SUPPORT.get(name(term.quantile)) or support(term.quantile)
    return TermResult(
        metric=term.metric,
        quantile=term.quantile,
        limit_ms=milliseconds(term.limit_ns),
        value_ms=None if value is None else milliseconds(value),
        margin_ms=None if value is None else milliseconds(term.limit_ns - value),
        met=decided,
        over=over,
        count=count,
        needed=needed,
        supported=count >= needed,
        undecided=undecided,
        unfinished=left_out,
    )
