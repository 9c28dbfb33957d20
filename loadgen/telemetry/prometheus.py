"""Serve the metrics of a run to Prometheus while it goes on (`--prometheus`).

A sidecar process reads the growing folder, like the dashboard, so nothing is added to the process
of the load. The metrics end with the run.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from loadgen.core.errors import UserError
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics.columns import FAILED, LOST, OK, Columns
from loadgen.core.results.manifest import RunManifest, WorkerSample, decode_manifest
from loadgen.core.results.record import KINDS, STATUSES
from loadgen.core.results.record_log import Tail
from loadgen.core.stats.histogram import Histogram
from loadgen.figures import METRICS
from loadgen.telemetry.reader_process import ReaderProcess

BUCKET_EDGES = tuple(
    factor * 10.0**exponent for exponent in range(-4, 3) for factor in (1.0, 2.0, 5.0)
)
"""Upper edges of the buckets of all histograms, in seconds or another unit."""

DEFAULT_HOST = "127.0.0.1"
NICENESS = 5
NS_PER_S = 1e9
MICRO = 1e6
"""Histograms of metrics that are no times store millionths of their unit."""


class RunCollector(Collector):
    """Collects the metrics of a run whenever Prometheus scrapes them.

    At each scrape it reads the records that the run has added to its folder since the last scrape,
    and adds them to the counts and histograms so far.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare empty counts and histograms. The folder is first read at the first scrape."""
        self._folder = folder
        self._lock = threading.Lock()  # Each scrape runs in a thread of its own.
        self._manifest: RunManifest | None = None
        self._log_tail = Tail(folder)
        self._histograms = {metric: Histogram() for metric in METRICS.shown_in("prometheus")}
        self._status_counts = np.zeros(len(STATUSES), np.int64)
        self._kind_counts = np.zeros(len(KINDS), np.int64)
        self._output_tokens = 0
        self._samples: dict[int, WorkerSample] = {}

    def close(self) -> None:
        """Close the files of the run."""
        self._log_tail.close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. There are none before the run has begun."""
        with self._lock:
            manifest = self._read_manifest()
            if manifest is None:
                return

            self._read_records()
            yield from self._create_run_metrics(manifest)
            yield from self._create_request_metrics()
            yield from self._create_load_metrics(manifest)
            yield from self._create_latency_metrics()

    def _read_manifest(self) -> RunManifest | None:
        """Return the manifest of the run, or None as long as it has not been written."""
        if self._manifest is None:
            try:
                self._manifest = decode_manifest((self._folder / "run.json").read_bytes())
            except (OSError, UserError):
                return None
        return self._manifest

    def _read_records(self) -> None:
        """Add the records since the last scrape to all counts and histograms.

        The latest sample of each worker is also kept, for the metrics of the load.
        """
        rows = self._log_tail.rows()
        for sample in self._log_tail.seconds():
            self._samples[sample.worker] = sample

        if not len(rows):
            return

        columns = Columns(rows)
        is_ok = columns.has_status(OK)
        for metric, histogram in self._histograms.items():
            values = columns.measure(metric.name)
            if metric.sample == "ok":
                values = values[is_ok]
            histogram.add(metrics.drop_undefined(values))

        # As in the report, requests that the end of a run cancels are no failures.
        is_failed = np.isin(columns["status"], (FAILED, LOST))
        self._status_counts += _count_values(columns["status"], len(STATUSES))
        self._kind_counts += _count_values(columns["kind"][is_failed], len(KINDS))
        self._output_tokens += int(columns["output_tokens"][is_ok].clip(0).sum())

    def _create_run_metrics(self, manifest: RunManifest) -> Iterator[Metric]:
        """Yield an info metric whose labels describe the run.

        Its value is always 1. Dashboards join it with the other metrics to show the labels.
        """
        target = manifest.targets[0]
        labels = {
            "run": manifest.run,
            "workload": manifest.workload,
            "model": target.model,
            "server": target.server,
            "target": target.name or target.url,
            "simulated": str(target.simulated).lower(),
        }
        yield InfoMetricFamily("loadgen_run", "The run.", labels)

    def _create_request_metrics(self) -> Iterator[Metric]:
        """Yield counters of ended requests by status, of failures by kind, and of output tokens.

        Every status has a value from the first scrape on, so that rates can be computed. A kind of
        failure appears when it occurs for the first time, because there are many kinds.
        """
        requests = CounterMetricFamily(
            "loadgen_requests", "Requests that ended, by status.", labels=["status"]
        )
        for status, count in zip(STATUSES, self._status_counts, strict=True):
            requests.add_metric([status], int(count))

        yield requests
        failures = CounterMetricFamily(
            "loadgen_failures", "Requests that failed or were lost, by kind.", labels=["kind"]
        )
        for kind, count in zip(KINDS, self._kind_counts, strict=True):
            if count:
                failures.add_metric([kind or "other"], int(count))

        yield failures
        yield CounterMetricFamily(
            "loadgen_output_tokens", "Output tokens of ok requests.", value=self._output_tokens
        )

    def _create_load_metrics(self, manifest: RunManifest) -> Iterator[Metric]:
        """Yield the load: requests sent and in flight, the planned rate, and the CPU use.

        The planned rate is that of the current stage of the run, by the time of the latest sample.
        A closed-loop stage has none.
        """
        samples = self._samples.values()
        sent = sum(sample.sent for sample in samples)
        yield CounterMetricFamily("loadgen_sent", "Requests sent.", value=sent)
        in_flight = sum(sample.in_flight for sample in samples)
        yield GaugeMetricFamily("loadgen_in_flight", "Requests in flight.", value=in_flight)
        elapsed_ns = max((sample.t_s for sample in samples), default=0.0) * NS_PER_S

        planned_rate_per_s = find_planned_rate(manifest, elapsed_ns)
        if planned_rate_per_s is not None:
            offered = GaugeMetricFamily(
                "loadgen_offered_per_second",
                "Requested rate per second, by what it counts.",
                labels=["of"],
            )
            offered.add_metric([get_rate_unit(manifest)], planned_rate_per_s)
            yield offered

        cpu_fraction = max((sample.cpu_share for sample in samples), default=0.0)
        yield GaugeMetricFamily(
            "loadgen_worker_cpu_ratio",
            "CPU use of the busiest worker, as a fraction of a core.",
            value=cpu_fraction,
        )

    def _create_latency_metrics(self) -> Iterator[Metric]:
        """Yield a histogram of each latency and of the gaps between output events.

        Prometheus expects times in seconds; other metrics keep their unit.
        """
        for metric, histogram in self._histograms.items():
            text = f"{metric.label}: {metric.meaning}; {metric.sample} requests."
            if metric.unit == "ms":
                yield _create_histogram_metric(
                    f"loadgen_{metric.name}_seconds", text, histogram, NS_PER_S
                )
            else:
                yield _create_histogram_metric(f"loadgen_{metric.field}", text, histogram, MICRO)
        yield _create_histogram_metric(
            "loadgen_inter_chunk_seconds",
            "Time between successive output events (inter-chunk latency), all requests.",
            self._merge_gap_histograms(),
            NS_PER_S,
        )

    def _merge_gap_histograms(self) -> Histogram:
        """Return the gaps between output events of all workers so far.

        Each worker replaces its histogram file every two seconds. It writes a temporary file with
        the suffix `.new` first, which is skipped.
        """
        merged = Histogram()
        for file in (self._folder / "flows").glob("w*.gaps.*"):
            if file.suffix == ".new":
                continue
            try:
                merged.merge(Histogram.from_bytes(file.read_bytes()))
            except (OSError, ValueError):
                # The file is being replaced.
                continue

        return merged


def find_planned_rate(manifest: RunManifest, elapsed_ns: float) -> float | None:
    """Return the planned rate of the current stage, or None if it has none or none has begun.

    A closed-loop stage has no planned rate, because its requests follow from its responses.
    """
    started_stages = [stage for stage in manifest.stages if stage.start_ns <= elapsed_ns]
    return started_stages[-1].rate if started_stages else None


def get_rate_unit(manifest: RunManifest) -> str:
    """Return what the rate of a stage counts.

    It is requests, or starts of conversations and tasks, which send several requests each.
    """
    return "starts" if manifest.turns_per_session > 1 else "requests"


class ListenAddress(NamedTuple):
    """The address that metrics are served at."""

    host: str
    port: int


def parse_listen_address(text: str) -> ListenAddress:
    """Return the address in a value of `--prometheus`: ":9400", "9400" or "0.0.0.0:9400".

    Raises:
        UserError: The text has no valid port.
    """
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            "invalid_value",
            "must be a port, or an address and a port",
            f"--prometheus {text}",
            "for example :9400 (on 127.0.0.1), or 0.0.0.0:9400",
        )

    return ListenAddress(host.strip("[]") or DEFAULT_HOST, int(port))


class Exporter(ReaderProcess):
    """The sidecar process that serves the metrics until the run ends."""

    def __init__(self, folder: Path, address: ListenAddress) -> None:
        super().__init__(
            "loadgen.telemetry.prometheus", str(folder), address.host, str(address.port)
        )


def serve(collector: RunCollector, host: str, port: int) -> HTTPServer:
    """Serve the metrics in a thread and return the server.

    Raises:
        OSError: The port is taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return server


def _count_values(values: NDArray[np.integer[Any]], size: int) -> NDArray[np.int64]:
    """Return an array of how often each integer from 0 to `size` - 1 occurs in the values."""
    # `bincount` returns a longer array if a value is `size` or more. Such values are left out.
    return np.bincount(values, minlength=size)[:size]


def _create_histogram_metric(
    name: str, text: str, histogram: Histogram, scale: float
) -> HistogramMetricFamily:
    """Return a histogram for Prometheus, whose buckets count the values up to their upper edge.

    Args:
        name: The name of the metric.
        text: Its description.
        histogram: The values, as integers.
        scale: By what the values are divided, such as 1e9 for nanoseconds to seconds.
    """
    count = histogram.count
    buckets = []
    for edge in BUCKET_EDGES:
        label = floatToGoString(edge)  # type: ignore[no-untyped-call]
        count_up_to_edge = count - histogram.count_over(round(edge * scale))
        buckets.append((label, float(count_up_to_edge)))

    buckets.append(("+Inf", float(count)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total_ns / scale)


if __name__ == "__main__":
    os.nice(NICENESS)
    try:
        serve(RunCollector(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
    except OSError as error:
        print(f"no metrics at {sys.argv[2]}:{sys.argv[3]}: {error.strerror}", file=sys.stderr)
    sys.stdin.read()  # The run closes this when it ends.
