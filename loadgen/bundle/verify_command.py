"""The command `loadgen verify`: check a bundle and recompute every number in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli.options import FullOption, PluginsOption
from loadgen.cli.output import print_result
from loadgen.core.errors import OK, SLO_MISSED, UNSOUND

EXIT_CODES = {"all": OK, "part": UNSOUND, "no": SLO_MISSED}


def verify(
    bundle: Annotated[
        Path, typer.Argument(help="File written by `loadgen bundle` or by --bundle.")
    ],
    signed_by: Annotated[
        Path | None,
        typer.Option(
            "--signed-by", metavar="FILE", help="Public key (.pub) that must have signed it."
        ),
    ] = None,
    with_plugins: PluginsOption = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", rich_help_panel="Output", help="Print the result as JSON."),
    ] = False,
    full: FullOption = False,
) -> int:
    """Recompute every number and verdict of a bundle from its records, and list differences.

    It uses no network.

    Exit: 0 everything was reproduced, 1 something differs, 2 not a bundle, or one of a newer
    version, 3 some files could not be checked here.

    Example: loadgen verify poc.zip
    """
    from loadgen.bundle.verification import verify_bundle
    from loadgen.bundle.verification_text import report

    verification = verify_bundle(bundle, signed_by=signed_by, with_plugins=with_plugins)
    print_result(verification, report(verification), as_json=as_json, full=full)
    return EXIT_CODES[verification.verified]
