"""Examine a target and this host before a run, with about a dozen requests.

After an error, the examination skips what it cannot examine any more and continues with the rest.
`target_checks.py` and `host_checks.py` judge what was observed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from ssl import SSLContext
from time import monotonic_ns
from typing import NamedTuple

import msgspec
from loadgen_sdk import compiled
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.fetch import HttpFetcher
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.http1 import merge_headers
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.server_profiles import Api

from loadgen.core import child_process
from loadgen.core.execution import backend, probing, resource_limits
from loadgen.core.execution.plan import Settings
from loadgen.core.requests.tokenizer import Tokenizer, load_tokenizer
from loadgen.doctor import host_checks, plugin_checks, target_checks
from loadgen.doctor.findings import FAULT, OK, UNKNOWN, Finding
from loadgen.doctor.host_checks import Machine
from loadgen.doctor.trials import LengthTrials, TrialSender, redact_secrets

CONNECT_COUNT = 5
PROMPT_TOKENS = (16, 256)
"""Tokens of the two prompts whose counts are compared."""
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
TIMEOUT_S = 60.0
HANDSHAKE_TIMEOUT_S = 10.0
TIMER_ROUNDS = 200
TIMER_S = 0.001
TIMER_QUANTILE = 0.99
CLOCK_READINGS = 10_000
NS_PER_MS = 1e6
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
APIS_WITHOUT_FORCED_LENGTH = ("responses", "messages")
TIME_FORMAT = "%Y-%m-%d %H:%M:%S %z"
CERTIFICATE_TIME_FORMAT = "%b %d %H:%M:%S %Y %Z"
"""The format of times in the certificates that the `ssl` module returns."""


class Examination(NamedTuple):
    """The title of a report, and the findings in the order of the examination."""

    title: str
    findings: list[Finding]


def examine_target(settings: Settings) -> Examination:
    """Examine the target of the settings, this host and the plug-ins, and return a titled report.

    A simulated server in virtual time runs inside this process: it has no connection, and the speed
    of this host does not affect it, so only the plug-ins are examined.
    """
    timestamp = time.strftime(TIME_FORMAT)
    target_backend = settings.backend

    simulated_target = backend.known(settings)
    if target_backend.virtual and simulated_target is not None:
        meaning = (
            "the simulated server runs in virtual time inside loadgen, so "
            "network and host are not checked"
        )
        title = f"doctor: {simulated_target.name} (virtual time, not a real server), {timestamp}"
        finding = Finding("target", OK, simulated_target.description, meaning)
        return Examination(title, [finding, *plugin_checks.check_plugins()])

    import uvloop

    # A server that is simulated in real time is started here, and stopped at the end.
    with (
        backend.running_server(settings) as served,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        findings = runner.run(collect_findings(served))

    assert served.url is not None
    title = f"doctor: {_redact_url(served.url, served.api)}"
    if target_backend.simulated:
        title += f" ({target_backend.name_format}, not a real server)"

    return Examination(f"{title}, {timestamp}", findings)


def _redact_url(url: str, api: Api) -> str:
    """Return a URL without its password.

    An invalid URL may contain the password anywhere, so nothing of it is shown.
    """
    try:
        return Target.parse(url, api=api).redacted
    except TargetUnusable:
        return "the URL"


def examine_host() -> Examination:
    """Examine this host and the plug-ins."""
    facts = asyncio.run(inspect_machine())
    findings = [*host_checks.check_host(facts), *plugin_checks.check_plugins()]
    return Examination(f"doctor: this host, {time.strftime(TIME_FORMAT)}", findings)


def has_fault(findings: list[Finding]) -> bool:
    """Return True if a load cannot work at all, because a request was refused or failed."""
    return any(finding.state == FAULT for finding in findings)


async def collect_findings(settings: Settings) -> list[Finding]:
    """Return all findings about the target of the settings, this host and the plug-ins.

    A target that cannot be used is a finding too, so that the host is examined all the same.
    """
    findings: list[Finding] = []
    try:
        await _TargetChecker(settings, findings).run()
    except TargetUnusable as error:
        # With earlier findings, the connection worked and a request failed.
        meaning = "no request could be sent"
        if findings:
            meaning = "the requests of a run would fail like this"

        problem = redact_secrets(settings, str(error))
        advice = redact_secrets(settings, error.hint)
        findings.append(
            Finding(
                check="target",
                state=FAULT,
                observed=problem,
                meaning=meaning,
                advice=advice,
                code=error.code,
            )
        )

    return [
        *findings,
        *host_checks.check_host(await inspect_machine()),
        *plugin_checks.check_plugins(),
    ]


class _TargetChecker:
    """Checks one target, step by step, and adds a finding for each check.

    Args:
        settings: The settings of the target.
        findings: The list that findings are added to.

    Raises:
        TargetUnusable: The URL is not valid.
    """

    def __init__(self, settings: Settings, findings: list[Finding]) -> None:
        """Parse the URL and prepare the headers, with and without the API key."""
        self.findings = findings
        assert settings.url is not None
        self._settings = settings
        self._target = Target.parse(
            settings.url,
            api=settings.api,
            server=None if settings.server == "auto" else settings.server,
        )
        self._tls_context = settings.tls.context() if self._target.tls else None
        self._fetcher = HttpFetcher(self._target, self._tls_context, timeout_s=TIMEOUT_S)
        self._headers = (("Accept", "application/json"), *settings.headers)
        self._authorized_headers = merge_headers(
            self._target.auth_headers(settings.api_key), self._headers
        )

    async def run(self) -> None:
        """Check the target: connection, API key, probe, trial requests and metrics pages.

        The checks end early if the server refuses the API key.

        Raises:
            TargetUnusable: The target cannot be used. Findings so far are kept.
        """
        await self._check_connection()
        model_list_response = await self._fetch(self._target.models_path)
        received_at = datetime.now(UTC)
        auth_finding = await self._check_auth(model_list_response)
        self.findings.append(auth_finding)
        if auth_finding.state == FAULT:
            return

        tokenizer = load_tokenizer(self._settings.tokenizer)
        prompts = probing.random_samples(tokenizer, PROMPT_TOKENS)
        probe_result = await probing.probe_target(
            self._settings, self._target, self._fetcher, prompts
        )
        self._check_probe_result(probe_result, tokenizer)

        sender = TrialSender(self._settings, probe_result)
        returns_numbers = self._settings.returns_numbers  # embeddings and scores, instead of text
        if returns_numbers:
            trials = await sender.send_number_trials()
            self.findings.append(target_checks.check_number_responses(self._settings.api, trials))
            await self._check_metrics_pages()
            return

        _short_prompt, (long_prompt, _token_count) = prompts
        await self._check_text_responses(sender, probe_result, long_prompt, model_list_response)
        await self._check_metrics_pages()
        date_header = model_list_response.headers.get("date", "")

        clock_finding = target_checks.check_wall_clock(date_header, received_at)
        if clock_finding is not None:
            self.findings.append(clock_finding)

    def _check_probe_result(self, probe_result: ProbeResult, tokenizer: Tokenizer) -> None:
        """Add the findings that follow from the probe alone, without trial requests."""
        is_user_tokenizer = tokenizer.tag == "tokenizer"
        self.findings += [
            target_checks.check_model(probe_result),
            target_checks.check_context_length(probe_result),
            target_checks.check_server_profile(probe_result),
            target_checks.check_tokenizer(probe_result, tokenizer.name, is_user_tokenizer),
        ]

    async def _check_text_responses(
        self,
        sender: TrialSender,
        probe_result: ProbeResult,
        long_prompt: str,
        model_list_response: HttpResponse,
    ) -> None:
        """Send the trial requests of an API that generates text, and judge the responses.

        Args:
            sender: Sends the trial requests.
            probe_result: What is known about the server.
            long_prompt: The longer prompt of the probe, which is sent again to test the cache.
            model_list_response: The HTTP response with the list of models, which may have rate
                limits in its headers.
        """
        self.findings.append(target_checks.check_usage(probe_result, self._settings.stream))
        length_trials = await sender.send_length_trials(long_prompt)
        self._check_lengths(probe_result, length_trials)

        if self._settings.stream:
            stream_trials = await sender.send_stream_trials(length_trials)
            self.findings.append(
                target_checks.check_streaming(stream_trials.long, stream_trials.short)
            )

        self._check_server_properties(probe_result, length_trials, model_list_response)

    async def _check_connection(self) -> None:
        """Judge name resolution, connect times and, with https, the TLS handshake.

        Raises:
            TargetUnusable: The target does not accept connections.
        """
        started_ns = monotonic_ns()

        # This resolves the name, and raises with the reason if that fails.
        await self._fetcher.connect()
        addresses = await self._resolve_host_name()
        resolve_ms = (monotonic_ns() - started_ns) / NS_PER_MS
        self.findings.append(
            target_checks.check_name_resolution(self._target.host, addresses, resolve_ms)
        )
        times_ms = [await self._fetcher.connect() / NS_PER_MS for _ in range(CONNECT_COUNT)]
        self.findings.append(target_checks.check_connect_time(times_ms))

        if self._tls_context is not None:
            self.findings.append(await self._check_tls(self._tls_context))

    async def _resolve_host_name(self) -> list[str]:
        """Return the addresses of the target's host name, each once, in the resolver's order."""
        loop = asyncio.get_running_loop()
        address_infos = await loop.getaddrinfo(
            self._target.host, self._target.port, proto=socket.IPPROTO_TCP
        )
        addresses = [
            str(socket_address[0])
            for _family, _type, _protocol, _canonical_name, socket_address in address_infos
        ]

        return list(dict.fromkeys(addresses))

    async def _check_tls(self, context: SSLContext) -> Finding:
        """Open one more connection, and judge its TLS version, certificate and handshake time."""
        host = self._target.host
        started_ns = monotonic_ns()

        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(
                    host, self._target.port, ssl=context, server_hostname=host
                )
        except (OSError, TimeoutError):
            # The next request fails in the same way, and reports the reason.
            meaning = "no request could be sent over this connection"
            return Finding("tls", UNKNOWN, "the TLS handshake failed", meaning)

        handshake_ms = (monotonic_ns() - started_ns) / NS_PER_MS
        session = writer.get_extra_info("ssl_object")
        writer.transport.abort()

        # The certificate is empty if it was not verified.
        certificate = session.getpeercert() or {}
        return target_checks.check_tls(
            version=session.version() or "TLS",
            is_verified=self._settings.tls.verify,
            expires=_parse_expiry(certificate.get("notAfter")),
            now=datetime.now(UTC),
            handshake_ms=handshake_ms,
        )

    async def _check_auth(self, model_list_response: HttpResponse) -> Finding:
        """Judge whether the server accepts the API key, and whether it refuses requests without it.

        The list of models was already requested with the configured API key. If there is a key, the
        list is requested once more without it: a server that checks keys refuses that request.

        Args:
            model_list_response: The HTTP response to the first request for the list of models. That
                request was sent without a key if none is configured.
        """
        # A user and a password in the URL are sent in place of an API key.
        has_credentials = bool(self._settings.api_key or self._target.basic)
        status_without_key = None
        if has_credentials:
            response_without_key = await self._fetcher.send_request(
                "GET", self._target.models_path, self._headers, b""
            )
            status_without_key = response_without_key.status

        return target_checks.check_authentication(
            has_credentials, model_list_response.status, status_without_key
        )

    def _check_lengths(self, probe_result: ProbeResult, trials: LengthTrials) -> None:
        """Judge output lengths and, of streamed responses, the time to the first token.

        Args:
            probe_result: The result of the probe, with the profile of the server.
            trials: The responses with a forced and with a free output length.
        """
        profile = probe_result.server_profile
        if self._settings.api in APIS_WITHOUT_FORCED_LENGTH:
            # These APIs have no field that forces a length, whatever the server profile says.
            profile = msgspec.structs.replace(profile, length_fields=())

        length_finding = target_checks.check_output_lengths(
            profile, trials.forced_length, trials.free_length, trials.tried_fields
        )
        self.findings.append(length_finding)

        if self._settings.stream:
            first_token_finding = target_checks.check_first_token(
                [trials.forced_length, trials.free_length]
            )
            if first_token_finding is not None:
                self.findings.append(first_token_finding)

    def _check_server_properties(
        self, probe_result: ProbeResult, trials: LengthTrials, model_list_response: HttpResponse
    ) -> None:
        """Judge properties of the server that do not depend on the text of a response.

        They are the prefix cache, the reuse of connections, the source of the arrival timestamps
        and the rate limits.

        Args:
            probe_result: The result of the probe, which was the first to send the prompt of
                `trials.repeated_prompt`.
            trials: The responses to the trial requests.
            model_list_response: The HTTP response with the list of models, which may have rate
                limits in its headers.
        """
        # The length of the repeated prompt is known in tokens of the local tokenizer, but the
        # server reports cached tokens of its own tokenizer. The ratio is None if it is not known.
        _short_prompt_tokens, long_prompt_local_tokens = PROMPT_TOKENS
        server_tokens_per_local_token = probe_result.token_ratio or 1.0
        long_prompt_server_tokens = round(long_prompt_local_tokens * server_tokens_per_local_token)
        self.findings += [
            target_checks.check_prefix_cache(trials.repeated_prompt, long_prompt_server_tokens),
            target_checks.check_keep_alive(trials.is_connection_reused),
            target_checks.check_arrival_timestamps(trials.free_length),
        ]
        headers = {**model_list_response.headers, **trials.free_length.headers}

        rate_limit_finding = target_checks.check_rate_limit(headers)
        if rate_limit_finding is not None:
            self.findings.append(rate_limit_finding)

    async def _check_metrics_pages(self) -> None:
        """Fetch the pages where servers publish metrics, and judge what they contain."""
        pages = {path: await self._fetch_optional(path) for path in METRICS_PATHS}
        self.findings.append(target_checks.check_metrics_pages(pages))

    async def _fetch(self, path: str) -> HttpResponse:
        """Return the response to a GET request with the API key."""
        return await self._fetcher.send_request("GET", path, self._authorized_headers, b"")

    async def _fetch_optional(self, path: str) -> HttpResponse:
        """Return a page, or a response with status 0 if it cannot be fetched."""
        try:
            return await self._fetch(self._target.server_path(path))
        except TargetUnusable:
            return HttpResponse(0, {}, b"")


def _parse_expiry(not_after: str | None) -> datetime | None:
    """Parse the end of validity of a certificate, such as "Nov 29 17:00:00 2027 GMT".

    Return None if the certificate is not known.
    """
    if not not_after:
        return None
    return datetime.strptime(not_after, CERTIFICATE_TIME_FORMAT).replace(tzinfo=UTC)


async def inspect_machine() -> Machine:
    """Return facts about this host. Testing its timer takes about a quarter of a second."""
    lateness_ns = await _measure_timer_lateness_ns()
    limits = resource_limits.read_machine_limits()
    proxy_variables = (*PROXY_VARIABLES, *map(str.upper, PROXY_VARIABLES))

    return Machine(
        clock=_read_text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_read_ns=_measure_clock_reading_ns(),
        timer_late_ms=max(0.0, lateness_ns / NS_PER_MS),
        cpus=child_process.count_cpus(),
        cpu_quota=host_checks.read_cpu_limit(_read_text),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        governor=_read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        files=limits.open_files,
        ports=limits.local_ports,
        not_compiled=compiled.MISSING,
        proxies=tuple(name for name in proxy_variables if os.environ.get(name)),
    )


async def _measure_timer_lateness_ns() -> int:
    """Return the 99th percentile of the lateness of a timer of 1 ms."""
    lateness_ns = []
    for _ in range(TIMER_ROUNDS):
        due_ns = monotonic_ns() + int(TIMER_S * 1e9)
        await asyncio.sleep(TIMER_S)
        lateness_ns.append(monotonic_ns() - due_ns)
    return sorted(lateness_ns)[int(TIMER_ROUNDS * TIMER_QUANTILE)]


def _measure_clock_reading_ns() -> float:
    """Return how long a reading of the monotonic clock takes."""
    started_ns = monotonic_ns()
    for _ in range(CLOCK_READINGS):
        monotonic_ns()
    return (monotonic_ns() - started_ns) / CLOCK_READINGS


def _read_text(path: str) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""
