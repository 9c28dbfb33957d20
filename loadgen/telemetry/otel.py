"""Export a run as OpenTelemetry metrics and traces while it goes on (`--otel`).

A sidecar process reads the growing folder. Each request is one span with the attributes of the
GenAI conventions, in the trace that the request carried to the server
(`core.requests.trace_context`). Nothing but that header is added to the process of the load.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from importlib.util import find_spec
from io import RawIOBase
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.errors import UserError, not_installed
from loadgen.core.metrics.columns import Columns
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, WorkerSample, decode_manifest
from loadgen.core.results.record_log import Tail
from loadgen.telemetry.reader_process import ReaderProcess

if TYPE_CHECKING:
    from loadgen.telemetry.otel_metrics import MetricsSender
    from loadgen.telemetry.otel_spans import SpanSender

READ_INTERVAL_S = 1.0
TIMEOUT_S = 3.0
"""Time limit of one delivery, so that an unreachable collector does not delay the end of a run."""
NICENESS = 5
SIGNALS = ("metrics", "traces", "all")
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def check_otel_option(text: str) -> str:
    """Return the value of `--otel`: metrics, traces, all, or the URL of a collector.

    Raises:
        UserError: It is none of these, or a package is not installed.
    """
    if text not in SIGNALS and not text.startswith(("http://", "https://")):
        raise UserError(
            "unknown_name",
            f"{text!r} is not a signal of OpenTelemetry",
            "--otel",
            f"use {', '.join(SIGNALS)} (sent to {ENDPOINT_VARIABLE}), or the URL of a collector",
        )

    # The second package is inside the first one, so it is only looked for if that is installed.
    if not find_spec("opentelemetry") or not find_spec("opentelemetry.exporter.otlp.proto.http"):
        problem = "the OpenTelemetry packages are not installed"
        raise not_installed(problem, "opentelemetry", "--otel", "otlp")

    return text


def has_traces(option: str | None) -> bool:
    """Return True if a value of `--otel` requests traces, so that requests carry one."""
    return option is not None and option != "metrics"


def has_metrics(option: str) -> bool:
    """Return True if a value of `--otel` requests metrics."""
    return option != "traces"


class TelemetrySender(ReaderProcess):
    """The sidecar process that exports a run until it ends, and then what is left."""

    shutdown_s = 30.0

    def __init__(self, folder: Path, option: str) -> None:
        super().__init__("loadgen.telemetry.otel", str(folder))
        # Other users can see the command line of the process, and a URL may contain a password.
        self._write_line(f"{option}\n".encode())

    def begin(self, start_ns: int) -> None:
        """Tell the process when the load begins. It waits for that."""
        self._write_line(b"%d\n" % start_ns)

    def _write_line(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


def export_run(folder: Path, option: str, source: RawIOBase) -> None:
    """Export a run until standard input ends. This is the main function of the sidecar process.

    The process of the run closes the pipe when the run has ended. Nothing is exported if it closes
    the pipe before the load begins.

    Args:
        folder: The folder of the run.
        option: The value of `--otel`.
        source: Standard input, without a buffer. Its first line is the start time of the load, in
            nanoseconds of the monotonic clock.
    """
    start_line = source.readline()
    if not start_line.strip():
        return

    manifest = decode_manifest((folder / "run.json").read_bytes())
    senders = _create_senders(manifest, _unix_time_ns(int(start_line)), option)
    reader = _NewRecordReader(folder)

    has_ended = False
    while not has_ended:
        has_ended = _wait_for_end(source, READ_INTERVAL_S)
        # Read once more after the end, because the last records come with it.
        new_records = reader.read(include_stored=has_ended)
        senders.send(new_records, reader.latest_samples)

    senders.close()
    reader.close()


def _unix_time_ns(monotonic_time_ns: int) -> int:
    """Return the wall-clock time of an earlier reading of the monotonic clock."""
    age_ns = monotonic_ns() - monotonic_time_ns
    return time_ns() - age_ns


def _wait_for_end(source: RawIOBase, timeout_s: float) -> bool:
    """Return True as soon as the pipe is closed, or False after the timeout.

    Nothing is written after the start time, so the pipe becomes readable only when it is closed.
    """
    readable, _, _ = select.select([source], [], [], timeout_s)
    return bool(readable)


class _Senders(NamedTuple):
    """The senders of the signals that are exported. A signal that is not requested has None."""

    spans: SpanSender | None
    metrics: MetricsSender | None

    def send(self, records: list[Columns], samples: dict[int, WorkerSample]) -> None:
        """Send new records, and the latest sample of each worker."""
        if self.metrics is not None:
            self.metrics.record(records, samples)
        if self.spans is not None:
            self.spans.send(records)

    def close(self) -> None:
        """Export what is left, and report spans that were lost on standard error."""
        if self.metrics is not None:
            self.metrics.close()
        if self.spans is not None and self.spans.lost:
            print(f"--otel: {self.spans.lost:,} spans could not be delivered", file=sys.stderr)


def _create_senders(manifest: RunManifest, start_unix_ns: int, option: str) -> _Senders:
    """Create the senders of the requested signals: metrics, traces, or both.

    Without a URL in the option, the exporters read the address of the collector from the
    environment variables of OpenTelemetry. The packages are imported here, because they are an
    optional dependency.

    Args:
        manifest: The manifest of the run.
        start_unix_ns: The wall-clock time at which the load began.
        option: The value of `--otel`.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource

    from loadgen.telemetry.otel_metrics import MetricsSender
    from loadgen.telemetry.otel_spans import SpanSender

    collector_url = option.rstrip("/") if "://" in option else ""
    resource = Resource.create(
        {
            "service.name": "loadgen",
            "service.version": manifest.version,
            "loadgen.simulated": any(target.simulated for target in manifest.targets),
        }
    )
    spans: SpanSender | None = None
    metrics: MetricsSender | None = None

    if has_traces(option):
        traces_url = f"{collector_url}/v1/traces" if collector_url else None
        span_exporter = OTLPSpanExporter(endpoint=traces_url, timeout=TIMEOUT_S)
        spans = SpanSender(manifest, resource, start_unix_ns, span_exporter)

    if has_metrics(option):
        metrics_url = f"{collector_url}/v1/metrics" if collector_url else None
        metric_exporter = OTLPMetricExporter(endpoint=metrics_url, timeout=TIMEOUT_S)
        metrics = MetricsSender(manifest, resource, metric_exporter, TIMEOUT_S)

    return _Senders(spans, metrics)


class _NewRecordReader:
    """Reads the request records that a run has added since the last reading.

    While a run goes on, its workers append records to a record log. At its end, the records are
    stored in their final form and the log may be deleted.

    Attributes:
        latest_samples: The latest sample of each worker: its CPU use and requests in flight.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log_tail = Tail(folder)
        # A slot is the number of a request in the run. These are the slots of all records so far.
        # The empty array lets `concatenate` work without any.
        self._read_slots = [np.zeros(0, np.int64)]
        self.latest_samples: dict[int, WorkerSample] = {}

    def read(self, *, include_stored: bool) -> list[Columns]:
        """Return the records that were not returned before, and update `latest_samples`.

        Args:
            include_stored: True to return also the stored records that were not in the record log.
                The log of a short run may be deleted before it is read for the first time.
        """
        # The samples of one worker are in order of time, so the last one replaces earlier ones.
        for sample in self._log_tail.seconds():
            self.latest_samples[sample.worker] = sample

        logged_rows = self._log_tail.rows()
        self._read_slots.append(logged_rows["slot"].copy())

        new_records = [Columns(logged_rows)]
        if include_stored and store.has_rows(self._folder):
            stored_rows = store.read_run_lazily(self._folder, by_stage=False).rows
            was_read_before = np.isin(stored_rows["slot"], np.concatenate(self._read_slots))
            new_records.append(Columns(stored_rows, ~was_read_before))

        return new_records

    def close(self) -> None:
        """Close the files of the run."""
        self._log_tail.close()


if __name__ == "__main__":
    os.nice(NICENESS)
    # Without a buffer, because `select` does not see what a buffer holds.
    with open(0, "rb", buffering=0, closefd=False) as standard_input:
        export_run(Path(sys.argv[1]), standard_input.readline().decode().strip(), standard_input)
