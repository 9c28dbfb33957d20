"""The command line: the whole help, the version, and the way to the parser of all commands; faults as exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from loadgen.core.errors import INTERRUPTED, OK, USAGE, UserError
from loadgen.shell import at_once, streams
from loadgen.shell.ending import ending
from loadgen.shell.overview import first_words, overview, version

COLLECT_AFTER = 200_000  # new objects, not 700: imports make many that stay; a tenth of the start went into them


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: exits with one of the codes of `loadgen.core.errors`."""
    gc.set_threshold(COLLECT_AFTER)
    code: int | None = None
    if arguments is None:
        atexit.register(
            lambda: at_once.leave(code)
        )  # the first to be registered is the last to be called
    streams.prepare()

    completes = os.environ.get("_LOADGEN_COMPLETE") == "complete_bash"
    if completes and os.environ.get("COMP_CWORD") == "1":
        print("\n".join(first_words(os.environ.get("COMP_WORDS", ""))))
        sys.exit(OK)

    def call() -> int:
        if sys.platform == "win32":
            hint = "use it in WSL2 or a container"
            raise UserError(
                "wrong_platform", "loadgen takes Linux (or macOS, to read what is stored)", "", hint
            )
        typed = sys.argv[1:] if arguments is None else list(arguments)
        match typed:  # what the parser would say too, without the time to make it
            case ["--help"] | ["-h"]:
                print(overview(), end="")
            case ["--version"]:
                print(version())
            case [] if (
                "_LOADGEN_COMPLETE" not in os.environ
            ):  # the shell asks so for what could be typed next
                print(overview(), end="", file=sys.stderr)
                return USAGE
            case _:
                from loadgen.shell.plain_line import carry_out

                return carry_out(typed)
        return OK

    def flushed() -> int:
        sys.stdout.flush()
        return found

    if completes:
        from loadgen.shell.completion import whole_words
    try:
        with whole_words() if completes else nullcontext():
            found = ending(call)
        if arguments is None:
            found = ending(flushed)
    except KeyboardInterrupt:  # one more, behind the end that the first one got
        found = INTERRUPTED
    if arguments is None:
        at_once.hear()
    code = found
    sys.exit(code)
