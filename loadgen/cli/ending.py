"""How every command ends: done, a fault that is told in its own words, interrupted, or a bug of ours.

The one handler around `main`. It prints on stderr; nothing else in the package turns an exception into an exit code.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable

from loadgen.errors import BUG, INTERRUPTED, OK, Fault, Faults


def ending(call: Callable[[], int]) -> int:
    """Run `call` and turn each of the three endings (expected, interrupted, bug) into an exit code."""
    try:
        return call()
    except (Fault, Faults) as fault:
        print(fault, file=sys.stderr)
        return fault.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout left (`loadgen report | head`)
        sys.stderr.close()
        return OK
    except Exception as bug:
        with tempfile.NamedTemporaryFile("w", prefix="loadgen-bug-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        print(f"error: a bug in loadgen: {type(bug).__name__}: {bug}\n  --> {file.name}", file=sys.stderr)
        print("hint: please report it with that file", file=sys.stderr)
        return BUG
