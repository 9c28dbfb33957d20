"""`auto`: the clients that frameworks make for themselves are measured, until it is stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from canned import CHAT, CHAT_EVENTS, answer, events, serving
from loadgen_sdk import Measurement, Retry, WrongUse, auto, instrument
from refusals import refused


def test_clients_made_by_others_are_measured_until_it_stops() -> None:
    told: list[Measurement] = []
    made_by = openai.OpenAI.__init__
    with serving(answer(CHAT)) as server:

        def make(kind: Any) -> Any:
            return kind(base_url=server.url, api_key="k", max_retries=4)

        before = make(openai.OpenAI)
        with auto(told.append, retry=Retry(2), labels={"app": "x"}) as running:
            with refused(WrongUse, "conflict"):
                auto()
            client = make(openai.OpenAI)
            client.chat.completions.create(model="m", messages=[])
            client.with_options(timeout=5).chat.completions.create(model="m", messages=[])
            client.chat.completions.with_raw_response.create(model="m", messages=[])
            before.chat.completions.create(model="m", messages=[])

            class Own(openai.OpenAI):
                pass

            make(Own).chat.completions.create(model="m", messages=[])
            assert len(told) == 4 and told[0].labels == {"app": "x"} and client.max_retries == 0

            async def ask() -> None:
                async with make(openai.AsyncOpenAI) as waiting:
                    await waiting.chat.completions.create(model="m", messages=[])

            asyncio.run(ask())
            assert len(told) == 5
            more: list[Measurement] = []
            instrument(client, more.append).chat.completions.create(model="m", messages=[])
            assert len(more) == 1 and len(told) == 6
        running.stop()
        client.chat.completions.create(model="m", messages=[])
        make(openai.OpenAI).chat.completions.create(model="m", messages=[])
        assert len(told) == 6 and client.max_retries == 4 and openai.OpenAI.__init__ is made_by


def test_what_a_framework_keeps_of_a_client_is_not_measured_after_the_stop() -> None:
    """LangChain keeps `client.chat.completions` (langchain-openai 1.7.4: base.py, `self.client`), and its function."""
    told: list[Measurement] = []
    with serving(answer(CHAT)) as server:
        with auto(told.append):
            client = openai.OpenAI(base_url=server.url, api_key="k")
            kept = client.chat.completions
            raw = kept.with_raw_response
            kept.create(model="m", messages=[])
        for create in (kept.create, raw.create):
            create(model="m", messages=[])
        client.close()
    assert len(told) == 1


def test_azure_clients_too() -> None:
    told: list[Measurement] = []
    with serving(answer(CHAT)) as server, auto(told.append):
        own = openai.AzureOpenAI(
            azure_endpoint=server.url.removesuffix("/v1"),
            api_key="k-1234567",
            api_version="2024-10-21",
        )
        own.chat.completions.create(model="deployed", messages=[])
    assert [one.model for one in told] == ["deployed"]


def test_langchain() -> None:
    models = pytest.importorskip("langchain_openai")
    told: list[Measurement] = []
    with serving(answer(CHAT)) as server, auto(told.append):
        model = models.ChatOpenAI(model="m", base_url=server.url, api_key="k")
        assert model.invoke("Hi").content == "Hello there."
        asyncio.run(model.ainvoke("Hi"))
    with serving(events(*CHAT_EVENTS)) as server, auto(told.append):
        model = models.ChatOpenAI(model="m", base_url=server.url, api_key="k")
        assert "".join(piece.content for piece in model.stream("Hi")) == "Hello there."
    assert [(one.streamed, one.status, one.output_tokens) for one in told] == [
        (False, "ok", 3),
        (False, "ok", 3),
        (True, "ok", 3),
    ]


def test_llama_index() -> None:
    models = pytest.importorskip("llama_index.llms.openai")
    told: list[Measurement] = []
    with serving(answer(CHAT)) as server, auto(told.append):
        model = models.OpenAI(model="gpt-4o", api_base=server.url, api_key="k")
        assert "Hello there." in str(model.complete("Hi"))
    with serving(events(*CHAT_EVENTS)) as server, auto(told.append):
        model = models.OpenAI(model="gpt-4o", api_base=server.url, api_key="k")
        assert [piece.delta for piece in model.stream_complete("Hi")]
    assert [(one.streamed, one.status) for one in told] == [(False, "ok"), (True, "ok")]
