"""Every target of a run, probed before its load: what it is, and whether all of them serve the same. IO."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import Fetcher
from loadgen_sdk.probe.probe import ProbeResult, probe
from loadgen_sdk.transport.target import Target

from loadgen.errors import Fault, Faults, TargetError, UserError
from loadgen.execution.plan import Endpoint, Settings


async def find(settings: Settings) -> ProbeResult:
    """Probe the target. Raises TargetError with what to do about it."""
    assert settings.url is not None
    shown = Endpoint(url=settings.url).shown
    try:
        target = Target.parse(
            settings.url, api=settings.api, server=None if settings.server == "auto" else settings.server
        )
    except TargetUnusable as error:
        raise UserError(str(error), shown, error.hint) from None
    try:
        direct = Fetcher(target, settings.tls.context() if target.tls else None)
        return await probe(
            target,
            exchange=direct.exchange,
            connect=direct.connect,
            model=settings.model,
            server=settings.server,
            stream=settings.stream,
            api_key=settings.api_key,
            headers=settings.headers,
            extra_body=settings.extra_body,
        )
    except TargetUnusable as error:
        raise TargetError(str(error), shown, error.hint) from None


async def find_all(settings: Settings) -> tuple[ProbeResult, ...]:
    """Probe every endpoint. Raises the faults of all that cannot be used, or do not serve what the first one does."""
    endpoints = settings.endpoints
    found = await asyncio.gather(*(find(settings.of(one)) for one in endpoints), return_exceptions=True)
    faults: list[Fault] = []
    first: tuple[Endpoint, ProbeResult] | None = None
    for endpoint, one in zip(endpoints, found, strict=True):
        if isinstance(one, Fault):
            faults.append(one)
        elif isinstance(one, BaseException):
            raise one
        elif first is None:
            first = endpoint, one
        else:
            faults += _unlike(*first, endpoint, one)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise Faults(faults)
    return tuple(one for one in found if not isinstance(one, BaseException))


def _unlike(first: Endpoint, wanted: ProbeResult, endpoint: Endpoint, found: ProbeResult) -> Iterator[TargetError]:
    """What one target has behind it that the first one has not."""
    ours, theirs = _served(found), _served(wanted)
    if (ours, found.quirk) != (theirs, wanted.quirk):
        what = f"serves {ours} ({found.server}), but {first.shown} serves {theirs} ({wanted.server})"
        hint = "one run needs the same model and server behind every target; --model names one that all of them list"
        yield TargetError(what, endpoint.shown, hint)


def _served(found: ProbeResult) -> str:
    """The model that answers: by the server's own list, as some answer to any name."""
    return found.model if found.model in found.models or not found.models else ", ".join(found.models)
