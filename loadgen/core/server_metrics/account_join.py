"""Finds the request that each timing breakdown of a server belongs to (`request_accounts.py`).

Pure. A server before version 1.3 numbers its requests itself and does not report the numbers, so
there is no name to join by. Both sides know three times of a request: arrival (or sending), first
token and last token. On a common clock these identify a request. Two requests whose three times
agree within MAX_DIFFERENCE_NS may be exchanged, which does not matter to any longer duration.

Tables of times have a row for each breakdown or request and these three columns, in ns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_DIFFERENCE_NS = 30_000_000
"""Largest difference of a time on both sides: the network, and the server's HTTP and tokenizer."""

MIN_DIFFERENCE_NS = 10_000_000
"""A difference that is always accepted, however exactly other requests agree."""

MAX_SPREADS = 8
"""A difference of more than this many times the usual spread is another client's request."""

SAMPLED_REQUESTS = 1_000
"""Requests from which the offset of the clocks is estimated."""

BIN_NS = 1_000_000
"""Offsets are counted in bins of this length."""

MIN_MATCHED_FRACTION = 0.5
"""If fewer of the requests have a breakdown, the offset of the clocks was not found."""


def match_breakdowns(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return the index of the request of each breakdown, -1 for a breakdown without one.

    Two clocks are compared, so their offset is estimated first: of two estimates, the one that
    matches most breakdowns is used. Then the requests are assigned again, with the typical
    differences of this server removed.

    Args:
        breakdown_times: Arrival, first and last token of each breakdown, on the server's clock.
        request_times: The same times of each request, on the client's clock.

    Returns:
        The indexes, or None if the offset of the clocks cannot be found.
    """
    if not len(breakdown_times) or not len(request_times):
        return None
    offset_ns = 0
    request_of_breakdown = np.full(len(breakdown_times), -1, np.int64)
    for candidate_ns in _candidate_offsets(breakdown_times[:, 1], request_times[:, 1]):
        candidate = _assign(breakdown_times - candidate_ns, request_times, MAX_DIFFERENCE_NS)
        if (candidate >= 0).sum() > (request_of_breakdown >= 0).sum():
            request_of_breakdown = candidate
            offset_ns = candidate_ns
    is_matched = request_of_breakdown >= 0
    matchable_count = min(len(breakdown_times), len(request_times))
    if is_matched.sum() < MIN_MATCHED_FRACTION * matchable_count:
        return None

    # The second assignment removes the median difference of each of the three times, and accepts
    # only differences that are usual for this server.
    matched_requests = request_times[request_of_breakdown[is_matched]]
    differences_ns = breakdown_times[is_matched] - offset_ns - matched_requests
    medians_ns = np.median(differences_ns, axis=0).astype(np.int64)
    largest_deviations_ns = np.abs(differences_ns - medians_ns).max(axis=1)
    spread_ns = int(np.median(largest_deviations_ns))
    limit_ns = min(max(MAX_SPREADS * spread_ns, MIN_DIFFERENCE_NS), MAX_DIFFERENCE_NS)
    return _assign(breakdown_times - offset_ns - medians_ns, request_times, limit_ns)


def _candidate_offsets(
    breakdown_first_tokens: NDArray[np.int64], request_first_tokens: NDArray[np.int64]
) -> list[int]:
    """Return two estimates of the offset of the clocks, from the first tokens on both sides.

    They are the median difference of breakdowns and requests in the same order, and the most
    frequent difference of any two.
    """
    breakdowns = np.sort(breakdown_first_tokens)
    requests = np.sort(request_first_tokens)
    in_order = breakdowns[: len(requests)] - requests[: len(breakdowns)]
    of_any_two = (breakdowns[:SAMPLED_REQUESTS, None] - requests[None, :SAMPLED_REQUESTS]).ravel()
    bins, counts = np.unique(of_any_two // BIN_NS, return_counts=True)
    most_frequent_bin = int(bins[np.argmax(counts)])
    near = of_any_two[np.abs(of_any_two // BIN_NS - most_frequent_bin) <= 1]
    return [int(np.median(in_order)), int(np.median(near))]


def _assign(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64], limit_ns: int
) -> NDArray[np.int64]:
    """Return the index of the nearest free request of each breakdown, -1 for none.

    Breakdowns are assigned in the order of their first tokens. `breakdown_times` are on the clock
    of the requests. None of the three times may differ by more than `limit_ns`.
    """
    order = np.argsort(request_times[:, 1], kind="stable")
    first_tokens = request_times[order, 1]
    breakdown_first_tokens = breakdown_times[:, 1]
    low = np.searchsorted(first_tokens, breakdown_first_tokens - limit_ns, "left").tolist()
    high = np.searchsorted(first_tokens, breakdown_first_tokens + limit_ns, "right").tolist()
    is_free = np.ones(len(request_times), bool)
    request_of_breakdown = np.full(len(breakdown_times), -1, np.int64)
    for breakdown in np.argsort(breakdown_first_tokens, kind="stable").tolist():
        candidates = order[low[breakdown] : high[breakdown]]
        candidates = candidates[is_free[candidates]]
        if not len(candidates):
            continue
        differences = np.abs(request_times[candidates] - breakdown_times[breakdown])
        nearest = int(np.argmin(differences.sum(axis=1)))
        if differences[nearest].max() <= limit_ns:
            request_of_breakdown[breakdown] = candidates[nearest]
            is_free[candidates[nearest]] = False
    return request_of_breakdown
