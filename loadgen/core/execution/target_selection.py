"""Load balancing: choose the target of each request, and detect targets that stopped responding.

The caller reports the starts and ends of requests. There are no sockets and no clocks here. This
code runs in the sending loop, so its cost may grow with the number of targets only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadgen_sdk.request import Completion

DOWN_AFTER = 10
"""A target is down after this many successive requests without a byte of a response."""

RETRY_NS = 1_000_000_000
"""How often a target that is down is tried by a virtual user, or by the route least-in-flight."""

_FAILURES_WITHOUT_RESPONSE = frozenset(
    ("dns", "connect", "tls", "reset", "timeout_total", "timeout_stall")
)
# A time before every retry, so that a slot that is not sent does not use up the retry of a target.
_NOT_SENT_NS = -1


class TargetSelection:
    """Choose targets by a route: auto, round-robin, least-in-flight or sticky.

    The route auto is sticky if conversations have several turns, and else round-robin.

    Round-robin and sticky choose by slot id. A request goes to the same target whichever worker
    sends it, also when that target is down, so the other targets do not get more than planned.
    Least-in-flight skips targets that are down, except for one request every RETRY_NS. Targets with
    equal numbers of requests in flight take turns.
    """

    __slots__ = (
        "_affinity_of_session",
        "_all_targets",
        "_in_flight",
        "_max_turns",
        "_next_retry_ns",
        "_sticky",
        "_targets_by_slot",
        "down_since_ns",
        "silent_failures",
    )

    def __init__(
        self,
        route: str,
        target_count: int,
        max_turns: int,
        in_flight: Callable[[int], int],
        targets_by_slot: Callable[[int], Sequence[int]] | None = None,
        affinity_of_session: Callable[[int], int] | None = None,
    ) -> None:
        """Create a selection among the targets of a run.

        Args:
            route: How targets are chosen: auto, round-robin, least-in-flight or sticky.
            target_count: The number of targets.
            max_turns: How many slots each session has: the turns of the longest session.
            in_flight: Returns how many requests of this worker are in flight at a target.
            targets_by_slot: Returns the targets that can serve a slot, if not all can.
            affinity_of_session: Returns a number that is equal for sessions which the same target
                should serve. By default each session is by itself.
        """
        # Whether all turns of a conversation go to one target, which has its prefix in the cache.
        self._sticky = route == "sticky" or (route == "auto" and max_turns > 1)

        # None for the routes that do not depend on the requests in flight.
        self._in_flight = in_flight if route == "least-in-flight" else None
        self._all_targets = range(target_count)
        self._max_turns = max_turns
        self._targets_by_slot = targets_by_slot
        self._affinity_of_session = affinity_of_session

        # When each target that is down is tried again, in ns.
        self._next_retry_ns = [0] * target_count

        # For each target, the number of successive requests without a byte of a response.
        self.silent_failures = [0] * target_count

        # When each target that was ever down first stopped responding, in ns.
        self.down_since_ns: dict[int, int] = {}

    def choose(self, slot_id: int, now_ns: int) -> int:
        """Return the target of a slot that starts at `now_ns`."""
        targets = self._targets_of(slot_id)
        if len(targets) == 1:
            return targets[0]
        if self._in_flight is None:
            return self._choose_by_slot(targets, slot_id)
        return self._choose_least_in_flight(targets, slot_id, now_ns, self._in_flight)

    def choose_unsent(self, slot_id: int) -> int:
        """Return the target to record for a slot whose request is not sent."""
        return self.choose(slot_id, _NOT_SENT_NS)

    def pause_ns(self, slot_id: int) -> int:
        """Return how long a virtual user waits after a failure before it sends its next request.

        It waits RETRY_NS if that request would go to a target that is down, and would fail at once.
        The route least-in-flight avoids targets that are down, so with it the request would fail
        only if all targets are down.

        Args:
            slot_id: The place of the next request in the schedule.
        """
        has_any_been_down = len(self.down_since_ns) > 0
        if not has_any_been_down:
            return 0

        targets = self._targets_of(slot_id)
        depends_on_requests_in_flight = self._in_flight is not None
        if depends_on_requests_in_flight:
            would_fail = all(self.is_down(target) for target in targets)
        else:
            would_fail = self.is_down(self._choose_by_slot(targets, slot_id))

        return RETRY_NS if would_fail else 0

    def is_down(self, target: int) -> bool:
        """Return True if the last DOWN_AFTER requests ended without a byte of a response."""
        return self.silent_failures[target] >= DOWN_AFTER

    def report_success(self, target: int) -> None:
        """Report a request that succeeded."""
        self.silent_failures[target] = 0

    def report_failure(self, target: int, completion: Completion, now_ns: int) -> bool:
        """Report a failed request, and return True if its target goes down for the first time.

        A target is down after DOWN_AFTER failures in a row without any response. A failure with a
        response, such as a status code, shows that the target responds, and does not count. A
        target that goes down is tried again after RETRY_NS. If it goes down again later in the run,
        the result is False.
        """
        assert completion.failure is not None
        has_response = completion.http_status != 0
        if has_response or completion.failure.kind not in _FAILURES_WITHOUT_RESPONSE:
            return False

        self.silent_failures[target] += 1

        # With more failures than DOWN_AFTER, the target was already down.
        goes_down_now = self.silent_failures[target] == DOWN_AFTER
        if goes_down_now:
            self._next_retry_ns[target] = now_ns + RETRY_NS

        is_first_time = target not in self.down_since_ns
        if goes_down_now and is_first_time:
            self.down_since_ns[target] = now_ns
            return True

        return False

    def _targets_of(self, slot_id: int) -> Sequence[int]:
        """Return the targets that can serve a slot."""
        if self._targets_by_slot is None:
            return self._all_targets
        return self._targets_by_slot(slot_id)

    def _choose_by_slot(self, targets: Sequence[int], slot_id: int) -> int:
        """Return the target that a slot or its session has under round-robin or sticky."""
        if not self._sticky:
            return targets[slot_id % len(targets)]
        session = slot_id // self._max_turns
        affinity = session
        if self._affinity_of_session is not None:
            affinity = self._affinity_of_session(session)
        return targets[affinity % len(targets)]

    def _choose_least_in_flight(
        self,
        targets: Sequence[int],
        slot_id: int,
        now_ns: int,
        in_flight: Callable[[int], int],
    ) -> int:
        """Return the target with the fewest requests in flight.

        Targets with equally many take turns: the one that follows `slot_id` modulo the number of
        targets is chosen. Example: with 3 targets, slot 7 prefers target 1, then 2, then 0.

        Targets that are down are left out. As an exception, a target that is down gets one request
        every RETRY_NS, to find out whether it responds again.
        """
        candidates = targets
        has_any_been_down = len(self.down_since_ns) > 0
        if has_any_been_down:
            retried_target = self._take_due_retry(targets, now_ns)
            if retried_target is not None:
                return retried_target
            reachable_targets = [target for target in targets if not self.is_down(target)]
            if reachable_targets:
                candidates = reachable_targets
            # Otherwise all are down, and the request goes to one of them and fails.

        def rank(target: int) -> tuple[int, int]:
            """Rank targets by their requests in flight, and equal ones by their turn."""
            turns_to_wait = (target - slot_id) % len(targets)
            return in_flight(target), turns_to_wait

        return min(candidates, key=rank)

    def _take_due_retry(self, targets: Sequence[int], now_ns: int) -> int | None:
        """Return a target that is down and due for a retry, or None if there is none.

        The next retry of this target is due RETRY_NS later.
        """
        for target in targets:
            if self.is_down(target) and now_ns >= self._next_retry_ns[target]:
                self._next_retry_ns[target] = now_ns + RETRY_NS
                return target
        return None
