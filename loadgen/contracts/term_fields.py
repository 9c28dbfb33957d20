"""The pydantic types that read the terms of a contract from its file."""

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
    latency_metrics,
)
from loadgen.core.workload.fields import Quantile
from loadgen.core.workload.file_models import FileContext, Tagged, TaggedUnion
from loadgen.figures import pooled_figures

AnswerScore = Literal["rouge1", "rouge2", "rougeL", "exact", "choice", "json"]


def _create_term_model(keyword: str, kind: TermKind, compared: Any) -> type[Tagged]:
    """Return the pydantic model of a term with this keyword.

    Args:
        keyword: The keyword of the term.
        kind: The meaning of the keyword.
        compared: The type of the parameter `of`: the names of what can be compared.
    """
    fields: dict[str, Any] = {
        "of": (compared, ...),
        "level": (str, ...),
        "window_ns": (PositiveTime, Field(validation_alias="window")),
        "quantile": (Quantile, Field(kind.default_quantile, validation_alias="at")),
        "limit": (kind.limit.type, Field(validation_alias=kind.limit.key)),
        "class_name": (str, Field("", validation_alias="class")),
    }
    # The order of the fields is the order in which a hint lists the keys.
    quantile = [] if kind.default_quantile is None else ["quantile"]
    if kind.parameters:
        names = [*kind.parameters, *quantile, "limit"]
    else:
        names = ["limit", *quantile]
    if can_be_about_class(keyword):
        names.append("class_name")
    model = create_model(
        keyword,
        __base__=Tagged,
        __doc__=f"The term `{keyword}` of a contract.",
        **{name: fields[name] for name in names},
    )
    model.tag = keyword
    model.short = kind.short_key
    return model


def _to_term(parsed: Tagged) -> ContractTerm:
    """Return the term that a parsed model stands for."""
    values = dict(parsed)
    limit_kind = get_term_kind(parsed.tag).limit
    if limit_kind is MAX_COST:
        values["limit"], values["currency"] = values["limit"]
    elif limit_kind is MAX_ENERGY:
        values["limit"], values["of"] = values["limit"]
    return ContractTerm(kind=parsed.tag, **values)


def _term_type(noun: str, kinds: Mapping[str, TermKind], compared: Any) -> Any:
    """Return the type of a term with one of these keywords.

    `noun` is the word for a term in error messages.
    """
    models = tuple(_create_term_model(name, kind, compared) for name, kind in kinds.items())
    return Annotated[Union[models], TaggedUnion(noun), AfterValidator(_to_term)]  # noqa: UP007


@cache
def _load_term_type(metrics: tuple[str, ...]) -> Any:
    """Return the type of a term about a load that may limit these latency metrics."""
    compared: Any = Literal[tuple(name for name in metrics if name not in pooled_figures())]
    return _term_type("term", dict.fromkeys(metrics, LATENCY_TERM) | TERM_KINDS, compared)


@cache
def _load_term_adapter(metrics: tuple[str, ...]) -> TypeAdapter[ContractTerm]:
    return TypeAdapter(_load_term_type(metrics))


_ANSWER_TERM_TYPE = _term_type("term about answers", ANSWER_TERM_KINDS, AnswerScore)


@cache
def _answer_term_adapter() -> TypeAdapter[ContractTerm]:
    return TypeAdapter(_ANSWER_TERM_TYPE)


def validate_term(value: Any, info: ValidationInfo) -> ContractTerm:
    """Return the term about a load that a value of the file stands for.

    The metrics of other packages are looked up at each call, because these packages may not be
    loaded yet when this module is imported.
    """
    extra_metrics = info.context.extra_metrics if isinstance(info.context, FileContext) else ()
    metrics = tuple(dict.fromkeys((*latency_metrics(), *extra_metrics)))
    return _load_term_adapter(metrics).validate_python(value, context=info.context)


def validate_answer_term(value: Any, info: ValidationInfo) -> ContractTerm:
    """Return the term about answers that a value of the file stands for."""
    return _answer_term_adapter().validate_python(value, context=info.context)


WrittenTerm = Annotated[
    ContractTerm,
    PlainValidator(
        validate_term,
        json_schema_input_type=_load_term_type(latency_metrics(include_plugins=False)),
    ),
]
"""A term about a load, in the file."""

WrittenAnswerTerm = Annotated[
    ContractTerm,
    PlainValidator(validate_answer_term, json_schema_input_type=_ANSWER_TERM_TYPE),
]
"""A term about answers, in the file."""
