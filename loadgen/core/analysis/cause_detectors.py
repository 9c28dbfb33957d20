"""Detect the causes of slow requests, each by the trace that it leaves in the records.

Pure. A detector takes a `Case` and returns a `Cause` with its evidence, or None. Thresholds were
chosen with `benchmarks/causes.py`, which injects each cause into a simulated server and counts how
often it is named, and how often one is named in runs without a cause.
"""

from __future__ import annotations

import math
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
_MIN_BURST_SIZE = 3.0
"""The fewest slow requests of a burst."""
_MIN_BURST_FRACTION = 0.25
"""A burst has at least this fraction of the slow requests of the median burst."""
_MIN_TARGET_FACTOR = 1.5
"""A slow target has at least so many times its share of all requests."""
_MAX_INTERVAL_CV = 0.2
"""The largest coefficient of variation of the intervals between bursts that are periodic."""
_MAX_BURST_SHARE = 0.4
"""The largest share of the time that bursts may take."""
_MIN_SEPARATION = 0.9
"""The share of requests on either side of a TPOT step that must be on their side of its middle."""
_STEP_MARGIN = 0.03
"""Requests this close to a step, as a share of the time, ran partly before and partly after it."""
_STEP_TIMES = np.arange(0.15, 0.9, 0.05)
"""The times, as a share of the load, at which a step of TPOT is looked for."""
_SHORTEST_TIME = 0.01
"""The shortest share of the load for which a rate of requests is computed."""
_FULL_CACHE = 0.9
"""The fraction of the KV cache in use from which on it counts as full."""
_LONG_PROMPT = 4.0
"""A prompt is long from this multiple of the median on."""
_MIN_LONG_SHARE = 0.005
_MAX_LONG_SHARE = 0.3
_SAMPLED_NEIGHBOURS = 300
"""The number of slow requests, and of fast ones, whose neighbours are examined."""
_MIN_CAP_INCREASE = 0.5
"""The increase of the share of readings in which the hardware reports lower clocks."""
_BATCH_FRACTION = 0.2
"""The fraction of requests whose batches count as small, and as large."""
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

    @property
    def is_explainable(self) -> bool:
        """Whether enough requests are slow to be compared with fast ones."""
        return bool(self.excess)

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
    where = (
        "the server's own timing excludes it, so it was spent in the network or "
        "before the server started its timer"
    )
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
    """Detect short bursts of slow requests at regular intervals.

    A server that stops from time to time, for example for a checkpoint, delays all requests of that
    time. Slow requests belong to one burst unless _BURST_PAUSE_S pass between them. Bursts much
    smaller than the others are single slow requests and do not count.
    """
    times_s = case.time[case.is_slow] * case.span_s
    is_start = np.diff(times_s, prepend=-math.inf) > _BURST_PAUSE_S
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], len(times_s))
    sizes = ends - starts
    is_burst = sizes >= max(_MIN_BURST_SIZE, _MIN_BURST_FRACTION * float(np.median(sizes)))
    burst_starts_s = times_s[starts[is_burst]]
    burst_lengths_s = times_s[ends[is_burst] - 1] - burst_starts_s
    share = float(sizes[is_burst].sum() / len(times_s))
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
    if share < CLEAR_SHARE or share < _MIN_TARGET_FACTOR * expected_share:
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
    """Detect a TPOT that rises at one time and stays higher, although the load does not rise.

    That is what a GPU does whose clocks are lowered by a power or thermal cap. If the metrics page
    of the hardware reports such a cap, the evidence says so.
    """
    tpot_ns = case.requests.measure("tpot")
    is_known = tpot_ns != UNDEFINED
    step = _find_tpot_step(tpot_ns[is_known].astype(float), case.time[is_known])
    if step is None or step.separation < _MIN_SEPARATION or _has_load_risen(case, step.time):
        return None
    reason = _reported_throttling(case, step.time)
    if not reason:
        reason = "the machine became slower (a power or thermal cap, or another workload)"
    evidence = (
        f"from t={step.time * case.span_s:.0f} s on, each token took {step.factor - 1:.0%} longer "
        f"although the load did not increase: {reason}"
    )
    return make_cause("power", step.separation, evidence)


def _has_load_risen(case: Case, time: float) -> bool:
    """Return True if more requests per time were scheduled after a time than before it."""
    rate_before = (case.time < time).mean() / max(time, _SHORTEST_TIME)
    rate_after = (case.time >= time).mean() / max(1 - time, _SHORTEST_TIME)
    return bool(rate_after > STEADY_FACTOR * rate_before)


def _find_tpot_step(tpot_ns: NDArray[np.float64], time: NDArray[np.float64]) -> _TpotStep | None:
    """Return the step that separates the TPOT before it from the TPOT after it best, or None.

    Steps are tried at the times _STEP_TIMES. The middle between both medians is their geometric
    mean, because TPOT changes by a factor. A TPOT that rises before or after the step has no step
    but a trend.

    Args:
        tpot_ns: The TPOT of each request.
        time: The scheduled time of each request, from 0 to 1.
    """
    best: _TpotStep | None = None
    for step_time in _STEP_TIMES:
        before = tpot_ns[time < step_time - _STEP_MARGIN]
        after = tpot_ns[time >= step_time + _STEP_MARGIN]
        if min(len(before), len(after)) < MIN_SLOW_REQUESTS:
            continue
        median_before = float(np.median(before))
        factor = float(np.median(after)) / max(median_before, 1.0)
        if factor < SIGNIFICANT_CHANGE or _is_rising(before) or _is_rising(after):
            continue
        middle = median_before * factor**0.5
        separation = min(float((before < middle).mean()), float((after > middle).mean()))
        if best is None or separation > best.separation:
            best = _TpotStep(float(step_time), factor, separation)
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
    """Return the share of some requests that long prompts affect.

    A request is affected if its own prompt is long, or if one at the same replica was processed
    while it waited for its first token. Only about _SAMPLED_NEIGHBOURS requests are examined, since
    each is compared with all long prompts.

    Args:
        case: The requests.
        indexes: The indexes of the requests whose share is returned.
        long_indexes: The indexes of all requests with a long prompt.
    """
    sent_ns = case.requests["sent_ns"]
    first_token_ns = case.requests["first_token_ns"]
    is_long = np.zeros(len(sent_ns), bool)
    is_long[long_indexes] = True
    stride = max(len(indexes) // _SAMPLED_NEIGHBOURS, 1)
    sampled_indexes = indexes[::stride].tolist()
    affected = 0
    for index in sampled_indexes:
        is_same_replica = case.replica_keys[long_indexes] == case.replica_keys[index]
        neighbours = long_indexes[is_same_replica]
        begins_before = sent_ns[neighbours] < first_token_ns[index]
        ends_after = first_token_ns[neighbours] > sent_ns[index]
        affected += bool(is_long[index] or (begins_before & ends_after).any())
    return affected / len(sampled_indexes)


def detect_growing_queue(case: Case) -> Cause | None:
    """Detect a queue in which the slow requests waited, and which grew during the load.

    It is likely if the server reports the time that requests waited in its queue. It is possible if
    the server reports waiting as prefill, or nothing at all.
    """
    is_reported = "queue" in case.excess
    share = case.excess["queue"] if is_reported else case.excess["rest"]
    is_counted_as_prefill = is_reported and share < MOST_OF_EXCESS and _prefill_hides_queue(case)
    if is_counted_as_prefill:
        share += case.excess["prefill"]
    growth = _describe_ttft_growth(case)
    if share < MOST_OF_EXCESS or not growth:
        return None
    certainty = "possible"
    if is_counted_as_prefill:
        location = (
            "in the server: it reports the time as prefill, although these prompts "
            "are not longer than others"
        )
    elif is_reported:
        location = "in the server's queue"
        certainty = "likely"
    else:
        location = "in the server, probably in its queue"
    return make_cause("queue", share, f"they waited {location}; {growth}", certainty)


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

    It grew during the load, or it was there from the start and violates a TTFT objective. If the
    server does not report the time in its queue, the queue is a possible cause, and only if both
    hold.
    """
    growth = _describe_ttft_growth(case)
    is_ttft_missed = case.missed_limit_ms("ttft", case.ttft_ns) is not None
    queue_ns = case.requests["server_queue_ns"]
    is_queue_reported = not (queue_ns < 0).any()
    if not is_queue_reported:
        if not growth or not is_ttft_missed:
            return None
        evidence = f"all requests waited in the server, probably in its queue; {growth}"
        return make_cause("queue", 1.0, evidence, "possible")
    if not growth and not is_ttft_missed:
        return None
    queue_ms = float(queue_ns.mean()) / 1e6
    ttft_ms = float(case.ttft_ns.mean()) / 1e6
    if queue_ms < MOST_OF_EXCESS * ttft_ms:
        return None
    growth_clause = f"; {growth}" if growth else ""
    evidence = (
        f"overloaded: requests waited {queue_ms:,.0f} ms of a mean TTFT of {ttft_ms:,.0f} ms in "
        f"the server's queue{growth_clause}"
    )
    return make_cause("queue", queue_ms / ttft_ms, evidence)


class _BatchSizes(msgspec.Struct, frozen=True):
    """The requests that were decoded in small and in large batches, and their TPOT.

    Attributes:
        is_small: Which requests were decoded in the smallest fifth of the batch sizes.
        is_large: Which were decoded in the largest fifth.
        small: The median batch size of the former.
        large: The median batch size of the latter.
        small_tpot_ms: The median TPOT of the former.
        large_tpot_ms: The median TPOT of the latter.
    """

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

    Args:
        case: The requests.
        tpot_ns: The TPOT of those that have one.
        is_known: Which requests have one.
    """
    first_token_ns = case.requests["first_token_ns"][is_known]
    done_ns = case.requests["done_ns"][is_known]
    middle_ns = first_token_ns + (done_ns - first_token_ns) // 2
    decodes_begun = np.searchsorted(np.sort(first_token_ns), middle_ns, side="right")
    decodes_ended = np.searchsorted(np.sort(done_ns), middle_ns, side="right")
    # Each examined request stands for `stride` requests of the run.
    sizes = (decodes_begun - decodes_ended) * case.stride
    is_small = sizes <= np.quantile(sizes, _BATCH_FRACTION)
    is_large = sizes >= np.quantile(sizes, 1 - _BATCH_FRACTION)
    return _BatchSizes(
        is_small=is_small,
        is_large=is_large,
        small=int(np.median(sizes[is_small])),
        large=int(np.median(sizes[is_large])),
        small_tpot_ms=float(np.median(tpot_ns[is_small])) / 1e6,
        large_tpot_ms=float(np.median(tpot_ns[is_large])) / 1e6,
    )


def _likely_batch_cause(tpot_ns: Ints, batches: _BatchSizes, limit_ms: float) -> Cause:
    """Return the cause if TPOT rises with the size of the batch.

    Its share is that of the requests that a threshold between both medians separates: those in
    small batches below it, or those in large ones above it, whichever is fewer.
    """
    threshold_ns = (batches.small_tpot_ms * batches.large_tpot_ms) ** 0.5 * 1e6
    share = min(
        float((tpot_ns[batches.is_small] < threshold_ns).mean()),
        float((tpot_ns[batches.is_large] > threshold_ns).mean()),
    )
    evidence = (
        f"TPOT was {batches.small_tpot_ms:,.4g} ms with {batches.small:,} requests in decode and "
        f"{batches.large_tpot_ms:,.4g} ms with {batches.large:,} (limit {limit_ms:,.4g} ms); "
        "lower the load or add replicas"
    )
    return make_cause("batch", share, evidence)


def _possible_batch_cause(tpot_ns: Ints, batches: _BatchSizes, limit_ms: float) -> Cause:
    """Return the cause if nearly all requests have the same TPOT, whatever the batch size was.

    Its share is that of the requests whose TPOT is about the median.
    """
    median_ns = float(np.median(tpot_ns))
    is_near_median = abs(tpot_ns / median_ns - 1) < SIGNIFICANT_CHANGE - 1
    share = float(is_near_median.mean())
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
