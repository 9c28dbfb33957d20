"""Classify the exceptions of client libraries such as openai by the kinds of failure. Pure.

Exceptions are recognised by the names of their classes, so that libraries with the same exceptions
(anthropic, LiteLLM) are covered and none of them is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..request import Failure
from .event_fields import error_text

FIRST_ERROR_STATUS = 300
"""A status of this or more has no usable result."""

_KINDS_BY_CAUSE = (
    ("dns", {"gaierror"}),
    ("connect", {"ConnectError", "ConnectTimeout"}),
    ("reset", {"ReadError", "WriteError", "CloseError", "ConnectionResetError"}),
)
"""Kind of failure -> the names of the exceptions of httpx and Python that cause it.

The first kind that applies counts: httpx wraps a name that cannot be resolved in a ConnectError.
"""


def classify_library_error(error: Exception) -> Failure:
    """Return the failure that an exception of a client library or of its HTTP library means.

    Classes are compared by name, so that no library has to be imported (see the module docstring).
    `APIError` is the base class of all exceptions of openai for a request that was sent:

    - with a `status_code`, it is an error response of the server,
    - an `APIConnectionError` wraps an exception of the HTTP library,
    - any other is an error event within a stream.
    """
    class_names = _class_names(error)
    is_api_error = "APIError" in class_names
    is_connection_error = "APIConnectionError" in class_names
    status = getattr(error, "status_code", 0)
    has_error_status = isinstance(status, int) and status >= FIRST_ERROR_STATUS
    if is_api_error and has_error_status:
        return _classify_status(error, status)
    if is_api_error and not is_connection_error:
        return Failure("error_event", _error_event_text(error))

    return _classify_causes(error)


def _classify_status(error: Exception, status: int) -> Failure:
    """Return the failure of an error response with this status, which is 300 or more.

    A redirect (3xx) counts as malformed, because the library has not followed it, and it has no
    result. The response is in the attribute `response` of the exception, with its body in
    `content`. An exception without them has no body.
    """
    response = getattr(error, "response", None)
    body = getattr(response, "content", b"")
    text = error_text(body) or f"HTTP {status} without a body"
    if status < 400:
        return Failure("malformed", text, status)
    if status == 429:
        return Failure("http_429", text, status)
    if status < 500:
        return Failure("http_4xx", text, status)

    return Failure("http_5xx", text, status)


def _error_event_text(error: Exception) -> str:
    """Return the text of an error that came as an event of a stream.

    It is the body of the exception if that is a text, or else the message of the exception.
    """
    body = getattr(error, "body", None)
    message = body if isinstance(body, str) else getattr(error, "message", "")
    return message or "an error event without a message"


def _classify_causes(error: Exception) -> Failure:
    """Return the failure of a connection, by the chain of exceptions that caused the error.

    A client library raises its exception from one of httpx, which raises it from one of Python or
    the operating system. The first exception in this chain that says what failed decides, in the
    order of the rules below: TLS errors come first, because httpx wraps them in a ConnectError.
    The text is that of the original cause, which is the most precise one, unless it is empty.
    """
    causes = list(_causes(error))
    original_cause = causes[-1]
    text = str(original_cause) or str(error) or type(error).__name__
    if any("SSLError" in _class_names(cause) for cause in causes):
        return Failure("tls", text)

    cause_names = {type(cause).__name__ for cause in causes}
    if "RemoteProtocolError" in cause_names:
        return Failure(_protocol_failure_kind(causes), text)

    for kind, exception_names in _KINDS_BY_CAUSE:
        if not cause_names.isdisjoint(exception_names):
            return Failure(kind, text)

    return Failure("malformed", f"{type(error).__name__}: {text}")


def _protocol_failure_kind(causes: list[BaseException]) -> str:
    """Return the kind of a RemoteProtocolError of httpx, which only its message tells."""
    messages = " ".join(str(cause) for cause in causes)
    if "without sending a response" in messages:
        return "reset"
    if "peer closed" in messages or "incomplete" in messages:
        return "truncated"
    return "malformed"


def _class_names(error: BaseException) -> set[str]:
    """Return the names of the class of an exception and of its base classes."""
    return {base.__name__ for base in type(error).__mro__}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
