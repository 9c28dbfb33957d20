"""Which request fails how: a pure function of seed and request number. No sockets, no clock, no state.

The server carries a fault out. This module only names the faults, parses them from a flag, a header or a mapping, and
draws which request has which fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loadgen.core.errors import CombinedError, UserError
from loadgen.core.errors import LoadgenError as Wrong
from loadgen.sim.engine.latency_model import draw_uniform, parse_duration_ns

FAILURE_EFFECTS: dict[str, str] = {
    "http_429": "429 with Retry-After (@: that time, default 1s)",
    "http_500": "500",
    "http_503": "503",
    "slow_first_byte": "not even the response head for a while (@: how long, default 1s)",
    "empty": "200 with the right headers and an empty body",
    "reset_before": "head, then a TCP reset before the first token",
    "idle_reset": "a TCP reset without one byte, if the connection was used before; else no fault",
    "reset_after": "a TCP reset after a token (@: which)",
    "truncate": "the connection closes after a token without ending the body (@: which)",
    "stall": "silence after a token, for ever (@: which)",
    "malformed": "the event of one token is broken JSON (@: which); the stream goes on",
    "error_event": "an error event after a token, then a proper end (@: which)",
    "engine_error": "the engine fails after a token, told in the dialect's own way (@: which)",
    "oversized": "the event of one token carries a mebibyte of text (@: which)",
    "split": "every byte of every event in a write of its own",
    "wrong_count": "usage counts seven tokens more than were sent (@: the tokens that it counts)",
    "clamp": "the answer ends early, as after a limit of the server's own (@: tokens, default 8)",
    "one_event": "all text comes with the first token, then nothing until the end",
    "no_text": "no event carries text; usage counts the tokens",
    "no_finish": "no finish reason anywhere, else a proper end",
    "no_done": "no [DONE], else a proper end",
    "close_delimited": "no chunked framing: the body ends with the connection",
    "connection_close": "a good answer, then `Connection: close`",
}
"""All faults and their effects. `@` takes the index of a token (0 is the first), or a duration."""

DURATION_FAILURES = {"http_429": 1_000_000_000, "slow_first_byte": 1_000_000_000}
"""Faults whose `@` is a duration, with the default in ns."""

TOKEN_FAILURES = frozenset(
    ("reset_after", "truncate", "stall", "malformed", "error_event", "engine_error", "oversized")
)
"""Faults that happen at a token; without `@` the token is drawn."""

COUNT_FAILURES: dict[str, int] = {"wrong_count": -1, "clamp": 8}
"""Faults whose `@` is a number of tokens, with the default."""


class InjectedFailure(msgspec.Struct, frozen=True):
    """One fault of one request.

    `at` is the token index for PLACED faults, ns for TIMED faults, tokens for COUNTED faults, and -1 if it is unused or
    not drawn yet.
    """

    name: str
    at: int = -1


class FailurePlan(msgspec.Struct, frozen=True):
    """Faults, and the share of requests that has each; the shares sum to at most 1."""

    entries: tuple[tuple[InjectedFailure, float], ...] = ()
    seed: int = 0

    def draw(self, number: int, output_tokens: int) -> InjectedFailure | None:
        """The fault of request `number` (counted from 0 by arrival), or None. A request has at most one fault."""
        if not self.entries:
            return None
        point = draw_uniform(self.seed, 3, number)
        for fault, share in self.entries:
            if point < share:
                return with_drawn_token(fault, output_tokens, self.seed, number)
            point -= share
        return None


def with_drawn_token(
    fault: InjectedFailure, output_tokens: int, seed: int, number: int
) -> InjectedFailure:
    """`fault` with its token drawn if it needs a token and names none. The token is never after the last one."""
    if fault.name not in TOKEN_FAILURES:
        return fault
    last = output_tokens - 1
    at = (
        min(fault.at, last) if fault.at >= 0 else int(draw_uniform(seed, 4, number) * output_tokens)
    )
    return InjectedFailure(fault.name, at)


def parse_failure(text: str, where: str = "") -> InjectedFailure:
    """Parse one fault of a header or flag: `truncate`, `truncate@3`, `http_429@2s`. Raises UserError."""
    name, at_sign, at = (part.strip() for part in text.partition("@"))
    if name not in FAILURE_EFFECTS:
        raise UserError(
            "unknown_name", f'unknown fault "{name}"', where, "known: " + ", ".join(FAILURE_EFFECTS)
        )
    if name in DURATION_FAILURES:
        return InjectedFailure(
            name, parse_duration_ns(at, where) if at_sign else DURATION_FAILURES[name]
        )
    if not at_sign:
        return InjectedFailure(name, COUNT_FAILURES.get(name, -1))
    if name not in TOKEN_FAILURES and name not in COUNT_FAILURES:
        known = ", ".join((*DURATION_FAILURES, *COUNT_FAILURES, *sorted(TOKEN_FAILURES)))
        raise UserError("unsupported", f'"{name}" takes no "@"', where, f"only these do: {known}")
    if not at.isascii() or not at.isdigit() or len(at) > 9:
        raise UserError(
            "invalid_value",
            f'not a token index: "{at}"',
            where,
            f"write it as {name}@3; 0 is the first token",
        )
    return InjectedFailure(name, int(at))


def parse_failure_plan(text: str, seed: int = 0, where: str = "--fault") -> FailurePlan:
    """Parse `truncate:0.05,http_429@2s:0.1`. A fault without a share applies to every request.

    Raises Faults, and UserError for a fault that has two shares.
    """
    shares: dict[str, Any] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, colon, share = entry.partition(":")
        if name.strip() in shares:
            what = f"{name.strip()} has two shares"
            raise UserError("duplicate", what, where, "keep one of them")
        shares[name.strip()] = share.strip() if colon else 1.0
    return parse_failure_shares(shares, seed, where)


def parse_failure_shares(
    shares: Mapping[str, Any], seed: int = 0, where: str = "faults"
) -> FailurePlan:
    """The plan for a mapping (from YAML) of fault, with its `@` if any, to share. Raises Faults with all errors."""
    entries: list[tuple[InjectedFailure, float]] = []
    errors: list[Wrong] = []
    for text, value in shares.items():
        try:
            fault = parse_failure(str(text), where)
        except UserError as error:
            errors.append(error)
            continue
        try:
            share = float(value)
        except (TypeError, ValueError):
            share = -1.0
        if 0.0 <= share <= 1.0:
            entries.append((fault, share))
        else:
            errors.append(
                UserError(
                    "out_of_range",
                    f'share of "{text}" is {value!r}',
                    where,
                    "a share is a number from 0 to 1",
                )
            )
    if not errors and sum(share for _, share in entries) > 1.0 + 1e-9:
        errors.append(
            UserError(
                "out_of_range",
                "the shares add up to more than 1",
                where,
                "a request has at most one fault",
            )
        )
    if errors:
        raise CombinedError(errors)
    return FailurePlan(tuple(entries), seed)
