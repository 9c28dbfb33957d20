"""A run's summary as tables for a terminal: what was tested, what was measured, whether the figures can be trusted.

Pure: takes a `Summary`, returns a string of at most WIDTH columns. Names may be wider: a URL is never cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from loadgen.core import format
from loadgen.core.metrics.blocks import RequestCounts
from loadgen.core.metrics.drift import Drift
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.headline import headline
from loadgen.core.metrics.parts import ClassSummary, ModelSummary, StageSummary, TargetSummary
from loadgen.core.metrics.reasons import STATES
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.sustainable import Sustainable
from loadgen.core.metrics.validity import is_host_busy
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.server_metrics.series import Served
from loadgen.present import table
from loadgen.present.table import WIDTH, wrapped
from loadgen.runs import nodes, stimulus
from loadgen.runs.headline import (
    STEP_HEAD,
    STEPS_WORDS,
    about_latency,
    class_share,
    client_use,
    distribution_cells,
    latencies,
    met_word,
    needed,
    own_times,
    part_cells,
    quantile_ms,
    request_counts,
    step_rows,
    table_words,
    target_name,
    tasks,
    term_cells,
)
from loadgen.runs.splits import slow_lines, split_lines

LABEL = 11  # width of the left column
SHOWN = ("p50", "p90", "p95", "p99")  # p99.9 and the minimum are in the JSON


def render(summary: Summary, *, color: bool = False) -> str:
    """The whole report, ending in a newline. The first line says what was tested; the last lines are the verdict."""
    paint = _ansi if color else _plain
    blocks = (
        _heading(summary, paint),
        _counts(summary),
        _latency(summary),
        split_lines(summary.splits),
        slow_lines(summary),
        _tokens(summary),
        parts(summary),
        _slo(summary.goodput, headline(summary).goodput, paint),
        _errors(summary.requests),
        _verdict(summary, paint),
    )
    return "\n\n".join("\n".join(lines) for block in blocks if (lines := list(block))) + "\n"


def render_levels(summaries: Sequence[Summary], *, color: bool = False) -> str:
    """A table with one line per summary, for a run with several load levels: `--concurrency 1,2,4,8`."""
    paint = _ansi if color else _plain
    latencies = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50")
    head = ("load", "ok", "requests/s", "tokens/s", *latencies, "goodput")
    rows = [
        (
            summary.load.arrival or format.NONE,
            format.count(summary.requests.ok),
            format.quantity(headline(summary).requests),
            format.quantity(headline(summary).output),
            *(quantile_ms(d, quantile) for d in (summary.ttft_ms, summary.tpot_ms) for quantile in ("p50", "p99")),
            quantile_ms(summary.e2e_ms, "p50"),
            format.percent(summary.goodput.share),
        )
        for summary in summaries
    ]
    lines = table.text(head, rows)
    mark = ["SIMULATED, not a real server"] if any(summary.target.simulated for summary in summaries) else []
    for i, summary in enumerate(summaries):
        if not summary.verdict.valid:
            lines[i + 1] += "  " + paint("INVALID", "red")
        elif summary.goodput.met is False:
            lines[i + 1] += "  " + paint("SLO missed", "yellow")
        elif summary.goodput.undecided:
            lines[i + 1] += "  " + paint("SLO undecided", "yellow")
    steady = all(headline(summary).steady for summary in summaries)
    when = "while load was offered" if steady else "while load was offered where that was known, else of the whole run"
    lines.append(f"latencies in ms; requests/s and output tokens/s {when}")
    if needs := needed([d for s in summaries for d in (s.ttft_ms, s.tpot_ms, s.e2e_ms)], ("p50", "p99")):
        lines.append(f"~ rests on too few samples; needed: {needs}")
    return "\n".join([*mark, *lines]) + "\n"


_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}


def _ansi(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def _plain(text: str, colour: str) -> str:
    return text


def _labelled(label: str, parts: Sequence[str]) -> list[str]:
    """`label` on the left, the non-empty parts on the right. Lines break between parts; inside only a very long one."""
    room = WIDTH - LABEL
    words = ", ".join(part if len(part) >= room else part.replace(" ", "\u00a0") for part in parts if part)
    lines = wrapped(words, f"{label:<{LABEL}}", " " * LABEL)
    return [line.replace("\u00a0", " ") for line in lines] or [label]


def _bullets(sentences: Sequence[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from wrapped(sentence, "  - ", "    ")


def _heading(summary: Summary, paint: Callable[[str, str], str]) -> Iterator[str]:
    target, run = summary.target, summary.run
    mark = paint("SIMULATED, not a real server:", "yellow") + " " if target.simulated else ""
    yield mark + paint(" · ".join(filter(None, (_target_name(target), target.model, summary.load.arrival))), "bold")
    gpus = "" if target.gpus is None else format.counted(target.gpus, "GPU")
    rtt = f"connect time {format.milliseconds(summary.rtt_ms)} ms without load" if summary.rtt_ms is not None else ""
    seed = f"seed {run.seed}" if run.seed is not None else ""
    yield from _labelled("Run", [f"{run.workload or run.name}: {run.id}", seed, f"loadgen {run.version}"])
    yield from _labelled("", [gpus, target.shape, target.region, rtt])
    if target.software:
        yield from _labelled("Software", target.software)
    if summary.hardware is not None:
        yield from _labelled("Hardware", summary.hardware.words)
    for head, texts in format.said(run.metadata).items():
        yield from _labelled(head, texts)
    if run.state != "finished":
        yield " " * LABEL + paint(STATES.get(run.state, run.state), "yellow")


def _target_name(target: TargetFacts) -> str:
    server = f" ({target.server})" if target.server else ""
    if target.name and target.url and target.name != target.url:
        return f"{target.name} at {target.url}{server}"
    return (target.name or target.url or "unknown target") + server


def _counts(summary: Summary) -> Iterator[str]:
    load, window = summary.load, summary.window
    yield from _labelled("Requests", request_counts(summary))
    rates = [f"offered {format.rate(load.offered_rps)}"] if load.offered_rps is not None else []
    if rates and summary.sessions is not None and load.steady_completed_rps is not None:
        rates[0] += (
            " up to the last request"  # which is due after the last start, where load is no longer said to be on
        )
    rates += [f"sent {format.rate(load.achieved_rps)}", f"completed {format.rate(headline(summary).requests)}"]
    if load.steady_completed_rps is not None:
        rates[-1] += f" while load was offered ({format.rate(load.completed_rps)} whole run)"
    rates.append(f"in flight {format.quantity(load.in_flight_mean)} mean, {format.count(load.in_flight_max)} at most")
    if load.gap_variation is not None:
        rates.append(f"gap variation {load.gap_variation:.2f} (planned {load.gap_variation_planned or 0:.2f})")
    yield from _labelled("Load", rates)
    yield from _labelled("", stimulus.texts(summary.stimulus))
    times = [f"{format.duration(window.duration_s)} measured"]
    if window.steady.duration_s is not None:
        times.append(f"{format.duration(window.steady.duration_s)} of it with load offered")
    yield from _labelled("Time", times)
    yield from _drift(summary.drift)
    yield from sustained(summary.sustainable)
    if summary.sessions is not None:
        for number, phrases in enumerate(tasks(summary.sessions)):
            yield from _labelled("" if number else "Tasks", phrases)


def _drift(drift: Drift) -> Iterator[str]:
    """How the last third of a run differs from its first third.

    Nothing for blocks shorter than 2 s: in about half a minute, the difference mostly shows how a run starts.
    """
    if (drift.block_s or 0) < 2:
        return
    changes = [
        (name, getattr(drift, field))
        for name, field in (
            ("TTFT p50", "ttft_p50"),
            ("p99", "ttft_p99"),
            ("TPOT p50", "tpot_p50"),
            ("p99", "tpot_p99"),
            ("E2E p99", "e2e_p99"),
            ("output tokens/s", "output_per_s"),
        )
    ]
    parts = [f"{name} {change * 100:+.1f} %" for name, change in changes if change is not None]
    if parts:
        yield from _labelled("Drift", ["last third of the time against the first: " + parts[0], *parts[1:]])


SUSTAINED = {True: "yes", False: "NO", None: "not known"}


def sustained(found: Sustainable) -> Iterator[str]:
    """Whether the load could go on for ever, with the reason."""
    text = f"{SUSTAINED[found.sustained]}: {found.why}"
    yield from wrapped(text, f"{'Sustained':<{LABEL}}", " " * LABEL)


def _latency(summary: Summary) -> Iterator[str]:
    errors = [(row, found) for row, found in own_times(summary) if found.max or not row.under]
    rows = [
        (f"  {row.under}" if row.under else table_words(row), found) for row, found in (*latencies(summary), *errors)
    ]
    head = ("Latency, ms", "mean", *SHOWN, "max", "samples")
    yield from table.text(head, [(name, *distribution_cells(distribution, SHOWN)) for name, distribution in rows])
    if needs := needed([distribution for _, distribution in rows], SHOWN):
        yield f"~ rests on too few samples; needed: {needs}"
    for sentence in about_latency(summary):
        yield from wrapped(sentence)


def _tokens(summary: Summary) -> Iterator[str]:
    tokens = summary.tokens
    asked_share = "" if summary.cache_asked is None else f", {format.percent(summary.cache_asked)} asked for"
    cached = f" ({format.percent(tokens.cached_share)} cached{asked_share})" if tokens.cached_share is not None else ""
    requested = (
        f" of {format.count(tokens.asked_output)} asked" if tokens.asked_output not in (None, tokens.output) else ""
    )
    chunks = ""
    if summary.chunks is not None:
        chunks = f"chunks: {format.percent(summary.chunks.reused_share)} came before, "
        chunks += f"{format.percent(summary.chunks.leading_share)} after the same chunks"
    counters = " + ".join(tag for tag in tokens.sources.output if tag not in ("none", "unasked"))
    totals = [f"{format.count(tokens.input)} in{cached}", f"{format.count(tokens.output)} out{requested}"]
    yield from _labelled("Tokens", [*totals, chunks, f"output counted by: {counters}" if counters else ""])
    shown = headline(summary)
    rates = [f"{format.rate(shown.output)} output", f"{format.rate(shown.total)} input + output"]
    if shown.steady:
        rates[-1] += " while load was offered"
        rates += [
            f"whole run {format.rate(tokens.output_per_s)} output",
            f"{format.rate(tokens.total_per_s)} input + output",
        ]
    yield from _labelled("", rates)
    if shown.output_per_gpu is not None:
        each = f"{format.rate(shown.output_per_gpu)} output per GPU"
        if shown.steady:
            each += f" while load was offered ({format.rate(tokens.output_per_s_per_gpu)} whole run)"
        yield from _labelled("", [each, format.counted(summary.target.gpus, "GPU")])
    yield from _labelled("Client", client_use(summary))
    if summary.server is not None:
        yield from _labelled("Server", server_says(summary.server))
    if summary.energy is not None:
        yield from _labelled("Energy", energy_says(summary.energy))


def energy_says(used: EnergyUse) -> list[str]:
    """Phrases about the energy of the steady load: the figures per token and request, measured beside declared."""
    if used.joules is None or used.watts is None:
        return [used.why or "nothing says what the accelerators used"]
    error = 0.0 if not used.joules else (used.error_j or 0.0) / used.joules
    phrases = []
    if used.joules_per_output_token is not None:
        phrases.append(f"{format.quantity(used.joules_per_output_token)} J/output token (± {format.percent(error)})")
    if used.joules_per_request is not None:
        phrases.append(f"{format.quantity(used.joules_per_request)} J/request")
    if used.output_tokens_per_s_per_watt is not None:
        phrases.append(f"{format.quantity(used.output_tokens_per_s_per_watt)} output tokens/s per W")
    watts = f"{format.quantity(used.watts)} W mean"
    watts += "" if used.watts_max is None else f", {format.quantity(used.watts_max)} W at most"
    phrases.append(
        watts + ("" if used.declared_watts is None else f" ({format.quantity(used.declared_watts)} declared)")
    )
    if used.clock_mhz is not None and used.clock_min_mhz is not None:
        phrases.append(f"clock {used.clock_mhz:,.0f} MHz mean, {used.clock_min_mhz:,.0f} at least")
    phrases += [f"{reason} at {format.percent(share)} of the readings" for reason, share in used.throttled.items()]
    if used.memory_used_gib is not None:
        phrases.append(f"memory {format.quantity(used.memory_used_gib)} GiB at most")
    if used.host_joules is not None and used.window_s:
        phrases.append(f"host {format.quantity(used.host_joules / used.window_s)} W")
    devices = "" if used.devices is None else f", {format.counted(used.devices, 'GPU')}"
    return [*phrases, f"by {used.source}{devices}"]


def server_says(server: Served) -> list[str]:
    """Phrases about the servers' own metrics. The first compares their count of output tokens with the client's."""
    phrases = []
    server_count, client_count = server.output_tokens, server.client_output_tokens
    if server_count is not None:
        client_phrase = "the client as many"
        if client_count is None:
            client_phrase = "the client's is not known"
        elif server_count != client_count:
            client_phrase = f"the client {format.count(client_count)} ({format.difference(client_count, server_count)})"
        phrases.append(f"{format.counted(server_count, 'output token')} by its own count, {client_phrase}")
    if server.running_max is not None:
        phrases.append(f"at most {format.count(server.running_max)} running")
    if server.waiting_max is not None:
        phrases.append(f"{format.count(server.waiting_max)} queued")
    if server.kv_use_max is not None:
        phrases.append(f"KV cache {format.percent(server.kv_use_max)} full at most")
    reads, failed = (sum(getattr(page, name) for page in server.pages) for name in ("reads", "failed"))
    return [*phrases, format.counted(reads, "read") + (f", {format.count(failed)} of them failed" if failed else "")]


def parts(summary: Summary) -> Iterator[str]:
    """Lines about stages, when several are measured, classes, and targets with both totals, when there are several."""
    head = ("ok", "failed", "requests/s", "output tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")

    def rows(
        title: str, named: Sequence[tuple[str, StageSummary | TargetSummary | ClassSummary | ModelSummary]]
    ) -> list[str]:
        cells = [(textwrap.shorten(name, 28, placeholder="..."), *part_cells(part)) for name, part in named]
        return table.text((title, *head), cells)

    if summary.steps:
        yield from table.text(("Steps of a task", *STEP_HEAD), step_rows(summary))
        yield from wrapped(STEPS_WORDS)
    stages = [stage for stage in summary.stages if stage.measured]
    if len(stages) > 1:
        yield from rows("Stages", [(stage.name or stage.arrival, stage) for stage in stages])
    if summary.classes:
        yield from rows("Classes", [(part.name, part) for part in summary.classes])
        if summary.models:
            yield from rows("Models", [(part.model, part) for part in summary.models])
        shares = (
            f"{part.name} {format.percent(class_share(summary, part))} ({format.percent(part.share)} asked)"
            for part in summary.classes
        )
        of_what = "starts (requests, conversations, tasks)" if summary.sessions is not None else "requests"
        yield from wrapped(f"of the {of_what}: {', '.join(shares)}", "  ", "  ")
        for part in summary.classes:
            if part.sessions is not None:
                for phrases in tasks(part.sessions):
                    yield from wrapped(f"{part.name}: {', '.join(phrases)}", "  ", "    ")
        if summary.goodput.has_slo and not summary.goodput.slo:
            terms = [(part.name, term) for part in summary.classes for term in part.goodput.slo]
            lines = table.text(("", "", "", ""), [(name, *term_cells(term, "over")) for name, term in terms])[1:]
            for (_, term), line in zip(terms, lines, strict=True):
                yield f"  {line}  {met_word(term.met)}"
    if summary.targets:
        yield from rows("Targets", [(target_name(part), part) for part in summary.targets])
    if summary.regions:
        yield from rows("Regions", [(part.target.region or "not given", part) for part in summary.regions])
    if summary.nodes:
        yield from rows("Nodes", [(part.target.node or "not given", part) for part in summary.nodes])
    if summary.between.variances:
        yield from table.text(nodes.head(summary.between), nodes.rows(summary.between))
    for sentence in nodes.sentences(summary.between):
        yield from wrapped(sentence)
    if summary.rack is not None:
        rack = summary.rack
        yield "Rack, output tokens/s"
        totals = [
            (f"  sum of {rack.targets} rates, each over its own time", format.quantity(rack.sum_of_rates_per_s)),
            ("  all tokens over one clock", format.quantity(rack.single_clock_per_s)),
        ]
        yield from table.text(("", ""), totals)[1:]
        rates = (rack.min_per_s, rack.mean_per_s, rack.median_per_s, rack.max_per_s)
        statistics = zip(("min", "mean", "median", "max"), rates, strict=True)
        per_target = ", ".join(f"{name} {format.quantity(value)}" for name, value in statistics)
        yield f"  of a target {per_target}, spread {format.percent(rack.spread)}"


def _slo(goodput: Goodput, good_per_s: float | None, paint: Callable[[str, str], str]) -> Iterator[str]:
    if not goodput.has_slo:
        return
    colours = {True: "green", False: "red", None: "yellow"}
    result, colour = met_word(goodput.met), colours[goodput.met]
    share_limit = f", promised {format.percent(goodput.share_limit)}" if goodput.share_limit is not None else ""
    limits = "every limit" if all(term.met is not None for term in goodput.slo) else "the limits that can be judged"
    limits = limits if goodput.slo else "every limit of their class"
    if goodput.good is None or not _judges_requests(goodput):
        text = f"{result}: no term is missed, but not every term can be decided{share_limit}"
        if goodput.met is False:
            text = f"{result}: how many requests were within every limit is not known{share_limit}"
    else:
        text = f"{result}: {format.count(goodput.good)} of {format.counted(goodput.counted, 'request')} within {limits}"
        text += f" ({format.percent(goodput.share)}{share_limit})"
    text += f", {format.count(goodput.unfinished)} unfinished left out" if goodput.unfinished else ""
    first, *others = _labelled("SLO", [text, f"goodput {format.rate(good_per_s)}"])
    yield first.replace(result, paint(result, colour), 1)
    yield from others
    lines = table.text(("", "", ""), [term_cells(term, "over") for term in goodput.slo])[1:]
    for term, line in zip(goodput.slo, lines, strict=True):
        yield f"  {line}  {paint(met_word(term.met), colours[term.met])}"
    for reason in dict.fromkeys(term.undecided for term in goodput.slo if term.undecided):
        yield from wrapped(f"undecided: {reason}", "  ", "    ")


def _judges_requests(goodput: Goodput) -> bool:
    """Whether the count of good requests says something: some term that every request can have is decided.

    Where each class has its own SLO, the terms stand with the classes.
    """
    return goodput.good is not None and (not goodput.slo or any(not term.undecided for term in goodput.slo))


def _errors(requests: RequestCounts) -> Iterator[str]:
    if not requests.by_error:
        return
    yield "Errors"
    longest = max(len(kind) for kind in requests.by_error)
    for kind, error in requests.by_error.items():
        printable = "".join(letter if letter.isprintable() else " " for letter in error.first_text)
        line = f"  {kind:<{longest}}  {format.count(error.count):>7}  {' '.join(printable.split())}"
        yield line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _verdict(summary: Summary, paint: Callable[[str, str], str]) -> Iterator[str]:
    verdict = summary.verdict
    warnings = verdict.warnings if verdict.valid else (*verdict.caveats, *verdict.warnings)
    if warnings:
        yield paint("Warnings", "yellow")
        yield from _bullets(warnings)
    if verdict.valid and verdict.caveats:
        yield f"{paint('VALID', 'yellow')}, with a reservation:"
        yield from _bullets(verdict.caveats)
    elif verdict.valid:
        yield f"{paint('VALID', 'green')}: the measurement is sound"
    elif is_host_busy(verdict):
        requests, tokens = summary.requests, summary.tokens
        yield f"{paint('INVALID', 'yellow')}: this host was too busy to measure with"
        yield from _bullets(verdict.reasons)
        yield from _bullets([
            f"measured: {format.count(requests.ok)} of {format.counted(requests.scheduled, 'request')} were answered, "
            f"with {format.counted(tokens.output, 'output token')}; counts and errors stand",
            "not measured: latencies, and what rests on them; they say as much of this host as of the server",
        ])  # fmt: skip
    else:
        yield f"{paint('INVALID', 'red')}: do not rely on these numbers"
        yield from _bullets(verdict.reasons)
    yield from wrapped(summary.causes.text)
