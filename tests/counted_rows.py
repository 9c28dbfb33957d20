"""An array of records that counts how many values were read from it.

Tests of the amount of work compare this count, because a clock is too noisy.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np


class CountedRows(np.ndarray[Any, Any]):
    """Records that count reads: `rows.view(CountedRows)`.

    `seen` counts the values of complete columns and of those selected by index or mask.
    """

    seen: ClassVar[Counter[str]] = Counter()

    def __getitem__(self, key: Any) -> Any:
        selected = super().__getitem__(key)
        CountedRows.seen["whole" if isinstance(key, str) else "picked"] += np.size(selected)
        return selected
