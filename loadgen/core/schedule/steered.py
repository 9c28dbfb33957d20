"""A load that is decided while it goes: what decides it, and how its decisions are carried out on a dispatcher. Pure.

Both drivers look once a second, over sockets and in virtual time, and hand over what has ended since the last look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from loadgen.core.schedule.arrivals import at_load
from loadgen.core.schedule.dispatcher import Dispatcher, Start

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.workload import Stage

LOOK_NS = 1_000_000_000


class LoadStep(Struct, frozen=True):
    """From now on this load, for so long at most. It becomes a stage of the run, called `name`."""

    name: str
    load: float
    length_ns: int


class Rest(Struct, frozen=True):
    """Start nothing for now."""


class End(Struct, frozen=True):
    """The load is over."""


Move = LoadStep | Rest | End


class Steering(Protocol):
    """Decides a load by what it sees of it: the same rows at the same instants give the same decisions."""

    def look(self, now_ns: int, rows: NDArray[np.void], in_flight: Sequence[Start]) -> Move | None:
        """What to do now; None: go on. `rows`: of the requests that ended since the last look."""


class Steered:
    """One run whose stages a steering decides. `stages`: those so far; `over`: no more will follow."""

    def __init__(self, steering: Steering, dispatcher: Dispatcher, stage: Stage, seed: int) -> None:
        self._steering, self._dispatcher, self._seed = steering, dispatcher, seed
        self.stages = [stage]
        self.over = False
        self._resting = False
        self.next_look_ns = LOOK_NS

    def look(self, now_ns: int, rows: NDArray[np.void]) -> Move | None:
        """Carry out what the steering decides now, and return it."""
        self.next_look_ns = (now_ns // LOOK_NS + 1) * LOOK_NS
        move = self._steering.look(now_ns, rows, self._dispatcher.started)
        if move is not None:
            self._end_stage(now_ns)
        if isinstance(move, LoadStep):
            stage = self.stages[0].model_copy(
                update={"name": move.name, "duration_ns": move.length_ns}
            )
            self.stages.append(at_load(stage, move.load))
            self._dispatcher.begin_stage(self.stages[-1], self._seed, now_ns)
            self._resting = False
        elif isinstance(move, End):
            self.over = True
        return move

    def stop(self, now_ns: int) -> None:
        """The load was ended from outside."""
        if not self.over:
            self.over = True
            self._end_stage(now_ns)

    def _end_stage(self, now_ns: int) -> None:
        if not self._resting:
            self._dispatcher.end_stage(now_ns)
            self._resting = True
