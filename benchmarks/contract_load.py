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
from pathlib import Path
from typing import NamedTuple

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
    checked: CheckedContract, planned: LevelPlan, total_load_s: float, seed: int
) -> list[bool]:
    """Run a level of a contract once, and return which of its terms are decided then.

    A term is decided if its verdict is PASS or FAIL, not INCONCLUSIVE.

    Args:
        checked: The contract.
        planned: The level, with its workload.
        total_load_s: The length of the load in seconds, over all repeated runs of the level.
        seed: Gives each of the repeated runs a seed of its own.
    """
    repeats = planned.level.repeats
    workload = level_plan.set_measured_duration(
        planned.workload, round(total_load_s * 1e9 / repeats)
    )
    settings = replace(prediction.create_simulated_settings(Settings()), gpus=checked.contract.gpus)

    runs = []
    for run_number in range(repeats):
        seeded = workload.model_copy(update={"seed": 1000 * seed + run_number})
        with tempfile.TemporaryDirectory() as folder:
            _, run_dir = execute(seeded, replace(settings, out=Path(folder) / "run"))
            runs.append(read_run(run_dir, Path(folder)))

    contract = checked.contract.model_copy(update={"levels": (planned.level,)})
    (level,) = judge_levels(contract, {planned.level.name: MeasuredLevel(runs=tuple(runs))})
    return [term.verdict != verdict.INCONCLUSIVE for term in level.terms]


class PredictionCheck(NamedTuple):
    """How often a term was decided, or undecided, as predicted.

    The prediction says that a term is "decided" after `load_s` seconds of load, or still
    "undecided". `confirmed` of `tried` seeds agree.
    """

    expectation: str
    load_s: float
    confirmed: int
    tried: int

    def describe(self) -> str:
        """Return the check as a cell of the printed line."""
        return f"{self.confirmed} of {self.tried} {self.expectation} after {self.load_s:,.0f} s"


class TermForecast(NamedTuple):
    """A term of a level and the seconds of load, over all runs, that are predicted to decide it."""

    term_index: int
    needed_s: float


def check_contract(name: str, seeds: range, factor: float, max_terms: int) -> list[PredictionCheck]:
    """Check the predictions for the terms of a contract, and print a line for each term.

    Args:
        name: The name or path of the contract.
        seeds: Each check runs the level once with each of these seeds.
        factor: The load is longer by this factor than predicted, or shorter.
        max_terms: Only the first so many terms of each level are checked.
    """
    checked = load_contract(Path(name))
    forecasts = prediction.forecast_levels(
        checked,
        prediction.create_simulated_settings(Settings()),
        prediction.ForecastOptions(execute=execute, seed=1),
    )

    all_checks = []
    for planned, forecast in zip(checked.levels, forecasts, strict=True):
        terms = (*planned.level.must, *planned.level.should)[:max_terms]
        for index, (term, needed) in enumerate(zip(terms, forecast.terms, strict=False)):
            compares_levels = bool(term.level)
            if needed.needed_s is None or compares_levels:
                continue

            term_forecast = TermForecast(index, needed.needed_s)
            checks = check_term(
                checked, planned, term_forecast, forecast.length_s, seeds=seeds, factor=factor
            )
            all_checks += checks
            cells = ", ".join(check.describe() for check in checks)
            print(
                f"{name:<14}{forecast.name:<10}{needed.term:<55}{needed.needed_s:>8,.0f} s   "
                f"{cells}",
                flush=True,
            )

    return all_checks


def check_term(
    checked: CheckedContract,
    planned: LevelPlan,
    term: TermForecast,
    forecast_length_s: float,
    *,
    seeds: range,
    factor: float,
) -> list[PredictionCheck]:
    """Check that a term is decided by a load that is longer than predicted, but not by a shorter.

    Left out are loads with too many requests to simulate, and loads that are too short for the
    forecast, whose own length was `forecast_length_s`.
    """
    shortest_s = forecast_length_s * prediction.MIN_LENGTH_FRACTION * 1.2
    longer_s = term.needed_s * factor
    shorter_s = term.needed_s / factor
    requests_per_s = (planned.requests or 0) / forecast_length_s * planned.level.repeats

    checks = []
    if requests_per_s * longer_s <= prediction.MAX_REQUESTS:
        is_decided = [
            find_decided_terms(checked, planned, longer_s, seed)[term.term_index] for seed in seeds
        ]
        checks.append(PredictionCheck("decided", longer_s, sum(is_decided), len(seeds)))

    is_shorter_visible = term.needed_s > shortest_s
    if is_shorter_visible and requests_per_s * shorter_s <= prediction.MAX_REQUESTS:
        is_decided = [
            find_decided_terms(checked, planned, shorter_s, seed)[term.term_index] for seed in seeds
        ]
        undecided = len(seeds) - sum(is_decided)
        checks.append(PredictionCheck("undecided", shorter_s, undecided, len(seeds)))

    return checks


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

    checks: list[PredictionCheck] = []
    for name in args.contracts.split(","):
        checks += check_contract(name, seeds, args.factor, args.terms)

    is_good = True
    for expectation in ("decided", "undecided"):
        of_kind = [check for check in checks if check.expectation == expectation]
        confirmed = sum(check.confirmed for check in of_kind)
        tried = sum(check.tried for check in of_kind)
        is_good &= confirmed / max(tried, 1) >= MIN_PREDICTED_FRACTION
        print(
            f"{expectation} as predicted, a factor of {args.factor:g} away: {confirmed} of {tried}"
        )

    return 0 if is_good or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
