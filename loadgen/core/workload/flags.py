"""What the flags of a load say, as values: the text of each is read by its own parser, and all faults are collected.

A time without a unit is in seconds (for `goodput` in milliseconds, as in other tools). `overrides.py` puts the values
over a workload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from loadgen.core import units
from loadgen.core.errors import LoadgenError, UserError, closest
from loadgen.core.slo import (
    ATTAINMENT,
    DEFAULT_QUANTILE,
    METRIC_ALIASES,
    Slo,
    StopRule,
    Term,
    merge_slos,
    metrics,
)
from loadgen.core.workload.fields import SALT_PATTERN
from loadgen.core.workload.schema import Limits
from loadgen.core.workload.slo_fields import parse_stop_rule
from loadgen.core.workload.stages import MAX_CONCURRENCY


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """What flags say: times in ns, rates per second, shares from 0 to 1; None: not given.

    `faults`: of the flags that could not be read, which count as not given.
    """

    request_rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    stagger: int | None = None
    max_in_flight: int | None = None
    max_in_prefill: int | None = None
    num_requests: int | None = None
    duration: int | None = None
    warmup_ns: int | None = None
    warmup_count: int | None = None
    grace: int | None = None
    timeout: int | None = None
    stall_timeout: int | None = None
    replacement_slo: Slo | None = None  # the terms that replace the SLO of the workload
    added_slo: Slo | None = None  # the terms that are added to it
    seed: int | None = None
    schedule_seed: int | None = None
    salt: str | None = None
    input_tokens: int | None = None
    output_tokens: int | Literal["unlimited"] | None = None
    trace_speed: float | None = None
    trace_slice: tuple[int, int | None] | None = None
    trace_loop: int | None = None
    on_bad_row: Literal["fail", "skip"] | None = None
    trace_replay: Literal["instants", "sessions"] | None = None
    trace_unit: units.TimeUnit | None = None
    stop_when: tuple[StopRule, ...] = ()
    limits: Mapping[str, float] = {}
    errors: tuple[LoadgenError, ...] = ()


BY_KEY = frozenset(
    {
        "burstiness",
        "limit",
        "max_in_prefill",
        "on_bad_row",
        "schedule_seed",
        "stall_timeout",
        "trace_loop",
        "trace_replay",
        "trace_slice",
        "trace_speed",
        "trace_unit",
    }
)
"""What a command line gives as `--set NAME=VALUE`."""


PYTHON_ONLY = {"goodput": "goodput", "num_warmups": "num_warmups"}


def describe_option(name: str, value: object) -> str:
    """How a fault names what was given, by its keyword."""
    if name in BY_KEY:
        return f"--set {name}={value}"
    return f"{name} {value}" if name in PYTHON_ONLY else f"--{name.replace('_', '-')} {value}"


def select_load_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's options that are flags over its workload, as far as they are given."""
    return {name: value for name in FLAGS if (value := options.get(name)) is not None}


def read_flags(**options: Any) -> Overrides:
    """The flags as typed, `x_y` for `--x-y` (a sequence of texts where a flag can be repeated), or numbers.

    A run's other options, and what is None, say nothing here.
    """
    values: dict[str, Any] = {}
    faults: list[LoadgenError] = []
    for name, given in select_load_options(options).items():
        for text in (
            (given,) if isinstance(given, str) or not isinstance(given, Sequence) else given
        ):
            try:
                values |= _read_flag(name, str(text).strip(), values)
            except units.Wrong as wrong:
                faults.append(
                    UserError(
                        wrong.code,
                        f'"{text}" {wrong}',
                        describe_option(name, text),
                        wrong.hint,
                        key=PYTHON_ONLY.get(name, ""),
                    )
                )
    return Overrides(**values, errors=tuple(faults))


def _read_flag(name: str, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Overrides` that a flag gives. `values`: those that the flags before it gave."""
    if name == "warmup":
        return _warmup(text)
    if name == "num_warmups":
        return {"warmup_count": _count(0)(text)}
    if name in ("slo", "goodput"):
        return _add_slo_term(text, "ms" if name == "goodput" else None, values)
    if name == "stop_when":
        return {"stop_when": _add_stop_rule(text, values.get("stop_when", ()))}
    if name == "limit":
        return {"limits": _add_limit(text, values.get("limits", {}))}
    return {name: _PARSERS[name](text)}


MAX_DIGITS = 12  # of a count; more than any load has, and quick to convert
_OPEN_LOOP = "; for arrivals at a rate instead: --request-rate 10"


def parse_concurrency_levels(text: str) -> tuple[int, ...]:
    """The numbers of `--concurrency 1,2,4,8`, in the given order. Raises UserError."""
    try:
        return tuple(_count(1, less_hint=_OPEN_LOOP)(part.strip()) for part in text.split(","))
    except units.Wrong as wrong:
        hint = "one number, or several: 1,2,4,8" if "," in text else wrong.hint
        raise UserError(wrong.code, f'"{text}" {wrong}', f"--concurrency {text}", hint) from None


def _count(minimum: int, maximum: int | None = None, less_hint: str = "") -> Callable[[str], int]:
    """Return a parser of whole numbers; `less_hint` says what to do instead of a smaller number."""

    def parse_count(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text):
            hint = f"a whole number, {minimum} or more, in digits: 8000, not 8k"
            raise units.Wrong("invalid_value", "is not a whole number", hint)
        if len(text) > MAX_DIGITS:
            hint = f"a whole number with at most {MAX_DIGITS} digits"
            raise units.Wrong("out_of_range", "is too many", hint)
        if int(text) < minimum:
            hint = f"a whole number, {minimum} or more{less_hint}"
            raise units.Wrong("invalid_value", f"is less than {minimum}", hint)
        if maximum is not None and int(text) > maximum:
            raise units.Wrong(
                "out_of_range", "is too many", f"a whole number from {minimum} to {maximum:,}"
            )
        return int(text)

    return parse_count


def _output_tokens(text: str) -> int | str:
    return text if text == "unlimited" else _count(1, units.MOST_TOKENS)(text)


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) >= 2**64:
        raise units.Wrong("invalid_value", "is not a seed", "a whole number from 0 to 2^64 - 1")
    return int(text)


def _salt(text: str) -> str:
    if not re.fullmatch(SALT_PATTERN, text):
        raise units.Wrong(
            "invalid_value",
            "is not a salt",
            "a word of letters, digits, . _ -, or fresh: a new one in every run",
        )
    return text


def _positive(hint: str) -> Callable[[str], float]:
    def parse_positive(text: str) -> float:
        if not re.fullmatch(units.NUMBER, text) or not 0 < float(text) <= 1e6:
            raise units.Wrong("invalid_value", "is not a number above zero", hint)
        return float(text)

    return parse_positive


def _word(meanings: Mapping[str, str]) -> Callable[[str], str]:
    def parse_word(text: str) -> str:
        if text not in meanings:
            known = ", ".join(
                f"{word} ({meaning})" if meaning else word for word, meaning in meanings.items()
            )
            raise units.Wrong("unknown_name", "is not known", f"known: {known}")
        return text

    return parse_word


def _seconds(text: str) -> int:
    return units.duration_ns(text, bare="s")


def _seconds_above_zero(text: str) -> int:
    ns = _seconds(text)
    if ns == 0:
        raise units.Wrong("out_of_range", "is no time at all", "a duration above zero, like 30s")
    return ns


def _warmup(text: str) -> dict[str, int]:
    count = re.fullmatch(r"([0-9]{1,12}) ?(req|reqs|requests)", text)
    if count:
        return {"warmup_count": int(count[1])}
    try:
        return {"warmup_ns": _seconds(text)}
    except units.Wrong as wrong:
        raise units.Wrong(
            wrong.code, str(wrong), "10 or 10s is ten seconds, 10req is ten requests, 0 is none"
        ) from None


def _add_slo_term(
    text: str, default_unit: str | None, values: Mapping[str, Slo | None]
) -> dict[str, Slo]:
    """Return the SLO field of `Overrides` that gains a term, with that term.

    Args:
        text: The term, such as `ttft:2s:p95`. A leading `+` adds it to the SLO of the workload.
        default_unit: The unit of a limit without one; None requires a unit.
        values: The fields of the options before this one.

    Raises:
        units.Wrong: The text is no term, or the same objective was specified before.
    """
    is_added = text.startswith("+")
    slo = parse_slo_term(text.removeprefix("+"), default_unit)
    for earlier in filter(None, (values.get("replacement_slo"), values.get("added_slo"))):
        _check_no_common_objective(earlier, slo)
    field = "added_slo" if is_added else "replacement_slo"
    return {field: merge_slos(values.get(field) or Slo(), slo)}


def _check_no_common_objective(first: Slo, second: Slo) -> None:
    """Raise `units.Wrong` if both SLOs limit one metric at one percentile, or the attainment."""
    hint = "keep one of them; two percentiles of one metric are two objectives"
    limited = {(term.metric, term.quantile) for term in first.terms}
    for term in second.terms:
        if (term.metric, term.quantile) in limited:
            name = f"{term.metric} p{term.quantile * 100:g}"
            raise units.Wrong("duplicate", f"limits {name} a second time", hint)
    if first.goodput_share is not None and second.goodput_share is not None:
        raise units.Wrong("duplicate", "limits the attainment a second time", "keep one of them")


def parse_slo_term(text: str, default_unit: str | None = None) -> Slo:
    """Return the SLO of one term such as `ttft:2s`, `ttft:2s:p95` or `attainment:99%`.

    A term without a percentile means p99. A limit needs a unit unless there is a default unit.
    Raises `units.Wrong` if the text is no term.
    """
    example = "ttft:2000 tpot:200 (milliseconds)"
    if default_unit is None:
        example = "ttft:2s, ttft:2s:p95, attainment:99%"
    known = f"known: {', '.join((*metrics(), ATTAINMENT))}; {example}"
    name, colon, limit_text = text.partition(":")
    if not colon:
        raise units.Wrong("invalid_value", "is no SLO term", f"METRIC:LIMIT, like {example}")
    if name == ATTAINMENT:
        return Slo(goodput_share=units.share(limit_text))
    metric = METRIC_ALIASES.get(name, name)
    if metric not in metrics():
        suggestion = _suggest_slo_term(name, limit_text)
        raise units.Wrong("unknown_name", f'names no metric: "{name}"', suggestion + known)
    limit, colon, quantile_text = limit_text.partition(":")
    quantile = units.quantile(quantile_text) if colon else DEFAULT_QUANTILE
    limit_ns = units.duration_ns(limit, default_unit)
    if limit_ns == 0:
        raise units.Wrong("out_of_range", "has a limit of zero", known)
    return Slo(terms=(Term(metric=metric, limit_ns=limit_ns, quantile=quantile),))


def _suggest_slo_term(name: str, limit_text: str) -> str:
    """Return a question that suggests a term for a name that is no metric; "" without one.

    Other tools write the percentile into the name, as in `p95_ttft` or `ttft.p95`.
    """
    lowered = name.lower()
    percentile = re.search(r"[._-]?(p[0-9]+)[._-]?", lowered)
    if percentile:
        lowered = lowered.replace(percentile[0], "")
    suggested = closest(lowered, (*metrics(), *METRIC_ALIASES, ATTAINMENT))
    if lowered == "goodput":
        suggested = ATTAINMENT
    if not suggested:
        return ""
    suffix = f":{percentile[1]}" if percentile else ""
    return f'did you mean "{suggested}:{limit_text}{suffix}"? '


def _add_stop_rule(text: str, rules: Sequence[StopRule]) -> tuple[StopRule, ...]:
    """Return the rules and the one of the text. Raises `units.Wrong` for a second limit."""
    rule = parse_stop_rule(text)
    if any((rule.metric, rule.quantile) == (one.metric, one.quantile) for one in rules):
        name = text.strip().rpartition(":")[0]
        raise units.Wrong("duplicate", f"limits {name} a second time", "keep one of them")
    return (*rules, rule)


def _add_limit(text: str, limits: Mapping[str, float]) -> dict[str, float]:
    """Return the limits of the verdict and the one of the text, such as `cpu_share:95%`.

    Raises `units.Wrong` for an unknown limit and for one that was specified before.
    """
    name, _, value = text.partition(":")
    if name not in Limits.model_fields:
        known = ", ".join(Limits.model_fields)
        raise units.Wrong(
            "unknown_name", f'names no limit: "{name}"', f"known: {known}; like send_lag_share:10%"
        )
    if name in limits:
        raise units.Wrong("duplicate", f"sets {name} a second time", "keep one of them")
    return {**limits, name: units.share(value)}


_PARSERS: dict[str, Callable[[str], Any]] = {
    "request_rate": lambda text: units.rate_per_s(text, bare=True),
    "burstiness": _positive("below 1 is burstier than Poisson, 1 is Poisson, above 1 more even"),
    "concurrency": _count(1, MAX_CONCURRENCY, _OPEN_LOOP),
    "stagger": _seconds,
    "max_in_flight": _count(1),
    "max_in_prefill": _count(1),
    "num_requests": _count(1),
    "duration": _seconds_above_zero,
    "grace": _seconds,
    "timeout": _seconds_above_zero,
    "stall_timeout": _seconds_above_zero,
    "seed": _seed,
    "schedule_seed": _seed,
    "salt": _salt,
    "trace_speed": _positive("2 is twice as fast as it was, 0.5 half as fast"),
    "trace_slice": lambda text: units.time_slice(text, bare="s"),
    "trace_loop": _count(1, 1_000_000),
    "on_bad_row": _word({"fail": "", "skip": "leave the row out, and count it"}),
    "trace_replay": _word(
        {
            "instants": "each request when it came",
            "sessions": "after what it waited for, and the recorded pause",
        }
    ),
    "trace_unit": _word({"s": "seconds", "ms": "milliseconds", "us": "", "ns": ""}),
    "input_tokens": _count(1, units.MOST_TOKENS),
    "output_tokens": _output_tokens,
}
FLAGS = (*_PARSERS, "warmup", "num_warmups", "slo", "goodput", "stop_when", "limit")
