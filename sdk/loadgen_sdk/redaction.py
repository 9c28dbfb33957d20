"""What others wrote, as it may be shown: without keys, and without what steers a terminal. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
SHORTEST_SECRET = (
    4  # shorter ones are hidden in URLs only: replacing them in texts would garble the texts
)
_LOOKS_SECRET = re.compile(
    r"(?i)(\b(?:bearer|basic)\s+|\b(?:x-)?api[-_]key[\"']?\s*[:=]\s*[\"']?)[\w+/=.~*-]{4,}|\b(?:sk|pk|nvapi|hf)[-_][\w*-]{8,}"
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with every one of `secrets` (of 4 characters and more) and everything that looks like a key hidden.

    The beginning of a secret at the end of the text (or of a quotation there) is hidden too: the text may have been cut
    in the middle of it.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, HIDDEN)
            quoted = text.rstrip("'\"")
            ends = (
                n
                for n in range(len(secret) - 1, SHORTEST_SECRET - 1, -1)
                if quoted.endswith(secret[:n])
            )
            if length := next(ends, 0):
                text = quoted[:-length] + HIDDEN + text[len(quoted) :]
    return _LOOKS_SECRET.sub(lambda match: (match.group(1) or "") + HIDDEN, text)


def shown(text: str) -> str:
    """`text` on one line, with the characters that steer a terminal (escape, bidi) written as `\\x1b` and `\\u202e`."""
    text = re.sub(r"[\r\n\t]+", " ", text)
    return re.sub(_STEERING, lambda match: match.group().encode("unicode_escape").decode(), text)


_STEERING = "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
