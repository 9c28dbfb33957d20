"""Parse YAML text to plain values with their positions, so that every later fault can name file:line:column.

This module reads no files and does not check what values mean. Scalars follow the YAML 1.2 core schema (`yes` and
`1:30` are text, `1e3` is a number). `${VAR}` and `${VAR:-default}` are expanded in scalar values after parsing. The
number of values is limited, because aliases can multiply them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

from loadgen.core.errors import Code, CombinedError, LoadgenError, Place, UserError

MOST_NODES = 100_000  # counted after aliases: ten nested lists of ten aliases would be 10^10 values
DEEPEST = 50

_INT = re.compile(r"[-+]?[0-9]{1,300}|0x[0-9a-fA-F]{1,200}|0o[0-7]{1,200}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^{}]*)?\}")

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def plain_yaml(text: str, place_at: str) -> Any:
    """The plain values of a YAML text without marks, variables and checks. Raises UserError where it is no YAML."""
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            "invalid_syntax", f"not YAML: {' '.join(str(error).split())}", place_at
        ) from None


class Spot(NamedTuple):
    """A position in the file, counted from 1, and the text as written (variables unexpanded; "" for a collection)."""

    line: int
    column: int
    text: str = ""


class Map(dict[str, Any]):
    """A mapping in the file. `at` is its position; `keys_at` and `values_at` are those of each key and its value."""

    def __init__(self, at: Spot) -> None:
        super().__init__()
        self.at = at
        self.keys_at: dict[str, Spot] = {}
        self.values_at: dict[str, Spot] = {}
        self.path = ""

    def renamed(self, names: Mapping[str, str]) -> Map:
        """A copy in which some keys have other names; their positions stay."""
        copy = Map(self.at)
        copy.path = self.path
        for key, value in self.items():
            name = names.get(key, key)
            copy[name], copy.keys_at[name], copy.values_at[name] = (
                value,
                self.keys_at[key],
                self.values_at[key],
            )
        return copy


def overlay(base: Map, changes: Map) -> Map:
    """Return the mapping that has the values of `changes` and, for other keys, those of `base`.

    Mappings inside are merged key by key. The position of a value is the one in its own file.
    """
    merged = base.renamed({})
    merged.at = changes.at
    for key, value in changes.items():
        base_value = base.get(key)
        if isinstance(base_value, Map) and isinstance(value, Map):
            merged[key] = overlay(base_value, value)
        else:
            merged[key] = value
        merged.keys_at[key] = changes.keys_at[key]
        merged.values_at[key] = changes.values_at[key]
    return merged


class Seq(list[Any]):
    """A sequence in the file. `at` is its position; `values_at[i]` is that of item i."""

    def __init__(self, at: Spot) -> None:
        super().__init__()
        self.at = at
        self.values_at: list[Spot] = []


def child_path(path: str, step: str | int) -> str:
    """`stages`, 0 → `stages[0]`; `stages[0]`, "arrival" → `stages[0].arrival`."""
    return f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}" if path else step


def place_at(file: str, spot: Spot, path: str) -> Place:
    return Place(file, spot.line, spot.column, path)


SMALLEST = (
    "the smallest workload: name: truth, and requests: {input_tokens: 150, output_tokens: 200}"
)


def read_yaml(
    text: str,
    file: str,
    env: Mapping[str, str],
    *,
    kind: str = "workload",
    smallest: str = SMALLEST,
    list_as: str = "",
) -> tuple[Map, list[LoadgenError]]:
    """Return the top mapping of `text` and the faults found in it (repeated keys, unset variables).

    kind: the word for the file in messages. smallest: an example of such a file, for hints. list_as: a list at the top
    stands for a mapping with it under this key.

    Raises `CombinedError` with one fault when parsing cannot continue: a syntax error, or no mapping at the top.
    """
    try:
        _refuse_depth(text, file)
        root = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        raise CombinedError([_syntax(error, text, file, kind)]) from None
    except yaml.reader.ReaderError as error:
        text_before = text[: error.position] if isinstance(error.position, int) else ""
        spot = Spot(text_before.count("\n") + 1, len(text_before) - text_before.rfind("\n"))
        what, hint = "a character that YAML does not allow", f"a {kind} is plain text in YAML"
        raise _alone("wrong_encoding", what, place_at(file, spot, ""), hint) from None
    if list_as and isinstance(root, yaml.SequenceNode):
        key = yaml.ScalarNode("tag:yaml.org,2002:str", list_as, root.start_mark)
        root = yaml.MappingNode("tag:yaml.org,2002:map", [(key, root)], root.start_mark)
    if not isinstance(root, yaml.MappingNode):
        if root is None:
            raise _alone(
                "empty_file", "the file is empty", place_at(file, Spot(1, 1), ""), smallest
            )
        what = f"the top of a {kind} must be a mapping (key: value)"
        raise _alone("wrong_type", what, place_at(file, _spot(root), ""), smallest)
    faults: list[LoadgenError] = []
    walk = _Walk(file, env, faults.append)
    top = walk.value(root, "", 0)
    assert isinstance(top, Map)
    return top, faults


def _alone(code: Code, what: str, place: Place, hint: str) -> CombinedError:
    """The one fault of a file that is not read any further."""
    return CombinedError([UserError(code, what, place, hint)])


def _refuse_depth(text: str, file: str) -> None:
    """Raise `CombinedError` for deep nesting. Composing recurses in C and would crash; parsing to events does not recurse."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=Loader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > DEEPEST:
                spot = Spot(event.start_mark.line + 1, event.start_mark.column + 1)
                raise _alone(
                    "too_large",
                    "nested too deeply",
                    place_at(file, spot, ""),
                    f"at most {DEEPEST} levels",
                )
    except (
        yaml.MarkedYAMLError
    ) as error:  # libyaml 0.2.6 has a limit of its own, and meets it ahead of the events
        if error.problem == "exceeded maximum nesting depth" and error.problem_mark is not None:
            _refuse_depth(text[: error.problem_mark.index], file)
        raise


def _spot(node: yaml.Node) -> Spot:
    text = node.value if isinstance(node, yaml.ScalarNode) else ""
    return Spot(node.start_mark.line + 1, node.start_mark.column + 1, text)


_OPENED = {
    "flow sequence": "the list [",
    "flow mapping": "the mapping {",
    "quoted scalar": "the quote",
}
"""What the parser was within -> what was opened, in words."""


def _syntax(error: yaml.MarkedYAMLError, text: str, file: str, kind: str) -> LoadgenError:
    mark = error.problem_mark or error.context_mark
    spot = Spot(mark.line + 1, mark.column + 1) if mark else Spot(1, 1)
    lines = text.splitlines()
    line = lines[spot.line - 1] if spot.line <= len(lines) else ""
    hint = ""
    if "\t" in line[: spot.column]:
        hint = "YAML does not allow tabs for indentation: use spaces"
    elif "single document" in f"{error.context} {error.problem}":
        hint = f"one {kind} per file: remove the second document (---)"
    elif "mapping values are not allowed" in str(error.problem):
        hint = "put a value that contains a colon in quotes, or check the indentation of the line"
    elif "${" in line and ("{" in line.replace("${", "")):
        hint = "inside { } put ${VAR} in quotes"
    elif opened := next((what for name, what in _OPENED.items() if name in str(error.context)), ""):
        begun = error.context_mark
        at = f" at {begun.line + 1}:{begun.column + 1}" if begun else ""
        hint = f"close {opened}{at}" + (
            "" if "quote" in opened else ", and put commas between its entries"
        )
    elif "block" in str(error.context):
        hint = "check the indentation: entries of one level begin in one column"
    elif error.context:
        hint = str(error.context)
    return UserError(
        "invalid_syntax", f"not valid YAML: {error.problem}", place_at(file, spot, ""), hint
    )


def resolve(text: str) -> Any:
    """The value of an unquoted scalar in the YAML core schema: None, bool, int, float, else the text itself."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if _FLOAT.fullmatch(text):
        return float(
            re.sub(r"\.(?=[inIN])", "", text)
        )  # Python spells .inf and .nan without the dot
    return text


class _Walk:
    """One pass over the composed nodes. Holds the state of the pass: file name, environment, faults, values left."""

    def __init__(
        self, file: str, env: Mapping[str, str], fault: Callable[[LoadgenError], None]
    ) -> None:
        self.file, self.env, self.fault = file, env, fault
        self.left = MOST_NODES

    def spend(self, node: yaml.Node, path: str, depth: int) -> None:
        self.left -= 1
        if self.left < 0 or depth > DEEPEST:
            place = place_at(self.file, _spot(node), path.partition("[")[0])
            hint = f"at most {DEEPEST} levels and {MOST_NODES:,} values, aliases counted as often as they are used"
            if depth > DEEPEST:
                raise _alone("cycle", "an alias inside itself", place, hint)
            raise _alone("too_large", "too many values", place, hint)

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        self.spend(node, path, depth)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            seq = Seq(_spot(node))
            for index, item in enumerate(node.value):
                seq.append(self.value(item, child_path(path, index), depth + 1))
                seq.values_at.append(_spot(item))
            return seq
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: str, depth: int) -> Map:
        result = Map(_spot(node))
        result.path = path
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged.append(value_node)
                continue
            spot = _spot(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.fault(
                    UserError(
                        "wrong_type", "a key must be a single word", place_at(self.file, spot, path)
                    )
                )
                continue
            key = key_node.value
            if key in result:
                hint = f"the first is on line {result.keys_at[key].line}; keep one"
                self.fault(
                    UserError(
                        "duplicate",
                        f'"{key}" is given twice',
                        place_at(self.file, spot, child_path(path, key)),
                        hint,
                    )
                )
                continue
            result[key] = self.value(value_node, child_path(path, key), depth + 1)
            result.keys_at[key], result.values_at[key] = spot, _spot(value_node)
        for source in merged:
            self.merge(result, source, path, depth)
        return result

    def merge(self, into: Map, source: yaml.Node, path: str, depth: int) -> None:
        """YAML's `<<`: add the keys of the merged mappings that are not set yet; the first mapping wins."""
        for node in source.value if isinstance(source, yaml.SequenceNode) else [source]:
            if not isinstance(node, yaml.MappingNode):
                self.fault(
                    UserError(
                        "wrong_type",
                        '"<<" merges mappings only',
                        place_at(self.file, _spot(node), path),
                    )
                )
                continue
            self.spend(node, path, depth + 1)
            other = self.mapping(node, path, depth + 1)
            for key, value in other.items():
                if key not in into:
                    into[key] = value
                    into.keys_at[key], into.values_at[key] = (
                        other.keys_at[key],
                        other.values_at[key],
                    )

    def scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        text = node.value
        if "${" in text:
            text = self.expand(node, path)
            # inside { }, "${N}" needs quotes but still means a number
            return text if node.style in ("|", ">") else resolve(text)
        if node.style:  # quoted or a block: always text
            return text
        return resolve(text)

    def expand(self, node: yaml.ScalarNode, path: str) -> str:
        """Replace each reference by its variable. As in a shell, a default after `:-` also replaces an empty one."""
        spot = _spot(node)

        def value_of(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            value = self.env.get(name)
            if default is not None:
                return value or default[2:]
            if value is None:
                what = f"the environment variable {name} is not set"
                hint = f"export {name}=..., or give a default: ${{{name}:-value}}"
                self.fault(
                    UserError(
                        "unset_variable", what, place_at(self.file, spot, path), hint, key=name
                    )
                )
                return ""
            return value

        if _REFERENCE.sub("", node.value).count("${"):
            problem = f'"{node.value}" is not a reference to a variable'
            self.fault(
                UserError(
                    "invalid_value",
                    problem,
                    place_at(self.file, spot, path),
                    "write ${NAME} or ${NAME:-default}",
                )
            )
        return _REFERENCE.sub(value_of, node.value)
