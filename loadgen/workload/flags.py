"""The flags that override a workload file: what the user typed, and what it means.

Text to values, nothing else: how they change a workload is in `workload`. A flag without a unit is in seconds
(`--goodput`: milliseconds, as in the field). Every fault names its flag; all faults are found at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from loadgen import units
from loadgen.errors import Fault, UserError

METRICS = ("ttft", "ttft_from_sent", "first_answer", "tpot", "e2e")  # what an SLO term may be about: per request
METRIC_ALIASES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "tpot",  # AIPerf's per-request figure of that name is (e2e - ttft) / (n - 1)
    "e2el": "e2e",
    "request_latency": "e2e",
    "end_to_end_latency": "e2e",
}
LIMITS = ("send_lag_share", "stamp_error_share", "cpu_share", "failure_share")

Text = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What was typed, unparsed; None and () are flags that were not given. Field `x_y` is the flag `--x-y`."""

    request_rate: Text = None  # 10, 10/s, 600/min, inf
    burstiness: Text = None
    concurrency: Text = None  # one level; the command line splits 1,2,4 with `levels`
    concurrency_ramp: Text = None
    max_in_flight: Text = None
    num_requests: Text = None
    duration: Text = None
    warmup: Text = None  # 10 and 10s are seconds, 10req is a count; 0 is none
    num_warmups: Text = None
    grace: Text = None
    timeout: Text = None
    stall_timeout: Text = None
    slo: tuple[str, ...] = ()  # ttft:2s, ttft:2s:p95, goodput:99%
    goodput: tuple[str, ...] = ()  # ttft:2000 (ms)
    seed: Text = None
    schedule_seed: Text = None
    input_tokens: Text = None
    output_tokens: Text = None
    limit: tuple[str, ...] = ()  # send_lag_share:10%


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The same, parsed: ns, per second, shares."""

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
    terms: Mapping[str, tuple[int, float | None]]  # metric → limit_ns and, if it was given, its own quantile
    goodput_share: float | None = None
    seed: int | None = None
    schedule_seed: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    limits: Mapping[str, float]


def flag(name: str) -> str:
    """`request_rate` → `--request-rate`."""
    return "--" + name.replace("_", "-")


def parse(overrides: Overrides) -> tuple[Flags, list[Fault]]:
    """The meaning of the flags, and the faults of those that have none (these count as not given)."""
    found: dict[str, Any] = {}
    faults: list[Fault] = []
    terms: dict[str, tuple[int, float | None]] = {}
    limits: dict[str, float] = {}

    def attempt(name: str, text: Text, read: Callable[[str], Any]) -> Any:
        try:
            return read(str(text).strip())
        except units.Wrong as wrong:
            faults.append(UserError(f'"{text}" {wrong}', f"{flag(name)} {text}", wrong.hint))
            return None

    for name, read in _READ.items():
        text = getattr(overrides, name)
        if text is not None:
            found[name] = attempt(name, text, read)
    if overrides.warmup is not None:
        found |= attempt("warmup", overrides.warmup, _warmup) or {}
    if overrides.num_warmups is not None:
        found["warmup_count"] = attempt("num_warmups", overrides.num_warmups, _count(0))
    for name, texts, read in (("slo", overrides.slo, _slo), ("goodput", overrides.goodput, _goodput)):
        for text in texts:
            term = attempt(name, text, read)
            if term is None:
                continue
            metric, value, quantile = term
            if metric == "goodput":
                found["goodput_share"] = value
            else:
                terms[metric] = (value, quantile)
    for text in overrides.limit:
        pair = attempt("limit", text, _limit)
        if pair is not None:
            limits[pair[0]] = pair[1]
    return Flags(**found, terms=terms, limits=limits), faults


def levels(text: str) -> tuple[int, ...]:
    """`--concurrency 1,2,4,8` as numbers, in the order given. Raises UserError."""
    try:
        return tuple(_count(1)(part.strip()) for part in text.split(","))
    except units.Wrong as wrong:
        raise UserError(f'"{text}" {wrong}', f"--concurrency {text}", "one number, or several: 1,2,4,8") from None


def given(overrides: Overrides) -> list[str]:
    """The flags that were given, spelled as on the command line."""
    return [flag(field.name) for field in fields(overrides) if getattr(overrides, field.name) not in (None, ())]


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
            raise units.Wrong("is not a number of that kind", f"a whole number, {least} or more")
        return int(text)

    return read


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) >= 2**64:
        raise units.Wrong("is not a seed", "a whole number from 0 to 2^64 - 1")
    return int(text)


def _positive(text: str) -> float:
    if not re.fullmatch(units.NUMBER, text) or not 0 < float(text) <= 1e6:
        raise units.Wrong(
            "is not a number above zero", "below 1 is burstier than Poisson, 1 is Poisson, above 1 more even"
        )
    return float(text)


def _seconds(text: str) -> int:
    return units.duration_ns(text, bare="s")


def _some_seconds(text: str) -> int:
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


def _term(text: str, bare: str) -> tuple[str, Any, float | None]:
    example = "ttft:2s, ttft:2s:p95, goodput:99%" if bare == "s" else "ttft:2000 tpot:200 (milliseconds)"
    known = f"known: {', '.join((*METRICS, 'goodput'))}; {example}"
    name, colon, rest = text.partition(":")
    metric = METRIC_ALIASES.get(name, name)
    if not colon:
        raise units.Wrong("is not a promise", f"metric:limit, like {example}")
    if metric == "goodput":
        return metric, units.share(rest), None
    if metric not in METRICS:
        import difflib

        near = difflib.get_close_matches(name, (*METRICS, *METRIC_ALIASES, "goodput"), 1)
        raise units.Wrong(f'names no metric: "{name}"', (f'did you mean "{near[0]}"? ' if near else "") + known)
    limit, colon, at = rest.partition(":")
    quantile = units.quantile(at) if colon else None
    ns = units.duration_ns(limit, bare=bare)
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


_READ: dict[str, Callable[[str], Any]] = {
    "request_rate": _rate,
    "burstiness": _positive,
    "concurrency": _count(1),
    "concurrency_ramp": _seconds,
    "max_in_flight": _count(1),
    "num_requests": _count(1),
    "duration": _some_seconds,
    "grace": _seconds,
    "timeout": _some_seconds,
    "stall_timeout": _some_seconds,
    "seed": _seed,
    "schedule_seed": _seed,
    "input_tokens": _count(1),
    "output_tokens": _count(1),
}
