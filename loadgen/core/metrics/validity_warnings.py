"""Finds what else to know about a run: warnings, which do not make it INVALID. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import limits
from loadgen.core.format import SYSTEM
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.run_evidence import make_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loadgen.core.metrics.run_evidence import RunEvidence
    from loadgen.core.metrics.sections import Recovery
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.manifest import ReasonCode, RunManifest
    from loadgen.core.server_metrics.hardware import SeenHardware


STARTING_OR_ENDING_USERS = "lanes"
"""The stored code of the cause that virtual users were always starting or ending."""

WARMUP_IN_FLIGHT = "warmup"
"""The stored code of the cause that requests of the warm-up were in flight until the end."""


REPLICA_CHANGES = ("loss", "scale_up")
"""The kinds of events at which the number of replicas changes."""


def find_warnings(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield the warnings of a run, in the order in which reports show them.

    A warning does not make a run invalid. It says what to keep in mind when the results are read,
    such as a changed limit or a percentile of too few samples.
    """
    manifest = evidence.manifest
    summary = evidence.summary
    yield from _list_stored_warnings(manifest, summary.hardware)
    yield from _check_declared_hardware(manifest.metadata, summary.hardware)
    yield from _check_end_of_run(summary)
    yield from _check_unfinished_requests(manifest, summary)
    yield from _list_changed_limits(manifest.limits)
    yield from _check_tokens(evidence)
    yield from _check_replica_count(summary)
    yield from _list_remarks(evidence)
    yield from _check_server_timing(manifest, summary)
    yield from _check_speculation(manifest, summary)
    yield from _list_unsupported_terms(summary)
    yield from _check_send_gaps(evidence)
    yield from _check_steady_state(evidence)


def _check_end_of_run(summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning if the run was cut off, so that it could not write its end."""
    if summary.run.state == "cut_off":
        yield make_code("cut_off")


def _check_speculation(manifest: RunManifest, summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning if random prompts were used with speculative decoding.

    Random words are hard to predict, so fewer drafted tokens are accepted than usual.
    """
    uses_speculation = summary.speculation is not None
    if uses_speculation and manifest.random_words:
        yield make_code("drafts_random")


def _list_remarks(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning for each remark, a note about something unusual in ok responses."""
    for remark, responses in evidence.inputs.remarks.items():
        yield make_code(
            "responses_remarked",
            responses=responses,
            ok=evidence.summary.requests.ok,
            remark=remark,
        )


def _list_stored_warnings(
    manifest: RunManifest, hardware: SeenHardware | None
) -> Iterator[ReasonCode]:
    """Yield the warnings that the run itself stored in its manifest, for example when it started.

    A warning of an older version has a text and no code. The warning "undisclosed" is about missing
    keys in the description of the system under test, which the hardware may have disclosed since.
    """
    for text in manifest.warnings:
        warning = manifest.warning_codes.get(text)
        if warning is None:
            yield make_code("note", text=text)
        elif warning.code == "undisclosed":
            yield from _check_undisclosed_keys(warning, hardware)
        else:
            yield warning


def _check_undisclosed_keys(
    warning: ReasonCode, hardware: SeenHardware | None
) -> Iterator[ReasonCode]:
    """Yield a stored warning about missing keys again, unless the hardware disclosed all of them.

    Args:
        warning: The warning, whose value "missing" has the keys.
        hardware: What metrics pages show of the hardware, None if none was read.
    """
    missing_keys = _still_undisclosed(warning.values["missing"], hardware)
    if missing_keys:
        yield make_code("undisclosed", missing=missing_keys)


def _still_undisclosed(
    missing_keys: Mapping[str, list[str]], hardware: SeenHardware | None
) -> dict[str, list[str]]:
    """Return the missing keys of the system's description that its hardware does not disclose.

    Args:
        missing_keys: The missing keys, by the name of the rules that require them.
        hardware: What metrics pages show of the hardware, None if none was read.
    """
    disclosed = set() if hardware is None else hardware.known_keys
    still_missing = {}
    for rules, keys in missing_keys.items():
        undisclosed = [key for key in keys if key not in disclosed]
        if undisclosed:
            still_missing[rules] = undisclosed
    return still_missing


def _check_declared_hardware(
    metadata: Mapping[str, str], hardware: SeenHardware | None
) -> Iterator[ReasonCode]:
    """Yield a warning for each value that the user declared and the hardware's page contradicts.

    A declared version may be shorter: "570" agrees with the driver "570.86".

    Args:
        metadata: The description of the system under test, by key.
        hardware: What the metrics page of the hardware shows, None if none was read.
    """
    if hardware is None:
        return

    reported_values = {"accelerator.driver": hardware.driver}
    if hardware.power_limit_w is not None:
        reported_values["accelerator.power_limit_w"] = f"{hardware.power_limit_w:g}"

    for key, reported in reported_values.items():
        declared = metadata.get(SYSTEM + key)
        if declared and reported and not _is_same_version(declared, reported):
            yield make_code("hardware_differs", key=key, said=declared, seen=reported)


def _is_same_version(declared: str, reported: str) -> bool:
    """Return True if a declared version agrees with the reported one, of which it may be a part."""
    return reported == declared or reported.startswith(f"{declared}.")


def _check_unfinished_requests(manifest: RunManifest, summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning if requests were unfinished at the end of the drain.

    The drain is the time after the last due request in which the client waits for responses. It is
    not known if a request that was still unfinished then would have met the SLO. If there are many,
    the SLO is undecided, and the warning says so.
    """
    unfinished = summary.requests.unfinished
    if not unfinished:
        return

    not_cancelled = summary.requests.scheduled - summary.requests.cancelled
    values = {
        "unfinished": unfinished,
        "requests": not_cancelled,
        "share": unfinished / not_cancelled,
        "drain_s": manifest.grace_s,
    }
    if outcomes.is_undecided(unfinished, not_cancelled):
        yield make_code(
            "unfinished_undecided",
            **values,
            limit=limits.UNFINISHED_SHARE,
            timeout_s=manifest.timeout_s,
        )
    else:
        yield make_code("unfinished", **values)


def _list_changed_limits(run_limits: ValidityLimits) -> Iterator[ReasonCode]:
    """Yield a warning for each limit of a valid run that the user changed."""
    defaults = ValidityLimits()
    for limit_name in defaults.__struct_fields__:
        value = getattr(run_limits, limit_name)
        default = getattr(defaults, limit_name)
        if value != default:
            yield make_code("limit_changed", limit=limit_name, value=value, default=default)


# -- tokens ----------------------------------------------------------------------------------------


def _check_tokens(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield the warnings about token counts, prompts, cached tokens and lengths of responses."""
    yield from _check_count_sources(evidence)
    yield from _check_prompt_counts(evidence)
    yield from _check_cached_share(evidence)
    yield from _check_response_lengths(evidence)
    if evidence.inputs.repeated_prompts:
        yield make_code("prompts_repeated", requests=evidence.inputs.repeated_prompts)


def _check_count_sources(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if the server did not report token counts, and one if counts are estimates.

    The client may ask the server for counts. Requests without output ("unasked"), such as
    embeddings, have no output to count. An estimate is a count by a tokenizer of another model.
    """
    ok = evidence.summary.requests.ok
    sources = evidence.summary.tokens.sources
    if evidence.manifest.requests_usage:
        counted_by_server = sources.output.get("server", 0)
        without_output = sources.output.get("unasked", 0)
        missing = ok - without_output - counted_by_server
        if missing:
            yield make_code("usage_missing", missing=missing, ok=ok)

    # A request may have both estimates, so their sum would count it twice.
    estimated = max(sources.input.get("estimate", 0), sources.output.get("estimate", 0))
    if estimated:
        yield make_code("counts_estimated", estimated=estimated, ok=ok)


def _check_prompt_counts(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if the server counts other numbers of prompt tokens than the client.

    If prompts do not have the requested lengths, a caveat says so already, and no warning is
    needed.
    """
    difference = evidence.inputs.prompt_count_difference
    if difference is None or evidence.has_wrong_prompt_lengths:
        return

    if abs(difference) > limits.COUNT_DISAGREEMENT:
        yield make_code(
            "prompt_counts_differ",
            share=difference,
            limit=limits.COUNT_DISAGREEMENT,
            template_known=evidence.manifest.template_tokens is not None,
        )


def _check_cached_share(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if the share of cached prompt tokens is not the requested or expected one.

    - "cache_unsaid": a share was requested, and the server does not report cached tokens.
    - "cache_differs": a share was requested, and the reported one differs by more than the limit.
    - "cached": prompts share no text, but many of their tokens came from a cache.
    """
    cached = evidence.summary.tokens.cached_share
    requested = evidence.manifest.requested_cache_share
    limit = limits.CACHED_SHARE
    if cached is None:
        if requested is not None:
            yield make_code("cache_unsaid", asked=requested)
        return

    if requested is not None and abs(cached - requested) > limit:
        yield make_code("cache_differs", asked=requested, share=cached, limit=limit)
    elif cached > limit and not evidence.manifest.shares_prompts:
        yield make_code("cached", share=cached)


def _check_response_lengths(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if many responses are not as long as requested.

    If so many tokens are missing that the load is not the requested one, a caveat says so already,
    and no warning is needed.
    """
    mismatch_share = evidence.summary.tokens.length_mismatch_share
    if mismatch_share is None or evidence.has_short_responses:
        return
    if mismatch_share > limits.LENGTH_MISMATCH:
        yield make_code("lengths_differ", share=mismatch_share, limit=limits.LENGTH_MISMATCH)


# -- the server and the load -----------------------------------------------------------------------


def _check_replica_count(summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning if the number of replicas of the server changed during the run."""
    changes = _list_replica_changes(summary.recovery)
    if changes:
        yield make_code("replicas_changed", changes=changes)


class _ReplicaChange(NamedTuple):
    """A change of the number of replicas, which is text: "3" to "2" if one of three failed."""

    before: str
    after: str
    at_s: float


def _list_replica_changes(events: tuple[Recovery, ...]) -> list[_ReplicaChange]:
    """Return the changes of the number of replicas among some events of a run.

    An event is a spike of the load, the loss of a replica, or the start of another one. Its load
    before and after is a rate of requests for a spike, and a number of replicas for the others.
    """
    return [
        _ReplicaChange(before=event.load_before, after=event.load_after, at_s=event.at_s)
        for event in events
        if event.event in REPLICA_CHANGES
    ]


def _check_server_timing(manifest: RunManifest, summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning if the client requested the server's timing and no response had it.

    There is none if the run already stored this warning when it started.
    """
    stored_codes = {warning.code for warning in manifest.warning_codes.values()}
    if not manifest.server_timing or "server_timing_missing" in stored_codes:
        return

    responses_with_timing = summary.splits.accounted
    if summary.requests.ok and not responses_with_timing:
        server = summary.target.server or "it"  # a pronoun in the sentence of the warning
        yield make_code("server_timing_missing", server=server)


def _list_unsupported_terms(summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning for each decided SLO term that has too few samples for its quantile."""
    for term in summary.goodput.slo:
        has_too_few_samples = not term.supported
        is_decided = not term.undecided
        if has_too_few_samples and is_decided:
            yield make_code(
                "slo_samples",
                metric=term.metric,
                percentile=term.quantile * 100,
                samples=term.count,
                needed=term.needed,
            )


def _check_send_gaps(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if the gaps between sends do not vary as the planned ones do.

    Their variation is the standard deviation divided by the mean. Too few gaps say nothing.
    """
    variation = evidence.summary.load.gap_variation
    planned_variation = evidence.summary.load.gap_variation_planned
    if variation is None or planned_variation is None:
        return

    has_enough_gaps = evidence.inputs.sends > limits.GAPS_NEEDED
    differs = abs(variation - planned_variation) > limits.GAP_VARIATION
    if has_enough_gaps and differs:
        yield make_code("gaps_differ", variation=variation, planned=planned_variation)


def _check_steady_state(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if the run has no steady state, with what prevented it.

    In a closed loop, some virtual users ended before others had begun. In an open loop, requests of
    the warm-up were in flight until the end.
    """
    has_steady_state = evidence.summary.window.steady.duration_s is not None
    has_caveat = evidence.is_concurrency_unfilled  # which explains the same
    if has_steady_state or has_caveat or not _is_spread_over_time(evidence):
        return

    cause = STARTING_OR_ENDING_USERS if evidence.is_closed_loop else WARMUP_IN_FLIGHT
    yield make_code("never_steady", because=cause)


def _is_spread_over_time(evidence: RunEvidence) -> bool:
    """Return True if requests were sent over some time, so that there could be a steady state.

    The requests of an open loop may all be due at one time, and then have no offered rate. In a
    closed loop all virtual users send their first requests at once, so only later requests spread
    over time.
    """
    load = evidence.summary.load
    if not evidence.is_closed_loop:
        return load.offered_rps is not None
    has_later_requests = evidence.inputs.sends > evidence.largest_concurrency
    return load.achieved_rps is not None and has_later_requests
