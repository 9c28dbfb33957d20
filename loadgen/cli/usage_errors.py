"""Wrong usage of the command line, as errors with a code, a place and a hint."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from loadgen.cli.command_translation import KnownOption, translate
from loadgen.core.errors import UserError, closest, did_you_mean

ClickException: Any = next(
    parent for parent in typer.BadParameter.__mro__ if parent.__name__ == "ClickException"
)
"""The base class of the parser's exceptions: of typer's own copy of click, or of the package."""

_COMMANDS_OF_OTHER_TOOLS = {
    ("bench", "serve"): "run",
    ("bench",): "run",
    ("benchmark", "run"): "run",
    ("benchmark",): "run",
    ("profile",): "run",
}
"""Commands of other tools that send a load, with the command of this tool that does."""
_EXTRA_WORD_HINTS = {"sim": "--preset {}", "run": "give one workload"}
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
        return _unknown_options(error, command)
    if getattr(error, "param", None) is not None:
        return _invalid_parameter(error, command)
    if getattr(error, "option_name", None):
        return UserError(
            "missing_value",
            f"{error.option_name} needs a value",
            error.option_name,
            f"see {command} --help",
        )
    unknown_command = re.match("No such command '(.+?)'", str(error.message))
    if unknown_command is not None:
        return _unknown_command(unknown_command[1], error.ctx)
    return _unexpected_word(error, command)


def _unknown_command(name: str, ctx: Any) -> UserError:
    """Return the error for a word that is no command; it may be one of another tool."""
    arguments = list(ctx.find_root().obj or [])
    depth = len(ctx.command_path.split()) - 1
    rest = arguments[depth:]
    for other_words, command_name in _COMMANDS_OF_OTHER_TOOLS.items():
        if tuple(rest[: len(other_words)]) == other_words and depth == 0:
            command = ctx.command.get_command(ctx, command_name)
            typed = [command_name, *rest[len(other_words) :]]
            translation = translate(typed, 1, _options_of(command, ("--help",)))
            return UserError(
                "unknown_name",
                f"unknown command: {name}",
                f"{ctx.command_path} {' '.join(other_words)}",
                f"type: {translation.command}",
            )
    hint = _hint_for_command(name, rest) if depth == 0 else ""
    return UserError(
        "unknown_name",
        f"unknown command: {name}",
        ctx.command_path,
        hint or did_you_mean(name, ctx.command.list_commands(ctx)),
    )


def _hint_for_command(name: str, arguments: Sequence[str]) -> str:
    """Return what to type instead of a word that other tools have as a command, or ""."""
    if name == "version":
        return "type: loadgen --version"
    if name == "help":
        return f"type: {shlex.join(['loadgen', *arguments[1:2], '--help'])}"
    if name in ("serve", "simulate"):
        return "type: loadgen sim --preset gb300-vm"
    return ""


def _options_of(command: Any, help_names: Iterable[str]) -> dict[str, KnownOption]:
    """Return the options of a command by their names."""
    known = {
        name: KnownOption(takes_value=not (param.is_flag or param.count))
        for param in command.params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    return known | {name: KnownOption(takes_value=False) for name in help_names}


def _unknown_options(error: Any, command: str) -> UserError:
    """Return one error for all options that a command does not have, with what to type instead."""
    ctx = error.ctx
    arguments = list(ctx.find_root().obj or [])
    depth = len(command.split()) - 1
    if hasattr(ctx.command, "list_commands"):
        return _option_before_command(error.option_name, arguments, depth, ctx)
    known = _options_of(ctx.command, ctx.help_option_names)
    translation = translate(arguments, depth, known)
    unknown = translation.unknown or (error.option_name,)
    hints = {
        flag: translation.hints.get(flag) or _similar_flag(flag, known, ctx) for flag in unknown
    }
    if len(unknown) == 1:
        problem = f"unknown option: {unknown[0]}"
        lines = [hints[unknown[0]]]
        if translation.is_changed:
            lines.append(f"type: {translation.command}")
    else:
        problem = f"unknown options: {', '.join(unknown)}"
        lines = [f"type: {translation.command}"] if translation.is_changed else []
        lines += [
            f"{flag}: {hint}" for flag, hint in hints.items() if flag not in translation.replaced
        ]
    return UserError("unknown_name", problem, f"{command} {unknown[0]}", "\n  ".join(lines))


def _option_before_command(flag: str, arguments: list[str], depth: int, ctx: Any) -> UserError:
    """Return the error for an option of a group, where a command has to be named first."""
    names = ctx.command.list_commands(ctx)
    hint = f"known: {', '.join(names)}"
    if depth:
        example = shlex.join(["loadgen", *arguments[:depth], names[0], *arguments[depth:]])
        hint += f"\n  type, for example: {example}"
    problem = f"{flag} must follow the name of a command"
    return UserError("unknown_name", problem, f"{ctx.command_path} {flag}", hint)


def _similar_flag(flag: str, known_flags: Iterable[str], ctx: typer.Context) -> str:
    similar = closest(flag, list(known_flags), cutoff=0.7)
    suggestion = f"did you mean {similar}? " if similar else ""
    has_full_help = "--help-all" in ctx.help_option_names
    return f"{suggestion}see {ctx.command_path} {'--help-all' if has_full_help else '--help'}"


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
    arguments = list(error.ctx.find_root().obj or []) if error.ctx is not None else []
    endpoint = _endpoint_without_flag(arguments)
    if endpoint:
        return UserError(
            "unknown_name",
            f"{endpoint} is a URL, and needs the option --url",
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
        f"unexpected argument: {word}",
        f"{command} {word}",
        _hint_for_extra_word(word, arguments, command),
    )


def _endpoint_without_flag(arguments: Sequence[str]) -> str:
    """Return the first URL or `sim:` target that does not follow a flag, or ""."""
    for before, word in pairwise(arguments):
        if not before.startswith("-") and re.match("(sim:|https?://)", word):
            return word
    return ""


def _hint_for_extra_word(word: str, arguments: Sequence[str], command: str) -> str:
    before = next((first for first, second in pairwise(arguments) if second == word), "")
    if re.fullmatch(r"[0-9.]+", before) and re.fullmatch(_TIME_UNITS, word):
        return f"write a number and its unit together: {before}{word}"
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
        "must be a file or folder, not a URL",
        f"{max(param.opts, key=len)} {url}" if is_option else url,
        "use --url for a server, or download the file first",
    )
