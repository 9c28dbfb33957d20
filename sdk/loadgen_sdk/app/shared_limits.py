"""Limits that several processes keep together: their state is in a small file of this host, or in Redis.

One step before a call that need not wait, two for one that does, and one after it. Each is some input and output, so an
event loop has them done in a thread. How long to wait is known after the first; nobody polls.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from time import monotonic_ns
from typing import Any, Protocol, TypeVar

import msgspec

from ..errors import WrongUse
from .gate import Limits
from .redis_script import SCRIPT
from .shared_gate import Grant, SharedGate

T = TypeVar("T")
log = logging.getLogger("loadgen_sdk")

LOCK_WAIT_S = 0.5  # a process that holds the file longer than this is stopped, or dead on a broken file system
LOCK_POLL_S = 0.0002
DOWN_NS = 5_000_000_000  # a store that failed is not asked again before
REDIS_TIMEOUT_S = 0.5


class Store(Protocol):
    """Where the state is. `name` is of a key and model. Each step may raise one of `errors`."""

    errors: tuple[type[Exception], ...]

    def enter(self, name: str, ticket: str, tokens: float, output: float) -> Grant | int:
        """The grant for the process with this ticket, or the ns to wait before it asks again."""

    def correct(self, name: str, grant: Grant, tokens: float, output: float | None) -> None: ...

    def cancel(self, name: str, ticket: str) -> None: ...

    def pause(self, name: str, pause_ns: int) -> None: ...


class FileStore:
    """One file per key and model (`PATH.NAME`), which a process locks while it reads and writes it."""

    def __init__(self, path: str | os.PathLike[str], limits: Limits) -> None:
        self._path, self._limits = writable(path), limits
        self.errors: tuple[type[Exception], ...] = (OSError,)

    def __str__(self) -> str:
        return str(self._path)

    def enter(self, name: str, ticket: str, tokens: float, output: float) -> Grant | int:
        def step(gate: SharedGate, now: int) -> Grant | int:
            answer = gate.enter(now, ticket, tokens, output)
            return answer if isinstance(answer, Grant) else answer - now

        return self._step(name, step)

    def correct(self, name: str, grant: Grant, tokens: float, output: float | None) -> None:
        self._step(name, lambda gate, _: gate.correct(grant, tokens, output))

    def cancel(self, name: str, ticket: str) -> None:
        self._step(name, lambda gate, _: gate.cancel(ticket))

    def pause(self, name: str, pause_ns: int) -> None:
        self._step(name, lambda gate, now: gate.pause(now, pause_ns))

    def _step(self, name: str, step: Callable[[SharedGate, int], T]) -> T:
        with locked_file(f"{self._path}.{name}") as file:
            gate, now = SharedGate(self._limits), monotonic_ns()
            if old := file.read():
                try:
                    gate.restore(msgspec.msgpack.decode(old), now)
                except (ValueError, TypeError, LookupError, AttributeError) as error:
                    log.warning(
                        "limits are not shared with other processes: %s is damaged: %s",
                        self._path,
                        error,
                    )
                    gate = SharedGate(self._limits)
            answer = step(gate, now)
            new = msgspec.msgpack.encode(gate.state())
            file.seek(0)
            file.write(new)
            file.truncate(len(new))
            return answer


def writable(path: str | os.PathLike[str]) -> Path:
    """The path of a file that processes share. Raises WrongUse for a folder that cannot be written."""
    found = Path(path).absolute()
    if not found.parent.is_dir() or not os.access(found.parent, os.W_OK):
        hint = "give a path in a folder that all processes can write"
        raise WrongUse("unwritable_file", f"cannot write to {found.parent}", hint)
    return found


@contextmanager
def locked_file(path: str) -> Iterator[FileIO]:
    """The file, made if it is not there, locked against other processes. Raises OSError."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has locked it for {LOCK_WAIT_S} s"
                    ) from None
                time.sleep(LOCK_POLL_S)
        try:
            yield file
        finally:  # closing it is not enough: a process that was forked meanwhile has it open as well
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)


class RedisStore:
    """One key of Redis per key and model (`loadgen_sdk:NAME:...`), which a script there reads and writes: one round
    trip a step. Redis forgets a state that nobody needs.
    """

    def __init__(self, url: str, limits: Limits, kept_ns: int) -> None:
        self._redis, self._name, self.errors = redis_client(url, "limits")
        self._script = self._redis.register_script(SCRIPT)
        self._where, self._rules, self._kept_ms = (
            redacted(url),
            _rules(limits),
            max(1, kept_ns // 1_000_000),
        )

    def __str__(self) -> str:
        return self._where

    def enter(self, name: str, ticket: str, tokens: float, output: float) -> Grant | int:
        granted, number = self._step(name, "enter", ticket, tokens, output)
        return Grant(int(number), tokens, output) if granted else int(number) * 1000

    def correct(self, name: str, grant: Grant, tokens: float, output: float | None) -> None:
        output = min(tokens, grant.output) if output is None else output
        self._step(name, "correct", grant.at, grant.tokens, grant.output, tokens, output)

    def cancel(self, name: str, ticket: str) -> None:
        self._step(name, "cancel", ticket)

    def pause(self, name: str, pause_ns: int) -> None:
        self._step(name, "pause", pause_ns // 1000)

    def _step(self, name: str, *arguments: Any) -> Any:
        step, *rest = arguments
        return self._script(
            keys=[f"loadgen_sdk:{self._name}:{name}"],
            args=[step, self._rules, self._kept_ms, *rest],
        )


def is_redis(where: Any) -> bool:
    return isinstance(where, str) and where.startswith(("redis://", "rediss://", "unix://"))


def redis_client(url: str, what: str) -> tuple[Any, str, tuple[type[Exception], ...]]:
    """A client of the package redis for `shared=`, the NAME behind #, and its errors. Raises WrongUse."""
    try:
        import redis
    except ImportError:
        problem = f"{what} shared through Redis: the package redis is missing"
        raise WrongUse("not_installed", problem, "pip install redis") from None
    address, _, name = url.partition("#")
    try:
        client = redis.Redis.from_url(
            address, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        )
    except ValueError as error:
        problem = f"shared={redacted(url)!r}: {error}"
        raise WrongUse("invalid_url", problem, 'shared="redis://HOST:6379/0#NAME"') from None
    return client, name, (redis.RedisError, OSError)


def _rules(limits: Limits) -> str:
    """The limits as the script reads them, in microseconds."""
    rules = []
    for name, rate in limits.rates().items():
        burst = -1 if limits.burst_ns is None else limits.burst_ns / 1000
        period = rate.period_ns / 1000
        grain = period / limits.grain if limits.grain else 1
        rules.append(
            {"name": name, "limit": rate.limit, "period": period, "burst": burst, "grain": grain}
        )
    return json.dumps(rules)


def redacted(url: str) -> str:
    """The URL without user and password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class SharedLimits:
    """The limits of one Throttle in a store. A store that fails is logged once; the steps then answer None, and the
    process keeps the limits by itself and asks again a little later.
    """

    def __init__(self, where: Any, limits: Limits, kept_ns: int) -> None:
        self._store: Store = (
            RedisStore(where, limits, kept_ns) if is_redis(where) else FileStore(where, limits)
        )
        self._down_until = 0
        self._warned = False

    def lane_name(self, key_values: tuple[str, ...], model: str) -> str:
        """The name of a key and model in the store and in logs: the model, and a hash in which no key can be read."""
        digest = hashlib.blake2b("\0".join(key_values).encode(), digest_size=6).hexdigest()
        readable = "".join(char if char.isalnum() or char in "-." else "_" for char in model)[:60]
        return f"{readable}-{digest}" if readable else digest

    def enter(self, name: str, ticket: str, tokens: float, output: float) -> Grant | int | None:
        return self._ask(lambda store: store.enter(name, ticket, tokens, output))

    def correct(self, name: str, grant: Grant, tokens: float, output: float | None) -> None:
        self._ask(lambda store: store.correct(name, grant, tokens, output))

    def cancel(self, name: str, ticket: str) -> None:
        self._ask(lambda store: store.cancel(name, ticket))

    def pause(self, name: str, pause_ns: int) -> None:
        self._ask(lambda store: store.pause(name, pause_ns))

    def _ask(self, step: Callable[[Store], T]) -> T | None:
        if monotonic_ns() < self._down_until:
            return None
        try:
            return step(self._store)
        except self._store.errors as error:
            self._down_until = monotonic_ns() + DOWN_NS
            if not self._warned:
                self._warned = True
                log.warning(
                    "limits are not shared with other processes: %s: %s", self._store, error
                )
            return None
