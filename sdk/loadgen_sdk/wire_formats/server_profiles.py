"""The table of servers: how each kind is detected, which fields it accepts, and what it reports.

Pure.

The rules are data, so that each one can be checked against the documentation of the server. Code
that reads the table does not depend on the name of a server. A profile changes at run time only
when a probe finds that the server at hand differs from it. Other packages add profiles by entry
points of the group `loadgen_sdk.servers`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from ..plugins import OpenTable
from . import server_timing
from .server_timing import TimingParser

Api = Literal["chat", "completions", "responses", "messages", "embeddings", "rerank"]
APIS: tuple[Api, ...] = ("chat", "completions", "responses", "messages", "embeddings", "rerank")
NON_GENERATIVE_APIS: tuple[Api, ...] = ("embeddings", "rerank")
"""APIs that respond with numbers at once: they have no output tokens, no TTFT and no streams."""

OUTPUT_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
"""The two names of the output limit. trtllm-serve refuses a body with both."""

REASONING_MODEL_PATTERN = re.compile(r"(?:^|[/:])(?:o\d|gpt-5(?!-chat))", re.IGNORECASE)
"""Models of OpenAI that refuse `max_tokens` in chat and accept `max_completion_tokens` instead."""

DETECTION_SOURCES = ("models", "head", "version", "health", "props", "openapi")
"""Where detection rules are applied, in this order.

"head" stands for the headers of the response with the list of models, the others for a page each.
"""


class DetectionRule(msgspec.Struct, frozen=True):
    """A server is of a kind if a page or the headers of a response match a pattern.

    Attributes:
        source: Where the pattern is searched, one of DETECTION_SOURCES.
        pattern: A regular expression.
        rank: The rule with the lowest rank wins if several rules match at one source. Rank 0 is for
            gateways, which pass on what the servers behind them say, and rank 2 for patterns that
            other servers may match, too.
    """

    source: str
    pattern: str
    rank: int = 1


class ServerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the client does differently for one kind of server.

    A body has the model, the prompt, `stream`, `stream_options`, the output limit, the length
    fields and what the user adds. No other field is sent, because half of these servers respond
    with 400 or 422 to an unknown field.

    Attributes of the server:
        name: The value for `--server`.
        title: The name for people.
        detection_rules: How the server is detected.
        hosts: The host names of a hosted service. Only its API is requested, and no other page.

    Attributes of requests:
        stream_options: The fields of `stream_options` in requests for streams.
        output_limit_field: The name of the output limit.
        reasoning_output_limit_field: The name of the output limit in chats with reasoning models
            (REASONING_MODEL_PATTERN).
        length_fields: The fields that force the exact output length. Empty if that is not possible.
        accepts_continuous_usage: `stream_options.continuous_usage_stats` is accepted, which adds
            the cumulative usage to each event.
        accepts_prompt_token_ids: Completions accept a list of token ids as the prompt.
        accepts_chat_token_ids: Chats accept token ids in the field `prompt_token_ids`.
        rejects_unknown_models: An unknown model is an error. Otherwise any name is served.
        max_idle_s: Connections that were idle for longer are not reused. Most servers close them
            after 5 s.
        cache_reset_path: A POST to this path empties the prefix cache. Empty if there is none.
        cache_reset_hint: What to do if that request is refused.
        profiler_requirement: What /start_profile requires. Empty if there is no profiler.

    Attributes of the server's own timing of a request:
        timing_request_headers: Headers that request the timing.
        timing_request_fields: Body fields that request the timing.
        reports_timing_in_streams: Streams have the timing, too. Otherwise a stream that requests it
            is refused.
        timing_parsers: The name of each format in a response, with its parser.
        timing_records_path: A page with the timings of past requests, which each read empties. Only
            for servers whose responses have no timing.

    Attributes of the server's information about itself:
        info_path: A page with its version, engine and precision, beside /version and the models.
        version_field: The field of that page with the version, if /version does not exist.
        engine_pattern: A regular expression for that page. Its first group is the engine.

    Attributes of its metrics:
        metrics_paths: The paths of the page of metrics. The first one that exists is used.
        consumed_metrics_path: A page of metrics that each read empties. It is read only if the user
            requests it.
        energy_path: A page with the energy that was used.
        metrics_prefix: The prefix of the names of its metrics.
        metrics: The quantities of SERVER_METRICS, with their names at this server.

    Attributes for docs/reference/servers.md:
        response_to_unknown_field: What a body with an unknown field gets.
        response_to_unknown_model: What a request for an unknown model gets.
        cached_tokens_reported: When the usage has the tokens from the prefix cache.
        timing_reported: Where the server's own timing is found.
    """

    name: str
    title: str
    detection_rules: tuple[DetectionRule, ...] = ()
    hosts: tuple[str, ...] = ()

    stream_options: tuple[tuple[str, bool], ...] = (("include_usage", True),)
    output_limit_field: str = "max_tokens"
    reasoning_output_limit_field: str = "max_tokens"
    length_fields: tuple[str, ...] = ()
    accepts_continuous_usage: bool = False
    accepts_prompt_token_ids: bool = True
    accepts_chat_token_ids: bool = False
    rejects_unknown_models: bool = True
    max_idle_s: float = 4.0
    cache_reset_path: str = ""
    cache_reset_hint: str = ""
    profiler_requirement: str = ""

    timing_request_headers: tuple[tuple[str, str], ...] = ()
    timing_request_fields: dict[str, Any] = {}
    reports_timing_in_streams: bool = True
    timing_parsers: dict[str, TimingParser] = {}
    timing_records_path: str = ""

    info_path: str = ""
    version_field: str = ""
    engine_pattern: str = ""

    metrics_paths: tuple[str, ...] = ()
    consumed_metrics_path: str = ""
    energy_path: str = ""
    metrics_prefix: str = ""
    metrics: dict[str, tuple[str, ...]] = {}

    response_to_unknown_field: str = ""
    response_to_unknown_model: str = ""
    cached_tokens_reported: str = ""
    timing_reported: str = "none"

    def output_limit_field_for(self, api: Api, model: str) -> str:
        """Return the name of the field that limits the output of a model."""
        if api == "chat" and REASONING_MODEL_PATTERN.search(model):
            return self.reasoning_output_limit_field
        return self.output_limit_field


SERVER_METRICS = (
    "running",
    "waiting",
    "kv_use",
    "hit_share",
    "output_tokens",
    "input_tokens",
    "cached_tokens",
    "cache_hits",
    "cache_queries",
    "requests_ok",
    "paused",
    "preempted",
    "replicas",
    "drafts",
    "drafted_tokens",
    "accepted_tokens",
    "accepted_by_position",
    "accepted_share",
    "accepted_length",
)
"""The quantities that are read from the metrics of servers.

Shares are from 0 to 1. Tokens, cache hits and queries, requests, drafts and preemptions are
counters. `paused` and `replicas` are current numbers.
"""

_EXACT_LENGTH_FIELDS = ("ignore_eos", "min_tokens")
_COMPLETION_LIMIT_FIELD = "max_completion_tokens"
_OPENAI_STREAM_OPTIONS = (("include_usage", True), ("include_obfuscation", False))
"""Without the second option, OpenAI adds random padding to each event."""

_ITERATION_PREFIX = "trtllm_iteration:"
"""The prefix that the names of TensorRT-LLM's JSON statistics get here."""

_PROFILES = (
    ServerProfile(
        name="trtllm",
        title="TensorRT-LLM trtllm-serve",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"tensorrt_llm"'),
            DetectionRule(
                "openapi",
                r'"/(?:_internal/tokenize|energy_metrics|steady_clock_offset|kv_cache_events|cluster_info)"',
            ),
        ),
        length_fields=_EXACT_LENGTH_FIELDS,
        accepts_continuous_usage=True,
        rejects_unknown_models=False,
        accepts_chat_token_ids=True,
        cache_reset_path="/reset_prefix_cache",
        cache_reset_hint=(
            "only some versions of trtllm-serve support it "
            "(NVIDIA/TensorRT-LLM#14970, #15313); restart others to empty the cache"
        ),
        profiler_requirement="use a release that has these (1.3 or later)",
        # The header has no effect unless the server runs with return_perf_metrics: true.
        timing_request_headers=(("X-TRTLLM-return-metrics", "1"),),
        timing_parsers={
            "trtllm.perf_metrics": server_timing.parse_trtllm,
            "server-timing": server_timing.parse_trtllm,
            "speculative_decoding": server_timing.parse_trtllm_drafts,
        },
        timing_records_path="/perf_metrics",
        info_path="/prometheus/metrics",
        engine_pattern=r'engine_type="([^"\n]{1,60})"',
        # The page /metrics is JSON here, and each read empties it.
        metrics_paths=("/prometheus/metrics",),
        consumed_metrics_path="/metrics",
        energy_path="/energy_metrics",
        metrics_prefix="trtllm_",
        metrics={
            "running": ("trtllm_num_requests_running", f"{_ITERATION_PREFIX}numActiveRequests"),
            "waiting": ("trtllm_num_requests_waiting", f"{_ITERATION_PREFIX}numQueuedRequests"),
            "kv_use": ("trtllm_kv_cache_utilization", f"{_ITERATION_PREFIX}kvCacheStats.usedShare"),
            "hit_share": (
                "trtllm_kv_cache_hit_rate",
                f"{_ITERATION_PREFIX}kvCacheStats.cacheHitRate",
            ),
            "output_tokens": ("trtllm_generation_tokens_total",),
            "input_tokens": ("trtllm_prompt_tokens_total",),
            "cached_tokens": ("trtllm_prompt_cached_tokens_total",),
            "accepted_length": (f"{_ITERATION_PREFIX}specDecodingStats.acceptanceLength",),
            "requests_ok": ("trtllm_request_success_total",),
            "paused": (f"{_ITERATION_PREFIX}inflightBatchingStats.numPausedRequests",),
        },
        response_to_unknown_field="400",
        response_to_unknown_model="served",
        cached_tokens_reported="always",
        timing_reported="an event after `[DONE]`, or the header `server-timing`, if requested",
    ),
    ServerProfile(
        name="vllm",
        title="vLLM",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"vllm"'),
            DetectionRule("openapi", r'"/v1/score"|"/tokenizer_info"|vLLM', rank=2),
        ),
        length_fields=_EXACT_LENGTH_FIELDS,
        accepts_continuous_usage=True,
        cache_reset_path="/reset_prefix_cache",
        cache_reset_hint=(
            "start the server with VLLM_SERVER_DEV_MODE=1; requests in flight keep their blocks"
        ),
        profiler_requirement="start the server with VLLM_TORCH_PROFILER_DIR or --profiler-config",
        # The field has no effect unless the server runs with --enable-per-request-metrics.
        timing_request_fields={"include_metrics": True},
        timing_parsers={"metrics": server_timing.parse_vllm},
        info_path="/metrics",
        metrics_paths=("/metrics",),
        metrics_prefix="vllm",
        metrics={
            "running": ("vllm:num_requests_running",),
            "waiting": ("vllm:num_requests_waiting",),
            "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            "output_tokens": ("vllm:generation_tokens_total",),
            "input_tokens": ("vllm:prompt_tokens_total",),
            "cached_tokens": ("vllm:prompt_tokens_cached_total",),
            "cache_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            "cache_queries": (
                "vllm:prefix_cache_queries_total",
                "vllm:gpu_prefix_cache_queries_total",
            ),
            "requests_ok": ("vllm:request_success_total",),
            "preempted": ("vllm:num_preemptions_total",),
            "drafts": ("vllm:spec_decode_num_drafts_total",),
            "drafted_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
            "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
            "accepted_by_position": ("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
        },
        response_to_unknown_field="ignored",
        response_to_unknown_model="404",
        cached_tokens_reported="`--enable-prompt-tokens-details`",
        timing_reported="`--enable-per-request-metrics`",
    ),
    ServerProfile(
        name="sglang",
        title="SGLang",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"sglang"'),
            DetectionRule("openapi", r'"/(?:flush_cache|get_model_info|get_server_info)"'),
        ),
        length_fields=_EXACT_LENGTH_FIELDS,
        accepts_continuous_usage=True,
        rejects_unknown_models=False,
        cache_reset_path="/flush_cache",
        cache_reset_hint="the cache is emptied only while no request runs or waits",
        profiler_requirement="start the server with SGLANG_TORCH_PROFILER_DIR",
        # The durations are in the response only if the server runs with --enable-metrics.
        timing_request_fields={"return_meta_info": True},
        reports_timing_in_streams=False,
        timing_parsers={"meta_info": server_timing.parse_sglang},
        info_path="/get_server_info",
        version_field="version",
        metrics_paths=("/metrics",),
        metrics_prefix="sglang",
        metrics={
            "running": ("sglang:num_running_reqs",),
            "waiting": ("sglang:num_queue_reqs",),
            "kv_use": ("sglang:token_usage",),
            "hit_share": ("sglang:cache_hit_rate",),
            "output_tokens": ("sglang:generation_tokens_total",),
            "input_tokens": ("sglang:prompt_tokens_total",),
            "cached_tokens": ("sglang:cached_tokens_total",),
            "paused": ("sglang:num_retracted_reqs",),
            "accepted_share": ("sglang:spec_accept_rate",),
            "accepted_length": ("sglang:spec_accept_length",),
        },
        response_to_unknown_field="ignored",
        response_to_unknown_model="served",
        cached_tokens_reported="`--enable-cache-report`",
        timing_reported="`meta_info` in responses that are not streamed, if requested",
    ),
    ServerProfile(
        name="dynamo",
        title="NVIDIA Dynamo",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"nvidia"[^}]*"context_window"'),
            DetectionRule("health", r"dyn://"),
        ),
        length_fields=_EXACT_LENGTH_FIELDS,
        accepts_continuous_usage=True,
        timing_request_fields={"nvext": {"extra_fields": ["timing"]}},
        timing_parsers={"nvext": server_timing.parse_dynamo},
        info_path="/health",
        engine_pattern=r"dyn://[\w-]+\.(tensorrt_llm|trtllm|vllm|sglang|mocker)\.",
        metrics_paths=("/metrics",),
        metrics_prefix="dynamo_",
        metrics={
            "running": ("dynamo_frontend_inflight_requests",),
            "waiting": ("dynamo_frontend_queued_requests",),
            "output_tokens": ("dynamo_frontend_output_tokens_total",),
            "input_tokens": ("dynamo_frontend_input_sequence_tokens_sum",),
            "cached_tokens": ("dynamo_frontend_cached_tokens_sum",),
        },
        response_to_unknown_field="400",
        response_to_unknown_model="404",
        cached_tokens_reported="if its engine does",
        timing_reported="`nvext.timing`, on request",
    ),
    ServerProfile(
        name="llamacpp",
        title="llama.cpp llama-server",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"llamacpp"'),
            DetectionRule("head", r"(?m)^server: llama\.cpp"),
            DetectionRule("props", r'"default_generation_settings"'),
        ),
        # The server has no min_tokens.
        length_fields=("ignore_eos",),
        rejects_unknown_models=False,
        timing_parsers={"timings": server_timing.parse_llamacpp},
        info_path="/props",
        version_field="build_info",
        metrics_paths=("/metrics",),
        metrics_prefix="llamacpp",
        metrics={
            "running": ("llamacpp:requests_processing",),
            "waiting": ("llamacpp:requests_deferred",),
            "kv_use": ("llamacpp:kv_cache_usage_ratio",),
            "output_tokens": ("llamacpp:tokens_predicted_total",),
            "input_tokens": ("llamacpp:prompt_tokens_total",),
            "cached_tokens": ("llamacpp:prompt_tokens_cached_total",),
        },
        response_to_unknown_field="ignored",
        response_to_unknown_model="served",
        cached_tokens_reported="always",
        timing_reported="`timings`, always",
    ),
    ServerProfile(
        name="transformers",
        title="transformers serve",
        detection_rules=(DetectionRule("openapi", r'(?s)"/load_model"(?=.*"/reset")'),),
        accepts_prompt_token_ids=False,
        response_to_unknown_field="422",
        response_to_unknown_model="400",
        cached_tokens_reported="never",
    ),
    ServerProfile(
        name="openai",
        title="OpenAI",
        hosts=("api.openai.com",),
        detection_rules=(
            DetectionRule("head", r"(?m)^openai-(?:version|organization|processing-ms):"),
        ),
        stream_options=_OPENAI_STREAM_OPTIONS,
        reasoning_output_limit_field=_COMPLETION_LIMIT_FIELD,
        response_to_unknown_field="400",
        response_to_unknown_model="404",
        cached_tokens_reported="always",
        timing_reported="`openai-processing-ms`",
    ),
    ServerProfile(
        name="azure",
        title="Azure OpenAI",
        detection_rules=(DetectionRule("head", r"(?m)^(?:apim-request-id|x-ms-region):"),),
        reasoning_output_limit_field=_COMPLETION_LIMIT_FIELD,
        response_to_unknown_field="400",
        response_to_unknown_model="404",
    ),
    ServerProfile(
        # Its only API is "messages", which has no field that forces a length.
        name="anthropic",
        title="Anthropic",
        hosts=("api.anthropic.com",),
        detection_rules=(
            DetectionRule("head", r"(?m)^anthropic-(?:organization-id|ratelimit-\S+):"),
        ),
        accepts_prompt_token_ids=False,
        response_to_unknown_field="400",
        response_to_unknown_model="404",
        cached_tokens_reported="always",
    ),
    ServerProfile(
        # This is usually a gateway: the server behind it decides what a field does.
        name="generic",
        title="an OpenAI-compatible server of unknown type",
        detection_rules=(DetectionRule("head", r"(?m)^x-litellm-", rank=0),),
        reasoning_output_limit_field=_COMPLETION_LIMIT_FIELD,
        metrics_paths=("/prometheus/metrics", "/metrics"),
        response_to_unknown_field="passed on",
        # Of the Gateway API's inference extension and llm-d, vLLM's production stack, SGLang's
        # router, and Kubernetes.
        metrics={
            "replicas": (
                "inference_pool_ready_pods",
                "vllm:healthy_pods_total",
                "sgl_router_active_workers",
                "kube_deployment_status_replicas_available",
            ),
        },
    ),
)

SERVERS: OpenTable[ServerProfile] = OpenTable(
    "loadgen_sdk.servers", ServerProfile, lambda: _PROFILES
)

SERVER_PROFILES: dict[str, ServerProfile] = {
    profile.name: profile for profile in SERVERS.builtin_rows
}
"""The built-in profiles by name. `auto` falls back to `generic`, which sends only common fields."""


def find_server_profile(name: str) -> ServerProfile:
    """Return the profile of a server.

    Raises:
        KeyError: There is no such profile.
        WrongUse: It is the profile of a plug-in that could not be loaded.
    """
    profile = SERVERS.find(name)
    if profile is None:
        raise KeyError(name)
    return profile


def server_names() -> tuple[str, ...]:
    """Return the values for `--server`, with those of plug-ins.

    The names of plug-ins come from a cache, so that the help text does not have to import them.
    """
    plugin_names = [name for (name,) in SERVERS.cached_fields("name")]
    return ("auto", *SERVER_PROFILES, *plugin_names)
