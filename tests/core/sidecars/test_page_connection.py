"""The connection that reads metrics pages: requests, responses and reconnects."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

import pytest

from loadgen.core.sidecars.page_connection import PageConnection

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSES = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


@contextmanager
def answering(*connections: Sequence[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Serve one list of responses per connection and yield the port and the requests.

    The server closes each connection after its last response. An empty response is not sent.
    """
    received: list[bytes] = []

    def serve() -> None:
        for answers in connections:
            stream, _ = listening_server.accept()
            with stream:
                for answer in answers:
                    received.append(stream.recv(1 << 16))
                    stream.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening_server:
        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield listening_server.getsockname()[1], received
        thread.join(20)


def test_one_connection_serves_several_requests() -> None:
    with answering([OK, CHUNKED, CLOSES], [OK]) as (port, received_request):
        connection = PageConnection("127.0.0.1", port, None, 20.0)
        for _ in range(4):
            assert connection.request(
                "GET", "/page?x=1", {"Accept": "text/plain", "X-Of": "me"}, 100
            ) == (
                200,
                b"ok",
            )
        connection.close()
    host = f"Host: 127.0.0.1:{port}\r\nAccept-Encoding: identity\r\n"

    assert {*received_request} == {
        f"GET /page?x=1 HTTP/1.1\r\n{host}Accept: text/plain\r\nX-Of: me\r\n\r\n".encode()
    }


def test_a_post_declares_an_empty_body_and_sends_the_host_header_of_the_user() -> None:
    with answering([OK]) as (port, received_request):
        connection = PageConnection("localhost", port, None, 20.0)
        assert connection.request("POST", "/stop", {"host": "other"}, 100) == (200, b"ok")
        connection.close()

    assert received_request == [
        b"POST /stop HTTP/1.1\r\n"
        b"Accept-Encoding: identity\r\n"
        b"Content-Length: 0\r\n"
        b"host: other\r\n"
        b"\r\n"
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ConnectionError),
        (OK[:-1], ValueError),
        (b"SSH-2.0-x\r\n", ValueError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, ValueError),
    ],
)
def test_an_invalid_response_is_an_error_and_the_next_request_reconnects(
    answer: bytes, error: type[Exception]
) -> None:
    with answering([answer], [OK]) as (port, _):
        connection = PageConnection("127.0.0.1", port, None, 20.0)
        with pytest.raises(error):
            connection.request("GET", "/", {}, 100)
        assert connection.request("GET", "/", {}, 100) == (200, b"ok")
        connection.close()


def test_a_missing_response_ends_with_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        connection = PageConnection("127.0.0.1", silent_server.getsockname()[1], None, 0.05)
        with pytest.raises(OSError, match="timed out"):
            connection.request("GET", "/", {}, 100)
