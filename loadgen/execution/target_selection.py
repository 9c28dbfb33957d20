"""Which target a request goes to, and which targets have stopped answering. Pure: it is told of starts and ends, and
knows neither sockets nor clocks. It stands in the sending loop, so nothing here may look at more than the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadgen_sdk.request import Completion

DOWN_AFTER = 10  # requests in a row without a byte of an answer
SILENCE = frozenset(("dns", "connect", "tls", "reset", "timeout_total", "timeout_stall"))
RETRY_NS = 1_000_000_000  # how often a target that is down is tried, by a lane or by whoever has a choice


class TargetSelection:
    """`route`: auto, round-robin, least-in-flight or sticky; auto is sticky where conversations have several turns.

    Round robin and sticky go by number, so that whoever sends a request, it goes to the same target, dead or alive:
    the others are not given more than planned. Least in flight passes over targets that are down, but for one request
    every RETRY_NS; among equals it takes turns.
    """

    __slots__ = ("_in_flight", "_refusals", "_retry_ns", "_sticky", "_targets", "_turns", "down")

    def __init__(self, route: str, targets: int, turns: int, in_flight: Callable[[int], int]) -> None:
        self._sticky = route == "sticky" or (route == "auto" and turns > 1)
        self._in_flight = in_flight if route == "least-in-flight" else None  # by target, of this worker
        self._targets, self._turns = targets, turns
        self._refusals = [0] * targets  # in a row
        self._retry_ns = [0] * targets
        self.down: dict[int, int] = {}  # target -> when it first stopped answering, ns

    def choose(self, number: int, now_ns: int) -> int:
        """The target of a slot that starts now."""
        count, in_flight = self._targets, self._in_flight
        if count == 1:
            return 0
        if in_flight is None:
            return (number // self._turns if self._sticky else number) % count
        up: Sequence[int] = range(count)
        if self.down:
            for target in up:
                if self.is_down(target) and now_ns >= self._retry_ns[target]:
                    self._retry_ns[target] = now_ns + RETRY_NS
                    return target
            up = [target for target in up if not self.is_down(target)] or up
        return min(up, key=lambda target: (in_flight(target), (target - number) % count))

    def pause_ns(self, number: int) -> int:
        """How long a lane whose request has just failed waits before this slot: not at all, unless it would go to a
        target that is down and fail as fast as it can."""
        if not self.down:
            return 0
        if self._in_flight is None:
            down = self.is_down(self.choose(number, -1))
        else:
            down = all(map(self.is_down, range(self._targets)))
        return RETRY_NS if down else 0

    def is_down(self, target: int) -> bool:
        """Whether its last DOWN_AFTER requests ended without a byte of an answer."""
        return self._refusals[target] >= DOWN_AFTER

    def answered(self, target: int) -> None:
        """A request ended well."""
        self._refusals[target] = 0

    def failed(self, target: int, done: Completion, now_ns: int) -> bool:
        """A request failed. True when its target is down from now on, for the first time."""
        assert done.failure is not None
        if done.http_status or done.failure.kind not in SILENCE:
            return False
        self._refusals[target] += 1
        if self._refusals[target] == DOWN_AFTER:
            self._retry_ns[target] = now_ns + RETRY_NS
            if target not in self.down:
                self.down[target] = now_ns
                return True
        return False
