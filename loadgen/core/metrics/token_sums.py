"""Adds up the tokens of requests, and compares the numbers of different counters. Pure numpy.

The names in lists, such as "exact_tokens", are names of sums in `Totals`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from loadgen.core.metrics import request_metrics
from loadgen.core.metrics.columns import FAILED
from loadgen.core.results.record import SOURCES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.totals import Totals

EXACT_SOURCES = [SOURCES.index("server"), SOURCES.index("tokenizer")]
"""Sources of token counts that know how many tokens an event carries."""

TOKEN_FIELDS = (
    "output_tokens",
    "input_tokens",
    "cached_tokens",
    "cache_written_tokens",
    "reasoning_tokens",
    "asked_output",
)
"""The fields of a record with a number of tokens."""


def add_token_sums(totals: Totals, columns: Columns) -> None:
    """Add the token counts of requests, and the sums that show whether these counts are right."""
    for field in TOKEN_FIELDS:
        totals.add_known(field, columns[field][columns.is_ok])

    _add_prompts_with_cached_count(totals, columns)
    _add_tokens_of_failed(totals, columns)
    _count_by_token_source(totals, columns)

    # Tokens per output event.
    _add_streamed_and_billed_tokens(totals, columns)
    _add_exact_tokens_per_event(totals, columns)

    # Counts of the same tokens by different counters.
    _count_wrong_output_counts(totals, columns)
    _compare_output_with_request(totals, columns)
    _compare_prompt_counts(totals, columns)


def _add_prompts_with_cached_count(totals: Totals, columns: Columns) -> None:
    """Add the prompt tokens of the ok requests for which the server reports the cached tokens."""
    has_cached_count = columns.is_ok & columns.is_known("cached_tokens")
    totals.add_known("input_tokens_of_cached", columns["input_tokens"][has_cached_count])


def _add_tokens_of_failed(totals: Totals, columns: Columns) -> None:
    """Add the tokens of failed requests, which a provider may bill."""
    failed = columns.has_status(FAILED)
    totals.add_known("failed_input", columns["input_tokens"][failed])
    totals.add_known("failed_output", columns["output_tokens"][failed])


def _count_by_token_source(totals: Totals, columns: Columns) -> None:
    """Count the ok requests by the source of their token counts, for prompts and for output.

    The source is what counted the tokens: the server or a tokenizer, for example. A request that
    expects no output tokens, such as one for embeddings, counts in "output_source_unasked".
    """
    is_ok = columns.is_ok
    expects_output = columns.expects_output
    is_ok_with_output = is_ok & expects_output
    is_ok_without_output = is_ok & ~expects_output

    _add_source_counts(totals, "input_source", columns["input_source"][is_ok])
    _add_source_counts(totals, "output_source", columns["output_source"][is_ok_with_output])
    totals.add_to_sum("output_source_unasked", is_ok_without_output.sum())


def _add_source_counts(
    totals: Totals,
    field: Literal["input_source", "output_source"],
    source_codes: NDArray[np.int64],
) -> None:
    """Count requests by their source of token counts, in sums such as "input_source_server".

    Args:
        totals: The sums to add to.
        field: The name of the field with the source.
        source_codes: The source of each request, as an index of SOURCES.
    """
    requests_by_code = np.bincount(source_codes, minlength=len(SOURCES)).tolist()
    for source, requests in zip(SOURCES, requests_by_code, strict=True):
        source_name = source or "none"
        totals.add_to_sum(f"{field}_{source_name}", requests)


def _add_streamed_and_billed_tokens(totals: Totals, columns: Columns) -> None:
    """Add the output events and the output tokens of ok responses with a number of both.

    - "output_events": the output events.
    - "streamed_tokens": the tokens that came in these events.
    - "billed_tokens": all tokens that the server counts. Some servers count reasoning tokens that
      they never stream.
    """
    has_token_count = columns.is_known("output_tokens")
    has_events = columns["output_events"] > 0
    is_selected = columns.is_ok & has_token_count & has_events

    output_events = columns["output_events"][is_selected]
    streamed_tokens = request_metrics.streamed_tokens(columns)[is_selected]
    billed_tokens = columns["output_tokens"][is_selected]

    totals.add_to_sum("output_events", output_events.sum(dtype=np.int64))
    totals.add_to_sum("streamed_tokens", streamed_tokens.sum(dtype=np.int64))
    totals.add_to_sum("billed_tokens", billed_tokens.sum(dtype=np.int64))


def _add_exact_tokens_per_event(totals: Totals, columns: Columns) -> None:
    """Add the sums that show whether each output event carries one token.

    Only ok responses count whose tokens the server or a tokenizer has counted.

    - "exact_events": the output events.
    - "exact_tokens": the tokens in these events.
    - "surplus_tokens": the tokens that are not the first one of their event.
    """
    has_exact_count = np.isin(columns["output_source"], EXACT_SOURCES)
    has_events = columns["output_events"] > 0
    is_selected = columns.is_ok & has_events & has_exact_count

    event_counts = columns["output_events"][is_selected].astype(np.int64)
    token_counts = request_metrics.streamed_tokens(columns)[is_selected].astype(np.int64)
    finish_reasons = columns["finish_reason"][is_selected]
    surplus_counts = _count_surplus_tokens(event_counts, token_counts, finish_reasons)

    totals.add_to_sum("exact_events", event_counts.sum())
    totals.add_to_sum("exact_tokens", token_counts.sum())
    totals.add_to_sum("surplus_tokens", surplus_counts.sum())


def _count_surplus_tokens(
    event_counts: NDArray[np.int64],
    token_counts: NDArray[np.int64],
    finish_reasons: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return for each response how many tokens came in an event together with an earlier token.

    A response of 13 tokens in 10 events has a surplus of 3. If one of its tokens has no text, such
    as the token that ends a response, the surplus is 2, because that token came in no event.

    Args:
        event_counts: The number of output events of each response.
        token_counts: The number of streamed tokens of each response.
        finish_reasons: The code of the finish reason of each response.
    """
    textless_counts = request_metrics.count_textless_tokens(finish_reasons, token_counts)
    tokens_with_text = token_counts - textless_counts
    surplus_counts: NDArray[np.int64] = np.maximum(tokens_with_text - event_counts, 0)
    return surplus_counts


def _count_wrong_output_counts(totals: Totals, columns: Columns) -> None:
    """Count the ok responses whose reported number of output tokens cannot be right.

    - "exact_counts": the checked responses, whose tokens the server or a tokenizer has counted.
    - "understated_counts": the number is too low: there are more output events than tokens.
    - "conflicting_counts": the number is too low, or it is higher than the requested number.
    """
    has_exact_source = np.isin(columns["output_source"], EXACT_SOURCES)
    has_count = columns.is_known("output_tokens")
    is_checked = columns.is_ok & columns.expects_output & has_exact_source & has_count

    is_too_low = is_checked & request_metrics.has_too_low_count(columns)
    is_too_high = is_checked & request_metrics.has_too_high_count(columns)
    is_wrong = is_too_low | is_too_high

    totals.add_to_sum("exact_counts", is_checked.sum())
    totals.add_to_sum("understated_counts", is_too_low.sum())
    totals.add_to_sum("conflicting_counts", is_wrong.sum())


def _compare_output_with_request(totals: Totals, columns: Columns) -> None:
    """Add the requested and the received output tokens of the ok requests that have both numbers.

    "requests_with_length" counts these requests, and "length_mismatches" those of them whose two
    numbers differ.
    """
    received_tokens = columns["output_tokens"]
    requested_tokens = columns["asked_output"]
    has_requested_length = requested_tokens > 0
    has_received_length = columns.is_known("output_tokens")
    is_compared = columns.is_ok & has_requested_length & has_received_length
    is_mismatch = is_compared & (requested_tokens != received_tokens)

    totals.add_to_sum("requests_with_length", is_compared.sum())
    totals.add_to_sum("requested_tokens", requested_tokens[is_compared].sum(dtype=np.int64))
    totals.add_to_sum("received_tokens", received_tokens[is_compared].sum(dtype=np.int64))
    totals.add_to_sum("length_mismatches", is_mismatch.sum())


def _compare_prompt_counts(totals: Totals, columns: Columns) -> None:
    """Add the prompt tokens of the ok requests whose tokens both client and server counted.

    - "prompts_compared": the number of these requests.
    - "prompt_tokens_built": their tokens as the client counted them when it built the prompt.
    - "prompt_tokens_of_server": their tokens as the server counted them.
    """
    has_client_count = columns["built_tokens"] > 0
    is_from_server = columns["input_source"] == SOURCES.index("server")
    has_server_count = is_from_server & columns.is_known("input_tokens")
    is_compared = columns.is_ok & columns.expects_output & has_client_count & has_server_count

    client_counts = columns["built_tokens"][is_compared]
    server_counts = columns["input_tokens"][is_compared]

    totals.add_to_sum("prompts_compared", len(client_counts))
    totals.add_to_sum("prompt_tokens_built", client_counts.sum(dtype=np.int64))
    totals.add_to_sum("prompt_tokens_of_server", server_counts.sum(dtype=np.int64))
