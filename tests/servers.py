"""Simulated servers that tests share: most only need one that answers soon, and a start takes a quarter of a second."""

from __future__ import annotations

import urllib.request

from loadgen.sim.server.embedded import Embedded, start
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import SentRequests, parse_log

QUICK = Options(ttft="2ms", itl="0.2ms", log_bodies=True)

_running: dict[tuple[Options, int], Embedded] = {}


def shared(options: Options = QUICK, number: int = 0) -> Embedded:
    """A server for all tests of this process, with an empty log; of several alike, the one with this number.

    Not for tests that stop it, that read its counters, or whose faults depend on how many requests there were.
    """
    server = _running.get((options, number)) or start(options)
    _running[options, number] = server
    if options.log_bodies:
        log(server)
    return server


def log(server: Embedded) -> SentRequests:
    """What a server saw since it was last asked."""
    with urllib.request.urlopen(server.url + "/_log") as answer:
        return parse_log(answer.read())


def stop_all() -> None:
    while _running:
        _running.popitem()[1].stop()
