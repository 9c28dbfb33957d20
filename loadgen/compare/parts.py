"""Restricts the sides of a comparison to one request class, or to one step of its tasks. Pure.

A workload may mix classes of requests, such as short questions and long summaries, and a task of an
agent may consist of named steps. Each of them has metrics of its own in `summary.json`, so two
sides are compared class by class and step by step, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from loadgen.core.metrics.columns import is_of_class, step_indices
from loadgen.core.metrics.part_summaries import ClassSummary, StepSummary
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest
from loadgen.runs.comparison_side import ComparedRun, Side

_STEP_BLOCKS = ("requests", "bytes", "load", "tokens", "ttft_ms", "tpot_ms", "e2e_ms")
_CLASS_BLOCKS = (*_STEP_BLOCKS, "goodput", "sessions")


class ComparedPart(NamedTuple):
    """A request class or a step that the summary of a run has metrics of.

    Attributes:
        kind: The list of `summary.json` that it is in.
        class_name: The name of the class. "" for a step of a workload without classes.
        step_name: The name of the step. "" for a class.
        has_tokens: True if it generates text, so that metrics of tokens apply to it.
    """

    kind: Literal["classes", "steps"]
    class_name: str
    step_name: str
    has_tokens: bool

    @property
    def name(self) -> str:
        """The name in paths of metrics, such as "chat" or "chat.retrieve"."""
        return ".".join(name for name in (self.class_name, self.step_name) if name)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of a summary, such as "ttft_ms", that the part has of its own."""
        return _CLASS_BLOCKS if self.kind == "classes" else _STEP_BLOCKS

    def summary_in(self, summary: Summary) -> ClassSummary | StepSummary | None:
        """Return the metrics of the part in a run, or None if the run does not have the part."""
        if self.kind == "classes":
            classes = (part for part in summary.classes if part.name == self.class_name)
            return next(classes, None)
        steps = (
            step
            for step in summary.steps
            if (step.of_class, step.name) == (self.class_name, self.step_name)
        )
        return next(steps, None)


def shared_parts(first: Side, other: Side) -> Iterator[ComparedPart]:
    """Yield the classes, and then the steps, that every run of both sides has.

    A part that one run lacks cannot be compared, because its metric would be missing there.
    """
    runs = (*first.runs, *other.runs)
    for part in _parts_of(first):
        if all(part.summary_in(run.summary) is not None for run in runs):
            yield part


def restrict_to_part(side: Side, part: ComparedPart) -> Side:
    """Return a side whose runs have the metrics and the records of one part only.

    It can then be estimated and judged as any other side.
    """
    runs = tuple(_restrict_run(run, part) for run in side.runs)
    return msgspec.structs.replace(side, runs=runs)


def _parts_of(side: Side) -> Iterator[ComparedPart]:
    if not side.runs:
        return
    summary = side.runs[0].summary
    for request_class in summary.classes:
        yield ComparedPart("classes", request_class.name, "", has_tokens=True)
    for step in summary.steps:
        yield ComparedPart("steps", step.of_class, step.name, has_tokens=step.kind == "chat")


def _restrict_run(run: ComparedRun, part: ComparedPart) -> ComparedRun:
    """Return a run whose summary, and whose records if it has any, are those of one part.

    Metrics that a part does not have of its own, such as the number of workers, stay as they are.
    The records of a class are judged by the SLO of the class.
    """
    part_summary = part.summary_in(run.summary)
    part_blocks = {block: getattr(part_summary, block) for block in part.blocks}
    summary = msgspec.structs.replace(run.summary, **part_blocks)
    manifest = run.manifest
    rows = run.rows
    if manifest is None or rows is None:
        return ComparedRun(name=run.name, summary=summary, manifest=manifest, rows=rows)
    if part.kind == "classes":
        rows = rows[is_of_class(manifest, part.class_name, rows)]
        slo = next(plan.slo for plan in manifest.classes if plan.name == part.class_name)
        manifest = msgspec.structs.replace(manifest, slo=slo)
    else:
        step_of_row = step_indices(manifest, rows["request"], rows["turn"])
        rows = rows[step_of_row == _step_index(manifest, part)]
    return ComparedRun(name=run.name, summary=summary, manifest=manifest, rows=rows)


def _step_index(manifest: RunManifest, part: ComparedPart) -> int:
    """Return the position of a step in the plan of a run, by which its records are marked."""
    steps = [(plan.of_class, plan.name) for plan in manifest.steps]
    return steps.index((part.class_name, part.step_name))
