"""Lengths of simulated requests and the prompt prefixes that they share, without generating texts.

The key-value cache of a server consists of blocks of tokens. Two prompts share a block if they are
equal up to its end, so one hash identifies a block. Most hashes here are numbers. They encode the
position of the block in the prompt and the owner of its last token: all requests, a prefix group,
or one conversation.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from loadgen.core.requests.file_prompts import FilePrompts
from loadgen.core.requests.synthetic_prompts import SyntheticPrompts
from loadgen.sim.server.request_parser import NATURAL_TOKENS

if TYPE_CHECKING:
    from loadgen.core.requests.mix import MixPrompts
    from loadgen.core.requests.task_prompts import TaskPrompts
    from loadgen.core.requests.trace_prompts import TracePrompts

DRAWS_PER_BATCH = 1024  # requests whose lengths are drawn together
MAX_BATCHES = 1024  # in memory, because virtual users of a closed loop ask out of order
POSITION_BITS = 24  # of a block in its prompt
GROUP_STRIDE = 1 << 40  # distance between the first hashes of two prefix groups
CONVERSATION_BASE = 1 << 60  # first hash of the blocks of conversations


class RequestSize(Struct, frozen=True, gc=False):
    """The lengths of one request in tokens, and its shareable blocks.

    A request for values (embeddings, rerank) has no output tokens and no blocks. Instead it has the
    length of each sequence that is prefilled for it.
    """

    input_tokens: int
    output_tokens: int
    blocks: Sequence[Hashable] = ()  # the hashes of the prompt's full blocks that may be shared
    sequence_lengths: Sequence[int] = ()


RequestSizer = Callable[[int], RequestSize]
"""Returns the size of the request at an index of the load."""


def create_request_sizer(
    spec: Any, prompts: Any, tokens_per_block: int, *, requests_values: bool = False
) -> RequestSizer:
    """Return the sizer of a workload's requests. No text is built if the lengths need none.

    Args:
        spec: The part `requests` of the workload.
        prompts: The requests that are built from it.
        tokens_per_block: The block size of the prefix cache, or 0 if prompts share nothing.
        requests_values: Whether the API returns values (embeddings, rerank) instead of tokens.
    """
    if hasattr(spec, "classes"):
        parts = [
            create_request_sizer(
                request_class.requests, part, tokens_per_block, requests_values=requests_values
            )
            for request_class, part in zip(
                spec.classes.values(), prompts.class_prompts, strict=True
            )
        ]
        return MixSizer(prompts, parts)
    if hasattr(spec, "steps"):
        return TaskSizer(prompts, tokens_per_block)
    if requests_values:
        return ValueSizer(prompts)
    if hasattr(spec, "trace"):
        return TraceSizer(prompts, tokens_per_block)
    if hasattr(spec, "path"):
        return FileSizer(prompts, tokens_per_block)
    return create_synthetic_sizer(spec, prompts, tokens_per_block)


def create_synthetic_sizer(
    spec: Any, prompts: SyntheticPrompts, tokens_per_block: int
) -> RequestSizer:
    """Return the sizer of synthetic requests. With `tokens_per_block` 0 no block is shared.

    The cheapest sizer that knows the shared blocks is chosen, because it is called once per request
    of a simulation.
    """
    if tokens_per_block and getattr(spec, "chunks", None) is not None:
        return ChunkSizer(spec, prompts, tokens_per_block)
    has_shared_prefix = (
        spec.system_tokens or spec.shared_prefix_tokens or getattr(spec, "cache", None)
    )
    if prompts.turns > 1 or (tokens_per_block and has_shared_prefix):
        return PrefixSizer(spec, prompts, tokens_per_block)
    if spec.input_tokens.tag == spec.output_tokens.tag == "fixed":
        return FixedSizer(prompts.requested_input_tokens(0), prompts.requested_output_tokens(0))
    return DrawnSizer(prompts, spec.system_tokens)


class ValueSizer:
    """Sizes of texts to embed, or of documents to rank."""

    def __init__(self, prompts: SyntheticPrompts | FilePrompts) -> None:
        self._prompts = prompts

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index."""
        return _size_of_sequences(self._prompts.sequence_lengths(request_index))


def _size_of_sequences(lengths: Sequence[int]) -> RequestSize:
    """Return the size of a request for values with these sequences."""
    return RequestSize(sum(lengths), output_tokens=0, sequence_lengths=lengths)


class FixedSizer:
    """All requests have the same lengths and share nothing."""

    def __init__(self, input_tokens: int, output_tokens: int) -> None:
        self._size = RequestSize(input_tokens, output_tokens)

    def __call__(self, request_index: int) -> RequestSize:  # noqa: ARG002 - all have the same size
        """Return the size of the request at this index."""
        return self._size


class DrawnSizer:
    """Sizes of requests that share nothing.

    Lengths are drawn for many numbers at a time, because requests come roughly in order.
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

    Of a single request only the shared part is hashed, because no other request has the rest.
    """

    def __init__(self, spec: Any, prompts: SyntheticPrompts, tokens_per_block: int) -> None:
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
        """Return the hashes of the shareable blocks of a prompt.

        A prompt begins with the system prompt, which all prompts share. The prefix of its group
        follows, then the conversation so far. Every owner has a range of hashes of its own, in
        which the hash of a block is its position in the prompt plus the start of the range. A block
        that two owners fill belongs to the second, whose tokens make it differ.
        """
        prompts = self._prompts
        per_block = self._tokens_per_block
        full_blocks = input_tokens // per_block
        system_blocks = self._system_tokens // per_block  # shared by all prompts
        prefix_tokens = self._system_tokens + prompts.shared_tokens(conversation)
        prefix_blocks = min(prefix_tokens // per_block, full_blocks)  # shared by a prefix group
        blocks = list(range(min(system_blocks, full_blocks)))
        if prefix_blocks > system_blocks:
            base = GROUP_STRIDE * (1 + prompts.prefix_group(conversation))
            blocks += range(base + system_blocks, base + prefix_blocks)
        if prompts.turns > 1 and full_blocks > prefix_blocks:
            base = CONVERSATION_BASE + (conversation << POSITION_BITS)
            blocks += range(base + prefix_blocks, base + full_blocks)
        return blocks


class ChunkSizer:
    """Sizes of prompts that begin with retrieved chunks.

    Two prompts share a block if they have the same chunks up to the end of the block.
    """

    def __init__(self, spec: Any, prompts: SyntheticPrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block
        self._system_tokens = spec.system_tokens
        self._chunk_tokens = spec.chunks.tokens

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index.

        What follows the last chunk, such as the question, is of one request only, so its blocks are
        never shared.
        """
        prompts = self._prompts
        chunks = prompts.chunks_of(request_index)
        shared_tokens = self._system_tokens + self._chunk_tokens * len(chunks)
        blocks: list[Hashable] = []
        for position in range(shared_tokens // self._tokens_per_block):
            # The end of the block, counted from the end of the system prompt.
            end = (position + 1) * self._tokens_per_block - self._system_tokens
            chunks_up_to_end = max(0, -(-end // self._chunk_tokens))  # rounded up
            blocks.append((position, *chunks[:chunks_up_to_end]))
        return RequestSize(
            prompts.requested_input_tokens(request_index),
            prompts.requested_output_tokens(request_index),
            blocks,
        )


class TaskSizer:
    """Sizes of the requests of tasks.

    A block belongs to whoever added its last token: a step of the task graph, a request, or a
    sequence of documents. The latter is the same in all tasks.
    """

    def __init__(self, prompts: TaskPrompts, tokens_per_block: int) -> None:
        self._prompts = prompts
        self._tokens_per_block = tokens_per_block
        self._base_of_step = {
            step: GROUP_STRIDE * (1 + index) for index, step in enumerate(prompts.graphs.task.steps)
        }

    def __call__(self, request_index: int) -> RequestSize:
        """Return the size of the request at this index.

        The prompt consists of segments, each with its owner. A block that two segments fill belongs
        to the second, because its hash covers the prompt up to its end.
        """
        sequence_lengths = self._prompts.sequence_lengths(request_index)
        if sequence_lengths:
            return _size_of_sequences(sequence_lengths)
        blocks: list[Hashable] = []
        input_tokens = 0
        for owner, tokens in self._prompts.prompt_segments(request_index):
            input_tokens += tokens
            if not self._tokens_per_block:
                continue
            positions = range(len(blocks), input_tokens // self._tokens_per_block)
            if positions:
                blocks += self._hashes(owner, positions)
        return RequestSize(
            input_tokens, self._prompts.requested_output_tokens(request_index), blocks
        )

    def _hashes(self, owner: Any, positions: range) -> Sequence[Hashable]:
        """Return the hashes of the blocks of an owner at these positions.

        The owner is the name of a step, the number of a request, or a tuple that identifies a
        sequence of documents.
        """
        if isinstance(owner, tuple):
            return [(owner, position) for position in positions]
        if isinstance(owner, str):
            base = self._base_of_step[owner]
        else:
            base = CONVERSATION_BASE + (owner << POSITION_BITS)
        return range(base + positions.start, base + positions.stop)


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
        """Return the hashes of the shareable blocks of a prompt.

        The blocks of the trace may have another size than those of the simulated server. Each hash
        of the trace names the server's blocks that end within its tokens. When a run repeats the
        trace, the requests of a new cycle share nothing with those of the cycle before it.
        """
        trace = self._prompts.trace
        request = self._prompts.locate(request_index)
        blocks: list[Hashable] = []
        end = 0
        for trace_hash in trace.block_hashes(request.row):
            end = min(end + trace.tokens_by_hash[trace_hash], input_tokens)
            positions = range(len(blocks), end // self._tokens_per_block)
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
