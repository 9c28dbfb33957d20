"""Detect the causes of slow requests, each by the trace that it leaves in the records.

Pure. A detector takes a `Case` and returns a `Cause` with its evidence, or None. Thresholds were
chosen with `benchmarks/causes.py`, which injects each cause into a simulated server and counts how
often it is named, and how often one is named in runs without a cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.metrics.columns import UNDEFINED, JoinedColumns
from loadgen.core.metrics.replica_keys import replica_name
from loadgen.core.metrics.sections import Cause
from loadgen.core.server_metrics import energy, series
from loadgen.core.stats.quantiles import count_open_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.core.slo import Term

Ints: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

MIN_REQUESTS = 200
"""Fewer ok requests are too few to compare slow ones with fast ones."""
MIN_SLOW_REQUESTS = 10
"""Fewer slow requests are not compared with fast ones."""
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
"""The share of the requests before a TPOT step that must be below its middle, and of those after it
that must be above."""
_MIN_REQUESTS_OF_STEP = 10
"""The fewest requests before a TPOT step, and after it."""
_STEP_MARGIN = 0.03
"""Requests this close to a step, as a share of the time, ran partly before and partly after it."""
_STEP_TIMES = np.arange(0.15, 0.9, 0.05)
"""The relative times at which a step of TPOT is looked for: 0.15, 0.2 and so on up to 0.85."""
_SHORTEST_TIME = 0.01
"""The shortest share of the load for which a rate of requests is computed."""
_FULL_CACHE = 0.9
"""The fraction of the KV cache in use from which on it counts as full."""
_LONG_PROMPT = 4.0
"""A prompt is long from this multiple of the median on."""
_MIN_LONG_SHARE = 0.005
_MAX_LONG_SHARE = 0.3
_MIN_AFFECTED_FACTOR = 2
"""Long prompts affect at least so many times the share of the slow requests as of the fast ones."""
_AFFECTED_SAMPLE = 300
"""About so many slow requests, and fast ones, are examined for long prompts that affect them."""
_MIN_REASON_INCREASE = 0.5
"""A reason for lower clocks counts if the share of the readings that report it rises by so much."""
_BATCH_FRACTION = 0.2
"""The fifth of the requests with the smallest batches is compared with that with the largest."""
_NEAR_MEDIAN = SIGNIFICANT_CHANGE - 1
"""The relative difference from the median TPOT below which a TPOT is about the same: 20 %."""
_SIMILAR_LENGTH = 1.1
"""Prompts are no longer than others if their mean length is within this factor."""


class RunSources(NamedTuple):
    """What detectors read besides the requests.

    Attributes:
        manifest: The manifest of the run.
        samples: The samples of the metrics pages of servers and hardware.
        server_curves: The values of the servers' pages, by quantity.
    """

    manifest: RunManifest
    samples: Sequence[MetricSample]
    server_curves: dict[str, series.MetricCurve]


class Case(msgspec.Struct, frozen=True):
    """The ok requests of a run, ordered by scheduled time, with what detectors need.

    Attributes:
        requests: The requests. Of a long run only every `stride`-th request is included.
        ttft_ns: The TTFT without the client's send delay.
        is_slow: Which requests are slow. A request that was sent late is not.
        is_fast: Which requests are fast.
        relative_time: The scheduled times, from 0 at the first request to 1 at the last.
        span_s: The time from the first to the last scheduled time.
        replica_keys: The target and replica of each request as one number.
        stride: See `requests`.
        excess_shares: For each part of TTFT, such as "queue", which fraction of the excess TTFT it
            explains. The excess is by how much the mean TTFT of the slow requests is above that of
            the fast ones. Empty if too few requests are slow.
        run: The manifest of the run and its metrics pages.
    """

    requests: JoinedColumns
    ttft_ns: Ints
    is_slow: Mask
    is_fast: Mask
    relative_time: NDArray[np.float64]
    span_s: float
    replica_keys: Ints
    stride: int
    excess_shares: dict[str, float]
    run: RunSources

    @property
    def has_slow_requests(self) -> bool:
        """Whether enough requests are slow to be compared with fast ones."""
        return bool(self.excess_shares)

    def server_values(self, quantity: str) -> Sequence[float]:
        """Return the values of a quantity of the servers' metrics pages."""
        curve = self.run.server_curves.get(quantity)
        return () if curve is None else curve.values

    def missed_limit_ms(self, metric: str, values_ns: Ints) -> float | None:
        """Return the lowest limit of a metric that the SLO sets and the run misses, or None.

        A term such as "p99 of TPOT <= 50 ms" is missed if more than 1 % of the values exceed 50 ms.
        """
        slo = self.run.manifest.slo
        if slo is None:
            return None

        missed_limits_ns = [
            term.limit_ns
            for term in slo.terms
            if term.metric == metric and _is_missed(term, values_ns)
        ]
        return min(missed_limits_ns) / 1e6 if missed_limits_ns else None


def _is_missed(term: Term, values_ns: Ints) -> bool:
    """Return True if more values exceed the limit of a term than its quantile allows."""
    share_over_limit = float((values_ns > term.limit_ns).mean())
    allowed_share = 1 - term.quantile
    return share_over_limit > allowed_share


Detector: TypeAlias = Callable[[Case], Cause | None]


def make_cause(code: str, share: float, evidence: str, sure: str = "likely") -> Cause:
    """Return a cause of slow requests.

    Args:
        code: The name of the cause in summary.json.
        share: The share of the slow requests that the cause explains. A share above 1, which is due
            to noise, becomes 1.
        evidence: The sentence that explains the cause, without a full stop.
        sure: "likely" or "possible".
    """
    return Cause(code=code, share=min(share, 1.0), sure=sure, evidence=evidence)


def _percent_of_slow(share: float) -> str:
    """Return a share of the slow requests, such as "80% of them".

    The sentence that the evidence completes begins with the number of slow requests.
    """
    return f"{share:.0%} of them"


def client_cause(share: float, evidence: str, sure: str = "likely") -> Cause:
    """Return the load generator as a cause, with advice. The parameters are as of `make_cause`."""
    advice = "use more --workers or a dedicated host"
    return make_cause("client", share, f"{evidence}; {advice}", sure)


def detect_network(case: Case) -> Cause | None:
    """Detect slow requests whose excess TTFT was mostly spent on connecting or in the network.

    The excess TTFT is the mean TTFT of the slow requests minus that of the fast ones.
    """
    connect_share = case.excess_shares["connect"]
    network_share = _network_share(case)
    share = connect_share + network_share
    if share < MOST_OF_EXCESS:
        return None

    is_mostly_connecting = connect_share > share / 2
    if is_mostly_connecting:
        location = "waiting for a connection"
    else:
        location = (
            "the server's own timing excludes it, so it was spent in the network or "
            "before the server started its timer"
        )

    evidence = f"{share:.0%} of their additional TTFT was spent {location}"
    return make_cause("network", share, evidence)


def _network_share(case: Case) -> float:
    """Return which share of the excess TTFT was spent in the network, 0 if that is not known.

    The rest of TTFT was spent in the network if the server reports its own times, queue and
    prefill.
    """
    is_server_time_known = "queue" in case.excess_shares and "prefill" in case.excess_shares
    return case.excess_shares["rest"] if is_server_time_known else 0.0


def detect_buffering(case: Case) -> Cause | None:
    """Detect responses whose tokens arrive all at once, so that TTFT is the time of all tokens."""
    requests = case.requests
    has_several_tokens = requests["output_tokens"] > 1
    has_one_time = requests["last_token_ns"] == requests["first_token_ns"]
    arrives_at_once = has_several_tokens & has_one_time
    share = float(arrives_at_once.mean())
    if share < CLEAR_SHARE:
        return None

    evidence = (
        f"{share:.0%} of the responses arrived all at once, because a proxy, a gateway or the "
        "server buffers them, so TTFT is the time of the whole response"
    )
    return make_cause("held_back", share, evidence)


def detect_startup(case: Case) -> Cause | None:
    """Detect slow requests nearly all of which were scheduled at the start of the load.

    The start is the first STARTUP_SHARE of the load, in which a server may still warm up.
    """
    is_early = case.relative_time < STARTUP_SHARE
    share = float(is_early[case.is_slow].mean())
    if share < CLEAR_SHARE:
        return None

    times_of_early_slow = case.relative_time[case.is_slow & is_early]
    last_early_slow_s = float(times_of_early_slow.max()) * case.span_s
    evidence = (
        f"{_percent_of_slow(share)} were sent in the first {last_early_slow_s:.0f} s, while the "
        "server was starting up; use a longer --warmup"
    )
    return make_cause("startup", share, evidence)


class _Burst(NamedTuple):
    """Slow requests that were scheduled close to each other.

    Attributes:
        start_s: The time of the first request, in seconds since the first one of the run.
        end_s: The time of the last request.
        size: The number of requests.
    """

    start_s: float
    end_s: float
    size: int


def detect_periodic_stalls(case: Case) -> Cause | None:
    """Detect short bursts of slow requests at regular intervals.

    Such bursts show that the server stops from time to time, for example for a checkpoint. They
    must have most of the slow requests, of which there is at least one.
    """
    # The scheduled times of the slow requests, in seconds since the first request of the run.
    slow_times_s = case.relative_time[case.is_slow] * case.span_s
    bursts = _drop_small_bursts(_find_bursts(slow_times_s))

    slow_in_bursts = sum(burst.size for burst in bursts)
    share_in_bursts = slow_in_bursts / len(slow_times_s)
    have_most_requests = share_in_bursts >= CLEAR_SHARE
    if not have_most_requests or not _are_short_and_periodic(bursts, case.span_s):
        return None

    burst_starts_s = [burst.start_s for burst in bursts]
    mean_interval_s = np.diff(burst_starts_s).mean()
    evidence = (
        f"{_percent_of_slow(share_in_bursts)} came in {len(bursts)} bursts, one every "
        f"{mean_interval_s:.0f} s; the server stalls periodically"
    )
    return make_cause("stalls", share_in_bursts, evidence)


def _find_bursts(times_s: NDArray[np.float64]) -> list[_Burst]:
    """Divide requests into bursts, which are separated by pauses of more than _BURST_PAUSE_S.

    For example, the times 1, 2, 10, 11 and 12 are two bursts, from 1 to 2 and from 10 to 12.

    Args:
        times_s: The times of the requests, in ascending order.
    """
    pauses_s = np.diff(times_s)
    last_indexes = np.flatnonzero(pauses_s > _BURST_PAUSE_S)
    first_indexes = last_indexes + 1  # of each burst but the first one
    return [
        _Burst(start_s=float(times[0]), end_s=float(times[-1]), size=len(times))
        for times in np.split(times_s, first_indexes)
    ]


def _drop_small_bursts(bursts: Sequence[_Burst]) -> list[_Burst]:
    """Return the bursts that are not much smaller than the median burst."""
    median_size = float(np.median([burst.size for burst in bursts]))
    min_size = max(_MIN_BURST_SIZE, _MIN_BURST_FRACTION * median_size)
    return [burst for burst in bursts if burst.size >= min_size]


def _are_short_and_periodic(bursts: Sequence[_Burst], span_s: float) -> bool:
    """Return True if there are several short bursts at regular intervals.

    Args:
        bursts: The bursts.
        span_s: The length of the load, of which the bursts may take a small part.
    """
    if len(bursts) < _MIN_BURSTS:
        return False

    total_length_s = sum(burst.end_s - burst.start_s for burst in bursts)
    if total_length_s > _MAX_BURST_SHARE * span_s:
        return False

    intervals_s = np.diff([burst.start_s for burst in bursts])
    max_deviation_s = _MAX_INTERVAL_CV * intervals_s.mean()
    return bool(intervals_s.std() <= max_deviation_s)


def detect_slow_target(case: Case) -> Cause | None:
    """Detect a target or replica that served most slow requests, and far fewer of all requests."""
    keys_of_slow = case.replica_keys[case.is_slow]
    replica_key = _most_frequent(keys_of_slow)
    slow_share = float((keys_of_slow == replica_key).mean())
    share_of_all = float((case.replica_keys == replica_key).mean())

    min_slow_share = max(CLEAR_SHARE, _MIN_TARGET_FACTOR * share_of_all)
    if slow_share < min_slow_share:
        return None

    name = replica_name(replica_key, case.run.manifest)
    evidence = (
        f"{_percent_of_slow(slow_share)} were at {name}, which serves {share_of_all:.0%} of all"
    )
    return make_cause("target", slow_share, evidence)


def _most_frequent(numbers: Ints) -> int:
    """Return the most frequent number: 7 for 3, 7, 7."""
    distinct_numbers, counts = np.unique(numbers, return_counts=True)
    return int(distinct_numbers[np.argmax(counts)])


_SLOWER_HARDWARE_CODE = "power"
"""The stored code of slower hardware, after its most frequent reason, a limit of power."""


class _TpotStep(msgspec.Struct, frozen=True):
    """A time at which TPOT rises and stays higher.

    Attributes:
        relative_time: The time, from 0 at the start of the load to 1 at its end.
        factor: The median TPOT after that time, divided by the median before it.
        separation: How clearly the step separates lower TPOT from higher TPOT, from 0 to 1.
    """

    relative_time: float
    factor: float
    separation: float


def detect_slower_hardware(case: Case) -> Cause | None:
    """Detect that the time per output token (TPOT) rises at one time, although the load does not.

    The hardware is slower from then on. For example, a GPU lowers its clock rate when it reaches a
    limit of its power or temperature.

    The share of the cause is how clearly the step separates requests: if 95 % of the requests
    before it have a low TPOT, and 92 % of those after it a high one, the share is 92 %.
    """
    tpot_ns = case.requests.measure("tpot")
    has_tpot = tpot_ns != UNDEFINED
    known_tpot_ns = tpot_ns[has_tpot].astype(float)

    step = _find_tpot_step(known_tpot_ns, case.relative_time[has_tpot])
    if step is None or step.separation < _MIN_SEPARATION:
        return None
    if _has_load_risen(case, step.relative_time):
        return None

    reported_reason = _describe_throttling(case, step.relative_time)  # "" if none is reported
    evidence = _describe_step(step, case.span_s, reported_reason)
    return make_cause(_SLOWER_HARDWARE_CODE, share=step.separation, evidence=evidence)


def _describe_step(step: _TpotStep, span_s: float, reported_reason: str) -> str:
    """Return the sentence about a step of TPOT.

    Args:
        step: The step.
        span_s: The length of the load.
        reported_reason: Why the hardware is slower, or "" if it reports no reason.
    """
    reason = (
        reported_reason or "the machine became slower (a power or thermal cap, or another workload)"
    )
    return (
        f"from t={step.relative_time * span_s:.0f} s on, each token took "
        f"{step.factor - 1:.0%} longer although the load did not increase: {reason}"
    )


def _has_load_risen(case: Case, relative_time: float) -> bool:
    """Return True if requests were scheduled at a higher rate after a relative time than before."""
    share_before = (case.relative_time < relative_time).mean()
    share_after = (case.relative_time >= relative_time).mean()

    # Neither time is 0, because the shares are divided by them.
    rate_before = share_before / max(relative_time, _SHORTEST_TIME)
    rate_after = share_after / max(1 - relative_time, _SHORTEST_TIME)
    return bool(rate_after > STEADY_FACTOR * rate_before)


def _find_tpot_step(
    tpot_ns: NDArray[np.float64], relative_time: NDArray[np.float64]
) -> _TpotStep | None:
    """Return the clearest step of TPOT at any of _STEP_TIMES, or None if TPOT has no step.

    Args:
        tpot_ns: The TPOT of each request.
        relative_time: The scheduled time of each request, from 0 to 1.
    """
    steps = []
    for step_time in _STEP_TIMES.tolist():
        # Requests near the step ran partly before and partly after it, so they are left out.
        before_ns = tpot_ns[relative_time < step_time - _STEP_MARGIN]
        after_ns = tpot_ns[relative_time >= step_time + _STEP_MARGIN]
        step = _measure_tpot_step(step_time, before_ns, after_ns)
        if step is not None:
            steps.append(step)

    return max(steps, key=lambda step: step.separation, default=None)


def _measure_tpot_step(
    step_time: float, before_ns: NDArray[np.float64], after_ns: NDArray[np.float64]
) -> _TpotStep | None:
    """Return the step of TPOT at a time, or None if TPOT does not rise there in a single step.

    TPOT that rises gradually, before the time or after it, is not a step.

    Args:
        step_time: The time, from 0 at the start of the load to 1 at its end.
        before_ns: The TPOT of the requests before the time, in order of time.
        after_ns: The TPOT of the requests after the time, in order of time.
    """
    has_enough_requests = min(len(before_ns), len(after_ns)) >= _MIN_REQUESTS_OF_STEP
    if not has_enough_requests:
        return None

    # Simulated requests can have a TPOT of 0 ns, by which nothing can be divided.
    median_before_ns = float(np.median(before_ns))
    median_after_ns = float(np.median(after_ns))
    factor = median_after_ns / max(median_before_ns, 1.0)

    if factor < SIGNIFICANT_CHANGE:
        return None

    rises_gradually = _is_rising(before_ns) or _is_rising(after_ns)
    if rises_gradually:
        return None

    # The threshold between low and high TPOT is the geometric mean of both medians, which is by the
    # same factor above one as below the other: 200 ns for 100 ns and 400 ns, with a factor of 4.
    threshold_ns = median_before_ns * factor**0.5
    separation = _measure_separation(before_ns, after_ns, threshold_ns)
    return _TpotStep(step_time, factor, separation)


def _measure_separation(
    lower_ns: NDArray[Any], higher_ns: NDArray[Any], threshold_ns: float
) -> float:
    """Return how clearly a threshold separates lower values from higher ones, from 0 to 1.

    If 95 % of the lower values are below the threshold, and 92 % of the higher values above it, the
    result is 0.92.
    """
    share_below = float((lower_ns < threshold_ns).mean())
    share_above = float((higher_ns > threshold_ns).mean())
    return min(share_below, share_above)


def _is_rising(values: NDArray[np.float64]) -> bool:
    """Return True if values in order of time clearly rise from the first third to the last."""
    third = max(len(values) // 3, 1)
    median_of_first_third = np.median(values[:third])
    median_of_last_third = np.median(values[-third:])
    return bool(median_of_last_third > STEADY_FACTOR * median_of_first_third)


def _describe_throttling(case: Case, step_time: float) -> str:
    """Return why GPUs lowered their clocks from a time on, or "" if they report no reason.

    Each reading of a GPU lists reasons, such as a power cap. The result names the first reason that
    is much more frequent after the time than before: "the GPUs report a power cap in 90% of the
    readings, 2% before".

    Args:
        case: The requests, with the samples of the hardware.
        step_time: The time, from 0 at the start of the load to 1 at its end.
    """
    # The times in seconds since the start of the run, as those of the samples are.
    load_start_s = float(case.requests["due_ns"][0]) / 1e9
    step_s = load_start_s + step_time * case.span_s
    load_end_s = load_start_s + case.span_s

    # For each reason, the share of the readings in which a GPU reports it.
    shares_before = energy.throttled_fractions(case.run.samples, load_start_s, step_s)
    shares_after = energy.throttled_fractions(case.run.samples, step_s, load_end_s)

    for reason, share_after in shares_after.items():
        share_before = shares_before.get(reason, 0.0)
        if share_after - share_before >= _MIN_REASON_INCREASE:
            return (
                f"the GPUs report a {reason} in {share_after:.0%} of the readings, "
                f"{share_before:.0%} before"
            )

    return ""


def detect_preemptions(case: Case) -> Cause | None:
    """Detect a server that took requests out of its batch because the KV cache was full.

    The server's metrics page must show such requests each of several times that it is read.
    """
    # A server either counts the preempted requests, or reports how many are paused.
    preempted_counts = case.server_values(series.PREEMPTED)
    paused_counts = case.server_values(series.PAUSED)

    # There is one count for each read of the page.
    all_counts = [*preempted_counts, *paused_counts]
    reads_with_preemptions = sum(count > 0 for count in all_counts)
    if reads_with_preemptions < MIN_READS:
        return None

    evidence = (
        f"the server's metrics page reports preempted requests in {reads_with_preemptions} reads, "
        "because the KV cache was full"
    )
    return make_cause("preemptions", _share_by_preemptions(case), evidence)


def _share_by_preemptions(case: Case) -> float:
    """Return the largest share of the excess TTFT that preemptions can explain.

    A preempted request waits in the queue again, and repeats its prefill. The excess TTFT is the
    mean TTFT of the slow requests minus that of the fast ones.
    """
    shares = case.excess_shares
    is_queue_time_reported = "queue" in shares
    if not is_queue_time_reported:
        return 1.0  # the whole excess may be queueing

    prefill_share = shares.get("prefill", 0.0)
    return shares["queue"] + prefill_share


def detect_full_kv_cache(case: Case) -> Cause | None:
    """Detect requests that waited in the server's queue for room in the KV cache.

    Waiting must explain most of the excess TTFT, which is the mean TTFT of the slow requests minus
    that of the fast ones.
    """
    usage_by_read = case.server_values(series.KV_USE)
    full_reads = sum(usage >= _FULL_CACHE for usage in usage_by_read)

    # If the server does not report how long requests queued, that time is in the rest of TTFT.
    waiting_share = case.excess_shares.get("queue", case.excess_shares["rest"])
    if full_reads < MIN_READS or waiting_share < MOST_OF_EXCESS:
        return None

    evidence = (
        f"the KV cache was at least {_FULL_CACHE:.0%} full in {full_reads} of {len(usage_by_read)} "
        "reads of the metrics page, and requests waited for room in it"
    )
    return make_cause("kv_cache", waiting_share, evidence)


def detect_long_prompts(case: Case) -> Cause | None:
    """Detect slow requests that have an unusually long prompt, or waited while one was processed.

    A prompt is long if it has more than _LONG_PROMPT times as many tokens as the median prompt. The
    result is None in two cases: if long prompts are no exception, or if they do not affect most of
    the slow requests and much fewer of the fast requests.
    """
    prompt_tokens = case.requests["input_tokens"]
    limit_tokens = _LONG_PROMPT * float(np.median(prompt_tokens))
    has_long_prompt = prompt_tokens > limit_tokens
    if not _are_exceptional(has_long_prompt):
        return None

    # The shares of the slow and of the fast requests that long prompts affect.
    slow_share = _share_affected(case, case.is_slow, has_long_prompt)
    fast_share = _share_affected(case, case.is_fast, has_long_prompt)
    affects_most_slow = slow_share >= CLEAR_SHARE
    affects_fewer_fast = slow_share >= _MIN_AFFECTED_FACTOR * fast_share
    if not affects_most_slow or not affects_fewer_fast:
        return None

    evidence = (
        f"{_percent_of_slow(slow_share)} (and {fast_share:.0%} of the fast ones) have a prompt of "
        f"more than {limit_tokens:,.0f} tokens, or waited while the server processed one"
    )
    return make_cause("long_prompts", slow_share, evidence)


def _are_exceptional(has_long_prompt: Mask) -> bool:
    """Return True if long prompts are an exception among all prompts, but not extremely rare."""
    prompt_count = len(has_long_prompt)
    long_count = int(np.count_nonzero(has_long_prompt))
    return _MIN_LONG_SHARE * prompt_count <= long_count <= _MAX_LONG_SHARE * prompt_count


class _ProcessedPrompts(NamedTuple):
    """When and where prompts were processed: from the send of a request to its first token.

    Attributes:
        start_ns: When each request was sent.
        end_ns: When its first token arrived.
        replica_keys: The replica of each request.
    """

    start_ns: Ints
    end_ns: Ints
    replica_keys: Ints

    def is_any_between(self, start_ns: int, end_ns: int, replica_key: int) -> bool:
        """Return True if a replica processed any of the prompts between two times."""
        # Two spans of time overlap if each starts before the other one ends.
        is_overlapping = (self.start_ns < end_ns) & (self.end_ns > start_ns)
        is_same_replica = self.replica_keys == replica_key
        return bool((is_overlapping & is_same_replica).any())


def _share_affected(case: Case, is_examined: Mask, has_long_prompt: Mask) -> float:
    """Return the share of the examined requests that a long prompt slows down.

    A request is affected if its own prompt is long, or if the same replica processed a long prompt
    between its send and its first token.

    Args:
        case: All requests.
        is_examined: Which requests are examined, at least one.
        has_long_prompt: Which requests have a long prompt.
    """
    sent_ns = case.requests["sent_ns"]
    first_token_ns = case.requests["first_token_ns"]
    long_prompts = _ProcessedPrompts(
        start_ns=sent_ns[has_long_prompt],
        end_ns=first_token_ns[has_long_prompt],
        replica_keys=case.replica_keys[has_long_prompt],
    )

    # To save time, only about _AFFECTED_SAMPLE requests, evenly spread, are examined.
    all_indexes = np.flatnonzero(is_examined)
    stride = max(len(all_indexes) // _AFFECTED_SAMPLE, 1)
    indexes = all_indexes[::stride].tolist()

    affected_count = 0
    for index in indexes:
        has_waited = long_prompts.is_any_between(
            sent_ns[index], first_token_ns[index], case.replica_keys[index]
        )
        if has_long_prompt[index] or has_waited:
            affected_count += 1

    return affected_count / len(indexes)


class _WaitInServer(NamedTuple):
    """Where the slow requests waited in the server.

    Attributes:
        location: The place, as a part of a sentence.
        certainty: "likely" or "possible", for a wait in a queue.
        explained_share: The share of the excess TTFT that waiting explains.
    """

    location: str
    certainty: str
    explained_share: float


def detect_growing_queue(case: Case) -> Cause | None:
    """Detect a queue in which the slow requests waited, and which grew during the load.

    Waiting must explain most of the excess TTFT, which is the mean TTFT of the slow requests minus
    that of the fast ones.
    """
    growth_text = _describe_ttft_growth(case)  # "" if TTFT does not grow
    if not growth_text:
        return None

    wait = _locate_wait(case)
    if wait is None or wait.explained_share < MOST_OF_EXCESS:
        return None

    evidence = f"they waited {wait.location}; {growth_text}"
    return make_cause("queue", wait.explained_share, evidence, wait.certainty)


def _locate_wait(case: Case) -> _WaitInServer | None:
    """Return where the slow requests waited in the server, or None if nothing shows a queue.

    A queue is "likely" if the server reports most of the excess TTFT as queueing. It is "possible"
    if the server does not report queueing, or seems to count waiting as prefill.
    """
    # The share of each part of TTFT in the excess TTFT of the slow requests.
    share_by_part = case.excess_shares

    queue_share = share_by_part.get("queue")
    if queue_share is None:
        # The server does not report queueing, so the time in the queue is in no other part.
        return _WaitInServer(
            location="in the server, probably in its queue",
            certainty="possible",
            explained_share=share_by_part["rest"],
        )

    if queue_share >= MOST_OF_EXCESS:
        return _WaitInServer(
            location="in the server's queue",
            certainty="likely",
            explained_share=queue_share,
        )

    if _may_count_waiting_as_prefill(case):
        return _WaitInServer(
            location=(
                "in the server: it reports the time as prefill, although these prompts "
                "are not longer than others"
            ),
            certainty="possible",
            explained_share=queue_share + share_by_part["prefill"],
        )

    return None


def _may_count_waiting_as_prefill(case: Case) -> bool:
    """Return True if the server may report the time that requests waited as a part of prefill.

    Prefill is the processing of the prompt. If slow requests have a longer prefill than fast ones,
    but no longer prompts, the server probably counts waiting as prefill.
    """
    is_prefill_reported = "prefill" in case.excess_shares
    if not is_prefill_reported:
        return False

    prompt_tokens = case.requests["input_tokens"]
    slow_tokens = prompt_tokens[case.is_slow]
    fast_tokens = prompt_tokens[case.is_fast]

    # A length that is not known is negative.
    are_slow_known = bool((slow_tokens >= 0).all())
    are_fast_known = bool((fast_tokens >= 0).all())
    if not are_slow_known or not are_fast_known:
        return False

    longest_similar_length = _SIMILAR_LENGTH * float(fast_tokens.mean())
    return float(slow_tokens.mean()) <= longest_similar_length


def _describe_ttft_growth(case: Case) -> str:
    """Return how the median TTFT grew from the first third of the load to the last, as a text.

    The text is "" if the median did not grow.
    """
    first_third_ns = case.ttft_ns[case.relative_time < 1 / 3]
    last_third_ns = case.ttft_ns[case.relative_time >= 2 / 3]
    if not len(first_third_ns) or not len(last_third_ns):
        return ""

    early_ms = float(np.median(first_third_ns)) / 1e6
    late_ms = float(np.median(last_third_ns)) / 1e6
    if late_ms < GROWTH_FACTOR * early_ms:
        return ""

    return f"the median TTFT grew from {early_ms:,.0f} ms (first third) to {late_ms:,.0f} ms (last)"


def detect_queue_of_all(case: Case) -> Cause | None:
    """Detect a queue in which all requests waited equally long.

    Two signs of a queue are a TTFT that grows during the load, and a TTFT that misses its limit.

    - If the server reports how long requests waited, one sign is enough.
    - Otherwise both signs are needed, and the queue is only a possible cause.
    """
    growth_text = _describe_ttft_growth(case)
    has_ttft_grown = growth_text != ""
    is_limit_missed = case.missed_limit_ms("ttft", case.ttft_ns) is not None

    is_queue_reported = bool(case.requests.is_known("server_queue_ns").all())
    if is_queue_reported:
        has_sign = has_ttft_grown or is_limit_missed
        return _cause_by_reported_queue(case, growth_text) if has_sign else None

    has_both_signs = has_ttft_grown and is_limit_missed
    if not has_both_signs:
        return None

    evidence = f"all requests waited in the server, probably in its queue; {growth_text}"
    return make_cause("queue", share=1.0, evidence=evidence, sure="possible")


def _cause_by_reported_queue(case: Case, growth_text: str) -> Cause | None:
    """Return the queue as a cause if requests spent most of their TTFT in the queue, else None.

    Args:
        case: The requests, each with the time in the queue that the server reports.
        growth_text: How the median TTFT grew during the load, or "".
    """
    mean_queue_ms = float(case.requests["server_queue_ns"].mean()) / 1e6
    mean_ttft_ms = float(case.ttft_ns.mean()) / 1e6
    if mean_queue_ms < MOST_OF_EXCESS * mean_ttft_ms:
        return None

    evidence = (
        f"overloaded: requests waited {mean_queue_ms:,.0f} ms of a mean TTFT of "
        f"{mean_ttft_ms:,.0f} ms in the server's queue"
    )
    if growth_text:
        evidence += f"; {growth_text}"
    return make_cause("queue", mean_queue_ms / mean_ttft_ms, evidence)


class _BatchGroup(NamedTuple):
    """Requests that were decoded in batches of a similar size.

    Attributes:
        tpot_ns: Their TPOT.
        median_size: The median size of their batches.
        median_tpot_ms: The median of their TPOT.
    """

    tpot_ns: Ints
    median_size: int
    median_tpot_ms: float


class _BatchComparison(NamedTuple):
    """The fifth of the requests with the smallest batches, and the one with the largest."""

    small: _BatchGroup
    large: _BatchGroup

    @property
    def is_tpot_higher_in_large(self) -> bool:
        """Whether the median TPOT is clearly higher in large batches than in small ones."""
        clearly_higher_ms = SIGNIFICANT_CHANGE * self.small.median_tpot_ms
        return self.large.median_tpot_ms >= clearly_higher_ms


def detect_large_batches(case: Case) -> Cause | None:
    """Detect that the time per output token (TPOT) misses its limit because of large batches.

    A batch is the requests that the server decodes together. The cause is likely if TPOT is clearly
    higher in large batches than in small ones, and possible if TPOT is the same in all batches. It
    must explain most of the requests. The result is None if the SLO sets no limit of TPOT, or if
    the limit is met.
    """
    tpot_ns = case.requests.measure("tpot")
    has_tpot = tpot_ns != UNDEFINED
    known_tpot_ns = tpot_ns[has_tpot]
    if len(known_tpot_ns) < MIN_REQUESTS:
        return None

    limit_ms = case.missed_limit_ms("tpot", known_tpot_ns)
    if limit_ms is None:
        return None

    batch_sizes = _estimate_batch_sizes(case, has_tpot)
    batches = _compare_batch_sizes(batch_sizes, known_tpot_ns)
    if batches.is_tpot_higher_in_large:
        cause = _cause_by_batch_size(batches, limit_ms)
    else:
        cause = _cause_by_equal_tpot(known_tpot_ns, batches, limit_ms)

    explains_enough = cause.share >= CLEAR_SHARE
    return cause if explains_enough else None


def _estimate_batch_sizes(case: Case, has_tpot: Mask) -> Ints:
    """Return how many requests the server decoded at the same time as each request.

    Decoding is the time from the first output token to the end of the response. The requests are
    counted at the middle of this time.

    Args:
        case: The requests.
        has_tpot: Which requests have a time per output token. Only these are counted.
    """
    first_token_ns = case.requests["first_token_ns"][has_tpot]
    done_ns = case.requests["done_ns"][has_tpot]
    middle_ns = first_token_ns + (done_ns - first_token_ns) // 2
    examined_batch_sizes = count_open_spans(first_token_ns, done_ns, middle_ns)

    # In a long run, only every second or third request is examined, and so on. So each of the
    # examined requests stands for `stride` requests.
    return examined_batch_sizes * case.stride


def _compare_batch_sizes(batch_sizes: Ints, tpot_ns: Ints) -> _BatchComparison:
    """Return the fifth of the requests with the smallest batches, and that with the largest.

    Args:
        batch_sizes: The batch size of each request.
        tpot_ns: The TPOT of each request.
    """
    is_small = batch_sizes <= np.quantile(batch_sizes, _BATCH_FRACTION)
    is_large = batch_sizes >= np.quantile(batch_sizes, 1 - _BATCH_FRACTION)
    return _BatchComparison(
        small=_summarize_batches(batch_sizes[is_small], tpot_ns[is_small]),
        large=_summarize_batches(batch_sizes[is_large], tpot_ns[is_large]),
    )


def _summarize_batches(sizes: Ints, tpot_ns: Ints) -> _BatchGroup:
    """Return the medians of requests with these batch sizes and this TPOT."""
    return _BatchGroup(
        tpot_ns=tpot_ns,
        median_size=int(np.median(sizes)),
        median_tpot_ms=float(np.median(tpot_ns)) / 1e6,
    )


def _cause_by_batch_size(batches: _BatchComparison, limit_ms: float) -> Cause:
    """Return large batches as the likely cause of a missed TPOT limit: TPOT rises with their size.

    The share of the cause says how clearly the TPOT of small and of large batches differs. If a
    threshold is above 95 % of the TPOTs in small batches, and below 92 % of those in large batches,
    the share is 92 %. The threshold is the geometric mean of both medians, because TPOTs differ by
    factors: it is by the same factor above one median as below the other.

    Args:
        batches: The requests that were decoded in small and in large batches.
        limit_ms: The TPOT limit that was missed.
    """
    small = batches.small
    large = batches.large

    threshold_ms = (small.median_tpot_ms * large.median_tpot_ms) ** 0.5
    separation = _measure_separation(small.tpot_ns, large.tpot_ns, threshold_ns=threshold_ms * 1e6)

    evidence = (
        f"TPOT was {_format_ms(small.median_tpot_ms)} with {small.median_size:,} requests in "
        f"decode and {_format_ms(large.median_tpot_ms)} with {large.median_size:,} "
        f"(limit {limit_ms:,.4g} ms); lower the load or add replicas"
    )
    return make_cause("batch", separation, evidence)


def _cause_by_equal_tpot(tpot_ns: Ints, batches: _BatchComparison, limit_ms: float) -> Cause:
    """Return the speed of all batches as a possible cause of a missed limit of TPOT.

    This is for a time per output token (TPOT) that is about the same in small and large batches.
    Either all batches are too large, because the load is too high, or the server cannot decode
    faster. Both explain the requests whose TPOT is near the median, so the share of the cause is
    the share of these requests.

    Args:
        tpot_ns: The TPOT of each request.
        batches: The requests that were decoded in small and in large batches.
        limit_ms: The TPOT limit that was missed.
    """
    median_ns = float(np.median(tpot_ns))
    relative_differences = np.abs(tpot_ns / median_ns - 1)
    is_near_median = relative_differences < _NEAR_MEDIAN
    share_near_median = float(is_near_median.mean())

    small_size = batches.small.median_size
    large_size = batches.large.median_size
    evidence = (
        f"TPOT was about {_format_ms(median_ns / 1e6)} (limit {limit_ms:,.4g} ms) with "
        f"{format.value_range(f'{small_size:,}', f'{large_size:,}')} requests in decode; if a "
        "lower load helps, the load was too high, else the server is too slow"
    )

    return make_cause("batch", share_near_median, evidence, "possible")


def _format_ms(milliseconds: float) -> str:
    """Return a time with its unit and three significant digits: 45.03 is "45 ms"."""
    return f"{format.milliseconds(milliseconds).removesuffix('.0')} ms"


COMPARING_DETECTORS: tuple[Detector, ...] = (
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
DETECTORS_WITHOUT_COMPARISON: tuple[Detector, ...] = (
    detect_buffering,
    detect_slower_hardware,
    detect_queue_of_all,
    detect_large_batches,
)
"""The detectors if no request stands out, so that all are slow alike or none is."""
TPOT_DETECTORS: tuple[Detector, ...] = (detect_slower_hardware, detect_large_batches)
"""The detectors that need TPOT."""
