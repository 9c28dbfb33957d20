"""The flags that override a workload file: the text the user typed, and the values it stands for.

This module only parses; `overrides` applies the values to a workload. A time without a unit is in seconds (for
`--goodput` in milliseconds, as in other tools). Every fault names its flag, and all faults are collected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from loadgen import units
from loadgen.errors import Fault, Faults, UserError, closest

MOST_LANES = 1_000_000

METRICS = (
    "ttft",
    "ttft_from_sent",
    "first_answer",
    "tpot",
    "e2e",
)  # metrics an SLO term can use, one value per request
METRIC_ALIASES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "tpot",  # AIPerf defines it per request as (e2e - ttft) / (n - 1)
    "e2el": "e2e",
    "request_latency": "e2e",
    "end_to_end_latency": "e2e",
}
SALT_PATTERN = "[A-Za-z0-9._-]{1,200}"
LIMITS = (
    "send_lag_share", "stamp_error_share", "event_error_share", "tpot_error_share", "cpu_share", "failure_share",
)  # fmt: skip

Text = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """The flags as typed, not parsed; None and () mean not given. Field `x_y` is the flag `--x-y`."""

    request_rate: Text = None  # 10, 10/s, 600/min, inf
    burstiness: Text = None
    concurrency: Text = None  # one level; the command line splits 1,2,4 with `levels`
    concurrency_ramp: Text = None
    max_in_flight: Text = None
    num_requests: Text = None
    duration: Text = None
    warmup: Text = None  # 10 and 10s are seconds, 10req is a count; 0 means no warm-up
    num_warmups: Text = None
    grace: Text = None
    timeout: Text = None
    stall_timeout: Text = None
    slo: tuple[str, ...] = ()  # ttft:2s, ttft:2s:p95, goodput:99%
    goodput: tuple[str, ...] = ()  # ttft:2000 (ms)
    seed: Text = None
    schedule_seed: Text = None
    salt: Text = None  # a word, or fresh
    input_tokens: Text = None
    output_tokens: Text = None
    limit: tuple[str, ...] = ()  # send_lag_share:10%


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The parsed flags: times in ns, rates per second, shares from 0 to 1; None: not given."""

    request_rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    concurrency_ramp: int | None = None
    max_in_flight: int | None = None
    num_requests: int | None = None
    duration: int | None = None
    warmup_ns: int | None = None
    warmup_count: int | None = None
    grace: int | None = None
    timeout: int | None = None
    stall_timeout: int | None = None
    terms: Mapping[str, tuple[int, float | None]]  # metric → (limit in ns, quantile or None if the flag gives none)
    goodput_share: float | None = None
    seed: int | None = None
    schedule_seed: int | None = None
    salt: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    limits: Mapping[str, float]


def flag(name: str) -> str:
    """`request_rate` → `--request-rate`."""
    return "--" + name.replace("_", "-")


def parse(overrides: Overrides) -> tuple[Flags, list[Fault]]:
    """Parse the flags. Returns the values and the faults; a flag with a fault counts as not given."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    terms: dict[str, tuple[int, float | None]] = {}
    limits: dict[str, float] = {}

    def parse_or_report(name: str, text: Text, parse_text: Callable[[str], Any]) -> Any:
        try:
            return parse_text(str(text).strip())
        except units.Wrong as wrong:
            faults.append(UserError(f'"{text}" {wrong}', f"{flag(name)} {text}", wrong.hint))
            return None

    for name, parse_text in _PARSERS.items():
        text = getattr(overrides, name)
        if text is not None:
            values[name] = parse_or_report(name, text, parse_text)
    if overrides.warmup is not None:
        values |= parse_or_report("warmup", overrides.warmup, _warmup) or {}
    if overrides.num_warmups is not None:
        values["warmup_count"] = parse_or_report("num_warmups", overrides.num_warmups, _count(0))
    for name, texts, parse_text in (("slo", overrides.slo, _slo), ("goodput", overrides.goodput, _goodput)):
        for text in texts:
            term = parse_or_report(name, text, parse_text)
            if term is None:
                continue
            metric, value, quantile = term
            if metric == "goodput":
                values["goodput_share"] = value
            else:
                terms[metric] = (value, quantile)
    for text in overrides.limit:
        name_and_share = parse_or_report("limit", text, _limit)
        if name_and_share is not None:
            limits[name_and_share[0]] = name_and_share[1]
    return Flags(**values, terms=terms, limits=limits), faults


def seed_and_salt(seed: Text, salt: Text) -> tuple[int | None, str | None]:
    """The two flags alone, for commands that make their workloads themselves. Raises Faults."""
    flags, faults = parse(Overrides(seed=seed, salt=salt))
    if faults:
        raise Faults(faults)
    return flags.seed, flags.salt


def levels(text: str) -> tuple[int, ...]:
    """The numbers of `--concurrency 1,2,4,8`, in the given order. Raises UserError."""
    try:
        return tuple(_count(1)(part.strip()) for part in text.split(","))
    except units.Wrong as wrong:
        hint = "one number, or several: 1,2,4,8" if "," in text else wrong.hint
        raise UserError(f'"{text}" {wrong}', f"--concurrency {text}", hint) from None


def given(overrides: Overrides) -> list[str]:
    """The flags that were given, spelled as on the command line."""
    return [flag(field.name) for field in fields(overrides) if getattr(overrides, field.name) not in (None, ())]


def _count(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse_count(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < minimum:
            raise units.Wrong("is not a number of that kind", f"a whole number, {minimum} or more")
        if maximum is not None and int(text) > maximum:
            raise units.Wrong("is too many", f"a whole number from {minimum} to {maximum:,}")
        return int(text)

    return parse_count


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) >= 2**64:
        raise units.Wrong("is not a seed", "a whole number from 0 to 2^64 - 1")
    return int(text)


def _salt(text: str) -> str:
    if not re.fullmatch(SALT_PATTERN, text):
        raise units.Wrong("is not a salt", "a word of letters, digits, . _ -, or fresh: a new one in every run")
    return text


def _positive(text: str) -> float:
    if not re.fullmatch(units.NUMBER, text) or not 0 < float(text) <= 1e6:
        raise units.Wrong(
            "is not a number above zero", "below 1 is burstier than Poisson, 1 is Poisson, above 1 more even"
        )
    return float(text)


def _seconds(text: str) -> int:
    return units.duration_ns(text, bare="s")


def _seconds_above_zero(text: str) -> int:
    ns = _seconds(text)
    if ns == 0:
        raise units.Wrong("is no time at all", "a duration above zero, like 30s")
    return ns


def _warmup(text: str) -> dict[str, int]:
    count = re.fullmatch(r"([0-9]{1,12}) ?(req|reqs|requests)", text)
    if count:
        return {"warmup_count": int(count[1])}
    try:
        return {"warmup_ns": _seconds(text)}
    except units.Wrong as wrong:
        raise units.Wrong(str(wrong), "10 or 10s is ten seconds, 10req is ten requests, 0 is none") from None


def _term(text: str, default_unit: str) -> tuple[str, Any, float | None]:
    example = "ttft:2s, ttft:2s:p95, goodput:99%" if default_unit == "s" else "ttft:2000 tpot:200 (milliseconds)"
    known = f"known: {', '.join((*METRICS, 'goodput'))}; {example}"
    name, colon, limit_text = text.partition(":")
    metric = METRIC_ALIASES.get(name, name)
    if not colon:
        raise units.Wrong("is not a promise", f"metric:limit, like {example}")
    if metric == "goodput":
        return metric, units.share(limit_text), None
    if metric not in METRICS:
        similar = closest(name, (*METRICS, *METRIC_ALIASES, "goodput"))
        raise units.Wrong(f'names no metric: "{name}"', (f'did you mean "{similar}"? ' if similar else "") + known)
    limit, colon, quantile_text = limit_text.partition(":")
    quantile = units.quantile(quantile_text) if colon else None
    ns = units.duration_ns(limit, bare=default_unit)
    if ns == 0:
        raise units.Wrong("promises no time at all", known)
    return metric, ns, quantile


def _slo(text: str) -> tuple[str, Any, float | None]:
    return _term(text, "s")


def _goodput(text: str) -> tuple[str, Any, float | None]:
    return _term(text, "ms")


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in LIMITS:
        raise units.Wrong(f'names no limit: "{name}"', f"known: {', '.join(LIMITS)}; like send_lag_share:10%")
    return name, units.share(value)


def _rate(text: str) -> float:
    return math.inf if text == "inf" else units.rate_per_s(text, bare=True)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "request_rate": _rate,
    "burstiness": _positive,
    "concurrency": _count(1, MOST_LANES),
    "concurrency_ramp": _seconds,
    "max_in_flight": _count(1),
    "num_requests": _count(1),
    "duration": _seconds_above_zero,
    "grace": _seconds,
    "timeout": _seconds_above_zero,
    "stall_timeout": _seconds_above_zero,
    "seed": _seed,
    "schedule_seed": _seed,
    "salt": _salt,
    "input_tokens": _count(1, units.MOST_TOKENS),
    "output_tokens": _count(1, units.MOST_TOKENS),
}
