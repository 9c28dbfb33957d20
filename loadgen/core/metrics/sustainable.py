"""Whether a load was sustained: neither TTFT nor the number in flight of any target (simulated: any replica) grew.

Pure. A run that meets every limit may be a queue that grows and was not given the time to show it. The second half of
the measured load is cut into blocks, per target or replica, and `stats.trend` tests them all together. The first half
is left out: there a server fills, and grows for that reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from loadgen.core import format
from loadgen.core.limits import FAILURE_SHARE
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics.columns import FAILED, LOST, OK, Columns, JoinedColumns, together
from loadgen.core.metrics.windows import Window
from loadgen.core.results.manifest import Header
from loadgen.core.stats import trend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import StagePlan

BLOCKS = 16
INSTANTS = 8  # per block, at which requests in flight are counted
FEWEST_REQUESTS = 64  # due in the second half, per target or replica
STAYS = 2.0  # the second half must last so many times as long as a request does (p50 of E2E)
GROWTH = 0.10  # of the mean: a smaller growth in the time tested is not called one
MAYBE = 0.05  # chance of a growth, of one series alone, below which it may be one
MAYBE_GROWTH = 0.25  # of the mean: such a growth, if it may be one, is not called sustained either
SEES = 1.0  # of the mean: where not even this growth would have been seen, nothing is said
CLEARLY = 3.3  # standard deviations: hardly ever by chance, in all trials of a search
LONGER = (
    2.0  # how many times as long as a run by the rules the confirmation of a sustained load lasts
)
_SERIES = ("requests in flight", "TTFT")


class Sustainable(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the load was sustained, and why that is said. Growth is over the time tested, as a share of the mean."""

    sustained: bool | None = None  # null: not known
    why: str = "not judged"
    start_s: float | None = None  # the time tested
    end_s: float | None = None
    parts: int = 0  # targets or replicas tested
    growing: tuple[str, ...] = ()  # the names of those that grew, the one that grew most first
    growth_share: float | None = (
        None  # of the one that grew most, by the series that is named in `why`
    )
    visible_share: float | None = None  # smallest growth that would have been seen in each of them


def of_rows(
    measured: Sequence[Columns], others: Sequence[Columns], inside: Window, header: Header
) -> Sustainable:
    """Judge the measured rows of a run; `others`: the rows of the other stages, which are in flight too."""
    stages = [stage for stage in header.stages if stage.measured]
    if reason := _not_judged(stages, header):
        return Sustainable(why=reason)
    found = _over_time(measured, others, inside, header)
    is_unseen = found.sustained is None and found.visible_share is None
    if is_unseen and not any(stage.closed for stage in stages) and (why := piled_up(measured)):
        return Sustainable(sustained=False, why=why)
    count = sum(map(len, measured))
    failed = sum(int(part.where(status).sum()) for part in measured for status in (FAILED, LOST))
    if found.sustained and failed > FAILURE_SHARE * count:
        why = f"{failed:,} of {count:,} requests failed, and what leaves a queue unserved keeps it from growing"
        return msgspec.structs.replace(found, sustained=None, why=why)
    return found


def _over_time(
    measured: Sequence[Columns], others: Sequence[Columns], inside: Window, header: Header
) -> Sustainable:
    start_s, end_s = inside.steady.start_s, inside.steady.end_s
    if start_s is None or end_s is None:
        due_ns = together([part["due_ns"][part.attempted] for part in measured])
        if len(due_ns) and int(due_ns.max()) > int(due_ns.min()):
            return Sustainable(
                why="too short: there is no time at which the load was only that of measured requests"
            )
        return Sustainable(why="all requests are due at one instant: nothing can grow over time")
    span = _Span((start_s + end_s) / 2 * 1e9, end_s * 1e9)
    e2e = together([metrics.defined(part.measure("e2e")[part.where(OK)]) for part in measured])
    if not len(e2e):
        return Sustainable(why="no request ended ok")
    stay_ns = float(np.median(e2e))
    if span.end_ns - span.start_ns < STAYS * stay_ns:
        alone, stay, needed = map(
            format.duration, (end_s - start_s, stay_ns / 1e9, 2 * STAYS * stay_ns / 1e9)
        )
        why = f"the load ran alone and in full for {alone}, requests last {stay} (p50), so {needed} of it are needed"
        return Sustainable(why=f"too short: {why}")
    return _judge(list(_parts(measured, others, span, header)), span)


def piled_up(measured: Sequence[Columns]) -> str:
    """Why a load that is too short for a trend was not sustained all the same; "" where that cannot be said.

    By Little's law so many are in flight at its end as are due while one is served, and so many wait for a first token
    as are due while one waits. Where they are far more than the times of the load's first quarter explain, by more than
    chance, the server did less than it was offered. A wait also begins when a server is full, so more must wait than
    were due in the last quarter. Conversations and tasks are judged by the waits of their first turns alone.
    """
    names = ("due_ns", "sent_ns", "turn", "session", "first_token_ns", "end_ns", "done_ns")
    due, sent, turn, session, first, end, done = (
        together([part[name] for part in measured]) for name in names
    )
    of_sessions = bool((session >= 0).any())
    begun = np.flatnonzero((sent >= 0) & ((session < 0) | (turn == 0)))
    due, first, end, done = (
        each[begun[np.argsort(due[begun])]] for each in (due, first, end, done)
    )
    if len(due) < 2 or due[0] == due[-1]:
        return ""
    quarter_ns, gaps = (due[-1] - due[0]) / 4, np.diff(due)
    bursts = max(
        1.0, float(gaps.var()) / float(gaps.mean()) ** 2
    )  # 1: of a Poisson load, or a steadier one
    flying = (done < 0) | (done > due[-1])
    waiting = (first > due[-1]) | ((first < 0) & flying)
    ends = ("completed", "were in flight", "took", flying, end, math.inf if of_sessions else 0)
    begins = (
        "began",
        "waited for their first token",
        "waited",
        waiting,
        first,
        int((due > due[-1] - quarter_ns).sum()),
    )
    for done_less, did, took, those, until, least in (ends, begins):
        early = (due < due[0] + quarter_ns) & (until >= 0)
        stay_ns = float((until - due)[early].mean()) if early.any() else math.inf
        count, explained = int(those.sum()), stay_ns / float(gaps.mean())
        clearly = max(explained, CLEARLY * math.sqrt(bursts * (explained + count)))
        if stay_ns <= quarter_ns and count > max(least, explained + clearly):
            return (
                f"the server {done_less} less than was offered: {count:,} requests {did} at the end of the load, and "
                f"what its first quarter {took}, {format.duration(stay_ns / 1e9)}, explains {explained:,.0f}"
            )
    return ""


def _not_judged(stages: Sequence[StagePlan], header: Header) -> str:
    if header.state not in ("finished", "running"):
        return "the run did not come to its end"
    if len(stages) > 1:
        return "several loads were measured one after the other"
    if stages and not stages[0].closed and stages[0].rate is None:
        return f"the load itself changes over time ({stages[0].arrival})"
    return ""


class _Span(msgspec.Struct, frozen=True):
    start_ns: float
    end_ns: float


class _Part(msgspec.Struct, frozen=True):
    name: str
    requests: int  # due in the span
    series: tuple[NDArray[np.float64], NDArray[np.float64]]  # block means, in the order of _SERIES


def _parts(
    measured: Sequence[Columns], others: Sequence[Columns], span: _Span, header: Header
) -> Iterator[_Part]:
    """The block means of each target, or of each replica where the rows name one."""
    due = together([part["due_ns"] for part in measured])
    place = np.empty(len(due), np.int8)
    for these in metrics.in_parts(len(due)):
        block = np.floor((due[these] - span.start_ns) / ((span.end_ns - span.start_ns) / BLOCKS))
        place[these] = np.where((block >= 0) & (block < BLOCKS), block, -1)
    in_span = place >= 0
    place = place[in_span]
    ttft = together(
        [np.where(part.where(OK), part.measure("ttft"), metrics.UNDEFINED) for part in measured]
    )[in_span]
    instants = np.linspace(span.start_ns, span.end_ns, BLOCKS * INSTANTS + 1)[:-1]
    flying: dict[int, NDArray[np.int64]] = defaultdict(lambda: np.zeros(len(instants), np.int64))
    for part in (*measured, *others):
        was_sent = metrics.or_all(part["sent_ns"] >= 0)
        starts, ends = part["sent_ns"][was_sent], part["done_ns"][was_sent]
        for key, own in _grouped(keys(part)[was_sent]):
            flying[key] += np.searchsorted(np.sort(starts[own]), instants, "right")
            ended = ends[own]
            flying[key] -= np.searchsorted(np.sort(ended[ended >= 0]), instants, "right")
    for key, rows in _grouped(together([*map(keys, measured)])[in_span]):
        requests = len(rows)
        rows = rows[ttft[rows] != metrics.UNDEFINED]
        counts = np.bincount(place[rows], minlength=BLOCKS)
        sums = np.bincount(place[rows], weights=ttft[rows], minlength=BLOCKS)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
        series = (flying[key].reshape(BLOCKS, INSTANTS).mean(axis=1), means)
        yield _Part(part_name(key, header), requests, series)


REPLICAS = 1 << 16
MOST_KEYS = 256 * REPLICAS  # more of them are in no table


def keys(rows: Columns | JoinedColumns) -> NDArray[Any]:
    """One number per target and replica of these rows."""
    return rows["target"].astype(np.int32) * REPLICAS + rows["replica"].astype(np.int32) + 1


def numbered(keys: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different keys in order, and for each row the place of its own, without putting all rows in order."""
    least = int(keys.min(initial=0))
    if not len(keys) or int(keys.max()) - least > MOST_KEYS:
        return np.unique(keys, return_inverse=True)
    found = np.zeros(int(keys.max()) - least + 1, bool)
    found[keys - least] = True
    names = np.flatnonzero(found)
    place = np.zeros(len(found), np.min_scalar_type(len(names)))
    place[names] = np.arange(len(names))
    return names + least, place[keys - least]


def part_name(key: int, header: Header) -> str:
    target, replica = divmod(key, REPLICAS)
    if replica:
        return f"replica {replica - 1}"
    if len(header.targets) < 2:
        return ""
    facts = header.targets[target]
    return f"target {facts.name or facts.url or target}"


def _grouped(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The different keys in order, and the places of the rows of each, in their order."""
    names, of_row = numbered(keys)
    few = (
        len(names) <= 256
    )  # then looked for one after the other: all at once are as long as a column
    order = (
        [] if few else np.split(np.argsort(of_row, kind="stable"), np.cumsum(np.bincount(of_row)))
    )
    for place, name in enumerate(names.tolist()):
        yield name, np.flatnonzero(of_row == place) if few else order[place]


class _Growth(NamedTuple):
    share: float
    part: str
    series: str
    first: float
    last: float


def _judge(parts: Sequence[_Part], span: _Span) -> Sustainable:
    seconds = (span.end_ns - span.start_ns) / 1e9
    tested = f"the second half of the load, {seconds:,.0f} s"
    few = [part for part in parts if part.requests < FEWEST_REQUESTS]
    if few or not parts:
        name = f" at {few[0].name}" if few and few[0].name else ""
        count = few[0].requests if few else 0
        why = f"too few requests: {count} were due{name} in {tested}, {FEWEST_REQUESTS} are needed"
        return Sustainable(why=why, parts=len(parts))
    trends = trend.of([series for part in parts for series in part.series])
    grown: list[_Growth] = []
    perhaps: list[_Growth] = []
    least_visible: list[float] = []
    for i, part in enumerate(parts):
        visible = []
        for name, series, found in zip(
            _SERIES, part.series, trends[2 * i : 2 * i + 2], strict=True
        ):
            if found is None or found.level <= 0:
                continue
            visible.append(found.visible / found.level)
            share = found.growth / found.level
            if (found.grows and share > GROWTH) or (found.chance < MAYBE and share > MAYBE_GROWTH):
                known = series[np.isfinite(series)]
                growth = _Growth(share, part.name, name, float(known[0]), float(known[-1]))
                (grown if found.grows else perhaps).append(growth)
        least_visible.append(min(visible, default=math.inf))
    visible_share = max(least_visible)
    kind = "replica" if parts[0].name.startswith("replica") else "target"
    facts = {
        "start_s": float(span.start_ns / 1e9),
        "end_s": float(span.end_ns / 1e9),
        "parts": len(parts),
        "visible_share": visible_share if math.isfinite(visible_share) else None,
    }
    each = f" in each {kind}" if len(parts) > 1 else ""
    sees = f"a growth of {max(visible_share, GROWTH):.0%} of the mean or more would have been seen{each}"
    if grown:
        grown.sort(reverse=True)
        worst = grown[0]
        names = tuple(dict.fromkeys(growth.part for growth in grown if growth.part))
        where = f" of {worst.part}" if worst.part else ""
        others = f" ({len(names)} of {len(parts)} {kind}s grow)" if len(parts) > 1 else ""
        why = f"{worst.series}{where} grows beyond chance: {_values(worst)} in {tested}{others}"
        return Sustainable(
            sustained=False,
            why=why,
            growing=names,
            growth_share=worst.share,
            **facts,  # type: ignore[arg-type]
        )
    if perhaps:
        most_grown = max(perhaps)
        where = f" of {most_grown.part}" if most_grown.part else ""
        why = (
            f"{most_grown.series}{where} may grow: {_values(most_grown)} in {tested}, which chance alone could do "
            "too: a longer run decides"
        )
        return Sustainable(why=why, growth_share=most_grown.share, **facts)  # type: ignore[arg-type]
    if not visible_share <= SEES:
        most = f"{visible_share:.0%} of the mean" if math.isfinite(visible_share) else "any size"
        why = f"no growth seen in {tested}, but one of {most} would have been missed: a longer run shows more"
        return Sustainable(why=why, **facts)  # type: ignore[arg-type]
    why = f"neither TTFT nor requests in flight{f' of any {kind}' if len(parts) > 1 else ''} grow in {tested}; {sees}"
    return Sustainable(sustained=True, why=why, **facts)  # type: ignore[arg-type]


def _values(growth: _Growth) -> str:
    if growth.series == "TTFT":
        return f"from {growth.first / 1e6:,.0f} to {growth.last / 1e6:,.0f} ms"
    return f"from {growth.first:,.4g} to {growth.last:,.4g}"
