"""The endpoint as a process: its signals, its ready line, several processes behind one port, and the child of a run.

What is served is endpoint.py. Nothing here may touch a connection.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from loadgen.errors import Fault, Faults, TargetError
from loadgen.sim.server.endpoint import SimServer
from loadgen.sim.server.options import Options, from_json

if TYPE_CHECKING:
    from loadgen.sim.server.embedded import Embedded


def serve(options: Options, stdin: int = -1) -> int:
    """Run one endpoint in this process until SIGTERM, SIGINT, or the end of `stdin`; prints the ready line, one JSON
    object `{"url": ..., "pid": ...}`, on stdout. Returns the exit code."""
    others: list[Embedded] = []
    if options.cores > 1 and options.core == 0:
        options, others = _several(options)
    server = SimServer(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.stop)
    gc.freeze()  # what the start made lives on; connections and answers are free of cycles when they end
    print(msgspec.json.encode({"url": server.url, "pid": os.getpid()}).decode(), flush=True)
    try:
        server.run(stdin)
    finally:
        for other in others:
            other.stop()
        server.close()
    return 0


def _several(options: Options) -> tuple[Options, list[Embedded]]:
    """Start all processes of a port but the first, whose options come back; the kernel deals connections out."""
    from loadgen.sim.server.embedded import start

    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind((options.host, options.port))  # so that all get the same one
        except OSError as error:
            raise TargetError(f"cannot listen: {error}", f"{options.host}:{options.port}", "another --port") from None
        first = msgspec.structs.replace(options, port=held.getsockname()[1])
        others: list[Embedded] = []
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
    """SIGTERM to this process when the thread that started it ends (prctl(2)); Linux only, elsewhere nothing."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main() -> int:
    """The child of `embedded.start`: options are the first line of stdin, whose end is also the end of the parent."""
    if "--die-with-parent" in sys.argv:
        die_with_parent()
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 0
        line += byte
    try:
        return serve(from_json(bytes(line)), 0)
    except (Fault, Faults, OSError) as error:
        print(msgspec.json.encode({"error": str(error)}).decode(), flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
