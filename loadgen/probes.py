"""A folder of runs: probes of a search, one folder each, every outcome appended to `probes.jsonl`.

IO; a search goes on from what was told before. A probe is an ordinary run that may end early: over HTTP the watch looks
at the records while they come, in virtual time at those of the whole run, look by look, and the run is then made again
up to where it was decided.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from loadgen import metrics, run, seeds, store
from loadgen.errors import UserError
from loadgen.record import KIND, ROW
from loadgen.search import Answer, Ask, Goal, Look, Search, Told, Watch
from loadgen.workload import Closed, Poisson

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.header import Header
    from loadgen.plan import Settings
    from loadgen.schedule import Schedule
    from loadgen.summary import Summary
    from loadgen.workload import Stage, Workload

LOOK_S = 5.0
MANY = 400_000  # requests: a look at a rack's run is not for nothing
TOLD = "probes.jsonl"
ANSWER = "search.json"
CURVE = "curve.csv"
S = 1_000_000_000
BROKEN = tuple(KIND[name] for name in ("dns", "connect", "tls", "reset", "truncated", "http_5xx", "empty"))
"""Failures that a server gives which is gone or ill; a full one answers 429, or late."""


class Interrupted(Exception):
    """The user stopped a probe."""


@dataclass(slots=True)
class Probes:
    """The folder and what has been told. `make(ask)` is the workload of a probe; `seeded`: each gets its own seed."""

    folder: Path
    goal: Goal
    make: Callable[[Ask], Workload]
    settings: Settings
    seed: int
    seeded: bool = True
    execute: Callable[..., tuple[Summary, Path]] = run.execute

    @property
    def path(self) -> Path:
        return self.folder / TOLD

    def stored(self) -> list[Told]:
        """What an earlier part of the same search has told; a line that was cut off is left out."""
        if not self.path.is_file():
            return []
        found = []
        for line in self.path.read_bytes().splitlines():
            try:
                found.append(msgspec.json.decode(line, type=Told))
            except msgspec.DecodeError:
                break
        return found

    def run(self, ask: Ask) -> Told:
        """Run one probe and store how it came out. Raises Interrupted, or Fault for what stands in the way."""
        told = self._probe(ask)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(told) + b"\n")
        return told

    def _probe(self, ask: Ask) -> Told:
        workload = self._workload(ask)
        name = f"p{ask.number:02d}-{ask.load:.6g}{'-confirm' if ask.kind == 'confirm' else ''}"
        out = self.folder / name
        if out.exists():  # of a probe that was interrupted
            shutil.rmtree(out)
        settings = replace(self.settings, out=out)
        simulated = settings.url is not None and settings.url.startswith("sim:")
        if simulated:
            summary, folder, look, stop_s = self._virtual(workload, settings, ask)
        else:
            summary, folder, look, stop_s = self._live(workload, settings, ask)
        return self._tell(ask, workload, summary, folder, look, stop_s)

    def _workload(self, ask: Ask) -> Workload:
        workload = self.make(ask)
        if not self.seeded:
            return workload.model_copy(update={"seed": self.seed})
        seed = seeds.derived(self.seed, "probe", ask.number) >> 11
        return workload.model_copy(update={"seed": seed, "schedule_seed": None})

    def _watch(self, due: NDArray[np.int64], ask: Ask) -> Watch:
        return Watch(self.goal, due, early_under=ask.early_under)

    def _virtual(self, workload: Workload, settings: Settings, ask: Ask) -> tuple[Summary, Path, Look | None, float]:
        summary, folder = self.execute(workload, settings)
        rows = store.read(folder).rows
        rows = rows[np.argsort(rows["done_ns"], kind="stable")]
        due = _due(workload, rows)
        if due is None:
            return summary, folder, None, 0.0
        watch = self._watch(due, ask)
        last = int(rows["done_ns"].max(initial=0))
        step = round(LOOK_S * S) * (1 + len(rows) // MANY)
        for now in range(step, last, step):
            look = watch.look(now, rows[: np.searchsorted(rows["done_ns"], now, "right")])
            if look.outcome is not None:
                if now >= int(due[-1]):
                    return summary, folder, look, now / S
                shutil.rmtree(folder)
                summary, folder = self.execute(_cut(workload, now), settings)
                return summary, folder, look, now / S
        return summary, folder, None, 0.0

    def _live(self, workload: Workload, settings: Settings, ask: Ask) -> tuple[Summary, Path, Look | None, float]:
        decided: list[tuple[Look, float]] = []
        tasks: list[asyncio.Task[None]] = []
        planned: list[tuple[Schedule, Path]] = []

        def announce(_: Header, timetable: Schedule, folder: Path) -> None:
            planned.append((timetable, folder))

        def on_drive(drive: Any) -> None:
            timetable, folder = planned[0]
            if not hasattr(drive, "stop") or any(span.lanes for span in timetable.stages):
                return  # several workers, or a load whose size nobody knows before: watched to its end

            async def follow() -> None:
                watch = self._watch(_measured_due(timetable), ask)
                tail = Tail(folder)
                while True:
                    await asyncio.sleep(LOOK_S)
                    rows = tail.rows()
                    now = int(rows["done_ns"].max(initial=0))
                    look = watch.look(now, rows)
                    if look.outcome is not None:
                        decided.append((look, now / S))
                        drive.stop()
                        return

            tasks.append(asyncio.get_running_loop().create_task(follow()))

        try:
            summary, folder = self.execute(workload, settings, on_drive=on_drive, announce=announce)
        finally:
            for task in tasks:
                task.cancel()
        if summary.run.state == "interrupted" and not decided:
            raise Interrupted
        return (summary, folder, *(decided[0] if decided else (None, 0.0)))

    def _tell(
        self, ask: Ask, workload: Workload, summary: Summary, folder: Path, look: Look | None, stop_s: float
    ) -> Told:
        rows = store.read(folder).rows
        measured = np.array([stage.measured for stage in summary.stages] or [True])[rows["stage"]]
        rows = rows[measured]
        sent = rows[rows["due_ns"] >= 0]
        spent = summary.window.whole.duration_s or 0.0
        seen_s = stop_s if look is not None and stop_s else _length_s(workload, sent)
        due = sent["due_ns"] - (sent["due_ns"].min() if len(sent) else 0)
        offered = float((due < seen_s * S).sum()) / seen_s if seen_s > 0 and not _closed(workload) else ask.load
        full = len(due) if look is None else offered * _length_s(workload, sent)
        ill = _illness(summary, rows)
        if ill:
            outcome, why = "invalid", ill
        elif look is not None and look.outcome is not None:
            outcome, why = look.outcome, look.why
        else:
            finished = sent[sent["status"] != metrics.CANCELLED]
            missed = self.goal.misses(finished).sum(axis=1)
            allowed = self.goal.allowed(len(finished))
            over = [
                f"{count:,} of {len(finished):,} requests miss {name}, {max(most, 0):,} allowed"
                for name, count, most in zip(self.goal.names, missed, allowed, strict=True)
                if count > most
            ]
            outcome, why = ("over", "; ".join(over)) if over else ("under", "at full length")
        return Told(
            ask=ask,
            outcome=outcome,  # type: ignore[arg-type]
            early=look is not None and outcome != "invalid",
            spent_s=spent,
            offered=offered if offered > 0 and self.seeded else ask.load,  # one timetable for all has no luck in it
            noise=1 / math.sqrt(full) if full > 0 else 0.0,
            why=why,
            folder=folder.name,
            figures=figures(summary),
        )

    def finish(self, search: Search) -> Answer:
        """The answer, written with the data of its plots."""
        answer = search.answer
        self.folder.mkdir(parents=True, exist_ok=True)
        simulated = any(one.figures.get("simulated") for one in search.told)
        stored = {"answer": answer, "simulated": simulated, "goal": list(self.goal.names), "told": search.told}
        store.replace(self.folder / ANSWER, msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n")
        store.replace(self.folder / CURVE, "\n".join(curve(search.told)).encode() + b"\n")
        return answer


class Tail:
    """The rows of a run as its workers append them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[Path, NDArray[np.void]] = {}

    def rows(self) -> NDArray[np.void]:
        """All so far, each worker's in the order of their end."""
        for file in sorted(self._folder.glob("spool/w*.rows")):
            have = self._parts.get(file, np.zeros(0, ROW))
            count = file.stat().st_size // ROW.itemsize - len(have)
            if count > 0:
                new = np.fromfile(file, ROW, count, offset=len(have) * ROW.itemsize)
                self._parts[file] = np.concatenate([have, new])
        parts = list(self._parts.values())
        return np.concatenate(parts) if parts else np.zeros(0, ROW)


FIGURES = (
    "simulated",
    "offered_rps",
    "completed_rps",
    "goodput_rps",
    "output_tokens_per_s",
    "output_tokens_per_s_per_gpu",
    "tokens_per_s_per_user",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
)


def figures(summary: Summary) -> dict[str, float | None]:
    """What tables and plots show of a probe."""
    tokens = summary.tokens.steady_output_per_s
    p50 = summary.tpot_ms.p50
    values = (
        float(summary.target.simulated),
        summary.load.offered_rps,
        summary.load.steady_completed_rps,
        summary.goodput.steady_rps,
        tokens,
        tokens / summary.target.gpus if tokens is not None and summary.target.gpus else None,
        1000 / p50 if p50 else None,
        summary.ttft_ms.p50,
        summary.ttft_ms.p99,
        p50,
        summary.tpot_ms.p99,
    )
    return dict(zip(FIGURES, values, strict=True))


def curve(told: list[Told]) -> Iterator[str]:
    """CSV: load against p99s, goodput and throughput, by load; `pareto` marks the points that no other one beats in
    both tokens/s per GPU (or in all) and tokens/s per user."""
    front = pareto(told)
    yield ",".join(("load", "offered", "outcome", "early", "seconds", *FIGURES, "pareto"))
    for one in sorted(told, key=lambda one: one.ask.load):
        cells: list[Any] = [one.ask.load, one.offered, one.outcome, int(one.early), one.spent_s]
        cells += [one.figures.get(name) for name in FIGURES]
        shown = ("" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells)
        yield ",".join((*shown, str(int(one.ask.number in front))))


def pareto(told: list[Told]) -> set[int]:
    """Numbers of the probes on the Pareto front of throughput (per GPU where known) and speed per user."""
    points = []
    for one in told:
        wide = one.figures.get("output_tokens_per_s_per_gpu") or one.figures.get("output_tokens_per_s")
        fast = one.figures.get("tokens_per_s_per_user")
        if wide and fast and one.outcome != "invalid":
            points.append((wide, fast, one.ask.number))
    return {
        number
        for wide, fast, number in points
        if not any((w >= wide and f > fast) or (w > wide and f >= fast) for w, f, _ in points)
    }


# -- small facts -------------------------------------------------------------------------------------------------------


def _closed(workload: Workload) -> bool:
    return any(isinstance(stage.arrival, Closed) for stage in workload.stages if stage.measured)


def _due(workload: Workload, rows: NDArray[np.void]) -> NDArray[np.int64] | None:
    """The planned instants of an open load: those of its records, since every slot leaves one."""
    if _closed(workload):
        return None
    due = np.sort(rows["due_ns"][rows["due_ns"] >= 0])
    return due if len(due) else None


def _measured_due(timetable: Schedule) -> NDArray[np.int64]:
    parts = [span.offsets + (span.start_ns or 0) for span in timetable.stages if span.measured]
    return np.sort(np.concatenate(parts))


def _cut(workload: Workload, stop_ns: int) -> Workload:
    """The same load up to an instant."""
    stages: list[Stage] = []
    left = stop_ns
    for stage in workload.stages:
        if left <= 0:
            break
        if stage.duration_ns is not None and stage.duration_ns <= left:
            stages.append(stage)
            left -= stage.duration_ns
            continue
        stages.append(stage.model_copy(update={"duration_ns": left, "at_least": None}))
        break
    return workload.model_copy(update={"stages": tuple(stages)})


def _length_s(workload: Workload, sent: NDArray[np.void]) -> float:
    """How long the measured load is meant to last."""
    lengths = [stage.duration_ns for stage in workload.stages if stage.measured]
    if lengths and all(lengths):
        return sum(length for length in lengths if length) / S
    if not len(sent):
        return 0.0
    spread = int(sent["due_ns"].max() - sent["due_ns"].min()) / S
    least = [stage.at_least.duration_ns / S for stage in workload.stages if stage.measured and stage.at_least]
    return max(spread, sum(least))


def _illness(summary: Summary, rows: NDArray[np.void]) -> str:
    """Why a probe says nothing about the load: its generator was late, or the server was gone; "" when it is sound."""
    late = [
        reason
        for reason in summary.verdict.reasons
        if "failed or were lost" not in reason and "requests succeeded" not in reason
    ]
    if late:
        return late[0]
    broken = int(np.isin(rows["kind"], BROKEN).sum())
    if broken > summary.verdict.limits.failure_share * max(len(rows), 1):
        return f"{broken:,} of {len(rows):,} requests met a server that was gone or ill (connections, resets, 5xx)"
    return ""


def loaded(workload: Workload, load: float) -> Workload:
    """The workload at another load: the rate of its measured open stages, or the lanes of its closed ones."""
    stages = []
    for stage in workload.stages:
        law = stage.arrival
        if isinstance(law, Closed):
            law = Closed(concurrency=round(load))
        elif hasattr(law, "rate"):
            law = law.model_copy(update={"rate": load}) if stage.measured else law
        else:
            raise UserError(f"stage {stage.name!r} has no rate to search over", "stages", "give it poisson or constant")
        stages.append(stage.model_copy(update={"arrival": law}))
    return workload.model_copy(update={"stages": tuple(stages)})


def probing(workload: Workload, length_ns: int) -> Workload:
    """The workload as a probe: its measured stages as one Poisson stage of this length; no warm-up, from empty."""
    stage = next(stage for stage in workload.stages if stage.measured)
    law = stage.arrival if isinstance(stage.arrival, Closed) else Poisson(rate=1.0)
    one = stage.model_copy(update={"arrival": law, "duration_ns": length_ns, "count": None, "at_least": None})
    return workload.model_copy(update={"stages": (one,)})


__all__ = ["Interrupted", "Probes", "Tail", "curve", "figures", "loaded", "pareto", "probing"]
