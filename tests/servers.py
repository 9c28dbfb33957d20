"""Simulated servers shared by tests.

Most tests only need a server that responds quickly, and starting one takes a quarter of a second.
"""

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
    """Start a server like `embedded.start`, but on Linux as a fork of `server_copies`.

    Tests of the server process itself must not use it.
    """
    if not sys.platform.startswith("linux"):
        return embedded.start(options)
    if not _copies:
        _copies.append(Copies())
    child: Any = _copies[0].make()
    return embedded.wait_until_ready(child, options)


def shared(options: Options = QUICK, number: int = 0) -> EmbeddedServer:
    """Return a server that all tests of this process share, with an empty log.

    `number` selects one of several servers with the same options.

    Tests must not use it if they stop the server, read its counters or depend on the number of
    earlier requests.
    """
    server = _running.get((options, number)) or start(options)
    _running[options, number] = server
    if options.log_bodies:
        log(server)
    return server


def log(server: EmbeddedServer) -> SentRequests:
    """Return what a server has logged since the last call."""
    with urllib.request.urlopen(server.url + "/_log") as answer:
        return parse_log(answer.read())


def stop_all() -> None:
    while _running:
        _running.popitem()[1].stop()
    while _copies:
        _copies.pop().stop()
