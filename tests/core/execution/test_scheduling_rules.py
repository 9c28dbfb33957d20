"""The rules of scheduling, asserted on the records of whole runs in virtual time and over HTTP.

The dispatcher decides what starts when. These tests see its decisions where users do: in the
records of a run, whichever way the requests were sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from run_fixtures import NO_PAGES
from servers import shared, start

from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.results import store
from loadgen.core.results.record import KIND, STATUS
from loadgen.core.workload import load, read_flags
from loadgen.sim.server.options import Options

MS = 1_000_000
FAILING = Options(faults="truncate:0.5")  # by its request number; the first one, a check, is whole
Records = NDArray[np.void]
RunLoad = Callable[..., Records]


@pytest.fixture(params=["virtual", pytest.param("http", marks=pytest.mark.processes)])
def run_load(request: pytest.FixtureRequest, tmp_path: Path) -> RunLoad:
    """Return a function that runs a workload and returns its records in order of slots."""
    url = "sim:gb300-vm" if request.param == "virtual" else shared().url
    return partial(run_workload, tmp_path, url)


def run_workload(
    folder: Path, url: str, stages: str, requests: str = "", output_tokens: int = 6
) -> Records:
    file = folder / "workload.yaml"
    file.write_text(
        "name: rules\n"
        f"requests: {{input_tokens: 20, output_tokens: {output_tokens}{requests}}}\n{stages}"
    )
    without_probe = {} if url.startswith("sim:") else {"model": "sim", "server": "trtllm"}
    settings = Settings(url=url, out=folder / "run", **without_probe, **NO_PAGES)
    _, run_dir = run.execute(load(str(file), read_flags(seed="7")), settings)
    rows = store.read_run(run_dir).rows
    return rows[np.argsort(rows["slot"])]


def closed(concurrency: int, limit: str, ramp: str = "0s", *, measured: bool = True) -> str:
    """Return a closed-loop stage as YAML. `limit` is its `count: N` or `duration: TIME`."""
    arrival = f"{{closed: {{concurrency: {concurrency}, ramp: {ramp}}}}}"
    return f"  - {{arrival: {arrival}, {limit}, measured: {str(measured).lower()}}}\n"


def most_in_flight(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> int:
    """Return the largest number of requests between their begin and their end at one time."""
    changes = [(int(at), 1) for at in begin_ns] + [(int(at), -1) for at in end_ns]
    in_flight = highest = 0
    for _, change in sorted(changes):
        in_flight += change
        highest = max(highest, in_flight)
    return highest


def test_a_virtual_user_continues_when_its_response_has_ended(run_load: RunLoad) -> None:
    rows = run_load("stages:\n" + closed(3, "count: 30"))
    assert len(rows) == 30
    assert (rows["status"] == STATUS["ok"]).all()
    assert (rows["turn"] == 0).all()
    for virtual_user in range(3):
        requests = rows[rows["virtual_user"] == virtual_user]
        assert len(requests) >= 5
        assert (requests["due_ns"][1:] == requests["done_ns"][:-1]).all()


def test_as_many_requests_are_in_flight_as_there_are_virtual_users(run_load: RunLoad) -> None:
    rows = run_load("stages:\n" + closed(4, "count: 40"))
    assert sorted(set(rows["virtual_user"])) == [0, 1, 2, 3]
    assert most_in_flight(rows["due_ns"], rows["done_ns"]) == 4


def test_a_stage_with_a_count_sends_that_many_requests(run_load: RunLoad) -> None:
    rows = run_load("stages:\n" + closed(2, "count: 7", measured=False) + closed(2, "count: 12"))
    assert np.bincount(rows["stage"]).tolist() == [7, 12]
    assert rows["slot"].tolist() == list(range(19))


def test_virtual_users_of_a_closed_loop_replace_those_of_the_one_before(
    run_load: RunLoad,
) -> None:
    rows = run_load("stages:\n" + closed(3, "count: 9", measured=False) + closed(3, "count: 9"))
    warm_up = rows[rows["stage"] == 0]
    measured = rows[rows["stage"] == 1]
    last_ends_ns = np.sort(
        [warm_up["done_ns"][warm_up["virtual_user"] == user].max() for user in range(3)]
    )
    starts_ns = np.sort(
        [measured["due_ns"][measured["virtual_user"] == user].min() for user in range(3)]
    )

    # Over HTTP the client may read several responses at once; users then start at the later end.
    assert (starts_ns >= last_ends_ns).all()
    assert starts_ns.max() == last_ends_ns.max()
    assert most_in_flight(rows["sent_ns"], rows["done_ns"]) == 3


def test_an_open_loop_starts_requests_at_the_scheduled_times(
    run_load: RunLoad,
) -> None:
    rows = run_load("stages:\n  - {arrival: {constant: 200/s}, count: 20}\n")
    assert np.diff(rows["due_ns"]).tolist() == [5 * MS] * 19
    assert (rows["sent_ns"] >= rows["due_ns"]).all()
    assert (rows["virtual_user"] == -1).all()


def test_starts_above_the_limit_in_flight_are_dropped(run_load: RunLoad) -> None:
    stages = "  - {arrival: {constant: 2000/s}, count: 60}\n"
    rows = run_load("max_in_flight: 3\nstages:\n" + stages)
    dropped = rows["status"] == STATUS["dropped"]
    sent_records = rows[~dropped]
    assert (rows["kind"][dropped] == KIND["in_flight_cap"]).all()
    assert dropped.any()
    assert most_in_flight(sent_records["sent_ns"], sent_records["done_ns"]) == 3


def test_each_turn_of_a_conversation_starts_after_the_previous_one_and_the_pause(
    run_load: RunLoad,
) -> None:
    rows = run_load(
        "stages:\n  - {arrival: {constant: 100/s}, count: 9}\n",
        ", turns: {count: 2, tool_result_tokens: 4, tool_time: 5ms}",
    )

    assert len(rows) == 18
    assert len(set(rows["session"].tolist())) == 9

    for session in set(rows["session"].tolist()):
        turns = rows[rows["session"] == session]
        assert turns["turn"].tolist() == [0, 1]
        assert (turns["due_ns"][1:] == turns["done_ns"][:-1] + 5 * MS).all()


def test_starts_of_virtual_users_are_spread_evenly_over_the_ramp(run_load: RunLoad) -> None:
    rows = run_load("stages:\n" + closed(4, "count: 24", ramp="40ms"))
    assert len(rows) == 24
    assert rows["due_ns"][:4].tolist() == [0, 10 * MS, 20 * MS, 30 * MS]
    assert rows["virtual_user"][:4].tolist() == [0, 1, 2, 3]


def test_a_closed_loop_with_a_duration_starts_nothing_after_its_end(run_load: RunLoad) -> None:
    timed_stage = closed(3, "duration: 200ms", measured=False)
    rows = run_load("stages:\n" + timed_stage + closed(3, "count: 9"))
    timed = rows[rows["stage"] == 0]
    assert (timed["due_ns"] < 200 * MS).all()
    for virtual_user in range(3):
        ends_ns = timed["done_ns"][timed["virtual_user"] == virtual_user]
        assert ends_ns[-1] >= 200 * MS


def test_virtual_users_wait_for_a_place_in_prefill(run_load: RunLoad) -> None:
    rows = run_load("max_in_prefill: 2\nstages:\n" + closed(5, "count: 30"))
    assert len(rows) == 30
    assert (rows["status"] == STATUS["ok"]).all()
    assert most_in_flight(rows["sent_ns"], rows["first_token_ns"]) == 2


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["http"])
def test_a_virtual_user_continues_after_a_failed_request(tmp_path: Path, transport: str) -> None:
    with start(FAILING) as server:
        assert server.url.startswith(f"{transport}:")
        rows = run_workload(tmp_path, server.url, "stages:\n" + closed(2, "duration: 500ms"))
    assert (rows["kind"] == KIND["truncated"]).any()
    for virtual_user in range(2):
        requests = rows[rows["virtual_user"] == virtual_user]
        assert len(requests) >= 3
        assert (requests["due_ns"][1:] == requests["done_ns"][:-1]).all()


def test_the_limit_in_flight_does_not_apply_to_a_closed_loop(run_load: RunLoad) -> None:
    rows = run_load("max_in_flight: 2\nstages:\n" + closed(4, "count: 24"))
    assert (rows["status"] == STATUS["ok"]).all()
    assert sorted(set(rows["virtual_user"])) == [0, 1, 2, 3]


def test_an_open_loop_begins_when_the_closed_loop_before_it_has_ended(run_load: RunLoad) -> None:
    """Responses take long enough for the client to read the last one alone on a busy machine."""
    open_stage = "  - {arrival: {constant: 200/s}, count: 6}\n"
    stages = "stages:\n" + closed(2, "count: 3", measured=False) + open_stage
    rows = run_load(stages, output_tokens=1000)
    last_end_ns = rows["done_ns"][rows["stage"] == 0].max()
    due_ns = rows["due_ns"][rows["stage"] == 1]
    assert due_ns.tolist() == [last_end_ns + number * 5 * MS for number in range(6)]


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["http"])
def test_a_conversation_ends_with_its_first_failed_turn(tmp_path: Path, transport: str) -> None:
    with start(FAILING) as server:
        assert server.url.startswith(f"{transport}:")
        rows = run_workload(
            tmp_path,
            server.url,
            "stages:\n  - {arrival: {constant: 100/s}, count: 12}\n",
            ", turns: {count: 2, tool_result_tokens: 4, tool_time: 0ms}",
        )

    assert len(rows) == 24

    first_turns = rows[rows["turn"] == 0]
    second_turns = rows[rows["turn"] == 1]
    failed = first_turns["status"] == STATUS["failed"]

    assert failed.any()
    assert not failed.all()
    assert (second_turns["kind"][failed] == KIND["previous_turn_failed"]).all()
    assert (second_turns["sent_ns"][~failed] >= 0).all()


def test_a_virtual_user_begins_each_conversation_with_its_first_turn(run_load: RunLoad) -> None:
    turns = ", turns: {count: 2, tool_result_tokens: 4, tool_time: 5ms}"
    rows = run_load("stages:\n" + closed(2, "count: 6"), turns)
    assert rows["turn"].tolist() == [0, 1] * 6
