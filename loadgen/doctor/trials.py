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
    """A trial request, before it is put into the form that the API of the target expects.

    Attributes:
        text: The prompt.
        max_tokens: The limit of output tokens.
        is_exact: True to force an output of exactly `max_tokens` tokens, on a server that can.
    """

    text: str
    max_tokens: int
    is_exact: bool = False


class LengthTrials(msgspec.Struct, frozen=True):
    """Responses to a question with a forced and a free length, and to a repeated prompt.

    Attributes:
        forced_length: The response to the question with a forced output length.
        free_length: The response to the same question where the model decides when to stop.
        repeated_prompt: The response to a prompt that the server has seen before.
        is_connection_reused: True if a request used a connection that was open already.
        tried_fields: The names of the request fields that were tried on a server of unknown make,
            joined by " and ". "" for a known server, whose profile lists the fields.
    """

    forced_length: Trial
    free_length: Trial
    repeated_prompt: Trial
    is_connection_reused: bool
    tried_fields: str


class StreamTrials(NamedTuple):
    """Responses that show whether something between server and client buffers tokens.

    Attributes:
        long: Responses of many tokens.
        short: Responses of one token. Each was requested just before a long response, from the
            second long response on.
    """

    long: list[Trial]
    short: list[Trial]


class TrialSender:
    """Sends trial requests to a probed target."""

    def __init__(self, settings: Settings, probe_result: ProbeResult) -> None:
        """Choose the server profiles for requests with a free and with a forced output length.

        A server profile describes a make of inference server, such as vLLM. Its `length_fields` are
        the request fields that force an output length, which the client adds to a request of exact
        length. The probe reports a server whose make it did not recognize as "generic". The profile
        of such a server lists no such fields, so the fields that most servers have are tried, to
        see whether this server honours them.

        Args:
            settings: The settings of the target.
            probe_result: What the probe found out about the server.
        """
        self._settings = settings
        self._probe_result = probe_result
        self._detected_profile = probe_result.server_profile
        self._profile_for_forced_length = self._detected_profile
        self._tried_fields = ""

        is_unknown_server = probe_result.server == "generic"
        if is_unknown_server and not self._detected_profile.length_fields:
            self._profile_for_forced_length = msgspec.structs.replace(
                self._detected_profile, length_fields=TRIED_LENGTH_FIELDS
            )
            self._tried_fields = " and ".join(TRIED_LENGTH_FIELDS)

    async def send_length_trials(self, long_prompt: str) -> LengthTrials:
        """Send a question with a forced and a free length, and the probe's long prompt again.

        The probe has sent the long prompt before, so a server with a prefix cache has it by now.
        The last request is only sent to see whether the connection of the earlier ones is reused.
        """
        forced_length_request = TrialRequest(QUESTION, TRIAL_TOKENS, is_exact=True)
        [forced_length] = await self._send([forced_length_request], self._profile_for_forced_length)
        trials = await self._send(
            [
                TrialRequest(QUESTION, TRIAL_TOKENS),
                TrialRequest(long_prompt, CACHE_TRIAL_TOKENS),
                TrialRequest(QUESTION, max_tokens=1),
            ],
            self._detected_profile,
        )
        free_length, repeated_prompt, _last = trials

        return LengthTrials(
            forced_length=forced_length,
            free_length=free_length,
            repeated_prompt=repeated_prompt,
            # The client may open spare connections, which serve the first requests, so a single
            # reuse shows that the server keeps connections open.
            is_connection_reused=any(trial.is_connection_reused for trial in trials),
            tried_fields=self._tried_fields,
        )

    async def send_stream_trials(self, trials: LengthTrials) -> StreamTrials:
        """Return long responses, and short ones if the events of a long response arrived together.

        Events arrive together because of a buffer on the way, such as that of a proxy, or because a
        host is busy. To tell these causes apart, short and long requests are sent in turns. A long
        response whose events arrive one by one proves that there is no buffer, so it ends the
        trials.

        Args:
            trials: The responses to the earlier requests. One of them is the first long response:
                that with a forced length or, if the server refused it, that with a free length.
        """
        can_force_length = not trials.forced_length.failure
        first_long_response = trials.forced_length if can_force_length else trials.free_length
        stream_trials = StreamTrials(long=[first_long_response], short=[])
        short_request = TrialRequest(QUESTION, max_tokens=1)

        long_request = TrialRequest(QUESTION, TRIAL_TOKENS, is_exact=can_force_length)
        for _ in range(target_checks.COMPARED_PAIRS):
            if not target_checks.has_bundled_events(stream_trials.long[-1]):
                break
            short_response, long_response = await self._send(
                [short_request, long_request], self._profile_for_forced_length
            )
            stream_trials.short.append(short_response)
            stream_trials.long.append(long_response)

        return stream_trials

    async def send_number_trials(self) -> list[Trial]:
        """Return two responses of an API that returns numbers, such as embeddings."""
        request = TrialRequest(QUESTION, max_tokens=1)
        return await self._send([request, request], self._detected_profile)

    async def _send(self, requests: Sequence[TrialRequest], profile: ServerProfile) -> list[Trial]:
        """Send requests one after the other with one client, and return their responses.

        Args:
            requests: The requests.
            profile: The server profile, whose `length_fields` force an output length.
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
        """Send one request, wait for the response, and return what was observed of it.

        Output events that arrive together usually mean that a proxy between server and client
        collects them in a buffer. On a busy host they arrive together without any buffer, because
        the client reads them late. To tell these cases apart, the lateness of timers in this
        process is measured while the response is received.
        """
        request = _create_request(trial_request, is_chat=client.target.api == "chat")
        completion_future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        event_times_ns: list[int] = []

        def record_arrival_time(_text: str, _reasoning: str, arrival_ns: int) -> None:
            event_times_ns.append(arrival_ns)

        client.send(
            request,
            body=client.prepare(request),
            due=monotonic_ns(),
            on_done=completion_future.set_result,
            timeline=EventTimeline(),
            on_output=record_arrival_time,
        )
        timer_lateness_ms = await _measure_timer_lateness_ms(completion_future)
        completion = await completion_future

        # Token counts of the server that contradict each other are replaced by None.
        reliable_usage = without_doubtful_counts(completion.usage)

        # The times of a completion are readings of the monotonic clock in nanoseconds.
        return Trial(
            failure=self._describe_failure(client, completion),
            max_tokens=trial_request.max_tokens,
            output_tokens=reliable_usage.output,
            cached_tokens=reliable_usage.cached,
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
    """Wait for a response, and return the most that a timer of 1 ms was late in the meantime.

    The timer is the timeout of a wait for the response, which is started over and over. A wait that
    the response ends early is not late, so it does not change the maximum.
    """
    max_lateness_ms = 0.0
    while not future.done():
        started_ns = monotonic_ns()
        await asyncio.wait((future,), timeout=TIMER_NS / 1e9)
        lateness_ns = monotonic_ns() - started_ns - TIMER_NS
        max_lateness_ms = max(max_lateness_ms, lateness_ns / NS_PER_MS)
    return max_lateness_ms
