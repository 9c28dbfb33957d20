"""The requests of recorded sessions: the messages of the data set, with a salt."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen_sdk.request import Request

from loadgen.core import format, units
from loadgen.core.errors import UserError
from loadgen.core.requests.file_prompts import DEFAULT_OUTPUT_LIMIT, UNLIMITED, OutputLength
from loadgen.core.requests.prompts import AssistantTurn
from loadgen.core.requests.sampling import LengthSampler, derive_key, length_sampler
from loadgen.core.requests.slot_layout import SlotLayout
from loadgen.core.requests.tokenizer import Tokenizer
from loadgen.core.requests.trajectory_plays import Play, TrajectoryPlays

if TYPE_CHECKING:
    from loadgen.core.workload.trajectories import Trajectories
    from loadgen.core.workload.trajectory_data import TrajectoryData
    from loadgen.core.workload.trajectory_rows import Message, RecordedTurn, Trajectory

TOKENS_OF_CACHE_FILL = 1
"""The output of a request that fills the cache. Only its prompt matters."""
SALT_BYTES = 6
"""12 hexadecimal digits, as in AgentX, of which two plays never have the same in practice."""
TRAJECTORIES_COUNTED = 1024
"""The number of recorded sessions whose token counts stay in memory."""


class SentTurn(NamedTuple):
    """Which turn of which recorded session a request sends.

    A run sends a recorded session once or several times, or a part of it. Each time is a play.

    Attributes:
        play: The play.
        session: The number of the session in the run.
        position: The position of the request in its session, from 0.
    """

    play: Play
    session: int
    position: int

    @property
    def recorded_turn(self) -> int:
        """The index of the turn in the recorded session, of which a play may send a part."""
        return self.play.first_turn + self.position


class PromptPart(NamedTuple):
    """A part of a prompt whose text decides a prefix cache.

    Attributes:
        owner: Parts with equal owners at equal places have equal texts.
        tokens: Its length.
    """

    owner: tuple[str, int]
    tokens: int


class _RecordedTokens(NamedTuple):
    """The tokens of a recorded session.

    Attributes:
        system: The tokens of the system prompt.
        questions: The tokens of the messages that each turn adds, the system prompt included.
        responses: The tokens of each recorded response, 0 if there is none.
    """

    system: int
    questions: list[int]
    responses: list[int]


class _RecordedTokenCounter:
    """Counts the tokens of recorded sessions. Recent counts stay in memory."""

    def __init__(self, data: TrajectoryData, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        # A cache per instance: as a decorator, it would keep all instances alive.
        self.count = functools.lru_cache(TRAJECTORIES_COUNTED)(self._count_session)

    def _count_session(self, trajectory_index: int) -> _RecordedTokens:
        """Count the tokens of the messages of a recorded session, turn by turn."""
        trajectory = self._data[trajectory_index]
        return _RecordedTokens(
            system=self._tokenizer.count(_system_text(trajectory)),
            questions=[self._count_messages(turn.messages) for turn in trajectory.turns],
            responses=[
                0 if turn.response is None else self._count_messages([turn.response])
                for turn in trajectory.turns
            ],
        )

    def _count_messages(self, messages: Iterable[Message]) -> int:
        """Return the tokens of messages: their texts, their reasoning and their tool calls."""
        texts = itertools.chain.from_iterable(_message_texts(message) for message in messages)
        return sum(self._tokenizer.count(text) for text in texts)


class TrajectoryPrompts:
    """The requests of recorded sessions, turn by turn.

    Each session has a block of `turns` ids, as in the schedule. Every request contains the whole
    conversation so far, as agents send it.

    Attributes:
        turns: The number of ids of each session, as many as the longest one needs.
        history: "recorded" responses count as scripted ones: they are a part of the load.
        plays: Which recorded session each session sends.
    """

    def __init__(
        self,
        requests: Trajectories,
        seed: int,
        salt: int,
        tokenizer: Tokenizer,
        cache_fills: int = 0,
    ) -> None:
        """Read and check the data set of recorded conversations.

        Args:
            requests: Names the data set, and says how its conversations are replayed.
            seed: Decides all random draws.
            salt: Decides, with the seed, the text that makes the prompts of a session unique.
            tokenizer: Counts the tokens of messages.
            cache_fills: The number of sessions at the start of the run that only fill the prefix
                cache of the server.

        Raises:
            CombinedError: Rows of the data set have mistakes.
            UserError: The data set does not fit the settings of `requests`.
        """
        # Imported here, so that workers without recorded conversations do not load this module.
        from loadgen.core.workload.trajectory_data import read_trajectories

        # The recorded conversations, and which of them each session of the run sends.
        data = read_trajectories(requests.trajectories)
        _check_history(requests, has_tool_results=data.has_tool_results)
        self._data = data
        self.plays = TrajectoryPlays(data, requests, seed, cache_fills)
        self.turns = self.plays.max_turns
        self._layout = SlotLayout(block_size=self.turns)

        # The responses in the history of later turns: real ones of the server, or recorded ones.
        uses_real_responses = requests.history == "server" or not data.has_responses
        self.history = "server" if uses_real_responses else "scripted"

        # The lengths of prompts and responses.
        self._token_counter = _RecordedTokenCounter(data, tokenizer)
        self._lengths_key = derive_key(seed)
        self._output_sampler = _output_sampler(requests)
        self._has_default_limit = requests.output_tokens != UNLIMITED

        # What is changed in a conversation: texts make prompts unique, and long pauses are cut.
        self._salt_rule = requests.salt
        self._salt_key = derive_key(seed, salt)
        self._idle_cap_ns = requests.idle_cap_ns

    def __getitem__(self, request_id: int) -> Request:
        return self.with_replies(request_id, {})

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Build a request whose conversation contains real responses of the server.

        For earlier turns that are not in `replies`, the conversation has the recorded responses.

        Args:
            request_id: The id of the request.
            replies: The responses of the server to earlier turns of the session, by the position
                of the turn in the session: 0 for the response to the first request.
        """
        sent = self.locate(request_id)
        trajectory = self._data[sent.play.trajectory]
        length = self._output_length(sent, request_id)
        data_set_hash = self._data.sha256[:8]

        return Request(
            # What is sent.
            messages=self._messages(sent, trajectory, replies),
            max_tokens=length.tokens,
            exact_output=length.is_exact,
            extra=trajectory.extra,
            # Which request it is.
            id=f"{data_set_hash}-{request_id}",
            session=sent.session,
            turn=sent.position,
        )

    def needs_replies(self, request_id: int) -> bool:
        """Return True if the prompt of a request contains responses that the server has sent."""
        if self.history != "server":
            return False
        is_first_of_session = self.locate(request_id).position == 0
        return not is_first_of_session

    def locate(self, request_id: int) -> SentTurn:
        """Find the session and the turn that a request id belongs to.

        Each session has a block of as many consecutive ids as the longest session has turns. The
        first turns have the first ids, and the last turn has the last id, which shows where the
        session ends. In blocks of 5 ids, the three turns of session 2 have the ids 10, 11 and 14.

        Raises:
            IndexError: The session does not use the id, such as 12 in this example.
        """
        session = self._layout.session_of(request_id)
        play = self.plays.play(session)
        position = self._layout.turn_of(request_id, play.turn_count)
        return SentTurn(play, session, position)

    def request_ids(self, count: int) -> Iterable[int]:
        """Return the ids of the first requests."""
        return itertools.islice(self._iterate_ids(), count)

    def _iterate_ids(self) -> Iterator[int]:
        """Yield the ids of all requests, one session after the other, without end."""
        for session in itertools.count():
            yield from self._layout.slots_of(session, self.plays.play(session).turn_count)

    # -- lengths ---------------------------------------------------------------------------------

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a prompt.

        A prompt contains earlier responses. Those of the server count with their expected lengths.
        """
        return sum(part.tokens for part in self.prompt_parts(request_id))

    def requested_input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a prompt, like `input_tokens`."""
        return self.input_tokens(request_id)

    def requested_output_tokens(self, request_id: int) -> int | None:
        """Return the requested output tokens, or None if the output is not limited."""
        return self._output_length(self.locate(request_id), request_id).tokens

    def prompt_parts(self, request_id: int) -> list[PromptPart]:
        """Return the system prompt and the rest of a prompt, each with its length in tokens.

        Each part has an owner. Two prompts whose parts have the same owner have the same text
        there, which a server may take from its prefix cache. The tokens of salts, the texts that
        make prompts unique, are not counted.
        """
        sent = self.locate(request_id)
        tokens = self._token_counter.count(sent.play.trajectory)
        system_part = PromptPart(self._owner_of_system_prompt(sent.play), tokens.system)

        # The messages up to this turn. Those of the first turn include the system prompt.
        turn_count = sent.recorded_turn + 1
        message_tokens = sum(tokens.questions[:turn_count]) - tokens.system

        # The responses to all earlier turns.
        response_tokens = sum(
            self._response_tokens(sent, earlier_turn, tokens)
            for earlier_turn in range(sent.recorded_turn)
        )

        conversation_owner = self._owner_of_conversation(sent.play)
        conversation_part = PromptPart(conversation_owner, message_tokens + response_tokens)
        return [system_part, conversation_part]

    def _owner_of_system_prompt(self, play: Play) -> tuple[str, int]:
        """Return a key that is equal for all sessions whose prompts begin with the same text.

        A salt is a text that makes prompts unique. The rule `session` puts one before each system
        prompt, so no other session begins with the same text. The rule `pass` puts a salt there
        that is the same for one pass over the data set. Other rules leave the system prompt as
        recorded, for which the key has the pass 0.
        """
        if self._salt_rule == "session":
            return ("play", play.number)

        system_text = _system_text(self._data[play.trajectory])
        if self._salt_rule == "pass":
            return (system_text, self.plays.pass_of(play))
        return (system_text, 0)

    def _owner_of_conversation(self, play: Play) -> tuple[str, int]:
        """Return an owner that is equal for all sessions with the same conversation text."""
        if self._salt_rule == "none":
            return ("trajectory", play.trajectory)
        return ("play", play.number)

    def _response_tokens(self, sent: SentTurn, turn: int, tokens: _RecordedTokens) -> int:
        """Return the expected tokens of an earlier response in the prompt of a turn.

        The response is either recorded, or comes from the server. The server is expected to
        generate as many tokens as requested, or the default limit if the request has no limit.

        Args:
            sent: The turn whose prompt contains the response.
            turn: The earlier turn, by its index in the recorded session.
            tokens: The token counts of the recorded session.
        """
        earlier_position = turn - sent.play.first_turn
        was_sent_in_run = earlier_position >= 0
        is_response_of_server = self.history == "server" and was_sent_in_run
        if not is_response_of_server:
            return tokens.responses[turn]

        earlier_turn = SentTurn(sent.play, sent.session, earlier_position)
        earlier_request_id = self._layout.slot_of(
            sent.session, earlier_position, sent.play.turn_count
        )
        requested_tokens = self._output_length(earlier_turn, earlier_request_id).tokens
        return requested_tokens or DEFAULT_OUTPUT_LIMIT

    def _output_length(self, sent: SentTurn, request_id: int) -> OutputLength:
        """Return how many output tokens a request asks for, from the first source that says it.

        The sources are the row of the data set, `output_tokens` of the workload, the length of the
        recorded response, and a default limit. A request that only fills the prefix cache of the
        server asks for one token.
        """
        if sent.play.fills_cache:
            return OutputLength(TOKENS_OF_CACHE_FILL, is_exact=True)

        recorded_turn = self._data[sent.play.trajectory].turns[sent.recorded_turn]
        if recorded_turn.output_tokens is not None:
            return OutputLength(recorded_turn.output_tokens, recorded_turn.is_exact_length)

        if self._output_sampler is not None:
            sampled_tokens = self._output_sampler(self._lengths_key, "output", request_id)
            return OutputLength(sampled_tokens, is_exact=True)

        token_counts = self._token_counter.count(sent.play.trajectory)
        recorded_tokens = token_counts.responses[sent.recorded_turn]
        if recorded_tokens:
            return OutputLength(recorded_tokens, is_exact=True)

        # None is a request without any limit.
        default_limit = DEFAULT_OUTPUT_LIMIT if self._has_default_limit else None
        return OutputLength(default_limit, is_exact=False)

    # -- messages --------------------------------------------------------------------------------

    def _messages(
        self, sent: SentTurn, trajectory: Trajectory, replies: Mapping[int, AssistantTurn]
    ) -> list[Message]:
        """Return the messages of a request: the whole conversation up to its own turn.

        Args:
            sent: The turn of the request.
            trajectory: The recorded session.
            replies: The responses of the server to earlier turns, by their position in the session
                of the run, from 0. All other turns have their recorded responses.
        """
        first_sent_turn = (
            sent.play.first_turn
        )  # earlier turns are in the conversation, but not sent
        current_turn = sent.recorded_turn

        messages: list[Message] = []
        for turn_index in range(current_turn):
            turn = trajectory.turns[turn_index]
            reply = replies.get(turn_index - first_sent_turn)
            messages += turn.messages
            messages += _response_messages(turn, reply)

        messages += trajectory.turns[current_turn].messages
        return self._with_salts(messages, sent.play)

    def _with_salts(self, messages: list[Message], play: Play) -> list[Message]:
        """Return a conversation with salts: texts that make a prompt unique for a prefix cache.

        A play is one replay of a recorded session. Each rule puts salts before these messages:

        - `none`: no message.
        - `session`: the first message has the salt of the play.
        - `user`: the first message that is no system prompt has the salt of the play.
        - `pass`: like `user`, and the first message has the salt of the pass over the data set.
        """
        if self._salt_rule == "none":
            return messages

        salted = list(messages)
        play_salt = self._salt_text("play", play.number)
        if self._salt_rule == "session":
            salted[0] = _with_text_before(salted[0], play_salt)
            return salted

        question_index = _find_first_question(salted)
        salted[question_index] = _with_text_before(salted[question_index], play_salt)
        if self._salt_rule == "pass":
            pass_salt = self._salt_text("pass", self.plays.pass_of(play))
            salted[0] = _with_text_before(salted[0], pass_salt)
        return salted

    def _salt_text(self, purpose: str, number: int) -> str:
        """Return the text that makes a prompt unique to a play, or to a pass over the data set."""
        content = self._salt_key + purpose.encode() + number.to_bytes(8, "little")
        digest = hashlib.blake2b(content, digest_size=SALT_BYTES).hexdigest()
        return f"[salt: {digest}]\n\n"

    # -- warnings --------------------------------------------------------------------------------

    def warnings(
        self,
        request_count: int,  # noqa: ARG002 - part of the protocol
    ) -> list[str]:
        """Return the warnings about the data set that the user sees before the run."""
        messages = list(self._data.notes)
        messages += self._note_cut_pauses()

        lacks_lengths = self._output_sampler is None and not self._data.has_responses
        if lacks_lengths and self._has_default_limit:
            messages.append(
                f"{self._data.path.name} has no recorded responses. Turns without an output length "
                f"are sent with a limit of {DEFAULT_OUTPUT_LIMIT:,} output tokens. --output-tokens "
                "N sets the length, --output-tokens unlimited sends none"
            )

        if self._salt_rule == "none":
            sessions = format.counted(len(self._data), "recorded session")
            messages.append(
                f"sessions have no salt, so after {sessions} a prefix cache of the server may "
                "contain the prompts of an earlier play"
            )
        return messages

    def _note_cut_pauses(self) -> list[str]:
        """Return a note if recorded pauses are cut because they are longer than the idle cap.

        The note ends with the cap, in whole seconds, that would cut none of them. Return [] if no
        pause is cut.
        """
        pauses_ns = self._data.pauses_ns
        cut_count = int((pauses_ns > self._idle_cap_ns).sum())
        if not cut_count:
            return []

        all_pauses = format.counted(len(pauses_ns), "recorded pause")
        cut_pauses = f"{format.count(cut_count)} of {all_pauses}"
        cap = format.duration(self._idle_cap_ns / units.NS_PER_S)
        sufficient_cap_s = math.ceil(int(pauses_ns.max()) / units.NS_PER_S)
        return [
            f"{self._data.path.name}: idle_cap cuts {cut_pauses} to {cap}. "
            f"With idle_cap={sufficient_cap_s}s, none is cut"
        ]


def _check_history(requests: Trajectories, *, has_tool_results: bool) -> None:
    """Check that tool results follow the responses that call these tools.

    With `history: server`, earlier responses are those of the server, which may call different
    tools than the recorded responses, or none.

    Raises:
        UserError: The data set has tool results, and the history is that of the server.
    """
    if requests.history == "server" and has_tool_results:
        problem = (
            "the data set has results of tools, which only fit the recorded responses that call "
            "these tools"
        )
        raise UserError("unsupported", problem, "history: server", "use history: recorded")


def _output_sampler(requests: Trajectories) -> LengthSampler | None:
    """Return the sampler of `output_tokens`, or None if the workload sets no length."""
    if requests.output_tokens in (None, UNLIMITED):
        return None
    return length_sampler(requests.output_tokens)


def _response_messages(turn: RecordedTurn, reply: AssistantTurn | None) -> list[Message]:
    """Return the response to a turn as a list of one message, or [] if there is no response.

    Args:
        turn: The recorded turn.
        reply: The response of the server, which is used in place of the recorded one. None if the
            turn was not sent, or if recorded responses are used.
    """
    if reply is None:
        return [] if turn.response is None else [turn.response]

    message: Message = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = list(reply.calls)
    return [message]


def _find_first_question(messages: list[Message]) -> int:
    """Return the index of the first message that is no system prompt."""
    for index, message in enumerate(messages):
        if message["role"] != "system":
            return index
    raise ValueError("the conversation has only system prompts")


def _system_text(trajectory: Trajectory) -> str:
    """Return the text of the system prompt of a recorded session, or "" if it has none."""
    first_messages = trajectory.turns[0].messages
    system_contents = [
        message["content"] for message in first_messages if message["role"] == "system"
    ]
    return "".join(content for content in system_contents if isinstance(content, str))


def _message_texts(message: Message) -> Iterator[str]:
    """Yield the texts of a chat message whose tokens are counted.

    These are the content, the reasoning and the tool calls. Images and audio are not counted.
    """
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            is_text_part = isinstance(part, dict) and isinstance(part.get("text"), str)
            if is_text_part:
                yield part["text"]

    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        yield reasoning

    tool_calls = message.get("tool_calls")
    if tool_calls:
        yield json.dumps(tool_calls)


def _with_text_before(message: Message, text: str) -> Message:
    """Return a message whose content begins with a text."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": text}, *content]}
    return {**message, "content": f"{text}{content or ''}"}
