"""Every injected failure under every kind of load: each slot has one record of the right kind.

An injected failure comes from the simulated server and belongs to an API flavor. A cell is a few
failures under one load (open, closed, sessions) with one or two workers. CI runs a part of the
cells; `pytest -m matrix` runs all of them.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from processes import children
from run_fixtures import NO_PAGES
from servers import start
from test_run import after_the_probe

from loadgen.core.execution import run
from loadgen.core.execution.events import EventHandler, LoadStarted, RunEvent
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.probing import ProbeCache
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.record import KINDS, STATUSES
from loadgen.core.workload import load, read_flags
from loadgen.sim.server.fault_injection import FAILURE_EFFECTS
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import LoggedRequest, parse_log

REQUESTS, TOKENS = 48, 8
STALL_MS = 500
ASKED_MS = 20  # how often the endpoint is asked for the time
HELD_UP = 100  # of its answers: two seconds where nothing else runs
AT = {
    "http_429": ("", "@250ms"),
    "slow_first_byte": ("@20ms", "@60ms"),
    "reset_after": ("@0", "@1", "@3", "@7"),
    "truncate": ("@0", "@1", "@3", "@7"),
    "stall": ("@0", "@1", "@3", "@7"),
    "malformed": ("@0", "@3", "@7"),
    "error_event": ("@0", "@3", "@7"),
    "engine_error": ("@0", "@3", "@7"),
    "oversized": ("@0", "@3", "@7"),
}
FAULTS = [name + at for name in FAILURE_EFFECTS for at in AT.get(name, ("",))]
REQUEST_FORMS = {  # how it is asked: settings
    "chat": {},
    "completions": {"api": "completions"},
    "whole": {"stream": False},
}
LOADS = {
    "open": ({"request_rate": "400", "num_requests": str(REQUESTS)}, ""),
    "closed": ({"concurrency": "5", "num_requests": str(REQUESTS)}, ""),
    "sessions": (
        {"concurrency": "4", "num_requests": str(REQUESTS // 3)},
        "  turns: {count: 3, tool_result_tokens: 3, tool_time: 1ms}\n",
    ),
}


class Cell(NamedTuple):
    load: str
    workers: int


CELLS = [Cell(load, workers) for load in LOADS for workers in (1, 2)]
KINDS_OF_FAULT = [
    (fault, form)
    for fault in FAULTS
    for form in REQUEST_FORMS
    if not (
        form == "whole" and fault in ("stall@1", "stall@3", "stall@7")
    )  # without a token they are all stall@0
]


def groups() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield failures that are injected together, and the API flavor.

    Stalls are alone because they need short time limits.
    """
    for form in REQUEST_FORMS:
        faults = [fault for fault, how in KINDS_OF_FAULT if how == form]
        stalls = [fault for fault in faults if fault.startswith("stall")]
        other_failures = [fault for fault in faults if fault not in stalls]
        yield from (
            (tuple(few), form) for few in (stalls, other_failures[::2], other_failures[1::2])
        )


GROUPS = [
    pytest.param(*group, id=f"{group[1]}-{i % 3}", marks=[pytest.mark.early] * (i % 3 == 0))
    for i, group in enumerate(groups())
]


def expected(logged_request: LoggedRequest, form: str) -> str:
    """Return the error kind that an injected failure causes in a last attempt, or "" if none."""
    name = logged_request.fault.partition("@")[0]
    if name == "idle_reset" and not logged_request.status:
        return "reset"
    kind = {
        "http_429": "http_429",
        "http_500": "http_5xx",
        "http_503": "http_5xx",
        "empty": "empty",
        "reset_before": "reset",
        "reset_after": "reset",
        "truncate": "truncated",
        "stall": "timeout_stall",
        "malformed": "malformed",
        "error_event": "error_event",
        "engine_error": "truncated",
        "no_finish": "no_finish_reason",
    }.get(name, "")
    if (name, form) == ("stall", "whole"):
        return "timeout_total"  # a stream can stall; of a whole answer only its time is known
    if form == "completions" and name == "engine_error":
        return "error_event"
    if form == "whole" and name in ("error_event", "engine_error"):
        return "http_5xx"
    return kind


def test_the_matrix_has_a_hundred_kinds_of_failure() -> None:
    assert len(KINDS_OF_FAULT) >= 100
    assert len(KINDS_OF_FAULT) * len(CELLS) >= 600


def test_each_kind_of_failure_is_in_one_group() -> None:
    assert sorted((fault, form) for faults, form in groups() for fault in faults) == sorted(
        KINDS_OF_FAULT
    )


@pytest.mark.processes
@pytest.mark.parametrize(("faults", "form"), GROUPS)
def test_some_combinations_of_failures_give_one_record_per_slot(
    tmp_path: Path, faults: tuple[str, ...], form: str
) -> None:
    """Run each group of faults under every load, and under two of the loads with two workers.

    Each failure of a group is injected into at least one request of the five cells. The number of
    a request decides which ones.
    """
    number = list(groups()).index((faults, form))
    loads = list(LOADS)
    cells = [Cell(load, 1) for load in loads]
    cells += [Cell(loads[(number + shift) % 3], 2) for shift in (0, 1)]
    check(tmp_path, faults, form, cells)


@pytest.mark.optional
@pytest.mark.processes
@pytest.mark.matrix
@pytest.mark.parametrize(("fault", "form"), KINDS_OF_FAULT)
def test_all_combinations_of_failures_give_one_record_per_slot(
    tmp_path: Path, fault: str, form: str
) -> None:
    check(tmp_path, (fault,), form, CELLS)


def check(folder: Path, faults: tuple[str, ...], form: str, cells: list[Cell]) -> None:
    plan = ",".join(f"{fault}:{min(0.09, 0.5 / len(faults)):.3f}" for fault in faults)
    struck: set[str] = set()
    with start(
        Options(ttft="4ms", itl="0.5ms", log_bodies=True, **after_the_probe(plan))
    ) as endpoint:
        known: ProbeCache = {}
        if not (
            runs := folder.parent / "warm"
        ).exists():  # the first run of a process keeps a pipe for its event loops
            runs.mkdir()
            execute(runs, endpoint.url, known, faults[0].startswith("stall"), form, CELLS[0])
        for cell in cells:
            struck |= one_cell(
                folder / "-".join(map(str, cell)), endpoint.url, known, faults, form, cell
            )
    assert struck == {fault.partition("@")[0] for fault in faults}


def execute(
    folder: Path,
    url: str,
    known: ProbeCache,
    stalls: bool,
    form: str,
    cell: Cell,
    hear: EventHandler = lambda _: None,
) -> tuple[Summary, NDArray[np.void]]:
    flags, more = LOADS[cell.load]
    file = folder / "w.yaml"
    file.write_text(f"name: t\nrequests:\n  input_tokens: 20\n  output_tokens: {TOKENS}\n{more}")
    times = {  # no limit is near, on however busy a machine, but for stalls
        "stall_timeout": f"{STALL_MS}ms" if stalls else "60s",
        "timeout": "3s" if stalls and form == "whole" else "60s",
    }
    workload = load(str(file), read_flags(seed="7", warmup="0", **times, **flags))
    settings: dict[str, Any] = {
        "url": url,
        "model": "sim",
        "server": "trtllm",
        "out": folder / "out",
        "workers": cell.workers,
    }
    if cell.load != "sessions":  # a reader of metrics pages runs beside some of them
        settings |= NO_PAGES
    summary, out = run.execute(
        workload, Settings(**settings | REQUEST_FORMS[form]), (hear,), probe_cache=known
    )
    return summary, store.read_run(out).rows


def one_cell(
    folder: Path, url: str, known: ProbeCache, faults: tuple[str, ...], form: str, cell: Cell
) -> set[str]:
    """Run one combination and return the names of the failures injected, retries included."""
    stalls = faults[0].startswith("stall")
    folder.mkdir()
    read(url, "/_log")
    our_counts = in_use()
    starts: list[int] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, LoadStarted):
            starts.append(event.start_ns)

    with answered(url) as answers:
        summary, rows = execute(folder, url, known, stalls, form, cell, hear)
    assert in_use() - our_counts == Counter(), "a process or a descriptor is left"
    assert wait_for_no_connection(url), "connections are left"

    slots = rows["slot"].tolist()
    requests = summary.requests
    assert sorted(slots) == list(range(requests.scheduled)), "each slot has exactly one record"
    parts = ("ok", "failed", "dropped", "cancelled", "unfinished", "lost")
    assert sum(getattr(requests, part) for part in parts) == requests.scheduled == REQUESTS
    assert Counter(STATUSES[status] for status in rows["status"].tolist()) == Counter(
        {part: number for part in parts if (number := getattr(requests, part))}
    )

    log = parse_log(read(url, "/_log")).requests
    struck = {
        int(logged_request.id.rpartition("-")[2]): logged_request
        for logged_request in log
        if logged_request.id
    }  # the last try of each counts
    kind_of = dict(zip(slots, (KINDS[kind] for kind in rows["kind"].tolist()), strict=True))
    wanted = {slot: expected(logged_request, form) for slot, logged_request in struck.items()}
    wanted |= {slot: "previous_turn_failed" for slot in slots if slot not in struck}
    (start_ns,) = starts
    for row in rows[
        rows["kind"] == KINDS.index("timeout_stall")
    ]:  # the endpoint itself had no time: no fault of ours
        last = np.searchsorted(answers, start_ns + row["done_ns"] - [STALL_MS * 10**6, 0])
        if not struck[row["slot"]].fault and np.diff(last) < STALL_MS // ASKED_MS // 3:
            wanted[row["slot"]] = "timeout_stall"
    assert kind_of == wanted
    failed = [slot for slot in slots if wanted[slot] not in ("", "previous_turn_failed")]
    for slot in slots:  # a turn is dropped when, and only when, one before it failed
        before = range(slot - slot % 3, slot) if cell.load == "sessions" else ()
        assert (wanted[slot] == "previous_turn_failed") == any(
            earlier in failed for earlier in before
        )

    healthy = rows[
        (rows["status"] == 0) & [slot in struck and not struck[slot].fault for slot in slots]
    ]
    assert len(healthy) >= 3
    assert (healthy["output_tokens"] == TOKENS).all()
    due, end = (np.searchsorted(answers, start_ns + healthy[at]) for at in ("due_ns", "end_ns"))
    assert (end - due).max() < HELD_UP, "a healthy request was held up"
    return {
        logged_request.fault.partition("@")[0] for logged_request in log if logged_request.fault
    }


@contextmanager
def answered(url: str) -> Iterator[list[int]]:
    """Record when the endpoint answers a request sent every 20 ms.

    A busy machine answers less often. The list is therefore a clock that shows how late the client
    and the endpoint are because of the machine.
    """
    answers: list[int] = []
    stop = threading.Event()
    parts = urllib.parse.urlsplit(url)

    def ask() -> None:
        with closing(http.client.HTTPConnection(parts.netloc)) as connection:
            while not stop.wait(ASKED_MS / 1e3):
                connection.request("GET", "/_stats")
                connection.getresponse().read()
                answers.append(monotonic_ns())

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield answers
    finally:
        stop.set()
        asking.join()


def in_use() -> Counter[str]:
    """Return the children and descriptors of this process, without an earlier test's garbage."""
    links = (Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd"))
    files = [str(link.readlink()) for link in links if link.is_symlink()]
    return Counter([*files, *(f"process {pid}" for pid in children(os.getpid()))])


def read(url: str, page: str) -> bytes:
    with urllib.request.urlopen(url + page) as answer:
        content: bytes = answer.read()
    return content


def wait_for_no_connection(url: str) -> bool:
    """Return True once the endpoint sees all connections closed, by its own clock."""
    return any(
        json.loads(read(url, "/_stats"))["connections"] <= 1
        for _ in zip(range(200), count(), strict=False)
    )
