"""The verdict on terms: they pass, fail or are inconclusive, with the right certainty."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from queueing import fail, rows, run

from loadgen.contracts import load_checks, quantile_interval, sections, verdict_text
from loadgen.contracts.judge import judge_interim_analyses, judge_levels
from loadgen.contracts.load_checks import LoadLength
from loadgen.contracts.page_sections import PageInputs
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.sample_sizes import compute_requests_without_miss
from loadgen.contracts.schema import Contract, Requirement, parse_contract
from loadgen.contracts.verdict import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    LevelVerdict,
    TermVerdict,
    Validation,
    Verdict,
    combine_verdicts,
    get_exit_code,
)
from loadgen.core import format
from loadgen.core.metrics import windows
from loadgen.core.results.record import STATUSES
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.slo import Slo, Term
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.render import html
from loadgen.render import text as as_text
from loadgen.render.section import Paragraph, Table

Records = NDArray[np.void]

SLO = Slo(terms=(Term(metric="ttft", limit_ns=10**9), Term(metric="tpot", limit_ns=30_000_000)))
VALID_RECORDS = rows(1, 3000, 8.0)
"""A queue at 65 % load: TPOT p50 is 11.8 ms, E2E p50 is 2.47 s."""

SHORT_HORIZON = "12s"
"""A horizon for which six minutes of load are enough."""


def contract_with(terms: str, *, horizon: str = SHORT_HORIZON, options: str = "") -> Contract:
    """Return a contract with one level named `load`, with these must terms and level options."""
    level = f"{{name: load, workload: qa, {options} must: [{terms}]}}"
    return parse_contract(f"name: c\nhorizon: {horizon}\nlevels:\n  - {level}\n", "c.yaml", {})


def judge_runs(
    term: str, runs: tuple[RecordedRun, ...], *, horizon: str = SHORT_HORIZON, options: str = ""
) -> TermVerdict:
    """Return the verdict on one must term of a level with these runs."""
    contract = contract_with(term, horizon=horizon, options=options)
    (level,) = judge_levels(contract, {"load": MeasuredLevel(runs=runs)})
    return level.terms[0]


def judge_records(
    term: str,
    records: Records,
    *,
    horizon: str = SHORT_HORIZON,
    options: str = "",
    nodes: int = 1,
    gpus: int | None = 4,
) -> TermVerdict:
    """Return the verdict on one must term of a level with one run that has these records."""
    recorded_run = run(records, slo=SLO, nodes=nodes, gpus=gpus)
    return judge_runs(term, (recorded_run,), horizon=horizon, options=options)


def change_every_fifth_request(change: Callable[[Records], None]) -> Records:
    """Return VALID_RECORDS with a change of one request in five."""
    records = VALID_RECORDS.copy()
    part = records[::5]
    change(part)
    records[::5] = part
    return records


def set_token_time(records: Records, token_time_ns: NDArray[np.float64] | float) -> None:
    """Set the time from the first to the last token of each request."""
    records["last_token_ns"] = records["first_token_ns"] + np.asarray(token_time_ns).astype(int)
    records["end_ns"] = records["last_token_ns"]


# -- loads that are not as requested -----------------------------------------------------------


def drop_requests(part: Records) -> None:
    part["status"] = STATUSES.index("dropped")
    for field in (
        "sent_ns",
        "first_token_ns",
        "first_answer_ns",
        "last_token_ns",
        "end_ns",
        "done_ns",
    ):
        part[field] = -1


def end_at_first_token(part: Records) -> None:
    part["last_token_ns"] = part["first_token_ns"]


def request_longer_answers(part: Records) -> None:
    part["asked_output"] = 2 * part["output_tokens"]


def halve_output_tokens(part: Records) -> None:
    part["output_tokens"] //= 2


@pytest.mark.parametrize(
    ("change", "term", "verdict", "code"),
    [
        # The requests that were sent exceed the limit without the dropped ones.
        (drop_requests, "{ttft: {limit: 50ms, at: p50}}", FAIL, "broken"),
        (drop_requests, "{tpot: {limit: 30ms, at: p50}}", INCONCLUSIVE, "not_judged"),
        # Only 6.4 requests per second were sent.
        (drop_requests, "{requests: 7/s}", INCONCLUSIVE, "not_judged"),
        (end_at_first_token, "{tpot: {limit: 30ms, at: p50}}", INCONCLUSIVE, "not_judged"),
        (end_at_first_token, "{tpot: {limit: 11.2ms, at: p50}}", FAIL, "broken"),
        (end_at_first_token, "{goodput: 60%}", INCONCLUSIVE, "not_judged"),
        (end_at_first_token, "{e2e: {limit: 2.8s, at: p50}}", PASS, "kept"),
        (request_longer_answers, "{e2e: {limit: 2.8s, at: p50}}", INCONCLUSIVE, "not_judged"),
        (request_longer_answers, "{e2e: {limit: 2.2s, at: p50}}", FAIL, "broken"),
        (halve_output_tokens, "{tpot: {limit: 30ms, at: p50}}", INCONCLUSIVE, "no_figure"),
        (halve_output_tokens, "{output_per_gpu: 300/s}", INCONCLUSIVE, "no_figure"),
        (halve_output_tokens, "{e2e: {limit: 2.8s, at: p50}}", PASS, "kept"),
    ],
)
def test_a_term_does_not_pass_on_a_load_other_than_requested(
    change: Callable[[Records], None], term: str, verdict: str, code: str
) -> None:
    run_verdict = judge_records(term, change_every_fifth_request(change))
    assert (run_verdict.verdict, run_verdict.code) == (verdict, code), run_verdict.reason


@pytest.mark.parametrize(
    ("records", "note_count"),
    [(VALID_RECORDS, 0), (change_every_fifth_request(drop_requests), 1)],
    ids=["offered", "dropped"],
)
def test_a_level_has_a_note_if_requests_were_dropped(records: Records, note_count: int) -> None:
    level = MeasuredLevel(runs=(run(records, slo=SLO),))
    (verdict,) = judge_levels(contract_with("{errors: 1%}"), {"load": level})
    assert sum("max_in_flight" in note for note in verdict.notes) == note_count


@pytest.mark.parametrize(("second", "verdict"), [("12:40:00", PASS), ("12:11:00", INCONCLUSIVE)])
def test_runs_closer_in_time_than_required_are_inconclusive(second: str, verdict: str) -> None:
    first_run = run(rows(1, 1500), slo=SLO, folder="load/r1")
    second_run = run(rows(2, 1500), slo=SLO, folder="load/r2")
    day = "2026-11-21T{}+00:00"
    runs = (
        with_times(first_run, day.format("12:00:00"), day.format("12:10:00")),
        with_times(second_run, day.format(second), day.format("12:50:00")),
    )
    options = "repeats: 2, apart: 30m,"
    run_verdict = judge_runs("{tpot: {limit: 30ms, at: p50}}", runs, horizon="5s", options=options)

    assert run_verdict.verdict == verdict, run_verdict.reason
    if verdict == INCONCLUSIVE:
        assert run_verdict.code == "not_judged"
        assert "load/r2" in run_verdict.reason


def with_times(recorded_run: RecordedRun, started: str, ended: str) -> RecordedRun:
    """Return a run that began and ended at these times (ISO 8601)."""
    return replace(
        recorded_run, manifest=replace(recorded_run.manifest, started=started, ended=ended)
    )


def test_a_single_run_is_not_judged_if_runs_apart_in_time_are_required() -> None:
    options = "repeats: 2, apart: 30m,"
    verdict = judge_records("{errors: 5%}", rows(1, 1500), horizon="5s", options=options)
    assert verdict.code == "not_judged"
    assert "only one run" in verdict.reason


# -- valid runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "verdict"),
    [
        ("{tpot: {limit: 30ms, at: p50}}", PASS),
        ("{tpot: {limit: 12.4ms, at: p50}}", PASS),  # the true value is 11.8 ms
        ("{tpot: {limit: 11.2ms, at: p50}}", FAIL),
        ("{tpot: {limit: 11.8ms, at: p50}}", INCONCLUSIVE),
        ("{e2e: {limit: 2.8s, at: p50}}", PASS),
        ("{e2e: {limit: 2.2s, at: p50}}", FAIL),
        ("{ttft: {limit: 2s, at: p99.9}}", INCONCLUSIVE),  # 3,000 requests do not support it
        ("{ttft: {limit: 2s, at: p99}}", INCONCLUSIVE),  # too few samples of the queue
        ("{ttft: {limit: 50ms, at: p99}}", FAIL),  # a FAIL needs fewer samples
        ("{errors: 1%}", PASS),
        ("{errors: 0.1%}", INCONCLUSIVE),
        ("{requests: 7/s}", PASS),
        ("{requests: 9/s}", FAIL),
        ("{good_requests: 7/s}", PASS),
        ("{output_per_gpu: 300/s}", PASS),  # 8/s * 200 tokens / 4 GPUs are 400
        ("{output_per_gpu: 500/s}", FAIL),
        ("{tokens_per_gpu: 600/s}", PASS),
        ("{goodput: 60%}", PASS),
        ("{drift: {of: tpot, at: p50, limit: 15%, window: 2m}}", PASS),
        ("{drift: {of: tpot, at: p50, limit: 15%, window: 1h}}", INCONCLUSIVE),
        ("{sustained: {share: 80%, window: 3m}}", PASS),
        ("{cost: 1 USD}", INCONCLUSIVE),  # no prices
        ("{between_nodes: {of: tpot, limit: 10%}}", INCONCLUSIVE),  # one node
        ("{against: {level: other, of: tpot, limit: 90%}}", INCONCLUSIVE),  # not run
        ("{max_gap: {limit: 40ms, at: p50}}", PASS),
    ],
)
def test_the_verdict_follows_from_the_interval_and_the_limit(term: str, verdict: str) -> None:
    run_verdict = judge_records(term, VALID_RECORDS)
    assert run_verdict.verdict == verdict, run_verdict.reason
    if verdict != INCONCLUSIVE:
        assert run_verdict.value is not None
        assert run_verdict.low is None or run_verdict.low <= run_verdict.value
        assert run_verdict.high is None or run_verdict.value <= run_verdict.high


@pytest.mark.parametrize(
    ("term", "verdict"),
    [
        # 800 W over 8/s of 200 tokens are 0.5 J per token and 100 J per request, each within 5 %.
        ("{energy: 0.6 J/token}", PASS),
        ("{energy: 0.4 J/token}", FAIL),
        ("{energy: {limit: 90 J/request}}", FAIL),
        ("{energy: {limit: 120 J/request}}", PASS),
        ("{energy: 0.51 J/token}", INCONCLUSIVE),
    ],
)
def test_an_energy_term_uses_the_reading_error_as_its_interval(term: str, verdict: str) -> None:
    energy = EnergyUse(
        joules=80_000.0,
        error_j=4_000.0,
        watts=800.0,
        joules_per_output_token=0.5,
        joules_per_request=100.0,
    )
    recorded_run = run(VALID_RECORDS, slo=SLO)
    measured = replace(recorded_run, summary=replace(recorded_run.summary, energy=energy))
    run_verdict = judge_runs(term, (measured,))

    assert run_verdict.verdict == verdict, (run_verdict.low, run_verdict.value, run_verdict.high)


def test_an_energy_term_is_inconclusive_without_a_reading() -> None:
    assert judge_records("{energy: 0.6 J/token}", VALID_RECORDS).verdict == INCONCLUSIVE


@pytest.mark.parametrize(
    ("term", "verdict"),
    [
        ("{errors: 1%}", FAIL),
        ("{errors: 8%}", PASS),
        ("{goodput: 97%}", FAIL),
        ("{tpot: {limit: 1s, at: p99}}", FAIL),  # a failed request exceeds every limit
    ],
)
def test_failed_requests_fail_terms_and_leave_the_run_valid(term: str, verdict: str) -> None:
    records = VALID_RECORDS.copy()
    fail(records, 0.05)
    assert judge_records(term, records).verdict == verdict


@pytest.mark.parametrize(
    "term", ["{errors: 50%}", "{ttft: {limit: 50s, at: p50}}", "{requests: 1/s}"]
)
def test_terms_fail_if_all_requests_fail(term: str) -> None:
    records = VALID_RECORDS.copy()
    fail(records, 1.0)
    assert judge_records(term, records).verdict == FAIL


def test_a_percentile_of_too_few_requests_is_inconclusive() -> None:
    verdict = judge_records("{tpot: {limit: 1s, at: p95}}", VALID_RECORDS[:100])
    assert (verdict.verdict, verdict.code) == (INCONCLUSIVE, "no_figure")
    assert "100 " in verdict.reason
    assert "130" in verdict.reason


def test_a_term_is_not_judged_if_the_client_was_the_bottleneck() -> None:
    records = VALID_RECORDS.copy()
    records["sent_ns"] += 50_000_000
    verdict = judge_records("{tpot: {limit: 1s, at: p50}}", records)
    assert (verdict.verdict, verdict.code) == (INCONCLUSIVE, "not_judged")


def test_a_term_of_a_level_that_was_not_run_has_the_reason() -> None:
    level = MeasuredLevel(failure_reason="nothing listens")
    (verdict,) = judge_levels(contract_with("{errors: 1%}"), {"load": level})
    assert verdict.terms[0].reason == "nothing listens"


def records_of_one_token() -> Records:
    records = VALID_RECORDS.copy()
    records["output_tokens"] = 1
    return records


def records_without_some_token_counts() -> Records:
    records = VALID_RECORDS.copy()
    records["output_tokens"][::7] = -1
    return records


@pytest.mark.parametrize(
    ("term", "records", "gpus"),
    [
        ("{tpot: 1s}", records_of_one_token(), 4),
        ("{output_per_gpu: 1/s}", records_without_some_token_counts(), 4),
        ("{output_per_gpu: 1/s}", VALID_RECORDS, None),
    ],
    ids=["no_tpot", "uncounted_tokens", "unknown_gpus"],
)
def test_a_term_of_an_unknown_metric_is_inconclusive(
    term: str, records: Records, gpus: int | None
) -> None:
    verdict = judge_records(term, records, gpus=gpus)
    assert verdict.code == "no_figure", verdict.reason


def test_a_missing_rate_has_a_reason_with_the_number_of_requests() -> None:
    recorded_run = run(rows(1, 149, 8.0), slo=SLO)
    window = replace(recorded_run.summary.window, steady=windows.make_span(0, 0))
    without_window = replace(recorded_run, summary=replace(recorded_run.summary, window=window))
    reason = judge_runs("{requests: 7/s}", (without_window,)).reason
    assert "149 measured requests" in reason


def test_cached_prompts_are_not_a_cold_cache() -> None:
    records = VALID_RECORDS.copy()
    records["cached_tokens"] = 75
    assert judge_records("{errors: 1%}", records, options="cache: cold,").code == "not_judged"
    assert judge_records("{errors: 1%}", records, options="cache: warm,").verdict == PASS


def test_prompts_without_cached_tokens_are_not_a_warm_cache() -> None:
    verdict = judge_records("{errors: 1%}", VALID_RECORDS, options="cache: warm,")
    assert verdict.code == "not_judged"


@pytest.mark.parametrize(("slowdown", "verdict"), [(1.0, PASS), (1.25, FAIL)])
def test_a_term_between_nodes_fails_if_one_node_is_slower(slowdown: float, verdict: str) -> None:
    records = rows(2, 3000, 8.0)
    records["target"] = np.arange(3000) % 2
    is_second_node = records["target"] == 1
    token_time_ns = records["last_token_ns"] - records["first_token_ns"]
    slow_ns = (token_time_ns * slowdown).astype(np.int64)
    records["last_token_ns"][is_second_node] = (records["first_token_ns"] + slow_ns)[is_second_node]
    term = "{between_nodes: {of: tpot, at: p50, limit: 10%}}"
    assert judge_records(term, records, nodes=2).verdict == verdict


# -- changes during a load ---------------------------------------------------------------------


def test_a_drift_term_fails_if_the_second_half_is_slower() -> None:
    records = VALID_RECORDS.copy()
    is_late = records["due_ns"] > records["due_ns"][-1] // 2
    token_time_ns = (records["last_token_ns"] - records["first_token_ns"])[is_late]
    records["last_token_ns"][is_late] += token_time_ns * 3 // 10
    term = "{drift: {of: tpot, at: p50, limit: 15%, window: 2m}}"
    assert judge_records(term, records).verdict == FAIL


def test_a_drift_to_failed_requests_is_infinite() -> None:
    records = rows(5, 4000, 8.0)
    fail(records[2000:], 0.3)
    verdict = judge_records("{drift: {of: tpot, at: p95, limit: 15%, window: 2m}}", records)
    assert (verdict.verdict, verdict.value) == (FAIL, None)
    assert "only failed requests" in verdict.reason


def test_a_drift_from_failed_requests_is_unknown() -> None:
    records = rows(5, 4000, 8.0)
    fail(records[:2000], 0.3)
    verdict = judge_records("{drift: {of: tpot, at: p95, limit: 15%, window: 2m}}", records)
    assert (verdict.verdict, verdict.code) == (INCONCLUSIVE, "no_figure")


def records_with_start_up(initial_factor: float, *, share: float, n: int = 6000) -> Records:
    """Return records whose token times begin at a multiple of their final value.

    Args:
        initial_factor: Token times at the start, relative to those in steady state.
        share: The share of the load after which the token times reach steady state.
        n: The number of requests.
    """
    records = rows(5, n, 8.0)
    progress = records["due_ns"] / (records["due_ns"][-1] * share)
    factor = 1 + (initial_factor - 1) * np.maximum(0.0, 1 - progress)
    set_token_time(records, (records["last_token_ns"] - records["first_token_ns"]) * factor)
    return records


@pytest.mark.parametrize(("limit_ms", "verdict"), [(11.4, FAIL), (12.4, PASS)])
def test_a_fast_start_up_is_excluded_from_the_verdict(limit_ms: float, verdict: str) -> None:
    """The true value is 11.8 ms. The faster start would make it look better."""
    records = records_with_start_up(0.5, share=0.25)
    run_verdict = judge_records(f"{{tpot: {{limit: {limit_ms}ms, at: p50}}}}", records)
    assert run_verdict.verdict == verdict, run_verdict.reason
    assert "steady state from" in run_verdict.reason


def test_a_load_that_never_settles_does_not_pass() -> None:
    records = records_with_start_up(0.5, share=1.0)
    verdict = judge_records("{tpot: {limit: 12.4ms, at: p50}}", records)
    assert (verdict.verdict, verdict.code) == (INCONCLUSIVE, "one_sided")
    # What exceeds the limit already during the start-up fails.
    assert judge_records("{tpot: {limit: 3ms, at: p50}}", records).verdict == FAIL


def test_a_slow_start_up_counts_against_the_verdict() -> None:
    term = "{tpot: {limit: 16.5ms, at: p95}}"
    assert judge_records(term, records_with_start_up(1.0, share=0.25)).verdict == PASS
    assert judge_records(term, records_with_start_up(3.0, share=0.25)).verdict != PASS


def records_with_slow_fluctuation(
    seed: int, n: int = 3000, correlation: float = np.exp(-1 / 80)
) -> Records:
    """Return records at 8/s whose token times fluctuate slowly by 2 %, as in a shared batch.

    `correlation` is that of one request with the next. The default makes a fluctuation last for
    some ten seconds.
    """
    records = rows(5, n, 8.0)
    noise = np.random.default_rng(seed).normal(size=n)
    level = np.empty(n)
    level[0] = noise[0]
    for i in range(1, n):
        level[i] = correlation * level[i - 1] + np.sqrt(1 - correlation**2) * noise[i]
    set_token_time(records, 11e6 * 199 * np.exp(0.02 * level))
    return records


def test_a_tail_from_a_few_slow_fluctuations_is_inconclusive() -> None:
    """The limit is the true value, from thousands of requests but only dozens of fluctuations."""
    true_p99_ms = 11 * np.exp(0.02 * 2.3263)
    term = f"{{tpot: {{limit: {true_p99_ms:.5f}ms, at: p99}}}}"
    verdicts = [
        judge_records(term, records_with_slow_fluctuation(seed), horizon="1m") for seed in range(24)
    ]
    counts = Counter(verdict.verdict for verdict in verdicts)

    assert counts["PASS"] <= 2
    assert counts["FAIL"] <= 2
    reasons = [verdict.reason for verdict in verdicts if verdict.verdict == INCONCLUSIVE]
    assert "368 needed" in reasons[0]


def test_a_tail_well_below_the_limit_passes_despite_fluctuations() -> None:
    true_p99_ms = 11 * np.exp(0.02 * 2.3263)
    term = f"{{tpot: {{limit: {true_p99_ms * 1.15:.5f}ms, at: p99}}}}"
    verdicts = [
        judge_records(term, records_with_slow_fluctuation(seed), horizon="1m") for seed in range(10)
    ]
    passed = [verdict.reason for verdict in verdicts if verdict.verdict == PASS]
    assert len(passed) >= 8
    assert "variation over time" in passed[0]


def test_a_fluctuating_median_with_few_failed_requests_passes() -> None:
    """The effective sample is so small that its range is used, which ends with a failed request."""
    records = records_with_slow_fluctuation(8, n=16_000, correlation=np.exp(-1 / 400))
    fail(records, 0.005)
    assert judge_records("{tpot: {limit: 14ms, at: p50}}", records).verdict == PASS


def test_a_rate_excludes_the_time_before_the_first_completion() -> None:
    """No request ends in the first sixth of the load; after it the rate is 8/s."""
    records = rows(5, 3000, 8.0)
    for field in ("first_token_ns", "last_token_ns", "end_ns", "done_ns"):
        records[field] += records["due_ns"][-1] // 6
    assert judge_records("{requests: 7.5/s}", records).verdict == PASS


def test_a_rate_is_inconclusive_if_no_request_ended_under_load() -> None:
    """Requests of 10 s in 7 s of load: a rate of 0/s says nothing about the server."""
    records = rows(1, 56, 8.0)
    token_time_ns = records["last_token_ns"] - records["first_token_ns"]
    for field in ("last_token_ns", "end_ns", "done_ns"):
        records[field] += 10_000_000_000 - token_time_ns
    verdict = judge_records("{requests: 5/s}", records)
    assert (verdict.verdict, verdict.code, verdict.value) == (INCONCLUSIVE, "one_sided", 0.0)


def test_a_rate_term_fails_if_all_requests_fail() -> None:
    records = VALID_RECORDS.copy()
    fail(records, 1.0)
    assert judge_records("{requests: 5/s}", records).verdict == FAIL


# -- certainty of verdicts ---------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "expected"), [(0.9, "FAIL"), (1.1, "PASS")])
def test_terms_ten_percent_off_the_truth_are_decided_correctly(
    factor: float, expected: Verdict
) -> None:
    """The true values are of 400,000 requests (benchmarks/contract_power.py)."""
    true_ms = {"tpot": 11.80, "e2e": 2472.7}
    terms = ", ".join(
        f"{{{metric}: {{limit: {value * factor:.4f}ms, at: p50}}}}"
        for metric, value in true_ms.items()
    )
    contract = contract_with(terms)
    verdicts: Counter[Verdict] = Counter()
    for seed in range(1, 41):
        level = MeasuredLevel(runs=(run(rows(seed, 2000, 8.0)),))
        (level_verdict,) = judge_levels(contract, {"load": level})
        verdicts.update(term.verdict for term in level_verdict.terms)

    assert verdicts[expected] >= 72  # of 80
    assert verdicts["PASS" if expected == FAIL else "FAIL"] <= (0 if expected == FAIL else 4)


@pytest.mark.parametrize("requests", [1500, 2000])
def test_a_short_load_near_saturation_passes_no_queueing_latency(requests: int) -> None:
    """Three minutes at 94 % load are only a few samples of a queue that lasts for minutes."""
    terms = "{e2e: {limit: 3114ms, at: p50}}, {ttft: {limit: 643ms, at: p50}}"
    contract = contract_with(terms)
    # With these seeds the load looks like one of 87 %.
    for seed in (42, 47, 54, 56, 84, 86, 88, 90, 94):
        level = MeasuredLevel(runs=(run(rows(seed, requests, 11.0)),))
        (level_verdict,) = judge_levels(contract, {"load": level})
        assert PASS not in {term.verdict for term in level_verdict.terms}, (
            seed,
            level_verdict.terms,
        )


def records_of_switching_server(
    seed: int, length_s: float, fast_s: float, slow_s: float, slowdown: float
) -> Records:
    """Return records at 8/s of a server that is slow for `slow_s` after each `fast_s`.

    The load begins at a random point of this cycle.
    """
    records = rows(seed, int(length_s * 8), 8.0)
    cycle_s = fast_s + slow_s
    phase_s = np.random.default_rng(seed).uniform(0, cycle_s)
    is_slow = (records["due_ns"] / 1e9 + phase_s) % cycle_s >= fast_s
    set_token_time(records, 11e6 * 199 * np.where(is_slow, slowdown, 1.0))
    return records


@pytest.mark.parametrize("metric", ["tpot", "e2e"])
@pytest.mark.parametrize(
    ("fast_s", "slow_s", "slowdown", "at"),
    [(240, 60, 1.5, "p95"), (592, 8, 3.0, "p99")],
    ids=["on/off", "rare"],
)
def test_a_short_load_does_not_pass_a_server_that_changes_every_few_minutes(
    metric: str, fast_s: float, slow_s: float, slowdown: float, at: str
) -> None:
    """The limit is 10 % below the true value, that of the slow state, in runs of two minutes."""
    true_ms = 11 * slowdown if metric == "tpot" else 11 * 0.199 * slowdown * 1e3
    term = f"{{{metric}: {{limit: {true_ms * 0.9:.3f}ms, at: {at}}}}}"
    verdicts = [
        judge_records(
            term, records_of_switching_server(seed, 120, fast_s, slow_s, slowdown), horizon="2m"
        )
        for seed in range(12)
    ]

    assert PASS not in {verdict.verdict for verdict in verdicts}
    reasons = [verdict.reason for verdict in verdicts if verdict.verdict == INCONCLUSIVE]
    if metric == "tpot":
        assert any("recur within 3" in reason for reason in reasons)


def test_a_passed_term_states_its_horizon_and_effective_sample_size() -> None:
    verdict = judge_records("{tpot: {limit: 12.4ms, at: p50}}", VALID_RECORDS)
    load_s = (VALID_RECORDS["due_ns"][-1] - VALID_RECORDS["due_ns"][0]) / 1e9
    assert verdict.horizon_s == pytest.approx(load_s / np.log(40), rel=1e-3)
    assert verdict.effective_size is not None
    assert 10 < verdict.effective_size < 400
    text = verdict_text.format_coverage(verdict)
    assert f" {format.duration(verdict.horizon_s)};" in text
    assert text.endswith(f" {verdict.effective_size:,}")


@pytest.mark.parametrize("term", ["{errors: 1%}", "{requests: 7/s}", "{goodput: 60%}"])
def test_every_verdict_has_a_horizon(term: str) -> None:
    assert judge_records(term, VALID_RECORDS).horizon_s is not None


def test_a_short_load_passes_only_with_a_short_horizon() -> None:
    """Six minutes decide nothing about a server that may be slow for minutes."""
    term = "{tpot: {limit: 12.4ms, at: p50}}"
    verdict = judge_records(term, VALID_RECORDS, horizon="12m")

    assert (verdict.verdict, verdict.code) == (INCONCLUSIVE, "one_sided")
    assert "1 min 40 s" in verdict.reason
    assert "12 min 00 s" in verdict.reason

    load_s = (VALID_RECORDS["due_ns"][-1] - VALID_RECORDS["due_ns"][0]) / 1e9
    needed_s = intervals.length_to_meet_s(720, intervals.next_interim_level(0.95))
    assert verdict.additional_load_s == pytest.approx(needed_s - load_s, rel=0.2)
    assert judge_records(term, VALID_RECORDS, horizon="90s").verdict == PASS


def test_the_default_horizon_is_twelve_minutes() -> None:
    contract = parse_contract("name: c\nlevels:\n  - {name: load, workload: qa}\n", "c", {})
    assert contract.horizon_ns == 720 * 10**9


# -- repeats -----------------------------------------------------------------------------------


def test_pooled_gaps_of_three_repeats_have_an_interval() -> None:
    runs = tuple(run(rows(seed, 800, 8.0), slo=SLO) for seed in (1, 2, 3))
    verdict = judge_runs("{itl: {limit: 16ms, at: p50}}", runs, options="repeats: 3,")
    assert verdict.verdict == PASS, verdict.reason


def judge_repeats(term: str, repeats: list[Records], *, nodes: int = 1) -> TermVerdict:
    """Return the verdict on one must term of a level with one run per repeat."""
    runs = tuple(run(records, slo=SLO, nodes=nodes) for records in repeats)
    return judge_runs(term, runs, horizon="5s")


def test_differences_between_repeats_widen_the_interval() -> None:
    """Each run knows its own median to a percent, but the medians of the runs differ by 10 %."""
    equal = [records_with_slow_fluctuation(seed, 1500) for seed in (1, 2, 3)]
    different = [records.copy() for records in equal]
    for records, factor in zip(different, (0.9, 1.0, 1.1), strict=True):
        set_token_time(records, (records["last_token_ns"] - records["first_token_ns"]) * factor)
    term = "{tpot: {limit: 12ms, at: p50}}"

    assert judge_repeats(term, equal).verdict == PASS
    verdict = judge_repeats(term, different)
    assert verdict.verdict == INCONCLUSIVE
    assert verdict.high is not None
    assert verdict.high > 11 * np.exp(2 * 0.1)  # Student's t with two degrees of freedom


@pytest.mark.parametrize(
    "term",
    [
        "{drift: {of: tpot, at: p50, limit: 12%, window: 2m}}",
        "{between_nodes: {of: tpot, at: p50, limit: 12%}}",
    ],
)
def test_differences_between_repeats_widen_ratios_within_runs(term: str) -> None:
    """Each run knows its own ratio of windows or nodes to a percent, but the ratios differ."""
    equal = [rows(seed, 3000, 8.0) for seed in (1, 2, 3)]
    for records in equal:
        records["target"] = np.arange(len(records)) % 2
    different = [records.copy() for records in equal]
    for records, factor in zip(different, (0.9, 1.0, 1.1), strict=True):
        is_changed = records["target"] == 1
        if "drift" in term:
            is_changed = records["due_ns"] > records["due_ns"][-1] // 2
        token_time_ns = (records["last_token_ns"] - records["first_token_ns"])[is_changed]
        changed_ns = (token_time_ns * factor).astype(np.int64)
        records["last_token_ns"][is_changed] = records["first_token_ns"][is_changed] + changed_ns

    assert judge_repeats(term, equal, nodes=2).verdict == PASS
    assert judge_repeats(term, different, nodes=2).verdict == INCONCLUSIVE


# -- interim analyses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "verdict", "analysis"), [("30ms", PASS, 1), ("12.7ms", INCONCLUSIVE, 3)]
)
def test_each_interim_analysis_uses_a_higher_confidence(
    limit: str, verdict: str, analysis: int
) -> None:
    contract = contract_with(f"{{tpot: {{limit: {limit}, at: p50}}}}", horizon="20s")
    level = MeasuredLevel(runs=tuple(run(rows(seed, 1000)) for seed in (1, 2, 3)))
    run_counts = [{"load": 1}, {"load": 2}, {"load": 3}]
    (level_verdict,) = judge_interim_analyses(contract, {"load": level}, run_counts)
    (term,) = level_verdict.terms
    assert (term.verdict, term.analysis, len(level_verdict.runs)) == (verdict, analysis, 3), (
        term.reason
    )
    confidence_percent = (95, 97.5, 98.75)[analysis - 1]
    assert f"{confidence_percent:g} % CI" in term.reason


def test_the_suggested_load_for_the_horizon_suffices_for_the_next_analysis() -> None:
    horizon_s = 10.0
    load_s = intervals.length_to_meet_s(horizon_s, 0.95)
    load_check = load_checks.check_horizon(load_s, 0.95, horizon_s, "ttft p95")

    assert not load_check.is_short
    assert load_check.sufficient_load_s > load_s

    next_check = load_checks.check_horizon(
        load_check.sufficient_load_s, 0.975, horizon_s, "ttft p95"
    )

    assert not next_check.is_short


def test_the_suggested_load_for_a_queue_tail_suffices_for_the_next_analysis() -> None:
    load_check = load_checks.check_queue_tail(40.0, LoadLength(50.0, 600.0), 0.95, 0.95, "ttft p95")
    growth = load_check.sufficient_load_s / 600
    longer_load = LoadLength(50.0 * growth, load_check.sufficient_load_s)
    next_check = load_checks.check_queue_tail(40.0 * growth, longer_load, 0.95, 0.975, "ttft p95")
    assert not next_check.is_short


# -- whole validations -------------------------------------------------------------------------


def validation_with(
    verdict: Verdict, *, analyses: int = 1, interrupted: bool = False
) -> Validation:
    """Return a validation without levels."""
    return Validation(
        contract="c",
        contract_sha256="",
        verdict=verdict,
        sentence="",
        confidence=0.95,
        horizon_s=3600.0,
        analyses=analyses,
        target="",
        model="",
        server="",
        simulated=False,
        started="",
        ended="",
        version="",
        levels=(),
        interrupted=interrupted,
    )


def test_an_extended_validation_reports_the_confidence_of_its_last_analysis() -> None:
    validation = validation_with("PASS", analyses=2)
    confidence = verdict_text.format_confidence(validation)
    assert confidence.startswith("97.5 %, two-sided")
    assert "97.5 %" in verdict_text.describe_extensions(validation)
    inputs = PageInputs(contract_with("{requests: 7/s}"), "", {})
    page = html.render(sections.build_report(validation, inputs))
    assert confidence in re.sub(r"<[^>]+>", "", page)


@pytest.mark.parametrize(
    ("analyses", "column", "cells"),
    [
        ((2, 2), "97.5 % CI", ("1.00 ms to 2.00 ms", "1.00 ms to 2.00 ms")),
        ((1, 1), "95 % CI", ("1.00 ms to 2.00 ms", "1.00 ms to 2.00 ms")),
        ((None, None), "95 % CI", ("1.00 ms to 2.00 ms", "1.00 ms to 2.00 ms")),
        ((2, 1), "CI", ("1.00 ms to 2.00 ms (97.5 %)", "1.00 ms to 2.00 ms (95 %)")),
    ],
)
def test_the_interval_of_each_term_names_the_confidence_of_its_analysis(
    analyses: tuple[int | None, ...], column: str, cells: tuple[str, ...]
) -> None:
    terms = tuple(
        TermVerdict(
            term="ttft",
            level="load",
            requirement="must",
            verdict="PASS",
            reason="",
            low=1.0,
            high=2.0,
            unit="ms",
            analysis=analysis,
        )
        for analysis in analyses
    )
    level = LevelVerdict(
        name="load",
        verdict="PASS",
        workload="qa",
        load="",
        runs=(),
        requests=1,
        ok=1,
        terms=terms,
    )
    validation = replace(validation_with("PASS", analyses=2), levels=(level,))
    _, table_section, *_ = sections.build_brief_sections(validation, Paragraph(""))
    (table,) = table_section.parts
    assert isinstance(table, Table)
    assert table.head[-2:] == (column, "term")
    assert tuple(row[-2] for row in table.rows) == cells


def passed_level(*requirements: Requirement) -> LevelVerdict:
    """Return a level with a passed term of each requirement, which covers 12 minutes."""
    terms = tuple(
        TermVerdict(
            term="ttft",
            level="load",
            requirement=requirement,
            verdict="PASS",
            reason="",
            code="kept",
            horizon_s=720.0,
        )
        for requirement in requirements
    )
    return LevelVerdict(
        name="load",
        verdict="PASS",
        workload="qa",
        load="",
        runs=(),
        requests=1,
        ok=1,
        terms=terms,
    )


@pytest.mark.parametrize(("requirements", "has_note"), [(("must", "should"), 1), (("must",), 0)])
def test_recommended_terms_are_explained_below_the_table(
    requirements: tuple[Requirement, ...], has_note: int
) -> None:
    validation = replace(validation_with("PASS"), levels=(passed_level(*requirements),))
    text = as_text.render(sections.build_report(validation), full=False)
    assert text.count("(should):") == has_note
    assert text.count("recommended") == has_note


def test_a_pass_says_which_slowdowns_may_have_been_missed() -> None:
    validation = replace(validation_with("PASS"), levels=(passed_level("must"),))
    sentence = sections.describe_next_step(validation)
    assert "less often than every 12 min" in sentence
    assert "missed" in sentence and "longer load" in sentence


@pytest.mark.parametrize(
    ("verdict", "interrupted", "code"),
    [("PASS", False, 0), ("FAIL", False, 1), ("INCONCLUSIVE", False, 4), ("PASS", True, 130)],
)
def test_each_verdict_has_its_exit_code(verdict: Verdict, interrupted: bool, code: int) -> None:
    assert get_exit_code(validation_with(verdict, interrupted=interrupted)) == code


def test_the_combined_verdict_is_the_worst_one() -> None:
    all_verdicts: tuple[Verdict, ...] = ("PASS", "FAIL", "INCONCLUSIVE")
    for verdicts in itertools.product(all_verdicts, repeat=3):
        expected = PASS
        if INCONCLUSIVE in verdicts:
            expected = INCONCLUSIVE
        if FAIL in verdicts:
            expected = FAIL
        assert combine_verdicts(verdicts) == expected


def test_the_combined_verdict_of_no_terms_is_inconclusive() -> None:
    assert combine_verdicts([]) == INCONCLUSIVE


# -- intervals ---------------------------------------------------------------------------------


def test_the_interval_of_a_quantile_contains_the_true_value() -> None:
    values = np.random.default_rng(3).exponential(1.0, 20_000)
    median = quantile_interval.estimate_quantile([values], 0.5, 0.95)
    assert median.low < np.log(2) < median.high
    assert median.high - median.low < 0.06


def test_the_interval_of_a_quantile_is_unbounded_past_the_end_of_the_sample() -> None:
    values = np.random.default_rng(3).exponential(1.0, 30)
    assert quantile_interval.estimate_quantile([values], 0.99, 0.95).high == np.inf


def test_the_interval_of_a_quantile_is_wider_for_clustered_values() -> None:
    """Hundred equal values after each other are worth one."""
    draw = np.random.default_rng(3)
    independent = quantile_interval.estimate_quantile([draw.exponential(1.0, 20_000)], 0.5, 0.95)
    clustered_values = np.repeat(draw.exponential(1.0, 200), 100)
    clustered = quantile_interval.estimate_quantile([clustered_values], 0.5, 0.95)
    assert clustered.half_width > 5 * independent.half_width


def test_the_interval_of_a_share_without_a_miss_has_an_upper_end_above_zero() -> None:
    share = quantile_interval.estimate_fraction([np.zeros(1000)], 0.95)
    assert share.high == pytest.approx(0.0038, abs=1e-4)
    assert compute_requests_without_miss(0.0038, 0.95) == pytest.approx(1007, abs=5)


def test_the_interval_of_a_quotient_uses_both_intervals() -> None:
    numerator = Interval(2, 1.9, 2.1)
    quotient = intervals.divide_intervals(numerator, Interval(1, 0.9, 1.1))
    assert quotient.low == pytest.approx(1.79, abs=0.01)
    assert intervals.divide_intervals(numerator, Interval(1, -np.inf, 1.1)).high == np.inf
