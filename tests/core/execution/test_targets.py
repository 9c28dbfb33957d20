"""Several endpoints in one run: who gets what, one that dies, and the rack's two totals."""

from pathlib import Path
from typing import Any

import pytest
from expected_errors import refused
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.request import Completion, Failure
from msgspec.structs import replace
from run_fixtures import NO_PAGES, says, when_started
from servers import QUICK, log, shared, start

from loadgen.core.errors import CombinedError, TargetError
from loadgen.core.execution import run
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.execution.target_selection import DOWN_AFTER, RETRY_NS, TargetSelection
from loadgen.core.metrics.summary import exit_code
from loadgen.core.results import store
from loadgen.core.results.record import STATUSES
from loadgen.core.workload import load, read_flags
from loadgen.runs import text
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options


def settings_of_two_servers(second_server: embedded.EmbeddedServer) -> dict[str, Any]:
    """Return settings of this server and of one that other tests share."""
    endpoint = Endpoint(url=shared().url, name="one")
    return {"url": endpoint.url, "targets": (endpoint, Endpoint(url=second_server.url, name="two"))}


def workload(tmp_path: Path, turns: int = 0, **flags: str) -> run.Workload:
    file = tmp_path / "w.yaml"
    more = f", turns: {{count: {turns}, tool_result_tokens: 3}}" if turns else ""
    file.write_text(f"name: many\nrequests: {{input_tokens: 8, output_tokens: 4{more}}}\n")
    return load(str(file), read_flags(**flags))


@pytest.mark.processes
@pytest.mark.parametrize("route", ["round-robin", "sticky", "least-in-flight"])
def test_each_route_uses_all_targets(tmp_path: Path, route: str) -> None:
    ends = (Endpoint(url=shared().url, name="one"), Endpoint(url=shared(number=1).url, name="two"))
    settings = Settings(
        url=ends[0].url, targets=ends, route=route, out=tmp_path / "out", **NO_PAGES
    )  # type: ignore[arg-type]
    turns = 3 if route == "sticky" else 0
    summary, folder = run.execute(
        workload(tmp_path, turns, concurrency="4", num_requests="20"), settings
    )
    rows = store.read_run(folder).rows

    assert summary.requests.ok == len(rows) == (60 if turns else 20)
    assert {part.target.name for part in summary.targets} == {"one", "two"}
    if route == "round-robin":
        assert (rows["target"] == rows["slot"] % 2).all()
    if route == "sticky":
        assert (rows["target"] == rows["session"] % 2).all()
    assert summary.rack is not None and summary.rack.targets == 2
    own_output_per_s = [part.active_output_per_s for part in summary.targets]
    assert summary.rack.sum_of_rates_per_s == pytest.approx(
        sum(rate or 0.0 for rate in own_output_per_s)
    )
    assert summary.rack.single_clock_per_s == summary.tokens.output_per_s

    lines = text.render(summary).splitlines()
    totals = [
        line for line in lines if "each over its own time" in line or "over the common time" in line
    ]

    assert (
        len(totals) == 2 and len({len(line) for line in totals}) == 1
    )  # named, and one below the other


@pytest.mark.processes
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_run_continues_if_one_target_dies(tmp_path: Path, policy: str) -> None:
    with start(QUICK) as second_server:
        settings = Settings(
            on_target_failure=policy,
            out=tmp_path / "out",
            **NO_PAGES,
            **settings_of_two_servers(second_server),
        )  # type: ignore[arg-type]
        requested_workload = workload(tmp_path, concurrency="2", num_requests="200")
        summary, folder = run.execute(
            requested_workload, settings, when_started(lambda _: second_server.stop())
        )
    rows = store.read_run(folder).rows

    assert len(rows) == 200
    dead = rows[rows["target"] == 1]
    assert not (dead["status"] == 0).any()
    assert says(summary.verdict.warning_codes, "target_gone", target="two")
    if policy == "continue":
        assert (rows[rows["target"] == 0]["status"] == 0).all() and summary.requests.ok == 100
        assert summary.run.state == "finished"
    else:
        assert summary.requests.cancelled > 0
        assert summary.run.state == "stopped"
        assert not summary.verdict.valid and says(summary.verdict.codes, "stopped")
        assert exit_code(summary) == 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("concurrency", "route"), [("4", "round-robin"), ("4", "least-in-flight"), ("3", "sticky")]
)
def test_a_dead_target_causes_few_failures(tmp_path: Path, concurrency: str, route: str) -> None:
    """Immediate retries of refused connections would cause thousands of failures a second."""
    with start(QUICK) as second_server:
        settings = Settings(
            route=route, out=tmp_path / "out", **NO_PAGES, **settings_of_two_servers(second_server)
        )  # type: ignore[arg-type]
        requested_workload = workload(
            tmp_path, concurrency=concurrency, duration="1.5s", warmup="0"
        )
        summary, folder = run.execute(
            requested_workload, settings, when_started(lambda _: second_server.stop())
        )

    assert summary.targets[0].requests.failed == 0 and summary.targets[0].requests.ok > 50

    if concurrency == "4":  # lanes that are bound to a target, or may choose
        rows = store.read_run(
            folder
        ).rows  # of all stages: a lane's first round, not measured, may be long here
        assert (
            5
            <= int(((rows["target"] == 1) & (rows["status"] == STATUSES.index("failed"))).sum())
            < 40
        )


@pytest.mark.processes
def test_all_workers_stop_when_the_target_of_one_is_dead(tmp_path: Path) -> None:
    """All requests to the dead target belong to the second worker, yet both workers stop."""
    with start(QUICK) as second_server:
        settings = Settings(
            on_target_failure="stop",
            workers=2,
            out=tmp_path / "out",
            **NO_PAGES,
            **settings_of_two_servers(second_server),
        )
        requested_workload = workload(tmp_path, request_rate="20", duration="60s", warmup="0")
        summary, folder = run.execute(
            requested_workload, settings, when_started(lambda _: second_server.stop())
        )
    rows = store.read_run(folder).rows

    assert summary.run.state == "stopped" and summary.requests.cancelled > 900
    assert set(rows[rows["target"] == 1]["worker"].tolist()) == {1}
    assert summary.requests.scheduled == len(rows)


def failure(kind: str, status: int = 0) -> Completion:
    return Completion(request=None, due=0, http_status=status, failure=Failure(kind, ""))


@pytest.mark.parametrize(
    ("route", "turns", "chosen"),
    [
        ("round-robin", 1, [0, 1, 2, 0, 1, 2]),
        ("auto", 1, [0, 1, 2, 0, 1, 2]),
        ("auto", 2, [0, 0, 1, 1, 2, 2]),
        ("sticky", 3, [0, 0, 0, 1, 1, 1]),
        ("least-in-flight", 1, [0, 1, 2, 0, 1, 2]),  # all equal: in turn
    ],
)
def test_a_route_selects_the_target_of_each_request(
    route: str, turns: int, chosen: list[int]
) -> None:
    routes = TargetSelection(route, 3, turns, lambda _: 7)
    assert [routes.choose(number, 0) for number in range(6)] == chosen


def test_the_least_busy_responding_target_is_selected() -> None:
    flying = [5, 0, 3]
    routes = TargetSelection("least-in-flight", 3, 1, flying.__getitem__)

    assert routes.choose(0, 0) == 1
    reports = [routes.report_failure(1, failure("connect"), 100) for _ in range(DOWN_AFTER + 3)]
    assert reports == [False] * (DOWN_AFTER - 1) + [True] + [False] * 3
    assert routes.down_since_ns == {1: 100}
    assert {routes.choose(n, 200) for n in range(9)} == {2}
    assert [routes.choose(n, 100 + RETRY_NS) for n in range(3)] == [
        1,
        2,
        2,
    ]  # one looks whether it is back
    routes.report_success(1)
    assert routes.choose(0, 101 + RETRY_NS) == 1
    assert routes.down_since_ns == {1: 100}  # that it was down is not forgotten


@pytest.mark.parametrize(
    ("completion", "down"),
    [
        (failure("connect"), True),
        (failure("timeout_stall"), True),
        (failure("reset", 200), False),  # it had begun to answer
        (failure("http_5xx", 503), False),
        (failure("interrupted"), False),
    ],
)
def test_a_target_is_down_after_repeated_connection_failures(
    completion: Completion, down: bool
) -> None:
    routes = TargetSelection("round-robin", 2, 1, lambda _: 0)
    for _ in range(DOWN_AFTER):
        routes.report_failure(1, completion, 0)
    assert routes.is_down(1) is down
    assert routes.pause_ns(3) == (RETRY_NS if down else 0)
    assert routes.pause_ns(2) == 0


@pytest.mark.processes
def test_targets_that_serve_different_models_are_refused(tmp_path: Path) -> None:
    with start(Options(model="other")) as second_server:
        settings = Settings(out=tmp_path / "out", **settings_of_two_servers(second_server))
        requested_workload = workload(tmp_path, concurrency="1", num_requests="1")
        with refused(TargetError, "targets_differ", where="two"):
            run.execute(requested_workload, settings)
        with refused(TargetError, "targets_differ"):  # which it would answer for all the same
            run.execute(requested_workload, replace(settings, model="sim"))
        gone_endpoint = Endpoint(url="http://127.0.0.1:1", name="three")
        with pytest.raises(CombinedError) as faults:
            run.execute(
                requested_workload, replace(settings, targets=(*settings.targets, gone_endpoint))
            )

    assert [fault.code for fault in faults.value.errors] == ["targets_differ", "connect"]


@pytest.mark.processes
def test_a_command_sends_one_preflight_per_target(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, concurrency="1", num_requests="2", seed="7", warmup="0")
    received = []
    server = shared()
    known: dict[Endpoint, ProbeResult] = {}
    for name in ("a", "b"):
        summary, _ = run.execute(
            requested_workload,
            Settings(url=server.url, out=tmp_path / name, **NO_PAGES),
            probe_cache=known,
        )
        assert summary.requests.ok == 2
        received.append(len(log(server).requests))

    assert received[0] > 2 == received[1]
