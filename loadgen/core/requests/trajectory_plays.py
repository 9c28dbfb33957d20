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
    from pathlib import Path

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
        self, data: TrajectoryData, workload_requests: Trajectories, seed: int, cache_fills: int
    ) -> None:
        """Decide in which order the recorded sessions are sent.

        Args:
            data: The recorded sessions.
            workload_requests: The section of the workload with the order, and with the turn in
                which the first sessions begin.
            seed: Decides all random draws.
            cache_fills: The number of sessions at the start of the run that fill the cache.

        Raises:
            UserError: The first sessions are to begin in the middle, but no recorded session has
                a second turn.
        """
        self.data = data
        self.max_turns = int(data.turn_counts.max())
        self._key = derive_key(seed)
        self._cache_fills = cache_fills
        self._order = self._draw_order(is_shuffled=workload_requests.order == "shuffled")

        # The recorded sessions that can begin in the middle, in the same order.
        has_second_turn = data.turn_counts[self._order] >= TURNS_TO_SPLIT
        self._sessions_to_split = self._order[has_second_turn]
        if workload_requests.start == "middle" and len(self._sessions_to_split) == 0:
            raise _no_second_turn_error(data.path)

    def play(self, session: int) -> Play:
        """Return which turns of which recorded conversation a session of the run sends.

        Sessions are numbered from 0. With 8 virtual users that begin in the middle:

        - Sessions 0 to 7 fill the cache. Each sends one turn, from the middle of a conversation.
        - Sessions 8 to 15 send the turns after it of the same conversations.
        - All later sessions send complete conversations.
        """
        if session < self._cache_fills:
            return self._play_cache_fill(number=session)

        # Sessions 0 and 8 send two parts of conversation 0, so both have the number 0.
        number = session - self._cache_fills
        if number < self._cache_fills:
            return self._play_after_cache_fill(number)
        return self._play_complete(number)

    def turn_counts(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the number of turns of each of `count` sessions, from session `first` on.

        With 8 virtual users that begin in the middle, sessions 0 to 7 fill the cache and sessions 8
        to 15 continue them. All later sessions are complete conversations, whose turns are looked
        up for all sessions at once.
        """
        first_complete_session = 2 * self._cache_fills
        if first < first_complete_session:
            sessions = range(first, first + count)
            return np.array([self.play(session).turn_count for session in sessions], np.int64)

        play_numbers = np.arange(first, first + count) - self._cache_fills  # as in `play`
        trajectories = self._order[play_numbers % len(self._order)]
        counts: NDArray[np.int64] = self.data.turn_counts[trajectories]
        return counts

    def pass_of(self, play: Play) -> int:
        """Return how many times the complete data set was sent before a play."""
        return play.number // len(self._order)

    def _play_cache_fill(self, number: int) -> Play:
        """Return the play of a session that sends one random turn, to fill the server's cache."""
        trajectory = self._find_split_trajectory(number)
        first_turn = self._draw_first_turn(number, trajectory)
        return Play(number, trajectory, first_turn, turn_count=1, fills_cache=True)

    def _play_after_cache_fill(self, number: int) -> Play:
        """Return the play of a session that continues after the turn that filled the cache."""
        trajectory = self._find_split_trajectory(number)
        cache_fill_turn = self._draw_first_turn(number, trajectory)
        first_turn = cache_fill_turn + 1
        turn_count = int(self.data.turn_counts[trajectory]) - first_turn
        return Play(number, trajectory, first_turn, turn_count)

    def _play_complete(self, number: int) -> Play:
        """Return the play that sends all turns of the next recorded session."""
        trajectory = int(self._order[number % len(self._order)])
        turn_count = int(self.data.turn_counts[trajectory])
        return Play(number, trajectory, first_turn=0, turn_count=turn_count)

    def _find_split_trajectory(self, number: int) -> int:
        """Return the index of the recorded session of a play that begins in the middle.

        The recorded sessions with at least two turns are used in order, and then from the first.
        """
        position = number % len(self._sessions_to_split)
        return int(self._sessions_to_split[position])

    def _draw_first_turn(self, number: int, trajectory: int) -> int:
        """Return a random turn of a recorded session that has at least one turn after it.

        Each such turn has the same probability: of 5 turns, one of the turns 0 to 3. The draw
        depends only on the seed and the number of the play.
        """
        turn_count = int(self.data.turn_counts[trajectory])
        possible_turns = turn_count - 1
        random_number = random_integer(self._key, "first turn", number, 8)
        return random_number % possible_turns

    def _draw_order(self, *, is_shuffled: bool) -> NDArray[np.int64]:
        """Return the indexes of the recorded sessions in the order in which they are sent.

        To shuffle, each session gets a random integer of 8 bytes, and sessions are sorted by it.
        """
        session_count = len(self.data)
        if not is_shuffled:
            return np.arange(session_count)

        random_content = random_bytes(self._key, "order", 0, 8 * session_count)
        random_integers = np.frombuffer(random_content, dtype="<u8")
        return np.argsort(random_integers, kind="stable")


def _no_second_turn_error(path: Path) -> UserError:
    """Return the error for a data set whose sessions all have one turn, so that none can be split.

    Args:
        path: The data set.
    """
    return UserError(
        "unsupported",
        "no session of the data set has a second turn, so none can begin in the middle",
        str(path),
        "use start: beginning, or a data set of sessions with several turns",
    )
