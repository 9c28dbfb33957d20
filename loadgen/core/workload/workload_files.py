"""Find and read the text of workload files and of other YAML files of a user."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from loadgen.core.errors import CombinedError, UserError, did_you_mean, of_reading

MAX_FILE_BYTES = 1 << 20
YAML_SUFFIXES = (".yaml", ".yml")
BEGINNING_BYTES = 1 << 16
"""The size of the beginning of a file that is searched for the keys of a workload."""
DATA_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow")


def packaged_files(kind: str = "workloads") -> dict[str, Path]:
    """Return the packaged files of a kind (workloads or contracts) by their names."""
    package = Path(__file__).parent.parent.parent
    # In a wheel the files are inside the package, in a checkout they are beside it.
    inside = package / "data" / kind
    directory = inside if inside.is_dir() else package.parent / kind
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def find_workload(path_or_name: str) -> Path:
    """Return the path of a workload. A file comes before a packaged workload of the same name."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    return packaged_files().get(path_or_name, path)


def read_workload_text(path_or_name: str) -> str:
    """Return the text of a workload file or of a packaged workload.

    Raises CombinedError if there is no such file, or if it is a data set or a contract.
    """
    file = find_workload(path_or_name)
    try:
        _refuse_data_set(file, path_or_name)
        text = read_yaml_text(
            file,
            label=path_or_name,
            kind="workload",
            # The hint looks for similar files, so it is only computed for a missing file.
            hint_if_missing=lambda: _hint_for_missing_workload(file, path_or_name),
            hint_if_too_large="use --dataset for a file of prompts",
        )
        _refuse_contract(text, path_or_name)
    except UserError as error:
        raise CombinedError([error]) from None

    return text


def _refuse_contract(text: str, label: str) -> None:
    """Raise UserError for a contract, which has the key `levels` that no workload has.

    The text is not parsed, because a mistake in it must not hide what it is.
    """
    if re.search(r"^levels:", text, re.MULTILINE):
        problem = "this is a contract, not a workload"
        raise UserError("wrong_format", problem, label, f"loadgen validate {label}")


def read_yaml_text(
    file: Path,
    label: str,
    kind: str,
    hint_if_missing: Callable[[], str],
    hint_if_too_large: str,
) -> str:
    """Return the text of a YAML file of at most 1 MiB.

    Args:
        file: The path of the file.
        label: The name of the file in error messages.
        kind: The word for such a file in error messages, such as "workload".
        hint_if_missing: Returns a hint for a file that cannot be read. It is a function, because
            the hint may need a search for similar files.
        hint_if_too_large: A hint for a file that is too large.

    Raises:
        UserError: The file cannot be read, is too large, or is no UTF-8 text.
    """
    try:
        content = _read_limited(file)
    except FileNotFoundError:
        problem = f"no such {kind}"
        raise UserError("missing_file", problem, label, hint_if_missing()) from None
    except OSError as error:
        error_code = of_reading(error)
        problem = f"cannot be read: {error.strerror}"
        raise UserError(error_code, problem, label, hint_if_missing()) from None

    if content is None:
        problem = f"the file is larger than 1 MiB, so it is not a {kind}"
        raise UserError("too_large", problem, label, hint_if_too_large)

    return _decode_text(content, label, kind)


def _decode_text(content: bytes, label: str, kind: str) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Raises UserError, with the first line that is not in UTF-8, if it is another encoding. `label`
    and `kind` are those of `read_yaml_text`.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = "not a UTF-8 text file"
        hint = f"a {kind} must be a plain text file in YAML"
        raise UserError("wrong_encoding", problem, f"{label}:{line}", hint) from None


def _read_limited(file: Path) -> bytes | None:
    """Return the content of a file, or None if it has more than MAX_FILE_BYTES."""
    if file.stat().st_size > MAX_FILE_BYTES:
        return None
    return file.read_bytes()


def _refuse_data_set(file: Path, label: str) -> None:
    """Raise UserError for a file of prompts."""
    if file.is_file() and (file.suffix in DATA_SUFFIXES or _is_json_list(file)):
        hint = f"use --dataset {label}, or --trace {label} if it has arrival times and lengths"
        raise UserError("wrong_format", "a file of prompts is not a workload", label, hint)


def _is_json_list(file: Path) -> bool:
    """Return True for a JSON file with a list. A JSON object may be a workload, as YAML may."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as stream:
        # A list begins after a few blanks at most.
        return stream.read(64).lstrip().startswith(b"[")


def _hint_for_missing_workload(file: Path, path_or_name: str) -> str:
    """Return a hint for a name that is no workload.

    It may be the name of a packaged contract, which another command reads. Otherwise the hint has
    similar names of packaged workloads and of workload files in the directory of the path.
    """
    if path_or_name in packaged_files("contracts"):
        return f"{path_or_name} is a contract: loadgen validate {path_or_name}"

    nearby_workloads = [
        str(path)
        for suffix in YAML_SUFFIXES
        for path in sorted(file.parent.glob(f"*{suffix}"))
        if _is_workload(path)
    ]
    suggestion = did_you_mean(path_or_name, [*packaged_files(), *nearby_workloads])
    return f"{suggestion}; or give the path of a YAML file"


def _is_workload(file: Path) -> bool:
    """Return True if a YAML file says what is sent, which no contract does."""
    try:
        with file.open("rb") as stream:
            beginning = stream.read(BEGINNING_BYTES)
    except OSError:
        return False
    return re.search(rb"(?m)^(requests|classes|trace):", beginning) is not None
