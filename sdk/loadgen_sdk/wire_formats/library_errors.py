"""Classify the exceptions of client libraries such as openai by the kinds of failure. Pure.

Exceptions are recognised by the names of their classes, so that libraries with the same exceptions
(anthropic, LiteLLM) are covered and none of them is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..request import Failure
from .event_fields import error_text

_KINDS_BY_CAUSE = (
    ("dns", {"gaierror"}),
    ("connect", {"ConnectError", "ConnectTimeout"}),
    ("reset", {"ReadError", "WriteError", "CloseError", "ConnectionResetError"}),
)
"""Kind of failure -> the names of the exceptions of httpx and Python that cause it."""


def classify_library_error(error: Exception) -> Failure:
    """Return the failure that an exception of a client library or of its HTTP library means.

    `APIError` is the base class of the exceptions of openai. One with a status is an error
    response, an `APIConnectionError` wraps an exception of the HTTP library, and any other is an
    error event within a stream.
    """
    class_names = _class_names(error)
    status = getattr(error, "status_code", 0)
    if "APIError" in class_names:
        if isinstance(status, int) and status >= 300:
            return _classify_status(error, status)
        if "APIConnectionError" not in class_names:
            return Failure("error_event", _error_event_text(error))
    return _classify_causes(error)


def _classify_status(error: Exception, status: int) -> Failure:
    """Return the failure of a response with an error status.

    A redirect (3xx) that was not followed has no result either, and counts as malformed.
    """
    body = getattr(getattr(error, "response", None), "content", b"")
    text = error_text(body) or f"HTTP {status} without a body"
    if status == 429:
        return Failure("http_429", text, status)
    if status >= 500:
        return Failure("http_5xx", text, status)
    return Failure("http_4xx" if status >= 400 else "malformed", text, status)


def _error_event_text(error: Exception) -> str:
    """Return the text of an error that came as an event of a stream.

    It is the body of the exception if that is a text, or else the message of the exception.
    """
    body = getattr(error, "body", None)
    message = body if isinstance(body, str) else getattr(error, "message", "")
    return message or "an error event without a message"


def _classify_causes(error: Exception) -> Failure:
    """Return the failure of a connection, by the exceptions that caused the error.

    Libraries raise their own exception from that of httpx, and httpx from that of Python. The last
    one in this chain has the most precise text, unless that is empty.
    """
    causes = list(_causes(error))
    root_cause = causes[-1]
    text = str(root_cause) or str(error) or type(error).__name__
    if any("SSLError" in _class_names(cause) for cause in causes):
        return Failure("tls", text)
    cause_names = {type(cause).__name__ for cause in causes}
    if "RemoteProtocolError" in cause_names:
        return Failure(_protocol_failure_kind(causes), text)
    for kind, names in _KINDS_BY_CAUSE:
        if cause_names & names:
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
