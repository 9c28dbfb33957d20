"""A command that a folder of results names is carried out again: what of it has to be typed by the user. Pure.

A folder may be a stranger's. Its command says how much is sent; where to, with which keys, and who may watch, only the
user says.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

from loadgen.core.errors import UserError
from loadgen.shell.run_options import COMMAND_OPTIONS

OF_OTHERS = {
    "--against",
    "--against-model",
    "--against-key-file",
}  # of `validate`: where else it asks
_SWITCHES = {
    name for option in COMMAND_OPTIONS.values() if option.type is bool for name in option.names
}
_REACHES = OF_OTHERS | {
    name for option in COMMAND_OPTIONS.values() if option.reaches for name in option.names
}


def typed_again(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """A command line of before with what is typed now: an option that is given again stands in the place of its own.

    Raises UserError for a secret, which was not stored.
    """
    kept = _kept(before, now)
    if hidden := next((flag for flag, word in pairwise(kept) if "***" in word), None):
        what = "the command that is gone on with had a secret, which is not stored"
        hint = "give it again"
        raise UserError("missing_option", what, hidden, hint)
    return [*kept, *now[1:]]


def taken_up(
    before: Sequence[str], now: Sequence[str], flag: str, folder: Path, depth: int = 1
) -> list[str]:
    """The command line that goes on with a folder: what it names (`before`), with what the user types (`now`).

    Both begin with the same command, of `depth` words. Raises UserError for another command, for a secret that was not
    stored, and for what only the user may say.
    """
    where = f"{flag} {folder}"
    if list(before[:depth]) != list(now[:depth]):
        was = " ".join(("loadgen", *before[:depth]))
        raise UserError("mismatch", "not a result of this command", where, f"it was: {was}")
    command, before, now = now[:depth], before[depth - 1 :], now[depth - 1 :]
    if missing := to_say(_kept(before, now)):
        what = (
            "the folder alone says where to send, and with whose keys; a folder may be a stranger's"
        )
        raise UserError(
            "missing_option", what, where, f"where this is right, add {shlex.join(missing)}"
        )
    # the folder is said twice: an option at the end of `before` that lacks its value would take the first for it
    return [*command[:-1], *typed_again([*before, f"{flag}={folder}"], now)]


def to_say(command: Sequence[str]) -> list[str]:
    """Options of a stored command with their values, as the user has to type them again to go on with its folder."""
    found, rest = list[str](), _apart(command)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in _REACHES:
            continue
        words = [word] if equals or name in _SWITCHES else [word, value := next(rest, "")]
        if not (name in COMMAND_OPTIONS["url"].names and value.startswith("sim:")):
            found += words
    return found


def _kept(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The words of `before` but for options that `now` gives again."""
    typed = {word.partition("=")[0] for word in _apart(now)}
    given = (option.names for option in COMMAND_OPTIONS.values() if typed & set(option.names))
    replaced = {*chain.from_iterable(given), *(typed & OF_OTHERS)}
    kept, rest = list[str](), _apart(before)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in replaced:
            kept.append(word)
        elif not equals and name not in _SWITCHES:
            next(rest, None)
    return kept


def _apart(words: Sequence[str]) -> Iterator[str]:
    """Words in which a short option stands alone: `-kuURL` is -k, -u, URL."""
    for word in words:
        while word[:1] == "-" and word[1:2].isalpha() and len(word) > 2:
            yield word[:2]
            word = f"-{word[2:]}" if word[:2] in _SWITCHES else word[2:]
        yield word
