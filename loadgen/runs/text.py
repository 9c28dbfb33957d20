"""The report of a run: its sections from top to bottom, for terminal, Markdown and page. Pure.

The other modules of this package make the sections. Charts and what else only a page has are made
in `page.py`, when a page is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.render import text as text_renderer
from loadgen.render.section import (
    Bullets,
    Notice,
    PageSectionFactory,
    Paragraph,
    Report,
    Section,
    Table,
    Tiles,
    section,
)
from loadgen.runs import latency_breakdown, page, speculation
from loadgen.runs.answers_text import build_answer_sections
from loadgen.runs.brief import brief_sections
from loadgen.runs.cells import quantile_ms
from loadgen.runs.client_text import describe_client_use, is_host_busy
from loadgen.runs.fluidity import build_fluidity_sections
from loadgen.runs.latency_section import distribution_table, latency_sections
from loadgen.runs.latency_text import client_rows
from loadgen.runs.notices import caveats, notices
from loadgen.runs.part_sections import part_sections
from loadgen.runs.run_facts import run_facts
from loadgen.runs.run_title import run_title, workload_name
from loadgen.runs.server_text import describe_energy, describe_server
from loadgen.runs.slo_section import slo_section
from loadgen.runs.slo_text import describe_result, is_slo_undecided
from loadgen.runs.tiles import headline_tiles

if TYPE_CHECKING:
    from loadgen.core.metrics.machines import MachineSummary
    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.render.additions import ExtraSections
    from loadgen.render.page import Tile
    from loadgen.render.section import Kind
    from loadgen.runs.page import ComputeChartData

DATE_AND_MINUTE_LENGTH = len("2026-11-29 22:08")
"""The title of a report ends with the date and the time of the run."""

MAX_WORD_LENGTH = 60
"""Longer words in the error text of a server are cut, so that they fit a column."""


def render(summary: Summary, *, color: bool = False, full: bool = True) -> str:
    """Return the report of a run as text: every section, or with `full=False` its short form."""
    return text_renderer.render(report(summary), color=color, full=full)


def report(
    summary: Summary,
    manifest: RunManifest | None = None,
    compute_chart_data: ComputeChartData | None = None,
    server_samples: Sequence[MetricSample] = (),
    additions: Sequence[ExtraSections] = (),
    run_dir: Path | None = None,
) -> Report:
    """Return the report of a run.

    Args:
        summary: The results of the run.
        manifest: The plan of the run, from `manifest.json`. A page shows parts of it, such as the
            workload file, so that the run can be reproduced.
        compute_chart_data: Computes the data of charts. Without it a page has no charts.
        server_samples: Samples of the servers' metrics pages.
        additions: What benchmarks that use the run add to its report. For example, MLPerf adds its
            verdict.
        run_dir: The directory of the run, which the short form names.
    """
    added_notices = [notice for addition in additions for notice in addition.notices]
    added_verdicts = [paragraph for addition in additions for paragraph in addition.headline()]
    sections = _sections(summary, manifest, compute_chart_data, server_samples, additions)

    return Report(
        title=f"{run_title(summary)}, {_start_time(summary)}",
        page_title=f"{workload_name(summary)}: {summary.run.id}",
        generated_by=f"loadgen {summary.run.version} report",
        notices=[*notices(summary), *added_notices],
        headline=[*_result_paragraphs(summary), *added_verdicts],
        verdict=_validity(summary),
        sections=list(sections),
        brief=[section("", *added_verdicts), *brief_sections(summary, run_dir)],
    )


def _start_time(summary: Summary) -> str:
    """Return the date and the time of a run: `2026-11-29 22:08`."""
    return summary.run.started[:DATE_AND_MINUTE_LENGTH].replace("T", " ")


def _sections(
    summary: Summary,
    manifest: RunManifest | None,
    compute_chart_data: ComputeChartData | None,
    server_samples: Sequence[MetricSample],
    additions: Sequence[ExtraSections],
) -> Iterator[Section | PageSectionFactory]:
    """Yield the sections of the full report: the result first, then details, then provenance.

    The parameters are those of `report`. A section that has charts is yielded as a factory, which
    is called when a page is written.
    """
    yield from _result_sections(summary, compute_chart_data, additions)
    yield section("", run_facts(summary), folded=True, fold_label="Configuration and load")
    yield from build_answer_sections(summary)
    yield from latency_sections(summary, compute_chart_data)
    yield from build_fluidity_sections(summary)
    yield from latency_breakdown.build_slow_request_sections(summary, compute_chart_data)
    yield from page.build_load_charts(summary, compute_chart_data)
    yield from speculation.build_speculation_sections(summary)
    yield from _server_sections(summary, compute_chart_data, server_samples)
    yield from page.build_load_check(summary, compute_chart_data)
    yield _errors_section(summary.requests)
    yield _finish_reasons_section(summary.requests)
    yield from page.build_error_section(summary, compute_chart_data)
    yield from part_sections(summary)
    yield from _client_sections(summary, compute_chart_data)

    for addition in additions:
        if addition.appendix is not None:
            yield addition.appendix

    yield from page.build_provenance(summary, manifest)


def _result_sections(
    summary: Summary,
    compute_chart_data: ComputeChartData | None,
    additions: Sequence[ExtraSections],
) -> Iterator[Section | PageSectionFactory]:
    """Yield the sections with the result of a run: headline, SLO, its charts, and warnings.

    On a terminal, the headline is the title of the run. On a page it is a row of tiles with the
    most important numbers. Last come the sections of other benchmarks that use the run.
    """
    yield section("", run_title(summary), text_only=True)
    yield section("", Tiles(_page_tiles(summary, additions)), page_only=True)
    yield slo_section(summary)
    yield from page.build_headline_charts(summary, compute_chart_data)
    yield section("Caveats and warnings", Bullets(_caveats_and_warnings(summary), "warn"))
    for addition in additions:
        yield from addition.sections


def _page_tiles(summary: Summary, additions: Sequence[ExtraSections]) -> Sequence[Tile]:
    """Return the tiles at the top of a page: those of the run, or what an addition replaces."""
    tiles: Sequence[Tile] = headline_tiles(summary)
    for addition in additions:
        if addition.replace_tiles is not None:
            tiles = addition.replace_tiles(tiles)
    return tiles


# -- the result ------------------------------------------------------------------------------------


def _result_paragraphs(summary: Summary) -> Iterator[Paragraph]:
    """Yield the result of a run in one sentence, and a second or third one if it needs them.

    If this host was too busy to measure, a sentence says that the counts and errors of the run are
    correct nevertheless. If the server could not sustain the load, another one says why.
    """
    yield Paragraph(describe_result(summary), _result_kind(summary), large=True)
    was_invalidated_by_host = not summary.verdict.valid and is_host_busy(summary.verdict)
    if was_invalidated_by_host:
        requests = format.counted(summary.requests.scheduled, "request")
        yield Paragraph(
            f"This host was too busy to measure latencies. {format.count(summary.requests.ok)} of "
            f"{requests} succeeded; counts and errors are correct, latencies are not."
        )

    # None means that it was not assessed.
    has_unsustained_load = summary.sustainable.sustained is False
    if has_unsustained_load:
        yield Paragraph(f"NOT SUSTAINED: {summary.sustainable.reason}", "warn")


def _result_kind(summary: Summary) -> Kind:
    """Return the kind of the sentence with the result of a run, which decides its color.

    - INVALID run: "bad", because its latencies may be wrong. It is only "warn" if other programs
      kept the host of the client busy, because then the server is not to blame.
    - Valid run: "bad" if the SLO was missed or too many requests failed, "warn" if the SLO is
      undecided, "good" if it was met, and "" without an SLO.
    """
    if not summary.verdict.valid:
        return "warn" if is_host_busy(summary.verdict) else "bad"

    goodput = summary.goodput
    is_slo_missed = goodput.met is False
    if is_slo_missed or fails_by_errors(summary):
        return "bad"
    if is_slo_undecided(summary):
        return "warn"

    return "good" if goodput.met else ""


def _validity(summary: Summary) -> Notice | None:
    """Return that a run is valid. The notices above the result say so of one that is not."""
    if not summary.verdict.valid:
        return None
    if summary.verdict.caveats:
        return Notice("VALID", "with a caveat, see below", "good")
    return Notice("VALID", "the client did not distort the measurement", "good")


def _caveats_and_warnings(summary: Summary) -> list[str]:
    """Return what limits the result, then what does not limit it but should be known."""
    return [*caveats(summary), *summary.verdict.warnings]


# -- servers ---------------------------------------------------------------------------------------


def _server_sections(
    summary: Summary,
    compute_chart_data: ComputeChartData | None,
    server_samples: Sequence[MetricSample],
) -> Iterator[Section | PageSectionFactory]:
    """Yield what the metrics pages of the servers and of the hardware reported."""
    if summary.server is not None:
        text = f"{', '.join(describe_server(summary.server))}."
        yield section("Server metrics", text, folded=True, id="server")
        yield from page.build_server_sections(summary.server, compute_chart_data, server_samples)
    if summary.energy is not None:
        text = f"{', '.join(describe_energy(summary.energy))}."
        yield section("Energy", text, id="energy")
        yield page.build_power_readings(summary.energy)


def _errors_section(requests: RequestCounts) -> Section:
    """Return the kinds of errors, with the text of the first error of each kind."""
    rows = [
        (kind, format.count(error.count), sanitize_server_text(error.first_text))
        for kind, error in requests.errors_of_unstopped_requests.items()
    ]
    return section("Errors", Table(("kind", "requests", "message"), rows, "remarks"), id="errors")


def _finish_reasons_section(requests: RequestCounts) -> Section:
    """Return why the servers ended the successful responses."""
    rows = [
        (reason, format.count(count), format.percent(count / requests.ok))
        for reason, count in requests.by_finish.items()
    ]
    legend = (
        "Why the server ended each response, as it reported. The reason length means that the "
        "requested length or a limit was reached."
    )
    return section(
        "Finish reasons",
        Table(("finish reason", "requests", "% of ok"), rows),
        Paragraph(legend if rows else "", "soft"),
    )


def sanitize_server_text(text: str) -> str:
    """Return a text of a server as one line of printable characters, with long words cut."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    shortened = []
    for word in printable.split():
        is_long = len(word) > MAX_WORD_LENGTH
        shortened.append(f"{word[: MAX_WORD_LENGTH - 3]}..." if is_long else word)
    return " ".join(shortened)


# -- the load generator ----------------------------------------------------------------------------


def _client_sections(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[Section | PageSectionFactory]:
    """Yield the section on the load generator itself, and for a page its charts over time.

    The section shows what the load generator used of its host, and how it may have distorted the
    measurement: how late it sent requests, and how uncertain its timestamps are.
    """
    yield section(
        "Client overhead",
        f"{', '.join(describe_client_use(summary))}.",
        distribution_table(client_rows(summary), summary),
        _machines_table(summary.machines),
        folded=True,
        id="client",
    )
    yield from page.build_client_section(summary, compute_chart_data)


def _machines_table(machines: Sequence[MachineSummary]) -> Table:
    """Return a table with a row for each machine that sent a part of the load.

    "late" counts the requests that were sent late, and "send delay" is how late requests were sent.
    "cores" is the mean CPU use, and "busiest" the CPU use of a worker in its busiest second.
    """
    head = (
        "machine",
        "workers",
        "requests",
        "lost",
        "late",
        "send delay p50, ms",
        "p99",
        "cores",
        "busiest",
    )
    return Table(head, [_machine_row(machine) for machine in machines])


def _machine_row(machine: MachineSummary) -> tuple[str, ...]:
    """Return the cells of a machine in the order of the head in `_machines_table`."""
    name = f"{machine.name}, {machine.state}" if machine.state else machine.name
    return (
        name,
        str(machine.workers),
        format.count(machine.requests),
        format.count(machine.lost),
        format.count(machine.late),
        quantile_ms(machine.send_lag_ms, "p50"),
        quantile_ms(machine.send_lag_ms, "p99"),
        format.quantity(machine.cores),
        format.percent(machine.cpu_share_max),
    )
