"""What a server says of itself while it is loaded: its metrics page as samples, and what samples of a run add up to.

Pure: text in, figures out; `scrape.py` asks for the pages. Nothing here corrects what the client has measured: the two
counts stand beside each other, and where they disagree that is said.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FILE = "server.jsonl"  # in the folder of a run
MOST_SERIES = 20_000  # of one page
UP, TOOK = "up", "scrape_duration_seconds"  # as Prometheus itself calls them
ITERATION = "trtllm_iteration:"  # before the names of TensorRT-LLM's JSON statistics
AGREE = 0.02  # counts of the same tokens that differ by more are said to disagree

AUTO = {
    "trtllm": ("/prometheus/metrics",),  # never /metrics, which is JSON there and emptied by each read
    "vllm": ("/metrics",),
    "sglang": ("/metrics",),
    "llamacpp": ("/metrics",),
    "dynamo": ("/metrics",),
    "generic": ("/prometheus/metrics", "/metrics"),
}
"""Where servers of a make have their page, below the prefix of the server itself; the first that answers is read."""

RUNNING, WAITING, KV_USE, HITS = "running", "waiting", "kv_use", "hit_share"
OUTPUT, INPUT, CACHED, DONE = "output_tokens", "input_tokens", "cached_tokens", "requests_ok"
KNOWN: dict[str, tuple[str, ...]] = {
    RUNNING: (
        "trtllm_num_requests_running",
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
        "dynamo_frontend_inflight_requests",
        f"{ITERATION}numActiveRequests",
    ),
    WAITING: (
        "trtllm_num_requests_waiting",
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "llamacpp:requests_deferred",
        "dynamo_frontend_queued_requests",
        f"{ITERATION}numQueuedRequests",
    ),
    KV_USE: (
        "trtllm_kv_cache_utilization",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
        f"{ITERATION}kvCacheStats.usedShare",
    ),
    HITS: ("trtllm_kv_cache_hit_rate", "sglang:cache_hit_rate", f"{ITERATION}kvCacheStats.cacheHitRate"),
    OUTPUT: (
        "trtllm_generation_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
        "dynamo_frontend_output_tokens_total",
    ),
    INPUT: (
        "trtllm_prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
        "llamacpp:prompt_tokens_total",
        "dynamo_frontend_input_sequence_tokens_sum",
    ),
    CACHED: (
        "trtllm_prompt_cached_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "sglang:cached_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
        "dynamo_frontend_cached_tokens_sum",
    ),
    DONE: ("trtllm_request_success_total", "vllm:request_success_total"),
}
"""What the makes call the same thing. Shares are from 0 to 1; the last four only grow."""
_SHARES, _COUNTERS = (KV_USE, HITS), (OUTPUT, INPUT, CACHED, DONE)
_MEANING = {name: what for what, names in KNOWN.items() for name in names}


class MetricSample(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `server.jsonl`: a series took this value. A value holds until the next line of its series."""

    t_s: float  # from the start of the run; below 0: read before the load began
    target: int | None  # index in the header's targets; null: a page of none of them
    page: str  # its URL, without secrets
    name: str
    labels: str  # as between the braces of the page
    value: float


class PageReading(msgspec.Struct, frozen=True, kw_only=True):
    """One page, and how its reading went."""

    url: str
    reads: int
    failed: int


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers counted between the first read, before the load, and the last, after it. Sums over all pages;
    null where a page does not say."""

    pages: tuple[PageReading, ...]
    output_tokens: int | None = None
    client_output_tokens: int | None = None  # by the client, of ok requests, warm-up included
    input_tokens: int | None = None
    cached_tokens: int | None = None
    requests_ok: int | None = None
    running_max: int | None = None  # of a read
    waiting_max: int | None = None
    kv_use_max: float | None = None  # share, of the fullest page
    hit_share: float | None = None  # as the server last said


class MetricCurve(NamedTuple):
    """A quantity along the run, at the instants of its reads."""

    t_s: tuple[float, ...]
    values: tuple[float, ...]


# -- a page --------------------------------------------------------------------------------------------------------


def samples(text: str) -> dict[tuple[str, str], float]:
    """A page of Prometheus text as (name, labels) -> value; values that are no numbers are left out.

    Raises ValueError for what is not such a page or has too many series.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if math.isfinite(one.value) and not one.name.endswith("_created"):
                found[one.name, labels(one.labels)] = float(one.value)
        if len(found) > MOST_SERIES:
            raise ValueError(f"more than {MOST_SERIES:,} series")
    if not found:
        raise ValueError("no metrics on it")
    return found


def labels(pairs: dict[str, str]) -> str:
    """Labels as a page writes them between braces."""
    escaped = ((k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for k, v in pairs.items())
    return ",".join(f'{name}="{value}"' for name, value in escaped)


class Iterations:
    """TensorRT-LLM's JSON statistics, which every read empties: each read's last row, and how many rows it brought.

    A gap in the numbers of the iterations is what another reader took.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._read = self._missed = 0

    def samples(self, data: bytes) -> dict[tuple[str, str], float]:
        """Raises ValueError for what is no list of iterations. An empty list is one: nothing has run since."""
        try:
            rows = msgspec.json.decode(data, type=list[dict[str, Any]])
        except msgspec.DecodeError as error:
            raise ValueError(f"no list of iterations: {error}") from None
        numbers = sorted({int(row["iter"]) for row in rows if isinstance(row.get("iter"), int | float)})
        for before, after in pairwise([*([] if self._last is None else [self._last]), *numbers]):
            self._missed += max(after - before - 1, 0)
        self._last = numbers[-1] if numbers else self._last
        self._read += len(rows)
        found = {(ITERATION + "read_total", ""): float(self._read), (ITERATION + "missed_total", ""): self._missed}
        if rows:
            found |= {(ITERATION + name, ""): value for name, value in _leaves(rows[-1])}
            used, most = (found.get((f"{ITERATION}kvCacheStats.{key}NumBlocks", "")) for key in ("used", "max"))
            if used is not None and most:
                found[ITERATION + "kvCacheStats.usedShare", ""] = used / most
            took = [row["iterLatencyMS"] for row in rows if isinstance(row.get("iterLatencyMS"), int | float)]
            if took:
                found[ITERATION + "iterLatencyMS", ""] = sum(took) / len(took)
        return found


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for key, inside in value.items():
        if isinstance(inside, dict):
            yield from _leaves(inside, f"{prefix}{key}.")
        elif isinstance(inside, int | float) and not isinstance(inside, bool):
            yield prefix + key, float(inside)


def passing(name: str) -> bool:
    """Whether a series is written at the first read and the last alone: buckets, of which a page has hundreds."""
    return name.endswith("_bucket")


# -- a run ---------------------------------------------------------------------------------------------------------


def curves(found: Sequence[MetricSample]) -> dict[str, MetricCurve]:
    """What is known by name along the run: counts are sums over pages and labels, shares means; counters are per
    second between two reads, at the middle."""
    made = {}
    for what, points in _quantities(found).items():
        if what in _COUNTERS:
            rates = [((a[0] + b[0]) / 2, (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairwise(points) if b[0] > a[0]]
            if any(rate for _, rate in rates):
                made[what] = MetricCurve(*zip(*rates, strict=True))
        else:
            made[what] = MetricCurve(*zip(*points, strict=True))
    return made


def summarize(found: Sequence[MetricSample], client_output_tokens: int | None) -> Served | None:
    """The block `server` of a summary; None when no page was read."""
    reads: dict[str, list[float]] = {}
    for one in found:
        if one.name == UP:
            reads.setdefault(one.page, []).append(one.value)
    if not any(any(values) for values in reads.values()):
        return None
    every = _quantities(found)
    grown = {what: _whole(points[-1][1] - points[0][1]) for what, points in every.items() if what in _COUNTERS}

    def most(what: str) -> float | None:
        return max((value for _, value in every.get(what, ())), default=None)

    return Served(
        pages=tuple(PageReading(url=url, reads=len(all_), failed=all_.count(0.0)) for url, all_ in reads.items()),
        output_tokens=grown.get(OUTPUT),
        client_output_tokens=client_output_tokens,
        input_tokens=grown.get(INPUT),
        cached_tokens=grown.get(CACHED),
        requests_ok=grown.get(DONE),
        running_max=_whole(most(RUNNING)),
        waiting_max=_whole(most(WAITING)),
        kv_use_max=max((one.value for one in found if _MEANING.get(one.name) == KV_USE), default=None),
        hit_share=every[HITS][-1][1] if every.get(HITS) else None,
    )


def warning(served: Served) -> str:
    """What to know where the two counts do not agree, else empty."""
    share = disagreement(served)
    if share is None or abs(share) <= AGREE:
        return ""
    why = "others use it, or it counts answers that failed" if share > 0 else "it was started anew, or counts late"
    told = f"{served.output_tokens:,} output tokens, the client {served.client_output_tokens:,} ({share * 100:+.1f} %)"
    return f"the server's metrics page counts {told}: {why}"


def disagreement(served: Served) -> float | None:
    """By how much the server's count of output tokens is above the client's, as a share; None where one is unknown."""
    theirs, ours = served.output_tokens, served.client_output_tokens
    return theirs / ours - 1 if theirs is not None and ours else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _quantities(found: Sequence[MetricSample]) -> dict[str, list[tuple[float, float]]]:
    """(t, value) at each read of any page. A counter counts from its first value on; one that falls has begun anew."""
    state: dict[str, dict[tuple[str, str, str], float]] = {}
    last: dict[tuple[str, str, str], float] = {}
    begun: set[str] = set()  # pages whose first read is over
    points: dict[str, list[tuple[float, float]]] = {}
    answered = False
    for i, one in enumerate(found):
        key = (one.page, one.name, one.labels)
        what = _MEANING.get(one.name)
        if what in _COUNTERS:
            before = last.get(key, 0.0 if one.page in begun else one.value)  # a label seen late began at nothing
            new = one.value - before if one.value >= before else one.value
            held = state.setdefault(what, {})
            held[key] = held.get(key, 0.0) + new
            last[key] = one.value
        elif what is not None:
            state.setdefault(what, {})[key] = one.value
        if one.name == UP:  # the last line of each read
            if one.value:
                begun.add(one.page)
                answered = True
            if answered and (i + 1 == len(found) or found[i + 1].t_s != one.t_s):
                answered = False
                for quantity, values in state.items():
                    total = sum(values.values())
                    value = total / len(values) if quantity in _SHARES else total
                    points.setdefault(quantity, []).append((one.t_s, value))
    return points
