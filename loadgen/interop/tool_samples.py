"""The samples of latencies that other tools would have of the records of a run.

`tool_definitions` has the definitions, and `loadgen.formats` describes them in words. The records
have fewer timestamps than some tools use: a response ends at its last output or finish event here,
while some tools include the usage event after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import OK, Columns, as_selection, is_measured, pool_measured_gaps
from loadgen.core.metrics.request_metrics import later_tokens
from loadgen.core.results.manifest import RunManifest
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import block_slices
from loadgen.interop.sample_statistics import DerivedSample, PooledGaps, WeightedValues
from loadgen.interop.tool_definitions import (
    TOOL_DEFINITIONS,
    LatencyDefinition,
    LatencyName,
    Timestamp,
    TokenDivisor,
    ToolDefinitions,
)

TIMESTAMPS: tuple[Timestamp, ...] = (
    "due_ns",
    "sent_ns",
    "first_token_ns",
    "role_event",
    "last_token_ns",
    "end_ns",
)


Sample = DerivedSample | PooledGaps
"""The values of a latency."""


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
    return SuccessfulRequests(columns, columns.has_status(OK) & (columns["first_token_ns"] >= 0))


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

    latencies = LatencySamples(manifest.api, requests, pool_measured_gaps(manifest, gaps))
    return {row.tool: _create_tool_samples(row, latencies) for row in TOOL_DEFINITIONS}


def _create_tool_samples(tool: ToolDefinitions, latencies: LatencySamples) -> ToolSamples:
    """Return the samples of one tool by its own definitions."""

    def find_sample(name: LatencyName) -> Sample | None:
        """Return the sample of a latency, or None if the tool does not report it."""
        latency = tool.find_latency(name)
        return None if latency is None else latencies.sample(latency.definition)

    ttft = find_sample("ttft")
    tpot = find_sample("tpot")
    e2e = find_sample("e2e")
    assert isinstance(ttft, DerivedSample), "every tool has one TTFT per request"
    assert isinstance(e2e, DerivedSample), "every tool has one E2E latency per request"
    assert not isinstance(tpot, PooledGaps), "a TPOT is a value of a request"

    return ToolSamples(ttft=ttft, tpot=tpot, itl=find_sample("itl"), e2e=e2e)


class LatencySamples:
    """Creates samples of the successful requests of a run, one for each different definition.

    A caller computes the statistics of a sample object once, so definitions with the same result
    get the same object. They also have the same result if they use different timestamps that are
    equal in every request, for example of responses without an event that carries only a role.
    """

    def __init__(self, api: str, requests: SuccessfulRequests, pooled_gaps: Histogram) -> None:
        """Prepare the samples without computing any.

        Args:
            api: The API of the run. Only in chat, the first event of a response has only a role.
            requests: The requests.
            pooled_gaps: The times between the output events of all of them.
        """
        self._api = api
        self._columns = requests.columns
        self._selection = as_selection(requests.is_successful)
        self._pooled_gaps = pooled_gaps
        self._canonical_timestamps: dict[Timestamp, Timestamp] = {}
        self._samples: dict[LatencyDefinition, Sample] = {}

    def timestamps(self, name: Timestamp) -> NDArray[np.int64]:
        """Return a timestamp of every successful request."""
        if name != "role_event":
            return self._select(name)
        event_ns = self._select("first_event_ns" if self._api == "chat" else "first_token_ns")
        if event_ns.min(initial=0) >= 0:
            return event_ns
        return np.where(event_ns < 0, self._select("first_token_ns"), event_ns)

    def sample(self, definition: LatencyDefinition) -> Sample:
        """Return the sample of a latency. Equivalent definitions share one sample object.

        Definitions are equivalent if their timestamps are equal in every request, so each timestamp
        is first replaced by the one that stands for all equal ones.
        """
        canonical = definition._replace(
            start=self._canonical_timestamp(definition.start),
            end=self._canonical_timestamp(definition.end),
        )
        if canonical not in self._samples:
            self._samples[canonical] = self._create_sample(canonical)

        return self._samples[canonical]

    def _create_sample(self, definition: LatencyDefinition) -> Sample:
        """Return a new sample. It computes its values when they are needed, to save memory."""
        if definition.unit != "gap":
            return DerivedSample(functools.partial(self._compute_values, definition))
        if definition.start == "role_event":
            return PooledGaps(_with_role_event_gaps(self._pooled_gaps, self))
        return PooledGaps(self._pooled_gaps)

    def _compute_values(self, definition: LatencyDefinition) -> WeightedValues:
        """Return the latency of every successful request in ns, with its weight if it has one."""
        durations_ns = self._durations_ns(definition)
        if definition.divisor is None:
            return WeightedValues(durations_ns.astype(np.float64))

        token_counts = self.token_counts(definition.divisor)
        values_ns = _divide_by_counts(durations_ns, token_counts)
        if definition.divisor == "tokens_after_first_event":
            # loadgen's own TPOT is undefined if all output came at one instant.
            values_ns[durations_ns == 0] = np.nan

        is_weighted = definition.unit == "token"
        return WeightedValues(values_ns, token_counts if is_weighted else None)

    def token_counts(self, divisor: TokenDivisor) -> NDArray[np.int64]:
        """Return the tokens of every successful request that a latency is divided by."""
        if divisor == "tokens_after_first_event":
            return later_tokens(self._columns)[self._selection].astype(np.int64)

        output_tokens = self._select("output_tokens").astype(np.int64)
        return output_tokens - 1 if divisor == "tokens_after_first" else output_tokens

    def _durations_ns(self, definition: LatencyDefinition) -> NDArray[np.int64]:
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


def _with_role_event_gaps(pooled_gaps: Histogram, latencies: LatencySamples) -> Histogram:
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
