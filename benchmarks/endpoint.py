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
from typing import Any

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.sim.server.embedded import EmbeddedServer, start
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import parse_log

SPREAD = {"ttft": "normal:30ms,5ms", "log_events": "all"}
VM = {"preset": "gb300-vm", "log_events": "all"}
AT_ONCE = VM | {"preset": "extends: gb300-vm\nserver: {emit_us: 0}\n"}
CASES: dict[str, tuple[dict[str, Any], int, int, int, float]] = {
    # options of the endpoint; streams, tokens of an answer, answers of a stream, seconds between
    # the starts of two
    "spread, 64 streams at 6 ms": (SPREAD | {"itl": "6ms"}, 64, 500, 1, 0.002),
    "spread, 256 streams at 10 ms": (SPREAD | {"itl": "10ms"}, 256, 500, 1, 0.0005),
    "spread, 512 streams at 8 ms": (SPREAD | {"itl": "8ms"}, 512, 500, 1, 0.0005),
    "spread, 256 streams, no log": (
        SPREAD | {"itl": "10ms", "log_events": "none"},
        256,
        500,
        1,
        0.0005,
    ),
    "lockstep, 256 streams at 10 ms": (
        SPREAD | {"itl": "10ms", "lockstep": True},
        256,
        500,
        1,
        0.0,
    ),
    "gb300-rack, 600 streams": (VM | {"preset": "gb300-rack"}, 600, 500, 1, 0.002),
    "gb300-vm, 800 streams": (VM, 800, 500, 1, 0.002),
    "the same, iterations all at once": (AT_ONCE, 800, 500, 1, 0.002),
    "the same, four processes": (AT_ONCE | {"cores": 4}, 800, 500, 1, 0.002),
    "as fast as it can, 64 streams": ({"itl": "1us", "ttft": "1ms"}, 64, 500, 20, 0.0),
    "short answers (4), 256 streams": ({"itl": "0.1ms", "ttft": "1ms"}, 256, 4, 40, 0.0),
    "flood, 64 streams": ({"flood": True, "ttft": "1ms"}, 64, 500, 20, 0.0),
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


def read_streams(url: str, streams: int, tokens: int, rounds: int, gap_s: float) -> int:
    """Read `rounds` responses on each of `streams` connections; return the bytes read.

    Connections open `gap_s` apart.
    """
    host, port = url.removeprefix("http://").split(":")
    payload = request_body(tokens)
    request = REQUEST % (len(payload), payload)
    epoll = select.epoll()
    socks: dict[int, socket.socket] = {}
    rounds_left: dict[int, int] = {}
    total_bytes = 0
    started_s, opened, closed = time.monotonic(), 0, 0
    while closed < streams:
        if opened < streams and time.monotonic() >= started_s + opened * gap_s:
            sock = socket.create_connection((host, int(port)))
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socks[sock.fileno()], rounds_left[sock.fileno()] = sock, rounds
            epoll.register(sock.fileno(), select.EPOLLIN)
            sock.send(request)
            opened += 1
        for fd, _ in epoll.poll(0.001 if opened < streams else 5.0):
            data = socks[fd].recv(1 << 20)
            total_bytes += len(data)
            if not data:
                raise SystemExit("the endpoint closed a connection")
            if data.endswith(END):
                rounds_left[fd] -= 1
                if rounds_left[fd]:
                    socks[fd].send(request)
                else:
                    epoll.unregister(fd)
                    socks.pop(fd).close()
                    closed += 1
    epoll.close()
    return total_bytes


def start_endpoint(options: Options) -> EmbeddedServer:
    """Start the endpoint, with `--alone` at a higher priority that its children inherit."""
    if not rig.RealtimePriority.is_enabled:
        return start(options)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    try:
        return start(options)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def measure_case(
    name: str, options: dict[str, Any], streams: int, tokens: int, rounds: int, gap_s: float
) -> list[str]:
    """Return the row of one case.

    With several processes only events and lateness are known, from the logs of the processes.
    """
    processes = options.get("cores", 1)
    with tempfile.TemporaryDirectory() as scratch:
        log_paths = [f"{scratch}/log", *(f"{scratch}/log.{core}" for core in range(1, processes))]
        if str(options.get("preset")).startswith("extends"):
            preset_path = Path(scratch) / "own.yaml"
            preset_path.write_text(options["preset"])
            options = options | {"preset": str(preset_path)}
        with start_endpoint(Options(**options, log=log_paths[0])) as endpoint:

            def run_client() -> dict[str, Any]:
                started_s = time.monotonic()
                read_streams(endpoint.url, streams, tokens, rounds, gap_s)
                return {"wall_s": time.monotonic() - started_s}

            result = rig.measure_with_server(endpoint.url, run_client)
        logs = [parse_log(Path(path).read_bytes()) for path in log_paths]
    late_us = np.concatenate([(log.sent_ns - log.planned_ns) / 1e3 for log in logs])
    late_cells = [""] * 4
    if len(late_us) and not options.get("flood"):
        typical_p99 = _typical_p99(np.concatenate([log.planned_ns for log in logs]), late_us)
        p50, p99, max_us = np.quantile(late_us, (0.5, 0.99, 1.0))
        late_cells = [f"{value:,.0f}" for value in (p50, p99, typical_p99, max_us)]
    if processes > 1:
        return [name, f"{len(late_us) / result['wall_s']:,.0f}", "", "", "", *late_cells]
    rates_per_cpu_s = [
        f"{result[counter] / result['server_cpu_s']:,.0f}"
        for counter in ("server_events", "server_requests")
    ]
    return [
        name,
        f"{result['server_events'] / result['wall_s']:,.0f}",
        *rates_per_cpu_s,
        f"{result['server_share']:.2f}",
        *late_cells,
    ]


def _typical_p99(planned_ns: NDArray[np.int64], late_us: NDArray[np.float64]) -> float:
    """Return the p99 of the median 100 ms.

    It ignores the moments in which other users of a shared host delay the endpoint.
    """
    order = np.argsort(planned_ns, kind="stable")
    starts = np.unique(planned_ns[order] // 100_000_000, return_index=True)[1][1:]
    return float(
        np.median([np.quantile(window, 0.99) for window in np.split(late_us[order], starts)])
    )


def main() -> None:
    """Print what the endpoint carries in each case."""
    parser = rig.create_parser(__doc__, alone=True)
    parser.add_argument("--share", type=float, default=1.0, help="of the streams and their tokens")
    parser.add_argument("--only", default="", help="part of a case's name")
    args = rig.parse_arguments(parser, share=0.05)
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
    rows = [
        measure_case(
            name,
            options,
            max(1, int(streams * args.share)),
            max(4, int(tokens * args.share)),
            rounds,
            gap_s,
        )
        for name, (options, streams, tokens, rounds, gap_s) in CASES.items()
        if args.only in name
    ]
    print(rig.format_table(columns, rows))


if __name__ == "__main__":
    main()
