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
from loadgen.sim.engine.latency_model import duration_ns, uniform

NAMES: dict[str, str] = {
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

TIMED = {"http_429": 1_000_000_000, "slow_first_byte": 1_000_000_000}
"""Faults whose `@` is a duration, with the default in ns."""

PLACED = frozenset(
    ("reset_after", "truncate", "stall", "malformed", "error_event", "engine_error", "oversized")
)
"""Faults that happen at a token; without `@` the token is drawn."""

COUNTED: dict[str, int] = {"wrong_count": -1, "clamp": 8}
"""Faults whose `@` is a number of tokens, with the default."""


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault of one request.

    `at` is the token index for PLACED faults, ns for TIMED faults, tokens for COUNTED faults, and -1 if it is unused or
    not drawn yet.
    """

    name: str
    at: int = -1


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults, and the share of requests that has each; the shares sum to at most 1."""

    entries: tuple[tuple[PlannedFault, float], ...] = ()
    seed: int = 0

    def draw(self, number: int, output_tokens: int) -> PlannedFault | None:
        """The fault of request `number` (counted from 0 by arrival), or None. A request has at most one fault."""
        if not self.entries:
            return None
        point = uniform(self.seed, 3, number)
        for fault, share in self.entries:
            if point < share:
                return placed(fault, output_tokens, self.seed, number)
            point -= share
        return None


def placed(fault: PlannedFault, output_tokens: int, seed: int, number: int) -> PlannedFault:
    """`fault` with its token drawn if it needs a token and names none. The token is never after the last one."""
    if fault.name not in PLACED:
        return fault
    last = output_tokens - 1
    at = min(fault.at, last) if fault.at >= 0 else int(uniform(seed, 4, number) * output_tokens)
    return PlannedFault(fault.name, at)


def one(text: str, where: str = "") -> PlannedFault:
    """Parse one fault of a header or flag: `truncate`, `truncate@3`, `http_429@2s`. Raises UserError."""
    name, at_sign, at = (part.strip() for part in text.partition("@"))
    if name not in NAMES:
        raise UserError(
            "unknown_name", f'unknown fault "{name}"', where, "known: " + ", ".join(NAMES)
        )
    if name in TIMED:
        return PlannedFault(name, duration_ns(at, where) if at_sign else TIMED[name])
    if not at_sign:
        return PlannedFault(name, COUNTED.get(name, -1))
    if name not in PLACED and name not in COUNTED:
        known = ", ".join((*TIMED, *COUNTED, *sorted(PLACED)))
        raise UserError("unsupported", f'"{name}" takes no "@"', where, f"only these do: {known}")
    if not at.isascii() or not at.isdigit() or len(at) > 9:
        raise UserError(
            "invalid_value",
            f'not a token index: "{at}"',
            where,
            f"write it as {name}@3; 0 is the first token",
        )
    return PlannedFault(name, int(at))


def parse(text: str, seed: int = 0, where: str = "--fault") -> FaultPlan:
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
    return parse_faults(shares, seed, where)


def parse_faults(shares: Mapping[str, Any], seed: int = 0, where: str = "faults") -> FaultPlan:
    """The plan for a mapping (from YAML) of fault, with its `@` if any, to share. Raises Faults with all errors."""
    entries: list[tuple[PlannedFault, float]] = []
    errors: list[Wrong] = []
    for text, value in shares.items():
        try:
            fault = one(str(text), where)
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
    return FaultPlan(tuple(entries), seed)
