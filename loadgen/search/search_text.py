"""The result of a search as text: progress, capacity, interval, confirmation and trials."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from loadgen.core import format, slo
from loadgen.core.limits import MODEL_ERROR
from loadgen.core.metrics.sustainable import CONFIRMATION_FACTOR
from loadgen.core.stats.intervals import length_to_meet_s
from loadgen.render.section import Facts, Section, Table, section
from loadgen.repeated import capacity
from loadgen.search.goal import FAILED, FULL_LENGTH, INVALID, PASSED, Goal
from loadgen.search.search_results import (
    CONFIRMED_STOPS,
    PlannedTrial,
    SearchResult,
    TrialResult,
    capacity_and_state,
    capacity_interval,
    find_best_trial,
    find_higher_pass,
)
from loadgen.search.search_settings import ENOUGH_TRIALS, INTERVAL_CONFIDENCE

NS_PER_MS = 1e6
SECONDS_PER_MINUTE = 60
QUERIES_UNIT = " queries/s"
"""The unit of loads by MLPerf's rules."""

KIND_LABELS = {
    "bracket": "bracketing",
    "probe": "narrowing",
    "confirm": "confirmation",
    "sustain": "sustained-load check",
}
"""Why a search runs a trial, as its progress names it."""
STOP_LABELS = {
    "": "not finished",
    "found": "the capacity was confirmed by a full-length trial {start}",
    "coarse": "the capacity was confirmed by a full-length trial {start}, but its confidence "
    f"interval is still wider than requested after {ENOUGH_TRIALS} trials",
    "none": "even the lowest load failed",
    "highest": "the highest allowed load passed; raise --high to find the limit",
    "unconfirmed": "not confirmed: full-length trials failed at loads that had passed. The server "
    "may not return to the same state between trials, or a queue may grow too slowly for a trial "
    "to show it. Search again with longer trials (--duration, for mlperf --min-duration)",
    "undecided": "not confirmed: loads met the SLO, but no trial was long enough to show whether "
    "they are sustained",
    "probes": "stopped at the maximum number of trials (--max-probes)",
    "time": "stopped at the maximum time (--max-time)",
    "invalid": "stopped after two INVALID trials in a row",
    "refused": "stopped because the endpoint refused requests for a quota or a rate limit",
    "gone": "stopped because the endpoint could not be reached any more",
    "nodes": "stopped because no cluster node was left to send the load",
    "interrupted": "interrupted",
}
"""Why a search ended, by the stop reason of `SearchResult`."""
LATENCY_OBJECTIVE = re.compile(r"(?P<metric>\w+) (?P<quantile>p[\d.]+)")
"""The name of an objective of latency, for example "ttft p99"."""
OUTCOME_LABELS = {PASSED: "passed", FAILED: "failed", INVALID: "INVALID"}
LATENCY_COLUMNS = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
TRIAL_TABLE_HEADER = (
    "trial",
    "load",
    "outcome",
    "time",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "p99",
    "tokens/s",
    "goodput",
    "details",
)
MLPERF_SEED_VARIATION = "1.9 %"
"""How much the capacity differs between MLPerf's official seeds (v5.1, v6.0 and v6.1).

The seeds determine the arrivals and the order of the samples.
"""
USED_BY_COST = "loadgen cost and loadgen size use this load and the throughput of its trial"
MAX_INVALID_SHOWN = 2
"""The number of INVALID trials that the report names: the last ones, which ended the search."""
PROPOSED_LENGTH_STEP_S = 10
"""A proposed length of a trial is rounded up to a multiple of this."""
LATE_RESPONSES_FACTOR = 2
"""The last responses came late if a trial took so many times as long as its load."""


# Progress: one line for each trial


def describe_planned_trial(trial: PlannedTrial, unit: str) -> str:
    """Return a trial as its progress line names it: "Trial at 12.5 req/s (narrowing)"."""
    length = ""
    if trial.length_factor > 1:
        length = f", {trial.length_factor:g} times the length"
    return f"Trial at {trial.load:.4g}{unit} ({KIND_LABELS[trial.kind]}{length})"


def describe_trial_result(result: TrialResult) -> str:
    """Return the outcome of a trial for its progress line: "passed after 5 min 39 s"."""
    early = ", stopped early" if result.ended_early else ""
    duration = format.duration(result.duration_s)
    outcome = f"{OUTCOME_LABELS[result.outcome]} after {duration}{early}"
    details = "; ".join(filter(None, (_outcome_reason(result), _growth_note(result))))
    return f"{outcome}: {details}" if details else outcome


def _outcome_reason(result: TrialResult) -> str:
    """Return why a trial has its outcome, or "" if it simply passed to its end."""
    return "" if result.reason_code == FULL_LENGTH else result.reason


def describe_late_responses(result: TrialResult, trial_s: float, warmup_s: float = 0.0) -> str:
    """Return a note if the last responses of a trial came long after its load ended, else "".

    A backlog that takes so long to work off would have grown further under a longer load.

    Args:
        result: The result of the trial.
        trial_s: The full length of the load of an ordinary trial, in seconds.
        warmup_s: The length of the warm-up before it.
    """
    load_s = trial_s * result.length_factor + warmup_s
    is_timely = result.duration_s < LATE_RESPONSES_FACTOR * load_s
    if is_timely or result.ended_early or not result.is_valid:
        return ""

    late_by = format.duration(result.duration_s - load_s)
    return (
        f"the last responses came {late_by} after a load of {format.duration(load_s)}. A longer "
        "load may fail at the same rate. Search again with a longer --duration."
    )


# The result


def describe_stop(result: SearchResult) -> str:
    """Return why a search ended and, if its trials were too short, how long they have to be."""
    label = STOP_LABELS.get(result.stop_reason, result.stop_reason)
    text = label.format(start=describe_start(result))
    if result.stop_reason != "undecided" or result.needed_load_s is None:
        return text
    step_count = math.ceil(result.needed_load_s / PROPOSED_LENGTH_STEP_S)
    needed_s = step_count * PROPOSED_LENGTH_STEP_S
    return f"{text}. Search again with trials of {format.duration(needed_s)}: -d {needed_s}s"


def describe_capacity(result: SearchResult, trials: Sequence[TrialResult], unit: str) -> str:
    """Return the capacity as text: the load, its confidence interval and how far it was shown.

    - No load was shown: "none" if the search came to its end, else "not known".
    - The search was stopped: "not known, at least 12.5 req/s".
    - The highest allowed load passed: "at least 50 req/s (the highest allowed load passed)".
    - Otherwise: "29.8 req/s (95 % CI 29.4 to 30.3), sustained (no trend in 20 min)".

    `unit` is the unit of the loads, as it is written after a number.
    """
    load, state = capacity_and_state(result, trials)
    if load is None:
        return "none" if state == "none" else "not known"
    if state == "stopped":
        return f"not known, at least {load:.4g}{unit}"
    if result.is_lower_bound:
        return f"at least {load:.4g}{unit} (the highest allowed load passed)"

    bounds = ""
    interval = capacity_interval(load, result)
    if interval is not None:
        bounds = f" ({_describe_bounds(interval.low, interval.high)})"

    state_label = capacity.STATE_LABELS[state]
    period = capacity.describe_sustained_period(state, result.sustained_for_s)
    return f"{load:.4g}{unit}{bounds}, {state_label}{period}"


def _explain_capacity(result: SearchResult, trials: Sequence[TrialResult], unit: str) -> str:
    """Return the capacity as text, and why it is below a load that has passed, if it is.

    For example: "124 sessions (95 % CI 121.6 to 167.9), confirmed; 128 passed once, but may fail
    when repeated".
    """
    text = describe_capacity(result, trials, unit)
    load, state = capacity_and_state(result, trials)
    if load is None or state not in ("confirmed", "sustained"):
        return text

    higher_load = find_higher_pass(load, trials)
    if higher_load is None:
        return text
    if _has_longer_pass(result):
        return f"{text}; {higher_load:.4g} passed only a shorter trial"
    return f"{text}; {higher_load:.4g} passed once, but may fail when repeated"


def _describe_bounds(low: float, high: float) -> str:
    return f"95 % CI {low:.4g} to {high:.4g}"


def describe_result(
    result: SearchResult, trials: Sequence[TrialResult], term_names: Sequence[str], unit: str
) -> str:
    """Return the result of a search in one to four sentences, as the headline of its report.

    The first sentence states the capacity, or that no load is known to meet the SLO. The others
    appear only where needed: that it is not known whether a confirmed load is sustained, and why
    the search ended if it did not end by confirming a load.

    Args:
        result: What the search found.
        trials: The results of its trials.
        term_names: The names of the objectives, for example "ttft p99".
        unit: The unit of the loads, as it is written after a number.
    """
    objectives = describe_objectives(term_names)
    load, state = capacity_and_state(result, trials)
    if load is None:
        return f"No load is known to meet the SLO ({objectives}): {describe_stop(result)}."

    capacity_text = describe_capacity(result, trials, unit)
    sentences = [f"Maximum load meeting the SLO ({objectives}): {capacity_text}."]
    if state == "confirmed":
        sentences.append(_describe_unknown_sustainability(result, unit))

    if result.stop_reason not in CONFIRMED_STOPS:
        sentences.append(f"The search ended: {describe_stop(result)}.")

    return " ".join(sentences)


def describe_objectives(term_names: Sequence[str]) -> str:
    """Return the names of objectives as text: "TTFT p99, goodput" for "ttft p99" and "goodput"."""
    labels = []
    for name in term_names:
        match = LATENCY_OBJECTIVE.fullmatch(name)
        labels.append(f"{match['metric'].upper()} {match['quantile']}" if match else name)
    return ", ".join(labels)


def describe_goal(goal: Goal) -> str:
    """Return the objectives of a search with the limits of latencies.

    Objectives that are not limits of latencies have only their names.
    """
    limits = [
        slo.describe_term(term.metric, term.quantile, term.limit_ns / NS_PER_MS)
        for term in goal.slo.terms
    ]
    other_names = goal.term_names[len(limits) :]
    return ", ".join([*limits, *other_names])


def _describe_unknown_sustainability(result: SearchResult, unit: str) -> str:
    """Return why it is not known whether a confirmed load is sustained.

    If the search has run longer trials, the text proposes the option that makes them even longer.
    """
    text = f"Whether it is sustained is not known: {result.sustained_reason}."
    if result.length_factor <= 1:
        return text
    option = "--min-duration" if unit == QUERIES_UNIT else "--duration"
    return f"{text} Longer trials show it: {option}."


# The result for a terminal


def list_brief_facts(
    result: SearchResult,
    trials: Sequence[TrialResult],
    unit: str,
    *,
    limit: str,
    simulated: bool,
    further_rows: Sequence[tuple[str, str]] = (),
) -> Facts:
    """Return the result of a search in about six lines, for a terminal.

    Args:
        result: What the search found.
        trials: The results of its trials.
        unit: The unit of the loads, as it is written after a number.
        limit: What limits the load, as a sentence.
        simulated: Whether a performance model responded instead of a server.
        further_rows: Labels and texts that follow the capacity.
    """
    rows = [
        ("Capacity", _explain_capacity(result, trials, unit)),
        *further_rows,
        ("Limited by", limit),
        ("Throughput", _describe_throughput(result, trials)),
        *_interval_rows(result, unit, simulated=simulated),
        ("Effort", _describe_effort(result)),
    ]
    if result.stop_reason not in CONFIRMED_STOPS:
        rows.append(("Ended", describe_stop(result)))
        rows += _invalid_trial_rows(trials)[-1:]

    return Facts([(label, text) for label, text in rows if text])


def capacity_output_tokens_per_s(
    result: SearchResult, trials: Sequence[TrialResult]
) -> float | None:
    """Return the output tokens per second of the trial that shows the capacity, if known."""
    load, _ = capacity_and_state(result, trials)
    best = find_best_trial(trials)
    if load is None or best is None:
        return None
    return best.metrics.get("output_tokens_per_s")


def _describe_throughput(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return the output tokens per second at the capacity as text, or "" if they are not known."""
    tokens_per_s = capacity_output_tokens_per_s(result, trials)
    if tokens_per_s is None:
        return ""
    return f"{format.quantity(tokens_per_s)} output tok/s in the trial at this load"


# The section about the confirmation


def confirmation_section(
    result: SearchResult, trials: Sequence[TrialResult], unit: str, *, simulated: bool
) -> Section:
    """Return the section "Confirmation" of the report: how well the capacity is known, and why.

    Args:
        result: What the search found.
        trials: The results of its trials.
        unit: The unit of the loads, as it is written after a number.
        simulated: Whether a performance model responded instead of a server. The interval then
            does not cover the largest error, that of the model.
    """
    rows = [
        ("Capacity", _explain_capacity(result, trials, unit)),
        *confirmation_rows(result, trials, unit),
        *_interval_rows(result, unit, simulated=simulated),
        ("Effort", _describe_effort(result)),
        ("Ended", describe_stop(result)),
        *_invalid_trial_rows(trials),
    ]
    return section("Confirmation", Facts(rows), id="confirmed")


def _interval_rows(
    result: SearchResult, unit: str, *, simulated: bool
) -> Iterator[tuple[str, str]]:
    """Yield the rows of the interval and of what it covers, if there is one."""
    if result.load is None or result.interval is None:
        return
    bounds = _describe_bounds(result.interval.low, result.interval.high)
    yield "50 % pass", f"{result.load:.4g}{unit} ({bounds})"
    yield "Interval", describe_interval_coverage(result, simulated=simulated)


def _describe_effort(result: SearchResult) -> str:
    """Return how long the trials took, and how much of that time the confirmations took."""
    return (
        f"{format.counted(result.trial_count, 'trial')}, {format.duration(result.duration_s)} "
        f"({format.duration(result.confirmation_s)} of it for confirmation)"
    )


def _invalid_trial_rows(trials: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Return a row for each of the last INVALID trials, with the reason why it is not valid."""
    invalid = [trial for trial in trials if not trial.is_valid]
    return [
        ("INVALID", f"trial at {trial.load:.4g}: {trial.reason}")
        for trial in invalid[-MAX_INVALID_SHOWN:]
    ]


def describe_interval_coverage(result: SearchResult, *, simulated: bool) -> str:
    """Return which sources of error the interval of a search covers, and which it does not.

    In a simulation the error of the performance model is the largest one, and not covered. On a
    real server the interval covers the variation from run to run, and changes of the server that
    recur within the trials.
    """
    if simulated:
        return (
            f"excludes model error ({format.shares(MODEL_ERROR)}) and seed variation (up to "
            f"{MLPERF_SEED_VARIATION})"
        )

    origin = "as specified"
    if result.run_spread_source == "learned":
        origin = "estimated from these trials; set it with --run-spread"

    spread = f"run-to-run variation of {result.run_spread or 0.0:.1%} ({origin})"
    return (
        f"includes {spread}{_describe_horizon(result)}; excludes other days and restarts of the "
        "server"
    )


def _describe_horizon(result: SearchResult) -> str:
    """Return which recurring slowdowns of the server the interval covers, or "" if it covers none.

    A server slows down from time to time, for example to collect memory. The trials have most
    likely met the slowdowns that recur within the horizon, a time that grows with their length. If
    it is shorter than the usual horizon, the text adds how long trials have to be (option -d) to
    reach that one.
    """
    if result.horizon_s is None:
        return ""

    covered_changes = f" and {capacity.describe_horizon(result.horizon_s)}"
    if result.horizon_s >= capacity.HORIZON_S:
        return covered_changes

    needed_s = length_to_meet_s(capacity.HORIZON_S, INTERVAL_CONFIDENCE)
    needed_minutes = math.ceil(needed_s / SECONDS_PER_MINUTE)
    needed_length = format.duration(SECONDS_PER_MINUTE * needed_minutes)

    return f"{covered_changes} (trials of {needed_length} cover the usual horizon: -d)"


def confirmation_rows(
    result: SearchResult, trials: Sequence[TrialResult], unit: str
) -> list[tuple[str, str]]:
    """Return the row of the highest sustained load, and that of the confirmed load.

    A row is left out if there is nothing to report. The sustained load comes first, because it is
    the capacity if a longer trial showed it.
    """
    rows = []
    sustained_load = _describe_sustained_load(result, unit)
    if sustained_load is not None:
        rows.append(("Sustained", sustained_load + _describe_evidence(result, trials)))

    if result.confirmed_load is not None:
        label = confirmed_load_label(result, trials)
        rows.append((label, _describe_confirmed_load(result, result.confirmed_load, unit)))

    return rows


def _describe_confirmed_load(result: SearchResult, confirmed_load: float, unit: str) -> str:
    """Return the confirmed load as text: the highest load that passed a trial at full length.

    If a longer trial has shown the load that is sustained, `loadgen cost` and `loadgen size` use
    that load. Otherwise they use the confirmed load, and the text states this.
    """
    start = describe_start(result)
    text = f"{confirmed_load:.4g}{unit}, a full-length trial {start} met every objective"
    return text if _has_longer_pass(result) else f"{text}; {USED_BY_COST}"


def _has_longer_pass(result: SearchResult) -> bool:
    """Return whether a trial longer than the ordinary ones showed the sustained load."""
    return result.sustained_load is not None and result.length_factor > 1


def _describe_evidence(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return why the highest sustained load is known to be sustained or not, or ""."""
    if result.is_by_rules_only:
        return f"; {describe_rules_only(result, trials)}"
    has_reason = bool(result.sustained_reason) and result.sustained_load is not None
    return f"; {result.sustained_reason}" if has_reason else ""


def _describe_sustained_load(result: SearchResult, unit: str) -> str | None:
    """Return the highest sustained load as text, or None if no load was confirmed at all.

    The text states how strong the evidence is:

    - a longer trial passed: "every objective met over 2 times the trial length";
    - only an ordinary trial showed it: "no upward trend in a trial of the ordinary length";
    - no load was sustained: "none found", with the lowest load that was not;
    - a load was confirmed, but no trial showed whether it is sustained: "not known".
    """
    unsustained_load = result.unsustained_load
    if result.sustained_load is None:
        if unsustained_load is not None:
            return f"none found; {unsustained_load:.4g}{unit} is not sustained"
        return None if result.confirmed_load is None else "not known"

    load = f"{result.sustained_load:.4g}{unit}"
    if not _has_longer_pass(result):
        return f"{load}, no upward trend in a trial of the ordinary length"

    limit = "" if unsustained_load is None else f", but not at {unsustained_load:.4g}{unit}"
    return (
        f"{load}, every objective met over {result.length_factor:g} times the trial length{limit}; "
        f"{USED_BY_COST}"
    )


def confirmed_load_label(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return the label of the confirmed load.

    It is "Confirmed" if the load is the capacity, else "Passed once": it was not sustained.
    """
    capacity_load, _ = capacity_and_state(result, trials)
    return "Confirmed" if result.confirmed_load == capacity_load else "Passed once"


def describe_rules_only(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return why it is not known whether a confirmed load is sustained, and how to find out.

    A load is confirmed by a trial at full length that met the SLO. This alone does not show that
    the load is sustained, which means that no queue grows at it ("rules only"). The option
    --sustain runs longer trials that can show it. If the search has not run any, the text proposes
    this option and states about how long one longer trial takes.
    """
    reason = f"rules only: {result.sustained_reason}"
    has_run_longer_trials = result.length_factor > 1
    if has_run_longer_trials:
        return reason

    confirmation_times_s = [trial.duration_s for trial in trials if trial.is_confirmation]

    # A longer trial takes CONFIRMATION_FACTOR times as long as a confirmation.
    longer_trial_s = CONFIRMATION_FACTOR * max(confirmation_times_s, default=0.0)
    needed_time = format.duration(longer_trial_s)
    return f"{reason}; run --sustain --resume on this directory to check (about {needed_time})"


def describe_start(result: SearchResult) -> str:
    """Return in which state of the server the trials started, as text."""
    return "after a warm-up" if result.warmup_s else "from a cold start"


# The table of trials


def trial_table(trials: Sequence[TrialResult]) -> Table:
    """Return a table with a row for each trial. The last column explains its outcome."""
    rows = [_trial_row(trial) for trial in trials]
    return Table(TRIAL_TABLE_HEADER, rows, "remarks", label_columns=0)


def _trial_row(trial: TrialResult) -> tuple[str, ...]:
    """Return the row of a trial in the table of trials, with the cells of TRIAL_TABLE_HEADER."""
    outcome = OUTCOME_LABELS[trial.outcome]
    if trial.ended_early:
        outcome += ", early"

    latencies = [format.milliseconds(trial.metrics.get(name)) for name in LATENCY_COLUMNS]
    details = (_kind_note(trial), _outcome_reason(trial), _growth_note(trial))
    return (
        str(trial.number + 1),
        f"{trial.load:.4g}",
        outcome,
        format.duration(trial.duration_s),
        *latencies,
        format.quantity(trial.metrics.get("output_tokens_per_s")),
        format.quantity(trial.metrics.get("goodput_rps")),
        "; ".join(filter(None, details)),
    )


def describe_units(unit: str) -> str:
    """Return the units of the columns of the table of trials, as a note below it."""
    return (
        f"Load: {unit.strip()}. Latencies in ms. Goodput in req/s. A trial that stopped early "
        "shows the metrics until then."
    )


def _kind_note(trial: TrialResult) -> str:
    """Return what is special about a trial, for example "2 x length, not sustained", or ""."""
    notes = []
    if trial.is_confirmation:
        notes.append("confirmation")

    if trial.is_sustain_check:
        notes.append(f"{trial.length_factor:g} x length")

    if trial.has_growth:
        notes.append("not sustained")

    if trial.is_sustain_check and trial.has_undecided_growth:
        notes.append("not known to be sustained")

    return ", ".join(notes)


def _growth_note(trial: TrialResult) -> str:
    """Return why a load was not sustained, unless the outcome of its trial states this already."""
    is_stated_by_outcome = trial.reason_code == "not_sustained"
    if not trial.has_growth or is_stated_by_outcome:
        return ""
    return trial.sustained_reason
