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

    corrected = _correct_delays(breakdown_times, request_times, rough_match)
    return _assign_requests(corrected.breakdown_times, request_times, corrected.limit_ns)


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
    """Return the best match of breakdowns and requests, over all estimates of the clock offset.

    A breakdown is what the server reports of one request. The best match is the one in which most
    breakdowns have a request. Both tables have the columns arrival, first token and last token.
    """
    offsets_ns = _estimate_clock_offsets(
        breakdown_times[:, FIRST_TOKEN], request_times[:, FIRST_TOKEN]
    )
    matches = []
    for offset_ns in offsets_ns:
        breakdown_times_on_client_clock = breakdown_times - offset_ns
        request_of_breakdown = _assign_requests(
            breakdown_times_on_client_clock, request_times, MAX_DIFFERENCE_NS
        )
        matches.append(_RoughMatch(offset_ns, request_of_breakdown))

    return max(matches, key=lambda match: match.matched_count)


class _CorrectedTimes(NamedTuple):
    """The times of breakdowns without the usual delays between client and server.

    Attributes:
        breakdown_times: The table of times, in ns on the client's clock.
        limit_ns: How far each time may be from that of the request of a breakdown.
    """

    breakdown_times: NDArray[np.int64]
    limit_ns: int


def _correct_delays(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64], match: _RoughMatch
) -> _CorrectedTimes:
    """Remove the usual delays between client and server from the times of breakdowns.

    Both tables have the columns arrival, first token and last token. For each column, the usual
    delay is the median difference between matched breakdowns and requests.

    The result also says how far a corrected time may be from that of its request. For this, the
    deviation of a matched pair is the largest difference from the usual delay in its three columns.
    The limit is MAX_SPREADS times the median deviation, but at least MIN_DIFFERENCE_NS and at most
    MAX_DIFFERENCE_NS.
    """
    is_matched = match.request_of_breakdown >= 0
    index_of_matched_request = match.request_of_breakdown[is_matched]
    client_clock_times = breakdown_times - match.offset_ns
    differences_ns = client_clock_times[is_matched] - request_times[index_of_matched_request]
    delay_of_column_ns = np.median(differences_ns, axis=0).astype(np.int64)

    deviations_ns = np.abs(differences_ns - delay_of_column_ns)
    deviation_of_pair_ns = deviations_ns.max(axis=1)
    median_deviation_ns = int(np.median(deviation_of_pair_ns))
    limit_ns = max(MAX_SPREADS * median_deviation_ns, MIN_DIFFERENCE_NS)

    return _CorrectedTimes(
        breakdown_times=client_clock_times - delay_of_column_ns,
        limit_ns=min(limit_ns, MAX_DIFFERENCE_NS),
    )


def _estimate_clock_offsets(
    breakdown_first_tokens: NDArray[np.int64], request_first_tokens: NDArray[np.int64]
) -> list[int]:
    """Return two estimates in ns of how far the server's clock is ahead of the client's.

    Both compare the times of first tokens on the two clocks. The first estimate compares the first
    time on both sides, the second ones, and so on. It uses all requests, but is only right if both
    sides have nearly the same ones. The second estimate compares every time with every other one,
    so it is also right if either side has many requests that the other does not know. Its work is
    the product of their numbers, so it only uses the first SAMPLED_REQUESTS of each side.
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
    """Return the most frequent difference between a time of the server and one of the client.

    The differences of all pairs of times are computed. For two times of the same request, the
    difference is the offset of the clocks plus a delay, which is similar for all requests. All
    other differences are spread widely. So nowhere are there as many as near the
    offset.

    To find that place, differences are counted in bins of BIN_NS. The result is the median of the
    differences in the fullest bin and in its two neighbours.
    """
    # A row for each time of the server, and a column for each time of the client.
    differences_ns = np.subtract.outer(server_times, client_times)
    bin_numbers = differences_ns // BIN_NS
    distinct_bins, counts = np.unique(bin_numbers, return_counts=True)
    fullest_bin = int(distinct_bins[np.argmax(counts)])
    is_near_fullest_bin = np.abs(bin_numbers - fullest_bin) <= 1
    return int(np.median(differences_ns[is_near_fullest_bin]))


def _assign_requests(
    breakdown_times: NDArray[np.int64], request_times: NDArray[np.int64], limit_ns: int
) -> NDArray[np.int64]:
    """Assign a request to each breakdown, which is what the server reports of one request.

    Breakdowns are processed in the order of their first tokens. Each gets the nearest request that
    was not assigned to an earlier breakdown.

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
    is_request_free = np.ones(len(request_times), bool)
    request_of_breakdown = np.full(len(breakdown_times), -1, np.int64)

    breakdowns_by_first_token = np.argsort(first_tokens, kind="stable").tolist()
    for breakdown_index in breakdowns_by_first_token:
        candidates = candidates_of_breakdown[breakdown_index]
        free_candidates = candidates[is_request_free[candidates]]

        request_index = _find_nearest_request(
            breakdown_times[breakdown_index], free_candidates, request_times, limit_ns
        )
        if request_index is not None:
            request_of_breakdown[breakdown_index] = request_index
            is_request_free[request_index] = False

    return request_of_breakdown


def _find_candidates(
    breakdown_first_tokens: NDArray[np.int64],
    request_first_tokens: NDArray[np.int64],
    limit_ns: int,
) -> list[NDArray[np.int64]]:
    """Return for each breakdown the requests whose first token came at nearly the same time.

    The two times differ by at most `limit_ns`. If the requests are sorted by the time of their
    first token, the candidates of a breakdown are next to each other, so two binary searches find
    the first and the last one. Each array in the result has indexes of requests. It is a view of
    the sorted order, which needs no memory for each request.

    Args:
        breakdown_first_tokens: The time of the first token of each breakdown.
        request_first_tokens: The time of the first token of each request, on the same clock.
        limit_ns: The largest difference of the two.
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
    """Return the request that is nearest to the three times of a breakdown, or None.

    The times are those of arrival, first token and last token. The nearest request has the smallest
    sum of the three differences. There is none if there are no candidates, or if one of these three
    differences is above the limit.

    Args:
        times: The times of the breakdown.
        candidates: The indexes of the requests to choose from.
        request_times: The times of all requests.
        limit_ns: The largest difference that each time may have.
    """
    if not len(candidates):
        return None
    differences_ns = np.abs(request_times[candidates] - times)  # a row for each candidate
    nearest_row = int(np.argmin(differences_ns.sum(axis=1)))
    if differences_ns[nearest_row].max() > limit_ns:
        return None
    return int(candidates[nearest_row])
