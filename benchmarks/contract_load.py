"""How well `validate --dry-run` predicts the load that a term needs: against validations of twice and half of it.

    python benchmarks/contract_load.py [--seeds 5] [--contracts chatbot,rag] [--factor 2]

The prediction is made once (seed 1) on the simulated GB300 VM. Then each level is run by itself, in virtual time and
with other seeds, for the predicted load of each of its terms times the factor, where the term should be decided, and
divided by it, where it should not be. Printed: how often that is so. Terms that compare levels, those whose need is
outside of what was simulated, and loads of more than 60,000 requests are left out.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import rig
from msgspec.structs import replace

from loadgen.contracts import level_plan, prediction, verdict
from loadgen.contracts.judge import judge_levels
from loadgen.contracts.level_plan import CheckedContract, LevelPlan
from loadgen.contracts.loading import load_contract
from loadgen.contracts.recorded_run import MeasuredLevel
from loadgen.contracts.stored_validation import read_run
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute

CONTRACTS = "chatbot,summarization,rag,agentic"
LIMIT = 0.9  # share of the checks that come out as predicted


def decided(checked: CheckedContract, planned: LevelPlan, load_s: float, seed: int) -> list[bool]:
    """Which terms of a level are decided after so much load over all its runs."""
    runs = []
    settings = replace(prediction.simulated_settings(Settings()), gpus=checked.contract.gpus)
    for number in range(planned.level.repeats):
        with tempfile.TemporaryDirectory() as folder:
            workload = level_plan.with_measured_duration(
                planned.workload, round(load_s * 1e9 / planned.level.repeats)
            )
            workload = workload.model_copy(update={"seed": 1000 * seed + number})
            _, kept = execute(workload, replace(settings, out=Path(folder) / "run"))
            runs.append(read_run(kept, Path(folder)))
    contract = checked.contract.model_copy(update={"levels": (planned.level,)})
    (level,) = judge_levels(contract, {planned.level.name: MeasuredLevel(runs=tuple(runs))})
    return [term.verdict != verdict.INCONCLUSIVE for term in level.terms]


def check(name: str, seeds: range, factor: float, most: int) -> Counter[str]:
    """Counts of "decided", "undecided" (as predicted) and of "... of" (tried); prints each term.

    `most`: only the first so many terms of each level.
    """
    checked = load_contract(Path(name))
    counts: Counter[str] = Counter()
    forecasts = prediction.forecast_levels(
        checked,
        prediction.simulated_settings(Settings()),
        prediction.ForecastOptions(perform=execute, seed=1),
    )
    for planned, forecast in zip(checked.levels, forecasts, strict=True):
        shortest_s = forecast.length_s * prediction.MIN_LENGTH_FRACTION * 1.2
        terms = (*planned.level.must, *planned.level.should)[:most]
        for place, (term, needed) in enumerate(zip(terms, forecast.terms, strict=False)):
            if needed.needed_s is None or term.level:
                continue
            cells = []
            for word, load_s in (
                ("decided", needed.needed_s * factor),
                ("undecided", needed.needed_s / factor),
            ):
                requests = (
                    (planned.requests or 0) * load_s / forecast.length_s * planned.level.repeats
                )
                if requests > prediction.MAX_REQUESTS or (
                    word == "undecided" and needed.needed_s <= shortest_s
                ):
                    continue
                right = sum(
                    decided(checked, planned, load_s, seed)[place] is (word == "decided")
                    for seed in seeds
                )
                counts[word] += right
                counts[f"{word} of"] += len(seeds)
                cells.append(f"{right} of {len(seeds)} {word} after {load_s:,.0f} s")
            print(
                f"{name:<14}{forecast.name:<10}{needed.term:<55}{needed.needed_s:>8,.0f} s   {', '.join(cells)}",
                flush=True,
            )
    return counts


def main() -> int:
    flags = rig.parser(__doc__)
    flags.add_argument("--seeds", type=int, default=5)
    flags.add_argument("--first", type=int, default=101, help="the first seed")
    flags.add_argument("--contracts", default=CONTRACTS)
    flags.add_argument("--factor", type=float, default=2.0)
    flags.add_argument("--terms", type=int, default=100, help="of each level, the first so many")
    given = rig.given(flags, seeds=1, contracts="summarization", terms=2)
    seeds = range(given.first, given.first + given.seeds)
    counts: Counter[str] = Counter()
    for name in given.contracts.split(","):
        counts += check(name, seeds, given.factor, given.terms)
    good = True
    for word in ("decided", "undecided"):
        share = counts[word] / max(counts[f"{word} of"], 1)
        good &= share >= LIMIT
        print(
            f"{word} as predicted, a factor of {given.factor:g} away: {counts[word]} of {counts[f'{word} of']}"
        )
    return 0 if good or given.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
