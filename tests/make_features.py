"""Run the check of each feature in tests/features and write `docs/evidence/features.md`.

Run `python tests/make_features.py` to write it; `features/test_features.py` checks that it is
current.
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
