"""Capacities as they are stored, and what follows from one: users, VMs, racks, the loss of a fault domain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import places
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from loadgen.core.errors import Faults, UserError
from loadgen.core.metrics.summary import dump_summary, load_summary
from loadgen.core.results.capacity import Capacity, RateInterval, dump, load_capacity, replications
from loadgen.cost.capacity_command import capacity as command
from loadgen.cost.capacity_planning import fleet, measured, plan
from loadgen.pricing.evidence import Evidence

DATA = places.DATA
RAG = load_summary((DATA / "summary_example_rag_gpus.json").read_bytes())
GOOD = {"schema": 1, "rate_per_s": 20.0, "low_per_s": 19.0, "high_per_s": 21.5, "method": "search", "recipe": "r"}
SHOWN = GOOD | {"confirmed": True, "output_tokens_per_s": 24_000.0, "total_tokens_per_s": 50_000.0}


def test_a_capacity_is_read_as_it_was_written_and_a_bare_one_has_no_interval():
    found = load_capacity(json.dumps(GOOD).encode())
    assert (found.low_per_s, found.rate_per_s, found.high_per_s, found.unit, found.evidence) == (
        19,
        20,
        21.5,
        "requests",
        ".",
    )
    assert load_capacity(dump(found)) == found
    assert load_capacity(b'{"schema": 1, "rate_per_s": 3, "method": "sweep"}').low_per_s is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rate_per_s": 0}, "out_of_range"),
        ({"rate_per_s": -3}, "out_of_range"),
        ({"low_per_s": None}, "missing_key"),
        ({"low_per_s": 20.5}, "out_of_range"),
        ({"high_per_s": 19.5}, "out_of_range"),
        ({"low_per_s": 0}, "out_of_range"),
        ({"confidence": 95}, "out_of_range"),
        ({"unit": "users"}, "damaged_file"),
        ({"method": "guess"}, "damaged_file"),
        ({"schema": 2}, "newer_version"),
        ({"rate_per_s": "fast"}, "damaged_file"),
        ({"output_tokens_per_s": -1}, "out_of_range"),
    ],
)
def test_a_capacity_that_cannot_be_is_refused(change: dict[str, Any], code: str):
    with refused(UserError, code) as caught:
        load_capacity(json.dumps(GOOD | change).encode(), "x/capacity.json")
    assert caught.value.where.startswith("x/capacity.json")


@given(st.binary(max_size=40))
def test_any_bytes_are_a_capacity_or_a_named_fault(data: bytes):
    try:
        load_capacity(data)
    except UserError:
        pass


def test_repeats_have_students_interval():
    found = replications([9.0, 10.0, 11.0, 10.0])
    assert found.mid == 10
    assert found.high == pytest.approx(10 + 3.1824463 * (2 / 3) ** 0.5 / 2)
    assert replications([4.0]) == RateInterval(mid=4.0)
    assert (replications([0.1, 10.0]).low or 0) == 0.1  # a rate is positive


def test_users_wait_and_think_and_one_machine_may_be_lost():
    """10/s on 4 GPUs: 600 users of 20 s + 10 s make 20/s: 2 VMs; one lost carries 10/s, 300 users, half of them."""
    by = fleet(RateInterval(mid=10, low=8, high=12.5), 4)
    assert (by.per_vm.mid, by.per_rack.mid, by.per_rack.low) == (10, 180, 144)
    assert (by.rack_lost.vms, by.rack_lost.carried_per_s, by.rack_lost.users) == (18, 170, None)
    found = plan(by, 600, think_s=20, response_s=10)
    assert (found.demand_per_s, found.vms, found.vms_low, found.vms_high, found.racks) == (20, 2, 2, 3, 1)
    assert found.rack_users == 5400
    assert found.lost and (found.lost.carried_per_s, found.lost.share, found.lost.users) == (10, 0.5, 300)
    assert plan(by, 601, think_s=20, response_s=10).vms == 3


def test_rates_are_scaled_by_gpus():
    assert fleet(RateInterval(mid=10), 8).per_vm.mid == 5
    assert fleet(RateInterval(mid=10), 2, gpus_per_vm=8, vms_per_rack=9).per_rack.mid == 360


def evidence(**capacity: Any) -> Evidence:
    found = Capacity(method="search", **capacity) if capacity else None
    return Evidence(name="x", folder="x", summaries=(RAG,), capacity=found)


def test_a_single_run_counts_its_good_requests_at_its_load_and_a_capacity_its_rate():
    one, best = measured(evidence(), 4), measured(evidence(rate_per_s=21.0, low_per_s=20.0, high_per_s=22.0), 4)
    assert (one.basis, one.noun, one.rate.mid, one.rate.low) == (
        "at this load",
        "good requests",
        RAG.goodput.steady_rps,
        None,
    )
    assert (best.basis, best.noun, best.rate.mid, best.rate.high) == ("capacity by search", "requests", 21, 22)
    assert one.response_s == pytest.approx(10.972, abs=1e-3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "summary.json").write_bytes(dump_summary(RAG))
    (tmp_path / "capacity.json").write_bytes(json.dumps(SHOWN).encode())
    return tmp_path


@pytest.mark.parametrize(
    ("profile", "published", "again"),
    [
        ("qa", "~1,690/s", "1,693.8/s"),
        ("rag", "~440/s", "440.4/s"),
        ("summarization", "~440/s", "440.4/s"),
        ("agentic", "~110/s", "110.1/s"),
    ],
)
def test_the_published_table_is_reproduced_with_what_it_ignores(
    profile: str, published: str, again: str, capsys: pytest.CaptureFixture[str]
):
    assert command(profile, think="30s", gpus_per_vm=4, vms_per_rack=18) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{published} {again}" in out
    assert "divides an output-token rate by input + output tokens" in out
    assert "no latency limit" in out
    assert "none was given" in out


def test_a_run_under_the_slo_stands_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]):
    how: dict[str, Any] = {"users": 1000, "think": "39.1s", "results": folder, "gpus_per_vm": 4, "vms_per_rack": 18}
    assert command("rag", **how) == 0
    out = capsys.readouterr().out
    assert "20.0 [19.0, 21.5] requests/s of rag on 4 GPUs" in out
    assert "17 of 18 VMs of a full rack carry 340/s" in out
    assert "VMs: 1 (1 to 2 by the interval); racks: 1; one full rack carries 18,026 such users" in out
    assert command("rag", **how, as_json=True) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["plan"]["vms"] == 1 and whole["measured"]["noun"] == "requests"


def test_a_simulated_run_is_called_so_first(folder: Path, capsys: pytest.CaptureFixture[str]):
    simulated = msgspec.structs.replace(RAG, target=msgspec.structs.replace(RAG.target, simulated=True))
    (folder / "summary.json").write_bytes(dump_summary(simulated))
    assert command("rag", results=folder, think="30s", gpus_per_vm=4, vms_per_rack=18) == 0
    assert "From a run under the SLO: SIMULATED, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"profile": "chat"}, "unknown_name"),
        ({"profile": "qa"}, "mismatch"),
        ({"think": "soon"}, "invalid_value"),
        ({"users": 5, "results": None}, "missing_option"),
    ],
)
def test_wrong_flags_are_named(folder: Path, how: dict[str, Any], code: str):
    flags: dict[str, Any] = {"profile": "rag", "results": folder, "think": "30s", "gpus_per_vm": 4, "vms_per_rack": 18}
    with refused(UserError, code):
        command(**(flags | how))


def test_gpus_that_contradict_the_run_are_refused(folder: Path):
    with refused(UserError, "conflict", "--gpus"):
        command("rag", results=folder, gpus=72, think="30s", gpus_per_vm=4, vms_per_rack=18)


def test_an_offline_run_says_nothing_about_users():
    found = Evidence(name="x", folder="x", summaries=(RAG,), at_once=True)
    with refused(UserError, "no_figure"):
        measured(found, 4)


def test_a_capacity_names_its_evidence(folder: Path):
    (folder / "capacity.json").write_bytes(json.dumps(GOOD | {"evidence": "confirm"}).encode())
    with refused(Faults, "no_result") as caught:
        command("rag", results=folder, think="30s", gpus_per_vm=4, vms_per_rack=18)
    assert "capacity.json" in caught.value.faults[0].hint
