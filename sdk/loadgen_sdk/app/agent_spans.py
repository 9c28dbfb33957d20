"""Spans of what an application does around its calls: workflows, agents and tools.

Names and units are those of OpenTelemetry's semantic conventions for generative AI. A call inside
such a span becomes its child.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

from .metric_labels import DURATION_BOUNDS_S

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
"""The version of the conventions."""

LONG_BOUNDS_S = (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)


class Operation(NamedTuple):
    """A kind of work.

    Attributes:
        name: The value of `gen_ai.operation.name`.
        name_attribute: The attribute with the name of what does the work.
        bounds_s: The bucket bounds of its duration.
    """

    name: str
    name_attribute: str
    bounds_s: tuple[float, ...]

    @property
    def metric(self) -> str:
        """The name of the metric of its duration."""
        return f"gen_ai.{self.name}.duration"


AGENT = Operation("invoke_agent", "gen_ai.agent.name", DURATION_BOUNDS_S)
TOOL = Operation("execute_tool", "gen_ai.tool.name", DURATION_BOUNDS_S)
WORKFLOW = Operation("invoke_workflow", "gen_ai.workflow.name", LONG_BOUNDS_S)
OPERATIONS = (AGENT, TOOL, WORKFLOW)


@dataclass(frozen=True)
class OperationRecorder:
    """Records operations as spans and durations.

    Attributes:
        trace: The module `opentelemetry.trace`.
        tracer: The tracer, or None for no spans.
        durations: The histogram of each operation, by its name.
    """

    trace: Any
    tracer: Any
    durations: Mapping[str, Any]

    @contextmanager
    def record(
        self, operation: Operation, name: str, attributes: Mapping[str, Any]
    ) -> Iterator[Any]:
        """Record a span and a duration for the code in the `with` block.

        The span is yielded, so that the application can add attributes. An exception is raised
        again. Its class is recorded as `error.type`, but not its text, which may quote a prompt.

        Args:
            operation: The kind of work.
            name: The name of the agent, tool or workflow.
            attributes: Further attributes of the span. Those that are None are left out.
        """
        metric_attributes = {
            "gen_ai.operation.name": operation.name,
            operation.name_attribute: name,
        }
        started_ns = perf_counter_ns()
        span = self._start_span(operation, name, {**metric_attributes, **attributes})

        # `use_span` makes the span the current one. By default it would also end the span, and
        # record the text of an exception. Both are done below, without the text.
        current_span = self.trace.use_span(
            span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )
        try:
            with current_span:
                yield span
        except BaseException as error:
            error_type = type(error).__qualname__
            metric_attributes["error.type"] = error_type
            self._record_error(span, error)
            raise
        finally:
            duration_s = (perf_counter_ns() - started_ns) / 1e9
            self.durations[operation.name].record(duration_s, metric_attributes)
            span.end()

    def _record_error(self, span: Any, error: BaseException) -> None:
        """Add the class of an exception to a span. A cancellation does not set its error status."""
        error_type = type(error).__qualname__
        span.set_attribute("error.type", error_type)
        if isinstance(error, Exception):
            span.set_status(self.trace.StatusCode.ERROR, error_type)

    def _start_span(self, operation: Operation, name: str, attributes: dict[str, Any]) -> Any:
        """Return a span, or the invalid span if there is no tracer.

        Attributes of None are left out.
        """
        if self.tracer is None:
            return self.trace.INVALID_SPAN
        return self.tracer.start_span(
            f"{operation.name} {name}",
            kind=self.trace.SpanKind.INTERNAL,
            attributes={key: value for key, value in attributes.items() if value is not None},
        )
