"""Spans of what an application does around its calls: workflows, agents, tools, by OpenTelemetry's GenAI conventions.

A call that is made inside is a child of theirs, as they are the current span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"  # of the conventions that names and units are taken from
SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
LONG_SECONDS = (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)


class Operation(NamedTuple):
    """One kind of work: its `gen_ai.operation.name`, the attribute of its name, and the buckets of its duration."""

    name: str
    named_by: str
    bounds: tuple[float, ...]

    @property
    def metric(self) -> str:
        return f"gen_ai.{self.name}.duration"


AGENT = Operation("invoke_agent", "gen_ai.agent.name", SECONDS)
TOOL = Operation("execute_tool", "gen_ai.tool.name", SECONDS)
WORKFLOW = Operation("invoke_workflow", "gen_ai.workflow.name", LONG_SECONDS)
OPERATIONS = (AGENT, TOOL, WORKFLOW)


@contextmanager
def operation_span(
    trace: Any,
    tracer: Any,
    durations: Mapping[str, Any],
    operation: Operation,
    name: str,
    attributes: dict[str, Any],
) -> Iterator[Any]:
    """A current span of kind INTERNAL around a block, and its duration. What the block raises goes through: the span
    gets its class as `error.type`, never its text. tracer None: no span. Yields the span, for attributes of one's own.
    """
    shared = {"gen_ai.operation.name": operation.name, operation.named_by: name}
    given = {key: value for key, value in attributes.items() if value is not None}
    span, started = trace.INVALID_SPAN, perf_counter_ns()
    if tracer is not None:
        kind = trace.SpanKind.INTERNAL
        span = tracer.start_span(
            f"{operation.name} {name}", kind=kind, attributes={**shared, **given}
        )
    try:
        with trace.use_span(
            span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        ):
            yield span
    except BaseException as error:
        shared["error.type"] = type(error).__qualname__
        span.set_attribute("error.type", shared["error.type"])
        if isinstance(error, Exception):
            span.set_status(trace.StatusCode.ERROR, shared["error.type"])
        raise
    finally:
        durations[operation.name].record((perf_counter_ns() - started) / 1e9, shared)
        span.end()
