"""What an SLO says of each request: whether it counts, and whether it is good.

Pure. This is the one definition for runs, sweeps, searches, contracts, costs and reports. If the
end of the drain cuts a request, that is no failure of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.limits import UNFINISHED_SHARE
from loadgen.core.metrics.columns import CANCELLED, OK, UNDEFINED, UNFINISHED
from loadgen.figures import METRICS, needs, per_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.slo import Slo, Term


def is_over_when_cut(columns: Columns, term: Term) -> NDArray[np.bool_]:
    """Return which unfinished requests would have exceeded the limit of a term in any case.

    When the end of the drain cuts a request, its value of a metric is not known, but often a lower
    bound of it is: a request without a first token after 5 s has a TTFT of more than 5 s.
    `MetricDefinition.least` computes that bound. No request is over the limit if the metric has no
    such bound, as metrics of pooled gaps.
    """
    was_cut = columns.where(UNFINISHED) & (columns["sent_ns"] >= 0)
    definition = METRICS.get(term.metric)
    if definition is None or definition.least is None or not was_cut.any():
        return np.zeros(len(columns), bool)
    lower_bounds = METRICS.guard(definition, definition.least)(columns)
    is_over: NDArray[np.bool_] = was_cut & (lower_bounds > term.limit_ns)
    # A request that asks for no output has no value of a metric of output.
    return is_over & ~columns.request_no_output if definition.needs else is_over


def is_counted(columns: Columns, slo: Slo | None) -> NDArray[np.bool_]:
    """Return which requests count in the SLO attainment, as good or as a miss.

    These are all but cancelled and unfinished ones. An unfinished request counts, as a miss, if it
    was over the limit of a term already when the end of the drain cut it.
    """
    was_cut = columns.where(UNFINISHED)
    counted = ~(columns.where(CANCELLED) | was_cut)
    if slo is None or not was_cut.any():
        return counted
    for term in slo.terms:
        counted |= is_over_when_cut(columns, term)
    return counted


def is_undecided(unfinished: int, not_cancelled: int) -> bool:
    """Return True if more requests are unfinished than leave an SLO term decided."""
    return unfinished > UNFINISHED_SHARE * not_cancelled


def meets_slo(
    columns: Columns,
    slo: Slo,
    replaced_values: Mapping[str, NDArray[np.int64]] | None = None,
) -> NDArray[np.bool_]:
    """Return which requests are good: ok, and within the limit of every term on single requests.

    A request without a value misses a term, with two exceptions: a response that is too short to
    have a TPOT does not miss a term on TPOT, and a request that asks for no output misses no term
    on output. Terms on the gaps of all requests together judge no single request.

    Args:
        columns: The requests.
        slo: The SLO.
        replaced_values: Values of some metrics to use instead of the measured ones, such as bounds
            of uncertain values.
    """
    replaced_values = replaced_values or {}
    is_good = columns.where(OK)
    for term in slo.terms:
        if not per_request(term.metric):
            continue
        if term.metric in replaced_values:
            values = replaced_values[term.metric]
        else:
            values = columns.measure(term.metric)
        is_undefined = values == UNDEFINED
        is_within = ~is_undefined & (values <= term.limit_ns)
        may_be_undefined = columns.request_no_output | (needs(term.metric) == "tokens")
        is_good = is_good & (is_within | (is_undefined & may_be_undefined))
    return is_good


# -- lower bounds of the metrics of unfinished requests --------------------------------------------


def _time_to_event_or_cut(columns: Columns, event: str, start: str) -> NDArray[np.int64]:
    """Return the time from a start to an event, or to the cut if the event had not come."""
    event_ns = columns[event]
    time_ns: NDArray[np.int64] = np.where(event_ns >= 0, event_ns, columns["done_ns"])
    return time_ns - columns[start]


def least_ttft(columns: Columns) -> NDArray[np.int64]:
    """Return the least TTFT of unfinished requests."""
    return _time_to_event_or_cut(columns, "first_token_ns", "due_ns")


def least_ttft_from_sent(columns: Columns) -> NDArray[np.int64]:
    """Return the least TTFT from sent of unfinished requests."""
    return _time_to_event_or_cut(columns, "first_token_ns", "sent_ns")


def least_first_answer(columns: Columns) -> NDArray[np.int64]:
    """Return the least time to the first answer of unfinished requests."""
    return _time_to_event_or_cut(columns, "first_answer_ns", "due_ns")


def _is_complete(columns: Columns) -> NDArray[np.bool_]:
    """Return which responses have a finish reason, so that only the end of the body was missing."""
    mask: NDArray[np.bool_] = columns["finish_reason"] > 0
    return mask


def _end_or_cut_ns(columns: Columns) -> NDArray[np.int64]:
    """Return the end of each complete response, and the time of the cut for all others."""
    end_ns = columns["end_ns"]
    has_end = _is_complete(columns) & (end_ns >= 0)
    times_ns: NDArray[np.int64] = np.where(has_end, end_ns, columns["done_ns"])
    return times_ns


def least_e2e(columns: Columns) -> NDArray[np.int64]:
    """Return the least E2E of unfinished requests."""
    return _end_or_cut_ns(columns) - columns["due_ns"]


def least_max_gap(columns: Columns) -> NDArray[np.int64]:
    """Return the least largest gap of unfinished requests, the gap open at the cut included."""
    last_token_ns = columns["last_token_ns"]
    is_open = (last_token_ns >= 0) & ~_is_complete(columns)
    open_gap_ns = np.where(is_open, columns["done_ns"] - last_token_ns, 0)
    values: NDArray[np.int64] = np.maximum(columns["max_gap_ns"], open_gap_ns)
    return values


def _least_per_token(
    columns: Columns, excluded_tokens: NDArray[np.int64] | int
) -> NDArray[np.int64]:
    """Return a lower bound of the time per output token of unfinished requests.

    It is the time from the first token to the end or the cut, divided by the most tokens that the
    response could have had: the requested ones. It is 0 where no first token had come.

    Args:
        columns: The requests.
        excluded_tokens: How many tokens the metric does not divide by, such as those of the first
            event.
    """
    first_token_ns = columns["first_token_ns"]
    divisor = columns["asked_output"].astype(np.int64) - excluded_tokens
    per_token = (_end_or_cut_ns(columns) - first_token_ns) // np.maximum(divisor, 1)
    is_known = (first_token_ns >= 0) & (divisor > 0)
    values: NDArray[np.int64] = np.where(is_known, per_token, 0)
    return values


def least_tpot(columns: Columns) -> NDArray[np.int64]:
    """Return the least TPOT of unfinished requests."""
    return _least_per_token(columns, np.maximum(columns["first_event_tokens"], 1))


def least_tpot_mlperf(columns: Columns) -> NDArray[np.int64]:
    """Return the least TPOT by LoadGen's definition of unfinished requests."""
    return _least_per_token(columns, 1)


def least_e2e_per_token(columns: Columns) -> NDArray[np.int64]:
    """Return the least E2E per token of unfinished requests."""
    requested = columns["asked_output"].astype(np.int64)
    per_token = least_e2e(columns) // np.maximum(requested, 1)
    values: NDArray[np.int64] = np.where(requested > 0, per_token, 0)
    return values
