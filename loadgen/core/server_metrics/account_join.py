"""Whose request each account of a server is of (`request_accounts.py`).

Pure. A server before 1.3 numbers its requests itself and tells nobody, so there is no name to join
by. What is on both sides are three instants: arrival, first token, last token. On a common clock
they tell requests apart; two requests that agree in all three within MOST_APART_NS may be
exchanged, which makes no difference to any duration above that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_APART_NS = 30_000_000  # between an instant here and there: the network, and the server's own HTTP and tokenizer
VOTERS = 1_000  # requests by which the distance of the clocks is found
BIN_NS = 1_000_000
LEAST_NS = 10_000_000  # what differs by less is not told apart
MOSTLY = 0.5  # of the requests have to find an account, or the clocks were not brought together
SPREADS = 8  # times the usual difference: what differs more is another client's request


def join(theirs: NDArray[np.int64], ours: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The place of the request that each account is of, -1 for none. Columns: arrival (there) or sent (here), first
    token, last token.

    None where the clocks cannot be brought together. The distance of the clocks is the one on which
    most first tokens agree: that of requests in the same order, or the most frequent one between
    any two.
    """
    if not len(theirs) or not len(ours):
        return None
    offsets = _offsets(theirs[:, 1], ours[:, 1])
    found = [(_assign(theirs - offset, ours, MOST_APART_NS), offset) for offset in offsets]
    roughly, offset = max(found, key=lambda one: int((one[0] >= 0).sum()))
    known = roughly >= 0
    if known.sum() < MOSTLY * min(len(theirs), len(ours)):
        return None
    apart = theirs[known] - offset - ours[roughly[known]]
    usual = np.median(apart, axis=0).astype(np.int64)
    spread = int(np.median(np.abs(apart - usual).max(axis=1)))
    return _assign(
        theirs - offset - usual, ours, min(max(SPREADS * spread, LEAST_NS), MOST_APART_NS)
    )


def _offsets(theirs: NDArray[np.int64], ours: NDArray[np.int64]) -> list[int]:
    """Distances of the two clocks that may be the true one, from the first tokens on both."""
    theirs, ours = np.sort(theirs), np.sort(ours)
    in_order = theirs[: len(ours)] - ours[: len(theirs)]
    between = (theirs[:VOTERS, None] - ours[None, :VOTERS]).ravel()
    bins, votes = np.unique(between // BIN_NS, return_counts=True)
    most = int(bins[np.argmax(votes)])
    near = between[np.abs(between // BIN_NS - most) <= 1]
    return [int(np.median(in_order)), int(np.median(near))]


def _assign(shifted: NDArray[np.int64], ours: NDArray[np.int64], most_ns: int) -> NDArray[np.int64]:
    """For each account, on our clock, the free request whose three instants are nearest; the earliest first."""
    order = np.argsort(ours[:, 1], kind="stable")
    firsts = ours[order, 1]
    free = np.ones(len(ours), bool)
    request_of = np.full(len(shifted), -1, np.int64)
    low = np.searchsorted(firsts, shifted[:, 1] - most_ns, "left").tolist()
    high = np.searchsorted(firsts, shifted[:, 1] + most_ns, "right").tolist()
    for i in np.argsort(shifted[:, 1], kind="stable").tolist():
        near = order[low[i] : high[i]]
        near = near[free[near]]
        if len(near):
            apart = np.abs(ours[near] - shifted[i])
            best = int(np.argmin(apart.sum(axis=1)))
            if apart[best].max() <= most_ns:
                request_of[i] = near[best]
                free[near[best]] = False
    return request_of
