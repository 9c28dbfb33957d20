"""The pydantic types that read the terms of a contract from its file.

A term is written as a mapping with one key, its keyword, such as `ttft: {limit: 2s, at: p99}` or,
in short, `ttft: 2s`. A pydantic model is made for each keyword of `terms.py`, because each keyword
has its own keys. After validation, the values of the model become a `ContractTerm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    create_model,
)

from loadgen.contracts.terms import (
    ANSWER_TERM_KINDS,
    LATENCY_TERM,
    MAX_COST,
    MAX_ENERGY,
    TERM_KINDS,
    ContractTerm,
    PositiveTime,
    TermKind,
    can_be_about_class,
    get_term_kind,
    list_latency_metrics,
)
from loadgen.core.workload.fields import Quantile
from loadgen.core.workload.file_models import FileContext, Tagged, TaggedUnion
from loadgen.figures import pooled_metrics

AnswerScore = Literal["rouge1", "rouge2", "rougeL", "exact", "choice", "json"]

TypeForm = Any
"""A type that is created at run time, such as `Literal["ttft", "tpot"]` of the known metrics.

Type checkers have no type for such a value.
"""


def _create_term_model(keyword: str, kind: TermKind, comparable_metrics: TypeForm) -> type[Tagged]:
    """Return the pydantic model that reads a term with this keyword from a contract file.

    A term is written as `{keyword: {key: value, ...}}`, such as `goodput: {share: 99%}`. Which keys
    it may have depends on its keyword, so the model is created at run time with pydantic's
    `create_model`. It has the fields that this function would declare if it were a class.

    Args:
        keyword: The keyword of the term, such as "goodput".
        kind: Which limit and which parameters a term with this keyword has.
        comparable_metrics: The type of the parameter `of`, which names the metric that a term
            compares, as in `drift: {of: ttft, ...}`.
    """
    fields = _define_fields(kind, comparable_metrics)
    model = create_model(
        keyword,
        __base__=Tagged,
        __doc__=f"The term `{keyword}` of a contract.",
        **{name: fields[name] for name in _list_field_names(keyword, kind)},
    )
    model.tag = keyword
    model.short = kind.short_key  # `{keyword: value}` gives the value of this key
    return model


def _define_fields(kind: TermKind, comparable_metrics: TypeForm) -> dict[str, Any]:
    """Return the pydantic definition of each field that a term may have, by its name.

    A definition is the type and the default, or `...` for a required field. The names are those of
    the fields of `ContractTerm`. The key in the file is the alias of a field, or its name if it has
    none: the limit of `goodput`, for example, is written as `share: 99%`.

    Args:
        kind: The kind of the term, which determines its limit and its default quantile.
        comparable_metrics: The type of the parameter `of`.
    """
    return {
        "of": (comparable_metrics, ...),
        "level": (str, ...),
        "window_ns": (PositiveTime, Field(validation_alias="window")),
        "quantile": (Quantile, Field(kind.default_quantile, validation_alias="at")),
        "limit": (kind.limit.type, Field(validation_alias=kind.limit.key)),
        "class_name": (str, Field("", validation_alias="class")),
    }


def _list_field_names(keyword: str, kind: TermKind) -> list[str]:
    """Return the names of the fields that a term with this keyword has.

    An error message about a wrong key lists the keys of the term in this order, which is that of
    the documentation: `ttft: {limit: 2s, at: p99}`, but `drift: {window: 1h, of: ttft, at: p50,
    limit: 10%}`.
    """
    quantile = [] if kind.default_quantile is None else ["quantile"]
    if kind.parameters:
        names = [*kind.parameters, *quantile, "limit"]
    else:
        names = ["limit", *quantile]
    if can_be_about_class(keyword):
        names.append("class_name")
    return names


def _create_term(model: Tagged) -> ContractTerm:
    """Return the term of a contract from the pydantic model that read it.

    Two kinds of limits are pairs of a number and a text, which become two fields of the term: a
    cost such as `0.45 USD` has a currency, and an energy such as `0.5 J/token` names the unit of
    work that it is for.
    """
    fields = dict(model)
    limit_kind = get_term_kind(model.tag).limit
    if limit_kind is MAX_COST:
        amount, currency = fields["limit"]
        fields |= {"limit": amount, "currency": currency}
    elif limit_kind is MAX_ENERGY:
        joules, unit_of_work = fields["limit"]
        fields |= {"limit": joules, "of": unit_of_work}
    return ContractTerm(kind=model.tag, **fields)


def _create_term_type(
    noun: str, kinds: Mapping[str, TermKind], comparable_metrics: TypeForm
) -> TypeForm:
    """Return the type with which pydantic reads a term that may have any of several keywords.

    It equals this annotation, written for the keywords of `kinds`:
    `Annotated[TtftModel | TpotModel | ..., TaggedUnion(noun), AfterValidator(_create_term)]`.
    The keyword, which is the only key of a term in the file, selects the model that reads the
    value. Then `_create_term` converts the model to a `ContractTerm`.

    Args:
        noun: The word for a term in error messages.
        kinds: The kinds of terms, by keyword.
        comparable_metrics: The type of the parameter `of`: see `_create_term_model`.
    """
    models = tuple(
        _create_term_model(keyword, kind, comparable_metrics) for keyword, kind in kinds.items()
    )
    # The models are only known at run time, so the union cannot be written with `|`.
    return Annotated[Union[models], TaggedUnion(noun), AfterValidator(_create_term)]  # noqa: UP007


@cache
def _create_load_term_type(metrics: tuple[str, ...]) -> TypeForm:
    """Return the type with which pydantic reads a term about a load.

    Its keyword is the name of a latency metric, as in `ttft: 2s`, or another keyword, as in
    `drift: {of: ttft, ...}`.

    Args:
        metrics: The names of the latency metrics.
    """
    # A term that compares a metric needs its value for each request. Pooled metrics, such as the
    # times between the tokens of all responses, have no such value.
    metrics_per_request = tuple(name for name in metrics if name not in pooled_metrics())
    comparable_metrics: TypeForm = Literal[metrics_per_request]
    kinds = dict.fromkeys(metrics, LATENCY_TERM) | TERM_KINDS
    return _create_term_type("term", kinds, comparable_metrics)


@cache
def _create_load_term_adapter(metrics: tuple[str, ...]) -> TypeAdapter[ContractTerm]:
    """Return the parser of terms about a load. It is built once, which takes milliseconds."""
    return TypeAdapter(_create_load_term_type(metrics))


_ANSWER_TERM_TYPE = _create_term_type("term about responses", ANSWER_TERM_KINDS, AnswerScore)


@cache
def _create_answer_term_adapter() -> TypeAdapter[ContractTerm]:
    """Return the parser of terms about responses, which is built once."""
    return TypeAdapter(_ANSWER_TERM_TYPE)


def validate_term(value: object, info: ValidationInfo) -> ContractTerm:
    """Return the term about a load that a value of a contract file describes.

    The latency metrics that may be its keyword are those of this package and of installed plug-ins.
    They are looked up at each call, because plug-ins may not be loaded yet when this module is
    imported. A stored contract may also use metrics of plug-ins that are not installed now: these
    are named in the context of the validation.

    Args:
        value: The value of the YAML document, such as `{"ttft": "2s"}`.
        info: The pydantic context, with the file that is read.
    """
    metrics = list(list_latency_metrics())
    if isinstance(info.context, FileContext):
        metrics += [name for name in info.context.extra_metrics if name not in metrics]
    adapter = _create_load_term_adapter(tuple(metrics))
    return adapter.validate_python(value, context=info.context)


def validate_answer_term(value: object, info: ValidationInfo) -> ContractTerm:
    """Return the term about responses that a value of a contract file describes."""
    return _create_answer_term_adapter().validate_python(value, context=info.context)


TermInFile = Annotated[
    ContractTerm,
    PlainValidator(
        validate_term,
        json_schema_input_type=_create_load_term_type(list_latency_metrics(include_plugins=False)),
    ),
]
"""A term about a load, in the file."""

AnswerTermInFile = Annotated[
    ContractTerm,
    PlainValidator(validate_answer_term, json_schema_input_type=_ANSWER_TERM_TYPE),
]
"""A term about responses, in the file."""
