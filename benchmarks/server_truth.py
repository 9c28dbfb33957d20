"""Do our latencies agree with those that a real server reports for each request?

    python benchmarks/server_truth.py --url http://127.0.0.1:8080 [--server llamacpp|dynamo]

Requests are sent one at a time, each with a prompt of its own, so that neither side has a queue.
llama-server reports `timings` in every response: its TTFT is prompt_ms plus one token's part of
predicted_ms, its E2E is prompt_ms + predicted_ms. Dynamo reports `nvext.timing` on request: ttft_ms
and total_time_ms since it received the request. Our times start at the send, so the difference
contains what the server does outside its own clock (HTTP, JSON, template, tokenizer). To attribute
it, the next request of the same shape goes over a bare blocking socket that reads its clock right
after `recv`. 100 requests of each kind take some minutes; the table has the p50 and p95 in ms.
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
from loadgen_sdk.app.client import Client
from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.request_body import BodyFormat, encode_body
from scripted_server import COUNT, chunk, events, serving

from loadgen.core import seeds
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.probing import probe_url
from loadgen.core.requests import tokenizer
from loadgen.core.requests.build import build_prompts
from loadgen.core.workload import load, read_flags

TIMEOUT_S = 60.0
WITH_TEXT = re.compile(rb'"content": ?"[^"]')
TIMED_USAGE = COUNT | {"timings": {"prompt_ms": 0.01, "predicted_ms": 0.01, "predicted_n": 2}}
RESPONSE = events(
    chunk("Hello"), chunk(" you", "length"), TIMED_USAGE
)  # as llama-server's, with --smoke


def read_server_times(event: dict[str, Any]) -> tuple[float, float] | None:
    """Return TTFT and E2E in ms as an event of the server reports them, or None."""
    timings: dict[str, Any] = event.get("timings") or {}
    if timings:
        ms_per_token = timings["predicted_ms"] / max(timings["predicted_n"], 1)
        return timings["prompt_ms"] + ms_per_token, timings["prompt_ms"] + timings["predicted_ms"]
    timing: dict[str, Any] = (event.get("nvext") or {}).get("timing") or {}
    if "ttft_ms" in timing:
        return timing["ttft_ms"], timing["total_time_ms"]
    return None


class Difference(NamedTuple):
    """TTFT and E2E in ms since the send, minus what the server reports for the same request."""

    ttft: float
    e2e: float


def measure_bare_socket(host: str, port: int, path: str, body: bytes) -> Difference:
    """Send the same request over a blocking socket and decode nothing until the response ends."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: "
        f"application/json\r\nconnection: close\r\n"
    )
    pieces: list[tuple[int, bytes]] = []
    with socket.create_connection((host, port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.monotonic_ns()
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while piece := sock.recv(1 << 16):
            pieces.append((time.monotonic_ns(), piece))
    with_text = [received_ns for received_ns, piece in pieces if WITH_TEXT.search(piece)]
    events = [
        line[6:]
        for line in b"".join(piece for _, piece in pieces).splitlines()
        if line.startswith(b"data: {")
    ]
    server_times = next(
        times for event in reversed(events) if (times := read_server_times(json.loads(event)))
    )
    return Difference(
        (with_text[0] - sent) / 1e6 - server_times[0],
        (with_text[-1] - sent) / 1e6 - server_times[1],
    )


async def measure(
    url: str, server: str, model: str | None, count: int
) -> tuple[list[tuple[float, float]], list[Difference], list[Difference]]:
    """Return the server's times, and the differences of our client and of the bare socket.

    Each list has one row per request; times are in ms.
    """
    probed_target = await probe_url(Settings(url=url, server=server, model=model), TIMEOUT_S)
    workload = load("qa", read_flags(num_requests=str(2 * count), output_tokens="100"))
    requests = build_prompts(workload, seeds.fresh(), seeds.fresh(), tokenizer.load_tokenizer(None))
    extra = {"nvext": {"extra_fields": ["timing"]}} if probed_target.server == "dynamo" else None
    server_rows, client_rows, socket_rows = [], [], []
    target = probed_target.target
    async with Client(
        probed_target.target,
        model=probed_target.model,
        server_profile=probed_target.server_profile,
        extra_body=extra,
    ) as client:
        for number in range(count):
            request: Request = requests[2 * number]
            completion = await client.complete(request)
            server_times = read_server_times(completion.server_timing or {})
            if completion.failure is not None or server_times is None:
                raise SystemExit(
                    f"request {number}: "
                    f"{completion.failure or 'the server tells no timing of its own'}"
                )
            server_rows.append(server_times)
            client_rows.append(
                Difference(
                    (completion.first_token - completion.sent) / 1e6 - server_times[0],
                    (completion.end - completion.sent) / 1e6 - server_times[1],
                )
            )
            witness_body = encode_body(
                requests[2 * number + 1],
                BodyFormat(
                    probed_target.server_profile,
                    "chat",
                    probed_target.model,
                    True,
                    extra_body=extra,
                ),
            )
            socket_rows.append(
                measure_bare_socket(
                    target.host, target.port, f"{target.base}/chat/completions", witness_body
                )
            )
    return server_rows, client_rows, socket_rows


def main() -> None:
    """Print TTFT and E2E of the server, of this client and of a bare socket."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--url", help="of a server that tells its times")
    parser.add_argument("--server", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=100)
    args = rig.parse_arguments(parser, server="llamacpp", model="m-1", requests=3)
    with contextlib.ExitStack() as stack:
        url = args.url or (stack.enter_context(serving(RESPONSE)).url if args.smoke else "")
        if not url:
            parser.error("--url: which server?")
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        sides = runner.run(measure(url, args.server, args.model, args.requests))
    print(f"{args.requests} requests each, one at a time, from the send; ms, p50 (p95)\n")
    columns = [
        "metric",
        "the server says",
        "this client, more than that",
        "a bare socket, more than that",
    ]
    rows = [
        [name, *(_format_median_and_p95([row[i] for row in side]) for side in sides)]
        for i, name in enumerate(("TTFT", "E2E"))
    ]
    print(rig.format_table(columns, rows))


def _format_median_and_p95(values: list[float]) -> str:
    """Return "median (p95)" of some values."""
    return f"{statistics.median(values):.2f} ({sorted(values)[int(len(values) * 0.95)]:.2f})"


if __name__ == "__main__":
    main()
