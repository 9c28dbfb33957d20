"""The requests of recorded sessions: the messages of the data set, with a salt."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen_sdk.request import Request

from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.requests.file_prompts import DEFAULT_OUTPUT_LIMIT, UNLIMITED, OutputLength
from loadgen.core.requests.prompts import AssistantTurn
from loadgen.core.requests.sampling import LengthSampler, derive_key, length_sampler
from loadgen.core.requests.tokenizer import Tokenizer
from loadgen.core.requests.trajectory_plays import Play, TrajectoryPlays

if TYPE_CHECKING:
    from loadgen.core.workload.trajectories import Trajectories
    from loadgen.core.workload.trajectory_rows import Message, RecordedTurn, Trajectory

TOKENS_OF_CACHE_FILL = 1
"""The output of a request that fills the cache. Only its prompt matters."""
SALT_BYTES = 6
"""12 hexadecimal digits, as in AgentX, of which two plays never have the same in practice."""
TRAJECTORIES_COUNTED = 1024
"""The number of recorded sessions whose token counts stay in memory."""


class SentTurn(NamedTuple):
    """Which turn of which play a request is.

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
        """The index of the turn in the recorded session."""
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
        """Read and check the data set.

        Args:
            requests: The data set, and the rules by which it is replayed.
            seed: Decides the order, the turns in which sessions begin, and lengths that are drawn.
            salt: Decides the salts of the sessions, together with the seed.
            tokenizer: Counts the tokens of messages.
            cache_fills: How many sessions at the start of the run fill the cache.

        Raises:
            CombinedError: Rows of the data set have mistakes.
            UserError: The data set does not fit the rules.
        """
        # Workers without such a data set do not need this module.
        from loadgen.core.workload.trajectory_data import read_trajectories

        data = read_trajectories(requests.trajectories)
        self.plays = TrajectoryPlays(data, requests, seed, cache_fills)
        self.turns = self.plays.max_turns
        uses_real_responses = requests.history == "server" or not data.has_responses
        self.history = "server" if uses_real_responses else "scripted"
        _check_history(requests, has_tool_results=data.has_tool_results)

        self._data = data
        self._salt_rule = requests.salt
        self._tokenizer = tokenizer
        self._lengths_key = derive_key(seed)
        self._salt_key = derive_key(seed, salt)
        self._output_sampler = _output_sampler(requests)
        self._has_default_limit = requests.output_tokens != UNLIMITED
        self._count_tokens = functools.lru_cache(TRAJECTORIES_COUNTED)(self._recorded_tokens)

    def __getitem__(self, request_id: int) -> Request:
        return self.with_replies(request_id, {})

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return a request, with real responses in place of the recorded ones if there are any.

        Args:
            request_id: The id of the request.
            replies: The responses of the server by the position of their request in the session.
        """
        sent = self.locate(request_id)
        trajectory = self._data[sent.play.trajectory]
        length = self._output_length(sent, request_id)
        return Request(
            id=f"{self._data.sha256[:8]}-{request_id}",
            messages=self._messages(sent, trajectory, replies),
            max_tokens=length.tokens,
            exact_output=length.is_exact,
            extra=trajectory.extra,
            session=sent.session,
            turn=sent.position,
        )

    def needs_replies(self, request_id: int) -> bool:
        """Return True if a request continues a real response of the server."""
        return self.history == "server" and self.locate(request_id).position > 0

    def locate(self, request_id: int) -> SentTurn:
        """Return the play and the turn of a request.

        Each session has a block of `turns` ids, and its last turn has the last one. With blocks
        of 5 ids, a session of 3 turns has the positions 0, 1 and 4 of its block. Raises IndexError
        for an id that the session does not use.
        """
        session, id_in_block = divmod(request_id, self.turns)
        play = self.plays.play(session)
        last_turn = play.turn_count - 1
        if id_in_block == self.turns - 1:
            return SentTurn(play, session, last_turn)
        if id_in_block < last_turn:
            return SentTurn(play, session, id_in_block)
        raise IndexError(request_id)

    def request_ids(self, count: int) -> Iterable[int]:
        """Return the ids of the first requests."""
        return itertools.islice(self._iterate_ids(), count)

    def _iterate_ids(self) -> Iterator[int]:
        """Yield the ids of all requests, one session after the other, without end."""
        for session in itertools.count():
            first_id = session * self.turns
            yield from range(first_id, first_id + self.plays.play(session).turn_count - 1)
            yield first_id + self.turns - 1

    # -- lengths ---------------------------------------------------------------------------------

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a prompt, with expected lengths of real responses."""
        return sum(part.tokens for part in self.prompt_parts(request_id))

    def requested_input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a prompt, like `input_tokens`."""
        return self.input_tokens(request_id)

    def requested_output_tokens(self, request_id: int) -> int | None:
        """Return the requested output tokens, or None if the output is not limited."""
        return self._output_length(self.locate(request_id), request_id).tokens

    def prompt_parts(self, request_id: int) -> list[PromptPart]:
        """Return the parts of a prompt: the system prompt, and the rest of the conversation.

        The rule of the salt decides which other prompts have the same parts. The tokens of the salt
        itself are not counted.
        """
        sent = self.locate(request_id)
        tokens = self._count_tokens(sent.play.trajectory)
        conversation_tokens = sum(tokens.questions[: sent.recorded_turn + 1]) - tokens.system
        for turn in range(sent.recorded_turn):
            conversation_tokens += self._response_tokens(sent, turn, tokens)

        return [
            PromptPart(self._owner_of_system_prompt(sent.play), tokens.system),
            PromptPart(self._owner_of_conversation(sent.play), conversation_tokens),
        ]

    def _owner_of_system_prompt(self, play: Play) -> tuple[str, int]:
        """Return what decides the text of the system prompt of a play."""
        if self._salt_rule == "session":
            return ("play", play.number)
        system_text = _system_text(self._data[play.trajectory])
        pass_number = self.plays.pass_of(play) if self._salt_rule == "pass" else 0
        return (system_text, pass_number)

    def _owner_of_conversation(self, play: Play) -> tuple[str, int]:
        """Return what decides the text of a play after its system prompt."""
        if self._salt_rule == "none":
            return ("trajectory", play.trajectory)
        return ("play", play.number)

    def _response_tokens(self, sent: SentTurn, turn: int, tokens: _RecordedTokens) -> int:
        """Return the tokens of an earlier response, as expected if the server creates it."""
        is_real = self.history == "server" and turn >= sent.play.first_turn
        if not is_real:
            return tokens.responses[turn]
        earlier = sent._replace(position=turn - sent.play.first_turn)
        request_id = earlier.session * self.turns + earlier.position
        return self._output_length(earlier, request_id).tokens or DEFAULT_OUTPUT_LIMIT

    def _output_length(self, sent: SentTurn, request_id: int) -> OutputLength:
        """Return the output length of a turn, from the first source that has one.

        These are the row itself, `output_tokens` of the workload, the recorded response, and the
        default limit.
        """
        if sent.play.fills_cache:
            return OutputLength(TOKENS_OF_CACHE_FILL, is_exact=True)

        turn = self._data[sent.play.trajectory].turns[sent.recorded_turn]
        if turn.output_tokens is not None:
            return OutputLength(turn.output_tokens, turn.is_exact_length)

        if self._output_sampler is not None:
            tokens = self._output_sampler(self._lengths_key, "output", request_id)
            return OutputLength(tokens, is_exact=True)

        recorded_tokens = self._count_tokens(sent.play.trajectory).responses[sent.recorded_turn]
        if recorded_tokens:
            return OutputLength(recorded_tokens, is_exact=True)

        limit = DEFAULT_OUTPUT_LIMIT if self._has_default_limit else None
        return OutputLength(limit, is_exact=False)

    def _recorded_tokens(self, trajectory_index: int) -> _RecordedTokens:
        """Count the tokens of the messages of a recorded session."""
        turns = self._data[trajectory_index].turns
        return _RecordedTokens(
            system=self._tokenizer.count(_system_text(self._data[trajectory_index])),
            questions=[self._message_tokens(turn.messages) for turn in turns],
            responses=[
                self._message_tokens([turn.response]) if turn.response else 0 for turn in turns
            ],
        )

    def _message_tokens(self, messages: Iterable[Message]) -> int:
        """Return the tokens of messages: their texts, their reasoning and their tool calls."""
        return sum(
            self._tokenizer.count(text) for message in messages for text in _message_texts(message)
        )

    # -- messages --------------------------------------------------------------------------------

    def _messages(
        self, sent: SentTurn, trajectory: Trajectory, replies: Mapping[int, AssistantTurn]
    ) -> list[Message]:
        """Return the conversation up to and with a turn, with the salts of its play."""
        messages: list[Message] = []
        for index, turn in enumerate(trajectory.turns[: sent.recorded_turn + 1]):
            messages += turn.messages
            if index < sent.recorded_turn:
                reply = replies.get(index - sent.play.first_turn)
                messages += _response_messages(turn, reply)
        return self._with_salts(messages, sent.play)

    def _with_salts(self, messages: list[Message], play: Play) -> list[Message]:
        """Return the messages of a conversation with the salts that the rule requires.

        The sources of the rules are in `core/workload/trajectories.py`.
        """
        if self._salt_rule == "none":
            return messages

        salted = list(messages)
        play_salt = self._salt_text("play", play.number)
        if self._salt_rule == "session":
            salted[0] = _with_text_before(salted[0], play_salt)
            return salted

        first_question = next(
            index for index, message in enumerate(salted) if message["role"] != "system"
        )
        salted[first_question] = _with_text_before(salted[first_question], play_salt)
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
        """Return sentences about how the data set was read and which lengths it lacks."""
        messages = [*self._data.notes]
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


def _check_history(requests: Trajectories, *, has_tool_results: bool) -> None:
    """Raise UserError if results of tools would follow real responses that call no tool."""
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
    """Return the response to a turn as later requests send it: the real one, or the recorded."""
    if reply is not None:
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.calls:
            message["tool_calls"] = list(reply.calls)
        return [message]
    return [] if turn.response is None else [turn.response]


def _system_text(trajectory: Trajectory) -> str:
    """Return the text of the system prompt of a recorded session, or ""."""
    texts = [
        message["content"]
        for message in trajectory.turns[0].messages
        if message["role"] == "system" and isinstance(message["content"], str)
    ]
    return "".join(texts)


def _message_texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message that become tokens. Images and other parts are left out."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]

    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        yield reasoning
    if message.get("tool_calls"):
        yield json.dumps(message["tool_calls"])


def _with_text_before(message: Message, text: str) -> Message:
    """Return a message whose content begins with a text."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": text}, *content]}
    return {**message, "content": f"{text}{content or ''}"}
