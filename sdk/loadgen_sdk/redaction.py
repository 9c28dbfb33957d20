"""Make texts of others safe to show, without keys and without terminal controls. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"

MIN_SECRET_CHARS = 4
"""Shorter secrets are hidden in URLs only, because replacing them in texts would garble them."""

_LOOKS_SECRET = re.compile(
    r"(?i)(\b(?:bearer|basic)\s+|\b(?:x-)?api[-_]key[\"']?\s*[:=]\s*[\"']?)[\w+/=.~*-]{4,}"
    r"|\b(?:sk|pk|nvapi|hf)[-_][\w*-]{8,}"
)
_LINE_BREAKS = re.compile(r"[\r\n\t]+")
_TERMINAL_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text in which secrets, and everything that looks like a key, are replaced by `***`.

    The beginning of a secret at the end of the text is replaced too, because the text may have been
    cut in the middle of it. A longer secret comes first, since it may contain a shorter one.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS:
            text = _hide_cut_secret(text.replace(secret, HIDDEN), secret)
    return _LOOKS_SECRET.sub(_hide_match, text)


def escape_controls(text: str) -> str:
    r"""Return a text on one line, with characters that steer a terminal escaped as `\x1b`."""
    return _TERMINAL_CONTROLS.sub(_escape_match, _LINE_BREAKS.sub(" ", text))


def _hide_cut_secret(text: str, secret: str) -> str:
    """Hide the beginning of a secret at the end of a text, or before quotation marks at its end."""
    unquoted = text.rstrip("'\"")
    for length in range(len(secret) - 1, MIN_SECRET_CHARS - 1, -1):
        if unquoted.endswith(secret[:length]):
            return unquoted[:-length] + HIDDEN + text[len(unquoted) :]
    return text


def _hide_match(match: re.Match[str]) -> str:
    """Hide a key, but not the word before it that names it."""
    return (match.group(1) or "") + HIDDEN


def _escape_match(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()
