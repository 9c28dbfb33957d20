"""The table of changes, read from `table.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).with_name("table.toml")


@dataclass(frozen=True, kw_only=True)
class SourceChange:
    """A change of one line of the source.

    Attributes:
        file: The changed file, from the root of the project.
        old: Text that occurs exactly once in the file.
        new: What replaces it.
        seed: The seed that drew the change; None if it was chosen.
    """

    file: str
    old: str
    new: str
    seed: int | None = None

    def source(self, root: Path = ROOT) -> str:
        """Return the text of the file that the change is made in."""
        return (root / self.file).read_text("utf-8")

    def apply(self, source: str) -> str:
        """Return the source with the change.

        Raises ValueError if the old text does not occur exactly once.
        """
        occurrences = source.count(self.old)
        if occurrences != 1:
            raise ValueError(f"{self.file} has {occurrences} of {self.old!r}, not one")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Mutation(SourceChange):
    """A change of a rule that tests have to notice.

    Attributes:
        name: The name of the change.
        rule: What the unchanged line guarantees, in one sentence.
        tests: Arguments of pytest. Each test that they select passes without the change.
        transports: Ways to send requests, "virtual" and "http", each of which has tests of that
            name. Empty if the rule does not depend on how requests are sent.
    """

    name: str
    rule: str
    tests: tuple[str, ...]
    transports: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DroppedMutation(SourceChange):
    """A change that the seed drew and that no test can or need notice.

    Attributes:
        reason: Why no test notices it.
    """

    reason: str


@dataclass(frozen=True)
class Mode:
    """A way to run the tests: with or without the compiled modules, and over which transport."""

    is_pure: bool
    transport: str = ""

    def __str__(self) -> str:
        interpreter = "pure Python" if self.is_pure else "compiled"
        return f"{interpreter}, {self.transport}" if self.transport else interpreter


def read_mutations() -> list[Mutation]:
    """Return all entries of the table."""
    entries = tomllib.loads(TABLE.read_text("utf-8"))["mutation"]
    return [
        Mutation(
            **entry
            | {"tests": tuple(entry["tests"]), "transports": tuple(entry.get("transports", ()))}
        )
        for entry in entries
    ]


def read_dropped() -> list[DroppedMutation]:
    """Return the drawn changes that are left out, with the reasons."""
    entries = tomllib.loads(TABLE.read_text("utf-8"))["dropped"]
    return [DroppedMutation(**entry) for entry in entries]


def modes_of(mutation: Mutation, *, is_compiled: bool) -> list[Mode]:
    """Return the modes in which a test has to notice the change.

    Compiled modes exist only where the C modules were built.
    """
    return [
        Mode(is_pure, transport)
        for is_pure in ((False, True) if is_compiled else (True,))
        for transport in mutation.transports or ("",)
    ]
