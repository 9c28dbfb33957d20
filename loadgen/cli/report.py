"""`loadgen report DIR`: a stored run, printed again from its records.

Flags, one call, a print, an exit code: `loadgen.store` knows what a run is made of, `loadgen.summary` what it says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loadgen.summary import Summary


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or of several (the levels of --concurrency 1,2,4).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
) -> int:
    """Print a stored run again, from its records.

    Exit: 0 sound and SLO met, 1 SLO missed, 2 not a run, 3 the run is not valid.
    """
    from loadgen.report import machine, text
    from loadgen.verdict import exit_code

    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    levels = [] if _is_run(folder) else sorted(filter(_is_run, folder.glob("*/")), key=_natural)
    summaries = [_summary(one) for one in levels or [folder]]
    if as_json:
        written = [machine.dump(summary).decode().rstrip() for summary in summaries]
        print("[" + ",\n".join(written) + "]" if levels else written[0])
    else:
        print(text.render_levels(summaries, color=color) if levels else text.render(summaries[0], color=color), end="")
    return max(
        exit_code(interrupted=False, valid=summary.verdict.valid, slo_met=summary.goodput.met) for summary in summaries
    )


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() or (folder / "summary.json").is_file()


def _natural(folder: Path) -> tuple[int, str]:
    """c2 before c16."""
    return int("".join(filter(str.isdigit, folder.name)) or 0), folder.name


def _summary(folder: Path) -> Summary:
    """From the records; from `summary.json` where only that was kept."""
    from loadgen import store
    from loadgen.report import machine
    from loadgen.summary import summarize

    stored = folder / "summary.json"
    if stored.is_file() and not any((folder / "requests").glob("*.parquet")) and not any(folder.glob("spool/*.rows")):
        return machine.load(stored.read_bytes(), str(stored))
    return summarize(*store.read(folder))
