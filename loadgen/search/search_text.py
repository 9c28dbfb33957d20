"""The result of a search as text: its trials, the capacity, the interval and the confirmation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.core import format
from loadgen.core.limits import MODEL_ERROR
from loadgen.core.metrics.sustainable import CONFIRMATION_FACTOR
from loadgen.core.stats.intervals import length_to_meet_s
from loadgen.render.section import Facts, Section, Table, section
from loadgen.repeated import capacity
from loadgen.search.search_results import (
    PlannedTrial,
    SearchResult,
    TrialResult,
    capacity_and_state,
)
from loadgen.search.search_settings import ENOUGH_TRIALS, INTERVAL_CONFIDENCE

SECONDS_PER_MINUTE = 60
QUERIES_UNIT = " queries/s"
"""The unit of loads by MLPerf's rules."""

KIND_LABELS = {
    "bracket": "looking for a bracket",
    "probe": "trial",
    "confirm": "confirmation at full length",
    "sustain": "is it sustained?",
}
FROM_EMPTY = "from empty"
AFTER_WARMUP = "after a warm-up"
STOP_LABELS = {
    "": "not finished",
    "found": "found, and confirmed by a run at full length {start}",
    "coarse": "found, and confirmed by a run at full length {start}; its interval is wider than "
    f"the precision asked for after {ENOUGH_TRIALS} trials",
    "none": "no load holds: not even the lowest trial did",
    "highest": "the highest load allowed holds: give a larger --high",
    "unconfirmed": "not confirmed: runs at full length failed where they should pass. Either the "
    "server does not come back to the same state between runs, or what builds up takes longer than "
    "a trial: search again, with longer ones (--duration; of mlperf --min-duration)",
    "undecided": "not confirmed: loads met the SLO, and no trial could show whether the server "
    "sustains them",
    "probes": "stopped: so many trials were allowed and no more",
    "time": "stopped: the time allowed is used up",
    "invalid": "stopped: two trials in a row were not valid measurements",
    "refused": "stopped: the endpoint refused requests for a quota or a rate limit",
    "gone": "stopped: the endpoint could not be reached any more",
    "nodes": "stopped: no node of the cluster was left to send the load",
    "interrupted": "interrupted",
}
OUTCOME_LABELS = {"under": "held", "over": "missed", "invalid": "not valid"}
LATENCY_COLUMNS = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
TRIAL_TABLE_HEADER = (
    "load",
    "outcome",
    "spent",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "p99",
    "tokens/s",
    "good requests/s",
    "why",
)
MLPERF_SEED_VARIATION = "1.9 %"
"""How much the capacity differs between MLPerf's official seeds (v5.1, v6.0 and v6.1).

The seeds determine the arrivals and the order of the samples.
"""
USED_BY_COST = (
    "this is the load that loadgen cost and loadgen size use, with the steady tokens of that run"
)
MAX_INVALID_SHOWN = 2
"""The number of invalid trials that the report names: the last ones, which ended the search."""
PROPOSED_LENGTH_STEP_S = 10
"""A proposed length of a trial is rounded up to a multiple of this."""
LATE_RESPONSES_FACTOR = 2
"""The last responses came late if a trial took so many times as long as its load."""


# Progress: one line before and one after each trial


def describe_planned_trial(trial: PlannedTrial, unit: str) -> str:
    """Return the line that is printed before a trial, for example "trial 3: 12.5/s (trial)"."""
    length = f", {trial.length_factor:g} times the length" if trial.length_factor > 1 else ""
    return f"trial {trial.number}: {trial.load:.4g}{unit} ({KIND_LABELS[trial.kind]}{length})"


def describe_trial_result(result: TrialResult) -> str:
    """Return the line that is printed after a trial."""
    ended_early = ", ended early" if result.ended_early else ""
    reasons = "; ".join(filter(None, (result.reason, _growth_note(result))))
    duration = format.duration(result.duration_s)
    return f"{OUTCOME_LABELS[result.outcome]}{ended_early} after {duration}: {reasons}"


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
        f"the last answers came {late_by} after a load of {format.duration(load_s)}: "
        "what so short a load confirms, a longer one may not bear. Begin again with a "
        "longer --duration"
    )


# The result


def describe_stop(result: SearchResult) -> str:
    """Return why a search ended and, if its trials were too short, how long they have to be."""
    label = STOP_LABELS.get(result.stop_reason, result.stop_reason)
    text = label.format(start=_start_label(result))
    if result.stop_reason != "undecided" or result.needed_load_s is None:
        return text
    step_count = math.ceil(result.needed_load_s / PROPOSED_LENGTH_STEP_S)
    needed_s = step_count * PROPOSED_LENGTH_STEP_S
    return f"{text}. Search again with trials of {format.duration(needed_s)}: -d {needed_s}s"


def describe_capacity(result: SearchResult, trials: Sequence[TrialResult], unit: str) -> str:
    """Return the capacity and how far it was shown, for example "29.82/s, sustained"."""
    load, state = capacity_and_state(result, trials)
    if load is None:
        return "none" if state == "none" else "not known"
    if state == "stopped":
        return f"not known; at least {load:.4g}{unit} held so far"
    if result.is_lower_bound:
        return f"at least {load:.4g}{unit}"
    period = capacity.describe_sustained_period(state, result.sustained_for_s)
    return f"{load:.4g}{unit}, {state}{period}"


def headline(
    result: SearchResult, trials: Sequence[TrialResult], term_names: Sequence[str], unit: str
) -> str:
    """Return the result of a search in one to four sentences.

    They state the capacity, whether it is sustained if that is not known, and why the search ended.
    `term_names` are the names of the objectives, for example "ttft p99".
    """
    terms = ", ".join(term_names)
    ending = f"The search ended: {describe_stop(result)}."
    load, state = capacity_and_state(result, trials)
    if load is None:
        return f"No load is known that holds within the SLO ({terms}). {ending}"
    capacity_text = describe_capacity(result, trials, unit)
    open_question = _describe_unknown_sustainability(result, unit) if state == "confirmed" else ""
    return (
        f"Highest load within the SLO ({terms}), by search: {capacity_text}.{open_question} "
        f"{ending}"
    )


def _describe_unknown_sustainability(result: SearchResult, unit: str) -> str:
    """Return why it is not known whether a confirmed load is sustained, and what would show it.

    The text begins with a space, so that it can follow another sentence.
    """
    text = f" Whether it is sustained is not known: {result.sustained_reason}."
    if result.length_factor <= 1:
        return text
    option = "--min-duration" if unit == QUERIES_UNIT else "--duration"
    return f"{text} Longer trials show it: {option}."


def confirmation_section(
    result: SearchResult, trials: Sequence[TrialResult], unit: str, *, simulated: bool
) -> Section:
    """Return the section with the capacity, what was confirmed, the interval and the effort.

    `simulated` says that a performance model responded, whose error is then the largest.
    """
    rows = [
        ("Capacity", describe_capacity(result, trials, unit)),
        *confirmation_rows(result, trials, unit),
        *_interval_rows(result, unit, simulated=simulated),
        ("Spent", _describe_effort(result)),
        ("Ended", describe_stop(result)),
        *_invalid_trial_rows(trials),
    ]
    return section("How the answer was confirmed", Facts(rows), id="confirmed")


def _interval_rows(result: SearchResult, unit: str, *, simulated: bool) -> list[tuple[str, str]]:
    """Return the rows of the interval and of what it covers, if there is one."""
    if result.load is None or result.interval is None:
        return []
    bounds = f"{result.interval.low:.4g} to {result.interval.high:.4g}"
    half_pass = f"{result.load:.4g}{unit} (95 % interval {bounds}): half of all runs pass there"
    return [
        ("Half pass", half_pass),
        ("Interval", describe_interval_coverage(result, simulated=simulated)),
    ]


def _describe_effort(result: SearchResult) -> str:
    """Return how long the trials took, and how much of that time the confirmations took."""
    return (
        f"{format.duration(result.duration_s)} in {format.counted(result.trial_count, 'trial')}, "
        f"{format.duration(result.confirmation_s)} of it confirming"
    )


def _invalid_trial_rows(trials: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Return a row for each of the last invalid trials, with the reason why it is not valid."""
    invalid = [trial for trial in trials if not trial.is_valid]
    return [
        ("Not valid", f"trial {trial.number}: {trial.reason}")
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
            f"the model is wrong by {format.shares(MODEL_ERROR)} (docs/evidence/simulation.md); other "
            f"sample orders and seeds change it by up to {MLPERF_SEED_VARIATION}; this interval "
            "covers the search's own noise, and neither of these"
        )
    is_learned = result.run_spread_source == "learned"
    origin = "learned from these runs: --run-spread tells it" if is_learned else "as told"
    spread = f"a variation from run to run of {result.run_spread or 0.0:.1%} ({origin})"
    return (
        f"the interval covers the search's own noise and {spread}{_describe_horizon(result)}; "
        "it is not of another day or another start of the server"
    )


def _describe_horizon(result: SearchResult) -> str:
    """Return within which time changes recur that the interval covers, or "" if it covers none.

    If that recurrence horizon is shorter than usual, the text states how long trials have to be for
    the usual one, in whole minutes.
    """
    if result.horizon_s is None:
        return ""
    covered_changes = f", for {capacity.describe_horizon(result.horizon_s)}"
    if result.horizon_s >= capacity.HORIZON_S:
        return covered_changes
    needed_s = length_to_meet_s(capacity.HORIZON_S, INTERVAL_CONFIDENCE)
    needed_minutes = math.ceil(needed_s / SECONDS_PER_MINUTE)
    needed_length = format.duration(SECONDS_PER_MINUTE * needed_minutes)
    return f"{covered_changes} (trials of {needed_length} look for all of them: -d)"


def confirmation_rows(
    result: SearchResult, trials: Sequence[TrialResult], unit: str
) -> list[tuple[str, str]]:
    """Return the row of the highest sustained load, and that of the confirmed load.

    A row is left out if there is nothing to say. The sustained load comes first, because it is the
    capacity if a longer trial showed it.
    """
    rows = []
    sustained_load = _describe_steady_load(result, unit)
    if sustained_load is not None:
        rows.append(("Steady", sustained_load + _describe_evidence_of_steadiness(result, trials)))
    if result.confirmed_load is not None:
        label = confirmed_load_label(result, trials)
        rows.append((label, _describe_confirmed_load(result, result.confirmed_load, unit)))
    return rows


def _describe_confirmed_load(result: SearchResult, confirmed_load: float, unit: str) -> str:
    """Return the confirmed load as text, and that it is the capacity if no longer trial is."""
    has_longer_trial = result.sustained_load is not None and result.length_factor > 1
    use = "" if has_longer_trial else f"; {USED_BY_COST}"
    return (
        f"{confirmed_load:.4g}{unit}, a run at full length {_start_label(result)} met "
        f"every term{use}"
    )


def _describe_evidence_of_steadiness(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return why the sustained load is known, or is not, to stand behind the load, or ""."""
    if result.is_by_rules_only:
        return f"; {describe_rules_only(result, trials)}"
    has_reason = bool(result.sustained_reason) and result.sustained_load is not None
    return f"; {result.sustained_reason}" if has_reason else ""


def _describe_steady_load(result: SearchResult, unit: str) -> str | None:
    """Return the highest sustained load as text, or None if no load was confirmed at all.

    The text states whether a longer trial or only an ordinary one showed it.
    """
    unsustained = result.unsustained_load
    if result.sustained_load is not None and result.length_factor > 1:
        limit = "" if unsustained is None else f", and not at {unsustained:.4g}{unit}"
        return (
            f"{result.sustained_load:.4g}{unit}, every term held over {result.length_factor:g} "
            f"times the length{limit}; {USED_BY_COST}"
        )
    if result.sustained_load is not None:
        return (
            f"{result.sustained_load:.4g}{unit}, nothing was seen to grow there, in a trial of the "
            "ordinary length"
        )
    if unsustained is not None:
        return f"none found; at {unsustained:.4g}{unit} it is not steady"
    return None if result.confirmed_load is None else "not known"


def confirmed_load_label(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return the label of the confirmed load.

    It is "Confirmed" if the load is the capacity, else "Held once": it was not seen to last.
    """
    capacity_load, _ = capacity_and_state(result, trials)
    return "Confirmed" if result.confirmed_load == capacity_load else "Held once"


def describe_rules_only(result: SearchResult, trials: Sequence[TrialResult]) -> str:
    """Return why a load is confirmed by the rules only, and what would show more.

    The rules are those of MLPerf, or the SLO: they do not ask whether the load is sustained. The
    longer trials of `--sustain` would show it, and take twice as long as a confirmation.
    """
    reason = f"rules only: {result.sustained_reason}"
    if result.length_factor > 1:
        return reason
    confirmations_s = [trial.duration_s for trial in trials if trial.kind == "confirm"]
    longer_trial_s = CONFIRMATION_FACTOR * max(confirmations_s, default=0.0)
    needed_time = format.duration(longer_trial_s)
    return (
        f"{reason}; --sustain --resume with this folder confirms it, in about {needed_time} a try"
    )


def _start_label(result: SearchResult) -> str:
    """Return how the trials started."""
    return AFTER_WARMUP if result.warmup_s else FROM_EMPTY


# The table of trials


def trial_table(trials: Sequence[TrialResult]) -> Table:
    """Return a table with a row for each trial. The last column explains its outcome."""
    return Table(
        TRIAL_TABLE_HEADER, [_trial_row(trial) for trial in trials], "remarks", label_columns=0
    )


def _trial_row(trial: TrialResult) -> tuple[str, ...]:
    """Return the row of a trial in the table of trials, with the cells of TRIAL_TABLE_HEADER."""
    outcome = OUTCOME_LABELS[trial.outcome]
    if trial.ended_early:
        outcome += ", early"
    latencies = [format.milliseconds(trial.metrics.get(name)) for name in LATENCY_COLUMNS]
    return (
        f"{trial.load:.4g}",
        outcome,
        format.duration(trial.duration_s),
        *latencies,
        format.quantity(trial.metrics.get("output_tokens_per_s")),
        format.quantity(trial.metrics.get("goodput_rps")),
        "; ".join(filter(None, (_kind_note(trial), trial.reason, _growth_note(trial)))),
    )


def describe_units(unit: str) -> str:
    """Return what the columns of the table of trials are in. The loads may not count requests."""
    load = "" if unit == "/s" else f"Load: {unit.strip()}. "
    return f"{load}Latencies in ms; a trial that ended early shows the part it saw."


def _kind_note(trial: TrialResult) -> str:
    """Return what is special about a trial, for example "2 x length, grows", or ""."""
    notes = []
    if trial.kind == "confirm":
        notes.append("confirmation")
    if trial.kind == "sustain":
        notes.append(f"{trial.length_factor:g} x length")
    if trial.sustained is False:
        notes.append("grows")
    return ", ".join(notes)


def _growth_note(trial: TrialResult) -> str:
    """Return why a load was not sustained, unless the outcome of its trial states this already."""
    is_stated = trial.sustained is not False or trial.reason_code == "not_sustained"
    return "" if is_stated else trial.sustained_reason
