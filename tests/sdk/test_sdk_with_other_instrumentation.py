"""Tests together with another instrumentation of the same client, such as OpenLLMetry."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import openai
import pytest
from loadgen_sdk import Measurement, OpenTelemetry, instrument, measurement_of
from scripted_server import CHAT, CHAT_EVENTS, answer, events, serving

REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
WAYS = ("blocking", "async")


class Proxy:
    """A stream like wrapt's ObjectProxy, which passes all attributes on to the stream."""

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, "__wrapped__", wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "__wrapped__"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__wrapped__"), name, value)

    def __iter__(self) -> Any:
        return self

    def __aiter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()

    def __anext__(self) -> Any:
        return self.__getattr__("__anext__")()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(*error)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self.__getattr__("__aexit__")(*error)


class Instrumentor:
    """An instrumentation like BaseInstrumentor: a single object, which may be active."""

    _instance: Any = None
    _is_instrumented_by_opentelemetry = False

    def instrument(self, **_: Any) -> None:
        resources = openai.resources.chat.completions
        self.plain = resources.Completions.create, resources.AsyncCompletions.create
        blocking, waiting = self.plain

        def create(*args: Any, **kwargs: Any) -> Any:
            response = blocking(*args, **kwargs)
            return Proxy(response) if kwargs.get("stream") else response

        async def acreate(*args: Any, **kwargs: Any) -> Any:
            response = await waiting(*args, **kwargs)
            return Proxy(response) if kwargs.get("stream") else response

        resources.Completions.create, resources.AsyncCompletions.create = create, acreate  # type: ignore
        type(self)._instance, self._is_instrumented_by_opentelemetry = self, True

    def uninstrument(self) -> None:
        resources = openai.resources.chat.completions
        resources.Completions.create, resources.AsyncCompletions.create = self.plain  # type: ignore
        self._is_instrumented_by_opentelemetry = False


@pytest.fixture(params=["its shape", "the package"])
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    name = "opentelemetry.instrumentation.openai"
    if request.param == "the package":
        instrumentor = pytest.importorskip(name).OpenAIInstrumentor()
        yield instrumentor
        unwrap()
    else:
        module = ModuleType(name)
        module.OpenAIInstrumentor = Instrumentor  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        instrumentor = Instrumentor()
        yield instrumentor
    if instrumentor._is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


def unwrap() -> None:
    """Restore what the `uninstrument` of the package leaves wrapped."""
    modules = [
        module for name, module in [*sys.modules.items()] if name.startswith("openai.resources")
    ]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    for kind in kinds:
        for name, method in [*vars(kind).items()]:
            while hasattr(method, "_self_wrapper"):
                method = method.__wrapped__
                setattr(kind, name, method)


def client(mode: str, url: str, observers: Any) -> Any:
    make: Any = openai.OpenAI if mode == "blocking" else openai.AsyncOpenAI
    return instrument(make(base_url=url, api_key="k", max_retries=0), observers)


@pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecatedSince20"
)  # the other package's own
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("mode", WAYS)
def test_streams_are_measured_together_with_opentelemetry_instrumentation(
    other: Any, order: str, mode: str
) -> None:
    """`with stream:` and `stream.close()` work, although the proxy has no `close` of its own."""
    measurements: list[Measurement] = []

    def use(measured_client: Any) -> None:
        with measured_client.chat.completions.create(**REQUEST, stream=True) as stream:
            assert len([*stream]) == len(CHAT_EVENTS)
        assert measurement_of(stream) is measurements[0]
        stream = measured_client.chat.completions.create(**REQUEST, stream=True)
        next(stream)
        stream.close()
        assert measurement_of(stream) is measurements[1]

    async def use_async(measured_client: Any) -> None:
        async with measured_client:
            async with await measured_client.chat.completions.create(
                **REQUEST, stream=True
            ) as stream:
                assert len([event async for event in stream]) == len(CHAT_EVENTS)
            assert measurement_of(stream) is measurements[0]
            stream = await measured_client.chat.completions.create(**REQUEST, stream=True)
            await anext(stream)
            await stream.close()
            assert measurement_of(stream) is measurements[1] and stream.response.is_closed

    with serving(events(*CHAT_EVENTS)) as server:
        if order == "before":
            other.instrument()
        measured_client = client(mode, server.url, measurements.append)
        if order == "after":
            other.instrument()
        if mode == "blocking":
            with measured_client:
                use(measured_client)
        else:
            asyncio.run(use_async(measured_client))
    assert [(measurement.status, measurement.output_tokens) for measurement in measurements] == [
        ("ok", 3),
        ("abandoned", 0),
    ]


@pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecatedSince20"
)  # the other package's own
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_call_is_reported_once_if_opentelemetry_instrumentation_is_active(
    other: Any, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ours is off while the other is active, which is said once, and on again after that."""
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracer = trace.TracerProvider()
    tracer.add_span_processor(SimpleSpanProcessor(spans))
    meter = metrics.MeterProvider([reader])
    measurements: list[Measurement] = []
    our_open_telemetry = OpenTelemetry(tracer_provider=tracer, meter_provider=meter)

    def scopes() -> list[str]:
        data = reader.get_metrics_data()
        scope_metrics = (
            []
            if data is None
            else [
                scope
                for resource_metrics in data.resource_metrics
                for scope in resource_metrics.scope_metrics
            ]
        )
        return [scope.scope.name for scope in scope_metrics]

    with serving(answer(CHAT)) as server:
        if order == "before":
            other.instrument(tracer_provider=tracer, meter_provider=meter)
        with client(
            "blocking", server.url, [our_open_telemetry, measurements.append]
        ) as measured_client:
            if order == "after":
                other.instrument(tracer_provider=tracer, meter_provider=meter)
            for _ in range(2):
                measured_client.chat.completions.create(**REQUEST)
            assert "loadgen_sdk" not in scopes()
            assert "loadgen_sdk" not in [
                span.instrumentation_scope.name for span in spans.get_finished_spans()
            ]
            assert caplog.text.count("already reports") == 1 and len(measurements) == 2
            other.uninstrument()
            measured_client.chat.completions.create(**REQUEST)
    assert [span.instrumentation_scope.name for span in spans.get_finished_spans()].count(
        "loadgen_sdk"
    ) == 1
    assert "loadgen_sdk" in scopes() and len(measurements) == 3
