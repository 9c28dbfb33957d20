"""Service level objectives (SLO): latency limits at percentiles, and the texts that describe them.

Pure.
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
"""The name, in files and options, of the fraction of requests that meet every objective."""
DEFAULT_QUANTILE = 0.99
"""The percentile of an objective that names none."""

HEADER_PREFIXES = ("x-slo", "x-llm-d-slo")
"""How llm-d's headers for the SLO of a request begin. The second is used since its release 0.8."""
MISSING_PACKAGE = "a package that is not loaded"


def metrics() -> tuple[str, ...]:
    """Return the metrics that an objective may limit. Each has one value per request."""
    return tuple(definition.name for definition in METRICS.shown_in("slo"))


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One objective: the percentile of a metric is at most `limit_ns`.

    Attributes:
        metric: One of `metrics`. A stored objective may have the metric of a package that is not
            loaded here.
        limit_ns: The limit.
        quantile: The percentile as a fraction, such as 0.99 for p99.
    """

    metric: str
    limit_ns: int
    quantile: float = DEFAULT_QUANTILE

    def __post_init__(self) -> None:
        """Raise ValueError for values that no objective has, as in a damaged file."""
        if not self.metric.isidentifier():
            raise ValueError(f"there is no SLO metric {self.metric!r}")
        if not 0 < self.quantile < 1:
            raise ValueError(f"no quantile: {self.quantile!r}")


class TaskTerm(msgspec.Struct, frozen=True, kw_only=True):
    """An objective of tasks and conversations. A limit that is None does not apply.

    Attributes:
        within_ns: The longest duration of a task.
        wait_ns: The longest wait for the first token of any of its responses.
        share: The fraction of the tasks that have to meet both limits.
    """

    within_ns: int | None = None
    wait_ns: int | None = None
    share: float = 0.99


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives of a load.

    Attributes:
        terms: The limits of metrics at percentiles.
        goodput_share: The smallest fraction of requests that meet all terms, or None.
        task: The objective of tasks, or None.
    """

    terms: tuple[Term, ...] = ()
    goodput_share: float | None = None
    task: TaskTerm | None = None


def merge_slos(base: Slo, added: Slo) -> Slo:
    """Return the objectives of both SLOs, ordered by metric and percentile.

    If both limit the same metric at the same percentile, or the attainment, `added` decides.
    """
    term_by_key = {(term.metric, term.quantile): term for term in (*base.terms, *added.terms)}
    rank = {metric: index for index, metric in enumerate(metrics())}

    def sort_key(term: Term) -> tuple[int, float]:
        return rank.get(term.metric, len(rank)), term.quantile

    return Slo(
        terms=tuple(sorted(term_by_key.values(), key=sort_key)),
        goodput_share=base.goodput_share if added.goodput_share is None else added.goodput_share,
        task=added.task or base.task,
    )


def describe_slo(slo: Slo) -> str:
    """Return an SLO as text: `TTFT p99 at most 2,000 ms, TPOT p95 at most 40 ms`."""
    texts = [describe_term(term.metric, term.quantile, term.limit_ns / 1e6) for term in slo.terms]
    if slo.goodput_share is not None:
        texts.append(f"at least {slo.goodput_share * 100:.6g}% of the requests meet every limit")
    if slo.task is not None:
        within_ms = None if slo.task.within_ns is None else slo.task.within_ns / 1e6
        wait_ms = None if slo.task.wait_ns is None else slo.task.wait_ns / 1e6
        limits = describe_task_limits(within_ms, wait_ms)
        texts.append(f"at least {slo.task.share * 100:.6g}% of the tasks {limits}")
    return ", ".join(texts)


def sent_headers(slo: Slo | None) -> dict[str, str]:
    """Return the headers that tell a gateway the tightest limits of TTFT and TPOT, in ms."""
    if slo is None:
        return {}
    tightest_ns: dict[str, int] = {}
    for term in slo.terms:
        if term.metric in ("ttft", "tpot"):
            tightest_so_far_ns = tightest_ns.get(term.metric, term.limit_ns)
            tightest_ns[term.metric] = min(tightest_so_far_ns, term.limit_ns)
    return {
        f"{prefix}-{metric}-ms": f"{limit_ns / 1e6:.10g}"
        for metric, limit_ns in tightest_ns.items()
        for prefix in HEADER_PREFIXES
    }


def missing_metrics(slos: Iterable[Slo]) -> dict[str, str]:
    """Return the metrics whose package is not loaded here, with the reason."""
    names = dict.fromkeys(term.metric for slo in slos for term in slo.terms)
    return {metric: why_missing(metric) for metric in names if why_missing(metric)}


def why_missing(metric: str) -> str:
    """Return why a metric is not available here, or "" if it is."""
    if METRICS.get(metric) is not None:
        return ""
    return f"metric {metric} is defined by {MISSING_PACKAGE}"


class StopRule(msgspec.Struct, frozen=True, kw_only=True):
    """When a run ends early, judged by the requests that ended last.

    Attributes:
        metric: `errors`, or one of `metrics`.
        limit: The fraction of errors, or a latency in ns.
        quantile: The percentile of the latency as a fraction, or None for errors.
    """

    metric: str
    limit: float
    quantile: float | None = None

    @property
    def written(self) -> str:
        """Return the rule as in a file: `errors:20%`, `ttft:p50:30s`."""
        if self.quantile is None:
            return f"{self.metric}:{self.limit * 100:g}%"
        return f"{self.metric}:p{self.quantile * 100:g}:{self.limit / 1e9:g}s"


def name(metric: str, quantile: float) -> str:
    """Return what an objective limits, as text: `TTFT p99`."""
    definition = METRICS.get(metric)
    label = f"metric {metric} of {MISSING_PACKAGE}" if definition is None else definition.label
    return f"{label} p{quantile * 100:g}"


def describe_term(metric: str, quantile: float, limit_ms: float) -> str:
    """Return a limit of a metric as text: `TTFT p99 at most 2,000 ms`."""
    return f"{name(metric, quantile)} at most {limit_ms:,.10g} ms"


def describe_task_limits(within_ms: float | None, wait_ms: float | None) -> str:
    """Return the limits of a task as text: `within 90 s and no wait of more than 2 s`."""
    limits = []
    if within_ms is not None:
        limits.append(f"within {within_ms / 1000:,.10g} s")
    if wait_ms is not None:
        limits.append(f"no wait of more than {wait_ms / 1000:,.10g} s")
    return " and ".join(limits)
