"""Finds and reads data sets that are not JSONL: JSON lists, CSV, Parquet, Arrow, and those of Hugging Face.

Yields each row as a mapping with its place in words; what a row means is for `dataset`. IO: reads files, and asks the
hub of Hugging Face only where its package is installed and the data set is not in the local cache.
"""

from __future__ import annotations

import codecs
import csv
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadgen import formats
from loadgen.core.errors import UserError
from loadgen.core.workload import hub
from loadgen.formats import FORMATS, FormatRow

HUB = "hf:"  # of the name of a data set of Hugging Face: hf:ORG/NAME, hf:ORG/NAME/CONFIG:SPLIT
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
SPLITS = ("train", "test", "validation")  # which is taken where several are there and none is named
TOGETHER = 1000  # rows of a table that are taken at once
_CELL_LIMIT = 1 << 30
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")

Placed = tuple[str, Mapping[str, Any]]


def is_jsonl(file: Path) -> bool:
    """Whether a file is read line by line. Raises UserError for a file of no known form, OSError."""
    with file.open("rb") as opened:
        begin = opened.read(4096)
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError("wrong_encoding", "the file is UTF-16", str(file), "save it as UTF-8")
    return _format(file, begin) is None


def rows_of(file: Path) -> Iterator[Placed]:
    """The rows of a file that is not JSONL. Raises UserError, OSError."""
    with file.open("rb") as opened:
        row = _format(file, opened.read(4096))
    if row is None:
        raise UserError("wrong_format", "of several files one is JSONL", str(file), "all in the same format")
    yield from formats.call(row, "dataset", file)


def _format(file: Path, begin: bytes) -> FormatRow | None:
    """The format of a file, by its first bytes or its name; None of JSONL. Plug-ins are asked for other names only."""
    begin, suffix = begin.removeprefix(codecs.BOM_UTF8).lstrip(), file.suffix.lower()
    rows = formats.having("dataset") if suffix not in (*SUFFIXES, "") else (r for r in FORMATS.own if r.dataset)
    return next((row for row in rows if suffix in row.suffixes or begin.startswith(row.begins or (b"\0\0",))), None)


def json_list(file: Path) -> Iterator[Placed]:
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        rows = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (ValueError, RecursionError) as error:
        offset = re.search(r"\(byte (\d+)\)", str(error))
        line = "" if offset is None else f":{data.count(bytes([10]), 0, int(offset[1])) + 1}"
        raise UserError(
            "invalid_syntax", "begins like a JSON list and is none", f"{file}{line}", "one list of objects, or JSONL"
        ) from None
    for number, raw in enumerate(rows, 1):
        try:
            row = msgspec.json.decode(raw)
        except (ValueError, RecursionError) as error:
            raise UserError("invalid_syntax", f"not JSON: {error}", f"{file}: row {number}") from None
        if not isinstance(row, dict):
            raise UserError(
                "wrong_type", "not a JSON object", f"{file}: row {number}", 'objects like {"prompt": "..."}'
            )
        yield f"{file}: row {number}", row


def cells(file: Path) -> Iterator[Placed]:
    """Rows of a CSV file under the names of its first line; empty cells are left out, and JSON in a cell is read."""
    csv.field_size_limit(_CELL_LIMIT)
    reader = None
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
            line = 2
            for row in reader:
                if None in row:
                    what = "more cells than the first line has names"
                    raise UserError("invalid_syntax", what, f"{file}:{line}", "quote cells with commas")
                yield f"{file}:{line}", {name: _cell(text) for name, text in row.items() if text}
                line = reader.line_num + 1
    except UnicodeDecodeError:
        raise UserError("wrong_encoding", "not UTF-8", str(file), "save the file as UTF-8") from None
    except csv.Error as error:
        where = f"{file}:{reader.line_num}" if reader else str(file)
        raise UserError(
            "invalid_syntax", f"not CSV: {error}", where, "cells with commas, quotes or line ends stand in quotes"
        ) from None


def _cell(text: str) -> Any:
    if text[0] in "[{" or re.fullmatch(r"[0-9]{1,9}", text):
        try:
            return msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return text
    return text


def parquet(file: Path) -> Iterator[Placed]:
    return _tables(file, "Parquet")


def arrow(file: Path) -> Iterator[Placed]:
    return _tables(file, "Arrow")


def _tables(file: Path, form: str) -> Iterator[Placed]:
    """Rows of a Parquet file, or of an Arrow file as the package `datasets` keeps them. Nulls are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches(TOGETHER) if form == "Parquet" else _arrow_batches(file):
            batch.validate(full=True)  # reading a damaged Arrow file would end the process
            for first in range(0, batch.num_rows, TOGETHER):
                for row in batch.slice(first, TOGETHER).to_pylist():
                    number += 1
                    yield f"{file}: row {number}", _without_nulls(row)
    except (pa.ArrowException, ValueError, KeyError, OverflowError) as error:  # types and dates that Python has not
        raise UserError(
            "damaged_file", f"not {form}: {str(error).partition('.')[0]}", str(file), "is the file whole?"
        ) from None


def _arrow_batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            opened = pa.ipc.open_file(source)
            yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def files_of(path: Path) -> tuple[list[Path], str]:
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
    found = _cached(data_set) or _data_in(hub.fetched(data_set, "dataset", patterns, f"{HUB}{data_set}"))
    files = [file for file in found if not config or config in file.relative_to(found[file]).parts]
    parts = {file: set(re.split(r"[-_./]", str(file.relative_to(found[file])))) for file in files}
    if not split:
        split = next((one for one in SPLITS if any(one in words for words in parts.values())), "")
    chosen = sorted(file for file in files if not split or split in parts[file])
    if not chosen:
        known = ", ".join(sorted({str(file.relative_to(found[file])) for file in found})[:8])
        raise UserError("unknown_name", "no such part of the data set", name, f"its files: {known}")
    commit = hub.commit_of(chosen[0])
    said = f"{data_set}{f' at {commit[:12]}' if commit else ''}{f', split {split}' if split else ''}"
    return chosen, f"{said}: {', '.join(file.name for file in chosen[:4])}"


def _cached(data_set: str) -> dict[Path, Path]:
    """The data files of a data set in the caches of this host, each with the folder that its name begins at."""
    snapshot = hub.cached(data_set, "dataset")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or hub.home() / "datasets") / data_set.replace("/", "___")
    return (_data_in(snapshot) if snapshot is not None else {}) or _data_in(prepared)


def _data_in(folder: Path) -> dict[Path, Path]:
    files = (file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES and file.is_file())
    kept = {file: folder for file in files if file.name not in _NOT_DATA and not file.name.startswith("cache-")}
    best = next((suffix for suffix in SUFFIXES if any(file.suffix == suffix for file in kept)), "")
    return {file: folder for file in kept if file.suffix == best}
