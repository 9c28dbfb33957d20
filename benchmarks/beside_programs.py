"""Small programs that use other packages as their applications do, each in a process of its own. See `beside.py`.

    python benchmarks/beside_programs.py NAME URL REFUSING_URL

A program makes four kinds of calls: answered whole, streamed to the end, streamed and left early, and refused by the
server. It returns the exceptions that reached it. What the SDK told of the calls is printed as JSON, beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from typing import Any

SAID = "Say something"
MESSAGES = [{"role": "user", "content": SAID}]
MODEL = "sim"
MANY = 20
KEY = "unused"


@contextlib.contextmanager
def caught(names: list[str]) -> Iterator[None]:
    """What a call raises is what the application sees: kept by its name."""
    try:
        yield
    except Exception as error:
        names.append(type(error).__name__)


def chat(client: Any, max_tokens: int = 8, **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=max_tokens, **more
    )


def openai_calls(client: Any, refused: Any) -> list[str]:
    """The four kinds of calls, by blocking clients of the openai package."""
    names: list[str] = []
    assert chat(client).choices[0].message.content
    assert sum(1 for _ in chat(client, stream=True)) > 8
    with chat(client, stream=True) as stream:
        next(iter(stream))
    with caught(names):
        chat(refused)
    return names


def made(url: str, refusing: str) -> tuple[Any, Any]:
    import openai

    return tuple(openai.OpenAI(base_url=one, api_key=KEY, max_retries=0) for one in (url, refusing))  # type: ignore


def openai(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    from loadgen_sdk import instrument

    client, refused = (instrument(one, told, ask_usage=True) for one in made(url, refusing))
    return openai_calls(client, refused)


def anthropic(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    import anthropic as package
    from loadgen_sdk import instrument

    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}
    names: list[str] = []
    ours, refused = (
        instrument(
            package.Anthropic(base_url=one.removesuffix("/v1"), api_key=KEY, max_retries=0),
            told,
            ask_usage=True,
        )
        for one in (url, refusing)
    )
    assert ours.messages.create(**asked).content
    with ours.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream)
    with ours.messages.create(**asked, stream=True) as events:
        for event in events:
            if event.type == "content_block_delta":
                break
    with caught(names):
        refused.messages.create(**asked)
    return names


def gevent(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    """Greenlets under one throttle: none blocks the others, and no permit is lost."""
    import gevent as package
    from loadgen_sdk import Throttle, instrument

    throttle = Throttle(concurrency=4)
    client, refused = (
        instrument(one, told, ask_usage=True, throttle=throttle) for one in made(url, refusing)
    )
    names = openai_calls(client, refused)
    package.joinall(
        [package.spawn(chat, client) for _ in range(MANY)], raise_error=True, timeout=60
    )
    assert throttle.in_flight(key=KEY, model=MODEL) == 0
    return names


def openllmetry(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    """Both say a call once: ours leaves spans to the other."""
    from loadgen_sdk import OpenTelemetry, instrument
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, tracer = InMemorySpanExporter(), TracerProvider()
    tracer.add_span_processor(SimpleSpanProcessor(spans))
    OpenAIInstrumentor().instrument(tracer_provider=tracer)
    ours = OpenTelemetry(tracer_provider=tracer)
    client, refused = (instrument(one, [ours, told], ask_usage=True) for one in made(url, refusing))
    names = openai_calls(client, refused)
    scopes = [
        getattr(span.instrumentation_scope, "name", "") for span in spans.get_finished_spans()
    ]
    assert len(scopes) == 4 and "loadgen_sdk" not in scopes, scopes
    return names


def langfuse(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    """Its client is openai's with wrapped methods; what it exports goes to the refusing endpoint."""
    from langfuse.openai import openai as package
    from loadgen_sdk import instrument

    client, refused = (
        instrument(package.OpenAI(base_url=one, api_key=KEY, max_retries=0), told, ask_usage=True)
        for one in (url, refusing)
    )
    return openai_calls(client, refused)


def openai_agents(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    import openai as package
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        set_tracing_disabled,
    )
    from loadgen_sdk import instrument

    set_tracing_disabled(True)
    names: list[str] = []

    async def run() -> None:
        async with (
            package.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as plain_client,
            package.AsyncOpenAI(base_url=refusing, api_key=KEY, max_retries=0) as plain_refused,
        ):
            client = instrument(plain_client, told, ask_usage=True)
            refused = instrument(plain_refused, told, ask_usage=True)
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                agent = Agent(
                    name="a",
                    instructions="Be brief.",
                    model=kind(model=MODEL, openai_client=client),
                )
                assert (await Runner.run(agent, SAID)).final_output
                async for _ in Runner.run_streamed(agent, SAID).stream_events():
                    pass
                agent.model = kind(model=MODEL, openai_client=refused)
                with caught(names):
                    await Runner.run(agent, SAID)
            stream = await chat(client, stream=True)
            await anext(stream)
            await stream.close()

    asyncio.run(run())
    return names


def pydantic_ai(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    import openai as package
    from loadgen_sdk import instrument
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    names: list[str] = []

    async def run() -> None:
        client = instrument(package.AsyncOpenAI(base_url=url, api_key=KEY), told, ask_usage=True)
        refused = instrument(
            package.AsyncOpenAI(base_url=refusing, api_key=KEY, max_retries=0),
            told,
            ask_usage=True,
        )
        agent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client)))
        assert (await agent.run(SAID)).output
        async with agent.run_stream(SAID) as whole:
            assert [piece async for piece in whole.stream_text(delta=True, debounce_by=None)]
        async with agent.run_stream(SAID) as left:
            async for _ in left.stream_text(delta=True, debounce_by=None):
                break
        provider = OpenAIProvider(openai_client=refused)
        with caught(names):
            await Agent(OpenAIChatModel(MODEL, provider=provider)).run(SAID)

    asyncio.run(run())
    return names


def instructor(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    """The endpoint's words are no JSON: instructor asks a second time, and raises an error of its own."""
    import instructor as package
    from loadgen_sdk import instrument
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    client, refused = (instrument(one, told, ask_usage=True) for one in made(url, refusing))
    names = openai_calls(client, refused)
    for one, attempts in ((client, 2), (refused, 1)):
        with caught(names):
            package.from_openai(one, mode=package.Mode.JSON).chat.completions.create(
                model=MODEL, messages=MESSAGES, response_model=Person, max_retries=attempts
            )
    return names


def litellm(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    import litellm
    from loadgen_sdk import instrument

    package = instrument(litellm, told, ask_usage=True)

    names: list[str] = []
    asked: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "max_tokens": 8,
        "api_key": KEY,
    }

    async def ask() -> None:
        assert (await package.acompletion(**asked, api_base=url)).choices
        async for _ in await package.acompletion(**asked, api_base=url, stream=True):
            pass

    assert package.completion(**asked, api_base=url).choices
    assert [*package.completion(**asked, api_base=url, stream=True)]
    stream = package.completion(**asked, api_base=url, stream=True)
    next(iter(stream))
    del stream
    with caught(names):
        package.completion(**asked, api_base=refusing, max_retries=0)
    asyncio.run(ask())
    return names


def fastapi(told: Callable[[Any], None], url: str, refusing: str) -> list[str]:
    """An application that hands a stream on; one of its users goes away in the middle."""
    import fastapi as package
    import openai as clients
    import uvicorn
    from fastapi.responses import JSONResponse, StreamingResponse
    from loadgen_sdk import instrument, labelled

    app = package.FastAPI()
    own, refused = (
        instrument(
            clients.AsyncOpenAI(base_url=one, api_key=KEY, max_retries=0), told, ask_usage=True
        )
        for one in (url, refusing)
    )
    names: list[str] = []

    async def pieces(tokens: int) -> AsyncIterator[str]:
        async with await chat(own, tokens, stream=True) as stream:
            async for event in stream:
                yield event.choices[0].delta.content or " " if event.choices else " "

    async def whole() -> Any:
        with labelled(feature="whole"):
            return {"text": (await chat(own)).choices[0].message.content}

    async def streamed() -> Any:
        return StreamingResponse(pieces(8))

    async def long() -> Any:
        return StreamingResponse(pieces(5000))

    async def error() -> Any:
        with caught(names):
            await chat(refused)
        return JSONResponse({"error": names[-1]}, 503)

    for path, door in (
        ("/whole", whole),
        ("/stream", streamed),
        ("/refused", error),
        ("/long", long),
    ):
        app.add_api_route(path, door)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        for path, stays in (
            ("/whole", True),
            ("/stream", True),
            ("/refused", True),
            ("/long", False),
        ):
            with socket.create_connection(listener.getsockname()) as user:
                user.sendall(
                    f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()
                )
                received = user.recv(65536)
                while (stays or received.endswith(b"\r\n\r\n")) and (more := user.recv(65536)):
                    received += more  # who leaves has seen a piece: the head alone comes before the call is sent
                assert received.startswith(
                    b"HTTP/1.1 503" if path == "/refused" else b"HTTP/1.1 200"
                ), received
    finally:
        server.should_exit = True
        thread.join()
    return names


PROGRAMS: dict[str, tuple[Callable[..., list[str]], tuple[str, ...]]] = {
    # the program, and the packages of which it is, that of the table first
    "openai": (openai, ("openai",)),
    "anthropic": (anthropic, ("anthropic",)),
    "gevent": (gevent, ("gevent", "openai")),
    "opentelemetry-instrumentation-openai": (
        openllmetry,
        ("opentelemetry-instrumentation-openai", "opentelemetry-sdk", "openai"),
    ),
    "langfuse": (langfuse, ("langfuse", "openai")),
    "openai-agents": (openai_agents, ("openai-agents",)),
    "pydantic-ai": (pydantic_ai, ("pydantic-ai-slim[openai]",)),
    "instructor": (instructor, ("instructor",)),
    "litellm": (litellm, ("litellm",)),
    "fastapi": (fastapi, ("fastapi", "uvicorn", "openai")),
}
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGFUSE_PUBLIC_KEY": "pk-lf-1",
    "LANGFUSE_SECRET_KEY": "sk-lf-1",
    "OPENAI_API_KEY": KEY,
}


def child(name: str, url: str, refusing: str) -> None:
    os.environ.update(ENVIRONMENT, LANGFUSE_HOST=refusing.removesuffix("/v1"))
    if name == "gevent":
        from gevent import monkey

        monkey.patch_all()
    from loadgen_sdk.app.finishing import flush

    program, packages = PROGRAMS[name]
    told: list[Any] = []
    raised = program(told.append, url, refusing)
    gc.collect()  # a stream that nobody holds any more ends with it
    flush()
    rows = [
        (one.status, one.streamed, one.input_tokens, one.output_tokens, one.token_source)
        for one in told
    ]
    versions = {package: version(package.partition("[")[0]) for package in packages}
    print(json.dumps({"versions": versions, "raised": raised, "told": rows}))


if __name__ == "__main__":
    child(*sys.argv[1:])
