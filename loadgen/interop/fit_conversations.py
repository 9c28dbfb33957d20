"""The conversations of a trace, and the distributions that a workload can describe them by.

A workload describes conversations by four distributions: the length of the first prompt, the number
of later requests, the tokens that each of them adds, and the pause of the user before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core.units import UNIT_NS
from loadgen.core.workload.tasks import MAX_TASK_REQUESTS
from loadgen.core.workload.trace import Trace
from loadgen.core.workload.trace_formats import UNKNOWN_NS
from loadgen.interop.distribution_fits import DistributionFit, fit_lengths, prefer_parametric

MIN_CONVERSATIONS = 20
"""Fewer conversations are too few to fit distributions to."""
MIN_GROWING_SHARE = 0.9
"""The share of later prompts that must be longer than the conversation before them. A few may be
shorter, because applications shorten long conversations."""

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


class ConversationFit(Struct, frozen=True, kw_only=True):
    """The distributions of conversations. In each tuple, the fit that the workload uses is first.

    Attributes:
        first_input_tokens: The tokens of the first prompt.
        later_requests: The number of requests after the first one.
        added_tokens: The tokens by which a prompt is longer than the prompt and the response before
            it together.
        think_ms: The time from the end of a response to the next request.
    """

    first_input_tokens: tuple[DistributionFit, ...]
    later_requests: tuple[DistributionFit, ...]
    added_tokens: tuple[DistributionFit, ...]
    think_ms: tuple[DistributionFit, ...]


class TraceConversations(Struct, frozen=True, kw_only=True):
    """Which requests of a trace belong to conversations of several requests.

    Attributes:
        is_member: For each request, whether it belongs to such a conversation.
        starts: The indices of the requests that begin a conversation or stand alone.
        later: The indices of all other requests: those that continue a conversation.
        previous: For each of `later`, the index of the request before it in its conversation.
        not_modelled_reason: Why distributions cannot describe the conversations of this trace. All
            requests stand alone then. "" if they can, or if there are none.
        subagents: The number of conversations that belong to sub-agents.
    """

    is_member: Mask
    starts: Indices
    later: Indices
    previous: Indices
    not_modelled_reason: str = ""
    subagents: int = 0


class _SuccessiveRequests(NamedTuple):
    """Pairs of requests that follow each other in a session.

    Attributes:
        previous: The index in the trace of the first request of each pair.
        later: The index of the second one.
    """

    previous: Indices
    later: Indices


def find_conversations(trace: Trace) -> TraceConversations:
    """Return which requests of a trace belong to conversations.

    A conversation is a session with several requests. A workload describes conversations by a few
    distributions, for example of the tokens that each request adds. If this is not possible for
    the conversations of this trace, the result says why, and every request is taken to stand alone.
    """
    pairs = _find_successive_requests(trace)
    conversations, later_counts = np.unique(trace.session[pairs.later], return_counts=True)
    if len(conversations) == 0:
        return _without_conversations(trace, reason="")

    reason = _explain_unfit_conversations(trace, pairs.later, pairs.previous, later_counts)
    if reason:
        return _without_conversations(trace, reason)

    is_start = np.ones(len(trace), bool)
    is_start[pairs.later] = False
    is_member = np.isin(trace.session, conversations)

    # A group is an agent with its sub-agents. It has one conversation of the agent itself, and all
    # others are those of sub-agents.
    group_count = len(np.unique(trace.group[is_member]))
    return TraceConversations(
        is_member=is_member,
        starts=np.flatnonzero(is_start),
        later=pairs.later,
        previous=pairs.previous,
        subagents=len(conversations) - group_count,
    )


def _find_successive_requests(trace: Trace) -> _SuccessiveRequests:
    """Return the indices of all pairs of requests that follow each other in a session.

    For example, requests 0, 2 and 3 of one session are the pairs (0, 2) and (2, 3), so `previous`
    is [0, 2] and `later` is [2, 3].
    """
    in_sessions = np.flatnonzero(trace.session >= 0)
    # Rows are in order of time, and a stable sort keeps this order within each session.
    by_session = in_sessions[np.argsort(trace.session[in_sessions], kind="stable")]
    is_same_session = np.diff(trace.session[by_session]) == 0
    return _SuccessiveRequests(
        previous=by_session[:-1][is_same_session], later=by_session[1:][is_same_session]
    )


def fit_conversations(
    trace: Trace, conversations: TraceConversations, is_selected: Mask
) -> ConversationFit:
    """Fit distributions to some of the conversations of a trace.

    They describe the length of the first prompt, the number of later requests, and for each of
    these the tokens that it adds to the prompt and the think time before it.

    Args:
        trace: The trace.
        conversations: Its conversations.
        is_selected: For each request of the trace, whether its conversation is selected.
    """
    first_indices = _select_first_requests(conversations, is_selected)
    is_selected_pair = is_selected[conversations.later]
    later_indices = conversations.later[is_selected_pair]
    previous_indices = conversations.previous[is_selected_pair]
    _, later_counts = np.unique(trace.session[later_indices], return_counts=True)
    added_tokens = _added_tokens(trace, later_indices, previous_indices)
    think_ms = np.rint(_think_ns(trace, later_indices, previous_indices) / UNIT_NS["ms"])

    # A workload file takes numbers of at least one token and 1 ms.
    return ConversationFit(
        first_input_tokens=_fit_at_least_one(trace.input_tokens[first_indices]),
        later_requests=_fit_at_least_one(later_counts),
        added_tokens=_fit_at_least_one(added_tokens),
        think_ms=_fit_at_least_one(think_ms.astype(np.int64)),
    )


def _select_first_requests(conversations: TraceConversations, is_selected: Mask) -> Indices:
    """Return the indices of the requests that begin a selected conversation.

    Requests that stand alone begin no conversation.
    """
    starts = conversations.starts
    return starts[is_selected[starts] & conversations.is_member[starts]]


def _fit_at_least_one(values: NDArray[Any]) -> tuple[DistributionFit, ...]:
    """Return the fits of whole numbers, after raising those below 1 to 1. The best one is first."""
    return prefer_parametric(fit_lengths(np.maximum(1, values)))


def _without_conversations(trace: Trace, reason: str) -> TraceConversations:
    """Return the value for a trace in which every request is taken to stand alone."""
    no_indices = np.zeros(0, np.int64)
    return TraceConversations(
        is_member=np.zeros(len(trace), bool),
        starts=np.arange(len(trace)),
        later=no_indices,
        previous=no_indices,
        not_modelled_reason=reason,
    )


def _explain_unfit_conversations(
    trace: Trace,
    later_indices: Indices,
    previous_indices: Indices,
    later_counts: NDArray[np.int64],
) -> str:
    """Return why the conversations cannot be described by distributions, or "" if they can.

    Args:
        trace: The trace.
        later_indices: The indices of the requests that continue a conversation.
        previous_indices: For each of them, the index of the request before it.
        later_counts: The number of later requests of each conversation.
    """
    if len(later_counts) < MIN_CONVERSATIONS:
        return f"{len(later_counts)} conversations are too few to fit distributions"

    most_requests = int(later_counts.max()) + 1
    if most_requests > MAX_TASK_REQUESTS:
        return (
            f"a conversation has {most_requests:,} requests, but a task can have at "
            f"most {MAX_TASK_REQUESTS:,}"
        )
    if (_think_ns(trace, later_indices, previous_indices) == UNKNOWN_NS).any():
        return "the trace records neither the end of responses nor the pauses between requests"

    is_growing = _added_tokens(trace, later_indices, previous_indices) > 0
    if float(is_growing.mean()) < MIN_GROWING_SHARE:
        return "the prompts do not contain the earlier messages of their conversation"

    return ""


def _added_tokens(trace: Trace, later: Indices, previous: Indices) -> NDArray[np.int64]:
    """Return how many tokens each later prompt adds to the prompt and the response before it."""
    input_tokens = trace.input_tokens.astype(np.int64)
    output_tokens = trace.output_tokens.astype(np.int64)
    added: NDArray[np.int64] = (
        input_tokens[later] - input_tokens[previous] - output_tokens[previous]
    )
    return added


def _think_ns(trace: Trace, later: Indices, previous: Indices) -> NDArray[np.int64]:
    """Return the pause of the user before each later request, UNKNOWN_NS where it is not known.

    A trace contains either this pause or the end of responses, from which it follows.
    """
    recorded_ns = trace.pause_ns[later]
    duration_ns = trace.duration_ns[previous]
    elapsed_ns = trace.due_ns[later] - trace.due_ns[previous]
    computed_ns = np.where(duration_ns >= 0, np.maximum(0, elapsed_ns - duration_ns), UNKNOWN_NS)
    return np.where(recorded_ns >= 0, recorded_ns, computed_ns)
