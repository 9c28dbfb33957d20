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

    A term is written as `{keyword: {key: value, ...}}`, such as `goodput: {share: 99%}`. Each
    keyword allows other keys, so its model is created at run time with pydantic's `create_model`
    instead of being written as a class.

    Args:
        keyword: The keyword of the term, such as "goodput".
        kind: Which limit and which parameters a term with this keyword has.
        comparable_metrics: The type of the parameter `of`, which names the metric that a term
            compares, as in `drift: {of: ttft, ...}`.
    """
    possible_fields = _define_possible_fields(kind, comparable_metrics)
    fields = {name: possible_fields[name] for name in _list_field_names(keyword, kind)}
    model = create_model(
        keyword,
        __base__=Tagged,
        __doc__=f"The term `{keyword}` of a contract.",
        **fields,
    )
    model.tag = keyword  # the key that selects this model in a file
    model.short = kind.short_key  # the short form `{keyword: value}` sets only this key

    return model


def _define_possible_fields(kind: TermKind, comparable_metrics: TypeForm) -> dict[str, Any]:
    """Return the pydantic definitions of all fields that some term may have, by their names.

    Each term uses some of them: see `_list_field_names`. A definition is what `create_model`
    expects: a pair of the type and the default, where `...` is pydantic's mark of a required field.
    A key of the file may have another name (an alias): `share: 99%` sets the `limit` of `goodput`.

    Args:
        kind: The kind of the term, which determines its limit and its default quantile.
        comparable_metrics: The type of the parameter `of`.
    """
    required = ...
    return {
        "of": (comparable_metrics, required),
        "level": (str, required),
        "window_ns": (PositiveTime, Field(validation_alias="window")),
        "quantile": (Quantile, Field(kind.default_quantile, validation_alias="at")),
        "limit": (kind.limit.type, Field(validation_alias=kind.limit.key)),
        "class_name": (str, Field("", validation_alias="class")),
    }


def _list_field_names(keyword: str, kind: TermKind) -> list[str]:
    """Return the names of the fields that a term with this keyword has.

    Error messages list the keys of a term in this order, which is that of the documentation. A term
    without parameters begins with its limit: `ttft: {limit: 2s, at: p99}`. Otherwise the parameters
    come first and the limit last: `drift: {window: 1h, of: ttft, at: p50, limit: 10%}`.
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
    """Convert a term that pydantic has read from a file to a `ContractTerm`.

    The model has the fields of the term. Its `tag` is the keyword of the term, such as "ttft".
    Two kinds of limits are pairs of a number and a text, which become two fields of the term: a
    cost such as `0.45 USD` has a currency, and an energy such as `0.5 J/token` names the unit of
    work that it is for.
    """
    fields = dict(model)
    limit_kind = get_term_kind(model.tag).limit
    if limit_kind is MAX_COST:
        amount, currency = fields["limit"]
        fields["limit"] = amount
        fields["currency"] = currency
    elif limit_kind is MAX_ENERGY:
        joules, unit_of_work = fields["limit"]
        fields["limit"] = joules
        fields["of"] = unit_of_work

    return ContractTerm(kind=model.tag, **fields)


def _create_term_type(
    noun: str, kinds: Mapping[str, TermKind], comparable_metrics: TypeForm
) -> TypeForm:
    """Return a type annotation that makes pydantic read a term with any of several keywords.

    A term in a file has one key, its keyword, which selects the model that reads the value. For the
    keywords `ttft` and `tpot`, the annotation would be written like this:
    `Annotated[TtftModel | TpotModel, TaggedUnion(noun), AfterValidator(_create_term)]`.

    Args:
        noun: The word for a term in error messages.
        kinds: The kinds of terms, by keyword.
        comparable_metrics: The type of the parameter `of`: see `_create_term_model`.
    """
    models = tuple(
        _create_term_model(keyword, kind, comparable_metrics) for keyword, kind in kinds.items()
    )

    # The models are only known at run time, so the union cannot be written with `|`.
    any_model: TypeForm = Union[models]  # noqa: UP007
    select_by_keyword = TaggedUnion(noun)
    convert_to_contract_term = AfterValidator(_create_term)

    return Annotated[any_model, select_by_keyword, convert_to_contract_term]


@cache
def _create_load_term_type(metrics: tuple[str, ...]) -> TypeForm:
    """Return a type annotation that makes pydantic read a term about a load.

    Such a term limits a latency metric, as in `ttft: 2s`, or something else, as in `errors: 1%` or
    `drift: {of: ttft, ...}`. The metrics depend on the installed plug-ins, so the annotation is
    created at run time. It is cached, because that takes milliseconds.

    Args:
        metrics: The names of the latency metrics.
    """
    # A term such as `drift` needs the metric of each request. Pooled metrics, such as the times
    # between the tokens of all responses, are only known for all requests together.
    metrics_per_request = tuple(name for name in metrics if name not in pooled_metrics())
    comparable_metrics: TypeForm = Literal[metrics_per_request]
    kinds_by_keyword = dict.fromkeys(metrics, LATENCY_TERM)
    kinds_by_keyword.update(TERM_KINDS)
    return _create_term_type("term", kinds_by_keyword, comparable_metrics)


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
    """Read a term about a load from its value in a contract file (a pydantic validator).

    A term may limit any latency metric of this package and of installed plug-ins. They are looked
    up at each call, because plug-ins may not be loaded yet when this module is imported. A stored
    contract may also use metrics of plug-ins that are not installed now. These are the
    `extra_metrics` of the pydantic context.

    Args:
        value: The value in the YAML document, such as `{"ttft": "2s"}`.
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
