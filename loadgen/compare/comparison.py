"""Two or more results side by side: the same work or not, what differs by how much, and whether that can be told.

Pure. Requests of a run hang together, so a run speaks through blocks of its time, and repeats speak as whole runs
(`uncertainty.py`); metrics judged together share the risk of a false alarm (Holm 1979). What rests on one run of each
side holds for these runs alone, and says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from loadgen.compare import block_errors
from loadgen.compare.block_errors import Known
from loadgen.metrics import columns as metrics
from loadgen.metrics.columns import OK, Columns
from loadgen.metrics.registry import SHARES, Metric, figure, metric
from loadgen.stats import intervals
from loadgen.stats.intervals import LEVEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.metrics.summary import Summary
    from loadgen.results.manifest import Header

UNLIKE = "not the same work"
POWER = 0.9  # with which the smallest detectable change would be found

Word = Literal["better", "worse", "no difference seen", "cannot tell"]


SHOWN = (
    "ttft_ms.p50",
    "ttft_ms.p99",
    "tpot_ms.p50",
    "tpot_ms.p99",
    "e2e_ms.p50",
    "e2e_ms.p99",
    "tokens.steady_output_per_s",
    "ok_share",
    "goodput.share",
)
"""What is compared without being asked for; each where both sides have it."""
TOLD = ("tokens.output_per_s", "load.completed_rps")
"""And beside another tool's figures."""


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its summary, and its rows where they were kept (`record.ROW`, all stages)."""

    name: str
    summary: Summary
    header: Header | None = None
    rows: NDArray[np.void] | None = None

    def measured(self) -> Columns | None:
        if self.rows is None or self.header is None:
            return None
        stages = np.array([stage.measured for stage in self.header.stages] or [True])
        return Columns(self.rows, stages[self.rows["stage"]])


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to compare: a run, repeats of it, or figures that another tool has reported (by path, `told`)."""

    name: str
    runs: tuple[ComparedRun, ...] = ()
    told: dict[str, float] = {}
    notes: tuple[str, ...] = ()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one side against the first one.

    `change`: relative (0.1 is +10 %); of a share, the difference in parts of one. `low`, `high`: its interval at the
    level at which the word was decided; null where there is none. `detectable`: the smallest change that would be seen
    with a chance of POWER. `why`: of "cannot tell".
    """

    metric: str
    name: str
    unit: str
    side: str
    before: float | None
    after: float | None
    change: float | None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    word: Word = "cannot tell"
    why: str = ""

    @property
    def absolute(self) -> bool:
        """Whether `change` is a difference of shares and not a ratio less one."""
        return self.metric in SHARES


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a comparison says. `same_work`: null where a side has no fingerprint. `simulated`: the sides
    that say nothing about hardware."""

    sides: tuple[str, ...]
    runs: tuple[int, ...]
    same_work: bool | None
    unlike: tuple[str, ...]  # what differs between the sides' work, in words
    scope: str
    confidence: float
    notes: tuple[str, ...]
    valid: bool
    simulated: tuple[str, ...]  # sides of which a run was against a simulated server
    differences: tuple[Difference, ...]


def compare(
    sides: Sequence[Side], *, also: Sequence[str] = (), confidence: float = LEVEL, anyway: bool = False
) -> Comparison:
    """Every side against the first one, over the metrics of SHOWN and those asked for in `also`.

    `anyway`: judge although the work differs. Without it, a difference between sides whose recipes differ, or that are
    not valid, is shown and not judged.
    """
    first = sides[0]
    told = TOLD if any(side.told for side in sides) else ()
    chosen = [found for path in dict.fromkeys((*SHOWN, *told, *also)) if (found := metric(path)) is not None]
    differences: list[Difference] = []
    for other in sides[1:]:
        unlike = _unlike(first, other)
        invalid = [side.name for side in (first, other) if any(not run.summary.verdict.valid for run in side.runs)]
        why = "figures only, defined otherwise" if first.told or other.told else ""
        if unlike and not anyway:
            why = UNLIKE
        elif invalid:
            why = f"{' and '.join(invalid)} {'is' if len(invalid) == 1 else 'are'} not valid"
        differences += _judged(first, other, chosen, also, confidence, why)
    all_unlike = tuple(dict.fromkeys(text for other in sides[1:] for text in _unlike(first, other)))
    unknown = any(side.told or not side.runs or not side.runs[0].summary.fingerprints.recipe for side in sides)
    return Comparison(
        sides=tuple(side.name for side in sides),
        runs=tuple(len(side.runs) for side in sides),
        same_work=False if all_unlike else None if unknown else True,
        unlike=all_unlike,
        scope=_scope(sides),
        confidence=confidence,
        notes=tuple(_notes(sides)),
        valid=all(run.summary.verdict.valid for side in sides for run in side.runs),
        simulated=tuple(side.name for side in sides if any(run.summary.target.simulated for run in side.runs)),
        differences=tuple(differences),
    )


# -- the same work? ------------------------------------------------------------------------------------------------


def _unlike(first: Side, other: Side) -> list[str]:
    """How the work of two sides differs; empty when it does not, or when it is not known."""
    if not first.runs or not other.runs:
        return []
    a, b = first.runs[0].summary, other.runs[0].summary
    if not a.fingerprints.recipe or not b.fingerprints.recipe or a.fingerprints.recipe == b.fingerprints.recipe:
        return []
    found = [
        f"{what}: {one or 'none'} against {two or 'none'}"
        for what, one, two in (
            ("workload", a.run.workload, b.run.workload),
            ("load", a.load.arrival, b.load.arrival),
            ("SLO", _promises(a), _promises(b)),
            ("output counted by", ", ".join(a.tokens.sources.output), ", ".join(b.tokens.sources.output)),
        )
        if one != two
    ]
    return found or [f"recipe: {a.fingerprints.recipe} against {b.fingerprints.recipe}"]


def _promises(summary: Summary) -> str:
    return ", ".join(f"{t.metric} {t.limit_ms:g} ms at p{t.quantile * 100:g}" for t in summary.goodput.slo)


def _notes(sides: Sequence[Side]) -> list[str]:
    """What to know that does not forbid the comparison."""
    notes: list[str] = []
    for side in sides:
        notes += [f"{side.name}: {note}" for note in side.notes]
        missing = [one.name for path in (*SHOWN, *TOLD) if path not in side.told and (one := metric(path))]
        if side.told and missing:
            notes.append(f"{side.name} does not say: {'; '.join(missing)}")
        for run in side.runs:
            name = side.name if len(side.runs) == 1 else f"{side.name}/{run.name}"
            if not run.summary.verdict.valid:
                notes.append(f"{name} is not valid: {'; '.join(run.summary.verdict.reasons)}")
            if run.summary.run.state != "finished":
                words = {"interrupted": "was interrupted", "cut_off": "has no clean end"}
                notes.append(f"{name} {words.get(run.summary.run.state, run.summary.run.state)}")
            if run.rows is None:
                notes.append(f"{name} has no records, only a summary: nothing can be told from it alone")
    for what, values in (
        ("models", [{run.summary.target.model for run in side.runs} for side in sides if side.runs]),
        ("versions of loadgen", [{run.summary.run.version for run in side.runs} for side in sides if side.runs]),
    ):
        if len({frozenset(value) for value in values}) > 1:
            notes.append(f"different {what}: {' against '.join('/'.join(sorted(value)) or 'none' for value in values)}")
    seeds = [run.summary.run.seed for side in sides for run in side.runs if run.summary.run.seed is not None]
    if len(seeds) > 1:
        notes.append("the seed is the same: equal prompts, a prefix cache may remember them" if len(set(seeds)) == 1
                     else "seeds differ, as they should: the chance of the draw is inside the intervals")  # fmt: skip
    cached = [share for side in sides for run in side.runs if (share := run.summary.tokens.cached_share) is not None]
    if cached and max(cached) - min(cached) > metrics.CACHED_SHARE:
        notes.append(f"shares of cached prompt tokens differ: {min(cached) * 100:.1f} % to {max(cached) * 100:.1f} %")
    return notes


def _scope(sides: Sequence[Side]) -> str:
    if any(side.told for side in sides):
        return "another tool's figures stand without records: differences are shown, and cannot be judged"
    if all(len(side.runs) > 1 for side in sides):
        return "by repeated runs on every side"
    return "by blocks of time within these runs: what another start of the server would show, they cannot tell"


# -- figures with their errors -------------------------------------------------------------------------------------


def _judged(
    first: Side, other: Side, chosen: Sequence[Metric], also: Sequence[str], confidence: float, why: str
) -> list[Difference]:
    repeated = len(first.runs) > 1 and len(other.runs) > 1
    found: list[tuple[Metric, float | None, float | None, Known | None, str]] = []
    for one in chosen:
        before, after = _value(first, one), _value(other, one)
        if (before is None or after is None) and one.path not in also:
            continue
        gap, reason = None, why
        if not why:
            a, because = _known(first, one, repeated)
            b, because_b = _known(other, one, repeated)
            reason = because or because_b
            gap = _gap(a, b) if a is not None and b is not None else None
        found.append((one, before, after, gap, reason))
    levels = _holm([None if gap is None else _chance(gap) for *_, gap, _ in found], 1 - confidence)
    family = max(sum(gap is not None for *_, gap, _ in found), 1)
    return [
        _difference(one, other.name, before, after, gap, reason, level, (1 - confidence) / family)
        for (one, before, after, gap, reason), level in zip(found, levels, strict=True)
    ]


def _value(side: Side, one: Metric) -> float | None:
    """As the summary has it; of repeats, the mean."""
    if side.told:
        return side.told.get(one.path)
    values = [figure(run.summary, one.path) for run in side.runs]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _known(side: Side, one: Metric, repeated: bool) -> tuple[Known | None, str]:
    """The figure with its error, or why it has none."""
    if side.told or not side.runs:
        return None, f"{side.name} has figures only"
    value = _value(side, one)
    if value is None:
        return None, f"{side.name} has none"
    plain = one.path in SHARES
    if not plain and value <= 0:
        return None, "zero"
    if repeated:
        values = [figure(run.summary, one.path) or 0.0 for run in side.runs]
        if not plain and min(values) <= 0:
            return None, "zero"
        scaled = np.array(values) if plain else np.log(values)
        return Known(float(scaled.mean()), float(scaled.std(ddof=1)) / math.sqrt(len(values)), len(values) - 1), ""
    parts = [run.measured() for run in side.runs]
    columns = [part for part in parts if part is not None]
    if len(columns) < len(parts):
        return None, f"{side.name} has no records"
    if one.per_request:
        return block_errors.latency(columns, one, value)
    if one.path == "ok_share":
        return block_errors.share([block_errors.marks(part, part.where(OK)) for part in columns], value), ""
    if one.path == "goodput.share":
        slo = next((run.header.slo for run in side.runs if run.header is not None), None)
        if slo is None:
            return None, "no SLO"
        return block_errors.share([block_errors.marks(part, metrics.meets(part, slo)) for part in columns], value), ""
    if one.path == "tokens.steady_output_per_s":
        return block_errors.rate([run.summary.window.steady for run in side.runs], columns, value)
    return None, "no interval is known for it"


# -- differences ---------------------------------------------------------------------------------------------------


def _gap(a: Known, b: Known) -> Known:
    """The difference of two independent figures."""
    freedom = intervals.welch(a.error**2, a.freedom, b.error**2, b.freedom)
    return Known(b.value - a.value, math.hypot(a.error, b.error), freedom)


def _chance(gap: Known) -> float:
    """Of a difference at least this large where there is none (two-sided p-value)."""
    if gap.value == 0:
        return 1.0
    if gap.error == 0:
        return 0.0
    return 2 * (1 - intervals.t_below(abs(gap.value) / gap.error, gap.freedom))


def _holm(chances: Sequence[float | None], risk: float) -> list[float]:
    """Of each metric the risk at which it is judged: the least p-value at risk / m, the next at risk / (m - 1), and so
    on until the first that is not significant, whose level all the others share (Holm 1979)."""
    order = sorted((chance, i) for i, chance in enumerate(chances) if chance is not None)
    levels = [risk] * len(chances)
    level, stopped = risk, False
    for place, (chance, i) in enumerate(order):
        if not stopped:
            level = risk / (len(order) - place)
            stopped = chance > level
        levels[i] = level
    return levels


def _difference(
    one: Metric,
    side: str,
    before: float | None,
    after: float | None,
    gap: Known | None,
    why: str,
    level: float,
    family_level: float,
) -> Difference:
    plain = one.path in SHARES
    change = None
    if before is not None and after is not None:
        change = after - before if plain else (after / before - 1 if before else None)

    def back(value: float) -> float:
        return value if plain else math.expm1(min(value, 50.0))

    low = high = detectable = None
    word: Word = "cannot tell"
    if gap is not None:
        half = intervals.t_quantile(1 - level / 2, gap.freedom) * gap.error
        low, high = back(gap.value - half), back(gap.value + half)
        reach = intervals.t_quantile(1 - family_level / 2, gap.freedom) + intervals.t_quantile(POWER, gap.freedom)
        detectable = back(reach * gap.error)
        word, why = "no difference seen", ""
        if (low > 0 or high < 0) and one.better:
            word = "better" if (gap.value > 0) == (one.better > 0) else "worse"
    return Difference(
        metric=one.path,
        name=one.name,
        unit=one.unit,
        side=side,
        before=before,
        after=after,
        change=change,
        low=low,
        high=high,
        detectable=detectable,
        word=word,
        why=why or ("no interval is known for it" if gap is None else ""),
    )
