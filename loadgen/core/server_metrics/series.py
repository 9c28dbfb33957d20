"""Parse the servers' metrics pages into samples, and summarize the samples of a run.

Pure. `scraper.py` fetches the pages. Nothing here corrects what the client measured: the server's
counts are reported together with the client's, and a disagreement is reported as one.
"""

from __future__ import annotations

import math
from itertools import pairwise
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
    """Return the names under which the metrics of a server of a plug-in are stored.

    The names of the built-in servers are stored as they are, since NAMES_BY_QUANTITY has them. The
    metrics of other servers are stored under a name of loadgen, so that results can be read without
    the plug-in.

    Args:
        metrics: The names of the server's metrics, by quantity.
    """
    names = {}
    for quantity, server_names in metrics.items():
        if quantity not in SERVER_METRICS:
            continue
        for server_name in server_names:
            if server_name not in QUANTITY_OF:
                names[server_name] = PLUGIN_PREFIX + quantity
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
        """Return the values of the last row, the mean latency, and how many rows were read so far.

        An empty list is valid: nothing has run since the last read. Raises ValueError if the data
        are not a list of iterations.
        """
        try:
            rows = msgspec.json.decode(data, type=list[dict[str, Any]])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a list of iterations: {error}") from None
        self._count_rows(rows)
        values = {
            _iteration_key("read_total"): float(self._read_count),
            _iteration_key("missed_total"): self._missed_count,
        }
        if not rows:
            return values
        for name, value in _numeric_leaves(rows[-1]):
            values[_iteration_key(name)] = value
        used_blocks = values.get(_iteration_key("kvCacheStats.usedNumBlocks"))
        max_blocks = values.get(_iteration_key("kvCacheStats.maxNumBlocks"))
        if used_blocks is not None and max_blocks:
            values[_iteration_key("kvCacheStats.usedShare")] = used_blocks / max_blocks
        latencies_ms = _numbers_in(rows, "iterLatencyMS")
        if latencies_ms:
            values[_iteration_key("iterLatencyMS")] = sum(latencies_ms) / len(latencies_ms)
        return values

    def _count_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count the rows of a read, and those that are missing since the read before."""
        self._read_count += len(rows)
        numbers = sorted({int(number) for number in _numbers_in(rows, "iter")})
        if not numbers:
            return
        if self._last_number is not None:
            numbers.insert(0, self._last_number)
        for previous, number in pairwise(numbers):
            self._missed_count += max(number - previous - 1, 0)
        self._last_number = numbers[-1]


def _iteration_key(name: str) -> SeriesKey:
    """Return the key of a value in TensorRT-LLM's JSON statistics, which have no labels."""
    return SeriesKey(ITERATION + name, "")


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
    """Return the known quantities over time, by name, for charts and for the search for causes.

    Series of several pages and labels are added, and those of fractions averaged. A counter becomes
    a rate per second between two reads, at the middle of the interval. A counter that never grows
    has no curve.
    """
    curve_by_quantity = {}
    for quantity, points in _points_by_quantity(metric_samples).items():
        if quantity in _COUNTERS:
            points = _rates_of_counter(points)
            if not any(point.value for point in points):
                continue
        times_s = tuple(point.t_s for point in points)
        values = tuple(point.value for point in points)
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
    """Return the block `server` of a summary, or None if no page was ever read.

    Args:
        metric_samples: The samples of all metrics pages of a run.
        client_output_tokens: The output tokens that the client counted, or None if it did not.
    """
    pages = summarize_reads(metric_samples)
    if all(page.failed == page.reads for page in pages):
        return None
    points = _points_by_quantity(metric_samples)
    output_tokens = _growth_of(points, OUTPUT)
    input_tokens = _growth_of(points, INPUT)
    cached_tokens = _growth_of(points, CACHED)
    hit_share = points[HITS][-1].value if HITS in points else None

    # Servers count either cached tokens or hits of cache queries, or report only their own rate.
    cached_share = _fraction(cached_tokens, input_tokens)
    if cached_share is None:
        cached_share = _fraction(_growth_of(points, CACHE_HITS), _growth_of(points, CACHE_QUERIES))
    if cached_share is None:
        cached_share = hit_share

    # The fullest cache matters, not the mean over pages.
    kv_use = [sample.value for sample in metric_samples if QUANTITY_OF.get(sample.name) == KV_USE]
    return ServerTotals(
        pages=pages,
        output_tokens=output_tokens,
        client_output_tokens=client_output_tokens,
        input_tokens=input_tokens,
        cached_tokens=cached_tokens,
        requests_ok=_growth_of(points, DONE),
        running_max=_maximum_of(points, RUNNING),
        waiting_max=_maximum_of(points, WAITING),
        kv_use_max=max(kv_use, default=None),
        hit_share=hit_share,
        cached_share=cached_share,
    )


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


def _fraction(count: int | None, total: int | None) -> float | None:
    return count / total if count is not None and total else None


def find_cache_dispute(
    totals: ServerTotals, requested: float | None, reported: float | None
) -> dict[str, Any] | None:
    """Return the values of the warning "cache_disputed", or None if there is no reason for it.

    The warning says that the servers' counters show another cached fraction of prompt tokens than
    the responses, or than the workload if the responses do not report it. Up to CACHED_SHARE is no
    difference.

    Args:
        totals: What the servers counted.
        requested: The fraction that the workload requests, or None if it requests none.
        reported: The fraction that the responses report, or None if they do not.
    """
    if totals.cached_share is None or requested is None:
        return None
    expected = requested if reported is None else reported
    if abs(totals.cached_share - expected) <= CACHED_SHARE:
        return None
    return {
        "share": totals.cached_share,
        "beside": expected,
        "of": "cache_asked" if reported is None else "cache_answers",
    }


def find_token_dispute(totals: ServerTotals) -> dict[str, Any] | None:
    """Return the values of the warning "server_counts", or None if there is no reason for it.

    The warning says that servers and client count different numbers of output tokens. If the
    servers count more, other clients used them too. If they count fewer, a server was restarted.
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
        self._values: dict[str, dict[_SeriesOfPage, float]] = {}
        """By quantity and series."""
        self._last_counts: dict[_SeriesOfPage, float] = {}
        """The last reading of each counter, as on the page."""
        self._pages_read: set[str] = set()
        """The pages of which one read was successful and has ended."""

    def add(self, sample: MetricSample) -> None:
        """Add a sample of a series, or the sample `up`, which ends a read."""
        if sample.name == UP and sample.value:
            self._pages_read.add(sample.page)
        quantity = QUANTITY_OF.get(sample.name)
        if quantity is None:
            return
        key = _SeriesOfPage(sample.page, sample.name, sample.labels)
        values = self._values.setdefault(quantity, {})
        if quantity in _COUNTERS:
            values[key] = values.get(key, 0.0) + self._growth(key, sample.value)
            self._last_counts[key] = sample.value
        else:
            values[key] = sample.value

    def _growth(self, key: _SeriesOfPage, count: float) -> float:
        """Return by how much a counter has grown since its last reading."""
        previous = self._last_counts.get(key)
        if previous is None:
            # A server creates some series when they count something for the first time. One that
            # appears after the first read therefore started at 0 meanwhile.
            previous = 0.0 if key.page in self._pages_read else count
        has_restarted = count < previous
        return count if has_restarted else count - previous

    def by_quantity(self) -> dict[str, float]:
        """Return the value of each quantity over all series."""
        return {
            quantity: _combine_series(quantity, list(values.values()))
            for quantity, values in self._values.items()
        }


def _points_by_quantity(metric_samples: Sequence[MetricSample]) -> dict[str, list[Point]]:
    """Return the value of each known quantity over time.

    There is a point at each time at which a page was read successfully. The values of other pages
    are then those of their last read.
    """
    series_values = _SeriesValues()
    points: dict[str, list[Point]] = {}
    has_new_values = False
    for sample, next_sample in pairwise([*metric_samples, None]):
        assert sample is not None
        series_values.add(sample)
        if sample.name != UP:
            continue
        has_new_values = has_new_values or bool(sample.value)
        # Pages that are read at the same time have samples with the same time.
        is_last_page = next_sample is None or next_sample.t_s != sample.t_s
        if has_new_values and is_last_page:
            has_new_values = False
            for quantity, value in series_values.by_quantity().items():
                points.setdefault(quantity, []).append(Point(sample.t_s, value))
    return points
