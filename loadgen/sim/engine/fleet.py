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
    """What one iteration of one replica did, and the state of the replica when it ended."""

    iteration_index: int
    replica_index: int
    duration_ns: int
    context_requests: int
    context_tokens: int
    decoding_count: int
    paused_count: int
    active_count: int
    queued_count: int
    completed_count: int
    used_block_count: int
    cache_hits: int  # prompt blocks found in the cache, since the start
    cache_misses: int  # prompt blocks not found, since the start


@dataclass(frozen=True, slots=True)
class _RequestAssignment:
    """A request and the index of the replica that serves it."""

    request: SimRequest
    replica_index: int


class _FleetReplica:
    """One replica of a fleet, and the emissions that follow from its iterations.

    An emission is a number of tokens of one request that are sent together. With n tokens per
    event, a request emits its first token alone, then n tokens in every n-th iteration after it,
    and the rest with its last token. So the requests that emit n tokens in iteration i are those
    whose first iteration since their admission is equal to i modulo n.

    Attributes:
        replica: The simulated replica.
        begin_ns: The start of the current iteration.
        last_end_ns: The end of the last iteration before the replica became idle.
        unsent_emissions: Spaced emissions that are not sent yet, in order of due time.
    """

    def __init__(self, replica: Replica, tokens_per_event: int) -> None:
        """Take over an idle replica. `tokens_per_event` counts for each event after the first."""
        self.replica = replica
        self.begin_ns = 0
        self.last_end_ns = 0
        self.unsent_emissions: deque[Emission] = deque()
        self._tokens_per_event = tokens_per_event
        # Decoding requests by their first iteration since the admission, modulo the tokens per
        # event. A dict without values is an ordered set.
        self._requests_by_phase: list[dict[SimRequest, None]] = [
            {} for _ in range(tokens_per_event)
        ]

    def begin_iteration(self, now_ns: int, emissions: list[Emission]) -> bool:
        """Begin an iteration, and return False if there is nothing to do.

        The last tokens of requests that are paused are added to `emissions`.
        """
        replica = self.replica
        # Only simulations in virtual time need the ends of all iterations.
        replica.discard_iteration_ends()
        if not replica.begin_iteration(now_ns):
            self.last_end_ns = now_ns
            if not replica.queued_count:
                return False
            # The caller is late: a request has come after the replica became idle at `now_ns`.
            now_ns = replica.next_due_ns
            replica.begin_iteration(now_ns)
        self.begin_ns = now_ns
        self._emit_before_pauses(now_ns, emissions)
        return True

    def end_iteration(self, end_ns: int, emissions: list[Emission]) -> list[SimRequest]:
        """End the current iteration at `end_ns`, and return the requests that are done.

        The emissions of the iteration are added to `emissions` in this order: first tokens alone,
        last tokens of requests that are done, and full events of all other requests.
        """
        replica = self.replica
        iteration = replica.iteration
        done_requests = replica.end_iteration()
        # A request with one token is done with its first token, and emits it as its last one.
        started_requests = [
            request
            for request in replica.first_token_requests
            if request.remaining_output_tokens > 1
        ]
        for request in started_requests:
            first_token = Emission(request.key, tokens=1, is_last=False, due_ns=end_ns)
            emissions.append(first_token)
        for request in done_requests:
            tokens = self._count_last_tokens(request, iteration)
            emissions.append(Emission(request.key, tokens, is_last=True, due_ns=end_ns))
            self._remove_from_phase(request)
        requests_of_phase = self._requests_by_phase[iteration % self._tokens_per_event]
        # A comprehension and positional arguments, because this runs once per event.
        tokens_per_event = self._tokens_per_event
        emissions += [
            Emission(request.key, tokens_per_event, False, end_ns) for request in requests_of_phase
        ]
        # Added last, because their next event is due only after `tokens_per_event` iterations.
        for request in started_requests:
            requests_of_phase[request] = None
        return done_requests

    def _emit_before_pauses(self, now_ns: int, emissions: list[Emission]) -> None:
        """Emit the tokens that paused requests have generated and not emitted yet.

        After its pause, a request begins with its first token alone again, so these tokens cannot
        be a part of its next event.
        """
        for request, first_iteration, last_iteration in self.replica.recent_pauses:
            has_tokens = last_iteration >= first_iteration
            if not has_tokens:
                continue
            self._requests_by_phase[first_iteration % self._tokens_per_event].pop(request, None)
            tokens = (last_iteration - first_iteration) % self._tokens_per_event
            if tokens:
                emissions.append(Emission(request.key, tokens, is_last=False, due_ns=now_ns))

    def _count_last_tokens(self, request: SimRequest, last_iteration: int) -> int:
        """Return how many tokens the last emission of a request has.

        These are the tokens since its last full event. The first token is emitted alone.
        """
        tokens_after_first = last_iteration - request.resumed_iteration
        if not tokens_after_first:
            return 1  # the last token is also the first
        tokens_since_event = tokens_after_first % self._tokens_per_event
        return tokens_since_event or self._tokens_per_event

    def _remove_from_phase(self, request: SimRequest) -> None:
        """Let a request emit no more full events. Does nothing if it emits none."""
        phase = request.resumed_iteration % self._tokens_per_event
        self._requests_by_phase[phase].pop(request, None)

    def cancel(self, request: SimRequest) -> None:
        """Stop a request. Its tokens that are not sent yet are dropped, too."""
        has_tokens = request.resumed_iteration >= 0
        if has_tokens:
            self._remove_from_phase(request)
        self.replica.cancel(request)
        key = request.key
        if any(emission.key == key for emission in self.unsent_emissions):
            self.unsent_emissions = deque(
                emission for emission in self.unsent_emissions if emission.key != key
            )


class Fleet:
    """Several replicas with the methods of `LatencyModel`.

    The first token of a request is emitted alone, then every `system.tokens_per_event` tokens, then
    the rest.

    The times of `system.changes` count from the first request. A new replica has an empty cache.
    The requests of a removed replica are cancelled.

    Attributes:
        limits: The limits of each replica.
        serving_count: Number of replicas that get requests now. These are the first ones.
        lost_keys: The keys of requests that were cancelled with their replica. The caller handles
            and removes them.
        iterations: What the last iterations of all replicas did. The caller removes what it reads.
        reports_serving_replicas: Whether the metrics page shows how many replicas serve.
    """

    def __init__(self, system: SimulatedSystem, *, emission_spacing_ns: int = 0) -> None:
        """Create the idle replicas of a system.

        Args:
            system: The replicas and how requests are routed to them.
            emission_spacing_ns: The mean time between emissions of one iteration, which a real
                server sends one after the other. It is reduced if needed, so that all are sent
                within half an iteration. With 0 all are due at the end of the iteration.
        """
        self.limits = system.limits
        self.serving_count = len(system.speeds)
        self.lost_keys: list[Any] = []
        self.iterations: deque[Iteration] = deque(maxlen=MAX_ITERATIONS)
        self.reports_serving_replicas = bool(system.changes)
        self._fleet_replicas = [
            _FleetReplica(replica, system.tokens_per_event) for replica in system.create_replicas()
        ]
        self._emission_spacing_ns = emission_spacing_ns
        self._choose_replica = system.create_router()
        self._changes = deque(system.changes)
        self._first_request_ns: int | None = None
        self._requests: dict[Hashable, _RequestAssignment] = {}
        # A heap of (end of the current iteration in ns, replica index).
        self._iteration_ends: list[tuple[int, int]] = []
        # A heap of (due time of the next unsent emission in ns, replica index).
        self._next_emissions: list[tuple[int, int]] = []

    @property
    def replicas(self) -> list[Replica]:
        """The replicas, those that do not serve now included."""
        return [fleet_replica.replica for fleet_replica in self._fleet_replicas]

    @property
    def active_count(self) -> int:
        """Number of requests in a batch."""
        return sum(replica.active_count for replica in self.replicas)

    @property
    def queued_count(self) -> int:
        """Number of requests that wait for admission."""
        return sum(replica.queued_count for replica in self.replicas)

    @property
    def cache_utilization(self) -> float:
        """Fraction of the blocks of the key-value caches that are in use, over all replicas."""
        block_count = self.limits.kv_blocks * len(self._fleet_replicas)
        return sum(replica.used_block_count for replica in self.replicas) / block_count

    @property
    def cache_hit_rate(self) -> float:
        """Fraction of prompt blocks found in the prefix cache since the start."""
        hits = sum(replica.cache_hits for replica in self.replicas)
        lookups = hits + sum(replica.cache_misses for replica in self.replicas)
        return hits / lookups if lookups else 0.0

    def submit(
        self,
        now_ns: int,
        key: Hashable,
        input_tokens: int,
        output_tokens: int,
        blocks: Sequence[Hashable] = (),
    ) -> SimRequest:
        """Add a request that arrives now, and return its state in the engine.

        Once the returned request has a first token, it knows when it was admitted and how much of
        its prompt was cached.

        Args:
            now_ns: The time of arrival.
            key: Names the request in emissions and in `cancel`.
            input_tokens: The length of the prompt.
            output_tokens: The length of the output, at least 1.
            blocks: The hashes of the full blocks of the prompt. See `SimRequest.blocks`.

        Raises:
            ValueError: The key is in use, or there is less than one output token.
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
        """Add the sequences of a non-generative request (embeddings, rerank) to one replica.

        Each of them ends with its prefill and emits one token then. Its key is that of the same
        index in `keys`, and its length in tokens that in `lengths`. Returns the first sequence.
        """
        requests = [
            SimRequest(key, now_ns, tokens, 1) for key, tokens in zip(keys, lengths, strict=True)
        ]
        self._submit_to_one_replica(requests)
        return requests[0]

    def next_event_ns(self) -> int | None:
        """Return when `advance` has to be called next, or None if the fleet is idle.

        That is when an iteration ends, unsent tokens are due, or the number of replicas changes,
        whichever comes first. Times of changes count from the first request, so none is due before
        it.
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

        If the caller comes late, several iterations may have ended. Each one still ends at its
        planned time and is followed by the next one at once, so a late caller slows nothing down.
        """
        self._apply_replica_changes(now_ns)
        emissions: list[Emission] = []
        ends = self._iteration_ends
        while ends and ends[0][0] <= now_ns:
            end_ns, replica_index = heapq.heappop(ends)
            emissions += self._end_iteration(replica_index, end_ns)
        self._take_due_emissions(now_ns, emissions)
        for emission in emissions:
            if emission.is_last:
                del self._requests[emission.key]
        return emissions

    def cancel(self, key: Hashable) -> None:
        """Cancel the request with this key, and emit nothing more for it. Ignores unknown keys."""
        assignment = self._requests.pop(key, None)
        if assignment is None:
            return
        fleet_replica = self._fleet_replicas[assignment.replica_index]
        unsent_count = len(fleet_replica.unsent_emissions)
        fleet_replica.cancel(assignment.request)
        has_dropped_emissions = len(fleet_replica.unsent_emissions) != unsent_count
        if has_dropped_emissions:
            self._reschedule_emissions(assignment.replica_index)

    def _reschedule_emissions(self, replica_index: int) -> None:
        """Replace the entry of a replica in the heap `_next_emissions`.

        After emissions were dropped, the next one of the replica may be due later than its entry
        says, or there may be none.
        """
        other_entries = [entry for entry in self._next_emissions if entry[1] != replica_index]
        unsent_emissions = self._fleet_replicas[replica_index].unsent_emissions
        if unsent_emissions:
            other_entries.append((unsent_emissions[0].due_ns, replica_index))
        heapq.heapify(other_entries)
        self._next_emissions = other_entries

    def _submit_to_one_replica(self, requests: Sequence[SimRequest]) -> None:
        """Submit requests that arrive together to the next serving replica.

        The router chooses from all replicas, so it is asked again if its choice does not serve now.
        An idle replica begins an iteration, but not before its last one has ended.
        """
        arrival_ns = requests[0].due_ns
        if self._first_request_ns is None:
            self._first_request_ns = arrival_ns
        replica_index = self._choose_replica()
        while replica_index >= self.serving_count:
            replica_index = self._choose_replica()
        fleet_replica = self._fleet_replicas[replica_index]
        for request in requests:
            fleet_replica.replica.submit(request)
            self._requests[request.key] = _RequestAssignment(request, replica_index)
        is_idle = fleet_replica.replica.end_ns == NEVER
        if is_idle:
            start_ns = max(arrival_ns, fleet_replica.last_end_ns)
            # An idle replica pauses no request, so there are no emissions.
            self._begin_iteration(replica_index, start_ns, emissions=[])

    def _apply_replica_changes(self, now_ns: int) -> None:
        """Apply the changes of the number of replicas that are due by `now_ns`.

        New replicas begin with an empty cache. The requests of removed replicas are cancelled, and
        their keys are added to `lost_keys`. Times of changes count from the first request, so there
        are none before it.
        """
        if self._first_request_ns is None:
            return
        while self._changes and self._first_request_ns + self._changes[0].at_ns <= now_ns:
            serving_count = self._changes.popleft().serving_count
            for replica in self.replicas[self.serving_count : serving_count]:
                replica.reset_cache()
            self.serving_count = serving_count
            lost_keys = [
                key
                for key, assignment in self._requests.items()
                if assignment.replica_index >= serving_count
            ]
            for key in lost_keys:
                self.cancel(key)
            self.lost_keys += lost_keys

    def _begin_iteration(self, replica_index: int, now_ns: int, emissions: list[Emission]) -> None:
        """Begin an iteration of a replica if there is work, and schedule its end.

        The emissions of paused requests are added to `emissions`.
        """
        fleet_replica = self._fleet_replicas[replica_index]
        if fleet_replica.begin_iteration(now_ns, emissions):
            end_ns = fleet_replica.replica.end_ns
            heapq.heappush(self._iteration_ends, (end_ns, replica_index))

    def _end_iteration(self, replica_index: int, end_ns: int) -> list[Emission]:
        """End an iteration, begin the next one, and return the emissions that are due now.

        Spaced emissions are not due now. They are scheduled for later, and the list is empty.
        """
        fleet_replica = self._fleet_replicas[replica_index]
        replica = fleet_replica.replica
        iteration_index = replica.iteration
        decoding_count = replica.decoding_count
        duration_ns = end_ns - fleet_replica.begin_ns

        emissions: list[Emission] = []
        done_requests = fleet_replica.end_iteration(end_ns, emissions)
        self.iterations.append(
            Iteration(
                iteration_index=iteration_index,
                replica_index=replica_index,
                duration_ns=duration_ns,
                context_requests=replica.context_requests,
                context_tokens=replica.context_tokens,
                decoding_count=decoding_count,
                paused_count=len(replica.recent_pauses),
                active_count=replica.active_count,
                queued_count=replica.queued_count,
                completed_count=len(done_requests),
                used_block_count=replica.used_block_count,
                cache_hits=replica.cache_hits,
                cache_misses=replica.cache_misses,
            )
        )
        self._begin_iteration(replica_index, end_ns, emissions)

        if not emissions or not self._emission_spacing_ns:
            return emissions
        # All are sent within half an iteration, so that they are gone before the next ones come.
        max_spacing_ns = duration_ns // (2 * len(emissions))
        spacing_ns = min(self._emission_spacing_ns, max_spacing_ns)
        self._schedule_emissions(replica_index, end_ns, spacing_ns, emissions)
        return []

    def _schedule_emissions(
        self, replica_index: int, end_ns: int, spacing_ns: int, emissions: list[Emission]
    ) -> None:
        """Let the emissions of an iteration be due one after the other, `spacing_ns` apart.

        They begin at the end of the iteration, or after the emissions of the same replica that have
        not been sent yet. They are due in groups of EMISSIONS_PER_GROUP: all emissions of a group
        are due at the time of its first one.
        """
        unsent_emissions = self._fleet_replicas[replica_index].unsent_emissions
        start_ns = end_ns
        if unsent_emissions:
            start_ns = max(end_ns, unsent_emissions[-1].due_ns + spacing_ns)
        else:
            heapq.heappush(self._next_emissions, (end_ns, replica_index))
        for index, emission in enumerate(emissions):
            first_of_group = index - index % EMISSIONS_PER_GROUP
            emission.due_ns = start_ns + first_of_group * spacing_ns
            unsent_emissions.append(emission)

    def _take_due_emissions(self, now_ns: int, emissions: list[Emission]) -> None:
        """Move the scheduled emissions that are due by `now_ns` to the end of `emissions`.

        Each replica has its emissions in order of due time. If several replicas have some that are
        due, all are sorted together.
        """
        next_emissions = self._next_emissions
        due_replica_count = 0
        while next_emissions and next_emissions[0][0] <= now_ns:
            due_replica_count += 1
            _, replica_index = next_emissions[0]
            unsent_emissions = self._fleet_replicas[replica_index].unsent_emissions
            while unsent_emissions and unsent_emissions[0].due_ns <= now_ns:
                emissions.append(unsent_emissions.popleft())
            if unsent_emissions:
                next_entry = (unsent_emissions[0].due_ns, replica_index)
                heapq.heapreplace(next_emissions, next_entry)
            else:
                heapq.heappop(next_emissions)
        if due_replica_count > 1:
            emissions.sort(key=attrgetter("due_ns"))
