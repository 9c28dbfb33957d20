"""Runs of one workload at several loads, side by side: the grid of a sweep, its knee, its Pareto front.

Pure: texts and summaries in, values out. Running them is `probes.py`; showing them is `report/levels.py`.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from loadgen.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.metrics.summary import Summary

Kind = Literal["concurrency", "request_rate"]
Name = TypeVar("Name")
MOST = 200  # levels in one sweep


class SweepLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One load of several. Rates while load was offered where they are known; latencies ms."""

    name: str  # of its folder: c8, r2.5
    load: str
    amount: float | None  # lanes, or requests per second offered
    ok: int
    failed: int
    requests_per_s: float | None
    output_per_s: float | None
    per_gpu: float | None  # output tokens/s; null without --gpus
    per_user: float | None  # tokens/s that one user sees: 1 / TPOT p50
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    e2e_p50: float | None
    unsupported: tuple[str, ...]  # of the latencies above, those on too few samples
    goodput: float | None  # share
    slo_met: bool | None
    valid: bool
    state: str
    simulated: bool
    front: bool = False  # no other level gives more per GPU and more per user


class SweepCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep as it came out, levels in order of load."""

    workload: str
    model: str
    target: str
    gpus: int | None
    version: str
    started: str
    slo: str
    levels: tuple[SweepLevel, ...]
    knee: str  # name of the level, "" when no level lies between others
    best: str  # name of the highest level that met the SLO, "" when none or no SLO


def grid(text: str, flag: str, kind: Kind) -> tuple[float, ...]:
    """`1,2,4,8`, or `1,2,4,...,512`: what the first ones begin, multiplied where they do, else added. Ascending.

    Raises UserError.
    """
    where = f"{flag} {text}"
    parts = [part.strip() for part in text.split(",")]
    dots = [i for i, part in enumerate(parts) if part in ("...", "…")]
    numbers = [_amount(part, where, kind) for i, part in enumerate(parts) if i not in dots]
    if dots:
        if dots != [len(parts) - 2] or len(numbers) < 3:
            hint = "write the first ones, then ..., then the last: 1,2,4,...,512"
            raise UserError("not a series that can be continued", where, hint)
        numbers = _continued(numbers[:-1], numbers[-1], where)
    if len(numbers) > MOST:
        raise UserError(f"{len(numbers)} levels are too many", where, f"at most {MOST}")
    if any(after <= before for before, after in pairwise(numbers)):
        raise UserError(
            "levels must ascend, each once", where, "1,2,4,8: a low load first keeps a server from a cold start"
        )
    return tuple(numbers)


def _amount(part: str, where: str, kind: Kind) -> float:
    number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(/s)?", part)
    whole = kind == "concurrency"
    if number is None or float(number[1]) <= 0 or (whole and (number[2] or "." in number[1])):
        known = "whole numbers from 1" if whole else "requests per second, above 0"
        raise UserError(f'"{part}" is no level', where, known)
    return float(number[1])


def _continued(first: Sequence[float], last: float, where: str) -> list[float]:
    ratio, step = first[-1] / first[-2], first[-1] - first[-2]
    multiplied = len(first) < 3 or abs(first[-2] / first[-3] - ratio) < 1e-6 * ratio
    if len(first) == 2 and first[0] * 2 != first[1]:
        multiplied = False
    found = list(first)
    while len(found) <= MOST:
        following = found[-1] * ratio if multiplied else found[-1] + step
        if following <= found[-1] or following > last * (1 + 1e-9):
            break
        found.append(round(following, 6))
    if abs(found[-1] - last) > 1e-6 * last:
        how = f"times {ratio:g}" if multiplied else f"plus {step:g}"
        raise UserError(f"the series ({how}) does not reach {last:g}", where, f"it comes to {found[-1]:g}")
    return found


def name(kind: Kind, amount: float) -> str:
    """Of a level's folder."""
    return f"{'c' if kind == 'concurrency' else 'r'}{amount:g}"


def curve(named: Sequence[tuple[str, Summary]]) -> SweepCurve:
    """The levels of a sweep, or of any folder of runs, in order of load. At least one."""
    levels = sorted((_level(called, summary) for called, summary in named), key=lambda one: (one.amount or 0, one.name))
    # GPUs divide all alike, so throughput stands for that per GPU
    front = pareto({one.name: (one.output_per_s, one.per_user) for one in levels if one.valid})
    levels = [msgspec.structs.replace(one, front=one.name in front) for one in levels]
    first = named[0][1]
    promised = [f"{t.metric} {t.limit_ms:g} ms at p{t.quantile * 100:g}" for t in first.goodput.slo]
    met = [one for one in levels if one.slo_met and one.valid]
    return SweepCurve(
        workload=first.run.workload,
        model=first.target.model,
        target=first.target.name or first.target.url,
        gpus=first.target.gpus,
        version=first.run.version,
        started=first.run.started,
        slo=", ".join(promised),
        levels=tuple(levels),
        knee=knee(levels),
        best=met[-1].name if met else "",
    )


def _level(called: str, summary: Summary) -> SweepLevel:
    tokens, load = summary.tokens, summary.load
    output = tokens.steady_output_per_s if tokens.steady_output_per_s is not None else tokens.output_per_s
    lanes = next((stage.concurrency for stage in summary.stages if stage.measured), None)
    gpus, tpot = summary.target.gpus, summary.tpot_ms.p50
    done = load.steady_completed_rps if load.steady_completed_rps is not None else load.completed_rps
    shown = (("ttft", summary.ttft_ms), ("tpot", summary.tpot_ms), ("e2e", summary.e2e_ms))
    return SweepLevel(
        name=called,
        load=load.arrival,
        amount=float(lanes) if lanes is not None else load.offered_rps,
        ok=summary.requests.ok,
        failed=summary.requests.scheduled - summary.requests.ok - summary.requests.cancelled,
        requests_per_s=done,
        output_per_s=output,
        per_gpu=output / gpus if output is not None and gpus else None,
        per_user=1000 / tpot if tpot else None,
        ttft_p50=summary.ttft_ms.p50,
        ttft_p99=summary.ttft_ms.p99,
        tpot_p50=tpot,
        tpot_p99=summary.tpot_ms.p99,
        e2e_p50=summary.e2e_ms.p50,
        unsupported=tuple(f"{n}_{q}" for n, d in shown for q in ("p50", "p99") if q not in d.supported and d.count),
        goodput=summary.goodput.share,
        slo_met=summary.goodput.met,
        valid=summary.verdict.valid,
        state=summary.run.state,
        simulated=summary.target.simulated,
    )


def knee(levels: Sequence[SweepLevel]) -> str:
    """Where more load begins to cost more waiting than it brings: the largest output tokens/s divided by E2E p50
    (Kleinrock 1979: power), among sound levels. "" with fewer than three, or when it is the last one: not reached yet.
    """
    sound = [one for one in levels if one.valid and one.output_per_s and one.e2e_p50]
    if len(sound) < 3:
        return ""
    best = max(sound, key=lambda one: (one.output_per_s or 0) / (one.e2e_p50 or 1))
    return "" if best is sound[-1] else best.name


def pareto(points: Mapping[Name, tuple[float | None, float | None]]) -> set[Name]:
    """The points that no other one beats: none is at least as good in both and better in one. Where either is not known
    a point is not on the front."""
    known = {name: (x, y) for name, (x, y) in points.items() if x is not None and y is not None}
    return {
        name
        for name, (x, y) in known.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in known.values())
    }
