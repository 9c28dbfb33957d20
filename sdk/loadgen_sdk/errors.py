"""The errors of the client, and the kinds of failure of a request.

    ClientError                 the base class of all errors of this client
    ├── TargetUnusable          URL, key or model do not work at all; found before any load
    ├── ThrottleTimeout         a call waited too long for its Throttle; also a TimeoutError
    ├── WrongUse                an invalid argument; raised when it is passed, never during a call
    ├── BudgetExceeded          a call would cost more than is left of its budget
    └── RequestFailed           one request failed; carries a Failure(kind, text, http_status)

The kinds of failure are described in metrics.md:

- network: `dns connect tls reset`
- time: `timeout_total timeout_stall`
- errors by the server: `http_4xx http_429 http_5xx error_event`, with the code in `http_status`
- the body: `truncated empty no_finish_reason malformed`
- this host: `client_resource`, if it has no file descriptors, ports, memory or network
- calls of an application: `over_budget`
- the load generator, for requests that were never sent: `in_flight_cap prefill_cap
  previous_turn_failed`, and `abandoned` if the simulated user did not wait for the response
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
"""The index of a kind is its code in a record. Append only, because stored runs hold these codes.
"""


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


class TargetUnusable(ClientError):  # noqa: N818 - a public name
    """The endpoint cannot serve any request.

    Attributes:
        code: The reason, for programs.
        what: The reason, as a text.
        hint: What to do.
    """

    def __init__(self, code: Code, what: str, hint: str = "") -> None:
        """Keep the reason and the hint."""
        super().__init__(code, what, hint)
        self.code = code
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        """Return the reason."""
        return self.what


class WrongUse(ClientError, ValueError):  # noqa: N818 - a public name
    """An argument is invalid.

    Attributes:
        code: What is wrong with it, for programs.
        what: What is wrong with it, as a text.
        hint: What to write instead.
    """

    def __init__(self, code: Code, what: str, hint: str = "") -> None:
        """Keep the error and the hint."""
        super().__init__(code, what, hint)
        self.code = code
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        """Return the error with the hint."""
        return f"{self.what}; {self.hint}" if self.hint else self.what


class RequestFailed(ClientError):  # noqa: N818 - a public name
    """One request failed.

    Attributes:
        kind: The kind of failure, one of KINDS.
        text: The error message.
        http_status: The HTTP status, or 0 if there was no response.
    """

    def __init__(self, kind: str, text: str, http_status: int = 0) -> None:
        """Keep the failure."""
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.http_status = http_status


class ThrottleTimeout(ClientError, TimeoutError):  # noqa: N818 - a public name
    """A call got no permit of its Throttle in time, and nothing was sent.

    Through an instrumented client it is also an `openai.APITimeoutError`.

    Attributes:
        hint: What to change.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        """Keep the hint."""
        super().__init__(f"{what}; {hint}" if hint else what)
        self.hint = hint


class BudgetExceeded(ClientError):  # noqa: N818 - a public name
    """A call may cost more than is left of its Budget, and nothing was sent.

    Attributes:
        what: The error message.
        limit: The limit of the budget, in its currency.
        spent: What was spent before the call, in the same currency.
    """

    def __init__(self, what: str, limit: float, spent: float) -> None:
        """Keep the message and the amounts."""
        super().__init__(what, limit, spent)
        self.what = what
        self.limit = limit
        self.spent = spent

    def __str__(self) -> str:
        """Return the message."""
        return self.what


def refuse_unknown(names: Iterable[str], options_type: type, function_name: str) -> None:
    """Raise the TypeError of Python if a keyword argument is not a key of a TypedDict."""
    for name in names:
        if name not in options_type.__annotations__:
            raise TypeError(f"{function_name} got an unexpected keyword argument {name!r}")


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int) -> None:
    """Warn the application during one of its calls.

    If the filters of the application turn the warning into an error, it is logged and not raised.
    """
    import logging
    import warnings

    try:
        warnings.warn(text, category, stacklevel=stacklevel)
    except Warning:
        logging.getLogger("loadgen_sdk").warning(text)
