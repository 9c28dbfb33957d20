"""The limits of one key and model that several processes share, and their queue. Pure.

Each process has one entry in the queue, for the first of its waiting calls. Processes therefore
take turns, however many calls wait in each. A process whose call is granted while it does not ask
finds the grant when it asks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .rate_limiter import ALLOWED_NOW, Booking, Limits, RateLimiter, call_amounts

UNFETCHED_GRANT_NS = 60_000_000_000
"""A grant is dropped if its process does not fetch it within this time, because it has died."""


class Grant(NamedTuple):
    """What was counted against the shared limits for a call that is allowed.

    Attributes:
        at: When it was counted, by the clock of the store. A file has a time for each unit, and
            Redis one time for all.
        tokens: The input and output tokens.
        output_tokens: The output tokens among them.
    """

    at: Any
    tokens: float
    output_tokens: float


class _QueueEntry(NamedTuple):
    """The entry of a process in the queue, with the tokens of its first waiting call."""

    entry_id: str
    tokens: float
    output_tokens: float


class SharedRateLimiter:
    """The limits and the queue of all processes, as one process restores them from a file.

    Times are of one clock that all of the processes have. `entry_id` identifies a process.
    """

    def __init__(self, limits: Limits) -> None:
        """Create a limiter without bookings.

        It has no limit of the concurrency, because each process counts its own calls in flight.
        """
        self._limits = limits._replace(concurrency=None)
        self._limiter = RateLimiter(self._limits)
        self._queue: list[_QueueEntry] = []
        # Grants of calls whose processes have not asked again since, by the ids of the processes.
        self._unfetched_grants: dict[str, Grant] = {}

    def enter(self, now: int, entry_id: str, tokens: float, output_tokens: float) -> Grant | int:
        """Ask for the permission to make a call, and wait in the queue of processes for it.

        A call is granted if no other process is before it in the queue and the limits have room. No
        process runs all the time: each one that asks grants all calls that are allowed by now. A
        grant for another process is stored until that process asks again.

        Args:
            now: The current time.
            entry_id: Identifies the process in the queue.
            tokens: The estimated input and output tokens of the call.
            output_tokens: The output tokens among them.

        Returns:
            The grant. Or, as an int, the time at which the process should ask again, because the
            call will probably be allowed then. The process stays in the queue until then.
        """
        is_granted_already = entry_id in self._unfetched_grants
        if not is_granted_already:
            self._put_into_queue(_QueueEntry(entry_id, tokens, output_tokens))

        self._grant_allowed_calls(now)
        grant = self._unfetched_grants.pop(entry_id, None)
        if grant is None:
            return self._expected_turn(now, entry_id)

        # The grant may be for a call of the process that was cancelled since. The tokens of that
        # call are replaced by those of this one.
        self.correct(grant, tokens, output_tokens)
        return Grant(grant.at, tokens, output_tokens)

    def correct(self, grant: Grant, tokens: float, output_tokens: float | None) -> None:
        """Replace the estimate of a grant by the tokens that the call used.

        `output_tokens` is None if their number is not known.
        """
        estimated_amounts = call_amounts(grant.tokens, grant.output_tokens)
        self._limiter.correct(Booking(estimated_amounts, grant.at), tokens, output_tokens)

    def cancel(self, entry_id: str) -> None:
        """Remove a process from the queue, because none of its calls waits any more.

        A grant that it did not fetch counts as a request without tokens.
        """
        self._queue = [entry for entry in self._queue if entry.entry_id != entry_id]
        grant = self._unfetched_grants.pop(entry_id, None)
        if grant is not None:
            self.correct(grant, 0, 0)

    def pause(self, now: int, pause_ns: int) -> None:
        """Allow no call of any process for a time, as the server asks."""
        self._limiter.pause(now + pause_ns)

    def state(self) -> dict[str, Any]:
        """Return the state to store: that of the limiter, the queue, and the unfetched grants.

        The stored names "line" and "ready" are those of the script for Redis, too.
        """
        return {**self._limiter.state(), "line": self._queue, "ready": self._unfetched_grants}

    def restore(self, state: dict[str, Any], now: int) -> None:
        """Continue from a stored state.

        Grants that were not fetched within UNFETCHED_GRANT_NS are dropped, because their processes
        have died.

        Args:
            state: The decoded result of `state`. "line" is the queue, and "ready" has the unfetched
                grants by the ids of their processes. The NamedTuples in it have become lists.
            now: The current time.
        """
        self._limiter.restore(state, now)
        queue_entries = state.get("line", ())
        self._queue = [
            _QueueEntry(str(entry_id), float(tokens), float(output_tokens))
            for entry_id, tokens, output_tokens in queue_entries
        ]
        self._unfetched_grants = {}

        grant_fields_by_process: Mapping[str, Sequence[Any]] = state.get("ready", {})
        for entry_id, grant_fields in grant_fields_by_process.items():
            grant = Grant(*grant_fields)
            # Each limited unit has a booking time. The latest one is the time of the grant.
            granted_at = max(grant.at.values(), default=0)
            has_expired = granted_at <= now - UNFETCHED_GRANT_NS
            if not has_expired:
                self._unfetched_grants[str(entry_id)] = grant

    def _put_into_queue(self, new_entry: _QueueEntry) -> None:
        """Replace the entry of a process in the queue, or append it."""
        for index, entry in enumerate(self._queue):
            if entry.entry_id == new_entry.entry_id:
                self._queue[index] = new_entry
                return
        self._queue.append(new_entry)

    def _grant_allowed_calls(self, now: int) -> None:
        """Grant the calls at the front of the queue that the limits allow now."""
        while self._queue:
            entry_id, tokens, output_tokens = self._queue[0]
            if self._limiter.retry_at(now, tokens, output_tokens) != ALLOWED_NOW:
                return
            del self._queue[0]
            booking = self._limiter.book(now, tokens, output_tokens)
            self._unfetched_grants[entry_id] = Grant(booking.at, tokens, output_tokens)

    def _expected_turn(self, now: int, entry_id: str) -> int:
        """Return when the call of a process will be granted if nothing else happens meanwhile.

        A copy of the limiter grants the calls in the queue one after the other, each at the time at
        which the limits allow it.
        """
        simulated_limiter = RateLimiter(self._limits)
        simulated_limiter.restore(self._limiter.state(), now)

        turn = now
        for entry in self._queue:
            retry_at = simulated_limiter.retry_at(turn, entry.tokens, entry.output_tokens)
            if retry_at != ALLOWED_NOW:
                turn = retry_at
            if entry.entry_id == entry_id:
                break
            simulated_limiter.book(turn, entry.tokens, entry.output_tokens)

        return turn
