"""How often a verdict is wrong: terms 10 % off the truth, over many seeds of a queue at 65, 85 and 94 % load.

    python benchmarks/contract_power.py [seeds] [requests]

The truth is the quantile of a long run. A promise 10 % below it must never pass; one 10 % above it may fail by chance,
nominally in 2.5 of 100 (a two-sided 95 % interval). A term whose sample has no power for 10 % says INCONCLUSIVE.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from queueing import rows, run

from loadgen.contract import parse
from loadgen.judge import levels
from loadgen.metrics import Columns
from loadgen.quantiles import index
from loadgen.yardstick import Measured, latencies

TERMS = (("tpot", 50), ("e2e", 50), ("ttft", 50), ("tpot", 95), ("e2e", 95), ("tpot", 99), ("e2e", 99), ("ttft", 99))
LONG = 400_000
Key = tuple[str, int]


KNEE = 11.0
OFF = (0.9, 1.0, 1.1)


def counted(seeds: int, requests: int, rate: float) -> tuple[dict[Key, float], dict[tuple[Key, float], Counter[str]]]:
    """The truth of each term, and how often which verdict came for each promise."""
    long = Columns(rows(0, LONG, rate))
    truth = {}
    for metric, at in TERMS:
        values = np.sort(latencies(long, metric))
        truth[metric, at] = float(values[index(len(values), at / 100)])
    text = "name: power\nlevels:\n"
    for off in OFF:
        text += f"  - name: at-{off}\n    workload: qa\n    must:\n"
        for (metric, at), value in truth.items():
            text += f"      - {metric}: {{limit: {round(value * off)}ns, at: p{at}}}\n"
    contract = parse(text, "power")
    counts: dict[tuple[Key, float], Counter[str]] = {}
    for seed in range(1, seeds + 1):
        measured = Measured(runs=(run(rows(seed, requests, rate)),))
        for off, level in zip(OFF, levels(contract, {one.name: measured for one in contract.levels}), strict=True):
            for key, term in zip(truth, level.terms, strict=True):
                counts.setdefault((key, off), Counter())[term.verdict] += 1
    return truth, counts


def main(seeds: int = 100, requests: int = 2_000) -> int:
    wrong_pass = wrong_fail = 0
    print(f"{seeds} seeds, {requests:,} requests each, 95 % intervals; counts of PASS / FAIL / INCONCLUSIVE")
    for rate in (8.0, 10.0, 11.0):
        truth, counts = counted(seeds, requests, rate)
        print(f"{rate:g}/s      {'truth':>10}   10 % less              the truth itself       10 % more")
        for key, value in truth.items():
            cells = [
                "{:>4} /{:>4} /{:>4}".format(*(counts[key, off][v] for v in ("PASS", "FAIL", "INCONCLUSIVE")))
                for off in OFF
            ]
            print(f"{key[0]} p{key[1]:<5} {value / 1e6:>9.2f}ms   " + "       ".join(cells))
            if rate < KNEE:
                wrong_pass += counts[key, 0.9]["PASS"]
                wrong_fail = max(wrong_fail, counts[key, 1.1]["FAIL"])
    print(f"below the knee: wrong PASS in all {wrong_pass}; most wrong FAILs of a term {wrong_fail}")
    print("at 11/s the queue takes longer to fill than the load lasts: its medians are those of a start")
    return 0 if wrong_pass == 0 and wrong_fail <= seeds // 10 else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
