"""Writes the lists of error codes in `docs/reference/errors.md` from the comments in the two `errors.py`.

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
BEGIN = "<!-- codes: made by tests/make_codes.py from the comments in the two errors.py -->"
END = "<!-- end of the codes -->"
LINE = re.compile(r'(?m)^    (?:# (?P<group>.+)|"(?P<code>\w+)",  # (?P<meaning>.+))$')


def meanings(file: str) -> dict[str, str]:
    """The codes in a table of one file, and what each says."""
    return {
        match["code"]: match["meaning"] for match in LINE.finditer(_table(file)) if match["code"]
    }


def _table(file: str) -> str:
    return (
        (ROOT / file).read_text("utf-8").partition("\nCode = Literal[\n")[2].partition("\n]\n")[0]
    )


def tables() -> str:
    lines = [BEGIN]
    for whose, file in FILES.items():
        lines += ["", f"### Codes of {whose}"]
        for match in LINE.finditer(_table(file)):
            group, code, meaning = match.groups()
            lines += ["", f"**{group}**", ""] if group else [f"- `{code}`: {meaning}"]
    return "\n".join([*lines, "", END])


def page() -> str:
    """The page with the tables as they should be."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
