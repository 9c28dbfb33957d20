"""Find the reasons why the runs of a level cannot be used to judge its terms.

All `find_` functions return the reason as text, or "" if there is none. This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import ContractLevel
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.core import format
from loadgen.core.limits import CACHED_SHARE, NO_SPAN_SHARE, NOT_OFFERED_SHARE
from loadgen.core.metrics import reasons

MIN_WARM_HIT_RATE = 0.2
"""The least prefix cache hit rate of a warm cache, as a fraction of the prompt tokens.

`limits.CACHED_SHARE` is the largest hit rate of a cold cache.
"""

PAUSE_TOLERANCE_S = 1.0
"""How much shorter than required a pause between runs may be: times are stored in seconds."""


def find_level_failure(level: ContractLevel, measured_level: MeasuredLevel) -> str:
    """Return why no term of a level can be judged, or "" if its terms can be judged.

    All runs have to be finished and valid, with the prefix cache in the state that the level
    requires, and with the required pauses between them. The first reason is returned.

    Args:
        level: The level of the contract.
        measured_level: Its recorded runs.
    """
    if measured_level.failure_reason:
        return measured_level.failure_reason
    if not measured_level.runs:
        return "it has no run"

    for run in measured_level.runs:
        summary = run.summary
        if summary.run.state != "finished":
            return f"{run.folder} did not finish ({summary.run.state})"

        if not summary.verdict.valid:
            run_reasons = reasons.join_reasons(summary.verdict.reasons)
            return f"{run.folder} is INVALID: {run_reasons}"

        cache_reason = find_wrong_cache_state(level, run)
        if cache_reason:
            return cache_reason

    return find_short_pause(level, measured_level.runs)


def find_wrong_cache_state(level: ContractLevel, run: RecordedRun) -> str:
    """Return why the prefix cache was not cold or warm as the level requires, or "" if it was.

    The hit rate is the fraction of prompt tokens that the server took from its prefix cache. With a
    cold cache it is almost 0 (at most `CACHED_SHARE`), with a warm one at least
    `MIN_WARM_HIT_RATE`. A server may not report it. Then only prompts that are all different prove
    a cold cache, and nothing proves a warm one.

    Args:
        level: The level of the contract. Its `cache` is "cold", "warm" or None.
        run: A run of the level.
    """
    if level.cache is None:
        return ""

    hit_rate = run.summary.tokens.cached_share
    if hit_rate is None:
        has_unique_prompts = run.manifest.new_prompts and not run.manifest.shares_prompts
        if level.cache == "cold" and has_unique_prompts:
            return ""  # unique prompts are in no cache, whether the server reports it or not
        return (
            f"the level requires a {level.cache} prefix cache, and the server does not report "
            "cached tokens"
        )

    if level.cache == "cold" and hit_rate > CACHED_SHARE:
        return f"the prefix cache was not cold: hit rate {format.percent(hit_rate)}"
    if level.cache == "warm" and hit_rate < MIN_WARM_HIT_RATE:
        return f"the prefix cache was not warm: hit rate {format.percent(hit_rate)}"

    return ""


def find_short_pause(level: ContractLevel, runs: Sequence[RecordedRun]) -> str:
    """Return why the pauses between runs are shorter than the level requires, or "" if none is.

    A contract can require a pause (`apart`), so that the runs measure the server at different
    times. The runs of a simulation in virtual time are not checked, because they take place at no
    particular time.

    Args:
        level: The level of the contract.
        runs: Its recorded runs, in the order in which they were made.
    """
    min_pause_ns = level.apart_ns
    if min_pause_ns is None or runs[0].summary.target.simulated:
        return ""

    min_pause_s = min_pause_ns / NS_PER_S
    requirement = f"the contract requires pauses of {format.duration(min_pause_s)} between runs"
    if len(runs) < 2:
        return f"{requirement}, and there is only one run"

    for earlier, later in pairwise(runs):
        if not earlier.manifest.ended or not later.manifest.started:
            return f"{requirement}, and the times of {earlier.folder} or {later.folder} are unknown"

        ended = datetime.fromisoformat(earlier.manifest.ended)
        started = datetime.fromisoformat(later.manifest.started)

        pause_s = (started - ended).total_seconds()
        if pause_s < min_pause_s - PAUSE_TOLERANCE_S:
            pause = format.duration(max(pause_s, 0.0))
            return f"{requirement}, and {later.folder} started {pause} after {earlier.folder}"

    return ""


def find_dropped_load(runs: Sequence[RecordedRun]) -> str:
    """Return a message if the client dropped so many requests that the load was too low, else "".

    The client drops a request if its limit on requests in flight is reached. The server then gets
    less load than the contract requires.
    """
    dropped_fraction = max((run.summary.requests.dropped_share for run in runs), default=0.0)
    if dropped_fraction <= NOT_OFFERED_SHARE:
        return ""
    return (
        f"the client dropped {format.percent(dropped_fraction)} of the requests at its in-flight "
        "limit; raise max_in_flight or max_in_prefill in the workload"
    )


def find_unrepresentative_run(runs: Sequence[RecordedRun], term: ContractTerm) -> str:
    """Return why the responses of a run do not represent the workload, or "" if they do.

    They do not if they were shorter than requested, or if many of them do not have the metric that
    the term is computed from. A verdict on them would then be about other responses than those that
    the contract requires.
    """
    for run in runs:
        reason = _describe_shortened_responses(run) or _describe_missing_tpot(run, term)
        if reason:
            return reason
    return ""


def _describe_shortened_responses(run: RecordedRun) -> str:
    """Return a message if the responses of a run were shorter than requested, else ""."""
    for caveat in run.summary.verdict.caveat_codes:
        if caveat.code == "shortened":
            return f"{run.folder}: {reasons.format_reason(caveat)}"
    return ""


def _describe_missing_tpot(run: RecordedRun, term: ContractTerm) -> str:
    """Return a message if a term is computed from TPOT and many responses of a run have none.

    The time per output token (TPOT) of a response needs two events at different times. A response
    that came in one piece or without text has none. If there are many of them, the TPOT of the
    others does not represent the workload.

    Return "" if the term does not use TPOT or most responses have it.
    """
    if not _uses_tpot(run, term):
        return ""

    summary = run.summary
    count_without_tpot = summary.tpot_no_span + summary.tpot_no_output
    max_count_without_tpot = NO_SPAN_SHARE * summary.requests.ok
    if count_without_tpot <= max_count_without_tpot:
        return ""

    responses = format.counted(summary.requests.ok, "response")
    return (
        f"{count_without_tpot:,} of {responses} in {run.folder} have no TPOT, because they came in "
        "one piece or without text"
    )


def _uses_tpot(run: RecordedRun, term: ContractTerm) -> bool:
    """Return whether a term is about TPOT, itself or through the SLO of the run."""
    if (term.of or term.kind) == "tpot":
        return True
    if not term.requires("slo") or run.manifest.slo is None:
        return False
    return any(slo_term.metric == "tpot" for slo_term in run.manifest.slo.terms)
