"""Reads what a simulated server really sent to the other tool, from the log of its sends.

The log tells a slow server from a slow client: the difference between the latency that the other
tool reports and that in the log is the time of its client.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError, of_reading
from loadgen.core.stats.quantiles import quantile_of
from loadgen.explain.our_run import DefinedLatency
from loadgen.interop.sample_statistics import PERCENTILES, WeightedValues
from loadgen.interop.tool_definitions import LatencyDefinition
from loadgen.sim.server.send_log import LoggedRequest, SentRequests, parse_log

NS_PER_MS = 1e6

ENTRY_POINT = "/completions"
"""The end of the paths of requests that generate a response. Others look at the server."""


class ServerTimes(NamedTuple):
    """The responses that a server sent, with an entry for each of them.

    Attributes:
        arrival_ns: When the request had arrived.
        first_send_ns: When its first token was sent.
        last_send_ns: When its last token was sent.
        tokens: The tokens of the response.
        gaps_ns: The times between the sends of all responses. Empty if the log has only the first
            and the last one.
    """

    arrival_ns: NDArray[np.int64]
    first_send_ns: NDArray[np.int64]
    last_send_ns: NDArray[np.int64]
    tokens: NDArray[np.int64]
    gaps_ns: NDArray[np.int64]

    def compute_statistic(self, latency: DefinedLatency, statistic: str) -> float | None:
        """Return a statistic of a latency as the server saw it, in ms; None without values.

        The server's time begins when the request arrives, and a token comes when it is sent.
        """
        sample = self._compute_values(latency.definition, latency.token_scale)
        if len(sample.values) == 0:
            return None
        if statistic == "mean":
            return float(np.average(sample.values, weights=sample.weights)) / NS_PER_MS
        if latency.percentiles == "element" and sample.weights is None:
            return quantile_of(sample.values, PERCENTILES[statistic]) / NS_PER_MS
        return sample.percentiles((statistic,))[statistic]

    def _compute_values(self, definition: LatencyDefinition, token_scale: float) -> WeightedValues:
        """Return the values of a latency in ns, with weights if requests have different ones.

        Args:
            definition: The latency.
            token_scale: The tokens that the other tool counted for each token of the log.
        """
        if definition.unit == "gap":
            split_count = round(len(self.gaps_ns) * (token_scale - 1))
            zeros = np.zeros(split_count)  # further tokens of the same event
            return WeightedValues(np.concatenate([self.gaps_ns.astype(np.float64), zeros]))

        is_from_request = definition.start in ("due_ns", "sent_ns")
        start_ns = self.arrival_ns if is_from_request else self.first_send_ns
        is_to_end = definition.end in ("last_token_ns", "end_ns")
        end_ns = self.last_send_ns if is_to_end else self.first_send_ns
        durations_ns = (end_ns - start_ns).astype(np.float64)
        if definition.divisor is None:
            return WeightedValues(durations_ns)

        tokens = self.tokens * token_scale
        counts = tokens if definition.divisor == "all_tokens" else tokens - 1
        has_value = counts > 0
        values_ns = durations_ns[has_value] / counts[has_value]
        weights = counts[has_value].astype(np.int64) if definition.unit == "token" else None
        return WeightedValues(values_ns, weights)


def read_server_times(path: Path, response_count: int | None) -> ServerTimes:
    """Return the responses in a log that `loadgen sim --log FILE` wrote.

    Args:
        path: The log.
        response_count: How many successful responses the other tool reports. Only the last ones in
            the log count, because some tools send requests before their load. None counts all.

    Raises:
        UserError: The file is no such log, or has fewer responses.
    """
    try:
        sent = parse_log(path.read_bytes())
    except OSError as error:
        raise UserError(
            of_reading(error), f"cannot be read: {error.strerror}", str(path), ""
        ) from None
    except (ValueError, msgspec.MsgspecError):
        raise UserError(
            "wrong_format",
            "this is no log of a simulated server",
            str(path),
            "write one with: loadgen sim --log FILE --log-events all",
        ) from None

    times = _collect_times(sent, response_count)
    if response_count is not None and len(times.tokens) < response_count:
        raise UserError(
            "mismatch",
            f"the log has {len(times.tokens)} responses, and the other result has "
            f"{response_count} successful requests",
            str(path),
            "give the log of the server that the other tool measured, with --log-events all",
        )
    return times


def _collect_times(sent: SentRequests, response_count: int | None) -> ServerTimes:
    """Return the times of the last responses in a log, in the order of their arrival."""
    sends_by_request = _group_sends(sent)
    responses = [
        request
        for request in sent.requests
        if request.path.endswith(ENTRY_POINT)
        and not request.fault
        and len(sends_by_request.get(request.number, ())) > 1
    ]
    responses.sort(key=_arrival_ns)
    if response_count is not None:
        responses = responses[-response_count:]

    sends = [sends_by_request[response.number] for response in responses]
    has_all_sends = all(
        len(times) == response.output_tokens
        for response, times in zip(responses, sends, strict=True)
    )
    gaps = [np.diff(times) for times in sends] if has_all_sends else []
    return ServerTimes(
        arrival_ns=np.array([response.arrival_ns for response in responses], np.int64),
        first_send_ns=np.array([times[0] for times in sends], np.int64),
        last_send_ns=np.array([times[-1] for times in sends], np.int64),
        tokens=np.array([response.output_tokens for response in responses], np.int64),
        gaps_ns=np.concatenate(gaps) if gaps else np.zeros(0, np.int64),
    )


def _arrival_ns(request: LoggedRequest) -> int:
    """Return when a request arrived."""
    return request.arrival_ns


def _group_sends(sent: SentRequests) -> Mapping[int, NDArray[np.int64]]:
    """Return the times of the sends of each request, in order, by its number."""
    order = np.lexsort((sent.event, sent.request))
    numbers, first_indices = np.unique(sent.request[order], return_index=True)
    times = np.split(sent.sent_ns[order], first_indices[1:])
    return dict(zip(numbers.tolist(), times, strict=True))
