"""What an SLO says of each request: whether it counts, and whether it is good. Pure, on columns.

The one definition for runs, sweeps, searches, contracts, costs and reports. What the end of the drain cut is the tool's
cut, not the server's failure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.core.limits import UNFINISHED_SHARE
from loadgen.core.metrics.columns import (
    CANCELLED,
    NEED_TWO_TOKENS,
    OK,
    POOLED,
    UNDEFINED,
    UNFINISHED,
    Columns,
)
from loadgen.core.slo import Slo, Term


def is_over_when_cut(columns: Columns, term: Term) -> NDArray[np.bool_]:
    """Which unfinished requests are over the limit of a term already, however they would have ended.

    By a lower bound of what the value would have become: the time up to the cut where the first token (for E2E: the
    end) had not come; for TPOT that time over all the tokens that were asked for; for the largest gap also the gap that
    was open at the cut. False where nothing is known, and for terms on pooled gaps.
    """
    cut = columns.where(UNFINISHED) & (columns["sent_ns"] >= 0)
    if term.metric in POOLED or not cut.any():
        return np.zeros(len(columns), bool)
    due, sent, now = columns["due_ns"], columns["sent_ns"], columns["done_ns"]
    first, answer, last = columns["first_token_ns"], columns["first_answer_ns"], columns["last_token_ns"]
    ended = columns["finish_reason"] > 0  # the answer was whole, only the end of its body was missing
    end = np.where(ended & (columns["end_ns"] >= 0), columns["end_ns"], now)
    tokens = columns["asked_output"].astype(np.int64)
    match term.metric:
        case "ttft":
            least = np.where(first >= 0, first, now) - due
        case "ttft_from_sent":
            least = np.where(first >= 0, first, now) - sent
        case "first_answer":
            least = np.where(answer >= 0, answer, now) - due
        case "e2e":
            least = end - due
        case "max_gap":
            least = np.maximum(columns["max_gap_ns"], np.where((last >= 0) & ~ended, now - last, 0))
        case _:  # tpot, tpot_mlperf
            divisor = tokens - (np.maximum(columns["first_event_tokens"], 1) if term.metric == "tpot" else 1)
            known = (first >= 0) & (divisor > 0)
            least = np.where(known, (end - first) // np.maximum(divisor, 1), 0)
    over: NDArray[np.bool_] = cut & (least > term.limit_ns)
    if term.metric != "e2e":
        over &= ~columns.for_values
    return over


def is_counted(columns: Columns, slo: Slo | None) -> NDArray[np.bool_]:
    """Which requests an SLO counts, as good or as a miss: all but cancelled ones, and of the unfinished ones those that
    are over a term already.
    """
    cut = columns.where(UNFINISHED)
    counted = ~(columns.where(CANCELLED) | cut)
    for term in slo.terms if slo is not None and cut.any() else ():
        counted |= is_over_when_cut(columns, term)
    return counted


def is_undecided(unfinished: int, counted: int) -> bool:
    """Whether more requests are unfinished than leave an SLO term decided. `counted`: all but cancelled requests."""
    return unfinished > UNFINISHED_SHARE * counted


def meets(columns: Columns, slo: Slo) -> NDArray[np.bool_]:
    """Which requests are ok and within every term that has a value per request: a mask of the length of the columns.

    A request too short to have a TPOT does not miss that term, nor does one that asked for no tokens miss any but E2E.
    """
    good = columns.where(OK)
    for term in slo.terms:
        if term.metric not in POOLED:
            values = columns.measure(term.metric)
            excused = (values == UNDEFINED) & (columns.for_values | (term.metric in NEED_TWO_TOKENS))
            good &= excused | ((values != UNDEFINED) & (values <= term.limit_ns))
    return good
