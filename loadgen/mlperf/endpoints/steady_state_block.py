"""Builds the `steady_state` block of `point.yaml`, which a submission has for each point.

Pure. Rules §8.3 describe the block in prose. The names of its keys are those that the submission
checker reads (`submission_checker/models/file/steady_state.py` of
mlcommons/endpoints-submission-cli 1.5.3.0).
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

import numpy as np

from loadgen.mlperf.endpoints.steady_window import LevelShift, SteadyState, SteadyWindow
from loadgen.mlperf.endpoints.super_passes import NEVER_NS, QueryLog


class WindowFields(TypedDict):
    """The key `window` of the block. Super-passes are counted from 0, the start of the run.

    Attributes:
        super_pass_start: The first super-pass of the window.
        super_pass_end: Its last super-pass, which belongs to it.
        super_pass_size: The queries per super-pass.
        n_samples: The completed queries in the window.
        duration_s: The time between the first and the last issue in the window.
    """

    super_pass_start: int
    super_pass_end: int
    super_pass_size: int
    n_samples: int
    duration_s: float


class AnomalyFields(TypedDict):
    """The key `anomaly` of the block: a confirmed step after the window.

    Attributes:
        change_point_super_pass: The super-pass at which TPOT changes.
        delta_pct: The change of the mean TPOT in percent. A positive change is slower.
    """

    change_point_super_pass: int
    delta_pct: float


class SteadyStateBlock(TypedDict):
    """The block `steady_state` of `point.yaml`."""

    status: str
    verdict: str
    window: NotRequired[WindowFields]
    state: dict[str, str]
    anomaly: NotRequired[AnomalyFields]


def build_steady_state_block(state: SteadyState, log: QueryLog) -> SteadyStateBlock:
    """Return the `steady_state` block of `point.yaml`, which the submission checker reads.

    The block has the key `window` only if the run has a steady window, and `anomaly` only if the
    latency steps to another level after the window.

    Args:
        state: The steady window of the run, and the verdict on the run.
        log: The queries of the run.
    """
    block = SteadyStateBlock(
        status=state.status, verdict=state.verdict, state=dict[str, str](state.states)
    )
    if state.window is not None:
        block["window"] = _build_window_fields(state.window, state.super_pass_size, log)
    if state.verdict == "anomaly" and state.level_shift is not None:
        block["anomaly"] = _build_anomaly_fields(state.level_shift)
    return block


def _build_window_fields(window: SteadyWindow, size: int, log: QueryLog) -> WindowFields:
    """Return the range of super-passes (blocks of `size` queries) of a steady window."""
    completed_ns = log.completed_ns[window.first_query : window.end_query]
    return WindowFields(
        super_pass_start=window.first_super_pass,
        super_pass_end=window.end_super_pass - 1,
        super_pass_size=size,
        n_samples=int(np.count_nonzero(completed_ns != NEVER_NS)),
        duration_s=window.duration_s,
    )


def _build_anomaly_fields(shift: LevelShift) -> AnomalyFields:
    """Return the place and the size in percent of a step of TPOT to another level."""
    return AnomalyFields(
        change_point_super_pass=shift.super_pass, delta_pct=round(100 * shift.change, 3)
    )
