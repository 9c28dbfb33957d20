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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.errors import (
    CombinedError,
    LoadgenError,
    UserError,
    has_too_many,
    of_reading,
)
from loadgen.core.workload import data_files
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

DATA_SETS_CACHED = 4
TRAJECTORIES_CACHED = 256
"""Virtual users send turns of the same trajectories again and again."""


class TrajectoryData:
    """The recorded sessions of a data set: `len(data)`, `data[index]`.

    Attributes:
        path: The file, or the name of a data set of Hugging Face.
        sha256: The hash of the bytes of the files.
        turn_counts: The number of turns of each session.
        has_responses: Whether a response is recorded for some turn.
        has_tool_results: Whether some session has messages of tools.
        notes: Sentences about what was read, if it is not simply the file.
    """

    def __init__(self, path: Path, sha256: str, store: _TrajectoryStore, notes: list[str]) -> None:
        self.path = path
        self.sha256 = sha256
        self.turn_counts: NDArray[np.int64] = np.array(store.turn_counts, np.int64)
        self.has_responses = store.has_responses
        self.has_tool_results = store.has_tool_results
        self.notes = tuple(notes)
        self._store = store
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
        self.has_responses = False
        self.has_tool_results = False

    def add(self, trajectory: Trajectory) -> None:
        """Append a session."""
        content = msgspec.json.encode(trajectory)
        os.pwrite(self._file.descriptor, content, self._offsets[-1])
        self._offsets.append(self._offsets[-1] + len(content))
        self.turn_counts.append(len(trajectory.turns))
        for turn in trajectory.turns:
            self.has_responses = self.has_responses or turn.response is not None
            has_tool_result = any(message["role"] == "tool" for message in turn.messages)
            self.has_tool_results = self.has_tool_results or has_tool_result

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
        self._session: SessionBuilder | None = None
        self._session_is_broken = False
        self._names: set[str] = set()
        self._empty_conversations = 0
        self.store = _TrajectoryStore()

    def add_row(self, row: Mapping[str, Any], where: str) -> None:
        """Add a row. Raises CombinedError if too many rows have mistakes."""
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
        """Store the last session, and return notes for the user.

        Raises CombinedError if rows have mistakes, and UserError if there are no sessions.
        """
        self._end_session()
        if self._errors:
            raise CombinedError(self._errors)
        if not self.store.turn_counts:
            hint = 'write rows like {"conversation_id": "c1", "turn": 1, "role": "user", ...}'
            raise UserError("empty_file", "the file has no sessions", str(self._path), hint)

        if not self._empty_conversations:
            return []
        conversations = format.counted(self._empty_conversations, "conversation")
        return [f"{self._path.name}: left out {conversations} without a user message"]

    def _add_message(self, row: Mapping[str, Any]) -> None:
        """Add a row that is one message. Raises BadRowError."""
        name = read_session_name(row)
        if self._session is None or self._session.name != name:
            self._end_session()
            self._begin_session(name)
        if self._session is not None and not self._session_is_broken:
            self._session.add_row(row)

    def _begin_session(self, name: str) -> None:
        """Begin to collect the rows of a session. Raises BadRowError if it was ended before."""
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
        """Collect the mistake of a row. Raises CombinedError if there are too many of them."""
        self._errors.append(UserError(error.code, str(error), where, error.hint, key=error.key))
        if has_too_many(self._errors, str(self._path)):
            raise CombinedError(self._errors) from None


class _DataSetVersion(NamedTuple):
    """A data set as it is at a time, with the size and the time of change of each of its files."""

    path: Path
    files: tuple[Path, ...]
    sizes_and_times: tuple[tuple[int, int], ...]
    source_note: str


def read_trajectories(path: str | Path) -> TrajectoryData:
    """Check every row of a data set, and return its sessions.

    A data set that was read before is read again only if one of its files has changed.

    Raises CombinedError with the first errors in the rows, or UserError for the file.
    """
    path = Path(path)
    files, source_note = data_files.resolve_data_set(path)
    try:
        file_stats = [file.stat() for file in files]
        sizes_and_times = tuple((stat.st_size, stat.st_mtime_ns) for stat in file_stats)
        return _read_cached(_DataSetVersion(path, tuple(files), sizes_and_times, source_note))
    except OSError as error:
        unreadable_file = error.filename or path
        problem = f"cannot read the sessions: {error.strerror}"
        raise UserError(of_reading(error), problem, str(unreadable_file)) from None


@functools.lru_cache(maxsize=DATA_SETS_CACHED)
def _read_cached(version: _DataSetVersion) -> TrajectoryData:
    """Read a data set, or return its sessions from the cache if no file has changed."""
    reader = _DataSetReader(version.path)
    digest = hashlib.sha256()
    for file in version.files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
        for where, row in read_located_rows(file):
            reader.add_row(row, where)

    notes = reader.finish()
    if version.source_note:
        notes.insert(0, version.source_note)
    return TrajectoryData(version.path, digest.hexdigest(), reader.store, notes)


def has_message_rows(path: str | Path) -> bool:
    """Return True if the first row of a data set is one message of a session.

    Such a data set can only be sent session by session. Return False if the file cannot be read,
    which is reported when its rows are read.
    """
    try:
        files, _ = data_files.resolve_data_set(Path(path))
        first_row = next(_iterate_rows(files[0]), {})
    except (LoadgenError, OSError):
        return False
    return has_one_message_per_row(first_row)


def _iterate_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file that are no metadata."""
    for _, row in read_located_rows(file):
        if not is_metadata(row):
            yield row
