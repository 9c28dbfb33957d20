"""Check what the result files of other tools contain that were run here, in results/rivals.

Only files count, not what a tool says of itself. See docs/evidence/rivals.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from feature_bench import stored


class Tool(NamedTuple):
    """A tool that was run, with the pattern of its file names in results/rivals."""

    name: str
    version: str
    seen: str
    files: str


class Seen(NamedTuple):
    """One row: whether the result files of each tool contain something.

    `check` gets a function that returns a file by its name: `quiet`, `refusals` or `starved`.
    """

    name: str
    check: Callable[[Callable[[str], Any]], bool]


TOOLS = (
    Tool("`vllm bench serve`", "0.32.0", "2026-11-23", "vllm-{}.json"),
    Tool("AIPerf", "0.13.0", "2026-11-23", "aiperf-{}.json"),
    Tool("SGLang `bench_serving`", "0.5.23", "2026-11-23", "sglang-{}.jsonl"),
)


def itl_ms(result: Any) -> float:
    """Return the median gap between tokens according to the file."""
    return float(result.get("median_itl_ms") or result["inter_chunk_latency"]["p50"])


SEEN = (
    Seen(
        "The number of failed requests",
        lambda of: any(name in of("refusals") for name in ("failed", "error_request_count")),
    ),
    Seen(
        "The number of failures of each kind", lambda of: bool(of("refusals").get("error_summary"))
    ),
    Seen(
        "Other percentiles of TTFT than p50 and p99, without an option for them",
        lambda of: (
            "p90_ttft_ms" in of("quiet") or "p90" in of("quiet").get("time_to_first_token", {})
        ),
    ),
    Seen(
        "The DNS time, separate from the connect time",
        lambda of: "http_req_dns_lookup" in of("quiet"),
    ),
    Seen(
        "The time that requests waited in the client",
        lambda of: any(name in of("quiet") for name in ("queue_times", "credit_to_start_latency")),
    ),
    Seen(
        "The largest number of requests in flight",
        lambda of: "max_concurrent_requests" in of("quiet"),
    ),
    Seen(
        "The error messages of failed requests",
        lambda of: any(
            error_line["error_details"].get("message")
            for error_line in of("refusals").get("error_summary", ())
        ),
    ),
    Seen(
        "The true ITL of 10.0 ms, within 2 %, while the client is stopped a quarter of the time",
        lambda of: abs(itl_ms(of("starved")) / 10.0 - 1) < 0.02,
    ),
)


def verdicts(row: Seen) -> list[str]:
    """`yes` or `no` of each of TOOLS."""
    return [
        "yes" if row.check(lambda name, tool=tool: stored(tool.files.format(name))) else "no"
        for tool in TOOLS
    ]  # type: ignore[misc]
