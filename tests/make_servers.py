"""Writes the table of servers in `docs/reference/servers.md` from the rows of the server profiles.

`python tests/make_servers.py` writes it again. `sdk/test_wire_formats.py` checks that it is
current.
"""

from __future__ import annotations

from pathlib import Path

from loadgen_sdk.wire_formats.server_profiles import SERVERS

PAGE = Path(__file__).parent.parent / "docs/reference/servers.md"
BEGIN = (
    "<!-- servers: made by tests/make_servers.py from the rows of "
    "sdk/loadgen_sdk/wire_formats/server_profiles.py -->"
)
END = "<!-- end of the servers -->"
HEAD = (
    "`--server`",
    "server",
    "fields for an exact length",
    "response to an unknown field",
    "response to an unknown model",
    "reports cached tokens",
    "reports its own timing",
)


def table() -> str:
    """Return the table of all servers between its marks."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for row in SERVERS.builtin_rows:
        exact = ", ".join(f"`{field}`" for field in row.length_fields) or "none"
        answers = (
            row.response_to_unknown_field,
            row.response_to_unknown_model,
            row.cached_tokens_reported,
            row.timing_reported,
        )
        lines.append((f"`{row.name}`", row.title, exact, *answers))
    return "\n".join([BEGIN, "", *(f"| {' | '.join(cells)} |" for cells in lines), "", END])


def page() -> str:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
