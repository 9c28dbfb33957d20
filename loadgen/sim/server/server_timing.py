"""The server's own timing breakdown of a request, in the forms that inference servers report it."""

from __future__ import annotations

import msgspec

NS_PER_MS = 1e6
NS_PER_S = 1e9


class RequestTiming(msgspec.Struct, frozen=True, gc=False):
    """When a request passed each stage on the server. Times are on its monotonic clock."""

    queue_ns: int  # duration from arrival to admission
    arrival_ns: int
    first_token_ns: int
    done_ns: int


def build_trtllm_timing_headers(timing: RequestTiming) -> dict[str, str]:
    """Return the headers with which trtllm-serve reports the timing of a request.

    It sends them if the request has the header `X-TRTLLM-return-metrics: 1`. `Server-Timing` has
    durations in ms, and `X-TRTLLM-Start-End-Time` has times in s.
    """
    queue_ms = timing.queue_ns / NS_PER_MS
    ttft_ms = (timing.first_token_ns - timing.arrival_ns) / NS_PER_MS
    e2e_ms = (timing.done_ns - timing.arrival_ns) / NS_PER_MS
    start_s = timing.arrival_ns / NS_PER_S
    end_s = timing.done_ns / NS_PER_S

    return {
        "Server-Timing": (
            f"server_queue;dur={queue_ms:.6f}, server_ttft;dur={ttft_ms:.6f},"
            f" server_e2e;dur={e2e_ms:.6f}"
        ),
        "X-TRTLLM-Start-End-Time": (f"server-start;ts={start_s:.6f}, server-end;ts={end_s:.6f}"),
    }


def format_trtllm_timing_event(timing: RequestTiming) -> bytes:
    """Return the same headers as the named event that ends a stream of trtllm-serve."""
    headers = msgspec.json.encode(build_trtllm_timing_headers(timing))
    return b"event: trtllm.perf_metrics\ndata: " + headers + b"\n\n"


def build_vllm_metrics(timing: RequestTiming) -> dict[str, float]:
    """Return the timing in the form of vLLM's field `metrics`, in ms.

    In vLLM, the time to first token does not include the time in the queue.
    """
    ttft_ns = timing.first_token_ns - timing.arrival_ns - timing.queue_ns
    return {
        "queue_time_ms": timing.queue_ns / NS_PER_MS,
        "time_to_first_token_ms": ttft_ns / NS_PER_MS,
        "generation_time_ms": (timing.done_ns - timing.first_token_ns) / NS_PER_MS,
    }


def build_sglang_meta_info(timing: RequestTiming) -> dict[str, float]:
    """Return the timing in the form of SGLang's field `meta_info`.

    Durations and times (`..._ts`) are in seconds.
    """
    return {
        "request_sent_to_scheduler_ts": timing.arrival_ns / NS_PER_S,
        "queue_time": timing.queue_ns / NS_PER_S,
        "prefill_finished_ts": timing.first_token_ns / NS_PER_S,
        "decode_finished_ts": timing.done_ns / NS_PER_S,
        "e2e_latency": (timing.done_ns - timing.arrival_ns) / NS_PER_S,
    }
