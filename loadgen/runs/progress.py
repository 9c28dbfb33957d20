"""Progress on stderr: a line that is rewritten on a terminal, else a line every 10 s.

The lines are for people or JSON. Without `--progress plain`, a terminal shows the live view
(`dashboard.py`) of a run instead.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import NamedTuple, TextIO

import msgspec

from loadgen.cli.streams import raw_writer
from loadgen.core import format
from loadgen.core.execution.events import Counters, LoadStarted, RunEnded, RunEvent, RunPlanned
from loadgen.render.table import WIDTH

REFRESH_S = 0.5
"""Time between two updates of the line on a terminal."""

LINE_EVERY_S = 10.0
"""Time between two lines where a line cannot be rewritten."""

MIN_FORECAST_S = 5.0
"""Steps that took less time together need no forecast."""

SEPARATOR = " · "

VIRTUAL_TIME_CLIENT = "virtual"
"""The client of a run in virtual time. It sends nothing, and a model computes the responses."""

_CLEAR_LINE = "\r\x1b[K"
_NS_PER_S = 1e9
_NS_PER_MS = 1e6


# -- the progress of one run -----------------------------------------------------------------------


class ProgressFacts(msgspec.Struct, frozen=True):
    """The progress of a run, as it is printed as JSON.

    Attributes:
        elapsed_s: Time since the start of the load.
        done: Requests that have ended or were dropped.
        planned: Requests of the schedule, or None if the load ends by time.
        in_flight: Requests in flight.
        events_per_s: Output events per second since the last update.
        ttft_p50_ms: Median TTFT of recent requests.
        ttft_p99_ms: 99th percentile of the TTFT of recent requests.
        failed: Failed requests.
        dropped: Dropped requests.
        cancelled: Requests that were cancelled, sent or not, for example by an interruption.
        left_s: Time until the load ends; negative once it has ended.
        drain_left_s: Time until requests in flight are cut off.
    """

    elapsed_s: float
    done: int
    planned: int | None
    in_flight: int
    events_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    failed: int
    dropped: int
    cancelled: int
    left_s: float | None
    drain_left_s: float | None


class Progress:
    """Prints the counters of a load again and again, on one line of a terminal or line by line."""

    def __init__(
        self,
        total: int | None,
        load_length_ns: int | None,
        stream: TextIO | None = None,
        *,
        drain_ns: int | None = None,
        as_json: bool = False,
    ) -> None:
        """Prepare for a load that starts now.

        Args:
            total: The number of requests, or None if the load ends by time.
            load_length_ns: The length of the load, or None if it ends by a number of requests.
            stream: Where to print; stderr by default.
            drain_ns: How long requests in flight may go on after the load.
            as_json: Whether every line is an object, `{"progress": {...}}`.
        """
        self._total = total
        self._load_length_ns = load_length_ns
        self._drain_ns = drain_ns
        self._start_ns = monotonic_ns()

        self._stream = stream or sys.stderr
        self._as_json = as_json
        self._draw = raw_writer(self._stream)

        # On a terminal, one line is rewritten. Elsewhere, each update prints a line of its own.
        self._rewrites_line = self._stream.isatty() and not as_json
        self._timer: asyncio.TimerHandle | None = None

        # The time of the last update, and the number of output events until then.
        self._last_update_ns = self._start_ns
        self._last_event_count = 0

    def start_printing(self, read_counters: Callable[[], Counters]) -> None:
        """Print the counters of a load repeatedly, until `clear` is called or the event loop ends.

        The line on a terminal is rewritten every REFRESH_S. A file or a pipe gets a new line every
        LINE_EVERY_S.
        """
        interval_s = REFRESH_S if self._rewrites_line else LINE_EVERY_S
        loop = asyncio.get_running_loop()

        def print_and_reschedule() -> None:
            self._print(self.update(read_counters(), monotonic_ns()))
            self._timer = loop.call_later(interval_s, print_and_reschedule)

        self._timer = loop.call_later(interval_s, print_and_reschedule)

    def _print(self, facts: ProgressFacts) -> None:
        """Rewrite the line of a terminal, or print another line as text or JSON."""
        if self._rewrites_line:
            line = describe_progress(facts, _terminal_columns(self._stream))
            self._draw(f"{_CLEAR_LINE}{line}")
        elif self._as_json:
            document = json.dumps({"progress": msgspec.structs.asdict(facts)})
            self._stream.write(f"{document}\n")
        else:
            self._stream.write(f"{describe_progress(facts)}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Stop, and erase the line on a terminal."""
        if self._timer is None:
            return
        self._timer.cancel()
        if self._rewrites_line:
            self._draw(_CLEAR_LINE)
            self._stream.flush()

    def update(self, counters: Counters, now_ns: int) -> ProgressFacts:
        """Return the progress of the load, and remember it as the last update.

        The rate of output events covers the time since the last update.

        Args:
            counters: The counters of the load, which only grow.
            now_ns: The current time on the monotonic clock.
        """
        load_left_s = self._load_left_s(now_ns)
        ttft_ns = sorted(counters.recent_ttft_ns)
        facts = ProgressFacts(
            elapsed_s=round((now_ns - self._start_ns) / _NS_PER_S, 1),
            done=counters.ok + counters.failed + counters.dropped,
            planned=self._total,
            in_flight=counters.in_flight,
            events_per_s=round(self._events_per_s(counters, now_ns), 1),
            ttft_p50_ms=_sorted_quantile_ms(ttft_ns, 0.5),
            ttft_p99_ms=_sorted_quantile_ms(ttft_ns, 0.99),
            failed=counters.failed,
            dropped=counters.dropped,
            cancelled=counters.cancelled,
            left_s=_round_if_known(load_left_s),
            drain_left_s=_round_if_known(self._drain_left_s(load_left_s)),
        )
        self._last_event_count = counters.events
        self._last_update_ns = now_ns

        return facts

    def _events_per_s(self, counters: Counters, now_ns: int) -> float:
        """Return the rate of output events since the last update."""
        interval_s = max(now_ns - self._last_update_ns, 1) / _NS_PER_S
        return (counters.events - self._last_event_count) / interval_s

    def _drain_left_s(self, load_left_s: float | None) -> float | None:
        """Return the time until requests in flight are cut off, or None if that has no limit."""
        if self._drain_ns is None or load_left_s is None:
            return None
        return load_left_s + self._drain_ns / _NS_PER_S

    def _load_left_s(self, now_ns: int) -> float | None:
        """Return the time until the load ends. It is negative once the load has ended."""
        if self._load_length_ns is None:
            return None
        return (self._start_ns + self._load_length_ns - now_ns) / _NS_PER_S


def _sorted_quantile_ms(sorted_ns: Sequence[int], quantile: float) -> float | None:
    """Return a quantile of sorted times in ns, or None if there are none."""
    if not sorted_ns:
        return None
    return sorted_ns[int(len(sorted_ns) * quantile)] / _NS_PER_MS


def _round_if_known(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _terminal_columns(stream: TextIO) -> int:
    """Return the columns of the terminal of a stream, however few they are."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH


class ProgressLine:
    """An event handler that prints the progress of each run.

    Runs in virtual time are left out, because they are too fast to be watched.
    """

    def __init__(self, *, as_json: bool) -> None:
        """Print lines for people, or with `as_json` an object per line."""
        self._as_json = as_json
        self._progress: Progress | None = None

    def __call__(self, event: RunEvent) -> None:
        """Handle an event of a run: prepare when it is planned, print while its load runs.

        There is no `_progress` for a run in virtual time, so its later events are ignored.
        """
        match event:
            case RunPlanned():
                self._prepare(event)
            case LoadStarted() if self._progress is not None:
                self._progress.start_printing(event.load.counters)
            case RunEnded() if self._progress is not None:
                self._progress.clear()
                self._progress = None

    def _prepare(self, planned: RunPlanned) -> None:
        """Create the progress of a run that is not in virtual time."""
        manifest = planned.manifest
        if manifest.client == VIRTUAL_TIME_CLIENT:
            return

        schedule = planned.plan.schedule

        # After the load, the run waits for the last responses: the drain. None is without limit.
        drain_ns = None if manifest.grace_s is None else round(manifest.grace_s * _NS_PER_S)
        self._progress = Progress(
            schedule.slot_count, schedule.horizon_ns, drain_ns=drain_ns, as_json=self._as_json
        )


# -- the progress line -----------------------------------------------------------------------------


class _LinePart(NamedTuple):
    """A part of the progress line. A narrow terminal leaves out the least important parts first."""

    text: str
    importance: int


def describe_progress(facts: ProgressFacts, columns: int | None = None) -> str:
    """Return the progress as a line of text.

    With a number of columns, the line is shorter than that, so that a terminal never wraps it. The
    least important parts are left out first, and a last part that is too long is cut.
    """
    parts = _line_parts(facts)
    line = _join_parts(parts)
    if columns is None:
        return line

    while len(parts) > 1 and len(line) >= columns:
        parts.remove(min(parts, key=_importance))
        line = _join_parts(parts)

    if len(line) < columns:
        return line

    return f"{line[: columns - 2]}…"


def _join_parts(parts: Sequence[_LinePart]) -> str:
    return SEPARATOR.join(part.text for part in parts)


def _importance(part: _LinePart) -> int:
    return part.importance


def _line_parts(facts: ProgressFacts) -> list[_LinePart]:
    """Return the parts of the progress line in the order in which they are printed.

    How much of the load is done matters most, then the time that is left, then failures.
    """
    total = "" if facts.planned is None else f"/{facts.planned:,}"
    parts = [
        _LinePart(f"{facts.done:,}{total} done", importance=5),
        _LinePart(f"{facts.in_flight:,} in flight", importance=2),
        _LinePart(f"{facts.events_per_s:,.0f} events/s", importance=0),
    ]
    if facts.ttft_p50_ms is not None and facts.ttft_p99_ms is not None:
        ttft = f"TTFT p50 {facts.ttft_p50_ms:,.1f} p99 {facts.ttft_p99_ms:,.1f} ms"
        parts.append(_LinePart(ttft, importance=1))

    if facts.failed:
        parts.append(_LinePart(f"{facts.failed:,} failed", importance=3))

    if facts.dropped:
        parts.append(_LinePart(f"{facts.dropped:,} dropped", importance=3))

    if facts.cancelled:
        parts.append(_LinePart(f"{facts.cancelled:,} cancelled", importance=3))

    if facts.left_s is not None:
        parts.append(_LinePart(_describe_time_left(facts), importance=4))

    return parts


def _describe_time_left(facts: ProgressFacts) -> str:
    if facts.left_s is not None and facts.left_s > 0:
        return f"{facts.left_s:,.0f} s left"
    return describe_drain(facts.in_flight, facts.drain_left_s)


def describe_drain(in_flight: int, left_s: float | None) -> str:
    """Return that the run waits for the last responses, for how long at most, and how to end it."""
    limit = ""
    if left_s is not None:
        limit = f", at most {format.duration(max(left_s, 0.0))} more"
    return f"draining: {format.count(in_flight)} in flight{limit}; press Ctrl-C to end"


# -- steps: the runs of a sweep, a search or a validation ------------------------------------------


class RemainingSteps(NamedTuple):
    """An estimate of the steps that remain, the next one included.

    Attributes:
        steps: How many there are, which may be a mean and no whole number.
        seconds: How long they take together, or None if that is not known.
    """

    steps: float
    seconds: float | None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step that begins now.

    Attributes:
        number: Which step it is, counted from 1.
        max_count: How many steps there are, or at most (`of` in JSON).
        at_most: Whether there may be fewer steps.
        expected_count: How many steps are expected. None if it is `max_count` (`about` in JSON).
        elapsed_s: Time since the first step began.
        mean_s: Mean time of the steps before it. None if they took too little time (`each_s` in
            JSON).
        left_s: Time for this step and the following ones, or None if it is not known.
    """

    number: int = msgspec.field(name="step")
    max_count: int = msgspec.field(name="of")
    at_most: bool
    expected_count: int | None = msgspec.field(name="about")
    elapsed_s: float
    mean_s: float | None = msgspec.field(name="each_s")
    left_s: float | None

    def as_dict(self) -> dict[str, object]:
        """Return the fields by the names that they have in JSON."""
        fields: dict[str, object] = msgspec.to_builtins(self)
        return fields


class StepCounter:
    """Counts the steps of a command, and estimates how long the remaining ones take.

    A step is one of several runs of a command, such as a load point of a sweep.
    """

    def __init__(self, count: int, *, at_most: bool = False, weights: Sequence[float] = ()) -> None:
        """Start to measure the time. `begin_step` must follow for each step.

        Args:
            count: The number of steps.
            at_most: Whether `count` is an upper limit, and there may be far fewer steps. Then only
                the caller can estimate the remaining time.
            weights: How long each step takes relative to the others. They must be positive, one
                for each step. Otherwise they are ignored, and all steps count as equally long: they
                only improve an estimate, so a wrong list is not worth an error.
        """
        self._count = count
        self._count_is_limit = at_most
        has_weights = len(weights) == count and all(weight > 0 for weight in weights)
        self._weights = list(weights) if has_weights else [1.0] * count
        self._begun_count = 0
        self._start_ns = monotonic_ns()

    @property
    def elapsed_s(self) -> float:
        """Time since the first step began."""
        return (monotonic_ns() - self._start_ns) / _NS_PER_S

    def begin_step(self, remaining: RemainingSteps | None = None) -> Step:
        """Count a new step, and return it with an estimate of the time until the last one ends.

        Commands that take less than MIN_FORECAST_S have no estimate, because the time would be over
        before the user has read it.

        Args:
            remaining: The caller's own estimate of this step and the following ones. Without one,
                the time is extrapolated from the finished steps.
        """
        elapsed_s = self.elapsed_s
        finished_count = self._begun_count
        self._begun_count += 1

        expected_count = None
        if remaining is None:
            time_left_s = self._extrapolate_left_s(finished_count, elapsed_s)
        else:
            expected_count = self._expected_count(finished_count, remaining)
            time_left_s = _omit_short_forecast(remaining.seconds, elapsed_s)

        mean_step_s = _mean_step_s(finished_count, elapsed_s)
        return Step(
            number=self._begun_count,
            max_count=self._count,
            at_most=self._count_is_limit,
            expected_count=expected_count,
            elapsed_s=round(elapsed_s, 1),
            mean_s=_round_if_known(mean_step_s),
            left_s=_round_if_known(time_left_s),
        )

    def _expected_count(self, finished_count: int, remaining: RemainingSteps) -> int:
        """Return how many steps there will be by the caller's estimate of the remaining ones."""
        remaining_count = max(round(remaining.steps), 1)
        return min(finished_count + remaining_count, self._count)

    def _extrapolate_left_s(self, finished_count: int, elapsed_s: float) -> float | None:
        """Return the time that the remaining steps take, extrapolated from the finished ones.

        The weights say how long steps take relative to each other. If the finished steps, with the
        weights 1 and 2, took 30 s, a remaining step with the weight 4 takes 40 s.

        Return None if no step was finished, if the steps were short, or if their number is open.
        """
        if not finished_count or elapsed_s < MIN_FORECAST_S or self._count_is_limit:
            return None
        finished_weight = sum(self._weights[:finished_count])
        remaining_weight = sum(self._weights) - finished_weight
        seconds_per_weight = elapsed_s / finished_weight
        return seconds_per_weight * remaining_weight


def _mean_step_s(finished_count: int, elapsed_s: float) -> float | None:
    """Return the mean time of the finished steps, or None if they took too little time."""
    if not finished_count or elapsed_s < MIN_FORECAST_S:
        return None
    return elapsed_s / finished_count


def _omit_short_forecast(left_s: float | None, elapsed_s: float) -> float | None:
    """Return the remaining time of a command, or None if the whole command takes little time."""
    if left_s is None or elapsed_s + left_s < MIN_FORECAST_S:
        return None
    return left_s


def describe_step(name: str, step: Step) -> str:
    """Return a step as text: `c8: 3 of 6, about 12 min left, until 14:32`."""
    text = f"{name}: {step.number} of {_describe_step_count(step)}"
    if step.left_s is None and step.mean_s is None:
        return text
    if step.left_s is None:
        return f"{text}, about {format.duration(step.mean_s)} each"
    end = datetime.datetime.now() + datetime.timedelta(seconds=step.left_s)
    return f"{text}, about {format.duration(step.left_s)} left, done at {end:%H:%M}"


def _describe_step_count(step: Step) -> str:
    if step.expected_count is not None:
        return f"about {step.expected_count}"
    return f"at most {step.max_count}" if step.at_most else f"{step.max_count}"
