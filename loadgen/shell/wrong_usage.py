"""Wrong usage that the parser of the command line finds, as a fault like every other: what, where, what to do."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from loadgen.core.errors import UserError, closest
from loadgen.shell import removed

_TARGET = "(sim:|https?://)"
_KEY = "the key is read from OPENAI_API_KEY or --api-key-file FILE: whoever uses this host sees a command line"
_FOLDER = "a run leaves a folder, --out names it; then loadgen report FOLDER, loadgen export FOLDER"
_LANES = (
    "--concurrency, of requests in flight; how many machines so many users need says loadgen size"
)
_STREAMED = "answers are streamed, unless --no-stream is given"
_BODY = "--extra-body JSON, merged into every request: '{\"temperature\": 0}'"
_ELSEWHERE = {
    "--api-key": _KEY,
    "--apikey": _KEY,
    "--model-api-key": _KEY,
    "--token": _KEY,
    "--max-tokens": "did you mean --output-tokens?",
    "--max-output-tokens": "did you mean --output-tokens?",
    "--prompt-tokens": "did you mean --input-tokens?",
    "--rps": "--request-rate",
    "--qps": "--request-rate",
    "--rate-type": "--request-rate for an open loop, --concurrency for a closed one",
    "--max-seconds": "--duration",
    "--max-duration": "--duration",
    "--run-time": "--duration",
    "--iterations": "--num-requests; --repeat for whole runs",
    "--loops": "--num-requests; --repeat for whole runs",
    "--users": _LANES,
    "--vus": _LANES,
    "--connections": _LANES,
    "--threads": _LANES,
    "--spawn-rate": "--set concurrency_ramp=30s",
    "--ramp-up": "--set concurrency_ramp=30s",
    "--host": "--url http://HOST:PORT",
    "--port": "--url http://HOST:PORT",
    "--endpoint": "--url, with the path in front of /v1; --api says chat, completions, ...",
    "--streaming": _STREAMED,
    "--stream": _STREAMED,
    "--prompt": '--dataset FILE, with {"prompt": "..."} on each line',
    "--temperature": _BODY,
    "--top-p": _BODY,
    "--ignore-eos": _BODY,
    "--ttft": "--slo ttft:2s",
    "--tpot": "--slo tpot:60ms",
    "--processes": "--workers",
    "--num-workers": "--workers",
    "--cpus": "--workers",
    "--verbose": "--progress plain",
    "--quiet": "--progress off",
    "--output": _FOLDER,
    "--output-dir": _FOLDER,
    "--output-file": _FOLDER,
    "--html": _FOLDER,
    "--csv": _FOLDER,
    "--report": _FOLDER,
    "--export": _FOLDER,
    "--format": "--as",
    "--think-time": "think_time: in the workload file, docs/workloads.md",
}
"""Flags of other tools that there are none of here, and what is done instead."""
_RATES = {
    **dict.fromkeys(
        ("--request-rate", "--rate", "--rps", "--qps", "-r"), "--target-qps"
    ),  # of mlperf
    "--target-qps": "--request-rate",
}
"""How a rate is called by the other commands, for those that have that flag."""
_TABLES = (_RATES, _ELSEWHERE, removed.OPTIONS)
_WORDS = {"sim": "--preset {}", "run": "one workload at a time"}
"""A command -> what is meant by a word too many."""


def fault_of(error: Any) -> UserError:
    """The fault for what the parser raised."""
    command = error.ctx.command_path if error.ctx is not None else "loadgen"
    help_of_it = f"{command} --help"
    flag: str = getattr(error, "option_name", None) or ""
    parameter = getattr(error, "param", None)
    kind = type(error).__name__
    if kind == "NoSuchOption":
        known = [name for one in error.ctx.command.params for name in one.opts]
        similar = closest(flag, known, cutoff=0.7)
        has_more = any("--help-all" in one.opts for one in error.ctx.command.get_params(error.ctx))
        everything = f"{help_of_it}{'-all' if has_more else ''}"
        hint = next(
            (
                row
                for table in (*_TABLES, _keys())
                if (row := table.get(flag, "")) and _fits(row, known)
            ),
            f"{f'did you mean {similar}? ' if similar else ''}all of them: {everything}",
        )
        return UserError("unknown_name", f"no flag is called {flag}", f"{command} {flag}", hint)
    if parameter is not None:
        is_argument = parameter.param_type_name == "argument"
        name = (
            parameter.metavar or parameter.name.upper()
            if is_argument
            else max(parameter.opts, key=len)
        )
        if kind == "MissingParameter":
            return UserError(
                "missing_option",
                f"{name} is missing",
                command,
                f"{parameter.help} See {help_of_it}",
            )
        command = f"{command} {name}"
    if flag:  # its value is missing
        return UserError(
            "missing_value", f"{flag} needs a value", flag, "loadgen COMMAND --help says which"
        )
    if kind == "UsageError" and (target := _target(error)):
        what = "is an endpoint, and stands behind --url"
        return UserError(
            "unknown_name", f"{target} {what}", f"{command} {target}", f"--url {target}"
        )
    if kind == "UsageError" and (
        extra := re.search(r"unexpected extra argument.*\((.*)\)", str(error.message))
    ):
        return _word_too_many(extra[1].split()[0], command, _typed(error), help_of_it)
    said = str(error.message).removeprefix("Value error, ")  # of the parser's own checks
    return UserError(
        "invalid_value", said[:1].lower() + said[1:].rstrip("."), command, f"see {help_of_it}"
    )


def _keys() -> dict[str, str]:
    """What is rare and a key of `--set`, as a flag -> how it is said."""
    from loadgen.shell.run_options import COMMAND_OPTIONS

    rare = {name: option.sets for name, option in COMMAND_OPTIONS.items() if option.sets}
    return {f"--{name.replace('_', '-')}": f"--set {name}={sets}" for name, sets in rare.items()}


def _fits(hint: str, known: list[str]) -> bool:
    """Whether a hint names a flag of this command, or another command, or none."""
    flags = re.findall(r"(?<![a-z])--[a-z-]+", hint)
    return not flags or "loadgen " in hint or not {*flags}.isdisjoint(known)


def _word_too_many(word: str, command: str, typed: list[str], help_of_it: str) -> UserError:
    """A word that nothing takes: the unit behind a blank, what another flag takes, or one argument more."""
    before = next((one for one, other in pairwise(typed) if other == word), "")
    hint = f"see {help_of_it}"
    if re.fullmatch(r"[0-9.]+", before) and re.fullmatch(
        "ms|s|sec|seconds|m|min|minutes|h|hours|req|%", word
    ):
        hint = f"a number and its unit are one word: {before}{word}"
    elif meant := _WORDS.get(command.rpartition(" ")[2]):
        hint = f"{meant.format(word)}; {hint}"
    return UserError("invalid_value", f"{word} is one word too many", f"{command} {word}", hint)


def _typed(error: Any) -> list[str]:
    """What was typed, in words."""
    return list(error.ctx.find_root().obj or []) if error.ctx is not None else []


def _target(error: Any) -> str:
    """The first word of what was typed that is an endpoint and stands behind no flag; "" without one."""
    places = (
        word
        for before, word in pairwise(_typed(error))
        if not before.startswith("-") and re.match(_TARGET, word)
    )
    return next(places, "")
