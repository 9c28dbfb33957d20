"""Service level objectives (SLO): latency limits at quantiles, and the share of requests that meet all. Pure."""

from __future__ import annotations

import msgspec


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One SLO term: `metric` (a key of TERMS) is at most `limit_ns` at `quantile` (0.99 is p99)."""

    metric: str
    limit_ns: int
    quantile: float = 0.99


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """An SLO: the terms, and optionally the minimum share of requests that meet all terms."""

    terms: tuple[Term, ...] = ()
    goodput_share: float | None = None
