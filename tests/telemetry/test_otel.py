"""Tests of `--otel`: a span per request, the metrics, and a collector that is away."""

from __future__ import annotations

import http.server
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import exits
from expected_errors import refused
from scripted_server import running

from loadgen.core.errors import UserError
from loadgen.core.requests.trace_context import TraceContext
from loadgen.telemetry import otel

ANSWER = json.dumps(
    {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13},
    }
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()


def test_each_request_has_a_separate_trace_that_is_never_stored() -> None:
    run, other = TraceContext("qa-1"), TraceContext("qa-2")
    lines = {context.header(slot) for context in (run, other) for slot in range(100)}
    assert len(lines) == 200
    for line in lines:
        assert re.fullmatch(
            rb"traceparent: 00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01\r\n", line
        )
    assert TraceContext("qa-1").header(7) == run.header(7)


def test_an_unknown_signal_of_opentelemetry_is_refused() -> None:
    with refused(UserError, "unknown_name", "--otel"):
        otel.check_otel_option("logs")


@contextmanager
def collecting() -> Iterator[tuple[str, dict[str, list[bytes]], list[str]]]:
    """Yield a server that is a model and a collector, with the requests it has got."""
    bodies: dict[str, list[bytes]] = {}
    traces: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, body: bytes, kind: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(MODELS)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/chat/completions"):
                if traceparent := self.headers.get("traceparent"):
                    traces.append(traceparent)
                self.answer(ANSWER)
            else:
                bodies.setdefault(self.path, []).append(body)
                self.answer(b"", "application/x-protobuf")

        def log_message(self, *_: Any) -> None:
            pass

    with running(Handler) as url:
        yield url, bodies, traces


def go(tmp_path: Path, url: str, signals: str) -> int:
    file = tmp_path / "w.json"
    file.write_text(json.dumps({"name": "w", "requests": {"input_tokens": 12, "output_tokens": 1}}))
    flags = [
        "--no-stream",
        "-c",
        "2",
        "-n",
        "30",
        "--warmup",
        "0",
        "--otel",
        signals,
        "--progress",
        "off",
    ]
    flags += ["--server-metrics", "off", "--energy", "off"]
    return exits("run", str(file), "--url", url, *flags, "--out", str(tmp_path / "run"))


@pytest.mark.processes
def test_spans_belong_to_the_traces_that_the_server_received(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collecting() as (url, bodies, traces):
        assert go(tmp_path, url, url) in (0, 3)  # a busy host's sender is late
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies["/v1/traces"]]
    spans = [
        s
        for r in requests
        for resource_span in r.resource_spans
        for scope in resource_span.scope_spans
        for s in scope.spans
    ]
    assert len(spans) == 30
    sent = {f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in spans}
    assert sent == set(traces) and len(sent) == 30
    attributes = {item.key: item.value for item in spans[0].attributes}
    assert attributes["gen_ai.operation.name"].string_value == "chat"
    assert attributes["gen_ai.request.model"].string_value == "m"
    assert attributes["gen_ai.usage.input_tokens"].int_value == 12
    assert all(
        span.kind == span.SPAN_KIND_CLIENT and span.end_time_unix_nano > span.start_time_unix_nano
        for span in spans
    )
    metrics = [ExportMetricsServiceRequest.FromString(body) for body in bodies["/v1/metrics"]]
    last = {
        m.name: m
        for r in metrics
        for resource_metric in r.resource_metrics
        for scope in resource_metric.scope_metrics
        for m in scope.metrics
    }
    (duration,) = last["gen_ai.client.operation.duration"].histogram.data_points
    assert duration.count == 30
    assert {point.sum for point in last["gen_ai.client.token.usage"].histogram.data_points} == {
        30.0,
        360.0,
    }


@pytest.mark.processes
def test_an_unreachable_collector_does_not_disturb_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collecting() as (url, _, traces):
        assert go(tmp_path, url, "http://127.0.0.1:9") in (
            0,
            3,
        )  # 3: this host is too busy to measure with
        assert len(traces) == 30
    assert "30 spans could not" in capfd.readouterr().err


@pytest.mark.processes
def test_a_password_in_the_url_is_not_on_a_command_line(tmp_path: Path) -> None:
    sender = otel.TelemetrySender(tmp_path, "http://me:swordfish@collector:4318")
    sender.close()
    assert "swordfish" not in str(sender._process.args)
