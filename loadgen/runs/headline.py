"""The result of a run in one sentence and five numbers, the warnings that no reader may miss, the cells of its tables.

Pure: takes a `Summary`, returns texts. Every page and message that states the result of a run uses these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from loadgen.core import format, slo
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.part_summaries import (
    ClassSummary,
    ModelSummary,
    StageSummary,
    TargetSummary,
)
from loadgen.core.metrics.reasons import STATES
from loadgen.core.metrics.slo_terms import TermResult
from loadgen.core.metrics.summary import Summary, fails_by_errors
from loadgen.core.metrics.task_summary import Sessions, TaskGoodput
from loadgen.core.metrics.timing_evidence import MIN_WAITED_SHARE
from loadgen.core.metrics.verdict import CLIENT_CODES, Verdict
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.server_metrics.series import Served
from loadgen.core.stats.quantiles import SUPPORT, Distribution
from loadgen.figures import METRICS, MetricDefinition
from loadgen.render.page import Tile
from loadgen.runs.rates import headline, headline_requests_per_s


class Note(NamedTuple):
    """A warning: its word in capitals, what it means for this run, how serious it is."""

    word: str
    text: str
    kind: Literal["bad", "warn"]


def brief(arrival: str) -> str:
    """A load where many stand in a table: "16 in flight" for "16 in flight (closed loop)"."""
    return arrival.replace(" (closed loop)", "").replace(" (closed loop, ", " (")


def client_limited(summary: Summary) -> bool:
    """Whether the load generator, not the server, may have determined the figures: by the reasons of the verdict."""
    return any(reason.code in CLIENT_CODES for reason in summary.verdict.codes)


def marks(summary: Summary) -> Iterator[Note]:
    """The warnings to show before any number."""
    if summary.target.simulated:
        yield Note(
            "SIMULATED",
            "a model of a server answered, no real one: nothing here was measured on hardware",
            "warn",
        )
    if not summary.verdict.valid and client_limited(summary):
        yield Note(
            "CLIENT-LIMITED",
            "the load generator could not keep up: these numbers are its own, in part",
            "bad",
        )
    if not summary.verdict.valid:
        kind: Literal["bad", "warn"] = "warn" if is_host_busy(summary.verdict) else "bad"
        yield Note("INVALID", "; ".join(summary.verdict.reasons), kind)
    for caveat, code in zip(summary.verdict.caveats, summary.verdict.caveat_codes, strict=True):
        if code.code != "withheld":  # all numbers that are shown are right
            yield Note("RESERVATION", caveat, "warn")
    if summary.sustainable.sustained is False:
        yield Note("NOT SUSTAINED", summary.sustainable.why, "warn")
    if word := _ENDS.get(summary.run.state):
        yield Note(word, f"{STATES[summary.run.state]}; reported as far as it got", "warn")


_ENDS = {
    "interrupted": "INTERRUPTED",
    "cut_off": "CUT OFF",
    "stopped": "ENDED EARLY",
    "decided": "ENDED EARLY",
}


def outcome(term: TermResult) -> str:
    """The measured value: `174 ms`; `~174 ms` with too few samples; or why there is no value."""
    if term.undecided and term.low_ms is None:
        return "no figure"
    if term.low_ms is not None and term.high_ms is not None:
        return f"{value_range(term.low_ms, term.high_ms)} ms"
    if term.value_ms is None:
        return "falls on one not answered" if term.count else "nothing measured"
    return f"{'' if term.supported else '~'}{format.milliseconds(term.value_ms)} ms"


def term_cells(term: TermResult, over: str = "") -> tuple[str, str, str]:
    """The promise of an SLO term, the measured value, and how many samples were `over` the limit."""
    counts = f"{format.count(term.over)} of {format.count(term.count)} {over}".rstrip()
    left_out = f", {format.count(term.unfinished)} unfinished" if term.unfinished else ""
    return term.promise, outcome(term), counts + left_out


def met_word(met: bool | None) -> str:
    """Whether an SLO, or a term of it, was met, in one word."""
    return "UNDECIDED" if met is None else "met" if met else "MISSED"


def is_judged(summary: Summary, met: bool | None) -> bool:
    """Return True unless the run is not valid, so that nothing is known of its SLO."""
    return summary.verdict.valid or met is not None


def judged_word(summary: Summary, met: bool | None) -> str:
    """`met_word` of an SLO, or a term of it, in a run."""
    return met_word(met) if is_judged(summary, met) else "NOT JUDGED"


def met_color(met: bool | None) -> str:
    """The colour of a limit in a chart."""
    return "soft" if met is None else "good" if met else "bad"


def sentence(summary: Summary) -> str:
    """The result in one sentence. For an invalid run it only says that the numbers cannot be relied on."""
    requests, goodput = summary.requests, summary.goodput
    if not summary.verdict.valid:
        return "Do not rely on these numbers: the measurement is not valid."
    tasks = _tasks_kept(summary)
    if not goodput.has_slo and tasks is not None and goodput.met is not None:
        return f"SLO {'met' if goodput.met else 'missed'}: {_kept(tasks)}."
    if fails_by_errors(summary):
        failed = requests.failed_by_server
        return (
            f"Too many errors: {format.count(failed)} of "
            f"{format.counted(requests.decided, 'request')} failed ({format.percent(failed / requests.decided)}, limit "
            f"{format.percent(summary.verdict.limits.failure_share)})."
        )
    if not goodput.has_slo:
        share = format.percent(requests.ok / requests.decided if requests.decided else None)
        return (
            f"A sound measurement without a promise to hold it against: {format.count(requests.ok)} of "
            f"{format.counted(requests.decided, 'request')} succeeded ({share})."
        )
    good_requests = _good_requests(goodput)
    if goodput.met:
        *others, last = promises(summary)
        words = " and ".join(filter(None, (", ".join(others), last)))
        return f"SLO met: {words}; {good_requests} were within every limit.{_on_few(summary)}"
    if goodput.undecided and not goodput.unfinished:
        reasons = "; ".join(
            dict.fromkeys(f"{t.promise}: {t.undecided}" for t in goodput.slo if t.undecided)
        )
        return (
            f"SLO undecided: no term is missed, and this run cannot decide every term ({reasons})."
        )
    if goodput.met is None:
        return (
            f"SLO undecided: {format.count(requests.unfinished)} of {format.counted(requests.scheduled, 'request')} "
            f"were unfinished when the drain ended; {good_requests} of the others were within every limit. Give a "
            "longer --grace, or none."
        )
    missed = list(missed_by(summary))
    if goodput.share_limit is None and goodput.good is not None:
        missed.append(f"{good_requests} were within every limit")
    return f"SLO missed: {'; '.join(missed)}."


def _on_few(summary: Summary) -> str:
    """Return the sentence for an SLO that was met on too few samples, or "" if there are enough.

    It is about the term that lacks most, and says how long the same load has to be.
    """
    terms = (term for _, part in judged_parts(summary) for term in part.goodput.slo)
    few = [term for term in terms if not term.supported and not term.undecided]
    if not few:
        return ""
    term = max(few, key=lambda term: term.needed)
    samples = format.counted(term.count, "sample")
    duration_s = summary.window.duration_s
    enough = (
        f", about {format.duration(duration_s * term.needed / term.count)} of this load"
        if duration_s is not None and term.count
        else ""
    )
    return (
        f" Too few to show it: {term.promise} rests on {samples}, and {term.needed:,} are "
        f"needed{enough}."
    )


def promises(summary: Summary) -> tuple[str, ...]:
    """All that an SLO promises, in words: terms, the share of requests, tasks; of a class with its name before it."""
    return tuple(words for words, _ in judged(summary))


def judged(summary: Summary) -> Iterator[tuple[str, bool | None]]:
    """Each promise of an SLO in words, and whether it was met; None: undecided."""
    return (
        (f"{name}{words}", met)
        for name, part in judged_parts(summary)
        for words, met in promises_of(part)
    )


def same_slo(a: Summary, b: Summary) -> bool:
    """Whether two runs are held against one SLO. What is promised of tasks a run knows only where some ended: it is
    left out where one of the two does not.
    """
    parts_a, parts_b = dict(judged_parts(a)), dict(judged_parts(b))
    return parts_a.keys() == parts_b.keys() and all(
        _alike(parts_a[name], parts_b[name]) for name in parts_a
    )


def _alike(a: Summary | ClassSummary, b: Summary | ClassSummary) -> bool:
    known = a.sessions is not None and b.sessions is not None
    promised = ({words for words, _ in promises_of(part, tasks=known)} for part in (a, b))
    return next(promised) == next(promised)


def missed_by(summary: Summary) -> tuple[str, ...]:
    """What of its SLO a run missed, in words, as `promises` names it."""
    return tuple(
        f"{name}{words}" for name, part in judged_parts(summary) for words in _missed(part)
    )


def judged_parts(summary: Summary) -> Iterator[tuple[str, Summary | ClassSummary]]:
    """What an SLO is held against: all requests, and each class by its own where they have their own."""
    yield "", summary
    if not summary.goodput.slo:
        yield from ((f"{part.name}: ", part) for part in summary.classes)


def promises_of(
    part: Summary | ClassSummary, *, tasks: bool = True
) -> Iterator[tuple[str, bool | None]]:
    """What is promised of a part of `judged_parts`, in words, and whether it was met: terms, the share, the tasks."""
    goodput = part.goodput
    yield from ((term.promise, term.met) for term in goodput.slo)
    if goodput.share_limit is not None:
        met = None if goodput.share is None else goodput.share >= goodput.share_limit
        yield f"{goodput.share_limit * 100:g} % of requests within every limit", met
    if tasks and (kept := _tasks_kept(part)):
        yield f"{kept.share_limit * 100:g} % of tasks {_promised(kept)}", kept.met


def _missed(part: Summary | ClassSummary) -> Iterator[str]:
    goodput, tasks = part.goodput, _tasks_kept(part)
    yield from (_missed_term(term) for term in goodput.slo if term.met is False)
    if tasks is not None and tasks.met is False:
        yield f"only {_kept(tasks)}"
    if (
        goodput.share_limit is not None
        and goodput.share is not None
        and goodput.share < goodput.share_limit
    ):
        promised = format.percent(goodput.share_limit)
        yield f"only {_good_requests(goodput)} were within every limit, {promised} were promised"


def _tasks_kept(part: Summary | ClassSummary) -> TaskGoodput | None:
    return part.sessions.goodput if part.sessions is not None else None


def _kept(tasks: TaskGoodput) -> str:
    kept = f"{format.count(tasks.good)} of the tasks ({format.percent(tasks.share)}) {_promised(tasks)}"
    return f"{kept}, {format.percent(tasks.share_limit)} were promised"


def _good_requests(goodput: Goodput) -> str:
    good = f"{format.count(goodput.good)} of {format.counted(goodput.counted, 'request')}"
    return f"{good} ({format.percent(goodput.share)})"


def _missed_term(term: TermResult) -> str:
    name = slo.name(term.metric, term.quantile)
    if term.value_ms is None:
        return (
            f"{name} falls on a request that was not answered"
            if term.count
            else f"{name} was not measured"
        )
    for digits in range(3, 12):  # as many as tell the two apart: 40.0 is not over 40.0
        value, limit = (format.quantity(ms, digits) for ms in (term.value_ms, term.limit_ms))
        if value != limit:
            break
    return f"{name} is {value} ms, the limit {limit} ms"


def shown_quantile(summary: Summary, metric: str, distribution: Distribution) -> str:
    """Return the percentile to show for a metric, such as `p99`.

    It is the highest one that the SLO limits, else the highest of p99, p95 and p90 that the samples
    support, else p50.
    """
    limited = [term.quantile for term in summary.goodput.slo if term.metric == metric]
    for name, p in (("p99_9", 0.999), ("p99", 0.99), ("p95", 0.95), ("p90", 0.9), ("p50", 0.5)):
        if limited and max(limited) == p:
            return name
    return next((name for name in ("p99", "p95", "p90") if name in distribution.supported), "p50")


def five(summary: Summary) -> tuple[Tile, ...]:
    """TTFT, TPOT, output tokens/s, completed requests/s, and the share within the SLO (without one: that succeeded)."""
    load, goodput, shown = summary.load, summary.goodput, headline(summary)
    per_gpu = (
        f"{format.rate(shown.output_per_gpu)} per GPU" if shown.output_per_gpu is not None else ""
    )
    # later requests of conversations are due when the earlier ones are answered: not a rate that was asked for
    is_offered = load.offered_rps is not None and summary.sessions is None
    offered = f"{format.rate(load.offered_rps)} offered" if is_offered else ""
    in_flight = f"{format.quantity(load.in_flight_mean)} in flight"
    if goodput.share is not None:
        success = Tile(
            "SLO attainment",
            format.percent(goodput.share),
            "",
            f"goodput {format.rate(shown.goodput)}",
        )
    else:
        decided = summary.requests.decided
        share = summary.requests.ok / decided if decided else None
        success = Tile(
            "Succeeded",
            format.percent(share),
            "",
            f"{format.count(summary.requests.scheduled)} scheduled",
        )
    return (
        _latency_number(summary, "ttft", "TTFT", summary.ttft_ms),
        _latency_number(summary, "tpot", "TPOT", summary.tpot_ms),
        Tile(
            "Output tokens",
            format.quantity(shown.output),
            "/s",
            ", ".join(filter(None, (per_gpu, f"in the {shown.window}"))),
        ),
        Tile(
            "Completed",
            format.quantity(shown.requests),
            "req/s",
            ", ".join(filter(None, (offered, in_flight))),
        ),
        success,
    )


def _latency_number(summary: Summary, metric: str, name: str, distribution: Distribution) -> Tile:
    quantile = shown_quantile(summary, metric, distribution)
    value = quantile_ms(distribution, quantile)
    beside = f"p50 {format.milliseconds(distribution.p50)} ms"
    if quantile == "p50":
        beside = format.counted(distribution.count, "sample")
    if value.startswith("~"):
        beside += f"; too few samples for {quantile}"
    return Tile(f"{name} {quantile.replace('_', '.')}", value, "ms", beside)


# -- cells of tables -----------------------------------------------------------------------------------------------


def quantile_ms(distribution: Distribution, quantile: str) -> str:
    """A quantile in ms, marked with ~ when it has too few samples."""
    value = getattr(distribution, quantile)
    mark = "" if value is None or quantile in distribution.supported else "~"
    return mark + format.milliseconds(value)


def distribution_cells(
    distribution: Distribution,
    quantiles: Sequence[str],
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[str, ...]:
    """Return the mean, these quantiles and the maximum in ms, and the number of samples.

    A statistic that is withheld is shown by its range.
    """

    def cell(statistic: str) -> str:
        if ranges and statistic in ranges:
            return value_range(*ranges[statistic])
        return quantile_ms(distribution, statistic)

    return (
        cell("mean").removeprefix("~"),
        *(cell(quantile) for quantile in quantiles),
        cell("max").removeprefix("~"),
        format.count(distribution.count),
    )


def value_range(low_ms: float, high_ms: float) -> str:
    """Return a range of times: `8.33-10.0`."""
    return f"{format.milliseconds(low_ms)}-{format.milliseconds(high_ms)}"


def needed(distributions: Sequence[Distribution], quantiles: Sequence[str]) -> str:
    """The samples that the quantiles with a ~ need: `p99 662`; "" where none has it."""
    unsupported = [
        q for q in quantiles if any(d.count and q not in d.supported for d in distributions)
    ]
    return ", ".join(f"{q.replace('_', '.')} {format.count(SUPPORT[q])}" for q in unsupported)


def class_share(summary: Summary, part: ClassSummary) -> float | None:
    """Which share of the measured starts a class had: single requests, conversations and tasks alike."""
    total = sum(one.starts for one in summary.classes)
    return part.starts / total if total else None


def class_term(term: TermResult) -> str:
    """A term of a class and its value: `TTFT p99 at most 2,000 ms: 1,200`."""
    value = term.undecided or (
        f"{format.milliseconds(term.value_ms)} ms" if term.value_ms is not None else "no answer"
    )
    return f"{term.promise}: {value}"


def part_cells(part: StageSummary | TargetSummary | ClassSummary | ModelSummary) -> tuple[str, ...]:
    """Requests ok and failed, requests/s, output tokens/s, p50 and p99 of TTFT and TPOT."""
    return (
        format.count(part.requests.ok),
        format.count(part.requests.failed + part.requests.lost),
        format.quantity(headline(part).requests),
        format.quantity(headline(part).output),
        *(
            quantile_ms(d, quantile)
            for d in (part.ttft_ms, part.tpot_ms)
            for quantile in ("p50", "p99")
        ),
    )


STEP_HEAD = (
    "asks",
    "ok",
    "failed",
    "requests/s",
    "E2E p50",
    "E2E p99",
    "TTFT p50",
    "tokens in",
    "out",
    "of the time",
)
"""The columns of a table of the steps of tasks, behind the name of each."""


STEPS_WORDS = "of the time: of tasks that ended ok, each instant of which belongs to the step that was waited for"


def step_rows(summary: Summary) -> list[tuple[str, ...]]:
    """One row for each step of the tasks, after the one for what passes before it: a tool, or a user who thinks."""
    rows = []
    for step in summary.steps:
        name = f"{step.of_class}: {step.name}" if step.of_class else step.name
        if step.pause:
            quantiles = [quantile_ms(step.pause_ms, quantile) for quantile in ("p50", "p99")]
            share = format.percent(step.pause_share)
            none = format.NONE
            rows.append(
                (f"{step.pause}, before {name}", *[none] * 4, *quantiles, *[none] * 3, share)
            )
        asks = " ".join(filter(None, (step.kind, ", ".join(step.targets), step.model)))
        rows.append(
            (
                name,
                asks,
                format.count(step.requests.ok),
                format.count(step.requests.failed + step.requests.lost),
                format.quantity(headline_requests_per_s(step)),
                *(quantile_ms(step.e2e_ms, quantile) for quantile in ("p50", "p99")),
                quantile_ms(step.ttft_ms, "p50"),
                format.count(step.tokens.input),
                format.count(step.tokens.output) if step.kind == "chat" else format.NONE,
                format.percent(step.time_share),
            )
        )
    return rows


def target_name(part: TargetSummary) -> str:
    """The name of a target, with its region where that is given."""
    region = f" ({part.target.region})" if part.target.region else ""
    return (part.target.name or part.target.url) + region


def tasks(sessions: Sessions) -> list[list[str]]:
    """What became of conversations and tasks, as lines of phrases: counts and times, waits and tokens, the promise."""
    count, duration, goodput = format.count, sessions.duration_ms, sessions.goodput
    beside = (
        [f"{count(sessions.cut)} cut short by the end of the load or of the drain"]
        if sessions.cut
        else []
    )
    beside += (
        [f"{count(sessions.abandoned)} abandoned by their users"] if sessions.abandoned else []
    )
    done = f"{count(sessions.ok)} of {count(sessions.count)} ok"
    done += f" (+ {', '.join(beside)})" if beside else ""
    times = f"p50 {_seconds(duration, 'p50')}, p95 {_seconds(duration, 'p95')} each"
    rate = sessions.ok_per_s if sessions.steady_ok_per_s is None else sessions.steady_ok_per_s
    lines = [[done, format.rate(rate), times]]
    if sessions.requests is not None:
        waited, longest = sessions.wait_ms, sessions.longest_wait_ms
        cached = (
            ""
            if sessions.cached_tokens is None
            else f" ({format.quantity(sessions.cached_tokens)} cached)"
        )
        waits = f"p50 {_seconds(waited, 'p50')} in all, longest wait p95 {_seconds(longest, 'p95')}"
        lines.append(
            [
                f"waited for first tokens {waits}",
                f"each {format.quantity(sessions.requests)} requests, {format.quantity(sessions.input_tokens)} prompt"
                f"{cached} and {format.quantity(sessions.output_tokens)} output tokens",
            ]
        )
    if goodput is not None:
        shares = f"{format.percent(goodput.share)}, promised {format.percent(goodput.share_limit)}"
        good = f"{count(goodput.good)} of {count(sessions.count)} {_promised(goodput)} ({shares})"
        rate = goodput.rps if goodput.steady_rps is None else goodput.steady_rps
        lines.append([f"SLO {met_word(goodput.met)}: {good}", f"goodput {format.rate(rate)}"])
    return lines


def _promised(goodput: TaskGoodput) -> str:
    return slo.task_promise(goodput.within_ms, goodput.wait_ms)


def _seconds(distribution: Distribution, quantile: str) -> str:
    """A quantile in seconds, with a ~ where there are too few samples for it."""
    value = getattr(distribution, quantile)
    doubt = "~" if distribution.count and quantile not in distribution.supported else ""
    return doubt + format.duration(None if value is None else value / 1000)


def request_counts(summary: Summary) -> list[str]:
    """How many requests were scheduled, and how many came to which end."""
    requests = summary.requests
    counts = [
        f"{format.count(getattr(requests, status))} {status}"
        for status in (
            "scheduled",
            "ok",
            "failed",
            "dropped",
            "cancelled",
            "unfinished",
            "lost",
            "resent",
        )
        if status in ("scheduled", "ok", "failed") or getattr(requests, status)
    ]
    if summary.warmup.scheduled:
        counts[-1] += f" (+ {format.count(summary.warmup.scheduled)} of warm-up, not counted)"
    return counts


def client_use(summary: Summary) -> list[str]:
    """What the load generator itself used: workers, CPU, memory, bytes."""
    client = summary.client
    used = [format.counted(client.workers, "worker")]
    if client.cpu_s is not None:
        used.append(f"{format.quantity(client.cpu_s)} CPU-s")
    if client.cpu_share_max is not None:
        used.append(f"busiest second {format.percent(client.cpu_share_max)} of a core")
    if client.waited_share_max is not None and client.waited_share_max > MIN_WAITED_SHARE:
        used.append(
            f"in its worst second other processes held its core for {format.percent(client.waited_share_max)}"
        )
    if client.peak_rss_bytes is not None:
        used.append(f"{format.size(client.peak_rss_bytes)} at most")
    return [
        *used,
        f"{format.size(summary.bytes.sent)} sent",
        f"{format.size(summary.bytes.received)} received",
    ]


def latencies(summary: Summary) -> list[tuple[MetricDefinition, Distribution]]:
    """The latencies of a run with their rows, in the order of a table; also those of packages that are not here."""
    by_name = {row.name: found for row, found in distributions(summary)}
    chosen = [
        (row, by_name[row.name])
        for row in METRICS.shown_in("latency")
        if row.name in by_name
        and not (row.unlike in by_name and by_name[row.unlike].p50 == by_name[row.name].p50)
        if row.name != "inter_chunk" or "itl" not in by_name  # the same numbers
    ]
    known = {row.field for row in METRICS.available()}
    strange = (
        MetricDefinition(name=field, words=field, meaning="of a package that is not here")
        for field in summary.figures
        if field not in known
    )
    return chosen + [(row, summary.figures[row.name]) for row in strange]


def connect(summary: Summary) -> str:
    """What a connection takes without load, and the lookup of the name before it."""
    if summary.rtt_ms is None:
        return ""
    dns = (
        ""
        if summary.dns_ms is None
        else f", the name's lookup before it {format.milliseconds(summary.dns_ms)} ms"
    )
    return f"{format.milliseconds(summary.rtt_ms)} ms without load{dns}"


def own_times(summary: Summary) -> list[tuple[MetricDefinition, Distribution]]:
    """The times and errors of the load generator itself, with their rows; newer ones where they have samples."""
    return [
        (row, found)
        for row, found in distributions(summary)
        if "client" in row.shown and (found.count or not row.block)
    ]


def distributions(summary: Summary) -> Iterator[tuple[MetricDefinition, Distribution]]:
    """Every figure of a summary that is not null, with its row."""
    for row in METRICS.available():
        found = summary.figures.get(row.field) if row.block else getattr(summary, row.field)
        if found is not None:
            yield row, found


def table_words(row: MetricDefinition) -> str:
    """What a figure is called in a table whose head says ms."""
    return row.words if row.unit == "ms" else f"{row.words}, {row.unit}"


def _without_tpot(summary: Summary) -> Iterator[str]:
    """How many answers have no TPOT, by the reason."""
    at_once, silent = summary.tpot_no_span, summary.tpot_no_output
    whole = "came at one instant, in one event or one write: there is no TPOT, and TTFT is that of the whole answer"
    for count, one, several, why in (
        (
            summary.tpot_undefined - at_once - silent,
            "answer was",
            "answers were",
            "too short to have a TPOT",
        ),
        (at_once, "answer", "answers", whole),
        (
            silent,
            "answer",
            "answers",
            "came without text, though with tokens: there is no TTFT and no TPOT",
        ),
    ):
        if count:
            yield f"{format.counted(count, one, several)} {why}."


def about_latency(summary: Summary) -> Iterator[str]:
    """What a table of latencies does not show by itself."""
    if summary.itl_ms is None and summary.inter_chunk_ms.count and "itl" not in summary.unsound:
        yield f"No inter-token latency is given: {summary.itl_absent}."
    if summary.run.api in ("embeddings", "rerank"):
        yield f"An answer of {summary.run.api} comes whole and has no tokens: its latency is E2E, and there is no TTFT."
    elif not summary.run.stream:
        yield "Answers were not streamed: TTFT is the whole answer, and there is no TPOT."
    else:
        yield from _without_tpot(summary)
    if summary.stalls.requests:
        over = format.duration(summary.stalls.over_ms / 1000)
        share = format.percent(summary.stalls.share)
        yield f"{format.counted(summary.stalls.requests, 'answer')} ({share}) stood still for more than {over}."


# -- what the servers say ------------------------------------------------------------------------------------------


def energy_says(used: EnergyUse) -> list[str]:
    """Phrases about the energy of the steady load: the figures per token and request, measured beside declared."""
    if used.joules is None or used.watts is None:
        return [used.why or "nothing says what the accelerators used"]
    error = 0.0 if not used.joules else (used.error_j or 0.0) / used.joules
    phrases = []
    if used.joules_per_output_token is not None:
        phrases.append(
            f"{format.quantity(used.joules_per_output_token)} J/output token (± {format.percent(error)})"
        )
    if used.joules_per_request is not None:
        phrases.append(f"{format.quantity(used.joules_per_request)} J/request")
    if used.output_tokens_per_s_per_watt is not None:
        phrases.append(
            f"{format.quantity(used.output_tokens_per_s_per_watt)} output tokens/s per W"
        )
    watts = f"{format.quantity(used.watts)} W mean"
    watts += "" if used.watts_max is None else f", {format.quantity(used.watts_max)} W at most"
    phrases.append(
        watts
        + (
            ""
            if used.declared_watts is None
            else f" ({format.quantity(used.declared_watts)} declared)"
        )
    )
    if used.clock_mhz is not None and used.clock_min_mhz is not None:
        phrases.append(f"clock {used.clock_mhz:,.0f} MHz mean, {used.clock_min_mhz:,.0f} at least")
    phrases += [
        f"{reason} at {format.percent(share)} of the readings"
        for reason, share in used.throttled.items()
    ]
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
        phrases.append(
            f"{format.counted(server_count, 'output token')} by its own count, {client_phrase}"
        )
    if server.running_max is not None:
        phrases.append(f"at most {format.count(server.running_max)} running")
    if server.waiting_max is not None:
        phrases.append(f"{format.count(server.waiting_max)} queued")
    if server.kv_use_max is not None:
        phrases.append(f"KV cache {format.percent(server.kv_use_max)} full at most")
    reads, failed = (
        sum(getattr(page, name) for page in server.pages) for name in ("reads", "failed")
    )
    return [
        *phrases,
        format.counted(reads, "read")
        + (f", {format.count(failed)} of them failed" if failed else ""),
    ]


def is_host_busy(verdict: Verdict) -> bool:
    """Whether nothing but other work on this host spoiled the measurement: neither the server nor the load did."""
    remedies = {reason.values.get("remedy") for reason in verdict.codes}
    return {reason.code for reason in verdict.codes} <= CLIENT_CODES and not remedies.isdisjoint(
        ("other_processes", "host")
    )
