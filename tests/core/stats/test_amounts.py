"""Amounts that come over time, and the curve that many intervals may be asked of."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.core.stats.amounts import BINS, Amounts, TimeCurve

S = 1_000_000_000


@pytest.mark.parametrize("hours", [0.01, 1, 30])
def test_curves_of_runs_of_any_length_take_the_same_memory(hours: float) -> None:
    draw = np.random.default_rng(1)
    start = (draw.random(5000) * hours * 3600e9).astype(np.int64)
    end = start + draw.integers(0, 30, 5000) * S
    amount = draw.integers(1, 9, 5000)
    curve = TimeCurve()
    curve.add(start, end, amount)

    assert len(curve._sums_of_changes) == BINS

    span_s = hours * 3600
    low, high = span_s * 0.2, span_s * 0.8
    length = np.maximum(end - start, 1)
    share = np.clip(np.minimum(end, high * 1e9) - np.maximum(start, low * 1e9), 0, None) / length
    at_once = (start >= low * 1e9) & (start <= high * 1e9)
    exact = float((np.where(end > start, share, at_once) * amount).sum())

    assert curve.between(low, high) == pytest.approx(exact, rel=0.005)
    assert curve.between(0, span_s + 100) == pytest.approx(amount.sum(), rel=1e-6)


def test_an_amount_at_the_start_of_an_interval_counts_only_on_request() -> None:
    at_ns = np.array([1, 2, 3], np.int64) * 1_000_000_000
    amounts = Amounts()
    amounts.add(at_ns, at_ns, np.array([1, 10, 100]))
    assert amounts.between(1.0, 2.0) == 10
    assert amounts.between(1.0, 2.0, includes_start=True) == 11
