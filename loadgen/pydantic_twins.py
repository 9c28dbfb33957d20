"""What pydantic says of a part: what is wrong in a file, its JSON Schema, and its dump. Read only when that is asked.

The twin of a part is a model of pydantic with the same fields, marks and validators. What is checked through it is the
part itself: in the schema of the checks the part stands in place of its twin.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaSerializer, SchemaValidator, ValidationError

from loadgen.plain_reading import OfField, Plain, ValueMark, another_form, called


class _Twin(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        validate_default=False,
        coerce_numbers_to_str=True,
        hide_input_in_errors=True,
        ser_json_inf_nan="strings",
        defer_build=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        reference: dict[str, Any] = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        written = vars(cls)["of"].as_written(dict(schema))
        schema.clear()
        schema.update(written)
        return reference


def made(kind: Any, value: Any, context: Any) -> Any:
    """A checked value of a part or of a marked type. Raises ValidationError."""
    return _validator(kind).validate_python(value, context=context)


def checked(kind: Any, value: Any, context: Any) -> tuple[Any, list[Any]]:
    """A checked value, or None and what is wrong with it, as pydantic tells it."""
    try:
        return made(kind, value, context), []
    except ValidationError as invalid:
        return None, invalid.errors(include_url=False)


def core_schema(kind: Any) -> Any:
    """What pydantic makes of the twin of a part, or of a marked type."""
    twin: Any = _translated(kind)
    if get_origin(twin) is not None:
        return pydantic.TypeAdapter(twin).core_schema
    twin.model_rebuild(force=True)
    return twin.__pydantic_core_schema__


def json_schema(part: Any) -> Any:
    """The JSON Schema of a part as a file says it."""
    return _twin(part).model_json_schema(by_alias=True, schema_generator=_WithoutDefaults)


class _WithoutDefaults(GenerateJsonSchema):
    """Defaults are in checked units (ns, shares), not as a user writes them. See docs/workloads.md."""

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


@cache
def _validator(kind: Any) -> SchemaValidator:
    config: Any = {"hide_input_in_errors": True} | (
        {"title": kind.__name__} if isinstance(kind, type) else {}
    )
    return SchemaValidator(_of_parts(core_schema(kind)), config)


@cache
def serializer(part: Any) -> SchemaSerializer:
    """Dumps a part."""
    return SchemaSerializer(_of_parts(core_schema(part)), {"ser_json_inf_nan": "strings"})


def _of_parts(schema: Any) -> Any:
    """A schema with parts in place of their twins."""
    if isinstance(schema, dict):
        return {
            key: one if key in ("default", "metadata") else _of_parts(one)
            for key, one in schema.items()
        }
    if isinstance(schema, list | tuple):
        return type(schema)(map(_of_parts, schema))
    return vars(schema)["of"] if isinstance(schema, type) and issubclass(schema, _Twin) else schema


@cache
def _twin(part: Any) -> Any:
    fields: dict[str, Any] = {}
    for name, known in part.model_fields.items():
        marks = known.metadata[:-1] if isinstance(known.written, OfField) else known.metadata
        kind = Annotated[(known.annotation, *marks)] if marks else known.annotation
        fields[name] = (_translated(kind), _mark(known.written))
    validators: dict[str, Any] = {
        name: _validated(part, name, about) for name, about in part._validators.items()
    }
    if tag := getattr(part, "tag", ""):
        validators["_with_tag"] = pydantic.model_serializer(mode="wrap")(
            lambda self, handler: {tag: handler(self)}
        )
    twin: Any = pydantic.create_model(
        part.__name__,
        __base__=_Twin,
        __module__=part.__module__,
        __doc__=part.__doc__,
        __validators__=validators,
        **fields,
    )
    twin.of = part
    return twin


def _validated(part: Any, name: str, about: Any) -> Any:
    function = getattr(part, name)
    if about == "after":
        return pydantic.model_validator(mode="after")(function)
    check, first = (
        called(function),
        another_form if about == "before" else lambda part, value: value,
    )
    as_method: Any = classmethod(lambda cls, value, info: check(first(part, value), info))
    return (
        pydantic.model_validator(mode="before")
        if about == "before"
        else pydantic.field_validator(*about)
    )(as_method)


def _translated(kind: Any) -> Any:
    """A type with twins in place of parts, and pydantic's marks in place of ours."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and origin is None:
        part: Any = kind
        return _twin(part) if issubclass(kind, Plain) else kind
    if origin is Annotated:
        return Annotated[(_translated(inner[0]), *map(_mark, inner[1:]))]
    if origin is None or origin is Literal:
        return kind
    translated = tuple(map(_translated, inner))
    return (Union if origin is types.UnionType else origin)[translated]


def _mark(mark: Any) -> Any:
    if isinstance(mark, OfField):
        return pydantic.Field(
            **({} if mark.default is ... else {"default": mark.default}), **mark.said
        )
    return (
        getattr(pydantic, type(mark).__name__)(*mark.said) if isinstance(mark, ValueMark) else mark
    )
