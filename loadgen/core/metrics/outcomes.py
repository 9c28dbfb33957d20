"""What an SLO says of each request: whether it counts, and whether it is good.

Pure. This is the one definition for runs, sweeps, searches, contracts, costs and reports. If the
end of the drain cuts a request, that is no failure of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.limits import UNFINISHED_SHARE
from loadgen.core.metrics.columns import CANCELLED, UNDEFINED, UNFINISHED
from loadgen.figures import METRICS, needs, per_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.slo import Slo, Term


def is_over_when_cut(columns: Columns, term: Term) -> NDArray[np.bool_]:
    """Return which unfinished requests had exceeded the limit of a term when they were cut.

    The end of a run cuts requests that are still in flight. The latency of such a request is not
    known, but it may have a lower bound: a request without a first token after 5 s has a TTFT of
    more than 5 s. So it is over a limit of 4 s.

    Args:
        columns: The records of the requests.
        term: A term of an SLO: a metric with a limit.
    """
    no_request = np.zeros(len(columns), bool)

    was_cut = columns.has_status(UNFINISHED) & columns.is_known("sent_ns")
    if not was_cut.any():
        return no_request

    lower_bounds_ns = _lower_bounds_ns(columns, term.metric)
    if lower_bounds_ns is None:
        return no_request

    is_over: NDArray[np.bool_] = was_cut & (lower_bounds_ns > term.limit_ns)

    # A request for no output, such as an embedding, has no TTFT that could be over a limit.
    if _is_metric_of_output(term.metric):
        requests_output = columns.expects_output
        is_over &= requests_output

    return is_over


def _is_metric_of_output(metric: str) -> bool:
    """Return True if only responses with output have a value of the metric."""
    return needs(metric) != ""


def _lower_bounds_ns(columns: Columns, metric: str) -> NDArray[np.int64] | None:
    """Return lower bounds of a metric of unfinished requests, or None if it has no bounds."""
    definition = METRICS.get(metric)
    if definition is None or definition.least is None:
        return None

    # A metric may come from an installed package, which an error then names.
    compute_lower_bounds = METRICS.guard(definition, definition.least)
    return compute_lower_bounds(columns)


def is_counted(columns: Columns, slo: Slo | None) -> NDArray[np.bool_]:
    """Return which requests count in the SLO attainment, the share of good requests.

    Cancelled requests do not count. A request that the end of the run cut off counts only if it was
    already over a limit of the SLO then.
    """
    was_cut = columns.has_status(UNFINISHED)
    was_cancelled = columns.has_status(CANCELLED)
    has_ended = ~(was_cancelled | was_cut)
    if slo is None or not was_cut.any():
        return has_ended

    does_count = has_ended
    for term in slo.terms:
        does_count = does_count | is_over_when_cut(columns, term)
    return does_count


def is_undecided(unfinished: int, not_cancelled: int) -> bool:
    """Return True if so many requests are unfinished that they could decide an SLO.

    Args:
        unfinished: The number of unfinished requests.
        not_cancelled: The number of all requests but cancelled ones.
    """
    return unfinished > UNFINISHED_SHARE * not_cancelled


def meets_slo(
    columns: Columns,
    slo: Slo,
    replaced_values: Mapping[str, NDArray[np.int64]] | None = None,
) -> NDArray[np.bool_]:
    """Return which requests are good: ok, and within the limit of every term on single requests.

    Args:
        columns: The requests.
        slo: The SLO.
        replaced_values: Values of some metrics to use instead of the measured ones, such as bounds
            of uncertain values.
    """
    replaced_values = replaced_values or {}
    is_good = columns.is_ok
    for term in slo.terms:
        if not per_request(term.metric):
            continue

        values = replaced_values.get(term.metric)
        if values is None:
            values = columns.measure(term.metric)
        is_good = is_good & _meets_term(columns, term, values)

    return is_good


def _meets_term(columns: Columns, term: Term, values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which requests meet a term of an SLO, a limit on the value of a metric.

    Some requests without a value meet the term, too: responses that are too short to have the
    metric, and requests for no output, such as embeddings.

    Args:
        columns: The requests.
        term: The term.
        values: The value of each request, UNDEFINED for one without a value.
    """
    has_value = values != UNDEFINED
    is_within_limit = values <= term.limit_ns

    # A response of one token, for example, has no time per output token.
    does_metric_need_tokens = needs(term.metric) == "tokens"
    if does_metric_need_tokens:
        is_met: NDArray[np.bool_] = ~has_value | is_within_limit
        return is_met

    has_no_output = ~columns.expects_output
    return np.where(has_value, is_within_limit, has_no_output)


# -- lower bounds of the metrics of unfinished requests --------------------------------------------


def _time_to_event_or_cut(columns: Columns, event: str, start: str) -> NDArray[np.int64]:
    """Return the time from a start to an event, or to the cut if the event had not come."""
    has_come = columns.is_known(event)
    time_ns: NDArray[np.int64] = np.where(has_come, columns[event], columns["done_ns"])
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
    has_end = _is_complete(columns) & columns.is_known("end_ns")
    times_ns: NDArray[np.int64] = np.where(has_end, columns["end_ns"], columns["done_ns"])
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


def _least_time_per_token(
    columns: Columns, first_tokens: NDArray[np.int64] | int
) -> NDArray[np.int64]:
    """Return a lower bound of the time per output token of unfinished requests, in ns.

    A response has at most as many tokens as were requested. If it was cut 10 s after its first
    token, and 101 tokens were requested, the time per token after the first one is at least
    10 s / 100 = 0.1 s. The bound is 0 for a request of which nothing is known.

    Args:
        columns: The records of the requests.
        first_tokens: How many tokens at the start of each response do not count.
    """
    last_known_ns = _end_or_cut_ns(columns)
    time_since_first_token_ns = last_known_ns - columns["first_token_ns"]
    requested_tokens = columns["asked_output"].astype(np.int64)
    most_later_tokens = requested_tokens - first_tokens

    is_bounded = columns.is_known("first_token_ns") & (most_later_tokens > 0)
    divisors = np.maximum(most_later_tokens, 1)  # never 0
    lower_bounds_ns: NDArray[np.int64] = np.where(
        is_bounded, time_since_first_token_ns // divisors, 0
    )
    return lower_bounds_ns


def least_tpot(columns: Columns) -> NDArray[np.int64]:
    """Return the least TPOT of unfinished requests, which excludes the tokens of the first event.

    The first event counts as one token if the server does not say how many it has.
    """
    tokens_of_first_event = np.maximum(columns["first_event_tokens"], 1)
    return _least_time_per_token(columns, first_tokens=tokens_of_first_event)


def least_tpot_mlperf(columns: Columns) -> NDArray[np.int64]:
    """Return the least TPOT by LoadGen's definition of unfinished requests."""
    return _least_time_per_token(columns, first_tokens=1)


def least_e2e_per_token(columns: Columns) -> NDArray[np.int64]:
    """Return the least E2E per token of unfinished requests."""
    requested = columns["asked_output"].astype(np.int64)
    per_token = least_e2e(columns) // np.maximum(requested, 1)
    values: NDArray[np.int64] = np.where(requested > 0, per_token, 0)
    return values
