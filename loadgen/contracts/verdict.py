"""Judges runs against a contract: PASS, FAIL or INCONCLUSIVE for every term, with the figures and the reason.

Pure. A term passes when its whole interval keeps the promise, and fails when its whole interval breaks it. Everything
else is INCONCLUSIVE, from missing data to a load generator that was the bottleneck; the reason says what would decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.contracts.evaluate import Evaluator, Held, MeasuredLevel, Money
from loadgen.contracts.level_plan import JUDGED_HERE
from loadgen.contracts.schema import (
    OF_TASKS,
    AnswerCheck,
    Contract,
    ContractLevel,
    Promise,
    kind_of,
    words,
)
from loadgen.contracts.steady_samples import MARGIN, Missing, RecordedRun
from loadgen.core import errors as codes
from loadgen.core import format
from loadgen.core.limits import CACHED_SHARE, NO_SPAN_SHARE, NOT_OFFERED_SHARE
from loadgen.core.metrics import reasons
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.repeated.capacity import HORIZON_S, describe_horizon

SCHEMA = 1
PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
WARM = 0.2  # least cached share of prompt tokens for a warm cache; the limit for cold is limits.CACHED_SHARE


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One judged term. `value`, `low`, `high`, `limit` are in `unit`; null where not bounded or not known.

    `horizon_s`: the verdict holds for what comes back within this time, on average. `looks`: the independent looks at
    the server behind it. Both are null where they are not known. `look`: of a validation that was
    extended, at which look this was decided, or the last one. `missing_s`: of an undecided term, how much more load, of
    all runs together, will decide it if the server goes on like this; null where nobody can say.
    """

    term: str
    level: str
    kind: Literal["must", "should"]
    verdict: Verdict
    reason: str
    code: str = (
        ""  # of the reason: kept, broken, held_by_interval, one_sided, no_figure, not_judged
    )
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    unit: str = ""
    sample: int = 0
    horizon_s: float | None = None
    looks: int | None = None
    look: int | None = None
    missing_s: float | None = None


class ScoredAnswers(NamedTuple):
    """What is known of the answers: the figure of each term, or the trouble why there is none."""

    held: Callable[[Promise], Held]  # raises Missing
    load: str = ""
    prompts: int = 0
    answered: int = 0
    trouble: str = ""
    notes: tuple[str, ...] = ()


class LevelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One judged level: its load, the folders of its runs, its request counts and its terms."""

    name: str
    verdict: Verdict
    workload: str
    load: str
    runs: tuple[str, ...]
    requests: int
    ok: int
    terms: tuple[Judgement, ...]
    trouble: str = ""  # why none of its terms can be judged
    fault_codes: tuple[str, ...] = ()  # of the faults behind it; () where there were none
    notes: tuple[str, ...] = ()


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `verdict.json`. Must terms decide the verdict; should terms are only reported."""

    schema: int = SCHEMA
    contract: str
    contract_sha256: str
    verdict: Verdict
    sentence: str
    confidence: float
    horizon_s: float  # that the contract signs or takes
    looks: int = 1  # how often the records were judged: once, and once more after each extension
    target: str
    model: str
    server: str
    region: str = ""
    metadata: dict[str, str] = {}
    simulated: bool
    started: str
    ended: str
    version: str
    levels: tuple[LevelVerdict, ...]
    interrupted: bool = False
    preflight: tuple[str, ...] = ()  # warnings of the preflight, in words


class NeededLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a term needs, by a simulation. `needed_s`: load over all runs of the level; None: more than was simulated.

    `outcome`: what the term comes to at the level's own length: PASS, FAIL or INCONCLUSIVE. `reason`: of an undecided
    one, at the longest that was simulated.
    """

    kind: str
    term: str
    needed_s: float | None
    outcome: Verdict
    reason: str


class LevelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the terms of a level need. `length_s`: the load of all its runs; `simulated_s`: so much was simulated.

    `trouble`: why nothing is known; `fault_codes`: of the faults behind it.
    """

    name: str
    length_s: float
    simulated_s: float
    terms: tuple[NeededLoad, ...]
    trouble: str = ""
    fault_codes: tuple[str, ...] = ()


def looks_words(validation: Validation) -> str:
    """What a validation that was extended rests on; "" when it was not."""
    if validation.looks == 1:
        return ""
    last = f"{_of_last_look(validation) * 100:g} %"
    return (
        f"extended: judged {validation.looks} times, and a term that was decided stays so. This time {last} of "
        "confidence were asked for, so that all looks together err in no more than "
        f"{(1 - validation.confidence) * 100:g} %"
    )


def horizon_words(validation: Validation) -> str:
    """What a contract does not look for that signs less than the usual horizon; "" where it signs no less."""
    if validation.horizon_s >= HORIZON_S:
        return ""
    return f"signed: {describe_horizon(validation.horizon_s)}"


def confidence_words(validation: Validation) -> str:
    """The confidence of the printed intervals; of a validation that was extended also that of all looks together."""
    if validation.looks == 1:
        return f"{validation.confidence * 100:g} %, two-sided, of every interval"
    last = f"{_of_last_look(validation) * 100:g} %, two-sided, of every interval of this look"
    return f"{last}; {validation.confidence * 100:g} % of all {validation.looks} looks together"


def _of_last_look(validation: Validation) -> float:
    return 1 - (1 - validation.confidence) * 0.5 ** (validation.looks - 1)


def exit_code(validation: Validation) -> int:
    """Return the exit code of a validation.

    It is 130 if the user interrupted it, 0 for PASS and 1 for FAIL. INCONCLUSIVE is 4 if more load
    can decide it, and 3 if an undecided level could not be measured at all.
    """
    if validation.interrupted:
        return codes.INTERRUPTED
    if validation.verdict != INCONCLUSIVE:
        return codes.OK if validation.verdict == PASS else codes.SLO_MISSED
    undecided = [level for level in validation.levels if level.verdict == INCONCLUSIVE]
    return codes.UNSOUND if any(level.trouble for level in undecided) else codes.INCONCLUSIVE


def to_add_s(validation: Validation, runs_of: Mapping[str, int]) -> float:
    """How long each added run has to be, so that no undecided term misses load any more; 0 where no term can say.

    `runs_of`: how many runs an extension adds to each level.
    """
    missing = [
        term.missing_s / runs_of[term.level]
        for level in validation.levels
        for term in level.terms
        if term.missing_s is not None and term.level in runs_of
    ]
    return max(missing, default=0.0)


def sentence(level_verdicts: Sequence[LevelVerdict]) -> str:
    """The verdict in one sentence."""
    must_terms = [term for level in level_verdicts for term in level.terms if term.kind == "must"]
    counts = {
        verdict: sum(term.verdict == verdict for term in must_terms)
        for verdict in (PASS, FAIL, INCONCLUSIVE)
    }
    open_should_terms = [
        term
        for level in level_verdicts
        for term in level.terms
        if term.kind == "should" and term.verdict != PASS
    ]
    should_note = (
        f"; {len(open_should_terms)} of the should terms not shown to hold"
        if open_should_terms
        else ""
    )
    if not must_terms:
        return "nothing must hold: the contract has should terms only" + should_note
    if counts[FAIL]:
        return f"{counts[FAIL]} of {len(must_terms)} promises broken" + should_note
    if counts[INCONCLUSIVE]:
        return (
            f"{counts[INCONCLUSIVE]} of {len(must_terms)} promises could be neither shown nor refuted"
            + should_note
        )
    return f"all {len(must_terms)} promises kept" + should_note


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """FAIL when one is FAIL, else INCONCLUSIVE when one is or when there are none, else PASS."""
    if FAIL in verdicts:
        return "FAIL"
    return "INCONCLUSIVE" if INCONCLUSIVE in verdicts or not verdicts else "PASS"


def levels(
    contract: Contract, measured: Mapping[str, MeasuredLevel], money: Money | None = None
) -> tuple[LevelVerdict, ...]:
    """The verdict on every level of the contract, in its order."""
    return tuple(_judge_level(contract, level, measured, money) for level in contract.levels)


def after_looks(
    contract: Contract,
    measured: Mapping[str, MeasuredLevel],
    looks: Sequence[Mapping[str, int]],
    money: Money | None = None,
) -> tuple[LevelVerdict, ...]:
    """The verdict on every level of a validation that was extended; `looks` has the runs of each level at each look.

    Look k is judged at a confidence of 1 - (1 - confidence) / 2^(k - 1), and a term that is decided stays so. All looks
    together then pass a broken promise, or fail a kept one, with a probability of 1 - confidence at most: each errs on
    one side with half of what its confidence leaves, and the sum over all k is (1 - confidence) / 2 * (1 + 1/2 + ...).
    """
    if not looks:
        return levels(contract, measured, money)
    judged: tuple[LevelVerdict, ...] = ()
    confidence = contract.confidence
    for number, runs in enumerate(looks):
        so_far = {
            name: replace(level, runs=level.runs[: runs.get(name, 0)])
            for name, level in measured.items()
        }
        now = levels(contract.model_copy(update={"confidence": confidence}), so_far, money)
        now = tuple(_at_look(level, number + 1) for level in now)
        judged = tuple(map(_kept, judged, now)) if judged else now
        confidence = intervals.at_next_look(confidence)
    return judged


def _at_look(level: LevelVerdict, look: int) -> LevelVerdict:
    terms = tuple(msgspec.structs.replace(term, look=look) for term in level.terms)
    return msgspec.structs.replace(level, terms=terms)


def _kept(before: LevelVerdict, now: LevelVerdict) -> LevelVerdict:
    """A level at its latest look, with the terms that were decided before as they were."""
    if len(before.runs) == len(now.runs) and all(
        term.verdict != INCONCLUSIVE for term in before.terms
    ):
        return before
    terms = tuple(
        now_term if term.verdict == INCONCLUSIVE else term
        for term, now_term in zip(before.terms, now.terms, strict=True)
    )
    is_decided = any(term.verdict != INCONCLUSIVE for term in terms)
    return msgspec.structs.replace(
        now, terms=terms, verdict=_of_terms(terms), trouble="" if is_decided else now.trouble
    )


def _of_terms(terms: Sequence[Judgement]) -> Verdict:
    """The verdict on a level: its must terms decide."""
    must = [term.verdict for term in terms if term.kind == "must"]
    return together(must) if must else "PASS"


def _judge_level(
    contract: Contract,
    level: ContractLevel,
    measured: Mapping[str, MeasuredLevel],
    money: Money | None,
) -> LevelVerdict:
    level_runs = measured.get(level.name, MeasuredLevel(trouble="it was not run"))
    blocked = _blocking_reason(level, level_runs)
    offered = level_runs
    if fewer := _dropped(level_runs.runs):
        offered = replace(level_runs, runs=tuple(run.without_dropped() for run in level_runs.runs))
    evaluator = Evaluator(contract.confidence, measured, offered, money, contract.horizon_ns / 1e9)
    terms = _judge_terms(evaluator.held, contract.confidence, level, level.name, blocked)
    terms = tuple(
        _doubted(judged, term, level_runs.runs)
        for judged, (_, term) in zip(terms, _promises(level), strict=True)
    )
    summaries = [run.summary for run in level_runs.runs]
    notes = [
        reasons.sentence(warning)
        for summary in summaries
        for warning in summary.verdict.warning_codes
        if warning.code != "slo_samples" and warning.values.get("limit") not in JUDGED_HERE
    ]
    return LevelVerdict(
        name=level.name,
        verdict=_of_terms(terms),
        workload=level.workload,
        load=summaries[0].load.arrival if summaries else "",
        runs=tuple(run.folder for run in level_runs.runs),
        requests=sum(summary.requests.scheduled for summary in summaries),
        ok=sum(summary.requests.ok for summary in summaries),
        terms=terms,
        trouble=blocked,
        notes=tuple(dict.fromkeys([*([fewer] if fewer else []), *notes])),
    )


def _doubted(judged: Judgement, term: Promise, runs: Sequence[RecordedRun]) -> Judgement:
    """The judgement, undecided where it rests on a load that was not the one asked for, or on part of the answers.

    What is broken stays broken: the doubtful part is not in its figure, or speaks for the server. Only a rate that is
    too low, of a load that was not offered, is not the server's.
    """
    fewer = _dropped(runs)
    why = fewer or next((why for run in runs if (why := _not_as_asked(run, term))), "")
    broken_by_load = fewer and judged.verdict == "FAIL" and not term.is_at_most
    if not why or (judged.verdict != "PASS" and not broken_by_load):
        return judged
    return msgspec.structs.replace(
        judged, verdict="INCONCLUSIVE", code="not_judged", reason=f"{judged.reason}; but {why}"
    )


def _dropped(runs: Sequence[RecordedRun]) -> str:
    """That the load of some run was not offered; "" where it was."""
    dropped = max((run.summary.requests.dropped_share for run in runs), default=0.0)
    if dropped <= NOT_OFFERED_SHARE:
        return ""
    return (
        f"{format.percent(dropped)} of the starts were dropped at a cap, and are in no figure here: the "
        "load was not offered; raise max_in_flight (or max_in_prefill) in its workload"
    )


def _not_as_asked(run: RecordedRun, term: Promise) -> str:
    """Why what one run shows of a term is not of the work asked for, or not of all its answers; "" where it is."""
    summary = run.summary
    shortened = [
        reasons.sentence(caveat)
        for caveat in summary.verdict.caveat_codes
        if caveat.code == "shortened"
    ]
    if shortened:
        return f"{run.folder} is {shortened[0]}"
    of_slo = () if run.header.slo is None else run.header.slo.terms
    rests_on = {term.of or term.kind} | (
        {one.metric for one in of_slo} if "slo" in kind_of(term.kind).needs else set()
    )
    without = summary.tpot_no_span + summary.tpot_no_output
    if "tpot" in rests_on and without > NO_SPAN_SHARE * summary.requests.ok:
        return (
            f"{without:,} of {format.counted(summary.requests.ok, 'answer')} in {run.folder} came at one instant, or "
            "without text, and have no TPOT"
        )
    return ""


def of_answers(contract: Contract, asked: AnswerCheck, scored: ScoredAnswers) -> LevelVerdict:
    """The verdict on what the contract promises of the answers, in the form of one more level."""
    terms = _judge_terms(scored.held, contract.confidence, asked, "answers", scored.trouble)
    return LevelVerdict(
        name="answers",
        verdict=_of_terms(terms),
        workload=asked.dataset,
        load=scored.load,
        runs=(),
        requests=scored.prompts,
        ok=scored.answered,
        terms=terms,
        trouble=scored.trouble,
        notes=scored.notes,
    )


def _blocking_reason(level: ContractLevel, level_runs: MeasuredLevel) -> str:
    """Why no term of a level can be judged; "" when terms can be judged."""
    if level_runs.trouble or not level_runs.runs:
        return level_runs.trouble or "there is no run"
    for run in level_runs.runs:
        summary = run.summary
        if summary.run.state != "finished":
            return f"{run.folder} has no clean end ({summary.run.state})"
        if not summary.verdict.valid:
            why = "; ".join(summary.verdict.reasons)
            return f"the measurement in {run.folder} is not valid: {why}"
        if trouble := _cache_trouble(level, run):
            return trouble
    return _apart_trouble(level, level_runs.runs)


def _apart_trouble(level: ContractLevel, runs: Sequence[RecordedRun]) -> str:
    """Why runs are not as far apart in time as the level asks; "" when they are. A simulation has no time of day."""
    if level.apart_ns is None or runs[0].summary.target.simulated:
        return ""
    asked = format.duration(level.apart_ns / 1e9)
    if len(runs) < 2:
        return f"there is one run; the contract asks for runs {asked} apart"
    for before, after in pairwise(runs):
        if not before.header.ended or not after.header.started:
            return f"when {before.folder} ended or {after.folder} began is not known; the contract asks for {asked} apart"
        began, ended = (
            datetime.fromisoformat(text) for text in (after.header.started, before.header.ended)
        )
        if (gap_s := (began - ended).total_seconds()) < level.apart_ns / 1e9 - 1:
            between = format.duration(max(gap_s, 0.0))
            return f"{after.folder} began {between} after {before.folder} ended; the contract asks for {asked}"
    return ""


def holds_words(term: Judgement) -> str:
    """What a kept promise holds for: `for what comes back within 10 min; the load is worth 55 independent samples`."""
    if term.code != "kept" or term.horizon_s is None:
        return ""
    worth = "" if term.looks is None else f"; the load is worth {term.looks:,} independent samples"
    return f"for what comes back within {format.duration(term.horizon_s)}{worth}"


def _cache_trouble(level: ContractLevel, run: RecordedRun) -> str:
    """Why the cache was not cold or warm as the contract says; "" when it was, or when the contract does not say."""
    cached_share = run.summary.tokens.cached_share
    unique = run.header.new_prompts and not run.header.shares_prompts
    if level.cache is None or (level.cache == "cold" and cached_share is None and unique):
        return ""  # unique prompts are cold, whether the server says so or not
    if cached_share is None:
        return f"the server does not say what came from its cache: whether it was {level.cache} cannot be seen"
    if level.cache == "cold" and cached_share > CACHED_SHARE:
        return (
            f"{format.percent(cached_share)} of the prompt tokens came from cache: it was not cold"
        )
    if level.cache == "warm" and cached_share < WARM:
        return f"only {format.percent(cached_share)} of the prompt tokens came from cache: it was not warm"
    return ""


def _judge_terms(
    held: Callable[[Promise], Held],
    confidence: float,
    asked: ContractLevel | AnswerCheck,
    level: str,
    blocked: str,
) -> tuple[Judgement, ...]:
    return tuple(
        _judge_term(held, confidence, term, level, kind, blocked) for kind, term in _promises(asked)
    )


def _promises(
    asked: ContractLevel | AnswerCheck,
) -> list[tuple[Literal["must", "should"], Promise]]:
    """All terms of a level, in order, with the word that each stands under."""
    return [("must", term) for term in asked.must] + [("should", term) for term in asked.should]


def _judge_term(
    held: Callable[[Promise], Held],
    confidence: float,
    term: Promise,
    level: str,
    kind: Any,
    blocked: str,
) -> Judgement:
    fields = {"term": words(term), "level": level, "kind": kind}
    if blocked:
        return Judgement(**fields, verdict="INCONCLUSIVE", code="not_judged", reason=blocked)
    try:
        evaluated = held(term)
    except Missing as missing:
        return Judgement(
            **fields,
            verdict="INCONCLUSIVE",
            code="no_figure",
            reason=str(missing),
            missing_s=missing.missing_s or None,
        )
    verdict, code, reason, enough_s = _compare_with_limit(term, evaluated, confidence)
    return Judgement(
        **fields,
        verdict=verdict,
        code=code,
        reason=reason,
        value=_finite(evaluated.found.value),
        low=_finite(evaluated.found.low),
        high=_finite(evaluated.found.high),
        limit=term.limit_in_unit,
        unit=term.unit,
        sample=evaluated.sample,
        horizon_s=round(intervals.recurrence(evaluated.length_s, confidence), 3) or None,
        looks=None if evaluated.looks is None else round(evaluated.looks),
        missing_s=round(enough_s - evaluated.length_s, 3)
        if enough_s > evaluated.length_s
        else None,
    )


def _finite(value: float) -> float | None:
    return round(float(f"{value:.9g}"), 12) if math.isfinite(value) else None


def _compare_with_limit(
    term: Promise, evaluated: Held, confidence: float
) -> tuple[Verdict, str, str, float]:
    """The verdict, the reason as a code and in words, and the load that will decide in s; 0 where it is not known."""
    bounds, limit, unit = evaluated.found, term.limit_in_unit, term.unit
    part = f", {evaluated.of}" if evaluated.of else ""
    endless = "not back" if term.kind == "recovery" else "a failed request"
    value = endless if math.isinf(bounds.value) else figure(bounds.value, unit)
    measured = f"{value} ({_interval_words(bounds, unit)} at {confidence * 100:g} %{part})"
    promise = f"the promise of {'at most' if term.is_at_most else 'at least'} {figure(limit, unit)}"
    if bounds.high <= limit if term.is_at_most else bounds.low >= limit:
        return "PASS", "kept", f"{measured} keeps {promise}", 0.0
    if bounds.low > limit if term.is_at_most else bounds.high < limit:
        return "FAIL", "broken", f"{measured} breaks {promise}", 0.0
    if evaluated.caveat:
        return (
            "INCONCLUSIVE",
            "one_sided",
            f"{value} in this sample; {evaluated.caveat}",
            evaluated.enough_s,
        )
    factor = _factor_needed(bounds, limit, confidence)
    if factor is None:
        needed, enough_s = "more are needed", 0.0
    elif math.isinf(factor):
        needed, enough_s = "the two are too close for any sample of reasonable size", 0.0
    else:
        enough_s = max(factor * evaluated.length_s, evaluated.enough_s)
        noun = "tasks" if term.kind in OF_TASKS else "requests" if evaluated.length_s else "prompts"
        load = f", {format.duration(enough_s)} of load," if enough_s else ""
        needed = f"about {math.ceil(evaluated.sample * factor):,} {noun}{load} would decide it"
    return (
        "INCONCLUSIVE",
        "held_by_interval",
        f"{measured}: the interval holds {promise}; {needed}",
        enough_s,
    )


def _factor_needed(bounds: Interval, limit: float, confidence: float) -> float | None:
    """How many times the sample would decide at the next look, if the value stays the same: intervals shrink with the
    square root of n. Infinite where the two are too close; None where the interval has no end.
    """
    value, low, high = bounds
    half_width, distance = (value - low if value > limit else high - value), abs(limit - value)
    if not math.isfinite(half_width):
        return None
    if not distance or half_width / distance > 100:
        return math.inf
    wider = intervals.z_quantile(intervals.at_next_look(confidence)) / intervals.z_quantile(
        confidence
    )
    return (half_width / distance * wider) ** 2 * MARGIN


def figure(value: float, unit: str) -> str:
    """A value with its unit, for people."""
    if unit == "ms":
        return format.duration(value / 1e3) if value >= 1e3 else f"{format.quantity(value)} ms"
    if unit == "%":
        return f"{'-' if value < -1e-4 else ''}{format.percent(abs(value) / 100 if abs(value) > 1e-4 else 0.0)}"
    return (
        f"{format.quantity(value)}{unit}"
        if unit.startswith("/")
        else f"{format.quantity(value)} {unit}".strip()
    )


def _interval_words(bounds: Interval, unit: str) -> str:
    if bounds.low == math.inf:
        return "failed requests throughout"
    low = figure(bounds.low, unit) if math.isfinite(bounds.low) else "any"
    high = figure(bounds.high, unit) if math.isfinite(bounds.high) else "any"
    return f"{low} to {high}"
