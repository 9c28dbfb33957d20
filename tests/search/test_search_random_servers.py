"""Searches of drawn servers, workloads and SLOs confirm no load that a long run does not sustain.

This is a sample of `benchmarks/search_drawn.py`, which runs hundreds of them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_search_of_a_random_server_confirms_no_load_that_is_not_sustained(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    judged = import_module("search_drawn").check_search(seed, checks_lower_bound=True)
    assert judged.state == "sustained"
    assert not judged.is_too_high
    assert not judged.is_too_low
