"""Judges what `loadgen doctor` observed of a target, with the meaning for a measurement.

The functions here take observations and return findings; `doctor.py` and `trials.py` send the
requests. What could not be observed is reported as unknown, never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from statistics import median, median_high
from typing import Literal

import msgspec
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES, ServerProfile

from loadgen.core import format
from loadgen.render.section import Kind, Paragraph, Report, Table, section

State = Literal["ok", "note", "warning", "fault", "unknown"]
OK: State = "ok"
NOTE: State = "note"
WARNING: State = "warning"
FAULT: State = "fault"
"""No load can work on the target."""
UNKNOWN: State = "unknown"

NS_PER_MS = 1e6
MAX_SHOWN_ADDRESSES = 4
MAX_SHOWN_MODELS = 6
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


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        check: The name of the check, such as "tls".
        state: How serious it is.
        found: What was observed.
        meaning: The consequence for a measurement.
        advice: What to do, or "" if there is nothing to do.
        code: The error code if the target cannot be used at all, else "".
    """

    check: str
    state: State
    found: str
    meaning: str
    advice: str = ""
    code: str = ""


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
    shown = ", ".join(addresses[:MAX_SHOWN_ADDRESSES])
    more = " and more" if len(addresses) > MAX_SHOWN_ADDRESSES else ""
    found = f"{host}: {shown}{more}, {duration_ms:.3g} ms"
    if len(addresses) > 1:
        return Finding(
            check="name",
            state=NOTE,
            found=found,
            meaning=(
                "names are resolved once, and the first address that answers gets the whole load: "
                "others stay idle"
            ),
            advice="put the balancer's own address in --url to load all of them",
        )
    meaning = "resolved once before the run, so DNS time is in no latency"
    return Finding("name", OK, found, meaning)


def check_connect_time(durations_ms: Sequence[float]) -> Finding:
    """Judge the durations of TCP connects without load. A connect takes one network round trip."""
    typical_ms = median_high(durations_ms)
    found = (
        f"{format.quantity(typical_ms)} ms to connect (median of {len(durations_ms)}, "
        f"most {format.quantity(max(durations_ms))} ms)"
    )
    if typical_ms > SLOW_CONNECT_MS:
        return Finding(
            check="connect",
            state=WARNING,
            found=found,
            meaning=(
                "TTFT as measured here holds at least one such trip: it says more of the network "
                "than of the server"
            ),
            advice="measure from the place where the users are, or beside it",
        )
    return Finding("connect", OK, found, "no TTFT measured here can be below one such trip")


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
    found = f"{version}, handshake {format.quantity(handshake_ms)} ms"
    meaning = (
        "a request that must open a connection pays the handshake in its TTFT; connections are "
        "kept to avoid it"
    )
    if not is_verified:
        found += ", certificate not verified"
        return Finding("tls", NOTE, found, meaning, "give --cacert instead of --insecure")
    if expires is None:
        return Finding("tls", OK, found, meaning)
    days_left = (expires - now).days
    found += f", certificate valid for {days_left} days"
    if days_left < CERTIFICATE_WARNING_DAYS:
        meaning = "connections fail from that day on"
        return Finding("tls", WARNING, found, meaning, "renew the certificate")
    return Finding("tls", OK, found, meaning)


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
        advice = "check the key" if has_key else "set OPENAI_API_KEY, or give --api-key-file"
        meaning = "every request of a load would be refused"
        return Finding("auth", FAULT, f"answers {status}", meaning, advice)
    if not has_key:
        return Finding("auth", OK, "none asked for, none sent", "no time is spent on checking keys")
    if status_without_key is not None and status_without_key not in REFUSED_STATUSES:
        found = f"the same answer ({status_without_key}) without the key"
        meaning = (
            "the key is not looked at there: limits per key may not apply, nor the cost of "
            "checking it"
        )
        return Finding("auth", NOTE, found, meaning)
    found = "key accepted, refused without"
    return Finding("auth", OK, found, "limits of that key apply to the load")


def check_model(probe_result: ProbeResult) -> Finding:
    """Judge whether the server lists the model that a run would request.

    Some servers answer to any model name, so that a response alone does not show which model it
    came from.
    """
    if not probe_result.models:
        found = f"lists no models; asked for {probe_result.model!r}"
        meaning = "whether it serves that model shows only when it answers; it answered the probe"
        return Finding("model", NOTE, found, meaning)
    listed = ", ".join(probe_result.models[:MAX_SHOWN_MODELS])
    found = f"{probe_result.model!r} of {len(probe_result.models)} listed: {listed}"
    if probe_result.model not in probe_result.models:
        meaning = (
            "it answers to a name that it does not list: the numbers are of whatever it serves"
        )
        return Finding("model", WARNING, found, meaning, "name one of its own with --model")
    if not probe_result.server_profile.rejects_unknown_models:
        meaning = "this make answers to any name: a typing error in --model would not show"
        return Finding("model", OK, found, meaning)
    return Finding("model", OK, found, "requests name it, and another name would be refused")


def check_context_length(probe_result: ProbeResult) -> Finding:
    """Report the context length: the most tokens that prompt and output may have together."""
    if probe_result.max_context is None:
        found = "its list of models does not say how long a context it takes"
        meaning = "whether the longest request of a workload fits shows only when it is refused"
        return Finding("context", UNKNOWN, found, meaning)
    found = f"takes {probe_result.max_context:,} tokens of prompt and answer together"
    meaning = (
        "a workload with longer requests is refused before its load; loadgen run --dry-run says "
        "how long they are"
    )
    return Finding("context", OK, found, meaning)


def check_server_profile(probe_result: ProbeResult) -> Finding:
    """Report which inference server was detected, and by which evidence.

    The server profile decides which optional request fields a run sends. A server that is not
    recognized gets only the fields that every server accepts.
    """
    server = probe_result.server_profile.title
    if probe_result.version:
        server += f" {probe_result.version}"
    found = f"{server} ({'; '.join(probe_result.evidence)})"
    if probe_result.server == "generic":
        meaning = "only fields that all servers take are sent: output lengths cannot be forced"
        return Finding("make", WARNING, found, meaning, "say what it is with --server, if you know")
    return Finding("make", OK, found, "decides which fields are sent, and which are never sent")


# -- Token counts ---------------------------------------------------------------------------------


def check_tokenizer(
    probe_result: ProbeResult, tokenizer_name: str, is_user_tokenizer: bool
) -> Finding:
    """Compare the server's token counts of two prompts with those of the local tokenizer.

    From two prompts of different length follow the server's tokens per local token and the fixed
    number of tokens that the chat template adds to each prompt.

    Args:
        probe_result: The result of the probe, which sent the two prompts.
        tokenizer_name: The name of the local tokenizer.
        is_user_tokenizer: True if the user specified a tokenizer file.
    """
    ratio = probe_result.token_ratio
    if ratio is None:
        return Finding(
            check="tokenizer",
            state=UNKNOWN,
            found="the server counts no prompt tokens",
            meaning="prompt lengths are ours alone, and tokens per second of input rest on them",
            advice="give --tokenizer, if local",
        )
    found = f"server counts {ratio:.3f} tokens for each of ours ({tokenizer_name})"
    if probe_result.template_tokens:
        found += f", and {probe_result.template_tokens} more per prompt"
    if abs(ratio - 1) <= TOKEN_COUNT_TOLERANCE:
        meaning = "prompts are as long as the workload says; the template comes on top"
        return Finding("tokenizer", OK, found, meaning)
    if is_user_tokenizer:
        advice = "that tokenizer is not this model's: check --tokenizer"
    else:
        advice = "give the model's own tokenizer.json with --tokenizer"
    meaning = f"a prompt of 1,000 tokens by the workload is {1000 * ratio:,.0f} to the server"
    return Finding("tokenizer", WARNING, found, meaning, advice)


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
            found=f"token counts contradict each other: {probe_result.usage_contradiction}",
            meaning=(
                "the counts in doubt are not used: rates and costs that need them are missing"
            ),
            advice="fix the usage that the server reports, or give --tokenizer",
        )
    responses = "streamed answers" if is_streamed else "answers"
    if probe_result.reports_usage:
        found = f"{responses} carry token counts"
        return Finding("usage", OK, found, "tokens are counted by the server")
    return Finding(
        check="usage",
        state=WARNING,
        found=f"{responses} carry no token counts",
        meaning=(
            "output tokens are counted here, as an estimate: tokens per second and TPOT may be off "
            "by several percent"
        ),
        advice="give --tokenizer for exact counts",
    )


def check_prefix_cache(repeated: Trial, prompt_tokens: int) -> Finding:
    """Judge whether the server caches prompts, by the response to a prompt that it got before.

    Args:
        repeated: The response to the repeated prompt.
        prompt_tokens: The approximate length of that prompt, in the server's tokens.
    """
    if repeated.failure or repeated.cached_tokens is None:
        found = "the server does not say what its cache has served"
        meaning = (
            "prompts of a run are made unique anyway; what a cache has served cannot be seen here"
        )
        return Finding("cache", UNKNOWN, found, meaning)
    found = (
        f"{repeated.cached_tokens} of about {format.counted(prompt_tokens, 'prompt token')} "
        "from cache when sent again"
    )
    if repeated.cached_tokens:
        meaning = (
            "a repeated seed is served from cache, and its TTFT is no prefill: compare runs of "
            "different seeds, or give --salt fresh"
        )
        return Finding("cache", NOTE, found, meaning)
    return Finding("cache", OK, found, "repeated prompts are not served faster")


# -- Output lengths -------------------------------------------------------------------------------


def check_output_lengths(
    server_profile: ServerProfile, forced: Trial, free: Trial, tried_fields: str = ""
) -> Finding:
    """Judge whether the length of an output can be forced.

    Both trials ask a question whose answer is one word, so an output of TRIAL_TOKENS tokens shows
    that the server honours the fields that force a length, such as `ignore_eos`.

    Args:
        server_profile: The profile of the server, with its fields that force a length.
        forced: The response to the question with those fields.
        free: The response to the question without them.
        tried_fields: Fields that were tried on a server of unknown make, joined by " and ".
    """
    fields = " and ".join(server_profile.length_fields) or tried_fields
    if forced.failure:
        return Finding(
            check="length",
            state=WARNING,
            found=f"{fields or 'the question'} on trial: {forced.failure}",
            meaning=(
                "answers end where the model ends them: output lengths differ between servers and "
                "runs"
            ),
            advice="compare only runs with equal output token counts",
        )
    if forced.output_tokens is None:
        found = f"{fields} sent, no count came back"
        meaning = "without a count from the server it cannot be seen whether lengths are honoured"
        return Finding("length", UNKNOWN, found, meaning)
    found = _describe_output_lengths(fields, forced, free)
    if forced.output_tokens != forced.max_tokens:
        return _report_wrong_length(found, is_too_long=forced.output_tokens > forced.max_tokens)
    if tried_fields:
        return _report_unknown_server_with_forced_length(found, tried_fields)
    if not server_profile.length_fields:
        meaning = "nothing forces a length on this make: answers of other prompts may end early"
        advice = "compare only runs with equal output token counts"
        return Finding("length", NOTE, found, meaning, advice)
    meaning = "every answer has exactly the length that the workload asks for"
    if free.output_tokens == forced.max_tokens:
        meaning = (
            "lengths came as asked; this model does not stop by itself, so the fields did not have "
            "to prove it"
        )
    return Finding("length", OK, found, meaning)


def _describe_output_lengths(fields: str, forced: Trial, free: Trial) -> str:
    """Return, for example, "ignore_eos: 64 of 64 tokens came, 3 when left to end by itself"."""
    requested = format.counted(forced.max_tokens, "token")
    text = f"{fields or 'max_tokens alone'}: {forced.output_tokens} of {requested} came"
    if free.failure or free.output_tokens is None:
        return text
    return f"{text}, {free.output_tokens} when left to end by itself"


def _report_wrong_length(found: str, *, is_too_long: bool) -> Finding:
    """Return the warning for an output that does not have the requested length.

    An output that is longer than `max_tokens` points at a wrong count, a shorter one at a length
    that was not forced.
    """
    if is_too_long:
        meaning = (
            "more than max_tokens allows: one of the two is not true, and TPOT and tokens per "
            "second rest on it"
        )
        advice = "give --tokenizer, and compare the counts"
    else:
        meaning = (
            "output lengths are not those of the workload: E2E and tokens per second depend on the "
            "model's mood"
        )
        advice = "look at output token counts before comparing two servers"
    return Finding("length", WARNING, found, meaning, advice)


def _report_unknown_server_with_forced_length(found: str, tried_fields: str) -> Finding:
    """Return the finding for a server of unknown make that honours the tried fields.

    Only `ignore_eos` can be suggested for the body of every request, because the value of
    `min_tokens` would have to differ from request to request.
    """
    meaning = "it honours them, but is of unknown make, so a run does not send them"
    advice = ""
    if "ignore_eos" in tried_fields.split(" and "):
        advice = "add --extra-body '{\"ignore_eos\": true}'"
    return Finding("length", NOTE, found, meaning, advice)


# -- Streaming ------------------------------------------------------------------------------------


def has_bundled_events(trial: Trial) -> bool:
    """Return True if output events of one token each arrived several at a time.

    Either something between server and client buffers them, or one of the two hosts was too busy
    to send or read them one by one. Events that hold several tokens each are a setting of the
    server and do not count here.
    """
    if not trial.is_stream or trial.tokens_per_event > BUNDLING_RATIO:
        return False
    if trial.event_count / trial.arrival_count <= BUNDLING_RATIO:
        return False
    if trial.arrival_count <= trial.event_count // BUFFERED_EVENTS_PER_ARRIVAL:
        return True
    # Events that follow each other this fast can share an arrival by chance.
    return trial.span_ms / trial.event_count >= FAST_EVENT_MS


def check_streaming(long_trials: Sequence[Trial], short_trials: Sequence[Trial] = ()) -> Finding:
    """Judge whether tokens arrive one by one.

    A busy host bundles events in the same way as a buffer does. Two observations tell them apart:
    a buffer lets no event through early, so one long response whose events arrived singly proves
    that there is none; and a buffer delays the first event of long responses only, whereas a busy
    host delays short ones as well. Without either observation the finding is "unknown".

    Args:
        long_trials: Responses of many tokens to the same question.
        short_trials: Responses of one token, sent in turns with all long ones but the first.
    """
    unbundled = (trial for trial in long_trials if not has_bundled_events(trial))
    trial = next(unbundled, long_trials[0])
    if not trial.is_stream:
        return _report_no_stream(trial)
    found = _describe_stream(trial)
    if trial.tokens_per_event > BUNDLING_RATIO:
        meaning = (
            f"about {trial.tokens_per_event:.1f} tokens per event: gaps are not inter-token "
            "latency, and ITL is left out"
        )
        advice = "for ITL set the server's stream interval to 1"
        return Finding("streaming", WARNING, found, meaning, advice)
    if not has_bundled_events(trial):
        meaning = "token by token: TTFT, TPOT and ITL mean what they say"
        return Finding("streaming", OK, found, meaning)
    return _explain_bundling(found, long_trials, short_trials)


def _report_no_stream(trial: Trial) -> Finding:
    """Return the warning for a response that failed or that came in fewer than two events."""
    found = trial.failure
    if not found:
        tokens = "? tokens"
        if trial.output_tokens is not None:
            tokens = format.counted(trial.output_tokens, "token")
        found = f"{format.counted(trial.event_count, 'output event')} for {tokens}"
    return Finding(
        check="streaming",
        state=WARNING,
        found=found,
        meaning=(
            "there is nothing between a first and a last token: no TPOT, no ITL, and TTFT is the "
            "whole answer"
        ),
        advice="check that nothing in between waits for the whole answer",
    )


def _describe_stream(trial: Trial) -> str:
    """Return, for example, "64 tokens in 64 events in 60 arrivals over 320 ms"."""
    text = (
        f"{format.counted(trial.event_count, 'event')} in {trial.arrival_count} arrivals over "
        f"{format.quantity(trial.span_ms)} ms"
    )
    if trial.output_tokens:
        return f"{format.counted(trial.output_tokens, 'token')} in {text}"
    return text


def _explain_bundling(
    found: str, long_trials: Sequence[Trial], short_trials: Sequence[Trial]
) -> Finding:
    """Return the finding for bundled events: a buffer, complete responses, or an unknown cause."""
    # The first long response was sent before there were short ones to compare it with.
    buffer_delay_ms = _measure_buffer_delay_ms(long_trials[1:], short_trials)
    if buffer_delay_ms is not None:
        return Finding(
            check="streaming",
            state=WARNING,
            found=(
                f"{found}; the first comes {format.quantity(buffer_delay_ms)} ms later than that "
                "of an answer of one token"
            ),
            meaning=(
                "something holds answers back until enough is there: gaps are its rhythm, and TTFT "
                "is late"
            ),
            advice=(
                "look for a buffering proxy (nginx: proxy_buffering off, HAProxy: option "
                "http-no-delay), or a server with too few cores to send as it computes"
            ),
        )
    lateness_ms = [trial.timer_lateness_ms for trial in long_trials]
    longest_span_ms = max(trial.span_ms for trial in long_trials)
    if min(lateness_ms) < QUIET_HOST_MS and longest_span_ms < QUIET_HOST_MS:
        return Finding(
            check="streaming",
            state=WARNING,
            found=found,
            meaning=(
                "whole answers come at once though this host was not late: there are no gaps "
                "between tokens"
            ),
            advice="see what makes or holds whole answers before they are sent",
        )
    return Finding(
        check="streaming",
        state=UNKNOWN,
        found=f"{found}; this host was up to {format.quantity(max(lateness_ms))} ms late",
        meaning=(
            "cannot tell whether something holds events back or a host is too busy to send or read "
            "them one by one"
        ),
        advice="ask again when this host and the server have nothing else to do",
    )


def _measure_buffer_delay_ms(
    long_trials: Sequence[Trial], short_trials: Sequence[Trial]
) -> float | None:
    """Return how much later the first event of a long response comes than that of a short one.

    A buffer passes the first event on when it is full, so the longer the response, the later. The
    delay is None unless it is evident: the first event of every long response is later than that of
    every short one (with five of each, chance does that once in 252 times), and the delay is a fair
    share of the generation time and more than the lateness of a quiet host.
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

    Return None if no token arrived. The fastest response counts, because other delays only add to
    it. Whether the response headers are late too shows if the request or the output had to wait.
    """
    responses = [trial for trial in trials if trial.event_times_ns]
    if not responses:
        return None
    fastest = min(responses, key=lambda trial: (trial.first_event_ms, trial.headers_ms))
    found = f"{format.quantity(fastest.first_event_ms)} ms to the first token of a short question"
    if fastest.first_event_ms < LATE_FIRST_TOKEN_MS:
        meaning = "no TTFT under load can be expected below it"
        return Finding("first token", OK, found, meaning)
    if fastest.headers_ms > HEADERS_SHARE_OF_LATE_TOKEN * fastest.first_event_ms:
        return Finding(
            check="first token",
            state=WARNING,
            found=(
                f"{found}, {format.quantity(fastest.headers_ms)} ms of it before the head of the "
                "answer"
            ),
            meaning=(
                "not even the head comes sooner: a queue, a gateway or a model being woken holds "
                "every request back, and every TTFT holds it"
            ),
            advice="ask again, then see its log",
        )
    return Finding(
        check="first token",
        state=WARNING,
        found=found,
        meaning=(
            "the head comes at once and the token late: other load, a slow prefill or a stream "
            "that is held back; every TTFT holds it"
        ),
        advice="make sure that nobody else uses it",
    )


# -- Other properties of responses ----------------------------------------------------------------


def check_value_responses(api: str, trials: Sequence[Trial]) -> Finding:
    """Judge the responses of an API that returns numbers instead of text, such as embeddings."""
    failures = [trial.failure for trial in trials if trial.failure]
    if failures:
        meaning = "every request of a load would end like this"
        return Finding("answer", FAULT, failures[0], meaning, "see the server's log")
    fastest_ms = min(trial.headers_ms for trial in trials)
    found = f"{format.quantity(fastest_ms)} ms to the answer of {api} to a short text"
    meaning = "no E2E under load can be expected below it; there are no tokens, and no TTFT"
    return Finding("answer", OK, found, meaning)


def check_keep_alive(is_connection_reused: bool) -> Finding:
    """Judge whether a later request could use the connection of an earlier one."""
    if is_connection_reused:
        meaning = "connect time falls on the first requests only"
        return Finding("keep-alive", OK, "connections serve again", meaning)
    return Finding(
        check="keep-alive",
        state=WARNING,
        found="connections are closed after each answer",
        meaning=(
            "every request needs a new connection: connect (and TLS) time is in TTFT, and local "
            "ports can run out"
        ),
        advice=(
            "look at the keep-alive of server and proxy; if it must be so, keep to some 400 new "
            "requests a second"
        ),
    )


_LIMIT_HEADER = re.compile(r"(?:x-)?ratelimit-(?:limit-)?(?P<unit>requests|tokens)$")
"""Headers that state a limit, such as `x-ratelimit-limit-requests` or `ratelimit-tokens`."""


def check_rate_limit(headers: Mapping[str, str]) -> Finding | None:
    """Report the rate limits in response headers with lower-case names, or None without any."""
    limits = []
    for header_name, limit in sorted(headers.items()):
        match = _LIMIT_HEADER.match(header_name)
        if match is not None:
            limits.append(f"{limit} {match['unit']}")
    if not limits:
        return None
    meaning = "above that rate answers are 429: failures of the quota, not of the model"
    advice = "keep the load of a run below it"
    return Finding("rate limit", NOTE, ", ".join(limits), meaning, advice)


def check_metrics_pages(pages: Mapping[str, HttpResponse]) -> Finding:
    """Judge the metrics pages of a server, which show its queue, batch size and cache use.

    Args:
        pages: The response for each path that was tried.
    """
    descriptions = [_describe_metrics_page(path, response) for path, response in pages.items()]
    available = [description for description in descriptions if description]
    if not available:
        found = f"no page at {', '.join(pages)}"
        meaning = (
            "queue depth and cache use stay unknown: a slow server and a full one look alike from "
            "outside"
        )
        return Finding("metrics", NOTE, found, meaning, "switch it on to see causes")
    found = "; ".join(available)
    meaning = "queue depth, batch size and cache use can be read beside a run"
    # TensorRT-LLM serves its iteration statistics as a JSON list and clears it at each request.
    if any(response.status == 200 and _is_json_list(response) for response in pages.values()):
        meaning += "; the JSON list is emptied by each reader, so two readers rob each other"
        return Finding("metrics", NOTE, found, meaning)
    return Finding("metrics", OK, found, meaning)


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
    """Compare the server's Date header with the clock of this host; None if it cannot be read."""
    try:
        skew_s = (parsedate_to_datetime(date_header) - now).total_seconds()
    except (TypeError, ValueError):
        return None
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        found = f"the server's clock differs from ours by about {skew_s:+.0f} s"
        meaning = (
            "no latency rests on it, but server logs and metrics will not line up with the run"
        )
        return Finding("wall clock", WARNING, found, meaning, "let both hosts keep time by NTP")
    found = "the server's clock agrees within 2 s"
    return Finding("wall clock", OK, found, "its logs line up with the run")


def check_arrival_timestamps(trial: Trial) -> Finding:
    """Report whether the kernel or the reading process takes the arrival times.

    A timestamp of the kernel is not affected by how late a busy client reads the data.
    """
    if trial.has_kernel_timestamps:
        found = "arrivals are stamped by the kernel"
        return Finding("stamps", OK, found, "our own lateness is not in the latencies")
    found = "arrivals are stamped by the reader's own clock"
    meaning = (
        "arrivals are stamped when they are read: a busy client makes latencies look longer (stamp "
        "error says so)"
    )
    return Finding("stamps", NOTE, found, meaning)


# -- The report -----------------------------------------------------------------------------------


def report(title: str, findings: Sequence[Finding]) -> Report:
    """Return a report with a table of the findings and, at its end, their number by state."""
    rows = [(finding.state, finding.check, _describe_finding(finding)) for finding in findings]
    return Report(
        title=title,
        made_by="loadgen doctor",
        answer=[_summarize_states(findings)],
        answer_last=True,
        sections=[section("", Table(("", "check", "found, and what it means"), rows, "words"))],
    )


def _describe_finding(finding: Finding) -> str:
    """Return the text of a finding, such as "9 open files: too few -> raise the limit"."""
    text = f"{finding.found}: {finding.meaning}"
    if finding.advice:
        text += f" -> {finding.advice}"
    return text


def _summarize_states(findings: Sequence[Finding]) -> Paragraph:
    """Return a paragraph such as "1 fault, 2 warnings", coloured by the most serious state."""
    counts = Counter(finding.state for finding in findings)
    texts = []
    for state in (FAULT, WARNING, UNKNOWN, NOTE):
        if not counts[state]:
            continue
        # "unknown" is an adjective and has no plural.
        text = f"{counts[state]} {state}"
        texts.append(text if state == UNKNOWN else format.counted(counts[state], state))
    if not texts:
        return Paragraph("nothing stands in the way", "good")
    kind: Kind = "bad" if counts[FAULT] else "warn"
    return Paragraph(", ".join(texts), kind)
