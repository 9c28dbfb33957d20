"""Runs a load that finds its own limit, and reads one back. IO; `adaptive.py` decides."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.core import format, run_folder
from loadgen.core.errors import Fault, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.results import checksums, store
from loadgen.core.results.manifest import AdaptivePlan, Header, decode
from loadgen.core.slo import Slo
from loadgen.core.workload import Closed, Poisson, Workload
from loadgen.repeated import capacity
from loadgen.repeated.capacity import Capacity
from loadgen.search import experiment
from loadgen.search.adaptive import SUSTAIN, Adaptive, StoredAdaptive, replayed
from loadgen.search.adaptive_text import ENDINGS
from loadgen.search.watch import Goal

FILE = "adaptive.json"


class AdaptiveSteering(msgspec.Struct, frozen=True):
    """Steers a run, and stores what it found (`execution.steering.MakeSteering`)."""

    plan: AdaptivePlan
    goal: Goal
    drain_ns: int
    workload: Workload

    def __call__(self) -> Adaptive:
        return Adaptive(self.goal, self.plan, self.drain_ns)

    def finish(self, folder: Path) -> None:
        """Store what the run in this folder found."""
        stored = read(folder)
        assert stored is not None
        store.replace(folder / FILE, dump(stored))
        store.replace(
            folder / capacity.FILE, capacity.dump(found_capacity(folder, stored, self.workload))
        )
        checksums.write(folder)


def dump(stored: StoredAdaptive) -> bytes:
    """The bytes of `adaptive.json`."""
    return format.document(stored)


def prepared(workload: Workload, plan: AdaptivePlan) -> tuple[Workload, AdaptiveSteering]:
    """The workload with the first step as its only stage, and what steers it."""
    steering = AdaptiveSteering(
        plan, Goal(slo=workload.slo or Slo(terms=())), workload.drain_ns, workload
    )
    first = steering().first
    law = (
        Closed.model_construct(concurrency=round(first.load), ramp_ns=_ramp_ns(workload))
        if plan.over == "concurrency"
        else Poisson.model_construct(rate=first.load)
    )
    stage = next(stage for stage in workload.stages if stage.measured).model_copy(
        update={
            "name": first.name,
            "arrival": law,
            "duration_ns": first.length_ns,
            "count": None,
            "at_least": None,
            "measured": False,
        }
    )
    return workload.model_copy(update={"stages": (stage,)}), steering


def _ramp_ns(workload: Workload) -> int | None:
    laws = [stage.arrival for stage in workload.stages if isinstance(stage.arrival, Closed)]
    return laws[-1].ramp_ns if laws else None


def faults(workload: Workload, settings: Settings) -> list[Fault]:
    """What of a workload and its settings an adaptive run cannot have."""
    found: list[Fault] = []
    of_classes = any(
        one.slo is not None for one in getattr(workload.requests, "classes", {}).values()
    )
    if not of_classes and (
        workload.slo is None or not (workload.slo.terms or workload.slo.goodput_share)
    ):
        found.append(
            UserError(
                "no_slo", "no SLO whose limit could be found", "--continuous", "give --slo ttft:2s"
            )
        )
    if hasattr(workload.requests, "steps") or getattr(workload.requests, "turns", None) is not None:
        hint = "without it the search finds their highest rate"
        found.append(
            UserError(
                "unsupported",
                "conversations and tasks last longer than a step",
                "--continuous",
                hint,
            )
        )
    if of_classes:
        hint = "without it the search judges each class by its own"
        found.append(
            UserError("unsupported", "classes with SLOs of their own", "--continuous", hint)
        )
    if settings.workers != 1 or settings.ray is not None:
        flag = "--ray" if settings.ray is not None else f"--workers {settings.workers}"
        hint = "leave it out; or search without --continuous, which takes any number of workers"
        found.append(
            UserError(
                "unsupported",
                "a load that finds its own limit is decided in one process",
                flag,
                hint,
            )
        )
    return found


def read(folder: Path) -> StoredAdaptive | None:
    """What an adaptive run found, made again from its records; None of another run."""
    file = folder / "run.json"
    if not file.is_file() or decode(file.read_bytes(), str(file)).adaptive is None:
        return None
    stored = store.read_run(folder)
    header = stored.header
    assert header.adaptive is not None
    goal = Goal(slo=header.slo or Slo(terms=()))
    controller = Adaptive(goal, header.adaptive, round((header.grace_s or 0) * 1e9))
    replayed(controller, header.stages, stored.rows, interrupted=header.state != "finished")
    if header.state != "finished":
        controller.search.stop("stopped" if header.state == "stopped" else "interrupted")
    _agree(controller, folder)
    sustained = [
        step
        for step in controller.steps
        if step.trial.ask.kind == SUSTAIN and step.trial.outcome == "under"
    ]
    return StoredAdaptive(
        plan=header.adaptive,
        goal=goal.names,
        answer=controller.search.answer,
        steps=tuple(controller.steps),
        sustained_s=header.adaptive.sustain_s if sustained else None,
        simulated=_simulated(header),
        seed=header.seed,
    )


def found_capacity(
    folder: Path, stored: StoredAdaptive, workload: Workload | None = None
) -> Capacity:
    """The capacity that the run is evidence of, the load that it sustained; where it sustained none its state.

    Without the workload its recipe stays empty.
    """
    answer, found = stored.answer, None
    if answer.steady is not None:
        steps = [step.trial for step in stored.steps if step.trial.ask.kind == SUSTAIN]
        found = experiment.highest(folder, steps[-1:], answer, workload=workload)
    shown = experiment.with_state(found, answer)
    if shown.state == "stopped":
        header = decode((folder / "run.json").read_bytes(), str(folder / "run.json"))
        return capacity.of_one_run_stopped(header.command, answer.reason)
    return (
        shown
        if shown.state != "none"
        else msgspec.structs.replace(shown, bound_why=ENDINGS[answer.reason])
    )


def _agree(controller: Adaptive, folder: Path) -> None:
    """Whether the last load grew is said by the summary of the run, which is of that load."""
    last = controller.steps[-1] if controller.steps else None
    if last is None or last.trial.ask.kind != SUSTAIN or last.trial.outcome != "under":
        return
    if not (folder / run_folder.SUMMARY).is_file():
        return
    standing = run_folder.kept_summary(folder).sustainable
    trial = msgspec.structs.replace(
        last.trial, sustained=standing.sustained, sustained_why=standing.why
    )
    controller.search.told[-1] = trial
    controller.steps[-1] = msgspec.structs.replace(last, trial=trial)


def _simulated(header: Header) -> bool:
    return any(target.simulated for target in header.targets)
