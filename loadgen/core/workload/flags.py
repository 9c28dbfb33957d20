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
from loadgen.core.errors import Fault, UserError, closest
from loadgen.core.slo import METRIC_ALIASES, StopRule, metrics
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
    concurrency_ramp: int | None = None
    max_in_flight: int | None = None
    max_in_prefill: int | None = None
    num_requests: int | None = None
    duration: int | None = None
    warmup_ns: int | None = None
    warmup_count: int | None = None
    grace: int | None = None
    timeout: int | None = None
    stall_timeout: int | None = None
    terms: Mapping[str, tuple[int, float | None]] = {}  # metric → limit in ns, quantile
    goodput_share: float | None = None
    seed: int | None = None
    schedule_seed: int | None = None
    salt: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    trace_speed: float | None = None
    trace_slice: tuple[int, int | None] | None = None
    trace_loop: int | None = None
    on_bad_row: Literal["fail", "skip"] | None = None
    trace_replay: Literal["instants", "sessions"] | None = None
    stop_when: tuple[StopRule, ...] = ()
    limits: Mapping[str, float] = {}
    faults: tuple[Fault, ...] = ()


BY_KEY = frozenset(
    {
        "burstiness",
        "concurrency_ramp",
        "limit",
        "max_in_prefill",
        "on_bad_row",
        "schedule_seed",
        "stall_timeout",
        "trace_loop",
        "trace_replay",
        "trace_slice",
        "trace_speed",
    }
)
"""What a command line gives as `--set NAME=VALUE`."""


PYTHON_ONLY = {"goodput": "goodput", "num_warmups": "num_warmups"}


def place(name: str, value: object) -> str:
    """How a fault names what was given, by its keyword."""
    if name in BY_KEY:
        return f"--set {name}={value}"
    return f"{name} {value}" if name in PYTHON_ONLY else f"--{name.replace('_', '-')} {value}"


def of_the_load(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's options that are flags over its workload, as far as they are given."""
    return {name: value for name in FLAGS if (value := options.get(name)) is not None}


def read_flags(**options: Any) -> Overrides:
    """The flags as typed, `x_y` for `--x-y` (a sequence of texts where a flag can be repeated), or numbers.

    A run's other options, and what is None, say nothing here.
    """
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, given in of_the_load(options).items():
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
                        place(name, text),
                        wrong.hint,
                        key=PYTHON_ONLY.get(name, ""),
                    )
                )
    return Overrides(**values, faults=tuple(faults))


def _read_flag(name: str, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Overrides` that a flag gives. `values`: those that the flags before it gave."""
    if name == "warmup":
        return _warmup(text)
    if name == "num_warmups":
        return {"warmup_count": _count(0)(text)}
    if name in ("slo", "goodput"):
        metric, limit, quantile = _term(text, "ms" if name == "goodput" else None)
        if metric == "goodput":
            return {"goodput_share": limit}
        return {"terms": {**values.get("terms", {}), metric: (limit, quantile)}}
    if name == "stop_when":
        return {"stop_when": (*values.get("stop_when", ()), parse_stop_rule(text))}
    if name == "limit":
        return {"limits": {**values.get("limits", {}), **_limit(text)}}
    return {name: _PARSERS[name](text)}


def levels(text: str) -> tuple[int, ...]:
    """The numbers of `--concurrency 1,2,4,8`, in the given order. Raises UserError."""
    try:
        return tuple(_count(1)(part.strip()) for part in text.split(","))
    except units.Wrong as wrong:
        hint = "one number, or several: 1,2,4,8" if "," in text else wrong.hint
        raise UserError(wrong.code, f'"{text}" {wrong}', f"--concurrency {text}", hint) from None


def _count(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse_count(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < minimum:
            hint = f"a whole number, {minimum} or more, in digits: 8000, not 8k"
            raise units.Wrong("invalid_value", "is not a number of that kind", hint)
        if maximum is not None and int(text) > maximum:
            raise units.Wrong(
                "out_of_range", "is too many", f"a whole number from {minimum} to {maximum:,}"
            )
        return int(text)

    return parse_count


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


def _term(text: str, bare: str | None) -> tuple[str, Any, float | None]:
    """A term of an SLO. `bare`: the unit of a limit without one, as of `goodput`; one of `--slo` needs its unit."""
    example = "ttft:2000 tpot:200 (milliseconds)" if bare else "ttft:2s, ttft:2s:p95, goodput:99%"
    known = f"known: {', '.join((*metrics(), 'goodput'))}; {example}"
    name, colon, limit_text = text.partition(":")
    metric = METRIC_ALIASES.get(name, name)
    if not colon:
        raise units.Wrong("invalid_value", "is not a promise", f"metric:limit, like {example}")
    if metric == "goodput":
        return metric, units.share(limit_text), None
    if metric not in metrics():
        at = re.search(r"[._-]?(p[0-9]+)[._-]?", name)  # p95_ttft, ttft.p95
        similar = closest(
            name.replace(at[0], "") if at else name, (*metrics(), *METRIC_ALIASES, "goodput")
        )
        meant = (
            f'did you mean "{similar}:{limit_text}{f":{at[1]}" if at else ""}"? ' if similar else ""
        )
        raise units.Wrong("unknown_name", f'names no metric: "{name}"', meant + known)
    limit, colon, quantile_text = limit_text.partition(":")
    quantile = units.quantile(quantile_text) if colon else None
    ns = units.duration_ns(limit, bare)
    if ns == 0:
        raise units.Wrong("out_of_range", "promises no time at all", known)
    return metric, ns, quantile


def _limit(text: str) -> dict[str, float]:
    name, _, value = text.partition(":")
    if name not in Limits.model_fields:
        known = ", ".join(Limits.model_fields)
        raise units.Wrong(
            "unknown_name", f'names no limit: "{name}"', f"known: {known}; like send_lag_share:10%"
        )
    return {name: units.share(value)}


_PARSERS: dict[str, Callable[[str], Any]] = {
    "request_rate": lambda text: units.rate_per_s(text, bare=True),
    "burstiness": _positive("below 1 is burstier than Poisson, 1 is Poisson, above 1 more even"),
    "concurrency": _count(1, MAX_CONCURRENCY),
    "concurrency_ramp": _seconds,
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
    "input_tokens": _count(1, units.MOST_TOKENS),
    "output_tokens": _count(1, units.MOST_TOKENS),
}
FLAGS = (*_PARSERS, "warmup", "num_warmups", "slo", "goodput", "stop_when", "limit")
