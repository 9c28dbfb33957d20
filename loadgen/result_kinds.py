"""The kinds of results, one row each: all that lists, opens, prints, compares, bundles or prices a result goes by them.

A leaf, like every table: a row names functions as text. No other module asks which marker file a folder has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import OK, Fault, Faults, UserError, nothing_there
from loadgen.plugins import OpenTable, gives, resolve

PAGE = "report.html"  # the page of a result, where its kind does not say otherwise
HINT = "give the folder that run, sweep, search, validate or mlperf has named"


class ListRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind says of a folder for the list of results. `named`: its runs, each a name and the stored `Summary`.

    word: the outcome. answer: name of the run that the result stands on; "": the best of them. interval: tokens/s of a
    user, and the ends of the tokens/s in all, of a capacity or of repeats.
    about, target, simulated, started: of a result without runs; started: ISO 8601, "" where nothing says it.
    """

    word: str = ""
    answer: str = ""
    named: tuple[tuple[str, Any], ...] = ()
    interval: tuple[float, float, float] | None = None
    about: str = ""
    target: str = ""
    simulated: bool = False
    started: str = ""


class HeldLoad(msgspec.Struct, frozen=True):
    """What a result says of the load that was held: a `Capacity`, or that all was due at once. None: nothing."""

    capacity: Any = None
    at_once: bool | None = None


RECORDS, HISTOGRAMS, SUMMARIES = "records", "histograms and sums", "summaries of the runs"


class Remade(msgspec.Struct, frozen=True):
    """A derived file, made again. `data` None: it cannot be, and `basis` says why; else `basis` is what it was made of.

    `leave`: places in it that are taken as they are stored, because nothing that was kept gives them. `damaged`: it
    cannot be made because what was kept is not what a command has written.
    """

    name: str
    data: bytes | None
    basis: str
    leave: tuple[str, ...] = ()
    damaged: bool = False


class ResultKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of result. A function is text, `module:function`; what a kind does not have is left out.

    How it is known, by its folder (of other tools also by a file):
    markers: its files; one of them is enough. begun_with: what its command leaves there before them.
    fits: (path) whether it is one, where markers alone do not say it.
    schema: the type of the content of the first marker.

    What is asked of a path:
    value: what was read, and the functions below are given; raises UserError. runs: the folders of its runs.
    listed: `ListRow`, from what was stored; without it no list shows the kind.
    sections: (folder, `core.run_folder.OpenedRun`) `present.additions.Addition`, or None: what it adds to the report of
    a run, or of a search, in that folder.
    comparable: `runs.compared.Side`. held: `HeldLoad`.
    derived: each `Remade` of its folder, made of the files `kept` (in `texts`: with texts of prompts).

    What is asked of a value:
    headline: one sentence. report: `present.section.Report`, of which text, Markdown and page are made; a kind without
    it names text, (value, color), and page, HTML. document: bytes, what `report --json` prints.
    code: (value, strict) the exit code of `report`; without it 0.

    collects: it holds results of several commands, each of which is looked at for itself.
    page_name: of its page; "": it has none beside it, only where the user says. leaves_page: its command writes it.
    bundled_as: what a bundle calls it, if not by its name.
    """

    name: str
    markers: tuple[str, ...] = ()
    begun_with: tuple[str, ...] = ()
    fits: str = ""
    schema: str = ""
    value: str = ""
    runs: str = ""
    listed: str = ""
    sections: str = ""
    comparable: str = ""
    held: str = ""
    derived: str = ""
    kept: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    headline: str = ""
    report: str = ""
    text: str = ""
    page: str = ""
    document: str = ""
    code: str = ""
    collects: bool = False
    page_name: str = PAGE
    leaves_page: bool = False
    bundled_as: str = ""


def _row(*parts: str, **others: Any) -> ResultKind:
    """A row whose functions are called as its fields are. A part: `module: names`."""
    for part in parts:
        module, names = part.split(": ")
        others |= {name: f"loadgen.{module}:{name}" for name in names.split()}
    return ResultKind(**others)


KINDS: OpenTable[ResultKind] = OpenTable(
    "loadgen.results",
    ResultKind,
    (
        _row(
            "contracts.kind: value headline report document code runs listed comparable derived",
            name="validation",
            markers=("target.json", "verdict.json"),
            begun_with=("contract.yaml",),
            page_name="verdict.html",
            leaves_page=True,
            schema="loadgen.contracts.stored:ValidationFacts",
            kept=(
                "target.json",
                "contract.yaml",
                "contract.resolved.yaml",
                "prices.yaml",
                "doctor.json",
            ),
        ),
        _row(
            "search.kind: value headline report code listed comparable derived",
            "runs.levels_kind: document runs held",
            name="search",
            markers=("plan.json",),
            fits="loadgen.search.experiment:is_search",
            schema="loadgen.search.experiment:ExperimentPlan",
            kept=("plan.json",),
        ),
        _row(
            "search.sweep_kind: value code listed derived",
            "runs.levels_kind: headline report document runs comparable held",
            name="sweep",
            markers=("plan.json",),
            leaves_page=True,
            fits="loadgen.search.experiment:is_sweep",
            schema="loadgen.search.experiment:ExperimentPlan",
            kept=("plan.json",),
        ),
        _row(
            "search.grid_kind: value code runs listed derived",
            "search.grid_text: headline report",
            "core.format: document",
            name="grid",
            markers=("grid.json",),
            leaves_page=True,
            schema="loadgen.search.grid:GridPlan",
            kept=("grid.json",),
        ),
        _row(
            "runs.repeats_kind: value headline report runs listed comparable derived",
            "runs.levels_kind: document code",
            name="repeats",
            markers=("repeats.json",),
            schema="loadgen.repeated.repeats:RepeatSummary",
        ),
        _row(
            "mlperf.kind: value headline report document code runs listed comparable derived held",
            "mlperf.added: sections",
            name="mlperf",
            markers=("mlperf.json",),
            bundled_as="run",
            schema="loadgen.mlperf.result:MlperfResult",
            kept=("mlperf_requests.jsonl", "mlperf_queries.parquet"),
            texts=("mlperf_requests.jsonl",),
        ),
        _row(
            "mlperf.accuracy_kind: value code listed",
            "mlperf.accuracy_text: headline report",
            "core.format: document",
            name="accuracy",
            markers=("mlperf_accuracy.json",),
            schema="loadgen.mlperf.accuracy:AccuracyResult",
        ),
        _row(
            "runs.kind: value headline report document code runs listed comparable derived",
            "runs.levels_kind: held",
            name="run",
            markers=("run.json", "summary.json"),
            schema="loadgen.core.results.manifest:Header",
            kept=("run.json", "seconds.jsonl", "server.jsonl"),
        ),
        _row(
            "answers.kind: value code listed derived",
            "answers.text: headline report",
            "core.format: document",
            name="answers",
            markers=("answers.json",),
            schema="loadgen.answers.comparison:AnswersResult",
            kept=("scores.jsonl", "texts.jsonl"),
            texts=("texts.jsonl",),
        ),
        _row(
            "cost.size_kind: value listed",
            "cost.size_text: headline report",
            "core.format: document",
            name="size",
            markers=("size.json",),
            leaves_page=True,
            schema="loadgen.cost.size_result:Sizing",
        ),
        # beside another result: a capacity that stands alone
        _row(
            "runs.levels_kind: held",
            name="capacity",
            markers=("capacity.json",),
            schema="loadgen.repeated.capacity:Capacity",
        ),
        # without a file of their own; looked at last
        _row(
            "interop.calls_kind: fits value headline",
            "interop.application_calls_text: report",
            "core.format: document",
            name="calls",
            page_name="",
        ),
        _row(
            "interop.kind: fits value headline comparable sections",
            "interop.text: report",
            "core.format: document",
            name="other tool",
            page_name="",
        ),
        ResultKind(
            name="results",
            collects=True,
            fits="loadgen.viewer.results_list:is_collection",
            value="loadgen.viewer.results_list:value",
            headline="loadgen.viewer.results_list:headline",
            text="loadgen.viewer.results_list:text",
            page="loadgen.viewer.results_list:page",
            document="loadgen.viewer.results_list:document",
            code="loadgen.viewer.results_list:code",
        ),
        _row(
            "runs.levels_kind: fits value headline report document code runs comparable derived",
            name="runs",
        ),
    ),
)


def named(name: str) -> ResultKind:
    """One of our rows."""
    return next(kind for kind in KINDS.own if kind.name == name)


RUN = named("run")
"""What a folder is taken for that is of no kind: it says best what is missing there."""


def kind_of(path: Path, having: str = "value") -> ResultKind | None:
    """The kind of a result: the first row that fits, of those that have what is asked for. None: no result."""
    wanted = [kind for kind in KINDS.own if getattr(kind, having)]
    by_file = (kind for kind in wanted if kind.markers)
    others = (kind for kind in KINDS.others() if getattr(kind, having))
    by_look = (kind for kind in wanted if not kind.markers)
    return next(
        (kind for kinds in (by_file, others, by_look) for kind in kinds if fits(kind, path)), None
    )


def fits(kind: ResultKind, path: Path) -> bool:
    """Whether a folder (or a file) is of this kind."""
    return _is_marked(kind, path) and (
        bool(call(kind, "fits", path)) if kind.fits else bool(kind.markers)
    )


def _is_marked(kind: ResultKind, path: Path) -> bool:
    """Whether the files are there by which the kind is known, if it is known by files."""
    return not kind.markers or any((path / marker).is_file() for marker in kind.markers)


@contextmanager
def whole(*paths: Path) -> Iterator[None]:
    """Raises UserError where what is done with results finds in them what no result of loadgen says: their files may be
    somebody else's, and what damaged ones raise nobody can list. Of files that are as they were written it is a bug.
    """
    try:
        yield
    except (Fault, Faults, OSError, MemoryError):
        raise
    except Exception as error:
        if all(map(_as_written, paths)):
            raise
        said = f"its files say what no result of loadgen says: {type(error).__name__}: {error}"[
            :300
        ]
        where = " ".join(map(str, paths))
        raise UserError(
            "damaged_file", said, where, "is it as it was written? If so, please report it"
        ) from error


def _as_written(folder: Path) -> bool:
    """Whether a folder has its list of hashes, and every file is as that says."""
    listed, changed = (
        resolve(f"loadgen.core.results.checksums:{name}") for name in ("read", "changed")
    )
    return bool(listed(folder)) and not changed(folder)


def call(kind: ResultKind, name: str, *given: Any) -> Any:
    """Call the function that a row names in this field. Raises UserError for a folder with links out of it, or with
    files that no result has.
    """
    path = given[0] if given and isinstance(given[0], Path) else None
    if path is not None and name != "fits" and not kind.collects and _is_marked(kind, path):
        resolve("loadgen.core.results.files:refuse_links")(path)
    with nullcontext() if path is None else whole(path):
        return KINDS.function(kind, getattr(kind, name), _CHECKS.get(name))(*given)


_CHECKS = {
    "headline": gives(str),
    "document": gives(bytes),
    "code": gives(int),
    "listed": gives(ListRow, type(None)),
}


def leaves_page_in(kind: ResultKind, folder: Path) -> bool:
    """Whether a page may be written into a folder: one of several results has some of them directly in it."""
    return not kind.collects or any(
        below.is_dir() and kind_of(below, "listed") for below in folder.iterdir()
    )


def ask(path: Path, name: str) -> Any:
    """What the kind of a path answers to one question: `runs`, `listed`, `held`, ...; None where no kind has it."""
    kind = kind_of(path, name)
    return None if kind is None else call(kind, name, path)


def left_by_commands() -> Iterator[str]:
    """The files, as patterns, by which a folder is known as one of a command, or as the parent of such folders."""
    for kind in KINDS.own:
        yield from (*kind.begun_with, *kind.markers)
        yield from (f"*/{marker}" for marker in kind.markers if kind.runs)


def adding(name: str) -> Iterator[tuple[ResultKind, Callable[..., Any]]]:
    """Every row that has a function of this name, with it."""
    for kind in KINDS.rows():
        if reference := getattr(kind, name):
            yield kind, KINDS.function(kind, reference)


class OpenedResult(msgspec.Struct, frozen=True, dict=True):
    """A stored result of any kind. It is read when one of its parts is asked for; each may raise UserError.

    `str()` is the report that `loadgen report` prints.
    """

    path: Path
    row: ResultKind

    @property
    def kind(self) -> str:
        """run, repeats, sweep, search, validation, mlperf, answers, ..."""
        return self.row.name

    @cached_property
    def value(self) -> Any:
        """What was read, of a type of its kind."""
        return call(self.row, "value", self.path)

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return str(self._said("headline"))

    @property
    def text(self) -> str:
        """The report as text, ending in a newline."""
        return self.shown(color=False)

    def shown(self, *, color: bool) -> str:
        """`text`, with colours if asked for."""
        if self.row.report:
            return self._written("text", color=color)
        return str(self._said("text", color))

    @property
    def markdown(self) -> str:
        """The report as Markdown, ending in a newline; of a kind that has none, its text between fences."""
        if self.row.report:
            return self._written("markdown")
        return f"```text\n{self.text}```\n"

    @property
    def page(self) -> str | None:
        """The report as one HTML page; None of a kind without one."""
        if self.row.report:
            return self._written("html")
        return str(self._said("page")) if self.row.page else None

    @property
    def document(self) -> bytes:
        """What `loadgen report --json` prints."""
        return bytes(self._said("document"))

    def exit_code(self, *, strict: bool = False) -> int:
        """That of `loadgen report`."""
        read = self.value  # also where the code does not depend on it: damage is said
        with whole(self.path):
            return int(call(self.row, "code", read, strict)) if self.row.code else OK

    @property
    def runs(self) -> tuple[Path, ...]:
        """The folders of its runs; () of a kind without."""
        return tuple(call(self.row, "runs", self.path)) if self.row.runs else ()

    def _said(self, name: str, *given: Any) -> Any:
        value = self.value
        with whole(self.path):
            return call(self.row, name, value, *given)

    def _written(self, form: str, **options: Any) -> str:
        """The report in one of the forms of `present`, which stands above this leaf."""
        report = self._said("report")
        with whole(self.path):
            return str(resolve(f"loadgen.present.{form}:render")(report, **options))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<{self.kind} {self.path}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the report."""
        from html import escape

        return f'<pre style="line-height:1.2">{escape(self.text)}</pre>'


def opened(path: Path) -> OpenedResult:
    """The result at a path, to be read when it is asked. Raises UserError where there is none."""
    kind = kind_of(path)
    if kind is None:
        raise no_result(path)
    return OpenedResult(path, kind)


def no_result(path: Path) -> UserError:
    """The fault of a path that holds no result."""
    if path.is_dir():
        return UserError("no_result", "no result of loadgen in this folder", str(path), HINT)
    return nothing_there(path, HINT)
