"""The table of result kinds: how each kind of result is recognized, opened, listed and compared.

Commands that list, open, print, compare, bundle or price a result use the rows of this table. Only
the rows know which files mark a directory as a result of their kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from loadgen.core.errors import OK, CombinedError, LoadgenError, UserError, missing_result
from loadgen.plugins import Check, OpenTable, check_type

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.core.run_folder import OpenedRun
    from loadgen.render.additions import ExtraSections
    from loadgen.render.section import Report
    from loadgen.repeated.capacity import Capacity
    from loadgen.runs.comparison_side import Side

PAGE = "report.html"
"""The page of a result whose kind names no other one."""

HINT = "give the results folder of loadgen run, sweep, search, validate or mlperf"


class RateInterval(msgspec.Struct, frozen=True, kw_only=True):
    """The interval of an output rate, at the speed that a user sees there. All in tokens/s."""

    per_user: float
    low: float
    high: float


class ListRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the list of results shows for one result.

    Attributes:
        outcome: The outcome in a few words, for example "31.0 req/s sustained". If empty, it is
            derived from the runs.
        selected_run: The name of the run whose metrics are shown. If empty, it is the best one.
        runs: The runs of the result, with their stored summaries.
        interval: The interval of a capacity, or of the mean of repeats.
        description: What was measured, of a result without runs.
        target: The target, of a result without runs.
        simulated: Whether the target was simulated, of a result without runs.
        started: ISO 8601, of a result without runs. Empty if it is not known.
    """

    outcome: str = ""
    selected_run: str = ""
    runs: tuple[NamedSummary, ...] = ()
    interval: RateInterval | None = None
    description: str = ""
    target: str = ""
    simulated: bool = False
    started: str = ""


class CapacityFacts(msgspec.Struct, frozen=True):
    """The capacity that a result reports. The fields are None if the result reports nothing.

    Attributes:
        capacity: The highest load that the target sustained within the SLO.
        is_offline: Whether all requests were scheduled at the same time, as in MLPerf Offline.
        missing_reason: Why a result of this kind has no capacity, or "".
        hint: How to get one.
    """

    capacity: Capacity | None = None
    is_offline: bool | None = None
    missing_reason: str = ""
    hint: str = ""


RECORDS = "records"
SUMMARIES = "summaries of the runs"


class RegeneratedFile(msgspec.Struct, frozen=True):
    """A derived file of a result, generated again from what was kept.

    Attributes:
        name: Its name in the directory of the result.
        data: Its content. None if it cannot be generated.
        basis: What it was generated from, or why it cannot be generated.
        leave: Paths of values that are taken from the stored file, because no kept file has them.
        damaged: Whether it cannot be generated because a kept file was changed.
    """

    name: str
    data: bytes | None
    basis: str
    leave: tuple[str, ...] = ()
    damaged: bool = False


ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True)
class ResultFunctions(Generic[ValueT]):
    """The functions of one kind of result. A kind has only some of them.

    A kind with `load` also has `headline` and `document`, and either `report` or both `text` and
    `page`.

    Attributes:
        fits: Returns whether a path is a result of this kind, if its markers alone do not say it.
        schema: The type of the content of the first marker.
        load: Reads the result at a path. Its value is passed to the functions below. Raises
            UserError.
        headline: Returns the result in one sentence.
        report: Returns the report, which is rendered as text, Markdown and page.
        with_interactivity: Returns the value with its Pareto chart by another definition of the
            speed per user, whose name is the second argument. Only kinds with such a chart have it.
        text: Renders the report as text (value, with color), of a kind without `report`.
        page: Renders the report as HTML, of a kind without `report`.
        document: Returns what `report --json` prints.
        code: Returns the exit code of `report` (value, strict). Without it, the code is 0.
        runs: Returns the directories of its runs.
        list_row: Returns its row in the list of results, from stored summaries. A kind without it
            is not listed.
        compare_side: Returns what is compared of it.
        capacity: Returns what it says of the load that the target sustained.
        regenerate: Yields each derived file, generated again.
    """

    fits: Callable[[Path], bool] | None = None
    schema: type[msgspec.Struct] | None = None
    load: Callable[[Path], ValueT] | None = None
    headline: Callable[[ValueT], str] | None = None
    report: Callable[[ValueT], Report] | None = None
    with_interactivity: Callable[[ValueT, str], ValueT] | None = None
    text: Callable[[ValueT, bool], str] | None = None
    page: Callable[[ValueT], str] | None = None
    document: Callable[[ValueT], bytes] | None = None
    code: Callable[[ValueT, bool], int] | None = None
    runs: Callable[[Path], Sequence[Path]] | None = None
    list_row: Callable[[Path], ListRow | None] | None = None
    compare_side: Callable[[Path], Side] | None = None
    capacity: Callable[[Path], CapacityFacts] | None = None
    regenerate: Callable[[Path], Iterable[RegeneratedFile]] | None = None


FunctionName = Literal["load", "runs", "list_row", "compare_side", "capacity", "regenerate"]
"""The functions by which a kind can be chosen."""


class ResultKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of result: how its directory is recognized, and how its functions are imported.

    Attributes:
        name: Its name.
        load_functions: Imports the functions.
        markers: Files that mark the directory of a result. One of them is enough.
        begun_with: Files that its command writes there before the markers.
        has_runs: Whether it is made of runs, so that it has the function `runs`.
        additions: Returns what results of this kind add to the report of a run or search in their
            directory, or None. It is called for every report, so it imports lazily.
        source_files: Files from which its derived files are generated. Names may have wildcards.
        texts: Those of them that contain texts of prompts or responses.
        collects: Whether its directory contains the results of several commands, like `results`.
        page_name: The name of its page. If empty, a page is only written where the user says.
        leaves_page: Whether its command writes the page without being asked to.
        bundled_as: What a bundle calls it, if that is not its name.
    """

    name: str
    load_functions: Callable[[], ResultFunctions[Any]]
    markers: tuple[str, ...] = ()
    begun_with: tuple[str, ...] = ()
    has_runs: bool = False
    additions: Callable[[Path, OpenedRun], ExtraSections | None] | None = None
    source_files: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    collects: bool = False
    page_name: str = PAGE
    leaves_page: bool = False
    bundled_as: str = ""

    @property
    def functions(self) -> ResultFunctions[Any]:
        """The functions, which are imported on first use. A plug-in that fails raises UserError."""
        return KINDS.guard(self, self.load_functions, check_type(ResultFunctions))()


def _load_validation() -> ResultFunctions[Any]:
    from loadgen.contracts.kind import FUNCTIONS

    return FUNCTIONS


def _load_search() -> ResultFunctions[Any]:
    from loadgen.search.search_kind import FUNCTIONS

    return FUNCTIONS


def _load_tiers() -> ResultFunctions[Any]:
    from loadgen.search.agent_tiers_kind import FUNCTIONS

    return FUNCTIONS


def _load_sweep() -> ResultFunctions[Any]:
    from loadgen.search.sweep_kind import FUNCTIONS

    return FUNCTIONS


def _load_live() -> ResultFunctions[Any]:
    from loadgen.compare.live_kind import FUNCTIONS

    return FUNCTIONS


def _load_repeats() -> ResultFunctions[Any]:
    from loadgen.runs.repeats_kind import FUNCTIONS

    return FUNCTIONS


def _load_mlperf() -> ResultFunctions[Any]:
    from loadgen.mlperf.kind import FUNCTIONS

    return FUNCTIONS


def _load_endpoints() -> ResultFunctions[Any]:
    from loadgen.mlperf.endpoints.kind import FUNCTIONS

    return FUNCTIONS


def _load_accuracy() -> ResultFunctions[Any]:
    from loadgen.mlperf.accuracy_kind import FUNCTIONS

    return FUNCTIONS


def _load_run() -> ResultFunctions[Any]:
    from loadgen.runs.kind import FUNCTIONS

    return FUNCTIONS


def _load_answers() -> ResultFunctions[Any]:
    from loadgen.answers.kind import FUNCTIONS

    return FUNCTIONS


def _load_size() -> ResultFunctions[Any]:
    from loadgen.cost.size_kind import FUNCTIONS

    return FUNCTIONS


def _load_capacity() -> ResultFunctions[Any]:
    from loadgen.runs.run_directory_kind import CAPACITY

    return CAPACITY


def _load_calls() -> ResultFunctions[Any]:
    from loadgen.interop.calls_kind import FUNCTIONS

    return FUNCTIONS


def _load_other_tool() -> ResultFunctions[Any]:
    from loadgen.interop.kind import FUNCTIONS

    return FUNCTIONS


def _load_results() -> ResultFunctions[Any]:
    from loadgen.ui.results_list import FUNCTIONS

    return FUNCTIONS


def _load_runs() -> ResultFunctions[Any]:
    from loadgen.runs.run_directory_kind import FUNCTIONS

    return FUNCTIONS


def _mlperf_additions(folder: Path, run: OpenedRun) -> ExtraSections | None:
    from loadgen.mlperf.extra_sections import create_extra_sections

    return create_extra_sections(folder, run)


def _other_tool_additions(_folder: Path, run: OpenedRun) -> ExtraSections | None:
    from loadgen.interop.kind import create_tool_comparison

    return create_tool_comparison(run)


def _load_rows() -> tuple[ResultKind, ...]:
    """Return the built-in kinds. Those without markers come last, and are tried in this order."""
    return (
        ResultKind(
            name="validation",
            load_functions=_load_validation,
            markers=("target.json", "verdict.json"),
            begun_with=("contract.yaml",),
            has_runs=True,
            source_files=(
                "target.json",
                "contract.yaml",
                "contract.resolved.yaml",
                "prices.yaml",
                "doctor.json",
            ),
            page_name="verdict.html",
            leaves_page=True,
        ),
        ResultKind(
            name="search",
            load_functions=_load_search,
            markers=("plan.json",),
            has_runs=True,
            source_files=("plan.json",),
        ),
        ResultKind(
            name="tiers",
            load_functions=_load_tiers,
            markers=("tiers.json",),
        ),
        ResultKind(
            name="sweep",
            load_functions=_load_sweep,
            markers=("plan.json",),
            has_runs=True,
            source_files=("plan.json",),
            leaves_page=True,
        ),
        ResultKind(
            name="live",
            load_functions=_load_live,
            markers=("live.json",),
            has_runs=True,
            source_files=("live.json",),
            leaves_page=True,
        ),
        ResultKind(
            name="repeats",
            load_functions=_load_repeats,
            markers=("repeats.json",),
            has_runs=True,
        ),
        ResultKind(
            name="mlperf",
            load_functions=_load_mlperf,
            markers=("mlperf.json",),
            has_runs=True,
            additions=_mlperf_additions,
            source_files=("mlperf_requests.jsonl", "mlperf_queries.parquet"),
            texts=("mlperf_requests.jsonl",),
            bundled_as="run",
        ),
        ResultKind(
            name="mlperf endpoints",
            load_functions=_load_endpoints,
            markers=("endpoints_curve.json",),
            has_runs=True,
            source_files=("endpoints_curve.json", "endpoints_requests_*.jsonl"),
            texts=("endpoints_requests_*.jsonl",),
            leaves_page=True,
        ),
        ResultKind(
            name="accuracy",
            load_functions=_load_accuracy,
            markers=("mlperf_accuracy.json",),
        ),
        ResultKind(
            name="run",
            load_functions=_load_run,
            markers=("run.json", "summary.json"),
            has_runs=True,
            source_files=(
                "run.json",
                "seconds.jsonl",
                "server.jsonl",
                "answers.jsonl",
                "known_answers.jsonl",
                "wrong_answers.jsonl",
            ),
            texts=("known_answers.jsonl", "wrong_answers.jsonl"),
        ),
        ResultKind(
            name="answers",
            load_functions=_load_answers,
            markers=("answers.json",),
            source_files=("scores.jsonl", "texts.jsonl"),
            texts=("texts.jsonl",),
        ),
        ResultKind(
            name="size",
            load_functions=_load_size,
            markers=("size.json",),
            leaves_page=True,
        ),
        # A capacity without the search that found it.
        ResultKind(
            name="capacity",
            load_functions=_load_capacity,
            markers=("capacity.json",),
        ),
        ResultKind(name="calls", load_functions=_load_calls, page_name=""),
        ResultKind(
            name="other tool",
            load_functions=_load_other_tool,
            additions=_other_tool_additions,
            page_name="",
        ),
        ResultKind(name="results", load_functions=_load_results, collects=True),
        ResultKind(name="runs", load_functions=_load_runs, has_runs=True),
    )


KINDS: OpenTable[ResultKind] = OpenTable("loadgen.results", ResultKind, _load_rows)


def named(name: str) -> ResultKind:
    """Return the built-in kind with this name, which must exist."""
    return next(kind for kind in KINDS.builtin_rows if kind.name == name)


RUN = named("run")
"""The kind of a directory that is of no kind. Its errors explain best what is missing."""


def kind_of(path: Path, function_name: FunctionName = "load") -> ResultKind | None:
    """Return the kind of the result at a path, such as "run" or "sweep", or None if there is none.

    A path may fit several kinds, and not every kind offers every function. So the first kind is
    returned that fits and that has the function which the caller needs.

    Args:
        path: The directory or the file of a result.
        function_name: The function that the kind must have, such as "compare_side".
    """
    for kind in _list_kinds_in_order():
        # This quick check comes first, because importing the functions of a kind takes time.
        if not _has_marker_if_needed(kind, path):
            continue
        has_function = getattr(kind.functions, function_name) is not None
        if has_function and fits(kind, path):
            return kind
    return None


def _list_kinds_in_order() -> Iterator[ResultKind]:
    """Yield the kinds with markers, then those of plug-ins, then those without markers."""
    yield from (kind for kind in KINDS.builtin_rows if kind.markers)
    yield from KINDS.plugin_rows()
    yield from (kind for kind in KINDS.builtin_rows if not kind.markers)


def fits(kind: ResultKind, path: Path) -> bool:
    """Return True if a directory (or a file) is a result of this kind.

    It must have one of the marker files of the kind. A kind may have a function that checks the
    path as well. A kind with neither of them fits no path.
    """
    if not _has_marker_if_needed(kind, path):
        return False

    check_path = kind.functions.fits
    if check_path is None:
        return bool(kind.markers)

    # An exception in the check of a plug-in becomes a UserError that names the plug-in.
    guarded_check = KINDS.guard(kind, check_path)
    with reporting_damage(path):
        return bool(guarded_check(path))


def _has_marker_if_needed(kind: ResultKind, path: Path) -> bool:
    """Return True if a directory has a marker file of the kind, or the kind has no markers.

    A marker is a file that every result of the kind has, such as `plan.json` of a search.
    """
    if not kind.markers:
        return True
    return any((path / marker).is_file() for marker in kind.markers)


MAX_DAMAGE_MESSAGE_LENGTH = 300
"""A longer message about damaged files is cut, because an exception may quote their content."""


@contextmanager
def reporting_damage(*paths: Path) -> Iterator[None]:
    """Raise UserError for an unexpected exception while results are read, if files were changed.

    The files may come from another author, and damaged files can raise any exception. If all files
    still have the checksums that were written with them, the files are not the cause. Then the
    exception is a bug of loadgen, and is raised as it is. Errors with a message for the user, and
    those of the operating system, are never replaced.
    """
    try:
        yield
    except (LoadgenError, CombinedError, OSError, MemoryError):
        raise
    except Exception as error:
        is_bug = all(_is_unchanged(path) for path in paths)
        if is_bug:
            raise

        message = f"the files are damaged: {type(error).__name__}: {error}"
        raise UserError(
            "damaged_file",
            message[:MAX_DAMAGE_MESSAGE_LENGTH],
            " ".join(str(path) for path in paths),
            "if the files are unchanged, please report this as a bug",
        ) from error


def _is_unchanged(folder: Path) -> bool:
    """Return True if a directory has a list of hashes, and every file has its hash."""
    from loadgen.core.results import checksums

    return bool(checksums.read_checksums(folder)) and not checksums.find_changes(folder)


ReturnT = TypeVar("ReturnT")


def call_on_path(
    kind: ResultKind,
    function: Callable[[Path], ReturnT],
    path: Path,
    check: Check | None = None,
) -> ReturnT:
    """Call a function of a kind with the path of a result, and return what it returns.

    Results may come from another author, and kinds from a plug-in. So an error that either of them
    causes is reported as theirs, and not as a bug of loadgen.

    Args:
        kind: The kind.
        function: One of the functions of the kind that take a path.
        path: The path of the result.
        check: Raises an error if a plug-in returns a value of a wrong type.

    Raises:
        UserError: For a directory with links out of it, for damaged files, and for a plug-in that
            fails.
    """
    from loadgen.core.results.files import refuse_links

    # In a directory that collects several results, each of them is checked when it is read.
    is_single_result = not kind.collects
    if is_single_result and _has_marker_if_needed(kind, path):
        refuse_links(path)

    # An exception in a plug-in becomes a UserError that names the plug-in.
    guarded_function = KINDS.guard(kind, function, check)
    with reporting_damage(path):
        return guarded_function(path)


def list_row(kind: ResultKind, path: Path) -> ListRow | None:
    """Return the row of a result in the list of results, or None if its kind is not listed."""
    function = kind.functions.list_row
    if function is None:
        return None
    return call_on_path(kind, function, path, check_type(ListRow, type(None)))


def compare_side(kind: ResultKind, path: Path) -> Side:
    """Return what is compared of a result. Its kind must be one that can be compared."""
    function = kind.functions.compare_side
    assert function is not None, kind.name
    return call_on_path(kind, function, path)


def regenerated_files(kind: ResultKind, path: Path) -> Iterable[RegeneratedFile]:
    """Return the derived files of a result, generated again. Empty if its kind has none."""
    function = kind.functions.regenerate
    return () if function is None else call_on_path(kind, function, path)


def runs_of(kind: ResultKind, path: Path) -> tuple[Path, ...]:
    """Return the directories of the runs of a result. Empty if its kind has none."""
    function = kind.functions.runs
    return () if function is None else tuple(call_on_path(kind, function, path))


def runs_in(path: Path) -> tuple[Path, ...]:
    """Return the directories of the runs of the result at a path. Empty if there are none."""
    kind = kind_of(path, "runs")
    return () if kind is None else runs_of(kind, path)


def capacity_facts(path: Path) -> CapacityFacts:
    """Return what the result at a path says of the load that the target sustained."""
    kind = kind_of(path, "capacity")
    if kind is None:
        return CapacityFacts()
    function = kind.functions.capacity
    assert function is not None, kind.name
    return call_on_path(kind, function, path)


def can_write_page_to(kind: ResultKind, folder: Path) -> bool:
    """Return True if the page of a result of this kind may be written to a directory.

    The page of a single result may be written to any directory. Some kinds collect the results of
    several commands in one directory, and their page is a list of these. It may be written only to
    a directory with at least one result in it, so that a mistyped path does not put a page into an
    unrelated directory.
    """
    if not kind.collects:
        return True
    subdirectories = [path for path in folder.iterdir() if path.is_dir()]
    return any(_can_be_listed(subdirectory) for subdirectory in subdirectories)


def _can_be_listed(path: Path) -> bool:
    """Return True if a path is a result of a kind that the list of results shows."""
    return kind_of(path, "list_row") is not None


def marker_patterns() -> Iterator[str]:
    """Yield glob patterns of files that only a directory with a result of a command has.

    Each kind of result has files that mark it, such as `plan.json`. Its command may write others
    before them (`begun_with`), such as `contract.yaml`, which are found if it was interrupted
    early. The runs of a result are in subdirectories, so `*/plan.json` is a pattern too.
    """
    for kind in KINDS.builtin_rows:
        yield from kind.begun_with
        yield from kind.markers
        if kind.has_runs:
            yield from (f"*/{marker}" for marker in kind.markers)


def additions_to(folder: Path, run: OpenedRun) -> tuple[ExtraSections, ...]:
    """Return what other kinds add to the report of the run or search in a directory.

    For example, an MLPerf test adds its verdict to the report of its run. A kind that has nothing
    to add to this report returns None.
    """
    found_sections = []
    for kind in KINDS.rows():
        if kind.additions is None:
            continue
        # An exception in a plug-in becomes a UserError that names the plug-in.
        create_sections = KINDS.guard(kind, kind.additions)
        extra_sections = create_sections(folder, run)
        if extra_sections is not None:
            found_sections.append(extra_sections)

    return tuple(found_sections)


def no_pareto_chart(kind: str) -> UserError:
    """Return the error of a choice of the Pareto chart of a result that has none."""
    return UserError(
        "unsupported",
        f"a result of the kind {kind} has no Pareto chart",
        "--interactivity",
        "use it with a sweep, or with a folder of runs at several loads",
    )


class OpenedResult(msgspec.Struct, frozen=True, dict=True):
    """A stored result of any kind, which is read when one of its properties is needed.

    Every property may raise UserError. `str()` is the report that `loadgen report` prints.

    Attributes:
        path: Where it is stored.
        row: Its kind.
        interactivity: The definition of the speed per user that its Pareto chart uses. If empty, it
            is that of the kind.
    """

    path: Path
    row: ResultKind
    interactivity: str = ""

    @property
    def kind(self) -> str:
        """The name of its kind: run, repeats, sweep, search, validation, mlperf, answers, ..."""
        return self.row.name

    @cached_property
    def value(self) -> Any:
        """What was read, of a type of its kind."""
        functions = self.row.functions
        assert functions.load is not None, self.kind
        value = call_on_path(self.row, functions.load, self.path)
        if not self.interactivity:
            return value

        if functions.with_interactivity is None:
            raise no_pareto_chart(self.kind)
        return functions.with_interactivity(value, self.interactivity)

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return self._call(self.row.functions.headline, check_type(str))

    @property
    def text(self) -> str:
        """The report as text, ending in a newline."""
        return self.render_text(color=False)

    def render_text(self, *, color: bool, full: bool = False, width: int | None = None) -> str:
        """Return the report as text.

        Args:
            color: True for verdicts and headings in color.
            full: True for the full report, not its brief form. A kind that renders its text itself
                ignores this and the width.
            width: The columns of the terminal. None for the columns of a text in a file.
        """
        from loadgen.render import text
        from loadgen.render.table import WIDTH

        report = self._report()
        if report is None:
            return self._call_text_renderer(color=color)

        with reporting_damage(self.path):
            return text.render(report, full=full, color=color, width=width or WIDTH)

    def _call_text_renderer(self, *, color: bool) -> str:
        """Return the report as text from the kind, which renders it without a `Report`."""
        render = self.row.functions.text
        assert render is not None, self.kind
        # An exception in a plug-in becomes a UserError that names the plug-in.
        guarded_render = KINDS.guard(self.row, render)
        value = self.value
        with reporting_damage(self.path):
            return guarded_render(value, color)

    @property
    def markdown(self) -> str:
        """The result as Markdown, ending in a newline.

        If its kind has no `Report`, which can be rendered as Markdown, it is the text of the result
        in a code block.
        """
        from loadgen.render import markdown

        report = self._report()
        if report is None:
            return f"```text\n{self.text}```\n"
        with reporting_damage(self.path):
            return markdown.render(report)

    @property
    def page(self) -> str | None:
        """The report as one HTML page, or None if the kind has no page.

        Most kinds have a `Report`, which is rendered as text, Markdown or HTML. The other kinds
        render their page themselves.
        """
        from loadgen.render import html

        report = self._report()
        if report is not None:
            with reporting_damage(self.path):
                return html.render(report)

        render_page = self.row.functions.page
        return None if render_page is None else self._call(render_page)

    @property
    def document(self) -> bytes:
        """What `loadgen report --json` prints."""
        return self._call(self.row.functions.document, check_type(bytes))

    def exit_code(self, *, strict: bool = False) -> int:
        """Return the exit code of `loadgen report`. Always reads the result, to report damage."""
        value = self.value
        code = self.row.functions.code
        if code is None:
            return OK
        with reporting_damage(self.path):
            return KINDS.guard(self.row, code, check_type(int))(value, strict)

    @property
    def runs(self) -> tuple[Path, ...]:
        """The directories of its runs. Empty if its kind has none."""
        return runs_of(self.row, self.path)

    def _report(self) -> Report | None:
        """Return the report, or None if the kind renders text and page itself."""
        report = self.row.functions.report
        return None if report is None else self._call(report)

    def _call(
        self, function: Callable[[Any], ReturnT] | None, check: Check | None = None
    ) -> ReturnT:
        """Call a function of the kind with the value of the result."""
        assert function is not None, self.kind
        value = self.value
        with reporting_damage(self.path):
            return KINDS.guard(self.row, function, check)(value)

    def __str__(self) -> str:
        """Return the report as text."""
        return self.text

    def __repr__(self) -> str:
        """Return the kind and the path."""
        return f"<{self.kind} {self.path}>"

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        from html import escape

        return f'<pre style="line-height:1.2">{escape(self.text)}</pre>'


def opened(path: Path) -> OpenedResult:
    """Return the result at a path. It is read on first use. Raises UserError if there is none."""
    kind = kind_of(path)
    if kind is None:
        raise no_result(path)
    return OpenedResult(path, kind)


def no_result(path: Path) -> UserError:
    """Return the error for a path that holds no result."""
    if path.is_dir():
        return UserError("no_result", "the folder has no result of loadgen", str(path), HINT)
    return missing_result(path, HINT)
