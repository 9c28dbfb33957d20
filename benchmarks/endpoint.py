"""How much the embedded endpoint can carry, and how close to its plan it sends: `python benchmarks/endpoint.py`.

The reader is a bare epoll loop in this process that throws bytes away, so that the figures are the endpoint's own:
events per CPU-second of the server process, and real minus planned send from its own log. Everything stays on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.sim.server.embedded import Embedded, start
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import parse_log

END = b"0\r\n\r\n"
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


def body(tokens: int) -> bytes:
    """A small request that asks for exactly this many tokens."""
    value = {"model": "sim", "messages": [{"role": "user", "content": " tell me"}], "stream": True}
    value |= {"stream_options": {"include_usage": True}, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps(value).encode()


def drive(url: str, streams: int, tokens: int, rounds: int, gap_s: float) -> int:
    """`rounds` answers on each of `streams` connections, whose starts are `gap_s` apart; returns the bytes read."""
    host, port = url.removeprefix("http://").split(":")
    asked = body(tokens)
    request = REQUEST % (len(asked), asked)
    poll = select.epoll()
    socks: dict[int, socket.socket] = {}
    left: dict[int, int] = {}
    total = 0
    begun, opened, closed = time.monotonic(), 0, 0
    while closed < streams:
        if opened < streams and time.monotonic() >= begun + opened * gap_s:
            sock = socket.create_connection((host, int(port)))
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socks[sock.fileno()], left[sock.fileno()] = sock, rounds
            poll.register(sock.fileno(), select.EPOLLIN)
            sock.send(request)
            opened += 1
        for fd, _ in poll.poll(0.001 if opened < streams else 5.0):
            data = socks[fd].recv(1 << 20)
            total += len(data)
            if not data:
                raise SystemExit("the endpoint closed a connection")
            if data.endswith(END):
                left[fd] -= 1
                if left[fd]:
                    socks[fd].send(request)
                else:
                    poll.unregister(fd)
                    socks.pop(fd).close()
                    closed += 1
    poll.close()
    return total


def get(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        data: bytes = answer.read()
    return data


def started(options: Options) -> Embedded:
    """The endpoint, before everybody else's processes with --alone; children inherit what this process is."""
    if not rig.Alone.on:
        return start(options)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    try:
        return start(options)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def measure(name: str, options: Options, streams: int, tokens: int, rounds: int, gap_s: float = 0.0) -> str:
    """One line of the table. Of several processes only events and lateness are known, from the logs they leave."""
    several = options.cores > 1
    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/log"
        with started(msgspec.structs.replace(options, log=path if several else "")) as endpoint:
            before = json.loads(get(endpoint.url + "/_stats"))
            begun = time.monotonic()
            drive(endpoint.url, streams, tokens, rounds, gap_s)
            wall = time.monotonic() - begun
            after = json.loads(get(endpoint.url + "/_stats"))
            logs = [] if several else [parse_log(get(endpoint.url + "/_log"))]
        if several:
            paths = [path, *(f"{path}.{core}" for core in range(1, options.cores))]
            logs = [parse_log(Path(one).read_bytes()) for one in paths]
    late_us = np.concatenate([(log.sent_ns - log.planned_ns) / 1e3 for log in logs])
    late = ""
    if len(late_us) and not options.flood:
        p50, p99, worst = np.quantile(late_us, (0.5, 0.99, 1.0))
        usual = _usual_p99(np.concatenate([log.planned_ns for log in logs]), late_us)
        late = f"{p50:8.0f} {p99:8.0f} {usual:8.0f} {worst:9.0f}"
    if several:
        return f"{name:<34} {len(late_us) / wall:9.0f} {'':>12} {'':>12} {'':>6}  {late}"
    events, cpu = after["events"] - before["events"], after["cpu_s"] - before["cpu_s"]
    requests = after["requests"] - before["requests"]
    return f"{name:<34} {events / wall:9.0f} {events / cpu:12.0f} {requests / cpu:12.0f} {cpu / wall:6.2f}  {late}"


def _usual_p99(planned_ns: NDArray[np.int64], late_us: NDArray[np.float64]) -> float:
    """p99 of the median 100 ms: what is left when a host that is used by others holds the endpoint up now and then."""
    order = np.argsort(planned_ns, kind="stable")
    starts = np.unique(planned_ns[order] // 100_000_000, return_index=True)[1][1:]
    return float(np.median([np.quantile(part, 0.99) for part in np.split(late_us[order], starts)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=500, help="tokens per answer")
    parser.add_argument("--alone", action="store_true", help="real-time priority for the endpoint (root)")
    asked = parser.parse_args()
    tokens, rig.Alone.on = asked.tokens, asked.alone
    head = f"{'':<34} {'events/s':>9} {'events/CPU-s':>12} {'req/CPU-s':>12} {'CPU':>6}"
    print(f"{head}  {'late p50':>8} {'p99 us':>8} {'usual':>8} {'worst us':>9}")
    spread: dict[str, Any] = {"ttft": "normal:30ms,5ms", "log_events": "all"}
    print(measure("spread, 64 streams at 6 ms", Options(itl="6ms", **spread), 64, tokens, 1, 0.002))
    print(measure("spread, 256 streams at 10 ms", Options(itl="10ms", **spread), 256, tokens, 1, 0.0005))
    print(measure("spread, 512 streams at 8 ms", Options(itl="8ms", **spread), 512, tokens, 1, 0.0005))
    print(measure("spread, 256 streams, no log", Options(itl="10ms", ttft="normal:30ms,5ms"), 256, tokens, 1, 0.0005))
    print(measure("lockstep, 256 streams at 10 ms", Options(itl="10ms", lockstep=True, **spread), 256, tokens, 1))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("extends: gb300-vm\nserver: {emit_us: 0}\n")
        file.flush()
        physical: dict[str, Any] = {"log_events": "all"}
        vm, at_once = Options(preset="gb300-vm", **physical), Options(preset=file.name, **physical)
        print(measure("gb300-rack, 600 streams", Options(preset="gb300-rack", **physical), 600, tokens, 1, 0.002))
        print(measure("gb300-vm, 800 streams", vm, 800, tokens, 1, 0.002))
        print(measure("the same, iterations all at once", at_once, 800, tokens, 1, 0.002))
        print(measure("the same, four processes", msgspec.structs.replace(at_once, cores=4), 800, tokens, 1, 0.002))
    print(measure("as fast as it can, 64 streams", Options(itl="1us", ttft="1ms"), 64, tokens, 20))
    print(measure("short answers (4), 256 streams", Options(itl="0.1ms", ttft="1ms"), 256, 4, 40))
    print(measure("flood, 64 streams", Options(flood=True, ttft="1ms"), 64, tokens, 20))


if __name__ == "__main__":
    main()
