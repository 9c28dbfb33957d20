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

WITHOUT_OUTPUT = "unasked"
"""The stored name of the source of output counts of requests for no output, such as embeddings."""

UNNAMED_SERVER = "it"
"""How a warning calls a server whose name is not known."""

REPLICA_CHANGES = ("loss", "scale_up")
"""The kinds of events at which the number of replicas changes."""


def find_warnings(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield the warnings of a run, in the order in which reports show them.

    A run with warnings is valid. A warning is a hint for its readers, for example that a percentile
    is computed from few samples.
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
    """Yield the warnings that were stored in the manifest while the run went on."""
    for text in manifest.warnings:
        warning = manifest.warning_codes.get(text)
        if warning is None:  # old versions stored the text alone
            yield make_code("note", text=text)
        elif warning.code == "undisclosed":
            yield from _check_undisclosed_keys(warning, hardware)
        else:
            yield warning


def _check_undisclosed_keys(
    warning: ReasonCode, hardware: SeenHardware | None
) -> Iterator[ReasonCode]:
    """Yield a warning about the keys that neither the user nor the hardware disclosed.

    A key names a fact about the system under test, such as its driver version.

    Args:
        warning: The stored warning with the keys that the user did not disclose.
        hardware: The facts that the servers published about their hardware, None without any.
    """
    missing_keys = _still_undisclosed(warning.values["missing"], hardware)
    if missing_keys:
        yield make_code("undisclosed", missing=missing_keys)


def _still_undisclosed(
    missing_keys: Mapping[str, list[str]], hardware: SeenHardware | None
) -> dict[str, list[str]]:
    """Return the missing keys that the hardware does not disclose either.

    Args:
        missing_keys: The keys that the user did not disclose. The name of each set of rules, such
            as that of a benchmark, has a list of the keys that these rules require.
        hardware: The facts that the servers report about their hardware. None if the servers
            report nothing.
    """
    reported_keys = set() if hardware is None else hardware.known_keys

    still_missing = {}
    for name_of_rules, required_keys in missing_keys.items():
        undisclosed_keys = [key for key in required_keys if key not in reported_keys]
        if undisclosed_keys:
            still_missing[name_of_rules] = undisclosed_keys

    return still_missing


def _check_declared_hardware(
    metadata: Mapping[str, str], hardware: SeenHardware | None
) -> Iterator[ReasonCode]:
    """Yield a warning for each fact about the hardware that the user declared wrongly.

    Args:
        metadata: The facts that the user declared, by key, such as "system.accelerator.driver".
        hardware: The facts that the servers report about their hardware. None if the servers
            report nothing.
    """
    if hardware is None:
        return

    reported_values = {"accelerator.driver": hardware.driver}
    if hardware.power_limit_w is not None:
        reported_values["accelerator.power_limit_w"] = f"{hardware.power_limit_w:g}"

    for key, reported in reported_values.items():
        declared = metadata.get(f"{SYSTEM}{key}")
        if not declared or not reported:
            continue  # nothing to compare

        if not _agrees_with_declared(declared, reported):
            yield make_code("hardware_differs", key=key, said=declared, seen=reported)


def _agrees_with_declared(declared: str, reported: str) -> bool:
    """Return True if a reported value is the declared one, or a more exact version of it.

    For example, the reported driver version "570.86" agrees with the declared version "570".
    """
    is_equal = reported == declared
    is_more_exact_version = reported.startswith(f"{declared}.")
    return is_equal or is_more_exact_version


def _check_unfinished_requests(manifest: RunManifest, summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning if the end of the run cut off requests before their responses ended.

    Such a request could have met or missed the latency limits of the run. If there are so many that
    it is not known if the run meets the limits, the warning is "unfinished_undecided".
    """
    unfinished = summary.requests.unfinished
    if not unfinished:
        return

    not_cancelled = summary.requests.scheduled - summary.requests.cancelled
    sentence_values = {
        "unfinished": unfinished,
        "requests": not_cancelled,
        "share": unfinished / not_cancelled,
        "drain_s": manifest.grace_s,
    }

    if outcomes.is_undecided(unfinished, not_cancelled):
        yield make_code(
            "unfinished_undecided",
            **sentence_values,
            limit=limits.UNFINISHED_SHARE,
            timeout_s=manifest.timeout_s,
        )
    else:
        yield make_code("unfinished", **sentence_values)


def _list_changed_limits(run_limits: ValidityLimits) -> Iterator[ReasonCode]:
    """Yield a warning for each limit of a valid run that the user changed from its default."""
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

    An estimate is a count by the tokenizer of another model.
    """
    ok = evidence.summary.requests.ok
    sources = evidence.summary.tokens.sources  # numbers of ok requests by who counted their tokens

    without_output = sources.output.get(WITHOUT_OUTPUT, 0)
    counted_by_server = sources.output.get("server", 0)
    missing = ok - without_output - counted_by_server
    were_counts_requested = evidence.manifest.requests_usage
    if were_counts_requested and missing:
        yield make_code("usage_missing", missing=missing, ok=ok)

    # A request may have both estimates, so a sum could count it twice.
    estimated_inputs = sources.input.get("estimate", 0)
    estimated_outputs = sources.output.get("estimate", 0)
    estimated = max(estimated_inputs, estimated_outputs)
    if estimated:
        yield make_code("counts_estimated", estimated=estimated, ok=ok)


def _check_prompt_counts(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if the server and the client count different numbers of prompt tokens."""
    difference = evidence.inputs.prompt_count_difference
    if difference is None:
        return

    # If the prompts have wrong lengths, a caveat reports that, and no warning is needed.
    if evidence.has_wrong_prompt_lengths:
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

    A server caches the beginnings of prompts, so that it need not process them again. A workload
    may request a share of cached tokens. Otherwise, only prompts with common text should have any.
    """
    cached_share = evidence.summary.tokens.cached_share  # None if the server reports none
    requested_share = evidence.manifest.requested_cache_share  # None without a request
    limit = limits.CACHED_SHARE

    if cached_share is None:
        if requested_share is not None:
            yield make_code("cache_unsaid", asked=requested_share)
    elif requested_share is not None and abs(cached_share - requested_share) > limit:
        yield make_code("cache_differs", asked=requested_share, share=cached_share, limit=limit)
    elif cached_share > limit and not evidence.manifest.shares_prompts:
        yield make_code("cached", share=cached_share)


def _check_response_lengths(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if many responses are not as long as requested."""
    mismatch_share = evidence.summary.tokens.length_mismatch_share
    has_caveat = evidence.has_short_responses  # a stronger statement about the same
    if mismatch_share is None or has_caveat:
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
    """A change of the number of replicas, such as from "3" to "2"."""

    before: str
    after: str
    at_s: float


def _list_replica_changes(events: tuple[Recovery, ...]) -> list[_ReplicaChange]:
    """Return the events of a run that changed the number of replicas.

    Such an event has the numbers of replicas in its fields `load_before` and `load_after`.
    """
    return [
        _ReplicaChange(before=event.load_before, after=event.load_after, at_s=event.at_s)
        for event in events
        if event.event in REPLICA_CHANGES
    ]


def _check_server_timing(manifest: RunManifest, summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning if the client requested the server's timing and no response had it."""
    was_timing_requested = manifest.server_timing
    codes_at_start = {warning.code for warning in manifest.warning_codes.values()}
    was_warned_at_start = "server_timing_missing" in codes_at_start
    if not was_timing_requested or was_warned_at_start:
        return

    ok_responses = summary.requests.ok
    responses_with_timing = summary.splits.accounted
    if ok_responses > 0 and responses_with_timing == 0:
        server_name = summary.target.server or UNNAMED_SERVER
        yield make_code("server_timing_missing", server=server_name)


def _list_unsupported_terms(summary: Summary) -> Iterator[ReasonCode]:
    """Yield a warning for each latency limit on a quantile that has too few samples.

    A limit that is undecided for another reason needs no warning.
    """
    for term in summary.goodput.slo:
        has_enough_samples = term.supported
        is_undecided = bool(term.undecided)
        if has_enough_samples or is_undecided:
            continue

        yield make_code(
            "slo_samples",
            metric=term.metric,
            percentile=term.quantile * 100,
            samples=term.count,
            needed=term.needed,
        )


def _check_send_gaps(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a warning if the gaps between sends vary more or less than planned.

    Variation is the standard deviation divided by the mean.
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
    """Yield a warning if the run has no steady state, with the cause.

    In a closed loop, the cause is that virtual users were always starting or ending. In an open
    loop, it is that requests of the warm-up were in flight until the end.
    """
    has_steady_state = evidence.summary.window.steady.duration_s is not None
    if has_steady_state or not _is_spread_over_time(evidence):
        return

    # A caveat already reports that some virtual users sent nothing.
    if evidence.is_concurrency_unfilled:
        return

    cause = STARTING_OR_ENDING_USERS if evidence.is_closed_loop else WARMUP_IN_FLIGHT
    yield make_code("never_steady", because=cause)


def _is_spread_over_time(evidence: RunEvidence) -> bool:
    """Return True if requests were sent at different times, and not all at once.

    The rate of a load, in requests per second, is None if all of its requests have the same time.
    """
    load = evidence.summary.load
    have_different_due_times = load.offered_rps is not None
    have_different_send_times = load.achieved_rps is not None
    if not evidence.is_closed_loop:
        return have_different_due_times

    # Each virtual user of a closed loop sends its first request at the start of the load.
    virtual_users = evidence.largest_concurrency
    has_later_requests = evidence.inputs.sends > virtual_users
    return has_later_requests and have_different_send_times
