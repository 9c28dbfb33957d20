"""How often does `loadgen validate` pass a limit that the server violates? Part of trust.py.

Each contract limits the nine quantiles of `LIMITED_QUANTILES` to their true value times a factor.
With the factor 0.9 the server violates each limit by 10 %, so that each PASS is wrong. With the
factor 1.1 it meets each limit, so that each FAIL is wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from make_examples import S
from queueing import run as create_recorded_run
from trust_servers import (
    LIMITED_QUANTILES,
    RECURRENCE_S,
    KnownServer,
    Quantile,
    TrueQuantiles,
    create_server,
    find_true_quantiles,
    simulate_run,
)
from trust_tables import Column, RowTable, format_fraction

from loadgen.contracts.judge import judge_interim_analyses, judge_levels
from loadgen.contracts.load_checks import NEARLY_FULL_LENGTH
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import HORIZON_NS, Contract, parse_contract
from loadgen.contracts.verdict import FAIL, PASS
from loadgen.core.stats import intervals

LENGTHS_S = (150, 600, 2400)
VIOLATED_LIMIT_FACTOR = 0.9
MET_LIMIT_FACTOR = 1.1
LEVEL = "a"  # the name of the only level of each contract

MAX_WRONG_PASS_FRACTION = 6 / 200  # for a fixed kind of server, and for all drawn kinds together
MAX_WRONG_PASS_FRACTION_OF_DRAWN_KIND = 6 / 100
MAX_WRONG_PASS_FRACTION_EXTENDED = 10 / 200  # 1 - confidence, for all interim analyses together
EXTENSIONS = 3  # how often a validation is extended by a run of the same length


class TermVerdict(NamedTuple):
    """The verdict on the term that limits this quantile: PASS, FAIL or INCONCLUSIVE."""

    quantile: Quantile
    verdict: str


VerdictCounts = Counter[TermVerdict]


class TermCount(NamedTuple):
    """In how many validations a term got a certain verdict."""

    validations: int
    term: str

    def describe(self) -> str:
        """Return the number and the term, for example "3 ttft p95", or "0"."""
        return f"{self.validations} {self.term}" if self.validations else "0"


def find_most_frequent_term(counts: VerdictCounts, verdict: str) -> TermCount:
    """Return the term that got this verdict most often."""
    return max(
        TermCount(counts[TermVerdict(quantile, verdict)], quantile.name)
        for quantile in LIMITED_QUANTILES
    )


def count_terms(counts: VerdictCounts, verdict: str) -> int:
    """Return how often any term got this verdict, over all validations."""
    return sum(count for term_verdict, count in counts.items() if term_verdict.verdict == verdict)


def first_quarter(seeds: range) -> range:
    """Return the first quarter of the seeds, but at least five of them.

    Limits that the server meets are only judged with these seeds, which saves time. How often they
    pass is printed for information, and no result depends on it.
    """
    return seeds[: max(len(seeds) // 4, 5)]


def create_contract(truth: TrueQuantiles, limit_factor: float, length_s: float) -> Contract:
    """Return a contract that limits each quantile to its true value times `limit_factor`.

    Its recurrence horizon fits a load of `length_s` seconds.
    """
    terms = []
    for quantile, true_value_ns in truth.items():
        limit = f"{round(true_value_ns * limit_factor)}ns"
        terms.append({quantile.metric: {"limit": limit, "at": f"p{quantile.percentile}"}})

    contract = {
        "name": "trust",
        "horizon": f"{choose_horizon_s(length_s):.1f}s",
        "levels": [{"name": LEVEL, "workload": "qa", "must": terms}],
    }
    # Contracts are YAML files, and JSON is YAML, too.
    return parse_contract(json.dumps(contract), "trust", {})


def choose_horizon_s(length_s: float) -> float:
    """Return the recurrence horizon in seconds of a contract for a load of this length.

    It is the default one. If the load is too short for that, it is the longest one with which the
    load can decide a term, less 1 %.
    """
    longest_horizon_s = intervals.longest_recurrence_s(length_s) / NEARLY_FULL_LENGTH
    return min(0.99 * longest_horizon_s, HORIZON_NS / S)


def count_verdicts(
    server: KnownServer, limit_factor: float, length_s: float, seeds: Iterable[int]
) -> VerdictCounts:
    """Validate one simulated run per seed, and count the verdicts of each term.

    Each limit is the true quantile of the server times `limit_factor`.
    """
    contract = create_contract(find_true_quantiles(server), limit_factor, length_s)

    counts = VerdictCounts()
    for seed in seeds:
        recorded_run = create_recorded_run(simulate_run(server, seed, length_s))
        verdicts = judge_runs(contract, [recorded_run])
        for quantile, verdict in zip(LIMITED_QUANTILES, verdicts, strict=True):
            counts[TermVerdict(quantile, verdict)] += 1
    return counts


def judge_runs(contract: Contract, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the verdict of each term on these runs, in the order of `LIMITED_QUANTILES`."""
    (level,) = judge_levels(contract, {LEVEL: MeasuredLevel(runs=tuple(runs))})
    return [term.verdict for term in level.terms]


class KindValidation(NamedTuple):
    """How validations of one kind of server ended.

    Attributes:
        kind: The kind of server.
        runs: How many runs of each length were validated against violated limits.
        wrong_passes: The most frequent wrong PASS by the length of the load in seconds.
        runs_with_met_limits: How many of the longest runs were validated against met limits.
        right_passes: The most frequent PASS of a met limit.
        wrong_fails: The most frequent FAIL of a met limit.
    """

    kind: str
    runs: int
    wrong_passes: dict[int, TermCount]
    runs_with_met_limits: int
    right_passes: TermCount
    wrong_fails: TermCount

    def has_limit(self, length_s: int) -> bool:
        """Return whether the wrong PASSes of runs of this length have a limit.

        They have none if some state of the server comes back less often than the contract assumes.
        Then the run may never meet this state, which a contract with a short horizon accepts. The
        longest runs always have a limit, because their contract has the default horizon.
        """
        is_longest = length_s == LENGTHS_S[-1]
        return is_longest or RECURRENCE_S.get(self.kind, 0) <= choose_horizon_s(length_s)

    def is_within_limit(self) -> bool:
        """Return whether the wrong PASSes are rare enough for each length that has a limit."""
        max_wrong_passes = MAX_WRONG_PASS_FRACTION * self.runs
        return all(
            worst_term.validations <= max_wrong_passes
            for length_s, worst_term in self.wrong_passes.items()
            if self.has_limit(length_s)
        )

    def format_cells(self) -> list[str]:
        """Return the row of the kind; counts without a limit are in brackets."""
        cells = [self.kind]
        for length_s, worst_term in self.wrong_passes.items():
            text = worst_term.describe()
            cells.append(text if self.has_limit(length_s) else f"({text})")

        right_passes = f"{self.right_passes.validations} of {self.runs_with_met_limits}"
        cells.append(f"{right_passes} {self.right_passes.term}")
        cells.append(self.wrong_fails.describe())
        return cells


def validate_kind(kind: str, seeds: range) -> KindValidation:
    """Validate runs of one kind of server, one per seed and length."""
    server = create_server(kind)
    wrong_passes = {}
    for length_s in LENGTHS_S:
        counts = count_verdicts(server, VIOLATED_LIMIT_FACTOR, length_s, seeds)
        wrong_passes[length_s] = find_most_frequent_term(counts, PASS)

    some_seeds = first_quarter(seeds)
    met_limits = count_verdicts(server, MET_LIMIT_FACTOR, LENGTHS_S[-1], some_seeds)
    return KindValidation(
        kind=kind,
        runs=len(seeds),
        wrong_passes=wrong_passes,
        runs_with_met_limits=len(some_seeds),
        right_passes=find_most_frequent_term(met_limits, PASS),
        wrong_fails=find_most_frequent_term(met_limits, FAIL),
    )


def print_validations(kinds: Sequence[str], seeds: range) -> bool:
    """Print how often limits pass that servers of these kinds violate by 10 %.

    The last two columns show how often limits pass and fail that the servers meet by 10 %.

    Returns:
        Whether the wrong PASSes of all kinds are within their limit.
    """
    max_wrong_passes = MAX_WRONG_PASS_FRACTION * len(seeds)
    print(
        f"\nvalidate: wrong PASS of {len(seeds)}, limits 10 % below the truth "
        f"(limit {max_wrong_passes:g})"
    )
    table = RowTable(
        Column("server", 12),
        *(Column(f"{length_s:,} s", 16) for length_s in LENGTHS_S),
        Column("10 % above: PASS", 22),
        Column("FAIL", 16),
    )
    table.print_header()

    is_within_limit = True
    for kind in kinds:
        validation = validate_kind(kind, seeds)
        table.print_row(validation.format_cells(), is_within_limit=validation.is_within_limit())
        is_within_limit &= validation.is_within_limit()

    return is_within_limit


@dataclass
class DrawnValidations:
    """How validations of servers ended that were drawn from a seed.

    Attributes:
        servers: How many servers were validated against violated limits, with one run each.
        violated: The verdicts on violated limits.
        servers_with_wrong_pass: How many servers passed at least one violated limit.
        met: The verdicts on met limits, which were judged for every fourth server.
    """

    servers: int = 0
    violated: VerdictCounts = field(default_factory=Counter)
    servers_with_wrong_pass: int = 0
    met: VerdictCounts = field(default_factory=Counter)

    def add(self, other: DrawnValidations) -> None:
        """Add the counts of other servers."""
        self.servers += other.servers
        self.violated += other.violated
        self.servers_with_wrong_pass += other.servers_with_wrong_pass
        self.met += other.met

    @property
    def worst_term(self) -> TermCount:
        """The term with the most wrong PASSes."""
        return find_most_frequent_term(self.violated, PASS)

    def fraction_of_met_limits(self, verdict: str) -> float:
        """Return the fraction of the met limits with this verdict; 0 if none was judged."""
        return count_terms(self.met, verdict) / max(self.met.total(), 1)

    def format_cells(self, name: str, length_s: int) -> list[str]:
        """Return the row of these servers, which has the name of their kind."""
        worst_term = self.worst_term
        worst_term_cell = format_fraction(worst_term.validations, self.servers)
        if worst_term.validations:
            worst_term_cell += f" {worst_term.term}"

        return [
            name,
            f"{length_s:,} s",
            f"{self.servers_with_wrong_pass / self.servers:.1%}",
            worst_term_cell,
            f"{self.fraction_of_met_limits(PASS):.0%}",
            f"{self.fraction_of_met_limits(FAIL):.1%}",
        ]


def validate_drawn_server(kind: str, seed: int, length_s: float) -> DrawnValidations:
    """Draw a server of a kind from a seed, and validate one run on it.

    Every fourth server also gets a contract with limits that it meets.
    """
    server = create_server(kind, seed)
    validations = DrawnValidations(servers=1)
    validations.violated = count_verdicts(server, VIOLATED_LIMIT_FACTOR, length_s, [seed])
    if count_terms(validations.violated, PASS):
        validations.servers_with_wrong_pass = 1

    if seed % 4 == 0:
        validations.met = count_verdicts(server, MET_LIMIT_FACTOR, length_s, [seed])
    return validations


def print_drawn_validations(kinds: Sequence[str], seeds: range) -> bool:
    """Print how often limits pass that servers drawn from a seed violate by 10 %.

    Each validation has another server, for each kind one server per seed.

    Returns:
        Whether the wrong PASSes of each kind, and of all together, are within their limits.
    """
    print(
        f"\nfamily: servers drawn from a seed, {len(seeds)} of each kind; wrong PASS 10 % below "
        f"the truth (95 % interval)"
    )
    table = RowTable(
        Column("kind", 14),
        Column("load", 9),
        Column("any term", 10),
        Column("worst term", 36),
        Column("10 % above: PASS", 18),
        Column("FAIL", 8),
    )
    table.print_header()

    is_within_limit = True
    for length_s in LENGTHS_S[1:]:
        all_kinds = DrawnValidations()
        for kind in kinds:
            validations = DrawnValidations()
            for seed in seeds:
                validations.add(validate_drawn_server(kind, seed, length_s))
            is_within_limit &= print_drawn_row(
                table, kind, validations, length_s, MAX_WRONG_PASS_FRACTION_OF_DRAWN_KIND
            )
            all_kinds.add(validations)

        is_within_limit &= print_drawn_row(
            table, "all of them", all_kinds, length_s, MAX_WRONG_PASS_FRACTION
        )

    return is_within_limit


def print_drawn_row(
    table: RowTable, name: str, validations: DrawnValidations, length_s: int, max_fraction: float
) -> bool:
    """Print the row of a kind of drawn servers, or of all kinds together.

    Returns:
        Whether the worst term wrongly passes for at most `max_fraction` of the servers.
    """
    wrong_passes = validations.worst_term.validations
    is_within_limit = wrong_passes <= max_fraction * validations.servers
    table.print_row(validations.format_cells(name, length_s), is_within_limit=is_within_limit)
    return is_within_limit


@dataclass
class ExtendedVerdicts:
    """The verdicts of validations that were extended several times, counted in two ways.

    Attributes:
        corrected: The verdicts of `validate --extend`, whose confidence grows with each extension.
        uncorrected: The terms that pass in any of the analyses if each is judged with the
            confidence of the first one. Only PASSes are counted.
    """

    corrected: VerdictCounts = field(default_factory=Counter)
    uncorrected: VerdictCounts = field(default_factory=Counter)


def count_extended_verdicts(
    server: KnownServer, limit_factor: float, length_s: float, seeds: Iterable[int]
) -> ExtendedVerdicts:
    """Extend one validation per seed by further runs, and count the verdicts of each term.

    Each limit is the true quantile times `limit_factor`, and each run has a load of `length_s`.
    """
    contract = create_contract(find_true_quantiles(server), limit_factor, length_s)

    verdicts = ExtendedVerdicts()
    for seed in seeds:
        # The seeds of the runs are so far apart that no two validations share a run.
        run_seeds = [seed + 100_000 * run_number for run_number in range(EXTENSIONS + 1)]
        runs = [create_recorded_run(simulate_run(server, seed, length_s)) for seed in run_seeds]

        corrected = judge_extended_validation(contract, runs)
        for quantile, verdict in zip(LIMITED_QUANTILES, corrected, strict=True):
            verdicts.corrected[TermVerdict(quantile, verdict)] += 1
        for quantile in find_uncorrected_passes(contract, runs):
            verdicts.uncorrected[TermVerdict(quantile, PASS)] += 1

    return verdicts


def judge_extended_validation(contract: Contract, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the verdict of each term after a validation that was extended run by run.

    As in `validate --extend`, there is an interim analysis after each run.
    """
    run_counts = [{LEVEL: run_count} for run_count in range(1, len(runs) + 1)]
    measured_levels = {LEVEL: MeasuredLevel(runs=tuple(runs))}
    (level,) = judge_interim_analyses(contract, measured_levels, run_counts)
    return [term.verdict for term in level.terms]


def find_uncorrected_passes(contract: Contract, runs: Sequence[RecordedRun]) -> set[Quantile]:
    """Return the terms that pass after any run if each analysis is judged like the first one."""
    passed = set()
    for run_count in range(1, len(runs) + 1):
        verdicts = judge_runs(contract, runs[:run_count])
        for quantile, verdict in zip(LIMITED_QUANTILES, verdicts, strict=True):
            if verdict == PASS:
                passed.add(quantile)
    return passed


def print_extended_validations(kinds: Sequence[str], seeds: range) -> bool:
    """Print how often violated limits pass in validations that are extended several times.

    Returns:
        Whether the wrong PASSes of all kinds of servers are within their limit.
    """
    max_wrong_passes = MAX_WRONG_PASS_FRACTION_EXTENDED * len(seeds)
    print(
        f"\nextend: wrong PASS of {len(seeds)} in {EXTENSIONS + 1} analyses, limits 10 % below "
        f"the truth (limit {max_wrong_passes:g})"
    )
    table = RowTable(
        Column("server", 12),
        Column("first run", 10),
        Column("corrected", 16),
        Column("uncorrected", 16),
        Column("10 % above: PASS", 22),
    )
    table.print_header()

    is_within_limit = True
    for kind in kinds:
        for length_s in LENGTHS_S[:2]:
            is_within_limit &= print_extended_row(table, kind, length_s, seeds)

    return is_within_limit


def print_extended_row(table: RowTable, kind: str, length_s: int, seeds: range) -> bool:
    """Print how validations of one kind of server end that are extended by EXTENSIONS runs.

    Each run has a load of `length_s`. The row shows the wrong PASSes of violated limits with and
    without the correction for several analyses, and the right PASSes of met limits.

    Returns:
        Whether the term with the most wrong PASSes, with the correction, is within the limit.
    """
    server = create_server(kind)
    violated = count_extended_verdicts(server, VIOLATED_LIMIT_FACTOR, length_s, seeds)
    corrected = find_most_frequent_term(violated.corrected, PASS)
    uncorrected = find_most_frequent_term(violated.uncorrected, PASS)

    some_seeds = first_quarter(seeds)
    met = count_extended_verdicts(server, MET_LIMIT_FACTOR, length_s, some_seeds)
    right_passes = find_most_frequent_term(met.corrected, PASS)

    cells = [
        kind,
        f"{length_s} s",
        corrected.describe(),
        uncorrected.describe(),
        f"{right_passes.validations} of {len(some_seeds)} {right_passes.term}",
    ]
    is_within_limit = corrected.validations <= MAX_WRONG_PASS_FRACTION_EXTENDED * len(seeds)
    table.print_row(cells, is_within_limit=is_within_limit)
    return is_within_limit
