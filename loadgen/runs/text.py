"""What a run says: what was tested, what was measured, whether the figures can be trusted. Pure.

A `Summary` in, the report of text, Markdown and page out. What only a page has is made in `page.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from loadgen.core import format
from loadgen.core.execution import staggered_start
from loadgen.core.metrics.drift import Drift
from loadgen.core.metrics.machines import MachineSummary
from loadgen.core.metrics.part_summaries import (
    ClassSummary,
    ModelSummary,
    StageSummary,
    TargetSummary,
)
from loadgen.core.metrics.request_counts import RequestCounts
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.core.metrics.sustainable import Sustainable
from loadgen.core.results.manifest import RunManifest, TargetFacts
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.stats.quantiles import Distribution, needed_samples
from loadgen.figures import MetricDefinition
from loadgen.render import text as as_text
from loadgen.render.additions import ExtraSections
from loadgen.render.page import Tile
from loadgen.render.section import (
    Bullets,
    Facts,
    Notice,
    PageOnly,
    Paragraph,
    Report,
    Section,
    Table,
    Tiles,
    named_facts,
    section,
    simulated_notice,
)
from loadgen.repeated.capacity import rate_unit
from loadgen.runs import (
    fairness,
    nodes,
    page,
    recovery,
    sections,
    speculation,
    splits,
    stimulus,
    within,
)
from loadgen.runs import headline as run_headline
from loadgen.runs.headline import is_host_busy
from loadgen.runs.page_data import Figures
from loadgen.runs.rates import headline, whole_run_rates

QUANTILES = ("p50", "p90", "p95", "p99", "p99_9")
OF_LEVELS = ("p50", "p99")
SUSTAINED = {True: "yes", False: "NO", None: "not known"}
LONGEST_WORD = 60  # characters of a word that a server has said


def render(summary: Summary, *, color: bool = False) -> str:
    """The report of a run as text, without what a page alone draws."""
    return as_text.render(report(summary), color=color)


def report(
    summary: Summary,
    manifest: RunManifest | None = None,
    figures: Callable[[], Figures] | None = None,
    said: Sequence[MetricSample] = (),
    additions: Sequence[ExtraSections] = (),
) -> Report:
    """The whole report. Without `manifest` and `figures` (when only a summary was kept) a page has no charts.

    said: samples of the servers' own metrics. additions: what other kinds of results say of this run.
    """
    run = summary.run
    numbers: Sequence[Tile] = run_headline.five(summary)
    added = [one for addition in additions for one in addition.headline()]
    verdict = _verdict(summary)  # what others say of the run comes behind it, and is the last word
    before = (
        () if verdict is None else (Paragraph(f"{verdict.label}: {verdict.text}", verdict.kind),)
    )
    for addition in additions:
        numbers = numbers if addition.replace_tiles is None else addition.replace_tiles(numbers)
    return Report(
        title=" · ".join(
            filter(None, (_target(summary.target), summary.target.model, summary.load.arrival))
        ),
        page_title=f"{run.workload or run.name}: {run.id}",
        generated_by=f"loadgen {run.version} report",
        notices=[
            *(Notice(*note) for note in run_headline.marks(summary)),
            *(one for addition in additions for one in addition.notices),
        ],
        headline=[*_answer(summary), *(before if added else ()), *added],
        headline_last=True,
        verdict=None if added else verdict,
        sections=[
            section("", Tiles(numbers), page_only=True),
            *page.first_look(summary, figures),
            section("", _facts(summary), folded="What was run, against what"),
            section("Warnings", Bullets(summary.verdict.warnings, "warn"), small=True),
            *(one for addition in additions for one in addition.sections),
            *_latency(summary, figures),
            *splits.sections(summary, figures),
            *page.over_time(summary, figures),
            *speculation.sections(summary),
            *_server(summary, figures, said),
            *page.delivered(summary, figures),
            *_errors(summary.requests),
            *_finishes(summary.requests),
            *page.errors(summary, figures),
            *parts(summary),
            *_client(summary, figures),
            *(addition.appendix for addition in additions if addition.appendix is not None),
            *page.end(summary, manifest),
        ],
    )


def levels(summaries: Sequence[Summary]) -> Section:
    """A table with one row per summary, for a run with several load levels: `--concurrency 1,2,4,8`."""
    latencies = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50")
    rows = [
        (
            run_headline.brief(summary.load.arrival) or format.NONE,
            format.count(summary.requests.ok),
            format.quantity(headline(summary).requests),
            format.quantity(headline(summary).output),
            *(
                run_headline.quantile_ms(d, q)
                for d in (summary.ttft_ms, summary.tpot_ms)
                for q in OF_LEVELS
            ),
            run_headline.quantile_ms(summary.e2e_ms, "p50"),
            format.percent(summary.goodput.share),
            _outcome(summary),
        )
        for summary in summaries
    ]
    windows = dict.fromkeys(headline(summary).window for summary in summaries)
    names_of_windows = " (a load without one: ".join(sorted(windows, reverse=True))
    closing = ")" if len(windows) > 1 else ""
    needs = run_headline.needed(
        [d for s in summaries for d in (s.ttft_ms, s.tpot_ms, s.e2e_ms)], OF_LEVELS
    )
    mark = simulated_notice()
    return section(
        "",
        f"{mark.label}: {mark.text}"
        if any(summary.target.simulated for summary in summaries)
        else "",
        Table(
            ("load", "ok", "requests/s", "tokens/s", *latencies, "SLO attainment", ""),
            rows,
            "remarks",
        ),
        Paragraph(
            "Latencies are in ms. Requests/s and output tokens/s are those of the "
            f"{names_of_windows}{closing}.",
            "soft",
        ),
        _needed(needs),
    )


def _outcome(summary: Summary) -> str:
    if not summary.verdict.valid:
        return "INVALID"
    if summary.goodput.met is False:
        return "SLO missed"
    if fails_by_errors(summary):
        return "errors"
    return "SLO undecided" if summary.goodput.undecided else ""


# -- what comes first, and last --------------------------------------------------------------------------------------


def _target(target: TargetFacts) -> str:
    server = f" ({target.server})" if target.server else ""
    if target.name and target.url and target.name != target.url:
        return f"{target.name} at {target.url}{server}"
    return (target.name or target.url or "unknown target") + server


def _answer(summary: Summary) -> Iterator[Paragraph]:
    verdict, requests = summary.verdict, summary.requests
    busy = is_host_busy(verdict)
    doubtful = busy or summary.goodput.undecided or bool(verdict.caveats)
    missed = summary.goodput.met is False or fails_by_errors(summary)
    bad = missed or not (verdict.valid or busy)
    yield Paragraph(
        run_headline.sentence(summary), "bad" if bad else "warn" if doubtful else "good", large=True
    )
    if verdict.valid:
        return
    if busy:
        yield Paragraph(
            f"INVALID: this host was too busy to measure with: {'; '.join(verdict.reasons)}", "warn"
        )
        yield Paragraph(
            f"measured: {format.count(requests.ok)} of {format.counted(requests.scheduled, 'request')} were answered, "
            f"with {format.counted(summary.tokens.output, 'output token')}; counts and errors stand"
        )
        yield Paragraph(
            "not measured: latencies, and what rests on them; they say as much of this host as of the server"
        )
    else:
        yield Paragraph(f"INVALID: {'; '.join(verdict.reasons)}", "bad")


def _verdict(summary: Summary) -> Notice | None:
    """That the measurement is sound; of one that is not the answer says it, with the reasons."""
    if not summary.verdict.valid:
        return None
    if caveats := summary.verdict.caveats:
        return Notice("VALID, with a reservation", "; ".join(caveats))
    return Notice("VALID", "the measurement is sound", "good")


def _facts(summary: Summary) -> Facts:
    run, target, window = summary.run, summary.target, summary.window
    rtt = run_headline.connect(summary)
    rtt = f"connect time {rtt}" if rtt else ""
    return named_facts(
        Target=_target(target),
        Model=target.model,
        Run=(
            f"{run.workload or run.name}: {run.id}",
            "" if run.seed is None else f"seed {run.seed}",
            f"loadgen {run.version} on {run.host.name or 'an unnamed host'}",
        ),
        Machine=(
            "" if target.gpus is None else format.counted(target.gpus, "GPU"),
            target.shape,
            target.region,
            rtt,
        ),
        Software=target.software,
        Hardware=[] if summary.hardware is None else summary.hardware.words,
        **format.said(run.metadata),
        Requests=run_headline.request_counts(summary),
        Load=list(_load(summary)),
        Delivered=stimulus.texts(summary.stimulus),
        Time=(
            run.started.replace("T", " "),
            _lasted(window.duration_s, "measured"),
            _lasted(window.steady.duration_s, "of it in steady state"),
            _lasted(window.whole.duration_s, "in all"),
        ),
        Drift=_drift(summary.drift),
        Sustained=sustained(summary.sustainable),
        Tasks=[", ".join(line) for line in run_headline.tasks(summary.sessions)]
        if summary.sessions
        else [],
        Tokens=_tokens(summary),
        Output=_rates(summary),
    )


def _lasted(duration_s: float | None, suffix: str) -> str:
    return "" if duration_s is None else f"{format.duration(duration_s)} {suffix}"


def _starts(summary: Summary) -> Iterator[str]:
    """Yield how the virtual users of a closed loop started: staggered, or all at once."""
    texts = (
        staggered_start.describe_start(stage.ramp_s, stage.ramp_from, stage.concurrency)
        for stage in summary.stages
    )
    yield from dict.fromkeys(filter(None, texts))


def _load(summary: Summary) -> Iterator[str]:
    load = summary.load
    of_tasks = (
        summary.sessions is not None and load.offered_rps is not None
    )  # their rate is not that of requests
    if load.arrival:
        yield f"{load.arrival} ({rate_unit(summary)})" if of_tasks else load.arrival
    yield from _starts(summary)
    if load.offered_rps is not None:
        # the last request is due after the last start, where load is no longer said to be on
        later = " up to the last request" * (of_tasks and load.steady_completed_rps is not None)
        yield f"{'requests ' * of_tasks}offered {format.rate(load.offered_rps)}{later}"
    yield f"sent {format.rate(load.achieved_rps)}"
    shown = headline(summary)
    whole_run = format.rate(whole_run_rates(summary).requests)
    yield f"completed {format.rate(shown.requests)} in the {shown.window} ({whole_run} whole run)"
    yield f"in flight {format.quantity(load.in_flight_mean)} mean, {format.count(load.in_flight_max)} at most"
    if load.gap_variation is not None:
        yield f"gap variation {load.gap_variation:.2f} (planned {load.gap_variation_planned or 0:.2f})"


_DRIFTS = (
    ("TTFT p50", "ttft_p50"),
    ("p99", "ttft_p99"),
    ("TPOT p50", "tpot_p50"),
    ("p99", "tpot_p99"),
    ("E2E p99", "e2e_p99"),
    ("output tokens/s", "output_per_s"),
)


def _drift(drift: Drift) -> list[str]:
    """How the last third of a run differs from its first third.

    Nothing for blocks shorter than 2 s: in about half a minute, the difference mostly shows how a run starts.
    """
    if (drift.block_s or 0) < 2:
        return []
    changes = [(name, getattr(drift, field)) for name, field in _DRIFTS]
    said = [f"{name} {change * 100:+.1f} %" for name, change in changes if change is not None]
    return (
        [f"last third of the steady-state window against the first: {said[0]}", *said[1:]]
        if said
        else []
    )


def sustained(found: Sustainable) -> str:
    """Whether the load could go on for ever, with the reason."""
    return f"{SUSTAINED[found.sustained]}: {found.why}"


def _tokens(summary: Summary) -> Iterator[str]:
    tokens, chunks = summary.tokens, summary.chunks
    asked_share = (
        ""
        if summary.requested_cache_share is None
        else f", {format.percent(summary.requested_cache_share)} asked for"
    )
    bound = (
        ""
        if summary.trace_cache_share is None
        else f"{format.percent(summary.trace_cache_share)} came before in the trace"
    )
    cached = (
        ""
        if tokens.cached_share is None
        else f"{format.percent(tokens.cached_share)} cached{asked_share}"
    )
    written = (
        ""
        if tokens.cache_written is None
        else f"{format.count(tokens.cache_written)} written to the cache"
    )
    said = ", ".join(filter(None, (cached, written, bound)))
    yield f"{format.count(tokens.input)} in{f' ({said})' if said else ''}"
    differs = tokens.asked_output not in (None, tokens.output)
    yield f"{format.count(tokens.output)} out" + (
        f" of {format.count(tokens.asked_output)} asked" if differs else ""
    )
    if chunks is not None:
        yield f"chunks: {format.percent(chunks.reused_share)} came before"
        yield f"{format.percent(chunks.leading_share)} after the same chunks"
    if counters := " + ".join(
        tag for tag in tokens.sources.output if tag not in ("none", "unasked")
    ):
        yield f"output counted by: {counters}"


def _rates(summary: Summary) -> Iterator[str]:
    shown = headline(summary)
    whole_run = whole_run_rates(summary)
    yield f"{format.rate(shown.output)} output"
    yield f"{format.rate(shown.total)} input + output in the {shown.window}"
    yield f"whole run {format.rate(whole_run.output)} output"
    if shown.output_per_gpu is not None:
        yield f"{format.rate(shown.output_per_gpu)} output per GPU in the {shown.window}"
        yield f"whole run {format.rate(whole_run.output_per_gpu)} output per GPU"


# -- latencies ---------------------------------------------------------------------------------------------------------


def _latency(
    summary: Summary, figures: Callable[[], Figures] | None
) -> Iterator[Section | PageOnly]:
    rows = run_headline.latencies(summary)
    needs = run_headline.needed([distribution for _, distribution in rows], QUANTILES)
    about = (Paragraph(sentence, "soft") for sentence in run_headline.about_latency(summary))
    yield section(
        "Latency",
        _distributions(rows, summary),
        _asked(summary, rows),
        _needed(needs),
        *about,
        id="latency",
    )
    yield sections.slo(summary)
    yield from within.sections(summary)
    yield from recovery.sections(summary.recovery, figures)
    yield from page.curves(summary, figures)


def _distributions(
    rows: Iterable[tuple[MetricDefinition, Distribution]], summary: Summary
) -> Table:
    """Return the table of latencies; statistics that are withheld are shown by their range."""
    head = ("ms", "mean", "p50", "p90", "p95", "p99", "p99.9", "max", "samples")
    cells = [
        (
            run_headline.table_words(row),
            *run_headline.distribution_cells(each, QUANTILES, _ranges(summary, row)),
        )
        for row, each in rows
    ]
    return Table(head, cells)


def _ranges(summary: Summary, row: MetricDefinition) -> Mapping[str, tuple[float, float]]:
    withheld = summary.withheld.get(row.name)
    return {} if withheld is None else withheld.ranges


def _asked(summary: Summary, rows: Iterable[tuple[MetricDefinition, Distribution]]) -> Table:
    """The percentiles that the user asked for; no table where there are none."""
    found = [
        (row, each.count, summary.percentiles[row.field])
        for row, each in rows
        if row.field in summary.percentiles
    ]
    names = list(dict.fromkeys(name for *_, quantiles in found for name in quantiles))

    def cell(name: str, count: int, quantiles: dict[str, float]) -> str:
        mark = "~" if count < needed_samples(float(name[1:].replace("_", ".")) / 100) else ""
        return mark + format.milliseconds(quantiles.get(name))

    head = ("asked for, ms", *(name.replace("_", ".") for name in names), "samples")
    cells = [
        (
            run_headline.table_words(row),
            *(cell(name, count, quantiles) for name in names),
            format.count(count),
        )
        for row, count, quantiles in found
    ]
    return Table(head, cells if names else [])


def _needed(needs: str) -> Paragraph:
    return Paragraph(f"~ rests on too few samples; needed: {needs}" if needs else "", "soft")


def _client(
    summary: Summary, figures: Callable[[], Figures] | None
) -> Iterator[Section | PageOnly]:
    used = f"{', '.join(run_headline.client_use(summary))}."
    times = _distributions(run_headline.own_times(summary), summary)
    yield section(
        "The load generator itself",
        used,
        times,
        _machines(summary.machines),
        folded=True,
        id="client",
    )
    yield from page.client(summary, figures)


def _machines(machines: Sequence[MachineSummary]) -> Table:
    head = (
        "machine",
        "workers",
        "requests",
        "lost",
        "late",
        "send lag p50, ms",
        "p99",
        "cores",
        "busiest",
    )
    rows = [
        (
            f"{one.name}{', ' if one.state else ''}{one.state}",
            str(one.workers),
            *(format.count(value) for value in (one.requests, one.lost, one.late)),
            *(run_headline.quantile_ms(one.send_lag_ms, quantile) for quantile in OF_LEVELS),
            format.quantity(one.cores),
            format.percent(one.cpu_share_max),
        )
        for one in machines
    ]
    return Table(head, rows)


# -- the servers -------------------------------------------------------------------------------------------------------


def _server(
    summary: Summary, figures: Callable[[], Figures] | None, said: Sequence[MetricSample]
) -> Iterator[Section | PageOnly]:
    if summary.server is not None:
        words = f"{', '.join(run_headline.server_says(summary.server))}."
        yield section("What the server says of itself", words, folded=True, id="server")
        yield from page.server(summary.server, figures, said)
    if summary.energy is not None:
        words = f"{', '.join(run_headline.energy_says(summary.energy))}."
        yield section("What the hardware used", words, id="energy")
        yield page.energy(summary.energy)


def _errors(requests: RequestCounts) -> Iterator[Section]:
    rows = [
        (kind, format.count(error.count), _of_server(error.first_text))
        for kind, error in requests.by_error.items()
    ]
    if rows:
        yield section(
            "Errors",
            Table(("kind", "requests", "first words about it"), rows, "remarks"),
            id="errors",
        )


def _finishes(requests: RequestCounts) -> Iterator[Section]:
    rows = [
        (reason, format.count(n), format.percent(n / requests.ok))
        for reason, n in requests.by_finish.items()
    ]
    said = "Of the ok requests, as the server gave it. length: the asked length, or a limit, was reached."
    yield section(
        "How answers ended",
        Table(("finish reason", "requests", "share"), rows),
        *([said] if rows else []),
    )


def _of_server(words: str) -> str:
    """What a server has said as one line, no word of which is wider than a column of sentences has room."""
    printable = "".join(letter if letter.isprintable() else " " for letter in words).split()
    return " ".join(
        word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..."
        for word in printable
    )


# -- stages, classes, targets ------------------------------------------------------------------------------------------

Part = StageSummary | TargetSummary | ClassSummary | ModelSummary
HEAD = (
    "ok",
    "failed",
    "req/s",
    "out tok/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "SLO attainment",
)


def _table(title: str, named: Iterable[tuple[str, Part]]) -> Table:
    cells = [
        (name, *run_headline.part_cells(part), format.percent(part.goodput.share))
        for name, part in named
    ]
    return Table((title, *HEAD), cells)


def parts(summary: Summary) -> Iterator[Section]:
    """Steps of tasks, stages where several are measured, classes, and targets with both totals, where there are
    several.
    """
    steps = Table(("step", *run_headline.STEP_HEAD), run_headline.step_rows(summary))
    words = f"{run_headline.STEPS_WORDS.capitalize()}. Latencies in ms." if summary.steps else ""
    yield section("Steps of a task", steps, Paragraph(words, "soft"), id="steps")
    if len(summary.stages) > 1:
        several = sum(stage.measured for stage in summary.stages) > 1
        names = (
            " · ".join(filter(None, (stage.name, run_headline.brief(stage.arrival))))
            + " (not measured)" * (not stage.measured)
            for stage in summary.stages
        )
        rows = _table("stage", zip(names, summary.stages, strict=True))
        yield section("Stages", rows, page_only=not several, folded=not several, id="stages")
    if summary.classes:
        yield _classes(summary)
        yield fairness.tenants(summary.fairness)
    if summary.targets:
        yield _targets(summary)
    if said := nodes.sentences(summary.node_differences):
        rows = Table(nodes.head(summary.node_differences), nodes.rows(summary.node_differences))
        yield section("Between nodes", rows, *said, folded=True, id="nodes")


def _classes(summary: Summary) -> Section:
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
    of_what = (
        "starts (requests, conversations, tasks)" if summary.sessions is not None else "requests"
    )
    columns = (
        "class",
        "asked",
        "share",
        "model",
        "priority",
        "SLO: its terms, and what was measured",
    )
    return section(
        "Classes",
        _table("class", ((part.name, part) for part in summary.classes)),
        _table(
            "model",
            ((f"{part.model} ({', '.join(part.classes)})", part) for part in summary.models),
        ),
        Table(columns, asked, "prose"),
        Paragraph(f"Shares are of the {of_what}.", "soft"),
        id="classes",
    )


def _of_tasks(part: ClassSummary) -> list[str]:
    return (
        []
        if part.sessions is None
        else [", ".join(phrases) for phrases in run_headline.tasks(part.sessions)]
    )


def _targets(summary: Summary) -> Section:
    tables = [
        _table("target", ((run_headline.target_name(part), part) for part in summary.targets)),
        _table("region", ((part.target.region or "not given", part) for part in summary.regions)),
        _table("node", ((part.target.node or "not given", part) for part in summary.nodes)),
    ]
    rack = summary.rack
    if rack is None:  # they serve different steps of tasks
        return section("Targets", *tables, id="targets")
    totals = [
        (
            f"sum of {rack.targets} rates, each over its own time",
            format.quantity(rack.sum_of_rates_per_s),
        ),
        ("all tokens over one clock", format.quantity(rack.single_clock_per_s)),
        ("spread of the targets", format.percent(rack.spread)),
    ]
    columns = ("over the targets", "min", "max", "mean", "median", "sum")
    over = Table(columns, over_targets(summary.targets))
    window = Paragraph(
        "The rates of all targets cover the same window of the run, so that they add up.", "soft"
    )
    return section(
        "Targets", *tables, over, Table(("rack, output tokens/s", ""), totals), window, id="targets"
    )


def over_targets(targets: Sequence[TargetSummary]) -> list[tuple[str, ...]]:
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
