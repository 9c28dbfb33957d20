"""Reads what is right in a file without the schemas of pydantic, whose making is a ninth of the start of a run.

It says yes or nothing: what it does not know, or what may be wrong, is left to pydantic, which says what is wrong. A
test holds what it reads against what pydantic reads. A mark of ours is `for_schemas_only`, or has a `member`: which
model reads a value. `source`: what validators find as `info.context`; it has a list of `faults`.
"""

from __future__ import annotations

import math
import operator
import re
import types
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, PlainSerializer, PlainValidator, Strict, Tag
from pydantic.fields import FieldInfo


class Unsure(Exception):
    """Pydantic is to decide."""


class _Info(NamedTuple):
    context: Any


_Read = Callable[[Any, _Info], Any]
_SAYS_NOTHING = (Strict, PlainSerializer, Tag)  # of a value: all are read strictly here
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    **{name: getattr(operator, name) for name in ("ge", "gt", "le", "lt")},
    "min_length": lambda value, least: len(value) >= least,
    "max_length": lambda value, most: len(value) <= most,
    "pattern": lambda value, pattern: "\n" not in value and re.search(pattern, value) is not None,
    "allow_inf_nan": lambda value, allowed: allowed or math.isfinite(value),
}


def plainly(model: type[BaseModel], document: Any, source: Any) -> Any:
    """What a file says, as `model_validate` would give it; None where pydantic is to decide."""
    seen = len(source.faults)
    try:
        made = _part(model, document, _Info(source))
        if len(source.faults) == seen:
            return made
    except (Unsure, ValueError, AssertionError):
        pass
    del source.faults[seen:]
    return None


def _part(model: type[BaseModel], data: Any, info: _Info) -> Any:
    before, fields, after = _known(model)
    for check in before:
        data = check(data, info)
    if isinstance(data, model):
        return data
    _sure(isinstance(data, dict))
    values = {}
    given = set()
    for name, key, field, read in fields:
        if key in data or name in data:
            values[name] = read(data[key if key in data else name], info)
            given.add(name)
        else:
            _sure(not field.is_required())
            values[name] = field.get_default(call_default_factory=True)
    _sure(len(given) == len(data))
    made = model.model_construct(given, **values)
    for check in after:
        made = check(made, info)
    return made


@cache
def _known(model: type[BaseModel]) -> tuple[list[_Read], list[tuple[str, str, FieldInfo, _Read]], list[_Read]]:
    """Of a model: what comes before its fields, each field with its key and how it is read, what comes after them."""
    said = model.__pydantic_decorators__
    whole = list(said.model_validators.values())
    fields = []
    for name, field in model.model_fields.items():
        read = _read_as(field.annotation, field.metadata)
        for of_field in said.field_validators.values():
            if name in of_field.info.fields:
                read = _wrapped(read, AfterValidator(of_field.func))
        fields.append((name, str(field.validation_alias or name), field, read))
    before, after = ([_called(one.func) for one in whole if one.info.mode == mode] for mode in ("before", "after"))
    return before[::-1], fields, after


def _called(function: Any) -> _Read:
    """A validator of pydantic: of a value, or of a value and what is known beside it."""
    code = getattr(function, "__func__", function).__code__
    takes_info = code.co_argcount - hasattr(function, "__func__") > 1
    return function if takes_info else lambda value, info: function(value)


def _sure(what: bool) -> None:
    if not what:
        raise Unsure


def _of(kinds: Any, value: Any) -> Any:
    _sure(isinstance(value, kinds))
    return value


def _unsure(value: Any, info: _Info) -> Any:
    raise Unsure


def _read_as(kind: Any, metadata: Iterable[Any] = ()) -> _Read:
    """How a value of a type is read, from the outermost of its marks to the type itself."""
    if get_origin(kind) is Annotated:
        kind, *inner = get_args(kind)
        return _read_as(kind, [*inner, *metadata])
    read = _base(kind)
    for mark in metadata:
        for one in mark.metadata if isinstance(mark, FieldInfo) else [mark]:
            read = _wrapped(read, one)
    return read


def _base(kind: Any) -> _Read:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (int, str, bool):
        return lambda value, info: value if type(value) is kind else _unsure(value, info)
    if kind is float:
        return lambda value, info: float(value) if type(value) in (int, float) else _unsure(value, info)
    if kind is Path:
        return lambda value, info: _of(Path, value)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return partial(_part, kind)
    if origin is Literal:
        return lambda value, info: value if isinstance(value, str) and value in inner else _unsure(value, info)
    if origin in (Union, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        of_text = next((_read_as(one) for one in kinds if str in (one, *get_args(one)[:1])), _unsure)
        of_all = (
            _read_as(kinds[0]) if len(kinds) == 1 else lambda v, i: (of_text if isinstance(v, str) else _unsure)(v, i)
        )
        return lambda value, info: None if value is None and len(kinds) < len(inner) else of_all(value, info)
    if origin is tuple and inner[1:] == (...,):
        each = _read_as(inner[0])
        return lambda value, info: tuple([each(one, info) for one in _of((list, tuple), value)])
    if origin is dict:
        of_key, of_value = map(_read_as, inner)
        return lambda value, info: {of_key(k, info): of_value(one, info) for k, one in _of(dict, value).items()}
    return _unsure


def _wrapped(read: _Read, mark: Any) -> _Read:
    if hasattr(mark, "member"):  # of a union, by the value
        return lambda value, info: _part(mark.member(value) or _unsure(value, info), value, info)
    if isinstance(mark, PlainValidator):
        return _called(mark.func)
    if isinstance(mark, BeforeValidator):
        before = _called(mark.func)
        return lambda value, info: read(before(value, info), info)
    if isinstance(mark, AfterValidator):
        after = _called(mark.func)
        return lambda value, info: after(read(value, info), info)
    if isinstance(mark, _SAYS_NOTHING) or getattr(mark, "for_schemas_only", False):
        return read
    bounds = [(holds, limit) for name, holds in _BOUNDS.items() if (limit := getattr(mark, name, None)) is not None]

    def within(value: Any, info: _Info) -> Any:
        found = read(value, info)
        _sure(bool(bounds) and all(holds(found, limit) for holds, limit in bounds))
        return found

    return within
