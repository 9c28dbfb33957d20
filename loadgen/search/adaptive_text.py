"""What an adaptive run adds to the report of its run: what was sustained, where the limit lies, every step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.core import format
from loadgen.core.errors import OK, SLO_MISSED
from loadgen.present.additions import Addition
from loadgen.present.junit import Case, Outcome
from loadgen.present.page import Axis, Band, Chart, Mark, Series
from loadgen.present.section import Charts, Facts, Quoted, Said, Section, Table, section
from loadgen.search import text as words
from loadgen.search.adaptive import AdaptiveStep, StoredAdaptive, exit_code

KINDS = {"bracket": "grows", "probe": "narrows", "confirm": "confirms", "sustain": "sustains"}
ENDINGS = {
    "": "it was not over",
    "found": "",
    "coarse": "after so many steps the limit was still not known as precisely as asked for",
    "none": "no load held: not even a sixteenth of the first one",
    "highest": "the highest load allowed held: give a larger --high",
    "unconfirmed": "steps failed at loads that should have held: the limit moves, or what builds up takes longer than "
    "a step; give a longer --window",
    "probes": "so many steps were not enough to know the limit well: give a longer --window",
    "time": "the time allowed was used up (--max-time)",
    "invalid": "a step was not a valid measurement",
    "stopped": "a rule of --stop-when was broken",
    "interrupted": "interrupted",
}


def sentence(found: StoredAdaptive) -> str:
    """What was sustained, or why nothing was."""
    answer, unit = found.answer, found.unit
    upper = "" if answer.not_steady is None else f"; {answer.not_steady:.4g}{unit} was not"
    if answer.steady is None:
        known = f" (not at {answer.not_steady:.4g}{unit})" if answer.not_steady is not None else ""
        why = ENDINGS.get(answer.reason, answer.reason) or answer.sustained_why
        return f"No load was shown to be sustained{known}: {why}."
    length = format.duration(found.sustained_s or 0.0)
    if answer.sustained is None:
        return (
            f"INCONCLUSIVE: every term held at {answer.steady:.4g}{unit} for {length}{upper}; whether it can go on is "
            f"not known: {answer.sustained_why.partition('; ')[2]}."
        )
    return f"{answer.steady:.4g}{unit} was sustained for {length}: every term held, and nothing grew{upper}."


def case(found: StoredAdaptive, group: str, *, strict: bool) -> Case:
    """The test case of a build: whether a load was sustained. Not known: neither passed nor failed."""
    outcomes: dict[int, Outcome] = {
        OK: "passed" if found.answer.sustained else "skipped",
        SLO_MISSED: "failed",
    }
    outcome = outcomes.get(exit_code(found, strict=strict), "error")
    return Case(name="a load is sustained", group=group, outcome=outcome, text=sentence(found))


def boundary(found: StoredAdaptive) -> str:
    """Where the limit lies by the steps, with its interval."""
    answer, unit = found.answer, found.unit
    if answer.interval is None:
        return "not known" if answer.load is None else f"at least {answer.load:.4g}{unit}"
    low, high = answer.interval.low, answer.interval.high
    return (
        f"{answer.load:.4g}{unit} (95 % interval {low:.4g} to {high:.4g}): half of all steps hold there. A step is "
        f"judged over {format.duration(found.plan.window_s)} or more, so what builds up more slowly is seen while the "
        "load is sustained only"
    )


def steps_table(found: StoredAdaptive) -> Table:
    """A row for each step, in their order."""
    head = (
        "begun",
        "load",
        "step",
        "outcome",
        "took",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "tokens/s",
        "why",
    )
    rows = []
    for step in found.steps:
        trial = step.trial
        figures = trial.figures
        latencies = (
            figures.get(name)
            for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
        )
        grows = f"; {trial.sustained_why}" if trial.sustained is False else ""
        rows.append(
            (
                f"{step.start_s:,.0f} s",
                f"{trial.ask.load:.4g}",
                KINDS.get(trial.ask.kind, trial.ask.kind),
                words.OUTCOMES[trial.outcome][0],
                format.duration(step.end_s - step.start_s),
                *map(format.milliseconds, latencies),
                format.quantity(figures.get("output_tokens_per_s")),
                "" if trial.outcome == "under" and not grows else trial.why + grows,
            )
        )
    return Table(head, rows, "remarks", left=0)


def addition(found: StoredAdaptive, again: str = "") -> Addition:
    """What the steps add to the run that they are of. `adaptive.json` is the document of such a run.

    `again`: the command that begins a search that was stopped again.
    """
    begin = (section("Begin again with", Quoted(again)),) if again else ()
    return Addition(
        sentence=sentence(found),
        good=bool(found.answer.sustained),
        sections=(steps_section(found), *begin),
        document=format.document(found),
        code=lambda strict: exit_code(found, strict=strict),
    )


def steps_section(found: StoredAdaptive) -> Section:
    """What was sustained, every step, where the limit lies and how it was found."""
    kind = "open loop, Poisson" if found.plan.over == "rate" else "closed loop"
    rows = [("Limit", boundary(found)), ("Interval", words.covers(found.answer, found.simulated))]
    if found.steps:
        before = [step for step in found.steps if step.trial.ask.kind != "sustain"]
        finding = format.duration(before[-1].end_s if before else 0.0)
        took = f"{format.duration(found.steps[-1].end_s)} in {len(found.steps)} steps"
        rows.append(("Spent", f"{took}; the limit was known after {finding}"))
    rows.append(("Ended", ENDINGS.get(found.answer.reason, found.answer.reason)))
    legend = f"Latencies in ms, of the requests that were due in a step's window; {kind}."
    return section(
        "Adaptive load",
        Charts([_chart(found)] if found.steps else []),
        steps_table(found),
        Said(legend if found.steps else "", "soft"),
        Facts(rows),
        id="adaptive",
    )


def _chart(found: StoredAdaptive) -> Chart:
    """The load over time as a staircase, and each step's outcome where it was judged."""
    answer, unit = found.answer, found.unit.strip()
    times = [at for step in found.steps for at in (step.start_s, step.end_s)]
    loads = [step.trial.ask.load for step in found.steps for _ in range(2)]
    interval = answer.interval
    across = (
        (Band(start=interval.low, end=interval.high, color="good", across=True),)
        if interval is not None
        else ()
    )
    return Chart(
        title="Steps over time",
        note="each judged at its end"
        + ("; shaded: the 95 % interval of the limit" if across else ""),
        x=Axis(label="time", format="time", min=0),
        y=Axis(label=f"load, {unit}, log", log=max(loads) > 3 * min(loads)),
        series=(Series(x=times, y=loads, color="c6", width=1), *_dots(found.steps)),
        bands=across,
        marks=()
        if answer.steady is None
        else (Mark(y=answer.steady, label=f"{answer.steady:.4g}{found.unit}", color="good"),),
        wide=True,
    )


def _dots(steps: Sequence[AdaptiveStep]) -> Iterator[Series]:
    for outcome, (name, color) in words.OUTCOMES.items():
        chosen = [step for step in steps if step.trial.outcome == outcome]
        if chosen:
            labels = tuple(
                "sustained" if step.trial.ask.kind == "sustain" else "" for step in chosen
            )
            yield Series(
                name=name,
                x=[step.end_s for step in chosen],
                y=[step.trial.ask.load for step in chosen],
                color=color,
                width=0,
                dots=True,
                labels=labels,
            )
