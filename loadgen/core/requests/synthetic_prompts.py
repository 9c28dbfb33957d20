"""Synthetic requests: single prompts and conversations of exact lengths."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen.core import format
from loadgen.core.requests import png_images
from loadgen.core.requests.chunks import ChunkSpec, Corpus, CorpusReuse
from loadgen.core.requests.generated_prompts import GeneratedPrompts, without_template_tokens
from loadgen.core.requests.png_images import ImageSize
from loadgen.core.requests.prompts import ANY_TARGET, AssistantTurn, Prompts, PromptTarget
from loadgen.core.requests.sampling import (
    LengthSampler,
    length_sampler,
    random_integer,
    sample_lengths,
)
from loadgen.core.requests.slot_layout import SlotLayout
from loadgen.core.requests.text_generator import HEAD_TOKENS, NO_TEXT, Text
from loadgen.core.requests.tokenizer import Tokenizer

if TYPE_CHECKING:
    from loadgen.core.workload.request_kinds import Chunks, Synthetic, Turns

CONVERSATIONS_CHECKED = 256
"""The number of conversations whose lengths are checked for warnings."""
PROMPTS_CHECKED = 16
"""The number of requests that are built for warnings, to compare their true and their requested
lengths."""

SINGLE_REQUEST_SESSION = -1
"""The session of a request that is no part of a conversation."""


class _Message(NamedTuple):
    """A message of a chat, with the tokens of its text. Real replies count as 0 tokens."""

    role: str
    content: str | list[dict[str, Any]]
    tokens: int


class SyntheticPrompts(GeneratedPrompts):
    """Prompts of requested lengths, and conversations of such prompts.

    The (first) user message has `input_tokens` tokens. It begins with chunks of a corpus, with one
    of several shared prefixes, or with words of its own. A system message that all requests have in
    common stands before it. The result of a tool is sent as a user message, because every server
    accepts that without a tool call.
    """

    def __init__(
        self,
        requests: Synthetic,
        seed: int,
        salt: int,
        tokenizer: Tokenizer,
        target: PromptTarget = ANY_TARGET,
    ) -> None:
        """Prepare the samplers of lengths and the corpus of a workload.

        Args:
            requests: The requests as the workload describes them.
            seed: Decides what is drawn for each request: its lengths, its prefix and its chunks.
            salt: Decides the words of the texts, together with the seed. Another salt gives
                prompts of the same lengths that a prefix cache does not know.
            tokenizer: Counts tokens and supplies the words of the texts.
            target: What is known of the server that the requests are sent to.
        """
        # Natural prompts are passages of a book. All others are random words.
        is_natural = requests.prompts == "natural"
        super().__init__(seed, salt, tokenizer, target.template_tokens, is_natural=is_natural)
        self._settings = requests
        self._api = target.api
        self._sample_input = length_sampler(requests.input_tokens)
        self._sample_output = length_sampler(requests.output_tokens)
        self._corpus = _build_corpus(requests.chunks, self._lengths_key)

        # The most common kind of prompts, which `_first_message` builds in a faster way: they have
        # exactly one token per word, no passages of a book and no common beginnings.
        has_one_token_per_word = tokenizer.is_additive
        self._has_random_words_only = (
            has_one_token_per_word and not is_natural and not _shares_prefixes(requests)
        )
        self._prepare_conversations(requests.turns)

    def _prepare_conversations(self, turns: Turns | None) -> None:
        """Set how many requests a conversation has, and what its later requests contain.

        Without `turns`, each request is a conversation by itself.
        """
        self.turns: int = 1
        self.history: str = "scripted"
        self._sample_tool_result: LengthSampler | None = None
        if turns is not None:
            self.turns = turns.count
            self.history = turns.history
            self._sample_tool_result = length_sampler(turns.tool_result_tokens)
        self._layout = SlotLayout(block_size=self.turns)

    @functools.cached_property
    def has_single_text(self) -> bool:
        """Return True if each request is one text, without further messages, images or documents.

        Embeddings are always one text.
        """
        if self._api == "embeddings":
            return True
        has_system_message = self._settings.system_tokens > 0
        has_images = self._settings.images is not None
        has_documents = self._api == "rerank"
        is_conversation = self.turns > 1
        return not (has_system_message or has_images or has_documents or is_conversation)

    def __getitem__(self, request_id: int) -> Request:
        if self.has_single_text:
            return next(self.single_text_requests((request_id,)))
        if self._api == "rerank" and self._corpus is not None:
            return self._build_ranking(request_id, self._corpus)
        return self._build_turn(request_id, None)

    def single_text_requests(self, request_ids: Iterable[int]) -> Iterator[Request]:
        """Yield the requests with these ids, each of which is a single text (`has_single_text`).

        A run builds its requests in this loop. Attributes are looked up before the loop, which
        makes it several times faster than building requests one by one.
        """
        is_generative = self._api not in NON_GENERATIVE_APIS
        build_text = self._first_message
        sample_output_tokens = self._sample_output
        lengths_key = self._lengths_key
        id_prefix = self._id_prefix

        # How the tokens of the prompt were counted: with the tokenizer of the model, or estimated.
        input_source = self._tokenizer.tag
        for request_id in request_ids:
            text, input_tokens = build_text(request_id)
            output_tokens = None
            if is_generative:
                output_tokens = sample_output_tokens(lengths_key, "output", request_id)

            yield Request(
                id=f"{id_prefix}-{request_id}",
                prompt=text,
                max_tokens=output_tokens,
                input_tokens=input_tokens,
                input_source=input_source,
            )

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return a turn of a conversation with the real responses of all earlier turns."""
        turn = self._layout.turn_of(request_id, self.turns)
        missing = sorted(set(range(turn)) - replies.keys())
        if missing:
            raise ValueError(f"turn {turn} must also follow the replies of turns {missing}")
        return self._build_turn(request_id, replies)

    def needs_replies(self, request_id: int) -> bool:
        """Return True for later turns of conversations with real responses."""
        return self.history == "server" and self._layout.turn_of(request_id, self.turns) > 0

    def request_ids(self, count: int) -> Iterable[int]:
        """Return the ids of the first requests."""
        return range(count)

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of the prompt as it is built."""
        return self[request_id].input_tokens

    def requested_input_tokens(self, request_id: int) -> int:
        """Return the content tokens that the workload requests for a prompt.

        A later turn of a conversation contains the first message, and the response and tool result
        of each turn before it. If the tokenizer merges words with their neighbours, the prompt as
        it is built may only be close to this length.
        """
        conversation = self._layout.session_of(request_id)
        tokens = self._settings.system_tokens + self._first_message_tokens(conversation)
        for earlier_id, next_id in itertools.pairwise(self._ids_up_to(request_id)):
            tokens += self.requested_output_tokens(earlier_id)
            tokens += self._tool_result_tokens(next_id)

        return tokens

    def _ids_up_to(self, request_id: int) -> range:
        """Return the ids of the requests of a conversation, from its first one to this one.

        All conversations have equally many turns, so their ids are consecutive: with 3 turns,
        conversation 2 has 6, 7 and 8.
        """
        turn = request_id % self.turns
        return range(request_id - turn, request_id + 1)

    def requested_output_tokens(self, request_id: int) -> int:
        """Return the requested output tokens, 0 for embeddings and rankings."""
        if self._api in NON_GENERATIVE_APIS:
            return 0
        return self._sample_output(self._lengths_key, "output", request_id)

    def sample_lengths(
        self, purpose: Literal["input", "output", "tool"], indices: Sequence[int]
    ) -> list[int]:
        """Return the token counts of one kind of text for many requests.

        They are the lengths that the requests have when they are built. The simulation needs only
        the lengths, and sampling many at once is faster than building the requests.

        Args:
            purpose: The kind of text: "input" for the first message of a conversation, "output" for
                the response to a request, "tool" for the tool result that a later request sends.
            indices: The numbers of conversations for "input", else the ids of requests.
        """
        requests = self._settings
        if purpose == "input":
            prompt_lengths = sample_lengths(
                requests.input_tokens, self._lengths_key, purpose, indices
            )
            return [
                without_template_tokens(tokens, self._template_tokens) for tokens in prompt_lengths
            ]

        if purpose == "output":
            return sample_lengths(requests.output_tokens, self._lengths_key, purpose, indices)

        assert requests.turns is not None, "only conversations have tool results"
        return sample_lengths(
            requests.turns.tool_result_tokens, self._lengths_key, purpose, indices
        )

    def prefix_group(self, conversation: int) -> int:
        """Return the number of the shared prefix that a conversation begins with.

        Conversations of one prefix group begin with the same text. The group is drawn at random.
        """
        choice = random_integer(self._lengths_key, "which prefix", conversation, 8)
        return choice % self._settings.prefixes

    def shared_tokens(self, conversation: int) -> int:
        """Return the length of the prefix that a conversation shares with its prefix group."""
        return self._shared_prefix_tokens(self._first_message_tokens(conversation))

    def chunks_of(self, request_id: int) -> tuple[int, ...]:
        """Return the chunks that a prompt begins with, in order, or () without retrieval."""
        return () if self._corpus is None else self._corpus.chunks_of(request_id)

    def measure_chunk_reuse(self, prompt_count: int) -> CorpusReuse | None:
        """Return how the first prompts share chunks, or None without retrieval."""
        return None if self._corpus is None else self._corpus.measure_reuse(prompt_count)

    def sequence_lengths(self, request_id: int) -> tuple[int, ...]:
        """Return the tokens of each sequence of a request for embeddings or a ranking.

        A request for embeddings has one sequence, its text. A ranking has one for each document:
        the query together with the document. The documents are chunks of the corpus, so without a
        corpus there is only a text. The requested length of a ranking covers the query and all
        documents, each of them once.
        """
        tokens = self._first_message_tokens(request_id)
        if self._api == "embeddings" or self._corpus is None:
            return (tokens,)
        document_tokens = self._corpus.tokens
        document_count = len(self._corpus.chunks_of(request_id))
        query_tokens = tokens - document_count * document_tokens
        return (query_tokens + document_tokens,) * document_count

    def warnings(self, request_count: int) -> list[str]:
        """Return warnings about prompts that are too alike, or not as long as requested."""
        messages = [self._describe_repeated_prompts(request_count)]
        if not self._tokenizer.is_additive:
            messages.append(self._describe_inexact_lengths(min(request_count, PROMPTS_CHECKED)))
        return [message for message in messages if message]

    def _describe_repeated_prompts(self, request_count: int) -> str:
        """Return a warning if prompts are so short that some may be equal, or "".

        The first HEAD_TOKENS words of a prompt, or those after its shared prefix, differ from
        prompt to prompt. If a prompt is shorter than that, another one can be equal to it, and the
        server then takes more tokens from its prefix cache than the workload intends.
        """
        conversation_count = math.ceil(request_count / self.turns)
        unique_tokens = [
            self._first_message_tokens(conversation) - self.shared_tokens(conversation)
            for conversation in range(min(conversation_count, CONVERSATIONS_CHECKED))
        ]
        fewest_unique_tokens = min(unique_tokens, default=HEAD_TOKENS)
        if fewest_unique_tokens >= HEAD_TOKENS:
            return ""

        tokens = format.counted(max(0, fewest_unique_tokens), "token")
        return (
            f"some prompts have only {tokens} of their own, but {HEAD_TOKENS} are "
            "needed to make each prompt different. The server's prefix cache may "
            "already hold them"
        )

    def _describe_inexact_lengths(self, prompt_count: int) -> str:
        """Return a warning if some of the first prompts are not as long as requested, or "".

        This can happen with a tokenizer that merges words with the text around them, so that the
        token counts of words do not add up.
        """
        inexact_prompts = sum(
            self[request_id].input_tokens != self.requested_input_tokens(request_id)
            for request_id in range(prompt_count)
        )
        if not inexact_prompts:
            return ""

        return (
            f"{inexact_prompts} of the first {prompt_count} prompts do not have "
            f"exactly the requested number of tokens of {self._tokenizer.name}. Each "
            "request records its true count"
        )

    # -- lengths ---------------------------------------------------------------------------------

    def _first_message_tokens(self, conversation: int) -> int:
        """Return the requested content tokens of the first message of a conversation.

        The tokens that the chat template of the server adds are subtracted, because the workload
        states the length of the whole prompt.
        """
        tokens = self._sample_input(self._lengths_key, "input", conversation)
        # This is `without_template_tokens`, but without a call, because it runs several times per
        # request.
        return max(1, tokens - self._template_tokens) if self._template_tokens else tokens

    def _tool_result_tokens(self, request_id: int) -> int:
        """Return the length of the tool result that comes before a request."""
        if self._sample_tool_result is None:
            return 0
        return self._sample_tool_result(self._lengths_key, "tool", request_id)

    def _shared_prefix_tokens(self, message_tokens: int) -> int:
        """Return how many of the `message_tokens` of a first message are a shared prefix.

        The workload sets either this number or a cache hit rate (`cache`): the share of the prompt
        that the server should find in its prefix cache. A prompt is the message and the tokens of
        the chat template, and the template is always in the cache. At least HEAD_TOKENS tokens of
        the message are not shared, because they make each prompt different.

        For example, a message of 90 tokens with a template of 10 tokens and a hit rate of 0.5 needs
        50 tokens in the cache, 40 of them in the message.
        """
        cache_hit_rate = self._settings.cache
        if cache_hit_rate is None:
            return min(message_tokens, self._settings.shared_prefix_tokens)
        cached_tokens = round(cache_hit_rate * (message_tokens + self._template_tokens))
        shared_tokens = cached_tokens - self._template_tokens
        return max(0, min(shared_tokens, message_tokens - HEAD_TOKENS))

    # -- texts -----------------------------------------------------------------------------------

    def _first_message(self, conversation: int) -> Text:
        """Return the first user message of a conversation: a shared beginning and a unique text.

        The message begins with chunks of a corpus, or with the prefix that a group of conversations
        has in common. If the workload has neither, the message is all unique.
        """
        tokens = self._first_message_tokens(conversation)
        if self._has_random_words_only:
            # `_unique_text` would return the same text, but with more calls. This runs once per
            # request.
            head = self._texts.unique_head(conversation, tokens)
            return Text(self._texts.random_text("user", conversation, tokens, head), tokens)

        if self._corpus is not None:
            return self._message_with_chunks(conversation, tokens, self._corpus)

        shared_tokens = self._shared_prefix_tokens(tokens)
        if shared_tokens > 0:
            return self._message_with_prefix(conversation, tokens, shared_tokens)

        return self._unique_text(conversation, tokens)

    def _message_with_prefix(self, conversation: int, tokens: int, shared_tokens: int) -> Text:
        """Return a message of `tokens` tokens that begins with the prefix of its prefix group."""
        prefix = self._texts.shared_text("prefix", self.prefix_group(conversation), shared_tokens)
        if shared_tokens == tokens:
            return prefix
        # The space separates the prefix from the unique text, and is no token of its own.
        prefix = Text(prefix.text + " ", prefix.tokens)
        return self._unique_text(conversation, tokens - shared_tokens, prefix)

    def _message_with_chunks(self, request_id: int, tokens: int, corpus: Corpus) -> Text:
        """Return a message of so many tokens that begins with the chunks of a request."""
        chunks = self._chunk_texts(request_id, corpus)
        chunks_tokens = sum(chunk.tokens for chunk in chunks)
        prefix = Text(" ".join(chunk.text for chunk in chunks) + " ", chunks_tokens)
        return self._unique_text(request_id, tokens - chunks_tokens, prefix)

    def _chunk_texts(self, request_id: int, corpus: Corpus) -> list[Text]:
        """Return the texts of the chunks of a request, which other requests may have as well."""
        return [
            self._texts.shared_text("chunk", chunk, corpus.tokens)
            for chunk in corpus.chunks_of(request_id)
        ]

    def _unique_text(self, request_id: int, tokens: int, prefix: Text = NO_TEXT) -> Text:
        """Return a text that begins, after the prefix, differently from all others."""
        head = self._texts.unique_head(request_id, tokens)
        return self._texts.exact_text("user", request_id, tokens, head, prefix)

    # -- requests --------------------------------------------------------------------------------

    def _build_turn(self, request_id: int, replies: Mapping[int, AssistantTurn] | None) -> Request:
        """Build a request with all earlier messages of its conversation.

        Args:
            request_id: The id of the request, which determines its conversation and its turn.
            replies: The real response to each earlier turn, by turn. If None, generated responses
                take their place.
        """
        messages = list(self._messages(request_id, replies))
        input_tokens: int | None = sum(message.tokens for message in messages)
        input_source: str = self._tokenizer.tag

        # Only the server knows how many tokens an image or one of its own replies has.
        has_images = self._settings.images is not None
        has_real_replies = replies is not None
        if has_images or has_real_replies:
            input_tokens = None
            input_source = ""

        return Request(
            id=self._wire_id(request_id),
            messages=[{"role": message.role, "content": message.content} for message in messages],
            max_tokens=self.requested_output_tokens(request_id),
            input_tokens=input_tokens,
            input_source=input_source,
            session=self._session_number(request_id),
            turn=self._layout.turn_of(request_id, self.turns),
        )

    def _session_number(self, request_id: int) -> int:
        """Return the conversation of a request, or SINGLE_REQUEST_SESSION without conversations."""
        is_conversation = self.turns > 1
        return self._layout.session_of(request_id) if is_conversation else SINGLE_REQUEST_SESSION

    def _messages(
        self, request_id: int, replies: Mapping[int, AssistantTurn] | None
    ) -> Iterator[_Message]:
        """Yield the messages of a request, which are all messages of its conversation so far.

        A conversation begins with a user message, and with a system message before it if the
        workload has one. Each later request adds two messages: the response to the request before
        it, and the result of a tool, which is sent as a user message.

        Args:
            request_id: The id of the request.
            replies: The real response to each earlier turn, by turn, or None to generate them.
        """
        if self._settings.system_tokens:
            system = self._texts.shared_text("system", 0, self._settings.system_tokens)
            yield _Message("system", system.text, system.tokens)

        first_message = self._first_message(self._layout.session_of(request_id))
        content = self._first_message_content(request_id, first_message.text)
        yield _Message("user", content, first_message.tokens)

        for earlier_id, next_id in itertools.pairwise(self._ids_up_to(request_id)):
            reply = self._reply_to(earlier_id, replies)
            yield _Message("assistant", reply.text, reply.tokens)
            tool_result = self._tool_result_before(next_id)
            yield _Message("user", tool_result.text, tool_result.tokens)

    def _reply_to(self, request_id: int, replies: Mapping[int, AssistantTurn] | None) -> Text:
        """Return the response to an earlier request. The tokens of a real one count as 0."""
        if replies is not None:
            turn = self._layout.turn_of(request_id, self.turns)
            return Text(replies[turn].text, 0)
        return self._texts.history_text(
            "reply", request_id, self.requested_output_tokens(request_id)
        )

    def _tool_result_before(self, request_id: int) -> Text:
        """Return the tool result that comes before a request."""
        return self._texts.history_text("tool", request_id, self._tool_result_tokens(request_id))

    def _first_message_content(self, request_id: int, text: str) -> str | list[dict[str, Any]]:
        """Return the content of a first message: the text, with the images of the request."""
        images = self._settings.images
        if images is None:
            return text

        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        size = ImageSize(images.width, images.height)
        for index in range(images.count):
            # Each image has a number of its own, so that no two are alike.
            image_index = request_id * images.count + index
            url = png_images.render_data_url(self._texts_key, image_index, size)
            parts.append({"type": "image_url", "image_url": {"url": url}})

        return parts

    def _build_ranking(self, request_id: int, corpus: Corpus) -> Request:
        """Build a request to rank documents by a query. The documents are chunks of the corpus.

        The workload sets the length of the query and all documents together. The length of the
        query is this length minus that of the documents.
        """
        documents = self._chunk_texts(request_id, corpus)
        documents_tokens = sum(document.tokens for document in documents)
        query_tokens = self._first_message_tokens(request_id) - documents_tokens
        query = self._unique_text(request_id, query_tokens)

        # The model reads the query again with each document.
        tokens_read = documents_tokens + query.tokens * len(documents)
        return Request(
            id=self._wire_id(request_id),
            prompt=query.text,
            input_tokens=tokens_read,
            input_source=self._tokenizer.tag,
            extra={"documents": [document.text for document in documents]},
        )


def _shares_prefixes(requests: Synthetic) -> bool:
    """Return True if different prompts may begin with the same text."""
    return (
        requests.chunks is not None
        or requests.shared_prefix_tokens > 0
        or requests.cache is not None
    )


def _build_corpus(chunks: Chunks | None, key: bytes) -> Corpus | None:
    """Return the corpus that chunks are drawn from, or None without retrieval."""
    if chunks is None:
        return None
    return Corpus(ChunkSpec(chunks.count, chunks.tokens, chunks.corpus, chunks.zipf), key)


def iter_requests(prompts: Prompts, request_ids: Iterable[int]) -> Iterator[Request]:
    """Return an iterator over the requests with these ids, which is faster than one by one.

    An id is taken from `request_ids` only when its request is requested from the iterator.
    """
    if isinstance(prompts, SyntheticPrompts) and prompts.has_single_text:
        return prompts.single_text_requests(request_ids)
    return map(prompts.__getitem__, request_ids)
