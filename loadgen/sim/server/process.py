"""The simulated server as a process: signals, the ready line, and several processes on one port."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.errors import CombinedError, LoadgenError, TargetError, codes
from loadgen.sim.server.endpoint import SimServer
from loadgen.sim.server.options import Options

if TYPE_CHECKING:
    from loadgen.sim.server.embedded import EmbeddedServer

PR_SET_PDEATHSIG = 1  # see prctl(2)
STDIN = 0


def serve(options: Options, stdin: int = -1) -> int:
    """Run one server in this process until it is stopped, and return the exit code.

    With the option `cores`, the first process starts the others, which share its port. When the
    server listens, it prints one line of JSON on stdout, `{"url": ..., "pid": ...}`. It ends at
    SIGTERM, SIGINT or SIGHUP, or when the file descriptor `stdin` ends.
    """
    other_servers: list[EmbeddedServer] = []
    if options.cores > 1 and options.core == 0:
        with _reserved_port(options) as options_with_port:
            other_servers = _start_other_processes(options_with_port)
        options = options_with_port
    server = SimServer(options)
    _stop_on_signals(server)
    gc.freeze()  # these objects are never freed; later ones form no cycles
    print(msgspec.json.encode({"url": server.url, "pid": os.getpid()}).decode(), flush=True)
    try:
        server.run(stdin)
    finally:
        for other in other_servers:
            other.stop()
        server.close()
    return 0


def _stop_on_signals(server: SimServer) -> None:
    """Stop the server at a termination signal. SIGHUP stays ignored under `nohup`."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, server.stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, server.stop)


@contextmanager
def _reserved_port(options: Options) -> Iterator[Options]:
    """Reserve a port for several processes within a `with` block, and yield the options with it.

    With port 0, the system chooses a free port. The socket of this function only keeps it until the
    processes listen on it. Raises TargetError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((options.host, options.port))
        except OSError as error:
            raise TargetError(
                "cannot_listen",
                f"cannot listen: {error}",
                f"{options.host}:{options.port}",
                "another --port",
            ) from None
        yield msgspec.structs.replace(options, port=sock.getsockname()[1])


def _start_other_processes(options: Options) -> list[EmbeddedServer]:
    """Start all processes of a server but the first, and return when they listen.

    They share its port, and the kernel distributes the connections. Each one has its index (`core`)
    and a log file of its own. If one does not start, the others are stopped.
    """
    from loadgen.sim.server.embedded import start

    servers: list[EmbeddedServer] = []
    try:
        for core in range(1, options.cores):
            log = f"{options.log}.{core}" if options.log else ""
            servers.append(start(msgspec.structs.replace(options, core=core, log=log)))
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def die_with_parent() -> None:
    """Ask for SIGTERM when the thread that started this process ends. Does so on Linux only."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    """Run the child process of `embedded.start` and return its exit code.

    The first line of stdin has the options as JSON, and the end of stdin ends the server. An error
    is printed as one line of JSON, which the parent process reads.
    """
    if "--die-with-parent" in sys.argv:
        die_with_parent()
    with open(STDIN, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return 0
    try:
        return serve(msgspec.json.decode(line, type=Options), STDIN)
    except (LoadgenError, CombinedError, OSError) as error:
        code = "host_refused" if isinstance(error, OSError) else codes(error)[0]
        with suppress(BrokenPipeError):  # the parent has ended
            print(msgspec.json.encode({"error": str(error), "code": code}).decode(), flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
