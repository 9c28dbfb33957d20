"""How much load can the embedded endpoint serve, and how close to its plan does it send?

    python benchmarks/endpoint.py [--alone] [--only flood]

The reader is a bare epoll loop in this process that discards what it reads, so that the numbers are
those of the endpoint: events per CPU-second of the server process, and the difference between real
and planned sends in its log. Everything stays on loopback. It takes some minutes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.sim.server.embedded import EmbeddedServer, start
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import SentRequests, parse_log

SPREAD_OUT = {"ttft": "normal:30ms,5ms", "log_events": "all"}
IN_STEP = {"lockstep": True}
VM = {"preset": "gb300-vm", "log_events": "all"}

# A preset as YAML text, of a server that sends all tokens of an iteration at the same time
ALL_AT_ONCE_PRESET = "extends: gb300-vm\nserver: {emit_us: 0}\n"
VM_ALL_AT_ONCE = {"preset": ALL_AT_ONCE_PRESET, "log_events": "all"}


class Case(NamedTuple):
    """A load on the endpoint.

    Attributes:
        server_options: The options of the endpoint. The preset may be ALL_AT_ONCE_PRESET, which is
            the text of a file.
        connections: The number of connections, each of which has one request in flight.
        tokens: The tokens of each response.
        responses: The number of responses that each connection reads, one after the other.
        start_gap_s: The seconds between the opening of two connections.
    """

    server_options: dict[str, Any]
    connections: int
    tokens: int = 500
    responses: int = 1
    start_gap_s: float = 0.0


CASES: dict[str, Case] = {
    "spread, 64 streams at 6 ms": Case(SPREAD_OUT | {"itl": "6ms"}, 64, start_gap_s=0.002),
    "spread, 256 streams at 10 ms": Case(SPREAD_OUT | {"itl": "10ms"}, 256, start_gap_s=0.0005),
    "spread, 512 streams at 8 ms": Case(SPREAD_OUT | {"itl": "8ms"}, 512, start_gap_s=0.0005),
    "spread, 256 streams, no log": Case(
        SPREAD_OUT | {"itl": "10ms", "log_events": "none"}, 256, start_gap_s=0.0005
    ),
    "lockstep, 256 streams at 10 ms": Case(SPREAD_OUT | {"itl": "10ms"} | IN_STEP, 256),
    "gb300-rack, 600 streams": Case(VM | {"preset": "gb300-rack"}, 600, start_gap_s=0.002),
    "gb300-vm, 800 streams": Case(VM, 800, start_gap_s=0.002),
    "the same, iterations all at once": Case(VM_ALL_AT_ONCE, 800, start_gap_s=0.002),
    "the same, four processes": Case(VM_ALL_AT_ONCE | {"cores": 4}, 800, start_gap_s=0.002),
    "as fast as it can, 64 streams": Case({"itl": "1us", "ttft": "1ms"}, 64, responses=20),
    "short responses (4 tokens), 256 streams": Case(
        {"itl": "0.1ms", "ttft": "1ms"}, 256, tokens=4, responses=40
    ),
    "flood, 64 streams": Case({"flood": True, "ttft": "1ms"}, 64, responses=20),
}

MIN_CONNECTIONS = 1
MIN_TOKENS = 4

LAST_CHUNK = b"0\r\n\r\n"  # with which a response over HTTP/1.1 ends
READ_BYTES = 1 << 20
OPENING_POLL_TIMEOUT_S = 0.001
READING_POLL_TIMEOUT_S = 5.0

REALTIME_PRIORITY = 5  # above that of the reader, which rig.py gives the priority 1
LATENESS_WINDOW_NS = 100_000_000

COLUMNS = (
    "load",
    "events/s",
    "events/CPU-s",
    "requests/CPU-s",
    "CPU",
    "late p50, µs",
    "late p99",
    "typical p99",
    "late max",
)


def encode_http_request(tokens: int) -> bytes:
    """Return a streamed chat request for exactly `tokens` tokens as the bytes of HTTP/1.1."""
    fields = {
        "model": "sim",
        "messages": [{"role": "user", "content": " tell me"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    body = json.dumps(fields).encode()
    header_lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: sim",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    header = "\r\n".join(header_lines) + "\r\n\r\n"
    return header.encode() + body


def start_endpoint(options: Options) -> EmbeddedServer:
    """Start the endpoint, with `--alone` at a real-time priority that all its processes inherit."""
    if not rig.RealtimePriority.is_enabled:
        return start(options)

    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    try:
        return start(options)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class ResponseReader:
    """Reads responses on many connections at once with epoll, and discards them.

    Each connection sends the same request again when a response has ended, until it has read
    `case.responses` of them.
    """

    def __init__(self, url: str, case: Case) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._request = encode_http_request(case.tokens)
        self._case = case
        self._epoll = select.epoll()
        self._connections: dict[int, socket.socket] = {}  # by file descriptor
        self._responses_left: dict[int, int] = {}  # by file descriptor

    def read_all(self) -> None:
        """Open all connections, each at its time, and read until all responses have ended."""
        started_s = time.monotonic()
        opened = 0
        while opened < self._case.connections or self._connections:
            next_opening_s = started_s + opened * self._case.start_gap_s
            if opened < self._case.connections and time.monotonic() >= next_opening_s:
                self._open_connection()
                opened += 1

            # While there are connections to open, waiting for an event must not delay them.
            is_opening = opened < self._case.connections
            poll_timeout_s = OPENING_POLL_TIMEOUT_S if is_opening else READING_POLL_TIMEOUT_S
            for fd, _events in self._epoll.poll(poll_timeout_s):
                self._read_connection(fd)

        self._epoll.close()

    def _open_connection(self) -> None:
        """Open a connection and send its first request."""
        connection = socket.create_connection(self._address)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = connection.fileno()
        self._connections[fd] = connection
        self._responses_left[fd] = self._case.responses
        self._epoll.register(fd, select.EPOLLIN)
        connection.send(self._request)

    def _read_connection(self, fd: int) -> None:
        """Read what has arrived; at the end of a response, send the next request or close.

        Raises SystemExit if the endpoint has closed the connection.
        """
        data = self._connections[fd].recv(READ_BYTES)
        if not data:
            raise SystemExit("the endpoint closed a connection")
        if not data.endswith(LAST_CHUNK):
            return

        self._responses_left[fd] -= 1
        if self._responses_left[fd]:
            self._connections[fd].send(self._request)
        else:
            self._epoll.unregister(fd)
            self._connections.pop(fd).close()


def read_timed(url: str, case: Case) -> dict[str, Any]:
    """Read all responses of a case, and return how many seconds that took, as `wall_s`."""
    started_s = time.monotonic()
    ResponseReader(url, case).read_all()
    return {"wall_s": time.monotonic() - started_s}


class CaseResult(NamedTuple):
    """What the endpoint did in a case.

    Attributes:
        usage: The counters of the endpoint, with the keys of `rig.measure_client_and_server`. With
            several processes they are those of one process only.
        logs: The log of each process of the endpoint.
    """

    usage: dict[str, Any]
    logs: list[SentRequests]


def run_case(case: Case) -> CaseResult:
    """Start the endpoint of a case, read all responses, and return counters and logs."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        log_path = scratch / "log"
        options = prepare_server_options(case, scratch)
        with start_endpoint(Options(**options, log=str(log_path))) as endpoint:
            run_client = partial(read_timed, endpoint.url, case)
            usage = rig.measure_client_and_server(endpoint.url, run_client)

        # The first process writes to the path of the option, the others add their number.
        processes = options.get("cores", 1)
        log_paths = [log_path, *(scratch / f"log.{number}" for number in range(1, processes))]
        return CaseResult(usage, [parse_log(path.read_bytes()) for path in log_paths])


def prepare_server_options(case: Case, scratch: Path) -> dict[str, Any]:
    """Return the options of the endpoint, which takes a preset by name or as a file.

    ALL_AT_ONCE_PRESET is the text of a preset, so it is written to a file in `scratch`.
    """
    if case.server_options.get("preset") != ALL_AT_ONCE_PRESET:
        return case.server_options

    preset_path = scratch / "preset.yaml"
    preset_path.write_text(ALL_AT_ONCE_PRESET)
    return case.server_options | {"preset": str(preset_path)}


def format_case(name: str, case: Case, result: CaseResult) -> list[str]:
    """Return the row of one case: throughput, cost per CPU-second, and lateness of the sends.

    With several processes only events/s and lateness are known, from the logs of the processes.
    """
    usage, logs = result
    logged_sends = sum(len(log.sent_ns) for log in logs)

    if len(logs) > 1:
        events_per_s = logged_sends / usage["wall_s"]
        throughput_cells = [f"{events_per_s:,.0f}", "", "", ""]
    else:
        throughput_cells = format_throughput(usage)

    # A flood is sent as fast as possible, so that no send has a planned time.
    is_flood = bool(case.server_options.get("flood"))
    if logged_sends and not is_flood:
        lateness_cells = format_lateness(logs)
    else:
        lateness_cells = ["", "", "", ""]

    return [name, *throughput_cells, *lateness_cells]


def format_throughput(usage: Mapping[str, float]) -> list[str]:
    """Return events/s, events and requests per CPU-second, and the used fraction of a core."""
    events = usage["server_events"]
    requests = usage["server_requests"]
    cpu_s = usage["server_cpu_s"]
    return [
        f"{events / usage['wall_s']:,.0f}",
        f"{events / cpu_s:,.0f}",
        f"{requests / cpu_s:,.0f}",
        f"{usage['server_core_fraction']:.2f}",
    ]


def format_lateness(logs: Sequence[SentRequests]) -> list[str]:
    """Return p50, p99, typical p99 and maximum of the lateness of all sends, in µs.

    The lateness of a send is the difference between its real and its planned time.
    """
    planned_ns = np.concatenate([log.planned_ns for log in logs])
    sent_ns = np.concatenate([log.sent_ns for log in logs])
    lateness_us = (sent_ns - planned_ns) / 1e3
    p50_us, p99_us, max_us = np.quantile(lateness_us, (0.5, 0.99, 1.0))
    typical_p99_us = typical_p99(planned_ns, lateness_us)
    return [f"{value_us:,.0f}" for value_us in (p50_us, p99_us, typical_p99_us, max_us)]


def typical_p99(planned_ns: NDArray[np.int64], lateness_us: NDArray[np.float64]) -> float:
    """Return the median over all windows of 100 ms of the p99 of lateness in each window.

    It ignores the moments in which other users of a shared host delay the endpoint.
    """
    window_numbers = planned_ns // LATENESS_WINDOW_NS
    p99s_us = [
        np.quantile(lateness_us[window_numbers == number], 0.99)
        for number in np.unique(window_numbers)
    ]
    return float(np.median(p99s_us))


def shrink_case(case: Case, fraction: float) -> Case:
    """Return a case with a fraction of its connections and of the tokens of each response."""
    return case._replace(
        connections=max(MIN_CONNECTIONS, int(case.connections * fraction)),
        tokens=max(MIN_TOKENS, int(case.tokens * fraction)),
    )


def main() -> None:
    """Print the load that the endpoint serves in each case, and how late it sends."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument(
        "--share", type=float, default=1.0, help="fraction of the streams and of their tokens"
    )
    parser.add_argument("--only", default="", help="part of a case's name")
    smoke_defaults = {"share": 0.05}
    args = rig.parse_arguments(parser, **smoke_defaults)

    rows = []
    for name, full_case in CASES.items():
        if args.only in name:
            case = shrink_case(full_case, args.share)
            rows.append(format_case(name, case, run_case(case)))
    print(rig.format_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
