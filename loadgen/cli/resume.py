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
SWITCHES = {
    flag for option in COMMAND_OPTIONS.values() if option.cli_type is bool for flag in option.flags
}
FLAGS_THAT_MUST_BE_TYPED = COMPARISON_FLAGS | {
    flag for option in COMMAND_OPTIONS.values() if option.must_be_typed for flag in option.flags
}


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
    """Return a stored command line with the options that are typed now in place of its own.

    Raises UserError for a secret, which is not stored.
    """
    remaining_arguments = _without_repeated(stored, typed)
    for flag, word in pairwise(remaining_arguments):
        if "***" in word:
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
    place = f"{flag} {folder}"
    if list(stored[:depth]) != list(typed[:depth]):
        stored_command = " ".join(("loadgen", *stored[:depth]))
        raise UserError(
            "mismatch",
            "the folder holds the result of another command",
            place,
            f"it was written by {stored_command}",
        )
    parent_commands = list(typed[: depth - 1])
    stored_rest = stored[depth - 1 :]
    typed_rest = typed[depth - 1 :]
    missing = arguments_to_type_again(_without_repeated(stored_rest, typed_rest))
    if missing:
        raise UserError(
            "missing_option",
            "servers and keys are not taken from a results folder, because another author may have "
            "written it",
            place,
            f"if these are correct, add {shlex.join(missing)}",
        )
    # The folder is specified twice: if the stored command line ends with an option that lacks its
    # value, that option takes the first one.
    return [*parent_commands, *merge_arguments([*stored_rest, f"{flag}={folder}"], typed_rest)]


def arguments_to_type_again(stored: Sequence[str]) -> list[str]:
    """Return the options of a stored command line that the user has to type to continue it.

    A simulated target need not be typed again.
    """
    arguments: list[str] = []
    for token in _tokens(stored):
        is_simulated = token.flag in COMMAND_OPTIONS["url"].flags and token.value.startswith("sim:")
        if token.flag in FLAGS_THAT_MUST_BE_TYPED and not is_simulated:
            arguments += token.arguments
    return arguments


def _without_repeated(stored: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the stored arguments without the options that are typed again, by any name."""
    typed_flags = {word.partition("=")[0] for word in _split_short_options(typed)}
    replaced = typed_flags & COMPARISON_FLAGS
    for option in COMMAND_OPTIONS.values():
        if typed_flags & set(option.flags):
            replaced |= set(option.flags)
    return [
        word for token in _tokens(stored) if token.flag not in replaced for word in token.arguments
    ]


def _tokens(arguments: Sequence[str]) -> Iterator[Token]:
    """Yield the options and arguments of a command line.

    Only the options that a caller looks for have to be known: the value of any other option counts
    as an argument.
    """
    takes_value = FLAGS_THAT_MUST_BE_TYPED | {
        flag for option in COMMAND_OPTIONS.values() for flag in option.flags
    }
    takes_value -= SWITCHES
    remaining = _split_short_options(arguments)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if equals or flag not in takes_value:
            yield Token(flag, value, (word,))
            continue
        value_word = next(remaining, None)
        if value_word is None:
            yield Token(flag, "", (word,))
        else:
            yield Token(flag, value_word, (word, value_word))


def _split_short_options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with each short option on its own: `-kuURL` is -k, -u and URL."""
    for word in arguments:
        rest = word
        while rest[:1] == "-" and rest[1:2].isalpha() and len(rest) > 2:
            yield rest[:2]
            rest = f"-{rest[2:]}" if rest[:2] in SWITCHES else rest[2:]
        yield rest
