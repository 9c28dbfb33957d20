"""How long simulated requests are, and which beginnings they share, without making their texts. Pure.

A block of a prompt is shared by all prompts that are equal up to its end, so one number stands for it: made of who owns
the block's last token (everybody, a prefix group, a conversation) and its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from loadgen.requests.prompts import FilePrompts, SyntheticPrompts

if TYPE_CHECKING:
    from loadgen.requests.trace_prompts import TracePrompts

Sizes = Callable[[int], tuple[int, int, Sequence[Hashable]]]
"""Of a request's number: prompt tokens, output tokens, and the hashes of its prompt's shareable blocks."""

NATURAL_TOKENS = 256  # length of an answer for which none was asked, as in the embedded endpoint
BLOCK = 1024  # requests whose lengths are drawn together
BLOCKS = 1024  # of these are kept, the oldest go first: lanes of a closed loop come out of order
_GROUP, _CONVERSATION = 1 << 40, 1 << 60


def of_workload(asked: Any, prompts: SyntheticPrompts, per_block: int) -> Sizes:
    """Sizes of synthetic requests. `per_block` 0: no block is shared.

    Of a prompt that stands alone only the part that it shares is hashed: nobody will ask for the rest again.
    """
    shared = asked.system_tokens + asked.shared_prefix_tokens
    if per_block and (prompts.turns > 1 or shared):
        return _sharing(asked, prompts, per_block)
    if prompts.turns > 1:
        return lambda number: (prompts.asked_input(number), prompts.asked_output(number), ())
    if asked.input_tokens.tag == asked.output_tokens.tag == "fixed":
        into, out = prompts.asked_input(0), prompts.asked_output(0)
        return lambda number: (into, out, ())
    return _in_blocks(prompts)


def _in_blocks(prompts: SyntheticPrompts) -> Sizes:
    """Requests that share nothing: lengths are drawn for many numbers at a time, which come more or less in order."""
    blocks: dict[int, tuple[array[int], array[int]]] = {}

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        place, at = divmod(number, BLOCK)
        block = blocks.get(place)
        if block is None:
            if len(blocks) >= BLOCKS:
                del blocks[next(iter(blocks))]
            into, out = prompts.asked(range(place * BLOCK, (place + 1) * BLOCK))
            block = blocks[place] = array("q", into), array("q", out)
        return block[0][at], block[1][at], ()

    return sizes


def _sharing(asked: Any, prompts: SyntheticPrompts, per_block: int) -> Sizes:
    system = asked.system_tokens
    turns = prompts.turns
    asked_input, asked_output, group_of = prompts.asked_input, prompts.asked_output, prompts.group_of
    first = system // per_block  # blocks that everybody shares
    prefixed = (system + asked.shared_prefix_tokens) // per_block  # and those of a group, if the prompt is long enough

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        tokens = asked_input(number)
        full = tokens // per_block
        conversation = number // turns
        upto = min(prefixed, full)
        blocks = list(range(min(first, full)))
        if upto > first:
            base = _GROUP * (1 + group_of(conversation))
            blocks += range(base + first, base + upto)
        if turns > 1 and full > upto:
            base = _CONVERSATION + (conversation << 24)
            blocks += range(base + upto, base + full)
        return tokens, asked_output(number), blocks

    return sizes


def of_trace(prompts: TracePrompts, per_block: int) -> Sizes:
    """Sizes of a trace's requests. A hash of the trace stands for everything up to its end, so every block that ends
    within it is known by the hash and the block's place."""
    trace = prompts.trace

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        cycle, row = divmod(number, len(trace))
        tokens = prompts.asked_input(number)
        blocks: list[Hashable] = []
        end = 0
        for hashed in trace.blocks(row) if per_block else ():
            end = min(end + trace.tokens_of[hashed], tokens)
            blocks += [(cycle, hashed, place) for place in range(len(blocks), end // per_block)]
        return tokens, max(1, prompts.asked_output(number)), blocks

    return sizes


def of_file(prompts: FilePrompts, per_block: int) -> Sizes:
    """Sizes of the user's own requests: texts are counted once per row, and rows that come again are known."""
    memo: dict[int, tuple[int, list[int]]] = {}

    def sizes(number: int) -> tuple[int, int, Sequence[Hashable]]:
        request = prompts[number]
        row = number % len(prompts.rows)
        if row not in memo:
            tokens = prompts.input_tokens(number) or 1
            memo[row] = tokens, list(range(row << 24, (row << 24) + tokens // per_block)) if per_block else []
        tokens, blocks = memo[row]
        return tokens, request.max_tokens or NATURAL_TOKENS, blocks

    return sizes
