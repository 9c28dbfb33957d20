"""Tests of request bodies: only what a server accepts, and what the user adds."""

from __future__ import annotations

import json
from typing import Any

import make_servers
import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.request_body import BodyEncoder, BodyFormat, encode_body, merge_patch
from loadgen_sdk.wire_formats.server_profiles import (
    APIS,
    DETECTION_SOURCES,
    SERVER_METRICS,
    SERVER_PROFILES,
    SERVERS,
    Api,
    server_names,
)
from loadgen_sdk.wire_formats.server_timing import NO_SERVER_TIMING

MESSAGES = [{"role": "user", "content": "Say something."}]
USAGE = {"include_usage": True}
EXACT = {"max_tokens": 8, "ignore_eos": True, "min_tokens": 8}


def sent(
    name: str, api: Api = "chat", model: str = "tiny", stream: bool = True, **more: Any
) -> dict[str, Any]:
    options = {key: more.pop(key) for key in ("extra_body", "continuous_usage") if key in more}
    request = Request(**{"id": "r", "messages": MESSAGES, "max_tokens": 8} | more)
    return json.loads(
        encode_body(request, BodyFormat(SERVER_PROFILES[name], api, model, stream, **options))
    )


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("trtllm", {"stream_options": USAGE, **EXACT}),
        ("vllm", {"stream_options": USAGE, **EXACT}),
        ("sglang", {"stream_options": USAGE, **EXACT}),
        ("dynamo", {"stream_options": USAGE, **EXACT}),
        ("llamacpp", {"stream_options": USAGE, "max_tokens": 8, "ignore_eos": True}),
        ("transformers", {"stream_options": USAGE, "max_tokens": 8}),
        ("openai", {"stream_options": {**USAGE, "include_obfuscation": False}, "max_tokens": 8}),
        ("azure", {"stream_options": USAGE, "max_tokens": 8}),
        ("generic", {"stream_options": USAGE, "max_tokens": 8}),
    ],
)
def test_the_body_for_every_server_equals_the_expected_one(name: str, rest: dict[str, Any]) -> None:
    assert sent(name) == {"model": "tiny", "messages": MESSAGES, "stream": True, **rest}
    completions = sent(name, "completions", messages=None, prompt="Say")

    assert completions == {"model": "tiny", "prompt": "Say", "stream": True, **rest}

    unary = {
        key: value for key, value in rest.items() if key != "stream_options"
    }  # an error without `stream: true`

    assert sent(name, stream=False) == {
        "model": "tiny",
        "messages": MESSAGES,
        "stream": False,
        **unary,
    }


@pytest.mark.parametrize("name", SERVER_PROFILES)
def test_no_length_is_forced_unless_requested(name: str) -> None:
    assert sent(name, max_tokens=None).keys() == {"model", "messages", "stream", "stream_options"}
    assert not sent(name, exact_output=False).keys() & {"ignore_eos", "min_tokens"}
    stopped = sent(name, extra={"stop": ["END"]})
    assert not stopped.keys() & {"ignore_eos", "min_tokens"} and stopped["stop"] == ["END"]


@pytest.mark.parametrize(
    ("name", "api", "model", "field"),
    [
        ("openai", "chat", "gpt-4o", "max_tokens"),
        ("openai", "chat", "o3-mini", "max_completion_tokens"),
        ("openai", "chat", "gpt-5-nano", "max_completion_tokens"),
        ("azure", "chat", "o1", "max_completion_tokens"),
        ("generic", "chat", "openai/gpt-5", "max_completion_tokens"),
        ("generic", "chat", "qwen-o1-like", "max_tokens"),
        ("openai", "completions", "o3-mini", "max_tokens"),
        ("trtllm", "chat", "o3-mini", "max_tokens"),
    ],
)
def test_the_output_limit_has_the_name_that_the_server_expects(
    name: str, api: Api, model: str, field: str
) -> None:
    fields = sent(name, api, model).keys() & {"max_tokens", "max_completion_tokens"}
    assert fields == {field}


@pytest.mark.parametrize("name", SERVER_PROFILES)
def test_continuous_usage_is_requested_only_from_servers_that_accept_it(name: str) -> None:
    stream_options = sent(name, continuous_usage=True)["stream_options"]
    assert (
        stream_options.get("continuous_usage_stats", False)
        is SERVER_PROFILES[name].accepts_continuous_usage
    )


def test_extra_body_fields_replace_nested_fields_of_the_request() -> None:
    assert (
        sent("vllm", extra={"temperature": 0.7, "top_p": 0.9}, extra_body={"temperature": 0})[
            "temperature"
        ]
        == 0
    )

    nested = sent(
        "dynamo",
        extra={"nvext": {"a": 1}},
        extra_body={"nvext": {"b": [2]}, "stream_options": {"x": True}},
    )

    assert nested["nvext"] == {"a": 1, "b": [2]}
    assert nested["stream_options"] == {"include_usage": True, "x": True}
    assert "ignore_eos" not in sent("vllm", extra_body={"ignore_eos": None})


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("where", ["extra", "extra_body"])
def test_an_output_limit_of_the_user_replaces_the_default_one(field: str, where: str) -> None:
    got = sent("trtllm", **{where: {field: 3}})
    assert {key: got[key] for key in got.keys() & {*EXACT, field, "max_completion_tokens"}} == {
        field: 3,
        "min_tokens": 3,
        "ignore_eos": True,
    }


def test_a_body_from_a_shared_template_equals_one_built_singly() -> None:
    requested_lengths = [4, None, 7, 4, 4, 4, 9, 9, 9]
    texts = [
        "w1 w2",
        "",
        'a "quote"\n',
        "one prompt",
        "another",
        "\u00e9\u2028",
        "long " * 1000,
        "x",
        "y",
    ]
    plain = [
        Request(id="r", prompt=text, max_tokens=tokens)
        for text, tokens in zip(texts, requested_lengths, strict=True)
    ]
    other_requests = [
        Request(id="r", messages=[{"role": "user", "content": "one prompt"}], max_tokens=4)
    ]
    other_requests += [
        Request(
            id="r", prompt="x", max_tokens=4, exact_output=False, extra={"stop": ["one prompt"]}
        )
    ]
    extra_bodies = [
        {"stop": ["one prompt"]},
        {"stop": ["another", "one prompt"]},
        {"messages": [], "prompt": "one prompt"},
    ]
    for name, api in (
        ("vllm", "chat"),
        ("openai", "completions"),
        ("vllm", "responses"),
        ("tei", "embeddings"),
    ):
        for extra in (None, {"temperature": 0}, *extra_bodies):
            arguments: Any = SERVER_PROFILES.get(name, SERVER_PROFILES["vllm"]), api, "m", True
            body_format = BodyFormat(*arguments, extra_body=extra, continuous_usage=True)
            encoder = BodyEncoder(body_format)
            for request in (*plain, *other_requests, *plain):
                assert encoder.encode(request) == encode_body(request, body_format)


def test_prompts_and_messages_are_converted_to_the_format_of_the_api() -> None:
    assert sent("vllm", messages=None, prompt="Hi")["messages"] == [
        {"role": "user", "content": "Hi"}
    ]

    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": []},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one "}, {"type": "image_url"}, {"text": "two"}],
        },
    ]

    assert sent("vllm", "completions", messages=talk)["prompt"] == "Be brief.\none two"


@pytest.mark.parametrize("name", SERVER_PROFILES)
@pytest.mark.parametrize("api", APIS)
def test_token_ids_are_sent_only_to_servers_and_apis_that_accept_them(name: str, api: Api) -> None:
    if api in ("completions", "embeddings") and SERVER_PROFILES[name].accepts_prompt_token_ids:
        field = "prompt" if api == "completions" else "input"
        assert sent(name, api, messages=None, prompt=[1, 2, 3])[field] == [1, 2, 3]
    elif api == "chat" and SERVER_PROFILES[name].accepts_chat_token_ids:
        assert sent(name, api, messages=None, prompt=[1, 2, 3])["prompt_token_ids"] == [1, 2, 3]
    else:
        with refused(TargetUnusable, "unsupported"):
            sent(name, api, messages=None, prompt=[1, 2, 3])


def test_server_profiles_name_only_fields_that_the_body_sends() -> None:
    for name, server_profile in SERVER_PROFILES.items():
        assert server_profile.name == name
        for api, prompt in (("chat", "messages"), ("completions", "prompt")):
            assert [*sent(name, api)] == [
                "model",
                prompt,
                "stream",
                "stream_options",
                "max_tokens",
                *server_profile.length_fields,
            ]
        assert [*sent(name, "responses")] == ["model", "input", "stream", "max_output_tokens"]
        assert [*sent(name, "embeddings")] == ["model", "input", "encoding_format"]
    assert ("auto", *SERVER_PROFILES) == server_names()


def test_the_page_of_servers_equals_its_generated_text() -> None:
    assert make_servers.PAGE.read_text("utf-8") == make_servers.page(), (
        "python tests/make_servers.py"
    )
    for row in SERVERS.builtin_rows:
        assert row.rejects_unknown_models is (row.response_to_unknown_model != "served")
        assert set(row.metrics) <= set(SERVER_METRICS) and all(
            rule.source in DETECTION_SOURCES for rule in row.detection_rules
        )
        assert all(parse({}) == NO_SERVER_TIMING for parse in row.timing_parsers.values())


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


@given(objects, objects)
def test_merge_changes_no_argument_and_is_idempotent(
    value: dict[str, Any], patch: dict[str, Any]
) -> None:
    before = json.dumps([value, patch])
    once = merge_patch(value, patch)
    assert merge_patch(once, patch) == once
    assert json.dumps([value, patch]) == before
    assert all(once[key] == new for key, new in patch.items() if isinstance(new, int | str | list))
