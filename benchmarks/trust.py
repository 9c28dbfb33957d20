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

import heapq
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count

import drawn
import numpy as np
import rig
import starved
from make_examples import MS, S, blank, stream
from numpy.typing import NDArray
from queueing import run

from loadgen.compare import comparison
from loadgen.contracts import verdict
from loadgen.contracts.judge import judge_interim_analyses, judge_levels
from loadgen.contracts.load_checks import NEARLY_FULL_LENGTH
from loadgen.contracts.recorded_run import MeasuredLevel
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


def _draw_ar1(due_s: Factors, rng: np.random.Generator, tau_s: float) -> Factors:
    """Return a level that wanders by 15 % with a time constant, one value per second."""
    steps = int(float(due_s[-1])) + 2
    correlation = math.exp(-1 / tau_s)
    noise = rng.normal(size=steps)
    level = np.empty(steps)
    level[0] = noise[0]
    for index in range(1, steps):
        innovation = math.sqrt(1 - correlation * correlation) * noise[index]
        level[index] = correlation * level[index - 1] + innovation
    factors: Factors = np.exp(0.15 * level[due_s.astype(int)])
    return factors


def _draw_stalls(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return a factor of 3 for 1 s in each 30 s."""
    return np.where((due_s + rng.uniform(0, 30)) % 30 < 1, 3.0, 1.0)


def _draw_on_off(due_s: Factors, rng: np.random.Generator, cycle_s: float) -> Factors:
    """Return a factor of 1.5 for the last fifth of each cycle."""
    return np.where((due_s + rng.uniform(0, cycle_s)) % cycle_s >= 0.8 * cycle_s, 1.5, 1.0)


def _draw_rare_spells(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return a factor of 3 for 8 s in each 600 s."""
    phase = rng.uniform(0, 600)
    block = ((due_s + phase) / 600).astype(int)
    starts = rng.uniform(0, 592, int(block[-1]) + 1)
    since_start_s = (due_s + phase) % 600 - starts[block]
    return np.where((since_start_s >= 0) & (since_start_s < SPELL_S), 3.0, 1.0)


def _draw_random_spells(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return a factor of 3 for 8 s at random times, on average each 600 s."""
    end_s = float(due_s[-1])
    starts = np.sort(rng.uniform(-8, end_s, rng.poisson((end_s + 8) / 600)))
    if not len(starts):
        return np.ones(len(due_s))
    last = np.searchsorted(starts, due_s, "right") - 1
    is_in_spell = (last >= 0) & (due_s - starts[np.maximum(last, 0)] < SPELL_S)
    return np.where(is_in_spell, 3.0, 1.0)


def _draw_start_levels(due_s: Factors, rng: np.random.Generator, steady: bool) -> Factors:
    """Return one level for the whole start, log-normal with a spread of 5 %."""
    return np.full(len(due_s), 1.0 if steady else float(rng.lognormal(0, 0.05)))


def _warm_up(due_s: Factors, size: float, steady: bool) -> Factors:
    """Return factors that start `size` above 1 and settle within about a minute."""
    return np.ones(len(due_s)) if steady else 1 + size * np.exp(-due_s / 60)


def _draw_slow_replica(due_s: Factors, rng: np.random.Generator) -> Factors:
    """Return a factor of 1.8 for the requests of one of four replicas, while load is high."""
    is_load_high = drawn.draw_wandering_load(due_s, 90.0, rng) > 0.5
    server = drawn.DrawnServer("replicas", 90.0, 0.8, 4, 0.31)
    return drawn.slow_replica_factors(is_load_high, server, rng)


def draw_slowness_of_kind(
    kind: str, due_s: Factors, rng: np.random.Generator, *, steady: bool, number: int = 0
) -> Factors:
    """Return the factor by which each request is slower than the base.

    `steady` leaves out the start-up and the level of one start. `number` identifies the server
    within a member of the family.
    """
    if kind in drawn.FAMILY_MEMBERS:
        return drawn.draw_slowness(drawn.draw_server(kind, number), due_s, rng, steady=steady)
    request_count = len(due_s)
    draws: dict[str, Callable[[], Factors]] = {
        "independent": lambda: np.ones(request_count),
        "ar10": lambda: _draw_ar1(due_s, rng, 10),
        "ar60": lambda: _draw_ar1(due_s, rng, 60),
        "stalls": lambda: _draw_stalls(due_s, rng),
        "onoff25": lambda: _draw_on_off(due_s, rng, 25),
        "onoff300": lambda: _draw_on_off(due_s, rng, 300),
        "rare": lambda: _draw_rare_spells(due_s, rng),
        "spells": lambda: _draw_random_spells(due_s, rng),
        "heavy": lambda: rng.lognormal(0, 0.8, request_count),
        "level": lambda: _draw_start_levels(due_s, rng, steady),
        "warm": lambda: _warm_up(due_s, -0.3, steady),
        "cold": lambda: _warm_up(due_s, 1.0, steady),
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
    steady: bool = False,
    slower: float = 1.0,
    number: int = 0,
) -> NDArray[np.void]:
    """Simulate one run of a kind of server.

    `number` identifies the server within a member of the family.
    """
    rng = np.random.default_rng([seed, (*KINDS, *drawn.FAMILY_MEMBERS).index(kind)])
    due_s = np.cumsum(rng.exponential(1 / RATE, int(length_s * RATE * 1.2) + 50))
    due_s = due_s[due_s < length_s]
    request_count = len(due_s)
    factor = draw_slowness_of_kind(kind, due_s, rng, steady=steady, number=number) * slower
    records = blank(request_count)
    records["due_ns"] = (due_s * S).astype(np.int64)
    records["output_tokens"] = records["output_events"] = TOKENS
    records["first_event_tokens"] = 1
    records["input_tokens"] = records["built_tokens"] = 150
    records["input_source"] = records["output_source"] = SOURCES.index("server")
    ttft_s = BASE_TTFT_S * rng.lognormal(0, 0.15, request_count) * factor
    itl_s = BASE_ITL_S * rng.lognormal(0, 0.08, request_count) * factor
    stream(
        records,
        (ttft_s * S).astype(np.int64),
        (itl_s * S).astype(np.int64),
        np.full(request_count, MS // 20),
    )
    return records


@cache
def find_true_quantiles(
    kind: str, number: int = 0, length_s: float = TRUTH_LENGTH_S
) -> dict[tuple[str, int], float]:
    """Return the quantiles of a very long run, in ns.

    For servers whose starts differ, they are those of the middle level.
    """
    columns = Columns(simulate_rows(kind, 999_999, length_s, steady=True, number=number))
    ordered = {metric: np.sort(collect_values(columns, metric)) for metric, _ in TERMS}
    return {
        (metric, percentile): float(
            ordered[metric][quantile_index(len(ordered[metric]), percentile / 100)]
        )
        for metric, percentile in TERMS
    }


def signed_horizon_s(length_s: float) -> float:
    """Return the recurrence horizon of a contract for a load of this length.

    It is the default one, or the longest that the load can see.
    """
    return min(intervals.longest_recurrence_s(length_s) * 0.99 / NEARLY_FULL_LENGTH, HORIZON_NS / S)


def count_verdicts(
    kind: str,
    truth: dict[tuple[str, int], float],
    limit_factor: float,
    length_s: float,
    seeds: range,
) -> Counter[str]:
    """Count the verdicts of all terms by "METRIC pN VERDICT"."""
    terms = ", ".join(
        f"{{{metric}: {{limit: {round(value * limit_factor)}ns, at: p{percentile}}}}}"
        for (metric, percentile), value in truth.items()
    )
    contract = create_contract(terms, length_s)
    counts: Counter[str] = Counter()
    for seed in seeds:
        recorded = run(simulate_rows(kind, seed, length_s, number=seed))
        (level,) = judge_levels(contract, {"a": MeasuredLevel(runs=(recorded,))})
        for (metric, percentile), term in zip(truth, level.terms, strict=True):
            counts[f"{metric} p{percentile} {term.verdict}"] += 1
    return counts


def create_contract(terms: str, length_s: float) -> Contract:
    """Return a contract with these terms."""
    horizon = f"horizon: {signed_horizon_s(length_s):.1f}s"
    return parse_contract(
        f"name: trust\n{horizon}\nlevels:\n  - {{name: a, workload: qa, must: [{terms}]}}\n",
        "trust",
        {},
    )


def find_worst_term(counts: Counter[str], verdict_name: str) -> tuple[int, str]:
    """Return the term with the most verdicts of a kind, and their number."""
    return max(
        (counts[f"{metric} p{percentile} {verdict_name}"], f"{metric} p{percentile}")
        for metric, percentile in TERMS
    )


def print_validations(kinds: list[str], seeds: range) -> Iterator[bool]:
    """Print the validations of each kind; yield whether its wrong PASSes are within the limit."""
    print(
        f"\nvalidate: wrong PASS of {len(seeds)}, limits 10 % below the truth (limit "
        f"{len(seeds) * MAX_WRONG_PASSES:g})"
    )
    print(
        f"{'server':<12}"
        + "".join(f"{f'{length_s:,} s':>16}" for length_s in LENGTHS_S)
        + f"{'10 % above: PASS':>22}{'FAIL':>16}"
    )
    for kind in kinds:
        truth = find_true_quantiles(kind)
        cells, is_good = "", True
        for length_s in LENGTHS_S:
            count, term = find_worst_term(
                count_verdicts(kind, truth, 0.9, length_s, seeds), verdict.PASS
            )
            cell = f"{count} {term if count else ''}".strip()
            if RECURRENCE_S.get(kind, 0) > signed_horizon_s(length_s) and length_s < LENGTHS_S[-1]:
                cell = f"({cell})"
            else:
                is_good &= count <= len(seeds) * MAX_WRONG_PASSES
            cells += f"{cell:>16}"
        above = count_verdicts(kind, truth, 1.1, LENGTHS_S[-1], seeds[: max(len(seeds) // 4, 5)])
        above_count = max(len(seeds) // 4, 5)
        passes, fails = find_worst_term(above, verdict.PASS), find_worst_term(above, verdict.FAIL)
        passes_cell = f"{passes[0]} of {above_count} {passes[1]}"
        fails_cell = f"{fails[0]} {fails[1]}" if fails[0] else "0"
        cells += f"{passes_cell:>22}{fails_cell:>16}"
        print(f"{kind:<12}{cells}{'' if is_good else '   OVER'}", flush=True)
        yield is_good


def print_family(members: list[str], seeds: range) -> Iterator[bool]:
    """Print the validations of the family; yield whether each limit is met.

    Each measurement has a server of its own. The limits are those of the worst term. Next to it are
    how often any of the nine terms passes, and of limits 10 % above the truth the fractions of
    terms that pass and fail.
    """
    print(
        f"\nfamily: servers drawn from a seed, {len(seeds)} a member; wrong PASS 10 % below the "
        f"truth (95 % interval)"
    )
    print(
        f"{'member':<14}{'load':>9}{'any term':>10}{'worst term':>36}"
        f"{'10 % above: PASS':>18}{'FAIL':>8}"
    )
    for length_s in LENGTHS_S[1:]:
        totals: Counter[str] = Counter()
        measured = 0
        for member in members:
            counts: Counter[str] = Counter()
            for seed in seeds:
                truth = find_true_quantiles(member, seed, FAMILY_TRUTH_LENGTH_S)
                below = count_verdicts(member, truth, 0.9, length_s, range(seed, seed + 1))
                counts.update(below)
                counts["wrong"] += any(key.endswith(verdict.PASS) for key in below)
                if seed % 4 == 0:
                    above = count_verdicts(member, truth, 1.1, length_s, range(seed, seed + 1))
                    counts["asked above"] += len(TERMS)
                    counts["above"] += sum(
                        verdict_count
                        for key, verdict_count in above.items()
                        if key.endswith(verdict.PASS)
                    )
                    counts["missed"] += sum(
                        verdict_count
                        for key, verdict_count in above.items()
                        if key.endswith(verdict.FAIL)
                    )
            yield _print_family_line(member, counts, length_s, len(seeds), MAX_WRONG_PER_MEMBER)
            totals.update(counts)
            measured += len(seeds)
        yield _print_family_line("all of them", totals, length_s, measured, MAX_WRONG_PASSES)


def _print_family_line(
    name: str, counts: Counter[str], length_s: float, measured: int, limit: float
) -> bool:
    """Print one line of the family and return whether it is within its limit."""
    count, term = find_worst_term(counts, verdict.PASS)
    any_term = f"{counts['wrong'] / measured:.1%}"
    worst_text = f"{format_fraction(count, measured)} {term if count else ''}".strip()
    above_count = max(counts["asked above"], 1)
    is_good = count <= limit * measured
    print(
        f"{name:<14}{f'{length_s:,} s':>9}{any_term:>10}{worst_text:>36}"
        f"{counts['above'] / above_count:>18.0%}{counts['missed'] / above_count:>8.1%}"
        f"{'' if is_good else '   OVER'}",
        flush=True,
    )
    return is_good


def count_extended_verdicts(
    kind: str,
    truth: dict[tuple[str, int], float],
    limit_factor: float,
    length_s: float,
    seeds: range,
) -> tuple[Counter[str], Counter[str]]:
    """Count verdicts of extended validations: by the rule, and with each analysis as the first.

    The keys are "METRIC pN VERDICT".
    """
    terms = ", ".join(
        f"{{{metric}: {{limit: {round(value * limit_factor)}ns, at: p{percentile}}}}}"
        for (metric, percentile), value in truth.items()
    )
    contract = create_contract(terms, length_s)
    run_counts = [{"a": runs} for runs in range(1, EXTENSIONS + 2)]
    by_rule: Counter[str] = Counter()
    careless: Counter[str] = Counter()
    for seed in seeds:
        runs = tuple(
            run(simulate_rows(kind, seed + 100_000 * judged, length_s))
            for judged in range(EXTENSIONS + 1)
        )
        (level,) = judge_interim_analyses(contract, {"a": MeasuredLevel(runs=runs)}, run_counts)
        judged_by_analysis = [
            judge_levels(contract, {"a": MeasuredLevel(runs=runs[: index + 1])})[0]
            for index in range(len(runs))
        ]
        for term_index, (metric, percentile) in enumerate(truth):
            by_rule[f"{metric} p{percentile} {level.terms[term_index].verdict}"] += 1
            passed = any(
                judged.terms[term_index].verdict == verdict.PASS for judged in judged_by_analysis
            )
            careless[f"{metric} p{percentile} {verdict.PASS}"] += passed
    return by_rule, careless


def print_extensions(kinds: list[str], seeds: range) -> Iterator[bool]:
    """Print the extended validations; yield whether each kind is within the limit."""
    limit = len(seeds) * MAX_WRONG_EXTENDED
    title = (
        f"extend: wrong PASS of {len(seeds)} in {EXTENSIONS + 1} looks, limits 10 % below the truth"
    )
    print(f"\n{title} (limit {limit:g})")
    print(
        f"{'server':<12}{'first run':>10}{'by the rule':>16}{'careless':>16}"
        f"{'10 % above: PASS':>22}"
    )
    for kind in kinds:
        truth = find_true_quantiles(kind)
        for length_s in LENGTHS_S[:2]:
            by_rule, careless = (
                find_worst_term(counts, verdict.PASS)
                for counts in count_extended_verdicts(kind, truth, 0.9, length_s, seeds)
            )
            above_seeds = seeds[: max(len(seeds) // 4, 5)]
            above = find_worst_term(
                count_extended_verdicts(kind, truth, 1.1, length_s, above_seeds)[0], verdict.PASS
            )
            is_good = by_rule[0] <= limit
            cells = [
                f"{count} {term if count else ''}".strip() for count, term in (by_rule, careless)
            ]
            print(
                f"{kind:<12}{f'{length_s} s':>10}{cells[0]:>16}{cells[1]:>16}"
                f"{f'{above[0]} of {len(above_seeds)} {above[1]}':>22}"
                f"{'' if is_good else '   OVER'}",
                flush=True,
            )
            yield is_good


def format_fraction(count: int, total: int) -> str:
    """Return a fraction with its 95 % interval."""
    low, high = intervals.wilson(count / total, total, 0.95)
    return f"{count / total:.1%} [{low:.1%}, {high:.1%}]"


def create_side(
    name: str, kind: str, seeds: range, length_s: float, slower: float = 1.0, number: int = 0
) -> Side:
    """Return a side of a comparison with one run per seed."""
    runs = []
    for seed in seeds:
        rows = simulate_rows(kind, seed, length_s, slower=slower, number=number)
        manifest = RunManifest(
            run=f"{name}{seed}",
            state="finished",
            targets=(TargetFacts(simulated=True),),
            stages=(StagePlan(name="load", arrival="poisson", slots=len(rows), rate=RATE),),
            fingerprints=Fingerprints(recipe="1"),
        )
        runs.append(
            ComparedRun(
                name=f"r{seed}", summary=summarize(manifest, rows), manifest=manifest, rows=rows
            )
        )
    return Side(name=name, runs=tuple(runs))


def print_comparisons(
    kinds: list[str],
    members: list[str],
    pairs: int,
    length_s: float = 300.0,
    repeats: int = REPEATS,
) -> Iterator[bool]:
    """Print the comparisons of equal servers; yield whether false alarms are within the limit."""
    print(
        f"\ncompare: {pairs} pairs of equal servers, {repeats} runs of {length_s:g} s a side "
        f"(limit {MAX_FALSE_ALARMS:.0%})"
    )
    print(f"{'server':<14}{'false alarms':>30}{'15 % slower found':>20}{'found from (median)':>22}")
    of_family = total = 0
    for kind in (*kinds, *members):
        alarms = detected = 0
        alarm_metrics: Counter[str] = Counter()
        detectable_changes = []
        for pair in range(pairs):
            first = 1 + 2 * repeats * pair
            number = pair + 1 if kind in members else 0
            before = create_side("A", kind, range(first, first + repeats), length_s, number=number)
            seeds = range(first + repeats, first + 2 * repeats)
            equal_comparison = comparison.compare(
                [before, create_side("B", kind, seeds, length_s, number=number)]
            )
            alarmed = [
                difference.metric
                for difference in equal_comparison.differences
                if difference.detailed_outcome in ("better", "worse")
            ]
            alarm_metrics.update(alarmed)
            alarms += bool(alarmed)
            if pair < pairs // 2:
                shifted = comparison.compare(
                    [before, create_side("B", kind, seeds, length_s, 1.15, number)]
                )
                (tpot,) = (
                    difference
                    for difference in shifted.differences
                    if difference.metric == "tpot_ms.p50"
                )
                detected += tpot.detailed_outcome == "worse"
                if tpot.detectable is not None:
                    detectable_changes.append(tpot.detectable)
        is_good = kind in members or alarms <= pairs * MAX_FALSE_ALARMS
        of_family, total = of_family + alarms * (kind in members), total + pairs * (kind in members)
        over_text = f"   OVER {alarm_metrics.most_common(3)}" if not is_good else ""
        smallest = f"{np.median(detectable_changes):.1%}" if detectable_changes else "-"
        print(
            f"{kind:<14}{format_fraction(alarms, pairs):>30}{f'{detected} of {pairs // 2}':>20}"
            f"{smallest:>22}{over_text}",
            flush=True,
        )
        yield is_good
    if total:
        is_good = of_family <= total * MAX_FALSE_ALARMS
        print(
            f"{'all of them':<14}{format_fraction(of_family, total):>30}"
            f"{'' if is_good else '   OVER'}",
            flush=True,
        )
        yield is_good


def trial_capacities(
    member: str, number: int, rng: np.random.Generator, length_s: float = 600.0
) -> Iterator[float]:
    """Yield the capacity of a drawn server in one trial after another, relative to its mean."""
    server = drawn.draw_server(member, number)
    factors = drawn.draw_slowness(server, np.arange(0, 60 * length_s, 1.0), rng, steady=False)
    long_times_s = np.arange(0, FAMILY_TRUTH_LENGTH_S, 1.0)
    average = float(
        np.mean(
            1
            / drawn.draw_slowness(
                server, long_times_s, np.random.default_rng([number, 5]), steady=True
            )
        )
    )
    for trial in np.split(factors, 60):
        yield float(np.mean(1 / trial)) / average


def run_search(
    seed: int, create_factors: Callable[[np.random.Generator], Iterator[float]]
) -> tuple[bool, SearchResult]:
    """Run a search on a server whose capacity changes with each start.

    Return whether its interval covers the middle capacity, and the result.
    """
    rng = np.random.default_rng([seed, 77])
    truth = 100.0
    low = truth / 4 ** float(rng.uniform(0.2, 0.8))
    search = LoadSearch(SearchSettings(low=low, high=4 * low, run_spread=None))
    factors = create_factors(rng)
    while (trial := search.next_trial()) is not None:
        request_count = trial.load * 600
        offered = trial.load * math.exp(rng.normal(0, 1 / math.sqrt(request_count)))
        is_passed = offered < truth * next(factors)
        search.add_result(
            TrialResult(
                trial=trial,
                outcome="under" if is_passed else "over",
                ended_early=False,
                duration_s=600.0,
                offered_load=offered,
                sampling_noise=1 / math.sqrt(request_count),
                reason="",
            )
        )
    result = search.result
    return (
        result.interval is not None and result.interval.low <= truth <= result.interval.high,
        result,
    )


def start_factors(spread: float) -> Callable[[np.random.Generator], Iterator[float]]:
    """Return a function that yields lognormal factors of this spread."""
    return lambda draw: (math.exp(draw.normal(0, spread)) for _ in count())


def print_searches(members: list[str], seeds: range) -> Iterator[bool]:
    """Print the coverage of the searches; yield whether it is within the limit."""
    print(
        f"\nsearch: 95 % intervals of {len(seeds)} searches that cover the truth (limit "
        f"{MIN_COVERED:.0%})"
    )
    print(f"{'server':<22}{'covered':>10}{'half width':>12}{'trials':>8}")
    names: tuple[str | float, ...] = (*SPREADS, *members)
    for name in names:
        results = []
        for seed in seeds:
            create_factors = (
                partial(trial_capacities, name, seed)
                if isinstance(name, str)
                else start_factors(name)
            )
            results.append(run_search(seed, create_factors))
        covered = sum(covers for covers, _ in results)
        widths = [
            result.interval.half_width / result.interval.value
            for _, result in results
            if result.interval is not None
        ]
        is_good = covered >= MIN_COVERED * len(seeds)
        server = name if isinstance(name, str) else f"starts {name:.1%} apart"
        width, trials = (
            f"{np.median(widths):.2%}",
            f"{np.mean([result.trial_count for _, result in results]):.1f}",
        )
        print(
            f"{server:<22}{covered:>10}{width:>12}{trials:>8}{'' if is_good else '   OVER'}",
            flush=True,
        )
        yield is_good


def simulate_wandering_series(
    rng: np.random.Generator, series: int, length_s: float, tau_s: float
) -> list[NDArray[np.float64]]:
    """Return block means of series that wander about 1 by 15 % with a time constant `tau_s`.

    They are AR(1) series, cut as the test for trends cuts them.
    """
    steps_per_block = max(4, round(length_s / growth.BLOCKS / 2))
    steps = growth.BLOCKS * steps_per_block
    correlation = math.exp(-length_s / steps / tau_s)
    value = rng.normal(0, 1, series)
    values = np.empty((series, steps))
    for index in range(steps):
        value = correlation * value + math.sqrt(1 - correlation * correlation) * rng.normal(
            0, 1, series
        )
        values[:, index] = value
    return [*(1 + 0.15 * values.reshape(series, growth.BLOCKS, steps_per_block).mean(axis=2))]


def simulate_rack_series(member: str, rack: int, length_s: float) -> list[NDArray[np.float64]]:
    """Return block means of TTFT and requests in flight of a rack, in the second half of a load.

    Each replica is a server of the family.
    """
    due_s = np.arange(0, length_s, 1.0)
    series = []
    for replica in range(2 * REPLICAS):
        number = rack * 2 * REPLICAS + replica
        rng = np.random.default_rng([number, 11])
        values = drawn.draw_slowness(
            drawn.draw_server(member, number), due_s, rng, steady=False
        ) * rng.lognormal(0, 0.05, len(due_s))
        second_half = values[len(values) // 2 :]
        series.append(
            second_half[: len(second_half) // growth.BLOCKS * growth.BLOCKS]
            .reshape(growth.BLOCKS, -1)
            .mean(1)
        )
    return series


def print_family_trends(members: list[str], racks: int) -> Iterator[bool]:
    """Print how often a rack of drawn servers is called growing; yield if within the limit."""
    print(f"{'replicas':<14}{'load':>14}{'called growing':>26}")
    for member in members:
        for length_s in (600, 2400):
            false_count = sum(
                any(
                    trend_found.grows
                    for trend_found in trend.find_trends(
                        simulate_rack_series(member, rack, length_s)
                    )
                    if trend_found
                )
                for rack in range(racks)
            )
            is_growing = member in ("diurnal", "autoscaling")
            is_good = is_growing or false_count <= MAX_CALLED_GROWING * racks
            cell = (
                f"({format_fraction(false_count, racks)})"
                if is_growing
                else format_fraction(false_count, racks)
            )
            print(
                f"{member:<14}{f'{length_s} s':>14}{cell:>26}{'' if is_good else '   OVER'}",
                flush=True,
            )
            yield is_good


def print_trends(racks: int) -> Iterator[bool]:
    """Print how often wandering racks are called growing; yield if within the limit."""
    print(
        f"\nsustained: {racks} racks of {REPLICAS} replicas that wander, second half of a load "
        f"(limit {MAX_CALLED_GROWING:.0%})"
    )
    print(
        f"{'wanders for':<14}{'second half':>14}{'called growing':>18}"
        f"{'one that doubles found':>26}"
    )
    for tau_s in (1, 10, 60):
        for length_s in (150, 300, 600):
            false_count = detected = 0
            for rack in range(racks):
                rng = np.random.default_rng([rack, tau_s, length_s])
                series = simulate_wandering_series(rng, 2 * REPLICAS, length_s, tau_s)
                false_count += any(
                    trend_found.grows for trend_found in trend.find_trends(series) if trend_found
                )
                if rack < racks // 4:
                    series[0] = series[0] * np.linspace(2 / 3, 4 / 3, growth.BLOCKS)
                    first_trend = trend.find_trends(series)[0]
                    detected += first_trend is not None and first_trend.grows
            is_good = false_count <= MAX_CALLED_GROWING * racks
            print(
                f"{f'{tau_s} s':<14}{f'{length_s} s':>14}{false_count / racks:>18.1%}"
                f"{f'{detected} of {racks // 4}':>26}"
                f"{'' if is_good else '   OVER'}",
                flush=True,
            )
            yield is_good


def simulate_short_load(member: str, number: int, length_s: float, load: float) -> NDArray[np.void]:
    """Return rows of a load on SERVER_SLOTS slots of a drawn server.

    The load occupies `load` of the slots on average.
    """
    rng = np.random.default_rng([number, 13, round(length_s), round(100 * load)])
    due_s = np.sort(rng.random(rng.poisson(RATE * 4 * length_s))) * length_s
    factors = drawn.draw_slowness(
        drawn.draw_server(member, number), due_s, rng, steady=False
    ) * rng.lognormal(0, 0.5, len(due_s))
    service_times_s = factors / factors.mean() * load * SERVER_SLOTS / (RATE * 4)
    free_at_s = [0.0] * SERVER_SLOTS
    records = blank(len(due_s))
    for index, (scheduled_s, service_s) in enumerate(
        zip(due_s.tolist(), service_times_s.tolist(), strict=True)
    ):
        begun_s = max(scheduled_s, heapq.heappop(free_at_s))
        records["first_token_ns"][index] = round(begun_s * S)
        records["end_ns"][index] = records["done_ns"][index] = round((begun_s + service_s) * S)
        heapq.heappush(free_at_s, records["done_ns"][index] / S)
    records["due_ns"], records["session"] = (due_s * S).astype(np.int64), -1
    records["sent_ns"] = records["due_ns"]
    return records


def print_short_loads(members: list[str], loads: int) -> Iterator[bool]:
    """Print loads that are too short for a trend; yield if few are refused wrongly.

    They are refused as not sustained, with enough slots and with too few.
    """
    print(f"\nloads of 15 and 30 s, {loads} a member and length: refused as not sustained")
    print(
        f"{'member':<14}"
        + "".join(f"{f'{load_fraction:.0%} of the places':>26}" for load_fraction in SHORT_LOADS)
    )
    totals = [0] * len(SHORT_LOADS)
    for member in members:
        refused = [
            sum(
                shortfall.find_shortfall(
                    [Columns(simulate_short_load(member, number, length_s, load_fraction))]
                )
                is not None
                for length_s in (15.0, 30.0)
                for number in range(loads)
            )
            for load_fraction in SHORT_LOADS
        ]
        totals = [
            total + refused_count for total, refused_count in zip(totals, refused, strict=True)
        ]
        is_good = max(refused[:2]) <= MAX_WRONG_PER_MEMBER * 2 * loads
        cells = "".join(f"{format_fraction(count, 2 * loads):>26}" for count in refused)
        print(f"{member:<14}{cells}{'' if is_good else '   OVER'}", flush=True)
        yield is_good
    load_count = 2 * loads * len(members)
    print(
        f"{'all of them':<14}"
        + "".join(f"{format_fraction(count, load_count):>26}" for count in totals),
        flush=True,
    )
    yield max(totals[:2]) <= MAX_WRONG_PASSES * load_count


def print_starved(every: int) -> Iterator[bool]:
    """Print the counts of a starved load generator; yield if each metric is within its limits."""
    print(
        "\nstarved: a load generator that gets too little of its machine, against a log of the "
        "truth"
    )
    results = starved.count_false_answers(every)
    print(starved.format_results(results))
    yield from (row.is_met for row in results)


def main() -> int:
    """Run the selected parts; return 1 if a limit is exceeded."""
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
    args = rig.parse_arguments(
        parser,
        seeds=2,
        members=1,
        searches=2,
        kinds="cold",
        only="validate,family,extend,compare,search,sustained,short",
    )
    seeds = args.seeds
    kinds, parts = args.kinds.split(","), args.only.split(",")
    is_good = True
    members = [kind for kind in kinds if kind in drawn.FAMILY_MEMBERS] or [*drawn.FAMILY_MEMBERS]
    kinds = [kind for kind in kinds if kind not in members]
    if "validate" in parts:
        is_good &= all([*print_validations(kinds, range(args.first, args.first + seeds))])
    if "family" in parts:
        is_good &= all([*print_family(members, range(args.first, args.first + args.members))])
    if "extend" in parts:
        is_good &= all([*print_extensions(kinds, range(args.first, args.first + seeds))])
    if "compare" in parts:
        is_good &= all([*print_comparisons(kinds, members, seeds)])
    if "search" in parts:
        is_good &= all([*print_searches(members, range(1, 1 + args.searches))])
    if "sustained" in parts:
        is_good &= all([*print_trends(seeds), *print_family_trends(members, seeds)])
    if "short" in parts:
        is_good &= all([*print_short_loads(members, max(args.members // 2, 1))])
    if "starved" in parts:
        is_good &= all([*print_starved(args.every)])
    return 0 if is_good or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
