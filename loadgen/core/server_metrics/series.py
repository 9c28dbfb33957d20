"""Server metrics of a run: parses metrics pages into samples, and summarizes the samples of a run. Pure.

`scraper.py` fetches the pages. Nothing here corrects what the client measured. The server's counts are reported beside
the client's, and a disagreement is reported as one.
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

FILE = "server.jsonl"  # in the run folder
MOST_SERIES = 20_000  # of one page; a longer page is an error
UP, TOOK = "up", "scrape_duration_seconds"  # the names that Prometheus uses
ITERATION = "trtllm_iteration:"  # prefix for the names of TensorRT-LLM's JSON statistics
AGREE = 0.02  # two counts of the same tokens that differ by more than this share disagree

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
"""PAUSED: now without room in the KV cache; PREEMPTED: so far taken out of the batch for it; REPLICAS: ready now. Of
speculation so far: drafts, their tokens, those accepted, and those by `position`; else a share or a length of late."""

SIMULATED = "simulated"  # in the place of a page: how many replicas a run in virtual time has, where that changes
OURS = "loadgen:"  # prefix for the names of a server that a plug-in knows: its page is stored under them
KNOWN: dict[str, tuple[str, ...]] = {
    quantity: (
        *(name for row in SERVERS.builtin_rows for name in row.metrics.get(quantity, ())),
        OURS + quantity,
    )
    for quantity in SERVER_METRICS
}
"""Quantity -> the names it has on different servers."""
_SHARES = (KV_USE, HITS, ACCEPT_SHARE, ACCEPT_LENGTH)  # of several pages the mean, not the sum
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
    """Of a server's metrics by quantity: under which name each is stored that KNOWN has not."""
    pairs = ((name, quantity) for quantity, names in metrics.items() for name in names)
    return {
        name: OURS + quantity
        for name, quantity in pairs
        if name not in QUANTITY_OF and quantity in SERVER_METRICS
    }


class MetricSample(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `server.jsonl`: a series took this value. It holds until the next line of the same series."""

    t_s: float  # from the start of the run; negative: read before the load began
    target: int | None  # index in the manifest's targets; null: the page belongs to none of them
    page: str  # its URL, without secrets
    name: str
    labels: str  # as the page writes them between braces
    value: float


class PageReading(msgspec.Struct, frozen=True, kw_only=True):
    """One metrics page, how often it was read, and how many reads failed."""

    url: str
    reads: int
    failed: int


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers counted from the first read, before the load, to the last read, after it.

    Sums over all pages; null if no page has the metric.
    """

    pages: tuple[PageReading, ...]
    output_tokens: int | None = None
    client_output_tokens: int | None = None  # counted by the client: ok requests, warm-up included
    input_tokens: int | None = None
    cached_tokens: int | None = None
    requests_ok: int | None = None
    running_max: int | None = None  # largest value at any read
    waiting_max: int | None = None
    kv_use_max: float | None = None  # share from 0 to 1, on the fullest page
    hit_share: float | None = None  # share from 0 to 1, at the last read
    cached_share: float | None = (
        None  # of the prompt tokens since the first read; else `hit_share`; null: not said
    )


class MetricCurve(msgspec.Struct, frozen=True):
    """A quantity over time: its values at the times of the reads."""

    t_s: tuple[float, ...]
    values: tuple[float, ...]


# -- a page --------------------------------------------------------------------------------------------------------


def samples(text: str) -> dict[tuple[str, str], float]:
    """Parse a page of Prometheus text into (name, labels) -> value. Values that are not finite are left out.

    Raises ValueError if the text is not such a page, has no metrics or has more than MOST_SERIES series.
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
    """Yield name, labels and value of each sample of a page. Raises ValueError if it is malformed."""
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
    """Labels as a Prometheus page writes them between braces: `name="value"` pairs with commas between."""
    escaped = (
        (k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for k, v in pairs.items()
    )
    return ",".join(f'{name}="{value}"' for name, value in escaped)


class Iterations:
    """TensorRT-LLM's JSON statistics, which every read empties.

    `samples` returns the last row of a read, and how many rows have been read and missed in total. A gap in the
    iteration numbers means that another client read those rows.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._read = self._missed = 0

    def samples(self, data: bytes) -> dict[tuple[str, str], float]:
        """Parse one read into (name, labels) -> value. An empty list is valid: nothing has run since the last read.

        Raises ValueError if the data is not a list of iterations.
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


# -- a run ---------------------------------------------------------------------------------------------------------


def curves(metric_samples: Sequence[MetricSample]) -> dict[str, MetricCurve]:
    """The known quantities over time, by name.

    Values are sums over pages and labels; shares are means. A counter becomes a rate per second between two reads,
    placed at the middle of the interval. A counter that never grows has no curve.
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
    """By how much a counter grew from the first read to the last one; None where no page has it."""
    points = _quantities(metric_samples).get(quantity)
    return points[-1][1] - points[0][1] if points else None


def replicas(metric_samples: Sequence[MetricSample]) -> list[tuple[float, float]]:
    """How many replicas there were over time, by the pages that count them; else how many of several pages answered."""
    if counted := _quantities(metric_samples).get(REPLICAS):
        return counted
    if told := [(one.t_s, one.value) for one in metric_samples if one.page == SIMULATED]:
        return told
    up: dict[str, float] = {}
    points: list[tuple[float, float]] = []
    for sample in sorted(metric_samples, key=lambda one: one.t_s):
        if sample.name == UP and sample.target is not None:
            up[sample.page] = sample.value
            points.append((sample.t_s, sum(up.values())))
    begun = next((i for i, (_, value) in enumerate(points) if value == len(up)), len(points))
    return points[begun:] if len(up) > 1 else []


def gauges(latest: Iterable[MetricSample]) -> dict[str, float]:
    """The known quantities that are no counters, from the last sample of each series: sums, of shares the mean."""
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
    """The block `server` of a summary; None if no page was read."""
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
        _part(increase(CACHED), increase(INPUT)),
        _part(increase(CACHE_HITS), increase(CACHE_QUERIES)),
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


def _part(some: int | None, of: int | None) -> float | None:
    return some / of if some is not None and of else None


def cache_disputed(
    served: Served, asked: float | None, answers: float | None
) -> dict[str, Any] | None:
    """The values of the code "cache_disputed": what the servers' counters say of a cache is not what was asked for,
    or, where the answers say it too, not what they say. None: it agrees, or nothing was asked for.
    """
    if served.cached_share is None or asked is None:
        return None
    beside = asked if answers is None else answers
    if abs(served.cached_share - beside) <= CACHED_SHARE:
        return None
    return {
        "share": served.cached_share,
        "beside": beside,
        "of": "cache_asked" if answers is None else "cache_answers",
    }


def disputed(served: Served) -> dict[str, Any] | None:
    """The values of the code "server_counts" if the server's and the client's counts disagree, else None."""
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
    """(server's output tokens / client's output tokens) - 1; None if either is unknown or the client has none."""
    by_server, by_client = served.output_tokens, served.client_output_tokens
    return by_server / by_client - 1 if by_server is not None and by_client else None


def _quantities(metric_samples: Sequence[MetricSample]) -> dict[str, list[tuple[float, float]]]:
    """(time, value) of each known quantity at each read of any page.

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
