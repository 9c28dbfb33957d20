"""`loadgen doctor`: checks a target and this host before a run and says what each finding means."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.cli.invocation import Invocation
from loadgen.cli.options import TARGET_OPTIONS, add_options
from loadgen.cli.output import print_answer
from loadgen.core.errors import OK, UNSOUND, UserError


@add_options(
    only=TARGET_OPTIONS,
    help_texts={
        "url": (
            "Endpoint, with or without a path prefix and /v1; or sim:PRESET, a simulated one in "
            "virtual time."
        )
    },
)
def doctor(
    invocation: Invocation,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print the findings as JSON.")
    ] = False,
) -> int:
    """Check reachability, TLS, key, model, token counts, forced lengths, streaming, metrics pages, and this host.

    Sends about a dozen small requests, and ten more if events arrive together. Without a target,
    it checks this host and the plug-ins alone and sends nothing.

    Exit: 0 a load can run (read the warnings), 2 wrong usage, 3 it cannot.

    Example: loadgen doctor --url http://HOST:8000
    """
    from loadgen.doctor import doctor as checks
    from loadgen.doctor.target_checks import report

    if invocation["url"] is None:
        title, findings = checks.check_host()
    else:
        settings = invocation.settings()
        if settings.targets:
            raise UserError(
                "unsupported",
                "this command takes one endpoint",
                "--url",
                "several: loadgen run, or one address for all",
            )
        title, findings = checks.run(settings)
    print_answer({"title": title, "findings": findings}, report(title, findings), as_json=as_json)
    return UNSOUND if checks.failed(findings) else OK
