"""Agents that listen: who knows the token is heard, nobody else; a connection is a worker."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from refusals import refused

from loadgen.cluster import channel, listeners, listening
from loadgen.cluster.crew import Roll
from loadgen.core.errors import UserError
from loadgen.core.execution.events import RunEvent, Waits

KNOWN = b"of all who belong together"


async def with_agent(use: Callable[[int], Awaitable[Any]]) -> Any:
    """What `use` gives of an agent at a port of this machine."""
    server = asyncio.create_task(listening.listen("127.0.0.1", port := 17077, KNOWN))
    (node,) = listeners.nodes(f"agents:127.0.0.1:{port}")
    while not await listeners.answering([node]):
        assert not server.done()
    found = await use(port)
    await listeners.dismiss([node], KNOWN)
    await server
    return found


def test_an_address_names_agents_and_their_cpus() -> None:
    found = listeners.nodes("agents:load-0.load:7077*4,load-1.load:7077,10.0.0.3:1,10.0.0.3:2")
    assert [(node.name, node.address, node.port, node.cpus) for node in found] == [
        ("load-0", "load-0.load", 7077, 4),
        ("load-1", "load-1.load", 7077, 1),
        ("10.0.0.3:1", "10.0.0.3", 1, 1),
        ("10.0.0.3:2", "10.0.0.3", 2, 1),
    ]
    with refused(UserError, "invalid_value"):
        listeners.nodes("agents:host")
    with refused(UserError, "duplicate", "--ray"):
        listeners.nodes("agents:host:1,other:1,host:1*2")


def test_without_a_token_there_are_no_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(channel.TOKEN, "short")
    with refused(UserError, "missing_option"):
        listeners.ListeningNodes("agents:127.0.0.1:1", Roll())


def test_an_agent_answers_who_knows_the_token_and_nobody_else() -> None:
    async def use(port: int) -> tuple[int, dict[str, Any], str]:
        (node,) = listeners.nodes(f"agents:127.0.0.1:{port}")
        caller = await listeners._connected(node, KNOWN)
        clock, facts = await asyncio.gather(caller.call("clock"), caller.call("facts", ()))
        with pytest.raises(RuntimeError, match="TypeError"):  # a fault there is told here
            await caller.call("clock", 1)
        with pytest.raises(ConnectionError):
            await listeners._connected(node, b"something else altogether")
        with pytest.raises(ConnectionError):
            await caller.call("__init__")
        caller.close()
        return clock, facts, caller._gone

    clock, facts, gone = asyncio.run(with_agent(use))
    assert clock > 0 and facts["same"]["numpy"] and gone


def test_a_wait_for_an_agent_is_told_once_with_what_starts_it() -> None:
    told: list[RunEvent] = []

    async def room() -> None:
        nodes = listeners.ListeningNodes("agents:127.0.0.1:17078*1,127.0.0.1:17079*1", Roll())
        waiting = asyncio.create_task(nodes.agents(2, told.append))
        while not told:
            await asyncio.sleep(0)
        started = [
            asyncio.create_task(listening.listen("127.0.0.1", port, KNOWN))
            for port in (17078, 17079)
        ]
        await waiting
        nodes.end()
        await listeners.dismiss(listeners.nodes(nodes.address), KNOWN)
        await asyncio.gather(*started)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(channel.TOKEN, KNOWN.decode())
        asyncio.run(room())
    (waits,) = told
    assert (
        isinstance(waits, Waits)
        and "127.0.0.1:17078" in waits.what
        and listeners.START in waits.what
    )


@pytest.mark.parametrize(
    "typed", [[], ["--help"], ["127.0.0.1:port"], ["a:1", "b:2"], ["127.0.0.1:99999"]]
)
def test_an_agent_that_is_called_wrongly_says_how(
    typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(channel.TOKEN, KNOWN.decode())
    with refused(UserError, "cannot_listen" if "127.0.0.1:99999" in typed else "invalid_value"):
        listening.main(typed)


def test_what_was_not_sent_by_who_knows_the_token_is_not_unpickled() -> None:
    done: list[str] = []

    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return done.append, ("unpickled",)

    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = pickle.dumps(Bad())
        writer.write(bytes(32) + len(data).to_bytes(8, "little") + bytes(32) + data)
        assert len(await reader.read()) == 32, "its greeting, and the end"
        writer.close()

    asyncio.run(with_agent(use))
    assert not done


def test_a_node_that_comes_back_was_not_lost() -> None:
    roll = Roll({"a": "load-0", "b": "load-1"})
    roll.leave_out({"a"})
    assert roll.missing == ["load-0"] and roll.placed == {"b": "load-1"}
    roll.back({"a", "b"})
    assert not roll.missing and not roll.lost
