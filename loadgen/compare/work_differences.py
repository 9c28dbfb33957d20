"""Decides whether two sides of a comparison did the same work. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec

from loadgen.compare.workload_fields import list_field_differences
from loadgen.core import format
from loadgen.core.limits import SHORTENED
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.verdict import delivered_output_share
from loadgen.core.slo import describe_deadlines
from loadgen.runs.comparison_side import Side
from loadgen.runs.slo_text import list_objectives

SEED_VARIATION = 0.1
"""The relative difference of mean lengths and durations that another seed explains."""

HASH_DIGITS = 12
"""The first digits of a SHA-256 sum, which are enough to tell two files apart."""

MAX_DELIVERY_DIFFERENCE = SHORTENED
"""By how much the delivered fractions of the requested output tokens may differ."""

_LIMITS = {
    "grace, s": "grace_s",
    "timeout, s": "timeout_s",
    "stall timeout, s": "stall_timeout_s",
    "max. in flight": "max_in_flight",
    "max. in prefill": "max_in_prefill",
}
"""Limits of a load: their names in messages, and their fields in the manifest of a run."""


def describe_work_differences(first: Side, other: Side) -> list[str]:
    """Return how the workloads of two sides differ, such as "workload: qa vs. rag".

    Workloads are equal if their fingerprints are: hashes of the requested lengths, arrivals and
    limits. A server that ends its responses early does less work than the other one, although the
    same was requested. Sides that did different work are not judged, because a difference of their
    metrics may come from the work.

    Returns an empty list if the workloads do not differ, or if one of them is not known.
    """
    if not first.runs or not other.runs:
        return []

    first_delivered = _compute_delivered_share(first)
    other_delivered = _compute_delivered_share(other)
    if abs(first_delivered - other_delivered) > MAX_DELIVERY_DIFFERENCE:
        percentages = _join_versus(
            f"{first_delivered * 100:.1f} %", f"{other_delivered * 100:.1f} %"
        )
        return [f"responses: {percentages} of the requested output tokens"]

    first_fingerprint, other_fingerprint = _select_fingerprints(first, other)
    if not first_fingerprint or not other_fingerprint or first_fingerprint == other_fingerprint:
        return []

    differences = [
        *_list_setting_differences(first.runs[0].summary, other.runs[0].summary),
        *_list_load_differences(first, other),
        *_list_limit_differences(first, other),
    ]
    if not differences:
        differences = list_field_differences(first.runs[0].manifest, other.runs[0].manifest)
    if not differences:
        # Neither the workload files nor the options differ, so it is the content of a file.
        fingerprints = _join_versus(first_fingerprint, other_fingerprint)
        return [
            f"config fingerprint: {fingerprints}; the file and the options are equal, so a file "
            "that they name has other content, such as prompts, a trace or a tokenizer"
        ]

    return differences


def describe_slo(side: Side) -> str:
    """Return the SLO of a side as text, or "" without one."""
    return ", ".join(list_objectives(side.runs[0].summary)) if side.runs else ""


def describe_slo_of_requests(side: Side) -> str:
    """Return the SLO of a side without its objective on answers, or "" without another objective.

    The share of requests that meet the SLO does not depend on the share of right answers.
    """
    if not side.runs:
        return ""
    summary = msgspec.structs.replace(side.runs[0].summary, answers=None)
    return ", ".join(list_objectives(summary))


def describe_token_deadlines(side: Side) -> str:
    """Return the token deadlines of a side as text, or "" without a fluidity index.

    For example: `2,000 ms, then 50 ms per token`.
    """
    fluidity = side.runs[0].summary.fluidity if side.runs else None
    if fluidity is None:
        return ""
    text = describe_deadlines(fluidity.first_token_ms, fluidity.per_token_ms)
    return text.removeprefix("deadlines ")


def _list_setting_differences(first: Summary, other: Summary) -> Iterator[str]:
    """Yield each setting of the load that differs between two runs."""
    first_settings = _collect_settings(first)
    other_settings = _collect_settings(other)
    for name, first_value in first_settings.items():
        other_value = other_settings[name]
        if first_value != other_value:
            yield f"{name}: {_join_versus(first_value or 'none', other_value or 'none')}"


def _collect_settings(summary: Summary) -> dict[str, str]:
    """Return the settings that make two workloads different, by the names that messages use."""
    run = summary.run
    tokenizer = f"{run.tokenizer} ({run.tokenizer_sha256[:HASH_DIGITS]})"
    return {
        "workload": run.workload,
        "load": summary.load.arrival,
        "SLO": ", ".join(list_objectives(summary)),
        "output tokens counted by": ", ".join(summary.tokens.sources.output),
        "tokenizer file": tokenizer if run.tokenizer_sha256 else "",
    }


def _list_load_differences(first: Side, other: Side) -> Iterator[str]:
    """Yield differences of duration and of mean lengths that another seed does not explain.

    Arrivals and lengths are drawn at random, so two runs of the same workload with other seeds
    differ a little in both.
    """
    first_summary = first.runs[0].summary
    other_summary = other.runs[0].summary
    first_duration_s = _planned_duration_s(first)
    other_duration_s = _planned_duration_s(other)

    # Runs with equal numbers of requests did the same work, whatever durations were planned.
    has_different_counts = first_summary.requests.scheduled != other_summary.requests.scheduled
    if has_different_counts and _is_beyond_seed_variation(first_duration_s, other_duration_s):
        durations = _join_versus(
            format.duration(first_duration_s), format.duration(other_duration_s)
        )
        yield f"duration: {durations}"

    length_functions = {
        "mean prompt length": _compute_mean_prompt_tokens,
        "mean requested output length": _compute_mean_requested_tokens,
    }
    for name, compute_mean in length_functions.items():
        first_mean = compute_mean(first_summary)
        other_mean = compute_mean(other_summary)
        if _is_beyond_seed_variation(first_mean, other_mean):
            means = _join_versus(format.quantity(first_mean), format.quantity(other_mean))
            yield f"{name}: {means} tokens"


def _list_limit_differences(first: Side, other: Side) -> Iterator[str]:
    """Yield each limit of the load, such as the timeout, that differs between two runs."""
    for name, field in _LIMITS.items():
        first_limit = getattr(first.runs[0].manifest, field, None)
        other_limit = getattr(other.runs[0].manifest, field, None)
        if first_limit != other_limit:
            yield f"{name}: {_join_versus(_format_limit(first_limit), _format_limit(other_limit))}"


def _format_limit(limit: float | None) -> str:
    """Return a limit as text, or "none" for a load without this limit."""
    return "none" if limit is None else f"{limit:g}"


def _join_versus(first: str, other: str) -> str:
    """Return two different values as text, the one of the first side first."""
    return f"{first} vs. {other}"


def _is_beyond_seed_variation(first: float | None, other: float | None) -> bool:
    """Return True if two means differ by more than another seed would explain."""
    if first is None or other is None:
        return False
    return abs(first - other) > SEED_VARIATION * max(first, other)


def _planned_duration_s(side: Side) -> float | None:
    """Return the planned duration of the measured stages in seconds, or None if it is not known.

    A stage that ends after a number of requests has no planned end in the manifest.
    """
    manifest = side.runs[0].manifest
    if manifest is None:
        return None

    duration_ns = 0
    for stage in manifest.stages:
        if not stage.measured:
            continue
        if not stage.end_ns or stage.end_ns == stage.start_ns:
            return None
        duration_ns += stage.end_ns - stage.start_ns

    return duration_ns / 1e9 if duration_ns else None


def _compute_mean_prompt_tokens(summary: Summary) -> float | None:
    """Return the prompt tokens per ok request, or None if they were not counted."""
    tokens = summary.tokens.input
    return tokens / max(summary.requests.ok, 1) if tokens else None


def _compute_mean_requested_tokens(summary: Summary) -> float | None:
    """Return the requested output tokens per ok request, or None if no length was requested."""
    tokens = summary.tokens.asked_output
    return tokens / max(summary.requests.ok, 1) if tokens else None


def _select_fingerprints(first: Side, other: Side) -> tuple[str, str]:
    """Return the fingerprints of both sides that tell whether their work was the same.

    They are hashes of the planned requests. If a run lacks that hash, they are hashes of the
    settings that the requests were generated from.
    """
    first_fingerprints = first.runs[0].summary.fingerprints
    other_fingerprints = other.runs[0].summary.fingerprints
    if first_fingerprints.work and other_fingerprints.work:
        return first_fingerprints.work, other_fingerprints.work
    return first_fingerprints.recipe, other_fingerprints.recipe


def _compute_delivered_share(side: Side) -> float:
    """Return the output tokens that a side delivered, as a fraction of those requested."""
    return statistics.fmean(delivered_output_share(run.summary.verdict) for run in side.runs)
