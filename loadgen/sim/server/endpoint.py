"""The embedded endpoint: an OpenAI-compatible server without a model. One process, one epoll, raw sockets.

It connects the pure modules (dialect: what is written; latency_model or fleet: when; faults: what goes wrong) with
connections and the clock, and logs when each event was really sent. It does not use asyncio: every event is one `send`
in the loop turn that finds it due, and a loop around one epoll adds the least delay between the planned time and the
kernel. Paths starting with `/_` and the request headers `X-Request-Id` (names the request in the log) and `X-Sim-Fault`
(see faults.py) exist only here.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import select
import socket
import time
import traceback
from typing import Any

import msgspec
from loadgen_sdk.transport.timer import TimerFd

from loadgen.core.errors import LoadgenError as Wrong
from loadgen.core.errors import TargetError, UserError, of_reading
from loadgen.sim.engine.fleet import Fleet
from loadgen.sim.engine.latency_model import LatencyModel, parse_distribution, parse_duration_ns
from loadgen.sim.server import fault_injection, tls, wire_format
from loadgen.sim.server.connection import Connection
from loadgen.sim.server.embeddings_api import ValueScript, parse_values
from loadgen.sim.server.http_messages import Incoming, head
from loadgen.sim.server.messages_api import MessageScript, parse_message
from loadgen.sim.server.metrics_pages import ServerMetrics, iteration_stats
from loadgen.sim.server.options import Options
from loadgen.sim.server.request_parser import RequestRules, blocks_of, parse_request
from loadgen.sim.server.response import JSON, End, Sequence, SimResponse
from loadgen.sim.server.responses_api import KeptResponses, ResponseScript, parse_response
from loadgen.sim.server.send_log import LoggedRequest, SendLog
from loadgen.sim.server.wire_format import WORDS, Refusal, Script

FLOOD_EVENTS = 50  # events in one write when flooding
TIDY_S = 0.25  # interval of the check for idle connections: they are closed at most this late
_ET = getattr(select, "EPOLLET", 0)
_BAD = select.POLLERR | select.POLLHUP
_APIS: dict[str, wire_format.Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",  # Cohere's path, and that of vLLM's own
    "/rerank": "rerank",
}
_PAGES = frozenset(("/v1/models", "/health", "/version", "/metrics", "/_log", "/_stats"))
_RESETS = frozenset(("/reset_prefix_cache", "/flush_cache"))
_PROFILER = frozenset(("/start_profile", "/stop_profile"))
_TIMED_WITH_ANSWER = (
    1,
    3,
)  # TensorRT-LLM since this version; before it, timings are at /perf_metrics


class SimServer:
    """The endpoint. `run` serves until `stop` is called; `close` releases everything."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rules = RequestRules(
            dialect=options.dialect,
            model=options.model,
            max_seq_len=options.max_seq_len,
            max_num_tokens=options.max_num_tokens,
            seed=options.seed,
            worse=options.worse,
        )
        self._per_event = 1 if options.flood else options.stream_interval
        self.pace: LatencyModel | Fleet
        self.fleet: Fleet | None = None
        self._precisions: tuple[str, ...] = ()  # of weights and KV cache
        if options.preset:
            self.pace = self.fleet = self._physical(options)
        else:
            self.pace = LatencyModel(
                ttft=parse_distribution(options.ttft, "--ttft"),
                itl=parse_distribution(options.itl, "--itl"),
                per_input_token_ns=parse_duration_ns(options.per_input_token, "--per-input-token"),
                step=FLOOD_EVENTS if options.flood else options.stream_interval,
                lockstep=options.lockstep,
                slots=options.slots,
                flood=options.flood,
                seed=options.seed,
            )
        self.tally = ServerMetrics()
        self._timed, self._pages = False, _PAGES
        if options.dialect == "trtllm":
            self._timed = _release(options.version) >= _TIMED_WITH_ANSWER
            self._pages |= {"/prometheus/metrics", "/energy_metrics"} | (
                set() if self._timed else {"/perf_metrics"}
            )
        self._began_ns = time.monotonic_ns()
        self.plan = fault_injection.parse_failure_plan(options.faults, options.seed)
        self.log = SendLog(options.log_events)
        self.max_body_bytes, self.buffer_bytes = options.max_body_bytes, options.buffer_bytes
        self.slow_readers = self.completed = self.events = self._number = self._drained = 0
        self._tidied_ns = self._profiles = 0
        self._key = b""
        try:
            if options.api_key_file:
                with open(options.api_key_file, "rb") as file:
                    self._key = b"Bearer " + file.read().strip()
            if options.log:
                open(options.log, "wb").close()  # fail now rather than after the run
        except OSError as error:
            raise UserError(
                of_reading(error), f"cannot use a file: {error.strerror}", str(error.filename)
            ) from None
        self._idle_close_ns = parse_duration_ns(options.idle_close, "--idle-close")
        self._connections: dict[int, Connection] = {}
        self._kept = KeptResponses()
        self._later: list[tuple[int, int, SimResponse]] = []  # responses delayed by slow_first_byte
        self._stopping = self._profiling = False
        self._open()

    def _physical(self, options: Options) -> Fleet:
        """The engine of a preset, or this process's share of its replicas. Sets `rules` to the preset's limits."""
        from loadgen.sim.presets import preset

        system = preset.load_preset(options.preset)
        speeds = system.speeds[options.core :: options.cores]
        if not speeds or (system.changes and options.cores > 1):
            what = f"{options.cores} processes for {system.replicas} replicas"
            raise UserError(
                "out_of_range", what, "--cores", "one each at most; with replicas_at one in all"
            )
        limits, server = system.limits, system.server
        self.rules = msgspec.structs.replace(
            self.rules,
            model=system.model.name if options.model == Options().model else options.model,
            max_seq_len=limits.max_seq_len,
            max_num_tokens=0 if limits.chunked_prefill else limits.max_num_tokens,
            tokens_per_block=limits.tokens_per_block if limits.block_reuse else 0,
        )
        blocks_of(
            b"", 0, self.rules.tokens_per_block
        )  # imports what it needs: no request must wait for that
        self._per_event = server.stream_interval
        self._precisions = (system.model.weights, system.model.kv_cache)
        return Fleet(
            costs=system.costs,
            limits=limits,
            speeds=speeds,
            routing=system.routing,
            interval=server.stream_interval,
            apart_ns=round(server.emit_us * 1e3),
            changes=system.changes,
        )

    def _open(self) -> None:
        options = self.options
        stream, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
        try:
            found = socket.getaddrinfo(options.host, options.port, type=stream, flags=passive)
            family, _, _, _, address = found[0]
            shared = options.cores > 1
            self._listener = socket.create_server(
                address[:2], family=family, backlog=4096, reuse_port=shared
            )
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise TargetError(
                "cannot_listen",
                f"cannot listen: {error}",
                where,
                "another --port, or 0 for any free one",
            ) from None
        self._listener.setblocking(False)
        self._tls = tls.context(options.cert, options.key) if options.cert else None
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if self._tls else 'http'}://{shown}:{port}"
        self._poll: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._timeout_unit = 1 if hasattr(select, "epoll") else 1000  # epoll waits in s, poll in ms
        self._poll.register(self._listener.fileno(), select.POLLIN)
        self._timer: TimerFd | None = None
        self._armed = -1
        try:
            self._timer = TimerFd()
            self._poll.register(self._timer.fileno(), select.POLLIN | _ET)
        except OSError:
            pass  # no timerfd: use the poll timeout, which is less precise
        self._wake_receiver, self._wake_sender = (
            socket.socketpair()
        )  # a signal handler writes to it to end the poll
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poll.register(self._wake_receiver.fileno(), select.POLLIN)

    # The loop

    def stop(self, *_: object) -> None:
        """End `run` after this turn; usable as a signal handler."""
        self._stopping = True
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            pass  # it is closed, or full of what wakes it already

    def run(self, stdin: int = -1) -> None:
        """Serve until `stop`, or until `stdin` ends; the parent holds its other end."""
        if stdin >= 0:
            self._poll.register(stdin, select.POLLIN)
        while not self._stopping:
            for fd, mask in self._poll.poll(self._wait()):
                connection = self._connections.get(fd)
                if connection is not None:
                    if mask & select.POLLOUT:
                        connection.writable()
                    if mask & (select.POLLIN | _BAD) and not connection.closed:
                        connection.readable()
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd == stdin and not os.read(stdin, 4096):
                    self._stopping = True
            self._emit(time.monotonic_ns())
            self._tidy()

    def _wait(self) -> float:
        """The poll timeout. Also arms the timer for anything due before it."""
        due = self.pace.next_ns()
        if self._later and (due is None or self._later[0][0] < due):
            due = self._later[0][0]
        now = time.monotonic_ns()
        wait = TIDY_S if self._connections else 60.0
        if due is None:
            return wait * self._timeout_unit
        if due <= now:
            return 0
        if self._timer is None:
            return min(wait, (due - now) / 1e9) * self._timeout_unit
        if due != self._armed:
            self._timer.arm(due)
            self._armed = due
        return wait * self._timeout_unit

    def _accept(self) -> None:
        for _ in range(256):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: accept again when one is free
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            connection = Connection(sock, self)
            self._connections[connection.fd] = connection
            self._poll.register(connection.fd, select.POLLIN)

    def _tidy(self) -> None:
        """Close connections that were idle for too long, about four times a second."""
        now = time.monotonic_ns()
        if now < self._tidied_ns + TIDY_S * 1e9:
            return
        self._tidied_ns = now
        for connection in [
            c for c in self._connections.values() if c.overdue(now, self._idle_close_ns)
        ]:
            connection.close()

    def watch_writable(self, connection: Connection, wanted: bool) -> None:
        self._poll.modify(
            connection.fd, select.POLLIN | select.POLLOUT if wanted else select.POLLIN
        )

    def gone(self, connection: Connection) -> None:
        self._poll.unregister(connection.fd)
        del self._connections[connection.fd]
        if connection.answer is not None:
            self._forget(connection.answer)

    # Requests

    def requested(self, connection: Connection, incoming: Incoming) -> None:
        try:
            self._route(connection, incoming)
        except Refusal as refusal:
            self._log_request(incoming, refusal.status)
            self._reply(connection, incoming, refusal.status, refusal.body, headers=refusal.headers)
        except Exception:  # a bug of this server must not end other streams
            traceback.print_exc()
            self._reply(
                connection,
                incoming,
                500,
                wire_format.error(self.rules.dialect, "a bug of the simulation", 500),
            )

    def _reply(
        self,
        connection: Connection,
        incoming: Incoming,
        status: int,
        body: bytes,
        content_type: str = JSON,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        keep_alive = incoming.keep_alive
        start = head(
            status, content_type if body else "", len(body), headers=headers, keep_alive=keep_alive
        )
        connection.write(start if incoming.method == "HEAD" else start + body)
        connection.answered(keep_alive)

    def _route(self, connection: Connection, incoming: Incoming) -> None:
        if incoming.refused:
            texts = {413: b"the body is too large", 431: b"the head is too large"}
            body = texts.get(incoming.refused, b"Invalid HTTP request received.")
            self._reply(connection, incoming, incoming.refused, body, "text/plain")
            return
        path = incoming.path.rstrip("/") or "/"
        api = _APIS.get(path)
        profiles = path in _PROFILER and self.rules.dialect == "trtllm"
        resets = path in _RESETS and self.rules.dialect == "trtllm"
        allowed = "POST" if api or profiles or resets else "GET" if path in self._pages else ""
        if not allowed:
            raise wire_format.no_route(self.rules.dialect, 404)
        if incoming.method != allowed and not (incoming.method == "HEAD" and allowed == "GET"):
            raise wire_format.no_route(self.rules.dialect, 405, allowed)
        if (
            self._key
            and (api or path.startswith("/v1/"))
            and incoming.headers.get(b"authorization") != self._key
        ):
            text = (
                "Incorrect API key provided. You can obtain a key from whoever runs this endpoint."
            )
            raise wire_format.refused("openai", text, status=401)
        if api:
            self._answer_generation(connection, incoming, api)
        elif profiles:
            self._profiling, self._profiles = (
                path == "/start_profile",
                self._profiles + (path == "/start_profile"),
            )
            self._reply(connection, incoming, 200, b"")
        elif resets:
            self._reply(connection, incoming, *self._reset_cache(path))
        elif path == "/energy_metrics" and not self.options.watts:
            self._reply(
                connection, incoming, 503, b'{"error":"Energy monitoring is not available"}'
            )
        else:
            self._reply(connection, incoming, 200, *self._page(path))

    def _reset_cache(self, path: str) -> tuple[int, bytes]:
        """Empty the prefix cache, if there is one: as TensorRT-LLM and vLLM, or as SGLang, which refuses under load."""
        fleet = self.fleet
        if self.options.cores > 1:
            return (
                400,
                b'{"success":false,"error":"each process has replicas of its own: simulate with one"}',
            )
        if fleet is not None and path == "/flush_cache" and (fleet.active or fleet.queued):
            return 400, b"Cache not flushed because there are pending requests."
        for replica in fleet.replicas if fleet is not None else ():
            replica.reset_cache()
        return 200, b'{"success":true}'

    def _page(self, path: str) -> tuple[bytes, str]:
        """Body and content type of a page that is read with GET."""
        if path == "/v1/models":
            rules = self.rules
            return wire_format.models(
                rules.dialect, rules.model, int(time.time()), rules.max_seq_len
            ), JSON
        if path == "/version":
            return msgspec.json.encode({"version": self.options.version}), JSON
        if path == "/prometheus/metrics":
            text = self.tally.prometheus(self.pace, self.rules.model, *self._precisions)
            return text.encode(), "text/plain; version=0.0.4"
        if path == "/energy_metrics":
            joules = self.options.watts * (time.monotonic_ns() - self._began_ns) / 1e9
            return msgspec.json.encode(
                {"total_energy_j": round(joules, 4), "query_time": time.perf_counter()}
            ), JSON
        if path == "/perf_metrics":
            return msgspec.json.encode(self.tally.drain()), JSON
        if path == "/metrics":
            rows = []
            if self.fleet is not None:
                rows = [
                    iteration_stats(iteration, self.fleet) for iteration in self.fleet.iterations
                ]
                self.fleet.iterations.clear()
            elif self.events > self._drained:
                rows = [
                    wire_format.iteration_stats(
                        self.events, self.pace.active, self.pace.queued, self.completed
                    )
                ]
            self._drained = self.events
            return msgspec.json.encode(rows), JSON
        if path == "/_log":
            return self.log.drain(), "application/octet-stream"
        if path == "/_stats":
            return msgspec.json.encode(self.stats()), JSON
        return b"", ""  # /health

    def stats(self) -> dict[str, float]:
        """Counters since the start; `cpu_s` is the CPU time of the whole process."""
        return {
            "requests": self._number,
            "completed": self.completed,
            "events": self.events,
            "active": self.pace.active,
            "queued": self.pace.queued,
            "connections": len(self._connections),
            "slow_readers": self.slow_readers,
            "profiling": self._profiling,
            "profiles": self._profiles,
            "cpu_s": time.process_time(),
        }

    def _log_request(
        self,
        incoming: Incoming,
        status: int,
        parsed: wire_format.ParsedRequest | None = None,
        fault: str = "",
    ) -> None:
        number = self._number
        self._number += 1
        if status >= 400:
            self.tally.failed(status)
        if not (self.log.on or self.options.log_bodies):
            return
        self.log.requests.append(
            LoggedRequest(
                number=number,
                id=incoming.headers.get(b"x-request-id", b"").decode("latin-1"),
                arrival_ns=incoming.arrival_ns,
                path=incoming.path,
                status=status,
                input_tokens=parsed.input_tokens if parsed else 0,
                output_tokens=parsed.output_tokens if parsed else 0,
                fault=fault,
                body_sha256=hashlib.sha256(incoming.body).hexdigest()
                if self.options.log_bodies
                else "",
            )
        )

    def _answer_generation(
        self, connection: Connection, incoming: Incoming, api: wire_format.Api
    ) -> None:
        parsed = self._parsed(incoming.body, api)
        fault = self._fault(incoming, parsed)
        fault_name = fault.name if fault else ""
        if fault_name == "idle_reset":
            if connection.served:
                self._log_request(incoming, 0, parsed, fault_name)
                connection.reset()
                return
            fault, fault_name = None, ""
        if fault and fault_name.startswith("http_"):
            status = int(fault_name[-3:])
            self._log_request(incoming, status, parsed, fault_name)
            retry_headers = (
                (("retry-after", f"{max(1, round(fault.at / 1e9))}"),) if status == 429 else ()
            )
            body = wire_format.error(self.rules.dialect, f"simulated {status}", status)
            self._reply(connection, incoming, status, body, headers=retry_headers)
            return
        if fault and fault_name == "clamp":
            parsed.output_tokens = min(parsed.output_tokens, max(1, fault.at))
        number = self._number
        script = self._script(parsed, number)
        per_event, timed = self._per_event, self._timed
        answer = SimResponse(
            connection, incoming, parsed, script, number, per_event, fault, timed=timed
        )
        connection.answer = answer
        self._log_request(incoming, 200, parsed, fault_name)
        if fault and fault_name == "slow_first_byte":
            heapq.heappush(self._later, (incoming.arrival_ns + fault.at, number, answer))
        else:
            self._begin(answer, incoming.arrival_ns)

    def _parsed(self, body: bytes, api: wire_format.Api) -> wire_format.ParsedRequest:
        if api == "responses":
            return parse_response(body, self.rules, self._kept)
        if api == "embeddings" or api == "rerank":
            return parse_values(body, api, self.rules)
        return (
            parse_message(body, self.rules)
            if api == "messages"
            else parse_request(body, api, self.rules)
        )

    def _script(self, parsed: wire_format.ParsedRequest, number: int) -> Any:
        """The bytes of the answer to a request; a response is kept for those that go on from it."""
        of = self.rules.dialect, number, int(time.time())
        if parsed.sequences:
            return ValueScript(parsed, *of)
        if parsed.api != "responses":
            return (MessageScript if parsed.api == "messages" else Script)(parsed, *of)
        script = ResponseScript(parsed, *of)
        if parsed.asked.store is not False:
            self._kept.keep(script.id, parsed)
        return script

    def _fault(
        self, incoming: Incoming, parsed: wire_format.ParsedRequest
    ) -> fault_injection.InjectedFailure | None:
        requested_fault = incoming.headers.get(b"x-sim-fault")
        if requested_fault is None:
            return self.plan.draw(self._number, parsed.output_tokens)
        try:
            fault = fault_injection.parse_failure(requested_fault.decode("latin-1"), "X-Sim-Fault")
        except Wrong as error:
            raise wire_format.refused(self.rules.dialect, str(error), "X-Sim-Fault") from None
        return fault_injection.with_drawn_token(
            fault, parsed.output_tokens, self.options.seed, self._number
        )

    def _begin(self, answer: SimResponse, at_ns: int) -> None:
        """Send what comes before any token. The engine decides when the rest is sent."""
        connection, parsed = answer.connection, answer.ask
        data, end = answer.opening()
        if data:
            connection.write(data)
        if end:
            self._end(answer, end)
        elif parsed.sequences and not connection.closed:
            answer.sequences = [Sequence(answer) for _ in parsed.sequences]
            answer.served = self.pace.prefill(at_ns, answer.sequences, parsed.sequences)
        elif not connection.closed:
            tokens = parsed.input_tokens, parsed.output_tokens
            if self.fleet is not None:
                answer.served = self.fleet.submit(at_ns, answer, *tokens, parsed.blocks)
            else:
                self.pace.submit(at_ns, answer, *tokens)

    # Answers

    def _emit(self, now_ns: int) -> None:
        """Send everything that is due."""
        while self._later and self._later[0][0] <= now_ns:
            due, _, answer = heapq.heappop(self._later)
            if not answer.connection.closed:
                self._begin(answer, due)
        rows, log_all, log_on = self.log.rows, self.log.all, self.log.on
        clock = time.monotonic_ns
        for answer, tokens, finished, due in self.pace.advance(now_ns):
            tokens_sent, connection, first_event = answer.made, answer.connection, answer.sent
            if connection.closed or connection.answer is not answer:
                if (
                    connection.closed
                    or not isinstance(answer, Sequence)
                    or connection.answer is not answer.answer
                ):
                    continue  # it ended after this emission was planned
                sequence, answer = answer, answer.answer
                answer.sequences.remove(sequence)
                if answer.sequences:
                    continue
            if answer.plain and tokens_sent and tokens == 1 and not finished:
                data = (
                    answer.head
                    + WORDS[answer.digest[tokens_sent & 63] ^ (tokens_sent >> 6 & 255)]
                    + answer.tail
                )
                answer.made = tokens_sent + 1
                answer.sent = first_event + 1
                self.events += 1
                if log_all:
                    rows.extend((answer.number, first_event, due, clock()))
                connection.write(data)
                continue
            if not tokens_sent and answer.served is not None:
                answer.ask.cached_tokens = answer.served.cached_tokens
            data, end = answer.next(
                tokens, finished, due
            )  # its timings are planned times, not send times
            new_events = answer.sent - first_event
            self.events += new_events
            if answer.fault.name == "split":
                for i in range(len(data) - 1):
                    connection.write(data[i : i + 1])
                data = data[-1:]
            if log_all or (log_on and new_events and (not first_event or finished)):
                sent_ns = clock()
                for index in range(first_event if log_all else answer.sent - 1, answer.sent):
                    rows.extend((answer.number, index, due, sent_ns))
            connection.write(data)
            if end == "answered":
                self.completed += 1
                arrival, served = answer.incoming.arrival_ns, answer.served
                admitted = served.admitted_ns if served is not None else arrival
                self.tally.finished(
                    answer.number, arrival, admitted, answer.first_ns or due, due, answer.ask
                )
            if end:
                self._end(answer, end)
        while self.fleet is not None and self.fleet.lost:
            self.fleet.lost.pop().connection.reset()

    def _end(self, answer: SimResponse, end: End) -> None:
        connection = answer.connection
        self._forget(answer)
        if end == "answered":
            connection.answered(answer.keep_alive)
        elif end == "reset":
            connection.reset()
        elif end == "close":
            connection.answered(False)
        else:  # a stall keeps the connection busy until the client disconnects
            connection.answer = end

    def _forget(self, answer: Any) -> None:
        """The engine works no more for this answer."""
        self.pace.cancel(answer)
        if isinstance(answer, SimResponse):
            for sequence in answer.sequences:
                self.pace.cancel(sequence)
            answer.sequences.clear()  # they refer to it

    def close(self) -> None:
        """Write the log, if it has a file, and close everything."""
        if self.options.log:
            with open(self.options.log, "wb") as file:
                file.write(self.log.drain())
        for connection in list(self._connections.values()):
            connection.close()
        for resource in (
            self._listener,
            self._wake_receiver,
            self._wake_sender,
            self._timer,
            self._poll,
        ):
            if resource is not None and hasattr(resource, "close"):  # select.poll has none
                resource.close()


def _release(version: str) -> tuple[int, ...]:
    """The version as numbers: (1, 3) for 1.3.0rc2. Raises UserError."""
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        raise UserError(
            "invalid_value",
            f'"{version}" is not a version',
            "--trtllm-version",
            "for example 1.3.0, or 1.2.0",
        )
    return tuple(int(part) for part in parts)
