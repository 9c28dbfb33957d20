"""`loadgen selfcheck`: the load that one worker on this host can drive, measured against the embedded endpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.shell.output import print_answer, say


def selfcheck(
    seconds: Annotated[float, typer.Option("--seconds", help="How long each step runs.", min=2.0, max=60.0)] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the steps and the answer as JSON.")] = False,
) -> int:
    """Find how many events/s and requests/s one worker carries here before its numbers stop being sound.

    Everything stays on this machine. Exit: 0 with an answer, 3 when not even the lightest step was sound.

    Example: loadgen selfcheck --seconds 5
    """
    from loadgen.preflight import selfcheck as checks

    answer = checks.run(seconds, say=say)
    print_answer(answer, f"{checks.render(answer)}\n", as_json=as_json)
    return 0 if answer.sound else 3
