"""The parts of a contract that could be parsed, and the errors that are found in it.

A contract with errors has no `Contract`, but all its errors are reported at once. So each part of
the file that is valid by itself is checked as a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from loadgen.contracts.schema import ContractLevel, Requirement
from loadgen.contracts.terms import ContractTerm
from loadgen.core.errors import Code, CombinedError, LoadgenError, UserError
from loadgen.core.workload.diagnostics import locate
from loadgen.core.workload.yaml_marks import Map, place_at

Location = tuple[str | int, ...]
"""The keys and list indices that lead to a value of the file."""


class LimitedMetric(NamedTuple):
    """A metric that is limited in one list of a contract.

    Two terms of a level with the same one limit the same metric twice, such as `ttft: 2s` and
    `ttft: 3s` in the list `must`.
    """

    requirement: Requirement
    term_without_limit: ContractTerm


@dataclass(frozen=True)
class PlacedTerm:
    """A term, the list of its level that it is in, and its index in that list."""

    requirement: Requirement
    index: int
    term: ContractTerm

    @property
    def limited_metric(self) -> LimitedMetric:
        """The metric that the term limits, in its list."""
        return LimitedMetric(self.requirement, self.term.without_limit())


class LevelDraft(Struct, frozen=True, kw_only=True):
    """The parts of one level that could be parsed.

    Attributes:
        index: The index of the level in the contract.
        name: The name of the level, or "" if it has none.
        workload: The workload of the level, or None if it has none.
        level: The level without its terms, or None if one of its values is wrong.
        terms: The terms that are valid.
    """

    index: int
    name: str
    workload: str | None
    level: ContractLevel | None
    terms: tuple[PlacedTerm, ...]

    @property
    def location(self) -> Location:
        """The location of the level in the file."""
        return ("levels", self.index)

    def location_of(self, placed_term: PlacedTerm) -> Location:
        """Return the location of one of its terms in the file."""
        return (*self.location, placed_term.requirement, placed_term.index)


class Problem(NamedTuple):
    """What is wrong with a term, and a hint how to correct it.

    In the error message the text of the problem follows the text of the term.
    """

    code: Code
    text: str
    hint: str


class ContractErrors:
    """The errors that were found in a contract file and in the files that it names."""

    def __init__(self, document: Map, file: str) -> None:
        """Collect errors of this document, which was read from a file of this name."""
        self.document = document
        self.file = file
        self.in_contract: list[LoadgenError] = []
        self.in_other_files: list[LoadgenError] = []

    def add(self, location: Location, code: Code, text: str, hint: str) -> None:
        """Add an error at a location of the contract file."""
        position, key_path, _ = locate(self.document, location)
        place = place_at(self.file, position, key_path)
        self.in_contract.append(UserError(code, text, place, hint))

    def add_problem(self, location: Location, term: ContractTerm, problem: Problem) -> None:
        """Add a problem of a term."""
        self.add(location, problem.code, f"{term.text}: {problem.text}", problem.hint)

    def add_in_other_file(self, error: LoadgenError) -> None:
        """Add an error in a file that the contract names, unless it was added before.

        Several levels may use the same workload file, and each of them finds its errors.
        """
        messages = [str(earlier_error) for earlier_error in self.in_other_files]
        if str(error) not in messages:
            self.in_other_files.append(error)

    def add_from_file(
        self, location: Location, error: LoadgenError | CombinedError, *, hint: str = ""
    ) -> None:
        """Add an error that was raised when a file that the contract names was read.

        A combined error lists the errors in the file. A single error is about the file itself, for
        example that it is missing, and is reported at this location of the contract.
        """
        if isinstance(error, CombinedError):
            self.in_other_files.extend(error.errors)
        else:
            self.add(location, error.code, error.message, error.hint or hint)
