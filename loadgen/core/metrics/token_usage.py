"""Tokens of a run: totals, rates, sources of the counts, and what the counts say about events.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loadgen.core.limits import ITL_TOKENS_PER_EVENT
from loadgen.core.metrics import windows
from loadgen.core.metrics.windows import per_second
from loadgen.core.results.record import SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.stats.quantiles import Distribution


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Ok requests by the source of their token counts.

    The sources are server, tokenizer, estimate, events, and none.
    """

    input: dict[str, int]
    output: dict[str, int]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of ok requests, and their rates.

    A sum covers the requests with a known count, and is None if no request has one. Rates per GPU
    are None if the number of GPUs is not known. `cache_written` are prompt tokens that a server
    bills for writing them to its cache; None if no server reports them.
    """

    input: int | None
    output: int | None
    cached: int | None
    reasoning: int | None
    asked_output: int | None
    cached_share: float | None
    length_mismatch_share: float | None
    per_event: float | None
    output_per_s: float | None
    total_per_s: float | None
    input_per_s: float | None
    steady_output_per_s: float | None
    steady_total_per_s: float | None
    steady_input_per_s: float | None
    last_issued_output_per_s: float | None
    whole_output_per_s: float | None
    failed_input: int
    failed_output: int
    sources: Sources
    output_per_s_per_gpu: float | None = None
    total_per_s_per_gpu: float | None = None
    steady_output_per_s_per_gpu: float | None = None
    steady_total_per_s_per_gpu: float | None = None
    cache_written: int | None = None


def summarize_tokens(
    accumulator: MetricAccumulator,
    everything: Sequence[MetricAccumulator],
    window: Window,
    timeline: Sequence[NDArray[np.int64]],
    gpus: int | None,
) -> Tokens:
    """Return the tokens of some requests and their rates.

    Args:
        accumulator: The requests.
        everything: The requests of all stages, for rates over the whole run.
        window: The intervals that the rates are over.
        timeline: Per stage, output events per bin of time. Without any, the tokens of a request are
            spread evenly from its first to its last token.
        gpus: The number of GPUs of the target.
    """
    output = accumulator.sum_known("output_tokens")
    prompt = accumulator.sum_known("input_tokens")
    cached = accumulator.sum_known("cached_tokens")
    prompt_of_cached = accumulator.sum_known("input_tokens_of_cached")
    events = accumulator.sum("output_events")
    comparable = accumulator.sum("requests_with_length")
    steady_output_per_s = _steady_output_per_s(accumulator, window.steady, timeline)
    steady_input_per_s = _steady_input_per_s(accumulator, window.steady)
    rates = {
        "output_per_s": per_second(output, window),
        "total_per_s": per_second(_add_known(output, prompt), window),
        "steady_output_per_s": steady_output_per_s,
        "steady_total_per_s": _add_known(steady_output_per_s, steady_input_per_s),
    }
    return Tokens(
        input=prompt,
        output=output,
        cached=cached,
        cache_written=accumulator.sum_known("cache_written_tokens"),
        reasoning=accumulator.sum_known("reasoning_tokens"),
        asked_output=accumulator.sum_known("asked_output"),
        cached_share=cached / prompt_of_cached if cached is not None and prompt_of_cached else None,
        length_mismatch_share=accumulator.sum("length_mismatches") / comparable
        if comparable
        else None,
        per_event=accumulator.sum("streamed_tokens") / events if events else None,
        input_per_s=per_second(prompt, window),
        steady_input_per_s=steady_input_per_s,
        last_issued_output_per_s=per_second(output, window.last_issued),
        whole_output_per_s=whole_output_per_s(everything, window),
        failed_input=accumulator.sum("failed_input"),
        failed_output=accumulator.sum("failed_output"),
        sources=Sources(
            input=_count_sources(accumulator, "input"),
            output=_count_sources(accumulator, "output"),
        ),
        **rates,
        **{f"{name}_per_gpu": per_gpu(rate, gpus) for name, rate in rates.items()},
    )


def _steady_output_per_s(
    accumulator: MetricAccumulator, steady: Span, timeline: Sequence[NDArray[np.int64]]
) -> float | None:
    """Return the output tokens per second of the steady state, or None if none were counted.

    With a timeline, each output event counts as many tokens as an event carries on average.
    """
    if accumulator.sum_known("output_tokens") is None:
        return None
    events = accumulator.sum("output_events")
    steady_events = windows.steady_events(timeline, steady) if events else None
    if steady_events is None:
        tokens = accumulator.amount("output").between(steady.start_s, steady.end_s)
    else:
        tokens = steady_events * accumulator.sums["billed_tokens"] / events
    return per_second(tokens, steady)


def _steady_input_per_s(accumulator: MetricAccumulator, steady: Span) -> float | None:
    """Return the prompt tokens per second of the steady state, or None if none were counted.

    A prompt counts when its first token comes, also at the start of the interval.
    """
    if accumulator.sum_known("input_tokens") is None:
        return None
    amounts = accumulator.amount("input")
    return per_second(amounts.between(steady.start_s, steady.end_s, includes_start=True), steady)


def _add_known(first: float | None, second: float | None) -> float | None:
    """Return the sum of two numbers, or None if one is not known."""
    return None if first is None or second is None else first + second


def per_gpu(rate: float | None, gpus: int | None) -> float | None:
    """Return a rate of the whole target divided by its GPUs, or None if one is not known."""
    return rate / gpus if rate is not None and gpus else None


def _count_sources(accumulator: MetricAccumulator, side: str) -> dict[str, int]:
    """Return the ok requests by the source of their counts of "input" or "output" tokens."""
    names = (*(source or "none" for source in SOURCES), "unasked")
    counts = {name: accumulator.sum(f"{side}_source_{name}") for name in names}
    return {name: count for name, count in counts.items() if count}


def whole_output_per_s(everything: Sequence[MetricAccumulator], window: Window) -> float | None:
    """Return the output tokens of all stages per second of the whole run, None without any."""
    totals = [part.sum_known("output_tokens") for part in everything]
    known = [total for total in totals if total is not None]
    return per_second(sum(known) if known else None, window.whole)


_FIELDS_FROM_OUTPUT_COUNTS = (
    *(name for name in Tokens.__struct_fields__ if "output_per" in name or "total_per" in name),
    "output",
    "reasoning",
    "length_mismatch_share",
    "per_event",
)


def without_output_counts(tokens: Tokens) -> Tokens:
    """Return the tokens without what rests on the counts of output tokens, which are withheld."""
    return msgspec.structs.replace(tokens, **dict.fromkeys(_FIELDS_FROM_OUTPUT_COUNTS))


def output_tokens_over_time(
    measured: MetricAccumulator, timeline: Sequence[NDArray[np.int64]]
) -> Callable[[Span], float | None]:
    """Return a function from an interval to the output tokens of measured requests that came in it.

    With a timeline, each output event counts as many tokens as an event carries on average. Without
    one, the tokens of each response are spread evenly over it. The function returns None if no
    tokens were counted.
    """
    events = measured.sum("output_events")
    if not events:
        return _no_tokens
    event_sums = windows.event_sums(timeline)
    if event_sums is None:
        curve = measured.amount("output").curve()
        return lambda span: curve.between(span.start_s, span.end_s)
    billed = measured.sum("billed_tokens")
    return lambda span: windows.events_between(event_sums, span) * billed / events


def _no_tokens(_: Span) -> None:
    """Return None: no tokens were counted in any interval."""
    return


def itl_absent_reason(accumulator: MetricAccumulator, inter_chunk: Distribution) -> str:
    """Return why the gaps between events are not gaps between tokens, or "" if they are.

    A request may have one token more than events: the token that ends a response often has no text.
    A short response that ended at its length has no such token, and one of three tokens matters.
    """
    if inter_chunk.count == 0:
        return "no answer had two output events"
    events = accumulator.sum("exact_events")
    if not events:
        return "nobody counted the tokens, so how many an event carries is not known"
    if accumulator.sum("surplus_tokens") > ITL_TOKENS_PER_EVENT * events:
        tokens_per_event = accumulator.sum("exact_tokens") / events
        return f"events carry {tokens_per_event:.2f} tokens on average"
    return ""


def prompt_count_difference(
    accumulator: MetricAccumulator, template_tokens: int | None
) -> float | None:
    """Return by what share the server's prompt token counts differ from ours.

    Ours are the tokens of the content as built plus those of the chat template. Returns None if no
    request has both counts.
    """
    requests = accumulator.sum("prompts_compared")
    if not requests:
        return None
    ours = accumulator.sum("prompt_tokens_built") + (template_tokens or 0) * requests
    return (accumulator.sum("prompt_tokens_of_server") - ours) / ours
