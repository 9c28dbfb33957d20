"""The limits within which a measurement counts as sound: beyond one of them a run is INVALID. Pure."""

from __future__ import annotations

import msgspec

# Limits of the verdict: beyond one of them a run is INVALID. `Limits` lets a run change them, and stores the change.
SEND_LAG_SHARE = 0.05  # p99 send lag, of TTFT p50
STAMP_ERROR_SHARE = 0.05  # p99 stamp error, of TTFT p50
CPU_SHARE = 0.90  # of one core, of a worker, over any full second of the measured window
FAILURE_SHARE = 0.01  # failed + lost, of all that were to be sent


class ValidityLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the verdict that a run was judged by, as shares (0.05 is 5 %)."""

    send_lag_share: float = SEND_LAG_SHARE
    stamp_error_share: float = STAMP_ERROR_SHARE
    cpu_share: float = CPU_SHARE
    failure_share: float = FAILURE_SHARE
