"""Run small programs that use other packages as applications do, for `beside.py`.

    python benchmarks/beside_programs.py NAME URL REFUSING_URL

Each program runs in a process of its own and makes four kinds of calls: read whole, streamed to the
end, streamed and left early, and refused by the server. It returns the exceptions that reached it.
These and the measurements of the SDK are printed as JSON.
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

PROMPT = "Say something"
MESSAGES = [{"role": "user", "content": PROMPT}]
MODEL = "sim"
MAX_TOKENS = 8
GREENLETS = 20
KEY = "unused"


@contextlib.contextmanager
def record_exceptions(names: list[str]) -> Iterator[None]:
    """Append the class name of an exception that a call raises, as the application sees it."""
    try:
        yield
    except Exception as error:
        names.append(type(error).__name__)


def create_chat(client: Any, max_tokens: int = MAX_TOKENS, **options: Any) -> Any:
    """Send a chat completion."""
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=max_tokens, **options
    )


def make_four_calls(client: Any, refused_client: Any) -> list[str]:
    """Make the four kinds of calls with blocking clients of the openai package.

    A response is read whole, streamed to its end, and streamed and left after its first event; and
    a call is refused. Returns the class names of the exceptions that reached the application.
    """
    exception_names: list[str] = []
    assert create_chat(client, MAX_TOKENS).choices[0].message.content
    event_count = sum(1 for _ in create_chat(client, MAX_TOKENS, stream=True))
    assert event_count > MAX_TOKENS  # an event for each token, and the one with the token counts

    with create_chat(client, stream=True) as stream:
        next(iter(stream))

    with record_exceptions(exception_names):
        create_chat(refused_client)

    return exception_names


def create_clients(url: str, refusing: str) -> tuple[object, object]:
    """Return an OpenAI client of the endpoint and one of the refusing endpoint."""
    import openai

    return tuple(
        openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) for base_url in (url, refusing)
    )  # type: ignore


def run_openai(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Make four kinds of calls with the openai package.

    Like all programs here, it reports each call to `observer`, and returns the class names of the
    exceptions that reached it.
    """
    from loadgen_sdk import instrument

    client, refused_client = (
        instrument(plain_client, observer, ask_usage=True)
        for plain_client in create_clients(url, refusing_url)
    )
    return make_four_calls(client, refused_client)


def run_anthropic(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Make four kinds of calls with the anthropic package, with its own streaming helper.

    Returns the class names of the exceptions that reached the application.
    """
    import anthropic
    from loadgen_sdk import instrument

    def create_client(openai_url: str) -> Any:
        """Return an instrumented client; its package adds /v1 to the address."""
        base_url = openai_url.removesuffix("/v1")
        client = anthropic.Anthropic(base_url=base_url, api_key=KEY, max_retries=0)
        return instrument(client, observer, ask_usage=True)

    client = create_client(url)
    refused_client = create_client(refusing_url)
    request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
    assert client.messages.create(**request).content

    with client.messages.stream(**request) as stream:
        assert "".join(stream.text_stream)

    with client.messages.create(**request, stream=True) as events:
        # Leave the stream early, after its first piece of text.
        next(event for event in events if event.type == "content_block_delta")

    exception_names: list[str] = []
    with record_exceptions(exception_names):
        refused_client.messages.create(**request)

    return exception_names


def run_gevent(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Run greenlets under one throttle: none blocks the others, and no permit is lost."""
    import gevent as package
    from loadgen_sdk import Throttle, instrument

    throttle = Throttle(concurrency=4)
    client, refused_client = (
        instrument(plain_client, observer, ask_usage=True, throttle=throttle)
        for plain_client in create_clients(url, refusing_url)
    )
    names = make_four_calls(client, refused_client)
    package.joinall(
        [package.spawn(create_chat, client) for _ in range(GREENLETS)], raise_error=True, timeout=60
    )
    assert throttle.in_flight(key=KEY, model=MODEL) == 0

    return names


def run_openllmetry(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Run beside OpenLLMetry: each call must give one span, and the SDK adds no second one."""
    from loadgen_sdk import OpenTelemetry, instrument
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, tracer = InMemorySpanExporter(), TracerProvider()
    tracer.add_span_processor(SimpleSpanProcessor(spans))
    OpenAIInstrumentor().instrument(tracer_provider=tracer)
    telemetry = OpenTelemetry(tracer_provider=tracer)
    client, refused_client = (
        instrument(plain_client, [telemetry, observer], ask_usage=True)
        for plain_client in create_clients(url, refusing_url)
    )
    names = make_four_calls(client, refused_client)
    scopes = [
        getattr(span.instrumentation_scope, "name", "") for span in spans.get_finished_spans()
    ]
    assert len(scopes) == 4 and "loadgen_sdk" not in scopes, scopes

    return names


def run_langfuse(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Run langfuse, whose client is that of openai with wrapped methods.

    What it exports goes to the refusing endpoint.
    """
    from langfuse.openai import openai as package
    from loadgen_sdk import instrument

    client, refused_client = (
        instrument(
            package.OpenAI(base_url=base_url, api_key=KEY, max_retries=0), observer, ask_usage=True
        )
        for base_url in (url, refusing_url)
    )
    return make_four_calls(client, refused_client)


def run_openai_agents(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Run an agent of openai-agents over the chat completions API and over the responses API.

    Returns the class names of the exceptions that reached the application.
    """
    from agents import set_tracing_disabled

    set_tracing_disabled(True)
    exception_names: list[str] = []
    asyncio.run(_run_agents(observer, url, refusing_url, exception_names))
    return exception_names


def run_pydantic_ai(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Run an agent of pydantic-ai, once whole, once streamed and once left early."""
    import openai as package
    from loadgen_sdk import instrument
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    names: list[str] = []

    async def run() -> None:
        client = instrument(
            package.AsyncOpenAI(base_url=url, api_key=KEY), observer, ask_usage=True
        )
        refused_client = instrument(
            package.AsyncOpenAI(base_url=refusing_url, api_key=KEY, max_retries=0),
            observer,
            ask_usage=True,
        )
        agent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client)))
        assert (await agent.run(PROMPT)).output

        async with agent.run_stream(PROMPT) as complete_run:
            assert [piece async for piece in complete_run.stream_text(delta=True, debounce_by=None)]

        async with agent.run_stream(PROMPT) as abandoned_run:
            async for _ in abandoned_run.stream_text(delta=True, debounce_by=None):
                break

        provider = OpenAIProvider(openai_client=refused_client)
        with record_exceptions(names):
            await Agent(OpenAIChatModel(MODEL, provider=provider)).run(PROMPT)

    asyncio.run(run())
    return names


async def _run_agents(
    observer: Callable[[Any], None], url: str, refusing_url: str, exception_names: list[str]
) -> None:
    """Make the four kinds of calls: three by agents, and a stream that is left early by hand.

    An agent reads a stream to its end, so the last kind needs the openai client itself.
    """
    import openai
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel
    from loadgen_sdk import instrument

    async with (
        openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as plain_client,
        openai.AsyncOpenAI(base_url=refusing_url, api_key=KEY, max_retries=0) as plain_refused,
    ):
        client = instrument(plain_client, observer, ask_usage=True)
        refused_client = instrument(plain_refused, observer, ask_usage=True)
        for model_class in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = model_class(model=MODEL, openai_client=client)
            refused_model = model_class(model=MODEL, openai_client=refused_client)
            await _run_agent(model, refused_model, exception_names)

        stream = await create_chat(client, stream=True)
        await anext(stream)
        await stream.close()


async def _run_agent(model: Any, refused_model: Any, exception_names: list[str]) -> None:
    """Run an agent whole and streamed, and once with a model that the server refuses."""
    from agents import Agent, Runner

    agent = Agent(name="a", instructions="Be brief.", model=model)
    assert (await Runner.run(agent, PROMPT)).final_output

    async for _ in Runner.run_streamed(agent, PROMPT).stream_events():
        pass

    agent.model = refused_model
    with record_exceptions(exception_names):
        await Runner.run(agent, PROMPT)


def run_instructor(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Make four kinds of calls, then call through instructor, which parses responses as JSON.

    The endpoint's text is not JSON. So instructor retries, and then raises its own exception.
    Returns the class names of the exceptions that reached the application.
    """
    import instructor
    from loadgen_sdk import instrument
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    def extract_person(openai_client: object, attempts: int) -> None:
        """Let instructor parse a response, in so many attempts."""
        json_client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON)
        json_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=Person, max_retries=attempts
        )

    client, refused_client = (
        instrument(plain_client, observer, ask_usage=True)
        for plain_client in create_clients(url, refusing_url)
    )
    exception_names = make_four_calls(client, refused_client)
    with record_exceptions(exception_names):
        extract_person(client, attempts=2)

    with record_exceptions(exception_names):
        extract_person(refused_client, attempts=1)

    return exception_names


def run_litellm(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Run the functions of litellm, blocking and async."""
    import litellm
    from loadgen_sdk import instrument

    package = instrument(litellm, observer, ask_usage=True)

    names: list[str] = []
    request: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "max_tokens": 8,
        "api_key": KEY,
    }

    async def complete_async() -> None:
        assert (await package.acompletion(**request, api_base=url)).choices
        async for _ in await package.acompletion(**request, api_base=url, stream=True):
            pass

    assert package.completion(**request, api_base=url).choices
    assert [*package.completion(**request, api_base=url, stream=True)]
    stream = package.completion(**request, api_base=url, stream=True)
    next(iter(stream))
    del stream

    with record_exceptions(names):
        package.completion(**request, api_base=refusing_url, max_retries=0)

    asyncio.run(complete_async())
    return names


def run_fastapi(observer: Callable[[Any], None], url: str, refusing_url: str) -> list[str]:
    """Run an application that forwards streams, and let one of its users leave in the middle.

    Returns the class names of the exceptions that reached the application.
    """
    import uvicorn

    exception_names: list[str] = []
    app = create_forwarding_app(observer, url, refusing_url, exception_names)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    try:
        address = listener.getsockname()
        read_response(address, "/whole", expected_status=200)
        read_response(address, "/stream", expected_status=200)
        read_response(address, "/refused", expected_status=503)
        read_response(address, "/long", expected_status=200, leaves_early=True)
    finally:
        server.should_exit = True
        thread.join()

    return exception_names


def create_forwarding_app(
    observer: Callable[[Any], None], url: str, refusing_url: str, exception_names: list[str]
) -> Any:
    """Return an application that answers each request with a call of a model.

    It appends the class names of the exceptions of these calls to `exception_names`.
    """
    import fastapi
    import openai
    from fastapi.responses import JSONResponse, StreamingResponse
    from loadgen_sdk import instrument, labelled

    client, refused_client = (
        instrument(
            openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0),
            observer,
            ask_usage=True,
        )
        for base_url in (url, refusing_url)
    )

    async def forward_pieces(tokens: int) -> AsyncIterator[str]:
        async with await create_chat(client, tokens, stream=True) as stream:
            async for event in stream:
                content = event.choices[0].delta.content if event.choices else None
                yield content or " "

    async def respond_whole() -> Any:
        with labelled(feature="whole"):
            completion = await create_chat(client)
        return {"text": completion.choices[0].message.content}

    async def respond_streamed() -> object:
        return StreamingResponse(forward_pieces(MAX_TOKENS))

    async def respond_long() -> object:
        return StreamingResponse(forward_pieces(5000))

    async def respond_refused() -> Any:
        with record_exceptions(exception_names):
            await create_chat(refused_client)
        return JSONResponse({"error": exception_names[-1]}, 503)

    app = fastapi.FastAPI()
    app.add_api_route("/whole", respond_whole)
    app.add_api_route("/stream", respond_streamed)
    app.add_api_route("/refused", respond_refused)
    app.add_api_route("/long", respond_long)

    return app


def read_response(
    address: tuple[str, int], path: str, *, expected_status: int, leaves_early: bool = False
) -> None:
    """Send a GET request to the application and read its response, then close the connection.

    With `leaves_early`, only the head and the first piece of the body are read: the head alone may
    come before the application has called the model.
    """
    request = f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(request.encode())
        received = connection.recv(65536)
        while True:
            has_only_head = received.endswith(b"\r\n\r\n")
            if leaves_early and not has_only_head:
                break
            chunk = connection.recv(65536)
            if not chunk:
                break
            received += chunk

    assert received.startswith(f"HTTP/1.1 {expected_status}".encode()), received


PROGRAMS: dict[str, tuple[Callable[..., list[str]], tuple[str, ...]]] = {
    # the program, and the packages of which it is, that of the table first
    "openai": (run_openai, ("openai",)),
    "anthropic": (run_anthropic, ("anthropic",)),
    "gevent": (run_gevent, ("gevent", "openai")),
    "opentelemetry-instrumentation-openai": (
        run_openllmetry,
        ("opentelemetry-instrumentation-openai", "opentelemetry-sdk", "openai"),
    ),
    "langfuse": (run_langfuse, ("langfuse", "openai")),
    "openai-agents": (run_openai_agents, ("openai-agents",)),
    "pydantic-ai": (run_pydantic_ai, ("pydantic-ai-slim[openai]",)),
    "instructor": (run_instructor, ("instructor",)),
    "litellm": (run_litellm, ("litellm",)),
    "fastapi": (run_fastapi, ("fastapi", "uvicorn", "openai")),
}
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGFUSE_PUBLIC_KEY": "pk-lf-1",
    "LANGFUSE_SECRET_KEY": "sk-lf-1",
    "OPENAI_API_KEY": KEY,
}


def run_program(name: str, url: str, refusing_url: str) -> None:
    """Run one program and print its versions, exceptions and measurements as JSON."""
    prepare_process(name, refusing_url)
    from loadgen_sdk.app.background import flush

    program, packages = PROGRAMS[name]
    measurements: list[Any] = []
    exception_names = program(measurements.append, url, refusing_url)

    # A stream that was left early is measured when it is deleted, if the program did not close it.
    gc.collect()
    flush()
    rows = [
        (
            measurement.status,
            measurement.streamed,
            measurement.input_tokens,
            measurement.output_tokens,
            measurement.token_source,
        )
        for measurement in measurements
    ]
    versions = {package: version(package.partition("[")[0]) for package in packages}
    print(json.dumps({"versions": versions, "raised": exception_names, "told": rows}))


def prepare_process(name: str, refusing_url: str) -> None:
    """Set the environment of the packages, and for gevent replace blocking functions.

    This comes before the imports of the SDK and of the packages, because they read both.
    """
    os.environ.update(ENVIRONMENT, LANGFUSE_HOST=refusing_url.removesuffix("/v1"))
    if name == "gevent":
        from gevent import monkey

        monkey.patch_all()


if __name__ == "__main__":
    run_program(*sys.argv[1:])
