"""Tests of budgets, in one process and shared by several, and of price files."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest
import repository_paths
from expected_errors import refused
from loadgen_sdk import (
    Budget,
    BudgetExceeded,
    Client,
    Measurement,
    Retry,
    TokenPrice,
    WrongUse,
    instrument,
    read_prices,
)
from loadgen_sdk.app.background import flush
from loadgen_sdk.app.budget import (
    BudgetEntry,
    BudgetStore,
    FileBudgetStore,
    MemoryBudgetStore,
    RedisBudgetStore,
)
from loadgen_sdk.price_file import PerToken
from scripted_server import CHAT, CHAT_EVENTS, answer, events, serving

from loadgen.core.errors import CombinedError, UserError
from loadgen.pricing.price_file import load_prices
from loadgen.pricing.prompt_lengths import TokenAmounts
from loadgen.pricing.unit_cost import compute_token_parts

PRICE = TokenPrice(input=1000.0, output=10_000.0)  # CHAT has 9 and 3 tokens: 0.039
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 3,
}


def stores(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BudgetStore]:
    if where == "memory":
        only = MemoryBudgetStore()
        return lambda: only
    if where == "file":
        return lambda: FileBudgetStore(tmp_path / "store")
    address = request.getfixturevalue("redis_address")
    return lambda: RedisBudgetStore(f"{address}#{tmp_path.name}")


@pytest.mark.parametrize(
    "where", ["memory", "file", pytest.param("redis", marks=pytest.mark.processes)]
)
def test_a_budget_accumulates_until_its_limit(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = stores(where, request, tmp_path)
    assert store().add("2026-11-23", 0.75, 1.0) == BudgetEntry(0.75, is_booked=True)
    assert store().add("2026-11-23", 0.5, 1.0) == BudgetEntry(0.75, is_booked=False)
    assert store().add("2026-11-23", 0.25, 1.0) == BudgetEntry(1.0, is_booked=True)
    assert store().add("2026-11-23", -0.5, float("inf")) == BudgetEntry(0.5, is_booked=True)
    assert store().add("2026-11-24", 0.5, 1.0) == BudgetEntry(0.5, is_booked=True)  # a new day
    store().add("2026-11-23", 9.0, float("inf"))  # settled after midnight: of the old day
    assert store().add("2026-11-24", 0.5, 1.0) == BudgetEntry(1.0, is_booked=True)


@pytest.mark.parametrize("shared", [False, True])
def test_calls_are_settled_at_their_cost_and_refused_above_the_budget(
    shared: bool, tmp_path: Path
) -> None:
    budget, measurements = (
        Budget("0.1 USD/day", shared=tmp_path / "store" if shared else None),
        list[Measurement](),
    )
    with (
        serving(answer(CHAT)) as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as plain_client,
    ):
        client = instrument(
            plain_client, measurements.append, prices=PRICE, budget=budget, retry=Retry(3)
        )
        for _ in range(2):
            client.chat.completions.create(**ASK)
        assert budget.spent == pytest.approx(0.078)
        with pytest.raises(
            BudgetExceeded, match=r"0\.078 of the budget of 0\.1 USD/day is spent"
        ) as stopped:
            client.chat.completions.create(**ASK)
        assert len(server.heard) == 2

    assert (stopped.value.limit, stopped.value.spent) == (0.1, pytest.approx(0.078))
    assert [measurement.status for measurement in measurements] == ["ok", "ok", "failed"] and len(
        measurements[2].attempts
    ) == 0
    assert measurements[2].failure is not None and measurements[2].failure.kind == "over_budget"
    if shared:
        assert '"spent":0.078' in (tmp_path / "store").read_text()


def test_a_stream_in_an_event_loop_is_charged_to_a_budget(tmp_path: Path) -> None:
    budget = Budget("1 USD", shared=tmp_path / "store")

    async def go() -> None:
        with serving(events(*CHAT_EVENTS)) as server:
            async with openai.AsyncOpenAI(
                base_url=server.url, api_key="k", max_retries=0
            ) as plain_client:
                client = instrument(plain_client, prices=PRICE, budget=budget)
                stream = await client.chat.completions.create(**ASK, stream=True)
                during = budget.spent
                async for _ in stream:
                    pass
                assert during > 0.03

    asyncio.run(go())
    assert flush()
    assert budget.spent == pytest.approx(0.039)


def test_calls_of_the_sdk_client_are_charged_to_a_budget() -> None:
    async def go() -> None:
        with serving(events(*CHAT_EVENTS)) as server:
            options: dict[str, Any] = {"model": "m", "server": "generic", "prices": PRICE}
            async with Client(server.url, budget="3 USD/hour", **options) as client:
                await client.complete("Hello")
                assert (
                    client.policy.budget is not None
                    and client.policy.budget.spent == pytest.approx(0.039)
                )
                with pytest.raises(BudgetExceeded):
                    await client.complete("Hello " * 20_000)
            assert len(server.heard) == 1

    asyncio.run(go())


@pytest.mark.parametrize(
    ("status", "spent"), [("429 Too Many Requests", 0.0), ("400 Bad Request", 0.0)]
)
def test_a_call_that_the_server_refuses_costs_nothing(status: str, spent: float) -> None:
    budget = Budget("1 USD/month")
    response = answer({"error": {}}, status)
    with (
        serving(response) as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as plain_client,
    ):
        client = instrument(
            plain_client, prices=PRICE, budget=budget, retry=Retry(2, first_wait_s=0.001)
        )
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(**ASK)

    assert budget.spent == spent


WRITES = TokenPrice(input=1000.0, output=10_000.0, cached=100.0, cache_write=1250.0)
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
READ, WRITTEN = {"cached_tokens": 4}, {"cached_tokens": 4, "cache_write_tokens": 2}


@pytest.mark.parametrize(
    ("usage", "written", "spent"),
    [
        ({**USAGE, "prompt_tokens_details": READ}, None, 0.0354),
        ({**USAGE, "prompt_tokens_details": WRITTEN}, 2, 0.0359),  # as OpenAI says it
        (
            {**USAGE, "prompt_tokens_details": READ, "cache_creation_input_tokens": 5},
            5,
            0.03665,
        ),  # as LiteLLM does
        (
            {**USAGE, "prompt_tokens_details": READ, "cache_creation_input_tokens": 99},
            None,
            0.0325,
        ),  # more than there is: the estimate stays booked
    ],
)
def test_cache_writes_in_the_usage_are_charged(
    usage: Any, written: int | None, spent: float
) -> None:
    """All that came from no cache was billed as written, whatever the usage said."""
    measurements: list[Measurement] = []
    budget = Budget("1 USD")

    async def other(url: str) -> None:
        options: dict[str, Any] = {
            "model": "m",
            "server": "generic",
            "prices": WRITES,
            "stream": False,
        }
        async with Client(url, on_measurement=measurements.append, **options) as client:
            await client.complete("Hello")

    with (
        serving(answer({**CHAT, "usage": usage})) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as plain_client,
    ):
        instrument(
            plain_client, measurements.append, prices=WRITES, budget=budget
        ).chat.completions.create(**ASK)
        asyncio.run(other(server.url))
    assert budget.spent == pytest.approx(spent, rel=1e-9)
    cost = None if usage.get("cache_creation_input_tokens") == 99 else pytest.approx(spent)
    assert [
        (measurement.cost, measurement.cache_written_tokens) for measurement in measurements
    ] == 2 * [(cost, written)]


def test_a_budget_reserves_the_cost_of_possible_cache_writes() -> None:
    """A prompt of 2 tokens and an answer of 3: 0.0325 where it may be written, 0.032 plain."""
    with (
        serving(answer(CHAT)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as plain_client,
    ):
        client = instrument(plain_client, prices=WRITES, budget="0.0324 USD")
        with pytest.raises(BudgetExceeded, match=r"a call of about 0\.0325 USD"):
            client.chat.completions.create(**ASK)
        assert not server.heard


def test_a_response_without_token_counts_costs_its_estimate() -> None:
    budget = Budget("1 USD")
    response = answer({**CHAT, "usage": None})
    with (
        serving(response) as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as plain_client,
    ):
        client = instrument(plain_client, prices=PRICE, budget=budget)
        with pytest.warns(UserWarning, match="no token counts"):
            client.chat.completions.create(**{**ASK, "model": "uncounted"})

    assert budget.spent == pytest.approx(0.032)  # 2 tokens of prompt, and the output limit of 3


def test_a_model_without_a_price_is_refused() -> None:
    with (
        serving(answer(CHAT)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as plain_client,
    ):
        client = instrument(plain_client, prices={"other": PRICE}, budget="1 USD/day")

        with (
            pytest.warns(UserWarning, match="no price"),
            pytest.raises(BudgetExceeded, match="has no price"),
        ):
            client.chat.completions.create(**ASK)
        assert not server.heard


SPEND = """
import sys
from loadgen_sdk import Budget, BudgetExceeded
budget = Budget("1 USD/month", shared=sys.argv[1])
try:
    for _ in range(320):
        budget.book(1 / 512, "m")
except BudgetExceeded:
    pass
"""


@pytest.mark.processes
def test_processes_with_one_store_share_a_budget(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    processes = [subprocess.Popen([sys.executable, "-c", SPEND, path]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert Budget("1 USD/month", shared=path).spent == 1.0


def test_a_failing_store_is_logged_once_and_the_process_continues(
    tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "store").write_text("not a store")
    budget = Budget("1 USD", shared=tmp_path / "store")
    budget.book(0.75, "m").settle(0.5)
    assert budget.spent == 0.5 and caplog.text.count("is not shared") == 1
    with pytest.raises(BudgetExceeded):
        budget.book(0.75, "m")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Budget("50"), "invalid_value"),
        (lambda: Budget("50 USD/year"), "invalid_value"),
        (lambda: instrument(openai.OpenAI(api_key="k"), budget="50 USD/day"), "missing_option"),
        (
            lambda: instrument(openai.OpenAI(api_key="k"), budget=3, prices=PRICE),  # type: ignore[call-overload]
            "wrong_type",
        ),
        (
            lambda: instrument(
                openai.OpenAI(api_key="k"), budget="5 EUR", prices=TokenPrice(1, 2, currency="USD")
            ),
            "conflict",
        ),
        (lambda: Budget("5 EUR", shared="/no/such/folder/store"), "unwritable_file"),
    ],
)
def test_invalid_budgets_are_refused(make: Callable[[], object], code: str) -> None:
    with refused(WrongUse, code):
        make()


KEYS = "provider: p, source: a page, per_million_output: 4, per_million_cached: 0.5"
DATED = f"""
currency: USD
per_token:
- {{model: writes, per_million_input: 3, per_million_cache_write: 3.75, as_of: 2026-02-01, {KEYS}}}
- {{model: dated, per_million_input: 2, as_of: 2026, {KEYS}}}
- {{model: dated, per_million_input: 1, as_of: 2026-03-01, {KEYS}}}
- {{model: dated, per_million_input: 9, as_of: undated, {KEYS}}}
- {{model: Spelt, per_million_input: 7, as_of: 2025-01-01, {KEYS}}}
- {{model: spelt, per_million_input: 8, as_of: 2026-01-01, {KEYS}}}
"""


@pytest.mark.parametrize("text", ["", DATED])
def test_the_sdk_and_the_load_generator_read_the_same_prices_from_a_file(
    text: str, tmp_path: Path
) -> None:
    file = repository_paths.ROOT / "docs" / "prices.example.yaml"
    if text:
        file = tmp_path / "prices.yaml"
        file.write_text(text)
    theirs = [price for price in load_prices(file).entries if isinstance(price, PerToken)]
    our_token_prices_by_name = read_prices(file)

    assert theirs and len(our_token_prices_by_name) == len(theirs)

    for price in theirs:
        mine = our_token_prices_by_name[price.model]
        assert (mine.currency, mine.input, mine.output) == (
            "USD",
            float(price.per_million_input),
            float(price.per_million_output),
        )
        exact = compute_token_parts(
            price,
            TokenAmounts(
                uncached=Decimal(900),
                cache_written=Decimal(300),
                cached=Decimal(100),
                output=Decimal(50),
            ),
        )
        if price.per_million_cached is not None:
            assert mine.cost(1000, 50, 100, 300) == pytest.approx(
                float(sum(exact.values())), rel=1e-12
            )


PRICES_HEADER = "currency: USD\nper_token:\n"
ENTRY = (
    "- {model: m, provider: p, source: s, as_of: 2025, "
    "per_million_input: 1, per_million_output: 2}\n"
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "unreadable_file"),
        ("currency: USD\n", "no_price"),
        ("currency: USD\nper_token: 3\n", "wrong_type"),
        ("currency: [\n", "invalid_value"),
        (
            PRICES_HEADER
            + ENTRY.replace("m,", "m, url: a,", 1)
            + ENTRY.replace("m,", "m, url: b,", 1),
            "conflict",  # two offers, of which a later price of one says nothing of the other
        ),
    ],
)
def test_invalid_price_files_are_refused(text: str | None, code: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    if text is not None:
        file.write_text(text)
    with refused(WrongUse, code):
        read_prices(file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("per_million_input: 1", "per_million_input: -1"),
        ("per_million_input: 1", "per_million_input: .inf"),
        ("per_million_input: 1", "per_million_input: 7100"),
        ("per_million_input: 1", 'per_million_input: "1 USD"'),
        ("per_million_output: 2", "per_million_output: 2, cached: 1"),
        ("per_million_input: 1, ", ""),
        ("per_million_output: 2", "per_million_output: 2, egress_per_gb: 50"),
        ("per_million_output: 2", "per_million_output: 2, currency: dollars"),
        ("as_of: 2025", "as_of: 2014"),
        ("as_of: 2025", "as_of: 2999-01-01"),
        ("as_of: 2025", "as_of: last week"),
        ("source: s, ", ""),
        ("source: s", 'source: ""'),
        ("source: s", "source: [s]"),
        ("source: s", "source: null"),
        (ENTRY, 2 * ENTRY),
        (ENTRY, "- m\n"),
        ("currency: USD", "currency: dollars"),
        ("currency: USD\n", ""),
    ],
)
def test_sdk_and_cost_refuse_an_invalid_price_with_the_same_message(
    old: str, new: str, tmp_path: Path
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text((PRICES_HEADER + ENTRY).replace(old, new))

    with pytest.raises((UserError, CombinedError)) as exc_info:
        load_prices(file)
    (fault,) = getattr(exc_info.value, "errors", [exc_info.value])
    with refused(WrongUse, fault.code) as error_info:
        read_prices(file)
    assert fault.message.rpartition('" ')[2] in error_info.value.message
    assert (
        fault.place is not None
        and fault.place.path in error_info.value.message
        and error_info.value.hint
    )
