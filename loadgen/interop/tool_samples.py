"""The samples of latencies that other tools would have of the records of a run.

`loadgen.formats` describes the definitions in words. The records have fewer timestamps than some
tools use: a response ends at its last output or finish event here, while some tools include the
usage event after it.
"""

from __future__ import annotations

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
    ttft = latencies.between("sent_ns", "first_token_ns")
    e2e = latencies.between("sent_ns", "end_ns")
    tpot_to_end = latencies.per_token("first_token_ns", "end_ns")
    itl = PooledGaps(pooled_gaps)
    return {
        # It takes the first event for the first token, even if it has only a role and no text.
        "vllm bench serve": ToolSamples(
            ttft=latencies.between("sent_ns", "role_event"),
            tpot=latencies.per_token("role_event", "end_ns"),
            itl=PooledGaps(_with_role_event_gaps(pooled_gaps, latencies)),
            e2e=e2e,
        ),
        "SGLang bench_serving": ToolSamples(ttft=ttft, tpot=tpot_to_end, itl=itl, e2e=e2e),
        # Its ITL is one mean per request, which other tools call TPOT.
        "AIPerf": ToolSamples(ttft=ttft, tpot=None, itl=tpot_to_end, e2e=e2e),
        "GuideLLM": _guidellm_samples(latencies, ttft, e2e),
        # Its TPOT ends at the last token, not at the end of the response.
        "inference-perf": ToolSamples(
            ttft=ttft,
            tpot=latencies.per_token("first_token_ns", "last_token_ns"),
            itl=itl,
            e2e=e2e,
        ),
        "genai-bench": ToolSamples(ttft=ttft, tpot=tpot_to_end, itl=None, e2e=e2e),
        "mlcommons/endpoints": ToolSamples(ttft=ttft, tpot=tpot_to_end, itl=None, e2e=e2e),
    }


def _guidellm_samples(
    latencies: _Latencies, ttft: DerivedSample, e2e: DerivedSample
) -> ToolSamples:
    """Return the samples of GuideLLM, in which each output token counts once, not each request.

    Its TPOT includes the time to the first token, so it is divided by all tokens. Its ITL is
    divided by all tokens but the first.
    """
    return ToolSamples(
        ttft=ttft,
        tpot=latencies.per_token("sent_ns", "last_token_ns", uncounted_tokens=0, is_weighted=True),
        itl=latencies.per_token("first_token_ns", "last_token_ns", is_weighted=True),
        e2e=e2e,
    )


class _SampleKey(NamedTuple):
    """The definition of a latency, by which samples are shared. See `_Latencies.per_token`."""

    start: Timestamp
    end: Timestamp
    uncounted_tokens: int | None = None  # None for a latency that is not divided by tokens
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
        self._equal_timestamps: dict[Timestamp, Timestamp] = {}
        self._samples: dict[_SampleKey, DerivedSample] = {}

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
        return self._get_or_create_sample(_SampleKey(start, end))

    def per_token(
        self,
        start: Timestamp,
        end: Timestamp,
        *,
        uncounted_tokens: int = 1,
        is_weighted: bool = False,
    ) -> DerivedSample:
        """Return a sample of the time between two timestamps divided by tokens, such as the TPOT.

        Args:
            start: The timestamp at which the time begins.
            end: The timestamp at which it ends.
            uncounted_tokens: How many output tokens of a request are not counted in the divisor. It
                is 1 for a time that begins with the first token.
            is_weighted: True if a request counts in the sample once for each counted token.
        """
        return self._get_or_create_sample(_SampleKey(start, end, uncounted_tokens, is_weighted))

    def _get_or_create_sample(self, definition: _SampleKey) -> DerivedSample:
        """Return the sample of a definition, the same object for all equivalent definitions."""
        key = definition._replace(
            start=self._find_equal_timestamp(definition.start),
            end=self._find_equal_timestamp(definition.end),
        )
        if key not in self._samples:
            # The values are computed only when the statistics of the sample are needed.
            self._samples[key] = DerivedSample(lambda: self._compute_values(key))
        return self._samples[key]

    def _compute_values(self, key: _SampleKey) -> WeightedValues:
        """Return the latency of every successful request in ns, with its weight if it has one."""
        durations_ns = self._durations_ns(key)
        if key.uncounted_tokens is None:
            return WeightedValues(durations_ns.astype(np.float64))
        token_counts = self._select("output_tokens").astype(np.int64) - key.uncounted_tokens
        values_ns = _divide_by_counts(durations_ns, token_counts)
        return WeightedValues(values_ns, token_counts if key.is_weighted else None)

    def _durations_ns(self, key: _SampleKey) -> NDArray[np.int64]:
        """Return the time from `start` to `end` of every successful request."""
        return self.timestamps(key.end) - self.timestamps(key.start)

    def _select(self, field: str) -> NDArray[np.int64]:
        return self._columns[field][self._selection]

    def _find_equal_timestamp(self, name: Timestamp) -> Timestamp:
        """Return the first of TIMESTAMPS that equals a timestamp in every request.

        For example, "role_event" equals "first_token_ns" if no response begins with an event that
        has only a role. The result is then "first_token_ns" for both names. The comparison reads
        all requests, so its result is kept.
        """
        if name not in self._equal_timestamps:
            self._equal_timestamps[name] = self._compare_timestamps(name)
        return self._equal_timestamps[name]

    def _compare_timestamps(self, name: Timestamp) -> Timestamp:
        """Return the first of TIMESTAMPS whose values are those of a timestamp."""
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
