"""The preflight: everything that can be asked of a target and of this host before a load, in about a dozen requests.

IO only; what the answers mean is `findings.py`. It never stops at the first trouble: whatever can still be looked at
is, and what cannot be because of an earlier fault is left out.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec
from loadgen_sdk.app.client import Client
from loadgen_sdk.dialects.quirks import Quirk
from loadgen_sdk.dialects.reader import Flow
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import Fetcher
from loadgen_sdk.probe.probe import HttpAnswer, ProbeResult, probe
from loadgen_sdk.request import Completion, Request
from loadgen_sdk.transport.target import Target
from loadgen_sdk.transport.wire import raise_file_limit

from loadgen import seeds
from loadgen.execution.plan import Settings
from loadgen.preflight import host_checks, target_checks
from loadgen.preflight.host_checks import Machine
from loadgen.preflight.target_checks import FAULT, OK, TRIAL_TOKENS, Finding, Trial
from loadgen.requests import tokenizer as tokens
from loadgen.sim.presets.preset import load_preset

CONNECTS = 5
PROMPTS = (16, 256)  # content tokens of the two prompts whose counts are compared
QUESTION = "Is the sky blue? Answer with one word: yes or no."
PAGES = ("/metrics", "/prometheus/metrics")
FORCING = ("ignore_eos", "min_tokens")  # tried on servers of unknown make
TIMER_ROUNDS = 200
REPLY_S = 60.0


async def examine(settings: Settings) -> list[Finding]:
    """Everything about the target of `settings` (its `url` is set) and about this host, in the order of asking."""
    found: list[Finding] = []
    try:
        await _target(settings, found.append)
    except TargetUnusable as error:
        meaning = "no request of a load would succeed" if found else "there is nothing to ask"
        found.append(Finding("target", FAULT, _clean(settings, str(error)), meaning, _clean(settings, error.hint)))
    return [*found, *host_checks.host(await machine())]


def failed(found: list[Finding]) -> bool:
    """Whether a load cannot work at all."""
    return any(one.state == FAULT for one in found)


def _clean(settings: Settings, text: str) -> str:
    from loadgen_sdk.transport.target import redact

    return redact(text, [secret for secret in (settings.api_key, *(value for _, value in settings.headers)) if secret])


async def _target(settings: Settings, tell: Callable[[Finding], None]) -> None:
    assert settings.url is not None
    target = Target.parse(settings.url, api=settings.api, server=None if settings.server == "auto" else settings.server)
    context = settings.tls.context() if target.tls else None
    direct = Fetcher(target, context, timeout_s=REPLY_S)
    begun = monotonic_ns()
    await direct.connect()  # resolves, and says why where it cannot
    addresses = await _addresses(target)
    tell(target_checks.name(target.host, addresses, (monotonic_ns() - begun) / 1e6))
    tell(target_checks.connect([await direct.connect() / 1e6 for _ in range(CONNECTS)]))
    keyed = bool(settings.api_key or target.basic)
    head = (("Accept", "application/json"), *settings.headers)
    if context is not None:
        tell(await _handshake(target, context, settings.tls.verify))
    listed = await direct.exchange("GET", target.models, (*head, *target.auth(settings.api_key)), b"")
    clock = target_checks.wall_clock(listed.headers.get("date", ""), datetime.now(UTC))
    bare = await direct.exchange("GET", target.models, head, b"") if keyed else None
    tell(verdict := target_checks.auth(keyed, listed.status, bare.status if bare else None))
    if verdict.state == FAULT:
        return
    found, words = await _probe(settings, target, direct)
    tell(target_checks.models(found))
    tell(target_checks.make(found))
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    tell(target_checks.tokenizer(found, tokenizer.name, tokenizer.tag == "tokenizer"))
    tell(target_checks.usage(found, settings.stream))
    trials = await _trials(settings, found, words)
    tell(target_checks.forced(found.quirk, trials.forced, trials.free, trials.tried))
    if settings.stream and (first := target_checks.first_token([trials.forced, trials.free])):
        tell(first)
    if settings.stream:
        tell(target_checks.streaming(trials.forced if not trials.forced.failure else trials.free))
    tell(target_checks.cache(trials.again, round(PROMPTS[1] * (found.token_ratio or 1))))
    tell(target_checks.keep_alive(trials.reused))
    tell(target_checks.stamps(trials.free))
    if limit := target_checks.rate_limit({**listed.headers, **trials.free.headers}):
        tell(limit)
    tell(target_checks.metrics_pages({path: await _quiet(direct, target, head, settings, path) for path in PAGES}))
    if clock is not None:
        tell(clock)


async def _addresses(target: Target) -> list[str]:
    rows = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, proto=6)  # TCP
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


async def _handshake(target: Target, context: Any, verify: bool) -> Finding:
    """One more connection, for what the handshake agreed on."""
    begun = monotonic_ns()
    try:
        async with asyncio.timeout(10):
            _, writer = await asyncio.open_connection(
                target.host, target.port, ssl=context, server_hostname=target.host
            )
    except (OSError, TimeoutError):  # Direct has the words for it, and is asked next
        return Finding("tls", target_checks.UNKNOWN, "no handshake", "nothing can be asked over this connection")
    took_ms = (monotonic_ns() - begun) / 1e6
    session = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    now = datetime.now(UTC)
    until = (session.getpeercert() or {}).get("notAfter")
    expires = datetime.strptime(until, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC) if until else None
    return target_checks.tls(session.version() or "TLS", verify, expires, now, took_ms)


async def _probe(settings: Settings, target: Target, direct: Fetcher) -> tuple[ProbeResult, str]:
    """The probe of a run, with prompts of our tokenizer's own words; and the longer of them."""
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    texts = [_text(tokenizer, n) for n in PROMPTS]
    found = await probe(
        target,
        exchange=direct.exchange,
        connect=direct.connect,
        model=settings.model,
        server=settings.server,
        stream=settings.stream,
        api_key=settings.api_key,
        headers=settings.headers,
        extra_body=settings.extra_body,
        samples=[(text, tokenizer.count(text)) for text in texts],
    )
    return found, texts[1]


def _text(tokenizer: tokens.Tokenizer, n: int) -> str:
    """About n tokens that no cache has seen."""
    draw = seeds.stream(seeds.fresh(), "doctor")
    first = tokenizer.starts[int(draw.integers(len(tokenizer.starts)))]
    return first + "".join(tokenizer.words[int(i)] for i in draw.integers(len(tokenizer.words), size=n - 1))


class _Trials(msgspec.Struct, frozen=True):
    forced: Trial
    free: Trial
    again: Trial
    reused: bool  # a connection served more than once; a spare one may have come first
    tried: str


async def _trials(settings: Settings, found: ProbeResult, words: str) -> _Trials:
    """The question forced and free, and the probe's longer prompt again; one client, one connection where it holds."""
    quirk, tried = found.quirk, ""
    if not quirk.forces and found.server == "generic":
        tried = " and ".join(FORCING)
        quirk = msgspec.structs.replace(
            quirk, chat=(*quirk.chat, *FORCING), completions=(*quirk.completions, *FORCING), forces=FORCING
        )
    first = await _ask(settings, found, quirk, [(QUESTION, TRIAL_TOKENS, True)])
    rest = await _ask(
        settings, found, found.quirk, [(QUESTION, TRIAL_TOKENS, False), (words, 8, False), (QUESTION, 1, False)]
    )
    return _Trials(first[0], rest[0], rest[1], any(trial.reused for trial in rest), tried)


async def _ask(settings: Settings, found: ProbeResult, quirk: Quirk, asks: list[tuple[str, int, bool]]) -> list[Trial]:
    """One after the other over one client: (text, tokens, forced)."""
    client = Client(
        found.target,
        model=found.model,
        quirk=quirk,
        stream=settings.stream,
        api_key=settings.api_key,
        headers=settings.headers,
        extra_body=settings.extra_body,
        timeout_ns=int(REPLY_S * 1e9),
        stall_timeout_ns=int(REPLY_S * 1e9),
        tls=settings.tls,
        keep_headers=True,
    )
    async with client:
        return [await _one(settings, client, *ask) for ask in asks]


async def _one(settings: Settings, client: Client, text: str, asked: int, exact: bool) -> Trial:
    chat = client.target.api == "chat"
    request = Request(
        id="doctor",
        messages=[{"role": "user", "content": text}] if chat else None,
        prompt=None if chat else text,
        max_tokens=asked,
        exact_output=exact,
    )
    future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    flow = Flow()
    instants: list[int] = []
    client.send(
        request,
        client.prepare(request),
        monotonic_ns(),
        future.set_result,
        flow,
        sink=lambda _text, _reasoning, at: instants.append(at),
    )
    done = await future
    failure = done.failure
    said = "" if failure is None else _clean(settings, client.target.redact(f"{failure.kind}: {failure.text}"))
    return Trial(
        failure=said[:200],
        asked=asked,
        output=done.usage.output,
        cached=done.usage.cached,
        instants_ns=tuple(instants),
        sent_ns=done.sent,
        head_ns=done.first_byte,
        reused=done.reused,
        kernel_stamp=done.kernel_stamp,
        headers=done.headers or {},
    )


async def _quiet(direct: Fetcher, target: Target, head: Any, settings: Settings, path: str) -> HttpAnswer:
    """A page that may as well be missing, or too large."""
    try:
        return await direct.exchange("GET", target.beside(path), (*head, *target.auth(settings.api_key)), b"")
    except TargetUnusable:
        return HttpAnswer(0, {}, b"")


# -- this host ---------------------------------------------------------------------------------------------------


async def machine() -> Machine:
    """What this host tells of itself; takes about a quarter of a second, for its timer."""
    late = []
    for _ in range(TIMER_ROUNDS):
        due = monotonic_ns() + 1_000_000
        await asyncio.sleep(0.001)
        late.append(monotonic_ns() - due)
    begun = monotonic_ns()
    for _ in range(10_000):
        monotonic_ns()
    reading_ns = (monotonic_ns() - begun) / 10_000
    names = ("http_proxy", "https_proxy", "all_proxy")
    return Machine(
        clock=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_read_ns=reading_ns,
        timer_late_ms=max(0.0, sorted(late)[int(len(late) * 0.99)] / 1e6),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        cpu_quota=_quota(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        governor=_read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        files=_files(),
        ports=_ports(),
        proxies=tuple(name for name in (*names, *map(str.upper, names)) if os.environ.get(name)),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _quota() -> float | None:
    """Cores that the control group allows; version 2, at the root that a container sees."""
    words = _read("/sys/fs/cgroup/cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _files() -> int | None:
    try:
        return raise_file_limit(0)
    except ImportError:  # no such limit on this system
        return None


def _ports() -> int | None:
    words = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return int(words[1]) - int(words[0]) + 1 if len(words) == 2 else None


def run(settings: Settings) -> tuple[str, list[Finding]]:
    """Examine, against the embedded endpoint when there is no URL; returns what was examined, in words."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
    if settings.url is not None and settings.url.startswith("sim:"):
        preset = load_preset(settings.url.removeprefix("sim:"), "--url sim:")
        meaning = "it runs within the command, in virtual time: nothing is connected to, and this host does not matter"
        title = f"doctor: simulated: {preset.name} (virtual time, not a real server), {stamp}"
        return title, [Finding("target", OK, preset.words, meaning)]
    import uvloop

    simulation = None
    if settings.url is None:
        from loadgen.sim.server import embedded
        from loadgen.sim.server.options import Options

        simulation = embedded.start(Options(**settings.embedded))
        settings = replace(settings, url=simulation.url)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(examine(settings))
    finally:
        if simulation is not None:
            simulation.stop()
    assert settings.url is not None
    try:
        shown = Target.parse(settings.url, api=settings.api).redacted
    except TargetUnusable:
        shown = "the URL"
    kind = " (embedded simulation, not a real server)" if simulation is not None else ""
    return f"doctor: {shown}{kind}, {stamp}", found
