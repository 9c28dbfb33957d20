"""Tests of OpenTelemetry and Prometheus: names, units, parents, and no content."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from expected_errors import refused
from loadgen_sdk import (
    Measurement,
    OpenTelemetry,
    Prometheus,
    Throttle,
    TokenPrice,
    WrongUse,
    instrument,
    labelled,
)
from loadgen_sdk.app.background import flush
from loadgen_sdk.app.backlog import MAX_PENDING
from scripted_server import CHAT, CHAT_EVENTS, answer, events, serving

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("prometheus_client")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest

SECRET = "the secret prompt"
REFUSED = answer({"error": {"message": f"cannot say {SECRET}"}}, "400 Bad Request")


class Seen:
    """Providers that keep what they are given."""

    def __init__(self, **options: Any) -> None:
        self.reader, self.exporter = InMemoryMetricReader(), InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = OpenTelemetry(
            meter_provider=MeterProvider([self.reader]), tracer_provider=self.tracers, **options
        )

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}

    @property
    def spans(self) -> Any:
        return self.exporter.get_finished_spans()


def call(response: bytes, observer: Any, **options: Any) -> None:
    with (
        serving(response) as server,
        openai.OpenAI(base_url=server.url, api_key="sk-123456", max_retries=0) as plain_client,
    ):
        client = instrument(plain_client, observer, **options)
        with contextlib.suppress(openai.BadRequestError):
            list(
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": SECRET}], stream=True
                )
            )


def test_metrics_follow_the_semantic_conventions() -> None:
    seen = Seen()
    call(events(*CHAT_EVENTS), seen.observer)
    metrics = seen.metrics()
    units = {
        name: (metric.unit, sum(point.count for point in metric.data.data_points))
        for name, metric in metrics.items()
    }

    assert units == {
        "gen_ai.client.operation.duration": ("s", 1),
        "gen_ai.client.token.usage": ("{token}", 2),
        "gen_ai.client.operation.time_to_first_chunk": ("s", 1),
        "loadgen.client.time_per_output_token": ("s", 1),
    }
    (duration,) = metrics["gen_ai.client.operation.duration"].data.data_points
    assert dict(duration.attributes) | {"server.port": 0} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m-1",
        "server.address": "127.0.0.1",
        "server.port": 0,
    }
    assert duration.explicit_bounds[:3] == (0.01, 0.02, 0.04) and 0 < duration.sum < 60

    tokens = {
        point.attributes["gen_ai.token.type"]: point.sum
        for point in metrics["gen_ai.client.token.usage"].data.data_points
    }

    assert tokens == {"input": 9, "output": 3}


def test_gaps_between_chunks_are_recorded_only_on_request() -> None:
    seen = Seen(chunks=True)
    call(events(*CHAT_EVENTS), seen.observer)
    assert seen.observer.flush()
    (point,) = seen.metrics()["gen_ai.client.operation.time_per_output_chunk"].data.data_points
    assert point.count == 2


def test_the_request_is_on_the_span_and_the_span_is_current_while_it_is_sent() -> None:
    from opentelemetry import trace

    seen = Seen(content=True)
    current: list[Any] = []

    two = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        for i, text, reason in ((0, "yes", "stop"), (1, "no", "length"))
    ]
    with (
        serving(answer({**CHAT, "choices": two})) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as plain_client,
    ):
        send = plain_client._client.send
        plain_client._client.send = lambda *a, **k: (
            current.append(trace.get_current_span()) or send(*a, **k)
        )  # type: ignore
        client = instrument(
            plain_client, seen.observer, keep_content=True, throttle=Throttle(requests="1/s")
        )
        with labelled(feature="search"):
            client.chat.completions.create(
                model="m", messages=[], max_tokens=7, temperature=0.5, seed=3, n=2, stop=["secret"]
            )
    (span,) = seen.spans
    assert current[0].get_span_context().span_id == span.context.span_id
    expected = {"max_tokens": 7, "temperature": 0.5, "seed": 3, "choice.count": 2}
    assert {name: span.attributes[f"gen_ai.request.{name}"] for name in expected} == expected
    assert "gen_ai.request.stream" not in span.attributes and "secret" not in span.to_json()
    assert span.attributes["loadgen.label.feature"] == "search"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    document = json.loads(span.attributes["gen_ai.output.messages"])
    assert [(message["parts"][0]["content"], message["finish_reason"]) for message in document] == [
        ("yes", "stop"),
        ("no", "length"),
    ]


def test_the_time_to_the_first_chunk_excludes_the_wait_for_the_throttle() -> None:
    seen = Seen()
    throttle = Throttle(concurrency=1)
    permit = throttle.acquire_blocking(key="sk-123456", model="m")

    def release() -> None:
        while not throttle.waiting(key="sk-123456", model="m"):
            released.wait(0.001)
        permit.done()

    released, measurements = threading.Event(), list[Any]()
    thread = threading.Thread(target=release)
    thread.start()
    call(events(*CHAT_EVENTS), (seen.observer, measurements.append), throttle=throttle)
    thread.join()
    (span,) = seen.spans
    wait_s = measurements[0].wait_ms / 1e3
    assert (
        span.attributes["gen_ai.request.stream"] is True
        and span.attributes["loadgen.wait_s"] == wait_s > 0
    )
    (first_data_point,) = seen.metrics()[
        "gen_ai.client.operation.time_to_first_chunk"
    ].data.data_points
    assert first_data_point.sum == span.attributes["gen_ai.response.time_to_first_chunk"]
    assert first_data_point.sum == pytest.approx(measurements[0].ttft_ms / 1e3 - wait_s)


def test_metrics_have_only_the_selected_labels() -> None:
    seen, registry = Seen(metric_labels=("feature",)), CollectorRegistry()
    with labelled(feature="search", user="u-1"):
        call(events(*CHAT_EVENTS), (seen.observer, Prometheus(registry, labels=("feature",))))
    (point,) = seen.metrics()["gen_ai.client.operation.duration"].data.data_points

    assert (
        point.attributes["loadgen.label.feature"] == "search"
        and "loadgen.label.user" not in point.attributes
    )
    page = generate_latest(registry).decode()
    assert (
        'llm_client_requests_total{api="chat",error="",feature="search",model="m",status="ok"} 1.0'
        in page
    )
    assert "u-1" not in page
    with refused(WrongUse, "wrong_type"):
        Seen(metric_labels="feature")


def test_a_span_is_a_child_of_the_current_span() -> None:
    seen = Seen(provider="acme")
    with seen.tracers.get_tracer("app").start_as_current_span("request"):
        call(events(*CHAT_EVENTS), seen.observer, prices=TokenPrice(1, 2))
    span, parent = seen.spans

    assert (span.name, span.kind, span.parent.span_id) == (
        "chat m",
        SpanKind.CLIENT,
        parent.context.span_id,
    )
    assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
    assert (
        span.attributes["gen_ai.usage.input_tokens"] == 9
        and span.attributes["gen_ai.usage.output_tokens"] == 3
    )
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert (
        span.attributes["gen_ai.provider.name"] == "acme"
        and span.attributes["loadgen.cost"] == 15e-6
    )
    assert [event.name for event in span.events] == ["first_token"]
    assert span.status.status_code is StatusCode.UNSET


def test_calls_inside_agents_tools_and_workflows_have_their_spans() -> None:
    seen = Seen()
    otel = seen.observer

    with (
        pytest.raises(LookupError),
        otel.workflow("checkout"),
        otel.agent("planner", id="a1", conversation="c9"),
    ):
        call(events(*CHAT_EVENTS), otel)
        with otel.tool("search", call_id="t1") as span:
            span.set_attribute("own", 1)
            raise LookupError(SECRET)
    chat, tool, agent, workflow = seen.spans
    assert [call_span.name for call_span in (chat, tool, agent, workflow)] == [
        "chat m",
        "execute_tool search",
        "invoke_agent planner",
        "invoke_workflow checkout",
    ]
    assert chat.parent == tool.parent == agent.context and agent.parent == workflow.context
    assert dict(agent.attributes) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "planner",
        "gen_ai.agent.id": "a1",
        "gen_ai.conversation.id": "c9",
        "error.type": "LookupError",
    }
    assert tool.attributes["gen_ai.tool.call.id"] == "t1" and tool.attributes["own"] == 1
    assert {call_span.kind for call_span in (tool, agent, workflow)} == {SpanKind.INTERNAL}
    assert all(
        call_span.status.status_code is StatusCode.ERROR and SECRET not in call_span.to_json()
        for call_span in (tool, agent)
    )

    durations = {
        f"gen_ai.{name}.duration" for name in ("execute_tool", "invoke_agent", "invoke_workflow")
    }

    assert durations < set(seen.metrics())
    assert (
        chat.instrumentation_scope.version
        and "opentelemetry.io/schemas" in chat.instrumentation_scope.schema_url
    )


def test_failures_record_their_kind_and_never_their_text() -> None:
    seen = Seen()
    call(REFUSED, seen.observer)
    (span,) = seen.spans
    assert span.status.status_code is StatusCode.ERROR and span.attributes["error.type"] == "400"
    (point,) = seen.metrics()["gen_ai.client.operation.duration"].data.data_points
    assert point.attributes["error.type"] == "400"
    assert SECRET not in span.to_json()


@pytest.mark.parametrize(
    ("keep", "export"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_content_is_recorded_only_if_both_sides_request_it(keep: bool, export: bool) -> None:
    seen = Seen(content=export)
    call(events(*CHAT_EVENTS), seen.observer, keep_content=keep)
    text = seen.spans[0].to_json()
    assert (SECRET in text) == ("Hello there." in text) == (keep and export)
    if keep and export:
        sent_document = json.loads(seen.spans[0].attributes["gen_ai.input.messages"])
        assert sent_document == [{"role": "user", "parts": [{"type": "text", "content": SECRET}]}]


def test_prometheus_exports_the_metrics_of_calls() -> None:
    registry = CollectorRegistry()
    observer = Prometheus(registry)
    call(events(*CHAT_EVENTS), observer, prices=TokenPrice(1, 2))
    call(REFUSED, observer)
    page = generate_latest(registry).decode()

    for line in (
        'llm_client_requests_total{api="chat",error="",model="m",status="ok"} 1.0',
        'llm_client_requests_total{api="chat",error="400",model="m",status="failed"} 1.0',
        'llm_client_tokens_total{api="chat",model="m",type="input"} 9.0',
        'llm_client_tokens_total{api="chat",model="m",type="cached"} 4.0',
        'llm_client_tokens_total{api="chat",model="m",type="output"} 3.0',
        'llm_client_duration_seconds_count{api="chat",model="m"} 2.0',
        'llm_client_time_to_first_token_seconds_count{api="chat",model="m"} 1.0',
        'llm_client_cost_total{api="chat",model="m"} 1.5e-05',
    ):
        assert line in page
    assert SECRET not in page


def measurement(**fields: Any) -> Measurement:
    return Measurement(
        api="chat", streamed=False, status="ok", started=1, started_unix_ns=1, model="m", **fields
    )


def counted(page: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith("llm_client_requests_total{")]
    return sum(float(line.split()[-1]) for line in lines)


def test_prometheus_counts_every_call_of_many_threads_at_every_reading() -> None:
    registry = CollectorRegistry()
    observer = Prometheus(registry, labels=("feature",))

    def tell(count: int) -> None:
        for _ in range(count):
            observer(measurement(done=5, labels={"feature": "a"}))

    total_count = 0
    for count in (1, MAX_PENDING - 1, 3 * MAX_PENDING):
        threads = [threading.Thread(target=tell, args=(count,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total_count += 3 * count
        assert (
            counted(generate_latest(registry).decode()) == total_count
        )  # what waited, and what the background is counting
        value = registry.get_sample_value(
            "llm_client_duration_seconds_count", {"api": "chat", "model": "m", "feature": "a"}
        )
        assert value == total_count
    with pytest.raises(ValueError, match="Duplicated"):
        Prometheus(registry)


def test_prometheus_bounds_the_calls_that_wait_for_a_reading() -> None:
    observer = Prometheus(CollectorRegistry())
    for _ in range(10 * MAX_PENDING):
        observer(measurement(done=5))
    assert flush()
    assert len(observer._backlog._pending) < MAX_PENDING


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("shared", [False, True])
def test_prometheus_counts_calls_of_forked_processes(tmp_path: Path, shared: bool) -> None:
    """As with gunicorn --preload. `shared` sets PROMETHEUS_MULTIPROC_DIR."""
    code = """if True:
        import os
        from loadgen_sdk import Measurement, Prometheus
        from loadgen_sdk.app.background import flush
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        registry = CollectorRegistry()
        observer = Prometheus(registry)
        def tell(count):
            for _ in range(count):
                observer(Measurement(
                    api="chat", streamed=False, status="ok", started=1, started_unix_ns=1, done=5
                ))
        def counted():
            read = registry
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                flush()  # this process's own; the others' have ended
                read = CollectorRegistry()
                multiprocess.MultiProcessCollector(read)
            labels = {"api": "chat", "model": ""}
            return read.get_sample_value("llm_client_duration_seconds_count", labels)
        tell(7)  # told before the fork, and perhaps not counted
        for _ in range(2):
            if os.fork() == 0:
                tell(5)
                print(counted(), flush=True)
                flush()
                os._exit(0)
            os.wait()
        print(counted())
    """
    environment = {**os.environ, **({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if shared else {})}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    # alone: a child goes on from what its parent had counted; shared: each adds to what all have
    assert process.stdout.split() == (
        ["12.0", "17.0", "17.0"] if shared else ["12.0", "12.0", "7.0"]
    ), process.stderr


@pytest.mark.parametrize(
    ("make", "package"), [(OpenTelemetry, "opentelemetry"), (Prometheus, "prometheus_client")]
)
def test_a_missing_package_is_an_error_that_names_it(
    make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(WrongUse, match=r"pip install (opentelemetry-api|prometheus-client)"):
        make()


def test_every_reading_of_metrics_includes_all_ended_calls() -> None:
    """Calls are counted in the background, at a read, at a flush and at the end."""
    counts: list[int] = []

    class Exporter(MetricExporter):
        def export(self, data: Any, *_: Any, **__: Any) -> Any:
            (scope,) = data.resource_metrics[0].scope_metrics
            durations = [
                metric
                for metric in scope.metrics
                if metric.name == "gen_ai.client.operation.duration"
            ]
            counts.append(
                sum(point.count for duration in durations for point in duration.data.data_points)
            )
            assert "loadgen.client.uncounted" not in {metric.name for metric in scope.metrics}
            return MetricExportResult.SUCCESS

        def force_flush(self, timeout_millis: float = 10_000) -> bool:  # noqa: ARG002
            return True

        def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
            pass

    provider = MeterProvider(
        [PeriodicExportingMetricReader(Exporter(), export_interval_millis=1e9)]
    )
    observer = OpenTelemetry(meter_provider=provider, spans=False)
    for _ in range(MAX_PENDING + 1):
        observer(measurement(done=5))
    provider.force_flush()
    assert counts == [MAX_PENDING + 1]
    observer(measurement(done=5))
    provider.shutdown()
    assert counts[-1] == MAX_PENDING + 2
