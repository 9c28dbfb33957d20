"""Limits that several processes of one host keep together: their state is a small file beside a lock file.

A process reads the file, asks its gate, and writes it back, all under the lock. Nobody waits for the lock before a
call: who does not get it at once tries again a little later. Instants are those of the host's monotonic clock, which
all its processes share.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import WrongUse

if TYPE_CHECKING:
    from .gate import Gate

log = logging.getLogger("loadgen_sdk")

RETRY_NS = 500_000  # before the next try for the lock
LOCK_WAIT_S = 0.05  # the longest wait for the lock at the end of a call


class SharedLimits:
    """The file of one Throttle. One file per key and model (`PATH.NAME`), and one lock file each (`PATH.NAME.lock`)."""

    retry_ns = RETRY_NS

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import filelock
        except ImportError:
            raise WrongUse("limits shared by processes need the package filelock", "pip install filelock") from None
        self._path = Path(path).absolute()
        self._make_lock, self._timed_out = filelock.FileLock, filelock.Timeout
        self._locks: dict[str, Any] = {}
        self._warned = False
        if not self._path.parent.is_dir() or not os.access(self._path.parent, os.W_OK):
            raise WrongUse(
                f"cannot write to {self._path.parent}", "give a path in a folder that all processes can write"
            )
        os.register_at_fork(after_in_child=self._locks.clear)  # a child opens locks of its own

    def lane_name(self, key_values: tuple[str, ...], model: str) -> str:
        """The name of a lane in the file's name and in logs: the model, and a hash in which no key can be read."""
        digest = hashlib.blake2b("\0".join(key_values).encode(), digest_size=6).hexdigest()
        readable = "".join(char if char.isalnum() or char in "-." else "_" for char in model)[:60]
        return f"{readable}-{digest}" if readable else digest

    @contextmanager
    def state_of(self, name: str, gate: Gate, now: int, *, wait: bool = False) -> Iterator[bool]:
        """The gate with the state of all processes, which is written back at the end. False: the lock is not free.

        A file that cannot be read or written is logged once; the process then keeps the limits by itself.
        """
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = self._make_lock(f"{self._path}.{name}.lock", thread_local=False)
        path = Path(f"{self._path}.{name}")
        try:
            lock.acquire(timeout=LOCK_WAIT_S if wait else 0, poll_interval=0.0005)
        except self._timed_out:
            yield False
            return
        except OSError as error:
            self._warn(error)
            yield True
            return
        try:
            try:
                if path.exists() and (data := path.read_bytes()):
                    gate.restore(msgspec.msgpack.decode(data), now)
            except (OSError, ValueError, TypeError) as error:  # a damaged file starts anew
                self._warn(error)
            yield True
            try:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.write(msgspec.msgpack.encode(gate.state()))
            except OSError as error:
                self._warn(error)
        finally:
            lock.release()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("limits are not shared with other processes: %s: %s", self._path, error)
