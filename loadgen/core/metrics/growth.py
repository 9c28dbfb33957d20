"""Tests whether TTFT or the requests in flight grow over time at any target or replica.

Pure. `stats.trend` tests the series of all replicas together. Where prompts or responses became
longer, the series are tested again relative to the work of the requests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.columns import OK, UNDEFINED, as_selection, join_arrays
from loadgen.core.metrics.replica_keys import group_by_key, replica_keys, replica_name
from loadgen.core.metrics.shortfall import MIN_GROWTH_SHARE, requested_output_tokens
from loadgen.core.stats import trend
from loadgen.core.stats.quantiles import block_slices, sort_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.results.manifest import RunManifest

BLOCKS = 16
"""The time tested is cut into so many equal blocks."""

SAMPLES_PER_BLOCK = 8
"""The requests in flight are counted so many times per block."""

MAX_POSSIBLE_P_VALUE = 0.05
"""A trend with a smaller p-value than this is a possible growth, if it is large enough."""

MIN_POSSIBLE_GROWTH_SHARE = 0.25
"""A growth that may be one prevents a load from being called sustained from this share on."""

NO_BLOCK = -1
"""The block of a request that is not due in the time tested."""

NO_TOKEN_COUNT = -1
"""The value of a column of tokens in a record whose tokens were not counted."""

SeriesName = Literal["requests in flight", "TTFT"]


class TestedTime(NamedTuple):
    """The part of a load that is tested for growth: its second half."""

    start_ns: float
    end_ns: float

    @property
    def duration_s(self) -> float:
        """The length of this part."""
        return (self.end_ns - self.start_ns) / 1e9


class ReplicaSeries(msgspec.Struct, frozen=True):
    """What happened at one target or replica: the mean of each block, NaN for a block without any.

    `name` is empty for the only target of a run. The tokens are those of the requests due in a
    block: of their prompts, and the requested ones of their responses.
    """

    name: str
    due_requests: int
    in_flight: NDArray[np.float64]
    ttft_ns: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]

    @property
    def tested(self) -> tuple[tuple[SeriesName, NDArray[np.float64]], ...]:
        """The series that are tested for growth, with their names."""
        return ("requests in flight", self.in_flight), ("TTFT", self.ttft_ns)


def measure_replicas(
    measured: Sequence[Columns],
    warmup: Sequence[Columns],
    time: TestedTime,
    manifest: RunManifest,
) -> list[ReplicaSeries]:
    """Return the series of each target, or of each replica where the records name one.

    Args:
        measured: The records of each measured stage.
        warmup: The records of each other stage. Its requests may be in flight, and count for
            nothing else.
        time: The part of the load that is tested for growth.
        manifest: The manifest of the run.
    """
    due_ns = join_arrays([columns["due_ns"] for columns in measured])
    block_of_request = _assign_blocks(due_ns, time)
    is_tested = block_of_request != NO_BLOCK
    block_of_request = block_of_request[is_tested]

    def select_tested(columns: list[NDArray[Any]]) -> NDArray[Any]:
        tested: NDArray[Any] = join_arrays(columns)[is_tested]
        return tested

    ttft_ns = select_tested([_ok_ttft_ns(columns) for columns in measured])
    prompt_tokens = select_tested([columns["input_tokens"] for columns in measured])
    output_tokens = select_tested([requested_output_tokens(columns) for columns in measured])
    keys = select_tested([replica_keys(columns) for columns in measured])
    in_flight = _count_in_flight([*measured, *warmup], time)
    replicas = []
    for key, rows in group_by_key(keys):
        blocks = block_of_request[rows]
        replica = ReplicaSeries(
            name=replica_name(key, manifest),
            due_requests=len(rows),
            in_flight=in_flight[key].reshape(BLOCKS, SAMPLES_PER_BLOCK).mean(axis=1),
            ttft_ns=_block_means(ttft_ns[rows], blocks, missing=UNDEFINED),
            prompt_tokens=_block_means(prompt_tokens[rows], blocks, missing=NO_TOKEN_COUNT),
            output_tokens=_block_means(output_tokens[rows], blocks, missing=NO_TOKEN_COUNT),
        )
        replicas.append(replica)
    return replicas


def _assign_blocks(due_ns: NDArray[np.int64], time: TestedTime) -> NDArray[np.int8]:
    """Return the block in which each request is due, NO_BLOCK if it is due at another time.

    It is computed in slices of requests, since the temporary arrays of floats take much memory.
    """
    blocks = np.empty(len(due_ns), np.int8)
    block_ns = (time.end_ns - time.start_ns) / BLOCKS
    for rows in block_slices(len(due_ns)):
        block = np.floor((due_ns[rows] - time.start_ns) / block_ns)
        blocks[rows] = np.where((block >= 0) & (block < BLOCKS), block, NO_BLOCK)
    return blocks


def _ok_ttft_ns(columns: Columns) -> NDArray[np.int64]:
    """Return the TTFT of each ok request, UNDEFINED for other requests."""
    return np.where(columns.where(OK), columns.measure("ttft"), UNDEFINED)


def _count_in_flight(
    all_stages: Sequence[Columns], time: TestedTime
) -> dict[int, NDArray[np.int64]]:
    """Return how many requests are in flight at evenly spaced times, for each replica.

    They are the requests sent until a time less the requests done until then.

    Args:
        all_stages: The records of each stage.
        time: The part of the load that is tested for growth.

    Returns:
        The counts by the key of the replica (`replica_keys`). A replica without any requests has
        counts of 0.
    """
    times_ns = np.linspace(time.start_ns, time.end_ns, BLOCKS * SAMPLES_PER_BLOCK + 1)[:-1]
    in_flight: dict[int, NDArray[np.int64]] = defaultdict(lambda: np.zeros(len(times_ns), np.int64))
    for columns in all_stages:
        was_sent = as_selection(columns["sent_ns"] >= 0)
        sent_ns = columns["sent_ns"][was_sent]
        done_ns = columns["done_ns"][was_sent]
        for key, rows in group_by_key(replica_keys(columns)[was_sent]):
            replica_done_ns = done_ns[rows]
            known_done_ns = replica_done_ns[replica_done_ns >= 0]
            in_flight[key] += np.searchsorted(sort_times(sent_ns[rows]), times_ns, "right")
            in_flight[key] -= np.searchsorted(sort_times(known_done_ns), times_ns, "right")
    return in_flight


def _block_means(
    values: NDArray[np.int64], block_of_value: NDArray[np.int8], missing: int
) -> NDArray[np.float64]:
    """Return the mean of each block over the values that are not `missing`, NaN without any."""
    is_known = values != missing
    blocks = block_of_value[is_known]
    counts = np.bincount(blocks, minlength=BLOCKS)
    sums = np.bincount(blocks, weights=values[is_known], minlength=BLOCKS)
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)


class Growth(NamedTuple):
    """The growth of one series of a replica over the time tested.

    Attributes:
        share: The growth by a straight line, as a share of the mean of the series.
        replica: The name of the replica.
        series: The name of the series.
        first: The value of the first block that has one.
        last: The value of the last block that has one.
    """

    share: float
    replica: str
    series: SeriesName
    first: float
    last: float


class GrowthTest(NamedTuple):
    """The result of testing the series of all replicas for growth.

    Attributes:
        certain: Growth beyond chance.
        possible: Growth that is large and that chance alone could make too.
        visible_share: The smallest growth that would have been seen at every replica, as a share of
            the mean. Infinite if a replica has no series that can be tested.
        work_growth_share: How much longer prompts or responses became; None if not beyond chance.
            The growth of the series is then relative to this.
    """

    certain: list[Growth]
    possible: list[Growth]
    visible_share: float
    work_growth_share: float | None = None


def find_growth(replicas: Sequence[ReplicaSeries]) -> GrowthTest:
    """Test the series of all replicas for growth.

    A server whose requests become longer has a growing latency also if it keeps up. So if prompts
    or responses became longer, the series are tested again relative to the work of the requests.
    """
    test = _test_series(replicas)
    if not test.certain and not test.possible:
        return test
    work_growth_share = max(_work_growth_share(replica) for replica in replicas)
    if work_growth_share == 0:
        return test
    relative_test = _test_series([_relative_to_work(replica) for replica in replicas])
    return relative_test._replace(work_growth_share=work_growth_share)


def _test_series(replicas: Sequence[ReplicaSeries]) -> GrowthTest:
    """Test all series of all replicas at once, so that Holm's correction covers all of them."""
    all_series = [series for replica in replicas for _, series in replica.tested]
    # The trends have the order of `all_series`, in which the loops below take them.
    trends = iter(trend.find_trends(all_series))
    certain: list[Growth] = []
    possible: list[Growth] = []
    visible_shares = []
    for replica in replicas:
        visible_share = math.inf
        for series_name, series in replica.tested:
            series_trend = next(trends)
            if series_trend is None or series_trend.mean <= 0:
                continue
            visible_share = min(visible_share, series_trend.detectable_growth / series_trend.mean)
            growth = _describe_growth(replica.name, series_name, series, series_trend)
            if _is_growth_certain(growth, series_trend):
                certain.append(growth)
            elif _is_growth_possible(growth, series_trend):
                possible.append(growth)
        # A replica that is overloaded has at least one growing series, so the better one counts.
        visible_shares.append(visible_share)
    return GrowthTest(certain, possible, visible_share=max(visible_shares))


def _is_growth_possible(growth: Growth, series_trend: trend.Trend) -> bool:
    """Return True for a large growth that is improbable by chance in a single series."""
    is_improbable = series_trend.p_value < MAX_POSSIBLE_P_VALUE
    return is_improbable and growth.share > MIN_POSSIBLE_GROWTH_SHARE


def _is_growth_certain(growth: Growth, series_trend: trend.Trend) -> bool:
    """Return True for a growth that is beyond chance among all series, and not negligible."""
    is_large_enough = growth.share > MIN_GROWTH_SHARE or _is_growth_possible(growth, series_trend)
    return series_trend.grows and is_large_enough


def _describe_growth(
    replica_name: str,
    series_name: SeriesName,
    series: NDArray[np.float64],
    series_trend: trend.Trend,
) -> Growth:
    """Return the growth of a series as a share of its mean, with its first and its last value."""
    known_values = series[np.isfinite(series)]
    return Growth(
        share=series_trend.growth / series_trend.mean,
        replica=replica_name,
        series=series_name,
        first=float(known_values[0]),
        last=float(known_values[-1]),
    )


def _relative_to_work(replica: ReplicaSeries) -> ReplicaSeries:
    """Return the series of a replica divided by the growth of the work of its requests.

    Longer prompts take longer to process, so TTFT is divided by the relative length of prompts. At
    the same rate, longer prompts or responses leave more requests in flight, so their number is
    divided by both relative lengths.
    """
    prompt_work = _relative_tokens(replica.prompt_tokens)
    output_work = _relative_tokens(replica.output_tokens)
    return msgspec.structs.replace(
        replica,
        in_flight=replica.in_flight / (prompt_work * output_work),
        ttft_ns=replica.ttft_ns / prompt_work,
    )


def _relative_tokens(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tokens of each block relative to the first, 1 unless they grow beyond chance."""
    if _growth_share_beyond_chance(tokens) == 0:
        return np.ones(BLOCKS)
    return tokens / float(tokens[np.isfinite(tokens)][0])


def _work_growth_share(replica: ReplicaSeries) -> float:
    """Return how much longer prompts or responses became at a replica, 0 if not beyond chance."""
    return max(
        _growth_share_beyond_chance(replica.prompt_tokens),
        _growth_share_beyond_chance(replica.output_tokens),
    )


def _growth_share_beyond_chance(tokens: NDArray[np.float64]) -> float:
    """Return the growth of a series as a share of its mean, 0 if it is small or may be chance."""
    (tokens_trend,) = trend.find_trends([tokens])
    if tokens_trend is None or not tokens_trend.grows:
        return 0.0
    is_small = tokens_trend.growth <= MIN_GROWTH_SHARE * tokens_trend.mean
    return 0.0 if is_small else tokens_trend.growth / tokens_trend.mean
