"""The physical engine of a simulated server: several replicas with the methods of `LatencyModel`.

While there is work, iterations follow each other without a gap, even if the caller comes late. A
token exists at the end of its iteration. It is due then or, with `emission_spacing_ns`, after the
tokens before it have been sent.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from loadgen.sim.engine.implementation import Replica, SimRequest
from loadgen.sim.engine.latency_model import Emission
from loadgen.sim.engine.replica import NEVER
from loadgen.sim.engine.system import SimulatedSystem

EMISSIONS_PER_GROUP = 5  # sent together: one wake-up per emission would cost more than the sends
MAX_ITERATIONS = 1000  # kept until they are read; trtllm-serve keeps as many


class Iteration(NamedTuple):
    """What one iteration of one replica did, and the state when it ended."""

    iteration_index: int
    replica: int
    duration_ns: int
    context_requests: int
    context_tokens: int
    generating: int
    paused: int
    active: int
    queued: int
    completed: int
    blocks_used: int
    blocks_hit: int  # prompt blocks found in the cache, since the start
    blocks_missed: int  # prompt blocks not found, since the start


@dataclass(frozen=True, slots=True)
class _RequestAssignment:
    """A request and the index of the replica that serves it."""

    request: SimRequest
    replica_index: int


class _FleetReplica:
    """One replica of a fleet, and the emissions that follow from its iterations.

    With an interval of n tokens per emission, a request emits its first token alone, then n tokens
    at every n-th iteration after it, and the rest with its last token. So the requests that emit in
    an iteration are those whose first iteration since the admission is equal to it modulo n.
    """

    def __init__(self, replica: Replica, interval: int) -> None:
        self.replica = replica
        self.begin_ns = 0  # start of the current iteration
        self.last_end_ns = 0  # end of the last iteration before the replica became idle
        self.unsent: deque[Emission] = deque()  # spaced emissions, in order of due time
        self._interval = interval
        # Decoding requests by the iteration, modulo `interval`, in which they emit.
        self._emitting: list[dict[SimRequest, None]] = [{} for _ in range(interval)]

    def begin(self, now_ns: int, emissions: list[Emission]) -> bool:
        """Begin an iteration, and return False if there is nothing to do.

        A request that is paused emits the tokens that it has got and not emitted, because its next
        interval begins anew after the pause. These emissions are added to `emissions`.
        """
        replica = self.replica
        replica.forget()  # only simulations in virtual time need the ends of all iterations
        if not replica.begin(now_ns):
            self.last_end_ns = now_ns
            if not replica.queued:
                return False
            # A request came while the replica was idle, before the caller asked again.
            now_ns = replica.next_due_ns
            replica.begin(now_ns)
        self.begin_ns = now_ns
        for request, first_iteration, last_iteration in replica.paused:
            if last_iteration >= first_iteration:
                self._emitting[first_iteration % self._interval].pop(request, None)
                tokens = (last_iteration - first_iteration) % self._interval
                if tokens:
                    emissions.append(Emission(request.key, tokens, False, now_ns))
        return True

    def finish(self, end_ns: int, emissions: list[Emission]) -> list[SimRequest]:
        """End the current iteration, and return the requests that are done.

        Its emissions are added to `emissions`: first tokens, last tokens, then full intervals.
        """
        replica = self.replica
        interval = self._interval
        iteration = replica.iteration
        done = replica.finish()
        started = [request for request in replica.started if request.remaining_tokens > 1]
        emissions += [Emission(request.key, 1, False, end_ns) for request in started]
        for request in done:
            first_iteration = request.resumed_iteration
            self._emitting[first_iteration % interval].pop(request, None)
            tokens = (iteration - first_iteration) % interval  # since the last full interval
            if not tokens:
                # The last token completes an interval, or is also the first and comes alone.
                tokens = interval if iteration > first_iteration else 1
            emissions.append(Emission(request.key, tokens, True, end_ns))
        emitting = self._emitting[iteration % interval]
        emissions += [Emission(request.key, interval, False, end_ns) for request in emitting]
        for request in started:
            emitting[request] = None
        return done

    def cancel(self, request: SimRequest) -> None:
        """Stop a request. Its tokens that are not sent yet are dropped, too."""
        if request.resumed_iteration >= 0:
            self._emitting[request.resumed_iteration % self._interval].pop(request, None)
        self.replica.cancel(request)
        key = request.key
        if any(emission.key == key for emission in self.unsent):
            self.unsent = deque(emission for emission in self.unsent if emission.key != key)


class Fleet:
    """Several replicas with the methods of `LatencyModel`.

    The first token of a request is emitted alone, then every `system.interval`, then the rest. The
    emissions of one iteration are `emission_spacing_ns` apart on average, in groups, first tokens
    first. The distance shrinks if needed, so that all are sent within half an iteration. With 0 all
    are due at the end of the iteration.

    The times of `system.changes` count from the first request. A new replica has an empty cache.
    The requests of a removed replica are cancelled, and their keys are added to `lost`, which the
    caller empties.
    """

    def __init__(self, system: SimulatedSystem, *, emission_spacing_ns: int = 0) -> None:
        self.limits = system.limits
        self.serving = len(system.speeds)
        self.lost: list[Any] = []
        self.iterations: deque[Iteration] = deque(maxlen=MAX_ITERATIONS)
        self.reports_serving_replicas = bool(system.changes)  # on a metrics page
        self._members = [
            _FleetReplica(replica, system.interval) for replica in system.create_replicas()
        ]
        self._emission_spacing_ns = emission_spacing_ns
        self._next_replica = system.make_router()
        self._changes = deque(system.changes)
        self._first_request_ns: int | None = None
        self._requests: dict[Hashable, _RequestAssignment] = {}
        self._iteration_ends: list[tuple[int, int]] = []  # heap of (end in ns, replica index)
        # A heap of (due time of the next unsent emission in ns, replica index).
        self._next_emissions: list[tuple[int, int]] = []

    @property
    def replicas(self) -> list[Replica]:
        """The replicas, those that do not serve now included."""
        return [member.replica for member in self._members]

    @property
    def active(self) -> int:
        """Number of requests in a batch."""
        return sum(replica.active for replica in self.replicas)

    @property
    def queued(self) -> int:
        """Number of requests that wait for admission."""
        return sum(replica.queued for replica in self.replicas)

    @property
    def blocks_used_share(self) -> float:
        """Used share of the key-value cache, from 0 to 1, over all replicas."""
        blocks = self.limits.kv_blocks * len(self._members)
        return sum(replica.blocks_used for replica in self.replicas) / blocks

    @property
    def hit_share(self) -> float:
        """Share of prompt blocks found in the cache, from 0 to 1, since the start."""
        hits = sum(replica.hits for replica in self.replicas)
        lookups = hits + sum(replica.misses for replica in self.replicas)
        return hits / lookups if lookups else 0.0

    def submit(
        self,
        now_ns: int,
        key: Hashable,
        input_tokens: int,
        output_tokens: int,
        blocks: Sequence[Hashable] = (),
    ) -> SimRequest:
        """Add a request that arrives now; `blocks` are the hashes of its prompt's full blocks.

        Once the returned request has a first token, it knows when it was admitted and how much of
        its prompt was cached.

        Raises ValueError for a key in use, and for less than one output token.
        """
        if output_tokens < 1 or key in self._requests:
            raise ValueError(
                f"needs a new key and at least one output token: {key!r}, {output_tokens}"
            )
        request = SimRequest(key, now_ns, input_tokens, output_tokens, blocks)
        self._submit_to_one_replica([request])
        return request

    def submit_prefills(
        self, now_ns: int, keys: Sequence[Hashable], lengths: Sequence[int]
    ) -> SimRequest:
        """Add sequences of these lengths in tokens to one replica, and return the first one.

        Each of them ends with its prefill.
        """
        requests = [
            SimRequest(key, now_ns, tokens, 1) for key, tokens in zip(keys, lengths, strict=True)
        ]
        self._submit_to_one_replica(requests)
        return requests[0]

    def next_event_ns(self) -> int | None:
        """Return when an iteration ends, tokens are due, or replicas change; None if idle.

        The times of changes count from the first request, so none is due before it.
        """
        times_ns = []
        if self._iteration_ends:
            times_ns.append(self._iteration_ends[0][0])
        if self._next_emissions:
            times_ns.append(self._next_emissions[0][0])
        if self._changes and self._first_request_ns is not None:
            times_ns.append(self._first_request_ns + self._changes[0].at_ns)
        return min(times_ns, default=None)

    def advance(self, now_ns: int) -> list[Emission]:
        """Return all emissions that are due by `now_ns`, in order of their due times.

        If the caller comes late, several iterations may have ended. Then each has ended at its own
        time, and the next one has begun at once.
        """
        self._change_replicas(now_ns)
        due: list[Emission] = []
        ends = self._iteration_ends
        while ends and ends[0][0] <= now_ns:
            end_ns, index = heapq.heappop(ends)
            due += self._end_iteration(index, end_ns)
        due = self._take_unsent(now_ns, due)
        for emission in due:
            if emission.is_last:
                del self._requests[emission.key]
        return due

    def cancel(self, key: Hashable) -> None:
        """Emit nothing more for `key`. Unknown keys are ignored.

        If emissions of its replica were dropped, the due time of the replica's next emission may
        have changed, so its entry in the heap is replaced.
        """
        assignment = self._requests.pop(key, None)
        if assignment is None:
            return
        index = assignment.replica_index
        member = self._members[index]
        unsent_before = len(member.unsent)
        member.cancel(assignment.request)
        if len(member.unsent) != unsent_before:
            self._next_emissions = [
                (due_ns, replica_index)
                for due_ns, replica_index in self._next_emissions
                if replica_index != index
            ]
            if member.unsent:
                self._next_emissions.append((member.unsent[0].due_ns, index))
            heapq.heapify(self._next_emissions)

    def _submit_to_one_replica(self, requests: Sequence[SimRequest]) -> None:
        """Submit requests that arrive together to the next replica that serves.

        The router knows all replicas, so those that do not serve now are skipped. An idle replica
        begins an iteration, but not before its last one has ended.
        """
        arrival_ns = requests[0].due_ns
        if self._first_request_ns is None:
            self._first_request_ns = arrival_ns
        index = self._next_replica()
        while index >= self.serving:
            index = self._next_replica()
        member = self._members[index]
        for request in requests:
            member.replica.submit(request)
            self._requests[request.key] = _RequestAssignment(request, index)
        if member.replica.end_ns == NEVER:
            # The replica is idle, so it pauses no request, and there are no emissions.
            start_ns = max(arrival_ns, member.last_end_ns)
            self._begin_iteration(index, start_ns, emissions=[])

    def _change_replicas(self, now_ns: int) -> None:
        """Apply the changes of the number of replicas that are due.

        Their times count from the first request, so there are none before it.
        """
        if self._first_request_ns is None:
            return
        while self._changes and self._first_request_ns + self._changes[0].at_ns <= now_ns:
            serving = self._changes.popleft().serving
            for replica in self.replicas[self.serving : serving]:
                replica.reset_cache()
            self.serving = serving
            lost_keys = [
                key
                for key, assignment in self._requests.items()
                if assignment.replica_index >= serving
            ]
            for key in lost_keys:
                self.cancel(key)
            self.lost += lost_keys

    def _begin_iteration(self, index: int, now_ns: int, emissions: list[Emission]) -> None:
        """Begin an iteration of a replica if there is work, and note when it ends.

        The emissions of paused requests are added to `emissions`.
        """
        member = self._members[index]
        if member.begin(now_ns, emissions):
            heapq.heappush(self._iteration_ends, (member.replica.end_ns, index))

    def _end_iteration(self, index: int, end_ns: int) -> list[Emission]:
        """End an iteration, begin the next one, and return the emissions that are due now.

        Spaced emissions are not due now; they wait with the replica. What the iteration did is
        noted for the page with iteration statistics.
        """
        member = self._members[index]
        replica = member.replica
        emissions: list[Emission] = []
        # `finish` changes these.
        iteration_index = replica.iteration
        decoding_requests = replica.decoding
        duration_ns = end_ns - member.begin_ns
        done = member.finish(end_ns, emissions)
        iteration = Iteration(
            iteration_index=iteration_index,
            replica=index,
            duration_ns=duration_ns,
            context_requests=replica.context_requests,
            context_tokens=replica.context_tokens,
            generating=decoding_requests,
            paused=len(replica.paused),
            active=replica.active,
            queued=replica.queued,
            completed=len(done),
            blocks_used=replica.blocks_used,
            blocks_hit=replica.hits,
            blocks_missed=replica.misses,
        )
        self.iterations.append(iteration)
        self._begin_iteration(index, end_ns, emissions)
        if not emissions or not self._emission_spacing_ns:
            return emissions
        # All are sent within half an iteration, so that they are gone before the next ones come.
        max_spacing_ns = duration_ns // (2 * len(emissions))
        spacing_ns = min(self._emission_spacing_ns, max_spacing_ns)
        self._add_unsent(index, end_ns, spacing_ns, emissions)
        return []

    def _add_unsent(
        self, index: int, end_ns: int, spacing_ns: int, emissions: list[Emission]
    ) -> None:
        """Make the emissions of an iteration due one after the other.

        They begin at the end of the iteration, or after the emissions of the same replica that have
        not been sent yet. The emissions of a group are due together, when its first one is.
        """
        unsent = self._members[index].unsent
        start_ns = end_ns
        if unsent:
            start_ns = max(end_ns, unsent[-1].due_ns + spacing_ns)
        else:
            heapq.heappush(self._next_emissions, (end_ns, index))
        for place, emission in enumerate(emissions):
            group_start = place - place % EMISSIONS_PER_GROUP
            emission.due_ns = start_ns + group_start * spacing_ns
            unsent.append(emission)

    def _take_unsent(self, now_ns: int, due: list[Emission]) -> list[Emission]:
        """Add the spaced emissions that are due to `due`, in order of their due times.

        Each replica has its emissions in order. If several replicas have some that are due, they
        are sorted together.
        """
        next_emissions = self._next_emissions
        replicas_due = 0
        while next_emissions and next_emissions[0][0] <= now_ns:
            replicas_due += 1
            index = next_emissions[0][1]
            unsent = self._members[index].unsent
            while unsent and unsent[0].due_ns <= now_ns:
                due.append(unsent.popleft())
            if unsent:
                heapq.heapreplace(next_emissions, (unsent[0].due_ns, index))
            else:
                heapq.heappop(next_emissions)
        if replicas_due > 1:
            due.sort(key=attrgetter("due_ns"))
        return due
