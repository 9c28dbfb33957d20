"""The samples of latencies that other tools would have of the records of a run.

`loadgen.formats` describes the definitions in words. The records have fewer timestamps than some
tools use: a response ends at its last output or finish event here, while some tools include the
usage event after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import OK, Columns, as_selection, is_measured, pool_measured_gaps
from loadgen.core.results.manifest import RunManifest
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import block_slices
from loadgen.interop.sample_statistics import DerivedSample, PooledGaps, WeightedValues

Timestamp = Literal["sent_ns", "first_token_ns", "role_event", "last_token_ns", "end_ns"]
"""A timestamp of a request.

`role_event` is the first event of a response, which carries only a role in chat. It is the first
token in other APIs, and in responses without such an event.
"""

TIMESTAMPS: tuple[Timestamp, ...] = (
    "sent_ns",
    "first_token_ns",
    "role_event",
    "last_token_ns",
    "end_ns",
)


TokenDivisor = Literal["all_tokens", "tokens_after_first"]
"""The output tokens of a request that a latency per token is divided by."""


class ToolSamples(NamedTuple):
    """The samples of one tool by its own definitions. None if the tool has no such metric."""

    ttft: DerivedSample
    tpot: DerivedSample | None
    itl: DerivedSample | PooledGaps | None
    e2e: DerivedSample


class SuccessfulRequests(NamedTuple):
    """The measured requests of a run, and which of them other tools count.

    Attributes:
        columns: The measured requests.
        is_successful: True for each request that succeeded and has output.
    """

    columns: Columns
    is_successful: NDArray[np.bool_]


def select_successful(manifest: RunManifest, rows: NDArray[np.void]) -> SuccessfulRequests:
    """Return the measured requests of a run, and which of them succeeded and have output."""
    columns = Columns(rows, is_measured(manifest, rows))
    return SuccessfulRequests(columns, columns.where(OK) & (columns["first_token_ns"] >= 0))


def compute_tool_samples(
    manifest: RunManifest, rows: NDArray[np.void], gaps: Sequence[Histogram]
) -> dict[str, ToolSamples]:
    """Return the latencies of a run as each benchmark tool defines them.

    The tools mean different times by the same name, for example by TTFT. `loadgen.formats` has
    each definition in words. Tools with the same definition share one sample object, so that its
    statistics are computed once.

    Args:
        manifest: The manifest of the run.
        rows: The records of its requests.
        gaps: For each stage, the times between output events.

    Returns:
        The samples by the name of the tool in `loadgen.formats`. {} if no request succeeded.
    """
    requests = select_successful(manifest, rows)
    if not requests.is_successful.any():
        return {}

    latencies = _Latencies(manifest, requests)
    pooled_gaps = pool_measured_gaps(manifest, gaps)

    # Most tools have these definitions, or differ from them in one metric.
    common = ToolSamples(
        ttft=latencies.between("sent_ns", "first_token_ns"),
        tpot=latencies.per_token("first_token_ns", "end_ns"),
        itl=PooledGaps(pooled_gaps),
        e2e=latencies.between("sent_ns", "end_ns"),
    )

    return {
        "vllm bench serve": _vllm_samples(latencies, common, pooled_gaps),
        "SGLang bench_serving": common,
        # AIPerf's ITL is one mean per request, which other tools call TPOT.
        "AIPerf": common._replace(tpot=None, itl=common.tpot),
        "GuideLLM": _guidellm_samples(latencies, common),
        # inference-perf's TPOT ends at the last token, not at the end of the response.
        "inference-perf": common._replace(
            tpot=latencies.per_token("first_token_ns", "last_token_ns")
        ),
        "genai-bench": common._replace(itl=None),
        "mlcommons/endpoints": common._replace(itl=None),
    }


def _vllm_samples(
    latencies: _Latencies, common: ToolSamples, pooled_gaps: Histogram
) -> ToolSamples:
    """Return the samples of `vllm bench serve`.

    vLLM takes the first event of a response for the first token, even if this event has only a role
    and no text.
    """
    return ToolSamples(
        ttft=latencies.between("sent_ns", "role_event"),
        tpot=latencies.per_token("role_event", "end_ns"),
        itl=PooledGaps(_with_role_event_gaps(pooled_gaps, latencies)),
        e2e=common.e2e,
    )


def _guidellm_samples(latencies: _Latencies, common: ToolSamples) -> ToolSamples:
    """Return the samples of GuideLLM, in which a request has the weight of its output tokens.

    GuideLLM's TPOT begins when the request is sent, so its divisor includes the first token. Its
    ITL begins at the first token, so its divisor does not include it.
    """
    return ToolSamples(
        ttft=common.ttft,
        tpot=latencies.per_token(
            "sent_ns", "last_token_ns", divisor="all_tokens", is_weighted=True
        ),
        itl=latencies.per_token("first_token_ns", "last_token_ns", is_weighted=True),
        e2e=common.e2e,
    )


class _LatencyDefinition(NamedTuple):
    """How a latency is computed from a request.

    Attributes:
        start: The timestamp at which the time begins.
        end: The timestamp at which it ends.
        divisor: The tokens that the time is divided by. None if it is not divided.
        is_weighted: True if a request counts in the sample once for each token of the divisor.
    """

    start: Timestamp
    end: Timestamp
    divisor: TokenDivisor | None = None
    is_weighted: bool = False


class _Latencies:
    """Creates samples of the successful requests of a run, one for each different definition.

    A caller computes the statistics of a sample object once, so definitions with the same result
    get the same object. They also have the same result if they use different timestamps that are
    equal in every request, for example of responses without an event that carries only a role.
    """

    def __init__(self, manifest: RunManifest, requests: SuccessfulRequests) -> None:
        self._api = manifest.api
        self._columns = requests.columns
        self._selection = as_selection(requests.is_successful)
        self._canonical_timestamps: dict[Timestamp, Timestamp] = {}
        self._samples: dict[_LatencyDefinition, DerivedSample] = {}

    def timestamps(self, name: Timestamp) -> NDArray[np.int64]:
        """Return a timestamp of every successful request."""
        if name != "role_event":
            return self._select(name)
        event_ns = self._select("first_event_ns" if self._api == "chat" else "first_token_ns")
        if event_ns.min(initial=0) >= 0:
            return event_ns
        return np.where(event_ns < 0, self._select("first_token_ns"), event_ns)

    def between(self, start: Timestamp, end: Timestamp) -> DerivedSample:
        """Return a sample of the time between two timestamps of a request, such as the TTFT."""
        return self._get_or_create_sample(_LatencyDefinition(start, end))

    def per_token(
        self,
        start: Timestamp,
        end: Timestamp,
        *,
        divisor: TokenDivisor = "tokens_after_first",
        is_weighted: bool = False,
    ) -> DerivedSample:
        """Return a sample of the time per output token between two timestamps, such as the TPOT.

        For example, a response of 101 tokens that lasts 2 s after its first token has a TPOT of
        2 s / 100 = 20 ms.

        Args:
            start: The timestamp at which the time begins.
            end: The timestamp at which it ends.
            divisor: Which output tokens of the request the time is divided by.
            is_weighted: True if a request counts in the sample once for each of these tokens, and
                False if it counts once.
        """
        definition = _LatencyDefinition(start, end, divisor, is_weighted)
        return self._get_or_create_sample(definition)

    def _get_or_create_sample(self, definition: _LatencyDefinition) -> DerivedSample:
        """Return the sample of a latency. Equivalent definitions share one sample object.

        Definitions are equivalent if their timestamps are equal in every request, so each timestamp
        is first replaced by the one that stands for all equal ones.
        """
        canonical = definition._replace(
            start=self._canonical_timestamp(definition.start),
            end=self._canonical_timestamp(definition.end),
        )
        if canonical not in self._samples:
            # The sample computes its values when its statistics are needed, to save memory.
            compute_values = functools.partial(self._compute_values, canonical)
            self._samples[canonical] = DerivedSample(compute_values)

        return self._samples[canonical]

    def _compute_values(self, definition: _LatencyDefinition) -> WeightedValues:
        """Return the latency of every successful request in ns, with its weight if it has one."""
        durations_ns = self._durations_ns(definition)
        if definition.divisor is None:
            return WeightedValues(durations_ns.astype(np.float64))

        token_counts = self._select("output_tokens").astype(np.int64)
        if definition.divisor == "tokens_after_first":
            token_counts = token_counts - 1

        values_ns = _divide_by_counts(durations_ns, token_counts)
        return WeightedValues(values_ns, token_counts if definition.is_weighted else None)

    def _durations_ns(self, definition: _LatencyDefinition) -> NDArray[np.int64]:
        """Return the time from `start` to `end` of every successful request."""
        return self.timestamps(definition.end) - self.timestamps(definition.start)

    def _select(self, field: str) -> NDArray[np.int64]:
        return self._columns[field][self._selection]

    def _canonical_timestamp(self, name: Timestamp) -> Timestamp:
        """Return the timestamp that stands for a timestamp and all that equal it in every request.

        It is the first of them in TIMESTAMPS. For example, without any event that has only a role,
        "role_event" equals "first_token_ns" in every request. The result is then "first_token_ns"
        for both. The comparison reads all requests, so its result is cached.
        """
        if name not in self._canonical_timestamps:
            self._canonical_timestamps[name] = self._find_first_equal_timestamp(name)
        return self._canonical_timestamps[name]

    def _find_first_equal_timestamp(self, name: Timestamp) -> Timestamp:
        """Return the first of TIMESTAMPS that has the values of a timestamp: itself or another."""
        values_ns = self.timestamps(name)
        for candidate in TIMESTAMPS:
            if candidate == name:
                break
            if np.array_equal(self.timestamps(candidate), values_ns):
                return candidate
        return name


def _with_role_event_gaps(pooled_gaps: Histogram, latencies: _Latencies) -> Histogram:
    """Return the times between output events with those from role events to first tokens."""
    histogram = Histogram()
    histogram.merge(pooled_gaps)
    role_gaps_ns = latencies.timestamps("first_token_ns") - latencies.timestamps("role_event")
    histogram.add(role_gaps_ns[role_gaps_ns > 0])
    return histogram


def _divide_by_counts(
    durations_ns: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return durations divided by counts, NaN where a count is not above 0."""
    quotients = np.empty(len(durations_ns))
    # Blocks keep the temporary arrays small.
    for block in block_slices(len(durations_ns)):
        quotients[block] = durations_ns[block] / np.maximum(counts[block], 1)
    quotients[counts <= 0] = np.nan
    return quotients
