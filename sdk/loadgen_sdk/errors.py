"""What can go wrong between a request and its answer, and whose fault it is.

    ClientError                     this side
    ├── TargetUnusable              the URL, the key or the model cannot work at all (found before any load)
    ├── WrongUse                    an argument that cannot mean anything: found when it is given, never during a call
    └── RequestFailed               one request failed; carries a Failure(kind, text, http_status)

Kinds (metrics.md): network `dns connect tls reset`; time `timeout_total timeout_stall`; the server's word `http_4xx
http_429 http_5xx error_event`; the body `truncated empty no_finish_reason malformed`. `http_4xx` carries its code in
`http_status`. The generator adds two kinds for slots that were never sent: `in_flight_cap`, `previous_turn_failed`.
"""

from __future__ import annotations

KINDS = (
    "",
    "dns",
    "connect",
    "tls",
    "timeout_total",
    "timeout_stall",
    "http_4xx",
    "http_429",
    "http_5xx",
    "reset",
    "truncated",
    "empty",
    "no_finish_reason",
    "malformed",
    "error_event",
    "in_flight_cap",
    "previous_turn_failed",
    "interrupted",
    "worker_died",
)
"""Index = the code in a record. Append only: stored runs hold these numbers."""


class ClientError(Exception):
    """Root of everything this client raises."""


class TargetUnusable(ClientError):
    """The endpoint cannot serve any request: unreachable, refusing the key, not knowing the model."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


class WrongUse(ClientError, ValueError):
    """The caller asked for what cannot be. Carries a hint: what to write instead."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}; {hint}" if hint else what)
        self.hint = hint


class RequestFailed(ClientError):
    """One request failed. `kind` says how, `http_status` the code if there was one."""

    def __init__(self, kind: str, text: str, http_status: int = 0) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.http_status = kind, text, http_status
