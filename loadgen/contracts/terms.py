"""The terms that a contract can have: their keywords, their parameters, and what each one requires.

A term is one condition on a load, such as "ttft at p99 within 2.0 s". `term_fields.py` reads terms
from a file, `lint.py` checks them before a run, and `evaluate.py` computes their metrics after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from loadgen.core import format
from loadgen.core.stats.quantiles import quantile_name
from loadgen.core.units import InvalidValueError
from loadgen.core.workload.fields import Count, Duration, FiniteRate, Share
from loadgen.figures import METRICS, pooled_metrics

NS_PER_S = 1e9
NS_PER_MS = 1e6


class LimitKind(NamedTuple):
    """A kind of limit: how it is written, compared and shown.

    Attributes:
        key: The key of the limit in the file, such as `share` in `goodput: {share: 99%}`.
        type: The pydantic type that parses the limit.
        is_upper_bound: Whether the metric must be at most the limit. Otherwise it must be at least
            the limit.
        unit: The unit of the limit in results and texts.
        to_unit: Converts a parsed limit, or a metric, to that unit.
        to_text: Formats a parsed limit for people.
    """

    key: str
    type: Any
    is_upper_bound: bool
    unit: str
    to_unit: Callable[[Any], float]
    to_text: Callable[[Any], str]


class TermKind(NamedTuple):
    """The meaning of a keyword.

    Attributes:
        limit: The kind of its limit.
        template: The text of a term, with the names of its parameters in braces.
        default_quantile: The quantile if a term gives none. None if the keyword has no parameter
            `at`.
        parameters: The fields of `ContractTerm` that a term of this kind must give besides its
            limit.
        requirements: What the contract, its workload or its prompts must have: `slo`, `task_slo`,
            `deadlines`, `known_answers`, `gpus`, `prices`, `level`, `tenants`; for terms about
            responses `reference`, `choice`, `json`, `against`.
    """

    limit: LimitKind
    template: str
    default_quantile: float | None = None
    parameters: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()

    @property
    def short_key(self) -> str | None:
        """The key whose value may stand directly after the keyword, as in `ttft: 2s`, or None."""
        return None if self.parameters else self.limit.key


class ContractTerm(NamedTuple):
    """One term of a contract: its keyword and the values of its parameters."""

    kind: str
    limit: Any  # in ns, as a fraction, per second, or an amount of money: see LimitKind
    quantile: float = 0.0  # 0.99 is p99; 0 if the keyword has no quantile
    # The metric that is compared, such as "ttft" of `drift`. For `energy` it is the unit of work
    # that the limit is for: "token" or "request".
    of: str = ""
    window_ns: int = 0
    level: str = ""  # the other level that this one is compared with
    currency: str = ""
    class_name: str = ""  # the class of requests or prompts that the term is about; "" for all

    @property
    def definition(self) -> TermKind:
        """The meaning of the keyword."""
        return get_term_kind(self.kind)

    @property
    def percentile(self) -> str:
        """The quantile as text, such as p99.9."""
        return quantile_name(self.quantile).replace("_", ".")

    @property
    def percentile_label(self) -> str:
        """The quantile as text with as many digits as it has, such as p99.95."""
        return f"p{self.quantile * 100:g}"

    @property
    def unit(self) -> str:
        """The unit of the limit in results."""
        return self.currency or self.definition.limit.unit

    @property
    def limit_in_unit(self) -> float:
        """The limit in `unit`."""
        return self.definition.limit.to_unit(self.limit)

    @property
    def is_upper_bound(self) -> bool:
        """Whether the metric must be at most the limit. Otherwise it must be at least the limit."""
        return self.definition.limit.is_upper_bound

    @property
    def is_latency(self) -> bool:
        """Whether the term limits a quantile of a time per request or task."""
        return self.definition.limit is TIME_AT_QUANTILE

    @property
    def is_sensitive_to_slowdowns(self) -> bool:
        """Whether the metric changes while the server is slow for some minutes.

        Only these terms have a recurrence horizon, and need a load that is long enough for it.
        """
        return self.is_latency or self.kind in (*FRACTION_OF_GOOD_TERMS, "fluidity")

    @property
    def is_about_tasks(self) -> bool:
        """Whether the term is about conversations and tasks as a whole."""
        return self.kind in TASK_TERM_METRICS

    @property
    def metric(self) -> str:
        """The metric of requests that the term is computed from.

        A task counts as one request for a task term.
        """
        return TASK_TERM_METRICS.get(self.kind, self.kind)

    @property
    def text(self) -> str:
        """The term as messages and reports show it, such as "ttft at p99 within 2.0 s"."""
        text = self.definition.template.format(
            kind=self.kind,
            at=self.percentile,
            limit=self.definition.limit.to_text(self.limit),
            currency=self.currency,
            of=self.of,
            level=self.level,
            window=format.duration(self.window_ns / NS_PER_S),
        )
        return f"{text} for class {self.class_name}" if self.class_name else text

    def requires(self, name: str) -> bool:
        """Return whether the term needs this input: one of `TermKind.requirements`."""
        return name in self.definition.requirements

    def without_limit(self) -> ContractTerm:
        """Return the term without its limit. Terms that limit the same metric are then equal."""
        return self._replace(limit=None, currency="")


# -- limits ---------------------------------------------------------------------------------------


def _check_above_zero(share: float) -> float:
    """Return the upper limit of a fraction unchanged, such as 0.01 of `errors: 1%`.

    Raises:
        InvalidValueError: The limit is 0 %. No sample can show that something never happens, so
            such a term could not pass.
    """
    if share == 0:
        raise InvalidValueError(
            "out_of_range",
            "must be above 0%, because no sample can show that something never happens",
            "allow a small percentage, like 0.1%",
        )
    return share


def _check_between_zero_and_one(share: float) -> float:
    """Return the lower limit of a fraction unchanged, such as 0.99 of `goodput: 99%`.

    Raises:
        InvalidValueError: The limit is 100 %, which no sample can show, or 0 %, which is always
            met.
    """
    if share == 1:
        raise InvalidValueError(
            "out_of_range",
            "must be below 100%, because no sample can show that something always happens",
            "require a little less, like 99.9%",
        )

    if share == 0:
        raise InvalidValueError("out_of_range", "must be above 0%", "a percentage like 99%")

    return share


def _match(pattern: re.Pattern[str], value: object) -> re.Match[str] | None:
    """Match the pattern with the whole text. Return None for values that are not text."""
    return pattern.fullmatch(value.strip()) if isinstance(value, str) else None


MONEY_PATTERN = re.compile(r"(?P<amount>[0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?P<currency>[A-Z]{3})")
FACTOR_PATTERN = re.compile(r"(?P<factor>[0-9]{1,6}(?:\.[0-9]{1,6})?) ?x")
ENERGY_PATTERN = re.compile(
    r"(?P<joules>[0-9]{1,9}(?:\.[0-9]{1,9})?) ?J/(?P<unit_of_work>token|request)"
)


def _parse_money(value: object) -> tuple[Decimal, str]:
    """Return the amount and the currency of a text such as `0.45 USD`.

    Raises:
        InvalidValueError: The value is not such a text, or the amount is 0.
    """
    match = _match(MONEY_PATTERN, value)
    if match is None or Decimal(match["amount"]) == 0:
        raise InvalidValueError(
            "invalid_value",
            "must be an amount of money",
            "a number above zero and a currency, like 0.45 USD",
        )

    return Decimal(match["amount"]), match["currency"]


def _parse_factor(value: object) -> float:
    """Return the number of a text such as `1.5x`.

    Raises:
        InvalidValueError: The value is not such a text, or the number is less than 1.
    """
    match = _match(FACTOR_PATTERN, value)
    if match is None or float(match["factor"]) < 1:
        raise InvalidValueError(
            "invalid_value",
            "must be a factor",
            "a number of at least 1 and x, like 1.5x",
        )

    return float(match["factor"])


def _parse_energy(value: object) -> tuple[float, str]:
    """Return the energy in J and the unit of work of a text such as `0.5 J/token`.

    The unit of work is an output token or an ok request.

    Raises:
        InvalidValueError: The value is not such a text, or the energy is 0.
    """
    match = _match(ENERGY_PATTERN, value)
    if match is None or float(match["joules"]) == 0:
        raise InvalidValueError(
            "invalid_value",
            "must be an energy per token or request",
            "use joules per output token or successful request, for example 0.5 J/token",
        )

    return float(match["joules"]), match["unit_of_work"]


def format_time(time_ns: float) -> str:
    """Return a time limit for people: milliseconds below one second, else with larger units."""
    if time_ns >= NS_PER_S:
        return format.duration(time_ns / NS_PER_S)
    return f"{format.quantity(time_ns / NS_PER_MS)} ms"


def _to_ms(time_ns: float) -> float:
    """Convert nanoseconds to milliseconds."""
    return time_ns / NS_PER_MS


def _to_percent(share: float) -> float:
    """Convert a fraction to a percentage."""
    return share * 100


def _format_factor(factor: float) -> str:
    """Return a factor as it is written in a contract, such as "1.5x"."""
    return f"{factor:g}x"


PositiveTime = Annotated[Duration, Field(gt=0)]
_ShareAtMost = Annotated[Share, AfterValidator(_check_above_zero)]
_ShareAtLeast = Annotated[Share, AfterValidator(_check_between_zero_and_one)]
_MoneyField = Annotated[tuple[Decimal, str], BeforeValidator(_parse_money)]
_EnergyField = Annotated[tuple[float, str], BeforeValidator(_parse_energy)]
_FactorField = Annotated[
    float, BeforeValidator(_parse_factor), WithJsonSchema({"type": "string", "examples": ["1.5x"]})
]

TIME_AT_QUANTILE = LimitKind(
    key="limit",
    type=PositiveTime,
    is_upper_bound=True,
    unit="ms",
    to_unit=_to_ms,
    to_text=format_time,
)
MAX_TIME = LimitKind(
    key="limit",
    type=PositiveTime,
    is_upper_bound=True,
    unit="ms",
    to_unit=_to_ms,
    to_text=format_time,
)
MAX_SHARE = LimitKind(
    key="limit",
    type=_ShareAtMost,
    is_upper_bound=True,
    unit="%",
    to_unit=_to_percent,
    to_text=format.percent,
)
MIN_SHARE = LimitKind(
    key="share",
    type=_ShareAtLeast,
    is_upper_bound=False,
    unit="%",
    to_unit=_to_percent,
    to_text=format.percent,
)
MIN_RATE = LimitKind(
    key="rate",
    type=FiniteRate,
    is_upper_bound=False,
    unit="/s",
    to_unit=float,
    to_text=format.quantity,
)
MIN_TOKENS = LimitKind(
    key="tokens",
    type=Count,
    is_upper_bound=False,
    unit="tokens",
    to_unit=float,
    to_text=format.count,
)
MAX_COST = LimitKind(
    key="limit",
    type=_MoneyField,
    is_upper_bound=True,
    unit="",
    to_unit=float,
    to_text=str,
)
MAX_FACTOR = LimitKind(
    key="limit",
    type=_FactorField,
    is_upper_bound=True,
    unit="x",
    to_unit=float,
    to_text=_format_factor,
)
MAX_ENERGY = LimitKind(
    key="limit",
    type=_EnergyField,
    is_upper_bound=True,
    unit="J",
    to_unit=float,
    to_text=format.quantity,
)


# -- terms about a load ---------------------------------------------------------------------------

LATENCY_TERM = TermKind(TIME_AT_QUANTILE, "{kind} at {at} within {limit}", default_quantile=0.99)
"""The meaning of the name of a latency metric. Failed and dropped requests exceed every limit."""

TERM_KINDS = {
    # Fraction of requests that are not ok: failed, dropped at a limit of the client, or lost.
    "errors": TermKind(MAX_SHARE, "{kind} at most {limit}"),
    # Fraction of requests that meet every limit of the `slo`.
    "goodput": TermKind(MIN_SHARE, "{kind} at least {limit}", requirements=("slo",)),
    # Rates in steady state: ok requests, good requests, and per GPU output tokens and all tokens.
    "requests": TermKind(MIN_RATE, "{kind} at least {limit}/s"),
    "good_requests": TermKind(MIN_RATE, "{kind} at least {limit}/s", requirements=("slo",)),
    "output_per_gpu": TermKind(MIN_RATE, "{kind} at least {limit}/s", requirements=("gpus",)),
    "tokens_per_gpu": TermKind(MIN_RATE, "{kind} at least {limit}/s", requirements=("gpus",)),
    # Cost of a thousand good requests at the contract's `prices`.
    "cost": TermKind(
        MAX_COST,
        "cost per thousand good requests at most {limit} {currency}",
        requirements=("slo", "prices"),
    ),
    # Conversations and tasks as a whole: the time from the first scheduled start to the last end,
    # the sum of all waits for first tokens, the longest of these waits, the fraction that meets the
    # `task` limits of the `slo`, and rates in steady state.
    "task_time": TermKind(TIME_AT_QUANTILE, "task time at {at} within {limit}", 0.99),
    "task_wait": TermKind(TIME_AT_QUANTILE, "waits of a task at {at} within {limit}", 0.99),
    "task_longest_wait": TermKind(
        TIME_AT_QUANTILE, "longest wait of a task at {at} within {limit}", 0.99
    ),
    "task_goodput": TermKind(
        MIN_SHARE, "tasks that meet the SLO at least {limit}", requirements=("task_slo",)
    ),
    "tasks": TermKind(MIN_RATE, "tasks at least {limit}/s"),
    "good_tasks": TermKind(
        MIN_RATE, "tasks that meet the SLO at least {limit}/s", requirements=("task_slo",)
    ),
    "task_cost": TermKind(
        MAX_COST,
        "cost per thousand good tasks at most {limit} {currency}",
        requirements=("task_slo", "prices"),
    ),
    # Energy per output token or per ok request in steady state, as measured by what `--energy`
    # reads.
    "energy": TermKind(MAX_ENERGY, "energy at most {limit} J/{of}"),
    # The last `window` of the measured load against the first: a latency, and the rate of ok
    # requests.
    "drift": TermKind(
        MAX_SHARE,
        "{of} at {at} in the last {window} at most {limit} above the first {window}",
        default_quantile=0.99,
        parameters=("window_ns", "of"),
    ),
    "sustained": TermKind(
        MIN_SHARE,
        "throughput in the last {window} at least {limit} of the throughput in the first {window}",
        parameters=("window_ns",),
    ),
    # The largest difference of a latency between two nodes, as a fraction of the smaller value.
    "between_nodes": TermKind(
        MAX_SHARE,
        "{of} at {at} differs between nodes by at most {limit}",
        default_quantile=0.5,
        parameters=("of",),
    ),
    # The longest time until the SLO is met again after a spike, loss or scale-up of the level.
    "recovery": TermKind(
        MAX_TIME,
        "recovery within {limit} after a spike, replica loss or scale-up",
        requirements=("slo",),
    ),
    # Jain's index over tenants of the fraction of their requests that meet the SLO.
    "fairness": TermKind(
        MIN_SHARE, "Jain's index over tenants at least {limit}", requirements=("tenants",)
    ),
    # The share of its token deadlines that a request met. The deadlines are the limits on TTFT and
    # TPOT of the `slo`.
    "fluidity": TermKind(
        MIN_SHARE,
        "fluidity index at {at} at least {limit}",
        default_quantile=0.99,
        requirements=("deadlines",),
    ),
    # The share of right answers among the checked ones (`check_answers` in the workload).
    "answers": TermKind(
        MIN_SHARE, "right answers at least {limit}", requirements=("known_answers",)
    ),
    # How far the accepted length of speculative decoding is from the one that the level's workload
    # (`accepted_length`), --accepted-length or the system file states.
    "accepted_length": TermKind(MAX_SHARE, "accepted length within {limit} of the stated one"),
    # A latency as a multiple of the one at another level, for example of a quiet tenant next to a
    # noisy one.
    "slowdown": TermKind(
        MAX_FACTOR,
        "{of} at {at} at most {limit} that of {level}",
        default_quantile=0.5,
        parameters=("level", "of"),
        requirements=("level",),
    ),
    # A latency as a fraction of the one at another level, for example with a warm cache compared
    # with a cold one.
    "against": TermKind(
        MAX_SHARE,
        "{of} at {at} at most {limit} of that of {level}",
        default_quantile=0.5,
        parameters=("level", "of"),
        requirements=("level",),
    ),
}
"""The keywords of terms about a load, without the latency metrics (see `list_latency_metrics`)."""

FRACTION_OF_GOOD_TERMS = ("goodput", "task_goodput", "fairness")
"""Keywords of terms that are computed from the fraction of requests or tasks that meet the SLO."""

TASK_TERM_METRICS = {
    "task_time": "e2e",
    "task_wait": "ttft",
    "task_longest_wait": "ttft_from_sent",
    "task_goodput": "goodput",
    "tasks": "requests",
    "good_tasks": "good_requests",
    "task_cost": "cost",
}
"""Keyword of a term about whole tasks -> the metric of requests that it becomes if each task counts
as one request.
"""


# -- terms about responses ------------------------------------------------------------------------

_REFERENCE_SCORE = TermKind(MIN_SHARE, "{kind} at least {limit}", requirements=("reference",))
_SIMILARITY = TermKind(MIN_SHARE, "{kind} at least {limit}", requirements=("against",))

ANSWER_TERM_KINDS = {
    # Mean scores against reference responses.
    **dict.fromkeys(("rouge1", "rouge2", "rougeL", "exact"), _REFERENCE_SCORE),
    "choice": TermKind(MIN_SHARE, "{kind} at least {limit}", requirements=("choice",)),
    "json": TermKind(MIN_SHARE, "{kind} at least {limit}", requirements=("json",)),
    # One of these scores against that of the other endpoint for the same prompts.
    "within": TermKind(
        MAX_SHARE,
        "{of} at most {limit} below that of the other endpoint",
        parameters=("of",),
        requirements=("against",),
    ),
    # The similarity of the responses of the two endpoints.
    **dict.fromkeys(("equal", "agreement_share", "similarity"), _SIMILARITY),
    "agreement": TermKind(MIN_TOKENS, "{kind} at least {limit} tokens", requirements=("against",)),
}
"""The keywords of terms about responses.

All but `within` are names of scores (docs/guides/response-quality.md).
"""

ZERO_OR_ONE_SCORES = ("exact", "choice", "json", "equal")
"""Scores that are 0 or 1 for each response."""


# -- look-ups -------------------------------------------------------------------------------------

CLASS_TERM_KINDS = {*TASK_TERM_METRICS, "errors", "fluidity", "goodput", "slowdown"}
"""Keywords of `TERM_KINDS` that may be about one class of requests."""

WHOLE_LOAD_TERM_KINDS = {*pooled_metrics(), "task_cost"}
"""Keywords that are never about one class of requests.

Times between tokens are pooled over all responses, and it is not known which part of the machines a
class pays for.
"""


def list_latency_metrics(*, include_plugins: bool = True) -> tuple[str, ...]:
    """Return the names of the latencies of requests that a term may limit, such as "ttft".

    Args:
        include_plugins: Whether to include metrics that installed plug-ins have registered. They
            come after those of this package.
    """
    return tuple(
        definition.name
        for definition in METRICS.shown_in("contract")
        if include_plugins or definition in METRICS.builtin_rows
    )


def get_term_kind(keyword: str) -> TermKind:
    """Return the meaning of a keyword.

    A keyword that is in no table is the name of a latency metric, such as `ttft`.
    """
    if keyword in TERM_KINDS:
        return TERM_KINDS[keyword]
    return ANSWER_TERM_KINDS.get(keyword, LATENCY_TERM)


def can_be_about_class(keyword: str) -> bool:
    """Return whether a term with this keyword may be about one class of requests or prompts."""
    if keyword in WHOLE_LOAD_TERM_KINDS:
        return False
    return keyword not in TERM_KINDS or keyword in CLASS_TERM_KINDS
