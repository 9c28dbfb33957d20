"""Detect the causes of slow requests, each by the trace that it leaves in the records.

Pure. A detector takes a `Case` and returns a `Cause` with its evidence, or None. Thresholds were
chosen with `benchmarks/causes.py`, which injects each cause into a simulated server and counts how
often it is named, and how often one is named in runs without a cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import UNDEFINED, JoinedColumns
from loadgen.core.metrics.replica_keys import replica_name
from loadgen.core.metrics.sections import Cause
from loadgen.core.server_metrics import energy, series

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.server_metrics.series import MetricSample

Ints: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

MIN_REQUESTS = 200
"""Fewer ok requests are too few to compare slow ones with fast ones."""
MIN_SLOW_REQUESTS = 10
MOST_OF_EXCESS = 0.5
"""The share of the excess latency that a part of TTFT has to explain."""
CLEAR_SHARE = 0.7
"""The share of the slow requests that have to show a trace."""
STARTUP_SHARE = 0.15
"""The first part of the load, in which a server may still be starting up."""
SIGNIFICANT_CHANGE = 1.2
"""The factor by which TPOT has to change."""
STEADY_FACTOR = 1.1
"""TPOT and load count as constant if they change by less than this factor."""
GROWTH_FACTOR = 1.5
"""The factor by which the median TTFT grows from the first third of the load to the last."""
MIN_READS = 3
"""How many reads of a metrics page have to show a trace."""

_BURST_PAUSE_S = 3.0
"""The time without a slow request that separates two bursts of them."""
_MIN_BURSTS = 3
_MAX_INTERVAL_CV = 0.2
"""The largest coefficient of variation of the intervals between bursts that are periodic."""
_MAX_BURST_SHARE = 0.4
"""The largest share of the time that bursts may take."""
_MIN_SEPARATION = 0.9
"""The share of requests on either side of a TPOT step that must be on their side of its middle."""
_STEP_MARGIN = 0.03
"""Requests this close to a step, as a share of the time, ran partly before and partly after it."""
_FULL_CACHE = 0.9
_LONG_PROMPT = 4.0
"""A prompt is long from this multiple of the median on."""
_MIN_LONG_SHARE = 0.005
_MAX_LONG_SHARE = 0.3
_SAMPLED_NEIGHBOURS = 300
"""The number of slow requests, and of fast ones, whose neighbours are examined."""
_MIN_CAP_INCREASE = 0.5
"""The increase of the share of readings in which the hardware reports lower clocks."""
_SIMILAR_LENGTH = 1.1
"""Prompts are no longer than others if their mean length is within this factor."""


class Case(msgspec.Struct, frozen=True):
    """The ok requests of a run, ordered by scheduled time, with what detectors need.

    Attributes:
        requests: The requests. Of a long run only every `stride`-th request is included.
        ttft_ns: The TTFT without the client's send delay.
        is_slow: Which requests are slow. A request that was sent late is not.
        is_fast: Which requests are fast.
        time: The scheduled times, from 0 at the first request to 1 at the last.
        span_s: The time from the first to the last scheduled time.
        replica_keys: The target and replica of each request as one number.
        stride: See `requests`.
        excess: For each part of TTFT, how much of the additional TTFT of the slow requests it
            explains, as a fraction. Empty if too few requests are slow.
        server_curves: The values of the servers' metrics pages, by quantity.
        manifest: The manifest of the run.
        samples: The samples of the pages of servers and hardware.
    """

    requests: JoinedColumns
    ttft_ns: Ints
    is_slow: Mask
    is_fast: Mask
    time: NDArray[np.float64]
    span_s: float
    replica_keys: Ints
    stride: int
    excess: dict[str, float]
    server_curves: dict[str, series.MetricCurve]
    manifest: RunManifest
    samples: Sequence[MetricSample]

    def server_values(self, quantity: str) -> Sequence[float]:
        """Return the values of a quantity of the servers' metrics pages."""
        curve = self.server_curves.get(quantity)
        return () if curve is None else curve.values

    def missed_limit_ms(self, metric: str, values_ns: Ints) -> float | None:
        """Return the tightest limit of a metric in the SLO that the values miss, or None."""
        slo = self.manifest.slo
        if slo is None:
            return None
        missed_ns = [
            term.limit_ns
            for term in slo.terms
            if term.metric == metric and (values_ns > term.limit_ns).mean() > 1 - term.quantile
        ]
        return min(missed_ns) / 1e6 if missed_ns else None


Detector: TypeAlias = Callable[[Case], Cause | None]


def make_cause(code: str, share: float, evidence: str, sure: str = "likely") -> Cause:
    """Return a cause. A share above 1, which is due to noise, becomes 1."""
    return Cause(code=code, share=min(share, 1.0), sure=sure, evidence=evidence)


def client_cause(share: float, evidence: str, sure: str = "likely") -> Cause:
    """Return the load generator as a cause."""
    advice = "use more --workers or a dedicated host"
    return make_cause("client", share, f"{evidence}; {advice}", sure)


def excess_of_slow(values: Ints, is_slow: Mask, is_fast: Mask) -> float:
    """Return by how much the mean of the slow requests is larger than that of the fast ones."""
    return float(values[is_slow].mean() - values[is_fast].mean())


def detect_network(case: Case) -> Cause | None:
    """Detect time spent on connecting or in the network.

    The network is only known if the server reports how long requests queue and how long prefill
    takes. The rest of TTFT then passed outside of the server.
    """
    connect_share = case.excess["connect"]
    share = connect_share
    if "queue" in case.excess and "prefill" in case.excess:
        share += case.excess["rest"]
    if share < MOST_OF_EXCESS:
        return None
    where = "in the network, or before the server started its own timing"
    if connect_share > share / 2:
        where = "waiting for a connection"
    return make_cause("network", share, f"{share:.0%} of their additional TTFT was spent {where}")


def detect_buffering(case: Case) -> Cause | None:
    """Detect responses that arrive all at once, so that TTFT is the time of the whole response."""
    requests = case.requests
    arrived_at_once = requests["last_token_ns"] == requests["first_token_ns"]
    share = float((arrived_at_once & (requests["output_tokens"] > 1)).mean())
    if share < CLEAR_SHARE:
        return None
    evidence = (
        f"{share:.0%} of the responses arrived all at once, because a proxy, a gateway or the "
        "server buffers them, so TTFT is the time of the whole response"
    )
    return make_cause("held_back", share, evidence)


def detect_startup(case: Case) -> Cause | None:
    """Detect slow requests that were all scheduled at the start of the load."""
    is_early = case.time < STARTUP_SHARE
    share = float(is_early[case.is_slow].mean())
    if share < CLEAR_SHARE:
        return None
    until_s = float(case.time[case.is_slow & is_early].max()) * case.span_s
    evidence = (
        f"{share:.0%} of them were sent in the first {until_s:.0f} s, while the server was "
        "starting up; use a longer --warmup"
    )
    return make_cause("startup", share, evidence)


def detect_periodic_stalls(case: Case) -> Cause | None:
    """Detect short bursts of slow requests at regular intervals."""
    times_s = case.time[case.is_slow] * case.span_s
    starts_of_bursts = np.flatnonzero(np.diff(times_s) > _BURST_PAUSE_S) + 1
    first = np.concatenate([[0], starts_of_bursts])
    last = np.append(first[1:], len(times_s)) - 1
    sizes = last - first + 1
    # A single slow request between two bursts is no burst.
    is_large = sizes >= max(3.0, 0.25 * float(np.median(sizes)))
    burst_starts_s = times_s[first[is_large]]
    burst_lengths_s = (times_s[last] - times_s[first])[is_large]
    share = float(sizes[is_large].sum() / len(times_s))
    if len(burst_starts_s) < _MIN_BURSTS or share < CLEAR_SHARE:
        return None
    if burst_lengths_s.sum() > _MAX_BURST_SHARE * case.span_s:
        return None
    intervals_s = np.diff(burst_starts_s)
    if intervals_s.std() > _MAX_INTERVAL_CV * intervals_s.mean():
        return None
    evidence = (
        f"{share:.0%} of them came in {len(burst_starts_s)} bursts, one every "
        f"{intervals_s.mean():.0f} s; the server stalls periodically"
    )
    return make_cause("stalls", share, evidence)


def detect_slow_target(case: Case) -> Cause | None:
    """Detect a target or replica that has many more slow requests than its share of all."""
    keys, key_index, counts = np.unique(case.replica_keys, return_inverse=True, return_counts=True)
    slow_counts = np.bincount(key_index[case.is_slow], minlength=len(keys))
    slow_shares = slow_counts / case.is_slow.sum()
    worst = int(np.argmax(slow_shares))
    share = float(slow_shares[worst])
    expected_share = float(counts[worst] / len(case.replica_keys))
    if share < CLEAR_SHARE or share < 1.5 * expected_share:
        return None
    name = replica_name(int(keys[worst]), case.manifest)
    evidence = f"{share:.0%} of them were at {name}, which serves {expected_share:.0%} of all"
    return make_cause("target", share, evidence)


class _TpotStep(msgspec.Struct, frozen=True):
    """A time at which TPOT rises and stays higher.

    Attributes:
        time: When it is, from 0 to 1.
        factor: The median TPOT after it, divided by the one before it.
        separation: The share of the requests that are on their side of the middle, on the side
            where it is smaller.
    """

    time: float
    factor: float
    separation: float


def detect_slower_hardware(case: Case) -> Cause | None:
    """Detect a TPOT that rises at one time and stays higher, although the load does not rise."""
    tpot_ns = case.requests.measure("tpot")
    is_known = tpot_ns != UNDEFINED
    step = _find_tpot_step(tpot_ns[is_known].astype(float), case.time[is_known])
    if step is None or step.separation < _MIN_SEPARATION:
        return None
    rate_before = (case.time < step.time).mean() / max(step.time, 0.01)
    rate_after = (case.time >= step.time).mean() / max(1 - step.time, 0.01)
    if rate_after > STEADY_FACTOR * rate_before:
        return None
    reason = _reported_throttling(case, step.time)
    if not reason:
        reason = "the machine became slower (a power or thermal cap, or another workload)"
    evidence = (
        f"from t={step.time * case.span_s:.0f} s on, each token took {step.factor - 1:.0%} longer "
        f"although the load did not increase: {reason}"
    )
    return make_cause("power", step.separation, evidence)


def _find_tpot_step(tpot_ns: NDArray[np.float64], time: NDArray[np.float64]) -> _TpotStep | None:
    """Return the step that separates the TPOT before and after it best, or None."""
    best: _TpotStep | None = None
    for cut in np.arange(0.15, 0.9, 0.05):
        before = tpot_ns[time < cut - _STEP_MARGIN]
        after = tpot_ns[time >= cut + _STEP_MARGIN]
        if min(len(before), len(after)) < MIN_SLOW_REQUESTS:
            continue
        median_before = float(np.median(before))
        factor = float(np.median(after)) / max(median_before, 1.0)
        if factor < SIGNIFICANT_CHANGE or _is_rising(before) or _is_rising(after):
            continue
        middle = median_before * factor**0.5
        separation = min(float((before < middle).mean()), float((after > middle).mean()))
        if best is None or separation > best.separation:
            best = _TpotStep(float(cut), factor, separation)
    return best


def _is_rising(values: NDArray[np.float64]) -> bool:
    """Return True if the median of the last third is larger than that of the first third."""
    third = max(len(values) // 3, 1)
    return bool(np.median(values[-third:]) > STEADY_FACTOR * np.median(values[:third]))


def _reported_throttling(case: Case, step_time: float) -> str:
    """Return the reason for lower clocks that the GPUs report since a step, or ""."""
    start_s = float(case.requests["due_ns"][0]) / 1e9
    step_s = start_s + step_time * case.span_s
    before = energy.throttled_fractions(case.samples, start_s, step_s)
    after = energy.throttled_fractions(case.samples, step_s, start_s + case.span_s)
    for reason, share in after.items():
        share_before = before.get(reason, 0.0)
        if share - share_before >= _MIN_CAP_INCREASE:
            return (
                f"the GPUs report a {reason} in {share:.0%} of the readings, "
                f"{share_before:.0%} before"
            )
    return ""


def detect_preemptions(case: Case) -> Cause | None:
    """Detect a server that took requests out of its batch because the KV cache was full."""
    values = [*case.server_values(series.PREEMPTED), *case.server_values(series.PAUSED)]
    reads = sum(value > 0 for value in values)
    if reads < MIN_READS:
        return None
    share = 1.0
    if "queue" in case.excess:
        share = case.excess["queue"] + case.excess.get("prefill", 0.0)
    evidence = (
        f"the server's metrics page reports preempted requests in {reads} reads, because the KV "
        "cache was full"
    )
    return make_cause("preemptions", share, evidence)


def detect_full_kv_cache(case: Case) -> Cause | None:
    """Detect requests that waited for room in the KV cache."""
    usage = case.server_values(series.KV_USE)
    full_reads = sum(value >= _FULL_CACHE for value in usage)
    share = case.excess.get("queue", case.excess["rest"])
    if full_reads < MIN_READS or share < MOST_OF_EXCESS:
        return None
    evidence = (
        f"the KV cache was at least {_FULL_CACHE:.0%} full in {full_reads} of {len(usage)} reads "
        "of the metrics page, and requests waited for room in it"
    )
    return make_cause("kv_cache", share, evidence)


def detect_long_prompts(case: Case) -> Cause | None:
    """Detect requests that have an unusually long prompt, or waited while one was processed."""
    prompt_tokens = case.requests["input_tokens"]
    limit = _LONG_PROMPT * float(np.median(prompt_tokens))
    long_indexes = np.flatnonzero(prompt_tokens > limit)
    min_count = _MIN_LONG_SHARE * len(prompt_tokens)
    max_count = _MAX_LONG_SHARE * len(prompt_tokens)
    if not min_count <= len(long_indexes) <= max_count:
        return None
    slow_share = _share_affected(case, np.flatnonzero(case.is_slow), long_indexes)
    fast_share = _share_affected(case, np.flatnonzero(case.is_fast), long_indexes)
    if slow_share < CLEAR_SHARE or slow_share < 2 * fast_share:
        return None
    evidence = (
        f"{slow_share:.0%} of them (and {fast_share:.0%} of the fast ones) have a prompt of more "
        f"than {limit:,.0f} tokens, or waited while the server processed one"
    )
    return make_cause("long_prompts", slow_share, evidence)


def _share_affected(case: Case, indexes: Ints, long_indexes: Ints) -> float:
    """Return the share of requests that are long, or waited for their first token beside one.

    Only about _SAMPLED_NEIGHBOURS requests are examined.
    """
    sent_ns = case.requests["sent_ns"]
    first_token_ns = case.requests["first_token_ns"]
    is_long = np.zeros(len(sent_ns), bool)
    is_long[long_indexes] = True
    sampled = indexes[:: max(len(indexes) // _SAMPLED_NEIGHBOURS, 1)].tolist()
    affected = 0
    for index in sampled:
        same_replica = long_indexes[case.replica_keys[long_indexes] == case.replica_keys[index]]
        overlaps = (sent_ns[same_replica] < first_token_ns[index]) & (
            first_token_ns[same_replica] > sent_ns[index]
        )
        affected += bool(is_long[index] or overlaps.any())
    return affected / len(sampled)


def detect_growing_queue(case: Case) -> Cause | None:
    """Detect a queue in which the slow requests waited, and which grew during the load."""
    is_reported = "queue" in case.excess
    share = case.excess["queue"] if is_reported else case.excess["rest"]
    is_counted_as_prefill = is_reported and share < MOST_OF_EXCESS and _prefill_hides_queue(case)
    if is_counted_as_prefill:
        share += case.excess["prefill"]
    growth = _describe_ttft_growth(case)
    if share < MOST_OF_EXCESS or not growth:
        return None
    if is_counted_as_prefill:
        where = (
            "in the server, which reports the time as prefill although their prompts are no longer "
            "than others"
        )
    elif is_reported:
        where = "in the server's queue"
    else:
        where = "in the server, probably in its queue"
    sure = "likely" if is_reported and not is_counted_as_prefill else "possible"
    return make_cause("queue", share, f"they waited {where}; {growth}", sure)


def _prefill_hides_queue(case: Case) -> bool:
    """Return True if the server probably reports waiting as prefill.

    The slow requests then have a longer prefill than the fast ones, although their prompts are not
    longer. Dynamo's timing, for example, starts when a worker has received the request.
    """
    prompt_tokens = case.requests["input_tokens"]
    slow_tokens = prompt_tokens[case.is_slow]
    fast_tokens = prompt_tokens[case.is_fast]
    if "prefill" not in case.excess or int(min(slow_tokens.min(), fast_tokens.min())) < 0:
        return False
    return float(slow_tokens.mean()) <= _SIMILAR_LENGTH * float(fast_tokens.mean())


def _describe_ttft_growth(case: Case) -> str:
    """Return how the median TTFT grew over the load, or "" if it did not."""
    first_third = case.ttft_ns[case.time < 1 / 3]
    last_third = case.ttft_ns[case.time >= 2 / 3]
    if not len(first_third) or not len(last_third):
        return ""
    early_ms = float(np.median(first_third)) / 1e6
    late_ms = float(np.median(last_third)) / 1e6
    if late_ms < GROWTH_FACTOR * early_ms:
        return ""
    return f"the median TTFT grew from {early_ms:,.0f} ms (first third) to {late_ms:,.0f} ms (last)"


def detect_queue_of_all(case: Case) -> Cause | None:
    """Detect a queue in which all requests waited alike, so that none is slower than the others.

    It grew, or it was there from the start and violates a TTFT objective.
    """
    growth = _describe_ttft_growth(case)
    is_missed = case.missed_limit_ms("ttft", case.ttft_ns) is not None
    queue_ns = case.requests["server_queue_ns"]
    if (queue_ns < 0).any():
        if not growth or not is_missed:
            return None
        evidence = f"all requests waited in the server, probably in its queue; {growth}"
        return make_cause("queue", 1.0, evidence, "possible")
    queue_ms = float(queue_ns.mean()) / 1e6
    ttft_ms = float(case.ttft_ns.mean()) / 1e6
    if not (growth or is_missed) or queue_ms < MOST_OF_EXCESS * ttft_ms:
        return None
    detail = f"; {growth}" if growth else ""
    evidence = (
        f"overloaded: requests waited {queue_ms:,.0f} ms of a mean TTFT of {ttft_ms:,.0f} ms in "
        f"the server's queue{detail}"
    )
    return make_cause("queue", queue_ms / ttft_ms, evidence)


class _BatchSizes(msgspec.Struct, frozen=True):
    """How many requests were decoded together, and the TPOT with few and with many of them."""

    is_small: Mask
    is_large: Mask
    small: int
    large: int
    small_tpot_ms: float
    large_tpot_ms: float


def detect_large_batches(case: Case) -> Cause | None:
    """Detect a missed TPOT objective that is due to many requests being decoded together.

    The cause is likely if TPOT was higher while more requests were decoded. It is possible if TPOT
    was nearly the same for all requests.
    """
    tpot_ns = case.requests.measure("tpot")
    is_known = tpot_ns != UNDEFINED
    tpot_ns = tpot_ns[is_known]
    if len(tpot_ns) < MIN_REQUESTS:
        return None
    limit_ms = case.missed_limit_ms("tpot", tpot_ns)
    if limit_ms is None:
        return None
    batches = _compare_batch_sizes(case, tpot_ns, is_known)
    if batches.large_tpot_ms >= SIGNIFICANT_CHANGE * batches.small_tpot_ms:
        cause = _likely_batch_cause(tpot_ns, batches, limit_ms)
    else:
        cause = _possible_batch_cause(tpot_ns, batches, limit_ms)
    return cause if cause.share >= CLEAR_SHARE else None


def _compare_batch_sizes(case: Case, tpot_ns: Ints, is_known: Mask) -> _BatchSizes:
    """Compare the requests with the smallest and with the largest fifth of the batch sizes.

    The size of a batch is the number of requests in decode at the middle of a request's decode.
    """
    first_token_ns = case.requests["first_token_ns"][is_known]
    done_ns = case.requests["done_ns"][is_known]
    middle_ns = first_token_ns + (done_ns - first_token_ns) // 2
    started = np.searchsorted(np.sort(first_token_ns), middle_ns, side="right")
    ended = np.searchsorted(np.sort(done_ns), middle_ns, side="right")
    sizes = (started - ended) * case.stride
    is_small = sizes <= np.quantile(sizes, 0.2)
    is_large = sizes >= np.quantile(sizes, 0.8)
    return _BatchSizes(
        is_small=is_small,
        is_large=is_large,
        small=int(np.median(sizes[is_small])),
        large=int(np.median(sizes[is_large])),
        small_tpot_ms=float(np.median(tpot_ns[is_small])) / 1e6,
        large_tpot_ms=float(np.median(tpot_ns[is_large])) / 1e6,
    )


def _likely_batch_cause(tpot_ns: Ints, batches: _BatchSizes, limit_ms: float) -> Cause:
    """Return the cause if TPOT rises with the size of the batch."""
    middle_ns = (batches.small_tpot_ms * batches.large_tpot_ms) ** 0.5 * 1e6
    share = min(
        float((tpot_ns[batches.is_small] < middle_ns).mean()),
        float((tpot_ns[batches.is_large] > middle_ns).mean()),
    )
    evidence = (
        f"TPOT was {batches.small_tpot_ms:,.4g} ms with {batches.small:,} requests in decode and "
        f"{batches.large_tpot_ms:,.4g} ms with {batches.large:,} (limit {limit_ms:,.4g} ms); "
        "lower the load or add replicas"
    )
    return make_cause("batch", share, evidence)


def _possible_batch_cause(tpot_ns: Ints, batches: _BatchSizes, limit_ms: float) -> Cause:
    """Return the cause if nearly all requests have the same TPOT."""
    median_ns = float(np.median(tpot_ns))
    share = float((abs(tpot_ns / median_ns - 1) < SIGNIFICANT_CHANGE - 1).mean())
    evidence = (
        f"TPOT was about {median_ns / 1e6:,.4g} ms for nearly all requests, with {batches.small:,} "
        f"to {batches.large:,} in decode (limit {limit_ms:,.4g} ms); the load or the server's "
        "own speed"
    )
    return make_cause("batch", share, evidence, "possible")


DETECTORS: tuple[Detector, ...] = (
    detect_buffering,
    detect_network,
    detect_startup,
    detect_periodic_stalls,
    detect_slow_target,
    detect_slower_hardware,
    detect_preemptions,
    detect_full_kv_cache,
    detect_long_prompts,
    detect_growing_queue,
    detect_large_batches,
)
"""The detectors if some requests are much slower than others.

Special causes come before general ones. A stall, for example, also creates a queue, so the queue is
only named if nothing explains it.
"""
DETECTORS_OF_ALL: tuple[Detector, ...] = (
    detect_buffering,
    detect_slower_hardware,
    detect_queue_of_all,
    detect_large_batches,
)
"""The detectors if no request stands out, so that all are slow alike or none is."""
TPOT_DETECTORS: tuple[Detector, ...] = (detect_slower_hardware, detect_large_batches)
"""The detectors that need TPOT."""
