"""What a target is, found out before the load: reachable, how far, what make, which model, what its answers can tell.

`probe` itself has no socket: it is given two functions and asks through them, so that an in-memory stand-in serves as
well as a network (`direct.py` has the pair for real ones). A handful of small requests, whatever the size of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, NoReturn

import msgspec

from ..dialects.body import body
from ..dialects.quirks import MAX_FIELDS, QUIRKS, Quirk
from ..dialects.reader import Flow, Reading, error_text
from ..dialects.sse import Decoder, EventTooLarge
from ..errors import TargetUnusable
from ..request import Request, Usage
from ..transport.target import Target

SIMULATION = "loadgen-sim"  # what the project's own simulated server calls itself in its `server` header
CONNECTS = 5  # how often the connect time is taken; fewer (at least 3) when they take longer than CONNECTS_NS in all
CONNECTS_NS = 300_000_000
ASKED_TOKENS = 8  # output of the longer generation probe: enough to see several tokens in one event
SAMPLES = ((" ".join(["hello"] * 4), 4), (" ".join(["hello"] * 36), 36))
"""Prompts of two lengths and their content tokens; a word that is one token in every vocabulary in use."""


class HttpAnswer(NamedTuple):
    """One HTTP answer: status, headers (names in lower case), the whole body."""

    status: int
    headers: dict[str, str]
    body: bytes


Headers = Sequence[tuple[str, str]]
Exchange = Callable[[str, str, Headers, bytes], Awaitable[HttpAnswer]]
"""(method, request target, headers, body) -> Answer. Raises TargetUnusable when there is no answer."""
Connect = Callable[[], Awaitable[int]]
"""() -> ns that a TCP connection took. Raises TargetUnusable."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found. None where the server said nothing about it."""

    target: Target
    server: str  # name of the row
    quirk: Quirk  # the row, corrected by what the probe saw
    model: str
    models: tuple[str, ...]  # what it lists
    version: str  # of the server, "" when it does not say
    evidence: tuple[str, ...]  # why it is taken for that make, in words
    rtt_ms: float  # median connect time with no load
    template_tokens: int | None  # what the server adds to a prompt's content: chat template, BOS
    token_ratio: float | None  # the server's tokens per token that we counted in SAMPLES; 1.0: the same vocabulary
    usage: bool | None  # answers of this kind (streamed or not) carry a token count
    exact: bool | None  # as many tokens came as were asked for; None: not counted
    tokens_per_event: float | None  # above 1: the server bundles, gaps between events are not ITL
    warnings: tuple[str, ...]
    simulated: bool = False  # it says of itself that there is no model behind it (`loadgen sim`)


class Sign(NamedTuple):
    """`pattern` in what `where` answered means `server`."""

    where: str  # models, head (of that answer), version, health, props, openapi
    pattern: str
    server: str


SIGNS = (
    Sign("models", r'"owned_by"\s*:\s*"tensorrt_llm"', "trtllm"),
    Sign("models", r'"owned_by"\s*:\s*"vllm"', "vllm"),
    Sign("models", r'"owned_by"\s*:\s*"sglang"', "sglang"),
    Sign("models", r'"owned_by"\s*:\s*"nvidia"[^}]*"context_window"', "dynamo"),
    Sign("models", r'"owned_by"\s*:\s*"llamacpp"', "llamacpp"),
    Sign("head", r"(?m)^server: llama\.cpp", "llamacpp"),
    Sign("head", r"(?m)^x-litellm-", "generic"),
    Sign("head", r"(?m)^(?:apim-request-id|x-ms-region):", "azure"),
    Sign("head", r"(?m)^openai-(?:version|organization|processing-ms):", "openai"),
    Sign("health", r"dyn://", "dynamo"),
    Sign("props", r'"default_generation_settings"', "llamacpp"),
    Sign(
        "openapi",
        r'"/(?:_internal/tokenize|energy_metrics|steady_clock_offset|kv_cache_events|cluster_info)"',
        "trtllm",
    ),
    Sign("openapi", r'"/(?:flush_cache|get_model_info|get_server_info)"', "sglang"),
    Sign("openapi", r'(?s)"/load_model"(?=.*"/reset")', "transformers"),
    Sign("openapi", r'"/v1/score"|"/tokenizer_info"|vLLM', "vllm"),
)
"""How `auto` decides, first match first. Sources: each server's own code, and answers recorded from running ones."""

_LATE = ("health", "props", "openapi")  # asked only when the list of models did not settle it
_BESIDE = {"version": "/version", "health": "/health", "props": "/props", "openapi": "/openapi.json"}
_HOSTS = (("api.openai.com", "openai"),)
TRIES = 4  # of a generation that fails on the server's side: one that fails half of them is refused once in eight runs


async def probe(
    target: Target,
    *,
    exchange: Exchange,
    connect: Connect,
    model: str | None = None,
    server: str = "auto",
    stream: bool = True,
    api_key: str | None = None,
    headers: Headers = (),
    extra_body: Mapping[str, Any] | None = None,
    samples: Sequence[tuple[str, int]] = SAMPLES,
) -> ProbeResult:
    """Find out what `target` is; two prompts are generated (1 and ASKED_TOKENS tokens), for token counts and bundling.

    `samples`: a short and a longer prompt with their content tokens. Raises TargetUnusable, with what to do about it,
    for whatever would make every request of the load fail; its text holds neither key nor password.
    """
    asking = _Asking(target, exchange, (*target.auth(api_key), *headers), api_key)
    rtt_ms = await _rtt_ms(connect)
    hosted = "azure" if target.azure else next((name for host, name in _HOSTS if target.host == host), "")
    listed, version = await asyncio.gather(
        asking.get(target.models), asking.quiet("" if hosted else target.beside(_BESIDE["version"]))
    )
    if listed.status in (401, 403) or (listed.status == 503 and not model):
        asking.refuse(listed, model or "", ())
    name, evidence = await _make(asking, server, hosted, listed, version)
    quirk = QUIRKS[name]
    (models, bases), warnings = _models(listed), []
    chosen = (
        model or target.deployment or await asking.pinned(quirk, listed, models) or _only(models, bases, listed, quirk)
    )
    if models and chosen not in models and not quirk.checks_model:
        warnings.append(f"{quirk.title} answers to any model name: it lists {_listing(models)}, not {chosen!r}")
    if server != "auto" and len(evidence) > 1:
        warnings.append(f"--server says {server}, {evidence[1]}")
    if listed.status >= 300:
        evidence.append(f"its list of models answers {listed.status}")

    async def readings(quirk: Quirk) -> list[Reading]:
        results = await asyncio.gather(
            *(
                asking.again(partial(asking.generate, quirk, chosen, models, text, tokens, stream, extra_body))
                for (text, _), tokens in zip(samples, (1, ASKED_TOKENS), strict=True)
            ),
            return_exceptions=True,  # both to their end, so that the same one is always the error shown
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Reading)]

    try:
        short, long = await readings(quirk)
    except _OtherLimit:
        quirk = msgspec.structs.replace(quirk, reasoning_max_field=MAX_FIELDS[1], max_field=MAX_FIELDS[1])
        evidence.append("it refuses max_tokens and takes max_completion_tokens")
        short, long = await readings(quirk)

    usages = short.usage(), long.usage()
    template, ratio = _overhead([usage.input for usage in usages], [count for _, count in samples])
    usage = usages[1].output is not None
    free = extra_body is not None and any(field in extra_body for field in MAX_FIELDS)
    exact = None if free or not usage else usages[1].output == ASKED_TOKENS
    bundle = _bundle(long, usages[1]) if stream else None
    warnings += _warnings(quirk, usage, exact, usages[1], bundle)
    if asking.failures:
        warnings.append(f"{len(asking.failures)} probing requests failed before one went well: {asking.failures[0]}")
    return ProbeResult(
        target=target,
        server=name,
        quirk=quirk,
        model=chosen,
        models=models,
        version=_version(version),
        evidence=tuple(evidence),
        rtt_ms=rtt_ms,
        template_tokens=template,
        token_ratio=ratio,
        usage=usage,
        exact=exact,
        tokens_per_event=bundle,
        warnings=tuple(warnings),
        simulated=listed.headers.get("server", "").startswith(SIMULATION),
    )


class _OtherLimit(Exception):
    """The server wants the other spelling of the output limit."""


class _Failed(TargetUnusable):
    """A request failed as the next one may not: a server that fails now and then is to be measured, not refused."""


class _Asking:
    """The questions of one probe, and what to say when an answer rules the target out."""

    def __init__(self, target: Target, exchange: Exchange, headers: Headers, api_key: str | None) -> None:
        self.target, self._exchange, self._headers = target, exchange, headers
        self._secrets = (api_key, *(value for _, value in headers))
        self._keyed = bool(api_key or target.basic)
        self.failures: list[str] = []  # of generations that were tried again

    async def get(self, path: str) -> HttpAnswer:
        return await self._exchange("GET", path, (("Accept", "application/json"), *self._headers), b"")

    async def quiet(self, path: str) -> HttpAnswer:
        """An answer that may as well be missing; `path` "" is not asked."""
        if path:
            with contextlib.suppress(TargetUnusable):
                return await self.get(path)
        return HttpAnswer(0, {}, b"")

    async def pinned(self, quirk: Quirk, listed: HttpAnswer, models: tuple[str, ...]) -> str:
        """The one model of a server that cannot list it but names it when asked for another, else ""."""
        if models or listed.status == 200 or not quirk.checks_model:
            return ""
        request = Request(id="probe", prompt="hello", max_tokens=1)
        sent = body(request, quirk, self.target.api, "unnamed", False)
        headers = (("Content-Type", "application/json"), *self._headers)
        answer = await self._exchange("POST", self.target.path, headers, sent)
        found = re.search(r"pinned to '([^']+)'", error_text(answer.body)) if answer.status == 400 else None
        return found[1] if found else ""

    async def again(self, ask: Callable[[], Awaitable[Reading]]) -> Reading:
        """Ask up to TRIES times, as long as it fails as the next one may not."""
        for _ in range(TRIES - 1):
            try:
                return await ask()
            except _Failed as error:
                self.failures.append(str(error))
        return await ask()

    async def generate(
        self,
        quirk: Quirk,
        model: str,
        models: tuple[str, ...],
        text: str,
        tokens: int,
        stream: bool,
        extra_body: Mapping[str, Any] | None,
    ) -> Reading:
        """Generate `tokens` tokens after `text`. Raises TargetUnusable unless the answer is ok as a load's must be."""
        chat = self.target.api == "chat"
        request = Request(
            id="probe",
            messages=[{"role": "user", "content": text}] if chat else None,
            prompt=None if chat else text,
            max_tokens=tokens,
        )
        sent = body(request, quirk, self.target.api, model, stream, extra_body=extra_body)
        headers = (("Content-Type", "application/json"), *self._headers)
        answer = await self._exchange("POST", self.target.path, headers, sent)
        reading = Reading(Flow())
        if answer.status != 200:
            said = error_text(answer.body)
            if answer.status == 400 and "max_completion_tokens" in said and quirk.max_field != MAX_FIELDS[1]:
                raise _OtherLimit
            if answer.status == 400 and "output limit was reached" in said:
                return reading  # a reasoning model that cannot even begin within so few tokens: it is there
            self.refuse(answer, model, models)
        streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
        if streamed:
            decoder = Decoder()
            try:
                events = [*decoder.feed(answer.body), *decoder.end()]
            except EventTooLarge as error:
                raise TargetUnusable(
                    f"{self.target.path} streams {error}", "check that this is the API's URL"
                ) from None
            reading.take(events, 0, 0)
        else:
            reading.take([answer.body], 0, 0)
        if failure := reading.judge(True, False, streamed):
            said = self._clean(failure.text)
            raise _Failed(f"a probe of {tokens} tokens failed: {failure.kind}: {said}", "see the server's log")
        return reading

    def refuse(self, answer: HttpAnswer, model: str, models: tuple[str, ...]) -> NoReturn:
        """Say in one error why nothing can work, and what to do."""
        status, where = answer.status, self.target.redacted
        said = self._clean(error_text(answer.body)) or "no text"
        words = f"{where} answers {status}: {said}"
        if status in (401, 403):
            hint = "check the key, and what it may be used for" if self._keyed else "it wants a key: set OPENAI_API_KEY"
        elif status == 407:
            hint = "a proxy is in between and wants a login"
        elif status in (400, 404, 422) and model and _about_model(said, model):
            words = f"{where} does not serve the model {model!r}: {said}"
            hint = f"choose with --model: {_listing(models)}" if models else "name one that it serves with --model"
        elif status in (404, 405):
            other = "completions" if self.target.api == "chat" else "chat"
            hint = f"check the path of the URL, or try --api {other}"
        elif status in (400, 413, 422):
            hint = (
                "if it names a field, remove it with --extra-body '{\"FIELD\": null}', or say what it is with --server"
            )
        elif status == 429:
            hint = "its rate limit is used up already; wait, or use another key"
        elif status == 503:
            hint = "it may still be loading its model: try again when it is ready"
        elif 300 <= status < 400:
            place = self._clean(answer.headers.get("location", "").partition("?")[0])
            words = f"{where} answers {status}, a redirect" + (f" to {place}" if place else "")
            hint = "give the URL it leads to"
        else:
            hint = "see the server's log"
        raise (_Failed if status >= 500 else TargetUnusable)(words, hint)

    def _clean(self, text: str) -> str:
        return self.target.redact(text, *self._secrets).strip()


async def _rtt_ms(connect: Connect) -> float:
    times: list[int] = []
    while len(times) < CONNECTS and (len(times) < 3 or sum(times) < CONNECTS_NS):
        times.append(await connect())
    return median(times) / 1e6


async def _make(
    asking: _Asking, server: str, hosted: str, listed: HttpAnswer, version: HttpAnswer
) -> tuple[str, list[str]]:
    """The name of the row, and why."""
    if server == "auto" and hosted:
        return hosted, [f"the host is {asking.target.host}"]
    said = {"models": _text(listed), "head": "\n".join(f"{name}: {value}" for name, value in listed.headers.items())}
    said["version"] = _text(version)
    found = _match(said)
    if server != "auto":
        other = found is not None and found[0].server not in (server, "generic")
        return server, ["named by the user"] + ([f"but it looks like {found[0].server}"] if found and other else [])
    if not found:
        late = await asyncio.gather(*(asking.quiet(asking.target.beside(_BESIDE[where])) for where in _LATE))
        said |= {where: _text(answer) for where, answer in zip(_LATE, late, strict=True)}
        found = _match(said)
    if found:
        sign, text = found
        return sign.server, [f"{_BESIDE.get(sign.where, '/models')} says {asking.target.redact(text)[:80]}"]
    return "generic", ["nothing it says tells its make: only the common fields are sent"]


def _match(said: Mapping[str, str]) -> tuple[Sign, str] | None:
    for sign in SIGNS:
        if found := re.search(sign.pattern, said.get(sign.where, "")):
            return sign, found.group().replace("\n", " ")
    return None


def _text(answer: HttpAnswer) -> str:
    return answer.body.decode("utf-8", "replace") if answer.status == 200 else ""


def _models(listed: HttpAnswer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids of the models listed, and those among them that are no adapters (which name a parent that is listed too)."""
    try:
        value = msgspec.json.decode(listed.body) if listed.status == 200 else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        value = None
    data = value.get("data") if isinstance(value, dict) else None
    rows = (
        [row for row in data if isinstance(row, dict) and isinstance(row.get("id"), str)]
        if isinstance(data, list)
        else []
    )
    ids = tuple(row["id"] for row in rows)
    return ids, tuple(row["id"] for row in rows if row.get("parent") not in ids)


def _only(models: tuple[str, ...], bases: tuple[str, ...], listed: HttpAnswer, quirk: Quirk) -> str:
    """The model to use when none was named."""
    if len(bases) == 1:
        return bases[0]
    if models:
        raise TargetUnusable(f"the server has {len(models)} models", f"choose with --model: {_listing(models)}")
    why = "lists no models" if listed.status == 200 else f"answers {listed.status} when asked for its models"
    path = "check the path of --url, or " if listed.status == 404 else ""
    hint = f"{path}name the model with --model" + ("" if quirk.checks_model else "; this server takes any name")
    raise TargetUnusable(f"the server {why}, and none was named", hint)


def _listing(models: tuple[str, ...]) -> str:
    return ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")


def _about_model(said: str, model: str) -> bool:
    quoted = any(f"{mark}{model}{mark}" in said for mark in "'\"`")
    return quoted or bool(re.search(r"(?i)\b(?:model|deployment)\b.{0,80}\b(?:not|unknown|exist)", said))


def _version(answer: HttpAnswer) -> str:
    found = re.search(r'"version"\s*:\s*"([^"]{1,60})"', _text(answer))
    return found[1] if found else ""


def _overhead(inputs: Sequence[int | None], counts: Sequence[int]) -> tuple[int | None, float | None]:
    """Two prompts, as the server and as we count them -> (tokens added to each, the server's tokens per our token)."""
    short, long = inputs
    if short is None or long is None or counts[0] == counts[1]:
        return None, None
    ratio = (long - short) / (counts[1] - counts[0])
    return round(short - ratio * counts[0]), ratio


def _bundle(reading: Reading, usage: Usage) -> float | None:
    streamed = (usage.output or 0) - (usage.reasoning or 0)
    return streamed / reading.output_events if streamed > 0 and reading.output_events else None


def _warnings(quirk: Quirk, usage: bool, exact: bool | None, counted: Usage, bundle: float | None) -> list[str]:
    found = []
    if not usage:
        found.append("its answers carry no usage: output tokens will be counted here, as an estimate")
    if exact is False and quirk.forces:
        found.append(
            f"{ASKED_TOKENS} tokens were asked for and forced, {counted.output} came: lengths are not exact here"
        )
    elif not quirk.forces:
        found.append(f"{quirk.title} has no way to force the output length: answers may end early")
    if bundle is not None and bundle > 1.5:
        found.append(f"it sends about {bundle:.1f} tokens per event: gaps between events are not inter-token latency")
    return found
