"""What an SLO says of each request: whether it counts, and whether it is good. Pure, on columns.

The one definition for runs, sweeps, searches, contracts, costs and reports. What the end of the drain cut is the tool's
cut, not the server's failure.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from loadgen.core.limits import UNFINISHED_SHARE
from loadgen.core.metrics.columns import CANCELLED, OK, UNDEFINED, UNFINISHED, Columns
from loadgen.core.slo import Slo, Term
from loadgen.figures import FIGURES, needs, per_request


def is_over_when_cut(columns: Columns, term: Term) -> NDArray[np.bool_]:
    """Which unfinished requests are over the limit of a term already, however they would have ended.

    By a lower bound of what the value would have become: the time up to the cut where the first token (for E2E: the
    end) had not come; for TPOT that time over all the tokens that were asked for; for the largest gap also the gap that
    was open at the cut. False where nothing is known, and for terms on pooled gaps.
    """
    cut = columns.where(UNFINISHED) & (columns["sent_ns"] >= 0)
    row = FIGURES.called(term.metric)
    if row is None or row.least is None or not cut.any():
        return np.zeros(len(columns), bool)
    over: NDArray[np.bool_] = cut & (FIGURES.guard(row, row.least)(columns) > term.limit_ns)
    return over & ~columns.for_values if row.needs else over


def _until(columns: Columns, arrived: str, since: str) -> NDArray[np.int64]:
    """From an instant to another, or to the cut where that had not come."""
    at = columns[arrived]
    values: NDArray[np.int64] = np.where(at >= 0, at, columns["done_ns"]) - columns[since]
    return values


def least_ttft(columns: Columns) -> NDArray[np.int64]:
    return _until(columns, "first_token_ns", "due_ns")


def least_ttft_from_sent(columns: Columns) -> NDArray[np.int64]:
    return _until(columns, "first_token_ns", "sent_ns")


def least_first_answer(columns: Columns) -> NDArray[np.int64]:
    return _until(columns, "first_answer_ns", "due_ns")


def _has_ended(columns: Columns) -> NDArray[np.bool_]:
    """Which answers were whole: only the end of their bodies was missing."""
    mask: NDArray[np.bool_] = columns["finish_reason"] > 0
    return mask


def _end(columns: Columns) -> NDArray[np.int64]:
    end = columns["end_ns"]
    values: NDArray[np.int64] = np.where(_has_ended(columns) & (end >= 0), end, columns["done_ns"])
    return values


def least_e2e(columns: Columns) -> NDArray[np.int64]:
    return _end(columns) - columns["due_ns"]


def least_max_gap(columns: Columns) -> NDArray[np.int64]:
    """Also the gap that was open at the cut."""
    last = columns["last_token_ns"]
    is_open = (last >= 0) & ~_has_ended(columns)
    values: NDArray[np.int64] = np.maximum(
        columns["max_gap_ns"], np.where(is_open, columns["done_ns"] - last, 0)
    )
    return values


def _least_per_token(columns: Columns, without: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """The time since the first token over all tokens that were asked for, but these."""
    first, divisor = columns["first_token_ns"], columns["asked_output"].astype(np.int64) - without
    span = (_end(columns) - first) // np.maximum(divisor, 1)
    values: NDArray[np.int64] = np.where((first >= 0) & (divisor > 0), span, 0)
    return values


def least_tpot(columns: Columns) -> NDArray[np.int64]:
    return _least_per_token(columns, np.maximum(columns["first_event_tokens"], 1))


def least_tpot_mlperf(columns: Columns) -> NDArray[np.int64]:
    return _least_per_token(columns, 1)


def least_e2e_per_token(columns: Columns) -> NDArray[np.int64]:
    """The time up to the end over all tokens that were asked for."""
    asked = columns["asked_output"].astype(np.int64)
    values: NDArray[np.int64] = np.where(asked > 0, least_e2e(columns) // np.maximum(asked, 1), 0)
    return values


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


def meets(
    columns: Columns, slo: Slo, values_of: Mapping[str, NDArray[np.int64]] | None = None
) -> NDArray[np.bool_]:
    """Return which requests are ok and within every term that has a value per request.

    `values_of` has the values of some metrics in place of the measured ones. A request too short to
    have a TPOT does not miss that term. One that asked for no tokens misses no term but E2E.
    """
    good = columns.where(OK)
    for term in slo.terms:
        if per_request(term.metric):
            if values_of is not None and term.metric in values_of:
                values = values_of[term.metric]
            else:
                values = columns.measure(term.metric)
            excused = (values == UNDEFINED) & (
                columns.for_values | (needs(term.metric) == "tokens")
            )
            good = good & (excused | ((values != UNDEFINED) & (values <= term.limit_ns)))
    return good
