"""A TCP relay between a command and its server.

It forwards bytes, with or without TLS, until a test tells it to do something else.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit


class Relay:
    """A relay in a thread of its own. Its attributes may be changed while it runs.

    `hold` is the number of response bytes that it withholds until they are complete or the response
    ends. `instead` is sent to every client instead of relaying, and the connection is closed.
    """

    def __init__(
        self,
        url: str,
        *,
        hosts: tuple[str, ...] = ("127.0.0.1",),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.server = (parts.hostname, parts.port)
        self.hold, self.instead = 0, b""
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._listening: dict[str, asyncio.Server] = {}
        self.port = 0
        for host in hosts:
            self._listening[host] = self._call(
                asyncio.start_server(self._serve, host, self.port, ssl=tls)
            )
            self.port = self._listening[host].sockets[0].getsockname()[1]

    def drop(self) -> None:
        """Break every connection."""

        def reset() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        self._loop.call_soon_threadsafe(reset)

    def close(self, host: str) -> None:
        self._loop.call_soon_threadsafe(self._listening.pop(host).close)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self._listening):
            self.close(host)
        self.drop()
        self._call(self._settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _settle(self) -> None:
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(other_tasks, timeout=10) if other_tasks else None

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = {writer}
        self._writers.add(writer)
        try:
            if self.instead:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self.instead)
                await writer.drain()
                return
            their_stream_reader, up = await asyncio.open_connection(*self.server)
            mine.add(up)
            self._writers.add(up)
            await asyncio.wait(
                {
                    asyncio.ensure_future(_pass(reader, up, lambda: 0)),
                    asyncio.ensure_future(_pass(their_stream_reader, writer, lambda: self.hold)),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers -= mine
            for pending_writer in mine:
                if pending_writer is writer and self.instead:
                    pending_writer.close()
                else:
                    pending_writer.transport.abort()


async def _pass(
    source: asyncio.StreamReader, to: asyncio.StreamWriter, hold: Callable[[], int]
) -> None:
    buffered = b""
    try:
        while True:
            buffered += (read := await source.read(65536))
            if not read or len(buffered) >= hold() or buffered.endswith(b"0\r\n\r\n"):
                to.write(buffered)
                buffered = b""
                await to.drain()
            if not read:
                return
    except OSError:
        pass
