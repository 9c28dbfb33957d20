"""Explain the error responses of a server to the user: what they mean and what to do. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import Code, TargetUnusable
from ..transport.exchange import http_failure
from ..transport.target import Target
from ..wire_formats.server_profiles import NON_GENERATIVE_APIS
from .http_types import HttpResponse, TransientFailure
from .model_list import ModelList

_KEY_HINT = "check the API key and its permissions"
_FIELD_HINT = (
    "if the message names a field, remove it with --extra-body '{\"FIELD\": null}', "
    "or set the server software with --server"
)
_TOO_LONG_HINT = (
    "the request exceeds the context length; use shorter prompts and outputs, or a "
    "server with a longer context"
)
_PROXY_HINT = "check that the server is running, because only the proxy before it responds"
_HINTS = {
    400: _FIELD_HINT,
    401: _KEY_HINT,
    403: _KEY_HINT,
    407: "a proxy before the server requires a login",
    413: _FIELD_HINT,
    422: _FIELD_HINT,
    429: (
        "its rate limit refuses even the preflight (two requests); use another key, "
        "or raise the limit"
    ),
    502: _PROXY_HINT,
    503: "it may still be loading its model; try again when it is ready",
    504: _PROXY_HINT,
}
"""HTTP status -> what the user can do."""

_TRANSIENT_STATUSES = (
    408,  # Request Timeout
    409,  # Conflict
    425,  # Too Early
    429,  # Too Many Requests
)

_DEFAULT_RETRY_S = 1.0  # A rate limit may be as low as one or two requests per second.
_MAX_RETRY_S = 5.0  # A user waits for the probe, so longer waits are cut short.

_PLAIN_HTTP_AT_TLS_PORT = re.compile(
    r"plain http request .* https port|http request to an https server", re.IGNORECASE
)
"""What nginx, Go, Apache and Envoy respond to plain HTTP at a port that expects TLS."""

_PROMPT_TOO_LONG = re.compile(
    r"context.{0,3}(length|size|window)|max_?(model|seq|num|input)_?(len|tokens)"
    r"|(too|is) long(er)?\b|exceeds? the (maximum|available|model)",
    re.IGNORECASE,
)
"""What vLLM, SGLang, TensorRT-LLM, llama.cpp and Dynamo say about a prompt above their context."""

_UNKNOWN_MODEL = re.compile(r"(?i)\b(?:model|deployment)\b.{0,80}\b(?:not|unknown|exist)")

_OUTPUT_LIMIT_FIELD = re.compile(r"max_\w*tokens")
_MINIMUM = re.compile(
    r"(?:>=|≥|at least|minimum (?:value )?(?:of |is )?|greater than or equal to)\s*(\d{1,4})\b",
    re.IGNORECASE,
)
_BELOW_MINIMUM = re.compile(r"below (?:the )?minimum|too (?:small|low)", re.IGNORECASE)

USUAL_MINIMUM_TOKENS = 16
"""The lowest output limit that OpenAI's Responses API accepts. No API has a higher one."""


class Explanation(NamedTuple):
    """What a refusal means: a code for programs, a message, and a hint for the user."""

    code: Code
    message: str
    hint: str


@dataclass(frozen=True)
class RefusalExplainer:
    """Explains the error responses of one target.

    Attributes:
        target: The target.
        has_key: The user has configured a key or a password.
        secrets: Texts that must not be shown.
    """

    target: Target
    has_key: bool
    secrets: tuple[str | None, ...]

    def create_error(
        self, response: HttpResponse, model: str = "", models: ModelList | None = None
    ) -> TargetUnusable:
        """Return the exception for an error response.

        It is a TransientFailure if another request may succeed.

        Args:
            response: The error response.
            model: The model that was requested, or "" for a page that needs no model.
            models: The models that the server lists, or None before the list was read.
        """
        explanation = self._explain(response, model, models)
        if not is_transient(response.status):
            return TargetUnusable(*explanation)
        failure = TransientFailure(*explanation)
        failure.retry_after_s = retry_after_s(response)
        return failure

    def redact(self, text: str) -> str:
        """Return a text of the server without secrets and control characters."""
        return self.target.redact(text, *self.secrets).strip()

    def expects_tls(self, response: HttpResponse) -> bool:
        """Return True if the server refuses plain HTTP because its port expects TLS."""
        if self.target.tls or response.status != 400:
            return False
        text = response.body.decode(errors="replace")
        return _PLAIN_HTTP_AT_TLS_PORT.search(text) is not None

    def _explain(self, response: HttpResponse, model: str, models: ModelList | None) -> Explanation:
        """Return what an error response means. The most specific explanation comes first.

        A refused model is recognised by the text, because servers refuse it with 400, 404 or 422.
        """
        status = response.status
        text = self.redact(refusal_text(response)) or "no text"
        if model and is_about_model(response, text, model):
            return self._explain_unknown_model(text, model, models)
        if status in (404, 405):
            return self._explain_missing_path(status, text)
        if 300 <= status < 400:
            return self._explain_redirect(response)

        message = f"{self.target.redacted} answers {status}: {text}"
        if self.expects_tls(response):
            return Explanation("wrong_protocol", message, self.target.tls_hint)

        return Explanation(_code_of_status(status), message, self._hint(status, text))

    def _explain_unknown_model(
        self, text: str, model: str, models: ModelList | None
    ) -> Explanation:
        """Explain that the server does not serve the model, and name those that it lists.

        If the list has exactly the refused model, a gateway may have lost the server behind it, or
        the model may not support the API.
        """
        if models is None or not models.ids:
            hint = "choose a model that it serves with --model"
        elif models.ids == (model,):
            hint = "it lists only this model; check the server's log, or try another --api"
        else:
            hint = f"choose one with --model: {models}"

        message = f"{self.target.redacted} does not serve the model {model!r}: {text}"
        return Explanation("unknown_model", message, hint)

    def _explain_missing_path(self, status: int, text: str) -> Explanation:
        """Explain that the server has no such path.

        The path is that of the API. The URL may be wrong, or the server may not have this API.

        Args:
            status: The HTTP status, 404 or 405.
            text: The error message of the server.
        """
        target = self.target
        message = f"{target.redacted} returns HTTP {status} for {target.path}: {text}"

        is_embeddings_or_rerank = target.api in NON_GENERATIVE_APIS
        if is_embeddings_or_rerank:
            hint = (
                "check the path of the URL, and whether this server supports the "
                f"{target.api} API (for all requests, or for a step)"
            )
        else:
            # Many servers with one API for text generation have the other one, too.
            other_api = "completions" if target.api == "chat" else "chat"
            hint = f"check the path of the URL, or try --api {other_api}"

        return Explanation("http_4xx", message, hint)

    def _explain_redirect(self, response: HttpResponse) -> Explanation:
        """Explain a redirect, which neither the probe nor a load follows.

        The destination is shown without its query, which may have secrets.
        """
        location_without_query = response.headers.get("location", "").partition("?")[0]
        location = self.redact(location_without_query)
        destination = f" to {location}" if location else ""
        message = f"{self.target.redacted} returns HTTP {response.status}, a redirect{destination}"
        return Explanation("http_3xx", message, "use the URL of the redirect")

    def _hint(self, status: int, text: str) -> str:
        """Return what the user can do about an error response with this status and message."""
        if status in (401, 403) and not self.has_key:
            return "the server requires an API key: set OPENAI_API_KEY"
        if status in (400, 413, 422) and _PROMPT_TOO_LONG.search(text):
            return _TOO_LONG_HINT
        return _HINTS.get(status, "see the server's log")


def refusal_text(response: HttpResponse) -> str:
    """Return the error message of a response."""
    return http_failure(response.status, response.headers, response.body).text


def is_about_model(response: HttpResponse, text: str, model: str) -> bool:
    """Return True if the server refuses a request because it does not serve the model.

    Such a refusal has the name of the model in quotes, or a sentence such as "The model does not
    exist". `text` is its error message.
    """
    if response.status not in (400, 404, 422):
        return False
    quotes = "'\"`"
    if any(f"{quote}{model}{quote}" in text for quote in quotes):
        return True
    return _UNKNOWN_MODEL.search(text) is not None


def minimum_output_tokens(response: HttpResponse) -> int | None:
    """Return the lowest output limit that the server accepts, according to its refusal.

    Return USUAL_MINIMUM_TOKENS if the refusal says that the limit is too low but states no number,
    and None if it is about something else. A refusal of a prompt that is too long may name the
    output limit too, because both share the context. A higher limit would not help there.
    """
    text = refusal_text(response)
    if response.status not in (400, 422) or not _OUTPUT_LIMIT_FIELD.search(text):
        return None
    if is_prompt_too_long(response):
        return None

    stated_minimum = _MINIMUM.search(text)
    if stated_minimum:
        return int(stated_minimum[1])
    if _BELOW_MINIMUM.search(text):
        return USUAL_MINIMUM_TOKENS

    return None


def is_prompt_too_long(response: HttpResponse) -> bool:
    """Return True if the server refuses a request because its context is too short for it."""
    return _PROMPT_TOO_LONG.search(refusal_text(response)) is not None


def is_transient(status: int) -> bool:
    """Return True if another request may succeed after one with this status."""
    return status in _TRANSIENT_STATUSES or status >= 500


def retry_after_s(response: HttpResponse) -> float:
    """Return how long to wait before the next attempt, by the server's Retry-After header.

    Only a rate limit (429) makes the probe wait. Without a number in the header, which may also be
    a date, the wait is _DEFAULT_RETRY_S.
    """
    if response.status != 429:
        return 0.0
    header = response.headers.get("retry-after", "")
    if not re.fullmatch(r"\d+(\.\d+)?", header):
        return _DEFAULT_RETRY_S
    return min(float(header), _MAX_RETRY_S)


def _code_of_status(status: int) -> Code:
    """Return the code that an error message has, for programs that read it, by an HTTP status.

    It is used for responses that have no more specific code. A status below 300 is an error, too,
    if the body is not that of the API.
    """
    if status in (401, 403, 407):
        return "unauthorized"
    if status == 429:
        return "http_429"
    if status >= 500:
        return "http_5xx"
    if status >= 400:
        return "http_4xx"

    return "http_3xx" if status >= 300 else "invalid_answer"
