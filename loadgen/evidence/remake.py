"""Makes every derived file of a result folder again, from what was kept in it. Reads files, writes none.

Kept are the records (or the histograms and sums of them), `run.json`, the contract and its prices, the requests of each
trial. Derived is what follows from them: `summary.json`, `verdict.json`, pages, log files, the answer of a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from loadgen.answers import folder as answers
from loadgen.contracts import run as contracts
from loadgen.contracts.stored import CONTRACT, PLACE, PRICES, RESOLVED
from loadgen.core import run_folder
from loadgen.core.errors import Faults, UserError
from loadgen.core.metrics import repeats
from loadgen.core.metrics.summary import dump_summary
from loadgen.core.results import capacity, checksums, store
from loadgen.core.server_metrics import series
from loadgen.mlperf import run as mlperf
from loadgen.search import adaptive_run, experiment, sweep, trials
from loadgen.search import sweep_text as sweep_report
from loadgen.search.load_search import LoadSearch, TrialResult, resume

RECORDS, HISTOGRAMS, SUMMARIES = "records", "histograms and sums", "summaries of the runs"
QUERIES = "the queries of the official LoadGen, by our stamps"


KEPT = {
    "run.json", "seconds.jsonl", series.FILE, experiment.PLAN, mlperf.REQUESTS, mlperf.QUERIES, CONTRACT,
    RESOLVED, PRICES, contracts.DOCTOR, PLACE, checksums.FILE, checksums.BEFORE,
    answers.SCORES, answers.TEXTS,
}  # fmt: skip
KEPT_IN = {"requests", "sample", "flows", "spool"}
"""What a result keeps: the names of files, and of the folders of a run."""


class Remade(NamedTuple):
    """A derived file, made again. `data` None: it cannot be, and `basis` says why; else `basis` is what it was made of.

    `leave`: places in it that are taken as they are stored, because nothing that was kept gives them. `damaged`: it
    cannot be made because what was kept is not what a command has written.
    """

    name: str
    data: bytes | None
    basis: str
    leave: tuple[str, ...] = ()
    damaged: bool = False


def kind_of(folder: Path) -> str:
    """What a folder holds. Raises UserError where it is no result."""
    if (folder / PLACE).is_file():
        return "validation"
    if (folder / experiment.PLAN).is_file():
        return experiment.begun_by(folder) or "experiment"  # a damaged one
    if (folder / repeats.FILE).is_file():
        return "repeats"
    if (folder / answers.FILE).is_file():
        return "answers"
    if run_folder.is_run(folder) or (folder / mlperf.RESULT).is_file():
        return "run"
    if run_folder.runs_in(folder):
        return "runs"
    what = "no result of loadgen in this folder" if folder.is_dir() else "no such folder"
    hint = "give the folder that run, sweep, search, validate or mlperf has named"
    raise UserError("no_result" if folder.is_dir() else "missing_file", what, str(folder), hint)


def is_kept(file: PurePosixPath) -> bool:
    """Whether a file is one of those from which the others are made."""
    return file.name in KEPT or file.parent.name in KEPT_IN


def remade(folder: Path) -> Iterator[Remade]:
    """Every derived file of the folder, the runs in it first."""
    makers = {
        "run.json": _summary, mlperf.RESULT: _mlperf, repeats.FILE: _repeats,
        experiment.PLAN: _experiment, answers.FILE: _answers, PLACE: _validation,
    }  # fmt: skip
    for name, make in makers.items():
        for file in sorted(folder.rglob(name)):
            inside = file.parent.relative_to(folder)
            try:
                for made in make(file.parent):
                    yield made._replace(name=(inside / made.name).as_posix())
            except Faults as error:
                why = "; ".join(fault.what for fault in error.faults)
                yield Remade((inside / name).as_posix(), None, why, damaged=True)
            except Exception as error:  # files of somebody else: what a damaged one raises nobody can list
                why = (str(error) or type(error).__name__).splitlines()[0]
                yield Remade((inside / name).as_posix(), None, why, damaged=True)


def _summary(folder: Path) -> Iterator[Remade]:
    if not (folder / run_folder.SUMMARY).is_file():
        yield Remade(run_folder.SUMMARY, None, "the run has none: it did not come to its end")
        return
    basis = RECORDS if store.has_rows(folder) else HISTOGRAMS
    yield Remade(run_folder.SUMMARY, dump_summary(run_folder.summary(folder)), basis)
    if (folder / adaptive_run.FILE).is_file() and (found := adaptive_run.read(folder)) is not None:
        yield Remade(adaptive_run.FILE, adaptive_run.dump(found), RECORDS)
        if (folder / capacity.FILE).is_file():
            shown = adaptive_run.found_capacity(folder, found)
            data = b"null\n" if shown is None else capacity.dump(shown)
            yield Remade(capacity.FILE, data, SUMMARIES, leave=("recipe",))


def _mlperf(folder: Path) -> Iterator[Remade]:
    if (folder / "run.json").is_file():
        for name, data in mlperf.outputs_again(folder, run_folder.kept_summary(folder)).items():
            yield Remade(name, data, RECORDS)
        return
    if (folder / mlperf.QUERIES).is_file():
        for name, data in mlperf.outputs_of_queries(folder).items():
            yield Remade(name, data, QUERIES)
        return
    stored = (folder / mlperf.RESULT).read_bytes()
    same = [file for file in folder.glob(f"*/{mlperf.RESULT}") if file.read_bytes() == stored]
    if not same:  # the queries of the official LoadGen, or a result that is not that of one of its runs
        yield Remade(mlperf.RESULT, None, "there are no records of it: the official LoadGen has issued the queries")
        return
    if (same[0].parent / mlperf.QUERIES).is_file():  # the logs beside it are by LoadGen's own stamps
        again = mlperf.outputs_of_queries(same[0].parent)
        yield Remade(mlperf.RESULT, again[mlperf.RESULT], QUERIES)
        for name in mlperf.FILES[1:]:
            yield Remade(name, None, "the official LoadGen has written it, by stamps that it does not keep")
        return
    for name in mlperf.FILES:
        yield Remade(name, (same[0].parent / name).read_bytes(), f"the result of {same[0].parent.name}")


def _repeats(folder: Path) -> Iterator[Remade]:
    stored = msgspec.json.decode((folder / repeats.FILE).read_bytes())

    def made(of: dict[str, object]) -> repeats.RepeatSummary:
        before = msgspec.convert(of, repeats.RepeatSummary)
        named = [(name, run_folder.kept_summary(folder / name)) for name in before.runs]
        return repeats.summarize_repeats(named, within=before.within)

    levels = stored.get("levels")
    again = made(stored) if levels is None else {"levels": {name: made(level) for name, level in levels.items()}}
    yield Remade(repeats.FILE, msgspec.json.encode(again), SUMMARIES)


def _experiment(folder: Path) -> Iterator[Remade]:
    plan, told = experiment.plan_of(folder), experiment.told(folder)
    again = [trials.retold(folder, result, mlperf=experiment.is_mlperf(plan)) for result in told]
    yield Remade(experiment.TOLD, b"\n".join(map(msgspec.json.encode, again)), SUMMARIES, _given(told, "line {}."))
    stored = experiment.stored_search(folder)
    if plan.by == "search" and stored is None:
        yield Remade(experiment.ANSWER, None, "the search has not ended")
        return
    if stored is None:
        curve, told, answer = experiment.swept(folder, told)
        bound_why = sweep.bound_why(curve)
        yield Remade("sweep.md", sweep_report.render_markdown(curve).encode(), RECORDS)
        yield Remade("report.html", sweep_report.render_html(curve).encode(), RECORDS)
    elif stored.settings is None:
        yield Remade(experiment.ANSWER, None, "the search has not stored its settings: it is of an older version")
        answer, bound_why = stored.answer, ""
    else:
        search = resume(LoadSearch(**msgspec.structs.asdict(stored.settings)), told)
        answer, bound_why = search.answer, ""
        document = msgspec.structs.replace(stored, answer=answer, told=tuple(again))
        given = (*_given(told, "told[{}].", first=0), "goal*", "simulated", "seed", "metadata*", "settings*")
        yield Remade(experiment.ANSWER, msgspec.json.encode(document), "the results of the trials", given)
    files = experiment.outputs(folder, told, answer, bound_why=bound_why)
    if (folder / capacity.FILE).is_file():
        files.setdefault(capacity.FILE, b"null\n")
    for name, data in files.items():
        yield Remade(name, data, SUMMARIES, leave=("recipe", "go_on"))


def _given(told: Sequence[TrialResult], place: str, first: int = 1) -> tuple[str, ...]:
    """Where trials hold what no record gives: what was asked for, and how one was decided before its end."""
    leave = []
    for number, result in enumerate(told, first):
        names = ["ask*", "early", "offered", "noise", "folder"]
        names += ["outcome", "why", "code"] if result.early else []
        leave += [place.format(number) + name for name in names]
    return tuple(leave)


def _answers(folder: Path) -> Iterator[Remade]:
    again = answers.outputs_again(folder)
    given = ("dataset*", "version", "url", "model", "against*", "loss", "level", "simulated", "notes*")
    yield Remade(answers.FILE, again[answers.FILE], "the scores of every prompt", given)
    if answers.SCORES in again:
        yield Remade(answers.SCORES, again[answers.SCORES], "the texts of the answers")


def _validation(folder: Path) -> Iterator[Remade]:
    stored = msgspec.json.decode((folder / contracts.VERDICT).read_bytes())
    for name, data in contracts.outputs_again(folder, str(stored["version"])).items():
        yield Remade(name, data, RECORDS)
