"""The physical engine behind the face of `pace`: some replicas, told the time by whoever has a clock.

Pure. Iterations follow each other without a gap while there is work, whoever asks and however late; a token is due at
the end of its iteration.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from loadgen.sim.engine import NEVER, Costs, Limits, Replica, Request
from loadgen.sim.pace import Emission
from loadgen.sim.routing import route

KEPT = 1000  # iterations whose statistics wait to be read, as trtllm-serve keeps them


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
    """`submit`, `next_ns`, `advance`, `cancel` as in `Pace`; emissions of an iteration all carry its end.

    `interval` tokens come at once: the first alone, then every `interval`, then the rest.
    """

    def __init__(
        self,
        *,
        costs: Costs,
        limits: Limits,
        speeds: Sequence[float] = (1.0,),
        routing: str = "round_robin",
        interval: int = 1,
    ) -> None:
        self.limits = limits
        self.replicas = [Replica(costs.at_speed(speed), limits) for speed in speeds]
        self.iterations: deque[Iteration] = deque(maxlen=KEPT)
        self._interval = interval
        self._next = route(speeds, routing)
        self._ends: list[tuple[int, int]] = []
        self._last = [0] * len(speeds)  # when each replica's last iteration ended
        self._begun = [0] * len(speeds)
        self._requests: dict[Hashable, tuple[Request, int]] = {}
        # Decoding requests of a replica, by the iteration (modulo interval) in which they emit.
        self._phases: list[list[dict[Request, None]]] = [[{} for _ in range(interval)] for _ in speeds]

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
    ) -> Request:
        """A request arrives; `blocks` are the hashes of its prompt's full blocks. What comes back says, once it has a
        first token, when it was admitted and how much of its prompt was cached. ValueError as in `Replica.submit`."""
        if output_tokens < 1 or key in self._requests:
            raise ValueError(f"needs a new key and at least one output token: {key!r}, {output_tokens}")
        request = Request(key, now_ns, input_tokens, output_tokens, blocks)
        at = self._next()
        replica = self.replicas[at]
        replica.submit(request)
        self._requests[key] = request, at
        if replica.end_ns == NEVER:
            self._begin(at, max(now_ns, self._last[at]), [])  # nobody runs who could be paused
        return request

    def next_ns(self) -> int | None:
        """The end of the next iteration; None: nothing is served."""
        return self._ends[0][0] if self._ends else None

    def advance(self, now_ns: int) -> list[Emission]:
        """Everything emitted by `now_ns`, in order."""
        out: list[Emission] = []
        ends = self._ends
        while ends and ends[0][0] <= now_ns:
            end, at = heapq.heappop(ends)
            self._finish(at, end, out)
            self._begin(at, end, out)
        return out

    def cancel(self, key: Hashable) -> None:
        """The client is gone: nothing more of `key`. Unknown keys are passed over."""
        found = self._requests.pop(key, None)
        if found is None:
            return
        request, at = found
        if request.from_iteration >= 0:
            self._phases[at][request.from_iteration % self._interval].pop(request, None)
        self.replicas[at].cancel(request)

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
        replica, interval, requests = self.replicas[at], self._interval, self._requests
        phases = self._phases[at]
        k = replica.iteration
        generating = replica.decoding
        done = replica.finish()
        for request in done:
            start = request.from_iteration
            phases[start % interval].pop(request, None)
            behind = (k - start) % interval or (interval if k > start else 1)
            out.append((request.key, behind, True, end))
            requests.pop(request.key, None)
        now = phases[k % interval]
        out += [(request.key, interval, False, end) for request in now]
        for request in replica.started:
            if request.todo > 1:
                now[request] = None
                out.append((request.key, 1, False, end))
        context = (replica.context_requests, replica.context_tokens)
        self.iterations.append(
            Iteration(
                k, at, end - self._begun[at], *context, generating, len(replica.paused), replica.active,
                len(replica.waiting), len(done), replica.blocks_used, replica.hits, replica.misses,
            )
        )  # fmt: skip
