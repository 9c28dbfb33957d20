"""How many requests a schedule will send and how long it will take."""

from __future__ import annotations

from schedule_workloads import S, closed, constant, workload

from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.forecast import Forecast, MeanTokens, combine_forecasts, forecast_load
from loadgen.core.workload import Stage

TOKENS = MeanTokens(20.0, 6.0)


def forecast_of(stage: Stage, response_s: float = 0.0) -> Forecast:
    return forecast_load(build_schedule(workload(stage), seed=1), TOKENS, response_s)


def test_the_forecast_of_an_open_loop_needs_no_response_time() -> None:
    assert forecast_of(constant(10, count=50)) == (50, 5, 20, 6)


def test_forecast_requests_of_a_timed_closed_loop_need_a_response_time() -> None:
    stage = closed(4, duration_ns=30 * S)
    assert forecast_of(stage, response_s=2.0) == (60, 30, 20, 6)
    assert forecast_of(stage) == (None, 30, 20, 6)


def test_the_forecast_time_of_a_counted_closed_loop_needs_a_response_time() -> None:
    stage = closed(4, count=60)
    assert forecast_of(stage, response_s=2.0) == (60, 30, 20, 6)
    assert forecast_of(stage) == (60, None, 20, 6)


def test_a_combined_forecast_weights_mean_lengths_by_requests() -> None:
    loads = [Forecast(10, 5.0, 100.0, 1.0), Forecast(30, 7.0, 20.0, 5.0)]
    assert combine_forecasts(loads) == (40, 12.0, 40.0, 4.0)
