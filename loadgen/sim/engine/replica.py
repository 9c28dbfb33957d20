"""One replica of a continuous-batching server as a physical model, iteration by iteration.

The caller passes the time. An iteration takes `overhead + max(bytes / bandwidth, FLOPs / rate)`.
The batch changes only when a sequence is admitted, paused or finished. The iteration of a
sequence's last token is known when its prefill ends, so no work is done per token. The HTTP
endpoint and simulations in virtual time use the same class.

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
"""A time that is never reached, in ns: an integer, so that `min` needs no check for None."""


def _divide_rounding_up(tokens: int, tokens_per_block: int) -> int:
    """Return the number of blocks that hold so many tokens; the last one may be partly empty."""
    return -(-tokens // tokens_per_block)


class Costs(Struct, frozen=True, kw_only=True):
    """The terms of an iteration's duration in ns, by the roofline model.

    An iteration takes overhead_ns plus the longer of two terms:

    - memory: weights_ns + kv_token_ns * tokens read from the key-value cache
    - compute: token_ns * tokens computed + attended_ns * the sum over them of the tokens that each
      attends to

    Attributes:
        overhead_ns: Kernel launches, scheduling and sampling, whatever the batch.
        weights_ns: Bytes of the weights / effective bandwidth.
        kv_token_ns: Bytes of one token in the key-value cache / effective bandwidth.
        token_ns: 2 FLOPs per parameter / effective rate.
        attended_ns: FLOPs of one token attending to one other (4 * layers * heads * head size) /
            effective rate.
    """

    overhead_ns: float
    weights_ns: float
    kv_token_ns: float
    token_ns: float
    attended_ns: float

    def at_speed(self, speed: float) -> Costs:
        """Return the costs of a machine on which every iteration takes 1 / speed of the time."""
        return Costs(**{name: value / speed for name, value in asdict(self).items()})


class ServerLimits(Struct, frozen=True, kw_only=True):
    """The server's configuration, in TensorRT-LLM's terms.

    Attributes:
        max_batch_size: Sequences in a batch, including those in prefill.
        max_num_tokens: Tokens computed per iteration; at least max_batch_size.
        kv_blocks: Blocks in the key-value cache.
        tokens_per_block: Tokens in a block.
        max_seq_len: The longest prompt and output together.
        chunked_prefill: Whether a prompt may be spread over iterations.
        guaranteed: Whether all blocks for the output are reserved at admission (the scheduler
            "guaranteed no evict"). If not ("max utilization"), blocks are taken as tokens are
            generated. When none are left, the sequence admitted last is paused and computed again
            later.
        block_reuse: Whether prompts with the same prefix share its blocks.
    """

    max_batch_size: int
    max_num_tokens: int
    kv_blocks: int
    tokens_per_block: int = 32
    max_seq_len: int = 4096
    chunked_prefill: bool = True
    guaranteed: bool = False
    block_reuse: bool = False


# The states of a request, in their order. Integers, because the C implementation uses the same.
WAITING = 0
PREFILLING = 1
DECODING = 2
DONE = 3


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
"""The fields of a request that tell what happened to it, in the order of `SimRequest.pack`."""


class SimRequest:
    """One sequence in a replica.

    `blocks` has one hash per full block of the prompt, which covers the prompt up to the end of
    that block. Iterations are numbered from 0; -1 stands for none, and also for a time or a count
    that is not known yet. All fields are integers, so that they can be packed into rows.
    `replica_index`, `failure` and `failed_ns` are for the caller's use.

    A request that is paused is admitted a second time. `first_iteration` stays what it was, and
    `resumed_iteration` becomes the iteration of its first token after the pause.
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
        """Write the REQUEST_FIELDS of each request into a row of `rows`."""
        for row, request in zip(rows, requests, strict=True):
            row[:] = [getattr(request, name) for name in REQUEST_FIELDS]


@dataclass(slots=True)
class _Work:
    """What one iteration computes and reads."""

    decoding: int  # sequences that get one token each
    tokens_read: int  # from the key-value cache
    context_requests: int = 0
    context_tokens: int = 0
    attended: float = field(init=False)  # sum over the computed tokens of the tokens they attend to

    def __post_init__(self) -> None:
        self.attended = float(self.tokens_read)

    def add_chunk(self, start: int, tokens: int) -> None:
        """Add a part of a prompt that begins after `start` of its tokens.

        Each of its tokens attends to all tokens before it, which are `start` plus, on average over
        the part, half of the part.
        """
        self.tokens_read += start + tokens
        self.attended += tokens * (start + 0.5 * tokens)
        self.context_tokens += tokens
        self.context_requests += 1

    def duration_ns(self, costs: Costs) -> int:
        """Return how long the iteration takes, by the roofline model of `Costs`.

        Memory is read while the processor computes, so the longer of both counts. The result is
        rounded up, so that an iteration always takes some time.
        """
        memory_ns = costs.weights_ns + self.tokens_read * costs.kv_token_ns
        tokens = self.decoding + self.context_tokens
        compute_ns = tokens * costs.token_ns + self.attended * costs.attended_ns
        return int(costs.overhead_ns + max(memory_ns, compute_ns)) + 1


class _SharedBlocks:
    """The blocks that several prompts may share: those in use, and a cache of unused ones.

    A block is named by its hash. It stays in the cache when the last request that uses it ends,
    until its memory is needed.
    """

    def __init__(self) -> None:
        # Number of requests that use each block that is in use.
        self._user_counts: dict[Hashable, int] = {}
        # Blocks that no request uses, least recently used first. A plain dict would keep a hole for
        # each block that has left it, and a search for the first block would step over them all.
        self._unused: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def used_count(self) -> int:
        """Number of blocks in use."""
        return len(self._user_counts)

    def match(self, blocks: Sequence[Hashable]) -> Sequence[Hashable]:
        """Return the blocks at the beginning of a prompt that exist."""
        for count, block in enumerate(blocks):
            if block not in self._user_counts and block not in self._unused:
                return blocks[:count]
        return blocks

    def count_unused(self, blocks: Sequence[Hashable]) -> int:
        """Return how many existing blocks no request uses."""
        return sum(block not in self._user_counts for block in blocks)

    def use(self, blocks: Sequence[Hashable]) -> None:
        """Count one more request that uses each of the blocks, which exist."""
        for block in blocks:
            self._unused.pop(block, None)
            self._user_counts[block] = self._user_counts.get(block, 0) + 1

    def add(self, blocks: Sequence[Hashable]) -> list[Hashable]:
        """Create blocks that one request uses, up to the first that exists. Return those created.

        The blocks after an existing one are not created: their prefix is shared already, so they
        are likely to exist, too.
        """
        created = []
        for block in blocks:
            if block in self._user_counts or block in self._unused:
                break
            self._user_counts[block] = 1
            created.append(block)
        return created

    def release(self, blocks: Sequence[Hashable]) -> None:
        """Count one request less that uses each of the blocks.

        The end of a prefix becomes unused first, so that it is evicted first: its beginning is
        shared by more prompts, and the end is useless without the beginning.
        """
        for block in reversed(blocks):
            self._user_counts[block] -= 1
            if not self._user_counts[block]:
                del self._user_counts[block]
                self._unused[block] = None

    def evict(self, capacity: int) -> None:
        """Remove the least recently used blocks until at most `capacity` unused ones are left.

        A negative capacity counts as 0.
        """
        while len(self._unused) > max(0, capacity):
            self._unused.popitem(last=False)


class Replica:
    """One model instance.

    The owner calls `submit` for each request, `begin` when the replica is idle or an iteration has
    ended, and `finish` at `end_ns`, the end of the current iteration.

    Attributes:
        end_ns: The end of the current iteration, or NEVER if the replica is idle.
        ends: The end time of every iteration since the start or the last `forget`, in ns.
        started: The requests that got a first token in the last `finish`: the very first, or the
            first after a pause.
        paused: The requests paused by the last `begin`, as (request, first iteration, last
            iteration). These are the iterations in which it got tokens since it was last admitted.
        waiting: The requests that wait for admission, in order.
        active: Number of requests in the batch: admitted, and neither finished nor paused. Some of
            them are in prefill, the others decode.
        decoding: Number of active requests that have finished their prefill.
        decoded: Sum of `decoding` over all finished iterations.
        iteration: Number of finished iterations.
        context_requests: Number of requests that the current iteration prefills.
        context_tokens: Number of tokens that it prefills.
        pauses: Number of pauses since the start.
        hits: Number of prompt blocks found in the cache at admission, since the start.
        misses: Number of prompt blocks not found.
    """

    Request = SimRequest
    """The class of the requests for `submit`."""

    def __init__(self, costs: Costs, limits: ServerLimits) -> None:
        self.end_ns = NEVER
        self.ends = array("q")
        self.started: list[SimRequest] = []
        self.paused: list[tuple[SimRequest, int, int]] = []
        self.waiting: deque[SimRequest] = deque()
        self.active = 0
        self.decoding = 0
        self.decoded = 0
        self.iteration = 0
        self.context_requests = 0
        self.context_tokens = 0
        self.pauses = 0
        self.hits = 0
        self.misses = 0
        self._costs = costs
        self._limits = limits
        self._is_under_way = False  # between `begin` and `finish`
        self._kv_tokens = 0  # in the key-value cache, of decoding requests
        self._private_blocks = 0  # blocks in use that are not shared
        self._shared = _SharedBlocks()
        # The request whose prompt is prefilled in part. It is served before the queue.
        self._partial: SimRequest | None = None
        # The requests whose prefill ends with the current iteration.
        self._ready: list[SimRequest] = []
        # The decoding requests in order of admission: a dict without values, because any of them
        # can be removed quickly, and the last one found.
        self._decoding_requests: dict[SimRequest, None] = {}
        # The decoding requests by the iteration of their last token, which is known in advance.
        self._ending_by_iteration: dict[int, list[SimRequest]] = {}
        # A decoding request gets a token per iteration, so it fills a block and needs a new one
        # every `tokens_per_block` iterations, always at the same iteration % tokens_per_block: its
        # phase. This is the number of decoding requests by phase, so that an iteration need not
        # visit each of them. Unused with `guaranteed`, where blocks are taken at admission.
        self._growing_by_phase = [0] * limits.tokens_per_block

    @property
    def queued(self) -> int:
        """Number of requests that wait for admission."""
        return len(self.waiting)

    @property
    def next_due_ns(self) -> int:
        """Due time of the first request that waits, or NEVER if none waits."""
        return self.waiting[0].due_ns if self.waiting else NEVER

    @property
    def blocks_used(self) -> int:
        """Number of blocks that cannot be reused for another request now."""
        return self._private_blocks + self._shared.used_count

    def end_of(self, iteration: int) -> int:
        """Return when an iteration ended, if `forget` was never called. Raises IndexError."""
        return self.ends[iteration]

    def forget(self) -> None:
        """Forget when iterations ended, except for the last one."""
        del self.ends[:-1]

    def admissible(self, input_tokens: int) -> bool:
        """Return whether a prompt of this length can be served at all."""
        limits = self._limits
        fits_iteration = limits.chunked_prefill or input_tokens <= limits.max_num_tokens
        return input_tokens < limits.max_seq_len and fits_iteration

    def submit(self, request: SimRequest) -> None:
        """Queue a request whose length is admissible. Requests must come in order of `due_ns`.

        An output that does not fit is shortened without an error, as in trtllm-serve.
        """
        max_output_tokens = self._limits.max_seq_len - request.input_tokens
        if request.output_tokens > max_output_tokens:
            request.output_tokens = max_output_tokens
            request.remaining_tokens = max_output_tokens
        self.waiting.append(request)

    def begin(self, now_ns: int) -> bool:
        """Begin an iteration, which ends at `end_ns`. Return False if there is nothing to do.

        A decoding request reads its whole cache in an iteration, and the token that is computed
        now. Prompts share the iteration as far as the limit of tokens allows.
        """
        self.paused = []
        if not self._limits.guaranteed:
            self._grow_decoding()
        work = _Work(self.decoding, self._kv_tokens + self.decoding)
        if not self.paused:  # a request that was just paused is not admitted again yet
            self._prefill(work, self._limits.max_num_tokens - self.decoding, now_ns)
        if not work.decoding and not work.context_tokens:
            self.end_ns = NEVER
            return False
        self.context_tokens = work.context_tokens
        self.context_requests = work.context_requests
        self.end_ns = now_ns + work.duration_ns(self._costs)
        self.ends.append(self.end_ns)
        self._is_under_way = True
        return True

    def finish(self) -> list[SimRequest]:
        """End the current iteration, and return the requests that are done.

        Every decoding request, and every request whose prefill has just ended, gets one token.
        """
        finished_iteration = self.iteration
        self.iteration += 1
        self._is_under_way = False
        self._kv_tokens += self.decoding
        self.decoded += self.decoding
        done = self._ending_by_iteration.pop(finished_iteration, [])
        for request in done:
            request.state = DONE
            self._remove_from_batch(request)
        self.started = self._ready
        self._ready = []
        for request in self.started:
            self._start_decoding(request, finished_iteration)
            if request.state == DONE:
                done.append(request)
        self.decoding = len(self._decoding_requests)
        return done

    @staticmethod
    def next_iteration(replicas: Sequence[Replica], before_ns: int) -> tuple[int, int]:
        """Return the end of the iteration that ends first, and the index of its replica.

        Iterations that end before `before_ns`, and start and end no request, are ended here, in
        order of time. So the caller sees only iterations at which something happens. The end is
        NEVER if all replicas are idle.
        """
        while True:
            end_ns, index = min((replica.end_ns, index) for index, replica in enumerate(replicas))
            if end_ns >= before_ns or not replicas[index]._is_quiet():
                return end_ns, index
            replicas[index].finish()
            replicas[index].begin(end_ns)

    def cancel(self, request: SimRequest) -> None:
        """Stop a request unless it is done. Its blocks are free from the next iteration on.

        What it is removed from depends on its state: the queue, the batch, or the requests in
        prefill.
        """
        if request.state == WAITING:
            self.waiting.remove(request)
        elif request.state == DECODING:
            self._cancel_decoding(request)
        elif request.state == PREFILLING:
            if request is self._partial:
                self._partial = None
            else:
                self._ready.remove(request)
            self._release_blocks(request, request.private_blocks)
            self.active -= 1
        request.state = DONE

    def generated(self, request: SimRequest) -> int:
        """Return the tokens that a request has got by the end of the last finished iteration.

        Tokens are not counted one by one. Since its admission, a request has got one token in each
        iteration from `resumed_iteration` on; after a pause, `remaining_tokens` says how many it
        lacked then.
        """
        tokens_before_pause = request.output_tokens - request.remaining_tokens
        is_done_after_decoding = request.state == DONE and request.last_iteration >= 0
        if request.state != DECODING and not is_done_after_decoding:
            return tokens_before_pause
        last_iteration = min(self.iteration - 1, request.last_iteration)
        return tokens_before_pause + max(0, last_iteration - request.resumed_iteration + 1)

    def reset_cache(self) -> None:
        """Forget the shared blocks that no request uses; those in use stay until they are free."""
        self._shared.evict(0)

    def _free_blocks(self) -> int:
        """Return the number of blocks that are free or could be evicted."""
        return self._limits.kv_blocks - self.blocks_used

    def _is_quiet(self) -> bool:
        """Return whether this iteration starts and ends no request, and the next pauses none.

        The caller need not see such an iteration.
        """
        if not self.decoding and self._partial is None:
            return False  # all were cancelled: the replica becomes idle
        if self._ready or self.iteration in self._ending_by_iteration:
            return False
        if self._limits.guaranteed:
            return True
        next_phase = (self.iteration + 1) % self._limits.tokens_per_block
        return self._growing_by_phase[next_phase] <= self._free_blocks()

    # Admission and prefill

    def _prefill(self, work: _Work, budget: int, now_ns: int) -> None:
        """Add the prefill of at most `budget` prompt tokens to an iteration, in order of arrival.

        A prompt that exceeds the rest of the budget is prefilled in part and continued in the next
        iteration (chunked prefill).
        """
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
        """Admit the request that waits first, and return it. Return None if it has to wait.

        It waits if the batch is full, if it is not due yet, if its prompt exceeds the budget and
        cannot be prefilled in parts, or if too few blocks are free. No later request overtakes it.
        """
        limits = self._limits
        if not self.waiting or self.active >= limits.max_batch_size:
            return None
        request = self.waiting[0]
        if request.due_ns > now_ns:
            return None
        if not limits.chunked_prefill and request.prefill_left > budget:
            return None
        if not self._take_blocks(request):
            return None
        self.waiting.popleft()
        request.state = PREFILLING
        self.active += 1
        if request.admitted_ns < 0:
            request.admitted_ns = now_ns
        return request

    def _take_blocks(self, request: SimRequest) -> bool:
        """Take the blocks for a waiting request. Return False if there are not enough.

        The blocks at the beginning of its prompt that exist already are shared. The rest are
        private: no other request uses them. Cached blocks that no request uses count as free, and
        are evicted where private blocks need their memory.
        """
        limits = self._limits
        per_block = limits.tokens_per_block
        tokens = request.prefill_tokens
        if limits.guaranteed:
            tokens += request.remaining_tokens  # space for the whole output is reserved now
        # At least one token of a prompt is computed, even if all its blocks are in the cache.
        reusable_count = (request.prefill_tokens - 1) // per_block if limits.block_reuse else 0
        shared = self._shared.match(request.blocks[:reusable_count])
        private_count = _divide_rounding_up(tokens, per_block) - len(shared)
        if private_count + self._shared.count_unused(shared) > self._free_blocks():
            return False
        self._shared.use(shared)
        self._private_blocks += private_count
        self._shared.evict(self._free_blocks())
        request.shared_blocks = shared
        request.private_blocks = private_count
        request.prefill_left = request.prefill_tokens - len(shared) * per_block
        if request.cached_tokens < 0:  # the first admission; one after a pause is not counted
            request.cached_tokens = len(shared) * per_block
            if limits.block_reuse:
                self.hits += len(shared)
                self.misses += len(request.blocks) - len(shared)
        return True

    # Decoding

    def _start_decoding(self, request: SimRequest, iteration: int) -> None:
        """Begin to decode a request whose prefill has ended with this iteration.

        The prefill has given it its first token. A request that needs no other token is done.
        """
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
        self._kv_tokens += request.prefill_tokens
        if not limits.guaranteed:
            self._growing_by_phase[self._growth_phase(request)] += 1
        self._decoding_requests[request] = None
        self._ending_by_iteration.setdefault(request.last_iteration, []).append(request)

    def _share_prompt_blocks(self, request: SimRequest) -> None:
        """Share the full blocks of a prompt that has been computed with later requests.

        Blocks that another request has already shared stay private to this one.
        """
        full_blocks = request.input_tokens // self._limits.tokens_per_block
        already_shared = len(request.shared_blocks)
        newly_shared = self._shared.add(request.blocks[already_shared:full_blocks])
        request.shared_blocks = [*request.shared_blocks, *newly_shared]
        request.private_blocks -= len(newly_shared)
        self._private_blocks -= len(newly_shared)

    def _growth_phase(self, request: SimRequest) -> int:
        """Return in which iterations, modulo tokens_per_block, a request needs a new block.

        In iteration `resumed_iteration + 1 + n` it has `prefill_tokens + n` tokens in the cache and
        adds one. It needs a new block if these fill their blocks exactly, so if `prefill_tokens +
        n` is a multiple of tokens_per_block.
        """
        iteration_minus_cached_tokens = request.resumed_iteration + 1 - request.prefill_tokens
        return iteration_minus_cached_tokens % self._limits.tokens_per_block

    def _grow_decoding(self) -> None:
        """Take the blocks that decoding requests need now; pause some if there are too few.

        Each pause frees the blocks of one request, and may also lower the number of blocks needed.
        """
        phase = self.iteration % self._limits.tokens_per_block
        if self._growing_by_phase[phase] > self._free_blocks():
            while self._growing_by_phase[phase] > self._free_blocks():
                self._pause_one()
            self._shared.evict(self._free_blocks() - self._growing_by_phase[phase])
        self._private_blocks += self._growing_by_phase[phase]

    def _pause_one(self) -> None:
        """Pause the request admitted last, which frees its blocks.

        It is the next to be admitted. Its prompt and the tokens that it has got are then prefilled
        again, because their keys and values are lost. A request that is still in prefill is newer
        than all decoding ones.
        """
        if self._partial is not None:
            request = self._partial
            self._partial = None
            self._release_blocks(request, request.private_blocks)
            self.active -= 1
            self.paused.append((request, 0, -1))  # an empty range: it has got no token
        else:
            request = next(reversed(self._decoding_requests))
            generated = self.generated(request)
            self.paused.append((request, request.resumed_iteration, self.iteration - 1))
            self._cancel_decoding(request)
            request.prefill_tokens = request.input_tokens + generated
            request.remaining_tokens = request.output_tokens - generated
        request.prefill_left = request.prefill_tokens
        request.state = WAITING
        self.waiting.appendleft(request)
        self.pauses += 1

    def _cancel_decoding(self, request: SimRequest) -> None:
        """Remove a decoding request from the batch before it has got its last token."""
        ending_together = self._ending_by_iteration[request.last_iteration]
        ending_together.remove(request)
        if not ending_together:
            del self._ending_by_iteration[request.last_iteration]
        self._remove_from_batch(request)

    def _remove_from_batch(self, request: SimRequest) -> None:
        """Remove a decoding request that has ended or is paused, and free all of its blocks.

        The caller removes it from `_ending_by_iteration`.
        """
        limits = self._limits
        last_iteration = min(self.iteration - 1, request.last_iteration)
        # The key and the value of the last token are not in the cache: they are computed together
        # with the token after it. So the first token, at `resumed_iteration`, has added none.
        cached_tokens = request.prefill_tokens + last_iteration - request.resumed_iteration
        if limits.guaranteed:
            private_blocks = request.private_blocks  # also those of the output, since admission
        else:
            phase = self._growth_phase(request)
            self._growing_by_phase[phase] -= 1
            cached_blocks = _divide_rounding_up(cached_tokens, limits.tokens_per_block)
            private_blocks = cached_blocks - len(request.shared_blocks)
            if self._is_under_way and self.iteration % limits.tokens_per_block == phase:
                private_blocks += 1  # the current iteration has already taken a block for it
        del self._decoding_requests[request]
        self._kv_tokens -= cached_tokens
        self.decoding -= 1
        self.active -= 1
        self._release_blocks(request, private_blocks)

    def _release_blocks(self, request: SimRequest, private_blocks: int) -> None:
        """Free the private blocks of a request, and stop using its shared ones."""
        self._private_blocks -= private_blocks
        self._shared.release(request.shared_blocks)
        request.shared_blocks = ()
        request.private_blocks = 0
