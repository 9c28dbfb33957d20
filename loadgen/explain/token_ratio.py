"""Decides why token counts differ: the responses differ, or the way to count them. Pure.

If the responses of one side lasted longer by the ratio of the counts, they were longer. If they
lasted equally long, the same tokens were counted in another way, such as with another tokenizer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import DefinedLatency, OurRun
from loadgen.interop.tool_definitions import LatencyDefinition

SAME_TOKENS_WITHIN = 0.001
"""Token counts per request that differ by less than this share count as equal."""

_GENERATION = LatencyDefinition("first_token_ns", "end_ns")
"""The time in which a response is generated after its first token."""


class TokenRatio(NamedTuple):
    """The output tokens per request of the other result, divided by ours.

    The ratio of the counts is the product of both fields, of which at least one is 1.

    Attributes:
        counting: How many tokens the other tool counted for a token of ours.
        length: How much longer the responses of the other run were.
    """

    counting: float = 1.0
    length: float = 1.0


def find_token_ratio(ours: OurRun, theirs: OtherResult) -> TokenRatio:
    """Return whether the other responses were longer, or their tokens counted in another way.

    If they also took longer by about the same ratio, they were longer. Unknown and nearly equal
    counts have a ratio of 1.
    """
    our_tokens = ours.compute_mean_tokens("output_tokens")
    their_tokens = theirs.output_tokens_per_request
    if not our_tokens or not their_tokens:
        return TokenRatio()

    ratio = their_tokens / our_tokens
    if abs(ratio - 1) < SAME_TOKENS_WITHIN:
        return TokenRatio()

    duration_ratio = _find_duration_ratio(ours, theirs)
    if duration_ratio is None:
        return TokenRatio(counting=ratio)

    # In logarithms, twice as long and half as long are equally far from equal.
    distance_from_one = abs(math.log(duration_ratio))
    distance_from_token_ratio = abs(math.log(duration_ratio / ratio))
    is_longer = distance_from_token_ratio < distance_from_one
    return TokenRatio(length=ratio) if is_longer else TokenRatio(counting=ratio)


def _find_duration_ratio(ours: OurRun, theirs: OtherResult) -> float | None:
    """Return how much longer the responses of the other run took after their first token.

    Return None if the other file does not have both means, or if responses take no time.
    """
    their_e2e_ms = theirs.metrics.get("e2e_ms.mean")
    their_ttft_ms = theirs.metrics.get("ttft_ms.mean")
    our_generation_ms = ours.compute_statistic(DefinedLatency(_GENERATION), "mean")
    if their_e2e_ms is None or their_ttft_ms is None or not our_generation_ms:
        return None
    their_generation_ms = their_e2e_ms - their_ttft_ms
    if their_generation_ms <= 0 or our_generation_ms <= 0:
        return None
    return their_generation_ms / our_generation_ms
