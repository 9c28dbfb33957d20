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
from loadgen.interop.tool_definitions import LatencyDefinition, TokenDivisor
from loadgen.sim.server.send_log import LoggedRequest, SentRequests, parse_log

ENTRY_POINT = "/completions"
"""The end of the paths of requests that generate a response. Others look at the server."""

REQUEST_STARTS = ("due_ns", "sent_ns")
"""The starts of latencies at a client that correspond to the arrival of a request at the server."""


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
        """Return a statistic of a latency as the server measured it, in ms, or None without values.

        Args:
            latency: How the latency is computed. The server measures from the arrival of a request
                to the time when it sends a token.
            statistic: "mean" or a percentile such as "p99".
        """
        latencies_ns = self._compute_latencies(latency)
        return compute_value_statistic(latencies_ns, latency.percentiles, statistic)

    def _compute_latencies(self, latency: DefinedLatency) -> WeightedValues:
        """Return a latency of each response in ns, as the server measured it.

        A latency per token is the duration of a response divided by its tokens: 1,000 ms for the
        100 tokens after the first one are 10 ms per token. A response of one token, which has none
        after the first one, is left out.
        """
        definition = latency.definition
        if definition.has_value_per_gap:
            return WeightedValues(self._compute_token_gaps(latency.token_scale))

        durations_ns = self._compute_durations(definition)
        if definition.divisor is None:
            return WeightedValues(durations_ns)

        token_counts = self._count_divisor_tokens(definition.divisor, latency.token_scale)
        has_tokens = token_counts > 0
        counts_above_zero = token_counts[has_tokens]
        time_per_token_ns = durations_ns[has_tokens] / counts_above_zero
        if definition.is_weighted_by_tokens:
            return WeightedValues(time_per_token_ns, counts_above_zero.astype(np.int64))
        return WeightedValues(time_per_token_ns, None)

    def _count_divisor_tokens(
        self, divisor: TokenDivisor, token_scale: float
    ) -> NDArray[np.float64]:
        """Return the number of tokens by which the duration of each response is divided.

        Args:
            divisor: "all_tokens", or else the tokens after the first one.
            token_scale: How many tokens the other tool counts for a token of the server. With 1.5,
                a response of 101 tokens has 151.5 tokens, or 150.5 after the first one.
        """
        token_counts: NDArray[np.float64] = self.tokens.astype(np.float64) * token_scale
        return token_counts if divisor == "all_tokens" else token_counts - 1

    def _compute_token_gaps(self, tokens_per_send: float) -> NDArray[np.float64]:
        """Return the times between tokens in ns, which are 0 between tokens of the same send.

        With 2 tokens per send, there are as many zeros as times between sends.
        """
        zero_count = round(len(self.gaps_ns) * (tokens_per_send - 1))
        gaps_ns = self.gaps_ns.astype(np.float64)
        return np.concatenate([gaps_ns, np.zeros(zero_count)])

    def _compute_durations(self, definition: LatencyDefinition) -> NDArray[np.float64]:
        """Return the duration of each response in ns, between the two ends of a latency.

        A latency that starts with a request at the client starts here when the request arrives.
        Every other one starts when the first token is sent. It ends when the first or the last
        token is sent.
        """
        starts_with_request = definition.start in REQUEST_STARTS
        start_ns = self.arrival_ns if starts_with_request else self.first_send_ns
        end_ns = self.last_send_ns if definition.ends_with_response else self.first_send_ns
        return (end_ns - start_ns).astype(np.float64)


def read_server_times(path: Path, response_count: int | None) -> ServerTimes:
    """Return the responses in a log of a simulated server, which `loadgen sim --log FILE` wrote.

    Args:
        path: The log.
        response_count: How many successful responses the other tool reports. Only so many of the
            last responses in the log count, because some tools send requests before their load.
            None counts all responses.

    Raises:
        UserError: The file cannot be read or is no such log, or it has too few responses.
    """
    times = _collect_times(_read_log(path), response_count)
    logged_count = len(times.tokens)
    if response_count is not None and logged_count < response_count:
        raise UserError(
            "mismatch",
            f"the log has {logged_count} responses, and the other result has "
            f"{response_count} successful requests",
            str(path),
            "give the log of the server that the other tool measured, with --log-events all",
        )
    return times


def _read_log(path: Path) -> SentRequests:
    """Return the requests in a log of a simulated server.

    Raises:
        UserError: The file cannot be read, or is no log.
    """
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
    """Return the times of the last responses in a server log, ordered by arrival.

    Args:
        sent: The requests in the log, and the times when the server sent their tokens.
        response_count: How many responses are returned. None returns all of them.
    """
    sends_by_request = _group_sends(sent)
    responses = _list_responses(sent.requests, sends_by_request)
    if response_count is not None:
        responses = responses[-response_count:]

    sends_ns = [sends_by_request[response.number] for response in responses]
    arrivals_ns = [response.arrival_ns for response in responses]
    first_sends_ns = [times_ns[0] for times_ns in sends_ns]
    last_sends_ns = [times_ns[-1] for times_ns in sends_ns]
    token_counts = [response.output_tokens for response in responses]
    input_token_counts = [response.input_tokens for response in responses]
    return ServerTimes(
        arrival_ns=np.array(arrivals_ns, np.int64),
        first_send_ns=np.array(first_sends_ns, np.int64),
        last_send_ns=np.array(last_sends_ns, np.int64),
        tokens=np.array(token_counts, np.int64),
        input_tokens=np.array(input_token_counts, np.int64),
        request_ids=tuple(response.id for response in responses),
        gaps_ns=_compute_send_gaps(sends_ns, token_counts),
    )


def _list_responses(
    requests: Sequence[LoggedRequest], sends_by_request: Mapping[int, NDArray[np.int64]]
) -> list[LoggedRequest]:
    """Return the requests that the server answered completely, ordered by arrival.

    Args:
        requests: The requests in the log of the server.
        sends_by_request: When tokens were sent, by the number of the request. A complete response
            has at least two times: of its first and of its last token.
    """
    responses = []
    for request in requests:
        generates_tokens = request.path.endswith(ENTRY_POINT)
        send_times_ns = sends_by_request.get(request.number, ())
        is_complete = len(send_times_ns) > 1
        has_injected_failure = bool(request.fault)
        if generates_tokens and is_complete and not has_injected_failure:
            responses.append(request)
    return sorted(responses, key=_arrival_ns)


def _compute_send_gaps(
    sends_ns: Sequence[NDArray[np.int64]], token_counts: Sequence[int]
) -> NDArray[np.int64]:
    """Return the times between successive sends of all responses, in ns.

    Return an empty array if the log leaves out sends, so that a response has fewer sends than
    tokens.
    """
    send_counts = [len(times_ns) for times_ns in sends_ns]
    has_all_sends = send_counts == list(token_counts)
    if not sends_ns or not has_all_sends:
        return np.zeros(0, np.int64)
    return np.concatenate([np.diff(times_ns) for times_ns in sends_ns])


def _arrival_ns(request: LoggedRequest) -> int:
    """Return when a request arrived."""
    return request.arrival_ns


def _group_sends(sent: SentRequests) -> Mapping[int, NDArray[np.int64]]:
    """Return when the tokens of each request were sent, in order, by the number of the request."""
    order = np.lexsort((sent.event, sent.request))  # by request, then by event
    numbers, first_indices = np.unique(sent.request[order], return_index=True)
    times_by_request = np.split(sent.sent_ns[order], first_indices[1:])
    return dict(zip(numbers.tolist(), times_by_request, strict=True))
