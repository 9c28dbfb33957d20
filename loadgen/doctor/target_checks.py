"""Judge what `loadgen doctor` observed of a target, and say what it means for a measurement.

The functions here take observations and return findings; `doctor.py` and `trials.py` send the
requests. What could not be observed is reported as unknown, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from statistics import median, median_high

import msgspec
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES, ServerProfile

from loadgen.core import format
from loadgen.doctor.findings import FAULT, NOTE, OK, UNKNOWN, WARNING, Finding

NS_PER_MS = 1e6
MAX_LISTED_ADDRESSES = 4
MAX_LISTED_MODELS = 6
REFUSED_STATUSES = (401, 403)
"""HTTP statuses of a request whose API key is missing or not accepted."""
SLOW_CONNECT_MS = 100
"""Connect time above which the network, and not the server, makes up most of a usual TTFT."""
CERTIFICATE_WARNING_DAYS = 14
MAX_CLOCK_SKEW_S = 2.0
"""Difference of two wall clocks that is not reported. A Date header has whole seconds."""

TRIAL_TOKENS = 64
"""Output tokens of a trial request: more than a free answer to "yes or no?" has by chance."""
TOKEN_COUNT_TOLERANCE = 0.02
"""Relative difference of two token counts of one text; the validity verdict of a run uses the same.
"""
LATE_FIRST_TOKEN_MS = 500.0
"""Time to the first token that the prefill of a short question on an idle server does not explain.
"""
HEADERS_SHARE_OF_LATE_TOKEN = 0.8
"""Share of a late first token that passes before the response headers if the request had to wait.
"""

BUNDLING_RATIO = 1.5
"""Tokens per event, or events per arrival, above which gaps are not gaps between tokens."""
BUFFERED_EVENTS_PER_ARRIVAL = 8
"""Events per arrival from which on a stream was buffered, whatever its token rate."""
FAST_EVENT_MS = 1.0
"""Time per event below which several events can share an arrival by chance."""
COMPARED_PAIRS = 5
"""Short and long responses that are compared if events arrived together."""
BUFFER_DELAY_SHARE = 0.1
"""Share of the generation time of a response by which a buffer delays its first event at least."""
QUIET_HOST_MS = 2.0
"""Timer lateness below which a host is not busy, and duration of a response that came all at once.
"""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The observed response to one trial request.

    Times are readings of the monotonic clock of this host, in nanoseconds.

    Attributes:
        failure: Why the request failed, or "".
        max_tokens: The limit of output tokens that was sent.
        output_tokens: The server's count of output tokens, or None if it sent none.
        cached_tokens: The server's count of prompt tokens from its cache, or None if it sent none.
        event_times_ns: The arrival time of each output event.
        sent_ns: When the request was sent.
        timer_lateness_ms: The most that a timer of 1 ms in this process was late meanwhile.
        headers_ns: When the response headers arrived.
        is_connection_reused: True if the request used a connection that was already open.
        has_kernel_timestamps: True if the kernel took the arrival times.
        headers: The response headers.
    """

    failure: str = ""
    max_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    event_times_ns: tuple[int, ...] = ()
    sent_ns: int = 0
    timer_lateness_ms: float = 0.0
    headers_ns: int = 0
    is_connection_reused: bool = False
    has_kernel_timestamps: bool = False
    headers: Mapping[str, str] = {}

    @property
    def event_count(self) -> int:
        """The number of output events."""
        return len(self.event_times_ns)

    @property
    def arrival_count(self) -> int:
        """The number of different arrival times, at least 1. Events of one read share it."""
        return 1 + sum(later > earlier for earlier, later in pairwise(self.event_times_ns))

    @property
    def is_stream(self) -> bool:
        """True if the response has two output events or more, so that it has a gap."""
        return not self.failure and self.event_count >= 2

    @property
    def span_ms(self) -> float:
        """The time between the first and the last output event; 0 without events."""
        if not self.event_times_ns:
            return 0.0
        return (self.event_times_ns[-1] - self.event_times_ns[0]) / NS_PER_MS

    @property
    def first_event_ms(self) -> float:
        """The time from sending to the first output event."""
        return (self.event_times_ns[0] - self.sent_ns) / NS_PER_MS

    @property
    def last_event_ms(self) -> float:
        """The time from sending to the last output event."""
        return (self.event_times_ns[-1] - self.sent_ns) / NS_PER_MS

    @property
    def headers_ms(self) -> float:
        """The time from sending to the response headers."""
        return (self.headers_ns - self.sent_ns) / NS_PER_MS

    @property
    def tokens_per_event(self) -> float:
        """The mean number of tokens in an output event; 1 if tokens or events are not known."""
        if not self.output_tokens or not self.event_times_ns:
            return 1.0
        return self.output_tokens / self.event_count


# -- The connection -------------------------------------------------------------------------------


def check_name_resolution(host: str, addresses: Sequence[str], duration_ms: float) -> Finding:
    """Judge how a host name resolved.

    A name with several addresses is often a balancer by DNS. A run uses one address only, because
    it resolves the name once, so the other servers would get no load.
    """
    address_list = ", ".join(addresses[:MAX_LISTED_ADDRESSES])
    more = " and more" if len(addresses) > MAX_LISTED_ADDRESSES else ""

    observed = f"{host}: {address_list}{more}, {duration_ms:.3g} ms"
    if len(addresses) > 1:
        return Finding(
            check="name",
            state=NOTE,
            observed=observed,
            meaning=(
                "a run resolves the name once and sends all load to the first address that "
                "connects; the other servers stay idle"
            ),
            advice="use the address of a load balancer in --url to load all of them",
        )

    meaning = "resolved once before a run, so latencies do not include DNS time"
    return Finding("name", OK, observed, meaning)


def check_connect_time(durations_ms: Sequence[float]) -> Finding:
    """Judge the durations of TCP connects without load. A connect takes one network round trip."""
    typical_ms = median_high(durations_ms)
    observed = (
        f"TCP connect {format.quantity(typical_ms)} ms (median of {len(durations_ms)}, "
        f"max {format.quantity(max(durations_ms))} ms)"
    )
    if typical_ms > SLOW_CONNECT_MS:
        return Finding(
            check="connect",
            state=WARNING,
            observed=observed,
            meaning=(
                "every TTFT includes at least one network round trip, and here it "
                "takes longer than the prefill of a typical prompt"
            ),
            advice="run loadgen near the server, or where its users are",
        )

    meaning = "every TTFT includes at least one network round trip"
    return Finding("connect", OK, observed, meaning)


def check_tls(
    version: str, is_verified: bool, expires: datetime | None, now: datetime, handshake_ms: float
) -> Finding:
    """Judge a TLS handshake and the certificate of the server.

    Args:
        version: The TLS version, such as "TLSv1.3".
        is_verified: False if the certificate is not checked (`--insecure`).
        expires: When the certificate expires. It is known only for a verified certificate.
        now: The current time.
        handshake_ms: How long connect and handshake took.
    """
    observed = f"{version}, handshake {format.quantity(handshake_ms)} ms"
    meaning = "the TTFT of the first request of a connection includes the handshake"
    if not is_verified:
        observed += ", certificate not verified"
        return Finding(
            check="tls",
            state=NOTE,
            observed=observed,
            meaning=meaning,
            advice="use --cacert instead of --insecure",
        )

    if expires is None:
        return Finding("tls", OK, observed, meaning)

    days_left = (expires - now).days
    observed += f", certificate valid for {days_left} days"

    if days_left < CERTIFICATE_WARNING_DAYS:
        meaning = "connections will fail when it has expired"
        return Finding(
            check="tls",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice="renew the certificate",
        )

    return Finding("tls", OK, observed, meaning)


def check_authentication(
    has_key: bool, status: int, status_without_key: int | None = None
) -> Finding:
    """Judge whether the target checks API keys.

    Args:
        has_key: True if an API key is configured.
        status: HTTP status of the list of models, requested as in a run.
        status_without_key: Its status without the key, or None if that was not tried.
    """
    if status in REFUSED_STATUSES:
        advice = "check the API key" if has_key else "set OPENAI_API_KEY or use --api-key-file"
        meaning = "the server would refuse every request of a run"
        return Finding(
            check="auth",
            state=FAULT,
            observed=f"HTTP {status}",
            meaning=meaning,
            advice=advice,
        )

    if not has_key:
        return Finding("auth", OK, "no API key needed", "latencies include no key check")

    if status_without_key is not None and status_without_key not in REFUSED_STATUSES:
        observed = f"the list of models needs no API key (HTTP {status_without_key} without it)"
        meaning = "the key may not be checked at all, so rate limits per key may not apply"
        return Finding("auth", NOTE, observed, meaning)

    observed = "API key accepted; requests without it are refused"
    return Finding("auth", OK, observed, "the rate limits of this key apply to the load")


def check_model(probe_result: ProbeResult) -> Finding:
    """Judge whether the server lists the model that a run would request.

    Some servers answer to any model name, so that a response alone does not show which model it
    came from.
    """
    if not probe_result.models:
        observed = f"the server lists no models; requested {probe_result.model!r}"
        meaning = "the server answered a request for it, but another model may have answered"
        return Finding("model", NOTE, observed, meaning)

    listed = ", ".join(probe_result.models[:MAX_LISTED_MODELS])
    model_count = format.counted(len(probe_result.models), "listed model")

    observed = f"{probe_result.model!r}; {model_count}: {listed}"
    if probe_result.model not in probe_result.models:
        meaning = (
            "the server accepts a name that it does not list, so another model may be measured"
        )
        return Finding(
            check="model",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice="use --model with a listed name",
        )

    if not probe_result.server_profile.rejects_unknown_models:
        meaning = (
            "this type of server accepts any name, so a typing error in --model would go unnoticed"
        )
        return Finding("model", OK, observed, meaning)

    return Finding("model", OK, observed, "listed; the server refuses other names")


def check_context_length(probe_result: ProbeResult) -> Finding:
    """Report the context length: the most tokens that prompt and output may have together."""
    if probe_result.max_context is None:
        observed = "the server does not report its context length"
        meaning = "requests of a workload that are too long will fail during the run"
        return Finding("context", UNKNOWN, observed, meaning)

    observed = f"context length {probe_result.max_context:,} tokens, prompt and output together"
    meaning = (
        "loadgen rejects a workload with longer requests before the run; run --dry-run shows their "
        "lengths"
    )
    return Finding("context", OK, observed, meaning)


def check_server_profile(probe_result: ProbeResult) -> Finding:
    """Report which inference server was detected, and by which evidence.

    The server profile decides which optional request fields a run sends. A server that is not
    recognized gets only the fields that every server accepts.
    """
    server = probe_result.server_profile.title
    if probe_result.version:
        server += f" {probe_result.version}"

    observed = f"{server} ({'; '.join(probe_result.evidence)})"
    if probe_result.server == "generic":
        meaning = (
            "loadgen sends only fields that all servers accept, so output lengths cannot be forced"
        )
        return Finding(
            check="server",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice="use --server if you know the type",
        )

    meaning = "loadgen sends only the fields that this type of server supports"
    return Finding("server", OK, observed, meaning)


# -- Token counts ---------------------------------------------------------------------------------


def check_tokenizer(
    probe_result: ProbeResult, tokenizer_name: str, is_user_tokenizer: bool
) -> Finding:
    """Judge whether the local tokenizer counts prompt tokens as the server does.

    The probe has sent two prompts of different length and compared the server's count of each with
    the local count. That gives two numbers: `token_ratio`, how many tokens the server counts for
    each local token, and `template_tokens`, how many tokens the chat template adds to every prompt.

    Args:
        probe_result: The result of the probe, with these two numbers.
        tokenizer_name: The name of the local tokenizer.
        is_user_tokenizer: True if the user specified a tokenizer file.
    """
    server_tokens_per_local_token = probe_result.token_ratio
    if server_tokens_per_local_token is None:
        return Finding(
            check="tokenizer",
            state=UNKNOWN,
            observed="the server reports no prompt token counts",
            meaning=f"prompt lengths and input tok/s are counted with {tokenizer_name}",
            advice="use --tokenizer with the model's tokenizer.json",
        )

    observed = (
        f"the server counts {server_tokens_per_local_token:.3f} tokens per token of "
        f"{tokenizer_name}"
    )
    if probe_result.template_tokens:
        observed += f", plus {probe_result.template_tokens} per prompt"

    has_equal_counts = abs(server_tokens_per_local_token - 1) <= TOKEN_COUNT_TOLERANCE
    if has_equal_counts:
        return Finding(
            check="tokenizer",
            state=OK,
            observed=observed,
            meaning="prompts have the requested lengths, plus the chat template",
        )

    if is_user_tokenizer:
        advice = "check --tokenizer: it is not the tokenizer of this model"
    else:
        advice = "use --tokenizer with the model's tokenizer.json"

    server_tokens_per_1000 = 1000 * server_tokens_per_local_token
    return Finding(
        check="tokenizer",
        state=WARNING,
        observed=observed,
        meaning=(
            f"a prompt of 1,000 tokens in the workload has {server_tokens_per_1000:,.0f} on the "
            "server"
        ),
        advice=advice,
    )


def check_usage(probe_result: ProbeResult, is_streamed: bool) -> Finding:
    """Judge whether responses contain consistent token counts (the `usage` object).

    Args:
        probe_result: The result of the probe.
        is_streamed: True if the run streams responses. A server may count tokens in one mode only.
    """
    if probe_result.usage_contradiction:
        return Finding(
            check="usage",
            state=WARNING,
            observed=f"token counts contradict each other: {probe_result.usage_contradiction}",
            meaning=(
                "the contradicting counts are not used, so rates and costs that need "
                "them are missing"
            ),
            advice="fix the usage that the server reports, or use --tokenizer",
        )

    responses = "streamed responses" if is_streamed else "responses"
    if probe_result.reports_usage:
        observed = f"{responses} contain token counts"
        return Finding("usage", OK, observed, "token metrics use the server's counts")

    return Finding(
        check="usage",
        state=WARNING,
        observed=f"{responses} contain no token counts",
        meaning="loadgen estimates output tokens, so TPOT and tok/s may be off by several percent",
        advice="use --tokenizer for exact counts",
    )


def check_prefix_cache(repeated: Trial, prompt_tokens: int) -> Finding:
    """Judge whether the server caches prompts, by the response to a prompt that it got before.

    Args:
        repeated: The response to the repeated prompt.
        prompt_tokens: The approximate length of that prompt, in the server's tokens.
    """
    if repeated.failure or repeated.cached_tokens is None:
        observed = "the server does not report cached prompt tokens"
        meaning = (
            "cache hits cannot be measured; prompts of a run are unique unless they share text"
        )
        return Finding("cache", UNKNOWN, observed, meaning)

    observed = (
        f"{repeated.cached_tokens} of about {format.counted(prompt_tokens, 'prompt token')} "
        "cached when sent again"
    )
    if repeated.cached_tokens:
        meaning = "a run with the same seed would hit the cache, so its TTFT would be too low"
        return Finding(
            check="cache",
            state=NOTE,
            observed=observed,
            meaning=meaning,
            advice="use another --seed, or --salt fresh",
        )

    return Finding("cache", OK, observed, "repeated prompts are not cached")


# -- Output lengths -------------------------------------------------------------------------------


def check_output_lengths(
    server_profile: ServerProfile, forced: Trial, free: Trial, tried_fields: str = ""
) -> Finding:
    """Judge whether the length of an output can be forced.

    Both trials ask a question whose answer is one word, so an output of TRIAL_TOKENS tokens shows
    that the server honours the fields that force a length, such as `ignore_eos`.

    The outcomes are, in the order in which they are checked:

    - The request with a forced length failed.
    - The server did not report how long the output is.
    - The output does not have the requested length.
    - It has that length, but a run would not send the fields to a server of unknown make.
    - The server has no such fields, so that the length is right by chance.
    - The length is forced.

    Args:
        server_profile: The profile of the server, with its fields that force a length.
        forced: The response to the question with those fields, which force its length.
        free: The response to the question without them, whose length the model decides.
        tried_fields: Fields that were tried on a server of unknown make, joined by " and ".
    """
    fields = " and ".join(server_profile.length_fields) or tried_fields
    if forced.failure:
        return Finding(
            check="length",
            state=WARNING,
            observed=f"a request with {fields or 'max_tokens'} failed: {forced.failure}",
            meaning="the model decides output lengths, which differ between servers and runs",
            advice="compare only runs with equal output token counts",
        )

    if forced.output_tokens is None:
        observed = f"{fields} sent; the server reported no token count"
        meaning = "it is not known whether responses have the requested lengths"
        return Finding("length", UNKNOWN, observed, meaning)

    observed = _describe_output_lengths(fields, forced, free)
    if forced.output_tokens != forced.max_tokens:
        return _report_wrong_length(observed, is_too_long=forced.output_tokens > forced.max_tokens)
    if tried_fields:
        return _report_unknown_server_with_forced_length(observed, tried_fields)

    if not server_profile.length_fields:
        meaning = "this type of server cannot force output lengths; other responses may be shorter"
        advice = "compare only runs with equal output token counts"
        return Finding(
            check="length",
            state=NOTE,
            observed=observed,
            meaning=meaning,
            advice=advice,
        )

    meaning = "every response has the requested length"
    if free.output_tokens == forced.max_tokens:
        meaning = "lengths match, but the same request without these fields was as long"

    return Finding("length", OK, observed, meaning)


def _describe_output_lengths(fields: str, forced: Trial, free: Trial) -> str:
    """Return a text such as "ignore_eos: 64 of 64 tokens (3 without)".

    Args:
        fields: The request fields that force a length, joined by " and ".
        forced: The response to a request with these fields.
        free: The response to the same request without them.
    """
    requested = format.counted(forced.max_tokens, "token")
    text = f"{fields or 'max_tokens'}: {forced.output_tokens} of {requested}"
    if not fields or free.failure or free.output_tokens is None:
        return text
    return f"{text} ({free.output_tokens} without)"


def _report_wrong_length(observed: str, *, is_too_long: bool) -> Finding:
    """Return the warning for an output that does not have the requested length.

    An output that is longer than `max_tokens` points at a wrong count, a shorter one at a length
    that was not forced.
    """
    if is_too_long:
        meaning = "the count exceeds max_tokens, so it may be wrong, and with it TPOT and tok/s"
        advice = "use --tokenizer and compare the counts"
    else:
        meaning = "output lengths differ from the workload, which changes E2E latency and tok/s"
        advice = "compare output token counts before comparing servers"
    return Finding(
        check="length",
        state=WARNING,
        observed=observed,
        meaning=meaning,
        advice=advice,
    )


def _report_unknown_server_with_forced_length(observed: str, tried_fields: str) -> Finding:
    """Return the finding for a server of unknown make that honours the tried fields.

    Only `ignore_eos` can be suggested for the body of every request, because the value of
    `min_tokens` would have to differ from request to request.
    """
    meaning = "they work, but a run does not send them to an unknown type of server"
    advice = ""
    if "ignore_eos" in tried_fields.split(" and "):
        advice = "add --extra-body '{\"ignore_eos\": true}'"

    return Finding(
        check="length",
        state=NOTE,
        observed=observed,
        meaning=meaning,
        advice=advice,
    )


# -- Streaming ------------------------------------------------------------------------------------


def has_bundled_events(trial: Trial) -> bool:
    """Return True if output events of one token each arrived several at a time.

    An output event is a message of the stream, which usually has one token. Events arrive together
    if one read from the connection returns several of them. Either something between server and
    client buffers them, or one of the two hosts was too busy to send or read them one by one.

    Returns False for events that have several tokens each, because that is a setting of the server.
    """
    has_one_token_per_event = trial.tokens_per_event <= BUNDLING_RATIO
    if not trial.is_stream or not has_one_token_per_event:
        return False

    events_per_arrival = trial.event_count / trial.arrival_count
    if events_per_arrival <= BUNDLING_RATIO:
        return False

    is_surely_bundled = trial.arrival_count <= trial.event_count // BUFFERED_EVENTS_PER_ARRIVAL
    if is_surely_bundled:
        return True

    # Events that follow each other very fast can share an arrival by chance.
    ms_per_event = trial.span_ms / trial.event_count
    return ms_per_event >= FAST_EVENT_MS


def check_streaming(long_trials: Sequence[Trial], short_trials: Sequence[Trial] = ()) -> Finding:
    """Judge whether tokens arrive one by one.

    Events arrive together because of a busy host or because of a buffer on the way. Two
    observations tell these causes apart:

    - A buffer holds back the events of every long response. So a single long response whose events
      arrived one by one proves that there is no buffer.
    - A buffer delays the first event of long responses only, because it passes events on when it is
      full or the response ends. A busy host delays short responses as well.

    Without either observation, the cause is reported as unknown.

    Args:
        long_trials: Responses of many tokens to the same question.
        short_trials: Responses of one token, sent in turns with all long ones but the first.
    """
    unbundled_trials = [trial for trial in long_trials if not has_bundled_events(trial)]
    reported_trial = unbundled_trials[0] if unbundled_trials else long_trials[0]
    if not reported_trial.is_stream:
        return _report_no_stream(reported_trial)

    observed = _describe_stream(reported_trial)
    has_several_tokens_per_event = reported_trial.tokens_per_event > BUNDLING_RATIO
    if has_several_tokens_per_event:
        meaning = (
            f"about {reported_trial.tokens_per_event:.1f} tokens per event, so ITL cannot be "
            "measured and is omitted"
        )
        advice = "set the server's stream interval to 1 to measure ITL"
        return Finding(
            check="streaming",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice=advice,
        )

    if unbundled_trials:
        meaning = "tokens arrive one by one, so TTFT, TPOT and ITL are reliable"
        return Finding("streaming", OK, observed, meaning)

    return _explain_bundling(observed, long_trials, short_trials)


def _report_no_stream(trial: Trial) -> Finding:
    """Return the warning for a response that failed or that came in fewer than two events."""
    observed = trial.failure
    if not observed:
        tokens = "? tokens"
        if trial.output_tokens is not None:
            tokens = format.counted(trial.output_tokens, "token")
        observed = f"{format.counted(trial.event_count, 'output event')} for {tokens}"

    return Finding(
        check="streaming",
        state=WARNING,
        observed=observed,
        meaning="the response did not stream: no TPOT, no ITL, and TTFT is the E2E latency",
        advice="check that no proxy waits for the complete response",
    )


def _describe_stream(trial: Trial) -> str:
    """Return a text such as "64 tokens in 64 events, 60 reads over 320 ms"."""
    events_and_reads = (
        f"{format.counted(trial.event_count, 'event')}, "
        f"{format.counted(trial.arrival_count, 'read')} over {format.quantity(trial.span_ms)} ms"
    )
    if trial.output_tokens:
        return f"{format.counted(trial.output_tokens, 'token')} in {events_and_reads}"
    return events_and_reads


def _explain_bundling(
    observed: str, long_trials: Sequence[Trial], short_trials: Sequence[Trial]
) -> Finding:
    """Return the finding for a target whose events arrived together in every long response.

    The cause is a buffer that delays the first event, something that waits for the complete
    response, or it is unknown.

    Args:
        observed: The text that describes the first long response.
        long_trials: Responses of many tokens.
        short_trials: Responses of one token, sent in turns with all long ones but the first.
    """
    # The first long response was sent before there were short ones to compare it with.
    buffer_delay_ms = _measure_buffer_delay_ms(long_trials[1:], short_trials)
    if buffer_delay_ms is not None:
        return _report_buffer(observed, buffer_delay_ms)

    lateness_ms = [trial.timer_lateness_ms for trial in long_trials]
    longest_span_ms = max(trial.span_ms for trial in long_trials)
    is_host_quiet = min(lateness_ms) < QUIET_HOST_MS

    is_complete_at_once = longest_span_ms < QUIET_HOST_MS
    if is_host_quiet and is_complete_at_once:
        return Finding(
            check="streaming",
            state=WARNING,
            observed=observed,
            meaning="complete responses arrive at once, so TPOT and ITL cannot be measured",
            advice="find out what waits for the complete response: the server or a hop before it",
        )

    return Finding(
        check="streaming",
        state=UNKNOWN,
        observed=f"{observed}; timers of this host were up to {max(lateness_ms):.3g} ms late",
        meaning="tokens arrived in groups, because of a buffering proxy or of a busy host",
        advice="repeat while this host and the server are idle",
    )


def _report_buffer(observed: str, buffer_delay_ms: float) -> Finding:
    """Return the warning for a buffer between server and client that delays the first event."""
    delay = f"{format.quantity(buffer_delay_ms)} ms"
    return Finding(
        check="streaming",
        state=WARNING,
        observed=f"{observed}; TTFT is {delay} longer than for a response of one token",
        meaning="a buffer delays and groups tokens, so TTFT is too long and ITL is not reliable",
        advice=(
            "disable proxy buffering (nginx: proxy_buffering off; HAProxy: option http-no-delay), "
            "or give the server more CPU cores"
        ),
    )


def _measure_buffer_delay_ms(
    long_trials: Sequence[Trial], short_trials: Sequence[Trial]
) -> float | None:
    """Return by how much a buffer delays the first event of a response.

    A buffer passes events on when it is full or when the response ends. So it delays the first
    event of a long response, and hardly that of a response of one token. The delay is the
    difference of the median times to the first event.

    It is returned if both of these are true, and otherwise None:

    - The first event of every long response is later than that of every short one. With five of
      each, chance does that once in 252 times.
    - The delay is at least BUFFER_DELAY_SHARE of the generation time, and longer than the timers of
      a quiet host are late.
    """
    long_responses = [trial for trial in long_trials if trial.event_times_ns]
    short_waits_ms = [trial.first_event_ms for trial in short_trials if trial.event_times_ns]
    if min(len(long_responses), len(short_waits_ms)) < COMPARED_PAIRS:
        return None

    long_waits_ms = [trial.first_event_ms for trial in long_responses]
    if min(long_waits_ms) <= max(short_waits_ms):
        return None

    typical_short_wait_ms = median(short_waits_ms)
    duration_ms = median(trial.last_event_ms for trial in long_responses)
    generation_ms = duration_ms - typical_short_wait_ms
    delay_ms = median(long_waits_ms) - typical_short_wait_ms
    if delay_ms < max(BUFFER_DELAY_SHARE * generation_ms, QUIET_HOST_MS):
        return None

    return delay_ms


def check_first_token(trials: Sequence[Trial]) -> Finding | None:
    """Judge the time to the first token of a short question without load.

    Return None if no token arrived. Only the fastest response is judged, because chance delays make
    the other ones longer. If its first token is late, the arrival of its HTTP headers shows where
    the time went: before late headers the request had to wait, for example in a queue; after early
    headers the output had to wait, for example for the prefill.

    Args:
        trials: Responses to a short question.
    """
    responses = [trial for trial in trials if trial.event_times_ns]
    if not responses:
        return None

    fastest = min(responses, key=lambda trial: (trial.first_event_ms, trial.headers_ms))
    ttft = f"{format.quantity(fastest.first_event_ms)} ms"
    if fastest.first_event_ms < LATE_FIRST_TOKEN_MS:
        observed = f"TTFT {ttft} for a short prompt without other load"
        return Finding("first token", OK, observed, "TTFT under load will not be lower")

    if fastest.headers_ms > HEADERS_SHARE_OF_LATE_TOKEN * fastest.first_event_ms:
        headers = f"{format.quantity(fastest.headers_ms)} ms"
        return Finding(
            check="first token",
            state=WARNING,
            observed=f"TTFT {ttft} for a short prompt, {headers} of it before the HTTP headers",
            meaning="a queue, a gateway or a model that is loading delays every request",
            advice="repeat the check, then read the server's log",
        )

    return Finding(
        check="first token",
        state=WARNING,
        observed=f"TTFT {ttft} for a short prompt, although the HTTP headers arrived at once",
        meaning=(
            "the server accepts requests quickly, but other load, a slow prefill or a buffered "
            "stream delays every first token"
        ),
        advice="make sure that no one else uses the server",
    )


# -- Other properties of responses ----------------------------------------------------------------


def check_number_responses(api: str, trials: Sequence[Trial]) -> Finding:
    """Judge the responses of an API that returns numbers instead of text, such as embeddings."""
    failures = [trial.failure for trial in trials if trial.failure]
    if failures:
        meaning = "every request of a run would fail like this"
        return Finding(
            check="response",
            state=FAULT,
            observed=failures[0],
            meaning=meaning,
            advice="read the server's log",
        )

    fastest_ms = min(trial.headers_ms for trial in trials)
    observed = f"shortest E2E latency {format.quantity(fastest_ms)} ms, for a short text ({api})"
    meaning = "E2E latency under load will not be lower; this API has no tokens and no TTFT"

    return Finding("response", OK, observed, meaning)


def check_keep_alive(is_connection_reused: bool) -> Finding:
    """Judge whether a later request could use the connection of an earlier one."""
    if is_connection_reused:
        meaning = "only the first request of a connection includes connect time"
        return Finding("keep-alive", OK, "connections are reused", meaning)
    return Finding(
        check="keep-alive",
        state=WARNING,
        observed="the server closes the connection after each response",
        meaning="every TTFT includes connect and TLS time, and local ports can run out",
        advice="enable keep-alive on server and proxy, or stay below about 400 req/s",
    )


_LIMIT_HEADER = re.compile(r"(?:x-)?ratelimit-(?:limit-)?(?P<unit>requests|tokens)$")
"""Headers that state a limit, such as `x-ratelimit-limit-requests` or `ratelimit-tokens`."""


def check_rate_limit(headers: Mapping[str, str]) -> Finding | None:
    """Report the rate limits that the server states in response headers.

    Return None if it states none.

    Args:
        headers: The response headers, with lower-case names.
    """
    limits = []
    for header_name, limit in sorted(headers.items()):
        match = _LIMIT_HEADER.match(header_name)
        if match is not None:
            limits.append(f"{limit} {match['unit']}")

    if not limits:
        return None

    meaning = "the server refuses requests above this limit with HTTP 429"
    advice = "keep the load below it"
    return Finding(
        check="rate limit",
        state=NOTE,
        observed=", ".join(limits),
        meaning=meaning,
        advice=advice,
    )


def check_metrics_pages(pages: Mapping[str, HttpResponse]) -> Finding:
    """Judge the metrics pages of a server, which show its queue, batch size and cache use.

    Args:
        pages: The response for each path that was tried.
    """
    descriptions = [_describe_metrics_page(path, response) for path, response in pages.items()]
    available = [description for description in descriptions if description]
    if not available:
        observed = f"no metrics at {', '.join(pages)}"
        meaning = "a run cannot show queue depth, batch size and cache use of the server"
        return Finding(
            check="metrics",
            state=NOTE,
            observed=observed,
            meaning=meaning,
            advice="enable the server's metrics",
        )

    observed = "; ".join(available)
    meaning = "a run can show queue depth, batch size and cache use of the server"

    # TensorRT-LLM serves its iteration statistics as a JSON list and clears it at each request.
    if any(response.status == 200 and _is_json_list(response) for response in pages.values()):
        meaning += "; each read empties the JSON list, so concurrent readers lose samples"
        return Finding("metrics", NOTE, observed, meaning)

    return Finding("metrics", OK, observed, meaning)


def _is_json_list(response: HttpResponse) -> bool:
    return response.body.lstrip()[:1] == b"["


def _describe_metrics_page(path: str, response: HttpResponse) -> str:
    """Return what a metrics page contains, such as "/metrics has 9 Prometheus metrics of vLLM".

    Return "" if there is no page, or one without metrics.
    """
    if response.status != 200:
        return ""

    text = response.body.decode("utf-8", "replace")
    if text.lstrip().startswith(("[", "{")):
        return f"{path} is JSON"

    metric_names = _find_metric_names(text)
    if not metric_names:
        return ""

    description = f"{path} has {len(metric_names)} Prometheus metrics"
    for server_profile in SERVER_PROFILES.values():
        if _has_name_with_prefix(metric_names, server_profile.metrics_prefix):
            return f"{description} of {server_profile.title}"

    return description


def _find_metric_names(text: str) -> set[str]:
    """Return the names of the metrics in a Prometheus page.

    A histogram has one TYPE line and many samples with suffixes, so the TYPE lines count metrics
    correctly. A page without TYPE lines is counted by the names of its samples.
    """
    declared_names = set(re.findall(r"(?m)^# TYPE (\S+)", text))
    if declared_names:
        return declared_names
    return set(re.findall(r"(?m)^([a-zA-Z_:][\w:]*)[ {]", text))


def _has_name_with_prefix(names: Iterable[str], prefix: str) -> bool:
    """Return True if a name begins with a prefix. A profile without metrics has the prefix ""."""
    return bool(prefix) and any(name.startswith(prefix) for name in names)


# -- Clocks ---------------------------------------------------------------------------------------


def check_wall_clock(date_header: str, now: datetime) -> Finding | None:
    """Compare the server's clock with the clock of this host.

    Return None if the server sent no valid Date header.

    Args:
        date_header: The value of the Date header of a response, or "" without one.
        now: The time of this host when the response arrived.
    """
    try:
        skew_s = (parsedate_to_datetime(date_header) - now).total_seconds()
    except (TypeError, ValueError):
        return None

    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        observed = f"the server's clock differs by about {skew_s:+.0f} s"
        meaning = "timestamps of server logs do not match the run; latencies are not affected"
        return Finding(
            check="wall clock",
            state=WARNING,
            observed=observed,
            meaning=meaning,
            advice="synchronize both hosts by NTP",
        )

    observed = "the server's clock agrees within 2 s"
    return Finding("wall clock", OK, observed, "timestamps of server logs match the run")


def check_arrival_timestamps(trial: Trial) -> Finding:
    """Report whether the kernel or the reading process takes the arrival times.

    A timestamp of the kernel is not affected by how late a busy client reads the data.
    """
    if trial.has_kernel_timestamps:
        observed = "the kernel timestamps arriving packets"
        return Finding("timestamps", OK, observed, "a busy client does not change latencies")

    observed = "loadgen timestamps responses when it reads them"
    meaning = (
        "a busy client makes latencies longer and looks like a stall of the server; a run reports "
        "neither its receive delay nor stalls"
    )
    return Finding(
        check="timestamps",
        state=NOTE,
        observed=observed,
        meaning=meaning,
        advice="use an idle host, or send from Linux",
    )
