"""The errors of the client, and the kinds of failure of a request.

    ClientError                     base of all errors of this client
    ├── TargetUnusable              URL, key or model do not work at all (found before any load)
    ├── ThrottleTimeout             a call waited longer for its Throttle than it may (also a TimeoutError)
    ├── WrongUse                    an invalid argument: raised when it is given, never during a call
    └── RequestFailed               one request failed; carries a Failure(kind, text, http_status)

Kinds (metrics.md): network `dns connect tls reset`; time `timeout_total timeout_stall`; errors reported by the server
`http_4xx http_429 http_5xx error_event`; the body `truncated empty no_finish_reason malformed`. For `http_4xx` the
code is in `http_status`. The generator adds two kinds for slots that were never sent, `in_flight_cap` and
`previous_turn_failed`, and `abandoned` for what a user of the load did not wait for.
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
    "unfinished",
    "abandoned",
)
"""The index of a kind is its code in a record. Append only, because stored runs hold these codes."""


class ClientError(Exception):
    """Base class of the exceptions of this client."""


class TargetUnusable(ClientError):
    """The endpoint cannot serve any request: unreachable, refusing the key, not knowing the model."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


class WrongUse(ClientError, ValueError):
    """An argument is invalid. `hint`: what to write instead."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}; {hint}" if hint else what)
        self.hint = hint


class RequestFailed(ClientError):
    """One request failed. `kind`: one of KINDS; `http_status`: the status code, 0 if there was none."""

    def __init__(self, kind: str, text: str, http_status: int = 0) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.http_status = kind, text, http_status


class ThrottleTimeout(ClientError, TimeoutError):
    """A call got no permit of its Throttle in time: nothing was sent. `hint`: what to change.

    Through an instrumented client it is also an `openai.APITimeoutError`.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}; {hint}" if hint else what)
        self.hint = hint
