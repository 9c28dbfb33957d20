"""What lies in a folder of results, each as its kind says (`result_kinds`). Reads summaries, not records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen import result_kinds
from loadgen.core import format
from loadgen.core.errors import OK, LoadgenError
from loadgen.result_kinds import ListRow, ResultFunctions

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary, Summary
    from loadgen.pricing.prices import Prices
    from loadgen.runs.load_point_results import LoadPointResult
    from loadgen.ui.stored_result import StoredResult

DEEPEST, MOST = 4, 2_000  # folders below the one that is looked through; results
GOING_ON_S = 15  # a run whose files have not grown for so long has ended without saying so


class Collection(NamedTuple):
    """The results of several commands in one folder."""

    folder: Path
    results: list[StoredResult]


def results_in(root: Path, prices: Prices | None = None) -> list[StoredResult]:
    """The results below a folder, the newest first. What cannot be read is listed with the reason.

    prices: for the USD per million tokens of machines whose shape has a price.
    """
    found = sorted(_walk(root, root, DEEPEST), key=lambda path: path.stat().st_mtime, reverse=True)[
        :MOST
    ]
    results = [_read(root, path, prices) for path in found]
    return sorted(results, key=lambda result: result.started, reverse=True)


def is_collection(folder: Path) -> bool:
    """Whether a folder holds results of several commands: neither a run, nor levels or repeats of one load."""
    from loadgen.core import run_folder
    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.runs.run_directory_kind import check_same_workload

    if not folder.is_dir() or kind_of(folder):
        return False
    found = list(_walk(folder, folder, DEEPEST))
    if any(
        path.parent != folder or kind_of(path) not in ("run", "mlperf") or _searched(path)
        for path in found
    ):
        return True
    named = [
        NamedSummary(run.name, run_folder.kept_summary(run))
        for run in found
        if (run / run_folder.SUMMARY).is_file()
    ]
    try:
        if named:
            check_same_workload(folder, named)
    except LoadgenError:
        return True
    return False


def _searched(run: Path) -> bool:
    """Whether a run is a search by itself, and so neither a level nor a repeat of its neighbours."""
    try:
        return result_kinds.capacity_facts(run).capacity is not None
    except LoadgenError:
        return False


def _walk(root: Path, folder: Path, deeper: int) -> Iterator[Path]:
    if folder != root and kind_of(folder):
        yield folder
        return
    if not deeper:
        return
    for below in folder.iterdir():
        if below.is_dir() and not below.name.startswith(".") and not below.is_symlink():
            yield from _walk(root, below, deeper - 1)


def kind_of(folder: Path) -> str:
    """The kind of result that is listed for a folder; "" for none."""
    kind = result_kinds.kind_of(folder, "list_row")
    return "" if kind is None else kind.name


def _read(root: Path, folder: Path, prices: Prices | None) -> StoredResult:
    from loadgen.repeated.repeats import valid_or_all
    from loadgen.runs.load_point_results import average_repeats
    from loadgen.runs.sweep_curve import build_curve
    from loadgen.ui.stored_result import StoredResult

    kind, name = result_kinds.kind_of(folder, "list_row"), folder.relative_to(root).as_posix()
    assert kind is not None  # it is one of those that were found
    page = (
        f"{name}/{kind.page_name}" if kind.page_name and (folder / kind.page_name).is_file() else ""
    )
    empty = StoredResult(
        name=name, kind=kind.name, going_on=is_going_on(folder, time.time()), page=page
    )
    if empty.going_on:
        return empty
    try:
        row = result_kinds.list_row(kind, folder) or ListRow()
        shown = msgspec.structs.replace(
            empty,
            word=row.word,
            answer=row.answer,
            about=row.about,
            target=row.target,
            simulated=row.simulated,
            made=row.started,
        )
        if not row.runs:
            return (
                shown if row.word else msgspec.structs.replace(shown, word="nothing was summarized")
            )
        runs_curve = build_curve(row.runs)
        points = [
            _LoadPoint(
                level=average_repeats(
                    [level for level in runs_curve.load_points if level.name in runs]
                ),
                summaries=valid_or_all(list(runs.values())),
            )
            for runs in _runs_by_load(row.runs)
        ]
        usd = {point.level.name: _usd(point.summaries, prices) for point in points}
        first = row.runs[0].summary
        limits = [term.limit_ms for term in first.goodput.slo if term.metric == "tpot"]
        answered = first.requests.ok or None
        return msgspec.structs.replace(
            shown,
            curve=runs_curve,
            load_points=tuple(point.level for point in points),
            tpot_limit_ms=min(limits, default=None),
            interval=row.interval,
            usd={name: amount for name, amount in usd.items() if amount},
            input_tokens=answered and first.tokens.input and first.tokens.input / answered,
            output_tokens=answered and first.tokens.output and first.tokens.output / answered,
            hardware=first.target.shape or first.target.name or first.target.url,
            software=", ".join(first.target.software),
        )
    except (
        Exception
    ) as problem:  # files of somebody else: what a damaged one raises nobody can list
        why = (str(problem) or type(problem).__name__).splitlines()[0]
        return msgspec.structs.replace(empty, word=f"cannot be read: {why}")


class _LoadPoint(NamedTuple):
    """One load of a result: its metrics, averaged over the repeats, and the summaries of these."""

    level: LoadPointResult
    summaries: Sequence[Summary]


def _runs_by_load(named: Sequence[NamedSummary]) -> list[dict[str, Summary]]:
    """Return the runs of each load as summaries by name.

    Runs of one recipe and load are repeats of each other.
    """
    by_load: dict[tuple[str, str], dict[str, Summary]] = {}
    for name, summary in named:
        load = (summary.fingerprints.recipe, summary.load.arrival)
        by_load.setdefault(load, {})[name] = summary
    return list(by_load.values())


def _usd(summaries: Sequence[Summary], prices: Prices | None) -> float | None:
    """Return the price of a million output tokens, in the currency of the prices.

    `summaries` are repeats of one load. Returns None if their machine has no price.
    """
    from loadgen.pricing.evidence import Evidence
    from loadgen.pricing.priced_result import price_result
    from loadgen.pricing.prices import find_prices
    from loadgen.pricing.units import OUTPUT

    first = summaries[0]
    if prices is None or not first.target.shape:
        return None
    try:
        price = find_prices(prices, first.target)[0]
        evidence = Evidence(name=first.run.id, folder="", summaries=tuple(summaries))
        cost = price_result(
            evidence, price, price.name, "", gpus=first.target.gpus, utilization=Decimal(1)
        ).costs[OUTPUT]
    except LoadgenError:
        return None
    return float(cost.total) if cost is not None else None


# -- a folder of results as a result itself ----------------------------------------------------------------------------


def load(folder: Path) -> Collection:
    return Collection(folder, results_in(folder))


def headline(found: Collection) -> str:
    kinds: dict[str, int] = {}
    for result in found.results:
        kinds[result.kind] = kinds.get(result.kind, 0) + 1
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{format.counted(len(found.results), 'result')} in {found.folder}: {words}."


def text(found: Collection, color: bool) -> str:
    from loadgen.ui import page as results_page

    return results_page.render_text(found.results)


def page(found: Collection) -> str:
    from loadgen.ui import page as results_page

    return results_page.render(
        found.folder.resolve().name, found.results, version=version("loadgen")
    )


def document(found: Collection) -> bytes:
    return format.document([_plain(result) for result in found.results])


def _plain(result: StoredResult) -> dict[str, Any]:
    """As a row of the list says it; `shown` is the run whose figures stand for the result."""
    curve, shown = result.curve, result.shown
    row: dict[str, Any] = {"name": result.name, "kind": result.kind, "word": result.outcome}
    if curve is None or shown is None:
        return row | {"workload": result.about, "target": result.target, "started": result.started}
    return row | {
        "workload": curve.workload,
        "model": curve.model,
        "target": curve.target,
        "gpus": curve.gpus,
        "loads": len(result.load_points),
        "shown": {
            "name": shown.name,
            "load": shown.load_label,
            "output_tokens_per_s": shown.output_per_s,
            "ttft_p99_ms": shown.ttft_p99,
            "tpot_p99_ms": shown.tpot_p99,
            "too_few_samples": list(shown.unsupported),
        },
        "started": curve.started,
    }


def code(found: Collection, strict: bool) -> int:
    return OK


def is_going_on(folder: Path, now_s: float) -> bool:
    """Whether a run is writing here: rows on disk, no summary, and a file that grew a moment ago."""
    from loadgen.core import run_folder

    spool = folder / "spool"
    if (folder / run_folder.SUMMARY).is_file() or not spool.is_dir():
        return False
    files = (file for file in (*spool.iterdir(), folder / "run.json") if file.exists())
    return now_s - max((file.stat().st_mtime for file in files), default=0.0) < GOING_ON_S


FUNCTIONS = ResultFunctions(
    load=load,
    headline=headline,
    text=text,
    page=page,
    document=document,
    code=code,
    fits=is_collection,
)
