"""Counters of speculative decoding with a planted accepted length, for the simulated server.

Pure. The simulated server does not model speculative decoding: its tokens come at the same times
with and without these counters. They exist so that a known accepted length can be recovered from
the metrics page. Their names are those of vLLM, because TensorRT-LLM has no such counters.
"""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.core.errors import UserError
from loadgen.sim.server.options import Options

_PREFIX = "vllm:spec_decode_num_"
_ROUNDING_ERROR = 1e-9
"""Added before rounding down, because a quotient such as 100 / 2.5 may be 39.99999999999999."""


def create_speculation_counters(options: Options) -> SpeculationCounters | None:
    """Return the counters of speculative decoding for a simulated server, None if not requested.

    A step of the model generates the accepted tokens of a draft and one more token. So with drafts
    of 3 tokens, the mean accepted length is 1 to 4 tokens per step.

    Raises:
        UserError: The accepted length is outside this range.
    """
    accepted_length = options.accepted_length
    if not accepted_length:
        return None

    longest = options.draft_tokens + 1
    if not 1 <= accepted_length <= longest:
        raise UserError(
            "out_of_range",
            f"{accepted_length:g} tokens per step are impossible, because a draft has "
            f"{options.draft_tokens}",
            "--accepted-length",
            f"use 1 to {longest}, or more tokens per draft (--draft-tokens)",
        )
    return SpeculationCounters(accepted_length, options.draft_tokens)


class SpeculationCounters:
    """Counts drafts, their tokens and the accepted ones, as if each step had the same length."""

    def __init__(self, accepted_length: float, draft_tokens: int) -> None:
        """Begin without responses.

        Args:
            accepted_length: The mean number of tokens per step, from 1 to `draft_tokens` + 1.
            draft_tokens: The tokens of each draft.
        """
        self._accepted_length = accepted_length
        self._draft_tokens = draft_tokens
        self._decoded_tokens = 0

    def add_response(self, output_tokens: int) -> None:
        """Count the steps of a response. Its first token comes from the prefill."""
        self._decoded_tokens += max(output_tokens - 1, 0)

    def format_lines(self, labels: str) -> Iterator[str]:
        """Yield the counters of drafts and accepted tokens in the Prometheus text format.

        Each step of the model checks one draft, and generates the accepted tokens of the draft and
        one token more. Example: with 2.5 tokens per step, 100 tokens need 40 steps, so 40 drafts.
        The steps generate 40 tokens themselves, and the other 60 are accepted tokens of drafts.

        Args:
            labels: The labels of each counter, such as `model_name="m"`.
        """
        drafts = int(self._decoded_tokens / self._accepted_length + _ROUNDING_ERROR)
        draft_tokens = drafts * self._draft_tokens
        accepted_tokens = min(self._decoded_tokens - drafts, draft_tokens)
        yield from _format_counter("drafts", labels, drafts)
        yield from _format_counter("draft_tokens", labels, draft_tokens)
        yield from _format_counter("accepted_tokens", labels, accepted_tokens)

        # The accepted tokens by their position in a draft. A token can only be accepted if all
        # earlier tokens of the draft are, as in the synthetic acceptance of vLLM.
        name = f"{_PREFIX}accepted_tokens_per_pos_total"
        yield f"# TYPE {name} counter"
        remaining_tokens = accepted_tokens
        for position in range(self._draft_tokens):
            accepted_at_position = min(drafts, remaining_tokens)
            remaining_tokens -= accepted_at_position
            yield f'{name}{{{labels},position="{position}"}} {accepted_at_position}'


def _format_counter(name: str, labels: str, value: int) -> Iterator[str]:
    """Yield the type and the value of a counter, as two lines of a metrics page."""
    full_name = f"{_PREFIX}{name}_total"
    yield f"# TYPE {full_name} counter"
    yield f"{full_name}{{{labels}}} {value}"
