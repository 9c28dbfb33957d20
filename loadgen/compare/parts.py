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

PART_KINDS = ("classes", "steps")
"""The lists of `summary.json` whose entries are compared, with which paths of metrics begin."""

_STEP_FIELDS = ("requests", "bytes", "load", "tokens", "ttft_ms", "tpot_ms", "e2e_ms")
_CLASS_FIELDS = (*_STEP_FIELDS, "goodput", "sessions", "fluidity")


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
    def path_prefix(self) -> str:
        """The start of the paths of its metrics, such as "classes.chat."."""
        return f"{self.kind}.{self.name}."

    @property
    def summary_fields(self) -> tuple[str, ...]:
        """The fields of a summary, such as "ttft_ms", that the part has of its own."""
        return _CLASS_FIELDS if self.kind == "classes" else _STEP_FIELDS

    def find_summary(self, summary: Summary) -> ClassSummary | StepSummary | None:
        """Return the metrics of the class or step in a run, or None if the run does not have it."""
        if self.kind == "classes":
            for request_class in summary.classes:
                if request_class.name == self.class_name:
                    return request_class
            return None

        for step in summary.steps:
            if step.of_class == self.class_name and step.name == self.step_name:
                return step

        return None


def list_shared_parts(first: Side, other: Side) -> Iterator[ComparedPart]:
    """Yield the classes, and then the steps, that every run of both sides has.

    A part that one run lacks cannot be compared, because its metric would be missing there.
    """
    runs = (*first.runs, *other.runs)
    for part in _list_parts(first):
        if all(part.find_summary(run.summary) is not None for run in runs):
            yield part


def restrict_to_part(side: Side, part: ComparedPart) -> Side:
    """Return a side whose runs have the metrics and the records of one part only.

    It can then be estimated and judged as any other side.
    """
    runs = tuple(_restrict_run(run, part) for run in side.runs)
    return msgspec.structs.replace(side, runs=runs)


def _list_parts(side: Side) -> Iterator[ComparedPart]:
    """Yield the classes, and then the steps, that the first run of a side has."""
    if not side.runs:
        return
    summary = side.runs[0].summary
    for request_class in summary.classes:
        yield ComparedPart("classes", request_class.name, "", has_tokens=True)
    for step in summary.steps:
        yield ComparedPart("steps", step.of_class, step.name, has_tokens=step.kind == "chat")


def _restrict_run(run: ComparedRun, part: ComparedPart) -> ComparedRun:
    """Return a run that consists of one request class or step only.

    The metrics of the class or step replace those of the run in its summary. Those that a class or
    step does not have, such as the number of workers, stay as they are. The records, if the run has
    any, are only those of the class or step. The SLO of a class replaces that of the run.
    """
    part_summary = part.find_summary(run.summary)
    part_metrics = {field: getattr(part_summary, field) for field in part.summary_fields}
    summary = msgspec.structs.replace(run.summary, **part_metrics)
    manifest = run.manifest
    records = run.rows
    if manifest is None or records is None:
        return msgspec.structs.replace(run, summary=summary)

    if part.kind == "classes":
        records = records[is_of_class(manifest, part.class_name, records)]
        class_plan = next(plan for plan in manifest.classes if plan.name == part.class_name)
        manifest = msgspec.structs.replace(manifest, slo=class_plan.slo)
    else:
        step_index_of_record = step_indices(manifest, records["request"], records["turn"])
        records = records[step_index_of_record == _find_step_index(manifest, part)]

    return msgspec.structs.replace(run, summary=summary, manifest=manifest, rows=records)


def _find_step_index(manifest: RunManifest, part: ComparedPart) -> int:
    """Return the position of a step in the manifest of a run, which is its number in records."""
    class_and_step_names = [(step.of_class, step.name) for step in manifest.steps]
    return class_and_step_names.index((part.class_name, part.step_name))
