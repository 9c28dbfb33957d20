"""A continuous-batching server as a physical model: one replica, iteration by iteration, on the
caller's clock.

Pure: no sockets, no sleeping, no randomness. An iteration takes `overhead + max(bytes / bandwidth,
FLOPs / rate)`. The batch changes only when a sequence is admitted, paused or finished. The
iteration of a sequence's last token is known when its prefill ends, so no work is done per token.
The HTTP endpoint and simulations in virtual time use the same class.

This is the reference implementation. `_replica.c` does the same, to the last bit, and
`implementation.py` chooses one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict
from numpy.typing import NDArray

NEVER = 1 << 62


class Costs(Struct, frozen=True, kw_only=True):
    """The terms of an iteration's duration, in ns: the roofline model with all divisions done in
    advance.

    t = overhead + max(weights + kv_token * tokens in the caches read,
                       token * tokens computed + attended * sum over them of the tokens each attends to)
    """

    overhead_ns: (
        float  # kernel launches, scheduling, sampling: per iteration, independent of the batch
    )
    weights_ns: float  # weight bytes / effective bandwidth
    kv_token_ns: float  # key-value bytes of one token / effective bandwidth
    token_ns: float  # 2 FLOPs per parameter / effective rate
    attended_ns: float  # 4 * layers * heads * head size FLOPs / effective rate: one token attending to one other

    def at_speed(self, speed: float) -> Costs:
        """Return the costs of a machine on which every iteration takes 1 / speed of the time."""
        return Costs(**{name: value / speed for name, value in asdict(self).items()})


class ServerLimits(Struct, frozen=True, kw_only=True):
    """The server's configuration, in TensorRT-LLM's terms."""

    max_batch_size: int  # sequences in a batch, including those in prefill
    max_num_tokens: int  # tokens computed per iteration; at least max_batch_size
    kv_blocks: int  # blocks in the key-value cache
    tokens_per_block: int = 32
    max_seq_len: int = 4096  # prompt and output together
    chunked_prefill: bool = True  # a prompt may be spread over iterations
    # True (guaranteed no evict): all blocks for the output are reserved at admission. False (max
    # utilization): blocks are taken as tokens are generated; when none are left, the sequence
    # admitted last is paused and recomputed later.
    guaranteed: bool = False
    block_reuse: bool = False  # prompts with the same prefix share its blocks


WAITING, PREFILLING, DECODING, DONE = range(4)


REQUEST_FIELDS = (
    "key",
    "due_ns",
    "replica_index",
    "first_iteration",
    "resumed_iteration",
    "last_iteration",
    "input_tokens",
    "requested_tokens",
    "output_tokens",
    "cached_tokens",
    "failure",
    "failed_ns",
    "admitted_ns",
)
"""The fields of a request that say what happened to it, in the order in which `pack` writes them."""


class SimRequest:
    """One sequence in a replica.

    `blocks` has one hash per full block of the prompt, which covers the prompt up to the end of
    that block. Iterations are numbered from 0; -1 stands for none. `replica_index`, `failure` and
    `failed_ns` are for the caller's use.
    """

    def __init__(
        self,
        key: Any,
        due_ns: int,
        input_tokens: int,
        output_tokens: int,
        blocks: Sequence[Hashable] = (),
    ) -> None:
        self.key = key
        self.due_ns = due_ns
        self.input_tokens = input_tokens
        self.requested_tokens = output_tokens
        self.output_tokens = output_tokens  # to be generated, which may be fewer than requested
        self.blocks = blocks
        self.replica_index = 0
        self.failure = 0
        self.failed_ns = -1
        self.state = WAITING
        self.admitted_ns = -1  # time of the first admission
        self.cached_tokens = -1  # prompt tokens found in the cache at the first admission
        self.first_iteration = -1  # gave its first token
        self.resumed_iteration = -1  # gave its first token since the last admission
        self.last_iteration = -1  # gives its last token
        # After a pause, the tokens that were generated before it are prefilled, too.
        self.prefill_tokens = input_tokens
        self.prefill_left = input_tokens
        self.remaining_tokens = output_tokens  # to be generated after the prefill
        self.private_blocks = 0  # taken at admission
        self.shared_blocks: Sequence[Hashable] = ()  # in use by this request

    @staticmethod
    def pack(requests: Sequence[SimRequest], rows: NDArray[np.int64]) -> None:
        """Write the REQUEST_FIELDS of each request into a row of an array of shape (requests, fields)."""
        for row, request in zip(rows, requests, strict=True):
            row[:] = [getattr(request, name) for name in REQUEST_FIELDS]


@dataclass(slots=True)
class _Work:
    """What one iteration computes and reads. `tokens_read` are tokens in the key-value cache."""

    decoding: int
    tokens_read: int
    context_requests: int = 0
    context_tokens: int = 0
    attended: float = field(init=False)  # sum over the computed tokens of the tokens they attend to

    def __post_init__(self) -> None:
        self.attended = float(self.tokens_read)

    def add_chunk(self, start: int, tokens: int) -> None:
        """Add a part of a prompt that begins after `start` of its tokens."""
        self.tokens_read += start + tokens
        self.attended += tokens * (start + 0.5 * tokens)
        self.context_tokens += tokens
        self.context_requests += 1

    def duration_ns(self, costs: Costs) -> int:
        """Return how long the iteration takes."""
        memory_ns = costs.weights_ns + self.tokens_read * costs.kv_token_ns
        tokens = self.decoding + self.context_tokens
        compute_ns = tokens * costs.token_ns + self.attended * costs.attended_ns
        return int(costs.overhead_ns + max(memory_ns, compute_ns)) + 1


class Replica:
    """One model instance.

    The owner calls `submit` for each request, `begin` when the replica is idle or an iteration has
    ended, and `finish` at `end_ns`, the end of the current iteration (NEVER: idle).

    `ends` holds the end time of every iteration since the start or the last `forget`, in ns.
    `started` holds the requests that got a first token (the very first, or the first after a pause)
    in the last `finish`. `paused` holds the sequences paused by the last `begin`, as (request,
    first, last iteration in which it got a token since it was last admitted).
    """

    Request = SimRequest
    """What `submit` takes."""

    def __init__(self, costs: Costs, limits: ServerLimits) -> None:
        self._costs = costs
        self._limits = limits
        self.waiting: deque[SimRequest] = deque()
        self.active = 0  # admitted, not finished
        self.decoding = 0  # active requests that have finished their prefill
        self.decoded = 0  # sum of `decoding` over all finished iterations
        self.iteration = 0  # finished iterations
        self.end_ns = NEVER
        self.ends = array("q")
        self.context_requests = 0  # prefilled in the current iteration
        self.context_tokens = 0
        self.pauses = 0
        self.hits = 0  # prompt blocks found in the cache at admission
        self.misses = 0
        self.paused: list[tuple[SimRequest, int, int]] = []
        self.started: list[SimRequest] = []
        self._under_way = False  # between `begin` and `finish`
        self._kv = 0  # tokens in the key-value cache, of decoding sequences
        self._blocks_used = 0  # without the pinned, shared blocks
        # Prefilled in part; served before the queue.
        self._partial: SimRequest | None = None
        # Their prefill ends with the current iteration.
        self._ready: list[SimRequest] = []
        # Decoding requests, in order of admission.
        self._running: dict[SimRequest, None] = {}
        # Decoding requests by the iteration of their last token.
        self._buckets: dict[int, list[SimRequest]] = {}
        # Number of decoding sequences by phase: they need a new block when iteration %
        # tokens_per_block is the phase.
        self._phase = [0] * limits.tokens_per_block
        self._pinned: dict[Hashable, int] = {}  # shared blocks in use -> number of users
        # Shared blocks not in use, least recently used first. No plain dict: one keeps a hole for
        # each entry that has left it, and a search for the first entry steps over them all.
        self._cache: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def queued(self) -> int:
        """Number of requests that wait for admission."""
        return len(self.waiting)

    @property
    def next_due_ns(self) -> int:
        """When the first of those that wait was due; NEVER if none waits."""
        return self.waiting[0].due_ns if self.waiting else NEVER

    def end_of(self, iteration: int) -> int:
        """When an iteration ended. Raises IndexError. Not after `forget`."""
        return self.ends[iteration]

    def forget(self) -> None:
        """Forget when iterations ended, except the last; simulations in virtual time keep all."""
        del self.ends[:-1]

    @property
    def blocks_used(self) -> int:
        """Number of blocks that cannot be reused for another request now."""
        return self._blocks_used + len(self._pinned)

    @property
    def _free_blocks(self) -> int:
        return self._limits.kv_blocks - self.blocks_used

    def admissible(self, input_tokens: int) -> bool:
        """Whether a prompt of this length can be served at all."""
        limits = self._limits
        return input_tokens < limits.max_seq_len and (
            limits.chunked_prefill or input_tokens <= limits.max_num_tokens
        )

    def submit(self, request: SimRequest) -> None:
        """Queue an `admissible` request. Requests must arrive in order of `due_ns`."""
        room = self._limits.max_seq_len - request.input_tokens
        if request.output_tokens > room:  # trtllm-serve clamps without an error
            request.output_tokens = request.remaining_tokens = room
        self.waiting.append(request)

    def begin(self, now_ns: int) -> bool:
        """Begin an iteration, which ends at `end_ns`. Return False if there is nothing to do."""
        self.paused = []
        if not self._limits.guaranteed:
            self._grow_decoding()
        work = _Work(self.decoding, self._kv + self.decoding)
        if not self.paused:  # a sequence that was just paused is not admitted again yet
            self._prefill(work, self._limits.max_num_tokens - self.decoding, now_ns)
        if not work.decoding and not work.context_tokens:
            self.end_ns = NEVER
            return False
        self.context_tokens = work.context_tokens
        self.context_requests = work.context_requests
        self.end_ns = now_ns + work.duration_ns(self._costs)
        self.ends.append(self.end_ns)
        self._under_way = True
        return True

    def _grow_decoding(self) -> None:
        """Take the blocks that decoding sequences need now; pause some if there are too few."""
        phase = self.iteration % self._limits.tokens_per_block
        if self._phase[phase] > self._free_blocks:
            self._make_room(phase)
        self._blocks_used += self._phase[phase]

    def _prefill(self, work: _Work, budget: int, now_ns: int) -> None:
        """Compute at most `budget` tokens of prompts, in order of arrival."""
        while budget > 0:
            request = self._partial or self._admit_next(budget, now_ns)
            if request is None:
                return
            chunk = min(request.prefill_left, budget)
            work.add_chunk(request.prefill_tokens - request.prefill_left, chunk)
            budget -= chunk
            request.prefill_left -= chunk
            self._partial = request if request.prefill_left else None
            if not request.prefill_left:
                self._ready.append(request)

    def _admit_next(self, budget: int, now_ns: int) -> SimRequest | None:
        """Admit the request that waits first, and return it; None if it has to wait."""
        limits = self._limits
        if not self.waiting or self.active >= limits.max_batch_size:
            return None
        request = self.waiting[0]
        if request.due_ns > now_ns:
            return None
        if not limits.chunked_prefill and request.prefill_left > budget:
            return None
        if not self._admit(request):
            return None
        self.waiting.popleft()
        if request.admitted_ns < 0:
            request.admitted_ns = now_ns
        return request

    def finish(self) -> list[SimRequest]:
        """End the current iteration. Return the requests that are done.

        Every decoding sequence, and every sequence whose prefill has just ended, gets one token.
        """
        finished_iteration = self.iteration
        self.iteration += 1
        self._under_way = False
        self._kv += self.decoding
        self.decoded += self.decoding
        done = self._buckets.pop(finished_iteration, [])
        self._remove_finished(done)
        self.started = self._ready
        self._ready = []
        for request in self.started:
            self._start_decoding(request, finished_iteration)
            if request.state == DONE:
                done.append(request)
        self.decoding = len(self._running)
        return done

    def _start_decoding(self, request: SimRequest, iteration: int) -> None:
        """Note that this iteration has given a request its first token since its admission."""
        limits = self._limits
        if request.first_iteration < 0:
            request.first_iteration = iteration
        request.resumed_iteration = iteration
        request.last_iteration = iteration + request.remaining_tokens - 1
        if limits.block_reuse and request.blocks:
            self._share_prompt_blocks(request)
        if request.remaining_tokens <= 1:
            self._release_blocks(request, request.private_blocks)
            self.active -= 1
            request.state = DONE
            return
        request.state = DECODING
        self._kv += request.prefill_tokens
        if not limits.guaranteed:
            self._phase[self._phase_of(request)] += 1
        self._running[request] = None
        self._buckets.setdefault(request.last_iteration, []).append(request)

    def _phase_of(self, request: SimRequest) -> int:
        """Return in which iterations, modulo tokens_per_block, a request needs a new block."""
        return (
            request.resumed_iteration + 1 - request.prefill_tokens
        ) % self._limits.tokens_per_block

    @property
    def _is_quiet(self) -> bool:
        """Whether this iteration starts and ends no request, and the next one pauses none."""
        if not self.decoding and self._partial is None:
            return False  # all were cancelled: the replica becomes idle
        if self._ready or self.iteration in self._buckets:
            return False
        if self._limits.guaranteed:
            return True
        growing = self._phase[(self.iteration + 1) % self._limits.tokens_per_block]
        return growing <= self._free_blocks

    @staticmethod
    def next_iteration(replicas: Sequence[Replica], before_ns: int) -> tuple[int, int]:
        """Return the end of the iteration that ends first, and the index of its replica.

        Iterations that end before `before_ns`, and start and end no request, are ended here, in
        order of time. So the caller sees only iterations at which something happens. The end is
        NEVER if all replicas are idle.
        """
        while True:
            end_ns, index = min((replica.end_ns, index) for index, replica in enumerate(replicas))
            if end_ns >= before_ns or not replicas[index]._is_quiet:
                return end_ns, index
            replicas[index].finish()
            replicas[index].begin(end_ns)

    def cancel(self, request: SimRequest) -> None:
        """Stop a request unless it is done. Its blocks are free from the next iteration on."""
        state = request.state
        if state == WAITING:
            self.waiting.remove(request)
        elif state == DECODING:
            self._remove_decoding(request)
        elif state == PREFILLING:
            if request is self._partial:
                self._partial = None
            else:
                self._ready.remove(request)
            self._release_blocks(request, request.private_blocks)
            self.active -= 1
        request.state = DONE

    def generated(self, request: SimRequest) -> int:
        """Tokens that a request has got by the end of the last finished iteration."""
        if request.state == DECODING or (request.state == DONE and request.last_iteration >= 0):
            before = request.output_tokens - request.remaining_tokens
            return before + max(
                0, min(self.iteration - 1, request.last_iteration) - request.resumed_iteration + 1
            )
        return request.output_tokens - request.remaining_tokens

    def reset_cache(self) -> None:
        """Forget the shared blocks that no request uses; those in use stay until they are free."""
        self._cache.clear()

    def _admit(self, request: SimRequest) -> bool:
        """Take the blocks for a waiting request. Returns False if there are not enough."""
        limits, pinned, cache = self._limits, self._pinned, self._cache
        per_block = limits.tokens_per_block
        tokens = request.prefill_tokens + (request.remaining_tokens if limits.guaranteed else 0)
        # the blocks of its prompt that others have computed; at least one token must be computed
        blocks = (
            request.blocks[: (request.prefill_tokens - 1) // per_block]
            if limits.block_reuse
            else ()
        )
        matched_blocks = unpinned = 0
        for block in blocks:
            if block not in pinned:
                if block not in cache:
                    break
                unpinned += 1
            matched_blocks += 1
        own_blocks = -(-tokens // per_block) - matched_blocks
        if own_blocks + unpinned > limits.kv_blocks - self._blocks_used - len(pinned):
            return False
        shared = blocks[:matched_blocks]
        for block in shared:
            cache.pop(block, None)
            pinned[block] = pinned.get(block, 0) + 1
        request.shared_blocks = shared
        self._blocks_used += own_blocks
        if cache:
            self._evict(limits.kv_blocks - self._blocks_used - len(pinned))
        request.private_blocks = own_blocks
        request.prefill_left = request.prefill_tokens - matched_blocks * per_block
        if request.cached_tokens < 0:
            request.cached_tokens = matched_blocks * per_block
            if limits.block_reuse:
                self.hits += matched_blocks
                self.misses += len(request.blocks) - matched_blocks
        request.state = PREFILLING
        self.active += 1
        return True

    def _share_prompt_blocks(self, request: SimRequest) -> None:
        """Share the full blocks of a prompt that has been computed with later requests.

        Blocks that another request has already shared stay private to this one.
        """
        pinned, cache = self._pinned, self._cache
        shared = list(request.shared_blocks)
        for block in request.blocks[
            len(shared) : request.input_tokens // self._limits.tokens_per_block
        ]:
            if block in pinned or block in cache:
                break
            pinned[block] = 1
            shared.append(block)
            request.private_blocks -= 1
            self._blocks_used -= 1
        request.shared_blocks = shared

    def _evict(self, capacity: int) -> None:
        """Evict the least recently used shared blocks until the unused ones fit in `capacity`."""
        cache = self._cache
        while len(cache) > capacity:
            cache.popitem(last=False)

    def _remove_finished(self, done: list[SimRequest]) -> None:
        """Remove sequences that have got their last token.

        The common case of `_remove_decoding`: everything that they hold is known without counting
        iterations.
        """
        limits, running, phase = self._limits, self._running, self._phase
        per_block = limits.tokens_per_block
        for request in done:
            request.state = DONE
            del running[request]
            cached = (
                request.prefill_tokens + request.remaining_tokens - 1
            )  # the last token's key and value are never computed
            self._kv -= cached
            own_blocks = request.private_blocks
            if not limits.guaranteed:
                phase[(request.resumed_iteration + 1 - request.prefill_tokens) % per_block] -= 1
                own_blocks = -(-cached // per_block) - len(request.shared_blocks)
            if request.shared_blocks:
                self._release_blocks(request, own_blocks)
            else:
                self._blocks_used -= own_blocks
        self.decoding -= len(done)
        self.active -= len(done)

    def _remove_decoding(self, request: SimRequest) -> None:
        """Remove a decoding sequence from the batch before its end."""
        steps = (
            min(self.iteration - 1, request.last_iteration) - request.resumed_iteration
        )  # tokens decoded after the first one
        bucket = self._buckets[request.last_iteration]
        bucket.remove(request)
        if not bucket:
            del self._buckets[request.last_iteration]
        del self._running[request]
        self.decoding -= 1
        self.active -= 1
        self._kv -= request.prefill_tokens + steps
        own_blocks = request.private_blocks
        limits = self._limits
        if not limits.guaranteed:
            per_block = limits.tokens_per_block
            phase = (request.resumed_iteration + 1 - request.prefill_tokens) % per_block
            self._phase[phase] -= 1
            own_blocks += -(-(request.prefill_tokens + steps) // per_block) - -(
                -request.prefill_tokens // per_block
            )
            if self._under_way and self.iteration % per_block == phase:
                own_blocks += 1  # cancelled during an iteration for which it had been given a block
        self._release_blocks(request, own_blocks)

    def _release_blocks(self, request: SimRequest, own_blocks: int) -> None:
        self._blocks_used -= own_blocks
        if request.shared_blocks:
            pinned, cache = self._pinned, self._cache
            for block in reversed(
                request.shared_blocks
            ):  # evict the end of a prefix first: its beginning is more useful
                uses = pinned[block] - 1
                if uses:
                    pinned[block] = uses
                else:
                    del pinned[block]
                    cache[block] = None
            request.shared_blocks = ()
        request.private_blocks = 0

    def _make_room(self, phase: int) -> None:
        """Pause the sequences admitted last until the others can grow."""
        while self._phase[phase] > self._free_blocks:
            if self._partial is not None:
                request = self._partial
                self._partial = None
                self._release_blocks(request, request.private_blocks)
                self.active -= 1
                self.paused.append((request, 0, -1))
            else:
                request = next(reversed(self._running))
                generated = self.generated(request)
                self.paused.append((request, request.resumed_iteration, self.iteration - 1))
                self._remove_decoding(request)
                request.prefill_tokens = request.input_tokens + generated
                request.remaining_tokens = request.output_tokens - generated
            request.prefill_left = request.prefill_tokens
            request.state = WAITING
            self.waiting.appendleft(request)
            self.pauses += 1
        self._evict(self._free_blocks - self._phase[phase])
