"""The sentences for every code of a verdict: reasons, caveats and warnings.

Pure. There is one table for JSON and reports alike. A sentence gives the value, the limit and what
to do about it. Programs use the code and its values, because a sentence may be reworded at any
time. docs/reference/summary.md lists the codes.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from loadgen.core import format
from loadgen.core.results.manifest import ReasonCode
from loadgen.figures import words

_LATENESS = (
    "{value_ms:.3g} ms {share:of} {basis} ({basis_ms:.3g} ms), limit {limit:share}: {remedy:part}"
)
_UNFINISHED = (
    "{unfinished:,} of {requests:request|requests} ({share:share}) were unfinished when the drain "
    "ended{drain_s:after}: they are neither ok nor failed, and no latency holds them"
)
SENTENCES = {
    # why a run is not valid
    "all_unfinished": (
        "all {unfinished:measured request was|measured requests were} unfinished when the drain "
        "ended: give a longer --grace, or none"
    ),
    "all_cancelled": (
        "all {cancelled:measured request was|measured requests were} cancelled: nothing was "
        "measured"
    ),
    "none_due": "no measured request was due: nothing was measured",
    "too_few": (
        "too few: {requests:measured request supports|measured requests support} no quantile, "
        "not even p50; {needed} are needed: give a longer load, or a higher one"
    ),
    "sent_late": f"requests were sent late: {{quantile}} send lag {_LATENESS}",
    "arrivals_unsure": f"arrival times are unsure: {{quantile}} stamp error {_LATENESS}",
    "generator_busy": (
        "the load generator was busy: worker {worker} used {cpu_share:share} of a core in the "
        "second up to {at_s:.0f} s, limit {limit:share}: add workers"
    ),
    "client_failures": "{failed:,} of {requests:request|requests} ({share:share}) were lost with a "
    "worker, or failed because this host ran out of file descriptors, ports or memory (limit "
    "{limit:share}): raise the limits of this host, or use more machines",
    "dropped": (
        "{dropped:,} of {requests:start|starts} ({share:share}) were dropped at a cap, limit "
        "{limit:share}: the load was not offered, and nothing says that the server would have "
        "missed it; give a higher --max-in-flight or max_in_prefill"
    ),
    "worker_died": "worker {worker} died{node:on}: the rest of its requests are lost",
    "interrupted": "the run was interrupted: it shows a part of the load that was planned",
    "stopped": (
        "the run ended early, as asked for when a target stops answering (--set "
        "on_target_failure=stop)"
    ),
    "stopped_by_errors": (
        "stopped {at_s:.0f} s after the start by the rule {rule}: {failed:,} of the "
        "{requests:request|requests} that ended in {window_s:.0f} s failed. The run shows a "
        "part of the load that was planned"
    ),
    "stopped_by_latency": (
        "stopped {at_s:.0f} s after the start by the rule {rule}: {over:,} of the "
        "{requests:request|requests} that ended in {window_s:.0f} s were over that. The run "
        "shows a part of the load that was planned"
    ),
    # caveats: what belongs beside VALID
    "withheld": "not reported: {statistics:statistics}: {why}",
    "failures": "{failed:,} of {requests:request|requests} ({share:share}, limit {limit:share}) "
    "failed at the server or on the path to it: the table of errors says how. Latencies are those "
    "of the requests that succeeded",
    "not_offered": (
        "not the load that was asked for: {dropped:,} of {requests:start|starts} "
        "({share:share}) were dropped at a cap (--max-in-flight, max_in_prefill), and count as "
        "missed"
    ),
    "shortened": (
        "not the load that was asked for: the answers have {got:,} of {asked:,} output tokens "
        "asked ({share:share}): the server ends them early, so its figures are for shorter "
        "answers"
    ),
    "lanes_unfilled": (
        "not the load that was requested: {requests:request|requests} cannot fill a concurrency "
        "of {lanes:,}; send at least {needed:,} requests"
    ),
    "prompt_lengths": "not the load that was asked for: by the server's count the prompts have "
    "{share:signed} tokens against those requested (limit {limit:share}): give the tokenizer of "
    "the model (--tokenizer)",
    # why the figures of a family are withheld: `unsound` of a summary
    "counts_contradict": (
        "the token counts of {contradicting:,} of {answers:answer|answers} ({share:share}, "
        "limit {limit:share}) contradict the stream: {understated:,} say fewer tokens than "
        "output events came, {overstated:,} more than were asked for: what rests on them is not "
        "known"
    ),
    "output_unseen": "{unseen:,} of {answers:ok response|ok responses} ({share:share}, limit "
    "{limit:share}) had tokens by the server's count, but no output event that could be timed: the "
    "output is in fields that are not known here, or the response was not streamed",
    "times_uncertain": "the client's timestamps are too uncertain for them{unsure_share:bundled}: "
    "{remedy:part}",
    "first_event_uncertain": "events carry several tokens, and the server does not say how many "
    "the first one has: TPOT is known as a range only",
    # warnings
    "cut_off": (
        "the run has no clean end (still running, or killed): this is as far as its records go"
    ),
    "unfinished": _UNFINISHED,
    "unfinished_undecided": (
        f"{_UNFINISHED}; above {{limit:share}} no SLO term can be called met: give a longer "
        "--grace (`grace:` in a file), or none: then the drain lasts as long as a request may "
        "(--timeout{timeout_s:as_long})"
    ),
    "limit_changed": (
        "validity limit {limit} was changed to {value:share} (default {default:share})"
    ),
    "usage_missing": (
        "usage is missing, or what no answer can have, in {missing:,} of {ok:ok answer|ok "
        "answers}: their tokens are counted another way"
    ),
    "responses_remarked": "{responses:,} of {ok:ok response|ok responses} {remark}",
    "counts_estimated": (
        "token counts of {estimated:,} of {ok:ok request|ok requests} are estimates by the "
        "packaged vocabulary"
    ),
    "prompt_counts_differ": (
        "prompt token counts disagree: the server's differ from ours by {share:signed}, limit "
        "{limit:share}{template_known:template}"
    ),
    "cached": (
        "{share:share} of the prompt tokens came from the server's cache though the workload "
        "asks for no sharing: a repeated seed or salt makes TTFT look better than it is; give "
        "another --seed, or --salt fresh"
    ),
    "cache_unsaid": (
        "the server does not say how many prompt tokens its cache knew: the {asked:share} asked "
        "for are not checked"
    ),
    "cache_differs": (
        "{share:share} of the prompt tokens came from the server's cache, {asked:share} were "
        "asked for, limit {limit:share} apart: its cache is off or too small, its blocks are "
        "long beside the prompts, or it knew the prompts before"
    ),
    "cache_disputed": (
        "by the servers' own counters {share:share} of the prompt tokens came from their cache, "
        "{of:part}: others use the servers, or the counters mean another cache"
    ),
    "lengths_differ": "{share:share} of the responses are not as long as requested, limit "
    "{limit:share}: they stopped earlier, or the server does not honour the forced length",
    "prompts_repeated": (
        "{requests:request repeats|requests repeat} a prompt that was sent before: a prefix "
        "cache may have served them"
    ),
    "rows_repeated": "{requests:request|requests} from {rows:row|rows}: prompts repeat, and a "
    "server's prefix cache will notice",
    "slo_samples": (
        "SLO term {metric} at p{percentile:g} rests on {samples:sample|samples}; {needed} are "
        "needed to support it"
    ),
    "never_steady": (
        "no steady figures: {because:part} as long as measured requests were due; give a longer "
        "load"
    ),
    "gaps_differ": (
        "send gaps vary by {variation:.2f} where the timetable has {planned:.2f}: the arrivals "
        "were not as planned"
    ),
    "server_timing_missing": (
        "the server ({server}) was asked for its own account of each request (--server-timing), "
        "and no answer had one: docs/reference/servers.md says what each kind of server needs for it"
    ),
    "profiled": (
        "the server's profiler ran from {from_s:.1f} s to {to_s:.1f} s: figures of that time "
        "hold its cost"
    ),
    "profile_failed": "the profiler did not start: {servers}",
    "profile_left": "the profiler may still run: send POST /stop_profile to {servers}",
    "page_failed": (
        "{failed:,} of {reads:read|reads} of {page} failed (slow, refused, damaged or gone): "
        "what rests on it has holes"
    ),
    "accounts_unjoined": (
        "{unjoined} of {accounts} accounts of requests that the server kept (/perf_metrics) are "
        "of no request of this run that could be told: of others, or lost with a read that "
        "failed; theirs stay without one"
    ),
    "server_counts": (
        "the server's metrics page counts {server_tokens:,} output tokens, the client "
        "{client_tokens:,} ({share:signed}): {cause:part}"
    ),
    "resonance": (
        "round robin resonates with the data set: {samples:,} samples and {servers} {kind}s "
        "have the common factor {factor}, so each {kind} is sent the same {each:,} samples in "
        "every pass{heaviest:heaviest}. The {kind}s with the heaviest shares decide the highest "
        "load; a data set whose size shares no factor with {servers} spreads them"
    ),
    "undisclosed": (
        "the description of the system under test leaves out what others ask for: {missing:asked}"
    ),
    "drafts_random": (
        "tokens were drafted for prompts of random words: which share of them is accepted says "
        "nothing of real text, and TPOT rests on it: prompts: natural in the workload, or "
        "prompts of your own (--dataset)"
    ),
    "hardware_differs": (
        "the description of the system says {key} {said}, the hardware's own metrics page {seen}"
    ),
    "bodies_late": "{bodies:body was|bodies were} built in the sending loop, which can delay sends",
    "replicas_changed": "the number of replicas changed {changes:of_replicas} during the load: the "
    "figures mix servers of several sizes; fix the number of replicas, or measure after it has "
    "settled (--warmup; of a search longer trials: --duration)",
    "target_gone": "target {target} stopped answering {at_s:.1f} s after the start",
    "name_moved": (
        "{name} was {before:addresses} before the load and {after:addresses} at its end, "
        "{at_s:.0f} s after the start: a name is looked up once, before the load, so every "
        "request went to the former"
    ),
    "part_lost": (
        "part {part} of {parts} is {state}: {lost:request is|requests are} recorded as lost"
    ),
    "part_late": (
        "part {part} of {parts} started {delay_ms:,.0f} ms after the common start, limit "
        "{limit_ms:g} ms: its load came so much later"
    ),
    "store_died": (
        "the process that stores the records {why}; all records are counted, and kept in spool/"
    ),
    "not_judged": "SLO terms not judged: {metrics:list}: {because:part}",
    "virtual_time": "simulated in virtual time: {preset}; no network and no client in it",
    "extrapolated": (
        "{sequences:,.0f} sequences per iteration on average, below {limit:,.0f}: the model "
        "extrapolates here"
    ),
    "paused": "{times:,} times a sequence was paused for want of cache blocks and computed again",
    "note": "{text}",  # a note without a code
}
_PARTS = {
    "lower_load": "lower the load or add workers",
    "other_processes": (
        "other processes kept worker {worker} off its core for {waited_share:share} of the "
        "second up to {at_s:.0f} s: stop them, or use a host of its own"
    ),
    "shared_host": "client and server share the cores of this host: send from another host, or "
    "give each its own cores (taskset)",
    "held_back": (
        "the client read them at once, so they came together: a proxy, a gateway or the server "
        "itself holds events back, and TTFT may hold that wait"
    ),
    "disk": (
        "writing the records took {write_share:share} of the second up to {at_s:.0f} s: a "
        "faster disk for --out"
    ),
    "host": (
        "this process used at most {cpu_share:share} of a core, so something else on this host "
        "kept it waiting: stop that, or use a host of its own"
    ),
    "lanes": "lanes were beginning or ending",
    "warmup": "requests of the warm-up were in flight",
    "no_stream": "answers that are not streamed have none",
    "no_tokens": "answers of {api} have no tokens",
    "cache_asked": "{beside:share} were asked for",
    "cache_answers": "by the answers {beside:share}",
    "others": "others use it, or it counts answers that failed",
    "restarted": "it was started anew, or counts late",
}
STATES = {
    "interrupted": "interrupted by the user",
    "cut_off": "cut off: no clean end was recorded",
    "stopped": "ended early: a target stopped answering, or a rule of --stop-when was broken",
    "decided": "ended early by a search: its outcome was certain",
}
"""How a run ended that did not finish, by `run.state` of a summary."""

MAX_ADDRESSES = 4
"""So many addresses of a name are listed."""

MIN_SHOWN_PERCENT = 0.1
"""Smaller percentages are shown with two significant digits, so that none above zero is 0."""

_LABELS_OF_BLOCKS = {"stalls": "stalls", "tokens": "output tokens"}

Formats: TypeAlias = dict[str, Callable[[Any], str]]
"""Functions that format a value, by the format specification that calls them."""


def format_reason(
    reason: ReasonCode,
    sentences: Mapping[str, str] | None = None,
    formats: Formats | None = None,
) -> str:
    """Return the sentence of a reason.

    Args:
        reason: The code with its values.
        sentences: The sentences by code; SENTENCES if None.
        formats: The formats that the sentences use; FORMATS if None.

    Returns:
        The sentence. It is the code itself if there is no sentence for it, as for a code of a newer
        version, or if the values do not fit the sentence, as in a damaged file.
    """
    sentence = (SENTENCES if sentences is None else sentences).get(reason.code, reason.code)
    formatter = _ReasonFormatter(reason.values, FORMATS if formats is None else formats)
    try:
        return formatter.vformat(sentence, (), reason.values)
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError):
        return reason.code


def make_note(code: str, values: dict[str, Any] | None) -> dict[str, ReasonCode]:
    """Return a note of a manifest, as sentence -> code. Return an empty one without values."""
    if not values:
        return {}
    reason = ReasonCode(code=code, values=values)
    return {format_reason(reason): reason}


class _ReasonFormatter(string.Formatter):
    """Formats the sentence of a reason.

    Beside the format specifications of Python it knows those of a table, `{n:body was|bodies were}`
    for a number of things, and `{name:part}` for a part of a sentence, which may use all values.
    """

    def __init__(self, values: dict[str, Any], formats: Formats) -> None:
        self._values = values
        self._formats = formats

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a value as the specification says."""
        if format_spec == "part":
            return self.vformat(_PARTS[value], (), self._values)
        if "|" in format_spec:
            singular, plural = format_spec.split("|")
            return format.counted(value, singular, plural)
        if format_spec in self._formats:
            return self._formats[format_spec](value)
        return str(super().format_field(value, format_spec))


def format_share(value: float) -> str:
    """Return a share as a percentage: 0.0312 is "3.1 %". A share above zero is never 0."""
    percent = value * 100
    if percent >= MIN_SHOWN_PERCENT or percent == 0:
        return f"{percent:.1f} %"
    return f"{percent:.2g} %"


def _format_metric(metric: str, statistics: list[str]) -> str:
    """Return a metric and those of its statistics that are withheld: `ITL (p99, max)`."""
    name = _LABELS_OF_BLOCKS.get(metric) or words(metric)
    if not statistics:
        return name
    return f"{name} ({', '.join(statistic.replace('_', '.') for statistic in statistics)})"


def _format_withheld(statistics_by_metric: Mapping[str, list[str]]) -> str:
    return ", ".join(
        _format_metric(metric, statistics) for metric, statistics in statistics_by_metric.items()
    )


def _format_addresses(addresses: Sequence[str]) -> str:
    more = " and more" if len(addresses) > MAX_ADDRESSES else ""
    return f"{', '.join(addresses[:MAX_ADDRESSES])}{more}" or "no address"


def _format_missing(keys_by_reader: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{who} asks for {', '.join(keys)}" for who, keys in keys_by_reader.items())


def _format_replica_changes(changes: Sequence[tuple[str, str, float]]) -> str:
    return ", ".join(
        f"from {before} to {after} at {at_s:,.0f} s" for before, after, at_s in changes
    )


def _format_if_known(text: str) -> Callable[[Any], str]:
    """Return a function that formats a value with a text, and nothing if the value is None."""
    return lambda value: "" if value is None else text.format(value)


FORMATS: Formats = {
    "share": format_share,
    "signed": lambda value: f"{value * 100:+.1f} %",
    "of": lambda value: "stands against" if value is None else f"is {format_share(value)} of",
    "after": _format_if_known(", {:g} s after the end of the load"),
    "as_long": _format_if_known(", {:g} s"),
    "on": _format_if_known(" on {}"),
    "template": lambda known: "" if known else " (the chat template's share is not known)",
    "bundled": lambda value: (
        ""
        if value is None
        else f" ({format_share(value)} of the events came with others in one read)"
    ),
    "heaviest": lambda value: (
        f"; the heaviest share has {value:.1%} more output tokens than the mean" if value else ""
    ),
    "asked": _format_missing,
    "of_replicas": _format_replica_changes,
    "list": ", ".join,
    "addresses": _format_addresses,
    "statistics": _format_withheld,
}
