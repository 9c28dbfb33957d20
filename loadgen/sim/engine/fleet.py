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


class _EventGroups:
    """Decoding requests, grouped by the iterations in which they emit a full event.

    An event is what a client receives at once. With n tokens per event, a request emits its first
    token alone, then a full event of n tokens every n iterations, and the rest with its last token.
    With n = 3, a request whose first token comes in iteration 4 has full events in iterations 7,
    10, 13 and so on: those with remainder 1 modulo 3. The requests with the same remainder are a
    group, so the requests that emit an event in an iteration are found without visiting all.
    """

    def __init__(self, tokens_per_event: int) -> None:
        """Create the groups without requests."""
        self._tokens_per_event = tokens_per_event
        # One group per remainder. A dict without values is a set that keeps the order.
        self._groups: list[dict[SimRequest, None]] = [{} for _ in range(tokens_per_event)]

    def get_group(self, iteration: int) -> dict[SimRequest, None]:
        """Return the requests that emit a full event in this iteration."""
        return self._groups[iteration % self._tokens_per_event]

    def add(self, request: SimRequest, first_iteration: int) -> None:
        """Add a request whose first token came in `first_iteration`."""
        self.get_group(first_iteration)[request] = None

    def remove(self, request: SimRequest, first_iteration: int) -> None:
        """Remove a request whose first token came in `first_iteration`, if it is in its group."""
        self.get_group(first_iteration).pop(request, None)


class _EndedIteration(NamedTuple):
    """The last iteration of a replica.

    Attributes:
        iteration_index: The number of the iteration on its replica.
        duration_ns: How long it took.
        decoding_count: How many requests decoded a token in it.
        completed_count: How many requests it has completed.
        emissions: The tokens that were generated and have to be sent.
    """

    iteration_index: int
    duration_ns: int
    decoding_count: int
    completed_count: int
    emissions: list[Emission]


class _FleetReplica:
    """One replica of a fleet, and the emissions that follow from its iterations.

    An emission is a number of tokens of one request that are sent together.

    Attributes:
        replica: The simulated replica.
        begin_ns: The start of the current iteration.
        last_end_ns: The end of the last iteration before the replica became idle.
        unsent_emissions: Emissions that are due later, in order of due time.
    """

    def __init__(self, replica: Replica, tokens_per_event: int) -> None:
        """Wrap an idle replica. After its first token, a request emits `tokens_per_event` each."""
        self.replica = replica
        self.begin_ns = 0
        self.last_end_ns = 0
        self.unsent_emissions: deque[Emission] = deque()
        self._tokens_per_event = tokens_per_event
        self._event_groups = _EventGroups(tokens_per_event)

    def begin_iteration(self, now_ns: int) -> list[Emission]:
        """Begin an iteration, and return the last emissions of requests that it pauses.

        The replica becomes idle if it has nothing to compute.
        """
        # A server does not look back at past iterations, so their end times need no memory.
        self.replica.discard_iteration_ends()
        self.begin_ns = self._begin_now_or_at_arrival(now_ns)
        return self._build_emissions_before_pauses(self.begin_ns)

    def _begin_now_or_at_arrival(self, now_ns: int) -> int:
        """Begin an iteration now or, if there is no work yet, when the next request arrives.

        The fleet simulates an iteration only when its caller asks for emissions, which may be late.
        Suppose an iteration ended at 10 ms, a request arrived at 12 ms, and the caller comes at 15
        ms. Then `now_ns` is 10 ms, and the queue has a request that arrives in the future. The next
        iteration begins at 12 ms.

        Returns:
            When the iteration begins. If no request is in the queue, the replica becomes idle, and
            the result is `now_ns`.
        """
        replica = self.replica
        has_work_now = replica.begin_iteration(now_ns)
        if has_work_now:
            return now_ns

        self.last_end_ns = now_ns
        has_later_request = replica.queued_count > 0
        if not has_later_request:
            return now_ns

        arrival_ns = replica.next_due_ns
        replica.begin_iteration(arrival_ns)
        return arrival_ns

    def end_iteration(self, end_ns: int) -> _EndedIteration:
        """End the current iteration at `end_ns`, and return what it has done.

        Each request emits tokens in at most one of three ways:

        - A request that starts emits its first token alone.
        - A request that is done emits the tokens that it has not emitted yet.
        - Any other request emits a full event (n tokens) every n iterations. Requests that do so in
          the same iterations are in one event group.
        """
        replica = self.replica
        iteration = replica.iteration
        decoding_count = replica.decoding_count
        done_requests = replica.end_iteration()

        # The requests that are done leave the event groups, so they emit no full event now.
        last_tokens = self._build_last_tokens(done_requests, iteration, end_ns)
        for request in done_requests:
            self._event_groups.remove(request, request.resumed_iteration)

        full_events = self._build_full_events(iteration, end_ns)

        # The requests that start enter the event groups, for the next iterations. A request for one
        # token does not start: its first token is emitted as its last one.
        started_requests = [
            request
            for request in replica.first_token_requests
            if request.remaining_output_tokens > 1
        ]
        first_tokens = _build_first_tokens(started_requests, end_ns)
        for request in started_requests:
            self._event_groups.add(request, iteration)

        return _EndedIteration(
            iteration_index=iteration,
            duration_ns=end_ns - self.begin_ns,
            decoding_count=decoding_count,
            completed_count=len(done_requests),
            emissions=first_tokens + last_tokens + full_events,
        )

    def _build_last_tokens(
        self, done_requests: Sequence[SimRequest], iteration: int, end_ns: int
    ) -> list[Emission]:
        """Return the last emissions of requests that are done with an iteration."""
        emissions = []
        for request in done_requests:
            tokens = self._count_last_tokens(request, iteration)
            emissions.append(Emission(request.key, tokens, is_last=True, due_ns=end_ns))
        return emissions

    def _build_full_events(self, iteration: int, end_ns: int) -> list[Emission]:
        """Return the full events of an iteration, one per request in its event group."""
        tokens = self._tokens_per_event
        # Positional arguments, because this runs once per event.
        return [
            Emission(request.key, tokens, False, end_ns)
            for request in self._event_groups.get_group(iteration)
        ]

    def _build_emissions_before_pauses(self, now_ns: int) -> list[Emission]:
        """Return the emissions of paused requests, with the tokens that they have not emitted yet.

        With n tokens per event, a request emits its first token alone and then n tokens every n
        iterations. For example, with n = 4, a request that got tokens in iterations 10 to 16 has
        emitted them at 10 and 14. If it is paused now, the 2 tokens of iterations 15 and 16 are
        left. When the request is admitted again, it begins anew with a first token alone.
        """
        emissions = []
        for request, first_iteration, last_iteration in self.replica.recent_pauses:
            was_in_prefill = last_iteration < first_iteration  # it has no token yet
            if was_in_prefill:
                continue

            self._event_groups.remove(request, first_iteration)
            tokens_after_first = last_iteration - first_iteration
            tokens_left = tokens_after_first % self._tokens_per_event
            if tokens_left > 0:
                emissions.append(Emission(request.key, tokens_left, is_last=False, due_ns=now_ns))

        return emissions

    def _count_last_tokens(self, request: SimRequest, last_iteration: int) -> int:
        """Return how many tokens the last emission of a request has.

        A request emits its first token alone, and then full events of n tokens (n is
        `tokens_per_event`). The last emission has the tokens after the last full event. If the last
        token completes a full event, it has n tokens.
        """
        tokens_after_first = last_iteration - request.resumed_iteration
        if tokens_after_first == 0:
            return 1  # the first token is also the last one
        tokens_since_event = tokens_after_first % self._tokens_per_event
        if tokens_since_event == 0:
            return self._tokens_per_event
        return tokens_since_event

    def take_due_emissions(self, now_ns: int) -> list[Emission]:
        """Remove the unsent emissions that are due by `now_ns`, and return them in order."""
        unsent_emissions = self.unsent_emissions
        due_emissions = []
        while unsent_emissions and unsent_emissions[0].due_ns <= now_ns:
            due_emissions.append(unsent_emissions.popleft())
        return due_emissions

    def cancel(self, request: SimRequest) -> bool:
        """Stop a request, and drop its tokens that have not been sent yet.

        Returns:
            Whether unsent tokens were dropped, so that the next emission may be due later.
        """
        has_first_token = request.resumed_iteration >= 0  # since its last admission to the batch
        if has_first_token:
            self._event_groups.remove(request, request.resumed_iteration)

        self.replica.cancel(request)
        remaining_emissions = deque(
            emission for emission in self.unsent_emissions if emission.key != request.key
        )
        has_dropped_emissions = len(remaining_emissions) < len(self.unsent_emissions)
        self.unsent_emissions = remaining_emissions

        return has_dropped_emissions


def _build_first_tokens(requests: Sequence[SimRequest], end_ns: int) -> list[Emission]:
    """Return the emissions with the first tokens of requests that go on."""
    return [Emission(request.key, tokens=1, is_last=False, due_ns=end_ns) for request in requests]


class _ReplicaTime(NamedTuple):
    """A time at which something happens on a replica. Heaps of them are in order of time."""

    time_ns: int
    replica_index: int


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
            emission_spacing_ns: The mean time between two emissions of an iteration, which a real
                server sends one after the other. With many emissions it is shorter, so that all
                are sent within half the duration of the iteration. With 0, all are due when the
                iteration ends.
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

        # A heap with the end of the current iteration of each busy replica.
        self._iteration_ends: list[_ReplicaTime] = []

        # A heap with the due time of the next unsent emission of each replica that has one.
        self._next_due_times: list[_ReplicaTime] = []

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

        A sequence is one of the texts of the request. It ends with its prefill, which emits one
        token, so it is submitted as a request for one output token.

        Args:
            now_ns: The time of arrival.
            keys: One key per sequence, which names it in emissions.
            lengths: The length of each sequence in tokens.

        Returns:
            The first sequence, whose state tells when the request was admitted.
        """
        output_tokens = 1
        sequences = [
            SimRequest(key, now_ns, input_tokens, output_tokens)
            for key, input_tokens in zip(keys, lengths, strict=True)
        ]
        self._submit_to_one_replica(sequences)
        return sequences[0]

    def next_event_ns(self) -> int | None:
        """Return when `advance` has to be called next, or None if the fleet is idle.

        That is when an iteration ends, unsent tokens are due, or the number of replicas changes,
        whichever comes first. Times of changes count from the first request, so none is due before
        it.
        """
        times_ns = []
        if self._iteration_ends:
            times_ns.append(self._iteration_ends[0].time_ns)

        if self._next_due_times:
            times_ns.append(self._next_due_times[0].time_ns)

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
        while ends and ends[0].time_ns <= now_ns:
            end_ns, replica_index = heapq.heappop(ends)
            emissions += self._end_iteration(replica_index, end_ns)

        emissions += self._take_due_emissions(now_ns)
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
        has_dropped_emissions = fleet_replica.cancel(assignment.request)
        if has_dropped_emissions:
            self._update_next_emission(assignment.replica_index)

    def _update_next_emission(self, replica_index: int) -> None:
        """Update the due time of the next unsent emission of a replica, after some were dropped.

        The heap `_next_due_times` has one entry per replica with unsent emissions: the due time of
        the first one. That may be later now, or there may be no emission any more.
        """
        self._next_due_times = [
            entry for entry in self._next_due_times if entry.replica_index != replica_index
        ]
        heapq.heapify(self._next_due_times)
        self._push_next_emission(replica_index)

    def _push_next_emission(self, replica_index: int) -> None:
        """Add the due time of the next unsent emission of a replica, if any, to the heap.

        The replica must not have an entry in the heap.
        """
        unsent_emissions = self._fleet_replicas[replica_index].unsent_emissions
        if unsent_emissions:
            entry = _ReplicaTime(unsent_emissions[0].due_ns, replica_index)
            heapq.heappush(self._next_due_times, entry)

    def _submit_to_one_replica(self, requests: Sequence[SimRequest]) -> None:
        """Submit requests that arrive together to the next serving replica.

        An idle replica begins an iteration when the requests arrive or when its last iteration has
        ended, whichever is later.
        """
        arrival_ns = requests[0].due_ns
        if self._first_request_ns is None:
            self._first_request_ns = arrival_ns

        replica_index = self._choose_serving_replica()
        fleet_replica = self._fleet_replicas[replica_index]
        for request in requests:
            fleet_replica.replica.submit(request)
            self._requests[request.key] = _RequestAssignment(request, replica_index)

        is_idle = fleet_replica.replica.end_ns == NEVER
        if is_idle:
            start_ns = max(arrival_ns, fleet_replica.last_end_ns)
            # An idle replica has no request to pause, so nothing is emitted.
            self._begin_iteration(replica_index, start_ns)

    def _choose_serving_replica(self) -> int:
        """Return the index of the replica for the next request.

        The router goes through all replicas in a fixed order. Replicas that do not serve now are
        skipped. The first replica always serves, so the loop ends.
        """
        replica_index = self._choose_replica()
        while replica_index >= self.serving_count:
            replica_index = self._choose_replica()
        return replica_index

    def _apply_replica_changes(self, now_ns: int) -> None:
        """Apply the changes of the number of serving replicas that are due by `now_ns`.

        The times of changes count from the first request, so none is due before it.
        """
        if self._first_request_ns is None:
            return
        while self._changes and self._first_request_ns + self._changes[0].at_ns <= now_ns:
            change = self._changes.popleft()
            self._set_serving_count(change.serving_count)

    def _set_serving_count(self, new_count: int) -> None:
        """Let only the first `new_count` replicas serve requests from now on.

        New replicas begin with an empty cache. The requests of removed replicas are cancelled, and
        their keys are added to `lost_keys`.
        """
        new_replicas = range(self.serving_count, new_count)  # empty if replicas are removed
        for replica_index in new_replicas:
            self._fleet_replicas[replica_index].replica.reset_cache()

        self.serving_count = new_count
        lost_keys = [
            key
            for key, assignment in self._requests.items()
            if assignment.replica_index >= new_count
        ]
        for key in lost_keys:
            self.cancel(key)

        self.lost_keys += lost_keys

    def _begin_iteration(self, replica_index: int, now_ns: int) -> list[Emission]:
        """Begin an iteration of a replica if it has work, and schedule the end of the iteration.

        Returns the last emissions of requests that are paused for lack of memory.
        """
        fleet_replica = self._fleet_replicas[replica_index]
        emissions = fleet_replica.begin_iteration(now_ns)
        end_ns = fleet_replica.replica.end_ns
        is_busy = end_ns != NEVER
        if is_busy:
            heapq.heappush(self._iteration_ends, _ReplicaTime(end_ns, replica_index))
        return emissions

    def _end_iteration(self, replica_index: int, end_ns: int) -> list[Emission]:
        """End an iteration of a replica, begin its next one, and return what is emitted now.

        A real server sends the tokens of an iteration one after the other. With the option
        `emission_spacing_ns` they are scheduled for later in this way, and the result is empty.
        Otherwise all are emitted now.
        """
        ended_iteration = self._fleet_replicas[replica_index].end_iteration(end_ns)
        self._record_iteration(replica_index, ended_iteration)
        emissions_before_pauses = self._begin_iteration(replica_index, end_ns)
        emissions = ended_iteration.emissions + emissions_before_pauses

        if not emissions or not self._emission_spacing_ns:
            return emissions

        # All are sent within half the duration of the iteration, which is before the next one ends.
        max_send_duration_ns = ended_iteration.duration_ns // 2
        max_spacing_ns = max_send_duration_ns // len(emissions)
        spacing_ns = min(self._emission_spacing_ns, max_spacing_ns)
        self._schedule_emissions(replica_index, end_ns, spacing_ns, emissions)

        return []

    def _record_iteration(self, replica_index: int, ended_iteration: _EndedIteration) -> None:
        """Keep the statistics of an iteration that has just ended, before the next one begins."""
        replica = self._fleet_replicas[replica_index].replica
        self.iterations.append(
            Iteration(
                iteration_index=ended_iteration.iteration_index,
                replica_index=replica_index,
                duration_ns=ended_iteration.duration_ns,
                context_requests=replica.context_requests,
                context_tokens=replica.context_tokens,
                decoding_count=ended_iteration.decoding_count,
                paused_count=len(replica.recent_pauses),
                active_count=replica.active_count,
                queued_count=replica.queued_count,
                completed_count=ended_iteration.completed_count,
                used_block_count=replica.used_block_count,
                cache_hits=replica.cache_hits,
                cache_misses=replica.cache_misses,
            )
        )

    def _schedule_emissions(
        self, replica_index: int, end_ns: int, spacing_ns: int, emissions: list[Emission]
    ) -> None:
        """Schedule the emissions of an iteration, which are sent one after the other.

        To save wake-ups of the server, they are sent in groups of EMISSIONS_PER_GROUP. For example,
        with groups of 5 and a spacing of 1 ms, emissions 0 to 4 are due at the end of the
        iteration, and emissions 5 to 9 are due 5 ms later.

        Args:
            replica_index: The replica of the iteration.
            end_ns: The end of the iteration. The first group is due then, or after the unsent
                emissions of earlier iterations of the same replica.
            spacing_ns: The mean time between two emissions.
            emissions: The emissions, whose field `due_ns` is set.
        """
        unsent_emissions = self._fleet_replicas[replica_index].unsent_emissions
        had_unsent_emissions = bool(unsent_emissions)

        # When the first group is due.
        start_ns = end_ns
        if had_unsent_emissions:
            start_ns = max(end_ns, unsent_emissions[-1].due_ns + spacing_ns)

        for group_start in range(0, len(emissions), EMISSIONS_PER_GROUP):
            group_due_ns = start_ns + group_start * spacing_ns
            for emission in emissions[group_start : group_start + EMISSIONS_PER_GROUP]:
                emission.due_ns = group_due_ns

        # A replica with unsent emissions is in the heap already, with its first one.
        unsent_emissions += emissions
        if not had_unsent_emissions:
            self._push_next_emission(replica_index)

    def _take_due_emissions(self, now_ns: int) -> list[Emission]:
        """Remove the scheduled emissions that are due by `now_ns`, and return them in order.

        Each replica has its emissions in order of due time, so they are only sorted if several
        replicas have emissions that are due.
        """
        due_times = self._next_due_times
        emissions: list[Emission] = []

        due_replica_count = 0
        while due_times and due_times[0].time_ns <= now_ns:
            replica_index = heapq.heappop(due_times).replica_index
            emissions += self._fleet_replicas[replica_index].take_due_emissions(now_ns)
            self._push_next_emission(replica_index)
            due_replica_count += 1

        if due_replica_count > 1:
            emissions.sort(key=attrgetter("due_ns"))

        return emissions
