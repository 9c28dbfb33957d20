"""Our times against the server's own, on a real server that reports per-request timing.

    python benchmarks/server_truth.py --url http://127.0.0.1:8080 [--server llamacpp|dynamo] [--requests 100]

Requests go one at a time, each with a prompt of its own, so that there is no queue on either side. llama-server says
`timings` in every answer: its TTFT is prompt_ms + one token's share of predicted_ms, its E2E prompt_ms + predicted_ms.
Dynamo says `nvext.timing` when asked: ttft_ms and total_time_ms from its own receipt of the request. Ours are from the
send, so the difference holds connection handling and the server's HTTP on top of its own figures.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

import uvloop
from loadgen_sdk.client import Client
from loadgen_sdk.request import Completion, Request

from loadgen import prompts, run, seeds, tokens
from loadgen.plan import Settings
from loadgen.workload import Overrides, load


def theirs(done: Completion) -> tuple[float, float] | None:
    """(TTFT, E2E) in ms as the server tells them, None when it does not."""
    said = done.server_timing or {}
    timings: dict[str, Any] = said.get("timings") or {}
    if timings:
        each = timings["predicted_ms"] / max(timings["predicted_n"], 1)
        return timings["prompt_ms"] + each, timings["prompt_ms"] + timings["predicted_ms"]
    timing: dict[str, Any] = (said.get("nvext") or {}).get("timing") or {}
    if "ttft_ms" in timing:
        return timing["ttft_ms"], timing["total_time_ms"]
    return None


async def measure(url: str, server: str, count: int) -> list[tuple[float, float, float, float]]:
    """(our TTFT from the send, theirs, our E2E from the send, theirs) in ms, per request."""
    found = await run.find(Settings(url=url, server=server))
    workload = load("qa", Overrides(num_requests=str(count), output_tokens="100"))
    requests = prompts.build(workload, seeds.fresh(), seeds.fresh(), tokens.load(None))
    extra = {"nvext": {"extra_fields": ["timing"]}} if found.server == "dynamo" else None
    rows = []
    async with Client(found.target, model=found.model, quirk=found.quirk, extra_body=extra) as client:
        for number in range(count):
            built: Request = requests[number]
            done = await client.complete(built)
            told = theirs(done)
            if done.failure is not None or told is None:
                raise SystemExit(f"request {number}: {done.failure or 'the server tells no timing of its own'}")
            rows.append(((done.first_token - done.sent) / 1e6, told[0], (done.end - done.sent) / 1e6, told[1]))
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", required=True)
    options.add_argument("--server", default="auto")
    options.add_argument("--requests", type=int, default=100)
    given = options.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(given.url, given.server, given.requests))
    print(f"{len(rows)} requests, one at a time, from the send; ms\n")
    print("| metric | ours p50 | server's p50 | difference p50 | difference p95 |\n|---|---:|---:|---:|---:|")
    for name, ours, said in (("TTFT", 0, 1), ("E2E", 2, 3)):
        apart = sorted(row[ours] - row[said] for row in rows)
        print(
            f"| {name} | {statistics.median(row[ours] for row in rows):.2f} "
            f"| {statistics.median(row[said] for row in rows):.2f} "
            f"| {statistics.median(apart):+.2f} | {apart[int(len(apart) * 0.95)]:+.2f} |"
        )


if __name__ == "__main__":
    main()
