"""`loadgen explain OURS THEIRS`: why the result of another tool differs from ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.options import FullOption
from loadgen.cli.output import (
    print_result,
    refuse_two_formats,
    warn_if_changed,
    write_file,
)
from loadgen.core.errors import OK, UNSOUND
from loadgen.result_kinds import reporting_damage


def explain(
    ours: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run of loadgen.", autocompletion=completion.complete_result
        ),
    ],
    theirs: Annotated[
        Path,
        typer.Argument(help="Result file of another tool that measured the same server and load."),
    ],
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Explain the difference even if servers or loads differ."),
    ] = False,
    server_log: Annotated[
        Path | None,
        typer.Option(
            "--server-log",
            metavar="FILE",
            help=(
                "Log of the simulated server that the other tool measured (loadgen sim --log), "
                "which tells its client from the server."
            ),
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", rich_help_panel="Output", help="Print Markdown.")
    ] = False,
    full: FullOption = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML report.")
    ] = None,
) -> int:
    """Split the difference between a run and the result of another tool into named parts.

    The metrics of the run are computed again from its records, with one definition after the other
    replaced by that of the other tool. Each change is a part of the difference, such as the time
    from which latencies count, or the tail of the load.

    Exit: 0 done, 2 results that cannot be read or are of different loads, 3 our run is INVALID.

    Example: loadgen explain results/RUN vllm-result.json
    """
    from loadgen.explain import explanation_text
    from loadgen.explain.explanation import explain_difference
    from loadgen.render import html as html_renderer

    refuse_two_formats(as_json=as_json, as_markdown=as_markdown)
    warn_if_changed(ours)
    with reporting_damage(ours):
        explanation = explain_difference(
            ours, theirs, allow_differences=anyway, server_log=server_log
        )

    report = explanation_text.build_report(explanation)
    print_result(explanation, report, as_json=as_json, as_markdown=as_markdown, full=full)
    if html is not None:
        write_file(html, html_renderer.render(report), "--html")

    return OK if explanation.valid else UNSOUND
