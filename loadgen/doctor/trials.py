"""Sends the trial requests of `loadgen doctor`, one after the other, and observes the responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic_ns
from typing import NamedTuple

import msgspec
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.redaction import redact
from loadgen_sdk.request import Completion, Request
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.transport.target import header_secrets
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.server_profiles import ServerProfile
from loadgen_sdk.wire_formats.usage import without_doubtful_counts

from loadgen.core.execution import probing
from loadgen.core.execution.plan import Settings
from loadgen.doctor import target_checks
from loadgen.doctor.target_checks import TRIAL_TOKENS, Trial

QUESTION = "Is the sky blue? Answer with one word: yes or no."
TRIED_LENGTH_FIELDS = ("ignore_eos", "min_tokens")
"""Fields that force an output length, which are tried on a server that is not known."""
CACHE_TRIAL_TOKENS = 8
"""Output tokens of the repeated prompt. Only its usage is of interest, so they are few."""
TIMEOUT_NS = 60 * 10**9
MAX_FAILURE_CHARACTERS = 200
TIMER_NS = 1_000_000
NS_PER_MS = 1e6


class TrialRequest(NamedTuple):
    """A request to send.

    Attributes:
        text: The prompt.
        max_tokens: The limit of output tokens.
        is_exact: True to force that output length.
    """

    text: str
    max_tokens: int
    is_exact: bool = False


class LengthTrials(msgspec.Struct, frozen=True):
    """Responses to a question with a forced and a free length, and to a repeated prompt.

    Attributes:
        forced: The response with a forced length.
        free: The response with a free length.
        repeated: The response to a prompt that the server has seen before.
        is_connection_reused: True if a request used a connection that was open already.
        tried_fields: The fields that were tried on a server that is not known, as text.
    """

    forced: Trial
    free: Trial
    repeated: Trial
    is_connection_reused: bool
    tried_fields: str


class StreamTrials(NamedTuple):
    """Long responses, and short ones that were sent in turns with all long ones but the first."""

    long: list[Trial]
    short: list[Trial]


class TrialSender:
    """Sends trial requests to a probed target."""

    def __init__(self, settings: Settings, probe_result: ProbeResult) -> None:
        """Decide with which request fields an output length is forced.

        The profile of a known server lists them. On a server of unknown make, the fields that most
        servers have are tried, to see whether it honours them.
        """
        self._settings = settings
        self._probe_result = probe_result
        self._profile = probe_result.server_profile
        self._forcing_profile = self._profile
        self._tried_fields = ""
        is_unknown_server = probe_result.server == "generic"
        if is_unknown_server and not self._profile.length_fields:
            self._tried_fields = " and ".join(TRIED_LENGTH_FIELDS)
            self._forcing_profile = msgspec.structs.replace(
                self._profile, length_fields=TRIED_LENGTH_FIELDS
            )

    async def send_length_trials(self, long_prompt: str) -> LengthTrials:
        """Send a question with a forced and a free length, and the probe's long prompt again.

        The probe has sent the long prompt before, so a server with a prefix cache has it by now.
        The last request is only sent to see whether the connection of the earlier ones is reused.
        """
        [forced] = await self._send(
            [TrialRequest(QUESTION, TRIAL_TOKENS, is_exact=True)], self._forcing_profile
        )
        requests = [
            TrialRequest(QUESTION, TRIAL_TOKENS),
            TrialRequest(long_prompt, CACHE_TRIAL_TOKENS),
            TrialRequest(QUESTION, max_tokens=1),
        ]
        trials = await self._send(requests, self._profile)
        free, repeated, _last = trials
        # A spare connection may serve the first requests, so one reuse is enough.
        is_reused = any(trial.is_connection_reused for trial in trials)
        return LengthTrials(forced, free, repeated, is_reused, self._tried_fields)

    async def send_stream_trials(self, trials: LengthTrials) -> StreamTrials:
        """Return long responses, and short ones if the events of a long response arrived together.

        Events arrive together because of a buffer on the way or because a host is busy. To tell
        these causes apart, short and long requests are sent in turns. A long response whose events
        arrive one by one proves that there is no buffer, so it ends the trials.
        """
        is_exact = not trials.forced.failure
        stream = StreamTrials(long=[trials.forced if is_exact else trials.free], short=[])
        requests = [
            TrialRequest(QUESTION, max_tokens=1),
            TrialRequest(QUESTION, TRIAL_TOKENS, is_exact),
        ]
        for _ in range(target_checks.COMPARED_PAIRS):
            if not target_checks.has_bundled_events(stream.long[-1]):
                break
            short, long = await self._send(requests, self._forcing_profile)
            stream.short.append(short)
            stream.long.append(long)
        return stream

    async def send_number_trials(self) -> list[Trial]:
        """Return two responses of an API that returns numbers, such as embeddings."""
        return await self._send([TrialRequest(QUESTION, max_tokens=1)] * 2, self._profile)

    async def _send(self, requests: Sequence[TrialRequest], profile: ServerProfile) -> list[Trial]:
        """Send requests one after the other with one client, and return their responses.

        Args:
            requests: The requests.
            profile: The server profile, which decides with which fields a length is forced.
        """
        options = probing.client_options(self._settings, self._probe_result)
        options |= {"server_profile": profile, "keep_headers": True}
        client = Pool(
            self._probe_result.target,
            **options,
            timeout_ns=TIMEOUT_NS,
            stall_timeout_ns=TIMEOUT_NS,
        )
        try:
            await client.open()
            return [await self._send_one(client, request) for request in requests]
        finally:
            client.close()

    async def _send_one(self, client: Pool, trial_request: TrialRequest) -> Trial:
        """Send one request and return the observed response.

        While it waits, it measures how late a timer of this process is: on a busy host, events that
        arrive together are no sign of a buffer.
        """
        request = _create_request(trial_request, is_chat=client.target.api == "chat")
        response: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        event_times_ns: list[int] = []

        def record_event(_text: str, _reasoning: str, arrival_ns: int) -> None:
            event_times_ns.append(arrival_ns)

        client.send(
            request,
            client.prepare(request),
            monotonic_ns(),
            response.set_result,
            EventTimeline(),
            on_output=record_event,
        )
        timer_lateness_ms = await _measure_timer_lateness_ms(response)
        completion = await response
        usage = without_doubtful_counts(completion.usage)
        return Trial(
            failure=self._describe_failure(client, completion),
            max_tokens=trial_request.max_tokens,
            output_tokens=usage.output,
            cached_tokens=usage.cached,
            event_times_ns=tuple(event_times_ns),
            sent_ns=completion.sent,
            timer_lateness_ms=timer_lateness_ms,
            headers_ns=completion.first_byte,
            is_connection_reused=completion.reused,
            has_kernel_timestamps=completion.kernel_stamp,
            headers=completion.headers or {},
        )

    def _describe_failure(self, client: Pool, completion: Completion) -> str:
        """Return the kind and the text of a failure without secrets, or "" of a success."""
        failure = completion.failure
        if failure is None:
            return ""
        text = client.target.redact(f"{failure.kind}: {failure.text}")
        return redact_secrets(self._settings, text)[:MAX_FAILURE_CHARACTERS]


def _create_request(trial_request: TrialRequest, *, is_chat: bool) -> Request:
    """Return the request to send: with messages for a chat API, or else with a prompt."""
    messages = [{"role": "user", "content": trial_request.text}]
    return Request(
        id="doctor",
        messages=messages if is_chat else None,
        prompt=None if is_chat else trial_request.text,
        max_tokens=trial_request.max_tokens,
        exact_output=trial_request.is_exact,
    )


def redact_secrets(settings: Settings, text: str) -> str:
    """Return a text without the API key and without the secrets in headers."""
    secrets = [settings.api_key, *header_secrets(settings.headers)]
    return redact(text, [secret for secret in secrets if secret])


async def _measure_timer_lateness_ms(future: asyncio.Future[Completion]) -> float:
    """Wait for a response, and return by how much a timer of 1 ms was late in the meantime."""
    latest_ms = 0.0
    while not future.done():
        started_ns = monotonic_ns()
        await asyncio.wait((future,), timeout=TIMER_NS / 1e9)
        lateness_ns = monotonic_ns() - started_ns - TIMER_NS
        latest_ms = max(latest_ms, lateness_ns / NS_PER_MS)
    return latest_ms
