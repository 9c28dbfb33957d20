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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.sim.server.embedded import EmbeddedServer, start
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import SentRequests, parse_log

SPREAD = {"ttft": "normal:30ms,5ms", "log_events": "all"}
VM = {"preset": "gb300-vm", "log_events": "all"}
AT_ONCE = VM | {"preset": "extends: gb300-vm\nserver: {emit_us: 0}\n"}


class Case(NamedTuple):
    """A load on the endpoint.

    `options` are those of the endpoint. Each of `streams` connections reads `responses` responses
    of `tokens` tokens. The connections open `start_gap_s` apart.
    """

    options: dict[str, Any]
    streams: int
    tokens: int
    responses: int
    start_gap_s: float


CASES: dict[str, Case] = {
    "spread, 64 streams at 6 ms": Case(SPREAD | {"itl": "6ms"}, 64, 500, 1, 0.002),
    "spread, 256 streams at 10 ms": Case(SPREAD | {"itl": "10ms"}, 256, 500, 1, 0.0005),
    "spread, 512 streams at 8 ms": Case(SPREAD | {"itl": "8ms"}, 512, 500, 1, 0.0005),
    "spread, 256 streams, no log": Case(
        SPREAD | {"itl": "10ms", "log_events": "none"}, 256, 500, 1, 0.0005
    ),
    "lockstep, 256 streams at 10 ms": Case(
        SPREAD | {"itl": "10ms", "lockstep": True}, 256, 500, 1, 0.0
    ),
    "gb300-rack, 600 streams": Case(VM | {"preset": "gb300-rack"}, 600, 500, 1, 0.002),
    "gb300-vm, 800 streams": Case(VM, 800, 500, 1, 0.002),
    "the same, iterations all at once": Case(AT_ONCE, 800, 500, 1, 0.002),
    "the same, four processes": Case(AT_ONCE | {"cores": 4}, 800, 500, 1, 0.002),
    "as fast as it can, 64 streams": Case({"itl": "1us", "ttft": "1ms"}, 64, 500, 20, 0.0),
    "short answers (4), 256 streams": Case({"itl": "0.1ms", "ttft": "1ms"}, 256, 4, 40, 0.0),
    "flood, 64 streams": Case({"flood": True, "ttft": "1ms"}, 64, 500, 20, 0.0),
}
END = b"0\r\n\r\n"
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\ncontent-type: "
    b"application/json\r\ncontent-length: %d\r\n\r\n%b"
)


def request_body(tokens: int) -> bytes:
    """Return a small request for exactly this many tokens."""
    value = {"model": "sim", "messages": [{"role": "user", "content": " tell me"}], "stream": True}
    value |= {"stream_options": {"include_usage": True}, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps(value).encode()


def start_endpoint(options: Options) -> EmbeddedServer:
    """Start the endpoint, with `--alone` at a higher priority that its children inherit."""
    if not rig.RealtimePriority.is_enabled:
        return start(options)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    try:
        return start(options)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class StreamReader:
    """Reads responses on many connections at once with epoll, and discards them.

    Each connection sends the same request again when a response has ended, until it has read
    `case.responses` of them.
    """

    def __init__(self, url: str, case: Case) -> None:
        host, port = url.removeprefix("http://").split(":")
        payload = request_body(case.tokens)
        self._address = (host, int(port))
        self._request = REQUEST % (len(payload), payload)
        self._case = case
        self._epoll = select.epoll()
        self._connections: dict[int, socket.socket] = {}  # by file descriptor
        self._responses_left: dict[int, int] = {}

    def read_all(self) -> None:
        """Open the connections and read until all responses have ended."""
        started_s = time.monotonic()
        opened = 0
        while opened < self._case.streams or self._connections:
            next_start_s = started_s + opened * self._case.start_gap_s
            has_to_open = opened < self._case.streams
            if has_to_open and time.monotonic() >= next_start_s:
                self._open_connection()
                opened += 1
                has_to_open = opened < self._case.streams

            # While connections are to be opened, the next one must not wait for an event.
            for fd, _ in self._epoll.poll(0.001 if has_to_open else 5.0):
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
        """Read what a connection has; at the end of a response send the next request or close."""
        data = self._connections[fd].recv(1 << 20)
        if not data:
            raise SystemExit("the endpoint closed a connection")
        if not data.endswith(END):
            return

        self._responses_left[fd] -= 1
        if self._responses_left[fd]:
            self._connections[fd].send(self._request)
        else:
            self._epoll.unregister(fd)
            self._connections.pop(fd).close()


class EndpointRun(NamedTuple):
    """A load on the endpoint: what its counters say, and the logs of its processes."""

    result: dict[str, Any]
    logs: list[SentRequests]


def run_case(case: Case) -> EndpointRun:
    """Start the endpoint of a case and read all its responses."""
    with tempfile.TemporaryDirectory() as scratch:
        options = dict(case.options)
        if str(options.get("preset")).startswith("extends"):
            preset_path = Path(scratch) / "own.yaml"
            preset_path.write_text(options["preset"])
            options["preset"] = str(preset_path)

        log_path = f"{scratch}/log"
        with start_endpoint(Options(**options, log=log_path)) as endpoint:

            def run_client() -> dict[str, object]:
                started_s = time.monotonic()
                StreamReader(endpoint.url, case).read_all()
                return {"wall_s": time.monotonic() - started_s}

            result = rig.measure_client_and_server(endpoint.url, run_client)

        processes = options.get("cores", 1)
        log_paths = [log_path, *(f"{log_path}.{process}" for process in range(1, processes))]
        return EndpointRun(result, [parse_log(Path(path).read_bytes()) for path in log_paths])


def measure_case(name: str, case: Case) -> list[str]:
    """Return the row of one case.

    With several processes only events and lateness are known, from the logs of the processes.
    """
    result, logs = run_case(case)
    late_us = np.concatenate([(log.sent_ns - log.planned_ns) / 1e3 for log in logs])

    late_cells = [""] * 4
    if len(late_us) and not case.options.get("flood"):
        planned_ns = np.concatenate([log.planned_ns for log in logs])
        p50, p99, max_us = np.quantile(late_us, (0.5, 0.99, 1.0))
        typical_p99 = _typical_p99(planned_ns, late_us)
        late_cells = [f"{value:,.0f}" for value in (p50, p99, typical_p99, max_us)]

    if len(logs) > 1:
        return [name, f"{len(late_us) / result['wall_s']:,.0f}", "", "", "", *late_cells]

    return [
        name,
        f"{result['server_events'] / result['wall_s']:,.0f}",
        f"{result['server_events'] / result['server_cpu_s']:,.0f}",
        f"{result['server_requests'] / result['server_cpu_s']:,.0f}",
        f"{result['server_core_fraction']:.2f}",
        *late_cells,
    ]


WINDOW_NS = 100_000_000


def _typical_p99(planned_ns: NDArray[np.int64], late_us: NDArray[np.float64]) -> float:
    """Return the p99 of lateness in each window of 100 ms, and of these p99s the median.

    It ignores the moments in which other users of a shared host delay the endpoint.
    """
    window = planned_ns // WINDOW_NS
    p99s = [np.quantile(late_us[window == number], 0.99) for number in np.unique(window)]
    return float(np.median(p99s))


MIN_STREAMS, MIN_TOKENS = 1, 4


def shrink_case(case: Case, fraction: float) -> Case:
    """Return a case with a fraction of its streams and of the tokens of each response."""
    return case._replace(
        streams=max(MIN_STREAMS, int(case.streams * fraction)),
        tokens=max(MIN_TOKENS, int(case.tokens * fraction)),
    )


def main() -> None:
    """Print the load that the endpoint serves in each case, and how late it sends."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument(
        "--share", type=float, default=1.0, help="fraction of the streams and of their tokens"
    )
    parser.add_argument("--only", default="", help="part of a case's name")
    args = rig.parse_arguments(parser, share=0.05)
    rows = [
        measure_case(name, shrink_case(case, args.share))
        for name, case in CASES.items()
        if args.only in name
    ]

    columns = [
        "load",
        "events/s",
        "events/CPU-s",
        "requests/CPU-s",
        "CPU",
        "late p50, µs",
        "p99",
        "usual p99",
        "worst",
    ]
    print(rig.format_table(columns, rows))


if __name__ == "__main__":
    main()
