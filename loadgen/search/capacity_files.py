"""The files that a search and a sweep derive from their trials: the curve and the capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.core import run_folder
from loadgen.core.results import store
from loadgen.core.workload import Workload, request_fingerprint
from loadgen.repeated import capacity
from loadgen.repeated.capacity import Capacity
from loadgen.repeated.run_warnings import describe_work_warnings
from loadgen.result_kinds import PAGE
from loadgen.runs import sweep_analysis, sweep_curve
from loadgen.runs.slo_text import list_objectives
from loadgen.search.search_results import (
    PASSED_ONLY,
    CapacityEvidence,
    SearchResult,
    TrialResult,
    capacity_interval,
    capacity_state,
    find_capacity_trial,
)
from loadgen.search.trials_csv import CURVE_FILE, render_curve_csv, render_trials_csv

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.render.section import Report

SEARCH_STOPPED = "the search stopped before it confirmed a load"
SWEEP_STOPPED = "the sweep stopped before all of its load points had run"
NO_POINT_MET_SLO = "no load point of the sweep is a valid measurement that met the SLO"
NO_POINT_SUSTAINED = "no load point of the sweep met the SLO and was sustained"
NO_LOAD_PASSED = "no load passed"
UNCONFIRMED = "loads passed, but none of them in a full-length confirmation"

RESUMABLE = ("", "interrupted", "gone", "nodes", "refused", "probes", "time")
"""Stop reasons of a search that has not come to its end, so that it can be resumed.

A search that was stopped by invalid trials ("invalid") can only be resumed in some cases.
"""
UNRECOVERABLE_CODES = ("too_few", "unfinished", "all_unfinished", "none_due", "dropped")
"""Reason codes of trials that the load itself made invalid, so that a repetition would be invalid
too.
"""
EXTRA_TRIALS = 20
"""By how much the limit of the trials is raised when a search that reached it is resumed.

It is half of the default limit, and enough for most confirmations.
"""
EXTRA_TIME_FACTOR = 2
"""The raised limit of the time, in units of the time that the search has taken."""


@dataclass(frozen=True)
class ExperimentOutcome:
    """What a search or a sweep has found.

    Attributes:
        output_dir: The directory of the experiment.
        trials: The results of its runs.
        result: The capacity that they give.
        curve: The curve of a sweep. None for a search.
    """

    output_dir: Path
    trials: Sequence[TrialResult]
    result: SearchResult
    curve: sweep_curve.SweepCurve | None = None


def write_outputs(
    outcome: ExperimentOutcome, workload: Workload, *, resume_command: str = ""
) -> None:
    """Write `curve.csv` and, if there is a capacity, `capacity.json` into the output directory.

    Both replace those of an earlier call. Without a capacity an old `capacity.json` is removed.
    `resume_command` is the command that resumes a search that has not ended.
    """
    output_dir = outcome.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    files = render_outputs(outcome, workload, resume_command=resume_command)
    for name, content in files.items():
        store.replace(output_dir / name, content)
    if capacity.CAPACITY_FILE not in files:
        (output_dir / capacity.CAPACITY_FILE).unlink(missing_ok=True)


def render_outputs(
    outcome: ExperimentOutcome, workload: Workload | None = None, *, resume_command: str = ""
) -> dict[str, bytes]:
    """Return the content of `curve.csv` and of `capacity.json`, by file name.

    A search always has a capacity, with its state. A sweep has one if it has an SLO and a single
    curve; otherwise `capacity.json` is left out.

    Args:
        outcome: What the search or sweep has found.
        workload: What was sent. Without it the recipe of the capacity, a fingerprint of the
            requests, stays empty.
        resume_command: The command that resumes a search that has not ended.
    """
    best_run_capacity = find_capacity(outcome, workload)
    stored_capacity: Capacity | None
    if outcome.curve is None:  # This is a search.
        curve_csv = render_trials_csv(outcome.trials)
        command = usable_resume_command(outcome.result, outcome.trials, resume_command)
        stored_capacity = with_search_state(best_run_capacity, outcome.result, command)
    else:
        curve_csv = render_curve_csv(outcome.trials, outcome.curve)
        stored_capacity = _with_sweep_state(best_run_capacity, outcome.curve)

    files = {CURVE_FILE: curve_csv}
    if stored_capacity is not None:
        is_simulated = any(trial.metrics.get("simulated") for trial in outcome.trials)
        files[capacity.CAPACITY_FILE] = capacity.dump_capacity(
            msgspec.structs.replace(stored_capacity, simulated=is_simulated)
        )

    return files


def render_sweep_reports(report: Report, table_name: str) -> dict[str, bytes]:
    """Return the report of a sweep as Markdown, in a file called `table_name`, and as a page."""
    from loadgen.render import html, markdown

    return {table_name: markdown.render(report).encode(), PAGE: html.render(report).encode()}


# Resuming a search that was stopped


def usable_resume_command(
    result: SearchResult, trials: Sequence[TrialResult], resume_command: str
) -> str:
    """Return the command that resumes a stopped search, or "" if resuming it would be of no use.

    If the search stopped at its limit of trials or time, the command gets an option that raises
    this limit. The limits of MLPerf's rules cannot be raised, so a search that stopped at one of
    them cannot be resumed.

    Args:
        result: What the search has found so far, with the reason why it stopped.
        trials: The results of its trials.
        resume_command: The command without a raised limit, or "" if it is not known.
    """
    if not resume_command or not _can_resume(result, trials):
        return ""
    option = _option_for_raised_limit(result)
    if not option:
        return resume_command
    has_fixed_limits = resume_command.startswith("loadgen mlperf")
    return "" if has_fixed_limits else f"{resume_command} {option}"


def _can_resume(result: SearchResult, trials: Sequence[TrialResult]) -> bool:
    """Return whether a search can go on, rather than having ended or stopping again at once.

    A search that was stopped by two INVALID trials in a row would stop at the same place again if
    the load itself made the last one invalid, for example because it sent too few requests.
    """
    if result.stop_reason != "invalid":
        return result.stop_reason in RESUMABLE
    was_caused_by_load = bool(trials) and trials[-1].reason_code in UNRECOVERABLE_CODES
    return not was_caused_by_load


def _option_for_raised_limit(result: SearchResult) -> str:
    """Return the option that raises the limit at which a search stopped, or "" without a limit.

    With the same limit the search would stop again at once. An example is "--max-probes 60".
    """
    if result.stop_reason == "probes":
        return f"--max-probes {result.trial_count + EXTRA_TRIALS}"
    if result.stop_reason == "time":
        return f"--max-time {math.ceil(EXTRA_TIME_FACTOR * result.duration_s)}s"
    return ""


# The capacity


def with_search_state(
    found_capacity: Capacity | None, result: SearchResult, resume_command: str = ""
) -> Capacity:
    """Return the capacity of a search with its state, as `capacity.json` stores it.

    Until a load is confirmed, or if none can be, the capacity is only a lower bound without an
    interval: the highest load that passed to its end, or 0.

    Args:
        found_capacity: The capacity that the best trial shows, or None if no trial shows one.
        result: What the search found.
        resume_command: The command that resumes the search, "" if it has ended.
    """
    evidence = None
    if found_capacity is not None:
        evidence = CapacityEvidence(bool(found_capacity.confirmed), found_capacity.sustained)

    state = capacity_state(result, evidence)
    if found_capacity is not None and state not in ("stopped", "none"):
        return msgspec.structs.replace(found_capacity, state=state, resume_command=resume_command)

    lower_bound = _as_lower_bound(
        found_capacity or Capacity(rate_per_s=0.0, method="search"),
        _reason_without_capacity(state, result),
    )
    return msgspec.structs.replace(lower_bound, state=state, resume_command=resume_command)


def _reason_without_capacity(state: capacity.State, result: SearchResult) -> str:
    """Return why a search in this state has no capacity, or only a lower bound of it."""
    if state != "none":
        return SEARCH_STOPPED
    return UNCONFIRMED if result.stop_reason == "unconfirmed" else NO_LOAD_PASSED


def _with_sweep_state(
    found_capacity: Capacity | None, curve: sweep_curve.SweepCurve
) -> Capacity | None:
    """Return the capacity of a sweep with its state, as `capacity.json` stores it.

    - Without an SLO, or with several lengths or targets, there is no single capacity: None.
    - A sweep that was stopped only has a lower bound without an interval: the highest load so far
      that met the SLO, or 0.
    - A sweep that came to its end has the capacity that it found, or a lower bound of 0.
    """
    if not curve.slo or curve.groups:
        return None

    no_capacity = Capacity(rate_per_s=0.0, method="sweep")
    if curve.not_run:
        lower_bound = _as_lower_bound(found_capacity or no_capacity, SWEEP_STOPPED)
        return msgspec.structs.replace(lower_bound, state="stopped", resume_command=curve.resume)

    if found_capacity is not None:
        return found_capacity

    has_growing_point = sweep_analysis.lowest_growing(curve.load_points) is not None
    reason = NO_POINT_SUSTAINED if has_growing_point else NO_POINT_MET_SLO
    return msgspec.structs.replace(_as_lower_bound(no_capacity, reason), state="none")


def _as_lower_bound(found_capacity: Capacity, reason: str) -> Capacity:
    """Return the capacity as a lower bound, without its interval. `reason` is shown to the user."""
    return msgspec.structs.replace(
        found_capacity,
        low_per_s=None,
        high_per_s=None,
        horizon_s=None,
        lower_bound=True,
        lower_bound_reason=reason,
    )


def find_capacity(outcome: ExperimentOutcome, workload: Workload | None = None) -> Capacity | None:
    """Return the capacity that the runs of a search or sweep show, without its state.

    The capacity is the load of one run, with the token rates that were measured in this run. Of a
    search it is the trial with the highest confirmed load, or else the one with the highest load
    that passed at full length. Of a sweep it is the best load point.

    Return None if there is no SLO, if no load passed at full length, or if every confirmation of a
    search failed.

    Args:
        outcome: The results of the runs.
        workload: What was sent. Its fingerprint is the recipe of the capacity, which stays empty
            without it.
    """
    result = outcome.result
    best_trial = _find_evidence(outcome)
    if best_trial is None or result.load is None or result.stop_reason == "unconfirmed":
        return None

    summary = run_folder.read_summary(outcome.output_dir / best_trial.run_name)
    rate_per_s = _rate_of_run(best_trial, summary)
    if not list_objectives(summary) or not rate_per_s:
        return None

    found_capacity = _capacity_of_run(best_trial, summary, result, rate_per_s)
    lower_bound_reason = _lower_bound_reason(outcome)
    return msgspec.structs.replace(
        found_capacity,
        lower_bound=bool(lower_bound_reason),
        lower_bound_reason=lower_bound_reason,
        recipe="" if workload is None else _recipe(workload, summary),
    )


def _capacity_of_run(
    best_trial: TrialResult, summary: Summary, result: SearchResult, rate_per_s: float
) -> Capacity:
    """Return the capacity of a search or sweep: the rate of its best run, and what supports it.

    The rate, the tokens and the warnings are those of the best run. The confidence interval comes
    from the outcomes of all runs.

    Args:
        best_trial: The run: a trial of a search, or a load point of a sweep.
        summary: The summary of this run.
        result: What the outcomes of all runs together show.
        rate_per_s: The rate of the best run.
    """
    is_closed_loop = _is_closed_loop_run(summary)
    run_capacity = Capacity(
        rate_per_s=rate_per_s,
        unit="requests" if is_closed_loop else capacity.rate_unit(summary),
        method="sweep" if best_trial.is_load_point else "search",
        evidence=best_trial.run_name or ".",
        confirmed=best_trial.is_confirming,
        output_tokens_per_s=summary.tokens.steady_output_per_s,
        total_tokens_per_s=summary.tokens.steady_total_per_s,
        warnings=describe_work_warnings(summary),
        state=PASSED_ONLY if best_trial.is_load_point else None,
    )
    run_capacity = _with_sustainability(run_capacity, best_trial, result)

    # In a closed loop the interval is in virtual users, so it is no interval of the rate.
    return run_capacity if is_closed_loop else _with_interval(run_capacity, result)


def _with_sustainability(
    run_capacity: Capacity, best_trial: TrialResult, result: SearchResult
) -> Capacity:
    """Return the capacity with whether its load is sustained, that is, no queue grew at it."""
    return msgspec.structs.replace(
        run_capacity,
        sustained=_is_sustained(best_trial, result),
        sustained_reason=result.sustained_reason or best_trial.sustained_reason,
        sustained_s=result.sustained_for_s if best_trial.is_sustain_check else None,
    )


def _with_interval(run_capacity: Capacity, result: SearchResult) -> Capacity:
    """Return the capacity with the confidence interval of the search or sweep, if it has one."""
    interval = capacity_interval(run_capacity.rate_per_s, result)
    if interval is None:
        return run_capacity

    return msgspec.structs.replace(
        run_capacity,
        low_per_s=interval.low,
        high_per_s=interval.high,
        horizon_s=result.horizon_s,
    )


def _is_closed_loop_run(summary: Summary) -> bool:
    """Return whether virtual users sent the measured load of a run."""
    return any(stage.measured and stage.concurrency is not None for stage in summary.stages)


def _rate_of_run(trial: TrialResult, summary: Summary) -> float | None:
    """Return the rate of a run, or None if it is not known.

    The load of a closed loop is a number of virtual users, so that its rate is that of the requests
    that it completed.
    """
    if _is_closed_loop_run(summary):
        return trial.metrics.get("steady_completed_rps")
    return trial.load


def _find_evidence(outcome: ExperimentOutcome) -> TrialResult | None:
    """Return the run that shows the capacity, or None if no run does."""
    if outcome.curve is None:
        return find_capacity_trial(outcome.result, outcome.trials)
    best_name = outcome.curve.best
    return next((trial for trial in outcome.trials if trial.run_name == best_name), None)


def _lower_bound_reason(outcome: ExperimentOutcome) -> str:
    """Return why the capacity is only a lower bound, or "" if it is not."""
    if outcome.curve is not None:
        return sweep_curve.lower_bound_reason(outcome.curve)
    return capacity.HIGHEST_LOAD_PASSED if outcome.result.lowest_failed is None else ""


def _is_sustained(best_trial: TrialResult, result: SearchResult) -> bool | None:
    """Return whether the load of the best trial is sustained, or None if it is not known.

    Any trial can show that it is not, but only a sustained-load check can show that it is.
    """
    if best_trial.is_sustain_check:
        return result.sustained
    return False if best_trial.has_growth else None


def _recipe(workload: Workload, summary: Summary) -> str:
    """Return the fingerprint of what was requested, without the rate."""
    is_counted_by_server = "server" in summary.tokens.sources.output
    token_counter = "server" if is_counted_by_server else summary.run.tokenizer_tag
    return request_fingerprint(workload, token_counter, summary.run.tokenizer_sha256)
