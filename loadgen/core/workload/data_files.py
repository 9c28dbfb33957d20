"""Find the files of a data set, and read those that are not JSONL.

The readers of the formats are rows of `loadgen.formats`. `dataset_rows.py` parses their rows.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from loadgen.core.errors import UserError, of_reading
from loadgen.core.workload import hub
from loadgen.formats import FORMATS, FormatRow

ContentT = TypeVar("ContentT")

LocatedRow = tuple[str, Mapping[str, Any]]
"""The place of a row for error messages, such as `FILE:LINE`, and the row."""

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
"""The suffixes of data files. Of a data set in several formats, the first one here is read."""
MAX_LINE_BYTES = 100_000_000
"""The size of the longest line that is read, as for traces."""
BEGINNING_BYTES = 4096
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

HUB = "hf:"
"""The prefix of data sets of Hugging Face: hf:ORG/NAME, hf:ORG/NAME/CONFIG:SPLIT."""
HUB_NAME = re.compile(
    r"hf:(?P<data_set>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?"
)
PREFERRED_SPLITS = ("train", "test", "validation")
"""The splits that are read if the name of the data set has none; the first that exists."""
METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
MAX_FILES_IN_HINT = 8
MAX_FILES_IN_NOTE = 4


# -- formats -------------------------------------------------------------------------------------


def is_jsonl(file: Path) -> bool:
    """Return True if a file has one row per line in JSON, so that it need not be converted.

    A file that begins with a list is usually one JSON document. But if its first line is a complete
    conversation, that is, a list of messages, it is JSONL. Any other file is JSONL if it has no
    other known format.

    Raises UserError for a file in UTF-16, and OSError if it cannot be read.
    """
    beginning = _read_beginning(file)
    if beginning.startswith(UTF16_MARKS):
        raise UserError(
            "wrong_encoding", "the file is encoded in UTF-16", str(file), "save it as UTF-8"
        )

    begins_with_list = beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if begins_with_list and _has_conversation_per_line(file):
        return True

    other_format = _find_format(file, beginning)
    return other_format is None


def is_conversation(row: object) -> bool:
    """Return True if a row is a list of messages and not an object that holds them."""
    return isinstance(row, list) and bool(row) and isinstance(row[0], dict) and "role" in row[0]


def read_converted_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a file that is not JSONL. Raises UserError and OSError."""
    file_format = _find_format(file, _read_beginning(file))
    if file_format is None:
        problem = "one of several files is JSONL"
        raise UserError("wrong_format", problem, str(file), "use files of the same format")
    if file_format.dataset is not None:
        yield from FORMATS.guard(file_format, file_format.dataset)(file)


def _read_beginning(file: Path) -> bytes:
    """Return the first bytes of a file, in which its format is recognized."""
    with file.open("rb") as stream:
        return stream.read(BEGINNING_BYTES)


def _has_conversation_per_line(file: Path) -> bool:
    """Return True if the first line of a file is a complete list of messages."""
    with file.open("rb") as stream:
        line = stream.readline(MAX_LINE_BYTES)
    try:
        row = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):
        return False
    return is_conversation(row)


def _find_format(file: Path, beginning: bytes) -> FormatRow | None:
    """Return the format of a file by its first bytes or its suffix, or None for JSONL.

    `FORMATS.builtin_rows` has the formats of this package alone. `FORMATS.rows()` also has those of
    plug-ins, and imports all plug-ins, so it is only used for a suffix that is not known.
    """
    text = beginning.removeprefix(codecs.BOM_UTF8).lstrip()
    suffix = file.suffix.lower()
    has_known_suffix = suffix in (*SUFFIXES, "")

    candidates = FORMATS.builtin_rows if has_known_suffix else FORMATS.rows()
    for candidate in candidates:
        is_data_set_format = candidate.dataset is not None
        matches_suffix = suffix in candidate.suffixes
        # `begins` is a tuple of byte strings, of which a file of the format begins with one. It is
        # empty for a format that only its suffix shows, and then nothing matches.
        matches_beginning = text.startswith(candidate.begins)
        if is_data_set_format and (matches_suffix or matches_beginning):
            return candidate

    return None


# -- Hugging Face --------------------------------------------------------------------------------


class _HubFile(NamedTuple):
    """A data file, and its path inside the directory of the data set."""

    path: Path
    relative_path: Path

    @property
    def split_names(self) -> set[str]:
        """The words of the path, one of which may be the name of a split, such as "train"."""
        return set(re.split(r"[-_./]", str(self.relative_path)))


class DataFiles(NamedTuple):
    """The files of a data set, and a note for the user about where they come from.

    The note is empty for a plain file.
    """

    files: list[Path]
    note: str


def resolve_data_set(path: Path) -> DataFiles:
    """Return the files of a data set.

    The path is a plain file, or the name of a data set of Hugging Face, such as
    `hf:ORG/NAME/CONFIG:SPLIT`. Its files are taken from the cache of this host or downloaded.

    Raises UserError if there is no such data set, configuration or split.
    """
    is_on_hugging_face = str(path).startswith(HUB)
    return _resolve_hub_name(str(path)) if is_on_hugging_face else DataFiles([path], note="")


class DataSetVersion(NamedTuple):
    """A data set as it is at a time.

    Attributes:
        path: The file, or the name of a data set of Hugging Face.
        files: Its files.
        sizes_and_times: The size of each file and the time of its last change in ns. Other values
            are another version.
        source_note: A sentence for the user about where the files come from, or "".
    """

    path: Path
    files: tuple[Path, ...]
    sizes_and_times: tuple[tuple[int, int], ...]
    source_note: str


def read_version(
    path: Path, read_cached: Callable[[DataSetVersion], ContentT], content: str
) -> ContentT:
    """Return what a reader with a cache returns for a data set as it is now.

    Args:
        path: A file, or the name of a data set of Hugging Face.
        read_cached: Reads the data set, or returns what it returned for the same version.
        content: What is read, for the error of an unreadable file.

    Raises UserError if a file cannot be read, and all errors of `read_cached`.
    """
    files, source_note = resolve_data_set(path)
    try:
        file_stats = [file.stat() for file in files]
        sizes_and_times = tuple((stat.st_size, stat.st_mtime_ns) for stat in file_stats)
        return read_cached(DataSetVersion(path, tuple(files), sizes_and_times, source_note))
    except OSError as error:
        unreadable_file = error.filename or path
        problem = f"cannot read the {content}: {error.strerror}"
        raise UserError(of_reading(error), problem, str(unreadable_file)) from None


def _resolve_hub_name(name: str) -> DataFiles:
    """Return the files that the name of a data set of Hugging Face selects.

    A name such as `hf:ORG/NAME/CONFIG:SPLIT` selects a configuration, which is a directory of the
    data set, and a split, such as "train", which is a word in the names of its files. The data set
    is downloaded if this host does not have it.

    Raises UserError if there is no such data set, configuration or split.
    """
    selection = _parse_hub_name(name)
    all_files = _find_cached_files(selection.data_set) or _download_files(selection.data_set)
    files_of_config = _select_config(all_files, selection.config)
    split = selection.split or _default_split(files_of_config)
    selected_files = _select_split(files_of_config, split)
    if not selected_files:
        raise _unknown_part_error(name, all_files)

    paths = sorted(file.path for file in selected_files)
    return DataFiles(paths, note=_describe_hub_files(selection.data_set, split, paths))


def _unknown_part_error(name: str, files: list[_HubFile]) -> UserError:
    """Return the error for a configuration or a split that a data set does not have."""
    file_names = sorted({str(file.relative_path) for file in files})
    hint = f"the data set has these files: {', '.join(file_names[:MAX_FILES_IN_HINT])}"
    return UserError("unknown_name", "the data set has no such part", name, hint)


def _select_config(files: list[_HubFile], config: str) -> list[_HubFile]:
    """Return the files in the directory of a configuration, or all files if `config` is ""."""
    if not config:
        return files
    return [file for file in files if config in file.relative_path.parts]


def _select_split(files: list[_HubFile], split: str) -> list[_HubFile]:
    """Return the files of a split, such as "train", or all files if `split` is ""."""
    if not split:
        return files
    return [file for file in files if split in file.split_names]


class _HubSelection(NamedTuple):
    """A part of a data set of Hugging Face.

    Attributes:
        data_set: The name of the data set, `ORG/NAME`.
        config: The configuration, a directory that contains its files, or "" for all of them.
        split: The split, a word in the names of its files, or "" for the default.
    """

    data_set: str
    config: str
    split: str


def _parse_hub_name(name: str) -> _HubSelection:
    """Return what a name such as `hf:ORG/NAME/CONFIG:SPLIT` stands for.

    Raises UserError if it is no such name.
    """
    match = HUB_NAME.fullmatch(name)
    if match is None:
        hint = "write hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME/CONFIG:SPLIT"
        raise UserError("invalid_value", "is not the name of a data set", name, hint)
    return _HubSelection(match["data_set"], match["config"] or "", match["split"] or "")


def _describe_hub_files(data_set: str, split: str, files: list[Path]) -> str:
    """Return a note that says which files of which commit are read."""
    commit = hub.snapshot_commit(files[0])
    source = data_set
    if commit:
        source += f" at {commit[:12]}"
    if split:
        source += f", split {split}"
    return f"{source}: {', '.join(file.name for file in files[:MAX_FILES_IN_NOTE])}"


def _default_split(files: list[_HubFile]) -> str:
    """Return the split that is read if none is named, or "" if the files have none."""
    for split in PREFERRED_SPLITS:
        if any(split in file.split_names for file in files):
            return split
    return ""


def _find_cached_files(data_set: str) -> list[_HubFile]:
    """Return the data files of a data set in the caches of this host."""
    snapshot = hub.find_cached_snapshot(data_set, "dataset")
    files = [] if snapshot is None else _find_data_files(snapshot)
    if files:
        return files
    # The package `datasets` keeps data sets that it has prepared in a cache of its own.
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or hub.cache_home() / "datasets")
    return _find_data_files(prepared / data_set.replace("/", "___"))


def _download_files(data_set: str) -> list[_HubFile]:
    """Download the data files of a data set of Hugging Face. Raises UserError."""
    patterns = [f"*{suffix}" for suffix in SUFFIXES]
    directory = hub.download_snapshot(data_set, "dataset", patterns, f"{HUB}{data_set}")
    return _find_data_files(directory)


def _find_data_files(directory: Path) -> list[_HubFile]:
    """Return the data files of one format in a directory.

    If there are files of several formats, the first suffix in SUFFIXES that any of them has is
    used. Files that describe the data set are left out, and so are those that the package
    `datasets` has stored for itself, whose names begin with "cache-".
    """
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if path.suffix in SUFFIXES
        and path.is_file()
        and path.name not in METADATA_FILES
        and not path.name.startswith("cache-")
    ]
    suffixes = {path.suffix for path in files}
    best_suffix = next((suffix for suffix in SUFFIXES if suffix in suffixes), "")

    return [
        _HubFile(path, path.relative_to(directory)) for path in files if path.suffix == best_suffix
    ]
