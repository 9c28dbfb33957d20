"""Agents that listen: each connection is one worker on this machine, for as long as it lasts. IO.

python -m loadgen.cluster.listening HOST:PORT       with LOADGEN_TOKEN in the environment
"""

from __future__ import annotations

import asyncio
import sys

from loadgen.cluster import channel
from loadgen.cluster.channel import Channel
from loadgen.cluster.node_agent import NodeAgent

METHODS = frozenset({"clock", "facts", "start", "niceness", "tell", "signal", "take", "end"})
LEAVE = "leave"


async def listen(host: str, port: int, known: bytes) -> None:
    """Run workers for who knows the token, until it says LEAVE. Raises OSError for an address that is taken."""
    left = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _carry(await channel.greet(reader, writer, known, asks=False), left)
        except ConnectionError:
            pass  # it did not know the token, or went away: the next one may come
        finally:
            writer.close()

    server = await asyncio.start_server(connected, host, port)
    async with server:
        await left.wait()


async def _carry(calls: Channel, left: asyncio.Event) -> None:
    """Answer the calls to one agent until the connection ends, and its worker with it."""
    agent, answers, started = NodeAgent(), set[asyncio.Task[None]](), False

    async def answer(number: int, method: str, arguments: tuple[object, ...]) -> None:
        try:
            calls.send((number, True, await getattr(agent, method)(*arguments)))
        except Exception as error:  # told to the driver, which says what it means
            calls.send((number, False, f"{type(error).__name__}: {error}"))

    try:
        while True:
            number, method, arguments = await calls.receive()
            if method == LEAVE:
                left.set()
                return
            if method not in METHODS:
                return
            started = started or method == "start"
            task = asyncio.create_task(answer(number, method, arguments))
            answers.add(task)
            task.add_done_callback(answers.discard)
    finally:
        if started:
            await agent.end()


def main(address: str) -> None:
    """Listen at HOST:PORT."""
    host, _, port = address.rpartition(":")
    asyncio.run(listen(host, int(port), channel.token()))


if __name__ == "__main__":
    main(sys.argv[1])
