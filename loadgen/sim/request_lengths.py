"""Lengths of simulated requests, and the prompt prefixes that they share, without generating their texts. Pure.

A block of a prompt is shared by all prompts that are equal up to the end of that block. So one number identifies it.
The number encodes the block's position and who owns the block's last token: everybody, a prefix group, or one
conversation.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from loadgen.core.requests.file_prompts import FilePrompts
from loadgen.core.requests.synthetic_prompts import SyntheticPrompts
from loadgen.sim.server.request_parser import NATURAL_TOKENS

if TYPE_CHECKING:
    from loadgen.core.requests.mix import MixPrompts
    from loadgen.core.requests.task_prompts import TaskPrompts
    from loadgen.core.requests.trace_prompts import TracePrompts

Sizes = Callable[[int], tuple[int, int, Sequence[Hashable]]]
"""Maps a request's number to prompt tokens, output tokens, and the hashes of its prompt's shareable blocks.

A request for values (embeddings, rerank) has no output tokens; in the place of the hashes stand the tokens of each
sequence that is prefilled for it.
"""

BLOCK = 1024  # number of requests whose lengths are drawn together
BLOCKS = 1024  # blocks in memory; lanes of a closed loop ask out of order
_GROUP, _CONVERSATION = 1 << 40, 1 << 60


def of_workload(spec: Any, prompts: SyntheticPrompts, per_block: int) -> Sizes:
    """Lengths of synthetic requests. With `per_block` 0 no block is shared.

    For a single request only the shared part of the prompt is hashed: no other request has the rest.
    """
    if per_block and getattr(spec, "chunks", None) is not None:
        return _with_chunks(spec, prompts, per_block)
    shared = spec.system_tokens or spec.shared_prefix_tokens or getattr(spec, "cache", None)
    if prompts.turns > 1 or (per_block and shared):
        return SharedPrefixes(spec, prompts, per_block)
    if spec.input_tokens.tag == spec.output_tokens.tag == "fixed":
        return OneLength(prompts.requested_input_tokens(0), prompts.requested_output_tokens(0))
    return Drawn(prompts, spec.system_tokens)


def of_values(prompts: SyntheticPrompts | FilePrompts) -> Sizes:
    """Lengths of texts to embed, or of documents to rank."""

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        sequences = prompts.sequence_lengths(number)
        return sum(sequences), 0, sequences

    return sizes


@runtime_checkable
class DrawnAtOnce(Protocol):
    """Lengths of requests that share nothing, of many at once."""

    def __call__(self, number: int) -> tuple[int, int, Sequence[Hashable]]: ...
    def of_many(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Prompt and output tokens of many requests, in ascending order of their numbers."""


class OneLength:
    """All requests have the same lengths."""

    def __init__(self, input_tokens: int, output_tokens: int) -> None:
        self._sizes: tuple[int, int, Sequence[Hashable]] = input_tokens, output_tokens, ()

    def __call__(self, number: int) -> tuple[int, int, Sequence[Hashable]]:
        return self._sizes

    def of_many(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `DrawnAtOnce.of_many`."""
        input_tokens, output_tokens, _ = self._sizes
        return np.broadcast_to(np.int64(input_tokens), len(numbers)), np.broadcast_to(
            np.int64(output_tokens), len(numbers)
        )


class Drawn:
    """Lengths of requests that share nothing, drawn for many numbers at a time: requests come roughly in order."""

    def __init__(self, prompts: SyntheticPrompts, system_tokens: int) -> None:
        self._drawn, self._system_tokens = prompts.sample_lengths, system_tokens
        self._block = functools.lru_cache(maxsize=BLOCKS)(self._draw)

    def _draw(self, number: int) -> tuple[array[int], array[int]]:
        numbers = range(number * BLOCK, (number + 1) * BLOCK)
        input_tokens = array(
            "q", [self._system_tokens + tokens for tokens in self._drawn("input", numbers)]
        )
        return input_tokens, array("q", self._drawn("output", numbers))

    def __call__(self, number: int) -> tuple[int, int, Sequence[Hashable]]:
        block_number, index = divmod(number, BLOCK)
        input_tokens, output_tokens = self._block(block_number)
        return input_tokens[index], output_tokens[index], ()

    def of_many(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `DrawnAtOnce.of_many`."""
        input_tokens, output_tokens = np.empty_like(numbers), np.empty_like(numbers)
        blocks, places = np.divmod(numbers, BLOCK)
        bounds = np.flatnonzero(np.diff(blocks)) + 1
        for start, end in itertools.pairwise([0, *bounds.tolist(), len(numbers)]):
            if start < end:
                drawn = self._draw(int(blocks[start]))
                for column, values in zip((input_tokens, output_tokens), drawn, strict=True):
                    column[start:end] = np.frombuffer(values, np.int64)[places[start:end]]
        return input_tokens, output_tokens


class SharedPrefixes:
    """Lengths of requests that share what they begin with: a system prompt, a prefix, their conversation."""

    def __init__(self, spec: Any, prompts: SyntheticPrompts, per_block: int) -> None:
        self._system, self._prompts, self._per_block = spec.system_tokens, prompts, per_block
        self._system_blocks = (
            spec.system_tokens // per_block if per_block else 0
        )  # that all prompts share
        self._is_one_group = spec.prefixes == 1

    def __call__(self, number: int) -> tuple[int, int, Sequence[Hashable]]:
        prompts = self._prompts
        tokens, output_tokens = (
            prompts.requested_input_tokens(number),
            prompts.requested_output_tokens(number),
        )
        if not self._per_block:
            return tokens, output_tokens, ()
        conversation = number // prompts.turns
        full_blocks = tokens // self._per_block
        # of a group
        shared_blocks = min(
            (self._system + prompts.shared_tokens(conversation)) // self._per_block, full_blocks
        )
        blocks = list(range(min(self._system_blocks, full_blocks)))
        if shared_blocks > self._system_blocks:
            base = _GROUP * (1 + prompts.prefix_group(conversation))
            blocks += range(base + self._system_blocks, base + shared_blocks)
        if prompts.turns > 1 and full_blocks > shared_blocks:
            base = _CONVERSATION + (conversation << 24)
            blocks += range(base + shared_blocks, base + full_blocks)
        return tokens, output_tokens, blocks


def _with_chunks(spec: Any, prompts: SyntheticPrompts, per_block: int) -> Sizes:
    """Lengths of prompts that begin with retrieved chunks: two share a block if they have the same chunks up to it."""
    system, each = spec.system_tokens, spec.chunks.tokens

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        chunks = prompts.chunks_of(number)
        blocks: list[Hashable] = []
        for block in range((system + each * len(chunks)) // per_block):
            chunks_in_it = max(0, -(-((block + 1) * per_block - system) // each))
            blocks.append((block, *chunks[:chunks_in_it]))
        return (
            prompts.requested_input_tokens(number),
            prompts.requested_output_tokens(number),
            blocks,
        )

    return sizes


def of_tasks(prompts: TaskPrompts, per_block: int) -> Sizes:
    """Lengths of the requests of tasks. A block belongs to whoever brought its last token: a step, or a request.

    Of documents it belongs to these and all before them, whichever task they are in.
    """
    first_block = {
        step: _GROUP * (1 + index) for index, step in enumerate(prompts.graphs.task.steps)
    }

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        if sequences := prompts.sequence_lengths(number):
            return sum(sequences), 0, sequences
        blocks: list[Hashable] = []
        end = 0
        for owner, tokens in prompts.prompt_segments(number):
            end += tokens
            if not per_block:
                continue
            if isinstance(owner, tuple):
                blocks += [(owner, place) for place in range(len(blocks), end // per_block)]
            else:
                first = (
                    first_block[owner] if isinstance(owner, str) else _CONVERSATION + (owner << 24)
                )
                blocks += range(first + len(blocks), first + end // per_block)
        return end, prompts.requested_output_tokens(number), blocks

    return sizes


def of_trace(prompts: TracePrompts, per_block: int) -> Sizes:
    """Lengths of a trace's requests.

    A hash in the trace covers the prompt up to its end. So a block that ends inside the hashed part is identified by
    that hash and the block's position.
    """
    trace = prompts.trace

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        cycle, row, _, _ = prompts.locate(number)
        tokens = prompts.requested_input_tokens(number)
        blocks: list[Hashable] = []
        end = 0
        for trace_hash in trace.blocks(row) if per_block else ():
            end = min(end + trace.tokens_of[trace_hash], tokens)
            blocks += [
                (cycle, trace_hash, position) for position in range(len(blocks), end // per_block)
            ]
        return tokens, max(1, prompts.requested_output_tokens(number)), blocks

    return sizes


def of_mix(prompts: MixPrompts, parts: Sequence[Sizes]) -> Sizes:
    """Lengths of the requests of several classes, of which no two share a block. `parts`: those of each class."""

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        index, own_number = prompts.class_and_number(number)
        input_tokens, output_tokens, blocks = parts[index](own_number)
        if not output_tokens:
            return input_tokens, 0, blocks
        return input_tokens, output_tokens, [(index, block) for block in blocks]

    return sizes


def of_file(prompts: FilePrompts, per_block: int) -> Sizes:
    """Lengths of the user's own requests. Each row's text is counted once; repeated rows have the same blocks."""
    memo: dict[int, tuple[int, list[int]]] = {}

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        request = prompts[number]
        row = number % len(prompts.rows)
        if row not in memo:
            tokens = prompts.input_tokens(number) or 1
            memo[row] = (
                tokens,
                list(range(row << 24, (row << 24) + tokens // per_block)) if per_block else [],
            )
        tokens, blocks = memo[row]
        return tokens, request.max_tokens or NATURAL_TOKENS, blocks

    return sizes


def sizes_of(spec: Any, requests: Any, per_block: int, settings: Any) -> Sizes:
    """The lengths of requests, computed without building their text if possible."""
    if hasattr(spec, "classes"):
        classes = zip(spec.classes.values(), requests.parts, strict=True)
        return of_mix(
            requests, [sizes_of(one.requests, part, per_block, settings) for one, part in classes]
        )
    if hasattr(spec, "steps"):
        return of_tasks(requests, per_block)
    if settings.values:
        return of_values(requests)
    if hasattr(spec, "trace"):
        return of_trace(requests, per_block)
    if hasattr(spec, "path"):
        return of_file(requests, per_block)
    return of_workload(spec, requests, per_block)
