"""Opens the folder of a run: its summary, from its records or as it was stored. Does IO; `metrics/` computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.metrics import energy_use, validity
from loadgen.core.metrics.accumulator import Accumulator
from loadgen.core.metrics.summary import FILE, Summary, load_summary
from loadgen.core.results import manifest, store
from loadgen.core.results.files import refuse_links
from loadgen.core.run_summary import build, summarize
from loadgen.core.server_metrics import energy, series

SUMMARY = FILE
FAILED_READS = 0.1  # share of the reads of a page; more of them are said


class OpenedRun(NamedTuple):
    """A run as far as it was recorded. `stored`: None where its rows were not kept."""

    summary: Summary
    stored: store.Stored | None


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (folder / "run.json").is_file() or (folder / SUMMARY).is_file()


def runs_in(folder: Path) -> list[Path]:
    """The runs directly in a folder, ordered by number: c2 before c16."""
    runs = filter(is_run, folder.glob("*/"))
    return sorted(
        runs, key=lambda run: (int("".join(filter(str.isdigit, run.name)) or 0), run.name)
    )


def open_run(folder: Path) -> OpenedRun:
    """A run with its summary: from its rows, else from `summary.json`, else from sums of its rows. Raises UserError."""
    if store.has_rows(folder):
        stored = store.read_lightly(folder)
        samples = store.server(folder)
        return OpenedRun(with_server(samples, summarize(*stored, samples)), stored)
    return OpenedRun(
        kept_summary(folder) if (folder / SUMMARY).is_file() else summary(folder), None
    )


def refuse_shard(folder: Path) -> None:
    """Raise UserError if the folder holds one part of a run that was divided with `--shard`.

    A part alone shows the load that it sent, and not what the server did under the whole load.
    """
    path = folder / "run.json"
    if not path.is_file():
        return
    shard = manifest.decode(path.read_bytes(), str(path)).shard
    if shard is not None:
        raise UserError(
            "unsupported",
            f"part {shard.index} of {shard.count} of a run, not a whole run",
            str(folder),
            "merge the parts first: loadgen merge PART... -o RUN",
        )


def kept_summary(folder: Path) -> Summary:
    """The summary as the run has stored it. Raises UserError where there is none, or a damaged or newer one."""
    refuse_links(folder)
    path = folder / SUMMARY
    if not path.is_file():
        raise UserError(
            "no_result",
            f"no {SUMMARY} here",
            str(folder),
            "give the folder of the run itself, as loadgen has named it",
        )
    return load_summary(path.read_bytes(), str(path))


def summary(folder: Path) -> Summary:
    """The summary, from the rows of a run, or from its accumulator file and the rows that are not in it.

    Raises UserError as `store.read_run` does.
    """
    stored, samples = store.read_lightly(folder), store.server(folder)
    path = folder / "flows" / store.LEDGER
    if stored.header.keep == "raw" or not path.exists():
        return with_server(samples, summarize(*stored, samples))
    with store.undamaged(folder):
        accumulator = Accumulator.from_bytes(path.read_bytes(), stored.header)
        if accumulator.taken:
            for rows, texts in store.rows_after(
                folder, accumulator.taken
            ):  # after a kill, or the compactor died
                accumulator.add(rows, texts)
    header, _, gaps, timeline, seconds, _, event_errors = stored
    return with_server(samples, build(header, accumulator, gaps, timeline, seconds, event_errors))


def with_server(samples: Sequence[series.MetricSample], summary: Summary) -> Summary:
    """The summary with the servers' own metrics, the energy, and warnings about both; unchanged without any page."""
    of_servers = energy.not_of_hardware(samples)
    used = energy_use.of_run(samples, summary)
    duration_s = summary.window.whole.duration_s
    output_per_s = summary.tokens.whole_output_per_s
    server_summary = series.summarize(
        of_servers,
        None if duration_s is None or output_per_s is None else round(duration_s * output_per_s),
    )
    verdict = summary.verdict
    if server_summary is not None and (disputed := series.disputed(server_summary)):
        verdict = validity.warned(verdict, "server_counts", disputed)
    if server_summary is not None and server_summary.cached_share is not None:
        verdict = validity.without(verdict, "cache_unsaid")
        if disputed := series.cache_disputed(
            server_summary, summary.cache_asked, summary.tokens.cached_share
        ):
            verdict = validity.warned(verdict, "cache_disputed", disputed)
    pages = [page for block in (server_summary, used) if block is not None for page in block.pages]
    for page in pages:
        if page.failed > max(FAILED_READS * page.reads, 1):
            values = {"page": page.url, "failed": page.failed, "reads": page.reads}
            verdict = validity.warned(verdict, "page_failed", values)
    return msgspec.structs.replace(summary, server=server_summary, energy=used, verdict=verdict)
