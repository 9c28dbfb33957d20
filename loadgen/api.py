"""The Python API: `loadgen.run("qa", url=...)` and `loadgen.load(folder)`, with the names of the command line.

Like `cli/`, a thin layer: it converts keyword arguments and calls `execution.run` or `results.store`. No arithmetic.
"""

from __future__ import annotations

import asyncio
import html
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_type_hints

from msgspec.structs import replace

from loadgen import result_kinds
from loadgen.core.errors import Fault, Faults, UserError, closest, collecting
from loadgen.result_kinds import OpenedResult
from loadgen.shell.run_options import OPTIONS, RunOptions
from loadgen.shell.settings import build_settings

if TYPE_CHECKING:
    import pyarrow as pa

    from loadgen.core.metrics.blocks import RequestCounts, Tokens
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.load import Load
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.validity import Verdict
    from loadgen.core.stats.quantiles import Distribution
    from loadgen.core.workload import Workload
    from loadgen.runs.request_table import Unit


@dataclass(frozen=True)
class Result:
    """The results of a run: `summary` (docs/summary.md lists its fields), and the records in `folder`.

    The properties give the figures that tests use most: `result.ttft_ms.p99`. A figure without samples is None.
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
        """Time to first token, from the due time; ok requests."""
        return self.summary.ttft_ms

    @property
    def tpot_ms(self) -> Distribution:
        """Time per output token after the first; ok requests with more than one token."""
        return self.summary.tpot_ms

    @property
    def inter_chunk_ms(self) -> Distribution:
        """Gaps between successive output events, pooled over requests."""
        return self.summary.inter_chunk_ms

    @property
    def itl_ms(self) -> Distribution | None:
        """The gaps as inter-token latency if every event carried one token; else None (why: `summary.itl_absent`)."""
        return self.summary.itl_ms

    @property
    def e2e_ms(self) -> Distribution:
        """From the due time to the last output or finish event; ok requests."""
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
        """Offered, achieved (sent) and completed load; requests in flight."""
        return self.summary.load

    @property
    def goodput(self) -> Goodput:
        """Requests that met every SLO term, and whether the SLO was met (`met`; None: no SLO, undecided, not valid)."""
        return self.summary.goodput

    @property
    def verdict(self) -> Verdict:
        """Whether the measurement is valid, and the reasons if not (`verdict.reasons`)."""
        return self.summary.verdict

    @property
    def valid(self) -> bool:
        """`verdict.valid`."""
        return self.summary.verdict.valid

    @property
    def exit_code(self) -> int:
        """The exit code of `loadgen run`: 0, 1 SLO missed, 3 not valid, 130 interrupted."""
        from loadgen.core.metrics.summary import exit_code

        return exit_code(self.summary)

    @cached_property
    def server(self) -> pa.Table:
        """The metrics of the servers: columns t_s, target, page, name, labels, value; one row for each changed value.

        Empty if no metrics page was read.
        """
        import pyarrow as pa

        from loadgen.core.results import store

        samples = store.server(self.folder)
        types = {
            "t_s": pa.float64(),
            "target": pa.int32(),
            "page": pa.string(),
            "name": pa.string(),
        }
        types |= {"labels": pa.string(), "value": pa.float64()}
        return pa.table(
            {
                name: pa.array([getattr(one, name) for one in samples], of)
                for name, of in types.items()
            }
        )

    @cached_property
    def rows(self) -> pa.Table:
        """One row per request of all stages; times in ns since the start. Columns: `core.results.record.FIELDS`."""
        from loadgen.core.results import store
        from loadgen.core.results.parquet import to_table

        stored = store.read_run(self.folder)
        table: pa.Table = to_table(stored.rows, stored.texts)
        return table

    def frame(
        self, library: Literal["pandas", "polars", "pyarrow"] = "pandas", *, unit: Unit = "ms"
    ) -> Any:
        """One row per request: `ttft_ms`, `tpot_ms`, `e2e_ms`, instants from the start of the run, stages and statuses.

        Null where a request has no such value; with `--keep gaps` a list of its gaps too. unit: "ns", "us", "ms", "s".
        """
        from loadgen.runs import request_gaps
        from loadgen.runs.request_table import NS, request_table

        if unit not in NS:
            raise UserError(
                "unknown_name", f"unit={unit!r}", "Result.frame", f"give one of {', '.join(NS)}"
            )
        stored = request_gaps.read(self.folder)
        table = request_table(stored.header, stored.rows, stored.texts, unit, stored.each_gap)
        if library in ("pandas", "polars") and find_spec(library) is None:
            hint = f'pip install {library}, or frame("pyarrow"), which is here'
            raise UserError(
                "not_installed", f"{library} is not installed", "Result.frame", hint, key=library
            )
        if library == "pandas":
            import pandas as pd  # type: ignore[import-untyped]

            # Numbers of tokens stay whole numbers where some are missing.
            return table.to_pandas(
                types_mapper=lambda kind: pd.ArrowDtype(kind) if "int" in str(kind) else None
            )
        if library == "polars":
            import polars

            return polars.from_arrow(table)
        if library != "pyarrow":
            raise UserError(
                "unknown_name",
                f"library={library!r}",
                "Result.frame",
                'give "pandas", "polars" or "pyarrow"',
            )
        return table

    def _repr_html_(self) -> str:
        """What a notebook shows: the report."""
        return f'<pre style="line-height:1.2">{html.escape(str(self))}</pre>'

    def __str__(self) -> str:
        from loadgen.runs import text

        return text.render(self.summary, color=False)

    def __repr__(self) -> str:
        requests = self.summary.requests
        state = "valid" if self.valid else "NOT VALID"
        return f"<Result {self.summary.run.id}: {requests.ok} of {requests.scheduled} ok, {state}>"


def run(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Workload | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Run a workload against an endpoint and return the results. Blocks until the end; sends real load.

    workload: a file, the name of a packaged workload, a mapping, or a checked Workload. options: those of
    `loadgen run`, with underscores and the same values: url (one or several; None: the embedded simulation;
    "sim:PRESET": a simulated endpoint in virtual time), trace, request_rate, concurrency, duration, num_requests,
    warmup, slo, seed, input_tokens, model, out (default: a new folder in results/), ... Python's own are api_key
    (else OPENAI_API_KEY), headers, metadata and extra_body as mappings, sources, stream, embedded.

    Raises loadgen.Fault (UserError, TargetError) or loadgen.Faults if the run cannot start or finish, and TypeError for
    an unknown option. A missed SLO or an invalid measurement does not raise: see `Result`.
    """
    from loadgen.core.execution.run import execute

    if asyncio._get_running_loop() is not None:
        hint = "in async code and in notebooks: await loadgen.arun(...), with the same arguments"
        raise UserError(
            "event_loop",
            "loadgen.run blocks, and an event loop is running here",
            "loadgen.run",
            hint,
        )
    for name in options.keys() - OPTIONS:
        similar = closest(name, sorted(OPTIONS))
        hint = f"; did you mean {similar!r}?" if similar else ""
        raise TypeError(f"loadgen.run has no flag {name!r}{hint}")
    _refuse_misuse(workload, options)
    faults: list[Fault] = []
    with collecting(faults):
        settings = replace(build_settings(options), command=("loadgen.run",))
    with collecting(faults):
        checked = _checked(workload, options)
    if faults:
        raise Faults(faults)
    summary, folder = execute(checked, settings)
    return Result(summary, folder)


async def arun(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Workload | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """`run` where an event loop is running, as in a notebook: `result = await loadgen.arun("qa", url=...)`.

    The run has a thread of its own. A cancelled `await` returns at once, but the run goes on in its thread to its
    end: bound it with `duration` or `num_requests`.
    """
    return await asyncio.to_thread(partial(run, workload, **options))


_KEYWORDS = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default={"insecure": False, "stream": True}.get(name, OPTIONS[name].default),
        annotation=hint,
    )
    for name, hint in get_type_hints(RunOptions).items()
]
for _function in (
    run,
    arun,
):  # what `help` and notebooks show and complete; type checkers read RunOptions
    _own = inspect.signature(_function)
    vars(_function)["__signature__"] = _own.replace(
        parameters=[_own.parameters["workload"], *_KEYWORDS]
    )


def load(folder: str | os.PathLike[str]) -> Result | Any:
    """A stored result, computed again from its records: of a run its `Result`, of any other kind an `OpenedResult`.

    Both have `kind`, `headline`, `text` (also `str()`) and `page`; `OpenedResult.value` is what was read: the answer of
    a search, a verdict, scores. folder: of any command of loadgen, or the result file of another tool. Raises
    UserError where there is no result.
    """
    path = Path(folder)
    kind = result_kinds.kind_of(path) or result_kinds.RUN
    if result_kinds.runs_of(kind, path) == (path,):
        return _run(path)
    return result_kinds.OpenedResult(path, kind)


def _run(folder: Path) -> Result:
    from loadgen.core import run_folder

    return Result(run_folder.open_run(folder).summary, folder)


def load_runs(folder: str | os.PathLike[str]) -> dict[str, Result]:
    """The runs of a sweep, a search, a validation or repeats, by name (`c16`, `sustained/r0`), as `load` opens each.

    Raises UserError for a folder without runs.
    """
    path = Path(folder)
    runs = result_kinds.runs_in(path)
    if not runs:
        directories = sorted(path.glob("*/"))
        runs = tuple(run for below in directories for run in result_kinds.runs_in(below))
    if not runs or runs == (path,):
        raise UserError(
            "no_result",
            "no run in this folder",
            str(path),
            "give the folder of a sweep, a search or a validation",
        )
    return {run.relative_to(path).as_posix(): _run(run) for run in runs}


def _refuse_misuse(workload: Any, options: RunOptions) -> None:
    """Raises UserError for what is no workload, or cannot be changed."""
    from loadgen.core.workload import Workload
    from loadgen.core.workload.flags import of_the_load

    source = next(
        (f"a {name}" for name in ("trace", "dataset") if options.get(name) is not None), ""
    )
    changes = of_the_load(options)
    if isinstance(workload, Workload) and (source or changes):
        change = source or ", ".join(OPTIONS[name].flags[0] for name in changes)
        hint = "give the file or a mapping, or change the Workload with model_copy"
        raise UserError(
            "conflict", f"a checked Workload is not changed by {change}", "loadgen.run", hint
        )
    if isinstance(workload, Mapping) and source:
        raise UserError(
            "conflict",
            f"a mapping and {source}",
            "loadgen.run",
            "give one of them, or a workload's file",
        )
    if workload is not None and not isinstance(workload, str | os.PathLike | Mapping | Workload):
        hint = "give a file, a packaged name, a mapping or a Workload"
        raise UserError(
            "wrong_type", f"a {type(workload).__name__} is no workload", "loadgen.run", hint
        )


def _checked(workload: Any, options: RunOptions) -> Workload:
    from loadgen.core.workload import Workload, loading, read_flags

    if isinstance(workload, Workload):
        return workload
    overrides = read_flags(**options)
    if isinstance(workload, Mapping):
        return loading.of_mapping(workload, overrides)
    name, trace, dataset = (
        None if value is None else os.fspath(value)
        for value in (workload, options.get("trace"), options.get("dataset"))
    )
    return loading.given(name, trace, overrides, dataset)
