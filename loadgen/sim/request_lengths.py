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
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from loadgen.core.requests.file_prompts import FilePrompts
from loadgen.core.requests.synthetic_prompts import SyntheticPrompts
from loadgen.sim.server.request_parser import NATURAL_TOKENS

if TYPE_CHECKING:
    from loadgen.core.requests.mix import MixPrompts
    from loadgen.core.requests.task_prompts import SegmentOwner, TaskPrompts
    from loadgen.core.requests.trace_prompts import TracePrompts
    from loadgen.core.workload.request_kinds import Synthetic

DRAWS_PER_BATCH = 1024  # requests whose lengths are drawn together
MAX_BATCHES = 1024  # in memory, because virtual users of a closed loop ask out of order

# The numbers that identify blocks are `range start + position in the prompt`. Each owner of blocks
# has a range for itself: first the blocks of all requests, then one range per prefix group (or step
# of a task), then one range per conversation (or request of a task).
POSITION_BITS = 24  # a prompt has fewer than 2^24 blocks
GROUP_STRIDE = 1 << 40  # distance between the ranges of two prefix groups
CONVERSATION_BASE = 1 << 60  # start of the range of the first conversation


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
    spec: Any, prompts: Any, tokens_per_block: int, *, is_non_generative: bool = False
) -> RequestSizer:
    """Return the sizer for the requests of a workload.

    A sizer computes the lengths of a request and the blocks of its prompt without building its
    text, if the workload allows it. The kind of requests is recognized by its fields, as in
    `build_prompts`, because a test for its class would import pydantic.

    Args:
        spec: The field `requests` of the workload.
        prompts: The requests that `build_prompts` has built from it.
        tokens_per_block: The block size of the prefix cache, or 0 if prompts share nothing.
        is_non_generative: Whether the API returns values (embeddings, rerank) instead of tokens.
    """
    if hasattr(spec, "classes"):
        sizer_of_class = [
            create_request_sizer(
                request_class.requests,
                class_prompts,
                tokens_per_block,
                is_non_generative=is_non_generative,
            )
            for request_class, class_prompts in zip(
                spec.classes.values(), prompts.class_prompts, strict=True
            )
        ]
        return MixSizer(prompts, sizer_of_class)
    if hasattr(spec, "steps"):
        return TaskSizer(prompts, tokens_per_block)
    if is_non_generative:
        return SequencesSizer(prompts)
    if hasattr(spec, "trace"):
        return TraceSizer(prompts, tokens_per_block)
    if hasattr(spec, "path"):
        return FileSizer(prompts, tokens_per_block)
    return create_synthetic_sizer(spec, prompts, tokens_per_block)


def create_synthetic_sizer(
    spec: Synthetic, prompts: SyntheticPrompts, tokens_per_block: int
) -> RequestSizer:
    """Return the cheapest sizer that computes the lengths and shared blocks of synthetic requests.

    A sizer is called once per request of a simulation, so its cost matters. Blocks are needed only
    if there is a prefix cache (`tokens_per_block` above 0) and if prompts share something.
    """
    has_cache = tokens_per_block > 0
    has_shared_prefix = spec.system_tokens or spec.shared_prefix_tokens or spec.cache
    has_turns = prompts.turns > 1
    if has_cache and spec.chunks is not None:
        return ChunkSizer(spec, prompts, tokens_per_block)
    if has_turns or (has_cache and has_shared_prefix):
        return PrefixSizer(spec, prompts, tokens_per_block)
    if spec.input_tokens.tag == spec.output_tokens.tag == "fixed":
        return FixedSizer(prompts.requested_input_tokens(0), prompts.requested_output_tokens(0))
    return SampledSizer(prompts, spec.system_tokens)


class SequencesSizer:
    """Sizes of non-generative requests: of texts to embed, or of documents to rank."""

    def __init__(self, prompts: SyntheticPrompts | FilePrompts) -> None:
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
        return RequestSize(input_tokens, output_tokens, self._blocks(conversation, input_tokens))

    def _blocks(self, conversation: int, input_tokens: int) -> list[int]:
        """Return the hashes of the blocks of a prompt that other requests may share.

        A prompt begins with the system prompt, which all prompts share. The prefix of its group
        follows, then the conversation so far. A block belongs to the owner of its last token: all
        requests, the prefix group or the conversation. Its hash is the start of the owner's range
        of numbers plus the position of the block in the prompt.
        """
        prompts = self._prompts
        per_block = self._tokens_per_block
        prefix_tokens = self._system_tokens + prompts.shared_tokens(conversation)
        # The positions at which the blocks of each owner end.
        full_blocks = input_tokens // per_block
        system_end = min(self._system_tokens // per_block, full_blocks)
        prefix_end = min(prefix_tokens // per_block, full_blocks)

        blocks = list(range(system_end))
        if prefix_end > system_end:
            range_start = GROUP_STRIDE * (1 + prompts.prefix_group(conversation))
            blocks += range(range_start + system_end, range_start + prefix_end)
        if prompts.turns > 1 and full_blocks > prefix_end:
            range_start = CONVERSATION_BASE + (conversation << POSITION_BITS)
            blocks += range(range_start + prefix_end, range_start + full_blocks)
        return blocks


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
        """Return the size of the request at this index.

        The prompt is the system prompt, the chunks, and a rest such as the question. The rest
        differs between requests, so its blocks are left out. The hash of a block is its position
        together with all chunks that begin before its end.
        """
        prompts = self._prompts
        chunks = prompts.chunks_of(request_index)
        shared_tokens = self._system_tokens + self._chunk_tokens * len(chunks)
        blocks: list[Hashable] = []
        for position in range(shared_tokens // self._tokens_per_block):
            end_of_block = (position + 1) * self._tokens_per_block
            end_in_chunks = end_of_block - self._system_tokens
            if end_in_chunks > 0:
                chunk_count = math.ceil(end_in_chunks / self._chunk_tokens)
            else:
                chunk_count = 0  # the block is a part of the system prompt
            blocks.append((position, *chunks[:chunk_count]))
        return RequestSize(
            prompts.requested_input_tokens(request_index),
            prompts.requested_output_tokens(request_index),
            blocks,
        )


class TaskSizer:
    """Sizes of the requests of tasks.

    A block depends on the segment of its last token. That is the instructions of a step, which are
    the same in all tasks, the output of a request, or a sequence of documents.
    """

    def __init__(self, prompts: TaskPrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block
        self._range_start_of_step = {
            step: GROUP_STRIDE * (1 + index) for index, step in enumerate(prompts.graphs.task.steps)
        }

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index.

        The prompt consists of segments, such as the instructions of a step and the results of
        earlier requests. A block belongs to the segment of its last token, so the segment that
        completes a block identifies it.
        """
        sequence_lengths = self._prompts.sequence_lengths(request_index)
        is_non_generative = bool(sequence_lengths)
        if is_non_generative:
            return _size_of_sequences(sequence_lengths)
        blocks: list[Hashable] = []
        input_tokens = 0
        for owner, segment_tokens in self._prompts.prompt_segments(request_index):
            input_tokens += segment_tokens
            if not self._tokens_per_block:
                continue
            completed_positions = range(len(blocks), input_tokens // self._tokens_per_block)
            if completed_positions:
                blocks += self._block_hashes(owner, completed_positions)
        return RequestSize(
            input_tokens, self._prompts.requested_output_tokens(request_index), blocks
        )

    def _block_hashes(self, owner: SegmentOwner, positions: range) -> Sequence[Hashable]:
        """Return the hashes of blocks at these positions of a prompt.

        Args:
            owner: What the tokens of the blocks depend on: the name of a step, the index of a
                request, or a tuple that identifies a sequence of documents.
            positions: The positions of the blocks in the prompt.
        """
        if isinstance(owner, tuple):
            return [(owner, position) for position in positions]
        if isinstance(owner, str):
            range_start = self._range_start_of_step[owner]
        else:
            range_start = CONVERSATION_BASE + (owner << POSITION_BITS)
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
        return RequestSize(input_tokens, output_tokens, self._blocks(request_index, input_tokens))

    def _blocks(self, request_index: int, input_tokens: int) -> list[Hashable]:
        """Return the hashes of the blocks of a prompt that other requests may share.

        The blocks of the trace may have another size than those of the simulated server. A block of
        the server is identified by the block of the trace in which it ends, and by its position.
        When a run repeats the trace, the requests of a new cycle share nothing with those of the
        cycle before it.
        """
        trace = self._prompts.trace
        request = self._prompts.locate(request_index)
        blocks: list[Hashable] = []
        end_of_trace_block = 0  # in tokens
        for trace_hash in trace.block_hashes(request.row):
            end_of_trace_block += trace.tokens_by_hash[trace_hash]
            covered_tokens = min(end_of_trace_block, input_tokens)
            positions = range(len(blocks), covered_tokens // self._tokens_per_block)
            blocks += [(request.cycle, trace_hash, position) for position in positions]
        return blocks


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
        first = row << POSITION_BITS
        return _RowSize(input_tokens, range(first, first + input_tokens // self._tokens_per_block))
