"""Parse the servers' metrics pages into samples, and summarize the samples of a run.

Pure. `scraper.py` fetches the pages. Nothing here corrects what the client measured: the server's
counts are reported together with the client's, and a disagreement is reported as one.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from loadgen_sdk.wire_formats.server_profiles import SERVER_METRICS, SERVERS

from loadgen.core.limits import CACHED_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

FILE = "server.jsonl"
"""The file in the folder of a run."""
MOST_SERIES = 20_000
"""A page with more series is an error."""
UP = "up"
"""Whether a read succeeded, under the name that Prometheus uses. It ends each read."""
TOOK = "scrape_duration_seconds"
"""The duration of a read, under the name that Prometheus uses."""
ITERATION = "trtllm_iteration:"
"""The prefix for the names of TensorRT-LLM's JSON statistics."""
AGREE = 0.02
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
OURS = "loadgen:"
"""The prefix for the names under which the pages of plug-ins' servers are stored."""
KNOWN: dict[str, tuple[str, ...]] = {
    quantity: (
        *(name for row in SERVERS.builtin_rows for name in row.metrics.get(quantity, ())),
        OURS + quantity,
    )
    for quantity in SERVER_METRICS
}
"""The names that each quantity has on different servers."""
_SHARES = (KV_USE, HITS, ACCEPT_SHARE, ACCEPT_LENGTH)
"""Of these quantities, the mean over several pages is used instead of the sum."""
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
QUANTITY_OF = {name: quantity for quantity, names in KNOWN.items() for name in names}


def names_for(metrics: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the names under which the metrics of a server are stored that KNOWN does not have.

    `metrics` has the names of the server's metrics by quantity.
    """
    pairs = ((name, quantity) for quantity, names in metrics.items() for name in names)
    return {
        name: OURS + quantity
        for name, quantity in pairs
        if name not in QUANTITY_OF and quantity in SERVER_METRICS
    }


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


class Served(msgspec.Struct, frozen=True, kw_only=True):
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


class MetricCurve(msgspec.Struct, frozen=True):
    """A quantity over time: its values at the times of the reads."""

    t_s: tuple[float, ...]
    values: tuple[float, ...]


# -- a page ---------------------------------------------------------------------------------------


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the finite values on a page of Prometheus text, by name and labels.

    Raises ValueError if the text is no such page, or has no metrics or too many.
    """
    values: dict[tuple[str, str], float] = {}
    for name, label_text, value in _parse_page(text):
        if math.isfinite(value) and not name.endswith("_created"):
            values[name, label_text] = value
        if len(values) > MOST_SERIES:
            raise ValueError(f"more than {MOST_SERIES:,} series")
    if not values:
        raise ValueError("no metrics on it")
    return values


def _parse_page(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of each sample of a page. Raises ValueError for others."""
    # Imported here because a run that reads no page does not need the parser at its start.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            yield from (
                (sample.name, labels(sample.labels), float(sample.value))
                for sample in family.samples
            )
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        # The parser raises these on some malformed texts.
        raise ValueError(f"no page of metrics: {error!r}") from None


def labels(pairs: dict[str, str]) -> str:
    """Return labels as a Prometheus page writes them: pairs `name="value"` with commas between."""
    escaped = (
        (k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for k, v in pairs.items()
    )
    return ",".join(f'{name}="{value}"' for name, value in escaped)


class Iterations:
    """Parses TensorRT-LLM's JSON statistics, which every read empties.

    It counts the rows that were read and that are missing. If iteration numbers are missing,
    another client has read their rows.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._read = 0
        self._missed = 0

    def samples(self, data: bytes) -> dict[tuple[str, str], float]:
        """Return the values of the last row of a read, and the numbers of rows.

        An empty list is valid: nothing has run since the last read. Raises ValueError if the data
        is not a list of iterations.
        """
        try:
            rows = msgspec.json.decode(data, type=list[dict[str, Any]])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no list of iterations: {error}") from None
        numbers = sorted(
            {int(row["iter"]) for row in rows if isinstance(row.get("iter"), int | float)}
        )
        for previous, number in pairwise([*([] if self._last is None else [self._last]), *numbers]):
            self._missed += max(number - previous - 1, 0)
        self._last = numbers[-1] if numbers else self._last
        self._read += len(rows)
        values = {
            (ITERATION + "read_total", ""): float(self._read),
            (ITERATION + "missed_total", ""): self._missed,
        }
        if rows:
            values |= {(ITERATION + name, ""): value for name, value in _numeric_leaves(rows[-1])}
            cache = ITERATION + "kvCacheStats."
            used_blocks, max_blocks = (
                values.get((f"{cache}{key}NumBlocks", "")) for key in ("used", "max")
            )
            if used_blocks is not None and max_blocks:
                values[cache + "usedShare", ""] = used_blocks / max_blocks
            latencies_ms = [
                row["iterLatencyMS"]
                for row in rows
                if isinstance(row.get("iterLatencyMS"), int | float)
            ]
            if latencies_ms:
                values[ITERATION + "iterLatencyMS", ""] = sum(latencies_ms) / len(latencies_ms)
        return values


def _numeric_leaves(value: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _numeric_leaves(item, f"{prefix}{key}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield prefix + key, float(item)


def is_written_rarely(name: str) -> bool:
    """Return True if a series is written only at the first and the last read.

    These are the buckets of histograms, of which a page has hundreds.
    """
    return name.endswith("_bucket")


# -- a run ----------------------------------------------------------------------------------------


def curves(metric_samples: Sequence[MetricSample]) -> dict[str, MetricCurve]:
    """Return the known quantities over time, by name.

    Values are sums over pages and labels, and fractions are means. A counter becomes a rate per
    second between two reads, at the middle of the interval. A counter that never grows has no
    curve.
    """
    curve_of = {}
    for quantity, points in _quantities(metric_samples).items():
        shown = points
        if quantity in _COUNTERS:
            steps = [(t0, t1, v1 - v0) for (t0, v0), (t1, v1) in pairwise(points) if t1 > t0]
            shown = [((t0 + t1) / 2, growth / (t1 - t0)) for t0, t1, growth in steps]
        if quantity not in _COUNTERS or any(rate for _, rate in shown):
            curve_of[quantity] = MetricCurve(*zip(*shown, strict=True))
    return curve_of


def growth(metric_samples: Sequence[MetricSample], quantity: str) -> float | None:
    """Return the growth of a counter from the first to the last read, or None if no page has it."""
    points = _quantities(metric_samples).get(quantity)
    return points[-1][1] - points[0][1] if points else None


def replicas(metric_samples: Sequence[MetricSample]) -> list[tuple[float, float]]:
    """Return the number of replicas over time.

    It comes from the pages that count replicas, or else is the number of pages that respond, if
    there are several. The time before all of them responded is left out.
    """
    counted = _quantities(metric_samples).get(REPLICAS)
    if counted:
        return counted
    simulated = [
        (sample.t_s, sample.value) for sample in metric_samples if sample.page == SIMULATED
    ]
    if simulated:
        return simulated
    up: dict[str, float] = {}
    points: list[tuple[float, float]] = []
    for sample in sorted(metric_samples, key=lambda sample: sample.t_s):
        if sample.name == UP and sample.target is not None:
            up[sample.page] = sample.value
            points.append((sample.t_s, sum(up.values())))
    first = next((i for i, (_, value) in enumerate(points) if value == len(up)), len(points))
    return points[first:] if len(up) > 1 else []


def gauges(latest: Iterable[MetricSample]) -> dict[str, float]:
    """Return the known gauges by quantity, from the last sample of each series.

    They are sums over the series, and means for fractions.
    """
    values: dict[str, list[float]] = {}
    for sample in latest:
        quantity = QUANTITY_OF.get(sample.name)
        if quantity is not None and quantity not in _COUNTERS:
            values.setdefault(quantity, []).append(sample.value)
    return {
        name: sum(all_of) / (len(all_of) if name in _SHARES else 1)
        for name, all_of in values.items()
    }


def summarize(
    metric_samples: Sequence[MetricSample], client_output_tokens: int | None
) -> Served | None:
    """Return the block `server` of a summary, or None if no page was read."""
    ups_of_page: dict[str, list[float]] = {}
    for sample in metric_samples:
        if sample.name == UP:
            ups_of_page.setdefault(sample.page, []).append(sample.value)
    if not any(any(values) for values in ups_of_page.values()):
        return None
    points_of = _quantities(metric_samples)

    def increase(quantity: str) -> int | None:
        points = points_of.get(quantity)
        return round(points[-1][1] - points[0][1]) if points else None

    def maximum(quantity: str) -> int | None:
        points = points_of.get(quantity)
        return round(max(value for _, value in points)) if points else None

    hit_share = points_of[HITS][-1][1] if points_of.get(HITS) else None
    shares = (
        _fraction(increase(CACHED), increase(INPUT)),
        _fraction(increase(CACHE_HITS), increase(CACHE_QUERIES)),
    )
    fullest = [sample.value for sample in metric_samples if QUANTITY_OF.get(sample.name) == KV_USE]

    return Served(
        pages=tuple(
            PageReading(url=url, reads=len(ups), failed=ups.count(0.0))
            for url, ups in ups_of_page.items()
        ),
        output_tokens=increase(OUTPUT),
        client_output_tokens=client_output_tokens,
        input_tokens=increase(INPUT),
        cached_tokens=increase(CACHED),
        requests_ok=increase(DONE),
        running_max=maximum(RUNNING),
        waiting_max=maximum(WAITING),
        kv_use_max=max(fullest, default=None),
        hit_share=hit_share,
        cached_share=next((share for share in shares if share is not None), hit_share),
    )


def _fraction(count: int | None, total: int | None) -> float | None:
    return count / total if count is not None and total else None


def cache_disputed(
    served: Served, requested: float | None, reported: float | None
) -> dict[str, Any] | None:
    """Return the values of the code "cache_disputed", or None if there is no dispute.

    The servers' counters are compared with the cached fraction that the responses report, or else
    with the requested one.
    """
    if served.cached_share is None or requested is None:
        return None
    expected = requested if reported is None else reported
    if abs(served.cached_share - expected) <= CACHED_SHARE:
        return None
    return {
        "share": served.cached_share,
        "beside": expected,
        "of": "cache_asked" if reported is None else "cache_answers",
    }


def disputed(served: Served) -> dict[str, Any] | None:
    """Return the values of the code "server_counts", or None if both counts agree."""
    share = disagreement(served)
    if share is None or abs(share) <= AGREE:
        return None
    return {
        "server_tokens": served.output_tokens,
        "client_tokens": served.client_output_tokens,
        "share": share,
        "cause": "others" if share > 0 else "restarted",
    }


def disagreement(served: Served) -> float | None:
    """Return by which fraction the server counts more output tokens than the client, or None."""
    if served.output_tokens is None or not served.client_output_tokens:
        return None
    return served.output_tokens / served.client_output_tokens - 1


def _quantities(metric_samples: Sequence[MetricSample]) -> dict[str, list[tuple[float, float]]]:
    """Return the time and value of each known quantity at each read of any page.

    A counter starts at 0 with its first value. A counter whose value falls has been restarted.
    """
    current: dict[str, dict[tuple[str, str, str], float]] = {}
    last_value: dict[tuple[str, str, str], float] = {}
    pages_read: set[str] = set()  # pages whose first read is over
    points: dict[str, list[tuple[float, float]]] = {}
    page_answered = False
    for i, sample in enumerate(metric_samples):
        key = (sample.page, sample.name, sample.labels)
        quantity = QUANTITY_OF.get(sample.name)
        if quantity in _COUNTERS:
            # A series that appears after the page's first read started at 0.
            previous = last_value.get(key, 0.0 if sample.page in pages_read else sample.value)
            increase = sample.value - previous if sample.value >= previous else sample.value
            increases = current.setdefault(quantity, {})
            increases[key] = increases.get(key, 0.0) + increase
            last_value[key] = sample.value
        elif quantity is not None:
            current.setdefault(quantity, {})[key] = sample.value
        if sample.name == UP:  # the last line of each read
            if sample.value:
                pages_read.add(sample.page)
                page_answered = True
            if page_answered and (
                i + 1 == len(metric_samples) or metric_samples[i + 1].t_s != sample.t_s
            ):
                page_answered = False
                for name, values in current.items():
                    total = sum(values.values())
                    value = total / len(values) if name in _SHARES else total
                    points.setdefault(name, []).append((sample.t_s, value))
    return points
