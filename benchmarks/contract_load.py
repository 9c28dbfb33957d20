"""Is the predicted length of a validation long enough to decide each term?

    python benchmarks/contract_load.py [--seeds 5] [--contracts chatbot,rag] [--factor 2]

The prediction is made once (seed 1) on the simulated GB300 VM. Then each level runs in virtual time
with other seeds and two loads: the predicted load times the factor, after which the term should be
decided (PASS or FAIL), and the predicted load divided by the factor, after which it should still be
INCONCLUSIVE. The script prints how often that is so. It leaves out terms that compare levels, terms
without a prediction, and loads of more than 60,000 requests.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import rig
from msgspec.structs import replace

from loadgen.contracts import level_plan, prediction, verdict
from loadgen.contracts.judge import judge_levels
from loadgen.contracts.level_plan import CheckedContract, LevelPlan
from loadgen.contracts.loading import load_contract
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import Contract
from loadgen.contracts.stored_validation import read_run
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute

CONTRACTS = "chatbot,summarization,rag,agentic"
MIN_CONFIRMED_FRACTION = 0.9  # of the checks of each expectation

# The prediction cannot name loads below this multiple of the shortest one that it judges.
SHORTEST_LOAD_MARGIN = 1.2

Expectation = Literal["decided", "undecided"]


class TermPrediction(NamedTuple):
    """The load that a term of a contract is predicted to need for a decision.

    Attributes:
        plan: The level of the term, with its workload.
        term_index: The position of the term in its level.
        term: The term as text.
        needed_s: The predicted load in seconds, over all runs of the level.
        shortest_s: The shortest load in seconds that could have been predicted.
        requests_per_s: The mean rate of the level's requests, over the load of all its runs.
    """

    plan: LevelPlan
    term_index: int
    term: str
    needed_s: float
    shortest_s: float
    requests_per_s: float

    def can_simulate(self, load_s: float) -> bool:
        """Return whether a load has few enough requests to simulate it in reasonable time."""
        return self.requests_per_s * load_s <= prediction.MAX_REQUESTS


def predict_terms(checked: CheckedContract, max_terms: int) -> list[TermPrediction]:
    """Return the predictions for the first `max_terms` terms of each level of a contract.

    Left out are terms without a prediction, and terms that compare two levels, which no run of one
    level can decide.
    """
    forecasts = prediction.forecast_levels(
        checked,
        prediction.create_simulated_settings(Settings()),
        prediction.ForecastOptions(execute=execute, seed=1),
    )

    predictions = []
    for plan, forecast in zip(checked.levels, forecasts, strict=True):
        requests_per_s = (plan.requests or 0) / forecast.length_s * plan.level.repeats
        shortest_s = forecast.length_s * prediction.MIN_LENGTH_FRACTION * SHORTEST_LOAD_MARGIN
        terms = (*plan.level.must, *plan.level.should)[:max_terms]

        # A level that cannot be simulated has no forecasts of its terms.
        for index, (term, needed) in enumerate(zip(terms, forecast.terms, strict=False)):
            compares_levels = bool(term.level)
            if needed.needed_s is not None and not compares_levels:
                predictions.append(
                    TermPrediction(
                        plan, index, needed.term, needed.needed_s, shortest_s, requests_per_s
                    )
                )

    return predictions


def run_level(
    plan: LevelPlan, gpus: int | None, total_load_s: float, seed: int
) -> list[RecordedRun]:
    """Run a level of a contract in virtual time, and return its repeated runs.

    Args:
        plan: The level, with its workload.
        gpus: The number of GPUs according to the contract.
        total_load_s: The length of the load in seconds, over all repeated runs.
        seed: Gives each of the repeated runs a seed of its own.
    """
    repeats = plan.level.repeats
    load_of_run_ns = round(total_load_s * 1e9 / repeats)
    workload = level_plan.set_measured_duration(plan.workload, load_of_run_ns)
    settings = replace(prediction.create_simulated_settings(Settings()), gpus=gpus)

    runs = []
    for run_number in range(repeats):
        seeded_workload = workload.model_copy(update={"seed": 1000 * seed + run_number})
        with tempfile.TemporaryDirectory() as folder:
            _, run_dir = execute(seeded_workload, replace(settings, out=Path(folder) / "run"))
            runs.append(read_run(run_dir, Path(folder)))
    return runs


def is_term_decided(
    contract: Contract, plan: LevelPlan, term_index: int, runs: Sequence[RecordedRun]
) -> bool:
    """Return whether the verdict on a term after these runs is PASS or FAIL."""
    contract_of_level = contract.model_copy(update={"levels": (plan.level,)})
    measured_levels = {plan.level.name: MeasuredLevel(runs=tuple(runs))}
    (level,) = judge_levels(contract_of_level, measured_levels)
    return level.terms[term_index].verdict != verdict.INCONCLUSIVE


def count_deciding_seeds(
    contract: Contract, term_prediction: TermPrediction, load_s: float, seeds: Iterable[int]
) -> int:
    """Return with how many seeds a term is decided after so many seconds of load."""
    plan = term_prediction.plan
    decided = 0
    for seed in seeds:
        runs = run_level(plan, contract.gpus, load_s, seed)
        decided += is_term_decided(contract, plan, term_prediction.term_index, runs)
    return decided


class PredictionCheck(NamedTuple):
    """With how many seeds a term was decided, or undecided, as expected.

    Attributes:
        expectation: Whether the prediction expects that the term is decided.
        load_s: The load in seconds after which it was judged.
        confirmed: With how many seeds the expectation was right.
        tried: How many seeds were tried.
    """

    expectation: Expectation
    load_s: float
    confirmed: int
    tried: int

    def describe(self) -> str:
        """Return the check in words, for example "5 of 5 decided after 240 s"."""
        return f"{self.confirmed} of {self.tried} {self.expectation} after {self.load_s:,.0f} s"


def check_prediction(
    contract: Contract, term_prediction: TermPrediction, seeds: range, factor: float
) -> list[PredictionCheck]:
    """Check that a term is decided by a longer load than predicted, and not by a shorter one.

    The loads are the predicted load times `factor` and divided by it. The checks of loads that
    cannot be simulated are left out. So is the check of the shorter load if the prediction is the
    shortest possible one, because the true need may then be less.
    """
    longer_s = term_prediction.needed_s * factor
    shorter_s = term_prediction.needed_s / factor

    checks = []
    if term_prediction.can_simulate(longer_s):
        decided = count_deciding_seeds(contract, term_prediction, longer_s, seeds)
        checks.append(PredictionCheck("decided", longer_s, decided, len(seeds)))

    is_lower_bound = term_prediction.needed_s <= term_prediction.shortest_s
    if not is_lower_bound and term_prediction.can_simulate(shorter_s):
        decided = count_deciding_seeds(contract, term_prediction, shorter_s, seeds)
        undecided = len(seeds) - decided
        checks.append(PredictionCheck("undecided", shorter_s, undecided, len(seeds)))

    return checks


def check_contract(name: str, seeds: range, factor: float, max_terms: int) -> list[PredictionCheck]:
    """Check the predictions for a contract, and print a line for each term.

    Args:
        name: The name or path of the contract.
        seeds: Each check runs the level once with each of these seeds.
        factor: The checked loads are longer and shorter than predicted by this factor.
        max_terms: Only the first so many terms of each level are checked.
    """
    checked = load_contract(Path(name))

    all_checks = []
    for term_prediction in predict_terms(checked, max_terms):
        checks = check_prediction(checked.contract, term_prediction, seeds, factor)
        all_checks += checks
        print_term_line(name, term_prediction, checks)

    return all_checks


def print_term_line(
    contract_name: str, term_prediction: TermPrediction, checks: Sequence[PredictionCheck]
) -> None:
    """Print a term, the load in seconds that it is predicted to need, and its checks."""
    cells = [
        contract_name.ljust(14),
        term_prediction.plan.level.name.ljust(10),
        term_prediction.term.ljust(55),
        f"{term_prediction.needed_s:,.0f} s".rjust(10),
        "   ",
        ", ".join(check.describe() for check in checks),
    ]
    print("".join(cells), flush=True)


def print_confirmed_checks(
    expectation: Expectation, checks: Iterable[PredictionCheck], factor: float
) -> bool:
    """Print how many checks of one expectation were right; return whether these are enough."""
    selected_checks = [check for check in checks if check.expectation == expectation]
    confirmed = sum(check.confirmed for check in selected_checks)
    tried = sum(check.tried for check in selected_checks)
    print(f"{expectation} as predicted, a factor of {factor:g} away: {confirmed} of {tried}")
    return confirmed / max(tried, 1) >= MIN_CONFIRMED_FRACTION


def main() -> int:
    """Print the checks of each contract; return 1 if too few predictions are right."""
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

    are_enough_decided = print_confirmed_checks("decided", checks, args.factor)
    are_enough_undecided = print_confirmed_checks("undecided", checks, args.factor)
    is_within_limit = are_enough_decided and are_enough_undecided

    return 0 if is_within_limit or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
