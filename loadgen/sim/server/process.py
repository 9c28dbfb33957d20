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
STDIN_FD = 0
ERROR_EXIT_CODE = 2


def serve(options: Options, stdin_fd: int = -1) -> int:
    """Run one server in this process until it is stopped, and return the exit code.

    A server may consist of several processes that share a port (option `cores`). The first of them
    starts the others. When the server listens, it prints one line of JSON on stdout, `{"url": ...,
    "pid": ...}`. It ends at SIGTERM, SIGINT or SIGHUP, or when the file with the descriptor
    `stdin_fd` ends.
    """
    is_first_process = options.process_index == 0
    if options.cores == 1 or not is_first_process:
        return _serve_alone(options, stdin_fd)

    other_processes: list[EmbeddedServer] = []
    try:
        # The port is reserved until the other processes listen on it, so that no other program
        # takes it.
        with _reserve_port(options) as shared_options:
            other_processes = _start_other_processes(shared_options)
        return _serve_alone(shared_options, stdin_fd)
    finally:
        for process in other_processes:
            process.stop()


def _serve_alone(options: Options, stdin_fd: int) -> int:
    """Run a server in this process until it is stopped, without regard to other processes."""
    server = SimServer(options)
    _stop_on_signals(server)
    gc.freeze()  # these objects are never freed; later ones form no cycles
    print(msgspec.json.encode({"url": server.url, "pid": os.getpid()}).decode(), flush=True)

    try:
        server.run(stdin_fd)
    finally:
        server.close()

    return 0


def _stop_on_signals(server: SimServer) -> None:
    """Stop the server at a termination signal. SIGHUP stays ignored under `nohup`."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, server.stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, server.stop)


@contextmanager
def _reserve_port(options: Options) -> Iterator[Options]:
    """Reserve a port for several processes within a `with` block, and yield the options with it.

    With port 0, the system chooses a free port. A socket is bound to the port, so that no other
    program gets it before the processes listen on it. They can, because SO_REUSEPORT allows several
    sockets on one port. The socket itself does not listen, and gets no connections.

    Raises TargetError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as placeholder_socket:
        placeholder_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            placeholder_socket.bind((options.host, options.port))
        except OSError as error:
            raise TargetError(
                "cannot_listen",
                f"cannot listen: {error}",
                f"{options.host}:{options.port}",
                "another --port",
            ) from None

        port = placeholder_socket.getsockname()[1]
        yield msgspec.structs.replace(options, port=port)


def _start_other_processes(options: Options) -> list[EmbeddedServer]:
    """Start all processes of a server but the first, and return when they listen.

    They share its port, and the kernel distributes the connections. Each one has its index and a
    log file of its own. If one does not start, the others are stopped.
    """
    from loadgen.sim.server.embedded import start

    process_count = options.cores
    servers: list[EmbeddedServer] = []
    try:
        for process_index in range(1, process_count):
            log = f"{options.log}.{process_index}" if options.log else ""
            process_options = msgspec.structs.replace(options, process_index=process_index, log=log)
            servers.append(start(process_options))
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
    is printed as one line of JSON, which the parent process reads, and gives the exit code 2. With
    the argument `--die-with-parent`, the process also ends when its parent dies.
    """
    if "--die-with-parent" in sys.argv:
        die_with_parent()

    with open(STDIN_FD, "rb", buffering=0, closefd=False) as stdin:
        options_line = stdin.readline()

    if not options_line:
        return 0  # the parent has ended

    try:
        options = msgspec.json.decode(options_line, type=Options)
        return serve(options, STDIN_FD)
    except OSError as error:
        # The system does not let this host run the server, for example for lack of sockets.
        _report_error(error, "host_refused")
    except (LoadgenError, CombinedError) as error:
        # Several errors may be combined. The parent gets the text of all, and the first code.
        first_code = codes(error)[0]
        _report_error(error, first_code)

    return ERROR_EXIT_CODE


def _report_error(error: Exception, code: str) -> None:
    """Print an error for the parent process, with the code that classifies it."""
    message = msgspec.json.encode({"error": str(error), "code": code}).decode()
    with suppress(BrokenPipeError):  # the parent has ended
        print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
