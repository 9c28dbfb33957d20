"""Tests whether TTFT or the requests in flight grow over time at any target or replica.

Pure. `stats.trend` tests the series of all replicas together. Where prompts or responses became
longer, the series are tested again relative to the work of the requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.columns import UNDEFINED, UNKNOWN, as_selection, join_selected
from loadgen.core.metrics.replica_keys import group_by_key, replica_keys, replica_name
from loadgen.core.metrics.shortfall import MIN_GROWTH_SHARE, requested_output_tokens
from loadgen.core.stats import trend
from loadgen.core.stats.quantiles import block_slices, count_open_spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


class _TestedRequests(NamedTuple):
    """The measured requests that are due in the time tested, one value for each in every column.

    Attributes:
        replica_key: The number of the target and replica (`replica_keys`).
        block: The block of time in which the request is due, from 0 to BLOCKS - 1.
        ttft_ns: TTFT, UNDEFINED for a request that is not ok.
        prompt_tokens: The tokens of the prompt, or UNKNOWN.
        output_tokens: The requested tokens of the response, or UNKNOWN.
    """

    replica_key: NDArray[np.int32]
    block: NDArray[np.int8]
    ttft_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def measure_replicas(
    measured_stages: Sequence[Columns],
    warmup_stages: Sequence[Columns],
    tested_time: TestedTime,
    manifest: RunManifest,
) -> list[ReplicaSeries]:
    """Return what happened at each replica over the tested time, as one mean per block of time.

    The tested time is divided into BLOCKS blocks of equal length. For each block, the result has
    the mean TTFT, the requests in flight, and the tokens of the prompts and the responses. A
    replica is one of several servers behind an address, or a target if these are not known.

    Args:
        measured_stages: The records of each measured stage.
        warmup_stages: The records of each other stage, whose requests may still be in flight.
        tested_time: The part of the load that is tested for growth.
        manifest: The manifest of the run.
    """
    requests = _select_tested_requests(measured_stages, tested_time)
    in_flight_by_replica = _measure_in_flight([*measured_stages, *warmup_stages], tested_time)
    nothing_in_flight = np.zeros(BLOCKS)

    all_series = []
    for key, rows in group_by_key(requests.replica_key):
        blocks = requests.block[rows]

        # A failed request has the TTFT UNDEFINED. A number of tokens may be UNKNOWN.
        replica_series = ReplicaSeries(
            name=replica_name(key, manifest),
            due_requests=len(rows),
            in_flight=in_flight_by_replica.get(key, nothing_in_flight),
            ttft_ns=_block_means(requests.ttft_ns[rows], blocks, missing=UNDEFINED),
            prompt_tokens=_block_means(requests.prompt_tokens[rows], blocks, missing=UNKNOWN),
            output_tokens=_block_means(requests.output_tokens[rows], blocks, missing=UNKNOWN),
        )
        all_series.append(replica_series)

    return all_series


def _select_tested_requests(
    measured_stages: Sequence[Columns], tested_time: TestedTime
) -> _TestedRequests:
    """Return the columns of the measured requests that are due in the tested time.

    Args:
        measured_stages: The records of each measured stage.
        tested_time: The part of the load that is tested for growth.
    """
    block_of_request = [
        _assign_blocks(columns["due_ns"], tested_time) for columns in measured_stages
    ]
    is_tested = [blocks != NO_BLOCK for blocks in block_of_request]

    # Generators, so that a column is in memory for one stage at a time.
    keys = (replica_keys(columns) for columns in measured_stages)
    ttft_ns = (_ok_ttft_ns(columns) for columns in measured_stages)
    prompt_tokens = (columns["input_tokens"] for columns in measured_stages)
    output_tokens = (requested_output_tokens(columns) for columns in measured_stages)

    return _TestedRequests(
        replica_key=join_selected(keys, is_tested),
        block=join_selected(block_of_request, is_tested),
        ttft_ns=join_selected(ttft_ns, is_tested),
        prompt_tokens=join_selected(prompt_tokens, is_tested),
        output_tokens=join_selected(output_tokens, is_tested),
    )


def _assign_blocks(due_ns: NDArray[np.int64], tested_time: TestedTime) -> NDArray[np.int8]:
    """Return the block of time in which each request is due, or NO_BLOCK.

    The tested time is divided into BLOCKS blocks of equal length, with the numbers from 0.

    Args:
        due_ns: The time at which each request is due.
        tested_time: The part of the load that is tested for growth.
    """
    block_of_request = np.empty(len(due_ns), np.int8)
    block_length_ns = (tested_time.end_ns - tested_time.start_ns) / BLOCKS

    # A run may have millions of requests, so they are processed slice by slice.
    for rows in block_slices(len(due_ns)):
        time_in_blocks = (due_ns[rows] - tested_time.start_ns) / block_length_ns
        block_numbers = np.floor(time_in_blocks)
        is_tested = (block_numbers >= 0) & (block_numbers < BLOCKS)
        block_of_request[rows] = np.where(is_tested, block_numbers, NO_BLOCK)

    return block_of_request


def _ok_ttft_ns(columns: Columns) -> NDArray[np.int64]:
    """Return the TTFT of each ok request, UNDEFINED for other requests."""
    return np.where(columns.is_ok, columns.measure("ttft"), UNDEFINED)


def _measure_in_flight(
    all_stages: Sequence[Columns], tested_time: TestedTime
) -> dict[int, NDArray[np.float64]]:
    """Return the mean number of requests in flight in each block, by the key of the replica.

    The requests in flight are counted at SAMPLES_PER_BLOCK evenly spaced times of each block.

    Args:
        all_stages: The records of each stage.
        tested_time: The part of the load that is tested for growth.
    """
    sample_count = BLOCKS * SAMPLES_PER_BLOCK
    sample_times_ns = np.linspace(
        tested_time.start_ns, tested_time.end_ns, sample_count, endpoint=False
    )

    # For each replica, the number of requests in flight at each of these times.
    counts_by_replica: dict[int, NDArray[np.int64]] = {}
    for columns in all_stages:
        for key, counts in _count_in_flight_by_replica(columns, sample_times_ns):
            counts_of_earlier_stages = counts_by_replica.get(key, 0)
            counts_by_replica[key] = counts + counts_of_earlier_stages

    return {key: _mean_of_each_block(counts) for key, counts in counts_by_replica.items()}


def _mean_of_each_block(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean of each block of SAMPLES_PER_BLOCK counts, which follow each other."""
    one_row_per_block = counts.reshape(BLOCKS, SAMPLES_PER_BLOCK)
    means: NDArray[np.float64] = one_row_per_block.mean(axis=1)
    return means


def _count_in_flight_by_replica(
    columns: Columns, times_ns: NDArray[np.float64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the key of each replica with the number of its requests in flight at each time.

    Args:
        columns: The records of a stage.
        times_ns: The times, in ascending order.
    """
    was_sent = as_selection(columns.is_known("sent_ns"))
    sent_ns = columns["sent_ns"][was_sent]
    done_ns = columns["done_ns"][was_sent]
    keys = replica_keys(columns)[was_sent]

    for key, rows in group_by_key(keys):
        sent_ns_of_replica = sent_ns[rows]
        done_ns_of_replica = done_ns[rows]
        is_done = done_ns_of_replica >= 0  # others are still in flight, with an end of -1
        counts = count_open_spans(sent_ns_of_replica, done_ns_of_replica[is_done], times_ns)
        yield key, counts


def _block_means(
    values: NDArray[np.int64], block_of_value: NDArray[np.int8], *, missing: int
) -> NDArray[np.float64]:
    """Return the mean of the values in each block of time, NaN for a block without values.

    Args:
        values: The value of each request of a replica.
        block_of_value: The block in which each of these requests is due.
        missing: The number that stands for a missing value.
    """
    is_known = values != missing
    blocks = block_of_value[is_known]
    counts = np.bincount(blocks, minlength=BLOCKS)
    sums = np.bincount(blocks, weights=values[is_known], minlength=BLOCKS)

    divisors = np.maximum(counts, 1)  # never 0
    return np.where(counts > 0, sums / divisors, math.nan)


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
        certain_growths: Growth beyond chance.
        possible_growths: Growth that is large and that chance alone could make too.
        detectable_share: The smallest growth that the test would have detected at every replica, as
            a share of the mean. Infinite if a replica has no series that can be tested.
        work_growth_share: How much longer prompts or responses became; None if not beyond chance.
            The growth of the series is then relative to this.
    """

    certain_growths: list[Growth]
    possible_growths: list[Growth]
    detectable_share: float
    work_growth_share: float | None = None


def find_growth(replicas: Sequence[ReplicaSeries]) -> GrowthTest:
    """Test whether TTFT or the requests in flight grow over time at any replica.

    If prompts or responses became longer, both may grow for that reason alone. Then they are
    divided by the length of the requests, and tested again.
    """
    test = _test_series(replicas)
    has_growth = bool(test.certain_growths or test.possible_growths)
    if not has_growth:
        return test

    work_growth_share = max(_work_growth_share(replica) for replica in replicas)
    if work_growth_share == 0:
        return test

    corrected_replicas = [_correct_for_length(replica) for replica in replicas]
    corrected_test = _test_series(corrected_replicas)
    return corrected_test._replace(work_growth_share=work_growth_share)


class _TestedSeries(NamedTuple):
    """A series that is tested for growth: the TTFT or the requests in flight of a replica."""

    replica: ReplicaSeries
    name: SeriesName
    values: NDArray[np.float64]


class _SeriesTrend(NamedTuple):
    """A tested series with its trend, the straight line through the means of its blocks."""

    series: _TestedSeries
    line: trend.Trend

    @property
    def growth_share(self) -> float:
        """The growth from the first block to the last one, as a share of the mean."""
        return self.line.growth / self.line.mean

    @property
    def detectable_share(self) -> float:
        """The smallest growth that the test would have detected, as a share of the mean."""
        return self.line.detectable_growth / self.line.mean

    @property
    def is_growth_possible(self) -> bool:
        """Whether the growth is large, and improbable by chance in a single series."""
        is_improbable = self.line.p_value < MAX_POSSIBLE_P_VALUE
        return is_improbable and self.growth_share > MIN_POSSIBLE_GROWTH_SHARE

    @property
    def is_growth_certain(self) -> bool:
        """Whether the growth is beyond chance among all series, and not negligible."""
        is_large_enough = self.growth_share > MIN_GROWTH_SHARE or self.is_growth_possible
        return self.line.grows and is_large_enough

    def describe_growth(self) -> Growth:
        """Return the growth of the series with its first and its last value."""
        values = self.series.values
        known_values = values[np.isfinite(values)]
        return Growth(
            share=self.growth_share,
            replica=self.series.replica.name,
            series=self.series.name,
            first=float(known_values[0]),
            last=float(known_values[-1]),
        )


def _test_series(replicas: Sequence[ReplicaSeries]) -> GrowthTest:
    """Test whether TTFT or the requests in flight grow at any replica."""
    trends = _find_trends(replicas)

    certain_growths: list[Growth] = []
    possible_growths: list[Growth] = []
    for series_trend in trends:
        if series_trend.is_growth_certain:
            certain_growths.append(series_trend.describe_growth())
        elif series_trend.is_growth_possible:
            possible_growths.append(series_trend.describe_growth())

    # The replica at which a growth is hardest to detect decides.
    detectable_share = max(_detectable_share(replica, trends) for replica in replicas)
    return GrowthTest(certain_growths, possible_growths, detectable_share)


def _find_trends(replicas: Sequence[ReplicaSeries]) -> list[_SeriesTrend]:
    """Return the trends of TTFT and of the requests in flight, for all replicas.

    A series with too few values, or with a mean of 0, has no trend.
    """
    tested_series = [
        _TestedSeries(replica, name, values)
        for replica in replicas
        for name, values in replica.tested
    ]

    # All series are tested in one call, which corrects for the number of tests.
    lines = trend.find_trends([series.values for series in tested_series])

    return [
        _SeriesTrend(series, line)
        for series, line in zip(tested_series, lines, strict=True)
        if line is not None and line.mean > 0
    ]


def _detectable_share(replica: ReplicaSeries, trends: Sequence[_SeriesTrend]) -> float:
    """Return the smallest growth that would have been detected at a replica.

    It is a share of the mean, and infinite if the replica has no trend.
    """
    # An overload shows in at least one series, so the one in which it is easiest to detect counts.
    shares = [
        series_trend.detectable_share
        for series_trend in trends
        if series_trend.series.replica is replica
    ]
    return min(shares, default=math.inf)


def _correct_for_length(replica: ReplicaSeries) -> ReplicaSeries:
    """Return a replica with the TTFT and requests in flight of requests of constant length.

    A longer prompt has a longer TTFT, so TTFT is divided by how much longer the prompts became. A
    request is in flight for longer if its prompt or its output is longer, and longest if both are,
    so the requests in flight are divided by both.
    """
    prompt_factors = _relative_tokens(replica.prompt_tokens)
    output_factors = _relative_tokens(replica.output_tokens)

    return msgspec.structs.replace(
        replica,
        in_flight=replica.in_flight / (prompt_factors * output_factors),
        ttft_ns=replica.ttft_ns / prompt_factors,
    )


def _relative_tokens(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tokens of each block divided by the tokens of the first block.

    The result is 1 for each block if the tokens do not grow, or may grow by chance.
    """
    if _growth_share_beyond_chance(tokens) == 0:
        return np.ones(BLOCKS)
    known_tokens = tokens[np.isfinite(tokens)]
    return tokens / float(known_tokens[0])


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

    growth_share = tokens_trend.growth / tokens_trend.mean
    return growth_share if growth_share > MIN_GROWTH_SHARE else 0.0
