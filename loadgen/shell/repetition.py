"""The flags of repeated runs: `--repeat` and its companions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from loadgen.core import units
from loadgen.core.errors import Fault, Faults, UserError, collecting
from loadgen.core.execution.options import typed

if TYPE_CHECKING:
    from loadgen.core.metrics.repeats import Repetition


def repetition(repeat: str | None, most: int | None, within: str | None, pause: str | None) -> Repetition | None:
    """The repetition that these flags ask for; None without any. Raises Faults with everything that is wrong."""
    from loadgen.core.metrics import repeats

    companions = {"most": most, "within": within, "pause": pause}
    given = ", ".join(name for name, value in companions.items() if value is not None)
    if repeat is None:
        if given:
            what = "says how to repeat, and nothing is repeated"
            raise Faults([UserError("no_effect", what, f"--repeat-{given}", "--repeat 3")])
        return None
    faults: list[Fault] = []
    count = None
    if repeat != "auto":
        count = int(repeat) if repeat.isdecimal() else 0
        if not 1 <= count <= 100:
            faults.append(
                UserError("invalid_value", "no number of runs", f"--repeat {repeat}", "a number from 1 to 100, or auto")
            )
        elif (most, within) != (None, None):
            what = "a fixed number of runs has no end to look for"
            faults.append(
                UserError("no_effect", what, f"--repeat {repeat}", "--repeat auto, or without --repeat-most, -within")
            )
    if most is not None and not repeats.FEWEST <= most <= 100:
        faults.append(
            UserError("out_of_range", "no number of runs", f"--repeat-most {most}", f"from {repeats.FEWEST} to 100")
        )
    with collecting(faults):
        share = typed("--repeat-within", within, units.share)
        if share is not None and share <= 0:
            raise UserError("out_of_range", "reached by no number of runs", f"--repeat-within {within}", "5%")
    with collecting(faults):
        pause_ns = typed("--repeat-pause", pause, partial(units.duration_ns, bare="s")) or 0
    if faults:
        raise Faults(faults)
    return repeats.Repetition(count=count, most=most or repeats.MOST, within=share or repeats.WITHIN, pause_ns=pause_ns)
