"""A run as OpenTelemetry metrics and traces while it goes: a process of its own reads the growing folder.

One span per request with the attributes of the GenAI conventions, under the trace that the request has carried to the
server (`execution/trace_context.py`). Nothing is added to the load's own process but that header.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import RawIOBase
from itertools import chain, islice
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any

import numpy as np
from loadgen_sdk.app.agent_spans import SCHEMA_URL
from loadgen_sdk.app.metric_labels import DURATION_BOUNDS_S

from loadgen.core.errors import UserError, not_installed
from loadgen.core.metrics.columns import OK, UNDEFINED, Columns
from loadgen.core.requests.trace_context import TraceContext
from loadgen.core.results import manifest, store
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.record import FINISH_REASONS, KINDS, SOURCES, STATUSES
from loadgen.core.results.spool import Tail
from loadgen.telemetry.prometheus import rate_of
from loadgen.telemetry.reader_process import ReaderProcess

EVERY_S = 1.0
USAGE = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
TIMEOUT_S = 3.0  # of one delivery: a collector that is away must not keep the end of a run waiting
MOST_SPANS = 512  # in one delivery
KINDS_OF_SIGNAL = ("metrics", "traces", "all")
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def asked(text: str) -> str:
    """What `--otel` says, checked: metrics, traces, all, or the URL of a collector. Raises UserError."""
    if text not in KINDS_OF_SIGNAL and not text.startswith(("http://", "https://")):
        hint = f"{', '.join(KINDS_OF_SIGNAL)} ({ENDPOINT} says where to), or the URL of a collector"
        raise UserError("unknown_name", f"{text!r} is no kind of signal", "--otel", hint)
    if (
        find_spec("opentelemetry") is None
        or find_spec("opentelemetry.exporter.otlp.proto.http") is None
    ):
        what = "the packages that send OpenTelemetry are not installed"
        raise not_installed(what, "opentelemetry", "--otel", "otlp")
    return text


def has_traces(text: str | None) -> bool:
    """Whether requests have to carry a trace."""
    return text is not None and text != "metrics"


FIELDS = (
    "slot",
    "target",
    "status",
    "kind",
    "due_ns",
    "sent_ns",
    "first_token_ns",
    "done_ns",
    "http_status",
    "finish_reason",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "output_source",
)


def sent(columns: Columns) -> Iterator[dict[str, Any]]:
    """The requests that were sent, each as these fields with its TTFT, its TPOT and the kind of its error, if any."""
    for block in columns.blocks():
        values = {name: block[name].tolist() for name in FIELDS}
        values |= {name: block.measure(name).tolist() for name in ("ttft", "tpot")}
        for row in zip(*values.values(), strict=True):
            request = dict(zip(values, row, strict=True))
            if request["sent_ns"] >= 0:
                ok = request["status"] == OK
                request["error"] = (
                    "" if ok else KINDS[request["kind"]] or STATUSES[request["status"]]
                )
                yield request


class TelemetrySender(ReaderProcess):
    """The process that sends until the run ends, and then what is left."""

    leave_s = 30.0

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__("loadgen.telemetry.otel", str(folder))
        self._tell(
            f"{what}\n".encode()
        )  # not on its command line, which other users see: a URL may hold a password

    def begin(self, start_ns: int) -> None:
        """Tell the process when the load begins; it waits for that."""
        self._tell(b"%d\n" % start_ns)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


# -- the process -----------------------------------------------------------------------------------------------------


class Run:
    """What a header says of all requests of a run, and how a row becomes a span."""

    def __init__(self, header: RunManifest, start_ns: int) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.header, self._trace = header, TraceContext(header.run)
        self._start_unix_ns = time_ns() - (monotonic_ns() - start_ns)
        self.resource = Resource.create(
            {
                "service.name": "loadgen",
                "service.version": header.version,
                "loadgen.simulated": any(target.simulated for target in header.targets),
            }
        )
        self._scope = InstrumentationScope("loadgen", header.version, SCHEMA_URL)
        self.operation = "chat" if header.api in ("chat", "messages") else "text_completion"

    def attributes(self, target: int) -> dict[str, Any]:
        from urllib.parse import urlsplit

        facts = self.header.targets[target]
        url = urlsplit(facts.url)
        return {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": facts.server or "unknown",
            "gen_ai.request.model": facts.model,
            "server.address": url.hostname or "",
            "server.port": url.port or 0,
            "loadgen.run": self.header.run,
        }

    def spans(self, columns: Columns) -> Iterable[Any]:
        """A span for each request that was sent, from its first byte to its last; when it was due is an attribute."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        for row in sent(columns):
            slot = row["slot"]
            attributes = self.attributes(row["target"]) | {
                "loadgen.slot": slot,
                "loadgen.due_ms": row["due_ns"] / 1e6,
                "loadgen.send_lag_ms": (row["sent_ns"] - row["due_ns"]) / 1e6,
            }
            for name, key in USAGE.items():
                if row[name] >= 0:
                    attributes[key] = row[name]
            if reason := FINISH_REASONS[row["finish_reason"]]:
                attributes["gen_ai.response.finish_reasons"] = (reason,)
            if row["http_status"]:
                attributes["http.response.status_code"] = row["http_status"]
            if row["error"]:
                attributes["error.type"] = row["error"]
            first = row["first_token_ns"]
            yield ReadableSpan(
                name=f"{self.operation} {attributes['gen_ai.request.model']}",
                context=SpanContext(
                    self._trace.trace_id(slot),
                    self._trace.span_id(slot),
                    is_remote=False,
                    trace_flags=TraceFlags(TraceFlags.SAMPLED),
                ),
                kind=SpanKind.CLIENT,
                resource=self.resource,
                instrumentation_scope=self._scope,
                attributes=attributes,
                events=[]
                if first < 0
                else [Event("first token", timestamp=self._start_unix_ns + first)],
                start_time=self._start_unix_ns + row["sent_ns"],
                end_time=self._start_unix_ns + max(row["done_ns"], row["sent_ns"]),
                status=Status(StatusCode.ERROR if row["error"] else StatusCode.UNSET),
            )


class Metrics:
    """The histograms of the conventions for GenAI clients, and what a load adds: sent late, in flight, offered."""

    def __init__(self, run: Run, exporter: Any) -> None:
        from loadgen_sdk.app.metric_labels import TPOT_BOUNDS_S
        from loadgen_sdk.app.open_telemetry import TOKEN_BOUNDS
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        reader = PeriodicExportingMetricReader(exporter, 5_000, TIMEOUT_S * 1e3)
        self.provider = MeterProvider([reader], run.resource, shutdown_on_exit=False)
        meter = self.provider.get_meter("loadgen", run.header.version, SCHEMA_URL)

        def histogram(name: str, unit: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=bounds)

        self._duration = histogram("gen_ai.client.operation.duration", "s", DURATION_BOUNDS_S)
        self._first = histogram(
            "gen_ai.client.operation.time_to_first_chunk", "s", DURATION_BOUNDS_S
        )
        self._tokens = histogram("gen_ai.client.token.usage", "{token}", TOKEN_BOUNDS)
        self._tpot = histogram("loadgen.client.time_per_output_token", "s", TPOT_BOUNDS_S)
        self._lag = histogram("loadgen.send_lag", "s", DURATION_BOUNDS_S)
        self._in_flight = meter.create_gauge("loadgen.in_flight", "{request}")
        self._offered = meter.create_gauge("loadgen.offered", "{start}/s")
        self._run = run

    def add(self, parts: Sequence[Columns], seconds: dict[int, Any]) -> None:
        shared_of = [
            self._run.attributes(number) for number in range(len(self._run.header.targets))
        ]
        for row in chain.from_iterable(map(sent, parts)):
            shared = shared_of[row["target"]]
            error = {"error.type": row["error"]} if row["error"] else {}
            self._duration.record(
                max(row["done_ns"] - row["sent_ns"], 0) / 1e9, {**shared, **error}
            )
            self._lag.record(max(row["sent_ns"] - row["due_ns"], 0) / 1e9, shared)
            if error:
                continue
            if row["ttft"] != UNDEFINED and self._run.header.stream:
                self._first.record((row["first_token_ns"] - row["sent_ns"]) / 1e9, shared)
            if row["tpot"] != UNDEFINED:
                self._tpot.record(row["tpot"] / 1e9, shared)
            if row["input_tokens"] >= 0:
                self._tokens.record(row["input_tokens"], {**shared, "gen_ai.token.type": "input"})
            if row["output_tokens"] >= 0 and SOURCES[row["output_source"]] == "server":
                self._tokens.record(row["output_tokens"], {**shared, "gen_ai.token.type": "output"})
        run = {"loadgen.run": self._run.header.run}
        self._in_flight.set(sum(second.in_flight for second in seconds.values()), run)
        elapsed_s = max((second.t_s for second in seconds.values()), default=0.0)
        stages = [stage for stage in self._run.header.stages if stage.start_ns <= elapsed_s * 1e9]
        if stages and stages[-1].rate is not None:
            self._offered.set(stages[-1].rate, run | {"loadgen.of": rate_of(self._run.header)})


def follow(folder: Path, target: str, source: RawIOBase) -> None:
    """The main function of the process: wait for the start, then send what the run adds until standard input ends."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    line = source.readline()
    if not line.strip():
        return
    run = Run(manifest.decode((folder / "run.json").read_bytes()), int(line))
    url = target.rstrip("/") if "://" in target else ""
    spans = metrics = None
    if has_traces(target):
        spans = OTLPSpanExporter(endpoint=f"{url}/v1/traces" if url else None, timeout=TIMEOUT_S)
    if target != "traces":
        exporter = OTLPMetricExporter(
            endpoint=f"{url}/v1/metrics" if url else None, timeout=TIMEOUT_S
        )
        metrics = Metrics(run, exporter)
    tail, seconds, taken = Tail(folder), dict[int, Any](), [np.zeros(0, np.int64)]
    lost = 0
    ended = False
    while not ended:
        ended = bool(select.select([source], [], [], EVERY_S)[0])
        seconds.update({second.worker: second for second in tail.seconds()})
        rows = tail.rows()
        taken.append(rows["slot"].copy())
        parts = [Columns(rows)]
        if ended and store.has_rows(
            folder
        ):  # a short run is over, and its spool gone, before the first look at it
            stored = store.read_lightly(folder, by_stage=False).rows
            parts.append(Columns(stored, ~np.isin(stored["slot"], np.concatenate(taken))))
        if metrics is not None:
            metrics.add(parts, seconds)
        if spans is not None:
            left = chain.from_iterable(map(run.spans, parts))
            while batch := list(islice(left, MOST_SPANS)):
                lost += len(batch) if spans.export(batch) is not SpanExportResult.SUCCESS else 0
    if metrics is not None:
        metrics.provider.shutdown(TIMEOUT_S * 1e3)
    tail.close()
    if lost:
        print(f"--otel: {lost:,} spans could not be delivered", file=sys.stderr)


if __name__ == "__main__":
    os.nice(5)
    with open(
        0, "rb", buffering=0, closefd=False
    ) as source:  # unbuffered: select does not see what a buffer holds
        follow(Path(sys.argv[1]), source.readline().decode().strip(), source)
