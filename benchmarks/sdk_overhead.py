"""What `instrument` adds to an application's call and to each chunk of its stream, against the same client without it.

The transport is a stub inside the process, so that only the client's own work is timed; both sides alternate, and the
smallest of many rounds counts: the machine's other work only ever adds. Run: python benchmarks/sdk_overhead.py
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import openai
from loadgen_sdk import TokenPrice, instrument

CALL_LIMIT_US, CHUNK_LIMIT_US = 30.0, 1.0
CHUNKS = 500
CALLS = 10

ANSWER = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
}  # fmt: skip
CHUNK = {
    "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
    "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}],
}  # fmt: skip


def http() -> Any:
    """The HTTP library that this version of the package is built on."""
    return __import__("httpx2" if "httpx2" in sys.modules else "httpx")


def answer(request: Any) -> Any:
    return http().Response(200, json=ANSWER, headers={"x-request-id": "r"})


def clients() -> tuple[Any, Any]:
    library = http()
    blocking = openai.OpenAI(api_key="k", http_client=library.Client(transport=library.MockTransport(answer)))
    waiting = openai.AsyncOpenAI(api_key="k", http_client=library.AsyncClient(transport=library.MockTransport(answer)))
    return blocking, waiting


def differences(plain: Callable[[], float], ours: Callable[[], float], rounds: int) -> tuple[float, float]:
    """(smallest plain, smallest ours), in seconds per unit, from alternating rounds."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for side, measure in enumerate((plain, ours)):
            best[side] = min(best[side], measure())
    return best[0], best[1]


def per_call(create: Any) -> Callable[[], float]:
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            create(model="m", messages=messages)
        return (time.perf_counter() - start) / CALLS

    return measure


def per_call_async(create: Any, runner: asyncio.Runner) -> Callable[[], float]:
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    async def calls() -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            await create(model="m", messages=messages)
        return (time.perf_counter() - start) / CALLS

    return lambda: runner.run(calls())


def own_call(create: Callable[..., Any]) -> Callable[[], float]:
    """The same where the package answers at once: what is ours alone."""
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(200):
            create(model="m", messages=messages)
        return (time.perf_counter() - start) / 200

    return measure


def stubs(told: list[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from loadgen_sdk.app.instrumentation import _measured_blocking
    from loadgen_sdk.app.observed_call import Setting
    from loadgen_sdk.app.policy import Policy
    from openai.types.chat import ChatCompletion

    made = ChatCompletion.model_validate(ANSWER)
    head = http().Headers({"x-request-id": "r", "content-type": "application/json", "date": "now", "server": "s"})

    class Raw:
        headers, retries_taken = head, 0

        @staticmethod
        def parse() -> Any:
            return made

    def whole(**_: Any) -> Any:
        return Raw

    def plain(**_: Any) -> Any:
        return made

    manner = Policy(observers=(told.append,), prices=TokenPrice(1, 2))
    return plain, _measured_blocking(plain, whole, "chat", Setting(manner, "h:1", "k", False))


class Chunks:
    """Chunks that cost nothing to make, in the place of the package's own decoder."""

    def __init__(self) -> None:
        from openai.types.chat import ChatCompletionChunk

        self.chunks = [ChatCompletionChunk.model_validate(CHUNK)] * CHUNKS

    def __iter__(self) -> Any:
        yield from self.chunks

    async def __aiter__(self) -> Any:
        for chunk in self.chunks:
            yield chunk


def per_chunk(measured: bool) -> Callable[[], float]:
    from loadgen_sdk.app.instrumentation import _ObservedStream
    from loadgen_sdk.app.observed_call import ObservedCall, Setting
    from loadgen_sdk.app.policy import Policy

    chunks = Chunks()

    def measure() -> float:
        source: Any = chunks
        if measured:
            source = _ObservedStream(source, ObservedCall("chat", Setting(Policy(), "", "", False), {"stream": True}))  # type: ignore[arg-type]
        start = time.perf_counter()
        for _ in source:
            pass
        return (time.perf_counter() - start) / CHUNKS

    return measure


def per_chunk_async(measured: bool, runner: asyncio.Runner) -> Callable[[], float]:
    from loadgen_sdk.app.instrumentation import _ObservedAsyncStream
    from loadgen_sdk.app.observed_call import ObservedCall, Setting
    from loadgen_sdk.app.policy import Policy

    chunks = Chunks()

    async def run() -> float:
        source: Any = chunks
        if measured:
            source = _ObservedAsyncStream(
                source, ObservedCall("chat", Setting(Policy(), "", "", False), {"stream": True})
            )  # type: ignore[arg-type]
        start = time.perf_counter()
        async for _ in source:
            pass
        return (time.perf_counter() - start) / CHUNKS

    return lambda: runner.run(run())


def import_ms(statement: str) -> float:
    """Of a fresh interpreter, what this statement adds; the smallest of several."""

    def once(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return (min(once(statement) for _ in range(7)) - min(once("pass") for _ in range(7))) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    blocking, waiting = clients()
    options: dict[str, Any] = {"prices": TokenPrice(1, 2)}
    told: list[Any] = []
    gc.collect()
    gc.freeze()
    figures: dict[str, Any] = {"openai": openai.__version__, "python": sys.version.split()[0]}
    with asyncio.Runner() as runner:
        pairs = {
            "call_blocking": (
                per_call(blocking.chat.completions.create),
                per_call(instrument(blocking, told.append, **options).chat.completions.create),
            ),
            "call_async": (
                per_call_async(waiting.chat.completions.create, runner),
                per_call_async(instrument(waiting, told.append, **options).chat.completions.create, runner),
            ),
            "call_ours_alone": tuple(map(own_call, stubs(told))),
            "chunk_blocking": (per_chunk(False), per_chunk(True)),
            "chunk_async": (per_chunk_async(False, runner), per_chunk_async(True, runner)),
        }
        over = False
        for name, (plain, ours) in pairs.items():
            base, with_us = differences(plain, ours, rounds)
            told.clear()
            added, limit = (with_us - base) * 1e6, CALL_LIMIT_US if name.startswith("call") else CHUNK_LIMIT_US
            over = over or added > limit
            figures[f"{name}_us"] = {"plain": round(base * 1e6, 3), "added": round(added, 3), "limit": limit}
    figures["import_ms"] = {
        "loadgen_sdk": round(import_ms("import loadgen_sdk"), 1),
        "Client": round(import_ms("from loadgen_sdk import Client"), 1),
        "instrument": round(import_ms("from loadgen_sdk import instrument"), 1),
        "loadgen": round(import_ms("import loadgen"), 1),
        "openai": round(import_ms("import openai"), 1),
    }
    print(json.dumps(figures, indent=2))
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
