"""Wrong usage of the command line, as errors with a code, a place and a hint."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import typer

from loadgen.cli.command_translation import KnownOption, translate
from loadgen.core.errors import UserError, closest, did_you_mean

ClickException: Any = next(
    parent for parent in typer.BadParameter.__mro__ if parent.__name__ == "ClickException"
)
"""The base class of the parser's exceptions: of typer's own copy of click, or of the package."""

Context: TypeAlias = Any
"""The context of click: the command that is parsed, with its path, and the contexts above it."""

ParserError: TypeAlias = Any
"""An exception of click for wrong usage. Like `Context`, it has no class that can be imported,
because its class is that of typer's own copy of click, or of the package."""

_COMMANDS_OF_OTHER_TOOLS = {
    ("bench", "serve"): "run",
    ("bench",): "run",
    ("benchmark", "run"): "run",
    ("benchmark",): "run",
    ("profile",): "run",
}
"""Commands of other tools that send a load, with the command of this tool that does."""
_UNEXPECTED_ARGUMENT_HINTS = {"sim": "--preset {}", "run": "give one workload"}
"""For some commands, what to write instead of an unexpected argument, which replaces `{}`."""
_URL_PREFIX = "[A-Za-z][A-Za-z0-9+.-]+:/"
"""The beginning of a URL with one slash: `Path("http://host")` is `http:/host` as text."""
_UNITS = "ms|s|sec|seconds|m|min|minutes|h|hours|req|%"
_INPUT_FILE_ARGUMENTS = ("contract", "dataset", "trace", "workload")
"""The arguments that take a file which the user wrote. All other arguments take a result."""
_RESULT_OPTIONS = ("resume", "extend")
"""The options that take the folder of a result. All other options with a path take a file."""
_MIN_SIMILARITY = 0.7
"""How similar an unknown option must be to a known one (1 is equal) to be suggested."""


def to_user_error(error: ParserError) -> UserError:
    """Return the error to show for an exception that typer raised while it parsed arguments.

    The exceptions of click have no common structure: each kind is recognized by its class name, its
    attributes or its message. Whatever is not recognized counts as an unexpected argument.
    """
    command_path = error.ctx.command_path if error.ctx is not None else "loadgen"
    if type(error).__name__ == "NoSuchOption":
        return _create_unknown_option_error(error, command_path)
    if getattr(error, "param", None) is not None:
        return _create_parameter_error(error, command_path)

    if getattr(error, "option_name", None):
        return UserError(
            "missing_value",
            f"{error.option_name} needs a value",
            error.option_name,
            f"see {command_path} --help",
        )

    unknown_command = re.match("No such command '(.+?)'", str(error.message))
    if unknown_command is not None:
        return _create_unknown_command_error(unknown_command[1], error.ctx)

    return _create_unexpected_argument_error(error, command_path)


def _create_unknown_command_error(name: str, ctx: Context) -> UserError:
    """Return the error for a command that does not exist.

    At the top level, the name may be a command of another tool. The error then shows the command
    line of this tool.
    """
    arguments = _command_line(ctx)
    is_top_level = _count_names(ctx.command_path) == 0

    hint = ""
    if is_top_level:
        other_tool_error = _create_other_tool_error(arguments, ctx)
        if other_tool_error is not None:
            return other_tool_error
        hint = _hint_for_command(name, arguments)

    return UserError(
        "unknown_name",
        f"unknown command: {name}",
        ctx.command_path,
        hint or did_you_mean(name, ctx.command.list_commands(ctx)),
    )


def _create_other_tool_error(arguments: Sequence[str], ctx: Context) -> UserError | None:
    """Return the error for a command of another tool, or None if no other tool has the command.

    The error shows the translated command line: for `loadgen benchmark run --target URL`, it is
    `loadgen run --url URL`.
    """
    for their_command, our_command in _COMMANDS_OF_OTHER_TOOLS.items():
        name_count = len(their_command)
        if tuple(arguments[:name_count]) != their_command:
            continue

        known = _collect_options(ctx.command.get_command(ctx, our_command), ("--help",))
        translation = translate([our_command, *arguments[name_count:]], depth=1, known=known)
        return UserError(
            "unknown_name",
            f"unknown command: {their_command[0]}",
            f"{ctx.command_path} {' '.join(their_command)}",
            f"type: {translation.command}",
        )
    return None


def _command_line(ctx: Context) -> list[str]:
    """Return the whole command line without the name of the program; `main` stores it in `obj`."""
    return list(ctx.find_root().obj or [])


def _count_names(command_path: str) -> int:
    """Return how many arguments name a command: 2 for `loadgen mlperf server`."""
    return len(command_path.split()) - 1


def _hint_for_command(name: str, arguments: Sequence[str]) -> str:
    """Return what to type instead of a word that other tools have as a command, or ""."""
    if name == "version":
        return "type: loadgen --version"
    if name == "help":
        return f"type: {shlex.join(['loadgen', *arguments[1:2], '--help'])}"
    if name in ("serve", "simulate"):
        return "type: loadgen sim --preset gb300-vm"
    return ""


def _collect_options(command: Any, help_flags: Iterable[str]) -> dict[str, KnownOption]:
    """Return the options of a command, by each of their flags.

    `help_flags` are added as switches: click creates them only when the command runs.
    """
    known = {flag: KnownOption(takes_value=False) for flag in help_flags}
    for param in command.params:
        if param.param_type_name != "option":
            continue
        option = KnownOption(takes_value=not (param.is_flag or param.count))
        for flag in (*param.opts, *param.secondary_opts):
            known[flag] = option

    return known


def _create_unknown_option_error(error: ParserError, command_path: str) -> UserError:
    """Return one error for all options that a command does not have, with what to type instead.

    click stops at the first unknown option. A command line that was written for another tool has
    several, so all of them are looked for here, and the whole command line is translated.
    """
    ctx = error.ctx
    arguments = _command_line(ctx)
    depth = _count_names(command_path)
    is_group = hasattr(ctx.command, "list_commands")
    if is_group:
        return _create_option_order_error(error.option_name, arguments, depth, ctx)

    known = _collect_options(ctx.command, ctx.help_option_names)
    translation = translate(arguments, depth, known)
    unknown_flags = translation.unknown or (error.option_name,)
    hints = {
        flag: translation.hints.get(flag) or _suggest_similar(flag, known, ctx)
        for flag in unknown_flags
    }

    command_lines = [f"type: {translation.command}"] if translation.is_changed else []
    if len(unknown_flags) == 1:
        message = f"unknown option: {unknown_flags[0]}"
        hint_lines = [hints[unknown_flags[0]], *command_lines]
    else:
        message = f"unknown options: {', '.join(unknown_flags)}"
        # The translated command line explains the replaced options, so only the others get a hint.
        unreplaced_flags = [flag for flag in unknown_flags if flag not in translation.replaced]
        hint_lines = [*command_lines, *(f"{flag}: {hints[flag]}" for flag in unreplaced_flags)]

    return UserError(
        "unknown_name", message, f"{command_path} {unknown_flags[0]}", "\n  ".join(hint_lines)
    )


def _create_option_order_error(
    flag: str, arguments: list[str], depth: int, ctx: Context
) -> UserError:
    """Return the error for an option that stands before the name of a command, not after it.

    For `loadgen mlperf --model M`, the hint lists the commands of `mlperf` and shows the command
    line with one of them: `loadgen mlperf server --model M`.

    Args:
        flag: The option.
        arguments: The whole command line without the name of the program.
        depth: The number of arguments that name the group of commands: 1 for `mlperf`.
        ctx: The context of the group.
    """
    command_names = ctx.command.list_commands(ctx)
    hint = f"known: {', '.join(command_names)}"
    if depth:
        example_arguments = [*arguments[:depth], command_names[0], *arguments[depth:]]
        example = shlex.join(["loadgen", *example_arguments])
        hint += f"\n  type, for example: {example}"

    problem = f"{flag} must come after the command"
    return UserError("unknown_name", problem, f"{ctx.command_path} {flag}", hint)


def _suggest_similar(flag: str, known_flags: Iterable[str], ctx: Context) -> str:
    """Return a hint with the known option that is most similar to a flag, and where all are listed.

    A command whose help fits on one screen has no `--help-all`.
    """
    similar = closest(flag, list(known_flags), cutoff=_MIN_SIMILARITY)
    suggestion = f"did you mean {similar}? " if similar else ""
    has_full_help = "--help-all" in ctx.help_option_names
    help_flag = "--help-all" if has_full_help else "--help"
    return f"{suggestion}see {ctx.command_path} {help_flag}"


def _create_parameter_error(error: ParserError, command_path: str) -> UserError:
    """Return the error for an option or argument that is missing or has an invalid value.

    Args:
        error: The exception of click, which has the option or argument as its `param`.
        command_path: The names of the program and the command, like `loadgen run`.
    """
    param = error.param
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
    else:
        name = _longest_flag(param)

    if type(error).__name__ == "MissingParameter":
        hint = f"{param.help} See {command_path} --help"
        return UserError("missing_option", f"{name} is missing", command_path, hint)

    message = _restyle_click_message(str(error.message).removeprefix("Value error, "))
    return UserError(
        "invalid_value", message, f"{command_path} {name}", f"see {command_path} --help"
    )


def _longest_flag(param: Any) -> str:
    """Return the name of an option to show: `--url` rather than its short form `-u`."""
    flags: Sequence[str] = param.opts
    return max(flags, key=len)


def _restyle_click_message(message: object) -> str:
    """Return a message of click with a lower-case initial and no full stop, as ours are written."""
    text = str(message).rstrip(".")
    return text[:1].lower() + text[1:]


def _create_unexpected_argument_error(error: ParserError, command_path: str) -> UserError:
    """Return the error for an argument that the command does not take.

    It may be a URL that lacks its option, a unit that is separated from its number, or a value. Any
    other exception of click ends here, too, and gets the message of click.
    """
    arguments = _command_line(error.ctx) if error.ctx is not None else []
    endpoint = _find_endpoint_without_flag(arguments)
    if endpoint:
        return UserError(
            "unknown_name",
            f"{endpoint} is a URL, and needs the option --url",
            f"{command_path} {endpoint}",
            f"--url {endpoint}",
        )

    match = re.search(r"unexpected extra argument.*\((.*)\)", str(error.message))
    if match is None:
        message = _restyle_click_message(error.message)
        return UserError("invalid_value", message, command_path, f"see {command_path} --help")

    argument = match[1].split()[0]
    return UserError(
        "invalid_value",
        f"unexpected argument: {argument}",
        f"{command_path} {argument}",
        _hint_for_unexpected_argument(argument, arguments, command_path),
    )


def _find_endpoint_without_flag(arguments: Sequence[str]) -> str:
    """Return the first URL or `sim:` target that does not follow an option, or ""."""
    for previous_argument, argument in pairwise(arguments):
        follows_option = previous_argument.startswith("-")
        is_endpoint = re.match("(sim:|https?://)", argument) is not None
        if is_endpoint and not follows_option:
            return argument
    return ""


def _hint_for_unexpected_argument(
    argument: str, arguments: Sequence[str], command_path: str
) -> str:
    """Return what to do about an argument that a command does not take.

    If it is a unit that follows a number, as in `--duration 60 s`, the hint is to write both
    together. Otherwise it depends on the command.

    Args:
        argument: The unexpected argument.
        arguments: The whole command line without the name of the program.
        command_path: The names of the program and the command, like `loadgen run`.
    """
    index = arguments.index(argument) if argument in arguments else 0
    previous_argument = arguments[index - 1] if index > 0 else ""
    follows_number = re.fullmatch(r"[0-9.]+", previous_argument) is not None
    is_unit = re.fullmatch(_UNITS, argument) is not None
    if follows_number and is_unit:
        return f"write a number and its unit together: {previous_argument}{argument}"

    help_hint = f"see {command_path} --help"
    command_name = command_path.rpartition(" ")[2]
    command_hint = _UNEXPECTED_ARGUMENT_HINTS.get(command_name)

    return f"{command_hint.format(argument)}; {help_hint}" if command_hint else help_hint


def check_no_url_is_a_path(params: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Raise UserError if the user gave a URL to an option or argument that takes a file or folder.

    Parameters that take a result are not checked: their commands explain how to measure a server
    first, which is a better hint.

    Args:
        params: The options and arguments of the command.
        values: Their values, by name.
    """
    for param in params:
        value = values.get(param.name)
        is_workload = param.name == "workload" and value is not None
        is_path = isinstance(value, Path) or is_workload
        if is_path and not _takes_result(param):
            _reject_url(str(value), param)


def _takes_result(param: Any) -> bool:
    """Return True if an option or argument names a result of an earlier command.

    Most arguments do, and few options.
    """
    if param.param_type_name == "option":
        return param.name in _RESULT_OPTIONS
    return param.name not in _INPUT_FILE_ARGUMENTS


def _reject_url(path_text: str, param: Any) -> None:
    """Raise UserError if the text of a path is a URL, unless a file with that name exists."""
    is_url = re.match(_URL_PREFIX, path_text) is not None
    if not is_url or os.path.exists(path_text):
        return

    url = _restore_double_slash(path_text)
    is_option = param.param_type_name == "option"
    raise UserError(
        "invalid_value",
        "must be a file or folder, not a URL",
        f"{_longest_flag(param)} {url}" if is_option else url,
        "use --url for a server, or download the file first",
    )


def _restore_double_slash(path_text: str) -> str:
    """Return `http:/host`, which is how a `Path` writes a URL, as `http://host`."""
    if "://" in path_text:
        return path_text
    return path_text.replace(":/", "://", 1)
