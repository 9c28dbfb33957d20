"""A server that sends scripted responses in order and records the requests it received.

The last response is repeated. It is for tests of clients that need a socket. It runs in threads, so
that blocking clients and event loops can both talk to it.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

Server = TypeVar("Server", bound=socketserver.BaseServer)
HANG = b""  # no answer until the client goes away


class Heard(NamedTuple):
    path: str
    headers: dict[str, str]
    body: Any


class Canned(NamedTuple):
    url: str  # with /v1
    heard: list[Heard]


def answer(value: Any, status: str = "200 OK", **headers: str) -> bytes:
    """One JSON answer; `_` in a header's name is `-`."""
    return _encode_response(json.dumps(value).encode(), status, "application/json", headers)


def events(*values: Any, done: bool = True, **headers: str) -> bytes:
    """One streamed answer."""
    lines = [b"data: %s\n\n" % json.dumps(value).encode() for value in values]
    if values and "type" in values[0]:
        lines = [
            b"event: %s\ndata: %s\n\n" % (value["type"].encode(), json.dumps(value).encode())
            for value in values
        ]
    return _encode_response(
        b"".join(lines) + (b"data: [DONE]\n\n" if done else b""),
        "200 OK",
        "text/event-stream",
        headers,
    )


def cut(response: bytes) -> bytes:
    """Return the same response, but with a connection that breaks before its end."""
    head, _, body = response.partition(b"\r\n\r\n")
    return b"CUT" + head.replace(b"Content-Length: ", b"Content-Length: 9") + b"\r\n\r\n" + body


def _encode_response(body: bytes, status: str, kind: str, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@contextlib.contextmanager
def answering(server: Server) -> Iterator[Server]:
    """Run a server in a thread of its own; it is closed at the end of the context."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def running(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server with this handler on a free port and yield its URL without a path."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with answering(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


@contextlib.contextmanager
def serving(*answers: bytes) -> Iterator[Canned]:
    """Run a server on a free port of this machine."""
    left = list(answers)
    received_requests: list[Heard] = []
    lock = threading.Lock()

    class Talk(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                headers = {}
                while field := self.rfile.readline().strip():
                    name, _, value = field.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                body = self.rfile.read(int(headers.get("content-length", 0)))
                with lock:
                    received_requests.append(
                        Heard(line.decode().split()[1], headers, json.loads(body) if body else None)
                    )
                    response = left[0] if len(left) == 1 else left.pop(0)
                if response == HANG:
                    self.rfile.read()
                    return
                self.wfile.write(response.removeprefix(b"CUT"))
                if response.startswith(b"CUT") or headers.get("connection") == "close":
                    return

        def finish(self) -> None:
            with contextlib.suppress(OSError):
                super().finish()

    class Telling(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore a client that has closed its connection."""

    with answering(Telling(("127.0.0.1", 0), Talk)) as server:
        yield Canned(f"http://127.0.0.1:{server.server_address[1]}/v1", received_requests)


def chunk(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One event of a chat stream; `more` goes into its delta."""
    delta = {**({} if content is None else {"content": content}), **more}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m-1",
        "choices": [choice],
    }


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
COUNT = {
    "id": "c1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m-1",
    "choices": [],
    "usage": USAGE,
}
CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m-1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there."},
            "finish_reason": "stop",
        }
    ],
    "usage": USAGE,
}
CHAT_EVENTS = (
    chunk("", role="assistant"),
    chunk("Hel"),
    chunk("lo "),
    chunk("there."),
    chunk(finish="stop"),
    COUNT,
)
COMPLETION = {
    "id": "c1",
    "object": "text_completion",
    "created": 1,
    "model": "m-1",
    "choices": [{"index": 0, "text": "Hello there.", "finish_reason": "stop", "logprobs": None}],
    "usage": USAGE,
}


def _piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {
        **COMPLETION,
        "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}],
    }


COMPLETION_EVENTS = (
    {**_piece("Hel"), "usage": None},
    {**_piece("lo "), "usage": None},
    {**_piece("there.", "stop"), "usage": None},
    {**COMPLETION, "choices": []},
)
RESPONSE = {
    "id": "c1",
    "object": "response",
    "created_at": 1,
    "model": "m-1",
    "status": "completed",
    "output": [
        {
            "type": "message",
            "id": "o1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello there.", "annotations": []}],
        }
    ],
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "tools": [],
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "temperature": 1.0,
    "top_p": 1.0,
    "usage": {
        "input_tokens": 9,
        "output_tokens": 3,
        "total_tokens": 12,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}


def _delta(text: str, number: int) -> dict[str, Any]:
    kind = "response.output_text.delta"
    return {
        "type": kind,
        "delta": text,
        "item_id": "o1",
        "output_index": 0,
        "content_index": 0,
        "sequence_number": number,
        "logprobs": [],
    }


RESPONSE_EVENTS = (
    {
        "type": "response.created",
        "sequence_number": 0,
        "response": {**RESPONSE, "status": "in_progress", "usage": None},
    },
    _delta("Hel", 1),
    _delta("lo ", 2),
    _delta("there.", 3),
    {"type": "response.completed", "sequence_number": 4, "response": RESPONSE},
)
