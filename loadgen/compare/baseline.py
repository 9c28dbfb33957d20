"""`loadgen baseline save NAME RESULT` and `loadgen baseline compare NAME RESULT`: a result that is kept by name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from loadgen.compare.command import BeyondNoise, FailOn
from loadgen.compare.command import compare as compare_results
from loadgen.core.errors import OK, UserError
from loadgen.shell.help import Command, in_order

app = typer.Typer(
    name="baseline",
    help="Keep a result by name, and hold later ones against it.\n\n"
    "Baselines are folders in `baselines/`: commit them, or keep them where a build finds them.",
    rich_markup_mode=None,
    cls=in_order(("save", "compare")),
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="Its name: letters, digits, . _ -")]
Kept = Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Where baselines are.")]


@app.command(cls=Command)
def save(
    name: Name,
    result: Annotated[Path, typer.Argument(help="Folder of a run, or of repeats.")],
    kept: Kept = Path("baselines"),
    force: Annotated[bool, typer.Option("--force", help="In the place of one of the same name.")] = False,
) -> int:
    """Keep a result: everything that a comparison reads, without its pages.

    Exit: 0, 2 not a result, or the name is taken.

    Example: loadgen baseline save main results/qa-20261122-101500-1a2b
    """
    from loadgen import result_kinds

    folder = _folder(kept, name)
    if not result.is_dir() or result_kinds.kind_of(result, "comparable") is None:
        raise UserError(
            "no_result", "neither a run nor a folder of repeats", str(result), "give what loadgen run -o wrote"
        )
    if folder.exists():
        if not force:
            raise UserError("file_exists", "there is a baseline of this name", str(folder), "another name, or --force")
        shutil.rmtree(folder)
    shutil.copytree(result, folder, ignore=shutil.ignore_patterns("*.html", "spool"))
    print(folder)
    return OK


@app.command(cls=Command)
def compare(
    name: Name,
    results: Annotated[list[Path], typer.Argument(help="Folders of runs or of repeats, to hold against it.")],
    kept: Kept = Path("baselines"),
    fail_on: FailOn = None,
    beyond_noise: BeyondNoise = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file too.")] = None,
) -> int:
    """Hold results against a baseline, as `loadgen compare` does. Better or worse needs repeats on both sides.

    Exit: 0, 1 a condition of --fail-on holds, 2 wrong usage, 3 a result is not valid, or a condition is undecided.

    Example: loadgen baseline compare main results/new --fail-on 'ttft_ms.p99 > +5%'
    """
    folder = _folder(kept, name)
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in kept.glob("*/"))) or "none"
        hint = f"known: {known}; loadgen baseline save NAME DIR"
        raise UserError("unknown_name", f'no baseline is called "{name}"', str(kept), hint)
    return compare_results(
        [folder, *results],
        fail_on=fail_on,
        beyond_noise=beyond_noise,
        as_json=as_json,
        as_markdown=as_markdown,
        junit=junit,
    )


def _folder(kept: Path, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError("invalid_value", f'"{name}" is no name of a baseline', "baseline", "letters, digits, . _ -")
    return kept / name
