"""The limits of one key and model that several processes keep together, and the line in which they wait. Without IO.

Each process has one place in the line, its ticket, for the first of its own waiting calls. So turns go round between
processes, however many calls wait in each. Who is granted in his absence finds his grant when he asks again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .gate import Booking, Gate, Limits, amounts_of

KEPT_NS = 60_000_000_000  # a grant that its process does not fetch is forgotten: it has died


class Grant(NamedTuple):
    """What was booked for a call, and when (by the store's clock, for each kind of amount where they differ)."""

    at: Any
    tokens: float
    output: float


class SharedGate:
    """The state of all processes. Instants are of one clock that all have."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits._replace(concurrency=None)
        self._gate = Gate(self._limits)
        self._line: list[tuple[str, float, float]] = []  # ticket, tokens, output
        self._ready: dict[str, Grant] = {}

    def enter(self, now: int, ticket: str, tokens: float, output: float) -> Grant | int:
        """The grant, or the instant at which it will be this ticket's turn as things are. Its amounts may change."""
        asked = (ticket, tokens, output)
        if ticket not in self._ready:
            self._line = [asked if place[0] == ticket else place for place in self._line]
            if asked not in self._line:
                self._line.append(asked)
        while self._line and not self._gate.ask(now, *self._line[0][1:]):
            first, *amounts = self._line.pop(0)
            self._ready[first] = Grant(self._gate.enter(now, *amounts).at, *amounts)
        if (grant := self._ready.pop(ticket, None)) is not None:
            self.correct(grant, tokens, output)
            return Grant(grant.at, tokens, output)
        return self._turn(now, ticket)

    def _turn(self, now: int, ticket: str) -> int:
        rehearsal, at = Gate(self._limits), now
        rehearsal.restore(self._gate.state(), now)
        for other, *amounts in self._line:
            at = rehearsal.ask(at, *amounts) or at
            if other == ticket:
                break
            rehearsal.enter(at, *amounts)
        return at

    def correct(self, grant: Grant, tokens: float, output: float | None) -> None:
        """A call has really used this. `output` None: not known."""
        self._gate.correct(
            Booking(amounts_of(grant.tokens, grant.output), grant.at), tokens, output
        )

    def cancel(self, ticket: str) -> None:
        """The process waits no longer. A grant that it did not fetch counts as a request without tokens."""
        self._line = [place for place in self._line if place[0] != ticket]
        if (grant := self._ready.pop(ticket, None)) is not None:
            self.correct(grant, 0, 0)

    def pause(self, now: int, pause_ns: int) -> None:
        """The server asks all for no call for so long."""
        self._gate.pause(now + pause_ns)

    def state(self) -> dict[str, Any]:
        return {**self._gate.state(), "line": self._line, "ready": self._ready}

    def restore(self, state: dict[str, Any], now: int) -> None:
        self._gate.restore(state, now)
        self._line = [
            (str(ticket), float(tokens), float(output))
            for ticket, tokens, output in state.get("line", ())
        ]
        ready = {str(ticket): Grant(*grant) for ticket, grant in state.get("ready", {}).items()}
        oldest = now - KEPT_NS
        self._ready = {
            ticket: grant
            for ticket, grant in ready.items()
            if max(grant.at.values(), default=0) > oldest
        }
