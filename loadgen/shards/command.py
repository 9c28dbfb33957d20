"""The command `loadgen merge`: merge the parts of a run that was divided with --shard."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.options import FullOption, StrictOption
from loadgen.cli.output import print_report, print_status

if TYPE_CHECKING:
    from loadgen.shards.parts import PartPosition


def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of the parts, one per --shard.",
            autocompletion=completion.complete_result,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the merged run.")
    ],
    strict: StrictOption = False,
    full: FullOption = False,
) -> int:
    """Merge the parts of a run that was divided with --shard.

    The requests of a part that is missing or was killed count as lost, which makes the run INVALID.

    Exit: the exit codes of `loadgen run`; 2 also if the parts belong to different runs.

    Example: loadgen merge results/part-1 results/part-2 -o results/whole
    """
    from loadgen.core.execution.folder_names import check_no_results, new_run_folder
    from loadgen.core.metrics.summary import exit_code
    from loadgen.runs import text
    from loadgen.shards.merge import merge_parts
    from loadgen.shards.parts import locate_parts, read_parts

    check_no_results(out)
    run_parts = read_parts(parts)
    for position in locate_parts(run_parts):
        print_status(_describe(position))

    started_at = datetime.now().astimezone()
    with new_run_folder(out, run_parts[0].manifest.workload, started_at) as folder:
        summary = merge_parts(run_parts, folder)

    print_report(text.report(summary), full=full)
    print_status(f"Results: {folder}")
    return exit_code(summary, strict=strict)


def _describe(position: PartPosition) -> str:
    """Return a line such as "part 1 of 3 on node-a: finished, started 2.1 ms late"."""
    if position.part is None:
        return f"{position.name}: missing"
    host = position.part.manifest.host.name
    return f"{position.name} on {host}: {position.state}, started {position.delay_ms:,.1f} ms late"
