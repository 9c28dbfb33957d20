"""The live dashboard of a run: a separate process that reads the run's folder as it grows and draws on the terminal.

It shares only files with the workers, so that watching a run costs them nothing. `View` is pure: it takes rows and
returns a `Picture`. Only `follow`, `events_per_s` and `Dashboard` touch files, processes, the clock and the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.limits import CPU_SHARE
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import OK, UNDEFINED, UNFINISHED, Columns
from loadgen.core.results import manifest
from loadgen.core.results.manifest import Header, Second
from loadgen.core.results.record import BIN_NS, KINDS, ROW, joined, picked
from loadgen.core.results.spool import Tail
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.stats.quantiles import Histogram, element
from loadgen.runs.progress import draining
from loadgen.telemetry.reader_process import ReaderProcess

EVERY_S = 0.5
RECENT_S = 10.0
TARGETS = 24  # most rows of targets on one screen
ABOVE, WRAPPED = 14, 4  # lines above the targets; extra lines on a screen narrower than BAR
BAR = 60  # width of the progress bar, in columns
WIDE = 70  # columns of a screen with room between figures
PAGE = 100  # width of the view in a page, in columns
POINTS = 40  # most points of a trend line, evenly over the run
LINES_FROM, BESIDE_LINES = (
    60,
    28,
)  # columns of a screen with room for trend lines; those of their names and figures
KEPT = {
    None: "",
    True: "green",
    False: "bold red",
}  # how a figure is shown that keeps its limit, or does not
LEVELS = "▁▂▃▄▅▆▇█"


class LatencyView(NamedTuple):
    """p50 and p99 in ms, over the last RECENT_S and since the start; None without samples.

    `limit`: of the SLO, in words, "" without one; `kept`: whether both keep it, at its percentile, None: not known.
    """

    recent: tuple[float | None, float | None]
    all: tuple[float | None, float | None]
    limit: str = ""
    kept: tuple[bool | None, bool | None] = (None, None)


class TrendPoint(NamedTuple):
    """What was shown at one instant: p50 in ms, output tokens per second, requests that wait at the servers."""

    ttft: float | None
    tpot: float | None
    tokens: float | None
    waiting: float | None


class TargetView(NamedTuple):
    """One of several targets, over the last RECENT_S; `ttft` is p50 and p99 in ms."""

    name: str
    ok_per_s: float
    failed: int  # since the start
    ttft: tuple[float | None, float | None]


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the dashboard shows at one instant. Rates are per second, over the last RECENT_S."""

    elapsed_s: float
    left_s: float | None
    drain_left_s: (
        float | None
    )  # after the end of the load: how much longer requests in flight may go on
    stage: str
    offered: float | None
    sent: float | None
    completed: float
    done: int
    planned: int | None
    ok: int
    in_flight: int | None
    tokens: float | None
    ttft: LatencyView
    tpot: LatencyView
    good_recent: float | None  # share of requests within the SLO; None without an SLO
    good_all: float | None
    errors: tuple[tuple[str, int], ...]
    send_lag_p99: float | None
    client_lag_p99: float | None
    cpu: float | None
    nodes: tuple[TargetView, ...]
    trend: tuple[TrendPoint, ...] = ()  # since the start
    server: dict[str, float] = {}  # by the servers' own pages, now: running, waiting, kv_use


class View:
    """What is known of a run so far, in bounded memory: histograms, and the rows of the last RECENT_S."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._recent = np.zeros(0, ROW)
        self._ttft, self._tpot = Histogram(), Histogram()
        self._statuses = np.zeros(8, np.int64)
        self._kinds = np.zeros(len(KINDS), np.int64)
        self._good = self._counted = 0
        self._failed = np.zeros(max(len(header.targets), 1), np.int64)
        self._seconds: list[Second] = []
        self._served: dict[tuple[str, str, str], MetricSample] = {}
        self._trend: list[TrendPoint] = []
        self._trend_step_s, self._trend_next_s = 1.0, 0.0

    def add(self, rows: NDArray[np.void]) -> None:
        """Add new rows, from any worker."""
        if not len(rows):
            return
        columns = Columns(rows)
        ok = columns.where(OK)
        for histogram, name in ((self._ttft, "ttft"), (self._tpot, "tpot")):
            histogram.add(metrics.defined(columns.measure(name)[ok]))
        self._statuses += np.bincount(columns["status"], minlength=8)[:8]
        not_ok = ~(ok | columns.where(UNFINISHED))
        self._kinds += np.bincount(columns["kind"][not_ok], minlength=len(KINDS))[: len(KINDS)]
        self._failed += np.bincount(columns["target"][not_ok], minlength=len(self._failed))[
            : len(self._failed)
        ]
        self._counted += int(outcomes.is_counted(columns, self._header.slo).sum())
        if self._header.slo is not None:
            self._good += int(outcomes.meets(columns, self._header.slo).sum())
        self._recent = joined((self._recent, rows))

    def sample(self, seconds: list[Second]) -> None:
        """Add the workers' reports about themselves; the last 1,024 are kept."""
        self._seconds = [*self._seconds, *seconds][-64 * 16 :]

    def serve(self, samples: Iterable[MetricSample]) -> None:
        """Add what the servers' metrics pages say; the last value of each series is kept."""
        self._served.update(
            ((sample.page, sample.name, sample.labels), sample) for sample in samples
        )

    @property
    def latest_s(self) -> float:
        """Time of the workers' latest report, in seconds of the run; 0 before the first."""
        return max((second.t_s for second in self._seconds), default=0.0)

    def picture(self, now_s: float, events: float | None = None) -> Picture:
        """What to show at `now_s`, in seconds of the run.

        `events`: output events per second, from the timeline; None: the output tokens of finished requests are used.
        """
        since_ns = round((now_s - RECENT_S) * 1e9)
        self._recent = picked(self._recent, self._recent["done_ns"] >= since_ns)
        recent = Columns(self._recent)
        span_s = max(min(now_s, RECENT_S), 0.1)
        ok = recent.where(OK)
        done, planned = int(self._statuses.sum()), self._planned_requests()
        good_recent = None
        if self._header.slo is not None and len(recent):
            good_recent = float(outcomes.meets(recent, self._header.slo).sum() / len(recent))
        stage, latest = self._current_stage(now_s), self._last_seconds()
        errors = [(KINDS[i] or "other", int(count)) for i, count in enumerate(self._kinds) if count]
        tokens = (
            events
            if events is not None
            else float(recent["output_tokens"][ok].clip(0).sum()) / span_s
        )
        ttft = self._latency("ttft", recent.measure("ttft")[ok], self._ttft)
        tpot = self._latency("tpot", recent.measure("tpot")[ok], self._tpot)
        server = series.gauges(self._served.values())
        self._remember(
            now_s, TrendPoint(ttft.recent[0], tpot.recent[0], tokens, server.get(series.WAITING))
        )
        return Picture(
            elapsed_s=now_s,
            left_s=self._remaining_s(now_s, done, planned, len(recent) / span_s),
            drain_left_s=self._drain_left_s(now_s),
            stage=" · ".join(filter(None, (stage.name, stage.arrival)))
            if stage is not None
            else "",
            offered=stage.rate if stage is not None else None,
            sent=self._sent_per_s(),
            completed=float(ok.sum()) / span_s,
            done=done,
            planned=planned,
            ok=int(self._statuses[OK]),
            in_flight=sum(second.in_flight for second in latest.values()) if latest else None,
            tokens=tokens,
            ttft=ttft,
            tpot=tpot,
            good_recent=good_recent,
            good_all=self._good / self._counted
            if self._header.slo is not None and self._counted
            else None,
            errors=tuple(sorted(errors, key=lambda kind: -kind[1])),
            send_lag_p99=_p50_p99_ms(recent.measure("send_lag")[recent["sent_ns"] >= 0])[1],
            client_lag_p99=_p50_p99_ms(recent.measure("client_lag"))[1],
            cpu=max((second.cpu_share for second in latest.values()), default=None),
            nodes=tuple(self._target_views(recent, ok, span_s)),
            trend=tuple(self._trend),
            server=server,
        )

    def _remember(self, now_s: float, point: TrendPoint) -> None:
        """Keep a point of the trend lines; of too many every second one, and from then on half as often."""
        if now_s < self._trend_next_s:
            return
        self._trend.append(point)
        if len(self._trend) > POINTS:
            self._trend, self._trend_step_s = self._trend[::2], 2 * self._trend_step_s
        self._trend_next_s = now_s + self._trend_step_s

    def _latency(self, metric: str, recent_ns: NDArray[np.int64], all_ns: Histogram) -> LatencyView:
        recent, since_start = _p50_p99_ms(recent_ns), _histogram_p50_p99_ms(all_ns)
        slo = self._header.slo
        term = (
            next((term for term in slo.terms if term.metric == metric), None)
            if slo is not None
            else None
        )
        if term is None:
            return LatencyView(recent, since_start)
        values = metrics.defined(recent_ns)
        kept = (
            element(values, term.quantile) <= term.limit_ns if len(values) else None,
            all_ns.quantile(term.quantile) <= term.limit_ns if all_ns.count else None,
        )
        limit = f"limit {format.milliseconds(term.limit_ns / 1e6)} at p{term.quantile * 100:g}"
        return LatencyView(recent, since_start, limit, kept)

    def _planned_requests(self) -> int | None:
        slots = [stage.slots for stage in self._header.stages]
        return (
            sum(slot for slot in slots if slot is not None) if slots and None not in slots else None
        )

    def _current_stage(self, now_s: float) -> manifest.StagePlan | None:
        started = [stage for stage in self._header.stages if stage.start_ns <= now_s * 1e9]
        return started[-1] if started else None

    def _remaining_s(
        self, now_s: float, done: int, planned: int | None, rate: float
    ) -> float | None:
        """Seconds to the end of the timetable; without a timed end, estimated from the recent rate; None if unknown."""
        ends = [stage.end_ns for stage in self._header.stages]
        if ends and ends[-1] is not None:
            return max(ends[-1] / 1e9 - now_s, 0.0)
        return (planned - done) / rate if planned is not None and rate > 0 else None

    def _drain_left_s(self, now_s: float) -> float | None:
        """Seconds until the drain ends; None while load is offered, and where there is no timed end."""
        end_ns, drain_s = (
            self._header.stages[-1].end_ns if self._header.stages else None,
            self._header.grace_s,
        )
        if end_ns is None or drain_s is None or now_s < end_ns / 1e9:
            return None
        return max(end_ns / 1e9 + drain_s - now_s, 0.0)

    def _last_seconds(self) -> dict[int, Second]:
        return {second.worker: second for second in self._seconds}

    def _sent_per_s(self) -> float | None:
        """Requests sent per second, from the workers' counts about RECENT_S apart; None before the first report."""
        latest_by_worker = self._last_seconds()
        if not latest_by_worker:
            return None
        earliest_by_worker: dict[int, Second] = {}
        for second in self._seconds:
            if second.t_s >= latest_by_worker[second.worker].t_s - RECENT_S:
                earliest_by_worker.setdefault(second.worker, second)
        rate = 0.0
        for worker, latest in latest_by_worker.items():
            earlier = earliest_by_worker[worker]
            span_s, sent = latest.t_s - earlier.t_s, latest.sent - earlier.sent
            rate += sent / span_s if span_s > 0 else latest.sent / max(latest.t_s, 0.1)
        return rate

    def _target_views(
        self, recent: Columns, ok: NDArray[np.bool_], span_s: float
    ) -> list[TargetView]:
        if len(self._header.targets) < 2:
            return []
        ttft = recent.measure("ttft")
        views = []
        for i, target in enumerate(self._header.targets):
            ok_here = ok & (recent["target"] == i)
            name = target.name or target.url
            views.append(
                TargetView(
                    name,
                    float(ok_here.sum()) / span_s,
                    int(self._failed[i]),
                    _p50_p99_ms(ttft[ok_here]),
                )
            )
        return views


def _p50_p99_ms(values_ns: NDArray[np.int64]) -> tuple[float | None, float | None]:
    values = values_ns[values_ns != UNDEFINED]
    return (
        (element(values, 0.5) / 1e6, element(values, 0.99) / 1e6) if len(values) else (None, None)
    )


def _histogram_p50_p99_ms(histogram: Histogram) -> tuple[float | None, float | None]:
    return (
        (histogram.quantile(0.5) / 1e6, histogram.quantile(0.99) / 1e6)
        if histogram.count
        else (None, None)
    )


def trend_line(values: Sequence[float | None]) -> str:
    """A line of bars, from 0 to the highest value; a gap where a value is not known. "" for fewer than two values."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    top = len(LEVELS) - 1
    highest = max(known) or 1.0
    return "".join(
        " " if value is None else LEVELS[round(value / highest * top)] for value in values
    )


# -- drawing -------------------------------------------------------------------------------------------------------


def draw(picture: Picture, width: int = 80, height: int = 100) -> Any:
    """The picture as a renderable of `rich`: about ten lines, and one line per target.

    Where not all targets fit, the worst are shown: most failed requests first, then the highest TTFT p99.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def pair(quantiles: tuple[float | None, float | None]) -> str:
        return f"{format.milliseconds(quantiles[0])} / {format.milliseconds(quantiles[1])}"

    total = f" of {format.count(picture.planned)}" if picture.planned is not None else ""
    left = f", {format.duration(picture.left_s)} left" if picture.left_s else ""
    if picture.left_s == 0:
        left = ", draining"
    head = Text(f"{picture.stage}  ", style="bold")
    head.append(
        f"{format.duration(picture.elapsed_s)}{left}, {format.count(picture.done)}{total} done",
        style="not bold",
    )
    parts: list[Any] = [head]
    if picture.planned:
        bar_columns = min(BAR, width)
        done_columns = min(round(bar_columns * picture.done / picture.planned), bar_columns)
        parts.append(
            Text.assemble(
                ("━" * done_columns, "green"), ("━" * (bar_columns - done_columns), "dim")
            )
        )
    rates = Table.grid(padding=(0, 2))
    offered = f"{format.rate(picture.offered)} offered, " if picture.offered is not None else ""
    rates.add_row(
        "load",
        f"{offered}{format.rate(picture.sent)} sent, {format.rate(picture.completed)} completed",
    )
    if picture.drain_left_s is not None and picture.in_flight:
        rates.add_row("after it", draining(picture.in_flight, picture.drain_left_s))
    else:
        rates.add_row(
            "in flight",
            f"{format.count(picture.in_flight)},  {format.rate(picture.tokens)} output tokens",
        )
    if picture.server:
        rates.add_row("server", _server_words(picture.server))
    rates.add_row("", "")
    column, since_title = (20, "since the start") if width >= WIDE else (13, "since start")
    rates.add_row("ms, p50 / p99", f"{'last 10 s':<{column}}{since_title}", style="dim")
    for name, latencies in (("TTFT", picture.ttft), ("TPOT", picture.tpot)):
        figures = Text(f"{pair(latencies.recent):<{column}}", style=KEPT[latencies.kept[0]])
        figures.append(pair(latencies.all), style=KEPT[latencies.kept[1]])
        rates.add_row(name, figures.append(f"  {latencies.limit}", style="dim"))
    if picture.good_all is not None:
        style = "green" if picture.good_all >= 0.99 else "yellow"
        shares = (
            f"{format.percent(picture.good_recent):<{column}}{format.percent(picture.good_all)}"
        )
        rates.add_row("within SLO", Text(shares, style=style))
    busy = picture.cpu is not None and picture.cpu > CPU_SHARE
    send, client = map(format.milliseconds, (picture.send_lag_p99, picture.client_lag_p99))
    core = " of a core" if width >= LINES_FROM + len(" of a core") else ""
    generator = f"CPU {format.percent(picture.cpu)}{core}, lag p99 send {send}, client {client} ms"
    rates.add_row("generator", Text(generator, style="bold red" if busy else ""))
    if picture.errors:
        error_counts = ", ".join(
            f"{kind} {format.count(count)}" for kind, count in picture.errors[:6]
        )
        rates.add_row("errors", Text(error_counts, style="red"))
    parts.append(rates)
    lines = _trend_rows(picture, width - BESIDE_LINES) if width >= LINES_FROM else []
    if lines:
        parts.append(_grid(lines))
    if picture.nodes:
        nodes = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("target", "ok/s", "failed", "TTFT p50 / p99"):
            nodes.add_column(
                title, justify="left" if title == "target" else "right", header_style="dim"
            )
        above = ABOVE + bool(picture.server) + len(lines)
        max_rows = max(min(TARGETS, height - above - WRAPPED * (width < BAR)), 3)
        shown = list(picture.nodes)
        if len(shown) > max_rows:
            shown = sorted(
                picture.nodes, key=lambda node: (node.failed, node.ttft[1] or 0.0), reverse=True
            )[: max_rows - 1]
        for node in shown:
            nodes.add_row(
                node.name,
                format.quantity(node.ok_per_s),
                format.count(node.failed),
                pair(node.ttft),
            )
        parts.append(nodes)
        if len(shown) < len(picture.nodes):
            parts.append(
                Text(f"and {len(picture.nodes) - len(shown)} more, none of them worse", style="dim")
            )
    return Group(*parts)


def _server_words(server: dict[str, float]) -> str:
    """What the servers say of themselves: how many requests run and wait there, how full the KV cache is."""
    waiting, running, used = (
        server.get(name) for name in (series.WAITING, series.RUNNING, series.KV_USE)
    )
    parts = [
        "" if running is None else f"{running:,.0f} running",
        "" if waiting is None else f"{waiting:,.0f} waiting",
        "" if used is None else f"KV cache {format.percent(used)} full",
    ]
    return ", ".join(filter(None, parts))


def _trend_rows(picture: Picture, columns: int) -> list[tuple[str, str, str]]:
    """A line of at most `columns` bars for each figure over the run so far, with its name and its highest value."""
    every = -(-len(picture.trend) // columns)
    trend = picture.trend[::-1][:: max(every, 1)][::-1]  # the latest is always there
    rows = []
    for name, title, unit in (
        ("ttft", "TTFT p50", " ms"),
        ("tpot", "TPOT p50", " ms"),
        ("tokens", "tokens", "/s"),
        ("waiting", "waiting", ""),
    ):
        values = [getattr(point, name) for point in trend]
        if line := trend_line(values):
            highest = max(value for value in values if value is not None)
            rows.append((title, line, f"to {format.quantity(highest)}{unit}"))
    return rows


def _grid(rows: Sequence[tuple[str, str, str]]) -> Any:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return grid


# -- the folder and the terminal -----------------------------------------------------------------------------------


def events_per_s(folder: Path, low_s: float, high_s: float) -> float | None:
    """Output events per second from low_s to high_s, by the timelines (about 2 s behind); None if unknown."""
    low, high = max(int(low_s * 1e9 / BIN_NS), 0), int(high_s * 1e9 / BIN_NS)
    files = [file for file in (folder / "flows").glob("w*.timeline.*") if file.suffix != ".new"]
    total = sum(int(np.fromfile(file, "<i8")[low:high].sum()) for file in files)
    return total * 1e9 / BIN_NS / (high - low) if files and high > low else None


def snapshot(folder: Path) -> str:
    """The run in `folder` as it is now, drawn as text: of the rows that are still in its spool."""
    from contextlib import closing
    from io import StringIO

    from rich.console import Console

    view, text = View(manifest.decode((folder / "run.json").read_bytes())), StringIO()
    with closing(Tail(folder)) as tail:
        view.add(tail.rows())
        view.sample(tail.seconds())
        view.serve(tail.server())
    Console(file=text, width=PAGE, color_system=None).print(draw(view.picture(view.latest_s), PAGE))
    return text.getvalue()


def follow(folder: Path, stop: Any) -> None:
    """Draw the run in `folder` on stderr until the file `stop` becomes readable or reaches its end."""
    import select
    from time import monotonic

    from rich.console import Console
    from rich.live import Live as Screen

    view = View(manifest.decode((folder / "run.json").read_bytes()))
    tail, latest_s, latest_at_s = Tail(folder), 0.0, monotonic()
    with Screen(console=Console(stderr=True), auto_refresh=False, transient=True) as screen:
        while not select.select([stop], [], [], EVERY_S)[0]:
            view.add(tail.rows())
            view.sample(tail.seconds())
            view.serve(tail.server())
            if view.latest_s > latest_s:
                latest_s, latest_at_s = view.latest_s, monotonic()
            if latest_s:
                now_s = latest_s + monotonic() - latest_at_s
                events = events_per_s(folder, now_s - RECENT_S - 2, now_s - 2)
                screen.update(draw(view.picture(now_s, events), *screen.console.size), refresh=True)


class Dashboard(ReaderProcess):
    """The dashboard process: drawn until the run ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__("loadgen.runs.dashboard", str(folder))


if __name__ == "__main__":
    os.nice(5)
    follow(Path(sys.argv[1]), sys.stdin)
