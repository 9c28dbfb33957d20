"""Finds what else to know about a run: warnings, which do not make it INVALID. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def find_warnings(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield the warnings of a run, in the order in which reports show them.

    A warning does not make a run invalid. It says what to keep in mind when the results are read,
    such as a changed limit or a percentile of too few samples.
    """
    manifest = evidence.manifest
    summary = evidence.summary
    yield from _notes(manifest, summary.hardware)
    yield from _hardware_differences(manifest.metadata, summary.hardware)
    if summary.run.state == "cut_off":
        yield make_code("cut_off")
    yield from _unfinished_requests(manifest, summary)
    yield from _changed_limits(manifest.limits)
    yield from _token_counts(evidence)
    yield from _changed_replicas(summary)
    # A remark is a note about something unusual in ok responses.
    for remark, responses in evidence.inputs.remarks.items():
        yield make_code(
            "responses_remarked", responses=responses, ok=summary.requests.ok, remark=remark
        )
    yield from _missing_server_timing(manifest, summary)
    # Random prompts are hard to predict, so that fewer drafted tokens are accepted than usual.
    if summary.speculation is not None and manifest.random_words:
        yield make_code("drafts_random")
    yield from _terms_without_support(summary)
    yield from _differing_gaps(evidence)
    yield from _missing_steady_state(evidence)


def _notes(manifest: RunManifest, hardware: SeenHardware | None) -> Iterator[ReasonCode]:
    """Yield the warnings that the run itself stored in its manifest, such as when it started.

    One of them lists keys that are missing in the description of the system under test. Keys that
    the metrics page of the hardware has disclosed in the meantime are removed from it. A warning
    of an older version has a text and no code.
    """
    for text in manifest.warnings:
        warning = manifest.warning_codes.get(text)
        if warning is None:
            yield make_code("note", text=text)
        elif warning.code == "undisclosed":
            missing = _still_undisclosed(warning.values["missing"], hardware)
            if missing:
                yield make_code("undisclosed", missing=missing)
        else:
            yield warning


def _still_undisclosed(
    missing_keys: Mapping[str, list[str]], hardware: SeenHardware | None
) -> dict[str, list[str]]:
    """Return the keys that the description of the system leaves out, by who asks for them.

    What the metrics pages of the hardware show counts as disclosed.
    """
    disclosed = set() if hardware is None else hardware.known_keys
    still_missing = {}
    for requester, keys in missing_keys.items():
        undisclosed = [key for key in keys if key not in disclosed]
        if undisclosed:
            still_missing[requester] = undisclosed
    return still_missing


def _hardware_differences(
    metadata: Mapping[str, str], hardware: SeenHardware | None
) -> Iterator[ReasonCode]:
    """Yield what the description of the system and the metrics page of the hardware disagree on.

    A description may shorten a version: "570" agrees with the driver "570.86".
    """
    if hardware is None:
        return
    power_limit = None if hardware.power_limit_w is None else f"{hardware.power_limit_w:g}"
    for key, seen in (("driver", hardware.driver), ("power_limit_w", power_limit)):
        declared = metadata.get(f"{SYSTEM}accelerator.{key}")
        if not declared or not seen:
            continue
        if seen != declared and not seen.startswith(f"{declared}."):
            yield make_code("hardware_differs", key=f"accelerator.{key}", said=declared, seen=seen)


def _unfinished_requests(manifest: RunManifest, summary: Summary) -> Iterator[ReasonCode]:
    """Yield that requests were unfinished at the end of the drain, and if the SLO is undecided.

    The drain is the time after the last due request in which the client waits for responses. A
    request that it cuts might have met the SLO or missed it.
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


def _changed_limits(run_limits: ValidityLimits) -> Iterator[ReasonCode]:
    """Yield each limit of validity that the user changed."""
    defaults = ValidityLimits()
    for limit_name in defaults.__struct_fields__:
        value = getattr(run_limits, limit_name)
        default = getattr(defaults, limit_name)
        if value != default:
            yield make_code("limit_changed", limit=limit_name, value=value, default=default)


# -- tokens ----------------------------------------------------------------------------------------


def _token_counts(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield what is wrong with token counts and prompts, and if a cache served prompt tokens."""
    yield from _count_sources(evidence)
    yield from _prompt_count_difference(evidence)
    yield from _cached_prompts(evidence)
    yield from _output_lengths(evidence)
    if evidence.inputs.repeated_prompts:
        yield make_code("prompts_repeated", requests=evidence.inputs.repeated_prompts)


def _count_sources(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that token counts do not come from the server, although it was asked for them.

    Requests that ask for no output ("unasked"), such as embeddings, need no count of it. Counts
    that this tool estimates with a tokenizer of another model are mentioned too.
    """
    ok = evidence.summary.requests.ok
    sources = evidence.summary.tokens.sources
    if evidence.manifest.requests_usage:
        counted_by_server = sources.output.get("server", 0)
        without_output = sources.output.get("unasked", 0)
        missing = ok - without_output - counted_by_server
        if missing:
            yield make_code("usage_missing", missing=missing, ok=ok)
    estimated = max(sources.input.get("estimate", 0), sources.output.get("estimate", 0))
    if estimated:
        yield make_code("counts_estimated", estimated=estimated, ok=ok)


def _prompt_count_difference(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that the server's prompt token counts differ from ours, unless it is a caveat."""
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


def _cached_prompts(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that the share of cached prompt tokens is not the requested one, or is not known.

    Without a requested share, prompts that do not share text should not be served from a cache.
    """
    cached_share = evidence.summary.tokens.cached_share
    requested_share = evidence.manifest.requested_cache_share
    if cached_share is None:
        if requested_share is not None:
            yield make_code("cache_unsaid", asked=requested_share)
        return
    if requested_share is not None:
        differs = abs(cached_share - requested_share) > limits.CACHED_SHARE
        if differs:
            yield make_code(
                "cache_differs",
                asked=requested_share,
                share=cached_share,
                limit=limits.CACHED_SHARE,
            )
            return
    if cached_share > limits.CACHED_SHARE and not evidence.manifest.shares_prompts:
        yield make_code("cached", share=cached_share)


def _output_lengths(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that many responses are not as long as requested.

    If so many tokens are missing that it is another load, the caveat says so already.
    """
    mismatch_share = evidence.summary.tokens.length_mismatch_share
    if mismatch_share is None or evidence.has_short_responses:
        return
    if mismatch_share > limits.LENGTH_MISMATCH:
        yield make_code("lengths_differ", share=mismatch_share, limit=limits.LENGTH_MISMATCH)


# -- the server and the load -----------------------------------------------------------------------


def _changed_replicas(summary: Summary) -> Iterator[ReasonCode]:
    """Yield that the number of replicas changed during the run."""
    changes = _replica_changes(summary.recovery)
    if changes:
        yield make_code("replicas_changed", changes=changes)


def _replica_changes(recovery: tuple[Recovery, ...]) -> list[tuple[str, str, float]]:
    """Return the changes of the number of replicas, as values of a `ReasonCode`.

    Each change has the number of replicas before it, the number after it, and its time in seconds.
    Spikes of the load are recoveries too, and are left out.
    """
    return [
        (event.load_before, event.load_after, event.at_s)
        for event in recovery
        if event.event in ("loss", "scale_up")
    ]


def _missing_server_timing(manifest: RunManifest, summary: Summary) -> Iterator[ReasonCode]:
    """Yield that no response had the timing that the server was asked for.

    A note of the start of the run may say so already.
    """
    is_noted = any(note.code == "server_timing_missing" for note in manifest.warning_codes.values())
    has_none = summary.requests.ok and not summary.splits.accounted
    if manifest.server_timing and has_none and not is_noted:
        yield make_code("server_timing_missing", server=summary.target.server or "it")


def _terms_without_support(summary: Summary) -> Iterator[ReasonCode]:
    """Yield the SLO terms that rest on too few samples for their quantile."""
    for term in summary.goodput.slo:
        if not term.supported and not term.undecided:
            yield make_code(
                "slo_samples",
                metric=term.metric,
                percentile=term.quantile * 100,
                samples=term.count,
                needed=term.needed,
            )


def _differing_gaps(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that the gaps between sends do not vary as the arrival process does."""
    variation = evidence.summary.load.gap_variation
    planned = evidence.summary.load.gap_variation_planned
    has_enough_gaps = evidence.inputs.sends > limits.GAPS_NEEDED
    if variation is None or planned is None or not has_enough_gaps:
        return
    if abs(variation - planned) > limits.GAP_VARIATION:
        yield make_code("gaps_differ", variation=variation, planned=planned)


def _missing_steady_state(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that the run has no steady state, with what prevented it.

    The steady state is the time in which the measured load runs at full strength and alone. In a
    closed loop, it lacks one if virtual users had nothing more to send before others had begun. In
    an open loop, it lacks one if requests of the warm-up were in flight until the end. Nothing is
    yielded about a load that is too short to have a steady state, or that never had its
    concurrency, which is a caveat.
    """
    has_steady_state = evidence.summary.window.steady.duration_s is not None
    if has_steady_state or evidence.is_concurrency_unfilled:
        return
    if _has_lasted(evidence):
        cause = "lanes" if evidence.is_closed_loop else "warmup"
        yield make_code("never_steady", because=cause)


def _has_lasted(evidence: RunEvidence) -> bool:
    """Return True if requests were sent over some time, so that there could be a steady state.

    An open loop lasts unless all of its requests are due at one time, when it has no rate. In a
    closed loop every virtual user sends its first request at once, so only later ones make it last.
    """
    load = evidence.summary.load
    if not evidence.is_closed_loop:
        return load.offered_rps is not None
    has_later_requests = evidence.inputs.sends > evidence.largest_concurrency
    return load.achieved_rps is not None and has_later_requests
