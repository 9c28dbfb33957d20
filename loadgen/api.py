"""The Python API: `loadgen.run("qa", url=...)` and `loadgen.load(folder)`, with the names of the command line.

Like `cli/`, a thin layer: it converts keyword arguments and calls `execution.run` or `results.store`. No arithmetic.
"""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import Fault, Faults, UserError

if TYPE_CHECKING:
    import pyarrow as pa

    from loadgen.execution.plan import Settings
    from loadgen.metrics.blocks import RequestCounts, Tokens
    from loadgen.metrics.goodput import Goodput
    from loadgen.metrics.load import Load
    from loadgen.metrics.summary import Summary
    from loadgen.metrics.validity import Verdict
    from loadgen.stats.quantiles import Distribution
    from loadgen.workload import Workload
    from loadgen.workload.flags import Overrides


@dataclass(frozen=True)
class Result:
    """The results of a run: `summary` (docs/summary.md lists its fields), and the records in `folder`.

    The properties give the figures that tests use most: `result.ttft_ms.p99`. A figure without samples is None.
    """

    summary: Summary
    folder: Path

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
        """Requests that met every SLO term, and whether the SLO was met (`goodput.met`; None: no SLO, or undecided)."""
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
        from loadgen.metrics.summary import exit_code

        return exit_code(self.summary)

    @cached_property
    def server(self) -> pa.Table:
        """The metrics of the servers: columns t_s, target, page, name, labels, value; one row for each changed value.

        Empty if no metrics page was read.
        """
        from loadgen.results import store

        return store.server_table(self.folder)

    @cached_property
    def rows(self) -> pa.Table:
        """One row per request of all stages; times in ns since the start. Columns: `loadgen.results.record.FIELDS`."""
        from loadgen.results import store
        from loadgen.results.parquet import to_table

        stored = store.read_run(self.folder)
        table: pa.Table = to_table(stored.rows, stored.texts)
        return table

    def __str__(self) -> str:
        from loadgen.report import text

        return text.render(self.summary, color=False)

    def __repr__(self) -> str:
        requests = self.summary.requests
        state = "valid" if self.valid else "NOT VALID"
        return f"<Result {self.summary.run.id}: {requests.ok} of {requests.scheduled} ok, {state}>"


def run(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Workload | None = None,
    *,
    url: str | Sequence[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    **flags: Any,
) -> Result:
    """Run a workload against an endpoint and return the results. Blocks until the end; sends real load.

    workload: a file, the name of a packaged workload, a mapping, or a checked Workload. url: one endpoint or several;
    None: the embedded simulation; "sim:PRESET": a simulated endpoint in virtual time. trace: a file whose arrivals and
    lengths replace those of the workload. flags: those of `loadgen run`, with underscores and the same values:
    request_rate, concurrency, duration, num_requests, warmup, slo, goodput, seed, input_tokens, … and model, server,
    api, api_key (else OPENAI_API_KEY), headers, extra_body, workers, keep, tokenizer, insecure, cacert, cert, key,
    stream, client, server_metrics, salt, metadata (a mapping), out (default: a new folder in results/).

    Raises loadgen.errors.Fault (UserError, TargetError) or Faults if the run cannot start or finish, and TypeError for
    an unknown flag. A missed SLO or an invalid measurement does not raise: see `Result`.
    """
    from loadgen.execution.run import execute

    if asyncio._get_running_loop() is not None:
        hint = "in async code and in notebooks: await loadgen.arun(...), with the same arguments"
        raise UserError("loadgen.run blocks, and an event loop is running here", "loadgen.run", hint)
    overrides, settings = _parse_flags(url, flags)
    checked = _checked_workload(workload, trace, overrides)
    summary, folder = execute(checked, settings)
    return Result(summary, folder)


async def arun(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Workload | None = None,
    *,
    url: str | Sequence[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    **flags: Any,
) -> Result:
    """`run` where an event loop is running, as in a notebook: `result = await loadgen.arun("qa", url=...)`.

    The run has a thread of its own. A cancelled `await` returns at once, but the run goes on in its thread to its
    end: bound it with `duration` or `num_requests`.
    """
    return await asyncio.to_thread(run, workload, url=url, trace=trace, **flags)


def load(folder: str | os.PathLike[str]) -> Result:
    """Return the results of a stored run, computed again from its records. Raises UserError for another folder."""
    from loadgen import run_folder

    path = Path(folder)
    return Result(run_folder.open_run(path).summary, path)


def _checked_workload(workload: Any, trace: Any, overrides: Overrides) -> Workload:
    from loadgen.workload import Workload
    from loadgen.workload.flags import given
    from loadgen.workload.loading import given as load_given
    from loadgen.workload.loading import of_mapping

    if isinstance(workload, Workload):
        if trace is not None or (changed := given(overrides)):
            change = "a trace" if trace is not None else ", ".join(changed)
            hint = "give the file or a mapping, or change the Workload with model_copy"
            raise UserError(f"a checked Workload is not changed by {change}", "loadgen.run", hint)
        return workload
    if isinstance(workload, Mapping):
        if trace is not None:
            raise UserError("a mapping and a trace", "loadgen.run", "give one of them, or a workload's file")
        return of_mapping(workload, overrides)
    if workload is not None and not isinstance(workload, str | os.PathLike):
        hint = "give a file, a packaged name, a mapping or a Workload"
        raise UserError(f"a {type(workload).__name__} is no workload", "loadgen.run", hint)
    return load_given(
        None if workload is None else os.fspath(workload), None if trace is None else os.fspath(trace), overrides
    )


_REPEATABLE = ("slo", "goodput", "limit")


def _parse_flags(url: Any, flags: dict[str, Any]) -> tuple[Overrides, Settings]:
    """Split the flags into those that change the workload and those of the run. Raises TypeError and Faults."""
    from loadgen_sdk.dialects.quirks import APIS, NAMES
    from loadgen_sdk.transport.wire import Tls

    from loadgen.execution import targets, user_metadata
    from loadgen.execution.plan import Settings
    from loadgen.results import object_store
    from loadgen.server_metrics import scraper
    from loadgen.workload.flags import Overrides

    workload_flags = {field.name for field in fields(Overrides)}
    settings_flags = {field.name for field in fields(Settings)} - {"url", "targets", "command", "tls"}
    tls_flags = {"insecure", "cacert", "cert", "key"}
    for name in flags:
        if name not in workload_flags | settings_flags | tls_flags:
            similar = difflib.get_close_matches(name, sorted(workload_flags | settings_flags | tls_flags), 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(f"loadgen.run has no flag {name!r}{hint}")
    overrides: dict[str, Any] = {name: value for name, value in flags.items() if name in workload_flags}
    for name in _REPEATABLE:
        if isinstance(overrides.get(name), str):
            overrides[name] = (overrides[name],)
        elif overrides.get(name) is not None:
            overrides[name] = tuple(overrides[name])
    values: dict[str, Any] = {name: value for name, value in flags.items() if name in settings_flags}
    faults: list[Fault] = []
    keep_modes = ("raw", "sample", "histogram")
    for name, known in (("server", NAMES), ("api", APIS), ("client", ("wire", "openai")), ("keep", keep_modes)):
        if name in values and values[name] not in known:
            faults.append(UserError(f"unknown value {values[name]!r}", name, f"known: {', '.join(known)}"))
    faults += (
        UserError("no such file", f"{name}={flags[name]}", "give a PEM file")
        for name in ("cacert", "cert", "key")
        if flags.get(name) is not None and not Path(flags[name]).is_file()
    )
    if "server_metrics" in values:
        pages = values["server_metrics"]
        values["server_metrics"] = (pages,) if isinstance(pages, str) else tuple(pages)
        faults += filter(None, [scraper.check(values["server_metrics"])])
    workers = values.get("workers", 1)
    if workers == "auto" or ("workers" not in values and values.get("ray") is not None):
        values["workers"] = 0
    elif not isinstance(workers, int) or workers < 1:
        faults.append(UserError(f"{workers!r} is no number of workers", "workers", "a number from 1, or auto"))
    if (given_metadata := values.get("metadata")) is not None:
        headers = values.get("headers") or {}
        header_pairs = headers.items() if isinstance(headers, Mapping) else headers
        keys = (values.get("api_key"), os.environ.get("OPENAI_API_KEY"), os.environ.get("AZURE_OPENAI_API_KEY"))
        secrets = user_metadata.secrets_of(keys, header_pairs)
        texts = (given_metadata,) if isinstance(given_metadata, str) else given_metadata
        values["metadata"], metadata_faults = user_metadata.parse(texts, secrets)
        faults += metadata_faults
    if faults:
        raise Faults(faults)
    if any(name in flags for name in tls_flags):
        paths = {name: None if flags.get(name) is None else os.fspath(flags[name]) for name in tls_flags - {"insecure"}}
        values["tls"] = Tls(
            verify=not flags.get("insecure"), ca=paths["cacert"], cert=paths["cert"], key=paths["key"]
        )  # fmt: skip
    if isinstance(headers := values.get("headers"), Mapping):
        values["headers"] = tuple(headers.items())
    if values.get("out") is not None:
        out = os.fspath(values.pop("out"))
        values |= {"store": out} if object_store.is_url(out) else {"out": Path(out)}
    urls = [] if url is None else [url] if isinstance(url, str) else list(url)
    if urls and values.get("api_key") is None:
        key_variables = ["OPENAI_API_KEY"]
        if values.get("server") == "azure" or "azure.com" in urls[0]:
            key_variables.insert(0, "AZURE_OPENAI_API_KEY")
        values["api_key"] = next((os.environ[name] for name in key_variables if os.environ.get(name)), None)
    if len(urls) > 1:
        values["targets"] = targets.from_urls(
            urls,
            values.get("api_key"),
            values.get("gpus"),
            values.get("shape", ""),
            values.get("region", ""),
        )
    settings = Settings(url=urls[0] if urls else None, command=("loadgen.run",), **values)
    return Overrides(**overrides), settings
