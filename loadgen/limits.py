"""The validity limits of a measurement. Pure.

A run that exceeds one of them is INVALID. The limits of one family of figures (`event_error_share`, `tpot_error_share`)
withhold that family instead, and the run may stay VALID.
"""

from __future__ import annotations

import msgspec

# The defaults. `Limits` of a workload changes them for a run, and the run stores the change.
SEND_LAG_SHARE = 0.05  # p99 send lag, as a share of TTFT p50
STAMP_ERROR_SHARE = 0.05  # p99 stamp error, as a share of TTFT p50
EVENT_ERROR_SHARE = 0.10  # p99 error of the gaps between events, as a share of ITL (inter-chunk) p50
TPOT_ERROR_SHARE = 0.05  # p99 error of TPOT, (first + last stamp error) / (n - n1), as a share of TPOT p50
CPU_SHARE = 0.90  # of one core, per worker, in any full second of the measured window
FAILURE_SHARE = 0.01  # failed + lost, as a share of all scheduled requests

UNFINISHED_SHARE = 0.01  # of the requests that count: above it, what the drain cut leaves every SLO term undecided


class ValidityLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The validity limits used for a run, as shares (0.05 is 5 %)."""

    send_lag_share: float = SEND_LAG_SHARE
    stamp_error_share: float = STAMP_ERROR_SHARE
    event_error_share: float = EVENT_ERROR_SHARE
    tpot_error_share: float = TPOT_ERROR_SHARE
    cpu_share: float = CPU_SHARE
    failure_share: float = FAILURE_SHARE
