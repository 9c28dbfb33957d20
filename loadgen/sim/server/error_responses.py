"""Error responses of the simulated server, in the form of each API flavor."""

from __future__ import annotations

import msgspec

from loadgen.sim.server.http_messages import Headers
from loadgen.sim.server.wire_format import ApiFlavor, format_sse_event

_TRTLLM_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}
_OPENAI_ERROR_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_ROUTE_ERRORS = {404: "Not Found", 405: "Method Not Allowed"}


class RefusalError(Exception):
    """Raised to answer a request with an error: status, JSON body and additional headers."""

    def __init__(self, status: int, body: bytes, headers: Headers = ()) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body
        self.headers = headers


def malformed_body(flavor: ApiFlavor, text: str) -> RefusalError:
    """Return the refusal (400) of a body that is not JSON or does not match the schema.

    trtllm-serve answers with a bare string in this case.
    """
    if flavor == "trtllm":
        return RefusalError(400, msgspec.json.encode({"error": text}))
    return refusal(flavor, text)


def refusal(
    flavor: ApiFlavor, text: str, param: str = "", status: int = 400, code: str = ""
) -> RefusalError:
    """Return the refusal of a request that the server does not accept.

    `param` (the name of the field) and `code` exist in OpenAI's API only.
    """
    return RefusalError(status, format_error(flavor, text, status, param, code))


def unknown_route(flavor: ApiFlavor, status: int, allowed_method: str = "") -> RefusalError:
    """Return the refusal of an unknown path (404) or of a wrong method (405).

    In trtllm-serve the web framework writes this response.
    """
    text = _ROUTE_ERRORS[status]
    headers = (("allow", allowed_method),) if allowed_method else ()
    if flavor == "trtllm":
        return RefusalError(status, msgspec.json.encode({"detail": text}), headers)
    return RefusalError(status, format_error(flavor, text, status), headers)


def format_error(
    flavor: ApiFlavor, text: str, status: int, param: str = "", code: str = ""
) -> bytes:
    """Return the JSON body of an error response.

    trtllm-serve writes the fields at the top level, OpenAI's API inside `error`.
    """
    if flavor == "trtllm":
        error_type = _TRTLLM_ERROR_TYPES.get(status, "InternalServerError")
        return msgspec.json.encode(
            {"object": "error", "message": text, "type": error_type, "param": None, "code": status}
        )

    error = {
        "message": text,
        "type": _openai_error_type(status),
        "param": param or None,
        "code": code or _OPENAI_ERROR_CODES.get(status),
    }
    return msgspec.json.encode({"error": error})


def _openai_error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def format_error_event(text: str) -> bytes:
    """Return an error inside a stream, as most servers write it."""
    error = {"message": text, "type": "server_error", "code": None, "param": None}
    return format_sse_event({"error": error})
