"""The folder of an experiment: runs of one workload at several loads, chosen by a search or a sweep. IO.

    plan.json       what was requested (ExperimentPlan): the same command resumes here, another one is refused
    probes.jsonl    the result of each run (load_search.TrialResult), one line each, appended when the run ended
    p03-12.5/, c8/  one run each, in the layout of `loadgen run`
    unfinished/     runs that did not finish
    curve.csv       latencies, throughput and goodput by load, with a mark for the Pareto front
    capacity.json   the highest load that holds, for `loadgen cost` and `loadgen size`
    SHA256SUMS      the hash of every file, written last

This module runs nothing (`trials.py` does) and chooses no load.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from loadgen.cli.resume import arguments_to_type_again
from loadgen.core import format, run_folder, seeds
from loadgen.core.errors import UserError, nothing_there
from loadgen.core.results import checksums, store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.manifest import decoded, decoded_lines
from loadgen.core.schedule.sessions import build_sessions
from loadgen.core.workload import Mix, Workload, request_fingerprint
from loadgen.repeated import capacity
from loadgen.repeated.run_warnings import describe_other_work
from loadgen.result_kinds import PAGE
from loadgen.runs import levels
from loadgen.runs.headline import promises
from loadgen.runs.level_figures import FIGURES
from loadgen.runs.load_points import LoadPoint
from loadgen.search.load_search import (
    CONFIRMING,
    SearchAnswer,
    SearchSettings,
    TrialResult,
    shown_trial,
    state_of,
)
from loadgen.search.sweep import Kind

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.render.section import Report

CsvCell = float | int | str | None

SCHEMA = 1
PLAN = "plan.json"
TOLD = "probes.jsonl"
CURVE = "curve.csv"
ANSWER = "search.json"


class ExperimentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two searches, or two sweeps, the same experiment.

    The loads are not part of it: a later command may add more.
    """

    schema: int = SCHEMA
    by: Literal["search", "sweep"]
    kind: Kind
    workload: str
    source_text: str
    target: str
    flags: dict[str, str]  # other flags that change the load or what must hold, as given
    seed: int | None = (
        None  # the runs derive their seeds or salts from it; not part of the identity. null: not known
    )
    metadata: dict[str, str] = {}  # of --metadata; not part of the identity
    command: tuple[str, ...] = ()  # as typed, without its secrets; not part of the identity
    rules: str = ""  # by which it ran, beside the limits that were given: mlperf
    load_points: tuple[LoadPoint, ...] = ()  # of a sweep; not part of the identity


OF_A_REQUEST = (
    "model",
    "server",
    "api",
    "stream",
    "extra_body",
    "tokenizer",
    "route",
    "session_header",
    "slo_headers",
    "reset_cache",
)
"""Settings that change what is sent or how answers are read, beside the target."""


def of_requests(settings: Settings) -> dict[str, str]:
    """Those of `OF_A_REQUEST` that were given, as text for a plan."""
    usual = type(settings)()
    given = {name: getattr(settings, name) for name in OF_A_REQUEST}
    return {name: str(value) for name, value in given.items() if value != getattr(usual, name)}


def plan_of(folder: Path) -> ExperimentPlan:
    """What was requested in a folder. Raises UserError where nothing was."""
    if not folder.is_dir():
        raise nothing_there(folder, f"a folder with {PLAN}")
    if not (folder / PLAN).is_file():
        raise UserError(
            "no_result", "no search to go on with", f"--resume {folder}", f"a folder with {PLAN}"
        )
    refuse_links(folder)
    return _read(folder / PLAN)


def search_of(folder: Path) -> ExperimentPlan:
    """What a search was asked in its folder. Raises UserError where there is none."""
    plan = plan_of(folder)
    if plan.by != "search":
        hint = f"a {plan.by} goes on where its own command is given again, with the same --out"
        raise UserError("mismatch", f"a {plan.by}, not a search", f"--resume {folder}", hint)
    return plan


def begun_by(folder: Path) -> str:
    """The command whose folder this is, search or sweep; "" where it is of neither, or its plan is damaged."""
    try:
        return plan_of(folder).by
    except UserError:
        return ""


def is_search(folder: Path) -> bool:
    """Whether a folder with a plan is that of a search."""
    return begun_by(folder) == "search"


def is_sweep(folder: Path) -> bool:
    """Whether a folder with a plan is that of a sweep; a damaged plan is taken for one."""
    return begun_by(folder) != "search"


def seed_of(folder: Path, asked: int | None) -> int:
    """The seed of the experiment in `folder`: the one asked for, else the one it was begun with, else a fresh one."""
    if asked is None and (folder / PLAN).is_file():
        asked = _read(folder / PLAN).seed
    return seeds.fresh() if asked is None else asked


class StoredSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `search.json`: the answer of a search, what it searched under, and the results of its trials."""

    answer: SearchAnswer
    goal: tuple[str, ...]
    told: tuple[TrialResult, ...]
    simulated: bool = False
    seed: int | None = None
    metadata: dict[str, str] = {}
    settings: SearchSettings


def resuming(folder: Path, plan: ExperimentPlan) -> str:
    """The command that goes on with a search, with all that only its user may say."""
    begun_with, group = "the same command and", plan.command[1:2] == ("mlperf",)
    if group or plan.command[1:2] == ("search",):
        begun_with = " ".join(plan.command[: 3 if group else 2])
    return f"{begun_with} {shlex.join(['--resume', str(folder), *arguments_to_type_again(plan.command)])}"


def stored_search(folder: Path) -> StoredSearch | None:
    """The answer that a search left in its folder; None where there was no search. Raises UserError if damaged."""
    path = folder / ANSWER
    if not path.is_file():
        return None
    return decoded(
        path.read_bytes(),
        StoredSearch,
        str(path),
        "the answer of a search",
        f"loadgen search --resume {shlex.quote(str(folder))} writes it",
    )


def is_mlperf(plan: ExperimentPlan) -> bool:
    """Whether it ran by MLPerf's rules: it says so itself, or, before plans did, by the command that was typed."""
    return plan.rules == "mlperf" or plan.command[1:2] == ("mlperf",)


def unit_of(plan: ExperimentPlan, counted: capacity.Unit) -> str:
    """What the loads of a search are, as written after a number. `counted`: what its rates are of."""
    if plan.kind == "concurrency":
        return " in flight"
    return " queries/s" if is_mlperf(plan) else "/s" if counted == "requests" else f" {counted}/s"


def counted_by(workload: Workload) -> capacity.Unit:
    """What a rate of a workload counts, before a run of it says (`capacity.rate_unit`)."""
    asked = workload.requests
    parts = [one.requests for one in asked.classes.values()] if isinstance(asked, Mix) else [asked]
    chained = [build_sessions(part, 0).turns > 1 for part in parts]
    return "conversations" if all(chained) else "starts" if any(chained) else "requests"


_WORDS = {
    "by": "command",
    "kind": "levels",
    "workload": "workload",
    "source_text": "workload",
    "target": "target",
    "flags": "flags",
}


def begin(folder: Path, plan: ExperimentPlan) -> list[TrialResult]:
    """Create the folder, or continue an existing one. Returns the results that are there already (see `told`).

    Raises UserError when the folder holds something else, or the runs of another plan.
    """
    path = folder / PLAN
    if path.is_file():
        refuse_other(_read(path), plan, folder)
    elif folder.exists() and (
        (folder / "run.json").exists() or any(entry.is_dir() for entry in folder.iterdir())
    ):
        raise UserError(
            "mismatch",
            f"the folder holds runs, and no {plan.by}",
            str(folder),
            "give another --out",
        )
    folder.mkdir(parents=True, exist_ok=True)
    checksums.begin(folder)
    if not path.is_file():
        store.replace(path, format.document(plan))
    return told(folder)


def refuse_other(before: ExperimentPlan, plan: ExperimentPlan, folder: Path) -> None:
    """Raises UserError unless what was begun in a folder is what is asked for now."""
    differs = [name for name in _WORDS if getattr(before, name) != getattr(plan, name)]
    if differs:
        words = ", ".join(dict.fromkeys(_WORDS[name] for name in differs))
        what = f"another {before.by} was begun here, with other {words}{_flags(before, plan)}"
        raise UserError(
            "mismatch", what, str(folder), "give the same command again, or another --out"
        )


def _flags(before: ExperimentPlan, plan: ExperimentPlan) -> str:
    """The flags that differ, as text: " (slo: 1 there, 2 here)"; "" when none does."""
    names = sorted(
        name
        for name in before.flags.keys() | plan.flags.keys()
        if before.flags.get(name) != plan.flags.get(name)
    )
    differences = (
        f"{name}: {before.flags.get(name, 'none')} there, {plan.flags.get(name, 'none')} here"
        for name in names
    )
    return f" ({'; '.join(differences)})" if names else ""


def _read(path: Path) -> ExperimentPlan:
    return decoded(
        path.read_bytes(), ExperimentPlan, str(path), "the plan of a search or sweep", schema=SCHEMA
    )


def told(folder: Path, *, invalid_too: bool = False) -> list[TrialResult]:
    """The results of the runs so far, in their order.

    Left out, and so run again, is what says nothing: an incomplete line and all lines after it, a trial that was not
    valid (unless `invalid_too`), and a run whose folder is gone.
    """
    path = folder / TOLD
    lines = path.read_bytes().splitlines() if path.is_file() else []
    results = {result.ask.number: result for result in decoded_lines(lines, TrialResult)}
    return [
        result
        for result in results.values()
        if (invalid_too or result.outcome != "invalid")
        and (folder / result.folder / run_folder.SUMMARY).is_file()
    ]


def append(folder: Path, one: TrialResult) -> None:
    """Append a result as a line of its own, also after a line that was cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TOLD
    before = path.read_bytes() if path.is_file() else b""
    if not before.endswith(b"\n"):
        store.replace(path, before[: before.rfind(b"\n") + 1])
    with path.open("ab") as file:
        file.write(msgspec.json.encode(one) + b"\n")


def unused(folder: Path, name: str) -> Path:
    """The folder for a new run. A folder that an earlier attempt left there moves to `unfinished/`."""
    path = folder / name
    if path.exists():
        aside = folder / "unfinished"
        aside.mkdir(exist_ok=True)
        path.rename(aside / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
    return path


def finish(
    folder: Path,
    told: Sequence[TrialResult],
    answer: SearchAnswer,
    *,
    workload: Workload,
    table: levels.SweepCurve | None = None,
    go_on: str = "",
) -> None:
    """Write the curve, and the capacity if there is one; otherwise remove an old capacity file.

    `go_on`: the command that goes on with a search that has not ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = outputs(folder, told, answer, workload=workload, table=table, go_on=go_on)
    for name, data in files.items():
        store.replace(folder / name, data)
    if capacity.CAPACITY_FILE not in files:
        (folder / capacity.CAPACITY_FILE).unlink(missing_ok=True)


def report_files(said: Report, table: str) -> dict[str, bytes]:
    """Return the report of a sweep as files: Markdown, called `table`, and the page."""
    from loadgen.render import html, markdown

    return {table: markdown.render(said).encode(), PAGE: html.render(said).encode()}


def outputs(
    folder: Path,
    told: Sequence[TrialResult],
    answer: SearchAnswer,
    *,
    workload: Workload | None = None,
    table: levels.SweepCurve | None = None,
    go_on: str = "",
) -> dict[str, bytes]:
    """Return the content of the curve and, if there is one, of the capacity, by file name.

    A search always has a capacity, with its state; so has a sweep with an SLO on one curve.
    Without the workload the recipe of the capacity stays empty. `table` is the curve of a sweep,
    whose best load point is its capacity.
    """
    lines = curve(told) if table is None else sweep_lines(told, table)
    files = {CURVE: "\n".join(lines).encode() + b"\n"}
    found = highest(folder, told, answer, workload=workload, table=table)
    if table is None:
        found = with_state(found, answer, going_on(answer, told, go_on))
    else:
        found = with_state_of_sweep(found, table)
    if found is None:
        return files
    is_simulated = any(result.figures.get("simulated") for result in told)
    found = msgspec.structs.replace(found, simulated=is_simulated)
    return files | {capacity.CAPACITY_FILE: capacity.dump_capacity(found)}


RESUMABLE = ("", "interrupted", "gone", "nodes", "invalid", "refused", "probes", "time")
"""Reasons for which a search ended before it had its answer, so that it can be resumed."""

MORE_PROBES = 20  # half of the default limit of a search: enough for most confirmations


OF_THE_LOAD = ("too_few", "unfinished", "all_unfinished", "none_due", "dropped")
"""Codes of trials that are not valid for what the load itself is: the same load again would not be either."""


def going_on(answer: SearchAnswer, told: Sequence[TrialResult], resume: str) -> str:
    """Return the command that resumes a stopped search.

    `resume` is the command without a raised limit. Return "" if nothing is left to do, or if the
    search would stop at the same place again. A search by MLPerf's rules has no limits to raise.
    """
    if answer.reason not in RESUMABLE or not resume:
        return ""
    if answer.reason == "invalid" and told and told[-1].code in OF_THE_LOAD:
        return ""
    raised = _raised_limit(answer)
    if raised and resume.startswith("loadgen mlperf"):
        return ""
    return resume + raised


def _raised_limit(answer: SearchAnswer) -> str:
    """Return the option that raises the limit at which a search stopped, or "" without one."""
    if answer.reason == "probes":
        return f" --max-probes {answer.probes + MORE_PROBES}"
    if answer.reason == "time":
        return f" --max-time {math.ceil(2 * answer.spent_s)}s"
    return ""


def with_state(
    found: capacity.Capacity | None, answer: SearchAnswer, go_on: str = ""
) -> capacity.Capacity:
    """The capacity of a search with its state, also where the search was stopped, or found none.

    `go_on`: as `going_on` gives it. Until a load is confirmed, what held to its end is only what was tried so far: a
    lower bound, without an interval.
    """
    shown = (None, None) if found is None else (bool(found.confirmed), found.sustained)
    state = state_of(answer, *shown)
    if found is not None and state in ("sustained", "confirmed", "held"):
        return msgspec.structs.replace(found, state=state, resume_command=go_on)
    nothing = capacity.Capacity(rate_per_s=0.0, method="search")
    return msgspec.structs.replace(
        found or nothing,
        low_per_s=None,
        high_per_s=None,
        horizon_s=None,
        lower_bound=True,
        lower_bound_reason=NOT_FOUND.get(answer.reason, NOTHING_HELD)
        if state == "none"
        else STOPPED,
        state=state,
        resume_command=go_on,
    )


def with_state_of_sweep(
    found: capacity.Capacity | None, table: levels.SweepCurve
) -> capacity.Capacity | None:
    """Return the capacity of a sweep with its state.

    A sweep that was stopped has only the highest load that met the SLO so far, without an
    interval. Return None without an SLO, and for a sweep over several lengths or targets.
    """
    if not table.slo or table.groups:
        return None
    nothing = capacity.Capacity(rate_per_s=0.0, method="sweep", lower_bound=True)
    if table.not_run:
        return msgspec.structs.replace(
            found or nothing,
            low_per_s=None,
            high_per_s=None,
            horizon_s=None,
            lower_bound=True,
            lower_bound_reason=SWEEP_STOPPED,
            state="stopped",
            resume_command=table.resume,
        )
    return found or msgspec.structs.replace(
        nothing, lower_bound_reason=_no_capacity_reason(table), state="none"
    )


def _no_capacity_reason(table: levels.SweepCurve) -> str:
    """Return why a finished sweep with an SLO has no capacity."""
    return NO_POINT_MET if levels.lowest_growing(table.levels) is None else NO_POINT_SUSTAINED


SWEEP_STOPPED = "the sweep was stopped before all of its load points had run"
NO_POINT_MET = "no load point of the sweep is a valid measurement that met the SLO"
NO_POINT_SUSTAINED = "no load point of the sweep met the SLO and was sustained"
STOPPED = "the search was stopped before it confirmed a load"
NOTHING_HELD = "no load held"
NOT_FOUND = {
    "unconfirmed": "loads held, and none of them when it was to be confirmed at full length"
}


def highest(
    folder: Path,
    told: Sequence[TrialResult],
    answer: SearchAnswer,
    *,
    workload: Workload | None = None,
    table: levels.SweepCurve | None = None,
) -> capacity.Capacity | None:
    """The capacity that these runs are evidence of.

    None without an SLO, without a load that held at full length, or when full-length runs failed where they should have
    passed. It is a lower bound when no run was over; of a sweep where its table says why. The evidence is the highest
    confirmed run, or else the highest run that held to its end; of a sweep its best level. Rate and tokens are those of
    that run: its load and its steady tokens; never the load of the answer, at which half of the runs fail.
    The interval is that of the answer, widened to the rate, and below the load that was seen not to be sustained. In a
    closed loop, the rate is the rate that the run completed, without an interval, because the interval of the answer is
    in lanes.
    """
    best = (
        shown_trial(answer, told)
        if table is None
        else next((one for one in told if one.folder == table.best), None)
    )
    if best is None or answer.load is None or answer.reason == "unconfirmed":
        return None
    lower_bound_reason = (
        levels.bound_why(table)
        if table is not None
        else capacity.HIGHEST_LOAD_PASSED
        if answer.missed is None
        else ""
    )
    summary = run_folder.kept_summary(folder / best.folder)
    if not promises(summary):
        return None
    closed = any(stage.concurrency is not None for stage in summary.stages if stage.measured)
    rate = best.figures.get("steady_completed_rps") if closed else best.ask.load
    if not rate:
        return None
    ends = None if closed else answer.interval
    high = max(ends.high, rate) if ends else None
    if (
        high is not None and answer.not_steady is not None
    ):  # what was seen not to be sustained bounds what is
        high = max(min(high, answer.not_steady), rate)
    return capacity.Capacity(
        rate_per_s=rate,
        low_per_s=min(ends.low, rate) if ends else None,
        high_per_s=high,
        horizon_s=answer.horizon_s if ends else None,
        lower_bound=bool(lower_bound_reason),
        lower_bound_reason=lower_bound_reason,
        unit="requests" if closed else capacity.rate_unit(summary),
        method="sweep" if best.ask.kind == "level" else "search",
        recipe=request_fingerprint(workload, _counted(summary), summary.run.tokenizer_sha256)
        if workload
        else "",
        evidence=best.folder or ".",
        confirmed=best.ask.kind in CONFIRMING,
        output_tokens_per_s=summary.tokens.steady_output_per_s,
        total_tokens_per_s=summary.tokens.steady_total_per_s,
        sustained=_sustained(best, answer),
        sustained_reason=answer.sustained_why or best.sustained_why,
        sustained_s=answer.steady_s if best.ask.kind == "sustain" else None,
        warnings=describe_other_work(summary),
        state="held" if best.ask.kind == "level" else None,
    )


def _sustained(best: TrialResult, answer: SearchAnswer) -> bool | None:
    """Whether the load of the run that shows the capacity is sustained: only a longer run can show that it is."""
    return (
        answer.sustained
        if best.ask.kind == "sustain"
        else False
        if best.sustained is False
        else None
    )


def _counted(summary: Summary) -> str:
    """The source of the output token counts, as recipe fingerprints name it."""
    return "server" if "server" in summary.tokens.sources.output else summary.run.tokenizer_tag


# -- figures for tables and plots --------------------------------------------------------------------------------------


def curve(told: Sequence[TrialResult]) -> Iterator[str]:
    """Yield the lines of the CSV file of a search: its trials in order of load.

    `pareto` is 1 for trials that no other trial beats in both tokens/s per GPU (or in all, without
    GPUs) and tokens/s per user.
    """
    points = {
        result.ask.number: (
            result.figures.get("output_tokens_per_s_per_gpu")
            or result.figures.get("output_tokens_per_s"),
            result.figures.get("tokens_per_s_per_user"),
        )
        for result in told
        if result.outcome != "invalid"
    }
    front = levels.pareto(points)
    yield _csv_line((*_CSV_HEAD, "pareto"))
    for result in sorted(told, key=lambda result: result.ask.load):
        yield _csv_line((*_csv_cells(result), int(result.ask.number in front)))


def sweep_lines(told: Sequence[TrialResult], table: levels.SweepCurve) -> Iterator[str]:
    """Yield the lines of the CSV file of a sweep: its load points, in the order of its table.

    `pareto` is 1 for load points on the front of their lengths. The lengths are empty where they
    are those of the workload, the target where there is only one.
    """
    by_name = {result.folder: result for result in told}
    yield _csv_line(("isl", "osl", "target", *_CSV_HEAD, "pareto"))
    for level in table.levels:
        if level.name not in by_name:
            continue
        cells = _csv_cells(by_name[level.name])
        yield _csv_line((level.isl, level.osl, level.target, *cells, int(level.front)))


_CSV_HEAD = ("load", "offered", "outcome", "early", "seconds", *FIGURES)


def _csv_cells(result: TrialResult) -> tuple[CsvCell, ...]:
    metrics = (result.figures.get(name) for name in FIGURES)
    return (
        result.ask.load,
        result.offered,
        result.outcome,
        int(result.early),
        result.spent_s,
        *metrics,
    )


def _csv_line(cells: Iterable[CsvCell]) -> str:
    """Return the cells as a line of a CSV file, without the end of the line."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(map(_csv_text, cells))
    return line.getvalue()


def _csv_text(cell: CsvCell) -> str:
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
