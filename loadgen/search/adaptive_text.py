"""An adaptive run as text and as a section of its page: what was sustained, where the limit lies, every step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from loadgen.core import format
from loadgen.present import table
from loadgen.present.additions import Addition
from loadgen.present.page import Axis, Band, Chart, Mark, Page, Series
from loadgen.present.table import wrapped
from loadgen.search import text as words
from loadgen.search.adaptive import AdaptiveStep, StoredAdaptive, exit_code

INDENT = " " * 11
KINDS = {"bracket": "grows", "probe": "narrows", "confirm": "confirms", "sustain": "sustains"}
OUTCOMES = {"under": ("held", "good"), "over": ("missed", "bad"), "invalid": ("not valid", "warn")}
ENDINGS = {
    "": "it was not over",
    "found": "",
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


def steps_table(found: StoredAdaptive) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table of the steps, in their order."""
    head = ("begun", "load", "step", "outcome", "took", "TTFT p50", "p99", "TPOT p50", "p99", "tokens/s", "")
    rows = []
    for step in found.steps:
        trial = step.trial
        figures = trial.figures
        latencies = (figures.get(name) for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"))
        grows = f"; {trial.sustained_why}" if trial.sustained is False else ""
        rows.append(
            (
                f"{step.start_s:,.0f} s",
                f"{trial.ask.load:.4g}",
                KINDS.get(trial.ask.kind, trial.ask.kind),
                OUTCOMES[trial.outcome][0],
                format.duration(step.end_s - step.start_s),
                *map(format.milliseconds, latencies),
                format.quantity(figures.get("output_tokens_per_s")),
                "" if trial.outcome == "under" and not grows else trial.why + grows,
            )
        )
    return head, rows


def render(found: StoredAdaptive) -> str:
    """The report of the steps, ending in a newline."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: StoredAdaptive) -> Iterator[str]:
    kind = "open loop, Poisson" if found.plan.over == "rate" else "closed loop"
    yield from wrapped(f"Adaptive: {sentence(found)}", rest=INDENT)
    yield ""
    if found.steps:
        head, rows = steps_table(found)
        short = [(*row[:-1], "" if not row[-1] else row[-1][:60].partition(";")[0]) for row in rows]
        yield from table.text(head, short, left=0, remarks=True)
        yield f"latencies in ms, of the requests that were due in a step's window; {kind}"
        yield ""
    yield from wrapped(f"Limit      {boundary(found)}", rest=INDENT)
    yield from wrapped(words.covers(found.answer, found.simulated), INDENT, INDENT)
    if found.steps:
        last_s, before = found.steps[-1].end_s, [step for step in found.steps if step.trial.ask.kind != "sustain"]
        finding_s = before[-1].end_s if before else 0.0
        count = len(found.steps)
        yield f"Spent      {format.duration(last_s)} in {count} steps; the limit was known after " + format.duration(
            finding_s
        )
    if ending := ENDINGS.get(found.answer.reason, found.answer.reason):
        yield from wrapped(f"Ended      {ending}", rest=INDENT)


def addition(found: StoredAdaptive) -> Addition:
    """What the steps add to the run that they are of. `adaptive.json` is the document of such a run."""
    return Addition(
        text=f"\n{render(found)}\n",
        section=partial(section, found=found),
        document=format.document(found),
        code=lambda strict: exit_code(found, strict=strict),
    )


def section(sheet: Page, found: StoredAdaptive) -> None:
    """The part of the page of a run that shows its steps."""
    sheet.section("Adaptive load", id="adaptive")
    sheet.say(sentence(found), f"sentence {'good' if found.answer.sustained else 'warn'}")
    sheet.say(f"Limit: {boundary(found)}.", "soft")
    if not found.steps:
        return
    sheet.charts([_chart(found)])
    head, rows = steps_table(found)
    sheet.table((*head[:-1], "why"), rows, "remarks")


def _chart(found: StoredAdaptive) -> Chart:
    """The load over time as a staircase, and each step's outcome where it was judged."""
    answer, unit = found.answer, found.unit.strip()
    times = [at for step in found.steps for at in (step.start_s, step.end_s)]
    loads = [step.trial.ask.load for step in found.steps for _ in range(2)]
    interval = answer.interval
    across = (Band(start=interval.low, end=interval.high, color="good", across=True),) if interval is not None else ()
    return Chart(
        title="Steps over time",
        note="each judged at its end" + ("; shaded: the 95 % interval of the limit" if across else ""),
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
    for outcome, (name, color) in OUTCOMES.items():
        chosen = [step for step in steps if step.trial.outcome == outcome]
        if chosen:
            labels = tuple("sustained" if step.trial.ask.kind == "sustain" else "" for step in chosen)
            yield Series(
                name=name, x=[step.end_s for step in chosen], y=[step.trial.ask.load for step in chosen], color=color,
                width=0, dots=True, labels=labels,
            )  # fmt: skip
