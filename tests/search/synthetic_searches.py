"""Searches and trials of synthetic servers, for the tests of `loadgen.search`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.core import seeds
from loadgen.core.execution.plan import Settings
from loadgen.core.results.record import ROW
from loadgen.core.slo import Slo, Term
from loadgen.core.workload import FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.render import text as as_text
from loadgen.search import search_text
from loadgen.search.goal import Goal, Outcome
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import PlannedTrial, SearchResult, TrialResult
from loadgen.search.trial_runner import TrialRunner

S = 1_000_000_000
TTFT = Term(metric="ttft", limit_ns=2 * S)
GOAL = Goal(slo=Slo(terms=(TTFT,)))
CAPACITY = 100.0  # requests per second of the queue below


def queue_rows(rate: float, seed: int, length_s: float = 120) -> np.ndarray:  # type: ignore[type-arg]
    """Return the records of an M/M/1 queue that starts empty and serves in the order of arrival.

    TTFT is the wait, and every response takes a second after its first token.
    """
    rng = seeds.generator(seed, "queue")
    count = rng.poisson(rate * length_s)
    arrivals_s = np.sort(rng.random(count)) * length_s
    service_times_s = rng.standard_exponential(count) / CAPACITY
    first_tokens_s = np.empty(count)
    free_at_s = 0.0
    for index in range(count):
        free_at_s = max(free_at_s, arrivals_s[index]) + service_times_s[index]
        first_tokens_s[index] = free_at_s
    rows = np.zeros(count, ROW)
    rows["slot"] = np.arange(count)
    for column in ("due_ns", "sent_ns"):
        rows[column] = (arrivals_s * S).astype(np.int64)
    for column in ("first_token_ns", "first_answer_ns"):
        rows[column] = (first_tokens_s * S).astype(np.int64)
    for column in ("last_token_ns", "end_ns", "done_ns"):
        rows[column] = rows["first_token_ns"] + S
    rows["output_tokens"] = 11
    return rows


def run_with_chance(search: LoadSearch, theta: float, sigma: float, seed: int) -> LoadSearch:
    """Run a search on a server whose trials pass by chance.

    The probability is Phi((theta - x) / sigma), where x is the logarithm of the offered load.
    """
    rng = seeds.generator(seed, "outcomes")
    while (trial := search.next_trial()) is not None:
        log_offered = math.log(trial.load) + rng.normal(0, 0.003)
        has_passed = log_offered + rng.normal(0, sigma) <= math.log(theta)
        search.add_result(
            TrialResult(
                trial=trial,
                outcome="under" if has_passed else "over",
                ended_early=False,
                duration_s=600,
                offered_load=math.exp(log_offered),
                sampling_noise=0.003,
            )
        )
    return search


def add_outcome(search: LoadSearch, outcome: Outcome, **changes: Any) -> PlannedTrial:
    """Add a result to a search, and return the trial that it is the result of."""
    trial = search.next_trial()
    assert trial is not None
    result = TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=False,
        duration_s=100,
        offered_load=trial.load,
        sampling_noise=0.003,
    )
    search.add_result(msgspec.structs.replace(result, **changes))
    return trial


def render_confirmation(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return how the result of a search was confirmed, as text."""
    confirmation = search_text.confirmation_section(result, trials, "/s", simulated=False)
    return as_text.render_sections([confirmation])


def workload_at(load: float) -> Workload:
    """Return a workload of short requests that lasts a minute."""
    tokens: Any = FixedTokens(value=20)
    return Workload(
        name="x",
        requests=Synthetic(input_tokens=tokens, output_tokens=tokens),
        stages=(Stage(name="load", arrival=Poisson(rate=load), duration_ns=60 * S),),
        grace_ns=60 * S,
    )


def make_runner(output_dir: Path, **changes: Any) -> TrialRunner:
    """Return a runner of trials on a simulated server."""
    term = Term(metric="tpot", limit_ns=40_000_000)
    return TrialRunner(
        output_dir=output_dir,
        goal=Goal(slo=Slo(terms=(term,))),
        make_workload=lambda trial: workload_at(trial.load),
        settings=Settings(url="sim:gb200-vm"),
        seed=7,
        **changes,
    )


def planned_trial(load: float, number: int = 0, early: bool = False) -> PlannedTrial:
    """Return a trial as a search plans it."""
    return PlannedTrial(number=number, load=load, kind="probe", may_pass_early=early)
