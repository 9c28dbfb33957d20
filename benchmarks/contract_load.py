"""Is the predicted length of a validation long enough to decide each term?

    python benchmarks/contract_load.py [--seeds 5] [--contracts chatbot,rag] [--factor 2]

The prediction is made once (seed 1) on the simulated GB300 VM. Then each level runs in virtual time
with other seeds: for the predicted load of each term times the factor, when the term should be
decided, and divided by it, when it should not. The script prints how often that is so. It leaves
out terms that compare levels, terms whose need lies outside the simulated load, and loads of more
than 60,000 requests.
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
MIN_PREDICTED_FRACTION = 0.9  # share of the checks that come out as predicted


def find_decided_terms(
    checked: CheckedContract, planned: LevelPlan, load_s: float, seed: int
) -> list[bool]:
    """Return which terms of a level are decided after so much load over all its runs."""
    runs = []
    settings = replace(prediction.create_simulated_settings(Settings()), gpus=checked.contract.gpus)
    for number in range(planned.level.repeats):
        with tempfile.TemporaryDirectory() as folder:
            workload = level_plan.set_measured_duration(
                planned.workload, round(load_s * 1e9 / planned.level.repeats)
            )
            workload = workload.model_copy(update={"seed": 1000 * seed + number})
            _, run_dir = execute(workload, replace(settings, out=Path(folder) / "run"))
            runs.append(read_run(run_dir, Path(folder)))
    contract = checked.contract.model_copy(update={"levels": (planned.level,)})
    (level,) = judge_levels(contract, {planned.level.name: MeasuredLevel(runs=tuple(runs))})
    return [term.verdict != verdict.INCONCLUSIVE for term in level.terms]


def check_contract(name: str, seeds: range, factor: float, max_terms: int) -> Counter[str]:
    """Count predictions that hold, and those that were tried; print each term.

    The keys are "decided", "undecided" and the same with " of" for the number tried. `most` limits
    the number of terms of each level.
    """
    checked = load_contract(Path(name))
    counts: Counter[str] = Counter()
    forecasts = prediction.forecast_levels(
        checked,
        prediction.create_simulated_settings(Settings()),
        prediction.ForecastOptions(execute=execute, seed=1),
    )
    for planned, forecast in zip(checked.levels, forecasts, strict=True):
        shortest_s = forecast.length_s * prediction.MIN_LENGTH_FRACTION * 1.2
        terms = (*planned.level.must, *planned.level.should)[:max_terms]
        for term_index, (term, needed) in enumerate(zip(terms, forecast.terms, strict=False)):
            if needed.needed_s is None or term.level:
                continue
            cells = []
            for expectation, load_s in (
                ("decided", needed.needed_s * factor),
                ("undecided", needed.needed_s / factor),
            ):
                requests = (
                    (planned.requests or 0) * load_s / forecast.length_s * planned.level.repeats
                )
                if requests > prediction.MAX_REQUESTS or (
                    expectation == "undecided" and needed.needed_s <= shortest_s
                ):
                    continue
                confirmed_count = sum(
                    find_decided_terms(checked, planned, load_s, seed)[term_index]
                    is (expectation == "decided")
                    for seed in seeds
                )
                counts[expectation] += confirmed_count
                counts[f"{expectation} of"] += len(seeds)
                cells.append(
                    f"{confirmed_count} of {len(seeds)} {expectation} after {load_s:,.0f} s"
                )
            print(
                f"{name:<14}{forecast.name:<10}{needed.term:<55}{needed.needed_s:>8,.0f} s   "
                f"{', '.join(cells)}",
                flush=True,
            )
    return counts


def main() -> int:
    """Print the checks of each contract; return 1 if too few predictions hold."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=101, help="the first seed")
    parser.add_argument("--contracts", default=CONTRACTS)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--terms", type=int, default=100, help="of each level, the first so many")
    args = rig.parse_arguments(parser, seeds=1, contracts="summarization", terms=2)
    seeds = range(args.first, args.first + args.seeds)
    counts: Counter[str] = Counter()
    for name in args.contracts.split(","):
        counts += check_contract(name, seeds, args.factor, args.terms)
    is_good = True
    for expectation in ("decided", "undecided"):
        fraction = counts[expectation] / max(counts[f"{expectation} of"], 1)
        is_good &= fraction >= MIN_PREDICTED_FRACTION
        print(
            f"{expectation} as predicted, a factor of {args.factor:g} away: {counts[expectation]} "
            f"of {counts[f'{expectation} of']}"
        )
    return 0 if is_good or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
