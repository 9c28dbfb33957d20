"""Wrong usage that the parser of the command line finds, as a fault like every other: what, where, what to do."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from loadgen.core.errors import UserError, closest
from loadgen.shell import removed

_TARGET = re.compile("(sim:|https?://)")
_KEY = "the key is read from OPENAI_API_KEY or --api-key-file FILE: whoever uses this host sees a command line"
_ELSEWHERE = {
    "--api-key": _KEY, "--model-api-key": _KEY, "--token": _KEY, "--max-tokens": "did you mean --output-tokens?",
    "--max-output-tokens": "did you mean --output-tokens?", "--prompt-tokens": "did you mean --input-tokens?",
}  # fmt: skip
"""Flags of other tools that there are none of here, and what is done instead."""


def fault_of(error: Any) -> UserError:
    """The fault for what the parser raised."""
    command = error.ctx.command_path if error.ctx is not None else "loadgen"
    help_of_it = f"{command} --help"
    flag: str = getattr(error, "option_name", None) or ""
    parameter = getattr(error, "param", None)
    kind = type(error).__name__
    if kind == "NoSuchOption":
        similar = closest(flag, [name for one in error.ctx.command.params for name in one.opts], cutoff=0.7)
        hint = (
            _ELSEWHERE.get(flag)
            or removed.OPTIONS.get(flag)
            or f"{f'did you mean {similar}? ' if similar else ''}all of them: {help_of_it}"
        )
        return UserError("unknown_name", f"no flag is called {flag}", f"{command} {flag}", hint)
    if parameter is not None:
        is_argument = parameter.param_type_name == "argument"
        name = parameter.metavar or parameter.name.upper() if is_argument else max(parameter.opts, key=len)
        if kind == "MissingParameter":
            return UserError("missing_option", f"{name} is missing", command, f"{parameter.help} See {help_of_it}")
        command = f"{command} {name}"
    if flag:  # its value is missing
        return UserError("missing_value", f"{flag} needs a value", flag, "loadgen COMMAND --help says which")
    if kind == "UsageError" and (target := _target(error)):
        where = f"{command} {target}"
        return UserError("unknown_name", f"{target} is an endpoint, no workload", where, f"--url {target}")
    said = str(error.message).removeprefix("Value error, ")  # of the parser's own checks
    return UserError("invalid_value", said[:1].lower() + said[1:].rstrip("."), command, f"see {help_of_it}")


def _target(error: Any) -> str:
    """The first word of what was typed that is an endpoint and stands behind no flag; "" without one."""
    typed = (error.ctx.find_root().obj or []) if error.ctx is not None else []
    places = (word for before, word in pairwise(typed) if not before.startswith("-") and _TARGET.match(word))
    return next(places, "")
