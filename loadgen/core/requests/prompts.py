"""Workload + seed + salt -> requests. Pure: request `number` is the same on every worker, in any order, at any time.

Every random draw is a hash of (seed, salt, purpose, number), see `laws`; no request depends on another one. This module
does not wait, send, or import a tokenizer library.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import numpy as np
from loadgen_sdk.hashing import sum_of_hashes
from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS
from loadgen_sdk.words import text_writer

from loadgen.core import format
from loadgen.core.requests import images
from loadgen.core.requests.chunks import Corpus
from loadgen.core.requests.laws import (
    LengthSampler,
    derive_key,
    length_sampler,
    random_bytes,
    sample_lengths,
)
from loadgen.core.requests.natural import NaturalText
from loadgen.core.requests.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
HEAD = 4  # content tokens in which unique prompts differ (metrics.md)
FIRST = 64  # requests in the fingerprint of an endless load
SAMPLE = 256  # conversations whose lengths are checked for warnings
KEPT = 8  # requests that are built, encoded and hashed together: more would not stay in the processor's cache
KEPT_BYTES = (
    1 << 23
)  # of a data set: the rows of a larger file are read again, each by each request of it
CHECKED = 16  # requests that are built and counted for warnings, with tokenizers that need counting


class AssistantTurn(msgspec.Struct, frozen=True):
    """An answer as later turns re-send it: its text, and the calls of tools in it, as messages have them."""

    text: str
    calls: tuple[dict[str, Any], ...] = ()


class Prompts(Protocol):
    """`prompts[number]` for any number from 0; the schedule decides how many are sent.

    With conversations, number = conversation * turns + turn, and `prompts[number]` contains the scripted history. Where
    they have fewer turns than `turns`, some numbers are not used: see `numbers`.
    """

    turns: int
    history: str  # "scripted" | "server"

    def __getitem__(self, number: int) -> Request: ...

    def with_replies(self, number: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return the same request with the real answers of the earlier turns instead of the scripted ones.

        `replies`: the answer of each turn of the conversation that has ended.
        """

    def needs_replies(self, number: int) -> bool:
        """Whether a request re-sends real answers, so that it cannot be built before them."""

    def numbers(self, count: int) -> Iterable[int]:
        """The numbers of the first so many requests."""

    def input_tokens(self, number: int) -> int | None:
        """Content tokens of the prompt; counts the text if the request has no count. None if they are unknown."""

    def requested_input_tokens(self, number: int) -> int | None:
        """Content tokens of the prompt that the workload asks for, without building it; None if they are unknown."""

    def requested_output_tokens(self, number: int) -> int | None:
        """Tokens asked for as its answer: 0 where answers are values; None where no length is asked for."""

    def warnings(self, n: int) -> list[str]:
        """Warnings for the user about the first `n` requests, as sentences."""


_ONE_TOKEN = SimpleNamespace(tag="fixed", value=1)
NO_LENGTHS = SimpleNamespace(
    turns=None,
    input_tokens=_ONE_TOKEN,
    output_tokens=_ONE_TOKEN,
    shared_prefix_tokens=0,
    system_tokens=0,
    prefixes=1,
)
"""Of prompts whose lengths come from somewhere else: a trace, the steps of a task."""


class SyntheticPrompts:
    """Prompts of exact length, made of words that are one token each, or behind some of these of a natural text.

    The (first) user message has `input_tokens`; the first `shared_prefix_tokens` of them come from one of `prefixes`
    shared texts. Before it stands a system message of `system_tokens`, equal for all requests. A tool result is sent as
    a user message, because every server accepts that without a tool call.

    `template_tokens`: what the server adds to a prompt of one message. The text is shorter by so many, so that the
    server counts what the workload asks for. What it adds for each further message is not known, and comes on top.
    """

    def __init__(
        self,
        requests: Any,
        seed: int,
        salt: int,
        tokenizer: Tokenizer,
        template_tokens: int = 0,
        api: str = "chat",
    ) -> None:
        self._api = api
        self._images: Any = getattr(requests, "images", None)
        self._template = max(0, template_tokens)
        self._lengths_key, self._texts_key = derive_key(seed), derive_key(seed, salt)
        turns = requests.turns
        self.turns: int = turns.count if turns else 1
        self.history: str = turns.history if turns else "scripted"
        self._length_laws = {"input": requests.input_tokens, "output": requests.output_tokens}
        self._length_laws["tool"] = turns.tool_result_tokens if turns else _ONE_TOKEN
        self._input_length, self._output_length = (
            length_sampler(requests.input_tokens),
            length_sampler(requests.output_tokens),
        )
        self._tool_result = length_sampler(turns.tool_result_tokens) if turns else None
        self._prefix_tokens: int = requests.shared_prefix_tokens
        self._prefixes: int = requests.prefixes
        self._cached: float | None = getattr(requests, "cache", None)
        self._chunks = (
            Corpus(requests.chunks, self._lengths_key)
            if getattr(requests, "chunks", None)
            else None
        )
        self._system_tokens: int = requests.system_tokens
        self._tokenizer, self.input_source = tokenizer, tokenizer.tag
        self._natural = (
            NaturalText(tokenizer) if getattr(requests, "prompts", "") == "natural" else None
        )
        self._starts, self._words, self._word_count = (
            tokenizer.starts,
            tokenizer.words,
            len(tokenizer.words),
        )
        # number -> (step * number + offset) mod combinations is one to one, also in its low digits
        self._combinations = len(self._starts) * len(self._words) ** (HEAD - 1)
        self._offset = int.from_bytes(random_bytes(self._texts_key, "offset", 0, 16), "little")
        self._step = int.from_bytes(random_bytes(self._texts_key, "step", 0, 16), "little") | 1
        while math.gcd(self._step, self._combinations) != 1:
            self._step += 2
        self._step, self._offset = (
            self._step % self._combinations,
            self._offset % self._combinations,
        )  # small numbers
        self._shared_text = functools.lru_cache(maxsize=256)(self._exact_text)
        self._said_before = functools.lru_cache(maxsize=1024)(
            self._exact_text
        )  # each later turn has it again
        self._id = self._texts_key.hex()[:8]
        begins_alike = self._chunks is not None or self._prefix_tokens or self._cached is not None
        self._of_own_words = tokenizer.additive and self._natural is None and not begins_alike
        of_more = (
            self._system_tokens or self.turns > 1 or self._images is not None or api == "rerank"
        )
        self.has_single_text = requests is not NO_LENGTHS and (api == "embeddings" or not of_more)

    def __getitem__(self, number: int) -> Request:
        return next(self.texts((number,))) if self.has_single_text else self._request(number, None)

    _write = functools.cached_property(lambda self: text_writer(self._words))

    def texts(self, numbers: Iterable[int]) -> Iterator[Request]:
        """The requests of these numbers, where each is `has_single_text`."""
        name, source, values, derive_key = (
            self._id,
            self._tokenizer.tag,
            self._api in NON_GENERATIVE_APIS,
            self._lengths_key,
        )
        first_message, length = self._first_message, self._output_length
        for number in numbers:
            text, tokens = first_message(number)
            asked = None if values else length(derive_key, "output", number)
            yield Request(
                id=f"{name}-{number}",
                prompt=text,
                max_tokens=asked,
                input_tokens=tokens,
                input_source=source,
            )

    def with_replies(self, number: int, replies: Mapping[int, AssistantTurn]) -> Request:
        if missing := set(range(number % self.turns)) - replies.keys():
            raise ValueError(
                f"turn {number % self.turns} follows the replies of turns {sorted(missing)} too"
            )
        return self._request(number, replies)

    def needs_replies(self, number: int) -> bool:
        return self.history == "server" and number % self.turns > 0

    def numbers(self, count: int) -> Iterable[int]:
        return range(count)

    def input_tokens(self, number: int) -> int | None:
        return self[number].input_tokens

    def requested_input_tokens(self, number: int) -> int:
        """Content tokens of the prompt that the workload asks for; `input_tokens` may be the nearest possible."""
        conversation, turn = divmod(number, self.turns)
        tokens = self._system_tokens + self._first_message_tokens(conversation)
        for earlier in range(number - turn, number):
            tokens += self.requested_output_tokens(earlier) + self._tool_result_tokens(earlier + 1)
        return tokens

    def requested_output_tokens(self, number: int) -> int:
        return (
            0
            if self._api in NON_GENERATIVE_APIS
            else self._output_length(self._lengths_key, "output", number)
        )

    def sample_lengths(self, what: str, numbers: Sequence[int]) -> list[int]:
        """The tokens of the `input` of each of these conversations, or of the `output` of each of these requests, or of
        the `tool` result before each, faster than singly.
        """
        tokens = sample_lengths(self._length_laws[what], self._lengths_key, what, numbers)
        return (
            list(map(self._without_template, tokens))
            if what == "input" and self._template
            else tokens
        )

    def prefix_group(self, conversation: int) -> int:
        """The number of the shared prefix that a conversation (or a single request) begins with, below `prefixes`."""
        return (
            int.from_bytes(
                random_bytes(self._lengths_key, "which prefix", conversation, 8), "little"
            )
            % self._prefixes
        )

    def shared_tokens(self, conversation: int) -> int:
        """With how many tokens a conversation begins that all of its prefix group begin with.

        For a share of the cache: so many that with those of the template they are that share of the prompt.
        """
        return self.shared_tokens_of_length(self._first_message_tokens(conversation))

    def shared_tokens_of_length(self, n: int) -> int:
        """`shared_tokens` of a conversation whose first message has n tokens."""
        if self._cached is None:
            return min(n, self._prefix_tokens)
        asked = round(self._cached * (n + self._template)) - self._template
        return max(0, min(asked, n - HEAD))

    def chunks_of(self, number: int) -> tuple[int, ...]:
        """The chunks that a prompt begins with, in order; () without retrieval."""
        return () if self._chunks is None else self._chunks.of(number)

    def measure_chunk_reuse(self, n: int) -> tuple[float, float] | None:
        """Of the chunks of the first n prompts, the share that an earlier prompt had, and that one had after the same
        chunks. None without retrieval.
        """
        return None if self._chunks is None else self._chunks.reuse(n)

    def warnings(self, n: int) -> list[str]:
        messages = []
        conversations = range(min(-(-n // self.turns), SAMPLE))
        unique = min(
            (self._first_message_tokens(one) - self.shared_tokens(one) for one in conversations),
            default=HEAD,
        )
        if unique < HEAD:
            messages.append(
                f"some prompts have only {format.counted(max(0, unique), 'token')} of their own, {HEAD} are needed to "
                "make each different: the server's prefix cache may know them"
            )
        if not self._tokenizer.additive:
            sample = range(min(n, CHECKED))
            inexact = sum(
                self[number].input_tokens != self.requested_input_tokens(number)
                for number in sample
            )
            if inexact:
                messages.append(
                    f"{inexact} of the first {len(sample)} prompts could not be given exactly the tokens asked for "
                    f"with {self._tokenizer.name}; each request carries its true count"
                )
        return messages

    def _request(self, number: int, replies: Mapping[int, AssistantTurn] | None) -> Request:
        if self._api == "rerank" and self._chunks is not None:
            return self._ranking(number, self._chunks)
        conversation, turn = divmod(number, self.turns)
        content, prompt_tokens = self._first_message(conversation)
        messages: list[dict[str, Any]] = []
        if self._system_tokens:
            system, system_n = self._shared_text("system", 0, self._system_tokens)
            messages.append({"role": "system", "content": system})
            prompt_tokens += system_n
        messages.append(
            {
                "role": "user",
                "content": content if self._images is None else self._parts(number, content),
            }
        )
        for earlier in range(number - turn, number):
            if replies is None:
                reply, reply_n = self._said_before(
                    "reply", earlier, self.requested_output_tokens(earlier)
                )
            else:
                reply, reply_n = replies[earlier % self.turns].text, 0
            result, result_n = self._said_before(
                "tool", earlier + 1, self._tool_result_tokens(earlier + 1)
            )
            prompt_tokens += reply_n + result_n
            messages += {"role": "assistant", "content": reply}, {"role": "user", "content": result}
        count_content_tokens = (
            replies is None and self._images is None
        )  # what an image counts is the server's matter
        return Request(
            id=f"{self._id}-{number}",
            messages=messages,
            max_tokens=self.requested_output_tokens(number),
            input_tokens=prompt_tokens if count_content_tokens else None,
            input_source=self._tokenizer.tag if count_content_tokens else "",
            session=conversation if self.turns > 1 else -1,
            turn=turn,
        )

    def _ranking(self, number: int, chunks: Corpus) -> Request:
        """A query with the chunks as its documents."""
        texts = [self._shared_text("chunk", chunk, chunks.tokens) for chunk in chunks.of(number)]
        own = self._first_message_tokens(number) - sum(tokens for _, tokens in texts)
        text, tokens = self._exact_text("user", number, own, self._unique_head(number, own))
        tokens = sum(
            tokens + of_document for _, of_document in texts
        )  # the query goes with each document
        extra = {"documents": [text for text, _ in texts]}
        return Request(
            id=f"{self._id}-{number}",
            prompt=text,
            input_tokens=tokens,
            input_source=self._tokenizer.tag,
            extra=extra,
        )

    def sequence_lengths(self, number: int) -> tuple[int, ...]:
        """The tokens of each sequence that a request for values has: its text, or each document with the query."""
        tokens = self._first_message_tokens(number)
        if self._api == "embeddings" or self._chunks is None:
            return (tokens,)
        documents = len(self._chunks.of(number))
        return (tokens - documents * self._chunks.tokens + self._chunks.tokens,) * documents

    def _parts(self, number: int, text: str) -> list[dict[str, Any]]:
        """The parts of a message with images: no two images are alike."""
        urls = (
            images.render_data_url(
                self._texts_key,
                number * self._images.count + index,
                self._images.width,
                self._images.height,
            )
            for index in range(self._images.count)
        )
        return [
            {"type": "text", "text": text},
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        ]

    def _first_message_tokens(self, conversation: int) -> int:
        return self._without_template(self._input_length(self._lengths_key, "input", conversation))

    def _without_template(self, tokens: int) -> int:
        return max(1, tokens - self._template) if self._template else tokens

    def _first_message(self, conversation: int) -> tuple[str, int]:
        """First user message of a conversation (shared prefix, then unique part), and its tokens."""
        n = self._first_message_tokens(conversation)
        if self._of_own_words:  # as below, with less on the way
            return self._random_text("user", conversation, n, self._unique_head(conversation, n)), n
        prefix, prefix_n = "", 0
        if self._chunks is not None:
            texts = [
                self._shared_text("chunk", chunk, self._chunks.tokens)
                for chunk in self._chunks.of(conversation)
            ]
            prefix, prefix_n = (
                " ".join(text for text, _ in texts) + " ",
                sum(tokens for _, tokens in texts),
            )
            n -= prefix_n
        elif shared_n := self.shared_tokens_of_length(n):
            prefix, prefix_n = self._shared_text(
                "prefix", self.prefix_group(conversation), shared_n
            )
            if n == shared_n:
                return prefix, prefix_n
            prefix, n = prefix + " ", n - shared_n
        return self._exact_text(
            "user", conversation, n, self._unique_head(conversation, n), prefix, prefix_n
        )

    def _tool_result_tokens(self, number: int) -> int:
        return self._tool_result(self._lengths_key, "tool", number) if self._tool_result else 0

    def _exact_text(
        self,
        purpose: str,
        index: int,
        n: int,
        head: Sequence[str] = (),
        before: str = "",
        before_n: int = 0,
    ) -> tuple[str, int]:
        """Return `before` followed by a text of n tokens that starts with `head`, and the tokens of both together.

        If token counts of pieces do not add up (tokenizer not additive), the text is counted, and words are added or
        removed until it fits. After 8 attempts the closest text is returned with its true count.
        """
        if n <= 0:
            return before, before_n
        if not head:
            choice = int.from_bytes(
                random_bytes(self._texts_key, purpose + " start", index, 4), "little"
            )
            head = (self._starts[choice % len(self._starts)],)
        text = self._random_text(purpose, index, n, head, before)
        if self._tokenizer.additive:
            return text, before_n + n
        wanted, pieces = before_n + n, n
        count_content_tokens = best_n = self._tokenizer.count(text)
        best = text
        for _ in range(8):
            if count_content_tokens == wanted:
                return text, count_content_tokens
            pieces = max(1, pieces + wanted - count_content_tokens)
            text = self._random_text(purpose, index, pieces, head, before)
            count_content_tokens = self._tokenizer.count(text)
            if abs(count_content_tokens - wanted) < abs(best_n - wanted):
                best, best_n = text, count_content_tokens
        return best, best_n

    def _random_text(
        self, purpose: str, index: int, pieces: int, head: Sequence[str], before: str = ""
    ) -> str:
        tail = pieces - len(head)
        if tail <= 0:
            return before + "".join(head[:pieces])
        passage = ""
        if self._natural is not None:
            start = int.from_bytes(
                random_bytes(self._texts_key, purpose + " passage", index, 4), "little"
            )
            passage, tail = self._natural.passage(start, tail)
        return self._write(
            "".join((before, *head, passage)),
            random_bytes(self._texts_key, purpose, index, 2 * tail),
        )

    def _unique_head(self, index: int, n: int) -> list[str]:
        """The first words of a unique part (at most HEAD): different for every index, as far as n words allow."""
        words, count, starts = self._words, self._word_count, self._starts
        rest, first = divmod((self._step * index + self._offset) % self._combinations, len(starts))
        head = [
            starts[first],
            words[rest % count],
            words[rest // count % count],
            words[rest // count**2 % count],
        ]
        return head if n >= HEAD else head[:n]


DEFAULT_OUTPUT_LIMIT = 1024
"""Most output tokens of a row that does not say how long its response should be."""
UNLIMITED = "unlimited"
"""The `output_tokens` with which such rows are sent without a limit."""


class FilePrompts:
    """The rows of the user's file, in file order or shuffled once by the seed.

    After the last row the first one follows again. A row is sent as written and its prompt is not
    counted first: servers report their count, and `input_tokens` counts on demand if they do not.
    """

    turns = 1
    history = "scripted"

    def __init__(self, requests: Any, seed: int, tokenizer: Tokenizer, api: str = "chat") -> None:
        # Workers without a data set do not need this module.
        from loadgen.core.workload.dataset import read_rows

        self.rows = read_rows(requests.path)
        # a row of a small file is read and checked once, not by each request that repeats it
        self._row = (
            functools.cache(self.rows.__getitem__)
            if self.rows.starts[-1] <= KEPT_BYTES
            else self.rows.__getitem__
        )
        self._tokenizer = tokenizer
        self._output_length: LengthSampler | None = None
        self._default_limit: int | None = DEFAULT_OUTPUT_LIMIT
        if requests.output_tokens == UNLIMITED or api in NON_GENERATIVE_APIS:
            self._default_limit = None
        elif requests.output_tokens:
            self._output_length = length_sampler(requests.output_tokens)
        self._lengths_key = derive_key(seed)
        self._order: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if requests.order == "shuffled":
            ranks = np.frombuffer(
                random_bytes(self._lengths_key, "order", 0, 8 * len(self.rows)), dtype="<u8"
            )
            self._order = np.argsort(ranks, kind="stable")

    def __getitem__(self, number: int) -> Request:
        index = number % len(self.rows)
        row = self._row(index if self._order is None else int(self._order[index]))
        output_tokens, exact = row.output_tokens, row.exact_output
        if output_tokens is None and self._output_length is not None:
            output_tokens, exact = self._output_length(self._lengths_key, "output", number), True
        elif output_tokens is None and row.answer:
            output_tokens, exact = max(self._tokenizer.count(row.answer), 1), True
        elif output_tokens is None:
            output_tokens, exact = self._default_limit, False
        return Request(
            id=f"{self.rows.sha256[:8]}-{number}",
            messages=row.messages,
            prompt=row.prompt,
            max_tokens=output_tokens,
            exact_output=exact,
            extra=row.extra,
        )

    def with_replies(self, number: int, replies: Mapping[int, AssistantTurn]) -> Request:
        return self[number]

    def needs_replies(self, number: int) -> bool:
        return False

    def numbers(self, count: int) -> Iterable[int]:
        return range(count)

    def input_tokens(self, number: int) -> int | None:
        """Content tokens of the texts of the row; None if it has parts that are not text (images, audio)."""
        return count_content_tokens(self[number], self._tokenizer)

    requested_input_tokens = input_tokens

    def requested_output_tokens(self, number: int) -> int | None:
        return self[number].max_tokens

    def sequence_lengths(self, number: int) -> tuple[int, ...]:
        """The tokens of each sequence that a row has as a request for values: its text, or each document with it."""
        tokens = self.input_tokens(number) or 1
        if not (documents := self[number].extra.get("documents")):
            return (tokens,)
        texts = [one if isinstance(one, str) else str(one.get("text", "")) for one in documents]
        return tuple(tokens + self._tokenizer.count(text) for text in texts)

    def warnings(self, n: int) -> list[str]:  # noqa: ARG002 - the protocol of prompts has it
        messages = [*self.rows.notes]
        if self.rows.without_length and self._default_limit and self._output_length is None:
            rows = format.counted(self.rows.without_length, "row")
            messages.append(
                f"{rows} without an output length: a limit of {self._default_limit:,} output tokens "
                "is sent; --output-tokens N sets the length, --output-tokens unlimited sends none"
            )
        if self.rows.ignored:
            messages.append(
                f"fields of {self.rows.path.name} that are not sent: {', '.join(self.rows.ignored)}"
            )
        return messages


def iter_requests(prompts: Prompts, numbers: Iterable[int]) -> Iterator[Request]:
    """The requests of these numbers, cheaper than one by one. No number is taken before its turn."""
    if isinstance(prompts, SyntheticPrompts) and prompts.has_single_text:
        return prompts.texts(numbers)
    return map(prompts.__getitem__, numbers)


def count_content_tokens(request: Request, tokenizer: Tokenizer) -> int | None:
    """Content tokens of a request, without those of the chat template; None if a part of it is not text."""
    if request.prompt is not None:
        return (
            tokenizer.count(request.prompt)
            if isinstance(request.prompt, str)
            else len(request.prompt)
        )
    n = 0
    for message in request.messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            text = (
                part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            )
            if not isinstance(text, str):
                return None
            n += tokenizer.count(text)
    return n


class Digest:
    """The prompts fingerprint, computed while requests are built. It covers texts, requested lengths and order.

    It is the sum of one hash per request, and each hash includes the number of the request. So it does not depend on
    how requests are split over workers, or on the order of `add`. With `replies` False it leaves out the turns of the
    assistant, because real replies are not part of the load (`prompts.history == "server"`). Several that
    are added together are hashed together: about 6 us per request of 1,300 tokens.
    """

    __slots__ = ("count", "replies", "total")

    def __init__(self, total: int = 0, count: int = 0, *, replies: bool = True) -> None:
        self.total, self.count, self.replies = total, count, replies

    def add(self, requests: Iterable[tuple[int, Request]]) -> None:
        """Add requests, each with its number."""
        added = list(requests)
        self.add_sum(len(added), self.hashes(added))

    def hashes(self, requests: Iterable[tuple[int, Request]]) -> bytes:
        """The sum of the hashes of requests, least byte first."""
        kept = []
        for number, request in requests:
            messages, prompt = request.messages, request.prompt
            if messages is not None and not self.replies:
                messages = [message for message in messages if message.get("role") != "assistant"]
            content = (
                number,
                request.max_tokens,
                request.exact_output,
                messages,
                prompt,
                request.extra,
            )
            kept.append((0, _encode(content)))
        return sum_of_hashes(kept)

    def add_sum(self, count: int, hashes: bytes) -> None:
        """Add so many requests, or their bodies, by the sum of their hashes."""
        self.count += count
        self.total = (self.total + int.from_bytes(hashes, "little")) % (1 << 128)

    def hexdigest(self) -> str:
        """32 hex digits, equal for equal sets of (number, request)."""
        return hashlib.blake2b(f"{self.count} {self.total}".encode(), digest_size=16).hexdigest()


def fingerprint(prompts: Prompts, n: int | None) -> str:
    """Return the prompts fingerprint of requests 0 .. n-1: the same as a `Digest` of these requests.

    This builds every request; a run instead adds the requests it builds anyway to a Digest. n None means a load
    without a fixed number of requests: then the first FIRST requests represent all, and the text starts with "first".
    """
    digest = Digest(replies=prompts.history == "scripted")
    numbers = iter(prompts.numbers(FIRST if n is None else n))
    while batch := list(itertools.islice(numbers, KEPT)):
        digest.add(zip(batch, iter_requests(prompts, batch), strict=True))
    return digest.hexdigest() if n is not None else f"first{FIRST}-{digest.hexdigest()}"
