"""Reads what a simulated server really sent to the other tool, from the log of its sends.

The log tells a slow server from a slow client: the difference between the latency that the other
tool reports and that in the log is the time of its client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError, of_reading
from loadgen.explain.our_run import DefinedLatency, compute_value_statistic
from loadgen.interop.sample_statistics import WeightedValues
from loadgen.interop.tool_definitions import LatencyDefinition
from loadgen.sim.server.send_log import LoggedRequest, SentRequests, parse_log

ENTRY_POINT = "/completions"
"""The end of the paths of requests that generate a response. Others look at the server."""


class ServerTimes(NamedTuple):
    """The responses that a server sent, with an entry for each of them.

    Attributes:
        arrival_ns: When the request had arrived.
        first_send_ns: When its first token was sent.
        last_send_ns: When its last token was sent.
        tokens: The tokens of the response.
        input_tokens: The tokens of the prompt, as the server counted them.
        request_ids: The X-Request-Id of the request, "" if it had none.
        gaps_ns: The times between the sends of all responses. Empty if the log has only the first
            and the last one.
    """

    arrival_ns: NDArray[np.int64]
    first_send_ns: NDArray[np.int64]
    last_send_ns: NDArray[np.int64]
    tokens: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    request_ids: tuple[str, ...]
    gaps_ns: NDArray[np.int64]

    @property
    def mean_input_tokens(self) -> float:
        """The mean tokens of a prompt. There is at least one response."""
        return float(self.input_tokens.mean())

    @property
    def mean_output_tokens(self) -> float:
        """The mean tokens of a response. There is at least one response."""
        return float(self.tokens.mean())

    def compute_statistic(self, latency: DefinedLatency, statistic: str) -> float | None:
        """Return a statistic of a latency as the server saw it, in ms; None without values.

        The statistic is "mean" or a percentile such as "p99". The server measures from the arrival
        of a request, and to the time when it sends a token.
        """
        latencies_ns = self._compute_latencies(latency)
        return compute_value_statistic(latencies_ns, latency.percentiles, statistic)

    def _compute_latencies(self, latency: DefinedLatency) -> WeightedValues:
        """Return a latency of each response in ns.

        A latency per token leaves out responses without a token to divide by. It has weights if
        each token counts once, not each response.
        """
        definition = latency.definition
        if definition.unit == "gap":
            return WeightedValues(self._compute_token_gaps(latency.token_scale))

        durations_ns = self._compute_durations(definition)
        if definition.divisor is None:
            return WeightedValues(durations_ns)

        token_counts = self.tokens * latency.token_scale
        if definition.divisor != "all_tokens":
            token_counts -= 1
        has_tokens = token_counts > 0
        counts = token_counts[has_tokens]
        weights = counts.astype(np.int64) if definition.unit == "token" else None
        return WeightedValues(durations_ns[has_tokens] / counts, weights)

    def _compute_token_gaps(self, tokens_per_send: float) -> NDArray[np.float64]:
        """Return the times between tokens in ns. Those between tokens of the same send are 0."""
        zero_count = round(len(self.gaps_ns) * (tokens_per_send - 1))
        return np.concatenate([self.gaps_ns.astype(np.float64), np.zeros(zero_count)])

    def _compute_durations(self, definition: LatencyDefinition) -> NDArray[np.float64]:
        """Return the time of each response in ns from the start to the end of a latency."""
        starts_with_request = definition.start in ("due_ns", "sent_ns")
        start_ns = self.arrival_ns if starts_with_request else self.first_send_ns
        ends_with_response = definition.end in ("last_token_ns", "end_ns")
        end_ns = self.last_send_ns if ends_with_response else self.first_send_ns
        return (end_ns - start_ns).astype(np.float64)


def read_server_times(path: Path, response_count: int | None) -> ServerTimes:
    """Return the responses in a log of a simulated server, which `loadgen sim --log FILE` wrote.

    Args:
        path: The log.
        response_count: How many successful responses the other tool reports. Only the last ones in
            the log count, because some tools send requests before their load. None counts all.

    Raises:
        UserError: The file cannot be read or is no such log, or it has fewer responses.
    """
    times = _collect_times(_read_log(path), response_count)
    if response_count is not None and len(times.tokens) < response_count:
        raise UserError(
            "mismatch",
            f"the log has {len(times.tokens)} responses, and the other result has "
            f"{response_count} successful requests",
            str(path),
            "give the log of the server that the other tool measured, with --log-events all",
        )
    return times


def _read_log(path: Path) -> SentRequests:
    """Return the content of a log. Raises UserError if it cannot be read or is no log."""
    try:
        return parse_log(path.read_bytes())
    except OSError as error:
        raise UserError(
            of_reading(error),
            f"cannot be read: {error.strerror}",
            str(path),
            "give the file that loadgen sim --log FILE wrote when it was stopped",
        ) from None
    except (ValueError, msgspec.MsgspecError):
        raise UserError(
            "wrong_format",
            "this is no log of a simulated server",
            str(path),
            "write one with: loadgen sim --log FILE --log-events all",
        ) from None


def _collect_times(sent: SentRequests, response_count: int | None) -> ServerTimes:
    """Return the times of the responses that arrived last, in the order of their arrival.

    A response_count of None takes all responses in the log.
    """
    sends_by_request = _group_sends(sent)
    responses = _list_responses(sent.requests, sends_by_request)
    if response_count is not None:
        responses = responses[-response_count:]

    sends_ns = [sends_by_request[response.number] for response in responses]
    token_counts = [response.output_tokens for response in responses]
    return ServerTimes(
        arrival_ns=np.array([response.arrival_ns for response in responses], np.int64),
        first_send_ns=np.array([times_ns[0] for times_ns in sends_ns], np.int64),
        last_send_ns=np.array([times_ns[-1] for times_ns in sends_ns], np.int64),
        tokens=np.array(token_counts, np.int64),
        input_tokens=np.array([response.input_tokens for response in responses], np.int64),
        request_ids=tuple(response.id for response in responses),
        gaps_ns=_compute_send_gaps(sends_ns, token_counts),
    )


def _list_responses(
    requests: Sequence[LoggedRequest], sends_by_request: Mapping[int, NDArray[np.int64]]
) -> list[LoggedRequest]:
    """Return the requests that were answered with tokens and without a fault, by arrival.

    The log has the first and the last send of each response, so one with fewer sends is not whole.
    """
    responses = []
    for request in requests:
        generates_tokens = request.path.endswith(ENTRY_POINT)
        is_whole = len(sends_by_request.get(request.number, ())) > 1
        if generates_tokens and is_whole and not request.fault:
            responses.append(request)
    return sorted(responses, key=_arrival_ns)


def _compute_send_gaps(
    sends_ns: Sequence[NDArray[np.int64]], token_counts: Sequence[int]
) -> NDArray[np.int64]:
    """Return the times between the sends of all responses, or none if the log leaves out sends."""
    has_all_sends = [len(times_ns) for times_ns in sends_ns] == list(token_counts)
    if not sends_ns or not has_all_sends:
        return np.zeros(0, np.int64)
    return np.concatenate([np.diff(times_ns) for times_ns in sends_ns])


def _arrival_ns(request: LoggedRequest) -> int:
    """Return when a request arrived."""
    return request.arrival_ns


def _group_sends(sent: SentRequests) -> Mapping[int, NDArray[np.int64]]:
    """Return the times of the sends of each request, in order, by its number."""
    order = np.lexsort((sent.event, sent.request))
    numbers, first_indices = np.unique(sent.request[order], return_index=True)
    times = np.split(sent.sent_ns[order], first_indices[1:])
    return dict(zip(numbers.tolist(), times, strict=True))
