"""The token counts of a response, checked against each other. Pure.

Servers name and nest their counts differently (see `event_fields.UsageFields` and
`app/output_tracker.py`), but the rules by which counts contradict each other are the same.
"""

from __future__ import annotations

import msgspec

from ..request import Usage

_INPUT_COUNTS = ("input", "cached", "cache_written")
_OUTPUT_COUNTS = ("output", "reasoning")
DOUBTFUL_COUNTS: dict[str, tuple[str, ...]] = {
    "more cached tokens than prompt tokens": _INPUT_COUNTS,
    "more tokens written to the cache than prompt tokens": _INPUT_COUNTS,
    "more cached and written tokens than prompt tokens": _INPUT_COUNTS,
    "more reasoning tokens than output tokens": _OUTPUT_COUNTS,
    "a total that is not the sum of prompt and output tokens": _INPUT_COUNTS + _OUTPUT_COUNTS,
}
"""Contradiction -> the counts of a Usage of which at least one is wrong."""


def without_doubtful_counts(usage: Usage) -> Usage:
    """Return the usage with None in place of the counts that its contradiction puts in doubt."""
    if not usage.contradiction:
        return usage
    doubtful_counts = DOUBTFUL_COUNTS[usage.contradiction]
    return msgspec.structs.replace(usage, **dict.fromkeys(doubtful_counts, None))


def check_usage(usage: Usage, total: int | None = None) -> Usage:
    """Return the usage of a response, with `contradiction` set if its counts cannot all be true.

    xAI and Gemini do not count reasoning tokens as a part of the output tokens, as other servers
    do. An example: 10 prompt tokens, 20 output tokens, 5 reasoning tokens, and a total of 35. The
    output of the returned usage is 25 then.

    Args:
        usage: The token counts of the server.
        total: The sum of prompt and output tokens by the server's own count, if it sends one.
    """
    has_details = bool(usage.cached or usage.cache_written or usage.reasoning)
    prompt_and_output = (usage.input or 0) + (usage.output or 0)
    has_other_total = bool(total) and total != prompt_and_output
    if not has_details and not has_other_total:
        return usage  # The usual case: nothing could contradict anything else.

    usage = _with_reasoning_in_output(usage, total)
    contradiction = _input_contradiction(usage) or _output_contradiction(usage, total or 0)
    if not contradiction:
        return usage

    return msgspec.structs.replace(usage, contradiction=contradiction)


def _with_reasoning_in_output(usage: Usage, total: int | None) -> Usage:
    """Return the usage with its reasoning tokens added to the output, if they are not part of it.

    They are not if the total is the sum of all three: with 10 prompt, 20 output and 5 reasoning
    tokens, a total of 35 means that 25 tokens were generated.
    """
    if usage.output is None or not usage.reasoning:
        return usage
    output_and_reasoning = usage.output + usage.reasoning
    prompt_tokens = usage.input or 0
    if total != prompt_tokens + output_and_reasoning:
        return usage
    return msgspec.structs.replace(usage, output=output_and_reasoning)


def _input_contradiction(usage: Usage) -> str:
    """Return what contradicts the number of prompt tokens, or an empty string.

    Cached tokens and tokens written to the cache are parts of the prompt that do not overlap.
    """
    if usage.input is None:
        return ""

    cached = usage.cached or 0
    written = usage.cache_written or 0
    if cached > usage.input:
        return "more cached tokens than prompt tokens"
    if written > usage.input:
        return "more tokens written to the cache than prompt tokens"
    if cached + written > usage.input:
        return "more cached and written tokens than prompt tokens"

    return ""


def _output_contradiction(usage: Usage, total: int) -> str:
    """Return what contradicts the number of output tokens, or an empty string.

    A total of 0 stands for a server that sends none. Reasoning tokens are a part of the output.
    """
    if usage.output is None:
        return ""
    if (usage.reasoning or 0) > usage.output:
        return "more reasoning tokens than output tokens"
    if usage.input is not None and total and total != usage.input + usage.output:
        return "a total that is not the sum of prompt and output tokens"
    return ""
