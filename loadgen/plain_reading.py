"""Parts of files, and how what is right in a file is read: without pydantic, whose import and classes are a fifth of
the start of a run.

A part is a class with annotated fields. The marks of a field have the names and the meaning that they have in pydantic.
`plainly` says yes or nothing: what it does not know, or what may be wrong, is left to pydantic, which says what is
wrong (`pydantic_twins.py`). A test holds what it reads against what pydantic reads. A mark of ours is
`for_schemas_only`, or has a `member`: which part reads a value.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from msgspec import Struct

T = TypeVar("T")
P = TypeVar("P", bound="Plain")


class ValidationInfo(Struct, frozen=True):
    """What a validator finds beside its value: `context` is where it stands (`fields.Source`); None: in Python."""

    context: Any


class ValueMark:
    """What is said of a value beside its type: `said` is what pydantic's mark of this name takes."""

    def __init__(self, *said: Any) -> None:
        self.said = said


class Strict(ValueMark):
    """No conversions. Everything is read strictly here."""


class Tag(ValueMark):
    """The name of a member of a union."""


class Discriminator(ValueMark):
    """How the member of a union is found, and the error where there is none."""


class BeforeValidator(ValueMark):
    """A function of the value, or of the value and `ValidationInfo`, before its type is looked at."""


class AfterValidator(ValueMark):
    """A function of the checked value."""


class PlainValidator(ValueMark):
    """A function in place of the type."""


class PlainSerializer(ValueMark):
    """How a value is dumped."""


class OfField:
    """What `Field` says."""

    def __init__(self, default: Any, said: dict[str, Any]) -> None:
        self.default, self.said = default, said


def Field(default: Any = ..., **said: Any) -> Any:
    """The default, the key and the bounds of a value; without a default it is required. Stands as a mark too."""
    return OfField(default, said)


def field_validator(*names: str) -> Callable[[T], T]:
    """A class method that checks the read values of these fields."""
    return partial(_marked, about=names)


def model_validator(*, mode: Literal["before", "after"]) -> Callable[[T], T]:
    """A check of the whole part: a class method of what is written, or a method of what was made of it."""
    return partial(_marked, about=mode)


def _marked(function: Any, about: Any) -> Any:
    function.validates = about
    return function


class PartField:
    """A field of a part: `annotation` without its outermost marks, which are `metadata`."""

    def __init__(self, annotation: Any, default: Any) -> None:
        self.metadata: list[Any] = []
        if get_origin(annotation) is Annotated:
            annotation, *self.metadata = get_args(annotation)
        self.annotation, self.written, self.made_by, self.validation_alias = (
            annotation,
            default,
            None,
            None,
        )
        self.default = default.default if isinstance(default, OfField) else default
        self.metadata += [default] if isinstance(default, OfField) else []
        for mark in self.metadata:
            if isinstance(mark, OfField):
                self.made_by = mark.said.get("default_factory", self.made_by)
                self.validation_alias = mark.said.get("validation_alias", self.validation_alias)

    def is_required(self) -> bool:
        return self.default is ... and self.made_by is None

    def of_its_own(self) -> Any:
        """The default, for one part alone."""
        if self.made_by is not None:
            return self.made_by()
        return self.default.copy() if isinstance(self.default, dict) else self.default


class _OnceRead:
    """Of a class: what `find` says of it. Types are looked up when they are first needed."""

    def __init__(self, find: Callable[[Any], Any]) -> None:
        self.find = find

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_found_{name}"

    def __get__(self, one: Any, cls: Any) -> Any:
        found = vars(cls).get(self.name)
        if found is None:
            found = self.find(cls)
            type.__setattr__(cls, self.name, found)
        return found


def _types(cls: type[Plain]) -> dict[str, Any]:
    """The types of the fields that a class itself names."""
    names = vars(sys.modules[cls.__module__])
    written = inspect.get_annotations(cls).items()
    of_fields = {name: kind for name, kind in written if not str(kind).startswith("ClassVar")}
    return {
        name: eval(kind, names) if isinstance(kind, str) else kind
        for name, kind in of_fields.items()
    }


def _fields(cls: type[Plain]) -> dict[str, PartField]:
    """The fields of a class, those of its bases first."""
    fields = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Plain):
            for name, kind in base._types.items():
                fields[name] = PartField(
                    _given(kind, cls._quantities), base._defaults.get(name, ...)
                )
    return fields


def _given(kind: Any, quantities: dict[Any, Any]) -> Any:
    """A type with these quantities in place of its variables."""
    if isinstance(kind, TypeVar):
        return quantities.get(kind, Any)
    variables = getattr(kind, "__parameters__", ())
    return kind[tuple(quantities.get(one, Any) for one in variables)] if variables else kind


def _validators(cls: type[Plain]) -> dict[str, Any]:
    """The names of the validators of a class -> what they are about; in the order in which they were defined."""
    return {
        name: one.validates
        for base in reversed(cls.__mro__)
        if issubclass(base, Plain)
        for name, one in vars(base).items()
        if isinstance(one, types.FunctionType | classmethod) and hasattr(one, "validates")
    }


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class Plain:
    """A part: frozen, made by keywords, which are checked; equal where its fields are. Its methods with names of
    pydantic do what they do there.
    """

    # pydantic fills in its own when it makes one
    __slots__ = (
        "__dict__",
        "__pydantic_extra__",
        "__pydantic_fields_set__",
        "__pydantic_private__",
    )
    _defaults: ClassVar[dict[str, Any]] = {}
    _quantities: ClassVar[dict[Any, Any]] = {}
    _of: ClassVar[Any] = None  # the form without quantities
    _types = _OnceRead(_types)
    _validators = _OnceRead(_validators)
    model_fields = _OnceRead(_fields)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._defaults = {}
        for name, kind in inspect.get_annotations(cls).items():
            if name in vars(cls) and not str(kind).startswith("ClassVar"):
                cls._defaults[name] = vars(cls)[name]
                delattr(cls, name)

    def __class_getitem__(cls, quantities: Any) -> Any:
        quantities = quantities if isinstance(quantities, tuple) else (quantities,)
        if any(isinstance(one, TypeVar) for one in quantities):
            return super().__class_getitem__(quantities)  # type: ignore[misc]
        return _with_quantities(cls, quantities)

    def __init__(self, **values: Any) -> None:
        try:
            made = _part(type(self), values, ValidationInfo(None))
        except (Unsure, ValueError, AssertionError):
            made = twins().made(type(self), values, None)
        _fill(self, vars(made), made.model_fields_set)

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        """Of checked values, which are not checked again."""
        all_values = {}
        for name, field in cls.model_fields.items():
            if name in values:
                all_values[name] = values[name]
            elif not field.is_required():
                all_values[name] = field.of_its_own()
        return _fill(
            cls.__new__(cls), all_values, set(values) if _fields_set is None else _fields_set
        )

    @classmethod
    def model_validate(cls, data: Any, context: Any = None) -> Self:
        """Checked; raises pydantic's ValidationError."""
        return read(cls, data, context)  # type: ignore[no-any-return]

    def model_copy(self, update: Any = None) -> Self:
        changed = update or {}
        return _fill(
            type(self).__new__(type(self)),
            vars(self) | changed,
            self.model_fields_set | set(changed),
        )

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return twins().serializer(type(self)).to_python(self, **options)  # type: ignore[no-any-return]

    def model_dump_json(self, **options: Any) -> str:
        return twins().serializer(type(self)).to_json(self, **options).decode()  # type: ignore[no-any-return]

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that were given, and not their defaults."""
        return self.__pydantic_fields_set__  # type: ignore[attr-defined,no-any-return]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self).items()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} is frozen: model_copy(update={{{name!r}: ...}}) makes another"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plain):
            return NotImplemented
        return _form(type(self)) is _form(type(other)) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((_form(type(self)), *vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (_form(type(self)), type(self).__name__, vars(self), self.model_fields_set)


def create_model(
    name: str,
    /,
    *,
    __base__: type[P],
    __module__: str = __name__,
    __doc__: str | None = None,
    **fields: Any,
) -> type[P]:
    """A part with these fields: the type and the default of each, `...` where it is required."""
    body: dict[str, Any] = {"__module__": __module__, "__doc__": __doc__}
    body["__annotations__"] = {name: kind for name, (kind, _) in fields.items()}
    return type(
        name,
        (__base__,),
        body | {name: value for name, (_, value) in fields.items() if value is not ...},
    )


@cache
def _forms(of: Any) -> dict[tuple[Any, ...], Any]:
    """The forms of a part with quantities."""
    return {}


def _with_quantities(cls: Any, quantities: tuple[Any, ...]) -> Any:
    forms = _forms(cls)
    if (form := forms.get(quantities)) is None:
        named = [
            mark.name
            for mark in getattr(quantities[0], "__metadata__", ())
            if type(mark).__name__ == "Called"
        ]
        body = {
            "__module__": cls.__module__,
            "_of": cls,
            "_quantities": dict(zip(cls.__parameters__, quantities)),
        }  # noqa: B905
        form = forms[quantities] = type(cls.__name__ + "".join(named), (cls,), body)
    return form


def _form(cls: type[Plain]) -> Any:
    return cls._of or cls


def _again(cls: Any, name: str, values: dict[str, Any], given: set[str]) -> Any:
    """What was pickled."""
    form = next((one for one in _forms(cls).values() if one.__name__ == name), cls)
    return _fill(form.__new__(form), values, given)


def _fill(made: P, values: dict[str, Any], given: set[str]) -> P:
    fill = object.__setattr__
    fill(made, "__dict__", values)
    fill(made, "__pydantic_fields_set__", given)
    return made


def twins() -> Any:
    """`pydantic_twins`, with pydantic behind it."""
    return import_module("loadgen.pydantic_twins")


# -------------------------------------------------------------------------------------------------------------- reading


class Unsure(Exception):
    """Pydantic is to decide."""


_Read = Callable[[Any, ValidationInfo], Any]
_SAYS_NOTHING = (
    Strict,
    PlainSerializer,
    Tag,
    Discriminator,
)  # of a value: all are read strictly here
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    **{name: getattr(operator, name) for name in ("ge", "gt", "le", "lt")},
    "min_length": lambda value, least: len(value) >= least,
    "max_length": lambda value, most: len(value) <= most,
    "pattern": lambda value, pattern: "\n" not in value and re.search(pattern, value) is not None,
    "allow_inf_nan": lambda value, allowed: allowed or math.isfinite(value),
}
_OF_FIELDS = {
    "default_factory",
    "validation_alias",
    "json_schema_extra",
}  # that say nothing of the value


def plainly(kind: Any, document: Any, source: Any) -> Any:
    """What a file says, as pydantic would read it; None where pydantic is to decide. `source` has a list of `faults`;
    None: of a value in Python.
    """
    seen = len(source.faults) if source is not None else 0
    try:
        made = _reader(kind)(document, ValidationInfo(source))
        if source is None or len(source.faults) == seen:
            return made
    except (Unsure, ValueError, AssertionError):
        pass
    if source is not None:
        del source.faults[seen:]
    return None


def read(kind: Any, document: Any, source: Any) -> Any:
    """What a file says, checked; raises pydantic's ValidationError."""
    made = plainly(kind, document, source)
    return twins().made(kind, document, source) if made is None else made


def checked(kind: Any, document: Any, source: Any) -> tuple[Any, list[Any]]:
    """What a file says, checked, or None and what is wrong with it, as pydantic tells it."""
    made = plainly(kind, document, source)
    return twins().checked(kind, document, source) if made is None else (made, [])


def _part(model: Any, data: Any, info: ValidationInfo) -> Any:
    before, fields, after = _known(model)
    for check in before:
        data = check(another_form(model, data), info)
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
            values[name] = field.of_its_own()
    _sure(len(given) == len(data))
    made: Any = _fill(model.__new__(model), values, given)
    for check in after:
        made = check(made, info)
    return made


def another_form(model: Any, data: Any) -> Any:
    """Of a part without quantities, or with others, its fields: they are read as those of this one."""
    other = model._of is not None and isinstance(data, model._of) and not isinstance(data, model)
    return dict(vars(data)) if other else data


@cache
def _known(model: Any) -> tuple[list[_Read], list[tuple[str, str, PartField, _Read]], list[_Read]]:
    """Of a part: what comes before its fields, each field with its key and how it is read, what comes after them."""
    said = model._validators
    fields = []
    for name, field in model.model_fields.items():
        read = _read_as(field.annotation, field.metadata)
        for validator, about in said.items():
            if isinstance(about, tuple) and name in about:
                read = _wrapped(read, AfterValidator(getattr(model, validator)))
        fields.append((name, str(field.validation_alias or name), field, read))
    before, after = (
        [called(getattr(model, validator)) for validator, about in said.items() if about == mode]
        for mode in ("before", "after")
    )
    return before[::-1], fields, after


def called(function: Any) -> _Read:
    """A validator, of a value or of a value and what is known beside it, as one of both."""
    code = getattr(function, "__func__", function).__code__
    takes_info = code.co_argcount - hasattr(function, "__func__") > 1
    return function if takes_info else lambda value, info: function(value)


def _sure(what: bool) -> None:
    if not what:
        raise Unsure


def _of(kinds: Any, value: Any) -> Any:
    _sure(isinstance(value, kinds))
    return value


def _unsure(value: Any, info: ValidationInfo) -> Any:
    raise Unsure


@cache
def _reader(kind: Any) -> _Read:
    return _read_as(kind)


def _read_as(kind: Any, metadata: Iterable[Any] = ()) -> _Read:
    """How a value of a type is read, from the outermost of its marks to the type itself."""
    if get_origin(kind) is Annotated:
        kind, *inner = get_args(kind)
        return _read_as(kind, [*inner, *metadata])
    read = _base(kind)
    for mark in metadata:
        read = _wrapped(read, mark)
    return read


def _base(kind: Any) -> _Read:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (int, str, bool):
        return lambda value, info: value if type(value) is kind else _unsure(value, info)
    if kind is float:
        return lambda value, info: (
            float(value) if type(value) in (int, float) else _unsure(value, info)
        )
    if kind in (Path, Decimal):
        return lambda value, info: _of(kind, value)
    if kind is Any:
        return lambda value, info: value
    if isinstance(kind, type) and issubclass(kind, Plain):
        return partial(_part, kind)
    if origin is Literal:
        return lambda value, info: (
            value if isinstance(value, str) and value in inner else _unsure(value, info)
        )
    if origin in (Union, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        of_text = next(
            (_read_as(one) for one in kinds if str in (one, *get_args(one)[:1])), _unsure
        )
        of_all = (
            _read_as(kinds[0])
            if len(kinds) == 1
            else lambda v, i: (of_text if isinstance(v, str) else _unsure)(v, i)
        )
        return lambda value, info: (
            None if value is None and len(kinds) < len(inner) else of_all(value, info)
        )
    if origin is tuple and inner[1:] == (...,):
        each = _read_as(inner[0])
        return lambda value, info: tuple([each(one, info) for one in _of((list, tuple), value)])
    if origin is dict:
        of_key, of_value = map(_read_as, inner)
        return lambda value, info: {
            of_key(k, info): of_value(one, info) for k, one in _of(dict, value).items()
        }
    return _unsure


def _wrapped(read: _Read, mark: Any) -> _Read:
    if hasattr(mark, "member"):  # of a union, by the value
        return lambda value, info: _part(mark.member(value) or _unsure(value, info), value, info)
    if isinstance(mark, PlainValidator):
        return called(mark.said[0])
    if isinstance(mark, BeforeValidator):
        before = called(mark.said[0])
        return lambda value, info: read(before(value, info), info)
    if isinstance(mark, AfterValidator):
        after = called(mark.said[0])
        return lambda value, info: after(read(value, info), info)
    if isinstance(mark, _SAYS_NOTHING) or getattr(mark, "for_schemas_only", False):
        return read
    if not isinstance(mark, OfField):
        return _unsure
    bounds = [(_BOUNDS[name], limit) for name, limit in mark.said.items() if name not in _OF_FIELDS]

    def within(value: Any, info: ValidationInfo) -> Any:
        found = read(value, info)
        _sure(all(holds(found, limit) for holds, limit in bounds))
        return found

    return within if bounds else read
