"""The lengths of the first requests of a load, which are known without building the requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts
from loadgen.core.requests.slot_layout import SlotLayout

SAMPLED_REQUESTS = 1_000
"""The number of requests whose lengths are computed. Later ones have the same distribution."""


class RequestedLengths(NamedTuple):
    """The requested lengths of one request, or the sums over all requests of a task.

    Attributes:
        requests: The number of requests.
        input_tokens: Content tokens of the prompts.
        output_tokens: Output tokens.
        non_generative_requests: The number of embeddings and rankings among the requests. Their
            sequences have no context in common.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    non_generative_requests: int = 0


class ClassShare(NamedTuple):
    """How much of the load is of one class.

    Attributes:
        name: The name of the class.
        sessions: The requested share of all sessions (single requests, conversations and tasks).
        requests: The share of the first requests.
        tokens: The share of the tokens of the first requests.
    """

    name: str
    sessions: float
    requests: float
    tokens: float


def first_request_lengths(
    prompts: Prompts, request_count: int | None
) -> dict[int, RequestedLengths]:
    """Return the lengths of the first requests by their ids.

    A length is 0 if the workload does not request one. `request_count` is the number of requests of
    the load, or None if it is not known.
    """
    sample_size = min(request_count or SAMPLED_REQUESTS, SAMPLED_REQUESTS)
    return {
        request_id: _requested_lengths(prompts, request_id)
        for request_id in prompts.request_ids(sample_size)
    }


def _requested_lengths(prompts: Prompts, request_id: int) -> RequestedLengths:
    """Return the lengths of one request.

    Embeddings and rankings request 0 output tokens, while None means that no length is requested.
    """
    output_tokens = prompts.requested_output_tokens(request_id)
    return RequestedLengths(
        requests=1,
        input_tokens=prompts.requested_input_tokens(request_id) or 0,
        output_tokens=output_tokens or 0,
        non_generative_requests=1 if output_tokens == 0 else 0,
    )


def context_lengths(
    first_requests: dict[int, RequestedLengths],
    template_tokens: int | None = None,
    token_ratio: float | None = None,
) -> list[int]:
    """Return the sum of prompt and output tokens of each request that generates text.

    It must fit into the context window of the model, which is checked before a run. Embeddings and
    rankings are left out: they generate nothing, and the model reads each of their sequences in a
    context of its own.

    Args:
        first_requests: The lengths of the first requests, by request id.
        template_tokens: The tokens that the server adds to a prompt, or None if they are not known.
        token_ratio: How many tokens the server counts for one token of the workload, or None if
            that is not known.
    """
    added_tokens = 0 if template_tokens is None else template_tokens
    ratio = token_ratio or 1.0
    generative_requests = [
        lengths for lengths in first_requests.values() if lengths.non_generative_requests == 0
    ]

    return [
        round(lengths.input_tokens * ratio) + added_tokens + lengths.output_tokens
        for lengths in generative_requests
    ]


def task_lengths(
    prompts: Prompts, first_requests: dict[int, RequestedLengths]
) -> list[RequestedLengths]:
    """Return the total lengths of each task or conversation among the first requests of a run.

    The last task is left out if there are several, because some of its requests may not be among
    the first requests. A single task is returned although it may be incomplete, because it is all
    that is known. Without tasks and conversations the list is empty.

    Args:
        prompts: The requests of the workload.
        first_requests: The lengths of the first requests, by request id.
    """
    if prompts.turns == 1:
        return []

    layout = SlotLayout(block_size=prompts.turns)
    requests_of_task: dict[int, list[RequestedLengths]] = {}
    for request_id, lengths in first_requests.items():
        if isinstance(prompts, MixPrompts) and prompts.is_single_request(request_id):
            continue  # Some classes of a mix may have single requests.
        task_index = layout.session_of(request_id)
        requests_of_task.setdefault(task_index, []).append(lengths)

    # The tasks are in order, because the request ids are.
    lengths_of_tasks = [_sum_lengths(requests) for requests in requests_of_task.values()]
    has_several_tasks = len(lengths_of_tasks) > 1
    return lengths_of_tasks[:-1] if has_several_tasks else lengths_of_tasks


def _sum_lengths(requests: Iterable[RequestedLengths]) -> RequestedLengths:
    """Return the sum of each field over the requests of a task."""
    return RequestedLengths(*(sum(column) for column in zip(*requests, strict=True)))


def class_shares(
    prompts: MixPrompts, first_requests: dict[int, RequestedLengths]
) -> Iterator[ClassShare]:
    """Yield the share of each request class in all sessions, all requests and all tokens.

    A session is a single request, a conversation or a task. The workload only requests the share of
    sessions. The share of tokens can be very different: a class of a few long tasks may be most of
    the load.

    Args:
        prompts: The requests of the workload, which is a mix of classes.
        first_requests: The lengths of the first requests, by request id.
    """
    tokens_of_class = dict.fromkeys(range(len(prompts.names)), 0)
    requests_of_class = dict.fromkeys(range(len(prompts.names)), 0)
    for request_id, lengths in first_requests.items():
        class_index = prompts.class_and_id(request_id).class_index
        requests_of_class[class_index] += 1
        tokens_of_class[class_index] += lengths.input_tokens + lengths.output_tokens

    # At least 1, because a workload may request no lengths at all.
    all_tokens = max(1, sum(tokens_of_class.values()))
    for class_index, name in enumerate(prompts.names):
        yield ClassShare(
            name,
            sessions=prompts.session_shares[class_index],
            requests=requests_of_class[class_index] / len(first_requests),
            tokens=tokens_of_class[class_index] / all_tokens,
        )
