"""The Python API: `loadgen.run("qa", url=...)`, `loadgen.load(folder)`, and their results.

The keywords are the options of the command line. This is a thin layer over `execution.run` and
`results.store`, without arithmetic.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, get_type_hints

from msgspec.structs import replace

from loadgen import result_kinds
from loadgen.cli.run_options import OPTIONS, RunOptions
from loadgen.cli.settings import build_settings
from loadgen.core.errors import CombinedError, LoadgenError, UserError, closest, collecting
from loadgen.result_kinds import OpenedResult

if TYPE_CHECKING:
    import pyarrow as pa

    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.load import Load
    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.token_usage import Tokens
    from loadgen.core.metrics.verdict import Verdict
    from loadgen.core.stats.quantiles import Distribution
    from loadgen.core.workload import Workload
    from loadgen.runs.request_table import Unit

    WorkloadInput = str | os.PathLike[str] | Mapping[str, Any] | Workload | None


@dataclass(frozen=True)
class Result:
    """The results of a run.

    The properties are the metrics that tests use most: `result.ttft_ms.p99`. A metric without
    samples is None.

    Attributes:
        summary: All metrics; docs/reference/summary.md lists its fields.
        folder: The results folder, with the records.
    """

    summary: Summary
    folder: Path

    @property
    def kind(self) -> str:
        """The kind of result that its folder is: "run", or "mlperf"."""
        return self._opened.kind

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return self._opened.headline

    @property
    def text(self) -> str:
        """The report of `loadgen report`, with what an MLPerf-style run adds to it."""
        return self._opened.text

    @property
    def page(self) -> str | None:
        """The report as one HTML page."""
        return self._opened.page

    @cached_property
    def _opened(self) -> OpenedResult:
        return result_kinds.opened(self.folder)

    @property
    def ttft_ms(self) -> Distribution:
        """Time to first token, from the scheduled time, of successful requests."""
        return self.summary.ttft_ms

    @property
    def tpot_ms(self) -> Distribution:
        """Time per output token after the first, of successful requests with several tokens."""
        return self.summary.tpot_ms

    @property
    def inter_chunk_ms(self) -> Distribution:
        """Times between successive output events, pooled over all requests."""
        return self.summary.inter_chunk_ms

    @property
    def itl_ms(self) -> Distribution | None:
        """The inter-token latency, if every event carried exactly one token.

        Otherwise it is None, and `summary.itl_undefined_reason` says why.
        """
        return self.summary.itl_ms

    @property
    def e2e_ms(self) -> Distribution:
        """From the scheduled time to the last output or finish event, of successful requests."""
        return self.summary.e2e_ms

    @property
    def requests(self) -> RequestCounts:
        """Numbers of requests: scheduled, ok, failed, dropped, cancelled, unfinished, lost."""
        return self.summary.requests

    @property
    def tokens(self) -> Tokens:
        """Token counts and rates."""
        return self.summary.tokens

    @property
    def load(self) -> Load:
        """Offered, sent and completed requests per second, and the concurrency."""
        return self.summary.load

    @property
    def goodput(self) -> Goodput:
        """The requests that met every objective of the SLO, and whether the SLO was met.

        `met` is None without an SLO, if it is undecided, or if the measurement is not valid.
        """
        return self.summary.goodput

    @property
    def verdict(self) -> Verdict:
        """Whether the measurement is valid, and the reasons if not (`verdict.reasons`)."""
        return self.summary.verdict

    @property
    def valid(self) -> bool:
        """Whether the measurement is valid."""
        return self.summary.verdict.valid

    @property
    def exit_code(self) -> int:
        """The exit code: 0, 1 SLO missed or many errors, 3 INVALID, 130 interrupted."""
        from loadgen.core.metrics.summary import exit_code

        return exit_code(self.summary)

    @cached_property
    def server(self) -> pa.Table:
        """The metrics of the servers, one row for each value that changed.

        The columns are t_s, target, page, name, labels and value. The table is empty if no page was
        read.
        """
        import pyarrow as pa

        from loadgen.core.results import store

        samples = store.read_server_samples(self.folder)
        column_types = {
            "t_s": pa.float64(),
            "target": pa.int32(),
            "page": pa.string(),
            "name": pa.string(),
            "labels": pa.string(),
            "value": pa.float64(),
        }

        columns = {}
        for name, column_type in column_types.items():
            values = [getattr(sample, name) for sample in samples]
            columns[name] = pa.array(values, column_type)

        return pa.table(columns)

    @cached_property
    def rows(self) -> pa.Table:
        """One row per request of all stages, with times in ns since the start.

        The columns are those of `core.results.record.FIELDS`.
        """
        from loadgen.core.results import store
        from loadgen.core.results.parquet import to_table

        stored_run = store.read_run(self.folder)
        table: pa.Table = to_table(stored_run.rows, stored_run.texts)
        return table

    def frame(
        self, library: Literal["pandas", "polars", "pyarrow"] = "pandas", *, unit: Unit = "ms"
    ) -> Any:
        """Return a data frame of pandas or polars, or a table of pyarrow, with a row per request.

        Its columns are latencies (`ttft_ms`, `tpot_ms`, `e2e_ms`), times since the start of the
        run, stages and statuses, and after a run with `--keep gaps` the inter-token latencies. A
        value that a request does not have is null.

        Args:
            library: The library whose table type is returned.
            unit: The unit of latencies and times: "ns", "us", "ms" or "s".

        Raises:
            UserError: For an unknown library or unit, and for a library that is not installed.
        """
        from loadgen.runs import request_gaps
        from loadgen.runs.request_table import NS_PER_UNIT, request_table

        if unit not in NS_PER_UNIT:
            hint = f"use one of {', '.join(NS_PER_UNIT)}"
            raise UserError("unknown_name", f"unit={unit!r}", "Result.frame", hint)

        stored_run = request_gaps.read_run_with_gaps(self.folder)
        table = request_table(
            stored_run.manifest,
            stored_run.rows,
            stored_run.texts,
            unit,
            stored_run.gaps_ns_by_slot,
        )
        return _convert_table(table, library)

    def _repr_html_(self) -> str:
        """Return the result as tables and a chart, which a notebook shows."""
        from loadgen.runs.notebook import notebook_html

        return notebook_html(self.summary, self.folder)

    def __str__(self) -> str:
        """Return the short report that `loadgen run` prints."""
        from loadgen.render import text as text_renderer
        from loadgen.runs import text

        return text_renderer.render(text.report(self.summary, run_dir=self.folder))

    def __repr__(self) -> str:
        requests = self.summary.requests
        state = "valid" if self.valid else "NOT VALID"
        return f"<Result {self.summary.run.id}: {requests.ok} of {requests.scheduled} ok, {state}>"


def _convert_table(table: pa.Table, library: str) -> Any:
    """Return a table of pyarrow as a table of pandas or polars, or unchanged for "pyarrow".

    Raises UserError for another library, and for one that is not installed.
    """
    match library:
        case "pyarrow":
            return table
        case "polars":
            _check_installed(library)
            import polars

            return polars.from_arrow(table)
        case "pandas":
            _check_installed(library)
            return _convert_to_pandas(table)
        case _:
            hint = 'use "pandas", "polars" or "pyarrow"'
            raise UserError("unknown_name", f"library={library!r}", "Result.frame", hint)


def _check_installed(library: str) -> None:
    """Raise UserError if a library of data frames is not installed."""
    if find_spec(library) is None:
        hint = f'pip install {library}, or use frame("pyarrow"), which is installed'
        raise UserError(
            "not_installed", f"{library} is not installed", "Result.frame", hint, key=library
        )


def _convert_to_pandas(table: pa.Table) -> Any:
    """Return a table of pyarrow as a data frame of pandas whose integers stay integers."""
    return table.to_pandas(types_mapper=_choose_pandas_type)


def _choose_pandas_type(arrow_type: pa.DataType) -> Any:
    """Return the type of a pandas column for a type of pyarrow, or None for the default type.

    By default, pandas converts integers to floats if one of them is missing. So integers and lists
    of integers keep their type. Both have "int" in their names, such as `int64` and `list<int64>`.
    """
    import pandas as pd  # type: ignore[import-untyped]

    has_integers = "int" in str(arrow_type)
    return pd.ArrowDtype(arrow_type) if has_integers else None


P = ParamSpec("P")
R = TypeVar("R")


_DEFAULT_SWITCHES = {"insecure": False, "stream": True}
"""What the switches are by default. The table of options has no default of a switch."""


def _show_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function `run(workload, **options)` so that `help` lists each option.

    Type checkers and editors know the options from the annotation `**options: Unpack[RunOptions]`.
    At run time, `help` and notebooks would show only `**options`. They call `inspect.signature`,
    which returns the attribute `__signature__` of a function if it has one.
    """
    signature = inspect.signature(function)
    parameters = [signature.parameters["workload"], *_option_parameters()]
    signature_with_options = signature.replace(parameters=parameters)
    # Type checkers do not know this attribute, so it is set by its name.
    function.__dict__["__signature__"] = signature_with_options
    return function


def _option_parameters() -> Iterator[inspect.Parameter]:
    """Yield each option of a run as a keyword parameter with its default and its type.

    The table OPTIONS has no default of an on/off option, so that is taken from _DEFAULT_SWITCHES.
    """
    option_types = get_type_hints(RunOptions)
    for name, option in OPTIONS.items():
        is_switch = name in _DEFAULT_SWITCHES
        default = _DEFAULT_SWITCHES[name] if is_switch else option.default
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=option_types[name],
        )


@_show_options
def run(workload: WorkloadInput = None, **options: Unpack[RunOptions]) -> Result:
    """Run a workload against an endpoint and return the results.

    It blocks until the end of the run, and sends real load. A missed SLO or an invalid measurement
    does not raise: see `Result`.

    Args:
        workload: A file, the name of a packaged workload, a mapping, or a checked Workload.
        **options: The options of `loadgen run` with the same values, for example `url`,
            `concurrency`, `duration` and `slo`. `--num-requests` is `num_requests`. The URL
            "sim:PRESET" is a simulated server in virtual time. `api_key` (default:
            OPENAI_API_KEY), `sources`, `stream` and `embedded` exist only in Python. `headers`,
            `metadata` and `extra_body` may be mappings.

    Raises:
        LoadgenError: If the run cannot start or finish; it is a UserError or a TargetError.
        CombinedError: If there are several reasons why it cannot start.
        TypeError: For an unknown option.
    """
    from loadgen.core.execution.run import execute

    _check_no_event_loop()
    _check_names(options)
    _check_workload(workload, options)
    checked_workload, settings = _check_inputs(workload, options)
    summary, run_dir = execute(checked_workload, settings)

    return Result(summary, run_dir)


def _check_inputs(workload: WorkloadInput, options: RunOptions) -> tuple[Workload, Settings]:
    """Return the checked workload and the settings of a run.

    Raises CombinedError with the errors of both, so that the user can correct them at once.
    """
    errors: list[LoadgenError] = []
    with collecting(errors):
        settings = replace(build_settings(options), command=("loadgen.run",))

    with collecting(errors):
        checked_workload = _load_workload(workload, options)

    if errors:
        raise CombinedError(errors)

    return checked_workload, settings


@_show_options
async def arun(workload: WorkloadInput = None, **options: Unpack[RunOptions]) -> Result:
    """Run a workload where an event loop is running: `await loadgen.arun("qa", url=...)`.

    This is `run` in a thread. A cancelled `await` returns at once, but the run goes on in its
    thread to its end: bound it with `duration` or `num_requests`.
    """
    return await asyncio.to_thread(partial(run, workload, **options))


def load(folder: str | os.PathLike[str]) -> Result | Any:
    """Open a stored result, and compute its metrics from the stored requests.

    Returns a `Result` for a run and an `OpenedResult` for any other kind. Both have `kind`,
    `headline`, `text` (also `str()`) and `page`; `OpenedResult.value` is what was read, for example
    the result of a search or a verdict. The annotation has `Any`, so that type checkers accept
    attributes of both.

    Args:
        folder: The results folder of any command, or the result file of another tool.

    Raises:
        UserError: If there is no result.
    """
    path = Path(folder)
    # A folder without any result is opened as a run, whose error explains best what is missing.
    kind = result_kinds.kind_of(path) or result_kinds.RUN
    is_single_run = result_kinds.runs_of(kind, path) == (path,)
    if is_single_run:
        return _open_run(path)
    return result_kinds.OpenedResult(path, kind)


def _open_run(folder: Path) -> Result:
    """Return the result of a run, whose summary is computed again from its records."""
    from loadgen.core import run_folder

    return Result(run_folder.open_run(folder).summary, folder)


def load_runs(folder: str | os.PathLike[str]) -> dict[str, Result]:
    """Open the runs of a sweep, a search, a validation or repeats.

    The folder may also be one with the folders of several such results. Returns a result by the
    name of each run, such as `c16` or `sustained/r0`. Raises UserError for a folder without runs.
    """
    path = Path(folder)
    run_dirs = list(result_kinds.runs_in(path)) or _runs_in_subdirectories(path)

    is_single_run = run_dirs == [path]
    if not run_dirs or is_single_run:
        raise UserError(
            "no_result",
            "the folder has no run",
            str(path),
            "give the folder of a sweep, a search or a validation",
        )

    return {run_dir.relative_to(path).as_posix(): _open_run(run_dir) for run_dir in run_dirs}


def _runs_in_subdirectories(path: Path) -> list[Path]:
    """Return the directories of the runs of all results in a directory."""
    run_dirs: list[Path] = []
    for subdirectory in sorted(path.glob("*/")):
        run_dirs += result_kinds.runs_in(subdirectory)
    return run_dirs


def _check_no_event_loop() -> None:
    """Raise UserError in a running event loop, which `loadgen.run` would block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UserError(
        "event_loop",
        "loadgen.run blocks, but an event loop is running",
        "loadgen.run",
        "use await loadgen.arun(...) with the same arguments",
    )


def _check_names(options: RunOptions) -> None:
    """Raise TypeError for an option that does not exist."""
    for name in options.keys() - OPTIONS.keys():
        similar = closest(name, sorted(OPTIONS))
        hint = f"; did you mean {similar!r}?" if similar else ""
        raise TypeError(f"loadgen.run has no option {name!r}{hint}")


def _check_workload(workload: WorkloadInput, options: RunOptions) -> None:
    """Raise UserError if a workload has a wrong type, or cannot be combined with the options.

    A workload is a file, a packaged name, a mapping or a Workload object. The options `trace` and
    `dataset` replace the requests of a workload, which is possible only for a file or a name.
    """
    from loadgen.core.workload import Workload

    if workload is not None and not isinstance(workload, str | os.PathLike | Mapping | Workload):
        raise UserError(
            "wrong_type",
            f"must be a workload, not {type(workload).__name__}",
            "loadgen.run",
            "give a file, a packaged name, a mapping or a Workload",
        )

    request_source = _describe_request_source(options)
    if isinstance(workload, Workload):
        _check_workload_is_unchanged(options, request_source)

    if isinstance(workload, Mapping) and request_source is not None:
        raise UserError(
            "conflict",
            f"a mapping cannot be combined with {request_source}",
            "loadgen.run",
            "give one of them, or a workload's file",
        )


def _describe_request_source(options: RunOptions) -> str | None:
    """Return "a trace" or "a dataset" if an option provides the requests. Return None if not."""
    if options.get("trace") is not None:
        return "a trace"
    if options.get("dataset") is not None:
        return "a dataset"
    return None


def _check_workload_is_unchanged(options: RunOptions, request_source: str | None) -> None:
    """Raise UserError if options would change a Workload object, which is complete and checked.

    The error names only the source of requests if there is one, such as "a trace". Otherwise it
    names all options of the load, such as `--rate`.
    """
    from loadgen.core.workload.flags import select_load_options

    if request_source is not None:
        changes = [request_source]
    else:
        changes = [_option_name(name) for name in select_load_options(options)]

    if changes:
        raise UserError(
            "conflict",
            f"a Workload object cannot be changed by {', '.join(changes)}",
            "loadgen.run",
            "give the file or a mapping, or change the Workload with model_copy",
        )


def _option_name(name: str) -> str:
    """Return an option as it is typed, or its keyword if it has no flag."""
    flags = OPTIONS[name].flags
    return flags[0] if flags else name


def _load_workload(workload: WorkloadInput, options: RunOptions) -> Workload:
    """Return the checked workload, changed by the options of the load such as `rate`.

    A Workload object is returned as it is, because `_check_workload` has refused options for it.
    Raises CombinedError with every error in the workload and the options.
    """
    from loadgen.core.workload import Workload, loading, read_flags

    if isinstance(workload, Workload):
        return workload

    overrides = read_flags(**options)
    if isinstance(workload, Mapping):
        return loading.workload_from_mapping(workload, overrides)

    workload_path = _to_text(workload)
    trace_path = _to_text(options.get("trace"))
    dataset = _to_text(options.get("dataset"))

    return loading.load_from_options(workload_path, trace_path, overrides, dataset)


def _to_text(path: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text, or None without one."""
    return None if path is None else os.fspath(path)
