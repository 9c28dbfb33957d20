"""Tests of other calls than a plain `create`: structured output, helpers, tools, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from loadgen_sdk import Measurement, TokenPrice, instrument, measurement_of
from pydantic import BaseModel
from scripted_server import CHAT, COUNT, RESPONSE, RESPONSE_EVENTS, answer, chunk, events, serving

if not hasattr(openai.OpenAI(api_key="k"), "responses"):
    pytest.skip(f"openai {openai.__version__} has no responses", allow_module_level=True)


class City(BaseModel):
    name: str


TEXT = '{"name":"Ulm"}'
TOOL = {
    "type": "function_call",
    "id": "o2",
    "call_id": "t1",
    "name": "f",
    "arguments": '{"a":1}',
    "status": "completed",
}


def chat_of(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {**CHAT, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def response_of(text: str, *more: dict[str, Any], **changes: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {
        "type": "message",
        "id": "o1",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    return {**RESPONSE, "output": [message, *more], **changes}


def call_server(
    mode: str, response: bytes, use: Callable[[Any], Any], **options: Any
) -> tuple[Any, list[Measurement]]:
    """Return the result of `use(client)`, awaited if it is a coroutine, and the measurements."""
    measurements: list[Measurement] = []
    with serving(response) as server:
        if mode == "blocking":
            with openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
                return use(instrument(client, measurements.append, **options)), measurements

        async def go() -> Any:
            async with openai.AsyncOpenAI(
                base_url=server.url, api_key="k", max_retries=0
            ) as client:
                return await use(instrument(client, measurements.append, **options))

        return asyncio.run(go()), measurements


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_structured_chat_output_is_measured(mode: str) -> None:
    def use(client: Any) -> Any:
        return client.chat.completions.parse(model="m", messages=[], response_format=City)

    result, measurements = call_server(mode, answer(chat_of(TEXT)), use, keep_content=True)
    assert result.choices[0].message.parsed == City(name="Ulm")
    assert (
        [measurement_of(result)] == measurements
        and measurements[0].status == "ok"
        and measurements[0].output_tokens == 3
    )
    assert measurements[0].content is not None and measurements[0].content.output == TEXT


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_structured_output_of_responses_is_measured(mode: str) -> None:
    def use(client: Any) -> Any:
        return client.responses.parse(model="m", input="Hi", text_format=City)

    result, measurements = call_server(mode, answer(response_of(TEXT)), use, keep_content=True)
    assert result.output_parsed == City(name="Ulm")
    assert [measurement_of(result)] == measurements and (
        measurements[0].api,
        measurements[0].finish_reason,
    ) == (
        "responses",
        "completed",
    )
    assert measurements[0].content is not None and measurements[0].content.output == TEXT


def test_structured_output_of_a_chat_stream_is_measured() -> None:
    response = events(
        chunk("", role="assistant"), chunk('{"name":'), chunk('"Ulm"}'), chunk(finish="stop")
    )

    def use(client: Any) -> Any:
        with client.chat.completions.stream(model="m", messages=[], response_format=City) as stream:
            return stream.get_final_completion()

    result, measurements = call_server("blocking", response, use)
    assert result.choices[0].message.parsed == City(name="Ulm")
    assert [
        (measurement.status, measurement.token_source, len(measurement.instants))
        for measurement in measurements
    ] == [("ok", "events", 2)]


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_the_stream_helper_of_responses_is_measured(mode: str) -> None:
    def use(client: Any) -> Any:
        with client.responses.stream(model="m", input="Hi") as stream:
            return stream.get_final_response(), stream

    async def use_async(client: Any) -> Any:
        async with client.responses.stream(model="m", input="Hi") as stream:
            return await stream.get_final_response(), stream

    part = {"type": "output_text", "text": "", "annotations": []}
    item = {
        "type": "message",
        "id": "o1",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
    place = {"item_id": "o1", "output_index": 0, "content_index": 0}
    created, *rest = RESPONSE_EVENTS
    opened = (
        {
            "type": "response.output_item.added",
            "sequence_number": 1,
            "output_index": 0,
            "item": item,
        },
        {"type": "response.content_part.added", "sequence_number": 1, "part": part, **place},
    )
    created = {**created, "response": {**created["response"], "output": []}}
    response = events(created, *opened, *rest, done=False)
    (result, stream), measurements = call_server(
        mode, response, use if mode == "blocking" else use_async
    )
    assert result.output_text == "Hello there." and [measurement_of(stream)] == measurements
    assert (
        measurements[0].status,
        len(measurements[0].instants),
        measurements[0].output_tokens,
    ) == ("ok", 3, 3)


def test_tool_calls_of_a_response_are_counted() -> None:
    _, measurements = call_server(
        "blocking",
        answer(response_of("", TOOL)),
        lambda client: client.responses.create(model="m", input="Hi"),
        keep_content=True,
    )

    assert measurements[0].content is not None
    assert measurements[0].content.choices[0].tool_calls == (
        {"id": "t1", "name": "f", "arguments": '{"a":1}'},
    )


def test_tokens_of_two_choices_of_one_call_are_counted() -> None:
    two = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for i, text in enumerate(("a", "b"))
    ]

    def use(client: Any) -> Any:
        return client.chat.completions.create(model="m", messages=[], n=2)

    _, measurements = call_server(
        "blocking", answer({**CHAT, "choices": two}), use, keep_content=True
    )
    assert measurements[0].content is not None and [
        choice.text for choice in measurements[0].content.choices
    ] == [
        "a",
        "b",
    ]
    assert measurements[0].parameters == {"n": 2}


@pytest.mark.parametrize(
    ("changes", "status", "finish_reason"),
    [
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "ok",
            "max_output_tokens",
        ),
        (
            {"status": "failed", "error": {"code": "server_error", "message": "no"}},
            "failed",
            "failed",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_responses_that_end_early_have_their_finish_reason(
    stream: bool, changes: dict[str, Any], status: str, finish_reason: str
) -> None:
    ended_response = response_of("Hel", **changes)
    last = {
        "type": f"response.{changes['status']}",
        "sequence_number": 4,
        "response": ended_response,
    }
    response = events(*RESPONSE_EVENTS[:-1], last, done=False) if stream else answer(ended_response)

    def use(client: Any) -> Any:
        response = client.responses.create(model="m", input="Hi", stream=stream)
        return list(response) if stream else response

    _, measurements = call_server("blocking", response, use)
    assert [(measurement.status, measurement.finish_reason) for measurement in measurements] == [
        (status, finish_reason)
    ]
    assert (measurements[0].failure and measurements[0].failure.kind) == (
        "error_event" if status == "failed" else None
    )
    assert json.loads(measurements[0].to_json())["status"] == status


PART = {"item_id": "o1", "output_index": 0, "content_index": 0}
OPENED = (
    {**RESPONSE_EVENTS[0], "response": {**RESPONSE_EVENTS[0]["response"], "output": []}},
    {
        "type": "response.output_item.added",
        "sequence_number": 1,
        "output_index": 0,
        "item": {
            "type": "message",
            "id": "o1",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        },
    },
    {
        "type": "response.content_part.added",
        "sequence_number": 1,
        **PART,
        "part": {"type": "output_text", "text": "", "annotations": []},
    },
)
UNFIT = {
    "chat": events(
        chunk("", role="assistant"), chunk('{"a":'), chunk("1}"), chunk(finish="stop"), COUNT
    ),
    "chat, cut": events(
        chunk("", role="assistant"), chunk('{"a":'), chunk("1"), chunk(finish="length"), COUNT
    ),
    "chat, no JSON": events(
        chunk("Well", role="assistant"), chunk(", no"), chunk(finish="stop"), COUNT
    ),
    "responses": events(
        *OPENED,
        {
            "type": "response.output_text.delta",
            "sequence_number": 2,
            "delta": '{"a":1}',
            "logprobs": [],
            **PART,
        },
        {
            "type": "response.output_text.done",
            "sequence_number": 3,
            "text": '{"a":1}',
            "logprobs": [],
            **PART,
        },
        RESPONSE_EVENTS[-1],
        done=False,
    ),
}


@pytest.mark.parametrize("mode", ["blocking", "async"])
@pytest.mark.parametrize("case", UNFIT)
def test_a_streamed_response_that_does_not_fit_its_format_raises_and_is_measured(
    case: str, mode: str
) -> None:
    """The call fails in the application, but the server bills it. The stream is not read on."""
    api = case.partition(",")[0]

    def stream_of(client: Any) -> Any:
        if api == "chat":
            return client.chat.completions.stream(model="m", messages=[], response_format=City)
        return client.responses.stream(model="m", input="Hi", text_format=City)

    def use(client: Any) -> Any:
        with (
            pytest.raises(Exception, match=r"City|length|expected") as exc_info,
            stream_of(client) as stream,
        ):
            stream.until_done()
        with stream_of(client) as left_stream:  # while the error of another stream is in hand
            try:
                raise exc_info.value
            except exc_info.type:
                left_stream.close()

    async def use_async(client: Any) -> Any:
        with pytest.raises(Exception, match=r"City|length|expected") as exc_info:
            async with stream_of(client) as stream:
                await stream.until_done()
        async with stream_of(client) as left_stream:
            try:
                raise exc_info.value
            except exc_info.type:
                await left_stream.close()

    _, measurements = call_server(
        mode,
        UNFIT[case],
        use if mode == "blocking" else use_async,
        ask_usage=True,
        prices=TokenPrice(1, 2),
    )
    assert [measurement.status for measurement in measurements] == ["failed", "abandoned"]
    assert (
        measurements[0].failure is not None
        and measurements[0].failure.kind == "malformed"
        and not measurements[0].hidden_retries
    )
    if case != "chat, no JSON":
        assert (
            measurements[0].input_tokens,
            measurements[0].output_tokens,
            measurements[0].token_source,
        ) == (
            9,
            3,
            "server",
        )
        assert measurements[0].cost == pytest.approx(15e-6) and measurements[0].finish_reason


def test_an_error_caught_inside_a_stream_block_is_measured() -> None:
    def use(client: Any) -> Any:
        with client.responses.stream(model="m", input="Hi", text_format=City) as stream:
            try:
                stream.until_done()
            except ValueError as error:
                assert "City" in str(error)

    _, measurements = call_server("blocking", UNFIT["responses"], use)
    assert [(measurement.status, measurement.output_tokens) for measurement in measurements] == [
        ("failed", 3)
    ]


def test_a_stream_read_to_its_end_without_a_finish_reason_is_measured() -> None:
    def use(client: Any) -> Any:
        list(client.chat.completions.create(model="m", messages=[], stream=True))
        with client.chat.completions.stream(model="m", messages=[]) as stream:
            stream.until_done()

    _, measurements = call_server(
        "blocking", events(chunk("", role="assistant"), chunk("Hel"), chunk("lo")), use
    )
    assert [(measurement.status, len(measurement.instants)) for measurement in measurements] == [
        ("ok", 2)
    ] * 2
