"""What all inference APIs of the simulated server share: parsed requests, token text, framing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadgen.sim.server.server_timing import RequestTiming

ApiFlavor = Literal["trtllm", "openai"]
"""Whose requests and responses are imitated: those of trtllm-serve, or of OpenAI's public API."""

Api = Literal["chat", "completions", "responses", "messages", "embeddings", "rerank"]

TOKEN_WORDS: tuple[bytes, ...] = tuple(
    b" " + word
    for word in b"""
    this that with from have will your else more they data name time over type part work when
    been were file year some said like also than just them into what list case only back need
    user then test make long read form want comp size look know hand most text show find used
    play help pass down even item last high line cons here very call well view pres many good
    post such much open next game path each sign best same made mark main take free real head
    must week prop code team fact home left page both fore life book base node care full turn
    body keep come mill disc hard port link feel less sure prom says rest mult site prof cell
    cost load done args days cent stop love give copy lead step four room once talk grow mass
    mean area kind side camp miss plan away near dest sent past move city tell font late hold
    para meet task word host role deal ever info face save food comb send diff news fail came
    card root pick girl pack wait fund mode took seen live hope went fire anim mind bill draw
    larg easy vari circ walk five land half cook rate fall foot push idea film sell icon term
    trad loss stay serv exit pour tree byte ball fast unit blog menu cout soon join fill hash
    flag note upon risk gets lock arch tool feed vers song drug ways plus deep lost dead road
    held uses flex goal
    """.split()
)
"""256 words of five bytes, each one token of cl100k: all token events have the same size."""
WORD_COUNT = 256
WORD_BYTES = 5
DIGEST_BYTES = 64  # of the digest of a prompt, which determines the words of its completion

DONE_EVENT = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"

TOOL_ARGUMENTS_START = b'{\\"input\\": \\"'
"""What precedes the words of a tool call's arguments, escaped as a part of a JSON string."""
TOOL_ARGUMENTS_END = b'\\"}'

TEXT_PLACEHOLDER = "\ue000"
"""Stands for the text of a token while the JSON around it is encoded."""
PLACEHOLDER_BYTES = TEXT_PLACEHOLDER.encode()


class ParsedRequest(msgspec.Struct, kw_only=True, gc=False):
    """One request to an inference API, parsed and checked.

    Attributes:
        api: The API of the request.
        model: The name of the model, as the request has it.
        stream: Whether the response is streamed.
        input_tokens: The length of the prompt.
        output_tokens: The length that the completion will have.
        finish_reason: Why the completion will end.
        digest: 64 bytes that determine the text of the completion. Equal prompts get equal texts.
        include_usage: Whether a stream ends with the usage.
        continuous_usage: Whether each event of a stream has the usage so far.
        detokenize: Whether the completion is text. If not, it is a list of token ids.
        include_metrics: Whether the response has the server timing breakdown in vLLM's form.
        return_meta_info: Whether the response has it in SGLang's form, which streams do not have.
        blocks: The hashes of the prompt's blocks, for the prefix cache.
        cached_tokens: Prompt tokens found in the cache. It is set before the first token is sent.
        called_tool: The tool that the completion calls, or "" if the completion is text.
        sequence_lengths: The length of each sequence of a non-generative request.
        decoded_body: The body, for APIs whose responses repeat more of the request.
        conversation: All messages up to this prompt, of a request to the Responses API.
        max_tokens: The limit of output tokens, None for no limit. Only chat and completions set it.
        answer_tokens: The texts of the tokens of a right answer (`--answers`). If it is empty, the
            digest determines the words.
    """

    api: Api
    model: str
    stream: bool
    input_tokens: int
    output_tokens: int
    finish_reason: str
    digest: bytes
    include_usage: bool
    continuous_usage: bool
    detokenize: bool
    include_metrics: bool = False
    return_meta_info: bool = False
    blocks: tuple[int, ...] = ()
    cached_tokens: int = 0
    called_tool: str = ""
    sequence_lengths: tuple[int, ...] = ()
    decoded_body: Any = None
    conversation: bytes = b""
    max_tokens: int | None = None
    answer_tokens: tuple[str, ...] = ()


class ResponseContext(msgspec.Struct, frozen=True, gc=False):
    """What a response contains that does not follow from its request."""

    flavor: ApiFlavor
    request_number: int  # counted by arrival
    created_s: int  # Unix time


class ResponseFormatter:
    """Formats the response to one request in the wire format of one API.

    Attributes:
        flavor: The flavor of the API.
        chunk_prefix: If not empty, `chunk_prefix + word + chunk_suffix` is a complete HTTP chunk
            with a plain token event: one token without usage, which is not the last one.
        chunk_suffix: See `chunk_prefix`.
        end_marker: What follows the last event of a stream.
    """

    flavor: ApiFlavor
    chunk_prefix: bytes = b""
    chunk_suffix: bytes = b""
    end_marker: bytes = b""

    def format_opening(self) -> list[bytes]:
        """Return the events before the first token."""
        raise NotImplementedError

    def format_event(self, start: int, stop: int, *, is_last: bool, filler: bytes = b"") -> bytes:
        """Return the event with tokens `start` to `stop`, and `filler` as additional text."""
        raise NotImplementedError

    def format_closing(
        self, reported_tokens: int, timing: RequestTiming, /, *, has_finish_reason: bool = True
    ) -> list[bytes]:
        """Return the events after the last token, without the end marker.

        `reported_tokens` is what the usage reports as output tokens. Without `has_finish_reason`
        no event says why the completion has ended.
        """
        raise NotImplementedError

    def format_body(
        self, reported_tokens: int, timing: RequestTiming, /, *, has_finish_reason: bool = True
    ) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        raise NotImplementedError

    def format_engine_failure(self) -> tuple[list[bytes], bool]:
        """Return the events after a failure of the engine, and whether the body ends properly."""
        raise NotImplementedError


def format_sse_event(value: object, name: str = "") -> bytes:
    """Return `value` as JSON in a server-sent event, with an event name if there is one."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    if not name:
        return data
    return b"event: " + name.encode() + b"\n" + data


def format_chunk(event: bytes) -> bytes:
    """Return `event` as one HTTP chunk: its length in hexadecimal, and the event."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def format_chunk_around_word(before_word: bytes, after_word: bytes) -> tuple[bytes, bytes]:
    r"""Return the bytes before and after the word in the HTTP chunk of a token event.

    An event consists of `before_word`, a word and `after_word`. In HTTP it is sent as a chunk: its
    length in hexadecimal, a line end, the event, and a line end. All words have WORD_BYTES bytes,
    so all chunks have the same length, and only their word differs.

    For example, an event `{` + word + `}` has 7 bytes. The result is `7\r\n{` and `}\r\n`.
    """
    event_size = len(before_word) + WORD_BYTES + len(after_word)
    hexadecimal_size = f"{event_size:x}".encode()
    chunk_prefix = hexadecimal_size + b"\r\n" + before_word
    chunk_suffix = after_word + b"\r\n"
    return chunk_prefix, chunk_suffix


def token_ids(digest: bytes, start: int, stop: int) -> list[int]:
    """Return the ids of tokens `start` to `stop` of a completion. An id is an index of TOKEN_WORDS.

    They are a function of the digest of the prompt, which has 64 bytes, and of the position. For
    each position, the next byte of the digest is used, and after the last one again the first. The
    byte is XORed with the number of the pass over the digest, so that a long text does not repeat
    itself every 64 words. For example, token 130 is in pass 2, so it is byte 2 XORed with 2.
    """
    ids = []
    for position in range(start, stop):
        digest_byte = digest[position % DIGEST_BYTES]
        pass_number = position // DIGEST_BYTES
        ids.append(digest_byte ^ (pass_number % WORD_COUNT))
    return ids


def token_word(digest: bytes, position: int) -> bytes:
    """Return the word of the token at one position of a completion. See `token_ids`."""
    digest_byte = digest[position % DIGEST_BYTES]
    pass_number = position // DIGEST_BYTES
    return TOKEN_WORDS[digest_byte ^ (pass_number % WORD_COUNT)]


def token_words(digest: bytes, start: int, stop: int) -> list[bytes]:
    """Return the words of tokens `start` to `stop` of a completion."""
    return [TOKEN_WORDS[token_id] for token_id in token_ids(digest, start, stop)]


def token_text(digest: bytes, start: int, stop: int) -> bytes:
    """Return the text of tokens `start` to `stop`: words of five bytes."""
    return b"".join(token_words(digest, start, stop))


def completion_text(request: ParsedRequest, start: int, stop: int) -> str:
    """Return the text of tokens `start` to `stop` of a completion.

    They are the tokens of a right answer, or else words that the digest determines.
    """
    if request.answer_tokens:
        return "".join(request.answer_tokens[start:stop])
    return token_text(request.digest, start, stop).decode()


def escape_json(text: str) -> bytes:
    """Return a text as the inside of a JSON string, for example with a backslash before quotes."""
    return msgspec.json.encode(text)[1:-1]


def split_at_placeholder(data: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before and after the last TEXT_PLACEHOLDER.

    The search is from the right, because the name of a model comes first and may contain anything.
    """
    before, _, after = data.rpartition(PLACEHOLDER_BYTES)
    return before, after
