"""A run as Prometheus metrics while it goes: a process of its own reads the growing folder, as the dashboard does.

Nothing is added to the load's own process. The metrics end with the run; the last scrape is up to an interval behind.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.core.errors import UserError
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics.columns import FAILED, LOST, OK, Columns
from loadgen.core.results import manifest
from loadgen.core.results.manifest import RunManifest, WorkerSample
from loadgen.core.results.record import KINDS, STATUSES
from loadgen.core.results.spool import Tail
from loadgen.core.stats.histogram import Histogram
from loadgen.figures import FIGURES
from loadgen.telemetry.reader_process import ReaderProcess

EDGES_S = tuple(factor * 10.0**power for power in range(-4, 3) for factor in (1.0, 2.0, 5.0))
"""Upper edges of the buckets of all histograms: 0.1 ms to 500 s, or 0.0001 to 500 of another unit."""

HOST = "127.0.0.1"


class RunCollector:
    """What Prometheus asks at each scrape. `collect` reads what the run has added since the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._one_at_a_time = threading.Lock()  # each scrape has a thread
        self._header: RunManifest | None = None
        self._tail = Tail(folder)
        self._figures = {row: Histogram() for row in FIGURES.at("prometheus")}
        self._statuses = np.zeros(len(STATUSES), np.int64)
        self._kinds = np.zeros(len(KINDS), np.int64)
        self._tokens = 0
        self._seconds: dict[int, WorkerSample] = {}

    def close(self) -> None:
        """Close the files of the run."""
        self._tail.close()

    def _read(self) -> None:
        rows = self._tail.rows()
        self._seconds.update({second.worker: second for second in self._tail.seconds()})
        if not len(rows):
            return
        found = Columns(rows)
        ok = found.where(OK)
        for row, histogram in self._figures.items():
            values = found.measure(row.name)
            histogram.add(metrics.drop_undefined(values[ok] if row.sample == "ok" else values))
        self._statuses += np.bincount(found["status"], minlength=len(STATUSES))[: len(STATUSES)]
        failed = np.isin(
            found["status"], (FAILED, LOST)
        )  # what the end of a run cuts off is not, as in the report
        self._kinds += np.bincount(found["kind"][failed], minlength=len(KINDS))[: len(KINDS)]
        self._tokens += int(found["output_tokens"][ok].clip(0).sum())

    def _gaps(self) -> Histogram:
        """The gaps between output events so far; each worker stores them about every two seconds."""
        merged = Histogram()
        for file in (self._folder / "flows").glob("w*.gaps.*"):
            if file.suffix != ".new":
                try:
                    merged.merge(Histogram.from_bytes(file.read_bytes()))
                except (OSError, ValueError):  # replaced at this instant
                    continue
        return merged

    def collect(self) -> Iterator[Any]:
        """The metric families; none before the run has begun."""
        with self._one_at_a_time:
            yield from self._families()

    def _families(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        if self._header is None:
            try:
                self._header = manifest.decode((self._folder / "run.json").read_bytes())
            except (OSError, UserError):
                return
        self._read()
        header = self._header
        target = header.targets[0]
        yield InfoMetricFamily(
            "loadgen_run",
            "The run.",
            {
                "run": header.run,
                "workload": header.workload,
                "model": target.model,
                "server": target.server,
                "target": target.name or target.url,
                "simulated": str(target.simulated).lower(),
            },
        )
        requests = CounterMetricFamily(
            "loadgen_requests", "Requests that ended, by status.", labels=["status"]
        )
        for status, count in zip(STATUSES, self._statuses, strict=True):
            requests.add_metric([status], int(count))
        yield requests
        failures = CounterMetricFamily(
            "loadgen_failures", "Requests that failed or were lost, by kind.", labels=["kind"]
        )
        for kind, count in zip(KINDS, self._kinds, strict=True):
            if count:
                failures.add_metric([kind or "other"], int(count))
        yield failures
        yield CounterMetricFamily(
            "loadgen_output_tokens", "Output tokens of ok requests.", value=self._tokens
        )
        yield CounterMetricFamily(
            "loadgen_sent", "Requests sent.", value=sum(s.sent for s in self._seconds.values())
        )
        in_flight = sum(second.in_flight for second in self._seconds.values())
        yield GaugeMetricFamily(
            "loadgen_in_flight", "Requests that are being answered.", value=in_flight
        )
        elapsed_s = max((second.t_s for second in self._seconds.values()), default=0.0)
        stage = next(
            (stage for stage in reversed(header.stages) if stage.start_ns <= elapsed_s * 1e9), None
        )
        if stage is not None and stage.rate is not None:
            offered = GaugeMetricFamily(
                "loadgen_offered_per_second", "Rate of the stage, and of what.", labels=["of"]
            )
            offered.add_metric([rate_of(header)], stage.rate)
            yield offered
        busy = max((second.cpu_share for second in self._seconds.values()), default=0.0)
        yield GaugeMetricFamily(
            "loadgen_worker_cpu_ratio", "Of one core, of the busiest worker.", value=busy
        )
        for row, histogram in self._figures.items():
            name, scale = (f"{row.name}_seconds", 1e9) if row.unit == "ms" else (row.field, 1e6)
            text = f"{row.words}: {row.meaning}; {row.sample} requests."
            yield _family(f"loadgen_{name}", text, histogram, scale)
        yield _family(
            "loadgen_inter_chunk_seconds",
            "Gaps between successive output events, pooled.",
            self._gaps(),
        )


def rate_of(header: RunManifest) -> str:
    """What a rate of a stage counts: requests, or starts, of which conversations and tasks send more than one."""
    return "starts" if header.turns > 1 else "requests"


def _family(name: str, text: str, histogram: Histogram, scale: float = 1e9) -> Any:
    """`scale`: what a value of the histogram is divided by."""
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    count = histogram.count
    buckets = []
    for edge in EDGES_S:
        label = floatToGoString(edge)  # type: ignore[no-untyped-call]
        buckets.append((label, float(count - histogram.over(round(edge * scale)))))
    return HistogramMetricFamily(
        name, text, buckets=[*buckets, ("+Inf", float(count))], sum_value=histogram.total_ns / scale
    )


def listens_on(text: str) -> tuple[str, int]:
    """The host and port of `--prometheus`: `:9400`, `9400`, `0.0.0.0:9400`. Raises UserError."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            "invalid_value",
            "no port",
            f"--prometheus {text}",
            "like :9400 (on 127.0.0.1), or 0.0.0.0:9400",
        )
    return host.strip("[]") or HOST, int(port)


class Exporter(ReaderProcess):
    """The process that serves the metrics until the run ends."""

    def __init__(self, folder: Path, at: tuple[str, int]) -> None:
        super().__init__("loadgen.telemetry.prometheus", str(folder), at[0], str(at[1]))


def serve(collector: RunCollector, host: str, port: int) -> Any:
    """Serve the metrics; returns the server, which runs in a thread. Raises OSError where the port is taken."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return server


if __name__ == "__main__":
    os.nice(5)
    try:
        serve(RunCollector(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
    except OSError as problem:
        print(f"no metrics at {sys.argv[2]}:{sys.argv[3]}: {problem.strerror}", file=sys.stderr)
    sys.stdin.read()  # until the run ends
