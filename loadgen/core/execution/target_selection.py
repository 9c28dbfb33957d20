"""Load balancing: which target a request goes to, and which targets have stopped answering.

Pure: the caller reports starts and ends of requests; there are no sockets and no clocks here. This code runs in the
sending loop, so its cost may grow with the number of targets only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadgen_sdk.request import Completion

DOWN_AFTER = 10  # successive requests without a byte of an answer
SILENCE = frozenset(("dns", "connect", "tls", "reset", "timeout_total", "timeout_stall"))
RETRY_NS = (
    1_000_000_000  # how often a target that is down is tried: by a lane, or by least-in-flight
)


class TargetSelection:
    """`route`: auto, round-robin, least-in-flight or sticky; auto is sticky where conversations have several turns.

    Round robin and sticky choose by slot number. A request goes to the same target whichever worker sends it, also when
    that target is down, so the other targets do not get more than planned. Least in flight skips targets that are down,
    except for one request every RETRY_NS; targets with equal numbers in flight take turns.
    """

    __slots__ = (
        "_all",
        "_in_flight",
        "_retry_ns",
        "_serving",
        "_sticky",
        "_turns",
        "down",
        "refusals",
    )

    def __init__(
        self,
        route: str,
        targets: int,
        turns: int,
        in_flight: Callable[[int], int],
        serving: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """`serving`: slot number -> the targets among which to choose, where not every target serves every request."""
        self._sticky = route == "sticky" or (route == "auto" and turns > 1)
        self._in_flight = (
            in_flight if route == "least-in-flight" else None
        )  # target -> requests of this worker in flight
        self._all, self._turns, self._serving = range(targets), turns, serving
        self.refusals = [0] * targets  # successive ones, by target
        self._retry_ns = [0] * targets
        self.down: dict[int, int] = {}  # target -> when it first stopped answering, ns

    def choose(self, number: int, now_ns: int) -> int:
        """The target of a slot that starts now (`now_ns`; -1 for a slot that is not sent)."""
        targets = self._all if self._serving is None else self._serving(number)
        count, in_flight = len(targets), self._in_flight
        if count == 1:
            return targets[0]
        if in_flight is None:
            return targets[(number // self._turns if self._sticky else number) % count]
        up: Sequence[int] = targets
        if self.down:
            for target in up:
                if self.is_down(target) and now_ns >= self._retry_ns[target]:
                    self._retry_ns[target] = now_ns + RETRY_NS
                    return target
            up = [target for target in up if not self.is_down(target)] or up
        return min(up, key=lambda target: (in_flight(target), (target - number) % count))

    def pause_ns(self, number: int) -> int:
        """How long a lane waits before this slot, after a failed request, ns.

        RETRY_NS if the slot would go to a target that is down, where it would fail at once; else 0.
        """
        if not self.down:
            return 0
        if self._in_flight is None:
            down = self.is_down(self.choose(number, -1))
        else:
            down = all(
                map(self.is_down, self._all if self._serving is None else self._serving(number))
            )
        return RETRY_NS if down else 0

    def is_down(self, target: int) -> bool:
        """Whether its last DOWN_AFTER requests ended without a byte of an answer."""
        return self.refusals[target] >= DOWN_AFTER

    def answered(self, target: int) -> None:
        """Report a request that succeeded."""
        self.refusals[target] = 0

    def failed(self, target: int, done: Completion, now_ns: int) -> bool:
        """Report a request that failed. True when this makes its target count as down for the first time."""
        assert done.failure is not None
        if done.http_status or done.failure.kind not in SILENCE:
            return False
        self.refusals[target] += 1
        if self.refusals[target] == DOWN_AFTER:
            self._retry_ns[target] = now_ns + RETRY_NS
            if target not in self.down:
                self.down[target] = now_ns
                return True
        return False
