"""Our times against the server's own, on a real server that reports per-request timing.

    python benchmarks/server_truth.py --url http://127.0.0.1:8080 [--server llamacpp|dynamo] [--requests 100]

Requests go one at a time, each with a prompt of its own, so that there is no queue on either side. llama-server says
`timings` in every answer: its TTFT is prompt_ms + one token's share of predicted_ms, its E2E prompt_ms + predicted_ms.
Dynamo says `nvext.timing` when asked: ttft_ms and total_time_ms from its own receipt of the request. Ours are from the
send, so the difference holds what the server does outside its own clock (HTTP, JSON, template, tokenizer). A witness
tells whose it is: the next request of the same shape goes over a bare blocking socket, stamped right after `recv`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import statistics
import time
from typing import Any, NamedTuple

import rig
import uvloop
from canned import COUNT, chunk, events, serving
from loadgen_sdk.app.client import Client
from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.request_body import BodyFormat, encode_body

from loadgen.core import seeds
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.probing import probe_url
from loadgen.core.requests import tokenizer
from loadgen.core.requests.build import build_prompts
from loadgen.core.workload import load, read_flags

TIMEOUT_S = 60.0
WITH_TEXT = re.compile(rb'"content": ?"[^"]')
TOLD = COUNT | {"timings": {"prompt_ms": 0.01, "predicted_ms": 0.01, "predicted_n": 2}}
ANSWER = events(chunk("Hello"), chunk(" you", "length"), TOLD)  # as llama-server's, with --smoke


def said(event: dict[str, Any]) -> tuple[float, float] | None:
    """(TTFT, E2E) in ms as the server tells them in an event, None when it does not."""
    timings: dict[str, Any] = event.get("timings") or {}
    if timings:
        each = timings["predicted_ms"] / max(timings["predicted_n"], 1)
        return timings["prompt_ms"] + each, timings["prompt_ms"] + timings["predicted_ms"]
    timing: dict[str, Any] = (event.get("nvext") or {}).get("timing") or {}
    if "ttft_ms" in timing:
        return timing["ttft_ms"], timing["total_time_ms"]
    return None


class Row(NamedTuple):
    """TTFT and E2E in ms from the send, less what the server says of the same request."""

    ttft: float
    e2e: float


def bare(host: str, port: int, path: str, body: bytes) -> Row:
    """The same over a blocking socket: a new connection, nothing decoded until the answer is over."""
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    pieces: list[tuple[int, bytes]] = []
    with socket.create_connection((host, port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.monotonic_ns()
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while piece := sock.recv(1 << 16):
            pieces.append((time.monotonic_ns(), piece))
    with_text = [at for at, piece in pieces if WITH_TEXT.search(piece)]
    events = [
        line[6:]
        for line in b"".join(piece for _, piece in pieces).splitlines()
        if line.startswith(b"data: {")
    ]
    told = next(found for event in reversed(events) if (found := said(json.loads(event))))
    return Row((with_text[0] - sent) / 1e6 - told[0], (with_text[-1] - sent) / 1e6 - told[1])


async def measure(
    url: str, server: str, model: str | None, count: int
) -> tuple[list[tuple[float, float]], list[Row], list[Row]]:
    """What the server says (TTFT and E2E in ms), ours less that, the witness's less that; a row for each request."""
    found = await probe_url(Settings(url=url, server=server, model=model), TIMEOUT_S)
    workload = load("qa", read_flags(num_requests=str(2 * count), output_tokens="100"))
    requests = build_prompts(workload, seeds.fresh(), seeds.fresh(), tokenizer.load_tokenizer(None))
    extra = {"nvext": {"extra_fields": ["timing"]}} if found.server == "dynamo" else None
    theirs, ours, witness = [], [], []
    target = found.target
    async with Client(
        found.target, model=found.model, server_profile=found.server_profile, extra_body=extra
    ) as client:
        for number in range(count):
            built: Request = requests[2 * number]
            done = await client.complete(built)
            told = said(done.server_timing or {})
            if done.failure is not None or told is None:
                raise SystemExit(
                    f"request {number}: {done.failure or 'the server tells no timing of its own'}"
                )
            theirs.append(told)
            ours.append(
                Row(
                    (done.first_token - done.sent) / 1e6 - told[0],
                    (done.end - done.sent) / 1e6 - told[1],
                )
            )
            other = encode_body(
                requests[2 * number + 1],
                BodyFormat(found.server_profile, "chat", found.model, True, extra_body=extra),
            )
            witness.append(bare(target.host, target.port, f"{target.base}/chat/completions", other))
    return theirs, ours, witness


def main() -> None:
    options = rig.parser(__doc__)
    options.add_argument("--url", help="of a server that tells its times")
    options.add_argument("--server", default="auto")
    options.add_argument("--model")
    options.add_argument("--requests", type=int, default=100)
    given = rig.given(options, server="llamacpp", model="m-1", requests=3)
    with contextlib.ExitStack() as stack:
        url = given.url or (stack.enter_context(serving(ANSWER)).url if given.smoke else "")
        if not url:
            options.error("--url: which server?")
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        sides = runner.run(measure(url, given.server, given.model, given.requests))
    print(f"{given.requests} requests each, one at a time, from the send; ms, p50 (p95)\n")
    columns = [
        "metric",
        "the server says",
        "this client, more than that",
        "a bare socket, more than that",
    ]
    rows = [
        [name, *(_shown([row[i] for row in side]) for side in sides)]
        for i, name in enumerate(("TTFT", "E2E"))
    ]
    print(rig.table(columns, rows))


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({sorted(values)[int(len(values) * 0.95)]:.2f})"


if __name__ == "__main__":
    main()
