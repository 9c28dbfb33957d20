"""The directory of an experiment: the runs that a search or a sweep made.

plan.json       what was requested (ExperimentPlan); the same command resumes it, others are refused
probes.jsonl    the result of each run (TrialResult), one line each, appended when the run ended
p03-12.5/, c8/  one run each, in the layout of `loadgen run`
unfinished/     runs that did not finish
curve.csv       latencies, throughput and goodput by load, with a mark for the Pareto front
capacity.json   the highest load that passes, for `loadgen cost` and `loadgen size`
SHA256SUMS      the hash of every file, written last
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from loadgen.cli.resume import arguments_to_type_again
from loadgen.core import format, run_folder, seeds
from loadgen.core.errors import UserError, missing_result
from loadgen.core.execution.folder_names import move_to_unfinished
from loadgen.core.results import checksums, store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.json_files import decode_json, decode_json_lines
from loadgen.core.schedule.sessions import build_sessions
from loadgen.core.workload import Mix, Workload
from loadgen.runs.load_points import LoadPoint
from loadgen.search.search_results import SearchResult, TrialResult
from loadgen.search.search_settings import SearchSettings
from loadgen.search.sweep import LoadKind

if TYPE_CHECKING:
    from loadgen.repeated.capacity import Unit

SCHEMA = 1
PLAN_FILE = "plan.json"
TRIALS_FILE = "probes.jsonl"
RESULT_FILE = "search.json"

IDENTITY_FIELDS = {
    "command_name": "command",
    "load_kind": "loads",
    "workload": "workload",
    "source_text": "workload",
    "target": "target",
    "options": "flags",
}
"""The fields of a plan that make it the same experiment, with their names in an error message."""


class ExperimentPlan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"command_name": "by", "load_kind": "kind", "options": "flags"},
):
    """What was requested of a search or a sweep.

    Two plans are the same experiment if the fields of IDENTITY_FIELDS are equal. The loads are not
    among them: a later command may add more.

    Attributes:
        command_name: The command that made the directory.
        load_kind: What the loads are.
        workload: The name of the workload, as it was typed.
        source_text: The text of the workload file.
        target: The target, as it is shown.
        options: The other options that change the load or the objectives, as text.
        seed: The seed from which the runs derive their seeds or salts. None if it is not known.
        metadata: The values of --metadata.
        command: The command line, without its secrets.
        rules: The rules under which it ran, apart from its objectives: "mlperf" or "".
        load_points: The load points of a sweep.
    """

    schema: int = SCHEMA
    command_name: Literal["search", "sweep"]
    load_kind: LoadKind
    workload: str
    source_text: str
    target: str
    options: dict[str, str]
    seed: int | None = None
    metadata: dict[str, str] = {}
    command: tuple[str, ...] = ()
    rules: str = ""
    load_points: tuple[LoadPoint, ...] = ()

    @property
    def is_by_mlperf_rules(self) -> bool:
        """Whether it runs by the rules of MLPerf. Older plans show it only by their command."""
        return self.rules == "mlperf" or self.command[1:2] == ("mlperf",)


class StoredSearch(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"result": "answer", "term_names": "goal", "trials": "told"},
):
    """The content of `search.json`.

    Attributes:
        result: What the search found.
        term_names: The names of the objectives that had to hold.
        trials: The results of the trials, in order.
        simulated: Whether a simulated server responded.
        seed: The seed of the search.
        metadata: The values of --metadata.
        settings: The settings of the search. With `trials` they determine `result`.
    """

    result: SearchResult
    term_names: tuple[str, ...]
    trials: tuple[TrialResult, ...]
    simulated: bool = False
    seed: int | None = None
    metadata: dict[str, str] = {}
    settings: SearchSettings


# Plans


def read_plan(output_dir: Path) -> ExperimentPlan:
    """Return the plan in a directory. Raises UserError if there is none."""
    if not output_dir.is_dir():
        raise missing_result(output_dir, f"a folder with {PLAN_FILE}")

    if not (output_dir / PLAN_FILE).is_file():
        raise UserError(
            "no_result",
            "no search to resume",
            f"--resume {output_dir}",
            f"give a directory with {PLAN_FILE}",
        )

    refuse_links(output_dir)
    return _decode_plan(output_dir / PLAN_FILE)


def read_search_plan(output_dir: Path) -> ExperimentPlan:
    """Return the plan of a search. Raises UserError if the directory is not that of a search."""
    plan = read_plan(output_dir)
    if plan.command_name != "search":
        name = plan.command_name
        hint = f"resume a {name} by repeating its command with the same --out"
        raise UserError("mismatch", f"a {name}, not a search", f"--resume {output_dir}", hint)
    return plan


def command_of(output_dir: Path) -> str:
    """Return the command that made a directory, "search" or "sweep".

    Return "" if no plan is readable.
    """
    try:
        return read_plan(output_dir).command_name
    except UserError:
        return ""


def is_search(output_dir: Path) -> bool:
    """Return whether a directory with a plan is that of a search."""
    return command_of(output_dir) == "search"


def is_sweep(output_dir: Path) -> bool:
    """Return whether a directory with a plan is that of a sweep.

    A damaged plan counts as that of a sweep, whose runs can be read without it.
    """
    return command_of(output_dir) != "search"


def choose_seed(output_dir: Path, requested: int | None) -> int:
    """Return the seed of an experiment: the requested one, the one in its plan, or a new one.

    The stored seed makes the later trials of a resumed experiment those that it would have run.
    """
    if requested is not None:
        return requested
    plan_file = output_dir / PLAN_FILE
    stored_seed = _decode_plan(plan_file).seed if plan_file.is_file() else None
    return seeds.random_seed() if stored_seed is None else stored_seed


def begin_experiment(output_dir: Path, plan: ExperimentPlan) -> list[TrialResult]:
    """Create the directory of an experiment with its plan, or resume an existing one.

    Return the results that it has already. Raises UserError if the directory holds runs of another
    command, or another experiment.
    """
    plan_file = output_dir / PLAN_FILE
    is_resumed = plan_file.is_file()
    if is_resumed:
        check_same_experiment(_decode_plan(plan_file), plan, output_dir)
    elif output_dir.exists() and _holds_runs(output_dir):
        raise UserError(
            "mismatch",
            f"the directory has runs that do not belong to a {plan.command_name}",
            str(output_dir),
            "use another --out",
        )

    output_dir.mkdir(parents=True, exist_ok=True)
    checksums.begin(output_dir)

    if not is_resumed:
        store.replace(plan_file, format.document(plan))

    return read_results(output_dir)


def _holds_runs(output_dir: Path) -> bool:
    """Return whether a directory is that of a run, or has directories of runs in it."""
    is_run = (output_dir / "run.json").exists()
    return is_run or any(entry.is_dir() for entry in output_dir.iterdir())


def check_same_experiment(
    stored: ExperimentPlan, requested: ExperimentPlan, output_dir: Path
) -> None:
    """Raise UserError if the stored plan is of another experiment than the requested one.

    The message names each difference once, for example "workload, flags (slo: 1 there, 2 here)".
    """
    changed_labels: list[str] = []
    for field_name, label in IDENTITY_FIELDS.items():
        is_changed = getattr(stored, field_name) != getattr(requested, field_name)
        if is_changed and label not in changed_labels:  # Two fields describe the workload.
            changed_labels.append(label)

    if not changed_labels:
        return

    labels = ", ".join(changed_labels)
    changed_options = _describe_changed_options(stored, requested)
    raise UserError(
        "mismatch",
        f"the directory contains another {stored.command_name}, which differs in: "
        f"{labels}{changed_options}",
        str(output_dir),
        "repeat the same command, or use another --out",
    )


def _describe_changed_options(stored: ExperimentPlan, requested: ExperimentPlan) -> str:
    """Return the options that differ, for example " (slo: 1 there, 2 here)", or ""."""
    differences = []
    for name in sorted(stored.options.keys() | requested.options.keys()):
        stored_value = stored.options.get(name, "none")
        requested_value = requested.options.get(name, "none")
        if stored_value != requested_value:
            differences.append(f"{name}: {stored_value} there, {requested_value} here")
    return f" ({'; '.join(differences)})" if differences else ""


def _decode_plan(path: Path) -> ExperimentPlan:
    """Return the plan in a file. Raises UserError if it is damaged or of a newer schema."""
    return decode_json(
        path.read_bytes(), ExperimentPlan, str(path), "the plan of a search or sweep", schema=SCHEMA
    )


def resume_command(output_dir: Path, plan: ExperimentPlan) -> str:
    """Return the command that resumes a search, for example "loadgen search --resume out".

    Options that a search does not store, such as the URL, are part of the returned command.
    """
    arguments = ["--resume", str(output_dir), *arguments_to_type_again(plan.command)]
    return f"{_command_words(plan)} {shlex.join(arguments)}"


def _command_words(plan: ExperimentPlan) -> str:
    """Return the command of a search without its arguments, such as "loadgen mlperf server"."""
    if plan.command[1:2] == ("mlperf",):
        return " ".join(plan.command[:3])
    if plan.command[1:2] == ("search",):
        return " ".join(plan.command[:2])
    return "the same command and"


# Units


def load_unit(plan: ExperimentPlan, counted_unit: Unit) -> str:
    """Return the unit of the loads of a search, as it is written after a number.

    Examples are " req/s", " conversations/s" and " in flight". `counted_unit` is what a rate of the
    workload counts, for example "conversations".
    """
    if plan.options.get("over") == "sessions":
        return " sessions"
    if plan.load_kind == "concurrency":
        return " in flight"
    if plan.is_by_mlperf_rules:
        return " queries/s"
    return " req/s" if counted_unit == "requests" else f" {counted_unit}/s"


def find_counted_unit(workload: Workload) -> Unit:
    """Return what a request rate of this workload counts, before anything was sent.

    - "conversations" if every request is a turn of a conversation or task.
    - "requests" if there are only single requests.
    - "starts" for a mix of both. Its rate counts what is started: a conversation or a request.
    """
    requests = workload.requests
    requests_by_class = [requests]
    if isinstance(requests, Mix):
        requests_by_class = [request_class.requests for request_class in requests.classes.values()]

    # The largest number of turns is the same for every seed, so any seed serves here.
    any_seed = 0
    are_conversations = [
        build_sessions(class_requests, any_seed).max_turns > 1
        for class_requests in requests_by_class
    ]
    if all(are_conversations):
        return "conversations"

    return "starts" if any(are_conversations) else "requests"


# Results


def read_results(output_dir: Path, *, include_invalid: bool = False) -> list[TrialResult]:
    """Return the results of the runs so far, in their order.

    Some runs are left out, and so run again: those from the first incomplete line of the file on,
    those whose directory is gone, and those that were not valid, unless `include_invalid`. If a
    trial was run again, only its last result counts.
    """
    path = output_dir / TRIALS_FILE
    lines = path.read_bytes().splitlines() if path.is_file() else []
    last_results = {result.number: result for result in decode_json_lines(lines, TrialResult)}

    return [
        result
        for result in last_results.values()
        if (include_invalid or result.is_valid) and _has_run(output_dir, result)
    ]


def _has_run(output_dir: Path, result: TrialResult) -> bool:
    """Return whether the directory of the run of a trial still exists and is complete."""
    return (output_dir / result.run_name / run_folder.SUMMARY).is_file()


def append_result(output_dir: Path, result: TrialResult) -> None:
    """Append a result to the file of the trials, as a line of its own.

    If an earlier process was killed while it wrote, its incomplete last line is removed first.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / TRIALS_FILE

    content = path.read_bytes() if path.is_file() else b""
    if not content.endswith(b"\n"):
        complete_lines = content[: content.rfind(b"\n") + 1]
        store.replace(path, complete_lines)

    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def new_run_dir(output_dir: Path, name: str) -> Path:
    """Return the directory of a new run, after moving an earlier attempt to `unfinished/`."""
    run_dir = output_dir / name
    move_to_unfinished(run_dir)
    return run_dir


def read_search(output_dir: Path) -> StoredSearch | None:
    """Return the stored result of a search, or None if it has not ended.

    Raises UserError if the file is damaged.
    """
    path = output_dir / RESULT_FILE
    if not path.is_file():
        return None

    return decode_json(
        path.read_bytes(),
        StoredSearch,
        str(path),
        "the result of a search",
        f"loadgen search --resume {shlex.quote(str(output_dir))} writes it",
    )
