"""`loadgen doctor`: check a target and this host before a run, and explain what each finding means."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.core.errors import OK, UNSOUND, UserError
from loadgen.shell.options import TARGET, Given, takes
from loadgen.shell.output import print_answer


@takes(
    only=TARGET,
    url="Endpoint, with or without a path prefix and /v1; or sim:PRESET, a simulated one in virtual time.",
)
def doctor(
    given: Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check reachability, TLS, key, model, token counts, forced lengths, streaming, metrics pages, and this host.

    About a dozen small requests. Exit: 0 a load can run (read the warnings), 2 wrong usage, 3 it cannot.

    Example: loadgen doctor --url http://HOST:8000
    """
    from loadgen.preflight import doctor as checks
    from loadgen.preflight.target_checks import render

    settings = given.settings()
    if settings.targets:
        raise UserError(
            "unsupported", "this command takes one endpoint", "--url", "several: loadgen run, or one address for all"
        )
    title, findings = checks.run(settings)
    print_answer({"title": title, "findings": findings}, render(title, findings), as_json=as_json)
    return UNSOUND if checks.failed(findings) else OK
