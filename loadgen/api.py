"""The generator as Python calls: `loadgen.run("qa", url=...)` and `loadgen.load(folder)`, named as on the command line.

A shell around `run.execute` and `store`, as `cli/` is one: keyword arguments to one call. No arithmetic here.
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
    from loadgen.metrics.columns import Goodput, Load
    from loadgen.metrics.summary import Summary, Verdict
    from loadgen.stats.quantiles import Distribution
    from loadgen.workload import Workload
    from loadgen.workload.flags import Overrides


@dataclass(frozen=True)
class Result:
    """What is true of a run: `summary` (docs/summary.md has every field), and the records under it.

    The figures that tests ask for are here by themselves: `result.ttft_ms.p99`. A figure without any sample is None.
    """

    summary: Summary
    folder: Path

    @property
    def ttft_ms(self) -> Distribution:
        """Time to first token from the due instant, ok requests."""
        return self.summary.ttft_ms

    @property
    def tpot_ms(self) -> Distribution:
        """Time per output token after the first, ok requests with more than one."""
        return self.summary.tpot_ms

    @property
    def inter_chunk_ms(self) -> Distribution:
        """Gaps between successive output events, pooled."""
        return self.summary.inter_chunk_ms

    @property
    def itl_ms(self) -> Distribution | None:
        """The same where every event carried one token, else None; `summary.itl_absent` says why."""
        return self.summary.itl_ms

    @property
    def e2e_ms(self) -> Distribution:
        """Due instant to last output or finish event, ok requests."""
        return self.summary.e2e_ms

    @property
    def requests(self) -> RequestCounts:
        """How many were scheduled, ok, failed, dropped, cancelled, lost."""
        return self.summary.requests

    @property
    def tokens(self) -> Tokens:
        """Token counts and rates."""
        return self.summary.tokens

    @property
    def load(self) -> Load:
        """Offered, sent and completed load; requests in flight."""
        return self.summary.load

    @property
    def goodput(self) -> Goodput:
        """Requests that met every SLO term, and whether the SLO was met (`goodput.met`; None without one)."""
        return self.summary.goodput

    @property
    def verdict(self) -> Verdict:
        """Whether the measurement can be trusted, and if not why (`verdict.reasons`)."""
        return self.summary.verdict

    @property
    def valid(self) -> bool:
        """`verdict.valid`."""
        return self.summary.verdict.valid

    @property
    def exit_code(self) -> int:
        """What `loadgen run` would have ended with: 0, 1 SLO missed, 3 not valid, 130 interrupted."""
        from loadgen.metrics.summary import exit_code

        return exit_code(self.summary)

    @cached_property
    def server(self) -> pa.Table:
        """What the servers' own metrics pages said: t_s, target, page, name, labels, value, a row whenever a value
        changed. Empty where no page was read."""
        from loadgen.results import store

        return store.server_table(self.folder)

    @cached_property
    def rows(self) -> pa.Table:
        """One row per request, all stages; times in ns from the start of the run. Columns: `loadgen.record.FIELDS`."""
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
    """Drive a workload at an endpoint and return what came of it. Blocks; sends real load.

    workload: a file, the name of a packaged one, the same as a mapping, or a checked Workload. url: the endpoint, or
    several; None: the embedded simulation; "sim:PRESET": a simulated one in virtual time. trace: replayed in the place
    of the workload's arrivals and lengths. flags: those of `loadgen run`, with underscores, in the same spellings:
    request_rate, concurrency, duration, num_requests, warmup, slo, goodput, seed, input_tokens, … and model, server,
    api, api_key (else OPENAI_API_KEY), headers, extra_body, workers, keep, tokenizer, insecure, cacert, cert, key,
    stream, client, server_metrics, out (default: a new folder in results/).

    Raises loadgen.errors.Fault or Faults (UserError, TargetError) for whatever stands in the way, TypeError for a flag
    that there is none of. A missed SLO or an invalid measurement is no exception: see `Result`.
    """
    from loadgen.execution.run import execute

    if asyncio._get_running_loop() is not None:
        hint = "in async code: await asyncio.to_thread(loadgen.run, ...)"
        raise UserError("loadgen.run blocks, and an event loop is running here", "loadgen.execution.run", hint)
    overrides, settings = _read(url, flags)
    checked = _workload(workload, trace, overrides)
    summary, folder = execute(checked, settings)
    return Result(summary, folder)


def load(folder: str | os.PathLike[str]) -> Result:
    """A stored run, judged again from its records. Raises UserError for a folder that holds none."""
    from loadgen import run_folder
    from loadgen.metrics import summary_json
    from loadgen.results import store

    path = Path(folder)
    kept = path / "summary.json"
    if kept.is_file() and not store.has_rows(path):
        return Result(summary_json.load_summary(kept.read_bytes(), str(kept)), path)
    return Result(run_folder.summary(path), path)


def _workload(workload: Any, trace: Any, overrides: Overrides) -> Workload:
    from loadgen.workload import Workload
    from loadgen.workload.flags import given
    from loadgen.workload.loading import given as read
    from loadgen.workload.loading import of_mapping

    if isinstance(workload, Workload):
        if trace is not None or (changed := given(overrides)):
            what = "a trace" if trace is not None else ", ".join(changed)
            hint = "give the file or a mapping, or change the Workload with model_copy"
            raise UserError(f"a checked Workload is not changed by {what}", "loadgen.execution.run", hint)
        return workload
    if isinstance(workload, Mapping):
        if trace is not None:
            raise UserError("a mapping and a trace", "loadgen.execution.run", "give one of them, or a workload's file")
        return of_mapping(workload, overrides)
    if workload is not None and not isinstance(workload, str | os.PathLike):
        hint = "give a file, a packaged name, a mapping or a Workload"
        raise UserError(f"a {type(workload).__name__} is no workload", "loadgen.execution.run", hint)
    return read(
        None if workload is None else os.fspath(workload), None if trace is None else os.fspath(trace), overrides
    )


_MANY = ("slo", "goodput", "limit")


def _read(url: Any, flags: dict[str, Any]) -> tuple[Overrides, Settings]:
    """The flags as the two things they are about. Raises TypeError and Faults."""
    from loadgen_sdk.dialects.quirks import APIS, NAMES
    from loadgen_sdk.transport.wire import Tls

    from loadgen.execution import targets
    from loadgen.execution.plan import Settings
    from loadgen.results import object_store
    from loadgen.server_metrics import scraper
    from loadgen.workload.flags import Overrides

    changes = {field.name for field in fields(Overrides)}
    about = {field.name for field in fields(Settings)} - {"url", "targets", "command", "tls"}
    tls = {"insecure", "cacert", "cert", "key"}
    for name in flags:
        if name not in changes | about | tls:
            near = difflib.get_close_matches(name, sorted(changes | about | tls), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"loadgen.run has no flag {name!r}{hint}")
    overrides: dict[str, Any] = {name: value for name, value in flags.items() if name in changes}
    for name in _MANY:
        if isinstance(overrides.get(name), str):
            overrides[name] = (overrides[name],)
        elif overrides.get(name) is not None:
            overrides[name] = tuple(overrides[name])
    rest: dict[str, Any] = {name: value for name, value in flags.items() if name in about}
    faults: list[Fault] = []
    keeps = ("raw", "sample", "histogram")
    for name, known in (("server", NAMES), ("api", APIS), ("client", ("wire", "openai")), ("keep", keeps)):
        if name in rest and rest[name] not in known:
            faults.append(UserError(f"unknown value {rest[name]!r}", name, f"known: {', '.join(known)}"))
    faults += (
        UserError("no such file", f"{name}={flags[name]}", "give a PEM file")
        for name in ("cacert", "cert", "key")
        if flags.get(name) is not None and not Path(flags[name]).is_file()
    )
    if "server_metrics" in rest:
        asked = rest["server_metrics"]
        rest["server_metrics"] = (asked,) if isinstance(asked, str) else tuple(asked)
        faults += filter(None, [scraper.check(rest["server_metrics"])])
    workers = rest.get("workers", 1)
    if workers == "auto" or ("workers" not in rest and rest.get("ray") is not None):
        rest["workers"] = 0
    elif not isinstance(workers, int) or workers < 1:
        faults.append(UserError(f"{workers!r} is no number of workers", "workers", "a number from 1, or auto"))
    if faults:
        raise Faults(faults)
    if any(name in flags for name in tls):
        paths = {name: None if flags.get(name) is None else os.fspath(flags[name]) for name in tls - {"insecure"}}
        rest["tls"] = Tls(
            verify=not flags.get("insecure"), ca=paths["cacert"], cert=paths["cert"], key=paths["key"]
        )  # fmt: skip
    if isinstance(headers := rest.get("headers"), Mapping):
        rest["headers"] = tuple(headers.items())
    if rest.get("out") is not None:
        out = os.fspath(rest.pop("out"))
        rest |= {"store": out} if object_store.is_url(out) else {"out": Path(out)}
    urls = [] if url is None else [url] if isinstance(url, str) else list(url)
    if urls and rest.get("api_key") is None:
        names = ["OPENAI_API_KEY"]
        if rest.get("server") == "azure" or "azure.com" in urls[0]:
            names.insert(0, "AZURE_OPENAI_API_KEY")
        rest["api_key"] = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if len(urls) > 1:
        rest["targets"] = targets.from_urls(
            urls, rest.get("api_key"), rest.get("gpus"), rest.get("shape", ""), rest.get("region", "")
        )
    settings = Settings(url=urls[0] if urls else None, command=("loadgen.execution.run",), **rest)
    return Overrides(**overrides), settings
