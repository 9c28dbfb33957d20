"""Writes the tables of `docs/evidence/features.md`: it runs the check of each feature (tests/features) and writes what it said.

`python tests/make_features.py` writes it again; `features/test_features.py` checks that it is what it would write.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / "features"), str(TESTS)]

from feature_page import PAGE, page  # noqa: E402
from servers import stop_all  # noqa: E402

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(Path(folder)), "utf-8")
    stop_all()
