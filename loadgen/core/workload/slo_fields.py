"""How an SLO and the rules that stop a run early are written in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from loadgen.core import units
from loadgen.core.errors import LoadgenError
from loadgen.core.slo import (
    DEFAULT_QUANTILE,
    METRIC_ALIASES,
    MISSING_DEADLINES,
    FluidityTerm,
    Slo,
    StopRule,
    TaskTerm,
    Term,
    metrics,
)
from loadgen.core.workload.fields import Duration, Quantile, Share
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.yaml_marks import Map
from loadgen.figures import METRICS

PositiveDuration = Annotated[Duration, Field(gt=0)]


class WrittenTerm(Part):
    """The limit of a latency: `2s`, or `{limit: 2s, at: p95}`."""

    limit_ns: PositiveDuration = Field(validation_alias="limit")
    quantile: Quantile | None = Field(default=None, validation_alias="at")

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Accept the limit alone, too."""
        return data if isinstance(data, dict) else {"limit": data}

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return a JSON Schema that accepts the limit alone, too."""
        return {"anyOf": [schema["properties"]["limit"], schema]}


class WrittenLimits(Part):
    """The limits of one latency: one limit, or a list with one limit per percentile."""

    limits: tuple[WrittenTerm, ...] = Field(min_length=1)

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Accept one limit alone, too."""
        return {"limits": data if isinstance(data, list) else [data]}

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return a JSON Schema of one limit or a list of limits."""
        limits = schema["properties"]["limits"]
        return {"anyOf": [limits["items"], limits]}


class WrittenTaskTerm(Part):
    """The limits of tasks and conversations as a whole."""

    # The limit of the time from the start of a task to its end.
    within_ns: PositiveDuration | None = Field(default=None, validation_alias="within")
    # The limit of the time to first token of each request of a task.
    wait_ns: PositiveDuration | None = Field(default=None, validation_alias="wait")
    # The share of tasks that must meet both limits.
    attainment: Share = 0.99

    @model_validator(mode="after")
    def _check_has_limit(self) -> Self:
        """Refuse an objective of tasks that limits nothing."""
        if self.within_ns is None and self.wait_ns is None:
            example = "task: {within: 90s, wait: 2s, attainment: 95%}"
            raise units.InvalidValueError("missing_value", "has no limit", example)
        return self

    def to_term(self) -> TaskTerm:
        """Return the limits as the term of an SLO."""
        return TaskTerm(within_ns=self.within_ns, wait_ns=self.wait_ns, share=self.attainment)


class WrittenFluidityTerm(Part):
    """The objective of token deadlines: `90%`, or `{index: 90%, at: p95, ttft: 2s, tpot: 50ms}`."""

    # The share of its token deadlines that a request has to meet.
    index: Share = Field(gt=0)
    # The share of the requests that have to reach the index.
    quantile: Quantile | None = Field(default=None, validation_alias="at")
    # The deadline of the first token, from the scheduled time of the request.
    first_token_ns: PositiveDuration | None = Field(default=None, validation_alias="ttft")
    # The time that each later token adds to the deadline.
    per_token_ns: PositiveDuration | None = Field(default=None, validation_alias="tpot")

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Accept the index alone, too."""
        return data if isinstance(data, dict) else {"index": data}

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return a JSON Schema that accepts the index alone, too."""
        # The oldest supported pydantic leaves out which fields are required.
        written_with_fields = schema | {"required": ["index"]}
        return {"anyOf": [schema["properties"]["index"], written_with_fields]}

    def to_term(self, default_quantile: float) -> FluidityTerm:
        """Return the objective as the term of an SLO."""
        return FluidityTerm(
            least_index=self.index,
            quantile=self.quantile or default_quantile,
            first_token_ns=self.first_token_ns,
            per_token_ns=self.per_token_ns,
        )


ANSWERS_HINT = "write the share of checked answers that must be right, like answers:95%"


def check_answers_share(share: float) -> float:
    """Return the smallest share of right answers unchanged, such as 0.95 of `answers: 95%`.

    Raises `InvalidValueError` if the share is 0 %, which is always met, or 100 %. A share of 100 %
    cannot be met, because the confidence interval of a measured share always reaches below it.
    """
    if share == 0:
        raise units.InvalidValueError("out_of_range", "is always met", ANSWERS_HINT)
    if share == 1:
        raise units.InvalidValueError(
            "out_of_range",
            "must be below 100%, because no sample can show that every answer is right",
            "require a little less, like answers:99%",
        )
    return share


class WrittenSlo(Part):
    """The terms of an SLO, one key each. `build_slo_model` adds a key for each metric."""

    synonyms: ClassVar[dict[str, str]] = METRIC_ALIASES
    at: Quantile = DEFAULT_QUANTILE
    attainment: Share | None = None
    task: WrittenTaskTerm | None = None
    fluidity: WrittenFluidityTerm | None = None
    # The share of the checked answers that must be right. The load needs questions with known
    # answers (`check_answers`).
    answers: Annotated[Share, AfterValidator(check_answers_share)] | None = None

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Return an SLO in which each metric has its own name in place of an alias.

        For example, the key `e2el` of other tools becomes `e2e`. Raises `InvalidValueError` if two
        keys mean the same metric.
        """
        if not isinstance(data, Map):
            return data

        names = set[str]()
        for key in data:
            name = METRIC_ALIASES.get(key, key)
            if name in names:
                hint = f"{key} is another name of {name}"
                raise units.InvalidValueError("duplicate", f"has {name} twice", hint)
            names.add(name)

        return data.with_renamed_keys(METRIC_ALIASES)

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return a JSON Schema that accepts the other names of metrics, too."""
        properties = schema["properties"]
        for alias, metric in METRIC_ALIASES.items():
            properties[alias] = properties[metric]
        return schema

    def to_slo(self) -> Slo:
        """Return the SLO that the file describes.

        The key `attainment` of a file is the share of requests that must meet all latency limits.
        The SLO calls it `goodput_share`.

        Raises `InvalidValueError` if two limits are for the same metric and percentile, or if a
        latency limit or a deadline is missing. An attainment needs a latency limit, and so does an
        SLO without an objective for tasks, token deadlines or answers.
        """
        latency_terms = self._latency_terms()
        _check_one_limit_per_percentile(latency_terms)
        has_attainment = self.attainment is not None
        other_objectives = (self.task, self.fluidity, self.answers)
        has_other_objective = any(objective is not None for objective in other_objectives)

        needs_latency_term = has_attainment or not has_other_objective
        if needs_latency_term and not latency_terms:
            example = "slo: {ttft: 2s, tpot: 200ms, at: p99}"
            raise units.InvalidValueError("missing_value", "has no term", example)

        task_term = None if self.task is None else self.task.to_term()
        fluidity_term = None if self.fluidity is None else self.fluidity.to_term(self.at)
        slo = Slo(
            terms=latency_terms,
            goodput_share=self.attainment,
            task=task_term,
            fluidity=fluidity_term,
            answers_share=self.answers,
        )
        if slo.lacks_token_deadlines:
            example = "fluidity: {index: 90%, at: p95, ttft: 2s, tpot: 50ms}"
            raise units.InvalidValueError(
                "missing_value", f"has the objective fluidity, which {MISSING_DEADLINES}", example
            )
        return slo

    def _latency_terms(self) -> tuple[Term, ...]:
        """Return one term for each limit of a latency, in the order of the metrics.

        A limit without a percentile has the percentile of the whole SLO (`at`).
        """
        # Iterating over a pydantic model yields the name and value of each field. The fields of
        # metrics are the only ones with WrittenLimits.
        limits_by_metric = {
            name: value.limits for name, value in self if isinstance(value, WrittenLimits)
        }
        return tuple(
            Term(metric=metric, limit_ns=limit.limit_ns, quantile=limit.quantile or self.at)
            for metric, limits in limits_by_metric.items()
            for limit in limits
        )


def _check_one_limit_per_percentile(terms: Sequence[Term]) -> None:
    """Raise `InvalidValueError` if two terms limit the same metric at the same percentile."""
    seen = set[tuple[str, float]]()
    for term in terms:
        if (term.metric, term.quantile) in seen:
            problem = f"limits {term.metric} p{term.quantile * 100:g} twice"
            raise units.InvalidValueError("duplicate", problem, "keep one of them")
        seen.add((term.metric, term.quantile))


@cache
def build_slo_model(metric_names: tuple[str, ...]) -> type[WrittenSlo]:
    """Return the model of an SLO in a file, with a key for each of these metrics."""
    fields: dict[str, Any] = dict.fromkeys(metric_names, (WrittenLimits | None, None))
    return create_model(
        "WrittenSlo",
        __base__=WrittenSlo,
        __module__=__name__,
        __doc__="The terms of an SLO, one per key.",
        **fields,
    )


def validate_slo(value: object, info: ValidationInfo) -> Slo | None:
    """Return the SLO of a workload, from one of the forms that pydantic may pass.

    A workload that was built in Python has an `Slo`. A workload that was stored as JSON has the
    fields of an `Slo`. A workload file has a key for each metric.
    """
    if value is None or isinstance(value, Slo):
        return value
    if isinstance(info.context, FileContext):
        return _validate_slo_of_file(value, info.context)
    return msgspec.convert(value, Slo)


def serialize_slo(slo: Slo | None) -> object:
    """Return an SLO as JSON types, for a stored workload and its fingerprint.

    The objectives of token deadlines and of answers are left out if there are none, so that the
    fingerprint of a workload without them is the one that earlier versions computed.
    """
    if slo is None:
        return None

    fields = msgspec.to_builtins(slo)
    for later_objective in ("fluidity", "answers_share"):
        if fields[later_objective] is None:
            del fields[later_objective]
    return fields


def _validate_slo_of_file(value: object, context: FileContext) -> Slo | None:
    """Return the SLO that is written in a file, or None if it has an unknown key.

    A wrong value raises an exception, which pydantic reports. An unknown key, such as a mistyped
    metric, only adds an error to the context, and is ignored so that the rest of the file is
    checked as well. An SLO without this key would be wrong, so none is returned.
    """
    # The model adds the errors of unknown keys to this list.
    unknown_key_errors: list[LoadgenError] = []
    context_of_slo = replace(context, errors=unknown_key_errors)

    metric_names = tuple(dict.fromkeys((*metrics(), *context.extra_metrics)))
    model = build_slo_model(metric_names)
    try:
        slo_of_file = model.model_validate(value, context=context_of_slo)
    finally:
        context.errors.extend(unknown_key_errors)

    return None if unknown_key_errors else slo_of_file.to_slo()


# The JSON Schema has the metrics of this package only. Packages that add metrics may be missing.
_OWN_METRICS = tuple(metric.name for metric in METRICS.builtin_rows if "slo" in metric.places)

SloField = Annotated[
    Slo | None,
    PlainValidator(validate_slo, json_schema_input_type=build_slo_model(_OWN_METRICS) | None),
    PlainSerializer(serialize_slo),
]


def parse_stop_rule(text: str) -> StopRule:
    """Return the rule of a text, such as `errors:20%` or `ttft:p50:30s`.

    The first one stops a run if 20 % of recent requests failed, the second one if their median TTFT
    is above 30 s. Raises `InvalidValueError` if the text is no rule, or if its limit is zero, which
    would stop every run.
    """
    hint = (
        "write errors:20%, or a latency at a percentile, ttft:p50:30s; metrics: "
        f"errors, {', '.join(metrics())}"
    )
    name, *arguments = text.strip().split(":")

    metric = METRIC_ALIASES.get(name, name)
    if name == "errors" and len(arguments) == 1:
        limit = units.share(arguments[0])
        quantile = None
    elif metric in metrics() and len(arguments) == 2:
        quantile = units.quantile(arguments[0])
        limit = float(units.duration_ns(arguments[1]))
    else:
        raise units.InvalidValueError("invalid_value", "is not a stop rule", hint)

    if not limit:
        raise units.InvalidValueError("out_of_range", "stops every run", hint)

    return StopRule(metric=metric, limit=limit, quantile=quantile)


def _validate_stop_rule(value: object) -> StopRule:
    """Return the rule of a text in a file, or a rule that was built in Python.

    Raises `InvalidValueError`.
    """
    if isinstance(value, StopRule):
        return value
    if isinstance(value, str):
        return parse_stop_rule(value)
    raise units.InvalidValueError("wrong_type", "is not a stop rule", "errors:20%, or ttft:p50:30s")


StopRuleField = Annotated[
    StopRule,
    PlainValidator(_validate_stop_rule),
    PlainSerializer(msgspec.to_builtins),
    WithJsonSchema({"type": "string", "examples": ["errors:20%", "ttft:p50:30s"]}),
]
