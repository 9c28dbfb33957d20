"""Decides why token counts differ: the responses differ, or the way to count them. Pure.

If the responses of one side lasted longer by the ratio of the counts, they were longer. If they
lasted equally long, the same tokens were counted in another way, such as with another tokenizer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import DefinedLatency, LoadgenRun
from loadgen.interop.tool_definitions import LatencyDefinition

SAME_TOKENS_WITHIN = 0.001
"""Token counts per request that differ by less than this share count as equal."""

_GENERATION = LatencyDefinition("first_token_ns", "end_ns")
"""The time in which a response is generated after its first token."""


class TokenRatio(NamedTuple):
    """The output tokens per request of another tool, divided by the tokens of loadgen.

    The ratio is the product of both fields, of which at least one is 1.

    Attributes:
        counting: How many tokens the other tool counts where loadgen counts one token.
        length: How many times as long the responses to the other tool were.
    """

    counting: float = 1.0
    length: float = 1.0


def find_token_ratio(loadgen_run: LoadgenRun, other_result: OtherResult) -> TokenRatio:
    """Return whether the responses of two runs had different lengths, or were counted differently.

    Example: the other tool counts 200 tokens per response, and loadgen counts 100. If the responses
    to the other tool also took about twice as long, they were longer. If they took about the same
    time, the tokens were counted in another way. Unknown and nearly equal counts have a ratio of 1.
    """
    loadgen_tokens = loadgen_run.compute_mean_tokens("output_tokens")
    other_tokens = other_result.output_tokens_per_request
    if not loadgen_tokens or not other_tokens:
        return TokenRatio()

    ratio = other_tokens / loadgen_tokens
    if abs(ratio - 1) < SAME_TOKENS_WITHIN:
        return TokenRatio()

    duration_ratio = _find_duration_ratio(loadgen_run, other_result)
    if duration_ratio is None:
        return TokenRatio(counting=ratio)

    # In logarithms, twice as long and half as long are equally far from equal.
    distance_from_one = abs(math.log(duration_ratio))
    distance_from_token_ratio = abs(math.log(duration_ratio / ratio))
    has_other_length = distance_from_token_ratio < distance_from_one
    return TokenRatio(length=ratio) if has_other_length else TokenRatio(counting=ratio)


def _find_duration_ratio(loadgen_run: LoadgenRun, other_result: OtherResult) -> float | None:
    """Return how many times as long a response took after its first token in the other run.

    If it took 4 s in the run of the other tool and 2 s in loadgen's run, the ratio is 2. Return
    None if one of the times is unknown or not positive.
    """
    loadgen_generation_ms = loadgen_run.compute_statistic(DefinedLatency(_GENERATION), "mean")
    other_e2e_ms = other_result.metrics.get("e2e_ms.mean")
    other_ttft_ms = other_result.metrics.get("ttft_ms.mean")
    if loadgen_generation_ms is None or other_e2e_ms is None or other_ttft_ms is None:
        return None

    other_generation_ms = other_e2e_ms - other_ttft_ms
    if other_generation_ms <= 0 or loadgen_generation_ms <= 0:
        return None
    return other_generation_ms / loadgen_generation_ms
