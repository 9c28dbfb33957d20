"""Probe the targets of a run before its load starts, and check that all serve the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import HttpFetcher
from loadgen_sdk.probe.probe import ProbeResult, probe
from loadgen_sdk.probe.probe_client import SAMPLES, OutputLengths, ProbeOptions
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.request_body import with_timing_request

from loadgen.core import seeds
from loadgen.core.errors import CombinedError, LoadgenError, TargetError, UserError
from loadgen.core.execution.events import Emit, WaitingFor
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.workload.distributions import Fixed, Length, ListOfValues
from loadgen.core.workload.request_classes import requests_by_class
from loadgen.core.workload.request_kinds import Synthetic
from loadgen.core.workload.schema import Workload

ProbeCache = dict[Endpoint, ProbeResult]
"""The results of endpoints that were probed before."""

_NS_PER_S = 1e9
_NS_PER_MS = 1e6

# If a probe takes longer, the user is told what is waited for.
_LONG_PROBE_S = 5.0
# The lengths of the two prompts of a probe, in words of the tokenizer of the model.
_PROBE_WORD_COUNTS = (8, 72)


async def probe_target(
    settings: Settings,
    target: Target,
    fetcher: HttpFetcher,
    samples: Sequence[tuple[str, int]] = SAMPLES,
    output_lengths: OutputLengths | None = None,
) -> ProbeResult:
    """Send a few requests to one target to find out what it serves, and how it responds.

    The requests have the same API, model, headers and options as those of the load, so that what
    the server refuses is detected before the load.

    Args:
        settings: The settings of the load.
        target: The target.
        fetcher: The HTTP client that sends the requests.
        samples: A short and a longer prompt, each with its number of tokens.
        output_lengths: The output lengths of the load, or None if they are not known.

    Raises:
        TargetUnusable: Each request of the load would fail.
    """
    options = ProbeOptions(
        model=settings.model,
        server=settings.server,
        stream=settings.stream,
        api_key=settings.api_key,
        headers=settings.headers,
        extra_body=settings.extra_body,
        server_timing=settings.server_timing,
        samples=samples,
        output_lengths=output_lengths,
    )
    return await probe(
        target,
        send_request=fetcher.send_request,
        connect=fetcher.connect,
        options=options,
    )


def planned_output_lengths(workload: Workload) -> OutputLengths | None:
    """Return the range of output lengths that a workload requests.

    The probe requests responses of these lengths, so that a server which refuses one is detected
    before the load. Return None if only the data of the requests show their lengths, as with files
    and traces.
    """
    ranges = []
    for requests in requests_by_class(workload.requests).values():
        if not isinstance(requests, Synthetic):
            return None
        ranges.append(_range_of(requests.output_tokens))

    return OutputLengths(
        shortest=min(output_range.shortest for output_range in ranges),
        longest=_longest_of([output_range.longest for output_range in ranges]),
    )


def _longest_of(maxima: Sequence[int | None]) -> int | None:
    """Return the largest of several maxima, or None (no maximum) if one of them is None."""
    known_maxima = [maximum for maximum in maxima if maximum is not None]
    has_unlimited = len(known_maxima) < len(maxima)
    return None if has_unlimited else max(known_maxima)


def _range_of(length: Length) -> OutputLengths:
    """Return the range of a distribution of output lengths, which may have no maximum."""
    if isinstance(length, Fixed):
        return OutputLengths(shortest=length.value, longest=length.value)
    if isinstance(length, ListOfValues):
        return OutputLengths(shortest=min(length.values), longest=max(length.values))
    return OutputLengths(shortest=length.min or 1, longest=length.max)


def client_options(settings: Settings, result: ProbeResult) -> dict[str, Any]:
    """Return the options of a client for a target that was probed.

    If the settings ask the server for its timing breakdown of each request, the headers and the
    body contain what a server of this kind needs to send it.
    """
    headers = settings.headers
    extra_body = settings.extra_body
    if settings.server_timing:
        headers, extra_body = with_timing_request(
            result.server_profile, headers, extra_body, stream=settings.stream
        )

    return {
        "model": result.model,
        "server_profile": result.server_profile,
        "stream": settings.stream,
        "api_key": settings.api_key,
        "headers": headers,
        "extra_body": extra_body,
        "tls": settings.tls,
    }


def probe_samples(tokenizer_spec: str | None) -> Sequence[tuple[str, int]]:
    """Return the two prompts of a probe, each with its number of tokens.

    If the user gives the tokenizer of the model (a file), the prompts consist of random words of
    it, as those of the load do. The token counts that the server then reports show whether it uses
    another tokenizer. The default tokenizer, which has no file, says nothing about the model. Then
    the prompts consist of a word that is one token in every vocabulary.

    Raises:
        UserError: The tokenizer cannot be loaded.
    """
    tokenizer = tokens.load_tokenizer(tokenizer_spec)
    has_tokenizer_file = tokenizer.file_sha256 != ""
    if has_tokenizer_file:
        return random_samples(tokenizer, _PROBE_WORD_COUNTS)
    return SAMPLES


def random_samples(
    tokenizer: tokens.Tokenizer, word_counts: Sequence[int]
) -> list[tuple[str, int]]:
    """Return random texts of so many words, which no cache can contain, with their tokens."""
    generator = seeds.generator(seeds.random_seed(), "probe")
    texts = [tokens.random_text(tokenizer, word_count, generator) for word_count in word_counts]
    return [(text, tokenizer.count(text)) for text in texts]


async def probe_url(
    settings: Settings, timeout_s: float, output_lengths: OutputLengths | None = None
) -> ProbeResult:
    """Probe the target at `settings.url` with a connection of its own.

    Args:
        settings: The settings of the load. Their URL must not be None.
        timeout_s: How long a response may take.
        output_lengths: The output lengths of the load, or None if they are not known.

    Returns:
        What the probe found out. If the URL has a host name, the time of its lookup is part of it.

    Raises:
        TargetError: The target cannot be used.
        UserError: The URL is not valid.
    """
    assert settings.url is not None
    target_name = Endpoint(url=settings.url).display_name

    target = _parse_target(settings, settings.url, target_name)
    try:
        tls_context = settings.tls.context() if target.tls else None
        fetcher = HttpFetcher(target, tls_context, timeout_s)
        samples = probe_samples(settings.tokenizer)
        result = await probe_target(settings, target, fetcher, samples, output_lengths)
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), target_name, error.hint) from None

    dns_ms = None if fetcher.dns_ns is None else fetcher.dns_ns / _NS_PER_MS
    return msgspec.structs.replace(result, dns_ms=dns_ms)


def _parse_target(settings: Settings, url: str, target_name: str) -> Target:
    """Return the target at a URL, with the API and the kind of server of the settings.

    Raises UserError at `target_name` if the URL is not valid.
    """
    server = None if settings.server == "auto" else settings.server
    try:
        return Target.parse(url, api=settings.api, server=server)
    except TargetUnusable as error:
        raise UserError(error.code, str(error), target_name, error.hint) from None


async def probe_all(
    settings: Settings, workload: Workload, cache: ProbeCache, emit: Emit
) -> tuple[ProbeResult, ...]:
    """Probe every endpoint that is not in the cache, and return the results of all endpoints.

    Args:
        settings: The settings, which name the endpoints.
        workload: The load that follows. A response of the probe may take as long as its responses.
        cache: The results of endpoints that were probed before. New results are added to it.
        emit: Called with an event when the probe takes long.

    Raises:
        LoadgenError: One endpoint cannot be used. Endpoints that serve the same requests must also
            have the same model and the same server software.
        CombinedError: Several endpoints have such an error.
    """
    timeout_s = workload.timeout_ns / _NS_PER_S
    new_endpoints = [endpoint for endpoint in settings.endpoints if endpoint not in cache]
    waiting_for = WaitingFor(
        f"the first response of {settings.display_name}; it may take up to "
        f"{timeout_s:g} s (--timeout)"
    )
    timer = asyncio.get_running_loop().call_later(_LONG_PROBE_S, emit, waiting_for)

    # This does not raise the errors of endpoints, but returns them as outcomes.
    new_outcomes = await _probe_at_once(settings, workload, new_endpoints, timeout_s)
    timer.cancel()

    # The results in the cache are checked again, because they must agree with the new ones.
    results, errors = _split_outcomes(settings.endpoints, cache | new_outcomes)
    _raise_errors(errors)
    cache.update(results)

    return tuple(results[endpoint] for endpoint in settings.endpoints)


def _raise_errors(errors: Sequence[LoadgenError]) -> None:
    """Raise the error if there is one, or a CombinedError if there are several."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CombinedError(errors)


async def _probe_at_once(
    settings: Settings, workload: Workload, endpoints: Sequence[Endpoint], timeout_s: float
) -> dict[Endpoint, ProbeResult | BaseException]:
    """Probe endpoints at the same time, and return the result or the error of each."""
    output_lengths = planned_output_lengths(workload)
    probes = [
        probe_url(settings.for_endpoint(endpoint), timeout_s, output_lengths)
        for endpoint in endpoints
    ]

    # Without `return_exceptions`, the first error would hide those of other endpoints.
    outcomes = await asyncio.gather(*probes, return_exceptions=True)
    return dict(zip(endpoints, outcomes, strict=True))


class _EndpointRole(NamedTuple):
    """What decides which requests an endpoint receives.

    Attributes:
        step_name: The step of tasks that it serves, or "" if it serves all requests.
        api: The API of this step, if it has its own.
        model: The model of this step, if it has its own.
    """

    step_name: str
    api: str | None
    model: str | None


class _SplitOutcomes(NamedTuple):
    """The results of the probes that succeeded, and the errors of all endpoints."""

    results: ProbeCache
    errors: list[LoadgenError]


def _split_outcomes(
    endpoints: Sequence[Endpoint],
    outcome_by_endpoint: Mapping[Endpoint, ProbeResult | BaseException],
) -> _SplitOutcomes:
    """Separate the results of probes from the errors.

    Endpoints that share the same requests (an equal `_EndpointRole`) must serve the same model with
    the same server software. Each of them is compared with the first one, and a difference is
    another error.

    Raises:
        BaseException: An outcome is an exception other than a LoadgenError, which is a bug.
    """
    results: ProbeCache = {}
    errors: list[LoadgenError] = []

    first_endpoint_by_role: dict[_EndpointRole, Endpoint] = {}
    for endpoint in endpoints:
        outcome = outcome_by_endpoint[endpoint]
        if isinstance(outcome, LoadgenError):
            errors.append(outcome)
            continue

        if isinstance(outcome, BaseException):
            raise outcome

        results[endpoint] = outcome
        role = _EndpointRole(endpoint.serves, endpoint.api, endpoint.model)

        first_endpoint = first_endpoint_by_role.setdefault(role, endpoint)
        if first_endpoint != endpoint:
            first_result = results[first_endpoint]
            errors.extend(_difference_errors(first_endpoint, first_result, endpoint, outcome))

    return _SplitOutcomes(results, errors)


def _difference_errors(
    first_endpoint: Endpoint,
    first_result: ProbeResult,
    other_endpoint: Endpoint,
    other_result: ProbeResult,
) -> Iterator[TargetError]:
    """Yield an error if an endpoint serves another model or runs another server than the first.

    The metrics of a run combine the responses of all its endpoints. They would mean nothing if the
    endpoints were different.
    """
    first_model = _served_model(first_result)
    other_model = _served_model(other_result)
    has_same_server = other_result.server_profile == first_result.server_profile
    if other_model == first_model and has_same_server:
        return

    yield TargetError(
        "targets_differ",
        message=(
            f"serves {other_model} ({other_result.server}), but {first_endpoint.display_name} "
            f"serves {first_model} ({first_result.server})"
        ),
        where=other_endpoint.display_name,
        hint=(
            "use targets with the same model and server software. --model "
            "selects a model that all of them serve"
        ),
    )


def _served_model(result: ProbeResult) -> str:
    """Return the model that a server uses.

    Some servers accept any model name. If the server does not list the requested name, return the
    names that it lists.
    """
    if result.model in result.models or not result.models:
        return result.model
    return ", ".join(result.models)
