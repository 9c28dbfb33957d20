"""The physical engine behind the interface of `latency_model.Pace`: several replicas on the caller's clock.

Pure. While there is work, iterations follow each other without a gap, even if the caller asks late. A token exists at
the end of its iteration. It is due then or, with `apart_ns`, after the tokens before it have been sent.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from loadgen.sim.engine.implementation import Replica, SimRequest
from loadgen.sim.engine.latency_model import Emission
from loadgen.sim.engine.replica import NEVER, Costs, ServerLimits
from loadgen.sim.engine.routing import make_router

BUNCH = 5  # emissions sent together: one wake-up per emission would cost more than the sends
KEPT = 1000  # iterations whose statistics are kept until they are read; trtllm-serve keeps as many


_due = itemgetter(3)  # due time of an emission


class Iteration(NamedTuple):
    """What one iteration of one replica did, and the state when it ended."""

    number: int
    replica: int
    length_ns: int
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


class Fleet:
    """Several replicas with the methods of `LatencyModel`: `submit`, `next_ns`, `advance`, `cancel`.

    `interval` tokens are emitted at once: the first alone, then every `interval`, then the rest. The emissions of one
    iteration are `apart_ns` apart on average, in groups of BUNCH, first tokens first. The distance shrinks if needed,
    so that all are sent within half an iteration. 0: all are due at the end of the iteration.

    `changes`: from when on, in ns after the first request, only the first so many replicas serve. What one that goes
    had in work is cancelled, and is in `lost` for the caller to take; one that comes is empty.
    """

    def __init__(
        self,
        *,
        costs: Costs,
        limits: ServerLimits,
        speeds: Sequence[float] = (1.0,),
        routing: str = "round_robin",
        interval: int = 1,
        apart_ns: int = 0,
        changes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.limits = limits
        self.replicas = [Replica(costs.at_speed(speed), limits) for speed in speeds]
        self.iterations: deque[Iteration] = deque(maxlen=KEPT)
        self._interval, self._apart_ns = interval, apart_ns
        self._leaving: list[deque[Emission]] = [
            deque() for _ in speeds
        ]  # per replica, in order of due time
        self._heads: list[tuple[int, int]] = []  # heap of (due time of its next emission, replica)
        self._route = make_router(speeds, routing)
        self.serving, self.lost = len(speeds), list[Any]()
        self.changes, self._begun_ns = deque(changes), -1
        self.counted = bool(changes)  # a metrics page tells how many serve
        self._ends: list[tuple[int, int]] = []  # heap of (end of the current iteration, replica)
        self._last = [0] * len(speeds)  # when each replica's last iteration ended
        self._begun = [0] * len(speeds)
        self._requests: dict[Hashable, tuple[SimRequest, int]] = {}
        # Per replica: decoding requests by the iteration (modulo `interval`) in which they emit.
        self._phases: list[list[dict[SimRequest, None]]] = [
            [{} for _ in range(interval)] for _ in speeds
        ]

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
        return sum(replica.blocks_used for replica in self.replicas) / (
            self.limits.kv_blocks * len(self.replicas)
        )

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
        """A request arrives; `blocks` are the hashes of its prompt's full blocks.

        Once the returned request has a first token, it tells when it was admitted and how much of its prompt was
        cached. Raises ValueError for a key in use, for less than one output token, and as `Replica.submit` does.
        """
        if output_tokens < 1 or key in self._requests:
            raise ValueError(
                f"needs a new key and at least one output token: {key!r}, {output_tokens}"
            )
        request = SimRequest(key, now_ns, input_tokens, output_tokens, blocks)
        self._submit_together([request])
        return request

    def prefill(self, now_ns: int, keys: Sequence[Hashable], lengths: Sequence[int]) -> SimRequest:
        """Several sequences arrive at one replica, of which each ends with its prefill. Returns the first one's."""
        requests = [
            SimRequest(key, now_ns, tokens, 1) for key, tokens in zip(keys, lengths, strict=True)
        ]
        self._submit_together(requests)
        return requests[0]

    def _submit_together(self, requests: Sequence[SimRequest]) -> None:
        if self._begun_ns < 0:
            self._begun_ns = requests[0].due_ns
        at = self._route()
        while at >= self.serving:
            at = self._route()
        replica = self.replicas[at]
        for request in requests:
            replica.submit(request)
            self._requests[request.key] = request, at
        if replica.end_ns == NEVER:
            self._begin(
                at, max(requests[0].due_ns, self._last[at]), []
            )  # idle: no sequence can be paused

    def next_ns(self) -> int | None:
        """The end of the next iteration, or an emission or a change that is due before it; None: no requests."""
        end = self._ends[0][0] if self._ends else None
        if self.changes and self._begun_ns >= 0:
            change = self._begun_ns + self.changes[0][0]
            end = change if end is None else min(end, change)
        if not self._heads:
            return end
        due = self._heads[0][0]
        return due if end is None or due < end else end

    def advance(self, now_ns: int) -> list[Emission]:
        """All emissions due by `now_ns`, in order of due time."""
        due_emissions: list[Emission] = []
        while self.changes and 0 <= self._begun_ns <= now_ns - self.changes[0][0]:
            self._serve(self.changes.popleft()[1])
        ends = self._ends
        while ends and ends[0][0] <= now_ns:
            end, at = heapq.heappop(ends)
            emissions: list[Emission] = []
            length = end - self._begun[at]
            self._finish(at, end, emissions)
            self._begin(at, end, emissions)
            if emissions and self._apart_ns:
                self._queue_emissions(
                    at, end, min(self._apart_ns, length // (2 * len(emissions))), emissions
                )
            else:
                due_emissions += emissions
        heads, replicas_due = self._heads, 0
        while heads and heads[0][0] <= now_ns:
            replicas_due += 1
            at = heads[0][1]
            leaving = self._leaving[at]
            while leaving and leaving[0][3] <= now_ns:
                due_emissions.append(leaving.popleft())
            if leaving:
                heapq.heapreplace(heads, (leaving[0][3], at))
            else:
                heapq.heappop(heads)
        if replicas_due > 1:
            due_emissions.sort(key=_due)
        for key, _, finished, _ in due_emissions:
            if finished:
                del self._requests[key]
        return due_emissions

    def _serve(self, count: int) -> None:
        """Only the first so many replicas serve from now on."""
        before, self.serving = self.serving, count
        for replica in self.replicas[before:count]:
            replica.reset_cache()
        lost = [key for key, (_, at) in self._requests.items() if at >= count]
        for key in lost:
            self.cancel(key)
        self.lost += lost

    def _queue_emissions(self, at: int, end: int, apart_ns: int, emissions: list[Emission]) -> None:
        """Append the emissions of one iteration behind those of the replica that are not sent yet."""
        leaving = self._leaving[at]
        if leaving:
            end = max(end, leaving[-1][3] + apart_ns)
        else:
            heapq.heappush(self._heads, (end, at))
        for index, (key, tokens, finished, _) in enumerate(emissions):
            leaving.append((key, tokens, finished, end + (index - index % BUNCH) * apart_ns))

    def cancel(self, key: Hashable) -> None:
        """The client has gone: no more emissions of `key`. Unknown keys are ignored."""
        entry = self._requests.pop(key, None)
        if entry is None:
            return
        request, at = entry
        if request.resumed_iteration >= 0:
            self._phases[at][request.resumed_iteration % self._interval].pop(request, None)
        self.replicas[at].cancel(request)
        if any(emission[0] == key for emission in self._leaving[at]):
            kept = deque(emission for emission in self._leaving[at] if emission[0] != key)
            self._leaving[at] = kept
            self._heads = [(due, replica) for due, replica in self._heads if replica != at]
            if kept:
                self._heads.append((kept[0][3], at))
            heapq.heapify(self._heads)

    def _begin(self, at: int, now_ns: int, out: list[Emission]) -> None:
        replica = self.replicas[at]
        replica.forget()  # only the virtual-time driver needs the history of iterations
        if not replica.begin(now_ns):
            self._last[at] = now_ns
            if not replica.queued:
                return
            now_ns = (
                replica.next_due_ns
            )  # it came while the replica was idle, before the caller asked again
            replica.begin(now_ns)
        self._begun[at] = now_ns
        heapq.heappush(self._ends, (replica.end_ns, at))
        for request, first, last in replica.paused:
            if last >= first:
                self._phases[at][first % self._interval].pop(request, None)
                if tokens := (last - first) % self._interval:
                    out.append((request.key, tokens, False, now_ns))

    def _finish(self, at: int, end: int, out: list[Emission]) -> None:
        """End an iteration and add its emissions to `out`."""
        replica, interval = self.replicas[at], self._interval
        phases = self._phases[at]
        iteration = replica.iteration
        generating = replica.decoding
        done = replica.finish()
        started = [request for request in replica.started if request.remaining_tokens > 1]
        out += [(request.key, 1, False, end) for request in started]
        for request in done:
            start = request.resumed_iteration
            phases[start % interval].pop(request, None)
            tokens = (iteration - start) % interval or (interval if iteration > start else 1)
            out.append((request.key, tokens, True, end))
        emitting = phases[iteration % interval]
        out += [(request.key, interval, False, end) for request in emitting]
        for request in started:
            emitting[request] = None
        context = (replica.context_requests, replica.context_tokens)
        self.iterations.append(
            Iteration(
                iteration,
                at,
                end - self._begun[at],
                *context,
                generating,
                len(replica.paused),
                replica.active,
                replica.queued,
                len(done),
                replica.blocks_used,
                replica.hits,
                replica.misses,
            )
        )
