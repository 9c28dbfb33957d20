"""The steady window of MLPerf Endpoints: each verdict on a synthetic run, and properties.

`benchmarks/endpoints_steady.py` compares the same function with the reference detector of
MLCommons on runs over simulated servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.results.record import ROW, STATUS
from loadgen.mlperf.endpoints.rules import MIN_SUPER_PASSES
from loadgen.mlperf.endpoints.steady_state_block import build_steady_state_block
from loadgen.mlperf.endpoints.steady_window import (
    DETECTABLE_DURATION_S,
    MAX_VARIATION,
    SteadyState,
    find_steady_state,
)
from loadgen.mlperf.endpoints.super_passes import (
    NEVER_NS,
    QueryLog,
    build_query_log,
    group_by_super_pass,
)

MS = 1_000_000
S = 1000 * MS
SUPER_PASS = 20
SUPER_PASS_S = 100
LATER_TOKENS = 50
SPREAD = np.linspace(0.9, 1.1, SUPER_PASS)
"""TPOT varies by 10 % within a super-pass, in the same way in each."""

STEADY_TPOTS_MS = (18.0, *([20.0] * 14))


def make_log(
    tpots_ms: Sequence[float],
    *,
    ttfts_ms: Sequence[float] | None = None,
    super_pass_s: float = SUPER_PASS_S,
) -> QueryLog:
    """Return a run with these means of TPOT and TTFT by super-pass, issued at a constant rate."""
    queries = SUPER_PASS * len(tpots_ms)
    issued_ns = np.round(np.arange(queries) * super_pass_s * S / SUPER_PASS).astype(np.int64)
    spread = np.tile(SPREAD, len(tpots_ms))
    ttft_ns = np.repeat(ttfts_ms or [200.0] * len(tpots_ms), SUPER_PASS) * spread * MS
    tpot_ns = np.repeat(np.asarray(tpots_ms), SUPER_PASS) * spread * MS
    first_token_ns = issued_ns + ttft_ns.astype(np.int64)
    return QueryLog(
        issued_ns=issued_ns,
        first_token_ns=first_token_ns,
        completed_ns=first_token_ns + (tpot_ns * LATER_TOKENS).astype(np.int64),
        later_tokens=np.full(queries, LATER_TOKENS, np.int64),
    )


def judge(log: QueryLog, concurrency: int = 16) -> SteadyState:
    return find_steady_state(log, SUPER_PASS, concurrency)


def rising(start: float, end: float, super_passes: int) -> list[float]:
    return list(np.linspace(start, end, super_passes))


def shift_by(log: QueryLog, shift_ns: int) -> QueryLog:
    """Return the same run at another time."""

    def shift(times_ns: np.ndarray) -> np.ndarray:
        return np.where(times_ns == NEVER_NS, NEVER_NS, times_ns + shift_ns)

    return log._replace(
        issued_ns=shift(log.issued_ns),
        first_token_ns=shift(log.first_token_ns),
        completed_ns=shift(log.completed_ns),
    )


# -- each verdict ----------------------------------------------------------------------------------


def test_a_constant_tpot_is_a_steady_state_after_the_ramp_up() -> None:
    state = judge(make_log(STEADY_TPOTS_MS))
    assert (state.verdict, state.status, state.is_official) == ("STEADY STATE", "windowable", True)
    assert state.ramp_up_super_passes == 1
    assert state.window is not None
    assert (state.window.first_super_pass, state.window.end_super_pass) == (1, 15)
    assert (state.window.first_query, state.window.end_query) == (20, 300)
    assert state.window.start_ns == 100 * S
    assert state.window.duration_s == pytest.approx(1395)  # the last of 280 queries, 5 s apart
    assert state.states == {"tpot_p50": "Plateau", "tpot_p90": "Plateau"}
    assert state.level_shift is None
    assert state.reason == ""


def test_a_tpot_that_creeps_up_after_a_plateau_is_drifting_up() -> None:
    state = judge(make_log([18.0, *([20.0] * 10), *rising(20.1, 22.0, 6)]))
    assert state.verdict == "drifting_up"
    assert state.window is not None
    assert state.window.first_super_pass == 1
    assert (state.trends["tpot_p50"], state.trends["tpot_p90"]) == ("up", "up")
    assert state.states == {"tpot_p50": "Plateau", "tpot_p90": "Plateau"}  # in the window


def test_a_tpot_that_creeps_down_after_a_plateau_is_drifting_down() -> None:
    state = judge(make_log([20.5, *([20.0] * 10), *rising(19.9, 18.2, 6)]))
    assert state.verdict == "drifting_down"
    assert state.trends["tpot_p50"] == "down"


def test_a_step_to_a_slower_plateau_is_an_anomaly_and_the_first_plateau_is_reported() -> None:
    state = judge(make_log([18.0, *([20.0] * 16), *([30.0] * 5)]), concurrency=8)
    assert (state.verdict, state.status) == ("anomaly", "windowable")
    assert state.window is not None
    assert (state.window.first_super_pass, state.window.end_super_pass) == (1, 17)
    assert state.level_shift is not None
    assert state.level_shift.super_pass == 17
    assert state.level_shift.change == pytest.approx(0.5, abs=1e-6)
    assert len(state.plateaus) == 2


def test_a_tpot_that_rises_throughout_has_no_window() -> None:
    state = judge(make_log([10.0 * 1.1**super_pass for super_pass in range(20)]))
    assert (state.verdict, state.status) == ("not found", "insufficient_passes")
    assert state.window is None
    assert state.states["tpot_p50"] == "Drifting Up"
    assert "tpot_p50" in state.reason


def test_a_tpot_that_scatters_has_no_window() -> None:
    state = judge(make_log([20.0, 26.0] * 10))
    assert (state.verdict, state.status) == ("not found", "insufficient_passes")
    assert state.states["tpot_p50"] == "Plateau"
    assert f"{MAX_VARIATION:.0%}" in state.reason


def test_a_step_that_comes_early_is_taken_for_the_end_of_the_ramp_up() -> None:
    # The steady level is the median of the second half, and that is the later level here.
    state = judge(make_log([18.0, *([20.0] * 6), *([26.0] * 12)]), concurrency=8)
    assert state.ramp_up_super_passes == 7
    assert state.verdict == "STEADY STATE"


def test_ttft_alone_gives_a_warning_and_no_verdict() -> None:
    state = judge(make_log(STEADY_TPOTS_MS, ttfts_ms=rising(200.0, 2000.0, 15)))
    assert state.verdict == "STEADY STATE"
    assert state.trends["ttft_p90"] == "up"
    assert set(state.states) == {"tpot_p50", "tpot_p90"}


# -- coverage --------------------------------------------------------------------------------------


def test_a_window_shorter_than_its_region_requires_is_not_official() -> None:
    log = make_log([18.0, *([20.0] * 8)])  # a window of 795 s
    assert judge(log, concurrency=32).status == "windowable"
    above = judge(log, concurrency=33)
    assert (above.verdict, above.status) == ("STEADY STATE", "insufficient_duration")
    assert not above.is_official
    assert (judge(log, concurrency=32).minimum_duration_s, above.minimum_duration_s) == (600, 1200)


def test_plateaus_that_are_all_too_short_give_no_window_and_are_reported() -> None:
    state = judge(make_log(STEADY_TPOTS_MS, super_pass_s=10))
    assert (state.verdict, state.status) == ("not found", "insufficient_duration")
    assert state.window is not None
    assert state.window.duration_s < DETECTABLE_DURATION_S
    assert state.duration_need is not None
    assert state.duration_need.decisive_term == "floor"
    assert "600 s" in state.reason


def test_a_short_plateau_is_skipped_for_a_later_one_that_is_long_enough() -> None:
    state = judge(make_log([18.0, *([20.0] * 4), 30.0, *([20.0] * 10)]))
    assert state.skipped_plateaus == 1
    assert state.window is not None
    assert state.window.first_super_pass == 6
    assert state.verdict == "STEADY STATE"


def test_long_responses_need_a_longer_window() -> None:
    slow = make_log([18.0 * 150, *([20.0 * 150] * 8)])  # responses of about 150 s
    state = judge(slow)
    assert state.duration_need is not None
    assert state.duration_need.decisive_term == "relaxation"
    assert state.duration_need.relaxation_s == pytest.approx(5 * 162, rel=0.02)


def test_a_noisy_metric_needs_more_super_passes() -> None:
    state = judge(make_log([18.0, *([18.6, 21.4] * 8)]))  # varies by 7 %
    assert state.duration_need is not None
    assert state.duration_need.variation == pytest.approx(0.07, abs=1e-3)
    assert state.duration_need.needed_super_passes == 8  # ceil((1.96 * 0.07 / 0.05)²)
    assert state.duration_need.precision_s == pytest.approx(8 * 95)


@pytest.mark.parametrize(
    ("queries", "status"),
    [(0, "partial_dataset"), (SUPER_PASS - 1, "partial_dataset"), (70, "insufficient_passes")],
)
def test_a_run_that_is_too_short_for_a_window_has_the_hint_to_run_longer(
    queries: int, status: str
) -> None:
    log = make_log(STEADY_TPOTS_MS)
    state = judge(QueryLog(*(column[:queries] for column in log)))
    assert (state.verdict, state.status) == ("not found", status)
    assert state.window is None
    assert "Run longer" in state.reason


def test_queries_that_all_failed_have_no_window() -> None:
    log = make_log(STEADY_TPOTS_MS)
    nothing = np.full_like(log.issued_ns, NEVER_NS)
    state = judge(log._replace(first_token_ns=nothing, completed_ns=nothing))
    assert (state.verdict, state.window) == ("not found", None)


# -- properties ------------------------------------------------------------------------------------

TPOTS_MS = st.lists(st.sampled_from([19.0, 19.5, 20.0, 20.4, 22.0, 26.0]), min_size=1, max_size=24)


@given(TPOTS_MS, st.integers(0, 10**18))
def test_the_start_time_of_a_run_shifts_only_the_times_of_its_window(
    tpots_ms: list[float], shift_ns: int
) -> None:
    log = make_log(tpots_ms)
    here = judge(log)
    there = judge(shift_by(log, shift_ns))
    assert (there.verdict, there.status, there.trends) == (here.verdict, here.status, here.trends)
    assert there.variations == here.variations
    if here.window is not None:
        assert there.window is not None
        assert there.window.first_query == here.window.first_query
        assert there.window.end_query == here.window.end_query
        assert there.window.start_ns - shift_ns == here.window.start_ns


@given(TPOTS_MS, st.integers(2, 50))
def test_a_slower_time_scale_changes_no_plateau_and_no_trend(
    tpots_ms: list[float], scale: int
) -> None:
    log = make_log(tpots_ms)
    slow = log._replace(
        issued_ns=log.issued_ns * scale,
        first_token_ns=log.first_token_ns * scale,
        completed_ns=log.completed_ns * scale,
    )
    here = judge(log)
    there = judge(slow)
    assert [plateau.first_query for plateau in there.plateaus] == [
        plateau.first_query for plateau in here.plateaus
    ]
    assert [plateau.end_query for plateau in there.plateaus] == [
        plateau.end_query for plateau in here.plateaus
    ]
    assert there.ramp_up_super_passes == here.ramp_up_super_passes


@given(TPOTS_MS)
def test_a_window_is_a_plateau_of_complete_super_passes_after_the_ramp_up(
    tpots_ms: list[float],
) -> None:
    state = judge(make_log(tpots_ms))
    ends = [plateau.end_super_pass for plateau in state.plateaus]
    starts = [plateau.first_super_pass for plateau in state.plateaus]
    assert starts == sorted(starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    for plateau in state.plateaus:
        assert plateau.super_passes >= MIN_SUPER_PASSES
        assert plateau.first_super_pass >= state.ramp_up_super_passes
        assert plateau.first_query == plateau.first_super_pass * SUPER_PASS
    assert (state.window is None) == (not state.plateaus)
    assert state.is_official <= (state.verdict != "not found")


# -- the block of a submission ---------------------------------------------------------------------


def test_the_steady_state_block_has_the_fields_that_the_checker_reads() -> None:
    log = make_log(STEADY_TPOTS_MS)
    failed = log.completed_ns.copy()
    failed[[0, 25, 26]] = NEVER_NS  # the first one is before the window
    log = log._replace(completed_ns=failed)
    state = judge(log)
    assert state.window is not None
    assert build_steady_state_block(state, log) == {
        "status": "windowable",
        "verdict": "STEADY STATE",
        "window": {
            "super_pass_start": 1,
            "super_pass_end": 14,
            "super_pass_size": SUPER_PASS,
            "n_samples": 278,
            "duration_s": state.window.duration_s,
        },
        "state": {"tpot_p50": "Plateau", "tpot_p90": "Plateau"},
    }


def test_the_steady_state_block_of_a_step_states_its_position() -> None:
    log = make_log([18.0, *([20.0] * 16), *([30.0] * 5)])
    block = build_steady_state_block(judge(log), log)
    assert block["anomaly"] == {"change_point_super_pass": 17, "delta_pct": pytest.approx(50)}


def test_the_steady_state_block_of_a_point_without_a_plateau_has_no_window() -> None:
    log = make_log([20.0, 26.0] * 10)
    block = build_steady_state_block(judge(log), log)
    assert (block["status"], block["verdict"]) == ("insufficient_passes", "not found")
    assert "window" not in block
    assert "anomaly" not in block


# -- the query log ---------------------------------------------------------------------------------


def test_the_query_log_of_a_run_is_in_the_order_of_issue_and_includes_failures() -> None:
    rows = np.zeros(4, ROW)
    rows["slot"] = [0, 1, 2, 3]
    rows["due_ns"] = [70, 20, -1, 40]
    rows["first_token_ns"] = [90, 25, -1, 55]
    rows["end_ns"] = [150, 60, -1, 80]
    rows["output_tokens"] = [9, 5, -1, 3]
    rows["first_event_tokens"] = [2, 0, 0, 0]
    rows["status"] = [STATUS["ok"], STATUS["ok"], STATUS["dropped"], STATUS["failed"]]
    log = build_query_log({name: rows[name] for name in ROW.names or ()})
    assert log.issued_ns.tolist() == [20, 40, 70]
    assert log.first_token_ns.tolist() == [25, 55, 90]
    assert log.completed_ns.tolist() == [60, NEVER_NS, 150]
    assert log.later_tokens.tolist() == [4, 2, 7]
    assert log.tpot_ns[0] == pytest.approx(35 / 4)
    assert np.isnan(log.tpot_ns[1])


def test_the_last_super_pass_may_be_incomplete() -> None:
    log = make_log([20.0, 20.0])
    passes = group_by_super_pass(QueryLog(*(column[:25] for column in log)), SUPER_PASS)
    assert passes.count == 2
    assert [len(samples) for samples in passes.tpot_ns] == [20, 5]
    assert passes.query_range(1, 2) == range(20, 25)


def test_a_log_that_is_not_in_the_order_of_issue_is_refused() -> None:
    log = make_log([20.0])
    with pytest.raises(ValueError, match="order of issue"):
        judge(QueryLog(*(column[::-1] for column in log)))
    with pytest.raises(ValueError, match="at least 1"):
        find_steady_state(log, 0, 1)
