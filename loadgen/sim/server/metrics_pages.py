"""Metrics of the simulated trtllm-serve: iteration statistics, Prometheus text, request timings.

Names and formats are those of TensorRT-LLM's metrics collector and performance records. Values that
are not modelled are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from loadgen.sim.engine.fleet import Fleet, Iteration
from loadgen.sim.engine.latency_model import LatencyModel
from loadgen.sim.server.server_timing import RequestTiming
from loadgen.sim.server.speculation_counters import SpeculationCounters
from loadgen.sim.server.wire_format import ParsedRequest

MAX_RECORDS = 10_000  # request records kept until they are read

_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
_TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LATENCY_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_HISTOGRAM_BUCKETS_S: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _TTFT_BUCKETS_S,
    "time_per_output_token_seconds": _TPOT_BUCKETS_S,
    "e2e_request_latency_seconds": _LATENCY_BUCKETS_S,
    "request_queue_time_seconds": _LATENCY_BUCKETS_S,
    "request_prefill_time_seconds": _LATENCY_BUCKETS_S,
    "request_decode_time_seconds": _LATENCY_BUCKETS_S,
}


def build_iteration_stats(iteration: Iteration, fleet: Fleet) -> dict[str, Any]:
    """Return one iteration as a row of the page `GET /metrics`.

    The names and units are those of TensorRT-LLM's iteration statistics. It calls the prefill of a
    request its context phase (`Context`, `Ctx`), and the decoding its generation phase (`Gen`).
    """
    limits = fleet.limits
    scheduled_requests = iteration.context_requests + iteration.decoding_count
    return {
        "iter": iteration.iteration_index,
        "iterLatencyMS": iteration.duration_ns / 1e6,
        "numActiveRequests": iteration.active_count,
        "numQueuedRequests": iteration.queued_count,
        "numCompletedRequests": iteration.completed_count,
        "maxNumActiveRequests": limits.max_batch_size,
        "kvCacheStats": {
            "maxNumBlocks": limits.kv_blocks,
            "freeNumBlocks": limits.kv_blocks - iteration.used_block_count,
            "usedNumBlocks": iteration.used_block_count,
            "tokensPerBlock": limits.tokens_per_block,
            "cacheHitRate": fleet.cache_hit_rate,
            "reusedBlocks": iteration.cache_hits,
            "missedBlocks": iteration.cache_misses,
        },
        "inflightBatchingStats": {
            "numContextRequests": iteration.context_requests,
            "numGenRequests": iteration.decoding_count,
            "numPausedRequests": iteration.paused_count,
            "numScheduledRequests": scheduled_requests,
            "numCtxTokens": iteration.context_tokens,
            "avgNumDecodedTokensPerIter": 1.0,
        },
    }


def build_stats_without_engine(
    iteration: int, active: int, queued: int, completed: int
) -> dict[str, Any]:
    """Return a row of the page `GET /metrics` for an engine that has no iterations.

    The number of events since the start stands for the number of the iteration. All active requests
    are taken to be in the generation phase.
    """
    return {
        "iter": iteration,
        "numActiveRequests": active,
        "numQueuedRequests": queued,
        "numCompletedRequests": completed,
        "inflightBatchingStats": {
            "numContextRequests": 0,
            "numGenRequests": active,
            "numPausedRequests": 0,
            "numScheduledRequests": active,
            "avgNumDecodedTokensPerIter": 1.0,
        },
    }


class _Histogram:
    """Counts values in the buckets of a Prometheus histogram."""

    def __init__(self, upper_bounds: tuple[float, ...]) -> None:
        self._upper_bounds = upper_bounds
        self._counts = [0] * (len(upper_bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._upper_bounds, value)] += 1
        self._sum += value

    def format_lines(self, name: str, labels: str) -> list[str]:
        """Return the histogram as lines of the Prometheus text format.

        Buckets are cumulative in this format: each one has the number of values up to its upper
        bound (`le`). The last bound is infinite.
        """
        lines = [f"# TYPE {name} histogram"]
        bounds = [*(f"{bound:g}" for bound in self._upper_bounds), "+Inf"]

        cumulative_count = 0
        for bound, count in zip(bounds, self._counts, strict=True):
            cumulative_count += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {cumulative_count}')

        lines.append(f"{name}_sum{{{labels}}} {self._sum:.10g}")
        lines.append(f"{name}_count{{{labels}}} {cumulative_count}")
        return lines


def _format_labels(**values: object) -> str:
    """Return labels in the Prometheus text format, such as `model_name="sim",http_code="429"`."""
    return ",".join(f'{name}="{value}"' for name, value in values.items())


class _PrometheusText:
    """Collects the lines of a page in the Prometheus text format.

    All metrics have the prefix of TensorRT-LLM and the same first labels.
    """

    def __init__(self, labels: str) -> None:
        self.labels = labels
        self.lines: list[str] = []

    def add_metric(self, name: str, kind: str, value: float, extra_labels: str = "") -> None:
        """Add a metric with one value. `kind` is "gauge" or "counter"."""
        self._add_type(name, kind)
        self._add_value(name, value, extra_labels)

    def add_labeled_metric(
        self, name: str, kind: str, label: str, values: Mapping[Any, float]
    ) -> None:
        """Add a metric with one value for each value of a label."""
        self._add_type(name, kind)
        for label_value, value in values.items():
            self._add_value(name, value, _format_labels(**{label: label_value}))

    def add_histogram(self, name: str, histogram: _Histogram) -> None:
        """Add a histogram, with one line per bucket."""
        self.lines += histogram.format_lines(f"trtllm_{name}", self.labels)

    def _add_type(self, name: str, kind: str) -> None:
        self.lines.append(f"# TYPE trtllm_{name} {kind}")

    def _add_value(self, name: str, value: float, extra_labels: str) -> None:
        labels = f"{self.labels},{extra_labels}" if extra_labels else self.labels
        self.lines.append(f"trtllm_{name}{{{labels}}} {value:.10g}")


class ServerMetrics:
    """Counts finished requests for the Prometheus page, and keeps records for `/perf_metrics`."""

    def __init__(self, speculation: SpeculationCounters | None = None) -> None:
        """Create metrics without requests.

        Args:
            speculation: Counts the drafts of speculative decoding, None for a server without it.
        """
        self._speculation = speculation
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._finish_reasons = Counter[str]()
        self._error_statuses = Counter[int]()
        self._histograms = {
            name: _Histogram(bounds) for name, bounds in _HISTOGRAM_BUCKETS_S.items()
        }

    def add_finished(
        self, request_number: int, request: ParsedRequest, timing: RequestTiming
    ) -> None:
        """Count a request whose response is complete.

        Its timings are added to the histograms of the Prometheus page, and stored as a record for
        the page `/perf_metrics`.
        """
        self._prompt_tokens += request.input_tokens
        self._cached_tokens += request.cached_tokens
        self._generated_tokens += request.output_tokens
        self._finish_reasons[request.finish_reason] += 1
        if self._speculation is not None:
            self._speculation.add_response(request.output_tokens)

        for name, seconds in _compute_durations_s(request.output_tokens, timing).items():
            self._histograms[name].add(seconds)

        timing_metrics = {
            "arrival_time": timing.arrival_ns / 1e9,
            "first_scheduled_time": (timing.arrival_ns + timing.queue_ns) / 1e9,
            "first_token_time": timing.first_token_ns / 1e9,
            "last_token_time": timing.done_ns / 1e9,
        }
        record = {"request_id": request_number, "perf_metrics": {"timing_metrics": timing_metrics}}
        self._records.append(record)

    def add_error(self, status: int) -> None:
        """Count a request that has been refused with this status."""
        self._error_statuses[status] += 1

    def take_records(self) -> list[dict[str, Any]]:
        """Return and remove the records, as `GET /perf_metrics` of older versions does."""
        records = list(self._records)
        self._records.clear()
        return records

    def prometheus_text(
        self, engine: LatencyModel | Fleet, model: str, weights: str = "", kv_cache: str = ""
    ) -> str:
        """Return the text of the page `GET /prometheus/metrics`.

        Args:
            engine: The engine, whose current state is added as gauges.
            model: The name of the served model.
            weights: The precision of the weights of a preset's model, "" without a preset.
            kv_cache: The precision of its key-value cache.
        """
        text = _PrometheusText(_format_labels(model_name=model, engine_type="simulated"))
        if isinstance(engine, Fleet) and engine.reports_serving_replicas:
            text.lines += _format_gateway_lines(engine.serving_count)

        if weights:
            precisions = _format_labels(quantization=weights, kv_cache_dtype=kv_cache)
            text.add_metric("model_config_info", "gauge", 1, precisions)

        for name, value in _read_gauges(engine).items():
            text.add_metric(name, "gauge", value)

        self._add_request_metrics(text)
        if self._speculation is not None:
            text.lines += self._speculation.format_lines(text.labels)
        return "\n".join(text.lines) + "\n"

    def _add_request_metrics(self, text: _PrometheusText) -> None:
        """Add what was counted and measured of the finished requests to the Prometheus page."""
        text.add_metric("prompt_tokens_total", "counter", self._prompt_tokens)
        text.add_metric("prompt_cached_tokens_total", "counter", self._cached_tokens)
        text.add_metric("generation_tokens_total", "counter", self._generated_tokens)
        text.add_labeled_metric(
            "request_success_total", "counter", "finished_reason", self._finish_reasons
        )
        text.add_labeled_metric("request_error_total", "counter", "http_code", self._error_statuses)

        for name, histogram in self._histograms.items():
            text.add_histogram(name, histogram)


def _compute_durations_s(output_tokens: int, timing: RequestTiming) -> dict[str, float]:
    """Return the durations of a finished request in seconds, by the names of their histograms.

    The time per output token is the mean time between the first and the last token, so a request
    with one token has none.
    """
    admitted_ns = timing.arrival_ns + timing.queue_ns
    decode_s = (timing.done_ns - timing.first_token_ns) / 1e9

    durations_s = {
        "time_to_first_token_seconds": (timing.first_token_ns - timing.arrival_ns) / 1e9,
        "e2e_request_latency_seconds": (timing.done_ns - timing.arrival_ns) / 1e9,
        "request_queue_time_seconds": timing.queue_ns / 1e9,
        "request_prefill_time_seconds": (timing.first_token_ns - admitted_ns) / 1e9,
        "request_decode_time_seconds": decode_s,
    }
    if output_tokens > 1:
        durations_s["time_per_output_token_seconds"] = decode_s / (output_tokens - 1)

    return durations_s


def _read_gauges(engine: LatencyModel | Fleet) -> dict[str, float]:
    """Return the current state of the engine, by the names of its Prometheus gauges.

    Only a physical engine (a fleet) has a cache and iterations. Every engine knows how many
    requests are running and waiting.
    """
    gauges: dict[str, float] = {
        "num_requests_running": engine.active_count,
        "num_requests_waiting": engine.queued_count,
    }
    if not isinstance(engine, Fleet):
        return gauges

    gauges["kv_cache_utilization"] = engine.cache_utilization
    gauges["kv_cache_hit_rate"] = engine.cache_hit_rate

    gauges["max_batch_size_runtime"] = engine.limits.max_batch_size
    if engine.iterations:
        last = engine.iterations[-1]
        gauges["num_context_requests"] = last.context_requests
        gauges["num_generation_requests"] = last.decoding_count
        gauges["iteration_latency_seconds"] = last.duration_ns / 1e9
        gauges["avg_decoded_tokens_per_iter"] = 1.0

    return gauges


def _format_gateway_lines(serving_replicas: int) -> list[str]:
    """Return the number of serving replicas as an inference gateway reports it."""
    return [
        "# TYPE inference_pool_ready_pods gauge",
        f"inference_pool_ready_pods {serving_replicas}",
    ]
