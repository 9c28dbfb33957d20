"""The definitions of metrics of each benchmark tool, as a table that the code computes with.

Pure. `loadgen.formats` has the same definitions in words. `tool_samples` computes the latencies of
a run by them, and `loadgen explain` replaces the definitions of loadgen by those of a tool, one
after the other. Another tool is one more row of TOOL_DEFINITIONS.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Timestamp = Literal["due_ns", "sent_ns", "first_token_ns", "role_event", "last_token_ns", "end_ns"]
"""A timestamp of a request.

`role_event` is the first event of a response, which carries only a role in chat. It is the first
token in other APIs, and in responses without such an event.
"""

TokenDivisor = Literal["all_tokens", "tokens_after_first", "tokens_after_first_event"]
"""The output tokens of a request that a latency per token is divided by.

An event may carry several tokens. `tokens_after_first_event` leaves out all tokens of the first
event, and tokens that the server counts but does not stream.
"""

SampleUnit = Literal["request", "token", "gap"]
"""What has one value in a sample.

`request`: each request has one value. `token`: the value of a request counts once for each token of
the divisor. `gap`: each time between two output events has one value, of all requests together.
"""

PercentileRule = Literal["interpolated", "element"]
"""Whether percentiles are interpolated between values, as in numpy, or are values of the sample."""

RateWindow = Literal["sent_requests", "successful_requests"]
"""The time by which a tool divides counts to get rates: from the first request sent to the end of
the last one, of all requests or only of successful ones."""

LatencyName = Literal["ttft", "tpot", "itl", "inter_chunk", "e2e"]
"""What a latency is called in reports. Tools use the same name for different times."""


class LatencyDefinition(NamedTuple):
    """How a latency is computed from a request.

    Attributes:
        start: The timestamp at which the time begins.
        end: The timestamp at which it ends.
        divisor: The tokens that the time is divided by. None if it is not divided.
        unit: What has one value in the sample.
    """

    start: Timestamp
    end: Timestamp
    divisor: TokenDivisor | None = None
    unit: SampleUnit = "request"

    @property
    def has_value_per_gap(self) -> bool:
        """Whether each time between two output events is a value of its own."""
        return self.unit == "gap"

    @property
    def is_weighted_by_tokens(self) -> bool:
        """Whether the value of a request counts once for each of its tokens."""
        return self.unit == "token"

    @property
    def is_per_token(self) -> bool:
        """Whether the latency is a time per token, so that it depends on token counts."""
        return self.divisor is not None or self.has_value_per_gap

    @property
    def ends_with_response(self) -> bool:
        """Whether the time ends with the last token or later, so it includes the generation."""
        return self.end in ("last_token_ns", "end_ns")


class ToolLatency(NamedTuple):
    """A latency that a tool reports.

    Attributes:
        name: Its name in the tool.
        metric: The metric in `ForeignResult.metrics` that has its statistics.
        definition: How the tool computes it.
    """

    name: LatencyName
    metric: str
    definition: LatencyDefinition


class FactPaths(NamedTuple):
    """Where the file of a tool says what it measured. "" for what the file does not say.

    Attributes:
        concurrency: The path of the largest number of requests in flight of a closed loop.
        rate_per_s: The path of the request rate.
        requests: The path of the number of requests that the load was to send.
        output_tokens: The path of the requested number of output tokens of a request.
        warm_up: The path of a value that is 0 or false if the tool sent no warm-up.
        client_send_ms: The path of the statistics of the time that the client needed to send a
            request, in ms, which the tool's latencies contain.
        time_after_send_ms: The path of the statistics of the TTFT without that time, in ms.
    """

    concurrency: str = ""
    rate_per_s: str = ""
    requests: str = ""
    output_tokens: str = ""
    warm_up: str = ""
    client_send_ms: str = ""
    time_after_send_ms: str = ""


class ToolDefinitions(NamedTuple):
    """How one tool defines its metrics.

    Attributes:
        tool: The name of the tool in `loadgen.formats`.
        version: The version whose source was read.
        source: Where the definitions were read, in the repository of the tool.
        latencies: The latencies that it reports.
        percentiles: How it computes percentiles.
        rate_window: The time by which it divides counts.
        counts_failed_requests: Whether its request rate counts failed requests.
        starts_at_once: Whether all virtual users of its closed loop start at the same time.
        splits_chunks: Whether its ITL has one value per token that its own tokenizer finds in a
            chunk, so that further tokens of the same chunk have a time of 0.
        signed_latencies: The metrics that it may report as negative, because it takes the end of a
            response and its first token from different clocks or threads.
        facts: Where its file says what it measured.
    """

    tool: str
    version: str
    source: str
    latencies: tuple[ToolLatency, ...]
    percentiles: PercentileRule = "interpolated"
    rate_window: RateWindow = "sent_requests"
    counts_failed_requests: bool = False
    starts_at_once: bool = True
    splits_chunks: bool = False
    signed_latencies: tuple[str, ...] = ()
    facts: FactPaths = FactPaths()

    def find_latency(self, name: LatencyName) -> ToolLatency | None:
        """Return the latency that the tool calls by this name, or None if it has none."""
        return next((latency for latency in self.latencies if latency.name == name), None)


OWN_LATENCIES: dict[LatencyName, LatencyDefinition] = {
    "ttft": LatencyDefinition("due_ns", "first_token_ns"),
    "tpot": LatencyDefinition("first_token_ns", "last_token_ns", "tokens_after_first_event"),
    "itl": LatencyDefinition("first_token_ns", "last_token_ns", unit="gap"),
    "inter_chunk": LatencyDefinition("first_token_ns", "last_token_ns", unit="gap"),
    "e2e": LatencyDefinition("due_ns", "end_ns"),
}
"""The definitions of loadgen, from docs/reference/metrics.md."""

OWN_PERCENTILES: PercentileRule = "element"

# Most tools have these definitions.
_TTFT = LatencyDefinition("sent_ns", "first_token_ns")
_TPOT = LatencyDefinition("first_token_ns", "end_ns", "tokens_after_first")
_TPOT_TO_LAST_TOKEN = LatencyDefinition("first_token_ns", "last_token_ns", "tokens_after_first")
_GAPS = LatencyDefinition("first_token_ns", "last_token_ns", unit="gap")
_E2E = LatencyDefinition("sent_ns", "end_ns")

TOOL_DEFINITIONS: tuple[ToolDefinitions, ...] = (
    ToolDefinitions(
        tool="vllm bench serve",
        version="0.32.0",
        source="vllm/benchmarks/serve.py, vllm/benchmarks/lib/endpoint_request_func.py",
        latencies=(
            # The first event is taken for the first token, even if it has only a role and no text.
            ToolLatency("ttft", "ttft_ms", LatencyDefinition("sent_ns", "role_event")),
            ToolLatency(
                "tpot", "tpot_ms", LatencyDefinition("role_event", "end_ns", "tokens_after_first")
            ),
            ToolLatency(
                "itl",
                "inter_chunk_ms",
                LatencyDefinition("role_event", "last_token_ns", unit="gap"),
            ),
            ToolLatency("e2e", "e2e_ms", _E2E),
        ),
        facts=FactPaths(
            concurrency="max_concurrency", rate_per_s="request_rate", requests="num_prompts"
        ),
    ),
    ToolDefinitions(
        tool="SGLang bench_serving",
        version="0.5.23",
        source="python/sglang/bench_serving.py",
        latencies=(
            ToolLatency("ttft", "ttft_ms", _TTFT),
            ToolLatency("tpot", "tpot_ms", _TPOT),
            ToolLatency("itl", "inter_chunk_ms", _GAPS),
            ToolLatency("e2e", "e2e_ms", _E2E),
        ),
        facts=FactPaths(
            concurrency="max_concurrency",
            rate_per_s="request_rate",
            output_tokens="random_output_len",
        ),
    ),
    ToolDefinitions(
        tool="AIPerf",
        version="0.13.0",
        source="src/aiperf/metrics/types/*.py",
        latencies=(
            ToolLatency("ttft", "ttft_ms", _TTFT),
            # AIPerf's ITL is one mean per request, which other tools call TPOT.
            ToolLatency("itl", "tpot_ms", _TPOT),
            ToolLatency("inter_chunk", "inter_chunk_ms", _GAPS),
            ToolLatency("e2e", "e2e_ms", _E2E),
        ),
        rate_window="successful_requests",
        facts=FactPaths(
            concurrency="input_config.phases.-1.concurrency",
            rate_per_s="input_config.phases.-1.rate",
            requests="input_config.phases.-1.requests",
            output_tokens="input_config.datasets.0.prompts.osl.mean",
            client_send_ms="http_req_sending",
            time_after_send_ms="http_req_waiting",
        ),
    ),
    ToolDefinitions(
        tool="GuideLLM",
        version="0.8.1",
        source="guidellm/schemas/base/request_stats.py, guidellm/benchmark/schemas/metrics.py",
        latencies=(
            ToolLatency("ttft", "ttft_ms", _TTFT),
            # Its TPOT begins when the request is sent, so its divisor includes the first token.
            ToolLatency(
                "tpot",
                "tpot_with_first_ms",
                LatencyDefinition("sent_ns", "last_token_ns", "all_tokens", "token"),
            ),
            # Its ITL is one mean per request, weighted by the tokens of the request.
            ToolLatency("itl", "tpot_ms", _TPOT_TO_LAST_TOKEN._replace(unit="token")),
            ToolLatency("e2e", "e2e_ms", _E2E),
        ),
        facts=FactPaths(
            concurrency="benchmarks.-1.config.strategy.streams",
            rate_per_s="benchmarks.-1.config.strategy.rate",
            requests="benchmarks.-1.config.constraints.max_requests.args.count",
            output_tokens="config.spec.data.0.output_tokens",
            warm_up="benchmarks.-1.warmup_duration",
        ),
    ),
    ToolDefinitions(
        tool="inference-perf",
        version="0.7.0",
        source="inference_perf/reportgen/base.py",
        splits_chunks=True,
        latencies=(
            ToolLatency("ttft", "ttft_ms", _TTFT),
            # Its TPOT ends at the last token, not at the end of the response.
            ToolLatency("tpot", "tpot_ms", _TPOT_TO_LAST_TOKEN),
            ToolLatency("itl", "inter_chunk_ms", _GAPS),
            ToolLatency("e2e", "e2e_ms", _E2E),
        ),
        facts=FactPaths(
            rate_per_s="load_summary.requested_rate",
            requests="load_summary.count",
        ),
    ),
    ToolDefinitions(
        tool="genai-bench",
        version="0.0.5",
        source="genai_bench/metrics/request_metrics_collector.py",
        latencies=(
            ToolLatency("ttft", "ttft_ms", _TTFT),
            ToolLatency("tpot", "tpot_ms", _TPOT),
            ToolLatency("e2e", "e2e_ms", _E2E),
        ),
        facts=FactPaths(
            concurrency="aggregated_metrics.num_concurrency",
            requests="aggregated_metrics.num_requests",
        ),
    ),
    ToolDefinitions(
        tool="mlcommons/endpoints",
        version="August 2026",
        source="src/inference_endpoint/metrics/report.py",
        latencies=(
            ToolLatency("ttft", "ttft_ms", _TTFT),
            ToolLatency("tpot", "tpot_ms", _TPOT),
            ToolLatency("e2e", "e2e_ms", _E2E),
        ),
        percentiles="element",
        counts_failed_requests=True,
        signed_latencies=("tpot_ms",),
        facts=FactPaths(
            concurrency="run_config.load_pattern.target_concurrency",
            rate_per_s="run_config.load_pattern.target_qps",
            requests="n_samples_issued",
            warm_up="run_config.warmup.enabled",
        ),
    ),
)
"""The tools whose results can be explained. All of them leave failed requests out of latencies."""


def find_tool_definitions(tool: str) -> ToolDefinitions | None:
    """Return the definitions of a tool by its name in `loadgen.formats`, or None."""
    return next((row for row in TOOL_DEFINITIONS if row.tool == tool), None)
