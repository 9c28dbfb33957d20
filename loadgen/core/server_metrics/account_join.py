"""Finds the request that each timing breakdown of a server belongs to (`request_accounts.py`).

Pure. A server before version 1.3 numbers its requests itself and does not report the numbers, so
there is no name to join by. Both sides know three times of a request: arrival (or sending), first
token and last token. On a common clock these identify a request. Two requests whose three times
agree within MAX_DIFFERENCE_NS may be exchanged, which does not matter to any longer duration.

Tables of times have a row for each breakdown or request and these three columns, in ns.
"""

from __future__ import annotations

from typing import NamedTuple

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


FIRST_TOKEN = 1
"""The column of a table of times that has the first token."""


def match_breakdowns(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return for each breakdown the index of its request, or -1 if it has none.

    A breakdown is what a server reports of one request, without naming it. The two belong together
    if their times agree, apart from the offset of the two clocks and the usual delays between
    client and server. So the requests are matched twice. The first match allows wide differences
    and only shows the usual delays. The second one corrects them and allows narrow differences.

    Args:
        breakdown_times: A row for each breakdown with its arrival, first and last token, in ns on
            the server's clock.
        request_times: The same times of each request, in ns on the client's clock.

    Returns:
        The indexes, or None if the offset of the clocks cannot be found.
    """
    if not len(breakdown_times) or not len(request_times):
        return None
    rough_match = _match_with_best_offset(breakdown_times, request_times)
    matchable_count = min(len(breakdown_times), len(request_times))
    if rough_match.matched_count < MIN_MATCHED_FRACTION * matchable_count:
        return None
    corrected_times, limit_ns = _correct_delays(breakdown_times, request_times, rough_match)
    return _assign_requests(corrected_times, request_times, limit_ns)


class _RoughMatch(NamedTuple):
    """The requests of breakdowns as they follow from an offset of the clocks.

    Attributes:
        offset_ns: How far the server's clock is ahead of the client's.
        request_of_breakdown: The index of the request of each breakdown, or -1.
    """

    offset_ns: int
    request_of_breakdown: NDArray[np.int64]

    @property
    def matched_count(self) -> int:
        """Return how many breakdowns have a request."""
        return int((self.request_of_breakdown >= 0).sum())


def _match_with_best_offset(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64]
) -> _RoughMatch:
    """Return the match with the most matched breakdowns, over all estimates of the clock offset."""
    matches = []
    for offset_ns in _estimate_clock_offsets(
        breakdown_times[:, FIRST_TOKEN], request_times[:, FIRST_TOKEN]
    ):
        request_of_breakdown = _assign_requests(
            breakdown_times - offset_ns, request_times, MAX_DIFFERENCE_NS
        )
        matches.append(_RoughMatch(offset_ns, request_of_breakdown))
    return max(matches, key=lambda match: match.matched_count)


def _correct_delays(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64], match: _RoughMatch
) -> tuple[NDArray[np.int64], int]:
    """Remove the usual delays between client and server from the times of breakdowns.

    A table of times has the columns arrival, first token and last token. The delay of each column
    is estimated by its median over all matches.

    Returns:
        The corrected times, and how far they may be from the times of a request in the final match:
        MAX_SPREADS times the median deviation, within fixed bounds.
    """
    is_matched = match.request_of_breakdown >= 0
    matched_request_times = request_times[match.request_of_breakdown[is_matched]]
    client_clock_times = breakdown_times - match.offset_ns
    differences_ns = client_clock_times[is_matched] - matched_request_times
    delay_of_column_ns = np.median(differences_ns, axis=0).astype(np.int64)

    # The deviation of a match is the largest one of its three times.
    deviations_ns = np.abs(differences_ns - delay_of_column_ns).max(axis=1)
    median_deviation_ns = int(np.median(deviations_ns))
    limit_ns = max(MAX_SPREADS * median_deviation_ns, MIN_DIFFERENCE_NS)
    return client_clock_times - delay_of_column_ns, min(limit_ns, MAX_DIFFERENCE_NS)


def _estimate_clock_offsets(
    breakdown_first_tokens: NDArray[np.int64], request_first_tokens: NDArray[np.int64]
) -> list[int]:
    """Return two estimates in ns of how far the server's clock is ahead of the client's.

    Both compare the times of first tokens on the two clocks. The first is right if both sides have
    nearly the same requests, the second also if either has many more.
    """
    server_times = np.sort(breakdown_first_tokens)
    client_times = np.sort(request_first_tokens)
    return [
        _median_offset_in_order(server_times, client_times),
        _most_frequent_offset(server_times[:SAMPLED_REQUESTS], client_times[:SAMPLED_REQUESTS]),
    ]


def _median_offset_in_order(
    server_times: NDArray[np.int64], client_times: NDArray[np.int64]
) -> int:
    """Return the median difference of the first times on both sides, the second ones, and so on."""
    common_count = min(len(server_times), len(client_times))
    return int(np.median(server_times[:common_count] - client_times[:common_count]))


def _most_frequent_offset(server_times: NDArray[np.int64], client_times: NDArray[np.int64]) -> int:
    """Return the most frequent difference of any time of the server and any of the client.

    Differences of a breakdown and its own request are all similar, and others are spread widely.
    They are counted in bins of BIN_NS. The median of the fullest bin and its two neighbours is more
    exact than a bin.
    """
    # A matrix with the difference of every pair, as a flat array.
    differences = (server_times[:, np.newaxis] - client_times[np.newaxis, :]).ravel()
    bin_of_difference = differences // BIN_NS
    bins, counts = np.unique(bin_of_difference, return_counts=True)
    fullest_bin = int(bins[np.argmax(counts)])
    is_near_fullest_bin = np.abs(bin_of_difference - fullest_bin) <= 1
    return int(np.median(differences[is_near_fullest_bin]))


def _assign_requests(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64], limit_ns: int
) -> NDArray[np.int64]:
    """Assign to each breakdown the nearest request that no other breakdown has.

    Breakdowns choose in the order of their first tokens.

    Args:
        breakdown_times: A row for each breakdown with its arrival, first and last token, in ns on
            the client's clock.
        request_times: The same times of each request.
        limit_ns: The largest difference that each of the three times may have.

    Returns:
        The index of the request of each breakdown, or -1 if none is within the limit.
    """
    first_tokens = breakdown_times[:, FIRST_TOKEN]
    candidates_of_breakdown = _find_candidates(
        first_tokens, request_times[:, FIRST_TOKEN], limit_ns
    )
    is_free = np.ones(len(request_times), bool)
    request_of_breakdown = np.full(len(breakdown_times), -1, np.int64)
    for breakdown_index in np.argsort(first_tokens, kind="stable").tolist():
        candidates = candidates_of_breakdown[breakdown_index]
        free_candidates = candidates[is_free[candidates]]
        request_index = _find_nearest_request(
            breakdown_times[breakdown_index], free_candidates, request_times, limit_ns
        )
        if request_index is not None:
            request_of_breakdown[breakdown_index] = request_index
            is_free[request_index] = False
    return request_of_breakdown


def _find_candidates(
    breakdown_first_tokens: NDArray[np.int64],
    request_first_tokens: NDArray[np.int64],
    limit_ns: int,
) -> list[NDArray[np.int64]]:
    """Return for each breakdown the indexes of the requests with a similar first token.

    The times of the two first tokens differ by at most `limit_ns`. With the requests sorted by
    their first token, those of a breakdown are next to each other, so a binary search finds them.
    The arrays in the result are views, which need no memory for each request.
    """
    request_order = np.argsort(request_first_tokens, kind="stable")
    sorted_first_tokens = request_first_tokens[request_order]
    starts = np.searchsorted(sorted_first_tokens, breakdown_first_tokens - limit_ns, "left")
    ends = np.searchsorted(sorted_first_tokens, breakdown_first_tokens + limit_ns, "right")
    return [
        request_order[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def _find_nearest_request(
    times: NDArray[np.int64],
    candidates: NDArray[np.int64],
    request_times: NDArray[np.int64],
    limit_ns: int,
) -> int | None:
    """Return which candidate is nearest to the three times of a breakdown, or None.

    The nearest one has the smallest sum of differences. It is too far away if one of them is above
    the limit.

    Args:
        times: The times of the breakdown.
        candidates: The indexes of some requests.
        request_times: The times of all requests.
        limit_ns: The largest difference that each time may have.
    """
    if not len(candidates):
        return None
    differences_ns = np.abs(request_times[candidates] - times)
    nearest = int(np.argmin(differences_ns.sum(axis=1)))
    if differences_ns[nearest].max() > limit_ns:
        return None
    return int(candidates[nearest])
