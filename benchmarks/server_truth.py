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


class Latencies(NamedTuple):
    """TTFT and E2E of one request in ms."""

    ttft: float
    e2e: float

    def minus(self, other: Latencies) -> Latencies:
        """Return the differences to other latencies."""
        return Latencies(self.ttft - other.ttft, self.e2e - other.e2e)


def read_server_times(event: dict[str, Any]) -> Latencies | None:
    """Return TTFT and E2E as an event of the server reports them, or None.

    llama-server reports the milliseconds of the prompt and of all tokens, so that TTFT is that of
    the prompt and of one token. Dynamo reports both latencies.
    """
    llama_times: dict[str, Any] = event.get("timings") or {}
    if llama_times:
        prompt_ms = llama_times["prompt_ms"]
        decode_ms = llama_times["predicted_ms"]
        ms_per_token = decode_ms / max(llama_times["predicted_n"], 1)
        return Latencies(prompt_ms + ms_per_token, prompt_ms + decode_ms)

    dynamo_times: dict[str, Any] = (event.get("nvext") or {}).get("timing") or {}
    if "ttft_ms" in dynamo_times:
        return Latencies(dynamo_times["ttft_ms"], dynamo_times["total_time_ms"])

    return None


class ReceivedPiece(NamedTuple):
    """What one `recv` returned, and when, in monotonic ns."""

    received_ns: int
    data: bytes


def measure_bare_socket(host: str, port: int, path: str, body: bytes) -> Latencies:
    """Send a request over a blocking socket; return how much later its text came than reported.

    The result is the latencies since the send, minus those that the server reports for the request.
    Nothing is decoded until the response ends, so that the clock is read right after each `recv`.
    """
    sent_ns, pieces = exchange_over_socket(host, port, path, body)
    text_times_ns = [piece.received_ns for piece in pieces if WITH_TEXT.search(piece.data)]
    measured = Latencies(
        ttft=(text_times_ns[0] - sent_ns) / 1e6, e2e=(text_times_ns[-1] - sent_ns) / 1e6
    )
    response = b"".join(piece.data for piece in pieces)
    return measured.minus(find_server_times(response))


def exchange_over_socket(
    host: str, port: int, path: str, body: bytes
) -> tuple[int, list[ReceivedPiece]]:
    """Send a POST request, and return when it was sent and all pieces of the response."""
    head_lines = [
        f"POST {path} HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    request = ("\r\n".join(head_lines) + "\r\n\r\n").encode() + body

    pieces = []
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent_ns = time.monotonic_ns()
        connection.sendall(request)
        while data := connection.recv(1 << 16):
            pieces.append(ReceivedPiece(time.monotonic_ns(), data))

    return sent_ns, pieces


def find_server_times(response: bytes) -> Latencies:
    """Return the latencies that the last event of a response with such a report has."""
    lines = [line for line in response.splitlines() if line.startswith(b"data: {")]
    for line in reversed(lines):
        times = read_server_times(json.loads(line.removeprefix(b"data: ")))
        if times is not None:
            return times
    raise SystemExit("the server tells no timing of its own")


class MeasuredRequests(NamedTuple):
    """The latencies of all requests: those that the server reports, and two differences to them.

    `client` is how much more our client measures for the same request, `bare_socket` how much more
    a bare socket measures for the next one.
    """

    server: list[Latencies]
    client: list[Latencies]
    bare_socket: list[Latencies]


async def measure(url: str, server: str, model: str | None, count: int) -> MeasuredRequests:
    """Send `count` requests by our client and as many over a bare socket, in turns."""
    probed_target = await probe_url(Settings(url=url, server=server, model=model), TIMEOUT_S)
    target = probed_target.target
    workload = load("qa", read_flags(num_requests=str(2 * count), output_tokens="100"))
    requests = build_prompts(
        workload, seeds.random_seed(), seeds.random_seed(), tokenizer.load_tokenizer(None)
    )

    # Dynamo reports its times only on request.
    extra = {"nvext": {"extra_fields": ["timing"]}} if probed_target.server == "dynamo" else None
    body_format = BodyFormat(
        probed_target.server_profile, "chat", probed_target.model, True, extra_body=extra
    )

    measured = MeasuredRequests([], [], [])
    async with Client(
        target,
        model=probed_target.model,
        server_profile=probed_target.server_profile,
        extra_body=extra,
    ) as client:
        for number in range(count):
            request: Request = requests[2 * number]
            reported, by_client = await measure_client(client, request, number)
            measured.server.append(reported)
            measured.client.append(by_client.minus(reported))
            next_body = encode_body(requests[2 * number + 1], body_format)
            measured.bare_socket.append(
                measure_bare_socket(
                    target.host, target.port, f"{target.base}/chat/completions", next_body
                )
            )

    return measured


async def measure_client(
    client: Client, request: Request, number: int
) -> tuple[Latencies, Latencies]:
    """Send a request by our client; return the latencies by the server and by the client.

    Raises SystemExit if it fails or if the server reports no times.
    """
    completion = await client.complete(request)
    reported = read_server_times(completion.server_timing or {})
    if completion.failure is not None or reported is None:
        reason = completion.failure or "the server tells no timing of its own"
        raise SystemExit(f"request {number}: {reason}")

    by_client = Latencies(
        ttft=(completion.first_token - completion.sent) / 1e6,
        e2e=(completion.end - completion.sent) / 1e6,
    )
    return reported, by_client


def main() -> None:
    """Print TTFT and E2E of the server, of this client and of a bare socket."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--url", help="of a server that tells its times")
    parser.add_argument("--server", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=100)

    args = rig.parse_arguments(parser, server="llamacpp", model="m-1", requests=3)
    with contextlib.ExitStack() as stack:
        url = args.url
        if not url and args.smoke:
            url = stack.enter_context(serving(RESPONSE)).url
        if not url:
            parser.error("--url is missing: which server?")
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        measured = runner.run(measure(url, args.server, args.model, args.requests))

    print(f"{args.requests} requests each, one at a time, from the send; ms, p50 (p95)\n")
    columns = [
        "metric",
        "the server says",
        "this client, more than that",
        "a bare socket, more than that",
    ]
    ttft_cells = [_format_median_and_p95([row.ttft for row in rows]) for rows in measured]
    e2e_cells = [_format_median_and_p95([row.e2e for row in rows]) for rows in measured]
    print(rig.format_table(columns, [["TTFT", *ttft_cells], ["E2E", *e2e_cells]]))


def _format_median_and_p95(values: list[float]) -> str:
    """Return "median (p95)" of some values."""
    return f"{statistics.median(values):.2f} ({sorted(values)[int(len(values) * 0.95)]:.2f})"


if __name__ == "__main__":
    main()
