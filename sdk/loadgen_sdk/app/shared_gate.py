"""The limits of one key and model that several processes keep together, and their waiting line.

Pure.

Each process has one place in the line, for the first of its waiting calls. Processes therefore take
turns, however many calls wait in each. A process whose call is granted while it does not ask finds
the grant when it asks again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .gate import Booking, Gate, Limits, amounts_of

UNFETCHED_GRANT_NS = 60_000_000_000
"""A grant is dropped if its process does not fetch it within this time, because it has died."""


class Grant(NamedTuple):
    """What was booked for a call.

    Attributes:
        at: When it was booked, by the clock of the store. A file has a time for each kind of
            amount.
        tokens: The input and output tokens.
        output: The output tokens among them.
    """

    at: Any
    tokens: float
    output: float


class _Place(NamedTuple):
    """The place of a process in the line, with the tokens of its first call."""

    ticket: str
    tokens: float
    output: float


class SharedGate:
    """The limits and the line of all processes. Times are of one clock that all of them have."""

    def __init__(self, limits: Limits) -> None:
        """Start without bookings. The concurrency is limited by each process alone."""
        self._limits = limits._replace(concurrency=None)
        self._gate = Gate(self._limits)
        self._line: list[_Place] = []
        self._granted: dict[str, Grant] = {}

    def enter(self, now: int, ticket: str, tokens: float, output: float) -> Grant | int:
        """Return the grant of a process, or the time at which it will probably be its turn.

        A process that waits may ask again with other amounts.
        """
        if ticket not in self._granted:
            self._update_place(_Place(ticket, tokens, output))
        self._grant_first_places(now)
        grant = self._granted.pop(ticket, None)
        if grant is None:
            return self._expected_turn(now, ticket)
        self.correct(grant, tokens, output)
        return Grant(grant.at, tokens, output)

    def correct(self, grant: Grant, tokens: float, output: float | None) -> None:
        """Replace the estimate of a grant by the tokens that the call used.

        `output` is None if the number of output tokens is not known.
        """
        booking = Booking(amounts_of(grant.tokens, grant.output), grant.at)
        self._gate.correct(booking, tokens, output)

    def cancel(self, ticket: str) -> None:
        """Remove a process from the line.

        A grant that it did not fetch counts as a request without tokens.
        """
        self._line = [place for place in self._line if place.ticket != ticket]
        grant = self._granted.pop(ticket, None)
        if grant is not None:
            self.correct(grant, 0, 0)

    def pause(self, now: int, pause_ns: int) -> None:
        """Allow no call of any process for a time, as the server asks."""
        self._gate.pause(now + pause_ns)

    def state(self) -> dict[str, Any]:
        """Return the state to store."""
        return {**self._gate.state(), "line": self._line, "ready": self._granted}

    def restore(self, state: dict[str, Any], now: int) -> None:
        """Continue from a stored state, without grants of processes that have died."""
        self._gate.restore(state, now)
        self._line = [
            _Place(str(ticket), float(tokens), float(output))
            for ticket, tokens, output in state.get("line", ())
        ]
        self._granted = {}
        for ticket, values in state.get("ready", {}).items():
            grant = Grant(*values)
            if max(grant.at.values(), default=0) > now - UNFETCHED_GRANT_NS:
                self._granted[str(ticket)] = grant

    def _update_place(self, new: _Place) -> None:
        """Replace the place of a process in the line, or append it."""
        for index, place in enumerate(self._line):
            if place.ticket == new.ticket:
                self._line[index] = new
                return
        self._line.append(new)

    def _grant_first_places(self, now: int) -> None:
        """Grant the calls at the front of the line that are allowed now."""
        while self._line:
            ticket, tokens, output = self._line[0]
            if self._gate.retry_at(now, tokens, output):
                return
            del self._line[0]
            booking = self._gate.book(now, tokens, output)
            self._granted[ticket] = Grant(booking.at, tokens, output)

    def _expected_turn(self, now: int, ticket: str) -> int:
        """Return when it will be the turn of a process if nothing changes."""
        rehearsal = Gate(self._limits)
        rehearsal.restore(self._gate.state(), now)
        turn = now
        for place in self._line:
            turn = rehearsal.retry_at(turn, place.tokens, place.output) or turn
            if place.ticket == ticket:
                break
            rehearsal.book(turn, place.tokens, place.output)
        return turn
