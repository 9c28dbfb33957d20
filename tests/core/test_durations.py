"""Durations as people write them."""

from __future__ import annotations

import pytest

from loadgen.core import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1m30s", 90), ("1d", 86_400), ("1h5m", 3_900), ("2d12h", 216_000), ("0s", 0), ("1.5m", 90)],
)
def test_a_duration_may_have_several_units(text: str, seconds: float) -> None:
    assert units.duration_ns(text) == seconds * units.NS_PER_S


@pytest.mark.parametrize("text", ["", "30s1m", "1m1m", "1.5m30s", "1m30", "400d", "9999999h9s"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(units.InvalidValueError):
        units.duration_ns(text)


@pytest.mark.parametrize(
    ("text", "did_you_mean"),
    [("30sec", "30s"), ("5 mins", "5m"), ("1hr", "1h"), ("3Days", "3d"), ("250MS", "250ms")],
)
def test_an_unknown_unit_has_a_hint_with_the_known_unit(text: str, did_you_mean: str) -> None:
    with pytest.raises(units.InvalidValueError) as exc_info:
        units.duration_ns(text)
    assert f'"{did_you_mean}"' in exc_info.value.hint
