"""`loadgen verify`: checks a bundle and regenerates every number in it from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli.options import PluginsOption
from loadgen.cli.output import print_answer
from loadgen.core.errors import OK, SLO_MISSED, UNSOUND

EXIT_CODES = {"all": OK, "part": UNSOUND, "no": SLO_MISSED}


def verify(
    bundle: Annotated[Path, typer.Argument(help="A file of `loadgen bundle` or `--bundle`.")],
    signed_by: Annotated[
        Path | None,
        typer.Option(
            "--signed-by", metavar="FILE", help="The public key (.pub) that must have signed it."
        ),
    ] = None,
    with_plugins: PluginsOption = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", rich_help_panel="Output", help="Print what was checked as JSON."),
    ] = False,
) -> int:
    """Make every summary, figure, interval and verdict of a bundle again from what was kept, and
    name what differs.

    No network. Exit: 0 all of it comes out again, 1 something differs, 2 not a bundle or one of a
    newer version, 3 some of it cannot be made again here, as it says.

    Example: loadgen verify poc.zip
    """
    from loadgen.bundle.verification import verify_bundle
    from loadgen.bundle.verification_text import report

    verification = verify_bundle(bundle, signed_by=signed_by, with_plugins=with_plugins)
    print_answer(verification, report(verification), as_json=as_json)
    return EXIT_CODES[verification.verified]
