"""Exports a run as OpenTelemetry metrics and traces while it goes on (`--otel`).

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
from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.errors import UserError, not_installed
from loadgen.core.metrics.columns import Columns
from loadgen.core.results import manifest, store
from loadgen.core.results.manifest import RunManifest, WorkerSample
from loadgen.core.results.spool import Tail
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
            f"{text!r} is no kind of signal",
            "--otel",
            f"{', '.join(SIGNALS)} ({ENDPOINT_VARIABLE} says where to), or the URL of a collector",
        )
    # The second package is inside the first one, so it is only looked for if that is installed.
    if not find_spec("opentelemetry") or not find_spec("opentelemetry.exporter.otlp.proto.http"):
        what = "the packages that send OpenTelemetry are not installed"
        raise not_installed(what, "opentelemetry", "--otel", "otlp")
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

    Args:
        folder: The folder of the run.
        option: The value of `--otel`.
        source: Standard input, without a buffer. Its first line is the start time of the load.
    """
    line = source.readline()
    if not line.strip():
        return
    header = manifest.decode((folder / "run.json").read_bytes())
    start_unix_ns = time_ns() - (monotonic_ns() - int(line))
    spans, metrics = _create_senders(header, start_unix_ns, option)
    reader = _NewRecordReader(folder)
    has_ended = False
    while not has_ended:
        has_ended = bool(select.select([source], [], [], READ_INTERVAL_S)[0])
        parts = reader.read(include_stored=has_ended)
        if metrics is not None:
            metrics.record(parts, reader.latest_samples)
        if spans is not None:
            spans.send(parts)
    if metrics is not None:
        metrics.close()
    reader.close()
    if spans is not None and spans.lost:
        print(f"--otel: {spans.lost:,} spans could not be delivered", file=sys.stderr)


def _create_senders(
    header: RunManifest, start_unix_ns: int, option: str
) -> tuple[SpanSender | None, MetricsSender | None]:
    """Return the senders of the signals that are requested."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource

    from loadgen.telemetry.otel_metrics import MetricsSender
    from loadgen.telemetry.otel_spans import SpanSender

    url = option.rstrip("/") if "://" in option else ""
    resource = Resource.create(
        {
            "service.name": "loadgen",
            "service.version": header.version,
            "loadgen.simulated": any(target.simulated for target in header.targets),
        }
    )
    spans: SpanSender | None = None
    metrics: MetricsSender | None = None
    if has_traces(option):
        endpoint = f"{url}/v1/traces" if url else None
        span_exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        spans = SpanSender(header, resource, start_unix_ns, span_exporter)
    if has_metrics(option):
        endpoint = f"{url}/v1/metrics" if url else None
        metric_exporter = OTLPMetricExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        metrics = MetricsSender(header, resource, metric_exporter, TIMEOUT_S)
    return spans, metrics


class _NewRecordReader:
    """Reads the records that a run has added since the last reading.

    Attributes:
        latest_samples: The latest sample of each worker.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder)
        self._slots = [np.zeros(0, np.int64)]
        self.latest_samples: dict[int, WorkerSample] = {}

    def read(self, *, include_stored: bool) -> list[Columns]:
        """Return the new records.

        With `include_stored`, also the final records that were not in the record log: the log of a
        short run may be gone before it is read for the first time.
        """
        self.latest_samples.update({sample.worker: sample for sample in self._tail.seconds()})
        rows = self._tail.rows()
        self._slots.append(rows["slot"].copy())
        parts = [Columns(rows)]
        if include_stored and store.has_rows(self._folder):
            stored = store.read_lightly(self._folder, by_stage=False).rows
            is_new = ~np.isin(stored["slot"], np.concatenate(self._slots))
            parts.append(Columns(stored, is_new))
        return parts

    def close(self) -> None:
        """Close the files of the run."""
        self._tail.close()


if __name__ == "__main__":
    os.nice(NICENESS)
    # Without a buffer, because `select` does not see what a buffer holds.
    with open(0, "rb", buffering=0, closefd=False) as standard_input:
        export_run(Path(sys.argv[1]), standard_input.readline().decode().strip(), standard_input)
