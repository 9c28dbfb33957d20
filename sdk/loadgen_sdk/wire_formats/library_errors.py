"""What the exceptions of the packages of providers say, in the words of KINDS. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .event_fields import error_text


def classify_library_error(error: Exception) -> tuple[str, str, int]:
    """(kind, text, HTTP status or 0) of an exception raised by the package or by its HTTP library.

    By names, so that it also knows those of packages that have the same exceptions (anthropic, LiteLLM).
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status_code", 0)
    if "APIError" in kinds and isinstance(status, int) and status >= 300:
        kind = next((kind for least, kind in _KINDS_BY_STATUS if status >= least), "malformed")
        body = getattr(getattr(error, "response", None), "content", b"")
        return (
            "http_429" if status == 429 else kind,
            error_text(body) or f"HTTP {status} without a body",
            status,
        )
    if "APIError" in kinds and "APIConnectionError" not in kinds:
        body, message = getattr(error, "body", None), getattr(error, "message", "")
        message = body if isinstance(body, str) else message
        return "error_event", message or "an error event without a text", 0
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    text = str(causes[-1]) or str(error) or type(error).__name__
    if any(
        kind.__name__ == "SSLError" for cause in causes for kind in type(cause).__mro__
    ):  # of the module ssl
        return "tls", text, 0
    if "RemoteProtocolError" in names:
        messages = " ".join(map(str, causes))
        cut = "peer closed" in messages or "incomplete" in messages
        return (
            "reset"
            if "without sending a response" in messages
            else "truncated"
            if cut
            else "malformed",
            text,
            0,
        )
    for kind, names_of_kind in _KINDS_BY_CAUSE:
        if names & names_of_kind:
            return kind, text, 0
    return "malformed", f"{type(error).__name__}: {text}", 0


_KINDS_BY_STATUS = ((500, "http_5xx"), (400, "http_4xx"))
_KINDS_BY_CAUSE = (
    ("dns", {"gaierror"}),
    ("connect", {"ConnectError", "ConnectTimeout"}),
    ("reset", {"ReadError", "WriteError", "CloseError", "ConnectionResetError"}),
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
