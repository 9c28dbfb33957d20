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

SILENT = object()
"""Stands for a response that never ends. It keeps its connection busy until the client leaves."""


class ResponseSender:
    """The responses that wait for tokens of the engine."""

    def __init__(
        self,
        setup: EngineSetup,
        counters: ServerCounters,
        metrics: ServerMetrics,
        log: SendLog,
    ) -> None:
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

        An injected failure may end the response here, before any token. A client may also have
        closed its connection by now.
        """
        connection: Connection = response.connection
        data, continuation = response.opening_output()
        if data:
            connection.write(data)
        if continuation is not Continuation.MORE_BYTES:
            self._end(response, continuation)
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

        Most emissions are one plain token. They are sent here, without a call per token, because
        the time for them bounds the load that this server can simulate.
        """
        self._start_delayed(now_ns)
        counters = self._counters
        log_rows = self._log.rows
        logs_all = self._log.logs_all
        clock_ns = time.monotonic_ns
        for emission in self._engine.advance(now_ns):
            response = emission.key
            connection = response.connection
            if connection.closed or connection.response is not response:
                self._advance_sequence(emission)
                continue
            index = response.tokens_sent
            if response.is_plain and index and emission.tokens == 1 and not emission.is_last:
                # The word of the token that `wire_format.token_ids` returns for this index.
                word = TOKEN_WORDS[response.digest[index & 63] ^ (index >> 6 & 255)]
                data = response.head + word + response.tail
                event_index = response.events_sent
                response.tokens_sent = index + 1
                response.events_sent = event_index + 1
                counters.events += 1
                if logs_all:
                    log_rows.extend(
                        (response.request_number, event_index, emission.due_ns, clock_ns())
                    )
                connection.write(data)
            else:
                self._send(response, emission)
        self._reset_lost_connections()

    def _submit(self, response: SimResponse, start_ns: int) -> None:
        """Submit the request of a response to the engine, with the response as its key.

        A request for values (embeddings, rerank) has one sequence per text instead. Only a physical
        engine uses the blocks of the prompt.
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
        """Start the responses whose start was put off until now."""
        while self._delayed and self._delayed[0][0] <= now_ns:
            start_ns, _, response = heapq.heappop(self._delayed)
            if not response.connection.closed:
                self.start(response, start_ns)

    def _advance_sequence(self, emission: Emission) -> None:
        """Note that one of the sequences that a response waits for is prefilled.

        After the last one, the response is sent. The emission may also be a token of a response
        that has ended since the engine planned it; such an emission is ignored.
        """
        sequence = emission.key
        connection = sequence.connection
        if connection.closed or not isinstance(sequence, PrefillSequence):
            return
        response = sequence.response
        if connection.response is not response:
            return
        response.sequences.remove(sequence)
        if not response.sequences:
            self._send(response, emission)

    def _send(self, response: SimResponse, emission: Emission) -> None:
        """Send the events of an emission, and end the response after its last one.

        With the failure `split`, each byte is written separately.
        """
        connection: Connection = response.connection
        is_first = not response.tokens_sent
        if is_first and response.engine_request is not None:
            response.request.cached_tokens = response.engine_request.cached_tokens
        first_event = response.events_sent
        # Timings in the response are planned times, not the times of the sends.
        data, continuation = response.next_output(
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
            timing = response.timing(emission.due_ns)
            self._metrics.add_finished(response.request_number, response.request, timing)
        if continuation is not Continuation.MORE_BYTES:
            self._end(response, continuation)

    def _log_events(self, response: SimResponse, first_event: int, emission: Emission) -> None:
        """Log the events of an emission, or only the first and last event of a response.

        Events are numbered within their response. The time of the send is taken just before it.
        """
        log = self._log
        if response.events_sent == first_event or not log.logs_events:
            return
        if not log.logs_all:
            if first_event and not emission.is_last:
                return
            first_event = response.events_sent - 1
        sent_ns = time.monotonic_ns()
        for event_index in range(first_event, response.events_sent):
            log.rows.extend((response.request_number, event_index, emission.due_ns, sent_ns))

    def _end(self, response: SimResponse, continuation: Continuation) -> None:
        """Do what follows the last bytes of a response.

        What follows is the next request, the end of the connection, or nothing.
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
            connection.response = SILENT

    def _reset_lost_connections(self) -> None:
        """Reset the connections whose requests were at a replica that has gone away."""
        if self._fleet is None:
            return
        while self._fleet.lost_keys:
            key = self._fleet.lost_keys.pop()
            key.connection.reset()
