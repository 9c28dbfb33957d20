"""Examines a target before the load: its connect time, kind, model, and what its responses report.

`probe` uses no socket. It gets two functions for its requests, so that a server in memory works as
well as a network (`fetch.py` has the two for a network). It sends a few small requests, whatever
the size of the run, and reads their responses as a load does.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from ..errors import Code, TargetUnusable
from ..redaction import shown
from ..request import Request, Usage
from ..transport.exchange import (
    compressed_text,
    http_failure,
    is_event_stream,
    take_whole_body,
    unread_encoding,
)
from ..transport.http1 import CREDENTIALS, merged
from ..transport.target import Target, header_secrets
from ..wire_formats.event_fields import error_text
from ..wire_formats.implementation import token_count
from ..wire_formats.lenient_decoding import decode_leniently
from ..wire_formats.request_body import add_timing_request, encode_body
from ..wire_formats.response_reader import NOT_STREAMED, EventTimeline, ResponseReader
from ..wire_formats.server_profiles import (
    DETECTION_SOURCES,
    NON_GENERATIVE_APIS,
    OUTPUT_LIMIT_FIELDS,
    SERVERS,
    ServerProfile,
    find_server_profile,
)
from ..wire_formats.server_timing import HEADER
from ..wire_formats.server_timing_lookup import parse_server_timing
from ..wire_formats.sse import EventTooLargeError, SseDecoder
from ..wire_formats.usage import without_doubtful_counts
from .server_info import ServerInfo, parse_server_info

SIMULATION = "loadgen-sim"  # name of the project's simulated server in its `server` header
CONNECTS = 5  # samples of the connect time; fewer (at least 3) when together they take longer than CONNECTS_NS
CONNECTS_NS = 300_000_000
ASKED_TOKENS = 8  # output of the longer generation: enough to see several tokens in one event
SAMPLES = ((" ".join(["hello"] * 4), 4), (" ".join(["hello"] * 36), 36))
"""Two prompts with their content tokens. The word is one token in every vocabulary in use."""


class HttpResponse(msgspec.Struct, frozen=True):
    """One HTTP answer: status, headers (names in lower case), complete body, and the ns from request to its end."""

    status: int
    headers: dict[str, str]
    body: bytes
    duration_ns: int = 0


Headers = Sequence[tuple[str, str]]
SendRequest = Callable[[str, str, Headers, bytes], Awaitable[HttpResponse]]
"""(method, request target, headers, body) -> HttpResponse. Raises TargetUnusable when there is no answer, and its
subclass TransientFailure where the connection broke: the next request may get one."""
Connect = Callable[[], Awaitable[int]]
"""() -> the ns that one TCP connect took. Raises TargetUnusable."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe. None: the server gave no information."""

    target: Target
    server: str  # name of the row in the table of server profiles
    server_profile: ServerProfile  # that row, corrected by what the probe observed
    model: str
    models: tuple[str, ...]  # the models that it lists
    version: str  # of the server; "": not reported
    evidence: tuple[str, ...]  # why it is taken for that kind of server, as texts
    rtt_ms: float  # median TCP connect time without load
    dns_ms: float | None = (
        None  # what looking up the host's name took; None: an address, or not known
    )
    template_tokens: int | None  # tokens that the server adds to a prompt: chat template, BOS
    token_ratio: (
        float | None
    )  # the server's token count divided by ours, for the sample prompts; 1.0: same count
    reports_usage: bool | None  # answers of this kind (streamed or not) carry a token count
    has_exact_length: (
        bool | None
    )  # the number of output tokens was the requested one; None: not counted
    tokens_per_event: (
        float | None
    )  # above 1: the server bundles tokens, so gaps between events are not ITL
    warnings: tuple[str, ...]
    simulated: bool = False  # it reports to be the simulated server (`loadgen sim`)
    engine: str = ""  # behind the server, as it says; "": not reported
    precision: str = ""  # of weights and KV cache, as it says; "": not reported
    one_token_response_ms: float | None = (
        None  # time of an answer of one token, without load and with a short prompt
    )
    per_token_ms: float | None = (
        None  # time of each further token; None: not to be told from the two answers
    )
    max_context: int | None = (
        None  # tokens of prompt and answer together that its list of models says it takes
    )
    usage_contradiction: str = ""  # the token counts that cannot all be true
    ignores_stream: bool = False  # it answers a request for a stream with one JSON object
    reports_server_timing: bool = (
        False  # its answers carry its own account of their time (wire_formats/server_timing.py)
    )


CONTEXT_FIELDS = ("max_model_len", "context_window", "context_length", "max_context_length")
"""What servers call their context in the list of models: vLLM and SGLang; Dynamo and Groq; OpenRouter; Mistral."""


_FURTHER_SOURCES = (
    "health",
    "props",
    "openapi",
)  # requested only if the other answers match no rule
_PATHS = {"version": "/version", "health": "/health", "props": "/props", "openapi": "/openapi.json"}
FACTS_S = 5.0  # longest wait for the page that tells engine and precision
WAIT_S, LONGEST_WAIT_S = (
    1.0,
    5.0,
)  # where a rate limit was used up: the limit may be one or two a second
TRIES = 4  # attempts of a request: a server that fails one in ten is refused by one probe in some thousands


async def probe(
    target: Target,
    *,
    send_request: SendRequest,
    connect: Connect,
    model: str | None = None,
    server: str = "auto",
    stream: bool = True,
    api_key: str | None = None,
    headers: Headers = (),
    extra_body: Mapping[str, Any] | None = None,
    server_timing: bool = False,
    samples: Sequence[tuple[str, int]] = SAMPLES,
    wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> ProbeResult:
    """Examine a target with a few small requests.

    Two generations, of 1 and of ASKED_TOKENS tokens, show how the server counts tokens and whether
    it sends several in one event.

    Args:
        target: The target, whose model is `model` or the only one that it lists.
        exchange: Sends a request.
        connect: Opens a connection and says how long that took.
        model: The model of the load.
        server: The name of the server's row, or "auto" to find it out.
        stream: Request streams, as the load does.
        api_key: The key of the user.
        headers: The headers of the user.
        extra_body: Fields that the user adds to each body.
        server_timing: Ask for the server's own account of each request.
        samples: A short and a longer prompt with their content tokens.
        wait: Waits for so many seconds after a rate limit was used up.

    Raises TargetUnusable, with a hint for the user, for everything that would make each request of
    the load fail. Its text has neither key nor password.
    """
    client = _ProbeClient(target, send_request, headers, api_key, stream, extra_body, wait)
    rtt_ms = await _rtt_ms(connect)
    host = "azure" if target.azure else _of_host(target.host)
    version_path = "" if host else target.beside(_PATHS["version"])
    models_answer, version = await asyncio.gather(
        client.models_page(needed=not model), client.get_optional(version_path)
    )
    is_refused = models_answer.status in (401, 403, 503) and not model
    if is_refused or client.wants_tls(models_answer):
        raise client.refusal(models_answer, "")
    name, evidence = await _identify(client, server, host, models_answer, version)
    server_profile, warnings = find_server_profile(name), []
    if server_timing:
        client.ask_for_timing(server_profile)
    models, base_models = _models(models_answer)
    client.models = models
    chosen_model = (
        model or target.deployment or await client.pinned_model(server_profile, models_answer)
    )
    chosen_model = chosen_model or _default_model(
        models, base_models, models_answer, server_profile
    )
    if models and chosen_model not in models and not server_profile.rejects_unknown_models:
        found = f"it lists {_shown_models(models)}, not {chosen_model!r}"
        warnings.append(f"{server_profile.title} answers to any model name: {found}")
    if server != "auto" and len(evidence) > 1:
        warnings.append(f"--server says {server}, {evidence[1]}")
    if models_answer.status >= 300:
        evidence.append(f"its list of models answers {models_answer.status}")
    facts = await client.facts(server_profile, _version(version), hosted=bool(host))
    short, long, server_profile = await _generations(
        client, server_profile, chosen_model, [text for text, _ in samples], evidence
    )
    usage = without_doubtful_counts(long.usage())
    template, ratio = _template_overhead(
        [without_doubtful_counts(short.usage()).input, usage.input], [count for _, count in samples]
    )
    user_sets_limit = any(field in (extra_body or {}) for field in (*OUTPUT_LIMIT_FIELDS, "stop"))
    exact = None
    if not user_sets_limit and usage.output is not None:
        exact = usage.output == client.long_tokens
    per_token_ms = client.per_token_ms(usage.output)
    tokens_per_event = None
    if stream and not client.ignores_stream:
        tokens_per_event = _tokens_per_event(long, usage)
    if stream and client.ignores_stream:
        warnings.append(
            "it answers a request for a stream with one JSON object: responses are not streamed"
        )
    if target.api not in NON_GENERATIVE_APIS:
        warnings += _warnings(server_profile, client.long_tokens, exact, long, tokens_per_event)
    warnings += client.warnings()
    return ProbeResult(
        target=target,
        server=name,
        server_profile=server_profile,
        model=chosen_model,
        models=models,
        version=facts.version,
        engine=facts.engine,
        precision=facts.precision,
        evidence=tuple(evidence),
        rtt_ms=rtt_ms,
        template_tokens=template,
        token_ratio=ratio,
        reports_usage=usage.output is not None,
        has_exact_length=exact,
        tokens_per_event=tokens_per_event,
        warnings=tuple(warnings),
        simulated=models_answer.headers.get("server", "").startswith(SIMULATION),
        usage_contradiction=long.usage().contradiction,
        ignores_stream=stream and client.ignores_stream,
        one_token_response_ms=client.one_token_response_ms(per_token_ms),
        per_token_ms=per_token_ms,
        max_context=_max_context(models_answer, chosen_model),
        reports_server_timing=client.account,
    )


async def _generations(
    client: _ProbeClient,
    server_profile: ServerProfile,
    model: str,
    prompts: list[str],
    evidence: list[str],
) -> tuple[ResponseReader, ResponseReader, ServerProfile]:
    """Run both generations as the server wants them.

    Returns both responses and the server's row with the name of the output limit that it takes.
    """
    for _ in range(_CORRECTIONS):
        try:
            short, long = await client.generate_both(server_profile, model, prompts)
        except _WantsOtherLimitField:
            server_profile = msgspec.structs.replace(
                server_profile,
                reasoning_output_limit_field=OUTPUT_LIMIT_FIELDS[1],
                output_limit_field=OUTPUT_LIMIT_FIELDS[1],
            )
            evidence.append("it refuses max_tokens and takes max_completion_tokens")
        except _OutputLimitTooLowError as error:
            client.short_tokens = error.minimum
            client.long_tokens = error.minimum + ASKED_TOKENS
            evidence.append(f"it takes no output limit below {error.minimum} tokens")
        else:
            return short, long, server_profile
    short, long = await client.generate_both(server_profile, model, prompts)
    return short, long, server_profile


_CORRECTIONS = 2  # the name of the output limit and its minimum


class _WantsOtherLimitField(Exception):
    """The server requires the other name of the output limit."""


class _OutputLimitTooLowError(Exception):
    """The server requires an output limit of at least `minimum` tokens."""

    def __init__(self, minimum: int) -> None:
        super().__init__(minimum)
        self.minimum = minimum


_MINIMUM = re.compile(
    r"(?:>=|≥|at least|minimum (?:value )?(?:of |is )?|greater than or equal to)\s*(\d{1,4})\b",
    re.IGNORECASE,
)
_BELOW_MINIMUM = re.compile(r"below (?:the )?minimum|too (?:small|low)", re.IGNORECASE)
_USUAL_MINIMUM = 16  # of OpenAI's Responses API


def _minimum_tokens(status: int, refusal: str, tokens: int) -> int:
    """Return the least output limit that a refusal names if it is above `tokens`, else 0."""
    is_about_the_limit = status in (400, 422) and re.search(r"max_\w*tokens", refusal)
    if not is_about_the_limit or re.search(_TOO_LONG, refusal):
        return 0
    match = _MINIMUM.search(refusal)
    minimum = int(match[1]) if match else 0
    if not match and _BELOW_MINIMUM.search(refusal):
        minimum = _USUAL_MINIMUM
    return minimum if minimum > tokens else 0


class _Refusal(NamedTuple):
    """What a refusal means: a code for programs, a message, and a hint for the user."""

    code: Code
    message: str
    hint: str


_KEY_HINT = "check the key, and what it may be used for"
_FIELD_HINT = (
    "if it names a field, remove it with --extra-body '{\"FIELD\": null}', or say what it is with "
    "--server"
)
_TOO_LONG_HINT = (
    "its context is too short for this: shorter prompts and answers, or a server with a longer "
    "context"
)
_PROXY_HINT = "a proxy answers, and the server behind it does not: is it up?"
_HINTS = {
    400: _FIELD_HINT,
    401: _KEY_HINT,
    403: _KEY_HINT,
    407: "a proxy is in between and wants a login",
    413: _FIELD_HINT,
    422: _FIELD_HINT,
    429: "its rate limit lets no probe (two requests) through: use another key or raise the limit",
    502: _PROXY_HINT,
    503: "it may still be loading its model: try again when it is ready",
    504: _PROXY_HINT,
}
"""Status -> what the user can do."""


class TransientFailure(TargetUnusable):
    """A request failed as one of a load may fail, and the next may succeed: such a server is measured, not refused.

    `after_s`: when it may be tried again, where that is said.
    """

    after_s = 0.0


class _ProbeClient:
    """Sends the requests of one probe and remembers what their responses show.

    Attributes:
        unsent_key: The name of a header that the user gave in the place of the key, or "".
        models: The models that the server lists.
        failures: The errors of generations that were tried again.
        took_ns: The output tokens that a generation requested, and its time.
        account: Some response had the server's own account of its time.
        ignores_stream: A stream was requested, and one JSON object came.
        short_tokens: The output that the shorter generation requests.
        long_tokens: The output that the longer generation requests.
    """

    def __init__(
        self,
        target: Target,
        send_request: SendRequest,
        headers: Headers,
        api_key: str | None,
        stream: bool,
        extra_body: Mapping[str, Any] | None,
        wait: Callable[[float], Awaitable[object]],
    ) -> None:
        self.target = target
        self._exchange = send_request
        self._stream = stream
        self._extra_body = extra_body
        self._wait = wait
        self._headers = tuple(merged(target.auth(api_key), headers))
        names = [name for name, _ in headers if name.lower() in CREDENTIALS - {"authorization"}]
        self.unsent_key = names[0] if api_key and names and names[0].lower() != "api-key" else ""
        self._secrets = (api_key, *header_secrets(self._headers))
        self._has_key = bool(api_key or target.basic)
        self.models: tuple[str, ...] = ()
        self.failures: list[str] = []
        self.duration_ns: dict[int, int] = {}
        self.account = False
        self.ignores_stream = False
        self.short_tokens = 1
        self.long_tokens = ASKED_TOKENS

    def ask_for_timing(self, server_profile: ServerProfile) -> None:
        """Ask for the server's own account of each request from now on."""
        self._headers, self._extra_body = add_timing_request(
            server_profile, self._headers, self._extra_body, stream=self._stream
        )

    def warnings(self) -> list[str]:
        """Return what the user should know of the requests that were sent."""
        warnings = []
        if self.unsent_key:
            warnings.append(
                f"the key is not sent: the header {self.unsent_key} was given in its place"
            )
        if self.failures:
            warnings.append(
                f"{len(self.failures)} probing requests failed before one went well: "
                f"{self.failures[0]}"
            )
        return warnings

    async def get(self, path: str) -> HttpResponse:
        for _ in range(TRIES - 1):
            with contextlib.suppress(TransientFailure):
                answer = await self._get(path)
                if not _may_pass(answer.status):
                    return answer
                await self._wait(_after_s(answer))
        return await self._get(path)

    async def models_page(self, *, needed: bool) -> HttpResponse:
        """GET the list of models. An empty answer takes its place if it fails and is not needed."""
        try:
            return await self.get(self.target.models)
        except TargetUnusable:
            if needed:
                raise
            return HttpResponse(0, {}, b"")

    async def _get(self, path: str) -> HttpResponse:
        return await self._exchange(
            "GET", path, merged([("Accept", "application/json")], self._headers), b""
        )

    async def get_optional(self, path: str) -> HttpResponse:
        """GET `path`. Returns an empty answer (status 0) if it cannot be had or `path` is ""."""
        if path:
            with contextlib.suppress(TargetUnusable):
                return await self._get(path)
        return HttpResponse(0, {}, b"")

    async def facts(
        self, server_profile: ServerProfile, version: str, *, hosted: bool
    ) -> ServerInfo:
        """What the server says of itself on the page of its kind. A page that does not answer in time says nothing."""
        page = ""
        if not hosted and server_profile.info_path:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FACTS_S):
                    page = _text(
                        await self.get_optional(self.target.beside(server_profile.info_path))
                    )
        return parse_server_info(server_profile, version, page)

    async def _post(self, request_body: bytes) -> HttpResponse:
        headers = merged([("Content-Type", "application/json")], self._headers)
        return await self._exchange("POST", self.target.path, headers, request_body)

    async def pinned_model(self, server_profile: ServerProfile, models_answer: HttpResponse) -> str:
        """The model of a server that cannot list it, but names it when another is requested; else ""."""
        if self.models or models_answer.status == 200 or not server_profile.rejects_unknown_models:
            return ""
        request = Request(id="probe", prompt="hello", max_tokens=1)
        answer = await self._post(
            encode_body(request, server_profile, self.target.api, "unnamed", False)
        )
        match = (
            re.search(r"pinned to '([^']+)'", error_text(answer.body))
            if answer.status == 400
            else None
        )
        return match[1] if match else ""

    async def generate_both(
        self, server_profile: ServerProfile, model: str, prompts: Sequence[str]
    ) -> list[ResponseReader]:
        """Generate `short_tokens` for the first prompt and `long_tokens` for the second at once."""
        generations = (
            self._generate(server_profile, model, *pair)
            for pair in zip(prompts, (self.short_tokens, self.long_tokens), strict=True)
        )
        # Wait for both, so that the error shown does not depend on timing.
        results = await asyncio.gather(*generations, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, ResponseReader)]

    async def _generate(
        self, server_profile: ServerProfile, model: str, text: str, tokens: int
    ) -> ResponseReader:
        for _ in range(TRIES - 1):
            try:
                return await self._generate_once(server_profile, model, text, tokens)
            except TransientFailure as error:
                self.failures.append(str(error))
                await self._wait(error.after_s)
        return await self._generate_once(server_profile, model, text, tokens)

    async def _generate_once(
        self, server_profile: ServerProfile, model: str, text: str, tokens: int
    ) -> ResponseReader:
        """Generate `tokens` tokens for `text` and return the response, which is ok.

        Raises TargetUnusable for a response that a load would count as failed.
        """
        request = Request(id="probe", prompt=text, max_tokens=tokens)
        request_body = encode_body(
            request,
            server_profile,
            self.target.api,
            model,
            self._stream,
            extra_body=self._extra_body,
        )
        answer = await self._post(request_body)
        self.duration_ns[tokens] = answer.duration_ns
        if answer.status >= 300:
            return self._read_refusal(answer, server_profile, model, tokens)
        if encoding := unread_encoding(answer.headers):
            what = f"{self.target.redacted} sends {compressed_text(encoding)}"
            hint = "switch compression off in the server or in the proxy before it"
            raise TargetUnusable("invalid_answer", what, hint)
        streamed = is_event_stream(answer.status, answer.headers)
        reading = self._read_body(answer.body, streamed)
        self.ignores_stream = self.ignores_stream or reading.remark == NOT_STREAMED
        timing = {HEADER: answer.headers.get(HEADER), **(reading.server_timing or {})}
        self.account = self.account or parse_server_timing(timing).timed
        if failure := reading.judge(True, False, streamed):
            requested = "1 token" if tokens == 1 else f"{tokens} tokens"
            what = f"a probe of {requested} failed: {failure.kind}: {self.clean(failure.text)}"
            raise TransientFailure("invalid_answer", what, "see the server's log")
        return reading

    def _read_refusal(
        self, answer: HttpResponse, server_profile: ServerProfile, model: str, tokens: int
    ) -> ResponseReader:
        """Return an empty response if a refusal shows that the target works, else raise it.

        Raises _OutputLimitTooLowError and _WantsOtherLimitField if another request may be accepted.
        """
        refusal = http_failure(answer.status, answer.headers, answer.body).text
        is_about_a_field = answer.status in (400, 422)
        other_field = OUTPUT_LIMIT_FIELDS[1]
        if (
            is_about_a_field
            and other_field in refusal
            and server_profile.output_limit_field != other_field
        ):
            raise _WantsOtherLimitField
        if minimum := _minimum_tokens(answer.status, refusal, tokens):
            raise _OutputLimitTooLowError(minimum)
        if answer.status == 400 and "output limit was reached" in refusal:
            return ResponseReader(EventTimeline())  # a reasoning model that needs more tokens
        raise self.refusal(answer, model)

    def _read_body(self, response_body: bytes, streamed: bool) -> ResponseReader:
        """Read the body of a generation as a load does."""
        reading = ResponseReader(EventTimeline())
        if not streamed:
            take_whole_body(reading, response_body, 0, self._stream)
            return reading
        decoder = SseDecoder()
        try:
            reading.feed([*decoder.feed(response_body), *decoder.end()], 0)
        except EventTooLargeError as error:
            what = f"{self.target.path} streams {error}"
            hint = "check that this is the API's URL"
            raise TargetUnusable("invalid_answer", what, hint) from None
        return reading

    def per_token_ms(self, tokens: int | None) -> float | None:
        """Return the time of each further token, from both generations.

        `tokens` is the output of the longer one by the server's count.
        """
        short_ns = self.duration_ns.get(self.short_tokens)
        long_ns = self.duration_ns.get(self.long_tokens)
        further_tokens = (self.long_tokens if tokens is None else tokens) - self.short_tokens
        if not short_ns or not long_ns or further_tokens < 1:
            return None
        return max(0, long_ns - short_ns) / further_tokens / 1e6

    def one_token_response_ms(self, per_token_ms: float | None) -> float | None:
        """Return the time of a response of one token."""
        short_ns = self.duration_ns.get(self.short_tokens)
        if not short_ns:
            return None
        return max(0.0, short_ns / 1e6 - (self.short_tokens - 1) * (per_token_ms or 0.0))

    def wants_tls(self, answer: HttpResponse) -> bool:
        """Return True if a server refuses plain HTTP because its port expects TLS."""
        if self.target.tls or answer.status != 400:
            return False
        error = answer.body.decode(errors="replace")
        return re.search(_HTTP_AT_A_TLS_PORT, error) is not None

    def refusal(self, answer: HttpResponse, model: str) -> TargetUnusable:
        """Return the error for a response with an error status: its cause and a hint."""
        code, message, hint = self._describe_refusal(answer, model)
        if not _may_pass(answer.status):
            return TargetUnusable(code, message, hint)
        failed_once = TransientFailure(code, message, hint)
        failed_once.after_s = _after_s(answer)
        return failed_once

    def _describe_refusal(self, answer: HttpResponse, model: str) -> _Refusal:
        status = answer.status
        error = self.clean(http_failure(status, answer.headers, answer.body).text) or "no text"
        if status in (400, 404, 422) and model and _about_model(error, model):
            return self._describe_unknown_model(error, model)
        if status in (404, 405):
            return self._describe_missing_path(status, error)
        if 300 <= status < 400:
            return self._describe_redirect(answer)
        message = f"{self.target.redacted} answers {status}: {error}"
        if self.wants_tls(answer):
            return _Refusal("wrong_protocol", message, self.target.tls_hint)
        return _Refusal(_code_of_status(status), message, self._hint(status, error))

    def _describe_unknown_model(self, error: str, model: str) -> _Refusal:
        hint = "name one that it serves with --model"
        if self.models:
            hint = f"choose with --model: {_shown_models(self.models)}"
        if list(self.models) == [model]:
            hint = "its list names this model alone: see the server's log, or try another --api"
        message = f"{self.target.redacted} does not serve the model {model!r}: {error}"
        return _Refusal("unknown_model", message, hint)

    def _describe_missing_path(self, status: int, error: str) -> _Refusal:
        target = self.target
        other_api = "completions" if target.api == "chat" else "chat"
        hint = f"check the path of the URL, or try --api {other_api}"
        if target.api in NON_GENERATIVE_APIS:
            hint = (
                f"check the path of the URL, and whether this server does {target.api}: here or in "
                "a step"
            )
        message = f"{target.redacted} answers {status} to {target.path}: {error}"
        return _Refusal("http_4xx", message, hint)

    def _describe_redirect(self, answer: HttpResponse) -> _Refusal:
        location = self.clean(answer.headers.get("location", "").partition("?")[0])
        where = f" to {location}" if location else ""
        message = f"{self.target.redacted} answers {answer.status}, a redirect{where}"
        return _Refusal("http_3xx", message, "give the URL it leads to")

    def _hint(self, status: int, error: str) -> str:
        """Return what the user can do about a refusal with this status and this text."""
        if status in (401, 403) and not self._has_key:
            return "it wants a key: set OPENAI_API_KEY"
        if status in (400, 413, 422) and re.search(_TOO_LONG, error):
            return _TOO_LONG_HINT
        return _HINTS.get(status, "see the server's log")

    def clean(self, text: str) -> str:
        return self.target.redact(text, *self._secrets).strip()


_HTTP_AT_A_TLS_PORT = r"(?i)plain http request .* https port|http request to an https server"
"""What servers answer to plain HTTP at a port that expects TLS: nginx, Go, Apache, Envoy."""
_TOO_LONG = (
    r"(?i)context.{0,3}(length|size|window)|max_?(model|seq|num|input)_?(len|tokens)|(too|is) long(er)?\b|"
    r"exceeds? the (maximum|available|model)"
)
"""What servers say of a prompt that is longer than they take: vLLM, SGLang, TensorRT-LLM, llama.cpp, Dynamo."""


def _code_of_status(status: int) -> Code:
    if status in (401, 403, 407):
        return "unauthorized"
    if status == 429:
        return "http_429"
    if status >= 400:
        return "http_5xx" if status >= 500 else "http_4xx"
    return "http_3xx" if status >= 300 else "invalid_answer"


def _may_pass(status: int) -> bool:
    """Return True if another request may succeed after one with this status."""
    return status in _PASSING or status >= 500


_PASSING = (408, 409, 425, 429)  # request timeout, conflict, too early, too many requests


def _after_s(answer: HttpResponse) -> float:
    """When a request may be tried again: after a rate limit as its header says, at most LONGEST_WAIT_S."""
    if answer.status != 429:
        return 0.0
    said = answer.headers.get("retry-after", "")
    return min(float(said), LONGEST_WAIT_S) if re.fullmatch(r"\d+(\.\d+)?", said) else WAIT_S


async def _rtt_ms(connect: Connect) -> float:
    times_ns: list[int] = []
    while len(times_ns) < CONNECTS and (len(times_ns) < 3 or sum(times_ns) < CONNECTS_NS):
        times_ns.append(await connect())
    return median(times_ns) / 1e6


async def _identify(
    client: _ProbeClient, server: str, host: str, models_answer: HttpResponse, version: HttpResponse
) -> tuple[str, list[str]]:
    """The name of the server's row, and the reasons for it as texts. `host`: the row that the host's name tells."""
    if server == "auto" and host:
        return host, [f"the host is {client.target.host}"]
    head = "\n".join(f"{name}: {value}" for name, value in models_answer.headers.items())
    texts = {"models": _text(models_answer), "head": head, "version": _text(version)}
    match = _match_signs(SERVERS.own, texts)
    if server != "auto":
        differs = match is not None and match[0] not in (server, "generic")
        return server, ["named by the user"] + (
            [f"but it looks like {match[0]}"] if match and differs else []
        )
    if not match:
        pages = (
            client.get_optional(client.target.beside(_PATHS[source])) for source in _FURTHER_SOURCES
        )
        texts |= zip(_FURTHER_SOURCES, map(_text, await asyncio.gather(*pages)), strict=True)
        match = _match_signs(SERVERS.own, texts) or _match_signs(
            tuple(SERVERS.plugin_rows()), texts
        )
    if match:
        name, where, text = match
        return name, [f"{_PATHS.get(where, '/models')} says {client.clean(text)[:80]}"]
    return "generic", ["nothing it says tells its make: only the common fields are sent"]


def _match_signs(
    rows: Sequence[ServerProfile], texts: Mapping[str, str]
) -> tuple[str, str, str] | None:
    """The first server whose sign is found; where, and the text that is the sign."""
    for where in DETECTION_SOURCES:
        detection_rules = [
            (sign, row) for row in rows for sign in row.detection_rules if sign.where == where
        ]
        for sign, row in sorted(detection_rules, key=lambda pair: pair[0].rank):
            if match := re.search(sign.pattern, texts.get(where, "")):
                return row.name, where, match.group().replace("\n", " ")
    return None


def _of_host(host: str) -> str:
    return next((row.name for row in SERVERS.own if host in row.hosts), "")


def _text(answer: HttpResponse) -> str:
    return answer.body.decode("utf-8", "replace") if answer.status == 200 else ""


def _rows(answer: HttpResponse) -> list[dict[str, Any]]:
    """The listed models whose names can be shown; [] where the answer is no list of models."""
    return [row for row in _listed(answer) if row["id"].isprintable()]


def _listed(answer: HttpResponse) -> list[dict[str, Any]]:
    """The listed models."""
    try:
        rows = decode_leniently(answer.body)["data"] if answer.status == 200 else []
    except (ValueError, KeyError, TypeError, RecursionError):
        rows = []
    rows = rows if isinstance(rows, list) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]


def _models(answer: HttpResponse) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(ids of all listed models, ids of those that are no adapters). An adapter names a listed parent."""
    rows = _rows(answer)
    ids = tuple(row["id"] for row in rows)
    return ids, tuple(row["id"] for row in rows if row.get("parent") not in ids)


def _max_context(answer: HttpResponse, model: str) -> int | None:
    """The context of a model by its row in the list; an adapter has that of its parent."""
    rows = {row["id"]: row for row in _rows(answer)}
    for row in (rows.get(model, {}), rows.get(str(rows.get(model, {}).get("parent")), {})):
        for name in CONTEXT_FIELDS:
            if tokens := token_count(row.get(name)):
                return tokens
    return None


def _default_model(
    models: tuple[str, ...],
    base_models: tuple[str, ...],
    models_answer: HttpResponse,
    server_profile: ServerProfile,
) -> str:
    """The model to use when the user names none. Raises TargetUnusable if that is not clear."""
    if len(base_models) == 1:
        return base_models[0]
    if models:
        raise TargetUnusable(
            "no_model",
            f"the server has {len(models)} models",
            f"choose with --model: {_shown_models(models)}",
        )
    if odd := len(_listed(models_answer)):
        what = f"{'the name' if odd == 1 else 'each name'} in the server's list of models has control characters"
        raise TargetUnusable(
            "no_model", what, "name the model with --model; this server's list cannot be shown"
        )
    status = models_answer.status
    if status >= 500:
        hint = (
            "is the server up? a proxy may answer for it. With --model NAME the list is not needed"
        )
        raise TargetUnusable(
            "no_model", f"the server answers {status} when asked for its models", hint
        )
    why = "lists no models" if status == 200 else f"answers {status} when asked for its models"
    path = "check the path of the URL, or " if status == 404 else ""
    hint = f"{path}name the model with --model" + (
        "" if server_profile.rejects_unknown_models else "; this server takes any name"
    )
    raise TargetUnusable("no_model", f"the server {why}, and none was named", hint)


def _shown_models(models: tuple[str, ...]) -> str:
    return ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")


def _about_model(error: str, model: str) -> bool:
    quoted = any(f"{mark}{model}{mark}" in error for mark in "'\"`")
    return quoted or bool(
        re.search(r"(?i)\b(?:model|deployment)\b.{0,80}\b(?:not|unknown|exist)", error)
    )


def _version(answer: HttpResponse) -> str:
    match = re.search(r'"version"\s*:\s*"([^"]{1,60})"', _text(answer))
    return shown(match[1]) if match else ""


def _template_overhead(
    inputs: Sequence[int | None], counts: Sequence[int]
) -> tuple[int | None, float | None]:
    """(tokens that the server adds to a prompt, its tokens per token of ours) from the counts of two prompts."""
    short, long = inputs
    if short is None or long is None or counts[0] == counts[1]:
        return None, None
    ratio = (long - short) / (counts[1] - counts[0])
    return round(short - ratio * counts[0]), ratio


def _tokens_per_event(reading: ResponseReader, usage: Usage) -> float | None:
    streamed_tokens = (usage.output or 0) - (usage.reasoning or 0)
    return (
        streamed_tokens / reading.output_events
        if streamed_tokens > 0 and reading.output_events
        else None
    )


def _warnings(
    server_profile: ServerProfile,
    asked_tokens: int,
    exact: bool | None,
    answer: ResponseReader,
    tokens_per_event: float | None,
) -> list[str]:
    """Return what the user should know of the longer generation, which requested `asked_tokens`."""
    warnings: list[str] = []
    usage = answer.usage()
    if usage.contradiction:
        warnings.append(
            f"its token counts contradict each other ({usage.contradiction}): they are not used"
        )
    if answer.output_is_hidden:
        where = answer.remark or "have output in fields that are not known here"
        warnings.append(f"its responses {where}: there is no time of the first token")
    if answer.usage_is_absurd:
        warnings.append(
            "its usage says a number of tokens that no answer can have: not believed, counted here instead"
        )
    elif usage.output is None:
        warnings.append(
            "its answers carry no usage: output tokens will be counted here, as an estimate"
        )
    if exact is False and server_profile.length_fields:
        asked = f"{asked_tokens} tokens were asked for and forced"
        warnings.append(f"{asked}, {usage.output} came: lengths are not exact here")
    elif not server_profile.length_fields:
        warnings.append(
            f"{server_profile.title} has no way to force the output length: answers may end early"
        )
    if tokens_per_event is not None and tokens_per_event > 1.5:
        warnings.append(
            "it sends several tokens per event: gaps between events are not inter-token latency"
        )
    return warnings
