"""One request being answered: which bytes come next and how the response ends, with faults. Pure: no sockets, no clock.

The server passes what is due (`tokens`, `finished`, the time) and writes the bytes it gets back. Every change that a
fault makes to the bytes is decided here.
"""

from __future__ import annotations

from typing import Any, Literal

from loadgen.sim.server import wire_format
from loadgen.sim.server.fault_injection import InjectedFailure
from loadgen.sim.server.http_messages import Incoming, head
from loadgen.sim.server.wire_format import DONE, END, WORDS, ParsedRequest

WRONG_COUNT = 7  # tokens that a `wrong_count` usage adds
OVERSIZED_BYTES = 1 << 20
SSE = "text/event-stream; charset=utf-8"
JSON = "application/json"

End = Literal["", "answered", "close", "reset", "stall"]
"""What follows the bytes: more bytes, the next request, a close, a reset, or silence for ever."""


class Sequence:
    """One of several sequences that an answer waits for: their key at the engine, which knows no answers."""

    plain = False
    made = sent = 0

    def __init__(self, answer: SimResponse) -> None:
        self.answer, self.connection = answer, answer.connection


class SimResponse:
    """The state of one response. `made`: tokens sent, `sent`: events sent.

    `script`: the bytes of the API at hand (`Script`, `ResponseScript`, `ValueScript`). `connection` is stored for the
    server and never used here.
    """

    def __init__(
        self,
        connection: Any,
        incoming: Incoming,
        ask: ParsedRequest,
        script: Any,
        number: int,
        per_event: int = 1,
        fault: InjectedFailure | None = None,
        *,
        timed: bool = True,
    ) -> None:
        self.connection, self.incoming, self.ask, self.number = connection, incoming, ask, number
        self.head, self.tail, self.digest = script.head, script.tail, ask.digest
        self.fault = fault or InjectedFailure("")
        self.made = self.sent = self.first_ns = 0
        self.keep_alive = incoming.keep_alive and self.fault.name not in (
            "close_delimited",
            "connection_close",
        )
        # Most token events are exactly head + word + tail; the server's fast path uses that.
        self.plain = (
            bool(script.head)
            and ask.stream
            and ask.detokenize
            and not ask.continuous_usage
            and fault is None
        )
        self._script, self._per_event = script, per_event
        self._timed = timed and incoming.headers.get(b"x-trtllm-return-metrics") == b"1"
        self.sequences: list[Sequence] = []  # where it takes several
        self.served: Any = None  # the engine's request, with its admission time and cached tokens

    def opening(self) -> tuple[bytes, End]:
        """The bytes to send at once: trtllm-serve sends the head of a stream before it has a token."""
        name = self.fault.name
        if not self.ask.stream and name not in ("empty", "reset_before"):
            return b"", ""
        data = head(200, SSE, -1 if name == "close_delimited" else None, keep_alive=self.keep_alive)
        if name == "empty":
            return data + END, "answered"
        return data, "reset" if name == "reset_before" else ""

    def next(self, tokens: int, finished: bool, now_ns: int) -> tuple[bytes, End]:
        """The bytes of the next `tokens` tokens and, if `finished`, of everything after them."""
        if not self.ask.stream:
            self.first_ns = self.first_ns or now_ns
            return self._whole(now_ns) if finished else (b"", "")
        first = self.made
        self.made = first + tokens
        if self.plain and first and not finished and self._per_event == 1:
            head, tail, digest = self.head, self.tail, self.digest
            self.sent += tokens
            stop = first + tokens
            return b"".join(
                [head + WORDS[digest[i & 63] ^ (i >> 6 & 255)] + tail for i in range(first, stop)]
            ), ""
        self.first_ns = self.first_ns or now_ns
        events, end = self._events(first, finished, now_ns)
        if self.fault.name == "close_delimited":
            return b"".join(events), end and "close"
        data = b"".join([wire_format.chunk(event) for event in events])
        return (data + END if end == "answered" else data), end

    def _events(self, first: int, finished: bool, now_ns: int) -> tuple[list[bytes], End]:
        script, fault, name = self._script, self.fault, self.fault.name
        events = [] if first else script.opening()
        for start in range(first, self.made, self._per_event):
            stop = min(start + self._per_event, self.made)
            last = finished and stop == self.made
            hit = start <= fault.at < stop
            if name == "no_text" or (name == "one_event" and start):
                events += [script.event(stop, stop, last)] if last else []
                continue
            filler = b"a" * OVERSIZED_BYTES if hit and name == "oversized" else b""
            event = script.event(start, stop, last and name != "no_finish", filler)
            events.append(event[:-5] + b"\n\n" if hit and name == "malformed" else event)
            self.sent += 1
            if hit and name in _ENDS:
                return events, _ENDS[name]
            if hit and name in ("error_event", "engine_error"):
                last_events, ends_properly = (
                    [wire_format.error_event("simulated error"), DONE],
                    True,
                )
                if name == "engine_error":
                    last_events, ends_properly = script.failure()
                return events + last_events, "answered" if ends_properly else "close"
        if not finished:
            return events, ""
        events += script.closing(
            self._counted(), finish=name != "no_finish", metrics=self._metrics(now_ns)
        )
        if name != "no_done" and script.done:
            events.append(script.done)
        if self._timed:
            events.append(wire_format.perf_event(self._timing(now_ns)))
        return events, "answered"

    def _counted(self) -> int:
        """The output tokens that the usage says."""
        if self.fault.name != "wrong_count":
            return self.made
        return self.made + WRONG_COUNT if self.fault.at < 0 else self.fault.at

    def _queue_ns(self) -> int:
        return (
            max(0, self.served.admitted_ns - self.incoming.arrival_ns)
            if self.served is not None
            else 0
        )

    def _timing(self, now_ns: int) -> dict[str, str]:
        return wire_format.perf_headers(
            self.incoming.arrival_ns, self.first_ns or now_ns, now_ns, self._queue_ns()
        )

    def _metrics(self, now_ns: int) -> dict[str, float] | None:
        return wire_format.metrics(*self._instants(now_ns)) if self.ask.include_metrics else None

    def _instants(self, now_ns: int) -> tuple[int, int, int, int]:
        return self._queue_ns(), self.incoming.arrival_ns, self.first_ns or now_ns, now_ns

    def _whole(self, now_ns: int) -> tuple[bytes, End]:
        """A response that is not a stream. Faults of streams apply where they have a meaning."""
        name = self.fault.name
        self.made, self.sent = self.ask.output_tokens, 1
        counted = self._counted()
        meta_info = (
            wire_format.meta_info(*self._instants(now_ns)) if self.ask.return_meta_info else None
        )
        metrics = self._metrics(now_ns)
        body = self._script.whole(
            counted, finish=name != "no_finish", metrics=metrics, meta_info=meta_info
        )
        if name == "malformed":
            body = body[:-5]
        elif name == "oversized":
            body = body.replace(b'":"', b'":"' + b"a" * OVERSIZED_BYTES, 1)
        headers = tuple(self._timing(now_ns).items()) if self._timed else ()
        if name == "error_event" or name == "engine_error":
            body = wire_format.error(self._script.dialect, "the simulated engine failed", 500)
            return head(500, JSON, len(body), keep_alive=self.keep_alive) + body, "answered"
        length = -1 if name == "close_delimited" else len(body)
        start = head(200, JSON, length, headers=headers, keep_alive=self.keep_alive)
        if name in _ENDS:
            return start + body[: len(body) // 2], _ENDS[name]
        return start + body, "close" if name == "close_delimited" else "answered"


_ENDS: dict[str, End] = {"truncate": "close", "reset_after": "reset", "stall": "stall"}
