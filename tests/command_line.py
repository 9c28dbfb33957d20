"""`loadgen` as somebody types it, in the process of a test."""

from __future__ import annotations

import pytest

from loadgen.shell.app import main


def exits(*typed: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ending:
        main([str(word) for word in typed])
    assert isinstance(ending.value.code, int)
    return ending.value.code
