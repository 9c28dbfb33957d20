"""What is wrong with a contract before a single request: contradictions, and samples too small for what they must show.

Levels as understood in; the loads they become, and faults with their places, out. Reads the workload files that the
levels name, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen import format
from loadgen.contracts import schema
from loadgen.contracts.schema import ContractLevel, Draft, Planned, tag
from loadgen.errors import Fault, Faults, UserError
from loadgen.stats import intervals
from loadgen.stats.quantiles import name as percentile
from loadgen.stats.quantiles import support
from loadgen.workload import Closed, Poisson, Ramp, Replay, Slo, Synthetic, Workload
from loadgen.workload import load as load_workload
from loadgen.workload.fields import meant
from loadgen.workload.flags import Overrides
from loadgen.workload.loading import packaged
from loadgen.workload.messages import locate
from loadgen.workload.yaml_marks import Map, where

CONFIDENCE = 0.95
RATES_NEED = 30  # requests from which a rate can be said with an interval at all
POOLED_REPEATS = 3  # pooled gaps have no sample of their own: repeats are their sample
WINDOWS = 2  # a drift compares the first with the last

Where = tuple[str | int, ...]


class _Says:
    """The faults of one file, by place."""

    def __init__(self, top: Map, file: str) -> None:
        self.top, self.file = top, file
        self.here: list[Fault] = []
        self.elsewhere: list[Fault] = []

    def fault(self, loc: Where, what: str, hint: str) -> None:
        spot, path, _ = locate(self.top, loc)
        self.here.append(UserError(what, where(self.file, spot, path), hint))


def check(
    drafts: Sequence[Draft],
    top: Map,
    file: str,
    folder: Path,
    *,
    gpus: int | None,
    env: Mapping[str, str],
    load_prices: Callable[[Path], object],
) -> tuple[list[Planned], list[Fault], list[Fault]]:
    """The plan of each level that has one; faults in the contract, and faults in the files it names.

    `load_prices` reads a price file, or raises Fault or Faults.
    """
    says = _Says(top, file)
    names: dict[str, int] = {}
    for draft in drafts:
        if draft.name and draft.name in names:
            says.fault(("levels", draft.index, "name"), f'two levels are called "{draft.name}"', "give each its own")
        names.setdefault(draft.name, draft.index)
    _prices(says, folder, load_prices)
    planned = []
    for draft in drafts:
        plan = _plan(draft, folder, says, env)
        has_slo = plan is None or plan.workload.slo is not None
        _contradictions(draft, plan, says)
        _missing(draft, says, has_slo=has_slo, has_gpus=gpus is not None or "gpus" in top, others=list(names))
        if plan is not None:
            _samples(draft, plan, _confidence(top), says)
            planned.append(plan)
    return planned, says.here, says.elsewhere


def _confidence(top: Map) -> float:
    text = str(top.get("confidence", "95%")).rstrip(" %")
    try:
        return min(max(float(text) / 100, 0.5), 0.999)
    except ValueError:  # told where its shape is checked
        return CONFIDENCE


def _prices(says: _Says, folder: Path, load_prices: Callable[[Path], object]) -> None:
    name = schema.plain(says.top.get("prices"))
    if name is None:
        return
    try:
        load_prices(folder / name)
    except Faults as faults:
        says.elsewhere.extend(faults.faults)
    except Fault as fault:
        says.fault(("prices",), fault.what, fault.hint)


# -- the load ----------------------------------------------------------------------------------------------------


def _plan(draft: Draft, folder: Path, says: _Says, env: Mapping[str, str]) -> Planned | None:
    """The workload under the level's own load; None where one of the two is wrong."""
    at: Where = ("levels", draft.index)
    path = None
    if draft.workload is not None:
        path = _workload(draft.workload, folder)
        if path is None:
            beside = [str(other.relative_to(folder)) for other in sorted(folder.glob("*.yaml"))]
            hint = meant(draft.workload, [*packaged(), *beside]) + "; or a path relative to the contract"
            says.fault((*at, "workload"), f'there is no workload "{draft.workload}"', hint)
    level = draft.level
    if level is None or path is None:
        return None
    if level.rate is not None and level.concurrency is not None:
        what = "rate is an open loop, concurrency a closed one: not both"
        says.fault((*at, "concurrency"), what, "make two levels of it")
        return None
    try:
        workload = load_workload(path, _overrides(level), env)
    except Faults as faults:
        for one in faults.faults:
            if one.where.startswith("--"):
                says.fault(at, one.what, one.hint)
            elif "no load:" in one.what or "never ends" in one.what:
                says.fault(at, one.what, "give rate: 10/s (or concurrency: 8) and duration: 10m (or requests: 700)")
            elif one not in says.elsewhere and str(one) not in map(str, says.elsewhere):
                says.elsewhere.append(one)
        return None
    slo = level.slo or _slo_of(says.top, says) or workload.slo
    limits = workload.limits.model_copy(update={"failure_share": 1.0})  # failures are for the contract to judge
    workload = workload.model_copy(update={"slo": slo, "limits": limits})
    n, rate, length = expected(workload)
    return Planned(level=level, workload=workload, requests=n, rate=rate, duration_ns=length)


def _slo_of(top: Map, says: _Says) -> Slo | None:
    written = top.get("slo")
    if written is None:
        return None
    from pydantic import ValidationError

    from loadgen.workload.fields import Source
    from loadgen.workload.schema import WrittenSlo

    source = Source(file=says.file, folder=Path())
    try:
        checked = WrittenSlo.model_validate(written, context=source).checked()
    except (ValidationError, ValueError):
        return None
    return None if source.faults else checked


def _workload(name: str, folder: Path) -> str | None:
    beside = folder / name
    if beside.is_file():
        return str(beside)
    return name if name in packaged() else None


def _overrides(level: ContractLevel) -> Overrides:
    return Overrides(
        request_rate=None if level.rate is None else f"{level.rate:.9f}",
        concurrency=level.concurrency,
        duration=None if level.duration_ns is None else f"{level.duration_ns}ns",
        num_requests=level.requests,
        warmup=None if level.warmup_ns is None else f"{level.warmup_ns}ns" if level.warmup_ns else "0",
    )


def expected(workload: Workload) -> tuple[int | None, float | None, int | None]:
    """Measured requests, their rate per second and their ns, as expected before a seed is drawn; None: not known."""
    requests, total, length = workload.requests, 0.0, 0.0
    turns = requests.turns.count if isinstance(requests, Synthetic) and requests.turns else 1
    for stage in workload.stages:
        if not stage.measured:
            continue
        law = stage.arrival
        if isinstance(law, Closed):
            if stage.count is None:
                return None, None, stage.duration_ns
            total, length = total + stage.count * turns, math.nan
            continue
        if isinstance(law, Replay):
            return None, None, stage.duration_ns  # as the trace has it
        rate = (law.from_rate + law.to_rate) / 2 if isinstance(law, Ramp) else law.rate
        by_time = math.inf if stage.duration_ns is None else rate * stage.duration_ns / 1e9
        n = min(by_time, stage.count or math.inf)
        if stage.at_least is not None:
            n = max(rate * stage.at_least.duration_ns / 1e9, stage.at_least.count)
        total += n * turns
        length += n / rate if math.isfinite(rate) else 0.0
    known = math.isfinite(length) and length > 0
    return int(total), total / length if known else None, round(length * 1e9) if known else None


# -- contradictions ----------------------------------------------------------------------------------------------


def _latencies(draft: Draft, which: str) -> list[tuple[int, Any]]:
    return [(j, term) for listed, j, term in draft.terms if listed == which and isinstance(term, schema.Latency)]


def _key(term: Any) -> tuple[Any, ...]:
    """What a term is about, without its limit."""
    return (tag(term), *(getattr(term, part, None) for part in ("quantile", "of", "level", "window_ns")))


def _ask(term: Any) -> float:
    """How much a term asks for: more is stricter."""
    if isinstance(term, schema.Latency):
        return -float(term.limit_ns)
    if isinstance(term, schema.AtLeast):
        return term.rate
    if isinstance(term, schema.CostTerm):
        return -float(term.limit[0])
    limit = getattr(term, "limit", None)
    return float(term.share) if limit is None else -float(limit)


def _contradictions(draft: Draft, plan: Planned | None, says: _Says) -> None:
    firm: dict[tuple[Any, ...], Any] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for which, j, term in draft.terms:
        loc, key = ("levels", draft.index, which, j), _key(term)
        if (which, *key) in seen:
            what = f"{words(term)}: said twice"
            says.fault(loc, what, f"item {seen[(which, *key)] + 1} of {which} says it already; keep one")
            continue
        seen[(which, *key)] = j
        if which == "must":
            firm[key] = term
        elif key in firm and _ask(term) <= _ask(firm[key]):
            what = f"{words(term)}: this should asks for no more than the must"
            says.fault(loc, what, "a should is stricter than its must; leave it out, or swap the two")
        if plan is not None and isinstance(term, schema.RequestsTerm | schema.GoodRequests):
            _above_offered(term, loc, plan, says)
    for which in ("must", "should"):
        listed = _latencies(draft, which)
        for j, term in listed:
            for _, other in listed:
                same = tag(other) == tag(term)
                if same and other.quantile > term.quantile and other.limit_ns < term.limit_ns:
                    what = f"{words(term)}: a looser limit than at {_at(other)} ({_time(other.limit_ns)})"
                    hint = "a lower percentile cannot be the larger one: one of the two is a slip"
                    says.fault(("levels", draft.index, which, j), what, hint)
                    break
                contained = tag(term) in ("ttft", "first_answer") and tag(other) == "e2e"
                if contained and other.quantile == term.quantile and other.limit_ns < term.limit_ns:
                    what = f"{words(term)}: longer than the whole answer may take ({_time(other.limit_ns)})"
                    says.fault(("levels", draft.index, which, j), what, "E2E holds it: one of the two is a slip")
                    break


def _above_offered(term: Any, loc: Where, plan: Planned, says: _Says) -> None:
    closed = any(isinstance(stage.arrival, Closed) for stage in plan.workload.stages if stage.measured)
    if not closed and plan.rate is not None and term.rate > plan.rate * (1 + 1e-9):
        what = f"{words(term)}: more than the {format.quantity(plan.rate)}/s that this level offers"
        says.fault(loc, what, "no server can answer more than it is asked: raise the level's rate")


def _missing(draft: Draft, says: _Says, *, has_slo: bool, has_gpus: bool, others: list[str]) -> None:
    """Terms about something that the contract does not say."""
    for which, j, term in draft.terms:
        loc: Where = ("levels", draft.index, which, j)
        if isinstance(term, schema.GoodputTerm | schema.GoodRequests | schema.CostTerm) and not has_slo:
            says.fault(loc, f"{words(term)}: nothing says when a request is good", "slo: {ttft: 2s, tpot: 100ms}")
        if isinstance(term, schema.OutputPerGpu | schema.TokensPerGpu) and not has_gpus:
            says.fault(
                loc, f"{words(term)}: nobody says how many GPUs there are", "gpus: 8 in the contract, or --gpus 8"
            )
        if isinstance(term, schema.CostTerm) and "prices" not in says.top:
            hint = "prices: prices.yaml, relative to the contract (docs/prices.example.yaml)"
            says.fault(loc, f"{words(term)}: there are no prices", hint)
        if isinstance(term, schema.Against):
            known = [name for name in others if name != draft.name]
            if term.level not in known:
                says.fault(loc, f'there is no other level "{term.level}"', meant(term.level, known))


# -- samples -----------------------------------------------------------------------------------------------------


def needed(term: Any, confidence: float) -> int:
    """Requests that a term cannot do without, at best: LoadGen's need for a percentile; for a share, as many as show
    it when not one misses."""
    if isinstance(term, schema.Errors):
        return intervals.faultless(term.limit, confidence)
    if isinstance(term, schema.GoodputTerm):
        return intervals.faultless(1 - term.share, confidence)
    quantile = getattr(term, "quantile", None)
    return support(quantile) if quantile is not None else RATES_NEED


def alike(share: float, confidence: float) -> int:
    """Requests of each of two windows from which their ratio, when it is 1, is shown to be more than `share`, though
    Poisson arrivals make the two differ: z * sqrt(2 / n) below 1 - share."""
    return math.ceil(2 * (intervals.z_quantile(confidence) / (1 - share)) ** 2)


def _by_chance(workload: Workload) -> bool:
    return all(isinstance(stage.arrival, Poisson) for stage in workload.stages if stage.measured)


def _samples(draft: Draft, plan: Planned, confidence: float, says: _Says) -> None:
    level = plan.level
    for which, j, term in draft.terms:
        loc: Where = ("levels", draft.index, which, j)
        if tag(term) in ("itl", "inter_chunk"):
            if level.repeats < POOLED_REPEATS:
                what = f"{words(term)}: gaps within an answer hang together, so one run has no interval for them"
                says.fault(loc, what, f"repeats: {POOLED_REPEATS} or more; or promise tpot, which is per request")
            continue
        windowed = isinstance(term, schema.DriftTerm | schema.Sustained)
        if windowed and plan.duration_ns is not None and plan.duration_ns < WINDOWS * term.window_ns:
            length = format.duration(plan.duration_ns / 1e9)
            what = f"{words(term)}: a load of {length} has no two windows of {format.duration(term.window_ns / 1e9)}"
            says.fault(loc, what, f"duration: {math.ceil(WINDOWS * term.window_ns / 1e9)}s or more")
            continue
        if plan.requests is None:
            continue  # a closed loop by time: said after the run
        n = plan.requests * level.repeats
        if windowed and plan.rate is not None:
            n = int(plan.rate * term.window_ns / 1e9)
        least = needed(term, confidence)
        if isinstance(term, schema.Sustained) and _by_chance(plan.workload):
            least = max(least, alike(term.share, confidence))
        if n < least:
            scope = (
                "each window has" if windowed else f"{level.repeats} runs have" if level.repeats > 1 else "there are"
            )
            what = f"{words(term)}: needs {least:,} requests to be shown at all, {scope} {n:,}"
            says.fault(loc, what, _more(least, plan, windowed))


def _more(least: int, plan: Planned, windowed: bool) -> str:
    each = math.ceil(least / (1 if windowed else plan.level.repeats))
    time = "" if not plan.rate else f"{math.ceil(each / plan.rate)}s ({format.duration(each / plan.rate)} at this rate)"
    if windowed:
        return f"window: {time} or more" if time else "a longer window"
    return f"requests: {each}" + (f", or duration: {time}" if time else "") + " or more; or a lower percentile"


# -- words -------------------------------------------------------------------------------------------------------


def _at(term: Any) -> str:
    return percentile(term.quantile).replace("_", ".")


def _time(ns: int) -> str:
    return format.duration(ns / 1e9) if ns >= 1e9 else f"{format.quantity(ns / 1e6)} ms"


def words(term: Any) -> str:
    """A term as one says it: `ttft at p99 within 2.0 s`."""
    match term:
        case schema.Errors():
            return f"errors at most {format.percent(term.limit)}"
        case schema.GoodputTerm():
            return f"goodput at least {format.percent(term.share)}"
        case schema.CostTerm():
            return f"cost per thousand good requests at most {term.limit[0]} {term.limit[1]}"
        case schema.DriftTerm():
            window = format.duration(term.window_ns / 1e9)
            what = f"{term.of} at {_at(term)} in the last {window}"
            return f"{what} at most {format.percent(term.limit)} above the first"
        case schema.Sustained():
            window = format.duration(term.window_ns / 1e9)
            return f"throughput of the last {window} at least {format.percent(term.share)} of the first"
        case schema.BetweenNodes():
            return f"{term.of} at {_at(term)} differs between nodes by at most {format.percent(term.limit)}"
        case schema.Against():
            return f"{term.of} at {_at(term)} at most {format.percent(term.limit)} of that of {term.level}"
    if isinstance(term, schema.AtLeast):
        return f"{tag(term)} at least {format.quantity(term.rate)}/s"
    return f"{tag(term)} at {_at(term)} within {_time(term.limit_ns)}"


def planned_words(planned: Planned) -> list[str]:
    """A level and its terms in lines, for a look before the run."""
    level = planned.level
    each = "" if planned.requests is None else f", {planned.requests:,} requests"
    length = "" if planned.duration_ns is None else f", {format.duration(planned.duration_ns / 1e9)}"
    lines = [
        f"level {level.name}: {level.workload}{each}{length}, {level.repeats} run{'s' if level.repeats > 1 else ''}"
    ]
    return lines + [
        f"  {kind:<6} {words(term)}"
        for kind, terms in (("must", level.must), ("should", level.should))
        for term in terms
    ]
