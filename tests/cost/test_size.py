"""Tests of `loadgen size`: machines, a spare, money per month, and agreement with `cost`."""

from __future__ import annotations

import html
import json
import math
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import repository_paths
from expected_errors import refused
from golden import check_golden
from loadgen_sdk.price_file import PerToken
from msgspec import structs
from msgspec.structs import replace

import loadgen
from loadgen.cli.app import run_command_line
from loadgen.contracts.loading import load_contract
from loadgen.contracts.schema import parse_contract
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.execution import host_facts
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.part_summaries import ClassSummary
from loadgen.core.metrics.summary import Summary, load_summary
from loadgen.core.metrics.task_summary import Sessions, TaskGoodput
from loadgen.core.results import checksums
from loadgen.cost import contract_file, machine_searches, size_command
from loadgen.cost.capacity_planning import MeasuredRate, derive_measured_rate
from loadgen.cost.size_result import Sizing, to_sized_source
from loadgen.cost.size_sources import run_search
from loadgen.cost.size_text import create_report
from loadgen.cost.sizing import Demand, convert_published_rate, size_machines
from loadgen.pricing.cost_basis import compute_cost_basis
from loadgen.pricing.estimate import Estimate
from loadgen.pricing.evidence import Evidence, list_evidence_notes
from loadgen.pricing.priced_result import price_result
from loadgen.pricing.prices import Energy, Rented
from loadgen.pricing.reasons import render_notes
from loadgen.pricing.unit_cost import compute_unit_cost
from loadgen.pricing.units import REQUEST
from loadgen.render import text as as_text
from loadgen.repeated.capacity import CAPACITY_FILE, Capacity, dump_capacity
from loadgen.search.capacity_files import with_search_state
from loadgen.search.search_results import SearchResult

DATA = repository_paths.DATA
RAG = load_summary((DATA / "summary_example_rag_gpus.json").read_bytes())
CAPACITY = Capacity(rate_per_s=20.0, low_per_s=19.0, high_per_s=21.5, method="search", recipe="r")
EVIDENCE = Evidence(name="vm", folder="vm", summaries=(RAG,), capacity=CAPACITY)
SOURCE = MeasuredRate(
    name="vm",
    folder="vm",
    basis="capacity by search",
    rate=Estimate(mid=20.0, low=19.0, high=21.5),
    unit="requests",
    gpus=4,
    response_s=10.0,
    workload="rag",
)
BY_LOAD = Energy(
    watts=Decimal(7200),
    idle_watts=Decimal(2000),
    pue=Decimal("1.2"),
    per_kwh=Decimal("0.1"),
    counted="by_load",
)
MACHINE = Rented(
    name="m",
    provider="p",
    as_of="2026-11",
    source="quote",
    shape="s",
    gpu="GB300",
    gpus=4,
    per_hour=Decimal(40),
    egress_per_gb=Decimal("0.05"),
    energy=BY_LOAD,
)


def test_the_number_of_machines_equals_the_calculation_by_hand() -> None:
    """5,000 users / 40 s = 125/s: 7 machines of 20/s, 6 to 7 by the interval, and a spare."""
    size = size_machines(
        SOURCE, Demand(users=5000, think_s=30), gpus_per_machine=4, price=None, evidence=EVIDENCE
    )

    assert (
        size.demand_per_s,
        size.serving_machines,
        size.machines,
        size.machines_low,
        size.machines_high,
    ) == (
        125.0,
        7,
        8,
        7,
        8,
    )
    assert size.utilization == pytest.approx(125 / 160)
    assert size.cost_per_month is None
    assert (
        size_machines(
            SOURCE,
            Demand(rate_per_s=20.0, spare_machines=0),
            gpus_per_machine=4,
            price=None,
            evidence=EVIDENCE,
        ).machines
        == 1
    )


@pytest.mark.parametrize("hours", [24.0, 8.0])
def test_the_cost_of_a_request_equals_that_of_loadgen_cost(hours: float) -> None:
    size = size_machines(
        SOURCE,
        Demand(users=5000, think_s=30, hours_per_day=hours),
        gpus_per_machine=4,
        price=MACHINE,
        evidence=EVIDENCE,
    )
    share = Decimal(repr((size.utilization or 0) * hours / 24))
    unit = price_result(EVIDENCE, MACHINE, "vm", "here", gpus=4, utilization=share).costs[REQUEST]

    assert unit is not None and size.cost_per_thousand is not None
    assert float(size.cost_per_thousand.mid) == pytest.approx(float(unit.total) * 1000, rel=1e-9)


def test_the_cost_of_a_month_equals_the_calculation_by_hand() -> None:
    """8 machines at 40 per hour and idle power, load power of 6.25 machines, and egress."""
    size = size_machines(
        SOURCE, Demand(users=5000, think_s=30), gpus_per_machine=4, price=MACHINE, evidence=EVIDENCE
    )
    idle, load = 2.0 * 1.2 * 0.1, 5.2 * 1.2 * 0.1
    egress = RAG.bytes.received / RAG.requests.ok * 0.05 / 1e9
    by_hand = 730 * (8 * (40 + idle) + 125 / 20 * load + 125 * 3600 * egress)

    assert size.cost_per_month is not None and size.cost_per_thousand is not None
    assert float(size.cost_per_month.mid) == pytest.approx(by_hand)
    assert float(size.cost_per_thousand.mid) == pytest.approx(by_hand / (125 * 3600 * 730) * 1000)


def test_an_api_by_the_token_has_a_price_and_no_machines() -> None:
    price = PerToken(
        name="api",
        provider="p",
        as_of="2026-11",
        source="page",
        model="m",
        per_million_input=Decimal(1),
        per_million_output=Decimal(2),
    )
    evidence = Evidence(name="vm", folder="vm", summaries=(RAG,))
    size = size_machines(
        SOURCE, Demand(rate_per_s=50.0), gpus_per_machine=4, price=price, evidence=evidence
    )
    unit = compute_unit_cost(compute_cost_basis(evidence), price, None, REQUEST)

    assert size.machines is None and unit is not None and size.cost_per_thousand is not None
    assert math.isclose(size.cost_per_thousand.mid, unit.total * 1000, rel_tol=1e-9)


def _beside_tasks() -> Summary:
    """1,500 requests: 1,100 single ones of 10 s, and 100 tasks of four requests that take 40 s."""
    times = RAG.e2e_ms
    single = ClassSummary(
        name="qa",
        share=0.9,
        starts=1100,
        requests=structs.replace(RAG.requests, scheduled=1100, ok=1100),
        bytes=RAG.bytes,
        load=RAG.load,
        tokens=RAG.tokens,
        ttft_ms=RAG.ttft_ms,
        tpot_ms=RAG.tpot_ms,
        goodput=RAG.goodput,
        e2e_ms=structs.replace(times, mean=10_000.0, count=1100),
    )
    lasted = structs.replace(times, mean=40_000.0, count=100)
    tasks = Sessions(count=100, ok=100, ok_per_s=1.0, steady_ok_per_s=1.0, duration_ms=lasted)
    agentic = structs.replace(single, name="agentic", share=0.1, starts=100, sessions=tasks)
    return structs.replace(RAG, classes=(single, agentic), sessions=tasks)


def test_single_requests_among_tasks_count_in_money_and_machines() -> None:
    """12 starts/s are 15 requests/s, and a user waits 12.5 s on average."""
    summary = _beside_tasks()
    both = Capacity(rate_per_s=12.0, unit="starts", method="search", recipe="r")
    evidence = Evidence(name="vm", folder="vm", summaries=(summary,), capacity=both)

    assert compute_cost_basis(evidence).rates[REQUEST] == 15
    source = derive_measured_rate(evidence, 4)
    assert (source.rate.mid, source.unit, source.response_s) == (12.0, "starts", 12.5)

    older = Evidence(
        name="vm",
        folder="vm",
        summaries=(summary,),
        capacity=structs.replace(both, unit="conversations"),
    )

    assert (
        derive_measured_rate(older, 4) == source
        and source.response_noun == "a response or conversation"
    )

    in_requests = structs.replace(both, rate_per_s=15.0, unit="requests")
    by_requests = Evidence(name="vm", folder="vm", summaries=(summary,), capacity=in_requests)
    assert derive_measured_rate(by_requests, 4).rate.mid == pytest.approx(12.0)

    run = Evidence(name="vm", folder="vm", summaries=(summary,))
    steady = summary.load.steady_completed_rps
    assert steady and derive_measured_rate(run, 4).rate.mid == pytest.approx(steady * 0.8)

    demand = Demand(rate_per_s=12.0, spare_machines=0)
    size = size_machines(source, demand, gpus_per_machine=4, price=MACHINE, evidence=evidence)
    egress = compute_unit_cost(compute_cost_basis(evidence), MACHINE, 4, REQUEST)

    assert egress and size.cost_per_thousand and size.cost_per_month

    free = MACHINE.model_copy(update={"egress_per_gb": None})
    bare = size_machines(
        source, demand, gpus_per_machine=4, price=free, evidence=evidence
    ).cost_per_thousand

    assert bare and size.cost_per_thousand.mid - bare.mid == pytest.approx(
        egress.parts["egress"] * 1250
    )


def test_a_published_rate_needs_an_output_length() -> None:
    source = convert_published_rate(
        "X", 944_902.0, gpus=72, output_tokens=1200, workload="rag", publication="MLPerf"
    )

    assert source.rate == Estimate(mid=944_902 / 1200)
    with refused(UserError, "no_figure", "--answer"):
        size_machines(
            source, Demand(users=10, think_s=30), gpus_per_machine=4, price=None, evidence=None
        )
    assert (
        size_machines(
            source, Demand(users=10, response_s=20), gpus_per_machine=4, price=None, evidence=None
        ).machines
        == 2
    )
    with refused(UserError, "no_figure"):
        convert_published_rate(
            "X", None, gpus=72, output_tokens=1200, workload="rag", publication="MLPerf"
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vm" / "run").mkdir(parents=True)
    (tmp_path / "vm" / "run" / "summary.json").write_bytes(
        (DATA / "summary_example_rag_gpus.json").read_bytes()
    )
    assert RAG.load.offered_rps is not None
    capacity = Capacity(
        rate_per_s=RAG.load.offered_rps,
        output_tokens_per_s=RAG.tokens.steady_output_per_s,
        total_tokens_per_s=RAG.tokens.steady_total_per_s,
        low_per_s=19.0,
        high_per_s=21.5,
        method="search",
        recipe="r",
        evidence="run",
    )
    (tmp_path / "vm" / "capacity.json").write_bytes(dump_capacity(capacity))
    return tmp_path


def _called(*arguments: str) -> Any:
    return run_command_line(["size", *arguments])


@pytest.mark.usefixtures("folder")
def test_the_output_of_size_equals_the_stored_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert _called(RAG.run.workload, "vm", "--users", "5000") == 0
    check_golden("size", capsys.readouterr().out)
    assert _called(RAG.run.workload, "vm", "--users", "5000", "--full") == 0
    check_golden("size_full", capsys.readouterr().out)


def test_size_warns_of_a_result_whose_file_was_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checksums.write(folder / "vm")
    (folder / "vm" / "capacity.json").write_text(
        (folder / "vm" / "capacity.json").read_text() + "\n"
    )
    assert _called(RAG.run.workload, "vm", "--users", "5000") == 0
    assert "capacity.json (changed)" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_the_load_of_one_machine_is_stated_for_the_contract(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for spare, utilization in (
        ("1", r"After losing 1 machine: 75\.\d % utilization"),
        ("0", r"Utilization 75\.\d %, without spare machines"),
    ):
        assert _called(RAG.run.workload, "vm", "--rate", "30", "--spare", spare, "--full") == 0
        stdout = " ".join(capsys.readouterr().out.split())
        assert re.search(utilization, stdout)
        assert "15.0 requests/s per machine" in stdout
        assert "--dry-run" not in stdout

    assert _called(RAG.run.workload, "vm", "--rate", "39", "--full") == 0
    stdout = " ".join(capsys.readouterr().out.split())
    assert re.search(r"9[78]\.\d % utilization", stdout)
    assert "--dry-run" in stdout


@pytest.mark.usefixtures("folder")
def test_validate_accepts_the_contract_of_one_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("rag", "vm", "--rate", "30", "--contract", "c.yaml")

    assert _called(*arguments) == 0
    assert "validate c.yaml --url https://MACHINE" in capsys.readouterr().err

    checked = load_contract(Path("c.yaml"))
    (planned_level_plan,) = checked.levels
    assert (planned_level_plan.rate, checked.contract.gpus) == (pytest.approx(15), 4)
    slo = planned_level_plan.workload.slo
    assert slo is not None and slo.goodput_share == RAG.goodput.share_limit
    assert [(term.metric, term.quantile, term.limit_ns / 1e6) for term in slo.terms] == [
        (term_result.metric, term_result.quantile, term_result.limit_ms)
        for term_result in RAG.goodput.slo
    ], "the rows of its runs say of the SLO what the search said"

    promised: set[Any] = {
        (term.metric, f"p{term.quantile * 100:g}", term.limit_ms * 1e6) for term in RAG.goodput.slo
    }
    promised.add(("goodput", "p0", RAG.goodput.share_limit))

    assert {
        (contract_term.kind, contract_term.percentile, contract_term.limit)
        for contract_term in planned_level_plan.level.must
    } == promised
    for wrong, reason in (
        (arguments, "the file exists"),
        ((*arguments[:2], "published:gb300", *arguments[2:5], "d.yaml"), "single measured source"),
        ((*arguments[:5], "no/c.yaml"), "its folder does not exist"),
    ):
        with pytest.raises(UserError, match=reason):
            _called(*wrong)


@pytest.mark.usefixtures("folder")
def test_the_searched_machine_is_validated_against_its_contract(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = size_machines(
        SOURCE, Demand(rate_per_s=30.0), gpus_per_machine=4, price=None, evidence=EVIDENCE
    )
    searched = replace(size, source=replace(SOURCE, name="sim:gb300-vm"))
    size_command._write_contract(
        Path("c.yaml"), size_command._SizedMachines(searched, EVIDENCE), "rag"
    )
    assert "c.yaml --url sim:gb300-vm\n" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_the_contract_of_tasks_and_of_classes_has_their_limits() -> None:
    task_goodput = TaskGoodput(
        within_ms=90e3, wait_ms=2e3, good=9, rps=None, share=0.9, share_limit=0.9, met=True
    )
    tasks = Sessions(
        count=10,
        cut=0,
        abandoned=0,
        ok=10,
        ok_per_s=1.0,
        steady_ok_per_s=1.0,
        duration_ms=RAG.e2e_ms,
        wait_ms=RAG.ttft_ms,
        longest_wait_ms=RAG.ttft_ms,
        requests=4.0,
        input_tokens=1.0,
        cached_tokens=None,
        output_tokens=1.0,
        goodput=task_goodput,
    )
    size = size_machines(
        SOURCE, Demand(rate_per_s=30.0), gpus_per_machine=4, price=None, evidence=EVIDENCE
    )
    of_tasks = contract_file.render_contract(
        size, msgspec.structs.replace(RAG, sessions=tasks), "research-agent"
    )
    (level,) = parse_contract(of_tasks, "c").levels

    assert [contract_term.kind for contract_term in level.must][-1] == "task_goodput"
    assert "task: {within: 90s, wait: 2s, attainment: 90%}" in of_tasks

    class_summary = ClassSummary(
        name="chat",
        share=1.0,
        starts=RAG.requests.decided,
        requests=RAG.requests,
        bytes=RAG.bytes,
        load=RAG.load,
        tokens=RAG.tokens,
        ttft_ms=RAG.ttft_ms,
        tpot_ms=RAG.tpot_ms,
        e2e_ms=RAG.e2e_ms,
        goodput=RAG.goodput,
    )
    mix = msgspec.structs.replace(
        RAG, classes=(class_summary,), goodput=Goodput(counted=1, good=1, met=True)
    )
    text = contract_file.render_contract(size, mix, "mixed")

    assert "slo:" not in text and {
        contract_term.class_name for contract_term in parse_contract(text, "c").levels[0].must
    } == {"chat"}


@pytest.mark.usefixtures("folder")
def test_racks_and_published_numbers_are_reported_with_the_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ("--rate", "100", "--spare", "0", "--machines-per-rack", "2")
    assert _called("rag", "vm", *load, "--full") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "6 machines" in text and "Racks of 2 machines 3" in text
    assert "~440 per second" in text


def test_a_workload_of_the_user_is_selected_by_the_name_in_its_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.yaml").write_text("name: rag\nrequests: {input_tokens: 5, output_tokens: 5}\n")
    assert _called("mine.yaml", "vm", "--users", "5000") == 0
    assert "5,000 users of rag" in " ".join(capsys.readouterr().out.split())


def test_an_edited_workload_needs_a_new_search(folder: Path) -> None:
    searched: list[str] = []

    def search(arguments: list[str]) -> int:
        searched.append(arguments[arguments.index("--out") + 1])
        return 0

    for tokens in (50, 100, 50):
        (folder / "mine.yaml").write_text(
            f"name: mine\nrequests: {{input_tokens: 5, output_tokens: {tokens}}}\n"
        )
        run_search("sim:gb300-vm", "mine.yaml", ["ttft:2s"], search)
    run_search("sim:gb300-vm", "mine.yaml", ["ttft:1s"], search)
    assert searched[0] == searched[2]
    assert len(set(searched)) == 3


@pytest.mark.usefixtures("folder")
def test_a_stored_search_with_other_trials_is_not_reused() -> None:
    """A stored one of 300 s was refused, with a hint at an --out that `size` has not."""
    search_inputs, of = ("sim:gb300-vm", "rag", ["ttft:2s"]), host_facts.loadgen_version()

    assert (
        machine_searches.derive_search_folder(*search_inputs, of, 600 * 10**9)
        == machine_searches.build_search_command(*search_inputs).folder
    )
    assert (
        machine_searches.derive_search_folder(*search_inputs, of, 300 * 10**9)
        != machine_searches.build_search_command(*search_inputs).folder
    )


@pytest.mark.usefixtures("folder")
def test_a_search_of_another_version_is_repeated() -> None:
    """Searches of another version are not reused: its model of the machine may differ."""
    search_inputs = ("sim:gb300-vm", "rag", ["ttft:2s"])
    assert machine_searches.build_search_command(
        *search_inputs
    ).folder == machine_searches.derive_search_folder(*search_inputs, host_facts.loadgen_version())
    assert machine_searches.build_search_command(
        *search_inputs
    ).folder != machine_searches.derive_search_folder(*search_inputs, "99.0")


AT_ONCE = """
import sys
from loadgen.cost import machine_searches
from loadgen.cli.app import run_command_line
from pathlib import Path

def call(words):
    return run_command_line(words)

last = ["--seed", "1", "-d", "200s", "--no-sustain", "--precision", "20%"]
slo = ["--slo", "ttft:1s"]
targets = (("a", "sim:gb300-vm", slo), ("b", "sim:h100x8", slo), ("c", "sim:none", []))
commands = {}
for name, url, slo in targets:
    arguments = ["search", "mine.yaml", "--url", url, "--out", name, *last, *slo]
    commands[url] = machine_searches.SearchCommand(Path(name), arguments)
machine_searches.run_searches(commands, call)
"""


@pytest.mark.processes
@pytest.mark.parametrize("cores", [1, 2])
def test_machines_searched_in_parallel_have_the_same_capacity(folder: Path, cores: int) -> None:
    """Nothing is searched ahead on one core. A search that fails is reported when it is used."""
    if cores > len(os.sched_getaffinity(0)):
        pytest.skip("one core")
    (folder / "mine.yaml").write_text(
        "name: mine\nrequests: {input_tokens: 3000, output_tokens: 20}\n"
    )  # few requests
    pin = f"import os\nos.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}])\n"
    script = [sys.executable, "-c", pin + AT_ONCE]
    process = subprocess.run(script, check=False, capture_output=True, text=True, timeout=120)

    assert process.returncode == 0, process.stderr
    assert not process.stdout

    if cores == 1:
        assert not process.stderr and not (folder / "a").exists()
        return
    lines = process.stderr.splitlines()

    assert all(line.startswith(("sim:gb300-vm: ", "sim:h100x8: ")) for line in lines), (
        process.stderr
    )
    assert {line.partition(": ")[0] for line in lines} == {"sim:gb300-vm", "sim:h100x8"}

    for name, url in (("a", "sim:gb300-vm"), ("b", "sim:h100x8")):
        flags = [
            "--url",
            url,
            "--out",
            f"{name}2",
            "--seed",
            "1",
            "-d",
            "200s",
            "--no-sustain",
            "--precision",
            "20%",
            "--slo",
            "ttft:1s",
        ]
        arguments = ["search", "mine.yaml", *flags]
        assert run_command_line(arguments) == 0
        assert (folder / name / "search.json").read_bytes() == (
            folder / f"{name}2" / "search.json"
        ).read_bytes()

    assert not (folder / "c").exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("reason", ["unconfirmed", "none"])
def test_a_search_without_a_capacity_is_reported_with_its_reason(reason: str) -> None:
    """Where loads held and no run confirmed one, it is false that no load holds."""
    answer = SearchResult(
        load=None,
        interval=None,
        confirmed_load=None,
        highest_passed=None,
        lowest_failed=8.0,
        stop_reason=reason,
        trial_count=40,
        duration_s=9.0,
        confirmation_s=0.0,
    )

    def search(arguments: list[str]) -> int:
        out = Path(arguments[arguments.index("--out") + 1])
        out.mkdir(parents=True)
        (out / CAPACITY_FILE).write_bytes(dump_capacity(with_search_state(None, answer)))
        return 1

    with pytest.raises(UserError) as exc_info:
        run_search("sim:gb300-vm", "rag", ["ttft:2s"], search)
    assert exc_info.value.code == "no_figure"
    assert ("no load passed" in str(exc_info.value)) == (reason == "none")


@pytest.mark.usefixtures("folder")
def test_the_output_of_size_has_units_and_states_the_slo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _called("rag", "vm", "--users", "5000", "--full") == 0
    out = capsys.readouterr().out
    assert "Demand, requests/s" in out and "19.9 requests/s on" in out
    assert "SLO TTFT p" in " ".join(out.split())


@pytest.mark.usefixtures("folder")
def test_a_run_at_one_load_states_only_that_it_was_sustained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _called("rag", "vm/run", "--users", "5000", "--json") == 0
    (sized,) = json.loads(capsys.readouterr().out)["sizes"]

    assert sized["source"]["lower_bound"] and sized["source"]["bound_why"]
    assert {"code": "one_load", "values": {"why": sized["source"]["bound_why"]}} in sized[
        "note_codes"
    ]
    assert _called("rag", "vm/run", "--users", "5000") == 0
    out = capsys.readouterr().out
    assert re.search(r"Utilization +at most \d", out)
    assert re.search(r"[\d.]+ % after losing 1 machine", out)
    assert "at most 7 machines" in out and "at least" in out


@pytest.mark.usefixtures("folder")
def test_size_accepts_for_a_folder_only_the_slo_of_its_result() -> None:
    slo_arguments = [
        word
        for term in RAG.goodput.slo
        for word in ("--slo", f"{term.metric}:{term.limit_ms:g}ms:p{term.quantile * 100:g}")
    ]

    assert RAG.goodput.share_limit is not None
    slo_arguments += ["--slo", f"attainment:{RAG.goodput.share_limit * 100:g}%"]
    assert _called("rag", "vm", "--users", "5000", *slo_arguments) == 0
    with refused(CombinedError, "no_effect") as exc_info:
        _called("rag", "vm", "--users", "5000", "--slo", "ttft:1ms")
    assert RAG.goodput.slo[0].objective in str(exc_info.value)


@pytest.mark.parametrize(
    ("low", "high", "end"), [(20.0, 21.5, "lower"), (19.0, 20.0, "upper"), (19.0, 21.5, "")]
)
def test_a_rate_at_the_end_of_its_interval_has_a_note(low: float, high: float, end: str) -> None:
    capacity = msgspec.structs.replace(CAPACITY, low_per_s=low, high_per_s=high)
    notes_text = " ".join(render_notes(list_evidence_notes(replace(EVIDENCE, capacity=capacity))))
    assert (f"the rate is the {end} end of its interval" in notes_text) is bool(end)
    assert end or "end of its interval" not in notes_text


def test_an_interval_of_short_trials_states_its_scope_at_every_cost() -> None:
    short = replace(EVIDENCE, capacity=msgspec.structs.replace(CAPACITY, horizon_s=162.65))
    assert "2 min 43 s" in " ".join(render_notes(list_evidence_notes(short)))
    codes = [note.code for note in list_evidence_notes(EVIDENCE)]
    assert "horizon" not in codes


def test_a_capacity_of_unknown_duration_is_marked_at_every_cost() -> None:
    """The error has the reason of the search, and how to resume one that was stopped."""
    reason = "no trial was longer than the rules ask for"
    by_the_rules = msgspec.structs.replace(
        CAPACITY, confirmed=True, state="confirmed", sustained_reason=reason, resume_command="G"
    )
    notes_text = " ".join(
        render_notes(list_evidence_notes(replace(EVIDENCE, capacity=by_the_rules)))
    )

    assert f"{reason}; the search was stopped" in notes_text

    sustained = msgspec.structs.replace(
        by_the_rules, state="sustained", sustained=True, resume_command=""
    )

    assert "can go on" not in " ".join(
        render_notes(list_evidence_notes(replace(EVIDENCE, capacity=sustained)))
    )


def test_simulated_results_state_the_model_error_in_every_command() -> None:
    simulated = msgspec.structs.replace(
        RAG, target=msgspec.structs.replace(RAG.target, simulated=True)
    )
    notes = render_notes(list_evidence_notes(replace(EVIDENCE, summaries=(simulated,))))
    assert any("5 to 25 %" in text for text in notes)


@pytest.mark.usefixtures("folder")
def test_errors_of_size_are_reported_before_a_search() -> None:
    """Missing rates and prices are found before a search, which takes minutes."""
    arguments = ("rag", "sim:gb300-vm", "--slo", "ttft:2s", "--users", "5")
    with refused(CombinedError, "unknown_name"):
        _called(*arguments, "published:nobody", "--answer", "9s")
    with refused(CombinedError, "unknown_name"):
        _called(*arguments, "--accept-sample-prices", "--price", "nobody")
    assert not list(Path("results").glob("size-*"))


@pytest.mark.usefixtures("folder")
def test_an_ambiguous_price_is_reported_before_a_search() -> None:
    """Two prices that fit a machine are found before a search, which takes minutes."""
    arguments = (
        "rag",
        "sim:gb300-vm",
        "--slo",
        "ttft:2s",
        "--users",
        "5",
        "--accept-sample-prices",
    )

    with refused(CombinedError, "ambiguous") as exc_info:
        _called(*arguments)
    assert "--price 'sim:gb300-vm=NAME'" in str(exc_info.value)
    assert not list(Path("results").glob("size-*"))


def test_the_name_of_a_search_folder_depends_on_all_inputs(folder: Path) -> None:
    """Also the preset that a user's own extends, and the files that a workload names."""
    (folder / "base.yaml").write_text("extends: gb300-vm\nserver: {max_batch_size: 64}\n")
    (folder / "mine.yaml").write_text("extends: base.yaml\n")
    (folder / "lengths").write_text("5\n6\n")
    (folder / "w.yaml").write_text(
        "name: w\nrequests: {input_tokens: {empirical: lengths}, output_tokens: 5}\n"
    )

    def named() -> str:
        return machine_searches.build_search_command(
            "sim:mine.yaml", "w.yaml", ["ttft:2s"]
        ).folder.name

    first = named()
    (folder / "base.yaml").write_text("extends: gb300-vm\nserver: {max_batch_size: 32}\n")
    other_machine = named()
    (folder / "lengths").write_text("5\n9\n")
    assert len({first, other_machine, named()}) == 3 and named().startswith("size-w-mine-")


@pytest.mark.usefixtures("folder")
def test_the_json_of_size_has_two_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        _called(RAG.run.workload, "vm", "published:CoreWeave, GB300", "--rate", "50", "--json") == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert [size["estimate"] for size in document["sizes"]] == [False, True]
    assert [size["demand_per_s"] for size in document["sizes"]] == [50.0, 50.0]


def test_a_size_is_stored_with_its_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal, the stored result, `loadgen report` and the page have the same numbers."""
    arguments = (
        "rag",
        "vm",
        "vm/run",
        "--users",
        "5000",
        "--prices",
        str(repository_paths.ROOT / "docs" / "prices.example.yaml"),
        "--price",
        "vm=own dgx-h200",
        "--price",
        "vm/run=own dgx-h200",
    )

    assert _called(*arguments) == 0

    printed = capsys.readouterr()
    (size_dir,) = (folder / "results").glob("size-rag-*")
    assert f"Report: {size_dir.relative_to(folder)}" in printed.err
    loaded_size = loadgen.load(size_dir)
    assert (
        loaded_size.text == printed.out
        and checksums.read_checksums(size_dir)
        and not checksums.find_changes(size_dir)
    )
    assert _called(*arguments, "--json", "-o", "mine") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((folder / "mine" / "size.json").read_text())
    assert document | {"made": ""} == json.loads(loaded_size.document) | {
        "made": ""
    }  # of two commands, a second apart perhaps
    page = html.unescape((folder / "mine" / "report.html").read_text())
    assert "USD per month" in printed.out and "USD per month" in page
    assert all(re.search(rf"<td[^>]*>{size['machines']}\b", page) for size in document["sizes"])
    assert loaded_size.value.sizes[0].cost_per_month.mid == Decimal(
        document["sizes"][0]["per_month"]["mid"]
    )
    with refused(UserError, "file_exists", "--out"):
        _called(*arguments, "-o", "vm")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [
        ("rag", "vm"),
        ("rag", "vm", "--users", "5", "--rate", "5"),
        ("rag", "vm", "--rate", "inf"),
        ("rag", "vm", "--users", "5", "--think", "x"),
        ("qa", "vm", "--users", "5"),
        ("rag", "vm", "--users", "5", "--slo", "ttft:1s"),
        ("rag", "nowhere", "--users", "5"),
        ("rag", "vm", "--users", "5", "--price", "vm=x"),
        ("rag", "vm", "published:B200", "--users", "5", "--answer", "9s"),
        ("rag", "published:nobody", "--users", "5", "--answer", "9s"),
        (
            "rag",
            "published:CoreWeave, GB300",
            "--users",
            "5",
            "--answer",
            "9s",
            "--accept-sample-prices",
        ),
        ("mine", "published:CoreWeave, GB300", "--users", "5"),
    ],
)
def test_inputs_that_cannot_be_sized_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises((UserError, CombinedError)):
        _called(*arguments)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"goodput": {"met": False}}, "SLO MISSED"),
        ({"sustainable": {"sustained": False, "reason": "because"}}, "NOT SUSTAINED"),
        ({"sustainable": {"sustained": None, "reason": "because"}}, "STABILITY UNKNOWN"),
    ],
)
def test_warnings_about_the_number_of_machines_precede_it(
    changes: dict[str, dict[str, Any]], word: str
) -> None:
    parts = {
        name: msgspec.structs.replace(getattr(RAG, name), **values)
        for name, values in changes.items()
    }
    evidence = Evidence(name="vm", folder="vm", summaries=(msgspec.structs.replace(RAG, **parts),))
    source = derive_measured_rate(evidence, 4)
    demand = Demand(users=5000, think_s=30)
    sized = size_machines(source, demand, gpus_per_machine=4, price=None, evidence=evidence)
    sizing = Sizing(
        currency="USD",
        demand=demand,
        sizes=(to_sized_source(sized, evidence, demand),),
        workload="rag",
        created="",
    )
    rendered_text = as_text.render(create_report(sizing))

    assert word in rendered_text
    assert rendered_text.index(word) < rendered_text.index("machines")


def test_the_brief_size_explains_its_demand_interval_and_model_error() -> None:
    demand = Demand(users=5000, think_s=30)
    evidence = msgspec.structs.replace(
        EVIDENCE,
        summaries=tuple(
            msgspec.structs.replace(
                summary, target=msgspec.structs.replace(summary.target, simulated=True)
            )
            for summary in EVIDENCE.summaries
        ),
    )
    sized = size_machines(SOURCE, demand, gpus_per_machine=4, price=None, evidence=evidence)
    source = to_sized_source(sized, evidence, demand)
    sizing = Sizing(currency="USD", demand=demand, sizes=(source,), workload="rag", created="")
    text = as_text.render(create_report(sizing), full=False)

    assert "20.0 (95 % CI 19.0 to 21.5) requests/s" in text
    assert "5,000 users / (10.0 s latency + 30 s think time)" in text
    assert "TTFT p9" in text
    model_error = " ".join(text.partition("Model error")[2].split())
    assert "5 to 25 %" in model_error and "10 machines" in model_error
    assert len([line for line in text.splitlines() if line.strip()]) <= 8
