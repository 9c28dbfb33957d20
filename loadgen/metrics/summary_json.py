"""The summary as JSON. Fields are in the order of their declaration, so that two files can be compared line by line.

Pure. `load_summary` reads what `dump_summary` writes. It refuses a summary that a newer version wrote, because it might
misread it.
"""

from __future__ import annotations

import msgspec

from loadgen.errors import UserError
from loadgen.metrics import validity
from loadgen.metrics.summary import SCHEMA, Summary
from loadgen.results.manifest import refuse_newer


def dump_summary(summary: Summary) -> bytes:
    """The bytes of `summary.json`: UTF-8, indented by two, with a final newline. Unknown values are null, never left
    out.
    """
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def load_summary(data: bytes, where: str = "summary.json") -> Summary:
    """The inverse of `dump_summary`. Fields that this version does not know are ignored.

    Raises UserError for data that is no summary, and for a summary of a newer schema.
    """
    refuse_newer(data, SCHEMA, where)
    try:
        summary = msgspec.json.decode(data, type=Summary)
    except msgspec.DecodeError as error:
        raise UserError(f"not a summary of a run: {error}", where, "`loadgen report DIR` makes it again") from None
    verdict = validity.with_codes(summary.verdict)
    state = validity.state_reasons(summary.run.state)
    if verdict.valid and state:  # older versions called an interrupted run valid
        verdict = validity.verdict(verdict.limits, state, verdict.warning_codes, verdict.caveat_codes)
    return msgspec.structs.replace(summary, verdict=verdict)


def render(summary: Summary) -> str:
    """The text that `--json` prints."""
    return dump_summary(summary).decode()
