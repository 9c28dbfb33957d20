"""Groups the queries of a run into super-passes, the unit in which MLPerf Endpoints measures.

Pure. A super-pass is a block of consecutively issued queries, as many as the data set has (rules
§4.4), so that each block has the same mix of lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.record import STATUS

NEVER_NS = -1
"""The time of an event that did not happen."""

QUERY_COLUMNS = (
    "slot",
    "due_ns",
    "first_token_ns",
    "end_ns",
    "status",
    "output_tokens",
    "first_event_tokens",
)
"""The columns of request records that `build_query_log` reads."""

SampleGroups = tuple[NDArray[np.float64], ...]
"""The sorted samples of each super-pass, in nanoseconds."""


class QueryLog(NamedTuple):
    """The events of a run, one entry per issued query, in the order of issue.

    Attributes:
        issued_ns: When the query was issued.
        first_token_ns: When its first token arrived, NEVER_NS if none did.
        completed_ns: When its response was complete, NEVER_NS if it failed.
        later_tokens: The output tokens after the first chunk, 0 if the count is not known.
    """

    issued_ns: NDArray[np.int64]
    first_token_ns: NDArray[np.int64]
    completed_ns: NDArray[np.int64]
    later_tokens: NDArray[np.int64]

    @property
    def ttft_ns(self) -> NDArray[np.float64]:
        """The time from issue to the first token, NaN without a first token."""
        has_first_token = self.first_token_ns != NEVER_NS
        return np.where(has_first_token, self.first_token_ns - self.issued_ns, np.nan)

    @property
    def latency_ns(self) -> NDArray[np.float64]:
        """The time from issue to the complete response, NaN if it never completed."""
        is_completed = self.completed_ns != NEVER_NS
        return np.where(is_completed, self.completed_ns - self.issued_ns, np.nan)

    @property
    def tpot_ns(self) -> NDArray[np.float64]:
        """The time per output token after the first chunk of each query, NaN if it has none.

        TPOT = (completion - first token) / (tokens after the first chunk), by section 2.8 of the
        rules. The tokens of the first chunk arrive with the first token, so they take no time.
        """
        has_first_token = self.first_token_ns != NEVER_NS
        is_completed = self.completed_ns != NEVER_NS
        has_later_tokens = self.later_tokens > 0
        is_defined = has_first_token & is_completed & has_later_tokens

        decode_ns = (self.completed_ns - self.first_token_ns).astype(np.float64)
        divisors = np.maximum(self.later_tokens, 1)  # no division by 0
        return np.where(is_defined, decode_ns / divisors, np.nan)


def order_by_issue(columns: Mapping[str, NDArray[np.int64]]) -> NDArray[np.intp]:
    """Return the indices of the request records in the order in which the queries were issued.

    Queries with the same time are in the order of their numbers in the schedule (slots). Records of
    queries that were never issued are left out.
    """
    due_ns = columns["due_ns"]
    indices = np.lexsort((columns["slot"], due_ns))  # the last key is the first criterion
    is_issued = due_ns[indices] >= 0
    return indices[is_issued]


def build_query_log(columns: Mapping[str, NDArray[np.int64]]) -> QueryLog:
    """Return the times and tokens of the queries of a run, in the order of issue.

    A query is issued at its scheduled time. With a fixed concurrency, this is the time at which an
    earlier query ended. A failed query may have a first token, but has no time of completion.

    Args:
        columns: The fields of the request records, one array for each of QUERY_COLUMNS, in any
            order of the records. Times are in nanoseconds.
    """
    issue_order = order_by_issue(columns)
    issued = {name: np.asarray(columns[name])[issue_order] for name in QUERY_COLUMNS}

    is_completed = (issued["status"] == STATUS["ok"]) & (issued["end_ns"] >= 0)
    completed_ns = np.where(is_completed, issued["end_ns"], NEVER_NS)

    # The first chunk has at least one token. Its count is 0 if it is not known.
    first_chunk_tokens = np.maximum(issued["first_event_tokens"], 1)
    later_tokens = np.maximum(issued["output_tokens"] - first_chunk_tokens, 0)

    return QueryLog(
        issued_ns=issued["due_ns"].astype(np.int64),
        first_token_ns=issued["first_token_ns"].astype(np.int64),
        completed_ns=completed_ns.astype(np.int64),
        later_tokens=later_tokens.astype(np.int64),
    )


@dataclass(frozen=True)
class SuperPasses:
    """The samples of a run, grouped into super-passes. The last super-pass may be incomplete.

    Attributes:
        size: The queries per super-pass.
        queries: The queries of the run.
        issued_ns: When each query was issued, in the order of issue.
        ttft_ns: The samples of TTFT of each super-pass.
        tpot_ns: The samples of TPOT of each super-pass.
        latency_ns: The samples of end-to-end latency of each super-pass.
    """

    size: int
    queries: int
    issued_ns: NDArray[np.int64]
    ttft_ns: SampleGroups
    tpot_ns: SampleGroups
    latency_ns: SampleGroups

    @property
    def count(self) -> int:
        """The number of super-passes."""
        return len(self.ttft_ns)

    def query_range(self, first: int, end: int) -> range:
        """Return the indices of the queries of the super-passes from `first` up to before `end`."""
        first_query = first * self.size
        end_query = min(end * self.size, self.queries)  # the last super-pass may be incomplete
        return range(first_query, end_query)

    def issue_span_s(self, first: int, end: int) -> float:
        """Return the time from the first to the last issued query of some super-passes, in s."""
        query_indices = self.query_range(first, end)
        first_issue_ns = self.issued_ns[query_indices[0]]
        last_issue_ns = self.issued_ns[query_indices[-1]]
        return float(last_issue_ns - first_issue_ns) / 1e9


def group_by_super_pass(log: QueryLog, size: int) -> SuperPasses:
    """Split the queries of a run into super-passes: blocks of `size` consecutive queries.

    `size` is the number of samples of the data set. The last block may be shorter.

    Raises:
        ValueError: The size is not positive, or the queries are not in the order of issue.
    """
    if size <= 0:
        raise ValueError(f"a super-pass needs at least 1 query, not {size}")
    if np.any(np.diff(log.issued_ns) < 0):
        raise ValueError("the queries are not in the order of issue")

    return SuperPasses(
        size=size,
        queries=len(log.issued_ns),
        issued_ns=log.issued_ns,
        ttft_ns=_split_samples(log.ttft_ns, size),
        tpot_ns=_split_samples(log.tpot_ns, size),
        latency_ns=_split_samples(log.latency_ns, size),
    )


def _split_samples(samples: NDArray[np.float64], size: int) -> SampleGroups:
    """Split samples into blocks of `size` entries, drop NaN, and sort each block."""
    blocks = (samples[start : start + size] for start in range(0, len(samples), size))
    return tuple(np.sort(block[~np.isnan(block)]) for block in blocks)


def lower_percentile(sorted_samples: NDArray[np.float64], quantile: float) -> float:
    """Return the sample at index int(quantile * (count - 1)), NaN if there is none.

    The reference detector of MLPerf Endpoints uses this index and never interpolates.
    """
    if len(sorted_samples) == 0:
        return float("nan")

    last_index = len(sorted_samples) - 1
    index = int(quantile * last_index)
    return float(sorted_samples[index])


def percentile_series(
    groups: Sequence[NDArray[np.float64]], quantile: float
) -> NDArray[np.float64]:
    """Return a percentile of each super-pass, NaN for a super-pass without samples."""
    return np.array([lower_percentile(samples, quantile) for samples in groups], dtype=np.float64)


def pool_samples(groups: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the samples of all these super-passes, sorted."""
    if not groups:
        return np.empty(0)
    return np.sort(np.concatenate(groups))
