"""Runs against a contract: PASS, FAIL or INCONCLUSIVE for every term, with the figures and the reason.

Pure. A term passes when its whole interval keeps the promise and fails when none of it does. Whatever else happens,
from missing data to a client that was the limit, is neither: INCONCLUSIVE, with what would decide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from loadgen import errors as codes
from loadgen import format
from loadgen.contracts.evaluate import Evaluator, Held, MeasuredLevel, Money
from loadgen.contracts.lint import words
from loadgen.contracts.schema import Contract, ContractLevel
from loadgen.contracts.steady_samples import Missing, RecordedRun
from loadgen.metrics import columns
from loadgen.stats.quantile_interval import Bounds

SCHEMA = 1
PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
WARM = 0.2  # share of prompt tokens from cache, from which a cache was warm; cold: metrics.CACHED_SHARE
NO_ANSWER = "not one of "  # how a verdict on a measurement begins that is about the server


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One term. `value`, `low`, `high` and `limit` are in `unit`; null where there is none (not bounded, not known)."""

    term: str
    level: str
    kind: Literal["must", "should"]
    verdict: Verdict
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    unit: str = ""
    sample: int = 0


class LevelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One level: what was sent, in which runs (folders), and what became of its terms."""

    name: str
    verdict: Verdict
    workload: str
    load: str
    runs: tuple[str, ...]
    requests: int
    ok: int
    terms: tuple[Judgement, ...]
    trouble: str = ""  # why nothing can be said about any of its terms
    notes: tuple[str, ...] = ()


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict.json`. The verdict is that of the must terms; should terms are told and decide nothing."""

    schema: int = SCHEMA
    contract: str
    contract_sha256: str
    verdict: Verdict
    sentence: str
    confidence: float
    target: str
    model: str
    server: str
    simulated: bool
    started: str
    ended: str
    version: str
    levels: tuple[LevelVerdict, ...]
    interrupted: bool = False
    preflight: tuple[str, ...] = ()  # warnings of the preflight, in words


def exit_code(validation: Validation) -> int:
    """0 PASS, 1 FAIL, 3 INCONCLUSIVE; 130 when the user broke it off."""
    if validation.interrupted:
        return codes.INTERRUPTED
    return {PASS: codes.OK, FAIL: codes.SLO_MISSED, INCONCLUSIVE: codes.UNSOUND}[validation.verdict]


def sentence(found: Sequence[LevelVerdict]) -> str:
    """The verdict in one sentence."""
    terms = [term for level in found for term in level.terms if term.kind == "must"]
    counts = {verdict: sum(term.verdict == verdict for term in terms) for verdict in (PASS, FAIL, INCONCLUSIVE)}
    soft = [term for level in found for term in level.terms if term.kind == "should" and term.verdict != PASS]
    more = f"; {len(soft)} of the should terms not shown to hold" if soft else ""
    if not terms:
        return "nothing must hold: the contract has should terms only" + more
    if counts[FAIL]:
        return f"{counts[FAIL]} of {len(terms)} promises broken" + more
    if counts[INCONCLUSIVE]:
        return f"{counts[INCONCLUSIVE]} of {len(terms)} promises could be neither shown nor refuted" + more
    return f"all {len(terms)} promises kept" + more


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """FAIL when one failed, else INCONCLUSIVE when one is, else PASS; nothing at all shows nothing."""
    if FAIL in verdicts:
        return "FAIL"
    return "INCONCLUSIVE" if INCONCLUSIVE in verdicts or not verdicts else "PASS"


def levels(
    contract: Contract, measured: Mapping[str, MeasuredLevel], money: Money | None = None
) -> tuple[LevelVerdict, ...]:
    """The verdict on every level of the contract, in its order."""
    return tuple(_level(contract, level, measured, money) for level in contract.levels)


def _level(
    contract: Contract, level: ContractLevel, measured: Mapping[str, MeasuredLevel], money: Money | None
) -> LevelVerdict:
    found = measured.get(level.name, MeasuredLevel(trouble="it was not run"))
    blocked = _blocked(level, found)
    bench = Evaluator(contract.confidence, measured, found, money)
    terms = [
        _judged(bench, term, level.name, kind, blocked)
        for kind, listed in (("must", level.must), ("should", level.should))
        for term in listed
    ]
    summaries = [run.summary for run in found.runs]
    notes = [warning for summary in summaries for warning in summary.verdict.warnings if not _ours(warning)]
    return LevelVerdict(
        name=level.name,
        verdict=together([term.verdict for term in terms if term.kind == "must"]) if level.must else "PASS",
        workload=level.workload,
        load=summaries[0].load.arrival if summaries else "",
        runs=tuple(run.folder for run in found.runs),
        requests=sum(summary.requests.scheduled for summary in summaries),
        ok=sum(summary.requests.ok for summary in summaries),
        terms=tuple(terms),
        trouble=blocked,
        notes=tuple(dict.fromkeys(notes)),
    )


def _ours(warning: str) -> bool:
    """Whether a warning is about what a contract judges itself: failures, and how much a percentile rests on."""
    return warning.startswith(("validity limit failure_share", "SLO term "))


def _blocked(level: ContractLevel, found: MeasuredLevel) -> str:
    """Why nothing can be said about any term of a level; "" when something can."""
    if found.trouble or not found.runs:
        return found.trouble or "there is no run"
    for run in found.runs:
        summary = run.summary
        if summary.run.state != "finished":
            return f"{run.folder} has no clean end ({summary.run.state})"
        reasons = [reason for reason in summary.verdict.reasons if not reason.startswith(NO_ANSWER)]
        if reasons:
            return f"the measurement in {run.folder} is not valid: {'; '.join(reasons)}"
        if trouble := _cache(level, run):
            return trouble
    return ""


def _cache(level: ContractLevel, run: RecordedRun) -> str:
    """Why the cache was not as the contract says; "" when it was, or when nothing is said."""
    part = run.summary.tokens.cached_share
    if level.cache is None or (level.cache == "cold" and part is None and not run.header.shares_prompts):
        return ""  # unique prompts are cold, whether the server says so or not
    if part is None:
        return f"the server does not say what came from its cache: whether it was {level.cache} cannot be seen"
    if level.cache == "cold" and part > columns.CACHED_SHARE:
        return f"{format.percent(part)} of the prompt tokens came from cache: it was not cold"
    if level.cache == "warm" and part < WARM:
        return f"only {format.percent(part)} of the prompt tokens came from cache: it was not warm"
    return ""


def _judged(bench: Evaluator, term: Any, level: str, kind: Any, blocked: str) -> Judgement:
    said = {"term": words(term), "level": level, "kind": kind}
    if blocked:
        return Judgement(**said, verdict="INCONCLUSIVE", reason=blocked)
    try:
        held = bench.held(term)
    except Missing as missing:
        return Judgement(**said, verdict="INCONCLUSIVE", reason=str(missing))
    verdict, reason = _against(held, bench.confidence)
    return Judgement(
        **said,
        verdict=verdict,
        reason=reason,
        value=_finite(held.found.value),
        low=_finite(held.found.low),
        high=_finite(held.found.high),
        limit=held.limit,
        unit=held.unit,
        sample=held.sample,
    )


def _finite(value: float) -> float | None:
    return round(float(f"{value:.9g}"), 12) if math.isfinite(value) else None


def _against(held: Held, confidence: float) -> tuple[Verdict, str]:
    found, limit = held.found, held.limit
    span = f"{_ends(found, held.unit)} at {confidence * 100:g} %{f', {held.of}' if held.of else ''}"
    value = "a failed request" if math.isinf(found.value) else figure(found.value, held.unit)
    kept, broken = (
        (found.high <= limit, found.low > limit) if held.at_most else (found.low >= limit, found.high < limit)
    )
    promise = f"the promise of {'at most' if held.at_most else 'at least'} {figure(limit, held.unit)}"
    if kept:
        return "PASS", f"{value} ({span}) keeps {promise}"
    if broken:
        return "FAIL", f"{value} ({span}) breaks {promise}"
    if held.caveat:
        return "INCONCLUSIVE", f"{value} in this sample; {held.caveat}"
    return "INCONCLUSIVE", f"{value} ({span}): the interval holds {promise}; {_enough(held)}"


def _enough(held: Held) -> str:
    """How large a sample would decide, by the square-root law, if the value stays where it is."""
    value, low, high = held.found
    half, distance = (high - value if held.at_most else value - low), abs(held.limit - value)
    if (value > held.limit) == held.at_most:
        half = value - low if held.at_most else high - value
    if not math.isfinite(half) or not distance or half / distance > 100:
        return "the two are too close for any sample of reasonable size" if math.isfinite(half) else "more are needed"
    return f"about {math.ceil(held.sample * (half / distance) ** 2 * 1.1):,} requests would decide it"


def figure(value: float, unit: str) -> str:
    """A value with its unit as people read it."""
    if unit == "ms":
        return format.duration(value / 1e3) if value >= 1e3 else f"{format.quantity(value)} ms"
    if unit == "%":
        return f"{'-' if value < -1e-4 else ''}{format.percent(abs(value) / 100 if abs(value) > 1e-4 else 0.0)}"
    return f"{format.quantity(value)}{unit}" if unit.startswith("/") else f"{format.quantity(value)} {unit}".strip()


def _ends(found: Bounds, unit: str) -> str:
    if found.low == math.inf:
        return "failed requests throughout"
    low = figure(found.low, unit) if math.isfinite(found.low) else "any"
    high = figure(found.high, unit) if math.isfinite(found.high) else "any"
    return f"{low} to {high}"
