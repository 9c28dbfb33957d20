"""How often does `loadgen compare` see a difference between equal servers? Part of trust.py.

Each side of a comparison has three runs of 300 s on a simulated server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from trust_servers import RATE_PER_S, KnownServer, create_server, simulate_run
from trust_tables import Column, RowTable, format_fraction

from loadgen.compare import comparison
from loadgen.compare.difference import Difference
from loadgen.core.results.manifest import Fingerprints, RunManifest, StagePlan, TargetFacts
from loadgen.core.run_summary import summarize
from loadgen.runs.comparison_side import ComparedRun, Side

RUNS_PER_SIDE = 3
RUN_LENGTH_S = 300.0
SLOWDOWN = 1.15  # one side of a changed pair is 15 % slower
MAX_FALSE_ALARM_FRACTION = 0.07


def create_side(
    name: str, server: KnownServer, seeds: Iterable[int], *, slowdown: float = 1.0
) -> Side:
    """Return a side of a comparison, with one simulated run per seed.

    `slowdown` is an additional factor on all latencies of the side.
    """
    runs = []
    for seed in seeds:
        records = simulate_run(server, seed, RUN_LENGTH_S, slowdown=slowdown)
        stage = StagePlan(name="load", arrival="poisson", slots=len(records), rate=RATE_PER_S)
        manifest = RunManifest(
            run=f"{name}{seed}",
            state="finished",
            targets=(TargetFacts(simulated=True),),
            stages=(stage,),
            # The fingerprint of the workload, which is the same for both sides
            fingerprints=Fingerprints(recipe="1"),
        )
        summary = summarize(manifest, records)
        runs.append(ComparedRun(name=f"r{seed}", summary=summary, manifest=manifest, rows=records))

    return Side(name=name, runs=tuple(runs))


@dataclass
class ComparisonCounts:
    """What the comparisons of several pairs of servers found.

    Attributes:
        equal_pairs: How many pairs of equal servers were compared.
        false_alarms: How many of them have a metric that is "better" or "worse".
        alarm_metrics: How often each metric caused a false alarm.
        changed_pairs: How many pairs were compared with one side slower by the factor SLOWDOWN.
        detected: How many of them have a TPOT p50 that is "worse".
        detectable_changes: The smallest change of the TPOT p50 that each comparison of a changed
            pair would detect, as a fraction.
    """

    equal_pairs: int = 0
    false_alarms: int = 0
    alarm_metrics: Counter[str] = field(default_factory=Counter)
    changed_pairs: int = 0
    detected: int = 0
    detectable_changes: list[float] = field(default_factory=list)

    def add_equal_pair(self, differences: Sequence[Difference]) -> None:
        """Count the result of the comparison of two equal servers."""
        alarm_metrics = [
            difference.metric
            for difference in differences
            if difference.detailed_outcome in ("better", "worse")
        ]
        self.equal_pairs += 1
        self.alarm_metrics.update(alarm_metrics)
        if alarm_metrics:
            self.false_alarms += 1

    def add_changed_pair(self, differences: Sequence[Difference]) -> None:
        """Count the result of the comparison with a server that is slower."""
        (tpot_p50,) = [
            difference for difference in differences if difference.metric == "tpot_ms.p50"
        ]
        self.changed_pairs += 1
        if tpot_p50.detailed_outcome == "worse":
            self.detected += 1
        if tpot_p50.detectable is not None:
            self.detectable_changes.append(tpot_p50.detectable)

    def is_within_limit(self) -> bool:
        """Return whether false alarms are rare enough."""
        return self.false_alarms <= MAX_FALSE_ALARM_FRACTION * self.equal_pairs

    def format_cells(self, kind: str) -> list[str]:
        """Return the row of a kind of server."""
        median_change = "-"
        if self.detectable_changes:
            median_change = f"{np.median(self.detectable_changes):.1%}"

        return [
            kind,
            format_fraction(self.false_alarms, self.equal_pairs),
            f"{self.detected} of {self.changed_pairs}",
            median_change,
        ]


def compare_pairs(kind: str, pair_count: int) -> ComparisonCounts:
    """Compare pairs of equal servers, and half of them again with the second side slower.

    If the servers of the kind are drawn from a seed, each pair has another server.
    """
    counts = ComparisonCounts()
    for pair in range(pair_count):
        server = create_server(kind, server_seed=pair + 1)
        # No two runs have the same seed: a pair takes the next seeds for its runs.
        first_seed = 1 + 2 * RUNS_PER_SIDE * pair
        before_seeds = range(first_seed, first_seed + RUNS_PER_SIDE)
        after_seeds = range(first_seed + RUNS_PER_SIDE, first_seed + 2 * RUNS_PER_SIDE)

        before = create_side("A", server, before_seeds)
        equal = create_side("B", server, after_seeds)
        counts.add_equal_pair(comparison.compare([before, equal]).differences)

        if pair < pair_count // 2:
            slower = create_side("B", server, after_seeds, slowdown=SLOWDOWN)
            counts.add_changed_pair(comparison.compare([before, slower]).differences)

    return counts


def print_comparisons(
    fixed_kinds: Sequence[str], drawn_kinds: Sequence[str], pair_count: int
) -> bool:
    """Print how often equal servers are called different, and slower servers are detected.

    Returns:
        Whether the false alarms are within their limit, for each of the fixed kinds of servers,
        and for all drawn kinds together.
    """
    print(
        f"\ncompare: {pair_count} pairs of equal servers, {RUNS_PER_SIDE} runs of "
        f"{RUN_LENGTH_S:g} s a side (limit {MAX_FALSE_ALARM_FRACTION:.0%})"
    )
    table = RowTable(
        Column("server", 14),
        Column("false alarms", 30),
        Column("15 % slower detected", 24),
        Column("detectable (median)", 22),
    )
    table.print_header()

    is_within_limit = True
    for kind in fixed_kinds:
        counts = compare_pairs(kind, pair_count)
        table.print_row(counts.format_cells(kind), is_within_limit=counts.is_within_limit())
        if not counts.is_within_limit():
            print(f"most frequent false alarms: {counts.alarm_metrics.most_common(3)}")
            is_within_limit = False

    if drawn_kinds:
        is_within_limit &= print_drawn_comparisons(table, drawn_kinds, pair_count)
    return is_within_limit


def print_drawn_comparisons(table: RowTable, kinds: Sequence[str], pair_count: int) -> bool:
    """Print the rows of kinds of servers that are drawn from a seed.

    Returns:
        Whether the false alarms of all kinds together are within their limit.
    """
    all_kinds = ComparisonCounts()
    for kind in kinds:
        counts = compare_pairs(kind, pair_count)
        table.print_row(counts.format_cells(kind))
        all_kinds.equal_pairs += counts.equal_pairs
        all_kinds.false_alarms += counts.false_alarms
        all_kinds.changed_pairs += counts.changed_pairs
        all_kinds.detected += counts.detected
        all_kinds.detectable_changes += counts.detectable_changes

    table.print_row(
        all_kinds.format_cells("all of them"), is_within_limit=all_kinds.is_within_limit()
    )
    return all_kinds.is_within_limit()
