"""What only the page of a run has: charts, complete tables, definitions, how to reproduce it.

Pure. Each function yields sections, or functions that make sections when a page is written, since
charts take time to compute. `page_data.py` computes their data and `charts.py` describes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.manifest import Host, RunManifest
    from loadgen.core.server_metrics.energy import EnergyUse
    from loadgen.core.server_metrics.series import MetricSample, PageReading, ServerTotals

ChartSource = Callable[[], ChartData] | None
"""Computes the data of charts. None if only the summary of a run was kept, so it has no charts."""

READ_HEAD = ("metrics page", "reads", "failed")

FINGERPRINT_NOTE = (
    "Runs with equal config fingerprints can be compared. Equal prompts and schedule mean that the "
    "load was the same to the byte. Without --seed each run draws a new seed."
)

_COUNTERS = {
    "server": "the server",
    "tokenizer": "the model's tokenizer",
    "estimate": "an estimate",
    "events": "events",
}
"""Who counted the output tokens, by the tag in the summary."""

_SOCKET_READERS = {
    "compiled": "sockets read by compiled code",
    "python": "sockets read by Python",
}
"""What read the responses from the sockets of the client, by `Host.hot_path`.

Compiled code is faster, so its timestamps are more exact.
"""


def _folded_charts(
    head: str, id: str, chart_data: ChartSource, make_charts: Callable[[ChartData], Iterable[Chart]]
) -> Iterator[PageSectionFactory]:
    """Yield a folded section with charts, or nothing if there are no data for charts."""
    if chart_data is None:
        return
    make_data = chart_data

    def make_sections() -> list[Section]:
        return [section(head, Charts(tuple(make_charts(make_data()))), folded=True, id=id)]

    yield make_sections


# -- charts ----------------------------------------------------------------------------------------


def first_charts(summary: Summary, chart_data: ChartSource) -> Iterator[PageSectionFactory]:
    """Yield the charts below the headline numbers: TTFT and TPOT over time, with limits."""
    if chart_data is None:
        return
    make_data = chart_data

    def make_sections() -> list[Section]:
        return [section("", Charts(tuple(charts.latency_over_time(make_data(), summary))))]

    yield make_sections


def percentile_curves(summary: Summary, chart_data: ChartSource) -> Iterator[PageSectionFactory]:
    """Yield the value at each percentile of every latency."""

    def make_charts(data: ChartData) -> Iterable[Chart]:
        return charts.curves(data, summary)

    yield from _folded_charts("Percentile curves", "curves", chart_data, make_charts)


def client_over_time(summary: Summary, chart_data: ChartSource) -> Iterator[PageSectionFactory]:
    """Yield the CPU use and the send delay of the load generator over time."""

    def make_charts(data: ChartData) -> Iterable[Chart]:
        return charts.client(data, summary)

    yield from _folded_charts("Client overhead over time", "client-time", chart_data, make_charts)


def load_over_time(
    summary: Summary, chart_data: ChartSource
) -> Iterator[Section | PageSectionFactory]:
    """Yield load, output tokens, concurrency and inter-chunk latencies over time."""
    head = "Load and throughput over time"
    if chart_data is None:
        return
    if summary.window.whole.duration_s is None:
        yield section(head, "No request left a record.", page_only=True, id="time")
        return

    def make_charts(data: ChartData) -> Iterable[Chart]:
        yield from charts.over_time(data)
        yield from charts.inter_chunk_over_time(data, summary)

    yield from _folded_charts(head, "time", chart_data, make_charts)


def errors(summary: Summary, chart_data: ChartSource) -> Iterator[Section | PageSectionFactory]:
    """Yield the errors over time, or a sentence that there were none."""
    requests = summary.requests
    if requests.by_error:
        yield from _folded_charts("Errors over time", "errors-time", chart_data, charts.errors)
        return
    scheduled = format.counted(requests.scheduled, "request")
    if requests.ok == requests.scheduled:
        text = f"No errors: all {scheduled} succeeded."
    else:
        unfinished = format.count(requests.unfinished)
        text = (
            f"No errors: {format.count(requests.ok)} of {scheduled} succeeded, {unfinished} were "
            "unfinished when the drain ended."
        )
    yield section("", text, page_only=True)


# -- servers ---------------------------------------------------------------------------------------


def server_metrics(
    served: ServerTotals, chart_data: ChartSource, samples: Sequence[MetricSample]
) -> Iterator[Section | PageSectionFactory]:
    """Yield the servers' own metrics over time, and how often their pages were read."""

    def make_charts(data: ChartData) -> Iterable[Chart]:
        return charts.server(data, series.compute_curves(samples))

    yield from _folded_charts("Server metrics over time", "server-time", chart_data, make_charts)
    text = f"Read about once per second by a separate process. {series.FILE} has every series."
    yield section(
        "Metrics pages",
        Table(READ_HEAD, _read_rows(served.pages)),
        Paragraph(text, "soft"),
        folded=True,
        page_only=True,
    )


def energy_pages(energy: EnergyUse) -> Section:
    """Return how often the power of the hardware was read."""
    text = "During steady load. The uncertainty is the energy between two readings."
    table = Table(("page", "reads", "failed"), _read_rows(energy.pages))
    return section("", table, Paragraph(text, "soft"), page_only=True)


def _read_rows(pages: Iterable[PageReading]) -> list[tuple[str, str, str]]:
    return [(page.url, format.count(page.reads), format.count(page.failed)) for page in pages]


# -- the delivered load ----------------------------------------------------------------------------


def load_check(summary: Summary, chart_data: ChartSource) -> Iterator[Section | PageSectionFactory]:
    """Yield whether the delivered load matches the workload, and the lengths of the requests."""
    if chart_data is None:
        return
    make_data = chart_data
    table = Table(load_fidelity.HEAD, load_fidelity.rows(summary.stimulus), "prose")
    yield section("Load check", table, folded=True, page_only=True, id="delivered")

    def lengths() -> list[Section]:
        return [_lengths_section(summary, make_data())]

    yield lengths


def _lengths_section(summary: Summary, data: ChartData) -> Section:
    head = "Lengths and cache"
    if summary.tokens.output is None:
        text = "No request succeeded, so no lengths are known."
        return section(head, text, folded=True, id="lengths")
    sentences = [*_length_sentences(summary), *_equal_length_sentences(data)]
    plots = Charts(tuple(charts.lengths(data)))
    return section(head, " ".join(sentences), plots, folded=True, id="lengths")


def _length_sentences(summary: Summary) -> Iterator[str]:
    """Yield the numbers of tokens, who counted them, and whether lengths are as requested."""
    tokens = summary.tokens
    prompt = format.count(tokens.input)
    yield f"{prompt} prompt tokens and {format.count(tokens.output)} output tokens."
    sources = [_COUNTERS.get(tag, "nobody") for tag in tokens.sources.output if tag != "unasked"]
    if sources:
        yield f"Output was counted by {' and '.join(sources)}."
    if tokens.asked_output is None:
        yield "The workload requests no output length."
    elif not tokens.length_mismatch_share:
        yield "Every response has the requested length."
    else:
        share = format.percent(tokens.length_mismatch_share)
        yield f"{share} of the responses do not have the requested length."
    if tokens.cached_share is None:
        yield "The server does not report its prefix cache hit rate."
    else:
        yield f"The prefix cache hit rate was {format.percent(tokens.cached_share)}."


def _equal_length_sentences(data: ChartData) -> Iterator[str]:
    """Yield that all prompts, or all responses, have one length."""
    for subject, plot_by_length in (
        ("prompts", data.scatter.ttft_by_input),
        ("responses", data.scatter.e2e_by_output),
    ):
        shortest, longest = plot_by_length.x
        if plot_by_length.count > 1 and shortest == longest:
            yield f"All {subject} have {format.counted(round(shortest), 'token')}."


# -- definitions and provenance --------------------------------------------------------------------


def provenance(summary: Summary, manifest: RunManifest | None) -> Iterator[Section]:
    """Yield the definitions of the metrics, and everything that is needed to reproduce the run."""
    definitions = Table(("metric", "definition"), DEFINITIONS, "prose")
    yield section("Definitions", definitions, folded=True, page_only=True, id="words")
    yield section(
        "How to reproduce",
        Quoted(shlex.join(summary.run.command)),
        _run_conditions(summary, manifest),
        folded=True,
        page_only=True,
        id="again",
    )
    source = manifest.source_text if manifest is not None else ""
    head = f"Workload file {summary.run.workload}"
    yield section(head, Quoted(source), folded=True, page_only=True)
    yield section("", Paragraph(FINGERPRINT_NOTE, "soft"), page_only=True)


def _run_conditions(summary: Summary, manifest: RunManifest | None) -> Facts:
    """Return everything that the same run would have to have in common, without empty facts.

    The salt is a text in each prompt. Runs with different salts have different prompts, so that a
    server cannot respond from the prefix cache of an earlier run.
    """
    run = summary.run
    fingerprints = summary.fingerprints
    schedule_seed = "" if run.schedule_seed is None else f"seed {run.schedule_seed}"
    facts = [
        ("Seed", "" if run.seed is None else str(run.seed)),
        ("Schedule", schedule_seed),
        ("Salt", "" if manifest is None else manifest.salt),
        ("Config fingerprint", fingerprints.recipe),
        ("Prompts", fingerprints.prompts),
        ("Schedule fingerprint", fingerprints.schedule),
        ("Bodies", fingerprints.bodies),
        ("Client", _describe_client(summary)),
        ("Tokenizer", f"{run.tokenizer} ({run.tokenizer_tag})" if run.tokenizer else ""),
        ("Connection time", describe_connect_time(summary)),
        ("Machine", _describe_machine(run.host)),
        ("Clock", run.host.clock),
        ("Versions", _describe_versions(run.host)),
        ("Validity limits", _validity_limits(summary)),
    ]
    return Facts([(label, text) for label, text in facts if text])


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


def _validity_limits(summary: Summary) -> str:
    """Return the limits beyond which a run is not valid, or a metric is omitted."""
    limits = summary.verdict.limits
    return (
        f"send delay {format.percent(limits.send_lag_share)} and timestamp uncertainty "
        f"{format.percent(limits.stamp_error_share)} of TTFT p50; "
        f"CPU {format.percent(limits.cpu_share)}; "
        f"failures {format.percent(limits.failure_share)}; "
        f"uncertainty of ITL {format.percent(limits.event_error_share)} of its p50; "
        f"uncertainty of TPOT {format.percent(limits.tpot_error_share)} of its p50"
    )
