"""Lengths of simulated requests and the prompt prefixes that they share, without generating texts.

The key-value cache of a server consists of blocks of tokens. Two prompts share a block if they are
equal up to its end, so one hash identifies a block. Most hashes here are numbers. They encode the
position of the block in the prompt and the owner of its last token: all requests, a prefix group,
or one conversation.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from loadgen.core.requests.file_prompts import FilePrompts
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.synthetic_prompts import SyntheticPrompts
from loadgen.core.requests.task_prompts import TaskPrompts
from loadgen.core.workload.request_classes import Mix
from loadgen.core.workload.request_kinds import Synthetic
from loadgen.core.workload.trajectories import Trajectories
from loadgen.sim.server.request_parser import NATURAL_TOKENS

if TYPE_CHECKING:
    from loadgen.core.requests.prompts import Prompts
    from loadgen.core.requests.task_prompts import PromptSegment, SegmentOwner
    from loadgen.core.requests.trace_prompts import TracePrompts
    from loadgen.core.requests.trajectory_prompts import PromptPart, TrajectoryPrompts
    from loadgen.core.workload.request_classes import Requests

DRAWS_PER_BATCH = 1024  # requests whose lengths are drawn together
MAX_BATCHES = 1024  # in memory, because virtual users of a closed loop ask out of order

# The hash of a block is a number: the start of the range of its owner, plus the position of the
# block in the prompt. For example, block 3 of a prompt in group 2 has the hash
# `GROUPS_START + 2 * GROUP_RANGE + 3`. The order of the ranges is: the blocks that all requests
# share, from 0 on, then one range per group (requests with the same prefix, or a step of all
# tasks), then one range per conversation (or request of a task). A prompt has fewer blocks than any
# range has numbers, so hashes of different owners never meet.
GROUPS_START = 1 << 40
GROUP_RANGE = 1 << 40
CONVERSATIONS_START = 1 << 60
CONVERSATION_RANGE = 1 << 24


class RequestSize(Struct, frozen=True, gc=False):
    """The lengths of one request in tokens, and the blocks of its prompt.

    Attributes:
        input_tokens: The length of the prompt.
        output_tokens: The length of the output. 0 for a non-generative request (embeddings,
            rerank).
        blocks: The hashes of the full blocks of the prompt that other requests may share. See
            `SimRequest.blocks`.
        sequence_lengths: The length of each sequence of a non-generative request.
    """

    input_tokens: int
    output_tokens: int
    blocks: Sequence[Hashable] = ()
    sequence_lengths: Sequence[int] = ()


RequestSizer = Callable[[int], RequestSize]
"""Returns the size of the request at an index of the load."""


def create_request_sizer(
    spec: Requests, prompts: Prompts, tokens_per_block: int, *, is_non_generative: bool = False
) -> RequestSizer:
    """Return a function that computes the size of any request of a workload.

    The size is the lengths of a request in tokens, and the blocks of its prompt that others may
    share. It is computed without building the text of the prompt, if possible, so each kind of
    prompts needs a function of its own.

    Args:
        spec: The field `requests` of the workload.
        prompts: The requests that `build_prompts` has built from it.
        tokens_per_block: The block size of the prefix cache, or 0 if prompts share nothing.
        is_non_generative: Whether the API returns values (embeddings, rerank) instead of tokens.
    """
    # Mixes and tasks consist of requests of several kinds.
    if isinstance(prompts, MixPrompts):
        return _create_mix_sizer(
            spec, prompts, tokens_per_block, is_non_generative=is_non_generative
        )
    if isinstance(prompts, TaskPrompts):
        return TaskSizer(prompts, tokens_per_block)

    # All others have requests of one kind.
    if is_non_generative:
        return _create_sequences_sizer(prompts)
    return _create_sizer_of_one_kind(spec, prompts, tokens_per_block)


def _create_sizer_of_one_kind(
    spec: Requests, prompts: Prompts, tokens_per_block: int
) -> RequestSizer:
    """Return a function that computes the size of any request, for requests of one kind.

    The arguments are those of `create_request_sizer`. The requests generate tokens.
    """
    if isinstance(prompts, SyntheticPrompts):
        assert isinstance(spec, Synthetic)
        return create_synthetic_sizer(spec, prompts, tokens_per_block)

    if isinstance(prompts, FilePrompts):
        return FileSizer(prompts, tokens_per_block)

    # All other prompts are those of a recording that is replayed.
    if isinstance(spec, Trajectories):
        return _create_trajectory_sizer(prompts, tokens_per_block)
    return TraceSizer(_as_trace_prompts(prompts), tokens_per_block)


def _create_sequences_sizer(prompts: Prompts) -> SequencesSizer:
    """Return a function that computes the size of any non-generative request (embeddings, rerank).

    The prompts are those of one class of requests, which are no tasks.
    """
    if isinstance(prompts, SyntheticPrompts | FilePrompts):
        return SequencesSizer(prompts)
    return SequencesSizer(_as_trace_prompts(prompts))


def _create_trajectory_sizer(prompts: Prompts, tokens_per_block: int) -> RequestSizer:
    """Return a function that computes the size of any request of recorded sessions.

    Only a data set of trajectories needs the module of its prompts, so it is imported here.
    """
    from loadgen.core.requests.trajectory_prompts import TrajectoryPrompts

    assert isinstance(prompts, TrajectoryPrompts)
    return TrajectorySizer(prompts, tokens_per_block)


def _as_trace_prompts(prompts: Prompts) -> TracePrompts:
    """Return the prompts with the type that the requests of a replayed trace have.

    Only a replayed trace needs the module of this type, so it is imported here.
    """
    from loadgen.core.requests.trace_prompts import TracePrompts

    assert isinstance(prompts, TracePrompts)
    return prompts


def _create_mix_sizer(
    spec: Requests, prompts: MixPrompts, tokens_per_block: int, *, is_non_generative: bool
) -> RequestSizer:
    """Return a function that computes the size of any request of a workload with several classes.

    A workload may mix classes of requests, such as chats and summaries. The function finds out
    which class a request belongs to, and calls the sizer of this class. A sizer is a function that
    computes the lengths of a request in tokens, and the blocks of its prompt.

    Args:
        spec: The field `requests` of the workload, which is a `Mix` for these prompts.
        prompts: The prompts of all classes.
        tokens_per_block: The block size of the prefix cache, or 0 if prompts share nothing.
        is_non_generative: Whether the API returns values (embeddings, rerank) instead of tokens.
    """
    assert isinstance(spec, Mix)
    class_sizers = []
    for request_class, class_prompts in zip(
        spec.classes.values(), prompts.class_prompts, strict=True
    ):
        class_sizer = create_request_sizer(
            request_class.requests,
            class_prompts,
            tokens_per_block,
            is_non_generative=is_non_generative,
        )
        class_sizers.append(class_sizer)

    return MixSizer(prompts, class_sizers)


def create_synthetic_sizer(
    spec: Synthetic, prompts: SyntheticPrompts, tokens_per_block: int
) -> RequestSizer:
    """Return a function that computes the lengths and prompt blocks of synthetic requests.

    The function is called once per request of a simulation, so its cost matters. The cheapest
    sufficient one is returned: `FixedSizer` or `SampledSizer` if prompts share no blocks,
    `PrefixSizer` if they share beginnings, or `ChunkSizer` if they share retrieved passages.

    Args:
        spec: The field `requests` of the workload.
        prompts: The requests.
        tokens_per_block: The block size of the prefix cache, or 0 if there is none.
    """
    has_cache = tokens_per_block > 0
    if has_cache and spec.chunks is not None:
        return ChunkSizer(spec, prompts, tokens_per_block)

    # `cache` is the part of a prompt that the cache shall contain. It may be None.
    has_shared_prefix = bool(spec.system_tokens or spec.shared_prefix_tokens or spec.cache)
    shares_prefix = has_cache and has_shared_prefix
    is_conversation = prompts.turns > 1
    if is_conversation or shares_prefix:
        return PrefixSizer(spec, prompts, tokens_per_block)

    has_fixed_input = spec.input_tokens.tag == "fixed"
    has_fixed_output = spec.output_tokens.tag == "fixed"
    if has_fixed_input and has_fixed_output:
        return FixedSizer(prompts.requested_input_tokens(0), prompts.requested_output_tokens(0))

    return SampledSizer(prompts, spec.system_tokens)


class SequencesSizer:
    """Sizes of non-generative requests: of texts to embed, or of documents to rank."""

    def __init__(self, prompts: SyntheticPrompts | FilePrompts | TracePrompts) -> None:
        self._prompts = prompts

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index."""
        return _size_of_sequences(self._prompts.sequence_lengths(request_index))


def _size_of_sequences(lengths: Sequence[int]) -> RequestSize:
    """Return the size of a non-generative request with sequences of these lengths."""
    return RequestSize(sum(lengths), output_tokens=0, sequence_lengths=lengths)


class FixedSizer:
    """All requests have the same lengths and share nothing."""

    def __init__(self, input_tokens: int, output_tokens: int) -> None:
        self._size = RequestSize(input_tokens, output_tokens)

    def __call__(self, request_index: int) -> RequestSize:  # noqa: ARG002 - all have the same size
        """Return the size of the request at this index."""
        return self._size


class SampledSizer:
    """Sizes of requests that share nothing.

    Lengths are sampled for many requests at a time, because requests come roughly in order.
    """

    def __init__(self, prompts: SyntheticPrompts, system_tokens: int) -> None:
        self._prompts = prompts
        self._system_tokens = system_tokens
        self._batch = functools.lru_cache(maxsize=MAX_BATCHES)(self._draw_batch)

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index."""
        batch_number, index = divmod(request_index, DRAWS_PER_BATCH)
        input_tokens, output_tokens = self._batch(batch_number)
        return RequestSize(input_tokens[index], output_tokens[index])

    def _draw_batch(self, batch_number: int) -> tuple[array[int], array[int]]:
        """Return the input tokens and the output tokens of a batch of requests."""
        start = batch_number * DRAWS_PER_BATCH
        numbers = range(start, start + DRAWS_PER_BATCH)
        message_tokens = self._prompts.sample_lengths("input", numbers)
        input_tokens = array("q", [self._system_tokens + tokens for tokens in message_tokens])
        return input_tokens, array("q", self._prompts.sample_lengths("output", numbers))


class PrefixSizer:
    """Sizes of requests that share a beginning: a system prompt, a prefix, or their conversation.

    Of a single request only the shared prefix is hashed, because no other request has the rest.
    """

    def __init__(self, spec: Synthetic, prompts: SyntheticPrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block
        self._system_tokens = spec.system_tokens

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index.

        The indexes of a conversation's requests follow each other, one per turn.
        """
        prompts = self._prompts
        input_tokens = prompts.requested_input_tokens(request_index)
        output_tokens = prompts.requested_output_tokens(request_index)
        if not self._tokens_per_block:
            return RequestSize(input_tokens, output_tokens)

        conversation = request_index // prompts.turns
        blocks = self._hash_shared_blocks(conversation, input_tokens)
        return RequestSize(input_tokens, output_tokens, blocks)

    def _hash_shared_blocks(self, conversation: int, input_tokens: int) -> list[int]:
        """Return the hashes of the blocks of a prompt that other requests may share.

        A prompt consists of the system prompt, which all prompts share, a prefix, which the prompts
        of a group share, and the conversation so far. A block belongs to the part that its last
        token is in. With 32 tokens per block and a system prompt of 80 tokens, blocks 0 and 1
        belong to the system prompt, and block 2 (tokens 64 to 95) to the prefix.

        The hash of a block is a number. The system prompt, each group and each conversation have a
        range of numbers for themselves. The block at position 5 of a prompt has the number 5 of the
        range of its part. So two blocks have the same hash only if the prompts are equal up to the
        end of the block.

        Args:
            conversation: The number of the conversation. A single request is one with one turn.
            input_tokens: The length of the prompt.
        """
        prompts = self._prompts
        tokens_per_block = self._tokens_per_block
        prefix_end_tokens = self._system_tokens + prompts.shared_tokens(conversation)

        # The positions (in blocks) at which the three parts end. Only full blocks are shared.
        prompt_end = input_tokens // tokens_per_block
        system_end = min(self._system_tokens // tokens_per_block, prompt_end)
        prefix_end = min(prefix_end_tokens // tokens_per_block, prompt_end)

        hashes = list(range(system_end))  # the range of the system prompt starts with 0
        has_prefix = prefix_end > system_end
        if has_prefix:
            group = prompts.prefix_group(conversation)
            group_start = GROUPS_START + group * GROUP_RANGE
            hashes += range(group_start + system_end, group_start + prefix_end)

        # The rest of a single request is in no other prompt, so it is not hashed.
        is_multi_turn = prompts.turns > 1
        if is_multi_turn:
            conversation_start = CONVERSATIONS_START + conversation * CONVERSATION_RANGE
            hashes += range(conversation_start + prefix_end, conversation_start + prompt_end)

        return hashes


class ChunkSizer:
    """Sizes of prompts that begin with retrieved chunks, as in retrieval-augmented generation.

    Two prompts share a block if they have the same chunks up to the end of the block.
    """

    def __init__(self, spec: Synthetic, prompts: SyntheticPrompts, tokens_per_block: int) -> None:
        assert spec.chunks is not None
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block
        self._system_tokens = spec.system_tokens
        self._chunk_tokens = spec.chunks.tokens

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index."""
        prompts = self._prompts
        return RequestSize(
            prompts.requested_input_tokens(request_index),
            prompts.requested_output_tokens(request_index),
            self._hash_shared_blocks(prompts.chunks_of(request_index)),
        )

    def _hash_shared_blocks(self, chunks: tuple[int, ...]) -> list[Hashable]:
        """Return the hashes of the blocks of a prompt that other requests may share.

        The prompt is the system prompt, the chunks (retrieved passages of equal length), and a rest
        such as the question. The rest differs between requests, so its blocks are left out.

        A cache may reuse a block only if the prompts are equal up to its end. So the hash of a
        block is a tuple of its position and of the chunks that begin before its end. For example,
        with 32 tokens per block, no system prompt and the chunks 7 and 3 of 40 tokens each, block 1
        has the tokens 32 to 63. Chunk 3 begins at token 40, so the hash is (1, 7, 3).

        Args:
            chunks: The numbers of the chunks that the prompt contains, in order.
        """
        shared_tokens = self._system_tokens + self._chunk_tokens * len(chunks)
        shared_block_count = shared_tokens // self._tokens_per_block

        hashes: list[Hashable] = []
        for position in range(shared_block_count):
            block_end = (position + 1) * self._tokens_per_block  # in tokens of the prompt
            chunk_tokens_before_end = max(0, block_end - self._system_tokens)
            # Rounded up, because the last of these chunks may end in a later block.
            begun_chunk_count = math.ceil(chunk_tokens_before_end / self._chunk_tokens)
            begun_chunks = chunks[:begun_chunk_count]
            hashes.append((position, *begun_chunks))

        return hashes


class TaskSizer:
    """Sizes of the requests of tasks.

    The prompt of a request consists of segments. Each has an owner, which decides its text: the
    instructions of a step are the same in all tasks, the output of an earlier request exists once,
    and a sequence of documents may occur in several requests.
    """

    def __init__(self, prompts: TaskPrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block
        self._range_start_of_step = {
            step: GROUPS_START + step_number * GROUP_RANGE
            for step_number, step in enumerate(prompts.graphs.task.steps)
        }

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index.

        A request for embeddings or a ranking has the lengths of its sequences, and no blocks. Any
        other request has a prompt, whose blocks other requests may share.
        """
        sequence_lengths = self._prompts.sequence_lengths(request_index)
        if sequence_lengths:
            return _size_of_sequences(sequence_lengths)

        segments = self._prompts.prompt_segments(request_index)
        return RequestSize(
            input_tokens=sum([segment.tokens for segment in segments]),
            output_tokens=self._prompts.requested_output_tokens(request_index),
            blocks=self._hash_blocks(segments) if self._tokens_per_block else (),
        )

    def _hash_blocks(self, segments: Sequence[PromptSegment]) -> list[Hashable]:
        """Return the hashes of the full blocks of a prompt.

        A segment is a part of the prompt with one owner, which decides its text. A block belongs to
        the segment that its last token is in. With 32 tokens per block and segments of 40 and 30
        tokens, block 0 belongs to the first segment, and block 1 (tokens 32 to 63) to the second.
        """
        hashes: list[Hashable] = []
        segment_end = 0  # in tokens of the prompt
        for segment in segments:
            segment_end += segment.tokens
            first_position = len(hashes)
            end_position = segment_end // self._tokens_per_block
            hashes += self._hash_blocks_of_owner(segment.owner, range(first_position, end_position))

        return hashes

    def _hash_blocks_of_owner(self, owner: SegmentOwner, positions: range) -> Sequence[Hashable]:
        """Return the hashes of consecutive blocks of a prompt that have the same owner.

        The hash of a block has to differ between owners and between positions. There are three
        kinds of owners, which decide the text of a part of the prompt:

        - A tuple: a sequence of documents. The hash is a tuple of the owner and the position.
        - A name: a step of the task, whose instructions are the same in all tasks.
        - An integer: the index of a request whose output is a part of this prompt.

        For the last two, the hash is a number. Each owner has a range of numbers for itself, and
        the block at position 5 has the number 5 of this range.

        Args:
            owner: The owner of the blocks.
            positions: The positions of the blocks in the prompt.
        """
        match owner:
            case tuple():
                return [(owner, position) for position in positions]
            case str() as step_name:
                range_start = self._range_start_of_step[step_name]
            case int() as request_index:
                range_start = CONVERSATIONS_START + request_index * CONVERSATION_RANGE

        return range(range_start + positions.start, range_start + positions.stop)


class TraceSizer:
    """Sizes of the requests of a trace.

    A hash in the trace covers the prompt up to its end. So a block that ends inside the hashed part
    is identified by that hash and the position of the block.
    """

    def __init__(self, prompts: TracePrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index."""
        input_tokens = self._prompts.requested_input_tokens(request_index)
        output_tokens = max(1, self._prompts.requested_output_tokens(request_index))
        if not self._tokens_per_block:
            return RequestSize(input_tokens, output_tokens)
        blocks = self._hash_shared_blocks(request_index, input_tokens)
        return RequestSize(input_tokens, output_tokens, blocks)

    def _hash_shared_blocks(self, request_index: int, input_tokens: int) -> list[Hashable]:
        """Return the hashes of the blocks of a prompt that other requests may share.

        A trace is a recording of requests without their texts. It describes a prompt as a list of
        blocks (trace blocks) with hashes. The simulated server divides the same prompt into its own
        blocks (server blocks), which may be smaller.

        The hash of a server block is a tuple of three parts: the cycle, the hash of the trace block
        that its last token is in, and its position in the prompt. A run may repeat the trace in
        cycles, which share no blocks. For example, if trace blocks have 512 tokens and server
        blocks 64, the first trace block, with the hash 99, contains server blocks 0 to 7. In cycle
        0 their hashes are (0, 99, 0) to (0, 99, 7).
        """
        trace = self._prompts.trace
        trace_request = self._prompts.locate(request_index)
        cycle = trace_request.cycle
        hashes: list[Hashable] = []

        trace_block_end = 0  # in tokens of the prompt
        for trace_hash in trace.block_hashes(trace_request.row):
            trace_block_end += trace.tokens_by_hash[trace_hash]

            # The last trace block may reach beyond the end of the prompt.
            end_in_prompt = min(trace_block_end, input_tokens)

            # The server blocks that end in this trace block come after those with a hash.
            start_position = len(hashes)
            stop_position = end_in_prompt // self._tokens_per_block
            server_blocks = range(start_position, stop_position)
            hashes += [(cycle, trace_hash, position) for position in server_blocks]

        return hashes


class MixSizer:
    """Sizes of the requests of several classes, of which no two share a block."""

    def __init__(self, prompts: MixPrompts, sizer_of_class: Sequence[RequestSizer]) -> None:
        self._prompts = prompts
        self._sizer_of_class = sizer_of_class

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index."""
        class_index, index_in_class = self._prompts.class_and_id(request_index)
        size = self._sizer_of_class[class_index](index_in_class)
        if not size.blocks:
            return size
        blocks = [(class_index, block) for block in size.blocks]
        return RequestSize(size.input_tokens, size.output_tokens, blocks)


class _RowSize(Struct, frozen=True):
    """The prompt of one row of a file."""

    input_tokens: int
    blocks: Sequence[Hashable]


class FileSizer:
    """Sizes of the user's own requests.

    The text of each row is counted once, and repeated rows have the same blocks.
    """

    def __init__(self, prompts: FilePrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block
        self._size_of_row: dict[int, _RowSize] = {}

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index. After the last row come the first."""
        row = request_index % len(self._prompts.rows)
        size = self._size_of_row.get(row)
        if size is None:
            size = self._measure_row(row)
            self._size_of_row[row] = size
        output_tokens = self._prompts.requested_output_tokens(request_index) or NATURAL_TOKENS
        return RequestSize(size.input_tokens, output_tokens, size.blocks)

    def _measure_row(self, row: int) -> _RowSize:
        """Count the tokens of a row. Its blocks are shared only with its repetitions."""
        input_tokens = self._prompts.input_tokens(row) or 1
        if not self._tokens_per_block:
            return _RowSize(input_tokens, ())
        block_count = input_tokens // self._tokens_per_block
        first_hash = row * CONVERSATION_RANGE
        return _RowSize(input_tokens, range(first_hash, first_hash + block_count))


class TrajectorySizer:
    """Sizes of the requests of recorded sessions.

    The turns of a session share the conversation so far. Which sessions share a beginning depends
    on their salts.
    """

    def __init__(self, prompts: TrajectoryPrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index."""
        parts = self._prompts.prompt_parts(request_index)
        return RequestSize(
            input_tokens=max(1, sum(part.tokens for part in parts)),
            output_tokens=self._prompts.requested_output_tokens(request_index) or NATURAL_TOKENS,
            blocks=self._hash_blocks(parts) if self._tokens_per_block else (),
        )

    def _hash_blocks(self, parts: Sequence[PromptPart]) -> list[Hashable]:
        """Return the hashes of the full blocks of a prompt.

        A block belongs to the part that its last token is in. Its hash is the owner of that part
        together with the position of the block.
        """
        hashes: list[Hashable] = []
        part_end = 0  # in tokens of the prompt
        for part in parts:
            part_end += part.tokens
            end_position = part_end // self._tokens_per_block
            hashes += [(part.owner, position) for position in range(len(hashes), end_position)]
        return hashes
