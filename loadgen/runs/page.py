"""One run as one HTML file: the result on the first screen, then all the data behind it.

Pure: takes a `Summary`, the manifest's `Header` and the chart data (`Figures`), returns a string. No arithmetic on
records: sentences come from `run_headline.py`, chart data from `run_data.py`, charts from `run_charts.py`, the frame
from `page.py`.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Sequence
from html import escape

from loadgen.core import format
from loadgen.core.metrics.headline import headline
from loadgen.core.metrics.parts import ClassSummary, ModelSummary, StageSummary, TargetSummary
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import Header
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.stats.quantiles import Distribution
from loadgen.figures import FigureRow
from loadgen.present import html, page
from loadgen.present.additions import Addition
from loadgen.runs import charts as run_charts
from loadgen.runs import headline as run_headline
from loadgen.runs import nodes, sections, splits, stimulus
from loadgen.runs.definitions import DEFINITIONS
from loadgen.runs.page_data import Figures
from loadgen.runs.text import energy_says, server_says

QUANTILES = ("p50", "p90", "p95", "p99", "p99_9")


def render(
    summary: Summary,
    header: Header | None = None,
    figures: Figures | None = None,
    said: Sequence[MetricSample] = (),
    additions: Sequence[Addition] = (),
) -> str:
    """The text of the page. Without `header` and `figures` (when only a summary was kept), it has tables but no charts.

    `said`: samples of the servers' own metrics during the run. `additions`: what others add to the page of the run.
    """
    run = summary.run
    sheet = page.Page(f"{run.workload or run.name}: {run.id}", f"loadgen {run.version} report")
    _first_screen(sheet, summary, additions)
    for addition in additions:
        html.add(sheet, addition.sections)
    _latency(sheet, summary, figures)
    splits.section(sheet, summary, () if figures is None else run_charts.slow(figures, summary))
    if figures is not None:
        _over_time(sheet, summary, figures)
    _server(sheet, summary, figures, said)
    _energy(sheet, summary)
    if figures is not None:
        _delivered(sheet, summary)
        _lengths(sheet, summary, figures)
    _errors(sheet, summary, figures)
    _stages_and_targets(sheet, summary)
    _client(sheet, summary, figures)
    for addition in additions:
        if addition.appendix is not None:
            html.add(sheet, addition.appendix())
    _definitions(sheet)
    _reproduction(sheet, summary, header)
    return sheet.render()


def _first_screen(sheet: page.Page, summary: Summary, additions: Sequence[Addition]) -> None:
    run, target, load = summary.run, summary.target, summary.load
    for note in run_headline.marks(summary):
        sheet.mark(*note)
    for one in (one for addition in additions for one in addition.warned):
        sheet.mark(one.word, one.words, one.kind)
    title = " · ".join(filter(None, (run.workload or run.name, target.model, load.arrival)))
    sheet.heading(title)
    doubtful = summary.goodput.undecided or bool(summary.verdict.caveats)
    kind = "bad" if not summary.verdict.valid or summary.goodput.met is False else "warn" if doubtful else "good"
    sheet.say(run_headline.sentence(summary), f"sentence {kind}")
    numbers: Sequence[page.Number] = run_headline.five(summary)
    for addition in additions:
        if addition.sentence:
            sheet.say(addition.sentence, f"sentence {'good' if addition.good else 'bad'}")
        if addition.numbers is not None:
            numbers = addition.numbers(numbers)
    sheet.tiles(numbers)
    gpus = "" if target.gpus is None else format.counted(target.gpus, "GPU")
    window = summary.window
    sheet.facts(
        Target=(target.name, target.url),
        Model=target.model,
        Server=(target.server, gpus, target.shape, target.region),
        Software=target.software,
        Hardware=[] if summary.hardware is None else summary.hardware.words,
        **format.said(run.metadata),
        Load=load.arrival,
        Requests=run_headline.request_counts(summary),
        Tasks=[", ".join(line) for line in run_headline.tasks(summary.sessions)] if summary.sessions else [],
        When=(run.started.replace("T", " "), _lasted(window.whole.duration_s, "in all")),
        Measured=(_lasted(window.duration_s), _lasted(window.steady.duration_s, "under load")),
        Made_by=f"loadgen {run.version} on {run.host.name or 'an unnamed host'}",
        Seed="" if run.seed is None else str(run.seed),
        Run=run.id,
    )
    if summary.verdict.warnings:
        sheet.add('<h3 class="warn">Warnings</h3>')
        sheet.listed(summary.verdict.warnings)


def _lasted(duration_s: float | None, suffix: str = "") -> str:
    return "" if duration_s is None else f"{format.duration(duration_s)} {suffix}".rstrip()


def _without_errors(summary: Summary) -> str:
    requests = summary.requests
    if requests.ok == requests.scheduled:
        return f"every one of {format.counted(requests.scheduled, 'request')} is ok"
    unfinished = f"{format.count(requests.unfinished)} unfinished when the drain ended"
    return f"{format.count(requests.ok)} of {format.counted(requests.scheduled, 'request')} are ok, {unfinished}"


def _latency(sheet: page.Page, summary: Summary, figures: Figures | None) -> None:
    sheet.section("Latency", id="latency")
    rows = run_headline.latencies(summary)
    _distributions(sheet, rows)
    needs = run_headline.needed([distribution for _, distribution in rows], QUANTILES)
    sentences = [f"~ rests on too few samples to be relied on; samples needed: {needs}."] if needs else []
    sentences += run_headline.about_latency(summary)
    for sentence in sentences:
        sheet.say(sentence, "soft")
    html.add(sheet, [sections.slo(summary.goodput)])
    if figures is not None:
        sheet.charts(run_charts.curves(figures, summary))


def _distributions(sheet: page.Page, rows: Sequence[tuple[FigureRow, Distribution]]) -> None:
    head = ("ms", "mean", "p50", "p90", "p95", "p99", "p99.9", "max", "samples")
    sheet.table(
        head, [(run_headline.table_words(row), *run_headline.distribution_cells(each, QUANTILES)) for row, each in rows]
    )


def _over_time(sheet: page.Page, summary: Summary, figures: Figures) -> None:
    sheet.section("Over time", id="time")
    if summary.window.whole.duration_s is None:
        sheet.say("No request left a record: there is nothing to draw.")
    else:
        sheet.charts(run_charts.over_time(figures, summary))


def _server(sheet: page.Page, summary: Summary, figures: Figures | None, said: Sequence[MetricSample]) -> None:
    if summary.server is None:
        return
    sheet.section("What the server says of itself", id="server")
    sheet.say(f"{', '.join(server_says(summary.server))}.")
    if figures is not None:
        sheet.charts(run_charts.server(figures, series.curves(said)))
    rows = [(source.url, format.count(source.reads), format.count(source.failed)) for source in summary.server.pages]
    sheet.table(("metrics page", "reads", "failed"), rows)
    sheet.say(
        "Read about once a second over a connection of its own, by a process of its own. Every series of the pages is "
        f"in {series.FILE}.",
        "soft",
    )


def _energy(sheet: page.Page, summary: Summary) -> None:
    used = summary.energy
    if used is None:
        return
    sheet.section("What the hardware used", id="energy")
    sheet.say(f"{', '.join(energy_says(used))}.")
    rows = [(source.url, format.count(source.reads), format.count(source.failed)) for source in used.pages]
    sheet.table(("page", "reads", "failed"), rows)
    sheet.say("While the load was steady. The error is what passed between two readings and was not seen.", "soft")


def _delivered(sheet: page.Page, summary: Summary) -> None:
    """Whether the load was the one asked for."""
    if summary.stimulus:
        sheet.section("The load that was delivered", id="delivered")
        sheet.table(stimulus.HEAD, stimulus.rows(summary.stimulus), "words")


def _lengths(sheet: page.Page, summary: Summary, figures: Figures) -> None:
    sheet.section("Lengths and cache", id="lengths")
    tokens = summary.tokens
    if tokens.output is None:
        sheet.say("No request came back whole: no length is known.")
        return
    sentences = [f"{format.count(tokens.input)} prompt tokens and {format.count(tokens.output)} output tokens in all."]
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
        sentences.append(f"{format.percent(tokens.length_mismatch_share)} of the answers are not as long as asked.")
    if tokens.cached_share is None:
        sentences.append("The server does not say how much of a prompt came from its prefix cache.")
    else:
        sentences.append(
            f"{format.percent(tokens.cached_share)} of the prompt tokens came from the server's prefix cache."
        )
    for subject, cloud in (("prompts have", figures.ttft_by_input), ("answers have", figures.e2e_by_output)):
        if cloud.count > 1 and cloud.x[0] == cloud.x[1]:
            sentences.append(f"All {subject} {format.counted(round(cloud.x[0]), 'token')}.")
    sheet.say(" ".join(sentences))
    sheet.charts(run_charts.lengths(figures))


def _errors(sheet: page.Page, summary: Summary, figures: Figures | None) -> None:
    sheet.section("Errors", id="errors")
    requests = summary.requests
    if not requests.by_error:
        sheet.say(f"None: {_without_errors(summary)}.")
    else:
        rows = [(kind, format.count(error.count), error.first_text) for kind, error in requests.by_error.items()]
        sheet.table(("kind", "requests", "first words about it"), rows, "words")
    if figures is not None:
        sheet.charts(run_charts.errors(figures))


def _stages_and_targets(sheet: page.Page, summary: Summary) -> None:
    """Tables of stages and of targets when there are several, and of classes."""
    head = ("ok", "failed", "req/s", "out tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "goodput")

    def parts(
        title: str, named: Iterable[tuple[str, StageSummary | TargetSummary | ClassSummary | ModelSummary]]
    ) -> None:
        cells = [(name, *run_headline.part_cells(part), format.percent(part.goodput.share)) for name, part in named]
        sheet.table((title, *head), cells)

    if len(summary.stages) > 1:
        sheet.section("Stages", id="stages")
        names = (
            " · ".join(filter(None, (stage.name, stage.arrival))) + " (not measured)" * (not stage.measured)
            for stage in summary.stages
        )
        parts("stage", zip(names, summary.stages, strict=True))
    if summary.classes:
        sheet.section("Classes", id="classes")
        parts("class", ((part.name, part) for part in summary.classes))
        if summary.models:
            parts("model", ((f"{part.model} ({', '.join(part.classes)})", part) for part in summary.models))
        asked = [
            (
                part.name,
                format.percent(part.share),
                format.percent(run_headline.class_share(summary, part)),
                part.model or summary.target.model,
                format.NONE if part.priority is None else str(part.priority),
                "; ".join([*map(run_headline.class_term, part.goodput.slo), *_of_tasks(part)]),
            )
            for part in summary.classes
        ]
        columns = ("class", "share asked", "share", "model", "priority", "SLO: its terms, and what was measured")
        sheet.table(columns, asked, "words")
    if summary.steps:
        sheet.section("Steps of a task", id="steps")
        sheet.table(("step", *run_headline.STEP_HEAD), run_headline.step_rows(summary))
        sheet.say(f"{run_headline.STEPS_WORDS.capitalize()}. Latencies in ms.", "soft")
    if summary.targets:
        sheet.section("Targets", id="targets")
        parts("target", ((run_headline.target_name(part), part) for part in summary.targets))
        parts("region", ((part.target.region or "not given", part) for part in summary.regions))
        parts("node", ((part.target.node or "not given", part) for part in summary.nodes))
        if summary.rack is not None:  # else they serve different steps of tasks
            columns = ("over the targets", "min", "max", "mean", "median", "sum")
            sheet.table(columns, _target_statistics(summary.targets))
        sheet.say(
            "Rates of all targets are over one clock, the window of the whole run, so their sum is the rate of the "
            "whole.",
            "soft",
        )
    if said := nodes.sentences(summary.between):
        sheet.section("Between nodes", id="nodes")
        if summary.between.variances:
            sheet.table(nodes.head(summary.between), nodes.rows(summary.between))
        for sentence in said:
            sheet.say(sentence)


def _of_tasks(part: ClassSummary) -> list[str]:
    return [] if part.sessions is None else [", ".join(phrases) for phrases in run_headline.tasks(part.sessions)]


def _target_statistics(targets: Sequence[TargetSummary]) -> list[tuple[str, ...]]:
    """Rows of minimum, maximum, mean and median over the targets; the sum of rates only: latencies do not add up."""
    metrics = (
        ("output tokens/s", [headline(t).output for t in targets], True),
        ("requests/s", [headline(t).requests for t in targets], True),
        ("TTFT p50, ms", [t.ttft_ms.p50 for t in targets], False),
        ("TTFT p99, ms", [t.ttft_ms.p99 for t in targets], False),
        ("TPOT p50, ms", [t.tpot_ms.p50 for t in targets], False),
        ("TPOT p99, ms", [t.tpot_ms.p99 for t in targets], False),
    )
    rows = []
    for name, values, adds_up in metrics:
        if known := [value for value in values if value is not None]:
            figures = (min(known), max(known), statistics.fmean(known), statistics.median(known))
            total = format.quantity(sum(known)) if adds_up else format.NONE
            rows.append((name, *map(format.quantity, figures), total))
    return rows


def _client(sheet: page.Page, summary: Summary, figures: Figures | None) -> None:
    sheet.section("The load generator itself", id="client")
    sheet.say(f"{', '.join(run_headline.client_use(summary))}.")
    _distributions(sheet, run_headline.own_times(summary))
    if figures is not None:
        sheet.charts(run_charts.client(figures, summary))


def _definitions(sheet: page.Page) -> None:
    sheet.section("Definitions", id="definitions")
    with sheet.details("What every word here means"):
        sheet.table(("metric", "is"), DEFINITIONS, "words")


def _reproduction(sheet: page.Page, summary: Summary, header: Header | None) -> None:
    run, fingerprints = summary.run, summary.fingerprints
    rtt = f"{format.milliseconds(summary.rtt_ms)} ms without load" if summary.rtt_ms is not None else ""
    sheet.section("How to reproduce", id="again")
    sheet.add(f"<pre>{escape(shlex.join(run.command))}</pre>")
    host, limits = run.host, summary.verdict.limits
    sheet.facts(
        Seed="" if run.seed is None else str(run.seed),
        Schedule="" if run.schedule_seed is None else f"seed {run.schedule_seed}",
        Salt=header.salt if header is not None else "",
        Recipe=fingerprints.recipe,
        Prompts=fingerprints.prompts,
        Timetable=fingerprints.timetable,
        Bodies=fingerprints.bodies,
        Client=(
            run.client,
            run.api,
            "streamed" if run.stream else "not streamed",
            {"compiled": "sockets read by compiled code", "python": "sockets read by Python"}.get(host.hot_path, ""),
        ),
        Tokenizer=f"{run.tokenizer} ({run.tokenizer_tag})" if run.tokenizer else "",
        Connect=rtt,
        Machine=(host.name, host.cpu, f"{host.cpus} CPUs" if host.cpus else "", host.kernel),
        Clock=host.clock,
        Versions=(f"Python {host.python}", *(f"{name} {version}" for name, version in host.versions.items())),
        Limits=f"send lag {format.percent(limits.send_lag_share)}, stamp error "
        f"{format.percent(limits.stamp_error_share)} of TTFT p50; CPU {format.percent(limits.cpu_share)}; "
        f"failures {format.percent(limits.failure_share)}; error of the gaps between events "
        f"{format.percent(limits.event_error_share)} of ITL p50; error of TPOT "
        f"{format.percent(limits.tpot_error_share)} of TPOT p50",
    )
    if header is not None and header.source_text:
        with sheet.details(f"Workload file, {run.workload}"):
            sheet.add(f"<pre>{escape(header.source_text)}</pre>")
    sheet.say(
        "Equal recipes may be compared; equal prompts and timetable are the same load to the byte. Without a seed each "
        "run draws its own, which is the better experiment.",
        "soft",
    )
