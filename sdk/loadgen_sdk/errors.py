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
    # Arguments
    "missing_option",  # A required option, argument or file is missing.
    "conflict",  # Two options or settings exclude each other.
    "wrong_type",  # A value has the wrong type.
    "invalid_value",  # A value cannot be parsed.
    "unknown_name",  # A name is not known, for example of a metric, preset, stage or price.
    "out_of_range",  # A number, time or amount is too small or too large.
    "unsupported",  # A setting is valid, but not in this combination or for this target.
    "unreadable_file",  # A file cannot be read.
    "unwritable_file",  # A file or folder cannot be written.
    "missing_value",  # A key or name has no value.
    "missing_key",  # A file, row or mapping lacks a required key or column.
    "unknown_key",  # A key is not known; the hint names the known ones.
    "duplicate",  # A name, key, target or term occurs twice.
    "no_price",  # The price file has no price for what was used.
    # This host
    "not_installed",  # A Python package or program is not installed; `key` names it.
    "plugin_failed",  # A plug-in could not be loaded or raised an error; `key` names the package.
    "resource_limit",  # The host has too few open files, ports, CPUs, or too little space.
    "event_loop",  # The call needs a running event loop, or would block one.
    # The target
    "invalid_url",  # The URL is missing, malformed or has an unsupported scheme.
    "dns",  # The host name cannot be resolved.
    "connect",  # The server does not accept connections.
    "tls",  # The TLS handshake failed, or the certificate is not trusted.
    "proxy",  # The proxy refused the connection or does not respond.
    "timeout",  # The server did not respond in time.
    "reset",  # The connection was closed during the response.
    "wrong_protocol",  # The server does not speak HTTP/1.1.
    "invalid_answer",  # The response is not a valid response of this API.
    "unauthorized",  # The server requires an API key or refuses it (401, 403 or 407).
    "no_model",  # No model is specified, and the server does not list exactly one.
    "unknown_model",  # The server does not have the requested model.
    "http_3xx",  # The server responded with a redirect.
    "http_4xx",  # The server refused the request.
    "http_429",  # The rate limit of the server is exhausted.
    "http_5xx",  # The server failed or is not ready.
]
"""What is wrong, for programs. Where a word is also one of KINDS, it means the same."""


class ClientError(Exception):
    """Base class of the exceptions of this client."""


class TargetUnusable(ClientError):  # noqa: N818 - a public name
    """The endpoint cannot serve any request.

    Attributes:
        code: The reason, for programs.
        message: The reason, as a text.
        hint: What to do.
    """

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        """Keep the reason and the hint."""
        super().__init__(code, message, hint)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the reason."""
        return self.message


class WrongUse(ClientError, ValueError):  # noqa: N818 - a public name
    """An argument is invalid.

    Attributes:
        code: What is wrong with it, for programs.
        message: What is wrong with it, as a text.
        hint: What to write instead.
    """

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        """Keep the error and the hint."""
        super().__init__(code, message, hint)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the error with the hint."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


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

    def __init__(self, message: str, hint: str = "") -> None:
        """Keep the hint."""
        super().__init__(f"{message}; {hint}" if hint else message)
        self.hint = hint


class BudgetExceeded(ClientError):  # noqa: N818 - a public name
    """A call may cost more than is left of its Budget, and nothing was sent.

    Attributes:
        message: The error message.
        limit: The limit of the budget, in its currency.
        spent: What was spent before the call, in the same currency.
    """

    def __init__(self, message: str, limit: float, spent: float) -> None:
        """Keep the message and the amounts."""
        super().__init__(message, limit, spent)
        self.message = message
        self.limit = limit
        self.spent = spent

    def __str__(self) -> str:
        """Return the message."""
        return self.message


def refuse_unknown(names: Iterable[str], options_type: type, function_name: str) -> None:
    """Raise the TypeError of Python if a keyword argument is not a key of a TypedDict."""
    for name in names:
        if name not in options_type.__annotations__:
            raise TypeError(f"{function_name} got an unexpected keyword argument {name!r}")


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int) -> None:
    """Issue a warning for the application during one of its calls.

    `warnings.warn` raises the warning if the application has turned warnings into errors. It is
    then logged instead, because it must not fail the call.
    """
    import logging
    import warnings

    try:
        warnings.warn(text, category, stacklevel=stacklevel)
    except Warning:
        logging.getLogger("loadgen_sdk").warning(text)
