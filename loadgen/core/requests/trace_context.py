"""The trace of each request (W3C Trace Context), a function of run and slot, so that nothing is stored. Pure."""

from __future__ import annotations

import hashlib


class TraceContext:
    """Trace and span of the requests of one run. A trace holds one request, and what the server adds to it."""

    def __init__(self, run: str) -> None:
        self._run = int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "big") | 1

    def trace_id(self, slot: int) -> int:
        return self._run << 64 | slot + 1

    def span_id(self, slot: int) -> int:
        return slot + 1

    def header(self, slot: int) -> bytes:
        """The header line that is sent with the request: sampled, since who asked for traces wants them all."""
        return b"traceparent: 00-%032x-%016x-01\r\n" % (self.trace_id(slot), self.span_id(slot))
