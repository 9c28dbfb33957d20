"""The requests of a replayed trace: generated texts with its lengths and shared prefixes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from loadgen_sdk.request import Request

from loadgen.core import format
from loadgen.core.requests.generated_prompts import GeneratedPrompts
from loadgen.core.requests.prompts import ANY_TARGET, AssistantTurn, PromptTarget
from loadgen.core.requests.slot_layout import SlotLayout
from loadgen.core.requests.synthetic_prompts import SINGLE_REQUEST_SESSION
from loadgen.core.requests.text_generator import Text
from loadgen.core.requests.tokenizer import Tokenizer
from loadgen.core.workload.trace import NO_VALUE, Trace
from loadgen.core.workload.trace_sessions import TraceSessions

BLOCKS_CACHED = 4096


class TraceRequest(NamedTuple):
    """Which request of a trace an id stands for.

    Attributes:
        cycle: How many times the complete trace has been sent before this request.
        row: The row of the trace.
        session: The number of the conversation, SINGLE_REQUEST_SESSION if there is none.
        turn: The position of the request in its session.
    """

    cycle: int
    row: int
    session: int = SINGLE_REQUEST_SESSION
    turn: int = 0


class _BlockTexts(NamedTuple):
    """The texts of the blocks of a prompt, and how many tokens they have together."""

    texts: list[str]
    tokens: int


class TracePrompts(GeneratedPrompts):
    """Prompts with the lengths of a trace that share text where hashes of the trace are equal.

    The request with the id `n` is row `n`. After the last row the rows repeat with other text. If
    the source is the sessions of a trace, the ids are those of a `SlotLayout`, as in the schedule.

    A hash of a trace stands for a block of a prompt and all text before it. Each hash becomes a
    text that depends on the hash alone, so prompts that begin with the same hashes begin with the
    same text, and a prefix cache can reuse as much as with the real traffic.

    The lengths of a trace are counts of a server and include the tokens of the chat template, which
    are subtracted. The `model` of a row is sent only if the target lists it.
    """

    history = "scripted"

    def __init__(
        self,
        source: Trace | TraceSessions,
        seed: int,
        salt: int,
        tokenizer: Tokenizer,
        target: PromptTarget = ANY_TARGET,
    ) -> None:
        """Replay a trace request by request, or session by session.

        Args:
            source: The trace, or its sessions if the conversations in it are replayed as such.
            seed: Decides the words of the texts, together with `salt`. It has no influence on the
                lengths of requests, which the trace records.
            salt: Another salt gives texts that the prefix cache of the server does not know.
            tokenizer: Counts tokens and supplies the words of the texts.
            target: What is known of the server that the requests are sent to: which models it
                lists, and whether its API generates text.
        """
        super().__init__(seed, salt, tokenizer, target.template_tokens)

        # Without sessions, each request is a session of its own.
        if isinstance(source, TraceSessions):
            self.trace = source.trace
            self.turns = source.max_turns
            self._sessions: TraceSessions | None = source
        else:
            self.trace = source
            self.turns = 1
            self._sessions = None
        self._layout = SlotLayout(block_size=self.turns)

        self._models = target.models
        self._has_output = target.api != "embeddings"
        self._cached_block_text = functools.lru_cache(BLOCKS_CACHED)(self._block_text)

    def __getitem__(self, request_id: int) -> Request:
        """Build a request with the lengths and the body fields of its row in the trace."""
        trace_request = self.locate(request_id)
        prompt = self._prompt_text(request_id, trace_request)
        return Request(
            id=self._wire_id(request_id),
            prompt=prompt.text,
            max_tokens=self.requested_output_tokens(request_id) if self._has_output else None,
            input_tokens=prompt.tokens,
            input_source=self._tokenizer.tag,
            extra=self._extra_fields(trace_request.row),
            session=trace_request.session,
            turn=trace_request.turn,
        )

    def locate(self, request_id: int) -> TraceRequest:
        """Return the row of the trace, and the session and turn, that a request id stands for.

        The trace is replayed in cycles: after its last row it begins again. Raises IndexError for
        an id that a session does not use.
        """
        if self._sessions is not None:
            return self._locate_in_sessions(self._sessions, request_id)
        cycle, row = divmod(request_id, len(self.trace))
        return TraceRequest(cycle, row)

    def _locate_in_sessions(self, sessions: TraceSessions, request_id: int) -> TraceRequest:
        """Return the row, session and turn of a request id in a replay of sessions.

        A session is a conversation, or a single request. After the last session of the trace, the
        first one is sent again, as a session with a new number. If the trace has 3 sessions, they
        are sent as sessions 0 to 2 in cycle 0, and again as sessions 3 to 5 in cycle 1. So session
        4 repeats session 1 of the trace.

        Raises IndexError for an id that a session does not use.
        """
        sent_session = self._layout.session_of(request_id)
        cycle, recorded_session = divmod(sent_session, len(sessions))
        is_single_request = bool(sessions.is_single_request[recorded_session])
        turn = self._layout.turn_of(
            request_id,
            turn_count=int(sessions.turn_counts[recorded_session]),
            is_single_request=is_single_request,
        )

        row = int(sessions.rows(recorded_session)[turn])
        session = SINGLE_REQUEST_SESSION if is_single_request else sent_session
        return TraceRequest(cycle, row, session, turn)

    def request_ids(self, count: int) -> Iterable[int]:
        """Return the ids of the first requests."""
        if self._sessions is None:
            return range(count)
        return itertools.islice(self._ids_by_session(self._sessions), count)

    def _ids_by_session(self, sessions: TraceSessions) -> Iterator[int]:
        """Yield the ids of all requests, one session after the other, without end.

        After the last session of the trace, the first one is sent again with a new number.
        """
        for session_number in itertools.count():
            recorded_session = session_number % len(sessions)
            yield from self._layout.slots_of(
                session_number,
                turn_count=int(sessions.turn_counts[recorded_session]),
                is_single_request=bool(sessions.is_single_request[recorded_session]),
            )

    def with_replies(
        self,
        request_id: int,
        replies: Mapping[int, AssistantTurn],  # noqa: ARG002 - part of the protocol
    ) -> Request:
        """Return the request; prompts of a trace contain no responses."""
        return self[request_id]

    def needs_replies(self, request_id: int) -> bool:  # noqa: ARG002 - part of the protocol
        """Return False; prompts of a trace contain no responses."""
        return False

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of the prompt as it is built."""
        return self[request_id].input_tokens

    def requested_input_tokens(self, request_id: int) -> int:
        """Return the content tokens of a prompt according to the trace."""
        row = self.locate(request_id).row
        return max(1, int(self.trace.input_tokens[row]) - self._template_tokens)

    def requested_output_tokens(self, request_id: int) -> int:
        """Return the output tokens of a request according to the trace."""
        return int(self.trace.output_tokens[self.locate(request_id).row])

    def sequence_lengths(self, request_id: int) -> tuple[int, ...]:
        """Return the tokens of the one sequence of a request for embeddings."""
        return (self.requested_input_tokens(request_id),)

    # -- texts -----------------------------------------------------------------------------------

    def _prompt_text(self, request_id: int, request: TraceRequest) -> Text:
        """Return a prompt: the text of each of its hashes, and then a text of its own.

        A trace records hashes instead of texts, one for each block of a prompt, such as 512 tokens.
        Two prompts with the same hash have the same text in that block. A prompt without hashes
        shares nothing, and differs from all other prompts from its first words (the head) on.
        """
        prompt_tokens = self.requested_input_tokens(request_id)
        shared_blocks = self._shared_block_texts(request, prompt_tokens)
        if not shared_blocks.texts:
            head = self._texts.unique_head(request_id, prompt_tokens)
            return self._texts.exact_text("user", request_id, prompt_tokens, head)

        unique_tokens = prompt_tokens - shared_blocks.tokens
        unique_text = self._text_after_blocks(request_id, unique_tokens)
        text = "".join(shared_blocks.texts) + unique_text

        # The token counts of texts only add up if the tokenizer never merges words with neighbours.
        if self._tokenizer.is_additive:
            return Text(text, prompt_tokens)

        return Text(text, self._tokenizer.count(text))

    def _text_after_blocks(self, request_id: int, tokens: int) -> str:
        """Return the part of a prompt that no other prompt has, after its shared blocks.

        Prompts with the same blocks get different texts here, because the first word and all others
        depend on the id of the request. The text begins with a space, as words inside a prompt do.
        """
        if tokens == 0:
            return ""
        first_word = " " + self._texts.start_word(request_id)
        return self._texts.random_text(
            purpose="own", index=request_id, word_count=tokens, head=[first_word]
        )

    def _shared_block_texts(self, request: TraceRequest, prompt_tokens: int) -> _BlockTexts:
        """Return the texts of the blocks of a prompt that have a hash, in their order.

        A hash of a trace identifies a block of a prompt, and every prompt with this hash gets the
        same text there. A trace may have more hashes than fit into a prompt of `prompt_tokens`. The
        last block is then cut, and the blocks after it are left out.
        """
        texts: list[str] = []
        remaining_tokens = prompt_tokens
        for position, block_hash in enumerate(self.trace.block_hashes(request.row)):
            block_tokens = min(remaining_tokens, self.trace.tokens_by_hash[block_hash])
            if block_tokens == 0:
                continue  # The prompt is full, or the block is empty.

            text = self._cached_block_text(
                request.cycle, block_hash, block_tokens, is_first=position == 0
            )
            texts.append(text)
            remaining_tokens -= block_tokens

        return _BlockTexts(texts, prompt_tokens - remaining_tokens)

    def _block_text(self, cycle: int, block_hash: int, tokens: int, *, is_first: bool) -> str:
        """Return the text of the block that a hash of the trace stands for.

        Args:
            cycle: How many times the complete trace has been sent before. The texts depend on it:
                otherwise the server would have all prompts of the trace in its prefix cache when
                the trace is repeated.
            block_hash: The hash, as a number.
            tokens: The length of the block.
            is_first: Whether the prompt begins with it. Words inside a prompt begin with a space.
        """
        first_word = self._texts.start_word(block_hash)
        if not is_first:
            first_word = " " + first_word
        return self._texts.random_text(f"block {cycle}", block_hash, tokens, (first_word,))

    def _extra_fields(self, row: int) -> dict[str, Any]:
        """Return the body fields that a row requests, without a model that the server lacks."""
        fields_index = int(self.trace.fields_index[row])
        if fields_index == NO_VALUE:
            return {}
        fields = dict(self.trace.fields[fields_index])
        if fields.get("model") not in self._models:
            fields.pop("model", None)
        return fields

    # -- warnings --------------------------------------------------------------------------------

    def warnings(self, request_count: int) -> list[str]:
        """Return sentences about how the requests differ from the trace."""
        return [
            *self._describe_repetition(request_count),
            *self._describe_changed_conversations(),
            *self._describe_omitted_rows(),
            *self._describe_extra_fields(),
        ]

    def _describe_repetition(self, request_count: int) -> Iterator[str]:
        """Yield a warning if there are more requests than rows in the trace."""
        if request_count > len(self.trace):
            requests = format.counted(request_count, "request")
            yield (
                f"{requests} are sent from a trace of {len(self.trace):,}, so the "
                "trace is repeated with different texts"
            )

    def _describe_changed_conversations(self) -> Iterator[str]:
        """Yield a warning if the conversations of the trace are not sent as they were recorded.

        There are two cases. Either the user did not ask to replay sessions, so the requests of a
        conversation are sent as unrelated requests. Or sessions are replayed, but the trace has no
        hashes that say what their prompts share, so a later prompt does not begin with the earlier
        ones.
        """
        if self._sessions is None:
            session_count = self._count_sessions()
            if session_count:
                sessions = format.counted(session_count, "session")
                yield (
                    f"the trace has {sessions} with several requests, which are sent "
                    "as unrelated requests. --set trace_replay=sessions sends each "
                    "request after the one before it"
                )
        elif not len(self.trace.hashes):
            yield (
                "the trace does not record which prompts share a prefix, so later "
                "requests of a session begin with different text"
            )

    def _count_sessions(self) -> int:
        """Return the number of sessions in the trace that have more than one request."""
        groups = self.trace.group[self.trace.has_session]
        _, sizes = np.unique(groups, return_counts=True)
        return int((sizes > 1).sum())

    def _describe_omitted_rows(self) -> Iterator[str]:
        """Yield a warning for each reason why rows of the trace are not sent.

        Rows without output tokens were requests that failed, so there is no length to request. Rows
        with mistakes (bad rows) are only left out if the user allows it.
        """
        rows_without_output = self.trace.rows_without_output
        if rows_without_output:
            subject = format.counted(
                rows_without_output, "row of the trace has", "rows of the trace have"
            )
            yield f"{subject} no output tokens and cannot be sent"

        bad_rows = self.trace.bad_rows
        if bad_rows:
            subject = format.counted(
                bad_rows, "bad row of the trace is", "bad rows of the trace are"
            )
            yield f"{subject} left out. The first: {self.trace.first_error}"

    def _describe_extra_fields(self) -> Iterator[str]:
        """Yield warnings about the body fields that rows of the trace add to their requests.

        Such fields are sent as they are, which the user may not expect. There is one exception: a
        `model` that the server does not list is replaced by the model of the run.
        """
        names = sorted({name for fields in self.trace.fields for name in fields})
        if names:
            yield f"rows of the trace request {', '.join(names)}, which is sent"

        trace_models = {str(fields["model"]) for fields in self.trace.fields if "model" in fields}
        unlisted_models = sorted(trace_models.difference(self._models))
        if unlisted_models:
            yield (
                f"the server does not list {', '.join(unlisted_models)}, so rows that "
                "request it go to the run's model"
            )
