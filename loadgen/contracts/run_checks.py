"""Find the reasons why runs do not show what a contract is about.

All functions return the reason as text, or "" if there is none. This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import ContractLevel
from loadgen.contracts.terms import ContractTerm
from loadgen.core import format
from loadgen.core.limits import CACHED_SHARE, NO_SPAN_SHARE, NOT_OFFERED_SHARE
from loadgen.core.metrics import reasons

MIN_WARM_SHARE = 0.2
"""Least cached share of the prompt tokens with a warm cache.

For a cold cache see `limits.CACHED_SHARE`.
"""

PAUSE_TOLERANCE_S = 1.0
"""How much shorter than required a pause between runs may be."""


def find_level_failure(level: ContractLevel, measured_level: MeasuredLevel) -> str:
    """Return why no term of a level can be judged.

    All runs have to be finished and valid, with the cache in the state that the level requires,
    and as far apart in time. The first reason is returned.
    """
    if measured_level.failure_reason:
        return measured_level.failure_reason
    if not measured_level.runs:
        return "there is no run"
    for run in measured_level.runs:
        summary = run.summary
        if summary.run.state != "finished":
            return f"{run.folder} has no clean end ({summary.run.state})"
        if not summary.verdict.valid:
            run_reasons = "; ".join(summary.verdict.reasons)
            return f"the measurement in {run.folder} is not valid: {run_reasons}"
        cache_reason = find_wrong_cache_state(level, run)
        if cache_reason:
            return cache_reason
    return find_short_pause(level, measured_level.runs)


def find_wrong_cache_state(level: ContractLevel, run: RecordedRun) -> str:
    """Return why the prefix cache was not cold or warm as the level requires.

    The server reports how many prompt tokens came from its cache. With a cold cache these are
    almost none, and with a warm one at least a fifth.
    """
    if level.cache is None:
        return ""
    cached_share = run.summary.tokens.cached_share
    if cached_share is None:
        has_unique_prompts = run.manifest.new_prompts and not run.manifest.shares_prompts
        if level.cache == "cold" and has_unique_prompts:
            return ""  # unique prompts are in no cache, whether the server reports it or not
        return (
            "the server does not say what came from its cache: "
            f"whether it was {level.cache} cannot be seen"
        )
    share = format.percent(cached_share)
    if level.cache == "cold" and cached_share > CACHED_SHARE:
        return f"{share} of the prompt tokens came from cache: it was not cold"
    if level.cache == "warm" and cached_share < MIN_WARM_SHARE:
        return f"only {share} of the prompt tokens came from cache: it was not warm"
    return ""


def find_short_pause(level: ContractLevel, runs: Sequence[RecordedRun]) -> str:
    """Return why runs are not as far apart in time as the level requires.

    A simulation has no time of day.
    """
    if level.apart_ns is None or runs[0].summary.target.simulated:
        return ""
    required_s = level.apart_ns / 1e9
    required = format.duration(required_s)
    if len(runs) < 2:
        return f"there is one run; the contract asks for runs {required} apart"
    for before, after in pairwise(runs):
        if not before.manifest.ended or not after.manifest.started:
            return (
                f"when {before.folder} ended or {after.folder} began is not known; "
                f"the contract asks for {required} apart"
            )
        ended = datetime.fromisoformat(before.manifest.ended)
        started = datetime.fromisoformat(after.manifest.started)
        pause_s = (started - ended).total_seconds()
        if pause_s < required_s - PAUSE_TOLERANCE_S:
            pause = format.duration(max(pause_s, 0.0))
            return (
                f"{after.folder} began {pause} after {before.folder} ended; "
                f"the contract asks for {required}"
            )
    return ""


def find_dropped_load(runs: Sequence[RecordedRun]) -> str:
    """Return that the client dropped requests, so that the load was not offered."""
    dropped_share = max((run.summary.requests.dropped_share for run in runs), default=0.0)
    if dropped_share <= NOT_OFFERED_SHARE:
        return ""
    return (
        f"{format.percent(dropped_share)} of the starts were dropped at a cap, and are in no "
        "figure here: the load was not offered; raise max_in_flight (or max_in_prefill) in its "
        "workload"
    )


def find_unrepresentative_run(runs: Sequence[RecordedRun], term: ContractTerm) -> str:
    """Return why a run shows a term for other work, or for a part of its answers only."""
    for run in runs:
        reason = _find_shortened_answers(run) or _find_answers_without_tpot(run, term)
        if reason:
            return reason
    return ""


def _find_shortened_answers(run: RecordedRun) -> str:
    """Return that the answers of a run were shorter than requested."""
    for caveat in run.summary.verdict.caveat_codes:
        if caveat.code == "shortened":
            return f"{run.folder} is {reasons.format_reason(caveat)}"
    return ""


def _find_answers_without_tpot(run: RecordedRun, term: ContractTerm) -> str:
    """Return that many answers have no TPOT, if a term is computed from TPOT.

    The time per output token (TPOT) of an answer needs two events at different times. If many
    answers came in one piece, the TPOT of the others does not represent them.
    """
    metrics = {term.of or term.kind}
    if term.requires("slo") and run.manifest.slo is not None:
        metrics.update(slo_term.metric for slo_term in run.manifest.slo.terms)
    summary = run.summary
    without_tpot = summary.tpot_no_span + summary.tpot_no_output
    if "tpot" not in metrics or without_tpot <= NO_SPAN_SHARE * summary.requests.ok:
        return ""
    answers = format.counted(summary.requests.ok, "answer")
    return (
        f"{without_tpot:,} of {answers} in {run.folder} came at one instant, or "
        "without text, and have no TPOT"
    )
