"""What a run in virtual time takes of Python: no step of a replica, hardly a call for a request; lengths as columns."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadgen.core.requests.build import build
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.schedule import arrivals
from loadgen.core.workload import loading
from loadgen.core.workload.flags import read_flags
from loadgen.sim.engine import replica as engine
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.request_lengths import sizes_of
from loadgen.sim.virtual_backend import SimulatedSystem, simulate

if engine.module is None:
    pytest.skip("built by pip install where a C compiler is", allow_module_level=True)

MS = 1_000_000
LOADS = {
    "closed loop": ("qa", {"concurrency": "64", "num_requests": 3000}, (), 0.5),
    "closed loop, shared prefix": ("rag", {"concurrency": "64", "num_requests": 2000}, (), 0.5),
    "conversations": ("agentic", {"request_rate": "12", "num_requests": 600}, (), 1),
    "conversations, closed": ("agentic", {"concurrency": "50", "num_requests": 600}, (), 1),
    "tasks": ("coding-agent", {"request_rate": "2", "num_requests": 60}, (), 3),
    "replicas change": ("qa", {"request_rate": "60", "num_requests": 3000}, ((9_000 * MS, 1),), 0.5),
}


@pytest.mark.parametrize("name", LOADS)
def test_no_step_and_no_request_is_carried_out_in_python(name: str) -> None:
    """Calls in Python that a request costs, from the timetable to the rows; a step of the replicas costs none."""
    workload_name, asked, changes, most = LOADS[name]
    workload = loading.load(workload_name, read_flags(**asked, warmup=0))
    requests = build(workload, 1, 1, load_tokenizer(), 0, "chat")
    preset = load_preset("gb300-vm-128k")
    schedule = arrivals.build(workload, 1)
    sizes = sizes_of(workload.requests, requests, preset.server.tokens_per_block, SimpleNamespace(values=False))
    system = SimulatedSystem(costs=preset.costs, limits=preset.limits, speeds=preset.speeds, changes=changes)
    simulate(schedule, sizes, system)  # what is loaded at first use, and what tasks draw
    calls = 0

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        rows, course = simulate(schedule, sizes, system)
    finally:
        sys.setprofile(None)
    assert sum(map(len, course.ends)) > len(rows.rows) / 2
    assert calls < 700 + most * len(rows.rows), f"{calls} calls for {len(rows.rows)} requests"


TURNS = {"count": 3, "tool_result_tokens": {"uniform": {"min": 5, "max": 300}}}
SHARED = {"shared_prefix_tokens": 100, "prefixes": 5, "system_tokens": 70}
DRAWN = {
    "input_tokens": {"lognormal": {"median": 300, "sigma": 0.7}},
    "output_tokens": {"uniform": {"min": 5, "max": 99}},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "conversations": {**DRAWN, **SHARED, "turns": TURNS},
    "single": {**DRAWN, **SHARED},
    "a share of the cache": {**DRAWN, "cache": {"hit_rate": "40%"}},
    "tasks": {},  # of the packaged workloads
    "tasks with branches": {},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_lengths_of_many_are_those_of_each(name: str) -> None:
    if made := REQUESTS[name]:
        stages = [{"arrival": {"closed": 1}, "count": 1}]
        workload = loading.of_mapping({"name": "made", "requests": made, "stages": stages})
    else:
        workload = loading.load("coding-agent" if name == "tasks" else "research-agent", read_flags())
    requests = build(workload, 7, 1, load_tokenizer(), 11, "chat")
    sizes: Any = sizes_of(workload.requests, requests, 32, SimpleNamespace(values=False))
    turns = requests.turns
    columns = sizes.of_chains(5, 12)
    input_tokens, output_tokens, ranges, firsts, counts = (np.array(one).ravel().tolist() for one in columns)
    numbers = [number for number in requests.numbers(40 * turns) if 5 * turns <= number < 17 * turns]
    assert len(numbers) > 11
    for number in numbers:
        at = number - 5 * turns
        own = range(ranges[at], ranges[at + 1])
        blocks = [block for one in own for block in range(firsts[one], firsts[one] + counts[one])]
        assert (input_tokens[at], output_tokens[at], blocks) == (*sizes(number)[:2], list(sizes(number)[2]))
