"""Fault injection of the simulated server: which request fails, and how.

This module names the failures, parses them from an option, a header or a mapping, and draws which
request has which failure. The draw depends only on the seed and on the number of the request. The
server then carries the failure out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting
from loadgen.sim.engine.latency_model import draw_uniform, parse_duration_ns

FAILURE_EFFECTS: dict[str, str] = {
    "http_429": "HTTP 429 with Retry-After (@: that time, default 1s)",
    "http_500": "HTTP 500",
    "http_503": "HTTP 503",
    "slow_first_byte": "response headers are delayed (@: how long, default 1s)",
    "empty": "HTTP 200 with the usual headers and an empty body",
    "reset_before": "response headers, then a TCP reset before the first token",
    "idle_reset": "a TCP reset without a response, if the connection was used before",
    "reset_after": "a TCP reset after a token (@: which)",
    "truncate": "the connection closes after a token, with an incomplete body (@: which)",
    "stall": "no more bytes after a token, and the connection stays open (@: which)",
    "malformed": "the event of a token is invalid JSON (@: which); the stream continues",
    "error_event": "an error event after a token, then a regular end (@: which)",
    "engine_error": "the engine fails after a token, reported as the API defines (@: which)",
    "oversized": "the event of a token has 1 MiB of text (@: which)",
    "split": "each byte of each event is a separate write",
    "wrong_count": "the reported usage has seven tokens too many (@: the number that it reports)",
    "clamp": "the response ends early, as if the server had a limit (@: tokens, default 8)",
    "corrupt": "one word of the response is wrong (@: only above so many requests in flight)",
    "one_event": "all text comes with the first token",
    "no_text": "events have no text; usage counts the tokens",
    "no_finish": "no finish reason",
    "no_done": "no [DONE] at the end",
    "close_delimited": "no chunked encoding; the body ends with the connection",
    "connection_close": "a complete response with `Connection: close`",
}
"""All failures and their effects. `@` takes a token index (0 is the first), or a duration."""

DURATION_FAILURES = {"http_429": 1_000_000_000, "slow_first_byte": 1_000_000_000}
"""Failures whose `@` is a duration, with the default in ns."""

TOKEN_FAILURES = frozenset(
    ("reset_after", "truncate", "stall", "malformed", "error_event", "engine_error", "oversized")
)
"""Failures that happen at a token; without `@` the token is drawn."""

COUNT_FAILURES: dict[str, int | None] = {"wrong_count": None, "clamp": 8}
"""Failures whose `@` is a number of tokens, with the default."""

LOAD_FAILURES: dict[str, int] = {"corrupt": 0}
"""Failures whose `@` is a number of requests in flight, with the default. They happen above it."""

_MAX_DIGITS = 9  # of a number of tokens, so that it fits into 32 bits
_SUM_TOLERANCE = 1e-9  # fractions such as 0.1 are not exact, so their sum may exceed 1 by this much
# Numbers of the random streams that this module draws from; the latency model uses 1 and 2.
_FAILURE_STREAM = 3
_TOKEN_STREAM = 4


class InjectedFailure(msgspec.Struct, frozen=True):
    """One failure of one request.

    Attributes:
        name: A name of FAILURE_EFFECTS.
        argument: What follows the `@` in an option, or its default: a token index for
            TOKEN_FAILURES, ns for DURATION_FAILURES, a number of tokens for COUNT_FAILURES and a
            number of requests for LOAD_FAILURES. None if the failure has no argument, or if its
            token is not drawn yet.
    """

    name: str
    argument: int | None = None

    @property
    def duration_ns(self) -> int:
        """The duration of a failure of DURATION_FAILURES, such as the 2 s of `http_429@2s`."""
        return self.argument or 0

    @property
    def token_count(self) -> int:
        """The number of tokens of a failure of COUNT_FAILURES, such as the 8 of `clamp@8`."""
        return self.argument or 0

    def happens_at(self, in_flight: int) -> bool:
        """Return whether the failure happens with so many requests in flight.

        All failures but those of LOAD_FAILURES always happen.
        """
        return self.name not in LOAD_FAILURES or in_flight > (self.argument or 0)


class FailureFraction(msgspec.Struct, frozen=True):
    """A failure and the fraction of requests that have it, from 0 to 1."""

    failure: InjectedFailure
    fraction: float


class FailurePlan(msgspec.Struct, frozen=True):
    """The failures to inject. A request has at most one, so the fractions sum to at most 1."""

    fractions: tuple[FailureFraction, ...] = ()
    seed: int = 0

    def draw_failure(self, request_number: int, output_tokens: int) -> InjectedFailure | None:
        """Draw the failure of a request. Return None if it has none.

        One uniform random number decides: the first failure happens if it is below the fraction of
        this failure, the second one if it is below the sum of the first two fractions, and so on.

        Args:
            request_number: The number of the request, counted by arrival.
            output_tokens: The length of the completion.
        """
        if not self.fractions:
            return None

        uniform = draw_uniform(self.seed, _FAILURE_STREAM, request_number)
        cumulative_fraction = 0.0
        for entry in self.fractions:
            cumulative_fraction += entry.fraction
            if uniform < cumulative_fraction:
                return choose_failing_token(entry.failure, output_tokens, self.seed, request_number)

        return None


def choose_failing_token(
    failure: InjectedFailure, output_tokens: int, seed: int, request_number: int
) -> InjectedFailure:
    """Return a failure of a request together with the token at which it happens.

    The user may have specified the token, which is limited to the last one of the completion.
    Otherwise the token is drawn from the seed and the number of the request. The index of the token
    is the argument of the failure. A failure that does not happen at a token is returned unchanged.
    """
    if failure.name not in TOKEN_FAILURES:
        return failure

    specified_index = failure.argument
    if specified_index is None:
        token_index = int(draw_uniform(seed, _TOKEN_STREAM, request_number) * output_tokens)
    else:
        token_index = min(specified_index, output_tokens - 1)

    return InjectedFailure(failure.name, token_index)


def parse_failure(text: str, where: str = "") -> InjectedFailure:
    """Parse one failure of a header or flag: `truncate`, `truncate@3`, `http_429@2s`.

    Args:
        text: The name of a failure and, after an `@`, the argument that some failures take.
        where: The place of the text in an error, such as the name of the option.

    Raises:
        UserError: The failure does not exist, or its argument is not valid.
    """
    name_text, at_sign, argument_text = text.partition("@")
    name = name_text.strip()
    if name not in FAILURE_EFFECTS:
        hint = "known: " + ", ".join(FAILURE_EFFECTS)
        raise UserError("unknown_name", f'unknown failure "{name}"', where, hint)

    if not at_sign:
        return InjectedFailure(name, _default_argument(name))

    argument = _parse_argument(name, argument_text.strip(), where)
    return InjectedFailure(name, argument)


def _parse_argument(name: str, text: str, where: str) -> int:
    """Parse what follows the `@` of a failure.

    It is a duration, which is returned in ns (DURATION_FAILURES), the index of a token
    (TOKEN_FAILURES), a number of tokens (COUNT_FAILURES) or of requests (LOAD_FAILURES). All other
    failures take no `@`.

    Raises:
        UserError: The failure takes no `@`, or what follows it is not valid.
    """
    if name in DURATION_FAILURES:
        return parse_duration_ns(text, where)
    if name in TOKEN_FAILURES or name in COUNT_FAILURES or name in LOAD_FAILURES:
        return _parse_token_number(name, text, where)

    names_with_argument = (
        *DURATION_FAILURES,
        *COUNT_FAILURES,
        *LOAD_FAILURES,
        *sorted(TOKEN_FAILURES),
    )
    problem = f'the failure "{name}" takes no "@"'
    hint = f"only these failures take it: {', '.join(names_with_argument)}"
    raise UserError("unsupported", problem, where, hint)


def _default_argument(name: str) -> int | None:
    """Return the argument of a failure that is written without one.

    This is ns or a number of tokens or requests. None is for a failure that takes no argument, that
    draws its token for each request, or that does without a number.
    """
    if name in DURATION_FAILURES:
        return DURATION_FAILURES[name]
    if name in LOAD_FAILURES:
        return LOAD_FAILURES[name]
    return COUNT_FAILURES.get(name)


def _parse_token_number(name: str, argument: str, where: str) -> int:
    """Parse the token index, or number of tokens or requests, after the `@`. Raises UserError."""
    # `int` alone would also accept a sign, spaces, underscores and digits of other scripts.
    is_number = argument.isascii() and argument.isdigit() and len(argument) <= _MAX_DIGITS
    if not is_number:
        problem = f'"{argument}" must be an integer >= 0'
        hint = f"for example {name}@3; 0 is the first token"
        raise UserError("invalid_value", problem, where, hint)
    return int(argument)


def parse_failure_plan(text: str, seed: int = 0, where: str = "--fault") -> FailurePlan:
    """Parse `truncate:0.05,http_429@2s:0.1`. A failure without a fraction applies to every request.

    Raises CombinedError with all errors, or UserError for a failure that has two fractions.
    """
    fractions: dict[str, Any] = {}
    for entry in text.split(","):
        if not entry.strip():
            continue

        name, colon, fraction = (piece.strip() for piece in entry.partition(":"))
        if name in fractions:
            raise UserError(
                "duplicate", f"the failure {name} is specified twice", where, "remove one"
            )

        fractions[name] = fraction if colon else 1.0

    return parse_failure_fractions(fractions, seed, where)


def parse_failure_fractions(
    fractions: Mapping[str, object], seed: int = 0, where: str = "faults"
) -> FailurePlan:
    """Parse a mapping from failures to the fractions of requests that have them.

    Args:
        fractions: For example `{"truncate": 0.05, "http_429@2s": 0.1}`.
        seed: The seed by which the requests are drawn.
        where: The place of the mapping in an error, such as the name of a file.

    Raises:
        CombinedError: Some of the entries are not valid. All errors are reported.
    """
    entries: list[FailureFraction] = []
    errors: list[LoadgenError] = []
    for text, value in fractions.items():
        with collecting(errors):
            failure = parse_failure(str(text), where)
            fraction = _parse_fraction(str(text), value, where)
            entries.append(FailureFraction(failure, fraction))

    total_fraction = sum(entry.fraction for entry in entries)
    if not errors and total_fraction > 1.0 + _SUM_TOLERANCE:
        problem = "the fractions add up to more than 1"
        hint = "reduce them; a request has at most one failure"
        errors.append(UserError("out_of_range", problem, where, hint))

    if errors:
        raise CombinedError(errors)

    return FailurePlan(tuple(entries), seed)


def _parse_fraction(failure_text: str, value: Any, where: str) -> float:
    """Convert a fraction from text or YAML to a number from 0 to 1. Raises UserError."""
    try:
        fraction = float(value)
    except (TypeError, ValueError):
        is_valid = False
    else:
        is_valid = 0.0 <= fraction <= 1.0

    if not is_valid:
        problem = f'the fraction of "{failure_text}" is {value!r}'
        raise UserError("out_of_range", problem, where, "use a number from 0 to 1")

    return fraction
