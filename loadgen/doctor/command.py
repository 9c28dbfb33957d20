"""The command `loadgen doctor`: check a target and this host before a run."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.cli.invocation import Invocation
from loadgen.cli.options import TARGET_OPTIONS, FullOption, add_options
from loadgen.cli.output import print_result
from loadgen.core.errors import OK, UNSOUND, UserError


@add_options(
    only=TARGET_OPTIONS,
    help_texts={
        "url": (
            "Server URL, with or without a path prefix and /v1, or sim:PRESET for a simulated "
            "server."
        )
    },
)
def doctor(
    invocation: Invocation,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print the findings as JSON.")
    ] = False,
    full: FullOption = False,
) -> int:
    """Check a server and this host before a run.

    Checks the connection, TLS, the API key, the model, token counts, forced output lengths,
    streaming and metrics of the server, and the clock, CPU and limits of this host. It sends about
    a dozen small requests, and ten more if tokens arrive in groups. Without --url, it checks this
    host and the installed plug-ins and sends nothing.

    Exit: 0 a load can run (read the warnings), 2 wrong usage, 3 it cannot.

    Example: loadgen doctor --url http://HOST:8000
    """
    from loadgen.doctor import doctor as checks
    from loadgen.doctor.findings import build_report

    if invocation["url"] is None:
        title, findings = checks.examine_host()
    else:
        settings = invocation.settings()
        if settings.targets:
            raise UserError(
                "unsupported",
                "doctor checks one server at a time",
                "--url",
                "run it once for each server",
            )

        title, findings = checks.examine_target(settings)

    print_result(
        {"title": title, "findings": findings},
        build_report(title, findings),
        as_json=as_json,
        full=full,
    )
    return UNSOUND if checks.has_fault(findings) else OK
