"""Predicts how long a load each term of a contract needs for a decision, by runs of a simulated server in virtual time.

Each level is run for several times its own length, from an empty server. The records up to each of a row of lengths are
judged as a run of that length would be; the shortest from which on the term stays decided is what it needs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from loadgen.contracts import level_plan, verdict
from loadgen.contracts.evaluate import MeasuredLevel, Money
from loadgen.contracts.schema import Checked, ContractLevel, Planned
from loadgen.contracts.steady_samples import RecordedRun
from loadgen.contracts.stored_validation import read_run
from loadgen.contracts.verdict import INCONCLUSIVE, LevelForecast, LevelVerdict, NeededLoad
from loadgen.core import format
from loadgen.core.errors import CombinedError, TargetError, codes
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import Execute
from loadgen.core.results.record import ROW
from loadgen.core.run_summary import summarize
from loadgen.core.stats.quantiles import Histogram
from loadgen.sim.record_columns import RecordColumns
from loadgen.sim.server.options import PHYSICAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST = 4.0  # times the length of the level: so long is looked ahead
MOST_REQUESTS = 60_000  # of a level: a simulation of more takes minutes
STEP = 2**0.25  # between one length and the next: what is needed is known to a fifth
SHORTEST = 1 / 16  # of the level's length
JUDGING = 0.5  # of the time to simulate the runs of a level: to judge them at every length


class Ahead(NamedTuple):
    """A run that lasts longer than its level. `rows`: those of `run`, ordered by `began_ns`, so that what a shorter run
    would have brought is the first of them, in the memory of all.
    """

    run: RecordedRun
    began_ns: NDArray[np.int64]
    rows: RecordColumns


Cut = Callable[[str, float], tuple[RecordedRun, ...]]
"""The runs of a level as if they had ended after a share of the length that it is planned with."""


def on(settings: Settings) -> Settings:
    """The simulated server to predict with: the preset that `--url sim:PRESET` names, else the default one."""
    if settings.virtual:
        return settings
    return Settings(
        url=f"sim:{PHYSICAL['preset']}",
        gpus=settings.gpus,
        shape=settings.shape,
        command=settings.command,
    )


def steps(checked: Checked) -> list[float]:
    """How long each step of `predict` takes beside the others; 0 where it is not known before."""
    each = [(planned.requests or 0) * _times(planned, LONGEST) for planned in checked.levels]
    repeats = [planned.level.repeats for planned in checked.levels]
    simulating = [
        requests for requests, times in zip(each, repeats, strict=True) for _ in range(times)
    ]
    return simulating + [
        JUDGING * requests * times for requests, times in zip(each, repeats, strict=True)
    ]


def predict(
    checked: Checked,
    settings: Settings,
    *,
    perform: Execute,
    money: Money | None = None,
    seed: int | None = None,
    longest: float = LONGEST,
    step: Callable[[str], None] = lambda name: None,
) -> tuple[LevelForecast, ...]:
    """The load that each term needs on the simulated server of `settings`, per level of the contract.

    `longest`: so many times the length of a level are simulated, up to MOST_REQUESTS (but never less than the level).
    `step`: told the name of each of the `steps` that begins.
    """
    runs: dict[str, tuple[Ahead, ...]] = {}
    own: dict[str, float] = {}
    trouble: dict[str, LevelForecast] = {}
    for planned in checked.levels:
        name = planned.level.name
        try:
            runs[name] = _simulated(planned, settings, perform, seed, longest, step)
            own[name] = _own_s(planned, runs[name][0].run)
        except (CombinedError, TargetError) as error:
            trouble[name] = LevelForecast(
                name=name,
                length_s=0,
                simulated_s=0,
                terms=(),
                trouble=str(error),
                fault_codes=codes(error),
            )

    @cache  # a level is also what others are compared with
    def cut(name: str, share: float) -> tuple[RecordedRun, ...]:
        return tuple(_up_to(run, share * own[name]) for run in runs[name])

    def forecast(planned: Planned) -> LevelForecast:
        step(f"judging {planned.level.name}")
        return _forecast(checked, planned, runs, own[planned.level.name], cut, money)

    return tuple(trouble.get(planned.level.name) or forecast(planned) for planned in checked.levels)


def _times(planned: Planned, longest: float) -> float:
    """So many times the length of a level are simulated."""
    if not planned.requests:
        return longest
    return max(1.0, min(longest, MOST_REQUESTS / (planned.requests * planned.level.repeats)))


def _simulated(
    planned: Planned,
    settings: Settings,
    perform: Execute,
    seed: int | None,
    longest: float,
    step: Callable[[str], None],
) -> tuple[Ahead, ...]:
    """The runs of a level, each several times as long as it is planned."""
    ahead = _times(planned, longest)
    workload = planned.workload
    if planned.duration_ns is not None:
        workload = level_plan.lasting(workload, round(planned.duration_ns * ahead))
    found = []
    # before the first step nothing tells how long it takes but how much there is to do
    size = (
        ""
        if planned.requests is None
        else f" ({format.counted(round(planned.requests * ahead), 'request')})"
    )
    for number in range(planned.level.repeats):
        run_of_it = f" run {number + 1}" if planned.level.repeats > 1 else ""
        step(f"simulating {planned.level.name}{run_of_it}{size}")
        with tempfile.TemporaryDirectory() as folder:
            own_seed = {} if seed is None else {"seed": seed + number}
            _, kept = perform(
                workload.model_copy(update=own_seed), replace(settings, out=Path(folder) / "run")
            )
            run = replace(
                read_run(kept, Path(folder)), folder=f"{planned.level.name}/r{number + 1}"
            )
            found.append(_in_order(run))
    return tuple(found)


def _forecast(
    checked: Checked,
    planned: Planned,
    runs: dict[str, tuple[Ahead, ...]],
    own_s: float,
    cut: Cut,
    money: Money | None,
) -> LevelForecast:
    """Judges the runs of a level at each length. `own_s`: the length of one run of it as it is planned."""
    contract, level = checked.contract, planned.level
    name, repeats = level.name, level.repeats
    simulated_s = _length_s(runs[name][0].run)

    def judged(length_s: float, open_terms: Collection[int] | None = None) -> LevelVerdict:
        """The level after this time; `open_terms`: of these of its terms alone."""
        asked = level if open_terms is None else _only(level, open_terms)
        others = {term.level for term in (*asked.must, *asked.should) if term.level in runs} | {
            name
        }
        measured = {
            other: MeasuredLevel(runs=cut(other, length_s / own_s))
            for other in runs
            if other in others
        }
        return verdict.levels(contract.model_copy(update={"levels": (asked,)}), measured, money)[0]

    lengths = sorted({own_s, *_lengths(own_s, simulated_s)}, reverse=True)
    at_own, at_last = judged(own_s), judged(lengths[0])
    needed_s: dict[int, float] = {}
    open_terms = list(
        range(len(at_own.terms))
    )  # decided at every length so far: what is shorter counts for no other
    for length_s in lengths:
        if known := {own_s: at_own, lengths[0]: at_last}.get(length_s):
            now = [known.terms[place] for place in open_terms]
        else:
            now = list(judged(length_s, open_terms).terms)
        open_terms = [
            place
            for place, term in zip(open_terms, now, strict=True)
            if term.verdict != INCONCLUSIVE
        ]
        if not open_terms:
            break
        needed_s |= dict.fromkeys(open_terms, length_s * repeats)
    terms = []
    for place, (term, last) in enumerate(zip(at_own.terms, at_last.terms, strict=True)):
        reason = last.reason if last.verdict == INCONCLUSIVE else ""
        needed = needed_s.get(place)
        terms.append(
            NeededLoad(
                kind=term.kind, term=term.term, needed_s=needed, outcome=term.verdict, reason=reason
            )
        )
    return LevelForecast(
        name=name,
        length_s=own_s * repeats,
        simulated_s=simulated_s * repeats,
        terms=tuple(terms),
        trouble="",
    )


def _only(level: ContractLevel, places: Collection[int]) -> ContractLevel:
    """The level with some of its terms, by their places among all."""
    must, should = (
        tuple(term for place, term in enumerate(terms, first) if place in places)
        for first, terms in ((0, level.must), (len(level.must), level.should))
    )
    return level.model_copy(update={"must": must, "should": should})


def _own_s(planned: Planned, run: RecordedRun) -> float:
    """The length of one run of a level as it is planned."""
    simulated_s = _length_s(run)
    return (
        simulated_s if planned.duration_ns is None else min(planned.duration_ns / 1e9, simulated_s)
    )


def _lengths(own_s: float, simulated_s: float) -> list[float]:
    steps = np.arange(
        np.ceil(np.log(SHORTEST) / np.log(STEP)), np.log(simulated_s / own_s) / np.log(STEP) + 1e-9
    )
    return [float(own_s * STEP**step) for step in steps if step]


def _length_s(run: RecordedRun) -> float:
    """How long the measured load of a run was."""
    due = run.columns()["due_ns"]
    planned = [
        (stage.end_ns - stage.start_ns) / 1e9
        for stage in run.header.stages
        if stage.measured and stage.end_ns is not None
    ]
    return sum(planned) if planned else float(due.max() - due.min()) / 1e9


def _in_order(run: RecordedRun) -> Ahead:
    """The run, with its rows in the order in which what they belong to began."""
    began_ns = run.rows["due_ns"]
    if run.header.turns > 1:  # a conversation or task that has begun goes on
        _, of_row = np.unique(run.rows["slot"] // run.header.turns, return_inverse=True)
        first_ns = np.full(of_row.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first_ns, of_row, began_ns)
        began_ns = first_ns[of_row]
    order = np.argsort(began_ns, kind="stable")
    rows: Any = RecordColumns(len(order), {name: run.rows[name][order] for name in ROW.names or ()})
    return Ahead(replace(run, rows=rows), began_ns[order], rows)


def _up_to(ahead: Ahead, length_s: float) -> RecordedRun:
    """The run as if its measured load had ended after this time."""
    run = ahead.run
    start_ns = min((stage.start_ns for stage in run.header.stages if stage.measured), default=0)
    count = int(np.searchsorted(ahead.began_ns, start_ns + round(length_s * 1e9)))
    rows: Any = ahead.rows.part(slice(count))
    stages = tuple(
        msgspec.structs.replace(
            stage,
            slots=int((rows["stage"] == number).sum()),
            end_ns=None
            if stage.end_ns is None
            else min(stage.end_ns, start_ns + round(length_s * 1e9)),
        )
        for number, stage in enumerate(run.header.stages)
    )
    header = msgspec.structs.replace(run.header, stages=stages)
    first = next((number for number, stage in enumerate(stages) if stage.measured), 0)
    gaps = [
        run.gaps if number == first else Histogram() for number in range(len(stages))
    ]  # of the whole run
    return replace(
        run, header=header, rows=rows, summary=summarize(header, rows, gaps, explained=False)
    )
