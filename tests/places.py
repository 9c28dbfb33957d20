"""Where tests find what does not lie beside them."""

from pathlib import Path

TESTS = Path(__file__).parent
DATA = TESTS / "data"
ROOT = TESTS.parent
