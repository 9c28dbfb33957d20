"""Tests of price files: their fields, errors with positions, and the price of a target."""

from __future__ import annotations

import contextlib
from datetime import date
from decimal import Decimal

import pytest
import repository_paths
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk.price_file import PerToken

from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.results.manifest import TargetFacts
from loadgen.pricing import price_file, prices
from loadgen.pricing.prices import Owned, Rented

TODAY = date(2026, 11, 21)
EXAMPLE = repository_paths.ROOT / "docs" / "prices.example.yaml"

RENTED = """
currency: USD
rented:
  - provider: Azure
    shape: gb300
    gpu: GB300
    gpus: 4
    per_hour: 72.00
    as_of: 2026-11-01
    source: quote
"""
OWNED = """
currency: USD
owned:
  - shape: rack
    gpu: GB300
    gpus: 72
    capital: 4000000
    years: 4
    staff_share: 0.05
    as_of: 2026
    source: invoice
    energy: {watts: 132000, idle_watts: 40000, pue: 1.2, per_kwh: 0.10, counted: by_load}
"""
PER_TOKEN = """
currency: USD
per_token:
  - provider: P
    model: m
    per_million_input: 0.71
    per_million_output: 0.71
    as_of: 2026-11
    source: page
"""


def parse(text: str, **how: object) -> prices.Prices:
    return price_file.parse_prices(text, "prices.yaml", today=TODAY, env={}, **how)  # type: ignore[arg-type]


def faults_of(text: str) -> list[LoadgenError]:
    with pytest.raises((CombinedError, UserError)) as exc_info:
        parse(text)
    return (
        list(exc_info.value.errors)
        if isinstance(exc_info.value, CombinedError)
        else [exc_info.value]
    )


def test_the_documented_example_loads_with_its_stated_prices():
    book = price_file.load_prices(EXAMPLE, today=TODAY, env={})
    assert [type(price) for price in book.entries] == [Rented, Rented, Owned, PerToken]
    owned = book.entries[2]
    assert isinstance(owned, Owned)
    assert owned.capital == Decimal("352000.00")  # 320,000 EUR at 1.10
    assert owned.energy.per_kwh == Decimal("0.198")
    (exchange_rate,) = book.exchanged
    assert exchange_rate.startswith("1 EUR = 1.1 USD (as of 2026-11-20, ")


def test_amounts_are_exact_to_the_last_digit():
    (price,) = parse(RENTED.replace("72.00", "10.4365")).entries
    assert isinstance(price, Rented) and price.per_hour == Decimal("10.4365")
    (price,) = parse(RENTED.replace("72.00", "${NOT_SET_ANYWHERE:-0.30}")).entries
    assert isinstance(price, Rented) and price.per_hour == Decimal("0.3")


@pytest.mark.parametrize("name", ["per_million_cached", "per_million_cache_write", "egress_per_gb"])
def test_a_token_price_of_zero_is_accepted(name: str) -> None:
    (price,) = parse(PER_TOKEN.replace("model: m\n", f"model: m\n    {name}: 0\n")).entries
    assert isinstance(price, PerToken) and getattr(price, name) == Decimal(0)
    if name == "per_million_cache_write":
        assert price.per_million[1] == 0


def test_an_output_price_of_zero_is_accepted() -> None:
    free = PER_TOKEN.replace("per_million_output: 0.71", "per_million_output: 0")
    (price,) = parse(free).entries
    assert isinstance(price, PerToken) and price.per_million_output == 0


@pytest.mark.parametrize(
    ("text", "old", "new", "line", "code"),
    [
        (RENTED, "72.00", "-72", 8, "out_of_range"),
        (RENTED, "72.00", "0", 8, "out_of_range"),
        (RENTED, "72.00", ".inf", 8, "out_of_range"),
        (RENTED, "72.00", '"72 USD"', 8, "invalid_value"),
        (RENTED, "72.00", "52560", 8, "out_of_range"),
        (RENTED, "72.00", "0.001", 8, "out_of_range"),
        (RENTED, "per_hour: 72.00", "per_gpu_hour: 2500", 8, "out_of_range"),
        (RENTED, "    per_hour: 72.00\n", "", 4, "no_price"),
        (RENTED, "    gpus: 4\n", "", 7, "missing_key"),
        (RENTED, "source: quote", "source: quote\n    per_gpu_hour: 18", 11, "conflict"),
        (RENTED, "    source: quote\n", "", 4, "missing_key"),
        (RENTED, "2026-11-01", "2026-11-22", 9, "out_of_range"),
        (RENTED, "2026-11-01", "2027", 9, "out_of_range"),
        (RENTED, "2026-11-01", "2026-02-30", 9, "invalid_value"),
        (RENTED, "2026-11-01", "last week", 9, "invalid_value"),
        (RENTED, "source: quote", "source: quote\n    price: 3", 11, "unknown_key"),
        (RENTED, "source: quote", "source: quote\n    currency: EUR", 11, "no_exchange_rate"),
        (RENTED, "currency: USD", "currency: dollars", 2, "invalid_value"),
        (
            RENTED,
            "source: quote",
            "source: quote\n    energy: {watts: 1, pue: 0.9, counted: included}",
            11,
            "out_of_range",
        ),
        (
            RENTED,
            "source: quote",
            "source: quote\n    energy: {watts: 1, pue: 1.2, per_kwh: 0.1, counted: included}",
            11,
            "conflict",
        ),
        (OWNED, "counted: by_load", "counted: included", 12, "conflict"),
        (OWNED, "idle_watts: 40000, ", "", 12, "missing_key"),
        (OWNED, "idle_watts: 40000", "idle_watts: 140000", 12, "out_of_range"),
        (OWNED, "per_kwh: 0.10, ", "", 12, "missing_key"),
        (OWNED, "per_kwh: 0.10", "per_kwh: 10", 12, "out_of_range"),
        (OWNED, "years: 4", "years: 0", 8, "out_of_range"),
        (OWNED, "capital: 4000000", "capital: 4000", 7, "out_of_range"),
        (
            PER_TOKEN,
            "per_million_output: 0.71",
            "per_million_output: 7100",
            7,
            "out_of_range",
        ),
        (PER_TOKEN, "model: m\n", "model: m\n    per_million_cached: -1\n", 6, "out_of_range"),
    ],
)
def test_an_error_in_a_price_file_is_reported_with_its_line(
    text: str, old: str, new: str, line: int, code: str
):
    assert old in text
    errors = faults_of(text.replace(old, new))
    assert [
        fault
        for fault in errors
        if fault.code == code and fault.where.startswith(f"prices.yaml:{line}:")
    ], errors
    assert all(fault.hint for fault in errors)


def test_a_second_price_for_one_shape_is_refused_and_names_the_first():
    entry = RENTED.split("rented:\n")[1]
    (fault,) = faults_of(RENTED + entry.replace("72.00", "80.00"))
    assert (fault.code, fault.key) == ("duplicate", "rented[1]")
    assert fault.where == "prices.yaml:11:5 (rented[1])"
    assert "line 4" in fault.hint
    apart = parse(RENTED + entry.replace("72.00", "60.00\n    commitment: 1 year"))
    assert len(apart.entries) == 2


def test_all_errors_of_a_price_file_are_reported_in_the_order_of_lines():
    text = (
        RENTED.replace("72.00", "-1")
        .replace("2026-11-01", "soon")
        .replace("currency: USD", "currency: $")
    )
    assert [fault.where.split(":")[1] for fault in faults_of(text)] == ["2", "8", "9"]


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "currency: USD", "a: [", "\x00", "currency: USD\nrented: []"]
)
def test_an_error_in_a_price_file_does_not_mention_a_workload(text: str):
    for fault in faults_of(text):
        assert "workload" not in str(fault)


@given(st.text(alphabet="currency: USD\n-[]{}rented0.19$&*!'\"#|>%@", max_size=60))
def test_any_text_loads_as_prices_or_raises_a_reported_error(text: str):
    with contextlib.suppress(CombinedError, UserError):
        parse(text)


def test_a_missing_exchange_rate_is_refused_and_never_inverted():
    rate = "exchange: [{from: USD, to: EUR, rate: 0.9, as_of: 2026, source: bank}]\n"
    with refused(CombinedError, "no_exchange_rate", "rented[0].currency") as exc_info:
        parse(RENTED.replace("source: quote", "source: quote\n    currency: EUR") + rate)
    assert len(exc_info.value.errors) == 1
    (price,) = parse(RENTED + rate, currency="EUR").entries
    assert isinstance(price, Rented) and price.per_hour == Decimal("64.800")


def test_sample_prices_are_used_only_if_they_are_accepted():
    with refused(UserError, "missing_option", "--prices"):
        price_file.load_prices(None)
    with pytest.raises(CombinedError) as exc_info:
        price_file.load_prices(price_file.SAMPLE, today=TODAY)
    assert "--accept-sample-prices" in exc_info.value.errors[0].hint
    book = price_file.load_prices(None, accept_sample=True, today=TODAY)

    assert book.sample
    assert all(price.as_of and price.source and price.quality for price in book.entries)
    oracle = prices.find_prices(book, TargetFacts(shape="BM.GPU.GB300.4"))[0]
    assert isinstance(oracle, Rented) and oracle.per_gpu_hour == Decimal("18.0")
    with refused(UserError, "no_price", "rented[1]") as unverified:
        prices.find_prices(book, TargetFacts(shape="ND128isr_GB300_v6"))
    assert (
        "per_gpu_hour" in unverified.value.hint and "prices_sample.yaml" in unverified.value.where
    )
    assert "oracle-gb300" in unverified.value.hint
    assert "Azure's GB300" in book.notes


EIGHT = [
    "AWS",
    "p6-b300.48xlarge",
    "p6-b200.48xlarge",
    "p5en",
    "p5.48xlarge",
    "ND96isr_H100_v5",
    "a3-ultragpu-8g",
]


def test_sample_prices_charge_complete_machines():
    """Four GPUs of a shape of eight pay for eight, and each row has its date and source."""
    book = price_file.load_prices(None, accept_sample=True, today=TODAY)
    rented = [price for price in book.entries if isinstance(price, prices.Rented)]
    eight = [price for price in rented if price.shape in EIGHT or price.shape.endswith(".8")]

    assert len(eight) == 12 and all(price.gpus == 8 for price in eight)
    for price in rented:
        if price.quality == prices.NOT_VERIFIED:
            assert price.why_missing and price.per_gpu_hour is None
        else:
            assert price.source != "none" and (
                price.source != prices.NO_SOURCE or "no source" in prices.describe_price(price)
            )


def test_the_price_of_a_target_is_selected_by_shape_then_model_or_by_name():
    book = parse(RENTED + PER_TOKEN.removeprefix("\ncurrency: USD\n"))
    (by_shape,) = prices.find_prices(book, TargetFacts(shape="GB300", model="m"))
    (by_model,) = prices.find_prices(book, TargetFacts(model="M", url="https://x"))
    (by_name,) = prices.find_prices(book, TargetFacts(), "P m")

    assert isinstance(by_shape, Rented) and isinstance(by_model, PerToken) and by_name is by_model
    with refused(UserError, "no_price") as missing:
        prices.find_prices(book, TargetFacts(shape="b200"))
    assert "shape: b200" in missing.value.hint
    with refused(UserError, "no_price"):
        prices.find_prices(book, TargetFacts(model="other", url="https://x"))
    with refused(UserError, "unknown_name") as exc_info:
        prices.find_prices(book, TargetFacts(), "Azure gb30")
    assert '"Azure gb300"' in exc_info.value.hint


def test_two_providers_of_one_shape_are_refused_as_ambiguous():
    entry = RENTED.split("rented:\n")[1]
    book = parse(RENTED + entry.replace("Azure", "Other"))
    with refused(UserError, "ambiguous") as exc_info:
        prices.find_prices(book, TargetFacts(shape="gb300"))
    assert "Azure gb300 (prices.yaml:4:5" in exc_info.value.hint


def test_the_price_that_is_valid_on_the_day_is_used():
    row = (
        "  - {{provider: P, model: m, per_million_input: {}, per_million_output: 1, as_of: {}, "
        "source: s, name: {}}}"
    )
    lines = [
        row.format(*price_row)
        for price_row in ((3, "2026-01", "n"), (2, "2026-06-15", "n"), (9, "undated", "n"))
    ]
    text = "\n".join(["currency: USD", "per_token:", *lines])

    def paid(day: str | None) -> list[float]:
        book = parse(text, as_of=None if day is None else date.fromisoformat(day))
        return [float(price.per_million_input) for price in book.entries]  # type: ignore[union-attr]

    assert (
        paid(None) == [2]
        and paid("2026-06-15") == [2]
        and paid("2026-06-14") == [3]
        and paid("2025-12-31") == [9]
    )
    dated = text.replace("as_of: undated", "as_of: 2026-03")
    with pytest.raises(UserError, match="no price in the file was valid on 2025-01-01"):
        parse(dated, as_of=date(2025, 1, 1))
    assert [fault.code for fault in faults_of(dated.replace("2026-03", "2026-01"))] == ["duplicate"]
