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
_MAX_CACHED_SHARE_DIFFERENCE = CACHED_SHARE
"""Two fractions of cached prompt tokens that differ by more than this contradict each other."""
MAX_DISAGREEMENT = 0.02
"""Two counts of the same tokens that differ by more than this fraction disagree."""

(
    RUNNING,
    WAITING,
    KV_USE,
    CACHE_HIT_RATE,
    OUTPUT_TOKENS,
    INPUT_TOKENS,
    CACHED_TOKENS,
    CACHE_HITS,
    CACHE_QUERIES,
    FINISHED_REQUESTS,
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
_AVERAGED = (KV_USE, CACHE_HIT_RATE, ACCEPT_SHARE, ACCEPT_LENGTH)
"""Quantities of which several series are averaged instead of added."""
_COUNTERS = (
    OUTPUT_TOKENS,
    INPUT_TOKENS,
    CACHED_TOKENS,
    CACHE_HITS,
    CACHE_QUERIES,
    FINISHED_REQUESTS,
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

    A server reports its metrics on a page, under names of its own. loadgen knows the names that the
    supported servers use for a quantity such as "running" (the number of running requests), and
    stores these metrics as they are. A plug-in can add a server with other names. Its metrics are
    renamed after their quantity, for example `acme_running` to `loadgen:running`, so that results
    can be read without the plug-in. Quantities that loadgen does not use are left out.

    Args:
        metrics: For each quantity, the names that it has on the server's page.

    Returns:
        The stored name by the name on the page, for names that are changed.
    """
    stored_name_by_page_name = {}
    for quantity, page_names in metrics.items():
        if quantity not in SERVER_METRICS:
            continue
        for page_name in page_names:
            is_known_name = page_name in QUANTITY_OF
            if not is_known_name:
                stored_name_by_page_name[page_name] = PLUGIN_PREFIX + quantity

    return stored_name_by_page_name


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

        An iteration is one step of the server's batch. The server reports each one once, in a JSON
        list. The computed values are the mean duration of the iterations, how many were read since
        the start of the run (`read_total`), and how many were missed between two reads
        (`missed_total`). An empty list is valid: nothing has run since the last read.

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
            last_iteration = iterations[-1]
            values.update(_numeric_leaves(last_iteration))
            values.update(_share_of_used_blocks(values))
            values.update(_mean_latency(iterations))

        # The statistics have no labels.
        return {SeriesKey(ITERATION + name, labels=""): value for name, value in values.items()}

    def _count_iterations(self, iterations: Sequence[Mapping[str, object]]) -> None:
        """Count the iterations of a read, and those that are missing since the read before.

        The server numbers its iterations and returns each of them only once. If another client has
        read some, their numbers are missing here: between iteration 4 and iteration 7, two were
        missed.
        """
        self._read_count += len(iterations)
        numbers = sorted({int(number) for number in _numbers_in(iterations, "iter")})
        if not numbers:
            return

        numbers_before = [] if self._last_number is None else [self._last_number]
        for previous, number in pairwise([*numbers_before, *numbers]):
            missing_between = number - previous - 1
            self._missed_count += max(missing_between, 0)

        self._last_number = numbers[-1]


def _share_of_used_blocks(values: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of KV cache blocks in use, which the server does not compute itself."""
    used_blocks = values.get("kvCacheStats.usedNumBlocks")
    max_blocks = values.get("kvCacheStats.maxNumBlocks")
    if used_blocks is None or not max_blocks:
        return {}
    return {"kvCacheStats.usedShare": used_blocks / max_blocks}


def _mean_latency(iterations: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return the mean duration of the iterations, under the name of that of a single one."""
    latencies_ms = _numbers_in(iterations, "iterLatencyMS")
    if not latencies_ms:
        return {}
    return {"iterLatencyMS": sum(latencies_ms) / len(latencies_ms)}


def _numbers_in(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of a field in the rows that have a number there."""
    return [row[name] for row in rows if isinstance(row.get(name), int | float)]


def _numeric_leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
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


def collect_points(metric_samples: Sequence[MetricSample], quantity: str) -> list[Point]:
    """Return a quantity over time, a counter as its growth since the first read.

    The list is empty if no page has it.
    """
    return _points_by_quantity(metric_samples).get(quantity, [])


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

    Counters, such as the output tokens, are reported by their growth during the run. Gauges, such
    as the running requests, are reported by their largest value at any read.

    Args:
        metric_samples: The samples of all metrics pages of a run.
        client_output_tokens: The output tokens that the client counted, or None if it did not.
    """
    pages = summarize_reads(metric_samples)
    has_successful_read = any(page.failed < page.reads for page in pages)
    if not has_successful_read:
        return None

    points = _points_by_quantity(metric_samples)

    # `points` has the mean over all servers. A single full KV cache already slows requests down, so
    # the maximum over all servers is reported.
    kv_cache_uses = [
        sample.value for sample in metric_samples if QUANTITY_OF.get(sample.name) == KV_USE
    ]
    return ServerTotals(
        pages=pages,
        output_tokens=_growth_of(points, OUTPUT_TOKENS),
        client_output_tokens=client_output_tokens,
        input_tokens=_growth_of(points, INPUT_TOKENS),
        cached_tokens=_growth_of(points, CACHED_TOKENS),
        requests_ok=_growth_of(points, FINISHED_REQUESTS),
        running_max=_maximum_of(points, RUNNING),
        waiting_max=_maximum_of(points, WAITING),
        kv_use_max=max(kv_cache_uses, default=None),
        hit_share=_last_value_of(points, CACHE_HIT_RATE),
        cached_share=_cached_share(points),
    )


def _cached_share(points_by_quantity: Mapping[str, Sequence[Point]]) -> float | None:
    """Return the fraction of prompt tokens that came from the prefix cache, or None.

    Servers report it in different ways. The first of these that they have is used: counters of
    cached and of all prompt tokens, counters of hits and of queries of the cache, or the hit rate
    that they compute themselves. Return None if they have none of these.
    """
    share_of_tokens = _fraction(
        _growth_of(points_by_quantity, CACHED_TOKENS), _growth_of(points_by_quantity, INPUT_TOKENS)
    )
    if share_of_tokens is not None:
        return share_of_tokens

    share_of_queries = _fraction(
        _growth_of(points_by_quantity, CACHE_HITS), _growth_of(points_by_quantity, CACHE_QUERIES)
    )
    if share_of_queries is not None:
        return share_of_queries

    return _last_value_of(points_by_quantity, CACHE_HIT_RATE)


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


def find_cache_difference(
    totals: ServerTotals, requested_share: float | None, reported_share: float | None
) -> dict[str, Any] | None:
    """Compare the fraction of cached prompt tokens on the servers' pages with the expected one.

    The expected fraction is the one that the responses report. If they do not report it, it is the
    one for which the workload was designed. A workload without such a fraction is not compared.

    Args:
        totals: What the servers counted.
        requested_share: The fraction for which the workload was designed, or None if it has none.
        reported_share: The fraction that the responses report, or None if they do not.

    Returns:
        None if the fractions are close to each other. If they differ by more than
        _MAX_CACHED_SHARE_DIFFERENCE, the values of the warning "cache_disputed":
        `{"share": 0.2, "beside": 0.5, "of": "cache_asked"}` says that the servers cached 20 %
        instead of the expected 50 %, which are from the workload ("cache_asked") or from the
        responses ("cache_answers").
    """
    measured_share = totals.cached_share
    if measured_share is None or requested_share is None:
        return None

    if reported_share is None:
        expected_share = requested_share
        source_of_expected = "cache_asked"
    else:
        expected_share = reported_share
        source_of_expected = "cache_answers"

    difference = abs(measured_share - expected_share)
    if difference <= _MAX_CACHED_SHARE_DIFFERENCE:
        return None

    return {"share": measured_share, "beside": expected_share, "of": source_of_expected}


def find_token_difference(totals: ServerTotals) -> dict[str, Any] | None:
    """Compare the output tokens that the servers counted with those that the client counted.

    If the servers counted more, other clients have probably used them during the run (cause
    "others"). If they counted less, a server was probably restarted, which resets its counter
    (cause "restarted").

    Returns:
        The values of a warning if the two counts differ by more than MAX_DISAGREEMENT: both counts,
        the relative difference (`share`: 0.1 if the servers counted 10 % more), and the likely
        cause. Otherwise None, and also if one of the counts is not known.
    """
    relative_difference = _relative_token_difference(totals)
    if relative_difference is None or abs(relative_difference) <= MAX_DISAGREEMENT:
        return None

    return {
        "server_tokens": totals.output_tokens,
        "client_tokens": totals.client_output_tokens,
        "share": relative_difference,
        "cause": "others" if relative_difference > 0 else "restarted",
    }


def _relative_token_difference(totals: ServerTotals) -> float | None:
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
        self._pages_with_complete_read: set[str] = set()

    def add(self, sample: MetricSample) -> None:
        """Add the next sample of a run, which is the value of one series on one page.

        Series that loadgen does not use are skipped. A gauge, such as the number of running
        requests, has the value of its last sample. A counter, such as the number of output tokens,
        has the sum of its growth from sample to sample.
        """
        # The sample `up` at the end of a read is no series with a quantity, and is only noted.
        if _ends_successful_read(sample):
            self._pages_with_complete_read.add(sample.page)

        quantity = QUANTITY_OF.get(sample.name)
        if quantity is None:
            return

        key = _SeriesOfPage(sample.page, sample.name, sample.labels)
        values = self._values_by_quantity.setdefault(quantity, {})
        if quantity in _COUNTERS:
            growth = self._growth_since_last_sample(key, sample.value)
            values[key] = values.get(key, 0.0) + growth
            self._last_counts[key] = sample.value
        else:
            values[key] = sample.value

    def _growth_since_last_sample(self, key: _SeriesOfPage, count: float) -> float:
        """Return by how much a counter has grown since its last sample.

        There are two special cases:

        - The counter has no earlier sample. In the first read of a page, this is its value before
          the load, so it has not grown yet. In a later read, the server has just created it, as
          some servers do when they first count something, so it has grown from 0.
        - It is lower than before. Then the server was restarted, and it has grown from 0.
        """
        previous_count = self._last_counts.get(key)
        if previous_count is None:
            is_in_first_read = key.page not in self._pages_with_complete_read
            return 0.0 if is_in_first_read else count
        has_restarted = count < previous_count
        return count if has_restarted else count - previous_count

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
