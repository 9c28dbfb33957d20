"""What a test says of a fault: its kind, its code, and what it is about. Its sentence may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest

from loadgen.core.errors import Code


@contextmanager
def refused(
    kind: Any, code: str, key: str | None = None, where: str = ""
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects a fault of that kind inside, or `CombinedError`, one of which has this code, this key and this place."""
    assert code in get_args(Code), f"{code} is no code"
    with pytest.raises(kind) as caught:
        yield caught
    faults = getattr(caught.value, "errors", [caught.value])
    told = [
        (fault.code, getattr(fault, "key", ""), getattr(fault, "where", str(fault)))
        for fault in faults
    ]
    assert any(one[0] == code and key in (None, one[1]) and where in one[2] for one in told), told
