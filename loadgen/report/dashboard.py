"""The live view of a run: a process of its own that reads the run's folder as it grows and draws on the terminal.

It shares nothing with the workers but their files, so that looking costs them nothing. `View` is pure: rows in, a
`Picture` out; only `follow` and `Live` touch files, the clock and the terminal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from loadgen import format
from loadgen.limits import CPU_SHARE
from loadgen.metrics import columns as metrics
from loadgen.metrics.columns import CANCELLED, OK, UNDEFINED, Columns
from loadgen.results import manifest
from loadgen.results.record import BIN_NS, KINDS, ROW
from loadgen.stats.quantiles import Histogram, index

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.results.manifest import Header, Second

EVERY_S = 0.5
RECENT_S = 10.0
TARGETS = 24  # rows of targets on one screen
ABOVE, WRAPPED = 14, 4  # lines above them; more of them on a screen narrower than the bar
BAR = 60  # columns


class LatencyView(NamedTuple):
    """p50 and p99 in ms over the last RECENT_S and since the start; None where nothing came."""

    recent: tuple[float | None, float | None]
    all: tuple[float | None, float | None]


class TargetView(NamedTuple):
    """One of several targets, over the last RECENT_S."""

    name: str
    ok_per_s: float
    failed: int  # since the start
    ttft: tuple[float | None, float | None]


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """All that one look at a run shows; rates per second over the last RECENT_S."""

    elapsed_s: float
    left_s: float | None
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
    good_recent: float | None  # share within the SLO; null without one
    good_all: float | None
    errors: tuple[tuple[str, int], ...]
    send_lag_p99: float | None
    client_lag_p99: float | None
    cpu: float | None
    nodes: tuple[TargetView, ...]


class View:
    """What has been seen of a run. Memory does not grow with it: histograms, and the rows of the last seconds."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._recent = np.zeros(0, ROW)
        self._ttft, self._tpot = Histogram(), Histogram()
        self._statuses = np.zeros(8, np.int64)
        self._kinds = np.zeros(len(KINDS), np.int64)
        self._good = self._counted = 0
        self._failed = np.zeros(max(len(header.targets), 1), np.int64)
        self._seconds: list[Second] = []

    def add(self, rows: NDArray[np.void]) -> None:
        """New rows, of any worker."""
        if not len(rows):
            return
        columns = Columns(rows)
        ok = columns.where(OK)
        for histogram, name in ((self._ttft, "ttft"), (self._tpot, "tpot")):
            histogram.add(metrics.defined(columns.measure(name)[ok]))
        self._statuses += np.bincount(columns["status"], minlength=8)[:8]
        self._kinds += np.bincount(columns["kind"][~ok], minlength=len(KINDS))[: len(KINDS)]
        self._failed += np.bincount(columns["target"][~ok], minlength=len(self._failed))[: len(self._failed)]
        self._counted += int((~columns.where(CANCELLED)).sum())
        if self._header.slo is not None:
            self._good += int(metrics.meets(columns, self._header.slo).sum())
        self._recent = np.concatenate([self._recent, rows])

    def sample(self, seconds: list[Second]) -> None:
        """What the workers noted of themselves."""
        self._seconds = [*self._seconds, *seconds][-64 * 16 :]

    @property
    def latest_s(self) -> float:
        """The latest instant that anything is known of."""
        return max((second.t_s for second in self._seconds), default=0.0)

    def picture(self, now_s: float, events: float | None = None) -> Picture:
        """As of an instant of the run. `events`: output events per second, from the timeline."""
        since = round((now_s - RECENT_S) * 1e9)
        self._recent = self._recent[self._recent["done_ns"] >= since]
        recent = Columns(self._recent)
        span = max(min(now_s, RECENT_S), 0.1)
        ok = recent.where(OK)
        done, planned = int(self._statuses.sum()), self._planned()
        good = None
        if self._header.slo is not None and len(recent):
            good = float(metrics.meets(recent, self._header.slo).sum() / len(recent))
        stage = self._stage(now_s)
        found = [(KINDS[i] or "other", int(count)) for i, count in enumerate(self._kinds) if count]
        return Picture(
            elapsed_s=now_s,
            left_s=self._left(now_s, done, planned, len(recent) / span),
            stage=" · ".join(filter(None, (stage.name, stage.arrival))) if stage is not None else "",
            offered=stage.rate if stage is not None else None,
            sent=self._sent(),
            completed=float(ok.sum()) / span,
            done=done,
            planned=planned,
            ok=int(self._statuses[OK]),
            in_flight=self._latest("in_flight"),
            tokens=events if events is not None else float(recent["output_tokens"][ok].clip(0).sum()) / span,
            ttft=LatencyView(_exact(recent.measure("ttft")[ok]), _pooled(self._ttft)),
            tpot=LatencyView(_exact(recent.measure("tpot")[ok]), _pooled(self._tpot)),
            good_recent=good,
            good_all=self._good / self._counted if self._header.slo is not None and self._counted else None,
            errors=tuple(sorted(found, key=lambda kind: -kind[1])),
            send_lag_p99=_exact(recent.measure("send_lag")[recent["sent_ns"] >= 0])[1],
            client_lag_p99=_exact(recent.measure("client_lag"))[1],
            cpu=max((one.cpu_share for one in self._last().values()), default=None),
            nodes=tuple(self._nodes(recent, ok, span)),
        )

    def _planned(self) -> int | None:
        slots = [stage.slots for stage in self._header.stages]
        return sum(slot for slot in slots if slot is not None) if slots and None not in slots else None

    def _stage(self, now_s: float) -> manifest.StagePlan | None:
        begun = [stage for stage in self._header.stages if stage.start_ns <= now_s * 1e9]
        return begun[-1] if begun else None

    def _left(self, now_s: float, done: int, planned: int | None, rate: float) -> float | None:
        """To the end of the timetable; where it has none, by the pace of the last seconds."""
        ends = [stage.end_ns for stage in self._header.stages]
        if ends and ends[-1] is not None:
            return max(ends[-1] / 1e9 - now_s, 0.0)
        return (planned - done) / rate if planned is not None and rate > 0 else None

    def _last(self) -> dict[int, Second]:
        return {second.worker: second for second in self._seconds}

    def _latest(self, name: str) -> int | None:
        last = self._last()
        return sum(getattr(second, name) for second in last.values()) if last else None

    def _sent(self) -> float | None:
        """Per second, from the workers' own counts some RECENT_S apart."""
        last = self._last()
        if not last:
            return None
        earliest: dict[int, Second] = {}
        for second in self._seconds:
            if second.t_s >= last[second.worker].t_s - RECENT_S:
                earliest.setdefault(second.worker, second)
        rate = 0.0
        for worker, one in last.items():
            before = earliest[worker]
            span, sent = one.t_s - before.t_s, one.sent - before.sent
            rate += sent / span if span > 0 else one.sent / max(one.t_s, 0.1)
        return rate

    def _nodes(self, recent: Columns, ok: NDArray[np.bool_], span: float) -> list[TargetView]:
        if len(self._header.targets) < 2:
            return []
        ttft = recent.measure("ttft")
        found = []
        for i, target in enumerate(self._header.targets):
            mine = ok & (recent["target"] == i)
            name = target.name or target.url
            found.append(TargetView(name, float(mine.sum()) / span, int(self._failed[i]), _exact(ttft[mine])))
        return found


def _exact(values_ns: NDArray[np.int64]) -> tuple[float | None, float | None]:
    values = np.sort(values_ns[values_ns != UNDEFINED])
    if not len(values):
        return None, None
    return float(values[index(len(values), 0.5)]) / 1e6, float(values[index(len(values), 0.99)]) / 1e6


def _pooled(histogram: Histogram) -> tuple[float | None, float | None]:
    return (histogram.quantile(0.5) / 1e6, histogram.quantile(0.99) / 1e6) if histogram.count else (None, None)


# -- drawing -------------------------------------------------------------------------------------------------------


def draw(picture: Picture, width: int = 80, height: int = 100) -> Any:
    """A picture as something that rich prints; some ten lines and those of the targets, the worst off first where not
    all have room."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def pair(found: tuple[float | None, float | None]) -> str:
        return f"{format.milliseconds(found[0])} / {format.milliseconds(found[1])}"

    total = f" of {format.count(picture.planned)}" if picture.planned is not None else ""
    left = (
        f", {format.duration(picture.left_s)} left" if picture.left_s else ", draining" if picture.left_s == 0 else ""
    )
    head = Text(f"{picture.stage}  ", style="bold")
    head.append(
        f"{format.duration(picture.elapsed_s)}{left}, {format.count(picture.done)}{total} done", style="not bold"
    )
    parts: list[Any] = [head]
    if picture.planned:
        bar = min(BAR, width)
        full = min(round(bar * picture.done / picture.planned), bar)
        parts.append(Text.assemble(("━" * full, "green"), ("━" * (bar - full), "dim")))
    rates = Table.grid(padding=(0, 2))
    offered = f"{format.rate(picture.offered)} offered, " if picture.offered is not None else ""
    rates.add_row("load", f"{offered}{format.rate(picture.sent)} sent, {format.rate(picture.completed)} completed")
    rates.add_row("in flight", f"{format.count(picture.in_flight)},  {format.rate(picture.tokens)} output tokens")
    rates.add_row("", "")
    column, since = (20, "since the start") if width >= BAR else (12, "since start")
    rates.add_row("ms, p50 / p99", f"{'last 10 s':<{column}}{since}", style="dim")
    for name, spread in (("TTFT", picture.ttft), ("TPOT", picture.tpot)):
        rates.add_row(name, f"{pair(spread.recent):<{column}}{pair(spread.all)}")
    if picture.good_all is not None:
        style = "green" if picture.good_all >= 0.99 else "yellow"
        good = f"{format.percent(picture.good_recent):<{column}}{format.percent(picture.good_all)}"
        rates.add_row("within SLO", Text(good, style=style))
    busy = picture.cpu is not None and picture.cpu > CPU_SHARE
    own = f"CPU {format.percent(picture.cpu)} of a core, send lag p99 {format.milliseconds(picture.send_lag_p99)} ms, "
    own += f"client lag p99 {format.milliseconds(picture.client_lag_p99)} ms"
    rates.add_row("generator", Text(own, style="bold red" if busy else ""))
    if picture.errors:
        told = ", ".join(f"{kind} {format.count(count)}" for kind, count in picture.errors[:6])
        rates.add_row("errors", Text(told, style="red"))
    parts.append(rates)
    if picture.nodes:
        nodes = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("target", "ok/s", "failed", "TTFT p50 / p99"):
            nodes.add_column(title, justify="left" if title == "target" else "right", header_style="dim")
        room = max(min(TARGETS, height - ABOVE - WRAPPED * (width < BAR)), 3)
        shown = list(picture.nodes)
        if len(shown) > room:
            shown = sorted(picture.nodes, key=lambda node: (node.failed, node.ttft[1] or 0.0), reverse=True)[: room - 1]
        for node in shown:
            nodes.add_row(node.name, format.quantity(node.ok_per_s), format.count(node.failed), pair(node.ttft))
        parts.append(nodes)
        if len(shown) < len(picture.nodes):
            parts.append(Text(f"and {len(picture.nodes) - len(shown)} more, none of them worse", style="dim"))
    return Group(*parts)


# -- the folder and the terminal -----------------------------------------------------------------------------------


class SpoolTail:
    """Reads what is new in a run's spool; a half-written line or row waits for its other half."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[Path, int] = {}

    def rows(self) -> NDArray[np.void]:
        parts = [np.frombuffer(data, ROW) for data in self._new("w*.rows", ROW.itemsize)]
        return np.concatenate(parts) if parts else np.zeros(0, ROW)

    def seconds(self) -> list[Second]:
        return [one for data in self._new("w*.seconds", 0) for one in manifest.decode_seconds(data)]

    def events(self, low_s: float, high_s: float) -> float | None:
        """Output events per second in a stretch, from the timelines, which lag by some 2 s."""
        low, high = int(low_s * 1e9 / BIN_NS), int(high_s * 1e9 / BIN_NS)
        total, found = 0, False
        for file in (self._folder / "flows").glob("w*.timeline.*"):
            if not file.name.endswith(".new"):
                counts = np.fromfile(file, "<i8")
                total += int(counts[max(low, 0) : high].sum())
                found = True
        return total * 1e9 / BIN_NS / (high - max(low, 0)) if found and high > max(low, 0) else None

    def _new(self, pattern: str, size: int) -> list[bytes]:
        parts = []
        for path in sorted(self._folder.glob(f"spool/{pattern}")):
            start = self._places.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read()
            except FileNotFoundError:  # the run has ended between the glob and here
                continue
            whole = len(data) // size * size if size else data.rfind(b"\n") + 1
            self._places[path] = start + whole
            if whole:
                parts.append(data[:whole])
        return parts


def follow(folder: Path, stop: Any) -> None:
    """Draw a run's folder on stderr until `stop` (a file) has something to read or ends."""
    import select
    from time import monotonic

    from rich.console import Console
    from rich.live import Live as Screen

    view = View(manifest.decode((folder / "run.json").read_bytes()))
    tail = SpoolTail(folder)
    seen_s, seen_at = 0.0, monotonic()
    with Screen(console=Console(stderr=True), auto_refresh=False, transient=True) as screen:
        while not select.select([stop], [], [], EVERY_S)[0]:
            view.add(tail.rows())
            view.sample(tail.seconds())
            if view.latest_s > seen_s:
                seen_s, seen_at = view.latest_s, monotonic()
            if seen_s:
                now_s = seen_s + monotonic() - seen_at
                events = tail.events(now_s - RECENT_S - 2, now_s - 2)
                screen.update(draw(view.picture(now_s, events), *screen.console.size), refresh=True)


class Dashboard:
    """The process that follows a run, from the command that started the run."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.report.dashboard", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the run's affair
        )

    def close(self) -> None:
        """Take the view away; waits until the terminal is as it was."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    os.nice(5)
    follow(Path(sys.argv[1]), sys.stdin)
