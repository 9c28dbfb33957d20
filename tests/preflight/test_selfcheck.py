"""The arithmetic of the self-check: truth against a log, the search for a level, what is said of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import ROW
from loadgen.preflight import selfcheck
from loadgen.preflight.selfcheck import TOLERANCE_NS, SelfcheckResult, Step
from loadgen.present import text as as_text
from loadgen.sim.server.send_log import LoggedRequest, SentRequests

MS = 1_000_000
START = 5_000 * MS


def rows(*reported: tuple[int, int, int], status: int = 0) -> np.ndarray:
    """(first_token_ns, last_token_ns, stamp_error_ns) per slot, all due at slot * 1 ms, five tokens each."""
    made = np.zeros(len(reported), ROW)
    made["slot"] = np.arange(len(reported))
    made["due_ns"] = np.arange(len(reported)) * MS
    made["output_tokens"] = 5
    made["status"] = status
    for i, (first, last, error) in enumerate(reported):
        made[i]["first_token_ns"], made[i]["last_token_ns"], made[i]["stamp_error_ns"] = (
            first,
            last,
            error,
        )
    return made


def log(
    *sends: tuple[int, int, int], ids: tuple[str, ...] = ("probe", "run-1", "run-0")
) -> SentRequests:
    """Sends (request number, event, ns of the run) in their order; `ids` by request number."""
    columns = np.array(sends, np.int64).reshape(-1, 3)
    requests = [
        LoggedRequest(number=i, id=name, arrival_ns=0, path="", status=200)
        for i, name in enumerate(ids)
    ]
    sent = columns[:, 2] + START
    return SentRequests(requests, columns[:, 0].copy(), columns[:, 1].copy(), sent, sent)


SENDS = ((0, 0, 1 * MS), (2, 0, 10 * MS), (1, 0, 12 * MS), (2, 4, 50 * MS), (1, 4, 54 * MS))


def test_truth_joins_rows_and_log_by_request_id_not_by_number() -> None:
    seen = selfcheck.truth(
        rows((10 * MS, 50 * MS, 0), (12 * MS, 54 * MS, 0)), log(*SENDS), "run", START
    )
    assert seen is not None
    assert (seen.count, seen.ttft_p50_ms, seen.ttft_p99_ms) == (
        2,
        11.0,
        11.0,
    )  # 10 - 0 is at place 0, 12 - 1 at 1
    assert (seen.error_max_ms, seen.ttft_p50_error_ms, seen.bounded_share) == (0.0, 0.0, 1.0)
    assert seen.tpot_p50_error_share == 0.0


@pytest.mark.parametrize(
    ("late_ns", "stamp_error_ns", "bounded", "explained"),
    [
        (0, 0, 1.0, 1.0),
        (TOLERANCE_NS, 0, 1.0, 1.0),
        (
            TOLERANCE_NS + 1,
            0,
            0.0,
            1.0,
        ),  # the endpoint may have been held up: its next look at the clock is 2 ms on
        (TOLERANCE_NS + 1, 1, 1.0, 1.0),
        (2 * MS + TOLERANCE_NS + 1, 0, 0.0, 0.0),  # this it cannot explain
        (-TOLERANCE_NS - 1, 5 * MS, 0.0, 0.0),  # nothing arrives before it was sent
    ],
)
def test_an_error_is_bounded_by_its_stamp_error(
    late_ns: int, stamp_error_ns: int, bounded: float, explained: float
) -> None:
    found = rows((10 * MS + late_ns, 50 * MS, stamp_error_ns))
    seen = selfcheck.truth(found, log(*SENDS), "run", START)
    assert seen is not None
    assert (seen.bounded_share, seen.explained_share) == (bounded, explained)
    assert seen.error_max_ms == round(abs(late_ns) / 1e6, 4)


def test_truth_of_other_runs_and_of_failures_is_none() -> None:
    assert selfcheck.truth(rows((1, 2, 0)), log(*SENDS), "other", START) is None
    assert selfcheck.truth(rows((1, 2, 0), status=1), log(*SENDS), "run", START) is None
    assert selfcheck.truth(rows((1, 2, 0)), log(ids=()), "run", START) is None


def step(offered: float, sound: bool, cpu: float = 0.5, limited: bool = False) -> Step:
    return Step(
        kind="spread",
        offered=offered,
        achieved=offered,
        cpu_share=cpu,
        server_share=0.3,
        server_late_p50_ms=0.0,
        send_lag_p99_ms=1.0,
        truth=None,
        sound=sound,
        codes=() if sound else (ReasonCode(code="generator_busy"),),
        server_limited=limited,
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 100.0),
        ([step(100, True, cpu=0.17)], 500.0),  # aims at 85 % CPU
        ([step(100, True, cpu=0.01)], 500.0),  # but never more than five times at once
        ([step(100, True, cpu=0.89)], 125.0),  # nor less than a quarter more
        ([step(100, False, cpu=0.95)], 50.0),
        (
            [step(100, False)],
            100.0,
        ),  # once more: the worker was not busy, so somebody else may have been
        ([step(100, False), step(100, False)], 50.0),
        ([step(100, False), step(100, True)], 170.0),
        ([step(100, True), step(400, False, cpu=0.95)], 200.0),
        ([step(100, True), step(120, False, cpu=0.95)], None),  # near enough
        ([step(100, True, limited=True)], None),
        ([step(100, True)] * 4, None),
    ],
)
def test_the_search_closes_in_and_ends(steps: list[Step], expected: float | None) -> None:
    found = selfcheck.following(steps, 100.0, 4)
    assert found == (pytest.approx(expected) if expected is not None else None)


@pytest.mark.parametrize(
    ("steps", "per_s", "limit", "said"),
    [
        ([step(100, True), step(200, False)], 100.0, "client", "about 100"),
        (
            [step(100, True), step(200, True, limited=True)],
            200.0,
            "server",
            "the endpoint was at its limit",
        ),
        ([step(100, True), step(200, True)], 200.0, "steps", "or more: the search ended"),
        (
            [step(100, False), step(50, True), step(120, True)],
            50.0,
            "client",
            "about 50",
        ),  # a lucky one is none
        ([step(100, True), step(300, False), step(300, True)], 300.0, "steps", "about 300 or more"),
        ([step(100, False)], None, "client", "no level was sound"),
    ],
)
def test_the_level_is_the_last_sound_one(
    steps: list[Step], per_s: float | None, limit: str, said: str
) -> None:
    level = selfcheck.level("spread", steps)
    assert (level.per_s, level.limit) == (per_s, limit)
    assert said in selfcheck.sentence(level)


@pytest.mark.parametrize(
    ("cpu", "server", "late_ms", "limited"),
    [
        (0.5, 0.5, 1.0, False),
        (0.5, 0.95, 1.0, True),
        (0.5, 0.5, 40.0, True),  # behind its own plan, and the client was idle half the time
        (0.95, 0.95, 40.0, False),  # the client has no time to spare either
    ],
)
def test_who_was_the_limit(cpu: float, server: float, late_ms: float, limited: bool) -> None:
    assert (
        selfcheck.server_limited(cpu_share=cpu, server_share=server, server_late_p50_ms=late_ms)
        is limited
    )


def test_the_answer_survives_json() -> None:
    steps = (step(100, True), step(200, False))
    found = SelfcheckResult(
        seconds=3.0, cpus=2, steps=steps, levels=(selfcheck.level("spread", steps),)
    )
    assert msgspec.json.decode(msgspec.json.encode(found), type=SelfcheckResult) == found
    assert found.sound
    assert "about 100" in as_text.render(selfcheck.report(found))
    assert "busy" in selfcheck.line(steps[1])
