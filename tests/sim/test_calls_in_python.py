"""A simulation needs a few Python calls per request and none per quiet iteration."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import loading
from loadgen.core.workload.flags import read_flags
from loadgen.sim.engine.implementation import compiled_module
from loadgen.sim.engine.system import ReplicaChange, SimulatedSystem
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.request_lengths import create_request_sizer
from loadgen.sim.virtual_backend import simulate

if compiled_module is None:
    pytest.skip("built by pip install where a C compiler is", allow_module_level=True)

MS = 1_000_000
LOADS = {
    "closed loop": ("qa", {"concurrency": "64", "num_requests": 3000}, (), 20),
    "closed loop, shared prefix": ("rag", {"concurrency": "64", "num_requests": 2000}, (), 20),
    "conversations": ("agentic", {"request_rate": "12", "num_requests": 600}, (), 50),
    "conversations, closed": ("agentic", {"concurrency": "50", "num_requests": 600}, (), 50),
    "tasks": (
        "coding-agent",
        {"request_rate": "2", "num_requests": 60},
        (),
        90,
    ),  # each has lengths of its own
    "replicas change": (
        "qa",
        {"request_rate": "60", "num_requests": 3000},
        (ReplicaChange(9_000 * MS, 1),),
        20,
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_the_simulation_needs_few_python_calls_per_request(name: str) -> None:
    workload_name, options, changes, most = LOADS[name]
    workload = loading.load(workload_name, read_flags(**options, warmup=0))
    requests = build_prompts(workload, 1, 1, load_tokenizer())
    preset = load_preset("gb300-vm-128k")
    schedule = build_schedule(workload, 1)
    sizes = create_request_sizer(workload.requests, requests, preset.server.tokens_per_block)
    system = SimulatedSystem(
        costs=preset.costs, limits=preset.limits, speeds=preset.speeds, changes=changes
    )
    simulate(schedule, sizes, system)  # numpy and what is loaded at first use
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        rows, simulation = simulate(schedule, sizes, system)
    finally:
        sys.setprofile(None)
    assert sum(map(len, simulation.iteration_ends_ns)) > len(rows.records) / 2
    assert calls < 700 + most * len(rows.records), f"{calls} calls for {len(rows.records)} requests"
