"""Load a workload from a file, a mapping, a trace, a data set or options, and check it.

All mistakes in the file and in the options are reported together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec.structs import replace

from loadgen.core.errors import CombinedError, UserError
from loadgen.core.units import NS_PER_S
from loadgen.core.workload.data_files import HUB
from loadgen.core.workload.diagnostics import DocumentErrors, sort_errors, validate_document
from loadgen.core.workload.file_models import FileContext
from loadgen.core.workload.flags import Overrides, read_flags
from loadgen.core.workload.overrides import apply_overrides
from loadgen.core.workload.schema import TRACE_KEYS, Workload, WorkloadFile
from loadgen.core.workload.trajectory_overrides import keep_trajectory_fields
from loadgen.core.workload.workload_files import (
    find_workload,
    packaged_files,
    read_workload_text,
)
from loadgen.core.workload.yaml_marks import Map, read_yaml

NO_OVERRIDES = Overrides()

DEFAULT_DURATION_NS = 60 * NS_PER_S
"""The duration of a load that options describe by two lengths, without an end."""


TRACE_OPTIONS = (
    "trace_slice",
    "trace_speed",
    "trace_loop",
    "trace_replay",
    "trace_unit",
    "on_bad_row",
)
"""The options that the `trace:` block of a workload can set. They are fields of `Overrides`."""

PLACEHOLDER_STAGE = {"arrival": {"closed": 1}, "count": 1}
"""A valid stage for a workload of which only the requests are used."""

PLACEHOLDER_REQUESTS = {"input_tokens": 1, "output_tokens": 1}
"""Valid requests for a workload without requests of its own, which are replaced later.

They are those of a trace, of a data set, or of generated prompts with the lengths of the options.
"""


@dataclass(frozen=True)
class _Source:
    """The text of a workload, and what it is read with.

    Attributes:
        text: The text in YAML.
        label: The name of the file in error messages.
        directory: The directory that paths in the text are relative to.
        env: The environment variables that the text may refer to.
    """

    text: str
    label: str
    directory: Path
    env: Mapping[str, str] = field(default_factory=dict)


def load(
    path_or_name: str,
    overrides: Overrides = NO_OVERRIDES,
    env: Mapping[str, str] = os.environ,
    replaced_fields: Mapping[str, Any] | None = None,
) -> Workload:
    """Return the workload of a YAML file or a packaged workload (`rag`), changed by the options.

    Args:
        path_or_name: The path of the file or the name of the packaged workload.
        overrides: The options of the command line.
        env: The environment variables that the file may refer to.
        replaced_fields: Validated fields that replace those of the file before the options apply,
            such as the requests of a trace. Each key is the name of a field of `Workload`.

    Raises:
        CombinedError: All mistakes in the file, in the order of its lines, and in the options.
    """
    file = find_workload(path_or_name)
    text = read_workload_text(path_or_name)
    label = path_or_name if file == Path(path_or_name) else str(file)
    return _build_workload(_Source(text, label, file.parent, env), overrides, replaced_fields)


def workload_from_mapping(
    workload: Mapping[str, object], overrides: Overrides = NO_OVERRIDES, label: str = "(mapping)"
) -> Workload:
    """Return the workload of a mapping with the keys of a workload file, changed by the options.

    The mapping is written as YAML and loaded like a file, so that the same checks apply and the run
    can store the text of its workload.

    Args:
        workload: The content of a workload file, such as {"name": "chat", "requests": {...}}. Paths
            in it are relative to the current directory.
        overrides: The options of the command line.
        label: What the mapping is called in error messages.

    Raises:
        CombinedError: All mistakes in the mapping and the options.
    """
    text = yaml.safe_dump(dict(workload), sort_keys=False)
    return _build_workload(_Source(text, label, Path.cwd()), overrides)


def workload_from_trace(
    trace: str | Path, overrides: Overrides = NO_OVERRIDES, base: str | None = None
) -> Workload:
    """Return the workload that replays a trace (arrivals, lengths, shared prefixes).

    Args:
        trace: The file of the trace.
        overrides: The options of the command line, which change the workload.
        base: A workload file or name that gives the SLO and the limits. The trace replaces its
            requests and stages.

    Raises:
        CombinedError: All mistakes in the trace, the base and the options.
    """
    path = Path(trace)
    hint = "give a file in one of the formats in docs/reference/data-sets.md"
    _check_is_file(path, "--trace", "trace", hint)

    if base is None:
        name = path.name.partition(".")[0] or "trace"
        return _build_workload(_trace_source(path, name), overrides)

    completed_overrides = _complete_from_trace_block(overrides, base)
    return _replay_in_base(path, base, completed_overrides)


def _replay_in_base(trace: Path, base: str, overrides: Overrides) -> Workload:
    """Return a base workload with the requests and stages of a trace in place of its own.

    The trace is first loaded as a workload by itself, with only the options for reading it. The
    options for the load and the limits apply to the result.
    """
    options_for_reading = Overrides(
        trace_slice=overrides.trace_slice,
        trace_loop=overrides.trace_loop,
        on_bad_row=overrides.on_bad_row,
        trace_replay=overrides.trace_replay,
        trace_unit=overrides.trace_unit,
    )
    replay = _build_workload(_trace_source(trace, "trace"), options_for_reading)
    fields_of_trace = {"requests": replay.requests, "stages": replay.stages}

    return load(base, overrides, replaced_fields=fields_of_trace)


def _trace_source(path: Path, name: str) -> _Source:
    """Return the text of a workload that replays a trace."""
    quoted_path = json.dumps(str(path.resolve()))
    text = (
        f"name: {json.dumps(name)}\n"
        f"requests: {{trace: {quoted_path}}}\n"
        f"stages: [{{arrival: {{trace: {quoted_path}}}}}]\n"
    )
    return _Source(text, str(path), path.parent)


def _complete_from_trace_block(overrides: Overrides, base: str) -> Overrides:
    """Return the options, completed by the `trace:` block of a base workload.

    The block says how a trace is replayed, for example `trace: {file: a.jsonl, speed: 2}`. Each key
    but `file` has the effect of an option, such as `trace_speed`, unless that option is specified.
    The command line names another trace than `file`.

    Raises CombinedError for an unknown key in the block. All other mistakes in the base are
    reported later, when it is loaded.
    """
    block = _read_trace_block(base)
    if block is None:
        return overrides

    options_of_block = read_flags(**_options_of_trace_block(block, base))
    errors = (*overrides.errors, *options_of_block.errors)
    values_of_block = {
        name: getattr(options_of_block, name)
        for name in TRACE_OPTIONS
        if getattr(overrides, name) is None
    }
    return replace(overrides, **values_of_block, errors=errors)


def _read_trace_block(base: str) -> Mapping[str, object] | None:
    """Return the `trace:` block of a workload file or name.

    Return None if it has no such block, or if it is not valid YAML.
    """
    document = read_yaml(read_workload_text(base), base, os.environ)
    if document.errors:
        return None
    block = document.mapping.get("trace")
    return block if isinstance(block, Mapping) else None


def _options_of_trace_block(block: Mapping[str, object], workload_name: str) -> dict[str, Any]:
    """Return the options, by name, that have the same effect as the keys of a `trace:` block.

    For example, `{file: a.jsonl, speed: 2}` gives {"trace_speed": 2}. The key `file` is left out,
    because the option `--trace` replaces it. Raises CombinedError for an unknown key, with the name
    of the workload as its place.
    """
    options: dict[str, Any] = {}
    for key, value in block.items():
        if key not in TRACE_KEYS:
            hint = f"known: {', '.join(TRACE_KEYS)}"
            problem = f"trace has no key {key}"
            raise CombinedError([UserError("unknown_key", problem, workload_name, hint)])
        if key == "on_bad_row":
            options["on_bad_row"] = value
        elif key != "file":
            options[f"trace_{key}"] = value

    return options


def workload_from_dataset(
    dataset: str | Path, overrides: Overrides = NO_OVERRIDES, base: str | None = None
) -> Workload:
    """Return the workload that sends the rows of a data set, changed by the options.

    If the base sends recorded sessions and the data set has some, the data set replaces only the
    one of the base. The other keys of its requests, such as `start`, are kept.

    Args:
        dataset: A file, or a data set of Hugging Face (`hf:ORG/NAME`).
        overrides: The options.
        base: A workload file or name that gives everything but the requests.

    Raises:
        CombinedError: All mistakes in the data set, the base and the options.
    """
    source = _locate_dataset(str(dataset))
    key_of_dataset = _key_of_dataset(source, overrides, base)
    requests = {key_of_dataset: source.path_or_name}
    if base is None:
        return workload_from_mapping(
            {"name": source.short_name, "requests": requests}, overrides, f"--dataset {dataset}"
        )

    # Requests can only be validated as a part of a workload.
    data_workload = workload_from_mapping(
        {"name": "data", "requests": requests, "stages": [PLACEHOLDER_STAGE]}
    )
    return load(base, overrides, replaced_fields={"requests": data_workload.requests})


def _key_of_dataset(source: _DatasetSource, overrides: Overrides, base: str | None) -> str:
    """Return the key of requests for a data set: `from` for its rows, or `trajectories`.

    A data set with one message per row can only be sent session by session. For any other one, the
    option `--set turns=` decides. Without it, all turns are sent if the base sends recorded
    sessions and the data set has some.
    """
    from loadgen.core.workload.trajectory_data import has_message_rows, has_session_rows

    sends_all_turns = overrides.turns == "all" or has_message_rows(source.path_or_name)
    if overrides.turns is None and base is not None and _sends_trajectories(base):
        sends_all_turns = has_session_rows(source.path_or_name)
    return "trajectories" if sends_all_turns else "from"


def _sends_trajectories(base: str) -> bool:
    """Return True if the requests of a workload file or name are recorded sessions.

    Return False if it is not valid YAML: all mistakes in it are reported later, when it is loaded.
    """
    document = read_yaml(read_workload_text(base), base, os.environ)
    if document.errors:
        return False
    requests = document.mapping.get("requests")
    return isinstance(requests, Mapping) and "trajectories" in requests


class _DatasetSource(NamedTuple):
    """Where a data set is, and what a workload that sends it is called."""

    path_or_name: str
    short_name: str


def _locate_dataset(dataset: str) -> _DatasetSource:
    """Return where a data set is, and a short name for the workload that sends it.

    A data set on Hugging Face keeps its name: `hf:ORG/NAME` has the short name NAME. Any other one
    is a file, whose absolute path is returned: `a/chat.jsonl` has the short name `chat`. Raises
    CombinedError if there is no such file.
    """
    is_on_hugging_face = dataset.startswith(HUB)
    if is_on_hugging_face:
        return _DatasetSource(dataset, short_name=Path(dataset.removeprefix(HUB)).stem)

    hint = (
        "give a file (JSONL, JSON list, CSV, Parquet, Arrow), or a data set of "
        "Hugging Face: hf:ORG/NAME"
    )
    path = Path(dataset)
    _check_is_file(path, "--dataset", "file", hint)

    return _DatasetSource(str(path.resolve()), short_name=path.stem)


def load_from_options(
    path_or_name: str | None,
    trace: str | Path | None,
    overrides: Overrides,
    dataset: str | Path | None = None,
) -> Workload:
    """Return the workload that a command line describes.

    There are four cases: a trace, a data set, a workload file or packaged workload, or only two
    lengths. With a trace or a data set, the workload file supplies everything else.

    Args:
        path_or_name: A workload file, or the name of a packaged workload.
        trace: The file of a trace to replay.
        overrides: The other options.
        dataset: A file with prompts, or the name of a data set of Hugging Face.

    Raises:
        CombinedError: All mistakes in the files and the options.
    """
    if trace is not None and dataset is not None:
        problem = "a trace already contains the requests, so no data set can be added"
        hint = "give either --trace or --dataset"
        raise CombinedError([UserError("conflict", problem, f"--dataset {dataset}", hint)])

    if dataset is not None:
        return workload_from_dataset(dataset, overrides, path_or_name)

    overrides = _refuse_turns_without_dataset(overrides)
    if trace is not None:
        return workload_from_trace(trace, overrides, path_or_name)
    if path_or_name is None:
        return _workload_from_lengths(overrides)

    return load(path_or_name, overrides)


def _refuse_turns_without_dataset(overrides: Overrides) -> Overrides:
    """Return the options of a command line without a data set, with an error for `--set turns`."""
    if overrides.turns is None:
        return overrides

    problem = "only a data set of the option --dataset can be sent with its first turns or all"
    hint = "add --dataset FILE, or leave the option out: trajectories are sent with all turns"
    error = UserError("no_effect", problem, f"--set turns={overrides.turns}", hint)
    return replace(overrides, errors=(*overrides.errors, error))


def _workload_from_lengths(overrides: Overrides) -> Workload:
    """Return the workload with the prompt and output length of the options, and nothing else.

    The workload gets these lengths when the options are applied to it, like any other workload. Its
    load lasts DEFAULT_DURATION_NS if the options set no end. Raises CombinedError if a length is
    missing.
    """
    input_tokens = overrides.input_tokens
    output_tokens = overrides.output_tokens
    if input_tokens is None and output_tokens is None:
        raise _missing_workload(overrides)
    if output_tokens is None:
        raise _missing_length(overrides, "--input-tokens", "--output-tokens")
    if input_tokens is None:
        raise _missing_length(overrides, "--output-tokens", "--input-tokens")

    if overrides.duration is None and overrides.num_requests is None:
        overrides = replace(overrides, duration=DEFAULT_DURATION_NS)

    workload = {
        "name": f"{input_tokens} in, {output_tokens} out",
        "requests": PLACEHOLDER_REQUESTS,
    }
    return workload_from_mapping(workload, overrides, "--input-tokens, --output-tokens")


def _missing_workload(overrides: Overrides) -> CombinedError:
    """Return the error for a command line that names no workload.

    If options have mistakes, these are returned instead, because a mistyped option can be the
    reason why there is no workload.
    """
    if overrides.errors:
        return CombinedError(list(overrides.errors))
    other_ways = "use --dataset FILE, --trace FILE, or --input-tokens and --output-tokens"
    hint = f"give a file, one of {', '.join(packaged_files())}, {other_ways}"
    return CombinedError([UserError("missing_option", "no workload", "WORKLOAD", hint)])


def _missing_length(overrides: Overrides, option: str, missing_option: str) -> CombinedError:
    """Return the error for only one of the two lengths, with those of other options."""
    hint = f"add {missing_option}, or name a workload, which keeps its other length"
    error = UserError("missing_option", f"{option} alone does not define a workload", option, hint)
    return CombinedError([*overrides.errors, error])


def _check_is_file(path: Path, option: str, kind: str, hint: str) -> None:
    """Raise CombinedError unless the path of an option is a file."""
    if path.is_dir():
        problem = f"is a folder, not a {kind}"
        raise CombinedError([UserError("unreadable_file", problem, f"{option} {path}", hint)])
    if not path.is_file():
        problem = f"no such {kind}"
        raise CombinedError([UserError("missing_file", problem, f"{option} {path}", hint)])


def _build_workload(
    source: _Source, overrides: Overrides, replaced_fields: Mapping[str, object] | None = None
) -> Workload:
    """Build the workload that a YAML text and the options of the command line describe together.

    If the text leaves no valid workload, its mistakes are raised at once. Otherwise they are raised
    together with those that the options and the text have in combination.

    Args:
        source: The text, its name in error messages, and its directory.
        overrides: The options of the command line.
        replaced_fields: Validated fields by name that replace those of the text, such as the
            requests of a trace.

    Raises:
        CombinedError: All mistakes in the text and the options.
    """
    document = read_yaml(source.text, source.label, source.env)
    errors = DocumentErrors(source.label, document.mapping, document.errors)
    if replaced_fields:
        _remove_trace_block(document.mapping)

    workload_file = _validate_workload_file(source, overrides, errors)
    new_fields = keep_trajectory_fields(workload_file.requests, replaced_fields or {})
    workload = Workload.from_file(workload_file, source.text, new_fields)
    workload = apply_overrides(workload, overrides, errors)
    errors.raise_if_any()

    return workload


def _validate_workload_file(
    source: _Source, overrides: Overrides, errors: DocumentErrors
) -> WorkloadFile:
    """Return the document of a workload file as a model.

    Raises CombinedError if the document is not valid, or if options have mistakes. In both cases
    the load cannot be checked further, because it depends on the file and the options together.

    Args:
        source: The name of the file and its directory.
        overrides: The options of the command line.
        errors: The document, and the mistakes that were found before. Smaller mistakes in the
            document, which leave a model, are added here and not raised.
    """
    context = FileContext(file=source.label, directory=source.directory, errors=errors.errors)
    workload_file = validate_document(WorkloadFile, errors.document, context)
    if workload_file is None or overrides.errors:
        raise CombinedError(sort_errors(errors.errors) + list(overrides.errors))
    return workload_file


def _remove_trace_block(document: Map) -> None:
    """Remove the `trace:` block of a workload whose requests and stages are replaced later.

    The block stands for both of them. It is removed, so that the trace that it names is not read
    for nothing. A workload must have requests, so it gets placeholders.
    """
    if "trace" in document:
        del document["trace"]
        document.setdefault("requests", dict(PLACEHOLDER_REQUESTS))
