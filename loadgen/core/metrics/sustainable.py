"""Judge whether a load was sustained: the server kept up with it, and nothing grew.

Pure. A run that meets every limit may still be a queue that had no time to grow beyond them. Two
tests look at the second half of the measured load. The first half is left out because a server
fills in it and grows for that reason.

- *Shortfall*: fewer first tokens or responses came than the arrivals lead to expect. It needs no
  growth, so it also recognises an overload in which every request waits longer than the load lasts.
- *Growth*: `stats.trend` tests TTFT and requests in flight, cut into blocks, for every target or
  replica together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from loadgen.core import format
from loadgen.core.limits import FAILURE_SHARE
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics.columns import (
    CANCELLED,
    FAILED,
    LOST,
    OK,
    Columns,
    JoinedColumns,
    together,
)
from loadgen.core.metrics.windows import Window
from loadgen.core.results.manifest import RunManifest
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
KEEPS_UP = 0.95  # share of the expected events: a server that delivers less does not keep up
MOST_TIMES = 4.0  # as long, at most, is proposed at once for a load that was too noisy
DELAYS = 1_000  # quantiles that stand for the delays of the first quarter
LONGER = (
    2.0  # how many times as long as a run by the rules the confirmation of a sustained load lasts
)
_SERIES = ("requests in flight", "TTFT")
_WORK = ("input_tokens", "asked_output")

Code = Literal[
    "not_judged",  # the kind of load or the state of the run does not allow a judgement
    "too_short",
    "too_few",
    "too_noisy",
    "may_grow",
    "failures",
    "falls_behind",
    "grows",
    "steady",
]


class Sustainable(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the load was sustained, and why.

    Growth is over the time tested, as a share of the mean.
    """

    sustained: bool | None = None  # null: not known
    code: Code = "not_judged"
    why: str = "not judged"
    start_s: float | None = None  # the time tested
    end_s: float | None = None
    parts: int = 0  # targets or replicas tested
    growing: tuple[str, ...] = ()  # the names of those that grew, the one that grew most first
    growth_share: float | None = (
        None  # of the one that grew most, by the series that is named in `why`
    )
    visible_share: float | None = None  # smallest growth that would have been seen in each of them
    needed_s: float | None = None  # length of the load that would decide, where a longer one would
    # how much longer prompts or responses became over the time tested; null: not beyond chance
    work_growth_share: float | None = None


def of_rows(
    measured: Sequence[Columns], others: Sequence[Columns], inside: Window, header: RunManifest
) -> Sustainable:
    """Judge the measured rows of a run.

    `others` are the rows of the other stages, which are in flight too.
    """
    stages = [stage for stage in header.stages if stage.measured]
    if reason := _not_judged(stages, header):
        return Sustainable(why=reason)
    found = _judge_growth(measured, others, inside, header)
    is_open_loop = not any(stage.closed for stage in stages)
    if found.sustained is not False and is_open_loop and (shortfall := find_shortfall(measured)):
        return msgspec.structs.replace(
            found, sustained=False, code="falls_behind", why=shortfall.text, needed_s=None
        )
    count = sum(map(len, measured))
    failed = sum(int(part.where(status).sum()) for part in measured for status in (FAILED, LOST))
    if found.sustained and failed > FAILURE_SHARE * count:
        why = (
            f"{failed:,} of {count:,} requests failed, and what leaves a queue unserved keeps it "
            "from growing"
        )
        return msgspec.structs.replace(found, sustained=None, code="failures", why=why)
    return found


def _judge_growth(
    measured: Sequence[Columns], others: Sequence[Columns], inside: Window, header: RunManifest
) -> Sustainable:
    """Test the second half of the load for growth, if it is long enough to show any."""
    start_s, end_s = inside.steady.start_s, inside.steady.end_s
    if start_s is None or end_s is None:
        due_ns = together([part["due_ns"][part.attempted] for part in measured])
        if len(due_ns) and int(due_ns.max()) > int(due_ns.min()):
            why = "too short: there is no time at which the load was only that of measured requests"
            return Sustainable(code="too_short", why=why)
        return Sustainable(why="all requests are due at one instant: nothing can grow over time")
    span = _Span((start_s + end_s) / 2 * 1e9, end_s * 1e9)
    e2e = together([metrics.defined(part.measure("e2e")[part.where(OK)]) for part in measured])
    if not len(e2e):
        return Sustainable(why="no request ended ok")
    stay_ns = float(np.median(e2e))
    if span.end_ns - span.start_ns < STAYS * stay_ns:
        needed_s = 2 * STAYS * stay_ns / 1e9
        alone, stay, needed = map(format.duration, (end_s - start_s, stay_ns / 1e9, needed_s))
        why = (
            f"too short: the load ran alone and in full for {alone}, requests last {stay} (p50), "
            f"so {needed} of it are needed"
        )
        return Sustainable(code="too_short", why=why, needed_s=needed_s)
    return _judge(list(_parts(measured, others, span, header)), span)


# -- shortfall -------------------------------------------------------------------------------------


class Shortfall(NamedTuple):
    """How far a server fell behind the arrivals in the second half of a load."""

    events: Literal["first tokens", "responses"]
    expected: float
    observed: int
    span_s: float

    @property
    def text(self) -> str:
        """What the server delivered and what was due, as one sentence."""
        return (
            f"the server did not keep up: in the second half of the load, "
            f"{format.duration(self.span_s)}, it delivered {self.observed:,} {self.events} where "
            f"{self.expected:,.0f} were due ({self.observed / self.expected:.0%})"
        )


def find_shortfall(measured: Sequence[Columns]) -> Shortfall | None:
    """Return how far the server of an open load fell behind, or None if it kept up.

    In the second half of the load a server that keeps up delivers as many first tokens, and ends
    as many responses, as the arrivals and the delays of the first quarter lead to expect. It does
    not keep up if it delivers less than KEEPS_UP of them and the difference is beyond chance. How
    long requests wait does not matter. Failed and dropped requests are expected and not delivered.
    Of conversations and tasks only the first tokens of the first turns are compared, because how
    long a session lasts depends on more than the server.
    """
    names = ("due_ns", "turn", "session", "first_token_ns", "end_ns", "status", *_WORK)
    columns = {
        name: together([_column(part, name)[_was_due(part)] for part in measured]) for name in names
    }
    of_sessions = bool((columns["session"] >= 0).any())
    independent = (columns["session"] < 0) | (columns["turn"] == 0)
    columns = {name: column[independent] for name, column in columns.items()}
    due = columns["due_ns"]
    if len(due) < 2 or int(due.min()) == int(due.max()):
        return None
    half = _SecondHalf(due)
    longer_prompts = half.relative_work(columns["input_tokens"])
    is_unseen = (columns["first_token_ns"] < 0) & (columns["status"] == OK)
    first_token = np.where(is_unseen, columns["end_ns"], columns["first_token_ns"])
    shortfall = half.compare("first tokens", first_token, longer_prompts)
    if shortfall is not None or of_sessions:
        return shortfall
    end = np.where(columns["status"] == OK, columns["end_ns"], -1)
    stays = (end - due)[end >= 0]
    if not len(stays) or STAYS * float(np.median(stays)) > half.end_ns - half.start_ns:
        return None  # the server is still filling: its first responses came faster than later ones
    longer = longer_prompts * half.relative_work(columns["asked_output"])
    return half.compare("responses", end, longer)


def _column(part: Columns, name: str) -> NDArray[np.int64]:
    """Return a column. A response without a requested length counts with the tokens it had."""
    if name != "asked_output":
        return part[name]
    return np.where(part[name] >= 0, part[name], part["output_tokens"])


def _was_due(part: Columns) -> NDArray[np.bool_]:
    """Return which requests reached their due time and were neither cancelled nor lost."""
    was_due: NDArray[np.bool_] = part.attempted & ~part.where(CANCELLED) & ~part.where(LOST)
    return was_due


class _SecondHalf:
    """The second half of a load, in which events are compared with those that are expected."""

    def __init__(self, due_ns: NDArray[np.int64]) -> None:
        first_ns, last_ns = int(due_ns.min()), int(due_ns.max())
        self.due_ns = due_ns
        self.start_ns = (first_ns + last_ns) / 2
        self.end_ns = float(last_ns)
        self.is_early = due_ns <= first_ns + (last_ns - first_ns) / 4  # in the first quarter
        gaps = np.diff(np.sort(due_ns))
        # 1 is the dispersion of a Poisson load; a steadier load is given the same tolerance
        self.dispersion = max(1.0, float(gaps.var()) / float(gaps.mean()) ** 2)

    def relative_work(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the tokens of each request relative to the mean of the first quarter.

        The result is 1 for every request unless requests became longer. -1 tokens are unknown.
        """
        is_known = tokens >= 0
        early = tokens[is_known & self.is_early]
        late = tokens[is_known & (self.due_ns > self.start_ns)]
        unchanged = np.ones(len(tokens))
        if not len(early) or not len(late) or not early.any():
            return unchanged
        early_mean = float(early.mean())
        if float(late.mean()) <= (1 + GROWTH) * early_mean:
            return unchanged
        return np.where(is_known, tokens / early_mean, unchanged)

    def compare(
        self,
        events: Literal["first tokens", "responses"],
        events_ns: NDArray[np.int64],
        relative_work: NDArray[np.float64],
    ) -> Shortfall | None:
        """Compare the events with those that the arrivals lead to expect.

        `events_ns` holds the time of the event of each request, -1 if it never came.
        """
        early_delays = (events_ns - self.due_ns)[(events_ns >= 0) & self.is_early]
        if not len(early_delays):
            return None
        delays = np.quantile(early_delays, np.linspace(0, 1, DELAYS), method="nearest")

        def share_until(instant_ns: float) -> NDArray[np.float64]:
            """Return, for each request, the share of the early delays that are over by then."""
            elapsed_ns = (instant_ns - self.due_ns) / relative_work
            return np.searchsorted(delays, elapsed_ns, "right") / len(delays)

        expected = float((share_until(self.end_ns) - share_until(self.start_ns)).sum())
        observed = int(((events_ns > self.start_ns) & (events_ns <= self.end_ns)).sum())
        is_beyond_chance = expected - observed > CLEARLY * math.sqrt(self.dispersion * expected)
        if observed < KEEPS_UP * expected and is_beyond_chance:
            return Shortfall(events, expected, observed, (self.end_ns - self.start_ns) / 1e9)
        return None


# -- growth ----------------------------------------------------------------------------------------


def _not_judged(stages: Sequence[StagePlan], header: RunManifest) -> str:
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
    work: tuple[NDArray[np.float64], NDArray[np.float64]]  # block means, in the order of _WORK


def _parts(
    measured: Sequence[Columns], others: Sequence[Columns], span: _Span, header: RunManifest
) -> Iterator[_Part]:
    """Yield the block means of each target, or of each replica where the rows name one."""
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
    work = [together([_column(part, name) for part in measured])[in_span] for name in _WORK]
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
        with_ttft = rows[ttft[rows] != metrics.UNDEFINED]
        mean_ttft = _block_means(ttft[with_ttft], place[with_ttft])
        series = (flying[key].reshape(BLOCKS, INSTANTS).mean(axis=1), mean_ttft)
        prompts, responses = (
            _block_means(tokens[rows][tokens[rows] >= 0], place[rows][tokens[rows] >= 0])
            for tokens in work
        )
        yield _Part(part_name(key, header), requests, series, (prompts, responses))


def _block_means(values: NDArray[np.int64], place: NDArray[np.int8]) -> NDArray[np.float64]:
    """Return the mean of the values in each block, NaN for a block without any."""
    counts = np.bincount(place, minlength=BLOCKS)
    sums = np.bincount(place, weights=values, minlength=BLOCKS)
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)


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


def part_name(key: int, header: RunManifest) -> str:
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
        needed_s = 2 * seconds * FEWEST_REQUESTS / count if count else None
        return Sustainable(code="too_few", why=why, parts=len(parts), needed_s=needed_s)
    growths = _find_growths(parts)
    work_growth = None
    if growths.certain or growths.possible:
        relative_parts = [_relative_to_work(part) for part in parts]
        work_growth = max(share for _, share in relative_parts) or None
        if work_growth is not None:
            growths = _find_growths([part for part, _ in relative_parts])
    grown, perhaps, visible_share = growths.certain, growths.possible, growths.visible_share
    kind = "replica" if parts[0].name.startswith("replica") else "target"
    facts = {
        "start_s": float(span.start_ns / 1e9),
        "end_s": float(span.end_ns / 1e9),
        "parts": len(parts),
        "visible_share": visible_share if math.isfinite(visible_share) else None,
        "work_growth_share": work_growth,
    }
    if work_growth is not None:
        tested += f", relative to requests that became {work_growth:.0%} longer"
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
            code="grows",
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
        return Sustainable(
            code="may_grow",
            why=why,
            growth_share=most_grown.share,
            **facts,  # type: ignore[arg-type]
        )
    if not visible_share <= SEES and (most_flying := _few_in_flight(parts)) is not None:
        why = (
            f"the server kept up: no more than {most_flying:,.0f} requests were in flight{each} in "
            f"{tested}, less than {1 - KEEPS_UP:.0%} of those that were due"
        )
        return Sustainable(sustained=True, code="steady", why=why, **facts)  # type: ignore[arg-type]
    if not visible_share <= SEES:
        most = f"{visible_share:.0%} of the mean" if math.isfinite(visible_share) else "any size"
        why = f"no growth seen in {tested}, but one of {most} would have been missed: a longer run shows more"
        # the smallest growth that is seen falls with the square root of the length
        needed_s = 2 * seconds * min(visible_share**2, MOST_TIMES)
        return Sustainable(code="too_noisy", why=why, needed_s=needed_s, **facts)  # type: ignore[arg-type]
    why = f"neither TTFT nor requests in flight{f' of any {kind}' if len(parts) > 1 else ''} grow in {tested}; {sees}"
    return Sustainable(sustained=True, code="steady", why=why, **facts)  # type: ignore[arg-type]


class _Growths(NamedTuple):
    certain: list[_Growth]
    possible: list[_Growth]
    visible_share: float  # the smallest growth that would have been seen in each part


def _find_growths(parts: Sequence[_Part]) -> _Growths:
    """Test all series of all parts for growth together."""
    trends = iter(trend.of([series for part in parts for series in part.series]))
    growths = _Growths([], [], 0.0)
    least_visible = []
    for part in parts:
        visible = [math.inf]
        for name, series in zip(_SERIES, part.series, strict=True):
            found = next(trends)
            if found is None or found.level <= 0:
                continue
            visible.append(found.visible / found.level)
            share = found.growth / found.level
            is_possible = found.chance < MAYBE and share > MAYBE_GROWTH
            if (found.grows and share > GROWTH) or is_possible:
                known = series[np.isfinite(series)]
                growth = _Growth(share, part.name, name, float(known[0]), float(known[-1]))
                (growths.certain if found.grows else growths.possible).append(growth)
        least_visible.append(min(visible))
    return growths._replace(visible_share=max(least_visible))


def _relative_to_work(part: _Part) -> tuple[_Part, float]:
    """Return a part with its series relative to the work of its requests, and how that grew.

    Where prompts became longer, so does TTFT; where prompts or responses did, more requests are in
    flight at the same rate. The growth is a share of the mean, 0 if there is none beyond chance.
    """
    (prompts, longer_prompts), (responses, longer_responses) = map(_relative_growth, part.work)
    in_flight, ttft = part.series
    series = (in_flight / (prompts * responses), ttft / prompts)
    relative = msgspec.structs.replace(part, series=series)
    return relative, max(longer_prompts, longer_responses)


def _relative_growth(tokens: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the tokens of each block relative to the first, and their growth beyond chance."""
    (found,) = trend.of([tokens])
    if found is None or not found.grows or found.growth <= GROWTH * found.level:
        return np.ones(BLOCKS), 0.0
    first = float(tokens[np.isfinite(tokens)][0])
    return tokens / first, found.growth / found.level


def _few_in_flight(parts: Sequence[_Part]) -> float | None:
    """Return how many requests were in flight at most, if so few that every server kept up.

    What a server falls behind with is in flight. If that is less than the share of the requests
    due that it may fall behind with, then it kept up, however noisy the series are.
    """
    most_flying = [float(part.series[0].max()) for part in parts]
    are_few = all(
        flying < (1 - KEEPS_UP) * part.requests
        for flying, part in zip(most_flying, parts, strict=True)
    )
    return max(most_flying) if are_few else None


def _values(growth: _Growth) -> str:
    if growth.series == "TTFT":
        return f"from {growth.first / 1e6:,.0f} to {growth.last / 1e6:,.0f} ms"
    return f"from {growth.first:,.4g} to {growth.last:,.4g}"
