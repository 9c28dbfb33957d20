"""Tokens of a run: totals, rates, sources of the counts, and what the counts say about events.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from loadgen.core.limits import ITL_TOKENS_PER_EVENT
from loadgen.core.metrics import windows
from loadgen.core.metrics.windows import per_second
from loadgen.core.results.record import SOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.request_group import RequestGroup
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.stats.amounts import TimeCurve
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


def summarize_tokens(group: RequestGroup) -> Tokens:
    """Return the tokens of a group of requests, and the rates of these tokens.

    Rates are over three intervals: the measurement window, the steady state without the start and
    the end of the load, and the time until the last sent request ended (as MLPerf LoadGen has it).
    Numbers that are not known are None.

    Args:
        group: The requests, these intervals, and the number of GPUs that responded.
    """
    requests = group.requests
    window = group.window
    gpus = group.gpus

    output_tokens = requests.sum_known("output_tokens")
    window_rates = _rates_in_window(requests, window)
    steady_rates = _rates_in_steady_state(requests, window.steady, group.timeline)

    return Tokens(
        # Tokens of ok requests, and tokens of failed requests.
        input=requests.sum_known("input_tokens"),
        output=output_tokens,
        cached=requests.sum_known("cached_tokens"),
        cache_written=requests.sum_known("cache_written_tokens"),
        reasoning=requests.sum_known("reasoning_tokens"),
        asked_output=requests.sum_known("asked_output"),
        failed_input=requests.sum("failed_input"),
        failed_output=requests.sum("failed_output"),
        # Shares, and how the tokens were counted.
        cached_share=_cached_share(requests),
        length_mismatch_share=_length_mismatch_share(requests),
        per_event=_tokens_per_event(requests),
        sources=_count_sources(requests),
        # Rates over the measurement window.
        input_per_s=window_rates.input,
        output_per_s=window_rates.output,
        output_per_s_per_gpu=per_gpu(window_rates.output, gpus),
        total_per_s=window_rates.total,
        total_per_s_per_gpu=per_gpu(window_rates.total, gpus),
        # Rates over the steady state.
        steady_input_per_s=steady_rates.input,
        steady_output_per_s=steady_rates.output,
        steady_output_per_s_per_gpu=per_gpu(steady_rates.output, gpus),
        steady_total_per_s=steady_rates.total,
        steady_total_per_s_per_gpu=per_gpu(steady_rates.total, gpus),
        # Rates until the last sent request ended, and over the full run with its warm-up.
        last_issued_output_per_s=per_second(output_tokens, window.last_issued),
        whole_output_per_s=whole_output_per_s(group.all_stages, window),
    )


class _TokenRates(NamedTuple):
    """Tokens per second of one interval. A rate is None if its tokens were not counted."""

    input: float | None
    output: float | None
    total: float | None


def _rates_in_window(accumulator: MetricAccumulator, window: Window) -> _TokenRates:
    """Return the prompt and output tokens per second of the measurement window."""
    prompt_tokens = accumulator.sum_known("input_tokens")
    output_tokens = accumulator.sum_known("output_tokens")
    total_tokens = _add_known(output_tokens, prompt_tokens)
    return _TokenRates(
        input=per_second(prompt_tokens, window),
        output=per_second(output_tokens, window),
        total=per_second(total_tokens, window),
    )


def _rates_in_steady_state(
    accumulator: MetricAccumulator, steady: Span, timeline: Sequence[NDArray[np.int64]]
) -> _TokenRates:
    """Return the prompt and output tokens per second of the steady state."""
    input_per_s = _steady_input_per_s(accumulator, steady)
    output_per_s = _steady_output_per_s(accumulator, steady, timeline)
    total_per_s = _add_known(output_per_s, input_per_s)
    return _TokenRates(input=input_per_s, output=output_per_s, total=total_per_s)


def _length_mismatch_share(accumulator: MetricAccumulator) -> float | None:
    """Return the share of the responses that do not have the requested length."""
    mismatches = accumulator.sum("length_mismatches")
    return _share_of(mismatches, accumulator.sum("requests_with_length"))


def _tokens_per_event(accumulator: MetricAccumulator) -> float | None:
    """Return how many tokens an output event carries on average."""
    return _share_of(accumulator.sum("streamed_tokens"), accumulator.sum("output_events"))


def _cached_share(accumulator: MetricAccumulator) -> float | None:
    """Return the share of prompt tokens that came from the cache of the server, None if unknown."""
    cached_tokens = accumulator.sum_known("cached_tokens")

    # Only requests that report their cached tokens.
    prompt_tokens = accumulator.sum_known("input_tokens_of_cached")
    if cached_tokens is None or prompt_tokens is None:
        return None
    return _share_of(cached_tokens, prompt_tokens)


def _share_of(count: int, total: int) -> float | None:
    """Return a count divided by a total, or None if the total is 0."""
    return count / total if total else None


def _steady_output_per_s(
    accumulator: MetricAccumulator, steady: Span, timeline: Sequence[NDArray[np.int64]]
) -> float | None:
    """Return the output tokens per second of the steady state, or None if none were counted.

    The steady state is the time without the start and the end of the load.

    Args:
        accumulator: The requests.
        steady: The interval of the steady state.
        timeline: The number of output events over time, for each stage. If it is empty, the tokens
            of each response are spread evenly from its first to its last token.
    """
    if accumulator.sum_known("output_tokens") is None:
        return None

    steady_tokens = _estimate_tokens_by_events(accumulator, steady, timeline)
    if steady_tokens is None:
        output_tokens = accumulator.amounts("output")
        steady_tokens = output_tokens.between(steady.start_s, steady.end_s)

    return per_second(steady_tokens, steady)


def _estimate_tokens_by_events(
    accumulator: MetricAccumulator, steady: Span, timeline: Sequence[NDArray[np.int64]]
) -> float | None:
    """Return the output tokens of the steady state, estimated from its share of all output events.

    A response comes as events of one or more tokens. If 60 of 80 events came in the steady state,
    the estimate for 160 tokens is 120. Return None if the times of events are not known.

    Args:
        accumulator: The requests.
        steady: The time of the steady state, which is without the start and the end of the load.
        timeline: The number of events over time, for each stage.
    """
    all_events = accumulator.sum("output_events")
    if not all_events:
        return None

    steady_events = windows.count_events_within(timeline, steady)
    if steady_events is None:
        return None

    # The server also counts tokens that it does not stream, such as the end token.
    all_tokens = accumulator.sum("billed_tokens")
    return steady_events * all_tokens / all_events


def _steady_input_per_s(accumulator: MetricAccumulator, steady: Span) -> float | None:
    """Return the prompt tokens per second of the steady state, or None if none were counted.

    The tokens of a prompt count if the first output token came in the steady state, because the
    server has processed the prompt by then.
    """
    if accumulator.sum_known("input_tokens") is None:
        return None

    prompt_tokens = accumulator.amounts("input")
    steady_tokens = prompt_tokens.between(steady.start_s, steady.end_s, includes_start=True)
    return per_second(steady_tokens, steady)


def _add_known(first: float | None, second: float | None) -> float | None:
    """Return the sum of two numbers, or None if one is not known."""
    return None if first is None or second is None else first + second


def per_gpu(rate: float | None, gpus: int | None) -> float | None:
    """Return a rate of the whole target divided by its GPUs, or None if one is not known."""
    return rate / gpus if rate is not None and gpus else None


def _count_sources(accumulator: MetricAccumulator) -> Sources:
    """Return how many ok requests have each source of token counts, for input and for output."""
    return Sources(
        input=_count_requests_by_source(accumulator, "input"),
        output=_count_requests_by_source(accumulator, "output"),
    )


def _count_requests_by_source(
    accumulator: MetricAccumulator, direction: Literal["input", "output"]
) -> dict[str, int]:
    """Return the number of ok requests by the source of their token counts.

    The source is "server" or "tokenizer", for example. It is "none" if nothing counted the tokens,
    and "unasked" for a request that expects no output, such as one for embeddings. Sources without
    requests are left out.

    Args:
        accumulator: The requests.
        direction: Whether the tokens of prompts or of responses were counted.
    """
    source_names = [source or "none" for source in SOURCES]
    requests_by_source = {
        source: accumulator.sum(f"{direction}_source_{source}")
        for source in (*source_names, "unasked")
    }
    return {source: requests for source, requests in requests_by_source.items() if requests}


def whole_output_per_s(all_stages: Sequence[MetricAccumulator], window: Window) -> float | None:
    """Return the output tokens of all stages per second of the whole run, None without any."""
    totals = [stage.sum_known("output_tokens") for stage in all_stages]
    known_totals = [total for total in totals if total is not None]
    output_tokens = sum(known_totals) if known_totals else None
    return per_second(output_tokens, window.full_run)


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


class _EventTokens(NamedTuple):
    """The tokens of output events, each of which stands for as many as events have on average.

    Attributes:
        events_before_bins: The number of events before each bin of time, see
            `windows.cumulate_event_counts`.
        event_count: The number of all events.
        token_count: The number of all tokens, also of those that are not streamed.
    """

    events_before_bins: NDArray[np.int64]
    event_count: int
    token_count: int

    def count_in(self, interval: Span) -> float:
        """Return the tokens of the events in an interval.

        For example, if 60 of 80 events came in it, and there are 160 tokens, it has 120 tokens.
        """
        interval_events = windows.count_events_between(self.events_before_bins, interval)
        return interval_events * self.token_count / self.event_count


class OutputTokensOverTime(NamedTuple):
    """The output tokens of a run, from which those of any interval are estimated.

    Attributes:
        by_events: The tokens by the recorded times of output events, None if these are not known.
        spread_evenly: The tokens spread evenly from the first to the last token of each response,
            None if the times of events are known. Without any event, both are None.
    """

    by_events: _EventTokens | None = None
    spread_evenly: TimeCurve | None = None

    @classmethod
    def of_requests(
        cls, requests: MetricAccumulator, timeline: Sequence[NDArray[np.int64]]
    ) -> OutputTokensOverTime:
        """Return the output tokens of some requests.

        Args:
            requests: The requests.
            timeline: For each stage, the number of output events in each bin of time. Empty if the
                times of events were not recorded.
        """
        event_count = requests.sum("output_events")
        if event_count == 0:
            return cls()

        events_before_bins = windows.cumulate_event_counts(timeline)
        if events_before_bins is None:
            return cls(spread_evenly=requests.amounts("output").curve())

        token_count = requests.sum("billed_tokens")
        return cls(by_events=_EventTokens(events_before_bins, event_count, token_count))

    def count_in(self, interval: Span) -> float | None:
        """Return the output tokens that came in an interval, or None if there were no events."""
        if self.by_events is not None:
            return self.by_events.count_in(interval)
        if self.spread_evenly is not None:
            return self.spread_evenly.between(interval.start_s, interval.end_s)
        return None


def itl_undefined_reason(accumulator: MetricAccumulator, inter_chunk: Distribution) -> str:
    """Return why the time between tokens (ITL) cannot be measured, or "" if it can.

    The gaps between output events are gaps between tokens only if each event carries one token.

    Args:
        accumulator: The requests.
        inter_chunk: The distribution of the gaps between output events.
    """
    if inter_chunk.count == 0:
        return "no response had two output events"

    events = accumulator.sum("exact_events")
    if not events:
        return "tokens were not counted, so the number of tokens per event is not known"

    surplus_tokens = accumulator.sum("surplus_tokens")  # more than one per event
    if surplus_tokens > ITL_TOKENS_PER_EVENT * events:
        tokens_per_event = accumulator.sum("exact_tokens") / events
        return f"events carry {tokens_per_event:.2f} tokens on average"

    return ""


def prompt_count_difference(
    accumulator: MetricAccumulator, template_tokens: int | None
) -> float | None:
    """Return by what share the server counts more prompt tokens than the client.

    It is 0.02 for 2 % more, and None if no request has both counts.

    Args:
        accumulator: The requests.
        template_tokens: The tokens that the chat template adds to a prompt, None if not known.
    """
    requests = accumulator.sum("prompts_compared")
    if not requests:
        return None

    all_template_tokens = (template_tokens or 0) * requests
    client_count = accumulator.sum("prompt_tokens_built") + all_template_tokens
    server_count = accumulator.sum("prompt_tokens_of_server")
    return (server_count - client_count) / client_count
