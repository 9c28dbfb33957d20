"""What a run comes to, in one sentence and five numbers, and the marks that nobody may overlook.

Pure: a `Summary` in, words out. Every page and every message that says "how did it go" says it with these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from loadgen import format
from loadgen.metrics.registry import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadgen.metrics.columns import TermResult
    from loadgen.metrics.summary import Summary
    from loadgen.stats.quantiles import Distribution


class Note(NamedTuple):
    """A mark: its word in capitals, what it means here, how bad it is."""

    word: str
    text: str
    kind: Literal["bad", "warn"]


class Number(NamedTuple):
    """One of the numbers that matter: what it is, the figure, its unit, what stands beside it."""

    name: str
    value: str
    unit: str
    beside: str


def client_limited(summary: Summary) -> bool:
    """Whether the load generator, not the server, may have made the numbers: late sends, unsure stamps, a busy core."""
    limits, scale = summary.verdict.limits, summary.ttft_ms.p50 or summary.e2e_ms.p50
    busy = summary.client.cpu_share_max
    if busy is not None and busy > limits.cpu_share:
        return True
    if scale is None:
        return False
    late = (summary.send_lag_ms.p99 or 0) > limits.send_lag_share * scale
    return late or (summary.stamp_error_ms.p99 or 0) > limits.stamp_error_share * scale


def marks(summary: Summary) -> Iterator[Note]:
    """What must be seen before any number."""
    if summary.target.simulated:
        yield Note(
            "SIMULATED", "a model of a server answered, no real one: nothing here was measured on hardware", "warn"
        )
    if not summary.verdict.valid and client_limited(summary):
        yield Note("CLIENT-LIMITED", "the load generator could not keep up: these numbers are its own, in part", "bad")
    if not summary.verdict.valid:
        yield Note("INVALID", "; ".join(summary.verdict.reasons), "bad")
    if summary.run.state == "interrupted":
        yield Note("INTERRUPTED", "the user stopped this run: it is reported as far as it got", "warn")
    if summary.run.state == "cut_off":
        yield Note("CUT OFF", "this run has no clean end (killed, or still going): reported as far as it got", "warn")


def limit(term: TermResult) -> str:
    """`TTFT p99 at most 2,000 ms`."""
    name = NAMES.get(term.metric, term.metric)
    return f"{name} p{term.quantile * 100:g} at most {format.milliseconds(term.limit_ms)} ms"


def outcome(term: TermResult) -> str:
    """`174 ms`, `~174 ms` when too few samples stand behind it, or why there is none."""
    if term.value_ms is None:
        return "falls on a failed one" if term.count else "not measured"
    return f"{'' if term.supported else '~'}{format.milliseconds(term.value_ms)} ms"


def sentence(summary: Summary) -> str:
    """How it went, in one sentence; whether to believe it comes first."""
    requests, goodput = summary.requests, summary.goodput
    if not summary.verdict.valid:
        return "Do not rely on these numbers: the measurement is not valid."
    if goodput.met is None:
        share = format.percent(requests.ok / requests.scheduled if requests.scheduled else None)
        return (
            f"A sound measurement without a promise to hold it against: {format.count(requests.ok)} of "
            f"{format.count(requests.scheduled)} requests succeeded ({share})."
        )
    good = f"{format.count(goodput.good)} of {format.count(goodput.counted)} requests ({format.percent(goodput.share)})"
    if goodput.met:
        promises = " and ".join(limit(term) for term in goodput.slo)
        return f"SLO met: {promises or 'the promised share'}; {good} were within every limit."
    missed = [_missed(term) for term in goodput.slo if not term.met]
    if goodput.share_limit is not None and (goodput.share or 0) < goodput.share_limit:
        missed.append(f"only {good} were within every limit, {format.percent(goodput.share_limit)} were promised")
        return f"SLO missed: {'; '.join(missed)}."
    return f"SLO missed: {'; '.join(missed)}; {good} were within every limit."


def _missed(term: TermResult) -> str:
    name = f"{NAMES.get(term.metric, term.metric)} p{term.quantile * 100:g}"
    if term.value_ms is None:
        return f"{name} falls on a failed request" if term.count else f"{name} was not measured"
    return f"{name} is {format.milliseconds(term.value_ms)} ms, the limit {format.milliseconds(term.limit_ms)} ms"


def shown_quantile(summary: Summary, metric: str, found: Distribution) -> str:
    """The quantile to show of a metric: the one promised, else the highest that its samples carry."""
    promised = [term.quantile for term in summary.goodput.slo if term.metric == metric]
    for name, p in (("p99_9", 0.999), ("p99", 0.99), ("p95", 0.95), ("p90", 0.9), ("p50", 0.5)):
        if promised and promised[0] == p:
            return name
    return next((name for name in ("p99", "p95", "p90") if name in found.supported), "p50")


def five(summary: Summary) -> tuple[Number, ...]:
    """TTFT, TPOT, output tokens/s, requests/s, and the share that kept the promise (or succeeded)."""
    tokens, load, goodput = summary.tokens, summary.load, summary.goodput
    steady = tokens.steady_output_per_s is not None
    output = tokens.steady_output_per_s if steady else tokens.output_per_s
    gpus = summary.target.gpus
    beside = f"{format.rate(output / gpus)} per GPU" if output is not None and gpus else ""
    when = "while load was offered" if steady else "over the measured window"
    done = load.steady_completed_rps if load.steady_completed_rps is not None else load.completed_rps
    offered = f"{format.rate(load.offered_rps)} offered" if load.offered_rps is not None else ""
    in_flight = f"{format.quantity(load.in_flight_mean)} in flight"
    if goodput.share is not None:
        last = Number("Within the SLO", format.percent(goodput.share), "", f"goodput {format.rate(goodput.rps)}")
    else:
        share = summary.requests.ok / summary.requests.scheduled if summary.requests.scheduled else None
        last = Number("Succeeded", format.percent(share), "", f"{format.count(summary.requests.scheduled)} scheduled")
    return (
        _latency(summary, "ttft", "TTFT", summary.ttft_ms),
        _latency(summary, "tpot", "TPOT", summary.tpot_ms),
        Number("Output tokens", format.quantity(output), "/s", ", ".join(filter(None, (beside, when)))),
        Number("Completed", format.quantity(done), "req/s", ", ".join(filter(None, (offered, in_flight)))),
        last,
    )


def _latency(summary: Summary, metric: str, name: str, found: Distribution) -> Number:
    quantile = shown_quantile(summary, metric, found)
    unsure = "" if quantile in found.supported or not found.count else "~"
    value = getattr(found, quantile)
    median = f"p50 {format.milliseconds(found.p50)} ms" if quantile != "p50" else f"{format.count(found.count)} samples"
    beside = f"{median}; too few samples for {quantile}" if unsure else median
    return Number(f"{name} {quantile.replace('_', '.')}", unsure + format.milliseconds(value), "ms", beside)
