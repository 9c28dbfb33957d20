"""The table of servers: how each kind is known, which fields it accepts, and what it reports.

The rules are data, so that each line can be checked against the server's own documents. Code that reads the table does
not depend on the name of a server. Pure. A row changes at run time only through `msgspec.structs.replace`, when a probe
finds that the server at hand differs from the table. Rows of other packages: entry points of `loadgen_sdk.servers`.
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
"""Those that answer with numbers at once: no tokens come out, so there is no TTFT and nothing is streamed."""

OUTPUT_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
"""The two names of the output limit. trtllm-serve takes them for one field and answers 400 to both at once."""

REASONING_MODEL_PATTERN = re.compile(r"(?:^|[/:])(?:o\d|gpt-5(?!-chat))", re.IGNORECASE)
"""Model names of OpenAI that refuse `max_tokens` in chat and take `max_completion_tokens` instead."""


class DetectionRule(msgspec.Struct, frozen=True):
    """If `pattern` matches what the server says at `where`, it is of this kind."""

    where: str  # one of SOURCES
    pattern: str
    rank: int = (
        1  # smaller first: 0 of a gateway, behind which there are others; 2 of what others say too
    )


DETECTION_SOURCES = ("models", "head", "version", "health", "props", "openapi")
"""Where signs are looked for, in this order; head: the headers of the answer with the models."""


class ServerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: everything that the client does differently for one kind of server.

    A body has model, prompt, stream, stream_options, the output limit, the fields of `length_fields`, and what the user adds.
    No other field is sent, because half of these servers answer 400 or 422 to an unknown field.
    """

    name: str  # the value for `--server`
    title: str  # name for people
    # how it is known
    detection_rules: tuple[DetectionRule, ...] = ()
    hosts: tuple[str, ...] = ()  # of a service: it is asked nothing beside its API
    # what is sent
    stream_options: tuple[tuple[str, bool], ...] = (
        ("include_usage", True),
    )  # inside `stream_options`, when streaming
    output_limit_field: str = "max_tokens"
    reasoning_output_limit_field: str = (
        "max_tokens"  # in chat, for models that REASONING_MODEL matches
    )
    length_fields: tuple[
        str, ...
    ] = ()  # the fields that force the exact output length; (): not possible
    continuous_usage: bool = (
        False  # accepts stream_options.continuous_usage_stats: cumulative usage on every event
    )
    accepts_prompt_token_ids: bool = True  # completions accept a list of token ids as prompt
    accepts_chat_token_ids: bool = (
        False  # a chat accepts token ids in the place of its messages, as `prompt_token_ids`
    )
    rejects_unknown_models: bool = (
        True  # an unknown model name is an error; False: any name is served
    )
    max_idle_s: float = 4.0  # reuse no connection that was idle for longer: most of these servers close it after 5 s
    cache_reset_path: str = (
        ""  # POST to this path empties the prefix cache; "": there is no such request
    )
    cache_reset_hint: str = ""  # what to do where that is refused
    profiler: str = ""  # what it needs so that /start_profile answers; "": it has none
    # its own account of a request
    timing_request_headers: tuple[tuple[str, str], ...] = ()  # ask for it
    timing_request_fields: dict[
        str, Any
    ] = {}  # the same as fields of the body; neither: it gives one unasked, or not at all
    reports_timing_in_streams: bool = (
        True  # False: a stream that asks for it is refused, only whole answers have it
    )
    timing_parsers: dict[str, TimingParser] = {}  # name of a form in a response -> its parser
    timing_records_path: str = (
        ""  # a page of accounts, which each read empties, of a server whose answers have none
    )
    # what it says of itself
    info_path: str = (
        ""  # a page beside /version and the list of models: its version, engine and precision
    )
    version_field: str = ""  # of a JSON page, where /version says nothing
    engine_pattern: str = ""  # whose first group is the engine behind it, anywhere in the page
    # its metrics
    metrics_paths: tuple[
        str, ...
    ] = ()  # relative to the server's prefix; the first that answers is used
    consumed_metrics_path: str = (
        ""  # a page of metrics that each read empties: read only if the user asks for it
    )
    energy_path: str = ""
    metrics_prefix: str = ""  # of the names of its metrics
    metrics: dict[str, tuple[str, ...]] = {}  # quantity of METRICS -> its names here
    # for docs/servers.md
    response_to_unknown_field: str = ""  # what a body with one gets
    response_to_unknown_model: str = ""
    cached_tokens_reported: str = ""  # when usage has the tokens from its cache
    timing_reported: str = "none"  # its own account of a request

    def output_limit_field_for(self, api: Api, model: str) -> str:
        """Name of the field that limits the output of `model` on `api`."""
        reasoning = (
            api == "chat"
            and self.reasoning_output_limit_field != self.output_limit_field
            and REASONING_MODEL_PATTERN.search(model)
        )
        return self.reasoning_output_limit_field if reasoning else self.output_limit_field


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
"""What is known of a server by its metrics. Shares are from 0 to 1; tokens, cache, requests, drafts and `preempted`
count; of `paused` and `replicas` there are so many now."""

_EXACT = ("ignore_eos", "min_tokens")
_COMPLETION = "max_completion_tokens"
_QUIET = (("include_usage", True), ("include_obfuscation", False))  # else random padding
_ITERATION = "trtllm_iteration:"  # prefix for the names of TensorRT-LLM's JSON statistics

_ROWS = (
    ServerProfile(  # the header has no effect unless the server runs with return_perf_metrics: true
        name="trtllm",
        title="TensorRT-LLM trtllm-serve",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"tensorrt_llm"'),
            DetectionRule(
                "openapi",
                r'"/(?:_internal/tokenize|energy_metrics|steady_clock_offset|kv_cache_events|cluster_info)"',
            ),
        ),
        length_fields=_EXACT,
        continuous_usage=True,
        rejects_unknown_models=False,
        accepts_chat_token_ids=True,
        cache_reset_path="/reset_prefix_cache",
        cache_reset_hint="only some versions of trtllm-serve have it (NVIDIA/TensorRT-LLM#14970, #15313): else restart it",
        profiler="a release that has these (1.3)",
        timing_request_headers=(("X-TRTLLM-return-metrics", "1"),),
        timing_parsers={
            "trtllm.perf_metrics": server_timing.parse_trtllm,
            "server-timing": server_timing.parse_trtllm,
            "speculative_decoding": server_timing.parse_trtllm_drafts,
        },
        timing_records_path="/perf_metrics",
        info_path="/prometheus/metrics",
        engine_pattern=r'engine_type="([^"\n]{1,60})"',
        metrics_paths=(
            "/prometheus/metrics",
        ),  # never /metrics: that is JSON there, and every read empties it
        consumed_metrics_path="/metrics",
        energy_path="/energy_metrics",
        metrics_prefix="trtllm_",
        metrics={
            "running": ("trtllm_num_requests_running", f"{_ITERATION}numActiveRequests"),
            "waiting": ("trtllm_num_requests_waiting", f"{_ITERATION}numQueuedRequests"),
            "kv_use": ("trtllm_kv_cache_utilization", f"{_ITERATION}kvCacheStats.usedShare"),
            "hit_share": ("trtllm_kv_cache_hit_rate", f"{_ITERATION}kvCacheStats.cacheHitRate"),
            "output_tokens": ("trtllm_generation_tokens_total",),
            "input_tokens": ("trtllm_prompt_tokens_total",),
            "cached_tokens": ("trtllm_prompt_cached_tokens_total",),
            "accepted_length": (f"{_ITERATION}specDecodingStats.acceptanceLength",),
            "requests_ok": ("trtllm_request_success_total",),
            "paused": (f"{_ITERATION}inflightBatchingStats.numPausedRequests",),
        },
        response_to_unknown_field="400",
        response_to_unknown_model="served",
        cached_tokens_reported="always",
        timing_reported="event after `[DONE]`, `server-timing` header, when asked",
    ),
    ServerProfile(  # the field has no effect unless the server runs with --enable-per-request-metrics
        name="vllm",
        title="vLLM",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"vllm"'),
            DetectionRule("openapi", r'"/v1/score"|"/tokenizer_info"|vLLM', rank=2),
        ),
        length_fields=_EXACT,
        continuous_usage=True,
        cache_reset_path="/reset_prefix_cache",
        cache_reset_hint="start it with VLLM_SERVER_DEV_MODE=1; requests in flight keep their blocks",
        profiler="start it with VLLM_TORCH_PROFILER_DIR or --profiler-config",
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
    ServerProfile(  # its times are in the answer only where the server runs with --enable-metrics
        name="sglang",
        title="SGLang",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"sglang"'),
            DetectionRule("openapi", r'"/(?:flush_cache|get_model_info|get_server_info)"'),
        ),
        length_fields=_EXACT,
        continuous_usage=True,
        rejects_unknown_models=False,
        cache_reset_path="/flush_cache",
        cache_reset_hint="it flushes only while no request runs or waits",
        profiler="start it with SGLANG_TORCH_PROFILER_DIR",
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
        timing_reported="`meta_info` of whole answers, when asked",
    ),
    ServerProfile(
        name="dynamo",
        title="NVIDIA Dynamo",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"nvidia"[^}]*"context_window"'),
            DetectionRule("health", r"dyn://"),
        ),
        length_fields=_EXACT,
        continuous_usage=True,
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
        cached_tokens_reported="where the engine tells",
        timing_reported="`nvext.timing`, when asked",
    ),
    ServerProfile(  # it has no min_tokens
        name="llamacpp",
        title="llama.cpp llama-server",
        detection_rules=(
            DetectionRule("models", r'"owned_by"\s*:\s*"llamacpp"'),
            DetectionRule("head", r"(?m)^server: llama\.cpp"),
            DetectionRule("props", r'"default_generation_settings"'),
        ),
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
        stream_options=_QUIET,
        reasoning_output_limit_field=_COMPLETION,
        response_to_unknown_field="400",
        response_to_unknown_model="404",
        cached_tokens_reported="always",
        timing_reported="`openai-processing-ms`",
    ),
    ServerProfile(
        name="azure",
        title="Azure OpenAI",
        detection_rules=(DetectionRule("head", r"(?m)^(?:apim-request-id|x-ms-region):"),),
        reasoning_output_limit_field=_COMPLETION,
        response_to_unknown_field="400",
        response_to_unknown_model="404",
    ),
    ServerProfile(  # by --api messages alone: it has no field that forces a length
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
    ServerProfile(  # usually a gateway: the server behind it decides what a field does
        name="generic",
        title="an OpenAI-compatible server of unknown make",
        detection_rules=(DetectionRule("head", r"(?m)^x-litellm-", rank=0),),
        reasoning_output_limit_field=_COMPLETION,
        metrics_paths=("/prometheus/metrics", "/metrics"),
        response_to_unknown_field="passed on",
        metrics={  # the inference extension of the Gateway API and llm-d, vLLM's production stack, SGLang's router
            "replicas": (
                "inference_pool_ready_pods",
                "vllm:healthy_pods_total",
                "sgl_router_active_workers",
                "kube_deployment_status_replicas_available",
            ),
        },
    ),
)

SERVERS: OpenTable[ServerProfile] = OpenTable("loadgen_sdk.servers", ServerProfile, lambda: _ROWS)

SERVER_PROFILES: dict[str, ServerProfile] = {row.name: row for row in SERVERS.own}
"""Our rows by server name. `auto` falls back to `generic`, which sends only the common fields."""


def find_server_profile(server: str) -> ServerProfile:
    """The row of a server. Raises KeyError where there is none, WrongUse for a plug-in that failed."""
    if (row := SERVERS.find(server)) is None:
        raise KeyError(server)
    return row


def server_names() -> tuple[str, ...]:
    """The values for `--server`, with those of plug-ins."""
    return ("auto", *SERVER_PROFILES, *(name for (name,) in SERVERS.cached_fields("name")))
