"""Finds the results in a folder and reads what their list shows: summaries, not request records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen import result_kinds
from loadgen.core import format
from loadgen.core.errors import OK, LoadgenError
from loadgen.result_kinds import ListRow, ResultFunctions, ResultKind

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary, Summary
    from loadgen.pricing.prices import Prices
    from loadgen.runs.load_point_results import LoadPointResult
    from loadgen.ui.stored_result import StoredResult

MAX_DEPTH = 4
"""How many levels of folders are searched for results."""

MAX_RESULTS = 2_000
"""How many results are listed. Older ones are left out."""

MAX_IDLE_S = 15
"""A run whose files have not grown for so long was killed before it could write its summary."""

OUTCOME_WITHOUT_SUMMARY = "no summary"

FULL_UTILIZATION = Decimal(1)
"""Costs are those of machines that serve the load all the time that is paid for."""


class Collection(NamedTuple):
    """The results of several commands in one folder, which together are a result of their own.

    Its kind is named "results".
    """

    folder: Path
    results: list[StoredResult]


def results_in(root: Path, prices: Prices | None = None) -> list[StoredResult]:
    """Return the results below a folder, the newest first.

    A result that cannot be read is listed with the reason. With `prices`, results of machines that
    have a price have the cost per million output tokens.
    """
    folders = sorted(_find_results(root, MAX_DEPTH), key=_modification_time, reverse=True)
    results = [_read_result(root, folder, prices) for folder in folders[:MAX_RESULTS]]
    return sorted(results, key=lambda result: result.started, reverse=True)


def is_collection(folder: Path) -> bool:
    """Return True if a folder contains the results of several commands.

    A folder that is a result itself, such as a run or a sweep, is no collection. Neither is the
    folder of a single command that has written several runs of one workload.
    """
    if not folder.is_dir():
        return False
    is_result = listed_kind(folder) is not None
    return not is_result and not _are_runs_of_one_command(folder)


def _are_runs_of_one_command(folder: Path) -> bool:
    """Return True if all results below a folder can be the runs that one command has written.

    Such runs are directly in the folder and have one workload. They are the load points of a sweep,
    or repeats of a run. A folder without results counts as one, too.
    """
    result_folders = list(_find_results(folder, MAX_DEPTH))
    for result_folder in result_folders:
        is_directly_in_folder = result_folder.parent == folder
        if not is_directly_in_folder or not _may_be_load_point(result_folder):
            return False
    return _have_same_workload(folder, result_folders)


def _may_be_load_point(folder: Path) -> bool:
    """Return True if a result can be one of the runs of a larger result, such as a sweep.

    That is a plain run, with or without an MLPerf-style result. A run that reports a capacity is
    complete by itself, because a capacity is what a whole search ends with. A damaged run does not
    show whether it has a capacity, so it may be part of a larger result.
    """
    kind = listed_kind(folder)
    if kind is None or kind.name not in ("run", "mlperf"):
        return False
    try:
        return result_kinds.capacity_facts(folder).capacity is None
    except LoadgenError:
        return True


def _have_same_workload(parent: Path, run_folders: Sequence[Path]) -> bool:
    """Return True if the runs in a folder have one workload.

    Runs without a summary, which were interrupted, are left out. `check_same_workload` is the check
    by which `loadgen report` refuses a folder of runs with several workloads.
    """
    from loadgen.core import run_folder
    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.runs.run_directory_kind import check_same_workload

    summaries = [
        NamedSummary(folder.name, run_folder.read_summary(folder))
        for folder in run_folders
        if (folder / run_folder.SUMMARY).is_file()
    ]
    if not summaries:
        return True

    try:
        check_same_workload(parent, summaries)
    except LoadgenError:  # says how the workloads differ
        return False

    return True


def _find_results(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of results below a folder, at most `depth` levels down."""
    for child in folder.iterdir():
        if not child.is_dir() or child.name.startswith(".") or child.is_symlink():
            continue
        if listed_kind(child) is not None:
            yield child
        elif depth > 1:
            yield from _find_results(child, depth - 1)


def listed_kind(folder: Path) -> ResultKind | None:
    """Return the kind of the result in a folder, or None if the list does not show the folder.

    The list shows each result whose kind has the function `list_row`. Other kinds, such as a file
    that another tool has written, are not listed.
    """
    return result_kinds.kind_of(folder, "list_row")


def _modification_time(path: Path) -> float:
    return path.stat().st_mtime


def _read_result(root: Path, folder: Path, prices: Prices | None) -> StoredResult:
    """Return the entry of a result in the list. If it cannot be read, its outcome says why.

    Args:
        root: The folder that is listed.
        folder: The folder of the result, which `_find_results` has found.
        prices: The prices of machines, or None for no costs.
    """
    kind = listed_kind(folder)
    assert kind is not None, f"{folder} has no result that can be listed"
    result = _create_entry(root, folder, kind)
    if result.is_running:
        return result  # its metrics are not stored yet

    try:
        row = result_kinds.list_row(kind, folder) or ListRow()
        return _with_list_row(result, row, prices)
    except Exception as error:  # damaged files of another author can raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return msgspec.structs.replace(result, reported_outcome=f"cannot be read: {reason}")


def _create_entry(root: Path, folder: Path, kind: ResultKind) -> StoredResult:
    """Return the entry of a result in the list without its outcome and metrics."""
    from loadgen.ui.stored_result import StoredResult

    name = folder.relative_to(root).as_posix()
    has_page = bool(kind.page_name) and (folder / kind.page_name).is_file()
    return StoredResult(
        name=name,
        kind=kind.name,
        is_running=is_running(folder, time.time()),
        page=f"{name}/{kind.page_name}" if has_page else "",
    )


def _with_list_row(result: StoredResult, row: ListRow, prices: Prices | None) -> StoredResult:
    """Return a copy of a result with the fields of its list row, and with the metrics of its runs.

    Each kind of result, such as a run or a search, has a function that returns the row of a result
    in lists: its outcome, description, target and start, and the runs behind it. A result without
    runs has no metrics.

    Args:
        result: The result, with its name and kind only.
        row: The list row of the result.
        prices: The prices of machines, or None for no costs.
    """
    described_result = msgspec.structs.replace(
        result,
        reported_outcome=row.outcome,
        selected_run=row.selected_run,
        description=row.description,
        target=row.target,
        simulated=row.simulated,
        stored_start=row.started,
        interval=row.interval,
    )
    if row.runs:
        return _with_metrics(described_result, row.runs, prices)

    outcome = row.outcome or OUTCOME_WITHOUT_SUMMARY
    return msgspec.structs.replace(described_result, reported_outcome=outcome)


def _with_metrics(
    result: StoredResult, runs: Sequence[NamedSummary], prices: Prices | None
) -> StoredResult:
    """Return a copy of a result with the metrics of its runs.

    All runs of a result have the same workload, SLO and target, so the first one describes them.

    Args:
        result: The result, with its outcome and description.
        runs: The runs of the result, at least one.
        prices: The prices of machines, or None for no costs.
    """
    from loadgen.runs.sweep_curve import build_curve

    curve = build_curve(runs)
    load_points = [
        _average_repeats(curve.load_points, repeat_summaries)
        for repeat_summaries in _group_by_load(runs)
    ]
    average_metrics = tuple(point.average_metrics for point in load_points)
    first_summary = runs[0].summary
    target = first_summary.target

    return msgspec.structs.replace(
        result,
        curve=curve,
        load_points=average_metrics,
        tpot_limit_ms=_tpot_limit_ms(first_summary),
        cost_per_million_tokens=_costs_by_load_point(load_points, prices),
        mean_input_tokens=_mean_per_request(first_summary.tokens.input, first_summary),
        mean_output_tokens=_mean_per_request(first_summary.tokens.output, first_summary),
        hardware=target.shape or target.name or target.url,
        software=", ".join(target.software),
    )


def _tpot_limit_ms(summary: Summary) -> float | None:
    """Return the strictest limit of the SLO on the time per output token, or None without one."""
    limits_ms = [term.limit_ms for term in summary.goodput.slo if term.metric == "tpot"]
    return min(limits_ms, default=None)


def _costs_by_load_point(
    load_points: Sequence[_LoadPoint], prices: Prices | None
) -> dict[str, float]:
    """Return the cost of a million output tokens at each load that has one, by its name."""
    costs = {}
    for point in load_points:
        cost = _cost_per_million_tokens(point.summaries, prices)
        if cost:
            costs[point.average_metrics.name] = cost
    return costs


def _mean_per_request(tokens: int | None, summary: Summary) -> float | None:
    """Return the mean tokens of a successful request, or None if they are not known."""
    if tokens is None or not summary.requests.ok:
        return None
    return tokens / summary.requests.ok


class _LoadPoint(NamedTuple):
    """One load of a result.

    Attributes:
        average_metrics: The metrics of the load, averaged over its repeats.
        summaries: The summaries of its valid repeats, or of all repeats if none is valid.
    """

    average_metrics: LoadPointResult
    summaries: Sequence[Summary]


def _average_repeats(
    run_metrics: Sequence[LoadPointResult], repeat_summaries: dict[str, Summary]
) -> _LoadPoint:
    """Return one load of a result, whose repeats are the runs with the same load.

    Args:
        run_metrics: The metrics of every run of the result, at any load.
        repeat_summaries: The summary of each repeat of this load, by the name of the run.
    """
    from loadgen.repeated.repeats import valid_or_all
    from loadgen.runs.load_point_results import average_repeats

    metrics_of_repeats = [run for run in run_metrics if run.name in repeat_summaries]
    return _LoadPoint(
        average_metrics=average_repeats(metrics_of_repeats),
        summaries=valid_or_all(list(repeat_summaries.values())),
    )


def _group_by_load(runs: Sequence[NamedSummary]) -> list[dict[str, Summary]]:
    """Return the runs of each load: their summaries, by the name of the run.

    Runs with the same configuration and the same load are repeats of each other. For example, two
    repeats at 10/s and one run at 20/s give [{"r1": ..., "r2": ...}, {"r3": ...}].
    """
    groups: dict[tuple[str, str], dict[str, Summary]] = {}
    for run_name, summary in runs:
        configuration = summary.fingerprints.recipe
        load = summary.load.arrival
        groups.setdefault((configuration, load), {})[run_name] = summary
    return list(groups.values())


def _cost_per_million_tokens(summaries: Sequence[Summary], prices: Prices | None) -> float | None:
    """Return the cost of a million output tokens at full use, in the currency of the prices.

    The price is that of the machine, by the name of its instance type ("shape"). Returns None if
    there are no prices, the instance type is not known, it has no price, or a cost cannot be
    computed from the runs, for example because they are too short for a steady rate.

    Args:
        summaries: The summaries of the repeats of one load.
        prices: The prices of machines, or None.
    """
    from loadgen.pricing.evidence import Evidence
    from loadgen.pricing.priced_result import price_result
    from loadgen.pricing.prices import find_prices
    from loadgen.pricing.units import OUTPUT

    target = summaries[0].target
    if prices is None or not target.shape:
        return None

    # What is priced. The name and the folder appear in reports only, which are not made here.
    evidence = Evidence(name=summaries[0].run.id, folder="", summaries=tuple(summaries))
    try:
        # Further prices of the machine, if there are any, are for other terms of commitment.
        price = find_prices(prices, target)[0]
        priced_result = price_result(
            evidence,
            price,
            name=price.name,
            price_location="",
            gpus=target.gpus,
            utilization=FULL_UTILIZATION,
        )
    except LoadgenError:  # there is no price, or the runs do not allow a cost
        return None

    cost = priced_result.costs[OUTPUT]
    return None if cost is None else float(cost.total)


def is_running(folder: Path, now_s: float) -> bool:
    """Return True if a run is writing to a folder.

    That is a run with records, without a summary, and with a file that has grown in the last
    `MAX_IDLE_S` seconds before `now_s`.
    """
    from loadgen.core import run_folder

    record_log_dir = folder / "spool"
    has_summary = (folder / run_folder.SUMMARY).is_file()
    if has_summary or not record_log_dir.is_dir():
        return False

    growing_files = [*record_log_dir.iterdir(), folder / "run.json"]
    existing_files = [file for file in growing_files if file.exists()]
    last_growth_s = max(map(_modification_time, existing_files), default=0.0)

    return now_s - last_growth_s < MAX_IDLE_S


# The functions of the result kind "results": a folder of results is itself a result, which
# `loadgen report` prints and writes as a page.


def load_collection(folder: Path) -> Collection:
    """Return the results in a folder."""
    return Collection(folder, results_in(folder))


def collection_headline(collection: Collection) -> str:
    """Return how many results of each kind a folder has."""
    counts = Counter(result.kind for result in collection.results)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    total = format.counted(len(collection.results), "result")
    return f"{total} in {collection.folder}: {by_kind}."


def collection_text(collection: Collection, color: bool) -> str:  # noqa: ARG001 - same for all kinds
    """Return the list for a terminal."""
    from loadgen.ui.page import render_text

    return render_text(collection.results)


def collection_page(collection: Collection) -> str:
    """Return the list and its charts as an HTML page."""
    from loadgen.ui.page import render

    title = collection.folder.resolve().name
    return render(title, collection.results, version=version("loadgen"))


def collection_document(collection: Collection) -> bytes:
    """Return the list as JSON."""
    return format.document([json_row(result) for result in collection.results])


def collection_exit_code(collection: Collection, strict: bool) -> int:  # noqa: ARG001 - as above
    """Return 0: a list judges nothing."""
    return OK


def json_row(result: StoredResult) -> dict[str, object]:
    """Return a row of the list for `--json`. Its keys are part of the documented format.

    The key `word` has the outcome in a few words, for example "VALID, SLO met". The key `shown` has
    the load point whose metrics the list shows for the result. Its key `too_few_samples` names the
    metrics that rest on too few requests, for example ["ttft_p99"]. A result without metrics has
    just its description, target and start.
    """
    curve = result.curve
    selected = result.selected_load_point

    row: dict[str, Any] = {"name": result.name, "kind": result.kind, "word": result.outcome}
    if curve is None or selected is None:
        return row | {
            "workload": result.description,
            "target": result.target,
            "started": result.started,
        }

    return row | {
        "workload": curve.workload,
        "model": curve.model,
        "target": curve.target,
        "gpus": curve.gpus,
        "loads": len(result.load_points),
        "shown": {
            "name": selected.name,
            "load": selected.load_label,
            "output_tokens_per_s": selected.output_per_s,
            "ttft_p99_ms": selected.ttft_p99,
            "tpot_p99_ms": selected.tpot_p99,
            "too_few_samples": list(selected.latencies_with_few_samples),
        },
        "started": curve.started,
    }


FUNCTIONS = ResultFunctions(
    load=load_collection,
    headline=collection_headline,
    text=collection_text,
    page=collection_page,
    document=collection_document,
    code=collection_exit_code,
    fits=is_collection,
)
