"""The base classes of the pydantic models that describe files of users.

`Part` adds one thing to pydantic: an unknown key is reported with its position, the known keys and
the key that was probably meant. `Tagged` and `TaggedUnion` describe a choice that is written as a
mapping with one key, such as `{poisson: 10/s}`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from loadgen.core.errors import LoadgenError, UserError, closest, did_you_mean
from loadgen.core.workload.yaml_marks import Map

NO_SUCH_TAG = "no_such_tag"
"""The error type of a value that selects no member of a `TaggedUnion`."""
BARE_VALUE_TAG = "fixed"
"""The tag of the member that a value without a key means, as 150 means `{fixed: 150}`."""


@dataclass(frozen=True, kw_only=True)
class FileContext:
    """The validation context of a file.

    A value that is built in Python is validated without such a context. Its durations are integer
    nanoseconds and its rates are floats.

    Attributes:
        file: The name of the file in error messages.
        directory: The directory that paths in the file are relative to.
        errors: The mistakes that were found so far. Validators append those that pydantic cannot
            express.
        extra_metrics: Metrics of other packages that a stored file may name although these packages
            are not installed.
    """

    file: str
    directory: Path
    errors: list[LoadgenError] = field(default_factory=list)
    extra_metrics: tuple[str, ...] = ()


class Part(BaseModel):
    """A mapping in a file of a user: immutable and without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        coerce_numbers_to_str=True,  # `name: 7` is text
        hide_input_in_errors=True,  # an input may be a secret
        ser_json_inf_nan="strings",
        defer_build=True,
    )

    synonyms: ClassVar[dict[str, str]] = {}
    """Maps names that other tools give to a key to its name here, for hints."""

    hints_for_foreign_keys: ClassVar[dict[str, str]] = {}
    """Hints for keys of other tools that have no counterpart here: what to do instead."""

    @classmethod
    def yaml_keys(cls) -> list[str]:
        """Return the keys of this part as they are written in a file."""
        return [str(info.validation_alias or name) for name, info in cls.model_fields.items()]

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Convert every accepted spelling of this part to a mapping of its fields.

        A subclass with a short form converts it here, such as `10/s` to `{rate: 10/s}`.
        """
        return data

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return the JSON Schema of every accepted spelling, given that of the fields."""
        return schema

    @model_validator(mode="before")
    @classmethod
    def _prepare_input(cls, data: object, info: ValidationInfo) -> Any:
        """Return the input as a mapping of fields, which pydantic then validates one by one.

        pydantic calls this method before it validates a part. A short form such as `10/s` becomes a
        mapping, `{rate: 10/s}`. Unknown keys of a mapping in a file are reported here, with their
        positions, and left out. An object that is a model already stays as it is.
        """
        if isinstance(data, BaseModel):
            return data
        fields = cls.convert_to_fields(data)
        if isinstance(info.context, FileContext) and isinstance(fields, Map):
            return cls._remove_unknown_keys(fields, info.context)
        return fields

    @classmethod
    def _remove_unknown_keys(cls, mapping: Map, context: FileContext) -> dict[str, Any]:
        """Return a mapping without its unknown keys, and add an error for each to the context.

        pydantic would report them without a position in the file, and would then not check the
        known keys, so the user would see only some of the mistakes.
        """
        known_keys = cls.yaml_keys()
        unknown_keys = [key for key in mapping if key not in known_keys]
        for key in unknown_keys:
            context.errors.append(cls._unknown_key_error(key, mapping, context.file))
        if not unknown_keys:
            return mapping
        return {key: value for key, value in mapping.items() if key in known_keys}

    @classmethod
    def _unknown_key_error(cls, key: str, mapping: Map, file: str) -> UserError:
        """Return the error for an unknown key, with the key that was probably meant."""
        place = mapping.place_of_key(key, file)
        problem = f'unknown key "{key}"'
        foreign_hint = cls.hints_for_foreign_keys.get(key)
        if foreign_hint:
            return UserError("unknown_key", problem, place, foreign_hint)

        known_keys = cls.yaml_keys()
        hint = did_you_mean(key, known_keys, cls.synonyms)
        values: dict[str, str] = {}

        similar_key = closest(key, known_keys, cls.synonyms)
        if similar_key:
            values["did_you_mean"] = mapping.path_of(similar_key)

        return UserError("unknown_key", problem, place, hint, values=values)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Let `extend_json_schema` change the JSON Schema of this part.

        Pydantic calls this method for each part. `handler` stores the generated schema in the table
        of definitions (`$defs`) and returns a reference to it, such as
        `{"$ref": "#/$defs/Poisson"}`.
        """
        reference = handler(core_schema)
        definition = handler.resolve_ref_schema(reference)
        extended_schema = cls.extend_json_schema(dict(definition))

        # A definition can only be replaced by changing the dictionary in the table.
        definition.clear()
        definition.update(extended_schema)
        return reference


class Tagged(Part):
    """A member of a `TaggedUnion`, written as a mapping whose only key is `tag`.

    The value of that key is a mapping of the fields. If `short` names a field, the value of this
    field may stand in place of the mapping: `{poisson: 10/s}` means `{poisson: {rate: 10/s}}`.
    """

    tag: ClassVar[str]
    short: ClassVar[str | None] = None

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Convert `{tag: fields}` and `{tag: short form}` to a mapping of the fields."""
        if not isinstance(data, dict) or list(data) != [cls.tag]:
            return data
        body = data[cls.tag]
        if isinstance(body, dict) or cls.short is None:
            return body
        return {cls.short: body}

    @classmethod
    def extend_json_schema(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return the JSON Schema of a mapping with the tag as its only key.

        The value of the key is a mapping of the fields, which `schema` describes, or the short
        form: the value of one field alone. For example, `{poisson: {rate: 10/s}}` can be written as
        `{poisson: 10/s}`.
        """
        # Title and description belong to the mapping, not to the value of the tag.
        title = schema.pop("title")
        description = schema.pop("description")
        short_form = cls.short_form_schema(schema)
        value_schemas = [schema] if short_form is None else [short_form, schema]

        return {
            "title": title,
            "type": "object",
            "properties": {cls.tag: {"anyOf": value_schemas}},
            "required": [cls.tag],
            "additionalProperties": False,
            "description": description,
        }

    @classmethod
    def short_form_schema(cls, fields_schema: JsonSchemaValue) -> JsonSchemaValue | None:
        """Return the JSON Schema of the short form of this part, or None if it has none.

        In the short form, the value of one field takes the place of all fields: `{poisson: 10/s}`
        means `{poisson: {rate: 10/s}}`. `fields_schema` is the schema of `{rate: 10/s}`, and the
        result is that of `10/s`.
        """
        if cls.short is None:
            return None
        schema: JsonSchemaValue = fields_schema["properties"][cls.short]
        return schema

    @model_serializer(mode="wrap")
    def _serialize_with_tag(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields as they are written in a file, under the tag."""
        return {self.tag: handler(self)}


@dataclass(frozen=True)
class TaggedUnion:
    """Annotates a union of `Tagged` parts: the only key of a mapping selects the member.

    Attributes:
        noun: What the union is called in error messages.
        bare_types: The types of values that can be written without a key, such as 150 for
            `{fixed: 150}`. Such a value means the member with the tag BARE_VALUE_TAG.
    """

    noun: str
    bare_types: tuple[type, ...] = ()

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of a union in which the tag of a value selects the member.

        pydantic calls this method for an annotation such as
        `Annotated[Constant | Poisson, TaggedUnion("arrival")]` and passes the union as `source`.

        Without a discriminator, pydantic would try all members and report the mistakes of each.
        With one, only the selected member is validated and reports its mistakes. (See "Unions with
        callable Discriminator" in the documentation of pydantic.)
        """
        members: tuple[type[Tagged], ...] = get_args(source)
        discriminator = self._build_discriminator([member.tag for member in members])
        return handler.generate_schema(Annotated[_union_with_tags(members), discriminator])

    def _build_discriminator(self, tags: list[str]) -> Discriminator:
        """Return the object with which pydantic finds the tag of a value, and its error for none.

        `diagnostics` turns this error into a message with the position and the known tags.
        """
        tags_in_messages = [tag for tag in tags if tag != BARE_VALUE_TAG]

        def select_tag(value: object) -> str | None:
            return self._select_tag(value, tags)

        return Discriminator(
            select_tag,
            custom_error_type=NO_SUCH_TAG,
            custom_error_message="is no {noun}",
            custom_error_context={"noun": self.noun, "known": ", ".join(tags_in_messages)},
        )

    def _select_tag(self, value: object, tags: list[str]) -> str | None:
        """Return the tag of the member that a value is written for, or None if it is for none.

        The value is an instance of a member, a mapping with a tag as its only key, or a value that
        is written without a key (see `bare_types`).
        """
        if isinstance(value, Tagged):
            return value.tag

        if isinstance(value, dict) and len(value) == 1:
            (only_key,) = value
            if only_key in tags:
                return str(only_key)

        # Python counts a boolean as an integer, but nobody writes `true` for a number.
        if isinstance(value, self.bare_types) and not isinstance(value, bool):
            return BARE_VALUE_TAG

        return None


def _union_with_tags(members: tuple[type[Tagged], ...]) -> Any:
    """Return the union of some types, each with the tag by which a discriminator selects it.

    For the members `Constant` and `Poisson` it is
    `Union[Annotated[Constant, Tag("constant")], Annotated[Poisson, Tag("poisson")]]`.
    """
    members_with_tags = tuple(Annotated[member, Tag(member.tag)] for member in members)

    # The members are only known at run time, so the union cannot be written with `|`.
    return Union[members_with_tags]  # noqa: UP007
