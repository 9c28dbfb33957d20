"""How long the requests of a load are, from their numbers alone: contexts, and what tasks and classes are. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts

SAMPLED_REQUESTS = 1_000  # requests; the lengths of those after them are drawn from the same laws


class RequestedLengths(NamedTuple):
    """The lengths of one request, or of all requests of a task together, in tokens as the workload counts them."""

    requests: int
    input_tokens: int
    output_tokens: int
    for_values: int = 0  # of these requests; embeddings and rankings, whose sequences stand alone


class ClassShare(NamedTuple):
    """A class: its share of all starts as asked, and which shares of the first requests and their tokens are of it."""

    name: str
    starts: float
    requests: float
    tokens: float


def first_request_lengths(prompts: Prompts, requests: int | None) -> dict[int, RequestedLengths]:
    """Number -> lengths of the first requests of a load of so many (None: not known). 0 where nobody says a length."""
    numbers = prompts.numbers(min(requests or SAMPLED_REQUESTS, SAMPLED_REQUESTS))
    first: dict[int, RequestedLengths] = {}
    for number in numbers:
        output = prompts.requested_output_tokens(number)
        first[number] = RequestedLengths(
            1, prompts.requested_input_tokens(number) or 0, output or 0, output == 0
        )
    return first


def context_lengths(
    first: dict[int, RequestedLengths],
    template_tokens: int | None = None,
    token_ratio: float | None = None,
) -> list[int]:
    """Prompt and answer of each request together, in tokens as a server counts them; not of those for values.

    `template_tokens`, `token_ratio`: what it adds to a prompt, and its count of our tokens over ours; None: not known.
    """
    ratio, template = token_ratio or 1.0, template_tokens or 0
    return [
        round(one.input_tokens * ratio) + template + one.output_tokens
        for one in first.values()
        if not one.for_values
    ]


def task_lengths(prompts: Prompts, first: dict[int, RequestedLengths]) -> list[RequestedLengths]:
    """The tasks and conversations among the first requests, but for the last of them, which may be cut."""
    if prompts.turns == 1:
        return []
    tasks: dict[int, list[RequestedLengths]] = {}
    for number, one in first.items():
        if not (isinstance(prompts, MixPrompts) and prompts.stands_alone(number)):
            tasks.setdefault(number // prompts.turns, []).append(one)
    if len(tasks) > 1:
        tasks.popitem()
    return [RequestedLengths(*map(sum, zip(*requests, strict=True))) for requests in tasks.values()]


def class_shares(prompts: MixPrompts, first: dict[int, RequestedLengths]) -> Iterator[ClassShare]:
    """What each class is of the first requests."""
    everything = sum(one.input_tokens + one.output_tokens for one in first.values()) or 1
    for index, (name, share) in enumerate(zip(prompts.names, prompts.shares, strict=True)):
        own = [one for number, one in first.items() if prompts.class_and_number(number)[0] == index]
        tokens = sum(one.input_tokens + one.output_tokens for one in own)
        yield ClassShare(name, share, len(own) / len(first), tokens / everything)
