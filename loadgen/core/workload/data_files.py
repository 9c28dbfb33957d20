"""Finds data sets that are not JSONL, and those of Hugging Face; the readers are rows of `loadgen.formats`.

Yields each row as a mapping with its place in words; what a row means is for `dataset`. IO: reads files, and asks the
hub of Hugging Face only where its package is installed and the data set is not in the local cache.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.workload import hub
from loadgen.formats import FORMATS, FormatRow

HUB = "hf:"  # of the name of a data set of Hugging Face: hf:ORG/NAME, hf:ORG/NAME/CONFIG:SPLIT
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
LONGEST_CONVERSATION = 100_000_000
"""Bytes of the longest line of messages that is read, as of a line of a trace."""
SPLITS = ("train", "test", "validation")  # which is taken where several are there and none is named
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")

LocatedRow = tuple[str, Mapping[str, Any]]


def is_jsonl(file: Path) -> bool:
    """Whether a file is read line by line. Raises UserError for a file of no known form, OSError."""
    with file.open("rb") as opened:
        begin = opened.read(4096)
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError("wrong_encoding", "the file is UTF-16", str(file), "save it as UTF-8")
    text = begin.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"[") and _has_conversation_per_line(file):
        return True
    return _format(file, begin) is None


def is_conversation(row: Any) -> bool:
    """Return True if a row is a list of messages and not an object that holds them."""
    return isinstance(row, list) and bool(row) and isinstance(row[0], dict) and "role" in row[0]


def _has_conversation_per_line(file: Path) -> bool:
    """Return True if the first line of a file is a complete list of messages."""
    with file.open("rb") as opened:
        line = opened.readline(LONGEST_CONVERSATION)
    try:
        row = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):
        return False
    return is_conversation(row)


def read_converted_rows(file: Path) -> Iterator[LocatedRow]:
    """The rows of a file that is not JSONL. Raises UserError, OSError."""
    with file.open("rb") as opened:
        row = _format(file, opened.read(4096))
    if row is None:
        raise UserError(
            "wrong_format", "of several files one is JSONL", str(file), "all in the same format"
        )
    if row.dataset is not None:
        yield from FORMATS.guard(row, row.dataset)(file)


def _format(file: Path, begin: bytes) -> FormatRow | None:
    """The format of a file, by its first bytes or its name; None of JSONL. Plug-ins are asked for other names only."""
    begin, suffix = begin.removeprefix(codecs.BOM_UTF8).lstrip(), file.suffix.lower()
    is_known_suffix = suffix in (*SUFFIXES, "")
    for row in FORMATS.own if is_known_suffix else FORMATS.rows():
        if row.dataset is not None and (suffix in row.suffixes or begin.startswith(row.begins)):
            return row
    return None


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def resolve_data_set(path: Path) -> tuple[list[Path], str]:
    """The files behind the name of a data set, and which they are, in words ("" for a plain file). Raises UserError."""
    name = str(path)
    if not name.startswith(HUB):
        return [path], ""
    match = re.fullmatch(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?(?::([\w.-]+))?", name)
    if match is None:
        hint = "hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME/CONFIG:SPLIT"
        raise UserError("invalid_value", "not the name of a data set", name, hint)
    data_set, config, split = match[1], match[2] or "", match[3] or ""
    patterns = [f"*{suffix}" for suffix in SUFFIXES]
    found = _cached(data_set) or _data_in(
        hub.download_snapshot(data_set, "dataset", patterns, f"{HUB}{data_set}")
    )
    files = [file for file in found if not config or config in file.relative_to(found[file]).parts]
    parts = {file: set(re.split(r"[-_./]", str(file.relative_to(found[file])))) for file in files}
    if not split:
        split = next((one for one in SPLITS if any(one in words for words in parts.values())), "")
    chosen = sorted(file for file in files if not split or split in parts[file])
    if not chosen:
        known = ", ".join(sorted({str(file.relative_to(found[file])) for file in found})[:8])
        raise UserError("unknown_name", "no such part of the data set", name, f"its files: {known}")
    commit = hub.snapshot_commit(chosen[0])
    said = (
        f"{data_set}{f' at {commit[:12]}' if commit else ''}{f', split {split}' if split else ''}"
    )
    return chosen, f"{said}: {', '.join(file.name for file in chosen[:4])}"


def _cached(data_set: str) -> dict[Path, Path]:
    """The data files of a data set in the caches of this host, each with the folder that its name begins at."""
    snapshot = hub.find_cached_snapshot(data_set, "dataset")
    prepared = Path(
        os.environ.get("HF_DATASETS_CACHE") or hub.cache_home() / "datasets"
    ) / data_set.replace("/", "___")
    return (_data_in(snapshot) if snapshot is not None else {}) or _data_in(prepared)


def _data_in(folder: Path) -> dict[Path, Path]:
    files = (
        file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES and file.is_file()
    )
    kept = {
        file: folder
        for file in files
        if file.name not in _NOT_DATA and not file.name.startswith("cache-")
    }
    best = next((suffix for suffix in SUFFIXES if any(file.suffix == suffix for file in kept)), "")
    return {file: folder for file in kept if file.suffix == best}
