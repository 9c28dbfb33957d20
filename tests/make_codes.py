"""Writes the lists of error codes in `docs/reference/errors.md`, from the two `errors.py`.

`python tests/make_codes.py` writes them again. `test_codes.py` checks that the page is current.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/reference/errors.md"
FILES = {
    "the SDK and of all commands": "sdk/loadgen_sdk/errors.py",
    "the commands only": "loadgen/core/errors.py",
}
"""Maps the title of each list to the file with its codes."""
BEGIN = "<!-- codes: made by tests/make_codes.py from the comments in the two errors.py -->"
END = "<!-- end of the codes -->"
LINE = re.compile(r'(?m)^    (?:# (?P<group>.+)|"(?P<code>\w+)",  # (?P<meaning>.+))$')
"""A line of `Code`: the name of a group of codes, or a code with its meaning."""


def meanings(file: str) -> dict[str, str]:
    """Return the codes of one file with their meanings."""
    lines = LINE.finditer(_code_lines(file))
    return {line["code"]: line["meaning"] for line in lines if line["code"]}


def _code_lines(file: str) -> str:
    """Return the text within `Code = Literal[...]` of a file."""
    source = (ROOT / file).read_text("utf-8")
    return source.partition("\nCode = Literal[\n")[2].partition("\n]\n")[0]


def render_lists() -> str:
    """Return the lists of all codes between their marks."""
    lines = [BEGIN]
    for title, file in FILES.items():
        lines += ["", f"### Codes of {title}"]
        for match in LINE.finditer(_code_lines(file)):
            group, code, meaning = match.groups()
            lines += ["", f"**{group}**", ""] if group else [f"- `{code}`: {meaning}"]
    return "\n".join([*lines, "", END])


def page() -> str:
    """Return the page with the current lists."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + render_lists() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
