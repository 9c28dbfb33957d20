"""How an SLO and the rules to stop by are written in a file, and the checked values of them. Pure."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    model_validator,
)

from loadgen.core import units
from loadgen.core.slo import METRIC_ALIASES, Slo, StopRule, TaskTerm, Term, metrics
from loadgen.core.workload.fields import Duration, Quantile, Share
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.yaml_marks import Map
from loadgen.figures import FIGURES


class WrittenTerm(Part):
    """`2s`, or `{limit: 2s, at: p95}`."""

    limit_ns: Annotated[Duration, Field(gt=0)] = Field(validation_alias="limit")
    quantile: Quantile | None = Field(default=None, validation_alias="at")

    @classmethod
    def normalize(cls, data: Any) -> Any:
        return data if isinstance(data, dict) else {"limit": data}

    @classmethod
    def extend_json_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        return {"anyOf": [schema["properties"]["limit"], schema]}


class WrittenTaskTerm(Part):
    """What was promised of tasks and conversations as a whole."""

    within_ns: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None, validation_alias="within"
    )
    wait_ns: Annotated[Duration, Field(gt=0)] | None = Field(
        None, validation_alias="wait"
    )  # for each first token
    goodput: Share = 0.99  # of the tasks that keep both

    @model_validator(mode="after")
    def _has_a_limit(self) -> WrittenTaskTerm:
        if self.within_ns is None and self.wait_ns is None:
            raise units.Wrong(
                "missing_value", "has no limit", "task: {within: 90s, wait: 2s, goodput: 95%}"
            )
        return self


def stop_rule(text: str) -> StopRule:
    """`errors:20%`, `ttft:p50:30s`. Raises `Wrong`."""
    known = f"errors:20%, or a latency at a percentile, ttft:p50:30s; known: errors, {', '.join(metrics())}"
    name, *parts = text.strip().split(":")
    metric = METRIC_ALIASES.get(name, name)
    if name == "errors" and len(parts) == 1:
        limit, quantile = units.share(parts[0]), None
    elif metric in metrics() and len(parts) == 2:
        quantile, limit = units.quantile(parts[0]), float(units.duration_ns(parts[1]))
    else:
        raise units.Wrong("invalid_value", "is no rule to stop by", known)
    if not limit:
        raise units.Wrong("out_of_range", "stops every run", known)
    return StopRule(metric=metric, limit=limit, quantile=quantile)


def _stop_rule(value: Any) -> StopRule:
    if isinstance(value, StopRule):
        return value
    if not isinstance(value, str):
        raise units.Wrong("wrong_type", "is no rule to stop by", "errors:20%, or ttft:p50:30s")
    return stop_rule(value)


WrittenStopRule = Annotated[
    StopRule,
    PlainValidator(_stop_rule),
    PlainSerializer(msgspec.to_builtins),
    WithJsonSchema({"type": "string", "examples": ["errors:20%", "ttft:p50:30s"]}),
]


class _WrittenSlo(Part):
    """The terms as they are written, one key each; `written_slo` has the keys of the figures."""

    synonyms: ClassVar[dict[str, str]] = METRIC_ALIASES
    at: Quantile = 0.99
    goodput: Share | None = None
    task: WrittenTaskTerm | None = None

    @classmethod
    def normalize(cls, data: Any) -> Any:
        if not isinstance(data, Map):
            return data
        seen = set[str]()
        for key in data:
            if (name := METRIC_ALIASES.get(key, key)) in seen:
                raise units.Wrong(
                    "duplicate", f"has {name} twice", f"{key} is another name of {name}"
                )
            seen.add(name)
        return data.renamed(METRIC_ALIASES)

    @classmethod
    def extend_json_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        terms = schema["properties"]
        terms |= {alias: terms[metric] for alias, metric in METRIC_ALIASES.items()}
        return schema

    def checked(self) -> Slo:
        written = {name: term for name, term in self if isinstance(term, WrittenTerm)}
        terms = [
            Term(metric=m, limit_ns=t.limit_ns, quantile=t.quantile or self.at)
            for m, t in written.items()
        ]
        task = None
        if self.task is not None:
            task = TaskTerm(
                within_ns=self.task.within_ns, wait_ns=self.task.wait_ns, share=self.task.goodput
            )
        if not terms and (task is None or self.goodput is not None):
            raise units.Wrong(
                "missing_value", "has no term", "slo: {ttft: 2s, tpot: 200ms, at: p99}"
            )
        return Slo(terms=tuple(terms), goodput_share=self.goodput, task=task)


@cache
def written_slo(figures: tuple[str, ...]) -> type[_WrittenSlo]:
    """The type of an SLO as it is written, with a key for each of these figures."""
    terms: dict[str, Any] = dict.fromkeys(figures, (WrittenTerm | None, None))
    return create_model(
        "WrittenSlo",
        __base__=_WrittenSlo,
        __module__=__name__,
        __doc__="The terms as they are written, one key each.",
        **terms,
    )


def checked_slo(value: Any, info: ValidationInfo) -> Slo | None:
    """An SLO from what a file says; None where that is wrong, as the faults of the source say then."""
    if value is None or isinstance(value, Slo):
        return value
    if not isinstance(info.context, FileContext):  # of a checked workload, dumped
        return msgspec.convert(value, Slo)
    faults_before = len(info.context.faults)
    figures = tuple(dict.fromkeys((*metrics(), *info.context.extra_metrics)))
    written = written_slo(figures).model_validate(value, context=info.context)
    return (
        written.checked() if len(info.context.faults) == faults_before else None
    )  # the fault is in the list already


_OWN_SLO = written_slo(tuple(row.name for row in FIGURES.own if "slo" in row.shown))
"""How an SLO is written without the metrics of other packages, for the JSON Schema."""

WorkloadSlo = Annotated[
    Slo | None,
    PlainValidator(checked_slo, json_schema_input_type=_OWN_SLO | None),
    PlainSerializer(msgspec.to_builtins),
]
