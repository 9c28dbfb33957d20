"""Simulated servers that tests share: most only need one that answers soon, and a start takes a quarter of a second."""

from __future__ import annotations

import sys
import urllib.request
from typing import Any

from server_copies import Copies

from loadgen.sim.server import embedded
from loadgen.sim.server.embedded import EmbeddedServer
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import SentRequests, parse_log

QUICK = Options(ttft="2ms", itl="0.2ms", log_bodies=True)

_copies: list[Copies] = []
_running: dict[tuple[Options, int], EmbeddedServer] = {}


def start(options: Options = Options()) -> EmbeddedServer:  # noqa: B008 - nobody changes it
    """As `embedded.start`, from a copy of a process that has imported the server where this system has what it takes.

    Not for tests of the process itself.
    """
    if not sys.platform.startswith("linux"):
        return embedded.start(options)
    if not _copies:
        _copies.append(Copies())
    child: Any = _copies[0].make()
    return embedded.wait_until_ready(child, options)


def shared(options: Options = QUICK, number: int = 0) -> EmbeddedServer:
    """A server for all tests of this process, with an empty log; of several alike, the one with this number.

    Not for tests that stop it, that read its counters, or whose faults depend on how many requests there were.
    """
    server = _running.get((options, number)) or start(options)
    _running[options, number] = server
    if options.log_bodies:
        log(server)
    return server


def log(server: EmbeddedServer) -> SentRequests:
    """What a server saw since it was last asked."""
    with urllib.request.urlopen(server.url + "/_log") as answer:
        return parse_log(answer.read())


def stop_all() -> None:
    while _running:
        _running.popitem()[1].stop()
    while _copies:
        _copies.pop().stop()
