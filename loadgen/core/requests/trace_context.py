"""The trace context (W3C Trace Context) of each request of a run.

They are a function of the run and the slot of the request, so that none needs to be stored.
"""

from __future__ import annotations

import hashlib


class TraceContext:
    """Trace and span identifiers of the requests of one run.

    A trace contains one request and the spans that the server adds to it.
    """

    def __init__(self, run_id: str) -> None:
        digest = hashlib.blake2b(run_id.encode(), digest_size=8).digest()
        # A trace identifier must not be zero.
        self._trace_prefix = int.from_bytes(digest, "big") | 1

    def trace_id(self, slot: int) -> int:
        """Return the 128-bit identifier of the trace of a request."""
        return self._trace_prefix << 64 | self.span_id(slot)

    def span_id(self, slot: int) -> int:
        """Return the 64-bit identifier of the span of a request, which must not be zero."""
        return slot + 1

    def header(self, slot: int) -> bytes:
        """Return the header line of a request, which asks the server to record the trace."""
        trace_id = self.trace_id(slot)
        return b"traceparent: 00-%032x-%016x-01\r\n" % (trace_id, self.span_id(slot))
