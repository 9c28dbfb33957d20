"""Decides whether two sides of a comparison did the same work. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from loadgen.core import format
from loadgen.core.limits import SHORTENED
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.verdict import delivered_output_share
from loadgen.runs.comparison_side import Side
from loadgen.runs.slo_text import list_objectives

SEED_VARIATION = 0.1
"""The relative difference of mean lengths and durations that another seed explains."""

HASH_DIGITS = 12

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
    same was requested.

    Returns an empty list if the workloads do not differ, or if one of them is not known.
    """
    if not first.runs or not other.runs:
        return []
    delivered_shares = [_delivered_share(side) for side in (first, other)]
    if max(delivered_shares) - min(delivered_shares) > SHORTENED:
        texts = [f"{share * 100:.1f} %" for share in delivered_shares]
        return [f"responses: {_versus(*texts)} of the requested output tokens"]
    work_first, work_other = _work_fingerprints(first, other)
    if not work_first or not work_other or work_first == work_other:
        return []
    differences = [
        *_setting_differences(first.runs[0].summary, other.runs[0].summary),
        *_load_differences(first, other),
        *_limit_differences(first, other),
    ]
    return differences or [f"config fingerprint: {_versus(work_first, work_other)}"]


def describe_slo(side: Side) -> str:
    """Return the SLO of a side as text, or "" without one."""
    return ", ".join(list_objectives(side.runs[0].summary)) if side.runs else ""


def _setting_differences(first: Summary, other: Summary) -> Iterator[str]:
    """Yield each setting of the load that differs between two runs."""
    settings_first = _settings(first)
    settings_other = _settings(other)
    for name, value in settings_first.items():
        if value != settings_other[name]:
            yield f"{name}: {_versus(value or 'none', settings_other[name] or 'none')}"


def _settings(summary: Summary) -> dict[str, str]:
    """Return the settings of the load that decide whether two workloads are equal, by name."""
    run = summary.run
    tokenizer = f"{run.tokenizer} ({run.tokenizer_sha256[:HASH_DIGITS]})"
    return {
        "workload": run.workload,
        "load": summary.load.arrival,
        "SLO": ", ".join(list_objectives(summary)),
        "output tokens counted by": ", ".join(summary.tokens.sources.output),
        "tokenizer file": tokenizer if run.tokenizer_sha256 else "",
    }


def _load_differences(first: Side, other: Side) -> Iterator[str]:
    """Yield differences of duration and of mean lengths that another seed does not explain."""
    summary_first = first.runs[0].summary
    summary_other = other.runs[0].summary
    durations = (_planned_s(first), _planned_s(other))
    has_other_count = summary_first.requests.scheduled != summary_other.requests.scheduled
    if has_other_count and _is_beyond_seed_variation(*durations):
        yield f"duration: {_versus(*map(format.duration, durations))}"
    mean_tokens = {
        "mean prompt length": (
            _mean_prompt_tokens(summary_first),
            _mean_prompt_tokens(summary_other),
        ),
        "mean requested output length": (
            _mean_requested_tokens(summary_first),
            _mean_requested_tokens(summary_other),
        ),
    }
    for name, means in mean_tokens.items():
        if _is_beyond_seed_variation(*means):
            yield f"{name}: {_versus(*map(format.quantity, means))} tokens"


def _limit_differences(first: Side, other: Side) -> Iterator[str]:
    """Yield each limit of the load, such as the timeout, that differs between two runs."""
    for name, field in _LIMITS.items():
        limit_first = getattr(first.runs[0].manifest, field, None)
        limit_other = getattr(other.runs[0].manifest, field, None)
        if limit_first != limit_other:
            yield f"{name}: {_versus(_format_limit(limit_first), _format_limit(limit_other))}"


def _format_limit(limit: float | None) -> str:
    """Return a limit as text."""
    return "none" if limit is None else f"{limit:g}"


def _versus(first: str, other: str) -> str:
    """Return two different values as text, the one of the first side first."""
    return f"{first} vs. {other}"


def _is_beyond_seed_variation(first: float | None, other: float | None) -> bool:
    """Return True if two means differ by more than another seed would explain."""
    if first is None or other is None:
        return False
    return abs(first - other) > SEED_VARIATION * max(first, other)


def _planned_s(side: Side) -> float | None:
    """Return the planned duration of the measured stages, or None if it was not planned.

    It was not planned if a stage ends after a number of requests, which has no end in the manifest.
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


def _mean_prompt_tokens(summary: Summary) -> float | None:
    """Return the prompt tokens per ok request, or None if they were not counted."""
    tokens = summary.tokens.input
    return tokens / max(summary.requests.ok, 1) if tokens else None


def _mean_requested_tokens(summary: Summary) -> float | None:
    """Return the requested output tokens per ok request, or None if no length was requested."""
    tokens = summary.tokens.asked_output
    return tokens / max(summary.requests.ok, 1) if tokens else None


def _work_fingerprints(first: Side, other: Side) -> tuple[str, str]:
    """Return the fingerprints of what was sent, or those of the settings if a run lacks one."""
    prints_first = first.runs[0].summary.fingerprints
    prints_other = other.runs[0].summary.fingerprints
    if prints_first.work and prints_other.work:
        return prints_first.work, prints_other.work
    return prints_first.recipe, prints_other.recipe


def _delivered_share(side: Side) -> float:
    """Return the output tokens that a side delivered, as a fraction of those requested."""
    return statistics.fmean(delivered_output_share(run.summary.verdict) for run in side.runs)
