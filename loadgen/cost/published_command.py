"""`loadgen reference`: published figures to compare results with, and their sources.

Parses flags and prints: the tables are in `mlperf.published`, their rendering in `report.published`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.core.errors import OK, UserError, meant
from loadgen.shell.output import print_report


def reference(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="nodes, mlperf, latency, limits, capacity, figures; all when none is named."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> int:
    """Published figures, with source, date, quality, and what is to be known of each.

    Example: loadgen reference mlperf latency
    """
    from loadgen.cost import published_text as published

    if as_json and as_markdown:
        raise UserError("conflict", "several formats at once", "--json, --markdown", "choose one")
    names = list(dict.fromkeys(tables or published.SECTIONS))
    for name in names:
        if name not in published.SECTIONS:
            raise UserError(
                "unknown_name", f'no table is called "{name}"', "reference", meant(name, list(published.SECTIONS))
            )
    if as_json:
        print(published.render_json(names), end="")
    else:
        print_report(published.report(names), as_markdown=as_markdown)
    return OK
