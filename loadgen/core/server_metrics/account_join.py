"""Finds the request that each timing account of a server belongs to (`request_accounts.py`).

Pure. A server before version 1.3 numbers its requests itself and does not report the numbers, so
there is no name to join by. Both sides know three times of a request: arrival (or sending), first
token and last token. On a common clock these identify a request. Two requests whose three times
agree within MAX_DIFFERENCE_NS may be exchanged, which does not matter to any longer duration.

Tables of times have a row for each account or request and these three columns, in ns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_DIFFERENCE_NS = 30_000_000
"""Largest difference of a time on both sides: the network, and the server's HTTP and tokenizer."""

MIN_DIFFERENCE_NS = 10_000_000
"""A difference that is always accepted, however exactly other requests agree."""

SPREADS = 8
"""How many times the usual difference is accepted; a larger one is another client's request."""

VOTERS = 1_000
"""Requests from which the offset of the clocks is estimated."""

BIN_NS = 1_000_000
"""Offsets are counted in bins of this length."""

MIN_MATCHED_FRACTION = 0.5
"""If fewer of the requests have an account, the offset of the clocks was not found."""


def match_accounts(
    account_times: NDArray[np.int64], request_times: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return the index of the request of each account, -1 for an account without one.

    Returns None if the offset of the clocks cannot be found. Of the offsets that are tried, the
    one that matches most accounts is used.
    """
    if not len(account_times) or not len(request_times):
        return None
    offset_ns = 0
    request_of_account = np.full(len(account_times), -1, np.int64)
    for candidate_ns in _candidate_offsets(account_times[:, 1], request_times[:, 1]):
        candidate = _assign(account_times - candidate_ns, request_times, MAX_DIFFERENCE_NS)
        if (candidate >= 0).sum() > (request_of_account >= 0).sum():
            request_of_account = candidate
            offset_ns = candidate_ns
    is_matched = request_of_account >= 0
    matchable_count = min(len(account_times), len(request_times))
    if is_matched.sum() < MIN_MATCHED_FRACTION * matchable_count:
        return None
    # The second assignment removes the usual difference of each of the three times, and accepts
    # only differences that are usual for this server.
    matched_requests = request_times[request_of_account[is_matched]]
    differences = account_times[is_matched] - offset_ns - matched_requests
    usual = np.median(differences, axis=0).astype(np.int64)
    spread_ns = int(np.median(np.abs(differences - usual).max(axis=1)))
    limit_ns = min(max(SPREADS * spread_ns, MIN_DIFFERENCE_NS), MAX_DIFFERENCE_NS)
    return _assign(account_times - offset_ns - usual, request_times, limit_ns)


def _candidate_offsets(
    account_first_tokens: NDArray[np.int64], request_first_tokens: NDArray[np.int64]
) -> list[int]:
    """Return two estimates of the offset of the clocks, from the first tokens on both sides.

    They are the median difference of accounts and requests in the same order, and the most frequent
    difference of any two.
    """
    accounts = np.sort(account_first_tokens)
    requests = np.sort(request_first_tokens)
    in_order = accounts[: len(requests)] - requests[: len(accounts)]
    of_any_two = (accounts[:VOTERS, None] - requests[None, :VOTERS]).ravel()
    bins, counts = np.unique(of_any_two // BIN_NS, return_counts=True)
    most_frequent_bin = int(bins[np.argmax(counts)])
    near = of_any_two[np.abs(of_any_two // BIN_NS - most_frequent_bin) <= 1]
    return [int(np.median(in_order)), int(np.median(near))]


def _assign(
    account_times: NDArray[np.int64], request_times: NDArray[np.int64], limit_ns: int
) -> NDArray[np.int64]:
    """Return the index of the nearest free request of each account, -1 for none.

    Accounts are assigned in the order of their first tokens. `account_times` are on the clock of
    the requests. None of the three times may differ by more than `limit_ns`.
    """
    order = np.argsort(request_times[:, 1], kind="stable")
    first_tokens = request_times[order, 1]
    account_first_tokens = account_times[:, 1]
    low = np.searchsorted(first_tokens, account_first_tokens - limit_ns, "left").tolist()
    high = np.searchsorted(first_tokens, account_first_tokens + limit_ns, "right").tolist()
    is_free = np.ones(len(request_times), bool)
    request_of_account = np.full(len(account_times), -1, np.int64)
    for account in np.argsort(account_first_tokens, kind="stable").tolist():
        candidates = order[low[account] : high[account]]
        candidates = candidates[is_free[candidates]]
        if not len(candidates):
            continue
        differences = np.abs(request_times[candidates] - account_times[account])
        nearest = int(np.argmin(differences.sum(axis=1)))
        if differences[nearest].max() <= limit_ns:
            request_of_account[account] = candidates[nearest]
            is_free[candidates[nearest]] = False
    return request_of_account
