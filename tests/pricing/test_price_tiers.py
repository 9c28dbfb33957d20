"""Prices by the token that change above a number of prompt tokens."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import exits
from loadgen_sdk.errors import WrongUse
from loadgen_sdk.price_file import read_prices

from loadgen.core.errors import CombinedError
from loadgen.core.results import store
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.schedule.forecast import Forecast
from loadgen.pricing.budget import Budget
from loadgen.pricing.price_file import load_prices

ABOVE = "above_prompt_tokens: 1000, per_million_input_above: 4, per_million_output_above: 20"
PRICE = "provider: P, model: llama-2-70b, as_of: 2026-11, source: page"
FLAT = "per_million_input: 2, per_million_output: 10"


def write_prices(tmp_path: Path, *keys: str, model: str = "llama-2-70b") -> Path:
    file = tmp_path / "prices.yaml"
    entry = ", ".join((PRICE.replace("llama-2-70b", model), *keys))
    file.write_text(f"currency: USD\nper_token:\n  - {{{entry}}}\n", "utf-8")
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose prompts have 500 to 1,500 tokens."""
    folder = tmp_path_factory.mktemp("tiers")
    workload = folder / "w.yaml"
    workload.write_text(
        "name: w\nrequests: {input_tokens: {uniform: {min: 500, max: 1500}}, output_tokens: 50}\n",
        "utf-8",
    )
    load = ("--request-rate", "5", "-n", "60", "--seed", "1", "--warmup", "5req")
    assert exits("run", workload, "--url", "sim:gb300-vm", *load, "-o", folder / "run") == 0
    return folder / "run"


def priced(run: Path, prices: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the offer of a run under these prices."""
    capsys.readouterr()
    assert exits("cost", run, "--prices", prices, "--json") == 0
    decoded: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    return decoded


def test_a_request_above_the_tier_length_is_charged_entirely_at_the_higher_price(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = store.read_run(run).rows
    measured = rows[rows["stage"] == rows["stage"].max()]
    is_long = measured["input_tokens"] > 1000

    assert 0 < is_long.sum() < len(measured) == 60

    expected = Decimal(0)
    for factor, chosen in ((1, ~is_long), (2, is_long)):
        prompt, output = (
            int(measured[f"{side}_tokens"][chosen].sum()) for side in ("input", "output")
        )
        expected += Decimal(factor * (prompt * 2 + output * 10)) / 1_000_000
    offer = priced(run, write_prices(tmp_path, FLAT, ABOVE), capsys)["offers"][0]
    total = Decimal(offer["costs"]["request"]["total"])

    assert float(total * 60) == pytest.approx(float(expected), rel=1e-6)


def test_a_tier_above_every_prompt_changes_no_cost(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = priced(run, write_prices(tmp_path, FLAT), capsys)["offers"][0]["costs"]
    high = ABOVE.replace("1000", "9000")
    tiered = priced(run, write_prices(tmp_path, FLAT, high), capsys)["offers"][0]["costs"]
    assert tiered == flat


@pytest.mark.parametrize(
    "keys", ["above_prompt_tokens: 1000", "per_million_input_above: 4", "above_prompt_tokens: 0"]
)
def test_a_tier_without_a_length_or_without_prices_is_refused(tmp_path: Path, keys: str) -> None:
    file = write_prices(tmp_path, FLAT, keys)
    with pytest.raises(CombinedError):
        load_prices(file)
    with pytest.raises(WrongUse):
        read_prices(file)


def test_an_application_call_is_charged_by_the_length_of_its_prompt(tmp_path: Path) -> None:
    cached = "per_million_cached: 1, per_million_cached_above: 3"
    price = read_prices(write_prices(tmp_path, FLAT, ABOVE, cached))["llama-2-70b"]
    assert price.cost(1000, 100) == pytest.approx(0.003)
    assert price.cost(1001, 100) == pytest.approx((1001 * 4 + 100 * 20) / 1e6)
    assert price.cost(1200, 0, cached=1000) == pytest.approx((200 * 4 + 1000 * 3) / 1e6)


@pytest.mark.parametrize(("prompt_tokens", "cost"), [(1000.0, 2_500), (1001.0, 5_004)])
def test_a_forecast_is_priced_by_the_mean_length_of_its_prompts(
    tmp_path: Path, prompt_tokens: float, cost: int
) -> None:
    budget = Budget(load_prices(write_prices(tmp_path, FLAT, ABOVE, model="m")))
    load = Forecast(requests=1e6, input_tokens=prompt_tokens, output_tokens=50.0, seconds=60.0)
    target = TargetFacts(url="http://h", server="vllm", model="m")
    assert budget.forecast_cost(load, [target]) == cost


def test_a_cached_price_above_the_uncached_price_causes_a_warning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer = priced(run, write_prices(tmp_path, FLAT, "per_million_cached: 3"), capsys)["offers"][0]
    assert "cached_above_input" in [note["code"] for note in offer["note_codes"]]
    fair = priced(run, write_prices(tmp_path, FLAT, "per_million_cached: 1"), capsys)["offers"][0]
    assert "cached_above_input" not in [note["code"] for note in fair["note_codes"]]
