"""Load a workload: from the name of a file and the flags to a checked workload, or to all faults in them.

The entry point of this package. Files that a workload names (columns, prompts, traces) are read by other modules.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from loadgen.core.errors import CombinedError, UserError, did_you_mean, of_reading
from loadgen.core.units import NS_PER_S
from loadgen.core.workload.diagnostics import sort_errors, validate_document
from loadgen.core.workload.file_models import FileContext
from loadgen.core.workload.flags import Overrides, read_flags
from loadgen.core.workload.overrides import apply
from loadgen.core.workload.schema import TRACE_KEYS, Workload, WorkloadFile
from loadgen.core.workload.yaml_marks import Map, read_yaml

_SUFFIXES = (".yaml", ".yml")
NO_OVERRIDES = Overrides()
_PROMPT_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow")


def load(
    path_or_name: str,
    overrides: Overrides = NO_OVERRIDES,
    env: Mapping[str, str] = os.environ,
    changes: Mapping[str, Any] | None = None,
) -> Workload:
    """Return the checked workload of a YAML file or of a packaged workload (`rag`), changed by the flags.

    changes: checked parts that replace those of the file before the flags apply. Raises `CombinedError` with all faults of the
    file and the flags, in the order of the lines of the file.
    """
    file = _workload_path(path_or_name)
    text = read_workload_text(path_or_name)
    label = path_or_name if file == Path(path_or_name) else str(file)
    return _checked(text, label, file.parent, overrides, env, changes)


def read_workload_text(path_or_name: str) -> str:
    """The text of a workload file or of a packaged workload. Raises `CombinedError`."""
    return _read_text(_workload_path(path_or_name), path_or_name)


def workload_from_trace(
    trace: str | Path, overrides: Overrides = NO_OVERRIDES, base: str | None = None
) -> Workload:
    """Return the workload that replays a trace (arrivals, lengths, shared prefixes), changed by the flags.

    base: a workload file or name that gives the SLO and the limits; the trace replaces its requests and stages.
    Raises `CombinedError`.
    """
    path = Path(trace)
    _check_is_file(path, "--trace", "trace", "a file of one of the formats of docs/workloads.md")
    quoted_path = json.dumps(str(path.resolve()))
    parts = f"requests: {{trace: {quoted_path}}}\nstages: [{{arrival: {{trace: {quoted_path}}}}}]\n"
    if base is None:
        name = path.name.partition(".")[0] or "trace"
        return _checked(
            f"name: {json.dumps(name)}\n{parts}", str(trace), path.parent, overrides, {}
        )
    overrides = _as_its_block(base, overrides)
    of_the_trace = {
        name: getattr(overrides, name)
        for name in ("trace_slice", "trace_loop", "on_bad_row", "trace_replay", "trace_unit")
    }
    replayed = _checked(
        f"name: trace\n{parts}", str(trace), path.parent, Overrides(**of_the_trace), {}
    )
    changes = {"requests": replayed.requests, "stages": replayed.stages}
    return load(base, overrides, changes=changes)


def _as_its_block(base: str, overrides: Overrides) -> Overrides:
    """The flags, with what the `trace:` block of a workload says of the playing of a trace where they do not."""
    top, faults = read_yaml(read_workload_text(base), base, os.environ)
    block = top.get("trace") if not faults and isinstance(top, Mapping) else None
    said = (
        {key: value for key, value in block.items() if key != "file"}
        if isinstance(block, Mapping)
        else {}
    )
    if unknown := [key for key in said if key not in TRACE_KEYS]:
        what, hint = f"trace has no key {unknown[0]}", f"known: {', '.join(TRACE_KEYS)}"
        raise CombinedError([UserError("unknown_key", what, base, hint)])
    options = {key if key == "on_bad_row" else f"trace_{key}": value for key, value in said.items()}
    of_block = read_flags(**options)
    values = {name: getattr(of_block, name) for name in options if getattr(overrides, name) is None}
    return replace(overrides, **values, faults=(*overrides.faults, *of_block.faults))


def workload_from_mapping(
    workload: Mapping[str, Any], overrides: Overrides = NO_OVERRIDES, label: str = "(mapping)"
) -> Workload:
    """Like `load`, from a mapping written as in a file; paths are relative to the current folder. Raises `CombinedError`.

    `label`: where faults are said to be; of what flags alone make, those flags.
    """
    import yaml

    text = yaml.safe_dump(dict(workload), sort_keys=False)
    return _checked(text, label, Path.cwd(), overrides, {})


def _check_is_file(path: Path, flag: str, what: str, hint: str) -> None:
    if path.is_dir():
        raise CombinedError(
            [UserError("unreadable_file", f"is a folder, not a {what}", f"{flag} {path}", hint)]
        )
    if not path.is_file():
        raise CombinedError([UserError("missing_file", f"no such {what}", f"{flag} {path}", hint)])


DURATION_NS = 60 * NS_PER_S  # of a load of two lengths, where nothing else says when it ends


def workload_from_dataset(
    dataset: str | Path, overrides: Overrides = NO_OVERRIDES, base: str | None = None
) -> Workload:
    """Return the workload that sends the rows of a data set, changed by the flags.

    base: a workload file or name that gives everything but the requests. Raises `CombinedError`.
    """
    name = place = str(dataset)
    if not name.startswith("hf:"):
        hint = "a file (JSONL, JSON list, CSV, Parquet, Arrow), or a data set of Hugging Face: hf:ORG/NAME"
        _check_is_file(Path(name), "--dataset", "file", hint)
        place = str(Path(name).resolve())
    requests = {"requests": {"from": place}}
    if base is None:
        called = Path(name.partition(":")[2] or name).stem
        return workload_from_mapping({"name": called, **requests}, overrides, f"--dataset {name}")
    one = workload_from_mapping(
        {"name": "data", **requests, "stages": [{"arrival": {"closed": 1}, "count": 1}]}
    )
    return load(base, overrides, changes={"requests": one.requests})


def load_from_options(
    path_or_name: str | None,
    trace: str | Path | None,
    overrides: Overrides,
    dataset: str | Path | None = None,
) -> Workload:
    """The workload of a command line: a file or a name, a trace or a data set, or both; or two lengths.

    Raises `CombinedError`.
    """
    if trace is not None and dataset is not None:
        what = "a trace brings its own requests"
        raise CombinedError(
            [UserError("conflict", what, f"--dataset {dataset}", "give --trace or --dataset")]
        )
    if trace is not None:
        return workload_from_trace(trace, overrides, path_or_name)
    if dataset is not None:
        return workload_from_dataset(dataset, overrides, path_or_name)
    if path_or_name is None:
        if overrides.input_tokens is not None and overrides.output_tokens is not None:
            lengths = {"input_tokens": 1, "output_tokens": 1}  # the flags stand over them
            name = f"{overrides.input_tokens} in, {overrides.output_tokens} out"
            if overrides.duration is None and overrides.num_requests is None:
                overrides = replace(overrides, duration=DURATION_NS)
            return workload_from_mapping(
                {"name": name, "requests": lengths}, overrides, "--input-tokens, --output-tokens"
            )
        if overrides.input_tokens is not None or overrides.output_tokens is not None:
            one, other = ("--input-tokens", "--output-tokens")[
                :: 1 if overrides.output_tokens is None else -1
            ]
            hint = f"add {other}, or name a workload whose other lengths stay"
            raise CombinedError(
                [
                    *overrides.faults,
                    UserError("missing_option", f"no workload, and {one} alone", one, hint),
                ]
            )
        data = "--dataset FILE, --trace FILE, or --input-tokens and --output-tokens"
        hint = f"give a file, one of {', '.join(packaged_files())}, {data}"
        raise CombinedError(
            list(overrides.faults) or [UserError("missing_option", "no workload", "WORKLOAD", hint)]
        )
    return load(path_or_name, overrides)


def _checked(
    text: str,
    label: str,
    folder: Path,
    overrides: Overrides,
    env: Mapping[str, str],
    changes: Mapping[str, Any] | None = None,
) -> Workload:
    top, faults_of_yaml = read_yaml(text, label, env)
    if changes and isinstance(top, Map) and "trace" in top:  # what it brings is replaced
        del top["trace"]
        top.setdefault("requests", {"input_tokens": 1, "output_tokens": 1})
    source = FileContext(file=label, directory=folder, faults=faults_of_yaml)
    written = validate_document(WorkloadFile, top, source)
    if (
        written is None or overrides.faults
    ):  # a flag may supply what the file lacks, so check that only with valid flags
        raise CombinedError(sort_errors(source.faults) + list(overrides.faults))
    values = {name: getattr(written, name) for name in WorkloadFile.model_fields} | dict(
        changes or {}
    )
    workload = Workload.model_construct(**values, source_text=text)
    workload = apply(workload, overrides, source.faults, label, top)
    if source.faults:
        raise CombinedError(sort_errors(source.faults))
    return workload


def packaged_files(kind: str = "workloads") -> dict[str, Path]:
    """The packaged workloads, or contracts: name → path."""
    package = Path(__file__).parent.parent.parent
    inside = (
        package / "data" / kind
    )  # exists in a wheel; in a checkout the folder is beside the package
    folder = inside if inside.is_dir() else package.parent / kind
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _workload_path(path_or_name: str) -> Path:
    path = Path(path_or_name)
    known = packaged_files()
    if path.is_file() or path_or_name not in known:
        return path
    return known[path_or_name]


def _is_workload(file: Path) -> bool:
    """Whether a YAML file says what is sent, as no contract does; False where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return re.search(rb"(?m)^(requests|classes|trace):", opened.read(1 << 16)) is not None
    except OSError:
        return False


def _is_json_list(file: Path) -> bool:
    """A workload may be written as a JSON object, which is YAML too; a list is rows of data."""
    with file.open("rb") as opened:
        return file.suffix == ".json" and opened.read(64).lstrip().startswith(b"[")


def _read_text(file: Path, as_given: str) -> str:
    def missing() -> str:
        if as_given in packaged_files("contracts"):
            return f"{as_given} is a contract: loadgen validate {as_given}"
        there = (path for suffix in _SUFFIXES for path in sorted(file.parent.glob(f"*{suffix}")))
        return f"{did_you_mean(as_given, [*packaged_files(), *map(str, filter(_is_workload, there))])}; or the path of a YAML file"

    try:
        if file.is_file() and (file.suffix in _PROMPT_SUFFIXES or _is_json_list(file)):
            hint = (
                f"--dataset {as_given}; with arrivals and lengths it is a trace: --trace {as_given}"
            )
            raise UserError("wrong_format", "a file of prompts is no workload", as_given, hint)
        text = read_yaml_text(
            file, as_given, "workload", missing, "a file of prompts is given with --dataset"
        )
        if re.search(r"(?m)^levels:", text):
            raise UserError(
                "wrong_format",
                "a contract, not a workload",
                as_given,
                f"loadgen validate {as_given}",
            )
        return text
    except UserError as error:
        raise CombinedError([error]) from None


def read_yaml_text(file: Path, shown: str, kind: str, missing: Callable[[], str], hint: str) -> str:
    """The text of a YAML file of at most 1 MiB. Raises UserError.

    `kind`: the word for the file in messages; `missing`, `hint`: what to do where it cannot be read, or is none.
    """
    try:
        data = file.read_bytes() if file.stat().st_size <= 1 << 20 else None
    except OSError as error:
        problem = (
            f"no such {kind}"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read: {error.strerror}"
        )
        raise UserError(of_reading(error), problem, shown, missing()) from None
    if data is None:
        raise UserError("too_large", f"more than 1 MiB: not a {kind}", shown, hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            "wrong_encoding",
            "not a text file (UTF-8)",
            f"{shown}:{line}",
            f"a {kind} is plain text in YAML",
        ) from None
