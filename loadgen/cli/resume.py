"""Command lines that continue what a results folder contains.

A folder stores the command that wrote it, and it may come from a stranger. The stored command
decides how much is sent. Where it is sent, with which keys, and who may watch, only the user
specifies.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from loadgen.cli.run_options import COMMAND_OPTIONS
from loadgen.core.errors import UserError

COMPARISON_FLAGS = {"--against", "--against-model", "--against-key-file"}
"""Options of `validate` that name a second endpoint and its key."""

SHARED_FLAGS = {flag for option in COMMAND_OPTIONS.values() for flag in option.flags}
SWITCHES = {
    flag for option in COMMAND_OPTIONS.values() if option.cli_type is bool for flag in option.flags
}
FLAGS_THAT_MUST_BE_TYPED = COMPARISON_FLAGS | {
    flag for option in COMMAND_OPTIONS.values() if option.must_be_typed for flag in option.flags
}
"""Options that name a server, a key or a listener. They are not taken from a results folder."""

_FLAGS_WITH_VALUE = (SHARED_FLAGS | FLAGS_THAT_MUST_BE_TYPED) - SWITCHES


class Token(NamedTuple):
    """An option with its value, or an argument, of a command line.

    Attributes:
        flag: The name of the option; "" for an argument.
        value: The value of the option; "" for a switch.
        arguments: The arguments of the command line.
    """

    flag: str
    value: str
    arguments: tuple[str, ...]


def merge_arguments(stored: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return a stored command line in which the options that are typed now replace stored ones.

    Raises UserError if an option that stays had a secret as its value. Secrets are stored as ***.

    Args:
        stored: The command line that the folder stores.
        typed: The command line that the user typed. Its first argument, the name of the command, is
            left out, because `stored` begins with it.
    """
    remaining_arguments = _without_options_of(typed, stored)
    for flag, value in pairwise(remaining_arguments):
        if "***" in value:
            raise UserError(
                "missing_option",
                "the command to resume had a secret, which is not stored",
                flag,
                "give it again",
            )
    return [*remaining_arguments, *typed[1:]]


def resume_arguments(
    stored: Sequence[str], typed: Sequence[str], flag: str, folder: Path, depth: int = 1
) -> list[str]:
    """Return the command line that continues the work of a results folder.

    Args:
        stored: The command line that the folder stores.
        typed: The command line that the user typed, which has `flag` and the folder.
        flag: The option that names the folder, like --resume.
        folder: The results folder.
        depth: The number of arguments with which both command lines name their command.

    Raises:
        UserError: If the folder is of another command, lacks a secret, or specifies what only the
            user may specify.
    """
    folder_option = f"{flag} {folder}"
    if list(stored[:depth]) != list(typed[:depth]):
        stored_command = " ".join(("loadgen", *stored[:depth]))
        raise UserError(
            "mismatch",
            "the folder holds the result of another command",
            folder_option,
            f"it was written by {stored_command}",
        )
    # The name of a subcommand stays in front, because `merge_arguments` expects it: of `mlperf
    # server`, the parent command is `mlperf`.
    parent_commands = list(typed[: depth - 1])
    stored_rest = stored[depth - 1 :]
    typed_rest = typed[depth - 1 :]
    remaining_arguments = _without_options_of(typed_rest, stored_rest)
    missing = arguments_to_type_again(remaining_arguments)
    if missing:
        raise UserError(
            "missing_option",
            "servers and keys are not taken from a results folder, because another author may have "
            "written it",
            folder_option,
            f"if these are correct, add {shlex.join(missing)}",
        )
    # The folder is specified twice: if the stored command line ends with an option that lacks its
    # value, that option takes the first one.
    return [*parent_commands, *merge_arguments([*stored_rest, f"{flag}={folder}"], typed_rest)]


def arguments_to_type_again(stored: Sequence[str]) -> list[str]:
    """Return the options of a stored command line that the user has to type to continue it.

    These are the options of `FLAGS_THAT_MUST_BE_TYPED`, with their values. A simulated target need
    not be typed again, because it reaches no server.
    """
    arguments: list[str] = []
    for token in _tokens(stored):
        is_url = token.flag in COMMAND_OPTIONS["url"].flags
        is_simulated = is_url and token.value.startswith("sim:")
        if token.flag in FLAGS_THAT_MUST_BE_TYPED and not is_simulated:
            arguments += token.arguments
    return arguments


def _without_options_of(typed: Sequence[str], stored: Sequence[str]) -> list[str]:
    """Return the stored arguments without the options that the typed command line has too.

    An option counts as the same under each of its names: a typed `-u` replaces a stored `--url`.
    """
    typed_flags = {argument.partition("=")[0] for argument in _split_short_options(typed)}
    replaced = typed_flags & COMPARISON_FLAGS
    for option in COMMAND_OPTIONS.values():
        if not typed_flags.isdisjoint(option.flags):
            replaced |= set(option.flags)
    remaining_arguments: list[str] = []
    for token in _tokens(stored):
        if token.flag not in replaced:
            remaining_arguments += token.arguments
    return remaining_arguments


def _tokens(arguments: Sequence[str]) -> Iterator[Token]:
    """Yield the options and arguments of a command line.

    Only shared options and those that must be typed are recognized, because callers look for no
    others. The value of any other option counts as an argument.
    """
    remaining = _split_short_options(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if equals or flag not in _FLAGS_WITH_VALUE:
            yield Token(flag, value, (argument,))
            continue
        following = next(remaining, None)
        if following is None:  # the command line ends without the value
            yield Token(flag, "", (argument,))
        else:
            yield Token(flag, following, (argument, following))


def _split_short_options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with each short option on its own: `-kuURL` becomes -k, -u and URL."""
    for argument in arguments:
        rest = argument
        while _is_joined_short_option(rest):
            flag = rest[:2]
            yield flag
            rest = rest[2:]
            if flag in SWITCHES:  # another short option follows, not a value
                rest = f"-{rest}"
        yield rest


def _is_joined_short_option(argument: str) -> bool:
    """Return True for a short option with something attached to it, like `-c8` or `-ku`."""
    return len(argument) > 2 and argument[0] == "-" and argument[1].isalpha()
