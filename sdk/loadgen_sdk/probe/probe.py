"""Examine a target before a load: its connect time, kind and model, and what its responses report.

The probe uses no socket. Its caller passes the functions that send requests, so that it works with
a server in memory as well as with a network (`fetch.py`). It sends a few small requests, whatever
the size of the load is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from ..transport.target import Target
from ..wire_formats.server_profiles import (
    NON_GENERATIVE_APIS,
    OUTPUT_LIMIT_FIELDS,
    ServerProfile,
    find_server_profile,
)
from .generations import Generation, GenerationPair, Generator
from .http_types import Connect, HttpResponse, SendRequest
from .model_list import ModelList
from .probe_client import ProbeClient, ProbeOptions
from .server_detection import (
    FURTHER_PAGES,
    VERSION_PATH,
    detect_builtin_server,
    detect_server,
    detection_texts,
    server_of_host,
)
from .server_info import ServerInfo, parse_version

SIMULATION = "loadgen-sim"
"""The beginning of the `server` header of the simulated server of this project."""

_NS_PER_MS = 1e6

_MAX_CONNECTS = 5
_MIN_CONNECTS = 3
_CONNECT_BUDGET_NS = 300_000_000
"""No further connect time is measured once the measured ones together take longer."""

DEFAULT_OPTIONS = ProbeOptions()

_BUNDLED_TOKENS_PER_EVENT = 1.5
"""Above this mean, the server is said to send several tokens per event. One event without text or
with a longer text moves the mean of a short generation less than that."""

_MAX_EVIDENCE_CHARS = 80


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe. A field is None or empty if the server gave no information.

    Attributes:
        target: The target.
        server: The name of the server profile.
        server_profile: The server profile, corrected by what the probe observed.
        model: The model that was probed.
        models: The models that the server lists.
        version: The version of the server.
        evidence: Why the server is taken for this kind of server, as texts for the user.
        rtt_ms: The median time of a TCP connect.
        dns_ms: The time of the name lookup, or None for an address.
        template_tokens: The tokens that the server adds to a prompt: chat template and BOS.
        token_ratio: The server's token count of the sample prompts divided by that of the client.
        reports_usage: The responses have a count of output tokens.
        has_exact_length: The output had the requested number of tokens.
        tokens_per_event: The mean number of tokens per event. Above 1, the gaps between events are
            not inter-token latencies.
        warnings: What the user should know, as texts.
        simulated: The target is the simulated server of this project.
        engine: The engine behind the server.
        precision: The precision of weights and KV cache.
        one_token_response_ms: The time of a response of one token without load.
        per_token_ms: The time of each further token without load.
        max_context: How many tokens a prompt and its completion may have together.
        usage_contradiction: How the token counts contradict each other.
        ignores_stream: The server responds to a request for a stream with one JSON object.
        reports_server_timing: The responses state the server's own timing.
    """

    target: Target
    server: str
    server_profile: ServerProfile
    model: str
    models: tuple[str, ...]
    version: str
    evidence: tuple[str, ...]
    rtt_ms: float
    dns_ms: float | None = None
    template_tokens: int | None
    token_ratio: float | None
    reports_usage: bool | None
    has_exact_length: bool | None
    tokens_per_event: float | None
    warnings: tuple[str, ...]
    simulated: bool = False
    engine: str = ""
    precision: str = ""
    one_token_response_ms: float | None = None
    per_token_ms: float | None = None
    max_context: int | None = None
    usage_contradiction: str = ""
    ignores_stream: bool = False
    reports_server_timing: bool = False


class _IdentifiedServer(NamedTuple):
    """A server profile by name, and why it was chosen.

    Attributes:
        name: The name of the profile.
        evidence: Why it was chosen, as a text for the user.
        doubt: Why the choice of the user may be wrong, or "".
    """

    name: str
    evidence: str
    doubt: str = ""


class _FirstPages(NamedTuple):
    """What a probe knows about a server before it identifies it.

    Attributes:
        hosted_service: The server profile of the hosted service at the host of the target, or "".
        model_list: The response to the request for the list of models.
        version: The page with the version. It is NO_RESPONSE for a hosted service.
    """

    hosted_service: str
    model_list: HttpResponse
    version: HttpResponse


class _PromptTokens(NamedTuple):
    """How the server counts the tokens of prompts. Both are None if that is not known.

    Attributes:
        template_tokens: The tokens that the server adds to each prompt: chat template and BOS.
        token_ratio: The server's token count of a text divided by that of the client.
    """

    template_tokens: int | None
    token_ratio: float | None


class _Observations(NamedTuple):
    """What the requests of a probe showed.

    Attributes:
        rtt_ms: The median time of a TCP connect.
        model_list: The response to the request for the list of models.
        identified: The server profile that applies, and why.
        info: What the server says about itself.
        models: The models that the server lists.
        model: The model that was probed.
        profile: The server profile, corrected by what the generations showed.
        corrections: What was corrected, as texts for the user.
        generations: The two generations.
    """

    rtt_ms: float
    model_list: HttpResponse
    identified: _IdentifiedServer
    info: ServerInfo
    models: ModelList
    model: str
    profile: ServerProfile
    corrections: Sequence[str]
    generations: GenerationPair


async def probe(
    target: Target,
    *,
    send_request: SendRequest,
    connect: Connect,
    options: ProbeOptions = DEFAULT_OPTIONS,
) -> ProbeResult:
    """Examine a target with a few small requests, before a load is sent to it.

    The probe measures the round-trip time, identifies the server by its first pages, chooses the
    model, reads what the server says about itself, and runs a short and a long generation.

    Args:
        target: The target to examine.
        send_request: Sends a request.
        connect: Opens a connection and returns how long that took.
        options: The options of the user that also hold for the requests of the load.

    Raises:
        TargetUnusable: Each request of the load would fail. The text has no key and no password.
    """
    client = ProbeClient(target, send_request, options)
    rtt_ms = await _median_connect_ms(connect)

    pages = await _fetch_first_pages(client, is_list_required=not options.model)
    identified = await _identify_server(client, options.server, pages)

    profile = find_server_profile(identified.name)
    if options.server_timing:
        client.request_server_timing(profile)

    models = ModelList(pages.model_list)
    generator = Generator(client, profile, models, options.output_lengths)
    model = await _choose_model(options.model or target.deployment, generator, models)
    info = await client.get_server_info(
        profile, parse_version(pages.version), is_hosted=bool(pages.hosted_service)
    )
    prompts = [prompt for prompt, _token_count in options.samples]
    generations = await generator.run(model, prompts)
    observations = _Observations(
        rtt_ms=rtt_ms,
        model_list=pages.model_list,
        identified=identified,
        info=info,
        models=models,
        model=model,
        profile=generator.profile,
        corrections=generator.corrections,
        generations=generations,
    )

    return _build_result(client, options, observations)


async def _fetch_first_pages(client: ProbeClient, *, is_list_required: bool) -> _FirstPages:
    """Fetch the two pages by which most servers are identified: list of models and version.

    Both are fetched at the same time. A hosted service (of OpenAI, for example, or Azure) is known
    by its host name, and has no page with a version.

    Args:
        client: The client that sends the requests.
        is_list_required: The list of models is needed, because the user has named no model.

    Raises:
        TargetUnusable: The list is required and cannot be fetched, or it shows that the server
            would refuse every request.
    """
    target = client.target
    hosted_service = "azure" if target.azure else server_of_host(target.host)
    no_path = ""  # `get_optional` returns NO_RESPONSE for it, without a request.
    version_path = no_path if hosted_service else target.server_path(VERSION_PATH)
    model_list, version = await asyncio.gather(
        client.get_model_list(is_required=is_list_required), client.get_optional(version_path)
    )
    _check_model_list(client, model_list, is_required=is_list_required)

    return _FirstPages(hosted_service, model_list, version)


async def _choose_model(requested_model: str, generator: Generator, models: ModelList) -> str:
    """Return the model of the probe.

    It is the requested one, or else the one to which the server is pinned, or else the only one
    that the server lists.

    Args:
        requested_model: The model that the user or the URL names, or "".
        generator: Asks the server for the model to which it is pinned.
        models: The models that the server lists.

    Raises:
        TargetUnusable: No model was requested, and the server does not have exactly one.
    """
    if requested_model:
        return requested_model
    pinned_model = await generator.find_pinned_model()
    if pinned_model:
        return pinned_model
    return models.default_model(rejects_unknown_models=generator.profile.rejects_unknown_models)


def _build_result(
    client: ProbeClient, options: ProbeOptions, observations: _Observations
) -> ProbeResult:
    """Return the result of a probe: what was observed, what follows from it, and warnings.

    Args:
        client: The client that has sent the requests of the probe.
        options: The options of the user.
        observations: What the requests showed.
    """
    generations = observations.generations
    long_generation = generations.long
    client_token_counts = [token_count for _prompt, token_count in options.samples]
    prompt_tokens = _compare_token_counts(generations, client_token_counts)
    has_exact_length = _has_exact_length(long_generation, options.extra_body or {})
    info = observations.info

    return ProbeResult(
        target=client.target,
        # the server and its models
        server=observations.identified.name,
        server_profile=observations.profile,
        evidence=_collect_evidence(observations),
        simulated=_is_simulated(observations.model_list),
        model=observations.model,
        models=observations.models.ids,
        max_context=observations.models.max_context(observations.model),
        version=info.version,
        engine=info.engine,
        precision=info.precision,
        # times without load
        rtt_ms=observations.rtt_ms,
        one_token_response_ms=generations.one_token_response_ms,
        per_token_ms=generations.per_token_ms,
        # what the responses contain
        template_tokens=prompt_tokens.template_tokens,
        token_ratio=prompt_tokens.token_ratio,
        tokens_per_event=_tokens_per_event(client, generations),
        has_exact_length=has_exact_length,
        reports_usage=long_generation.usage.output is not None,
        usage_contradiction=long_generation.reader.usage().contradiction,
        ignores_stream=generations.ignores_stream,
        reports_server_timing=generations.reports_server_timing,
        warnings=_collect_warnings(client, options, observations, has_exact_length),
    )


def _is_simulated(model_list: HttpResponse) -> bool:
    """Return True if the `server` header names the simulated server of this project."""
    return model_list.headers.get("server", "").startswith(SIMULATION)


def _collect_warnings(
    client: ProbeClient,
    options: ProbeOptions,
    observations: _Observations,
    has_exact_length: bool | None,
) -> tuple[str, ...]:
    """Return the warnings of the probe, as texts for the user.

    They are about the model, the kind of server, the responses of the two generations, and the
    requests. They do not prevent a load.

    Args:
        client: The client that has sent the requests of the probe.
        options: The options of the user.
        observations: What the probe has found out.
        has_exact_length: Whether outputs have the requested length. None if that is not known.
    """
    profile = observations.profile
    return (
        *_model_warnings(observations.model, observations.models, profile),
        *_server_warnings(options.server, observations.identified),
        *_response_warnings(client, profile, observations.generations, has_exact_length),
        *_request_warnings(client),
    )


async def _median_connect_ms(connect: Connect) -> float:
    """Return the median of a few connect times, which is the round-trip time of the network.

    A distant server is measured fewer times, but at least _MIN_CONNECTS times.
    """
    durations_ns: list[int] = []
    for count in range(_MAX_CONNECTS):
        if count >= _MIN_CONNECTS and sum(durations_ns) >= _CONNECT_BUDGET_NS:
            break
        durations_ns.append(await connect())
    return median(durations_ns) / _NS_PER_MS


def _check_model_list(client: ProbeClient, response: HttpResponse, *, is_required: bool) -> None:
    """Raise TargetUnusable if the response to the request for models shows that no load can work.

    A wrong key or an unavailable server (401, 403, 503) counts only if the list is required,
    because a server may protect its list and still serve a model that the user names.
    """
    is_refused = response.status in (401, 403, 503) and is_required
    if is_refused or client.explainer.expects_tls(response):
        raise client.explainer.create_error(response)


async def _identify_server(
    client: ProbeClient, requested_server: str, pages: _FirstPages
) -> _IdentifiedServer:
    """Return which server profile applies, and why.

    The first of these that is known applies:

    1. the server that the user has named,
    2. the hosted service at the host of the target,
    3. a server whose detection rule matches one of its first two pages,
    4. a server, also of a plug-in, whose detection rule matches any of its pages,
    5. the generic profile, with the fields that every server accepts.

    Args:
        client: Fetches further pages if the first two match no rule.
        requested_server: The name of the server profile that the user has chosen, or "auto".
        pages: The first pages of the server.
    """
    first_texts = detection_texts(pages.model_list, pages.version)
    if requested_server != "auto":
        return _confirm_requested_server(requested_server, first_texts)
    if pages.hosted_service:
        return _IdentifiedServer(pages.hosted_service, f"the host is {client.target.host}")

    detected = detect_builtin_server(first_texts)
    if detected is None:
        further_texts = await _fetch_further_pages(client)
        detected = detect_server(first_texts | further_texts)

    if detected is None:
        evidence = "unknown server software, so only fields that all servers accept are sent"
        return _IdentifiedServer("generic", evidence)

    matched_text = client.explainer.redact(detected.matched_text)[:_MAX_EVIDENCE_CHARS]
    return _IdentifiedServer(detected.name, f"{detected.page} says {matched_text}")


def _confirm_requested_server(
    requested_server: str, texts_by_source: Mapping[str, str]
) -> _IdentifiedServer:
    """Return the server that the user has chosen, with a doubt if its pages look like another one.

    The doubt continues a sentence, as in "--server is vllm, but it looks like sglang".

    Args:
        requested_server: The name of the server profile that the user has chosen.
        texts_by_source: The texts in which detection rules search, such as the list of models.
    """
    detected = detect_builtin_server(texts_by_source)
    doubt = ""
    if detected is not None and detected.name not in (requested_server, "generic"):
        doubt = f"but it looks like {detected.name}"
    return _IdentifiedServer(requested_server, "set with --server", doubt)


async def _fetch_further_pages(client: ProbeClient) -> dict[str, str]:
    """Fetch the pages that detection needs if the first two match no rule.

    Return their texts by the source of detection. The text of a missing page is empty.
    """
    paths = [client.target.server_path(path) for path in FURTHER_PAGES.values()]
    pages = await asyncio.gather(*(client.get_optional(path) for path in paths))
    return {source: page.page_text for source, page in zip(FURTHER_PAGES, pages, strict=True)}


def _collect_evidence(observations: _Observations) -> tuple[str, ...]:
    """Return why the server was identified as it was, and what the probe learned about it."""
    evidence = [observations.identified.evidence]
    if observations.identified.doubt:
        evidence.append(observations.identified.doubt)
    list_status = observations.model_list.status
    if list_status >= 300:
        evidence.append(f"its list of models returns HTTP {list_status}")
    return (*evidence, *observations.corrections)


def _compare_token_counts(
    generations: GenerationPair, client_counts: Sequence[int]
) -> _PromptTokens:
    """Compare the server's token counts of the two prompts with the client's counts.

    The server's count is taken as a linear function of the client's count: server = template tokens
    + ratio * client. Two prompts of different length determine both numbers.

    Args:
        generations: The two generations, which have the server's counts.
        client_counts: The tokens of the short and of the long prompt by the client's tokenizer.
    """
    client_short, client_long = client_counts
    server_short = generations.short.usage.input
    server_long = generations.long.usage.input
    if server_short is None or server_long is None or client_short == client_long:
        return _PromptTokens(template_tokens=None, token_ratio=None)

    ratio = (server_long - server_short) / (client_long - client_short)
    template_tokens = round(server_short - ratio * client_short)
    return _PromptTokens(template_tokens=template_tokens, token_ratio=ratio)


def _has_exact_length(generation: Generation, extra_body: Mapping[str, object]) -> bool | None:
    """Return whether the output has the requested length.

    Return None if the server does not count tokens, or if the user sets the limit or a stop
    sequence.
    """
    user_sets_end = any(field in extra_body for field in (*OUTPUT_LIMIT_FIELDS, "stop"))
    output_tokens = generation.usage.output
    if user_sets_end or output_tokens is None:
        return None
    return output_tokens == generation.requested_tokens


def _tokens_per_event(client: ProbeClient, generations: GenerationPair) -> float | None:
    """Return the tokens per event of the longer generation, or None if it was not streamed."""
    if not client.stream or generations.ignores_stream:
        return None
    return generations.long.tokens_per_event


def _model_warnings(model: str, models: ModelList, profile: ServerProfile) -> list[str]:
    """Return a warning if the server accepts the model although its list does not name it.

    A server that serves its only model under any name would hide a typing error.
    """
    if not models.ids or model in models or profile.rejects_unknown_models:
        return []
    return [f"{profile.title} accepts any model name. It lists {models}, not {model!r}"]


def _server_warnings(server: str, identified: _IdentifiedServer) -> list[str]:
    """Return a warning if the server does not look like the one that the user names."""
    if not identified.doubt:
        return []
    return [f"--server is {server}, {identified.doubt}"]


def _request_warnings(client: ProbeClient) -> list[str]:
    """Return what the user should know about the requests of the probe.

    A header of the user may have replaced the API key, and some generations may have failed before
    they succeeded.
    """
    warnings = []
    if client.replaced_key_header:
        warnings.append(
            "the API key is not sent, because the header "
            f"{client.replaced_key_header} was set instead"
        )

    if client.failures:
        warnings.append(
            f"{len(client.failures)} preflight requests failed before one succeeded: "
            f"{client.failures[0]}"
        )

    return warnings


def _response_warnings(
    client: ProbeClient,
    profile: ServerProfile,
    generations: GenerationPair,
    has_exact_length: bool | None,
) -> list[str]:
    """Return what the user should know about the responses of the two generations.

    Responses of the APIs for embeddings and rerank contain no generated text. The warnings about
    token counts, output lengths and tokens per event do not apply to them.

    Args:
        client: The client that has sent the requests.
        profile: The server profile.
        generations: The two generations.
        has_exact_length: Whether outputs have the requested length. None if that is not known.
    """
    warnings = []
    if generations.ignores_stream:
        warnings.append(
            "the server answers a streaming request with one JSON object, so "
            "responses are not streamed"
        )

    if client.target.api in NON_GENERATIVE_APIS:
        return warnings

    warnings += _usage_warnings(generations.long)
    warnings += _length_warnings(profile, generations.long, has_exact_length)
    tokens_per_event = _tokens_per_event(client, generations)

    sends_several_tokens_per_event = (
        tokens_per_event is not None and tokens_per_event > _BUNDLED_TOKENS_PER_EVENT
    )
    if sends_several_tokens_per_event:
        warnings.append(
            "the server sends several tokens per event, so the times between events "
            "are inter-chunk latencies, not ITL"
        )

    return warnings


def _usage_warnings(generation: Generation) -> list[str]:
    """Return warnings about the token counts (the usage) of a response.

    The counts may contradict each other, they may be impossible (such as a negative number), or
    there may be none. In the last two cases, the client counts the output tokens. Another warning
    is about output in unknown fields, whose time of arrival cannot be measured.
    """
    warnings = []
    reader = generation.reader

    usage = reader.usage()
    if usage.contradiction:
        warnings.append(
            "the server's token counts contradict each other "
            f"({usage.contradiction}), so they are not used"
        )

    if reader.has_hidden_output:
        # The remark continues the sentence "the server's responses ...".
        remark = reader.remark or "have output only in fields that loadgen does not know"
        warnings.append(f"the server's responses {remark}, so there is no time of the first token")

    if reader.has_impossible_usage:
        warnings.append(
            "the server's usage states an impossible number of tokens. It is "
            "ignored, and tokens are counted by the client"
        )
    elif usage.output is None:
        warnings.append(
            "the server's responses contain no usage, so output tokens are estimated by the client"
        )

    return warnings


def _length_warnings(
    profile: ServerProfile, generation: Generation, has_exact_length: bool | None
) -> list[str]:
    """Return a warning if the client cannot make the server generate a certain number of tokens.

    A load usually requests an exact output length, by fields such as `ignore_eos`. There is a
    warning if the server has no such field, or if the output had another length than requested.

    Args:
        profile: The server profile, with the fields that force the length.
        generation: A generation whose request had these fields.
        has_exact_length: Whether its output has the requested length. None if that is not known.
    """
    if not profile.length_fields:
        return [f"{profile.title} cannot force the output length, so responses may end early"]

    has_other_length = has_exact_length is False
    if not has_other_length:
        return []

    requested = f"{generation.requested_tokens} tokens were requested and forced"
    output_tokens = generation.reader.usage().output
    return [f"{requested}, but {output_tokens} were generated, so output lengths are not exact"]
