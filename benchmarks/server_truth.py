"""Do our latencies agree with those that a real server reports for each request?

    python benchmarks/server_truth.py --url http://127.0.0.1:8080 [--server llamacpp|dynamo]

Requests are sent one at a time, each with a prompt of its own, so that neither side has a queue.
llama-server reports `timings` in every response, and Dynamo reports `nvext.timing` on request. Our
times start at the send, so the difference to the server's contains what the server does outside its
own clock (HTTP, JSON, template, tokenizer). To tell this part from an error of our client, the next
request of the same shape goes over a plain blocking socket that reads its clock right after `recv`:
both should differ from the server by the same time. 100 requests of each kind take some minutes.
The table has the p50 and p95 in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import rig
import uvloop
from loadgen_sdk.app.client import Client
from loadgen_sdk.request import Request
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.request_body import BodyFormat, encode_body
from scripted_server import COUNT, chunk, events, serving

from loadgen.core import seeds
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.probing import probe_url
from loadgen.core.requests import tokenizer
from loadgen.core.requests.build import build_prompts
from loadgen.core.workload import load, read_flags

PROBE_TIMEOUT_S = 60.0
OUTPUT_TOKENS = "100"
RECEIVE_BUFFER_BYTES = 65_536
NO_SERVER_TIMES = "the server reports no times of its own"
EVENT_WITH_TEXT = re.compile(rb'"content": ?"[^"]')  # in the bytes of a response

# The response of the scripted server of `--smoke`, with the times that llama-server would report
SMOKE_USAGE = COUNT | {"timings": {"prompt_ms": 0.01, "predicted_ms": 0.01, "predicted_n": 2}}
SMOKE_RESPONSE = events(chunk("Hello"), chunk(" you", "length"), SMOKE_USAGE)


class Latencies(NamedTuple):
    """TTFT and E2E latency of one request."""

    ttft_ms: float
    e2e_ms: float


class ComparedLatencies(NamedTuple):
    """The latencies of one request as the server reports them, and as a client measured them."""

    reported: Latencies
    measured: Latencies


def read_reported_latencies(event: dict[str, Any]) -> Latencies | None:
    """Return the latencies that an event of the server reports, or None if it reports none.

    llama-server reports the time for the prompt and the time for all tokens. So its TTFT is the
    time for the prompt plus the mean time for one token. Dynamo reports both latencies.
    """
    llama_timings: dict[str, Any] = event.get("timings") or {}
    if llama_timings:
        prompt_ms = llama_timings["prompt_ms"]
        all_tokens_ms = llama_timings["predicted_ms"]
        one_token_ms = all_tokens_ms / max(llama_timings["predicted_n"], 1)
        return Latencies(ttft_ms=prompt_ms + one_token_ms, e2e_ms=prompt_ms + all_tokens_ms)

    dynamo_timing: dict[str, Any] = (event.get("nvext") or {}).get("timing") or {}
    if "ttft_ms" in dynamo_timing:
        return Latencies(dynamo_timing["ttft_ms"], dynamo_timing["total_time_ms"])

    return None


# -- measure over a plain socket --


class ReceivedChunk(NamedTuple):
    """What one call of `recv` returned, and the monotonic time right after it."""

    received_ns: int
    data: bytes


class SocketExchange(NamedTuple):
    """A request and its response over a plain socket. Times are monotonic."""

    sent_ns: int
    chunks: list[ReceivedChunk]


def exchange_over_socket(host: str, port: int, path: str, body: bytes) -> SocketExchange:
    """Send a POST request over a blocking socket, and read the response until the server closes.

    The chunks are only collected, so that nothing delays the clock reading after each `recv`.
    """
    head_lines = [
        f"POST {path} HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    head = "\r\n".join(head_lines) + "\r\n\r\n"

    chunks = []
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent_ns = time.monotonic_ns()
        connection.sendall(head.encode() + body)
        while data := connection.recv(RECEIVE_BUFFER_BYTES):
            chunks.append(ReceivedChunk(time.monotonic_ns(), data))

    return SocketExchange(sent_ns, chunks)


def measure_over_socket(target: Target, body: bytes) -> ComparedLatencies:
    """Send a chat request over a plain socket and return its latencies.

    TTFT ends with the first chunk of the response that has text, and E2E with the last one. Both
    begin with the send.
    """
    path = f"{target.base}/chat/completions"
    exchange = exchange_over_socket(target.host, target.port, path, body)

    text_times_ns = [
        received.received_ns
        for received in exchange.chunks
        if EVENT_WITH_TEXT.search(received.data)
    ]
    measured = Latencies(
        ttft_ms=(text_times_ns[0] - exchange.sent_ns) / 1e6,
        e2e_ms=(text_times_ns[-1] - exchange.sent_ns) / 1e6,
    )
    response = b"".join(received.data for received in exchange.chunks)
    return ComparedLatencies(find_reported_latencies(response), measured)


def find_reported_latencies(response: bytes) -> Latencies:
    """Return the latencies that the last event with such a report has in a streamed response.

    Raises SystemExit if no event reports any.
    """
    prefix = b"data: "
    for line in reversed(response.splitlines()):
        if not line.startswith(prefix + b"{"):
            continue
        latencies = read_reported_latencies(json.loads(line.removeprefix(prefix)))
        if latencies is not None:
            return latencies

    raise SystemExit(NO_SERVER_TIMES)


# -- measure with our client --


async def measure_with_client(client: Client, request: Request) -> ComparedLatencies:
    """Send a request with the client of loadgen and return its latencies.

    Raises SystemExit if the request fails or if the server reports no times.
    """
    completion = await client.complete(request)
    if completion.failure is not None:
        raise SystemExit(f"a request failed: {completion.failure}")

    reported = read_reported_latencies(completion.server_timing or {})
    if reported is None:
        raise SystemExit(NO_SERVER_TIMES)

    measured = Latencies(
        ttft_ms=(completion.first_token - completion.sent) / 1e6,
        e2e_ms=(completion.end - completion.sent) / 1e6,
    )
    return ComparedLatencies(reported, measured)


class Measurements(NamedTuple):
    """The requests that our client sent, and those of the same shape over a plain socket."""

    client: list[ComparedLatencies]
    plain_socket: list[ComparedLatencies]


async def measure_alternately(
    url: str, server: str, model: str | None, request_count: int
) -> Measurements:
    """Send `request_count` requests with our client and as many over a plain socket, in turns."""
    settings = Settings(url=url, server=server, model=model)
    probe_result = await probe_url(settings, PROBE_TIMEOUT_S)

    # Dynamo reports its times only on request.
    extra_body = None
    if probe_result.server == "dynamo":
        extra_body = {"nvext": {"extra_fields": ["timing"]}}

    body_format = BodyFormat(
        server_profile=probe_result.server_profile,
        api="chat",
        model=probe_result.model,
        stream=True,
        extra_body=extra_body,
    )
    client = Client(
        probe_result.target,
        model=probe_result.model,
        server_profile=probe_result.server_profile,
        extra_body=extra_body,
    )
    requests = build_requests(2 * request_count)

    measurements = Measurements(client=[], plain_socket=[])
    async with client:
        for client_request, socket_request in zip(requests[::2], requests[1::2], strict=True):
            measurements.client.append(await measure_with_client(client, client_request))
            body = encode_body(socket_request, body_format)
            measurements.plain_socket.append(measure_over_socket(probe_result.target, body))

    return measurements


def build_requests(request_count: int) -> list[Request]:
    """Return requests of the workload `qa` with texts that no cache of the server has."""
    workload = load("qa", read_flags(num_requests=str(request_count), output_tokens=OUTPUT_TOKENS))
    prompts = build_prompts(
        workload, seeds.random_seed(), seeds.random_seed(), tokenizer.load_tokenizer(None)
    )
    return [prompts[index] for index in range(request_count)]


# -- print --


COLUMNS = (
    "metric",
    "reported by the server",
    "loadgen measures more than that",
    "a plain socket measures more than that",
)


def create_row(
    metric: str, measurements: Measurements, read_metric: Callable[[Latencies], float]
) -> list[str]:
    """Return the cells of a metric, in the order of COLUMNS.

    The last two cells are differences between the measured and the reported values of the same
    request.
    """

    def list_differences(requests: Sequence[ComparedLatencies]) -> list[float]:
        """Return how much more each request took than the server reports."""
        return [
            read_metric(request.measured) - read_metric(request.reported) for request in requests
        ]

    reported = [read_metric(request.reported) for request in measurements.client]
    return [
        metric,
        format_p50_and_p95(reported),
        format_p50_and_p95(list_differences(measurements.client)),
        format_p50_and_p95(list_differences(measurements.plain_socket)),
    ]


def format_p50_and_p95(values: Sequence[float]) -> str:
    """Return "p50 (p95)" of some values."""
    p95 = sorted(values)[int(len(values) * 0.95)]
    return f"{statistics.median(values):.2f} ({p95:.2f})"


@contextlib.contextmanager
def serve_smoke_response() -> Iterator[str]:
    """Serve SMOKE_RESPONSE to every request inside the `with` block, and yield the URL."""
    with serving(SMOKE_RESPONSE) as server:
        yield server.url


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script. `--url` may be left out only with `--smoke`."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--url", help="of a server that reports its times")
    parser.add_argument("--server", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=100)
    args = rig.parse_arguments(parser, server="llamacpp", model="m-1", requests=3)
    if not args.url and not args.smoke:
        parser.error("--url is missing: which server?")
    return args


def main() -> None:
    """Print TTFT and E2E by the server, by our client and by a plain socket."""
    args = parse_command_line()
    endpoint = contextlib.nullcontext(args.url) if args.url else serve_smoke_response()
    with endpoint as url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measurements = runner.run(measure_alternately(url, args.server, args.model, args.requests))

    rows = [
        create_row("TTFT", measurements, lambda latencies: latencies.ttft_ms),
        create_row("E2E latency", measurements, lambda latencies: latencies.e2e_ms),
    ]
    print(f"{args.requests} requests each, one at a time, from the send; ms, p50 (p95)\n")
    print(rig.format_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
