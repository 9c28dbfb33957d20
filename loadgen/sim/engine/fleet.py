"""The physical engine behind the face of `pace`: some replicas, told the time by whoever has a clock.

Pure. Iterations follow each other without a gap while there is work, whoever asks and however late; a token is there at
the end of its iteration, and due then or, with `apart_ns`, when those before it have left.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import NamedTuple

from loadgen.sim.engine.latency_model import Emission
from loadgen.sim.engine.replica import NEVER, Costs, Replica, ServerLimits, SimRequest
from loadgen.sim.engine.routing import route

BUNCH = 5  # emissions that leave together: a wake-up for each would cost more than the sends
KEPT = 1000  # iterations whose statistics wait to be read, as trtllm-serve keeps them


_due = itemgetter(3)  # of an emission


class Iteration(NamedTuple):
    """What one iteration of one replica did, and what was left when it ended."""

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
    blocks_hit: int  # of prompts found in the cache, and not found: since the start
    blocks_missed: int


class Fleet:
    """`submit`, `next_ns`, `advance`, `cancel` as in `Pace`.

    `interval` tokens come at once: the first alone, then every `interval`, then the rest. The emissions of an iteration
    are due `apart_ns` after each other on average, BUNCH at a time, first tokens first, or as much closer as it takes
    to be done within half an iteration; 0: all at its end.
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
    ) -> None:
        self.limits = limits
        self.replicas = [Replica(costs.at_speed(speed), limits) for speed in speeds]
        self.iterations: deque[Iteration] = deque(maxlen=KEPT)
        self._interval, self._apart_ns = interval, apart_ns
        self._leaving: list[deque[Emission]] = [deque() for _ in speeds]  # of each replica, in order of due
        self._heads: list[tuple[int, int]] = []  # a heap of (due of its next emission, replica)
        self._next = route(speeds, routing)
        self._ends: list[tuple[int, int]] = []
        self._last = [0] * len(speeds)  # when each replica's last iteration ended
        self._begun = [0] * len(speeds)
        self._requests: dict[Hashable, tuple[SimRequest, int]] = {}
        # Decoding requests of a replica, by the iteration (modulo interval) in which they emit.
        self._phases: list[list[dict[SimRequest, None]]] = [[{} for _ in range(interval)] for _ in speeds]

    @property
    def active(self) -> int:
        """Requests in a batch."""
        return sum(replica.active for replica in self.replicas)

    @property
    def queued(self) -> int:
        """Requests that wait for admission."""
        return sum(len(replica.waiting) for replica in self.replicas)

    @property
    def blocks_used_share(self) -> float:
        """Of the key-value cache."""
        return sum(replica.blocks_used for replica in self.replicas) / (self.limits.kv_blocks * len(self.replicas))

    @property
    def hit_share(self) -> float:
        """Blocks of prompts that were found in the cache, of those looked for."""
        hits = sum(replica.hits for replica in self.replicas)
        looked = hits + sum(replica.misses for replica in self.replicas)
        return hits / looked if looked else 0.0

    def submit(
        self, now_ns: int, key: Hashable, input_tokens: int, output_tokens: int, blocks: Sequence[Hashable] = ()
    ) -> SimRequest:
        """A request arrives; `blocks` are the hashes of its prompt's full blocks. What comes back says, once it has a
        first token, when it was admitted and how much of its prompt was cached. ValueError as in `Replica.submit`."""
        if output_tokens < 1 or key in self._requests:
            raise ValueError(f"needs a new key and at least one output token: {key!r}, {output_tokens}")
        request = SimRequest(key, now_ns, input_tokens, output_tokens, blocks)
        at = self._next()
        replica = self.replicas[at]
        replica.submit(request)
        self._requests[key] = request, at
        if replica.end_ns == NEVER:
            self._begin(at, max(now_ns, self._last[at]), [])  # nobody runs who could be paused
        return request

    def next_ns(self) -> int | None:
        """The end of the next iteration, or what is due before it; None: nothing is served."""
        end = self._ends[0][0] if self._ends else None
        if not self._heads:
            return end
        due = self._heads[0][0]
        return due if end is None or due < end else end

    def advance(self, now_ns: int) -> list[Emission]:
        """Everything due by `now_ns`, in order."""
        out: list[Emission] = []
        ends = self._ends
        while ends and ends[0][0] <= now_ns:
            end, at = heapq.heappop(ends)
            made: list[Emission] = []
            length = end - self._begun[at]
            self._finish(at, end, made)
            self._begin(at, end, made)
            if made and self._apart_ns:
                self._leave(at, end, min(self._apart_ns, length // (2 * len(made))), made)
            else:
                out += made
        heads, several = self._heads, 0
        while heads and heads[0][0] <= now_ns:
            several += 1
            at = heads[0][1]
            leaving = self._leaving[at]
            while leaving and leaving[0][3] <= now_ns:
                out.append(leaving.popleft())
            if leaving:
                heapq.heapreplace(heads, (leaving[0][3], at))
            else:
                heapq.heappop(heads)
        if several > 1:
            out.sort(key=_due)
        for key, _, finished, _ in out:
            if finished:
                del self._requests[key]
        return out

    def _leave(self, at: int, end: int, apart_ns: int, made: list[Emission]) -> None:
        """Line up what an iteration has brought, behind what is still leaving."""
        leaving = self._leaving[at]
        if leaving:
            end = max(end, leaving[-1][3] + apart_ns)
        else:
            heapq.heappush(self._heads, (end, at))
        for place, (key, tokens, finished, _) in enumerate(made):
            leaving.append((key, tokens, finished, end + (place - place % BUNCH) * apart_ns))

    def cancel(self, key: Hashable) -> None:
        """The client is gone: nothing more of `key`. Unknown keys are passed over."""
        found = self._requests.pop(key, None)
        if found is None:
            return
        request, at = found
        if request.from_iteration >= 0:
            self._phases[at][request.from_iteration % self._interval].pop(request, None)
        self.replicas[at].cancel(request)
        if any(emission[0] == key for emission in self._leaving[at]):
            kept = deque(emission for emission in self._leaving[at] if emission[0] != key)
            self._leaving[at] = kept
            self._heads = [(due, one) for due, one in self._heads if one != at]
            if kept:
                self._heads.append((kept[0][3], at))
            heapq.heapify(self._heads)

    def _begin(self, at: int, now_ns: int, out: list[Emission]) -> None:
        replica = self.replicas[at]
        del replica.ends[:-1]  # only the engine in virtual time is asked for its history
        if not replica.begin(now_ns):
            self._last[at] = now_ns
            return
        self._begun[at] = now_ns
        heapq.heappush(self._ends, (replica.end_ns, at))
        for request, first, last in replica.paused:
            if last >= first:
                self._phases[at][first % self._interval].pop(request, None)
                if behind := (last - first) % self._interval:
                    out.append((request.key, behind, False, now_ns))

    def _finish(self, at: int, end: int, out: list[Emission]) -> None:
        """Emit what an iteration has brought."""
        replica, interval = self.replicas[at], self._interval
        phases = self._phases[at]
        k = replica.iteration
        generating = replica.decoding
        done = replica.finish()
        started = [request for request in replica.started if request.todo > 1]
        out += [(request.key, 1, False, end) for request in started]
        for request in done:
            start = request.from_iteration
            phases[start % interval].pop(request, None)
            behind = (k - start) % interval or (interval if k > start else 1)
            out.append((request.key, behind, True, end))
        now = phases[k % interval]
        out += [(request.key, interval, False, end) for request in now]
        for request in started:
            now[request] = None
        context = (replica.context_requests, replica.context_tokens)
        self.iterations.append(
            Iteration(
                k, at, end - self._begun[at], *context, generating, len(replica.paused), replica.active,
                len(replica.waiting), len(done), replica.blocks_used, replica.hits, replica.misses,
            )
        )  # fmt: skip
