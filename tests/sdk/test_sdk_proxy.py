"""The project's own client behind a proxy: a tunnel for https, whole URLs for http."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from expected_errors import refused
from loadgen_sdk import Client, Completion, Target, TargetUnusable, Tls, WrongUse
from loadgen_sdk.transport.proxy import proxy_for
from scripted_server import CHAT_EVENTS, events, serving
from servers import start

from loadgen.sim.server.options import Options

KNOWN: dict[str, Any] = {"model": "llama", "server": "vllm"}


@contextlib.asynccontextmanager
async def tunnelling(
    status: str = "200 Connection established",
) -> AsyncIterator[tuple[str, list[list[str]]]]:
    """Yield a proxy that opens tunnels, and the lines it gets. It responds in two pieces."""
    received: list[list[str]] = []
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            received.append((await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n"))
        except asyncio.IncompleteReadError:  # a probe looks whether anyone listens
            writer.close()
            return
        writer.write(f"HTTP/1.1 {status}\r\nVia: a\r".encode())
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(b"\n\r\n")
        if status.startswith("200"):
            host, _, port = received[-1][0].split(" ")[1].rpartition(":")
            server_reader, server_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        try:
            yield f"http://user:pw-secret@127.0.0.1:{server.sockets[0].getsockname()[1]}", received
        finally:
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)


@pytest.fixture
def papers(tmp_path: Path) -> tuple[str, Path, Path]:
    """Return files with a CA certificate, and with a server certificate and its key."""
    authority = trustme.CA()
    paper = authority.issue_cert("127.0.0.1", "localhost")
    files = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(str(files[0]))
    files[1].write_bytes(b"".join(blob.bytes() for blob in paper.cert_chain_pems))
    paper.private_key_pem.write_to_path(str(files[2]))
    return str(files[0]), files[1], files[2]


@pytest.mark.processes
def test_https_requests_go_through_a_proxy_tunnel(
    papers: tuple[str, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, cert, key = papers
    monkeypatch.setenv("NO_PROXY", "")

    async def go(url: str) -> None:
        async with tunnelling() as (proxy, received_request):
            monkeypatch.setenv("HTTPS_PROXY", proxy)
            async with Client(
                url, tls=Tls(ca=authority)
            ) as client:  # a probe, then two calls on one connection
                completions = [await client.complete("Hello") for _ in range(2)]
        address = url.removeprefix("https://")
        assert all(
            lines[:2] == [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
            for lines in received_request
        )
        assert all(
            "Proxy-Authorization: Basic dXNlcjpwdy1zZWNyZXQ=" in lines for lines in received_request
        )
        assert (
            [completion.failure for completion in completions] == [None, None]
            and completions[0].kernel_stamp
            and completions[1].reused
        )

    with start(Options(cert=str(cert), key=str(key))) as server:
        asyncio.run(go(server.url))


@pytest.mark.parametrize("known", [KNOWN, {}])
def test_the_error_of_a_refusing_proxy_quotes_its_response(
    known: dict[str, Any], papers: tuple[str, Path, Path]
) -> None:
    async def go() -> Completion:
        async with (
            tunnelling("407 Proxy Authentication Required") as (proxy, _),
            Client("https://127.0.0.1:9", tls=Tls(ca=papers[0]), proxy=proxy, **known) as client,
        ):
            return await client.complete("Hello")

    if known:
        failure = asyncio.run(go()).failure
        assert (
            failure is not None
            and failure.kind == "connect"
            and "407 Proxy Authentication" in failure.text
        )
        assert "secret" not in failure.text
    else:
        with refused(TargetUnusable, "proxy"):
            asyncio.run(go())


def test_http_requests_through_a_proxy_have_the_full_url() -> None:
    async def go(url: str) -> Completion:
        async with Client("http://model.invalid:8000/v1", proxy=url, **KNOWN) as client:
            return await client.complete("Hello")

    with serving(events(*CHAT_EVENTS)) as server:
        completion = asyncio.run(go(server.url.removesuffix("/v1").replace("//", "//user:pw@")))
    assert (
        completion.failure is None
        and server.heard[0].path == "http://model.invalid:8000/v1/chat/completions"
    )
    assert server.heard[0].headers["host"] == "model.invalid:8000"
    assert server.heard[0].headers["proxy-authorization"] == "Basic dXNlcjpwdw=="


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://a.example", {"HTTPS_PROXY": "http://p:3128"}, ("p", 3128)),
        ("https://a.example", {"HTTPS_PROXY": "p:3128"}, ("p", 3128)),
        ("https://a.example", {"HTTP_PROXY": "http://p:3128"}, None),
        ("http://a.example", {"http_proxy": "http://p:3128"}, ("p", 3128)),
        ("https://a.example", {"ALL_PROXY": "http://p"}, ("p", 80)),
        (
            "https://a.example",
            {"HTTPS_PROXY": "http://p:3128", "NO_PROXY": "b.example,.example"},
            None,
        ),
        ("https://a.example", {}, None),
    ],
)
def test_the_proxy_is_read_from_the_environment(
    url: str,
    environment: dict[str, str],
    proxy: tuple[str, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    environment_proxy = proxy_for(Target.parse(url), None)
    assert (None if environment_proxy is None else environment_proxy[:2]) == proxy
    assert proxy_for(Target.parse(url), "") is None


@pytest.mark.parametrize("url", ["socks5://p:1", "https://p:1", "http://:3", "http://p:x"])
def test_invalid_proxy_urls_are_refused(url: str) -> None:
    with refused(WrongUse, "invalid_url"):
        proxy_for(Target.parse("https://a.example"), url)
