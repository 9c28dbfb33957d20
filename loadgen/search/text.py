"""A search in words: a line for each trial, the load it found, its interval and its confirmation. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.core import format
from loadgen.core.limits import MODEL_ERROR
from loadgen.core.stats.intervals import length_for
from loadgen.render.section import Facts, Section, Table, section
from loadgen.repeated import capacity as capacity_file
from loadgen.search.forecast import describe_forecast, forecast_search
from loadgen.search.load_search import (
    ENOUGH,
    LEVEL,
    LoadSearch,
    NextTrial,
    SearchAnswer,
    TrialResult,
    capacity_of,
)

KINDS = {
    "bracket": "looking for a bracket",
    "probe": "trial",
    "confirm": "confirmation at full length",
    "sustain": "is it sustained?",
}
QUERIES = " queries/s"  # what loads by MLPerf's rules are
ENDINGS = {
    "": "not finished",
    "found": "found, and confirmed by a run at full length from empty",
    "coarse": "found, and confirmed by a run at full length from empty; its interval is wider than the precision asked "
    f"for after {ENOUGH} trials",
    "none": "no load holds: not even the lowest trial did",
    "highest": "the highest load allowed holds: give a larger --high",
    "unconfirmed": "not confirmed: runs at full length failed where they should pass. Either the server does not come "
    "back to the same state between runs, or what builds up takes longer than a trial: search again, with longer ones "
    "(--duration; of mlperf --min-duration)",
    "undecided": "not confirmed: loads met the SLO, and no trial could show whether the server sustains them",
    "probes": "stopped: so many trials were allowed and no more",
    "time": "stopped: the time allowed is used up",
    "invalid": "stopped: two trials in a row were not valid measurements",
    "refused": "stopped: the endpoint refused requests for a quota or a rate limit",
    "gone": "stopped: the endpoint could not be reached any more",
    "nodes": "stopped: no node of the cluster was left to send the load",
    "interrupted": "interrupted",
}


def expected(search: LoadSearch, trial_s: float, *, virtual: bool, whole: bool = False) -> str:
    """Return what a search will take, as text; "" if nothing is left of it.

    `trial_s` is the full length of a trial. With `whole`, every trial runs to its end.
    """
    forecast = forecast_search(search, trial_s, whole=whole)
    return "" if forecast is None else describe_forecast(forecast, virtual=virtual)


def asking(ask: NextTrial, unit: str) -> str:
    """The line printed before a trial."""
    times = f", {ask.lengths:g} times the length" if ask.lengths > 1 else ""
    return f"trial {ask.number}: {ask.load:.4g}{unit} ({KINDS[ask.kind]}{times})"


def told(result: TrialResult) -> str:
    """The line printed after a trial."""
    ended_early = ", ended early" if result.early else ""
    why = "; ".join(filter(None, (result.why, _grows(result))))
    return (
        f"{OUTCOMES[result.outcome][0]}{ended_early} after {format.duration(result.spent_s)}: {why}"
    )


def too_short(result: TrialResult, trial_s: float) -> str:
    """What to say after a trial whose answers took longer than its load, of `trial_s` each; "" where they did not."""
    load_s = trial_s * result.ask.lengths
    if result.early or result.outcome == "invalid" or result.spent_s < 2 * load_s:
        return ""
    return (
        f"the last answers came {format.duration(result.spent_s - load_s)} after a load of {format.duration(load_s)}: "
        f"what so short a load confirms, a longer one may not bear. Begin again with a longer --duration"
    )


def ending(answer: SearchAnswer) -> str:
    """Return why a search ended and, where its trials were too short, how long they have to be."""
    text = ENDINGS.get(answer.reason, answer.reason)
    if answer.reason != "undecided" or answer.needed_s is None:
        return text
    needed_s = math.ceil(answer.needed_s / 10) * 10
    return f"{text}. Search again with trials of {format.duration(needed_s)}: -d {needed_s}s"


def headline(
    answer: SearchAnswer, results: Sequence[TrialResult], names: Sequence[str], unit: str
) -> str:
    """What a search found, in one sentence: the load that answers it, and how far that was shown.

    `names`: of the terms of its goal.
    """
    terms, ended = ", ".join(names), ending(answer)
    load, state = capacity_of(answer, results)
    if load is None:
        return f"No load is known that holds within the SLO ({terms}). The search ended: {ended}."
    said = capacity(answer, results, unit)
    unknown = (
        f" Whether it is sustained is not known: {answer.sustained_why}."
        if state == "confirmed"
        else ""
    )
    if unknown and answer.lengths > 1:
        unknown += (
            f" Longer trials show it: {'--min-duration' if unit == QUERIES else '--duration'}."
        )
    return f"Highest load within the SLO ({terms}), by search: {said}.{unknown} The search ended: {ended}."


def capacity(answer: SearchAnswer, results: Sequence[TrialResult], unit: str) -> str:
    """The one load that answers the search, with what was shown of it: `29.82/s, sustained`."""
    load, state = capacity_of(answer, results)
    if load is None:
        return "none" if state == "none" else "not known"
    if state == "stopped":
        return f"not known; at least {load:.4g}{unit} held so far"
    if answer.only_allowed:
        return f"at least {load:.4g}{unit}"
    return f"{load:.4g}{unit}, {state}{capacity_file.describe_sustained_period(state, answer.steady_s)}"


def found(
    answer: SearchAnswer, results: Sequence[TrialResult], unit: str, *, simulated: bool
) -> Section:
    """The capacity and the way to it: what was confirmed, where half of all runs pass, what it took, how it ended."""
    rows = [("Capacity", capacity(answer, results, unit))]
    for line in confirmation(answer, results, unit):
        name, _, words = line.partition(": ")
        rows.append((name, words))
    if answer.load is not None and answer.interval is not None:
        low, high = answer.interval.low, answer.interval.high
        half = f"{answer.load:.4g}{unit} (95 % interval {low:.4g} to {high:.4g}): half of all runs pass there"
        rows += [("Half pass", half), ("Interval", covers(answer, simulated))]
    confirming = f"{format.duration(answer.confirming_s)} of it confirming"
    spent = f"{format.duration(answer.spent_s)} in {format.counted(answer.probes, 'trial')}, {confirming}"
    rows += [("Spent", spent), ("Ended", ending(answer))]
    for invalid in [result for result in results if result.outcome == "invalid"][-2:]:
        rows.append(("Not valid", f"trial {invalid.ask.number}: {invalid.why}"))
    return section("How the answer was confirmed", Facts(rows), id="confirmed")


OUTCOMES = {"under": ("held", "good"), "over": ("missed", "bad"), "invalid": ("not valid", "warn")}


def units(unit: str) -> str:
    """What the columns of the trials are in: the load may count what is not requests."""
    load = "" if unit == "/s" else f"Load: {unit.strip()}. "
    return f"{load}Latencies in ms; a trial that ended early shows the part it saw."


_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")


def trial_table(results: Sequence[TrialResult]) -> Table:
    """A row for each trial; the last column says what was special about it, and why it came out so."""
    head = (
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
    rows = [
        (
            f"{result.ask.load:.4g}",
            OUTCOMES[result.outcome][0] + (", early" if result.early else ""),
            format.duration(result.spent_s),
            *(format.milliseconds(result.figures.get(name)) for name in _LATENCIES),
            format.quantity(result.figures.get("output_tokens_per_s")),
            format.quantity(result.figures.get("goodput_rps")),
            "; ".join(filter(None, (_mark(result), result.why, _grows(result)))),
        )
        for result in results
    ]
    return Table(head, rows, "remarks", left=0)


def _grows(result: TrialResult) -> str:
    """Return why a load was not sustained, where the outcome of its trial does not say so itself."""
    is_said = result.sustained is not False or result.code == "not_sustained"
    return "" if is_said else result.sustained_why


ORDERS = "1.9 %"  # of the peak, between other official seeds of arrivals and sample orders (v5.1, v6.0, v6.1)


def covers(answer: SearchAnswer, simulated: bool) -> str:
    """What the interval of a search covers, and what it does not, the largest first."""
    if simulated:
        return (
            f"the model is wrong by {format.shares(MODEL_ERROR)} (docs/simulation.md); other sample orders and seeds "
            f"change it by up to {ORDERS}; this interval covers the search's own noise, and neither of these"
        )
    told = answer.run_spread_from != "learned"
    origin = "as told" if told else "learned from these runs: --run-spread tells it"
    spread = f"a variation from run to run of {answer.run_spread or 0.0:.1%} ({origin})"
    within = (
        ""
        if answer.horizon_s is None
        else f", for {capacity_file.describe_horizon(answer.horizon_s)}"
    )
    if answer.horizon_s is not None and answer.horizon_s < capacity_file.HORIZON_S:
        enough_s = length_for(capacity_file.HORIZON_S, LEVEL)
        within += f" (trials of {format.duration(60 * math.ceil(enough_s / 60))} look for all of them: -d)"
    return (
        f"the interval covers the search's own noise and {spread}{within}; it is not of another day or another start "
        "of the server"
    )


def _mark(result: TrialResult) -> str:
    kinds = {"confirm": "confirmation", "sustain": f"{result.ask.lengths:g} x length"}
    return ", ".join(
        filter(None, (kinds.get(result.ask.kind, ""), "grows" if result.sustained is False else ""))
    )


USED = "this is the load that loadgen cost and loadgen size use, with the steady tokens of that run"


def confirmation(answer: SearchAnswer, results: Sequence[TrialResult], unit: str) -> list[str]:
    """Which load a run at full length confirmed, which is steady, and which of them is the capacity."""
    confirmed: list[str] = []
    longer = (
        answer.steady is not None and answer.lengths > 1
    )  # the capacity is of such a run (`experiment.highest`)
    if answer.confirmed is not None:
        used = "" if longer else f"; {USED}"
        said = f"{answer.confirmed:.4g}{unit}, a run at full length from empty met every term"
        confirmed = [f"{confirmed_name(answer, results)}: {said}{used}"]
    if longer:
        upper = (
            f", and not at {answer.not_steady:.4g}{unit}" if answer.not_steady is not None else ""
        )
        text = f"{answer.steady:.4g}{unit}, every term held over {answer.lengths:g} times the length{upper}; {USED}"
    elif answer.steady is not None:
        text = f"{answer.steady:.4g}{unit}, nothing was seen to grow there, in a trial of the ordinary length"
    elif answer.not_steady is not None:
        text = f"none found; at {answer.not_steady:.4g}{unit} it is not steady"
    elif answer.confirmed is None:
        return confirmed
    else:
        text = "not known"
    if answer.sustained_why and answer.steady is not None and not answer.rules_only:
        text += f"; {answer.sustained_why}"
    return [
        f"Steady: {text}{f'; {rules_only(answer, results)}' if answer.rules_only else ''}",
        *confirmed,
    ]


def confirmed_name(answer: SearchAnswer, results: Sequence[TrialResult]) -> str:
    """The name of the load that a run at full length confirmed: one that is not the capacity was not seen to last."""
    return "Confirmed" if answer.confirmed == capacity_of(answer, results)[0] else "Held once"


def rules_only(answer: SearchAnswer, results: Sequence[TrialResult]) -> str:
    """Why a confirmed load stands by the rules only, and what would show more."""
    why = f"rules only: {answer.sustained_why}"
    if answer.lengths > 1:
        return why
    longest_s = max(
        (result.spent_s for result in results if result.ask.kind == "confirm"), default=0.0
    )
    return f"{why}; --sustain --resume with this folder confirms it, in about {format.duration(2 * longest_s)} a try"
