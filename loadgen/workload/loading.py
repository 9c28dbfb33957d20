"""From a file's name and the flags to a checked workload, or to everything that is wrong with them.

The only room of the workload that reads files (with the column files and prompt files that the workload names).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from loadgen.errors import Faults, UserError
from loadgen.workload.fields import Source, meant
from loadgen.workload.flags import Overrides, parse
from loadgen.workload.messages import fault, in_order
from loadgen.workload.overrides import apply
from loadgen.workload.schema import Workload, Written
from loadgen.workload.yaml_marks import read_yaml

_SUFFIXES = (".yaml", ".yml")
_PROMPTS = (".jsonl", ".csv", ".parquet")


def load(
    path_or_name: str,
    overrides: Overrides | None = None,
    env: Mapping[str, str] = os.environ,
    changes: Mapping[str, Any] | None = None,
) -> Workload:
    """The checked workload of a YAML file, or of a packaged workload's bare name (`rag`), changed by the flags.

    changes: checked parts that stand in for the file's, before the flags. Raises `Faults` with everything that is wrong
    in the file and the flags, in the order of the file's lines.
    """
    file = _find(path_or_name)
    text = _text(file, path_or_name)
    label = path_or_name if file == Path(path_or_name) else str(file)
    return _checked(text, label, file.parent, overrides or Overrides(), env, changes)


def of_trace(trace: str | Path, overrides: Overrides | None = None, base: str | None = None) -> Workload:
    """The workload that replays a trace: its arrivals, lengths and common beginnings, changed by the flags.

    base: a workload file or name whose promises and limits hold, and whose requests and stages the trace replaces.
    Raises `Faults`.
    """
    path = Path(trace)
    if not path.is_file():
        what = "is a folder, not a trace" if path.is_dir() else "no such trace"
        raise Faults([UserError(what, f"--trace {trace}", "a file of one of the formats of docs/workloads.md")])
    quoted = json.dumps(str(path.resolve()))
    said = f"requests: {{trace: {quoted}}}\nstages: [{{arrival: {{trace: {quoted}}}}}]\n"
    if base is None:
        name = path.name.partition(".")[0] or "trace"
        return _checked(f"name: {json.dumps(name)}\n{said}", str(trace), path.parent, overrides or Overrides(), {})
    replayed = _checked(f"name: trace\n{said}", str(trace), path.parent, Overrides(), {})
    changes = {"requests": replayed.requests, "stages": replayed.stages}
    return load(base, overrides, changes=changes)


def of_mapping(workload: Mapping[str, Any], overrides: Overrides | None = None) -> Workload:
    """The same from Python values, written as in a file; files are named relative to the current folder."""
    import yaml

    text = yaml.safe_dump(dict(workload), sort_keys=False)
    return _checked(text, "(mapping)", Path.cwd(), overrides or Overrides(), {})


def given(path_or_name: str | None, trace: str | Path | None, overrides: Overrides | None = None) -> Workload:
    """The workload that a command was given: a file or a name, a trace, or both. Raises `Faults`."""
    if trace is not None:
        return of_trace(trace, overrides, path_or_name)
    if path_or_name is None:
        hint = f"give a file, one of {', '.join(packaged())}, or --trace FILE"
        raise Faults([UserError("no workload", "loadgen run", hint)])
    return load(path_or_name, overrides)


def _checked(
    text: str,
    label: str,
    folder: Path,
    overrides: Overrides,
    env: Mapping[str, str],
    changes: Mapping[str, Any] | None = None,
) -> Workload:
    flags, faults = parse(overrides)
    top, found = read_yaml(text, label, env)
    source = Source(file=label, folder=folder, faults=found)
    try:
        written = Written.model_validate(top, context=source)
    except ValidationError as error:
        source.faults.extend(fault(item, top, label) for item in error.errors(include_url=False))
        raise Faults(in_order(source.faults) + faults) from None
    if faults:  # what a file lacks can be told only when all flags are understood
        raise Faults(in_order(source.faults) + faults)
    values = {name: getattr(written, name) for name in Written.model_fields} | dict(changes or {})
    workload = Workload.model_construct(**values, source_text=text)
    workload = apply(workload, flags, source.faults, label, top)
    if source.faults:
        raise Faults(in_order(source.faults))
    return workload


def packaged() -> dict[str, Path]:
    """The shipped workloads by their bare names."""
    package = Path(__file__).parent.parent
    inside = package / "data" / "workloads"  # in a wheel; in a checkout the folder beside the package
    folder = inside if inside.is_dir() else package.parent / "workloads"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _find(path_or_name: str) -> Path:
    path = Path(path_or_name)
    known = packaged()
    if path.is_file() or path_or_name not in known:
        return path
    return known[path_or_name]


def _text(file: Path, as_given: str) -> str:
    try:
        data = file.read_bytes() if file.stat().st_size <= 1 << 20 else None
    except OSError as error:
        what = "no such workload" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        beside = [str(other) for suffix in _SUFFIXES for other in file.parent.glob(f"*{suffix}")]
        hint = meant(as_given, [*packaged(), *beside])
        raise Faults([UserError(what, as_given, f"{hint}; or the path of a YAML file")]) from None
    if file.suffix in _PROMPTS:
        hint = (
            f"name it in a workload file: requests: {{from: {file.name}}}; arrivals with lengths are --trace {as_given}"
        )
        raise Faults([UserError("a file of prompts is no workload", as_given, hint)])
    if data is None:
        raise Faults(
            [
                UserError(
                    "more than 1 MiB: not a workload",
                    as_given,
                    "prompts belong into a JSONL file: requests: {from: ...}",
                )
            ]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Faults(
            [UserError("not a text file (UTF-8)", f"{as_given}:{line}", "a workload is plain text in YAML")]
        ) from None
    return text
