"""Run small programs that use other packages as applications do, for `beside.py`.

    python benchmarks/beside_programs.py NAME URL REFUSING_URL

Each program runs in a process of its own and makes four kinds of calls: a complete one, a streamed
one, an abandoned one (a stream that is left early), and one that the server refuses. It returns the
exceptions that the application sees. These and the measurements of the SDK are printed as JSON.
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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    # The SDK is imported by each program, because gevent must change the standard library first.
    from loadgen_sdk import Measurement

PROMPT = "Say something"
MESSAGES = [{"role": "user", "content": PROMPT}]
MODEL = "sim"
MAX_TOKENS = 8
LONG_STREAM_TOKENS = 5000  # long enough that its reader leaves before the end
API_KEY = "unused"
GREENLETS = 20
MAX_CONCURRENT_GREENLETS = 4
RECEIVE_BYTES = 65_536
END_OF_HTTP_HEAD = b"\r\n\r\n"

Observer = Callable[["Measurement"], None]


class EndpointUrls(NamedTuple):
    """The URLs, ending in /v1, of an endpoint that responds and of one that refuses every call."""

    responding: str
    refusing: str


class ClientPair(NamedTuple):
    """A client of the endpoint that responds, and one of the endpoint that refuses every call."""

    responding: Any
    refused: Any


def create_client_pair(
    client_class: Callable[..., Any], urls: EndpointUrls, observer: Any, **sdk_options: Any
) -> ClientPair:
    """Return two clients that the SDK measures; they never retry a call.

    Args:
        client_class: A class of the openai or anthropic package, or of one that extends it.
        urls: The base URLs of the two clients.
        observer: Is called by the SDK with each measurement; or a list of such functions.
        sdk_options: Further options of `instrument`.
    """
    from loadgen_sdk import instrument

    clients = []
    for url in urls:
        plain_client = client_class(base_url=url, api_key=API_KEY, max_retries=0)
        clients.append(instrument(plain_client, observer, ask_usage=True, **sdk_options))
    return ClientPair(*clients)


def create_chat(client: Any, max_tokens: int = MAX_TOKENS, **options: Any) -> Any:
    """Send a chat completion with an OpenAI client and return its result, which may be a stream."""
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=max_tokens, **options
    )


@contextlib.contextmanager
def record_exceptions(exception_names: list[str]) -> Iterator[None]:
    """Append the class name of an exception that the `with` block raises, and suppress it."""
    try:
        yield
    except Exception as error:
        exception_names.append(type(error).__name__)


def make_calls_of_all_kinds(clients: ClientPair) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call with blocking OpenAI clients.

    The abandoned call is a stream that is left after its first event. Returns the class names of
    the exceptions that the application sees.
    """
    assert create_chat(clients.responding).choices[0].message.content

    event_count = sum(1 for _ in create_chat(clients.responding, stream=True))
    assert event_count > MAX_TOKENS  # an event for each token, and one with the token counts

    with create_chat(clients.responding, stream=True) as stream:
        next(iter(stream))

    exception_names: list[str] = []
    with record_exceptions(exception_names):
        create_chat(clients.refused)
    return exception_names


def run_openai(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call with the openai package.

    Like all programs here, it reports each call to `observer`, and returns the class names of the
    exceptions that the application sees.
    """
    import openai

    return make_calls_of_all_kinds(create_client_pair(openai.OpenAI, urls, observer))


def run_anthropic(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call with the anthropic package.

    Returns the class names of the exceptions that the application sees.
    """
    import anthropic

    # The anthropic package adds /v1 to the URL itself.
    base_urls = EndpointUrls(*(url.removesuffix("/v1") for url in urls))
    clients = create_client_pair(anthropic.Anthropic, base_urls, observer)
    request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
    assert clients.responding.messages.create(**request).content

    with clients.responding.messages.stream(**request) as stream:
        assert "".join(stream.text_stream)

    with clients.responding.messages.create(**request, stream=True) as events:
        # Leave the stream early, after its first piece of text.
        next(event for event in events if event.type == "content_block_delta")

    exception_names: list[str] = []
    with record_exceptions(exception_names):
        clients.refused.messages.create(**request)
    return exception_names


def run_gevent(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make calls of all kinds, and then calls of many greenlets that share a throttle.

    A greenlet that waits for the throttle must not block the others, and afterwards the throttle
    must count no call as being in flight. Returns the class names of the exceptions that the
    application sees.
    """
    import gevent
    import openai
    from loadgen_sdk import Throttle

    throttle = Throttle(concurrency=MAX_CONCURRENT_GREENLETS)
    clients = create_client_pair(openai.OpenAI, urls, observer, throttle=throttle)
    exception_names = make_calls_of_all_kinds(clients)

    greenlets = [gevent.spawn(create_chat, clients.responding) for _ in range(GREENLETS)]
    gevent.joinall(greenlets, raise_error=True, timeout=60)
    assert throttle.in_flight(key=API_KEY, model=MODEL) == 0
    return exception_names


def run_openllmetry(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call that OpenLLMetry traces, too.

    Both the SDK and OpenLLMetry could create a span for a call. There must be exactly one, that of
    OpenLLMetry. Returns the class names of the exceptions that the application sees.
    """
    import openai
    from loadgen_sdk import OpenTelemetry
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    OpenAIInstrumentor().instrument(tracer_provider=tracer_provider)
    telemetry = OpenTelemetry(tracer_provider=tracer_provider)

    clients = create_client_pair(openai.OpenAI, urls, [telemetry, observer])
    exception_names = make_calls_of_all_kinds(clients)

    span_creators = [
        getattr(span.instrumentation_scope, "name", "") for span in exporter.get_finished_spans()
    ]
    assert len(span_creators) == 4, span_creators
    assert "loadgen_sdk" not in span_creators, span_creators
    return exception_names


def run_langfuse(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make calls of all kinds with langfuse, whose client wraps the one of the openai package.

    Returns the class names of the exceptions that the application sees.
    """
    from langfuse.openai import openai

    return make_calls_of_all_kinds(create_client_pair(openai.OpenAI, urls, observer))


def run_openai_agents(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Run an agent of openai-agents over the chat completions API and over the responses API.

    Returns the class names of the exceptions that the application sees.
    """
    from agents import set_tracing_disabled

    set_tracing_disabled(True)  # its traces would be sent to OpenAI
    return asyncio.run(_run_agents_of_both_apis(observer, urls))


async def _run_agents_of_both_apis(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call with openai-agents.

    An agent reads a stream to its end. So the stream that is left early is opened with the client
    of the openai package. Returns the class names of the exceptions.
    """
    import openai
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel

    exception_names: list[str] = []
    clients = create_client_pair(openai.AsyncOpenAI, urls, observer)
    for model_class in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = model_class(model=MODEL, openai_client=clients.responding)
        refused_model = model_class(model=MODEL, openai_client=clients.refused)
        await _run_agent(model)
        with record_exceptions(exception_names):
            await _run_agent(refused_model)

    stream = await create_chat(clients.responding, stream=True)
    await anext(stream)
    await stream.close()
    await clients.responding.close()
    await clients.refused.close()
    return exception_names


async def _run_agent(model: Any) -> None:
    """Run an agent of openai-agents, first with a complete response and then with a stream."""
    from agents import Agent, Runner

    agent = Agent(name="a", instructions="Be brief.", model=model)
    assert (await Runner.run(agent, PROMPT)).final_output

    async for _ in Runner.run_streamed(agent, PROMPT).stream_events():
        pass


def run_pydantic_ai(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call with pydantic-ai.

    Returns the class names of the exceptions that the application sees.
    """
    import openai

    clients = create_client_pair(openai.AsyncOpenAI, urls, observer)
    return asyncio.run(_run_pydantic_agents(clients))


async def _run_pydantic_agents(clients: ClientPair) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call with pydantic-ai.

    Returns the class names of the exceptions.
    """
    agent = _create_pydantic_agent(clients.responding)
    refused_agent = _create_pydantic_agent(clients.refused)
    assert (await agent.run(PROMPT)).output

    async with agent.run_stream(PROMPT) as complete_run:
        assert [piece async for piece in complete_run.stream_text(delta=True, debounce_by=None)]

    async with agent.run_stream(PROMPT) as abandoned_run:
        async for _ in abandoned_run.stream_text(delta=True, debounce_by=None):
            break

    exception_names: list[str] = []
    with record_exceptions(exception_names):
        await refused_agent.run(PROMPT)
    return exception_names


def _create_pydantic_agent(openai_client: Any) -> Any:
    """Return an agent of pydantic-ai that calls the model with this client."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=openai_client)
    return Agent(OpenAIChatModel(MODEL, provider=provider))


def run_instructor(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make calls of all kinds, and then call through instructor, which parses JSON.

    The endpoint's text is not JSON. So instructor retries, and then raises its own exception.
    Returns the class names of the exceptions that the application sees.
    """
    import openai

    clients = create_client_pair(openai.OpenAI, urls, observer)
    exception_names = make_calls_of_all_kinds(clients)
    with record_exceptions(exception_names):
        _extract_person(clients.responding, attempts=2)

    with record_exceptions(exception_names):
        _extract_person(clients.refused, attempts=1)

    return exception_names


def _extract_person(openai_client: Any, attempts: int) -> None:
    """Let instructor parse the JSON of a person from a response, in so many attempts."""
    import instructor
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    json_client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON)
    json_client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_model=Person,
        max_retries=attempts,
    )


def run_litellm(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Make a complete, a streamed, an abandoned and a refused call with litellm.

    The first two are also made with its async functions. Returns the class names of the exceptions
    that the application sees.
    """
    import litellm
    from loadgen_sdk import instrument

    package = instrument(litellm, observer, ask_usage=True)
    request: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "max_tokens": MAX_TOKENS,
        "api_key": API_KEY,
        "api_base": urls.responding,
    }
    assert package.completion(**request).choices
    assert list(package.completion(**request, stream=True))

    # A stream of litellm cannot be closed. It is left early when it is deleted.
    stream = package.completion(**request, stream=True)
    next(iter(stream))
    del stream

    exception_names: list[str] = []
    refused_request = {**request, "api_base": urls.refusing}
    with record_exceptions(exception_names):
        package.completion(**refused_request, max_retries=0)

    asyncio.run(_complete_with_async_litellm(package, request))
    return exception_names


async def _complete_with_async_litellm(package: Any, request: dict[str, Any]) -> None:
    """Make an async call of litellm, first with a complete response and then with a stream."""
    assert (await package.acompletion(**request)).choices
    async for _ in await package.acompletion(**request, stream=True):
        pass


def run_fastapi(observer: Observer, urls: EndpointUrls) -> list[str]:
    """Run a web application that forwards streams, one of whose users leaves in the middle.

    Returns the class names of the exceptions that the application sees.
    """
    import openai
    import uvicorn

    exception_names: list[str] = []
    clients = create_client_pair(openai.AsyncOpenAI, urls, observer)
    handlers = ForwardingHandlers(clients, exception_names)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(handlers.create_app(), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    try:
        address = listener.getsockname()
        read_response(address, "/complete", expected_status=200)
        read_response(address, "/stream", expected_status=200)
        read_response(address, "/refused", expected_status=503)
        leave_response_early(address, "/long")
    finally:
        server.should_exit = True
        thread.join()

    return exception_names


class ForwardingHandlers:
    """The handlers of a FastAPI application, which call a model for each HTTP request.

    `exception_names` gets the class names of the exceptions of refused calls.
    """

    def __init__(self, clients: ClientPair, exception_names: list[str]) -> None:
        self._clients = clients
        self._exception_names = exception_names

    def create_app(self) -> Any:
        """Return the FastAPI application with a route for each handler."""
        import fastapi

        app = fastapi.FastAPI()
        handlers = {
            "/complete": self.respond_complete,
            "/stream": self.respond_stream,
            "/refused": self.respond_refused,
            "/long": self.respond_long_stream,
        }
        for path, handler in handlers.items():
            app.add_api_route(path, handler, response_model=None)
        return app

    async def respond_complete(self) -> Any:
        """Return the text of a complete response, from a call with a label of the SDK."""
        from loadgen_sdk import labelled

        with labelled(feature="complete"):
            completion = await create_chat(self._clients.responding)
        return {"text": completion.choices[0].message.content}

    async def respond_stream(self) -> Any:
        """Return a stream that is read to its end."""
        return self._forward(MAX_TOKENS)

    async def respond_long_stream(self) -> Any:
        """Return a stream whose reader leaves before its end."""
        return self._forward(LONG_STREAM_TOKENS)

    async def respond_refused(self) -> Any:
        """Return HTTP status 503, because the call is refused."""
        from fastapi.responses import JSONResponse

        with record_exceptions(self._exception_names):
            await create_chat(self._clients.refused)
        return JSONResponse({"error": self._exception_names[-1]}, status_code=503)

    def _forward(self, max_tokens: int) -> Any:
        """Return the HTTP response that forwards a stream of the model."""
        from fastapi.responses import StreamingResponse

        return StreamingResponse(self._iterate_text(max_tokens))

    async def _iterate_text(self, max_tokens: int) -> AsyncIterator[str]:
        """Yield the pieces of text of a stream, and a space for an event without text."""
        async with await create_chat(self._clients.responding, max_tokens, stream=True) as stream:
            async for event in stream:
                content = event.choices[0].delta.content if event.choices else None
                yield content or " "


def open_request(address: tuple[str, int], path: str) -> socket.socket:
    """Send a GET request and return the connection on which the response arrives."""
    connection = socket.create_connection(address)
    request = f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    connection.sendall(request.encode())
    return connection


def read_response(address: tuple[str, int], path: str, expected_status: int) -> None:
    """Send a GET request, read the response to its end and check its HTTP status."""
    with open_request(address, path) as connection, connection.makefile("rb") as response:
        received = response.read()
    assert received.startswith(f"HTTP/1.1 {expected_status}".encode()), received


def leave_response_early(address: tuple[str, int], path: str) -> None:
    """Send a GET request and close the connection after the first piece of the body.

    The head alone is not enough, because it may come before the application has called the model.
    """
    with open_request(address, path) as connection:
        received = connection.recv(RECEIVE_BYTES)
        while received.endswith(END_OF_HTTP_HEAD):
            piece = connection.recv(RECEIVE_BYTES)
            assert piece, "the response has no body"
            received += piece
    assert received.startswith(b"HTTP/1.1 200"), received


class Program(NamedTuple):
    """A program, and the packages that it needs; the table shows the version of the first one."""

    run: Callable[[Observer, EndpointUrls], list[str]]
    packages: tuple[str, ...]


PROGRAMS = {
    "openai": Program(run_openai, ("openai",)),
    "anthropic": Program(run_anthropic, ("anthropic",)),
    "gevent": Program(run_gevent, ("gevent", "openai")),
    "opentelemetry-instrumentation-openai": Program(
        run_openllmetry, ("opentelemetry-instrumentation-openai", "opentelemetry-sdk", "openai")
    ),
    "langfuse": Program(run_langfuse, ("langfuse", "openai")),
    "openai-agents": Program(run_openai_agents, ("openai-agents",)),
    "pydantic-ai": Program(run_pydantic_ai, ("pydantic-ai-slim[openai]",)),
    "instructor": Program(run_instructor, ("instructor",)),
    "litellm": Program(run_litellm, ("litellm",)),
    "fastapi": Program(run_fastapi, ("fastapi", "uvicorn", "openai")),
}
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # not from the network
    "LANGFUSE_PUBLIC_KEY": "pk-lf-1",
    "LANGFUSE_SECRET_KEY": "sk-lf-1",
    "OPENAI_API_KEY": API_KEY,
}


class MeasuredCall(NamedTuple):
    """What the SDK measured of a call.

    `status` is "ok", "failed", or how a stream was left early. `token_source` is "server" if the
    token counts are those of the server.
    """

    status: str
    input_tokens: int | None
    output_tokens: int | None
    token_source: str


class ProgramOutput(NamedTuple):
    """What a program prints as JSON.

    Attributes:
        versions: The version of each package, by its name.
        exception_names: The class names of the exceptions that the application saw.
        calls: The calls as the SDK measured them.
    """

    versions: dict[str, str]
    exception_names: list[str]
    calls: list[MeasuredCall]

    def to_json(self) -> str:
        """Return the output as a line of JSON; each call is a list of its fields."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, line: str) -> ProgramOutput:
        """Return the output that `to_json` wrote."""
        output = json.loads(line)
        calls = [MeasuredCall(*fields) for fields in output["calls"]]
        return cls(output["versions"], output["exception_names"], calls)


def run_program(name: str, urls: EndpointUrls) -> ProgramOutput:
    """Run one program in this process and return its versions, exceptions and measurements."""
    prepare_process(name, urls)
    from loadgen_sdk.app.background import flush

    program = PROGRAMS[name]
    measurements: list[Measurement] = []
    exception_names = program.run(measurements.append, urls)

    # A stream that was left early is measured when it is deleted, if the program did not close it.
    gc.collect()
    flush()

    calls = [
        MeasuredCall(
            measurement.status,
            measurement.input_tokens,
            measurement.output_tokens,
            measurement.token_source,
        )
        for measurement in measurements
    ]
    distributions = [package.partition("[")[0] for package in program.packages]  # without extras
    versions = {distribution: version(distribution) for distribution in distributions}
    return ProgramOutput(versions, exception_names, calls)


def prepare_process(name: str, urls: EndpointUrls) -> None:
    """Set the environment of the packages, and for gevent replace blocking functions.

    This comes before the imports of the SDK and of the packages, because they read both. What
    langfuse exports goes to the endpoint that refuses it.
    """
    os.environ.update(ENVIRONMENT, LANGFUSE_HOST=urls.refusing.removesuffix("/v1"))
    if name == "gevent":
        from gevent import monkey

        monkey.patch_all()


if __name__ == "__main__":
    name_argument, url_argument, refusing_url_argument = sys.argv[1:]
    output = run_program(name_argument, EndpointUrls(url_argument, refusing_url_argument))
    print(output.to_json())
