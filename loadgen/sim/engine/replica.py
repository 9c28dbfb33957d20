"""A continuous-batching server as physics: one replica, iteration by iteration, on whatever clock its owner has.

Pure: no sockets, no sleeping, no randomness. An iteration costs `overhead + max(bytes / bandwidth, FLOPs / rate)`; the
batch changes only when a sequence is admitted, paused or done, and the iteration of a sequence's last token is known at
its admission, so that nothing is done per token. Both faces (HTTP and virtual time) drive this same class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What an iteration takes, in ns; the roofline with everything divided out.

    t = overhead + max(weights + kv_token * tokens in the caches read,
                       token * tokens computed + attended * sum over them of the tokens each attends to)
    """

    overhead_ns: float  # launches, scheduling, sampling: per iteration, whatever is in it
    weights_ns: float  # weight bytes / effective bandwidth
    kv_token_ns: float  # key-value bytes of one token / effective bandwidth
    token_ns: float  # 2 FLOPs per parameter / effective rate
    attended_ns: float  # 4 * layers * heads * head size FLOPs / effective rate: one token attending to one other

    def at_speed(self, speed: float) -> Costs:
        """The costs of a machine whose every iteration is 1 / speed as long."""
        names = ("overhead_ns", "weights_ns", "kv_token_ns", "token_ns", "attended_ns")
        return replace(self, **{name: getattr(self, name) / speed for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """How the server was configured, in TensorRT-LLM's words."""

    max_batch_size: int  # sequences in a batch, those being prefilled included
    max_num_tokens: int  # tokens computed in an iteration; at least max_batch_size
    kv_blocks: int  # of the key-value cache
    tokens_per_block: int = 32
    max_seq_len: int = 4096  # prompt and answer
    chunked_prefill: bool = True  # a prompt may be spread over iterations
    # Guaranteed: an answer's blocks are reserved at admission. Otherwise (max utilization) blocks are taken as tokens
    # come, and when they run out the sequence admitted last is paused and computed again later.
    guaranteed: bool = False
    block_reuse: bool = False  # prompts share the blocks of equal beginnings


class SimRequest:
    """One sequence in a replica. What its owner may read: `key`, `cached`, `first` and `last` (iterations)."""

    __slots__ = (
        "admitted_ns",
        "asked",
        "at",
        "blocks",
        "cached",
        "due_ns",
        "first",
        "from_iteration",
        "held",
        "input_tokens",
        "key",
        "last",
        "left",
        "output_tokens",
        "pinned",
        "state",
        "todo",
        "total",
    )

    def __init__(
        self, key: Any, due_ns: int, input_tokens: int, output_tokens: int, blocks: Sequence[Hashable] = ()
    ) -> None:
        self.key, self.due_ns = key, due_ns
        self.at = 0  # which replica: for its owner
        self.input_tokens = input_tokens
        self.asked = self.output_tokens = output_tokens  # asked for; what it gets
        self.blocks = blocks  # a hash per full block of the prompt, each standing for all up to its end
        self.total = self.left = input_tokens  # to prefill (after a pause: what was generated too); not yet prefilled
        self.todo = output_tokens  # tokens still to come when prefilled
        self.held = 0  # blocks of its own, as of admission
        self.pinned: Sequence[Hashable] = ()  # blocks it shares
        self.admitted_ns = -1  # first
        self.cached = -1  # prompt tokens found in the cache at first admission; -1: not yet admitted
        self.first = -1  # iteration that gave its first token
        self.from_iteration = -1  # iteration that gave its first token since it was last admitted
        self.last = -1  # iteration of its last token, once it decodes
        self.state = WAITING


WAITING, PREFILLING, DECODING, DONE = range(4)


class Replica:
    """One model instance. Its owner calls `submit`, `begin` when it is idle or an iteration has ended, and `finish` at
    `end_ns`, the end of the iteration in progress (NEVER: idle).

    `ends` holds the end of every iteration since the start, in ns; `started` who got a first token (its very first,
    or the first after a pause) by the last `finish`; `paused` who was paused by the last `begin`, as
    (request, first, last iteration in which it got a token since it was admitted).
    """

    __slots__ = (
        "_blocks_used",
        "_buckets",
        "_cache",
        "_costs",
        "_kv",
        "_limits",
        "_partial",
        "_phase",
        "_pinned",
        "_ready",
        "_running",
        "_under_way",
        "active",
        "context_requests",
        "context_tokens",
        "decoded",
        "decoding",
        "end_ns",
        "ends",
        "hits",
        "iteration",
        "misses",
        "paused",
        "pauses",
        "started",
        "waiting",
    )

    def __init__(self, costs: Costs, limits: ServerLimits) -> None:
        if limits.max_num_tokens < limits.max_batch_size:
            raise ValueError("max_num_tokens must be at least max_batch_size: all decode in every iteration")
        if limits.kv_blocks * limits.tokens_per_block < limits.max_seq_len:
            raise ValueError("the key-value cache does not hold one sequence of max_seq_len")
        self._costs, self._limits = costs, limits
        self.waiting: deque[SimRequest] = deque()
        self.active = 0  # admitted, not done
        self.decoding = 0  # of them, past their prefill
        self.decoded = 0  # sum of `decoding` over the iterations ended
        self.iteration = 0  # iterations ended
        self.end_ns = NEVER
        self.ends: list[int] = []
        self.context_requests = self.context_tokens = 0  # prefilled in the iteration in progress
        self.pauses = 0
        self.hits = self.misses = 0  # blocks of prompts found in the cache at admission, and not found
        self.paused: list[tuple[SimRequest, int, int]] = []
        self.started: list[SimRequest] = []
        self._under_way = False  # between `begin` and `finish`
        self._kv = 0  # tokens in the caches of decoding sequences
        self._blocks_used = 0  # without the pinned shared ones
        self._partial: SimRequest | None = None  # prefilled in part: the head of the queue, as it were
        self._ready: list[SimRequest] = []  # whose prefill ends with the iteration in progress
        self._running: dict[SimRequest, None] = {}  # decoding, in order of admission
        self._buckets: dict[int, list[SimRequest]] = {}  # by the iteration of their last token
        self._phase = [0] * limits.tokens_per_block  # decoding sequences, by the iteration (modulo) that needs a block
        self._pinned: dict[Hashable, int] = {}  # shared blocks in use -> by how many
        self._cache: dict[Hashable, None] = {}  # shared blocks in no use, the longest unused first

    @property
    def blocks_used(self) -> int:
        """Blocks that cannot be given away."""
        return self._blocks_used + len(self._pinned)

    def admissible(self, input_tokens: int) -> bool:
        """Whether a prompt of this length can ever be served."""
        limits = self._limits
        return input_tokens < limits.max_seq_len and (limits.chunked_prefill or input_tokens <= limits.max_num_tokens)

    def submit(self, request: SimRequest) -> None:
        """A request arrives; requests arrive in order of `due_ns`. Raises ValueError for what can never be served."""
        if not self.admissible(request.input_tokens):
            raise ValueError(f"a prompt of {request.input_tokens} tokens cannot be served")
        room = self._limits.max_seq_len - request.input_tokens
        if request.output_tokens > room:  # trtllm-serve clamps in silence
            request.output_tokens = request.todo = room
        self.waiting.append(request)

    def begin(self, now_ns: int) -> bool:
        """Begin an iteration at `now_ns`, if there is anything to do; `end_ns` then says when it ends."""
        limits, costs = self._limits, self._costs
        if self.paused:
            self.paused = []
        if not limits.guaranteed:
            grow = self._phase[self.iteration % limits.tokens_per_block]
            if grow:
                if grow > limits.kv_blocks - self._blocks_used - len(self._pinned):
                    grow = self._make_room()
                self._blocks_used += grow
        n = self.decoding
        budget = 0 if self.paused else limits.max_num_tokens - n  # who was just paused is not admitted at once
        context_tokens = context_requests = 0
        read = self._kv + n
        attended = float(read)
        waiting, ready = self.waiting, self._ready
        while budget > 0:
            request = self._partial
            if request is None:
                if not waiting or self.active >= limits.max_batch_size or waiting[0].due_ns > now_ns:
                    break
                request = waiting[0]
                if not limits.chunked_prefill and request.left > budget:
                    break
                if not self._admit(request):
                    break
                waiting.popleft()
                if request.admitted_ns < 0:
                    request.admitted_ns = now_ns
            left = request.left
            chunk = left if left <= budget else budget
            start = request.total - left
            read += start + chunk
            attended += chunk * (start + 0.5 * chunk)
            budget -= chunk
            context_tokens += chunk
            context_requests += 1
            if chunk == left:
                request.left = 0
                ready.append(request)
                self._partial = None
            else:
                request.left = left - chunk
                self._partial = request
        if not n and not context_tokens:
            self.end_ns = NEVER
            return False
        self.context_tokens, self.context_requests = context_tokens, context_requests
        moved = costs.weights_ns + read * costs.kv_token_ns
        computed = (n + context_tokens) * costs.token_ns + attended * costs.attended_ns
        self.end_ns = now_ns + int(costs.overhead_ns + (moved if moved > computed else computed)) + 1
        self.ends.append(self.end_ns)
        self._under_way = True
        return True

    def finish(self) -> list[SimRequest]:
        """The iteration in progress has ended: every decoding sequence, and every one now prefilled, has one token
        more. Returns those that are done."""
        k = self.iteration
        self.iteration = k + 1
        self._under_way = False
        self._kv += self.decoding
        self.decoded += self.decoding
        done = self._buckets.pop(k, None)
        if done is not None:
            self._leave(done)
        ready = self.started = self._ready
        if not ready:
            return done or []
        self._ready = []
        if done is None:
            done = []
        limits = self._limits
        per_block = limits.tokens_per_block
        buckets, running = self._buckets, self._running
        for request in ready:
            if request.first < 0:
                request.first = k
            request.from_iteration = k
            if limits.block_reuse and request.blocks:
                self._share(request)
            last = request.last = k + request.todo - 1
            if request.todo <= 1:
                self._give_back(request, request.held)
                self.active -= 1
                request.state = DONE
                done.append(request)
                continue
            request.state = DECODING
            self._kv += request.total
            if not limits.guaranteed:
                self._phase[(k + 1 - request.total) % per_block] += 1
            running[request] = None
            bucket = buckets.get(last)
            if bucket is None:
                buckets[last] = [request]
            else:
                bucket.append(request)
        self.decoding = len(running)
        return done

    def cancel(self, request: SimRequest) -> None:
        """Nothing more of this request; what it held is free from the next iteration on. One that is done is passed
        over."""
        state = request.state
        if state == WAITING:
            self.waiting.remove(request)
        elif state == DECODING:
            bucket = self._buckets[request.last]
            bucket.remove(request)
            if not bucket:
                del self._buckets[request.last]
            self._drop(request)
        elif state == PREFILLING:
            if request is self._partial:
                self._partial = None
            else:
                self._ready.remove(request)
            self._give_back(request, request.held)
            self.active -= 1
        request.state = DONE

    def generated(self, request: SimRequest) -> int:
        """Tokens that a request has got by the end of the last iteration."""
        if request.state == DECODING or (request.state == DONE and request.last >= 0):
            before = request.output_tokens - request.todo
            return before + max(0, min(self.iteration - 1, request.last) - request.from_iteration + 1)
        return request.output_tokens - request.todo

    # -- blocks --------------------------------------------------------------------------------------------------

    def _admit(self, request: SimRequest) -> bool:
        """Take the blocks for a waiting request, if they are there."""
        limits = self._limits
        per_block = limits.tokens_per_block
        tokens = request.total + (request.todo if limits.guaranteed else 0)
        need = -(-tokens // per_block)
        free = limits.kv_blocks - self._blocks_used - len(self._pinned)
        if limits.block_reuse and request.blocks:
            return self._admit_shared(request, need, free)
        if need > free:
            return False
        self._blocks_used += need
        if self._cache:
            self._evict(limits.kv_blocks - self._blocks_used - len(self._pinned))
        request.held = need
        if request.cached < 0:
            request.cached = 0
        request.state = PREFILLING
        self.active += 1
        return True

    def _admit_shared(self, request: SimRequest, need: int, free: int) -> bool:
        limits, pinned, cache = self._limits, self._pinned, self._cache
        per_block = limits.tokens_per_block
        usable = min(len(request.blocks), (request.total - 1) // per_block)  # one token at least is computed
        matched = unpinned = 0
        for block in request.blocks:
            if matched == usable:
                break
            if block not in pinned:
                if block not in cache:
                    break
                unpinned += 1
            matched += 1
        own = need - matched
        if own + unpinned > free:
            return False
        shared = list(request.blocks[:matched])
        for block in shared:
            cache.pop(block, None)
            pinned[block] = pinned.get(block, 0) + 1
        request.pinned = shared
        self._blocks_used += own
        self._evict(limits.kv_blocks - self._blocks_used - len(pinned))
        request.held = own
        request.left = request.total - matched * per_block
        if request.cached < 0:
            request.cached = matched * per_block
            self.hits += matched
            self.misses += len(request.blocks) - matched
        request.state = PREFILLING
        self.active += 1
        return True

    def _share(self, request: SimRequest) -> None:
        """The prompt is computed: its full blocks can serve others; those that another one has shared stay its own."""
        pinned, cache = self._pinned, self._cache
        shared = list(request.pinned)
        for block in request.blocks[len(shared) : request.input_tokens // self._limits.tokens_per_block]:
            if block in pinned or block in cache:
                break
            pinned[block] = 1
            shared.append(block)
            request.held -= 1
            self._blocks_used -= 1
        request.pinned = shared

    def _evict(self, room: int) -> None:
        """Forget the longest unused shared blocks until the unused ones fit in `room`."""
        cache = self._cache
        while len(cache) > room:
            del cache[next(iter(cache))]

    def _leave(self, done: list[SimRequest]) -> None:
        """These have got their last token: the common case of `_drop`, in which all that they held is known."""
        limits, running, phase = self._limits, self._running, self._phase
        per_block = limits.tokens_per_block
        for request in done:
            request.state = DONE
            del running[request]
            cached = request.total + request.todo - 1  # the last token's key and value are never computed
            self._kv -= cached
            held = request.held
            if not limits.guaranteed:
                phase[(request.from_iteration + 1 - request.total) % per_block] -= 1
                held = -(-cached // per_block) - len(request.pinned)
            if request.pinned:
                self._give_back(request, held)
            else:
                self._blocks_used -= held
        self.decoding -= len(done)
        self.active -= len(done)

    def _drop(self, request: SimRequest) -> None:
        """Take a decoding sequence out of the batch, of whatever length it is after `iteration` iterations."""
        steps = min(self.iteration - 1, request.last) - request.from_iteration  # decoded, after the first token
        del self._running[request]
        self.decoding -= 1
        self.active -= 1
        self._kv -= request.total + steps
        held = request.held
        limits = self._limits
        if not limits.guaranteed:
            per_block = limits.tokens_per_block
            phase = (request.from_iteration + 1 - request.total) % per_block
            self._phase[phase] -= 1
            held += -(-(request.total + steps) // per_block) - -(-request.total // per_block)
            if self._under_way and self.iteration % per_block == phase:
                held += 1  # cancelled within an iteration for which it was given a block
        self._give_back(request, held)

    def _give_back(self, request: SimRequest, held: int) -> None:
        self._blocks_used -= held
        if request.pinned:
            pinned, cache = self._pinned, self._cache
            for block in reversed(request.pinned):  # the end of a prefix is of less use than its beginning
                uses = pinned[block] - 1
                if uses:
                    pinned[block] = uses
                else:
                    del pinned[block]
                    cache[block] = None
            request.pinned = ()
        request.held = 0

    def _make_room(self) -> int:
        """Pause the sequences admitted last until the others can grow; returns the blocks that these need."""
        limits = self._limits
        slot = self.iteration % limits.tokens_per_block
        while self._phase[slot] > limits.kv_blocks - self._blocks_used - len(self._pinned):
            if self._partial is not None:
                request, self._partial = self._partial, None
                self._give_back(request, request.held)
                self.active -= 1
                stretch = (request, 0, -1)
            else:
                request = next(reversed(self._running))
                bucket = self._buckets[request.last]
                bucket.remove(request)
                if not bucket:
                    del self._buckets[request.last]
                got = self.generated(request)
                stretch = (request, request.from_iteration, self.iteration - 1)
                self._drop(request)
                request.total = request.input_tokens + got
                request.todo = request.output_tokens - got
            request.left = request.total
            request.state = WAITING
            self.waiting.appendleft(request)
            self.paused.append(stretch)
            self.pauses += 1
        grow = self._phase[slot]
        if self._cache:
            self._evict(limits.kv_blocks - self._blocks_used - len(self._pinned) - grow)
        return grow
