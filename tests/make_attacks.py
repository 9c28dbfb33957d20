"""Write the table of attacks in `benchmarks/attacks.md` from the rows of tests/attacks.

Run `python tests/make_attacks.py` to write it; `attacks/test_attacks.py` checks that it is current.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / "attacks"), str(TESTS)]

from rows import ROWS  # noqa: E402
from scene import table  # noqa: E402

PAGE = TESTS.parent / "benchmarks" / "attacks.md"
BEGIN = "<!-- attacks: made by tests/make_attacks.py from tests/attacks -->"
END = "<!-- end of the attacks -->"


def page() -> str:
    """Return the text of the page with a current table."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(ROWS)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
