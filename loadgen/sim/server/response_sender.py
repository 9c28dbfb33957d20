"""Sends responses as their tokens become due in the engine, and logs the sends."""

from __future__ import annotations

import heapq
import time

from loadgen.sim.engine.latency_model import Emission
from loadgen.sim.server.connection import Connection
from loadgen.sim.server.engine_setup import EngineSetup
from loadgen.sim.server.metrics_pages import ServerMetrics
from loadgen.sim.server.pages import ServerCounters
from loadgen.sim.server.response import Continuation, PrefillSequence, SimResponse
from loadgen.sim.server.send_log import SendLog
from loadgen.sim.server.wire_format import TOKEN_WORDS

SILENT_RESPONSE = object()
"""Takes the place of a response that sends nothing more but keeps its connection busy."""


class ResponseSender:
    """Sends the responses that wait for tokens of the engine, and logs when each event was sent."""

    def __init__(
        self,
        setup: EngineSetup,
        counters: ServerCounters,
        metrics: ServerMetrics,
        log: SendLog,
    ) -> None:
        """Create a sender without responses.

        Args:
            setup: The engine that generates the tokens.
            counters: Counters of the server, which the sender increases.
            metrics: Metrics of the server, to which finished requests are added.
            log: The log of events, if events are logged.
        """
        self._engine = setup.engine
        self._fleet = setup.fleet
        self._counters = counters
        self._metrics = metrics
        self._log = log
        # A heap of responses that start later, as (start time in ns, request number, response).
        self._delayed: list[tuple[int, int, SimResponse]] = []

    def start_later(self, response: SimResponse, start_ns: int) -> None:
        """Start a response at `start_ns`, unless its connection is closed by then."""
        heapq.heappush(self._delayed, (start_ns, response.request_number, response))

    def start(self, response: SimResponse, start_ns: int) -> None:
        """Send what comes before any token, and submit the request to the engine.

        The request is not submitted if an injected failure has ended the response before any token,
        or if the client has closed its connection by now.

        Args:
            response: The response.
            start_ns: When the request arrives in the engine.
        """
        connection: Connection = response.connection
        data, continuation = response.build_opening_output()
        if data:
            connection.write(data)
        if continuation is not Continuation.MORE_BYTES:
            self._end_response(response, continuation)
        elif not connection.closed:
            self._submit(response, start_ns)

    def cancel(self, response: SimResponse) -> None:
        """Remove a response, and all sequences that it waits for, from the engine."""
        self._engine.cancel(response)
        for sequence in response.sequences:
            self._engine.cancel(sequence)
        response.sequences.clear()  # they refer to the response: break the cycle

    def next_due_ns(self) -> int | None:
        """Return when something has to be done next, or None if there is nothing to do."""
        due_ns = self._engine.next_event_ns()
        if not self._delayed:
            return due_ns
        start_ns = self._delayed[0][0]
        return start_ns if due_ns is None else min(due_ns, start_ns)

    def send_due(self, now_ns: int) -> None:
        """Send everything that is due by `now_ns`.

        Most emissions are one token in a plain event (`SimResponse.has_plain_events`). They are
        formatted and sent in this loop, without further calls of Python functions, because the time
        per token limits the load that this server can simulate. `_send_emission` handles all
        others.
        """
        self._start_delayed(now_ns)
        counters = self._counters
        log_rows = self._log.rows
        logs_all = self._log.logs_all
        clock_ns = time.monotonic_ns
        for emission in self._engine.advance(now_ns):
            response = emission.key
            connection = response.connection
            is_current = connection.response is response
            if connection.closed or not is_current:
                self._handle_sequence_emission(emission)
                continue
            token_index = response.tokens_sent
            if (
                response.has_plain_events
                and token_index  # the first event has the role
                and emission.tokens == 1
                and not emission.is_last
            ):
                # The formula of `wire_format.token_ids`.
                token_id = response.digest[token_index & 63] ^ (token_index >> 6 & 255)
                data = response.chunk_prefix + TOKEN_WORDS[token_id] + response.chunk_suffix
                event_index = response.events_sent
                response.tokens_sent = token_index + 1
                response.events_sent = event_index + 1
                counters.events += 1
                if logs_all:
                    log_rows.extend(
                        (response.request_number, event_index, emission.due_ns, clock_ns())
                    )
                connection.write(data)
            else:
                self._send_emission(response, emission)
        self._reset_lost_connections()

    def _submit(self, response: SimResponse, start_ns: int) -> None:
        """Submit the request of a response to the engine.

        The response is the key of the request in the engine, so each emission names the response
        that it belongs to. A non-generative request (embeddings, rerank) is submitted as one
        sequence per text, each with a key of its own. Only a physical engine (`_fleet`) uses the
        blocks of the prompt.
        """
        request = response.request
        if request.sequence_lengths:
            response.sequences = [PrefillSequence(response) for _ in request.sequence_lengths]
            response.engine_request = self._engine.submit_prefills(
                start_ns, response.sequences, request.sequence_lengths
            )
        elif self._fleet is not None:
            response.engine_request = self._fleet.submit(
                start_ns, response, request.input_tokens, request.output_tokens, request.blocks
            )
        else:
            self._engine.submit(start_ns, response, request.input_tokens, request.output_tokens)

    def _start_delayed(self, now_ns: int) -> None:
        """Start the responses that were delayed until now, if their connections are still open."""
        while self._delayed and self._delayed[0][0] <= now_ns:
            start_ns, _, response = heapq.heappop(self._delayed)
            if not response.connection.closed:
                self.start(response, start_ns)

    def _handle_sequence_emission(self, emission: Emission) -> None:
        """Handle the end of the prefill of one sequence of a non-generative request.

        After the last of its sequences, the response is sent. An emission for a response that has
        ended in the meantime is ignored.
        """
        sequence = emission.key
        if not isinstance(sequence, PrefillSequence):
            return  # a token of a response that has ended
        response = sequence.response
        connection = response.connection
        if connection.closed or connection.response is not response:
            return
        response.sequences.remove(sequence)
        if not response.sequences:
            self._send_emission(response, emission)

    def _send_emission(self, response: SimResponse, emission: Emission) -> None:
        """Send the tokens of an emission, and end the response after its last one.

        With the injected failure `split`, each byte is written separately.
        """
        connection: Connection = response.connection
        is_first = not response.tokens_sent
        if is_first and response.engine_request is not None:
            response.request.cached_tokens = response.engine_request.cached_tokens
        first_event = response.events_sent
        # Timings in the response are planned times, not the times of the sends.
        data, continuation = response.build_next_output(
            emission.tokens, emission.is_last, emission.due_ns
        )
        self._counters.events += response.events_sent - first_event
        if response.failure_name == "split":
            for index in range(len(data) - 1):
                connection.write(data[index : index + 1])
            data = data[-1:]
        self._log_events(response, first_event, emission)
        connection.write(data)
        if continuation is Continuation.NEXT_REQUEST:
            self._counters.completed += 1
            timing = response.build_timing(emission.due_ns)
            self._metrics.add_finished(response.request_number, response.request, timing)
        if continuation is not Continuation.MORE_BYTES:
            self._end_response(response, continuation)

    def _log_events(self, response: SimResponse, first_event: int, emission: Emission) -> None:
        """Log the events of an emission just before they are sent.

        Depending on the options of the log, these are all events, only the first and the last event
        of a response, or none.

        Args:
            response: The response.
            first_event: The number of the first event of the emission within the response. The
                number after its last event is `response.events_sent`.
            emission: The emission, which has the planned time of the events.
        """
        log = self._log
        has_events = response.events_sent > first_event
        if not has_events or not log.logs_events:
            return
        if log.logs_all:
            logged_events = range(first_event, response.events_sent)
        elif first_event == 0 or emission.is_last:
            logged_events = range(response.events_sent - 1, response.events_sent)
        else:
            return
        sent_ns = time.monotonic_ns()
        for event_index in logged_events:
            log.rows.extend((response.request_number, event_index, emission.due_ns, sent_ns))

    def _end_response(self, response: SimResponse, continuation: Continuation) -> None:
        """Remove a response from the engine, and continue, close or reset its connection.

        `continuation` is what follows the last bytes of the response. With SILENCE, nothing more is
        sent, and the connection stays busy until the client closes it.
        """
        connection: Connection = response.connection
        self.cancel(response)
        if continuation is Continuation.NEXT_REQUEST:
            connection.finish_response(response.keep_alive)
        elif continuation is Continuation.RESET:
            connection.reset()
        elif continuation is Continuation.CLOSE:
            connection.finish_response(False)
        else:
            connection.response = SILENT_RESPONSE

    def _reset_lost_connections(self) -> None:
        """Reset the connections whose requests were at a replica that was removed."""
        if self._fleet is None:
            return
        while self._fleet.lost_keys:
            key = self._fleet.lost_keys.pop()
            key.connection.reset()
