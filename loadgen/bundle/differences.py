"""Compare a stored file with the same file regenerated from raw data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any, Literal

import msgspec

RELATIVE_TOLERANCE = 1e-9
"""Sums may differ in their last digits between two kinds of CPU."""
ABSOLUTE_TOLERANCE = 1e-12
EXCERPT_CHARACTERS = 200
CONTEXT_CHARACTERS = 40
"""Characters that are shown before the first change in a line."""

MismatchCode = Literal[
    "differs", "missing", "changed", "unlisted", "extra", "not_json", "not_remade", "no_hashes"
]


class Mismatch(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"location": "at", "regenerated": "again", "description": "what"},
):
    """A place of a file where the stored content differs from the regenerated one.

    Attributes:
        file: The file.
        location: The path of keys in JSON, or the line. Empty for the file as a whole.
        stored: The stored content, or "".
        regenerated: The regenerated content, or "".
        code: What kind of mismatch it is.
        description: The code as text, such as "is missing".
    """

    file: str
    location: str = ""
    stored: str = ""
    regenerated: str = ""
    code: MismatchCode = "differs"
    description: str = "differs"

    @property
    def text(self) -> str:
        """The mismatch as a sentence."""
        place = f"{self.file}: {self.location}" if self.location else self.file
        text = f"{place} {self.description}"
        if self.regenerated:
            text += f": stored {self.stored}, reproduced {self.regenerated}"
        return text


class FileComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one file.

    Attributes:
        same: The number of values or lines that are equal.
        differences: The places that differ.
        not_compared: The places that were not compared.
    """

    same: int
    differences: tuple[Mismatch, ...]
    not_compared: tuple[str, ...] = ()


def compare_file(
    file: str,
    stored: bytes,
    regenerated: bytes,
    *,
    ignored: tuple[str, ...] = (),
    is_other_version: bool = False,
) -> FileComparison:
    """Compare the stored content of a file with the regenerated one.

    Args:
        file: The name of the file.
        stored: The stored content.
        regenerated: The regenerated content.
        ignored: Patterns of places in JSON that are not compared.
        is_other_version: True if another version wrote the stored content. Missing fields are then
            accepted, and sentences are not compared, because each version words its own.
    """
    if not file.endswith((".json", ".jsonl")):
        return _compare_lines(file, stored, regenerated)

    try:
        documents = list(zip(_parse(file, stored), _parse(file, regenerated), strict=True))
    except ValueError:
        mismatch = Mismatch(
            file=file, code="not_json", description="is not JSON, or has a different length"
        )
        return FileComparison(same=0, differences=(mismatch,))

    comparer = _JsonComparer(file, ignored, is_other_version)
    for number, (stored_document, new_document) in enumerate(documents, 1):
        location = f"line {number}" if file.endswith(".jsonl") else ""
        comparer.compare(location, stored_document, new_document)

    return comparer.result()


def _parse(file: str, data: bytes) -> list[Any]:
    """Return the document of a JSON file, or those of the lines of a JSONL file."""
    lines = data.splitlines() if file.endswith(".jsonl") else [data]
    return [json.loads(line) for line in lines]


def _compare_lines(file: str, stored: bytes, regenerated: bytes) -> FileComparison:
    """Compare two texts line by line. A line that only one of them has is a difference."""
    stored_lines = stored.decode("utf-8", "replace").splitlines()
    new_lines = regenerated.decode("utf-8", "replace").splitlines()
    same = 0

    differences = []
    for number, (stored_line, new_line) in enumerate(zip_longest(stored_lines, new_lines), 1):
        if stored_line == new_line:
            same += 1
            continue

        start = _excerpt_start(stored_line or "", new_line or "")
        differences.append(
            Mismatch(
                file=file,
                location=f"line {number}",
                stored=_excerpt(stored_line, start),
                regenerated=_excerpt(new_line, start),
            )
        )

    return FileComparison(same=same, differences=tuple(differences))


def _excerpt_start(first: str, second: str) -> int:
    """Return where an excerpt begins that shows the first difference of two lines."""
    first_change = min(len(first), len(second))
    for index, (first_char, second_char) in enumerate(zip(first, second, strict=False)):
        if first_char != second_char:
            first_change = index
            break
    return max(0, first_change - CONTEXT_CHARACTERS)


def _excerpt(value: object, start: int = 0) -> str:
    """Return at most EXCERPT_CHARACTERS of a value as text, from the character `start` on.

    Dots stand for what is not shown. A value that is missing is "(nothing)".
    """
    if value is None:
        text = "(nothing)"
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False)

    end = start + EXCERPT_CHARACTERS
    before = "..." if start else ""
    after = "..." if end < len(text) else ""

    return f"{before}{text[start:end]}{after}"


class _JsonComparer:
    """Walks through two JSON values side by side and records where they differ.

    Args:
        file: The name of the file, for mismatches.
        ignored: Patterns of paths that are not compared, such as "notes*".
        is_other_version: True if another version of loadgen wrote the stored value.
    """

    def __init__(self, file: str, ignored: tuple[str, ...], is_other_version: bool) -> None:
        self._file = file
        self._ignored = ignored
        self._is_other_version = is_other_version
        self._same = 0
        self._differences: list[Mismatch] = []
        self._uncompared_paths: list[str] = []

    def result(self) -> FileComparison:
        """Return the comparison of all values so far."""
        distinct_paths = dict.fromkeys(self._uncompared_paths)
        return FileComparison(
            same=self._same,
            differences=tuple(self._differences),
            not_compared=tuple(distinct_paths),
        )

    def compare(self, path: str, stored: Any, regenerated: Any) -> None:
        """Compare two values at a path of keys, and what they contain, and record the result.

        Objects are compared key by key, and lists of equal length item by item. Values at ignored
        paths are not compared.

        Args:
            path: The keys that lead to the values, for example `stages[0].name`.
            stored: The value in the bundle.
            regenerated: The value that was computed from raw data.
        """
        if self._is_ignored(path):
            self._uncompared_paths.append(path)
        elif isinstance(stored, dict) and isinstance(regenerated, dict):
            self._compare_mappings(path, stored, regenerated)
        elif _are_lists_of_equal_length(stored, regenerated):
            for index, (stored_item, new_item) in enumerate(zip(stored, regenerated, strict=True)):
                self.compare(f"{path}[{index}]", stored_item, new_item)
        else:
            self._compare_as_a_whole(path, stored, regenerated)

    def _compare_as_a_whole(self, path: str, stored: object, regenerated: object) -> None:
        """Record whether two values are equal. Numbers may differ by a rounding error.

        Two sentences that differ are no mismatch if another version of loadgen wrote the stored
        one, because versions word the same message differently.
        """
        if _is_equal(stored, regenerated):
            self._same += 1
            return

        are_sentences = _is_sentence(stored) and _is_sentence(regenerated)
        if are_sentences and self._is_other_version:
            self._uncompared_paths.append(path)
            return

        self._differences.append(
            Mismatch(
                file=self._file,
                location=path,
                stored=_excerpt(stored),
                regenerated=_excerpt(regenerated),
            )
        )

    def _compare_mappings(
        self, path: str, stored: Mapping[str, object], regenerated: Mapping[str, object]
    ) -> None:
        """Compare the values of two JSON objects, key by key.

        Keys come in the order of the regenerated object, and then those that only the stored object
        has.
        """
        for key in dict.fromkeys((*regenerated, *stored)):
            key_path = f"{path}.{key}" if path else key
            if key not in stored:
                self._record_missing_key(key_path)
            elif key not in regenerated:
                self._record_extra_key(key_path)
            else:
                self.compare(key_path, stored[key], regenerated[key])

    def _record_missing_key(self, path: str) -> None:
        """Record a key that the bundle should have but does not have.

        It is no mismatch if another version of loadgen wrote the file, because that version may not
        have had the key.
        """
        if not self._is_other_version:
            self._add_mismatch(path, "missing", "is missing")

    def _record_extra_key(self, path: str) -> None:
        """Record a key that the bundle has but that was not regenerated from raw data.

        It is a mismatch, because somebody may have added the key, unless the key is ignored.
        """
        if self._is_ignored(path):
            self._uncompared_paths.append(path)
        else:
            self._add_mismatch(path, "extra", "does not follow from the raw data")

    def _add_mismatch(self, path: str, code: MismatchCode, description: str) -> None:
        self._differences.append(
            Mismatch(file=self._file, location=path, code=code, description=description)
        )

    def _is_ignored(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self._ignored)


def _are_lists_of_equal_length(first: object, second: object) -> bool:
    return isinstance(first, list) and isinstance(second, list) and len(first) == len(second)


def _is_sentence(value: object) -> bool:
    """Return True if a value is text of several words, which each version may word differently."""
    return isinstance(value, str) and " " in value


def _is_equal(first: Any, second: Any) -> bool:
    """Return True for equal values. Numbers may differ by a rounding error."""
    if _is_number(first) and _is_number(second):
        return math.isclose(first, second, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return type(first) is type(second) and first == second


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
