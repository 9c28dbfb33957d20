"""What a run will cost: the forecast, the money, and the limit before and while it runs."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path

import pytest
from command_line import exits
from expected_errors import refused
from servers import shared

from loadgen.core.errors import UserError
from loadgen.core.execution.events import Counters, RunningLoad
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.forecast import (
    Forecast,
    MeanTokens,
    combine_forecasts,
    forecast_load,
    mean_tokens,
)
from loadgen.core.workload import read_flags
from loadgen.core.workload.loading import load_from_options
from loadgen.pricing.budget import Budget
from loadgen.pricing.price_file import load_prices
from loadgen.runs.planned_runs import describe_too_few_requests, forecast_run
from loadgen.runs.run_display import RunDisplay, _PricedLoad

PRICES = """\
currency: USD
rented:
  - {provider: A, shape: four, gpu: X, gpus: 4, per_hour: 36, as_of: 2026-11, source: quote}
per_token:
  - {provider: B, model: m, per_million_input: 2, per_million_output: 10, as_of: 2026-11, source: s}
"""


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    (tmp_path / "prices.yaml").write_text(PRICES)
    return tmp_path / "prices.yaml"


def target(**facts: object) -> tuple[TargetFacts, ...]:
    return (TargetFacts(**{"url": "http://h", "server": "vllm", "model": "m"} | facts),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "answer_s", "requests", "seconds"),
    [
        ({"request_rate": 10, "duration": 60}, 0.0, 600, 60),
        ({"concurrency": 8, "num_requests": 80}, 2.0, 80, 20),
        ({"concurrency": 8, "num_requests": 80}, 0.0, 80, None),
        ({"concurrency": 8, "duration": 60}, 2.0, 240, 60),
        ({"concurrency": 8, "duration": 60}, 0.0, None, 60),
    ],
)
def test_the_forecast_of_a_load_states_requests_tokens_and_time(
    flags: dict[str, int], answer_s: float, requests: float | None, seconds: float | None
) -> None:
    workload = load_from_options(
        None, None, read_flags(input_tokens=1000, output_tokens=200, seed=1, **flags)
    )
    prompts = build_prompts(workload, 1, 2, load_tokenizer(None))
    load = forecast_load(build_schedule(workload, 1), mean_tokens(prompts), answer_s)

    assert load.requests == (requests if requests != 600 else pytest.approx(600, rel=0.15))
    assert (
        load.seconds == seconds
        and load.output_tokens == 200
        and load.input_tokens == pytest.approx(1000, rel=0.05)
    )


@pytest.mark.parametrize(
    ("load", "answer_s", "expected_text"),
    [
        ({"concurrency": 16, "duration": 10, "slo": ["ttft:2s:p95"]}, 24.0, "~7 requests"),
        ({"concurrency": 16, "duration": 200, "slo": ["ttft:2s:p95"]}, 24.0, ""),  # 133, of 130
        (
            {"concurrency": 8, "num_requests": 129, "slo": ["e2e:2s:p50", "ttft:2s:p95"]},
            0.0,
            "TTFT p95 (130 needed)",
        ),
        ({"concurrency": 8, "num_requests": 130, "slo": ["e2e:2s:p50", "ttft:2s:p95"]}, 0.0, ""),
        ({"concurrency": 16, "duration": 10, "slo": ["ttft:2s:p95"]}, 0.0, ""),  # not known
        ({"concurrency": 8, "num_requests": 12}, 0.0, ""),
    ],
)
def test_a_load_too_short_for_its_slo_is_reported_before_it_starts(
    load: dict[str, object], answer_s: float, expected_text: str
) -> None:
    """Its warm-up counts for nothing."""
    workload = load_from_options(
        None, None, read_flags(input_tokens=10, output_tokens=10, seed=1, warmup=60, **load)
    )
    measured, full_forecast = forecast_run(
        build_schedule(workload, 1), MeanTokens(10, 10), answer_s
    )

    assert full_forecast == pytest.approx(
        forecast_load(build_schedule(workload, 1), MeanTokens(10, 10), answer_s)
    )
    text = describe_too_few_requests(measured, workload.slo)
    assert expected_text in text and bool(expected_text) == bool(text)


def test_a_forecast_states_the_cost_by_token_and_by_hour(prices: Path) -> None:
    load = Forecast(1000, 1800, 500, 100)
    budget = Budget(load_prices(prices))

    assert budget.forecast_cost(load, target()) == pytest.approx(
        Decimal(2), abs=Decimal("1e-6")
    )  # 1 for prompts, 1 for answers
    assert budget.forecast_cost(load, target(shape="four", gpus=4)) == pytest.approx(
        Decimal(18), abs=Decimal("1e-6")
    )
    assert budget.forecast_cost(load._replace(requests=None), target()) is None
    with refused(UserError, "missing_option", "--gpus"):
        budget.forecast_cost(load, target(shape="four"))

    budget.limit, budget.spent = Decimal(3), Decimal(2)
    budget.check_limit(Decimal(1))
    with pytest.raises(UserError, match=r"1\.50 USD.* 2\.00 USD(.|\n)*--> --max-cost 3"):
        budget.check_limit(Decimal("1.5"))


def test_machines_by_the_hour_cost_as_much_with_any_number_of_requests(prices: Path) -> None:
    """Of closed loops by time nothing was said before the first was probed."""
    budget, unknown = Budget(load_prices(prices)), Forecast(None, 1800, 500, 100)
    assert budget.forecast_cost(unknown, target(shape="four", gpus=4)) == budget.forecast_cost(
        Forecast(1000, 1800, 500, 100), target(shape="four", gpus=4)
    )
    assert budget.forecast_cost(unknown, target()) is None, "by the token"
    assert (
        budget.forecast_cost(Forecast(None, None, 500, 100), target(shape="four", gpus=4)) is None
    )


@pytest.mark.processes
def test_a_run_over_the_cost_limit_does_not_start(
    prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prices.parent / "out"
    target = ("--url", shared().url)
    load = ("run", "--isl", "20", "--osl", "5", "-c", "2", "-d", "1h", "-o", str(out), *target)
    paid = (*load, "--gpus", "4", "--shape", "four", "--prices", str(prices))

    assert exits(*paid, "--max-cost", "30") == 2
    stderr = capsys.readouterr().err
    assert (
        "expected: about" not in stderr
        and "would cost about 36.00 USD" in stderr
        and not out.exists()
    )
    assert exits(*paid, "--dry-run") == 0
    assert "cost: about 36.00 USD" in capsys.readouterr().out
    by_token = (*load, "-m", "m", "--prices", str(prices), "--dry-run")
    assert exits(*by_token) == 0
    assert "cost: known after" in capsys.readouterr().out
    assert exits(*paid[:5], "--request-rate", "2", *paid[7:], "--dry-run") == 0
    assert "cost: about 36.00 USD" in capsys.readouterr().out
    assert exits(*load, "--max-cost", "30") == 2
    assert "add --prices FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected_text"),
    [
        (
            ("sweep", "--request-rate", "1,2,4", "-d", "1h"),
            "these 3 runs would cost about 108.00 USD",
        ),
        (
            ("run", "--request-rate", "1", "-d", "1h", "--repeat", "2"),
            "these 2 runs would cost about 72.00 USD",
        ),
    ],
)
def test_the_cost_limit_applies_to_all_runs_of_a_command_before_the_first(
    command: tuple[str, ...], expected_text: str, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prices.parent / "out"
    load = (
        *command,
        "--isl",
        "20",
        "--osl",
        "5",
        "--gpus",
        "4",
        "--shape",
        "four",
        "--prices",
        str(prices),
    )
    each_fits = (*load, "--max-cost", "40", "-o", str(out), "--url", "http://127.0.0.1:9")

    assert exits(*each_fits) == 2
    assert expected_text in capsys.readouterr().err and not out.exists()


def test_a_dry_run_over_the_cost_limit_is_refused(
    prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = (
        "sweep",
        "--url",
        "http://127.0.0.1:9",
        "--request-rate",
        "1,2",
        "-d",
        "1h",
        "--isl",
        "20",
        "--osl",
        "5",
        "--gpus",
        "4",
        "--shape",
        "four",
    )
    paid = (*load, "--prices", str(prices), "--dry-run", "--max-cost")

    assert exits(*paid, "73") == 0
    assert "all 2 runs: about 72.00 USD" in capsys.readouterr().out
    assert exits(*paid, "71") == 2


def test_a_simulated_run_costs_nothing(prices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run in virtual time is not refused for its cost, like the run itself."""
    out = prices.parent / "out"
    load = (
        "run",
        "--isl",
        "20",
        "--osl",
        "5",
        "--request-rate",
        "1",
        "-d",
        "36s",
        "--seed",
        "1",
        "--url",
        "sim:gb300-vm",
    )
    paid = (
        *load,
        "--gpus",
        "4",
        "--shape",
        "four",
        "--prices",
        str(prices),
        "--max-cost",
        "0.1",
        "-o",
        str(out),
    )

    for more in (("--dry-run",), ()):
        assert exits(*paid, *more) in (0, 3)
        assert "0.36 USD on a real server" in "".join(capsys.readouterr())


def test_the_hint_for_a_run_without_a_price_names_the_option_shape(prices: Path) -> None:
    budget = Budget(load_prices(prices))
    with pytest.raises(UserError) as exc_info:
        budget.forecast_cost(Forecast(1000, 1800, 500, 100), target(model=""))
    assert "--shape (four" in exc_info.value.hint and "--price " not in exc_info.value.hint


def test_a_load_is_stopped_when_it_reaches_the_cost_limit(
    prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counters, stopped = Counters(), []
    counters.sent, counters.events = 1000, 100_000
    display = RunDisplay(budget=Budget(load_prices(prices), Decimal("1.99")))
    display._priced_load = _PricedLoad(Forecast(1000, 1800, 500, 10), target())

    async def follow() -> None:
        display._start_cost_monitor(RunningLoad(lambda: counters, lambda: stopped.append(1)))
        await asyncio.sleep(0)

    asyncio.run(follow())
    assert stopped == [1] and "cost 2.00 USD (--max-cost)" in capsys.readouterr().err


def test_several_loads_have_one_combined_forecast() -> None:
    short, long = Forecast(100.0, 60.0, 150.0, 500.0), Forecast(300.0, 120.0, 350.0, 100.0)
    assert combine_forecasts([short, long]) == (400.0, 180.0, 300.0, 200.0)
    assert combine_forecasts([short, Forecast(None, 120.0, 350.0, 100.0)]) == (
        None,
        180.0,
        250.0,
        300.0,
    ), "a closed loop by time"
