"""Parse the servers' metrics pages into samples, and summarize the samples of a run.

Pure. `scraper.py` fetches the pages. Nothing here corrects what the client measured: the server's
counts are reported together with the client's, and a disagreement is reported as one.
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from loadgen_sdk.wire_formats.server_profiles import SERVER_METRICS, SERVERS

from loadgen.core.limits import CACHED_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.samples import Sample as PrometheusSample

FILE = "server.jsonl"
"""The file in the folder of a run."""
MAX_SERIES = 20_000
"""A page with more series is an error. Large servers have some thousands."""
UP = "up"
"""Whether a read succeeded, under the name that Prometheus uses. It ends each read."""
SCRAPE_DURATION = "scrape_duration_seconds"
"""The duration of a read, under the name that Prometheus uses."""
ITERATION = "trtllm_iteration:"
"""The prefix for the names of TensorRT-LLM's JSON statistics."""
MAX_DISAGREEMENT = 0.02
"""Two counts of the same tokens that differ by more than this fraction disagree."""

(
    RUNNING,
    WAITING,
    KV_USE,
    HITS,
    OUTPUT,
    INPUT,
    CACHED,
    CACHE_HITS,
    CACHE_QUERIES,
    DONE,
    PAUSED,
    PREEMPTED,
    REPLICAS,
    DRAFTS,
    DRAFTED,
    ACCEPTED,
    ACCEPTED_AT,
    ACCEPT_SHARE,
    ACCEPT_LENGTH,
) = SERVER_METRICS
"""The quantities of metrics pages.

PAUSED counts requests that wait for room in the KV cache now, and PREEMPTED those that were taken
out of the batch for it so far. REPLICAS are ready now. Speculative decoding has counters (drafts,
their tokens, accepted tokens, accepted tokens by position), or gauges of the latest steps.
"""

SIMULATED = "simulated"
"""The page of samples with the number of replicas of a run in virtual time, if that changes."""
PLUGIN_PREFIX = "loadgen:"
"""The prefix for the names under which the pages of plug-ins' servers are stored."""
NAMES_BY_QUANTITY: dict[str, tuple[str, ...]] = {
    quantity: (
        *(name for row in SERVERS.builtin_rows for name in row.metrics.get(quantity, ())),
        PLUGIN_PREFIX + quantity,
    )
    for quantity in SERVER_METRICS
}
"""The names that each quantity has on different servers."""
_AVERAGED = (KV_USE, HITS, ACCEPT_SHARE, ACCEPT_LENGTH)
"""Quantities of which several series are averaged instead of added."""
_COUNTERS = (
    OUTPUT,
    INPUT,
    CACHED,
    CACHE_HITS,
    CACHE_QUERIES,
    DONE,
    PREEMPTED,
    DRAFTS,
    DRAFTED,
    ACCEPTED,
    ACCEPTED_AT,
)
"""Quantities that only grow while a server runs. All others are gauges, which rise and fall."""
QUANTITY_OF = {name: quantity for quantity, names in NAMES_BY_QUANTITY.items() for name in names}
"""The quantity of each name in NAMES_BY_QUANTITY."""


class SeriesKey(NamedTuple):
    """The name of a series on a page, and its labels as `format_labels` writes them."""

    name: str
    labels: str


PageValues = dict[SeriesKey, float]
"""The values of the series on a page."""


def stored_names(metrics: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return which metrics of a server are stored under another name, and under which one.

    A metric whose name loadgen knows is stored as it is. A metric of a server that a plug-in added
    is renamed after its quantity, for example `acme_running` to `loadgen:running`, so that results
    can be read without the plug-in.

    Args:
        metrics: For each quantity, such as "running", the names that it has on the server's page.

    Returns:
        The stored name by the name on the page, for names that are changed.
    """
    names = {}
    for quantity, page_names in metrics.items():
        if quantity not in SERVER_METRICS:
            continue
        for page_name in page_names:
            is_known_name = page_name in QUANTITY_OF
            if not is_known_name:
                names[page_name] = PLUGIN_PREFIX + quantity
    return names


class MetricSample(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `server.jsonl`: a series has this value until the next line of the series.

    Attributes:
        t_s: The time from the start of the run. It is negative before the load.
        target: The index of a target in the manifest, or None if the page belongs to none.
        page: The URL of the page, without secrets.
        name: The name of the series.
        labels: Its labels as on the page, without braces.
        value: Its value.
    """

    t_s: float
    target: int | None
    page: str
    name: str
    labels: str
    value: float


class PageReading(msgspec.Struct, frozen=True, kw_only=True):
    """One metrics page, how often it was read, and how many reads failed."""

    url: str
    reads: int
    failed: int


class ServerTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers counted from the first read, before the load, to the last read, after it.

    Values are sums over all pages, or None if no page has the metric.

    Attributes:
        pages: The pages.
        output_tokens: Output tokens.
        client_output_tokens: The client's count for ok requests, including those of the warm-up.
        input_tokens: Prompt tokens.
        cached_tokens: Prompt tokens from the prefix cache.
        requests_ok: Completed requests.
        running_max: The largest number of running requests at any read.
        waiting_max: The largest number of waiting requests at any read.
        kv_use_max: The largest fraction of the KV cache in use on any page.
        hit_share: The cache hit rate that the server reports at the last read.
        cached_share: The fraction of cached prompt tokens since the first read, else `hit_share`.
    """

    pages: tuple[PageReading, ...]
    output_tokens: int | None = None
    client_output_tokens: int | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    requests_ok: int | None = None
    running_max: int | None = None
    waiting_max: int | None = None
    kv_use_max: float | None = None
    hit_share: float | None = None
    cached_share: float | None = None


class Point(NamedTuple):
    """The value of a quantity at a time, in s from the start of the run."""

    t_s: float
    value: float


class MetricCurve(msgspec.Struct, frozen=True):
    """A quantity over time: its values at the times of the reads."""

    t_s: tuple[float, ...]
    values: tuple[float, ...]


# -- a page ---------------------------------------------------------------------------------------


def parse_page(text: str) -> PageValues:
    """Return the finite values on a page of Prometheus text.

    The creation times of counters (`_created`) are left out.

    Raises:
        ValueError: The text is no such page, or has no metrics or more than MAX_SERIES.
    """
    values: PageValues = {}
    for sample in _parse_samples(text):
        value = float(sample.value)
        if math.isfinite(value) and not sample.name.endswith("_created"):
            values[SeriesKey(sample.name, format_labels(sample.labels))] = value
        if len(values) > MAX_SERIES:
            raise ValueError(f"the page has more than {MAX_SERIES:,} series")
    if not values:
        raise ValueError("the page has no metrics")
    return values


def _parse_samples(text: str) -> Iterator[PrometheusSample]:
    """Yield the samples on a page of Prometheus text. Raises ValueError for any other text."""
    # Imported here because a run that reads no page does not need the parser at its start.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            yield from family.samples
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        # The parser raises these on some malformed texts.
        raise ValueError(f"not a page of metrics: {error!r}") from None


def format_labels(labels: Mapping[str, str]) -> str:
    """Return labels as a Prometheus page writes them: pairs `name="value"` with commas between."""
    pairs = []
    for name, value in labels.items():
        escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        pairs.append(f'{name}="{escaped}"')
    return ",".join(pairs)


class IterationParser:
    """Parses the JSON statistics of TensorRT-LLM: a list with a row for each iteration.

    Every read of that page empties it. The iterations are numbered, so this counts the rows that
    are missing, which another client must have read.
    """

    def __init__(self) -> None:
        self._last_number: int | None = None
        self._read_count = 0
        self._missed_count = 0

    def parse(self, data: bytes) -> PageValues:
        """Return the numbers of the last iteration, and what is computed from all iterations.

        An iteration is a step of the server's batch. Computed are the mean of its duration, how
        many iterations were read so far, and how many were missed. An empty list is valid: nothing
        has run since the last read.

        Raises:
            ValueError: The data are not a list of iterations.
        """
        try:
            iterations = msgspec.json.decode(data, type=list[dict[str, Any]])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a list of iterations: {error}") from None
        self._count_iterations(iterations)
        values: dict[str, float] = {
            "read_total": float(self._read_count),
            "missed_total": self._missed_count,
        }
        if iterations:
            values |= dict(_numeric_leaves(iterations[-1]))
            values |= _share_of_used_blocks(values)
            values |= _mean_latency(iterations)
        # The statistics have no labels.
        return {SeriesKey(ITERATION + name, labels=""): value for name, value in values.items()}

    def _count_iterations(self, iterations: Sequence[Mapping[str, Any]]) -> None:
        """Count the iterations of a read, and those that are missing since the read before.

        Iterations are numbered. A gap between two numbers is what another client has read.
        """
        self._read_count += len(iterations)
        numbers = sorted({int(number) for number in _numbers_in(iterations, "iter")})
        if not numbers:
            return
        if self._last_number is not None:
            numbers.insert(0, self._last_number)
        for previous, number in pairwise(numbers):
            self._missed_count += max(number - previous - 1, 0)
        self._last_number = numbers[-1]


def _share_of_used_blocks(values: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of KV cache blocks in use, which the server does not compute itself."""
    used_blocks = values.get("kvCacheStats.usedNumBlocks")
    max_blocks = values.get("kvCacheStats.maxNumBlocks")
    if used_blocks is None or not max_blocks:
        return {}
    return {"kvCacheStats.usedShare": used_blocks / max_blocks}


def _mean_latency(iterations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean duration of the iterations, under the name of that of a single one."""
    latencies_ms = _numbers_in(iterations, "iterLatencyMS")
    if not latencies_ms:
        return {}
    return {"iterLatencyMS": sum(latencies_ms) / len(latencies_ms)}


def _numbers_in(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of a field in the rows that have a number there."""
    return [row[name] for row in rows if isinstance(row.get(name), int | float)]


def _numeric_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number in nested objects, with a name such as `kvCacheStats.usedNumBlocks`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _numeric_leaves(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, float(value)


def is_written_rarely(name: str) -> bool:
    """Return True if a series is written only at the first and the last read.

    These are the buckets of histograms, of which a page has hundreds.
    """
    return name.endswith("_bucket")


# -- a run ----------------------------------------------------------------------------------------


def compute_curves(metric_samples: Sequence[MetricSample]) -> dict[str, MetricCurve]:
    """Return how the quantities of the servers changed during a run, for charts.

    A quantity is something that servers of different kinds report under different names, for
    example the number of running requests. If several pages or labels report it, their values are
    added. Only fractions, such as the use of a cache, are averaged.

    A counter becomes a rate per second between two reads, at the middle of the interval. A counter
    that never grows has no curve.
    """
    curve_by_quantity = {}
    for quantity, points in _points_by_quantity(metric_samples).items():
        is_counter = quantity in _COUNTERS
        curve_points = _rates_of_counter(points) if is_counter else points
        has_only_zeros = not any(point.value for point in curve_points)
        if is_counter and has_only_zeros:
            continue
        times_s = tuple(point.t_s for point in curve_points)
        values = tuple(point.value for point in curve_points)
        curve_by_quantity[quantity] = MetricCurve(times_s, values)
    return curve_by_quantity


def _rates_of_counter(points: Sequence[Point]) -> list[Point]:
    """Return the growth per second between successive readings, at the middle of the interval."""
    rates = []
    for before, after in pairwise(points):
        interval_s = after.t_s - before.t_s
        if interval_s > 0:
            middle_s = (before.t_s + after.t_s) / 2
            rates.append(Point(middle_s, (after.value - before.value) / interval_s))
    return rates


def measure_growth(metric_samples: Sequence[MetricSample], quantity: str) -> float | None:
    """Return the growth of a counter from the first to the last read, or None if no page has it."""
    points = _points_by_quantity(metric_samples).get(quantity)
    return points[-1].value - points[0].value if points else None


def count_replicas(metric_samples: Sequence[MetricSample]) -> list[Point]:
    """Return the number of replicas over time.

    It comes from the first of these sources that the samples have:

    1. pages that count replicas, such as that of a gateway,
    2. the simulation of a run in virtual time,
    3. the number of pages of targets that respond, if there are several.
    """
    counted = _points_by_quantity(metric_samples).get(REPLICAS)
    if counted:
        return counted
    simulated = [
        Point(sample.t_s, sample.value) for sample in metric_samples if sample.page == SIMULATED
    ]
    if simulated:
        return simulated
    return _count_responding_pages(metric_samples)


def _count_responding_pages(metric_samples: Sequence[MetricSample]) -> list[Point]:
    """Return how many pages of targets responded over time, or nothing for fewer than two pages.

    The time before all of them responded is left out, because targets may still have been starting.
    """
    is_up_by_page: dict[str, float] = {}
    points: list[Point] = []
    for sample in sorted(metric_samples, key=lambda sample: sample.t_s):
        if sample.name == UP and sample.target is not None:
            is_up_by_page[sample.page] = sample.value
            points.append(Point(sample.t_s, sum(is_up_by_page.values())))
    page_count = len(is_up_by_page)
    if page_count < 2:
        return []
    for index, point in enumerate(points):
        if point.value == page_count:
            return points[index:]
    return []


def compute_gauges(latest: Iterable[MetricSample]) -> dict[str, float]:
    """Return the known gauges by quantity, from the last sample of each series.

    Series of several pages and labels are added, and those of fractions averaged.
    """
    values_by_quantity: dict[str, list[float]] = {}
    for sample in latest:
        quantity = QUANTITY_OF.get(sample.name)
        if quantity is not None and quantity not in _COUNTERS:
            values_by_quantity.setdefault(quantity, []).append(sample.value)
    return {
        quantity: _combine_series(quantity, values)
        for quantity, values in values_by_quantity.items()
    }


def _combine_series(quantity: str, values: Sequence[float]) -> float:
    """Return the value of a quantity over several series: the mean of fractions, else the sum."""
    total = sum(values)
    return total / len(values) if quantity in _AVERAGED else total


def summarize(
    metric_samples: Sequence[MetricSample], client_output_tokens: int | None
) -> ServerTotals | None:
    """Return what the servers counted during a run, or None if no page was ever read.

    Args:
        metric_samples: The samples of all metrics pages of a run.
        client_output_tokens: The output tokens that the client counted, or None if it did not.
    """
    pages = summarize_reads(metric_samples)
    if all(page.failed == page.reads for page in pages):
        return None
    points = _points_by_quantity(metric_samples)
    # The fullest cache matters, not the mean over pages.
    kv_use = [sample.value for sample in metric_samples if QUANTITY_OF.get(sample.name) == KV_USE]
    return ServerTotals(
        pages=pages,
        output_tokens=_growth_of(points, OUTPUT),
        client_output_tokens=client_output_tokens,
        input_tokens=_growth_of(points, INPUT),
        cached_tokens=_growth_of(points, CACHED),
        requests_ok=_growth_of(points, DONE),
        running_max=_maximum_of(points, RUNNING),
        waiting_max=_maximum_of(points, WAITING),
        kv_use_max=max(kv_use, default=None),
        hit_share=_last_value_of(points, HITS),
        cached_share=_cached_share(points),
    )


def _cached_share(points_by_quantity: Mapping[str, Sequence[Point]]) -> float | None:
    """Return the fraction of prompt tokens that came from the prefix cache, or None.

    Servers report it in different ways. The first of these that they have is used: counters of
    cached and of all prompt tokens, counters of hits and of queries of the cache, or the hit rate
    that they compute themselves.
    """
    share_of_tokens = _fraction(
        _growth_of(points_by_quantity, CACHED), _growth_of(points_by_quantity, INPUT)
    )
    if share_of_tokens is not None:
        return share_of_tokens
    share_of_queries = _fraction(
        _growth_of(points_by_quantity, CACHE_HITS), _growth_of(points_by_quantity, CACHE_QUERIES)
    )
    if share_of_queries is not None:
        return share_of_queries
    return _last_value_of(points_by_quantity, HITS)


def summarize_reads(metric_samples: Iterable[MetricSample]) -> tuple[PageReading, ...]:
    """Return how often each page was read, and how many of these reads failed."""
    ups_by_page: dict[str, list[float]] = {}
    for sample in metric_samples:
        if sample.name == UP:
            ups_by_page.setdefault(sample.page, []).append(sample.value)
    return tuple(
        PageReading(url=page, reads=len(ups), failed=ups.count(0.0))
        for page, ups in ups_by_page.items()
    )


def _growth_of(points_by_quantity: Mapping[str, Sequence[Point]], quantity: str) -> int | None:
    """Return by how much a counter grew during a run, or None if no page has it."""
    points = points_by_quantity.get(quantity)
    return round(points[-1].value - points[0].value) if points else None


def _maximum_of(points_by_quantity: Mapping[str, Sequence[Point]], quantity: str) -> int | None:
    """Return the largest value of a quantity at any read, or None if no page has it."""
    points = points_by_quantity.get(quantity)
    return round(max(point.value for point in points)) if points else None


def _last_value_of(
    points_by_quantity: Mapping[str, Sequence[Point]], quantity: str
) -> float | None:
    """Return the value of a quantity at the last read, or None if no page has it."""
    points = points_by_quantity.get(quantity)
    return points[-1].value if points else None


def _fraction(count: int | None, total: int | None) -> float | None:
    """Return count / total, or None if one of them is not known or the total is 0."""
    return count / total if count is not None and total else None


def find_cache_dispute(
    totals: ServerTotals, requested_share: float | None, reported_share: float | None
) -> dict[str, Any] | None:
    """Compare the fraction of cached prompt tokens on the servers' pages with the expected one.

    The expected fraction is the one that the responses report. If they do not report it, it is the
    one for which the workload was designed.

    Args:
        totals: What the servers counted.
        requested_share: The fraction for which the workload was designed, or None if it has none.
        reported_share: The fraction that the responses report, or None if they do not.

    Returns:
        The values of a warning if the two differ by more than CACHED_SHARE: the fraction of the
        servers (`share`), the expected one (`beside`), and where it is from (`of`). Otherwise None.
    """
    if totals.cached_share is None or requested_share is None:
        return None
    if reported_share is None:
        expected_share = requested_share
        source = "cache_asked"
    else:
        expected_share = reported_share
        source = "cache_answers"
    if abs(totals.cached_share - expected_share) <= CACHED_SHARE:
        return None
    return {"share": totals.cached_share, "beside": expected_share, "of": source}


def find_token_dispute(totals: ServerTotals) -> dict[str, Any] | None:
    """Compare the output tokens that the servers counted with those that the client counted.

    Returns:
        The values of a warning if the two differ by more than MAX_DISAGREEMENT: both counts, the
        fraction by which the servers counted more, and the likely cause. If they counted more,
        other clients used them too ("others"). If they counted less, a server was restarted
        during the run ("restarted"). Otherwise None.
    """
    disagreement = _token_disagreement(totals)
    if disagreement is None or abs(disagreement) <= MAX_DISAGREEMENT:
        return None
    return {
        "server_tokens": totals.output_tokens,
        "client_tokens": totals.client_output_tokens,
        "share": disagreement,
        "cause": "others" if disagreement > 0 else "restarted",
    }


def _token_disagreement(totals: ServerTotals) -> float | None:
    """Return by which fraction the servers count more output tokens than the client, or None."""
    if totals.output_tokens is None or not totals.client_output_tokens:
        return None
    return totals.output_tokens / totals.client_output_tokens - 1


class _SeriesOfPage(NamedTuple):
    page: str
    name: str
    labels: str


class _SeriesValues:
    """The current value of each series with a known quantity, while samples are added in order.

    The value of a counter is its growth since the first read of its page.
    """

    def __init__(self) -> None:
        """Begin without samples."""
        self._values_by_quantity: dict[str, dict[_SeriesOfPage, float]] = {}
        self._last_counts: dict[_SeriesOfPage, float] = {}  # of counters, as on the page
        self._pages_read: set[str] = set()  # pages of which one read has succeeded

    def add(self, sample: MetricSample) -> None:
        """Add the next sample of a run.

        Each read of a page ends with a sample named `up`, whose value is 1 if it succeeded. After
        the first successful read of a page, a new counter on it is known to have started at 0.
        """
        if sample.name == UP and sample.value > 0:
            self._pages_read.add(sample.page)
        quantity = QUANTITY_OF.get(sample.name)
        if quantity is None:
            return
        key = _SeriesOfPage(sample.page, sample.name, sample.labels)
        values = self._values_by_quantity.setdefault(quantity, {})
        if quantity in _COUNTERS:
            values[key] = values.get(key, 0.0) + self._growth_since_last_sample(key, sample.value)
            self._last_counts[key] = sample.value
        else:
            values[key] = sample.value

    def _growth_since_last_sample(self, key: _SeriesOfPage, count: float) -> float:
        """Return by how much a counter has grown since its last sample.

        A counter without an earlier sample has not grown yet if it belongs to the first read of its
        page. If it appears later, it has grown from 0, because a server creates some counters when
        they count something for the first time. A lower count than before shows a restart, after
        which the counter has grown from 0 as well.
        """
        previous = self._last_counts.get(key)
        if previous is None:
            is_first_read = key.page not in self._pages_read
            return 0.0 if is_first_read else count
        has_restarted = count < previous
        return count if has_restarted else count - previous

    def by_quantity(self) -> dict[str, float]:
        """Return the value of each quantity over all series."""
        return {
            quantity: _combine_series(quantity, list(values.values()))
            for quantity, values in self._values_by_quantity.items()
        }


def _points_by_quantity(metric_samples: Sequence[MetricSample]) -> dict[str, list[Point]]:
    """Return the value of each known quantity over time.

    There is a point at each time at which a page was read successfully. Pages that were not read at
    this time count with the values of their last read.
    """
    current_values = _SeriesValues()
    points: dict[str, list[Point]] = {}
    # Pages that are read at the same time have samples with the same time.
    for t_s, samples_of_time in groupby(metric_samples, key=lambda sample: sample.t_s):
        samples = list(samples_of_time)
        for sample in samples:
            current_values.add(sample)
        if not any(_ends_successful_read(sample) for sample in samples):
            continue
        for quantity, value in current_values.by_quantity().items():
            points.setdefault(quantity, []).append(Point(t_s, value))
    return points


def _ends_successful_read(sample: MetricSample) -> bool:
    """Return True for the sample `up` with the value 1, with which each successful read ends."""
    return sample.name == UP and sample.value > 0
