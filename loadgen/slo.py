"""A promise about latencies: terms with a limit at a quantile, and the share of requests that keeps all. Pure."""

from __future__ import annotations

import msgspec


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One promise: `metric` (a key of TERMS) is at most `limit_ns` at `quantile` (0.99 is p99)."""

    metric: str
    limit_ns: int
    quantile: float = 0.99


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What was promised: every term at its own quantile and, if asked for, the share of requests that meet them all."""

    terms: tuple[Term, ...] = ()
    goodput_share: float | None = None
