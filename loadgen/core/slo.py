"""Service level objectives (SLO): latency limits at quantiles, the share of requests that meet all, and the words for
them. Pure.
"""

from collections.abc import Iterable

import msgspec

from loadgen.figures import METRICS

METRIC_ALIASES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "tpot",  # AIPerf defines it per request as (e2e - ttft) / (n - 1)
    "e2el": "e2e",
    "request_latency": "e2e",
    "end_to_end_latency": "e2e",
}

ATTAINMENT = "attainment"
"""The name, in files and options, of the share of requests that meet every term."""
DEFAULT_QUANTILE = 0.99
"""The percentile of a term that has none of its own."""

SENT_AS = (
    "x-slo",
    "x-llm-d-slo",
)  # how llm-d's headers of the SLO of a request begin; the second since release 0.8
NOT_HERE = "a package that is not loaded here"


def metrics() -> tuple[str, ...]:
    """The figures that a term may limit: one value per request each."""
    return tuple(row.name for row in METRICS.shown_in("slo"))


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One SLO term: `metric` is at most `limit_ns` at `quantile` (0.99 is p99).

    `metric`: one of `metrics`; of a stored term it may be that of a package that is not here.
    """

    metric: str
    limit_ns: int
    quantile: float = DEFAULT_QUANTILE

    def __post_init__(self) -> None:
        """A stored term may be damaged."""
        if not self.metric.isidentifier():
            raise ValueError(f"no SLO is of {self.metric!r}")
        if not 0 < self.quantile < 1:
            raise ValueError(f"no quantile: {self.quantile!r}")


class TaskTerm(msgspec.Struct, frozen=True, kw_only=True):
    """What was promised of tasks and conversations: at least `share` of them end `within_ns`, and never wait longer
    than `wait_ns` for the first token of an answer. None: no such limit.
    """

    within_ns: int | None = None
    wait_ns: int | None = None
    share: float = 0.99


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """An SLO: the terms, optionally the minimum share of requests that meet all terms, and a promise about tasks."""

    terms: tuple[Term, ...] = ()
    goodput_share: float | None = None
    task: TaskTerm | None = None


def merge_slos(base: Slo, added: Slo) -> Slo:
    """Return the objectives of both SLOs, ordered by metric and percentile.

    Where both limit the same metric at the same percentile, or the attainment, `added` decides.
    """
    terms = {(term.metric, term.quantile): term for term in (*base.terms, *added.terms)}
    order = {metric: index for index, metric in enumerate(metrics())}
    share = base.goodput_share if added.goodput_share is None else added.goodput_share
    return Slo(
        terms=tuple(
            sorted(
                terms.values(),
                key=lambda term: (order.get(term.metric, len(order)), term.quantile),
            )
        ),
        goodput_share=share,
        task=added.task or base.task,
    )


def describe_slo(slo: Slo) -> str:
    """Return an SLO as text: `TTFT p99 at most 2,000 ms, TPOT p95 at most 40 ms`."""
    parts = [promise(term.metric, term.quantile, term.limit_ns / 1e6) for term in slo.terms]
    if slo.goodput_share is not None:
        parts.append(f"at least {slo.goodput_share * 100:.6g}% of the requests meet every limit")
    if slo.task is not None:
        within_ms, wait_ms = (
            None if limit_ns is None else limit_ns / 1e6
            for limit_ns in (slo.task.within_ns, slo.task.wait_ns)
        )
        limits = task_promise(within_ms, wait_ms)
        parts.append(f"at least {slo.task.share * 100:.6g}% of the tasks {limits}")
    return ", ".join(parts)


def sent_headers(slo: Slo | None) -> dict[str, str]:
    """The headers that tell a gateway the SLO of a request: of TTFT and of TPOT the tightest limit, in ms."""
    terms = [term for term in (slo.terms if slo else ()) if term.metric in ("ttft", "tpot")]
    terms.sort(key=lambda term: -term.limit_ns)  # the tightest of a metric is written last
    return {
        f"{begin}-{term.metric}-ms": f"{term.limit_ns / 1e6:.10g}"
        for term in terms
        for begin in SENT_AS
    }


def missing_metrics(slos: Iterable[Slo]) -> dict[str, str]:
    """The figures of terms whose package is not here, with why nothing can be said of them."""
    return {
        term.metric: why_missing(term.metric)
        for slo in slos
        for term in slo.terms
        if why_missing(term.metric)
    }


def why_missing(metric: str) -> str:
    """Why nothing can be said of a figure whose package is not here; "" where it is."""
    return "" if METRICS.get(metric) else f"figure {metric} is defined by {NOT_HERE}"


class StopRule(msgspec.Struct, frozen=True, kw_only=True):
    """When a run ends early: by a share of errors, or a latency at a quantile, of the requests that ended last."""

    metric: str  # errors, or one of `metrics`
    limit: float  # a share, or ns
    quantile: float | None = None  # None: of errors

    @property
    def written(self) -> str:
        """As in a file: `errors:20%`, `ttft:p50:30s`."""
        if self.quantile is None:
            return f"{self.metric}:{self.limit * 100:g}%"
        return f"{self.metric}:p{self.quantile * 100:g}:{self.limit / 1e9:g}s"


def name(metric: str, quantile: float) -> str:
    """What a term limits, for readers: `TTFT p99`."""
    row = METRICS.get(metric)
    return f"{row.words if row else f'figure {metric} of {NOT_HERE}'} p{quantile * 100:g}"


def promise(metric: str, quantile: float, limit_ms: float) -> str:
    """A term in words: `TTFT p99 at most 2,000 ms`, the limit as it was written."""
    return f"{name(metric, quantile)} at most {limit_ms:,.10g} ms"


def task_promise(within_ms: float | None, wait_ms: float | None) -> str:
    """What was promised of each task: `within 90 s and never waiting over 2 s`."""
    limits = [f"within {within_ms / 1000:,.10g} s"] if within_ms is not None else []
    limits += [f"never waiting over {wait_ms / 1000:,.10g} s"] if wait_ms is not None else []
    return " and ".join(limits)
