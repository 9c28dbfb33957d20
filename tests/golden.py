"""Golden files: complete outputs in `tests/data/golden`, compared with the output of each run.

`pytest --renew-golden` writes the files again; read the difference in git before you commit it.
"""

from __future__ import annotations

import re
from pathlib import Path

GOLDEN_DIR = Path(__file__).parent / "data" / "golden"

_RUN_ID = re.compile(r"\b\d{8}-\d{6}-[0-9a-f]{4}\b")
_DATE = re.compile(
    r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
)
_VERSION = re.compile(r"\bloadgen \d+\.\d+\S*")
_SEED = re.compile(r"(--seed[ =])\d+")
_DURATION = re.compile(r"\b\d[\d.,]* (?:min|ms|us|ns|h|s)\b(?: \d[\d.]* (?:min|s)\b)*")

_renews_files = False


def set_renewal(renews_files: bool) -> None:
    """Let `check_golden` write the files in place of comparing with them."""
    global _renews_files  # noqa: PLW0603 - set once, from the option of pytest
    _renews_files = renews_files


def check_golden(name: str, text: str) -> None:
    """Assert that a text equals `tests/data/golden/NAME.txt`.

    The text must not vary between runs: pass it through `normalize` first where it does.
    """
    path = GOLDEN_DIR / f"{name}.txt"
    if _renews_files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return
    assert path.is_file(), f"{path} does not exist: pytest --renew-golden writes it"
    assert text == path.read_text("utf-8"), f"{path.name} differs: pytest --renew-golden renews it"


def normalize(text: str, *paths: Path, durations: bool = False) -> str:
    """Return the text with everything that varies between two runs replaced by a placeholder.

    Replaced are the given paths (`<PATH>`, `<PATH-2>`, ...), the variable part of run identifiers
    (`<ID>`), dates with or without a time (`<DATE>`), the version of loadgen (`<VERSION>`) and the
    value of `--seed` (`<SEED>`). With `durations`, numbers with a unit of time become
    `<DURATION>`: for output that has wall-clock times.
    """
    for number, path in enumerate(paths, start=1):
        text = text.replace(str(path), "<PATH>" if number == 1 else f"<PATH-{number}>")
    text = _RUN_ID.sub("<ID>", text)
    text = _DATE.sub("<DATE>", text)
    text = _VERSION.sub("loadgen <VERSION>", text)
    text = _SEED.sub(r"\1<SEED>", text)
    if durations:
        text = _DURATION.sub("<DURATION>", text)
    return text
