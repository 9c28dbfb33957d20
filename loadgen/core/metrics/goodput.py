"""The block `goodput` of a summary: each SLO term at its quantile, and the requests that meet all terms. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.core import format
from loadgen.core.limits import NO_SPAN_SHARE, ValidityLimits
from loadgen.core.metrics import guards
from loadgen.core.metrics.accumulator import MetricAccumulator
from loadgen.core.metrics.blocks import Sessions, amount_in
from loadgen.core.metrics.outcomes import is_undecided
from loadgen.core.metrics.windows import Window, per_second
from loadgen.core.slo import Slo, Term, promise
from loadgen.core.stats.quantiles import SUPPORT, Histogram, index, milliseconds, name, support
from loadgen.figures import needs, pooled_figures, words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TermResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one SLO term. `value_ms` is null when no request has a value, or when the quantile falls on a
    failed request. `met` is null when the run cannot decide the term; `undecided` says why.
    """

    metric: str
    quantile: float
    limit_ms: float
    value_ms: float | None
    margin_ms: float | None  # limit - value: negative is missed
    met: bool | None
    over: int  # samples over the limit, failed ones included
    count: int
    needed: int  # samples from which the quantile is supported
    supported: bool
    undecided: str = ""
    unfinished: int = 0  # unfinished requests that are not known to be over: not in `count`
    low_ms: float | None = None  # the range of a value that is too uncertain to be shown
    high_ms: float | None = None

    @property
    def promise(self) -> str:
        """`TTFT p99 at most 2,000 ms`."""
        return promise(self.metric, self.quantile, self.limit_ms)


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that meet every SLO term; all fields are null without an SLO.

    `counted`: all but cancelled requests, and but the `unfinished` ones that are not known to be over a term. `met` is
    null also where no term is missed but one is undecided, and where `not_judged` says why. `good`, `share` and the
    rates are null where a term on a value of each request rests on withheld figures.
    """

    rps: float | None = None  # good requests per second of the measurement window
    # The headline: good requests that ended in the steady-state window, per second of it. It counts
    # a part of the requests of `Load.steady_completed_rps` over the same time, so it is not larger.
    steady_rps: float | None = None
    share: float | None = None  # the SLO attainment: `good` / `counted`
    good: int | None = None
    counted: int | None = None
    unfinished: int | None = None
    slo: tuple[TermResult, ...] = ()
    share_limit: float | None = None
    met: bool | None = None
    not_judged: str = ""  # of a run that is not valid: why `met` is null, of each term too

    @property
    def has_slo(self) -> bool:
        """Whether there is an SLO: `met` is null without one, and also where it is undecided."""
        return self.counted is not None

    @property
    def undecided(self) -> bool:
        """Whether there is an SLO that this run, a valid one, can neither call met nor missed."""
        return self.has_slo and self.met is None and not self.not_judged


def of_classes(classes: Sequence[Goodput]) -> Goodput:
    """Combine the goodput of request classes that each have their own SLO.

    A request counts as good if it meets the SLO of its class. Counts and rates are sums over the
    classes that have an SLO. The result has no terms of its own, because they belong to the classes.
    """
    met = together([one.met for one in classes if one.has_slo or one.met is not None])
    judged = [one for one in classes if one.has_slo]
    if not judged:
        return Goodput(met=met if any(one.met is not None for one in classes) else None)

    def total(name: str) -> Any:
        values = [getattr(one, name) for one in judged]
        return None if None in values else sum(values)

    good = total("good")
    counted = total("counted")
    return Goodput(
        rps=total("rps"),
        steady_rps=total("steady_rps"),
        share=good / counted if counted and good is not None else None,
        good=good,
        counted=counted,
        unfinished=total("unfinished"),
        met=met,
    )


def with_tasks(requests: Goodput, tasks: Sessions | None) -> Goodput:
    """The goodput of requests, met where also the promise about tasks is."""
    if tasks is None or tasks.goodput is None:
        return requests
    met = tasks.goodput.met
    return msgspec.structs.replace(
        requests, met=together([requests.met, met]) if requests.has_slo else met
    )


def unjudged(part: Any) -> Any:
    """Return a run that is not valid, or a part of it, without the outcome of its SLO."""

    def without(result: Any, **changes: Any) -> Any:
        return msgspec.structs.replace(result, met=None, **changes)

    goodput, tasks = part.goodput, getattr(part, "sessions", None)
    judged = without(goodput, slo=tuple(map(without, goodput.slo)))
    if judged.met is None and (goodput.has_slo or goodput.met is not None):
        judged = msgspec.structs.replace(
            judged, not_judged="the run is not valid: see verdict.reasons"
        )
    if tasks is not None and tasks.goodput is not None:
        part = msgspec.structs.replace(
            part, sessions=msgspec.structs.replace(tasks, goodput=without(tasks.goodput))
        )
    return msgspec.structs.replace(part, goodput=judged)


GOOD_UNCERTAIN = 0.05
"""Share of the good requests that may be uncertain before their number is withheld."""


def goodput(
    cell: MetricAccumulator,
    slo: Slo | None,
    inside: Window,
    gaps: Histogram,
    unrecorded: int,
    unsound: Mapping[str, str],
    *,
    limits: ValidityLimits,
    dropped_too: bool = True,
) -> Goodput:
    """Each SLO term judged at its quantile, and the requests that meet all terms.

    `unsound`: metrics whose figures are withheld, with the reason; terms on them are undecided. `dropped_too`: whether
    starts dropped at a cap count, as misses.

    Failed, dropped and lost requests are over every limit, and so are the `unrecorded` ones; cancelled requests are
    left out, and so are unfinished ones unless they are over already (`is_over_when_cut`). A request too short to have
    a TPOT is left out of that term and does not miss it; so is one whose output came at one instant, and where these
    are more than `NO_SPAN_SHARE` the term is missed if it is without them, else undecided. Terms on pooled gaps judge
    the gaps and not the requests. A missed term decides; else an undecided one leaves the SLO undecided. Counts are
    exact, and so is whether a term on requests is met; quantiles are those of the cell's samples.
    """
    if slo is None or (not slo.terms and slo.goodput_share is None):  # a promise about tasks alone
        return Goodput()
    everyone = (
        cell.sum("rows")
        - cell.sum("cancelled")
        + unrecorded
        - (0 if dropped_too else cell.sum("dropped"))
    )
    left_out = cell.sum("unfinished") - cell.sum("unfinished_over")
    counted, cut = everyone - left_out, is_undecided(cell.sum("unfinished"), everyone)
    results = [
        _term_result(cell, i, term, gaps, everyone, cut, unsound, limits)
        for i, term in enumerate(slo.terms)
    ]
    share_met: bool | None = True
    no_tpot = any(_without_span(cell, term) for term in slo.terms)
    withheld = any(
        term.metric in unsound and term.metric not in pooled_figures() for term in slo.terms
    )
    good_range = guards.good_range(cell.columns, slo)
    if slo.goodput_share is not None:
        known = None
        if not withheld:
            outcomes = {
                _judged_share(number, counted, left_out, slo.goodput_share, cut)
                for number in good_range or (cell.sum("good"),)
            }
            known = outcomes.pop() if len(outcomes) == 1 else None
        share_met = None if known and no_tpot else known
    is_uncertain = good_range is not None and guards.Range(*good_range).exceeds(
        cell.sum("good"), GOOD_UNCERTAIN
    )
    good = None if withheld or no_tpot or is_uncertain else cell.sum("good")
    good_in_steady_state = None if good is None else amount_in([cell], "good", inside.steady)
    return Goodput(
        rps=per_second(good, inside),
        steady_rps=per_second(good_in_steady_state, inside.steady),
        share=good / counted if counted and good is not None else None,
        good=good,
        counted=counted,
        unfinished=left_out,
        slo=tuple(results),
        share_limit=slo.goodput_share,
        met=together([share_met, *(result.met for result in results)]),
    )


def _term_result(
    cell: MetricAccumulator,
    i: int,
    term: Term,
    gaps: Histogram,
    everyone: int,
    cut: bool,
    unsound: Mapping[str, str],
    limits: ValidityLimits,
) -> TermResult:
    """The result of term `i`. `everyone`: all but cancelled requests. `cut`: too many are unfinished to decide by."""
    value: float | None = None
    value_range: guards.Range | None = None
    left_out = no_span = 0
    if term.metric in pooled_figures():
        values = count = gaps.count
        over = gaps.over(term.limit_ns)
        value = gaps.quantile(term.quantile) if count else None
        met = value is not None and value <= term.limit_ns
        undecided = _undecided_reason(term.metric, count, 1, count, unsound)
    else:
        ok, values = cell.sum("ok"), cell.sum(f"term{i}")
        left_out = cell.sum("unfinished") - cell.sum(f"term{i}_unfinished_over")
        without_value = everyone - left_out - ok
        count, over = values + without_value, cell.sum(f"term{i}_over") + without_value
        place = index(count, term.quantile) if count else 0
        if place < values:
            value = cell.sample(term.metric).nth(place)
            value_range = _range_if_uncertain(cell, term.metric, place, value, limits)
        met = place < min(values, count - over)
        no_span = _without_span(cell, term)
        undecided = _undecided_reason(term.metric, values, ok, count, unsound, no_span)
    known_over = 0 if term.metric in pooled_figures() else over
    decided = _judged_with_cut(
        met, term.quantile, known_over, count, left_out + no_span, cut or no_span > 0
    )
    if undecided:
        value, over, decided = None, 0, None
    elif value_range is not None:
        value = None
        if value_range.lower <= term.limit_ns < value_range.upper:
            decided = None
            undecided = _straddles(term.metric, value_range)
    elif decided is None and no_span:
        undecided = _came_at_once(no_span)
    elif decided is None:
        undecided = (
            "too many requests were unfinished when the drain ended: give a longer --grace, or none"
        )
    needed = SUPPORT.get(name(term.quantile)) or support(term.quantile)
    return TermResult(
        metric=term.metric,
        quantile=term.quantile,
        limit_ms=milliseconds(term.limit_ns),
        value_ms=None if value is None else milliseconds(value),
        margin_ms=None if value is None else milliseconds(term.limit_ns - value),
        met=decided,
        over=over,
        count=count,
        needed=needed,
        supported=count >= needed,
        undecided=undecided,
        unfinished=left_out,
        low_ms=None if value_range is None else milliseconds(value_range.lower),
        high_ms=None if value_range is None else milliseconds(value_range.upper),
    )


def _range_if_uncertain(
    cell: MetricAccumulator, metric: str, place: int, value: float, limits: ValidityLimits
) -> guards.Range | None:
    """Return the range of the value at a place of a sample if it is too uncertain to be shown."""
    sample_bounds = guards.bound_metric(cell.columns, metric)
    if sample_bounds is None:
        return None
    found = sample_bounds.nth(place)
    return found if found.exceeds(value, guards.limit_of(metric, limits)) else None


def _straddles(metric: str, found: guards.Range) -> str:
    """Return why a term is undecided whose limit lies inside the range of the value."""
    low, high = (format.milliseconds(milliseconds(end)) for end in found)
    return f"the limit lies within the range of {words(metric)}, {low} to {high} ms"


def _without_span(cell: MetricAccumulator, term: Term) -> int:
    """How many answers have no TPOT though they have the tokens for one; 0 where these are too few to matter."""
    without = cell.sum("tpot_no_span") + cell.sum("tpot_no_output") if term.metric == "tpot" else 0
    return without if without > NO_SPAN_SHARE * cell.sum("ok") else 0


def _came_at_once(answers: int) -> str:
    several = format.counted(answers, "answer")
    return f"{several} with tokens for a TPOT came in one event, or without text: no span to divide"


def _undecided_reason(
    metric: str, values: int, ok: int, count: int, unsound: Mapping[str, str], no_span: int = 0
) -> str:
    """Why a term on a metric can be neither met nor missed; "" when it can.

    `values`: how many values there are (gaps, for a pooled metric). `count`: those and the requests without an answer,
    which count as over the limit. A term that no ok request can have is not missed.
    """
    if metric in unsound:
        return unsound[metric]
    if values or (count and not ok):
        return ""
    if no_span:
        return _came_at_once(no_span)
    if metric in ("tpot", "tpot_mlperf"):
        return "no answer had the two tokens of a TPOT"
    return (
        "no answer had two output events"
        if needs(metric) in ("tokens", "stream")
        else "no request has this figure"
    )


def _judged_with_cut(
    met: bool, quantile: float, over: int, count: int, left_out: int, undecided: bool
) -> bool | None:
    """Whether a term is met, where `left_out` unfinished requests are not in `count`.

    False when it is missed even if all of them had been within the limit; None when it is `undecided` otherwise.
    """
    everyone = count + left_out
    if undecided and (not everyone or over < everyone - index(everyone, quantile)):
        return None
    return met


def _judged_share(
    good: int, counted: int, left_out: int, limit: float, undecided: bool
) -> bool | None:
    """Whether the promised share of good requests was kept; None where the unfinished requests decide it."""
    if undecided and good + left_out >= limit * (counted + left_out):
        return None
    return bool(counted) and good / counted >= limit


def together(results: Sequence[bool | None]) -> bool | None:
    """Whether all are met: False when one is missed, else None when one is undecided."""
    if any(met is False for met in results):
        return False
    return None if any(met is None for met in results) else True
