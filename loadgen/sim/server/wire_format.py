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

DONE_EVENT = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"

TOOL_ARGUMENTS_START = b'{\\"input\\": \\"'
"""What precedes the words of a tool call's arguments, escaped as a part of a JSON string."""
TOOL_ARGUMENTS_END = b'\\"}'

TEXT_PLACEHOLDER = "\ue000"
"""Stands for the text of a token while the JSON around it is encoded."""
PLACEHOLDER_BYTES = TEXT_PLACEHOLDER.encode()


class ParsedRequest(msgspec.Struct, kw_only=True, gc=False):
    """One request, parsed and checked."""

    api: Api
    model: str
    stream: bool
    input_tokens: int
    output_tokens: int
    finish_reason: str
    digest: bytes  # 64 bytes that determine the output text: equal prompts get equal texts
    include_usage: bool
    continuous_usage: bool
    detokenize: bool
    include_metrics: bool = False  # answer with the server timing breakdown in vLLM's form
    return_meta_info: bool = False  # the same in SGLang's form, which streams do not have
    blocks: tuple[int, ...] = ()  # hashes of the prompt's blocks, for the prefix cache
    cached_tokens: int = 0  # prompt tokens found in the cache; known with the first token
    called_tool: str = ""  # the tool that the completion calls; "": the completion is text
    # Tokens of each sequence that is prefilled, for APIs that generate no token.
    sequence_lengths: tuple[int, ...] = ()
    decoded_body: Any = None  # for APIs whose responses repeat more of the request
    conversation: bytes = b""  # of a request to the Responses API: all messages up to this prompt


class ResponseContext(msgspec.Struct, frozen=True, gc=False):
    """What a response contains that does not follow from its request."""

    flavor: ApiFlavor
    request_number: int  # counted by arrival
    created_s: int  # Unix time


class ResponseFormatter:
    """Formats the response to one request in the wire format of one API.

    If `head` is not empty, `head + word + tail` is a complete HTTP chunk with a plain token event:
    one token, no usage, not the last. `end_marker` is what follows the last event of a stream.
    """

    flavor: ApiFlavor
    head: bytes = b""
    tail: bytes = b""
    end_marker: bytes = b""

    def format_opening(self) -> list[bytes]:
        """Return the events before the first token."""
        raise NotImplementedError

    def format_event(self, start: int, stop: int, *, is_last: bool, filler: bytes = b"") -> bytes:
        """Return the event with tokens `start` to `stop`, and `filler` as additional text."""
        raise NotImplementedError

    def format_closing(
        self, usage_tokens: int, timing: RequestTiming, /, *, with_finish: bool = True
    ) -> list[bytes]:
        """Return the events after the last token, without the end marker.

        `usage_tokens` is what the usage reports as output tokens. Without `with_finish` no event
        says why the completion has ended.
        """
        raise NotImplementedError

    def format_body(
        self, usage_tokens: int, timing: RequestTiming, /, *, with_finish: bool = True
    ) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        raise NotImplementedError

    def format_engine_failure(self) -> tuple[list[bytes], bool]:
        """Return the events after a failure of the engine, and whether the body ends properly."""
        raise NotImplementedError


def format_sse_event(value: Any, name: str = "") -> bytes:
    """Return `value` as JSON in a server-sent event, with an event name if there is one."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    if not name:
        return data
    return b"event: " + name.encode() + b"\n" + data


def format_chunk(event: bytes) -> bytes:
    """Return `event` as one HTTP chunk: its length in hexadecimal, and the event."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def split_chunk_around_word(before_word: bytes, after_word: bytes) -> tuple[bytes, bytes]:
    """Return what precedes and follows a word in an HTTP chunk.

    The event of the chunk is `before_word + word + after_word`, and all words have the same length.
    """
    size = len(before_word) + len(TOKEN_WORDS[0]) + len(after_word)
    return b"%x\r\n%b" % (size, before_word), after_word + b"\r\n"


def token_ids(digest: bytes, start: int, stop: int) -> list[int]:
    """Return the ids of tokens `start` to `stop`, a function of digest and index only.

    Token n is the byte n modulo 64 of the digest. The number of the repetition of the digest (n
    divided by 64) is XORed to it, so that a long text does not repeat itself every 64 words. An id
    is an index of TOKEN_WORDS.
    """
    return [digest[index & 63] ^ (index >> 6 & 255) for index in range(start, stop)]


def token_text(digest: bytes, start: int, stop: int) -> bytes:
    """Return the text of tokens `start` to `stop`: words of five bytes."""
    return b"".join([TOKEN_WORDS[token_id] for token_id in token_ids(digest, start, stop)])


def split_at_placeholder(data: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before and after the last TEXT_PLACEHOLDER.

    The search is from the right, because the name of a model comes first and may contain anything.
    """
    before, _, after = data.rpartition(PLACEHOLDER_BYTES)
    return before, after
