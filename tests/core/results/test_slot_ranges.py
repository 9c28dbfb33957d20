"""Which slots have a row, as runs: the same slots as the rows, in whatever order they came, and few runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.results import slot_ranges
from loadgen.core.results.manifest import Header, StagePlan
from loadgen.core.results.record import ROW


@given(
    workers=st.integers(1, 5),
    turns=st.integers(1, 4),
    lanes=st.sampled_from([None, 1, 3, 7]),
    chains=st.integers(1, 90),
    disorder=st.integers(1, 400),
    batch=st.integers(1, 60),
    drawn=st.randoms(use_true_random=False),
)
def test_runs_are_the_slots(
    workers: int,
    turns: int,
    lanes: int | None,
    chains: int,
    disorder: int,
    batch: int,
    drawn: object,
) -> None:
    header = Header(
        workers=workers, turns=turns, stages=(StagePlan(), StagePlan(concurrency=lanes))
    )
    mine = [
        (stage, chain)
        for stage in (0, 1)
        for chain in range(chains)
        if (chain % (lanes or chains)) % workers == 0
    ]
    slots = [
        (
            stage,
            -1 if stage == 0 or lanes is None else chain % lanes,
            (stage * chains + chain) * turns + turn,
        )
        for stage, chain in mine
        for turn in range(turns)
    ]
    come = sorted(slots, key=lambda slot: slot[2] + drawn.random() * disorder)[
        : len(slots) * 3 // 4
    ]  # type: ignore[attr-defined]
    rows = np.zeros(len(come), ROW)
    for field, column in zip(
        ("stage", "lane", "slot"), zip(*come, strict=True) if come else ((), (), ()), strict=True
    ):
        rows[field] = column
    runs = np.zeros(0, slot_ranges.RUN)
    for start in range(0, len(rows), batch):
        runs = slot_ranges.joined(
            np.concatenate((runs, slot_ranges.of(rows[start : start + batch], header))), turns
        )
    there = {slot for _, _, slot in come}
    numbers = np.arange(2 * chains * turns + 5)
    assert np.flatnonzero(slot_ranges.among(runs, numbers)).tolist() == sorted(there)
    late = numbers[len(numbers) // 3 :]
    assert late[slot_ranges.among(runs, late)].tolist() == sorted(
        slot for slot in there if slot >= late[0]
    )


def test_a_long_run_takes_no_more_room_than_a_short_one() -> None:
    for lanes, header in (
        (16, Header(workers=2, stages=(StagePlan(concurrency=16),))),
        (None, Header(workers=2)),
    ):
        runs, sizes = np.zeros(0, slot_ranges.RUN), []
        for start in range(0, 200_000, 10_000):
            rows = np.zeros(5_000, ROW)
            rows["slot"] = np.random.default_rng(start).permutation(
                np.arange(start, start + 10_000, 2)
            )
            rows["lane"] = -1 if lanes is None else rows["slot"] % lanes
            runs = slot_ranges.joined(np.concatenate((runs, slot_ranges.of(rows, header))), 1)
            sizes.append(len(runs))
        assert set(sizes) == {8 if lanes else 1}
