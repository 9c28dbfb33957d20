"""What lies in a folder of results: runs, sweeps, searches, repeats, validations. Reads summaries, not records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.errors import Fault

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.pricing.prices import Prices
    from loadgen.search.sweep import SweepCurve
    from loadgen.viewer.page import StoredResult

PAGES = ("report.html", "verdict.html")  # that a result has in its own folder
DEEPEST, MOST = 4, 2_000  # folders below the one that is looked through; results
GOING_ON_S = 15  # a run whose files have not grown for so long has ended without saying so


def results_in(root: Path, prices: Prices | None = None) -> list[StoredResult]:
    """The results below a folder, the newest first. What cannot be read is listed with the reason.

    prices: for the USD per million tokens of machines whose shape has a price.
    """
    found = sorted(_walk(root, root, DEEPEST), key=lambda path: path.stat().st_mtime, reverse=True)[:MOST]
    results = [_read(root, path, prices) for path in found]
    return sorted(results, key=lambda result: result.started, reverse=True)


def is_collection(folder: Path) -> bool:
    """Whether a folder holds results of several commands: neither a run, nor levels or repeats of one load."""
    from loadgen.compare import inputs
    from loadgen.core import run_folder

    if not folder.is_dir() or kind_of(folder):
        return False
    found = list(_walk(folder, folder, DEEPEST))
    if any(path.parent != folder or kind_of(path) not in ("run", "mlperf") for path in found):
        return True
    named = [(run.name, run_folder.kept_summary(run)) for run in found if (run / run_folder.SUMMARY).is_file()]
    try:
        if named:
            inputs.of_one_work(folder, named)
    except Fault:
        return True
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
    """What a folder holds; "" for none of these."""
    from loadgen.contracts.run import VERDICT
    from loadgen.core import run_folder
    from loadgen.core.metrics import repeats
    from loadgen.mlperf.run import RESULT
    from loadgen.search import experiment

    if (folder / VERDICT).is_file():
        return "validation"
    if (folder / experiment.PLAN).is_file():
        return experiment.begun_by(folder) or "sweep"
    if (folder / repeats.FILE).is_file():
        return "repeats"
    if run_folder.is_run(folder):
        return "mlperf" if (folder / RESULT).is_file() else "run"
    return ""


def _read(root: Path, folder: Path, prices: Prices | None) -> StoredResult:
    from loadgen.contracts.run import VERDICT
    from loadgen.core import run_folder
    from loadgen.search import experiment
    from loadgen.search.sweep import curve
    from loadgen.viewer.page import StoredResult

    kind, name = kind_of(folder), folder.relative_to(root).as_posix()
    page = next((f"{name}/{file}" for file in PAGES if (folder / file).is_file()), "")
    empty = StoredResult(name=name, kind=kind, going_on=_going_on(folder), page=page)
    if empty.going_on:
        return empty
    try:
        folders = [folder] if kind in ("run", "mlperf") else run_folder.runs_in(folder)
        if kind == "validation":
            folders = [run for run in sorted(folder.rglob("*/")) if run_folder.is_run(run)]
        summaries = [
            (run.name, run_folder.kept_summary(run)) for run in folders if (run / run_folder.SUMMARY).is_file()
        ]
        word = ""
        if kind == "validation":
            word = msgspec.json.decode((folder / VERDICT).read_bytes()).get("verdict", "")
        search = experiment.stored_search(folder) if kind == "search" else None
        if search is not None:
            word = search.answer.reason
        if not summaries:
            return msgspec.structs.replace(empty, word=word or "nothing was summarized")
        usd = {run: _usd(summary, prices) for run, summary in summaries}
        levels = curve(summaries)
        limits = [term.limit_ms for term in summaries[0][1].goodput.slo if term.metric == "tpot"]
        return msgspec.structs.replace(
            empty,
            word=word,
            curve=levels,
            tpot_limit_ms=min(limits, default=None),
            interval=_interval(folder, kind, levels),
            usd={run: amount for run, amount in usd.items() if amount},
        )
    except (Fault, OSError, msgspec.MsgspecError) as problem:
        return msgspec.structs.replace(empty, word=f"cannot be read: {str(problem).splitlines()[0]}")


def _going_on(folder: Path) -> bool:
    """Whether a run is writing here: rows on disk, no summary, and a file that grew a moment ago."""
    spool = folder / "spool"
    if (folder / "summary.json").is_file() or not spool.is_dir():
        return False
    newest = max(
        (file.stat().st_mtime for file in (*spool.iterdir(), folder / "run.json") if file.exists()), default=0.0
    )
    return time.time() - newest < GOING_ON_S


def _interval(folder: Path, kind: str, curve: SweepCurve) -> tuple[float, float, float] | None:
    """Of a capacity, or of repeats: tokens/s of a user, and the ends of the interval of the tokens/s in all."""
    from loadgen.core.metrics.repeats import FILE, RepeatSummary
    from loadgen.core.results import capacity

    if kind == "repeats":
        stored = msgspec.json.decode((folder / FILE).read_bytes(), type=RepeatSummary)
        rate = next((figure for figure in stored.figures if figure.metric == "tokens.steady_output_per_s"), None)
        per_user = [level.per_user for level in curve.levels if level.per_user is not None]
        if rate is None or rate.low is None or rate.high is None or not per_user:
            return None
        return sum(per_user) / len(per_user), rate.low, rate.high
    file = folder / capacity.FILE
    if not file.is_file():
        return None
    found = capacity.load_capacity(file.read_bytes(), str(file))
    level = next((level for level in curve.levels if level.name == found.evidence), None)
    if level is None or level.per_user is None or not level.output_per_s or found.low_per_s is None:
        return None
    per_request = level.output_per_s / found.rate_per_s
    return level.per_user, found.low_per_s * per_request, (found.high_per_s or found.rate_per_s) * per_request


def _usd(summary: Summary, prices: Prices | None) -> float | None:
    """USD (or another currency) per million output tokens under the price of the run's shape; None without one."""
    from loadgen.pricing.evidence import Evidence
    from loadgen.pricing.prices import find
    from loadgen.pricing.unit_cost import OUTPUT, offer

    if prices is None or not summary.target.shape:
        return None
    try:
        price = find(prices, summary.target)[0]
        evidence = Evidence(name=summary.run.id, folder="", summaries=(summary,))
        cost = offer(evidence, price, price.name, "", gpus=summary.target.gpus, utilization=Decimal(1)).costs[OUTPUT]
    except Fault:
        return None
    return float(cost.total) if cost is not None else None
