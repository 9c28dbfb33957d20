"""Agents that listen: each connection is one worker on this machine, for as long as it lasts. IO.

python -m loadgen.cluster.listening HOST:PORT       with LOADGEN_TOKEN in the environment
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from loadgen.cluster import channel
from loadgen.cluster.channel import Channel
from loadgen.cluster.node_agent import NodeAgent
from loadgen.core.errors import OK, UserError
from loadgen.shell.ending import ending
from loadgen.shell.output import say

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
    say(f"listening at {host}:{port}")
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


def main(arguments: Sequence[str]) -> int:
    """Listen at the one address given, HOST:PORT; OK when told to leave. Raises UserError."""
    host, _, port = arguments[0].rpartition(":") if len(arguments) == 1 else ("", "", "")
    if not host or not port.isdecimal():
        hint = f"python -m loadgen.cluster.listening HOST:PORT, with {channel.TOKEN} in the environment"
        raise UserError(
            "invalid_value", "an agent listens at one HOST:PORT", " ".join(arguments), hint
        )
    try:
        asyncio.run(listen(host, int(port), channel.token()))
    except (OSError, OverflowError) as error:
        raise UserError(
            "cannot_listen", f"cannot listen: {error}", arguments[0], "another port or address"
        ) from None
    return OK


if __name__ == "__main__":
    sys.exit(ending(lambda: main(sys.argv[1:])))
