"""The verdict on a contract, its levels and its terms.

These types are the content of `verdict.json`. `judge.py` makes them from the records. This module
is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import field

from loadgen.contracts.schema import Requirement
from loadgen.core import errors as exit_codes
from loadgen.core import format

SCHEMA = 1
PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

ReasonCode = Literal[
    "", "kept", "broken", "held_by_interval", "one_sided", "no_figure", "unmeasurable", "not_judged"
]
"""Why a term has its verdict.

- `kept`: the whole confidence interval of the metric meets the limit.
- `broken`: the whole interval violates the limit.
- `held_by_interval`: the limit is inside the interval.
- `one_sided`: the load was too short, so the sample bounds the metric on one side only.
- `no_figure`: the metric could not be computed.
- `unmeasurable`: the metric could not be computed, and more load cannot change that.
- `not_judged`: the runs cannot be used to judge the term.
"""


class TermVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one term.

    Attributes:
        term: The term as text.
        level: The name of its level.
        requirement: The list of the contract that the term is in: `must` or `should`.
        verdict: The verdict.
        reason: The reason as a sentence.
        code: The code of the reason.
        value: The metric in `unit`. Null if it is not known or infinite.
        low: The lower end of its confidence interval in `unit`. Null if it has none.
        high: The upper end of its confidence interval in `unit`. Null if it has none.
        limit: The limit in `unit`.
        unit: The unit.
        sample: The number of requests, tasks or prompts behind the metric.
        horizon_s: The verdict covers slowdowns that recur at least once within this time on
            average. Null if not known.
        effective_size: The effective sample size: the number of independent states of the server
            behind the metric. Null if not known.
        analysis: Of a validation that was extended, the number of the interim analysis that
            decided the term, or of the last one.
        additional_load_s: Of an undecided term, how much more load of all runs together will
            decide it if the server continues as it did. Null if not known.
    """

    term: str
    level: str
    requirement: Requirement = field(name="kind")
    verdict: Verdict
    reason: str
    code: ReasonCode = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    unit: str = ""
    sample: int = 0
    horizon_s: float | None = None
    effective_size: int | None = field(default=None, name="looks")
    analysis: int | None = field(default=None, name="look")
    additional_load_s: float | None = field(default=None, name="missing_s")

    @property
    def is_decided(self) -> bool:
        """Whether the term passed or failed."""
        return self.verdict != INCONCLUSIVE


class LevelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one level.

    Attributes:
        name: The name of the level.
        verdict: The verdict.
        workload: The workload of the level.
        load: The arrivals, as text.
        runs: The directories of its runs.
        requests: The number of scheduled requests.
        ok: The number of ok requests.
        terms: The verdict on each term.
        failure_reason: Why none of its terms can be judged, or "".
        fault_codes: The codes of the errors behind that.
        notes: Warnings about the runs.
    """

    name: str
    verdict: Verdict
    workload: str
    load: str
    runs: tuple[str, ...]
    requests: int
    ok: int
    terms: tuple[TermVerdict, ...]
    failure_reason: str = field(default="", name="trouble")
    fault_codes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def undecided_terms(self) -> list[TermVerdict]:
        """The required terms (those of the list `must`) whose verdict is INCONCLUSIVE."""
        return [term for term in self.terms if term.requirement == "must" and not term.is_decided]

    @property
    def can_be_decided_by_load(self) -> bool:
        """Whether more load can decide one of its undecided terms."""
        is_measured = not self.failure_reason
        return is_measured and any(term.code != "unmeasurable" for term in self.undecided_terms)


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `verdict.json`.

    Terms of the list `must` decide the verdict. Terms of the list `should` are only reported.

    Attributes:
        analyses: How often the records were judged: once, and once more after each extension.
        horizon_s: The recurrence horizon of the contract.
        preflight: The warnings of the checks before the first request.
    """

    schema: int = SCHEMA
    contract: str
    contract_sha256: str
    verdict: Verdict
    sentence: str
    confidence: float
    horizon_s: float
    analyses: int = field(default=1, name="looks")
    target: str
    model: str
    server: str
    region: str = ""
    metadata: dict[str, str] = {}
    simulated: bool
    started: str
    ended: str
    version: str
    levels: tuple[LevelVerdict, ...]
    interrupted: bool = False
    preflight: tuple[str, ...] = ()

    @property
    def undecided_levels(self) -> list[LevelVerdict]:
        """The levels whose verdict is INCONCLUSIVE."""
        return [level for level in self.levels if level.verdict == INCONCLUSIVE]

    @property
    def can_be_extended(self) -> bool:
        """Whether the validation is undecided and was not interrupted."""
        return self.verdict == INCONCLUSIVE and not self.interrupted


class NeededLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load that a term needs for a decision, according to a simulation.

    Attributes:
        requirement: The list of the contract that the term is in: `must` or `should`.
        term: The term as text.
        needed_s: The load of all runs of the level. None if it is more than was simulated.
        outcome: The verdict on the term with the load of the contract.
        reason: Why an undecided term is undecided after the longest simulated load.
    """

    requirement: Requirement = field(name="kind")
    term: str
    needed_s: float | None
    outcome: Verdict
    reason: str


class LevelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The load that the terms of a level need for a decision, according to a simulation.

    Attributes:
        name: The name of the level.
        length_s: The load of all runs of the contract.
        simulated_s: The load of all runs that was simulated.
        terms: The load that each term needs.
        failure_reason: Why nothing is known, or "".
        fault_codes: The codes of the errors behind that.
    """

    name: str
    length_s: float
    simulated_s: float
    terms: tuple[NeededLoad, ...]
    failure_reason: str = field(default="", name="trouble")
    fault_codes: tuple[str, ...] = ()


def combine_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """Return FAIL if one is FAIL, else INCONCLUSIVE if one is or if there are none, else PASS."""
    if FAIL in verdicts:
        return "FAIL"
    if INCONCLUSIVE in verdicts or not verdicts:
        return "INCONCLUSIVE"
    return "PASS"


def decide_level_verdict(terms: Sequence[TermVerdict]) -> Verdict:
    """Return the verdict on a level with these terms.

    Only the terms of the list `must` decide. A level without such terms passes.
    """
    must_terms = [term.verdict for term in terms if term.requirement == "must"]
    return combine_verdicts(must_terms) if must_terms else "PASS"


def summarize_levels(levels: Sequence[LevelVerdict]) -> str:
    """Return the verdict on all levels in one sentence.

    It counts the required terms (those of the list `must`) that failed or were not decided. If a
    term of the list `should` did not pass, a second part says how many of these there are.
    """
    terms = [term for level in levels for term in level.terms]
    sentence = _summarize_required([term for term in terms if term.requirement == "must"])
    not_passed = [term for term in terms if term.requirement == "should" and term.verdict != PASS]
    if not_passed:
        sentence += f"; {format.counted(len(not_passed), 'should term')} did not pass"
    return sentence


def _summarize_required(terms: Sequence[TermVerdict]) -> str:
    """Return how many required terms failed or were not decided, without a full stop.

    For example "2 of 5 required terms failed, 1 inconclusive".
    """
    if not terms:
        return "the contract has no required terms (must)"

    counts = Counter(term.verdict for term in terms)
    failed = counts["FAIL"]
    undecided = counts["INCONCLUSIVE"]
    total = len(terms)
    if failed and undecided:
        return f"{failed} of {total} required terms failed, {undecided} inconclusive"
    if failed:
        return f"{failed} of {total} required terms failed"
    if undecided:
        return f"{undecided} of {total} required terms inconclusive"

    return f"{total} of {total} required terms passed"


def get_exit_code(validation: Validation) -> int:
    """Return the exit code of a validation.

    It is 130 if the user interrupted it, 0 for PASS and 1 for FAIL. INCONCLUSIVE is 4 if more load
    can decide it, and 3 if it cannot decide an undecided level.
    """
    if validation.interrupted:
        return exit_codes.INTERRUPTED
    if validation.verdict == PASS:
        return exit_codes.OK
    if validation.verdict == FAIL:
        return exit_codes.SLO_MISSED
    if not all(level.can_be_decided_by_load for level in validation.undecided_levels):
        return exit_codes.UNSOUND

    return exit_codes.INCONCLUSIVE


def compute_additional_load_per_run_s(validation: Validation, repeats: Mapping[str, int]) -> float:
    """Return how long each added run has to be to decide every term for which this is known.

    Return 0 if it is not known for any term.

    Args:
        validation: The validation.
        repeats: How many runs an extension adds to each level, by the name of the level.
    """
    run_lengths_s = [
        term.additional_load_s / repeats[term.level]
        for level in validation.levels
        for term in level.terms
        if term.additional_load_s is not None and term.level in repeats
    ]
    return max(run_lengths_s, default=0.0)
