"""`loadgen merge`: make one run of the parts that `loadgen run --shard` has written."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.options import StrictOption
from loadgen.cli.output import print_report, say

if TYPE_CHECKING:
    from loadgen.shards.parts import PartPosition


def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of the parts, one for each --shard.",
            autocompletion=completion.complete_result,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the merged run.")
    ],
    strict: StrictOption = False,
) -> int:
    """Make one run of the parts of a run that was divided with --shard.

    A part that is missing or was killed is named; its requests are recorded as lost, and the run is
    not valid. Parts of different runs are refused.

    Exit: that of loadgen run for the merged run, 2 for parts that do not belong together.

    Example: loadgen merge results/part-1 results/part-2 -o results/whole
    """
    from loadgen.core.execution.folder_names import check_no_results, new_run_folder
    from loadgen.core.metrics.summary import exit_code
    from loadgen.runs import text
    from loadgen.shards.merge import merge_parts
    from loadgen.shards.parts import locate_parts, read_parts

    check_no_results(out)
    found = read_parts(parts)
    for position in locate_parts(found):
        say(_describe(position))
    with new_run_folder(out, found[0].manifest.workload, datetime.now().astimezone()) as folder:
        summary = merge_parts(found, folder)
    print_report(text.report(summary))
    say(f"results in {folder}")
    return exit_code(summary, strict=strict)


def _describe(position: PartPosition) -> str:
    """Return one line about a part: where it ran, when it started, how it ended."""
    if position.part is None:
        return f"{position.name}: missing"
    host = position.part.manifest.host.name
    start = f"started {position.delay_ms:,.1f} ms after the common start"
    return f"{position.name} on {host}: {start}, {position.state}"
