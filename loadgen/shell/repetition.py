"""What `--repeat` asks for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from loadgen.core import units
from loadgen.core.errors import Fault, Faults, UserError, collecting
from loadgen.shell.run_options import typed

if TYPE_CHECKING:
    from loadgen.repeated.repeats import Repetition


def repetition(text: str | None) -> Repetition | None:
    """The repetition that `--repeat` asks for (`3`, `3,pause=10m`, `auto,most=10,within=5%`); None without it.

    Raises Faults with everything that is wrong.
    """
    from loadgen.repeated import repeats

    if text is None:
        return None
    where = f"--repeat {text}"
    number, *parts = (part.strip() for part in text.split(","))
    asked = dict(part.partition("=")[::2] for part in parts)
    faults: list[Fault] = [
        UserError(
            "unknown_name",
            f'"{name}" says nothing of repeats',
            where,
            "known: pause=10m, most=10, within=5%",
        )
        for name in asked
        if name not in ("most", "within", "pause")
    ]
    count = None
    if number != "auto":
        count = int(number) if number.isdecimal() else 0
        if not 1 <= count <= 100:
            faults.append(
                UserError(
                    "invalid_value", "no number of runs", where, "a number from 1 to 100, or auto"
                )
            )
        elif "most" in asked or "within" in asked:
            what = "a fixed number of runs has no end to look for"
            faults.append(
                UserError("no_effect", what, where, "--repeat auto, or without most and within")
            )
    most = None
    if "most" in asked:
        most = int(asked["most"]) if asked["most"].isdecimal() else 0
        if not repeats.FEWEST <= most <= 100:
            faults.append(
                UserError(
                    "out_of_range", "no number of runs", where, f"most from {repeats.FEWEST} to 100"
                )
            )
    share, pause_ns = None, None
    with collecting(faults):
        share = typed("--repeat within", asked.get("within"), units.share)
        if share is not None and share <= 0:
            raise UserError("out_of_range", "reached by no number of runs", where, "within=5%")
    with collecting(faults):
        pause_ns = typed("--repeat pause", asked.get("pause"), partial(units.duration_ns, bare="s"))
    if faults:
        raise Faults(faults)
    return repeats.Repetition(
        count=count,
        most=most or repeats.MOST,
        within=share or repeats.WITHIN,
        pause_ns=pause_ns or 0,
    )
