"""A search as text: one line per probe, then the load it found with its interval and its confirmation. Pure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Protocol

from loadgen import format

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.search.load_search import NextTrial, SearchAnswer, TrialResult

WIDTH = 100
KINDS = {"bracket": "looking for a bracket", "probe": "probe", "confirm": "confirmation at full length"}
ENDINGS = {
    "": "not finished",
    "found": "found, and confirmed by a run at full length from empty",
    "none": "no load holds: not even the lowest probe did",
    "highest": "the highest load allowed holds: give a larger --high",
    "unconfirmed": "not confirmed: runs at full length failed where they should pass. Either the server does not come "
    "back to the same state between runs, or what builds up takes longer than a probe: search again, with longer ones "
    "(--duration; of mlperf --min-duration)",
    "probes": "stopped: so many probes were allowed and no more",
    "time": "stopped: the time allowed is used up",
    "invalid": "stopped: a probe was not a valid measurement",
    "gone": "stopped: the endpoint could not be reached any more",
    "interrupted": "interrupted",
}


def asking(ask: NextTrial, unit: str) -> str:
    """The line printed before a probe."""
    return f"probe {ask.number}: {ask.load:.4g}{unit} ({KINDS[ask.kind]})"


def told(result: TrialResult) -> str:
    """The line printed after a probe."""
    ended_early = ", ended early" if result.early else ""
    return f"  {result.outcome}{ended_early} after {format.duration(result.spent_s)}: {result.why}"


class Named(Protocol):
    """The goal of a search, or what is stored of it: the names of its terms."""

    @property
    def names(self) -> tuple[str, ...]: ...


def headline(answer: SearchAnswer, goal: Named, unit: str) -> str:
    """What a search found, in one sentence: the load, its interval, and the load that was confirmed."""
    terms, ended = ", ".join(goal.names), ENDINGS.get(answer.reason, answer.reason)
    if answer.load is None:
        return f"No load is known that holds within the SLO ({terms}). The search ended: {ended}."
    if answer.interval is None:
        load = f"at least {answer.load:.4g}{unit}"
    else:
        load = f"{answer.load:.4g}{unit} (95 % interval {answer.interval.low:.4g} to {answer.interval.high:.4g})"
    confirmed = "" if answer.confirmed is None else f"; a full run held at {answer.confirmed:.4g}{unit}"
    return f"Highest load within the SLO ({terms}), by search: {load}{confirmed}. The search ended: {ended}."


def render(answer: SearchAnswer, results: Sequence[TrialResult], goal: Named, *, unit: str, simulated: bool) -> str:
    """The whole report, ending in a newline."""
    return "\n".join(_lines(answer, results, goal, unit, simulated)) + "\n"


def _lines(
    answer: SearchAnswer, results: Sequence[TrialResult], goal: Named, unit: str, simulated: bool
) -> Iterator[str]:
    mark = "SIMULATED, not a real server: " if simulated else ""
    yield f"{mark}highest load at which {', '.join(goal.names)} hold"
    yield ""
    head = ("load", "outcome", "spent", "TTFT p50", "p99", "TPOT p50", "p99", "tokens/s", "goodput/s", "")
    rows = [
        (
            f"{result.ask.load:.4g}",
            result.outcome + (" (early)" if result.early else ""),
            format.duration(result.spent_s),
            *(format.milliseconds(result.figures.get(name)) for name in _LATENCIES),
            format.quantity(result.figures.get("output_tokens_per_s")),
            format.quantity(result.figures.get("goodput_rps")),
            "confirmation" if result.ask.kind == "confirm" else "",
        )
        for result in sorted(results, key=lambda result: (result.ask.load, result.ask.number))
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    yield "latencies in ms; a probe that ended early shows the part it saw"
    yield ""
    if answer.load is not None and answer.interval is not None:
        low, high = answer.interval.low, answer.interval.high
        yield f"Load       {answer.load:.4g}{unit} (95 % interval {low:.4g} to {high:.4g}): half of all runs pass there"
    elif answer.load is not None:
        yield f"Load       at least {answer.load:.4g}{unit}"
    elif answer.reason == "none":
        yield "Load       none"
    else:
        yield "Load       not known"
    if answer.confirmed is not None:
        yield f"Confirmed  {answer.confirmed:.4g}{unit}: a run at full length from empty met every term"
    spent = answer.spent_s - answer.confirming_s
    confirming = f"{format.duration(answer.confirming_s)} confirming"
    yield f"Spent      {format.duration(spent)} in {answer.probes} probes, {confirming}"
    ended = f"Ended      {ENDINGS.get(answer.reason, answer.reason)}"
    yield from textwrap.wrap(ended, WIDTH, subsequent_indent=" " * 11)
    invalid = next((result for result in results if result.outcome == "invalid"), None)
    if invalid is not None:
        yield f"           probe {invalid.ask.number}: {invalid.why}"


_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
