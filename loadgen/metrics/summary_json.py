"""The summary as JSON: fields in the order of their declaration, so that two summaries can be held against each other.

Pure. `dump` writes what `load` reads; a summary that a newer version wrote is refused rather than half understood.
"""

from __future__ import annotations

import msgspec

from loadgen.errors import UserError
from loadgen.metrics.summary import SCHEMA, Summary
from loadgen.results.manifest import refuse_newer


def dump_summary(summary: Summary) -> bytes:
    """`summary.json`: UTF-8, indented by two, ending in a newline. What is unknown is null, never left out."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def load_summary(data: bytes, where: str = "summary.json") -> Summary:
    """The inverse of `dump`. Fields unknown to this version are passed over.

    Raises UserError for what is no summary, and for one of a newer schema.
    """
    refuse_newer(data, SCHEMA, where)
    try:
        return msgspec.json.decode(data, type=Summary)
    except msgspec.DecodeError as error:
        raise UserError(f"not a summary of a run: {error}", where, "`loadgen report DIR` makes it again") from None


def render(summary: Summary) -> str:
    """What `--json` prints."""
    return dump_summary(summary).decode()
