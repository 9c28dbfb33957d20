"""The errors of the client, and the kinds of failure of a request.

    ClientError                     base of all errors of this client
    ├── TargetUnusable              URL, key or model do not work at all (found before any load)
    ├── ThrottleTimeout             a call waited longer for its Throttle than it may (also a TimeoutError)
    ├── WrongUse                    an invalid argument: raised when it is given, never during a call
    ├── BudgetExceeded              a call would cost more than is left of its budget
    └── RequestFailed               one request failed; carries a Failure(kind, text, http_status)

Kinds (metrics.md): network `dns connect tls reset`; time `timeout_total timeout_stall`; errors reported by the server
`http_4xx http_429 http_5xx error_event`; the body `truncated empty no_finish_reason malformed`. For `http_4xx` the
code is in `http_status`. The generator adds kinds for slots that were never sent, `in_flight_cap`, `prefill_cap` and
`previous_turn_failed`, and `abandoned` for what a user of the load did not wait for.
`over_budget` is of a call of an application alone. `client_resource` says that this host could not
open a connection: it is out of file descriptors, ports or memory, or has no network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

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
    "over_budget",
    "prefill_cap",
    "client_resource",
)
"""The index of a kind is its code in a record. Append only, because stored runs hold these codes."""


Code = Literal[
    # arguments
    "missing_option",  # a flag, argument or file that is needed is not given
    "conflict",  # two things given exclude each other
    "wrong_type",  # a value of the wrong type
    "invalid_value",  # a value that cannot be read as what belongs there
    "unknown_name",  # not one of the known words: a metric, preset, stage, price
    "out_of_range",  # a number, time or amount beyond its limits
    "unsupported",  # right by itself, but not together, or not by this target
    "unreadable_file",  # a file cannot be read
    "unwritable_file",  # a file or folder cannot be written
    "missing_value",  # a key or name without what belongs behind it
    "missing_key",  # a file, row or mapping lacks a key or column
    "unknown_key",  # a key that does not belong there
    "duplicate",  # a name, key, target or term given twice
    "no_price",  # no price for what was used
    # this host
    "not_installed",  # a package or program is missing (`key`)
    "plugin_failed",  # another package's row could not be loaded, or raised; `key` is the package
    "wrong_platform",  # not on this operating system or Python
    "resource_limit",  # too few open files, ports, processors, or too little room
    "event_loop",  # the call needs an event loop that is not there, or would block a running one
    # the target
    "invalid_url",  # no URL, or of a kind that is not spoken
    "dns",  # the host's name cannot be resolved
    "connect",  # nothing accepts a connection there
    "tls",  # the handshake failed, or the certificate is not trusted
    "proxy",  # the proxy refused, or does not answer
    "timeout",  # no answer in time
    "reset",  # the connection broke within the answer
    "wrong_protocol",  # it does not speak HTTP/1.1
    "invalid_answer",  # not what this API answers
    "unauthorized",  # it refuses the key, or wants one: 401, 403, 407
    "no_model",  # no model is named, by you or the server
    "unknown_model",  # the server does not have it
    "http_3xx",  # a redirect
    "http_4xx",  # it refuses the request
    "http_429",  # its rate limit is used up
    "http_5xx",  # it failed, or is not ready
]
"""What is wrong, for programs. Where a word is also one of KINDS, it means the same."""


class ClientError(Exception):
    """Base class of the exceptions of this client."""


class TargetUnusable(ClientError):
    """The endpoint cannot serve any request. `code`: why, for programs; `hint`: what to do."""

    def __init__(self, code: Code, what: str, hint: str = "") -> None:
        super().__init__(code, what, hint)
        self.code, self.what, self.hint = code, what, hint

    def __str__(self) -> str:
        return self.what


class WrongUse(ClientError, ValueError):
    """An argument is invalid. `code`: what is wrong with it, for programs; `hint`: what to write instead."""

    def __init__(self, code: Code, what: str, hint: str = "") -> None:
        super().__init__(code, what, hint)
        self.code, self.what, self.hint = code, what, hint

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}" if self.hint else self.what


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


class BudgetExceeded(ClientError):
    """A call may cost more than is left of its Budget: nothing was sent. `limit` and `spent`: in its currency."""

    def __init__(self, what: str, limit: float, spent: float) -> None:
        super().__init__(what, limit, spent)
        self.what, self.limit, self.spent = what, limit, spent

    def __str__(self) -> str:
        return self.what


def refuse_unknown(given: Iterable[str], known: type, what: str) -> None:
    """Raises TypeError for a keyword that `known`, a TypedDict, does not have: as Python does for parameters."""
    names = known.__annotations__
    if (unknown := next((name for name in given if name not in names), None)) is not None:
        raise TypeError(f"{what} got an unexpected keyword argument {unknown!r}")


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int) -> None:
    """`warnings.warn` inside a call of the application: where filters make an error of it, it is logged, not raised."""
    import logging
    import warnings

    try:
        warnings.warn(text, category, stacklevel=stacklevel)
    except Warning:
        logging.getLogger("loadgen_sdk").warning(text)
