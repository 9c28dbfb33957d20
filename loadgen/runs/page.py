"""What the page of a run has and its text has not: charts, tables in full, definitions, how to do it again. Pure.

Each function gives sections that are made when a page is written. No arithmetic on records: chart data come from
`page_data.py`, charts from `charts.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.server_metrics.series import MetricSample, Served
from loadgen.render.page import Chart
from loadgen.render.section import (
    Charts,
    PageOnly,
    Paragraph,
    Quoted,
    Section,
    Table,
    named_facts,
    section,
)
from loadgen.runs import charts, headline, stimulus
from loadgen.runs.definitions import DEFINITIONS
from loadgen.runs.page_data import Figures

Drawing = Callable[[], Figures] | None
"""Makes the data of charts; None: only the summary was kept."""


def _drawn(
    figures: Drawing, make: Callable[[Figures], Iterable[Chart]], head: str, id: str
) -> Iterator[PageOnly]:
    """Charts that unfold under a head of their own."""
    if figures is not None:
        yield lambda: [section(head, Charts(tuple(make(figures()))), folded=True, id=id)]


def first_look(summary: Summary, figures: Drawing) -> Iterator[PageOnly]:
    """TTFT and TPOT over time, with their limits."""
    if figures is not None:
        yield lambda: [section("", Charts(tuple(charts.latency_over_time(figures(), summary))))]


def curves(summary: Summary, figures: Drawing) -> Iterator[PageOnly]:
    yield from _drawn(
        figures, lambda data: charts.curves(data, summary), "Percentile curves", "curves"
    )


def client(summary: Summary, figures: Drawing) -> Iterator[PageOnly]:
    head = "The load generator itself, over time"
    yield from _drawn(figures, lambda data: charts.client(data, summary), head, "client-time")


def over_time(summary: Summary, figures: Drawing) -> Iterator[Section | PageOnly]:
    if figures is None:
        return
    head, data = "Load and throughput over time", figures
    if summary.window.whole.duration_s is None:
        yield section(
            head, "No request left a record: there is nothing to draw.", page_only=True, id="time"
        )
    else:
        yield lambda: [
            section(
                head,
                Charts((*charts.over_time(data()), *charts.gaps_over_time(data(), summary))),
                folded=True,
                id="time",
            )
        ]


def server(
    served: Served, figures: Drawing, said: Sequence[MetricSample]
) -> Iterator[Section | PageOnly]:
    head = "The server's own metrics over time"
    yield from _drawn(
        figures, lambda data: charts.server(data, series.curves(said)), head, "server-time"
    )
    rows = [
        (source.url, format.count(source.reads), format.count(source.failed))
        for source in served.pages
    ]
    words = (
        "Read about once a second over a connection of its own, by a process of its own. Every series of the pages is "
        f"in {series.FILE}."
    )
    pages = Table(("metrics page", "reads", "failed"), rows)
    yield section(
        "The metrics pages that were read",
        pages,
        Paragraph(words, "soft"),
        folded=True,
        page_only=True,
    )


def energy(used: EnergyUse) -> Section:
    rows = [
        (source.url, format.count(source.reads), format.count(source.failed))
        for source in used.pages
    ]
    words = Paragraph(
        "While the load was steady. The error is what passed between two readings and was not seen.",
        "soft",
    )
    return section("", Table(("page", "reads", "failed"), rows), words, page_only=True)


def delivered(summary: Summary, figures: Drawing) -> Iterator[Section | PageOnly]:
    """Whether the load was the one asked for, and what lengths it had."""
    if figures is None:
        return
    rows = Table(stimulus.HEAD, stimulus.rows(summary.stimulus), "prose")
    yield section("The load that was delivered", rows, folded=True, page_only=True, id="delivered")
    data = figures
    yield lambda: [_lengths(summary, data())]


def _lengths(summary: Summary, figures: Figures) -> Section:
    head, tokens = "Lengths and cache", summary.tokens
    if tokens.output is None:
        return section(
            head, "No request came back whole: no length is known.", folded=True, id="lengths"
        )
    sentences = [
        f"{format.count(tokens.input)} prompt tokens and {format.count(tokens.output)} output tokens in all."
    ]
    counters = {"server": "the server", "tokenizer": "the model's tokenizer"}
    counters |= {"estimate": "an estimate", "events": "events"}
    sources = [counters.get(tag, "nobody") for tag in tokens.sources.output if tag != "unasked"]
    if sources:
        sentences.append(f"Output was counted by {' and '.join(sources)}.")
    if tokens.asked_output is None:
        sentences.append("No output length was asked for.")
    elif not tokens.length_mismatch_share:
        sentences.append("Every answer is exactly as long as asked.")
    else:
        sentences.append(
            f"{format.percent(tokens.length_mismatch_share)} of the answers are not as long as asked."
        )
    if tokens.cached_share is None:
        sentences.append("The server does not say how much of a prompt came from its prefix cache.")
    else:
        sentences.append(
            f"{format.percent(tokens.cached_share)} of the prompt tokens came from the server's prefix cache."
        )
    for subject, cloud in (
        ("prompts have", figures.ttft_by_input),
        ("answers have", figures.e2e_by_output),
    ):
        if cloud.count > 1 and cloud.x[0] == cloud.x[1]:
            sentences.append(f"All {subject} {format.counted(round(cloud.x[0]), 'token')}.")
    return section(
        head, " ".join(sentences), Charts(tuple(charts.lengths(figures))), folded=True, id="lengths"
    )


def errors(summary: Summary, figures: Drawing) -> Iterator[Section | PageOnly]:
    """That there were none; and when there were some."""
    requests = summary.requests
    if not requests.by_error:
        said = f"every one of {format.counted(requests.scheduled, 'request')} is ok"
        if requests.ok != requests.scheduled:
            unfinished = f"{format.count(requests.unfinished)} unfinished when the drain ended"
            of_all = format.counted(requests.scheduled, "request")
            said = f"{format.count(requests.ok)} of {of_all} are ok, {unfinished}"
        yield section("", f"Errors: none: {said}.", page_only=True)
    if requests.by_error:
        yield from _drawn(figures, charts.errors, "Errors over time", "errors-time")


def end(summary: Summary, manifest: RunManifest | None) -> Iterator[Section]:
    """What the words mean, and how to do it again."""
    run, fingerprints = summary.run, summary.fingerprints
    host, limits = run.host, summary.verdict.limits
    yield section(
        "Definitions",
        Table(("metric", "is"), DEFINITIONS, "prose"),
        folded=True,
        page_only=True,
        id="words",
    )
    again = named_facts(
        Seed="" if run.seed is None else str(run.seed),
        Schedule="" if run.schedule_seed is None else f"seed {run.schedule_seed}",
        Salt=manifest.salt if manifest is not None else "",
        Recipe=fingerprints.recipe,
        Prompts=fingerprints.prompts,
        Timetable=fingerprints.schedule,
        Bodies=fingerprints.bodies,
        Client=(
            run.client,
            run.api,
            "streamed" if run.stream else "not streamed",
            {"compiled": "sockets read by compiled code", "python": "sockets read by Python"}.get(
                host.hot_path, ""
            ),
        ),
        Tokenizer=f"{run.tokenizer} ({run.tokenizer_tag})" if run.tokenizer else "",
        Connect=headline.connect(summary),
        Machine=(host.name, host.cpu, f"{host.cpus} CPUs" if host.cpus else "", host.kernel),
        Clock=host.clock,
        Versions=(
            f"Python {host.python}",
            *(f"{name} {version}" for name, version in host.versions.items()),
        ),
        Limits=f"send lag {format.percent(limits.send_lag_share)}, stamp error "
        f"{format.percent(limits.stamp_error_share)} of TTFT p50; CPU {format.percent(limits.cpu_share)}; "
        f"failures {format.percent(limits.failure_share)}; error of the gaps between events "
        f"{format.percent(limits.event_error_share)} of ITL p50; error of TPOT "
        f"{format.percent(limits.tpot_error_share)} of TPOT p50",
    )
    yield section(
        "How to reproduce",
        Quoted(shlex.join(run.command)),
        again,
        folded=True,
        page_only=True,
        id="again",
    )
    source = manifest.source_text if manifest is not None else ""
    yield section(f"Workload file, {run.workload}", Quoted(source), folded=True, page_only=True)
    note = (
        "Equal recipes may be compared; equal prompts and timetable are the same load to the byte. Without a seed each "
        "run draws its own, which is the better experiment."
    )
    yield section("", Paragraph(note, "soft"), page_only=True)
