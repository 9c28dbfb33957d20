"""Progress on stderr: a line that is rewritten on a terminal, else a line every 10 s, for people or as JSON. IO.

Without `--progress plain`, a terminal shows the dashboard (`dashboard.py`) of a run instead.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple, TextIO

from loadgen.cli.streams import drawing
from loadgen.core import format
from loadgen.core.execution.events import Counters, LoadStarted, RunEnded, RunEvent, RunPlanned
from loadgen.render.table import WIDTH

EVERY_S = 0.5
LINE_EVERY_S = 10.0  # where the line cannot be rewritten
SHORTEST_S = 5.0  # steps that took less together need no forecast


def draining(in_flight: int, left_s: float | None) -> str:
    """Words for the time after the load: what the run waits for, for how long at most, and how to end it."""
    most = "" if left_s is None else f", at most {format.duration(max(left_s, 0.0))} more"
    return f"draining: {format.count(in_flight)} in flight{most}; Ctrl-C ends it"


def _terminal_columns(stream: TextIO) -> int:
    """Return the columns of the terminal of a stream as they are, however few."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH


class Progress:
    """Writes what was counted so far again and again: a line over itself on a terminal, else a line below the last.

    `as_json`: every line is a JSON object, `{"progress": {...}}`.
    """

    def __init__(
        self,
        total: int | None,
        horizon_ns: int | None,
        out: TextIO | None = None,
        *,
        drain_ns: int | None = None,
        as_json: bool = False,
    ) -> None:
        self._drain_ns = drain_ns
        self._total, self._horizon_ns, self._out = total, horizon_ns, out or sys.stderr
        self._as_json, self._draw = as_json, drawing(self._out)
        self._is_rewritten = self._out.isatty() and not as_json
        self._last_events = 0
        self._last_ns = self._began_ns = monotonic_ns()
        self._handle: asyncio.TimerHandle | None = None

    def follow(self, counters: Callable[[], Counters]) -> None:
        """Show these counters from now on, until the event loop ends or `clear` is called."""
        every_s = EVERY_S if self._is_rewritten else LINE_EVERY_S
        loop = asyncio.get_running_loop()

        def show() -> None:
            facts = self.facts(counters(), monotonic_ns())
            if self._is_rewritten:
                self._draw("\r\x1b[K" + progress_text(facts, _terminal_columns(self._out)))
            else:
                line = json.dumps({"progress": facts}) if self._as_json else words(facts)
                self._out.write(line + "\n")
            self._out.flush()
            self._handle = loop.call_later(every_s, show)

        self._handle = loop.call_later(every_s, show)

    def clear(self) -> None:
        """Stop, and erase the line on a terminal."""
        if self._handle is not None:
            self._handle.cancel()
            if self._is_rewritten:
                self._draw("\r\x1b[K")
                self._out.flush()

    def facts(self, counters: Counters, now: int) -> dict[str, Any]:
        """What is known at `now`, ns on the monotonic clock. The rate covers the time since the last call.

        `left_s`: of the load; below 0 it is over. `drain_left_s`: how long requests in flight may still go on.
        """
        span_s = max(now - self._last_ns, 1) / 1e9
        rate = (counters.events - self._last_events) / span_s
        self._last_events, self._last_ns = counters.events, now
        left_s = (
            None if self._horizon_ns is None else (self._began_ns + self._horizon_ns - now) / 1e9
        )
        drain_left_s = (
            None if self._drain_ns is None or left_s is None else self._drain_ns / 1e9 + left_s
        )
        ordered = sorted(counters.recent_ttft_ns)
        return {
            "elapsed_s": round((now - self._began_ns) / 1e9, 1),
            "done": counters.ok + counters.failed + counters.dropped,
            "planned": self._total,
            "in_flight": counters.in_flight,
            "events_per_s": round(rate, 1),
            "ttft_p50_ms": ordered[len(ordered) // 2] / 1e6 if ordered else None,
            "ttft_p99_ms": ordered[int(len(ordered) * 0.99)] / 1e6 if ordered else None,
            "failed": counters.failed,
            "dropped": counters.dropped,
            "left_s": None if left_s is None else round(left_s, 1),
            "drain_left_s": None if drain_left_s is None else round(drain_left_s, 1),
        }


class ProgressLine:
    """Hears runs, and shows the progress of each, but for those in virtual time, too fast to be watched."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._progress: Progress | None = None

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RunPlanned(plan, manifest) if manifest.client != "virtual":
                drain_ns = None if manifest.grace_s is None else round(manifest.grace_s * 1e9)
                schedule = plan.schedule
                self._progress = Progress(
                    schedule.slot_count,
                    schedule.horizon_ns,
                    drain_ns=drain_ns,
                    as_json=self._as_json,
                )
            case LoadStarted(_, load) if self._progress is not None:
                self._progress.follow(load.counters)
            case RunEnded() if self._progress is not None:
                self._progress.clear()
                self._progress = None


def words(facts: Mapping[str, Any]) -> str:
    """Return the progress line, however long it is."""
    return SEPARATOR.join(part.text for part in _parts(facts))


def progress_text(facts: Mapping[str, Any], columns: int) -> str:
    """Return the progress line for a terminal, shorter than its columns so that it never wraps.

    The least important parts are left out first.
    """
    parts = _parts(facts)
    while len(parts) > 1 and len(SEPARATOR.join(part.text for part in parts)) >= columns:
        parts.remove(min(parts, key=lambda part: part.importance))
    line = SEPARATOR.join(part.text for part in parts)
    return line if len(line) < columns else f"{line[: columns - 2]}…"


SEPARATOR = " · "


class _Part(NamedTuple):
    """A part of the progress line; on a narrow terminal those of low importance are left out."""

    text: str
    importance: int


def _parts(facts: Mapping[str, Any]) -> list[_Part]:
    planned = f"/{facts['planned']:,}" if facts["planned"] is not None else ""
    parts = [
        _Part(f"{facts['done']:,}{planned} done", 5),
        _Part(f"{facts['in_flight']:,} in flight", 2),
        _Part(f"{facts['events_per_s']:,.0f} events/s", 0),
    ]
    if facts["ttft_p50_ms"] is not None:
        ttft = f"TTFT p50 {facts['ttft_p50_ms']:,.1f} p99 {facts['ttft_p99_ms']:,.1f} ms"
        parts.append(_Part(ttft, 1))
    parts += [_Part(f"{facts[name]:,} {name}", 3) for name in ("failed", "dropped") if facts[name]]
    if facts["left_s"] is not None:
        is_over = facts["left_s"] <= 0
        left = f"{facts['left_s']:,.0f} s left"
        if is_over:
            left = draining(facts["in_flight"], facts["drain_left_s"])
        parts.append(_Part(left, 4))
    return parts


Left = tuple[float, float | None]
"""How many steps are left, the next one counted, and how many seconds they take; None: not known yet."""


class Steps:
    """The steps of a sweep, a search or a validation: which of how many, and how long those left may take.

    `of`: how many there are; `at_most`: there may be fewer, mostly far fewer, so no time is told for those left but
    what the caller knows. `weights`: how long each takes beside the others; (): all as long.
    """

    def __init__(self, of: int, *, at_most: bool = False, weights: Sequence[float] = ()) -> None:
        self._of, self._at_most = of, at_most
        self._weights = (
            weights if len(weights) == of and all(weight > 0 for weight in weights) else [1.0] * of
        )
        self._number = 0
        self._began_ns = monotonic_ns()

    @property
    def spent_s(self) -> float:
        """Time since the first."""
        return (monotonic_ns() - self._began_ns) / 1e9

    def next(self, left: Left | None = None) -> dict[str, Any]:
        """The step that begins now. `each_s`: mean of those before it; None where none was timed. `about`: how many
        there will be. `left_s`: time for it and those after it; None also where it is not known how many these are.
        """
        spent_s = self.spent_s
        self._number += 1
        before = self._number - 1
        each_s = None if not before or spent_s < SHORTEST_S else spent_s / before
        done = sum(self._weights[:before])
        left_s = (
            None
            if each_s is None or self._at_most
            else spent_s / done * (sum(self._weights) - done)
        )
        if left is not None:
            left_s = None if left[1] is None or spent_s + left[1] < SHORTEST_S else left[1]
        return {
            "step": self._number,
            "of": self._of,
            "at_most": self._at_most,
            "about": None if left is None else min(before + max(round(left[0]), 1), self._of),
            "elapsed_s": round(spent_s, 1),
            "each_s": None if each_s is None else round(each_s, 1),
            "left_s": None if left_s is None else round(left_s, 1),
        }


def step_words(name: str, step: Mapping[str, Any]) -> str:
    """`c8: 3 of 6, about 12m left, until 14:32`; of a search `8/s: 3 of about 11, about 9m left, until 14:32`."""
    of = (
        f"{'at most ' if step['at_most'] else ''}{step['of']}"
        if step["about"] is None
        else f"about {step['about']}"
    )
    text = f"{name}: {step['step']} of {of}"
    if step["left_s"] is None:
        return text + (
            f", about {format.duration(step['each_s'])} each" if step["each_s"] is not None else ""
        )
    end = datetime.datetime.now() + datetime.timedelta(seconds=step["left_s"])
    return f"{text}, about {format.duration(step['left_s'])} left, until {end:%H:%M}"
