"""Tests of the probe: the detection of servers, and why a target cannot be used."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import repository_paths
import trustme
from expected_errors import refused
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import HttpFetcher
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.probe import ProbeResult, probe
from loadgen_sdk.probe.probe_client import OutputLengths, ProbeOptions
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.server_profiles import Api
from servers import start

from loadgen.sim.server.options import Options

RECORDED = json.loads((repository_paths.TESTS / "data/transcripts/probe.json").read_text())
KEY = "sk-very-secret-key-1234"
JSON = {"content-type": "application/json"}
RECORDED_LENGTHS = OutputLengths(shortest=1, longest=8)
"""The output lengths of the recorded responses."""

SHORT_TOKENS, LONG_TOKENS = RECORDED_LENGTHS


class InMemory:
    """A server as a table from "METHOD path" (and max_tokens) to status, headers and body."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers, self.asked, self.bodies = answers, [], []
        self.waited: list[float] = []
        self._times = iter((9_000_000, 1_000_000, 2_000_000, 3_000_000, 2_000_000))

    async def send_request(self, method: str, path: str, headers: Any, body: bytes) -> HttpResponse:
        name = f"{method} {path}"
        if body:
            fields = json.loads(body)
            self.bodies.append(fields)
            limit = fields.get("max_tokens", fields.get("max_completion_tokens"))
            name += f" {fields['model'] if fields['model'] == 'unnamed' else limit}"
        self.asked.append((name, dict(headers)))
        status, head, text = self.answers.get(name, [404, {}, "no such route"])
        return HttpResponse(status, head, text.encode())

    async def connect(self) -> int:
        return next(self._times)

    def probe(self, url: str = "http://h", *, api: Api = "chat", **options: Any) -> ProbeResult:
        target = Target.parse(url, api=api)
        return asyncio.run(
            probe(
                target,
                send_request=self.send_request,
                connect=self.connect,
                options=ProbeOptions(
                    **{"output_lengths": RECORDED_LENGTHS, "sleep": self.sleep} | options
                ),
            )
        )

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)


def served(owned_by: str, *ids: str, **more: Any) -> list[Any]:
    rows = [
        {"id": name, "object": "model", "owned_by": owned_by, **more} for name in ids or ("tiny",)
    ]
    return [200, JSON, json.dumps({"object": "list", "data": rows})]


def streamed(tokens: int, events: int, prompt: int | None) -> list[Any]:
    """Return a chat stream of some events, with a token count unless `prompt` is None."""
    chunks: list[Any] = [
        {"choices": [{"index": 0, "delta": {"content": "x"}}]} for _ in range(events)
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    if prompt is not None:
        chunks.append(
            {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}
        )
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return [200, {"content-type": "text/event-stream; charset=utf-8"}, body]


def healthy(**changed: list[Any]) -> dict[str, list[Any]]:
    """Return the table of a complete chat server whose template has 7 tokens."""
    answers = {
        "models": served("vllm"),
        "version": [200, JSON, '{"version":"0.32.0"}'],
        "short": streamed(1, 1, 11),
        "long": streamed(LONG_TOKENS, LONG_TOKENS, 43),
    } | changed
    paths = {"models": "GET /v1/models", "version": "GET /version"}
    paths |= {
        "short": "POST /v1/chat/completions 1",
        "long": f"POST /v1/chat/completions {LONG_TOKENS}",
    }
    return {paths.get(name, name): answer for name, answer in answers.items()}


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("server", "model", "warned"),
    [
        ("llamacpp", "tiny", False),
        ("dynamo", "tiny", False),
        ("transformers", "models/tiny-llama", True),
    ],
)
def test_real_servers_are_recognised_by_their_responses(
    server: str, model: str, warned: bool, api: Api
) -> None:
    probe_result = InMemory(RECORDED[server]["answers"]).probe(api=api)

    assert (probe_result.server, probe_result.server_profile.name, probe_result.model) == (
        server,
        server,
        model,
    )
    assert probe_result.template_tokens == (
        10 if api == "chat" else 0
    )  # role tags of the tiny model's chat template
    assert probe_result.token_ratio == 3.0  # its vocabulary has no "hello"
    assert (
        probe_result.reports_usage,
        probe_result.has_exact_length,
        probe_result.tokens_per_event,
    ) == (
        True,
        True,
        1.0,
    )
    assert probe_result.rtt_ms == 2.0
    assert (
        bool(probe_result.warnings) is warned
    )  # only one of them cannot be made to stop where we want
    assert probe_result.evidence


@pytest.mark.parametrize(
    ("answers", "server"),
    [
        ({"models": served("tensorrt_llm")}, "trtllm"),
        ({"models": served("vllm", max_model_len=2048)}, "vllm"),
        ({"models": served("sglang")}, "sglang"),
        (
            {
                "models": served("me"),
                "GET /props": [200, JSON, '{"default_generation_settings":{}}'],
            },
            "llamacpp",
        ),
        (
            {"models": served("me"), "GET /health": [200, JSON, '{"endpoints":["dyn://a.b.c"]}']},
            "dynamo",
        ),
        (
            {
                "models": served("me"),
                "GET /openapi.json": [200, JSON, '{"paths":{"/energy_metrics":{}}}'],
            },
            "trtllm",
        ),
        ({"models": [200, JSON | {"x-litellm-version": "1"}, served("openai")[2]]}, "generic"),
        ({"models": [200, JSON | {"openai-version": "2020-10-01"}, served("system")[2]]}, "openai"),
        ({"models": served("me")}, "generic"),
    ],
)
def test_each_server_type_is_detected_by_its_responses(
    answers: dict[str, list[Any]], server: str
) -> None:
    assert InMemory(healthy(**answers)).probe().server == server


@pytest.mark.parametrize(
    ("url", "server", "models"),
    [
        ("https://api.openai.com", "openai", "/v1/models"),
        ("https://me.openai.azure.com/openai/v1", "azure", "/openai/v1/models"),
        (
            "https://me.openai.azure.com/openai/deployments/D?api-version=1",
            "azure",
            "/openai/models?api-version=1",
        ),
    ],
)
def test_hosted_services_get_no_request_outside_their_api(
    url: str, server: str, models: str
) -> None:
    class Anything(InMemory):
        async def send_request(
            self, method: str, path: str, headers: Any, body: bytes
        ) -> HttpResponse:
            await super().send_request(method, path, headers, body)
            status, head, text = served("x", "D", "E") if method == "GET" else streamed(8, 8, 20)
            return HttpResponse(status, head, text.encode())

    endpoint = Anything({})
    probe_result = endpoint.probe(
        url, model=None if "deployments" in url else "gpt-5-nano", api_key=KEY
    )
    assert probe_result.server == server
    assert [name for name, _ in endpoint.asked if name.startswith("GET")] == [f"GET {models}"]
    assert probe_result.model == ("D" if "deployments" in url else "gpt-5-nano")
    assert all(KEY in "".join(headers.values()) for _, headers in endpoint.asked)


def test_the_probe_sends_few_requests_if_the_model_list_is_complete() -> None:
    endpoint = InMemory(healthy())
    probe_result = endpoint.probe()

    assert len(endpoint.asked) == 5  # of them one for what the server says of engine and precision
    assert (
        probe_result.version,
        probe_result.template_tokens,
        probe_result.token_ratio,
        probe_result.warnings,
    ) == (
        "0.32.0",
        7,
        1.0,
        (),
    )


def test_a_specified_server_type_is_used_and_a_contradiction_causes_a_warning() -> None:
    endpoint = InMemory(healthy())
    probe_result = endpoint.probe(server="trtllm")
    assert probe_result.server == "trtllm"
    assert len(probe_result.warnings) == 1
    assert "trtllm" in probe_result.warnings[0] and "vllm" in probe_result.warnings[0]
    assert InMemory(healthy()).probe(server="vllm").warnings == ()
    assert len(endpoint.asked) == 5


@pytest.mark.parametrize(
    ("answers", "expected_values"),
    [
        (
            {
                "models": served("tensorrt_llm"),
                "version": [200, JSON, '{"version":"1.3.0rc2"}'],
                "GET /prometheus/metrics": [
                    200,
                    {},
                    'trtllm_num_requests_running{model_name="m",engine_type="pytorch"} 0\n'
                    'trtllm_model_config_info{model_name="m",dtype="bfloat16",'
                    'quantization="NVFP4"} 1.0\n'
                    'trtllm_cache_config_info{cache_dtype="fp8",block_size="32"} 1.0\n',
                ],
            },
            ("1.3.0rc2", "pytorch", "NVFP4, KV cache fp8"),
        ),
        (
            {
                "GET /metrics": [
                    200,
                    {},
                    'vllm:cache_config_info{cache_dtype="auto",block_size="16",engine="0"} 1.0\n',
                ]
            },
            ("0.32.0", "", ""),
        ),
        (
            {
                "GET /metrics": [
                    200,
                    {},
                    'vllm:cache_config_info{cache_dtype="fp8_e4m3",engine="0"} 1.0\n',
                ]
            },
            ("0.32.0", "", "KV cache fp8_e4m3"),
        ),
        (
            {
                "models": served("sglang"),
                "version": [404, JSON, "{}"],
                "GET /get_server_info": [
                    200,
                    JSON,
                    '{"version":"0.5.4","dtype":"bfloat16","quantization":null,"kv_cache_dtype":"auto"}',
                ],
            },
            ("0.5.4", "", "bfloat16"),
        ),
        (
            {
                "models": served("sglang"),
                "version": [404, JSON, "{}"],
                "GET /get_server_info": [500, {}, "{}"],
            },
            ("",) * 3,
        ),
        (
            {"models": served("tensorrt_llm"), "GET /prometheus/metrics": [200, {}, "{not json"]},
            ("0.32.0", "", ""),
        ),
        (
            {
                "models": served("nvidia", context_window=1),
                "version": [404, JSON, "{}"],
                "GET /health": [200, JSON, '{"endpoints":["dyn://dynamo.tensorrt_llm.generate"]}'],
            },
            ("", "tensorrt_llm", ""),
        ),
    ],
)
def test_version_engine_and_precision_are_read_from_the_server(
    answers: dict[str, list[Any]], expected_values: tuple[str, str, str]
) -> None:
    probe_result = InMemory(healthy(**answers)).probe()
    assert (probe_result.version, probe_result.engine, probe_result.precision) == expected_values


def test_version_and_precision_are_read_from_recorded_responses_of_servers() -> None:
    probe_results_by_name = {
        name: InMemory(RECORDED[name]["answers"]).probe()
        for name in ("llamacpp", "dynamo", "transformers")
    }

    assert probe_results_by_name["llamacpp"].version.startswith("b")
    assert [
        (probe_results_by_name[name].version, probe_results_by_name[name].engine)
        for name in ("dynamo", "transformers")
    ] == [
        ("", ""),
        ("", ""),
    ]
    assert [probe_result.precision for probe_result in probe_results_by_name.values()] == [
        "F16",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("changed", "warning", "fields"),
    [
        ({"long": streamed(8, 2, 43)}, "several tokens per event", {"tokens_per_event": 4.0}),
        ({"long": streamed(3, 3, 43)}, "but 3 were generated", {"has_exact_length": False}),
        (
            {"short": streamed(1, 1, None), "long": streamed(8, 8, None)},
            "no usage",
            {"reports_usage": False, "has_exact_length": None},
        ),
        ({"models": served("tensorrt_llm", "other")}, "any model name", {"model": "mine"}),
    ],
)
def test_unusual_responses_to_the_probe_cause_a_warning(
    changed: dict[str, list[Any]], warning: str, fields: dict[str, Any]
) -> None:
    probe_result = InMemory(healthy(**changed)).probe(model="mine")
    assert any(warning in text for text in probe_result.warnings)
    assert {name: getattr(probe_result, name) for name in fields} == fields


def test_the_probe_does_not_judge_an_output_limit_of_the_user() -> None:
    endpoint = InMemory(healthy() | {"POST /v1/chat/completions 3": streamed(3, 3, 20)})
    probe_result = endpoint.probe(extra_body={"max_tokens": 3})
    assert probe_result.has_exact_length is None
    assert all(body["max_tokens"] == 3 for body in endpoint.bodies)


def test_the_probe_learns_the_output_limit_field_that_the_server_accepts() -> None:
    class Modern(InMemory):
        async def send_request(
            self, method: str, path: str, headers: Any, body: bytes
        ) -> HttpResponse:
            if b'"max_tokens"' in body:
                message = (
                    "Unsupported parameter: 'max_tokens' is not supported with this model. "
                    "Use 'max_completion_tokens'"
                )
                return HttpResponse(400, JSON, json.dumps({"error": {"message": message}}).encode())
            return await super().send_request(method, path, headers, body)

    probe_result = Modern(healthy()).probe(server="azure")
    assert (
        probe_result.server_profile.output_limit_field_for("chat", "any name")
        == "max_completion_tokens"
    )
    assert probe_result.template_tokens == 7


@pytest.mark.parametrize(
    ("listed", "model", "code", "hint"),
    [
        (served("vllm", "a", "b"), None, "no_model", "--model: a, b"),
        (served("vllm", *map(str, range(20))), None, "no_model", "and 12 more"),
        ([200, JSON, '{"data":[]}'], None, "no_model", "--model"),
        ([404, {}, "nope"], None, "no_model", "--model"),
        ([200, {}, "<html>hello</html>"], None, "no_model", "--model"),
        (
            [401, JSON, json.dumps({"error": f"bad key {KEY}"})],
            None,
            "unauthorized",
            "check the API key",
        ),
        ([403, JSON, "{}"], None, "unauthorized", "check the API key"),
        ([503, JSON, '{"error":{"message":"Loading model"}}'], None, "http_5xx", "loading"),
    ],
)
def test_invalid_model_lists_end_the_probe(
    listed: list[Any], model: str | None, code: str, hint: str
) -> None:
    with refused(TargetUnusable, code) as exc_info:
        InMemory(healthy(models=listed)).probe(model=model, api_key=KEY)
    assert hint in exc_info.value.hint
    assert KEY not in f"{exc_info.value} {exc_info.value.hint}"


@pytest.mark.parametrize("status", [401, 403, 404, 408, 429, 500, 503])
def test_a_refused_model_list_is_not_needed_if_a_model_is_specified(status: int) -> None:
    probe_result = InMemory(healthy(models=[status, JSON, "{}"])).probe(model="tiny", api_key=KEY)
    assert probe_result.model == "tiny" and probe_result.reports_usage


def test_a_model_list_that_times_out_is_not_needed_if_a_model_is_specified() -> None:
    class WithoutList(InMemory):
        async def send_request(
            self, method: str, path: str, headers: Any, body: bytes
        ) -> HttpResponse:
            if path.endswith("/models"):
                raise TargetUnusable("timeout", "no whole answer within 60 s")
            return await super().send_request(method, path, headers, body)

    assert WithoutList(healthy()).probe(model="tiny").model == "tiny"
    with refused(TargetUnusable, "timeout"):
        WithoutList(healthy()).probe()


def test_a_refused_key_ends_the_probe_even_if_a_model_is_specified() -> None:
    refusal = [401, JSON, '{"error":{"message":"bad key"}}']
    with refused(TargetUnusable, "unauthorized"):
        InMemory(healthy(models=refusal, short=refusal, long=refusal)).probe(
            model="tiny", api_key=KEY
        )


@pytest.mark.parametrize(
    ("refusal", "minimum"),
    [
        (
            "Invalid 'max_tokens': integer below minimum value. Expected a value >= 16, but got 1",
            16,
        ),
        ("max_tokens must be at least 4, got 1", 4),
        ("max_tokens: Input should be greater than or equal to 20", 20),
        ("max_tokens is too small", 16),
    ],
)
def test_the_probe_learns_the_lowest_output_limit_from_the_refusal(
    refusal: str, minimum: int
) -> None:
    server = LimitedOutput(minimum, refusal=refusal)
    probe_result = server.probe(output_lengths=OutputLengths(shortest=1))

    assert (
        probe_result.has_exact_length,
        probe_result.per_token_ms,
        probe_result.one_token_response_ms,
    ) == (
        True,
        1.0,
        1.0,
    )


class LimitedOutput(InMemory):
    """A server that refuses output limits outside a range. It needs 1 ms per token."""

    def __init__(self, minimum: int, maximum: int = 10_000, refusal: str = "no") -> None:
        super().__init__(healthy())
        self._minimum = minimum
        self._maximum = maximum
        self._refusal = json.dumps({"error": {"message": refusal}}).encode()
        self.requested_tokens: list[int] = []

    async def send_request(self, method: str, path: str, headers: Any, body: bytes) -> HttpResponse:
        if not body:
            return await super().send_request(method, path, headers, body)
        tokens = json.loads(body)["max_tokens"]
        self.requested_tokens.append(tokens)
        if not self._minimum <= tokens <= self._maximum:
            return HttpResponse(400, JSON, self._refusal)
        status, head, text = streamed(tokens, tokens, 43)
        return HttpResponse(status, head, text.encode(), duration_ns=tokens * 1_000_000)


def test_the_probe_of_an_unknown_load_requests_at_least_16_tokens() -> None:
    server = LimitedOutput(minimum=16)
    server.probe(output_lengths=None)
    assert sorted(server.requested_tokens) == [16, 24]


@pytest.mark.parametrize("lengths", [OutputLengths(16, 16), OutputLengths(20, 20)])
def test_the_first_requests_of_the_probe_are_within_the_output_limits_of_the_load(
    lengths: OutputLengths,
) -> None:
    server = LimitedOutput(minimum=16, maximum=20)
    server.probe(output_lengths=lengths)
    assert len(server.requested_tokens) == 2


@pytest.mark.parametrize("longest", [1, 4, 8, 100])
def test_the_probe_requests_no_longer_output_than_the_load(longest: int) -> None:
    server = LimitedOutput(minimum=1, maximum=longest)
    probe_result = server.probe(output_lengths=OutputLengths(1, longest))
    assert probe_result.has_exact_length
    assert max(server.requested_tokens) <= longest


def test_a_refused_output_length_is_retried_with_the_length_of_the_load() -> None:
    server = LimitedOutput(minimum=100, maximum=100, refusal="unreadable")
    assert server.probe(output_lengths=OutputLengths(100, 100)).has_exact_length
    assert sorted(set(server.requested_tokens)) == [16, 24, 100]


def test_a_server_that_refuses_every_output_length_of_the_load_is_refused() -> None:
    server = LimitedOutput(minimum=16, refusal="max_tokens must be at least 16")
    with refused(TargetUnusable, "http_4xx"):
        server.probe(output_lengths=OutputLengths(1, 8))
    assert max(server.requested_tokens) == 8


def test_a_media_type_in_capitals_and_any_status_of_success_are_read() -> None:
    _, _, text = streamed(LONG_TOKENS, LONG_TOKENS, 43)
    accepted = [201, {"content-type": "Text/Event-Stream"}, text]
    assert InMemory(healthy(long=accepted)).probe().has_exact_length


def test_one_object_where_a_stream_was_requested_is_reported() -> None:
    document = {
        "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 43, "completion_tokens": LONG_TOKENS},
    }
    probe_result = InMemory(healthy(long=[200, JSON, json.dumps(document)])).probe()
    assert probe_result.ignores_stream and probe_result.tokens_per_event is None
    assert len(probe_result.warnings) == 1


def test_a_compressed_stream_is_refused_with_its_encoding() -> None:
    packed = [200, {"content-type": "text/event-stream", "content-encoding": "gzip"}, "?"]
    with refused(TargetUnusable, "invalid_answer") as exc_info:
        InMemory(healthy(short=packed, long=packed)).probe()
    assert "gzip" in str(exc_info.value)


def test_contradictory_token_counts_cause_a_warning_and_are_not_used() -> None:
    status, head, text = streamed(LONG_TOKENS, LONG_TOKENS, 43)
    both = text.replace('"prompt_tokens": 43', '"prompt_tokens": 43, "cached_tokens": 99')
    probe_result = InMemory(healthy(long=[status, head, both])).probe()
    assert probe_result.template_tokens is None and probe_result.reports_usage
    assert sum("contradict" in warning for warning in probe_result.warnings) == 1


def test_the_only_listed_model_is_not_suggested_again() -> None:
    gone = [404, JSON, '{"error":{"message":"The model `mine` does not exist."}}']
    listed = [200, JSON, json.dumps({"data": [{"id": "mine"}]})]
    with pytest.raises(TargetUnusable) as exc_info:
        InMemory(healthy(models=listed, short=gone, long=gone)).probe()
    assert "choose" not in exc_info.value.hint and "--api" in exc_info.value.hint


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 64 tokens. However, you requested 103 tokens.",
        "the request exceeds the available context size, try increasing it",
        "max_tokens is too large: context length is 64, and the prompt has at least 57 tokens",
        "The sum of prompt length (70) and query length should not exceed max_num_tokens (64)",
        "Requested token count exceeds the model's maximum context length of 64 tokens.",
        "input is too long: 103 tokens, at most 64",
    ],
)
def test_a_context_length_error_is_not_mistaken_for_a_refused_field(message: str) -> None:
    overflow = [400, JSON, json.dumps({"error": {"message": message}})]
    with pytest.raises(TargetUnusable) as exc_info:
        InMemory(healthy(short=overflow, long=overflow)).probe()
    assert "context" in exc_info.value.hint and "FIELD" not in exc_info.value.hint


def test_adapters_are_not_offered_as_models() -> None:
    rows = [
        {"id": "lora", "owned_by": "vllm", "parent": "base"},
        {"id": "base", "owned_by": "vllm", "parent": None},
    ]
    probe_result = InMemory(healthy(models=[200, JSON, json.dumps({"data": rows})])).probe()
    assert probe_result.model == "base"


ERRORS = RECORDED["errors"]["answers"]


@pytest.mark.parametrize(
    ("answer", "code", "hint"),
    [
        (ERRORS["dynamo/err_bad_model"], "unknown_model", "--model: tiny"),
        (ERRORS["tfserve/err_bad_model"], "http_4xx", ""),
        (
            [404, JSON, '{"error":{"message":"The model `mine` does not exist."}}'],
            "unknown_model",
            "tiny",
        ),
        ([404, JSON, '{"detail":"Not Found"}'], "http_4xx", "--api completions"),
        (ERRORS["dynamo/err_unknown_field"], "http_4xx", "--extra-body '{\"FIELD\": null}'"),
        (ERRORS["tfserve/err_unknown_field"], "http_4xx", "--server"),
        (
            [400, JSON, '{"object":"error","message":"prompt too long","code":400}'],
            "http_4xx",
            "context",
        ),
        ([401, JSON, f'{{"error":"{KEY} is wrong"}}'], "unauthorized", "check the API key"),
        ([429, JSON, '{"error":{"message":"slow down"}}'], "http_429", "rate limit"),
        ([503, JSON, ""], "http_5xx", "loading"),
        ([500, {}, "Internal Server Error"], "http_5xx", "log"),
        ([307, {"location": f"https://h/v1?key={KEY}"}, ""], "http_3xx", "URL of the redirect"),
        (
            [200, {"content-type": "text/event-stream"}, 'data: {"error":{"message":"boom"}}\n\n'],
            "invalid_answer",
            "log",
        ),
        ([200, {"content-type": "text/event-stream"}, ""], "invalid_answer", "log"),
        ([200, JSON, "null"], "invalid_answer", "log"),
    ],
)
def test_fatal_responses_end_the_probe(answer: list[Any], code: str, hint: str) -> None:
    with refused(TargetUnusable, code) as exc_info:
        InMemory(healthy(short=answer, long=answer)).probe(model="mine", api_key=KEY)
    assert hint in exc_info.value.hint
    assert KEY not in f"{exc_info.value} {exc_info.value.hint}"


def test_unprintable_model_names_are_not_reported_as_an_empty_model_list() -> None:
    with refused(TargetUnusable, "no_model") as exc_info:
        InMemory(healthy(models=served("vllm", "tiny\x1b[31m"))).probe()
    assert "control characters" in str(exc_info.value) and "\x1b" not in str(exc_info.value)


def test_a_gateway_error_for_the_model_list_hints_at_the_server() -> None:
    with refused(TargetUnusable, "no_model") as exc_info:
        InMemory(healthy(models=[502, {}, "Bad Gateway"])).probe()
    assert "502" in str(exc_info.value) and "the server is running" in exc_info.value.hint


def test_a_missing_rerank_path_is_named_without_suggesting_another_api() -> None:
    with refused(TargetUnusable, "http_4xx") as exc_info:
        InMemory(healthy()).probe(api="rerank", stream=False)
    assert "/v1/rerank" in str(exc_info.value)
    assert "--api chat" not in exc_info.value.hint and "rerank" in exc_info.value.hint


@pytest.mark.parametrize("tokens", ["1e400", str(1 << 40), "-3"])
def test_an_impossible_usage_is_not_reported_as_missing(tokens: str) -> None:
    status, head, text = streamed(LONG_TOKENS, LONG_TOKENS, 43)
    absurd = text.replace(f'"completion_tokens": {LONG_TOKENS}', f'"completion_tokens": {tokens}')
    probe_result = InMemory(healthy(long=[status, head, absurd])).probe()
    assert any("impossible number of tokens" in warning for warning in probe_result.warnings)
    assert not any("no usage" in warning for warning in probe_result.warnings)


def test_a_key_in_a_header_reports_that_the_other_key_is_not_sent() -> None:
    server = InMemory(healthy())
    probe_result = server.probe(
        "http://me:secret@h", api_key=KEY, headers=[("X-Api-Key", "theirs")]
    )

    assert {"Authorization", "X-Api-Key"} <= server.asked[-1][1].keys(), (
        "the pair of the URL is for this server"
    )
    probe_result = InMemory(healthy()).probe(api_key=KEY, headers=[("X-Api-Key", "theirs")])
    assert any(
        "not sent" in warning and "X-Api-Key" in warning for warning in probe_result.warnings
    )


class Shaky(InMemory):
    """Refuses the first requests to generate."""

    def __init__(self, answers: dict[str, list[Any]], times: int, status: int) -> None:
        super().__init__(answers)
        self.times, self.status = times, status

    async def send_request(self, method: str, path: str, headers: Any, body: bytes) -> HttpResponse:
        answer = await super().send_request(method, path, headers, body)
        if body and self.times:
            self.times -= 1
            return HttpResponse(self.status, {}, b"out of luck")
        return answer


def test_the_probe_retries_a_server_that_fails_occasionally() -> None:
    server = Shaky(healthy(), 3, 500)

    assert any(
        "3 preflight requests failed before" in warning
        for warning in server.probe(model="tiny").warnings
    )
    with refused(TargetUnusable, "http_5xx"):
        Shaky(healthy(), 8, 500).probe(model="tiny")
    assert any(
        "1 preflight requests failed" in warning
        for warning in Shaky(healthy(), 1, 429).probe().warnings
    )
    with refused(TargetUnusable, "http_429"):
        Shaky(healthy(), 8, 429).probe(model="tiny")


def test_a_refusal_without_a_key_has_a_hint_to_specify_one() -> None:
    with pytest.raises(TargetUnusable) as exc_info:
        InMemory(healthy(models=[401, JSON, '{"error":"Unauthorized"}'])).probe()
    assert "OPENAI_API_KEY" in exc_info.value.hint


# -- real connections ------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def saying(text: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1 << 16):
            writer.write(text)

    return serve


def ask(
    serve: Serve,
    url: str = "http://127.0.0.1",
    server_tls: ssl.SSLContext | None = None,
    **options: Any,
) -> HttpResponse:
    serving: list[asyncio.Task[None]] = []

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
            await writer.drain()
        except OSError:  # the other side has gone
            pass
        finally:
            writer.close()

    async def run() -> HttpResponse:
        accept = lambda *ends: serving.append(asyncio.create_task(once(*ends)))  # noqa: E731
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=server_tls)
        try:
            target = Target.parse(f"{url}:{server.sockets[0].getsockname()[1]}")
            direct = HttpFetcher(target, **options)
            assert await direct.connect() > 0
            return await direct.send_request("POST", "/x", (("X-A", "b"),), b"{}")
        finally:
            server.close()
            await asyncio.gather(*serving)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
    ],
)
def test_the_http_fetcher_reads_every_framing_of_a_body(text: bytes) -> None:
    answer = ask(saying(text))
    assert (answer.status, answer.body) == (200, b"hello")


def test_the_http_fetcher_sends_its_arguments_unchanged() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the connection that was only to be timed
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + head + await reader.readexactly(2))

    lines = ask(serve, "http://localhost").body.decode().split("\r\n")
    assert lines[0] == "POST /x HTTP/1.1"
    assert lines[1].startswith("Host: localhost:")
    assert {"Connection: close", "X-A: b", "Content-Length: 2"} <= set(lines)
    assert lines[-1] == "{}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", "reset"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "wrong_protocol"),
        (b"SSH-2.0-OpenSSH\r\n", "wrong_protocol"),
        (b"\0\0\x12\4\0\0\0\0\0", "wrong_protocol"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (5 << 20), "invalid_answer"),
    ],
)
def test_the_http_fetcher_refuses_an_invalid_response_with_a_hint(text: bytes, code: str) -> None:
    with refused(TargetUnusable, code) as exc_info:
        ask(saying(text))
    assert exc_info.value.hint


def test_plain_http_at_a_tls_port_is_refused_with_a_hint_to_https() -> None:
    for text in (b"", b"\x15\x03\x01\x00\x02\x02\x46"):
        with pytest.raises(TargetUnusable) as exc_info:
            ask(saying(text))
        assert "https://127.0.0.1" in exc_info.value.hint

    for error in (
        "400 The plain HTTP request was sent to HTTPS port",
        "Client sent an HTTP request to an HTTPS server.",
    ):
        server = InMemory({"GET /v1/models": [400, {}, error]})
        with refused(TargetUnusable, "wrong_protocol") as exc_info:
            server.probe("http://127.0.0.1:8443")
        assert "https://127.0.0.1:8443" in exc_info.value.hint


def test_the_http_fetcher_ends_with_a_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    with refused(TargetUnusable, "timeout"):
        ask(silent, timeout_s=3)  # long enough to connect on a busy machine


def test_an_unreachable_server_ends_the_probe() -> None:
    async def run(url: str) -> None:
        await HttpFetcher(Target.parse(url)).connect()

    with refused(TargetUnusable, "connect"):
        asyncio.run(run("http://user:word@127.0.0.1:1/v1"))
    with refused(TargetUnusable, "dns", where="nosuch.invalid"):
        asyncio.run(run("http://nosuch.invalid"))


@pytest.mark.parametrize(
    ("variables", "is_named"),
    [
        ({}, False),
        ({"http_proxy": "http://p:1"}, True),
        ({"HTTPS_PROXY": "http://p:1"}, False),  # the other scheme
        ({"ALL_PROXY": "http://p:1"}, True),
        ({"http_proxy": "http://p:1", "no_proxy": "127.0.0.1"}, False),
    ],
)
def test_a_proxy_variable_without_effect_is_named_if_the_connection_fails(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_named: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with refused(TargetUnusable, "connect") as exc_info:
        asyncio.run(HttpFetcher(Target.parse("http://127.0.0.1:1")).connect())
    assert ("proxy" in exc_info.value.hint) is is_named


def test_a_tls_server_with_http_2_only_is_reported() -> None:
    authority = trustme.CA()
    server_tls, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    authority.configure_trust(trusting)
    server_tls.set_alpn_protocols(["h2"])
    trusting.set_alpn_protocols(["http/1.1"])
    settings_frame = saying(b"\0\0\x12\4\0\0\0\0\0")

    with refused(TargetUnusable, "wrong_protocol"):
        ask(settings_frame, "https://127.0.0.1", server_tls, tls=trusting)


def test_the_http_fetcher_connects_over_tls_and_hints_at_http() -> None:
    authority = trustme.CA()
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    hello = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    with refused(TargetUnusable, "tls") as exc_info:
        ask(hello, "https://127.0.0.1", server_tls)
    assert "--cacert" in exc_info.value.hint

    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    assert ask(hello, "https://127.0.0.1", server_tls, tls=trusting).body == b"hi"
    with refused(TargetUnusable, "tls") as exc_info:
        ask(saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "https://127.0.0.1", tls=trusting)
    assert "http://" in exc_info.value.hint


@pytest.mark.processes
def test_the_probe_recognises_the_embedded_endpoint() -> None:
    async def run(url: str, **options: Any) -> ProbeResult:
        target = Target.parse(url)
        direct = HttpFetcher(target)
        return await probe(
            target,
            send_request=direct.send_request,
            connect=direct.connect,
            options=ProbeOptions(**options),
        )

    with start(Options(ttft="1ms", itl="0", stream_interval=4)) as endpoint:
        probe_result = asyncio.run(run(endpoint.url))
        assert (
            probe_result.server,
            probe_result.model,
            probe_result.has_exact_length,
            probe_result.reports_usage,
        ) == (
            "trtllm",
            "sim",
            True,
            True,
        )
        assert probe_result.tokens_per_event is not None
        assert probe_result.tokens_per_event > 2
        assert probe_result.rtt_ms > 0
        with refused(TargetUnusable, "http_4xx") as exc_info:
            asyncio.run(run(endpoint.url, extra_body={"temperatur": 0}))
        assert "--extra-body" in exc_info.value.hint


@pytest.mark.parametrize(
    ("head", "waits"), [({"retry-after": "2"}, 2.0), ({}, 1.0), ({"retry-after": "900"}, 5.0)]
)
def test_the_probe_waits_for_a_rate_limit_that_it_uses_up(
    head: dict[str, str], waits: float
) -> None:
    class Limited(Shaky):
        async def send_request(
            self, method: str, path: str, headers: Any, body: bytes
        ) -> HttpResponse:
            answer = await super().send_request(method, path, headers, body)
            return HttpResponse(429, head, answer.body) if answer.status == 429 else answer

    server = Limited(healthy(), 1, 429)
    assert server.probe().model == "tiny"
    assert server.waited == [waits]
