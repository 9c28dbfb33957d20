"""Wrong usage of the command line, as errors with a code, a place and a hint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from loadgen.core.errors import UserError, closest, meant
from loadgen.shell.run_options import COMMAND_OPTIONS

ClickException: Any = next(
    parent for parent in typer.BadParameter.__mro__ if parent.__name__ == "ClickException"
)
"""The base class of the parser's exceptions: of typer's own copy of click, or of the package."""

_API_KEY_HINT = (
    "the key is read from OPENAI_API_KEY or --api-key-file FILE: whoever uses this host sees a "
    "command line"
)
_RESULTS_HINT = (
    "a run leaves a folder, --out names it; then loadgen report FOLDER, loadgen export FOLDER"
)
_CONCURRENCY_HINT = (
    "--concurrency, of requests in flight; how many machines so many users need says loadgen size"
)
_STREAMING_HINT = "answers are streamed, unless --no-stream is given"
_REQUEST_BODY_HINT = "--extra-body JSON, merged into every request: '{\"temperature\": 0}'"
_WARMUP_HINT = "--warmup 20req"
_RAMP_HINT = "--set concurrency_ramp=30s"

HINTS_FOR_FLAGS_OF_OTHER_TOOLS = {
    "--api-key": _API_KEY_HINT,
    "--apikey": _API_KEY_HINT,
    "--model-api-key": _API_KEY_HINT,
    "--token": _API_KEY_HINT,
    "--arrival-smoothness": "--set burstiness=0.5",
    "--connections": _CONCURRENCY_HINT,
    "--threads": _CONCURRENCY_HINT,
    "--users": _CONCURRENCY_HINT,
    "--vus": _CONCURRENCY_HINT,
    "--concurrency-ramp-duration": _RAMP_HINT,
    "--ramp-up": _RAMP_HINT,
    "--spawn-rate": _RAMP_HINT,
    "--csv": _RESULTS_HINT,
    "--export": _RESULTS_HINT,
    "--html": _RESULTS_HINT,
    "--output": _RESULTS_HINT,
    "--output-dir": _RESULTS_HINT,
    "--output-file": _RESULTS_HINT,
    "--report": _RESULTS_HINT,
    "--endpoint": "--url, with the path in front of /v1; --api says chat, completions, ...",
    "--format": "--as",
    "--goodput": "--slo ttft:2s, with its unit",
    "--host": "--url http://HOST:PORT",
    "--port": "--url http://HOST:PORT",
    "--ignore-eos": _REQUEST_BODY_HINT,
    "--temperature": _REQUEST_BODY_HINT,
    "--top-p": _REQUEST_BODY_HINT,
    "--iterations": "--num-requests; --repeat for whole runs",
    "--loops": "--num-requests; --repeat for whole runs",
    "--num-warmups": _WARMUP_HINT,
    "--warmup-request-count": _WARMUP_HINT,
    "--warmup-requests": _WARMUP_HINT,
    "--prefill-concurrency": "--set max_in_prefill=4",
    "--prompt": '--dataset FILE, with {"prompt": "..."} on each line',
    "--quiet": "--progress off",
    "--verbose": "--progress plain",
    "--rate-type": "--request-rate for an open loop, --concurrency for a closed one",
    "--stream": _STREAMING_HINT,
    "--streaming": _STREAMING_HINT,
    "--think-time": "think_time: in the workload file, docs/workloads.md",
    "--tpot": "--slo tpot:60ms",
    "--ttft": "--slo ttft:2s",
}
"""Flags of other tools that no single option replaces, and what to do instead.

`Option.other_tools` in the table of options has the flags that one option replaces.
"""

_RATE_FLAGS = ("--request-rate", "--rate", "--rps", "--qps", "-r")
_MLPERF_RATE_FLAG = "--target-qps"
_EXTRA_WORD_HINTS = {"sim": "--preset {}", "run": "one workload at a time"}
"""For a command, what an unexpected word on its command line probably means."""
_URL = "[A-Za-z][A-Za-z0-9+.-]+:/"  # a Path has only one slash of the two
_ARGUMENTS_OF_FILES = ("contract", "dataset", "trace", "workload")
_OPTIONS_OF_RESULTS = ("resume", "extend")
_TIME_UNITS = "ms|s|sec|seconds|m|min|minutes|h|hours|req|%"


def to_user_error(error: Any) -> UserError:
    """Return the error to show for an exception that typer raised while it parsed arguments."""
    command = error.ctx.command_path if error.ctx is not None else "loadgen"
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _unknown_option(error, command)
    if getattr(error, "param", None) is not None:
        return _invalid_parameter(error, command)
    if getattr(error, "option_name", None):
        return UserError(
            "missing_value",
            f"{error.option_name} needs a value",
            error.option_name,
            "loadgen COMMAND --help says which",
        )
    unknown_command = re.match("No such command '(.+?)'", str(error.message))
    if unknown_command is not None:
        return _unknown_command(unknown_command[1], error.ctx)
    return _unexpected_word(error, command)


def _unknown_command(name: str, ctx: Any) -> UserError:
    return UserError(
        "unknown_name",
        f"no command is called {name}",
        ctx.command_path,
        meant(name, ctx.command.list_commands(ctx)),
    )


def _unknown_option(error: Any, command: str) -> UserError:
    flag = error.option_name
    known_flags = [name for param in error.ctx.command.params for name in param.opts]
    return UserError(
        "unknown_name",
        f"no flag is called {flag}",
        f"{command} {flag}",
        _hint_for_flag(flag, known_flags) or _similar_flag(flag, known_flags, error.ctx),
    )


def _hint_for_flag(flag: str, known_flags: Sequence[str]) -> str:
    """Return what replaces a flag of another tool in this command, or "" if nothing does."""
    if flag in _RATE_FLAGS and _MLPERF_RATE_FLAG in known_flags:
        return _MLPERF_RATE_FLAG
    for hints in (_flags_of_options(), HINTS_FOR_FLAGS_OF_OTHER_TOOLS, _flags_of_set_keys()):
        hint = hints.get(flag, "")
        if hint and _is_applicable(hint, known_flags):
            return hint
    return ""


def _flags_of_options() -> Mapping[str, str]:
    """Return flags of other tools with the option of this one that replaces them."""
    return {
        flag: f"did you mean {option.flags[0]}?"
        for option in COMMAND_OPTIONS.values()
        for flag in option.other_tools
    }


def _flags_of_set_keys() -> Mapping[str, str]:
    """Return, for each key of `--set` spelled as a flag, how it is specified."""
    return {
        f"--{name.replace('_', '-')}": f"--set {name}={option.set_metavar}"
        for name, option in COMMAND_OPTIONS.items()
        if option.set_metavar
    }


def _is_applicable(hint: str, known_flags: Sequence[str]) -> bool:
    """Return True if a hint names a flag of this command, another command, or no flag at all."""
    flags = re.findall(r"(?<![a-z])--[a-z-]+", hint)
    return not flags or "loadgen " in hint or not {*flags}.isdisjoint(known_flags)


def _similar_flag(flag: str, known_flags: Sequence[str], ctx: typer.Context) -> str:
    similar = closest(flag, known_flags, cutoff=0.7)
    suggestion = f"did you mean {similar}? " if similar else ""
    has_full_help = "--help-all" in ctx.help_option_names
    return (
        f"{suggestion}all of them: {ctx.command_path} {'--help-all' if has_full_help else '--help'}"
    )


def _invalid_parameter(error: Any, command: str) -> UserError:
    """Return the error for an option or argument that is missing or has an invalid value."""
    param = error.param
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
    else:
        name = max(param.opts, key=len)
    if type(error).__name__ == "MissingParameter":
        hint = f"{param.help} See {command} --help"
        return UserError("missing_option", f"{name} is missing", command, hint)
    message = str(error.message).removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    return UserError("invalid_value", message, f"{command} {name}", f"see {command} --help")


def _unexpected_word(error: Any, command: str) -> UserError:
    """Return the error for a word that no argument takes; it may be a URL, a unit or a value."""
    words = list(error.ctx.find_root().obj or []) if error.ctx is not None else []
    endpoint = _endpoint_without_flag(words)
    if endpoint:
        return UserError(
            "unknown_name",
            f"{endpoint} is an endpoint, and stands behind --url",
            f"{command} {endpoint}",
            f"--url {endpoint}",
        )
    message = str(error.message)
    extra = re.search(r"unexpected extra argument.*\((.*)\)", message)
    if extra is None:
        message = message[:1].lower() + message[1:].rstrip(".")
        return UserError("invalid_value", message, command, f"see {command} --help")
    word = extra[1].split()[0]
    return UserError(
        "invalid_value",
        f"{word} is one word too many",
        f"{command} {word}",
        _hint_for_extra_word(word, words, command),
    )


def _endpoint_without_flag(words: Sequence[str]) -> str:
    """Return the first URL or `sim:` target that does not follow a flag, or ""."""
    for before, word in pairwise(words):
        if not before.startswith("-") and re.match("(sim:|https?://)", word):
            return word
    return ""


def _hint_for_extra_word(word: str, words: Sequence[str], command: str) -> str:
    before = next((first for first, second in pairwise(words) if second == word), "")
    if re.fullmatch(r"[0-9.]+", before) and re.fullmatch(_TIME_UNITS, word):
        return f"a number and its unit are one word: {before}{word}"
    hint = f"see {command} --help"
    extra_hint = _EXTRA_WORD_HINTS.get(command.rpartition(" ")[2])
    return f"{extra_hint.format(word)}; {hint}" if extra_hint else hint


def check_no_url_is_a_path(params: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Raise UserError if a URL is the value of a parameter that takes a file or folder.

    Parameters for a result are left to their command, which has a better hint.
    """
    for param in params:
        value = values.get(param.name)
        if isinstance(value, Path) or (param.name == "workload" and value is not None):
            _check_path(param, str(value))


def _check_path(param: Any, text: str) -> None:
    is_option = param.param_type_name == "option"
    if is_option:
        takes_result = param.name in _OPTIONS_OF_RESULTS
    else:
        takes_result = param.name not in _ARGUMENTS_OF_FILES
    if takes_result or not re.match(_URL, text) or os.path.exists(text):
        return
    url = text if "://" in text else text.replace(":/", "://", 1)
    raise UserError(
        "invalid_value",
        "this is a URL, and a file or folder of this machine is meant",
        f"{max(param.opts, key=len)} {url}" if is_option else url,
        "a server stands behind --url; a file is fetched first",
    )
