"""The plain progress line on stderr during a run: one line that is rewritten on a terminal, else a line every 10 s. IO.

Without `--plain`, a terminal shows the dashboard (`dashboard.py`) instead.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import TextIO

from loadgen import format
from loadgen.execution.events import Counters

EVERY_S = 0.5
LINE_EVERY_S = 10.0  # where the line cannot be rewritten


def draining(in_flight: int, left_s: float | None) -> str:
    """Words for the time after the load: what the run waits for, for how long at most, and how to end it."""
    most = "" if left_s is None else f", at most {format.duration(max(left_s, 0.0))} more"
    return f"draining: {format.count(in_flight)} in flight{most}; Ctrl-C ends it"


class Progress:
    """Writes a progress line again and again: over itself on a terminal, else below the last."""

    def __init__(
        self,
        total: int | None,
        horizon_ns: int | None,
        out: TextIO | None = None,
        *,
        drain_ns: int | None = None,
        plain: bool = False,
    ) -> None:
        self._drain_ns = drain_ns
        self._total, self._horizon_ns, self._out = total, horizon_ns, out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._is_shown = plain or self._is_terminal  # without a terminal, only when it was asked for
        self._last_events = 0
        self._last_ns = self._began_ns = monotonic_ns()
        self._handle: asyncio.TimerHandle | None = None

    def follow(self, counters: Callable[[], Counters]) -> None:
        """Show these counters from now on, until the event loop ends or `clear` is called."""
        if not self._is_shown:
            return
        every_s = EVERY_S if self._is_terminal else LINE_EVERY_S
        loop = asyncio.get_running_loop()

        def show() -> None:
            now = monotonic_ns()
            line = self.line(counters(), now)
            self._out.write("\r\x1b[K" + line if self._is_terminal else line + "\n")
            self._out.flush()
            self._handle = loop.call_later(every_s, show)

        self._handle = loop.call_later(every_s, show)

    def clear(self) -> None:
        """Stop, and erase the line on a terminal."""
        if self._handle is not None:
            self._handle.cancel()
            if self._is_terminal:
                self._out.write("\r\x1b[K")
                self._out.flush()

    def line(self, counters: Counters, now: int) -> str:
        """The progress line; `now` is in ns on the monotonic clock. The rate covers the time since the last call."""
        span_s = max(now - self._last_ns, 1) / 1e9
        rate = (counters.events - self._last_events) / span_s
        self._last_events, self._last_ns = counters.events, now
        done = counters.ok + counters.failed + counters.dropped
        parts = [f"{done:,}/{self._total:,} done" if self._total is not None else f"{done:,} done"]
        parts += [f"{counters.in_flight:,} in flight", f"{rate:,.0f} events/s"]
        if counters.recent_ttft_ns:
            ordered = sorted(counters.recent_ttft_ns)
            p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
            parts.append(f"TTFT p50 {p50 / 1e6:,.1f} p99 {p99 / 1e6:,.1f} ms")
        if counters.failed:
            parts.append(f"{counters.failed:,} failed")
        if counters.dropped:
            parts.append(f"{counters.dropped:,} dropped")
        if self._horizon_ns is not None:
            left_s = (self._began_ns + self._horizon_ns - now) / 1e9
            if left_s > 0:
                parts.append(f"{left_s:,.0f} s left")
            else:
                drain_left_s = None if self._drain_ns is None else self._drain_ns / 1e9 + left_s
                parts.append(draining(counters.in_flight, drain_left_s))
        return " · ".join(parts)
