"""Tests of the comparison of a run with the log of its server (benchmarks/truth.py)."""

from __future__ import annotations

import numpy as np
import pytest
from truth import SEND_TOLERANCE_NS, compare_with_log

from loadgen.core.results.record import ROW
from loadgen.sim.server.send_log import LoggedRequest, SentRequests

MS = 1_000_000
START = 5_000 * MS


def rows(*reported: tuple[int, int, int], status: int = 0) -> np.ndarray:
    """Return (first_token_ns, last_token_ns, stamp_error_ns) for each slot.

    A slot is due at its number in ms, and each response has five tokens.
    """
    records = np.zeros(len(reported), ROW)
    records["slot"] = np.arange(len(reported))
    records["due_ns"] = np.arange(len(reported)) * MS
    records["output_tokens"] = 5
    records["status"] = status
    for i, (first, last, error) in enumerate(reported):
        records[i]["first_token_ns"], records[i]["last_token_ns"], records[i]["stamp_error_ns"] = (
            first,
            last,
            error,
        )
    return records


def log(
    *sends: tuple[int, int, int], ids: tuple[str, ...] = ("probe", "run-1", "run-0")
) -> SentRequests:
    """Return the sends (request number, event, ns of the run) in order, with ids by request."""
    columns = np.array(sends, np.int64).reshape(-1, 3)
    requests = [
        LoggedRequest(number=i, id=name, arrival_ns=0, path="", status=200)
        for i, name in enumerate(ids)
    ]
    sent = columns[:, 2] + START
    return SentRequests(requests, columns[:, 0].copy(), columns[:, 1].copy(), sent, sent)


SENDS = ((0, 0, 1 * MS), (2, 0, 10 * MS), (1, 0, 12 * MS), (2, 4, 50 * MS), (1, 4, 54 * MS))


def test_records_are_joined_with_the_server_log_by_request_id_and_not_by_number() -> None:
    seen = compare_with_log(
        rows((10 * MS, 50 * MS, 0), (12 * MS, 54 * MS, 0)), log(*SENDS), "run", START
    )

    assert seen is not None
    assert (seen.request_count, seen.true_ttft_p50_ms, seen.true_ttft_p99_ms) == (
        2,
        11.0,
        11.0,
    )  # 10 - 0 is at place 0, 12 - 1 at 1
    assert (seen.request_error_max_ms, seen.ttft_p50_error_ms, seen.within_uncertainty) == (
        0.0,
        0.0,
        1.0,
    )
    assert seen.tpot_p50_relative_error == 0.0


@pytest.mark.parametrize(
    ("late_ns", "stamp_error_ns", "bounded", "explained"),
    [
        (0, 0, 1.0, 1.0),
        (SEND_TOLERANCE_NS, 0, 1.0, 1.0),
        (
            SEND_TOLERANCE_NS + 1,
            0,
            0.0,
            1.0,
        ),  # the endpoint may have been held up: its next look at the clock is 2 ms on
        (SEND_TOLERANCE_NS + 1, 1, 1.0, 1.0),
        (2 * MS + SEND_TOLERANCE_NS + 1, 0, 0.0, 0.0),  # this it cannot explain
        (-SEND_TOLERANCE_NS - 1, 5 * MS, 0.0, 0.0),  # nothing arrives before it was sent
    ],
)
def test_a_measurement_error_is_bounded_by_its_timestamp_uncertainty(
    late_ns: int, stamp_error_ns: int, bounded: float, explained: float
) -> None:
    records = rows((10 * MS + late_ns, 50 * MS, stamp_error_ns))
    seen = compare_with_log(records, log(*SENDS), "run", START)
    assert seen is not None
    assert (seen.within_uncertainty, seen.within_uncertainty_and_server_delay) == (
        bounded,
        explained,
    )
    assert seen.request_error_max_ms == round(abs(late_ns) / 1e6, 4)


def test_a_server_log_of_another_run_or_of_failures_is_not_compared() -> None:
    assert compare_with_log(rows((1, 2, 0)), log(*SENDS), "other", START) is None
    assert compare_with_log(rows((1, 2, 0), status=1), log(*SENDS), "run", START) is None
    assert compare_with_log(rows((1, 2, 0)), log(ids=()), "run", START) is None
