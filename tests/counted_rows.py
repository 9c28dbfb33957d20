"""Rows that count how many values were read of them: what a test of work looks at in the place of a clock."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np


class CountedRows(np.ndarray[Any, Any]):
    """`rows.view(CountedRows)`. `seen`: values in columns handed out whole, and those picked by place or mask."""

    seen: ClassVar[Counter[str]] = Counter()

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        CountedRows.seen["whole" if isinstance(key, str) else "picked"] += np.size(found)
        return found
