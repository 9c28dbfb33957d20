"""Compares a stored file with the same one made again: what differs, and where. Pure."""

from __future__ import annotations

import json
import math
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

TOLERANCE = 1e-9  # relative: sums may differ in their last digits between two kinds of CPU
SHOWN = 200  # characters of a value in a message


MismatchCode = Literal[
    "differs", "missing", "changed", "unlisted", "extra", "not_json", "not_remade", "no_hashes"
]


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One place of a file where the stored content is not what comes out again. "" where there is none."""

    file: str
    at: str = ""  # path of keys in JSON, or the line
    stored: str = ""
    again: str = ""
    code: MismatchCode = "differs"
    what: str = "differs"  # the code in words

    @property
    def text(self) -> str:
        where = f"{self.file}: {self.at}" if self.at else self.file
        return f"{where} {self.what}" + (
            f": {self.stored} stored, {self.again} made again" if self.again else ""
        )


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one file: the number of values (or lines) that are the same, and the others."""

    same: int
    differences: tuple[Mismatch, ...]
    left: tuple[str, ...] = ()  # places that were not compared


def compare(
    file: str, stored: bytes, again: bytes, *, leave: tuple[str, ...] = (), older: bool = False
) -> Compared:
    """Compare two contents of a file. `leave`: patterns of places in JSON that are not compared.

    `older`: another version has written the stored one. Then what it does not have is passed over, and sentences are
    not compared, because each version words its own; values and codes are.
    """
    if not file.endswith((".json", ".jsonl")):
        return _lines(file, stored, again)
    try:
        pairs = list(zip(_documents(file, stored), _documents(file, again), strict=True))
    except ValueError:
        return Compared(
            same=0,
            differences=(
                Mismatch(file=file, code="not_json", what="is no JSON, or of another length"),
            ),
        )
    walk = _Walk(file, leave, older)
    for number, (one, other) in enumerate(pairs, 1):
        walk.value(f"line {number}" if file.endswith(".jsonl") else "", one, other)
    return Compared(
        same=walk.same, differences=tuple(walk.found), left=tuple(dict.fromkeys(walk.left))
    )


def _documents(file: str, data: bytes) -> list[Any]:
    return [json.loads(line) for line in (data.splitlines() if file.endswith(".jsonl") else [data])]


def _lines(file: str, stored: bytes, again: bytes) -> Compared:
    before, after = (data.decode("utf-8", "replace").splitlines() for data in (stored, again))
    same, found = 0, []
    for number in range(max(len(before), len(after))):
        one, other = (lines[number] if number < len(lines) else None for lines in (before, after))
        if one == other:
            same += 1
            continue
        place = _first_change(one or "", other or "")
        found.append(
            Mismatch(
                file=file,
                at=f"line {number + 1}",
                stored=_shown(one, place),
                again=_shown(other, place),
            )
        )
    return Compared(same=same, differences=tuple(found))


def _first_change(one: str, other: str) -> int:
    """Where two lines begin to differ; a little before it, for the reader."""
    place = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return max(0, place - 40)


def _shown(value: Any, begin: int = 0) -> str:
    text = (
        "nothing"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
    part = text[begin : begin + SHOWN]
    return ("..." if begin else "") + part + ("..." if begin + SHOWN < len(text) else "")


class _Walk:
    """Goes through two JSON values side by side."""

    def __init__(self, file: str, leave: tuple[str, ...], older: bool) -> None:
        self.file, self.leave, self.older = file, leave, older
        self.same = 0
        self.found: list[Mismatch] = []
        self.left: list[str] = []

    def value(self, at: str, stored: Any, again: Any) -> None:
        if any(fnmatchcase(at, pattern) for pattern in self.leave):
            self.left.append(at)
        elif isinstance(stored, dict) and isinstance(again, dict):
            for key in dict.fromkeys((*again, *stored)):
                self._key(
                    f"{at}.{key}" if at else key,
                    key in stored,
                    key in again,
                    stored.get(key),
                    again.get(key),
                )
        elif isinstance(stored, list) and isinstance(again, list) and len(stored) == len(again):
            for place, (one, other) in enumerate(zip(stored, again, strict=True)):
                self.value(f"{at}[{place}]", one, other)
        elif _equal(stored, again):
            self.same += 1
        elif self.older and _is_sentence(stored) and _is_sentence(again):
            self.left.append(at)
        else:
            self.found.append(
                Mismatch(file=self.file, at=at, stored=_shown(stored), again=_shown(again))
            )

    def _key(self, at: str, is_stored: bool, is_made: bool, stored: Any, again: Any) -> None:
        if is_stored and is_made:
            self.value(at, stored, again)
        elif is_stored and any(fnmatchcase(at, pattern) for pattern in self.leave):
            self.left.append(at)
        elif is_stored:
            self.found.append(
                Mismatch(file=self.file, at=at, code="extra", what="is a field that nothing gives")
            )
        elif not self.older:
            self.found.append(Mismatch(file=self.file, at=at, code="missing", what="is missing"))


def _is_sentence(value: Any) -> bool:
    return isinstance(value, str) and " " in value


def _equal(one: Any, other: Any) -> bool:
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)
    )
    if numbers:
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
    return type(one) is type(other) and one == other
