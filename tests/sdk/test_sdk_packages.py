"""Clients of other packages than openai, and batches, are measured by the same table."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import openai
import pytest
import repository_paths
from loadgen_sdk import (
    Measurement,
    Retry,
    Throttle,
    TokenPrice,
    instrument,
    labelled,
    measurement_of,
)
from loadgen_sdk.app.background import flush
from openai.types.chat import ChatCompletionChunk
from scripted_server import CHAT, CHAT_EVENTS, COMPLETION, answer, events, serving

USAGE = {
    "input_tokens": 3,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 2,
    "output_tokens": 1,
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {**USAGE, "output_tokens": 7},
    "content": [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t-1", "name": "look", "input": {"at": 1}},
    ],
}


def block(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


MESSAGE_EVENTS = (
    {
        "type": "message_start",
        "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": USAGE},
    },
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "thinking", "thinking": "", "signature": ""},
    },
    block(0, "thinking_delta", thinking="Hm."),
    block(0, "signature_delta", signature="s"),
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    block(1, "text_delta", text="Let me "),
    block(1, "text_delta", text="see."),
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "t-1", "name": "look", "input": {}},
    },
    block(2, "input_json_delta", partial_json='{"at": '),
    block(2, "input_json_delta", partial_json="1}"),
    {"type": "content_block_stop", "index": 2},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 7},
    },
    {"type": "message_stop"},
)
REQUEST: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "Look."}],
}
HEADERS = {
    "request_id": "req-1",
    "anthropic_ratelimit_requests_remaining": "0",
    "anthropic_ratelimit_requests_reset": "2s",
}


@pytest.fixture
def anthropic() -> ModuleType:
    module: ModuleType = pytest.importorskip("anthropic")
    return module


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    module: ModuleType = pytest.importorskip("litellm")
    return module


def client(anthropic: ModuleType, url: str, **options: Any) -> Any:
    return anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key="k", max_retries=0, **options
    )


def check_message(measured: Measurement, *, streamed: bool) -> None:
    assert (measured.api, measured.status, measured.streamed) == ("messages", "ok", streamed)
    assert (measured.input_tokens, measured.cached_tokens, measured.output_tokens) == (9, 4, 7)
    assert measured.cache_written_tokens == 2
    assert (measured.finish_reason, measured.response_id, measured.request_id) == (
        "tool_use",
        "msg_1",
        "req-1",
    )
    assert (measured.model, measured.response_model) == ("claude-x", "claude-x")
    assert measured.cost == pytest.approx(24e-6)
    assert measured.parameters == {"max_tokens": 50}
    assert measured.content is not None and measured.content.output == "Let me see."
    call = {"id": "t-1", "name": "look", "arguments": '{"at": 1}'}
    assert (
        measured.content.choices[0].tool_calls == (call,)
        and measured.content.choices[0].finish_reason == "tool_use"
    )


def test_anthropic_messages_are_measured(anthropic: ModuleType) -> None:
    measurements: list[Measurement] = []
    throttle = Throttle(requests="9/s")
    options: dict[str, Any] = {
        "prices": TokenPrice(1, 2, cache_write=1.5),
        "keep_content": True,
        "throttle": throttle,
    }
    with (
        serving(answer(MESSAGE, **HEADERS)) as server,
        instrument(
            client(anthropic, server.url), measurements.append, **options
        ) as measured_client,
    ):
        message = measured_client.messages.create(**REQUEST, loadgen_labels={"feature": "look"})
        assert measurement_of(message) is measurements[0] and measurements[0].labels == {
            "feature": "look"
        }
        with pytest.raises(anthropic.APITimeoutError):
            measured_client.messages.create(
                **REQUEST, timeout=0.05
            )  # the server's `remaining: 0` holds for 2 s
    check_message(measurements[0], streamed=False)

    assert measurements[1].status == "failed"


@pytest.mark.parametrize("helper", [False, True])
def test_anthropic_streams_are_measured(anthropic: ModuleType, helper: bool) -> None:
    measurements: list[Measurement] = []
    options: dict[str, Any] = {"prices": TokenPrice(1, 2, cache_write=1.5), "keep_content": True}
    with (
        serving(events(*MESSAGE_EVENTS, done=False, request_id="req-1")) as server,
        instrument(
            client(anthropic, server.url), measurements.append, **options
        ) as measured_client,
    ):
        if helper:
            with measured_client.messages.stream(**REQUEST) as stream:
                assert "".join(stream.text_stream) == "Let me see."
            assert measurement_of(stream) is measurements[0]
        else:
            assert len([*measured_client.messages.create(**REQUEST, stream=True)]) == len(
                MESSAGE_EVENTS
            )
    check_message(measurements[0], streamed=True)

    assert len(measurements) == 1 and len(measurements[0].instants) == 5
    assert (
        measurements[0].first_token == measurements[0].instants[0]
        and measurements[0].first_answer == measurements[0].instants[1]
    )


def test_async_anthropic_streams_and_errors_are_measured(anthropic: ModuleType) -> None:
    measurements: list[Measurement] = []
    refused = answer(
        {"type": "error", "error": {"type": "rate_limit_error", "message": "no"}}, "429 Too Many"
    )

    async def go(url: str) -> None:
        plain = anthropic.AsyncAnthropic(
            base_url=url.removesuffix("/v1"), api_key="k", max_retries=0
        )
        async with instrument(
            plain,
            measurements.append,
            retry=Retry(2, first_wait_s=0.001),
            keep_content=True,
            prices=TokenPrice(1, 2, cache_write=1.5),
        ) as measured_client:
            async with measured_client.messages.stream(**REQUEST) as stream:
                await stream.get_final_message()
            async with await measured_client.messages.create(**REQUEST, stream=True) as left:
                async for _ in left:
                    break

    with serving(refused, events(*MESSAGE_EVENTS, done=False, request_id="req-1")) as server:
        asyncio.run(go(server.url))
    check_message(measurements[0], streamed=True)
    assert (
        measurements[0].attempts[0].failure is not None
        and measurements[0].attempts[0].failure.kind == "http_429"
    )
    assert [measurement.status for measurement in measurements] == ["ok", "abandoned"]


@pytest.mark.filterwarnings("ignore")  # its own
def test_litellm_functions_are_measured(litellm: ModuleType) -> None:
    measurements: list[Measurement] = []
    with serving(answer(CHAT)) as server:
        to: dict[str, Any] = {"api_base": server.url, "api_key": "k-12345678"}
        measured_litellm = instrument(
            litellm, measurements.append, labels={"app": "x"}, prices=TokenPrice(1, 2)
        )
        messages = [{"role": "user", "content": "Hi"}]
        with labelled(step=1):
            response = measured_litellm.completion("openai/m", messages, temperature=0.5, **to)
        assert (
            response.choices[0].message.content == "Hello there."
            and measurement_of(response) is measurements[0]
        )
        assert (
            asyncio.run(
                measured_litellm.acompletion(model="openai/m", messages=messages, **to)
            ).usage.total_tokens
            == 12
        )

    assert (
        measured_litellm.token_counter is litellm.token_counter
        and measured_litellm.completion is not litellm.completion
    )
    assert [
        (
            measurement.api,
            measurement.status,
            measurement.model,
            measurement.input_tokens,
            measurement.output_tokens,
        )
        for measurement in measurements
    ] == [("chat", "ok", "openai/m", 9, 3)] * 2
    assert measurements[0].labels == {"app": "x", "step": "1"} and measurements[0].parameters == {
        "temperature": 0.5
    }
    assert measurements[0].cost == 15e-6 and measurements[0].finish_reason == "stop"


@pytest.mark.filterwarnings("ignore")  # its own
def test_litellm_streams_are_measured(litellm: ModuleType) -> None:
    measurements: list[Measurement] = []

    async def go(measured_litellm: Any, to: dict[str, Any]) -> None:
        stream = await measured_litellm.acompletion(
            "openai/m", [{"role": "user", "content": "Hi"}], stream=True, **to
        )
        async for _ in stream:
            pass
        assert stream.measurement is measurements[1]

    with serving(events(*CHAT_EVENTS)) as server:
        to: dict[str, Any] = {"api_base": server.url, "api_key": "k-12345678"}
        measured_litellm = instrument(litellm, measurements.append, prices=TokenPrice(1, 2))
        stream = measured_litellm.completion(
            "openai/m", [{"role": "user", "content": "Hi"}], stream=True, **to
        )
        assert isinstance(stream, litellm.CustomStreamWrapper)
        assert "".join(piece.choices[0].delta.content or "" for piece in stream) == "Hello there."
        asyncio.run(go(measured_litellm, to))
    assert [
        (
            measurement.status,
            len(measurement.instants),
            measurement.output_tokens,
            measurement.token_source,
        )
        for measurement in measurements
    ] == [("ok", 3, 3, "server")] * 2


@pytest.mark.filterwarnings("ignore")  # its own
def test_litellm_errors_and_retries_are_measured(litellm: ModuleType) -> None:
    measurements: list[Measurement] = []
    busy = answer(
        {"error": {"message": "busy", "code": "rate_limit_exceeded"}}, "429 Too Many Requests"
    )
    with (
        serving(busy, busy, answer(COMPLETION)) as server,
    ):
        to: dict[str, Any] = {"api_base": server.url, "api_key": "k-12345678"}
        measured_litellm = instrument(
            litellm, measurements.append, retry=Retry(2, first_wait_s=0.001)
        )
        with pytest.raises(litellm.RateLimitError):
            measured_litellm.completion("openai/m", [{"role": "user", "content": "Hi"}], **to)
        assert len(server.heard) == 2
        measured_litellm.text_completion("Hi", "text-completion-openai/m", **to)

    assert [
        (measurement.api, measurement.status, len(measurement.attempts))
        for measurement in measurements
    ] == [
        ("chat", "failed", 2),
        ("completions", "ok", 1),
    ]
    assert measurements[0].failure is not None and measurements[0].failure.kind == "http_429"


class Function:
    """A function of LiteLLM as this package meets it: it takes `labels`, which are Vertex AI's."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def completion(self, **arguments: Any) -> None:
        self.heard.append(arguments)


def test_the_labels_argument_of_litellm_is_passed_on_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`labels` goes to Vertex AI, whatever its keys are."""
    module, function = ModuleType("litellm"), Function()
    module.completion = function.completion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litellm", module)
    measurements: list[Measurement] = []
    metadata = {"cost-center": "a", "team": "b"}
    measured_module = instrument(module, measurements.append)
    measured_module.completion(
        model="m", messages=[], labels=metadata, loadgen_labels={"feature": "f"}
    )

    assert [call["labels"] for call in function.heard] == [
        metadata
    ] and "loadgen_labels" not in function.heard[0]
    assert measurements[0].labels == {"feature": "f"}


class Streaming:
    """Functions of LiteLLM that stream: they return an iterator of a type of their own."""

    def completion(self, **_: Any) -> Iterator[Any]:
        return iter([ChatCompletionChunk.model_validate(value) for value in CHAT_EVENTS])

    async def acompletion(self, **_: Any) -> AsyncIterator[Any]:
        async def pieces() -> AsyncIterator[Any]:
            for piece in self.completion():
                yield piece

        return pieces()


def test_a_litellm_stream_referenced_only_by_its_loop_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that only its loop refers to is measured until its end and keeps its permit."""
    module, streaming = ModuleType("litellm"), Streaming()
    module.completion, module.acompletion = streaming.completion, streaming.acompletion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litellm", module)
    measurements: list[Measurement] = []
    throttle = Throttle(concurrency=1, max_wait_s=5)

    async def go() -> None:
        async for _ in await measured_module.acompletion(model="m", messages=[], stream=True):
            assert flush() and throttle.in_flight(model="m") == 1

    measured_module = instrument(module, measurements.append, throttle=throttle)
    for _ in measured_module.completion(model="m", messages=[], stream=True):
        assert flush() and throttle.in_flight(model="m") == 1
    asyncio.run(go())
    for _ in measured_module.completion(model="m", messages=[], stream=True):
        break
    assert flush()
    assert [(measurement.status, len(measurement.instants)) for measurement in measurements] == [
        ("ok", 3),
        ("ok", 3),
        ("abandoned", 0),
    ]
    assert throttle.in_flight(model="m") == 0


class Routed:
    """A Router of LiteLLM as this package meets it: its methods call the function of the module."""

    def __init__(self, model_list: list[str]) -> None:
        self.model_list = model_list

    def completion(self, model: str, messages: list[Any], **_: Any) -> str:  # noqa: ARG002
        return f"{model} by {self.model_list[0]}"

    async def acompletion(self, model: str, messages: list[Any], **_: Any) -> str:
        return self.completion(model, messages)


class Sealed:
    """The Router since LiteLLM 1.110: it allows no subclass and looks attributes up elsewhere."""

    def __init_subclass__(cls, **_: Any) -> None:
        raise TypeError("litellm.Router cannot be subclassed")

    def __init__(self, model_list: list[str]) -> None:
        self.__dict__["_core"] = Routed(model_list)

    def __getattribute__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "__dict__")["_core"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._core, name, value)


@pytest.mark.parametrize("kind", [Routed, Sealed])
def test_calls_through_the_litellm_router_are_measured(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("litellm")
    module.Router = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litellm", module)
    measurements: list[Measurement] = []
    measured_module = instrument(module, measurements.append)
    router = measured_module.Router(model_list=["deployment"])

    assert (
        isinstance(router, kind)
        and isinstance(router, measured_module.Router)
        and type(router) is kind
    )
    assert measured_module.Router is measured_module.Router is not kind
    assert router.completion("group", []) == "group by deployment"
    assert asyncio.run(router.acompletion("group", [])) == "group by deployment"
    assert kind(["x"]).completion("group", []) == "group by x"
    assert [(measurement.model, measurement.status) for measurement in measurements] == [
        ("group", "ok")
    ] * 2


@pytest.mark.filterwarnings("ignore")  # its own
def test_calls_through_the_installed_litellm_router_are_measured(litellm: ModuleType) -> None:
    measurements: list[Measurement] = []
    with serving(answer(CHAT)) as server:
        to = {"model": "openai/m", "api_base": server.url, "api_key": "k-12345678"}
        measured_litellm = instrument(litellm, measurements.append, prices=TokenPrice(1, 2))
        router = measured_litellm.Router(model_list=[{"model_name": "group", "litellm_params": to}])
        response = router.completion("group", [{"role": "user", "content": "Hi"}])

    assert (
        response.choices[0].message.content == "Hello there."
        and measurement_of(response) is measurements[0]
    )
    assert [
        (measurement.model, measurement.status, measurement.input_tokens, measurement.output_tokens)
        for measurement in measurements
    ] == [("group", "ok", 9, 3)]


def test_tokens_of_a_completed_batch_are_reported_once() -> None:
    """The tokens of a batch are reported once, when it is first seen to be complete."""
    measurements: list[Measurement] = []
    batch: dict[str, Any] = {
        "id": "batch_1",
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file_1",
        "completion_window": "24h",
        "status": "validating",
        "created_at": 1,
    }
    usage = {
        "input_tokens": 900,
        "output_tokens": 300,
        "total_tokens": 1200,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    done = answer({**batch, "status": "completed", "usage": usage})
    with serving(answer(batch), done) as server:
        plain = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
        measured_client = instrument(plain, measurements.append, prices=TokenPrice(1, 2))
        measured_client.batches.create(
            input_file_id="file_1", endpoint="/v1/chat/completions", completion_window="24h"
        )
        for _ in range(2):
            measured_client.batches.retrieve("batch_1")

    assert [
        (measurement.finish_reason, measurement.input_tokens, measurement.output_tokens)
        for measurement in measurements
    ] == [
        ("validating", None, None),
        ("completed", 900, 300),
        ("completed", None, None),
    ]
    assert {
        (measurement.api, measurement.status, measurement.cost) for measurement in measurements
    } == {("batches", "ok", None)}
    assert all(
        measurement.ttft_ms is None and measurement.e2e_ms is not None
        for measurement in measurements
    )


SDK = repository_paths.ROOT / "sdk"
START = """
import site, sys
for _ in range(2):
    site.addsitedir(sys.argv[2])  # as Python does; two of its directories may have the file
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="k")
client.chat.completions.create(model="m", messages=[])
"""
