"""Fork simulated servers from a process that has already imported the server.

Starting Python with its imports takes 0.2 CPU-seconds; a fork takes a tenth of that. Tests of the
server process itself start a real one.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

MESSAGE = 1 << 18


class Copy:
    """A copy, with the face of `Popen` with two pipes."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid, self.stdin, self.stdout = pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self._ended = os.pidfd_open(pid)  # its parent waits for it only when it makes the next one

    def wait(self, timeout: float | None = None) -> None:
        """Mark the copy as ended, for whatever reason."""
        if self._ended >= 0:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a copy", timeout or 0)
            os.close(self._ended)
            self._ended = -1

    def kill(self) -> None:
        if self._ended >= 0:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)


class Copies:
    """The process that makes the copies; it ends with this one."""

    def __init__(self) -> None:
        self._asking, requests_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with requests_socket:
            command = [sys.executable, "-P", __file__, "--die-with-parent"]
            self._maker = subprocess.Popen(command, stdin=requests_socket, start_new_session=True)

    def make(self) -> Copy:
        """Fork a copy that has the directory, environment and stderr of this process."""
        down, up = os.pipe(), os.pipe()
        now = json.dumps([os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(self._asking, [now], [down[0], up[1], 2])
        os.close(down[0])
        os.close(up[1])
        return Copy(int(self._asking.recv(99)), down[1], up[0])

    def stop(self) -> None:
        self._asking.close()
        self._maker.wait()


def main() -> None:
    """Make copies until nobody asks any more."""
    from loadgen.sim.server import process

    process.die_with_parent()
    gc.freeze()
    requests_socket = socket.socket(fileno=os.dup(0))
    pids: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(requests_socket, MESSAGE, 3)
        pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
        if not message:
            break
        pid = os.fork()
        if not pid:
            requests_socket.close()
            os.setsid()
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            folder, environment = json.loads(message)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            time.tzset()
            code = process.main()
            sys.stdout.flush()
            os._exit(code)
        for file in files:
            os.close(file)
        pids.add(pid)
        requests_socket.send(str(pid).encode())
    for pid in pids:  # that nobody has stopped
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
