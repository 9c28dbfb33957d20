"""Counts of requests by status, error and finish reason, and the bytes that they moved. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics.accumulator import FINISH_PREFIX
from loadgen.core.metrics.columns import join_arrays
from loadgen.core.stats.quantiles import milliseconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.accumulator import MetricAccumulator

NUMBERS_PER_REQUEST = 4
EXTRA_NUMBERS = 1_000
"""Repeated request numbers are found with a table if the numbers span at most NUMBERS_PER_REQUEST
times the requests plus EXTRA_NUMBERS, else by a sort."""


FAILED_TURN = "previous_turn_failed"
"""The kind of error of a request that was dropped because the one before it failed."""


INTERRUPTED = "interrupted"
"""The kind of error of a request that was cancelled because the run was stopped."""


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the wire, heads and bodies, of measured requests of any status."""

    sent: int
    received: int


class ErrorKind(msgspec.Struct, frozen=True, kw_only=True):
    """The number of failures of a kind, and the text of the one that was due first."""

    count: int
    first_text: str


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by status.

    ok + failed + dropped + cancelled + unfinished + lost = scheduled, always.

    Attributes:
        scheduled: All requests.
        ok: Requests with a complete response.
        failed: Requests that the server or the path to it failed.
        dropped: Requests that the client did not send because of a cap.
        cancelled: Requests that the user cut.
        unfinished: Requests that the end of the drain cut.
        lost: Requests without a record, and those of workers that died.
        resent: Requests that were sent again on a new connection.
        by_error: Failures by kind, most frequent first.
        by_finish: Ok requests by the finish reason that the server gave, most frequent first.
    """

    scheduled: int
    ok: int
    failed: int
    dropped: int
    cancelled: int
    unfinished: int = 0
    lost: int
    resent: int
    by_error: dict[str, ErrorKind]
    by_finish: dict[str, int] = {}

    @property
    def decided(self) -> int:
        """Requests with an outcome: all but those that the user or the end of the drain cut."""
        return self.scheduled - self.cancelled - self.unfinished

    @property
    def failed_by_client(self) -> int:
        """Requests lost with a worker, or failed because this host ran out of a resource."""
        return self.lost + self._count_of_error("client_resource")

    @property
    def failed_by_server(self) -> int:
        """Requests that failed at the server or on the path to it."""
        return self.failed + self.lost - self.failed_by_client

    @property
    def dropped_share(self) -> float:
        """The share of the requests that the client dropped, which means that it did not send them.

        The client drops a request if too many requests are in flight. It also drops the rest of a
        conversation after a failed request. If it dropped nothing else, the share is 0.
        """
        not_cancelled = self.scheduled - self.cancelled
        if not_cancelled == 0:
            return 0.0

        dropped_after_failure = self._count_of_error(FAILED_TURN)
        if self.dropped <= dropped_after_failure:
            return 0.0

        return self.dropped / not_cancelled

    @property
    def errors_of_unstopped_requests(self) -> dict[str, ErrorKind]:
        """The errors, without requests that were cancelled because the run was stopped.

        The count `cancelled` already reports these, so that a report does not name them twice.
        """
        return {kind: error for kind, error in self.by_error.items() if kind != INTERRUPTED}

    def _count_of_error(self, kind: str) -> int:
        """Return the number of errors of a kind, which is 0 if it did not occur."""
        return self.by_error[kind].count if kind in self.by_error else 0


class Stalls(msgspec.Struct, frozen=True, kw_only=True):
    """Ok requests with a gap between output events of more than `over_ms`.

    The counts are None if the gaps are withheld.
    """

    over_ms: float
    requests: int | None
    share: float | None


def total_bytes(accumulator: MetricAccumulator) -> Bytes:
    """Return the bytes sent and received, of requests of any status."""
    return Bytes(sent=accumulator.sum("bytes_sent"), received=accumulator.sum("bytes_received"))


def count_requests(accumulator: MetricAccumulator, unrecorded: int) -> RequestCounts:
    """Return the number of requests by status, by kind of error and by finish reason.

    Args:
        accumulator: The requests that have a record.
        unrecorded: The number of requests without a record, which count as lost.
    """
    return RequestCounts(
        scheduled=accumulator.sum("recorded") + unrecorded,
        ok=accumulator.sum("ok"),
        failed=accumulator.sum("failed"),
        dropped=accumulator.sum("dropped"),
        cancelled=accumulator.sum("cancelled"),
        unfinished=accumulator.sum("unfinished"),
        lost=accumulator.sum("lost") + unrecorded,
        resent=accumulator.sum("resent"),
        by_error=_count_errors(accumulator, unrecorded),
        by_finish=accumulator.sums_with_prefix(FINISH_PREFIX),
    )


def _count_errors(accumulator: MetricAccumulator, unrecorded: int) -> dict[str, ErrorKind]:
    """Return the number of failures of each kind, the most frequent first."""
    errors = {
        kind: ErrorKind(count=failures.requests, first_text=failures.text)
        for kind, failures in accumulator.failures.items()
    }
    if unrecorded:
        text = "planned or sent, but its record is missing"
        errors["no_record"] = ErrorKind(count=unrecorded, first_text=text)

    most_frequent_first = sorted(errors.items(), key=lambda item: (-item[1].count, item[0]))
    return dict(most_frequent_first)


def count_stalls(accumulator: MetricAccumulator) -> Stalls:
    """Return the ok requests with a gap between output events of more than `limits.STALL_NS`."""
    stalled = accumulator.sum("stalled")
    ok = accumulator.sum("ok")
    return Stalls(
        over_ms=milliseconds(STALL_NS), requests=stalled, share=stalled / ok if ok else None
    )


def count_repeated_prompts(accumulator: MetricAccumulator) -> int:
    """Return the number of sent requests with a prompt that was sent before.

    The id of a request determines its prompt. So if the ids 3, 4, 3 and 3 were sent, two prompts
    are repeated.
    """
    sent_ids = join_arrays(
        [columns["request"][columns.is_known("sent_ns")] for columns in accumulator.columns]
    )
    return len(sent_ids) - _count_distinct(sent_ids)


def _count_distinct(numbers: NDArray[np.int64]) -> int:
    """Return how many different numbers there are: 2 for 7, 9 and 7."""
    if not len(numbers):
        return 0

    lowest = int(numbers.min())
    number_range = int(numbers.max()) - lowest
    are_far_apart = number_range >= NUMBERS_PER_REQUEST * len(numbers) + EXTRA_NUMBERS
    if are_far_apart:
        return len(np.unique(numbers))

    # A table with an entry for each possible number is faster than a sort.
    is_present = np.zeros(number_range + 1, bool)
    is_present[numbers - lowest] = True
    return int(np.count_nonzero(is_present))
