"""Open the folder of a run: its summary, from its records or as it was stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.metrics import energy_use
from loadgen.core.metrics.summary import FILE, Summary, load_summary
from loadgen.core.metrics.verdict import add_warning, remove_warning
from loadgen.core.results import store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.manifest import decode_manifest
from loadgen.core.run_summary import summarize
from loadgen.core.server_metrics import energy, series

SUMMARY = FILE
FAILED_READS = 0.1
"""The share of the reads of a metrics page that may fail without a warning."""


class OpenedRun(NamedTuple):
    """A run as far as it was recorded. `stored` is None if the folder has only a summary."""

    summary: Summary
    stored: store.Stored | None


def is_run(folder: Path) -> bool:
    """Return True if a folder holds a run, finished or not."""
    return (folder / "run.json").is_file() or (folder / SUMMARY).is_file()


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, ordered by number: c2 before c16."""
    runs = filter(is_run, folder.glob("*/"))
    return sorted(
        runs, key=lambda run: (int("".join(filter(str.isdigit, run.name)) or 0), run.name)
    )


def open_run(folder: Path) -> OpenedRun:
    """Open a run. Its summary is computed from its records, or read if it has no records.

    Raises UserError for a folder that holds no run and for damaged files.
    """
    if not store.has_rows(folder):
        has_summary = (folder / SUMMARY).is_file()
        return OpenedRun(kept_summary(folder) if has_summary else summary(folder), None)
    stored = store.read_run_lazily(folder)
    samples = store.read_server_samples(folder)
    return OpenedRun(with_server(samples, summarize(*stored, samples)), stored)


def refuse_shard(folder: Path) -> None:
    """Raise UserError if the folder holds one part of a run that was divided with `--shard`.

    A part alone shows the load that it sent, and not what the server did under the whole load.
    """
    path = folder / "run.json"
    if not path.is_file():
        return
    shard = decode_manifest(path.read_bytes(), str(path)).shard
    if shard is not None:
        raise UserError(
            "unsupported",
            f"part {shard.index} of {shard.count} of a run, not a whole run",
            str(folder),
            "merge the parts first: loadgen merge PART... -o RUN",
        )


def kept_summary(folder: Path) -> Summary:
    """Return the summary that the run has stored.

    Raises UserError if there is none, or if it is damaged or of a newer version.
    """
    refuse_links(folder)
    path = folder / SUMMARY
    if not path.is_file():
        raise UserError(
            "no_result",
            f"no {SUMMARY} here",
            str(folder),
            "use the folder of the run itself",
        )
    return load_summary(path.read_bytes(), str(path))


def summary(folder: Path) -> Summary:
    """Compute the summary of a run from its records. Raises UserError as `store.read_run` does."""
    stored = store.read_run_lazily(folder)
    samples = store.read_server_samples(folder)
    return with_server(samples, summarize(*stored, samples))


def with_server(samples: Sequence[series.MetricSample], summary: Summary) -> Summary:
    """Return the summary with the servers' own metrics, the energy, and warnings about both."""
    of_servers = energy.without_hardware_pages(samples)
    used = energy_use.summarize_energy(samples, summary)
    duration_s = summary.window.whole.duration_s
    output_per_s = summary.tokens.whole_output_per_s
    server_summary = series.summarize(
        of_servers,
        None if duration_s is None or output_per_s is None else round(duration_s * output_per_s),
    )
    verdict = summary.verdict
    if server_summary is not None and (disputed := series.disputed(server_summary)):
        verdict = add_warning(verdict, "server_counts", disputed)
    if server_summary is not None and server_summary.cached_share is not None:
        verdict = remove_warning(verdict, "cache_unsaid")
        if disputed := series.cache_disputed(
            server_summary, summary.requested_cache_share, summary.tokens.cached_share
        ):
            verdict = add_warning(verdict, "cache_disputed", disputed)
    pages = [page for block in (server_summary, used) if block is not None for page in block.pages]
    for page in pages:
        if page.failed > max(FAILED_READS * page.reads, 1):
            values = {"page": page.url, "failed": page.failed, "reads": page.reads}
            verdict = add_warning(verdict, "page_failed", values)
    return msgspec.structs.replace(summary, server=server_summary, energy=used, verdict=verdict)
