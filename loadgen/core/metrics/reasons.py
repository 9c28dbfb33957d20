"""The sentences for every code of a verdict: reasons, caveats and warnings.

Pure. There is one table for JSON and reports alike. A sentence gives the value, the limit and what
to do about it. Programs use the code and its values, because a sentence may be reworded at any
time. docs/reference/summary.md lists the codes.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from loadgen.core import format as text_format
from loadgen.core.results.manifest import ReasonCode
from loadgen.figures import metric_label

_LATENESS = (
    "{value_ms:.3g} ms {share:of} the {basis} of {basis_ms:.3g} ms (limit {limit:share}). "
    "{remedy:part}"
)
_UNFINISHED = (
    "{unfinished:,} of {requests:request|requests} ({share:share}) were unfinished when the drain "
    "ended{drain_s:after}. They count as neither succeeded nor failed and have no latency"
)
SENTENCES = {
    # Reasons why a run is not valid.
    "all_unfinished": (
        "No request was completed: {unfinished:measured request was|measured requests were} still "
        "in flight when the drain ended. Use a longer --grace, or none"
    ),
    "all_cancelled": (
        "No request was completed: {cancelled:measured request was|measured requests were} "
        "cancelled"
    ),
    "none_due": "No measured request reached its scheduled time",
    "too_few": (
        "Only {requests:request|requests} measured, {needed} needed for a median. Use a longer "
        "--duration or a higher load"
    ),
    "sent_late": f"Requests were sent late: the {{quantile}} of the send delay is {_LATENESS}",
    "arrivals_unsure": (
        f"Timestamps are uncertain: the {{quantile}} of the timestamp uncertainty is {_LATENESS}"
    ),
    "generator_busy": (
        "The load generator is a bottleneck: worker {worker} used {cpu_share:share} of a core at "
        "t={at_s:.0f} s (limit {limit:share}). Use more --workers"
    ),
    "client_failures": (
        "{failed:,} of {requests:request|requests} ({share:share}, limit {limit:share}) failed on "
        "the client: a worker was lost, or this host ran out of file descriptors, ports or "
        "memory. Raise the limits of this host or use more machines"
    ),
    "dropped": (
        "{dropped:,} of {requests:request|requests} ({share:share}, limit {limit:share}) were not "
        "sent because of the in-flight limit. Raise --max-in-flight or max_in_prefill"
    ),
    "worker_died": "Worker {worker} died{node:on}, and its remaining requests are lost",
    "interrupted": "The run was interrupted before the planned load was complete",
    "stopped": (
        "The run ended early because a target stopped responding (--set "
        "on_target_failure=stop). See the server's log"
    ),
    "stopped_by_errors": (
        "The rule {rule} stopped the run at t={at_s:.0f} s: {failed:,} of the "
        "{requests:request|requests} that ended within {window_s:.0f} s failed"
    ),
    "stopped_by_latency": (
        "The rule {rule} stopped the run at t={at_s:.0f} s: {over:,} of the "
        "{requests:request|requests} that ended within {window_s:.0f} s exceeded the limit"
    ),
    # Caveats, which are shown beside VALID.
    "withheld": "{statistics:statistics} not reported{statistics:exactly}: {why}",
    "failures": (
        "{failed:,} of {requests:request|requests} ({share:share}, limit {limit:share}) failed at "
        "the server or on the network. Latencies are those of successful requests; the table of "
        "errors lists the causes"
    ),
    "not_offered": (
        "The load is lower than requested: {dropped:,} of {requests:request|requests} "
        "({share:share}) were not sent because of --max-in-flight or max_in_prefill. They count as "
        "SLO misses"
    ),
    "shortened": (
        "Responses are shorter than requested: {got:,} of {asked:,} output tokens ({share:share}). "
        "The server ends them early, so the metrics describe shorter responses"
    ),
    "lanes_unfilled": (
        "The load is lower than requested: {requests:request|requests} cannot fill a concurrency "
        "of {lanes:,}. Send at least {needed:,} requests"
    ),
    "prompt_lengths": (
        "Prompts differ from the requested length by {share:signed} (limit {limit:share}), as "
        "counted by the server. Use the tokenizer of the model (--tokenizer)"
    ),
    # Why a group of metrics is not reported: `unsound` of a summary.
    "counts_contradict": (
        "the token counts of {contradicting:,} of {answers:response|responses} "
        "({share:share}, limit {limit:share}) contradict the stream: {understated:,} "
        "report fewer tokens than output events, {overstated:,} report more tokens "
        "than requested"
    ),
    "output_unseen": (
        "{unseen:,} of {answers:ok response|ok responses} ({share:share}, limit "
        "{limit:share}) had tokens by the server's count, but no output event to "
        "time: the output is in fields that loadgen does not know, or the response "
        "was not streamed"
    ),
    "no_kernel_times": (
        "the kernel of this system does not timestamp packets, so a busy client looks like a slow "
        "server. Use an idle host, or Linux"
    ),
    "times_uncertain": "the client's timestamps are too uncertain{unsure_share:bundled}. "
    "{remedy:part}",
    "first_event_uncertain": (
        "events carry several tokens, and the server does not report how many the first one has, "
        "so TPOT is only known as a range"
    ),
    # Warnings.
    "cut_off": (
        "The run is still in progress or was killed. The metrics cover the records written so far"
    ),
    "unfinished": _UNFINISHED,
    "unfinished_undecided": (
        f"{_UNFINISHED}. Above {{limit:share}} SLO objectives are undecided. Use a longer --grace "
        "(`grace:` in a file), or none, so that the drain lasts as long as a request may "
        "(--timeout{timeout_s:as_long})"
    ),
    "limit_changed": (
        "The validity limit {limit} was changed to {value:share} (default {default:share})"
    ),
    "usage_missing": (
        "{missing:,} of {ok:ok response|ok responses} report no plausible token "
        "usage. Their tokens are counted by the client"
    ),
    "responses_remarked": "{responses:,} of {ok:ok response|ok responses} {remark}",
    "counts_estimated": (
        "The token counts of {estimated:,} of {ok:ok request|ok requests} are estimates by the "
        "packaged vocabulary"
    ),
    "prompt_counts_differ": (
        "The server's prompt token counts differ from the client's by {share:signed} (limit "
        "{limit:share}){template_known:template}"
    ),
    "cached": (
        "{share:share} of the prompt tokens came from the server's cache, although the workload "
        "does not share prompts. A repeated seed or salt makes TTFT look better than it is. Use "
        "another --seed, or --salt fresh"
    ),
    "cache_unsaid": (
        "The server does not report cached prompt tokens, so the requested cache hit "
        "rate of {asked:share} cannot be checked"
    ),
    "cache_differs": (
        "{share:share} of the prompt tokens came from the server's cache, {asked:share} were "
        "requested (tolerance {limit:share}). The cache is off or too small, its blocks are long "
        "compared with the prompts, or it contained the prompts before the run"
    ),
    "answers_worse_under_load": (
        "Responses are worse under load: {above:share} of the checked responses are right above "
        "{in_flight:,} requests in flight, and {below:share} below. wrong_answers.jsonl lists the "
        "wrong ones"
    ),
    "answers_all_wrong": (
        "None of {checked:checked answer|checked answers} is right. wrong_answers.jsonl shows each "
        "response with the right answer, which may have another form. A simulated server "
        "knows the right answers with loadgen sim --answers FILE"
    ),
    "answers_differ_from_reference": (
        "Responses differ from those of the reference endpoint: of {questions:question|questions}, "
        "{worse:,} agree with its first response less than its second response does, and "
        "{better:,} more. Another model or other weights answer here"
    ),
    "cache_disputed": (
        "The servers' own counters report that {share:share} of the prompt tokens came from their "
        "cache, {of:part}. Other clients use the servers, or the counters measure another cache"
    ),
    "lengths_differ": (
        "{share:share} of the responses differ from the requested length (limit {limit:share}). "
        "They ended earlier, or the server ignores the requested length"
    ),
    "prompts_repeated": (
        "{requests:request repeats|requests repeat} an earlier prompt, which a prefix cache may "
        "have served"
    ),
    "rows_repeated": (
        "{requests:request|requests} use {rows:row|rows} of the data set, so prompts repeat and "
        "the server's prefix cache may serve them"
    ),
    "slo_samples": (
        "The SLO objective {metric} p{percentile:g} is based on {samples:sample|samples}, "
        "{needed} are needed"
    ),
    "never_steady": (
        "No steady state: {because:part} during the whole load, so throughput includes ramp-up and "
        "drain. Use a longer --duration"
    ),
    "gaps_differ": (
        "Arrivals deviate from the plan: inter-arrival CV {variation:.2f} (target {planned:.2f})"
    ),
    "server_timing_missing": (
        "No response of the server ({server}) has the timing breakdown that --server-timing "
        "requested. See docs/reference/servers.md for what each server needs"
    ),
    "profiled": (
        "The server's profiler ran from t={from_s:.1f} s to t={to_s:.1f} s, which slows the server "
        "down"
    ),
    "profile_failed": "The profiler did not start: {servers}",
    "profile_left": "The profiler may still run. Send POST /stop_profile to {servers}",
    "page_failed": (
        "{failed:,} of {reads:read|reads} of {page} failed, so metrics that come from it have gaps"
    ),
    "accounts_unjoined": (
        "{unjoined} of {accounts} timing breakdowns from the server (/perf_metrics) match no "
        "request of this run. They belong to other clients, or were lost with a failed read"
    ),
    "server_counts": (
        "The server's metrics page reports {server_tokens:,} output tokens, the client counted "
        "{client_tokens:,} ({share:signed}): {cause:part}"
    ),
    "resonance": (
        "Round robin always sends the same samples to the same {kind}: {samples:,} samples and "
        "{servers} {kind}s have the common factor {factor}, so each {kind} gets the same {each:,} "
        "samples in every pass{heaviest:heaviest}. Use a data set whose size has no common factor "
        "with {servers}"
    ),
    "undisclosed": "The description of the system under test is incomplete: {missing:asked}",
    "drafts_random": (
        "Speculative decoding was measured with random words. Acceptance and TPOT will differ for "
        "real text. Use natural prompts in the workload, or your own (--dataset)"
    ),
    "hardware_differs": (
        "The description of the system states {key} {said}, but the hardware's metrics page "
        "reports {seen}"
    ),
    "bodies_late": (
        "{bodies:request body was|request bodies were} built in the sending loop, which can delay "
        "requests"
    ),
    "replicas_changed": (
        "The number of replicas changed {changes:of_replicas} during the load, so the metrics mix "
        "servers of several sizes. Fix the number of replicas, or use a longer --warmup (in a "
        "search, a longer --duration)"
    ),
    "target_gone": "Target {target} stopped responding at t={at_s:.1f} s",
    "name_moved": (
        "{name} resolved to {before:addresses} before the load and to {after:addresses} at "
        "t={at_s:.0f} s. Names are resolved once, so all requests went to the first address"
    ),
    "part_lost": (
        "Part {part} of {parts} is {state}: {lost:request is|requests are} recorded as lost"
    ),
    "part_late": (
        "Part {part} of {parts} started {delay_ms:,.0f} ms after the common start "
        "(limit {limit_ms:g} ms). Start all parts earlier, or choose a later "
        "--start-at"
    ),
    "store_died": (
        "The process that stores the records {why}. No record is lost: all of them are counted and "
        "remain in the folder spool/"
    ),
    "not_judged": "SLO objectives not evaluated: {metrics:list}, because {because:part}",
    "virtual_time": "Simulated in virtual time ({preset}), without a network or a client",
    "extrapolated": (
        "The performance model extrapolates: the mean batch size is {sequences:,.0f}, and the "
        "model was measured from {limit:,.0f} on"
    ),
    "paused": (
        "Sequences were preempted {times:,} times because the KV cache was full, and computed again"
    ),
    "note": "{text}",
}
"""The sentence of each code. `note` is a note of a manifest that has no code."""
_PARTS = {
    "lower_load": "Lower the load or use more --workers",
    "other_processes": (
        "Other processes kept worker {worker} off its core for {waited_share:share} of the second "
        "before t={at_s:.0f} s. Stop them or use a dedicated host"
    ),
    "shared_host": (
        "Client and server share the cores of this host. Send from another host, or give each its "
        "own cores (taskset)"
    ),
    "held_back": (
        "Several events arrived together although the client read them at once, so a proxy, a "
        "gateway or the server holds events back. TTFT may include that wait"
    ),
    "disk": (
        "Writing records took {write_share:share} of the second before t={at_s:.0f} "
        "s. Use a folder on a faster disk for --out"
    ),
    "host": (
        "The client used at most {cpu_share:share} of a core, so something else on this host "
        "delayed it. Stop that or use a dedicated host"
    ),
    "lanes": "virtual users were starting or ending",
    "warmup": "requests of the warm-up were in flight",
    "no_stream": "responses that are not streamed do not have them",
    "no_tokens": "responses of {api} have no tokens",
    "cache_asked": "{beside:share} were requested",
    "cache_answers": "the responses report {beside:share}",
    "others": "other clients use the server, or it counts failed responses",
    "restarted": "the server was restarted, or updates its counters late",
}
STATES = {
    "interrupted": "interrupted by the user",
    "cut_off": "cut off before its end",
    "stopped": "ended early: a target stopped responding, or a rule of --stop-when was violated",
    "decided": "ended early by a search, because its outcome was certain",
}
"""How a run ended that did not finish, by `run.state` in a summary."""

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
    """Return the sentence of a reason, or its code if there is no sentence with its values.

    Args:
        reason: The code with its values.
        sentences: The sentences by code; SENTENCES if None.
        formats: The formats that the sentences use; FORMATS if None.
    """
    if sentences is None:
        sentences = SENTENCES

    if formats is None:
        formats = FORMATS

    sentence = sentences.get(reason.code)
    if sentence is None:  # a code of a newer version
        return reason.code

    try:
        return _ReasonFormatter(reason.values, formats).format_sentence(sentence)
    except _MISFIT_ERRORS:  # values of a damaged file
        return reason.code


def join_reasons(reasons: Iterable[str]) -> str:
    """Return the reasons why runs are INVALID as one text: first all findings, then what to do.

    The first sentence of a reason is its finding, and the others are the advice. Several reasons
    may have the same finding or advice, which is stated once.
    """
    findings = []
    advice = []
    for reason in reasons:
        finding, advice_of_reason = split_first_sentence(reason)
        findings.append(finding)
        if advice_of_reason:
            advice.append(advice_of_reason)
    return ". ".join(dict.fromkeys([*findings, *advice]))


def split_first_sentence(paragraph: str) -> tuple[str, str]:
    """Return the first sentence without its period, and the rest, which may be empty."""
    first_sentence, _, rest = paragraph.partition(". ")
    return first_sentence, rest


_MISFIT_ERRORS = (LookupError, ValueError, TypeError, AttributeError, OverflowError)
"""What formatting a sentence raises if a value is missing or has another type than it expects."""


def make_note(code: str, values: dict[str, Any] | None) -> dict[str, ReasonCode]:
    """Return a note of a manifest, as sentence -> code. Return an empty one without values."""
    if not values:
        return {}
    reason = ReasonCode(code=code, values=values)
    return {format_reason(reason): reason}


class _ReasonFormatter(string.Formatter):
    """Formats the sentence of a reason, with the values of the reason in its placeholders.

    The text after the colon of a placeholder says how its value is formatted. Beside the format
    specifications of Python, such as `{value_ms:.3g}`, there are these:

    - `{remedy:part}`, with the value "disk": the sentence about a remedy that `_PARTS` has for
      "disk", which may have placeholders of its own.
    - `{requests:request|requests}`, with the value 3: the number and its noun, "3 requests".
    - `{share:share}`, and other names in the table of formats: what that function returns.
    """

    def __init__(self, values: dict[str, Any], formats: Formats) -> None:
        self._values = values
        self._formats = formats

    def format_sentence(self, sentence: str) -> str:
        """Return a sentence, or a part of one, with the values of the reason."""
        return self.vformat(sentence, (), self._values)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the value of a placeholder as text, for `string.Formatter`.

        Args:
            value: The value of the placeholder.
            format_spec: The text after the colon of the placeholder.
        """
        # `{remedy:part}` is replaced by another sentence.
        if format_spec == "part":
            part_sentence = _PARTS[value]
            return self.format_sentence(part_sentence)

        # `{requests:request|requests}` is replaced by a number and its noun.
        has_two_nouns = "|" in format_spec
        if has_two_nouns:
            singular, plural = format_spec.split("|")
            return text_format.counted(value, singular, plural)

        # `{share:share}` is replaced by the result of the function of that name.
        format_value = self._formats.get(format_spec)
        if format_value is not None:
            return format_value(value)

        # Any other specification is one of Python, such as `{value_ms:.3g}`.
        return str(super().format_field(value, format_spec))


def format_share(value: float) -> str:
    """Return a share as a percentage: 0.0312 is "3.1 %". A share above zero is never 0."""
    percent = value * 100
    if percent >= MIN_SHOWN_PERCENT or percent == 0:
        return f"{percent:.1f} %"
    return f"{percent:.2g} %"


def _format_metric(metric: str, statistics: list[str]) -> str:
    """Return a metric with some of its statistics: `ITL (p99, max)`."""
    name = _LABELS_OF_BLOCKS.get(metric) or metric_label(metric)
    if not statistics:
        return name

    labels = [statistic.replace("_", ".") for statistic in statistics]
    return f"{name} ({', '.join(labels)})"


def _format_withheld(statistics_by_metric: Mapping[str, list[str]]) -> str:
    return ", ".join(
        _format_metric(metric, statistics) for metric, statistics in statistics_by_metric.items()
    )


def _format_exactness(statistics_by_metric: Mapping[str, list[str]]) -> str:
    """Return " exactly" for single statistics, whose ranges are reported; "" for whole metrics."""
    return " exactly" if any(statistics_by_metric.values()) else ""


def _format_addresses(addresses: Sequence[str]) -> str:
    more = " and more" if len(addresses) > MAX_ADDRESSES else ""
    return f"{', '.join(addresses[:MAX_ADDRESSES])}{more}" or "no address"


def _format_missing(keys_by_reader: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{who} requires {', '.join(keys)}" for who, keys in keys_by_reader.items())


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
    "of": lambda value: "compared with" if value is None else f"or {format_share(value)} of",
    "after": _format_if_known(", {:g} s after the end of the load"),
    "as_long": _format_if_known(", {:g} s"),
    "on": _format_if_known(" on {}"),
    "template": lambda known: "" if known else " (the length of the chat template is unknown)",
    "bundled": lambda value: (
        ""
        if value is None
        else f" ({format_share(value)} of the events arrived together with others)"
    ),
    "heaviest": lambda value: (
        f" (up to {value:.1%} more output tokens than the mean)" if value else ""
    ),
    "asked": _format_missing,
    "of_replicas": _format_replica_changes,
    "list": ", ".join,
    "addresses": _format_addresses,
    "statistics": _format_withheld,
    "exactly": _format_exactness,
}
