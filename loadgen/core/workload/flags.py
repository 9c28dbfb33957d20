"""Read the options that change a workload, and collect the mistakes in them.

A time without a unit is in seconds; for `goodput` it is in milliseconds, as in other tools.
`overrides.py` applies the options to a workload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from loadgen.core import units
from loadgen.core.errors import LoadgenError, UserError, closest
from loadgen.core.slo import (
    ANSWERS,
    ATTAINMENT,
    DEFAULT_QUANTILE,
    FLUIDITY,
    METRIC_ALIASES,
    FluidityTerm,
    Slo,
    StopRule,
    Term,
    merge_slos,
    metrics,
)
from loadgen.core.workload.fields import SALT_PATTERN
from loadgen.core.workload.schema import Limits
from loadgen.core.workload.slo_fields import (
    ANSWERS_HINT,
    check_answers_share,
    parse_stop_rule,
)
from loadgen.core.workload.stages import MAX_CONCURRENCY
from loadgen.core.workload.trajectories import (
    TrajectoryEnd,
    TrajectorySalt,
    TrajectoryStart,
)


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the options that change a workload, None for an option that is not specified.

    Most fields have the name of their option: `request_rate` is that of `--request-rate`. Durations
    are in ns, rates per second, and shares are numbers from 0 to 1.

    Attributes:
        stagger: The time over which the virtual users of a closed loop start.
        grace: How long responses may take after the end of the load.
        check_answers: The file of the questions with known answers that are added to the requests.
        check_share: The share of all requests that these questions are.
        on_bad_row: Whether a row of a trace with a mistake ends the reading or is left out.
        turns: Whether only the first turn of each conversation of a data set is sent, or all.
        replacement_slo: The terms that replace the SLO of the workload.
        added_slo: The terms that are added to it.
        errors: The mistakes in options. Such options count as not specified.
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
    replacement_slo: Slo | None = None
    added_slo: Slo | None = None
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
    check_answers: str | None = None
    check_share: float | None = None
    turns: Literal["first", "all"] | None = None
    trajectory_start: TrajectoryStart | None = None
    trajectory_end: TrajectoryEnd | None = None
    trajectory_salt: TrajectorySalt | None = None
    trajectory_history: Literal["recorded", "server"] | None = None
    idle_cap: int | None = None
    stop_when: tuple[StopRule, ...] = ()
    limits: Mapping[str, float] = {}
    errors: tuple[LoadgenError, ...] = ()


SET_OPTIONS = frozenset(
    {
        "burstiness",
        "idle_cap",
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
        "trajectory_end",
        "trajectory_history",
        "trajectory_salt",
        "trajectory_start",
        "turns",
    }
)
"""The options that a command line specifies as `--set NAME=VALUE`."""

PYTHON_OPTIONS = {"goodput": "goodput", "num_warmups": "num_warmups"}
"""The options that only exist as keyword arguments in Python, with the key in error messages."""

MAX_COUNT_DIGITS = 12
"""Most digits of a count. No load has a count with more digits."""
MAX_FACTOR = 1e6
MAX_LOOPS = 1_000_000
OPEN_LOOP_HINT = "; for arrivals at a rate, use --request-rate 10"


def describe_option(name: str, value: object) -> str:
    """Return an option as it is written, for error messages."""
    if name in SET_OPTIONS:
        return f"--set {name}={value}"
    if name in PYTHON_OPTIONS:
        return f"{name} {value}"
    return f"--{name.replace('_', '-')} {value}"


def select_load_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return those of the options of a run that change its workload and are specified."""
    return {name: options[name] for name in LOAD_OPTIONS if options.get(name) is not None}


def read_flags(**options: Any) -> Overrides:
    """Parse the values of options that change a workload, such as `read_flags(concurrency="8")`.

    Other options are ignored, and so are values of None. The errors of all values that are not
    valid are in `errors` of the result, so that the user sees them together.

    Args:
        options: The value of each option by its name; `x_y` is the option `--x-y`. A value is the
            text that the user typed, a number, or a sequence of texts for an option that can be
            repeated.
    """
    reader = _OptionReader()
    errors: list[LoadgenError] = []
    for name, value in _iterate_values(select_load_options(options)):
        try:
            reader.read(name, str(value).strip())
        except units.InvalidValueError as error:
            problem = f'"{value}" {error}'
            key = PYTHON_OPTIONS.get(name, "")
            place = describe_option(name, value)
            errors.append(UserError(error.code, problem, place, error.hint, key=key))

    return Overrides(**reader.fields, errors=tuple(errors))


def _iterate_values(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each option with its value, and a repeated option once with each of its values."""
    for name, value in options.items():
        is_repeated = isinstance(value, Sequence) and not isinstance(value, str)
        if is_repeated:
            for single_value in value:
                yield name, single_value
        else:
            yield name, value


def parse_concurrency_levels(text: str) -> tuple[int, ...]:
    """Return the numbers of `--concurrency 1,2,4,8` in their order. Raises UserError."""
    parse_count = _count_parser(1, hint_if_less=OPEN_LOOP_HINT)
    try:
        return tuple(parse_count(part.strip()) for part in text.split(","))
    except units.InvalidValueError as error:
        hint = "give one number, or several: 1,2,4,8" if "," in text else error.hint
        raise UserError(error.code, f'"{text}" {error}', f"--concurrency {text}", hint) from None


class _OptionReader:
    """Parses options one after the other, and collects the fields of `Overrides` that they set.

    Attributes:
        fields: The values of the fields so far, by their names.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def read(self, name: str, text: str) -> None:
        """Set the field of an option, such as `request_rate`, to the value that the user typed.

        An option that can be repeated adds its value to those of its earlier occurrences. Raises
        `units.InvalidValueError` if the value is not valid.
        """
        match name:
            case "warmup":
                self.fields |= _parse_warmup(text)
            case "num_warmups":
                self.fields["warmup_count"] = _count_parser(0)(text)
            case "slo":
                self._add_slo_term(text, default_unit=None)
            case "goodput":
                self._add_slo_term(text, default_unit="ms")
            case "stop_when":
                self._add_stop_rule(text)
            case "limit":
                self._add_validity_limit(text)
            case _:
                self.fields[name] = _PARSERS[name](text)

    def _add_slo_term(self, text: str, default_unit: str | None) -> None:
        """Add the term of an option `--slo`.

        Options without a plus, such as `--slo ttft:2s`, together replace the SLO of the workload.
        Options with a plus, such as `--slo +ttft:2s`, are added to it.

        Args:
            text: The term, with the plus if there is one.
            default_unit: The unit of a limit that has none, such as "ms". None requires a unit.

        Raises:
            units.InvalidValueError: The text is no term, or the same objective was specified
                before.
        """
        field = "added_slo" if text.startswith("+") else "replacement_slo"
        new_term = parse_slo_term(text.removeprefix("+"), default_unit)

        # No objective may be specified twice, not even once with and once without a plus.
        for field_of_terms in ("replacement_slo", "added_slo"):
            _check_no_common_objective(self.fields.get(field_of_terms, Slo()), new_term)

        self.fields[field] = merge_slos(self.fields.get(field, Slo()), new_term)

    def _add_stop_rule(self, text: str) -> None:
        """Add the rule of an option `--stop-when`, which stops a run early.

        Raises `units.InvalidValueError` if the text is no rule, or if an earlier rule limits the
        same metric at the same percentile.
        """
        rule = parse_stop_rule(text)
        earlier_rules: tuple[StopRule, ...] = self.fields.get("stop_when", ())
        limited_metrics = {(earlier.metric, earlier.quantile) for earlier in earlier_rules}
        if (rule.metric, rule.quantile) in limited_metrics:
            name = text.strip().rpartition(":")[0]
            raise units.InvalidValueError(
                "duplicate", f"limits {name} a second time", "keep one of them"
            )

        self.fields["stop_when"] = (*earlier_rules, rule)

    def _add_validity_limit(self, text: str) -> None:
        """Add a limit of a valid run (`--set limit=...`).

        A run that exceeds such a limit is INVALID. For example, `cpu_share:95%` allows a worker to
        use 95 % of a core.

        Raises `units.InvalidValueError` for an unknown limit and for one that was specified before.
        """
        name, _, value = text.partition(":")
        earlier_limits: dict[str, float] = self.fields.get("limits", {})
        if name not in Limits.model_fields:
            hint = f"use one of {', '.join(Limits.model_fields)}, for example send_lag_share:10%"
            raise units.InvalidValueError("unknown_name", f'has the unknown limit "{name}"', hint)
        if name in earlier_limits:
            raise units.InvalidValueError(
                "duplicate", f"sets {name} a second time", "keep one of them"
            )

        self.fields["limits"] = earlier_limits | {name: units.share(value)}


# -- parsers of single values --------------------------------------------------------------------


def _count_parser(
    minimum: int, maximum: int | None = None, hint_if_less: str = ""
) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` to `maximum` (None for no upper bound).

    `hint_if_less` is appended to the hint for a number that is too small, so it begins with a
    separator such as "; ". It can suggest another option to a user who meant something else.
    """

    def parse_count(text: str) -> int:
        """Return the whole number of a text. Raises `units.InvalidValueError`."""
        count = _parse_integer(text, minimum)
        if count < minimum:
            hint = f"write an integer of at least {minimum}{hint_if_less}"
            raise units.InvalidValueError("invalid_value", f"is less than {minimum}", hint)

        if maximum is not None and count > maximum:
            hint = f"write an integer from {minimum} to {maximum:,}"
            raise units.InvalidValueError("out_of_range", "is too many", hint)

        return count

    return parse_count


def _parse_integer(text: str, minimum: int) -> int:
    """Return the integer of a text of digits. `minimum` is only named in the hint.

    Raises `units.InvalidValueError` if the text is no integer, or is longer than MAX_COUNT_DIGITS.
    """
    if not re.fullmatch(r"-?[0-9]+", text):
        hint = f"write an integer of at least {minimum} in digits: 8000, not 8k"
        raise units.InvalidValueError("invalid_value", "is not an integer", hint)
    if len(text) > MAX_COUNT_DIGITS:
        hint = f"write an integer with at most {MAX_COUNT_DIGITS} digits"
        raise units.InvalidValueError("out_of_range", "is too many", hint)
    return int(text)


def _positive_number_parser(hint: str) -> Callable[[str], float]:
    """Return a parser of numbers above zero and up to MAX_FACTOR."""

    def parse_positive_number(text: str) -> float:
        if not re.fullmatch(units.NUMBER, text) or not 0 < float(text) <= MAX_FACTOR:
            raise units.InvalidValueError("invalid_value", "is not a number above zero", hint)
        return float(text)

    return parse_positive_number


def _choice_parser(meanings: Mapping[str, str]) -> Callable[[str], str]:
    """Return a parser that accepts only some words and returns them as they are.

    `meanings` explains each of the words in hints. A word that needs no explanation has "".
    """

    def parse_choice(text: str) -> str:
        if text in meanings:
            return text
        choices = [f"{word} ({meaning})" if meaning else word for word, meaning in meanings.items()]
        raise units.InvalidValueError(
            "unknown_name", "is not known", f"known: {', '.join(choices)}"
        )

    return parse_choice


def _parse_output_tokens(text: str) -> int | str:
    """Return a number of tokens, or "unlimited", with which no limit is sent."""
    if text == "unlimited":
        return text
    return _count_parser(1, units.MOST_TOKENS)(text)


def _parse_seed(text: str) -> int:
    """Return a seed of 64 bits. Raises `units.InvalidValueError`."""
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) >= 2**64:
        raise units.InvalidValueError(
            "invalid_value", "is not a seed", "use an integer from 0 to 2^64 - 1"
        )
    return int(text)


def _parse_salt(text: str) -> str:
    """Return a salt, a word that decides the texts of prompts. Raises `units.InvalidValueError`."""
    if not re.fullmatch(SALT_PATTERN, text):
        hint = "use letters, digits and . _ -, or `fresh` for a new salt in every run"
        raise units.InvalidValueError("invalid_value", "is not a salt", hint)
    return text


def _parse_seconds(text: str) -> int:
    """Return a duration in ns. A number without a unit is in seconds."""
    return units.duration_ns(text, default_unit="s")


def _parse_seconds_above_zero(text: str) -> int:
    """Return a duration in ns that is not zero. A number without a unit is in seconds."""
    duration_ns = _parse_seconds(text)
    if duration_ns == 0:
        raise units.InvalidValueError(
            "out_of_range", "is not a time above zero", "use a duration above zero, like 30s"
        )
    return duration_ns


def _parse_warmup(text: str) -> dict[str, int]:
    """Return the field of `Overrides` for a warm-up, with its value.

    It is `warmup_ns` for a duration such as `10s`, and `warmup_count` for requests such as `10req`.
    Raises `units.InvalidValueError`.
    """
    count = re.fullmatch(r"(?P<number>[0-9]{1,12}) ?(req|reqs|requests)", text)
    if count:
        return {"warmup_count": int(count["number"])}

    try:
        return {"warmup_ns": _parse_seconds(text)}
    except units.InvalidValueError as error:
        hint = "write 10 or 10s for ten seconds, 10req for ten requests, or 0 for no warm-up"
        raise units.InvalidValueError(error.code, str(error), hint) from None


# -- terms of an SLO -----------------------------------------------------------------------------

_FLUIDITY_HINT = (
    "write the share of token deadlines that a percentage of the requests meets, like "
    "fluidity:90%:p95"
)


def _check_no_common_objective(first: Slo, second: Slo) -> None:
    """Raise `units.InvalidValueError` if both SLOs limit the attainment or the same percentile."""
    hint = "keep one of them. Two percentiles of one metric are two objectives and allowed"
    limited_objectives = {(term.metric, term.quantile) for term in first.terms}
    for term in second.terms:
        if (term.metric, term.quantile) in limited_objectives:
            name = f"{term.metric} p{term.quantile * 100:g}"
            raise units.InvalidValueError("duplicate", f"limits {name} a second time", hint)

    if first.goodput_share is not None and second.goodput_share is not None:
        raise units.InvalidValueError(
            "duplicate", "limits the attainment a second time", "keep one of them"
        )
    if first.fluidity is not None and second.fluidity is not None:
        raise units.InvalidValueError(
            "duplicate", "limits the fluidity index a second time", "keep one of them"
        )
    if first.answers_share is not None and second.answers_share is not None:
        raise units.InvalidValueError(
            "duplicate", "limits the share of right answers a second time", "keep one of them"
        )


def parse_slo_term(text: str, default_unit: str | None = None) -> Slo:
    """Return the SLO of one term: `METRIC:LIMIT`, `METRIC:LIMIT:PERCENTILE` or `attainment:SHARE`.

    Examples are `ttft:2s`, `ttft:2s:p95`, `fluidity:90%:p95`, `answers:95%` and `attainment:99%`. A
    term of a latency or of the fluidity index without a percentile means p99. A time needs a unit
    unless there is a default unit. Raises `units.InvalidValueError` if the text is no term.
    """
    if text == FLUIDITY:
        raise units.InvalidValueError("invalid_value", "has no limit", _FLUIDITY_HINT)
    if text == ANSWERS:
        raise units.InvalidValueError("invalid_value", "has no limit", ANSWERS_HINT)
    if ":" not in text:
        hint = f"METRIC:LIMIT, like {_slo_term_examples(default_unit)}"
        raise units.InvalidValueError("invalid_value", "is not an SLO term", hint)
    name, _, condition = text.partition(":")
    if name == ATTAINMENT:
        return Slo(goodput_share=units.share(condition))
    if name == FLUIDITY:
        return Slo(fluidity=_parse_fluidity_term(condition))
    if name == ANSWERS:
        return Slo(answers_share=_parse_answers_share(condition))
    return Slo(terms=(_parse_latency_term(name, condition, default_unit),))


def _parse_fluidity_term(condition: str) -> FluidityTerm:
    """Return the objective of token deadlines from the condition `90%` or `90%:p95`.

    Raises `units.InvalidValueError` if the condition is not valid.
    """
    index_text, separator, quantile_text = condition.partition(":")
    quantile = _parse_part_of_fluidity(units.quantile, quantile_text) if separator else None
    least_index = _parse_part_of_fluidity(units.share, index_text)
    if least_index == 0:
        raise units.InvalidValueError("out_of_range", "is always met", _FLUIDITY_HINT)
    return FluidityTerm(least_index=least_index, quantile=quantile or DEFAULT_QUANTILE)


def _parse_answers_share(condition: str) -> float:
    """Return the share of checked answers that must be right, from a condition such as `95%`.

    Raises `units.InvalidValueError` if the condition is no percentage, or not between 0 % and
    100 %.
    """
    try:
        share = units.share(condition)
    except units.InvalidValueError as error:
        problem = f'is not valid: "{condition}" {error}'
        raise units.InvalidValueError(error.code, problem, ANSWERS_HINT) from None
    return check_answers_share(share)


def _parse_part_of_fluidity(parse: Callable[[str], float], text: str) -> float:
    """Return the number of a part of the objective of token deadlines, read by `parse`.

    Raises `units.InvalidValueError` if the part is not valid. The message names the part.
    """
    try:
        return parse(text)
    except units.InvalidValueError as error:
        problem = f'is not valid: "{text}" {error}'
        raise units.InvalidValueError(error.code, problem, _FLUIDITY_HINT) from None


def _parse_latency_term(name: str, condition: str, default_unit: str | None) -> Term:
    """Return the term that limits a latency, from `ttft` and the condition `2s` or `2s:p95`.

    Raises `units.InvalidValueError` if the metric is not known, or the condition is not valid.
    """
    metric = METRIC_ALIASES.get(name, name)
    known_terms = f"known: {', '.join((*metrics(), FLUIDITY, ANSWERS, ATTAINMENT))}"

    hint = f"{known_terms}; {_slo_term_examples(default_unit)}"
    if metric not in metrics():
        problem = f'has the unknown metric "{name}"'
        suggestion = _suggest_slo_term(name, condition)
        hint_with_suggestion = f"{suggestion} {hint}".lstrip()
        raise units.InvalidValueError("unknown_name", problem, hint_with_suggestion)

    limit, _, quantile_text = condition.partition(":")
    has_quantile = ":" in condition
    quantile = units.quantile(quantile_text) if has_quantile else DEFAULT_QUANTILE
    limit_ns = units.duration_ns(limit, default_unit)
    if limit_ns == 0:
        raise units.InvalidValueError("out_of_range", "has a limit of zero", hint)

    return Term(metric=metric, limit_ns=limit_ns, quantile=quantile)


def _slo_term_examples(default_unit: str | None) -> str:
    """Return examples of terms for hints. With the default unit ms, limits need no unit."""
    if default_unit == "ms":
        return "ttft:2000 tpot:200 (milliseconds)"
    return "ttft:2s, ttft:2s:p95, fluidity:90%:p95, answers:95%, attainment:99%"


_PERCENTILE_IN_NAME = re.compile(r"[._-]?(?P<percentile>p[0-9]+)[._-]?")
"""A percentile in the name of a metric, with the separators around it, such as `p95_`."""


def _suggest_slo_term(name: str, limit_text: str) -> str:
    """Return a question that suggests a term for a name that is no metric, or "" for no idea.

    Other tools write the percentile into the name, as in `p95_ttft` or `ttft.p95`. For example,
    `p95_ttft:2s` gives `did you mean "ttft:2s:p95"?`.
    """
    name = name.lower()
    percentile = _PERCENTILE_IN_NAME.search(name)
    if percentile is None:
        known_name = _closest_slo_name(name)
        term = f"{known_name}:{limit_text}"
    else:
        known_name = _closest_slo_name(name.replace(percentile[0], ""))
        term = f"{known_name}:{limit_text}:{percentile['percentile']}"

    return f'did you mean "{term}"?' if known_name else ""


def _closest_slo_name(name: str) -> str | None:
    """Return the name of a metric, or of the attainment, that is like a name, or None."""
    if name == "goodput":
        # Other tools use this name for the share of requests that meet the limits.
        return ATTAINMENT
    return closest(name, (*metrics(), *METRIC_ALIASES, FLUIDITY, ANSWERS, ATTAINMENT))


_PARSERS: dict[str, Callable[[str], Any]] = {
    "request_rate": lambda text: units.rate_per_s(text, default_unit="s"),
    "burstiness": _positive_number_parser(
        "use 1 for Poisson arrivals, less than 1 for burstier ones, more than 1 for "
        "more regular ones"
    ),
    "concurrency": _count_parser(1, MAX_CONCURRENCY, OPEN_LOOP_HINT),
    "stagger": _parse_seconds,
    "max_in_flight": _count_parser(1),
    "max_in_prefill": _count_parser(1),
    "num_requests": _count_parser(1),
    "duration": _parse_seconds_above_zero,
    "grace": _parse_seconds,
    "timeout": _parse_seconds_above_zero,
    "stall_timeout": _parse_seconds_above_zero,
    "seed": _parse_seed,
    "schedule_seed": _parse_seed,
    "salt": _parse_salt,
    "trace_speed": _positive_number_parser(
        "use 2 for twice the recorded speed, 0.5 for half of it"
    ),
    "trace_slice": lambda text: units.time_slice(text, default_unit="s"),
    "trace_loop": _count_parser(1, MAX_LOOPS),
    "on_bad_row": _choice_parser({"fail": "", "skip": "leave the row out and count it"}),
    "trace_replay": _choice_parser(
        {
            "instants": "send each request at its recorded time",
            "sessions": (
                "send each request after the responses it waited for, and after the recorded pause"
            ),
        }
    ),
    "trace_unit": _choice_parser({"s": "seconds", "ms": "milliseconds", "us": "", "ns": ""}),
    "turns": _choice_parser(
        {
            "first": "send the first question of each conversation",
            "all": "send every turn, each after the response to the previous turn",
        }
    ),
    "trajectory_start": _choice_parser(
        {
            "beginning": "begin every session with its first turn",
            "middle": "begin the first session of each user at a random turn, in a filled cache",
        }
    ),
    "trajectory_end": _choice_parser(
        {
            "all": "end with the last response of all sessions",
            "first": "end when a user has no further session",
        }
    ),
    "trajectory_salt": _choice_parser(
        {
            "session": "nothing is shared between sessions",
            "user": "only system prompts are shared",
            "pass": "only system prompts are shared, within a pass over the data set",
            "none": "",
        }
    ),
    "trajectory_history": _choice_parser(
        {"recorded": "responses of the data set", "server": "real responses"}
    ),
    "idle_cap": _parse_seconds,
    "input_tokens": _count_parser(1, units.MOST_TOKENS),
    "output_tokens": _parse_output_tokens,
    "check_answers": str,
    "check_share": units.share,
}
LOAD_OPTIONS = (*_PARSERS, "warmup", "num_warmups", "slo", "goodput", "stop_when", "limit")
"""The options that change a workload."""
