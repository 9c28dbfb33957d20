"""Judges what the preflight observed of a target: one finding per fact, with its meaning for a measurement.

Pure: answers, counts and instants in, findings out. `doctor.py` sends the requests. No finding is a guess: what could
not be observed is reported as unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from statistics import median
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
FAULT: State = "fault"  # a load cannot work
UNKNOWN: State = "unknown"

TRIAL_TOKENS = 64  # more than an answer to "yes or no?" has by chance
AGREEMENT = (
    0.02  # relative, of two token counts of the same text; as in the validity verdict of a run
)
BUNDLED = (
    1.5  # tokens per event, or events per arrival, above which gaps are not gaps between tokens
)
LUMP = 8  # events per arrival from which a stream was buffered, at any token rate
QUICK_MS = 1.0  # time per event below which several events can share an arrival by chance
PAIRS = 5  # short and long answers that are compared where events came together
HELD = 0.1  # part of the time of an answer by which a buffer delays its first event
QUIET_MS = 2.0  # lateness of a timer below which a host is not busy, and length of an answer that came at once
SKEW_S = 2.0  # difference of two wall clocks; a Date header has whole seconds
CERTIFICATE_DAYS = 14
LATE_MS = 500.0  # time to the first token of a short question on an idle server that prefill alone does not explain


class Finding(msgspec.Struct, frozen=True):
    """`found`: what was observed. `meaning`: its consequence for a measurement. `advice`: what to do, or "".

    `code`: of a target that cannot be used at all, why; else "".
    """

    check: str
    state: State
    found: str
    meaning: str
    advice: str = ""
    code: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One observed answer: token counts by the server (None: not given), arrival instants of output events in ns."""

    failure: str = ""
    asked: int = 0
    output: int | None = None
    cached: int | None = None
    instants_ns: tuple[int, ...] = ()
    sent_ns: int = 0
    late_ms: float = 0.0  # the most that a 1 ms timer of this process was late meanwhile
    head_ns: int = 0  # arrival of the response head
    reused: bool = False
    kernel_stamp: bool = False
    headers: Mapping[str, str] = {}


# -- the connection ----------------------------------------------------------------------------------------------


def name(host: str, addresses: Sequence[str], took_ms: float) -> Finding:
    """Name resolution of the host."""
    words = f"{host}: {', '.join(addresses[:4])}{' and more' if len(addresses) > 4 else ''}, {took_ms:.3g} ms"
    if len(addresses) > 1:
        meaning = "names are resolved once, and the first address that answers gets the whole load: others stay idle"
        return Finding(
            "name",
            NOTE,
            words,
            meaning,
            "put the balancer's own address in --url to load all of them",
        )
    return Finding("name", OK, words, "resolved once before the run, so DNS time is in no latency")


def connect(times_ms: Sequence[float]) -> Finding:
    """TCP connect times without load."""
    median = sorted(times_ms)[len(times_ms) // 2]
    most = format.quantity(max(times_ms))
    words = f"{format.quantity(median)} ms to connect (median of {len(times_ms)}, most {most} ms)"
    if median > 100:
        meaning = "TTFT as measured here holds at least one such trip: it says more of the network than of the server"
        return Finding(
            "connect",
            WARNING,
            words,
            meaning,
            "measure from the place where the users are, or beside it",
        )
    return Finding("connect", OK, words, "no TTFT measured here can be below one such trip")


def tls(
    version: str, verified: bool, expires: datetime | None, now: datetime, handshake_ms: float
) -> Finding:
    """A TLS handshake. `expires` is known only for a verified certificate."""
    words = f"{version}, handshake {format.quantity(handshake_ms)} ms"
    meaning = "a request that must open a connection pays the handshake in its TTFT; connections are kept to avoid it"
    if not verified:
        words += ", certificate not verified"
        return Finding("tls", NOTE, words, meaning, "give --cacert instead of --insecure")
    if expires is not None:
        days = (expires - now).days
        words += f", certificate valid for {days} days"
        if days < CERTIFICATE_DAYS:
            return Finding(
                "tls", WARNING, words, "connections fail from that day on", "renew the certificate"
            )
    return Finding("tls", OK, words, meaning)


def auth(keyed: bool, with_key: int, without: int | None) -> Finding:
    """Authentication, from the HTTP status of the model list with the key and without it (None: not tried)."""
    if with_key in (401, 403):
        hint = "check the key" if keyed else "set OPENAI_API_KEY, or give --api-key-file"
        return Finding(
            "auth", FAULT, f"answers {with_key}", "every request of a load would be refused", hint
        )
    if not keyed:
        return Finding("auth", OK, "none asked for, none sent", "no time is spent on checking keys")
    if without is not None and without not in (401, 403):
        meaning = "the key is not looked at there: limits per key may not apply, nor the cost of checking it"
        return Finding("auth", NOTE, f"the same answer ({without}) without the key", meaning)
    return Finding(
        "auth", OK, "key accepted, refused without", "limits of that key apply to the load"
    )


def models(probe_result: ProbeResult) -> Finding:
    """The model list, and the model that a run would request."""
    listed = ", ".join(probe_result.models[:6]) or "none"
    words = f"{probe_result.model!r} of {len(probe_result.models)} listed: {listed}"
    if not probe_result.models:
        meaning = "whether it serves that model shows only when it answers; it answered the probe"
        return Finding("model", NOTE, f"lists no models; asked for {probe_result.model!r}", meaning)
    if probe_result.model not in probe_result.models:
        meaning = (
            "it answers to a name that it does not list: the numbers are of whatever it serves"
        )
        return Finding("model", WARNING, words, meaning, "name one of its own with --model")
    if not probe_result.server_profile.rejects_unknown_models:
        return Finding(
            "model",
            OK,
            words,
            "this make answers to any name: a typing error in --model would not show",
        )
    return Finding("model", OK, words, "requests name it, and another name would be refused")


def context(probed: ProbeResult) -> Finding:
    """How long prompt and answer may be together."""
    if probed.max_context is None:
        meaning = "whether the longest request of a workload fits shows only when it is refused"
        return Finding(
            "context",
            UNKNOWN,
            "its list of models does not say how long a context it takes",
            meaning,
        )
    meaning = "a workload with longer requests is refused before its load; loadgen run --dry-run says how long they are"
    return Finding(
        "context", OK, f"takes {probed.max_context:,} tokens of prompt and answer together", meaning
    )


def make(probed: ProbeResult) -> Finding:
    """The detected make of server: which entry of the table of server profiles applies."""
    words = f"{probed.server_profile.title}{' ' + probed.version if probed.version else ''} ({'; '.join(probed.evidence)})"
    if probed.server == "generic":
        meaning = "only fields that all servers take are sent: output lengths cannot be forced"
        return Finding("make", WARNING, words, meaning, "say what it is with --server, if you know")
    return Finding("make", OK, words, "decides which fields are sent, and which are never sent")


# -- the answers -------------------------------------------------------------------------------------------------


def tokenizer(probe_result: ProbeResult, called: str, own: bool) -> Finding:
    """The server's token counts of two prompts against ours. `called`: our tokenizer; `own`: it is from a file."""
    ratio, template = probe_result.token_ratio, probe_result.template_tokens
    if ratio is None:
        words = "the server counts no prompt tokens"
        meaning = "prompt lengths are ours alone, and tokens per second of input rest on them"
        return Finding("tokenizer", UNKNOWN, words, meaning, "give --tokenizer, if local")
    words = f"server counts {ratio:.3f} tokens for each of ours ({called})"
    words += f", and {template} more per prompt" if template else ""
    if abs(ratio - 1) <= AGREEMENT:
        return Finding(
            "tokenizer",
            OK,
            words,
            "prompts are as long as the workload says; the template comes on top",
        )
    meaning = f"a prompt of 1,000 tokens by the workload is {1000 * ratio:,.0f} to the server"
    wrong, better = (
        "that tokenizer is not this model's: check",
        "give the model's own tokenizer.json with",
    )
    return Finding("tokenizer", WARNING, words, meaning, f"{wrong if own else better} --tokenizer")


def forced(
    server_profile: ServerProfile, with_force: Trial, free: Trial, tried: str = ""
) -> Finding:
    """Whether output lengths can be forced: a one-word question with TRIAL_TOKENS tokens, forced and not forced.

    `tried`: fields that were sent as a test although the table of server profiles has none for this make.
    """
    fields = " and ".join(server_profile.length_fields) or tried
    asked = with_force.asked
    if with_force.failure:
        words = f"{fields or 'the question'} on trial: {with_force.failure}"
        meaning = (
            "answers end where the model ends them: output lengths differ between servers and runs"
        )
        return Finding(
            "length", WARNING, words, meaning, "compare only runs with equal output token counts"
        )
    if with_force.output is None:
        meaning = "without a count from the server it cannot be seen whether lengths are honoured"
        return Finding("length", UNKNOWN, f"{fields} sent, no count came back", meaning)
    natural = (
        "" if free.failure or free.output is None else f", {free.output} when left to end by itself"
    )
    words = f"{fields or 'max_tokens alone'}: {with_force.output} of {format.counted(asked, 'token')} came{natural}"
    if with_force.output > asked:
        meaning = "more than max_tokens allows: one of the two is not true, and TPOT and tokens per second rest on it"
        return Finding(
            "length", WARNING, words, meaning, "give --tokenizer, and compare the counts"
        )
    if with_force.output != asked:
        meaning = "output lengths are not those of the workload: E2E and tokens per second depend on the model's mood"
        return Finding(
            "length",
            WARNING,
            words,
            meaning,
            "look at output token counts before comparing two servers",
        )
    if tried:
        meaning = "it honours them, but is of unknown make, so a run does not send them"
        body = ", ".join(
            f'"{field}": true' for field in tried.split(" and ") if field == "ignore_eos"
        )
        return Finding(
            "length", NOTE, words, meaning, f"add --extra-body '{{{body}}}'" if body else ""
        )
    if not server_profile.length_fields:
        meaning = "nothing forces a length on this make: answers of other prompts may end early"
        return Finding(
            "length", NOTE, words, meaning, "compare only runs with equal output token counts"
        )
    if free.output == asked:
        meaning = "lengths came as asked; this model does not stop by itself, so the fields did not have to prove it"
        return Finding("length", OK, words, meaning)
    return Finding(
        "length", OK, words, "every answer has exactly the length that the workload asks for"
    )


def lumped(trial: Trial) -> bool:
    """Whether the events of an answer came several at a time: by a buffer, or because a host was late with its work."""
    events, arrivals = len(trial.instants_ns), _arrivals(trial)
    if trial.failure or events < 2 or events / arrivals <= BUNDLED or _per_event(trial) > BUNDLED:
        return False
    return arrivals <= events // LUMP or _span_ms(trial) / events >= QUICK_MS


def streaming(longs: Sequence[Trial], shorts: Sequence[Trial] = ()) -> Finding:
    """Whether tokens arrive one by one, judged by the counts and arrival instants of answers to one question.

    `longs`: answers of many tokens, to the first of which the words refer; `shorts`: answers of one token, asked for
    in turns with all longs but the first. A host that is busy bundles events too, of the server or of ours. But a
    buffer lets no event through early, so that one long answer whose events came singly shows that there is none; and
    the longer the answer, the later a buffer passes its first event on, whereas a busy host delays short ones as well.
    What shows neither is not called a buffer.
    """
    trial = next((one for one in longs if not lumped(one)), longs[0])
    events = len(trial.instants_ns)
    if trial.failure or events < 2:
        tokens = "? tokens" if trial.output is None else format.counted(trial.output, "token")
        words = trial.failure or f"{format.counted(events, 'output event')} for {tokens}"
        meaning = "there is nothing between a first and a last token: no TPOT, no ITL, and TTFT is the whole answer"
        return Finding(
            "streaming",
            WARNING,
            words,
            meaning,
            "check that nothing in between waits for the whole answer",
        )
    span = format.quantity(_span_ms(trial))
    words = f"{format.counted(events, 'event')} in {_arrivals(trial)} arrivals over {span} ms"
    if trial.output:
        words = f"{format.counted(trial.output, 'token')} in {words}"
    if (per_event := _per_event(trial)) > BUNDLED:
        meaning = f"about {per_event:.1f} tokens per event: gaps are not inter-token latency, and ITL is left out"
        return Finding(
            "streaming", WARNING, words, meaning, "for ITL set the server's stream interval to 1"
        )
    if not lumped(trial):
        return Finding(
            "streaming", OK, words, "token by token: TTFT, TPOT and ITL mean what they say"
        )
    if held := _held(longs[1:], shorts):
        words += f"; the first comes {format.quantity(held)} ms later than that of an answer of one token"
        meaning = "something holds answers back until enough is there: gaps are its rhythm, and TTFT is late"
        advice = "look for a buffering proxy (nginx: proxy_buffering off, HAProxy: option http-no-delay), or a server "
        return Finding(
            "streaming",
            WARNING,
            words,
            meaning,
            advice + "with too few cores to send as it computes",
        )
    if min(one.late_ms for one in longs) < QUIET_MS and max(map(_span_ms, longs)) < QUIET_MS:
        meaning = "whole answers come at once though this host was not late: there are no gaps between tokens"
        return Finding(
            "streaming",
            WARNING,
            words,
            meaning,
            "see what makes or holds whole answers before they are sent",
        )
    words += f"; this host was up to {format.quantity(max(one.late_ms for one in longs))} ms late"
    meaning = "cannot tell whether something holds events back or a host is too busy to send or read them one by one"
    return Finding(
        "streaming",
        UNKNOWN,
        words,
        meaning,
        "ask again when this host and the server have nothing else to do",
    )


def _arrivals(trial: Trial) -> int:
    return 1 + sum(later > before for before, later in pairwise(trial.instants_ns))


def _span_ms(trial: Trial) -> float:
    return (trial.instants_ns[-1] - trial.instants_ns[0]) / 1e6


def _per_event(trial: Trial) -> float:
    return trial.output / len(trial.instants_ns) if trial.output and trial.instants_ns else 1.0


def _held(longs: Sequence[Trial], shorts: Sequence[Trial]) -> float:
    """By how many ms the first event of a long answer comes later than that of a short one; 0.0 where not clear.

    Clear: each of the longs is later than each of the shorts (by chance once in 252 times, of five each), by a fair
    part of the time in which the long answer is made, and by more than a quiet host may be late.
    """
    waits = [(trial.instants_ns[0] - trial.sent_ns) / 1e6 for trial in longs if trial.instants_ns]
    short_waits = [
        (trial.instants_ns[0] - trial.sent_ns) / 1e6 for trial in shorts if trial.instants_ns
    ]
    if min(len(waits), len(short_waits)) < PAIRS or min(waits) <= max(short_waits):
        return 0.0
    whole = median(
        (trial.instants_ns[-1] - trial.sent_ns) / 1e6 for trial in longs if trial.instants_ns
    )
    later = median(waits) - median(short_waits)
    return later if later >= max(HELD * (whole - median(short_waits)), QUIET_MS) else 0.0


def first_token(trials: Sequence[Trial]) -> Finding | None:
    """The shortest time to the first token of a short question without load. None where no token arrived."""
    waits = [(t.instants_ns[0] - t.sent_ns, t.head_ns - t.sent_ns) for t in trials if t.instants_ns]
    if not waits:
        return None
    total_ms, head_ms = (ns / 1e6 for ns in min(waits))
    words = f"{format.quantity(total_ms)} ms to the first token of a short question"
    if total_ms < LATE_MS:
        return Finding("first token", OK, words, "no TTFT under load can be expected below it")
    if head_ms > 0.8 * total_ms:
        words += f", {format.quantity(head_ms)} ms of it before the head of the answer"
        meaning = "not even the head comes sooner: a queue, a gateway or a model being woken holds every request back, "
        meaning, advice = meaning + "and every TTFT holds it", "ask again, then see its log"
    else:
        meaning = "the head comes at once and the token late: other load, a slow prefill or a stream that is held back"
        meaning, advice = meaning + "; every TTFT holds it", "make sure that nobody else uses it"
    return Finding("first token", WARNING, words, meaning, advice)


def values(api: str, trials: Sequence[Trial]) -> Finding:
    """Whether a short text is answered with numbers, and how soon: embeddings, or a ranking."""
    if failed := [trial.failure for trial in trials if trial.failure]:
        return Finding(
            "answer",
            FAULT,
            failed[0],
            "every request of a load would end like this",
            "see the server's log",
        )
    soonest_ms = min(trial.head_ns - trial.sent_ns for trial in trials) / 1e6
    words = f"{format.quantity(soonest_ms)} ms to the answer of {api} to a short text"
    return Finding(
        "answer",
        OK,
        words,
        "no E2E under load can be expected below it; there are no tokens, and no TTFT",
    )


def usage(probe_result: ProbeResult, streamed: bool) -> Finding:
    """Whether answers (streamed or not, as in the run) carry token counts."""
    if probe_result.usage_contradiction:
        return Finding(
            "usage",
            WARNING,
            f"token counts contradict each other: {probe_result.usage_contradiction}",
            "the counts in doubt are not used: rates and costs that need them are missing",
            "fix the usage that the server reports, or give --tokenizer",
        )
    kind = "streamed answers" if streamed else "answers"
    if probe_result.reports_usage:
        return Finding(
            "usage", OK, f"{kind} carry token counts", "tokens are counted by the server"
        )
    meaning = "output tokens are counted here, as an estimate: tokens per second and TPOT may be off by several percent"
    return Finding(
        "usage",
        WARNING,
        f"{kind} carry no token counts",
        meaning,
        "give --tokenizer for exact counts",
    )


def cache(again: Trial, prompt_tokens: int) -> Finding:
    """Prefix caching: the probe's longer prompt, sent a second time."""
    if again.failure or again.cached is None:
        meaning = (
            "prompts of a run are made unique anyway; what a cache has served cannot be seen here"
        )
        return Finding(
            "cache", UNKNOWN, "the server does not say what its cache has served", meaning
        )
    words = f"{again.cached} of about {format.counted(prompt_tokens, 'prompt token')} from cache when sent again"
    if again.cached:
        meaning = "a repeated seed is served from cache, and its TTFT is no prefill: compare runs of different seeds, "
        return Finding("cache", NOTE, words, meaning + "or give --salt fresh")
    return Finding("cache", OK, words, "repeated prompts are not served faster")


def keep_alive(reused: bool) -> Finding:
    """Whether a later request reused the connection of an earlier one."""
    if reused:
        return Finding(
            "keep-alive",
            OK,
            "connections serve again",
            "connect time falls on the first requests only",
        )
    meaning = "every request needs a new connection: connect (and TLS) time is in TTFT, and local ports can run out"
    advice = "look at the keep-alive of server and proxy; if it must be so, keep to some 400 new requests a second"
    return Finding(
        "keep-alive", WARNING, "connections are closed after each answer", meaning, advice
    )


_LIMIT_HEADER = re.compile(
    r"(?:x-)?ratelimit-(?:limit-)?(requests|tokens)$|x-ratelimit-limit-(requests|tokens)$"
)


def rate_limit(headers: Mapping[str, str]) -> Finding | None:
    """Rate limits in the response headers; None when there are none."""
    limits = [
        f"{value} {(m[1] or m[2])}"
        for key, value in sorted(headers.items())
        if (m := _LIMIT_HEADER.match(key))
    ]
    if not limits:
        return None
    meaning = "above that rate answers are 429: failures of the quota, not of the model"
    return Finding(
        "rate limit", NOTE, ", ".join(limits), meaning, "keep the load of a run below it"
    )


def metrics_pages(pages: Mapping[str, HttpResponse]) -> Finding:
    """The server's metrics pages, by path."""
    words = [text for path, answer in pages.items() if (text := _metrics_page_words(path, answer))]
    if not words:
        meaning = "queue depth and cache use stay unknown: a slow server and a full one look alike from outside"
        return Finding(
            "metrics", NOTE, f"no page at {', '.join(pages)}", meaning, "switch it on to see causes"
        )
    meaning = "queue depth, batch size and cache use can be read beside a run"
    drained = any(
        answer.status == 200 and answer.body.lstrip()[:1] == b"[" for answer in pages.values()
    )
    if drained:
        meaning += "; the JSON list is emptied by each reader, so two readers rob each other"
    return Finding("metrics", NOTE if drained else OK, "; ".join(words), meaning)


def _metrics_page_words(path: str, answer: HttpResponse) -> str:
    if answer.status != 200:
        return ""
    text = answer.body.decode("utf-8", "replace")
    if text.lstrip()[:1] in ("[", "{"):
        return f"{path} is JSON"
    names = set(re.findall(r"(?m)^# TYPE (\S+)", text)) or set(
        re.findall(r"(?m)^([a-zA-Z_:][\w:]*)[ {]", text)
    )
    if not names:
        return ""
    known = next(
        (row.title for row in SERVER_PROFILES.values() if _any_begins(names, row.metrics_prefix)),
        "",
    )
    return f"{path} has {len(names)} Prometheus metrics{f' of {known}' if known else ''}"


def _any_begins(names: Iterable[str], prefix: str) -> bool:
    return bool(prefix) and any(name.startswith(prefix) for name in names)


# -- this host ---------------------------------------------------------------------------------------------------


def wall_clock(date: str, now: datetime) -> Finding | None:
    """The server's Date header against our wall clock; None without a readable header."""
    try:
        skew = (parsedate_to_datetime(date) - now).total_seconds()
    except (TypeError, ValueError):
        return None
    words = f"the server's clock differs from ours by about {skew:+.0f} s"
    if abs(skew) > SKEW_S:
        meaning = (
            "no latency rests on it, but server logs and metrics will not line up with the run"
        )
        return Finding("wall clock", WARNING, words, meaning, "let both hosts keep time by NTP")
    return Finding(
        "wall clock", OK, "the server's clock agrees within 2 s", "its logs line up with the run"
    )


def stamps(trial: Trial) -> Finding:
    """The source of arrival instants: the kernel or the reading process."""
    if trial.kernel_stamp:
        return Finding(
            "stamps",
            OK,
            "arrivals are stamped by the kernel",
            "our own lateness is not in the latencies",
        )
    meaning = "arrivals are stamped when they are read: a busy client makes latencies look longer (stamp error says so)"
    return Finding("stamps", NOTE, "arrivals are stamped by the reader's own clock", meaning)


def report(title: str, findings: Sequence[Finding]) -> Report:
    """The findings: what each is, what it means, and what to do."""
    counts = Counter(finding.state for finding in findings)
    words = [
        _counted(counts[state], state) for state in (FAULT, WARNING, UNKNOWN, NOTE) if counts[state]
    ]
    kind: Kind = "bad" if counts[FAULT] else "warn" if words else "good"
    rows = [
        (
            finding.state,
            finding.check,
            f"{finding.found}: {finding.meaning}" + f" -> {finding.advice}" * bool(finding.advice),
        )
        for finding in findings
    ]
    return Report(
        title=title,
        made_by="loadgen doctor",
        answer=[Paragraph(", ".join(words) or "nothing stands in the way", kind)],
        answer_last=True,
        sections=[section("", Table(("", "check", "found, and what it means"), rows, "words"))],
    )


def _counted(count: int, state: str) -> str:
    return f"{count} {state}" if state == UNKNOWN else format.counted(count, state)
