"""How often are verdicts of validate, compare and search wrong, on servers of known behaviour?

    python benchmarks/trust.py [--only PARTS] [--kinds rare,cold] [--seeds 200]

PARTS: some of validate,family,extend,compare,search,sustained,short,starved. All of them take
hours. Each part prints a table and marks what is over its limit; the exit code is 1 then.

The servers are rows of requests made by formulas (no sockets, no clock): 5 requests per second, 100
tokens each, no queue. Each kind changes in its own way:

    independent   only noise of each request
    ar10, ar60    a level that wanders for 10 or 60 s
    stalls        1 s in each 30 s is 3 times as slow
    onoff25       20 s fast, 5 s half as fast again
    onoff300      240 s fast, 60 s half as fast again
    rare          8 s in each 600 s are 3 times as slow
    spells        the same at random times, on average each 600 s
    heavy         the time per token has a heavy tail (log-normal, 0.8)
    level         each start has its own level, 5 % apart
    warm          starts 30 % faster, for about a minute
    cold          starts twice as slow, for about a minute
    bimodal       one request of five is twice as slow
    levels400     0.85, 1 or 1.25, for 400 s on average
    replica90     one of four replicas is 1.8 times as slow above some load that wanders over 90 s

validate: limits 10 % below the truth, for TPOT, E2E and TTFT at p50, p95 and p99, in runs of 150,
600 and 2,400 s. Runs of 2,400 s have the default recurrence horizon of 12 minutes, with which
shorter runs decide nothing, so their contracts have the horizon that they can see (40 s, 2 min 42
s). Printed are the wrong PASSes of the worst term (limit 6 of 200). The count is in brackets for a
kind whose changes recur less often than the horizon. Next to it, for limits 10 % above the truth
and 2,400 s: the PASSes of the best term and the wrong FAILs of the worst.

family: as validate, for 600 and 2,400 s, each on a server of its own drawn from a seed
(benchmarks/drawn.py): the wrong PASSes of the worst term; limit 3 % of the family and 6 % of each
member.

extend: validations of 150 and 600 s that are extended three times by as much, as `validate
--extend` judges them: the wrong PASSes of the worst term over all four interim analyses; limit 10
of 200. Next to it, those of a reader who uses the contract's own confidence each time and stops at
the first PASS, and the right PASSes of the best term.

compare: pairs of equal servers, three runs of 300 s a side: pairs with any "better" or "worse";
limit 7 %. Next to it, how many of the pairs 15 % apart are detected (TPOT p50). Then pairs of each
member of the family, each pair a server of its own; limit 7 % of all of them.

search: a server of which each start sustains another load (0.4, 1 and 2 % apart): the 95 %
intervals that cover the truth; limit 90 of 100. Then searches on servers of the family, whose
capacity is what their slowness leaves of it in each trial of 600 s.

sustained: a rack of 72 replicas whose TTFT and requests in flight wander and do not grow: racks
called growing, limit 3 %. Next to it, how many are detected in which one replica's double. Then
racks of which each replica is a member of the family, in the second half of loads of 600 and
2,400 s. A swing and a slow growth do grow there: their counts are in brackets and have no limit.

short: loads of 15 and 30 s, in which no trend can be seen, on 20 slots of members of the family:
those that a search calls not sustained although the slots suffice (70 and 90 % of them used on
average within the load); limit 3 % of the family and 6 % of each member. Next to it, loads of twice
as much as the slots can serve.

starved: a starved load generator against a log of the truth (benchmarks/starved.py).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import NamedTuple

import drawn
import numpy as np
import rig
import starved
from make_examples import MS, S, blank, stream
from numpy.typing import NDArray
from queueing import run

from loadgen.compare import comparison
from loadgen.compare.difference import Difference
from loadgen.contracts import verdict
from loadgen.contracts.judge import judge_interim_analyses, judge_levels
from loadgen.contracts.load_checks import NEARLY_FULL_LENGTH
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import HORIZON_NS, Contract, parse_contract
from loadgen.contracts.steady_samples import collect_values
from loadgen.core.metrics import growth, shortfall
from loadgen.core.metrics.columns import Columns
from loadgen.core.results.manifest import Fingerprints, RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import SOURCES
from loadgen.core.run_summary import summarize
from loadgen.core.stats import intervals, trend
from loadgen.core.stats.quantiles import quantile_index
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import SearchResult, TrialResult
from loadgen.search.search_settings import SearchSettings

RATE = 5.0
TOKENS = 100
BASE_ITL_S, BASE_TTFT_S = 0.010, 0.020
KINDS = (
    "independent",
    "ar10",
    "ar60",
    "stalls",
    "onoff25",
    "onoff300",
    "rare",
    "spells",
    "heavy",
    "level",
    "warm",
    "cold",
    "bimodal",
    "levels400",
    "replica90",
)
LENGTHS_S = (150, 600, 2400)
RECURRENCE_S = {
    "ar60": 300,
    "onoff300": 300,
    "rare": 600,
    "spells": 600,
    "levels400": 1200,
    "replica90": 300,
}  # the others sooner
TERMS = tuple((metric, at) for metric in ("tpot", "e2e", "ttft") for at in (50, 95, 99))
MAX_WRONG_PASSES = 6 / 200
MAX_WRONG_PER_MEMBER = 6 / 100
FAMILY_TRUTH_LENGTH_S = (
    20_000.0  # the requests of a member's truth are at unlike times, so fewer do
)
MAX_WRONG_EXTENDED = 10 / 200  # 1 - confidence
EXTENSIONS = 3
MAX_FALSE_ALARMS = 0.07
MIN_COVERED = 0.90
MAX_CALLED_GROWING = 0.03
REPLICAS = 72
SPREADS = (0.004, 0.01, 0.02)
SERVER_SLOTS = 20
SHORT_LOADS = (0.7, 0.9, 2.0)
REPEATS = 3
TRUTH_LENGTH_S = 200_000.0
SPELL_S = 8  # length of a slow spell
LEVELS_400 = np.array([0.85, 1.0, 1.25])
Factors = NDArray[np.float64]


def _draw_stalls(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return a factor of 3 for 1 s in each 30 s."""
    return np.where((due_s + rng.uniform(0, 30)) % 30 < 1, 3.0, 1.0)


def _draw_on_off(due_s: Factors, rng: np.random.Generator, cycle_s: float) -> Factors:
    """Return a factor of 1.5 for the last fifth of each cycle."""
    return np.where((due_s + rng.uniform(0, cycle_s)) % cycle_s >= 0.8 * cycle_s, 1.5, 1.0)


WANDERING_SPREAD = 0.15  # standard deviation of the logarithm of a level that wanders


def _draw_wandering_level(due_s: Factors, rng: np.random.Generator, tau_s: float) -> Factors:
    """Return the factor of a level that wanders by 15 % with the time constant `tau_s`.

    Its logarithm is a first-order autoregressive process AR(1) with one value per second:
    x[t] = c x[t - 1] + sqrt(1 - c^2) noise[t], where c = exp(-1 / tau_s). `due_s` has the time of
    each request.
    """
    seconds = int(float(due_s[-1])) + 2
    correlation = math.exp(-1 / tau_s)
    noise = rng.normal(size=seconds)
    level = np.empty(seconds)

    level[0] = noise[0]
    for second in range(1, seconds):
        innovation = math.sqrt(1 - correlation * correlation) * noise[second]
        level[second] = correlation * level[second - 1] + innovation

    factors: Factors = np.exp(WANDERING_SPREAD * level[due_s.astype(int)])
    return factors


def _draw_rare_spells(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return a factor of 3 for one spell of 8 s in each block of 600 s, else 1.

    The spell lies at a random time of its block. A run starts at a random time of the first block.
    """
    block_s = 600
    time_s = due_s + rng.uniform(0, block_s)
    block = (time_s / block_s).astype(int)
    spell_starts_s = rng.uniform(0, block_s - SPELL_S, int(block[-1]) + 1)
    since_spell_start_s = time_s % block_s - spell_starts_s[block]
    is_in_spell = (since_spell_start_s >= 0) & (since_spell_start_s < SPELL_S)
    return np.where(is_in_spell, 3.0, 1.0)


def _draw_random_spells(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return a factor of 3 for spells of 8 s at random times, on average one in 600 s, else 1."""
    end_s = float(due_s[-1])
    spell_count = rng.poisson((end_s + SPELL_S) / 600)
    starts_s = np.sort(rng.uniform(-SPELL_S, end_s, spell_count))
    if not len(starts_s):
        return np.ones(len(due_s))

    # The index of the last spell that began before each request; -1 if none did
    last_spell = np.searchsorted(starts_s, due_s, side="right") - 1
    has_begun = last_spell >= 0
    since_start_s = due_s - starts_s[np.maximum(last_spell, 0)]

    return np.where(has_begun & (since_start_s < SPELL_S), 3.0, 1.0)


def _draw_start_level(due_s: Factors, rng: np.random.Generator, *, long_run: bool) -> Factors:
    """Return one log-normal level for the whole start, with a spread of 5 %.

    In the long run it is 1, which is the median of all starts.
    """
    level = 1.0 if long_run else float(rng.lognormal(0, 0.05))
    return np.full(len(due_s), level)


def _warm_up(due_s: Factors, size: float, *, long_run: bool) -> Factors:
    """Return factors that begin at 1 + size and approach 1 with a time constant of a minute.

    In the long run they are 1.
    """
    if long_run:
        return np.ones(len(due_s))
    return 1 + size * np.exp(-due_s / 60)


def _draw_slow_replica(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return 1.8 for requests of one of four replicas while the load is high, else 1."""
    is_load_high = drawn.draw_wandering_load(due_s, 90.0, rng) > 0.5
    return drawn.slow_replica_factors(is_load_high, replica_count=4, slowdown=0.8, rng=rng)


def draw_slowness_of_kind(
    kind: str,
    due_s: Factors,
    rng: np.random.Generator,
    *,
    long_run: bool,
    server_number: int = 0,
) -> Factors:
    """Return the factor by which each request is slower than the base.

    Args:
        kind: One of KINDS or a member of the family of drawn servers.
        due_s: When each request is sent, in seconds since the start, in ascending order.
        rng: Draws what happens in this start.
        long_run: Leave out the start-up and the level of one start, which gives the truth.
        server_number: Which server of a member of the family it is.
    """
    if kind in drawn.FAMILY_MEMBERS:
        server = drawn.draw_server(kind, server_number)
        return drawn.draw_slowness(server, due_s, rng, long_run=long_run)

    request_count = len(due_s)
    draws: dict[str, Callable[[], Factors]] = {
        "independent": lambda: np.ones(request_count),
        "ar10": lambda: _draw_wandering_level(due_s, rng, 10),
        "ar60": lambda: _draw_wandering_level(due_s, rng, 60),
        "stalls": lambda: _draw_stalls(due_s, rng),
        "onoff25": lambda: _draw_on_off(due_s, rng, 25),
        "onoff300": lambda: _draw_on_off(due_s, rng, 300),
        "rare": lambda: _draw_rare_spells(due_s, rng),
        "spells": lambda: _draw_random_spells(due_s, rng),
        "heavy": lambda: rng.lognormal(0, 0.8, request_count),
        "level": lambda: _draw_start_level(due_s, rng, long_run=long_run),
        "warm": lambda: _warm_up(due_s, -0.3, long_run=long_run),
        "cold": lambda: _warm_up(due_s, 1.0, long_run=long_run),
        "bimodal": lambda: np.where(rng.random(request_count) < 0.2, 2.0, 1.0),
        "levels400": lambda: LEVELS_400[drawn.draw_level_indices(due_s, 400.0, 3, rng)],
        "replica90": lambda: _draw_slow_replica(due_s, rng),
    }
    return draws[kind]()


def simulate_rows(
    kind: str,
    seed: int,
    length_s: float,
    *,
    long_run: bool = False,
    slower: float = 1.0,
    server_number: int = 0,
) -> NDArray[np.void]:
    """Return the request records of one simulated run, with Poisson arrivals and no queue.

    Args:
        kind: The kind of server: one of KINDS or a member of the family of drawn servers.
        seed: Draws the arrivals and what happens in this run.
        length_s: Length of the load.
        long_run: Leave out the start-up and the level of one start, which gives the truth.
        slower: An additional factor on all latencies.
        server_number: Which server of a member of the family it is.
    """
    rng = np.random.default_rng([seed, (*KINDS, *drawn.FAMILY_MEMBERS).index(kind)])
    due_s = np.cumsum(rng.exponential(1 / RATE, int(length_s * RATE * 1.2) + 50))
    due_s = due_s[due_s < length_s]
    request_count = len(due_s)
    slowness = draw_slowness_of_kind(
        kind, due_s, rng, long_run=long_run, server_number=server_number
    )
    factor = slowness * slower
    ttft_s = BASE_TTFT_S * rng.lognormal(0, 0.15, request_count) * factor
    itl_s = BASE_ITL_S * rng.lognormal(0, 0.08, request_count) * factor
    records = blank(request_count)
    records["due_ns"] = (due_s * S).astype(np.int64)
    records["output_tokens"] = TOKENS
    records["output_events"] = TOKENS
    records["first_event_tokens"] = 1
    records["input_tokens"] = 150
    records["built_tokens"] = 150
    records["input_source"] = SOURCES.index("server")
    records["output_source"] = SOURCES.index("server")
    stream(
        records,
        (ttft_s * S).astype(np.int64),
        (itl_s * S).astype(np.int64),
        np.full(request_count, MS // 20),
    )

    return records


TrueQuantiles = dict[tuple[str, int], float]


TRUTH_SEED = 999_999  # no seed of a measured run


@cache
def find_true_quantiles(
    kind: str, server_number: int = 0, length_s: float = TRUTH_LENGTH_S
) -> TrueQuantiles:
    """Return the true quantiles of a kind of server in ns, by metric and percentile.

    They are those of one very long run without start-up. Where each start has a level of its own,
    it has the median level.
    """
    rows = simulate_rows(kind, TRUTH_SEED, length_s, long_run=True, server_number=server_number)
    columns = Columns(rows)
    sorted_values = {metric: np.sort(collect_values(columns, metric)) for metric, _ in TERMS}

    quantiles = {}
    for metric, percentile in TERMS:
        values = sorted_values[metric]
        quantiles[metric, percentile] = float(values[quantile_index(len(values), percentile / 100)])

    return quantiles


def signed_horizon_s(length_s: float) -> float:
    """Return the recurrence horizon of a contract for a load of this length.

    It is the default one, or the longest that the load can see.
    """
    return min(intervals.longest_recurrence_s(length_s) * 0.99 / NEARLY_FULL_LENGTH, HORIZON_NS / S)


def count_verdicts(
    kind: str, truth: TrueQuantiles, limit_factor: float, length_s: float, seeds: range
) -> Counter[str]:
    """Validate one simulated run per seed, and count the verdicts of each term.

    The keys are "METRIC pN VERDICT", for example "ttft p95 PASS". Each seed has a server of its own
    if the kind is a member of the family.
    """
    contract = create_contract(truth, limit_factor, length_s)
    counts: Counter[str] = Counter()
    for seed in seeds:
        recorded_run = run(simulate_rows(kind, seed, length_s, server_number=seed))
        (level,) = judge_levels(contract, {LEVEL: MeasuredLevel(runs=(recorded_run,))})
        for (metric, percentile), term in zip(truth, level.terms, strict=True):
            counts[f"{metric} p{percentile} {term.verdict}"] += 1

    return counts


LEVEL = "a"  # the name of the contract's only level


def create_contract(truth: TrueQuantiles, limit_factor: float, length_s: float) -> Contract:
    """Return a contract that limits each true quantile to `limit_factor` times its value.

    Its recurrence horizon fits a load of `length_s`.
    """
    terms = [
        {metric: {"limit": f"{round(quantile_ns * limit_factor)}ns", "at": f"p{percentile}"}}
        for (metric, percentile), quantile_ns in truth.items()
    ]
    contract = {
        "name": "trust",
        "horizon": f"{signed_horizon_s(length_s):.1f}s",
        "levels": [{"name": LEVEL, "workload": "qa", "must": terms}],
    }
    return parse_contract(json.dumps(contract), "trust", {})  # JSON is YAML too


class TermCount(NamedTuple):
    """How many validations gave a term a certain verdict."""

    validations: int
    term: str

    def describe(self) -> str:
        """Return the number, and the term if the number is not zero."""
        return f"{self.validations} {self.term}" if self.validations else "0"


def find_worst_term(counts: Counter[str], verdict_name: str) -> TermCount:
    """Return the term with the most verdicts of this kind."""
    return max(
        TermCount(counts[f"{metric} p{percentile} {verdict_name}"], f"{metric} p{percentile}")
        for metric, percentile in TERMS
    )


def format_over(*, is_good: bool) -> str:
    """Return the mark at the end of a line that exceeds its limit, else ""."""
    return "" if is_good else "   OVER"


def print_validations(kinds: list[str], seeds: range) -> bool:
    """Print the validations of each kind of server; return whether all keep the limit.

    The limit is on wrong PASSes: limits 10 % below the truth must not pass.
    """
    print(
        f"\nvalidate: wrong PASS of {len(seeds)}, limits 10 % below the truth (limit "
        f"{len(seeds) * MAX_WRONG_PASSES:g})"
    )
    lengths = "".join(f"{f'{length_s:,} s':>16}" for length_s in LENGTHS_S)
    print(f"{'server':<12}{lengths}{'10 % above: PASS':>22}{'FAIL':>16}")
    results = [print_validations_of_kind(kind, seeds) for kind in kinds]

    return all(results)


def print_validations_of_kind(kind: str, seeds: range) -> bool:
    """Print the line of one kind of server; return whether its wrong PASSes keep the limit.

    A count is in brackets and has no limit if the changes of the server recur less often than the
    horizon of the contract.
    """
    truth = find_true_quantiles(kind)
    is_good = True

    cells = ""
    for length_s in LENGTHS_S:
        counts = count_verdicts(kind, truth, 0.9, length_s, seeds)
        worst = find_worst_term(counts, verdict.PASS)

        recurs_later = RECURRENCE_S.get(kind, 0) > signed_horizon_s(length_s)
        if recurs_later and length_s < LENGTHS_S[-1]:
            cell = f"({worst.describe()})"
        else:
            cell = worst.describe()
            is_good &= worst.validations <= len(seeds) * MAX_WRONG_PASSES

        cells += f"{cell:>16}"

    above_count = max(len(seeds) // 4, 5)
    above = count_verdicts(kind, truth, 1.1, LENGTHS_S[-1], seeds[:above_count])
    passes = find_worst_term(above, verdict.PASS)
    fails = find_worst_term(above, verdict.FAIL)
    passes_cell = f"{passes.validations} of {above_count} {passes.term}"
    cells += f"{passes_cell:>22}{fails.describe():>16}"
    print(f"{kind:<12}{cells}{format_over(is_good=is_good)}", flush=True)

    return is_good


@dataclass
class FamilyCounts:
    """What the validations of drawn servers gave.

    Limits 10 % below the truth were judged for every server. Each PASS of them is wrong. Limits
    10 % above the truth were judged for a quarter of the servers.
    """

    servers: int = 0
    below_verdicts: Counter[str] = field(default_factory=Counter)  # by "METRIC pN VERDICT"
    servers_with_wrong_pass: int = 0
    above_terms: int = 0
    above_passes: int = 0
    above_fails: int = 0

    def add(self, other: FamilyCounts) -> None:
        """Add the counts of other servers."""
        self.servers += other.servers
        self.below_verdicts += other.below_verdicts
        self.servers_with_wrong_pass += other.servers_with_wrong_pass
        self.above_terms += other.above_terms
        self.above_passes += other.above_passes
        self.above_fails += other.above_fails


def count_verdicts_ending(counts: Counter[str], verdict_name: str) -> int:
    """Return the number of terms with this verdict; the keys are "METRIC pN VERDICT"."""
    return sum(count for key, count in counts.items() if key.endswith(verdict_name))


def validate_drawn_server(member: str, seed: int, length_s: float) -> FamilyCounts:
    """Validate one run on the server of a member that this seed draws."""
    seeds = range(seed, seed + 1)
    truth = find_true_quantiles(member, seed, FAMILY_TRUTH_LENGTH_S)
    below = count_verdicts(member, truth, 0.9, length_s, seeds)
    has_wrong_pass = count_verdicts_ending(below, verdict.PASS) > 0

    counts = FamilyCounts(
        servers=1, below_verdicts=below, servers_with_wrong_pass=int(has_wrong_pass)
    )
    if seed % 4 == 0:
        above = count_verdicts(member, truth, 1.1, length_s, seeds)
        counts.above_terms = len(TERMS)
        counts.above_passes = count_verdicts_ending(above, verdict.PASS)
        counts.above_fails = count_verdicts_ending(above, verdict.FAIL)

    return counts


def print_family(members: list[str], seeds: range) -> bool:
    """Print the validations of drawn servers; return whether each limit is met.

    Each measurement has a server of its own. The limits are on the wrong PASSes of the worst term.
    Next to it is how often any of the nine terms passes, and of limits 10 % above the truth the
    fractions of terms that pass and fail.
    """
    print(
        f"\nfamily: servers drawn from a seed, {len(seeds)} a member; wrong PASS 10 % below the "
        f"truth (95 % interval)"
    )
    print(
        f"{'member':<14}{'load':>9}{'any term':>10}{'worst term':>36}"
        f"{'10 % above: PASS':>18}{'FAIL':>8}"
    )

    is_good = True
    for length_s in LENGTHS_S[1:]:
        totals = FamilyCounts()
        for member in members:
            counts = FamilyCounts()
            for seed in seeds:
                counts.add(validate_drawn_server(member, seed, length_s))
            is_good &= print_family_line(member, counts, length_s, MAX_WRONG_PER_MEMBER)
            totals.add(counts)

        is_good &= print_family_line("all of them", totals, length_s, MAX_WRONG_PASSES)

    return is_good


def print_family_line(
    name: str, counts: FamilyCounts, length_s: float, max_wrong_fraction: float
) -> bool:
    """Print the counts of a member or of all; return whether they keep the limit."""
    worst = find_worst_term(counts.below_verdicts, verdict.PASS)
    term = worst.term if worst.validations else ""
    worst_cell = f"{format_fraction(worst.validations, counts.servers)} {term}".strip()
    any_term = f"{counts.servers_with_wrong_pass / counts.servers:.1%}"
    above_terms = max(counts.above_terms, 1)
    is_good = worst.validations <= max_wrong_fraction * counts.servers
    print(
        f"{name:<14}{f'{length_s:,} s':>9}{any_term:>10}{worst_cell:>36}"
        f"{counts.above_passes / above_terms:>18.0%}{counts.above_fails / above_terms:>8.1%}"
        f"{format_over(is_good=is_good)}",
        flush=True,
    )

    return is_good


class ExtendedVerdicts(NamedTuple):
    """Counts of verdicts of extended validations, by "METRIC pN VERDICT".

    `by_rule` is what `validate --extend` says, which makes later analyses stricter. `uncorrected`
    counts a PASS if any of the analyses passes when each is judged like a first one.
    """

    by_rule: Counter[str]
    uncorrected: Counter[str]


def count_extended_verdicts(
    kind: str, truth: TrueQuantiles, limit_factor: float, length_s: float, seeds: range
) -> ExtendedVerdicts:
    """Count the verdicts of validations that are extended EXTENSIONS times.

    Each extension adds a run of `length_s`; an interim analysis judges all runs so far.
    """
    contract = create_contract(truth, limit_factor, length_s)
    verdicts = ExtendedVerdicts(Counter(), Counter())
    for seed in seeds:
        runs = tuple(
            run(simulate_rows(kind, seed + 100_000 * run_number, length_s))
            for run_number in range(EXTENSIONS + 1)
        )
        verdicts_by_rule = judge_by_rule(contract, runs)

        has_passed = find_uncorrected_passes(contract, runs)
        for term_index, (metric, percentile) in enumerate(truth):
            term = f"{metric} p{percentile}"
            verdicts.by_rule[f"{term} {verdicts_by_rule[term_index]}"] += 1
            verdicts.uncorrected[f"{term} {verdict.PASS}"] += has_passed[term_index]

    return verdicts


def judge_by_rule(contract: Contract, runs: tuple[RecordedRun, ...]) -> list[str]:
    """Return the verdict of each term after the last interim analysis, as `--extend` judges it."""
    run_counts = [{LEVEL: count} for count in range(1, len(runs) + 1)]
    (level,) = judge_interim_analyses(contract, {LEVEL: MeasuredLevel(runs=runs)}, run_counts)
    return [term.verdict for term in level.terms]


def find_uncorrected_passes(contract: Contract, runs: tuple[RecordedRun, ...]) -> list[bool]:
    """Return for each term whether it passes in any analysis that is judged like a first one."""
    has_passed = [False] * len(contract.levels[0].must)
    for run_count in range(1, len(runs) + 1):
        (level,) = judge_levels(contract, {LEVEL: MeasuredLevel(runs=runs[:run_count])})
        for term_index, term in enumerate(level.terms):
            has_passed[term_index] |= term.verdict == verdict.PASS
    return has_passed


def print_extensions(kinds: list[str], seeds: range) -> bool:
    """Print the extended validations; return whether the wrong PASSes keep the limit."""
    limit = len(seeds) * MAX_WRONG_EXTENDED
    title = (
        f"extend: wrong PASS of {len(seeds)} in {EXTENSIONS + 1} looks, limits 10 % below the truth"
    )
    print(f"\n{title} (limit {limit:g})")
    print(
        f"{'server':<12}{'first run':>10}{'by the rule':>16}{'careless':>16}"
        f"{'10 % above: PASS':>22}"
    )
    results = [
        print_extensions_of_kind(kind, length_s, seeds)
        for kind in kinds
        for length_s in LENGTHS_S[:2]
    ]

    return all(results)


def format_fraction(count: int, total: int) -> str:
    """Return a fraction with its 95 % interval."""
    low, high = intervals.wilson_interval(count / total, total, 0.95)
    return f"{count / total:.1%} [{low:.1%}, {high:.1%}]"


def print_extensions_of_kind(kind: str, length_s: float, seeds: range) -> bool:
    """Print the line of a kind of server; return whether its wrong PASSes keep the limit."""
    truth = find_true_quantiles(kind)
    below = count_extended_verdicts(kind, truth, 0.9, length_s, seeds)
    by_rule = find_worst_term(below.by_rule, verdict.PASS)
    uncorrected = find_worst_term(below.uncorrected, verdict.PASS)
    above_seeds = seeds[: max(len(seeds) // 4, 5)]
    above = count_extended_verdicts(kind, truth, 1.1, length_s, above_seeds)
    right = find_worst_term(above.by_rule, verdict.PASS)
    is_good = by_rule.validations <= len(seeds) * MAX_WRONG_EXTENDED
    print(
        f"{kind:<12}{f'{length_s} s':>10}{by_rule.describe():>16}{uncorrected.describe():>16}"
        f"{f'{right.validations} of {len(above_seeds)} {right.term}':>22}"
        f"{format_over(is_good=is_good)}",
        flush=True,
    )

    return is_good


def create_side(
    name: str,
    kind: str,
    seeds: range,
    length_s: float,
    *,
    slower: float = 1.0,
    server_number: int = 0,
) -> Side:
    """Return a side of a comparison, with one simulated run per seed.

    Args:
        name: The name of the side.
        kind: The kind of server: one of KINDS or a member of the family of drawn servers.
        seeds: The seeds of the runs.
        length_s: Length of each load.
        slower: An additional factor on all latencies of the side.
        server_number: Which server of a member of the family it is.
    """
    runs = []
    for seed in seeds:
        rows = simulate_rows(kind, seed, length_s, slower=slower, server_number=server_number)
        manifest = RunManifest(
            run=f"{name}{seed}",
            state="finished",
            targets=(TargetFacts(simulated=True),),
            stages=(StagePlan(name="load", arrival="poisson", slots=len(rows), rate=RATE),),
            # The fingerprint of the workload, which is the same for both sides
            fingerprints=Fingerprints(recipe="1"),
        )
        summary = summarize(manifest, rows)
        runs.append(ComparedRun(name=f"r{seed}", summary=summary, manifest=manifest, rows=rows))

    return Side(name=name, runs=tuple(runs))


@dataclass
class ComparisonCounts:
    """What comparisons of two sides gave.

    `alarms` are pairs of equal servers with any "better" or "worse"; `alarm_metrics` counts the
    metrics of these differences. In `shifted_pairs`, the second side was 15 % slower; `detected`
    are those in which the TPOT p50 is worse. `detectable_changes` has the smallest change that each
    of them would detect, as a fraction.
    """

    pairs: int = 0
    alarms: int = 0
    alarm_metrics: Counter[str] = field(default_factory=Counter)
    shifted_pairs: int = 0
    detected: int = 0
    detectable_changes: list[float] = field(default_factory=list)

    def add_equal(self, differences: Sequence[Difference]) -> None:
        """Count the comparison of two equal servers."""
        alarmed = [
            difference.metric
            for difference in differences
            if difference.detailed_outcome in ("better", "worse")
        ]
        self.pairs += 1
        self.alarms += bool(alarmed)
        self.alarm_metrics.update(alarmed)

    def add_shifted(self, differences: Sequence[Difference]) -> None:
        """Count the comparison with a server that is 15 % slower."""
        (tpot,) = (difference for difference in differences if difference.metric == "tpot_ms.p50")
        self.detected += tpot.detailed_outcome == "worse"
        if tpot.detectable is not None:
            self.detectable_changes.append(tpot.detectable)


def compare_pairs(
    kind: str, pairs: int, length_s: float, repeats: int, *, is_family_member: bool
) -> ComparisonCounts:
    """Compare pairs of equal servers, and half of the pairs again with one side 15 % slower.

    Each pair of a member of the family is a server of its own.
    """
    counts = ComparisonCounts(shifted_pairs=pairs // 2)
    for pair in range(pairs):
        first_seed = 1 + 2 * repeats * pair
        before_seeds = range(first_seed, first_seed + repeats)
        after_seeds = range(first_seed + repeats, first_seed + 2 * repeats)
        number = pair + 1 if is_family_member else 0
        before = create_side("A", kind, before_seeds, length_s, server_number=number)
        after = create_side("B", kind, after_seeds, length_s, server_number=number)
        counts.add_equal(comparison.compare([before, after]).differences)

        if pair < counts.shifted_pairs:
            slower = create_side(
                "B", kind, after_seeds, length_s, slower=1.15, server_number=number
            )
            counts.add_shifted(comparison.compare([before, slower]).differences)

    return counts


def print_comparisons(
    kinds: list[str],
    members: list[str],
    pairs: int,
    length_s: float = 300.0,
    repeats: int = REPEATS,
) -> bool:
    """Print the comparisons of equal servers; return whether false alarms keep the limit.

    The limit is on the pairs of each kind, and on those of all members of the family together.
    """
    print(
        f"\ncompare: {pairs} pairs of equal servers, {repeats} runs of {length_s:g} s a side "
        f"(limit {MAX_FALSE_ALARMS:.0%})"
    )
    print(f"{'server':<14}{'false alarms':>30}{'15 % slower found':>20}{'found from (median)':>22}")

    is_good = True
    for kind in kinds:
        counts = compare_pairs(kind, pairs, length_s, repeats, is_family_member=False)
        is_kind_good = counts.alarms <= pairs * MAX_FALSE_ALARMS
        print_comparison_line(kind, counts, is_good=is_kind_good)
        is_good &= is_kind_good

    family_alarms = 0
    for member in members:
        counts = compare_pairs(member, pairs, length_s, repeats, is_family_member=True)
        print_comparison_line(member, counts, is_good=True)
        family_alarms += counts.alarms

    family_pairs = pairs * len(members)
    if family_pairs:
        is_family_good = family_alarms <= family_pairs * MAX_FALSE_ALARMS
        print(
            f"{'all of them':<14}{format_fraction(family_alarms, family_pairs):>30}"
            f"{format_over(is_good=is_family_good)}",
            flush=True,
        )
        is_good &= is_family_good

    return is_good


def print_comparison_line(name: str, counts: ComparisonCounts, *, is_good: bool) -> None:
    """Print the false alarms and the detected changes of a kind of server."""
    over_text = "" if is_good else f"   OVER {counts.alarm_metrics.most_common(3)}"
    detected = f"{counts.detected} of {counts.shifted_pairs}"

    smallest = "-"
    if counts.detectable_changes:
        smallest = f"{np.median(counts.detectable_changes):.1%}"

    print(
        f"{name:<14}{format_fraction(counts.alarms, counts.pairs):>30}{detected:>20}"
        f"{smallest:>22}{over_text}",
        flush=True,
    )


TRIALS_DRAWN = 60  # more than a search makes


def trial_capacities(
    member: str, number: int, rng: np.random.Generator, length_s: float = 600.0
) -> Iterator[float]:
    """Yield the capacity of a drawn server in one trial after another, relative to its mean.

    A server that is twice as slow has half of the capacity, so the capacity in a trial is the mean
    of 1 / slowness over its seconds.
    """
    server = drawn.draw_server(member, number)
    times_s = np.arange(0, TRIALS_DRAWN * length_s, 1.0)
    slowness = drawn.draw_slowness(server, times_s, rng, long_run=False)
    long_run_slowness = drawn.draw_slowness(
        server,
        np.arange(0, FAMILY_TRUTH_LENGTH_S, 1.0),
        np.random.default_rng([number, 5]),
        long_run=True,
    )

    mean_capacity = float(np.mean(1 / long_run_slowness))
    for trial_slowness in np.split(slowness, TRIALS_DRAWN):
        yield float(np.mean(1 / trial_slowness)) / mean_capacity


class FinishedSearch(NamedTuple):
    """A search, and whether its 95 % interval covers the true capacity."""

    covers_truth: bool
    result: SearchResult


def run_search(
    seed: int, create_factors: Callable[[np.random.Generator], Iterator[float]]
) -> FinishedSearch:
    """Run a search on a server whose capacity differs from trial to trial.

    `create_factors` returns the capacity in one trial after another, relative to the middle
    capacity, which the search has to find. A trial passes if it offers less than its capacity. The
    offered load differs from the planned one by the randomness of Poisson arrivals.
    """
    rng = np.random.default_rng([seed, 77])
    true_capacity = 100.0
    trial_s = 600.0
    low = true_capacity / 4 ** float(rng.uniform(0.2, 0.8))
    search = LoadSearch(SearchSettings(low=low, high=4 * low, run_spread=None))

    factors = create_factors(rng)
    while (trial := search.next_trial()) is not None:
        sampling_noise = 1 / math.sqrt(trial.load * trial_s)
        offered = trial.load * math.exp(rng.normal(0, sampling_noise))
        is_passed = offered < true_capacity * next(factors)
        search.add_result(
            TrialResult(
                trial=trial,
                outcome="under" if is_passed else "over",
                ended_early=False,
                duration_s=trial_s,
                offered_load=offered,
                sampling_noise=sampling_noise,
                reason="",
            )
        )

    interval = search.result.interval
    covers_truth = interval is not None and interval.low <= true_capacity <= interval.high
    return FinishedSearch(covers_truth, search.result)


def start_factors(spread: float) -> Callable[[np.random.Generator], Iterator[float]]:
    """Return a function that yields lognormal factors of this spread."""
    return lambda draw: (math.exp(draw.normal(0, spread)) for _ in count())


def print_searches(members: list[str], seeds: range) -> bool:
    """Print how many intervals of searches cover the truth; return whether enough of them do."""
    print(
        f"\nsearch: 95 % intervals of {len(seeds)} searches that cover the truth (limit "
        f"{MIN_COVERED:.0%})"
    )
    print(f"{'server':<22}{'covered':>10}{'half width':>12}{'trials':>8}")

    is_good = True
    for spread in SPREADS:
        searches = [run_search(seed, start_factors(spread)) for seed in seeds]
        is_good &= print_search_line(f"starts {spread:.1%} apart", searches)

    for member in members:
        searches = [run_search(seed, partial(trial_capacities, member, seed)) for seed in seeds]
        is_good &= print_search_line(member, searches)

    return is_good


def print_search_line(server: str, searches: list[FinishedSearch]) -> bool:
    """Print the searches of one kind of server; return whether enough of them cover the truth."""
    covered = sum(search.covers_truth for search in searches)
    relative_half_widths = [
        search.result.interval.half_width / search.result.interval.value
        for search in searches
        if search.result.interval is not None
    ]
    half_width = f"{np.median(relative_half_widths):.2%}"
    trials = f"{np.mean([search.result.trial_count for search in searches]):.1f}"
    is_good = covered >= MIN_COVERED * len(searches)
    print(
        f"{server:<22}{covered:>10}{half_width:>12}{trials:>8}{format_over(is_good=is_good)}",
        flush=True,
    )

    return is_good


def simulate_wandering_series(
    rng: np.random.Generator, series_count: int, length_s: float, tau_s: float
) -> list[NDArray[np.float64]]:
    """Return series that wander about 1 by 15 % with the time constant `tau_s`.

    Each is a first-order autoregressive process AR(1). The values of a series are means over
    blocks: the test for trends cuts a load of `length_s` into growth.BLOCKS blocks.
    """
    steps_per_block = max(4, round(length_s / growth.BLOCKS / 2))
    steps = growth.BLOCKS * steps_per_block
    correlation = math.exp(-length_s / steps / tau_s)
    noise_factor = math.sqrt(1 - correlation * correlation)
    levels = rng.normal(0, 1, series_count)

    values = np.empty((series_count, steps))
    for step in range(steps):
        levels = correlation * levels + noise_factor * rng.normal(0, 1, series_count)
        values[:, step] = levels

    block_means = values.reshape(series_count, growth.BLOCKS, steps_per_block).mean(axis=2)
    return [*(1 + 0.15 * block_means)]


def simulate_rack_series(member: str, rack: int, length_s: float) -> list[NDArray[np.float64]]:
    """Return the series that the test for trends sees of a rack of drawn servers.

    There are two per replica, which stand for its TTFT and its requests in flight. Both follow the
    slowness of a server of their own, with 5 % of noise. As the test does it, only the second half
    of the load counts, in means over blocks.
    """
    due_s = np.arange(0, length_s, 1.0)
    series_count = 2 * REPLICAS

    series = []
    for series_number in range(series_count):
        server_number = rack * series_count + series_number
        rng = np.random.default_rng([server_number, 11])
        server = drawn.draw_server(member, server_number)
        slowness = drawn.draw_slowness(server, due_s, rng, long_run=False)
        values = slowness * rng.lognormal(0, 0.05, len(due_s))
        series.append(average_blocks(values[len(values) // 2 :]))

    return series


def average_blocks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means over growth.BLOCKS equal blocks, without the values that are left over."""
    values_per_block = len(values) // growth.BLOCKS
    complete_blocks = values[: values_per_block * growth.BLOCKS]
    means: NDArray[np.float64] = complete_blocks.reshape(growth.BLOCKS, -1).mean(1)
    return means


def is_called_growing(series: list[NDArray[np.float64]]) -> bool:
    """Return whether the test for trends says that any of the series grows."""
    trends = trend.find_trends(series)
    return any(series_trend is not None and series_trend.grows for series_trend in trends)


GROWING_MEMBERS = ("diurnal", "autoscaling")  # members whose slowness does grow during a load


def print_family_trends(members: list[str], racks: int) -> bool:
    """Print how often a rack of drawn servers is called growing; return whether it keeps the limit.

    The counts of members that do grow are in brackets and have no limit.
    """
    print(f"{'replicas':<14}{'load':>14}{'called growing':>26}")
    is_good = True
    for member in members:
        for length_s in (600, 2400):
            growing_count = sum(
                is_called_growing(simulate_rack_series(member, rack, length_s))
                for rack in range(racks)
            )
            cell = format_fraction(growing_count, racks)

            is_within_limit = growing_count <= MAX_CALLED_GROWING * racks
            if member in GROWING_MEMBERS:
                cell = f"({cell})"
                is_within_limit = True

            print(
                f"{member:<14}{f'{length_s} s':>14}{cell:>26}"
                f"{format_over(is_good=is_within_limit)}",
                flush=True,
            )
            is_good &= is_within_limit

    return is_good


def print_trends(racks: int) -> bool:
    """Print how often wandering racks are called growing; return whether it keeps the limit.

    The values of a rack wander with a time constant and do not grow. Next to it is in how many of a
    quarter of the racks one replica that doubles is detected.
    """
    print(
        f"\nsustained: {racks} racks of {REPLICAS} replicas that wander, second half of a load "
        f"(limit {MAX_CALLED_GROWING:.0%})"
    )
    print(
        f"{'wanders for':<14}{'second half':>14}{'called growing':>18}"
        f"{'one that doubles found':>26}"
    )
    results = [
        print_trends_of_racks(racks, tau_s, length_s)
        for tau_s in (1, 10, 60)
        for length_s in (150, 300, 600)
    ]

    return all(results)


def print_trends_of_racks(racks: int, tau_s: int, length_s: int) -> bool:
    """Print how often racks with this time constant and length of a load are called growing.

    Returns:
        Whether the false alarms keep the limit.
    """
    doubling_racks = racks // 4
    doubling = np.linspace(2 / 3, 4 / 3, growth.BLOCKS)  # from 2/3 to twice that, with the mean 1
    false_alarms = 0

    detected = 0
    for rack in range(racks):
        rng = np.random.default_rng([rack, tau_s, length_s])
        series = simulate_wandering_series(rng, 2 * REPLICAS, length_s, tau_s)
        false_alarms += is_called_growing(series)
        if rack < doubling_racks:
            series[0] = series[0] * doubling
            first_trend = trend.find_trends(series)[0]
            detected += first_trend is not None and first_trend.grows

    is_good = false_alarms <= MAX_CALLED_GROWING * racks
    print(
        f"{f'{tau_s} s':<14}{f'{length_s} s':>14}{false_alarms / racks:>18.1%}"
        f"{f'{detected} of {doubling_racks}':>26}{format_over(is_good=is_good)}",
        flush=True,
    )
    return is_good


def simulate_short_load(
    member: str, number: int, length_s: float, load_fraction: float
) -> NDArray[np.void]:
    """Return the records of a short load on SERVER_SLOTS slots of a drawn server.

    A request occupies a slot from its first token to its end; it waits while no slot is free. The
    mean service time is such that the load occupies `load_fraction` of the slots on average.
    """
    rng = np.random.default_rng([number, 13, round(length_s), round(100 * load_fraction)])
    rate_per_s = RATE * 4
    due_s = np.sort(rng.random(rng.poisson(rate_per_s * length_s))) * length_s
    server = drawn.draw_server(member, number)
    slowness = drawn.draw_slowness(server, due_s, rng, long_run=False)
    factors = slowness * rng.lognormal(0, 0.5, len(due_s))
    service_times_s = factors / factors.mean() * load_fraction * SERVER_SLOTS / rate_per_s
    records = blank(len(due_s))

    slots_free_at_s = [0.0] * SERVER_SLOTS  # a heap: the next slot that gets free is the first
    for index, (arrival_s, service_s) in enumerate(
        zip(due_s.tolist(), service_times_s.tolist(), strict=True)
    ):
        begin_s = max(arrival_s, heapq.heappop(slots_free_at_s))
        end_ns = round((begin_s + service_s) * S)
        records["first_token_ns"][index] = round(begin_s * S)
        records["end_ns"][index] = end_ns
        records["done_ns"][index] = end_ns
        heapq.heappush(slots_free_at_s, end_ns / S)

    records["due_ns"] = (due_s * S).astype(np.int64)
    records["sent_ns"] = records["due_ns"]
    records["session"] = -1

    return records


SHORT_LENGTHS_S = (15.0, 30.0)


def count_refused_loads(member: str, loads: int, load_fraction: float) -> int:
    """Return how many short loads on drawn servers are called not sustained.

    There are `loads` servers, each with a load of each length.
    """
    refused = 0
    for length_s in SHORT_LENGTHS_S:
        for number in range(loads):
            columns = Columns(simulate_short_load(member, number, length_s, load_fraction))
            refused += shortfall.find_shortfall([columns]) is not None
    return refused


def print_short_loads(members: list[str], loads: int) -> bool:
    """Print how many loads that are too short for a trend are called not sustained.

    The load occupies the fractions SHORT_LOADS of the slots. In the first two the slots suffice, so
    that each refusal is wrong.

    Returns:
        Whether the wrong refusals keep their limits.
    """
    print(f"\nloads of 15 and 30 s, {loads} a member and length: refused as not sustained")
    columns = "".join(f"{f'{fraction:.0%} of the places':>26}" for fraction in SHORT_LOADS)
    print(f"{'member':<14}{columns}")
    loads_per_member = len(SHORT_LENGTHS_S) * loads
    is_good = True

    totals = Counter[float]()
    for member in members:
        refused = {
            fraction: count_refused_loads(member, loads, fraction) for fraction in SHORT_LOADS
        }
        totals.update(refused)
        is_good &= print_refusals(member, refused, loads_per_member, MAX_WRONG_PER_MEMBER)

    all_loads = loads_per_member * len(members)
    is_within_limit = is_refusal_rare(totals, all_loads, MAX_WRONG_PASSES)
    cells = "".join(
        f"{format_fraction(totals[fraction], all_loads):>26}" for fraction in SHORT_LOADS
    )
    print(f"{'all of them':<14}{cells}", flush=True)

    return is_good and is_within_limit


def is_refusal_rare(refused: Mapping[float, int], loads: int, max_fraction: float) -> bool:
    """Return whether few loads are refused where the slots suffice.

    `refused` has the number of refused loads, of `loads`, by the fraction of the slots in use.
    """
    wrongly_refused = max(count for fraction, count in refused.items() if fraction < 1)
    return wrongly_refused <= max_fraction * loads


def print_refusals(
    member: str, refused: Mapping[float, int], loads: int, max_fraction: float
) -> bool:
    """Print the refused loads of a member; return whether the wrong ones keep the limit."""
    is_good = is_refusal_rare(refused, loads, max_fraction)
    cells = "".join(f"{format_fraction(count, loads):>26}" for count in refused.values())
    print(f"{member:<14}{cells}{format_over(is_good=is_good)}", flush=True)
    return is_good


def print_starved(every: int) -> bool:
    """Print the counts of a starved load generator; return if each metric keeps its limits."""
    print(
        "\nstarved: a load generator that gets too little of its machine, against a log of the "
        "truth"
    )
    results = starved.count_false_answers(every)
    print(starved.format_results(results))
    return all(result.is_met for result in results)


def main() -> int:
    """Run the selected parts; return 1 if a limit is exceeded."""
    args = parse_command_line()
    selected_kinds = args.kinds.split(",")
    members = [kind for kind in selected_kinds if kind in drawn.FAMILY_MEMBERS]
    kinds = [kind for kind in selected_kinds if kind not in drawn.FAMILY_MEMBERS]

    if not members:
        members = [*drawn.FAMILY_MEMBERS]

    seeds = range(args.first, args.first + args.seeds)
    parts: dict[str, Callable[[], bool]] = {
        "validate": lambda: print_validations(kinds, seeds),
        "family": lambda: print_family(members, range(args.first, args.first + args.members)),
        "extend": lambda: print_extensions(kinds, seeds),
        "compare": lambda: print_comparisons(kinds, members, args.seeds),
        "search": lambda: print_searches(members, range(1, 1 + args.searches)),
        "sustained": lambda: all(
            [print_trends(args.seeds), print_family_trends(members, args.seeds)]
        ),
        "short": lambda: print_short_loads(members, max(args.members // 2, 1)),
        "starved": lambda: print_starved(args.every),
    }
    selected_parts = args.only.split(",")
    results = [run_part() for name, run_part in parts.items() if name in selected_parts]

    return 0 if all(results) or args.smoke else 1


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument(
        "--members", type=int, default=100, help="measurements of each member of the family"
    )
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="every nth way to starve only")
    parser.add_argument("--first", type=int, default=1, help="the first seed of the validations")
    parser.add_argument(
        "--only", default="validate,family,extend,compare,search,sustained,short,starved"
    )
    parser.add_argument("--kinds", default=",".join(KINDS))

    return rig.parse_arguments(
        parser,
        seeds=2,
        members=1,
        searches=2,
        kinds="cold",
        only="validate,family,extend,compare,search,sustained,short",
    )


if __name__ == "__main__":
    sys.exit(main())
