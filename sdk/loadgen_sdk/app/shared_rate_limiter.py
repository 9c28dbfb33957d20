"""The limits of one key and model that several processes share, and their queue. Pure.

Each process has one entry in the queue, for the first of its waiting calls. Processes therefore
take turns, however many calls wait in each. A process whose call is granted while it does not ask
finds the grant when it asks again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .rate_limiter import Booking, Limits, RateLimiter, call_amounts

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
        self._unfetched_grants: dict[str, Grant] = {}

    def enter(self, now: int, entry_id: str, tokens: float, output_tokens: float) -> Grant | int:
        """Request a grant for the first waiting call of a process.

        Return the grant if it is the turn of the process, else the time at which it will probably
        be. The process is then in the queue and has to ask again. It may ask for another call with
        other tokens, which replaces the first one.
        """
        if entry_id not in self._unfetched_grants:
            self._put_into_queue(_QueueEntry(entry_id, tokens, output_tokens))
        self._grant_allowed_calls(now)
        grant = self._unfetched_grants.pop(entry_id, None)
        if grant is None:
            return self._expected_turn(now, entry_id)
        # The grant may be for an earlier call of the process, which had other tokens.
        self.correct(grant, tokens, output_tokens)
        return Grant(grant.at, tokens, output_tokens)

    def correct(self, grant: Grant, tokens: float, output_tokens: float | None) -> None:
        """Replace the estimate of a grant by the tokens that the call used.

        `output_tokens` is None if their number is not known.
        """
        booking = Booking(call_amounts(grant.tokens, grant.output_tokens), grant.at)
        self._limiter.correct(booking, tokens, output_tokens)

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
        """Return the state to store."""
        return {**self._limiter.state(), "line": self._queue, "ready": self._unfetched_grants}

    def restore(self, state: dict[str, Any], now: int) -> None:
        """Continue from a stored state.

        Grants that nobody has fetched for UNFETCHED_GRANT_NS are left out, because their processes
        have died.
        """
        self._limiter.restore(state, now)
        self._queue = [
            _QueueEntry(str(entry_id), float(tokens), float(output_tokens))
            for entry_id, tokens, output_tokens in state.get("line", ())
        ]
        self._unfetched_grants = {}
        for entry_id, values in state.get("ready", {}).items():
            grant = Grant(*values)
            granted_at = max(grant.at.values(), default=0)
            if granted_at > now - UNFETCHED_GRANT_NS:
                self._unfetched_grants[str(entry_id)] = grant

    def _put_into_queue(self, new_entry: _QueueEntry) -> None:
        """Replace the entry of a process in the queue, or append it."""
        for index, entry in enumerate(self._queue):
            if entry.entry_id == new_entry.entry_id:
                self._queue[index] = new_entry
                return
        self._queue.append(new_entry)

    def _grant_allowed_calls(self, now: int) -> None:
        """Grant the calls at the front of the queue that are allowed now."""
        while self._queue:
            entry_id, tokens, output_tokens = self._queue[0]
            if self._limiter.retry_at(now, tokens, output_tokens):
                return
            del self._queue[0]
            booking = self._limiter.book(now, tokens, output_tokens)
            self._unfetched_grants[entry_id] = Grant(booking.at, tokens, output_tokens)

    def _expected_turn(self, now: int, entry_id: str) -> int:
        """Return when it will be the turn of a process if no call is cancelled or corrected.

        A copy of the limiter grants the calls in the queue one after the other.
        """
        simulated_limiter = RateLimiter(self._limits)
        simulated_limiter.restore(self._limiter.state(), now)
        turn = now
        for entry in self._queue:
            turn = simulated_limiter.retry_at(turn, entry.tokens, entry.output_tokens) or turn
            if entry.entry_id == entry_id:
                break
            simulated_limiter.book(turn, entry.tokens, entry.output_tokens)
        return turn
