"""Empties the prefix caches of the servers before a load, for `reset_cache`.

IO. It sends the request that each kind of server has for this purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import HttpFetcher
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.wire_formats.event_fields import error_text

from loadgen.core.errors import CombinedError, LoadgenError, TargetError, UserError
from loadgen.core.execution.plan import Settings

TIMEOUT_S = 60.0
"""Longest wait for a response. A server may first write its cache to another tier of memory."""


async def reset_caches(settings: Settings, probes: Sequence[ProbeResult]) -> None:
    """Empty the cache of every target.

    Raises UserError for a server that has no request for it, TargetError for a server that refuses
    it, and CombinedError if there are several errors.
    """
    outcomes = await asyncio.gather(
        *(_reset_cache(settings, probe) for probe in probes), return_exceptions=True
    )
    errors: list[LoadgenError] = []
    for outcome in outcomes:
        if isinstance(outcome, LoadgenError):
            errors.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome

    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CombinedError(errors)


async def _reset_cache(settings: Settings, probe: ProbeResult) -> None:
    """Empty the prefix cache of one target.

    Raises:
        UserError: This kind of server has no API to empty its cache.
        TargetError: The server cannot be reached or does not empty its cache.
    """
    has_reset_api = probe.server_profile.cache_reset_path != ""
    if not has_reset_api:
        raise _missing_api_error(probe)
    response = await _request_cache_reset(settings, probe)
    refusal = _describe_refusal(response)
    if refusal:
        raise _refused_reset_error(probe, refusal)


def _missing_api_error(probe: ProbeResult) -> UserError:
    """Return the error for a kind of server that has no API to empty its prefix cache."""
    return UserError(
        "unsupported",
        message=f"{probe.server_profile.title} has no API to empty its prefix cache",
        where=probe.target.redacted,
        hint=(
            "leave reset_cache out, and use --salt fresh for prompts that no cache "
            "holds, or restart the server"
        ),
    )


def _refused_reset_error(probe: ProbeResult, refusal: str) -> TargetError:
    """Return the error for a server that did not empty its cache.

    `refusal` says why. It may repeat the API key, which is removed.
    """
    server_profile = probe.server_profile
    return TargetError(
        "invalid_answer",
        message=(
            f"{server_profile.title} did not empty its prefix cache: POST "
            f"{server_profile.cache_reset_path} {probe.target.redact(refusal)}"
        ),
        where=probe.target.redacted,
        hint=server_profile.cache_reset_hint,
    )


async def _request_cache_reset(settings: Settings, probe: ProbeResult) -> HttpResponse:
    """Send the request that empties the cache of a target. Raises TargetError without a response.

    The request has no body, which some servers accept only with a Content-Length of 0.
    """
    target = probe.target
    tls_context = settings.tls.context() if target.tls else None
    fetcher = HttpFetcher(target, tls_context, TIMEOUT_S)
    headers = (*target.auth_headers(settings.api_key), *settings.headers, ("Content-Length", "0"))

    path = target.server_path(probe.server_profile.cache_reset_path)
    try:
        return await fetcher.send_request("POST", path, headers, b"")
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), target.redacted, error.hint) from None


def _describe_refusal(response: HttpResponse) -> str:
    """Return why a server has not emptied its cache, or "" if it has."""
    if not 200 <= response.status < 300:
        return f"returned {response.status}: {error_text(response.body) or 'no text'}"

    try:
        body = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        return ""  # Some servers return a text, others nothing.

    if isinstance(body, dict) and body.get("success") is False:
        return "returned success: false"

    return ""
