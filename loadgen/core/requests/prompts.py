"""The interface of the requests of a workload, whatever their source is.

A request is a function of the workload, the seed, the salt and its id. It is the same on every
worker, in any order and at any time, and it can be built without building others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from loadgen_sdk.request import Request

from loadgen.core.requests.tokenizer import Tokenizer


class PromptTarget(NamedTuple):
    """What is known of the target that requests are built for.

    Attributes:
        template_tokens: The tokens that its chat template adds to a prompt of one message.
            Requested lengths include them, so generated texts are shorter by so many tokens. What
            the template adds for each further message is not known and not subtracted.
        api: The API that requests are sent to. Embeddings and rankings have no output tokens, and
            for a ranking the retrieved chunks are the documents.
        models: The models that it lists.
    """

    template_tokens: int = 0
    api: str = "chat"
    models: Collection[str] = ()


ANY_TARGET = PromptTarget()


class AssistantTurn(msgspec.Struct, frozen=True):
    """A response as later turns send it again.

    Attributes:
        text: The text of the response.
        calls: The tool calls in it, in the form that messages have.
    """

    text: str
    calls: tuple[dict[str, Any], ...] = ()


class Prompts(Protocol):
    """The requests of a workload: `prompts[request_id]` for any id from 0 on.

    The schedule decides how many of them are sent. `slot_layout.SlotLayout` defines the ids. It
    leaves some ids unused, which `request_ids` skips. A later turn of a conversation contains the
    earlier ones, with generated responses.

    Attributes:
        turns: The most requests of a conversation or task, the block size of the layout.
        history: "scripted" if later turns contain responses that are drawn from the seed, "server"
            if they contain the real responses.
    """

    turns: int
    history: str

    def __getitem__(self, request_id: int) -> Request: ...

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return a request with real responses of earlier turns in place of the scripted ones.

        Args:
            request_id: The id of the request.
            replies: The response of each turn of the conversation that has ended, by turn.
        """

    def needs_replies(self, request_id: int) -> bool:
        """Return True if a request contains real responses and cannot be built before them."""

    def request_ids(self, count: int) -> Iterable[int]:
        """Return the ids of the first `count` requests."""

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of the prompt as it is built, or None if they are unknown.

        The text is counted if the request itself has no count.
        """

    def requested_input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens that the workload requests, or None if it requests none.

        The request is not built.
        """

    def requested_output_tokens(self, request_id: int) -> int | None:
        """Return the output tokens that the workload requests, or None if it requests no length.

        They are 0 for embeddings and rankings.
        """

    def warnings(self, request_count: int) -> list[str]:
        """Return warnings for the user about the first requests, as sentences."""


def count_content_tokens(request: Request, tokenizer: Tokenizer) -> int | None:
    """Count the tokens of a request without those of the chat template.

    A request has a prompt, which is a text or a list of token ids, or messages. Return None if a
    part of a message is not text.
    """
    if isinstance(request.prompt, str):
        return tokenizer.count(request.prompt)

    if request.prompt is not None:
        token_ids = request.prompt
        return len(token_ids)

    tokens = 0
    for text in _message_texts(request.messages or []):
        if text is None:
            return None
        tokens += tokenizer.count(text)

    return tokens


def _message_texts(messages: Sequence[Mapping[str, object]]) -> Iterator[str | None]:
    """Yield the text of each part of each message, or None for a part that is not text.

    The content of a message is a text, or a list of parts such as texts and images.
    """
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            yield content if isinstance(content, str) else None
            continue

        for part in content:
            is_text_part = isinstance(part, dict) and part.get("type") == "text"
            text = part.get("text") if is_text_part else None
            yield text if isinstance(text, str) else None
