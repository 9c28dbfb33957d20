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
        self._unfinished_responses: set[SimResponse] = set()
        # A heap of responses that start later, as (start time in ns, request number, response).
        self._delayed: list[tuple[int, int, SimResponse]] = []

    @property
    def in_flight(self) -> int:
        """The number of responses that have started and not ended."""
        return len(self._unfinished_responses)

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
            self._unfinished_responses.add(response)
            self._submit(response, start_ns)

    def cancel(self, response: SimResponse) -> None:
        """Remove a response, and all sequences that it waits for, from the engine."""
        self._unfinished_responses.discard(response)
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

        The engine returns emissions: tokens of one request that are due together. The field `key`
        is the object for which the request was submitted to the engine. There are two kinds:

        - PrefillSequence: one text of an embeddings or rerank request. Its prefill has ended.
        - SimResponse: the response to any other request. The tokens are sent in it.

        Most emissions are one token in the middle of a stream. Such events differ only in one word
        (plain events), so `_send_plain_event` needs no JSON encoding. This matters, because the
        time per token limits the load that this server can simulate.
        """
        self._start_delayed(now_ns)
        for emission in self._engine.advance(now_ns):
            if isinstance(emission.key, PrefillSequence):
                self._finish_sequence(emission.key, emission)
                continue

            response: SimResponse = emission.key
            connection = response.connection
            has_ended = connection.closed or connection.response is not response
            if has_ended:
                continue

            # The first event of a stream also has the role, and the last one the finish reason.
            is_in_middle = response.tokens_sent > 0 and not emission.is_last
            has_one_token = emission.tokens == 1
            is_plain_event = response.has_plain_events and is_in_middle and has_one_token
            if is_plain_event:
                self._send_plain_event(response, emission.due_ns)
            else:
                self._send_emission(response, emission)

        self._cancel_lost_requests()

    def _send_plain_event(self, response: SimResponse, due_ns: int) -> None:
        """Send the next token of a response in a plain event, and log the send.

        A plain event has one token and is neither the first nor the last of its response. It is
        logged only if the server logs all events, and not if it logs the first and the last ones.
        """
        event_index = response.events_sent
        data = response.build_plain_event()
        self._counters.events += 1

        if self._log.logs_all:
            sent_ns = time.monotonic_ns()
            log_row = (response.request_number, event_index, due_ns, sent_ns)
            self._log.rows.extend(log_row)  # all rows are in one flat array of numbers

        response.connection.write(data)

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

    def _finish_sequence(self, sequence: PrefillSequence, emission: Emission) -> None:
        """Handle the end of the prefill of one sequence of a non-generative request.

        Such a request (embeddings, rerank) has one sequence per text. After the last of them, the
        response is sent, unless its client has left in the meantime.
        """
        response = sequence.response
        connection = response.connection
        has_ended = connection.closed or connection.response is not response
        if has_ended:
            return

        response.sequences.remove(sequence)
        if not response.sequences:
            self._send_emission(response, emission)

    def _send_emission(self, response: SimResponse, emission: Emission) -> None:
        """Send the tokens of an emission, and end the response after its last one.

        An emission is a number of tokens of one request that are due at the same time.
        """
        self._report_cached_tokens(response)
        first_event = response.events_sent

        # The response also reports times to the client. They are planned times (`due_ns`), and do
        # not depend on how late the server sends.
        data, continuation = response.build_next_output(
            emission.tokens, emission.is_last, emission.due_ns
        )
        new_events = response.events_sent - first_event
        self._counters.events += new_events
        self._write_events(response, data, first_event, emission)

        if continuation is Continuation.NEXT_REQUEST:
            self._count_completed(response, emission.due_ns)

        if continuation is not Continuation.MORE_BYTES:
            self._end_response(response, continuation)

    def _write_events(
        self, response: SimResponse, data: bytes, first_event: int, emission: Emission
    ) -> None:
        """Write events to the connection, and log when they were sent.

        Events are usually written at once. With the injected failure `split`, each byte is written
        by itself. A client has a complete event only after the last write, so the events are logged
        immediately before that write.

        Args:
            response: The response that the events belong to.
            data: The events as bytes.
            first_event: The number of the first event within the response.
            emission: The tokens that the events have, and when they are due.
        """
        connection: Connection = response.connection
        last_write = data
        if response.failure_name == "split":
            _write_bytes_separately(connection, data[:-1])
            last_write = data[-1:]

        self._log_events(response, first_event, emission)
        connection.write(last_write)

    def _report_cached_tokens(self, response: SimResponse) -> None:
        """Let the usage of a response have the number of prompt tokens found in the cache.

        The engine knows it when it has admitted the request, so before the first token.
        """
        is_first_emission = response.tokens_sent == 0
        if is_first_emission and response.engine_request is not None:
            response.request.cached_tokens = response.engine_request.cached_tokens

    def _count_completed(self, response: SimResponse, done_ns: int) -> None:
        """Add a complete response to the counters and the metrics of the server."""
        self._counters.completed += 1
        timing = response.build_timing(done_ns)
        self._metrics.add_finished(response.request_number, response.request, timing)

    def _log_events(self, response: SimResponse, first_event: int, emission: Emission) -> None:
        """Log the events of an emission just before they are sent.

        The server logs no events, all events, or the first and the last event of each response. An
        emission is a number of tokens that are due at the same time. The first emission of a
        response has one event, and its last emission may have several.

        Args:
            response: The response.
            first_event: The index in the response of the first event of the emission. The index
                after the last one is `response.events_sent`.
            emission: The emission, which has the planned time of the events.
        """
        event_indexes = range(first_event, response.events_sent)
        if not event_indexes or not self._log.logs_events:
            return

        if not self._log.logs_all:
            is_first_or_last_emission = first_event == 0 or emission.is_last
            if not is_first_or_last_emission:
                return
            event_indexes = event_indexes[-1:]  # the first or the last event of the response

        sent_ns = time.monotonic_ns()
        for event_index in event_indexes:
            log_row = (response.request_number, event_index, emission.due_ns, sent_ns)
            self._log.rows.extend(log_row)

    def _end_response(self, response: SimResponse, continuation: Continuation) -> None:
        """Remove a response from the engine, and continue, close or reset its connection.

        `continuation` is what follows the last bytes of the response. With SILENCE, nothing more is
        sent, and the connection stays busy until the client closes it.
        """
        connection: Connection = response.connection
        self.cancel(response)

        if continuation is Continuation.NEXT_REQUEST:
            connection.finish_response(response.keep_alive)
        elif continuation is Continuation.CLOSE:
            connection.finish_response(keep_alive=False)
        elif continuation is Continuation.RESET:
            connection.reset()
        else:
            connection.response = SILENT_RESPONSE

    def _cancel_lost_requests(self) -> None:
        """Reset the connections of the requests that were lost with a replica.

        During a run, the number of replicas can change. The engine cancels the requests of a
        removed replica, and their clients lose the connection.
        """
        if self._fleet is None:
            return
        lost_keys = self._fleet.lost_keys
        while lost_keys:
            # The key of a request in the engine is its response, or a sequence of its response.
            # Both know the connection.
            lost_keys.pop().connection.reset()


def _write_bytes_separately(connection: Connection, data: bytes) -> None:
    """Write each byte by itself, for the injected failure `split`."""
    for index in range(len(data)):
        connection.write(data[index : index + 1])
