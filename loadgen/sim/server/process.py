"""The endpoint as a process: signals, the ready line, several processes on one port, and the child of a run.

endpoint.py serves the requests. Nothing here may touch a connection.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.errors import CombinedError, LoadgenError, TargetError, codes
from loadgen.sim.server.endpoint import SimServer
from loadgen.sim.server.options import Options

if TYPE_CHECKING:
    from loadgen.sim.server.embedded import EmbeddedServer


def serve(options: Options, stdin: int = -1) -> int:
    """Run one endpoint in this process until SIGTERM, SIGINT, SIGHUP, or the end of `stdin`. Returns the exit code.

    Prints the ready line on stdout: one JSON object `{"url": ..., "pid": ...}`.
    """
    others: list[EmbeddedServer] = []
    if options.cores > 1 and options.core == 0:
        options, others = _several(options)
    server = SimServer(options)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if (
            number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ):  # as `nohup` has it
            signal.signal(number, server.stop)
    gc.freeze()  # objects of the start live on; finished connections and responses have no cycles
    print(msgspec.json.encode({"url": server.url, "pid": os.getpid()}).decode(), flush=True)
    try:
        server.run(stdin)
    finally:
        for other in others:
            other.stop()
        server.close()
    return 0


def _several(options: Options) -> tuple[Options, list[EmbeddedServer]]:
    """Start all processes of a port except the first. Returns the first one's options, and the others.

    The kernel distributes the connections.
    """
    from loadgen.sim.server.embedded import start

    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            reserved.bind(
                (options.host, options.port)
            )  # reserve the port, so that all processes use the same one
        except OSError as error:
            raise TargetError(
                "cannot_listen",
                f"cannot listen: {error}",
                f"{options.host}:{options.port}",
                "another --port",
            ) from None
        first = msgspec.structs.replace(options, port=reserved.getsockname()[1])
        others: list[EmbeddedServer] = []
        try:
            for core in range(1, options.cores):
                log = f"{options.log}.{core}" if options.log else ""
                others.append(start(msgspec.structs.replace(first, core=core, log=log)))
        except BaseException:
            for other in others:
                other.stop()
            raise
    return first, others


def die_with_parent() -> None:
    """Ask for SIGTERM when the thread that started this process ends (prctl(2)). Linux only; else nothing."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main() -> int:
    """The child of `embedded.start`. The first line of stdin has the options; the end of stdin ends the child."""
    if "--die-with-parent" in sys.argv:
        die_with_parent()
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return 0
    try:
        return serve(msgspec.json.decode(line, type=Options), 0)
    except (LoadgenError, CombinedError, OSError) as error:
        code = "host_refused" if isinstance(error, OSError) else codes(error)[0]
        with suppress(BrokenPipeError):  # who started it has ended
            print(msgspec.json.encode({"error": str(error), "code": code}).decode(), flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
