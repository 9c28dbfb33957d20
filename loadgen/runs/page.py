"""What only the page of a run has: charts, complete tables, definitions, how to reproduce it.

Pure. Each function yields sections, or functions that make sections when a page is written, since
charts take time to compute. `page_data.py` computes their data and `charts.py` describes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.server_metrics import series
from loadgen.render.page import Chart
from loadgen.render.section import (
    Charts,
    Facts,
    PageSectionFactory,
    Paragraph,
    Quoted,
    Section,
    Table,
    section,
)
from loadgen.runs import charts, load_fidelity
from loadgen.runs.definitions import DEFINITIONS
from loadgen.runs.latency_text import describe_connect_time
from loadgen.runs.page_data import ChartData

if TYPE_CHECKING:
    from loadgen.core.limits import ValidityLimits
    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.token_usage import Tokens
    from loadgen.core.results.manifest import Host, RunManifest
    from loadgen.core.server_metrics.energy import EnergyUse
    from loadgen.core.server_metrics.series import MetricSample, PageReading, ServerTotals

ComputeChartData = Callable[[], ChartData]
"""Computes the data of all charts of a run, once for all sections of a page.

Functions take None instead if only the summary of a run was kept, so that it has no charts.
"""

READ_COUNT_HEAD = ("metrics page", "reads", "failed")
"""The heads of a table of how often each metrics page was read."""

FINGERPRINT_NOTE = (
    "Runs with equal config fingerprints can be compared. Equal prompts and schedule mean that the "
    "load was the same to the byte. Without --seed each run draws a new seed."
)

_SOURCE_LABELS = {
    "server": "the server",
    "tokenizer": "the model's tokenizer",
    "estimate": "an estimate",
    "events": "events",
}
"""Who counted the output tokens, by the source in the summary."""

_NOT_COUNTED_LABEL = "nobody"
"""The label of responses whose output tokens are not known."""

_NO_OUTPUT_REQUESTED = "unasked"
"""The source of responses to requests for no output, such as embeddings."""

_SOCKET_READERS = {
    "compiled": "sockets read by compiled code",
    "python": "sockets read by Python",
}
"""What read the responses from the sockets of the client, by `Host.hot_path`.

Compiled code is faster, so its timestamps are more exact.
"""


# -- charts ----------------------------------------------------------------------------------------


def defer_section(
    build_section: Callable[[ChartData], Section], compute_chart_data: ComputeChartData | None
) -> list[PageSectionFactory]:
    """Return a function that builds a section with charts, or an empty list without chart data.

    The data of the charts take seconds to compute for a long run. So the function computes them
    only when it is called, which a page does when it is written. A report on a terminal has no
    charts, and never calls it.

    Args:
        build_section: Returns the section for the data of its charts.
        compute_chart_data: Computes this data. None if the run has no charts.
    """
    if compute_chart_data is None:
        return []
    return [partial(_build_section_now, build_section, compute_chart_data)]


def _build_section_now(
    build_section: Callable[[ChartData], Section], compute_chart_data: ComputeChartData
) -> list[Section]:
    chart_data = compute_chart_data()
    return [build_section(chart_data)]


def _defer_folded_charts(
    build_charts: Callable[[ChartData], Iterable[Chart]],
    compute_chart_data: ComputeChartData | None,
    *,
    heading: str,
    section_id: str,
) -> list[PageSectionFactory]:
    """Return a function that builds a folded section of charts, or [] without chart data.

    Args:
        build_charts: Describes the charts from their data. It is called when the page is written.
        compute_chart_data: Computes the data, or None if the run has no charts.
        heading: The heading of the section.
        section_id: The HTML id of the section, which links and the table of contents use.
    """

    def build_section(data: ChartData) -> Section:
        return section(heading, Charts(tuple(build_charts(data))), folded=True, id=section_id)

    return defer_section(build_section, compute_chart_data)


def build_headline_charts(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[PageSectionFactory]:
    """Yield a factory for the section with TTFT and TPOT over time and the limits of the SLO.

    A page shows these two charts directly below the headline numbers. The section is built when a
    page is written, because the data of charts take time to compute.
    """

    def build_latency_section(data: ChartData) -> Section:
        return section("", Charts(tuple(charts.build_latency_charts(data, summary))))

    yield from defer_section(build_latency_section, compute_chart_data)


def build_percentile_section(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[PageSectionFactory]:
    """Yield a folded section with the value at each percentile of every latency."""
    yield from _defer_folded_charts(
        partial(charts.build_percentile_charts, summary=summary),
        compute_chart_data,
        heading="Percentile curves",
        section_id="curves",
    )


def build_client_section(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[PageSectionFactory]:
    """Yield a folded section with CPU use and send delay of the load generator over time."""
    yield from _defer_folded_charts(
        partial(charts.build_client_charts, summary=summary),
        compute_chart_data,
        heading="Client overhead over time",
        section_id="client-time",
    )


def build_load_charts(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[Section | PageSectionFactory]:
    """Yield a folded section with the load over time, for a page.

    Its charts show request rates, output tokens, concurrency and inter-chunk latencies. If no
    request left a record, a sentence says so. Without `compute_chart_data`, because only the
    summary of the run was kept, there is no section.
    """
    heading = "Load and throughput over time"
    if compute_chart_data is None:
        return

    if summary.window.full_run.duration_s is None:
        yield section(heading, "No request left a record.", page_only=True, id="time")
        return

    def build_charts(data: ChartData) -> Iterable[Chart]:
        yield from charts.build_load_charts(data)
        yield from charts.build_inter_chunk_charts(data, summary)

    yield from _defer_folded_charts(
        build_charts, compute_chart_data, heading=heading, section_id="time"
    )


def build_error_section(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[Section | PageSectionFactory]:
    """Yield a chart of errors over time, or a sentence that there were none."""
    if not summary.requests.by_error:
        yield section("", _describe_no_errors(summary.requests), page_only=True)
        return
    yield from _defer_folded_charts(
        charts.build_error_charts,
        compute_chart_data,
        heading="Errors over time",
        section_id="errors-time",
    )


def _describe_no_errors(requests: RequestCounts) -> str:
    """Return that no request failed, and how many were unfinished when the run ended."""
    scheduled = format.counted(requests.scheduled, "request")
    if requests.ok == requests.scheduled:
        return f"No errors: all {scheduled} succeeded."
    return (
        f"No errors: {format.count(requests.ok)} of {scheduled} succeeded, "
        f"{format.count(requests.unfinished)} were unfinished when the drain ended."
    )


# -- servers ---------------------------------------------------------------------------------------


def build_server_sections(
    server_metrics: ServerTotals,
    compute_chart_data: ComputeChartData | None,
    samples: Sequence[MetricSample],
) -> Iterator[Section | PageSectionFactory]:
    """Yield a section with the servers' own metrics over time, and one with how they were read.

    A server publishes its metrics under a URL, its metrics page, in the format of Prometheus. The
    charts of the first section are built only when a page is written, because that takes long. It
    is left out without `compute_chart_data`.

    Args:
        server_metrics: The totals and maxima of the metrics, and the pages they come from.
        compute_chart_data: Computes the data of the client, which the charts show for comparison.
        samples: The values of the metrics at each read.
    """

    def build_charts(client_data: ChartData) -> Iterable[Chart]:
        curve_by_metric = series.compute_curves(samples)
        return charts.build_server_charts(client_data, curve_by_metric)

    yield from _defer_folded_charts(
        build_charts,
        compute_chart_data,
        heading="Server metrics over time",
        section_id="server-time",
    )
    yield _metrics_pages_section(server_metrics)


def _metrics_pages_section(server_metrics: ServerTotals) -> Section:
    """Return a folded section with how often each metrics page was read."""
    text = f"Read about once per second by a separate process. {series.FILE} has every series."
    return section(
        "Metrics pages",
        Table(READ_COUNT_HEAD, _read_count_rows(server_metrics.pages)),
        Paragraph(text, "soft"),
        folded=True,
        page_only=True,
    )


def build_power_readings(energy: EnergyUse) -> Section:
    """Return a table of how often the power of the hardware was read."""
    text = "During steady load. The uncertainty is the energy between two readings."
    table = Table(READ_COUNT_HEAD, _read_count_rows(energy.pages))
    return section("", table, Paragraph(text, "soft"), page_only=True)


def _read_count_rows(pages: Iterable[PageReading]) -> list[tuple[str, str, str]]:
    """Return for each metrics page its URL, and how many reads were made and failed."""
    return [(page.url, format.count(page.reads), format.count(page.failed)) for page in pages]


# -- the delivered load ----------------------------------------------------------------------------


def build_load_check(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[Section | PageSectionFactory]:
    """Yield, for a page, whether the load matched the workload, and how long its requests were.

    The first section has a table with a row for each property of the load that was checked, such
    as its arrival rate. The second one has charts of the lengths, so it is built only when the page
    is written. There are no sections if the records of the requests were not kept, because then
    `compute_chart_data` is None.
    """
    if compute_chart_data is None:
        return

    checks = Table(load_fidelity.HEAD, load_fidelity.rows(summary.stimulus), "prose")
    yield section("Load check", checks, folded=True, page_only=True, id="load-check")

    def build_lengths_section(data: ChartData) -> Section:
        return _build_lengths_section(summary, data)

    yield from defer_section(build_lengths_section, compute_chart_data)


def _build_lengths_section(summary: Summary, data: ChartData) -> Section:
    """Return the lengths of prompts and responses, and the cache hit rate, with scatter plots."""
    heading = "Lengths and cache"
    if summary.tokens.output is None:
        text = "No request succeeded, so no lengths are known."
        return section(heading, text, folded=True, id="lengths")
    sentences = [*_length_sentences(summary.tokens), *_equal_length_sentences(data)]
    plots = Charts(tuple(charts.build_length_charts(data)))
    return section(heading, " ".join(sentences), plots, folded=True, id="lengths")


def _length_sentences(tokens: Tokens) -> Iterator[str]:
    """Yield sentences about the tokens of a run.

    They state the numbers of tokens, who counted the output tokens, whether responses have the
    requested length, and the hit rate of the server's prefix cache.
    """
    prompt = format.count(tokens.input)
    yield f"{prompt} prompt tokens and {format.count(tokens.output)} output tokens."

    # `sources.output` has a code for each way in which output tokens were counted, such as
    # "server" or "tokenizer".
    sources = [source for source in tokens.sources.output if source != _NO_OUTPUT_REQUESTED]
    if sources:
        counted_by = [_SOURCE_LABELS.get(source, _NOT_COUNTED_LABEL) for source in sources]
        yield f"Output was counted by {' and '.join(counted_by)}."

    yield _describe_length_match(tokens)
    if tokens.cached_share is None:
        yield "The server does not report its prefix cache hit rate."
    else:
        yield f"The prefix cache hit rate was {format.percent(tokens.cached_share)}."


def _describe_length_match(tokens: Tokens) -> str:
    """Return whether the responses have the output length that the workload requests."""
    if tokens.asked_output is None:
        return "The workload requests no output length."
    if not tokens.length_mismatch_share:
        return "Every response has the requested length."
    mismatched = format.percent(tokens.length_mismatch_share)
    return f"{mismatched} of the responses do not have the requested length."


def _equal_length_sentences(data: ChartData) -> Iterator[str]:
    """Yield that all prompts, or all responses, have one length."""
    for subject, plot_by_length in (
        ("prompts", data.scatter.ttft_by_input),
        ("responses", data.scatter.e2e_by_output),
    ):
        shortest, longest = plot_by_length.x_range
        if plot_by_length.count > 1 and shortest == longest:
            yield f"All {subject} have {format.counted(round(shortest), 'token')}."


# -- definitions and provenance --------------------------------------------------------------------


def build_provenance(summary: Summary, manifest: RunManifest | None) -> Iterator[Section]:
    """Yield the sections at the end of a page: definitions, and how to reproduce the run.

    The definitions are those of the metrics. To reproduce the run, a reader needs its command, its
    conditions such as the seed, and its workload file. A note explains how the fingerprints of two
    runs are compared.
    """
    definitions = Table(("metric", "definition"), DEFINITIONS, "prose")
    command = Quoted(shlex.join(summary.run.command))
    conditions = _list_run_conditions(summary, manifest)
    workload_file = Quoted(manifest.source_text if manifest is not None else "")
    workload_heading = f"Workload file {summary.run.workload}"
    fingerprint_note = Paragraph(FINGERPRINT_NOTE, "soft")

    yield section("Definitions", definitions, folded=True, page_only=True, id="definitions")
    yield section(
        "How to reproduce", command, conditions, folded=True, page_only=True, id="reproduce"
    )
    yield section(workload_heading, workload_file, folded=True, page_only=True)
    yield section("", fingerprint_note, page_only=True)


def _list_run_conditions(summary: Summary, manifest: RunManifest | None) -> Facts:
    """Return the conditions that a repetition of the run has to share to be comparable.

    They are, in this order: what the run sent, and with which client on which machine. A
    fingerprint is a hash of a part of the run, such as its prompts. The salt is a text in each
    prompt. Runs with different salts have different prompts, so that a server cannot respond from
    the prefix cache of an earlier run.
    """
    run = summary.run
    fingerprints = summary.fingerprints
    seed = "" if run.seed is None else str(run.seed)
    schedule_seed = "" if run.schedule_seed is None else f"seed {run.schedule_seed}"
    salt = "" if manifest is None else manifest.salt
    tokenizer = f"{run.tokenizer} ({run.tokenizer_tag})" if run.tokenizer else ""
    fingerprint_of_config = fingerprints.recipe
    load_conditions = (
        ("Seed", seed),
        ("Schedule", schedule_seed),
        ("Salt", salt),
        ("Config fingerprint", fingerprint_of_config),
        ("Prompts", fingerprints.prompts),
        ("Schedule fingerprint", fingerprints.schedule),
        ("Bodies", fingerprints.bodies),
    )

    client_conditions = (
        ("Client", _describe_client(summary)),
        ("Tokenizer", tokenizer),
        ("Connection time", describe_connect_time(summary)),
        ("Machine", _describe_machine(run.host)),
        ("Clock", run.host.clock),
        ("Versions", _describe_versions(run.host)),
        ("Validity limits", _describe_validity_limits(summary.verdict.limits)),
    )
    return Facts((*load_conditions, *client_conditions))


def _describe_client(summary: Summary) -> str:
    """Return the HTTP client of the load generator, the API it used, and what read its sockets."""
    run = summary.run
    streaming = "streamed" if run.stream else "not streamed"
    socket_reader = _SOCKET_READERS.get(run.host.hot_path, "")
    return _join_known(run.client, run.api, streaming, socket_reader)


def _describe_machine(host: Host) -> str:
    """Return the name, the processor and the kernel of the machine of the load generator."""
    cpus = f"{host.cpus} CPUs" if host.cpus else ""
    return _join_known(host.name, host.cpu, cpus, host.kernel)


def _describe_versions(host: Host) -> str:
    """Return the versions of Python and of the libraries that loadgen used."""
    libraries = [f"{name} {version}" for name, version in host.versions.items()]
    return _join_known(f"Python {host.python}", *libraries)


def _join_known(*texts: str) -> str:
    """Return the texts that are not empty, separated by commas."""
    return ", ".join(text for text in texts if text)


def _describe_validity_limits(limits: ValidityLimits) -> str:
    """Return the limits beyond which a run is not valid, or a metric is omitted.

    All are fractions. The delay of sending and the uncertainties of timestamps are limited relative
    to the median of the latency that they distort: `send delay 5 % ... of TTFT p50`.
    """
    send_delay_limit = format.percent(limits.send_lag_share)
    timestamp_limit = format.percent(limits.stamp_error_share)
    cpu_limit = format.percent(limits.cpu_share)
    failure_limit = format.percent(limits.failure_share)
    itl_limit = format.percent(limits.event_error_share)
    tpot_limit = format.percent(limits.tpot_error_share)

    return "; ".join(
        (
            f"send delay {send_delay_limit} and timestamp uncertainty {timestamp_limit} of "
            "TTFT p50",
            f"CPU {cpu_limit}",
            f"failures {failure_limit}",
            f"uncertainty of ITL {itl_limit} of its p50",
            f"uncertainty of TPOT {tpot_limit} of its p50",
        )
    )
