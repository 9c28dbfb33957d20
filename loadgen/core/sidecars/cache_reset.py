"""Empties the prefix caches of the servers before a load, by the request that their kind has for it. IO."""

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

SECONDS = 60.0  # a server may first write what it holds to another tier


async def empty(settings: Settings, found: Sequence[ProbeResult]) -> None:
    """Empty the cache of every target. Raises the faults of those that have no such request, or refuse it."""
    asked = await asyncio.gather(
        *(_empty(settings, result) for result in found), return_exceptions=True
    )
    faults = [fault for fault in asked if isinstance(fault, LoadgenError)]
    for other in asked:
        if isinstance(other, BaseException) and not isinstance(other, LoadgenError):
            raise other
    if faults:
        raise faults[0] if len(faults) == 1 else CombinedError(faults)


async def _empty(settings: Settings, found: ProbeResult) -> None:
    target, server_profile = found.target, found.server_profile
    if not server_profile.cache_reset_path:
        hint = "leave reset_cache out; --salt fresh sends prompts that no cache knows, and a restart empties it"
        raise UserError(
            "unsupported",
            f"{server_profile.title} has no request that empties its prefix cache",
            target.redacted,
            hint,
        )
    fetcher = HttpFetcher(target, settings.tls.context() if target.tls else None, SECONDS)
    headers = (*target.auth_headers(settings.api_key), *settings.headers, ("Content-Length", "0"))
    try:
        answer = await fetcher.send_request(
            "POST", target.server_path(server_profile.cache_reset_path), headers, b""
        )
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), target.redacted, error.hint) from None
    if problem := _refused(answer):
        what = f"{server_profile.title} does not empty its cache: POST {server_profile.cache_reset_path} {target.redact(problem)}"
        raise TargetError("invalid_answer", what, target.redacted, server_profile.cache_reset_hint)


def _refused(answer: HttpResponse) -> str:
    """Why the cache is not empty; "" if it is."""
    if not 200 <= answer.status < 300:
        return f"answers {answer.status}: {error_text(answer.body) or 'no text'}"
    try:
        said = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return ""  # a text, or nothing
    return "says that it did not" if isinstance(said, dict) and said.get("success") is False else ""
