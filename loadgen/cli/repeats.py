"""The flags of repeated runs (`--repeat`), and the loop over them: r1, r2, ... in one folder, then their summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loadgen.metrics.repeats import RepeatSummary, Repetition
    from loadgen.metrics.summary import Summary

Repeat = Annotated[
    str | None,
    typer.Option(
        "--repeat",
        help="So many runs of the same load, r1, r2, ... in one folder; or auto: until the figures are known well "
        "enough. Only repeats show what another start does.",
    ),
]
RepeatMost = Annotated[int | None, typer.Option("--repeat-most", help="With --repeat auto: at most so many runs (10).")]
RepeatWithin = Annotated[
    str | None,
    typer.Option("--repeat-within", help="With --repeat auto: how well, half an interval as a share of its mean (5%)."),
]
RepeatPause = Annotated[
    str | None, typer.Option("--repeat-pause", help="Time between the end of a run and the next: 10m.")
]


def repetition(repeat: str | None, most: int | None, within: str | None, pause: str | None) -> Repetition:
    """The repetition that these flags ask for. Raises Faults with everything that is wrong with them."""
    from loadgen import units
    from loadgen.errors import Fault, Faults, UserError
    from loadgen.metrics import repeats

    faults: list[Fault] = []
    if repeat is None and (most, within, pause) != (None, None, None):
        given = ", ".join(
            name for name, value in (("most", most), ("within", within), ("pause", pause)) if value is not None
        )
        faults.append(UserError("says how to repeat, and nothing is repeated", f"--repeat-{given}", "--repeat 3"))
    count: int | None = 1
    if repeat == "auto":
        count = None
    elif repeat is not None:
        if not repeat.isdecimal() or not 1 <= int(repeat) <= 100:
            faults.append(UserError("no number of runs", f"--repeat {repeat}", "a number from 1 to 100, or auto"))
        else:
            count = int(repeat)
            if (most, within) != (None, None):
                what = "a fixed number of runs has no end to look for"
                faults.append(UserError(what, f"--repeat {repeat}", "--repeat auto, or without --repeat-most, -within"))
    if most is not None and not repeats.FEWEST <= most <= 100:
        faults.append(UserError("no number of runs", f"--repeat-most {most}", f"from {repeats.FEWEST} to 100"))
    share, pause_ns = repeats.WITHIN, 0
    try:
        share = units.share(within) if within is not None else share
        if share <= 0:
            raise units.Wrong("is reached by no number of runs", "5%")
    except units.Wrong as wrong:
        faults.append(UserError(f"{within} {wrong}", "--repeat-within", wrong.hint))
    try:
        pause_ns = units.duration_ns(pause, "s") if pause is not None else 0
    except units.Wrong as wrong:
        faults.append(UserError(f"{pause} {wrong}", "--repeat-pause", wrong.hint))
    if faults:
        raise Faults(faults)
    return repeats.Repetition(count=count, most=most or repeats.MOST, within=share, pause_ns=pause_ns)


def refuse_used(parent: Path) -> None:
    """Raises UserError for a folder that holds runs: repeats of two commands are not repeats of one."""
    from loadgen.errors import UserError

    if any(parent.glob("*/run.json")) or (parent / "run.json").is_file():
        raise UserError("the folder holds runs", f"--out {parent}", "give a new or empty one for the repeats")


def repeat(
    how: Repetition,
    parent: Path,
    one: Callable[[int, Path], Summary],
    *,
    virtual: bool,
    say: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> list[tuple[str, Summary]]:
    """The runs: `one(number, folder)` for r1, r2, ... of `parent`, until there are enough or one was interrupted."""
    from loadgen.execution.repeats import pause

    named: list[tuple[str, Summary]] = []
    while not how.enough([summary for _, summary in named]):
        name = f"r{len(named) + 1}"
        if named and not pause(how, name, virtual=virtual, say=say, wait=wait):
            break
        say(f"run {name} of {how.words}")
        named.append((name, one(len(named) + 1, parent / name)))
        if named[-1][1].run.state == "interrupted":
            break
    return named


def finish(parent: Path, how: Repetition, named: Sequence[tuple[str, Summary]]) -> RepeatSummary:
    """Store the summary over the repeats in their folder."""
    import msgspec

    from loadgen.metrics import repeats
    from loadgen.results import store

    made = repeats.summarize_repeats(named, within=how.within if how.count is None else None)
    store.replace(parent / repeats.FILE, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    return made
