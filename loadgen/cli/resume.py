"""Command lines that continue what a results folder contains.

A folder stores the command that wrote it, and it may come from a stranger. The stored command
decides how much is sent. Where it is sent, with which keys, and who may watch, only the user
specifies.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence, Set
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
"""Options of `COMMAND_OPTIONS` and `COMPARISON_FLAGS` whose value is written after them."""


class Token(NamedTuple):
    """An option with its value, or an argument, of a command line.

    Attributes:
        flag: The name of the option. For an argument, its text up to the first `=`.
        value: The value of the option; "" for a switch or an argument without `=`.
        arguments: The one or two arguments of the command line that form the option:
            `("--seed", "1")`, or `("--seed=1",)`.
    """

    flag: str
    value: str
    arguments: tuple[str, ...]


def merge_arguments(stored: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return a stored command line with the options of a typed one, which replace stored options.

    Raises UserError if a stored option that remains had a secret as its value. A secret is stored
    as ***, so the user has to type it again.

    Args:
        stored: The command line that the folder stores.
        typed: The command line that the user typed. Its first argument, the name of the command, is
            left out, because `stored` begins with it.
    """
    remaining_arguments = _remove_retyped_options(stored, typed)
    for flag, value in pairwise(remaining_arguments):
        is_hidden_secret = "***" in value
        if is_hidden_secret:
            raise UserError(
                "missing_option",
                "the command to resume used a secret, which is not stored",
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
        depth: The number of arguments that name the command: 1 for `search`, 2 for
            `mlperf server`.

    Raises:
        UserError: If the folder is of another command, lacks a secret, or specifies what only the
            user may specify.
    """
    folder_option = f"{flag} {folder}"
    if list(stored[:depth]) != list(typed[:depth]):
        stored_command_name = " ".join(("loadgen", *stored[:depth]))
        raise UserError(
            "mismatch",
            "the folder holds the result of another command",
            folder_option,
            f"it was written by {stored_command_name}",
        )

    # `merge_arguments` expects command lines that begin with one name. Of `mlperf server`, the name
    # of the parent command, `mlperf`, is taken off here and put back at the end.
    parent_count = depth - 1
    parent_commands = list(typed[:parent_count])
    stored_command_line = stored[parent_count:]
    typed_command_line = typed[parent_count:]

    remaining_arguments = _remove_retyped_options(stored_command_line, typed_command_line)
    missing_arguments = arguments_to_type_again(remaining_arguments)
    if missing_arguments:
        raise UserError(
            "missing_option",
            (
                "URLs and keys are not taken from a results folder, because someone else "
                "may have written it"
            ),
            folder_option,
            f"if these are correct, add {shlex.join(missing_arguments)} to the command",
        )

    # The typed command line specifies the folder, too. It is specified twice because a stored
    # command line that ends with an option without its value would take the first one as the value.
    stored_with_folder = [*stored_command_line, f"{flag}={folder}"]
    return [*parent_commands, *merge_arguments(stored_with_folder, typed_command_line)]


def arguments_to_type_again(stored: Sequence[str]) -> list[str]:
    """Return the options of a stored command line that the user has to type to continue it.

    These are the options of `FLAGS_THAT_MUST_BE_TYPED`, with their values. A simulated target need
    not be typed again, because it reaches no server.
    """
    arguments: list[str] = []
    for token in _parse_tokens(stored):
        is_url = token.flag in COMMAND_OPTIONS["url"].flags
        is_simulated = is_url and token.value.startswith("sim:")
        if token.flag in FLAGS_THAT_MUST_BE_TYPED and not is_simulated:
            arguments += token.arguments
    return arguments


def _remove_retyped_options(stored: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the stored arguments without the options that the user has typed again.

    A typed option replaces the stored one with its value. It counts as the same option under each
    of its names: a typed `-u` replaces a stored `--url`.
    """
    typed_flags = {argument.partition("=")[0] for argument in _split_short_options(typed)}

    # COMMAND_OPTIONS has the shared options only. Those of `validate` have one name each.
    retyped_flags = typed_flags & COMPARISON_FLAGS
    for option in COMMAND_OPTIONS.values():
        if not typed_flags.isdisjoint(option.flags):
            retyped_flags |= set(option.flags)

    remaining_arguments: list[str] = []
    for token in _parse_tokens(stored):
        if token.flag not in retyped_flags:
            remaining_arguments += token.arguments

    return remaining_arguments


def remove_options(
    arguments: Sequence[str], flags_with_value: Set[str], switches: Set[str]
) -> list[str]:
    """Return a command line without some options and their values."""
    return [
        argument
        for token in _parse_tokens(arguments, flags_with_value)
        if token.flag not in flags_with_value and token.flag not in switches
        for argument in token.arguments
    ]


def _parse_tokens(
    arguments: Sequence[str], further_flags_with_value: Set[str] = frozenset()
) -> Iterator[Token]:
    """Yield the options and arguments of a command line, each option together with its value.

    Only the options in `_FLAGS_WITH_VALUE`, and those of the caller, are joined with the argument
    after them, for example `--url` with its URL. Callers look for these options and for switches
    only. The value of any other option is yielded as an argument.
    """
    flags_with_value = _FLAGS_WITH_VALUE | further_flags_with_value
    split_arguments = list(_split_short_options(arguments))
    index = 0
    while index < len(split_arguments):
        argument = split_arguments[index]
        flag, equals, value = argument.partition("=")
        is_last = index + 1 == len(split_arguments)

        is_followed_by_value = flag in flags_with_value and not equals and not is_last
        if is_followed_by_value:
            next_argument = split_arguments[index + 1]
            yield Token(flag, next_argument, (argument, next_argument))
            index += 2
        else:
            yield Token(flag, value, (argument,))
            index += 1


def _split_short_options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with each short option on its own: `-kuURL` becomes -k, -u and URL.

    `-k` is a switch, so another short option follows it: `uURL` is read as `-uURL`. `-u` takes a
    value, which is all the text that follows it.
    """
    for argument in arguments:
        remaining_text = argument
        while _is_joined_short_option(remaining_text):
            flag = remaining_text[:2]
            yield flag
            remaining_text = remaining_text[2:]
            if flag in SWITCHES:
                remaining_text = f"-{remaining_text}"

        yield remaining_text


def _is_joined_short_option(argument: str) -> bool:
    """Return True for a short option with something attached to it, like `-c8` or `-ku`."""
    return len(argument) > 2 and argument[0] == "-" and argument[1].isalpha()
