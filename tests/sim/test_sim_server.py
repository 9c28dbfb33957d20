"""The simulated server over real sockets: bytes, refusals, failures, bad clients, send log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from servers import start

from loadgen.core.errors import TargetError
from loadgen.sim.server import embedded
from loadgen.sim.server.embedded import EmbeddedServer
from loadgen.sim.server.fault_injection import FAILURE_EFFECTS
from loadgen.sim.server.options import Options
from loadgen.sim.server.request_parser import TEMPLATE_TOKENS
from loadgen.sim.server.send_log import SentRequests, parse_log

FAST = {"ttft": "1ms", "itl": "0.1ms"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
END = b"0\r\n\r\n"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(
        Options(**FAST, log_events="all", log_bodies=True, max_seq_len=4096, max_body_bytes=1 << 20)
    ) as server:
        yield server


def chat(
    tokens: int = 4, stream: bool = True, prompt: str = " tell me more", **fields: Any
) -> dict[str, Any]:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {key: value for key, value in (body | fields).items() if value is not ...}


def completion(tokens: int = 4, prompt: Any = " tell me more", **fields: Any) -> dict[str, Any]:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    return {key: value for key, value in (body | fields).items() if value is not ...}


def connect(endpoint: EmbeddedServer) -> socket.socket:
    host, port = endpoint.url.split("//")[1].split(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def wire(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: sim", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode() + data


def head_of(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, and what came of the body with them."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    start_, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = start_.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), rest


def answer(sock: socket.socket) -> tuple[int, dict[str, str], list[bytes]]:
    """One answer that is framed as it should be: its chunks, or its body as the only one."""
    status, headers, data = head_of(sock)
    if "content-length" in headers:
        while len(data) < int(headers["content-length"]):
            data += sock.recv(65536)
        return status, headers, [data]
    chunks = []
    while True:
        while b"\r\n" not in data:
            data += sock.recv(65536)
        size, _, rest = data.partition(b"\r\n")
        need = int(size, 16) + 2
        while len(rest) < need:
            piece = sock.recv(65536)
            assert piece, "cut inside a chunk"
            rest += piece
        assert rest[need - 2 : need] == b"\r\n"
        if need == 2:
            assert rest == b"\r\n"
            return status, headers, chunks
        chunks.append(rest[: need - 2])
        data = rest[need:]


def ask(
    endpoint: EmbeddedServer, path: str, body: Any, **headers: str
) -> tuple[int, dict[str, str], list[bytes]]:
    with connect(endpoint) as sock:
        sock.sendall(wire("POST", path, body, **headers))
        return answer(sock)


def get(endpoint: EmbeddedServer, path: str) -> bytes:
    with connect(endpoint) as sock:
        sock.sendall(wire("GET", path))
        status, _, (body,) = answer(sock)
        assert status == 200
        return body


def log_of(endpoint: EmbeddedServer) -> SentRequests:
    return parse_log(get(endpoint, "/_log"))


def events(chunks: list[bytes]) -> list[Any]:
    """Return the JSON of the data events. `[DONE]` and named events stay bytes."""
    for chunk in chunks:
        assert chunk.endswith(b"\n\n") and b"\n\n" not in chunk[:-2], "one event per chunk"
    return [json.loads(chunk[6:]) if chunk.startswith(b"data: {") else chunk for chunk in chunks]


def steady(chunk: bytes) -> str:
    return re.sub(r"cmpl-\d+", "cmpl-N", re.sub(r'"created":\d+', '"created":T', chunk.decode()))


def text(chunks: list[bytes]) -> str:
    choices = [
        c for event in events(chunks) if isinstance(event, dict) for c in event.get("choices", ())
    ]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


# What trtllm-serve says


@pytest.mark.processes
def test_a_chat_stream_equals_the_expected_bytes(endpoint: EmbeddedServer) -> None:
    status, headers, chunks = ask(endpoint, CHAT, chat(3))

    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")

    stable_chunks = [steady(chunk) for chunk in chunks]
    start_ = (
        'data: {"id":"chatcmpl-N","object":"chat.completion.chunk","created":T,"model":"m",'
        '"choices":['
    )

    assert (
        stable_chunks[0] == start_ + '{"index":0,"delta":{"role":"assistant"}}]} \n\n'
    )  # the blank is theirs

    text_tokens = [re.search(r'"content":"( [a-z]{4})"', line)[1] for line in stable_chunks[1:4]]  # type: ignore[index]
    for word, line, finish in zip(
        text_tokens, stable_chunks[1:4], ("", "", '"finish_reason":"length",'), strict=True
    ):
        delta = f'{{"index":0,"delta":{{"content":"{word}","reasoning_content":""}},'
        assert line == start_ + delta + finish + '"avg_decoded_tokens_per_iter":1.0}]}\n\n'
    counts = (
        f'{{"prompt_tokens":{TEMPLATE_TOKENS + 3},"total_tokens":{TEMPLATE_TOKENS + 6},'
        '"completion_tokens":3,'
    )

    assert (
        stable_chunks[4]
        == start_ + f'],"usage":{counts}"prompt_tokens_details":{{"cached_tokens":0}}}}}}\n\n'
    )
    assert stable_chunks[5:] == ["data: [DONE]\n\n"]


@pytest.mark.processes
def test_a_completion_stream_equals_the_expected_bytes(endpoint: EmbeddedServer) -> None:
    _, _, chunks = ask(endpoint, COMPLETIONS, completion(2, [5, 6, 7], stream_options={}))
    start_ = 'data: {"id":"cmpl-N","object":"text_completion","created":T,"model":"m","choices":['
    word = text(chunks[:1])
    rest = (
        '"token_ids":null,"logprobs":null,"finish_reason":null,"stop_reason":null,'
        '"avg_decoded_tokens_per_iter":1.0}'
    )

    assert (
        steady(chunks[0]) == start_ + f'{{"index":0,"text":"{word}",' + rest + '],"usage":null}\n\n'
    )
    assert events(chunks)[1]["choices"][0]["finish_reason"] == "length"
    assert (
        events(chunks)[2]["usage"]["prompt_tokens"] == 3
    )  # include_usage is on once there are options
    assert chunks[3:] == [b"data: [DONE]\n\n"]


@pytest.mark.processes
def test_usage_is_sent_only_when_requested(endpoint: EmbeddedServer) -> None:
    plain = ask(endpoint, CHAT, chat(stream_options=...))[2]

    assert not [event for event in events(plain) if isinstance(event, dict) and event.get("usage")]
    running = ask(endpoint, CHAT, chat(3, stream_options={"continuous_usage_stats": True}))[2]
    assert [e["usage"]["completion_tokens"] for e in events(running) if isinstance(e, dict)] == [
        0,
        1,
        2,
        3,
        3,
    ]


@pytest.mark.processes
def test_the_field_detokenize_false_returns_token_ids(endpoint: EmbeddedServer) -> None:
    chunks = ask(endpoint, COMPLETIONS, completion(3, detokenize=False))[2]
    choices = [event["choices"][0] for event in events(chunks[:3])]
    assert [len(c["token_ids"]) for c in choices] == [1, 1, 1] and {c["text"] for c in choices} == {
        ""
    }


@pytest.mark.processes
def test_a_response_without_streaming_equals_the_streamed_one(endpoint: EmbeddedServer) -> None:
    streamed = text(ask(endpoint, CHAT, chat(200))[2])
    full_response = json.loads(ask(endpoint, CHAT, chat(200, stream=False))[2][0])
    assert full_response["choices"][0]["message"]["content"] == streamed
    assert full_response["usage"]["completion_tokens"] == len(streamed.split()) == 200
    assert text(ask(endpoint, CHAT, chat(200, prompt=" something else"))[2]) != streamed


@pytest.mark.processes
def test_the_server_timing_event_follows_the_done_event(endpoint: EmbeddedServer) -> None:
    chunks = ask(endpoint, CHAT, chat(), X_TRTLLM_return_metrics="1")[2]

    assert chunks[-2] == b"data: [DONE]\n\n"
    name, data = chunks[-1].decode().strip().split("\n")
    assert (
        name == "event: trtllm.perf_metrics"
        and "server_ttft;dur=" in json.loads(data[6:])["Server-Timing"]
    )
    headers = ask(endpoint, CHAT, chat(stream=False), X_TRTLLM_return_metrics="1")[1]
    assert "server_e2e;dur=" in headers["Server-Timing"]


@pytest.mark.processes
def test_the_output_length_is_forced_random_or_clamped(endpoint: EmbeddedServer) -> None:
    ended = []
    for i in range(24):
        request_body = chat(
            50, stream=False, prompt=f" question number {i}", ignore_eos=..., min_tokens=20
        )
        body = json.loads(ask(endpoint, CHAT, request_body)[2][0])
        ended.append((body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]))
    early = [tokens for reason, tokens in ended if reason == "stop"]

    assert 2 <= len(early) <= 20 and all(20 <= tokens < 50 for tokens in early)
    assert {tokens for reason, tokens in ended if reason == "length"} == {50}
    clamped = json.loads(ask(endpoint, CHAT, chat(10_000, stream=False))[2][0])
    assert clamped["usage"]["total_tokens"] == 4096


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "body", "expected_fields"),
    [
        (CHAT, chat(4, foo=1), {"error": "Object contains unknown field `foo`"}),
        (
            COMPLETIONS,
            completion(4, max_completion_tokens=4),
            {"error": "unknown field `max_completion_tokens`"},
        ),
        (CHAT, chat(4, max_completion_tokens=4), {"error": "one field"}),
        (CHAT, chat(stream=False, stream_options={}), {"error": "stream is true"}),
        (CHAT, chat(messages=[]), {"error": "empty"}),
        (CHAT, chat(messages="hi"), {"error": "messages"}),
        (CHAT, chat(tokens="four"), {"error": "max_tokens"}),
        (CHAT, chat(model=...), {"error": "model"}),
        (CHAT, b'{"model": "m", ', {"error": "truncated"}),
        (CHAT, b"\xff\xfe", {"error": ""}),
        (CHAT, b"", {"error": ""}),
        (CHAT, b"[" * 100_000, {"error": ""}),
        (COMPLETIONS, completion(prompt=[]), {"error": "prompt"}),
        (COMPLETIONS, completion(prompt=[1, "a"]), {"error": "prompt"}),
        (CHAT, chat(0), {"message": "max_tokens", "code": 400, "object": "error"}),
        (
            CHAT,
            chat(prompt=" long" * 5000),
            {"message": "max_num_tokens", "type": "BadRequestError", "param": None},
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_requests_are_refused_as_by_trtllm_serve(
    endpoint: EmbeddedServer, path: str, body: Any, expected_fields: dict[str, Any]
) -> None:
    status, _, (error_body,) = ask(endpoint, path, body)
    error = json.loads(error_body)
    assert status == 400
    for key, value in expected_fields.items():
        assert value in error[key] if isinstance(value, str) else error[key] == value


@pytest.mark.processes
def test_known_paths_have_pages_and_unknown_paths_return_404(endpoint: EmbeddedServer) -> None:
    assert json.loads(get(endpoint, "/v1/models"))["data"][0]["owned_by"] == "tensorrt_llm"
    assert json.loads(get(endpoint, "/version")) == {"version": Options().version}
    assert get(endpoint, "/health") == b""
    ask(endpoint, CHAT, chat())

    assert (
        json.loads(get(endpoint, "/metrics")) and json.loads(get(endpoint, "/metrics")) == []
    )  # a read drains it

    for method, path, status in (
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nope", 404),
    ):
        with connect(endpoint) as sock:
            sock.sendall(wire(method, path))
            assert answer(sock)[0] == status
    with connect(endpoint) as sock:
        sock.sendall(wire("HEAD", "/v1/models") + wire("GET", "/health"))
        _, _, rest = head_of(sock)
        while b"\r\n\r\n" not in rest:
            rest += sock.recv(65536)
        assert rest.startswith(b"HTTP/1.1 200")  # no body between the two answers


@pytest.mark.processes
def test_the_openai_flavor_has_different_errors_and_events(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with start(
        Options(**FAST, api_flavor="openai", api_key_file=str(key), max_seq_len=1000)
    ) as endpoint:
        auth = {"authorization": "Bearer secret"}
        good = chat(model="sim", ignore_eos=..., max_tokens=..., max_completion_tokens=5)
        refusals = [
            (good, {}, 401, "invalid_api_key"),
            (good, {"authorization": "Bearer other"}, 401, "invalid_api_key"),
            (good | {"model": "other"}, auth, 404, "model_not_found"),
            (good | {"ignore_eos": True}, auth, 400, None),
            (good | {"max_completion_tokens": 2000}, auth, 400, "context_length_exceeded"),
        ]
        for body, headers, status, code in refusals:
            got, _, (error_body,) = ask(endpoint, CHAT, body, **headers)
            assert (got, json.loads(error_body)["error"]["code"]) == (status, code)
        said_events = events(ask(endpoint, CHAT, good, **auth)[2])
        assert said_events[0]["choices"][0]["delta"] == {
            "role": "assistant",
            "content": "",
            "refusal": None,
        }
        *tokens, finish, usage, done = said_events[1:]
        assert all(event["choices"][0]["finish_reason"] is None for event in tokens)
        assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] in (
            "stop",
            "length",
        )
        assert (
            usage["usage"]["completion_tokens"] == len(tokens) <= 5 and done == b"data: [DONE]\n\n"
        )


# Faults on demand


def raw(endpoint: EmbeddedServer, body: Any, fault: str, path: str = CHAT) -> tuple[bytes, str]:
    """Everything that came for one faulty request, and how: framed, closed, reset, or silent."""
    with connect(endpoint) as sock:
        sock.sendall(wire("POST", path, body, x_sim_fault=fault))
        data = b""
        while not data.endswith(END):
            if (
                data
                and not select.select([sock], [], [], 0.3 if fault.startswith("stall") else 20)[0]
            ):
                return data, "silent"
            try:
                piece = sock.recv(1 << 20)
            except ConnectionResetError:
                return data, "reset"
            if not piece:
                return data, "closed"
            data += piece
        return data, "framed"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "how", "there", "absent", "text_count"),
    [
        ("empty", "framed", b"text/event-stream", b"data:", 0),
        ("reset_before", "reset", b"200 OK", b"data:", 0),
        ("reset_after@1", "reset", b"assistant", b"DONE", 2),
        ("truncate@2", "closed", b"assistant", b"DONE", 3),
        ("stall@0", "silent", b"assistant", b"DONE", 1),
        ("malformed@1", "framed", b"DONE", b"\0", 4),
        ("error_event@1", "framed", b'{"error":{', b"finish_reason", 2),
        ("engine_error@1", "closed", b"assistant", b"error", 2),  # chat is cut
        ("oversized@1", "framed", b"a" * (1 << 20), b"\0", 4),
        ("split", "framed", b"DONE", b"\0", 4),
        ("wrong_count", "framed", b'"completion_tokens":11', b"\0", 4),
        ("wrong_count@2", "framed", b'"completion_tokens":2,', b"\0", 4),
        ("clamp@3", "framed", b'"completion_tokens":3,', b"\0", 3),
        ("one_event", "framed", b'"completion_tokens":4,', b"\0", 1),
        ("no_text", "framed", b'"completion_tokens":4,', b"\0", 0),
        ("no_finish", "framed", b"DONE", b"finish_reason", 4),
        ("no_done", "framed", b"finish_reason", b"DONE", 4),
        ("close_delimited", "closed", b"DONE", b"chunked", 4),
        ("connection_close", "framed", b"connection: close", b"\0", 4),
        ("slow_first_byte@1ms", "framed", b"DONE", b"\0", 4),
        ("idle_reset", "framed", b"DONE", b"\0", 4),  # on a fresh connection it is none
    ],
)
def test_each_injected_failure_damages_a_stream_as_described(
    endpoint: EmbeddedServer, fault: str, how: str, there: bytes, absent: bytes, text_count: int
) -> None:
    data, ended = raw(endpoint, chat(4), fault)
    assert ended == how
    assert there in data and absent not in data
    assert len(re.findall(rb'"content":" [a-z]{4}', data)) == text_count


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "status"), [("http_429@3s", 429), ("http_500", 500), ("http_503", 503)]
)
def test_injected_status_failures_return_their_http_status(
    endpoint: EmbeddedServer, fault: str, status: int
) -> None:
    got, headers, (error_body,) = ask(endpoint, CHAT, chat(), x_sim_fault=fault)
    assert got == json.loads(error_body)["code"] == status
    assert headers.get("retry-after") == ("3" if status == 429 else None)


@pytest.mark.processes
def test_a_failed_completion_sends_the_done_event_twice(endpoint: EmbeddedServer) -> None:
    chunks = ask(endpoint, COMPLETIONS, completion(), x_sim_fault="engine_error@1")[2]
    assert b'"error"' in chunks[2] and chunks[3:] == [b"data: [DONE]\n\n"] * 2


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("truncate", "closed"),
        ("reset_after", "reset"),
        ("reset_before", "reset"),
        ("close_delimited", "closed"),
    ],
)
def test_injected_failures_damage_responses_without_streaming(
    endpoint: EmbeddedServer, fault: str, how: str
) -> None:
    data, ended = raw(endpoint, chat(stream=False), fault)
    assert ended == how and data.startswith(b"HTTP/1.1 200")


@pytest.mark.processes
def test_the_failure_idle_reset_resets_a_reused_connection(endpoint: EmbeddedServer) -> None:
    with connect(endpoint) as sock:
        sock.sendall(wire("POST", CHAT, chat()))
        answer(sock)
        sock.sendall(wire("POST", CHAT, chat(), x_sim_fault="idle_reset"))
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


@pytest.mark.processes
def test_the_error_for_an_unknown_failure_lists_the_known_ones(endpoint: EmbeddedServer) -> None:
    status, _, (error_body,) = ask(endpoint, CHAT, chat(), x_sim_fault="explode")
    assert status == 400 and all(
        name in json.loads(error_body)["message"] for name in FAILURE_EFFECTS
    )


@pytest.mark.processes
def test_planned_failures_occur_with_their_share() -> None:
    with start(Options(**FAST, faults="http_500:0.5", seed=3)) as endpoint:
        statuses = [ask(endpoint, CHAT, chat())[0] for _ in range(40)]
    assert set(statuses) == {200, 500} and 10 <= statuses.count(500) <= 30


# Bad and odd clients


@pytest.mark.processes
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40, 400),  # TLS to a plain port
        (b"GET /health HTTP/1.1\r\nbroken header\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: many\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\nx", 413),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 300_000, 431),
        (wire("POST", CHAT, b"x" * (2 << 20)), 413),
    ],
    ids=["words", "tls", "header", "length", "chunk", "huge", "head", "body"],
)
def test_invalid_http_is_answered_with_an_error_and_a_closed_connection(
    endpoint: EmbeddedServer, data: bytes, status: int
) -> None:
    with connect(endpoint) as sock:
        sock.sendall(data)
        assert answer(sock)[0] == status
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""


@pytest.mark.processes
def test_incomplete_requests_do_not_disturb_other_clients(endpoint: EmbeddedServer) -> None:
    request_bytes = wire("POST", CHAT, chat())
    for cut in (1, 20, len(request_bytes) - 1):
        with connect(endpoint) as sock:
            sock.sendall(request_bytes[:cut])
    assert ask(endpoint, CHAT, chat())[0] == 200


@pytest.mark.processes
def test_a_request_may_arrive_byte_by_byte_or_in_chunks(endpoint: EmbeddedServer) -> None:
    body = json.dumps(chat(2)).encode()
    with connect(endpoint) as sock:
        for byte in wire("POST", CHAT, body):
            sock.send(bytes((byte,)))
        first = answer(sock)[2]
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: sim\r\nexpect: 100-continue\r\n".encode())
        sock.sendall(b"transfer-encoding: chunked\r\n\r\n")

        assert head_of(sock)[0] == 100

        for piece in (body[:7], body[7:]):
            sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        sock.sendall(END)

        assert text(answer(sock)[2]) == text(first) != ""


@pytest.mark.processes
def test_pipelined_requests_are_answered_in_order(endpoint: EmbeddedServer) -> None:
    with connect(endpoint) as sock:
        sock.sendall(wire("POST", CHAT, chat(1000)) + wire("GET", "/health", connection="close"))
        data = b""
        while piece := sock.recv(1 << 20):
            data += piece
    assert data.index(b"[DONE]") < data.index(END) < data.index(b"content-length: 0")


@pytest.mark.processes
def test_many_idle_connections_do_not_disturb_other_clients(endpoint: EmbeddedServer) -> None:
    idle = [connect(endpoint) for _ in range(300)]
    assert text(ask(endpoint, CHAT, chat(50))[2])
    assert json.loads(get(endpoint, "/_stats"))["connections"] >= 300
    for sock in idle:
        sock.close()


@pytest.mark.processes
def test_a_slow_reader_is_reset_and_counted_while_others_continue() -> None:
    options = Options(ttft="1ms", itl="1us", flood=True, buffer_bytes=100_000, max_seq_len=200_000)
    with start(options) as endpoint, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(20)
        slow.connect(connect_address(endpoint))
        slow.sendall(wire("POST", CHAT, chat(100_000)))

        assert len(text(ask(endpoint, CHAT, chat(500))[2]).split()) == 500
        with pytest.raises(ConnectionResetError):
            while slow.recv(64):
                pass
        stats = json.loads(get(endpoint, "/_stats"))
        assert (stats["slow_readers"], stats["active"]) == (1, 0)


def connect_address(endpoint: EmbeddedServer) -> tuple[str, int]:
    host, port = endpoint.url.split("//")[1].split(":")
    return host, int(port)


@pytest.mark.processes
def test_a_disconnected_client_frees_its_slot() -> None:
    with start(Options(ttft="1ms", itl="10s", slots=1)) as endpoint:
        with connect(endpoint) as sock:
            sock.sendall(wire("POST", CHAT, chat(100)))
            head_of(sock)
        with connect(endpoint) as sock:
            sock.sendall(wire("POST", CHAT, chat(1)))
            assert text(answer(sock)[2])


@pytest.mark.processes
def test_used_connections_are_closed_after_the_keep_alive_time() -> None:
    with (
        start(Options(**FAST, idle_close="20ms")) as endpoint,
        connect(endpoint) as used,
        connect(endpoint) as fresh,
    ):
        used.sendall(wire("GET", "/health"))
        answer(used)

        assert used.recv(1) == b""
        fresh.sendall(wire("GET", "/health"))
        assert answer(fresh)[0] == 200


# The log, TLS, the child


@pytest.mark.processes
def test_the_send_log_has_planned_and_actual_times_of_every_event(endpoint: EmbeddedServer) -> None:
    get(endpoint, "/_log")
    body = json.dumps(chat(40)).encode()
    ask(endpoint, CHAT, body, x_request_id="one")
    ask(endpoint, CHAT, chat(0), x_request_id="refused")
    log = log_of(endpoint)
    logged_request, refused_logged_request = log.requests

    assert (
        logged_request.id,
        logged_request.status,
        logged_request.output_tokens,
        logged_request.body_sha256,
    ) == (
        "one",
        200,
        40,
        hashlib.sha256(body).hexdigest(),
    )
    assert (refused_logged_request.id, refused_logged_request.status) == ("refused", 400)
    assert set(log.request) == {logged_request.number} and list(log.event) == list(range(40))
    assert (log.sent_ns >= log.planned_ns).all() and (log.sent_ns[1:] >= log.sent_ns[:-1]).all()
    assert list(log.planned_ns - logged_request.arrival_ns) == [
        1_000_000 + i * 100_000 for i in range(40)
    ]
    assert len(log_of(endpoint).event) == 0


@pytest.mark.processes
def test_the_log_of_first_and_last_events_is_written_at_stop(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with embedded.start(
        Options(**FAST, log=str(path), log_events="ends", stream_interval=4)
    ) as endpoint:
        chunks = ask(endpoint, CHAT, chat(10))[2]
        ask(endpoint, CHAT, chat(10, stream=False))

    assert [len(text([chunk]).split()) for chunk in chunks[1:5]] == [1, 4, 4, 1]
    log = parse_log(path.read_bytes())
    assert list(zip(log.request, log.event, strict=True)) == [(0, 0), (0, 3), (1, 0)]


@pytest.mark.processes
def test_the_embedded_server_accepts_tls_connections(tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf_cert = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    leaf_cert.cert_chain_pems[0].write_to_path(cert)
    leaf_cert.private_key_pem.write_to_path(key)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with start(Options(**FAST, cert=str(cert), key=str(key))) as endpoint:
        assert endpoint.url.startswith("https://")
        with context.wrap_socket(connect(endpoint), server_hostname="localhost") as sock:
            for tokens in (3, 2000):
                sock.sendall(wire("POST", CHAT, chat(tokens, prompt=" word" * 20_000)))
                assert len(text(answer(sock)[2]).split()) == tokens
        with connect(endpoint) as plain:
            plain.sendall(wire("GET", "/health"))
            with contextlib.suppress(ConnectionResetError):  # it may come before the alert is read
                assert b"HTTP/1.1 200" not in plain.recv(1000)


@pytest.mark.processes
@pytest.mark.parametrize(
    "wrong",
    [{"itl": "fast"}, {"faults": "explode"}, {"host": "256.1.1.1"}, {"api_key_file": "/nowhere"}],
)
def test_an_embedded_server_that_cannot_start_is_a_target_error(wrong: dict[str, str]) -> None:
    with pytest.raises(TargetError, match=r"--> loadgen\.sim\.server\.process$"):
        embedded.start(Options(**wrong))


@pytest.mark.processes
def test_the_embedded_server_ends_with_its_parent_process() -> None:
    code = (
        "import sys; from loadgen.sim.server.embedded import start; "
        "print(start().url, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None

        host, port = parent.stdout.readline().decode().strip().split("//")[1].split(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            sock.sendall(wire("GET", "/health"))
            assert answer(sock)[0] == 200
            parent.kill()
            assert sock.recv(1) == b""
