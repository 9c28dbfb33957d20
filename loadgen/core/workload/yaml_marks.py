"""Parse YAML to values with positions, so that error messages can name file:line:column.

This module reads no files and does not check what values mean. Scalars follow the YAML 1.2 core
schema: `yes` and `1:30` are text, `1e3` is a number. `${VAR}` and `${VAR:-default}` are expanded in
scalar values after parsing. The number of values is limited, because aliases can multiply them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from loadgen.core.errors import Code, CombinedError, LoadgenError, Place, UserError

MAX_NODES = 100_000
"""Most values, with aliases expanded. Ten nested lists of ten aliases would be 10^10 values."""
MAX_DEPTH = 50
LIBYAML_DEPTH_PROBLEM = "exceeded maximum nesting depth"
"""The message of libyaml 0.2.6, which has a limit of its own that it checks before ours."""

_INTEGER = re.compile(r"[-+]?[0-9]{1,300}|0x[0-9a-fA-F]{1,200}|0o[0-7]{1,200}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^{}]*)?\}")

_MERGE_TAG = "tag:yaml.org,2002:merge"
_STRING_TAG = "tag:yaml.org,2002:str"
_MAPPING_TAG = "tag:yaml.org,2002:map"

SMALLEST_WORKLOAD = (
    "the smallest workload is: name: truth, and requests: {input_tokens: 150, output_tokens: 200}"
)

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# -- values with positions ----------------------------------------------------------------------


class Position(NamedTuple):
    """A position in a file, counted from 1.

    Attributes:
        line: The line.
        column: The column.
        text: The scalar as it is written, with variables unexpanded. "" for a collection.
    """

    line: int
    column: int
    text: str = ""


class Map(dict[str, Any]):
    """A mapping in a file.

    Attributes:
        at: Its position.
        keys_at: The position of each key.
        values_at: The position of the value of each key.
        path: The keys that lead to it, such as `stages[0].arrival`.
    """

    def __init__(self, at: Position) -> None:
        super().__init__()
        self.at = at
        self.keys_at: dict[str, Position] = {}
        self.values_at: dict[str, Position] = {}
        self.path = ""

    def add(self, key: str, value: Any, key_at: Position, value_at: Position) -> None:
        """Set a key together with its position and that of its value."""
        self[key] = value
        self.keys_at[key] = key_at
        self.values_at[key] = value_at

    def path_of(self, key: str) -> str:
        """Return the path of a key, such as `stages[0].arrival` for `arrival` in `stages[0]`."""
        return child_path(self.path, key)

    def place_of_key(self, key: str, file: str) -> Place:
        """Return the place of a key for an error message. `file` is the name of the file."""
        return place_at(file, self.keys_at[key], self.path_of(key))

    def place_of_value(self, key: str, file: str) -> Place:
        """Return the place of the value of a key. `file` is the name of the file."""
        return place_at(file, self.values_at[key], self.path_of(key))

    def copy(self) -> Map:
        """Return a copy that also has the path and the positions of this mapping."""
        return self.with_renamed_keys({})

    def with_renamed_keys(self, names: Mapping[str, str]) -> Map:
        """Return a copy in which some keys have other names.

        The positions stay, so that errors in a converted value are reported where it is written.

        Args:
            names: Maps old names to new names. Other keys keep their names.
        """
        copy = Map(self.at)
        copy.path = self.path
        for key, value in self.items():
            copy.add(names.get(key, key), value, self.keys_at[key], self.values_at[key])
        return copy


class Seq(list[Any]):
    """A sequence in a file.

    Attributes:
        at: Its position.
        values_at: The position of each item.
    """

    def __init__(self, at: Position) -> None:
        super().__init__()
        self.at = at
        self.values_at: list[Position] = []


def overlay(base: Map, changes: Map) -> Map:
    """Return the mapping that has the values of `changes` and, for other keys, those of `base`.

    Mappings inside are merged key by key. The position of a value is the one in its own file.
    """
    merged = base.copy()
    merged.at = changes.at
    for key, changed_value in changes.items():
        value = changed_value
        base_value = base.get(key)
        if isinstance(base_value, Map) and isinstance(value, Map):
            value = overlay(base_value, value)
        merged.add(key, value, changes.keys_at[key], changes.values_at[key])

    return merged


def child_path(path: str, step: str | int) -> str:
    """Return the path of a key or an item: `stages[0]`, "arrival" gives `stages[0].arrival`."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def place_at(file: str, position: Position, path: str) -> Place:
    """Return a place for an error message."""
    return Place(file, position.line, position.column, path)


# -- reading ------------------------------------------------------------------------------------


class YamlDocument(NamedTuple):
    """The mapping at the top of a YAML text, and the mistakes in the text that leave a mapping."""

    mapping: Map
    errors: list[LoadgenError]


def plain_yaml(text: str, where: str) -> Any:
    """Return the plain values of a YAML text without positions, variables and checks.

    Raises UserError, with the place `where`, if the text is no YAML.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"not YAML: {' '.join(str(error).split())}"
        raise UserError("invalid_syntax", problem, where) from None


def read_yaml(
    text: str,
    file: str,
    env: Mapping[str, str],
    *,
    kind: str = "workload",
    example: str = SMALLEST_WORKLOAD,
    key_of_list: str = "",
) -> YamlDocument:
    """Return the mapping at the top of a YAML text, and the errors inside it.

    A mistake that leaves no mapping is raised. Smaller ones, repeated keys and unset variables, are
    returned, so that the caller can report them together with those that it finds itself.

    Args:
        text: The content of the file, with `${VARIABLE}` not expanded yet.
        file: The name of the file in error messages.
        env: The environment variables that the text may refer to.
        kind: What such a file is called in error messages, such as "workload" or "contract".
        example: A short and valid file of this kind, for hints.
        key_of_list: If the text is a list, read it as a mapping with the list under this key.

    Raises:
        CombinedError: The one error that ends the parsing: a syntax error, or no mapping at the
            top.
    """
    root = _compose(text, file, kind)
    if key_of_list and isinstance(root, yaml.SequenceNode):
        root = _mapping_with_list(key_of_list, root)
    top_mapping = _require_mapping(root, file, kind, example)
    reader = _NodeReader(file, env)
    mapping = reader.read_mapping(top_mapping, path="", depth=0)
    return YamlDocument(mapping, reader.errors)


def _require_mapping(
    root: yaml.Node | None, file: str, kind: str, example: str
) -> yaml.MappingNode:
    """Return the top node of a file if it is a mapping, and raise CombinedError if not.

    The arguments are those of `read_yaml`. `root` is None for an empty file.
    """
    if root is None:
        place = place_at(file, Position(1, 1), "")
        raise _fatal_error("empty_file", "the file is empty", place, example)

    if not isinstance(root, yaml.MappingNode):
        problem = f"the top level of a {kind} must be a mapping (key: value)"
        place = place_at(file, _position(root), "")
        raise _fatal_error("wrong_type", problem, place, example)

    return root


def _mapping_with_list(key: str, items: yaml.SequenceNode) -> yaml.MappingNode:
    """Return the node of a mapping with a list under one key, at the position of the list.

    It is what the YAML parser returns if the key is written before the list.
    """
    key_node = yaml.ScalarNode(_STRING_TAG, key, items.start_mark)
    return yaml.MappingNode(_MAPPING_TAG, [(key_node, items)], items.start_mark)


def _compose(text: str, file: str, file_kind: str) -> yaml.Node | None:
    """Return the tree of nodes of a text, or None for an empty text.

    Args:
        text: The content of the file.
        file: The name of the file, for error messages.
        file_kind: The noun for the file in error messages, such as "workload".

    Raises:
        CombinedError: The text is nested too deeply, has a syntax error, or has a character that
            YAML does not allow.
    """
    try:
        _refuse_deep_nesting(text, file)
        return yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        user_error = _syntax_error(error, text, file, file_kind)
    except yaml.reader.ReaderError as error:
        user_error = _character_error(error, text, file, file_kind)

    raise CombinedError([user_error])


def _character_error(
    error: yaml.reader.ReaderError, text: str, file: str, file_kind: str
) -> LoadgenError:
    """Return the error for a character that YAML does not allow, such as a control character.

    It is at the position of this character, or at the start of a text whose offset is not known.
    """
    offset = error.position if isinstance(error.position, int) else 0
    place = place_at(file, _position_of_offset(text, offset), "")
    problem = "the file has a character that YAML does not allow"
    hint = f"a {file_kind} must be a plain text file in YAML"
    return UserError("wrong_encoding", problem, place, hint)


def _position_of_offset(text: str, offset: int) -> Position:
    """Return the line and column of the character at an offset in a text."""
    lines = text[:offset].split("\n")
    return Position(line=len(lines), column=len(lines[-1]) + 1)


def _fatal_error(code: Code, problem: str, place: Place, hint: str) -> CombinedError:
    """Return the only error of a file that is not read any further."""
    return CombinedError([UserError(code, problem, place, hint)])


def _refuse_deep_nesting(text: str, file: str) -> None:
    """Raise CombinedError for a text whose lists and mappings are nested deeper than MAX_DEPTH.

    Composing the nodes of such a text recurses in C and would crash the process.
    """
    too_deep_mark = _find_deep_nesting(text)
    if too_deep_mark is not None:
        place = place_at(file, _position_of_mark(too_deep_mark), "")
        raise _fatal_error("too_large", "nested too deeply", place, f"at most {MAX_DEPTH} levels")


def _find_deep_nesting(text: str) -> Any:
    """Return the mark (position) at which a text is nested deeper than MAX_DEPTH, or None.

    libyaml has a limit of its own, far above MAX_DEPTH, and raises an error at that place. In this
    case the text before it, which is too deep already, is searched. Raises yaml.MarkedYAMLError for
    a syntax error.
    """
    try:
        return _find_mark_beyond_max_depth(text)
    except yaml.MarkedYAMLError as error:
        exceeds_limit_of_libyaml = error.problem == LIBYAML_DEPTH_PROBLEM
        if not exceeds_limit_of_libyaml or error.problem_mark is None:
            raise
        readable_text = text[: error.problem_mark.index]
        return _find_mark_beyond_max_depth(readable_text)


def _find_mark_beyond_max_depth(text: str) -> Any:
    """Return the mark at which a text is nested more deeply than MAX_DEPTH, or None.

    The text is parsed to events, which does not recurse. Raises yaml.MarkedYAMLError for a syntax
    error before that mark.
    """
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            return event.start_mark

    return None


def _position(node: yaml.Node) -> Position:
    """Return the position of a node, with the text of a scalar."""
    text = node.value if isinstance(node, yaml.ScalarNode) else ""
    return _position_of_mark(node.start_mark)._replace(text=text)


def _position_of_mark(mark: Any) -> Position:
    """Return the position of a mark of the YAML library, which counts from 0."""
    return Position(mark.line + 1, mark.column + 1)


# -- syntax errors ------------------------------------------------------------------------------

_OPENING_OF_CONTEXT = {
    "flow sequence": "the list [",
    "flow mapping": "the mapping {",
    "quoted scalar": "the quote",
}
"""Maps what the YAML parser was reading to a description of what was opened and not closed."""


def _syntax_error(error: yaml.MarkedYAMLError, text: str, file: str, kind: str) -> LoadgenError:
    """Return the error for a syntax error of the YAML library, with a hint how to mend it."""
    mark = error.problem_mark or error.context_mark
    position = _position_of_mark(mark) if mark else Position(1, 1)
    lines = text.splitlines()
    line = lines[position.line - 1] if position.line <= len(lines) else ""
    hint = _hint_for_syntax_error(error, line, position.column, kind)
    problem = f"not valid YAML: {error.problem}"
    return UserError("invalid_syntax", problem, place_at(file, position, ""), hint)


def _hint_for_syntax_error(error: yaml.MarkedYAMLError, line: str, column: int, kind: str) -> str:
    """Return a hint for the most likely mistake in a line, or "".

    The mistake is recognized by the messages of PyYAML: what the parser was doing (`context`) and
    what it met (`problem`). PyYAML has no error codes.
    """
    context = str(error.context or "")
    problem = str(error.problem)
    has_tab_before_error = "\t" in line[:column]
    if has_tab_before_error:
        return "YAML does not allow tabs for indentation; use spaces"
    if "single document" in f"{context} {problem}":
        return f"keep one {kind} per file, and remove the second document (---)"
    if "mapping values are not allowed" in problem:
        return "put a value that contains a colon in quotes, or check the indentation of the line"

    has_variable = "${" in line
    line_without_variables = line.replace("${", "")
    has_mapping_in_braces = "{" in line_without_variables
    if has_variable and has_mapping_in_braces:
        return "inside { } put ${VAR} in quotes"

    return _hint_for_context(context, error.context_mark)


def _hint_for_context(context: str, mark: object) -> str:
    """Return a hint for a mistake inside a collection or scalar that begins at a mark, or ""."""
    for name, opening in _OPENING_OF_CONTEXT.items():
        if name in context:
            return _hint_to_close(opening, mark)
    if "block" in context:
        return "check the indentation: entries of one level must begin in the same column"
    return context


def _hint_to_close(opening: str, mark: Any) -> str:
    """Return a hint for a list, mapping or quote that is opened and not closed."""
    place = f" at {mark.line + 1}:{mark.column + 1}" if mark else ""
    if "quote" in opening:
        return f"close {opening}{place}"
    return f"close {opening}{place}, and put commas between its entries"


# -- nodes --------------------------------------------------------------------------------------


def resolve_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar: None, a bool, an int, a float, or the text itself."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"

    if _INTEGER.fullmatch(text):
        is_prefixed = text[:2] in ("0x", "0o")
        return int(text, 0) if is_prefixed else int(text)

    if _FLOAT.fullmatch(text):
        # Python writes .inf and .nan without the dot.
        return float(re.sub(r"\.(?=[inIN])", "", text))

    return text


class _NodeReader:
    """Converts the nodes of a text to values with positions, and collects the errors in them."""

    def __init__(self, file: str, env: Mapping[str, str]) -> None:
        """Prepare to read one file, with these environment variables."""
        self.errors: list[LoadgenError] = []
        self._file = file
        self._env = env
        self._remaining_nodes = MAX_NODES

    def read_mapping(self, node: yaml.MappingNode, path: str, depth: int) -> Map:
        """Return a mapping. A repeated key and a key that is no scalar are errors."""
        self._count_node(node, path, depth)
        return self._read_entries(node, path, depth)

    def _read_value(self, node: yaml.Node, path: str, depth: int) -> Any:
        """Return the value of a node: a Map, a Seq or the value of a scalar."""
        if isinstance(node, yaml.MappingNode):
            return self.read_mapping(node, path, depth)

        self._count_node(node, path, depth)
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, path)

        sequence = Seq(_position(node))
        for index, item in enumerate(node.value):
            sequence.append(self._read_value(item, child_path(path, index), depth + 1))
            sequence.values_at.append(_position(item))

        return sequence

    def _count_node(self, node: yaml.Node, path: str, depth: int) -> None:
        """Count a node. Raise CombinedError if there are too many or if it is nested too deeply.

        A node that is too deep belongs to a cycle of aliases: `a: &x [*x]` is a list that contains
        itself, without end. Nothing else can be too deep here, because `_refuse_deep_nesting` has
        checked the text without following its aliases.
        """
        self._remaining_nodes -= 1
        if depth > MAX_DEPTH:
            raise self._size_error("cycle", "has an alias inside itself", node, path)
        if self._remaining_nodes < 0:
            raise self._size_error("too_large", "too many values", node, path)

    def _size_error(self, code: Code, problem: str, node: yaml.Node, path: str) -> CombinedError:
        """Return the error of a file with too many or too deeply nested values.

        Its path can be very long, such as `a[0][0][0]` and so on, so all indexes are cut.
        """
        path_without_indexes = path.partition("[")[0]
        place = place_at(self._file, _position(node), path_without_indexes)
        hint = (
            f"use at most {MAX_DEPTH} levels and {MAX_NODES:,} values; each use of an alias counts"
        )
        return _fatal_error(code, problem, place, hint)

    def _read_entries(self, node: yaml.MappingNode, path: str, depth: int) -> Map:
        """Return a mapping with its own keys and those that `<<` merges into it.

        Merged keys are added last, because the keys of the mapping itself take precedence.
        """
        mapping = Map(_position(node))
        mapping.path = path

        merged_nodes: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                merged_nodes.append(value_node)
                continue

            key_error = self._find_key_error(key_node, mapping)
            if key_error is not None:
                self.errors.append(key_error)
                continue

            key = key_node.value
            value = self._read_value(value_node, child_path(path, key), depth + 1)
            mapping.add(key, value, _position(key_node), _position(value_node))

        for merged_node in merged_nodes:
            self._merge(mapping, merged_node, path, depth)

        return mapping

    def _find_key_error(self, key_node: yaml.Node, mapping: Map) -> LoadgenError | None:
        """Return why a key cannot be added to a mapping: it is no scalar or a repeated key."""
        position = _position(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            place = place_at(self._file, position, mapping.path)
            return UserError("wrong_type", "a key must be a single word", place)

        key = key_node.value
        if key in mapping:
            place = place_at(self._file, position, child_path(mapping.path, key))
            hint = f"the first one is on line {mapping.keys_at[key].line}; keep one"
            return UserError("duplicate", f'the key "{key}" is specified twice', place, hint)

        return None

    def _merge(self, mapping: Map, source: yaml.Node, path: str, depth: int) -> None:
        """Add the keys of other mappings to a mapping, except those that it already has.

        YAML calls this a merge key: `<<: *defaults` adds the keys of the mapping that is marked
        with `&defaults`, and `<<: [*a, *b]` adds those of two. A key that both have is that of `a`.

        Args:
            mapping: The mapping that contains the key `<<`.
            source: The value of this key: a mapping, or a list of mappings.
            path: The path of `mapping`, for error messages.
            depth: The depth of nesting of `mapping`.
        """
        nodes = source.value if isinstance(source, yaml.SequenceNode) else [source]
        for node in nodes:
            if not isinstance(node, yaml.MappingNode):
                place = place_at(self._file, _position(node), path)
                self.errors.append(UserError("wrong_type", '"<<" can merge only mappings', place))
                continue

            # The merged mapping is nested in `mapping`, but its keys become keys of `mapping`.
            self._count_node(node, path, depth + 1)
            merged = self._read_entries(node, path, depth)
            for key, value in merged.items():
                if key not in mapping:
                    mapping.add(key, value, merged.keys_at[key], merged.values_at[key])

    def _read_scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        """Return the value of a scalar, with variables expanded.

        An unquoted scalar may be a number, a boolean or null. A quoted one and a block of text (`|`
        or `>`) are always text. There is one exception: inside { } YAML allows `${N}` only in
        quotes, so a quoted variable may also be a number, a boolean or null.
        """
        has_variable = "${" in node.value
        is_block = node.style in ("|", ">")
        is_quoted = bool(node.style) and not is_block
        text = self._expand_variables(node, path) if has_variable else node.value
        is_always_text = is_block or (is_quoted and not has_variable)
        return text if is_always_text else resolve_scalar(text)

    def _expand_variables(self, node: yaml.ScalarNode, path: str) -> str:
        """Return the text of a scalar with each reference replaced by the value of its variable."""
        place = place_at(self._file, _position(node), path)
        if "${" in _REFERENCE.sub("", node.value):
            problem = f'"{node.value}" is not a valid reference to a variable'
            hint = "write ${NAME} or ${NAME:-default}"
            self.errors.append(UserError("invalid_value", problem, place, hint))
        return _REFERENCE.sub(lambda match: self._value_of_variable(match, place), node.value)

    def _value_of_variable(self, reference: re.Match[str], place: Place) -> str:
        """Return the value of a variable in a reference, `${NAME}` or `${NAME:-default}`.

        As in a shell, a default replaces an empty value as well as a missing one. A variable that
        is not set and has no default is an error.
        """
        name = reference["name"]
        value = self._env.get(name)
        has_default = reference["default"] is not None
        if has_default:
            return value or reference["default"].removeprefix(":-")

        if value is None:
            problem = f"the environment variable {name} is not set"
            hint = f"export {name}=..., or give a default: ${{{name}:-value}}"
            self.errors.append(UserError("unset_variable", problem, place, hint, key=name))
            return ""

        return value
