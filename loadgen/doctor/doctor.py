"""The preflight: examines a target and this host before a load, with about a dozen requests, or two.

IO only; `target_checks.py` and `host_checks.py` judge the answers. It does not stop at the first fault: it examines
what still can be examined and leaves out the rest.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec
from loadgen_sdk import compiled
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import HttpFetcher
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.redaction import redact
from loadgen_sdk.request import Completion, Request
from loadgen_sdk.transport.http1 import merge_headers
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.transport.target import Target, header_secrets
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.server_profiles import ServerProfile
from loadgen_sdk.wire_formats.usage import without_doubtful_counts

from loadgen.core.execution import backend, probing, resource_limits
from loadgen.core.execution.plan import Settings
from loadgen.core.requests import tokenizer as tokens
from loadgen.doctor import host_checks, plugin_checks, target_checks
from loadgen.doctor.host_checks import Machine
from loadgen.doctor.target_checks import FAULT, OK, TRIAL_TOKENS, Finding, Trial

CONNECTS = 5
PROMPTS = (16, 256)  # content tokens of the two prompts whose counts are compared
QUESTION = "Is the sky blue? Answer with one word: yes or no."
PAGES = ("/metrics", "/prometheus/metrics")
FORCING = ("ignore_eos", "min_tokens")  # tried on servers of unknown make
TIMER_ROUNDS = 200
REPLY_S = 60.0


async def examine(settings: Settings) -> list[Finding]:
    """All findings about the target of `settings` (its `url` is set) and this host, in the order of examination."""
    findings: list[Finding] = []
    try:
        await _examine_target(settings, findings.append)
    except TargetUnusable as error:
        meaning = (
            "requests of a load would end like this too" if findings else "there is nothing to ask"
        )
        problem, advice = _redacted(settings, str(error)), _redacted(settings, error.hint)
        findings.append(Finding("target", FAULT, problem, meaning, advice, error.code))
    return [*findings, *host_checks.host(await machine()), *plugin_checks.findings()]


def failed(findings: list[Finding]) -> bool:
    """Whether a load cannot work at all."""
    return any(finding.state == FAULT for finding in findings)


def _redacted(settings: Settings, text: str) -> str:
    return redact(
        text, [secret for secret in (settings.api_key, *header_secrets(settings.headers)) if secret]
    )


async def _examine_target(settings: Settings, report: Callable[[Finding], None]) -> None:
    assert settings.url is not None
    target = Target.parse(
        settings.url,
        api=settings.api,
        server=None if settings.server == "auto" else settings.server,
    )
    context = settings.tls.context() if target.tls else None
    fetcher = HttpFetcher(target, context, timeout_s=REPLY_S)
    started_ns = monotonic_ns()
    await fetcher.connect()  # resolves the name, and raises with the reason where it cannot
    addresses = await _addresses(target)
    report(target_checks.name(target.host, addresses, (monotonic_ns() - started_ns) / 1e6))
    report(target_checks.connect([await fetcher.connect() / 1e6 for _ in range(CONNECTS)]))
    has_key = bool(settings.api_key or target.basic)
    headers = (("Accept", "application/json"), *settings.headers)
    if context is not None:
        report(await _handshake(target, context, settings.tls.verify))
    model_list = await fetcher.send_request(
        "GET",
        target.models_path,
        merge_headers(target.auth_headers(settings.api_key), headers),
        b"",
    )
    clock_finding = target_checks.wall_clock(model_list.headers.get("date", ""), datetime.now(UTC))
    without_key = (
        await fetcher.send_request("GET", target.models_path, headers, b"") if has_key else None
    )
    report(
        verdict := target_checks.auth(
            has_key, model_list.status, without_key.status if without_key else None
        )
    )
    if verdict.state == FAULT:
        return
    probe_result, long_prompt = await _probe(settings, target, fetcher)
    report(target_checks.models(probe_result))
    report(target_checks.context(probe_result))
    report(target_checks.make(probe_result))
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    report(target_checks.tokenizer(probe_result, tokenizer.name, tokenizer.tag == "tokenizer"))
    if settings.values:
        report(await _answer_of_values(settings, probe_result))
        pages = {
            path: await _optional_page(fetcher, target, headers, settings, path) for path in PAGES
        }
        report(target_checks.metrics_pages(pages))
        return
    report(target_checks.usage(probe_result, settings.stream))
    trials = await _trials(settings, probe_result, long_prompt)
    has_no_force = settings.api in ("responses", "messages")  # neither has a field for it
    server_profile = (
        msgspec.structs.replace(probe_result.server_profile, length_fields=())
        if has_no_force
        else probe_result.server_profile
    )
    report(target_checks.forced(server_profile, trials.forced, trials.free, trials.tried))
    if settings.stream and (first := target_checks.first_token([trials.forced, trials.free])):
        report(first)
    if settings.stream:
        report(target_checks.streaming(*await _answers(settings, probe_result, trials)))
    report(target_checks.cache(trials.again, round(PROMPTS[1] * (probe_result.token_ratio or 1))))
    report(target_checks.keep_alive(trials.reused))
    report(target_checks.stamps(trials.free))
    if limit := target_checks.rate_limit({**model_list.headers, **trials.free.headers}):
        report(limit)
    pages = {path: await _optional_page(fetcher, target, headers, settings, path) for path in PAGES}
    report(target_checks.metrics_pages(pages))
    if clock_finding is not None:
        report(clock_finding)


async def _addresses(target: Target) -> list[str]:
    rows = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, proto=6)  # TCP
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


async def _handshake(target: Target, context: Any, verify: bool) -> Finding:
    """Open one more connection, for the TLS version, the certificate and the handshake time."""
    started_ns = monotonic_ns()
    try:
        async with asyncio.timeout(10):
            host = target.host
            _, writer = await asyncio.open_connection(
                host, target.port, ssl=context, server_hostname=host
            )
    except (
        OSError,
        TimeoutError,
    ):  # the next request of the fetcher fails the same way and reports the reason
        return Finding(
            "tls",
            target_checks.UNKNOWN,
            "no handshake",
            "nothing can be asked over this connection",
        )
    took_ms = (monotonic_ns() - started_ns) / 1e6
    session = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    now = datetime.now(UTC)
    not_after = (session.getpeercert() or {}).get("notAfter")
    expires = (
        datetime.strptime(not_after, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC)
        if not_after
        else None
    )
    return target_checks.tls(session.version() or "TLS", verify, expires, now, took_ms)


async def _probe(
    settings: Settings, target: Target, fetcher: HttpFetcher
) -> tuple[ProbeResult, str]:
    """The same probe as before a run, with prompts made from our tokenizer's words; and the longer prompt."""
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    samples = probing.random_samples(tokenizer, PROMPTS)
    longer_prompt, _ = samples[1]
    return await probing.probe_target(settings, target, fetcher, samples), longer_prompt


class _Trials(msgspec.Struct, frozen=True):
    forced: Trial
    free: Trial
    again: Trial
    reused: bool  # whether any request used an open connection; a spare connection may serve the first ones
    tried: str


async def _trials(settings: Settings, probe_result: ProbeResult, long_prompt: str) -> _Trials:
    """Send the question with forced and with free length, and the probe's longer prompt again."""
    server_profile, tried = probe_result.server_profile, ""
    if not server_profile.length_fields and probe_result.server == "generic":
        tried = " and ".join(FORCING)
        server_profile = msgspec.structs.replace(server_profile, length_fields=FORCING)
    [forced] = await _send_trials(
        settings, probe_result, server_profile, [(QUESTION, TRIAL_TOKENS, True)]
    )
    questions = [(QUESTION, TRIAL_TOKENS, False), (long_prompt, 8, False), (QUESTION, 1, False)]
    free = await _send_trials(settings, probe_result, probe_result.server_profile, questions)
    return _Trials(forced, free[0], free[1], any(trial.reused for trial in free), tried)


async def _answers(
    settings: Settings, probe_result: ProbeResult, trials: _Trials
) -> tuple[list[Trial], list[Trial]]:
    """A long answer; where its events came together, more of them in turns with short ones, until one's come singly."""
    shorts: list[Trial] = []
    longs = [trials.forced if not trials.forced.failure else trials.free]
    is_exact = not trials.forced.failure
    server_profile = (
        msgspec.structs.replace(probe_result.server_profile, length_fields=FORCING)
        if trials.tried
        else probe_result.server_profile
    )
    while target_checks.lumped(longs[-1]) and len(shorts) < target_checks.PAIRS:
        questions = [(QUESTION, 1, False), (QUESTION, TRIAL_TOKENS, is_exact)]
        short, long = await _send_trials(settings, probe_result, server_profile, questions)
        shorts.append(short)
        longs.append(long)
    return longs, shorts


async def _answer_of_values(settings: Settings, probe_result: ProbeResult) -> Finding:
    """One text to embed, or a query with one document, twice: whether numbers come, and how soon."""
    trials = await _send_trials(
        settings, probe_result, probe_result.server_profile, [(QUESTION, 1, False)] * 2
    )
    return target_checks.values(settings.api, trials)


async def _send_trials(
    settings: Settings,
    probe_result: ProbeResult,
    server_profile: ServerProfile,
    questions: list[tuple[str, int, bool]],
) -> list[Trial]:
    """Send questions one after the other with one client. Each is (text, max tokens, whether to force the length)."""
    options = probing.client_options(settings, probe_result) | {
        "server_profile": server_profile,
        "keep_headers": True,
    }
    reply_ns = int(REPLY_S * 1e9)
    client = Pool(probe_result.target, **options, timeout_ns=reply_ns, stall_timeout_ns=reply_ns)
    try:
        await client.open()
        return [await _send_trial(settings, client, *question) for question in questions]
    finally:
        client.close()


async def _send_trial(
    settings: Settings, client: Pool, text: str, max_tokens: int, is_exact: bool
) -> Trial:
    chat = client.target.api == "chat"
    request = Request(
        id="doctor",
        messages=[{"role": "user", "content": text}] if chat else None,
        prompt=None if chat else text,
        max_tokens=max_tokens,
        exact_output=is_exact,
    )
    future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    instants: list[int] = []
    body, sink = client.prepare(request), lambda _text, _reasoning, at: instants.append(at)
    client.send(request, body, monotonic_ns(), future.set_result, EventTimeline(), sink=sink)
    late_ms = 0.0
    while not future.done():
        started_ns = monotonic_ns()
        await asyncio.wait((future,), timeout=0.001)
        late_ms = max(late_ms, (monotonic_ns() - started_ns) / 1e6 - 1.0)
    completion = await future
    failed = completion.failure
    failure = (
        _redacted(settings, client.target.redact(f"{failed.kind}: {failed.text}"))
        if failed is not None
        else ""
    )
    usage = without_doubtful_counts(completion.usage)
    return Trial(
        failure=failure[:200],
        asked=max_tokens,
        output=usage.output,
        cached=usage.cached,
        instants_ns=tuple(instants),
        sent_ns=completion.sent,
        late_ms=late_ms,
        head_ns=completion.first_byte,
        reused=completion.reused,
        kernel_stamp=completion.kernel_stamp,
        headers=completion.headers or {},
    )


async def _optional_page(
    fetcher: HttpFetcher, target: Target, headers: Any, settings: Settings, path: str
) -> HttpResponse:
    """Fetch a page that may be missing or too large; status 0 where it cannot be fetched."""
    try:
        return await fetcher.send_request(
            "GET",
            target.server_path(path),
            merge_headers(target.auth_headers(settings.api_key), headers),
            b"",
        )
    except TargetUnusable:
        return HttpResponse(0, {}, b"")


# -- this host ---------------------------------------------------------------------------------------------------


async def machine() -> Machine:
    """Facts about this host. Takes about a quarter of a second to test its timer."""
    lateness_ns = []
    for _ in range(TIMER_ROUNDS):
        due_ns = monotonic_ns() + 1_000_000
        await asyncio.sleep(0.001)
        lateness_ns.append(monotonic_ns() - due_ns)
    started_ns = monotonic_ns()
    for _ in range(10_000):
        monotonic_ns()
    reading_ns = (monotonic_ns() - started_ns) / 10_000
    limits = resource_limits.read_machine_limits()
    names = ("http_proxy", "https_proxy", "all_proxy")
    return Machine(
        clock=_file_text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_read_ns=reading_ns,
        timer_late_ms=max(0.0, sorted(lateness_ns)[int(len(lateness_ns) * 0.99)] / 1e6),
        cpus=resource_limits.count_cpus(),
        cpu_quota=host_checks.cpu_quota(_file_text),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        governor=_file_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        files=limits.open_files,
        ports=limits.local_ports,
        not_compiled=compiled.MISSING,
        proxies=tuple(name for name in (*names, *map(str.upper, names)) if os.environ.get(name)),
    )


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""


def check_host() -> tuple[str, list[Finding]]:
    """Return a title for the report and the findings about this host and the plug-ins."""
    title = f"doctor: this host, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    facts = asyncio.run(machine())
    return title, [*host_checks.host(facts), *plugin_checks.findings()]


def run(settings: Settings) -> tuple[str, list[Finding]]:
    """Examine the target. Returns a title for the report and the findings."""
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
    row, known = settings.backend, backend.known(settings)
    if row.virtual and known is not None:
        meaning = "it runs within the command, in virtual time: nothing is connected to, and this host does not matter"
        title = f"doctor: {known.name} (virtual time, not a real server), {timestamp}"
        return title, [Finding("target", OK, known.description, meaning), *plugin_checks.findings()]
    import uvloop

    with (
        backend.serving(settings) as served,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        findings = runner.run(examine(served))
    assert served.url is not None
    try:
        shown = Target.parse(served.url, api=served.api).redacted
    except TargetUnusable:
        shown = "the URL"
    kind = f" ({row.shown}, not a real server)" if row.simulated else ""
    return f"doctor: {shown}{kind}, {timestamp}", findings
