"""Metrics of the simulated trtllm-serve: iteration statistics, Prometheus text, timings of requests. Pure.

Names and formats are those of TensorRT-LLM's metrics collector and performance records. Values that are not modelled
are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from loadgen.sim.engine.fleet import Fleet, Iteration
from loadgen.sim.engine.latency_model import LatencyModel

KEPT = 10_000  # request records kept until they are read

_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_BUCKETS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": (
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        10,
    ),
    "time_per_output_token_seconds": (
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1,
        2.5,
    ),
    "e2e_request_latency_seconds": _SECONDS,
    "request_queue_time_seconds": _SECONDS,
    "request_prefill_time_seconds": _SECONDS,
    "request_decode_time_seconds": _SECONDS,
}


def iteration_stats(iteration: Iteration, fleet: Fleet) -> dict[str, Any]:
    """One row of the JSON at `GET /metrics`, which each read empties."""
    limits = fleet.limits
    return {
        "iter": iteration.number,
        "iterLatencyMS": iteration.length_ns / 1e6,
        "numActiveRequests": iteration.active,
        "numQueuedRequests": iteration.queued,
        "numCompletedRequests": iteration.completed,
        "maxNumActiveRequests": limits.max_batch_size,
        "kvCacheStats": {
            "maxNumBlocks": limits.kv_blocks,
            "freeNumBlocks": limits.kv_blocks - iteration.blocks_used,
            "usedNumBlocks": iteration.blocks_used,
            "tokensPerBlock": limits.tokens_per_block,
            "cacheHitRate": fleet.hit_share,
            "reusedBlocks": iteration.blocks_hit,
            "missedBlocks": iteration.blocks_missed,
        },
        "inflightBatchingStats": {
            "numContextRequests": iteration.context_requests,
            "numGenRequests": iteration.generating,
            "numPausedRequests": iteration.paused,
            "numScheduledRequests": iteration.context_requests + iteration.generating,
            "numCtxTokens": iteration.context_tokens,
            "avgNumDecodedTokensPerIter": 1.0,
        },
    }


class ServerMetrics:
    """Counts finished requests for the Prometheus page, and keeps their records for `/perf_metrics`."""

    def __init__(self) -> None:
        self.records: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._prompt = self._cached = self._generated = 0
        self._reasons, self._errors = Counter[str](), Counter[int]()
        self._counts = {name: [0] * (len(edges) + 1) for name, edges in _BUCKETS.items()}
        self._sums = dict.fromkeys(_BUCKETS, 0.0)

    def finished(
        self,
        number: int,
        arrival_ns: int,
        admitted_ns: int,
        first_ns: int,
        last_ns: int,
        request: Any,
    ) -> None:
        """A request has been answered. Times are on the server's clock."""
        tokens, cached = request.output_tokens, request.cached_tokens
        self._prompt += request.input_tokens
        self._cached += cached
        self._generated += tokens
        self._reasons[request.finish_reason] += 1
        values = {
            "time_to_first_token_seconds": (first_ns - arrival_ns) / 1e9,
            "e2e_request_latency_seconds": (last_ns - arrival_ns) / 1e9,
            "request_queue_time_seconds": (admitted_ns - arrival_ns) / 1e9,
            "request_prefill_time_seconds": (first_ns - admitted_ns) / 1e9,
            "request_decode_time_seconds": (last_ns - first_ns) / 1e9,
        }
        if tokens > 1:
            values["time_per_output_token_seconds"] = (last_ns - first_ns) / 1e9 / (tokens - 1)
        for name, value in values.items():
            self._counts[name][bisect_left(_BUCKETS[name], value)] += 1
            self._sums[name] += value
        timing = {
            "arrival_time": arrival_ns / 1e9,
            "first_scheduled_time": admitted_ns / 1e9,
            "first_token_time": first_ns / 1e9,
            "last_token_time": last_ns / 1e9,
        }
        self.records.append({"request_id": number, "perf_metrics": {"timing_metrics": timing}})

    def failed(self, status: int) -> None:
        """A request has been refused with this status."""
        self._errors[status] += 1

    def drain(self) -> list[dict[str, Any]]:
        """The records since the last call, as `GET /perf_metrics` of older versions returns them."""
        records = list(self.records)
        self.records.clear()
        return records

    def prometheus(
        self, engine: LatencyModel | Fleet, model: str, weights: str = "", kv_cache: str = ""
    ) -> str:
        """The text of `GET /prometheus/metrics`. `weights`, `kv_cache`: the precisions of a preset's model."""
        labels = f'model_name="{model}",engine_type="simulated"'
        gauges: dict[str, float] = {
            "num_requests_running": engine.active,
            "num_requests_waiting": engine.queued,
        }
        if isinstance(engine, Fleet):
            gauges["kv_cache_utilization"] = engine.blocks_used_share
            gauges["kv_cache_hit_rate"] = engine.hit_share
            gauges["max_batch_size_runtime"] = engine.limits.max_batch_size
            if engine.iterations:
                last = engine.iterations[-1]
                gauges["num_context_requests"] = last.context_requests
                gauges["num_generation_requests"] = last.generating
                gauges["iteration_latency_seconds"] = last.length_ns / 1e9
                gauges["avg_decoded_tokens_per_iter"] = 1.0
        counters = {
            "prompt_tokens_total": self._prompt,
            "prompt_cached_tokens_total": self._cached,
            "generation_tokens_total": self._generated,
        }
        lines: list[str] = []

        def add_metric(name: str, kind: str, values: Mapping[str, float]) -> None:
            lines.append(f"# TYPE trtllm_{name} {kind}")
            lines.extend(
                f"trtllm_{name}{{{labels}{more}}} {value:.10g}" for more, value in values.items()
            )

        if isinstance(engine, Fleet) and engine.counted:  # as a gateway before them tells it
            lines += [
                "# TYPE inference_pool_ready_pods gauge",
                f"inference_pool_ready_pods {engine.serving}",
            ]
        if weights:
            add_metric(
                "model_config_info",
                "gauge",
                {f',quantization="{weights}",kv_cache_dtype="{kv_cache}"': 1},
            )
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                add_metric(name, kind, {"": value})
        reasons = {f',finished_reason="{reason}"': count for reason, count in self._reasons.items()}
        add_metric("request_success_total", "counter", reasons)
        errors = {f',http_code="{status}"': count for status, count in self._errors.items()}
        add_metric("request_error_total", "counter", errors)
        for name, edges in _BUCKETS.items():
            lines.append(f"# TYPE trtllm_{name} histogram")
            total = 0
            for edge, count in zip((*edges, float("inf")), self._counts[name], strict=True):
                total += count
                le = "+Inf" if edge == float("inf") else f"{edge:g}"
                lines.append(f'trtllm_{name}_bucket{{{labels},le="{le}"}} {total}')
            lines.append(f"trtllm_{name}_sum{{{labels}}} {self._sums[name]:.10g}")
            lines.append(f"trtllm_{name}_count{{{labels}}} {total}")
        return "\n".join(lines) + "\n"
