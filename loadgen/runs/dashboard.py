"""The live view of a run: a process that reads the growing files of a run and draws them.

The process shares only files with the workers, so watching a run costs them nothing. `LiveStatus`
holds what is known of the run and computes the numbers; `render` turns it into a progress bar and
a table of rich.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import StringIO
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import numpy as np
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.limits import CPU_SHARE
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import OK, UNFINISHED, Columns
from loadgen.core.results.manifest import RunManifest, StagePlan, WorkerSample, decode_manifest
from loadgen.core.results.record import BIN_NS, KINDS, ROW, concatenate_rows, select_rows
from loadgen.core.results.record_log import Tail
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.slo import Term
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import quantile_of
from loadgen.telemetry.reader_process import ReaderProcess

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress
    from rich.table import Table

REFRESH_S = 0.5
RECENT_S = 10.0  # rates and the first column of latencies cover this much time
MIN_RECENT_SPAN_S = 0.1  # rates of a run that has just started refer to at least this much time
TIMELINE_DELAY_S = 2.0  # workers store their timelines at most this late
SNAPSHOT_WIDTH = 100  # columns, where the view is drawn into a page
TIMELINE_DTYPE = "<i8"  # the numbers in a timeline file
NS_PER_S = 1e9
NS_PER_MS = 1e6

Percentiles = tuple[float | None, float | None]
"""p50 and p99 in ms; None without samples."""

NO_PERCENTILES: Percentiles = (None, None)


@dataclass(frozen=True)
class LatencyStatus:
    """The distribution of one latency: p50 and p99 in ms, None without samples.

    Attributes:
        recent: p50 and p99 over the last `RECENT_S` seconds.
        overall: p50 and p99 since the start of the run.
        objective: the SLO term on this latency, None without one.
        is_met: whether the objective is met since the start; None without samples or objective.
    """

    recent: Percentiles
    overall: Percentiles
    objective: Term | None = None
    is_met: bool | None = None


class LiveStatus:
    """What is known of a run that is still going on, in bounded memory.

    Distributions and counts cover the time since the start. The records of the last `RECENT_S`
    seconds are kept for the rates. `now_s` is the time since the start of the run; the caller
    advances it.
    """

    def __init__(self, manifest: RunManifest) -> None:
        """Start with a run of which nothing but its manifest is known."""
        self.manifest = manifest
        self.now_s = 0.0

        # Counts of requests: successful, failed by kind of error, and ended in any way.
        self.ok = 0
        self.error_counts = np.zeros(len(KINDS), np.int64)
        self._finished = 0

        # The SLO attainment is the number of good requests / the number that counts for the SLO.
        self._good = 0
        self._counted_for_slo = 0

        self._histograms = {"ttft": Histogram(), "tpot": Histogram()}
        self._recent_rows = np.zeros(0, ROW)
        self._last_sample_by_worker: dict[int, WorkerSample] = {}

        # The last value of each metric, by the page, the name and the labels of the metric.
        self._server_samples: dict[tuple[str, str, str], MetricSample] = {}

    def add_records(self, rows: NDArray[np.void]) -> None:
        """Add the records of requests that have ended, with a row for each request.

        The requests need not be in the order in which they ended.
        """
        columns = Columns(rows)
        is_ok = columns.has_status(OK)
        ended_count = len(rows)
        self._finished += ended_count
        self.ok += int(is_ok.sum())
        self._count_errors(columns)
        self._count_for_slo(columns)

        for metric_name, histogram in self._histograms.items():
            values_ns = columns.measure(metric_name)[is_ok]
            histogram.add(metrics.drop_undefined(values_ns))

        self._recent_rows = concatenate_rows((self._recent_rows, rows))

    def _count_errors(self, columns: Columns) -> None:
        """Add the failed requests to the number of errors of each kind."""
        is_failed = ~(columns.has_status(OK) | columns.has_status(UNFINISHED))
        kinds_of_failed = columns["kind"][is_failed]
        self.error_counts += np.bincount(kinds_of_failed, minlength=len(KINDS))

    def _count_for_slo(self, columns: Columns) -> None:
        """Add the requests that count for the SLO, and those of them that met it."""
        slo = self.manifest.slo
        if slo is None:
            return
        is_counted = outcomes.is_counted(columns, slo)
        is_good = outcomes.meets_slo(columns, slo)
        self._counted_for_slo += int(is_counted.sum())
        self._good += int(is_good.sum())

    def add_worker_samples(self, samples: Iterable[WorkerSample]) -> None:
        """Add what the workers measured of themselves; the last sample of each worker counts."""
        self._last_sample_by_worker.update((sample.worker, sample) for sample in samples)

    def add_server_samples(self, samples: Iterable[MetricSample]) -> None:
        """Add samples of the servers' metrics pages; the last value of each series counts."""
        for sample in samples:
            self._server_samples[sample.page, sample.name, sample.labels] = sample

    def recent_records(self) -> Columns:
        """Return the records of the last `RECENT_S` seconds, and forget older ones."""
        since_ns = round((self.now_s - RECENT_S) * NS_PER_S)
        is_recent = self._recent_rows["done_ns"] >= since_ns
        self._recent_rows = select_rows(self._recent_rows, is_recent)
        return Columns(self._recent_rows)

    @property
    def recent_span_s(self) -> float:
        """Length of the time that `recent_records` covers."""
        return max(min(self.now_s, RECENT_S), MIN_RECENT_SPAN_S)

    @property
    def finished(self) -> int:
        """Number of requests that have ended, whatever their outcome."""
        return self._finished

    @property
    def last_sample_s(self) -> float:
        """Time of the newest sample of a worker, in seconds of the run; 0 before the first."""
        return max((sample.t_s for sample in self._last_sample_by_worker.values()), default=0.0)

    @property
    def in_flight(self) -> int:
        """Number of requests in flight in all workers."""
        return sum(sample.in_flight for sample in self._last_sample_by_worker.values())

    @property
    def busiest_worker_share(self) -> float:
        """CPU share of the busiest worker, of one core."""
        return max(
            (sample.cpu_share for sample in self._last_sample_by_worker.values()), default=0.0
        )

    @property
    def attainment(self) -> float | None:
        """Share of the counted requests that met every objective; None without an SLO."""
        return self._good / self._counted_for_slo if self._counted_for_slo else None

    @property
    def planned(self) -> int | None:
        """Number of requests of the schedule; None if a stage of the load ends by time."""
        stages = self.manifest.stages
        request_counts = [stage.slots for stage in stages if stage.slots is not None]
        if not stages or len(request_counts) < len(stages):
            return None
        return sum(request_counts)

    @property
    def stage(self) -> StagePlan | None:
        """The stage that runs at `now_s`."""
        now_ns = self.now_s * NS_PER_S
        started_stages = [stage for stage in self.manifest.stages if stage.start_ns <= now_ns]
        return started_stages[-1] if started_stages else None

    @property
    def load_left_s(self) -> float | None:
        """Seconds until the load ends, 0 during the drain; None without a fixed end."""
        end_ns = self.manifest.stages[-1].end_ns if self.manifest.stages else None
        return None if end_ns is None else max(end_ns / NS_PER_S - self.now_s, 0.0)

    @property
    def server_gauges(self) -> dict[str, float]:
        """Queue and KV cache of the servers by their own metrics pages, by quantity."""
        return series.compute_gauges(self._server_samples.values())

    def latency(self, name: str) -> LatencyStatus:
        """Return the percentiles of `ttft` or `tpot`, and whether it meets its objective so far."""
        histogram = self._histograms[name]
        objective = self._objective(name)
        overall = NO_PERCENTILES
        is_met = None

        if histogram.count:
            overall = (
                histogram.quantile(0.5) / NS_PER_MS,
                histogram.quantile(0.99) / NS_PER_MS,
            )

        if histogram.count and objective is not None:
            is_met = bool(histogram.quantile(objective.quantile) <= objective.limit_ns)

        return LatencyStatus(self._recent_percentiles(name), overall, objective, is_met)

    def _recent_percentiles(self, name: str) -> Percentiles:
        """Return the percentiles of a latency over the last RECENT_S, from single records."""
        recent = self.recent_records()
        values_ns = metrics.drop_undefined(recent.measure(name)[recent.has_status(OK)])
        if not len(values_ns):
            return NO_PERCENTILES
        return (quantile_of(values_ns, 0.5) / NS_PER_MS, quantile_of(values_ns, 0.99) / NS_PER_MS)

    def _objective(self, name: str) -> Term | None:
        """Return the objective of the highest percentile for a metric, or None without one."""
        terms = self.manifest.slo.terms if self.manifest.slo is not None else ()
        terms_on_metric = [term for term in terms if term.metric == name]
        return max(terms_on_metric, key=attrgetter("quantile"), default=None)


def render(status: LiveStatus, output_tokens_per_s: float | None = None) -> Group:
    """Return the live view: a progress bar, a table of latencies, and about five lines of facts.

    Without `output_tokens_per_s`, the output tokens of the requests that ended recently are used.
    """
    from rich.console import Group

    return Group(
        _progress_bar(status), _latency_table(status), _fact_table(status, output_tokens_per_s)
    )


def _progress_bar(status: LiveStatus) -> Progress:
    """Return a bar with the current stage, the requests that have ended, and the time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    stage = status.stage
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[time]}"),
    )

    progress.add_task(
        "" if stage is None else f"{stage.name} {stage.arrival}".strip(),
        total=status.planned,
        completed=status.finished,
        time=_describe_time(status),
    )
    return progress


def _fact_table(status: LiveStatus, output_tokens_per_s: float | None) -> Table:
    """Return a line for each fact: concurrency, throughput, SLO, server, client and errors.

    SLO, server and errors have a line only if something is known about them.
    """
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("In flight", format.count(status.in_flight))
    table.add_row("Throughput", _describe_throughput(status, output_tokens_per_s))

    if status.attainment is not None:
        table.add_row("SLO attainment", format.percent(status.attainment))

    if status.server_gauges:
        table.add_row("Server", _describe_server(status.server_gauges))

    is_client_busy = status.busiest_worker_share > CPU_SHARE
    table.add_row(
        "Client CPU",
        f"{format.percent(status.busiest_worker_share)} of a core",
        style="bold red" if is_client_busy else None,
    )

    if status.error_counts.any():
        table.add_row("Errors", _describe_errors(status.error_counts), style="red")

    return table


def _describe_throughput(status: LiveStatus, output_tokens_per_s: float | None) -> str:
    """Return the rates of completed requests and of output tokens over the last RECENT_S."""
    recent = status.recent_records()
    is_ok = recent.has_status(OK)
    if output_tokens_per_s is None:
        output_tokens = recent["output_tokens"][is_ok].clip(0).sum()
        output_tokens_per_s = output_tokens / status.recent_span_s
    request_rate = format.rate(is_ok.sum() / status.recent_span_s, " req/s")
    return f"{request_rate}, {format.rate(output_tokens_per_s, ' output tok/s')}"


def _latency_table(status: LiveStatus) -> Table:
    """Return the recent and the overall percentiles of TTFT and TPOT, with their objectives."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("p50 / p99 (ms)", f"last {RECENT_S:g} s", "overall", "objective"):
        table.add_column(title)

    for name in ("ttft", "tpot"):
        latency = status.latency(name)
        table.add_row(
            name.upper(),
            _format_percentiles(latency.recent),
            _format_percentiles(latency.overall),
            _describe_objective(latency),
        )

    return table


def _format_percentiles(values_ms: Percentiles) -> str:
    p50_ms, p99_ms = values_ms
    return f"{format.milliseconds(p50_ms)} / {format.milliseconds(p99_ms)}"


def _describe_time(status: LiveStatus) -> str:
    elapsed = format.duration(status.now_s)
    left_s = status.load_left_s
    if left_s is None:
        return elapsed
    if left_s > 0:
        return f"{elapsed}, {format.duration(left_s)} left"
    return f"{elapsed}, draining (Ctrl-C ends it)"


def _describe_objective(latency: LatencyStatus) -> str:
    if latency.objective is None:
        return ""
    limit = format.milliseconds(latency.objective.limit_ns / NS_PER_MS)
    text = f"p{latency.objective.quantile * 100:g} <= {limit}"
    if latency.is_met is None:
        return text
    return f"[green]{text}: met[/]" if latency.is_met else f"[bold red]{text}: missed[/]"


def _describe_server(gauges: dict[str, float]) -> str:
    parts = []
    if series.RUNNING in gauges:
        parts.append(f"{gauges[series.RUNNING]:,.0f} running")

    if series.WAITING in gauges:
        parts.append(f"{gauges[series.WAITING]:,.0f} waiting")

    if series.KV_USE in gauges:
        parts.append(f"KV cache {format.percent(gauges[series.KV_USE])} full")

    return ", ".join(parts)


def _describe_errors(counts: Sequence[int] | NDArray[np.int64]) -> str:
    most_frequent_first = sorted(zip(counts, KINDS, strict=True), reverse=True)
    return ", ".join(
        f"{kind or 'other'} {format.count(int(count))}"
        for count, kind in most_frequent_first
        if count
    )


def output_events_per_s(run_dir: Path, begin_s: float, end_s: float) -> float | None:
    """Return output events per second between two times of a run, or None if none are stored.

    An output event is a chunk of a streamed response. Each worker counts them in bins of BIN_NS and
    appends the counts to a timeline file as 64-bit integers.
    """
    first_bin = max(int(begin_s * NS_PER_S / BIN_NS), 0)
    end_bin = int(end_s * NS_PER_S / BIN_NS)
    timelines = (run_dir / "flows").glob("w*.timeline.*")

    # A file is written under a name that ends with .new, and renamed when it is complete.
    files = [file for file in timelines if file.suffix != ".new"]
    if not files or end_bin <= first_bin:
        return None

    event_count = 0
    for file in files:
        counts_by_bin = np.fromfile(file, TIMELINE_DTYPE)
        event_count += int(counts_by_bin[first_bin:end_bin].sum())

    duration_s = (end_bin - first_bin) * BIN_NS / NS_PER_S
    return event_count / duration_s


def read_status(run_dir: Path) -> LiveStatus:
    """Return the status of a run from the records that are not yet in Parquet files."""
    status = LiveStatus(decode_manifest((run_dir / "run.json").read_bytes()))
    with closing(Tail(run_dir)) as tail:
        _read_new(tail, status)
    status.now_s = status.last_sample_s
    return status


def snapshot(run_dir: Path) -> str:
    """Return the live view of the run in `run_dir`, as it is now, as plain text."""
    from rich.console import Console

    text = StringIO()
    console = Console(file=text, width=SNAPSHOT_WIDTH, color_system=None)
    console.print(render(read_status(run_dir)))
    return text.getvalue()


class _RunReader:
    """Reads a run that is going on, and keeps its `LiveStatus` up to date.

    Workers write a sample of themselves about once per second, with the time of the run. So the
    time of the run is the time of the last sample, plus the time since that sample was read.

    Attributes:
        status: What is known of the run.
    """

    def __init__(self, run_dir: Path, tail: Tail) -> None:
        """Prepare to read a run through `tail`, which returns what was appended to its files."""
        self.status = LiveStatus(decode_manifest((run_dir / "run.json").read_bytes()))
        self._run_dir = run_dir
        self._tail = tail
        self._last_sample_read_at_s = monotonic()

    def read_new(self) -> None:
        """Add what was written since the last call, and advance the time of the run."""
        previous_sample_s = self.status.last_sample_s
        _read_new(self._tail, self.status)
        if self.status.last_sample_s > previous_sample_s:
            self._last_sample_read_at_s = monotonic()
        since_sample_s = monotonic() - self._last_sample_read_at_s
        self.status.now_s = self.status.last_sample_s + since_sample_s

    @property
    def has_started(self) -> bool:
        """Whether a worker has written its first sample."""
        return self.status.last_sample_s > 0.0

    def render(self) -> Group:
        """Return the live view of the run as it is now."""
        timeline_end_s = self.status.now_s - TIMELINE_DELAY_S
        timeline_start_s = timeline_end_s - RECENT_S
        events_per_s = output_events_per_s(self._run_dir, timeline_start_s, timeline_end_s)
        return render(self.status, events_per_s)


def follow(run_dir: Path, stop: TextIO) -> None:
    """Draw the live view of a run on stderr every REFRESH_S until the run ends.

    Nothing is drawn before the first sample of a worker.

    Args:
        run_dir: The directory of the run.
        stop: A stream that becomes readable, or reaches its end, when the run has ended. The
            process that executes the run closes it.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with (
        closing(Tail(run_dir)) as tail,
        Live(console=console, auto_refresh=False, transient=True) as live,
    ):
        reader = _RunReader(run_dir, tail)
        while not _wait_until_readable(stop, REFRESH_S):
            reader.read_new()
            if reader.has_started:
                live.update(reader.render(), refresh=True)


def _wait_until_readable(stream: TextIO, timeout_s: float) -> bool:
    """Wait until a stream is readable or at its end. Return False if the time is over before."""
    readable_streams, _, _ = select.select([stream], [], [], timeout_s)
    return bool(readable_streams)


def _read_new(tail: Tail, status: LiveStatus) -> None:
    """Add what the workers have appended to the files of the run since the last call."""
    status.add_records(tail.rows())
    status.add_worker_samples(tail.seconds())
    status.add_server_samples(tail.server())


class Dashboard(ReaderProcess):
    """The process that draws the live view until the run ends."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__("loadgen.runs.dashboard", str(run_dir))


if __name__ == "__main__":
    os.nice(5)
    follow(Path(sys.argv[1]), sys.stdin)
