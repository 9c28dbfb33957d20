"""Limits that several processes keep together, in a small file of this host or in Redis.

A call that need not wait takes one step before it, one that waits takes two, and each takes one
after it. A step is some input and output, so an event loop runs it in a thread. The first step
tells how long to wait, so that nobody polls.
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
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import msgspec

from ..errors import WrongUse
from .rate_limiter import Limits
from .redis_script import SCRIPT
from .shared_rate_limiter import Grant, SharedRateLimiter

ResultT = TypeVar("ResultT")
log = logging.getLogger("loadgen_sdk")

LOCK_TIMEOUT_S = 0.5
"""A process that locks the file for longer was stopped, or died on a broken file system."""

_LOCK_POLL_S = 0.0002
RETRY_FAILED_STORE_NS = 5_000_000_000
"""A store that failed is used again after this time."""

_REDIS_TIMEOUT_S = 0.5
_MAX_READABLE_CHARS = 60
_REDIS_CLOCK_RESOLUTION_US = 1.0
_NO_BURST_LIMIT = -1
"""Stands for no limit of bursts in the rules for the script of Redis."""


class Store(Protocol):
    """Stores the limits that processes share: what was booked, and the queue of processes.

    `name` is that of a key and model, and `entry_id` identifies the calling process. Each method
    does input and output, and may raise one of `errors`.
    """

    errors: tuple[type[Exception], ...]

    def enter(self, name: str, entry_id: str, tokens: float, output_tokens: float) -> Grant | int:
        """Return a grant for a call, or in how many ns the process has to ask again."""

    def correct(self, name: str, grant: Grant, tokens: float, output_tokens: float | None) -> None:
        """Replace the estimate of a grant by the tokens that the call used."""

    def cancel(self, name: str, entry_id: str) -> None:
        """Remove a process from the queue of processes."""

    def pause(self, name: str, pause_ns: int) -> None:
        """Allow no call of any process for a time."""


class FileStore:
    """Keeps the state of each key and model in a file, which a process locks during a step."""

    def __init__(self, path: str | os.PathLike[str], limits: Limits) -> None:
        """Keep the path, to which the names of key and model are appended."""
        self.errors: tuple[type[Exception], ...] = (OSError,)
        self._path = check_writable_path(path)
        self._limits = limits

    def __str__(self) -> str:
        """Return the path."""
        return str(self._path)

    def enter(self, name: str, entry_id: str, tokens: float, output_tokens: float) -> Grant | int:
        """Return a grant for a call, or in how many ns the process has to ask again."""

        def step(limiter: SharedRateLimiter, now: int) -> Grant | int:
            result = limiter.enter(now, entry_id, tokens, output_tokens)
            return result if isinstance(result, Grant) else result - now

        return self._run_step(name, step)

    def correct(self, name: str, grant: Grant, tokens: float, output_tokens: float | None) -> None:
        """Replace the estimate of a grant by the tokens that the call used."""
        self._run_step(name, lambda limiter, _now: limiter.correct(grant, tokens, output_tokens))

    def cancel(self, name: str, entry_id: str) -> None:
        """Remove a process from the queue of processes."""
        self._run_step(name, lambda limiter, _now: limiter.cancel(entry_id))

    def pause(self, name: str, pause_ns: int) -> None:
        """Allow no call of any process for a time."""
        self._run_step(name, lambda limiter, now: limiter.pause(now, pause_ns))

    def _run_step(self, name: str, step: Callable[[SharedRateLimiter, int], ResultT]) -> ResultT:
        """Read the limits from their file, let a function change them, and write them back.

        The file is locked during this time, so that no other process changes it.

        Args:
            name: The name of the key and model to which the limits apply. Each has a file.
            step: The function. It gets the limiter with the stored state, and the current time in
                monotonic ns. Its result is returned.
        """
        with locked_file(f"{self._path}.{name}") as file:
            now = monotonic_ns()
            limiter = self._restore(file.read(), now)
            result = step(limiter, now)
            new_content = msgspec.msgpack.encode(limiter.state())
            file.seek(0)
            file.write(new_content)

            # The old content may have been longer.
            file.truncate(len(new_content))
            return result

    def _restore(self, content: bytes, now: int) -> SharedRateLimiter:
        """Return a limiter with the stored state, or without bookings if there is none.

        A damaged file is logged and then overwritten, because limits must not fail calls.
        """
        limiter = SharedRateLimiter(self._limits)
        if not content:
            return limiter

        try:
            limiter.restore(msgspec.msgpack.decode(content), now)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            log.warning(
                "limits are not shared with other processes, because %s is damaged: %s",
                self._path,
                error,
            )
            return SharedRateLimiter(self._limits)

        return limiter


def check_writable_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file that processes share, if it can be written.

    Raises:
        WrongUse: Its directory cannot be written.
    """
    absolute = Path(path).absolute()
    if not absolute.parent.is_dir() or not os.access(absolute.parent, os.W_OK):
        hint = "use a path in a folder that all processes can write to"
        raise WrongUse("unwritable_file", f"cannot write to {absolute.parent}", hint)
    return absolute


@contextmanager
def locked_file(path: str) -> Iterator[FileIO]:
    """Open a file, create it if it does not exist, and lock it against other processes.

    Raises:
        OSError: The file cannot be opened, or another process keeps it locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        _lock(file)
        try:
            yield file
        finally:
            # Closing the file would not release the lock if the process was forked meanwhile,
            # because the child has the file open as well.
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _lock(file: FileIO) -> None:
    """Lock a file against other processes, and wait while one of them has locked it.

    `flock` either waits without a limit or not at all, so that this tries repeatedly.

    Raises:
        TimeoutError: Another process keeps it locked for LOCK_TIMEOUT_S.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                message = f"another process has kept it locked for {LOCK_TIMEOUT_S} s"
                raise TimeoutError(message) from None
            time.sleep(_LOCK_POLL_S)


class RedisConnection(NamedTuple):
    """A client of the package redis.

    Attributes:
        client: The client.
        name: The name behind `#` in the URL.
        errors: The exceptions that the client raises.
    """

    client: Any
    name: str
    errors: tuple[type[Exception], ...]


class RedisStore:
    """Keeps the state of each key and model under a key of Redis, `loadgen_sdk:NAME:...`.

    A script in Redis runs each step, which takes one round trip. Redis drops a state that nobody
    needs any more.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        """Prepare the connection to Redis. The URL ends with `#NAME`, a name for the limits."""
        connection = connect_to_redis(url, "limits")
        self.errors = connection.errors
        self._name = connection.name
        self._script = connection.client.register_script(SCRIPT)
        self._redacted_url = redact_url(url)
        self._rules = _encode_rules(limits)

        # Redis deletes a state that was not used for this time.
        self._lifetime_ms = max(1, limits.state_lifetime_ns // 1_000_000)

    def __str__(self) -> str:
        """Return the URL without user and password."""
        return self._redacted_url

    def enter(self, name: str, entry_id: str, tokens: float, output_tokens: float) -> Grant | int:
        """Return a grant for a call, or in how many ns the process has to ask again."""
        is_granted, time_us = self._run_step(name, "enter", entry_id, tokens, output_tokens)
        if is_granted:
            granted_at_us = int(time_us)
            return Grant(granted_at_us, tokens, output_tokens)
        wait_us = int(time_us)
        return wait_us * 1000

    def correct(self, name: str, grant: Grant, tokens: float, output_tokens: float | None) -> None:
        """Replace the estimate of a grant by the tokens that the call used."""
        if output_tokens is None:
            output_tokens = min(tokens, grant.output_tokens)
        self._run_step(
            name, "correct", grant.at, grant.tokens, grant.output_tokens, tokens, output_tokens
        )

    def cancel(self, name: str, entry_id: str) -> None:
        """Remove a process from the queue of processes."""
        self._run_step(name, "cancel", entry_id)

    def pause(self, name: str, pause_ns: int) -> None:
        """Allow no call of any process for a time."""
        self._run_step(name, "pause", pause_ns // 1000)

    def _run_step(self, name: str, step: str, *arguments: Any) -> Any:
        """Run a function of the script (`redis_script`) in Redis and return its reply."""
        return self._script(
            keys=[f"loadgen_sdk:{self._name}:{name}"],
            args=[step, self._rules, self._lifetime_ms, *arguments],
        )


def is_redis_url(location: object) -> TypeGuard[str]:
    """Return True for a URL of Redis, and False for the path of a file."""
    return isinstance(location, str) and location.startswith(("redis://", "rediss://", "unix://"))


def connect_to_redis(url: str, subject: str) -> RedisConnection:
    """Return a client of Redis, which opens its connection when it is first used.

    Args:
        url: The URL `redis://HOST:6379/0#NAME`. Processes with different NAMEs share nothing, so
            that several applications can use the same Redis.
        subject: What the processes share, such as "limits". It is the subject of an error message.

    Raises:
        WrongUse: The package redis is missing, or the URL is not valid.
    """
    try:
        import redis
    except ImportError:
        message = f"{subject} are shared through Redis, which needs the package redis"
        raise WrongUse("not_installed", message, "pip install redis") from None

    url_without_name, _, name = url.partition("#")
    try:
        client = redis.Redis.from_url(
            url_without_name,
            socket_timeout=_REDIS_TIMEOUT_S,
            socket_connect_timeout=_REDIS_TIMEOUT_S,
        )
    except ValueError as error:
        message = f"shared={redact_url(url)!r}: {error}"
        raise WrongUse("invalid_url", message, 'shared="redis://HOST:6379/0#NAME"') from None

    return RedisConnection(client, name, errors=(redis.RedisError, OSError))


def redact_url(url: str) -> str:
    """Return a URL without user and password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _encode_rules(limits: Limits) -> str:
    """Return the rates as JSON for the script of Redis. Times are in microseconds.

    For example, 600 requests per minute, with bursts of 2 s and without merged bookings:

        [{"name": "requests", "limit": 600, "period": 6e7, "burst": 2e6, "grain": 1}]

    `burst` says how far bookings may run ahead of an even spacing, and is -1 for no limit. `grain`
    is the length of an interval: the bookings within one interval become one stored entry.
    """
    burst_us = _NO_BURST_LIMIT if limits.burst_ns is None else limits.burst_ns / 1000
    rules = []
    for name, rate in limits.rates().items():
        period_us = rate.period_ns / 1000
        if limits.entries_per_period is None:
            merge_interval_us = _REDIS_CLOCK_RESOLUTION_US
        else:
            # At most this many entries are stored for a period of the rate.
            merge_interval_us = period_us / limits.entries_per_period

        rule = {
            "name": name,
            "limit": rate.limit,
            "period": period_us,
            "burst": burst_us,
            "grain": merge_interval_us,
        }
        rules.append(rule)

    return json.dumps(rules)


class SharedLimits:
    """The limits of one Throttle in a store.

    If the store fails, that is logged once, and the steps return None for a few seconds. The
    process then keeps the limits alone.
    """

    def __init__(self, location: str | os.PathLike[str], limits: Limits) -> None:
        """Open the store. `location` is a URL of Redis or the path of a file."""
        self._store: Store
        if is_redis_url(location):
            self._store = RedisStore(location, limits)
        else:
            self._store = FileStore(location, limits)
        self._failed_until = 0
        self._has_warned = False

    def state_name(self, key_values: tuple[str, ...], model: str) -> str:
        """Return the name of a key and model in the store and in logs.

        It is the model and a hash, from which the key cannot be read.
        """
        digest = hashlib.blake2b("\0".join(key_values).encode(), digest_size=6).hexdigest()
        characters = [char if char.isalnum() or char in "-." else "_" for char in model]
        readable_name = "".join(characters)[:_MAX_READABLE_CHARS]
        return f"{readable_name}-{digest}" if readable_name else digest

    def enter(
        self, name: str, entry_id: str, tokens: float, output_tokens: float
    ) -> Grant | int | None:
        """Return a grant for a call, or in how many ns the process has to ask again."""
        return self._run_step(lambda store: store.enter(name, entry_id, tokens, output_tokens))

    def correct(self, name: str, grant: Grant, tokens: float, output_tokens: float | None) -> None:
        """Replace the estimate of a grant by the tokens that the call used."""
        self._run_step(lambda store: store.correct(name, grant, tokens, output_tokens))

    def cancel(self, name: str, entry_id: str) -> None:
        """Remove a process from the queue of processes."""
        self._run_step(lambda store: store.cancel(name, entry_id))

    def pause(self, name: str, pause_ns: int) -> None:
        """Allow no call of any process for a time."""
        self._run_step(lambda store: store.pause(name, pause_ns))

    def _run_step(self, step: Callable[[Store], ResultT]) -> ResultT | None:
        """Call a function with the store and return its result, or None if the store fails.

        After a failure, the store is not used for RETRY_FAILED_STORE_NS, so that calls do not wait
        for it again and again. Only the first failure is logged.

        Args:
            step: A function that calls one method of the store.
        """
        store = self._store
        if monotonic_ns() < self._failed_until:
            return None

        try:
            return step(store)
        except store.errors as error:  # OSError for a file, and the errors of the package redis
            self._failed_until = monotonic_ns() + RETRY_FAILED_STORE_NS
            if not self._has_warned:
                self._has_warned = True
                log.warning("limits are not shared with other processes: %s: %s", store, error)
            return None
