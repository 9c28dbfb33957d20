"""Reads result folders as evidence for a cost or a plan.

A measurement that is not valid is refused unless the caller allows it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen import result_kinds
from loadgen.core import format
from loadgen.core.errors import (
    UNSOUND,
    CombinedError,
    LoadgenError,
    UserError,
    collecting,
    missing_result,
    of_reading,
)
from loadgen.core.limits import CONTRADICTING_SHARE
from loadgen.core.metrics.reasons import join_reasons
from loadgen.core.metrics.summary import FILE, Summary, load_summary
from loadgen.core.results.record import CONTRADICTORY_USAGE
from loadgen.core.workload.diagnostics import locate
from loadgen.core.workload.yaml_marks import place_at, read_yaml
from loadgen.pricing.evidence import Evidence
from loadgen.repeated.capacity import CAPACITY_FILE, Capacity
from loadgen.repeated.repeats import is_valid
from loadgen.runs.slo_text import list_objectives


class UnsoundEvidenceError(LoadgenError):
    """The evidence is a measurement that is not valid. The command exits with code 3."""

    exit_code = UNSOUND


def read_evidence(folders: Sequence[Path], *, allow_invalid: bool = False) -> tuple[Evidence, ...]:
    """Read the measurements in each result folder. The name of the evidence is that of its folder.

    All folders are read before any error is raised.

    Raises:
        CombinedError: Everything that is wrong with the folders.
    """
    errors: list[LoadgenError] = []
    evidence: list[Evidence] = []

    resolved_folders: set[Path] = set()
    for folder, name in zip(folders, format.short_names(folders), strict=True):
        if folder.resolve() in resolved_folders:
            errors.append(
                UserError("duplicate", "the folder is given twice", str(folder), "give it once")
            )
            continue

        resolved_folders.add(folder.resolve())
        with collecting(errors):
            evidence.append(_read_folder(folder, name, allow_invalid))

    if errors:
        raise CombinedError(errors)

    return tuple(evidence)


def resolve_gpu_count(evidence: Evidence, requested: int | None) -> int | None:
    """Return the number of GPUs that a run used, or None if it is not known.

    It is the number that the run recorded, or else the number that the user specified.

    Args:
        evidence: The measurements of the run.
        requested: The value of `--gpus`, or None.

    Raises:
        UserError: Both are known and differ. Metrics of 72 GPUs must not be shown as those of 4.
    """
    recorded = evidence.summary.target.gpus
    if recorded is None:
        return requested
    if requested is None or requested == recorded:
        return recorded

    raise UserError(
        "conflict",
        f"the run recorded {format.counted(recorded, 'GPU')}, not {requested}",
        f"--gpus, {evidence.folder}",
        "remove --gpus; if the recorded number is wrong, run again",
    )


def _read_folder(folder: Path, name: str, allow_invalid: bool) -> Evidence:
    """Read the measurements in one result folder: a capacity, a run, or repeats of a run.

    INVALID repeats are excluded, unless the user allows them or no repeat is valid.

    Raises:
        UserError: The folder has no result that a cost or a plan could be based on.
        UnsoundEvidenceError: The result is a measurement that is not valid.
    """
    capacity_facts = result_kinds.capacity_facts(folder)
    if capacity_facts.missing_reason:
        raise UserError("mismatch", capacity_facts.missing_reason, str(folder), capacity_facts.hint)
    if capacity_facts.capacity is not None:
        return _read_capacity(folder, name, capacity_facts.capacity, allow_invalid)

    runs = result_kinds.runs_in(folder)
    finished_runs = sorted(run for run in runs if (run / FILE).is_file())
    if not finished_runs:
        raise _build_missing_summary_error(folder, runs)

    is_single_run = finished_runs == [folder]
    used_runs = finished_runs
    if not is_single_run and not allow_invalid:
        used_runs = _select_valid_runs(finished_runs)

    summaries: tuple[Summary, ...]
    if is_single_run:
        summaries = (_read_summary(folder, allow_invalid),)
    else:
        summaries = _read_repeats(folder, used_runs, allow_invalid)

    return Evidence(
        name=name,
        folder=str(folder),
        summaries=summaries,
        is_offline=all(map(_is_offline, used_runs, summaries)),
        run_folders=tuple(map(str, used_runs)),
        excluded_repeats=tuple(run.name for run in finished_runs if run not in used_runs),
    )


def _select_valid_runs(runs: Sequence[Path]) -> list[Path]:
    """Return the repeats that are valid measurements, or all of them if none is."""
    valid = [run for run in runs if is_valid(load_summary(_read(run / FILE), str(run / FILE)))]
    return valid or list(runs)


def _read_capacity(folder: Path, name: str, capacity: Capacity, allow_invalid: bool) -> Evidence:
    """Return a stored capacity with the run that confirms it.

    Raises UnsoundEvidenceError for a capacity that was not found, and UserError for a file that
    does not fit its run.
    """
    file = folder / CAPACITY_FILE
    if capacity.is_unfinished:
        _refuse_unfinished_search(capacity, file, allow_invalid)

    run = folder / capacity.evidence
    summary = _read_summary(run, allow_invalid, f"named as the evidence of {file}")
    if not list_objectives(summary):
        raise UserError(
            "no_slo",
            "the run of the capacity has no SLO",
            str(file),
            "search again with --slo",
        )

    if capacity.unit != "requests" and summary.sessions is None:
        raise UserError(
            "mismatch",
            f"the capacity is in {capacity.unit}, but its run has no conversations",
            f"{file} (unit)",
            "use unit: requests, or name another run as evidence",
        )

    return Evidence(
        name=name,
        folder=str(folder),
        summaries=(summary,),
        capacity=capacity,
        run_folders=(str(run),),
    )


def _build_missing_summary_error(folder: Path, runs: Sequence[Path]) -> UserError:
    """Return the error for a folder without a summary, with a hint at what to do.

    `runs` are the unfinished runs in the folder.
    """
    hint = "give a folder written by loadgen run"
    if not folder.is_dir():
        return missing_result(folder, hint)

    if tuple(runs) == (folder,):
        # The run was killed before its end, so there are records but no summary.
        quoted = shlex.quote(str(folder))
        hint = f"create it from the records: loadgen report {quoted} --json > {quoted}/summary.json"

    return UserError("no_result", "the folder has no summary.json", str(folder), hint)


def _refuse_unfinished_search(capacity: Capacity, file: Path, allow_invalid: bool) -> None:
    """Raise UnsoundEvidenceError for a search that was stopped, or in which no load passed.

    The search was stopped before it confirmed a capacity, so the highest load that passed so far is
    only a lower bound. It is accepted if the user allows invalid evidence.
    """
    has_no_passing_load = capacity.state == "none"
    if has_no_passing_load:
        raise UnsoundEvidenceError(
            "unsound",
            f"no capacity was found: {capacity.lower_bound_reason}",
            str(file),
            "search again from a lower load",
        )

    if allow_invalid and capacity.rate_per_s:
        return

    progress = "no load has passed so far"
    hint = _create_resume_hint(capacity, file)
    if capacity.rate_per_s:
        progress = f"{capacity.rate_per_s:.4g} {capacity.unit}/s passed so far"
        hint += "; or use --allow-invalid to take that rate as a lower bound"

    raise UnsoundEvidenceError(
        "unsound", f"{capacity.lower_bound_reason}; {progress}", str(file), hint
    )


def _create_resume_hint(capacity: Capacity, file: Path) -> str:
    """Return how to resume the search or sweep that was stopped.

    The command that the file stores is shown only if it is a search command. The folder may be
    somebody else's, and users type what a hint says.
    """
    if not capacity.resume_command:
        folder = shlex.quote(str(file.parent))
        return f"loadgen report {folder} shows why it stopped"

    if _is_search_command(capacity.resume_command):
        return capacity.resume_hint
    if capacity.method == "sweep":
        return "repeat the command of the sweep with the same --out to resume it"

    return "loadgen search --resume resumes it"


def _is_search_command(command: str) -> bool:
    """Return True if the text is exactly one command of loadgen that searches for a capacity."""
    try:
        arguments = shlex.split(command)
    except ValueError:  # such as a quotation mark that is not closed
        return False

    program_and_subcommand = tuple(arguments[:2])
    is_search = program_and_subcommand in (
        ("loadgen", "search"),
        ("loadgen", "sweep"),
        ("loadgen", "mlperf"),
    )

    # The shell could run more than one command if the text had unquoted characters such as ";".
    # `shlex.join` quotes them all, so such a text differs from the one that it returns.
    return is_search and shlex.join(arguments) == command


def _is_offline(folder: Path, summary: Summary) -> bool:
    """Return True for an Offline run of MLPerf, and for another run with all requests due at once.

    The folder of an MLPerf run states its scenario. Other runs are recognised by their summary:
    if all requests are due at once, there is neither a steady state nor an arrival rate.
    """
    is_offline_scenario = result_kinds.capacity_facts(folder).is_offline
    if is_offline_scenario is not None:
        return is_offline_scenario
    has_steady_state = bool(summary.window.steady.duration_s)
    has_arrival_rate = summary.load.offered_rps is not None
    return not has_steady_state and not has_arrival_rate


def _read_repeats(folder: Path, runs: Sequence[Path], allow_invalid: bool) -> tuple[Summary, ...]:
    """Return the summaries of runs, after checking that they repeat each other.

    Raises UserError if they have different configurations or loads. If all of them missed their
    SLO, they are rather the loads of a sweep that found no capacity, which is an
    UnsoundEvidenceError.
    """
    summaries = tuple(_read_summary(run, allow_invalid) for run in runs)
    is_slo_missed_by_all = all(summary.goodput.met is False for summary in summaries)

    first = summaries[0]
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        differences = _list_run_differences(first, summary)
        if not differences:
            continue

        if is_slo_missed_by_all:
            raise UnsoundEvidenceError(
                "unsound",
                "no capacity was found: none of these loads met its SLO",
                str(folder),
                "add a lower load, or give one run",
            )

        raise UserError(
            "mismatch",
            f"the runs are not repeats: {runs[0].name} and {run.name} differ in "
            f"{', '.join(differences)}",
            str(folder),
            f"give one run, or the folder of a sweep or search with a {CAPACITY_FILE}",
        )

    return summaries


def _list_run_differences(first: Summary, other: Summary) -> list[str]:
    """Return the names of the properties that must be equal in repeats, but differ in two runs."""
    properties = (
        ("config fingerprint", first.fingerprints.recipe, other.fingerprints.recipe),
        ("load", first.load.arrival, other.load.arrival),
        ("instance type", first.target.shape, other.target.shape),
        ("model", first.target.model, other.target.model),
        ("GPUs", first.target.gpus, other.target.gpus),
    )
    return [name for name, first_value, value in properties if first_value != value]


def _read_summary(folder: Path, allow_invalid: bool, missing_hint: str = "") -> Summary:
    """Read the summary of a run, and refuse a run whose numbers no cost can be based on.

    Args:
        folder: The folder of the run.
        allow_invalid: True to accept a run whose verdict is INVALID.
        missing_hint: The hint if the folder has no summary.

    Raises:
        UserError: There is no summary.
        CombinedError: The run is INVALID, no request succeeded, or tokens were not counted.
    """
    path = folder / FILE
    if not path.is_file():
        hint = missing_hint or "give a folder written by loadgen run"
        raise UserError("no_result", "the folder has no summary.json", str(folder), hint)

    file = _SummaryFile(path, _read(path))
    summary = load_summary(file.data, str(path))

    errors: list[LoadgenError] = []
    if not summary.verdict.valid and not allow_invalid:
        errors.append(
            UnsoundEvidenceError(
                "unsound",
                f"the run is INVALID: {join_reasons(summary.verdict.reasons)}",
                file.place("verdict", "valid"),
                "run again, or use --allow-invalid",
            )
        )

    if summary.requests.ok == 0:
        errors.append(
            UserError(
                "no_figure",
                "no request of the run succeeded, so there is nothing to price",
                file.place("requests", "ok"),
                "run again",
            )
        )
    else:
        errors.extend(_find_token_count_errors(summary, file))

    if errors:
        raise CombinedError(errors)

    return summary


class _SummaryFile(NamedTuple):
    """The bytes of a summary.json, to name places in it."""

    path: Path
    data: bytes

    def place(self, *keys: str) -> str:
        """Return where a field stands, as "file:line:column (path)"."""
        # JSON is YAML, whose reader knows the line of each key.
        document, _ = read_yaml(self.data.decode(errors="replace"), str(self.path), {})
        location = locate(document, keys)
        return str(place_at(str(self.path), location[0], location[1]))


def _find_token_count_errors(summary: Summary, file: _SummaryFile) -> list[LoadgenError]:
    """Return the errors for token counts on which no cost can be based.

    There are three reasons, and only the first that applies is reported: the counts were withheld
    as implausible, they contradict each other, or responses without counts are missing in the sums.
    """
    why_withheld = summary.withheld_metrics.get("tokens")
    if why_withheld:
        return [
            UnsoundEvidenceError(
                "unsound",
                f"output tokens are not reported: {why_withheld}",
                file.place("tokens", "output"),
                "fix the usage that the server reports",
            )
        ]

    contradicting = _count_contradicting_responses(summary)
    if contradicting:
        return [
            UnsoundEvidenceError(
                "unsound",
                f"the server's token counts of {contradicting:,} of {summary.requests.ok:,} "
                "responses contradict each other",
                file.place("verdict", "warnings"),
                "the warnings of the run say how; fix the usage that the server reports",
            )
        ]

    return list(_list_uncounted_errors(summary, file))


def _list_uncounted_errors(summary: Summary, file: _SummaryFile) -> Iterator[LoadgenError]:
    """Yield an error if the tokens of some successful responses were not counted.

    A sum without them would be too low, and so would the cost of a token price. `sources` has the
    number of responses by who counted them: the server, a local tokenizer, or "none".
    """
    tokens = summary.tokens
    counted_kinds = [("input", tokens.input, tokens.sources.input)]

    # Other APIs return numbers, not tokens. They are paid by the request or the hour.
    if summary.run.api not in NON_GENERATIVE_APIS:
        counted_kinds.append(("output", tokens.output, tokens.sources.output))

    for kind, total_tokens, responses_by_source in counted_kinds:
        counted_responses = sum(
            responses for source, responses in responses_by_source.items() if source != "none"
        )
        if total_tokens is None or counted_responses < summary.requests.ok:
            yield UserError(
                "no_figure",
                f"{kind} tokens were counted for {counted_responses:,} of "
                f"{summary.requests.ok:,} responses",
                file.place("tokens", kind),
                "use a server that reports usage, or --tokenizer",
            )


def _count_contradicting_responses(summary: Summary) -> int:
    """Return how many responses had token counts that contradict each other.

    They are counted from the warnings of the run. A few of them are tolerated, for which this
    returns 0.
    """
    contradicting = 0
    for warning in summary.verdict.warning_codes:
        if warning.code != "responses_remarked":
            continue
        if warning.values["remark"].startswith(CONTRADICTORY_USAGE):
            contradicting += int(warning.values["responses"])

    is_tolerable = contradicting <= CONTRADICTING_SHARE * summary.requests.ok
    return 0 if is_tolerable else contradicting


def _read(file: Path) -> bytes:
    """Return the content of a file. Raises UserError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(of_reading(error), f"cannot be read: {error.strerror}", str(file)) from None
