"""Growth of queues: error rates of the trend test, and its effect on search and MLPerf."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from command_line import exits
from make_examples import blank
from msgspec import structs

from loadgen.cli.app import main
from loadgen.core import seeds
from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics import growth, shortfall, sustainable
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.reasons import make_note
from loadgen.core.metrics.sustainable import Sustainable
from loadgen.core.metrics.windows import Span, Window
from loadgen.core.requests import resonance
from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import ROW, STATUS
from loadgen.core.slo import Slo, Term
from loadgen.core.stats import trend
from loadgen.core.workload import EmpiricalTokens, ListedTokens, Synthetic
from loadgen.mlperf import rules
from loadgen.mlperf import run as mlperf_run
from loadgen.mlperf import text as mlperf_text
from loadgen.render import text as as_text
from loadgen.repeated.capacity import load_capacity
from loadgen.search import search_text
from loadgen.search.goal import Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.posterior import CapacityPosterior, TrialOutcome
from loadgen.search.search_results import PlannedTrial, SearchResult, TrialResult
from loadgen.search.search_settings import SearchSettings
from loadgen.search.trial_monitor import has_growing_replica

pytestmark = pytest.mark.commands

S = 1_000_000_000
MS = 1_000_000
GOAL = Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=2 * S),)))


# -- the test of a trend ---------------------------------------------------------------------------


def correlated_noise(
    rng: np.random.Generator, count: int, memory_s: float, length: int = 300
) -> np.ndarray:  # type: ignore[type-arg]
    """Return block means of AR(1) noise with one value a second and standard deviation 1."""
    decay = math.exp(-1 / memory_s)
    shocks = rng.standard_normal((count, length)) * math.sqrt(1 - decay * decay)
    values = np.empty((count, length))
    values[:, 0] = rng.standard_normal(count)
    for i in range(1, length):
        values[:, i] = decay * values[:, i - 1] + shocks[:, i]
    blocks = growth.BLOCKS
    return values[:, : length // blocks * blocks].reshape(count, blocks, -1).mean(axis=2)


@pytest.mark.parametrize(
    ("memory_s", "series", "runs"), [(0.5, 2, 100), (0.5, 40, 8), (10, 2, 100), (10, 40, 8)]
)
def test_noise_is_taken_for_growth_in_about_one_run_of_a_hundred(
    memory_s: float, series: int, runs: int
) -> None:
    rng = seeds.generator(3, f"{memory_s} {series}")
    alarms = 0
    for _ in range(runs):
        trends = trend.find_trends(list(correlated_noise(rng, series, memory_s)))
        alarms += any(growth_trend is not None and growth_trend.grows for growth_trend in trends)
    assert alarms <= max(1, round(0.02 * runs))


def test_the_smallest_detectable_growth_is_detected_nine_times_in_ten() -> None:
    rng = seeds.generator(4, "visible")
    flat = correlated_noise(rng, 120, 0.5)
    line = np.linspace(0, 1, growth.BLOCKS)
    seen = 0
    for values in flat:
        (before,) = trend.find_trends([values])
        assert before is not None and not before.grows
        (after,) = trend.find_trends([values + before.detectable_growth * line])
        seen += after is not None and after.grows

    assert seen >= 0.85 * len(flat)


def test_a_smoothly_growing_series_is_detected_among_many_others() -> None:
    """Blocks of such a queue are so correlated that a test of the slope alone misses it."""
    rng = seeds.generator(5, "smooth")
    series = list(1000 + 20 * correlated_noise(rng, 143, 10))
    series.append(200 + np.cumsum(350 + 90 * rng.standard_normal(16)))
    finding = trend.find_trends(series)

    assert [
        i
        for i, growth_trend in enumerate(finding)
        if growth_trend is not None and growth_trend.grows
    ] == [143]


def test_a_series_needs_eight_blocks_and_a_flat_one_does_not_grow() -> None:
    assert trend.find_trends([np.arange(7.0)]) == [None]
    (flat,) = trend.find_trends([np.full(16, 5.0)])
    assert flat is not None and (flat.growth, flat.grows) == (0, False)
    (line,) = trend.find_trends([np.arange(16.0)])
    assert line is not None and line.grows
    (fall,) = trend.find_trends([np.arange(16.0)[::-1]])
    assert fall is not None and not fall.grows


def test_growth_along_a_curve_is_detected_and_missing_blocks_are_skipped() -> None:
    bend = (np.arange(16.0) - 3) ** 2
    bend[[2, 11]] = math.nan
    (growth_trend,) = trend.find_trends([bend])
    assert growth_trend is not None and (growth_trend.grows, growth_trend.detectable_growth) == (
        True,
        0,
    )


# -- rows of a run ---------------------------------------------------------------------------------


def simulate_queues(
    loads: list[float], *, length_s: float = 400, rate: float = 40, seed: int = 1
) -> Any:
    """Return records of one M/M/1 queue per target that starts empty.

    `loads` are fractions of the capacity; each response takes one more second.
    """
    rng = seeds.generator(seed, "queues")
    parts = []
    for target, load in enumerate(loads):
        n = rng.poisson(rate * length_s)
        due = np.sort(rng.random(n)) * length_s
        free, starts = 0.0, np.empty(n)
        for i, (at, service) in enumerate(
            zip(due.tolist(), (rng.standard_exponential(n) * load / rate).tolist(), strict=True)
        ):
            free = max(free, at) + service
            starts[i] = free
        rows = np.zeros(n, ROW)
        rows["target"], rows["replica"], rows["session"] = target, -1, -1
        rows["due_ns"] = rows["sent_ns"] = (due * S).astype(np.int64)
        rows["first_token_ns"] = rows["first_answer_ns"] = (starts * S).astype(np.int64)
        rows["last_token_ns"] = rows["end_ns"] = rows["done_ns"] = rows["first_token_ns"] + S
        rows["output_tokens"] = 11
        parts.append(rows)
    return np.concatenate(parts)


def judge_records(rows: Any, **stage: Any) -> Sustainable:
    plan = StagePlan(name="load", arrival="poisson 40/s", rate=40.0)
    manifest = RunManifest(
        state="finished",
        stages=(msgspec.structs.replace(plan, **stage),),
        targets=tuple(TargetFacts(name=name) for name in ("A", "B", "C")),
    )
    columns, none = Columns(rows), Columns(rows[:0])
    steady = Span(start_s=rows["due_ns"].min() / 1e9, end_s=rows["due_ns"].max() / 1e9)
    return sustainable.judge_load([columns], [none], Window(steady=steady), manifest)


def test_a_single_overloaded_target_is_named() -> None:
    judgement = judge_records(simulate_queues([0.6, 1.2, 0.6]))
    assert (judgement.sustained, judgement.growing, judgement.parts) == (False, ("target B",), 3)
    assert "target B" in judgement.reason and "1 of 3 targets" in judgement.reason
    assert judgement.growth_share is not None and judgement.growth_share > 0.5


def test_targets_that_keep_up_are_sustained_with_their_visible_growth() -> None:
    judgement = judge_records(simulate_queues([0.5, 0.5, 0.5]))
    assert judgement.sustained is True and judgement.growing == ()
    assert judgement.visible_share is not None and 0 < judgement.visible_share < 1
    assert "per target" in judgement.reason
    assert (judgement.start_s, judgement.end_s) == (
        pytest.approx(200, abs=1),
        pytest.approx(400, abs=1),
    )


def test_a_short_load_is_not_sustained_if_far_fewer_requests_end_than_are_due() -> None:
    """A trial of 15 s confirmed 6.6/s on a server that completed 5.27/s."""

    def short(load: float, seed: int) -> Any:
        return simulate_queues([load], length_s=15, rate=6.6, seed=seed)

    shortfalls = {
        load: [shortfall.find_shortfall([Columns(short(load, seed))]) for seed in range(30)]
        for load in (0.9, 2)
    }
    assert not any(shortfalls[0.9])
    known_shortfalls = [shortfall for shortfall in shortfalls[2] if shortfall is not None]
    assert len(known_shortfalls) > 8
    assert all(
        known_shortfall.observed < 0.95 * known_shortfall.expected
        for known_shortfall in known_shortfalls
    )


@pytest.mark.parametrize("of_sessions", [False, True])
def test_a_load_shorter_than_its_responses_is_judged_by_first_tokens(
    of_sessions: bool,
) -> None:
    """At 60/s of 27 the page said "too short": a longer run would have been too short again."""

    def long_responses(load: float) -> Any:
        rows = simulate_queues([load], length_s=180)
        for name in ("last_token_ns", "end_ns", "done_ns"):
            rows[name] += 300 * S
        if of_sessions:
            rows["session"] = np.arange(len(rows))
        return rows

    judgement = judge_records(long_responses(2))
    assert (judgement.sustained, judgement.code) == (False, "falls_behind")
    keeps_up = judge_records(long_responses(0.9))
    assert (keeps_up.sustained, keeps_up.code) == (None, "too_short")
    assert keeps_up.needed_s == pytest.approx(1200, rel=0.05), "four times what requests last"
    later = long_responses(2)
    later["turn"] = of_sessions
    is_sustained = judge_records(later).sustained
    assert is_sustained is (None if of_sessions else False), "later turns are due when others end"
    assert judge_records(long_responses(2), closed=True).sustained is None, (
        "a closed loop cannot pile up"
    )


@pytest.mark.parametrize("wait_s", [5, 60, 300, 3000])
def test_a_server_that_falls_behind_is_not_sustained_however_long_requests_wait(
    wait_s: float,
) -> None:
    """An overload made requests so long that the load looked too short to judge."""
    rows = simulate_queues([1.25], length_s=600)
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns", "end_ns", "done_ns"):
        rows[name] += (wait_s * S * (rows["due_ns"] / rows["due_ns"].max())).astype(np.int64)
    judgement = judge_records(rows)
    assert judgement.sustained is False and judgement.code in ("falls_behind", "grows")


def test_responses_that_lengthen_until_the_server_is_full_are_no_shortfall() -> None:
    """Responses that last longer when the server is full end later than the first ones did."""
    due_s = np.arange(0, 600, 0.1)
    stays_s = 40 + 20 * np.minimum(due_s / 200, 1)
    rows = blank(len(due_s))
    rows["due_ns"] = rows["sent_ns"] = (due_s * S).astype(np.int64)
    rows["first_token_ns"] = rows["due_ns"] + 100 * MS
    rows["end_ns"] = rows["done_ns"] = rows["due_ns"] + (stays_s * S).astype(np.int64)
    assert shortfall.find_shortfall([Columns(rows)]) is None


@pytest.mark.parametrize(("failing_share", "sustained"), [(0.02, None), (0.2, False)])
def test_failed_requests_do_not_count_as_completed(
    failing_share: float, sustained: bool | None
) -> None:
    rows = simulate_queues([0.5])
    every = round(1 / failing_share)
    rows["status"][::every] = STATUS["failed"]
    judgement = judge_records(rows)
    assert judgement.sustained is sustained
    assert judgement.code == ("failures" if sustained is None else "falls_behind")


def simulate_growing_requests(
    *, growth: float, queue_s: float = 0.0, field: str = "input_tokens"
) -> Any:
    """Rows of requests that become longer by `growth`, and wait up to `queue_s` at the end.

    The time to the first token is that of the prompt, and the rest that of the response.
    """
    rng = seeds.generator(6, "lengthening")
    n, length_s = 12_000, 600
    rows = blank(n)
    rows["due_ns"] = rows["sent_ns"] = np.sort(rng.random(n) * length_s * S).astype(np.int64)
    place = np.arange(n) / n
    tokens = {name: np.full(n, 500.0) for name in ("input_tokens", "asked_output")}
    tokens[field] *= 1 + growth * place
    ttft_s = 0.02 + tokens["input_tokens"] * 1e-4 * rng.lognormal(0, 0.1, n) + queue_s * place
    rows["input_tokens"] = tokens["input_tokens"]
    rows["asked_output"] = rows["output_tokens"] = tokens["asked_output"]
    rows["first_token_ns"] = rows["due_ns"] + (ttft_s * S).astype(np.int64)
    stays_s = tokens["asked_output"] * 0.02 * rng.lognormal(0, 0.1, n)
    rows["end_ns"] = rows["first_token_ns"] + (stays_s * S).astype(np.int64)
    for name in ("done_ns", "last_token_ns"):
        rows[name] = rows["end_ns"]
    return rows


@pytest.mark.parametrize("field", ["input_tokens", "asked_output"])
@pytest.mark.parametrize("growth", [1.0, 4.0])
def test_longer_requests_are_not_growth_of_the_server(growth: float, field: str) -> None:
    """Rows that lengthen in file order were not sustained at a tenth of the capacity."""
    judgement = judge_records(simulate_growing_requests(growth=growth, field=field))
    assert (judgement.sustained, judgement.code) == (True, "steady")
    in_tested_half = growth / 2 / (1 + 0.75 * growth)
    assert judgement.work_growth_share == pytest.approx(in_tested_half, rel=0.1)
    assert judge_records(simulate_growing_requests(growth=0.0)).work_growth_share is None


@pytest.mark.parametrize("field", ["input_tokens", "asked_output"])
def test_a_growing_queue_is_detected_although_requests_become_longer(field: str) -> None:
    judgement = judge_records(simulate_growing_requests(growth=1.0, queue_s=5, field=field))
    assert (judgement.sustained, judgement.code) == (False, "grows")


def test_a_noisy_load_with_few_requests_in_flight_is_sustained() -> None:
    """Only 1 % of the requests of the second half are in flight, so no more can have piled up."""
    rng = seeds.generator(9, "noise")
    rows = simulate_queues([0.5], length_s=60)
    bursts = 1 + 30 * (rng.random(len(rows)) < 0.01)
    delay_ns = (rng.lognormal(0, 1, len(rows)) * bursts * 20 * MS).astype(np.int64)
    for name in ("first_token_ns", "first_answer_ns"):
        rows[name] = rows["due_ns"] + delay_ns
    for name in ("last_token_ns", "end_ns", "done_ns"):
        rows[name] = rows["first_token_ns"] + 100 * MS
    judgement = judge_records(rows)

    assert (judgement.sustained, judgement.code) == (True, "steady")


def test_a_load_that_cannot_be_judged_has_a_reason() -> None:
    rows = simulate_queues([0.5])
    few_sustainable = judge_records(rows[::200])

    assert (few_sustainable.sustained, few_sustainable.code) == (None, "too_few")
    little = judge_records(simulate_queues([1.03]))  # grows, and a random walk could do the same
    assert (little.sustained, little.code) == (None, "may_grow")

    slow = rows.copy()
    for name in ("last_token_ns", "end_ns", "done_ns"):
        slow[name] += 300 * S
    too_short = judge_records(slow)

    assert (too_short.sustained, too_short.code) == (None, "too_short")
    ramp = judge_records(rows, rate=None, arrival="ramp 1/s to 40/s")
    assert ramp.sustained is None and "ramp 1/s to 40/s" in ramp.reason

    at_once = rows.copy()
    at_once["due_ns"] = 0
    assert judge_records(at_once).sustained is None


# -- the search ------------------------------------------------------------------------------------


def run_planned_trial(
    trial: PlannedTrial, *, rules: float, steady: float, spent_s: float = 600
) -> TrialResult:
    """Return the trial of a server that meets its SLO up to `rules` and is stable to `steady`."""
    under = trial.load <= (rules if trial.length_factor == 1 else steady * 1.005)
    grows = trial.kind in ("confirm", "sustain") and trial.load > steady
    return TrialResult(
        trial=trial,
        outcome="under" if under else "over",
        ended_early=False,
        duration_s=spent_s * trial.length_factor,
        offered_load=trial.load,
        sampling_noise=0.003,
        reason="misses",
        sustained=not grows if under else None,
        sustained_reason="target B grows" if grows else "nothing grows",
    )


def run_search(*, steady: float, **options: Any) -> LoadSearch:
    search = LoadSearch(SearchSettings(low=1, high=1000, start=50, precision=0.01, **options))
    while (trial := search.next_trial()) is not None:
        search.add_result(run_planned_trial(trial, rules=100, steady=steady))
    return search


def confirmation_text(
    answer: SearchResult, trial_results: Sequence[TrialResult], *, simulated: bool
) -> str:
    return as_text.render_sections(
        [search_text.confirmation_section(answer, trial_results, "/s", simulated=simulated)]
    )


def test_a_peak_is_sustained_if_a_longer_trial_passes() -> None:
    search = run_search(steady=200, sustain_length_factor=2.0)
    answer = search.result
    assert (answer.stop_reason, answer.sustained, answer.is_by_rules_only) == ("found", True, False)
    assert answer.sustained_load == answer.confirmed_load and answer.unsustained_load is None
    assert [result.length_factor for result in search.results if result.kind == "sustain"] == [2.0]


def test_a_load_whose_queue_grows_is_refused_and_a_sustained_one_is_reported() -> None:
    answer = run_search(steady=96, sustain_length_factor=2.0).result

    assert answer.confirmed_load == pytest.approx(100, rel=0.02)
    assert answer.sustained_load is not None and answer.unsustained_load is not None
    assert (
        96 * 0.985
        <= answer.sustained_load
        <= 96
        < answer.unsustained_load
        <= answer.sustained_load * 1.011
    )
    assert answer.sustained is True
    text = confirmation_text(answer, [], simulated=True)
    assert "Passed once" in text
    assert "Sustained" in text
    assert "2 times the trial" in " ".join(text.split())


def test_without_a_longer_trial_a_peak_passes_by_the_rules_only() -> None:
    search = run_search(steady=200)
    answer = search.result
    assert (answer.sustained, answer.is_by_rules_only) == (None, True)
    text = " ".join(confirmation_text(answer, search.results, simulated=False).split())
    assert "rules only: " in text
    assert "--sustain" in text
    assert "about 20 min 00 s" in text


def test_a_confirmation_in_which_a_target_grows_is_refused_without_longer_trials_too() -> None:
    answer = run_search(steady=95).result
    assert (
        answer.sustained_load is not None
        and answer.sustained_load <= 95
        and answer.unsustained_load is not None
    )
    assert answer.sustained is not True and answer.is_by_rules_only


def test_no_rate_is_sustained_if_the_queue_grows_at_every_rate() -> None:
    answer = run_search(steady=1, sustain_length_factor=2.0).result
    assert (answer.sustained, answer.sustained_load) == (False, None)
    assert answer.is_by_rules_only and answer.sustained_reason


def test_the_trial_monitor_detects_one_replica_whose_queue_grows() -> None:

    instants = np.arange(100, 400, 10) * S
    assert has_growing_replica(simulate_queues([0.6, 1.1]), instants)
    assert not has_growing_replica(simulate_queues([0.6, 0.6]), instants)


# -- intervals -------------------------------------------------------------------------------------


def count_intervals_covering(
    spread: float, *, run_spread: float | None, count: int, sampling: float = 0.002
) -> tuple[int, float]:
    """Count the searches whose interval contains the true capacity.

    Each run has a deviation of its own with standard deviation `run_spread`.
    """
    hits, probes = 0, 0
    for seed in range(count):
        rng = seeds.generator(seed, f"spread {spread}")
        truth = float(rng.uniform(70, 140))
        search = LoadSearch(
            SearchSettings(low=1, high=1e6, start=10, precision=0.02, run_spread=run_spread)
        )
        while (trial := search.next_trial()) is not None:
            run_rate = truth * math.exp(math.hypot(spread, sampling) * float(rng.standard_normal()))
            search.add_result(
                TrialResult(
                    trial=trial,
                    outcome="under" if trial.load < run_rate else "over",
                    ended_early=False,
                    duration_s=600,
                    offered_load=trial.load,
                    sampling_noise=sampling / 1.5,
                )
            )
        interval = search.result.interval
        assert interval is not None
        hits += interval.low <= truth <= interval.high
        probes += len(search.results)
    return hits, probes / count


@pytest.mark.parametrize("run_spread", [None, 0.02])
def test_intervals_of_a_search_cover_the_true_capacity_if_runs_differ(
    run_spread: float | None,
) -> None:
    """100 searches at 0.4, 1 and 2 %: benchmarks/search_truth.py coverage."""
    hits, probes = count_intervals_covering(0.02, run_spread=run_spread, count=8)
    assert hits >= 7
    assert probes < 25


def test_the_interval_is_wider_if_runs_of_a_server_vary() -> None:
    narrow, wide = (interval_of_search(run_spread) for run_spread in (0.0, 0.03))
    assert wide > 2 * narrow


def interval_of_search(run_spread: float) -> float:
    belief = CapacityPosterior(50, 200, sampling_sigma=0.003, run_spread=run_spread)
    for load, passed in ((90, True), (110, False), (99, True), (101, False)):
        belief.update(TrialOutcome(load, passed, 0.01))
    interval = belief.interval(0.95)
    return interval.high - interval.low


def test_the_text_lists_the_errors_that_an_interval_covers_from_the_largest() -> None:
    simulated = run_search(steady=200).result
    coverage_text = search_text.describe_interval_coverage(simulated, simulated=True)

    assert coverage_text.index("model error") < coverage_text.index("seed variation")
    measured = run_search(steady=200, run_spread=None).result
    assert measured.run_spread is not None and measured.run_spread_source == "learned"
    assert "--run-spread" in search_text.describe_interval_coverage(measured, simulated=False)
    as_told = run_search(steady=200, run_spread=0.03).result
    assert "3.0% (as specified)" in search_text.describe_interval_coverage(as_told, simulated=False)
    none = run_search(steady=200, run_spread=0.0).result
    assert "0.0% (as specified)" in search_text.describe_interval_coverage(none, simulated=False)


@pytest.mark.parametrize(
    ("trial_s", "within"), [(600, "2 min 43 s (default 12 min 00 s"), (2700, "12 min 12 s")]
)
def test_the_text_of_an_interval_states_the_period_of_slowdowns_that_it_covers(
    trial_s: float, within: str
) -> None:
    """Trials of ten minutes cannot show a slowdown that recurs every half hour."""
    coverage_text = search_text.describe_interval_coverage(
        run_search(steady=200, run_spread=None, real_trial_s=trial_s).result, simulated=False
    )

    assert f"every {within}" in coverage_text
    assert ("rarer ones" in coverage_text) is (trial_s < 2700)
    assert ("trials of 45 min 00 s" in coverage_text) is (trial_s < 2700)
    assert "recur" not in search_text.describe_interval_coverage(
        run_search(steady=200).result, simulated=True
    ), "a model does not change"


# -- resonance -------------------------------------------------------------------------------------


def test_a_resonance_of_round_robin_with_the_data_set_is_reported() -> None:
    lengths = tuple([200, 100, 100] * 8)
    data = Synthetic(
        input_tokens=ListedTokens(values=lengths), output_tokens=ListedTokens(values=lengths)
    )
    finding = resonance.find_resonance(data, None, 6, "replica", 1000)

    assert finding == {
        "samples": 24,
        "servers": 6,
        "kind": "replica",
        "factor": 6,
        "each": 4,
        "heaviest": 0.5,
    }
    (text,) = make_note("resonance", finding)
    assert "50.0%" in text
    assert resonance.find_resonance(data, None, 5, "replica", 1000) is None  # no common factor

    data_set = Synthetic(
        input_tokens=EmpiricalTokens(values=lengths), output_tokens=EmpiricalTokens(values=lengths)
    )

    assert resonance.find_resonance(data_set, None, 6, "replica", 1000) is None  # no cycle
    assert (
        resonance.find_resonance(data, None, 6, "replica", 24) is None
    )  # one pass: nothing repeats
    assert resonance.find_resonance(data, None, 1, "target", 1000) is None
    even = data.model_copy(update={"output_tokens": ListedTokens(values=(100,) * 24)})
    assert resonance.find_resonance(even, None, 6, "replica", 1000) is None


# -- from the command line -------------------------------------------------------------------------


UNEVEN = """
extends: gb300-vm
vms: 4
gpus_per_vm: 1
vm_speeds: [1.05, 1.05, 1.05, 0.85]
server: {max_batch_size: 64}
"""  # four replicas, one of them slow
RATE = 142.6  # /s, which overloads that one by a few percent


def test_a_valid_run_with_one_slow_replica_is_not_sustained(tmp_path: Path) -> None:
    """The queue of one replica of four grows throughout a run that is valid by all limits."""
    preset = tmp_path / "uneven.yaml"
    preset.write_text(UNEVEN)
    official = rules.create_test("llama2-70b", "server", min_duration_s=120)
    test = structs.replace(official, samples=500, min_queries=500)
    data = mlperf_run.synthetic_data(official, mean_output=60)
    settings = Settings(url=f"sim:{preset}", out=tmp_path / "o")
    summary, folder = run.execute(mlperf_run.build_workload(test, data, qps=RATE), settings)
    result = mlperf_run.judge_run(folder, test, summary, data_name=data.name, qps=RATE)

    assert (result.valid, result.sustained, result.is_valid_by_rules_only) == (True, False, True)
    assert summary.sustainable.growing == ("replica 3",)
    out = " ".join(as_text.render(mlperf_text.create_report(result), full=True).split())
    assert "VALID by MLPerf rules" in out and "replica 3" in out

    nothing_grew = msgspec.structs.replace(
        result, sustained=None, sustained_reason="nothing grows", longer_minutes=24.0
    )
    out = " ".join(as_text.render(mlperf_text.create_report(nothing_grew), full=True).split())

    assert "stability not verified" in out and "nothing grows" in out
    stored = mlperf_run.read_result(folder)
    assert (stored.sustained, stored.sustained_reason) == (False, summary.sustainable.reason)


@pytest.mark.parametrize(
    ("seed", "lower"), [("1", False), ("3", True)]
)  # whether the confirmed load is not sustained
def test_a_search_reports_and_stores_the_highest_sustained_load(
    seed: str, lower: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--slo",
        "ttft:2s",
        "--slo",
        "tpot:60ms:p95",
        "--low",
        "20",
        "--high",
        "40",
        "--duration",
        "200s",
    ]
    flags += [
        "--precision",
        "0.05",
        "--seed",
        seed,
        "--url",
        "sim:gb300-vm",
        "--out",
        str(tmp_path / "s"),
    ]

    assert exits("search", "rag", *flags, "--full") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("Passed once" if lower else "Confirmed") in out
    assert "Sustained" in out
    assert "2 times the trial length" in out
    assert out.index("model error") < out.index("seed variation")

    capacity = load_capacity((tmp_path / "s" / "capacity.json").read_bytes())
    answer = json.loads((tmp_path / "s" / "search.json").read_text())["answer"]
    assert capacity.sustained is answer["sustained"] and capacity.sustained_reason
    assert capacity.evidence.endswith("-sustain")
    assert answer["steady"] is not None and answer["steady"] <= answer["confirmed"]
    assert (answer["not_steady"] is not None) is lower
    if lower:
        assert capacity.rate_per_s < answer["not_steady"] == capacity.high_per_s, (
            "no higher than what was seen to grow"
        )


def test_a_run_without_a_steady_state_is_too_short_to_be_judged_as_sustained(
    tmp_path: Path,
) -> None:
    """The warm-up never leaves the server, so the run has no steady state and no growth."""
    main_arguments = [
        "run",
        "rag",
        "--url",
        "sim:gb300-vm",
        "--seed",
        "1",
        "-n",
        "60",
        "-o",
        str(tmp_path / "r"),
    ]

    with pytest.raises(SystemExit):
        main(main_arguments)
    sustained = json.loads((tmp_path / "r" / "summary.json").read_text())["sustainable"]
    assert (
        sustained["sustained"] is None
        and "one instant" not in sustained["why"]
        and "too short" in sustained["why"]
    )


def test_a_response_whose_first_token_is_not_known_counts_as_delivered_at_its_end() -> None:
    rows = blank(200)
    rows["due_ns"] = np.arange(200) * 10 * MS
    rows["sent_ns"] = rows["due_ns"]
    rows["first_token_ns"] = rows["due_ns"] + MS
    rows["first_token_ns"][100:] = -1
    rows["end_ns"] = rows["due_ns"] + 50 * MS
    rows["done_ns"] = rows["end_ns"]
    assert shortfall.find_shortfall([Columns(rows)]) is None


def test_a_load_with_any_session_is_judged_by_first_tokens_alone() -> None:
    """A session is expected to be in flight for long, so requests that end late show nothing."""
    rows = blank(200)
    rows["due_ns"] = np.arange(200) * 10 * MS
    rows["sent_ns"] = rows["due_ns"]
    rows["first_token_ns"] = rows["due_ns"] + MS
    rows["end_ns"] = rows["due_ns"] + 50 * MS
    rows["end_ns"][140:] = 10_000 * MS
    rows["done_ns"] = rows["end_ns"]
    finding = shortfall.find_shortfall([Columns(rows)])

    assert finding is not None and finding.events == "responses"
    rows["session"][0] = 0
    assert shortfall.find_shortfall([Columns(rows)]) is None
