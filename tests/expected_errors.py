"""Assertions about refused input: the kind, code and location of an error, not its sentence."""

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
    """Expect an error of this kind, or a CombinedError that includes one.

    The error must have this code, this key (unless `key` is None) and a location that contains
    `where`.
    """
    assert code in get_args(Code), f"{code} is no code"
    with pytest.raises(kind) as exc_info:
        yield exc_info
    errors = getattr(exc_info.value, "errors", [exc_info.value])
    assert any(_matches(error, code, key, where) for error in errors), str(exc_info.value)


def _matches(error: Any, code: str, key: str | None, where: str) -> bool:
    if error.code != code:
        return False
    if key is not None and getattr(error, "key", "") != key:
        return False
    return where in getattr(error, "where", str(error))
