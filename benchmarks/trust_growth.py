"""How often is a load called not sustained although nothing grows? Part of trust.py.

The first half of the module tests the detection of growth, which needs loads of several minutes.
The second half tests short loads, in which only the number of delayed requests can be seen.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import drawn
import numpy as np
from drawn import FloatArray
from make_examples import S, blank
from numpy.typing import NDArray
from trust_tables import Column, RowTable, format_fraction

from loadgen.core.metrics import growth, shortfall
from loadgen.core.metrics.columns import Columns
from loadgen.core.stats import trend

# They keep random numbers apart from those that other parts draw with the same seed.
RACK_RNG_STREAM = 11
SHORT_LOAD_RNG_STREAM = 13

REPLICAS = 72  # those of a rack
# The test for growth looks at two series of each replica: its TTFT and its requests in flight.
SERIES_PER_RACK = 2 * REPLICAS
WANDERING_SIGMA = 0.15
TIME_CONSTANTS_S = (1, 10, 60)
WANDERING_LENGTHS_S = (150, 300, 600)
DRAWN_LENGTHS_S = (600, 2400)
GROWING_KINDS = ("diurnal", "autoscaling")  # servers that do get slower for a long time
MAX_CALLED_GROWING_FRACTION = 0.03

SERVER_SLOTS = 20
SHORT_RATE_PER_S = 20.0
SHORT_LENGTHS_S = (15.0, 30.0)
# The used fraction of the slots. The slots suffice for the first two loads, but not for the third.
SHORT_LOADS = (0.7, 0.9, 2.0)
MAX_WRONGLY_REFUSED_FRACTION = 0.03  # for all kinds of servers together
MAX_WRONGLY_REFUSED_FRACTION_OF_KIND = 0.06


def simulate_wandering_rack(
    rng: np.random.Generator, length_s: float, time_constant_s: float
) -> list[FloatArray]:
    """Return what the test for growth sees of a rack whose replicas wander but do not grow.

    There are SERIES_PER_RACK independent series around 1. Each is a first-order autoregressive
    process with the standard deviation WANDERING_SIGMA. The values of a series are means over
    growth.BLOCKS equal blocks of a load of `length_s`.
    """
    block_s = length_s / growth.BLOCKS
    steps_per_block = max(4, round(block_s / 2))  # steps of about 2 s, but at least 4 of them
    steps = growth.BLOCKS * steps_per_block
    step_s = length_s / steps
    correlation = math.exp(-step_s / time_constant_s)
    noise_factor = math.sqrt(1 - correlation * correlation)

    values = np.empty((SERIES_PER_RACK, steps))
    current = rng.normal(0, 1, SERIES_PER_RACK)
    for step in range(steps):
        noise = rng.normal(0, 1, SERIES_PER_RACK)
        current = correlation * current + noise_factor * noise
        values[:, step] = current

    blocks = values.reshape(SERIES_PER_RACK, growth.BLOCKS, steps_per_block)
    return list(1 + WANDERING_SIGMA * blocks.mean(axis=2))


def simulate_drawn_rack(kind: str, rack_number: int, length_s: float) -> list[FloatArray]:
    """Return what the test for growth sees of a rack of servers that are drawn from seeds.

    Each of the SERIES_PER_RACK series follows the slowdown factors of a server of its own, with 5 %
    of noise. As in the test, only the second half of the load counts, in means over equal blocks.
    """
    times_s = np.arange(0, length_s, 1.0)

    rack = []
    for series_number in range(SERIES_PER_RACK):
        server_seed = rack_number * SERIES_PER_RACK + series_number
        server = drawn.draw_server(kind, server_seed)
        rng = np.random.default_rng([server_seed, RACK_RNG_STREAM])
        factors = server.draw_run_factors(times_s, rng)
        values = factors * rng.lognormal(0, 0.05, len(times_s))
        second_half = values[len(values) // 2 :]
        rack.append(average_blocks(second_half))

    return rack


def average_blocks(values: FloatArray) -> FloatArray:
    """Return the means over growth.BLOCKS equal blocks, without the values that are left over."""
    values_per_block = len(values) // growth.BLOCKS
    complete_blocks = values[: values_per_block * growth.BLOCKS]
    means: FloatArray = complete_blocks.reshape(growth.BLOCKS, -1).mean(axis=1)
    return means


def is_called_growing(rack: Sequence[FloatArray]) -> bool:
    """Return whether the test for growth says that any series of a rack grows."""
    trends = trend.find_trends(rack)
    return any(series_trend is not None and series_trend.grows for series_trend in trends)


def is_first_called_growing(rack: Sequence[FloatArray]) -> bool:
    """Return whether the test for growth says that the first series of a rack grows."""
    first_trend, *_ = trend.find_trends(rack)
    return first_trend is not None and first_trend.grows


def double_first_series(rack: Sequence[FloatArray]) -> list[FloatArray]:
    """Return a rack whose first series doubles during the load; its mean stays the same."""
    first_series, *other_series = rack
    growth_factors = np.linspace(2 / 3, 4 / 3, growth.BLOCKS)
    return [first_series * growth_factors, *other_series]


class GrowthCounts(NamedTuple):
    """How often the test for growth called racks growing.

    Attributes:
        racks: How many racks without growth were tested.
        false_alarms: How many of them were called growing.
        doubling_racks: How many racks were tested in which one series doubles.
        detected: In how many of these the doubling was detected.
    """

    racks: int
    false_alarms: int
    doubling_racks: int
    detected: int

    def is_within_limit(self) -> bool:
        """Return whether false alarms are rare enough."""
        return self.false_alarms <= MAX_CALLED_GROWING_FRACTION * self.racks


def count_growing_racks(rack_count: int, time_constant_s: int, length_s: int) -> GrowthCounts:
    """Test wandering racks for growth, and a quarter of them again with a series that doubles."""
    doubling_racks = rack_count // 4
    false_alarms = 0
    detected = 0
    for rack_number in range(rack_count):
        rng = np.random.default_rng([rack_number, time_constant_s, length_s])
        rack = simulate_wandering_rack(rng, length_s, time_constant_s)
        if is_called_growing(rack):
            false_alarms += 1
        if rack_number < doubling_racks and is_first_called_growing(double_first_series(rack)):
            detected += 1

    return GrowthCounts(rack_count, false_alarms, doubling_racks, detected)


def print_wandering_racks(rack_count: int) -> bool:
    """Print how often racks are called growing whose replicas wander but do not grow.

    Returns:
        Whether the false alarms are within their limit.
    """
    print(
        f"\nsustained: {rack_count} racks of {REPLICAS} replicas that wander, second half of a "
        f"load (limit {MAX_CALLED_GROWING_FRACTION:.0%})"
    )
    table = RowTable(
        Column("wanders for", 14),
        Column("second half", 14),
        Column("called growing", 18),
        Column("one that doubles found", 26),
    )
    table.print_header()

    is_within_limit = True
    for time_constant_s in TIME_CONSTANTS_S:
        for length_s in WANDERING_LENGTHS_S:
            counts = count_growing_racks(rack_count, time_constant_s, length_s)
            cells = [
                f"{time_constant_s} s",
                f"{length_s} s",
                f"{counts.false_alarms / counts.racks:.1%}",
                f"{counts.detected} of {counts.doubling_racks}",
            ]
            table.print_row(cells, is_within_limit=counts.is_within_limit())
            is_within_limit &= counts.is_within_limit()

    return is_within_limit


def count_growing_drawn_racks(kind: str, rack_count: int, length_s: int) -> int:
    """Return how many racks of servers of a kind, drawn from seeds, are called growing."""
    called_growing = 0
    for rack_number in range(rack_count):
        rack = simulate_drawn_rack(kind, rack_number, length_s)
        if is_called_growing(rack):
            called_growing += 1
    return called_growing


def print_drawn_racks(kinds: Sequence[str], rack_count: int) -> bool:
    """Print how often racks of servers are called growing that are drawn from seeds.

    The counts of kinds that do grow are in brackets and have no limit.

    Returns:
        Whether the false alarms of each other kind are within their limit.
    """
    table = RowTable(Column("replicas", 14), Column("load", 14), Column("called growing", 26))
    table.print_header()

    is_within_limit = True
    for kind in kinds:
        for length_s in DRAWN_LENGTHS_S:
            called_growing = count_growing_drawn_racks(kind, rack_count, length_s)
            cell = format_fraction(called_growing, rack_count)
            is_row_within_limit = called_growing <= MAX_CALLED_GROWING_FRACTION * rack_count
            if kind in GROWING_KINDS:
                cell = f"({cell})"
                is_row_within_limit = True

            table.print_row([kind, f"{length_s} s", cell], is_within_limit=is_row_within_limit)
            is_within_limit &= is_row_within_limit

    return is_within_limit


class SlotTimes(NamedTuple):
    """When each request gets a slot of the server, and when it ends, in seconds."""

    starts_s: FloatArray
    ends_s: FloatArray


def assign_slots(arrivals_s: FloatArray, service_times_s: FloatArray) -> SlotTimes:
    """Serve requests on SERVER_SLOTS slots, in the order of their arrival.

    A request that finds no free slot waits for the next slot that gets free.
    """
    starts_s = np.empty(len(arrivals_s))
    ends_s = np.empty(len(arrivals_s))
    free_times_s = [0.0] * SERVER_SLOTS  # a heap: the slot that gets free first comes first

    for index, arrival_s in enumerate(arrivals_s.tolist()):
        slot_free_s = heapq.heappop(free_times_s)
        starts_s[index] = max(arrival_s, slot_free_s)
        ends_s[index] = starts_s[index] + service_times_s[index]
        heapq.heappush(free_times_s, ends_s[index])

    return SlotTimes(starts_s, ends_s)


def simulate_short_load(
    kind: str, seed: int, length_s: float, used_fraction: float
) -> NDArray[np.void]:
    """Return the request records of a short load on a server that is drawn from a seed.

    A request gets its first token as soon as it gets a slot, and has the slot until its end. The
    times that requests need are such that they use `used_fraction` of the slots on average. Above
    1, the server cannot keep up.
    """
    used_percent = round(100 * used_fraction)
    rng = np.random.default_rng([seed, SHORT_LOAD_RNG_STREAM, round(length_s), used_percent])
    request_count = rng.poisson(SHORT_RATE_PER_S * length_s)
    arrivals_s = np.sort(rng.random(request_count)) * length_s

    server = drawn.draw_server(kind, seed)
    factors = server.draw_run_factors(arrivals_s, rng)
    relative_times = factors * rng.lognormal(0, 0.5, request_count)  # responses of unlike lengths
    mean_service_time_s = used_fraction * SERVER_SLOTS / SHORT_RATE_PER_S
    service_times_s = relative_times / relative_times.mean() * mean_service_time_s
    slot_times = assign_slots(arrivals_s, service_times_s)

    records = blank(request_count)
    records["session"] = -1  # no session
    records["due_ns"] = (arrivals_s * S).astype(np.int64)
    records["sent_ns"] = records["due_ns"]
    records["first_token_ns"] = (slot_times.starts_s * S).astype(np.int64)
    records["end_ns"] = (slot_times.ends_s * S).astype(np.int64)
    records["done_ns"] = records["end_ns"]
    return records


def count_refused_loads(kind: str, used_fraction: float, loads_per_length: int) -> int:
    """Return how many short loads are called not sustained, each on another server.

    The servers are drawn from seeds. There are `loads_per_length` loads of each length.
    """
    refused = 0
    for length_s in SHORT_LENGTHS_S:
        for seed in range(loads_per_length):
            records = simulate_short_load(kind, seed, length_s, used_fraction)
            if shortfall.find_shortfall([Columns(records)]) is not None:
                refused += 1
    return refused


def print_short_loads(kinds: Sequence[str], loads_per_length: int) -> bool:
    """Print how many loads that are too short to see growth are called not sustained.

    Returns:
        Whether the wrong refusals of each kind of server, and of all together, are within limits.
    """
    print(
        f"\nshort: loads of 15 and 30 s, {loads_per_length} of each kind and length: refused as "
        f"not sustained"
    )
    load_columns = [Column(f"{fraction:.0%} of the slots", 26) for fraction in SHORT_LOADS]
    table = RowTable(Column("kind", 14), *load_columns)
    table.print_header()
    loads_per_kind = len(SHORT_LENGTHS_S) * loads_per_length

    is_within_limit = True
    refused_of_all_kinds = Counter[float]()
    for kind in kinds:
        refused = {
            fraction: count_refused_loads(kind, fraction, loads_per_length)
            for fraction in SHORT_LOADS
        }
        refused_of_all_kinds.update(refused)
        is_within_limit &= print_refused_loads(
            table, kind, refused, loads_per_kind, MAX_WRONGLY_REFUSED_FRACTION_OF_KIND
        )

    is_within_limit &= print_refused_loads(
        table,
        "all of them",
        refused_of_all_kinds,
        loads_per_kind * len(kinds),
        MAX_WRONGLY_REFUSED_FRACTION,
    )
    return is_within_limit


def print_refused_loads(
    table: RowTable,
    name: str,
    refused_by_fraction: Mapping[float, int],
    load_count: int,
    max_wrong_fraction: float,
) -> bool:
    """Print the row of a kind of server: how many of `load_count` loads were refused.

    `refused_by_fraction` has the number of refused loads by the used fraction of the slots. A
    refusal is wrong where the slots suffice, which is where the fraction is below 1.

    Returns:
        Whether wrong refusals are at most `max_wrong_fraction` of the loads.
    """
    wrongly_refused = max(
        refused for fraction, refused in refused_by_fraction.items() if fraction < 1
    )
    is_within_limit = wrongly_refused <= max_wrong_fraction * load_count
    cells = [format_fraction(refused, load_count) for refused in refused_by_fraction.values()]
    table.print_row([name, *cells], is_within_limit=is_within_limit)
    return is_within_limit
