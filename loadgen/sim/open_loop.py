"""An open loop of single requests in virtual time: no request depends on another one's end, so that each replica
simulates its part at once, in C. The result is that of `course.Course`, to the last row. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from loadgen.core.results.record import KIND
from loadgen.core.schedule.chains import Singles
from loadgen.core.schedule.timetable import Schedule
from loadgen.sim.engine.replica import NEVER, Replica
from loadgen.sim.engine.routing import Route
from loadgen.sim.load_bounds import UNBOUNDED, LoadBounds
from loadgen.sim.request_lengths import DrawnAtOnce, Sizes
from loadgen.sim.virtual_rows import FLIGHT, LONG, Flights


def carried(
    schedule: Schedule,
    sizes: Sizes,
    replicas: Sequence[Replica],
    next_replica: Route,
    bounds: LoadBounds = UNBOUNDED,
) -> Flights | None:
    """What the replicas did. None: this is no such load, the engine is not compiled, or a request was refused or took
    longer than its time, which concerns all replicas; then these replicas cannot be used any more.
    """
    if not fits(schedule, replicas):
        return None
    spans, end_ns, cut = schedule.stages, bounds.end_ns(schedule.horizon_ns), KIND["unfinished"]
    number = np.concatenate([span.first_chain + np.arange(len(span.offsets)) for span in spans])
    due = np.concatenate([(span.start_ns or 0) + span.offsets for span in spans])
    unsent = Flights().unsent
    if (stop_ns := bounds.stop_ns) < NEVER:
        end_ns, cut, begun = (
            min(end_ns, stop_ns + bounds.after_stop_ns),
            KIND["interrupted"],
            due <= stop_ns,
        )
        for one in zip(number[~begun].tolist(), due[~begun].tolist(), strict=True):
            unsent.extend((*one, cut))
        number, due = number[begun], due[begun]
    at = np.fromiter((next_replica() for _ in range(len(number))), np.int16, len(number))
    known = sizes if isinstance(sizes, DrawnAtOnce) else None
    lengths = () if known is None else known.of_many(number)
    columns: dict[str, Any] = {
        name: np.empty(len(number), np.int64 if name in LONG else np.int32) for name in FLIGHT
    }
    filled, stretches = 0, Flights().stretches
    for index, replica in enumerate(replicas):
        own = at == index
        given = [np.ascontiguousarray(column[own], np.int64) for column in (number, due, *lengths)]
        asked = (*given, None) if known else (*given, None, None, sizes)
        done = cast(Any, replica).carry(*asked, index, end_ns, bounds.timeout_ns, cut)
        if done is None:
            return None
        flights = np.frombuffer(done[0], np.int64).reshape(-1, len(FLIGHT))
        for place, column in enumerate(columns.values()):
            column[filled : filled + len(flights)] = flights[:, place]
        filled += len(flights)
        stretches.frombytes(done[1])
    is_cut = columns["kind"] > 0
    # In the order of one clock: what is done by its end and replica, then what is cut, as it was due.
    within = np.where(is_cut, columns["number"], 0), np.where(is_cut, 0, columns["replica"])
    order = np.lexsort((*within, columns["end_ns"], is_cut))
    columns["end_ns"][~is_cut] = -1
    for name in FLIGHT:
        columns[name] = columns[name][order]
    return Flights(unsent=unsent, stretches=stretches, columns=columns)


def fits(schedule: Schedule, replicas: Sequence[Replica]) -> bool:
    """Whether this is such a load, and the engine is compiled."""
    is_compiled = hasattr(replicas[0], "carry")
    of_singles = isinstance(schedule.chains, Singles) and schedule.parts == 1
    return (
        is_compiled
        and of_singles
        and not any(span.lanes or span.start_ns is None for span in schedule.stages)
    )
