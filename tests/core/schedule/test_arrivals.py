"""Arrivals: MLPerf's Poisson process to the nanosecond, other processes by closed form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import repository_paths

from loadgen.core.schedule import arrivals
from loadgen.core.schedule.arrivals import Arrivals

ORACLE = json.loads((repository_paths.DATA / "loadgen_oracle.json").read_text())["poisson_schedule"]
SEED = ORACLE["seed_v5.1"]["schedule"]
S = 1_000_000_000


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


LAWS: dict[str, Callable[..., Arrivals]] = {
    "constant": lambda **stop: arrivals.constant_arrivals(250.0, **stop),
    "poisson": lambda **stop: arrivals.poisson_arrivals(250.0, seed=7, **stop),
    "gamma": lambda **stop: arrivals.gamma_arrivals(250.0, burstiness=0.3, rng=rng(7), **stop),
    "ramp": lambda **stop: arrivals.ramp_arrivals(100.0, 400.0, rng=rng(7), **stop),
}


@pytest.mark.parametrize("run", ORACLE["official_runs_v5.1"], ids=lambda run: run["run"])
def test_arrivals_of_official_mlperf_runs_are_reproduced_to_the_nanosecond(
    run: dict[str, int],
) -> None:
    arrival_times = arrivals.poisson_arrivals_at_least(
        run["qps"],
        seed=SEED,
        min_duration_ns=run["min_duration_s"] * S,
        min_count=1,
        multiple_of=24_576,
    )

    assert (len(arrival_times.offsets_ns), arrival_times.end_ns) == (
        run["queries"],
        run["duration_ns"],
    )
    assert arrival_times.offsets_ns[0] == 0
    if run["qps"] == 170:
        assert arrival_times.offsets_ns[-1] == 722_654_092_626  # stated in the oracle's note
    same = arrivals.poisson_arrivals(run["qps"], seed=SEED, count=run["queries"])
    assert np.array_equal(same.offsets_ns, arrival_times.offsets_ns)
    assert same.end_ns == arrival_times.end_ns


def mt19937(seed: int, n: int) -> list[int]:
    """Return the first n outputs of MT19937 as Matsumoto and Nishimura published it (1998)."""
    state = [seed & 0xFFFFFFFF]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    outputs: list[int] = []
    while len(outputs) < n:
        for i in range(624):
            y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7FFFFFFF)
            state[i] = state[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
        for y in state:
            y ^= y >> 11
            y ^= (y << 7) & 0x9D2C5680
            y ^= (y << 15) & 0xEFC60000
            outputs.append(y ^ (y >> 18))
    return outputs[:n]


@pytest.mark.parametrize(
    ("rate", "count", "seeds"),
    [
        (170.0, 3000, [SEED]),
        (
            1e-7,
            300,
            range(60),
        ),  # in gaps of months the last bit of a logarithm is whole nanoseconds
    ],
)
def test_vectorised_gaps_equal_scalar_gaps_to_the_nanosecond(
    rate: float, count: int, seeds: list[int]
) -> None:
    """The rule of the oracle, written out one gap at a time with libm's logarithm."""
    for seed in seeds:
        outputs = mt19937(seed, 2 * count)
        offset, expected = 0, []
        for a, b in zip(outputs[::2], outputs[1::2], strict=True):
            expected.append(offset)
            offset += int(-math.log(1 - (a + b * 2.0**32) / 2.0**64) / rate * 1e9)
        arrival_times = arrivals.poisson_arrivals(rate, seed=seed, count=count)
        assert arrival_times.offsets_ns.tolist() == expected
        assert arrival_times.end_ns == offset


@pytest.mark.parametrize(
    ("rate", "duration_s", "count", "multiple"),
    [(10.0, 60, 1, 1), (10.0, 1, 200, 1), (10.0, 60, 1, 500), (1e6, 0, 1, 1)],
)
def test_arrivals_with_minimums_end_by_the_stop_rule_of_mlperf_loadgen(
    rate: float, duration_s: int, count: int, multiple: int
) -> None:
    arrival_times = arrivals.poisson_arrivals_at_least(
        rate, seed=5, min_duration_ns=duration_s * S, min_count=count, multiple_of=multiple
    )
    longer = arrivals.poisson_arrivals(rate, seed=5, count=2000).offsets_ns
    expected = (
        0  # "continue while last offset < min duration or count < min count", then whole passes
    )
    while expected < count or longer[expected - 1] < duration_s * S or expected % multiple:
        expected += 1

    assert np.array_equal(arrival_times.offsets_ns, longer[:expected])
    assert arrival_times.end_ns == longer[expected]


@pytest.mark.parametrize("law", LAWS)
def test_arrivals_end_at_the_duration_or_the_count_whichever_is_first(law: str) -> None:
    make = LAWS[law]
    both = make(duration_ns=4 * S, count=10_000)

    assert both.end_ns == 4 * S
    assert both.offsets_ns.dtype == np.int64
    assert 850 < len(both.offsets_ns) < 1150
    assert (np.diff(both.offsets_ns) >= 0).all()
    assert 0 <= both.offsets_ns[0] <= both.offsets_ns[-1] < 4 * S
    few_arrivals = make(duration_ns=4 * S, count=17)
    assert np.array_equal(few_arrivals.offsets_ns, both.offsets_ns[:17])
    assert few_arrivals.end_ns == both.offsets_ns[17]  # n gaps belong to n arrivals

    if law != "ramp":  # whose speed of rising comes from the duration
        alone = make(count=17)
        assert np.array_equal(alone.offsets_ns, few_arrivals.offsets_ns)
        assert alone.end_ns == few_arrivals.end_ns

    assert len(make(count=0).offsets_ns) == 0
    assert make(duration_ns=4 * S).offsets_ns.tolist() == both.offsets_ns.tolist()
    with pytest.raises(ValueError, match="need a duration or a count"):
        make()


@pytest.mark.parametrize("rate", [1000.0, 3.0, 7.3, 12_345.678])
def test_constant_arrivals_have_equal_gaps(rate: float) -> None:
    offsets = arrivals.constant_arrivals(rate, count=200_000).offsets_ns
    gaps = np.diff(offsets)
    assert gaps.max() - gaps.min() <= 1  # the rounding to whole ns
    assert abs(int(offsets[-1]) - 199_999 * 1e9 / rate) <= 1  # and none of it adds up
    assert offsets[0] == 0
    if rate == 1000.0:
        assert set(gaps.tolist()) == {1_000_000}


def test_constant_arrivals_end_exactly_at_their_duration() -> None:
    assert (
        len(arrivals.constant_arrivals(10.0, duration_ns=2 * S).offsets_ns) == 20
    )  # the 21st would be due at the end itself
    assert len(arrivals.constant_arrivals(10.0, duration_ns=2 * S + 1).offsets_ns) == 21


def furthest(values: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return sqrt(n) times the Kolmogorov-Smirnov statistic, which exceeds 1.63 in 1 %."""
    ordered = np.sort(values)
    n = len(ordered)
    expected = cdf(ordered)
    up = np.abs(np.arange(1, n + 1) / n - expected).max()
    return float(max(up, np.abs(np.arange(n) / n - expected).max()) * math.sqrt(n))


def erlang_2(x: np.ndarray) -> np.ndarray:  # shape 2, mean 1
    return 1 - np.exp(-2 * x) * (1 + 2 * x)


def half(x: np.ndarray) -> np.ndarray:  # shape 1/2, mean 1: the square of a normal deviate
    return np.vectorize(math.erf)(np.sqrt(x / 2))


def exponential(x: np.ndarray) -> np.ndarray:
    return -np.expm1(-x)


@pytest.mark.parametrize(
    ("arrival_times", "variation", "cdf"),
    [
        (arrivals.poisson_arrivals(50.0, seed=11, count=40_000), 1.0, exponential),
        (
            arrivals.gamma_arrivals(50.0, burstiness=1.0, rng=rng(12), count=40_000),
            1.0,
            exponential,
        ),
        (
            arrivals.gamma_arrivals(50.0, burstiness=2.0, rng=rng(13), count=40_000),
            math.sqrt(0.5),
            erlang_2,
        ),
        (
            arrivals.gamma_arrivals(50.0, burstiness=0.5, rng=rng(14), count=40_000),
            math.sqrt(2.0),
            half,
        ),
    ],
    ids=["poisson", "gamma 1", "gamma 2", "gamma 1/2"],
)
def test_gaps_follow_their_distribution(
    arrival_times: Arrivals, variation: float, cdf: Callable[[np.ndarray], np.ndarray]
) -> None:
    gaps = np.diff(arrival_times.offsets_ns) * 50.0 / 1e9  # in means
    assert gaps.mean() == pytest.approx(1.0, abs=4 * variation / math.sqrt(len(gaps)))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03)
    assert furthest(gaps, cdf) < 1.63
    assert arrival_times.offsets_ns[0] == 0


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 400.0), (400.0, 0.0), (100.0, 300.0), (200.0, 200.0)]
)
def test_arrivals_of_a_ramp_are_poisson_at_the_changing_rate(low: float, high: float) -> None:
    arrival_times = arrivals.ramp_arrivals(low, high, rng=rng(3), duration_ns=100 * S)
    t = arrival_times.offsets_ns / 1e9
    integral = low * t + (high - low) / 100 * t * t / 2  # expected arrivals up to t

    assert len(t) == pytest.approx(20_000, abs=4 * math.sqrt(20_000))
    assert furthest(np.diff(integral), exponential) < 1.63
    assert furthest(integral / 20_000, lambda share: share) < 1.63

    counted_arrivals = arrivals.ramp_arrivals(low, high, rng=rng(4), count=20_000)
    t = counted_arrivals.offsets_ns / 1e9
    assert len(t) == 20_000
    assert counted_arrivals.end_ns == 20_000 / ((low + high) / 2) * S == 100 * S
    assert furthest((low * t + (high - low) / 100 * t * t / 2) / 20_000, lambda share: share) < 1.63


def test_an_infinite_rate_sends_all_requests_at_once() -> None:
    arrival_times = arrivals.constant_arrivals(math.inf, count=100)
    assert arrival_times.offsets_ns.tolist() == [0] * 100
    assert arrival_times.end_ns == 0
    with pytest.raises(ValueError, match="needs a count"):
        arrivals.constant_arrivals(math.inf, duration_ns=S)
