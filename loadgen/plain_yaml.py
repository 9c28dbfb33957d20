"""Plain YAML, as most files are written, read without PyYAML, whose import is 3 % of a start.

Mappings and lists by indentation, both in one line as `{a: 1}` and `[a, b]`, plain scalars in one line, texts behind
`>-`, comments. Of what is anything else nothing is said, and PyYAML is asked.
"""

from __future__ import annotations

import re
from typing import Any

DEEPEST = 20

_ODD = re.compile(r"[^\n -~]")
_SCALAR = re.compile(r"(-?[A-Za-z0-9._/+~(][A-Za-z0-9._/+~()%=;?<>!*'\"-]*( [A-Za-z0-9._/+~()%=;<>-]+)*) *(?=[],}]|$)")
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{,99}):(?= |$)")


class _Other(Exception):
    """Not plain, or not right."""


class PlainNode:
    """A node as PyYAML composes it: `id`, `tag`, `value`, `style` of a scalar, and the position that it begins at."""

    __slots__ = ("column", "id", "line", "style", "value")
    tag = ""

    def __init__(self, id: str, value: Any, line: int, column: int, style: str = "") -> None:
        self.id, self.value, self.line, self.column, self.style = id, value, line, column, style

    @property
    def start_mark(self) -> PlainNode:
        """Where it begins: `line` and `column`, from 0."""
        return self


def composed(text: str) -> PlainNode | None:
    """The top of a plain text; None where PyYAML has to say what it is."""
    if _ODD.search(text):
        return None
    try:
        return _Reader(text).whole()
    except _Other:
        return None


def loader() -> Any:
    """What PyYAML reads safely with: in C, where it is compiled."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Reader:
    """One pass over the lines. `at` is the line that comes next."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.at = 0

    def whole(self) -> PlainNode:
        top = self.block(-1, 0)
        if self.indent() >= 0:
            raise _Other
        return top

    def indent(self) -> int:
        """The column of the next line with something in it; -1 at the end."""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            found = len(line) - len(line.lstrip(" "))
            if found < len(line) and line[found] != "#":
                return found
            self.at += 1
        return -1

    def block(self, above: int, depth: int) -> PlainNode:
        """The mapping or list that begins with the next line, whose column is greater than that of `above`."""
        column = self.indent()
        if column <= above or depth > DEEPEST:
            raise _Other
        is_list = self.lines[self.at].startswith("- ", column)
        made = PlainNode("sequence" if is_list else "mapping", [], self.at, column)
        while (found := self.indent()) == column:
            if self.lines[self.at].startswith("- ", column) != is_list:
                break
            made.value.append(self.item(column) if is_list else self.pair(column, depth))
        if found > column:
            raise _Other
        return made

    def item(self, column: int) -> PlainNode:
        line, at = self.lines[self.at], self.at
        begin = column + 2
        if line.startswith(" ", begin):
            raise _Other
        self.at += 1
        return self.rest(line, at, begin)

    def pair(self, column: int, depth: int) -> tuple[PlainNode, PlainNode]:
        line, at = self.lines[self.at], self.at
        key = _KEY.match(line, column)
        if key is None:
            raise _Other
        named = PlainNode("scalar", key[1], at, column)
        self.at += 1
        begin = key.end()
        while line.startswith(" ", begin):
            begin += 1
        if begin == len(line) or (line[begin] == "#" and line[begin - 1] == " "):
            is_list = self.indent() == column and self.lines[self.at].startswith("- ", column)
            return named, self.block(column - 1 if is_list else column, depth + 1)
        if line[begin:] == ">-":
            return named, PlainNode("scalar", self.folded(column), at, begin, ">")
        return named, self.rest(line, at, begin)

    def folded(self, above: int) -> str:
        """The lines behind `>-`, in one."""
        begun, texts = self.at, list[str]()
        first = self.lines[begun] if begun < len(self.lines) else ""
        column = len(first) - len(first.lstrip(" "))
        if column <= above or column == len(first):
            raise _Other
        while self.at < len(self.lines) and self.lines[self.at].startswith(" " * column):
            text = self.lines[self.at][column:]
            if not text or text[0] == " " or text[-1] == " ":
                raise _Other
            texts.append(text)
            self.at += 1
        while self.at < len(self.lines) and not self.lines[self.at]:
            self.at += 1
        if self.at < len(self.lines) and self.lines[self.at].startswith(" " * (above + 1)):
            raise _Other  # between the two, or further lines of the text behind an empty one
        return " ".join(texts)

    def rest(self, line: str, at: int, begin: int) -> PlainNode:
        """What stands in a line from a column on, up to its end or its comment."""
        comment = line.find(" #", begin)
        line = (line if comment < 0 else line[:comment]).rstrip(" ")
        made, end = self.flow(line, at, begin, 0)
        if end != len(line):
            raise _Other
        return made

    def flow(self, line: str, at: int, begin: int, depth: int) -> tuple[PlainNode, int]:
        opened = line[begin : begin + 1]
        if opened not in ("{", "[") or not opened:
            scalar = _SCALAR.match(line, begin)
            if scalar is None or (depth == 0 and scalar.end() != len(line)):
                raise _Other
            return PlainNode("scalar", scalar[1], at, begin), scalar.end()
        if depth > DEEPEST:
            raise _Other
        made = PlainNode("mapping" if opened == "{" else "sequence", [], at, begin)
        close = "}" if opened == "{" else "]"
        begin = _blanks(line, begin + 1)
        while True:
            named = None
            if opened == "{":
                key = _KEY.match(line, begin)
                if key is None:
                    raise _Other
                named = PlainNode("scalar", key[1], at, begin)
                begin = _blanks(line, key.end())
            value, begin = self.flow(line, at, begin, depth + 1)
            made.value.append(value if named is None else (named, value))
            begin = _blanks(line, begin)
            ended, begin = line[begin : begin + 1], _blanks(line, begin + 1)
            if ended == close:
                return made, begin
            if ended != ",":
                raise _Other


def _blanks(line: str, begin: int) -> int:
    while line.startswith(" ", begin):
        begin += 1
    return begin
