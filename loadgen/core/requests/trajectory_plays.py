"""Which part of which recorded session each session of a run sends.

Sending a recorded session once, or a part of it, is called a play. The first sessions of a run that
begins in the middle fill the cache of the server, one for each virtual user. The next ones continue
after them, and all later ones are complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.errors import UserError
from loadgen.core.requests.sampling import derive_key, random_bytes, random_integer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.workload.trajectories import Trajectories
    from loadgen.core.workload.trajectory_data import TrajectoryData

TURNS_TO_SPLIT = 2
"""A session can begin in the middle if it has a turn that fills the cache and one after it."""


class Play(NamedTuple):
    """What one session of a run sends.

    Attributes:
        number: The number of the play. The session that fills the cache and the one that continues
            after it are one play, so that they have the same salt.
        trajectory: The index of the recorded session.
        first_turn: The first recorded turn that is sent, from 0.
        turn_count: How many turns are sent.
        fills_cache: Whether it only fills the cache, with a response of one token.
    """

    number: int
    trajectory: int
    first_turn: int
    turn_count: int
    fills_cache: bool = False


class TrajectoryPlays:
    """The plays of a run, by the number of the session. They have no end.

    Attributes:
        data: The recorded sessions.
        max_turns: The largest number of turns of a play.
    """

    def __init__(
        self, data: TrajectoryData, requests: Trajectories, seed: int, cache_fills: int
    ) -> None:
        """Decide the order of the recorded sessions.

        Args:
            data: The recorded sessions.
            requests: In which order they are sent, and where the first ones begin.
            seed: Decides a shuffled order, and the turns in which sessions begin.
            cache_fills: How many sessions at the start of the run fill the cache.

        Raises:
            UserError: Sessions shall begin in the middle, but none has a second turn.
        """
        self.data = data
        self.max_turns = int(data.turn_counts.max())
        self._key = derive_key(seed)
        self._cache_fills = cache_fills
        self._order = self._draw_order(is_shuffled=requests.order == "shuffled")
        has_second_turn = data.turn_counts[self._order] >= TURNS_TO_SPLIT
        self._splittable = self._order[has_second_turn]

        if requests.start == "middle" and not len(self._splittable):
            problem = (
                "no session of the data set has a second turn, so none can begin in the middle"
            )
            hint = "use start: beginning, or a data set of sessions with several turns"
            raise UserError("unsupported", problem, str(data.path), hint)

    def play(self, session: int) -> Play:
        """Return what the session with a number sends, from 0 on."""
        if session < self._cache_fills:
            begun = self._begun_play(session)
            return begun._replace(turn_count=1, fills_cache=True)

        number = session - self._cache_fills
        if number < self._cache_fills:
            begun = self._begun_play(number)
            return begun._replace(first_turn=begun.first_turn + 1, turn_count=begun.turn_count - 1)

        trajectory = int(self._order[number % len(self._order)])
        turn_count = int(self.data.turn_counts[trajectory])
        return Play(number, trajectory, first_turn=0, turn_count=turn_count)

    def turn_counts(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the number of turns of each of `count` sessions, from session `first` on."""
        first_complete_session = 2 * self._cache_fills
        if first >= first_complete_session:
            numbers = np.arange(first, first + count) - self._cache_fills
            trajectories = self._order[numbers % len(self._order)]
            counts: NDArray[np.int64] = self.data.turn_counts[trajectories]
            return counts

        return np.array(
            [self.play(session).turn_count for session in range(first, first + count)], np.int64
        )

    def pass_of(self, play: Play) -> int:
        """Return how many times the complete data set had been sent before a play."""
        return play.number // len(self._order)

    def _begun_play(self, number: int) -> Play:
        """Return a play from the turn on that fills the cache, which has at least one turn after.

        The turn is drawn from the seed, every possible turn with the same probability.
        """
        trajectory = int(self._splittable[number % len(self._splittable)])
        turn_count = int(self.data.turn_counts[trajectory])
        possible_turns = turn_count - 1
        first_turn = random_integer(self._key, "first turn", number, 8) % possible_turns
        return Play(number, trajectory, first_turn, turn_count - first_turn)

    def _draw_order(self, *, is_shuffled: bool) -> NDArray[np.int64]:
        """Return the indexes of the recorded sessions in the order in which they are sent.

        They are shuffled by sorting them by a random integer of 64 bits for each.
        """
        if not is_shuffled:
            return np.arange(len(self.data))
        random_integers = random_bytes(self._key, "order", 0, 8 * len(self.data))
        return np.argsort(np.frombuffer(random_integers, dtype="<u8"), kind="stable")
