"""One replica of a continuous-batching server as a physical model, iteration by iteration.

The caller passes the time. An iteration takes `overhead + max(bytes / bandwidth, FLOPs / rate)`,
the roofline model. The batch changes only when a sequence is admitted, paused (preempted) or
finished. The iteration of a sequence's last token is known when its prefill ends, so no work is
done per token. The HTTP endpoint and simulations in virtual time use the same class.

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

NOT_KNOWN_YET = -1
"""The value of a time, a count or an iteration of a request before it is known."""


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
        reserves_output_blocks: Whether all blocks for the output are reserved at admission
            (TensorRT-LLM's scheduler "guaranteed no evict"). If not ("max utilization"), blocks
            are taken as tokens are generated. When none are left, the sequence admitted last is
            paused and computed again later.
        block_reuse: Whether prompts with the same prefix share its blocks.
    """

    max_batch_size: int
    max_num_tokens: int
    kv_blocks: int
    tokens_per_block: int = 32
    max_seq_len: int = 4096
    chunked_prefill: bool = True
    reserves_output_blocks: bool = False
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

    Iterations are numbered from 0. -1 stands for no iteration, and for a time or a count that is
    not known yet. A request that is paused is admitted a second time after the pause.

    Attributes:
        key: Names the request to the caller. An integer if the request is packed into rows.
        due_ns: When the request arrives.
        input_tokens: Tokens of the prompt.
        requested_tokens: Output tokens that the client requested.
        output_tokens: Output tokens to be generated, which may be fewer than requested.
        blocks: One hash per full block of the prompt. It covers the prompt up to the end of the
            block, so prompts with equal beginnings have equal first hashes.
        replica_index: The caller's index of the replica. The replica does not use it.
        failure: The caller's code of the failure, or 0. The replica does not use it.
        failed_ns: The caller's time of the failure. The replica does not use it.
        state: WAITING, PREFILLING, DECODING or DONE.
        admitted_ns: When the request was first admitted to the batch.
        cached_tokens: Tokens of the prompt that were in the cache at the first admission.
        first_iteration: The iteration of the first token.
        resumed_iteration: The iteration of the first token since the last admission.
        last_iteration: The planned iteration of the last token. Known when the prefill ends.
        prefill_tokens: Tokens to be prefilled: the prompt and, after a pause, the tokens that were
            generated before it.
        prefill_tokens_left: Those of them that are not computed yet.
        remaining_output_tokens: Output tokens to be generated after the prefill.
        private_block_count: Blocks taken at admission that no other request uses.
        shared_blocks: Hashes of the blocks that the request shares with others.
    """

    def __init__(
        self,
        key: Any,
        due_ns: int,
        input_tokens: int,
        output_tokens: int,
        blocks: Sequence[Hashable] = (),
    ) -> None:
        """Create a request that has not been submitted to a replica yet.

        Args:
            key: Names the request to the caller.
            due_ns: When the request arrives.
            input_tokens: Tokens of the prompt.
            output_tokens: Output tokens that the client requests.
            blocks: One hash per full block of the prompt, with which prompts share cache blocks.
        """
        # The request of the client. Only the output may be shortened later, if it does not fit.
        self.key = key
        self.due_ns = due_ns
        self.input_tokens = input_tokens
        self.requested_tokens = output_tokens
        self.output_tokens = output_tokens
        self.blocks = blocks

        # Fields that the caller of the replica sets. The failure 0 means that there is none.
        self.replica_index = 0
        self.failure = 0
        self.failed_ns = NOT_KNOWN_YET

        # The progress, which the replica sets.
        self.state = WAITING
        self.admitted_ns = NOT_KNOWN_YET
        self.cached_tokens = NOT_KNOWN_YET
        self.first_iteration = NOT_KNOWN_YET
        self.resumed_iteration = NOT_KNOWN_YET
        self.last_iteration = NOT_KNOWN_YET

        # The work that is left. A pause adds the tokens generated so far to the prefill.
        self.prefill_tokens = input_tokens
        self.prefill_tokens_left = input_tokens
        self.remaining_output_tokens = output_tokens

        # The blocks of the key-value cache that the request uses.
        self.private_block_count = 0
        self.shared_blocks: Sequence[Hashable] = ()

    @staticmethod
    def pack(requests: Sequence[SimRequest], rows: NDArray[np.int64]) -> None:
        """Write the REQUEST_FIELDS of each request into a row of `rows`."""
        for row, request in zip(rows, requests, strict=True):
            row[:] = [getattr(request, name) for name in REQUEST_FIELDS]


@dataclass(slots=True)
class _IterationWork:
    """What one iteration computes and reads.

    Attributes:
        decoding_count: Sequences that get one output token each.
        tokens_read: Tokens whose keys and values are read from the key-value cache.
        context_requests: Requests of which a part of the prompt is computed.
        context_tokens: Tokens of prompts that are computed.
        attended_tokens: The sum over all computed tokens of the tokens that each attends to.
    """

    decoding_count: int
    tokens_read: int
    context_requests: int = 0
    context_tokens: int = 0
    attended_tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.attended_tokens = float(self.tokens_read)

    def add_prompt_chunk(self, tokens_before: int, tokens: int) -> None:
        """Add a part of a prompt to what the iteration computes.

        With causal attention, each token attends to all tokens before it. These are the tokens
        before the chunk and, on average over the chunk, half of the chunk.

        Args:
            tokens_before: Tokens of the prompt before this part. They are in the cache.
            tokens: Tokens of this part.
        """
        self.tokens_read += tokens_before + tokens
        self.attended_tokens += tokens * (tokens_before + 0.5 * tokens)
        self.context_tokens += tokens
        self.context_requests += 1

    def duration_ns(self, costs: Costs) -> int:
        """Return how long the iteration takes, by the roofline model of `Costs`.

        Memory is read while the processor computes, so the iteration takes as long as the slower of
        both. The result is rounded up, so that an iteration always takes some time.
        """
        memory_ns = costs.weights_ns + self.tokens_read * costs.kv_token_ns
        computed_tokens = self.decoding_count + self.context_tokens
        compute_ns = computed_tokens * costs.token_ns + self.attended_tokens * costs.attended_ns
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

    def match_prefix(self, blocks: Sequence[Hashable]) -> Sequence[Hashable]:
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

    def create(self, blocks: Sequence[Hashable]) -> list[Hashable]:
        """Create the blocks up to the first that exists already, and return the created ones.

        They have one user: the request that has computed them. The blocks after an existing one
        are not created, because another request with the same prefix has probably created them.
        """
        created_blocks = []
        for block in blocks:
            if block in self._user_counts or block in self._unused:
                break
            self._user_counts[block] = 1
            created_blocks.append(block)
        return created_blocks

    def release(self, blocks: Sequence[Hashable]) -> None:
        """Remove one user from each of the blocks, which are in the order of their prompt.

        A block without users stays in the cache until it is evicted. The last blocks of a prefix
        become unused first, so they are evicted first: fewer prompts share them, and they are
        useless without the blocks before them.
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


class _BlockDemand:
    """How many decoding requests need a new cache block in each iteration.

    A decoding request adds one token per iteration, so it fills a block and needs a new one every
    `tokens_per_block` iterations. With 32 tokens per block, a request that needs a new block in
    iteration 5 needs one in iterations 37, 69, ..., too: those with remainder 5 modulo 32. This
    remainder is the phase of the request. Requests are counted by phase, so that the demand of an
    iteration is known without a visit to each request.
    """

    def __init__(self, tokens_per_block: int) -> None:
        """Create a demand without requests."""
        self._tokens_per_block = tokens_per_block
        self._count_by_phase = [0] * tokens_per_block

    def add(self, request: SimRequest) -> None:
        """Add a request that begins to decode."""
        self._count_by_phase[self._find_phase(request)] += 1

    def remove(self, request: SimRequest) -> None:
        """Remove a request that decodes no more."""
        self._count_by_phase[self._find_phase(request)] -= 1

    def count_blocks(self, iteration: int) -> int:
        """Return how many new blocks an iteration needs, which is one per request of its phase."""
        return self._count_by_phase[iteration % self._tokens_per_block]

    def needs_block(self, request: SimRequest, iteration: int) -> bool:
        """Return whether a decoding request needs a new block in an iteration."""
        return iteration % self._tokens_per_block == self._find_phase(request)

    def _find_phase(self, request: SimRequest) -> int:
        """Return the phase of a request, which tells in which iterations it needs a new block.

        These are the iterations whose number modulo `tokens_per_block` is the phase.

        A decoding request stores one token per iteration in the cache: token number t in iteration
        t + offset. The first of these tokens has the number `prefill_tokens`, and is stored in the
        iteration after `resumed_iteration`. A new block begins with each token whose number is a
        multiple of `tokens_per_block`.

        For example, with 32 tokens per block, a prompt of 40 tokens and the first output token in
        iteration 100, token 40 is stored in iteration 101. The offset is 101 - 40 = 61, and the
        phase is 61 % 32 = 29. The next block begins with token 64 in iteration 64 + 61 = 125, and
        125 % 32 is 29.
        """
        first_storing_iteration = request.resumed_iteration + 1
        offset = first_storing_iteration - request.prefill_tokens
        return offset % self._tokens_per_block


class Replica:
    """One model instance, which serves a batch of requests in iterations.

    The owner calls `submit` for each request, `begin_iteration` when the replica is idle or an
    iteration has ended, and `end_iteration` at `end_ns`.

    Attributes:
        end_ns: The end of the current iteration, or NEVER if the replica is idle.
        iteration_ends_ns: The end of every iteration since the start or the last call of
            `discard_iteration_ends`. The end of the current iteration is included.
        first_token_requests: The requests that got a first token in the iteration that ended last:
            the very first, or the first after a pause.
        recent_pauses: The requests paused by the last `begin_iteration`, as (request, first
            iteration, last iteration): the iterations in which it got tokens since its last
            admission.
        active_count: Number of requests in the batch: admitted, and neither finished nor paused.
            Some of them are in prefill, the others decode.
        decoding_count: Number of active requests that have finished their prefill.
        decoded_tokens: Number of tokens generated by decoding, which is one per iteration and
            decoding request. First tokens come from the prefill and are not counted.
        iteration: Number of finished iterations, which is also the number of the current one.
        context_requests: Number of requests that the current iteration prefills.
        context_tokens: Number of tokens that it prefills.
        pause_count: Number of pauses since the start.
        cache_hits: Number of prompt blocks found in the cache at admission, since the start.
        cache_misses: Number of prompt blocks not found, since the start.
    """

    Request = SimRequest
    """The class of the requests for `submit`."""

    def __init__(self, costs: Costs, limits: ServerLimits) -> None:
        """Create an idle replica.

        Args:
            costs: What an iteration costs, from which its duration follows.
            limits: The sizes of the batch and of the key-value cache.
        """
        self._costs = costs
        self._limits = limits

        # The current iteration, and the events of the last one.
        self.iteration = 0
        self.end_ns = NEVER
        self.context_requests = 0
        self.context_tokens = 0
        self.first_token_requests: list[SimRequest] = []
        self.recent_pauses: list[tuple[SimRequest, int, int]] = []
        self._is_computing = False  # between `begin_iteration` and `end_iteration`

        # Statistics since the start.
        self.iteration_ends_ns = array("q")
        self.decoded_tokens = 0
        self.pause_count = 0
        self.cache_hits = 0
        self.cache_misses = 0

        # Requests before their first token. At most one prompt is computed in part, and the next
        # iteration continues it before any other prompt.
        self._waiting: deque[SimRequest] = deque()  # for admission, in order of arrival
        self._partly_prefilled: SimRequest | None = None
        self._finishing_prefill: list[SimRequest] = []  # with the current iteration

        # The batch. The decoding requests are stored twice: in order of admission, and by the
        # iteration of their last token. A dict whose values are None serves as an ordered set.
        self.active_count = 0
        self.decoding_count = 0
        self._decoding_requests: dict[SimRequest, None] = {}
        self._requests_by_last_iteration: dict[int, list[SimRequest]] = {}

        # The key-value cache.
        self._kv_tokens = 0  # tokens of decoding requests in the cache
        self._private_block_count = 0  # blocks in use that are not shared
        self._shared = _SharedBlocks()

        # Not used with `reserves_output_blocks`, because decoding then takes no new blocks.
        self._block_demand = _BlockDemand(limits.tokens_per_block)

    @property
    def queued_count(self) -> int:
        """Number of requests that wait for admission."""
        return len(self._waiting)

    @property
    def next_due_ns(self) -> int:
        """Due time of the first request that waits, or NEVER if none waits."""
        return self._waiting[0].due_ns if self._waiting else NEVER

    @property
    def used_block_count(self) -> int:
        """Number of blocks that cannot be reused for another request now."""
        return self._private_block_count + self._shared.used_count

    def iteration_end_ns(self, iteration: int) -> int:
        """Return when an iteration ended. Raises IndexError if it has not begun.

        The result is right only if `discard_iteration_ends` was never called.
        """
        return self.iteration_ends_ns[iteration]

    def discard_iteration_ends(self) -> None:
        """Discard the end times of all iterations but the last, to limit the memory of a server."""
        del self.iteration_ends_ns[:-1]

    def can_serve(self, input_tokens: int) -> bool:
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
            request.remaining_output_tokens = max_output_tokens
        self._waiting.append(request)

    def begin_iteration(self, now_ns: int) -> bool:
        """Begin an iteration, which ends at `end_ns`. Return False if there is nothing to do.

        The iteration computes one token of each decoding request. The rest of `max_num_tokens` is
        used to prefill prompts. If cache blocks are missing, some requests are paused first. The
        replica becomes idle if there is nothing to compute.
        """
        self.recent_pauses = []
        if not self._limits.reserves_output_blocks:
            self._take_decoding_blocks()  # may pause requests, which then are not computed

        work = self._schedule_work(now_ns)
        has_work = work.decoding_count > 0 or work.context_tokens > 0
        if not has_work:
            self.end_ns = NEVER
            return False

        self.context_tokens = work.context_tokens
        self.context_requests = work.context_requests
        self.end_ns = now_ns + work.duration_ns(self._costs)
        self.iteration_ends_ns.append(self.end_ns)
        self._is_computing = True

        return True

    def end_iteration(self) -> list[SimRequest]:
        """End the current iteration, and return the requests that are done with it.

        Every decoding request gets one token. So does every request whose prefill ends with this
        iteration, which then begins to decode.
        """
        finished_iteration = self.iteration
        self.iteration += 1
        self._is_computing = False

        # Each decoding request has got a token, and has stored the token before it in the cache.
        # This includes the requests that are done now.
        self._kv_tokens += self.decoding_count
        self.decoded_tokens += self.decoding_count

        # Remove the requests that have got their last token.
        done_requests = self._requests_by_last_iteration.pop(finished_iteration, [])
        for request in done_requests:
            request.state = DONE
            self._remove_from_batch(request)

        # Give the first token to the requests whose prefill has ended. They were not decoding in
        # this iteration, so they were not counted above.
        self.first_token_requests = self._finishing_prefill
        self._finishing_prefill = []
        for request in self.first_token_requests:
            self._end_prefill(request, finished_iteration)
            needs_only_one_token = request.state == DONE
            if needs_only_one_token:
                done_requests.append(request)

        return done_requests

    @staticmethod
    def advance_to_next_event(replicas: Sequence[Replica], before_ns: int) -> tuple[int, int]:
        """Advance the replicas to the next iteration whose end the caller has to handle.

        An iteration is uneventful if no request starts, ends or is paused with its end. Most are,
        so they are ended here, in order of time. The compiled implementation does this without a
        call from Python.

        Args:
            replicas: The replicas, busy or idle.
            before_ns: Iterations that end at this time or later are left to the caller.

        Returns:
            When the next iteration ends, and the index of its replica. The time is NEVER if all
            replicas are idle.
        """
        while True:
            # The replica whose iteration ends first; of several, the one with the lowest index.
            end_ns, next_index = min(
                (replica.end_ns, index) for index, replica in enumerate(replicas)
            )
            next_replica = replicas[next_index]
            can_end_here = end_ns < before_ns and next_replica._is_uneventful()
            if not can_end_here:
                return end_ns, next_index

            next_replica.end_iteration()
            next_replica.begin_iteration(end_ns)

    def cancel(self, request: SimRequest) -> None:
        """Stop a request unless it is done. Its blocks are free from the next iteration on.

        A request leaves the place that its state names: the queue, the prefill or the batch of
        decoding requests.
        """
        if request.state == WAITING:
            self._waiting.remove(request)
        elif request.state == DECODING:
            self._remove_unfinished(request)
        elif request.state == PREFILLING:
            if request is self._partly_prefilled:
                self._partly_prefilled = None
            else:
                self._finishing_prefill.remove(request)
            self._release_blocks(request, request.private_block_count)
            self.active_count -= 1
        request.state = DONE

    def count_generated_tokens(self, request: SimRequest) -> int:
        """Return how many tokens a request has by the end of the last finished iteration.

        Tokens are not counted one by one. A request that was paused keeps the tokens it had, and is
        admitted again for the `remaining_output_tokens`. From the iteration `resumed_iteration` on,
        it gets one token per iteration. For example, a request for 10 tokens was paused after 4,
        and 6 remain. After iterations 20 (`resumed_iteration`) to 22 it has 4 + 3 = 7 tokens.
        """
        tokens_before_admission = request.output_tokens - request.remaining_output_tokens
        if not self._has_decoded(request):
            return tokens_before_admission

        newest_token_iteration = self._find_newest_token_iteration(request)
        tokens_since_admission = newest_token_iteration - request.resumed_iteration + 1

        # The number could only be negative for a request for less than one output token.
        return tokens_before_admission + max(0, tokens_since_admission)

    def _has_decoded(self, request: SimRequest) -> bool:
        """Return whether a request has got a token since its last admission to the batch.

        A prefill gives the first token when it ends, and sets `last_iteration` then. So a request
        that was cancelled before the end of its prefill has no `last_iteration`.
        """
        if request.state == DONE:
            return request.last_iteration >= 0
        return request.state == DECODING

    def reset_cache(self) -> None:
        """Forget the shared blocks that no request uses; those in use stay until they are free."""
        self._shared.evict(0)

    def _count_free_blocks(self) -> int:
        """Return the number of blocks that are free or could be evicted."""
        return self._limits.kv_blocks - self.used_block_count

    def _is_uneventful(self) -> bool:
        """Return whether the current iteration may end without notice to the owner.

        In an uneventful iteration no request gets its first or last token, and the next iteration
        pauses none.
        """
        if not self.decoding_count and self._partly_prefilled is None:
            return False  # all requests were cancelled: the replica becomes idle
        if self._finishing_prefill:
            return False  # a request gets its first token
        if self.iteration in self._requests_by_last_iteration:
            return False  # a request gets its last token
        if self._limits.reserves_output_blocks:
            return True  # no request is ever paused

        next_demand = self._block_demand.count_blocks(self.iteration + 1)
        return next_demand <= self._count_free_blocks()

    # Admission and prefill

    def _schedule_work(self, now_ns: int) -> _IterationWork:
        """Return what the next iteration computes: tokens of decoding requests, and prompts.

        If requests were paused just now, because memory is short, no prompts are computed. A paused
        request is the first one in the queue. If it were admitted in this iteration, it would take
        back the memory that its pause has freed.
        """
        # Decoding requests read their whole cache, and the token that is computed now.
        tokens_read = self._kv_tokens + self.decoding_count
        work = _IterationWork(self.decoding_count, tokens_read)
        has_paused = bool(self.recent_pauses)
        if not has_paused:
            prompt_budget = self._limits.max_num_tokens - self.decoding_count
            self._schedule_prefill(work, prompt_budget, now_ns)
        return work

    def _schedule_prefill(self, work: _IterationWork, budget: int, now_ns: int) -> None:
        """Add the prefill of at most `budget` prompt tokens to the work of an iteration.

        Requests are admitted in order of arrival. A prompt that exceeds the rest of the budget is
        prefilled in part and continued in the next iteration (chunked prefill).
        """
        while budget > 0:
            request = self._partly_prefilled
            if request is None:
                request = self._admit_first_waiting(budget, now_ns)
            if request is None:
                return
            budget -= self._prefill_chunk(request, work, budget)

    def _prefill_chunk(self, request: SimRequest, work: _IterationWork, budget: int) -> int:
        """Add the prefill of the next part of a prompt to the work of an iteration.

        Returns:
            The number of tokens of this part, which is at most `budget`.
        """
        computed_tokens = request.prefill_tokens - request.prefill_tokens_left
        chunk_tokens = min(request.prefill_tokens_left, budget)
        work.add_prompt_chunk(computed_tokens, chunk_tokens)
        request.prefill_tokens_left -= chunk_tokens

        if request.prefill_tokens_left:
            self._partly_prefilled = request
        else:
            self._partly_prefilled = None
            self._finishing_prefill.append(request)

        return chunk_tokens

    def _admit_first_waiting(self, budget: int, now_ns: int) -> SimRequest | None:
        """Admit the first waiting request, and return it. Return None if there is none to admit.

        The first request goes on waiting if the batch is full, if it is not due yet, if its prompt
        exceeds the budget and cannot be prefilled in parts, or if too few blocks are free. Then no
        later request is admitted before it.

        Args:
            budget: How many prompt tokens the iteration may still prefill.
            now_ns: When the iteration begins.
        """
        limits = self._limits
        if not self._waiting or self.active_count >= limits.max_batch_size:
            return None

        request = self._waiting[0]
        if request.due_ns > now_ns:
            return None
        if not limits.chunked_prefill and request.prefill_tokens_left > budget:
            return None
        if not self._allocate_blocks(request):
            return None

        self._waiting.popleft()
        request.state = PREFILLING
        self.active_count += 1

        if request.admitted_ns < 0:
            request.admitted_ns = now_ns

        return request

    def _allocate_blocks(self, request: SimRequest) -> bool:
        """Allocate cache blocks to a waiting request. Return False if too few are free.

        The blocks of its prompt prefix that are in the cache are shared with other requests, and
        need not be computed. The rest are private. Cached blocks that no request uses count as
        free.
        """
        shared_blocks = self._find_cached_prefix(request)
        private_count = self._count_blocks_to_admit(request) - len(shared_blocks)

        # Shared blocks without users are free now, but not once this request uses them.
        needed_count = private_count + self._shared.count_unused(shared_blocks)
        if needed_count > self._count_free_blocks():
            return False

        self._take_blocks_to_admit(shared_blocks, private_count)
        request.shared_blocks = shared_blocks
        request.private_block_count = private_count
        cached_tokens = len(shared_blocks) * self._limits.tokens_per_block
        request.prefill_tokens_left = request.prefill_tokens - cached_tokens
        self._record_cache_hits(request)

        return True

    def _take_blocks_to_admit(self, shared_blocks: Sequence[Hashable], private_count: int) -> None:
        """Count the blocks of an admitted request as used, and evict blocks to make room for them.

        Unused blocks stay in the cache as long as there is free memory for them. The shared blocks
        of the request have to be counted as used before the eviction, so that it spares them.
        """
        self._shared.use(shared_blocks)
        self._private_block_count += private_count
        self._shared.evict(capacity=self._count_free_blocks())

    def _count_blocks_to_admit(self, request: SimRequest) -> int:
        """Return how many cache blocks a waiting request has to have for its admission.

        These are the blocks of all tokens to be prefilled and, if they have to be reserved, those
        of the output.
        """
        tokens = request.prefill_tokens
        if self._limits.reserves_output_blocks:
            tokens += request.remaining_output_tokens
        return _divide_rounding_up(tokens, self._limits.tokens_per_block)

    def _find_cached_prefix(self, request: SimRequest) -> Sequence[Hashable]:
        """Return the blocks at the beginning of a prompt that are in the cache.

        At least one token of a prompt is computed, even if all its blocks are in the cache: the
        first output token follows from it.
        """
        if not self._limits.block_reuse:
            return ()
        reusable_count = (request.prefill_tokens - 1) // self._limits.tokens_per_block
        return self._shared.match_prefix(request.blocks[:reusable_count])

    def _record_cache_hits(self, request: SimRequest) -> None:
        """Record how much of the prompt of an admitted request was in the cache.

        Only the first admission counts, not the admission after a pause.
        """
        is_first_admission = request.cached_tokens < 0
        if not is_first_admission:
            return

        hits = len(request.shared_blocks)
        request.cached_tokens = hits * self._limits.tokens_per_block
        if self._limits.block_reuse:
            self.cache_hits += hits
            self.cache_misses += len(request.blocks) - hits

    # Decoding

    def _end_prefill(self, request: SimRequest, iteration: int) -> None:
        """Give a request its first token, because its prefill has ended with this iteration.

        The request begins to decode, or is done if it needs no other token. A request that was
        paused has a second prefill, which gives it the first token since the pause
        (`resumed_iteration`).

        A decoding request gets one token per iteration, so the iteration of its last token is known
        now. For example, with 3 tokens from iteration 10 on, it is iteration 12.
        """
        has_had_tokens = request.first_iteration >= 0  # before a pause
        if not has_had_tokens:
            request.first_iteration = iteration

        request.resumed_iteration = iteration
        request.last_iteration = iteration + request.remaining_output_tokens - 1

        if self._limits.block_reuse and request.blocks:
            self._share_prompt_blocks(request)

        if request.remaining_output_tokens > 1:
            self._start_decoding(request)
        else:
            self._release_blocks(request, request.private_block_count)
            self.active_count -= 1
            request.state = DONE

    def _start_decoding(self, request: SimRequest) -> None:
        """Add a request to the decoding ones. It has been in the batch since its admission."""
        request.state = DECODING
        self._kv_tokens += request.prefill_tokens

        if not self._limits.reserves_output_blocks:
            self._block_demand.add(request)

        self._decoding_requests[request] = None
        self.decoding_count += 1
        ending_together = self._requests_by_last_iteration.setdefault(request.last_iteration, [])
        ending_together.append(request)

    def _share_prompt_blocks(self, request: SimRequest) -> None:
        """Share the full blocks of a computed prompt, so that later requests can reuse them.

        The first blocks of the prompt may be shared since the admission, because they were in the
        cache. The request has computed the blocks after them, which are private until now.

        Another request with the same prompt may have shared one of these blocks in the meantime.
        Then this block and those after it stay private, and exist twice in memory.
        """
        reused_count = len(request.shared_blocks)
        full_block_count = request.input_tokens // self._limits.tokens_per_block
        computed_blocks = request.blocks[reused_count:full_block_count]

        # `create` stops at the first block that is already shared.
        newly_shared_blocks = self._shared.create(computed_blocks)
        request.shared_blocks = [*request.shared_blocks, *newly_shared_blocks]

        # These blocks were counted as private, for the request and for the whole replica.
        newly_shared_count = len(newly_shared_blocks)
        request.private_block_count -= newly_shared_count
        self._private_block_count -= newly_shared_count

    def _take_decoding_blocks(self) -> None:
        """Take the new cache blocks that decoding requests need in this iteration.

        If too few blocks are free, the newest requests are paused, one after the other, until the
        blocks suffice for the others. A pause frees the blocks of a request, which may also have
        needed a new one.
        """
        needed_count = self._block_demand.count_blocks(self.iteration)
        while needed_count > self._count_free_blocks():
            self._pause_newest_request()
            needed_count = self._block_demand.count_blocks(self.iteration)

        if self.recent_pauses:
            # A block that no request uses counts as free, although it stays in the cache. The new
            # blocks take the place of some of these. The others may stay, as far as there is room.
            room_for_unused_blocks = self._count_free_blocks() - needed_count
            self._shared.evict(capacity=room_for_unused_blocks)

        self._private_block_count += needed_count

    def _pause_newest_request(self) -> None:
        """Pause (preempt) the request admitted last, which frees its blocks.

        It returns to the front of the queue. When it is admitted again, its prompt and the tokens
        generated so far are prefilled again, because their keys and values are lost.
        """
        # Prompts are prefilled in order of admission. So a request in prefill is newer than all
        # decoding ones.
        if self._partly_prefilled is not None:
            request = self._partly_prefilled
            self._pause_prefill(request)
        else:
            request = next(reversed(self._decoding_requests))
            self._pause_decoding(request)

        request.prefill_tokens_left = request.prefill_tokens
        request.state = WAITING
        self._waiting.appendleft(request)
        self.pause_count += 1

    def _pause_prefill(self, request: SimRequest) -> None:
        """Remove the partly prefilled request from the batch, because it is paused.

        It has got no token since its admission. So the iterations with tokens, from the first to
        the last one, are recorded as an empty range: 0 to -1.
        """
        self._partly_prefilled = None
        self._release_blocks(request, request.private_block_count)
        self.active_count -= 1
        self._record_pause(request, first_iteration=0, last_iteration=-1)

    def _pause_decoding(self, request: SimRequest) -> None:
        """Remove a decoding request from the batch, because it is paused.

        A pause loses the keys and values of the request, but not its tokens. So its next prefill
        computes the prompt and the tokens that it has got, and the decoding then goes on.
        """
        generated_tokens = self.count_generated_tokens(request)
        last_finished_iteration = self.iteration - 1
        self._record_pause(
            request,
            first_iteration=request.resumed_iteration,
            last_iteration=last_finished_iteration,
        )
        self._remove_unfinished(request)

        request.prefill_tokens = request.input_tokens + generated_tokens
        request.remaining_output_tokens = request.output_tokens - generated_tokens

    def _record_pause(self, request: SimRequest, first_iteration: int, last_iteration: int) -> None:
        """Add a pause to `recent_pauses`, with the iterations in which the request got tokens."""
        self.recent_pauses.append((request, first_iteration, last_iteration))

    def _remove_unfinished(self, request: SimRequest) -> None:
        """Remove a decoding request from the batch before it gets its last token."""
        ending_together = self._requests_by_last_iteration[request.last_iteration]
        ending_together.remove(request)
        if not ending_together:
            del self._requests_by_last_iteration[request.last_iteration]
        self._remove_from_batch(request)

    def _remove_from_batch(self, request: SimRequest) -> None:
        """Remove a decoding request from the batch, and free its blocks.

        The request is done, paused or cancelled. It is still in `_requests_by_last_iteration`, from
        which the caller has to remove it. For requests that are done, the caller does that at once
        for all that end with the same iteration.
        """
        # The tokens and blocks that the request has now, before it leaves the batch.
        cached_tokens = self._count_cached_tokens(request)
        private_count = self._count_private_blocks(request, cached_tokens)

        # Remove the request from the batch.
        del self._decoding_requests[request]
        if not self._limits.reserves_output_blocks:
            self._block_demand.remove(request)

        # Subtract its share from the totals of the replica.
        self.decoding_count -= 1
        self.active_count -= 1
        self._kv_tokens -= cached_tokens
        self._release_blocks(request, private_count)

    def _find_newest_token_iteration(self, request: SimRequest) -> int:
        """Return the last finished iteration in which a decoding or done request got a token."""
        last_finished_iteration = self.iteration - 1
        return min(last_finished_iteration, request.last_iteration)

    def _count_cached_tokens(self, request: SimRequest) -> int:
        """Return how many tokens of a decoding or done request are in the key-value cache.

        These are the prefilled tokens and the output tokens since the prefill, without the newest
        one. A token enters the cache in the iteration that computes the token after it.

        For example, a request that got output tokens in iterations 10 (`resumed_iteration`), 11 and
        12 has three, and 12 - 10 = 2 of them are in the cache.
        """
        newest_token_iteration = self._find_newest_token_iteration(request)
        cached_output_tokens = newest_token_iteration - request.resumed_iteration
        return request.prefill_tokens + cached_output_tokens

    def _count_private_blocks(self, request: SimRequest, cached_tokens: int) -> int:
        """Return how many private blocks a decoding request has: those it does not share.

        If the blocks of the output were reserved at admission, their number does not change.
        Otherwise a request takes a new block whenever its last one is full. For example, with 32
        tokens per block, a request with 64 cached tokens has 2 blocks. It takes a third one at the
        beginning of the next iteration, and has 3 blocks while this iteration is computed.

        Args:
            request: The request.
            cached_tokens: How many of its tokens are in the cache.
        """
        limits = self._limits
        if limits.reserves_output_blocks:
            return request.private_block_count

        filled_block_count = _divide_rounding_up(cached_tokens, limits.tokens_per_block)
        has_taken_empty_block = self._is_computing and self._block_demand.needs_block(
            request, self.iteration
        )
        block_count = filled_block_count + 1 if has_taken_empty_block else filled_block_count
        return block_count - len(request.shared_blocks)

    def _release_blocks(self, request: SimRequest, private_count: int) -> None:
        """Free the private blocks of a request, and stop using its shared ones."""
        self._private_block_count -= private_count
        self._shared.release(request.shared_blocks)
        request.shared_blocks = ()
        request.private_block_count = 0
