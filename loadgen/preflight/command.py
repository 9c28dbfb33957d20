"""`loadgen doctor`: check a target and this host before a run, and explain what each finding means; without a target,
the load that one worker on this host can drive.
"""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.core.errors import OK, UNSOUND, UserError
from loadgen.shell.invocation import Invocation
from loadgen.shell.options import TARGET_OPTIONS, add_options
from loadgen.shell.output import print_answer, say


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
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="SECONDS",
            help="Without a target: how long each step runs.",
            min=2.0,
            max=60.0,
        ),
    ] = 3.0,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print the findings as JSON.")
    ] = False,
) -> int:
    """Check reachability, TLS, key, model, token counts, forced lengths, streaming, metrics pages, and this host.

    About a dozen small requests, ten more where events come together. Without a target: how many events/s and
    requests/s one worker on this host carries before its numbers stop being sound, in half a minute, against an
    endpoint of our own.

    Exit: 0 a load can run (read the warnings), 2 wrong usage, 3 it cannot, or no step was sound.

    Example: loadgen doctor --url http://HOST:8000
    """
    from loadgen.preflight import doctor as checks
    from loadgen.preflight.target_checks import report

    if invocation["url"] is None:
        return _of_this_host(seconds, as_json=as_json)
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


def _of_this_host(seconds: float, *, as_json: bool) -> int:
    from loadgen.preflight import plugin_checks, selfcheck

    for finding in plugin_checks.findings():
        say(f"{finding.check} {finding.found}: {finding.meaning}")
    answer = selfcheck.run(seconds, say=say)
    print_answer(answer, selfcheck.report(answer), as_json=as_json)
    return OK if answer.sound else UNSOUND
