"""Limits that several processes keep together: their state is in a small file of this host, or in Redis.

A process takes the state, asks its gate, and gives it back changed; meanwhile it has it alone. Nobody waits for the
state before a call: who does not get it at once tries again a little later. Instants are of one clock that all have:
the host's monotonic clock for a file, the clock of the server for Redis.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import WrongUse

if TYPE_CHECKING:
    from .gate import Gate

log = logging.getLogger("loadgen_sdk")

LOCK_WAIT_S = 0.05  # the longest wait for the state at the end of a call
DOWN_NS = 5_000_000_000  # a store that failed is not asked again before
REDIS_TIMEOUT_S = 0.5
REDIS_LOCK_MS = 2000  # a process that dies with the state in its hands holds up the others no longer


class FileStore:
    """One file per key and model (`PATH.NAME`), and one lock file each (`PATH.NAME.lock`)."""

    is_remote = False
    retry_ns = 500_000  # before the next try for the state

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import filelock
        except ImportError:
            raise WrongUse(
                "not_installed", "limits shared by processes need the package filelock", "pip install filelock"
            ) from None
        self._path = Path(path).absolute()
        self._filelock = filelock
        self._locks: dict[str, Any] = {}
        self.errors: tuple[type[Exception], ...] = (OSError,)
        if not self._path.parent.is_dir() or not os.access(self._path.parent, os.W_OK):
            raise WrongUse(
                "unwritable_file",
                f"cannot write to {self._path.parent}",
                "give a path in a folder that all processes can write",
            )
        os.register_at_fork(after_in_child=self._locks.clear)  # a child opens locks of its own

    def __str__(self) -> str:
        return str(self._path)

    def take(self, name: str, wait: bool) -> tuple[bytes, int] | None:
        """The state of this key and model, and the time. None: another process has it."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = self._filelock.FileLock(f"{self._path}.{name}.lock", thread_local=False)
        try:
            lock.acquire(timeout=LOCK_WAIT_S if wait else 0, poll_interval=0.0005)
        except self._filelock.Timeout:
            return None
        path = Path(f"{self._path}.{name}")
        try:
            return path.read_bytes() if path.exists() else b"", monotonic_ns()
        except OSError:
            lock.release()
            raise

    def give_back(self, name: str, state: bytes, kept_ns: int) -> None:
        try:
            path = f"{self._path}.{name}"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(state)
        finally:
            self._locks[name].release()


class RedisStore:
    """One key of Redis per key and model (`loadgen_sdk:NAME:...`), and one beside it while a process has the state.

    It takes two round trips a call, so it is never asked in an event loop. Redis forgets a state that nobody needs.
    """

    is_remote = True
    retry_ns = 2_000_000

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError:
            raise WrongUse(
                "not_installed", "limits shared through Redis need the package redis", "pip install redis"
            ) from None
        address, _, self._name = url.partition("#")
        try:
            self._redis: Any = redis.Redis.from_url(
                address, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
            )
        except ValueError as error:
            raise WrongUse(
                "invalid_url", f"shared={redacted(url)!r}: {error}", 'shared="redis://HOST:6379/0#NAME"'
            ) from None
        self._set_if_mine = self._redis.register_script(_SET_IF_MINE)
        self._where = redacted(url)
        self._mine: dict[str, bytes] = {}  # proof that this process has the state of a name
        self.errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)

    def __str__(self) -> str:
        return self._where

    def take(self, name: str, wait: bool) -> tuple[bytes, int] | None:
        """As of `FileStore`. With `wait` it tries a few times."""
        key, mine = self._key(name), secrets.token_bytes(8)
        deadline = monotonic_ns() + (int(LOCK_WAIT_S * 1e9) if wait else 0)
        while True:
            steps = self._redis.pipeline(transaction=False)
            steps.set(f"{key}:taken", mine, nx=True, px=REDIS_LOCK_MS).get(key).time()
            taken, state, (seconds, microseconds) = steps.execute()
            if taken:
                self._mine[name] = mine
                return state or b"", (seconds * 1_000_000 + microseconds) * 1000
            if monotonic_ns() >= deadline:
                return None

    def give_back(self, name: str, state: bytes, kept_ns: int) -> None:
        key = self._key(name)
        self._set_if_mine(keys=[key, f"{key}:taken"], args=[self._mine.pop(name), state, max(1, kept_ns // 1_000_000)])

    def _key(self, name: str) -> str:
        return f"loadgen_sdk:{self._name}:{{{name}}}"  # in braces: both keys lie on one node of a cluster


_SET_IF_MINE = """
if redis.call('GET', KEYS[2]) == ARGV[1] then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
    redis.call('DEL', KEYS[2])
end
"""


def redacted(url: str) -> str:
    """The URL without user and password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class SharedLimits:
    """The limits of one Throttle in a store. `offset_ns`: from this process's monotonic clock to that of the store."""

    def __init__(self, where: Any) -> None:
        url = where if isinstance(where, str) else ""
        is_redis = url.startswith(("redis://", "rediss://", "unix://"))
        self._store: FileStore | RedisStore = RedisStore(url) if is_redis else FileStore(where)
        self.is_remote, self.retry_ns = self._store.is_remote, self._store.retry_ns
        self.offset_ns = 0
        self._down_until = 0
        self._warned = False

    def lane_name(self, key_values: tuple[str, ...], model: str) -> str:
        """The name of a key and model in the store and in logs: the model, and a hash in which no key can be read."""
        digest = hashlib.blake2b("\0".join(key_values).encode(), digest_size=6).hexdigest()
        readable = "".join(char if char.isalnum() or char in "-." else "_" for char in model)[:60]
        return f"{readable}-{digest}" if readable else digest

    @contextmanager
    def state_of(self, name: str, gate: Gate, *, wait: bool = False) -> Iterator[int | None]:
        """The gate with the state of all processes, which is given back at the end. Yields the time in ns.

        None instead: another process has the state. A store that fails is logged once; this process then keeps the
        limits by itself, and asks again a little later.
        """
        store, before = self._store, monotonic_ns()
        if before < self._down_until:
            yield before + self.offset_ns
            return
        try:
            taken = store.take(name, wait)
        except store.errors as error:
            self._failed(error)
            yield before + self.offset_ns
            return
        if taken is None:
            yield None
            return
        state, now = taken
        self.offset_ns = now - monotonic_ns()
        try:
            if state:
                gate.restore(msgspec.msgpack.decode(state), now)
        except (ValueError, TypeError) as error:  # a damaged state starts anew
            self._warn(error)
        try:
            yield now
        finally:
            try:
                store.give_back(name, msgspec.msgpack.encode(gate.state()), gate.remembered_ns)
            except store.errors as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._down_until = monotonic_ns() + DOWN_NS if self.is_remote else 0
        self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("limits are not shared with other processes: %s: %s", self._store, error)
