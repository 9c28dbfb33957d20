"""Read a data set of recorded sessions: agent trajectories and conversations.

The whole data set is checked when it is read. The sessions are then stored in a temporary file
without a name, one JSON object after the other, and read again when their requests are built. So a
data set can be larger than memory.
"""

from __future__ import annotations

import functools
import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.errors import (
    CombinedError,
    LoadgenError,
    UserError,
    has_too_many,
)
from loadgen.core.workload import data_files
from loadgen.core.workload.data_files import DataSetVersion
from loadgen.core.workload.dataset import TemporaryFile, read_located_rows
from loadgen.core.workload.row_errors import BadRowError, EmptyConversationError
from loadgen.core.workload.trajectory_rows import (
    SessionBuilder,
    Trajectory,
    has_one_message_per_row,
    is_metadata,
    parse_session_row,
    read_session_name,
)

EXAMPLE_ROW = '{"conversation_id": "c1", "turn": 1, "role": "user", "content": "Hello"}'
"""The smallest data set with a session, for hints."""

ROWS_PER_MISTAKE = 3
"""The number of rows that are listed with the same mistake. Further rows are counted."""

DATA_SETS_CACHED = 4
TRAJECTORIES_CACHED = 256
"""Virtual users send turns of the same trajectories again and again."""


class TrajectoryData:
    """The recorded sessions of a data set: `len(data)`, `data[index]`.

    Attributes:
        path: The file, or the name of a data set of Hugging Face.
        sha256: The hash of the bytes of the files.
        turn_counts: The number of turns of each session.
        pauses_ns: The recorded pauses between two turns, of all sessions.
        has_responses: Whether a response is recorded for some turn.
        has_tool_results: Whether some session has messages of tools.
        notes: Sentences about what was read, if it is not simply the file.
    """

    def __init__(self, path: Path, sha256: str, store: _TrajectoryStore, notes: list[str]) -> None:
        """Summarize the sessions that were read from a data set.

        Args:
            path: The file, or the name of a data set of Hugging Face.
            sha256: The hash of the bytes of the files.
            store: The sessions, in a temporary file. Recently used ones also stay in memory.
            notes: Sentences for the user about what was read.
        """
        self.path = path
        self.sha256 = sha256
        self.turn_counts: NDArray[np.int64] = np.array(store.turn_counts, np.int64)
        self.pauses_ns: NDArray[np.int64] = np.array(store.pauses_ns, np.int64)
        self.has_responses = store.has_responses
        self.has_tool_results = store.has_tool_results
        self.notes = tuple(notes)
        self._store = store
        # A cache per instance: as a decorator, it would keep all instances alive.
        self._read = functools.lru_cache(TRAJECTORIES_CACHED)(store.read)

    def __len__(self) -> int:
        return len(self.turn_counts)

    def __getitem__(self, index: int) -> Trajectory:
        return self._read(index)


class _TrajectoryStore:
    """Sessions in a temporary file, and what is known of each without reading it."""

    def __init__(self) -> None:
        self._file = TemporaryFile()
        self._offsets = array("Q", [0])
        self.turn_counts = array("Q")
        self.pauses_ns = array("q")
        self.has_responses = False
        self.has_tool_results = False

    def add(self, trajectory: Trajectory) -> None:
        """Append a session to the temporary file, and note which kinds of messages it has."""
        content = msgspec.json.encode(trajectory)
        start = self._offsets[-1]
        os.pwrite(self._file.descriptor, content, start)
        self._offsets.append(start + len(content))

        self.turn_counts.append(len(trajectory.turns))
        # A session begins with its first turn, so the pause before that turn is never made.
        later_turns = trajectory.turns[1:]
        self.pauses_ns.extend(turn.delay_ns for turn in later_turns if turn.delay_ns > 0)

        for turn in trajectory.turns:
            if turn.response is not None:
                self.has_responses = True
            if any(message["role"] == "tool" for message in turn.messages):
                self.has_tool_results = True

    def read(self, index: int) -> Trajectory:
        """Return a session. Threads may call this, because it reads at an explicit offset."""
        start = self._offsets[index]
        size = self._offsets[index + 1] - start
        content = os.pread(self._file.descriptor, size, start)
        return msgspec.json.decode(content, type=Trajectory)


class _DataSetReader:
    """Reads the rows of a data set one by one, and collects their sessions and mistakes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._errors: list[LoadgenError] = []
        self._rows_by_mistake: Counter[str] = Counter()
        self._session: SessionBuilder | None = None
        self._session_is_broken = False
        self._names: set[str] = set()
        self._empty_conversations = 0
        self.store = _TrajectoryStore()

    def add_row(self, row: Mapping[str, Any], where: str) -> None:
        """Add a row, which is a complete session or one message of a session.

        Mistakes are collected, so that the user sees the mistakes of all rows at once.

        Args:
            row: The row.
            where: Where the row is, such as a file and a line, for error messages.

        Raises:
            CombinedError: Too many rows have mistakes.
        """
        if is_metadata(row):
            return
        try:
            if has_one_message_per_row(row):
                self._add_message(row)
            else:
                self._end_session()
                self.store.add(parse_session_row(row))
        except EmptyConversationError:
            self._empty_conversations += 1
        except BadRowError as error:
            self._session_is_broken = True
            self._add_error(error, where)

    def finish(self) -> list[str]:
        """Store the last session, and return notes for the user about what was left out.

        Raises:
            CombinedError: Rows have mistakes.
            UserError: The data set has no sessions.
        """
        self._end_session()
        self._check_sessions()
        if self._empty_conversations == 0:
            return []

        conversations = format.counted(self._empty_conversations, "conversation")
        return [f"{self._path.name}: left out {conversations} without a user message"]

    def _check_sessions(self) -> None:
        """Check that no row had a mistake, and that the data set has a session.

        Raises:
            CombinedError: Rows had mistakes.
            UserError: The data set has no sessions.
        """
        if self._errors:
            raise CombinedError([*self._errors, *self._errors_of_further_rows()])

        session_count = len(self.store.turn_counts)
        if session_count == 0:
            hint = f"write rows like {EXAMPLE_ROW}"
            raise UserError("empty_file", "the file has no sessions", str(self._path), hint)

    def _add_message(self, row: Mapping[str, Any]) -> None:
        """Add a row that is one message of a session.

        The rows of a session are consecutive, so a row with another name begins the next session.
        After a row with an error, the other rows of its session are ignored: each would have errors
        that only follow from the first one.

        Raises:
            BadRowError: The row is not valid.
        """
        name = read_session_name(row)
        begins_session = self._session is None or self._session.name != name
        if begins_session:
            self._end_session()
            self._begin_session(name)

        if self._session is not None and not self._session_is_broken:
            self._session.add_row(row)

    def _begin_session(self, name: str) -> None:
        """Begin to collect the rows of a session.

        Raises:
            BadRowError: There were rows of a session with this name before.
        """
        self._session = SessionBuilder(name)
        self._session_is_broken = False
        if name in self._names:
            problem = f'the rows of conversation "{name}" are not consecutive'
            raise BadRowError("unordered", problem, "group the rows of each conversation")
        self._names.add(name)

    def _end_session(self) -> None:
        """Store the session whose rows were collected, if there is one without mistakes."""
        if self._session is not None and not self._session_is_broken:
            self.store.add(self._session.build())
        self._session = None

    def _add_error(self, error: BadRowError, where: str) -> None:
        """Collect the mistake of a row.

        A mistake that is the same in many rows is only collected for the first ROWS_PER_MISTAKE of
        them. The further rows are counted.

        Raises:
            CombinedError: There are too many mistakes.
        """
        problem = str(error)
        self._rows_by_mistake[problem] += 1
        if self._rows_by_mistake[problem] > ROWS_PER_MISTAKE:
            return

        self._errors.append(UserError(error.code, str(error), where, error.hint, key=error.key))
        if has_too_many(self._errors, str(self._path)):
            raise CombinedError([*self._errors, *self._errors_of_further_rows()]) from None

    def _errors_of_further_rows(self) -> list[UserError]:
        """Return an error for each mistake of which some rows were only counted."""
        errors = []
        for problem, row_count in self._rows_by_mistake.items():
            further_count = row_count - ROWS_PER_MISTAKE
            if further_count > 0:
                further_rows = format.counted(further_count, "more row")
                text = f"{problem}, also in {further_rows}"
                errors.append(UserError("more_faults", text, str(self._path)))
        return errors


def read_trajectories(path: str | Path) -> TrajectoryData:
    """Read the recorded sessions of a data set, and check every row.

    The result is cached until one of the files changes.

    Raises:
        CombinedError: Rows have mistakes. The error contains the first of them.
        UserError: A file cannot be read.
    """
    return data_files.read_version(Path(path), _read_data_set, content="sessions")


@functools.lru_cache(maxsize=DATA_SETS_CACHED)
def _read_data_set(version: DataSetVersion) -> TrajectoryData:
    """Read the sessions of a data set, or return those of an earlier call with the same version.

    The version contains the size and the time of the last change of each file, so the cache cannot
    return outdated sessions. Callers share the returned object and must not change it. Its hash is
    that of the hashes of all files, in order.
    """
    reader = _DataSetReader(version.path)
    hash_of_file_hashes = hashlib.sha256()
    for file in version.files:
        with file.open("rb") as stream:
            file_hash = hashlib.file_digest(stream, "sha256")
        hash_of_file_hashes.update(file_hash.digest())
        for where, row in read_located_rows(file):
            reader.add_row(row, where)

    notes = reader.finish()
    if version.source_note:
        notes = [version.source_note, *notes]
    return TrajectoryData(version.path, hash_of_file_hashes.hexdigest(), reader.store, notes)


def has_message_rows(path: str | Path) -> bool:
    """Return True if the rows of a data set are single messages of sessions.

    The first row decides. Return False if the file cannot be read: the caller reads the rows later,
    and that reports the error.
    """
    try:
        files, _ = data_files.resolve_data_set(Path(path))
        first_row = next(_iterate_rows(files[0]), {})
    except (LoadgenError, OSError):
        return False
    return has_one_message_per_row(first_row)


def has_session_rows(path: str | Path) -> bool:
    """Return True if the rows of a data set are recorded sessions, or single messages of sessions.

    The first row decides. Return True also for a file that has no rows or cannot be read: the
    caller then reads it as a data set of sessions, and that reports the error.
    """
    try:
        files, _ = data_files.resolve_data_set(Path(path))
        first_row = next(_iterate_rows(files[0]), None)
    except (LoadgenError, OSError):
        return True
    return first_row is None or _is_session_row(first_row)


def _is_session_row(row: Mapping[str, Any]) -> bool:
    """Return True if a row is a recorded session, or a single message of one."""
    if has_one_message_per_row(row):
        return True
    try:
        parse_session_row(row)
    except BadRowError:
        return False
    return True


def _iterate_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file that are no metadata."""
    for _, row in read_located_rows(file):
        if not is_metadata(row):
            yield row
