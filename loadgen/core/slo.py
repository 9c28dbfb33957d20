"""Service level objectives (SLO): latency limits at percentiles, and the texts that describe them.

Pure.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from loadgen.figures import METRICS

_NS_PER_MS = 1e6

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

FLUIDITY = "fluidity"
"""The name, in files and options, of the objective of token deadlines."""

ANSWERS = "answers"
"""The name, in files and options, of the objective on the share of right answers."""

HEADER_PREFIXES = ("x-slo", "x-llm-d-slo")
"""How llm-d's headers for the SLO of a request begin. The second is used since its release 0.8."""
MISSING_DEADLINES = "needs the deadlines of the first and of later tokens"
MISSING_DEADLINES_HINT = "limit ttft and tpot, like --slo ttft:2s --slo tpot:50ms"
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


class TokenDeadlines(NamedTuple):
    """The deadlines of the tokens of a response.

    Attributes:
        first_token_ns: The deadline of the first token, from the scheduled time of the request.
        per_token_ns: The time that each later token adds to the deadline.
    """

    first_token_ns: int
    per_token_ns: int


class FluidityTerm(msgspec.Struct, frozen=True, kw_only=True):
    """An objective of token deadlines: enough requests have a fluidity index of `least_index`.

    A deadline that is None here is the strictest limit of the SLO on TTFT or on TPOT.

    Attributes:
        least_index: The smallest fluidity index, as a fraction.
        quantile: The fraction of the requests that must reach it, such as 0.99 for p99.
        first_token_ns: The deadline of the first token, from the scheduled time, or None.
        per_token_ns: The time that each later token adds to the deadline, or None.
    """

    least_index: float
    quantile: float = DEFAULT_QUANTILE
    first_token_ns: int | None = None
    per_token_ns: int | None = None


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives of a load.

    Attributes:
        terms: The limits of metrics at percentiles.
        goodput_share: The smallest fraction of requests that meet all terms, or None.
        task: The objective of tasks, or None.
        fluidity: The objective of token deadlines, or None.
        answers_share: The smallest fraction of the checked answers that are right, or None.
    """

    terms: tuple[Term, ...] = ()
    goodput_share: float | None = None
    task: TaskTerm | None = None
    fluidity: FluidityTerm | None = None
    answers_share: float | None = None

    def strictest_limit_ns(self, metric: str) -> int | None:
        """Return the lowest limit of a metric at any percentile, or None if it has no limit."""
        limits_ns = [term.limit_ns for term in self.terms if term.metric == metric]
        return min(limits_ns, default=None)

    def find_token_deadlines(self) -> TokenDeadlines | None:
        """Return the deadlines of tokens, or None if the one of the first or later tokens lacks.

        They are those of the objective `fluidity`, or else the strictest limits on TTFT and TPOT.
        """
        first_token_ns = self.strictest_limit_ns("ttft")
        per_token_ns = self.strictest_limit_ns("tpot")
        if self.fluidity is not None:
            first_token_ns = self.fluidity.first_token_ns or first_token_ns
            per_token_ns = self.fluidity.per_token_ns or per_token_ns

        if first_token_ns is None or per_token_ns is None:
            return None
        return TokenDeadlines(first_token_ns, per_token_ns)

    @property
    def lacks_token_deadlines(self) -> bool:
        """Whether there is an objective of token deadlines, but no deadlines."""
        return self.fluidity is not None and self.find_token_deadlines() is None


def state_token_deadlines(slo: Slo) -> FluidityTerm | None:
    """Return the objective of token deadlines with the deadlines in it, None without objective.

    So it remains complete when the limits on TTFT and TPOT, which set them, are left out.
    """
    deadlines = slo.find_token_deadlines()
    if slo.fluidity is None or deadlines is None:
        return slo.fluidity
    return msgspec.structs.replace(
        slo.fluidity,
        first_token_ns=deadlines.first_token_ns,
        per_token_ns=deadlines.per_token_ns,
    )


def merge_slos(base: Slo, added: Slo) -> Slo:
    """Return the objectives of both SLOs, ordered by metric and percentile.

    If both limit the same metric at the same percentile, the attainment, or the share of right
    answers, `added` decides.
    """
    terms = {(term.metric, term.quantile): term for term in (*base.terms, *added.terms)}
    goodput_share = base.goodput_share if added.goodput_share is None else added.goodput_share
    answers_share = base.answers_share if added.answers_share is None else added.answers_share
    return Slo(
        terms=_sort_terms(terms.values()),
        goodput_share=goodput_share,
        task=added.task or base.task,
        fluidity=added.fluidity or base.fluidity,
        answers_share=answers_share,
    )


def _sort_terms(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Return terms in the order of the known metrics, unknown ones last, and by percentile."""
    position_of_metric = {metric: position for position, metric in enumerate(metrics())}
    last_position = len(position_of_metric)

    def sort_key(term: Term) -> tuple[int, float]:
        return position_of_metric.get(term.metric, last_position), term.quantile

    return tuple(sorted(terms, key=sort_key))


def describe_slo(slo: Slo) -> str:
    """Return an SLO as text: `TTFT p99 at most 2,000 ms, TPOT p95 at most 40 ms`."""
    texts = [
        describe_term(term.metric, term.quantile, term.limit_ns / _NS_PER_MS) for term in slo.terms
    ]
    if slo.goodput_share is not None:
        texts.append(f"at least {slo.goodput_share * 100:.6g}% of the requests meet every limit")
    if slo.task is not None:
        texts.append(_describe_task_term(slo.task))
    if slo.fluidity is not None:
        texts.append(describe_fluidity_term(slo, slo.fluidity))
    if slo.answers_share is not None:
        texts.append(describe_answers_share(slo.answers_share))
    return ", ".join(texts)


def _describe_task_term(term: TaskTerm) -> str:
    """Return the objective of tasks as text: `at least 99% of the tasks within 90 s`."""
    within_ms = None if term.within_ns is None else term.within_ns / _NS_PER_MS
    wait_ms = None if term.wait_ns is None else term.wait_ns / _NS_PER_MS
    limits = describe_task_limits(within_ms, wait_ms)
    return f"at least {term.share * 100:.6g}% of the tasks {limits}"


def sent_headers(slo: Slo | None) -> dict[str, str]:
    """Return the headers that tell a gateway the tightest limits of TTFT and TPOT, in ms.

    Gateways differ in the beginning of the names, so each limit is sent once with each prefix in
    HEADER_PREFIXES. The names end, for example, in `-ttft-ms`.
    """
    if slo is None:
        return {}
    headers: dict[str, str] = {}
    for metric in ("ttft", "tpot"):
        limits_ns = [term.limit_ns for term in slo.terms if term.metric == metric]
        if not limits_ns:
            continue
        tightest_limit_ms = min(limits_ns) / _NS_PER_MS
        for prefix in HEADER_PREFIXES:
            headers[f"{prefix}-{metric}-ms"] = f"{tightest_limit_ms:.10g}"
    return headers


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


def describe_fluidity_index(quantile: float, least_index: float) -> str:
    """Return a limit of the fluidity index as text: `Fluidity index p99 at least 90 %`."""
    return f"Fluidity index p{quantile * 100:g} at least {least_index * 100:g} %"


def describe_fluidity_term(slo: Slo, term: FluidityTerm) -> str:
    """Return an objective of token deadlines as text, with the deadlines of its SLO if it has any.

    For example: `Fluidity index p99 at least 90 % (deadlines 2,000 ms, then 50 ms per token)`.
    """
    text = describe_fluidity_index(term.quantile, term.least_index)
    deadlines = slo.find_token_deadlines()
    if deadlines is None:
        return text
    first_token_ms = deadlines.first_token_ns / _NS_PER_MS
    per_token_ms = deadlines.per_token_ns / _NS_PER_MS
    return f"{text} ({describe_deadlines(first_token_ms, per_token_ms)})"


def describe_deadlines(first_token_ms: float, per_token_ms: float) -> str:
    """Return token deadlines as text: `deadlines 2,000 ms, then 50 ms per token`."""
    return f"deadlines {first_token_ms:,.10g} ms, then {per_token_ms:,.10g} ms per token"


def describe_answers_share(share: float) -> str:
    """Return the objective on checked answers as text: `Right answers at least 95 %`."""
    return f"Right answers at least {share * 100:.6g} %"


def describe_task_limits(within_ms: float | None, wait_ms: float | None) -> str:
    """Return the limits of a task as text: `within 90 s and no wait of more than 2 s`."""
    limits = []
    if within_ms is not None:
        limits.append(f"within {within_ms / 1000:,.10g} s")
    if wait_ms is not None:
        limits.append(f"no wait of more than {wait_ms / 1000:,.10g} s")
    return " and ".join(limits)
