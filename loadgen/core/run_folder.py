"""Open the folder of a run: its summary, from its records or as it was stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.metrics import energy_use
from loadgen.core.metrics.answer_warnings import add_answer_scores
from loadgen.core.metrics.summary import FILE, Summary, load_summary
from loadgen.core.metrics.verdict import Verdict, add_warning, remove_warning
from loadgen.core.results import answer_files, store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.manifest import decode_manifest
from loadgen.core.results.stored_gaps import iterate_stored_gaps
from loadgen.core.run_summary import summarize
from loadgen.core.server_metrics import energy, series
from loadgen.core.server_metrics.series import PageReading

SUMMARY = FILE
MAX_FAILED_READS = 0.1
"""The fraction of the reads of a metrics page that may fail without a warning."""


class OpenedRun(NamedTuple):
    """A run as far as it was recorded. `stored` is None if the folder has only a summary."""

    summary: Summary
    stored: store.Stored | None


def is_run(folder: Path) -> bool:
    """Return True if a folder holds a run, finished or not."""
    return (folder / "run.json").is_file() or (folder / SUMMARY).is_file()


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, ordered by the number in their names: c2 before c16."""
    return sorted(filter(is_run, folder.glob("*/")), key=_number_and_name)


def _number_and_name(run: Path) -> tuple[int, str]:
    """Return the digits in the name of a run as a number (0 without any), and the name."""
    digits = "".join(character for character in run.name if character.isdigit())
    return (int(digits) if digits else 0, run.name)


def open_run(folder: Path) -> OpenedRun:
    """Open a run, from its records if it has them.

    The summary is computed from the records, by the rules of this version. A folder without records
    has only the summary that was stored at the end of the run.

    Raises:
        UserError: The folder holds no run, or a file is damaged.
    """
    if store.has_rows(folder):
        stored = store.read_run_lazily(folder)
        return OpenedRun(_summarize_stored_run(folder, stored), stored)

    if (folder / SUMMARY).is_file():
        return OpenedRun(read_summary(folder), stored=None)

    # `summary` raises UserError if the folder has no manifest, so no run. Otherwise the run has not
    # sent anything yet, and the result is a summary without requests.
    return OpenedRun(summary(folder), stored=None)


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
            f"this is part {shard.index} of {shard.count} of a run, not a complete run",
            str(folder),
            "merge the parts first: loadgen merge PART... -o RUN",
        )


def read_summary(folder: Path) -> Summary:
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
    return _summarize_stored_run(folder, store.read_run_lazily(folder))


def _summarize_stored_run(folder: Path, stored: store.Stored) -> Summary:
    """Return the summary of what was recorded of the run in a folder."""
    samples = store.read_server_samples(folder)
    request_gaps = iterate_stored_gaps(folder)
    measured_summary = add_server_metrics(
        samples, summarize(*stored, samples, request_gaps=request_gaps)
    )
    slo = stored.manifest.slo
    has_objective = slo is not None and slo.answers_share is not None
    if not has_objective and not answer_files.has_checked_answers(folder):
        return measured_summary
    scored_answers = answer_files.read_scored_answers(folder)
    return add_answer_scores(measured_summary, stored.manifest, stored.rows, scored_answers)


def add_server_metrics(samples: Sequence[series.MetricSample], summary: Summary) -> Summary:
    """Return the summary with the servers' own metrics, the energy, and warnings about both.

    Args:
        samples: The samples of all metrics pages of the run. May be empty.
        summary: The summary of the records.
    """
    totals = series.summarize(energy.without_hardware_pages(samples), _count_output_tokens(summary))
    energy_summary = energy_use.summarize_energy(samples, summary)

    verdict = summary.verdict
    pages: tuple[PageReading, ...] = ()
    if totals is not None:
        verdict = _add_totals_warnings(verdict, totals, summary)
        pages += totals.pages

    if energy_summary is not None:
        pages += energy_summary.pages

    verdict = _add_page_warnings(verdict, pages)
    return msgspec.structs.replace(summary, server=totals, energy=energy_summary, verdict=verdict)


def _count_output_tokens(summary: Summary) -> int | None:
    """Return the output tokens that the client counted in the full run, or None if it did not."""
    duration_s = summary.window.full_run.duration_s
    output_per_s = summary.tokens.whole_output_per_s
    if duration_s is None or output_per_s is None:
        return None
    return round(duration_s * output_per_s)


def _add_totals_warnings(
    verdict: Verdict, totals: series.ServerTotals, summary: Summary
) -> Verdict:
    """Return the verdict with warnings about counts of the servers that contradict the client's.

    The counts are those of output tokens, and the fraction of prompt tokens from the prefix cache.
    The verdict was made without the servers' metrics pages, so it may have the warning
    "cache_unsaid", which says that no server has reported this fraction. That warning is removed if
    a metrics page reports it.

    Args:
        verdict: The verdict on the run, with its warnings.
        totals: The counts of the servers' metrics pages.
        summary: The summary, with the counts of the client.
    """
    warned_verdict = verdict
    token_difference = series.find_token_difference(totals)
    if token_difference is not None:
        warned_verdict = add_warning(warned_verdict, "server_counts", token_difference)

    reports_cached_share = totals.cached_share is not None
    if not reports_cached_share:
        return warned_verdict

    warned_verdict = remove_warning(warned_verdict, "cache_unsaid")
    cache_difference = series.find_cache_difference(
        totals, summary.requested_cache_share, summary.tokens.cached_share
    )
    if cache_difference is not None:
        warned_verdict = add_warning(warned_verdict, "cache_disputed", cache_difference)

    return warned_verdict


def _add_page_warnings(verdict: Verdict, pages: Iterable[PageReading]) -> Verdict:
    """Return the verdict with a warning for each page of which too many reads failed.

    A single failed read is never too many.
    """
    for page in pages:
        if page.failed > max(MAX_FAILED_READS * page.reads, 1):
            values = {"page": page.url, "failed": page.failed, "reads": page.reads}
            verdict = add_warning(verdict, "page_failed", values)
    return verdict
