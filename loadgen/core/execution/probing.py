"""Probes every target of a run before its load starts, and checks that all of them serve the same model. IO."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import HttpFetcher
from loadgen_sdk.probe.probe import ProbeResult, probe
from loadgen_sdk.probe.probe_client import SAMPLES, OutputLengths, ProbeOptions
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.request_body import add_timing_request

from loadgen.core import seeds
from loadgen.core.errors import CombinedError, LoadgenError, TargetError, UserError
from loadgen.core.execution.events import Emit, WaitingFor
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.workload.distributions import Fixed, Length, ListOfValues
from loadgen.core.workload.request_classes import requests_by_class
from loadgen.core.workload.request_kinds import Synthetic
from loadgen.core.workload.schema import Workload

LONG_S = 5.0  # of a probe: then the user hears what is waited for
Known = dict[Endpoint, ProbeResult]
"""What was found out about targets."""


async def ask(
    settings: Settings,
    target: Target,
    fetcher: HttpFetcher,
    samples: Sequence[tuple[str, int]] = SAMPLES,
    output_lengths: OutputLengths | None = None,
) -> ProbeResult:
    """Probe one target as a load will use it.

    Args:
        settings: The settings of the load.
        target: The target.
        fetcher: Sends the requests.
        samples: A short and a longer prompt with their content tokens.
        output_lengths: The output lengths of the load, or None if they are not known.

    Raises:
        TargetUnusable: Each request of the load would fail.
    """
    return await probe(
        target,
        send_request=fetcher.send_request,
        connect=fetcher.connect,
        options=ProbeOptions(
            model=settings.model,
            server=settings.server,
            stream=settings.stream,
            api_key=settings.api_key,
            headers=settings.headers,
            extra_body=settings.extra_body,
            server_timing=settings.server_timing,
            samples=samples,
            output_lengths=output_lengths,
        ),
    )


def planned_output_lengths(workload: Workload) -> OutputLengths | None:
    """Return the range of output lengths that a workload requests.

    Return None if only the data of its requests show their lengths, as with files and traces.
    """
    requests = requests_by_class(workload.requests).values()
    ranges = [_range_of(part.output_tokens) for part in requests if isinstance(part, Synthetic)]
    if len(ranges) < len(requests):
        return None
    longest = [lengths.longest for lengths in ranges if lengths.longest is not None]
    return OutputLengths(
        min(lengths.shortest for lengths in ranges),
        max(longest) if len(longest) == len(ranges) else None,
    )


def _range_of(length: Length) -> OutputLengths:
    """Return the range of a distribution of output lengths."""
    if isinstance(length, Fixed):
        return OutputLengths(length.value, length.value)
    if isinstance(length, ListOfValues):
        return OutputLengths(min(length.values), max(length.values))
    return OutputLengths(length.min or 1, length.max)


def client_options(settings: Settings, probed: ProbeResult) -> dict[str, Any]:
    """How a client asks this target: what the settings say, and what the probe found out."""
    headers, extra_body = settings.headers, settings.extra_body
    if settings.server_timing:
        headers, extra_body = add_timing_request(
            probed.server_profile, headers, extra_body, stream=settings.stream
        )
    return {
        "model": probed.model,
        "server_profile": probed.server_profile,
        "stream": settings.stream,
        "api_key": settings.api_key,
        "headers": headers,
        "extra_body": extra_body,
        "tls": settings.tls,
    }


PROBE_WORDS = (8, 72)
"""The lengths of the two prompts of a probe in words of the model's own tokenizer."""


def probe_samples(tokenizer_spec: str | None) -> Sequence[tuple[str, int]]:
    """Return the two prompts of a probe with their content tokens.

    With the model's own tokenizer they consist of its words, as the prompts of the load do, so that
    a server with another tokenizer shows how many tokens it makes of them. Without one they consist
    of a word that is one token in every vocabulary.

    Raises UserError if the tokenizer cannot be loaded.
    """
    tokenizer = tokens.load_tokenizer(tokenizer_spec)
    if not tokenizer.file_sha256:
        return SAMPLES
    return random_samples(tokenizer, PROBE_WORDS)


def random_samples(
    tokenizer: tokens.Tokenizer, lengths_in_words: Sequence[int]
) -> list[tuple[str, int]]:
    """Return random texts, which no cache can contain, with their tokens."""
    random = seeds.stream(seeds.fresh(), "probe")
    texts = [tokens.random_text(tokenizer, words, random) for words in lengths_in_words]
    return [(text, tokenizer.count(text)) for text in texts]


async def find(
    settings: Settings, timeout_s: float, output_lengths: OutputLengths | None = None
) -> ProbeResult:
    """Probe the target at `settings.url`. A response may take `timeout_s`.

    Raises:
        TargetError: The target cannot be used.
        UserError: The URL is not valid.
    """
    assert settings.url is not None
    shown = Endpoint(url=settings.url).shown
    server = None if settings.server == "auto" else settings.server
    try:
        target = Target.parse(settings.url, api=settings.api, server=server)
    except TargetUnusable as error:
        raise UserError(error.code, str(error), shown, error.hint) from None
    try:
        fetcher = HttpFetcher(target, settings.tls.context() if target.tls else None, timeout_s)
        found = await ask(
            settings, target, fetcher, probe_samples(settings.tokenizer), output_lengths
        )
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), shown, error.hint) from None
    return (
        found
        if fetcher.dns_ns is None
        else msgspec.structs.replace(found, dns_ms=fetcher.dns_ns / 1e6)
    )


async def find_all(
    settings: Settings, workload: Workload, known: Known, tell: Emit
) -> tuple[ProbeResult, ...]:
    """Probe every endpoint that is not known yet, and return the results in the order of the endpoints.

    Args:
        settings: The settings, which name the endpoints.
        workload: The load that follows. A response of the probe may take as long as one of the load.
        known: The results of endpoints that were probed before. New results are added to it.
        tell: Is called with an event when the probe takes long.

    Raises:
        LoadgenError: The errors of all endpoints that cannot be used, or that do not serve the same
            as the first endpoint.
    """
    timeout_s = workload.timeout_ns / 1e9
    output_lengths = planned_output_lengths(workload)
    endpoints = settings.endpoints
    asked = [endpoint for endpoint in endpoints if endpoint not in known]
    waits = WaitingFor(
        f"the first answer of {settings.shown}; it may take {timeout_s:g} s (--timeout)"
    )
    waiting = asyncio.get_running_loop().call_later(LONG_S, tell, waits)
    finding = (find(settings.of(endpoint), timeout_s, output_lengths) for endpoint in asked)
    answers = await asyncio.gather(*finding, return_exceptions=True)
    waiting.cancel()
    by_endpoint = known | dict(zip(asked, answers, strict=True))
    faults: list[LoadgenError] = []
    first: dict[
        tuple[str, str | None, str | None], tuple[Endpoint, ProbeResult]
    ] = {}  # by what they serve
    for endpoint in endpoints:
        result = by_endpoint[endpoint]
        if isinstance(result, LoadgenError):
            faults.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            alike = first.setdefault(
                (endpoint.serves, endpoint.api, endpoint.model), (endpoint, result)
            )
            faults += _differences(*alike, endpoint, result)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise CombinedError(faults)
    known.update(
        (endpoint, result)
        for endpoint, result in by_endpoint.items()
        if isinstance(result, ProbeResult)
    )
    return tuple(known[endpoint] for endpoint in endpoints)


def _differences(
    first: Endpoint, first_result: ProbeResult, endpoint: Endpoint, result: ProbeResult
) -> Iterator[TargetError]:
    """Faults of a target whose model or server type differs from the first target (`first`, `wanted`)."""
    ours, theirs = _served_model(result), _served_model(first_result)
    if (ours, result.server_profile) != (theirs, first_result.server_profile):
        what = f"serves {ours} ({result.server}), but {first.shown} serves {theirs} ({first_result.server})"
        hint = "one run needs the same model and server behind every target; --model names one that all of them list"
        yield TargetError("targets_differ", what, endpoint.shown, hint)


def _served_model(result: ProbeResult) -> str:
    """The model that answers. If the server does not list the requested name, the names that it lists: some servers
    accept any name.
    """
    return (
        result.model
        if result.model in result.models or not result.models
        else ", ".join(result.models)
    )
